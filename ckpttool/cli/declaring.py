"""How a command is declared, in one place, and how a capability adds options to the command of another."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from typing import Any

import click

TWO_COLUMNS = 60  # of a terminal from which on options stand beside their meaning

# What a command prints as JSON, or a function that returns it: fields; or a list where it prints one or
# another, in which a list is an array
Printed = Any


class Help(click.HelpFormatter):
    """Help that keeps to a narrow terminal, where click's own writes 50 columns."""

    def __init__(self, width: int | None = None, max_width: int | None = None) -> None:
        if width is None:
            width = max(min(shutil.get_terminal_size().columns, max_width or 80) - 2, 30)
        super().__init__(width=width)

    def write_dl(self, rows: Iterable[tuple[str, str]], *given: Any, **options: Any) -> None:
        """Write names and what they mean in two columns, or one below the other."""
        if self.width >= TWO_COLUMNS:
            return super().write_dl(rows, *given, **options)
        for name, meaning in rows:
            self.write(f"{'':{self.current_indent}}{name.rstrip()}\n")
            with self.indentation(), self.indentation():
                self.write_text(meaning)
        return None


class Context(click.Context):
    """What a command is called with."""

    formatter_class = Help


class Addition(click.Command):
    """Options that a capability adds to the command of another: `ckpttool convert --map`.

    The callback gets what the command hands to `added`, and the values of these options.
    """

    def __init__(self, name: str, *, behind: str, prints: Printed = dict, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.behind, self.prints = behind, prints


class Command(click.Command):
    """A command, with all that the tool says of it.

    Attributes:
        section: the heading of `ckpttool --help` that it stands under.
        summary: its line there.
        several: it takes several FILEs, and prints `files` then.
        additions: what other capabilities add to it.
    """

    context_class = Context

    def __init__(
        self,
        name: str,
        *,
        section: str,
        summary: str,
        prints: Printed,
        several: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(name, **settings)
        self.section, self.summary, self.several = section, summary, several
        self.additions: list[Addition] = []
        self._prints = prints

    def add(self, *additions: Addition) -> None:
        """Take in the options of other capabilities, each behind the one that it names."""
        self.additions += additions
        for each in reversed(additions):
            place = [param.name for param in self.params].index(each.behind) + 1
            self.params[place:place] = each.params

    def printed(self) -> list[Any]:
        """Return the fields, or the array, that it prints where there is no error: one of several."""
        printed = _made(self._prints)
        first, *others = printed if isinstance(printed, list) else [printed]
        for each in self.additions:
            more = {f"{name}?": meaning for name, meaning in _made(each.prints).items() if name not in first}
            first = {**first, **more}
        return [first, *others]

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of what it prints with --json, also where it fails."""
        from .schemas import document

        title = f"ckpttool {self.name} --json"
        return document(title, self.summary, self.printed(), several=self.several)


def _made(prints: Printed) -> Any:
    return prints() if callable(prints) else prints


def command(
    section: str, summary: str, prints: Printed, *, several: bool = False
) -> Callable[[Callable[..., Any]], Command]:
    """Declare a command by what `Command` holds, and what it prints; its name is that of the function."""
    return click.command(cls=Command, section=section, summary=summary, prints=prints, several=several)


def adds_to(name: str, *, behind: str, prints: Printed = dict) -> Callable[[Callable[..., Any]], Addition]:
    """Declare an addition to a command: options that stand behind one of its own, and a function below.

    Args:
        prints: the fields that it adds to the command's JSON; each may be missing.
    """
    return click.command(name, cls=Addition, behind=behind, prints=prints)


def added(given: dict[str, Any], *shared: Any) -> list[Any]:
    """Call the additions to the running command, and return what is not None of their answers.

    Each gets what is shared, and its own options, which are taken out of `given`.
    """
    command = click.get_current_context().command
    found = []
    for each in command.additions if isinstance(command, Command) else ():
        assert each.callback is not None
        answer = each.callback(*shared, **{param.name: given.pop(param.name) for param in each.params})
        found += [] if answer is None else [answer]
    return found
