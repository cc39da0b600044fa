"""A program on one rank: its start, its signals and its end.

A handler of Python's runs only between two of its instructions, and a rank that waits for another one is not
there for a long time. So the handlers here do nothing, and a thread learns of each signal from the file
descriptor to which the interpreter writes its number at once (`signal.set_wakeup_fd`). It also ends the
process when `--grace` is over, and at the second SIGINT, whatever the main thread does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from ckpttool.core.words import counted, versioned
from ckpttool.distributed.group import Place, given_rank, started_by_launcher
from ckpttool.distributed.heartbeat import is_lost_rank, is_timeout
from ckpttool.distributed.observer import (
    SPAWNED,
    end_with_torchrun,
    environment_of,
    report_to_torchrun,
    usable_cores,
)
from ckpttool.errors import CheckFailed, CkptToolError, RanksDiffer, UsageFault, in_shell, install
from ckpttool.models import factory
from train import console
from train.config.sections import RanksConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # of a scheduler, a terminal, SLURM's warning

# Seconds in which another SIGINT is no second one: a terminal sends one to the launcher too, which sends it
# on to the ranks.
REPEATED = 2.0

WAKE = 0  # a byte that is no signal: something has changed that the thread should look at


class ToldToEnd(CkptToolError):
    """A signal has come during an evaluation, which may take longer than the grace."""

    kind = "told-to-end"


class Stop:
    """Whether this process was told to end. A context manager: inside, the signals do nothing else.

    Attributes:
        number: of the signal; 0 if none has come.
        since: when it came, by `time.monotonic`.
    """

    def __init__(self, grace: float, left_undone: Callable[[], str] = lambda: "") -> None:
        """Take the seconds from a signal to the end of the process, and what it then says of the run.

        Entering the block has an effect only in the main thread.
        """
        self.grace, self.number, self.since = grace, 0, 0.0
        self._left_undone = left_undone
        self._before: dict[int, Any] = {}
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._open = False

    def __enter__(self) -> Stop:
        global _active
        if threading.current_thread() is not threading.main_thread():
            return self
        if _active is not None:
            _active.__exit__()  # what listened while the run started has nothing to do any more
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._open, _active = True, self
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):  # None: installed by something other than Python
                self._before[number] = before
                signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        if not self._open:
            return
        self.restore()
        signal.set_wakeup_fd(self._fd_before)
        _active, self._open = None, False
        self._wake()
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def restore(self) -> None:
        """Give the signals back to the handlers from before the block."""
        for number, before in self._before.items():
            with contextlib.suppress(ValueError):  # in a process that another thread has forked
                signal.signal(number, before)

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else ""

    def seconds(self) -> float:
        return time.monotonic() - self.since

    def raise_if_told(self) -> None:
        if self.number:
            raise ToldToEnd(f"told to end by {self.name}")

    def heard(self, number: int, seconds: float) -> None:
        """Take over the signal that any rank has got, some seconds ago."""
        since = time.monotonic() - seconds
        self.since = min(since, self.since) if self.number else since
        self.number = number  # last: another thread takes it as a sign that `since` is set
        if self._open:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # there is something to read already
            self._writer.send(bytes([WAKE]))

    def _watch(self) -> None:
        while self._open:
            self._reader.settimeout(max(1e-3, self.grace - self.seconds()) if self.number else None)
            try:
                arrived = self._reader.recv(64)
            except TimeoutError:
                arrived = b""
            for number in arrived:
                if number in SIGNALS:
                    self._take(number)
            if self._open and self.number and self.seconds() >= self.grace:
                came = f"{self.name} came {self.seconds():.0f} s ago, and the run has not ended"
                self._end(1, f"error: --grace {self.grace:g}: {came}")

    def _take(self, number: int) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            os._exit(128 + number)  # the launcher was killed, and this signal is the kernel's: no one asks
        if not self.number:
            self.since = time.monotonic()
            self.number = number
        elif number == signal.SIGINT and (not started_by_launcher() or self.seconds() > REPEATED):
            self._end(128 + number, "\ninterrupted")

    def _end(self, code: int, why: str) -> None:
        """End the process at once. A file that is being written has no name yet; the next run removes it."""
        undone = self._left_undone()
        if undone:
            with contextlib.suppress(OSError):
                os.write(2, f"{why}; {undone}\n".encode())
        os._exit(code)


class Starting(Stop):
    """A context in which a signal ends the process at once, with one line on rank 0: nothing is trained yet.

    It ends where a `Stop` begins. A handler of Python's would have to wait for ranks that are late.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(0.0, lambda: "nothing more was trained" if rank == 0 else "")

    def _take(self, number: int) -> None:
        if self._launcher is not None and number == signal.SIGTERM:
            os._exit(128 + number)  # so a launcher ends ranks when another one has failed, and said why
        self._end(128 + number, f"ended by {signal.Signals(number).name} before the first step")


