"""What the `metadata.pkl` of a torch_checkpointing folder says: a pickle of plain values, never run.

For each tensor of an item that can be resharded: the shape and type of the whole, and where the piece of each
rank lies in it; and for each item and rank the file. Version 1.0 has one list for all items.
Source: torch_checkpointing 0.1.1, `distributed_metadata.py`, `metadata_manager.py`, `checkpoint_layout.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.checkpoint.checkpoint import not_read
from ..core.checkpoint.special_tensors import attributes
from ..core.inert_pickle.reader import PickleFault, read_pickle
from ..core.remote.places import is_plain, open_source_at
from ..core.system import join
from ..core.tensors.ref import Source, is_count
from ..errors import Damaged, Unsupported
from .pieces import MAX_RANKS

METADATA = "metadata.pkl"
ITEM = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,7})\.pt")

# What is read of the ways in which an item may be serialised.
READ = {"TorchSerialization", "SafetensorsSerialization"}

HINT_SAVE = "copy the folder again, with the metadata.pkl that was saved with its files"

# What is said of a rank's share of each tensor, by dotted name.
Shares = dict[str, Mapping[Any, Any]]


@dataclass(slots=True)
class ItemShares:
    """What `metadata.pkl` says of an item's tensors, by dotted name."""

    owners: dict[str, frozenset[int]] = field(default_factory=dict)  # the ranks that have a share
    shared: list[tuple[str, frozenset[int], Mapping[Any, Any]]] = field(default_factory=list)
    alone: dict[int, Shares] = field(default_factory=dict)  # what is said of one rank only

    def of_rank(self, rank: int) -> Shares:
        """Return what is said of the tensors of which a rank has a share."""
        return self.alone.get(rank, {}) | {name: said for name, ranks, said in self.shared if rank in ranks}

    @property
    def needed(self) -> frozenset[int]:
        """The ranks that have a share of the item: others need no file of it."""
        return frozenset().union(*{id(ranks): ranks for ranks in self.owners.values()}.values())


