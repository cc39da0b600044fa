"""Writing the formats that are folders: shards with an index, and DCP.

The folder appears whole or not at all. With `full`, what is not a tensor goes as one JSON text (`full`): into
the index of shards of safetensors, or into DCP as an entry of that name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from ...checkpoint import full_encoding, full_json
from ...checkpoint.checkpoint import OF_TORCH, Checkpoint, State
from ...errors import UsageFault
from ...files.commit_folder import replacing_folder
from ...files.copying import DryOutput, Output
from ...files.suggestions import names_in
from ...inert_pickle.values import OrderedDict_
from ...tensors.ref import TensorRef
from ..pytorch import zip as torch_zip
from ..safetensors import format as safetensors
from . import dcp, dcp_writing, sharding

NAMES = (sharding.SAFETENSORS, sharding.TORCH, dcp.NAME)

TELLING = (
    (dcp.METADATA, dcp.NAME),
    (dcp.ENDING, dcp.NAME),
    (f".safetensors{sharding.INDEX}", sharding.SAFETENSORS),
    (f".bin{sharding.INDEX}", sharding.TORCH),
)
"""How names end that tell the format of a folder, in the order in which reading prefers them."""


def kind_of(path: str) -> str | None:
    """The format of the checkpoint that a folder holds, as the names in it tell; None where none does."""
    names = names_in(path)
    return next((kind for ending, kind in TELLING if any(name.endswith(ending) for name in names)), None)


def is_of_a_checkpoint(name: str) -> bool:
    """Whether a file of this name belongs to a sharded or DCP checkpoint, and may be replaced with it."""
    shard = re.fullmatch(r".+-\d{5}-of-\d{5}\.(safetensors|bin)", name)
    return bool(shard) or name == dcp.METADATA or name.endswith((sharding.INDEX, dcp.ENDING))


def strangers(path: str) -> list[str]:
    """What else is in a folder than files that `is_of_a_checkpoint` knows, sorted by name."""
    return sorted(name for name in os.listdir(path) if not is_of_a_checkpoint(name))


def _folder_of(checkpoint: Checkpoint) -> str | None:
    """The folder that a checkpoint was read from, which may have been named by its index; None for a file."""
    if checkpoint.format not in NAMES:
        return None
    folder = checkpoint.path if os.path.isdir(checkpoint.path) else os.path.dirname(checkpoint.path) or "."
    return folder if os.path.isdir(folder) else None


def is_in_place(checkpoint: Checkpoint, path: str) -> bool:
    """Whether a folder is the one that the checkpoint was read from."""
    source = _folder_of(checkpoint)
    return source is not None and os.path.isdir(path) and os.path.samefile(source, path)


def not_copied(checkpoint: Checkpoint, path: str, kind: str) -> tuple[str, ...]:
    """The files beside a checkpoint, such as a `config.json`, that the new folder of it does not have."""
    source = _folder_of(checkpoint)
    if source is None or kind not in NAMES or is_in_place(checkpoint, path):
        return ()
    return tuple(name for name in strangers(source) if not name.startswith("."))


def companions(checkpoint: Checkpoint, path: str) -> list[str]:
    """The other files that stay where a folder is written in place of the one that was read.

    Those of a model of the Hugging Face Hub, such as its `config.json`, or another checkpoint; none where one
    of them is not a regular file, or the folder is another.
    """
    if not is_in_place(checkpoint, path):
        return []
    read = {_identity(os.fstat(source.fd)) for source in (checkpoint.source, *checkpoint.shards)}
    places = {name: os.path.join(path, name) for name in sorted(os.listdir(path))}
    if not all(map(os.path.isfile, places.values())):
        return []
    return [name for name, place in places.items() if _identity(os.stat(place)) not in read]


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _link(names: list[str], old: str, new: str) -> None:
    """Gives files of one folder a place in another too. Raises UsageFault where that can't be."""
    try:
        for name in names:
            os.link(os.path.join(old, name), os.path.join(new, name), follow_symlinks=False)
    except OSError as error:
        raise UsageFault(
            f"{old}: holds other files too ({', '.join(names[:3])}), which can't be kept: "
            f"{(error.strerror or str(error)).lower()}",
            hint="choose a new folder as output",
        ) from error


def without_models(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with a dict of tensors where its state was a pickled model, which DCP can't hold."""
    state = checkpoint.state() if checkpoint.states() else None
    return checkpoint if state is None or state.module is None else checkpoint.changed(state, lambda v: v)


def lost_in_dcp(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What DCP does not keep, by dotted name; of a pickled model its class."""
    whole = without_models(checkpoint)
    return (*dcp_writing.lost(whole.tree), *whole.opened)


def text_keys_in_dcp(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The dicts whose keys, numbers and the like, are text in DCP, by dotted name."""
    return tuple(dcp_writing.with_keys_made_text(without_models(checkpoint).tree))


class FolderWriting:
    """One folder: what goes into it.

    Args:
        state: the model's state; None to write everything that the checkpoint holds.
        full: keep what DCP itself would lose too.
        ties: names of the state that are kept as another name of a tensor.
        shard_size: bytes that a shard may have.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        kind: str,
        state: State | None,
        full: bool,
        ties: Mapping[str, str],
        shard_size: int,
    ) -> None:
        self.checkpoint, self.kind, self.state, self.full = checkpoint, kind, state, full
        self.ties, self.shard_size = ties, shard_size

    def write(self, path: str, opened: sharding.Opened, check: Callable[[str], None]) -> int:
        """Writes the folder, lets `check(folder)` check it, and puts it in place; returns its bytes.

        Args:
            opened: makes an output of a file, given which storages go into it.
        """
        kept = companions(self.checkpoint, path)
        with replacing_folder(path, lambda name: name in kept or is_of_a_checkpoint(name)) as folder:
            if self.kind == dcp.NAME:
                dcp_writing.write(self._for_dcp(), folder)
            else:
                shards, text = self._shards()
                sharding.write(folder, self.kind, shards, text, self._write_shard, opened)
            check(folder)
            nbytes = sum(entry.stat().st_size for entry in os.scandir(folder))
            _link(kept, path, folder)
        return nbytes

    def dry(self) -> int:
        """The bytes that `write` would write; for DCP only those of the values."""
        if self.kind == dcp.NAME:
            whole = self._for_dcp()
            dcp_writing.check(whole)
            return sum(tensor.nbytes for _, tensor in whole.tensors())
        shards, text = self._shards()
        total = len(text.encode())
        for shard in shards:
            out = DryOutput()
            self._write_shard(shard.name, shard.tensors, out)
            total += out.position
        return total

    def _for_dcp(self) -> Checkpoint:
        if not self.full:
            return without_models(self.checkpoint)
        flat = self._flat()
        return replace(self.checkpoint, tree={**flat.tensors, full_json.ENTRY: flat.text})

    def _flat(self) -> full_encoding.Flat:
        return full_json.encode_entry(self.checkpoint.path, self.checkpoint.tree, self.checkpoint.protocol)

    def _shards(self) -> tuple[list[sharding.Shard], str]:
        """The shards, and the text of their index."""
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
