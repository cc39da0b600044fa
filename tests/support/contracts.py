"""The JSON that programs print, held to its schema by the fixtures through which tests call them.

A schema allows fields that it does not name, as new ones may come. Here it does not: each has to be in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import jsonschema_rs

from ckpttool.core.cli import SECTIONS
from ckpttool.core.cli.schemas import Fields, document
from ckpttool.metrics import command

SCORE = ("correct", "samples", "accuracy", "loss", "per_class", "ranks", "threads", "batch_size")


def closed(part: Any) -> Any:
    """Return a schema that allows no field which it does not name."""
    if isinstance(part, list):
        return [*map(closed, part)]
    if not isinstance(part, dict):
        return part
    more = {"additionalProperties": False} if part.get("type") == "object" and "properties" in part else {}
    return {name: closed(value) for name, value in part.items()} | more


@cache
def of_command(name: str) -> jsonschema_rs.Draft202012Validator:
    """Return what tells whether JSON is what a command prints; of an unknown one, an error."""
    known = {command.name: command for commands in SECTIONS.values() for command in commands}
    made = known[name].schema() if name in known else document("", "", [{}], several=False)
    return jsonschema_rs.Draft202012Validator(closed(made))


@cache
def of_trainer() -> jsonschema_rs.Draft202012Validator:
    """Return the same for what train/evaluate.py and train/main.py --preview print."""
    checkpoint: Fields = {"checkpoint": (str, "as it was named"), "state": (str, "its dotted path")}
    score = {name: said for name, said in command.CERTIFICATE.items() if name in SCORE}
    common = {name: score[name] for name in ("loss", "samples", "ranks", "threads", "batch_size")}
    of_task: Fields = {"count": (float, "what the loss is a mean over"), "metrics": (dict[str, Any], "")}
    share: Fields = {"epoch": (int, ""), "rank": (int, ""), "steps": (list[list[int]], "indices of samples")}
    more: Fields = {"tests": (dict[str, Any], "the scores of --also-test, by name")}
    of_one = [{**checkpoint, **score}, {**checkpoint, **common, **of_task}]
    printed = [*of_one, *({**fields, **more} for fields in of_one), [share]]
    return jsonschema_rs.Draft202012Validator(closed(document("", "", printed, several=False)))


def require(words: Sequence[str], *printed: str) -> None:
    """Raise AssertionError unless what a command printed with --json is as its schema says, and no more."""
    said = next((text for text in printed if text.startswith(("{", "["))), None)
    if said is not None and "--json" in words and "--sarif" not in words:  # SARIF has a schema of its own
        _compare(of_command(words[0]), said)


def requiring(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return what prints a text as the programs of the trainer do, if JSON is as it should be."""

    def checked(text: str) -> None:
        if text.startswith(("{", "[")):
            _compare(of_trainer(), text)
        say(text)

    return checked


def _compare(validator: jsonschema_rs.Draft202012Validator, text: str) -> None:
    found = json.loads(text)
    if not validator.is_valid(found):
        faults = [
            f"{[*one.instance_path]}: {one.message[-300:]}" for one in _faults(validator.iter_errors(found))
        ]
        raise AssertionError("not what its schema says:\n" + "\n".join(faults[:10]))


def _faults(errors: Iterable[jsonschema_rs.ValidationError]) -> Iterator[jsonschema_rs.ValidationError]:
    """Yield errors; in the place of one that says that no alternative fits, those of each alternative."""
    for error in errors:
        inner = [each for way in getattr(error.kind, "context", ()) for each in way]
        yield from _faults(inner) if inner else [error]
