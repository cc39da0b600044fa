"""Writing the formats that are folders: shards with an index, and DCP.

The folder appears complete or not at all. With `full`, what is not a tensor goes as one JSON text into the
index of safetensors shards, or into DCP as an entry of that name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ...checkpoint import full_encoding, full_json
from ...checkpoint.checkpoint import OF_TORCH, Checkpoint
from ...checkpoint.state import State
from ...files.commit_folder import replacing_folder
from ...files.copying import DryOutput, Output
from ...inert_pickle.values import OrderedDict_
from ...tensors.ref import TensorRef
from ..dcp import reading as dcp
from ..dcp import tree as dcp_tree
from ..folders import companions, replaced_by
from ..pytorch import zip as torch_zip
from ..safetensors import format as safetensors
from ..shards import writing as sharding


@dataclass(frozen=True, slots=True)
class Written:
    """What writing a folder came to."""

    nbytes: int  # the bytes of its files
    shards: int  # how many of them hold tensors; 0 if that is not known before they are written
    given_back: tuple[str, ...] = ()  # names in it of what another process put into the old folder meanwhile
    # paths of what could not be removed of the old folder, each with the reason.
    not_removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """One folder: what goes into it."""

    checkpoint: Checkpoint  # what is written
    kind: str  # the format
    state: State | None  # the model's state; None to write everything that the checkpoint holds
    full: bool  # keep what DCP itself would lose too
    ties: Mapping[str, str]  # names of the state that are kept as another name of a tensor
    shard_size: int  # the most bytes of a shard
    # names of other files that stay in the folder which is replaced, if they are in it.
    kept: Collection[str] = ()

    def write(self, path: str, opened: sharding.Opened, check: Callable[[str], None]) -> Written:
        """Write the folder and put it in place."""
        kept = {*companions(self.checkpoint, path), *filter(partial(_is_in, path), self.kept)}
        with replacing_folder(path, replaced_by(self.checkpoint, path), kept) as new:
            self._write_into(new.path, opened)
            check(new.path)
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(new.path)}
        return Written(
            sum(sizes.values()), self._count(list(sizes)), tuple(new.given_back), tuple(new.not_removed)
        )

    def _write_into(self, folder: str, opened: sharding.Opened) -> None:
        if self.kind == dcp.NAME:
            from ..dcp.writing import write as write_dcp  # imports torch

            write_dcp(self._for_dcp(), folder)
        else:
            shards, text = self._shards()
            sharding.write(folder, self.kind, shards, text, self._write_shard, opened)

    def dry(self) -> Written:
        """Return what `write` would, of DCP the bytes of the values alone, and raise what it would."""
        if self.kind == dcp.NAME:
            whole = self._for_dcp()
            dcp_tree.check(whole)
            return Written(sum(tensor.nbytes for _, tensor in whole.tensors()), 0)
        shards, text = self._shards()
        total = len(text.encode())
        for shard in shards:
            out = DryOutput()
            self._write_shard(shard.name, shard.tensors, out)
            total += out.position
        return Written(total, len(shards))

    def _count(self, names: list[str]) -> int:
        telling = (dcp.METADATA, sharding.INDEX)
        return sum(not name.endswith(telling) for name in names)

    def _for_dcp(self) -> Checkpoint:
        if not self.full:
            return dcp_tree.without_models(self.checkpoint)
        flat = self._flat()
        return replace(self.checkpoint, tree={**flat.tensors, full_json.ENTRY: flat.text})

    def _flat(self) -> full_encoding.Flat:
        return full_json.encode_entry(self.checkpoint.path, self.checkpoint.tree, self.checkpoint.protocol)

    def _shards(self) -> tuple[list[sharding.Shard], str]:
        """Return the shards, and the text of their index."""
        metadata: dict[str, object] = {}
        if self.state is None:
            flat = self._flat()
            tensors: Mapping[str, TensorRef] = flat.tensors
            metadata[full_json.ENTRY] = flat.text
        else:
            tensors = {name: t for name, t in self.state.tensors.items() if name not in self.ties}
            if self.ties:
                metadata[sharding.TIES] = dict(self.ties)
        shards = sharding.cut(self.kind, tensors, self.shard_size)
        return shards, sharding.index(shards, metadata)

    def _write_shard(self, name: str, tensors: Mapping[str, TensorRef], out: Output) -> None:
        if self.kind == sharding.SAFETENSORS:
            metadata = OF_TORCH | dict(self.checkpoint.metadata)
            safetensors.write(self.checkpoint.path, tensors, metadata, out)
        else:
            torch_zip.write(replace(self.checkpoint, tree=OrderedDict_(tensors)), out, name)


def _is_in(folder: str, name: str) -> bool:
    return os.path.lexists(os.path.join(folder, name))
