"""The one way from the names and shapes of one state to those of another, and what keeps it from being one.

What a step rests on is one of: `name`, the word for a layer's `role`, a `shape` that nothing else has,
`numbers` that rise on both sides, the `order` of both files, or `values`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ...checkpoint.states import COUNTER
from .blocks import TOP, Search, falling
from .layers import Doubts, Match, Tangle
from .modules import MAX_PARTS, Module, Parts, Places, StateEntry, parameter, tree
from .roles import roles, rotary_stems
from .ways import Joint, joint

# What a model computes for itself and older versions of libraries saved
BUFFERS = re.compile(
    rf"(^|\.)({COUNTER}|(\w+_)?inv_freq|position_ids|token_type_ids|masked_bias|freqs_cis|relative_position_index"
    r"|(cos|sin)_cached|(causal|attn|attention|relative_position)_mask|_float_tensor|_extra_state)$"
)
MASK = re.compile(r"attn(\w*)\.(bias|mask)$|attention\.bias$")


@dataclass(slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        matches, tangles: layers with and without a certain counterpart, each with its scope.
        left, right: modules without any.
        dropped: names of the input that the reference has no place for and needs none.
        lacking: names of the reference that its model computes, or counts from 0.
        ties: (new name, name in the reference) that share memory in the reference.
        untied: (name, the name that is kept) of the input.
        resized: pairs that differ in the first size alone, as vocabularies do.
        uneven: blocks of one kind of which both sides have different numbers, in words.
        falling: where numbers that pair blocks count up on one side and not on the other, in words.
        unshown: names of square matrices that are taken as they are on the word of their equal names alone.
    """

    matches: list[tuple[str, Match]] = field(default_factory=list)
    tangles: list[tuple[str, Tangle]] = field(default_factory=list)
    left: list[Module] = field(default_factory=list)
    right: list[Module] = field(default_factory=list)
    dropped: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    untied: tuple[tuple[str, str], ...] = ()
    resized: list[tuple[Module, Module]] = field(default_factory=list)
    uneven: tuple[str, ...] = ()
    falling: tuple[str, ...] = ()
    unshown: tuple[str, ...] = ()


def search(path: str, left: Places, right: Places, *, with_values: bool = False) -> SearchResult:
    """Find the way from one state to the names and shapes of another, from its header alone.

    Args:
        path: the file of the first, for messages.
        left: what the state has.
        right: what the reference has: a file's, or a model's.
        with_values: values will be compared, so that nothing is decided that they can decide.

    Raises:
        Unsupported: names have more parts than memory is for.
    """
    dropped, lacking = (_buffers(one, other) for one, other in ((left, right), (right, left)))
    gone = {*dropped}, {*lacking}
    bare = [
        {n: p for n, p in side.items() if n not in out} for side, out in zip((left, right), gone, strict=True)
    ]
    untied, ties = _second_names(bare[0], bare[1]), _second_names(bare[1], bare[0])
    for side, pairs in zip(bare, (untied, ties), strict=True):
        for name, _ in pairs:
            del side[name]
    rotary = rotary_stems(_parts(left)) | rotary_stems(_parts(right))
    work = Search(Doubts(rotary, layout=with_values))
    work.pair(tree(path, bare[0]), tree(path, bare[1]))
    found = SearchResult(work.matches, work.tangles, work.left, work.right, dropped, lacking, ties, untied)
    found.uneven = tuple(
        f"{len(a)} blocks such as '{a[0].path}' here and {len(b)} such as '{b[0].path}' in the reference"
        for a, b in work.uneven
    )
    _resize(found)
    if not with_values:
        found.falling = tuple(falling((m for _, m in found.matches), work.trusted.values()))
        _by_order(found, _is_sorted(left) or _is_sorted(right))
        found.matches = _decided(found.matches, kernels={_ends(left), _ends(right)})
        if not any(_shows_axes(match.joint) for _, match in found.matches):
            squares = [match.left[0].first for _, match in found.matches if match.joint.is_square]
            found.unshown = tuple(each.names["weight"] for each in squares)
    return found


def _parts(places: Places) -> Iterator[Parts]:
    return (tuple(parameter(name, places)[0].split(".", MAX_PARTS)) for name in places)


def _ends(places: Places) -> bool:
    return any(name.endswith(".kernel") for name in places)


def _buffers(one: Places, other: Places) -> tuple[str, ...]:
    """Return the names of one side that its model computes, of kinds that the other has none of."""
    kinds = {name.rpartition(".")[2] for name in other if BUFFERS.search(name)}
    masks = any(_is_mask(name, place) for name, place in other.items())
    return tuple(
        name
        for name, place in one.items()
        if (BUFFERS.search(name) and name.rpartition(".")[2] not in kinds)
        or (_is_mask(name, place) and not masks)
    )


def _is_mask(name: str, place: StateEntry) -> bool:
    """Return whether an entry is the mask of GPT-2's attention, which is named like a bias."""
    shape = place.shape or ()
    return bool(MASK.search(name)) and len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]


