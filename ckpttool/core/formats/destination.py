"""The destination of a save: its format, its options, the read-back before it counts, and the result."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ...errors import Damaged, FileError, UsageFault
from ...rooms import need
from .. import system
from ..checkpoint.checkpoint import OF_TORCH, Checkpoint
from ..checkpoint.optimizer_view import OptimizerView
from ..checkpoint.state import State
from ..files import digest, reflink
from ..files.parts import OutputPart
from ..files.threads import Progress
from ..inert_pickle.known_names import names_in, names_that_run
from ..inert_pickle.values import walk
from ..tensors.ref import Storage, TensorRef
from ..words import noted
from . import folders, safetensors, shards
from .pytorch import zip as torch_zip
from .pytorch.tensor_pickle import written_device
from .reading import File
from .safetensors import Tensors
from .strangers import unwritable

if TYPE_CHECKING:
    from .likeness import Likeness

UNFIT = "does not read back as intended, and was not kept"


@contextmanager
def read_back(path: str, folder: str) -> Iterator[None]:
    """Say of what is wrong with the new folder, not yet in its place, that the output was not kept."""
    try:
        yield
    except FileError as fault:
        if fault.path == path:  # from `require_same`
            raise
        reason = fault.message.replace(f"{folder}{os.sep}", "").replace(f"{folder}: ", "")
        raise Damaged(path, f"{UNFIT}: {reason}") from None


def require_same(
    path: str, written: Tensors, meant: Tensors, *, values: bool, progress: Progress | None
) -> None:
    """Raise Damaged unless tensors were written as meant: names, types and shapes, or values too."""
    is_same = _are_same(written, meant)
    if not is_same or (values and digest.digest(meant, progress) != digest.digest(written, progress)):
        raise Damaged(path, UNFIT)


def _are_same(written: Tensors, meant: Tensors) -> bool:
    if written.keys() != meant.keys():
        return False
    both = [*written.values()], [*map(meant.__getitem__, written)]
    columns = map(attrgetter, ("dtype", "shape"))
    return all([*map(column, both[0])] == [*map(column, both[1])] for column in columns)


# ---- Formats and options.


ENDINGS = {
    **dict.fromkeys(safetensors.EXTENSIONS, safetensors.NAME),
    **dict.fromkeys(torch_zip.EXTENSIONS, torch_zip.NAME),
}

PICKLES = (torch_zip.NAME, shards.TORCH)
# Formats that hold everything in a checkpoint, not only the model's state.
WHOLE = (torch_zip.NAME, folders.DCP)
HEADED = (safetensors.NAME, shards.SAFETENSORS)

# Factors of units in capitals: `5G` is `5GB`, `5Gi` is `5GiB`.
UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("", 1000), ("B", 1000), ("I", 1024), ("IB", 1024))
}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint is written, in which format, and what that format holds of it."""

    path: str
    format: str
    full: bool  # everything, although the format is one of tensors

    @property
    def holds_all(self) -> bool:
        return self.full or self.format in WHOLE

    @property
    def has_metadata(self) -> bool:
        return self.format in HEADED

    @property
    def is_folder(self) -> bool:
        return self.format in folders.NAMES

    @property
    def is_named_as_file(self) -> bool:
        is_of_file = os.path.splitext(self.path)[1].lower() in ENDINGS
        return is_of_file and not self.path.endswith(system.SEPARATORS)


def destination(
    path: str, checkpoint: Checkpoint, to: str | None, *, full: bool | None = None, keep: bool = False
) -> Destination:
    """Return where `save` would write a checkpoint; the one place that decides an output's format.

    `keep`: a new folder gets the format of the folder that the checkpoint was read from.
    """
    known = (*dict.fromkeys(ENDINGS.values()), *folders.NAMES)
    if to is not None and to not in known:
        raise UsageFault(f"there is no format '{to}'", hint=f"one of {', '.join(known)}")
    kind = to or _format(path, checkpoint, keep)
    return Destination(path, kind, kind not in PICKLES and (checkpoint.full if full is None else full))


def format_of_name(path: str, new_folder: str = folders.NAMES[0]) -> str | None:
    """Return the format that a path asks for by its ending or by what is there; None if it asks for none."""
    if path.endswith(system.SEPARATORS) or os.path.isdir(path):
        return folders.kind_of(path) or new_folder
    return ENDINGS.get(os.path.splitext(path)[1].lower())


