"""Templates of tensors' names: `layers.{i}.{part:weight|bias}` matches names, binds, and is filled in again.

A placeholder `{i}` stands for a number, `{part:weight|bias}` for one of these words, `{rest:*}` for any text.
A placeholder means the same in all templates of a rule, so it is described in one of them. Braces that
belong to a name are doubled, as in Python's format strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...errors import UsageFault

TOKEN = re.compile(r"(\{\{|\}\})|\{([A-Za-z_][A-Za-z0-9_]*)(?::([^{}]+))?\}|([{}])")
NUMBER, ANY = "0|[1-9][0-9]{0,17}", ".+"  # a number is written in one way only
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
        for _, name, kind, _ in TOKEN.findall(text):
            if kind and kinds.setdefault(name, kind) != kind:
                what = f"the placeholder '{name}' is described in two ways, '{kinds[name]}' and '{kind}'"
                raise UsageFault(f"'{text}': {what}", hint="describe it once")
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
    numbers = frozenset(field for field in fields if field not in kinds)
    words = {field: tuple(kinds[field].split("|")) for field in fields if kinds.get(field, "*") != "*"}
    name, pattern = (None, re.compile(expression, re.DOTALL)) if fields else (before, None)
    return NameTemplate(text, tuple(fields), numbers, words, name, pattern, tuple(parts))


def _values(kind: str | None) -> str:
    """Return the expression of what a placeholder stands for."""
    if kind is None:
        return NUMBER
    return ANY if kind == "*" else "|".join(map(re.escape, kind.split("|")))
