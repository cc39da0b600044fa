"""Which names and values of two files count as the same, and how far apart their numbers are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import Any

from ..core.checkpoint.dotted_names import contents
from ..core.checkpoint.prefixes import WRAPPERS
from ..core.checkpoint.special_tensors import special_tensor
from ..core.inert_pickle.values import Global, Record, container_name, in_brief, tensor_of
from ..core.lazy import NDArray, np
from ..core.tensors.cast import FLOATS, carrier, reader
from ..core.tensors.ref import INTEGERS, REAL_TYPES, DType, real_dtype

WRAPPER = re.compile(rf"(^|\.)(?:{'|'.join(map(re.escape, WRAPPERS))})+")

# The most outer modules that are tried as a prefix; each costs a pass over all names
MAX_OUTER = 16

LONG = 40  # The most characters of a text that are shown

Bare = Callable[[str], str]  # A rule that removes the prefixes of one file from its names


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The tolerance |a - b| <= atol + rtol * |b|, as in `torch.allclose`, with NaN the same as NaN."""

    rtol: float = 0.0
    atol: float = 0.0


def unchanged(name: str) -> str:
    """Return the name: the rule that removes nothing."""
    return name


def bare_names(a: Iterable[str], b: Iterable[str]) -> tuple[Bare, Bare]:
    """Return for each of two states a rule that removes the prefix of wrappers, or of one outer module."""
    names = list(a), list(b)
    rules = [_first_one_to_one(all_, partial(WRAPPER.sub, r"\1")) for all_ in names]
    short = [{rule(name) for name in all_} for rule, all_ in zip(rules, names, strict=True)]
    for this, other in ((0, 1), (1, 0)):
        if outer := _outer(short[this], short[other]):
            rules[this] = _first_one_to_one(names[this], _rule_without(outer, rules[this]), rules[this])
            break
    return rules[0], rules[1]


def shared(a: Iterable[str], b: Iterable[str], rules: tuple[Bare, Bare]) -> int:
    """Return how many names two states have in common under these rules."""
    return len({rules[0](name) for name in a} & {rules[1](name) for name in b})


def _rule_without(outer: str, rule: Bare) -> Bare:
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
    if (tensor := tensor_of(value)) is not None:
        return f"{tensor.dtype.name} {list(tensor.shape)}"
    if (like := special_tensor(value)) is not None:
        return str(like)
    if isinstance(value, str) and len(value) > LONG:
        return f"{value[:LONG]!r}… ({len(value)} characters)"
    if isinstance(value, str | float):
        return repr(value)
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"{container_name(value)} of {len(value)}"
    return in_brief(value)


def numbers_as_text(x: object, y: object) -> bool:
    """Return whether a dict has a key as text that is a number in another dict."""
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
    """Yield the keys that dotted names can't hold whole, such as NumPy numbers, in pairs that differ."""
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
    for name, value in _named_entries(container):
        name = wanted = bare(name)
        while name in found:
            repeats[wanted] += 1
            name = f"{wanted}'{repeats[wanted]}"
        found[name] = value
    return found


def _named_entries(container: object) -> Iterator[tuple[str, object]]:
    """Yield a container's entries and its attributes, but for the versions of modules."""
    for name, value in contents(container) or ():
        if name is not None or not isinstance(value, dict):
            yield name or "", value
        else:
            is_object = isinstance(container, Record)
            yield from ((key, item) for key, item in _named_entries(value) if is_object or key != "_metadata")


