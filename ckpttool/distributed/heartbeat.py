"""A heartbeat of each rank, which says who hangs and ends the job. Imports torch where it is used.

with process_group(), watch(timeout=300) as watched:
    for batch in watched.steps(loader):
        watched.phase("forward")
        ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import cast

from . import hangs
from .lost_rank import is_lost_rank, is_timeout
from .observer import Watch
from .pulse import Pulse

_current: Watch | None = None
_pulse: Pulse | None = None


def phase(name: str) -> None:
    """Note that this rank now does `name`, for the `watch` that is in force, if any."""
    if _current is not None:
        _current.phase(name)


def begin_step(number: int) -> None:
    """Note that this rank begins an optimizer step, for the `watch` that is in force, if any."""
    if _current is not None:
        _current.step = number


def progress() -> None:
    """Note that this rank has come forward within its phase, for the `watch` that is in force, if any."""
    if _current is not None:
        _current.marks += 1


def excuse(call: Callable[[], object]) -> None:
    """Have `call` called if the job ends because another rank has called `end_as_told`."""
    if _current is not None:
        _current.excuse = call


def end_as_told(signal: str) -> None:
    """Tell the other ranks that this process ends now, in the middle of its work, as a signal told it to.

    To be called in any thread just before the process ends.

    Args:
        signal: its name.
    """
    if _pulse is not None:
        _pulse.stop(hangs.TOLD, signal)


@contextlib.contextmanager
def watch(timeout: float = 300.0) -> Iterator[Watch]:
    """Watch the ranks of the process group during the block. If one hangs, say which, and end the job.

    A rank hangs if the others wait for it and it has done nothing for `timeout` seconds: it has entered no
    phase, and neither computed nor read or written. A rank that works, as in a long save or while a model is
    compiled, has ten times as long. Every rank then writes to stderr which rank it is, since when, in which
    phase, and with which Python stack; and each process ends with exit code 1, at most five seconds later.
    A rank that was killed is named at once. One that is slow is named in a warning, after 30 seconds or
    half of the timeout.

    All ranks enter and leave together. With one rank nothing is watched.

    Args:
        timeout: seconds; 0 watches nothing.

    Yields:
        What is told of phases and steps; `watched.steps(loader)` is enough.

    Raises:
        RankLost: a collective in the block failed because another rank was lost; names it and how it ended.
    """
    from . import collectives

    global _current, _pulse
    own = Watch(timeout)
    if not timeout or collectives.world_size() == 1:
        yield own
        return
    pulse = Pulse(own)
    before, _current, _pulse = (_current, _pulse), own, pulse
    end, cause = hangs.LEFT, cast("BaseException | str", "")
    try:
        yield own
    except BaseException as error:
        end, cause = hangs.FAILED, error
        if isinstance(error, RuntimeError) and (is_lost_rank(error) or is_timeout(error)):
            end = hangs.LOST
            if explained := pulse.explain(timed_out=is_timeout(error)):
                raise collectives.RankLost(explained) from error
        raise
    finally:
        _current, _pulse = before
        pulse.stop(end, cause)
