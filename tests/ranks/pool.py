"""A pool of ranks, kept alive for a whole test session.

Importing torch takes two seconds. So one server process imports it, each rank is a fork of that server, and a
pool starts its ranks once, in a gloo process group on the CPU, and runs case after case in them. A case is an
importable function `case(rank, world_size, *arguments)`; what it returns on each rank comes back in a list.

A rank that dies, or a case that takes too long, fails that one test, with what each rank has said; the ranks
are ended by their own process ids and started anew for the next case. A case has less time than a rank that
waits for a lost one takes, so a test need not look at the clock.

Between two cases ranks are stopped. Each group of gloo's has a thread that wakes a hundred times a second,
which in thirty idle ranks was a tenth of all that the tests took. Groups that a case makes stay, as torch
knows equal meshes by the groups of the first one; so ranks that have many are replaced.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.util
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from ckpttool.distributed.observer import end_with_parent

PRELOADED = ["torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor"]
PRELOADED += ["torch.distributed.run", "torch.utils.data", "numpy", "safetensors.torch", "ckpttool.core.cli"]
PRELOADED += ["tests.ranks.runs", "train.evaluate", "train.trainer.preflight"]
PRELOADED += ["isal.isal_zlib", "numpy.ma", "torch.utils.serialization", "pytest", "hypothesis"]
"""What the server imports: torch, what the first DDP or DTensor would import in the time of a case, what the
command line does, the programs of train/, what they import in each run, and what the modules of cases do."""

START_TIMEOUT = 90.0
MOST_GROUPS = 12
SHOWN = 4000


class CaseFailed(Exception):
    """A case failed on some rank; the message says how it ended on each."""


class Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection
    log: str


class Pool:
    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks: list[Rank] = []
        self.folder = ""
        self.is_idle = False  # all ranks wait for a case: not before the start, nor after one was interrupted
        # Before multiprocessing ends its daemons by SIGTERM, which one that is stopped does not take.
        multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def run(self, case: Callable[..., Any], *arguments: Any, timeout: float = 30.0) -> list[Any]:
        """What the case returns on each rank."""
        if not self.is_idle:
            self.close()
            self._start()
        self.is_idle = False
        self._send(signal.SIGCONT)
        job = pickle.dumps((case, arguments))
        with contextlib.suppress(BrokenPipeError):  # a rank that died between two cases is found below
            for rank in self.ranks:
                rank.pipe.send_bytes(job)
        answers = self._collect(timeout)
        if any(answer[0] != "returned" for answer in answers):
            message = self._message(answers, timeout)
            self.close()  # ranks that were thrown off course may be left in the middle of a collective
            raise CaseFailed(message)
        if any(groups > MOST_GROUPS for _, (_, groups) in answers):
            self.close()
        self._send(signal.SIGSTOP)
        self.is_idle = bool(self.ranks)
        return [value for _, (value, _) in answers]

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            if pid := rank.process.pid:  # 0 would be our own group
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        for rank in self.ranks:
            rank.pipe.close()
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
        self.ranks = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for number in range(self.size):
            ours, theirs = context.Pipe()
            log = os.path.join(self.folder, f"{number}.log")
            process = context.Process(
                target=_serve, args=(number, self.size, self.folder, log, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.ranks.append(Rank(process, ours, log))
        answers = self._collect(START_TIMEOUT)
        if any(answer[0] != "returned" for answer in answers):
            message = self._message(answers, START_TIMEOUT)
            self.close()
            raise CaseFailed(f"the ranks did not start\n{message}")

    def _collect(self, timeout: float) -> list[tuple[str, Any]]:
        """Each rank's ("returned", value), ("raised", text), ("died", exit code) or ("hung", stacks)."""
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size:
            open_pipes = {rank.pipe: n for n, rank in enumerate(self.ranks) if n not in answers}
            ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = open_pipes[pipe]  # type: ignore[index]
                try:
                    answers[number] = pickle.loads(self.ranks[number].pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.ranks[number].process.join(5)
                    answers[number] = ("died", self.ranks[number].process.exitcode)
            if any(answer[0] in ("raised", "died") for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + 2)  # the others now wait in vain
        hung = [number for number in range(self.size) if number not in answers]
        for number in hung:
            _dump_stacks(self.ranks[number].process)
        if hung:
            time.sleep(0.3)
        return [answers.get(number, ("hung", None)) for number in range(self.size)]

    def _message(self, answers: list[tuple[str, Any]], timeout: float) -> str:
        parts = []
        for number, (end, what) in enumerate(answers):
            log = _tail(self.ranks[number].log)
            said = {
                "returned": "returned",
                "raised": f"raised\n{what}",
                "died": f"died with exit code {what}\n{log}",
                "hung": f"did not answer (the case has {timeout:g} s)\n{log}",
            }
            parts.append(f"rank {number} {said[end]}")
        return "\n".join(parts)


def _dump_stacks(process: BaseProcess) -> None:
    if process.pid and process.is_alive():
        os.kill(process.pid, signal.SIGUSR2)


def _tail(log: str) -> str:
    try:
        with open(log, errors="replace") as file:
            return file.read()[-SHOWN:]
    except OSError:
        return ""


def _serve(rank: int, size: int, folder: str, log: str, pipe: Connection) -> None:
    """Join the group, then run the cases that arrive until the pipe is closed."""
    import faulthandler
    import traceback

    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    end_with_parent(signal.SIGKILL)  # one that is stopped would not see that the pipe is closed
    faulthandler.enable(file=2)  # a rank that crashes leaves its stacks in the message
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    gc.freeze()  # a collection need not pass over all that was imported before
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    pipe.send_bytes(pickle.dumps(("returned", os.getpid())))
    with contextlib.suppress(EOFError):
        while True:
            job = pipe.recv_bytes()
            try:
                case, arguments = pickle.loads(job)
                value = case(rank, size, *arguments)
                answer = pickle.dumps(("returned", (value, dist.get_pg_count())))
            except BaseException:
                answer = pickle.dumps(("raised", traceback.format_exc()))
            pipe.send_bytes(answer)
    os._exit(0)  # the group's threads may still wait for ranks that are gone
