"""Python programs as forks of a server that has imported torch, which takes seconds in each new process.

Such a program has its own arguments, environment, working directory, streams, session and exit. What it
starts with `sys.executable`, as torchrun its ranks, is a fork of it in turn, with itself as the parent; all
else it starts as usual. What a fork can't show is what a program imports, and what OMP_NUM_THREADS does at
the start of a process: run those anew.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import gc
import io
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction, resource_tracker
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.ranks.pool import PRELOADED

_path: list[str] = []


class WarmPython:
    """Runs programs one after another, each to its end."""

    def run(
        self,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: bytes = b"",
        stdout: int | None = None,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `python -m MODULE …` or `python -c CODE …`; captures stderr, and stdout unless it is given.

        Args:
            arguments: those of Python.
            env: variables beside those of this process.
            stdout: a descriptor.
        """
        command, environment = [sys.executable, *map(str, arguments)], {**os.environ, **(env or {})}
        with contextlib.ExitStack() as files:
            given, out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            given.write(input)
            given.seek(0)
            to = {"stdout": out.fileno() if stdout is None else stdout, "stderr": err.fileno()}
            program = Program(command, cwd or Path.cwd(), environment, stdin=given.fileno(), **to)
            try:
                code = program.wait(timeout)
            finally:
                program.kill()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())


class Program:
    """A program that runs in a session of its own, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        """Start it.

        Args:
            command: `sys.executable`, and `FILE …`, `-m MODULE …` or `-c CODE …`.
            cwd, env: its working directory, and its whole environment.
            stdin, stdout, stderr: descriptors; without one, stdin is empty, and the others are pipes to read.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.args = list(command)
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        with contextlib.ExitStack() as ours:
            streams = [os.open(os.devnull, os.O_RDONLY) if stdin is None else os.dup(stdin)]
            for name, fd in (("stdout", stdout), ("stderr", stderr)):
                if fd is None:
                    reader, writer = os.pipe()
                    setattr(self, name, os.fdopen(reader, encoding="utf-8", errors="backslashreplace"))
                streams.append(writer if fd is None else os.dup(fd))
            for fd in streams:
                ours.callback(os.close, fd)
            given = self.args[1:], str(cwd), dict(env), [_Stream(fd) for fd in streams], _usual_path()
            self._process = context.Process(target=_live, args=given)
            self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that has killed it; None as long as it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what was written to both pipes until nobody can write any more, and wait for its end."""
        end = time.monotonic() + (1e6 if timeout is None else timeout)
        with ThreadPoolExecutor(2) as threads:
            try:
                reads = [threads.submit(one.read) if one else None for one in (self.stdout, self.stderr)]
                out, err = (read.result(max(0.0, end - time.monotonic())) if read else "" for read in reads)
                self.wait(max(1.0, end - time.monotonic()))
                for pipe in filter(None, (self.stdout, self.stderr)):
                    pipe.close()
            except (TimeoutError, concurrent.futures.TimeoutError, subprocess.TimeoutExpired) as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)  # who has the pipes open keeps the threads waiting
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from error
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM, if it has not ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _usual_path() -> list[str]:
    """Return where a program looks for modules, beside its own folder and PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    return list(json.loads(subprocess.check_output([sys.executable, "-c", code], env=env)))


class _Stream:
    """A descriptor on its way to a fork, where it arrives as a number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (reduction.DupFd(self.fd),)


def _arrived(inherited: Any) -> int:
    return int(inherited.detach())


class Fork:
    """A program that another one has started with `sys.executable`; what torch's agent uses of a Popen."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        assert args[0] == sys.executable, args
        self.args = args
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setpgid(0, 0)  # torch kills the group; a drill finds a run's ranks by its agent's session
            for number, file in ((1, stdout), (2, stderr)):
                if file is not None:
                    os.dup2(file.fileno(), number)
            _become(args[1:], env)

    def poll(self) -> int | None:
        """Return the exit code, or None as long as it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise `subprocess.TimeoutExpired`."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return code


def _live(arguments: list[str], cwd: str, env: dict[str, str], streams: list[int], path: list[str]) -> None:
    """Run a program in a fork of the server."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    subprocess_handler.Popen = Fork  # type: ignore[misc, assignment]
    # For a log that nobody keeps it looks up lines of source in all modules, which takes most of a second.
    dynamic_rendezvous.get_method_name = lambda: "no_caller_name"
    global _path
    _path = path
    os.setsid()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.chdir(cwd)
    multiprocessing.set_start_method(None, force=True)
    _become(arguments, env)


def _become(arguments: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run a program in this process, which is a fork, and end it as an interpreter would."""
    import torch

    gc.freeze()  # a collection need not pass over all that was imported before
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = (
            False  # torch takes its operators out of its tables, and a fork copies what it changes
        )
    signal.set_wakeup_fd(-1)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0, closefd=False)
    at_once = "-u" in arguments or "PYTHONUNBUFFERED" in env
    sys.stdout = io.TextIOWrapper(
        os.fdopen(1, "wb", 0 if at_once else -1, closefd=False), write_through=at_once
    )
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    code = _run([argument for argument in arguments if argument != "-u"], env)
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError as error:  # noqa: PERF203 - one of two
            code = 120
            os.write(2, f"Exception ignored while flushing {stream.name}: {error}\n".encode())
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _run(arguments: list[str], env: Mapping[str, str]) -> int:
    """Run a file, a module or code as the main program; return the exit code."""
    how, *sys.argv = arguments
    beside = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path = ["" if how == "-c" else os.getcwd(), *beside, *_path]
    try:
        if how == "-m":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "'[a-z.]+' found in sys.modules")
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            code, sys.argv[0] = sys.argv[0], "-c"
            exec(code, {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(how))
            runpy.run_path(how, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
