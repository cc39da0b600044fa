"""What keeps a state from fitting a model, each with the command that mends it.

A remedy is a pure change of the checkpoint together with the command that makes the same change, so that it
can be tried before it is advised. `FINDERS` look at a misfit and offer some; those that help are kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from itertools import permutations

from . import keys, layout, transforms
from .checkpoint import Checkpoint, State
from .fit import COUNTER, Blueprint, Fit, shortened
from .wrappers import COMPANIONS, WRAPPERS, found_prefixes

Sizes = tuple[int, ...]

TRIED = 24
"""Prefixes that are tried, at most."""

ALIKE = 8
"""An end that more names share (`weight`) tells nothing of what stands before it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A state beside the model that it should fit.

    Attributes:
        checkpoint: holds the state as a dict, where it is found without being named.
        taken_out: what it took to have that: `--state NAME` when the state had to be named, no words when it
            was a pickled model's; None when the file is as it was.
        original: the state as it lies in the file.
    """

    checkpoint: Checkpoint
    state: State
    blueprint: Blueprint
    fit: Fit
    taken_out: tuple[str, ...] | None
    original: State


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of a checkpoint, twice: as a command and as the transform behind it.

    Attributes:
        kind: a stable word for scripts.
        message: what is wrong, as a sentence without a capital and a full stop.
        command: the command and its options, without the files.
        apply: makes the new checkpoint; raises CkptToolError where the command would fail.
    """

    kind: str
    message: str
    command: tuple[str, ...]
    apply: Callable[[Checkpoint], Checkpoint]


Finder = Callable[[Case], Iterator[Remedy]]


def wrappers(case: Case) -> Iterator[Remedy]:
    """The prefix of a wrapper, or of several, in front of the keys."""
    for found in found_prefixes(case.state.tensors, case.state.versions):
        carried = f"{found.keys} of {found.of} keys"
        own = [name for name in COMPANIONS if name in case.fit.unexpected]
        flags = [word for name in own for word in ("--drop", name)]
        message = f"'{found.prefix}' of {found.wrapper} is in front of {carried}"
        yield _strip("prefix", message, found.prefix, *flags, drop=own)


def wrappers_inside(case: Case) -> Iterator[Remedy]:
    """Wrappers around parts of the model, in the middle of keys."""
    for prefix, wrapper in WRAPPERS.items():
        count = sum(f".{prefix}" in f".{name}" for name in case.fit.unexpected)
        if count:
            message = f"'{prefix}' of {wrapper} stands inside {count} keys"
            yield _strip("prefix", message, prefix, "--anywhere", "--repeat")


def _strip(kind: str, message: str, prefix: str, *flags: str, drop: Iterable[str] = ()) -> Remedy:
    anywhere, repeat = "--anywhere" in flags, "--repeat" in flags
    return Remedy(
        kind,
        message,
        ("strip-prefix", "--prefix", prefix, *flags),
        lambda c: keys.strip_prefix(c, prefix, repeat=repeat, anywhere=anywhere, drop=drop)[0],
    )


def prefixes(case: Case) -> Iterator[Remedy]:
    """Any first parts of keys that the model has otherwise, or not at all."""
    for theirs, ours in _heads(case):
        if not ours:
            yield _strip("prefix", f"'{theirs}' is in front of keys that the model has without it", theirs)
        elif not theirs:
            message = f"the model has '{ours}' in front of its keys, the file does not"
            yield _add(message, ours)
        else:
            message = f"the file says '{theirs}' where the model says '{ours}'"
            yield _rename("names", message, [(f"^{re.escape(theirs)}", ours)])


def _add(message: str, prefix: str) -> Remedy:
    command = ("add-prefix", "--prefix", prefix)
    return Remedy("prefix", message, command, lambda c: keys.add_prefix(c, prefix)[0])


def _heads(case: Case) -> list[tuple[str, str]]:
    """(file's, model's) first parts of keys that end alike, those of the most keys first."""
    ends: dict[str, list[str]] = {}
    for name in case.fit.missing:
        for head, end in _cuts(name):
            ends.setdefault(end, []).append(head)
    counts: Counter[tuple[str, str]] = Counter()
    for name in case.fit.unexpected:
        for head, end in _cuts(name):
            if len(ends.get(end, ())) <= ALIKE:
                counts.update((head, other) for other in ends.get(end, ()) if other != head)
    return sorted(counts, key=lambda pair: (-counts[pair], len(pair[0]) + len(pair[1])))[:TRIED]


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """(head with its dot, rest) at every dot; the empty head first."""
    yield "", name
    for dot in re.finditer(r"[.]", name):
        yield name[: dot.end()], name[dot.end() :]


