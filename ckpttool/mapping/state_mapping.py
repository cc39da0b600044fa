"""Match the names of a state with rules, and make the state that the rules describe."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ..core.checkpoint.prefixes import Renaming, found_prefixes, with_versions
from ..core.checkpoint.special_tensors import plain_tensor, with_plain_tensor
from ..core.checkpoint.state import State
from ..core.inert_pickle.values import remade
from ..core.tensors.cast import CastReport
from ..core.tensors.ref import TensorRef
from ..core.tensors.values import same_values
from ..errors import Collision, Refused, UsageFault
from .rule_file import FEWER, PATIENCE
from .rules import Drop, MapRules, NameTemplate, Rule, Side, Tie, ValueCount, templates
from .verbs import Bundle, Index, RuleContext, Unknown, VerbMisfit, first_known

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


def matched(rules: MapRules, names: Iterable[str], path: str) -> Matched:
    """Return what each rule takes of some names.

    Raises Refused where a rule that is not optional finds nothing, one of several names that go together is
    missing, two rules claim one name, or a name is left that the rules refuse.
    """
    names = list(names)
    known = dict.fromkeys(names)
    found = Matched(path)
    until = time.monotonic() + PATIENCE
    for number, rule in enumerate(rules.rules):
        if time.monotonic() > until:
            what = f"{number:,} of {len(rules.rules):,} rules took {PATIENCE:.0f} s to find their names"
            raise Refused(path, what, hint=FEWER)
        if isinstance(rule, Rule):
            found.moves += found.of_rule(rule, names, known)
        elif isinstance(rule, Drop) and rule.on == "from":
            (template,) = templates([rule.name])
            for name, _ in _fitting(template, names, known):
                found.claim(name, str(rule))
                found.dropped.append(name)
    rest = [name for name in names if name not in found.owners]
    found.owners.clear()  # a text for each name
    if rest and rules.rest == "refuse":
        listed = ", ".join(f"'{name[:80]}'" for name in rest[:FEW]) + (", …" if rest[FEW:] else "")
        hint = "rest = 'keep' or 'drop' in the rules says what becomes of such tensors"
        raise Refused(path, f"no rule names {len(rest)} of {len(names)} tensors: {listed}", hint=hint)
    to = found.dropped if rules.rest == "drop" else found.rest
    to += rest
    return found


def _why_none(path: str, names: list[str]) -> str:
    """Return a hint for a rule that finds nothing: a wrapper's prefix is the usual cause."""
    for wrapper in found_prefixes(names):
        strip = f"ckpttool strip-prefix {shlex.quote(path)} OUT --prefix {wrapper.prefix}"
        return f"take the wrapper's prefix off first: {strip}"
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


@dataclass(slots=True)
class Matched:
    """What the rules take of a state's names."""

    path: str
    moves: list[Move] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)  # the rule that claims each name, meanwhile

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
            raise Refused(self.path, f"{rule} finds no tensor", hint=_why_none(self.path, names))
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


# ---- Rules applied to one state; no layer, expert or bias may be missing


Container = dict[Any, Any]


def _required(rule: Rule) -> tuple[str, ...]:
    """Return the placeholders all of whose values a rule must find: numbers, then words."""
    return (*rule.levels, *(name for name in rule.shared if name in rule.inputs[0].words))


class Completeness:
    """Checks that placeholders take all their values, from the first one on and without a gap."""

    def __init__(self, path: str, rules: MapRules, config: Mapping[str, Any]) -> None:
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
        words = [rule.inputs[0].words[each] for each in _required(rule)[len(rule.levels) :]]
        # None is made before it is looked for: of many placeholders there are more cases than names.
        for layer, said in ((layer, said) for layer in sorted(layers) for said in product(*words)):
            values = (*map(str, layer), *said)
            if values not in found:
                pairs = zip(_required(rule), values, strict=True)
                where = ", ".join(f"{name} = {value}" for name, value in pairs)
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
        said, count = self.counts.get(last, ValueCount()), self.numbers.get(last)
        for before, values in groups.items():
            names = zip(fields, before, strict=False)
            where = "".join(f", {name} = {value}" for name, value in names)
            expected = range(said.first, said.first + len(values))
            if not said.gaps and values != [*expected]:
                gap = next(each for each in expected if each not in values)
                what = f"has no '{last}' = {gap}{where}, and others up to {values[-1]}: {rule}"
                raise Refused(self.path, what)
            if count is not None and count != len(values):
                what = f"has {len(values)} of '{last}'{where}, and the config says {count}: {rule}"
                raise Refused(self.path, what)


