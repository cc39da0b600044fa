"""The command `conform`: a checkpoint under the names and in the shapes that another one has."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from ..core.cli import options
from ..core.cli.console import Console, columns, cut_front, fitting, printable, table, terminal_width, without
from ..core.cli.rewriting import Change, Outcome, Target, rewrite, rewritten
from ..core.cli.schemas import NAMES, Fields
from ..errors import UsageFault
from ..rooms import find

if TYPE_CHECKING:
    from ..core.checkpoint.checkpoint import Checkpoint
    from ..core.formats.output import OutputPlace
    from .conform import Conformed
    from .rules import RuleRow

HEADS = ("from", "to", "shape", "steps", "by")
LINES = 41  # of the table, with its header; -v shows all


def _printed() -> Fields:
    from .conform import Conformed

    row: Fields = {
        "from": (NAMES, "templates of the names here"),
        "to": (NAMES, "templates of the names there"),
        "steps": (list[dict[str, Any]], "as a rule file has them"),
        "rests_on": (str, "by what it was found"),
        "layers": (int, "how many layers it stands for"),
        "numbers": (dict[str, str], "placeholder -> what it stands for"),
    }
    return rewritten(Conformed, {"mapping": ([row], "each rule, with what it rests on")})


@options.command("Convert", "Rename and reshape tensors to match another checkpoint", _printed)
@options.option("--like REF", "A checkpoint that loads where this one should; its header alone is read.")
@options.flag("--check-values", "REF is the same model: let values decide, and compare the result with it.")
@options.flag("--pad-vocab", "Give embeddings and heads with fewer rows than REF's rows of zeros.")
@options.several("--exclude GLOB", "Leave out keys of INPUT first, such as a head that REF lacks.")
@options.option("--dtype TYPE", "Also cast floating-point tensors, as convert does.")
@options.option("--write-map FILE", "Also write the mapping as rules for convert --map.")
@options.option("--like-state WHERE", "Which state of REF to take if it holds several.")
@options.writing
def conform(
    job: options.WriteJob, like: str | None, write_map: str | None, model: str | None = None, **choices: Any
) -> None:
    """Write a checkpoint under the names and in the shapes that another one has.

    REF is any checkpoint that loads on the other side: a file, a folder or a URL. Renamed modules, layers
    that one side has fused, split, stacked or transposed, and buffers that a model computes for itself are
    found by names and shapes; the table says what each step rests on. What names and shapes leave open is
    refused, and the candidates are named (exit 1): a square matrix beside transposed ones, the rows of heads
    for another rotary embedding, layers of one shape whose names say nothing. --check-values lets values
    decide where REF is the same model, and compares all of the result bit by bit.

    \b
    Examples:
      ckpttool conform model.safetensors out.safetensors --like ref.pt
      ckpttool conform model.pt out.pt --like ref.pt --write-map rules.toml
    """
    from ..core.tensors import cast

    places: Any = next(iter(options.added({"model": model})), None)
    if (like is None) == (places is None):
        what = "name one other side, not two" if like else "name the other side"
        raise click.UsageError(f"{what}: --like REF, or --model SPEC")
    for name in ("check_values", "like_state"):
        if model is not None and choices[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageFault(f"{flag} is of --like: a model has no file", hint="--like REF in its place")
    place = None if write_map is None else _map_place(write_map, job, like)
    exclude, said = choices.pop("exclude"), choices.pop("dtype")
    dtype = cast.target(said.lower()) if said else None

    def transform(checkpoint: Checkpoint, target: Target) -> Change:
        from ..core.checkpoint import selection
        from .conform import conform as conform_alone

        dialects: Any = find("models.dialects")  # whose errors also name maps that would do
        found_by_names = dialects.conformed if dialects else conform_alone
        left_out: tuple[str, ...] = ()
        if exclude:
            checkpoint, chosen = selection.select(checkpoint, exclude=exclude, state=target.state)
            left_out = chosen.left_out
        reference = like if like is not None else places()
        new, conformed = found_by_names(
            checkpoint, reference, state=target.state, optimizers=target.place.holds_all, **choices
        )
        outcome = _outcome(conformed, like or model or "", job.console)
        outcome.left_out = left_out
        if dtype is not None:
            new, outcome.casting = selection.cast(new, dtype, state=target.state)
            outcome.done += f", {outcome.casting.tensors} tensors cast to {dtype.name}"
        elif conformed.types:
            outcome.notes += _types(conformed)
        if place is not None:
            also = [f"--exclude={glob}" for glob in exclude] + ([f"--dtype={said}"] if said else [])
            outcome.written = partial(_write_map, place, conformed, outcome, job, also)
        return new, outcome

    rewrite(job, transform, needed=() if like is None else (like,))


def _map_place(path: str, job: options.WriteJob, like: str | None) -> OutputPlace:
    """Return where the rules go; refuse a place where --map would not find them, or another file is."""
    from ..core.formats.output import OutputPlace

    if not path.endswith(".toml"):
        raise UsageFault(f"--write-map {path}: a rule file's name ends in .toml", hint="name it so")
    if os.path.realpath(job.output) == os.path.realpath(path):
        raise UsageFault(f"--write-map {path}: is the OUTPUT", hint="name another file")
    place = OutputPlace(path, job.force, [job.input, *([like] if like else [])])
    place.require()
    return place


def _write_map(
    place: OutputPlace, conformed: Conformed, outcome: Outcome, job: options.WriteJob, also: Sequence[str]
) -> None:
    """Write the rules once OUTPUT is there, and say how convert makes the same of them."""
    path = place.path
    with place.file() as file:
        file.write(conformed.rules.to_toml().encode())
    if from_reference := (*conformed.padded, *conformed.counted, *conformed.taken):
        outcome.notes.append(f"{path} is without what INPUT lacks: {job.console.names(from_reference)}")
        return
    given = {"--state": job.state, "--shard-size": job.shard_size, "--device": job.device}
    also = [*also, *(f"{name}={value}" for name, value in given.items() if value is not None)]
    also += ["--companions"] * job.companions + ["--force"]
    again = ["ckpttool", "convert", job.input, job.output, "--map", path, *also]
    outcome.notes.append(f"as a command: {shlex.join(again)}")


def _outcome(conformed: Conformed, like: str, console: Console) -> Outcome:
    from ..mapping.applying import FILES

    count = sum(row.count * len(row.rule.targets) for row in conformed.table)
    done = f"brought {count} tensors under the names of {like}"
    if conformed.proven:
        done += f", {conformed.proven} proven equal bit for bit"
    verbose = console.verbose
    width = terminal_width(sys.stderr if console.to_stderr else sys.stdout)
    lines, gone = _table(conformed.table, width)
    if len(lines) > LINES and not verbose:
        lines = [*lines[:LINES], f"… and {len(lines) - LINES} more lines (-v)"]
    if width is not None:
        lines += without(gone, width)
    outcome = Outcome(done, conformed.renamed, result=conformed, table=lines, untrue=FILES)
    outcome.fields = {"mapping": [_entry(row) for row in conformed.table]}
    for said, names in (
        ("left out, as the other side has no such buffer", conformed.dropped),
        ("left out, as the other side has a tied tensor once", conformed.untied),
        ("tied, as on the other side", conformed.tied),
        ("added as 0, as BatchNorm's counters are", conformed.counted),
        ("taken from the other side, whose model computes them", conformed.taken),
        ("not written, as the other side's model computes them", conformed.lacking),
        ("rows of zeros added", conformed.padded),
        ("square, and not transposed by their equal names alone (--check-values tells)", conformed.unshown),
        ("changed too", conformed.also),
    ):
        if names:
            shown = ", ".join(names if verbose else names[:4]) + ("" if verbose or len(names) < 5 else ", …")
            outcome.notes.append(f"{said}: {shown}")
    return outcome


def _types(conformed: Conformed) -> Iterator[str]:
    for mine, theirs, count in conformed.types:
        hint = "--dtype casts them" if "float" in mine and "float" in theirs else "kept as they are"
        yield f"{count} tensors are {mine} here and {theirs} there: {hint}"


def _table(mapping: Sequence[RuleRow], width: int | None) -> tuple[list[str], Sequence[str]]:
    """Return, under a header, each rule's names, one a line, with what is done and what that rests on.

    Return the heads of the columns that do not fit, too.
    """
    rows: list[tuple[str, ...]] = [HEADS]
    for row in mapping:
        rule, (before, after) = row.rule, row.shapes
        shape = before if before == after else f"{before} -> {after}"
        facts = shape, " ".join(step.verb for step in rule.steps), row.rests
        for source, target in zip_longest(rule.sources, rule.targets, fillvalue=""):
            rows.append((printable(_ranged(source, row)), printable(_ranged(target, row)), *facts))
            facts = "", "", ""
    shown = len(HEADS) - 2
    if width is not None:
        widths = [max(map(columns, column)) for column in zip(*rows, strict=True)][2:]
        shown = fitting(widths, width - 2 * 16 - 2)
        each = max((width - sum(widths[:shown]) - 2 * shown - 2) // 2, 16)
        rows = [(cut_front(row[0], each), cut_front(row[1], each), *row[2 : 2 + shown]) for row in rows]
    return [*table(rows, range(5), width)], HEADS[2 + shown :]


def _ranged(text: str, row: RuleRow) -> str:
    for level, numbers in row.ranges.items():
        text = text.replace(f"{{{level}}}", f"{{{numbers}}}")
    return text


def _entry(row: RuleRow) -> dict[str, object]:
    return {
        "from": row.rule.sources,
        "to": row.rule.targets,
        "steps": [step.table() for step in row.rule.steps],
        "rests_on": row.rests,
        "layers": row.count,
        "numbers": row.ranges,
    }
