"""How ranks start and end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from ckpttool.distributed.lost_rank import is_lost_rank
from ckpttool.distributed.place import given_rank, given_world_size, started_by_launcher
from ckpttool.errors import CheckFailed, CkptToolError, RanksDiffer

Job = TypeVar("Job")

PATIENCE = 5.0
"""Seconds that a rank waits before it repeats another rank's failure, so that that rank reports it first.

Torchrun ends the waiting ranks as soon as the failed one has exited, so under it no rank waits this long.
"""

SPAWNED = "CKPTTOOL_SPAWNED"
"""The environment variable that tells a rank which process started it by `--spawn`."""

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""

DEAD_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) ([^.\n]+)")
UNFINISHED = re.compile("Expected to have finished reduction in the prior iteration")
TIMED_OUT = re.compile(r"timed out waiting|operation timeout", re.IGNORECASE)


rank, world_size, started_by_torchrun = given_rank, given_world_size, started_by_launcher


def started_by_spawn() -> bool:
    """Return whether `--spawn` has started this rank."""
    return SPAWNED in os.environ


def make_deterministic() -> None:
    """Allow only algorithms that give the same bits each time. Call it before CUDA starts."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def spawn(script: str, arguments: Sequence[str], ranks: int) -> int:
    """Run a program on several ranks of this machine, as torchrun would.

    Returns:
        Its exit code: that of the rank that failed first, 128 + the signal if one was killed.
    """
    threads = max(1, (os.cpu_count() or 1) // ranks)
    # torchrun would set it to 1 and print a note.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ[SPAWNED] = str(os.getpid())
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun reports a failure with a traceback of this process; the failed rank has reported its own.
    logging.disable(logging.CRITICAL)
    options = run.parse_args(["--standalone", "--nproc-per-node", str(ranks), script, *arguments])
    try:
        run.run(options)
    except ChildFailedError as error:
        index, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        print(f"error: rank {index} was killed by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        return 128 - int(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def end_with_torchrun() -> None:
    """Let the kernel end this rank if torchrun exits without ending it, as after `kill -9`.

    Without this the rank would go on training or waiting unseen, and hold its GPU. Linux only. Not for other
    launchers, whose process may legitimately exit before the ranks.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # Of a launcher that has ended before, the kernel does not tell.
        if os.environ.get(SPAWNED, str(os.getppid())) != str(os.getppid()):
            os.kill(os.getpid(), signal.SIGTERM)


def run_program(prepare: Callable[[], Job], work: Callable[[Job], None], *, as_json: bool = False) -> int:
    """Run a program on this rank and return its exit code; an expected error is one line on stderr.

    Args:
        prepare: everything that a rank can refuse by itself. It fails on all ranks alike, before any
            process group starts, so rank 0 reports for all.
        work: what the ranks do together, with what `prepare` returned.
        as_json: also print an error as one JSON object on stdout.
    """
    end_with_torchrun()
    try:
        job = prepare()
    except CkptToolError as error:
        return complain(error, echo=rank() != 0, as_json=as_json)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    try:
        work(job)
    except CkptToolError as error:
        return complain(error, echo=_is_echo(error), as_json=as_json)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except RuntimeError as error:
        known = _known(error)
        if known is None:
            raise
        return complain(known, echo=is_lost_rank(error), as_json=as_json)
    return 0


def _known(error: RuntimeError) -> CheckFailed | None:
    """Return an error of torch, gloo or NCCL in our words, if it is known by its message, its only mark."""
    said = str(error)
    if is_lost_rank(error):
        return CheckFailed(f"rank {rank()}: lost the connection to another rank")
    if TIMED_OUT.search(said):
        return CheckFailed(f"rank {rank()}: no answer from another rank within --timeout")
    if dead := DEAD_WORKER.search(said):
        return CheckFailed(
            f"rank {rank()}: a process that loads data {dead[1]}",
            hint="out of memory? give fewer --workers or a smaller --batch-size",
        )
    if UNFINISHED.search(said):
        return CheckFailed(
            f"rank {rank()}: a parameter of the model did not affect the output in a pass, and ranks average "
            "the gradients of all parameters",
            hint="let every forward pass use it (times 0 if need be), or set requires_grad=False",
        )
    return None


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    """Report an interrupt on rank 0, with the program's own message; return the exit code."""
    if rank() == 0:
        print("\n" + "; ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr, flush=True)
    return 128 + signal.SIGINT


def _is_echo(error: CkptToolError) -> bool:
    """Return whether another rank reports this failure."""
    from ckpttool.distributed.collectives import RankFailed

    return isinstance(error, RankFailed) or (isinstance(error, RanksDiffer) and rank() != 0)


def leave(code: int) -> NoReturn:
    """End this process with an exit code: flush its output, and run no destructors.

    The work is done by now and the process group destroyed. Only the destructors of torch's C++ threads
    would still run, and on a busy machine they were seen to abort a rank that had done its work
    ("terminate called without an active exception"), which makes torchrun report a failure.
    """
    with contextlib.suppress(OSError):  # `say` has reported what could not be written
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def say(text: str) -> None:
    """Print a line at once.

    Raises:
        CheckFailed: stdout can't be written: the disk is full, or the reader has gone.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        raise CheckFailed(f"standard output: {(error.strerror or str(error)).lower()}") from error


def complain(error: CkptToolError, *, echo: bool = False, as_json: bool = False) -> int:
    """Print an error as one line on stderr, and a hint of several lines below it.

    Args:
        echo: wait first, because another rank reports it too.
        as_json: also print it as one JSON object on stdout.

    Returns:
        Its exit code.
    """
    if echo:
        time.sleep(PATIENCE)
    if os.environ.get("CKPTTOOL_DEBUG") == "1":
        traceback.print_exception(error)
    if as_json:
        body = {"kind": error.kind, "message": str(error), "hint": error.hint}
        with contextlib.suppress(OSError):  # it goes to stderr too
            print(json.dumps({"error": body}, indent=2), flush=True)
    message, hint = str(error).replace("\n", " "), error.hint or ""
    below = f"\n{hint}" if "\n" in hint else f" ({hint})" if hint else ""
    print(f"error: {message}{below}", file=sys.stderr, flush=True)
    return error.exit_code