def _format(path: str, checkpoint: Checkpoint, keep: bool) -> str:
    if folders.is_in_place(checkpoint, path):
        return checkpoint.format
    new_folder = checkpoint.format if keep and checkpoint.format in folders.NAMES else folders.NAMES[0]
    if asked := format_of_name(path, new_folder):
        return asked
    if path == "-":
        return torch_zip.NAME if checkpoint.format.startswith("torch") else safetensors.NAME
    hint = f"end it in {', '.join(ENDINGS)}, or in / for a folder of shards; for a DCP folder: "
    hint += f"ckpttool convert IN {shlex.quote(path)} --to dcp"
    raise unwritable(path) or UsageFault(f"{path}: its ending does not say which format", hint=hint)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The rarer choices of `save`, which says what each means."""

    keep_copies: bool = False
    kept: Collection[str] = ()
    needed: Collection[File] = ()
    device: str | None = None
    progress: Progress | None = None
    expect: Progress | None = None
    part: OutputPart | str | None = None
    words: Sequence[str] = ()
    resume: bool = False
    recipe: str = ""
    reflink: str = reflink.AUTO
    time: int | None = None
    like: Likeness | None = None


def require_sense(
    target: Destination, state: str | None, full: bool | None, shard_size: int | None, options: SaveOptions
) -> None:
    """Check that options do not contradict each other, and that each has an effect."""
    path, kind, device = target.path, target.format, options.device
    if full and state is not None:
        what = f"{path}: gets everything that is there, but one state of it was named ('{state}')"
        raise UsageFault(what, hint="leave out --full or --state")
    if full and kind == shards.TORCH:
        hint = f"write a .pt file, or shards of safetensors: --to {shards.SAFETENSORS}"
        raise UsageFault(f"{path}: {kind} holds only the model's state", hint=hint)
    if options.like is not None:
        options.like.require_place(path, kind, full=target.full)
        if shard_size is not None or options.reflink == reflink.ALWAYS:
            what = f"{path}: --like says which tensors lie where, and so does another option"
            raise UsageFault(what, hint="leave out --shard-size and --reflink always, or --like")
    if options.keep_copies and (full or kind in PICKLES):
        hint = "leave out --keep-copies, or write safetensors without --full"
        raise UsageFault(f"{path}: keeps what is tied as one tensor, but copies were asked for", hint=hint)
    if shard_size is not None and kind not in (shards.SAFETENSORS, shards.TORCH):
        what, way = "is one file", "end OUTPUT in /"
        if target.is_folder:
            what, way = "is one folder that is not cut", f"say --to {shards.SAFETENSORS}"
        hint = f"{way} for a folder of shards, or leave out --shard-size"
        raise UsageFault(f"{path}: {what}, but a shard size was given", hint=hint)
    if target.is_folder and path == "-":
        raise UsageFault(f"-: {kind} is a folder, and can't be streamed", hint="name a folder")
    if options.reflink not in reflink.MODES:
        raise UsageFault(f"'{options.reflink}' is no way to share", hint=f"one of {', '.join(reflink.MODES)}")
    if options.reflink == reflink.ALWAYS and kind == folders.DCP:
        what = "is written by torch's library, which shares no blocks"
        raise reflink.NotShared(path, what, hint="leave out --reflink always")
    if options.reflink == reflink.ALWAYS and options.part:
        what = f"{path}: --reflink always takes no time, and has no parts"
        raise UsageFault(what, hint="leave it out; or --part, or torchrun")
    if device is not None and kind not in PICKLES:
        what = f"{path}: {kind} names no devices, but --device {device} was given"
        raise UsageFault(what, hint="leave it out, or write a .pt file")
    if device is not None and (device == "meta" or not re.fullmatch(r"[a-z]+(:[0-9]{1,3})?", device)):
        raise UsageFault(f"'{device[:80]}' is not a device", hint="say for example: --device cpu")


def parse_size(text: str) -> int:
    """Return the bytes that a size such as `5GB`, `5G`, `500MB` or `1GiB` means."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    size = int(float(match[1]) * UNITS.get(match[2].upper(), 0)) if match else 0
    if not size:
        raise UsageFault(f"'{text[:80]}' is not a shard size", hint="for example 5GB, 5G, 500MB or 1GiB")
    return size


# The result.


