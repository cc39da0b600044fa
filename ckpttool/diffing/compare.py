"""The differences between two checkpoints, by contents, whatever their formats.

The model's state is compared tensor by tensor under the names it has there; everything else that both formats
can hold, under its dotted name in the file. Types of plain containers (list or tuple, dict or OrderedDict),
numeric keys that became text, and the order of names make no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.checksums import Checksums
from ..core.checkpoint.dotted_names import MAX_NAMES, contents, follow
from ..core.checkpoint.special_tensors import SpecialTensor, special_tensor
from ..core.checkpoint.state import State
from ..core.files.threads import Progress
from ..core.formats.reading import File, opened
from ..core.inert_pickle.values import remade, tensor_of
from ..core.remote import urls
from ..core.tensors.ref import DTYPES, Storage, TensorRef
from ..errors import NoState, Unsupported, UsageFault
from . import compare_values, distances, losses
from .compare_values import Change, Comparison, Norms, TensorPair, ValueLoss
from .distances import Distance, Tolerance, has_numbers, in_words
from .losses import LossyPair
from .packed import PackedTensor, Stored, Unpacked, unpacked, words_of

# The formats that hold more than a model's state
HOLD_ALL = ("torch-zip", "torch-legacy", "torch-tar", "dcp")


def diff(
    a: File,
    b: File,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    state: str | None = None,
    model_only: bool = False,
    ignore_prefix: bool = False,
    as_stored: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints by contents, whatever their formats.

    Args:
        a, b: paths, or open checkpoints.
        rtol, atol: values are the same if |a - b| <= atol + rtol * |b|, as in `torch.allclose`; if both are
            None, if their bits are.
        state: dotted path of the model's state in both files, or in one of them; found when None. When it is
            given, only the states are compared.
        model_only: compare only the models' states.
        ignore_prefix: match names that differ only in wrappers' prefixes.
        as_stored: compare codes and scales of packed tensors as they are, and no values of two types without
            a tolerance. Otherwise a packed tensor counts as the plain one that it stands for.
        verify: compare what is read with the checksums that the files state.
        progress: called with numbers of bytes, those of `a`.

    Returns:
        Names that only one file has, and what differs under a name of both: `.same`, `.only_a`, `.only_b`,
        `.changed` with distances, norms and cosines, and what packing or rounding cost: `.nmse`, `.loss`.

    Raises:
        UsageFault: a tolerance is negative or NaN.
        NoState: there is no model's state at `state`, or with `model_only` none at all.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them; Damaged also if a file ends early,
            or if `verify` and a checksum is wrong.
        Refused: a scale of a packed tensor is no number.

    Example:
        >>> found = ckpttool.diff("model.safetensors", "tuned.safetensors")
        >>> [(change.name, change.why) for change in found.changed]
        [('0.weight', 'values')]
    """
    if not all(limit is None or limit >= 0 for limit in (rtol, atol)):
        raise UsageFault(f"a tolerance is a number from 0 on, not rtol={rtol}, atol={atol}")
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    with opened(a) as mine, opened(b) as theirs:
        work = _Comparing(mine, theirs, tolerance, as_stored)
        states = both_states(mine, theirs, state, needed=model_only)
        if states is None:
            work.trees(mine.tree, theirs.tree)
        else:
            work.states(*states, ignore_prefix)
            if state is None and not model_only:
                work.others(*states)
        urls.expect([*compare_values.expected(work.pairs), *losses.expected(work.lossy)])
        used = [work.storages(side) if verify else () for side in (0, 1)]
        with Checksums(mine, used[0]) as sums_of_a, Checksums(theirs, used[1]) as sums_of_b:
            comparison = work.result(progress)
            sums_of_a.finish()
            sums_of_b.finish()
        return comparison


def both_states(
    a: Checkpoint, b: Checkpoint, where: str | None, *, needed: bool = False
) -> tuple[State, State] | None:
    """Return both models' states; None when a file has none, and none is needed."""
    named = _state(a, where), _state(b, where)
    if where is not None and not any(named):
        a.state(where)
    mine, theirs = named[0] or _state(a, None), named[1] or _state(b, None)
    if mine and theirs:
        return mine, theirs
    if needed or where is not None:
        return mine or a.state(), theirs or b.state()
    return None


def _state(checkpoint: Checkpoint, where: str | None) -> State | None:
    try:
        return checkpoint.state(where)
    except NoState:
        return None


def _entries(state: State, *, likes: bool) -> dict[object, object]:
    """Return the entries of a state that are not plain tensors: its special tensors, or all others."""
    return {name: value for name, value in state.others.items() if (name in state.likes) is likes}


def _likes(state: State, plain: Unpacked) -> dict[object, object]:
    """Return the special tensors of a state that are none of its packed ones."""
    return {name: each for name, each in _entries(state, likes=True).items() if name not in plain.parts}


def outside_of(checkpoint: Checkpoint, state: State) -> tuple[str, ...]:
    return (*map(str, _entries(state, likes=False)), *checkpoint.outside(state))


