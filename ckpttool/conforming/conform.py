"""Bring a checkpoint under the names and shapes of another one; refuse where the way is not certain.

An optimizer may number its parameters. A number means the same parameter on both sides if both list the
parameters of each group in the same order. Buffers have no numbers and may stand anywhere.
"""

from __future__ import annotations

import glob
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.optimizer_names import Names, Parameters, in_order, parameters_of
from ..core.checkpoint.optimizer_view import BadOptimizer, OptimizerView, is_numbered, is_optimizer
from ..core.checkpoint.selection import replace_state
from ..core.checkpoint.settings import require_unpacked
from ..core.checkpoint.state import COUNTER
from ..core.formats.reading import File
from ..core.formats.reading import open as open_checkpoint
from ..core.inert_pickle.values import walk
from ..core.tensors.ref import DTYPES, PLAIN_FLOATS, Computed, DType, TensorRef
from ..core.tensors.values import TensorPart, assembled, same_values
from ..core.words import counted
from ..errors import Ambiguous, CheckFailed, Mismatch, NothingToDo, Refused, UsageFault
from ..mapping.applying import apply
from ..mapping.rules import MapRules
from .modules import ADAPTED, OF_ADAPTER, Module, Parts, Places, StateEntry, places_of, without_numbers
from .rules import RuleRow, as_rules, rows
from .search import SearchResult, Tensors, Values, differing, is_buffer, is_shared, search


def require_order(checkpoint: Checkpoint, state: str | None, theirs: Places) -> None:
    """Raise Refused where an optimizer numbers parameters in another order than the reference has them."""
    optimizers = [value for value in walk(checkpoint.tree) if is_numbered(value)]
    if not optimizers:
        return
    floats = [(name, shape) for name, shape in parameters_of(checkpoint, state) if name in theirs]
    number = {name: i for i, name in enumerate(theirs)}
    place = {name: number.get(theirs[name].first, number[name]) for name, _ in floats}  # a tie's is its first
    if _is_rising(place.values()):
        return
    for optimizer in optimizers:
        groups = _named(optimizer, floats)
        if groups and all(_is_rising(place[name] for name in group) for group in groups):
            continue
        what = "its optimizer numbers the parameters in another order than the reference has them"
        if not groups:
            unknown = f"nothing says which of {len(floats)} tensors are some"
            what += f", or only buffers stand in another: {unknown}"
        named = f"ckpttool optimizer {shlex.quote(checkpoint.path)} named.pt --to names"
        hint = f"key it by names first: {named}; or {_alone(checkpoint.path)}"
        raise Refused(checkpoint.path, what, hint=hint)


def _alone(path: str) -> str:
    return f"write the state alone first: ckpttool slim {shlex.quote(path)} state.pt"


def _named(optimizer: Any, floats: Parameters) -> list[Names]:
    """Return the names of each group's parameters; [] where the shapes of momentum allow several."""
    try:
        shapes = [[kept.shape for kept in group] for group in OptimizerView(optimizer).parameters()]
    except BadOptimizer:
        return []
    for tensors in (floats, [(name, shape) for name, shape in floats if not is_buffer(name)]):
        ways = in_order(shapes, tensors)
        if len(ways) == 1:
            names = iter(ways[0])
            return [tuple(next(names) for _ in group) for group in shapes]
    return []


def _is_rising(numbers: Iterable[int]) -> bool:
    listed = [*numbers]
    return listed == sorted(listed)


# ---- Conform


SHOWN = 4  # names or candidates in a message, which counts the rest
SAME_MODEL = "--check-values is for a reference of the same values; rounded ones (fp16, packed) differ"


