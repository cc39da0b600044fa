"""The man pages, made from the commands' help."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import click

from ckpttool import __version__
from ckpttool.core.cli import SECTIONS, group

NAME = "ckpttool"


def pages() -> dict[str, str]:
    """Return each page by the name of its file: `ckpttool-inspect.1`."""
    parent = click.Context(group, info_name=NAME, **group.context_settings)
    made = {f"{NAME}.1": _page(NAME, "a workbench for PyTorch checkpoints", [*_of_tool(parent)])}
    for commands in SECTIONS.values():
        for command in commands:
            name = f"{NAME}-{command.name}"
            made[f"{name}.1"] = _page(name, command.summary, [*_of_command(command, parent)])
    return made


def _page(name: str, line: str, body: list[str]) -> str:
    title = f'.TH {name.upper()} 1 "" "{NAME} {__version__}" "{NAME}"'
    return "\n".join([title, ".SH NAME", rf"{_text(name)} \- {_text(line)}", *body, ""])


def _of_tool(context: click.Context) -> Iterator[str]:
    yield from (".SH SYNOPSIS", rf"\fB{NAME}\fP \fICOMMAND\fP [\fIOPTIONS\fP]")
    yield from (".SH DESCRIPTION", *_paragraphs(str(group.help)))
    for title, commands in SECTIONS.items():
        yield f'.SS "{title}"'
        for command in commands:
            yield from (".TP", rf"\fB{_text(f'{NAME}-{command.name}')}\fP(1)", _text(command.summary))
    yield from (".SH OPTIONS", *_options(group, context))
    yield from (".SH EXIT STATUS", *_paragraphs(str(group.epilog)))


def _of_command(command: click.Command, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    about, _, examples = inspect.cleandoc(str(command.help)).partition("\b\nExample")
    yield from (".SH SYNOPSIS", rf"\fB{_text(context.command_path)}\fP {_text(usage)}")
    yield from (".SH DESCRIPTION", *_paragraphs(about))
    yield from (".SH OPTIONS", *_options(command, context))
    yield from (".SH EXAMPLES", *_paragraphs(f"\b\n{examples.partition(chr(10))[2]}"))
    yield from (".SH SEE ALSO", rf"\fB{NAME}\fP(1)")


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for option in command.get_params(context):
        if isinstance(option, click.Option) and (record := option.get_help_record(context)):
            yield from (".TP", rf"\fB{_text(record[0])}\fP", _text(record[1]))


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of click's help; a paragraph that begins with `\\b` keeps its lines."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = [*map(_text, paragraph.strip("\n").split("\n"))]
        yield from (".PP", *([".nf", *lines[1:], ".fi"] if paragraph.startswith("\b") else lines))


def _text(text: str) -> str:
    """Return a line that roff prints as it is."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text.startswith((".", "'")) else text


def by_place() -> Mapping[str, str]:
    """Return each page by its place below the prefix of an installation."""
    return {f"share/man/man1/{name}": text for name, text in pages().items()}
