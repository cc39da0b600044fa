"""`slim`: the model's state alone, as a new file; or the older checkpoints of a run, where they lie."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ..core.cli import options
from ..core.cli.console import counted, printable, show_bytes
from ..core.cli.reading import fields_of
from ..core.cli.rewriting import WRITTEN, Change, Outcome, Target, rewrite, rewritten
from ..core.cli.schemas import Fields, fields_like
from ..errors import UsageFault

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint
    from .slimming import Slimmed


def _printed() -> list[Fields]:
    from .slimming import SlimmedRun

    freed: Fields = {"freed": (int, "bytes that there is now room for")}
    return [rewritten(), {**fields_like(SlimmedRun), **freed, **WRITTEN}]


@options.command("Convert", "Only the model's state; or room in a run's folder", _printed)
@options.input_argument
@options.optional_output
@options.flag("--in-place", "INPUT is the folder of a run: replace its older checkpoints one after another.")
@options.option(
    "--keep-newest N", "With --in-place: leave the newest N as they are.", type=click.IntRange(min=1)
)
@options.flag("--keep-anchors", "With --in-place: leave whole versions beside deltas as they are.")
@options.several("--drop NAME", "With --in-place: leave out this alone, e.g. optimizer.")
@options.writing_options
def slim(
    job: options.WriteJob,
    in_place: bool,
    keep_newest: int | None,
    keep_anchors: bool,
    drop: tuple[str, ...],
    model: str | None = None,
) -> None:
    """Write only the model's state, without bytes that none of its tensors uses.

    Optimizer, counters and arguments stay behind, and so does the rest of a storage that a view was cut from.
    An average without names, such as --state ema.shadow_params, gets those of --model.

    With --in-place each checkpoint of a training in the folder INPUT is replaced by a slimmer one, but for
    the newest N. Each keeps its time and its links. Deltas stay, and so does what they are built on. See
    first with --dry-run how much becomes free.

    \b
    Examples:
      ckpttool slim last.pt weights.pt
      ckpttool slim --in-place runs/first --keep-newest 2 --dry-run
    """
    if in_place:
        _require_sense(job, model, keep_newest)
        _in_place(job, keep_newest or 1, drop, keep_anchors=keep_anchors)
        return
    if not job.output:
        hint = "give one; for the older checkpoints of a run: ckpttool slim --in-place RUN --keep-newest N"
        raise UsageFault("slim needs an OUTPUT, a new file", hint=hint)
    for flag, given in (
        ("--keep-newest", keep_newest),
        ("--keep-anchors", keep_anchors),
        ("--drop", drop),
    ):
        if given:
            hint = "give it, or leave this out; to leave out entries: ckpttool convert --drop NAME"
            raise UsageFault(f"{flag} needs --in-place", hint=hint)
    _to_output(job, model)


def _to_output(job: options.WriteJob, model: str | None) -> None:
    from ..core.checkpoint import selection

    parameters = next(iter(options.added({"model": model})), None)

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        named = selection.with_names(checkpoint, target.state, parameters) if parameters else None
        if named is not None:
            count = counted(len(named.checkpoint.state("").tensors), "tensor")
            done = f"named {count} by {model}"
            return selection.slim(named.checkpoint), Outcome(done, left_out=named.left_out, where="")
        left_out = checkpoint.outside(checkpoint.state(target.state))
        done = f"slimmed {show_bytes(checkpoint.nbytes)}"
        return selection.slim(checkpoint, state=target.state), Outcome(done, left_out=left_out, where="")

    rewrite(job, transform)


def _require_sense(job: options.WriteJob, model: str | None, keep_newest: int | None) -> None:
    """Refuse what `--in-place` has no use for, and the lack of what it needs."""
    if job.output:
        hint = "leave it out, or --in-place"
        raise UsageFault(f"--in-place: writes no OUTPUT, and {job.output} was given", hint=hint)
    if keep_newest is None:
        raise UsageFault("--in-place: how many checkpoints are to stay?", hint="say it: --keep-newest N")
    names = "state", "shard_size", "device", "companions", "resume", "part"
    for name, value in (("model", model), *((name, getattr(job, name)) for name in names)):
        if value:
            what = f"--{name.replace('_', '-')}: has no effect with --in-place"
            raise UsageFault(what, hint="leave it out" + ", or torchrun" * (name == "part"))


def _in_place(job: options.WriteJob, keep_newest: int, drop: tuple[str, ...], *, keep_anchors: bool) -> None:
    from .slimming import slim_in_place

    console, started = job.console, time.perf_counter()
    with console.bar("slimming") as bar:
        choices: dict[str, Any] = {"verify": job.verify, "dry_run": job.dry_run, "reflink": job.reflink}
        choices |= {**bar.calls, "keep_newest": keep_newest, "leave_out": drop, "keep_anchors": keep_anchors}
        run = slim_in_place(job.input, **choices)
    seconds = time.perf_counter() - started
    for file in run.kept:
        if file.is_checkpoint or console.verbose:
            console.note(f"stays: {_shown(file)} {printable(file.why)}")
    left_out = dict.fromkeys(name for file in run.slimmed for name in file.left_out)
    console.note_names("left out" if not job.dry_run else "would be left out", [*left_out])
    done = "would have slimmed" if job.dry_run else "slimmed"
    line = f"{done} {counted(len(run.slimmed), 'checkpoint')} in {printable(run.path)}: "
    line += f"{show_bytes(run.freed)} free ({seconds:.2f} s)"
    width = max(len(_shown(file)) for file in run.slimmed)
    table = (
        f"{_shown(file):{width}}  {show_bytes(file.before):>9} -> {show_bytes(file.after):>9}"
        for file in run.slimmed
    )
    data: dict[str, object] = {**fields_of(run), "freed": run.freed, "seconds": round(seconds, 4)}
    if job.dry_run:
        data["dry_run"] = True
    console.result("\n".join([console.sentence(line), *table]), data)


def _shown(file: Slimmed) -> str:
    return printable(" = ".join((file.name, *file.links)))
