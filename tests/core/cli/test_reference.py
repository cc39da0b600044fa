"""docs/cli.md: what `--help` says, on one page. `make docs` writes it; a test fails when it is stale.

Options that several commands have with the same help stand once, under "Shared options"; what all
commands have is not named again.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ckpttool.core.cli import SECTIONS, group
from tests.support.generated_page import generated, regenerate
from tests.support.running import ROOT

PAGE = ROOT / "docs" / "cli.md"
BEGIN, END = "<!-- commands -->\n", "<!-- /commands -->"
WIDTH = 80

# What scripts may rely on, whatever else comes.
READING = "--json --quiet -q --verbose -v"
WRITING = f"{READING} --state --dry-run --force"
CONTRACT = {
    "inspect": f"{READING} --html",
    "strip-prefix": f"{WRITING} --prefix --repeat --anywhere",
    "add-prefix": f"{WRITING} --prefix",
    "rename-keys": f"{WRITING} --map",
    "conform": f"{WRITING} --like --check-values --pad-vocab",
    "convert": f"{WRITING} --dtype --only --exclude --full --shard-size --to --map --inverse --config --fold",
    "maps": READING,
    "merge": f"{WRITING} --dtype --full --take-rank --shard-size --to --like --map --inverse --config --fold"
    " --adapter --alpha",
    "slim": f"{WRITING} --keep-anchors",
    "finish": READING,
    "disarm": f"{READING} --dry-run --force",
    "merge-lora": WRITING,
    "adapter": f"{READING} --state --dry-run --force --to --base --component --alpha",
    "split": f"{READING} --dry-run --force --ranks --as",
    "diff": f"{READING} --rtol --atol --as-stored --html --part --parts-in",
    "verify": f"{READING} --against --seal --part --parts-in",
    "scan": f"{READING} --sarif --allow --part --parts-in",
    "digest": f"{READING} --part --parts-in",
    "seal": f"{READING} --out --dry-run --force",
    "report": f"{WRITING} --no-values",
    "doctor": f"{READING} --model --optimizer --like",
    "reload": f"{READING} --model --input-shape",
    "explain": READING,
    "extract-lora": f"{READING} --dry-run --force --rank --adapter --alpha",
    "average": f"{READING} --dry-run --force --weights --method --base",
    "optimizer": f"{READING} --dry-run --force --to --model --optimizer --settings",
    "convert-batchnorm": f"{READING} --dry-run --force --to --model --counts",
    "prove": f"{READING} --from --to --program --no-replay --run-code --dry-run",
    "delta": f"{READING} --dry-run --force --as --encoding --checksum",
    "apply": f"{WRITING} --to --full --version",
    "gather-metrics": f"{READING} --samples --out",
    "schema": READING,
    "skill": READING,
}


def reference() -> str:
    """The generated part: a list of all commands, then the help of each."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from ("", "## All commands", "")
    for commands in SECTIONS.values():
        for command in commands:
            yield f"- [`{command.name}`](#{command.name}): {command.summary}"
    shared = shared_options()
    yield from ("", "## Shared options", "", "```text", _printed(shared), "```")
    for title, commands in SECTIONS.items():
        yield from ("", f"## {title}")
        for command in commands:
            yield from ("", f"### {command.name}", "", "```text", *_own_help(command, shared), "```")
    yield "\n"


Option = tuple[str, str]  # its flags, and what they do


def _options(command: click.Command) -> list[Option]:
    context = _context(command)
    options = (each for each in command.get_params(context) if isinstance(each, click.Option))
    return [record for option in options if (record := option.get_help_record(context))]


def shared_options() -> list[Option]:
    """Return the options that several commands have with the same help; those of all commands come last."""
    every = [option for command in group.commands.values() for option in _options(command)]
    return sorted({option for option in every if every.count(option) > 1}, key=lambda o: (every.count(o), o))


def universal() -> set[str]:
    """Return the options that all commands have, as `--help` names them."""
    return set.intersection(*({flags for flags, _ in _options(one)} for one in group.commands.values()))


def _printed(options: list[Option]) -> str:
    formatter = click.HelpFormatter(width=WIDTH)
    formatter.indent()
    formatter.write_dl(options)
    return formatter.getvalue().rstrip()


def _own_help(command: click.Command, shared: list[Option]) -> Iterator[str]:
    """Yield the help of a command, with only the names of the options that it shares."""
    options = _options(command)
    own = [option for option in options if option not in shared]
    others = [flags for flags, text in options if (flags, text) in shared and flags not in universal()]
    names = ", ".join(flags.split()[0].rstrip(",") for flags in others)
    yield help_of(command).partition("\nOptions:\n")[0].rstrip()
    yield from ("", "Options:") if own or names else ()
    if own:
        yield _printed(own)
    if names:
        yield textwrap.fill(f"Shared: {names}", WIDTH, initial_indent="  ", subsequent_indent="    ")


def _context(command: click.Command) -> click.Context:
    settings = {**group.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    parent = click.Context(group, info_name="ckpttool", **settings)
    return click.Context(command, info_name=command.name, parent=parent, **settings)


def help_of(command: click.Command) -> str:
    """What `--help` prints on a terminal of so many columns."""
    return "\n".join(line.rstrip() for line in command.get_help(_context(command)).splitlines())


def write(page: Path = PAGE) -> None:
    regenerate(page, BEGIN, END, reference())


@pytest.mark.lint
def test_the_reference_says_what_the_program_says() -> None:
    assert generated(PAGE, BEGIN, END) == reference(), "docs/cli.md is stale: run `make docs` and commit it"


@pytest.mark.lint
def test_the_page_is_written_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "cli.md").write_text(f"mine\n{BEGIN}stale words\n{END}\nmine too\n", encoding="utf-8")
    write(tmp_path / "cli.md")
    text = (tmp_path / "cli.md").read_text(encoding="utf-8")
    assert text.startswith(f"mine\n{BEGIN}") and text.endswith(f"{END}\nmine too\n")
    assert "stale words" not in text and "Usage: ckpttool inspect" in text


@pytest.mark.parametrize("name", group.commands)
def test_every_command_and_flag_is_documented(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    part = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    part += page.partition("## Shared options\n")[2].partition("\n## ")[0]
    assert f"Usage: ckpttool {name}" in part, f"{name} is not in docs/cli.md: run `make docs`"
    for parameter in group.commands[name].params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            shown = flag if isinstance(parameter, click.Option) else parameter.human_readable_name
            assert re.search(rf"(?<![\w-]){re.escape(shown)}(?![\w-])", part), (
                f"{name} {shown}: run `make docs`"
            )


@pytest.mark.parametrize("name", group.commands)
def test_the_page_of_tasks_has_every_command(name: str) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert re.search(rf"ckpttool {name} ", page), f"a task for {name} in docs/tasks.md"


@pytest.mark.parametrize("name", group.commands)
def test_the_flags_that_scripts_rely_on_are_there(name: str) -> None:
    parameters = group.commands[name].params
    flags = {flag for parameter in parameters for flag in parameter.opts}
    assert flags >= set(CONTRACT[name].split()) >= {"--json", "--quiet", "-q", "--verbose", "-v"}
    if "OUTPUT" in {parameter.human_readable_name for parameter in parameters}:
        assert flags >= {"--dry-run", "--force", "--state"}


if __name__ == "__main__":
    write()
