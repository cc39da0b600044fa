"""An adapter inside its base: a state with both, as a model in training has them, taken apart.

PEFT wraps a layer: its own tensors are below `base_layer`, and the parts of each adapter have the adapter's
name behind them. A module that is trained whole is there twice. torchtune puts `lora_a` and `lora_b` beside
the layer's weight. Alpha is in no tensor, but in a file beside the state: PEFT's, or verl's
`lora_train_meta.json`. Sources: PEFT 0.21, `utils/save_and_load.py`, `tuners/lora/layer.py`; torchtune,
`modules/peft/lora.py`; verl, `utils/fsdp_utils.py`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.keys import rename_keys
from ..core.checkpoint.prefixes import MAX_LEVELS
from ..core.checkpoint.selection import replace_state
from ..core.checkpoint.settings import settings_beside
from ..core.checkpoint.special_tensors import require_plain
from ..core.checkpoint.state import State
from ..core.inert_pickle.values import OrderedDict_
from ..core.words import first_few, noted
from ..errors import NothingToDo, Refused, Unsupported
from .adapter import CONFIG, PREFIX, Adapter
from .formulas import PRODUCTS, kind_of, of_weight, products_of
from .merge import Merged, merge_lora

META = "lora_train_meta.json"  # verl's: r, lora_alpha, task_type
TYPES = {"hada": "LOHA", "lokr": "LOKR", "oft_R": "OFT", "trainable_tokens_delta": "TRAINABLE_TOKENS"}

# A part of an adapter that has a name, of torchtune's, and of a module that an adapter holds whole.
PART = re.compile(
    r"(.+\.(?:lora_(?:embedding_)?[AB]|lora_magnitude_vector|hada_[wt]\d\w*|lokr_[wt]\d\w*|oft_R"
    r"|trainable_tokens_delta))\.(?!(?:weight|bias)$)([^.]+)((?:\.weight|\.bias)?)"
)
OF_TORCHTUNE = re.compile(r"(.+)\.(?:lora_([ab])\.weight|magnitude)")
WHOLE = re.compile(r"(.+)\.modules_to_save\.([^.]+)(\..+)")

MARK = re.compile(r"\.(?:base_layer|original_module|lora_a)\.")

# What a wrapper puts into the names of the base.
WRAPPED = re.compile(r"(.+?)(?:\.token_adapter)?\.(?:base_layer|original_module)\.")
RULES = [(re.escape(PREFIX), ""), (WRAPPED.pattern, r"\1.")]


@dataclass(frozen=True, slots=True)
class Inside:
    """The adapters inside a state, by name; torchtune's is "".

    Attributes:
        keys: of each: PEFT's name of a tensor in a file of its own -> its key in the state.
        whole: of each: modules that it holds whole.
        wrapped: modules of the base inside a wrapper.
    """

    keys: Mapping[str, dict[str, str]]
    whole: Mapping[str, set[str]]
    wrapped: frozenset[str]


@dataclass(frozen=True, slots=True)
class TakenOut:
    """An adapter that was taken out of a model.

    Attributes:
        rank, alpha: what its settings say of most layers.
        adapters_left: names of other adapters inside.
    """

    rank: float | None
    alpha: float | None
    adapters_left: tuple[str, ...] = noted("other adapters, which stay")


def adapters_in(state: State) -> Inside:
    """Return the adapters inside a state; of an adapter alone, none."""
    if MARK.search("\n".join(state.tensors)) is None:  # which is looked for in each file that is shown
        return Inside({}, {}, frozenset())
    keys, whole = defaultdict[str, dict[str, str]](dict), defaultdict[str, set[str]](set)
    names = {key: "".join(key.rpartition(PREFIX)[::2]) for key in state.tensors}
    for key, name in names.items():
        if match := PART.fullmatch(name):
            end = "" if match[1].endswith("_vector") else match[3]
            keys[match[2]][f"{PREFIX}{match[1]}{end}"] = key
        elif match := WHOLE.fullmatch(name):
            keys[match[2]][f"{PREFIX}{match[1]}{match[3]}"] = key
            whole[match[2]].add(match[1])
        elif match := OF_TORCHTUNE.fullmatch(name):
            module = key.removesuffix(name) + match[1]
            if {f"{module}.lora_a.weight", f"{module}.weight"} <= state.tensors.keys():
                part = f"lora_{match[2].upper()}.weight" if match[2] else "lora_magnitude_vector"
                keys[""][f"{PREFIX}{match[1]}.{part}"] = key
    wrapped = frozenset(match[1] for name in names.values() if (match := WRAPPED.match(name)))
    return Inside(keys if wrapped or "" in keys else {}, whole, wrapped)


@takes_checkpoint
def take_apart(
    checkpoint: Checkpoint,
    *,
    adapter: str | None = None,
    alpha: float | None = None,
    state: str | None = None,
) -> tuple[Checkpoint, Adapter, tuple[str, ...]]:
    """Return the base and an adapter of a state that holds both, and the names of other adapters in it.

    Args:
        checkpoint: the checkpoint; it stays as it is, and must stay open.
        adapter: the adapter's name; needed where there are several.
        alpha: of all its layers; None for that of the settings beside the file.
        state: dotted path of the model's state; found when None.

    Raises:
        NothingToDo: there is no adapter inside.
        Refused: which of several adapters is meant is not said, or alpha is not.
        Unsupported: a layer has a part of no adapter that is known.
        Damaged: the settings are no JSON object.
        NoState: there is no state, or none at `state`.
    """
    target, path = checkpoint.state(state), checkpoint.path
    require_plain(path, target.likes, "can't be taken apart")
    inside = adapters_in(target)
    name = _chosen(path, inside, adapter)
    gone = {key for those in inside.keys.values() for key in those.values()}
    _require_known(path, [key for key in target.tensors if key not in gone], inside.wrapped)
    base = replace_state(checkpoint, target, lambda old: {k: v for k, v in old.items() if k not in gone})
    with suppress(NothingToDo):  # torchtune's names are the model's own
        base, _ = rename_keys(base, RULES, state=target.where)
    tensors = {own: target.tensors[key] for own, key in inside.keys[name].items()}
    held = replace(checkpoint, tree=OrderedDict_(tensors), opened=(), full=False, metadata={"format": "pt"})
    place, said = _settings_beside(checkpoint, name, is_alone=len(inside.keys) == 1)
    bare = Adapter(held, said, said_in=os.path.basename(place) or CONFIG)
    config = _config(bare, inside.whole.get(name, set()), alpha)
    return base, replace(bare, config=config), tuple(each for each in inside.keys if each != name)


def fold_lora(
    checkpoint: Checkpoint,
    *,
    adapter: str | None = None,
    alpha: float | None = None,
    state: str | None = None,
) -> tuple[Checkpoint, Merged, tuple[str, ...]]:
    """Return a checkpoint in which the adapter inside is added to its base, as `merge_lora` does.

    Takes what `take_apart` does, and raises what both do; the names are those of adapters that are left out.
    """
    base, inner, others = take_apart(checkpoint, adapter=adapter, alpha=alpha, state=state)
    new, merged = merge_lora(base, inner, state=state)
    return new, merged, others


def _chosen(path: str, inside: Inside, adapter: str | None) -> str:
    names = [*inside.keys]
    if not names:
        what = f"{path}: no adapter is inside it"
        why = " that is known, though layers are wrapped for one" if inside.wrapped else ""
        raise NothingToDo(what + why, hint="ckpttool merge-lora BASE ADAPTER OUT adds one that is a file")
    if adapter is None and len(names) == 1:
        return names[0]
    if adapter not in names:
        listed = first_few([f"'{name[:80]}'" for name in names], 8)
        what = f"holds the {'adapters' if names[1:] else 'adapter'} {listed}"
        what += f", and no '{adapter[:80]}'" if adapter is not None else ""
        raise Refused(path, what, hint=f"name the one to take: --adapter {shlex.quote(names[0])}")
    return adapter


def _require_known(path: str, keys: list[str], wrapped: frozenset[str]) -> None:
    """Refuse what is in a wrapped module beside its base: a part of a kind that is not known here."""
    for key in keys:
        name = "".join(key.rpartition(PREFIX)[::2])
        parents = accumulate(name.split(".")[: MAX_LEVELS + 1][:-1], "{}.{}".format)
        if not WRAPPED.match(name) and not wrapped.isdisjoint(parents):
            what = f"holds '{key[:80]}', which is no part of an adapter that is known"
            raise Unsupported(path, what, hint="merge it in Python: merge_and_unload()")


def _settings_beside(checkpoint: Checkpoint, name: str, *, is_alone: bool) -> tuple[str, dict[str, Any]]:
    """Return the settings of an adapter. Of several, only the default one's lie in the folder itself."""
    is_usual = name in ("", "default")
    names = [] if is_usual else [f"{name}/{CONFIG}"]
    names += [CONFIG, META, f"lora_adapter/{CONFIG}"] if is_usual or is_alone else []
    return settings_beside(checkpoint.source.place, *names)


