"""The outcome of a comparison: which names only one file has, and what differs under a name of both."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..lazy import shown_by
from ..words import counted
from .compare_values import Norms
from .distances import Distance


@dataclass(frozen=True, slots=True)
class Change:
    """A name that both files have, with contents that differ.

    Attributes:
        why: `shape`, `dtype` or `values` of a tensor; `type` or `value` of anything else.
        a, b: the contents in each file, in a few words.
        distance: how far apart the values are; None when they were not compared.
        index: the place of the largest difference, along each axis.
        norms: of both tensors and of their difference; None when the values were not compared as numbers.
    """

    name: str
    why: str
    a: str
    b: str
    distance: Distance | None = field(default=None, metadata={"json": None})
    index: tuple[int, ...] | None = field(default=None, metadata={"json": None})
    norms: Norms | None = field(default=None, metadata={"json": None})

    @property
    def is_of_tensor(self) -> bool:
        """Whether it is a tensor that differs, and no other value."""
        return self.why not in ("type", "value")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a comparison.

    Attributes:
        only_a, only_b: names that the other file lacks; outside the model's state, the shortest that cover
            them.
        changed: in the order of the first file, the model's state first.
        tensors: the number of pairs of tensors that were compared.
        aside_a, aside_b: names outside the model's state that were not looked for in the other file, whose
            format could not hold them.
        matched_without_prefix: how many more names both files would share without wrappers' prefixes.
        tolerated: names in both files whose contents differ, but by no more than the tolerance.
        same_files: how many of the pairs lie at the same place in files of one hash, and were not read.
        text_keys_a, text_keys_b: dicts of this file keyed by text where those of the other are keyed by
            numbers. That is no difference here, as some formats hold no numbers as keys; torch's
            `load_state_dict` of an optimizer finds nothing under text.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[Change, ...] = field(metadata={"json": None})
    tensors: int
    aside_a: tuple[str, ...] = field(default=(), metadata={"json": None})
    aside_b: tuple[str, ...] = field(default=(), metadata={"json": None})
    matched_without_prefix: int = field(default=0, metadata={"json": None})
    tolerated: tuple[str, ...] = ()
    same_files: int = field(default=0, metadata={"json": None})
    text_keys_a: tuple[str, ...] = ()
    text_keys_b: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing that was compared differs by more than the tolerance."""
        return not (self.only_a or self.only_b or self.changed)

    def __repr__(self) -> str:
        return f"<Comparison {self.in_words()}: {counted(self.tensors, 'tensor')} compared>"

    _repr_html_ = shown_by("comparison_html")

    def in_words(self, a: str = "A", b: str = "B") -> str:
        """Return how much differs: `6 tensors and 1 other value changed, 1 only in A`; or `the same`."""
        tensors = sum(change.is_of_tensor for change in self.changed)
        kinds = (tensors, "tensor"), (len(self.changed) - tensors, "other value" if tensors else "value")
        changed = " and ".join(counted(count, kind) for count, kind in kinds if count)
        only = [f"{len(names)} only in {n}" for names, n in ((self.only_a, a), (self.only_b, b)) if names]
        return ", ".join([*([f"{changed} changed"] if changed else []), *only]) or "the same"

    @property
    def identical(self) -> bool:
        """Whether nothing that was compared differs at all."""
        return self.same and not self.tolerated
