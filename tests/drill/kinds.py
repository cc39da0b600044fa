"""The kinds of kills of the drill, as a table."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

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
    """

    kind: Kind
    ranks: int
    save: str
    kills: tuple[dict[str, Any], ...]


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