@dataclass(frozen=True, slots=True)
class Conformed:
    """How a state came under other names.

    Attributes:
        table: each rule, with what it rests on.
        rules: the same as a map, without what depends on the reference alone (padding, counters).
        renamed: old name -> new name, for tensors that became one tensor.
        dropped: names of buffers that the reference lacks, as its model computes them.
        untied: second names of tied tensors that the reference has once.
        tied: names that the reference ties to another.
        counted: BatchNorm's counters that were added, as 0.
        taken: names of buffers that the reference's model computes, with the reference's values.
        lacking: names of such buffers that are not written, as a model in the place of a file has no values.
        padded: names of tensors that got rows of zeros.
        unshown: names of square matrices that were taken as they are by their equal names, as no other matrix
            shows whether the layers are transposed.
        types: (type here, type in the reference, how many tensors).
        proven: how many tensors have the reference's values, bit for bit; 0 where they were not compared.
        also: dotted paths of copies of the state, such as an average, that were changed too.
    """

    table: tuple[RuleRow, ...] = field(metadata={"json": None})
    rules: MapRules = field(metadata={"json": None})
    renamed: Mapping[str, str] = field(metadata={"json": None})
    dropped: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    taken: tuple[str, ...] = field(default=(), metadata={"json": "taken_from_last"})
    lacking: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    unshown: tuple[str, ...] = ()
    types: tuple[tuple[str, str, int], ...] = ()
    proven: int = 0
    also: tuple[str, ...] = ()


@takes_checkpoint
def conform(
    checkpoint: Checkpoint,
    like: File | Places,
    *,
    state: str | None = None,
    like_state: str | None = None,
    check_values: bool = False,
    pad_vocab: bool = False,
    optimizers: bool = True,
) -> tuple[Checkpoint, Conformed]:
    """Return a checkpoint whose state has the names and shapes of a reference.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        like: a checkpoint that loads where this one should, of which only the header is read (and buffers
            that its model computes, if this one lacks them); or a model's places, as a `Blueprint` has them.
        state, like_state: dotted paths of the states; found when None.
        check_values: the reference is the same model: what names and shapes leave open is decided by values,
            and all of the result is compared.
        pad_vocab: give embeddings and heads that have fewer rows than the reference's rows of zeros.
        optimizers: take along what else the file has of the model: optimizers, and copies of the state.

    Returns:
        The new checkpoint, whose tensors still lie in the old file, and how each came to its name.

    Raises:
        Ambiguous: there are several ways of equal merit; names the candidates.
        Mismatch: a tensor has no counterpart.
        CheckFailed: values differ from the reference's.
        NothingToDo: the state has these names and shapes already.
        Refused: an optimizer's state can't follow.
        UsageFault: values or a state of a model's places are asked for, which have none.
        NoState, Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them.

    Example:
        >>> with ckpttool.open("last.pt") as checkpoint:
        ...     like, conformed = ckpttool.conform(checkpoint, "plain.pt")
        ...     sorted(like.state())[:2]
        ['0.bias', '0.weight']
    """
    target = checkpoint.state(state)
    mine = places_of(checkpoint.path, target)
    if isinstance(like, Mapping):
        if check_values or like_state is not None:
            what = "a model in the place of a reference has no values, nor several states"
            raise UsageFault(what, hint="a checkpoint of it has: name that")
        all_theirs, reference = like, dict[str, TensorRef]()
    else:
        # Not closed here: buffers of the output may lie in it, and its last tensor closes it.
        opened = like if isinstance(like, Checkpoint) else open_checkpoint(like)
        other = opened.state(like_state)
        all_theirs, reference = places_of(opened.path, other), other.tensors
    path, values = checkpoint.path, reference if check_values else {}
    theirs = {name: place for name, place in all_theirs.items() if place.shape is not None}
    found = _matched(path, mine, theirs, target.tensors, values, pad_vocab)
    table = rows(found, mine)
    rules = as_rules(found, table)
    if found.resized and optimizers and any(map(is_optimizer, walk(checkpoint.tree))):
        hint = _alone(path)
        raise Refused(path, "its optimizer's state can't follow a vocabulary that is padded", hint=hint)
    changed, mapped = apply(checkpoint, rules, state=state, optimizers=optimizers)
    resized = [name for left, _ in found.resized for name in left.names.values()]
    require_unpacked(checkpoint, target, names=resized)
    if optimizers:
        require_order(changed, state, theirs)
    padded = [name for _, right in found.resized for name in right.names.values()]
    lacking = ((name, theirs[name]) for name in found.lacking if name.endswith(COUNTER))
    counters = {name: _zeros(path, DTYPES[place.dtype], place.shape or ()) for name, place in lacking}
    taken = {name: reference[name] for name in found.lacking if name in reference and name not in counters}
    more = {**counters, **taken}
    for where in (state, *mapped.also):
        changed = _completed(changed, where, padded, more, theirs)
    made = changed.state(state).tensors
    compared = {name: tensor for name, tensor in values.items() if name in made and name not in taken}
    if (name := differing(made, compared)) is not None:
        raise CheckFailed(f"{path}: as '{name[:80]}' it has other values than the reference", hint=SAME_MODEL)
    return changed, Conformed(
        table=tuple(table),
        rules=rules,
        renamed=mapped.renaming,
        dropped=found.dropped,
        untied=tuple(name for name, _ in found.untied),
        tied=tuple(name for name, _ in found.ties),
        counted=tuple(counters),
        taken=tuple(taken),
        lacking=tuple(name for name in found.lacking if name not in more),
        padded=tuple(padded),
        unshown=found.unshown,
        types=_other_types({name: tensor.dtype.name for name, tensor in made.items()}, theirs),
        proven=len(compared),
        also=mapped.also,
    )


