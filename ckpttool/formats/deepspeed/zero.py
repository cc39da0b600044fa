"""Where each parameter lies in the flat vectors that DeepSpeed's ZeRO cuts over the ranks, and the way back.

ZeRO joins the parameters of a group into one vector. Stages 1 and 2 cut that vector: rank r holds elements
r·P to (r+1)·P, and P is even. Stage 3 cuts each parameter: every rank holds ceil(n/W) of its n elements, one
parameter after another, the last rank's filled up. The fp32 weights and each momentum are cut alike.
Source: DeepSpeed's `runtime/zero/stage_1_and_2.py`, `stage3.py` and `utils/zero_to_fp32.py`, to 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ...errors import Damaged
from ...tensors.dtypes import DTYPES
from ...tensors.ref import Storage, TensorRef, extent
from ..ranks.pieces import Piece, Wholes

Shape = tuple[int, ...]
# The parameters of a group by name, in the order of the vector.
Group = Mapping[str, Shape]

# The vector of stages 1 and 2 is filled up to a multiple of this and the number of ranks.
ALIGNED = 2


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a parameter in one rank's part of a vector."""

    rank: int  # the rank
    begin: int  # the first element within the flattened parameter
    start: int  # the first element within the rank's part
    count: int  # how many


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place: its group, and its runs on the ranks; a rank without elements has none."""

    name: str
    shape: Shape
    group: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all parameters."""

    slots: tuple[Slot, ...]  # in the order of the groups, and of the vector of each
    # rank -> how many elements its part of each group may have. They differ where the end is padding, which
    # some files leave out.
    least: Mapping[int, list[int]]
    most: Mapping[int, list[int]]

    def fits(self, rank: int, group: int, part: TensorRef) -> bool:
        """Return whether a rank's part of a vector has as many elements as the parameters take."""
        least, most = self.least[rank][group], self.most[rank][group]
        return len(part.shape) == 1 and least <= part.numel <= most

    def check(self, rank: int, group: int, part: TensorRef, what: str) -> None:
        """Check the size of a rank's part of a vector."""
        if not self.fits(rank, group, part):
            least, most = self.least[rank][group], self.most[rank][group]
            padding = f", {most - least} of them padding" if most > least else ""
            raise Damaged(
                part.storage.data.path,
                f"its {what} of group {group} has shape {list(part.shape)}, and rank {rank}'s part of the "
                f"parameters has {most} elements{padding}",
                hint="the parameters are listed in the files *_model_states.pt: copy the folder again",
            )

    def held_by(self, rank: int) -> list[dict[str, tuple[int, int]]]:
        """Return the runs of each group that a rank holds: name -> (start, count)."""
        runs: list[dict[str, tuple[int, int]]] = [{} for _ in self.least[rank]]
        for name, group, run in ((slot.name, slot.group, run) for slot in self.slots for run in slot.runs):
            if run.rank == rank:
                runs[group][name] = run.start, run.count
        return runs


def vectors_cut(
    groups: Sequence[Group], paddings: Sequence[Sequence[int]], world_size: int, ranks: Iterable[int]
) -> Layout:
    """Return the places of parameters in stages 1 and 2."""
    slots: list[Slot] = []
    least: dict[int, list[int]] = {rank: [] for rank in ranks}
    most: dict[int, list[int]] = {rank: [] for rank in least}
    for group, listed in enumerate(groups):
        fills = paddings[group] if paddings else [0] * len(listed)
        total = sum(map(_numel, listed.values())) + sum(fills)
        size = -(-total // (ALIGNED * world_size)) * ALIGNED
        for rank in least:
            least[rank].append(min(max(total - rank * size, 0), size))
            most[rank].append(size)
        at = 0
        for (name, shape), fill in zip(listed.items(), fills, strict=True):
            slots.append(Slot(name, shape, group, tuple(_runs(at, _numel(shape), size))))
            at += _numel(shape) + fill
    return Layout(tuple(slots), least, most)


def _runs(at: int, count: int, size: int) -> Iterator[Run]:
    """Yield the runs of `count` elements from number `at` of a vector that is cut every `size` elements."""
    done = 0
    while done < count:
        rank, start = divmod(at + done, size)
        length = min(size - start, count - done)
        yield Run(rank, done, start, length)
        done += length


def parameters_cut(groups: Sequence[Group], world_size: int, ranks: Sequence[int]) -> Layout:
    """Return the places of parameters in stage 3."""
    slots: list[Slot] = []
    sizes: list[int] = []
    for group, listed in enumerate(groups):
        at = 0
        for name, shape in listed.items():
            slots.append(Slot(name, shape, group, tuple(_shares(_numel(shape), at, world_size, ranks))))
            at += -(-_numel(shape) // world_size)
        sizes.append(at)
    every = dict.fromkeys(ranks, sizes)
    return Layout(tuple(slots), every, every)


def _shares(count: int, start: int, world_size: int, ranks: Iterable[int]) -> Iterator[Run]:
    share = -(-count // world_size)
    for rank in ranks:
        length = min(share, count - rank * share)
        if length > 0:
            yield Run(rank, rank * share, start, length)


def joined(wholes: Wholes, slot: Slot, parts: Mapping[int, TensorRef], name: str = "") -> TensorRef:
    """Return a parameter, or a momentum of it, from the ranks' parts of a vector; nothing is read."""
    pieces = [
        Piece(run.rank, (run.begin,), _cut(parts[run.rank], run)) for run in slot.runs if run.rank in parts
    ]
    dtype = next((part.dtype for part in parts.values()), DTYPES["float32"])
    return alone(wholes.tensor(name or slot.name, dtype, slot.shape, pieces, flat=True))


def _cut(part: TensorRef, run: Run) -> TensorRef:
    if len(part.shape) != 1 or part.numel < run.start + run.count:
        raise Damaged(
            part.storage.data.path,
            f"a part of a parameter has shape {list(part.shape)}, and needs {run.start + run.count} elements",
        )
    return replace(part, shape=(run.count,), offset=part.offset + run.start * part.stride[0])


def alone(tensor: TensorRef) -> TensorRef:
    """Return a tensor that has a storage of its own: neighbours in a vector are not views of one tensor."""
    old = tensor.storage
    if old.nbytes == tensor.nbytes:
        return tensor
    storage = Storage(tensor.data, old.kind, byteorder=old.byteorder, origins=(old,))
    return replace(tensor, storage=storage, offset=0)


def given_order(names: Sequence[str], world_size: int) -> list[str]:
    """Return the names of a group in the optimizer's order, which `round_robin_gradients` changed."""
    # DeepSpeed deals the parameters out to the ranks in turn and joins what each got.
    places = list(chain(*(range(first, len(names), world_size) for first in range(world_size))))
    return [name for _, name in sorted(zip(places, names, strict=True))]


def _numel(shape: Shape) -> int:
    return 0 if 0 in shape else extent(shape)
