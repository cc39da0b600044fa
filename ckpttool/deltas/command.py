"""The commands of deltas: `delta` writes what changed, `apply` makes the newer checkpoint of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ..core.cli import options
from ..core.cli.console import counted, printable, show_bytes
from ..core.cli.reading import fields_of, note_state, open_file
from ..core.cli.rewriting import WRITTEN, Change, Outcome, Target, report_written, rewrite, rewritten
from ..core.cli.schemas import Fields, fields_like
from ..errors import UsageFault, install

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint


def _printed() -> Fields:
    from ..core.formats.destination import Saved
    from .writing import Delta

    named: Fields = {"base": (str, "BASE as it was named"), "new": (str, "NEW as it was named")}
    return {**named, **fields_like(Delta), **fields_like(Saved), **WRITTEN}


@options.command("Keep", "What changed between two checkpoints, losslessly", _printed)
@options.argument("input", "BASE")
@options.argument("new", "NEW")
@options.output_argument
@options.option(
    "--as LAYOUT",
    "Write the form that another program reads, of values alone; vllm: a file for its patches in memory.",
    "layout",
    type=click.Choice(["weight-v", "skyrl", "vllm"]),
)
@options.option("--encoding NAME", "With --as weight-v: xor, the usual one, or overwrite.")
@options.option("--checksum NAME", "With --as weight-v: xxh3-128, blake3 or adler32; skyrl: also sha256.")
@options.state_option
@options.folder_options
def delta(
    job: options.WriteJob, new: str, layout: str | None, encoding: str | None, checksum: str | None
) -> None:
    """Write what changed from BASE to NEW, so that apply makes NEW of BASE again, to the last bit.

    OUTPUT is a file of safetensors, and its name says no other format. Of each tensor it holds the smallest
    of: nothing, if BASE has the same; the places and values that differ; the XOR with BASE's, packed by zstd;
    the tensor. Names, order, ties and everything else in NEW are in its header, and so are the checksums that
    identify both. Wherever a checkpoint stands, BASE+OUTPUT may, or OUTPUT alone if BASE lies beside it. With
    --verify it is applied once, and the result compared.

    With --as, OUTPUT is a folder whose name ends with its version: weight_v000012 (SGLang, slime, miles,
    stitch, ModelExpress) or delta-00000012 (SkyRL). It can't hold a tensor that is new, is gone or has
    another type or shape. vLLM itself reads no file.

    \b
    Examples:
      ckpttool delta step-100.pt step-200.pt step-200.delta.safetensors
      ckpttool diff step-100.pt step-200.delta.safetensors
      ckpttool delta base.pt tuned.safetensors sync/weight_v000001 --as weight-v
    """
    from . import writing

    console, started = job.console, time.perf_counter()
    if job.state is not None and layout is None:
        hint = "leave it out; for that state alone: ckpttool slim first, or --as"
        raise UsageFault("a delta keeps everything in NEW, so --state would have no effect", hint=hint)
    with open_file(console, job.input) as older, open_file(console, new) as newer:
        if layout is not None:
            note_state(console, newer, job.state)
        with console.bar("comparing") as bar:
            made = writing.delta(
                older,
                newer,
                job.output,
                layout=layout,
                encoding=encoding,
                checksum=checksum,
                state=job.state,
                verify=job.verify,
                force=job.force,
                dry_run=job.dry_run,
                **bar.calls,
            )
    if made.without_zstd:
        console.note(f"zstd is missing, so no tensor is kept as a packed XOR; {install('delta')}")
    if made.saved.nbytes >= made.of and layout != "vllm":
        console.note("the delta is no smaller than NEW: keep NEW itself")
    forms = {"same": "unchanged", "sparse": "sparse", "xor": "packed", "new": "whole"}
    said = ", ".join(f"{count} {forms[kind]}" for kind, count in made.kinds.items() if count)
    done = f"compared {counted(sum(made.kinds.values()), 'tensor')} ({said})" if said else "compared"
    size = f"{show_bytes(made.saved.nbytes)} of {show_bytes(made.of)}"
    data = {"base": job.input, "new": new, **fields_of(made), **fields_of(made.saved)}
    seconds = time.perf_counter() - started
    report_written(console, done, made.saved.path, size, seconds, data, dry=job.dry_run)


@options.command("Keep", "The newer checkpoint, from the older and deltas", rewritten)
@click.argument(
    "inputs",
    metavar="BASE DELTA… OUTPUT",
    nargs=-1,
    type=options.PATH,
    callback=options.part_output,
)
@options.to_option
@options.full_option
@options.option("--version N", "Which version of a folder of versions; default: the newest.", type=int)
@options.writing_options
def apply(job: options.WriteJob, to: str | None, full: bool, version: int | None) -> None:
    """Make of BASE what it became by each DELTA, one after another, to the last bit.

    BASE may have any format, if its values are those that the first DELTA was made from: their checksums
    are compared before anything is written, and the digest of what comes of them before it counts.
    OUTPUT's format follows its name; a .pt holds everything that the last checkpoint did, and a
    .safetensors the model, or with --full everything.

    In place of the deltas, or of BASE and them, a folder of versions may stand, which ckpttool inspect lists.
    A whole version in it is an anchor, and takes the place of BASE.

    \b
    Examples:
      ckpttool apply step-100.pt step-200.delta.safetensors step-200.pt
      ckpttool apply base.pt sync new.safetensors --version 1
    """
    from ..core import formats
    from . import applying, patches, versions

    named = versions.expanded(job.inputs, version)
    is_alone = named == [*job.inputs]
    job = replace(job, inputs=tuple(named), input=named[0])
    base, *deltas = job.inputs
    if not deltas and is_alone:
        hint = f"ckpttool apply {printable(base)} DELTA OUTPUT; for its contents: ckpttool inspect"
        raise UsageFault("apply needs a BASE, a DELTA and an OUTPUT", hint=hint)

    def opening() -> Checkpoint:
        if not deltas:  # a whole version
            return formats.open(base)
        with job.console.bar("checking") as bar:
            return applying.apply(base, deltas, lazily=not job.dry_run or job.part is not None, **bar.calls)

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        done = f"applied {counted(len(deltas), 'delta')}"
        outcome = Outcome(done, left_out=patches.passed_over(checkpoint), of_state=False)
        if job.companions:  # which were written for the base
            with formats.open(base) as older:
                outcome.before = older.found_state()
        return checkpoint, outcome

    verify = job.verify or None  # the digest is compared while it is written, also with --no-verify
    rewrite(job, transform, opening=opening, to=to, full=full or None, verify=verify, needed=())
