"""Fold what a wrapper computes into plain tensors: what it is in a state, and a checkpoint without it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.selection import replace_state
from ..core.checkpoint.special_tensors import require_plain, with_plain_tensor
from ..core.checkpoint.state import State
from ..core.tensors.cast import CastReport, CastReports
from ..core.tensors.ref import TensorRef
from ..core.words import noted
from ..errors import Collision, NothingToDo, UsageFault
from ..rooms import find, need
from .wrappers import wrapped_in

# In the order in which they are folded: what one makes may be a part of the next.
KINDS = {"mask": "masks of pruning", "norm": "weight or spectral norm", "lora": "an adapter"}


@dataclass(frozen=True, slots=True)
class Folded:
    """What was folded.

    Attributes:
        folded: kind -> how many tensors were computed.
        casting: which numbers became infinite or NaN, complete once the result is saved.
        merged: what `merge_lora` says of an adapter; None without `lora`.
        adapters_left_out: names of other adapters in the state.
    """

    folded: Mapping[str, int]
    casting: CastReports = field(metadata={"json": None})
    merged: Any = field(default=None, metadata={"json": None})
    adapters_left_out: tuple[str, ...] = noted("other adapters, left out")


def folds_in(state: State) -> dict[str, int]:
    """Return how many tensors of a state each kind would make, of those that it has."""
    counts = Counter(each.kind for each in wrapped_in(state.tensors) if each.form)
    if (inside := find("lora.inside")) is not None:
        found = inside.adapters_in(state)
        counts["lora"] = max(map(len, found.keys.values()), default=0)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


@takes_checkpoint
def fold(
    checkpoint: Checkpoint,
    kinds: Iterable[str],
    *,
    adapter: str | None = None,
    alpha: float | None = None,
    state: str | None = None,
) -> tuple[Checkpoint, Folded]:
    """Return a checkpoint with plain tensors in place of what a wrapper computes each from.

    Values are computed in float64 when they are written, a few rows at a time, and rounded once to the type
    of the weight. Tied tensors stay tied.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        kinds: of `mask` (pruning), `norm` (weight norm, spectral norm) and `lora` (an adapter inside).
        adapter: the adapter's name, where there are several.
        alpha: the adapter's, where no settings beside the file say it.
        state: dotted path of the model's state; found when None.

    Raises:
        UsageFault: there is no such kind.
        NothingToDo: the state has nothing of a kind.
        Refused: nothing shows how a tensor is computed; or as `merge_lora` raises it.
        Collision: the plain tensor's name is taken.
        NoState: there is no state, or none at `state`.
        MissingRoom: adapters are not installed.
    """
    asked = dict.fromkeys(kinds)
    if unknown := [kind for kind in asked if kind not in KINDS] or ([""] if not asked else []):
        raise UsageFault(f"--fold {unknown[0]}: no kind of wrapper", hint=f"of {', '.join(KINDS)}")
    done: dict[str, int] = {}
    reports: list[CastReport] = []
    merged, others = None, ()
    for kind in (kind for kind in KINDS if kind in asked and kind != "lora"):
        checkpoint, done[kind] = _folded(checkpoint, kind, reports, state)
    if "lora" in asked:
        inside = need("lora.inside")
        checkpoint, merged, others = inside.fold_lora(checkpoint, adapter=adapter, alpha=alpha, state=state)
        done["lora"] = len(merged.updated) + len(merged.replaced)
        reports.append(merged.casting)
    return checkpoint, Folded(done, CastReports(reports=reports), merged, others)


def _folded(
    checkpoint: Checkpoint, kind: str, reports: list[CastReport], state: str | None
) -> tuple[Checkpoint, int]:
    target, path = checkpoint.state(state), checkpoint.path
    require_plain(path, target.likes, "can't be computed with")
    found = [each for each in wrapped_in(target.tensors) if each.kind == kind]
    if not found:
        hint = f"see what is in it: ckpttool inspect {shlex.quote(path)}"
        raise NothingToDo(f"{path}: nothing in it is computed by {KINDS[kind]}", hint=hint)
    gone = {part for each in found for part in each.parts}
    plain: dict[object, tuple[str, TensorRef]] = {}
    made: dict[tuple[object, ...], TensorRef] = {}
    for each in found:
        ties = tuple(target.tensors[part].view for part in each.parts)
        if ties not in made:
            reports.append(CastReport())
            made[ties] = each.tensor(path, target.tensors, reports[-1])
        plain[each.parts[0]] = each.name, made[ties]
    if taken := [each for each in found if each.name in target.container]:
        raise Collision(f"'{taken[0].parts[0]}' would become '{taken[0].name}', which already exists")

    def changed(key: object, value: object) -> tuple[object, object]:
        name, tensor = plain.get(key, (key, None))
        return name, value if tensor is None else with_plain_tensor(value, tensor)

    def change(old: dict[Any, Any]) -> dict[Any, Any]:
        return dict(changed(*entry) for entry in old.items() if entry[0] not in gone or entry[0] in plain)

    return replace_state(checkpoint, target, change), len(found)