def _rename(kind: str, message: str, rules: list[tuple[str, str]]) -> Remedy:
    flags = [word for old, new in rules for word in ("--map", f"{old}={new}")]
    return Remedy(kind, message, ("rename-keys", *flags), lambda c: keys.rename_keys(c, rules)[0])


# What parts of names were called before, or elsewhere, and what they are called now; tried both ways.
RENAMED = (
    (
        "weight-norm",
        "weight norm",
        (
            ("weight_g", "parametrizations.weight.original0"),
            ("weight_v", "parametrizations.weight.original1"),
        ),
    ),
    (
        "spectral-norm",
        "spectral norm",
        (
            ("weight_orig", "parametrizations.weight.original"),
            ("weight_u", "parametrizations.weight.0._u"),
            ("weight_v", "parametrizations.weight.0._v"),
        ),
    ),
    ("layer-norm", "normalisation", (("gamma", "weight"), ("beta", "bias"))),
    (
        "batch-norm",
        "BatchNorm",
        (
            ("gamma", "weight"),
            ("beta", "bias"),
            ("moving_mean", "running_mean"),
            ("moving_variance", "running_var"),
        ),
    ),
)


def renamed_parts(case: Case) -> Iterator[Remedy]:
    """Parameters that a library renamed: weight norm, spectral norm, `gamma` and `beta`."""
    for kind, what, pairs in RENAMED:
        for swap in (False, True):
            old_new = [(new, old) if swap else (old, new) for old, new in pairs]
            rules = [(rf"(^|\.){re.escape(old)}$", rf"\g<1>{new}") for old, new in old_new]
            message = f"the file names what {what} keeps '{old_new[0][0]}', the model '{old_new[0][1]}'"
            yield _rename(kind, message, rules)


def complex_parts(case: Case) -> Iterator[Remedy]:
    """Complex tensors as pairs of real ones, in the file or in the model."""
    if any(f"{name}.real" in case.state.tensors for name in case.fit.missing):
        yield Remedy(
            "complex",
            "the file has complex tensors as pairs NAME.real and NAME.imag",
            ("convert", "--complex", "join"),
            lambda c: transforms.join_complex(c)[0],
        )
    if any(name.removesuffix(".real") in case.fit.unexpected for name in case.fit.missing):
        yield Remedy(
            "complex",
            "the model has complex tensors as pairs NAME.real and NAME.imag",
            ("convert", "--complex", "split"),
            lambda c: transforms.split_complex(c)[0],
        )


def counters(case: Case) -> Iterator[Remedy]:
    """BatchNorm's counters, which older files and other frameworks lack."""
    lacking = [name for name in case.fit.missing if name.endswith(COUNTER)]
    if lacking:
        from .batchnorm_state import convert

        yield Remedy(
            "counters",
            f"{len(lacking)} BatchNorm layers lack '{COUNTER}'",
            ("convert-batchnorm", "--to", "plain"),
            lambda c: convert(c, "plain")[0],
        )


def ties(case: Case) -> Iterator[Remedy]:
    """Tensors that the model shares between names, and the file has under one of them."""
    places = case.blueprint.places
    there: dict[str, str] = {}
    for name, place in places.items():
        if name in case.state.tensors:
            there.setdefault(place.first, name)
    pairs = [(name, there[places[name].first]) for name in case.fit.missing if places[name].first in there]
    if pairs:
        tied = shortened(tuple(f"{new} = {old}" for new, old in pairs))
        flags = [word for new, old in pairs for word in ("--tie", f"{new}={old}")]
        message = f"the file has tied tensors under one name alone ({tied})"
        yield Remedy("ties", message, ("convert", *flags), lambda c: layout.tie(c, pairs))


def layouts(case: Case) -> Iterator[Remedy]:
    """Tensors whose axes are in another order than the model's: transposed, or channels last."""
    orders = {}
    for name, *_ in case.fit.mismatched:
        axes = _order(case.state.tensors[name].shape, case.blueprint.places[name].shape)
        if axes:
            orders[name] = axes
    if orders:
        rules = grouped(orders, case.state.tensors)
        flags = [word for glob, axes in rules for word in ("--permute", f"{glob}={_listed(axes)}")]
        message = f"{len(orders)} tensors have their axes in another order ({shortened(tuple(orders))})"
        message += _either_way(case, orders)
        yield Remedy("layout", message, ("convert", *flags), lambda c: layout.permute(c, rules)[0])


