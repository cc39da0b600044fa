"""A program on one rank: how it runs, says what it has to say, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ckpttool.distributed.group import given_rank, given_world_size, started_by_launcher
from ckpttool.distributed.heartbeat import is_lost_rank, is_timeout
from ckpttool.errors import CheckFailed, CkptToolError, RanksDiffer
from train import console
from train.launch import spawn as spawning

if TYPE_CHECKING:
    from ckpttool.distributed.group import Place
    from train.config.shared import RanksConfig

Job = TypeVar("Job")

STARTED = time.monotonic()

PATIENCE = 5.0
"""Seconds that a rank waits before it repeats another rank's failure, so that that rank reports it first.

Torchrun ends the waiting ranks as soon as the failed one has exited, so under it no rank waits this long.
"""

DEAD_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) ([^.\n]+)")
UNFINISHED = re.compile("Expected to have finished reduction in the prior iteration")


rank, world_size, started_by_torchrun = given_rank, given_world_size, started_by_launcher


def run_program(
    prepare: Callable[[], Job], work: Callable[[Job], int | None], *, as_json: bool = False
) -> int:
    """Run a program on this rank and return its exit code; an expected error is one line on stderr.

    Args:
        prepare: everything that a rank can refuse by itself. It fails on all ranks alike, before any
            process group starts, so rank 0 reports for all.
        work: what the ranks do together, with what `prepare` returned. Returns the exit code; None is 0.
        as_json: also print an error as one JSON object on stdout.
    """
    spawning.end_with_torchrun()
    try:
        job = prepare()
    except CkptToolError as error:
        return complain(error, echo=rank() != 0, as_json=as_json)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except SystemExit as error:
        return complain(_left(error), as_json=as_json)
    try:
        return work(job) or 0
    except CkptToolError as error:
        return complain(error, echo=_is_echo(error), as_json=as_json)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except SystemExit as error:
        return complain(_left(error), as_json=as_json)
    except RuntimeError as error:
        known = _known(error)
        if known is None:
            raise
        return complain(known, echo=is_lost_rank(error), as_json=as_json)


@contextlib.contextmanager
def process_group(place: Place, config: RanksConfig) -> Iterator[None]:
    """Hold the process group of a program, under a watch for ranks that hang; enter it with the data loaded.

    What took this rank a while may take another one as long, so it waits at least for that time. Processes
    that load data end before the group does.
    """
    from ckpttool.distributed import group, heartbeat
    from train.data import batches as loading

    took = time.monotonic() - STARTED
    patience = max(config.join_timeout, took)
    with (
        group.process_group(place, config.timeout, patience),
        loading.processes_ended(),  # outside the watch: nobody waits for a rank whose processes end slowly
        heartbeat.watch(config.hang_timeout),
    ):
        yield


def _left(error: SystemExit) -> CheckFailed:
    """Return the error for code of the user's that ends the process: the other ranks would wait for it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = f": {error.code}" if isinstance(error.code, str) else ""
    return CheckFailed(
        f"rank {rank()}: {frame.filename}:{frame.lineno} ended the process{text}",
        hint="let code of --model, --data and --task raise an error instead of calling sys.exit",
    )


def _known(error: RuntimeError) -> CheckFailed | None:
    """Return an error of torch, gloo or NCCL in our words, if it is known by its message, its only mark."""
    said = str(error)
    if is_lost_rank(error):
        return CheckFailed(f"rank {rank()}: lost the connection to another rank")
    if is_timeout(error):
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
        console.note("\n" + "; ".join(["interrupted", *map(str, interrupt.args)]))
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
    with contextlib.suppress(OSError):  # `console.say` has reported what could not be written
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


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
        with contextlib.suppress(CheckFailed):  # it goes to stderr too
            console.say(json.dumps({"error": body}, indent=2))
    if error.kind == "rank-lost":
        return error.exit_code  # the watch has written it
    message, hint = str(error).replace("\n", " "), error.hint or ""
    below = f"\n{hint}" if "\n" in hint else f" ({hint})" if hint else ""
    console.note(f"error: {message}{below}")
    return error.exit_code
