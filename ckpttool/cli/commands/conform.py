"""The command `conform`: a checkpoint under the names and in the shapes that another one has."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from .. import options
from ..options import Job
from ..rewriting import Change, Outcome, Target, rewrite

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint
    from ...transforms.conforming.conform import Conformed
    from ...transforms.conforming.rules import Row

LINES = 40  # of the table; -v shows all


@click.command("conform")
@options.option("--like REF", "A checkpoint that loads where this one should; its header alone is read.")
@options.option("--model SPEC", "In the place of REF: a model, as for doctor. Its code is run.")
@options.flag("--check-values", "REF is the same model: let values decide, and compare the result with it.")
@options.flag("--pad-vocab", "Give embeddings and heads with fewer rows than REF's rows of zeros.")
@options.several("--exclude GLOB", "Leave out keys of INPUT first, such as a head that REF lacks.")
@options.option("--dtype TYPE", "Also cast floating-point tensors, as convert does.")
@options.option("--write-map FILE", "Also write the mapping as rules for convert --map.")
@options.option("--like-state WHERE", "Which state of REF to take if it holds several.")
@options.writing
def command(job: Job, like: str | None, model: str | None, write_map: str | None, **choices: Any) -> None:
    """Write a checkpoint under the names and in the shapes that another one has.

    REF is any checkpoint that loads on the other side: a file, a folder or a URL. Renamed modules, layers
    that one side has fused, split, stacked or transposed, and buffers that a model computes for itself are
    found by names and shapes; the table says what each step rests on. What names and shapes leave open is
    refused, and the candidates are named (exit 1): a square matrix beside transposed ones, the rows of heads
    for another rotary embedding, layers of one shape whose names say nothing. --check-values lets values
    decide where REF is the same model, and compares all of the result bit by bit.

    \b
    Examples:
      ckpttool conform model.safetensors renamed.safetensors --like other-side.safetensors
      ckpttool conform model.pt renamed.pt --like ref.pt --check-values --write-map rules.toml
    """
    from ...tensors import cast

    if (like is None) == (model is None):
        raise click.UsageError("name the other side: --like REF, or --model SPEC")
    dtype = cast.target(choices.pop("dtype").lower()) if choices["dtype"] else choices.pop("dtype")

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        from ...models.diagnosis.ways_out import conformed as conform
        from ...transforms import selection

        left_out: tuple[str, ...] = ()
        if exclude := choices.pop("exclude"):
            checkpoint, chosen = selection.select(checkpoint, exclude=exclude, state=target.state)
            left_out = chosen.left_out
        reference = _places_of(model) if model is not None else like
        assert reference is not None
        new, conformed = conform(checkpoint, reference, state=target.state, **choices)
        outcome = _outcome(conformed, like or model or "", verbose=job.console.verbose)
        outcome.left_out = left_out
        if dtype is not None:
            new, outcome.casting = selection.cast(new, dtype, state=target.state)
            outcome.done += f", {outcome.casting.tensors} tensors cast to {dtype.name}"
        elif conformed.types:
            outcome.notes += _types(conformed)
        if write_map and not job.dry_run:
            with open(write_map, "w" if job.force else "x", encoding="utf-8") as file:
                file.write(conformed.rules.to_toml())
            again = shlex.join(["ckpttool", "convert", job.input, job.output, "--map", write_map])
            outcome.notes.append(f"as a command: {again}")
        return new, outcome

    rewrite(job, transform)


def _places_of(spec: str) -> Any:
    from ...models.diagnosis.fit import Blueprint
    from ...models.skeleton import skeleton
    from ..console import stdout_kept_for_results

    with stdout_kept_for_results():
        return Blueprint.of(skeleton(spec)).places


def _outcome(conformed: Conformed, like: str, *, verbose: bool) -> Outcome:
    count = sum(row.count * len(row.rule.targets) for row in conformed.table)
    done = f"brought {count} tensors under the names of {like}"
    if conformed.proven:
        done += f", {conformed.proven} proven equal bit for bit"
    lines = [*_table(conformed.table)]
    if len(lines) > LINES and not verbose:
        lines = [*lines[:LINES], f"… and {len(lines) - LINES} more lines (-v)"]
    outcome = Outcome(done, conformed.renamed, result=conformed, table=lines)
    outcome.fields = {"mapping": [_entry(row) for row in conformed.table]}
    for said, names in (
        ("left out, as the other side has no such buffer", conformed.dropped),
        ("left out, as the other side has a tied tensor once", conformed.untied),
        ("tied, as on the other side", conformed.tied),
        ("added as 0, as BatchNorm's counters are", conformed.counted),
        ("taken from the other side, whose model computes them", conformed.taken),
        ("not written, as the other side's model computes them", conformed.lacking),
        ("rows of zeros added", conformed.padded),
    ):
        if names:
            shown = ", ".join(names if verbose else names[:4]) + ("" if verbose or len(names) < 5 else ", …")
            outcome.notes.append(f"{said}: {shown}")
    return outcome


def _types(conformed: Conformed) -> Iterator[str]:
    for mine, theirs, count in conformed.types:
        hint = "--dtype casts them" if "float" in mine and "float" in theirs else "kept as they are"
        yield f"{count} tensors are {mine} here and {theirs} there: {hint}"


def _table(table: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each rule: its names, what is done, and what that rests on."""
    for row in table:
        sides = [
            ", ".join(_ranged(text, row) for text in side) for side in (row.rule.sources, row.rule.targets)
        ]
        done = " ".join(step.verb for step in row.rule.steps)
        shapes = row.shapes[0] if row.shapes[0] == row.shapes[1] else f"{row.shapes[0]} -> {row.shapes[1]}"
        yield f"{sides[0]} -> {sides[1]}  {shapes}{' ' * bool(done)}{done}  by {row.rests}"


def _ranged(text: str, row: Row) -> str:
    for level, numbers in row.ranges.items():
        text = text.replace(f"{{{level}}}", f"{{{numbers}}}")
    return text


def _entry(row: Row) -> dict[str, object]:
    return {
        "from": row.rule.sources,
        "to": row.rule.targets,
        "steps": [step.table() for step in row.rule.steps],
        "rests_on": row.rests,
        "layers": row.count,
        "numbers": row.ranges,
    }
