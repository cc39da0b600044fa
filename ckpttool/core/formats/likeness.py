"""A model's files as another's are: the names in the same files, in the same order, under the same headers.

So a file in which nothing has changed has the same bytes, and a hub or a cache that goes by hashes stores it
once. A header is taken over as it stands where its tensors have the same types and shapes, else written anew.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import Refused, UsageFault
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.state import State
from ..inert_pickle.values import OrderedDict_
from ..tensors.ref import Source, TensorRef
from ..words import first_few
from . import reading, safetensors, shards

MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class LikeFile:
    """One of the other model's files.

    Attributes:
        head: its first bytes, up to its values: length and header.
        tensors: what its header lists, in the order of the values.
        metadata: the text in its header.
    """

    head: bytes
    tensors: Mapping[str, TensorRef]
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, source: Source) -> LikeFile:
        """Read a header, and no value."""
        read: Any = safetensors.read(source)
        once = {id(tensor): name for name, tensor in reversed(read.tree.items())}  # a tie has two names
        tensors = {name: tensor for name, tensor in read.tree.items() if once[id(tensor)] == name}
        size = 8 + int.from_bytes(source.read(0, 8), "little")
        return cls(source.read(0, size), tensors, read.metadata)

    def fits(self, tensors: Mapping[str, TensorRef]) -> bool:
        """Return whether the header is true of these tensors."""
        return all(_form(tensors[name]) == _form(tensor) for name, tensor in self.tensors.items())


@dataclass(frozen=True, slots=True)
class Likeness:
    """The files of a model that an output should be like.

    Attributes:
        path: the other model, as messages call it.
        files: its files by name.
        index: the text of its index; "" for a model in one file, or one that has lost it.
        index_name: what its index is called; "" for a model in one file.
        ties: the names that are another name of a tensor, as its files record them -> that name.
    """

    path: str
    files: Mapping[str, LikeFile]
    index: str = ""
    index_name: str = ""
    ties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, path: str) -> Likeness:
        """Read the index and the headers of a model, which may be a URL.

        Raises:
            UsageFault: it is not in safetensors, or holds more than a model's state.
            Unreadable, Damaged, Unsupported: as `open` raises them.
        """
        with reading.open(path) as model:
            kinds = (safetensors.NAME, shards.SAFETENSORS)
            if model.format not in kinds or model.full:
                what = f"--like {path}: is {model.format}{' of a whole checkpoint' if model.full else ''}"
                raise UsageFault(what, hint="name a model in safetensors: its file, folder, index or URL")
            is_cut = model.format == shards.SAFETENSORS
            sources = model.shards if is_cut else (model.source,)
            files = {os.path.basename(source.place): LikeFile.of(source) for source in sources}
            state = model.state("").tensors
            listed = [name for file in files.values() for name in file.tensors]
            kept = {state[name].view: name for name in listed}
            ties = {name: kept[state[name].view] for name in state.keys() - {*listed}}
            named = os.path.basename(model.source.place)
            has_index = is_cut and not safetensors.sniff(model.source.read(0, min(16, model.source.size)))
            index = model.source.read(0, model.source.size).decode() if has_index else ""
        return cls(path, files, index, _index_name(named, files) if is_cut else "", ties)

    def fitted(self, checkpoint: Checkpoint, where: str | None) -> tuple[Checkpoint, list[str]]:
        """Return a checkpoint whose state has the other model's names alone, and notes on what differs.

        Raises Refused where the one lacks a name that the other has.
        """
        state = checkpoint.state(where)
        tensors = state.tensors
        theirs = {name: tensor for file in self.files.values() for name, tensor in file.tensors.items()}
        self._require(checkpoint.path, state, "lacks", [n for n in (*theirs, *self.ties) if n not in tensors])
        views = {tensors[name].view: name for name in theirs if tensors[name].numel}
        more = [name for name in tensors if name not in theirs and name not in self.ties]
        self._require(checkpoint.path, state, "has", [n for n in more if tensors[n].view not in views])
        for name, kept in self.ties.items():
            if tensors[name].view != tensors[kept].view:
                what = f"'{name[:80]}' is another tensor than '{kept[:80]}', and {self.path} has one for both"
                raise Refused(checkpoint.path, what, hint="leave out --like")
        notes = [f"'{name}' is '{views[tensors[name].view]}', and is not written twice" for name in more]
        if others := [name for name in theirs if _form(tensors[name]) != _form(theirs[name])]:
            first = f"{tensors[others[0]].dtype.name} {list(tensors[others[0]].shape)}"
            there = f"{theirs[others[0]].dtype.name} {list(theirs[others[0]].shape)}"
            what = f"{len(others)} of {len(theirs)} tensors have another type or shape than in {self.path}"
            notes.append(f"{what}, so that their files differ: '{others[0]}' {first} there {there}")
        items = ((name, tensors[name]) for name in (*theirs, *self.ties))
        return replace(checkpoint, tree=OrderedDict_(items), metadata={}, ranks=checkpoint.ranks), notes

    def _require(self, path: str, state: State, verb: str, names: list[str]) -> None:
        if not names:
            return
        quoted = first_few([f"'{name[:80]}'" for name in names], MOST_NAMED)
        other = "has" if verb == "lacks" else "lacks"
        hint = "--map NAME changes the architecture on the way; ckpttool conform finds the names; "
        hint += f"ckpttool diff {shlex.quote(path)} {shlex.quote(self.path)} lists both"
        them = "it" if len(names) == 1 else "them"
        raise Refused(path, f"{verb} {quoted}, and {self.path} {other} {them}", hint=hint)

    def require_place(self, path: str, kind: str, *, full: bool) -> None:
        """Raise UsageFault where an output can't be like the other model."""
        own = shards.SAFETENSORS if self.index_name else safetensors.NAME
        if kind != own or full:
            way = "end OUTPUT in / for a folder" if self.index_name else "end OUTPUT in .safetensors"
            count = f"{len(self.files)} files" if self.index_name else "one file"
            what = f"{path}: {self.path} is {count} of safetensors without an optimizer"
            raise UsageFault(f"{what}, and the output would be {kind}{' --full' * full}", hint=way)

    def head(self, path: str, name: str, tensors: Mapping[str, TensorRef]) -> bytes:
        """Return the first bytes of a file of these tensors, which are in the other's order."""
        file = self.files[name] if name in self.files else next(iter(self.files.values()))
        if file.fits(tensors):
            return file.head
        safetensors.in_order(path, tensors)  # which refuses what the format can't hold
        ties = {name: kept for name, kept in self.ties.items() if kept in tensors and not self.index_name}
        return safetensors.header(path, tensors, {**file.metadata, **ties})

    def cut(self, tensors: Mapping[str, TensorRef]) -> shards.Cut:
        """Return the tensors by file, in the other's order."""
        return {file: {name: tensors[name] for name in like.tensors} for file, like in self.files.items()}

    def index_text(self, cut: shards.Cut) -> str:
        """Return the text of the index: the other's own where it is true."""
        if self.index and all(self.files[file].fits(tensors) for file, tensors in cut.items()):
            return self.index
        facts = json.loads(self.index).get("metadata") or {} if self.index else {}
        counted = ("total_size", "total_parameters")
        return shards.index_text(cut, {key: fact for key, fact in facts.items() if key not in counted})


def _form(tensor: TensorRef) -> tuple[object, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _index_name(named: str, files: Mapping[str, object]) -> str:
    """Return what the index of shards is called."""
    if named.endswith(shards.INDEX):
        return named
    series = next(iter(shards.series_in(files)), None)
    stem, ending = (series.begin.rstrip("-"), series.end) if series else shards.STEMS[shards.SAFETENSORS]
    return f"{stem}{ending}{shards.INDEX}"
