"""The verbs of a rule, each a step from tensors to tensors, with its inverse and its form in a rule file.

A rule's tensors are a Bundle: for each value of the placeholders that only one side of the rule has (the
experts that are stacked), one tensor for each template of that side (q, k and v).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from dataclasses import field as with_default
from typing import Any, ClassVar

from ...errors import Irreversible, UsageFault
from ...tensors.cast import target
from ...tensors.losses import CastReport
from ...tensors.ref import TensorRef
from . import tensors as of
from .numbers import Number, evaluated
from .tensors import Sizes, VerbMisfit

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
class Transpose(OnEach):
    """Axes in another order, as `torch.permute` has them."""

    verb: ClassVar[str] = "transpose"
    own: ClassVar[str] = "axes"
    axes: Sizes = (1, 0)

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        return of.transposed(tensor, self.axes)

    def inverse(self) -> Verb:
        return replace(self, axes=tuple(self.axes.index(axis) for axis in range(len(self.axes))))


@dataclass(frozen=True, slots=True)
class Reshape(OnEach):
    """The same elements in another shape; the inverse needs `before`."""

    verb: ClassVar[str] = "reshape"
    own: ClassVar[str] = "shape"
    shape: tuple[Number, ...] = ()
    before: tuple[Number, ...] = ()

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        before = context.sizes(self.before)
        if self.before and (len(before) != len(tensor.shape) or not _fits(before, tensor.shape)):
            raise VerbMisfit(f"has shape {list(tensor.shape)}, not {list(before)}")
        return of.reshaped(tensor, context.sizes(self.shape))

    def inverse(self) -> Verb:
        if not self.before:
            raise Irreversible(
                "'reshape' without the shape before can't be undone", hint="give it: from = [-1, 64]"
            )
        return replace(self, shape=self.before, before=self.shape)


def _fits(wanted: Sizes, shape: Sizes) -> bool:
    return all(size in (-1, there) for size, there in zip(wanted, shape, strict=True))


@dataclass(frozen=True, slots=True)
class PermuteHeads(OnEach):
    """The rows of each head in the order of another rotary embedding: in "halves", or in "pairs".

    `size` are the rows of a head, which a wrong number of heads does not fit.
    """

    verb: ClassVar[str] = "permute-heads"
    own: ClassVar[str] = "heads"
    heads: Number = 1
    to: str = ""
    axis: int = 0
    size: Number = 0

    def __post_init__(self) -> None:
        if self.to not in ("halves", "pairs"):
            raise UsageFault(
                f"permute-heads: to = {self.to!r}", hint="to = 'halves' (Hugging Face) or 'pairs' (Meta)"
            )

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        heads, size = context.sizes((self.heads, self.size))
        if size and (rows := tensor.shape[of.axis_of(tensor, self.axis)]) != heads * size:
            raise VerbMisfit(f"has {rows} rows, not those of {heads} heads of {size}")
        return of.heads_reordered(tensor, heads, self.to, self.axis)

    def inverse(self) -> Verb:
        return replace(self, to="pairs" if self.to == "halves" else "halves")


@dataclass(frozen=True, slots=True)
class Scaling(OnEach):
    """Each element times a number, rounded once."""

    verb: ClassVar[str] = "scale"
    own: ClassVar[str] = "by"
    follows: ClassVar[bool] = False
    by: float = 1.0

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        return of.scaled(tensor, self.by)


@dataclass(frozen=True, slots=True)
class Cast(OnEach):
    """Another element type."""

    verb: ClassVar[str] = "cast"
    own: ClassVar[str] = "to"
    follows: ClassVar[bool] = False
    to: str = "float32"

    def __post_init__(self) -> None:
        target(self.to.lower())

    def one(self, tensor: TensorRef, context: RuleContext) -> TensorRef:
        new, report = of.cast(tensor, self.to)
        context.reports.append(report)
        return new


@dataclass(frozen=True, slots=True)
class Concat(Verb):
    """The tensors of all templates joined along an axis, of these `sizes` there, or all of one size."""

    verb: ClassVar[str] = "concat"
    own: ClassVar[str] = "axis"
    axis: int = 0
    sizes: tuple[Number, ...] = ()

    def made_of(self, tensors: tuple[TensorRef, ...], context: RuleContext) -> tuple[TensorRef, ...]:
        return (of.concatenated(tensors, self.axis, context.sizes(self.sizes) or None),)

    def inverse(self) -> Verb:
        return CutAxis(self.axis, self.sizes)


@dataclass(frozen=True, slots=True)
class CutAxis(Verb):
    """One tensor cut along an axis, in these `sizes`, or in equal ones: a tensor for each template."""

    verb: ClassVar[str] = "split"
    own: ClassVar[str] = "axis"
    axis: int = 0
    sizes: tuple[Number, ...] = ()

    def made_of(self, tensors: tuple[TensorRef, ...], context: RuleContext) -> tuple[TensorRef, ...]:
        if len(tensors) != 1:
            raise VerbMisfit(f"are {len(tensors)}, and {self.verb} takes one")
        return of.cut(tensors[0], self.axis, context.sizes(self.sizes) or None, context.parts)

    def inverse(self) -> Verb:
        return Concat(self.axis, self.sizes)


@dataclass(frozen=True, slots=True)
class Stack(Verb):
    """The tensors of all values of a placeholder along a new axis, in the order of its numbers."""

    verb: ClassVar[str] = "stack"
    own: ClassVar[str] = "field"
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
        return Bundle(fields, {at: self._stacked(those) for at, those in groups.items()})

    def _stacked(self, those: list[tuple[TensorRef, ...]]) -> tuple[TensorRef, ...]:
        return tuple(of.stacked(column, self.axis) for column in zip(*those, strict=True))

    def inverse(self) -> Verb:
        return Unstack(self.field, self.axis)


@dataclass(frozen=True, slots=True)
class Unstack(Verb):
    """A tensor for each place along an axis, which a placeholder numbers from 0."""

    verb: ClassVar[str] = "unstack"
    own: ClassVar[str] = "field"
    field: str = ""
    axis: int = 0

    def apply(self, bundle: Bundle, context: RuleContext) -> Bundle:
        new: dict[Index, tuple[TensorRef, ...]] = {}
        for at, those in bundle.tensors.items():
            columns = [of.unstacked(tensor, self.axis) for tensor in those]
            if len({*map(len, columns)}) > 1:
                raise VerbMisfit(f"have {' and '.join(str(len(each)) for each in columns)} of '{self.field}'")
            new |= {(*at, place): row for place, row in enumerate(zip(*columns, strict=True))}
        return Bundle((*bundle.fields, self.field), new)

    def inverse(self) -> Verb:
        return Stack(self.field, self.axis)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