def _matched(
    path: str, mine: Places, theirs: Places, tensors: Tensors, values: Tensors, pad_vocab: bool
) -> SearchResult:
    """Return which name becomes which; by values too, where there are any."""
    if not values and _shapes(mine) == _shapes(theirs):
        raise _nothing_to_do(path, mine, theirs)
    found = search(path, mine, theirs, with_values=bool(values))
    if values:
        _tie_by_values(found, tensors, values)
    require_complete(path, found, pad_vocab=pad_vocab)
    if values:
        Values(tensors, values).decide(found)
    require_certain(path, found, by_values=bool(values))
    return found


def _nothing_to_do(path: str, mine: Places, theirs: Places) -> NothingToDo:
    types = _other_types({name: place.dtype for name, place in mine.items()}, theirs)
    what = "".join(f"; {counted(n, 'tensor')} of {here} here and {there} there" for here, there, n in types)
    convert = f"ckpttool convert {shlex.quote(path)} OUT"
    hint = f"to write it as it is: {convert}"
    if types:
        # A cast is of all floats: it is advised where they all become of one type.
        wanted = {theirs[name].dtype for name, place in mine.items() if place.dtype in PLAIN_FLOATS}
        casts = len(wanted) == 1 and all(name in PLAIN_FLOATS for pair in types for name in pair[:2])
        cast = f"to cast it: {convert} --dtype {types[0][1]}"
        hint = cast if casts else "conform changes names and shapes, no types"
    return NothingToDo(f"{path}: its names and shapes are the reference's already{what}", hint=hint)


def _other_types(dtypes: Mapping[str, str], theirs: Places) -> tuple[tuple[str, str, int], ...]:
    """Return which types became which, and how many tensors did."""
    pairs = ((dtype, theirs[name].dtype) for name, dtype in dtypes.items() if name in theirs)
    return tuple((*pair, count) for pair, count in Counter(p for p in pairs if p[0] != p[1]).items())


