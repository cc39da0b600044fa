"""The result of a save: what was written, and by name what was not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ...checkpoint.checkpoint import OF_TORCH, Checkpoint
from ...checkpoint.dotted_names import contents, dotted
from ...checkpoint.state import State
from ...checkpoint.states import is_optimizer
from ...inert_pickle.known_names import names_in, names_that_run
from ...inert_pickle.values import walk
from ...tensors.ref import Storage, TensorRef
from .. import safetensors, shards
from ..dcp import reading as dcp
from ..dcp import tree as dcp_tree
from ..pytorch import zip as torch_zip
from ..pytorch.tensor_pickle import written_device

PICKLES = (torch_zip.NAME, shards.TORCH)
# Formats that hold everything in a checkpoint, not only the model's state.
WHOLE = (torch_zip.NAME, dcp.NAME)
TENSORS_ALONE = (safetensors.NAME, shards.SAFETENSORS, shards.TORCH)


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save` wrote.

    Attributes:
        path: the output.
        format: its format.
        nbytes: its size.
        keys: how many names the model's state has in it.
        left_out: dotted names of what the format can't hold.
        tied: names kept as another name of a tensor, by a record in the metadata.
        copied: names that share memory and were written out each for itself.
        mentions: names in the output's pickle that could run something when it is unpickled without
            `weights_only`, whether or not the input was a pickle that had them.
        devices: devices other than the CPU that the output tags storages with: on a machine without them
            torch loads it only with `map_location`.
        text_keys: dicts with keys, such as numbers, that are text in the output.
        keyed_by_text: optimizers whose state is keyed by text where their groups list numbers, because it
            went into DCP or came out of it; outside DCP torch loads no momentum from them.
        not_copied: other files of the input's folder, which a new folder does not have.
        shards: how many files of a folder hold the tensors; 0 for a single file, and for a DCP not yet
            written.
        given_back: names in a replaced folder of what another process put into the old one meanwhile.
        not_removed: paths of what could not be removed of a replaced folder, each with the reason.
    """

    path: str
    format: str
    nbytes: int
    keys: int
    left_out: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    text_keys: tuple[str, ...] = ()
    keyed_by_text: tuple[str, ...] = ()
    not_copied: tuple[str, ...] = ()
    shards: int = 0
    given_back: tuple[str, ...] = ()
    not_removed: tuple[str, ...] = ()

    @property
    def why_left_out(self) -> str:
        """Why the format can't hold what was left out: words to follow the format's name."""
        return "holds only tensors" if self.format in TENSORS_ALONE else "has no place for it"


def facts_of_whole(checkpoint: Checkpoint, kind: str, state: State | None, *, full: bool) -> dict[str, Any]:
    """Return what there is to say, by Saved's names, of an output that holds all that its format can."""
    lost = checkpoint.unread
    if kind in WHOLE:  # which have no place for the text of a safetensors header
        lost += _lost_metadata(checkpoint)
    apart = kind == dcp.NAME and not full
    if apart:
        lost = (*dcp_tree.lost(checkpoint), *lost)
    keys = len(state.tensors) + len(state.likes) if state else 0
    facts = {"keys": keys, "left_out": lost, "keyed_by_text": _keyed_by_text(checkpoint, kind, full)}
    if apart:
        facts["copied"] = copied(state) if state else ()
        facts["text_keys"] = dcp_tree.with_keys_made_text(checkpoint)
    if kind in PICKLES:
        facts["mentions"] = tuple(names_that_run(names_in(checkpoint.tree)))
        facts["devices"] = _devices(checkpoint, walk(checkpoint.tree))
    return facts


def facts_of_state(checkpoint: Checkpoint, kind: str, state: State, ties: Collection[str]) -> dict[str, Any]:
    """Return what there is to say, by Saved's names, of an output that holds only the model's tensors."""
    beside = [*state.others, *(["_metadata"] if state.versions is not None else [])]
    where = f"{state.where}." if state.path else ""
    lost = (*(where + name for name in beside), *checkpoint.outside(state), *checkpoint.unread)
    if kind == shards.TORCH:  # has no place for the text of a safetensors header, and keeps what is shared
        lost += _lost_metadata(checkpoint)
        facts = {"devices": _devices(checkpoint, state.tensors.values())}
    else:
        facts = {"tied": tuple(ties), "copied": tuple(name for name in copied(state) if name not in ties)}
    return {"keys": len(state.tensors), "left_out": lost, **facts}


def _devices(checkpoint: Checkpoint, values: Iterable[object]) -> tuple[str, ...]:
    """Return the devices other than the CPU that the storages among some values are written with."""
    storages = (value.storage if isinstance(value, TensorRef) else value for value in values)
    written = (written_device(value, checkpoint.device) for value in storages if isinstance(value, Storage))
    return tuple(sorted({*written} - {"cpu", "meta"}))


def _lost_metadata(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the text in a safetensors header, but for the note that its tensors are torch's."""
    texts = checkpoint.metadata.items()
    return tuple(f"metadata '{name}'" for name, text in texts if OF_TORCH.get(name) != text)


def _keyed_by_text(checkpoint: Checkpoint, kind: str, full: bool) -> tuple[str, ...]:
    """Return the optimizers whose keys were numbers, and are text because DCP has no others."""
    into, out_of = kind == dcp.NAME and not full, checkpoint.format == dcp.NAME
    if into == out_of:
        return ()
    named = ((dotted(path), value) for path, value in checkpoint.named(contents) if is_optimizer(value))
    return tuple(name or dcp_tree.TOP for name, value in named if _keeps_numbers(value, int if into else str))


def _keeps_numbers(optimizer: Any, kind: type) -> bool:
    """Return whether the state of parameters that the groups list as numbers has keys of this type."""
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    listed = [group.get("params") for group in groups if isinstance(group, dict)]
    numbers = {str(key) for keys in listed if isinstance(keys, list) for key in keys if type(key) is int}
    return any(type(key) is kind and str(key) in numbers for key in state)


def copied(state: State) -> tuple[str, ...]:
    """Return the names whose bytes another name has too; a format without sharing gives each a copy."""
    reached: dict[int, int] = {}  # in each storage, how far the names before this one go
    names = set()
    for name, tensor in sorted(state.tensors.items(), key=lambda item: item[1].span[0]):
        (begin, end), before = tensor.span, reached.get(id(tensor.storage), 0)
        if begin < min(end, before):
            names.add(name)
        reached[id(tensor.storage)] = max(before, end)
    return tuple(name for name in state.tensors if name in names)
