"""Make packed tensors plain; values are computed on writing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.selection import cast, replace_state
from ..core.checkpoint.state import State
from ..core.tensors.cast import Caster, CastReports
from ..core.tensors.ref import DType, TensorRef
from ..errors import CkptToolError, Collision, NothingToDo
from ..rooms import need
from .recognise import PackedState, recognise, unknown, without_packing
from .settings import packing_beside


@dataclass(frozen=True, slots=True)
class Dequantized:
    """What became plain.

    Attributes:
        dequantized: how tensors were packed, in words -> how many of them were.
        left_out: names of scales of activations and the like, which a plain model has not.
        settings: the file beside the checkpoint that says how it is packed; "" where there is none.
        casting: which numbers became infinite or 0, complete once the result is saved.
    """

    dequantized: Mapping[str, int]
    left_out: tuple[str, ...]
    settings: str
    casting: CastReports = field(metadata={"json": None})


@takes_checkpoint
def dequantize(
    checkpoint: Checkpoint, *, dtype: DType | None = None, state: str | None = None
) -> tuple[Checkpoint, Dequantized]:
    """Return a checkpoint with the packed tensors of its state as plain ones; others stay.

    Values are those that the library of each scheme computes. They are made when they are written, and those
    of a GGUF are plain already.

    Args:
        checkpoint: the checkpoint; it stays as it is. A `config.json` beside it says how it is packed.
        dtype: the type of all floating-point tensors; None gives each packed one the type that its library
            returns, and leaves the others.
        state: dotted path of the model's state; found when None.

    Raises:
        NothingToDo: no tensor is packed.
        Refused: parts of a tensor are missing or do not fit; once it is written, a scale is no number.
        Unsupported: the scheme is none of those known here.
        Collision: the plain tensor's name is taken.
        Damaged: the settings beside the file are no JSON.
        NoState: there is no state, or none at `state`.
    """
    target = checkpoint.state(state)
    found = recognise(checkpoint, target)
    if found.faults:
        raise found.faults[0]
    if not found.groups and not checkpoint.packed:
        raise _nothing(checkpoint.path, found)
    casters: dict[DType, Caster] = {}
    plain: dict[str, tuple[str, object]] = {}  # name of the part whose place it takes -> name, tensor
    made: dict[tuple[object, ...], TensorRef] = {}
    gone = {*found.unused, *(part for group in found.groups for part in group.parts)}
    for group in found.groups:
        to = dtype or group.dtype
        if group.name in target.container and group.name not in group.parts:
            raise Collision(f"'{group.parts[0]}' would become '{group.name}', which already exists")
        tensor = group.tensor(casters.setdefault(to, Caster(to)))
        form = group.scheme, to.name, group.shape, *(_identity(target, part) for part in group.parts)
        plain[group.parts[0]] = group.name, made.setdefault(form, tensor)  # what was tied stays tied

    def change(old: dict[object, object]) -> dict[object, object]:
        stay = ((key, value) for key, value in old.items() if key not in gone or key in plain)
        return dict(plain.get(str(key), (key, value)) for key, value in stay)

    new, reports = replace_state(checkpoint, target, change), [caster.report for caster in casters.values()]
    new = replace(new, metadata=without_packing(checkpoint.metadata))
    if dtype is not None:
        with suppress(NothingToDo):  # the others have that type already
            new, report = cast(new, dtype, state=state)
            reports.append(report)
    schemes = Counter(group.scheme for group in found.groups)
    if checkpoint.packed:
        known = need("gguf.reading").PACKED_NAMES
        schemes.update({kind: count for kind, count in checkpoint.packed.items() if kind in known})
    return new, Dequantized(schemes, found.unused, found.settings.path, CastReports(reports=reports))


def _identity(state: State, name: str) -> object:
    """Return a key that the parts of tied packed tensors share."""
    tensor = state.tensors.get(name)
    return id(state.container.get(name)) if tensor is None else tensor.view


def _nothing(path: str, found: PackedState) -> CkptToolError:
    if found.bare:
        hint = f"they are plain numbers, so cast them: --dtype bf16 (the first is '{found.bare[0][:80]}')"
        return NothingToDo(f"{path}: its 8-bit floats have no scales", hint=hint)
    nothing = NothingToDo(f"{path}: no tensor is quantised")
    return next(unknown(path, packing_beside(path)), nothing)
