"""Deltas applied to a base: nothing counts before the base and what comes of it have their digests."""

from __future__ import annotations

from collections.abc import Sequence

from ...checkpoint.checkpoint import Checkpoint
from ...errors import Damaged
from ...files.copying import Progress
from .digests import digests_of
from .header import read_header
from .reading import agree, wrong_base


def require_digests(
    base: Checkpoint, deltas: Sequence[Checkpoint], made: Checkpoint, progress: Progress | None = None
) -> None:
    """Compare a base, and what deltas made of it, with the digests that these state. Reads both whole.

    Args:
        base: the first base.
        deltas: the files, the first one applied first; `joined` has compared those between.
        made: what they make of it.
        progress: called with the number of bytes after each piece.

    Raises:
        Refused: the base is not that of the first delta.
        Damaged: what comes of it is not what the last delta was made from.
    """
    step = progress or (lambda count: None)
    first, last = read_header(deltas[0]), read_header(deltas[-1])
    found = digests_of(base, whole=first.base.digests.whole is not None, progress=step)
    if not agree(first.base.digests, found):
        raise wrong_base(base.path, deltas[0].path, first.base, found.shown)
    if digests_of(made, whole=True, progress=step) != last.new:
        what = "does not make the checkpoint that it was made from: its digest differs"
        raise Damaged(deltas[-1].path, what, hint="copy the delta again")
