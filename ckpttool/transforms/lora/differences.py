"""In which tensors two models differ, which of these can be factors of an adapter, and its settings."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.state import State
from ...errors import NothingToDo, Refused
from ...lazy import np
from ...tensors.dtypes import PLAIN_FLOATS
from ...tensors.ref import TensorRef
from ...tensors.values import CHUNK, in_pieces, require_bounded
from ...words import counted
from ..keys import stripping
from .low_rank import Difference
from .merge import orientations
from .ties import EMBEDDINGS, config_of, is_embedding, is_output

POSITIONS = {"wpe", "shared", "embeddings"}


class Differences:
    """Which tensors of two models differ, and which of them are the weights of layers."""

    def __init__(self, base: Checkpoint, a: State, tuned: Checkpoint, b: State) -> None:
        self.paths, self.a, self.b = (base.path, tuned.path), a.tensors, b.tensors
        self.compare = f"ckpttool diff --model-only {shlex.quote(base.path)} {shlex.quote(tuned.path)}"
        if absent := [name for name in self.a if name not in self.b]:
            hint = stripping(base.path, a, b) or stripping(tuned.path, b, a) or self.compare
            raise Refused(tuned.path, f"has no '{absent[0]}', which {base.path} has", hint=hint)
        self.modules: list[str] = []
        self.others: list[str] = []
        self.same: list[str] = []
        self.cast: list[str] = []
        self.ties: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
        for name, tensor in self.a.items():
            self.ties[tensor.view].append(name)
        for names in self.ties.values():
            self._sort(names)
        self.others += (name for name in self.b if name not in self.a)
        kinds = orientations(self.a)
        self.turned = {module for module in self.modules if self._is_turned(module, kinds)}
        self._require_one_kind()

    def _sort(self, names: list[str]) -> None:
        """Put a tensor of the base, under all of its names, where it belongs."""
        first = names[0]
        base, tuned = self.a[first], self.b[first]
        for name in names:
            other = self.b[name]
            if other.shape != base.shape:
                shapes = f"{list(base.shape)}, and {list(other.shape)} in {self.paths[1]}"
                raise Refused(self.paths[0], f"'{name}' has the shape {shapes}", hint=self.compare)
            require_bounded(name, other)
            if other.view != tuned.view and not _is_equal(other, tuned):
                what = f"ties '{first}' and '{name}', which are two tensors in {self.paths[1]}"
                hint = f"give each its own: ckpttool convert {shlex.quote(self.paths[0])} OUT --keep-copies"
                raise Refused(self.paths[0], what, hint=hint)
        require_bounded(first, base)
        is_layer = _is_layer(names, base, tuned)
        if not _differs(base, tuned, numbers=is_layer):
            self.same += names
        elif not is_layer:
            self.others += names
        else:
            self._require_finite(first)
            self.modules.append(first.removesuffix(".weight"))
            self.cast += [first] if base.dtype is not tuned.dtype else []

    def _require_finite(self, name: str) -> None:
        for _, block in Difference(self.a[name], self.b[name]).rows():
            if not np.isfinite(block).all():
                hint = f"see which: ckpttool verify {shlex.quote(self.paths[1])}"
                what = f"'{name}' has NaN or infinity, or differs by more than float64 holds"
                raise Refused(self.paths[1], what, hint=hint)

    def _is_turned(self, module: str, kinds: Mapping[tuple[str, bool], str]) -> bool:
        """Return whether a layer is a Conv1D, by its bias or that of a layer beside it."""
        rows, *more = self.a[f"{module}.weight"].shape
        if len(more) != 1:
            return False
        parent = module.rpartition(".")[0]
        bias = self.a.get(f"{module}.bias")
        if rows == more[0] or bias is None:
            return (parent, True) in kinds and (parent, False) not in kinds
        return bias.shape == (more[0],)

    def _require_one_kind(self) -> None:
        """Refuse square layers beside both kinds: an adapter has one setting for all."""
        matrices = [module for module in self.modules if len(self.a[f"{module}.weight"].shape) == 2]
        square = [m for m in matrices if len({*self.a[f"{m}.weight"].shape}) == 1]
        if self.turned and square and self.turned != {*matrices}:
            other = next(module for module in matrices if module not in self.turned)
            what = f"'{other}' is a Linear, others are Conv1D, and no adapter says which '{square[0]}' is"
            hint = "extract them apart: ckpttool convert TUNED PART --only GLOB, and the same of BASE"
            raise Refused(self.paths[1], f"{what}: its weight is square", hint=hint)

    def require(self, others: str | None) -> None:
        """Raise NothingToDo where no layer differs, and Refused where others do that nobody spoke of."""
        count = counted(len(self.others), "tensor")
        if not self.modules:
            what = f"{self.paths[1]}: no layer differs from {self.paths[0]}"
            do = "does" if len(self.others) == 1 else "do"
            rest = f"; {count} {do} that can't be factors" if self.others else ""
            raise NothingToDo(what + rest, hint=self.compare)
        if self.others and others is None:
            names = ", ".join(f"'{name}'" for name in self.others[:3]) + (", …" if self.others[3:] else "")
            differ = "differs" if len(self.others) == 1 else "differ"
            what = f"{count} {differ} from {self.paths[0]} and can't be factors: {names}"
            hint = "--others save puts them into the adapter whole, --others drop leaves them out"
            raise Refused(self.paths[1], what, hint=hint)

    def whole(self) -> dict[str, TensorRef]:
        """Return what the adapter holds whole, by its names behind PEFT's prefix."""
        layers = {*self.modules}
        named = {name: self.b[name] for name in self.others}
        if (tied := self._unnamed_output()) is not None:
            named["lm_head.weight"] = tied
        return {
            f"{module}.base_layer.bias" if kind == "bias" and module in layers else name: tensor
            for name, tensor in named.items()
            for module, _, kind in [name.rpartition(".")]
        }

    def _unnamed_output(self) -> TensorRef | None:
        """Return the embedding that an output layer without a name of its own may be tied to."""
        if config_of(self.paths[0]).get("tie_word_embeddings") is False or any(map(is_output, self.b)):
            return None
        return next((self.b[name] for name in self.others if is_embedding(name)), None)

    def config(self, rank: int, ranks: Mapping[str, int], whole: Mapping[str, TensorRef]) -> dict[str, Any]:
        """Return the settings of the adapter; alpha is the rank, so that nothing is scaled."""
        modules = {name.rpartition(".")[0] for name in whole if ".base_layer." not in name}
        settings: dict[str, Any] = {
            "peft_type": "LORA",
            "base_model_name_or_path": None,
            "task_type": None,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "target_modules": [*ranks],
            "fan_in_fan_out": bool(self.turned),
            "bias": "lora_only" if any(".base_layer." in name for name in whole) else "none",
            "modules_to_save": sorted(filter(None, modules)) or None,
            "init_lora_weights": True,
        }
        views = [tensor.view for tensor in whole.values()]
        if len({*views}) < len(views):
            settings["ensure_weight_tying"] = True
        patterns = _patterns(rank, ranks)
        return settings | {"rank_pattern": patterns, "alpha_pattern": patterns}


