"""How layers of one checkpoint become one of another: the ways that shapes allow, as steps of rules.

Layers are fused, stacked and transposed in one direction only; the other direction is the inverse of the
steps. What shapes leave open (a square matrix, the order of pieces, rotary embeddings) is several ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import gcd

from ..mapping.verbs import Concat, PermuteHeads, Reshape, Stack, Transpose, Verb
from .modules import Module, Parts, Sizes

STACKED = "e"  # the placeholder that counts what is stacked


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer, or layers that differ in one number of their names alone, in its order."""

    parts: Parts  # within the block; the number that tells several apart as #
    members: tuple[Module, ...]

    @property
    def first(self) -> Module:
        """One that stands for all."""
        return self.members[0]

    @property
    def weight(self) -> Sizes:
        """The shape by which roles are told."""
        shapes = self.first.shapes
        return shapes.get("weight", next(iter(shapes.values())))

    @property
    def normal(self) -> tuple[object, ...]:
        """The signature without the order of a matrix's axes."""
        turned = ((kind, _sorted(kind, shape), type_) for kind, shape, type_ in self.first.signature)
        return (len(self.members), *turned)


def _sorted(kind: str, shape: Sizes) -> Sizes:
    return (*shape[:-2], *sorted(shape[-2:])) if kind == "weight" and len(shape) in (2, 3) else shape


@dataclass(frozen=True, slots=True)
class Way:
    """How pieces are joined.

    Attributes:
        order: the pieces in the order in which they lie in the whole.
        groups: how many groups of rows the pieces are dealt into (heads); 1 puts them one after another,
            0 stands for a number that only values tell.
        transposed: the two last axes of the whole are swapped.
        turned: the rows of queries and keys are brought from one order of rotary embeddings to another:
            "halves" or "pairs" names the whole's; "" leaves them.
        heads: of each piece, where `turned`; 0 stands for a number that only values tell.
    """

    order: tuple[int, ...] = (0,)
    groups: int = 1
    transposed: bool = False
    turned: str = ""
    heads: tuple[int, ...] = ()

    def words(self, names: Sequence[str]) -> str:
        """Return the way in words, for pieces of these names."""
        said = []
        if len(names) > 1:
            said.append(", ".join(names[place] for place in self.order))
            said += ["dealt by heads" if self.groups != 1 else "one after another"]
        elif self.groups != 1:
            said.append("in another layout")
        said += ["transposed"] if self.transposed else []
        said += [f"heads reordered to {self.turned}"] if self.turned else []
        return ", ".join(said) or "as it is"


