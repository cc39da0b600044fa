"""Which names each rule takes, and whether they are all it needs: no layer, expert or part is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from ...errors import Refused
from ..wrappers import found_prefixes
from .numbers import first_known
from .rules import Drop, Rule, Rules
from .templates import Template, templates
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


def matched(rules: Rules, names: Iterable[str], config: Mapping[str, object], path: str) -> Matched:
    """Return what each rule takes of some names.

    Raises Refused where a rule that is not optional finds nothing, a part or a number of a layer is missing,
    two rules claim one name, or a name is left that the rules refuse.
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
    counts = {each: first_known(count.number, config) for each, count in rules.counts.items() if count.number}
    firsts = {each: count.first for each, count in rules.counts.items()}
    Numbers(path, counts, firsts).check(found.moves, rules.rules)
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
    template: Template, names: Iterable[str], known: Mapping[str, object]
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


def _required(rule: Rule) -> tuple[str, ...]:
    """Return the placeholders all of whose values a rule must find: numbers, then words."""
    return (*rule.levels, *(name for name in rule.shared if name in rule.inputs[0].words))


@dataclass(frozen=True, slots=True)
class Numbers:
    """Checks that placeholders take all their values, from the first one on and without a gap."""

    path: str
    counts: Mapping[str, int | None]
    firsts: Mapping[str, int]

    def check(self, moves: Iterable[Move], rules: Iterable[object]) -> None:
        """Check the layers of all rules together, what each rule stacks, and that none misses a layer."""
        by_rule: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        layers: dict[tuple[str, ...], set[Index]] = defaultdict(set)
        groups: dict[tuple[bool | str, tuple[str, ...]], set[Index]] = defaultdict(set)
        for move in moves:
            levels = move.rule.levels
            values = tuple(int(move.bindings[each]) for each in levels)
            by_rule[id(move.rule)].add(tuple(move.bindings[each] for each in _required(move.rule)))
            groups[move.rule.optional, levels].add(values)
            for count in range(1, len(levels) + 1):
                layers[levels[:count]].add(values[:count])
            self.check_all(move.rule.gathered, move.sources, str(move.rule))
        for levels, found in layers.items():
            self._check_last(levels, found, "its rules")
        for rule in (each for each in rules if isinstance(each, Rule) and each.optional is not True):
            names, wanted = by_rule[id(rule)], groups[rule.optional, rule.levels]
            if not rule.optional or (rule.optional == "all" and names):
                wanted = layers.get(rule.levels, {()})
            self._check_all_there(rule, names, wanted)

    def _check_all_there(self, rule: Rule, found: set[tuple[str, ...]], layers: Iterable[Index]) -> None:
        """Check that a rule has found a name for each layer, and each of its words."""
        words = list(product(*(rule.inputs[0].words[each] for each in _required(rule)[len(rule.levels) :])))
        for layer, said in product(sorted(layers), words):
            values = (*map(str, layer), *said)
            if values not in found:
                where = ", ".join(
                    f"{name} = {value}" for name, value in zip(_required(rule), values, strict=True)
                )
                hint = "optional = true in the rule allows that"
                raise Refused(self.path, f"{rule} finds no tensor for {where}", hint=hint)

    def check_all(self, fields: Sequence[str], found: Iterable[Index], rule: str) -> None:
        """Check the values of several placeholders, each for all values of those before it."""
        found = list(found)
        for count in range(1, len(fields) + 1):
            self._check_last(tuple(fields[:count]), {at[:count] for at in found}, rule)

    def _check_last(self, fields: tuple[str, ...], found: set[Index], rule: str) -> None:
        last = fields[-1]
        groups: dict[Index, list[int]] = defaultdict(list)
        for index in sorted(found):
            groups[index[:-1]].append(index[-1])
        first, count = self.firsts.get(last, 0), self.counts.get(last)
        for before, values in groups.items():
            names = zip(fields, before, strict=False)
            where = "".join(f", {name} = {value}" for name, value in names)
            expected = range(first, first + len(values))
            if values != [*expected]:
                gap = next(each for each in expected if each not in values)
                raise Refused(
                    self.path, f"has no '{last}' = {gap}{where}, and others up to {values[-1]}: {rule}"
                )
            if count is not None and count != len(values):
                what = f"has {len(values)} of '{last}'{where}, and the config says {count}: {rule}"
                raise Refused(self.path, what)
