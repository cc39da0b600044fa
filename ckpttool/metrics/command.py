"""The command `ckpttool gather-metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from ..core.cli import options
from ..core.cli.console import Console, counted, printable, to_json
from ..core.cli.schemas import Fields

if TYPE_CHECKING:
    from ..core.formats.output import OutputPlace
    from .certificate import Certificate

# What is stated of each class, and of all
CLASS: Fields = {
    "class": (str, "its name"),
    "correct": (int, "samples of this class that were predicted as such"),
    "samples": (int, "samples of this class"),
    "predicted": (int, "samples of any class that were predicted as this one"),
    "precision": (float | None, "correct / predicted; null if it was never predicted"),
    "recall": (float | None, "correct / samples; null if it has no samples"),
    "f1": (float | None, "the harmonic mean of both"),
}
CERTIFICATE: Fields = {
    "correct": (int, "samples that were predicted right"),
    "samples": (int, "samples in all, each once"),
    "accuracy": (float, "correct / samples"),
    "loss": (float | None, "the mean over samples; null where it is no finite number"),
    "per_class": ([CLASS], "by label"),
    "ranks": (int, "how many files there were"),
    "rank_samples": (tuple[int, ...], "how many samples each rank scored"),
    "every_sample_once": (Literal[True], "else there is an error"),
    "index_digest": (str, "SHA-256 of the set of samples"),
    "digest": (str | None, "that of the model's state, as digest prints it"),
    "data": (str | None, "the data set"),
    "device": (str | None, "the type of the device"),
    "threads": (int | None, "of each rank"),
    "batch_size": (int | None, "of each rank"),
}


@options.command("Check", "Exact metrics from one prediction file per rank", CERTIFICATE)
@options.files_argument
@options.option("--samples N", "How many samples there must be.", type=click.IntRange(min=0))
@options.option("--out FILE", "Also write the certificate to FILE, as JSON.", type=options.PATH)
@options.flag("--force", "Replace the file of --out if it exists.")
@options.reading
def gather_metrics(
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
    from .certificate import read, recompute

    place = None if out is None else _certificate_place(out, files, force)
    certificate = recompute([*map(read, files)], samples)
    if place is not None:
        with place.file() as file:
            file.write(f"{to_json(certificate.statement())}\n".encode())
    console.result(_in_words(certificate, out), certificate.statement())


def _certificate_place(out: str, files: tuple[str, ...], force: bool) -> OutputPlace:
    """Return where the certificate goes; refuse a file of predictions, whether it is an input or not."""
    from ..core.formats.output import OutputPlace
    from ..errors import CkptToolError, OutputExists
    from .certificate import read

    try:
        read(out)
    except CkptToolError:
        place = OutputPlace(out, force, files)
        place.require()
        return place
    what = f"{out}: is a prediction file, and --out names the certificate to write"
    raise OutputExists(what, hint="name a file that is not there yet, e.g. --out metrics.json")


def _in_words(certificate: Certificate, out: str | None) -> str:
    where = "" if out is None else f" -> {printable(out)}"
    right = f"{certificate.correct} of {counted(certificate.samples, 'sample')} correct"
    once = f"each once in {counted(certificate.ranks, 'file')}{where}"
    return f"{right} ({certificate.accuracy:.2%}), loss {certificate.loss:.4f}, {once}"
