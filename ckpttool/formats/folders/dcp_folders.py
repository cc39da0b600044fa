"""DCP folders that lie together in one, as accelerate saves model and optimizer.

It writes `pytorch_model_fsdp_0/` and `optimizer_0/`, whose keys are `model.…` and `optimizer.…`, and beside
them what is no tensor.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from ...checkpoint.checkpoint import Checkpoint
from ...errors import Damaged
from ...files.open_source import open_source_descriptor
from ...files.suggestions import names_in
from ...tensors.ref import Source
from . import dcp

TOGETHER = re.compile(r"(?:pytorch_model|model|optimizer)(?:_fsdp)?(?:_\d+)?")
"""Names of DCP folders that are parts of one checkpoint."""

BESIDE = re.compile(r"random_states_\d+\.pkl|scheduler(_\d+)?\.bin|scaler\.pt|custom_checkpoint_\d+\.pkl")
"""What else of a run lies beside them, and is left out."""


def read_together(folder: str) -> Checkpoint | None:
    """Return the DCP folders in a folder as one checkpoint; None if there are none that belong together.

    Raises:
        Damaged: two of them hold the same key; or as `dcp.read` raises.
        Unsupported: as `dcp.read` raises.
    """
    inside = names_in(folder)
    names = [name for name in inside if os.path.exists(os.path.join(folder, name, dcp.METADATA))]
    if not names or not all(map(TOGETHER.fullmatch, names)):
        return None
    parts = [_read(os.path.join(folder, name)) for name in names]
    tree: dict[object, object] = {}
    for part in parts:
        tree = _joined(tree, part.tree, part.path)
    telling = Source(folder, os.dup(parts[0].source.fd))
    telling.size = 0  # its bytes are those of the first folder's metadata, which counts itself
    return replace(
        parts[0],
        source=telling,
        tree=tree,
        shards=tuple(source for part in parts for source in (part.source, *part.shards)),
        unread=tuple(f"{name} (not read)" for name in inside if BESIDE.fullmatch(name)),
        names=frozenset().union(*(part.names for part in parts)),
    )


def with_ranks(together: Checkpoint, ranked: Checkpoint) -> Checkpoint:
    """Return DCP folders and the files of ranks beside them as one checkpoint.

    accelerate writes the model so with `LOCAL_STATE_DICT`, and only the optimizer as DCP.

    Args:
        together: what `read_together` returned.
        ranked: the files of the same folder; a state alone is the model.

    Raises:
        Damaged: both hold the same key.
    """
    whole = ranked.tree
    if isinstance(whole, dict) and not {"model", "optimizer"} & whole.keys():
        whole = {"model": whole}
    return replace(
        ranked,
        tree=_joined(dict(together.tree), whole, ranked.path) if isinstance(together.tree, dict) else whole,
        shards=(*ranked.shards, *together.shards),
        unread=(*ranked.unread, *together.unread),
        names=ranked.names | together.names,
    )


def _joined(tree: dict[object, object], more: object, path: str) -> dict[object, object]:
    """Return two trees as one, the model first."""
    assert isinstance(more, dict)
    if twice := tree.keys() & more.keys():
        raise Damaged(path, f"has '{str(twice.pop())[:80]}', and so has another folder in it or beside it")
    joined = {**tree, **more}
    return {key: joined[key] for key in sorted(joined, key=lambda key: key != "model")}


def _read(folder: str) -> Checkpoint:
    return dcp.read(Source(folder, open_source_descriptor(os.path.join(folder, dcp.METADATA))))
