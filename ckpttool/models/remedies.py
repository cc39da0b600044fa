"""Remedies for names and tensors that differ between a state and a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, permutations
from math import prod
from typing import Any

from ..core.checkpoint import keys, selection
from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.prefixes import COMPANIONS, WRAPPERS, found_prefixes
from ..core.checkpoint.state import COUNTER, State
from ..core.tensors.values import same_values
from ..mapping import layout
from ..rooms import find
from .fit import Case, Remedy, numbers, shortened

MAX_PREFIXES = 24  # tried at most
MAX_CUTS = 24  # dots of a name at which it is cut: no model is deeper, a name of many dots may be
# Rules of a command, times the names that each is tried on: more take seconds, in the command too.
MAX_WORK = 2_000_000
MAX_SHARED = 8  # an end that more names share (`weight`) does not tell what precedes it


def wrappers(case: Case) -> Iterator[Remedy]:
    """Strip the prefix of one or several wrappers from the keys."""
    for prefix in found_prefixes(case.state.tensors, case.state.versions):
        carried = f"{prefix.keys} of {prefix.of} keys"
        counters = [name for name in COMPANIONS if name in case.fit.unexpected]
        flags = [word for name in counters for word in ("--drop", name)]
        message = f"'{prefix.prefix}' of {prefix.wrapper} is in front of {carried}"
        yield _strip("prefix", message, prefix.prefix, *flags, drop=counters)


def wrappers_inside(case: Case) -> Iterator[Remedy]:
    """Strip the prefixes of wrappers around parts of the model, in the middle of keys."""
    for prefix, wrapper in WRAPPERS.items():
        count = sum(f".{prefix}" in f".{name}" for name in case.fit.unexpected)
        if count:
            message = f"'{prefix}' of {wrapper} is inside {count} keys"
            yield _strip("prefix", message, prefix, "--anywhere", "--repeat")


def _strip(kind: str, message: str, prefix: str, *flags: str, drop: Iterable[str] = ()) -> Remedy:
    anywhere, repeat = "--anywhere" in flags, "--repeat" in flags
    return Remedy(
        kind,
        message,
        ("strip-prefix", "--prefix", prefix, *flags),
        lambda c: keys.strip_prefix(c, prefix, repeat=repeat, anywhere=anywhere, drop=drop)[0],
    )


def separators(case: Case) -> Iterator[Remedy]:
    """Put dots for the slashes with which trees of JAX and TensorFlow join names."""
    if count := sum("/" in name for name in case.fit.unexpected):
        yield _rename("names", f"{count} keys have '/' where the model has '.'", [("/", ".")])


def renumbered(case: Case) -> Iterator[Remedy]:
    """Renumber layers, all of which the model counts from another number on."""
    theirs, ours = numbers(case.state.tensors), numbers(case.blueprint.places)
    for stem in theirs.keys() & ours.keys():
        shift = min(ours[stem]) - min(theirs[stem])
        if shift and ours[stem] == {number + shift for number in theirs[stem]}:
            # in an order in which no layer takes a number that another one still has
            order = sorted(theirs[stem], reverse=shift > 0)
            if len(order) * len(case.state.container) > MAX_WORK:
                continue
            rules = [(rf"^{_exactly(stem)}{n}\.", f"{stem}{n + shift}.") for n in order]
            first = f"'{stem}{min(theirs[stem])}.', the model from '{stem}{min(ours[stem])}.'"
            yield _rename("names", f"the file counts its layers from {first}", rules)


def prefixes(case: Case) -> Iterator[Remedy]:
    """Strip, add or replace first parts of keys that the model has otherwise or not at all."""
    for theirs, ours in _heads(case):
        if not ours:
            yield _strip("prefix", f"'{theirs}' is in front of keys that the model has without it", theirs)
        elif not theirs:
            yield _add(f"the model has '{ours}' in front of its keys, the file does not", ours)
        else:
            message = f"the file has '{theirs}' where the model has '{ours}', judging by shapes alone"
            yield _rename("names", message, [(f"^{_exactly(theirs)}", ours)], is_guess=True)


def _add(message: str, prefix: str) -> Remedy:
    command = ("add-prefix", "--prefix", prefix)
    return Remedy("prefix", message, command, lambda c: keys.add_prefix(c, prefix)[0])


def _heads(case: Case) -> list[tuple[str, str]]:
    """Return (file's, model's) first parts of keys with the same end, the most frequent first."""
    ends: dict[str, list[str]] = {}
    for name in case.fit.missing:
        for head, end in _cuts(name):
            ends.setdefault(end, []).append(head)
    counts: Counter[tuple[str, str]] = Counter()
    for name in case.fit.unexpected:
        for head, end in _cuts(name):
            if len(ends.get(end, ())) <= MAX_SHARED:
                counts.update((head, other) for other in ends.get(end, ()) if other != head)
    return sorted(counts, key=lambda pair: (-counts[pair], len(pair[0]) + len(pair[1])))[:MAX_PREFIXES]


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield (head with its dot, rest) at every dot, the empty head first."""
    yield "", name
    dots = islice(re.finditer("[.]", name), MAX_CUTS)
    yield from ((name[: dot.end()], name[dot.end() :]) for dot in dots)


