"""Where a thread of this process is: its stack, and whether it waits in a collective. Needs no torch."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType

DEBUGGERS = {"pdb", "bdb", "ipdb", "pudb"}


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_debugged(frame: FrameType) -> bool:
    """Return whether a person looks at the thread in a debugger."""
    return any(each.f_globals.get("__name__") in DEBUGGERS for each in _outwards(frame))


def shown(frame: FrameType) -> str:
    """Return the innermost calls, without those that DDP and modules put between a model and its layers."""
    inner = ("torch.nn.modules.module", "torch.nn.parallel.distributed")
    frames = [
        each for each in _outwards(frame) if each is frame or each.f_globals.get("__name__") not in inner
    ]
    lines = [line for each in reversed(frames[:8]) for line in traceback.format_stack(each, limit=1)]
    return "".join(lines)[-4000:]


def waits(frame: FrameType) -> bool:
    """Return whether a thread is in a collective: in a call of torch.distributed, of DDP, or in a backward
    pass that runs no Python and so only computes or waits for the reduction."""
    name = str(frame.f_globals.get("__name__"))
    return name.startswith(("torch.distributed.", "torch.nn.parallel.distributed", "torch.autograd.graph"))
