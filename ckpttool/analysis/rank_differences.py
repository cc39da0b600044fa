"""The tensors that ranks should hold alike, and do not."""

from __future__ import annotations

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checksums import Checksums
from ..errors import RanksDiffer
from ..tensors.values import stream


def tensors_that_differ(checkpoint: Checkpoint, *, verify: bool = True) -> dict[str, RanksDiffer]:
    """Return the error of each tensor in which the files of ranks differ, by dotted name.

    Args:
        checkpoint: as `ckpttool.open_ranks` returns it; only what several ranks hold is read.
        verify: compare the checksums of what differs, as damage is another error than ranks that differ.

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
                if verify:
                    with Checksums(checkpoint, [(name, tensor.storage)]) as checksums:
                        checksums.finish()
                found[name] = fault
    return found
