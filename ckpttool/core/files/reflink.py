"""Blocks that an output shares with its inputs, as `cp --reflink` does: which, in which order, or why not."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from ...errors import Refused
from .. import system
from ..tensors.ref import ByteRange, Source, Storage, TensorRef

MODES = AUTO, ALWAYS, NEVER = "auto", "always", "never"

BLOCK = 4096  # whole blocks at the same place within one in both files can be shared
LARGEST_BLOCK = 1 << 16  # what says more, as NFS does, tells the size of a request
LARGE = 1 << 17  # bytes from which on `always` shares; fewer are copied as fast
COPIED = 64  # `always` allows one byte in so many to be copied: some sizes are no whole blocks
SMALL_ONES = 64  # tensors among which those are looked for that fill a block
WIDEST = 8  # bytes of an element, which lies at a multiple of them

Tensors = Mapping[str, TensorRef]


class NotShared(Refused, kind="not-shared"):
    """Blocks should always be shared, and can't be."""


class Reflink(NamedTuple):
    """How an output shares blocks: `auto` those that line up, `always` all that are large, `never` none."""

    mode: str = AUTO
    block: int = BLOCK  # of the file system, in bytes

    @classmethod
    def at(cls, mode: str, path: str) -> Reflink:
        """Return how an output at a path shares blocks."""
        size = system.block_size(_folder(path))
        return cls(mode, size if BLOCK < size <= LARGEST_BLOCK else BLOCK)

    @property
    def is_always(self) -> bool:
        """Whether blocks are shared, or nothing is written."""
        return self.mode == ALWAYS

    def share(self, data: ByteRange, fd: int, position: int) -> range:
        """Let a file share the whole blocks of a stretch of another; return which bytes of it are shared.

        Raises NotShared if they line up and should always be shared, but can't be.
        """
        start, end = -position % self.block, data.nbytes
        # Only the last block of a file may be shared in part, and only as the last of the other file.
        if data.offset + end != data.source.size or os.fstat(fd).st_size > position + end:
            end -= (position + end) % self.block
        if self.mode == NEVER or (data.offset - position) % self.block or start >= end:
            return range(0)
        source, offset = data.source.fd, data.offset + start
        fault = system.share_blocks(source, offset, end - start, fd, position + start)
        if fault and self.is_always:
            raise _not_shared(data.source, fault)
        return range(0) if fault else range(start, end)

    def require(self, path: str, sources: Iterable[Source]) -> None:
        """Raise NotShared if a file at a path can't share blocks with one of these: a first one is tried."""
        with tempfile.TemporaryFile(dir=_folder(path)) as file:
            for source in sources:
                fault = "" if source.is_local else "it is not on this machine"
                if not fault and (nbytes := min(self.block, source.size)):
                    file.truncate(0)
                    fault = system.share_blocks(source.fd, 0, nbytes, file.fileno(), 0)
                if fault:
                    raise _not_shared(source, fault)


def _folder(path: str) -> str:
    """Return the folder of an output, or the nearest that there is above it."""
    folder = os.path.dirname(os.path.abspath(path))
    return folder if os.path.isdir(folder) or folder == os.path.dirname(folder) else _folder(folder)


def _not_shared(source: Source, why: str) -> NotShared:
    hint = "both have to lie on one XFS or btrfs; or leave out --reflink always"
    return NotShared(source.path, f"can't share its blocks with the output: {why}", hint=hint)


def require_copied(path: str, values: Iterable[TensorRef | Storage], copied: Collection[object]) -> None:
    """Raise NotShared if there are values, and none that are copied as they lie in a file."""
    if not copied and any(value.nbytes for value in values):
        what = "has no values that stay as they lie there, so no blocks can be shared"
        raise NotShared(path, what, hint="leave out --reflink always")