def _compares_all(checkpoint: Checkpoint, state: State) -> bool:
    """Return whether a file's format could hold what the file lacks."""
    return checkpoint.format in HOLD_ALL or bool(outside_of(checkpoint, state))


_Place = tuple[object, str] | None  # a dict and a key in it


def _place(checkpoint: Checkpoint, state: State) -> _Place:
    """Return the dict that holds a state, and its key there."""
    return (follow(checkpoint.tree, state.path[:-1]), state.path[-1]) if state.path else None


def _without(container: object, place: _Place) -> object:
    if place is None or container is not place[0] or not isinstance(container, dict):
        return container
    return remade(container, ((key, value) for key, value in container.items() if key != place[1]))


class _Comparing:
    """One comparison: the differences found, and the pairs of tensors whose values are still to be read."""

    def __init__(self, a: Checkpoint, b: Checkpoint, tolerance: Tolerance | None, as_stored: bool) -> None:
        self.a, self.b, self.tolerance, self.as_stored = a, b, tolerance, as_stored
        self.unpacked: list[Unpacked] = []
        self.bare: tuple[distances.Bare, distances.Bare] = (
            distances.unchanged,
            distances.unchanged,
        )  # the rules under which names are the same
        self.gained = 0
        self.only: tuple[list[str], list[str]] = [], []
        self.aside: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        self.changes: list[Change] = []  # those that need no values
        self.pairs: list[TensorPair] = []
        self.lossy: list[losses.LossyPair] = []
        self.tensors_seen = self.same_files = 0
        self.tolerated: list[str] = []  # values that are no tensors
        self.text_keys: tuple[list[str], list[str]] = [], []

    def states(self, mine: State, theirs: State, ignore_prefix: bool) -> None:
        """Compare two models' states by name."""
        self.unpacked = [self._unpacked(*each) for each in ((self.a, mine), (self.b, theirs))]
        a, b = (each.tensors for each in self.unpacked)
        if ignore_prefix:
            self.bare = distances.bare_names(a, b)
        elif a.keys() != b.keys():  # otherwise there is nothing to gain
            self.gained = distances.shared(a, b, distances.bare_names(a, b)) - len(a.keys() & b.keys())
        left = {self.bare[1](name): name for name in b}
        for name, tensor in a.items():
            other = left.pop(self.bare[0](name), None)
            if other is None:
                self.only[0].append(name)
            else:
                self.tensor(name, tensor, b[other])
        self.only[1].extend(left.values())
        for names, side in zip(self.only, self.unpacked, strict=True):
            names[:] = [name for name in names if name not in side.extra]
        self.trees(_likes(mine, self.unpacked[0]), _likes(theirs, self.unpacked[1]))

    def _unpacked(self, checkpoint: Checkpoint, state: State) -> Unpacked:
        return Unpacked(state.tensors) if self.as_stored else unpacked(checkpoint, state)

    def others(self, mine: State, theirs: State) -> None:
        """Compare everything but the models, or note its names where a format could not hold it."""
        if _compares_all(self.a, mine) and _compares_all(self.b, theirs):
            self.trees(_entries(mine, likes=False), _entries(theirs, likes=False))
            a, b = self.a.tree if mine.path else {}, self.b.tree if theirs.path else {}
            self.trees(a, b, (_place(self.a, mine), _place(self.b, theirs)))
        else:
            self.aside = outside_of(self.a, mine), outside_of(self.b, theirs)

    def tensor(self, name: str, a: Stored, b: Stored) -> None:
        self.tensors_seen += 1
        place = len(self.changes), 0, self.tensors_seen
        lossy = None
        if a.shape == b.shape and not self.as_stored:
            lossy = losses.lossy_pair(name, a, b, self.tolerance, place)
        if lossy is not None and not lossy.are_same_files:
            self.lossy.append(lossy)
        elif lossy is not None:
            self.same_files += 1
        elif isinstance(a, PackedTensor) or isinstance(b, PackedTensor) or not self._comparable(a, b):
            why = "dtype" if a.shape == b.shape else "shape"
            self.changes.append(Change(name, why, words_of(a), words_of(b)))
        elif a.contents is not None and a.contents == b.contents:
            self.same_files += 1
        else:
            self.pairs.append(TensorPair(name, a, b, place))

    def _comparable(self, a: TensorRef, b: TensorRef) -> bool:
        numeric = self.tolerance is not None and has_numbers(a.dtype) and has_numbers(b.dtype)
        return a.shape == b.shape and (a.dtype is b.dtype or numeric)

    def storages(self, side: int) -> Iterator[tuple[str, Storage]]:
        """Yield the storages that are read of one file, by the names of the tensors that use them."""
        yield from ((pair.name, (pair.a, pair.b)[side].storage) for pair in self.pairs)
        yield from ((pair.name, storage) for pair in self.lossy for storage in pair.storages[side])

    def trees(self, a: object, b: object, apart: tuple[_Place, _Place] = (None, None)) -> None:
        """Compare two trees by dotted names, each pair of containers once, without the places `apart`."""
        seen: set[tuple[int, int]] = set()
        left = MAX_NAMES
        stack: list[tuple[str, object, object]] = [("", a, b)]
        while stack:
            name, x, y = stack.pop()
            mine, theirs = special_tensor(x), special_tensor(y)
            if mine and theirs and mine.known and theirs.known:
                self.likes(name, mine, theirs)
                continue
            inside = contents(x), contents(y)
            if None in inside or distances.kind_of(x) != distances.kind_of(y):
                self.value(name, x, y)
            elif (id(x), id(y)) not in seen:
                seen.add((id(x), id(y)))
                for side, both in enumerate(((x, y), (y, x))):
                    if distances.numbers_as_text(*both):
                        self.text_keys[side].append(name)
                in_x, in_y = distances.both_by_name(_without(x, apart[0]), _without(y, apart[1]), self.bare)
                begin = f"{name}." if name else ""
                self.only[0].extend(begin + key for key in in_x if key not in in_y)
                self.only[1].extend(begin + key for key in in_y if key not in in_x)
                below = [(begin + key, one, other) for key, one, other in distances.keys_apart(x, y)]
                below += [(begin + key, one, in_y[key]) for key, one in in_x.items() if key in in_y]
                left -= sum(len(path) for path, _, _ in below)
                if left < 0:
                    raise Unsupported(self.a.path, "its dotted names need too much memory")
                stack.extend(reversed(below))

    def likes(self, name: str, a: SpecialTensor, b: SpecialTensor) -> None:
        """Compare two tensors that are not plain ones, by what they are and part by part."""
        if str(a) != str(b) or a.parts.keys() != b.parts.keys():
            self.tensors_seen += 1
            self.changes.append(Change(name, "shape" if a.shape != b.shape else "value", str(a), str(b)))
            return
        for part, tensor in a.parts.items():
            self.tensor(f"{name}.{part}", tensor, b.parts[part])

    def value(self, name: str, x: object, y: object) -> None:
        """Compare two values; at least one is not a container."""
        a, b = _as_tensor(x), _as_tensor(y)
        if a is not None and b is not None:
            self.tensor(name, a, b)
        elif not distances.same_value(x, y, self.tolerance, self.bare):
            why = "value" if type(x) is type(y) else "type"
            self.changes.append(Change(name, why, in_words(x), in_words(y)))
        elif self.tolerance and not distances.same_value(x, y, None, self.bare):
            self.tolerated.append(name)

    def _packed(self) -> dict[str, Any]:
        """Return what is said of packed tensors."""
        if not self.unpacked:
            return {}
        a, b = self.unpacked
        extra = ((one.extra, other.tensors) for one, other in ((a, b), (b, a)))
        extra_a, extra_b = (tuple(name for name in names if name not in there) for names, there in extra)
        said = {"packed_a": a.schemes, "packed_b": b.schemes, "unclear": a.unclear + b.unclear}
        return said | {"extra_a": extra_a, "extra_b": extra_b}

    def result(self, progress: Progress | None) -> Comparison:
        """Read the values, and put the differences in the order of the first file."""
        changes: list[tuple[tuple[int, ...], Change]]
        changes = [((before, 1), change) for before, change in enumerate(self.changes)]
        apart = list(compare_values.distances(self.pairs, self.tolerance, progress))
        differ = [(pair, distance) for pair, distance in apart if distance.differ]
        tolerated = [pair.name for pair, distance in apart if not distance.differ]
        measured = compare_values.norms(pair for pair, _ in differ)
        for (pair, distance), lengths in zip(differ, measured, strict=True):
            words = in_words(pair.a), in_words(pair.b)
            changes.append((pair.place, _measured(pair, "values", words, distance, lengths)))
        for lossy, lost in losses.losses(self.lossy, progress):
            if lost is not None and lost.distance.differ:
                why = "values" if lossy.is_packed or self.tolerance else "dtype"
                changes.append((lossy.place, _measured(lossy, why, lossy.words, *lost)))
            elif lossy.is_packed or self.tolerance:
                tolerated += [lossy.name] if lost else []
            else:
                changes.append((lossy.place, Change(lossy.name, "dtype", *lossy.words)))
        changes.sort(key=lambda each: each[0])
        changed = tuple(change for _, change in changes)
        only_a, only_b = map(tuple, self.only)
        seen, gained, same = self.tensors_seen, self.gained, self.same_files
        keyed_a, keyed_b = map(tuple, self.text_keys)
        within, packed = (*tolerated, *self.tolerated), self._packed()
        said = *self.aside, gained, within, same, keyed_a, keyed_b
        return Comparison(only_a, only_b, changed, seen, *said, **packed)


def _measured(
    pair: TensorPair | LossyPair,
    why: str,
    words: tuple[str, str],
    distance: Distance,
    norms: Norms | None,
    loss: ValueLoss | None = None,
) -> Change:
    index = None if distance.where is None else compare_values.unravelled(distance.where, pair.a.shape)
    return Change(pair.name, why, *words, distance, index, norms, loss)


def _as_tensor(value: object) -> TensorRef | None:
    if isinstance(value, Storage):
        return TensorRef.contiguous(value, DTYPES["uint8"], (value.nbytes,))
    return tensor_of(value)
