"""`--save-parts`: each rank writes its part of the tensors into a folder, and reads it. Imports torch.

The checkpoint's file, as last.pt, then holds all but the tensors, and names the folder beside it, such as
`step-000120-3fa1.dcp`, and the SHA-256 of each file in it. So it alone says which state is the run's, and is
replaced at once, as any other; a folder that none of the run's files names is removed. The folder is a
checkpoint of torch.distributed.checkpoint by itself: `model`, `optimizer.state` and `ema.averages`, by name.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from ckpttool import formats
from ckpttool.distributed import collectives, divided, nested
from ckpttool.errors import Damaged, FileError
from ckpttool.files.digest import sha256_of_file
from ckpttool.files.failures import naming
from ckpttool.system import sync_folder
from ckpttool.tensors.ref import TensorRef
from ckpttool.tensors.to_torch import loaded_tensor

FOLDER = re.compile(r"step-\d{6,}-[0-9a-f]{4}\.dcp")


def split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a captured state without its tensors, and copies of these on the CPU, by name."""
    optimizer, names = state["optimizer"], _names(state["optimizer"])
    entries = {names[index]: entry for index, entry in optimizer["state"].items()}
    tensors = {"model": state["model"], "optimizer": {"state": entries}}
    rest = state | {"model": {}, "optimizer": optimizer | {"state": {}}}
    if "ema" in state:
        tensors["ema"] = {"averages": state["ema"]["averages"]}
        rest["ema"] = state["ema"] | {"averages": {}}
    return rest, nested.mapped(tensors, lambda tensor: tensor.detach().to("cpu", copy=True))


def _names(optimizer: Mapping[str, Any]) -> dict[int, str]:
    groups = optimizer["param_groups"]
    pairs = (zip(group["params"], group["param_names"], strict=True) for group in groups)
    return {index: name for of_group in pairs for index, name in of_group}


