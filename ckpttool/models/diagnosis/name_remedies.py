"""Remedies for names that differ: wrappers, prefixes, renamed parts and layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from ...transforms import keys
from ...transforms.wrappers import COMPANIONS, WRAPPERS, found_prefixes
from .blocks import numbers
from .fit import Case, Remedy

MAX_PREFIXES = 24  # tried at most
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
    yield from ((name[: dot.end()], name[dot.end() :]) for dot in re.finditer("[.]", name))


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
SPECTRAL = (("weight_orig", "original"), ("weight_u", "0._u"), ("weight_v", "0._v"))
RENAMED = (
    (
        "weight-norm",
        "weight norm",
        [(f"weight_{old}", f"{WEIGHT}.original{n}") for n, old in enumerate("gv")],
    ),
    ("spectral-norm", "spectral norm", [(old, f"{WEIGHT}.{new}") for old, new in SPECTRAL]),
    ("layer-norm", "normalisation", SCALE),
    ("batch-norm", "BatchNorm", SCALE + MOMENTS),
)


def renamed_parts(case: Case) -> Iterator[Remedy]:
    """Rename parameters that a library renamed: weight norm, spectral norm, `gamma` and `beta`."""
    for kind, what, pairs in RENAMED:
        for swap in (False, True):
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
