"""The command `ckpttool convert-batchnorm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from .. import options
from ..console import counted, stdout_kept_for_results
from ..reading import fields_of
from ..rewriting import Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...batchnorm.convert_states import Report
    from ...batchnorm.pool_files import PoolReport
    from ...checkpoint.checkpoint import Checkpoint


@click.command("convert-batchnorm")
@options.inputs_and_output
@click.option(
    "--to",
    type=click.Choice(["sync", "plain"]),
    help="For SyncBatchNorm, or for BatchNorm1d, 2d and 3d.  [default: plain, for several INPUTs]",
)
@click.option(
    "--model",
    metavar="SPEC",
    help="The plain model, e.g. torchvision:resnet18 or file.py:factory: which layers are 1d, 2d, 3d.",
)
@click.option(
    "--counts",
    multiple=True,
    metavar="[GLOB=]N0,N1,…",
    help="Values per channel in each INPUT's batch: batch × positions; of layers matching GLOB. Repeatable.",
)
@click.option(
    "--cumulative",
    multiple=True,
    metavar="GLOB",
    help="Layers with momentum=None: ranks are also weighted by their counters of batches. Repeatable.",
)
@click.option(
    "--momentum",
    type=float,
    metavar="M",
    help="The layers' momentum, e.g. 0.1: add the variance between ranks that averaging removed.",
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Skip layers that match GLOB. Repeatable.")
@click.option(
    "--keep-first",
    multiple=True,
    metavar="GLOB",
    help="Keys in which INPUTs may differ: the first INPUT's are taken. Repeatable.",
)
@options.writing_options
def command(
    inputs: tuple[str, ...],
    to: Literal["sync", "plain"] | None,
    model: str | None,
    counts: tuple[str, ...],
    cumulative: tuple[str, ...],
    momentum: float | None,
    exclude: tuple[str, ...],
    keep_first: tuple[str, ...],
    **given: Any,
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
    adds that in expectation. A training with --batchnorm pooled has the exact values.

    \b
    Examples:
      ckpttool convert-batchnorm rank0.pt rank1.pt pooled.pt --counts 4096,2048 --momentum 0.1
      ckpttool convert-batchnorm old.pt sync.pt --to sync
    """
    from ...batchnorm.convert_states import Report, convert
    from ...errors import NothingToDo

    given_momentum = () if momentum is None else (str(momentum),)
    of_several = {"--counts": counts, "--cumulative": cumulative, "--keep-first": keep_first}
    _check(inputs, to, {**of_several, "--momentum": given_momentum})
    options.require_new_output(inputs, given["output"], given["force"])
    plain_or_sync: Literal["sync", "plain"] = to or "plain"

    def transform(checkpoint: Checkpoint, target: Target) -> tuple[Checkpoint, Outcome]:
        pooled = None
        choices: dict[str, Any] = {"exclude": exclude, "state": target.state}
        if inputs[1:]:
            of_ranks = {"cumulative": cumulative, "momentum": momentum, "keep_first": keep_first}
            checkpoint, pooled = _pool(checkpoint, inputs[1:], counts, **of_ranks, **choices)
        as_text = target.place.has_metadata and not target.place.full
        try:
            checkpoint, report = convert(
                checkpoint, plain_or_sync, as_text=as_text, kinds=_kinds(model), **choices
            )
        except NothingToDo:
            if not pooled:
                raise
            report = Report(())
        return checkpoint, _outcome(len(inputs), plain_or_sync, pooled, report)

    rewrite({**given, "input": inputs[0]}, transform)


def _pool(
    first: Checkpoint, others: tuple[str, ...], counts: tuple[str, ...], **choices: Any
) -> tuple[Checkpoint, PoolReport]:
    from ... import formats
    from ...batchnorm.pool_files import pool_states

    opened = [formats.open(path) for path in others]  # tensors that are kept refer to the open files
    return pool_states([first, *opened], dict(map(_counts, counts)) or None, **choices)


def _check(inputs: tuple[str, ...], to: str | None, of_several: dict[str, tuple[str, ...]]) -> None:
    if inputs[1:]:
        return
    if to is None:
        raise click.UsageError("--to is needed: sync or plain")
    for flag, values in of_several.items():
        if values:
            raise click.UsageError(f"{flag} is for several INPUTs, one per rank")


def _counts(text: str) -> tuple[str, tuple[int, ...]]:
    """Split `[GLOB=]N0,N1,…` into a pattern of layers and a count for each INPUT."""
    pattern, _, numbers = text.rpartition("=")
    try:
        return pattern or "*", tuple(int(number) for number in numbers.split(","))
    except ValueError:
        raise click.BadParameter(f"'{text}' is not N0,N1,… or GLOB=N0,N1,…", param_hint="--counts") from None


def _kinds(spec: str | None) -> dict[str, str] | None:
    """Return the kind of each BatchNorm layer of a model. Runs its code; imports torch."""
    if spec is None:
        return None
    from ...batchnorm.convert_modules import kinds_of
    from ...models.skeleton import skeleton

    with stdout_kept_for_results():
        return kinds_of(skeleton(spec))


def _outcome(ranks: int, to: str, pooled: PoolReport | None, report: Report) -> Outcome:
    layers = (pooled or report).layers
    many = counted(len(layers), "BatchNorm layer", "BatchNorm layers")
    done = f"pooled the statistics of {ranks} ranks in {many}" if pooled else f"converted {many} for {to}"
    if pooled and not pooled.exact:
        done += ", assuming equal counts (--counts gives others)"
    for verb, names, what in (
        ("added", report.added, ("counter", "counters")),
        ("recorded", report.recorded, ("kind", "kinds")),
        ("removed", report.restored, ("kind", "kinds")),
    ):
        if names:
            done += f", {counted(len(names), *what)} {verb}"
    none_pooled = {"pooled": (), "from_first": ()}
    return Outcome(done, fields={**fields_of(report), **none_pooled, **fields_of(pooled)})
