"""The digest of a checkpoint's state, of whose storages the digests are known already (docs/deltas.md)."""

from __future__ import annotations

from collections.abc import Mapping

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.digested import with_parts
from ...errors import Refused
from ...files.digest import digest_of, tensor_digests
from ...files.pieces import Progress
from ...tensors.ref import TensorRef


def digest_of_state(
    checkpoint: Checkpoint, storages: Mapping[str, TensorRef], values: Mapping[str, str], progress: Progress
) -> str | None:
    """Return the digest of a checkpoint's state; None where it has none, or it can't be said which.

    Args:
        checkpoint: of what is known nothing is read again.
        storages: its storages, as tensors by name.
        values: the digests of these, by the same names.
        progress: called with the number of bytes after each piece that is read.
    """
    state = _state_of(checkpoint)
    if state is None:
        return None
    of_storage = {id(tensor.storage): values[name] for name, tensor in storages.items()}
    wholes = {name: each for name, each in state.items() if _is_whole(each)}
    known = {
        name: of_storage[id(each.storage)] for name, each in wholes.items() if id(each.storage) in of_storage
    }
    others = {each.view: (name, each) for name, each in state.items() if name not in known}
    read = tensor_digests(dict(others.values()), progress)
    of_view = {state[name].view: value.decode() for name, value in read}
    known |= {name: of_view[each.view] for name, each in state.items() if name not in known}
    return digest_of(state, known)


def _is_whole(tensor: TensorRef) -> bool:
    return tensor.is_stretch and tensor.nbytes == tensor.storage.nbytes


def _state_of(checkpoint: Checkpoint) -> Mapping[str, TensorRef] | None:
    if (state := checkpoint.found_state()) is None:
        return None
    try:
        return with_parts(checkpoint.path, state)
    except Refused:
        return None
