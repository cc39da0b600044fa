"""What backends say when another rank has gone, or does not answer."""

from __future__ import annotations

import re

LOST_PEER = re.compile(r"connection (closed|reset) by peer|broken pipe|remote process exited", re.IGNORECASE)
TIMED_OUT = re.compile(r"timed out waiting|operation timeout", re.IGNORECASE)


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error of gloo or NCCL says that another rank has gone, by its message."""
    return isinstance(error, RuntimeError) and bool(LOST_PEER.search(str(error)))


def is_timeout(error: BaseException) -> bool:
    """Return whether an error of gloo or NCCL says that another rank has not answered, by its message."""
    return isinstance(error, RuntimeError) and bool(TIMED_OUT.search(str(error)))
