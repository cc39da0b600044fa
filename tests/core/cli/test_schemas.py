"""The JSON Schema of each command: sound, described, and as strict as a script needs. That all JSON is as its
schema says is held by the fixtures through which tests call commands."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch

from ckpttool.core.cli import SECTIONS, schemas
from ckpttool.core.cli.console import to_json
from ckpttool.core.words import SCHEMA, versioned
from tests.support import contracts

COMMANDS = {command.name: command for commands in SECTIONS.values() for command in commands}

every_command = pytest.mark.parametrize("name", COMMANDS)


@every_command
def test_a_schema_is_one_of_the_draft_that_it_names(name: str, cli: Any) -> None:
    printed = cli("schema", name)
    assert printed.code == 0
    made = json.loads(printed.out)
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert made["title"] == f"ckpttool {name} --json"
    jsonschema_rs.meta.validate(made)
    assert cli("schema", name, "--json").json == versioned(made)


def properties(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, dict):
        yield from part.get("properties", {}).items()
        for value in part.values():
            yield from properties(value)
    elif isinstance(part, list):
        for value in part:
            yield from properties(value)


@every_command
def test_every_field_of_a_command_says_what_it_means(name: str) -> None:
    for fields in COMMANDS[name].printed():
        for field, (_, said) in (fields[0] if isinstance(fields, list) else fields).items():
            assert name == "schema" or said, field


def test_a_command_that_is_not_there_is_a_usage_error(cli: Any) -> None:
    ran = cli("schema", "inspekt", "--json")
    assert (ran.code, ran.json["error"]["kind"]) == (2, "usage")
    assert "there is no command 'inspekt'" in ran.json["error"]["message"]


def test_without_a_command_schema_names_those_there_are(cli: Any) -> None:
    ran = cli("schema")
    assert ran.code == 2 and "schema needs a COMMAND" in ran.err and "convert-batchnorm, " in ran.err


# ---- what a schema lets through -------------------------------------------------------------------------


@pytest.fixture
def printed(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, "a.pt")
    return cli("inspect", "a.pt", "--json").json


WRONG: dict[str, Callable[[Any], object]] = {
    "no version": lambda said: said.pop("schema"),
    "another version": lambda said: said.update(schema=SCHEMA + 1),
    "a field is missing": lambda said: said.pop("tensors"),
    "a field of a tensor is missing": lambda said: said["tensors"][0].pop("dtype"),
    "text for a number": lambda said: said.update(bytes="12"),
    "a number for text": lambda said: said["tensors"][0].update(name=1),
    "an error beside the result": lambda said: said.update(error={"kind": "damaged"}),
    "one object for a list": lambda said: said.update(tensors=said["tensors"][0]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_script_could_not_rely_on_is_no_output_of_the_command(wrong: str, printed: Any) -> None:
    validator = jsonschema_rs.Draft202012Validator(COMMANDS["inspect"].schema())
    assert validator.is_valid(printed)
    WRONG[wrong](changed := copy.deepcopy(printed))
    assert not validator.is_valid(changed)


def test_new_fields_may_come_but_the_tests_let_none_pass(printed: Any) -> None:
    printed["tensors"][0]["new"] = 1
    assert jsonschema_rs.Draft202012Validator(COMMANDS["inspect"].schema()).is_valid(printed)
    with pytest.raises(AssertionError, match="new"):
        contracts.require(["inspect", "a.pt", "--json"], json.dumps(printed))


def test_of_several_files_each_is_answered_as_if_it_were_alone(printed: Any, cli: Any) -> None:
    ran = cli("inspect", "a.pt", "missing.pt", "--json")
    assert ran.json["files"][0] == printed
    assert {*ran.json["files"][1]} == {"schema", "path", "error"}


# ---- types and docstrings -------------------------------------------------------------------------------


class Point:
    """A place.

    Attributes:
        x, y: where it is; None
            where that is unknown.
        name: as people call it.

    More.
    """


def test_the_meaning_of_a_field_is_what_the_docstring_says() -> None:
    where = "where it is; null where that is unknown"
    assert schemas.meanings(Point) == {"x": where, "y": where, "name": "as people call it"}


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (str, ["", "x"], [1, None]),
        (int, [0, -1], [1.5, "1", True]),
        (bool, [True], [1, "true"]),
        (float, [1, 0.5, "nan", "inf", "-inf"], ["1", "NaN", None]),
        (float | None, [None, 0.5], ["x"]),
        (str | None, ["x", None], [1]),
        (tuple[int, ...], [[], [1, 2]], [["x"], 1]),
        (tuple[str, int], [["x", 1]], [["x"], [1, "x"], ["x", 1, 2]]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "x"}, []]),
        ({"a": (int, ""), "b?": (str, "")}, [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"a": 1, "b": 2}]),
        ([{"a": (int, "")}], [[], [{"a": 1}]], [[{}], {"a": 1}]),
    ],
)
def test_a_type_is_the_json_that_is_made_of_its_values(kind: Any, right: list[Any], wrong: list[Any]) -> None:
    made = {**schemas.schema_of(kind), "$defs": {"number": schemas.NUMBER}}
    validator = jsonschema_rs.Draft202012Validator(made)
    assert all(map(validator.is_valid, right)) and not any(map(validator.is_valid, wrong))


def test_a_type_of_which_no_json_is_known_is_no_field() -> None:
    with pytest.raises(TypeError, match="no JSON is known"):
        schemas.schema_of(complex)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 0.1])
def test_a_number_is_valid_however_it_is_printed(value: float) -> None:
    number = json.loads(to_json({"x": value}))["x"]
    assert jsonschema_rs.Draft202012Validator(schemas.NUMBER).is_valid(number)
