"""DTensors as they are pickled: pieces of tensors with the mesh and the place of the rank that holds them.

The form is that of torch 2.15; a test compares it with what FSDP2 writes. Cached hashes are left out, as
they mean nothing in another process.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.checksums import Checksums
from ..core.checkpoint.dotted_names import Path, dotted, leave_out
from ..core.checkpoint.optimizer_view import OptimizerView, is_optimizer
from ..core.checkpoint.special_tensors import plain_tensor, require_plain, special_tensor, with_plain_tensor
from ..core.checkpoint.state import BUFFERS
from ..core.files.commit import writing_into
from ..core.files.copying import DryOutput, Output
from ..core.files.reflink import AUTO
from ..core.files.threads import Progress
from ..core.formats.destination import copied, read_back, require_same
from ..core.formats.output import OutputPlace
from ..core.formats.pytorch import zip as torch_zip
from ..core.formats.reading import open as open_any
from ..core.formats.safetensors import ties
from ..core.inert_pickle.values import Global, Record, remade, tensor_of, walk
from ..core.tensors.ref import DTYPES, Computed, TensorRef, contiguous_stride
from ..core.tensors.values import TensorPart, assembled
from ..core.words import first_few, noted
from ..errors import NothingToDo, OutputExists, Refused, UsageFault

TENSOR = "torch.distributed.tensor"
LAYOUT = "torch.distributed._mesh_layout"
DTENSOR = Global(TENSOR, "DTensor")


class Shards:
    """The pieces of one rank, on a mesh of one axis, cut along the first dimension as FSDP2 does."""

    def __init__(self, path: str, rank: int, ranks: int, device: str, axis: str | None) -> None:
        self.path, self.rank, self.ranks = path, rank, ranks
        self._mesh = self._new_mesh(device, axis)
        self._made: dict[tuple[object, ...], Record] = {}

    def record(self, name: str, whole: TensorRef) -> Record:
        """Return a tensor's piece as the DTensor that this rank would save; one object for tied names."""
        if whole.view not in self._made:
            self._made[whole.view] = self._new(whole, self._piece(name, whole))
        return self._made[whole.view]

    def _piece(self, name: str, whole: TensorRef) -> TensorRef:
        """Return this rank's rows, of ceil(rows / ranks) each; the last ranks may have fewer, or none."""
        rows = -(-whole.shape[0] // self.ranks)
        begin = min(self.rank * rows, whole.shape[0])
        shape = (min(rows, whole.shape[0] - begin), *whole.shape[1:])
        offset = whole.offset + (begin * whole.stride[0] if 0 not in shape else 0)
        view = replace(whole, shape=shape, offset=offset, requires_grad=False)
        if not view.is_stretch:
            return assembled(name, self.path, view.dtype, shape, [TensorPart((0,) * len(shape), view)])
        old = whole.storage
        where = {"location": old.location, "byteorder": old.byteorder}
        return TensorRef.of_bytes(view.data, view.dtype, shape, old, **where)

    def _new(self, whole: TensorRef, local: TensorRef) -> Record:
        dtype, stride = Global("torch", whole.dtype.name), contiguous_stride(whole.shape)
        size = Record("reduce", Global("torch", "Size"), (whole.shape,))
        spec = {
            "mesh": self._mesh,
            "placements": (_object(f"{TENSOR}.placement_types", "Shard", {"dim": 0}),),
            "tensor_meta": Record("newobj", _spec("TensorMeta"), (size, stride, dtype)),
            "shard_order": (Record("newobj", _spec("ShardOrderEntry"), (0, (0,))),),
            "use_strided_shard_as_shard_order": False,
            "_hash": None,
        }
        layout = Record("reduce", Global("torch.serialization", "_get_layout"), ("torch.strided",))
        device = Record("reduce", Global("torch", "device"), ("cpu",))
        args = (DTENSOR, dtype, whole.shape, stride, 0, layout, device, False)
        state = {"_local_tensor": local, "_spec": _object(f"{TENSOR}._dtensor_spec", "DTensorSpec", spec)}
        return Record(
            "reduce",
            Global("torch._tensor", "_rebuild_from_type_v2"),
            (Global("torch._utils", "_rebuild_wrapper_subclass"), DTENSOR, args, (None, state)),
        )

    def _new_mesh(self, device: str, axis: str | None) -> Record:
        raw = struct.pack(f"<{self.ranks}i", *range(self.ranks))
        data = Computed.in_memory(self.path, raw)
        ranks = TensorRef.of_bytes(data, DTYPES["int32"], (self.ranks,))
        # torch drops axes of one.
        sizes: dict[str, object] = {"shape": (self.ranks,), "stride": (1,)}
        line = _object(LAYOUT, "_FlatLayout", sizes if self.ranks > 1 else {"shape": (), "stride": ()})
        state = {
            "_device_type": device,
            "_layout": _object(LAYOUT, "_MeshLayout", {"axes": (line,)}),
            "_rank_map": ranks,
            "_mesh_dim_names": None if axis is None else (axis,),
            "_root_mesh": None,
            "_preserve_rank_order": False,
            "_flatten_rank_map": tuple(range(self.ranks)),
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": ["0"],
            "_rank": self.rank,
            "_coordinate_on_dim": (self.rank,),
        }
        return _object("torch.distributed.device_mesh", "DeviceMesh", state)


def _spec(name: str) -> Global:
    return Global(f"{TENSOR}._dtensor_spec", name)


def _object(module: str, name: str, state: dict[str, object]) -> Record:
    return Record("newobj", Global(module, name), (), state=state, has_state=True)


Shape = tuple[int, ...]


class SplitOptimizer:
    """An optimizer's state, and which of its tensors are cut."""

    def __init__(
        self,
        file: str,
        path: Path,
        value: dict[Any, Any],
        tensors: Mapping[str, TensorRef],
        sharded: Collection[str],
        *,
        asked: bool,
    ) -> None:
        self.file, self.path, self.view = file, path, OptimizerView(value)
        state, names, cut = self.view.nested["state"], self.view.names, {*sharded}
        if not isinstance(state, dict):
            raise self._refused(f"'{dotted(path)}' has a {type(state).__name__} for its `state`")
        self.whole: set[object] = set()
        unnamed: list[object] = []
        spare = Counter(tensors[name].shape for name in sharded)
        for key in state:
            name = key if key in tensors else names.get(str(key))
            if name not in tensors:
                unnamed.append(key)
            elif name not in cut:
                self.whole.add(key)
            else:
                self._require_shape(key, tensors[name].shape)
                spare[tensors[name].shape] -= 1
        # As many parameters as are cut, of the same shapes: what stays whole is none of the optimizer's.
        parameters = {tensors[name].view for name in sharded}
        if asked and unnamed and len(parameters) != sum(map(len, self.view.keys)):
            what = f"the optimizer does not say whether its parameter {unnamed[0]!s:.80} stays whole"
            hint = "name its parameters first (--model SPEC, if not in the state's order)"
            command = f"ckpttool optimizer {shlex.quote(file)} named.pt --to names --order state"
            raise Refused(file, what, hint=f"{hint}: {command}")
        for key in unnamed:
            self._require_one_of(key, spare)
        known = set() if unnamed else {*names.values(), *map(str, state)}
        views = {tensors[name].view for name in known & tensors.keys()}  # a tied parameter has two names
        self.without = tuple(name for name in sharded if views and tensors[name].view not in views)
        """Names of the model's that are cut, and that the optimizer, which names its parameters, has not."""

    def _require_shape(self, key: object, shape: Shape) -> None:
        for kept, tensor in self._shaped(key):
            if tensor.shape != shape:
                raise self._of_unknown_cut(key, kept, tensor, f", and the parameter has {list(shape)}")

    def _require_one_of(self, key: object, spare: Counter[Shape]) -> None:
        """Check what is kept of an unknown parameter: one shape, that of a parameter which is no other's."""
        first: TensorRef | None = None
        for kept, tensor in self._shaped(key):
            if first is not None and tensor.shape != first.shape:
                raise self._of_unknown_cut(key, kept, tensor, f", and something else in {list(first.shape)}")
            if first is None and spare[tensor.shape] < 1:
                fewer = "fewer parameters have" if tensor.shape in spare else "no parameter has"
                raise self._of_unknown_cut(key, kept, tensor, f", which {fewer}")
            first = tensor
        if first is not None:
            spare[first.shape] -= 1

    def _of_unknown_cut(self, key: object, kept: object, tensor: TensorRef, why: str) -> Refused:
        what = f"keeps '{kept!s:.80}' of parameter {key!s:.80} in shape {list(tensor.shape)}"
        return self._refused(f"{what}{why}: how ranks cut it is unknown")

    def _refused(self, why: str) -> Refused:
        return Refused(self.file, f"the optimizer {why}", hint=leave_out(self.file, dotted(self.path)))

    def _shaped(self, key: object) -> Iterator[tuple[object, TensorRef]]:
        """Yield what is kept of a parameter in tensors with axes, which are cut."""
        entry = self.view.state[key]
        for kept, value in entry.items() if isinstance(entry, dict) else [("all", entry)]:
            tensor = plain_tensor(value)
            if tensor is None or not isinstance(entry, dict):
                if uncut := next(filter(None, map(_uncut, walk(value))), ""):
                    what = f"keeps {uncut} in '{kept!s:.80}' of parameter {key!s:.80}"
                    raise self._refused(f"{what}: how ranks cut it is unknown")
            elif tensor.shape:
                yield kept, tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are cut."""
        keys = (key for key in self.view.state if key not in self.whole)
        return sum(tensor.nbytes for key in keys for _, tensor in self._shaped(key))

    def of_rank(self, shards: Shards) -> dict[Any, Any]:
        """Return one rank's optimizer, keyed as this one."""

        def piece(name: str, value: object) -> object:
            tensor = plain_tensor(value)
            return shards.record(name, tensor) if tensor is not None and tensor.shape else value

        def of_parameter(key: object, entry: Any) -> object:
            if not isinstance(entry, dict) or key in self.whole:
                return entry
            pieces = ((kept, piece(f"{key!s:.80}.{kept}", value)) for kept, value in entry.items())
            return remade(entry, pieces)

        entries = {key: of_parameter(key, entry) for key, entry in self.view.state.items()}
        new = self.view.nested | {"state": remade(self.view.state, entries.items())}
        return remade(self.view.nested, new.items())


def _uncut(value: object) -> str:
    """Return what a value is in words, if it is a tensor that is more than a number; else `""`."""
    tensor = tensor_of(value)
    if tensor is not None:
        return f"a tensor of shape {list(tensor.shape)}" if tensor.shape else ""
    like = special_tensor(value)
    return f"a tensor that is {like.kind}" if like is not None else ""


# ---- Writing a whole checkpoint as the files that the ranks of an FSDP2 run would have saved.
#
# Each rank gets `model_world_size_W_rank_R.pt`, its pieces of the model's state as DTensors, and where
# there is an optimizer `optim_world_size_W_rank_R.pt`; everything else goes whole into `extra_state_…`.


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
    reflink: str = AUTO,
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
        reflink: as for `save`.
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
            shape than its parameter; or blocks should always be shared, and can't be.
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
        sharing = place.sharing(reflink, lambda: checkpoint.sources)
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
                    torch_zip.write(part, dry := DryOutput(sharing), file)
                    sizes[file] = dry.position
                return plan.report(named.path, sizes, old)
            with place.folder(_replaced, kept) as new:
                for file, part in plan.files():
                    target = os.path.join(new.path, file)
                    opened = partial(Output, progress=progress, reflink=sharing)
                    with writing_into(target) as raw, opened(raw) as out:
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
        parted = (name for name in copied(self.state.tensors) if id(self.tensors[name].storage) in cut)
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