def _exactly(text: str) -> str:
    """Return the regular expression of a text, without an = that would end the REGEX of REGEX=REPLACEMENT."""
    return re.escape(text).replace("=", r"\=")


def _rename(kind: str, message: str, rules: list[tuple[str, str]], *, is_guess: bool = False) -> Remedy:
    flags = [word for old, new in rules for word in ("--map", f"{old}={new}")]
    command = "rename-keys", *flags
    return Remedy(kind, message, command, lambda c: keys.rename_keys(c, rules)[0], is_guess)


# (kind, what has the names, (old name, new name) of each part); tried in both directions
WEIGHT = "parametrizations.weight"
SCALE = (("gamma", "weight"), ("beta", "bias"))
MOMENTS = (("moving_mean", "running_mean"), ("moving_variance", "running_var"))
DIRECTION = (("weight_g", "original0"), ("weight_v", "original1"))
SPECTRAL = (("weight_orig", "original"), ("weight_u", "0._u"), ("weight_v", "0._v"))
RENAMED = (
    ("weight-norm", "weight norm", [(old, f"{WEIGHT}.{new}") for old, new in DIRECTION]),
    ("spectral-norm", "spectral norm", [(old, f"{WEIGHT}.{new}") for old, new in SPECTRAL]),
    ("layer-norm", "normalisation", SCALE),
    ("batch-norm", "BatchNorm", SCALE + MOMENTS),
)


def renamed_parts(case: Case) -> Iterator[Remedy]:
    """Rename parameters that a library renamed: weight norm, spectral norm, `gamma` and `beta`."""
    ends = {name.rpartition(".")[2] for name in case.fit.unexpected}
    for kind, what, pairs in RENAMED:
        for swap in (False, True):
            if not any(pair[swap].rpartition(".")[2] in ends for pair in pairs):
                continue  # each rule is tried on each name, which takes long
            old_new = [(new, old) if swap else (old, new) for old, new in pairs]
            rules = [(rf"(^|\.){_exactly(old)}$", rf"\g<1>{new}") for old, new in old_new]
            old, new = old_new[0]
            yield _rename(kind, f"{what} has '{old}' in the file and '{new}' in the model", rules)


def same_order(case: Case) -> Iterator[Remedy]:
    """Rename layers that have other names but the same number, shapes and order."""
    theirs, ours = case.fit.unexpected, case.fit.missing
    places, tensors = case.blueprint.places, case.state.tensors
    if len(theirs) != len(ours) or not all(name in tensors for name in theirs):
        return
    layers: dict[str, str] = {}
    for old, new in zip(theirs, ours, strict=True):
        (old_layer, _, old_end), (new_layer, _, new_end) = old.rpartition("."), new.rpartition(".")
        fits = tensors[old].shape == places[new].shape and old_end == new_end
        if not fits or layers.setdefault(old_layer, new_layer) != new_layer:
            return
    if len(set(layers.values())) == len(layers):
        rules = [(rf"^{_exactly(old)}\.(?=[^.]*$)", f"{new}." if new else "") for old, new in layers.items()]
        message = f"{len(layers)} layers have other names; they are matched by order and shapes alone"
        yield _rename("names", message, rules, is_guess=True)


