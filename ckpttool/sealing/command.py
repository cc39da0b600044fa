"""The command `ckpttool seal`."""

from __future__ import annotations

import time

from ..core.cli import options
from ..core.cli.console import Console, counted, show_bytes
from ..core.cli.reading import fields_of, note_piece
from ..core.cli.rewriting import WRITTEN, report_written
from ..core.cli.schemas import Fields, fields_like


def _printed() -> Fields:
    from .seal import SealedModel

    return {**fields_like(SealedModel), **WRITTEN}


@options.command("Check", "The SHA-256 of each tensor and file, for verify", _printed)
@options.argument("model", "MODEL")
@options.option(
    "--out FILE", "Write the seal to FILE instead.", type=options.PATH, callback=options.note_output
)
@options.dry_run_option
@options.flag("--force", "Replace a seal that is there.")
@options.reading
def seal(console: Console, model: str, out: str | None, dry_run: bool, force: bool) -> None:
    """Write the SHA-256 of each tensor and each file of MODEL to MODEL.seal.json.

    The seal of a folder covers all files in it, and is ckpttool.seal.json there. verify finds a seal by
    itself, and names what is not as it was sealed; verify --seal takes it from elsewhere, and for the same
    model in another format. It proves nothing against those who can replace it, too: docs/seal.md shows how
    to sign it.

    \b
    Example:
      ckpttool seal model.safetensors
    """
    from . import seal as sealing

    started = time.perf_counter()
    note_piece(console, model)
    with console.bar("hashing") as bar:
        sealed = sealing.seal(model, out, force=force, dry_run=dry_run, **bar.calls)
    seconds, size = time.perf_counter() - started, show_bytes(sealed.nbytes)
    done = f"sealed {counted(sealed.keys, 'tensor')} in {counted(len(sealed.files), 'file')}"
    report_written(console, done, sealed.path, size, seconds, fields_of(sealed), dry=dry_run)
