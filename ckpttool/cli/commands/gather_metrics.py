"""The command `ckpttool gather-metrics`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from .. import options
from ..console import Console, counted, printable, to_json

if TYPE_CHECKING:
    from ...metrics.certificate import Certificate


@click.command("gather-metrics")
@options.files_argument
@options.option("--samples N", "How many samples there must be.", type=click.IntRange(min=0))
@options.option("--out FILE", "Also write the certificate to FILE, as JSON.", type=click.Path())
@options.flag("--force", "Replace the file of --out if it exists.")
@options.reading
def command(
    console: Console, files: tuple[str, ...], samples: int | None, out: str | None, force: bool
) -> None:
    """Recompute an evaluation's metrics from the prediction files of its ranks, one each, in any order.

    Every sample must appear in them exactly once. If a rank's file is missing, a sample appears twice or in
    no file, or a file is of another evaluation, the exit code is 1, and samples and files are named. A file
    holds index, prediction and label as int64 and loss as float64; train/evaluate.py --out writes them.

    \b
    Example:
      ckpttool gather-metrics eval/rank*.safetensors
    """
    from ...files.commit import replacing
    from ...metrics.certificate import recompute
    from ...metrics.predictions import read

    if out is not None and os.path.lexists(out):
        _require_replaceable(out, force)
    certificate = recompute([read(path) for path in files], samples)
    if out is not None:
        with replacing(out) as file:
            file.write(f"{to_json(certificate.statement())}\n".encode())
    console.result(_in_words(certificate, out), certificate.statement())


def _require_replaceable(out: str, force: bool) -> None:
    """Refuse an existing file at --out, and with --force too if it holds predictions."""
    from ...errors import CkptToolError, OutputExists
    from ...metrics.predictions import read

    try:
        read(out)
    except CkptToolError:
        if not force:
            raise OutputExists(f"{out}: already exists", hint="write it anyway with --force") from None
    else:
        what = f"{out}: is a prediction file, and --out names the certificate to write"
        raise OutputExists(what, hint="name a file that is not there yet, e.g. --out metrics.json")


def _in_words(certificate: Certificate, out: str | None) -> str:
    where = "" if out is None else f" -> {printable(out)}"
    samples = counted(certificate.samples, "sample", "samples")
    return (
        f"{certificate.correct} of {samples} correct ({certificate.accuracy:.2%}), "
        f"loss {certificate.loss:.4f}, each once in {counted(certificate.ranks, 'file', 'files')}{where}"
    )