# ---- Tensors that differ


Sizes = tuple[int, ...]
Rules = Sequence[tuple[str, Sizes]]
Changed = tuple[Checkpoint, object]


def dequantized(case: Case) -> Iterator[Remedy]:
    """Compute plain tensors of packed ones, unless the model has them packed too."""
    numbers: Any = find("numbers.dequantize")
    if numbers is None:
        return
    found = numbers.recognise(case.checkpoint, case.state)
    parts = {_last(part) for group in found.groups for part in group.parts if part != group.name}
    if found.groups and not parts & {_last(name) for name in case.blueprint.places}:
        message = f"the file is quantised, the model is not: {', '.join(map(str, found.schemes))}"
        yield Remedy("quantised", message, ("convert", "--dequantize"), lambda c: numbers.dequantize(c)[0])


# Names of the parts that a wrapper computes from
OF_WRAPPER = re.compile(r"\.(parametrizations|base_layer|lora_[aAbB])\.|_(orig|mask|[guv])$")


def folded(case: Case) -> Iterator[Remedy]:
    """Compute what a wrapper computes from others, unless the model is wrapped too."""
    folding: Any = find("folding.fold")
    kinds = folding.folds_in(case.state) if folding else {}
    if kinds and not any(map(OF_WRAPPER.search, case.blueprint.places)):
        names = ",".join(kinds)
        what = " and ".join(map(folding.KINDS.get, kinds))
        message = f"the file has the parts of {what}, and the model plain weights"
        yield Remedy("wrapped", message, ("convert", "--fold", names), lambda c: folding.fold(c, [*kinds])[0])


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def is_packed(checkpoint: Checkpoint, state: State) -> bool:
    """Return whether tensors of a state are codes, which mean nothing without what lies beside them."""
    numbers: Any = find("numbers.recognise")
    found = numbers.recognise(checkpoint, state) if numbers else None
    return found is not None and bool(found.groups or found.faults)


def tied_apart(case: Case) -> str:
    """Return, in words, two names that the model ties and whose values differ in the state; "" for none."""
    for name, place in case.blueprint.places.items():
        one, other = (case.state.tensors.get(each) for each in (place.first, name))
        if one is not None and other is not None and one is not other and not same_values(one, other):
            what = f"'{place.first}' and '{name}' are one tensor in the model, and differ in the file"
            return f"{what}: torch keeps the last; convert --exclude leaves one out"
    return ""


def complex_parts(case: Case) -> Iterator[Remedy]:
    """Join pairs of real tensors into complex ones, or split complex ones."""
    message, command = "has complex tensors as pairs NAME.real and NAME.imag", ("convert", "--complex")
    join, split = (*command, "join"), (*command, "split")
    if any(f"{name}.real" in case.state.tensors for name in case.fit.missing):
        yield Remedy("complex", f"the file {message}", join, lambda c: layout.join_complex(c)[0])
    unexpected = {*case.fit.unexpected}
    if any(name.removesuffix(".real") in unexpected for name in case.fit.missing):
        yield Remedy("complex", f"the model {message}", split, lambda c: layout.split_complex(c)[0])


def counters(case: Case) -> Iterator[Remedy]:
    """Add BatchNorm's counters, which older files and other frameworks lack."""
    lacking = [name for name in case.fit.missing if name.endswith(COUNTER)]
    batchnorm: Any = find("batchnorm.convert_states")
    if lacking and batchnorm:
        message, command = f"{len(lacking)} BatchNorm layers lack '{COUNTER}'", ("convert-batchnorm", "--to")
        yield Remedy("counters", message, (*command, "plain"), lambda c: batchnorm.convert(c, "plain")[0])


