"""The record of a training run, and a part of the run trained again in another process and compared."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..core.files import digest
from ..core.files.digest import Link
from ..errors import UsageFault

# What the trainer knows by name, without code of the user's
DATA = r"digits|(cifar10|mnist)(:.*)?|folder:.*|fake:\d+|tokens:.*|wds:.*|hf:.*"
BUILT_IN = {
    "model": re.compile(r"simple-cnn|resnet20|torchvision:\w+"),
    "data": re.compile(DATA),
    "test-data": re.compile(DATA),
    "task": re.compile(r"classification|regression|language-model|model-loss"),
    "optimizer": re.compile(r"\w+"),
    "scheduler": re.compile(r"\w+"),
}

# Flags whose value names code or a server that the user may not have looked at
TRUSTED = ("--every", "--config", "--like", "--tracker")
NOTHING = re.compile("(?!)")

# Flags of the trainer that a replay never gets
DROPPED = {"--force", "--download", "--preview"}

# Variables that a launcher sets for its ranks
LAUNCHER = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_|TORCHELASTIC_|CKPTTOOL_SPAWNED")

SHOWN = 400  # Characters of a replay's error that are shown
POLL = 0.5  # seconds after which a replay's record is looked at again
TAIL = 1 << 16  # bytes at the end of a record in which its last step is looked for

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Divergence:
    """Where two records of the same steps begin to differ."""

    step: int  # the first that is known to differ
    message: str  # what differs


class RunRecord:
    """The entries of a chain that hold. Those after a step that a resumed run went back to are left out."""

    def __init__(self, links: list[Link]) -> None:
        self.begins: list[Entry] = []  # the entries with which the run began and was resumed, in order
        # For each resume from an earlier step, the line, the last step before and the step
        self.returns: list[tuple[int, int, int]] = []
        entries: list[Entry] = []
        for link in links:
            entry = link.entry
            if entry.get("kind") == "begin":
                after = [older for older in entries if older["step"] > entry["step"]]
                if after:
                    self.returns.append((link.number, after[-1]["step"], entry["step"]))
                    entries = [older for older in entries if older["step"] <= entry["step"]]
                    self.begins = [begin for begin in self.begins if begin["step"] <= entry["step"]]
                self.begins.append(entry)
            elif isinstance(entry.get("step"), int):
                entries.append(entry)
        by_step = {(str(entry.get("kind")), entry["step"]): entry for entry in entries}
        self.steps, self.scores, self.checkpoints = (
            {step: entry for (kind, step), entry in by_step.items() if kind == wanted}
            for wanted in ("step", "evaluation", "checkpoint")
        )
        self.epochs = {entry["epoch"]: entry for entry in entries if entry.get("kind") == "epoch"}
        self.end = entries[-1] if entries and entries[-1].get("kind") == "end" else None

    def begin_of(self, step: int) -> Entry:
        """Return how the run began that took the step after this one."""
        return next((begin for begin in reversed(self.begins) if begin["step"] <= step), self.begins[0])

    def limit(self, step: int) -> int | None:
        """Return the step up to which the run went on with the same settings; None if to its end."""
        settings = _settings(self.begin_of(step))
        later = [begin for begin in self.begins if begin["step"] > step and _settings(begin) != settings]
        return later[0]["step"] if later else None

    def samples(self) -> dict[int, dict[int, str]]:
        """Return, for each step, the digest of each sample that it used."""
        samples: dict[int, dict[int, str]] = {}
        for entry in self.steps.values():
            for step, (indices, digests) in entry["samples"].items():
                size = len(digests) // len(indices) if indices else 1
                pieces = [digests[at : at + size] for at in range(0, len(digests), size)]
                samples[int(step)] = dict(zip(indices, pieces, strict=False))
        return samples


def _settings(begin: Entry) -> tuple[object, ...]:
    return begin["arguments"], begin["ranks"], begin["versions"]


@dataclass(frozen=True, slots=True)
class Replay:
    """How a part of a run is to be trained again.

    Attributes:
        start, end: the steps after which it begins and ends; None for what is there.
        ranks: another number than the run's, which only `--virtual-ranks` allows; None for the run's.
        program: the trainer's `train/main.py`.
        run_code: whether to run the files that the run names as model, data or task.
        flags: further flags of the trainer, as `--data folder:elsewhere`.
        dry: only say which command it would be.
    """

    start: int | None = None
    end: int | None = None
    ranks: int | None = None
    program: str | None = None
    run_code: bool = False
    flags: Sequence[str] = ()
    dry: bool = False


class ReplayPlan(NamedTuple):
    """A replay: the steps after which it begins and ends, and why before what was asked for."""

    start: int
    end: int
    why: str
    ranks: int
    command: tuple[str, ...]  # but for --out


def planned(path: str, record: RunRecord, whole: Mapping[str, int], replay: Replay) -> ReplayPlan:
    """Return how to train a part again, from one of the sound checkpoints or the start."""
    names = {step: name for name, step in whole.items()}
    start, end, why = _segment(path, record, names.keys(), replay)
    begin = record.begin_of(start)
    resumed = os.path.abspath(os.path.join(os.path.dirname(path), names[start])) if start else None
    command = _command(path, begin, end, resumed, replay)
    return ReplayPlan(start, end, why, replay.ranks or begin["ranks"], tuple(command))


def _segment(path: str, record: RunRecord, whole: Iterable[int], replay: Replay) -> tuple[int, int, str]:
    starts = sorted({*whole} | ({0} if record.begins[0]["step"] == 0 else set()))
    ends = sorted(record.steps)
    alone = f"check the record alone: ckpttool prove {shlex.quote(os.path.dirname(path) or '.')} --no-replay"
    if not ends:
        raise UsageFault(f"{path}: records no steps, so there is nothing to replay", hint=alone)
    wanted = ends[-1] if replay.end is None else replay.end
    if wanted > ends[-1]:
        hint = "leave out --to to replay up to there"
        raise UsageFault(f"--to {wanted}: the last step in the record is {ends[-1]}", hint=hint)
    asked = path if replay.end is None else f"--to {wanted}"
    possible = [step for step in starts if step < wanted]
    if replay.start is not None:
        asked, possible = f"--from {replay.start}", [step for step in starts if step <= replay.start][-1:]
    if not possible:
        have = f"checkpoints of steps {', '.join(map(str, starts))}" if starts else "no whole checkpoint"
        raise UsageFault(f"{asked}: there is nothing to start from; the run has {have}", hint=alone)
    for start in reversed(possible):
        limit = record.limit(start)
        last = wanted if limit is None else min(wanted, limit)
        end = max((step for step in ends if start < step <= last), default=None)
        if end is not None:
            changed = f"the run went on from step {limit} with other settings"
            why = changed if last < wanted else f"step {wanted} is not in the record"
            return start, end, f"replays up to step {end}: {why}" if end < wanted else ""
    what = f"{asked}: the record has no step from {possible[-1]} up to {wanted} with the same settings"
    raise UsageFault(what, hint=alone if replay.start is None else "give another --from, or leave it out")


def _command(path: str, begin: Entry, end: int, resumed: str | None, replay: Replay) -> list[str]:
    ranks = replay.ranks or begin["ranks"]
    if replay.program is None or not os.path.isfile(replay.program):
        where = f"{replay.program}: is not there" if replay.program else "the trainer's program is not known"
        hint = "give --program path/to/train/main.py, from a copy of the repository"
        raise UsageFault(where, hint=hint)
    arguments = [flag for flag in map(str, begin["arguments"]) if flag not in DROPPED]
    code = _code_in(begin["code"], arguments)
    if code and not replay.run_code:
        what = f"{path}: the replay would run code that the run names: {', '.join(code)}"
        raise UsageFault(what, hint="look at it, and give --run-code if you trust it")
    if ranks != begin["ranks"] and (not begin["virtual_ranks"] or begin["virtual_ranks"] % ranks):
        what = f"--ranks {ranks}: the run had {begin['ranks']}, and another number has other bits"
        hint = "leave out --ranks; runs with --virtual-ranks V can be replayed on any that divides V"
        raise UsageFault(what, hint=hint)
    if resumed:
        begun = ["--resume", resumed]
    else:
        init, *missing = begin["init"] or [None]
        begun = ["--init", init] if init else []
        begun += [part for glob in missing for part in ("--init-allow-missing", glob)]
    every = ["--prove-every", str(begin["every"]), "--stop-at", str(end), "--save-every", f"{end}steps"]
    spawn = ["--spawn", str(ranks)] if ranks > 1 else []
    return [sys.executable, replay.program, *arguments, *begun, *every, *spawn, *replay.flags]


def _code_in(code: Entry, arguments: Sequence[str]) -> list[str]:
    """Return what a run names as code: in its record, and in its arguments, whatever the record says."""
    named = [(f"--{name}", str(value)) for name, value in code.items() if name in BUILT_IN]
    for argument, value in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, joined, behind = argument.partition("=")
        named.append((flag, behind if joined else value))
    known = {f"--{name}": pattern for name, pattern in BUILT_IN.items()} | dict.fromkeys(TRUSTED, NOTHING)
    return sorted({value for flag, value in named if flag in known and not known[flag].fullmatch(value)})


def differing(plan: ReplayPlan, record: RunRecord, progress: Callable[[int, int], None]) -> Divergence | None:
    """Train again, and return where the bits differ; None if they do not."""
    start, steps = plan.start, plan.end - plan.start
    with tempfile.TemporaryDirectory(prefix="ckpttool-prove-") as folder:
        path, said = os.path.join(folder, "run"), os.path.join(folder, "stderr")
        with open(said, "w+", encoding="utf-8", errors="replace") as stderr:
            command, begin = [*plan.command, "--out", path], record.begin_of(start)
            code = _run(command, begin, stderr, path, lambda step: progress(max(step - start, 0), steps))
            stderr.seek(0)
            if code:  # its own error says why, such as samples that have changed
                return Divergence(start, f"the replay ended with exit code {code}: {_said(stderr.read())}")
        again = RunRecord(digest.read(os.path.join(path, digest.NAME))[0])
    return min(_differences(record, again, start), key=lambda part: part.step, default=None)


def _run(command: list[str], begin: Entry, stderr: TextIO, path: str, progress: Callable[[int], None]) -> int:
    """Run the trainer to its end, telling which step its record has reached; return its exit code."""
    env, nothing = _environment(command[1], begin), subprocess.DEVNULL
    trainer = subprocess.Popen(command, env=env, stdin=nothing, stdout=nothing, stderr=stderr)
    try:
        while trainer.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(POLL)
            progress(_step_reached(os.path.join(path, digest.NAME)))
    except BaseException:
        trainer.terminate()  # it removes what it has half written
        trainer.wait()
        raise
    return trainer.returncode


def _step_reached(path: str) -> int:
    """Return the step of the last whole line of a record that is being written; 0 without one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - TAIL))
            steps = re.findall(rb'"step": (\d+)', file.read())
    except OSError:  # not there yet
        return 0
    return int(steps[-1]) if steps else 0


