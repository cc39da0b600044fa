"""DCP folders that lie together in one, as accelerate saves model and optimizer.

It writes `pytorch_model_fsdp_0/` and `optimizer_0/`, whose keys are `model.…` and `optimizer.…`, and beside
them what is no tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from ...checkpoint.checkpoint import Checkpoint
from ...errors import Damaged
from ...files.open_source import names_in, open_source_descriptor
from ...tensors.ref import Source
from . import reading as dcp
from .beside import not_read

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
        assert isinstance(part.tree, dict)
        if twice := tree.keys() & part.tree.keys():
            raise Damaged(part.path, f"has '{str(twice.pop())[:80]}', and so has another folder beside it")
        tree = joined(tree, part.tree)
    telling = Source(folder, os.dup(parts[0].source.fd))
    telling.size = 0  # its bytes are those of the first folder's metadata, which counts itself
    return replace(
        parts[0],
        source=telling,
        tree=tree,
        shards=tuple(source for part in parts for source in (part.source, *part.shards)),
        unread=tuple(not_read(name) for name in inside if BESIDE.fullmatch(name)),
        names=frozenset().union(*(part.names for part in parts)),
    )


def read_own(folder: str) -> Checkpoint | None:
    """Return what a folder holds as DCP itself; None if it has no metadata.

    Raises:
        Damaged, Unsupported: as `dcp.read` raises.
    """
    return _read(folder) if os.path.exists(os.path.join(folder, dcp.METADATA)) else None


def joined(tree: Mapping[object, object], more: Mapping[object, object]) -> dict[object, object]:
    """Return two trees without a key in common as one, the model first."""
    both = {**tree, **more}
    return {key: both[key] for key in sorted(both, key=lambda key: key != "model")}


def _read(folder: str) -> Checkpoint:
    return dcp.read(Source(folder, open_source_descriptor(os.path.join(folder, dcp.METADATA))))