def ties(case: Case) -> Iterator[Remedy]:
    """Repeat tensors that the model has under several names and the file under one of them."""
    places = case.blueprint.places
    there = {places[name].first: name for name in reversed([*places]) if name in case.state.tensors}
    pairs = [(name, there[places[name].first]) for name in case.fit.missing if places[name].first in there]
    pairs = [pair for pair in pairs if "=" not in pair[1]]  # --tie NEW=OLD is cut at the last =
    if pairs:
        tied = shortened(tuple(f"{new} = {old}" for new, old in pairs))
        flags = [word for new, old in pairs for word in ("--tie", f"{new}={old}")]
        message = f"the file has tied tensors under one name only ({tied})"
        yield Remedy("ties", message, ("convert", *flags), lambda c: layout.tie(c, pairs))


def layouts(case: Case) -> Iterator[Remedy]:
    """Permute tensors whose axes are in another order than the model's: transposed, or channels last."""
    tensors, places = case.state.tensors, case.blueprint.places
    names = [name for name, *_ in case.fit.mismatched]
    orders = {name: axes for name in names if (axes := _order(tensors[name].shape, places[name].shape))}
    if orders:
        message = f"{len(orders)} tensors have their axes in another order ({shortened(tuple(orders))})"
        message += _ambiguous(case, orders)
        yield from _by_patterns("layout", message, "--permute", orders, tensors, layout.permute)


def _by_patterns(
    kind: str,
    message: str,
    flag: str,
    values: Mapping[str, Sizes],
    tensors: Mapping[str, object],
    change: Callable[[Checkpoint, Rules], Changed],
) -> Iterator[Remedy]:
    rules = as_patterns(values, tensors)
    if len(rules) * len(tensors) <= MAX_WORK:
        flags = [word for glob, sizes in rules for word in (flag, f"{glob}={','.join(map(str, sizes))}")]
        yield Remedy(kind, message, ("convert", *flags), lambda c: change(c, rules)[0])


# Convolutions in TensorFlow's order of axes (WIO, HWIO, DHWIO), and images with channels last.
USUAL: tuple[Sizes, ...] = ((2, 1, 0), (3, 2, 0, 1), (0, 3, 1, 2), (4, 3, 0, 1, 2))


def _order(theirs: Sizes, ours: Sizes | None) -> Sizes | None:
    """Return the order of axes that turns one shape into the other, preferably one that frameworks use."""
    if ours is None or len(theirs) > 5 or sorted(theirs) != sorted(ours):
        return None
    return next(_orders(theirs, ours))


def _orders(theirs: Sizes, ours: Sizes) -> Iterator[Sizes]:
    orders = [*USUAL, *permutations(range(len(theirs)))]
    return (axes for axes in orders if len(axes) == len(ours) and _moved(theirs, axes) == ours)


def _moved(shape: Sizes, axes: Sizes) -> Sizes:
    return tuple(shape[axis] for axis in axes)


def _moving(shape: Sizes, axes: Sizes) -> Sizes:
    """Return the axes of an order that have more than one index: only moving those moves values."""
    return tuple(axis for axis in axes if shape[axis] > 1)


def _ambiguous(case: Case, orders: Mapping[str, Sizes]) -> str:
    """Return a warning of shapes that are the same in both orders or that several orders make."""
    shapes = {name: tensor.shape for name, tensor in case.state.tensors.items()}
    axes_seen = {*orders.values()}
    unclear = tuple(name for name in shapes if name not in orders and _hides(shapes[name], axes_seen))
    places = {name: case.blueprint.places[name].shape or () for name in orders if orders[name] not in USUAL}
    guessed = tuple(name for name, place in places.items() if _is_one_of_several(shapes[name], place))
    said = (
        (unclear, "others don't show whether they are too"),
        (guessed, "don't show which order, so it is guessed"),
    )
    clauses = (f"; the shapes of {len(names)} {what} ({shortened(names)})" for names, what in said if names)
    return "".join(clauses)