def _environment(program: str, begin: Entry) -> dict[str, str]:
    """Return this process's environment without what a launcher has set, and with the run's threads."""
    variables = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    root = str(Path(program).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH")]))
    return {**variables, "OMP_NUM_THREADS": str(begin["versions"]["threads"]), "PYTHONPATH": path}


def _said(stderr: str) -> str:
    """Return the error that a program has reported, or the end of what it said."""
    lines = stderr.strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join(errors[:1] or lines[-3:])[:SHOWN]


def _differences(run: RunRecord, again: RunRecord, start: int) -> Iterator[Divergence]:
    """Yield the first difference of each kind; of one step the cause before the effect."""
    first, second = run.begins[0], again.begins[0]
    if start == 0 and first["weights"] != second["weights"]:
        yield Divergence(0, "training starts from different weights")
    for epoch in _unlike(run.epochs, again.epochs, "plan"):
        step = max(start, run.epochs[epoch]["step"]) + 1
        yield Divergence(step, f"epoch {epoch} deals out the samples in another order")
    yield from _other_samples(run, again)
    for step in _unlike(run.steps, again.steps, "weights", start):
        both = run.steps.keys() & again.steps.keys()
        before = max([start, *(earlier for earlier in both if earlier < step)])
        after = f"after step {before}, by step {step}" if step > before + 1 else f"in step {step}"
        yield Divergence(step, f"the weights differ {after}")
    for step in _unlike(run.scores, again.scores, "score", start):
        yield Divergence(step, f"the evaluation after step {step} has a different score")
    for step in sorted(run.checkpoints.keys() & again.checkpoints.keys()):
        mine, other = (record.checkpoints[step]["digests"] for record in (run, again))
        parts = [part for part in mine if part != "run" and mine[part] != other.get(part)]
        if step > start and parts:
            yield Divergence(step, f"the checkpoint of step {step} has a different {parts[0]}")
            break


def _unlike(mine: Mapping[int, Entry], others: Mapping[int, Entry], name: str, after: int = -1) -> list[int]:
    """Return the first key in which two records have another entry of a name, or nothing."""
    both = sorted(mine.keys() & others.keys())
    return [key for key in both if key > after and mine[key][name] != others[key][name]][:1]


def _other_samples(run: RunRecord, again: RunRecord) -> Iterator[Divergence]:
    mine, others = run.samples(), again.samples()
    for step in sorted(mine.keys() & others.keys()):
        if mine[step].keys() != others[step].keys():
            index = min(mine[step].keys() ^ others[step].keys())
            one = f"sample {index} is in only one of the two"
            yield Divergence(step, f"step {step} takes different samples: {one}")
            return
        changed = [index for index in sorted(mine[step]) if mine[step][index] != others[step][index]]
        if changed:
            many = f", and {len(changed) - 1} more in this step" if len(changed) > 1 else ""
            yield Divergence(step, f"training sample {changed[0]} differs in step {step}{many}")
            return
