"""A part of a training run trained again, by the trainer's program in a process of its own, and compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageFault
from ..files import chain
from .run_record import Entry, Part, RunRecord, first_difference

BUILT_IN = {
    "model": re.compile(r"simple-cnn|resnet20|torchvision:\w+"),
    "data": re.compile(r"digits|cifar10|mnist|folder:.*|fake:\d+"),
    "task": re.compile(r"classification|regression|language-model|model-loss"),
}
"""What the trainer knows by name, without code of the user's."""

DROPPED = {"--wandb", "--tensorboard", "--force", "--download", "--preview", "--json"}
"""Flags of the trainer that a replay never gets."""

LAUNCHER = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_|TORCHELASTIC_|CKPTTOOL_SPAWNED")
"""Variables that a launcher sets for its ranks."""

SHOWN = 400
"""Characters of a replay's error that are shown."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How a part of a run is to be trained again.

    Attributes:
        start, end: the steps after which it begins and ends; None for what is there.
        ranks: another number than the run's, which only `--virtual-ranks` allows; None for the run's.
        program: the trainer's `train/main.py`; None for the one beside this package.
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


def segment(path: str, record: RunRecord, whole: dict[int, str], replay: Replay) -> tuple[int, int]:
    """Return the steps after which the replay begins and ends."""
    starts = sorted({*whole} | ({0} if record.begins[0]["step"] == 0 else set()))
    ends = sorted(record.steps)
    if not ends:
        raise UsageFault(f"{path}: tells of no step, so there is nothing to replay")
    end = ends[-1] if replay.end is None else max([one for one in ends if one <= replay.end], default=0)
    before = end - 1 if replay.start is None else replay.start
    possible = [one for one in starts if one <= before]
    if not possible:
        have = f"checkpoints of steps {', '.join(map(str, starts))}" if starts else "no whole checkpoint"
        raise UsageFault(
            f"--from {before}: there is nothing to begin from; the run has {have}", hint="give another --from"
        )
    start = possible[-1]
    limit = record.limit(start)
    end = end if limit is None else max((one for one in ends if one <= min(end, limit)), default=0)
    if end <= start:
        raise UsageFault(
            f"--to {replay.end or end}: no step from {start} on is in the chain up to there",
            hint="give a greater --to, or a smaller --from",
        )
    return start, end


def command_of(path: str, begin: Entry, end: int, resumed: str | None, replay: Replay) -> list[str]:
    """Return the command, but for --out, that trains from a checkpoint or the start up to a step."""
    ranks = replay.ranks or begin["ranks"]
    own = Path(__file__).parents[2] / "train" / "main.py"
    if replay.program is None and not own.is_file():
        raise UsageFault(
            "the trainer is not beside this installation of ckpttool",
            hint="give --program path/to/train/main.py, from a copy of the repository",
        )
    arguments = [one for one in map(str, begin["arguments"]) if one not in DROPPED]
    code = sorted({*_code_in(begin["code"]), *_code_in_arguments(arguments)})
    if code and not replay.run_code:
        raise UsageFault(
            f"{path}: the replay would run code that the run names: {', '.join(code)}",
            hint="look at it, and give --run-code if you trust it",
        )
    if ranks != begin["ranks"] and (not begin["virtual_ranks"] or begin["virtual_ranks"] % ranks):
        raise UsageFault(
            f"--ranks {ranks}: the run had {begin['ranks']}, and another number has other bits",
            hint="leave out --ranks; runs with --virtual-ranks V can be replayed on any that divides V",
        )
    if resumed:
        begun = ["--resume", os.path.abspath(resumed)]
    else:
        init, *missing = begin["init"] or [None]
        begun = ["--init", init] if init else []
        begun += [part for glob in missing for part in ("--init-allow-missing", glob)]
    every = ["--prove-every", str(begin["every"]), "--stop-at", str(end), "--save-every", "999999999epochs"]
    spawn = ["--spawn", str(ranks)] if ranks > 1 else []
    return [sys.executable, replay.program or str(own), *arguments, *begun, *every, *spawn, *replay.flags]


def _code_in(named: Entry) -> Iterator[str]:
    for name, known in BUILT_IN.items():
        if not known.fullmatch(str(named[name])):
            yield str(named[name])


def _code_in_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield what the arguments name as code, whatever the record says elsewhere."""
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, joined, behind = flag.partition("=")
        known = BUILT_IN.get(flag.removeprefix("--"))
        if flag.startswith("--") and known and not known.fullmatch(behind if joined else value):
            yield behind if joined else value


def differing(command: list[str], record: RunRecord, start: int) -> Part | None:
    """Train again, and return where the bits part; None if they do not.

    A replay that fails parts where it begins: its own error says why, as of samples that are others now.
    """
    with tempfile.TemporaryDirectory(prefix="ckpttool-prove-") as folder:
        ran = subprocess.run(
            [*command, "--out", folder],
            env=_environment(command[1], record.begin_of(start)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            return Part(start, f"the replay ended with exit code {ran.returncode}: {_said(ran.stderr)}")
        again = RunRecord(chain.read(os.path.join(folder, chain.NAME))[0])
    return first_difference(record, again, start)


def _environment(program: str, begin: Entry) -> dict[str, str]:
    """Return this process's environment without what a launcher has set, and with the run's threads."""
    kept = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    root = str(Path(program).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": str(begin["versions"]["threads"]), "PYTHONPATH": path}


def _said(stderr: str) -> str:
    """Return the error that a program has reported, or the end of what it said."""
    lines = stderr.strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join(errors[:1] or lines[-3:])[:SHOWN]
