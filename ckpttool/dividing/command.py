"""The command `ckpttool finish`."""

from __future__ import annotations

import click

from ..core.cli import options
from ..core.cli.console import Console
from ..core.cli.rewriting import rewritten


@options.command("Convert", "Put the parts of an output in place", rewritten)
@click.argument("out", metavar="OUT", type=options.PATH)
@options.reading
def finish(console: Console, out: str) -> int:
    """Put an output in place whose parts are all written, where the last part could not.

    The command of the parts is run again, but writes none of them: it compares the checksums of the inputs
    with what all parts have read, writes the headers, and reads them back. A part that is missing is named,
    with exit code 1. A command with --model, which runs code, has to be given again, with --part finish.

    \b
    Examples:
      ckpttool finish model.safetensors
    """
    from ..core.cli.program import run
    from ..core.files import parts
    from ..errors import UsageFault

    words = parts.plan_of(out).get(parts.WORDS)
    if not words or any(str(word).startswith("--model") for word in words):  # code that only the user names
        what = f"{out}: its plan does not say the command, as of one with a secret or with --model"
        raise UsageFault(what, hint=f"run the command of the parts again with --part {parts.FINISH}")
    shown = [flag for flag, is_on in (("--json", console.json), ("-q", console.quiet)) if is_on]
    return run([*map(str, words), "--part", parts.FINISH, *shown])
