"""Which names and plain values of two files count as the same."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count

from ..checkpoint.dotted_names import contents
from ..checkpoint.rebuilt_tensors import special_tensor
from ..inert_pickle.values import Global, Record, container_name, in_brief, tensor_of
from ..transforms.wrappers import WRAPPERS

WRAPPER = re.compile(rf"(^|\.)(?:{'|'.join(map(re.escape, WRAPPERS))})+")

# The most modules around another that are looked for as a prefix; each costs a pass over all names
MAX_OUTER = 16

LONG = 40  # The most characters of a text that are shown

Bare = Callable[[str], str]  # A rule that takes off a name the prefixes of its own file


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The tolerance |a - b| <= atol + rtol * |b|, as in `torch.allclose`, with NaN the same as NaN."""

    rtol: float = 0.0
    atol: float = 0.0


def unchanged(name: str) -> str:
    """Return the name: the rule that takes nothing off."""
    return name


def bare_names(a: Iterable[str], b: Iterable[str]) -> tuple[Bare, Bare]:
    """Return for each of two states a rule that takes off the prefix of wrappers, or of one outer module."""
    names = list(a), list(b)
    rules = [_first_one_to_one(all_, partial(WRAPPER.sub, r"\1")) for all_ in names]
    short = [{rule(name) for name in all_} for rule, all_ in zip(rules, names, strict=True)]
    for this, other in ((0, 1), (1, 0)):
        outer = _outer(short[this], short[other])
        if outer:
            rules[this] = _first_one_to_one(names[this], _without(outer, rules[this]), rules[this])
            break
    return rules[0], rules[1]


def shared(a: Iterable[str], b: Iterable[str], rules: tuple[Bare, Bare]) -> int:
    """Return how many names two states have in common under these rules."""
    return len({rules[0](name) for name in a} & {rules[1](name) for name in b})


def _without(outer: str, rule: Bare) -> Bare:
    return lambda name: rule(name).removeprefix(outer)


def _first_one_to_one(names: list[str], *rules: Bare) -> Bare:
    # A rule that would give two names the same result is not used.
    fitting = (rule for rule in rules if len({rule(name) for name in names} - {""}) == len(names))
    return next(fitting, unchanged)


def _outer(longer: set[str], shorter: set[str]) -> str:
    """Return the first parts that most names of one state have more than the other's, or `""`."""
    shared = len(longer & shorter)
    first = min(longer - shorter, default="").split(".", MAX_OUTER + 1)
    for length in range(1, min(len(first), MAX_OUTER + 1)):
        outer = ".".join(first[:length]) + "."
        carried = {name.removeprefix(outer) for name in longer if name.startswith(outer)}
        if len(carried & shorter) > max(shared, len(shorter) // 2):
            return outer
    return ""


def same_value(x: object, y: object, tolerance: Tolerance | None, bare: tuple[Bare, Bare]) -> bool:
    """Return whether two plain values are the same: of one type, floats bit for bit except NaN."""
    if tolerance is not None and _is_number(x) and _is_number(y):
        return _close(x, y, tolerance)  # type: ignore[arg-type]
    if isinstance(x, str) and isinstance(y, str):
        return x == y or bare[0](x) == bare[1](y)
    if isinstance(x, float | complex):
        return type(x) is type(y) and repr(x) == repr(y)
    return type(x) is type(y) and x == y


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _close(x: float, y: float, tolerance: Tolerance) -> bool:
    try:
        a, b = float(x), float(y)
    except OverflowError:
        return x == y
    if x == y or (math.isnan(a) and math.isnan(b)):
        return True
    return math.isfinite(a - b) and abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b)


def in_words(value: object) -> str:
    """Return a value in a few words."""
    tensor = tensor_of(value)
    if tensor is not None:
        return f"{tensor.dtype.name} {list(tensor.shape)}"
    like = special_tensor(value)
    if like is not None:
        return str(like)
    if isinstance(value, str) and len(value) > LONG:
        return f"{value[:LONG]!r}… ({len(value)} characters)"
    if isinstance(value, str | float):
        return repr(value)
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"{container_name(value)} of {len(value)}"
    return in_brief(value)


def numbers_as_text(x: object, y: object) -> bool:
    """Return whether a dict has as text what is a number among the keys of another."""
    if not (isinstance(x, dict) and isinstance(y, dict)):
        return False
    numbers = {key for key in y if isinstance(key, int)}
    return any(str(key) in x and key not in x for key in numbers)


def both_by_name(
    x: object, y: object, bare: tuple[Bare, Bare]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the entries of two containers by name."""
    if not (isinstance(x, set | frozenset) and isinstance(y, set | frozenset)):
        return _by_name(x, bare[0]), _by_name(y, bare[1])
    # Equal elements of two sets get one name; the others go by order.
    names = {element: str(index) for index, element in enumerate(x)}
    spare = chain((name for element, name in names.items() if element not in y), map(str, count(len(x))))
    theirs = {names[element] if element in names else next(spare): element for element in y}
    return {name: element for element, name in names.items()}, theirs


def kind_of(value: object) -> str:
    """Return what two containers have in common: the type of objects; a dict, a list or tuple, or a set."""
    name = value.type_name if isinstance(value, Record) else container_name(value)
    return {"tuple": "list", "frozenset": "set"}.get(name, name)


def keys_apart(x: object, y: object) -> Iterator[tuple[str, object, object]]:
    """Yield the keys that names don't tell whole, such as numbers of NumPy, in pairs that may differ."""
    for one, other in zip(_untold(x), _untold(y), strict=False):  # another count shows in the names
        if one != other:
            yield f"{in_brief(one)} (key)", one, other


def _untold(container: object) -> list[object]:
    items = container.items if isinstance(container, Record) else ()
    keys = container if isinstance(container, dict) else (key for key, _ in items)
    return sorted((key for key in keys if not _is_told(key)), key=in_brief)


def _is_told(key: object) -> bool:
    is_short = not isinstance(key, int) or key.bit_length() <= 256
    return isinstance(key, str | int | float | type(None) | Global) and is_short


def _by_name(container: object, bare: Bare) -> dict[str, object]:
    """Return a container's entries by name; where two names coincide (0 and '0'), the later is marked."""
    found: dict[str, object] = {}
    repeats: Counter[str] = Counter()  # of taken names, so that many equal ones take no longer
    for name, value in _entries(container):
        name = wanted = bare(name)
        while name in found:
            repeats[wanted] += 1
            name = f"{wanted}'{repeats[wanted]}"
        found[name] = value
    return found


def _entries(container: object) -> Iterator[tuple[str, object]]:
    """Yield a container's entries and its attributes, but for the versions of modules."""
    for name, value in contents(container) or ():
        if name is not None:
            yield name, value
        elif not isinstance(value, dict):
            yield "", value
        else:
            is_object = isinstance(container, Record)
            yield from ((key, item) for key, item in _entries(value) if is_object or key != "_metadata")