# Of convolutions in TensorFlow's order of axes (WIO, HWIO, DHWIO), and of images with their channels last.
USUAL: tuple[Sizes, ...] = ((2, 1, 0), (3, 2, 0, 1), (0, 3, 1, 2), (4, 3, 0, 1, 2))


def _order(theirs: Sizes, ours: Sizes | None) -> Sizes | None:
    """The order of axes that makes one shape of the other; of several, a framework's own comes first."""
    if ours is None or len(theirs) > 5 or sorted(theirs) != sorted(ours):
        return None
    orders = [*USUAL, *permutations(range(len(theirs)))]
    return next(axes for axes in orders if len(axes) == len(ours) and tuple(theirs[a] for a in axes) == ours)


def _either_way(case: Case, orders: Mapping[str, Sizes]) -> str:
    """A warning of square matrices beside transposed ones: their shapes can't tell."""
    square = [
        name
        for name, tensor in case.state.tensors.items()
        if name not in orders and len(tensor.shape) == 2 and len(set(tensor.shape)) == 1
    ]
    if not square or (1, 0) not in orders.values():
        return ""
    return f"; of {len(square)} square ones no shape tells whether they are too ({shortened(tuple(square))})"


def shapes(case: Case) -> Iterator[Remedy]:
    """Tensors with more or fewer axes of size 1: a linear layer and a 1×1 convolution."""
    sizes: dict[str, Sizes] = {}
    for name, *_ in case.fit.mismatched:
        theirs, ours = case.state.tensors[name].shape, case.blueprint.places[name].shape
        if ours is not None and [n for n in theirs if n != 1] == [n for n in ours if n != 1]:
            sizes[name] = ours
    if sizes:
        rules = grouped(sizes, case.state.tensors)
        flags = [word for glob, shape in rules for word in ("--reshape", f"{glob}={_listed(shape)}")]
        message = f"{len(sizes)} tensors have more or fewer axes of size 1 ({shortened(tuple(sizes))})"
        yield Remedy("shape", message, ("convert", *flags), lambda c: layout.reshape(c, rules)[0])


def extras(case: Case) -> Iterator[Remedy]:
    """Entries that the model has no place for, when it lacks nothing, and but a few sizes differ."""
    if (
        case.fit.missing
        or not case.fit.unexpected
        or 10 * len(case.fit.mismatched) > len(case.blueprint.places)
    ):
        return
    names = [pattern for pattern, _ in grouped(dict.fromkeys(case.fit.unexpected, ()), case.state.container)]
    flags = [word for name in names for word in ("--exclude", name)]
    message = (
        f"the model has no place for {len(case.fit.unexpected)} entries ({shortened(case.fit.unexpected)})"
    )
    yield Remedy("extra", message, ("convert", *flags), lambda c: transforms.select(c, exclude=names)[0])


def same_order(case: Case) -> Iterator[Remedy]:
    """Layers under other names, but as many, of the same shapes and in the same order."""
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
        rules = [(rf"^{re.escape(old)}\.(?=[^.]*$)", f"{new}." if new else "") for old, new in layers.items()]
        message = f"{len(layers)} layers have other names; order and shapes agree, and nothing else says so"
        yield _rename("names", message, rules)


def grouped(values: Mapping[str, Sizes], names: Iterable[object]) -> list[tuple[str, Sizes]]:
    """As few shell patterns as tell which names have which value: `*.weight` where all such names do."""
    everything = [str(name) for name in names]
    rules: dict[str, Sizes] = {}
    for name, value in values.items():
        if any(fnmatchcase(name, pattern) for pattern in rules):
            continue
        rules[next(p for p in _patterns(name) if _tells(p, value, values, everything))] = value
    return list(rules.items())


def _patterns(name: str) -> Iterator[str]:
    """From the widest to the name itself."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield "*." + ".".join(_literal(part) for part in parts[-count:])
    yield _literal(name)


def _literal(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def _tells(pattern: str, value: Sizes, values: Mapping[str, Sizes], names: list[str]) -> bool:
    """Whether a pattern is worth it: it fits several names, and all that it fits have this value."""
    fits = re.compile(translate(pattern)).match
    fitting = [values.get(name) for name in names if fits(name)]
    return all(found == value for found in fitting) and len(fitting) > pattern.startswith("*.")


def _listed(sizes: Sizes) -> str:
    return ",".join(map(str, sizes))


FINDERS: tuple[Finder, ...] = (
    complex_parts,
    wrappers,
    wrappers_inside,
    prefixes,
    renamed_parts,
    counters,
    ties,
    layouts,
    shapes,
    same_order,
    extras,
)
"""From what is certain to what is a guess: an earlier one is tried first."""
