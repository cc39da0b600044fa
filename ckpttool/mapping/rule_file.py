"""A rule file: TOML, read and checked (`MapRules.to_toml` writes it).

from = "nanoGPT"
to = "Hugging Face GPT-2"
rest = "refuse"

[numbers]
heads = ["num_attention_heads", "n_heads"]

[counts]
i = "n_layer"
block = { number = 4, first = 1 }

[[rule]]
from = ["layers.{i}.wq.weight", "layers.{i}.wk.weight", "layers.{i}.wv.weight"]
to = "layers.{i}.qkv.weight"
steps = [{ concat = 0 }]

[[rule]]
drop = "rope.freqs"
computed = true

[[rule]]
tie = "lm_head.weight"
of = "model.embed_tokens.weight"
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from itertools import accumulate
from math import isfinite
from typing import Any

from ..core.remote.places import open_source_at
from ..errors import LONGEST, Damaged, UsageFault
from .rules import RESTS, TEXTS, Drop, MapRules, Rule, Tie, ValueCount, templates
from .verbs import VERBS, WRITTEN, Number, Verb, parsed
from .verbs import text as toml

MAX_BYTES = 16 << 20  # of a rule file: one with a rule for each of 100,000 tensors has that many

MAX_RULES = 100_000
MAX_STEPS = 64  # of a rule: each is a function that calls the one before
MAX_DEEP = 8  # brackets inside one another, and parts of a key with dots
MAX_ENTRIES = 2_000_000  # lists, tables, keys and commas
MAX_LIST = 1_000  # sizes, numbers and counts in one list or table
PATIENCE = 60.0  # seconds to read all rules, and as many to find their names

# A dotted key costs the square of its length, digits too, and nested brackets the interpreter's stack. Each
# of these patterns, and of the text before them, is followed once: none can fail after a long way.
LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{MAX_DEEP}}}")
LONG_NUMBER = re.compile(r"[0-9A-Fa-fxob_]{40}")
QUOTED = re.compile(r'"[^"\n]*"?|\'[^\'\n]*\'?|#[^\n]*')

FEWER = "placeholders say several names in one rule: ckpttool maps shows how"

ENTRIES = {*TEXTS, "rest", "only", "numbers", "counts", "rule"}
OF_RULES = {
    "from": {"from", "to", "steps", "optional", "when"},
    "drop": {"drop", "on", "computed"},
    "tie": {"tie", "of", "on", "when"},
    "untie": {"untie", "of", "on", "when"},
}

READ = {written: name for name, written in WRITTEN.items()}


def step_of(table: Mapping[str, Any]) -> Verb:
    """Return the step that a table of a rule file describes. Raises UsageFault."""
    found = [verb for verb in table if verb in VERBS]
    if len(found) != 1:
        hint = f"a step is a table with one of {', '.join(VERBS)}, such as {{concat = 0}}"
        close = [each for key in table for each in get_close_matches(key, VERBS, 1)]
        if close and not found:
            hint = f"did you mean {close[0]}? {hint}"
        raise UsageFault(f"the step {toml(table)[:200]} has {len(found)} verbs", hint=hint)
    kind = VERBS[found[0]]
    known = {each.name for each in fields(kind)}
    given: dict[str, Any] = {}
    for key, value in table.items():
        name = kind.own if key == kind.verb else READ.get(key, key)
        if name not in known or key in WRITTEN or (key != kind.verb and name == kind.own):
            raise UsageFault(f"the step '{kind.verb}' takes no '{key}'")
        given[name] = _of_kind(f"{kind.verb}: {key}", value, name)
    return kind(**given)


def _of_kind(where: str, value: Any, name: str) -> Any:
    """Return the value of a field, lists as tuples. Raises UsageFault for one of another kind."""
    if isinstance(value, list):
        value = tuple(_short(value, where))
    if not KINDS[name](value):
        raise UsageFault(f"{where} = {value!r} is of another kind than it takes")
    return value


def _short(value: list[Any], where: str) -> list[Any]:
    if len(value) > MAX_LIST:
        raise UsageFault(f"{where} lists {len(value):,}, and may list {MAX_LIST:,}")
    return value


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) is int or (isinstance(value, str) and bool(parsed(value)))


def _all(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(map(kind, value))


KINDS: dict[str, Callable[[object], bool]] = {
    "axis": _is_int,
    "axes": _all(_is_int),
    "parts": _all(lambda part: type(part) is int and part >= 0),
    "sizes": _all(_is_number),
    "shape": _all(_is_number),
    "before": _all(_is_number),
    "heads": _is_number,
    "size": _is_number,
    "by": lambda value: type(value) in (int, float) and isfinite(value),  # type: ignore[arg-type]
    "to": lambda value: isinstance(value, str),
    "field": lambda value: isinstance(value, str),
}


def read(path: str) -> MapRules:
    """Return the rules in a file. Raises Unreadable; UsageFault names what is wrong in it."""
    source = open_source_at(path)
    if source.size > MAX_BYTES:
        raise Damaged(path, f"is longer than {MAX_BYTES >> 20} MiB, and holds rules alone")
    try:
        return rules_in(source.read(0, source.size).decode())
    except UnicodeDecodeError:
        raise Damaged(path, "is no text in UTF-8") from None
    except UsageFault as fault:
        said = fault.message
        said = said if len(said) <= LONGEST else f"{said[: LONGEST // 2]} … {said[-LONGEST // 2 :]}"
        raise UsageFault(f"{path}: {said}", hint=fault.hint) from None


def rules_in(text: str) -> MapRules:
    """Return the rules that a text holds. Raises UsageFault, which names what is wrong, or the limit."""
    until = time.monotonic() + PATIENCE
    table = _toml(text)
    _require_known(table, ENTRIES, "a rule file")
    texts = {name: _text(table.get(entry, ""), entry) for entry, name in TEXTS.items()}
    rest = table.get("rest", "refuse")
    if rest not in RESTS:
        raise UsageFault(f"rest = {rest!r}", hint=f"rest is one of {', '.join(map(repr, RESTS))}")
    only = {name: _names(value, name) for name, value in _table(table, "only").items()}
    numbers = {name: _number(value, name) for name, value in _table(table, "numbers").items()}
    counts = {name: _count(value, name) for name, value in _table(table, "counts").items()}
    listed = table.get("rule", [])
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed) or not listed:
        raise UsageFault("it has no rules", hint="each begins with [[rule]]")
    if len(listed) > MAX_RULES:
        raise UsageFault(f"it has {len(listed):,} rules, and may have {MAX_RULES:,}", hint=FEWER)
    rules: list[Rule | Drop | Tie] = []
    for number, each in enumerate(listed):
        if time.monotonic() > until:
            what = f"{number:,} of its {len(listed):,} rules took {PATIENCE:.0f} s to be read"
            raise UsageFault(what, hint=FEWER)
        rules.append(_rule_at(number, each, text, len(listed)))
    return MapRules(tuple(rules), rest, numbers, counts, only, **texts)


HEAD = re.compile(r"[ \t]*\[\[[ \t]*rule[ \t]*\]\]")


def _rule_at(number: int, table: Mapping[str, Any], text: str, count: int) -> Rule | Drop | Tie:
    """Return a rule; UsageFault says which one is wrong, by the line that it begins in if that is certain."""
    try:
        return _rule(table)
    except UsageFault as fault:
        heads = [line for line, said in enumerate(text.split("\n"), 1) if HEAD.match(said)]
        where = f"line {heads[number]}" if len(heads) == count else f"rule {number + 1}"
        raise UsageFault(f"{where}: {fault.message}", hint=fault.hint) from None


def _toml(text: str) -> dict[str, Any]:
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    if what := _too_much(text):
        raise UsageFault(f"it is not TOML of a rule file: it has {what}")
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageFault(f"it is not TOML: {str(error)[:200]}") from None
    return table


def _too_much(text: str) -> str:
    """Return what a text has more of than a rule file, in time that grows with its length; "" if nothing."""
    # A word in the place of each text, as it may be a part of a key.
    bare = QUOTED.sub(
        lambda found: "" if found[0][0] == "#" else "q", text.replace("\\\\", "").replace('\\"', "")
    )
    if LONG_KEY.search(bare):
        return f"a key of more than {MAX_DEEP} parts"
    if LONG_NUMBER.search(bare):
        return "a number of more than 40 digits"
    if sum(map(bare.count, "[{,=")) > MAX_ENTRIES:
        return f"more than {MAX_ENTRIES:,} lists, tables, keys and commas"
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[][{}]", bare))
    return (
        f"more than {MAX_DEEP} brackets inside one another"
        if max(accumulate(steps), default=0) > MAX_DEEP
        else ""
    )


def _require_known(table: Mapping[str, Any], known: set[str], what: str) -> None:
    for key in table:
        if key not in known:
            raise UsageFault(f"{what} has no '{key}'", hint=f"it may have {', '.join(sorted(known))}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UsageFault(f"{where} = {value!r} is no text")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise UsageFault(f"{where} = {value!r}", hint=f"{where} = true or {where} = false")
    return value


def _table(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = table.get(name, {})
    if not isinstance(value, dict):
        raise UsageFault(f"{name} = {value!r} is no table")
    if len(value) > MAX_LIST:
        raise UsageFault(f"[{name}] has {len(value):,} entries, and may have {MAX_LIST:,}")
    return value


def _expression(value: object, where: str) -> Number:
    if isinstance(value, str):
        parsed(value)
        return value
    if type(value) is int:
        return value
    raise UsageFault(f"{where} = {value!r} is no number", hint="a whole number, or the config's name of one")


def _number(value: object, where: str) -> Number | tuple[Number, ...]:
    if isinstance(value, list):
        return tuple(_expression(each, where) for each in _short(value, where))
    return _expression(value, where)


def _count(value: object, where: str) -> ValueCount:
    if not isinstance(value, dict):
        return ValueCount(_number(value, where))
    _require_known(value, {"number", "first", "gaps"}, f"the count '{where}'")
    first = value.get("first", 0)
    if type(first) is not int:
        raise UsageFault(f"{where}: first = {first!r} is no number")
    number = _number(value["number"], where) if "number" in value else None
    return ValueCount(number, first, _flag(value.get("gaps", False), "gaps"))


def _rule(table: Mapping[str, Any]) -> Rule | Drop | Tie:
    kind = next((kind for kind in OF_RULES if kind in table), None)
    if kind is None:
        hint = "it has from and to, drop, tie, or untie"
        raise UsageFault(f"the rule {toml(table)[:200]} has no verb", hint=hint)
    _require_known(table, OF_RULES[kind], f"a rule with '{kind}'")
    if kind == "from":
        return _moving(table)
    name, on = _text(table[kind], kind), table.get("on", "to" if kind == "tie" else "from")
    templates([name])
    if on not in ("from", "to"):
        raise UsageFault(f"{kind} = '{name}': on = {on!r}", hint="on = 'from' or on = 'to'")
    if kind == "drop":
        return Drop(name, on, _flag(table.get("computed", False), "computed"))
    if "of" not in table:
        raise UsageFault(f"{kind} = '{name}' does not say of which tensor", hint="of = 'NAME'")
    return Tie(name, _text(table["of"], "of"), kind == "tie", on, _text(table.get("when", ""), "when"))


def _moving(table: Mapping[str, Any]) -> Rule:
    sources, targets = (_names(table.get(side, []), side) for side in ("from", "to"))
    steps = table.get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise UsageFault(f"steps = {steps!r}", hint="steps = [{concat = 0}]")
    optional = table.get("optional", False)
    if not isinstance(optional, bool | str):
        hint = "optional = true, 'all', or the name of a group of rules"
        raise UsageFault(f"optional = {optional!r}", hint=hint)
    if len(steps) > MAX_STEPS:
        raise UsageFault(f"a rule has {len(steps):,} steps, and may have {MAX_STEPS}")
    when = _text(table.get("when", ""), "when")
    return Rule(sources, targets, tuple(map(step_of, steps)), optional, when)


def _names(value: object, side: str) -> tuple[str, ...]:
    return (
        tuple(_text(each, side) for each in _short(value, side))
        if isinstance(value, list)
        else (_text(value, side),)
    )
