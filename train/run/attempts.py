"""How often a step has failed: counted in `--out`, over starts, so that a run is not restarted for ever.

While rank 0 trains, attempts.json says which step it is in. A run that ends well, or by a signal in good
order, removes it; one that a rank leaves as `--grace` is over, or by a second Ctrl-C, takes the step back.
Else the next start finds the step that failed there, also if rank 0 was killed. After the third failure of
one step in a row it refuses to go on, as another start would end in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator

from ckpttool.errors import CheckFailed
from ckpttool.files.failures import naming
from train.config.training import TrainConfig

FILE = "attempts.json"
TRIES = 3
WIDTH = 12
"""Digits of the step, which is overwritten in place."""


@contextlib.contextmanager
def counted(folder: str, config: TrainConfig, rank: int) -> Iterator[Callable[[int], None]]:
    """Count this start until the block ends; refuse it if the last three have failed at one step.

    Other flags than before begin a new count, as they may mend what failed.

    Args:
        folder: of the run; only rank 0 touches it.
        config: of the run.
        rank: this one.

    Yields:
        A function to call with the number of each step, from 1, before it is taken; it costs a microsecond.
            With 0 before a process is ended on purpose, as by the second Ctrl-C: then no step has failed.

    Raises:
        CheckFailed: a step has failed three times in a row.
        FileError: the file can't be written or removed.
    """
    if rank != 0:
        yield lambda _: None
        return
    path, flags = os.path.join(folder, FILE), _digest(config)
    failed = _failed(path, flags)
    if len(failed) == TRIES and max(failed) - min(failed) <= 1:  # rank 0 may be a step behind the failed rank
        raise CheckFailed(
            f"step {max(failed)} has failed {TRIES} times in a row, and is not tried again",
            hint=f"the output of those starts says why; rm {path} tries it again, and so does another flag",
        )
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        head = json.dumps({"flags": flags, "failed": failed})[:-1]
        start = os.write(fd, f'{head}, "step": {0:{WIDTH}}}}\n'.encode()) - WIDTH - 2

    over = False

    def begin(step: int) -> None:
        nonlocal over
        over = over or step == 0  # another thread says so, while this one may begin a step
        with contextlib.suppress(OSError):  # the next save reports a disk that fails
            if not over:
                os.pwrite(fd, f"{step:{WIDTH}}".encode(), start)
                return
            with open(path, "r+b") as file:  # maybe after the block, where the file tells of a failure
                os.pwrite(file.fileno(), f"{0:{WIDTH}}".encode(), start)

    try:
        yield begin
    except KeyboardInterrupt:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    with naming(path, "removed"):
        os.unlink(path)


def _digest(config: TrainConfig) -> str:
    """Return a digest of the flags that say how a run trains."""
    flags = {name: value for name, value in config.plain().items() if name not in ("resume", "force")}
    return hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:16]


def _failed(path: str, flags: str) -> list[int]:
    """Return the steps at which the last starts with these flags have failed, at most three.

    A start that ended before its first step, or while it wrote the file, is not counted.
    """
    try:
        with open(path, "rb") as file:
            found = json.load(file)
        steps = [*found["failed"], found["step"]] if found["flags"] == flags else []
        return [int(step) for step in steps if step > 0][-TRIES:]
    except (OSError, ValueError, TypeError, KeyError):
        return []
