"""What backends say when another rank has gone."""

from __future__ import annotations

import re

LOST_PEER = re.compile(r"connection (closed|reset) by peer|broken pipe|remote process exited", re.IGNORECASE)


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error of gloo or NCCL says that another rank has gone, by its message."""
    return isinstance(error, RuntimeError) and bool(LOST_PEER.search(str(error)))