class Parts:
    """The tensors of one checkpoint on their way into a folder.

    parts = Parts(tensors, folder, step)   # a collective: who writes what
    parts.write()                          # in a thread of each rank; no error of the disk is raised
    parts.agree()                          # a collective: raises it
    state["parts"] = parts.finish()        # in rank 0's thread
    """

    def __init__(self, tensors: dict[str, Any], folder: str, step: int) -> None:
        name = collectives.from_rank_zero(lambda: _new_name(folder, step))
        self.tensors, self.folder, self.path = tensors, folder, os.path.join(folder, name)
        self._planner, self._writer = DefaultSavePlanner(), FileSystemWriter(self.path)
        first = collectives.rank() == 0
        self._planner.set_up_planner(tensors, self._writer.storage_meta(), first)
        self._writer.set_up_storage_writer(first)
        local = collectives.gather(self._planner.create_local_plan())
        plans, self._metadata = collectives.from_rank_zero(lambda: self._planner.create_global_plan(local))
        plans = self._writer.prepare_global_plan(plans)
        self._plan = self._planner.finish_plan(plans[collectives.rank()])
        self._written: tuple[list[Any], dict[str, str]] = ([], {})
        self._of_ranks: list[tuple[list[Any], dict[str, str]]] = []
        self._failure: FileError | None = None

    def local(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the model's tensors, by name."""
        return {name: _local(tensor) for name, tensor in self.tensors["model"].items()}

    def shared(self) -> dict[str, Any]:
        """Return by name what is the same on all ranks of the model and the optimizer's state."""
        entries = self.tensors["optimizer"]["state"].items()
        state = {f"{kind} of {name}": value for name, entry in entries for kind, value in entry.items()}
        return {name: v for name, v in (self.tensors["model"] | state).items() if not divided.holds_parts(v)}

    def write(self) -> None:
        """Write this rank's file, and compute its digest. Sends nothing."""
        try:
            with naming(self.path):
                os.makedirs(self.path, exist_ok=True)
                results = self._writer.write_data(self._plan, self._planner).wait()
                files = {result.storage_data.relative_path for result in results}
                self._written = (
                    results,
                    {file: sha256_of_file(os.path.join(self.path, file)) for file in sorted(files)},
                )
        except FileError as failure:
            self._failure = failure

    def agree(self) -> FileError | None:
        """Return the first rank's error of the disk, if any. A collective."""
        answers = collectives.gather((self._failure, self._written))
        self._of_ranks = [written for _, written in answers]
        return next((failure for failure, _ in answers if failure), None)

    def finish(self) -> dict[str, Any]:
        """Complete the folder, after all ranks have written; return what the checkpoint's file says of it."""
        with naming(self.path):
            self._writer.finish(self._metadata, [results for results, _ in self._of_ranks])
            sync_folder(self.path)
            sync_folder(self.folder)
            files = {file: digest for _, of_rank in self._of_ranks for file, digest in of_rank.items()}
            files[".metadata"] = sha256_of_file(os.path.join(self.path, ".metadata"))
        return {"folder": os.path.basename(self.path), "files": files}


def _new_name(folder: str, step: int) -> str:
    while os.path.lexists(os.path.join(folder, name := f"step-{step:06d}-{secrets.token_hex(2)}.dcp")):
        pass  # of the same step, saved before
    return name


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- reading --------------------------------------------------------------------------------------------


def check(path: str, state: Mapping[str, Any]) -> None:
    """Raise Damaged if a file in the folder that a checkpoint names is not the one that was saved."""
    if "parts" not in state:
        return
    folder = _folder(path, state)
    for name, digest in state["parts"]["files"].items():
        file = os.path.join(folder, os.path.basename(name))
        try:
            found = sha256_of_file(file)
        except OSError as error:
            raise Damaged(path, f"its part {file} can't be read: {error.strerror}") from error
        if found != digest:
            raise Damaged(path, f"its part {file} is not the saved one")


def lie_in(folder: str) -> bool:
    """Return whether some checkpoint's parts lie in the folder of a run; no checkpoint is read."""
    return any(FOLDER.fullmatch(name) for name in os.listdir(folder))


def named_in(path: str) -> str:
    """Return the folder that a run's checkpoint names; the file itself if it holds its tensors.

    Damaged if a part is not the one that was saved.
    """
    with formats.open(path) as checkpoint:
        tree = checkpoint.tree
        if not isinstance(tree, dict) or not {"parts", "digests", "progress"} <= tree.keys():
            return path
        folder = _folder(path, tree)
        check(path, tree)
        return folder


def _folder(path: str, state: Mapping[str, Any]) -> str:
    parts = state["parts"]
    name = parts.get("folder") if isinstance(parts, dict) else None
    if not isinstance(name, str) or not FOLDER.fullmatch(name):
        raise Damaged(path, f"parts.folder is {name!r}")
    return os.path.join(os.path.dirname(path), name)


def joined(path: str, state: dict[str, Any], own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state with this rank's part of each tensor; as it is if the file holds them. Sends nothing.

    Args:
        path: of the checkpoint; the folder beside it is there on every rank.
        own: the model's tensors by name, which say how those that belong to them are divided.
    """
    if "parts" not in state:
        return state
    with formats.open(_folder(path, state)) as checkpoint:
        tree = checkpoint.tree

        def read(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: _part(name, value, own.get(name)) for name, value in values.items()}

        entries = {
            index: nested.mapped(entry, partial(_part, name, own=own.get(name)), kinds=TensorRef)
            for index, name in _names(state["optimizer"]).items()
            if (entry := tree["optimizer"]["state"].get(name))
        }
        whole = state | {"model": read(tree["model"]), "optimizer": state["optimizer"] | {"state": entries}}
        if "ema" in state:
            whole["ema"] = state["ema"] | {"averages": read(tree["ema"]["averages"])}
        return whole


def _part(name: str, value: Any, own: torch.Tensor | None) -> Any:
    if not isinstance(value, TensorRef):
        return value
    tensor = loaded_tensor(name, value)
    return tensor if own is None else divided.part_like(tensor, own)


# ---- the folders of a run -------------------------------------------------------------------------------


def remove_unnamed(folder: str) -> None:
    """Remove each folder of parts that no checkpoint in the run's folder names.

    Nothing is removed while one of them can't be read: it may name any.
    """
    with naming(folder, "listed"):
        names = os.listdir(folder)
    unnamed = [name for name in names if FOLDER.fullmatch(name)]
    if unnamed:
        try:
            told = b"".join(_pickles(os.path.join(folder, name) for name in names if name.endswith(".pt")))
        except Exception:  # zipfile and zlib raise many kinds for what is damaged, or no file of ours
            return
        for name in unnamed:
            if name.encode() not in told:
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _pickles(paths: Iterator[str]) -> Iterator[bytes]:
    for path in paths:
        with zipfile.ZipFile(path) as file:
            yield from (file.read(name) for name in file.namelist() if name.endswith("/data.pkl"))
