"""Writing a whole checkpoint as the files that the ranks of an FSDP2 run would have saved.

Each rank gets `model_world_size_W_rank_R.pt`, its pieces of the model's state as DTensors, and where there is
an optimizer `optim_world_size_W_rank_R.pt`; everything else goes whole into `extra_state_…`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..checkpoint.checksums import Checksums
from ..checkpoint.dotted_names import Path, dotted, leave_out
from ..checkpoint.optimizer_view import is_optimizer
from ..checkpoint.rebuilt_tensors import with_plain_tensor
from ..checkpoint.special_tensors import require_plain
from ..checkpoint.states import BUFFERS
from ..contract import noted
from ..errors import NothingToDo, OutputExists, Refused, UsageFault
from ..files.commit import writing_into
from ..files.copying import Output
from ..files.dry_output import DryOutput
from ..files.pieces import Progress
from ..inert_pickle.values import remade
from ..tensors.ref import TensorRef
from ..words import first_few
from .output import OutputPlace
from .pytorch import zip as torch_zip
from .ranks.cut import Shards, SplitOptimizer
from .reading import open as open_any
from .safetensors import ties
from .saving.destination import copied
from .saving.reading_back import read_back, require_same

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"

NAME = "dtensor-ranks"

# The names of the files that are written, and that a new folder replaces.
FILE = re.compile(rf"(?:{MODEL}|{OPTIMIZER}|{EXTRA})_world_size_[0-9]+_rank_[0-9]+\.pt")

# The most files that are made of each kind.
MAX_RANKS = 65_536


@dataclass(frozen=True, slots=True)
class Split:
    """What `split` wrote.

    Attributes:
        path: the folder.
        ranks: how many ranks there are files for.
        device: the type of the devices in their mesh.
        files: names of the files, those of one rank after another.
        nbytes: bytes of all of them.
        sharded: names of the state that were cut.
        whole: names of the state that each rank holds whole, as buffers.
        optimizer: dotted path of the optimizer in the input; None when it has none.
        repeated: names of what each rank's `extra_state` holds.
        left_out: what of the input no file holds.
        perhaps_buffers: names of the state that were cut, though the optimizer knows no such parameter.
        removed: files of an earlier split in the folder that have no successor of their name.
        copied: names that were cut apart from others, though they share memory with them; ties stay ties.
    """

    path: str = field(metadata={"json": "output"})
    ranks: int
    device: str
    files: tuple[str, ...]
    nbytes: int = field(metadata={"json": "bytes"})
    sharded: tuple[str, ...] = field(metadata={"counted": True})
    optimizer: str | None
    whole: tuple[str, ...] = noted("whole on every rank, as buffers are (--whole adds others)")
    perhaps_buffers: tuple[str, ...] = noted(
        "cut, though no parameter of the optimizer (--whole NAME, if it is a buffer)"
    )
    repeated: tuple[str, ...] = noted("the same in extra_state of every rank")
    removed: tuple[str, ...] = noted("removed, as files of an earlier split")
    copied: tuple[str, ...] = noted("cut apart from tensors that they share memory with")
    left_out: tuple[str, ...] = noted("left out")


@takes_checkpoint
def split(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    ranks: int,
    *,
    state: str | None = None,
    device: str | None = None,
    axis: str | None = None,
    whole: Iterable[str] = (),
    verify: bool | None = None,
    force: bool = False,
    replace_all: bool = False,
    kept: Collection[str] = (),
    dry_run: bool = False,
    progress: Progress | None = None,
    expect: Progress | None = None,
) -> Split:
    """Write a checkpoint as files of ranks, which torch loads into a model under `fully_shard`.

    Parameters are cut along their first dimension over a mesh of one axis, as `fully_shard(model)` does, and
    so is what the optimizer keeps of each. Buffers stay whole: integers, tensors without axes, BatchNorm's
    statistics, and what `whole` names. Bytes are moved from file to file.

    Args:
        checkpoint: what `ckpttool.open` or a transform returned.
        path: the folder to write; it appears complete or not at all. It may be a URL, as for `save`.
        ranks: how many ranks there are, 1 to 65,536.
        state: dotted path of the model's state; found when None.
        device: the type of the ranks' devices, which their mesh has: `cuda`, `cpu`, …; when None that of the
            ranks that wrote the input, else `cuda`.
        axis: the name of the mesh's axis, where the training names it.
        whole: shell patterns of further names that are buffers, or parameters that FSDP2 was told to ignore.
        verify: None: compare what is read with the checksums that its file states, and read back names, types
            and shapes. True: read back the values too. False: do not compare checksums either.
        force: replace the files of ranks in an existing folder.
        replace_all: with `force`, also remove files of ranks of which the new checkpoint has no kind, such as
            an optimizer's where it has none.
        kept: names of other files that may be in a folder which is replaced, and stay in it.
        dry_run: write nothing: the same result and the same errors.
        progress: called with the number of bytes after each piece.
        expect: called first, with about the number of bytes that progress will come to.

    Returns:
        What was written.

    Raises:
        UsageFault: `ranks` or `device` is none, or the place can't be written.
        OutputExists: the folder is there, and `force` is not given; or it holds a kind of files
            that the new checkpoint lacks, and `replace_all` is not given.
        NothingToDo: no tensor would be cut, or a pattern of `whole` matches no name.
        Refused: a tensor is not a plain one, there are several optimizers, or one keeps a tensor of another
            shape than its parameter.
        NoState: the file holds no state, or none at `state`.
        Damaged: what was read does not have its checksum, or what was written does not read back as intended.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     parted = ckpttool.split(checkpoint, "two", 2)
        >>> ckpttool.merge("two", "again.safetensors").keys
        7
    """
    named = OutputPlace.at(path, force, (checkpoint,))
    with named.local(dry_run, progress, expect) as place:
        name = place.path
        device = device or (checkpoint.ranks.device if checkpoint.ranks else "") or "cuda"
        _require_sense(ranks, device)
        if name == "-":
            raise UsageFault(
                "-: the files of ranks are a folder, and can't be streamed", hint="name a folder"
            )
        place.require(_replaced, lambda: kept)
        plan = SplitPlan(replace(checkpoint, device="cpu"), state, tuple(whole), ranks, device, axis)
        old = _replaced(name) if os.path.isdir(name) else []
        lost = [file for file in old if not file.startswith(plan.kinds)]
        if lost and not replace_all:
            what = f"{name}: holds {first_few(lost, 2)}, which nothing in the new checkpoint would replace"
            raise OutputExists(what, hint="name a new folder; --replace-all removes them too")
        if expect is not None:
            expect(0 if dry_run else plan.work(verify=bool(verify)))
        storages = checkpoint.storages() if verify is not False and not dry_run else ()
        sizes: dict[str, int] = {}
        with Checksums(checkpoint, storages) as checksums:
            if dry_run:
                for file, part in plan.files():
                    torch_zip.write(part, dry := DryOutput(), file)
                    sizes[file] = dry.position
                return plan.report(named.path, sizes, old)
            with place.folder(_replaced, kept) as new:
                for file, part in plan.files():
                    target = os.path.join(new.path, file)
                    with writing_into(target) as raw, Output(raw, progress=progress) as out:
                        torch_zip.write(part, out, file)
                    sizes[file] = out.position
                checksums.finish()
                plan.compare(new.path, name, values=bool(verify), progress=progress)
        return plan.report(named.path, sizes, old)


def _require_sense(ranks: int, device: str) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageFault(f"{ranks} is not a number of ranks from 1 to {MAX_RANKS}")
    if not re.fullmatch(r"[a-z]+", device):
        raise UsageFault(f"'{device[:80]}' is not a type of device", hint="say for example: --device cpu")


def _replaced(folder: str) -> list[str]:
    return sorted(filter(FILE.fullmatch, os.listdir(folder)))


class SplitPlan:
    """The parts of a checkpoint, and which tensors are cut."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        where: str | None,
        patterns: tuple[str, ...],
        ranks: int,
        device: str,
        axis: str | None,
    ) -> None:
        self.checkpoint, self.path = checkpoint, checkpoint.path
        self.ranks, self.device, self.axis = ranks, device, axis
        self.state = checkpoint.state(where)
        self.tensors = self.state.tensors
        require_plain(self.path, self.state.likes, "can't be cut into pieces")
        buffers = {name for name, tensor in self.tensors.items() if _is_buffer(name, tensor)}
        for pattern in patterns:
            named = [name for name in self.tensors if fnmatchcase(name, pattern)]
            buffers.update(named)
            if not named:
                hint = f"the last key is '{next(reversed(self.tensors), '')}'"
                raise NothingToDo(f"{self.path}: no key matches '{pattern}'", hint=hint)
        views = {self.tensors[name].view for name in buffers}  # what is tied to a whole one stays whole
        buffers.update(name for name, tensor in self.tensors.items() if tensor.view in views)
        self.sharded = tuple(name for name in self.tensors if name not in buffers)
        self.whole = tuple(name for name in self.tensors if name in buffers)
        if not self.sharded:
            raise NothingToDo(f"{self.path}: no tensor would be cut: each is a buffer, without axes or named")
        self.optimizer = self._only_optimizer(asked=bool(patterns))
        self.extra = self._without_both()

    def _only_optimizer(self, *, asked: bool) -> SplitOptimizer | None:
        tree = self.checkpoint.tree
        entries = tree.items() if isinstance(tree, dict) else ()
        match [(str(key), value) for key, value in entries if is_optimizer(value)]:
            case []:
                return None
            case [(name, value)]:
                return SplitOptimizer(self.path, (name,), value, self.tensors, self.sharded, asked=asked)
            case optimizers:
                names = ", ".join(f"'{name}'" for name, _ in optimizers)
                what = f"holds {len(optimizers)} optimizers ({names}), and a rank has one file for one"
                raise Refused(self.path, what, hint=leave_out(self.path, optimizers[-1][0]))

    def _without_both(self) -> dict[Any, Any]:
        """Return what is neither the model's state nor the optimizer, in its dicts."""
        if not self.state.path:  # as torchtitan has it: the model's names at the top, between dicts
            beside = ((k, v) for k, v in self.state.container.items() if self._is_beside(k, v))
            return {key: value for key, value in beside if not is_optimizer(value)}
        tree = _without(self.checkpoint.tree, self.state.path)
        return _without(tree, self.optimizer.path) if self.optimizer else tree

    def _is_beside(self, key: object, value: object) -> bool:
        """Return whether an entry at the top, where the model's names are, belongs to no module."""
        return isinstance(value, dict) and not any(name.startswith(f"{key}.") for name in self.tensors)

    @property
    def kinds(self) -> tuple[str, ...]:
        """How the names of the files begin."""
        return (MODEL, *([OPTIMIZER] if self.optimizer else []), *([EXTRA] if self.extra else []))

    def files(self) -> Iterator[tuple[str, Checkpoint]]:
        """Yield each file's name with what goes into it, rank by rank."""
        whole = replace(self.checkpoint, protocol=2, opened=(), full=False, ranks=None)
        for rank in range(self.ranks):
            shards = Shards(self.path, rank, self.ranks, self.device, self.axis)
            optimizer = self.optimizer.of_rank(shards) if self.optimizer else None
            trees = {MODEL: self._model(shards), OPTIMIZER: optimizer, EXTRA: self.extra}
            for kind in self.kinds:
                yield f"{kind}_world_size_{self.ranks}_rank_{rank}.pt", replace(whole, tree=trees[kind])

    def _model(self, shards: Shards) -> object:
        cut, container = {*self.sharded}, self.state.container

        def value(name: str, old: object) -> object:
            if (tensor := self.tensors.get(name)) is None:
                return old
            return shards.record(name, tensor) if name in cut else with_plain_tensor(old, tensor)

        items = container.items()
        if not self.state.path:
            items = {key: old for key, old in items if not self._is_beside(key, old)}.items()
        return remade(container, ((key, value(str(key), old)) for key, old in items))

    # The result

    def work(self, *, verify: bool) -> int:
        """Return about the number of bytes that progress will come to."""
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        cut = sum(self.tensors[name].nbytes for name in self.sharded)
        of_optimizer = self.optimizer.nbytes if self.optimizer else 0
        return cut + of_optimizer + (total - cut) * self.ranks + 2 * verify * total

    def compare(self, folder: str, path: str, *, values: bool, progress: Progress | None) -> None:
        """Compare what was written with what was meant, as the merged whole reads back."""
        where = "model" if self.optimizer or self.extra else ""
        with read_back(path, folder), open_any(folder) as written:
            again = written.state(where).tensors
            require_same(path, again, self.tensors, values=values, progress=progress)

    def report(self, path: str, sizes: Mapping[str, int], old: Collection[str]) -> Split:
        """Return what was written."""
        # No file holds the rest of a dict that the state is a part of, attributes, and unread values.
        above = f"{dotted(self.state.path)}." if self.state.path else ""
        beside, tied = self.checkpoint.outside(replace(self.state, path=())), ties(self.tensors, {})
        cut = {id(self.tensors[name].storage) for name in self.sharded}
        parted = (name for name in copied(self.state) if id(self.tensors[name].storage) in cut)
        return Split(
            path,
            self.ranks,
            self.device,
            files=(*sizes,),
            nbytes=sum(sizes.values()),
            sharded=self.sharded,
            whole=self.whole,
            optimizer=dotted(self.optimizer.path) if self.optimizer else None,
            repeated=tuple(map(str, self.extra)),
            left_out=(*(f"{above}{name}" for name in beside), *self.checkpoint.unread),
            perhaps_buffers=self.optimizer.without if self.optimizer else (),
            removed=tuple(name for name in old if name not in sizes),
            copied=tuple(name for name in parted if name not in tied),
        )


def _is_buffer(name: str, tensor: TensorRef) -> bool:
    """Return whether a tensor is no parameter that FSDP2 cuts: without axes, integers, running statistics."""
    floats = any(kind in tensor.dtype.name for kind in ("float", "complex"))
    return not tensor.shape or not floats or name.rpartition(".")[2] in BUFFERS


def _without(tree: dict[Any, Any], path: Path) -> dict[Any, Any]:
    """Return nested dicts without the entry at a path, and without dicts that become empty thereby."""
    inner = _without(tree[path[0]], path[1:]) if len(path) > 1 else {}
    return remade(tree, ((k, inner if k == path[0] else v) for k, v in tree.items() if k != path[0] or inner))
