"""`--spawn`: ranks of this machine started without torchrun, which end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from train import console

SPAWNED = "CKPTTOOL_SPAWNED"
"""The environment variable that tells a rank which process started it by `--spawn`."""

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def started_by_spawn() -> bool:
    """Return whether `--spawn` has started this rank."""
    return SPAWNED in os.environ


def spawn(script: str, arguments: Sequence[str], ranks: int) -> int:
    """Run a program on several ranks of this machine, as torchrun would.

    Returns:
        Its exit code: that of the rank that failed first, 128 + the signal if one was killed.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)  # until there are ranks, and the agent listens to signals
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
    if hasattr(options, "signals_to_handle"):  # else SIGUSR1 ends this process, and the ranks with it
        options.signals_to_handle += ",SIGUSR1"
    try:
        run.run(options)
    except ChildFailedError as error:
        index, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        console.note(f"error: rank {index} was killed by {signal.Signals(-failure.exitcode).name}")
        return 128 - int(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _end_at_once(number: int, _: object) -> NoReturn:
    """End this process. KeyboardInterrupt would be a traceback, or be lost, as in a callback of an import."""
    os.write(2, b"\ninterrupted\n")  # print may be at work already
    os._exit(128 + number)


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