@dataclass(frozen=True, slots=True)
class Joint:
    """Pieces that make up a whole, and how they may.

    Attributes:
        pieces: units of one side, and `whole` one of the other.
        stacked: the members of each piece lie along a first axis of the whole.
        ways: all that names and shapes allow; the likeliest first.
        reshaped: the shapes differ in axes of size 1.
        is_square: only the way of other layers tells whether it is transposed.
        is_crossed: only that, too: another layer has the shape that this one has transposed.
    """

    pieces: tuple[Unit, ...]
    whole: Unit
    stacked: bool = False
    ways: tuple[Way, ...] = (Way(),)
    reshaped: bool = False
    is_square: bool = False
    is_crossed: bool = False

    def steps(self, way: Way, kind: str) -> tuple[Verb, ...]:
        """Return the steps from the pieces, in the way's order, to the whole."""
        steps: list[Verb] = []
        for place, heads in enumerate(way.heads if way.turned else ()):
            if heads:
                parts = (place,) if len(self.pieces) > 1 else ()
                steps.append(PermuteHeads(heads, way.turned, parts=parts))
        if self.stacked:
            steps.append(Stack(STACKED))
        shapes = [self.pieces[place].first.shapes[kind] for place in way.order]
        lead = (len(self.pieces[0].members),) if self.stacked else ()
        if len(shapes) > 1:
            steps += _joined(shapes, lead, way.groups)
        if way.transposed and kind == "weight":
            axes = [*range(len(lead) + len(shapes[0]))]
            steps.append(Transpose((*axes[:-2], axes[-1], axes[-2])))
        if self.reshaped and shapes[0] != (whole := self.whole.first.shapes[kind]):
            steps.append(Reshape(whole, before=shapes[0]))
        return tuple(steps)

    def numbered(self, way: Way) -> Iterator[Way]:
        """Yield a way with every number of heads that the shapes allow, where it leaves them open."""
        if len(self.pieces) == 1 and way.groups == 0:
            return
        rows = [self.pieces[place].weight[0] for place in way.order]
        common = gcd(*rows)
        groups = [n for n in _divisors(common) if n > 1] if way.groups == 0 else [way.groups]
        heads: Iterator[tuple[int, ...]] = iter([way.heads])
        if way.turned:
            rotated = gcd(*(r for r, h in zip(rows, way.heads, strict=True) if not h))
            sizes = [n for n in _divisors(rotated) if n % 2 == 0]
            heads = (tuple(-1 if h else r // n for r, h in zip(rows, way.heads, strict=True)) for n in sizes)
        for number, each in product(groups, [*heads]):
            yield replace(way, groups=number, heads=tuple(0 if n < 0 else n for n in each))


def _joined(shapes: Sequence[Sizes], lead: Sizes, groups: int) -> list[Verb]:
    rows = tuple(shape[0] for shape in shapes)
    rest, axis = shapes[0][1:], len(lead)
    if groups == 1:
        return [Concat(axis, rows)]
    cut = tuple(row // groups for row in rows)
    dealt: list[Verb] = [
        Reshape((*lead, groups, size, *rest), before=(*lead, row, *rest), parts=(place,))
        for place, (size, row) in enumerate(zip(cut, rows, strict=True))
    ]
    whole = Reshape((*lead, sum(rows), *rest), before=(*lead, groups, sum(cut), *rest))
    return [*dealt, Concat(axis + 1, cut), whole]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, as far as heads may be many."""
    return [n for n in range(1, min(number, 4096) + 1) if number % n == 0]


def joint(pieces: Sequence[Unit], whole: Unit) -> Joint | None:
    """Return how pieces make up a whole by their shapes, one after another; None where they do not."""
    count = len(pieces[0].members)
    if any(len(piece.members) != count for piece in pieces):
        return None
    for stacked in (False, True):
        if len(whole.members) == (1 if stacked else count):
            found = _by_shapes(tuple(pieces), whole, stacked)
            if found is not None:
                return found
    return None


def _by_shapes(pieces: tuple[Unit, ...], whole: Unit, stacked: bool) -> Joint | None:
    theirs = whole.first
    if any({*piece.first.shapes} != {*theirs.shapes} for piece in pieces):
        return None
    if stacked and "#" not in pieces[0].parts and len(pieces[0].members) > 1:
        return None
    lead = (len(pieces[0].members),) if stacked else ()
    order, turns, reshaped = tuple(range(len(pieces))), set[bool](), False
    is_square = False
    for kind, shape in theirs.shapes.items():
        shapes = [piece.first.shapes[kind] for piece in pieces]
        if any(piece.first.types[kind] != theirs.types[kind] for piece in pieces):
            return None
        made = _sum(shapes, lead)
        axes = (2, 3) if any("expert" in part for part in whole.first.parts) else (2,)
        is_matrix = kind == "weight" and len(made) == len(shape) in axes
        if is_matrix and made[-2] == made[-1] > 1 and made == shape:
            is_square = True
        elif is_matrix and made == (*shape[:-2], shape[-1], shape[-2]) and made != shape:
            turns.add(True)
        elif made == shape:
            turns |= {False} if is_matrix else set()
        elif made and len(pieces) == 1 and not stacked and _squeezed(made) == _squeezed(shape):
            reshaped = True
        else:
            return None
    ways = tuple(Way(order, transposed=turn) for turn in ((False, True) if is_square else (True in turns,)))
    return Joint(pieces, whole, stacked, ways, reshaped, is_square)


def _squeezed(shape: Sizes) -> Sizes:
    return tuple(size for size in shape if size != 1)


def _sum(shapes: Sequence[Sizes], lead: Sizes) -> Sizes:
    """Return the shape of several joined along their first axis; () where they do not go together."""
    if len(shapes) == 1:
        return (*lead, *shapes[0])
    if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
        return ()
    return (*lead, sum(shape[0] for shape in shapes), *shapes[0][1:])


def with_layouts(found: Joint, *, by_order: bool, dealt: bool) -> Joint:
    """Return a joint whose pieces may lie in other orders, or be dealt head by head."""
    orders = [*permutations(range(len(found.pieces)))] if by_order else [found.ways[0].order]
    ways = [
        replace(way, order=order, groups=groups)
        for groups in ((1, 0) if dealt else (1,))
        for order in orders
        for way in found.ways
    ]
    return replace(found, ways=tuple(ways))


def with_turns(found: Joint, rotated: Sequence[bool]) -> Joint:
    """Return a joint in which the rows of some pieces, queries and keys, may be in another rotary order."""
    ways = [
        replace(way, turned=turned, heads=tuple(-1 + rotated[p] for p in way.order) if turned else ())
        for turned in ("", "halves", "pairs")
        for way in found.ways
    ]
    return replace(found, ways=tuple(ways))
