"""Whole parameters from the tensor-parallel parts of a DeepSpeed run, by the rules that its files state.

`universal_checkpoint_info` in the model states lists patterns of names: those cut by rows (dimension 1),
those that each part has whole, those of several stretches that were cut each by itself (a fused q, k and v),
and those padded to a larger vocabulary. All others were cut along dimension 0. Without it nothing says how.
Source: DeepSpeed's `checkpoint/ds_to_universal.py` and `checkpoint/constants.py`, to 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..core.checkpoint.checkpoint import HINT
from ..core.checkpoint.special_tensors import attributes
from ..core.inert_pickle.values import tensor_of
from ..core.tensors.ref import TensorRef
from ..errors import Damaged, Unsupported
from . import zero
from .deepspeed_parts import Values, place_of, shared
from .pieces import MAX_RANKS, RankPiece, Wholes

INFO = "universal_checkpoint_info"

# A group or a count that repeats, or many repetitions: matching it to a name may take very long.
ENDLESS = re.compile(r"\)[*+{?]|\{|(?:[*+].*){5}", re.DOTALL)

HINT_OF_RULES = (
    "load it into the framework that wrote it, on as many ranks, and save it from there; "
    "or merge a universal folder of it"
)


class Cuts(NamedTuple):
    """How a parameter was cut: along a dimension, each of its stretches by itself."""

    dim: int
    widths: Sequence[Sequence[int]]  # of each stretch, how much of it each part has
    vocabulary: int | None = None  # how much of dimension 0 is no padding; None for all


def whole(path: str, slices: Sequence[Values], facts: Mapping[Any, Any], wholes: Wholes) -> Values:
    """Return the module and the optimizer of a run, by name, from those of its tensor-parallel parts."""
    first = slices[0]
    if len(slices) == 1:
        return first
    rules = _Rules(path, len(slices), facts.get(INFO))
    module, state = {}, dict[str, Values]()
    for name in dict.fromkeys(name for each in slices for name in each["module"]):
        for part, each in enumerate(slices):
            if name not in each["module"]:
                raise Damaged(path, f"has no '{name[:80]}' in tensor-parallel part {part}", hint=HINT)
        values = [each["module"][name] for each in slices]
        tensors = [tensor for value in values if (tensor := tensor_of(value)) is not None]
        is_cut = name not in first["buffers"] and len(tensors) == len(values) and bool(tensors[0].shape)
        cuts = rules.of(name, tensors) if is_cut else None
        module[name] = _joined(wholes, place_of(name), values, cuts)
        for key in attributes(first["optimizer"]).get("state", {}).get(name, ()):
            kept = [each["optimizer"]["state"].get(name, {}).get(key) for each in slices]
            if any(value is None for value in kept):
                raise Damaged(path, f"has '{name[:80]}.{key}' in some tensor-parallel parts alone", hint=HINT)
            alike = [getattr(tensor_of(value), "shape", ()) for value in kept] == [t.shape for t in tensors]
            state.setdefault(name, {})[key] = _joined(
                wholes, place_of(name, key), kept, cuts if alike else None
            )
    return {"module": module, "optimizer": first["optimizer"] and {**first["optimizer"], "state": state}}


def _joined(wholes: Wholes, name: str, values: Sequence[Any], cuts: Cuts | None) -> Any:
    """Return the values of tensor-parallel parts as one; those that were not cut are compared."""
    if cuts is None:
        return shared(wholes, name, [*enumerate(values)])
    tensors = [tensor for value in values if (tensor := tensor_of(value)) is not None]
    at, done, shape = 0, [0] * len(tensors), list(tensors[0].shape)
    pieces: list[RankPiece] = []
    for widths in cuts.widths:
        for part, (tensor, width) in enumerate(zip(tensors, widths, strict=True)):
            begin = tuple(at if dim == cuts.dim else 0 for dim in range(len(shape)))
            pieces.append(RankPiece(part, begin, _stretch(tensor, cuts.dim, done[part], width)))
            at, done[part] = at + width, done[part] + width
    shape[cuts.dim] = at
    found = zero.alone(wholes.tensor(name, tensors[0].dtype, tuple(shape), pieces))
    return found if cuts.vocabulary is None else zero.alone(_stretch(found, 0, 0, cuts.vocabulary))


def _stretch(tensor: TensorRef, dim: int, start: int, size: int) -> TensorRef:
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    return replace(tensor, shape=shape, offset=tensor.offset + start * tensor.stride[dim])


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a run's files say of how parameters were cut."""

    path: str
    parts: int  # how many tensor-parallel parts there are
    info: Any  # what they say

    def of(self, name: str, tensors: Sequence[TensorRef]) -> Cuts | None:
        """Return how a parameter was cut; None where each part has all of it."""
        if not isinstance(self.info, dict):
            raise self._unsupported(
                f"cut '{name[:80]}' over {self.parts} tensor-parallel parts: no file says how"
            )
        if self._lists("autotp_unsupported_parameter_patterns", name):
            raise self._unsupported(f"cut '{name[:80]}' in a way that DeepSpeed has no rule for")
        # What DeepSpeed would average is the same on all parts, if nothing went wrong: it is compared.
        if self._lists("tp_replicated_parameter_patterns", name):
            return None
        if self._lists("parameter_to_average_patterns", name):
            return None
        cuts = self._stretches(name, tensors)
        if cuts is None:
            dim = 1 if self._lists("parameter_with_row_parallelism_patterns", name) else 0
            halves = 2 if self._lists("parameter_with_2_sub_params_cat_dim_0", name) else 1
            lengths = [tensor.shape[dim] if dim < len(tensor.shape) else -1 for tensor in tensors]
            cuts = Cuts(dim, [[length // halves for length in lengths]] * halves)
        if self._lists("vocabulary_parameter_patterns", name):
            cuts = cuts._replace(vocabulary=self.info.get("original_vocab_size", -1))
        if not _fill(cuts, tensors):
            raise self._unsupported(f"cut '{name[:80]}' in another way than its model states say")
        return cuts

    def _stretches(self, name: str, tensors: Sequence[TensorRef]) -> Cuts | None:
        """Return how a parameter of several stretches was cut; None if it is listed as none."""
        for each in self.info.get("parameter_with_sub_params") or ():
            described = attributes(each)
            for pattern in self._matching(described.get("patterns"), name):
                dim, form = described.get("partition_dim"), described.get("shape")
                widths = attributes(self.info.get("sub_param_shard_widths")).get(pattern)
                if not isinstance(form, list | tuple) or type(dim) is not int or not 0 <= dim < len(form):
                    return Cuts(-1, ())
                if len(form) != len(tensors[0].shape):
                    return Cuts(-1, ())
                return Cuts(dim, widths or _evenly(form[dim], [tensor.shape[dim] for tensor in tensors]))
        return None

    def _lists(self, kind: str, name: str) -> bool:
        return any(True for _ in self._matching(self.info.get(kind), name))

    def _matching(self, patterns: object, name: str) -> Iterator[str]:
        """Yield the patterns of a name. Raises Damaged for one that is none of names."""
        for pattern in patterns if isinstance(patterns, list | tuple | dict) else ():
            try:
                is_one = isinstance(pattern, str) and not ENDLESS.search(pattern)
                is_of = is_one and re.match(pattern, name)
            except (re.error, RecursionError, OverflowError):
                is_one = False
            if not is_one:
                what = f"has the pattern {str(pattern)[:80]!r} in '{INFO}', which is none of names"
                raise Damaged(self.path, what, hint=HINT) from None
            if is_of:
                yield pattern

    def _unsupported(self, what: str) -> Unsupported:
        return Unsupported(self.path, f"{what} ('{INFO}')", hint=HINT_OF_RULES)


def _evenly(stretches: object, lengths: Sequence[int]) -> Sequence[Sequence[int]]:
    """Return the widths of stretches cut evenly: of as many equal ones as stated, or of these sizes."""
    if type(stretches) is int and 0 < stretches <= MAX_RANKS:
        return [[length // stretches for length in lengths]] * stretches
    sizes = stretches if isinstance(stretches, list | tuple) else ()
    if any(type(size) is not int or size % len(lengths) for size in sizes):
        return ()
    return [[size // len(lengths)] * len(lengths) for size in sizes]


def _fill(cuts: Cuts, tensors: Sequence[TensorRef]) -> bool:
    """Return whether the widths are those of the parts, and all other dimensions alike."""
    rows = cuts.widths if isinstance(cuts.widths, list | tuple) else ()
    widths = [row for row in rows if isinstance(row, list | tuple) and len(row) == len(tensors)]
    if not rows or len(widths) < len(rows) or any(type(n) is not int or n < 0 for row in rows for n in row):
        return False
    if any(not 0 <= cuts.dim < len(tensor.shape) for tensor in tensors):
        return False
    fills = all(sum(row[i] for row in rows) == t.shape[cuts.dim] for i, t in enumerate(tensors))
    others = {(*t.shape[: cuts.dim], *t.shape[cuts.dim + 1 :]) for t in tensors}
    size = tensors[0].shape[0] if cuts.dim else sum(tensor.shape[0] for tensor in tensors)
    kept = cuts.vocabulary
    return fills and len(others) == 1 and (kept is None or (type(kept) is int and 0 <= kept <= size))
