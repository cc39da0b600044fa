"""The steps of a rule: what they do to tensors, their inverses, and their form in a rule file."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from dataclasses import field as with_default
from itertools import accumulate
from math import prod
from typing import Any, ClassVar

from ..core.lazy import np
from ..core.tensors.cast import Caster, CastReport, carrier, nearest, reader, target
from ..core.tensors.ref import MAX_AXES, MAX_BYTES, PLAIN_FLOATS, TensorRef
from ..core.tensors.values import (
    TensorPart,
    assembled,
    in_row_major,
    made_from,
    require_bounded,
    stream,
    stretches,
)
from ..errors import Irreversible, UsageFault


def lines(title: str, table: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of a table after a line with its title, as `[counts]`; none for an empty table."""
    if table:
        yield from ("", title, *(f"{key(name)} = {text(value)}" for name, value in table.items()))


def key(name: str) -> str:
    """Return a key, quoted where it must be."""
    is_bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if is_bare else text(name)


def text(value: object) -> str:
    """Return a value in one line. A text of JSON is one of TOML, but for DEL."""
    if isinstance(value, Mapping) and not value:
        return "{}"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key(name)} = {text(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


# ---- Numbers: whole ones, and expressions of a config's entries


Number = int | str  # an expression: "heads * head_dim"
MAX_EXPRESSION = 200  # characters

OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


class Unknown(LookupError):
    """A number that nothing gives; its text is the name."""


def evaluated(expression: Number, known: Mapping[str, Any]) -> int:
    """Return the value of an expression of +, -, *, // and names, which may be dotted (`rope.theta`).

    Raises:
        Unknown: a name in it is no whole number of `known`.
        UsageFault: it is no such expression, or does not divide.
    """
    if isinstance(expression, int):
        return expression
    return _value(parsed(expression), expression, known)


def parsed(expression: str) -> ast.expr:
    """Return an expression as a tree. Raises UsageFault where it has parts that are not allowed."""
    try:
        tree = ast.parse(expression[: MAX_EXPRESSION + 1], mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise _no_expression(expression) from None
    for node in ast.walk(tree):
        allowed = isinstance(node, ast.BinOp | ast.Name | ast.Attribute | ast.operator | ast.Load | ast.USub)
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        if not (allowed or is_number or isinstance(node, ast.UnaryOp)) or len(expression) > MAX_EXPRESSION:
            raise _no_expression(expression)
        if isinstance(node, ast.operator) and type(node) not in OPERATIONS:
            raise _no_expression(expression)
    return tree


def _no_expression(expression: str) -> UsageFault:
    hint = "whole numbers and names with +, -, * and //, such as 'heads * head_dim'"
    return UsageFault(f"'{expression[:80]}' is no number", hint=hint)


def _value(node: ast.expr, whole: str, known: Mapping[str, Any]) -> int:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, whole, known)
    if not isinstance(node, ast.BinOp):
        name = ast.unparse(node)
        if type(value := entry_of(known, name)) is not int:
            raise Unknown(name)
        return value
    left, right = (_value(side, whole, known) for side in (node.left, node.right))
    if isinstance(node.op, ast.FloorDiv):
        if not right or left % right:
            raise UsageFault(f"'{whole}': {left} does not divide by {right}")
        return left // right
    result = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]
    if abs(result) > MAX_BYTES:
        raise UsageFault(f"'{whole}' is larger than any tensor")
    return result


def entry_of(config: Mapping[str, Any], name: str) -> Any:
    """Return an entry of a config by its name, which is dotted inside another entry; None without one."""
    if name in config:  # a GGUF's keys have dots of their own
        return config[name]
    value: Any = config
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def first_known(expressions: Number | tuple[Number, ...], config: Mapping[str, Any]) -> int | None:
    """Return the value of the first expression whose names a config has; None where it has those of none."""
    for expression in expressions if isinstance(expressions, tuple) else (expressions,):
        with suppress(Unknown):
            return evaluated(expression, config)
    return None


# ---- Operations on tensors: views where possible, else values that are computed on writing


Sizes = tuple[int, ...]

MAX_PARTS = 1 << 16  # tensors that one is cut into
MAX_EMPTY = 1 << 8  # the same of one without elements, of which a header can claim any number


class VerbMisfit(ValueError):
    """Tensors that a verb can't be applied to; the text follows their names."""


def axis_of(tensor: TensorRef, axis: int, *, more: int = 0) -> int:
    """Return an axis counted from 0, of one that may be counted from the end. Raises VerbMisfit."""
    count = len(tensor.shape) + more
    if not -count <= axis < count:
        raise VerbMisfit(f"has {len(tensor.shape)} axes, and none is number {axis}")
    return axis % count


def transposed(tensor: TensorRef, axes: Sizes) -> TensorRef:
    """Return the tensor with its axes in another order. Raises VerbMisfit."""
    if (new := tensor.permuted(axes)) is None:
        raise VerbMisfit(f"has shape {list(tensor.shape)}, whose axes {list(axes)} do not permute")
    return new


def reshaped(tensor: TensorRef, shape: Sizes) -> TensorRef:
    """Return the elements in another shape, in which one size may be -1. Raises VerbMisfit."""
    known = prod(size for size in shape if size != -1)
    fits = shape.count(-1) <= 1 and min(shape, default=0) >= -1 and len(shape) <= MAX_AXES
    if fits and -1 in shape:
        left = tensor.numel // known if known else 0
        shape = tuple(left if size == -1 else size for size in shape)
    if not fits or prod(shape) != tensor.numel:
        here = f"{tensor.numel} elements in shape {list(tensor.shape)}"
        raise VerbMisfit(f"has {here}, not those of {list(shape)}")
    view = tensor.viewed(shape) or materialised(tensor).viewed(shape)
    assert view is not None  # elements in a row take any shape
    return view


def materialised(tensor: TensorRef) -> TensorRef:
    """Return a tensor of the same values in row-major order, which are put there when they are read."""
    require_bounded("a tensor of a rule", tensor)
    return in_row_major(tensor)


def cast(tensor: TensorRef, to: str) -> tuple[TensorRef, CastReport]:
    """Return a floating-point tensor in another type, and what will have overflowed once it is written."""
    caster = Caster(target(to.lower()))
    return caster.cast(tensor), caster.report


def heads_reordered(tensor: TensorRef, heads: int, to: str, axis: int) -> TensorRef:
    """Return a tensor whose rows, those of each head, are in the order of another rotary embedding.

    In the order "pairs" (Meta, torchtitan) rows 2p and 2p + 1 of a head are rotated together; in "halves"
    (Hugging Face) rows p and p + size / 2. Raises VerbMisfit where the rows do not divide so.
    """
    axis = axis_of(tensor, axis)
    rows, step = tensor.shape[axis], tensor.stride[axis]
    if heads < 1 or rows % heads:
        raise VerbMisfit(f"has {rows} rows, which do not divide into {heads} heads")
    size = rows // heads
    if size % 2:
        raise VerbMisfit(f"has heads of {size} rows, which do not divide into pairs")
    half = size // 2
    inner = ((2, step), (half, 2 * step)) if to == "halves" else ((half, step), (2, half * step))
    cut = ((heads, size * step), *inner)
    shape = (*tensor.shape[:axis], *(n for n, _ in cut), *tensor.shape[axis + 1 :])
    stride = (*tensor.stride[:axis], *(s for _, s in cut), *tensor.stride[axis + 1 :])
    return reshaped(materialised(replace(tensor, shape=shape, stride=stride)), tensor.shape)


def concatenated(tensors: Sequence[TensorRef], axis: int, sizes: Sequence[int] | None) -> TensorRef:
    """Return tensors joined along an axis, of these sizes there, or all of one. Raises VerbMisfit."""
    first = tensors[0]
    axis = axis_of(first, axis)
    _require_alike(tensors, axis)
    there = [tensor.shape[axis] for tensor in tensors]
    wanted = list(sizes) if sizes is not None else there[:1] * len(there)
    if there != wanted:
        why = f"{wanted}" if sizes is not None else "one size: other sizes are given as `sizes`"
        raise VerbMisfit(f"has sizes {there} along axis {axis}, not {why}")
    *starts, length = accumulate(there, initial=0)
    return _joined(tensors, axis, starts, length)


def stacked(tensors: Sequence[TensorRef], axis: int) -> TensorRef:
    """Return tensors of one shape along a new axis. Raises VerbMisfit."""
    axis = axis_of(tensors[0], axis, more=1)
    _require_alike(tensors, None)

    def with_axis(tensor: TensorRef) -> TensorRef:
        shape, stride = ((*sizes[:axis], 1, *sizes[axis:]) for sizes in (tensor.shape, tensor.stride))
        return replace(tensor, shape=shape, stride=stride)

    return _joined([with_axis(tensor) for tensor in tensors], axis, range(len(tensors)), len(tensors))


def _require_alike(tensors: Sequence[TensorRef], but: int | None) -> None:
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype is not first.dtype:
            raise VerbMisfit(f"has types {first.dtype.name} and {tensor.dtype.name}, which are not joined")
        shapes = [[size for axis, size in enumerate(each.shape) if axis != but] for each in (first, tensor)]
        if shapes[0] != shapes[1] or len(tensor.shape) != len(first.shape):
            raise VerbMisfit(f"has shapes {list(first.shape)} and {list(tensor.shape)}, which are not joined")


def _joined(tensors: Sequence[TensorRef], axis: int, starts: Sequence[int], length: int) -> TensorRef:
    """Return tensors as parts of one of this length along an axis, on which each has its start."""
    first = tensors[0]
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    if len(shape) > MAX_AXES:
        raise VerbMisfit(f"would have {len(shape)} axes, and torch has at most {MAX_AXES}")
    parts = []
    for start, tensor in zip(starts, tensors, strict=True):
        require_bounded("a tensor of a rule", tensor)
        parts.append(TensorPart(tuple(start * (each == axis) for each in range(len(shape))), tensor))
    whole = assembled("a tensor of a rule", first.storage.data.path, first.dtype, shape, parts)
    return replace(whole, storage=replace(whole.storage, location=first.storage.location))


def cut(tensor: TensorRef, axis: int, sizes: Sequence[int] | None, parts: int) -> tuple[TensorRef, ...]:
    """Return views of a tensor, cut along an axis in these sizes, or in equal ones. Raises VerbMisfit."""
    axis = axis_of(tensor, axis)
    length = tensor.shape[axis]
    if sizes is None and (not parts or length % parts):
        raise VerbMisfit(f"has {length} along axis {axis}, which do not divide by {parts}")
    wanted = [length // parts] * parts if sizes is None else list(sizes)
    if sum(wanted) != length or min(wanted, default=0) < 0:
        raise VerbMisfit(f"has {length} along axis {axis}, not {' + '.join(map(str, wanted))}")
    return tuple(
        replace(
            tensor,
            shape=(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]),
            offset=tensor.offset + (start * tensor.stride[axis] if tensor.numel else 0),
        )
        for start, size in zip(accumulate(wanted, initial=0), wanted, strict=False)
    )


def unstacked(tensor: TensorRef, axis: int) -> tuple[TensorRef, ...]:
    """Return the tensors along an axis, each without it. Raises VerbMisfit."""
    axis = axis_of(tensor, axis)
    most = MAX_PARTS if tensor.numel else MAX_EMPTY
    if not 1 <= tensor.shape[axis] <= most:
        raise VerbMisfit(f"has shape {list(tensor.shape)}, and is cut into 1 to {most} tensors")
    shape, stride = _without(tensor.shape, axis), _without(tensor.stride, axis)
    parts = cut(tensor, axis, None, tensor.shape[axis])
    return tuple(replace(part, shape=shape, stride=stride) for part in parts)


def _without(sizes: Sizes, axis: int) -> Sizes:
    return sizes[:axis] + sizes[axis + 1 :]


# ---- Verbs
#
# A rule's tensors are a Bundle: for each value of the placeholders that only one side of the rule has
# (the experts that are stacked), one tensor for each template of that side (q, k and v).


Index = tuple[int, ...]

WRITTEN = {"before": "from"}  # fields that a rule file calls otherwise


@dataclass(frozen=True, slots=True)
class Bundle:
    """The tensors of a rule on their way from its sources to its targets."""

    fields: tuple[str, ...]  # the placeholders that tell them apart
    tensors: Mapping[Index, tuple[TensorRef, ...]]  # by the values of these


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What the steps of a rule need to know beside its tensors."""

    numbers: Mapping[str, int]
    parts: int  # how many tensors `split` makes: as many as the rule has templates on that side
    reports: list[CastReport] = with_default(default_factory=list)

    def sizes(self, given: Sequence[Number]) -> Sizes:
        """Return sizes as numbers. Raises `numbers.Unknown`."""
        return tuple(evaluated(size, self.numbers) for size in given)


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb with what it needs to know."""

    verb: ClassVar[str]
    own: ClassVar[str]  # the field that the verb's value in a rule file gives
    follows: ClassVar[bool] = True  # what an optimizer keeps of a parameter can be taken the same way

    def __init_subclass__(cls, verb: str = "", own: str = "", follows: bool = True) -> None:
        if verb:  # dataclass() makes each class once more, with slots, and without these words
            cls.verb, cls.own, cls.follows = verb, own, follows

    def apply(self, bundle: Bundle, context: RuleContext) -> Bundle:
        """Return the tensors after this step, unread. Raises VerbMisfit where they do not fit it."""
        made = {at: self.made_of(those, context) for at, those in bundle.tensors.items()}
        return replace(bundle, tensors=made)

    def made_of(self, tensors: tuple[TensorRef, ...], context: RuleContext) -> tuple[TensorRef, ...]:
        """Return what becomes of the tensors of all templates, for one value of the placeholders."""
        raise NotImplementedError

    def inverse(self) -> Verb:
        """Return the step that undoes this one. Raises Irreversible."""
        raise Irreversible(f"'{self.verb}' can't be undone", hint="write rules for the way back")

    def table(self) -> dict[str, Any]:
        """Return the step as a rule file has it: the verb with its value, then what is not the default."""
        more = {
            WRITTEN.get(each.name, each.name): _plain(getattr(self, each.name))
            for each in fields(self)
            if each.name != self.own and getattr(self, each.name) != each.default
        }
        return {self.verb: _plain(getattr(self, self.own)), **more}


@dataclass(frozen=True, slots=True)
class OnEach(Verb):
    """A verb that makes one tensor of each; `parts` limits it to those of some of the rule's templates."""

    parts: tuple[int, ...] = with_default(default=(), kw_only=True)

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        """Return what becomes of one tensor. Raises VerbMisfit."""
        raise NotImplementedError

    def made_of(self, tensors: tuple[TensorRef, ...], context: RuleContext) -> tuple[TensorRef, ...]:
        if max(self.parts, default=0) >= len(tensors):
            raise VerbMisfit(f"are {len(tensors)}, and {self.verb} names the parts {list(self.parts)}")
        chosen = self.parts or range(len(tensors))
        return tuple(self.one(each, context) if n in chosen else each for n, each in enumerate(tensors))


@dataclass(frozen=True, slots=True)
class Transpose(OnEach, verb="transpose", own="axes"):
    """Axes in another order, as `torch.permute` has them."""

    axes: Sizes = (1, 0)

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        return transposed(tensor, self.axes)

    def inverse(self) -> Verb:
        return replace(self, axes=tuple(self.axes.index(axis) for axis in range(len(self.axes))))


@dataclass(frozen=True, slots=True)
class Reshape(OnEach, verb="reshape", own="shape"):
    """The same elements in another shape; the inverse needs `before`."""

    shape: tuple[Number, ...] = ()
    before: tuple[Number, ...] = ()

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        before = context.sizes(self.before)
        if self.before and (len(before) != len(tensor.shape) or not _fits(before, tensor.shape)):
            raise VerbMisfit(f"has shape {list(tensor.shape)}, not {list(before)}")
        return reshaped(tensor, context.sizes(self.shape))

    def inverse(self) -> Verb:
        if not self.before:
            what = "'reshape' without the shape before can't be undone"
            raise Irreversible(what, hint="give it: from = [-1, 64]")
        return replace(self, shape=self.before, before=self.shape)


def _fits(wanted: Sizes, shape: Sizes) -> bool:
    return all(size in (-1, there) for size, there in zip(wanted, shape, strict=True))


@dataclass(frozen=True, slots=True)
class PermuteHeads(OnEach, verb="permute-heads", own="heads"):
    """The rows of each head in the order of another rotary embedding: in "halves", or in "pairs".

    `size` are the rows of a head, which a wrong number of heads does not fit.
    """

    heads: Number = 1
    to: str = ""
    axis: int = 0
    size: Number = 0

    def __post_init__(self) -> None:
        if self.to not in ("halves", "pairs"):
            hint = "to = 'halves' (Hugging Face) or 'pairs' (Meta)"
            raise UsageFault(f"permute-heads: to = {self.to!r}", hint=hint)

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        heads, size = context.sizes((self.heads, self.size))
        if size and (rows := tensor.shape[axis_of(tensor, self.axis)]) != heads * size:
            raise VerbMisfit(f"has {rows} rows, not those of {heads} heads of {size}")
        return heads_reordered(tensor, heads, self.to, self.axis)

    def inverse(self) -> Verb:
        return replace(self, to="pairs" if self.to == "halves" else "halves")


@dataclass(frozen=True, slots=True)
class Scaling(OnEach, verb="scale", own="by", follows=False):
    """Each element times a number, rounded once."""

    by: float = 1.0

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        """Return the product, computed in float64 and rounded once to the tensor's type."""
        if (dtype := tensor.dtype).name not in PLAIN_FLOATS:
            raise VerbMisfit(f"is {dtype.name}, which is not scaled")
        require_bounded("a tensor of a rule", tensor)

        def make(start: int, nbytes: int) -> Iterator[memoryview]:
            first, count = start // dtype.itemsize, nbytes // dtype.itemsize
            for part in stretches(tensor, first, count):
                for piece in stream(part):
                    values = reader(dtype)(np.frombuffer(piece, carrier(dtype))).astype("<f8")
                    with np.errstate(all="ignore"):
                        values *= self.by
                        yield memoryview(nearest(values, dtype).view("u1"))  # type: ignore[arg-type]

        return made_from(tensor, make)


@dataclass(frozen=True, slots=True)
class Cast(OnEach, verb="cast", own="to", follows=False):
    """Another element type."""

    to: str = "float32"

    def __post_init__(self) -> None:
        target(self.to.lower())

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        new, report = cast(tensor, self.to)
        context.reports.append(report)
        return new


@dataclass(frozen=True, slots=True)
class Concat(Verb, verb="concat", own="axis"):
    """The tensors of all templates joined along an axis, of these `sizes` there, or all of one size."""

    axis: int = 0
    sizes: tuple[Number, ...] = ()

    def made_of(self, tensors: tuple[TensorRef, ...], context: RuleContext) -> tuple[TensorRef, ...]:
        return (concatenated(tensors, self.axis, context.sizes(self.sizes) or None),)

    def inverse(self) -> Verb:
        return CutAxis(self.axis, self.sizes)


@dataclass(frozen=True, slots=True)
class CutAxis(Verb, verb="split", own="axis"):
    """One tensor cut along an axis, in these `sizes`, or in equal ones: a tensor for each template."""

    axis: int = 0
    sizes: tuple[Number, ...] = ()

    def made_of(self, tensors: tuple[TensorRef, ...], context: RuleContext) -> tuple[TensorRef, ...]:
        if len(tensors) != 1:
            raise VerbMisfit(f"are {len(tensors)}, and {self.verb} takes one")
        return cut(tensors[0], self.axis, context.sizes(self.sizes) or None, context.parts)

    def inverse(self) -> Verb:
        return Concat(self.axis, self.sizes)


@dataclass(frozen=True, slots=True)
class Stack(Verb, verb="stack", own="field"):
    """The tensors of all values of a placeholder along a new axis, in the order of its numbers."""

    field: str = ""
    axis: int = 0

    def apply(self, bundle: Bundle, context: RuleContext) -> Bundle:
        if self.field not in bundle.fields:
            raise VerbMisfit(f"are not told apart by '{self.field}', along which they are to be stacked")
        place = bundle.fields.index(self.field)
        groups: dict[Index, list[tuple[TensorRef, ...]]] = {}
        for at in sorted(bundle.tensors):
            groups.setdefault(at[:place] + at[place + 1 :], []).append(bundle.tensors[at])
        fields = bundle.fields[:place] + bundle.fields[place + 1 :]
        columns = {at: [*zip(*those, strict=True)] for at, those in groups.items()}
        made = {at: tuple(stacked(each, self.axis) for each in columns[at]) for at in columns}
        return Bundle(fields, made)

    def inverse(self) -> Verb:
        return Unstack(self.field, self.axis)


@dataclass(frozen=True, slots=True)
class Unstack(Verb, verb="unstack", own="field"):
    """A tensor for each place along an axis, which a placeholder numbers from 0."""

    field: str = ""
    axis: int = 0

    def apply(self, bundle: Bundle, context: RuleContext) -> Bundle:
        new: dict[Index, tuple[TensorRef, ...]] = {}
        for at, those in bundle.tensors.items():
            columns = [unstacked(tensor, self.axis) for tensor in those]
            if len({*map(len, columns)}) > 1:
                raise VerbMisfit(f"have {' and '.join(str(len(each)) for each in columns)} of '{self.field}'")
            new |= {(*at, place): row for place, row in enumerate(zip(*columns, strict=True))}
        return Bundle((*bundle.fields, self.field), new)

    def inverse(self) -> Verb:
        return Stack(self.field, self.axis)


VERBS: dict[str, type[Verb]] = {
    step.verb: step
    for step in (Concat, CutAxis, Stack, Unstack, Transpose, PermuteHeads, Reshape, Scaling, Cast)
}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