# The facts of a save that depend on what is in the checkpoint, by the names of Saved.
Facts = dict[str, Any]


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
        shared: how many bytes lie in blocks that the output shares with its inputs.
        given_back: names in a replaced folder of what another process put into the old one meanwhile.
        part: which part of the output was written, `3/16`; None where the output is whole.
        waiting: the numbers of the parts that are not written yet; none where another process finishes.
        not_removed: paths of what could not be removed of a replaced folder, each with the reason.
    """

    path: str = field(metadata={"json": "output"})
    format: str
    nbytes: int = field(metadata={"json": "bytes"})
    keys: int
    left_out: tuple[str, ...] = ()
    tied: tuple[str, ...] = noted("written once, with the tie in the metadata")
    copied: tuple[str, ...] = noted("written once per name, though they share memory")
    mentions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    text_keys: tuple[str, ...] = field(default=(), metadata={"if_any": True})
    keyed_by_text: tuple[str, ...] = field(default=(), metadata={"if_any": True})
    not_copied: tuple[str, ...] = field(default=(), metadata={"if_any": True})
    shards: int = field(default=0, metadata={"if_any": True})
    shared: int = field(default=0, metadata={"if_any": True})
    given_back: tuple[str, ...] = noted(
        "put into the folder by another process meanwhile, and kept", if_any=True
    )
    not_removed: tuple[str, ...] = noted("could not be removed", if_any=True)
    part: str | None = field(default=None, metadata={"if_any": True})
    waiting: tuple[int, ...] = field(default=(), metadata={"if_any": True})

    @property
    def why_left_out(self) -> str:
        """Why the format can't hold what was left out: words to follow the format's name."""
        return "has no place for it" if self.format in WHOLE else "holds only a state's tensors"


def report(checkpoint: Checkpoint, target: Destination, state: State | None, ties: Collection[str]) -> Facts:
    """Return what there is to say of an output, by Saved's names, and of a state in it."""
    kind, lost, facts = target.format, checkpoint.unread, Facts()
    if kind not in HEADED:  # those with no place for the text of a safetensors header
        lost += _lost_metadata(checkpoint)
    if state is not None and not target.holds_all:
        beside = [*state.others, *(["_metadata"] if state.versions is not None else [])]
        where = f"{state.where}." if state.path else ""
        lost = (*(where + name for name in beside), *checkpoint.outside(state), *lost)
        if kind == shards.TORCH:  # which keeps what is shared
            facts["devices"] = _devices(checkpoint, state.tensors.values())
        else:
            facts["tied"] = tuple(ties)
            facts["copied"] = copied({name: each for name, each in state.items() if name not in ties})
        return facts | {"keys": len(state.tensors), "left_out": lost}
    if kind == folders.DCP and not target.full:
        lost = (*need("dcp.reading").lost(checkpoint), *lost)
        facts["copied"] = copied(state.tensors) if state else ()
        facts["text_keys"] = need("dcp.reading").with_keys_made_text(checkpoint)
    if kind in PICKLES:
        facts["mentions"] = tuple(names_that_run(names_in(checkpoint.tree)))
        facts["devices"] = _devices(checkpoint, walk(checkpoint.tree))
    facts["keyed_by_text"] = _keyed_by_text(checkpoint, kind, target.full)
    return facts | {"keys": len(state.tensors) + len(state.likes) if state else 0, "left_out": lost}


def _devices(checkpoint: Checkpoint, values: Iterable[object]) -> tuple[str, ...]:
    """Return the devices other than the CPU that the storages among some values are written with."""
    storages = (value.storage if isinstance(value, TensorRef) else value for value in values)
    alike = {value.location: value for value in storages if isinstance(value, Storage)}
    written = (written_device(value, checkpoint.device) for value in alike.values())
    return tuple(sorted({*written} - {"cpu", "meta"}))


def _lost_metadata(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the text in a safetensors header, but for the note that its tensors are torch's."""
    texts = checkpoint.metadata.items()
    return tuple(f"metadata '{name}'" for name, text in texts if OF_TORCH.get(name) != text)


def _keyed_by_text(checkpoint: Checkpoint, kind: str, full: bool) -> tuple[str, ...]:
    """Return the optimizers whose keys were numbers, and are text because DCP has no others."""
    into, out_of = kind == folders.DCP and not full, checkpoint.format == folders.DCP
    if into == out_of:
        return ()
    views = ((name, OptimizerView(value)) for name, value in checkpoint.optimizers())
    numbered = (name for name, view in views if view.keeps_numbers(int if into else str))
    return tuple(name or need("dcp.reading").TOP for name in numbered)


def copied(tensors: Mapping[str, TensorRef]) -> tuple[str, ...]:
    """Return the names whose bytes another name has too; a format without sharing gives each a copy."""
    if len({id(tensor.storage) for tensor in tensors.values()}) == len(tensors):
        return ()
    reached: dict[int, int] = {}  # in each storage, how far the names before this one go
    names = set()
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].span[0]):
        (begin, end), before = tensor.span, reached.get(id(tensor.storage), 0)
        if begin < min(end, before):
            names.add(name)
        reached[id(tensor.storage)] = max(before, end)
    return tuple(name for name in tensors if name in names)
