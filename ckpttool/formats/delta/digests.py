"""The digests by which a delta knows its base, and what it makes of it (docs/deltas.md)."""

from __future__ import annotations

from collections.abc import Mapping

from ...checkpoint import full_json
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.digested import with_parts
from ...errors import Refused
from ...files.copying import Progress
from ...files.digest import digests
from ...tensors.ref import TensorRef
from .header import Digests


def digests_of(
    checkpoint: Checkpoint,
    *,
    whole: bool,
    storages: Mapping[str, TensorRef] | None = None,
    progress: Progress,
) -> Digests:
    """Return the digests of a checkpoint, whose bytes are read once.

    Args:
        checkpoint: it is read whole, or only its state.
        whole: also of all storages; always so where no state is found, or it has no digest.
        storages: those, if they are known already.
        progress: called with the number of bytes after each piece.
    """
    groups: list[Mapping[str, TensorRef]] = []
    state = _state_of(checkpoint)
    if state is not None:
        groups.append(state)
    if whole or state is None:
        if storages is None:
            storages = full_json.encode_entry(checkpoint.path, checkpoint.tree, checkpoint.protocol).tensors
        groups.append(storages)
    values = digests(groups, progress)
    of_state = values[0] if state is not None else None
    return Digests(of_state, values[-1] if whole or state is None else None)


def _state_of(checkpoint: Checkpoint) -> Mapping[str, TensorRef] | None:
    if (state := checkpoint.found_state()) is None:
        return None
    try:
        return with_parts(checkpoint.path, state)
    except Refused:
        return None
