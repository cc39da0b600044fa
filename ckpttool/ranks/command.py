"""The commands `merge` and `split`: from the files of many ranks to one checkpoint, and back."""

from __future__ import annotations

import shlex
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from ..core.cli import options, rewriting
from ..core.cli.console import Console, counted, show_bytes
from ..core.cli.convert import Conversion
from ..core.cli.reading import fields_of, note_fields, note_state, open_file
from ..core.cli.rewriting import Change, Outcome, Target, rewrite, rewritten
from ..core.cli.schemas import Fields, fields_like
from ..errors import NothingToDo, RanksDiffer, Refused, UsageFault

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint
    from ..core.formats.likeness import Likeness


def _merge_printed() -> Fields:
    from ..core.checkpoint.checkpoint import Ranks

    ranks = fields_like(Ranks, without=("held", "replicated", "missing", "lacking", "device"))
    return rewritten({"ranks?": (ranks, "those that wrote the input")})


@options.command("Convert", "Write what many ranks wrote as one checkpoint", _merge_printed)
@options.inputs_and_output
@options.to_option
@options.full_option
@options.option("--dtype TYPE", "Cast the model's floating-point tensors to bf16, fp16, fp32 or fp64.")
@options.option(
    "--like ORIGINAL",
    "Write the files that a model in safetensors has: its shards, names, order; its headers alone are read.",
)
@options.option(
    "--take-rank R",
    "Where ranks should hold the same values, take those of rank R instead of comparing all.",
    type=click.IntRange(0),
)
@options.option(
    "--take-step N",
    "Where files state different training steps, take them all the same, as those of step N.",
    type=click.IntRange(0),
)
@options.writing_options
def merge(
    job: options.WriteJob,
    to: str | None,
    full: bool,
    dtype: str | None,
    like: str | None,
    take_rank: int | None,
    take_step: int | None,
    **changes: Any,
) -> None:
    """Write what many ranks wrote as one checkpoint: a FOLDER, or the files of all ranks.

    Sharded tensors become whole: files of each rank with DTensors or FSDP's shards, DCP folders (also those
    of accelerate, Lightning and Megatron), torch_checkpointing's, DeepSpeed's ZeRO, shards of Hugging Face.
    Values that several ranks hold are compared, bit by bit. A rank that is missing, there twice or of another
    run is an error. A .pt OUTPUT holds the optimizer too, by the names of parameters where they are certain.
    With --like, a file in which nothing has changed has the same bytes as in ORIGINAL, so that a hub stores
    it once.

    \b
    Examples:
      ckpttool merge checkpoint/actor model.safetensors --dtype bf16
      ckpttool merge checkpoint/actor run.pt
      ckpttool merge rank0.pt rank1.pt model.safetensors
      ckpttool merge checkpoint/actor tuned.safetensors --like first.safetensors
    """
    from ..core.formats.likeness import Likeness

    job.require_new_output(alone=False)

    def opening() -> Checkpoint:
        files = job.inputs if job.inputs[1:] else job.input
        from .frameworks import open_ranks

        return open_ranks(files, take_rank=take_rank, take_step=take_step)

    likeness = None if like is None else Likeness.at(like)
    transform = partial(_merged, job=job, dtype=dtype, like=likeness, changes=changes)
    choices = {"full": full or None, "to": to, "like": likeness, "needed": () if like is None else (like,)}
    try:
        rewrite(job, transform, opening=opening, **choices)
    except RanksDiffer:
        with opening() as checkpoint:
            raise _all_that_differ(job.console, checkpoint) from None


