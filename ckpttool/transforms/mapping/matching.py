"""Which names each rule takes: no name twice, and none left that the rules refuse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import Refused
from ..wrappers import found_prefixes
from .rules import Drop, MapRules, Rule
from .templates import NameTemplate, templates
from .verbs import Index

FEW = 6  # names that a message lists


@dataclass(frozen=True, slots=True)
class Move:
    """One case of a rule: the names that it takes, and what its placeholders stand for."""

    rule: Rule
    bindings: Mapping[str, str]
    sources: Mapping[Index, tuple[str, ...]]  # by the placeholders that only the sources have

    @property
    def names(self) -> Iterator[str]:
        """All names that it takes."""
        return (name for names in self.sources.values() for name in names)

    def targets(self, fields: Sequence[str], at: Index) -> tuple[str, ...]:
        """Return the names of the tensors that end under these values of these placeholders."""
        bindings = {**self.bindings, **dict(zip(fields, map(str, at), strict=True))}
        return tuple(template.fill(bindings) for template in self.rule.outputs)


@dataclass(frozen=True, slots=True)
class Matched:
    """What the rules take of a state's names."""

    moves: list[Move] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)


def matched(rules: MapRules, names: Iterable[str], path: str) -> Matched:
    """Return what each rule takes of some names.

    Raises Refused where a rule that is not optional finds nothing, one of several names that go together is
    missing, two rules claim one name, or a name is left that the rules refuse.
    """
    names = list(names)
    known = dict.fromkeys(names)
    found = _Found(path)
    for rule in rules.rules:
        if isinstance(rule, Rule):
            found.moves += found.of_rule(rule, names, known)
        elif isinstance(rule, Drop) and rule.on == "from":
            (template,) = templates([rule.name])
            for name, _ in _fitting(template, names, known):
                found.claim(name, str(rule))
                found.dropped.append(name)
    rest = [name for name in names if name not in found.owners]
    if rest and rules.rest == "refuse":
        listed = ", ".join(f"'{name[:80]}'" for name in rest[:FEW]) + (", …" if rest[FEW:] else "")
        hint = "rest = 'keep' or 'drop' in the rules says what becomes of such tensors"
        raise Refused(path, f"no rule names {len(rest)} of {len(names)} tensors: {listed}", hint=hint)
    if rules.rest == "drop":
        return Matched(found.moves, [*found.dropped, *rest])
    return Matched(found.moves, found.dropped, rest)


def _why_none(names: list[str]) -> str:
    """Return a hint for a rule that finds nothing: a wrapper's prefix is the usual cause."""
    for wrapper in found_prefixes(names):
        return f"take the wrapper's prefix off first: ckpttool strip-prefix IN OUT --prefix {wrapper.prefix}"
    return f"the first name is '{next(iter(names), '')[:80]}'; optional = true in a rule allows that"


def _fitting(
    template: NameTemplate, names: Iterable[str], known: Mapping[str, object]
) -> Iterator[tuple[str, dict[str, str]]]:
    if template.literal is not None:
        if template.literal in known:
            yield template.literal, {}
        return
    for name in names:
        if (bindings := template.match(name)) is not None:
            yield name, bindings


class _Found:
    """Names as the rules claim them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.moves: list[Move] = []
        self.dropped: list[str] = []
        self.owners: dict[str, str] = {}

    def claim(self, name: str, owner: str) -> None:
        """Note that a rule takes a name, which no other may take."""
        if (other := self.owners.setdefault(name, owner)) != owner:
            raise Refused(self.path, f"two rules claim '{name[:80]}': {other}, and {owner}")

    def of_rule(self, rule: Rule, names: list[str], known: Mapping[str, object]) -> Iterator[Move]:
        """Yield the cases of a rule."""
        cases: dict[tuple[str, ...], dict[Index, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        for number, template in enumerate(rule.inputs):
            for name, bindings in _fitting(template, names, known):
                self.claim(name, f"{rule}, name {number + 1}")
                case = tuple(bindings[each] for each in rule.shared)
                cases[case][tuple(int(bindings[each]) for each in rule.gathered)][number] = name
        if not cases and not rule.optional:
            raise Refused(self.path, f"{rule} finds no tensor", hint=_why_none(names))
        for case, parts in cases.items():
            bindings = dict(zip(rule.shared, case, strict=True))
            sources = {at: self._whole(rule, found, bindings, at) for at, found in sorted(parts.items())}
            yield Move(rule, bindings, sources)

    def _whole(
        self, rule: Rule, found: Mapping[int, str], bindings: Mapping[str, str], at: Index
    ) -> tuple[str, ...]:
        """Return one name for each template."""
        for number, template in enumerate(rule.inputs):
            if number not in found:
                all_bindings = {**bindings, **dict(zip(rule.gathered, map(str, at), strict=True))}
                what = f"has '{next(iter(found.values()))[:80]}' and no '{template.fill(all_bindings)[:80]}'"
                raise Refused(self.path, f"{what}, and {rule} needs both")
        return tuple(found[number] for number in range(len(rule.inputs)))
