"""The commands for programs and coding assistants: `schema`, and `skill`, a page made from the help."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence

import click

from ...errors import UsageFault
from . import options
from .console import Console
from .schemas import Fields

Sections = Mapping[str, Sequence[options.Command]]  # by title

NAME = "ckpttool"
HEAD = f"""\
---
name: {NAME}
description: >-
  Look into, check, compare, convert, rename, shrink, merge, split and reload PyTorch checkpoints (.pt, .pth,
  .bin, .ckpt, .safetensors, shards, DCP, FSDP, DeepSpeed, GGUF) without torch and without running what a
  pickle names. Use it when a checkpoint does not load (missing or unexpected keys, `module.` or `_orig_mod.`
  prefixes, weights_only errors, size mismatches), or needs another format, dtype or names.
---

# {NAME}

Begin with `{NAME} inspect FILE`: it runs and loads nothing. If a checkpoint does not load into a model,
`{NAME} doctor FILE --model SPEC` prints the commands that fix it: run them in that order.

## What to rely on

- INPUT is never changed, unless OUTPUT is the same path, or by `slim --in-place`. An existing OUTPUT needs
  `--force`; `--dry-run` says what would be written. OUTPUT's format follows its name:
  `.safetensors`, `.pt`, `folder/`.
- Exit codes: 0 done, or same; 1 differs, a check failed, or nothing to do; 2 usage; 3 unreadable, damaged or
  refused.
- `--json` prints one JSON document on stdout and nothing else, also for an error:
  `{{"schema": 1, "error": {{"kind": …, "message": …, "hint": …}}}}`. `hint` is the next thing to do.
  `{NAME} schema COMMAND` prints the JSON Schema.
- What a format can't hold is named; what is ambiguous is refused, never guessed. Notes are on stderr.
- Only `--model SPEC` runs code: what it names. To look into a file from a stranger, never load it with torch.
- Wherever a file stands, a URL may: `hf://OWNER/REPO/PATH`, `https://…`, `s3://…`, `gs://…`, `az://…`.
- All commands have `--json`, `-q`, `-v` and `--help`.
"""
EVERYWHERE = {"--json", "--quiet", "--verbose", "--revision", "--offline"}


SCHEMA: Fields = {
    "$schema": (str, "the dialect of JSON Schema"),
    "title": (str, "the command"),
    "description": (str, "what it does"),
    **dict.fromkeys(("if", "then", "else", "$defs"), (object, "")),
}
SKILL: Fields = {"name": (str, "the skill's"), "text": (str, "the page, as Markdown with its front matter")}


@options.command("For programs", "The JSON Schema of a command's --json", SCHEMA)
@click.argument("name", metavar="COMMAND", required=False)
@options.reading
def schema(console: Console, name: str | None) -> None:
    """Print the JSON Schema (draft 2020-12) of what a command prints with --json, also where it fails.

    All of that JSON holds "schema": 1. The number goes up when a field gets another meaning or goes; new
    fields may come at any time.

    \b
    Example:
      ckpttool schema inspect
    """
    known = {str(each.name): each for commands in all_sections().values() for each in commands}
    if name is None or name not in known:
        what = "schema needs a COMMAND" if name is None else f"there is no command '{name}'"
        raise UsageFault(what, hint=f"it is one of {', '.join(sorted(known))}")
    document = known[name].schema()
    console.result(json.dumps(document, indent=2), document)


@options.command("For programs", "A page for coding assistants, made from the help", SKILL)
@options.reading
def skill(console: Console) -> None:
    """Print a page for coding assistants: what each command is for, its flags, and what to rely on.

    It is made from the help, in the form of a skill: save it as skills/ckpttool/SKILL.md where your assistant
    looks for skills.

    \b
    Example:
      ckpttool skill
    """
    text = page(all_sections())
    console.result(text.rstrip(), {"name": NAME, "text": text})


def all_sections() -> Sections:
    """Return the commands by section: those of the group that this one was called from."""
    found: Sections = click.get_current_context().find_root().command.sections  # type: ignore[attr-defined]
    return found


def page(sections: Sections) -> str:
    """Return the page for the commands of all sections."""
    return "\n".join([HEAD, *_commands(sections)])


def _commands(sections: Sections) -> Iterator[str]:
    for title, commands in sections.items():
        yield from (f"## {title}", "")
        for each in commands:
            yield from (f"### {each.name}", "", f"{each.summary}. {_flags(each)}".rstrip(), "")
            yield from ("```sh", *_examples(each), "```", "")


def _flags(command: click.Command) -> str:
    """Return the flags of a command with their values, but for those that all have."""
    shown = []
    for option in command.params:
        flag = max(option.opts, key=len)
        if isinstance(option, click.Option) and flag not in EVERYWHERE:
            values = option.type.choices if isinstance(option.type, click.Choice) else ()
            value = option.metavar or "|".join(map(str, values)) or ("" if option.is_flag else "X")
            shown.append(f"`{flag} {value}`".replace(" `", "`"))
    return f"Flags: {', '.join(shown)}." if shown else ""


def _examples(command: click.Command) -> list[str]:
    text = inspect.cleandoc(str(command.help)).partition("\b\nExample")[2]
    return re.findall(r"^  (ckpttool .+)$", text, re.MULTILINE)