def _config(adapter: Adapter, whole: set[str], alpha: float | None) -> dict[str, Any]:
    """Return PEFT's settings: those that are said, and for others what the tensors say."""
    parts = {module: of_weight(those) for module, those in adapter.parts()[0].items()}
    kinds = {module: kind_of(those) for module, those in parts.items()}
    products = {module: products_of(those) or [] for module, those in parts.items()}
    ranks = {
        name: max(set().union(*(each.ranks for each in those)), default=1) for name, those in products.items()
    }
    scaled = [module for module, kind in kinds.items() if PRODUCTS.get(kind)]
    usual = Counter(ranks[module] for module in scaled).most_common()
    others = sorted(scaled, key=len, reverse=True) if usual[1:] else ()
    first = next(iter(kinds.values()), "")
    config = {
        "peft_type": TYPES.get(first, "LORA"),
        "task_type": None,
        "inference_mode": True,
        "r": usual[0][0] if usual else 8,
        "rank_pattern": {name: ranks[name] for name in others},
        "target_modules": sorted(parts),
        "bias": "none",
        "use_dora": any("lora_magnitude_vector" in those for those in adapter.parts()[0].values()),
        **adapter.config,
    }
    config["modules_to_save"] = sorted({*adapter.saved_modules(), *whole}) or None
    named = replace(adapter, config=config).alpha_name
    if alpha is not None:
        config |= {named: alpha, "alpha_pattern": {}}
    if scaled and named not in config:
        what = f"does not say the alpha of its adapter, and no {CONFIG} or {META} is beside it"
        raise Refused(adapter.checkpoint.path, what, hint="say what it was trained with: --alpha 16")
    return config
