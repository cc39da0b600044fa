"""How ranks are started, form a process group, and end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ckpttool.errors import CkptToolError, RanksDiffer, UsageFault

if TYPE_CHECKING:
    import torch

Job = TypeVar("Job")

PATIENCE = 5.0
"""Seconds that a rank which only echoes another's failure leaves it to speak.

Torchrun ends the waiting ranks as soon as the one that spoke is gone, so nobody waits this long under it.
"""

PR_SET_PDEATHSIG = 1
"""The number in linux/prctl.h."""

LOST_PEER = re.compile(r"connection (closed|reset) by peer|broken pipe|remote process exited", re.IGNORECASE)
TIMED_OUT = re.compile(r"timed out waiting|operation timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks."""

    rank: int
    world_size: int
    backend: str
    device: torch.device


def rank() -> int:
    """This process's rank as torchrun gives it, 0 for a process of its own; needs no torch."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def find_place(backend: str) -> Place:
    """Backend and device: NCCL when each rank of this machine can have its own GPU, else gloo on the CPU.

    Raises:
        UsageFault: `--backend nccl` without enough GPUs.
    """
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto":
        backend = "nccl" if gpus >= wanted else "gloo"
    if backend == "gloo":
        return Place(rank(), world_size(), "gloo", torch.device("cpu"))
    if gpus < wanted:
        raise UsageFault(
            f"--backend nccl: {wanted} rank{'s' * (wanted != 1)} on this machine, which has {gpus} usable "
            f"GPU{'s' * (gpus != 1)}",
            hint="start fewer ranks, or give --backend gloo",
        )
    return Place(rank(), world_size(), "nccl", torch.device("cuda", local_rank))


def make_deterministic() -> None:
    """Only algorithms that give the same bits each time; before CUDA starts."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def process_group(place: Place, timeout: float) -> Iterator[None]:
    """The default process group, destroyed on every way out.

    A single process gets one too (its store lives in memory: no port, no network), so that DDP and its
    `module.` keys are the same however a run was started.
    """
    import torch
    import torch.distributed as dist

    options: dict[str, object] = {"timeout": timedelta(seconds=timeout)}
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        options["device_id"] = place.device
    if not started_by_torchrun():
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        try:
            dist.init_process_group(place.backend, **options)
        except (RuntimeError, ValueError) as error:
            raise _failed(f"rank {place.rank} did not find the others: {error}") from error
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # which hold the model that holds the group
        raise
    finally:
        # DDP keeps the group alive, the group its threads, and a cycle of references (in a model, in hooks)
        # DDP. A thread that wants the interpreter while that shuts down ends the process by SIGABRT.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def spawn(script: str, arguments: Sequence[str], ranks: int) -> int:
    """Starts the program again on `ranks` ranks of this machine, as torchrun would; returns its exit code."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # unset, torchrun sets it to 1 and says so
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Its report of a failure is a traceback of this process; the rank that failed has told its own.
    logging.disable(logging.CRITICAL)
    options = run.parse_args(["--standalone", "--nproc-per-node", str(ranks), script, *arguments])
    try:
        run.run(options)
    except ChildFailedError as error:
        index, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        print(f"error: rank {index} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
        return 128 - int(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def end_with_torchrun() -> None:
    """Has the kernel end this rank when torchrun is gone without having ended it, as after `kill -9`.

    It would train on, or wait, with nobody to see it, and hold its GPU. Linux. Not for other launchers, whose
    process may rightly be gone before the ranks.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_program(prepare: Callable[[], Job], work: Callable[[Job], None], *, as_json: bool = False) -> int:
    """Runs a program on this rank and returns its exit code; an error on purpose is one line on stderr.

    Args:
        prepare: everything that one rank can refuse by itself. It fails on all ranks alike, before any
            process group starts, so rank 0 speaks for all.
        work: what the ranks do together, with what `prepare` returned.
        as_json: say an error as one JSON object on stdout too.
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
    except RuntimeError as error:  # gloo and NCCL say it in words only
        if LOST_PEER.search(str(error)):
            lost = _failed(f"rank {rank()}: another rank went away")
            return complain(lost, echo=True, as_json=as_json)
        if TIMED_OUT.search(str(error)):
            late = _failed(f"rank {rank()}: no word from another rank within --timeout")
            return complain(late, as_json=as_json)
        raise
    return 0


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    """Says so on rank 0, with what the program wants to be said of it."""
    if rank() == 0:
        print("\n" + "; ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr, flush=True)
    return 128 + signal.SIGINT


def _is_echo(error: CkptToolError) -> bool:
    """Whether another rank tells this failure."""
    from ckpttool.ranks import RankFailed

    return isinstance(error, RankFailed) or (isinstance(error, RanksDiffer) and rank() != 0)


def _failed(message: str) -> CkptToolError:
    error = CkptToolError(message)
    error.exit_code = 1
    return error


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code, its output flushed, and nothing torn down.

    All is over by now and the process group destroyed. What would still run are the destructors of torch's
    C++ threads, and on a busy machine they were seen to abort a rank that had done its work ("terminate
    called without an active exception"), which makes torchrun report a failure.
    """
    with contextlib.suppress(OSError):  # what could not be written has been told by `say`
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def say(text: str) -> None:
    """A line on stdout, at once. Raises CkptToolError where that can't be: a full disk, a reader gone."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise _failed(f"standard output: {(error.strerror or str(error)).lower()}") from error


def complain(error: CkptToolError, *, echo: bool = False, as_json: bool = False) -> int:
    """Says an error in one line on stderr and returns its exit code."""
    if echo:
        time.sleep(PATIENCE)
    if os.environ.get("CKPTTOOL_DEBUG") == "1":
        traceback.print_exception(error)
    if as_json:
        body = {"kind": error.kind, "message": str(error), "hint": error.hint}
        with contextlib.suppress(OSError):  # it is told on stderr too
            print(json.dumps({"error": body}, indent=2), flush=True)
    hint = f" ({error.hint})" if error.hint else ""
    print(f"error: {error}{hint}".replace("\n", " "), file=sys.stderr, flush=True)
    return error.exit_code
