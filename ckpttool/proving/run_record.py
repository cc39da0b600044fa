"""What the chain of a training run says: how it began, and what each of its steps came to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..files.chain import Link

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """Where two records of the same steps part.

    Attributes:
        step: the first one that differs, as far as that is known.
        message: what differs.
    """

    step: int
    message: str


class RunRecord:
    """The entries of a chain that hold: those of a branch that a resume has left are apart.

    Attributes:
        begins: the entries with which the run began and was resumed, in order.
        left: how many entries belong to branches that were left.
        returns: for each resume from an earlier step, the line, the last step before and the step.
    """

    def __init__(self, links: list[Link]) -> None:
        self.begins: list[Entry] = []
        self.returns: list[tuple[int, int, int]] = []
        self.left = 0
        kept: list[Entry] = []
        for link in links:
            entry = link.entry
            if entry.get("kind") == "begin":
                after = [one for one in kept if one["step"] > entry["step"]]
                if after:
                    self.returns.append((link.number, after[-1]["step"], entry["step"]))
                    self.left += len(after)
                    kept = [one for one in kept if one["step"] <= entry["step"]]
                    self.begins = [one for one in self.begins if one["step"] <= entry["step"]]
                self.begins.append(entry)
            elif isinstance(entry.get("step"), int):
                kept.append(entry)
        self.steps = {one["step"]: one for one in kept if one.get("kind") == "step"}
        self.epochs = {one["epoch"]: one for one in kept if one.get("kind") == "epoch"}
        self.scores = {one["step"]: one for one in kept if one.get("kind") == "evaluation"}
        self.checkpoints = {one["step"]: one for one in kept if one.get("kind") == "checkpoint"}
        self.end = kept[-1] if kept and kept[-1].get("kind") == "end" else None

    def begin_of(self, step: int) -> Entry:
        """Return how the run began that took the step after this one."""
        return next((one for one in reversed(self.begins) if one["step"] <= step), self.begins[0])

    def limit(self, step: int) -> int | None:
        """Return the step up to which the run went on with the same settings; None if to its end."""
        own = _settings(self.begin_of(step))
        later = [one for one in self.begins if one["step"] > step and _settings(one) != own]
        return later[0]["step"] if later else None

    def samples(self) -> dict[int, dict[int, str]]:
        """Return, for each step, the digest of each sample that it used."""
        found: dict[int, dict[int, str]] = {}
        for entry in self.steps.values():
            for step, (indices, digests) in entry["samples"].items():
                size = len(digests) // len(indices) if indices else 1
                pieces = [digests[at : at + size] for at in range(0, len(digests), size)]
                found[int(step)] = dict(zip(indices, pieces, strict=False))
        return found


def first_difference(run: RunRecord, again: RunRecord, start: int) -> Part | None:
    """Return where a run and its repetition from step `start` part; None if nothing differs."""
    found = [*_differences(run, again, start)]
    return min(found, key=lambda part: part.step, default=None)


def _differences(run: RunRecord, again: RunRecord, start: int) -> Iterator[Part]:
    """Yield the first difference of each kind; of one step the cause before the effect."""
    first, second = run.begins[0], again.begins[0]
    if start == 0 and first["weights"] != second["weights"]:
        yield Part(0, "the weights that the training begins with are others")
    for epoch in sorted(run.epochs.keys() & again.epochs.keys()):
        if run.epochs[epoch]["plan"] != again.epochs[epoch]["plan"]:
            step = max(start, run.epochs[epoch]["step"]) + 1
            yield Part(step, f"epoch {epoch} deals the samples in another order")
            break
    yield from _other_samples(run, again)
    before = start
    for step in sorted(step for step in again.steps if step > start):
        if step in run.steps:
            if run.steps[step]["weights"] != again.steps[step]["weights"]:
                after = f"after step {before}, by step {step}" if step > before + 1 else f"in step {step}"
                yield Part(step, f"the weights part {after}")
                break
            before = step
    for step in sorted(run.scores.keys() & again.scores.keys()):
        if step > start and run.scores[step]["score"] != again.scores[step]["score"]:
            yield Part(step, f"the evaluation after step {step} has another score")
            break
    for step in sorted(run.checkpoints.keys() & again.checkpoints.keys()):
        if step > start:
            mine, other = (one.checkpoints[step]["digests"] for one in (run, again))
            parts = [part for part in mine if part != "run" and mine[part] != other.get(part)]
            if parts:
                yield Part(step, f"the checkpoint of step {step} has another {parts[0]}")
                break


def _other_samples(run: RunRecord, again: RunRecord) -> Iterator[Part]:
    mine, others = run.samples(), again.samples()
    for step in sorted(mine.keys() & others.keys()):
        if mine[step].keys() != others[step].keys():
            index = min(mine[step].keys() ^ others[step].keys())
            yield Part(step, f"step {step} takes other samples: sample {index} is in one of both only")
            return
        changed = [index for index in sorted(mine[step]) if mine[step][index] != others[step][index]]
        if changed:
            many = f", and {len(changed) - 1} more in this step" if len(changed) > 1 else ""
            yield Part(step, f"training sample {changed[0]} is another in step {step}{many}")
            return


def _settings(begin: Entry) -> tuple[object, ...]:
    return begin["arguments"], begin["ranks"], begin["versions"]
