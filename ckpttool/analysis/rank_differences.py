"""The tensors that ranks should hold alike, and do not."""

from __future__ import annotations

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checksums import Checksums
from ..errors import RanksDiffer
from ..tensors.values import stream


def tensors_that_differ(checkpoint: Checkpoint) -> dict[str, RanksDiffer]:
    """Return the error of each tensor in which the files of ranks differ, by dotted name.

    Args:
        checkpoint: as `ckpttool.open_ranks` returns it; only what several ranks hold is read.

    Raises:
        Damaged: a file ends early, or bytes that differ do not match their checksum.
    """
    replicated = {*checkpoint.ranks.replicated} if checkpoint.ranks else set[str]()
    found: dict[str, RanksDiffer] = {}
    for name, tensor in checkpoint.tensors():
        if name in replicated:
            try:
                for _ in stream(tensor):
                    pass
            except RanksDiffer as fault:
                with Checksums(checkpoint, [(name, tensor.storage)]) as checksums:
                    checksums.finish()
                found[name] = fault
    return found
