"""The rules as they apply to one state: its dict under the new names, each tensor after its steps.

The names that rules take must be all that there must be: no layer, expert or bias is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from ...checkpoint.rebuilt_tensors import plain_tensor, with_plain_tensor
from ...checkpoint.state import State
from ...errors import Collision, Refused, UsageFault
from ...inert_pickle.values import remade
from ...tensors.losses import CastReport
from ...tensors.ref import TensorRef
from ...tensors.values import same_values
from ..renaming import Renaming, with_versions
from .matching import Matched, Move, matched
from .numbers import Unknown, first_known
from .rules import MapRules, Rule, Side, Tie, ValueCount
from .tensors import VerbMisfit
from .verbs import Bundle, Index, RuleContext

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
        said, count = self.counts.get(last, ValueCount()), self.numbers.get(last)
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


class StateMapping:
    """The rules as they apply to one state."""

    def __init__(self, path: str, state: State, rules: MapRules, config: Mapping[str, Any]) -> None:
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
            raise Refused(
                self.path, f"nothing says the number '{fault}', which {rule} needs", hint=hint
            ) from None
        except UsageFault as fault:
            raise Refused(self.path, f"{fault.message}: {rule}", hint=fault.hint) from None
        return self._done.setdefault(key, bundle)

    def _tied(self, values: Container, side: Side) -> Container:
        """Return a dict of one side with the ties that the rules add there, and without those they take."""
        for tie in (rule for rule in self.rules.rules if isinstance(rule, Tie) and rule.on == side):
            if not (not tie.when or _is_set(self.config, tie.when)) or (tie.name in values) is tie.adds:
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
            raise Refused(
                self.path, f"{what}: {tie}", hint="a rule for it keeps it, and so does another config"
            )


def _is_set(config: Mapping[str, Any], name: str) -> bool:
    """Return whether an entry of a config, dotted where it is inside another, is true."""
    value: Any = config
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value is True