# ---- The distance between two tensors' numbers
#
# Floats are compared as float64, which holds each of them. Integers are compared exactly, also with floats,
# complex numbers by the magnitude of their difference.


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between two tensors of one shape.

    Attributes:
        differ: elements that differ: in their bits, or by more than the tolerance.
        of: the number of elements of the tensor; 0 for a piece of one.
        nans: elements that differ and are NaN on one side only; no distance counts them.
        max_abs: the largest |a - b|, exact for integers; None when no two numbers could be compared.
        max_rel: the largest |a - b| / |b|; infinite where b is 0.
        max_ulp: the most steps from one number to the other, in their type; None for integers and between
            types.
        where: the place of the largest difference in row-major order; a NaN's place takes precedence.
        a, b: the numbers at that place.
        tolerated: whether there are also elements that differ by no more than the tolerance.
    """

    differ: int
    of: int = 0
    nans: int = 0
    max_abs: float | int | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    where: int | None = field(default=None, metadata={"json": None})
    a: complex | float | int | None = field(default=None, metadata={"json": None})
    b: complex | float | int | None = field(default=None, metadata={"json": None})
    tolerated: bool = field(default=False, metadata={"json": None})

    def __add__(self, other: Distance) -> Distance:
        """Join two pieces of one tensor; of equal differences the first keeps its place."""
        first = self if not other.differ or (self.differ and self._rank() >= other._rank()) else other
        names = "max_abs", "max_rel", "max_ulp"
        most = {name: _larger(getattr(self, name), getattr(other, name)) for name in names}
        differ, nans = self.differ + other.differ, self.nans + other.nans
        return replace(first, differ=differ, nans=nans, tolerated=self.tolerated or other.tolerated, **most)

    def _rank(self) -> tuple[bool, float | int]:
        return self.nans > 0, -1 if self.max_abs is None else self.max_abs

    def times(self, count: int) -> Distance:
        """Return the distance of the same difference repeated."""
        return replace(self, differ=self.differ * count, nans=self.nans * count)


def _larger(one: Any, other: Any) -> Any:
    return one if other is None else other if one is None else max(one, other)


Measure = Callable[[memoryview, memoryview, int], Distance]


def measurer(one: DType, other: DType, tolerance: Tolerance | None) -> Measure:
    """Return a function that measures the distance between the same elements of two tensors."""
    as_numbers = has_numbers(one) and has_numbers(other)

    def measure(a: memoryview, b: memoryview, first: int) -> Distance:
        x, y = _rows(one, a), _rows(other, b)
        count = len(x)
        if one is other:
            same = x == y
            places = np.flatnonzero(~(same[:, 0] if same.shape[1] == 1 else same.all(axis=1)))
            x, y = x[places], y[places]
        else:
            places = np.arange(count)
        if not len(places):
            return Distance(0)
        if not as_numbers:  # quantised types are compared only by their bits
            return Distance(len(places), where=first + int(places[0]))
        with np.errstate(all="ignore"):
            numbers = _Numbers(one, other, x, y)
            if tolerance is None:
                return numbers.distance(slice(None), first, places)
            keep = np.flatnonzero(~numbers.within(tolerance))
            return replace(numbers.distance(keep, first, places), tolerated=len(keep) < len(places))

    return measure


def has_numbers(dtype: DType) -> bool:
    """Return whether elements of a type are numbers by themselves, as those of quantised types are not."""
    return dtype.name in FLOATS or dtype.name in REAL_TYPES or dtype.name in INTEGERS


def numbers(dtype: DType, raw: memoryview) -> NDArray[Any]:
    """Return elements as float64, complex128, int64 or uint64: (elements,)."""
    return _values(dtype, _rows(dtype, raw))


def _rows(dtype: DType, raw: memoryview) -> NDArray[Any]:
    """Return the bits of elements as unsigned integers: (elements, parts), two parts for complex types."""
    return np.frombuffer(raw, dtype=f"<u{dtype.part}").reshape(-1, dtype.itemsize // dtype.part)


def _values(dtype: DType, rows: NDArray[Any]) -> NDArray[Any]:
    """Return bits as float64, complex128, int64 or uint64: (elements,)."""
    part = real_dtype(dtype)
    if part.name not in FLOATS:
        kind = "u" if part.name[0] in "ub" else "i"
        return rows[:, 0].view(f"<{kind}{part.itemsize}").astype(f"<{kind}8")
    floats = reader(part)(np.ascontiguousarray(rows).view(carrier(part))).astype("<f8")
    return floats.view("<c16")[:, 0] if dtype.name in REAL_TYPES else floats[:, 0]


class _Numbers:
    """Elements side by side: their values, and how far apart they are."""

    def __init__(self, one: DType, other: DType, x: NDArray[Any], y: NDArray[Any]) -> None:
        self.a, self.b = _values(one, x), _values(other, y)
        self.steps = _steps(one, x, y) if one is other and one.name not in INTEGERS else None
        if one.name in INTEGERS and other.name in INTEGERS:
            self.a, self.b = _of_one_kind(self.a, self.b)
        if self.a.dtype == self.b.dtype and self.a.dtype.kind in "iu":
            larger, a, b = self.a > self.b, self.a.view("<u8"), self.b.view("<u8")
            self.apart = np.where(larger, a - b, b - a)  # modulo 2^64: right for signed and unsigned
            self.one_nan = np.zeros(len(a), dtype=bool)
            return
        (a, rest_a), (b, rest_b) = _as_floats(self.a), _as_floats(self.b)
        rest = rest_a - rest_b
        in_parts = "c" in a.dtype.kind + b.dtype.kind
        if in_parts:  # so that a NaN hides no difference in the other part
            a, b, rest = _parts(a), _parts(b), _parts(rest)
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        one_nan = nan_a ^ nan_b
        same = (a == b) & (rest == 0) | (nan_a & nan_b)
        apart = np.where(same, 0.0, np.abs((a - b) + rest))
        apart = np.where(np.isnan(apart), np.inf, apart)  # infinities of other signs
        self.one_nan = one_nan.any(axis=1) if in_parts else one_nan
        self.apart = np.hypot(apart[:, 0], apart[:, 1]) if in_parts else apart

    def within(self, tolerance: Tolerance) -> Any:
        limit = tolerance.atol + tolerance.rtol * _magnitude(self.b)
        if self.apart.dtype.kind == "u":  # which numpy would compare as float64
            return (limit >= 2.0**64) | (self.apart <= np.minimum(limit, 2.0**64 - 2048).astype("<u8"))
        return ((self.apart == 0) | (np.isfinite(self.apart) & (self.apart <= limit))) & ~self.one_nan

    def distance(self, keep: Any, first: int, places: NDArray[Any]) -> Distance:
        apart, one_nan, places = self.apart[keep], self.one_nan[keep], places[keep]
        if not len(places):
            return Distance(0)
        a, b = self.a[keep], self.b[keep]
        nans = int(np.count_nonzero(one_nan))
        largest = int(np.argmax(one_nan)) if nans else int(np.argmax(apart))
        where, one, other = first + int(places[largest]), a[largest].item(), b[largest].item()
        found = Distance(len(places), nans=nans, where=where, a=one, b=other)
        if nans == len(places):
            return found
        numbers = ~one_nan
        relative = np.where(apart[numbers] == 0, 0.0, apart[numbers] / _magnitude(b[numbers]))
        steps = None if self.steps is None else int(np.where(apart == 0, 0, self.steps[keep])[numbers].max())
        most = float(np.where(np.isnan(relative), math.inf, relative).max())
        return replace(found, max_abs=apart[numbers].max().item(), max_rel=most, max_ulp=steps)


def _of_one_kind(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return 64-bit integers both signed or both unsigned when the values allow it."""
    if a.dtype == b.dtype:
        return a, b
    signed, unsigned = (a, b) if a.dtype.kind == "i" else (b, a)
    if signed.min() >= 0:
        return a.view("<u8"), b.view("<u8")
    return (a.view("<i8"), b.view("<i8")) if unsigned.max() < 2**63 else (a, b)


