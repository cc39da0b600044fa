"""Rules from one architecture's names and layout to another's, and back; the templates of names in them.

A template such as `layers.{i}.{part:weight|bias}` matches names, and is filled in again.
A placeholder `{i}` stands for a number, `{part:weight|bias}` for one of these words, `{rest:*}` for any text.
A placeholder means the same in all templates of a rule, so it is described in one of them. Braces that
belong to a name are doubled, as in Python's format strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

from ..errors import Irreversible, Refused, UsageFault
from .verbs import Number, Stack, Unstack, Verb, entry_of, lines

TOKEN = re.compile(r"(\{\{|\}\})|\{([A-Za-z_][A-Za-z0-9_]*)(?::([^{}]+))?\}|([{}])")
NUMBER, ANY = "0|[1-9][0-9]{0,17}", ".+"  # a number is written in one way only
MAX_FIELDS = 16  # placeholders in one template
MAX_WORDS = 1_000  # for which one stands
MAX_UNSURE = 2  # placeholders whose end only the rest of a name tells: each way is tried
MAX_ANY = 1  # placeholders for any text in one template: more would be matched in more ways than one

Bindings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NameTemplate:
    """A name with placeholders.

    Attributes:
        text: as it is written.
        fields: its placeholders, each once, in order.
        numbers: those of them that stand for numbers.
        words: the words that others stand for, by placeholder; none for any text.
        literal: the name itself, where there are no placeholders.
    """

    text: str
    fields: tuple[str, ...]
    numbers: frozenset[str]
    words: Mapping[str, tuple[str, ...]]
    literal: str | None
    _expression: re.Pattern[str] | None  # of a literal none: to compile one takes a quarter of a millisecond
    _parts: tuple[tuple[str, str | None], ...]  # text, and the placeholder after it

    def match(self, name: str) -> dict[str, str] | None:
        """Return what each placeholder stands for in a name; None where the name does not match."""
        if self._expression is None:
            return {} if name == self.literal else None
        found = self._expression.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, bindings: Bindings) -> str:
        """Return the name in which placeholders have these values."""
        return "".join(text + ("" if field is None else bindings[field]) for text, field in self._parts)


def literal(name: str) -> str:
    """Return the template that matches a name and nothing else."""
    return name.replace("{", "{{").replace("}", "}}")


def templates(texts: Iterable[str]) -> tuple[NameTemplate, ...]:
    """Return the templates of one rule. Raises UsageFault for a malformed one."""
    texts = tuple(texts)
    kinds: dict[str, str] = {}
    for text in texts:
        if "{" not in text:
            continue
        for _, name, kind, _ in TOKEN.findall(text):
            if kind and kinds.setdefault(name, kind) != kind:
                what = f"the placeholder '{name}' is described in two ways, '{kinds[name]}' and '{kind}'"
                raise UsageFault(f"'{text}': {what}", hint="describe it once")
            if kind.count("|") >= MAX_WORDS:
                what = f"'{name}' stands for {kind.count('|') + 1:,} words, and may stand for {MAX_WORDS:,}"
                raise UsageFault(what, hint="{rest:*} stands for any text")
    return tuple(_compiled(text, kinds) for text in texts)


def _compiled(text: str, kinds: Mapping[str, str]) -> NameTemplate:
    parts: list[tuple[str, str | None]] = []
    expression = before = ""
    fields: dict[str, None] = {}
    end = 0
    for token in TOKEN.finditer(text):
        before += text[end : token.start()]
        end = token.end()
        brace, field, _, stray = token.groups()
        if stray:
            hint = "a brace of the name is doubled, a placeholder is {i}, {part:weight|bias} or {rest:*}"
            raise UsageFault(f"'{text}': its brace at {token.start()} belongs to no placeholder", hint=hint)
        if brace:
            before += brace[0]
            continue
        expression += re.escape(before)
        if parts and not before:
            what = "two placeholders with nothing between them match a name in several ways"
            raise UsageFault(f"'{text}': {what}", hint="write what stands between them")
        again = field in fields
        expression += f"(?P={field})" if again else f"(?P<{field}>{_values(kinds.get(field))})"
        parts.append((before, field))
        fields[field], before = None, ""
    before += text[end:]
    parts.append((before, None))
    expression += re.escape(before)
    if sum(kinds.get(field) == "*" for field in fields) > MAX_ANY:
        raise UsageFault(f"'{text}': two placeholders for any text match a name in several ways")
    if len(fields) > MAX_FIELDS:
        raise UsageFault(f"'{text[:80]}': it has {len(fields):,} placeholders, and may have {MAX_FIELDS}")
    pairs = pairwise(parts)
    unsure = [field for (_, field), (sep, _) in pairs if field and _is_unsure(kinds.get(field), sep)]
    if len(unsure) > MAX_UNSURE:
        what = (
            f"where {len(unsure)} of its placeholders end only the rest of a name tells, '{unsure[0]}' first"
        )
        raise UsageFault(f"'{text[:80]}': {what}", hint=f"{MAX_UNSURE} may be so: end them in a dot")
    numbers = frozenset(field for field in fields if field not in kinds)
    words = {field: tuple(kinds[field].split("|")) for field in fields if kinds.get(field, "*") != "*"}
    name, pattern = (None, re.compile(expression, re.DOTALL)) if fields else (before, None)
    return NameTemplate(text, tuple(fields), numbers, words, name, pattern, tuple(parts))


def _is_unsure(kind: str | None, after: str) -> bool:
    """Return whether a value may end in several places before the text that follows it."""
    if kind is None:
        return after[:1].isdigit()
    words = {*kind.split("|")}
    ends = ((word, at) for word in words for at in range(1, len(word)) if word[at] == after[:1])
    return kind != "*" and any(word[:at] in words for word, at in ends)


def _values(kind: str | None) -> str:
    """Return the expression of what a placeholder stands for."""
    if kind is None:
        return NUMBER
    return ANY if kind == "*" else "|".join(map(re.escape, kind.split("|")))


# ---- Rules
#
# A `Rule` takes tensors through steps. A `Drop` leaves out what only one side has. A `Tie` adds a second name
# of a tensor, or removes it. `MapRules` holds all rules of one direction, in any order; a tensor belongs to
# one rule.


Side = Literal["from", "to"]
Rest = Literal["keep", "drop", "refuse"]
OTHER: dict[Side, Side] = {"from": "to", "to": "from"}
RESTS: tuple[str, ...] = get_args(Rest)

# What a rule file says at its top -> where `MapRules` have it
TEXTS = {"name": "name", "from": "start", "to": "end", "source": "source"}


@dataclass(frozen=True)
class Rule:
    """Tensors of the input that become tensors of the output.

    Attributes:
        sources: templates of the names in the input. All have the same placeholders.
        targets: templates of the names in the output, likewise. What both sides have (`{i}` of a layer) makes
            a case of its own for each value; what only the sources have is stacked, and what only the
            targets have is unstacked.
        steps: what is done, in order; none renames.
        optional: it may match nothing, or only some of the layers and words; "all": nothing, or all of them;
            any other text: the layers that the rules with the same text match, each with all its words.
        when: what a config must say for the rule to count, as `said_by` has it; "" always.

    Raises UsageFault where templates and steps do not go together.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    steps: tuple[Verb, ...] = ()
    optional: bool | str = False
    when: str = ""

    def __post_init__(self) -> None:
        if not self.sources or not self.targets:
            raise UsageFault(f"{self}: a rule needs names on both sides", hint="to leave tensors out: drop")
        for side in (self.inputs, self.outputs):
            if any({*each.fields} != {*side[0].fields} for each in side):
                names = " and ".join(f"'{each.text}'" for each in side)
                raise UsageFault(f"{self}: {names} have different placeholders")
        self._check_steps()

    def _check_steps(self) -> None:
        """Follow the placeholders, and the number of tensors, through the steps."""
        fields, count = [*self.gathered], len(self.sources)
        for step in self.steps:
            if isinstance(step, Stack):
                if step.field not in fields:
                    raise UsageFault(f"{self}: it stacks '{step.field}', which only sources may have")
                fields.remove(step.field)
            elif isinstance(step, Unstack):
                if step.field not in self.spread:
                    raise UsageFault(f"{self}: it unstacks '{step.field}', which only targets may have")
                fields.append(step.field)
            elif step.verb in ("concat", "split"):
                known = count, len(self.targets)
                count = 1 if step.verb == "concat" else len(self.targets)
                if step.verb == "split" and known[0] != 1:
                    raise UsageFault(f"{self}: it splits {known[0]} tensors, and split takes one")
        if {*fields} != {*self.spread}:
            odd = sorted({*fields} ^ {*self.spread})
            hint = "stack = 'NAME' takes it away, and unstack = 'NAME' adds it"
            raise UsageFault(f"{self}: only one side has the placeholder '{odd[0]}'", hint=hint)
        if count != len(self.targets):
            hint = "concat makes one of several, and split several of one"
            raise UsageFault(f"{self}: it makes {count} tensors and names {len(self.targets)}", hint=hint)
        if words := {*self.gathered, *self.spread} - self._numbers:
            raise UsageFault(f"{self}: only numbers are stacked, and '{min(words)}' is none")

    def __str__(self) -> str:
        return self._said

    @cached_property
    def _said(self) -> str:
        return f"the rule '{', '.join(self.sources)}' -> '{', '.join(self.targets)}'"

    @cached_property
    def _templates(self) -> tuple[NameTemplate, ...]:
        return templates((*self.sources, *self.targets))

    @cached_property
    def inputs(self) -> tuple[NameTemplate, ...]:
        """The templates of the sources."""
        return self._templates[: len(self.sources)]

    @cached_property
    def outputs(self) -> tuple[NameTemplate, ...]:
        """The templates of the targets."""
        return self._templates[len(self.sources) :]

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The placeholders that both sides have."""
        return tuple(name for name in self.inputs[0].fields if name in self.outputs[0].fields)

    @cached_property
    def gathered(self) -> tuple[str, ...]:
        """The placeholders that only the sources have."""
        return tuple(name for name in self.inputs[0].fields if name not in self.outputs[0].fields)

    @cached_property
    def spread(self) -> tuple[str, ...]:
        """The placeholders that only the targets have."""
        return tuple(name for name in self.outputs[0].fields if name not in self.inputs[0].fields)

    @cached_property
    def _numbers(self) -> frozenset[str]:
        return self.inputs[0].numbers | self.outputs[0].numbers

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """The shared placeholders that are numbers, such as that of a layer."""
        return tuple(name for name in self.shared if name in self._numbers)

    def inverse(self) -> Rule:
        """Return the rule that undoes this one. Raises Irreversible."""
        try:
            steps = tuple(step.inverse() for step in reversed(self.steps))
        except Irreversible as fault:
            raise Irreversible(f"{self}: {fault.message}", hint=fault.hint) from None
        return Rule(self.targets, self.sources, steps, self.optional, self.when)

    def table(self) -> dict[str, object]:
        """Return the rule as a rule file has it."""
        sides = {"from": self.sources, "to": self.targets}
        table: dict[str, object] = {at: names if names[1:] else names[0] for at, names in sides.items()}
        table |= {"steps": [step.table() for step in self.steps]} if self.steps else {}
        table |= {"optional": self.optional} if self.optional else {}
        return table | ({"when": self.when} if self.when else {})


@dataclass(frozen=True, slots=True)
class Drop:
    """Tensors that one side has and the other does not.

    Attributes:
        name: a template.
        on: the side that has them; on "to" this concerns the inverse alone.
        computed: their values follow from the config, so that the way back can do without them.
    """

    name: str
    on: Side = "from"
    computed: bool = False

    def __str__(self) -> str:
        return f"drop = '{self.name}'"

    def inverse(self) -> Drop:
        """Return the rule for the other way. Raises Irreversible where values are lost."""
        if not self.computed:
            hint = "computed = true says that they follow from the config"
            raise Irreversible(f"{self}: what is dropped is not there on the way back", hint=hint)
        return replace(self, on=OTHER[self.on])

    def table(self) -> dict[str, object]:
        """Return the rule as a rule file has it."""
        return {"drop": self.name, "on": self.on, **({"computed": True} if self.computed else {})}


@dataclass(frozen=True, slots=True)
class Tie:
    """Two names of one tensor, of which the other side has one.

    Attributes:
        name: the second name.
        of: the first.
        adds: it is added where it is missing; else it is taken away, and must have the same values.
        on: "from" concerns the names of the input, before the rules; "to" those of the output, after them.
        when: what a config must say for it to hold, as `said_by` has it; "" always.
    """

    name: str
    of: str
    adds: bool = True
    on: Side = "to"
    when: str = ""

    def __str__(self) -> str:
        return f"{'tie' if self.adds else 'untie'} = '{self.name}'"

    def inverse(self) -> Tie:
        """Return the rule for the other way."""
        return replace(self, adds=not self.adds, on=OTHER[self.on])

    def table(self) -> dict[str, object]:
        """Return the rule as a rule file has it."""
        verb = "tie" if self.adds else "untie"
        return {verb: self.name, "of": self.of, "on": self.on, **({"when": self.when} if self.when else {})}


def said_by(config: Mapping[str, Any], when: str) -> bool:
    """Return whether a config says something: that NAME is true, or `NAME = ONE|OTHER`; "" is always so."""
    name, has_texts, texts = when.partition(" = ")
    said = entry_of(config, name)
    return not when or (said in texts.split("|") if has_texts else said is True)


@dataclass(frozen=True, slots=True)
class ValueCount:
    """How many values a placeholder takes, from `first` on; None where nothing says it.

    With `gaps` it may take any: the layers of experts among others that no rule names.
    """

    number: Number | tuple[Number, ...] | None = None
    first: int = 0
    gaps: bool = False

    @property
    def entry(self) -> object:
        """The count as a rule file has it."""
        if self == ValueCount(self.number) and self.number is not None:
            return self.number
        entries = (("number", self.number), ("first", self.first), ("gaps", self.gaps))
        return {key: value for key, value in entries if value}


@dataclass(frozen=True)
class MapRules:
    """A map from one architecture to another.

    Attributes:
        rules: in any order.
        rest: what happens to tensors that no rule names: "keep", "drop" or "refuse".
        numbers: what steps need to know, by name: a number, an expression of the config's entries, or several
            of which the first counts whose entries the config has.
        counts: how many values placeholders take, by name.
        only: entries of the config, and what each must say for the map to be one for the model.
        name, start, end: what the map is called, and the two architectures.
        source: where the names and the layout were taken from.
    """

    rules: tuple[Rule | Drop | Tie, ...]
    rest: Rest = "refuse"
    numbers: Mapping[str, Number | tuple[Number, ...]] = field(default_factory=dict)
    counts: Mapping[str, ValueCount] = field(default_factory=dict)
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    name: str = ""
    start: str = ""
    end: str = ""
    source: str = ""

    def inverse(self) -> MapRules:
        """Return the rules for the way back. Raises Irreversible, which names the rule that has none."""
        if self.rest == "drop":
            raise Irreversible("rest = 'drop' can't be undone", hint="rest = 'keep' or 'refuse' can")
        rules = tuple(rule.inverse() for rule in reversed(self.rules))
        return replace(self, rules=rules, start=self.end, end=self.start)

    @property
    def reversible(self) -> bool:
        """Whether there is a way back."""
        try:
            self.inverse()
        except Irreversible:
            return False
        return True

    def for_model(self, path: str, config: Mapping[str, Any]) -> MapRules:
        """Return the rules that count for a model. Raises Refused where the map is one for others."""
        for entry, values in self.only.items():
            if (said := entry_of(config, entry)) not in values:
                what = "nothing says" if said is None else f"is of {said!r:.80} as"
                hint = "give it by --config FILE" if said is None else "ckpttool maps lists the others"
                takes = f"{what} {entry}, and the map is for {', '.join(values)}"
                raise Refused(path, takes, hint=hint)
        counting = (each for each in self.rules if isinstance(each, Drop) or said_by(config, each.when))
        return replace(self, rules=tuple(counting))

    def to_toml(self) -> str:
        """Return the rules as the text of a rule file, which `rule_file.rules_in` reads."""
        texts = {entry: getattr(self, name) for entry, name in TEXTS.items()}
        top = {entry: value for entry, value in texts.items() if value} | {"rest": self.rest}
        counts = {name: count.entry for name, count in self.counts.items()}
        tables = [("[only]", self.only), ("[numbers]", self.numbers), ("[counts]", counts)]
        tables += [("[[rule]]", rule.table()) for rule in self.rules]
        text = "\n".join(line for title, table in (("", top), *tables) for line in lines(title, table))
        return text.lstrip() + "\n"