# ---- processes that are forked -----------------------------------------------------------------------------

_active: Stop | None = None
_mask: Any = None


def _before_fork() -> None:
    # A signal in a child that still has the descriptor would be taken for one of ours.
    global _mask
    if _active is not None:
        _mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_in_parent() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _after_in_child() -> None:
    global _active
    if _active is not None:
        signal.set_wakeup_fd(-1)
        _active.restore()
        _active = None
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# ---- start and end -----------------------------------------------------------------------------------


Job = TypeVar("Job")

STARTED = time.monotonic()

# Seconds that a rank waits before it repeats another rank's failure, so that that rank reports it first.
# Torchrun ends the waiting ranks as soon as the failed one has exited, so under it no rank waits this long.
PATIENCE = 5.0

DEAD_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) ([^.\n]+)")
UNFINISHED = re.compile("Expected to have finished reduction in the prior iteration")


def run_program(
    prepare: Callable[[], Job], work: Callable[[Job], int | None], *, as_json: bool = False
) -> int:
    """Run a program on this rank and return its exit code; an expected error is one line on stderr.

    Args:
        prepare: everything that a rank can refuse by itself. It fails in the same way on all ranks, before
            any process group starts, so rank 0 reports for all.
        work: what the ranks do together, with what `prepare` returned. Returns the exit code; None is 0.
        as_json: also print an error as one JSON object on stdout.
    """
    end_with_torchrun()
    is_prepared = False
    try:
        job = prepare()
        is_prepared = True
        return work(job) or 0
    except CkptToolError as error:
        echo = _is_echo(error) if is_prepared else given_rank() != 0
        return complain(error, echo=echo, as_json=as_json)
    except KeyboardInterrupt as interrupt:
        if given_rank() == 0:
            console.note("\n" + "; ".join(["interrupted", *map(str, interrupt.args)]))
        return 128 + signal.SIGINT
    except SystemExit as error:
        return complain(_left(error), as_json=as_json)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return complain(UsageFault("torch is not installed", hint=install("train")), as_json=as_json)
    except RuntimeError as error:
        known = _known(error) if is_prepared else None
        if known is None:
            raise
        return complain(known, echo=is_lost_rank(error), as_json=as_json)


def set_threads() -> None:
    """Let this machine's ranks share its cores, so that they don't wait for each other's threads."""
    import torch  # after the flags were checked

    number = threads()
    if number is not None:
        torch.set_num_threads(number)


def keep_freed_memory() -> None:
    """Make the allocator keep what a step frees: pages from the system cost some per cent of a step."""
    # glibc gives back less the larger the largest block is that it got from the system and gave back, up to
    # 32 MiB: mallopt(3), M_MMAP_THRESHOLD. A model whose own blocks are large comes to the same by itself.
    bytes(31 << 20)  # untouched: no page of it is ever there


def threads() -> int | None:
    """Return how many threads this rank should compute with; None if the user has said so."""
    given = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    if given and "TORCHELASTIC_RUN_ID" in os.environ and SPAWNED not in os.environ:
        # torchrun sets it to 1 for its ranks if it was started without.
        launcher = environment_of(os.getppid())
        given = [name for name in given if not launcher or name in launcher]
    return None if given else max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def keep_importable(*specs: str) -> None:
    """Put the folders of the user's code first on the import path for good, as Python does for a script.

    Its modules may be imported late, and in a process that loads data.
    """
    for where in (match["where"] for match in map(factory.FORM.fullmatch, specs) if match):
        if where not in ("torchvision", "folder", "fake", "tokens", "wds", "hf", "cifar10", "mnist"):
            folder = os.path.dirname(os.path.abspath(where)) if where.endswith(".py") else os.getcwd()
            if folder not in sys.path:
                sys.path.insert(0, folder)


@contextlib.contextmanager
def process_group(place: Place, config: RanksConfig) -> Iterator[None]:
    """Hold the process group, under a watch for ranks that hang; enter it with the data loaded."""
    from ckpttool.distributed import group, heartbeat
    from train.data import batches  # imports torch, which a command line that is refused need not wait for

    # What took this rank a while may take another one as long.
    patience = max(group.JOIN_TIMEOUT, config.timeout, time.monotonic() - STARTED)
    with (
        group.process_group(place, 2 * config.timeout, patience),  # the watch comes first, and names a rank
        batches.processes_ended(),  # outside the watch: nobody waits for a rank whose processes end slowly
        heartbeat.watch(config.timeout),
    ):
        yield


