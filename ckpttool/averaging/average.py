"""The mean of several checkpoints, or another way to merge them, tensor by tensor."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.checksums import digest_of_value
from ..core.checkpoint.keys import stripping
from ..core.checkpoint.settings import require_unpacked
from ..core.checkpoint.special_tensors import plain_tensor, require_plain, with_plain_tensor
from ..core.checkpoint.state import MEAN, VARIANCE, State
from ..core.formats.reading import File
from ..core.formats.reading import open as open_checkpoint
from ..core.inert_pickle.values import remade
from ..core.tensors.cast import FLOATS, CastReport
from ..core.tensors.ref import PLAIN_FLOATS, Storage, TensorRef, real_dtype
from ..core.tensors.values import MAX_REPEATED, require_bounded, same_values
from ..errors import NothingToDo, Refused, UsageFault
from .mean import MeanTensors
from .methods import Merger, one_for_each, recipe, require_no_more

INTEGERS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


@dataclass(frozen=True, slots=True)
class Averaged:
    """The outcome of an average.

    Attributes:
        method: how: `linear` is the mean.
        files: the number of inputs, without the base.
        averaged: names of the tensors that hold means, or what else the method makes.
        kept: names of integer and boolean tensors that are the same in all files.
        taken: names of integer and boolean tensors, and of entries that are no tensors, that differ: they are
            taken from the last file.
        statistics: names of BatchNorm's running statistics among the means. An averaged model has others of
            its own, which only data can give.
        parallel: names of the tensors between which SLERP was linear, complete once the result is saved.
        casting: which numbers became infinite or NaN, likewise; a mean has none.
    """

    method: str
    files: int
    averaged: tuple[str, ...] = field(metadata={"counted": True})
    kept: tuple[str, ...]
    taken: tuple[str, ...] = field(metadata={"json": "taken_from_last"})
    statistics: tuple[str, ...]
    parallel: list[str] = field(metadata={"note": "too nearly parallel for slerp, so merged linearly"})
    casting: CastReport = field(metadata={"json": None})


def average(
    files: Sequence[File],
    *,
    weights: Sequence[float] | None = None,
    state: str | None = None,
    method: str = "linear",
    base: File | None = None,
    t: float | None = None,
    scale: float | None = None,
    density: float | None = None,
    seed: int | None = None,
) -> tuple[Checkpoint, Averaged]:
    """Return the mean of several model states as a checkpoint; values are computed as they are written.

    Floats and complex numbers are added in pairs of float64 and rounded once, half to even; `mean` states
    what that guarantees. Integers and booleans, such as BatchNorm's counters, are never averaged, nor is what
    is no tensor: when the files differ, the last one's are taken. Names that share a tensor in every file
    share it in the result.

    The other methods compute in float64 and round once; `merging.methods` has their formulas.

    Args:
        files: two or more paths, or open checkpoints, which must stay open until the result is saved; one is
            enough beside a base.
        weights: one per file; all 1 when None. Of a mean at least 0, not all 0.
        state: dotted path of the model's state in each; found when None.
        method: `linear`, the mean; `slerp`, between two files; `task`, `ties` or `dare`, which add what the
            files have learnt to the base.
        base: the model that the files were trained from; for `slerp`, where it starts.
        t: how far `slerp` goes, from 0 to 1; 0.5 when None.
        scale: λ, by which the sum of what was learnt is multiplied; 1 when None.
        density: the part of what a file has learnt that `ties` and `dare` keep, from 0 to 1; 1 when None.
        seed: of the random choice of `dare`; 0 when None.

    Returns:
        The new checkpoint, whose values lie in the files until it is saved, and which tensors are means.

    Raises:
        TypeError: `files` is one path or one checkpoint.
        NothingToDo: no tensor has a mean.
        UsageFault: too few or too many files, no base, or malformed weights or settings.
        Refused: names, types or shapes differ; or a tensor has a type that can't be averaged, or is sharded,
            sparse or quantised.
        NoState: a file holds no state, or none at `state`.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them.

    Example:
        >>> mean, averaged = ckpttool.average(["model.safetensors", "tuned.safetensors"])
        >>> averaged.files, ckpttool.save(mean, "mean.safetensors").keys
        (2, 7)
    """
    if isinstance(files, Checkpoint | str | os.PathLike):
        raise TypeError("average() takes a list of paths or checkpoints: ckpttool.average([a, b])")
    opened = [file if isinstance(file, Checkpoint) else open_checkpoint(file) for file in files]
    settings: dict[str, Any] = {"t": t, "scale": scale, "density": density, "seed": seed}
    maker: MeanTensors | Merger
    if method == "linear":
        require_no_more(method, base=base, **settings)
        maker, first = MeanTensors(_checked(weights, len(files))), []
    else:
        maker = Merger(recipe(method, len(files), weights, has_base=base is not None, **settings))
        first = [] if base is None else [base if isinstance(base, Checkpoint) else open_checkpoint(base)]
    checkpoints = [*first, *opened]
    states = [checkpoint.state(state) for checkpoint in checkpoints]
    for checkpoint, chosen in zip(checkpoints, states, strict=True):
        require_plain(checkpoint.path, chosen.likes, "can't be averaged")
        require_unpacked(checkpoint, chosen, "its codes can't be averaged")
    for checkpoint, chosen in zip(checkpoints[:-1], states, strict=False):
        _require_same(checkpoint, chosen, checkpoints[-1], states[-1])
    last, work = states[-1], _Averaging(states, maker)
    entries = ((key, work.entry(str(key), value)) for key, value in last.container.items())
    container = remade(last.container, entries)
    if not work.averaged:
        raise NothingToDo(f"{checkpoints[-1].path}: no tensor of a type that has a mean")
    statistics = tuple(name for name in work.averaged if name.endswith((MEAN, VARIANCE)))
    averaged, kept, taken = (tuple(each) for each in (work.averaged, work.kept, work.taken))
    done = Averaged(method, len(files), averaged, kept, taken, statistics, maker.parallel, maker.casting)
    return replace(checkpoints[-1], tree=container, opened=()), done


def _checked(weights: Sequence[float] | None, count: int) -> list[float]:
    if count < 2:
        raise UsageFault("an average needs two files or more", hint="ckpttool average a.pt b.pt mean.pt")
    shares = one_for_each(weights, count)
    are_sane = all(math.isfinite(share) and (share == 0 or 1e-30 < share < 1e30) for share in shares)
    if not are_sane or not any(shares):
        raise UsageFault("weights must be 0 or more, and not all 0", hint="--weights 0.5,0.25,0.25")
    return shares


def _require_same(one: Checkpoint, a: State, other: Checkpoint, b: State) -> None:
    hint = f"ckpttool diff --model-only {shlex.quote(one.path)} {shlex.quote(other.path)}"
    for mine, theirs, has, lacks in ((a, b, one, other), (b, a, other, one)):
        if absent := [str(name) for name in mine.container if name not in theirs.container]:
            hint = stripping(one.path, a, b) or stripping(other.path, b, a) or hint
            raise Refused(lacks.path, f"has no '{absent[0]}', which {has.path} has", hint=hint)
        if odd := [name for name in mine.tensors if name not in theirs.tensors]:
            raise Refused(lacks.path, f"'{odd[0]}' is no tensor, as it is in {has.path}", hint=hint)
    for name, tensor in a.tensors.items():
        against = b.tensors[name]
        if (tensor.dtype, tensor.shape) != (against.dtype, against.shape):
            forms = [f"{form.dtype.name} {list(form.shape)}" for form in (tensor, against)]
            raise Refused(one.path, f"'{name}' is {forms[0]}, and {forms[1]} in {other.path}", hint=hint)


class _Averaging:
    """The work of one average: the outcome for each tensor, and the storages that names share."""

    def __init__(self, states: list[State], maker: MeanTensors | Merger) -> None:
        self.states, self.maker = states, maker
        self.averaged: list[str] = []
        self.kept: list[str] = []
        self.taken: list[str] = []
        self.storages: dict[tuple[object, ...], Storage] = {}
        self.tied: dict[tuple[object, ...], list[TensorRef]] = {}  # by the last file's

    def entry(self, name: str, value: object) -> object:
        """Return the result's value for an entry of the last file's state."""
        last = plain_tensor(value)
        if last is not None:
            return with_plain_tensor(value, self.tensor(name, last))
        own = digest_of_value(value)
        if own is None or any(digest_of_value(state.others.get(name)) != own for state in self.states[:-1]):
            self.taken.append(name)
        return value

    def tensor(self, name: str, last: TensorRef) -> TensorRef:
        inputs = [state.tensors[name] for state in self.states]
        part = real_dtype(last.dtype)
        if last.dtype.name in INTEGERS:
            for tensor in inputs:
                require_bounded(name, tensor, MAX_REPEATED)
            same = all(same_values(tensor, last) for tensor in inputs[:-1])
            (self.kept if same else self.taken).append(name)
            return last
        if part.name not in PLAIN_FLOATS:
            path, what = last.storage.data.path, f"'{name}' is {last.dtype.name}, which can't be averaged"
            convert = f"ckpttool convert {shlex.quote(path)} bf16.pt --dtype bf16"
            hint = f"convert each file first: {convert}" if part.name in FLOATS else None
            raise Refused(path, what, hint=hint)
        for tensor in inputs:
            require_bounded(name, tensor)
        self.averaged.append(name)
        views = tuple(tensor.view for tensor in inputs)
        if views not in self.storages and (twin := self._twin(inputs)):
            self.storages[views] = self.storages[twin]
        if views not in self.storages:
            data, old = self.maker.computed(name, inputs, part), last.storage
            kind, origins = last.dtype.kind, tuple(tensor.storage for tensor in inputs)
            self.storages[views] = Storage(data, kind, old.location, byteorder=old.byteorder, origins=origins)
            self.tied.setdefault(last.view, inputs)
        new = TensorRef.contiguous(self.storages[views], last.dtype, last.shape)
        return replace(new, requires_grad=last.requires_grad)

    def _twin(self, inputs: list[TensorRef]) -> tuple[object, ...] | None:
        """Return the views of a tensor that the last file ties to this one, if no other file contradicts."""
        tied = self.tied.get(inputs[-1].view)
        if tied is None or not all(map(same_values, tied, inputs)):
            return None
        return tuple(tensor.view for tensor in tied)