def _hides(shape: Sizes, orders: set[Sizes]) -> bool:
    """Return whether one of the orders leaves this shape as it is and yet moves values."""
    fitting = [axes for axes in orders if len(axes) == len(shape) and _moved(shape, axes) == shape]
    return any(list(_moving(shape, axes)) != sorted(_moving(shape, axes)) for axes in fitting)


def _is_one_of_several(theirs: Sizes, ours: Sizes) -> bool:
    return len({_moving(theirs, axes) for axes in _orders(theirs, ours)}) > 1


def shapes(case: Case) -> Iterator[Remedy]:
    """Reshape tensors with more or fewer axes of size 1, and flat ones: FSDP's parameters of one rank."""
    tensors, places = case.state.tensors, case.blueprint.places
    pairs = ((name, tensors[name].shape, places[name].shape) for name, *_ in case.fit.mismatched)
    sizes = {
        name: ours
        for name, theirs, ours in pairs
        if ours is not None and (_squeezed(theirs) == _squeezed(ours) or theirs == (prod(ours),))
    }
    if sizes:
        message = f"{len(sizes)} tensors are flat, or differ in axes of size 1 ({shortened(tuple(sizes))})"
        yield from _by_patterns("shape", message, "--reshape", sizes, tensors, layout.reshape)


def _squeezed(shape: Sizes) -> Sizes:
    return tuple(size for size in shape if size != 1)


def extras(case: Case) -> Iterator[Remedy]:
    """Leave out entries that the model has no place for, if it lacks nothing and few sizes differ."""
    fit = case.fit
    if fit.missing or not fit.unexpected or 10 * len(fit.mismatched) > len(case.blueprint.places):
        return
    if is_packed(case.checkpoint, case.state):  # they would be its scales
        return
    unwanted = dict.fromkeys(fit.unexpected, ())
    patterns = [pattern for pattern, _ in as_patterns(unwanted, case.state.container)]
    if len(patterns) * len(case.state.container) > MAX_WORK:
        return
    flags = [word for pattern in patterns for word in ("--exclude", pattern)]
    message = f"the model has no place for {len(fit.unexpected)} entries ({shortened(fit.unexpected)})"
    yield Remedy("extra", message, ("convert", *flags), lambda c: selection.select(c, exclude=patterns)[0])


# Flags take shell patterns: one `*.weight` is easier to read than twenty names.


def as_patterns(values: Mapping[str, Sizes], names: Iterable[object]) -> list[tuple[str, Sizes]]:
    """Return (pattern, value) pairs that give each name its value, and no value to any other of `names`."""
    # Of each pattern, whether all that it matches have one value, which is None for others, and how many.
    counts: Counter[str] = Counter()
    given: dict[str, Sizes | None] = {}
    mixed: set[str] = set()
    for name in map(str, names):
        value = values.get(name)
        for pattern in _patterns(name):
            counts[pattern] += 1
            if given.setdefault(pattern, value) != value:
                mixed.add(pattern)
    rules: dict[str, Sizes] = {}
    for name, value in values.items():
        patterns = [*_patterns(name)]
        if not any(pattern in rules for pattern in patterns):
            *wide, alone = patterns
            worth = (each for each in wide if each not in mixed and counts[each] > 1)
            rules[next(worth, alone)] = value
    return list(rules.items())


def _patterns(name: str) -> Iterator[str]:
    """Yield the patterns that match a name, from the widest to the name itself."""
    parts = [*map(_literal, name.split("."))]
    yield from ("*." + ".".join(parts[-count:]) for count in range(1, min(len(parts), MAX_CUTS)))
    yield from (".".join(parts[:count]) + ".*" for count in range(1, min(len(parts), MAX_CUTS)))
    yield ".".join(parts)


def _literal(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text) if "*" in text or "?" in text or "[" in text else text