@dataclass(slots=True)
class ItemMetadata:
    """What `metadata.pkl` says: of each item the tensors by dotted name, and of each file whose it is."""

    source: Source
    world_size: int
    items: dict[str, ItemShares] = field(default_factory=dict)
    files: dict[str, tuple[str, int]] = field(default_factory=dict)  # path -> item and rank
    left: list[str] = field(default_factory=list)  # files of items that are not read
    _of_ranks: dict[int, frozenset[int]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The file's name, for messages."""
        return self.source.path

    def malformed(self, where: str) -> Damaged:
        return Damaged(self.path, f"its {where} is not as torch_checkpointing writes it", hint=HINT_SAVE)

    def add(self, item: object, listed: object, layouts: Mapping[Any, Any]) -> None:
        """Take in what is said of one item."""
        if not isinstance(item, str) or not isinstance(listed, dict):
            raise self.malformed("list of items")
        made = self.items.setdefault(item, ItemShares())
        for key, groups in listed.items():
            try:
                steps = json.loads(key)
            except (TypeError, ValueError, RecursionError):
                steps = None
            name = ".".join(map(str, steps)) if isinstance(steps, list) else ""
            if not isinstance(steps, list) or not isinstance(groups, list) or name in made.owners:
                raise self.malformed(f"entry {str(key)[:80]} of '{item[:80]}'")
            for group in groups:
                ranks, said = self._group(item, name, attributes(group))
                made.owners[name] = made.owners[name] | ranks if name in made.owners else ranks
                if len(ranks) == 1:
                    made.alone.setdefault(min(ranks), {})[name] = said
                else:
                    made.shared.append((name, ranks, said))
        for rank in range(self.world_size):
            self._add_file(item, rank, layouts.get(rank, layouts.get(str(rank))))

    def _group(
        self, item: str, name: str, group: Mapping[Any, Any]
    ) -> tuple[frozenset[int], Mapping[Any, Any]]:
        ranks, said = group.get("ranks"), group.get("sharding_metadata")
        if not isinstance(ranks, tuple | list) or not isinstance(said, dict):
            raise self.malformed(f"entry of '{item[:80]}.{name[:80]}'")
        if id(ranks) not in self._of_ranks:  # many tensors share one list
            if not all(map(is_count, ranks)) or max(ranks, default=0) >= self.world_size:
                raise self.malformed(f"list of the ranks, of {self.world_size}, of '{item[:80]}.{name[:80]}'")
            self._of_ranks[id(ranks)] = frozenset(ranks)
        return self._of_ranks[id(ranks)], said

    def _add_file(self, item: str, rank: int, layout: object) -> None:
        said = attributes(layout)
        name = said.get("file_path", f"{item}_{rank}.pt")
        kind = attributes(said.get("serialization_format")).get("type", "TorchSerialization")
        folder = os.path.dirname(self.path)
        if not isinstance(name, str) or not is_plain(folder, name):
            raise Damaged(self.path, f"names a file outside its folder: {str(name)[:80]!r}")
        if kind not in READ:
            self.left.append(not_read(name))
        elif self.files.setdefault(path := join(folder, name), (item, rank)) != (item, rank):
            raise Damaged(self.path, f"names {os.path.basename(path)} for two items or ranks", hint=HINT_SAVE)

    def owner(self, path: str) -> tuple[str, int] | None:
        """Return the item and the rank of a file; of items without metadata its name says them."""
        named = ITEM.fullmatch(os.path.basename(path))
        return self.files.get(path) or ((named["item"], int(named["rank"])) if named else None)


def read_metadata(folder: str, *, is_sure: bool) -> ItemMetadata | None:
    """Return what a `metadata.pkl` says; None for one of something else, unless files of items lie by it."""
    path = join(folder, METADATA)
    source = open_source_at(path)
    if source.size > 1 << 30:
        raise Unsupported(path, "is metadata of more than 1 GB")
    try:
        pickle = read_pickle(source.read(0, source.size))
    except PickleFault as fault:
        if is_sure:
            raise Damaged(path, str(fault), hint=HINT_SAVE) from None
        return None
    tree = attributes(pickle.value)
    listed, size = tree.get("metadata"), tree.get("world_size")
    if not isinstance(listed, dict) and not is_sure:
        return None
    if pickle.names:
        named = min(map(str, pickle.names))
        what = f"names {named[:80]}, and torch_checkpointing writes plain values alone"
        raise Damaged(path, f"{what}: to unpickle it could run that", hint=HINT_SAVE)
    if not is_count(size) or not 0 < size <= MAX_RANKS or not isinstance(listed, dict):
        raise Damaged(path, "is not what torch_checkpointing writes beside files of ranks", hint=HINT_SAVE)
    saved = ItemMetadata(source, size)
    for item, tensors, layouts in _items(saved, tree, listed):
        saved.add(item, tensors, layouts)
    return saved


def _items(
    saved: ItemMetadata, tree: Mapping[Any, Any], listed: Mapping[Any, Any]
) -> Iterator[tuple[object, object, Mapping[Any, Any]]]:
    """Yield each item with its tensors and its files by rank."""
    version = tree.get("version", "1.0")
    if version == "2.0":
        for item, said in listed.items():
            fields = attributes(said)
            layouts = attributes(fields.get("rank_to_layout_info"))
            yield item, fields.get("nested_path_to_metadata"), layouts
    elif version == "1.0":  # one list of all items' tensors, whose names begin with the item
        items: dict[object, dict[str, object]] = {}
        for key, groups in listed.items():
            try:
                item, *steps = json.loads(key)
            except (TypeError, ValueError, RecursionError):
                raise saved.malformed("name of a tensor") from None
            items.setdefault(item, {})[json.dumps(steps)] = groups
        files = attributes(tree.get("rank_to_layout_info_mappings"))
        for item, tensors in items.items():
            yield item, tensors, {rank: attributes(of_rank).get(item) for rank, of_rank in files.items()}
    else:
        hint = "a newer ckpttool may read it; or save it with torch_checkpointing 0.1"
        raise Unsupported(saved.path, f"is of version {str(version)[:20]!r}, and 2.0 is read", hint=hint)
