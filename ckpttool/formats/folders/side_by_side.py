"""The trees of several ranks' files, merged value by value into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...checkpoint.dotted_names import dotted
from ...checkpoint.ranks import HINT
from ...errors import Damaged, Refused
from ...inert_pickle.values import LEAVES, MAX_DEPTH, Record, in_brief, remade, tensor_of, with_tensor
from ...tensors.ref import TensorRef
from ...tensors.values import MAX_EXPANSION, in_pieces
from .pieces import Piece, RankFile, Wholes
from .sharded_values import Sharded, ShardedValues, is_sharded

STEPS = ("step", "steps", "global_step", "global_steps", "iteration", "epoch", "current_epoch")
"""Keys of numbers that are the same in all files of one save."""

SMALL = 1 << 16
"""The most bytes of a tensor that `same` reads although its checksum is known."""

BLOCK = 1 << 18
"""Elements of two tensors that `same` compares at a time."""

Path = tuple[object, ...]


class Held(NamedTuple):
    """What one rank's file has in a place."""

    file: RankFile
    value: object


class SideBySide:
    """Merges the trees of ranks: pieces become whole tensors, and what all hold becomes one value.

    Attributes:
        left: what the result lacks of the ranks' files, in words.
    """

    def __init__(
        self, wholes: Wholes, files: Sequence[RankFile], path: Path = (), *, common: bool = False
    ) -> None:
        """Prepare merging.

        Args:
            wholes: joins the pieces.
            files: of the ranks, in their order.
            path: where the result lies in the whole, for names.
            common: ranks may differ in any entry of a dict; the result then has those that all hold alike.
        """
        self._common = common
        self._path = path
        self._wholes = wholes
        self._files = files
        self._readers = {file.rank: ShardedValues(file.source.path) for file in files}
        self._made: dict[tuple[int, ...], object] = {}
        self.left: list[str] = []

    def merge(self) -> object:
        """Return the merged tree.

        Raises:
            Damaged: the files do not fit together; the message names one of them.
            Refused: they are nested too deeply.
        """
        return self._merge(self._path, [Held(file, file.tree) for file in self._files])

    def _merge(self, path: Path, held: list[Held]) -> object:
        if len(path) > MAX_DEPTH:
            raise Refused(held[0].file.source.path, "its contents are nested too deeply to be merged")
        key = tuple(id(each.value) for each in held)
        if isinstance(held[0].value, LEAVES):  # equal numbers are one object, at different places
            return self._merged(path, held)
        if key not in self._made:
            self._made[key] = self._merged(path, held)
        return self._made[key]

    def _merged(self, path: Path, held: list[Held]) -> object:
        values: list[Any] = [each.value for each in held]
        if any(map(is_sharded, values)):
            return self._whole(path, held)
        if any(tensor_of(value) is not None for value in values):
            return self._replicated(path, held)
        kinds = {dict if isinstance(value, dict) else type(value) for value in values}
        first: Any = self._first(held).value
        if kinds == {dict}:
            return remade(first, self._entries(path, held))
        if kinds <= {list, tuple} and len(kinds) == 1 and len({len(v) for v in values}) == 1:
            pairs = enumerate(zip(*values, strict=True))
            items = [self._merge((*path, i), self._with(held, each)) for i, each in pairs]
            return items if isinstance(first, list) else tuple(items)
        if kinds == {Record} and isinstance(first, Record) and _alike(values):
            return self._record(path, held, first)
        self._compare(path, held)
        return first

    def _first(self, held: list[Held]) -> Held:
        """Return what is held by the rank whose values are taken, else by the first."""
        return next((each for each in held if each.file.rank == self._wholes.take_rank), held[0])

    def _with(self, held: list[Held], values: Iterable[object]) -> list[Held]:
        return [Held(each.file, value) for each, value in zip(held, values, strict=True)]

    def _entries(self, path: Path, held: list[Held]) -> Iterable[tuple[object, object]]:
        found: dict[object, list[Held]] = {}
        for each in held:
            assert isinstance(each.value, dict)
            for key, value in each.value.items():
                found.setdefault(key, []).append(Held(each.file, value))
        for key, those in found.items():
            here = (*path, key)
            self._require_holders(here, held, those)
            if self._common and not _agree(held, those):
                if key in STEPS:
                    self._compare(here, those)
                self.left.append(
                    f"'{_name(here)[:80]}' (differs between ranks; merge --take-rank R takes one's)"
                )
                continue
            merged = self._merge(here, those)
            if not self._common or merged != {} or not those[0].value:
                yield key, merged

    def _require_holders(self, path: Path, held: list[Held], those: list[Held]) -> None:
        """Check that no rank lacks a tensor of which it has a part; stages of a pipeline have their own."""
        if len(those) == len(held):
            return
        sharded = self._sharded(path, those[0]) if is_sharded(those[0].value) else None
        holders = {each.file.rank for each in those}
        for each in held:
            if sharded and each.file.rank in sharded.ranks and each.file.rank not in holders:
                other = those[0].file.source.path
                raise Damaged(
                    each.file.source.path, f"lacks '{_name(path)[:80]}', of which {other} has a piece"
                )

    def _record(self, path: Path, held: list[Held], first: Record) -> Record:
        records = [each.value for each in held]

        def field(name: str) -> Any:
            return self._merge((*path, name), self._with(held, (getattr(each, name) for each in records)))

        made = replace(first, args=field("args"), kwargs=field("kwargs"), state=field("state"))
        if first.elements or first.items:
            made.elements, made.items = field("elements"), field("items")
        return made

    # Tensors

    def _sharded(self, path: Path, held: Held) -> Sharded | None:
        return self._readers[held.file.rank].read(_name(path), held.value)

    def _whole(self, path: Path, held: list[Held]) -> TensorRef:
        """Join a sharded tensor."""
        name, pieces = _name(path), []
        first: Sharded | None = None
        for each in held:
            found = self._sharded(path, each)
            where = each.file.source.path
            if found is None:
                raise Damaged(where, f"has no piece of '{name[:80]}', and other ranks have")
            first = first or found
            if (found.shape, found.dtype) != (first.shape, first.dtype):
                raise Damaged(
                    where,
                    f"has a piece of '{name[:80]}' as {found.dtype.name} {list(found.shape)}, and rank "
                    f"{first.rank} as {first.dtype.name} {list(first.shape)}",
                )
            if found.rank != each.file.rank:
                raise Damaged(
                    where, f"has pieces of rank {each.file.rank} and of rank {found.rank}: '{name[:80]}'"
                )
            pieces += [Piece(found.rank, begin, tensor) for begin, tensor in found.pieces]
        assert first is not None
        return self._wholes.tensor(name, first.dtype, first.shape, pieces)

    def _replicated(self, path: Path, held: list[Held]) -> object:
        """Return a plain tensor, which each rank should hold alike."""
        name, pieces = _name(path), []
        first = tensor_of(held[0].value)
        for each in held:
            tensor = tensor_of(each.value)
            if tensor is None or first is None:
                raise Damaged(each.file.source.path, f"'{name[:80]}' is no tensor, and other ranks have one")
            if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
                here, there = each.file.source.path, held[0].file.source.path
                raise Damaged(here, f"'{name[:80]}' is {_form(tensor)}, and {_form(first)} in {there}")
            pieces.append(Piece(each.file.rank, (0,) * len(tensor.shape), tensor))
        assert first is not None
        if len(pieces) == 1:
            return held[0].value
        whole = self._wholes.tensor(name, first.dtype, first.shape, pieces)
        return with_tensor(self._first(held).value, whole)

    # Everything else

    def _compare(self, path: Path, held: list[Held]) -> None:
        """Note values that differ; those that say the step are of two saves."""
        taken = self._first(held)
        others = [each for each in held if not same(taken.value, each.value)]
        if not others:
            return
        if path and path[-1] in STEPS:
            one, other = in_brief(taken.value), in_brief(others[0].value)
            if tensor_of(taken.value) and tensor_of(others[0].value):
                one, other = "another", "one tensor"
            raise Damaged(
                others[0].file.source.path,
                f"is of another save: '{_name(path)[:80]}' is {other}, and {one} in {taken.file.source.path}",
                hint="take the files of one save, or merge --take-rank R" if self._common else HINT,
            )
        ranks = ", ".join(str(each.file.rank) for each in others[:8]) + (" …" if others[8:] else "")
        self.left.append(f"'{_name(path)[:80]}' of rank {ranks}, which differs from rank {taken.file.rank}'s")


