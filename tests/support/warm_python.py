"""Python programs run as forks of a process that has imported torch, which takes two seconds.

A fork has its own arguments, environment, working directory, standard streams and exit, as a program started
anew has. What it does not show is which modules a program imports: start those tests' programs anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.running import ROOT

IMPORTED = ["numpy", "torch", "safetensors.torch", "ckpttool.cli", "ckpttool"]

SERVER = """
import gc, importlib, json, os, runpy, socket, sys

channel = socket.socket(fileno=int(sys.argv[1]))
for name in sys.argv[2:]:
    importlib.import_module(name)
gc.freeze()  # what was imported is not looked through again at the end of every fork
while True:
    raw, streams, _, _ = socket.recv_fds(channel, 1 << 20, 3)
    if not raw:
        os._exit(0)  # the tests have ended
    child = os.fork()
    if child == 0:
        break
    for stream in streams:
        os.close(stream)
    channel.send(b"%d" % child)
    _, status = os.waitpid(child, 0)
    channel.send(b"%d" % os.waitstatus_to_exitcode(status))

channel.close()
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
request = json.loads(raw)
os.chdir(request["cwd"])
os.environ.clear()
os.environ.update(request["env"])
how, *sys.argv = request["arguments"]
if how == "-m":
    sys.path[0] = os.getcwd()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
elif how == "-c":
    code, sys.argv[0] = sys.argv[0], "-c"
    exec(code, {"__name__": "__main__"})
"""


class WarmPython:
    """Runs programs one after another, each in a fork; the process that is forked starts at the first."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[bytes] | None = None

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
        words = [str(argument) for argument in arguments]
        request = {"arguments": words, "cwd": str(cwd or os.getcwd()), "env": {**os.environ, **(env or {})}}
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            given.write(input)
            given.seek(0)
            streams = [given.fileno(), out.fileno() if stdout is None else stdout, err.fileno()]
            code = self._run(json.dumps(request).encode(), streams, timeout)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    def _run(self, request: bytes, streams: list[int], timeout: float) -> int:
        if self.server is None:
            self._start()
        self.channel.settimeout(90)  # the imports, where many programs run
        socket.send_fds(self.channel, [request], streams)
        child = int(self.channel.recv(99))
        self.channel.settimeout(timeout)
        try:
            return int(self.channel.recv(99))
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            self.close()
            raise

    def _start(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.server = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno()), *IMPORTED],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """End the process that is forked."""
        if self.server is not None:
            self.channel.close()
            self.server.wait()
            self.server = None
