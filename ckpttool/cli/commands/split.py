"""The command `ckpttool split`."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import counted, show_bytes
from ..reading import fields_of, note_fields, note_state, open_file
from ..rewriting import Companions, Outcome, Target, report_written, rewrite
from .merge import with_names

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint

FORMS = ("dtensor", "dcp")


@click.command("split")
@options.input_argument
@options.output_argument
@click.option("--ranks", type=click.IntRange(1), required=True, metavar="W", help="How many ranks there are.")
@click.option(
    "--as",
    "form",
    type=click.Choice(FORMS),
    required=True,
    help="dtensor: a file of DTensors a rank, as FSDP2 saves them; dcp: a folder that any ranks load.",
)
@click.option(
    "--device",
    metavar="TYPE",
    help="The type of the ranks' devices, with dtensor: cuda, cpu, xpu.  [default: INPUT's, else cuda]",
)
@click.option("--axis", metavar="NAME", help="The name of the mesh's axis, where the training names it.")
@click.option(
    "--whole",
    multiple=True,
    metavar="GLOB",
    help="Keys that each rank holds whole, besides integers and BatchNorm's statistics. Repeatable.",
)
@click.option(
    "--replace-all",
    is_flag=True,
    help="With --force, also remove OUTPUT's files of a kind that INPUT lacks, such as an optimizer's.",
)
@options.state_option
@options.companions_option
@options.verify_option
@options.dry_run_option
@options.force_option
@options.reading
def command(
    ranks: int,
    form: str,
    device: str | None,
    axis: str | None,
    whole: tuple[str, ...],
    replace_all: bool,
    **given: Any,
) -> None:
    """Write a whole checkpoint as files that the ranks of a training run load: the inverse of merge.

    As dtensor, rank R of W gets OUTPUT/model_world_size_W_rank_R.pt, cut as fully_shard(model) cuts it, and
    the optimizer in optim_world_size_W_rank_R.pt; all else goes whole into extra_state_…. torch.load reads
    them once torch.distributed.tensor is imported. As dcp, torch.distributed.checkpoint.load reads the folder
    on any number of ranks; the optimizer is keyed by names, where they are certain.

    The keys must be those of the model alone, without a wrapper's prefix. A run of train/ keeps them as
    DistributedDataParallel has them, so strip the prefix first.

    \b
    Examples:
      ckpttool strip-prefix last.pt run.pt
      ckpttool split run.pt ranks/ --ranks 4 --as dtensor
      ckpttool split run.pt folder/ --ranks 4 --as dcp
    """
    if form == "dcp":
        _as_dcp(
            ranks, {"--device": device, "--axis": axis, "--whole": whole, "--replace-all": replace_all}, given
        )
    else:
        choices = {"axis": axis, "whole": whole, "replace_all": replace_all}
        _as_dtensors(given, ranks, device, choices)


def _as_dcp(ranks: int, others: dict[str, Any], given: dict[str, Any]) -> None:
    """Write a DCP folder, which has no ranks."""
    from ...errors import UsageFault
    from ...formats.dcp import reading as dcp

    if useless := [flag for flag, value in others.items() if value]:
        raise UsageFault(
            f"{useless[0]} has no effect on a DCP folder, which has no mesh", hint="leave it out"
        )

    def transform(checkpoint: Checkpoint, target: Target) -> tuple[Checkpoint, Outcome]:
        outcome = Outcome("wrote for any number of ranks", of_state=False, fields={"ranks": ranks})
        outcome.notes.extend(_wrappers(checkpoint, target.state))
        return with_names(checkpoint, outcome, shlex.quote(given["input"]), as_text=True), outcome

    rewrite(given, transform, to=dcp.NAME)


def _wrappers(checkpoint: Checkpoint, where: str | None) -> list[str]:
    """Return a note on a wrapper's prefix that the keys carry; none if they carry none."""
    from ...transforms.wrappers import found_prefixes

    state = checkpoint.found_state() if where is None else checkpoint.state(where)
    prefixes = found_prefixes(state.tensors, state.versions)[:1] if state is not None else []
    path = shlex.quote(checkpoint.path)
    return [
        f"{prefix.keys} of {prefix.of} keys begin with '{prefix.prefix}', and those of a model under "
        f"fully_shard do not: ckpttool strip-prefix {path} OUT --prefix {prefix.prefix}, then split OUT"
        for prefix in prefixes
        if prefix.certain
    ]


def _as_dtensors(given: dict[str, Any], ranks: int, device: str | None, choices: dict[str, Any]) -> None:
    from ...formats.saving.destination import Destination
    from ...formats.splitting import split

    console, started = options.console(given), time.perf_counter()
    choices |= {name: given[name] for name in ("state", "verify", "force", "dry_run")}
    with open_file(console, given["input"]) as checkpoint, console.bar("writing") as bar:
        companions = Companions.of(checkpoint, given, Destination(given["output"], "dtensor-ranks", True))
        note_state(console, checkpoint, given["state"])
        wrappers = _wrappers(checkpoint, given["state"])
        if console.draws:
            choices |= {"progress": bar.add, "expect": bar.expect}
        written = split(checkpoint, given["output"], ranks, device=device, kept=companions.names, **choices)
    for note in wrappers:
        console.note(note)
    note_fields(console, written)
    companions.copy(console, dry=given["dry_run"])
    console.note(
        f"for ranks on {written.device}, in a model under fully_shard(model); import torch.distributed.tensor"
    )
    done = (
        f"split {counted(len(written.sharded), 'tensor', 'tensors')} over {counted(ranks, 'rank', 'ranks')}"
    )
    size = f"{counted(len(written.files), 'file', 'files')}, {show_bytes(written.nbytes)}"
    keys = len(written.sharded) + len(written.whole)
    data = {
        **fields_of(written),
        "format": "dtensor-ranks",
        "keys": keys,
        "renamed": 0,
        **companions.fields(),
    }
    seconds = time.perf_counter() - started
    report_written(console, done, written.path, size, seconds, data, dry=given["dry_run"])