def _require_few(path: str, copied: Mapping[str, int], lost: Iterable[str]) -> None:
    """Raise NotShared if among the sizes of what is copied much is of those that are lost: can't share."""
    large = sorted((name for name in lost if copied[name] > LARGE), key=copied.__getitem__)
    if sum(map(copied.__getitem__, large)) * COPIED > sum(copied.values()):
        more = f" and {len(large) - 1} more" if large[1:] else ""
        what = f"'{large[-1][:80]}'{more} would lie elsewhere within a block than there, and can't share it"
        hint = "write a .pt, where tensors have room between them; or copy them once, onto block boundaries: "
        hint += f"ckpttool convert {shlex.quote(path)} aligned.pt --reflink never"
        raise NotShared(path, what, hint=hint)


# ---- An order in which tensors that follow each other without a gap can share blocks


class _Run(NamedTuple):
    """Tensors whose values lie in a row in a file."""

    names: list[str]
    offset: int
    nbytes: int


Wanted = Mapping[int, Sequence[_Run]]


def sharing_order(path: str, tensors: Tensors, block: int) -> tuple[Tensors, int]:
    """Return tensors in an order in which they share blocks, and where in a block the first begins.

    Large ones come first, with small ones between them that bring the next to its place. What does not fit
    comes last, in the order given. Raises NotShared if that is much.
    """
    plain = {name: tensor.data for name, tensor in tensors.items() if tensor.is_plain}
    places = {name: place for name, place in plain.items() if isinstance(place, ByteRange) and place.nbytes}
    left = defaultdict[int, list[_Run]](list)  # by where in a block they begin
    for run in sorted(_runs(places), key=lambda run: (run.nbytes % block == 0, run.nbytes)):
        left[run.offset % block].append(run)
    start = at = max(left, key=lambda place: sum(run.nbytes for run in left[place]), default=0)
    large = {name for runs in left.values() for run in runs for name in run.names}
    small = {name: tensor.nbytes for name, tensor in tensors.items() if name not in large}
    names = list[str]()
    while left and (bridge := _bridge(small, at, left, block)) is not None:
        at = (at + sum(map(small.pop, bridge))) % block
        run = left[at].pop()
        if not left[at]:
            del left[at]
        names += [*bridge, *run.names]
        at = (at + run.nbytes) % block
    # Each has to begin at a multiple of its width; those that are left come widest first.
    while names and at % max((tensors[name].dtype.itemsize for name in tensors.keys() - names), default=1):
        at = (at - tensors[names.pop()].nbytes) % block
    ordered = {**{name: tensors[name] for name in names}, **tensors}
    starts = accumulate((tensor.nbytes for tensor in ordered.values()), initial=start)
    placed = zip(ordered, starts, strict=False)
    lost = [name for name, at in placed if name in places and (places[name].offset - at) % block]
    require_copied(path, tensors.values(), places)
    _require_few(path, {name: place.nbytes for name, place in places.items()}, lost)
    return ordered, start


def _runs(places: Mapping[str, ByteRange]) -> list[_Run]:
    """Return tensors in the rows in which they lie, where these are worth sharing."""
    runs, end = list[_Run](), (0, 0)
    for source, offset, nbytes, name in sorted((id(at.source), *at[1:], name) for name, at in places.items()):
        before = runs.pop() if (source, offset) == end else _Run([], offset, 0)
        before.names.append(name)
        runs.append(before._replace(nbytes=before.nbytes + nbytes))
        end = source, offset + nbytes
    return [run for run in runs if run.nbytes > LARGE and run.offset % WIDEST == 0]


def _bridge(small: Mapping[str, int], at: int, wanted: Wanted, block: int) -> tuple[str, ...] | None:
    """Return small tensors that lead from a place within a block to one that is wanted; None if none do."""
    ways: dict[int, tuple[str, ...]] = {at: ()}
    even = ((name, nbytes) for name, nbytes in small.items() if 0 < nbytes <= LARGE and not nbytes % WIDEST)
    for name, nbytes in islice(even, 0 if at in wanted else SMALL_ONES):
        for place, names in [*ways.items()]:
            ways.setdefault((place + nbytes) % block, (*names, name))
    reached = ways.keys() & wanted.keys()
    return ways[max(reached, key=lambda at: sum(run.nbytes for run in wanted[at]))] if reached else None