def _completed(
    checkpoint: Checkpoint, where: str | None, resized: Iterable[str], more: Tensors, theirs: Places
) -> Checkpoint:
    """Return a checkpoint with what a state lacks, in the order of the reference."""
    state = checkpoint.state(where)
    for name in resized:
        place, rows = theirs[name], state.tensors[name].shape[:1]
        if place.shape is not None and rows > place.shape[:1]:
            hint = _alone(checkpoint.path)
            raise Refused(checkpoint.path, f"'{where}' has more rows of '{name[:80]}' than fit", hint=hint)
    padded = {name: _padded(name, state.tensors[name], theirs[name]) for name in resized}

    def in_order(old: dict[Any, Any]) -> dict[Any, Any]:
        entries = {**old, **padded, **more}
        return {name: entries[name] for name in theirs if name in entries} | entries

    return replace_state(checkpoint, state, in_order)


def _shapes(places: Places) -> dict[str, object]:
    return {name: (place.shape, place.dtype == "") for name, place in places.items()}


def _tie_by_values(found: SearchResult, left: Tensors, right: Tensors) -> None:
    """Take an embedding or head without a counterpart for a second name of another that has its values.

    Others are no ties though they are equal, such as two norms of ones: they are trained apart.
    """
    for modules, tensors in ((found.left, left), (found.right, right)):
        for module in [*modules]:
            others = {kind: _equal(name, tensors) for kind, name in module.names.items()}
            names = [*module.names.values(), *others.values()]
            if all(others.values()) and any(name and is_shared(name) for name in names):
                pairs = tuple((module.names[kind], other or "") for kind, other in others.items())
                modules.remove(module)
                if tensors is left:
                    found.untied += pairs
                else:
                    found.ties += pairs


def _equal(name: str, tensors: Tensors) -> str | None:
    this = tensors[name]
    alike = (other for other in tensors if other != name and tensors[other].shape == this.shape)
    return next((other for other in alike if this.numel > 1 and same_values(tensors[other], this)), None)


# ---- Refusals


def require_complete(path: str, found: SearchResult, *, pad_vocab: bool = False) -> None:
    """Raise Mismatch where a tensor of either side has no counterpart."""
    left, right = ([*_names(side)] for side in (found.left, found.right))
    if left or right:
        reasons = [*found.uneven]
        reasons += [f"{len(left)} of its tensors have no counterpart ({_some(left)})"] if left else []
        reasons += [f"the reference has {len(right)} that nothing becomes ({_some(right)})"] if right else []
        raise Mismatch(
            f"{path}: {'; '.join(reasons)}",
            missing=tuple(name for name, _ in right),
            unexpected=tuple(name for name, _ in left),
            hint=_way_out(path, left, right),
        )
    for a, b in found.resized:
        rows_here, rows_there = (next(iter(module.shapes.values()))[0] for module in (a, b))
        what = f"{path}: '{a.path}' has {rows_here} rows and the reference's '{b.path}' {rows_there}"
        if rows_here > rows_there:
            raise Mismatch(what, hint="rows are never cut off: take a reference of this vocabulary")
        if not pad_vocab:
            raise Mismatch(what, hint=_wider(found, rows_here))


MOST_NAMED = 8


def _way_out(path: str, left: list[tuple[str, str]], right: list[tuple[str, str]]) -> str | None:
    convert = f"ckpttool convert {shlex.quote(path)}"
    if left and not right:
        if any(OF_ADAPTER.search(name) for name, _ in left):
            return ADAPTED
        globs = [shlex.quote(glob.escape(name)) for name, _ in left] if len(left) <= MOST_NAMED else ["GLOB"]
        flags = " ".join(f"--exclude {each}" for each in globs)
        return f"leave out what the other side does not want, and conform that: {convert} PART {flags}"
    if right and not left and len(right) == 1:
        name = shlex.quote(f"{right[0][0]}=NAME")
        return f"if it is tied to another tensor NAME, conform what this writes: {convert} TIED --tie {name}"
    return None


def _wider(found: SearchResult, rows: int) -> str:
    """Return a hint for fewer rows than the reference's: vocabularies are padded, and have no bias."""
    if any("bias" not in module.shapes for module, _ in found.resized):
        return "--pad-vocab adds rows of zeros"
    return f"a head for other classes is another head: take a reference with {rows} rows"


