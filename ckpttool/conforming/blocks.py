"""Blocks of two checkpoints paired from the top: by their number of elements, their names and their numbers.

A pair of blocks is solved for itself (`layers.solve`); equal pairs, as the layers of a transformer, once.

What was paired by numbers must count up on both sides, wherever something else tells which is which: a
U-Net's blocks may count up in one library and down in another. Of two that are equal the numbers would say
the wrong one, and the others, which shapes tell apart, show it (`falling`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from .layers import Doubts, Match, Solution, Tangle, alone, solve
from .modules import Module, ModuleBlock, Parts, by_numbers, counted, paired_by_numbers, pattern
from .ways import Unit

Pairs = list[tuple[ModuleBlock, ModuleBlock]]
TOP = ""  # the scope of what lies in no repeated block


@dataclass(slots=True)
class Search:
    """What is found, pair of blocks by pair of blocks.

    Attributes:
        doubts: what names are not believed to say.
        matches, tangles: each with its scope: the repeated block that it lies in, or TOP.
        left, right: modules without a counterpart.
        uneven: blocks of one kind of which the sides have different numbers.
        trusted: names of what was paired by numbers alone, once for each kind.
    """

    doubts: Doubts
    matches: list[tuple[str, Match]] = field(default_factory=list)
    tangles: list[tuple[str, Tangle]] = field(default_factory=list)
    left: list[Module] = field(default_factory=list)
    right: list[Module] = field(default_factory=list)
    uneven: list[tuple[list[ModuleBlock], list[ModuleBlock]]] = field(default_factory=list)
    trusted: dict[object, tuple[list[Parts], list[Parts]]] = field(default_factory=dict)
    _solved: dict[object, tuple[list[Module], Solution]] = field(default_factory=dict)

    def pair(self, left: ModuleBlock, right: ModuleBlock, scope: str = TOP) -> None:
        """Match everything below two blocks."""
        left, right = _unwrapped(left), _unwrapped(right)
        taken: set[int] = set()
        for pairs in self._classes(left, right, taken):
            inner = scope
            if scope == TOP and len(pairs) > 1:
                inner = ".".join(pattern(pairs[0][0].parts))
            self._trust([a.parts for a, _ in pairs], [b.parts for _, b in pairs])
            for a, b in pairs:
                self.pair(a, b, inner)
        rest = [[*_uncovered(side, taken)] for side in (left, right)]
        if rest[0] and rest[1]:
            self._solve(rest[0], rest[1], (len(left.parts), len(right.parts)), scope)
        else:
            self.left += rest[0]
            self.right += rest[1]

    def _trust(self, left: list[Parts], right: list[Parts]) -> None:
        """Note names that were paired by numbers."""
        ends = [(pattern(side[0]), pattern(side[-1])) for side in (left, right)]
        if len(left) > 1 and all(first == last for first, last in ends):
            self.trusted.setdefault((ends[0][0], ends[1][0]), (left, right))

    def _classes(self, left: ModuleBlock, right: ModuleBlock, taken: set[int]) -> Iterator[Pairs]:
        """Yield the pairs of blocks below two, the largest blocks first; `taken` has what lies in them."""
        sides = [_by_total(left), _by_total(right)]
        for total in sorted(sides[0].keys() & sides[1].keys(), reverse=True):
            both = [_outermost(side[total], taken) for side in sides]
            if pairs := _aligned(both[0], both[1], (len(left.parts), len(right.parts))):
                yield _taking(pairs, taken)
            elif not self.uneven and len(both[0]) != len(both[1]) and all(map(_is_stack, both)):
                self.uneven.append((both[0], both[1]))
        # What only one side has (a bias, an expert) changes the total: then the number of blocks tells.
        stacks = [_stacks(side, taken) for side in (left, right)]
        for count in stacks[0].keys() & stacks[1].keys():
            if len(stacks[0][count]) == len(stacks[1][count]) == 1:
                (a,), (b,) = stacks[0][count], stacks[1][count]
                yield _taking([*zip(a, b, strict=True)], taken)

    def _solve(self, left: list[Module], right: list[Module], cut: tuple[int, int], scope: str) -> None:
        both = ((left, cut[0]), (right, cut[1]))
        known = [[(pattern(m.parts), m.parts[n:], m.signature) for m in side] for side, n in both]
        key = (tuple(known[0]), tuple(known[1]))
        modules = [*left, *right]
        if key not in self._solved:
            self._solved[key] = modules, solve(left, right, cut, self.doubts)
        solved, solution = self._solved[key]
        here = dict(zip(map(id, solved), modules, strict=True))
        for match in solution.matches:
            moved = [_moved(units, here) for units in (match.joint.pieces, (match.joint.whole,))]
            joint = replace(match.joint, pieces=moved[0], whole=moved[1][0])
            sides = moved[::-1] if match.joint.whole in match.left else moved
            self.matches.append((scope, Match(sides[0], sides[1], joint, match.rests)))
        for group in solution.numbered:
            self._trust(*([here[id(unit.first)].parts for unit in side] for side in group))
        for tangle in solution.tangles:
            self.tangles.append((scope, Tangle(_moved(tangle.left, here), _moved(tangle.right, here))))
        self.left += [here[id(unit.first)] for unit in alone(solution.left)]
        self.right += [here[id(unit.first)] for unit in alone(solution.right)]


def _moved(units: Iterable[Unit], here: dict[int, Module]) -> tuple[Unit, ...]:
    return tuple(Unit(unit.parts, tuple(here[id(member)] for member in unit.members)) for unit in units)


def _unwrapped(block: ModuleBlock) -> ModuleBlock:
    """Return the first block below a chain of modules that hold nothing else."""
    while len(block.children) == 1 and block.module is None:
        (inner,) = block.children.values()
        if not inner.children:
            return block
        block = inner
    return block


def _composites(block: ModuleBlock) -> Iterator[ModuleBlock]:
    """Yield the composite blocks below one, outer ones first; of a chain of blocks the innermost."""
    waiting = [*reversed(block.children.values())]
    while waiting:
        inner = waiting.pop()
        if inner.is_composite:
            yield inner
        waiting += reversed(inner.children.values())


def _by_total(block: ModuleBlock) -> dict[int, list[ModuleBlock]]:
    groups: dict[int, list[ModuleBlock]] = defaultdict(list)
    for inner in _composites(block):
        groups[inner.total].append(inner)
    return groups


def _all_below(block: ModuleBlock) -> Iterator[ModuleBlock]:
    waiting = [block]
    while waiting:
        yield (inner := waiting.pop())
        waiting += reversed(inner.children.values())


def _outermost(blocks: Sequence[ModuleBlock], taken: set[int]) -> list[ModuleBlock]:
    """Return the blocks that lie in none of the others and are not taken."""
    inside: set[int] = set()
    found = []
    for block in sorted(blocks, key=lambda each: len(each.parts)):
        if id(block) not in taken and id(block) not in inside:
            found.append(block)
            if len(blocks) > 1:
                inside.update(map(id, _all_below(block)))
    return found


def _taking(pairs: Pairs, taken: set[int]) -> Pairs:
    for pair in pairs:
        for block in pair:
            taken.update(map(id, _all_below(block)))
    return pairs


def _uncovered(block: ModuleBlock, taken: set[int]) -> Iterator[Module]:
    return (each.module for each in _all_below(block) if each.module is not None and id(each) not in taken)


def _aligned(left: list[ModuleBlock], right: list[ModuleBlock], cut: tuple[int, int]) -> Pairs:
    """Return which of several blocks belong together; [] where nothing tells."""
    if len(left) != len(right) or not left:
        return []
    if len(left) == 1:
        return [(left[0], right[0])]
    names = [{block.parts[n:]: block for block in side} for side, n in zip((left, right), cut, strict=True)]
    if names[0].keys() == names[1].keys():
        return [(block, names[1][parts]) for parts, block in names[0].items()]
    pairs = paired_by_numbers([block.parts for block in left], [block.parts for block in right])
    return [(left[a], right[b]) for a, b in pairs]


def _is_stack(blocks: Sequence[ModuleBlock]) -> bool:
    return len(blocks) == 1 or by_numbers([block.parts for block in blocks]) is not None


def _stacks(block: ModuleBlock, taken: set[int]) -> dict[int, list[list[ModuleBlock]]]:
    """Return the outermost runs of blocks that one number tells apart, by their length."""
    groups: dict[object, list[ModuleBlock]] = defaultdict(list)
    for inner in _composites(block):
        if id(inner) not in taken:
            groups[pattern(inner.parts)].append(inner)
    found: dict[int, list[list[ModuleBlock]]] = defaultdict(list)
    inside: set[int] = set()
    for blocks in groups.values():
        order = by_numbers([each.parts for each in blocks]) if len(blocks) > 1 else None
        if order is not None and id(blocks[0]) not in inside:
            found[len(blocks)].append([blocks[place] for place in order])
            for each in blocks:
                inside.update(map(id, _all_below(each)))
    return found


def varying(names: list[Parts]) -> int:
    """Return which part of names differs among them; they have the same pattern."""
    return next(place for place, column in enumerate(zip(*names, strict=True)) if len({*column}) > 1)


def falling(matches: Iterable[Match], trusted: Iterable[tuple[list[Parts], list[Parts]]]) -> Iterator[str]:
    """Yield, in words, where numbers that were trusted do not rise together.

    Args:
        matches: everything that was matched.
        trusted: the names on both sides of what was paired by numbers.
    """
    bare = cache(pattern)
    places = [tuple((names, varying(names)) for names in sides) for sides in trusted]
    known = {tuple((bare(names[0][:at]), at) for names, at in sides) for sides in places}
    seen: dict[object, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for match in matches:
        pair = match.left[0].first.parts, match.right[0].first.parts
        for sides in known:
            if all(
                len(parts) > at and bare(parts[:at]) == begin
                for parts, (begin, at) in zip(pair, sides, strict=True)
            ):
                numbers = [counted((parts[at],)) for parts, (_, at) in zip(pair, sides, strict=True)]
                before = tuple(parts[:at] for parts, (_, at) in zip(pair, sides, strict=True))
                if all(numbers):
                    words = tuple(pattern((parts[at],)) for parts, (_, at) in zip(pair, sides, strict=True))
                    seen[before, words][numbers[0][-1]].add(numbers[1][-1])
    for (before, _), found in seen.items():  # type: ignore[misc]
        order = [found[number] for number in sorted(found)]
        if any(max(a) >= min(b) for a, b in pairwise(order)):
            left, right = (".".join(parts) or "the top" for parts in before)
            yield f"the numbers below '{left}' and '{right}' do not count in the same direction"