def _name(path: Path) -> str:
    return dotted(tuple(map(in_brief, path)))


def _form(tensor: TensorRef) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)}"


def _alike(records: Sequence[Any]) -> bool:
    """Return whether records were made in the same way, from as many values."""
    shapes = {(each.how, str(each.callable), len(each.elements), len(each.items)) for each in records}
    return len(shapes) == 1


def _agree(held: Sequence[Held], those: Sequence[Held]) -> bool:
    """Return whether all ranks hold an entry alike, or as dicts that may have entries in common."""
    first, *others = (each.value for each in those)
    if len(those) < len(held):
        return False
    return all(isinstance(each.value, dict) for each in those) or all(same(first, each) for each in others)


def same(one: object, other: object) -> bool:
    """Return whether two values are the same, to the type; NaN is the same as NaN.

    Tensors are by dtype, shape and bytes, on whatever device they were. Of those of more than 64 KiB the
    checksums are compared instead where both files state them. Those that repeat their elements very often
    count as different.
    """
    stack, seen = [(one, other)], set[tuple[int, int]]()
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if type(a) is not type(b):
            return False
        if isinstance(a, dict) and isinstance(b, dict):
            if list(a) != list(b):
                return False
            stack.extend(zip(a.values(), b.values(), strict=True))
        elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
            if len(a) != len(b):
                return False
            stack.extend(zip(a, b, strict=True))
        elif isinstance(a, Record) and isinstance(b, Record):
            fields = ("how", "callable", "args", "kwargs", "state", "elements", "items")
            stack.extend((getattr(a, name), getattr(b, name)) for name in fields)
        elif isinstance(a, TensorRef) and isinstance(b, TensorRef):
            if not _same_tensor(a, b):
                return False
        elif not (a == b or (a != a and b != b)):
            return False
    return True


def _same_tensor(one: TensorRef, other: TensorRef) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    both = one, other
    sums = {each.storage.crc32 for each in both}
    if one.nbytes > SMALL and None not in sums and all(_is_whole(each) for each in both):
        return len(sums) == 1
    if any(each.nbytes > each.storage.nbytes + MAX_EXPANSION for each in both):
        return False
    pieces = zip(
        in_pieces(one, BLOCK * one.dtype.part), in_pieces(other, BLOCK * one.dtype.part), strict=True
    )
    return all(a == b for a, b in pieces)


def _is_whole(tensor: TensorRef) -> bool:
    """Return whether a tensor is all of its storage, as the storage lies there."""
    return tensor.is_plain and tensor.nbytes == tensor.storage.nbytes
