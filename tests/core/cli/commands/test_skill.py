"""skills/ckpttool/SKILL.md is what `ckpttool skill` prints; `make docs` writes it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckpttool.core.cli import SECTIONS, for_programs, group
from tests.support.running import ROOT

PAGE = ROOT / "skills" / for_programs.NAME / "SKILL.md"


def write() -> None:
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(for_programs.page(SECTIONS), encoding="utf-8")


def test_the_page_of_the_repository_is_what_the_command_prints(cli: Any) -> None:
    assert cli("skill").out == PAGE.read_text(encoding="utf-8"), "run `make docs` and commit it"
    said = cli("skill", "--json").json
    assert (said["name"], said["text"]) == ("ckpttool", PAGE.read_text(encoding="utf-8"))


def test_its_front_matter_is_what_assistants_ask_for() -> None:
    """A name in lower case as its folder's, and a description of at most 1024 characters."""
    yaml = pytest.importorskip("yaml", reason="reads front matter")
    head = yaml.safe_load(for_programs.page(SECTIONS).split("---\n")[1])
    assert {*head} == {"name", "description"}
    assert head["name"] == PAGE.parent.name and re.fullmatch(r"[a-z-]{1,64}", head["name"])
    assert 100 < len(head["description"]) <= 1024


LINES = {command.name: command.summary for commands in SECTIONS.values() for command in commands}


@pytest.mark.parametrize("name", group.commands)
def test_it_says_of_every_command_what_it_is_for_its_flags_and_an_example(name: str) -> None:
    part = for_programs.page(SECTIONS).partition(f"\n### {name}\n\n")[2].partition("\n### ")[0]
    assert part.startswith(f"{LINES[name]}.") and f"\nckpttool {name}" in part
    flags = {max(one.opts, key=len) for one in group.commands[name].params}
    assert all(f"`{flag}" in part for flag in flags & {"--force", "--state", "--like", "--model"})


if __name__ == "__main__":
    write()
