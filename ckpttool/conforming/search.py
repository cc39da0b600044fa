"""The one way from the names and shapes of one state to those of another, and what keeps it from being one.

What a step rests on is one of: `name`, the word for a layer's `role`, a `shape` that nothing else has,
`numbers` that rise on both sides, the `order` of both files, or `values`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise

from ..core.checkpoint.state import COUNTER
from ..core.tensors.ref import TensorRef
from ..core.tensors.values import same_values, stream
from ..mapping.verbs import Bundle, RuleContext, Verb, VerbMisfit, cast, transposed
from .blocks import TOP, Search, falling
from .layers import Doubts, Match, Tangle, role_alone, roles, rotary_stems
from .modules import MAX_PARTS, Module, Parts, Places, StateEntry, parameter, pattern, tree
from .ways import STACKED, Joint, Unit, Way, joint

# The last part of what a model computes for itself and older versions of libraries saved
BUFFERS = re.compile(
    rf"({COUNTER}|(\w+_)?inv_freq|position_ids|token_type_ids|masked_bias|freqs_cis|relative_position_index"
    r"|(cos|sin)_cached|(causal|attn|attention|relative_position)_mask|_float_tensor|_extra_state)"
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
    sides = zip((left, right), gone, strict=True)
    bare = [{name: place for name, place in side.items() if name not in out} for side, out in sides]
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
    kinds = {name.rpartition(".")[2] for name in other if is_buffer(name)}
    masks = any(_is_mask(name, place) for name, place in other.items())
    return tuple(
        name
        for name, place in one.items()
        if (is_buffer(name) and name.rpartition(".")[2] not in kinds) or (_is_mask(name, place) and not masks)
    )


def is_buffer(name: str) -> bool:
    """Return whether a name is that of what a model computes for itself."""
    return BUFFERS.fullmatch(name.rpartition(".")[2]) is not None


def _is_mask(name: str, place: StateEntry) -> bool:
    """Return whether an entry is the mask of GPT-2's attention, which is named like a bias."""
    shape = place.shape or ()
    is_square = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return is_square and MASK.search(name) is not None


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
    return role_alone(tuple(name.removesuffix(".weight").split(".")))


def _resize(found: SearchResult) -> None:
    """Pair what is left and differs in its first size alone, under equal names or roles."""
    sides = [{key: m for m in side for key in _keys(m)} for side in (found.left, found.right)]
    gone: set[int] = set()
    for key in sides[0].keys() & sides[1].keys():
        left, right = sides[0][key], sides[1][key]
        if not gone & {id(left), id(right)} and _differ_in_rows(left, right):
            found.resized.append((left, right))
            gone |= {id(left), id(right)}
    found.left, found.right = ([m for m in side if id(m) not in gone] for side in (found.left, found.right))


def _keys(module: Module) -> list[object]:
    role = role_alone(module.parts)
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


# ---- Decisions by values, where both files hold the same model


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
        every = chain.from_iterable(map(match.joint.numbered, match.joint.ways))
        for way in [*self.known[kind]] if kind in self.known else every:
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
