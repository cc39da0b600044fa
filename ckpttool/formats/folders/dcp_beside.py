"""What frameworks keep beside the files of a DCP folder: Lightning's `meta.pt`, Megatron's `common.pt`."""

from __future__ import annotations

import os
from dataclasses import replace

from ...checkpoint.checkpoint import Checkpoint
from ...errors import Damaged
from ...files.open_source import open_source_descriptor
from ...inert_pickle.values import remade
from ...tensors.ref import Source
from ..pytorch import zip as torch_zip

META = "meta.pt"
"""All of Lightning's checkpoint that is no tensor: its keys stand beside those of the folder."""

COMMON = "common.pt"
"""Megatron's arguments and counters, which are left out."""


def with_beside(checkpoint: Checkpoint, folder: str) -> Checkpoint:
    """Return the checkpoint of a DCP folder with what lies beside it; what is left out is named.

    Args:
        checkpoint: the DCP folder's.
        folder: its path.

    Raises:
        Damaged: `meta.pt` is malformed, or has a key that the folder has.
        Unsupported: `meta.pt` is in another format.
    """
    if os.path.exists(os.path.join(folder, COMMON)):
        checkpoint = replace(checkpoint, unread=(*checkpoint.unread, f"{COMMON} (not read)"))
    path = os.path.join(folder, META)
    if not os.path.exists(path) or not isinstance(checkpoint.tree, dict):
        return checkpoint
    source = Source(path, open_source_descriptor(path))
    meta = torch_zip.read(source) if torch_zip.sniff(source.read(0, min(source.size, 4))) else None
    if meta is None or not isinstance(meta.tree, dict):
        return replace(checkpoint, unread=(*checkpoint.unread, f"{META} (not a dict that torch.save wrote)"))
    if twice := checkpoint.tree.keys() & meta.tree.keys():
        raise Damaged(path, f"has '{str(twice.pop())[:80]}', and so has the DCP folder that it is in")
    return replace(
        checkpoint,
        tree=remade(checkpoint.tree, [*checkpoint.tree.items(), *meta.tree.items()]),
        shards=(*checkpoint.shards, source),
        names=checkpoint.names | meta.names,
    )
