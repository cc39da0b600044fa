"""What an error message means: the rules of errors.toml, applied to a text of any length, offline.

Whitespace is left out on both sides, as a terminal, a log or a mail wraps lines anywhere; so are colours,
frames, and what stands before each line (ranks, times, marks of quotation). Time grows with the length of the
text: a rule begins at words that are searched for as they are, and looks a bounded distance from there.
"""

from __future__ import annotations

import codecs
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from itertools import chain
from typing import Any

from ..core.words import in_short
from ..errors import masked

OVERLAP = 1 << 15  # characters of a block that are looked at again with the next one
BEHIND, AHEAD = 8_000, 2_000  # characters before and after a message that belong to it
MOST = 100  # places of one message in a block that are looked at

ANSI = re.compile(r"\x1b(?:\[[0-9;?]{0,30}[ -/]{0,3}[@-~]|\][^\x07\x1b]{0,300}(?:\x07|\x1b\\)|[@-Z\\-_])")
# What a launcher, a logger, pytest, a mail or a terminal writes before each line
LEADING = re.compile(
    r"""^(?: [ \t>$|] | \[(?![\d,\s]*\])[^\]\n"']{1,60}\]:? | \d{4}-\d\d-\d\d[T\ _][\d:.,]{5,18}Z?
    | \d\d:\d\d:\d\d[.,\d]{0,9} | [IWEF]\d{4}\ [\d:.]{8,20} | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b:?
    | E(?=\ {3}) | \((?=\w{1,60}\ (?:pid|rank)=)[^)\n]{1,60}\) )+""",
    re.MULTILINE | re.VERBOSE,
)
DRAWN = str.maketrans(
    {**dict.fromkeys("│┃║❱╭╮╰╯─\ufeff\u200b"), "\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"'}
)
ESCAPED = re.compile(r"""\\(?:[nrt]|(?=["']))""")

ENDINGS = r"\.(?:pt|pth|ckpt|bin|pkl|safetensors|pth\.tar)"
NAMED = re.compile(
    rf"""["]([^"\n{{}}]{{1,300}}{ENDINGS})["]|'([^'\n{{}}]{{1,300}}{ENDINGS})'"""
    rf"""|(?<![\w./\\:~+@"'-])((?:[A-Za-z]:)?[\w./\\~+-]{{1,300}}{ENDINGS})(?![\w/\\"'])"""
)


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """A rule of errors.toml, where its fields are explained."""

    kind: str
    says: tuple[str, ...]
    means: str
    before: tuple[str, ...] = ()
    then: str = ""
    found: str = ""
    commands: tuple[str, ...] = ()
    page: str = "errors.md"
    threads: int = 0


@dataclass(frozen=True)
class Explanation:
    """What an error means.

    Attributes:
        kind: a stable word for scripts; `unknown` where no rule knows it.
        message: what it means.
        commands: those that show or mend the cause, ready to paste once SPEC and the like are replaced.
        page: the page of the documentation that has more.
    """

    kind: str
    message: str
    commands: tuple[str, ...] = ()
    page: str | None = None


@cache
def rules() -> tuple[ErrorRule, ...]:
    """Return the rules, causes before what follows from them."""
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    text = files(__package__).joinpath("errors.toml").read_text(encoding="utf-8")
    return tuple(
        ErrorRule(**{k: _fixed(v) for k, v in rule.items()}) for rule in tomllib.loads(text)["error"]
    )


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def explain(*texts: Iterable[bytes]) -> list[Explanation]:
    """Return what the known errors in texts mean, the cause first; none if no rule knows one.

    Args:
        texts: each in blocks of bytes of any size: UTF-8, or UTF-16 with a mark.
    """
    found: dict[int, Explanation] = {}
    for text in chain.from_iterable(map(_pieces, texts)):
        for form in _forms(text):
            squeezed = _squeezed(form)
            for number, rule in enumerate(rules()):
                if number not in found and (at := _match(rule, squeezed)):
                    found[number] = _explained(rule, *at, form)
    by_kind: dict[str, Explanation] = {}
    for _, each in sorted(found.items()):
        by_kind.setdefault(each.kind, each)
    return [*by_kind.values()]


def _pieces(blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield the blocks as text, each behind the end of the one before: a message may be cut in two."""
    text, decoder = "", None
    for block in blocks:
        if decoder is None:
            marked = block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            decoder = codecs.getincrementaldecoder("utf-16" if marked else "utf-8")("replace")
        text = text[-OVERLAP:] + decoder.decode(block)
        yield text


def _forms(text: str) -> Iterator[str]:
    """Yield a text as people read it, and one with the escapes of a JSON log read as what they mean."""
    text = ANSI.sub("", text) if "\x1b" in text else text
    text = LEADING.sub("", text.translate(DRAWN))
    yield text
    if "\\" in text:
        yield ESCAPED.sub(lambda escape: " " * (len(escape[0]) > 1), text)


def _squeezed(text: str) -> str:
    return "".join(text.split())


@cache
def _words(text: str) -> str:
    return _squeezed(text)


@cache
def _pattern(then: str) -> re.Pattern[str]:
    return re.compile(then, re.VERBOSE)


def _match(rule: ErrorRule, text: str) -> tuple[int, dict[str, str]] | None:
    """Return where a rule's message begins in a text without whitespace, and the names in it."""
    for says in map(_words, rule.says):
        at = text.find(says)
        for _ in range(MOST):
            if at < 0:
                break
            nearby = text[max(at - BEHIND, 0) : at] if rule.before else ""
            if not rule.before or any(_words(word) in nearby for word in rule.before):
                end = at + len(says)
                if then := _pattern(rule.then).match(text[end : end + AHEAD]):
                    return at, {name: value for name, value in then.groupdict().items() if value}
            at = text.find(says, at + 1)
    return None


def _explained(rule: ErrorRule, at: int, names: Mapping[str, str], text: str) -> Explanation:
    said, place = rule.means, _place(text, at)
    if rule.found and all(
        f"{{{name}}}" not in rule.found or name in names for name in _pattern(rule.then).groupindex
    ):
        said += " " + rule.found.format(**{name: in_short(value) for name, value in names.items()})
    nearby = text[max(place - BEHIND, 0) : place + AHEAD]
    mentioned = {name for each in NAMED.findall(nearby) for name in each if name}
    commands = tuple(masked(_filled(command, mentioned, names)) for command in rule.commands)
    return Explanation(rule.kind, masked(said), commands, f"docs/{rule.page}")


def _place(text: str, count: int) -> int:
    """Return where the character stands before which so many are no whitespace."""
    for word in re.finditer(r"\S+", text):
        if count < len(word[0]):
            return word.start() + count
        count -= len(word[0])
    return len(text)


def _filled(command: str, mentioned: set[str], names: Mapping[str, str]) -> str:
    """Return a command with the file of the text in it, if it names one alone and not several."""
    places = {"FOLDER": names["folder"]} if "folder" in names else {}
    file = mentioned.pop() if len(mentioned) == 1 else ""
    if file and file.isprintable():
        stem, _, ending = re.split(r"[\\/]", file)[-1].rpartition(".")
        places["FILE"], places["NEW.safetensors"] = file, f"{stem}.mended.safetensors"
        places["NEW"] = f"{stem}.mended.{'safetensors' if ending == 'safetensors' else 'pt'}"
    paths = {word: f"./{path}" if path.startswith("-") else path for word, path in places.items()}
    return " ".join(shlex.quote(paths[word]) if word in paths else word for word in command.split())
