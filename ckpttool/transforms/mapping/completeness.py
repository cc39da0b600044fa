"""Whether the names that rules take are all that there must be: no layer, expert or bias is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from ...errors import Refused
from .matching import Move
from .numbers import first_known
from .rules import Count, Rule, Rules
from .verbs import Index


def _required(rule: Rule) -> tuple[str, ...]:
    """Return the placeholders all of whose values a rule must find: numbers, then words."""
    return (*rule.levels, *(name for name in rule.shared if name in rule.inputs[0].words))


class Completeness:
    """Checks that placeholders take all their values, from the first one on and without a gap."""

    def __init__(self, path: str, rules: Rules, config: Mapping[str, Any]) -> None:
        self.path, self.rules = path, [rule for rule in rules.rules if isinstance(rule, Rule)]
        self.counts = rules.counts
        known = {name: count.number for name, count in rules.counts.items() if count.number is not None}
        self.numbers = {name: first_known(number, config) for name, number in known.items()}

    def check(self, moves: Iterable[Move]) -> None:
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
        for rule in (each for each in self.rules if each.optional is not True):
            names = by_rule[id(rule)]
            if rule.optional == "all" and not names:
                continue
            is_of_all = rule.optional in (False, "all")
            wanted = layers.get(rule.levels, {()}) if is_of_all else groups[rule.optional, rule.levels]
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
        said, count = self.counts.get(last, Count()), self.numbers.get(last)
        for before, values in groups.items():
            names = zip(fields, before, strict=False)
            where = "".join(f", {name} = {value}" for name, value in names)
            expected = range(said.first, said.first + len(values))
            if not said.gaps and values != [*expected]:
                gap = next(each for each in expected if each not in values)
                raise Refused(
                    self.path, f"has no '{last}' = {gap}{where}, and others up to {values[-1]}: {rule}"
                )
            if count is not None and count != len(values):
                what = f"has {len(values)} of '{last}'{where}, and the config says {count}: {rule}"
                raise Refused(self.path, what)