class StateMapping:
    """The rules as they apply to one state."""

    def __init__(self, path: str, state: State, rules: MapRules, config: Mapping[str, Any]) -> None:
        rules = rules.for_model(path, config)
        self.path, self.state, self.rules, self.config = path, state, rules, config
        given = {name: first_known(value, config) for name, value in rules.numbers.items()}
        self.numbers = {name: value for name, value in given.items() if value is not None}
        self.complete = Completeness(path, rules, config)
        self.reports: list[CastReport] = []
        self.tied: list[str] = []
        self._done: dict[object, Bundle] = {}
        self.values = self._tied({**state.container}, "from")
        named = [name for name in self.values if isinstance(name, str)]
        self.matched: Matched = matched(rules, named, path)
        self.complete.check(self.matched.moves)
        self.names: dict[str, tuple[str, ...]] = {}
        self.made_anew: list[str] = []  # names of which a rule takes more than the name

    @property
    def only_renames(self) -> bool:
        """Whether each tensor stays as it is, and none is left out."""
        return not (self.matched.dropped or any(move.rule.steps for move in self.matched.moves))

    @property
    def moved(self) -> Renaming:
        """Where each name went, or what was made of it; known once `container` was made."""
        return Renaming({old: new for new, sources in self.names.items() for old in sources})

    def cases(self, names: Iterable[Any]) -> Iterator[tuple[Any, Move | None]]:
        """Yield the names that stay, and each case of a rule, at the first of the names that it takes."""
        taken = {name: move for move in self.matched.moves for name in move.names}
        seen = {*self.matched.dropped}
        for name in names:
            move = taken.get(name)
            if name not in seen:
                yield name, move
                seen.update(() if move is None else move.names)

    def container(self) -> Container:
        """Return the state's dict under the new names, in the order of the old ones."""
        new: Container = {}
        for name, move in self.cases(self.values):
            made: Mapping[Any, tuple[object, tuple[Any, ...]]]
            made = {name: (self.values[name], (name,))} if move is None else self._moved(move)
            for target, (result, sources) in made.items():
                if target in new:
                    both = f"'{self.names[target][0]}' and '{sources[0]}'"
                    raise Collision(f"{self.path}: {both} would both be named '{target}'")
                new[target] = result
                if isinstance(target, str):
                    self.names[target] = sources
        new = self._tied(new, "to")
        return with_versions(remade(self.state.container, new.items()), self.state.versions, self.moved)

    def _moved(self, move: Move) -> dict[str, tuple[object, tuple[str, ...]]]:
        """Return what a case of a rule makes: new name -> value, and the names that it was made of."""
        if not move.rule.steps:
            (names,) = move.sources.values()
            targets = move.targets((), ())
            return {new: (self.values[old], (old,)) for new, old in zip(targets, names, strict=True)}
        sources = {at: tuple(map(self.tensor, names)) for at, names in move.sources.items()}
        made = self.through(move, sources)
        whole = tuple(move.names)
        self.made_anew += whole
        self.complete.check_all(made.fields, made.tensors, str(move.rule))
        pairs = (
            (new, tensor)
            for at, tensors in made.tensors.items()
            for new, tensor in zip(move.targets(made.fields, at), tensors, strict=True)
        )
        if len(whole) == 1 and len(made.tensors) == 1:
            value = self.values[whole[0]]
            return {new: (with_plain_tensor(value, tensor), whole) for new, tensor in pairs}
        return {new: (tensor, whole) for new, tensor in pairs}

    def tensor(self, name: str) -> TensorRef:
        """Return a tensor by its name in the input. Raises Refused where it is no plain one."""
        tensor = plain_tensor(self.values[name])
        if tensor is None or name in self.state.likes:
            raise Refused(self.path, f"'{name[:80]}' is not a plain tensor: rules can rename it, no more")
        return tensor

    def through(self, move: Move, sources: Mapping[Index, tuple[TensorRef, ...]]) -> Bundle:
        """Return tensors after the steps of a rule; the same ones for tensors that are tied."""
        rule = move.rule
        views = tuple((at, *(tensor.view for tensor in tensors)) for at, tensors in sources.items())
        if (key := (rule.steps, views)) in self._done:
            return self._done[key]
        bundle = Bundle(rule.gathered, sources)
        context = RuleContext(self.numbers, len(rule.outputs), self.reports)
        names = ", ".join(f"'{name[:80]}'" for name in list(move.names)[:4])
        try:
            for step in rule.steps:
                bundle = step.apply(bundle, context)
        except VerbMisfit as fault:
            raise Refused(self.path, f"{names} {fault}: {rule}") from None
        except Unknown as fault:
            hint = "give the model's config: --config config.json"
            if self.config:
                looked_for = self.rules.numbers.get(str(fault), str(fault))
                listed = looked_for if isinstance(looked_for, tuple) else (looked_for,)
                names = " nor ".join(map(str, listed))
                hint = f"the config has no {names}; [numbers] in the rules says where a number is"
            what = f"nothing says the number '{fault}', which {rule} needs"
            raise Refused(self.path, what, hint=hint) from None
        except UsageFault as fault:
            raise Refused(self.path, f"{fault.message}: {rule}", hint=fault.hint) from None
        return self._done.setdefault(key, bundle)

    def _tied(self, values: Container, side: Side) -> Container:
        """Return a dict of one side with the ties that the rules add there, and without those they take."""
        for tie in (rule for rule in self.rules.rules if isinstance(rule, Tie) and rule.on == side):
            if (tie.name in values) is tie.adds:
                continue
            if tie.of not in values:
                raise Refused(self.path, f"has no '{tie.of}', which {tie} needs")
            if tie.adds:
                values[tie.name] = values[tie.of]
            else:
                self._require_equal(tie, values)
                del values[tie.name]
                self.names.pop(tie.name, None) if side == "to" else None
            self.tied.append(tie.name)
        return values

    def _require_equal(self, tie: Tie, values: Container) -> None:
        one, other = (plain_tensor(values[name]) for name in (tie.name, tie.of))
        if one is None or other is None or not same_values(one, other):
            what = f"'{tie.name}' is not '{tie.of}' under another name, and would be lost"
            hint = "a rule for it keeps it, and so does another config"
            raise Refused(self.path, f"{what}: {tie}", hint=hint)
