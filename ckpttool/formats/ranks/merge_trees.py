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
        self._readers = {file.rank: ShardedValues(file.source) for file in files}
        self._numbers = Numbers()
        self._made: dict[tuple[int, ...], object] = {}
        self.left: list[str] = []

    def merge(self) -> object:
        """Return the merged tree."""
        return self._merge(self._path, [Held(file, file.tree) for file in self._files])

    def _merge(self, path: Path, places: list[Held]) -> object:
        if len(path) > MAX_DEPTH:
            raise Refused(places[0].file.source.path, "its contents are nested too deeply to be merged")
        key = tuple(id(place.value) for place in places)
        if isinstance(places[0].value, LEAVES):  # equal numbers are one object, at different places
            return self._merged(path, places)
        if key not in self._made:
            self._made[key] = self._merged(path, places)
        elif (tensor := tensor_of(self._made[key])) is not None:
            self._wholes.note(_name(path), tensor)
        return self._made[key]

    def _merged(self, path: Path, places: list[Held]) -> object:
        values: list[Any] = [item.value for item in places]
        if path and path[-1] in STEPS:
            self._require_one_number(path, places)
        if any(map(is_sharded, values)):
            return self._whole(path, places)
        if any(tensor_of(value) is not None for value in values):
            return self._replicated(path, places)
        kinds = {dict if isinstance(value, dict) else type(value) for value in values}
        first: Any = self._first(places).value
        if kinds == {dict}:
            return remade(first, self._entries(path, places))
        if kinds <= {list, tuple} and len(kinds) == 1 and len({len(v) for v in values}) == 1:
            pairs = enumerate(zip(*values, strict=True))
            items = [self._merge((*path, i), self._with(places, item)) for i, item in pairs]
            return items if isinstance(first, list) else tuple(items)
        if kinds == {Record} and isinstance(first, Record) and _alike(values):
            return self._record(path, places, first)
        self._require_no_pieces(path, places)
        self._compare(path, places)
        return first

    def _first(self, places: list[Held]) -> Held:
        """Return what is held by the rank whose values are taken, else by the first."""
        return next((place for place in places if place.file.rank == self._wholes.take_rank), places[0])

    def _with(self, places: list[Held], values: Iterable[object]) -> list[Held]:
        return [Held(place.file, value) for place, value in zip(places, values, strict=True)]

    def _entries(self, path: Path, places: list[Held]) -> Iterable[tuple[object, object]]:
        by_key: dict[object, list[Held]] = {}
        for place in places:
            assert isinstance(place.value, dict)
            for key, value in place.value.items():
                by_key.setdefault(key, []).append(Held(place.file, value))
        for key, holders in by_key.items():
            inner = (*path, key)
            self._require_holders(inner, places, holders)
            if self._common and not _agree(places, holders):
                if key in STEPS:
                    self._require_one(inner, holders)
                self.left.append(
                    f"'{_name(inner)[:80]}' (differs between ranks; merge --take-rank R takes one's)"
                )
                continue
            merged = self._merge(inner, holders)
            if not self._common or merged != {} or not holders[0].value:
                yield key, merged

    def _require_holders(self, path: Path, places: list[Held], having: list[Held]) -> None:
        """Check that no rank lacks a tensor of which it has a part; stages of a pipeline have their own."""
        if len(having) == len(places):
            return
        sharded = self._sharded(path, having[0]) if is_sharded(having[0].value) else None
        holders = {place.file.rank for place in having}
        for place in places:
            if sharded and place.file.rank in sharded.ranks and place.file.rank not in holders:
                other = having[0].file.source.path
                raise Damaged(
                    place.file.source.path, f"lacks '{_name(path)[:80]}', of which {other} has a piece"
                )

    def _record(self, path: Path, places: list[Held], first: Record) -> Record:
        records = [place.value for place in places]

        def field(name: str) -> Any:
            return self._merge(
                (*path, name), self._with(places, (getattr(record, name) for record in records))
            )

        made = replace(first, args=field("args"), kwargs=field("kwargs"), state=field("state"))
        if first.elements or first.items:
            made.elements, made.items = field("elements"), field("items")
        return made

    # Tensors

    def _sharded(self, path: Path, place: Held) -> Sharded | None:
        return self._readers[place.file.rank].read(_name(path), place.value)

    def _whole(self, path: Path, places: list[Held]) -> TensorRef:
        """Join a sharded tensor."""
        name, pieces = _name(path), []
        first: Sharded | None = None
        for place in places:
            piece = self._sharded(path, place)
            where = place.file.source.path
            if piece is None:
                raise Damaged(where, f"has no piece of '{name[:80]}', and other ranks have")
            first = first or piece
            if (piece.shape, piece.dtype) != (first.shape, first.dtype):
                raise Damaged(
                    where,
                    f"has a piece of '{name[:80]}' as {piece.dtype.name} {list(piece.shape)}, and rank "
                    f"{first.rank} as {first.dtype.name} {list(first.shape)}",
                )
            if piece.rank != place.file.rank:
                raise Damaged(
                    where, f"has pieces of rank {place.file.rank} and of rank {piece.rank}: '{name[:80]}'"
                )
            pieces += [Piece(piece.rank, begin, tensor) for begin, tensor in piece.pieces]
        assert first is not None
        return self._wholes.tensor(name, first.dtype, first.shape, pieces)

    def _replicated(self, path: Path, places: list[Held]) -> object:
        """Return a plain tensor, which should be the same on all ranks."""
        name, pieces = _name(path), []
        first = tensor_of(places[0].value)
        for place in places:
            tensor = tensor_of(place.value)
            if tensor is None or first is None:
                raise Damaged(place.file.source.path, f"'{name[:80]}' is no tensor, and other ranks have one")
            if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
                here, there = place.file.source.path, places[0].file.source.path
                raise Damaged(here, f"'{name[:80]}' is {_form(tensor)}, and {_form(first)} in {there}")
            pieces.append(Piece(place.file.rank, (0,) * len(tensor.shape), tensor))
        assert first is not None
        if len(pieces) == 1:
            return places[0].value
        whole = self._wholes.tensor(name, first.dtype, first.shape, pieces)
        return with_tensor(self._first(places).value, whole)

    def _require_no_pieces(self, path: Path, places: list[Held]) -> None:
        """Check that values of several forms hold no piece, as no whole would be made of it."""
        if all(isinstance(place.value, LEAVES) for place in places):
            return
        pieces = {place.file.rank: self._sharded_in(path, place) for place in places}
        for place in places:
            for other in places:
                lacking = pieces[other.file.rank].keys() - pieces[place.file.rank].keys()
                if lacking:
                    name = next(name for name in pieces[other.file.rank] if name in lacking)
                    raise Damaged(
                        place.file.source.path,
                        f"lacks '{name[:80]}', of which {other.file.source.path} has a piece",
                        hint="save it on all ranks, or whole on one of them",
                    )
        first, *others = places
        if pieces[first.file.rank]:
            other = next((other for other in others if type(other.value) is not type(first.value)), others[0])
            raise Damaged(
                other.file.source.path,
                f"holds '{_name(path)[:80]}' in another form than {first.file.source.path}, and pieces of "
                "tensors are in it",
            )

    def _sharded_in(self, path: Path, place: Held) -> dict[str, object]:
        """Return the sharded tensors within a value by their names."""
        named = named_values(place.value, unless_sharded, MAX_NAMES + 64 * place.file.source.size)
        return {dotted((*map(in_brief, path), *at)): value for at, value in named if is_sharded(value)}

    # Everything else

    def _compare(self, path: Path, places: list[Held]) -> None:
        """Note values that differ; those that say the step are of two saves."""
        taken = self._first(places)
        others = [place for place in places if not same(taken.value, place.value)]
        if not others:
            return
        if path and path[-1] in STEPS:
            self._require_one(path, [taken, *others])
        ranks = ", ".join(str(other.file.rank) for other in others[:8]) + (" …" if others[8:] else "")
        self.left.append(f"'{_name(path)[:80]}' of rank {ranks}, which differs from rank {taken.file.rank}'s")

    def _require_one(self, path: Path, places: Sequence[Held]) -> None:
        hint = "take the files of one save, or merge --take-rank R" if self._common else HINT
        require_one(f"'{_name(path)[:80]}'", places, self._numbers, hint=hint)

    def _require_one_number(self, path: Path, places: list[Held]) -> None:
        """Check those of the values that are numbers."""
        taken = self._first(places)
        numbers = [
            Held(place.file, number)
            for place in (taken, *(place for place in places if place is not taken))
            if (number := self._numbers.of(self._sharded(path, place) or place.value)) is not None
        ]
        if numbers:
            self._require_one(path, numbers)


def _name(path: Path) -> str:
    return dotted(tuple(map(in_brief, path)))


def _form(tensor: TensorRef) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)}"


def _alike(records: Sequence[Any]) -> bool:
    """Return whether records were made in the same way, from as many values."""
    shapes = {
        (record.how, str(record.callable), len(record.elements), len(record.items)) for record in records
    }
    return len(shapes) == 1


def _agree(places: Sequence[Held], having: Sequence[Held]) -> bool:
    """Return whether an entry is the same on all ranks, or dicts that may have entries in common."""
    first, *others = (place.value for place in having)
    if len(having) < len(places):
        return False
    return all(isinstance(place.value, dict) for place in having) or all(
        same(first, other) for other in others
    )
