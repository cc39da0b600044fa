"""What names and shapes leave open, decided by values: both files hold the same model."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from ...tensors.ref import TensorRef
from ...tensors.values import same_values, stream
from ..mapping.tensors import VerbMisfit, cast, transposed
from ..mapping.verbs import Bundle, RuleContext, Verb
from .layers import Match, Tangle
from .modules import pattern
from .search import SearchResult
from .ways import STACKED, Joint, Unit, Way, joint

Tensors = Mapping[str, TensorRef]
MOST_FITTING = 8  # ways that are kept for a kind of layers, where values such as zeros fit many


@dataclass(slots=True)
class Values:
    """The values of both sides.

    Attributes:
        left, right: the tensors by name.
        known: the ways that fitted the layers of a kind so far; layers of one kind go one way.
    """

    left: Tensors
    right: Tensors
    known: dict[object, list[Way]] = field(default_factory=dict)

    def decide(self, found: SearchResult) -> None:
        """Give each match the way that its values go, and each layer of a tangle its counterpart.

        A match that no way fits keeps all of its ways, and a layer without a counterpart stays in its tangle.
        """
        for scope, tangle in [*found.tangles]:
            pairs = [*self._untangled(tangle)]
            if len(pairs) == len(tangle.left):
                found.tangles.remove((scope, tangle))
                found.matches += ((scope, match) for match in pairs)
        open_ones = [(n, match) for n, (_, match) in enumerate(found.matches) if len(match.joint.ways) > 1]
        for _, match in open_ones:
            self.known[_kind(match)] = [*islice(self._fitting(match), MOST_FITTING)]
        for number, match in open_ones:
            if ways := self.known[_kind(match)]:
                rests = match.rests if ways[0] == match.joint.ways[0] else "values"
                decided = replace(match, joint=replace(match.joint, ways=(ways[0],)), rests=rests)
                found.matches[number] = found.matches[number][0], decided

    def _fitting(self, match: Match) -> Iterator[Way]:
        """Yield the ways that turn one side's values into the other's, of those that fitted before."""
        is_split = match.joint.whole in match.left and match.joint.whole not in match.right
        pieces, whole = (self.right, self.left) if is_split else (self.left, self.right)
        kind = _kind(match)
        for way in [*self.known[kind]] if kind in self.known else _all_ways(match.joint):
            if self._fits(match.joint, way, pieces, whole, is_split):
                yield way

    def _fits(self, found: Joint, way: Way, pieces: Tensors, whole: Tensors, is_split: bool) -> bool:
        for kind in sorted(found.whole.first.shapes, key=lambda kind: kind != "weight"):
            count = 1 if found.stacked else len(found.whole.members)
            for place in range(count):
                units = [found.pieces[n] for n in way.order]
                chosen = [u.members if found.stacked else (u.members[place],) for u in units]
                columns = [[pieces[module.names[kind]] for module in members] for members in chosen]
                made = _made(found.steps(way, kind), columns)
                there = whole[found.whole.members[place].names[kind]]
                if made is None or not _same(*((there, made) if is_split else (made, there))):
                    return False
        return True

    def _untangled(self, tangle: Tangle) -> Iterator[Match]:
        """Yield the layers of a tangle whose values one layer on the other side has."""
        waiting: dict[bytes, list[Unit]] = defaultdict(list)
        for unit in reversed(tangle.right):
            waiting[_digest(unit, self.right, None, transpose=False)].append(unit)
        for unit in tangle.left:
            for transpose in (False, True):
                digest = _digest(unit, self.left, self._types(unit, tangle), transpose=transpose)
                if waiting.get(digest):
                    other = waiting[digest].pop()
                    found = joint([unit], other)
                    assert found is not None
                    way = Way(transposed=transpose)
                    yield Match((unit,), (other,), replace(found, ways=(way,)), "values")
                    break

    def _types(self, unit: Unit, tangle: Tangle) -> dict[str, str]:
        """Return the types that the other side has by kind."""
        there = tangle.right[0].first.names
        return {kind: self.right[there[kind]].dtype.name for kind in unit.first.names}


def _kind(match: Match) -> object:
    units = (*match.joint.pieces, match.joint.whole)
    shapes = tuple(tuple(unit.first.signature) for unit in units)
    return tuple(pattern(unit.first.parts) for unit in units), shapes


def _all_ways(found: Joint) -> Iterator[Way]:
    for way in found.ways:
        yield from found.numbered(way)


def _made(steps: tuple[Verb, ...], columns: list[list[TensorRef]]) -> TensorRef | None:
    """Return what steps make of pieces, each with the members that are stacked; None if they do not fit."""
    stacks = len(columns[0]) > 1 or any(step.verb == "stack" for step in steps)
    fields = (STACKED,) if stacks else ()
    rows = [tuple(row) for row in zip(*columns, strict=True)]
    bundle = Bundle(fields, {(place,) if stacks else (): row for place, row in enumerate(rows)})
    context = RuleContext({}, 1)
    try:
        for step in steps:
            bundle = step.apply(bundle, context)
    except VerbMisfit:
        return None
    ((tensor,),) = bundle.tensors.values()
    return tensor


def _same(made: TensorRef, there: TensorRef) -> bool:
    """Return whether values are the same, those of the input cast to the reference's type."""
    if made.dtype is not there.dtype:
        made, _ = cast(made, there.dtype.name)
    return same_values(made, there)


def _digest(unit: Unit, tensors: Tensors, types: Mapping[str, str] | None, *, transpose: bool) -> bytes:
    digest = hashlib.sha256()
    for kind, name in sorted(unit.first.names.items()):
        tensor = tensors[name]
        if types is not None and types[kind] != tensor.dtype.name:
            tensor, _ = cast(tensor, types[kind])
        if transpose and kind == "weight" and len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1]:
            tensor = transposed(tensor, (1, 0))
        digest.update(kind.encode())
        for piece in stream(tensor):
            digest.update(piece)
    return digest.digest()


def differing(made: Tensors, there: Tensors) -> str | None:
    """Return the name of the first tensor whose values are not those of the reference; None if all are."""
    return next((name for name, tensor in there.items() if not _same(made[name], tensor)), None)
