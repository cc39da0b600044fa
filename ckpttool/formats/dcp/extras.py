"""What frameworks add to a DCP folder: Lightning's `meta.pt`, Megatron's `common.pt`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...errors import Damaged
from ...files.open_source import open_source_descriptor
from ...inert_pickle.values import remade
from ...tensors.ref import Source
from ..pytorch import zip as torch_zip

# All of Lightning's checkpoint that is no tensor: its keys join those of the folder.
META = "meta.pt"

# The key by which Lightning's Trainer knows its own checkpoints; those of Fabric lack it.
OF_TRAINER = "pytorch-lightning_version"

# Megatron's arguments and counters, which are left out.
COMMON = "common.pt"


def not_read(name: str) -> str:
    """Return how a file that is left out is named in `Checkpoint.unread`."""
    return f"{name} (not read)"


def with_extras(checkpoint: Checkpoint, folder: str) -> Checkpoint:
    """Return the checkpoint of a DCP folder with these files' contents; what is left out is named."""
    # That of Lightning's Trainer gets the form of its whole checkpoints, which the Trainer loads on any
    # number of ranks: source, lightning/pytorch/utilities/consolidate_checkpoint.py.
    if os.path.exists(os.path.join(folder, COMMON)):
        checkpoint = replace(checkpoint, unread=(*checkpoint.unread, not_read(COMMON)))
    path = os.path.join(folder, META)
    if not os.path.exists(path) or not isinstance(checkpoint.tree, dict):
        return checkpoint
    source = Source(path, open_source_descriptor(path))
    meta = torch_zip.read(source) if torch_zip.sniff(source.read(0, min(source.size, 4))) else None
    if meta is None or not isinstance(meta.tree, dict):
        return replace(checkpoint, unread=(*checkpoint.unread, f"{META} (not a dict that torch.save wrote)"))
    tree = _as_trainer(checkpoint.tree) if OF_TRAINER in meta.tree else checkpoint.tree
    if twice := tree.keys() & meta.tree.keys():
        raise Damaged(path, f"has '{str(twice.pop())[:80]}', and so has the DCP folder that it is in")
    return replace(
        checkpoint,
        tree=remade(checkpoint.tree, [*tree.items(), *meta.tree.items()]),
        shards=(*checkpoint.shards, source),
        names=checkpoint.names | meta.names,
    )


def _as_trainer(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the entries of a Trainer's folder under the names that they have in its whole checkpoints."""
    entries = dict(tree)
    if "model" in entries and "state_dict" not in entries:
        entries["state_dict"] = entries.pop("model")
    names = list(itertools.takewhile(entries.__contains__, map("optimizer_{}".format, itertools.count())))
    if names and "optimizer_states" not in entries:
        entries["optimizer_states"] = [entries.pop(name) for name in names]
    return entries
