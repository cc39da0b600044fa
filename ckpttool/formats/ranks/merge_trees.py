"""The trees of several ranks' files, merged value by value into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...checkpoint.dotted_names import MAX_NAMES, dotted, named_values
from ...checkpoint.ranks import HINT
from ...errors import Damaged, Refused
from ...inert_pickle.values import LEAVES, MAX_DEPTH, Record, in_brief, remade, tensor_of, with_tensor
from ...tensors.ref import TensorRef
from .agreement import STEPS, Held, Numbers, require_one, same
from .pieces import Piece, RankFile, Wholes
from .sharded_values import Sharded, ShardedValues, is_sharded, unless_sharded

Path = tuple[object, ...]


class SideBySide:
    """Merges the trees of ranks: pieces become whole tensors, and what all hold becomes one value."""

    # left: what the result lacks of the ranks' files, in words.

    def __init__(
        self, wholes: Wholes, files: Sequence[RankFile], path: Path = (), *, common: bool = False
    ) -> None:
        """Prepare merging."""
        self._common = common
        self._path = path
        self._wholes = wholes
        self._files = files
        self._readers = {file.rank: ShardedValues(file.source.path) for file in files}
        self._numbers = Numbers()
        self._made: dict[tuple[int, ...], object] = {}
        self.left: list[str] = []

    def merge(self) -> object:
        """Return the merged tree."""
        return self._merge(self._path, [Held(file, file.tree) for file in self._files])

    def _merge(self, path: Path, held: list[Held]) -> object:
        if len(path) > MAX_DEPTH:
            raise Refused(held[0].file.source.path, "its contents are nested too deeply to be merged")
        key = tuple(id(each.value) for each in held)
        if isinstance(held[0].value, LEAVES):  # equal numbers are one object, at different places
            return self._merged(path, held)
        if key not in self._made:
            self._made[key] = self._merged(path, held)
        elif (tensor := tensor_of(self._made[key])) is not None:
            self._wholes.note(_name(path), tensor)
        return self._made[key]

    def _merged(self, path: Path, held: list[Held]) -> object:
        values: list[Any] = [each.value for each in held]
        if path and path[-1] in STEPS:
            self._require_one_number(path, held)
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
        self._require_no_pieces(path, held)
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
                    self._require_one(here, those)
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

    def _require_no_pieces(self, path: Path, held: list[Held]) -> None:
        """Check that values of several forms hold no piece, as no whole would be made of it."""
        if all(isinstance(each.value, LEAVES) for each in held):
            return
        found = {each.file.rank: self._sharded_in(path, each) for each in held}
        for each in held:
            for other in held:
                lacking = found[other.file.rank].keys() - found[each.file.rank].keys()
                if lacking:
                    name = next(name for name in found[other.file.rank] if name in lacking)
                    raise Damaged(
                        each.file.source.path,
                        f"lacks '{name[:80]}', of which {other.file.source.path} has a piece",
                        hint="save it on all ranks, or whole on one of them",
                    )
        first, *others = held
        if found[first.file.rank]:
            other = next((each for each in others if type(each.value) is not type(first.value)), others[0])
            raise Damaged(
                other.file.source.path,
                f"holds '{_name(path)[:80]}' in another form than {first.file.source.path}, and pieces of "
                "tensors are in it",
            )

    def _sharded_in(self, path: Path, held: Held) -> dict[str, object]:
        """Return the sharded tensors within a value by their names."""
        named = named_values(held.value, unless_sharded, MAX_NAMES + 64 * held.file.source.size)
        return {dotted((*map(in_brief, path), *at)): value for at, value in named if is_sharded(value)}

    # Everything else

    def _compare(self, path: Path, held: list[Held]) -> None:
        """Note values that differ; those that say the step are of two saves."""
        taken = self._first(held)
        others = [each for each in held if not same(taken.value, each.value)]
        if not others:
            return
        if path and path[-1] in STEPS:
            self._require_one(path, [taken, *others])
        ranks = ", ".join(str(each.file.rank) for each in others[:8]) + (" …" if others[8:] else "")
        self.left.append(f"'{_name(path)[:80]}' of rank {ranks}, which differs from rank {taken.file.rank}'s")

    def _require_one(self, path: Path, held: Sequence[Held]) -> None:
        hint = "take the files of one save, or merge --take-rank R" if self._common else HINT
        require_one(f"'{_name(path)[:80]}'", held, self._numbers, hint=hint)

    def _require_one_number(self, path: Path, held: list[Held]) -> None:
        """Check those of the values that are numbers."""
        taken = self._first(held)
        found = [
            Held(each.file, number)
            for each in (taken, *(each for each in held if each is not taken))
            if (number := self._numbers.of(self._sharded(path, each) or each.value)) is not None
        ]
        if found:
            self._require_one(path, found)


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