def _names(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    for module in modules:
        for kind, name in module.names.items():
            of_type = "" if module.types[kind] == "float" else f" {module.types[kind]}"
            yield name, f"{[*module.shapes[kind]]}{of_type}"


def _some(names: list[tuple[str, str]]) -> str:
    """Return the first few, with one for each kind of layer."""
    kinds: dict[Parts, tuple[str, str]] = {}
    for name, shape in names:
        kinds.setdefault(without_numbers(name.split(".")), (name, shape))
    shown = [f"'{name[:80]}' {shape[:40]}" for name, shape in [*kinds.values()][:SHOWN]]
    return ", ".join(shown) + (", …" if len(kinds) > SHOWN or len(names) > len(kinds) else "")


def require_certain(path: str, found: SearchResult, *, by_values: bool = False) -> None:
    """Raise Ambiguous where there are several ways, and nothing but values tells which is right."""
    candidates = tuple(dict.fromkeys(_candidates(found)))
    if not candidates:
        return
    what, hint = "no way gives the reference's values", SAME_MODEL
    if not by_values:
        what, either = (
            "names and shapes allow several ways",
            "--check-values decides where the reference holds",
        )
        hint = f"{either} the same model; else write rules: convert --map"
    more = f"; and {len(candidates) - SHOWN} more" if len(candidates) > SHOWN else ""
    listed = "; ".join(candidates[:SHOWN]) + more
    raise Ambiguous(f"{path}: {what}: {listed}", candidates=candidates, hint=hint)


def _candidates(found: SearchResult) -> Iterator[str]:
    """Yield what is open in words, once for all layers of a kind."""
    said: set[object] = set()
    for scope, match in found.matches:
        joint = match.joint
        if len(joint.ways) < 2:
            continue
        bare = [without_numbers(unit.first.parts) for unit in (*joint.pieces, joint.whole)]
        if (key := (scope, *bare)) in said:
            continue
        said.add(key)
        sides = [" and ".join(f"'{unit.first.path}'" for unit in side) for side in (match.left, match.right)]
        pieces = [unit.first.path.rpartition(".")[2] for unit in joint.pieces]
        ways = [*dict.fromkeys(way.words(pieces) for way in joint.ways)]
        if joint.is_crossed and len(ways) == 1:
            ways.append("another layer transposed")
        more = f", … ({len(ways)} ways)" if len(ways) > SHOWN else ""
        yield f"{sides[0]} to {sides[1]}: {' | '.join(ways[:SHOWN])}{more}"
    yield from found.falling
    for _, tangle in found.tangles:
        both = tangle.left[:SHOWN], tangle.right[:SHOWN]
        sides = [", ".join(f"'{unit.first.path}'" for unit in side) for side in both]
        more = ", …" if len(tangle.left) > SHOWN else ""
        shape = [*tangle.left[0].weight]
        yield f"{sides[0]}{more} are of one shape {shape}, as are {sides[1]}{more}"


# ---- Tensors that the input lacks


def _padded(name: str, tensor: TensorRef, place: StateEntry) -> TensorRef:
    """Return a tensor with rows of zeros after its own."""
    assert place.shape is not None
    rows = tensor.shape[0]
    nothing = _zeros(tensor.storage.data.path, tensor.dtype, (place.shape[0] - rows, *place.shape[1:]))
    begin = (rows, *(0 for _ in place.shape[1:]))
    parts = [TensorPart((0,) * len(place.shape), tensor), TensorPart(begin, nothing)]
    return assembled(name, tensor.storage.data.path, tensor.dtype, place.shape, parts)


def _zeros(path: str, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
    """Return zeros that take no memory."""

    def fill(start: int, buffer: memoryview) -> None:
        buffer[:] = bytes(len(buffer))

    data = Computed.filling(path, prod(shape) * dtype.itemsize, fill)
    return TensorRef.of_bytes(data, dtype, shape)
