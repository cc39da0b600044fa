"""The command `ckpttool merge-lora`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..console import counted
from ..rewriting import Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint


@click.command("merge-lora")
@click.argument("input", metavar="BASE", type=click.Path(), callback=options.note_inputs)
@click.argument("adapter", metavar="ADAPTER", type=click.Path())
@options.output_argument
@options.writing_options
def command(adapter: str, **given: Any) -> None:
    """Add a LoRA adapter to its base model, as PEFT's merge_and_unload does.

    BASE is the model's file or folder of shards, ADAPTER the folder that PEFT wrote. Each value is computed
    in float64 and rounded once to the weight's own type, a few rows at a time; tensors that ADAPTER holds
    whole take that of the model's, too. A layer tied to a module that ADAPTER holds whole keeps BASE's values
    and is written apart, so config.json must then say "tie_word_embeddings": false. DoRA and other kinds that
    do more than add a product are refused by name.

    \b
    Example:
      ckpttool merge-lora model.safetensors adapter merged.safetensors
    """
    from ...transforms.lora.adapter import open_adapter
    from ...transforms.lora.merge import merge_lora

    opened = open_adapter(adapter)
    with opened.checkpoint:

        def transform(checkpoint: Checkpoint, target: Target) -> tuple[Checkpoint, Outcome]:
            new, merged = merge_lora(checkpoint, opened, state=target.state)
            done = f"added {counted(len(merged.updated), 'update', 'updates')} of {adapter}"
            settings = {"tie_word_embeddings": False} if merged.untied else {}
            return new, Outcome(done, casting=merged.casting, settings=settings, result=merged)

        rewrite(given, transform)
