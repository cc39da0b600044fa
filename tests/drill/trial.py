"""The drill: kinds of kills, and a run that is killed and comes back, compared with one undisturbed."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from ckpttool.errors import CkptToolError
from tests.drill import agents
from tests.drill.agents import ROOT, Agent
from tests.ranks.runs import different
from train.checkpoint import format as checkpoints
from train.checkpoint.files import BEST, LAST
from train.config import command_line
from train.run import folder as run_folder

STEPS = 10
"""Optimizer steps of a run, five in each of two epochs."""


@dataclass(frozen=True)
class Kind:
    """One kind of kill, and what brings the run back.

    Attributes:
        name: for the table.
        at: where the rank is when it is killed, once for each kill: a place that the saboteur is told of.
        whom: `worker`, its `agent`, or `all` processes of the run.
        rank: which rank; None for any.
        steps: the first and the last step at which the rank is killed; some training is left after it.
        signal: what it is killed by. An agent hands SIGTERM and SIGUSR1 on to its ranks.
        agents: of torchrun, with one rank each; 0 for one agent with all ranks.
        back: `restart` by torchrun, `again` by the same command, a `new agent` in place of the dead one, or
            `fewer`, by the agents that are left.
    """

    name: str
    at: tuple[str, ...]
    whom: str = "worker"
    rank: int | None = None
    steps: tuple[int, int] = (1, STEPS - 2)
    signal: str = "SIGKILL"
    agents: int = 0
    back: str = "restart"


FIRST_EPOCH = (1, STEPS // 2)
EVALUATION: dict[str, Any] = {"at": ("evaluation",), "steps": FIRST_EPOCH}

KINDS = [
    Kind("a worker, in a step", ("step",)),
    Kind("a worker, at any moment", ("any",)),
    Kind("a worker, at the start", ("start",)),
    Kind("a worker, in evaluation", **EVALUATION),
    Kind("rank 0, in the middle of a save", ("save",), rank=0),
    Kind("rank 0, after a save's rename", ("after the rename",), rank=0),
    Kind("rank 0, between last.pt and best.pt", ("one of two names",), rank=0, steps=FIRST_EPOCH),
    Kind("a worker, and again at the restart", ("step", "start")),
    Kind("a worker, and again at any moment", ("evaluation", "any"), steps=FIRST_EPOCH),
    Kind("a worker, stopped by SIGSTOP", ("step",), signal="SIGSTOP"),
    Kind("the agent, in a step", ("step",), "agent", back="again"),
    Kind("the agent, in the middle of a save", ("save",), "agent", rank=0, back="again"),
    Kind("the agent, by SIGTERM in a step", ("step",), "agent", signal="SIGTERM", back="again"),
    Kind("the agent, by SIGTERM in evaluation", **EVALUATION, whom="agent", signal="SIGTERM", back="again"),
    Kind("the agent, by SIGUSR1 at any moment", ("any",), "agent", signal="SIGUSR1", back="again"),
    Kind("all at once, in a save", ("before the rename",), "all", rank=0, back="again"),
    Kind("all at once, in a step", ("step",), "all", back="again"),
    Kind("an agent of several, and a new one", ("step",), "agent", agents=3, back="new agent"),
    Kind("rank 0's agent, and a new one", ("step",), "agent", rank=0, agents=2, back="new agent"),
    Kind("an agent of several, at the start", ("start",), "agent", agents=2, back="new agent"),
    Kind("an agent of several, and none", ("step",), "agent", agents=4, back="fewer"),
    Kind("a worker of several agents", ("step",), agents=3),
]


@dataclass(frozen=True)
class Trial:
    """One kind with all that chance decides.

    Attributes:
        kind: of the kills.
        ranks: of the run, at its start.
        save: `sync` or `async`.
        kills: in order, as the saboteur reads them.
        flags: more ones of the trainer.
    """

    kind: Kind
    ranks: int
    save: str
    kills: tuple[dict[str, Any], ...]
    flags: tuple[str, ...] = ()


def draw(kind: Kind, chance: random.Random) -> Trial:
    """Return a trial of a kind."""
    ranks = kind.agents or chance.randint(2, 4)
    kills = [
        {
            "at": at,
            "whom": kind.whom,
            "signal": kind.signal,
            "rank": chance.randrange(ranks) if kind.rank is None else kind.rank,
            "step": 0 if at in ("start", "any") else chance.randint(*kind.steps),
            "after": chance.uniform(0, 2),
        }
        for at in kind.at
    ]
    return Trial(kind, ranks, chance.choice(("sync", "async")), tuple(kills))


# ---- the trial -----------------------------------------------------------------------------------------

VIRTUAL = 12
"""Virtual ranks where the number of ranks changes: divisible by 1, 2, 3 and 4."""

PATIENCE = 240.0
"""Seconds that a trial may take."""

OF_RANKS = re.compile(r"pt/(rng|log|plan|progress/sums)")
"""What a checkpoint holds for each rank."""

SABOTEUR = f"{ROOT}/tests/drill/saboteur.py"
VARIANTS = {"shard": ("--shard",), "stream": ("--data", f"{SABOTEUR}:stream", "--scheduler", "none")}
"""What runs can also be of: more flags of the trainer."""

UNDISTURBED = Kind("undisturbed", ())
FILES = {LAST, BEST, run_folder.LOG, command_line.CONFIG_FILE}


@dataclass(frozen=True)
class Result:
    """How a trial ended.

    Attributes:
        trial: what was tried.
        problems: what was not as it should be; empty if the run held.
        seconds: from the last kill to the next step of the training; None if there was none.
        happened: how many kills have.
    """

    trial: Trial
    problems: list[str]
    seconds: float | None
    happened: int


class Run:
    """A run of the trainer in a folder, with its agents."""

    def __init__(self, trial: Trial, folder: Path, *, fresh: bool) -> None:
        self.trial, self.folder, self.fresh = trial, folder, fresh
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(trial.kills))
        self.agents: list[Agent] = []
        self.dead: set[int] = set()
        self.cleared = 0
        alone = "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id drill"  # as --standalone
        self.options = f"--nproc-per-node {trial.ranks} {alone}".split()
        if trial.kind.agents:  # they meet at a store in this process, which no kill concerns
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            fewest = 1 if trial.kind.back == "fewer" else trial.ranks
            meeting = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{self.store.port} --rdzv-id drill"
            soon = "is_host=0,last_call_timeout=3,keep_alive_interval=1"
            nodes = f"--nnodes {fewest}:{trial.ranks} --nproc-per-node 1 --local-addr 127.0.0.1"
            self.options = f"{nodes} {meeting} --rdzv-conf {soon}".split()
        self.options += ["--max-restarts", "4", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]

    def start(self) -> None:
        """Start an agent."""
        self.agents.append(
            Agent(self.options, arguments(self.trial, self.folder), self.folder, fresh=self.fresh)
        )

    def finish(self) -> list[str]:
        """Run to the end, through what is killed on the way; return what went wrong."""
        kind, end = self.trial.kind, time.monotonic() + PATIENCE
        for _ in range(kind.agents or 1):
            self.start()
        while time.monotonic() < end:
            time.sleep(0.1)
            if kind.whom == "all" and self.killed() > self.cleared:
                agents.kill_all(self.folder, self.agents)
                self.cleared = self.killed()
            codes = {agent.pid: agent.code for agent in self.agents}
            new = [pid for pid, code in codes.items() if code not in (None, 0) and pid not in self.dead]
            for pid in new:
                self.dead.add(pid)
                if kind.back == "new agent":
                    self.start()
            if None in codes.values() or (new and kind.back == "new agent"):
                continue
            if kind.back != "again" or codes[self.agents[-1].pid] == 0:
                return self.unexpected(codes)
            while list(agents.processes(self.folder, self.agents)) and time.monotonic() < end:
                time.sleep(0.05)  # as SLURM and Kubernetes start nothing beside what is left of a job
            self.start()
        agents.kill_all(self.folder, self.agents)
        return [f"has not ended within {PATIENCE:g} s"]

    def killed(self) -> int:
        """Return how many kills have happened."""
        return sum((self.folder / f"kill-{number}").exists() for number in range(len(self.trial.kills)))

    def unexpected(self, codes: dict[int, int | None]) -> list[str]:
        """Return what is wrong with the exit codes of the agents: one was killed, at most."""
        ends = sorted(code for code in codes.values() if code is not None)
        killed = bool(self.trial.kind.whom != "worker" and self.trial.kills)
        ended = -9 if self.trial.kind.signal == "SIGKILL" else 1  # torchrun's own, after a signal
        wanted = sorted([ended] * killed + [0] * (len(ends) - killed))
        return [] if ends == wanted else [f"agents ended with {ends}"]

    def close(self) -> list[str]:
        """End what is left of the run, and return it."""
        end = time.monotonic() + 10
        while (left := list(agents.processes(self.folder, self.agents))) and time.monotonic() < end:
            time.sleep(0.05)
        agents.kill_all(self.folder, self.agents)
        return [f"left {len(left)} processes"] if left else []


def arguments(trial: Trial, folder: Path) -> list[str]:
    """Return the arguments of the trainer: ten steps, each of which is saved."""
    virtual = ["--virtual-ranks", str(VIRTUAL)] if trial.kind.back == "fewer" else []
    model = f"{SABOTEUR}:model"
    return [
        *("--data", "fake:50", "--batch-size", "12", "--epochs", "2", "--model", model, *virtual),
        *("--out", str(folder / "run"), "--resume", "auto", "--save-every", "1steps", "--log-every", "1"),
        *("--eval-batch", "2", "--save", trial.save),  # so that each rank evaluates
        *("--timeout", "8"),
        *trial.flags,
    ]


class Drill:
    """Trials, compared with undisturbed runs of the same ranks, which run once."""

    def __init__(self, folder: Path, *, fresh: bool) -> None:
        self.folder, self.fresh, self.number = folder, fresh, 0
        self.wholes: dict[tuple[int, bool], Path] = {}

    def run(self, trial: Trial) -> Result:
        """Run one trial; its folder stays if it did not hold."""
        whole = self.undisturbed(trial)
        self.number += 1
        run = Run(trial, self.folder / f"{self.number:03}", fresh=self.fresh)
        problems = [*run.finish(), *run.close()]
        happened = run.killed()
        problems += [] if problems else compared(run.folder / "run", whole, trial)
        if happened < len(trial.kills):
            problems.append("a kill did not happen")
        if not problems:
            seconds = _seconds(run.folder, len(trial.kills) - 1)
            shutil.rmtree(run.folder)
            return Result(trial, [], seconds, happened)
        return Result(trial, problems, None, happened)

    def undisturbed(self, trial: Trial) -> Path:
        """Return the folder of a run of the same ranks that nothing disturbed."""
        fewer = trial.kind.back == "fewer"
        key = (trial.ranks, fewer)
        if key not in self.wholes:
            kind = replace(UNDISTURBED, back="fewer" if fewer else "restart")
            place = self.folder / f"whole-{trial.ranks}-{fewer}"
            run = Run(Trial(kind, trial.ranks, "sync", (), trial.flags), place, fresh=False)
            problems = [*run.finish(), *run.close()]
            assert not problems, problems
            self.wholes[key] = run.folder / "run"
        return self.wholes[key]


def compared(found: Path, whole: Path, trial: Trial) -> list[str]:
    """Return what differs from the undisturbed run: files, bits of the last checkpoint, lines of the log."""
    names = {path.name for path in found.iterdir()}
    if names != FILES:
        return [f"files: {sorted(names ^ FILES)} left or missing"]
    differing = []
    for name in (BEST, LAST):
        try:
            both = [checkpoints.read(str(folder / name)) for folder in (whole, found)]
        except CkptToolError as error:
            return [error.message]
        differing += [f"{name}{entry}" for entry in different(*both)]
    logs = [_log(folder) for folder in (found, whole)]
    if trial.kind.back == "fewer":  # per rank, as of fewer ranks
        differing = [entry for entry in differing if not OF_RANKS.search(entry)]
        logs = [[_of_samples(line) for line in log] for log in logs]
    problems = [f"these differ: {', '.join(differing[:4])}"] if differing else []
    return problems + ["log.jsonl differs"] * (logs[0] != logs[1])


def _log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a log without times and memory, and without those on saves and signals."""
    lines = [json.loads(line) for line in (folder / run_folder.LOG).read_text().splitlines()]
    lines = [line for line in lines if "event" not in line]
    of_machine = re.compile("second|memory")
    return [{key: value for key, value in line.items() if not of_machine.search(key)} for line in lines]


def _of_samples(line: dict[str, Any]) -> dict[str, Any]:
    """Return what a line of the log says of samples and steps, the same on any number of ranks."""
    names = ("epoch", "step", "steps", "train_samples", "samples")
    return {key: value for key, value in line.items() if key in names}


def _seconds(folder: Path, kill: int) -> float | None:
    """Return the seconds from a kill to the first step after it."""
    marks = [folder / f"{name}-{kill}" for name in ("kill", "on")]
    if kill < 0 or not all(mark.exists() for mark in marks):
        return None
    return marks[1].stat().st_mtime - marks[0].stat().st_mtime
