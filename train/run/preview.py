"""`--preview`: which rank takes which samples in which step, as a table or as JSON; trains nothing."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

from ckpttool.core.words import versioned
from ckpttool.distributed.group import given_rank, given_world_size
from ckpttool.distributed.plan import Plan, Step
from ckpttool.errors import UsageFault
from train import console
from train.config.command_line import make_plan
from train.config.sections import TrainConfig

# Steps of an epoch that the table shows: the first ones, and the last two.
STEPS = 12
# Samples that a sentence names; of more it gives the number.
NAMED = 3


def run(config: TrainConfig) -> None:
    """Count the samples that the flags name, and show their plan on rank 0."""
    if given_rank() == 0:
        from train.data import data_set, samples, stream

        # No task: samples are only counted, and need no classes.
        data, name = replace(config.data, task=""), config.data.name
        parts = data_set.load_parts(data, seed=config.numbers.seed, batch_size=config.batch.size)
        if isinstance(parts.train, stream.Stream):
            hint = "step s takes its samples s · batch to (s + 1) · batch, in their order"
            what = f"--preview: --data {name} is a stream, whose samples have no numbers"
            raise UsageFault(what, hint=hint)
        show(make_plan(config, samples.count(parts.train)), name, config, config.preview.shown == "json")


def show(plan: Plan, data_name: str, config: TrainConfig, as_json: bool) -> None:
    """Print a plan: a table of its first epoch and what is worth knowing, or every epoch as JSON."""
    world_size = config.ranks.spawn or given_world_size()
    if as_json:
        console.show(json.dumps(entries(plan, world_size, config.training.epochs)))
        return
    width = shutil.get_terminal_size((80, 24)).columns
    heading = [console.folded(line, sys.stdout, indent=8) for line in _heading(plan, world_size, data_name)]
    said = sentences(plan, world_size)
    if config.batch.rank_share == "auto":
        said = ["--rank-share auto: shares are equal until the speeds of the ranks have been measured", *said]
    said = [console.folded(line, sys.stdout) for line in said]
    console.show("\n".join([*heading, "", *table(plan, world_size, width), "", *said]))


def entries(plan: Plan, world_size: int, epochs: int) -> list[dict[str, object]]:
    """Return each rank's sample indices in each step, epoch by epoch, as `set_epoch` counts them."""
    return [
        versioned({"epoch": epoch, "rank": rank, "steps": [_share(step) for step in steps]})
        for epoch in range(epochs)
        for rank, steps in enumerate(plan.of_ranks(epoch, range(world_size), world_size))
    ]


def _share(step: Step) -> list[int]:
    return [index for micro_batch in step.micro_batches for index in micro_batch]


def _heading(plan: Plan, world_size: int, data: str) -> list[str]:
    sizes = plan.splits(world_size) if world_size <= 8 else []
    batch = f"{plan.batch_size} = {'+'.join(map(str, sizes[0]))}" if sizes else str(plan.batch_size)
    steps = f"{_counted(plan.steps_of(world_size), 'step')} per epoch, sampler {plan.sampler}"
    samples = _counted(plan.samples, "training sample")
    return [f"data    {data}, {samples}", f"ranks   {world_size}", f"batch   {batch}, {steps}"]


def table(plan: Plan, world_size: int, width: int) -> list[str]:
    """Return the lines of a table of epoch 0: one row per step and one column per rank.

    Columns that would be too narrow are left out.
    """
    steps = plan.steps_of(world_size)
    shown = [*range(steps)] if steps <= STEPS else [*range(STEPS - 2), steps - 2, steps - 1]
    of_ranks = plan.of_ranks(0, range(world_size), world_size)
    ranks = [{step: _share(steps[step]) for step in shown} for steps in of_ranks]
    label = max(len("epoch 0"), len(f"step {steps}"))
    longest = max((len(" ".join(map(str, steps[step]))) for steps in ranks for step in shown), default=0)
    most = max(1, (width - label) // (2 + max(len("rank 00"), min(longest, 9))))
    columns = [*range(world_size)] if world_size <= most else [*range(most - 1), world_size - 1]
    room_for = (width - label) // len(columns) - 2
    cells = [[_listed(ranks[rank][step], room_for) for rank in columns] for step in shown]
    heads = [f"rank {rank}" for rank in columns]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    labels = ["epoch 0", *(f"step {step}" for step in shown)]
    lines = []
    for name, row in zip(labels, [heads, *cells], strict=True):
        padded = (cell.ljust(size) for cell, size in zip(row, widths, strict=True))
        lines.append("  ".join([name.ljust(label), *padded]).rstrip())
    if steps > STEPS:
        lines.insert(STEPS - 1, f"... {_counted(steps - STEPS, 'more step')}")
    if len(columns) < world_size:
        lines.append(f"({_counted(world_size - len(columns), 'rank')} between the last two columns)")
    return lines


def _listed(indices: list[int], width: int) -> str:
    """Return indices with blanks between them, shortened to a width; `-` for none."""
    text = " ".join(map(str, indices)) or "-"
    if len(text) <= width:
        return text
    for shown in range(len(indices) - 1, 0, -1):
        text = f"{' '.join(map(str, indices[:shown]))} +{len(indices) - shown}"
        if len(text) <= width:
            return text
    return f"{len(indices)} samples"[: max(width, 1)]


def sentences(plan: Plan, world_size: int) -> list[str]:
    """Return what to know about a plan: which samples are repeated or left out, and which ranks have none."""
    subject = f"{_counted(plan.samples, 'sample')} on {_counted(world_size, 'rank')}"
    if not plan.steps_of(world_size):
        return [f"{subject}, batch {plan.batch_size}: no rank gets a batch"]
    seen = plan.seen(0, world_size)
    lines = []
    if repeated := {index: int(seen[index]) for index in (seen > 1).nonzero()[0].tolist()}:
        lines += [f"{subject}: {_seen(repeated)}"]
    if left_out := (seen == 0).nonzero()[0].tolist():
        lines.append(f"{subject}: {_named(left_out)} {_is(left_out)} left out of epoch 0")
    if not lines:
        lines.append(f"{subject}: each is seen exactly once in an epoch")
    last = plan.splits(world_size)[-1]
    if idle := last.count(0):
        with_nothing = "one rank" if idle == 1 else f"{idle} ranks"
        samples, ranks = _counted(plan.samples, "sample"), _counted(world_size, "rank")
        last_batch = f"the last batch leaves {with_nothing} with nothing"
        lines.append(f"{samples}, batch {plan.batch_size} on {ranks}: {last_batch}")
    return lines


def _seen(repeated: dict[int, int]) -> str:
    """Return how often samples are seen, those seen most often first."""
    by_times: dict[int, list[int]] = {}
    for index, times in repeated.items():
        by_times.setdefault(times, []).append(index)
    often = {times: "twice" if times == 2 else f"{times} times" for times in sorted(by_times, reverse=True)}
    return ", ".join(f"{_named(by_times[n])} {_is(by_times[n])} seen {words}" for n, words in often.items())


def _named(indices: list[int]) -> str:
    if len(indices) > NAMED:
        return f"{len(indices)} samples"
    *before, last = map(str, sorted(indices))
    return f"sample{'s' * bool(before)} {', '.join(before)}{' and ' * bool(before)}{last}"


def _is(indices: list[int]) -> str:
    return "is" if len(indices) == 1 else "are"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
