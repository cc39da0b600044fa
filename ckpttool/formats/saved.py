"""What a saving wrote, and by name what it did not: nothing is left behind in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..checkpoint import Checkpoint, State
from ..summary import unknown_names
from . import dcp, folders, safetensors, sharding, torch_zip

PICKLES = (torch_zip.NAME, sharding.TORCH)
TENSORS_ALONE = (safetensors.NAME, sharding.SAFETENSORS, sharding.TORCH)


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
        mentions: names of code that the output's pickle mentions, and no pickle of the input's did: anyone
            who unpickles it without `weights_only` runs them. As `inspect` reports them.
    """

    path: str
    format: str
    nbytes: int
    keys: int
    left_out: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()

    @property
    def why_left_out(self) -> str:
        """Why the format can't hold what was left out, to follow its name."""
        return "holds only tensors" if self.format in TENSORS_ALONE else "has no place for it"


def saved_whole(
    checkpoint: Checkpoint, path: str, kind: str, nbytes: int, state: State | None, *, full: bool
) -> Saved:
    """Of an output that holds everything, as far as its format can.

    Args:
        state: the model's, where there is one.
        full: what is not a tensor went as text.
    """
    lost = checkpoint.unread
    if kind in (torch_zip.NAME, dcp.NAME):  # which have no place for the text of a safetensors header
        lost += tuple(f"metadata '{name}'" for name in checkpoint.metadata)
    apart = kind == dcp.NAME and not full
    if apart:
        lost = (*folders.lost_in_dcp(checkpoint), *lost)
    return Saved(
        path,
        kind,
        nbytes,
        len(state.tensors) if state else 0,
        lost,
        copied=copied(state) if state and apart else (),
        mentions=_mentions(checkpoint, kind),
    )


def saved_state(
    checkpoint: Checkpoint, path: str, kind: str, nbytes: int, state: State, ties: Mapping[str, str]
) -> Saved:
    """Of an output that holds only the model's tensors, some of them as another name of a tensor."""
    lost = _beside(checkpoint, state) + checkpoint.unread
    if kind == sharding.TORCH:  # has no place for the text of a safetensors header, and keeps what is shared
        lost += tuple(f"metadata '{name}'" for name in checkpoint.metadata)
        return Saved(path, kind, nbytes, len(state.tensors), lost)
    apart = tuple(name for name in copied(state) if name not in ties)
    return Saved(path, kind, nbytes, len(state.tensors), lost, tuple(ties), apart)


def _mentions(checkpoint: Checkpoint, kind: str) -> tuple[str, ...]:
    is_pickle = checkpoint.format not in (safetensors.NAME, sharding.SAFETENSORS, dcp.NAME)
    return () if kind not in PICKLES or is_pickle else tuple(unknown_names(checkpoint.tree))


def _beside(checkpoint: Checkpoint, state: State) -> tuple[str, ...]:
    """What a file of only the state's tensors leaves behind, by the shortest names that say it."""
    inside = [*state.others, *(["_metadata"] if state.versions is not None else [])]
    where = f"{state.where}." if state.path else ""
    return (*(where + name for name in inside), *checkpoint.outside(state))


def copied(state: State) -> tuple[str, ...]:
    """Names whose bytes another name has too: each name gets a copy in a format without sharing."""
    storages: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in state.tensors.items():
        storages.setdefault(id(tensor.storage), []).append((*tensor.span, name))
    found = set()
    for spans in storages.values():
        reached = 0
        for begin, end, name in sorted(spans, key=lambda span: span[0]):
            if begin < min(end, reached):
                found.add(name)
            reached = max(reached, end)
    return tuple(name for name in state.tensors if name in found)
