"""A process without threads, in whose forks `ckpttool` runs: nothing has to be imported, and no lock is held.

Run as a program it reads a request in JSON from each line of stdin, and answers on stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.support.running import ROOT

# Seconds that a command may take: an upload is given up after 14, and this machine may be slow.
LONGEST = 30.0
IMPORTED = (
    *("ckpttool.core.cli.program", "ckpttool.inspecting.page", "ckpttool.ranks.command"),
    *("ckpttool.inspecting.summary", "ckpttool.core.formats.saving", "ckpttool.ranks.merge_trees"),
    *("ckpttool.core.formats.shards", "ckpttool.core.checkpoint.keys", "ckpttool.mapping.layout"),
    *("ckpttool.core.checkpoint.selection", "ckpttool.core.files.resuming", "ckpttool.core.remote.source"),
    *(
        "ckpttool.core.remote.web",
        "ckpttool.core.remote.hub",
        "ckpttool.core.remote.hub",
        "ckpttool.core.remote.buckets",
    ),
    *("urllib3", "obstore.store", "huggingface_hub.hf_api"),
)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int  # minus a signal
    out: str
    err: str
    seconds: float
    hangs: bool  # whether it took too long, and was killed

    @property
    def json(self) -> Any:
        """What it printed with --json; {} if that is none."""
        try:
            return json.loads(self.out)
        except ValueError:
            return {}


class Runner:
    """Runs commands, one after another; a context manager."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start the process, with these variables beside those that have nothing to do with stores."""
        prefixes = ("HF_", "AWS_", "GOOGLE_", "AZURE_", "CKPTTOOL_", "HUGGING", "HTTP", "http", "NO_PROXY")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
        words = [sys.executable, "-m", "tests.fault.remote.runner"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            words, cwd=ROOT, env={**kept, **env}, stdin=pipe, stdout=pipe, text=True
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, words: Sequence[str], folder: Path, hole: str = "", longest: float = LONGEST) -> Ended:
        """Run `ckpttool WORDS` in a folder, for so many seconds; a name of HOLES breaks something in it."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([[*words], f"{folder}", hole, longest]) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


def _forked(words: list[str], folder: str, hole: str, longest: float) -> Ended:
    streams = [os.memfd_create(name) for name in ("out", "err")]
    started, hangs = time.monotonic(), False
    pid = os.fork()
    if pid == 0:
        _be_child(words, folder, hole, streams)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > started + longest and not hangs:
            hangs = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    seconds = time.monotonic() - started
    out, err = (os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace") for fd in streams)
    for fd in streams:
        os.close(fd)
    return Ended(os.waitstatus_to_exitcode(ended[1]), out, err, seconds, hangs)


def _be_child(words: list[str], folder: str, hole: str, streams: list[int]) -> NoReturn:
    try:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        os.chdir(folder)
        os.environ["TMPDIR"] = os.path.join(folder, "tmp")
        if hole:
            from tests.fault.remote.holes import HOLES

            HOLES[hole]()
        from ckpttool.core import cli

        sys.argv = ["ckpttool", *words]
        cli.main()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(asdict(_forked(*json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
