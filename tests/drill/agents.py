"""Agents of torchrun for the drill, and the processes that are theirs.

A program that imports torch takes some seconds to start. So agents are forks of a server that has imported
it, and their ranks forks of the agents: torch's own agent, rendezvous and environment, without the wait. With
`fresh` an agent is torchrun itself, which starts each rank as a new program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ranks.forked import Program

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
"""From linux/sched.h."""

ON_A_MACHINE = """
import sys
from torch.distributed.run import main
from tests.drill.agents import Machine

network, lacks, *arguments = sys.argv[1:]
Machine(network, lacks).enter()
main(arguments)
"""


@dataclass(frozen=True)
class Machine:
    """A network namespace in the place of a machine.

    Attributes:
        network: its name. The device that leads to other machines is called `wire`.
        lacks: a folder of other machines, which is empty and read-only here; empty lacks none.
    """

    network: str
    lacks: str = ""

    def enter(self) -> None:
        """Move this process to the machine."""
        os.environ["GLOO_SOCKET_IFNAME"] = "wire"  # else gloo takes the address that the host's name has
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.network}") as file:
            if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if self.lacks:
            for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "ro", "none", self.lacks]):
                subprocess.run(["mount", *mount], check=True)


class Agent:
    """An agent with its ranks, started at once. Its output is in `log`."""

    def __init__(
        self,
        options: list[str],
        arguments: list[str],
        folder: Path,
        *,
        fresh: bool = False,
        machine: Machine | None = None,
    ) -> None:
        log = self.log = folder / f"agent-{time.monotonic_ns()}.log"
        env = {**os.environ, "DRILL": str(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        if "--nnodes" in options:
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        torchrun = TORCHRUN
        if machine:
            torchrun = [sys.executable, "-c", ON_A_MACHINE, machine.network, machine.lacks]
        command = [*torchrun, *options, "train/main.py", *arguments]
        with log.open("wb") as file:
            self.process: subprocess.Popen[bytes] | Program
            if fresh:
                given = {"cwd": ROOT, "env": env, "stdout": file, "stderr": file}
                self.process = subprocess.Popen(command, **given, start_new_session=True)
            else:
                self.process = Program(command, ROOT, env, stdout=file.fileno(), stderr=file.fileno())
        self.pid = self.process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal that ended it; None as long as it runs."""
        return self.process.poll()


def spin() -> subprocess.Popen[bytes]:
    """Start a process that keeps a core busy."""
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    return subprocess.Popen([sys.executable, "-c", code])


def processes(folder: Path, agents: list[Agent]) -> Iterator[int]:
    """Yield the processes of a run that are alive: in an agent's session, or with the run's environment."""
    sessions, mark = {agent.pid for agent in agents}, f"DRILL={folder}\0".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
            state, _, _, session = stat[stat.rindex(")") + 2 :].split()[:4]
            environment = Path(entry.path, "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if state != "Z" and (int(session) in sessions or mark in environment):
            yield int(entry.name)


def kill_all(folder: Path, agents: list[Agent], seconds: float = 20.0) -> None:
    """Kill every process of a run, and wait for their end."""
    end = time.monotonic() + seconds
    while (left := list(processes(folder, agents))) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for agent in agents:
        agent.process.poll()
