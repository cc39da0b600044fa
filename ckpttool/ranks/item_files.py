"""Folders of torch_checkpointing, torchtitan's newer backend: a file for each item and rank.

Rank R's share of an item lies in `ITEM_R.pt`, or where `metadata.pkl` says, also as safetensors. In a `.pt`
the pieces are DTensors, which say themselves where they lie; in safetensors they are plain, and the metadata
says it. A save is staged beside its place, as `tmp_NAME`, and renamed once all ranks have written.
Source: torch_checkpointing 0.1.1, `checkpoint_writer.py`, `dtensor_metadata.py`, `default_metadata.py`.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.checkpoint.checkpoint import HINT, Checkpoint, Ranks
from ..core.checkpoint.dotted_names import dotted
from ..core.checkpoint.optimizer_view import GROUPS
from ..core.checkpoint.special_tensors import attributes, shape_of
from ..core.formats import safetensors
from ..core.inert_pickle.values import remade, tensor_of
from ..core.remote.places import exists, is_folder, names_in
from ..core.system import join
from ..core.tensors.ref import DTYPES, DType, TensorRef, contiguous_stride, count_of, is_count
from ..core.tensors.values import Index
from ..errors import Damaged, Unreadable
from .dtensor_files import largest, rank_in
from .item_metadata import HINT_SAVE, ITEM, METADATA, ItemMetadata, read_metadata
from .merge_trees import merged, step_of
from .pieces import Candidates, RankFile, RankFiles, Take, Wholes, in_order, require_rank, whole_of
from .sharded_values import DTENSOR, Mesh, ShardedValue, ShardedValues, WorkBound, unless_sharded

NAME, STAGED = "torch-checkpointing", "tmp_"

# The types of sharding metadata: of a DTensor, and of another tensor that says itself where it lies.
OF_DTENSOR, OF_BOXES = "DTensorShardingMetadata", "default_tensor_v1"

# What torch calls a placement that is called otherwise here.
NAMES = {"StridedShard": "_StridedShard"}


def candidates(folder: str) -> Candidates:
    """Return the files of all items and ranks, if there is a `metadata.pkl` that tells of them."""
    names = names_in(folder)
    items = _items_among(names)
    if METADATA not in names or (saved := read_metadata(folder, is_sure=bool(items))) is None:
        return Candidates([])
    require_finished(folder)
    there = {path for path in saved.files if os.path.dirname(path) != folder.rstrip("/") and exists(path)}
    listed = {join(folder, name) for name in names}
    unnamed = [path for path in (join(folder, name) for name in items) if path not in saved.files]
    return Candidates([*(path for path in saved.files if path in listed | there), *unnamed], (saved.source,))


def _items_among(names: Sequence[str]) -> list[str]:
    return [name for name in names if ITEM.fullmatch(name) and not rank_in(name)]


def require_finished(folder: str) -> None:
    """Refuse a folder in which a save is staged until all ranks have written their files."""
    name = os.path.basename(folder.rstrip("/"))
    if name.startswith(STAGED) and _items_among(names_in(folder)):
        final = shlex.quote(join(os.path.dirname(folder.rstrip("/")), name.removeprefix(STAGED)))
        what = f"is where torch_checkpointing stages {name.removeprefix(STAGED)}: the save did not finish"
        hint = f"take the checkpoint before it; if every rank had finished: mv {shlex.quote(folder)} {final}"
        raise Unreadable(folder, what, hint=hint)


def read(path: str, files: Sequence[Checkpoint], take: Take) -> Checkpoint | None:
    """Return the files of all ranks as one checkpoint, items by name; None without a `metadata.pkl`."""
    folder = path if is_folder(path) else os.path.dirname(path) or "."
    saved = read_metadata(folder, is_sure=False) if exists(join(folder, METADATA)) else None
    if saved is None:
        return None
    groups, nbytes, meshes = dict[str, list[RankFile]](), Counter[int](), list[Mesh]()
    for file in files:
        item, rank = _owner(saved, file)
        pieces = _Pieces(saved, file, item, rank)
        groups.setdefault(item, []).append(
            RankFile(file.source, pieces.placed().tree, rank, saved.world_size)
        )
        meshes += pieces.meshes
        nbytes[rank] += pieces.nbytes
    if lacking := [item for item, said in saved.items.items() if said.owners and item not in groups]:
        raise Damaged(path, f"has no file of '{lacking[0][:80]}', which {METADATA} lists", hint=HINT)
    require_rank(path, take.rank, nbytes)
    wholes = Wholes(path, world_size=saved.world_size, take_rank=take.rank, left=saved.left)
    runs = {item: _run(saved, item, of_item) for item, of_item in groups.items()}
    tree = {
        item: _keyed(
            merged(replace(wholes, missing=run.missing), run.files, (item,), common=item not in saved.items)
        )
        for item, run in runs.items()
    }
    ranks = Ranks(
        "torch_checkpointing",
        saved.world_size,
        str(largest(meshes) or ""),
        step_of([file for run in runs.values() for file in run.files]),
        dict(sorted(nbytes.items())),
        tuple(wholes.replicated),
        tuple(sorted({rank for run in runs.values() for rank in run.missing})),
        tuple(name for run in runs.values() for name in run.lacking),
        next((mesh.device for mesh in meshes), ""),
    )
    return whole_of(path, NAME, tree, files, ranks, wholes.left)


def _run(saved: ItemMetadata, item: str, files: Sequence[RankFile]) -> RankFiles:
    """Return the files of an item in the order of the ranks; missing are those that have a share of it."""
    run, said = in_order(files), saved.items.get(item)
    if said is None and _has_pieces(run.files):
        return run
    needed = said.needed if said else frozenset[int]()
    return replace(run, missing=tuple(rank for rank in run.missing if rank in needed))


def _owner(saved: ItemMetadata, file: Checkpoint) -> tuple[str, int]:
    """Return the item and the rank of a file; refuse a file of another save."""
    owner = saved.owner(file.path)
    if owner is None:
        raise Damaged(file.path, f"is no file that {METADATA} beside it names", hint=HINT_SAVE)
    if owner[1] >= saved.world_size:
        what = f"is of rank {owner[1]}, and {METADATA} beside it of {saved.world_size} ranks"
        raise Damaged(file.path, what, hint="take the files of the other run out of the folder")
    return owner


def _has_pieces(files: Sequence[RankFile]) -> bool:
    trees = (Checkpoint(file.source, NAME, file.tree).named(unless_sharded) for file in files)
    return any(isinstance(value, ShardedValue) for tree in trees for _, value in tree)


def _keyed(value: Any) -> Any:
    """Give an optimizer that is keyed by names the lists of them that torch calls `params`."""
    if not isinstance(value, dict) or not value.get("_optimizer_state_format_version"):
        return value
    groups = value.get(GROUPS)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return value
    return {**value, GROUPS: [{"params": group.get("param_names"), **group} for group in groups]}


class _Pieces:
    """The tensors in one rank's file of an item, with where they lie in their wholes."""

    def __init__(self, saved: ItemMetadata, file: Checkpoint, item: str, rank: int) -> None:
        self.saved, self.file, self.item, self.rank = saved, file, item, rank
        self.is_listed = item in saved.items
        self.said = saved.items[item].of_rank(rank) if self.is_listed else {}
        self.reader, self.work = ShardedValues(file.source), WorkBound(file.source)
        self.meshes, self.nbytes = list[Mesh](), 0
        self._known: dict[int, Mesh] = {}  # by the id of their description

    def placed(self) -> Checkpoint:
        """Return the file with each rank's values as pieces."""
        found: dict[int, ShardedValue] = {}
        names = set[str]()
        for path, value in self.file.named(unless_sharded):
            name = dotted(path)
            if isinstance(value, ShardedValue):
                names.add(name)
                self._require_same(name, value)
            elif (tensor := tensor_of(value)) is not None:
                names.add(name)
                self.nbytes += tensor.nbytes
                piece = self._piece(name, tensor)
                if piece and found.setdefault(id(value), piece) != piece:
                    raise self._other(name, "is another tensor's too, which lies elsewhere")
        for name, described in self.said.items():
            if name not in names and _is_cut(described):
                raise self._other(
                    name, f"is not in it, and {METADATA} says that rank {self.rank} has a piece"
                )
        if id(self.file.tree) in found:
            return replace(self.file, tree=found[id(self.file.tree)])

        def with_pieces(value: object) -> object:
            if isinstance(value, dict):
                return remade(value, ((key, found.get(id(item), item)) for key, item in value.items()))
            if isinstance(value, list | tuple):
                items = [found.get(id(item), item) for item in value]
                return items if isinstance(value, list) else tuple(items)
            return value

        return self.file.rebuilt(with_pieces) if found else self.file

    def _other(self, name: str, what: str) -> Damaged:
        where = f"{self.item}.{name}" if name else self.item
        return Damaged(self.file.path, f"'{where[:80]}' {what}", hint=HINT_SAVE)

    def _require_same(self, name: str, value: ShardedValue) -> None:
        """Check a piece that says itself where it lies."""
        self.nbytes += sum(piece.nbytes for _, piece in value.pieces)
        self.meshes += [value.mesh] if value.mesh else []
        if value.rank != self.rank:
            raise self._other(name, f"is a piece of rank {value.rank}, in a file of rank {self.rank}")
        described = self.said.get(name)
        if described is None and not self.is_listed:
            return
        data = attributes(attributes(described).get("data"))
        if (shape_of(data.get("global_shape")), data.get("dtype")) != (
            value.shape,
            f"torch.{value.dtype.name}",
        ):
            shown = f"{value.dtype.name} {list(value.shape)}"
            said = (
                f"{str(data.get('dtype'))[:30].removeprefix('torch.')} {str(data.get('global_shape'))[:60]}"
            )
            what = f"is a piece of {shown}, and {METADATA} says {said}"
            raise self._other(name, what if described else f"is a piece, and {METADATA} does not list it")

    def _piece(self, name: str, tensor: TensorRef) -> ShardedValue | None:
        """Return a plain tensor as the piece that the metadata says it is; None where it is whole."""
        described = self.said.get(name)
        if described is None:
            is_open = self.file.format == safetensors.NAME and self.saved.world_size > 1
            if is_open and self.is_listed:
                raise self._other(name, f"may be a piece, and {METADATA} does not say where it belongs")
            return None
        data = attributes(described.get("data"))
        shape, kind = shape_of(data.get("global_shape")), described.get("type")
        dtype = DTYPES.get(str(data.get("dtype")).removeprefix("torch."))
        if shape is None or dtype is None or kind not in (OF_DTENSOR, OF_BOXES):
            raise self.saved.malformed(f"description of '{self.item[:80]}.{name[:80]}'")
        if tensor.dtype is not dtype:
            raise self._other(name, f"is {tensor.dtype.name}, and {METADATA} says {dtype.name}")
        if not _is_cut(described):
            if tensor.shape != shape:
                said = f"{METADATA} says {list(shape)} on all ranks"
                raise self._other(name, f"has shape {list(tensor.shape)}, and {said}")
            return None
        if kind == OF_BOXES:
            return self._of_boxes(name, data, dtype, shape, tensor)
        listed = data.get("placements")
        if not isinstance(listed, tuple | list):
            raise self.saved.malformed(f"placements of '{self.item[:80]}.{name[:80]}'")
        placements = map(attributes, listed)
        named = [(NAMES.get(kind := str(each.get("type")), kind), each) for each in placements]
        mesh = self._mesh(name, data.get("mesh_spec"))
        return self.reader.placed(dtype, shape, tensor, mesh, named, name=f"{self.item}.{name}")

    def _mesh(self, name: str, described: object) -> Mesh:
        """Return a mesh as this rank sees it."""
        if id(described) in self._known:
            return self._known[id(described)]
        said, place = attributes(described), f"mesh of '{self.item[:80]}.{name[:80]}'"
        sizes, ranks, world = shape_of(said.get("mesh_shape")), said.get("mesh_data"), self.saved.world_size
        names, device = said.get("mesh_dim_names") or (), said.get("device_type")
        if sizes is None or not isinstance(ranks, tuple | list):
            raise self.saved.malformed(place)
        self.work.spend(len(ranks))
        listed = frozenset(filter(is_count, ranks))
        if (
            not count_of(sizes) == len(ranks) == len(listed)
            or self.rank not in listed
            or max(listed) >= world
        ):
            raise self.saved.malformed(place)
        at, steps = ranks.index(self.rank), zip(sizes, contiguous_stride(sizes), strict=True)
        coordinate = tuple(at // step % size for size, step in steps)
        named = tuple(map(str, names)) if isinstance(names, tuple | list) and len(names) == len(sizes) else ()
        mesh = Mesh(sizes, named, coordinate, listed, self.rank, world, str(device or ""))
        self.meshes.append(self._known.setdefault(id(described), mesh))
        return mesh

    def _of_boxes(
        self, name: str, data: Mapping[Any, Any], dtype: DType, shape: Index, tensor: TensorRef
    ) -> ShardedValue:
        """Return the boxes that lie in a tensor of one rank, each with its own place in the whole."""
        fields = [data.get(name) for name in ("global_offsets", "local_offsets", "local_sizes")]
        columns = [[*map(shape_of, each)] if isinstance(each, tuple | list) else [None] for each in fields]
        dims = len(tensor.shape)
        if len({*map(len, columns)}) != 1 or any(
            each is None or len(each) != dims for row in columns for each in row
        ):
            raise self.saved.malformed(f"description of '{self.item[:80]}.{name[:80]}'")
        rows: list[tuple[Index, Index, Index]] = [*zip(*columns, strict=True)]
        self.work.spend(len(rows))
        pieces = []
        for begin, start, size in rows:
            if any(at + n > whole for at, n, whole in zip(start, size, tensor.shape, strict=True)):
                raise self._other(
                    name, f"has shape {list(tensor.shape)}, and {METADATA} a piece that ends outside"
                )
            offset = tensor.offset + sum(at * step for at, step in zip(start, tensor.stride, strict=True))
            pieces.append((begin, replace(tensor, shape=size, offset=offset)))
        owners, world = self.saved.items[self.item].owners[name], self.saved.world_size
        return ShardedValue(DTENSOR, dtype, shape, self.rank, world, owners, tuple(pieces))


def _is_cut(described: Mapping[Any, Any]) -> bool:
    """Return whether ranks have parts of a tensor, and not all of it each."""
    placements = attributes(described.get("data")).get("placements")
    is_whole = isinstance(placements, tuple | list) and all(
        attributes(placement).get("type") == "Replicate" for placement in placements
    )
    return not is_whole
