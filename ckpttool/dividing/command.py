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
    with exit code 1.

    \b
    Examples:
      ckpttool finish model.safetensors
    """
    from ..core.cli.program import run
    from ..core.files import parts
    from ..errors import UsageFault

    words = parts.plan_of(out).get(parts.WORDS)
    if not words:
        hint = f"run the command of the parts again with --part {parts.FINISH}"
        raise UsageFault(f"{out}: its plan does not say the command, as it holds a secret", hint=hint)
    shown = [flag for flag, is_on in (("--json", console.json), ("-q", console.quiet)) if is_on]
    return run([*words, "--part", parts.FINISH, *shown])
