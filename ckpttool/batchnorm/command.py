"""The command `ckpttool convert-batchnorm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from ..core.cli import options
from ..core.cli.console import counted
from ..core.cli.reading import fields_of
from ..core.cli.rewriting import Change, Outcome, Target, rewrite, rewritten
from ..core.cli.schemas import Fields, fields_like

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint
    from .convert_states import BatchNormReport
    from .pool_files import PoolReport


def _counts(text: str) -> tuple[str, tuple[int, ...]]:
    """Split `[GLOB=]N0,N1,…` into a pattern of layers and a count for each INPUT."""
    pattern, _, numbers = text.rpartition("=")
    try:
        return pattern or "*", tuple(int(number) for number in numbers.split(","))
    except ValueError:
        reason = f"'{text}' is not N0,N1,… or GLOB=N0,N1,… in whole numbers"
        raise click.BadParameter(reason, param_hint="--counts") from None


def _printed() -> Fields:
    from .convert_states import BatchNormReport
    from .pool_files import PoolReport

    return rewritten(fields_like(PoolReport, maybe=("exact",)), BatchNormReport)


@options.command("Convert", "BatchNorm to SyncBatchNorm and back; pool ranks", _printed)
@options.inputs_and_output
@options.option(
    "--to",
    "For SyncBatchNorm, or for BatchNorm1d, 2d and 3d.  [default: plain, for several INPUTs]",
    type=click.Choice(["sync", "plain"]),
)
@options.several(
    "--counts [GLOB=]N0,N1,…",
    "Values per channel in each INPUT's batch: batch × positions; of layers matching GLOB.",
    _counts,
)
@options.several(
    "--cumulative GLOB", "Layers with momentum=None: ranks are also weighted by their counters of batches."
)
@options.option(
    "--momentum M",
    "The layers' momentum, e.g. 0.1: add the variance between ranks that averaging removed.",
    type=float,
)
@options.several("--exclude GLOB", "Skip layers that match GLOB.")
@options.several("--keep-first GLOB", "Keys in which INPUTs may differ: the first INPUT's are taken.")
@options.writing_options
def convert_batchnorm(
    job: options.WriteJob,
    to: Literal["sync", "plain"] | None,
    exclude: tuple[str, ...],
    model: str | None = None,
    **of_ranks: Any,
) -> None:
    """Convert BatchNorm's state for SyncBatchNorm and back, and pool the statistics of several ranks.

    Plain and synchronised layers have the same keys. Missing counters are added as 0, layers get the version
    of those with a counter, and with --model it is recorded which are 1d, 2d and 3d; --to plain removes that
    again. InstanceNorm with running statistics has the same keys as BatchNorm: only --model can distinguish
    them.

    Several INPUTs are one file per rank, of one step: running means and variances become those of all
    samples. A rank that saw no samples has the count 0. Without --counts, equal ones are assumed, and the
    factor n/(n-1) stays as it is. Everything else must be equal.

    For one batch (momentum 1) the result is exactly what one process would have for the whole. Of running
    averages, only the mean is exact: the variance between ranks within each batch is gone from the files, and
    the pooled variance is too small by about 1/n for n values per channel (a third for n = 2). --momentum
    adds that in expectation. A run with --batchnorm pooled has the exact values.

    \b
    Examples:
      ckpttool convert-batchnorm rank0.pt rank1.pt pooled.pt --counts 4096,2048
      ckpttool convert-batchnorm old.pt sync.pt --to sync
    """
    from ..core import formats
    from ..errors import NothingToDo
    from .convert_states import BatchNormReport, convert
    from .pool_files import pool_states

    others, build = job.inputs[1:], next(iter(options.added({"model": model})), None)
    if not others and to is None:
        raise click.UsageError("--to is needed: sync or plain")
    for name, value in of_ranks.items():
        if not others and value not in (None, ()):
            raise click.UsageError(f"--{name.replace('_', '-')} is for several INPUTs, one per rank")
    counts = dict(of_ranks.pop("counts")) or None
    job.require_new_output()
    plain_or_sync: Literal["sync", "plain"] = to or "plain"

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        pooled = None
        choices: dict[str, Any] = {"exclude": exclude, "state": target.state}
        if others:
            files = [checkpoint, *map(formats.open, others)]  # tensors that are kept refer to the open files
            checkpoint, pooled = pool_states(files, counts, **of_ranks, **choices)
        choices["as_text"] = target.place.has_metadata and not target.place.full
        if build:  # needs torch
            from .sync_batchnorm import kinds_of

            choices["kinds"] = kinds_of(build())
        try:
            checkpoint, report = convert(checkpoint, plain_or_sync, **choices)
        except NothingToDo:
            if not pooled:
                raise
            report = BatchNormReport(())
        return checkpoint, _outcome(len(job.inputs), plain_or_sync, pooled, report)

    rewrite(job, transform)


def _outcome(ranks: int, to: str, pooled: PoolReport | None, report: BatchNormReport) -> Outcome:
    many = counted(len((pooled or report).layers), "BatchNorm layer")
    done = f"pooled the statistics of {ranks} ranks in {many}" if pooled else f"converted {many} for {to}"
    if pooled and not pooled.exact:
        done += ", assuming equal counts (--counts gives others)"
    kinds = ((report.recorded, "kind", "recorded"), (report.restored, "kind", "removed"))
    for names, what, verb in ((report.added, "counter", "added"), *kinds):
        done += f", {counted(len(names), what)} {verb}" if names else ""
    none_pooled = {"pooled": (), "from_first": (), "not_finite": ()}
    fields = {**fields_of(report), **none_pooled, **fields_of(pooled)}
    return Outcome(done, result=pooled, fields=fields)