def _merged(
    checkpoint: Checkpoint,
    target: Target,
    *,
    job: options.WriteJob,
    dtype: str | None,
    like: Likeness | None,
    changes: dict[str, Any],
) -> Change:
    """Return the checkpoint to write: mapped, cast, its optimizer keyed by names if it is in the output."""
    from ..core.checkpoint.optimizer_view import is_flat
    from ..core.checkpoint.selection import cast
    from ..core.tensors.cast import CastReports
    from ..core.tensors.cast import target as dtype_of

    outcome = Outcome(f"merged {_in_words(checkpoint)}", of_state=bool(dtype or like or changes.get("map_")))
    if (ranks := checkpoint.ranks) is not None:
        names = ("framework", "world_size", "mesh", "step")
        outcome.fields = {"ranks": {name: getattr(ranks, name) for name in names}}
        if checkpoint.format == "safetensors-ranks":
            found = f"those of {len(ranks.held)} were found"
            outcome.notes.append(f"no file says how many ranks there were; {found}")
    as_text = target.place.format == "dcp"
    stays_flat = as_text and any(is_flat(value) for _, value in checkpoint.optimizers())
    if target.place.holds_all and not stays_flat:  # torchtitan loads no other form
        checkpoint = _with_names(checkpoint, outcome, shlex.quote(target.place.path), as_text=as_text)
    conversion = Conversion(job, target, outcome, checkpoint, checkpoint, None)
    options.added(changes, conversion)
    checkpoint = conversion.checkpoint
    if dtype:
        to = dtype_of(dtype.lower())
        try:
            checkpoint, report = cast(checkpoint, to, state=target.state)
        except NothingToDo:  # to merge is something to do
            outcome.notes.append(f"no tensor had to be cast: none has a float dtype other than {to.name}")
        else:
            outcome.casting = CastReports(reports=[*filter(None, (outcome.casting, report))])
            outcome.done += f", {counted(report.tensors, 'tensor')} cast to {to.name}"
    if like is not None:
        checkpoint, notes = like.fitted(checkpoint, target.state)
        outcome.notes += notes
        outcome.where, outcome.done = "", f"{outcome.done}, like {like.path}"
    return checkpoint, outcome


def _with_names(checkpoint: Checkpoint, outcome: Outcome, file: str, *, as_text: bool) -> Checkpoint:
    """Key the optimizer by names if they are certain; else note how, in `file` (quoted for a shell)."""
    from ..core.checkpoint.optimizer_names import to_names

    try:
        return to_names(checkpoint)[0]
    except NothingToDo:
        pass
    except Refused as fault:
        stays = "it stays keyed by numbers, which one process loads too"
        keys = "DCP keeps its numbers as text" if as_text else stays
        outcome.notes.append(
            f"{fault.reason}: {keys}; for names, if it lists "
            f"parameters in the state's order: ckpttool optimizer {file} NAMED --to names --order state"
        )
    return checkpoint


def _in_words(checkpoint: Checkpoint) -> str:
    if (ranks := checkpoint.ranks) is None:
        return checkpoint.format
    count = f"{counted(ranks.world_size, 'rank')} of " if ranks.world_size is not None else ""
    return f"{count}{ranks.framework}{f', {ranks.axes}' if ranks.axes else ''}"


def _all_that_differ(console: Console, checkpoint: Checkpoint) -> RanksDiffer:
    """Return the error that names every tensor in which ranks differ."""
    from ..core.checkpoint.checksums import tensors_that_differ

    first, *others = tensors_that_differ(checkpoint).items()
    message = str(first[1])
    if others:
        verb = "other tensor differs" if len(others) == 1 else "other tensors differ"
        message += f"; {len(others)} {verb} too: {console.names([name for name, _ in others])}"
    return RanksDiffer(message, hint=f"take one rank's values: --take-rank {first[1].ranks[0]}")


def _split_printed() -> list[Fields]:
    from .splitting import Split

    as_dtensors: Fields = {
        **fields_like(Split),
        "format": (Literal["dtensor-ranks"], "the output's"),
        "keys": (int, "how many names the state has"),
        "renamed": (int, "always 0"),
        **rewriting.BESIDE,
        **rewriting.WRITTEN,
    }
    return [as_dtensors, rewritten({"ranks": (int, "as given")})]


