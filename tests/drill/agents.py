"""Agents of torchrun for the drill, and the processes that are theirs.

A program that imports torch takes some seconds to start. So agents are forks of a server that has imported
it, and their ranks forks of the agents: torch's own agent, rendezvous and environment, without the wait. With
`fresh` an agent is torchrun itself, which starts each rank as a new program.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_TRAINER = {
    "checkpoint": ("resume", "init_from"),
    "data": ("data_set",),
    "log": ("trackers",),
    "model": ("wrapping",),
    "run": ("report",),
    "trainer": ("trainer", "preflight", "virtual_ranks"),
}
PRELOADED = [
    *("torch", "torch._dynamo", "torch.distributed.run", "torch.utils.data", "train.main", "train.evaluate"),
    *(f"train.{room}.{name}" for room, names in OF_TRAINER.items() for name in names),
    __name__,
]
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
"""From linux/sched.h."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class Machine:
    """A network namespace in the place of a machine.

    Attributes:
        network: its name. The device that leads to other machines is called `wire`.
        lacks: a folder of other machines, which is empty and read-only here; None lacks none.
    """

    network: str
    lacks: Path | None = None

    def enter(self) -> None:
        """Move this process to the machine."""
        os.environ["GLOO_SOCKET_IFNAME"] = "wire"  # else gloo takes the address that the host's name has
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.network}") as file:
            if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if self.lacks:
            for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "ro", "none", str(self.lacks)]):
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
        settings = {"DRILL": str(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        if "--nnodes" in options:
            settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.popen: subprocess.Popen[bytes] | None = None
        if fresh:
            torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "train/main.py", *arguments]
            with log.open("wb") as file:
                self.popen = subprocess.Popen(
                    torchrun, cwd=ROOT, env={**os.environ, **settings}, stdout=file, stderr=file
                )
            self.pid = self.popen.pid
        else:
            self.process = CONTEXT.Process(
                target=_agent, args=(options, arguments, settings, str(log), machine)
            )
            self.process.start()
            self.pid = self.process.pid or 0

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal that ended it; None as long as it runs."""
        return self.popen.poll() if self.popen else self.process.exitcode


def _agent(
    options: list[str], arguments: list[str], settings: dict[str, str], log: str, machine: Machine | None
) -> None:
    """Run an agent as torchrun does, but for its ranks, which are forks."""
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    os.setsid()
    os.environ.update(settings)
    _write_to(log)
    if machine:
        machine.enter()
    config, _, _ = run.config_from_args(run.parse_args([*options, "train/main.py"]))
    config.start_method = "fork"
    elastic_launch(config, _rank)(arguments)


def _rank(arguments: list[str]) -> None:
    """Run the trainer as a program that has just started."""
    import torch

    from train import main
    from train.launch import program as launch

    torch.set_num_threads(1)  # as OMP_NUM_THREADS says, which was read when torch was imported
    launch.threads = lambda: None  # a fork's /proc does not show that its agent was given it
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # an agent's handlers are not the ranks'
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    launch.STARTED = time.monotonic()
    if code := main.main(arguments):
        launch.leave(code)


def store() -> tuple[multiprocessing.process.BaseProcess, int]:
    """Start the store at which several agents meet, in a process that no kill concerns; return its port."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_store, args=(theirs,), daemon=True)
    process.start()
    return process, ours.recv()


def _store(pipe: multiprocessing.connection.Connection) -> None:
    from torch.distributed import TCPStore

    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(held.port)
    signal.pause()


def spin() -> multiprocessing.process.BaseProcess:
    """Start a process that keeps a core busy."""
    process = CONTEXT.Process(target=_spin, daemon=True)
    process.start()
    return process


def _spin() -> None:
    while True:
        pass


def _write_to(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)


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