def _left(error: SystemExit) -> CheckFailed:
    """Return the error for user code that ends the process: the other ranks would wait for it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = f": {error.code}" if isinstance(error.code, str) else ""
    what = f"rank {given_rank()}: {frame.filename}:{frame.lineno} ended the process{text}"
    hint = "let code of --model, --data and --task raise an error instead of calling sys.exit"
    return CheckFailed(what, hint=hint)


def _known(error: RuntimeError) -> CheckFailed | None:
    """Return an error of torch, gloo or NCCL in our words, if it is known by its message, its only mark."""
    message, rank = str(error), given_rank()
    if is_lost_rank(error):
        return CheckFailed(f"rank {rank}: lost the connection to another rank")
    if is_timeout(error):
        return CheckFailed(f"rank {rank}: no answer from another rank within --timeout")
    if dead := DEAD_WORKER.search(message):
        hint = "out of memory? give fewer --workers or a smaller --batch-size"
        return CheckFailed(f"rank {rank}: a process that loads data {dead[1]}", hint=hint)
    if UNFINISHED.search(message):
        what = "a parameter of the model did not affect the output in a pass"
        why = "ranks average the gradients of all parameters"
        hint = "let every forward pass use it (times 0 if need be), or set requires_grad=False"
        return CheckFailed(f"rank {rank}: {what}, and {why}", hint=hint)
    return None


def _is_echo(error: CkptToolError) -> bool:
    """Return whether another rank reports this failure."""
    from ckpttool.distributed.collectives import RankFailed  # imports torch

    return isinstance(error, RankFailed) or (isinstance(error, RanksDiffer) and given_rank() != 0)


def leave(code: int) -> NoReturn:
    """End this process with an exit code: flush its output, and run no destructors."""
    # The work is done by now and the process group destroyed. Only the destructors of torch's C++ threads
    # would still run, and on a busy machine they were seen to abort a rank that had done its work
    # ("terminate called without an active exception"), which makes torchrun report a failure.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None: it was closed before the program began
            with contextlib.suppress(OSError):  # `console.say` has reported what could not be written
                stream.flush()
    os._exit(code)


def complain(error: CkptToolError, *, echo: bool = False, as_json: bool = False) -> int:
    """Print an error as one line on stderr, a hint of several lines below it; return its exit code.

    Args:
        echo: wait first, because another rank reports it too.
        as_json: also print it as one JSON object on stdout.
    """
    if echo:
        time.sleep(PATIENCE)
    if os.environ.get("CKPTTOOL_DEBUG") == "1":
        traceback.print_exception(error)
    if as_json:
        body = {"kind": error.kind, "message": error.message, "hint": in_shell(error.hint)}
        with contextlib.suppress(CheckFailed):  # it goes to stderr too
            console.say(json.dumps(versioned({"error": body}), indent=2))
    if error.kind in ("rank-lost", "reader-gone"):  # the watch has written it; there is nobody to tell
        return error.exit_code
    message, hint = error.message.replace("\n", " "), in_shell(error.hint) or ""
    below = f"\n{hint}" if "\n" in hint else f" ({hint})" if hint else ""
    console.note(f"error: {message}{below}")
    if not echo:
        report_to_torchrun(f"error: {message}{below}")
    return error.exit_code


# ---- --spawn: ranks of this machine started without torchrun -------------------------------------------


def spawn(script: str, arguments: Sequence[str], ranks: int) -> int:
    """Run a program on several ranks of this machine, as torchrun would, and return its exit code.

    That is the code of the rank that failed first, 128 + the signal if one was killed. The ranks end with
    this process.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)  # until there are ranks, and the agent listens to signals
    if "--json" not in arguments:
        with contextlib.suppress(CheckFailed):  # the ranks will say that nothing can be printed
            console.say(f"starting {counted(ranks, 'rank')} …")  # importing torch may take half a minute
    # torchrun would set it to 1 and print a note.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    os.environ[SPAWNED] = str(os.getpid())
    import logging

    # Imports torch.
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
    # KeyboardInterrupt would be a traceback, or be lost, as in a callback of an import.
    os.write(2, b"\ninterrupted\n")  # print may be at work already
    os._exit(128 + number)