def _second_names(side: Places, other: Places) -> tuple[tuple[str, str], ...]:
    """Return (name, name that is kept) of tied tensors of which the other side has fewer."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, place in side.items():
        groups[place.first].append(name)
    have, want = (Counter(_shape(place) for place in places.values()) for places in (side, other))
    found: list[tuple[str, str]] = []
    for names in groups.values():
        shape = _shape(side[names[0]])
        if len(names) > 1 and have[shape] > want[shape]:
            kept = next((n for n in names if _role(n) == ("embedding",)), names[0])
            found += ((name, kept) for name in names if name != kept)
    return tuple(found)


def _shape(place: StateEntry) -> tuple[int, ...]:
    return tuple(sorted(place.shape or ()))


def is_shared(name: str) -> bool:
    """Return whether a name is that of an embedding or a head, which models tie."""
    return _role(name) in (("embedding",), ("head",))


def _role(name: str) -> object:
    (role,) = roles([(tuple(name.removesuffix(".weight").split(".")), ())])
    return role


def _resize(found: SearchResult) -> None:
    """Pair what is left and differs in its first size alone, under equal names or roles."""
    sides = [{key: m for m in side for key in _keys(m)} for side in (found.left, found.right)]
    for key in sides[0].keys() & sides[1].keys():
        left, right = sides[0][key], sides[1][key]
        if left in found.left and right in found.right and _differ_in_rows(left, right):
            found.resized.append((left, right))
            found.left.remove(left)
            found.right.remove(right)


def _keys(module: Module) -> list[object]:
    (role,) = roles([(module.parts, ())])
    return [role, module.parts[-1]] if role in (("embedding",), ("head",)) else [module.parts[-1]]


def _differ_in_rows(left: Module, right: Module) -> bool:
    if left.shapes.keys() != right.shapes.keys() or left.types != right.types:
        return False
    pairs = [(shape, right.shapes[kind]) for kind, shape in left.shapes.items()]
    rows = {(a[0], b[0]) for a, b in pairs if a and b}
    return all(a and b and a[1:] == b[1:] for a, b in pairs) and len(rows) == 1


def _is_sorted(places: Places) -> bool:
    """Return whether the names of each file and type are sorted, as writers of safetensors leave them."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, place in places.items():
        groups[place.file, place.dtype].append(name)
    return all(names == sorted(names) for names in groups.values())


def _by_order(found: SearchResult, is_sorted: bool) -> None:
    """Resolve tangles by the order of both files, if it agrees wherever something else has decided.

    A file whose names are sorted says nothing, nor do a few layers; and words for parts that families order
    differently (q, k and v) are believed, not the place where they stand.
    """
    singles = [(m.left[0].first.number, m.right[0].first.number) for _, m in found.matches if _is_single(m)]
    singles.sort()
    tangled = sum(len(tangle.left) for _, tangle in found.tangles)
    rising = all(a[1] < b[1] for a, b in pairwise(singles))
    if is_sorted or not rising or len(singles) < max(LEAST_IN_ORDER, tangled):
        return
    left_over: list[tuple[str, Tangle]] = []
    for scope, tangle in found.tangles:
        pairs = _in_order(tangle, singles)
        if pairs:
            found.matches += ((scope, match) for match in pairs)
        else:
            left_over.append((scope, tangle))
    found.tangles = left_over


LEAST_IN_ORDER = 8


def _is_single(match: Match) -> bool:
    return all(len(side) == 1 == len(side[0].members) for side in (match.left, match.right))


def _in_order(tangle: Tangle, known: list[tuple[int, int]]) -> list[Match]:
    """Return the layers of a tangle in the order of both files; [] where words or known pairs disagree."""
    sides = [sorted(side, key=lambda unit: unit.first.number) for side in (tangle.left, tangle.right)]
    if any(any(roles([(u.first.parts, u.weight) for u in side])) for side in sides):
        return []
    pairs = [(a.first.number, b.first.number) for a, b in zip(*sides, strict=True)]
    merged = sorted([*known, *pairs])
    if any(a[1] >= b[1] for a, b in pairwise(merged)):
        return []
    joints = [joint([a], b) for a, b in zip(*sides, strict=True)]
    made = zip(*sides, joints, strict=True)
    return [Match((a,), (b,), found, "order") for a, b, found in made if found] if all(joints) else []


def _decided(matches: list[tuple[str, Match]], kernels: set[bool]) -> list[tuple[str, Match]]:
    """Return the matches, square matrices as they are if others show that, and none is transposed.

    Where any matrix of the layers is transposed, nothing but values tells; where all are square, equal names.
    """
    seen: dict[str, set[bool]] = defaultdict(set)
    for scope, match in matches:
        if _shows_axes(match.joint):
            seen[scope].add(match.joint.ways[0].transposed)
    in_layers = any(True in seen[scope] for scope in seen if scope != TOP)
    anywhere = any(True in turns for turns in seen.values()) or len(kernels) > 1
    is_shown = any(seen.values())

    def is_straight(scope: str, rests: str) -> bool:
        if not anywhere:
            return is_shown or rests == "name"
        return scope != TOP and not in_layers and seen[scope] == {False}

    def decided(scope: str, match: Match) -> Match:
        found = match.joint
        if found.is_square and is_straight(scope, match.rests):
            ways = tuple(way for way in found.ways if not way.transposed)
            return replace(match, joint=replace(found, ways=ways))
        if found.is_crossed and not is_straight(scope, match.rests):
            return replace(match, joint=replace(found, ways=(*found.ways, *found.ways)))
        return match

    return [(scope, decided(scope, match)) for scope, match in matches]


def _shows_axes(found: Joint) -> bool:
    """Return whether a match shows how matrices are laid out: it has one, neither square nor crossed.

    An embedding does not: it lies the same way in families that transpose their layers.
    """
    is_matrix = len(found.whole.weight) in (2, 3) and not found.reshaped
    is_embedding = any(_role(name) == ("embedding",) for name in found.whole.first.names.values())
    return is_matrix and not (found.is_square or found.is_crossed or is_embedding)