@options.command("Convert", "Write one checkpoint as files for many ranks", _split_printed)
@options.input_argument
@options.output_argument
@options.option("--ranks W", "How many ranks there are.", type=click.IntRange(1), required=True)
@options.option(
    "--as",
    "dtensor: a file of DTensors a rank, as FSDP2 saves them; dcp: a folder that any ranks load.",
    "form",
    type=click.Choice(("dtensor", "dcp")),
    required=True,
)
@options.option(
    "--device TYPE",
    "The type of the ranks' devices, with dtensor: cuda, cpu, xpu.  [default: INPUT's, else cuda]",
)
@options.option("--axis NAME", "The name of the mesh's axis, where the training names it.")
@options.several(
    "--whole GLOB", "Keys that each rank holds whole, besides integers and BatchNorm's statistics."
)
@options.flag(
    "--replace-all",
    "With --force, also remove OUTPUT's files of a kind that INPUT lacks, such as an optimizer's.",
)
@options.state_option
@options.job_options
def split(job: options.WriteJob, ranks: int, form: str, **of_mesh: Any) -> None:
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
    if form == "dtensor":
        _as_dtensors(job, ranks, of_mesh)
        return
    if useless := [name for name, value in {"device": job.device, **of_mesh}.items() if value]:
        what = f"--{useless[0].replace('_', '-')} has no effect on a DCP folder, which has no mesh"
        raise UsageFault(what, hint="leave it out")

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        outcome = Outcome("wrote for any number of ranks", of_state=False, fields={"ranks": ranks})
        outcome.notes.extend(_wrappers(checkpoint, target.state))
        return _with_names(checkpoint, outcome, shlex.quote(job.input), as_text=True), outcome

    rewrite(job, transform, to="dcp")


def _wrappers(checkpoint: Checkpoint, where: str | None) -> list[str]:
    """Return a note on a wrapper's prefix that the keys carry; none if they carry none."""
    from ..core.checkpoint.prefixes import found_prefixes

    state = checkpoint.found_state() if where is None else checkpoint.state(where)
    prefixes = found_prefixes(state.tensors, state.versions)[:1] if state is not None else []
    path = shlex.quote(checkpoint.path)
    return [
        f"{prefix.keys} of {prefix.of} keys begin with '{prefix.prefix}', and those of a model under "
        f"fully_shard do not: ckpttool strip-prefix {path} OUT --prefix {prefix.prefix}; then split that"
        for prefix in prefixes
        if prefix.certain
    ]


def _as_dtensors(job: options.WriteJob, ranks: int, of_mesh: dict[str, Any]) -> None:
    from ..core.formats.destination import Destination
    from . import splitting

    console, started = job.console, time.perf_counter()
    choices = job.saving() | of_mesh
    del choices["shard_size"]
    with open_file(console, job.input) as checkpoint, console.bar("writing") as bar:
        companions = rewriting.Companions.of(checkpoint, job, Destination(job.output, "dtensor-ranks", True))
        note_state(console, checkpoint, job.state)
        wrappers = _wrappers(checkpoint, job.state)
        choices |= {"kept": companions.names, **bar.calls}
        written = splitting.split(checkpoint, job.output, ranks, **choices)
    for note in wrappers:
        console.note(note)
    note_fields(console, written)
    companions.copy(job)
    console.note(
        f"for ranks on {written.device}, in a model under fully_shard(model); import torch.distributed.tensor"
    )
    count = len(written.sharded)
    done = f"split {counted(count, 'tensor')} over {counted(ranks, 'rank')}"
    size = f"{counted(len(written.files), 'file')}, {show_bytes(written.nbytes)}"
    keys = {"keys": count + len(written.whole), "renamed": 0}
    data = {**fields_of(written), "format": "dtensor-ranks", **keys, **companions.fields()}
    rewriting.report_written(
        console, done, written.path, size, time.perf_counter() - started, data, dry=job.dry_run
    )
