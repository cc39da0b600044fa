"""What the commands have in common that read a file, rename its keys, and write another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .console import Console, printable, show_bytes, show_names
from .options import console as console_of

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..formats import Saved
    from ..keys import Renaming

Transform = Callable[["Checkpoint"], tuple["Checkpoint", "Renaming"]]


def rewrite(options: dict[str, Any], done: str, transform: Transform) -> None:
    """Reads, renames, writes and reports.

    Args:
        options: those of `options.writing`.
        done: what was done, before "from 3 of 4 keys": `stripped 'module.' from`.
        transform: the renaming.
    """
    from .. import formats

    started = time.perf_counter()
    console = console_of(options)
    with formats.open(options["input"]) as checkpoint:
        where = checkpoint.state(options["state"]).where
        renamed, renaming = transform(checkpoint)
        _say_where(console, checkpoint, where, options["state"])
        if options["dry_run"]:
            saved = formats.plan(renamed, options["output"], state=where, force=options["force"])
        else:
            with console.progress(checkpoint.nbytes, "writing") as progress:
                saved = formats.save(
                    renamed, options["output"], state=where, force=options["force"], progress=progress
                )
    seconds = time.perf_counter() - started
    _report(console, done, renaming, saved, seconds, dry=options["dry_run"])


def _say_where(console: Console, checkpoint: Checkpoint, where: str, asked: str | None) -> None:
    others = [".".join(path) for path in checkpoint.states() if ".".join(path) != where]
    if asked is None and others:
        taken = f"'{printable(where)}'" if where else "the file itself"
        console.note(f"state: {taken}; there are also --state {show_names(others)}")


def _report(
    console: Console, done: str, renaming: Renaming, saved: Saved, seconds: float, *, dry: bool
) -> None:
    of = len(renaming.names)
    size = f"{show_bytes(saved.nbytes)}, {seconds:.2f} s"
    verb = f"would have {done}" if dry else done
    line = f"{verb} {renaming.renamed} of {of} keys -> {printable(saved.path)} ({size})"
    if renaming.renamed < of:
        untouched = [old for old, new in renaming.names.items() if old == new]
        console.note(f"kept as they were: {_names(console, untouched)}")
    if saved.left_out:
        console.note(f"left out, as {saved.format} holds tensors alone: {_names(console, saved.left_out)}")
    if saved.copied:
        console.note(f"written once for each name that shares memory: {_names(console, saved.copied)}")
    data = {
        "output": saved.path,
        "keys": of,
        "renamed": renaming.renamed,
        "left_out": saved.left_out,
        "bytes": saved.nbytes,
        "seconds": round(seconds, 4),
    }
    console.result(line, data | ({"dry_run": True} if dry else {}))


def _names(console: Console, names: list[str] | tuple[str, ...]) -> str:
    return show_names(names, len(names) if console.verbose else 4)
