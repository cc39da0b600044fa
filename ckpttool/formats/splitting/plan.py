"""What each rank's files hold of a whole checkpoint that is split."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import Path, dotted
from ...checkpoint.flat_optimizers import as_nested
from ...checkpoint.rebuilt_tensors import with_plain_tensor
from ...checkpoint.special_tensors import require_plain
from ...checkpoint.states import BUFFERS, is_optimizer
from ...errors import Damaged, FileError, NothingToDo, Refused
from ...files.copying import Progress
from ...inert_pickle.values import remade
from ...tensors.ref import TensorRef
from ..reading import open as open_any
from .cut import Shards, SplitOptimizer

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"

Files = Iterator[tuple[str, Checkpoint]]


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
    """

    path: str
    ranks: int
    device: str
    files: tuple[str, ...]
    nbytes: int
    sharded: tuple[str, ...]
    whole: tuple[str, ...]
    optimizer: str | None
    repeated: tuple[str, ...]
    left_out: tuple[str, ...]
    perhaps_buffers: tuple[str, ...]
    removed: tuple[str, ...] = ()


class SplitPlan:
    """The parts of a checkpoint, and which tensors are cut."""

    def __init__(self, checkpoint: Checkpoint, where: str | None, patterns: tuple[str, ...]) -> None:
        self.checkpoint = checkpoint
        self.state = checkpoint.state(where)
        path = checkpoint.path
        require_plain(path, self.state.likes, "can't be cut into pieces")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self.state.tensors):
                last = next(reversed(self.state.tensors), "")
                raise NothingToDo(f"{path}: no key matches '{pattern}'", hint=f"the last key is '{last}'")
        self.sharded = tuple(
            name
            for name, tensor in self.state.tensors.items()
            if not _is_buffer(name, tensor) and not any(fnmatchcase(name, p) for p in patterns)
        )
        if not self.sharded:
            raise NothingToDo(f"{path}: no tensor would be cut: each is a buffer, without axes or named")
        self.optimizer = self._only_optimizer(asked=bool(patterns))
        self.extra = self._without_both()

    def _only_optimizer(self, *, asked: bool) -> SplitOptimizer | None:
        tree = self.checkpoint.tree
        if not isinstance(tree, dict):
            return None
        optimizers = [(str(key), value) for key, value in tree.items() if is_optimizer(value)]
        if len(optimizers) > 1:
            names = ", ".join(f"'{name}'" for name, _ in optimizers)
            raise Refused(
                self.checkpoint.path,
                f"holds {len(optimizers)} optimizers ({names}), and a rank has one file for one",
                hint="leave one out first: ckpttool convert IN OUT --drop NAME",
            )
        if not optimizers:
            return None
        name, value = optimizers[0]
        tensors, path = self.state.tensors, self.checkpoint.path
        return SplitOptimizer(path, (name,), as_nested(value), tensors, self.sharded, asked=asked)

    def _without_both(self) -> dict[Any, Any]:
        """Return what is neither the model's state nor the optimizer, in its dicts."""
        if not self.state.path:  # as torchtitan has it: the model's names at the top, between dicts
            return {
                key: value
                for key, value in self.state.container.items()
                if self._is_beside(key, value) and not is_optimizer(value)
            }
        taken = [self.state.path, *([self.optimizer.path] if self.optimizer else [])]
        tree = self.checkpoint.tree
        for path in taken:
            tree = _without(tree, path) if path else {}
        return tree if isinstance(tree, dict) else {}

    def _is_beside(self, key: object, value: object) -> bool:
        """Return whether an entry at the top, where the model's names are, belongs to no module."""
        return isinstance(value, dict) and not any(name.startswith(f"{key}.") for name in self.state.tensors)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What no file holds: the rest of a dict that the state is a part of, attributes, unread values."""
        above = f"{dotted(self.state.path)}." if self.state.path else ""
        beside = self.checkpoint.outside(replace(self.state, path=()))
        return (*(f"{above}{name}" for name in beside), *self.checkpoint.unread)

    @property
    def kinds(self) -> tuple[str, ...]:
        """How the names of the files begin."""
        return (MODEL, *([OPTIMIZER] if self.optimizer else []), *([EXTRA] if self.extra else []))

    def files(self, *, ranks: int, device: str, axis: str | None) -> Files:
        """Yield each file's name with what goes into it, rank by rank."""
        for rank in range(ranks):
            shards = Shards(self.checkpoint.path, rank, ranks, device, axis)
            trees: dict[str, object] = {MODEL: self._model(shards)}
            if self.optimizer:
                trees[OPTIMIZER] = self.optimizer.of_rank(shards)
            if self.extra:
                trees[EXTRA] = self.extra
            for kind, tree in trees.items():
                yield f"{kind}_world_size_{ranks}_rank_{rank}.pt", self._with(tree)

    def _with(self, tree: object) -> Checkpoint:
        return replace(self.checkpoint, tree=tree, protocol=2, opened=(), full=False, ranks=None)

    def _model(self, shards: Shards) -> object:
        cut, container = {*self.sharded}, self.state.container

        def value(name: str, old: object) -> object:
            if name not in self.state.tensors:
                return old
            tensor = self.state.tensors[name]
            return shards.record(name, tensor) if name in cut else with_plain_tensor(old, tensor)

        items = container.items()
        if not self.state.path:
            items = {key: old for key, old in items if not self._is_beside(key, old)}.items()
        return remade(container, ((key, value(str(key), old)) for key, old in items))

    # The result

    def work(self, ranks: int, *, verify: bool, dry: bool) -> int:
        """Return about the number of bytes that progress will come to."""
        nbytes = {name: tensor.nbytes for name, tensor in self.state.tensors.items()}
        cut = sum(nbytes[name] for name in self.sharded) + (self.optimizer.nbytes if self.optimizer else 0)
        repeated = (sum(nbytes.values()) - sum(nbytes[name] for name in self.sharded)) * ranks
        return 0 if dry else cut + repeated + 2 * verify * sum(nbytes.values())

    def compare(self, folder: str, path: str, *, values: bool, progress: Progress | None) -> None:
        """Compare what was written with what was meant, as the merged whole reads back."""
        problem = "does not read back as intended, and was not kept"
        try:
            with open_any(folder) as written:
                tensors = written.state("model" if self.optimizer or self.extra else "").tensors
                meant = self.state.tensors
                same = _forms(tensors) == _forms(meant)
                if same and values:
                    from ...files.digest import digest

                    same = digest(tensors, progress) == digest(meant, progress)
        except FileError as fault:
            reason = fault.message.replace(f"{folder}{os.sep}", "").replace(f"{folder}: ", "")
            raise Damaged(path, f"{problem}: {reason}") from None
        if not same:
            raise Damaged(path, problem)

    def report(
        self, path: str, ranks: int, device: str, sizes: Mapping[str, int], old: Collection[str]
    ) -> Split:
        """Return what was written."""
        whole = tuple(name for name in self.state.tensors if name not in {*self.sharded})
        where = dotted(self.optimizer.path) if self.optimizer else None
        nbytes, repeated = sum(sizes.values()), tuple(map(str, self.extra))
        perhaps = self.optimizer.without if self.optimizer else ()
        left = self.left_out
        old = tuple(name for name in old if name not in sizes)
        return Split(
            path, ranks, device, (*sizes,), nbytes, self.sharded, whole, where, repeated, left, perhaps, old
        )


def _is_buffer(name: str, tensor: TensorRef) -> bool:
    """Return whether a tensor is no parameter that FSDP2 cuts: without axes, integers, running statistics."""
    floats = any(kind in tensor.dtype.name for kind in ("float", "complex"))
    return not tensor.shape or not floats or name.rpartition(".")[2] in BUFFERS


def _forms(tensors: Mapping[str, TensorRef]) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _without(tree: object, path: Path) -> object:
    """Return nested dicts without the entry at a path, and without dicts that become empty thereby."""
    assert isinstance(tree, dict)
    inner = _without(tree[path[0]], path[1:]) if len(path) > 1 else {}
    return remade(tree, ((k, inner if k == path[0] else v) for k, v in tree.items() if k != path[0] or inner))