def _patterns(rank: int, ranks: Mapping[str, int]) -> dict[str, int]:
    """Return the ranks of layers that have another. A key fits names that end in it; the first one wins."""
    lowered = {name for name, each in ranks.items() if each != rank}
    ends = {-len(name) for name in lowered}

    def is_fitted(name: str) -> bool:
        return any(name[end:] in lowered and name[end - 1 : end] in (".", "") for end in ends)

    needed = filter(is_fitted, ranks)
    return {name: ranks[name] for name in sorted(needed, key=len, reverse=True)}


def _is_layer(names: Iterable[str], *tensors: TensorRef) -> bool:
    """Return whether a tensor is the weight of a linear layer or a convolution, under all its names."""
    sizes = tensors[0].shape
    if len(sizes) < 2 or not prod(sizes) or any(tensor.dtype.name not in PLAIN_FLOATS for tensor in tensors):
        return False
    modules = [name.removesuffix(".weight").rpartition(".")[2] for name in names if name.endswith(".weight")]
    embeddings = (module in EMBEDDINGS | POSITIONS or "embed" in module for module in modules)
    return len(modules) == len([*names]) and not any(embeddings)


def _differs(base: TensorRef, tuned: TensorRef, *, numbers: bool) -> bool:
    """Return whether two tensors differ, bit for bit or as numbers."""
    if not numbers or base.dtype is tuned.dtype:
        is_same = _is_equal(base, tuned)
        if is_same or not numbers:
            return not is_same
    return any(block.any() for _, block in Difference(base, tuned).rows())


def _is_equal(one: TensorRef, other: TensorRef) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(in_pieces(one, CHUNK), in_pieces(other, CHUNK), strict=True))