def _as_floats(values: NDArray[Any]) -> tuple[Any, Any]:
    """Return numbers as float64 or complex128, and the exact rest of integers. Source: Dekker 1971."""
    if values.dtype.kind in "fc":
        return values, 0.0
    if values.min() >= -(2**53) and values.max() <= 2**53:
        return values.astype("<f8"), 0.0
    high = (values >> values.dtype.type(32)).astype("<f8") * 2.0**32
    low = (values & values.dtype.type(2**32 - 1)).astype("<f8")
    whole = high + low
    return whole, low - (whole - high)


def _parts(values: Any) -> Any:
    """Return the real and imaginary parts of numbers as float64: (elements, 2)."""
    return np.asarray(values, "<c16").reshape(-1, 1).view("<f8")


def _magnitude(values: NDArray[Any]) -> Any:
    if values.dtype.kind == "c":
        parts = _parts(values)
        parts = np.where(np.isnan(parts) & ~np.isnan(parts).all(axis=1, keepdims=True), 0.0, parts)
        return np.hypot(parts[:, 0], parts[:, 1])
    return np.abs(values if values.dtype.kind in "fc" else values.astype("<f8"))


def _steps(dtype: DType, x: NDArray[Any], y: NDArray[Any]) -> Any:
    """Return the number of steps between numbers of a type; for complex ones, the larger of the parts'."""
    # In IEEE 754 types and their kin, the bits of floats of one sign are in the order of the numbers.
    part = real_dtype(dtype)
    top = 8 * part.itemsize - 1

    def place(rows: NDArray[Any]) -> Any:
        bits = rows.astype("<u8")
        if part.name == "float8_e8m0fnu":  # has no sign
            return bits.view("<i8")
        size = (bits & np.uint64((1 << top) - 1)).view("<i8")
        return np.where(bits >> np.uint64(top), -size, size)

    a, b = place(x), place(y)
    return np.where(a > b, a.view("<u8") - b.view("<u8"), b.view("<u8") - a.view("<u8")).max(axis=1)
