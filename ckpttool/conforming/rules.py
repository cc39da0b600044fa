"""What was found, as the rules of a map: one rule for all layers of a kind, with the steps of its way."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..mapping.rules import Drop, MapRules, Rule, Tie, literal
from ..mapping.verbs import Verb
from .modules import NUMBER, Module, Parts
from .search import SearchResult
from .ways import STACKED

Template = tuple[str | None, ...]  # the parts of a name, None for each number
Numbers = tuple[int, ...]
Buckets = Mapping[Template, set[Numbers]]  # the numbers in the names of each template
LETTERS = "ijklmnop"
PLACEHOLDER = re.compile(r"(?<!\{)\{([a-z])\}(?!\})")


@dataclass(frozen=True, slots=True)
class RuleCase:
    """One match of one kind of parameter: a rule for it alone."""

    sources: tuple[Parts, ...]  # names; those that are stacked have a MARK
    targets: tuple[Parts, ...]
    steps: tuple[Verb, ...]
    rests: str
    shapes: tuple[str, str]  # before and after, for the table


Numbered = tuple[RuleCase, list[Numbers]]  # with the numbers in each of its names


@dataclass(slots=True)
class RuleRow:
    """A rule with what is told of it."""

    rule: Rule
    rests: str
    count: int  # of layers
    shapes: tuple[str, str]
    levels: tuple[str, ...] = ()  # its placeholders, but for what is stacked
    numbers: Sequence[Numbers] = ()  # what they stand for, case by case

    @property
    def ranges(self) -> dict[str, str]:
        """What each placeholder stands for: `0..31`."""
        columns = zip(*self.numbers, strict=True)
        return {level: _range(column) for level, column in zip(self.levels, columns, strict=False)}

    def each(self) -> Iterator[RuleRow]:
        """Yield a row for each case, without placeholders but that of what is stacked."""
        for numbers in self.numbers:
            values = dict(zip(self.levels, map(str, numbers), strict=True))
            sides = (self.rule.sources, self.rule.targets)
            filled = [tuple(_filled(text, values) for text in side) for side in sides]
            yield RuleRow(Rule(filled[0], filled[1], self.rule.steps), self.rests, 1, self.shapes)


def rows(found: SearchResult, names: Iterable[str]) -> list[RuleRow]:
    """Return the rules of a certain result, and what each rests on.

    Args:
        found: the result of a search, in which each match has one way.
        names: all names of the input: a rule with placeholders must match none that it does not concern.
    """
    groups: dict[object, list[Numbered]] = defaultdict(list)
    for case in cases(found):
        split = [_split(name) for name in (*case.sources, *case.targets)]
        key = tuple(template for template, _ in split), len(case.sources), case.steps, case.rests, case.shapes
        groups[key].append((case, [numbers for _, numbers in split]))
    buckets: dict[Template, set[Numbers]] = defaultdict(set)
    for name in names:
        template, numbers = _split(tuple(name.split(".")))
        buckets[template].add(numbers)
    found_rows = [row for group in groups.values() for row in _rows(group, buckets)]
    return [*_gapless(found_rows)]


def _gapless(table: Sequence[RuleRow]) -> Iterator[RuleRow]:
    """Yield rules whose placeholders count from 0 without a gap, as a map wants; of others each case."""
    counted: dict[tuple[str, ...], set[Numbers]] = defaultdict(set)
    for row in table:
        for size in range(1, len(row.levels) + 1):
            counted[row.levels[:size]].update(numbers[:size] for numbers in row.numbers)
    broken = {levels for levels, found in counted.items() if not _counts_up(found)}
    for row in table:
        if any(row.levels[:size] in broken for size in range(1, len(row.levels) + 1)):
            yield from row.each()
        else:
            row.rule = replace(row.rule, optional=counted[row.levels] != {*row.numbers})
            yield row


def _filled(text: str, values: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def _counts_up(found: set[Numbers]) -> bool:
    groups: dict[Numbers, list[int]] = defaultdict(list)
    for numbers in sorted(found):
        groups[numbers[:-1]].append(numbers[-1])
    return all(values == [*range(len(values))] for values in groups.values())


def cases(found: SearchResult) -> Iterator[RuleCase]:
    """Yield every parameter of every match."""
    for _, match in found.matches:
        joint = match.joint
        (way,) = joint.ways
        for kind in joint.whole.first.shapes:
            pieces = [joint.pieces[place] for place in way.order]
            steps = joint.steps(way, kind)
            ends = tuple(_with_field(unit.members, kind) if joint.stacked else () for unit in pieces)
            for place in range(1 if joint.stacked else len(joint.whole.members)):
                parts = ends if joint.stacked else tuple(_name(u.members[place], kind) for u in pieces)
                whole = (_name(joint.whole.members[place], kind),)
                shapes = str([*pieces[0].first.shapes[kind]]), str([*joint.whole.first.shapes[kind]])
                if match.is_split or (joint.whole in match.left and joint.whole not in match.right):
                    undone = tuple(step.inverse() for step in reversed(steps))
                    yield RuleCase(whole, parts, undone, match.rests, shapes[::-1])
                else:
                    yield RuleCase(parts, whole, steps, match.rests, shapes)

    for left, right in found.resized:
        for kind, shape in left.shapes.items():
            shapes = str([*shape]), str([*right.shapes[kind]])
            yield RuleCase((_name(left, kind),), (_name(right, kind),), (), "role", shapes)


def _name(module: Module, kind: str) -> Parts:
    return tuple(module.names[kind].split("."))


# Stands for STACKED's placeholder; told by its identity, as a name may hold any text
MARK = "".join(("#", "stacked"))


def _with_field(members: Sequence[Module], kind: str) -> Parts:
    """Return the names of what is stacked as one, with the MARK where they count."""
    names = [_name(member, kind) for member in members]
    columns = [*zip(*names, strict=True)]
    places = [place for place, column in enumerate(columns) if len({*column}) > 1]
    if not places:  # one expert
        places = [place for place, part in enumerate(names[0]) if NUMBER.fullmatch(part)][-1:]
    return tuple(MARK if place in places else part for place, part in enumerate(names[0]))


def _split(parts: Parts) -> tuple[Template, Numbers]:
    is_number = [NUMBER.fullmatch(part) is not None for part in parts]
    template = tuple(None if is_n else part for part, is_n in zip(parts, is_number, strict=True))
    return template, tuple(int(part) for part, is_n in zip(parts, is_number, strict=True) if is_n)


def _rows(group: list[Numbered], buckets: Buckets) -> Iterator[RuleRow]:
    """Return one row for a group of cases, or one for each part in which numbers go together, or for each."""
    first = group[0][0]
    names = zip(*(numbers for _, numbers in group), strict=True)
    columns = [[*zip(*name, strict=True)] for name in names]
    leading = [column for column in columns[0] if len({*column}) > 1]
    fields = dict(zip(dict.fromkeys(leading), LETTERS, strict=False))
    unknown = [column for side in columns for column in side if len({*column}) > 1 and column not in fields]
    if len(group) > 1 and unknown:  # a number of one side follows from none of the other: cut by it
        parts: dict[int, list[Numbered]] = defaultdict(list)
        for number, each in zip(unknown[0], group, strict=True):
            parts[number].append(each)
        for part in parts.values():
            yield from _rows(part, buckets)
        return
    split = [_split(name) for name in (*first.sources, *first.targets)]
    texts = [_text(template, side, fields) for (template, _), side in zip(split, columns, strict=True)]
    count = len(first.sources)
    sources = zip(split[:count], columns[:count], strict=True)
    if len(group) > 1 and not all(_is_whole(*each, buckets) for each in sources):
        for each in group:
            yield from _rows([each], buckets)
        return
    rule = Rule(tuple(texts[:count]), tuple(texts[count:]), first.steps)
    numbers = [*zip(*fields, strict=True)]
    yield RuleRow(rule, first.rests, len(group), first.shapes, (*fields.values(),), numbers)


def _text(template: Template, columns: Sequence[Numbers], fields: Mapping[Numbers, str]) -> str:
    """Return a name with the placeholders of its numbers, those of one value as they are."""
    numbers = iter(columns)
    parts = []
    for part in template:
        if part is None:
            column = next(numbers)
            parts.append(f"{{{fields[column]}}}" if column in fields else str(column[0]))
        else:
            parts.append(f"{{{STACKED}}}" if part is MARK else literal(part))
    return ".".join(parts)


def _is_whole(split: tuple[Template, Numbers], columns: Sequence[Numbers], buckets: Buckets) -> bool:
    """Return whether a source with placeholders matches no name of the input but those of its cases."""
    template = split[0]
    if any(part is MARK for part in template):
        return True
    fixed = {place: column[0] for place, column in enumerate(columns) if len({*column}) == 1}
    fitting = {n for n in buckets[template] if all(n[place] == value for place, value in fixed.items())}
    return fitting == {*zip(*columns, strict=True)}


def _range(column: Sequence[int]) -> str:
    numbers = sorted({*column})
    if numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(map(str, numbers[:8])) + (",…" if numbers[8:] else "")


def as_rules(found: SearchResult, table: Sequence[RuleRow]) -> MapRules:
    """Return a map that takes the input's tensors to the reference's names."""
    drops = [Drop(literal(name), computed=True) for name in found.dropped]
    untied = [Tie(literal(name), of=literal(of), adds=False, on="from") for name, of in found.untied]
    ties = [Tie(literal(name), of=literal(of)) for name, of in found.ties]
    return MapRules((*untied, *drops, *(row.rule for row in table), *ties), rest="refuse")
