"""The commands of LoRA adapters: `merge-lora`, `extract-lora` and `adapter`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ..core.cli import options
from ..core.cli.console import counted, printable, show_bytes, table
from ..core.cli.reading import fields_of, note_fields, note_state, open_file
from ..core.cli.rewriting import WRITTEN, Change, Outcome, Target, report_written, rewrite, rewritten
from ..core.cli.schemas import Fields, fields_like

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint
    from .differences import Extracted


def _merge_printed() -> Fields:
    from .merge import Merged

    return rewritten(Merged)


@options.command("Train on", "Add a LoRA adapter to its base model", _merge_printed)
@click.argument("input", metavar="BASE", type=options.PATH, callback=options.note_inputs)
@click.argument("adapter", metavar="ADAPTER", type=options.PATH)
@options.output_argument
@options.writing_options
def merge_lora(job: options.WriteJob, adapter: str) -> None:
    """Add a LoRA adapter to its base model, as PEFT's merge_and_unload does.

    BASE is the model's file or folder of shards, ADAPTER the folder that PEFT or diffusers wrote, or a file
    of kohya's, whose layers are looked up in BASE, and refused where two fit. Each value is computed
    in float64 and rounded once to the weight's own type, a few rows at a time; tensors that ADAPTER holds
    whole take that of the model's, too. A layer tied to a module that ADAPTER holds whole keeps BASE's values
    and is written apart, so config.json must then say "tie_word_embeddings": false; a copy of an updated
    matrix that it says is tied changes with it. A vocabulary that grew is taken over where ADAPTER holds both
    matrices whole. LoRA, DoRA, LoHa, LoKr, OFT, trained tokens and whole differences are merged; other kinds
    are refused by name. An adapter that is inside BASE is one for convert --fold lora.

    \b
    Example:
      ckpttool merge-lora model.safetensors adapter merged.safetensors
    """
    from . import merge
    from .adapter import open_adapter

    opened = open_adapter(adapter)

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        new, merged = merge.merge_lora(checkpoint, opened, state=target.state)
        done = f"added {counted(len(merged.updated), 'update')} of {adapter}"
        settings = merged.settings(job.input)
        return new, Outcome(done, casting=merged.casting, settings=settings, result=merged)

    with opened.checkpoint:
        rewrite(job, transform, needed=(job.input, adapter))


def _extract_printed() -> list[Fields]:
    from .adapter import SavedAdapter
    from .differences import Extracted, Layer
    from .inside import TakenOut

    worst = (Layer, "the layer with the largest error")
    of_two = {**fields_like(Extracted), "worst": worst, **fields_like(SavedAdapter), **WRITTEN}
    return [of_two, {**fields_like(TakenOut), **fields_like(SavedAdapter), **WRITTEN}]


@options.command("Train on", "What a model has learnt, as a LoRA adapter", _extract_printed)
@options.argument("inputs", "BASE [TUNED] OUTPUT", nargs=-1, callback=options.part_output)
@options.option("--rank R", "The rank of the factors of what TUNED has learnt.", type=click.IntRange(1))
@options.option(
    "--others WHAT",
    "What differs and can't be factors: save it whole in the adapter, or drop it.",
    type=click.Choice(("save", "drop")),
)
@options.option("--adapter NAME", "Of several adapters inside BASE, the one to take out.")
@options.option("--alpha A", "Alpha of the adapter inside, where no file beside BASE says it.", type=float)
@options.state_option
@options.folder_options
def extract_lora(
    job: options.WriteJob,
    rank: int | None,
    others: str | None,
    adapter: str | None,
    alpha: float | None,
) -> None:
    """Write what TUNED has learnt since BASE as a LoRA adapter, the inverse of merge-lora.

    OUTPUT is a folder that PEFT and merge-lora read. Each linear layer and convolution that differs gets the
    factors nearest to its difference, computed in float64 and kept in float32; the error is what they miss,
    as a part of the difference, by layer with -v. Norms, biases and embeddings can't be factors: if they
    differ, say what becomes of them with --others. Without TUNED, the adapter inside BASE is taken out as it
    is.

    \b
    Examples:
      ckpttool extract-lora base.safetensors tuned.safetensors learnt/ --rank 16
      ckpttool extract-lora peft.pt learnt/ --alpha 32
    """
    from ..core.formats.output import OutputPlace
    from .adapter import require_place, save_adapter
    from .differences import extract_lora as extract

    console, started = job.console, time.perf_counter()
    require_place(OutputPlace(job.output, job.force, job.inputs))
    if not job.inputs[1:]:
        if rank or others:
            what = f"--{'rank' if rank else 'others'} is of what TUNED has learnt, and only BASE is given"
            raise click.UsageError(what)
        _take_out(job, adapter, alpha)
        return
    if rank is None or adapter is not None or alpha is not None:
        raise click.UsageError("BASE and TUNED take --rank R, and --adapter and --alpha are of BASE alone")
    tuned = job.inputs[1]
    with open_file(console, job.input) as base, open_file(console, tuned) as other:
        note_state(console, base, job.state)
        with console.bar("extracting") as bar:
            made, extracted = extract(
                base, other, rank, others=others, state=job.state, verify=job.verify, **bar.calls
            )
        saved = save_adapter(
            made, extracted.config, job.output, verify=job.verify, force=job.force, dry_run=job.dry_run
        )
    if console.verbose:
        console.note("\n".join(_errors(extracted)))
    note_fields(console, extracted)
    worst = extracted.worst
    data = {**fields_of(extracted), "worst": fields_of(worst), **fields_of(saved)}
    done = f"extracted {counted(len(extracted.layers), 'layer')}"
    size = f"{show_bytes(saved.nbytes)}, largest error {_percent(worst.error)} in {printable(worst.name)}"
    report_written(console, done, saved.path, size, time.perf_counter() - started, data, dry=job.dry_run)


def _take_out(job: options.WriteJob, name: str | None, alpha: float | None) -> None:
    """Write the adapter that is inside a model as a folder of its own."""
    from .adapter import save_adapter
    from .inside import TakenOut, take_apart

    console, started = job.console, time.perf_counter()
    with open_file(console, job.input) as checkpoint:
        _, adapter, others = take_apart(checkpoint, adapter=name, alpha=alpha, state=job.state)
        how: dict[str, Any] = {"verify": job.verify, "force": job.force, "dry_run": job.dry_run}
        saved = save_adapter(adapter.checkpoint, adapter.config, job.output, **how)
    taken = TakenOut(adapter.config.get("r"), adapter.config.get(adapter.alpha_name), others)
    note_fields(console, taken)
    data = {**fields_of(taken), **fields_of(saved)}
    done = f"took out {counted(saved.keys, 'tensor')} of an adapter"
    seconds = time.perf_counter() - started
    report_written(console, done, saved.path, show_bytes(saved.nbytes), seconds, data, dry=job.dry_run)


def _adapter_printed() -> Fields:
    from .adapter import SavedAdapter
    from .translating import ConvertedAdapter

    return {**fields_like(ConvertedAdapter), **fields_like(SavedAdapter), **WRITTEN}


@options.command("Train on", "Write a LoRA adapter as another program names it", _adapter_printed)
@options.input_argument
@options.output_argument
@options.option(
    "--to DIALECT",
    "Whose names OUTPUT gets: peft (a folder), kohya, diffusers or comfy.",
    type=click.Choice(("peft", "kohya", "diffusers", "comfy")),
    required=True,
)
@options.option(
    "--base MODEL",
    "The model, where names may be of several: a checkpoint, or sd15, sdxl, flux, sd3, wan, qwen-image, llm.",
    callback=options.note_base,
)
@options.option("--component NAME", "The part of a pipeline, as unet, transformer or text_encoder_2.")
@options.option("--alpha A", "Alpha, where INPUT does not say it (torchtune, litgpt).", type=float)
@options.state_option
@options.folder_options
def adapter(job: options.WriteJob, to: str, base: str | None, **given: Any) -> None:
    """Write a LoRA adapter under the names and with the settings of another program.

    INPUT is an adapter of PEFT, diffusers, kohya, ComfyUI, MLX, torchtune or litgpt, found by its names. The
    factors keep their bits, and come back the same. Layers that one program fuses (q, k and v of Flux and
    SD3) are joined and split exactly. What OUTPUT's form can't hold is refused by name; settings that it
    lacks, such as dropout, are listed as left out.

    \b
    Example:
      ckpttool adapter adapter kohya.safetensors --to kohya --component unet
    """
    from contextlib import ExitStack
    from dataclasses import replace

    from ..core.checkpoint.selection import slim
    from ..core.formats.output import OutputPlace
    from ..core.formats.saving import save
    from .adapter import open_adapter, require_place, save_adapter
    from .layouts import layouts
    from .translating import convert_adapter

    console, started = job.console, time.perf_counter()
    if to == "peft":
        require_place(OutputPlace(job.output, job.force, (job.input,)))
    written: Any = {"verify": job.verify, "force": job.force, "dry_run": job.dry_run}
    with ExitStack() as stack:
        opened = open_adapter(job.input)
        needed = [stack.enter_context(opened.checkpoint)]
        if job.state is not None:
            opened = replace(opened, checkpoint=slim(opened.checkpoint, state=job.state))
        if base and all(each.name != base for each in layouts()):
            needed.append(stack.enter_context(open_file(console, base)))
        model = needed[1] if needed[1:] else base
        made, done = convert_adapter(opened, to, base=model, **given)
        if to == "peft":
            saved: Any = save_adapter(made, done.config, job.output, **written)
        else:
            saved = save(made, job.output, to="safetensors", keep_copies=True, needed=needed, **written)
    note_fields(console, done)
    data = {**fields_of(done), "output": saved.path, "bytes": saved.nbytes, "keys": saved.keys}
    said, size = f"wrote {counted(done.layers, 'layer')} of {done.dialect} as {to}", show_bytes(saved.nbytes)
    report_written(console, said, saved.path, size, time.perf_counter() - started, data, dry=job.dry_run)


def _errors(extracted: Extracted) -> list[str]:
    rows = [("layer", "shape", "rank", "error", "largest")]
    for layer in extracted.layers:
        shape = " x ".join(map(str, layer.shape))
        rows.append(
            (printable(layer.name), shape, f"{layer.rank}", _percent(layer.error), f"{layer.max_abs:.2g}")
        )
    return [*table(rows, {0})]


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %"
