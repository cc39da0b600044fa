"""The files of a run's checkpoints: names, deltas, and parts that ranks write. Imports torch."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config as torch_config

from ckpttool.core import formats
from ckpttool.core.checkpoint.checkpoint import Checkpoint
from ckpttool.core.checkpoint.checksums import Checksums
from ckpttool.core.files.commit import give_name, naming, replacing, system_error
from ckpttool.core.files.copying import Output
from ckpttool.core.files.digest import sha256_of_file
from ckpttool.core.files.reflink import BLOCK
from ckpttool.core.formats import safetensors
from ckpttool.core.formats.pytorch import zip as torch_zip
from ckpttool.core.formats.reading import open_alone
from ckpttool.core.system import sync_folder
from ckpttool.core.tensors.ref import TensorRef
from ckpttool.core.tensors.values import loaded_tensor
from ckpttool.dcp.writing import Writer
from ckpttool.deltas.header import base_of, chain, needed_by
from ckpttool.deltas.reading import BaseMissing, DeltaLink, joined
from ckpttool.deltas.writing import delta
from ckpttool.distributed import collectives, transport
from ckpttool.errors import CkptToolError, Damaged, FileError, Unreadable, UsageFault
from ckpttool.models.fit import command_line

Placing = Callable[[], contextlib.AbstractContextManager[object]]

LAST, BEST = "last.pt", "best.pt"
DELTA = ".delta.safetensors"
# The names that `numbered` gives, and no others: `step-7.pt` is a user's.
NUMBER = r"(\d{6}|[1-9]\d{6,})"
NUMBERED = re.compile(rf"(step|best)-{NUMBER}\.pt|step-{NUMBER}\.delta\.safetensors")
# Bytes that are read of a checkpoint's pickle, to tell whose it is: a hundred thousand tensors take less.
LONGEST_PICKLE = 1 << 28


def write(
    state: dict[str, Any],
    folder: str,
    names: list[str],
    *,
    placing: Placing = contextlib.nullcontext,
    placed: list[str] | None = None,
) -> None:
    """Write one checkpoint under several names, each atomically.

    The first name is replaced last: a run that is killed before that goes on from the old file, and writes
    the others again. In the context that `placing` returns, the file, complete on the disk, gets its first
    name; an error is raised in it only if it did not. `placed` gets each name that is the new file's.
    FileError if the disk refuses, or a numbered name is another's file, which stays: of another program, or
    of another training than `state["training"]` says.
    """
    wanted = [os.path.join(folder, name) for name in names]
    placed = [] if placed is None else placed
    with naming(wanted[0]):
        foreign = [path for path in wanted if is_taken(path, state.get("training", ""))]
        paths = [path for path in wanted if path not in foreign]
        try:
            if paths:
                _write_first(state, paths[-1], placing, placed)
        except UsageFault as error:  # at the start it could be: the folder has changed since
            raise FileError(paths[0], error.message.removeprefix(f"{paths[-1]}: ")) from error
        for path in paths[-2::-1]:
            give_name(paths[-1], path)
            placed.append(os.path.basename(path))
    if foreign:
        reason = "is not a checkpoint of this run, and stays as it is"
        raise FileError(foreign[0], reason, hint="move it away")


def _write_first(state: dict[str, Any], path: str, placing: Placing, placed: list[str]) -> None:
    """Write the file under its first name, and add that to `placed` once the file has it."""
    inode, failure = None, None
    with contextlib.ExitStack() as while_placed:
        try:
            # On block boundaries, so that what is made of the file can share its blocks.
            aligned = torch_config.patch("save.storage_alignment", BLOCK)  # type: ignore[attr-defined]
            with replacing(path) as file, aligned:
                torch.save(_with_one_of_each_string(state), file)
                file.flush()
                os.fsync(file.fileno())
                while_placed.enter_context(placing())
                inode = os.fstat(file.fileno()).st_ino
        except OSError as error:
            if inode is None or not os.path.exists(path) or os.stat(path).st_ino != inode:
                raise
            failure = error  # the folder could not be flushed: the name is given, but may not last
    placed.append(os.path.basename(path))
    if failure:
        raise failure


def _with_one_of_each_string(value: Any) -> Any:
    """Return a value whose pickle does not depend on which strings were read from a file."""
    if isinstance(value, str):
        return sys.intern(value) if type(value) is str else value
    if isinstance(value, dict):
        made = copy.copy(value)  # of its type, and with its attributes
        made.clear()
        for key, item in value.items():
            made[_with_one_of_each_string(key)] = _with_one_of_each_string(item)
        return made
    if type(value) in (list, tuple):
        return type(value)(map(_with_one_of_each_string, value))
    return value


def numbered(global_step: int, kind: str = "step", ending: str = ".pt") -> str:
    """Return the file name of a numbered checkpoint.

    Args:
        kind: "best" for one of `--keep-best`.
        ending: DELTA for one that `--keep-deltas` keeps as what it changes.
    """
    return f"{kind}-{global_step:06d}{ending}"


def number_of(path: str) -> int:
    """Return the step in the name of a numbered checkpoint."""
    _, _, rest = os.path.basename(path).partition("-")
    return int(rest.partition(".")[0])


def newest_first(folder: str) -> list[list[str]]:
    """Return the names of each of a run's checkpoints, to be tried in order: last.pt, then others by time.

    A link that leads to nothing is a file too, and one to a folder is none.
    """
    others = [path for path in _by_time(folder, BEST) if os.path.isfile(path) or not os.path.exists(path)]
    paths = [os.path.join(folder, LAST), *others]
    names_of: dict[tuple[int, int], list[str]] = {}
    for path in filter(os.path.lexists, paths):
        facts = _facts(path)
        names_of.setdefault((facts.st_dev, facts.st_ino), []).append(path)
    return list(names_of.values())


def _by_time(folder: str, *more: str) -> list[str]:
    """Return the paths of what has a numbered name, or one of `more`; the newest first."""
    names = [name for name in os.listdir(folder) if NUMBERED.fullmatch(name) or name in more]
    paths = [os.path.join(folder, name) for name in names]
    return sorted(paths, key=lambda path: (_facts(path).st_mtime_ns, path), reverse=True)


def _facts(path: str) -> os.stat_result:
    """Return what is known of a file; of a link that leads to nothing, of the link."""
    return os.stat(path) if os.path.exists(path) else os.lstat(path)


def drop_old(folder: str, keep: int, training: str = "") -> None:
    """Remove all numbered checkpoints but the last `keep` written, and what their deltas are built on.

    By time, not by number: a run that went back to an earlier step writes small numbers last. Links, folders
    and other files of such a name, which no run of this training has written, stay and do not count.
    """
    of_steps: dict[int, list[str]] = {}
    for path in _own(folder, "step-", training):
        of_steps.setdefault(number_of(path), []).append(path)
    last = [path for paths in list(of_steps.values())[:keep] for path in paths]
    needed = needed_by(path for path in last if path.endswith(DELTA))
    others = [path for paths in list(of_steps.values())[keep:] for path in paths if path not in needed]
    for path in sorted(others, key=number_of, reverse=True):  # what is built on others goes before them
        _remove(path)


def drop_worse(folder: str, keep: Collection[int], training: str = "") -> None:
    """Remove the checkpoints of `--keep-best` of other steps than `keep`; what is not the run's stays."""
    kept = {numbered(step, "best") for step in keep}
    for path in _own(folder, "best-", training):
        if os.path.basename(path) not in kept:
            _remove(path)


def _remove(path: str) -> None:
    with naming(path, "removed"):
        os.unlink(path)


def _own(folder: str, kind: str, training: str) -> Iterator[str]:
    """Yield the paths of this training's numbered checkpoints of one kind, the newest first."""
    with naming(folder, "listed"):
        paths = _by_time(folder)
    for path in paths:
        if os.path.basename(path).startswith(kind):
            with naming(path, "removed"):
                is_foreign = _is_foreign(path, training)
            if not is_foreign:
                yield path


def is_taken(path: str, training: str = "") -> bool:
    """Return whether a path has a numbered name and what is there is not the run's, so it stays."""
    return NUMBERED.fullmatch(os.path.basename(path)) is not None and _is_foreign(path, training)


def _is_foreign(path: str, training: str) -> bool:
    """Return whether there is something that is no checkpoint of this training: a link, a folder, or a file
    whose pickle or header lacks digests, progress or the training. OSError if the disk does not tell."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return True
    except FileNotFoundError:
        return False
    try:
        begin = _begin(path)
    except Exception as error:  # of any kind: another program's file may be anything
        behind = system_error(error)
        if behind is None or behind.errno in (errno.EINVAL, errno.EACCES, errno.EPERM):
            return True  # EINVAL: a zip that speaks of a place before its start
        raise behind from None
    return any(mark not in begin for mark in (b"digests", b"global_step", training.encode()))


def _begin(path: str) -> bytes:
    """Return the header of a delta, or the pickle of a whole checkpoint."""
    if path.endswith(DELTA):
        with open(path, "rb") as file:
            return file.read(min(int.from_bytes(file.read(8), "little"), LONGEST_PICKLE))
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.open(name).read(LONGEST_PICKLE)


# ---- deltas ------------------------------------------------------------------------------------------

# A delta, `step-000012.delta.safetensors`, is built on the file of the save before, by its name. The newest
# checkpoint has a whole file too, `step-000012.pt`, which is last.pt by another name. It goes once the next
# is there, if its delta can be read: so a delta that fails, and a kill at any time, cost room and no
# checkpoint. A delta is built on lower steps alone; those that are built on a step which is saved anew go
# before it does.


HEAD = 9  # bytes that tell a file of tensors from others


class _Step(NamedTuple):
    """The files of a numbered checkpoint."""

    whole: str | None
    delta: str | None


def keep_delta(folder: str, step: int, every: int, training: str) -> str:
    """Write what the newest checkpoint changes of the one before it, unless it is to be kept whole.

    Returns:
        Why there is none although one is due; "" if that can't be said.
    """
    path = os.path.join(folder, numbered(step, ending=DELTA))
    try:
        with naming(path):
            before = _before(folder, step, training)
            links = _links(before.delta) or [path for path in (before.whole,) if path]
            if not 0 < len(links) < every:
                return ""
            if is_taken(path, training):
                return f"{path} is not a checkpoint of this run, and stays as it is"
            _write(before.whole or links[0], links[0], os.path.join(folder, numbered(step)), path)
            return ""
    except CkptToolError as error:
        return error.message


def _write(base: str, named: str, whole: str, path: str) -> None:
    """Write a delta of a base that will have another name, under which it makes the same."""
    try:
        delta(base, whole, path, base_name=os.path.basename(named), force=True)
        if named != base:  # the delta must be made from what `named` makes
            with open_alone(path) as new, formats.open(named) as old:
                joined(DeltaLink(old), new)  # compares the checksums that both state
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def drop_wholes(folder: str, newest: int, training: str) -> None:
    """Remove the whole files of numbered checkpoints whose deltas can be read, but that of the newest.

    One that a delta is built on stays: its own delta could not be read then.
    """
    for step in _steps(folder, ".pt") & _steps(folder, DELTA) - {newest}:
        whole, path = _files(folder, step, training)
        if whole and _links(path) and all(base != whole for _, base in _later(folder, step)):
            _remove(whole)


def drop_built_on(folder: str, step: int, training: str) -> list[str]:
    """Remove the delta of a step that is saved anew, and those built on that step; return their names."""
    names = {numbered(step, ending=ending) for ending in (".pt", DELTA)}
    paths = [os.path.join(folder, name) for name in names]
    doomed = {path for path in paths if os.path.lexists(path) and not is_taken(path, training)}
    if not doomed:
        return []
    for path, base in _later(folder, step):
        if base in doomed:
            doomed.add(path)
    of_run = [path for path in doomed if path.endswith(DELTA) and not is_taken(path, training)]
    for path in sorted(of_run, key=number_of, reverse=True):
        _remove(path)
    return sorted(os.path.basename(path) for path in of_run)


def _before(folder: str, step: int, training: str) -> _Step:
    """Return the files of this training's last checkpoint before a step."""
    steps = _steps(folder, ".pt") | _steps(folder, DELTA)
    earlier = sorted((number for number in steps if number < step), reverse=True)
    found = (_files(folder, number, training) for number in earlier)
    return next((files for files in found if files != (None, None)), _Step(None, None))


def _steps(folder: str, ending: str) -> set[int]:
    """Return the steps of the numbered files with an ending, whosever they are."""
    with naming(folder, "listed"):
        names = [name for name in os.listdir(folder) if name.startswith("step-") and name.endswith(ending)]
    return {number_of(name) for name in names if NUMBERED.fullmatch(name)}


def _files(folder: str, step: int, training: str) -> _Step:
    paths = [os.path.join(folder, numbered(step, ending=ending)) for ending in (".pt", DELTA)]
    own = [os.path.exists(path) and not is_taken(path, training) for path in paths]
    return _Step(*(path if is_own else None for path, is_own in zip(paths, own, strict=True)))


def _later(folder: str, step: int) -> Iterator[tuple[str, str | None]]:
    """Yield the deltas of later steps, in order, each with its base; without those that can't be read."""
    for number in sorted(number for number in _steps(folder, DELTA) if number > step):
        path = os.path.join(folder, numbered(number, ending=DELTA))
        with contextlib.suppress(Damaged, Unreadable):
            yield path, base_of(path)


def _links(path: str | None) -> list[str]:
    """Return a delta and all that it is built on; nothing if that is not there, or damaged."""
    try:
        return chain(path) if path else []
    except (Damaged, Unreadable):
        return []


@contextlib.contextmanager
def as_torch_reads(path: str) -> Iterator[str | IO[bytes]]:
    """Give a file as torch reads it: of a delta, a temporary one of what that makes of its base."""
    with open(path, "rb") as file:
        if not safetensors.sniff(file.read(HEAD)):
            yield path
            return
    folder = os.path.dirname(path) or "."  # it has room for a checkpoint, which /tmp may not have
    if not os.access(folder, os.W_OK):
        folder = tempfile.gettempdir()
    with _opened(path) as made, tempfile.TemporaryFile(prefix=".ckpttool-", dir=folder) as file:
        with Checksums(made, made.storages()) as checksums, naming(folder):
            with Output(file) as output:
                torch_zip.write(made, output, path)
            checksums.finish()
        file.seek(0)
        yield file


def _opened(path: str) -> Checkpoint:
    try:
        return formats.open(path)
    except BaseMissing as fault:
        # The hint is of BASE+DELTA, which commands take, and --resume does not.
        whole = command_line(["ckpttool", "apply", "BASE", fault.path, "WHOLE.pt"])
        raise Unreadable(fault.path, fault.reason, hint=f"put it there, or go on from: {whole}") from fault


# ---- parts -------------------------------------------------------------------------------------------

# The checkpoint's file, as last.pt, then holds all but the tensors, and names the folder beside it, such as
# `step-000120-0000.dcp`, and the SHA-256 of each file in it. So it alone says which state is the run's, and
# is replaced at once, as any other; a folder that none of the run's files names is removed. The folder is a
# checkpoint of torch.distributed.checkpoint by itself: `model`, `optimizer.state` and `ema.averages`, by
# name.


FOLDER = re.compile(r"step-\d{6,}-[0-9a-f]{4}\.dcp")


def split_parts(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a captured state without its tensors, and copies of these on the CPU, by name."""
    optimizer, names = state["optimizer"], _names(state["optimizer"])
    entries = {names[index]: entry for index, entry in optimizer["state"].items()}
    tensors = {"model": state["model"], "optimizer": {"state": entries}}
    rest = state | {"model": {}, "optimizer": optimizer | {"state": {}}}
    if "ema" in state:
        tensors["ema"] = {"averages": state["ema"]["averages"]}
        rest["ema"] = state["ema"] | {"averages": {}}
    return rest, transport.mapped(tensors, lambda tensor: tensor.detach().to("cpu", copy=True))


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
        self._planner, self._writer = DefaultSavePlanner(), Writer(self.path)
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
        tensors = self.tensors["model"].items()
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors}

    def shared(self) -> dict[str, Any]:
        """Return by name what is the same on all ranks of the model and the optimizer's state."""
        entries = self.tensors["optimizer"]["state"].items()
        state = {f"{kind} of {name}": value for name, entry in entries for kind, value in entry.items()}
        values = self.tensors["model"] | state
        return {name: value for name, value in values.items() if not transport.holds_parts(value)}

    def write(self) -> None:
        """Write this rank's file, and compute its digest. Sends nothing."""
        try:
            with naming(self.path):
                os.makedirs(self.path, exist_ok=True)
                results = self._writer.write_data(self._plan, self._planner).wait()
                files = {result.storage_data.relative_path for result in results}
                digests = {file: sha256_of_file(os.path.join(self.path, file)) for file in sorted(files)}
                self._written = (results, digests)
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
    names = (f"step-{step:06d}-{number:04x}.dcp" for number in itertools.count())
    return next(name for name in names if not os.path.lexists(os.path.join(folder, name)))


# ---- reading --------------------------------------------------------------------------------------------


def check_parts(path: str, state: Mapping[str, Any]) -> None:
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


def parts_lie_in(folder: str) -> bool:
    """Return whether some checkpoint's parts lie in the folder of a run; no checkpoint is read."""
    return any(FOLDER.fullmatch(name) for name in os.listdir(folder))


def parts_named_in(path: str) -> str:
    """Return the folder that a run's checkpoint names; the file itself if it holds its tensors.

    Damaged if a part is not the one that was saved.
    """
    with formats.open(path) as checkpoint:
        tree = checkpoint.tree
        if not isinstance(tree, dict) or not {"parts", "digests", "progress"} <= tree.keys():
            return path
        folder = _folder(path, tree)
        check_parts(path, tree)
        return folder


def _folder(path: str, state: Mapping[str, Any]) -> str:
    parts = state["parts"]
    name = parts.get("folder") if isinstance(parts, dict) else None
    if not isinstance(name, str) or not FOLDER.fullmatch(name):
        raise Damaged(path, f"parts.folder is {name!r}")
    return os.path.join(os.path.dirname(path), name)


def joined_parts(path: str, state: dict[str, Any], own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
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
            index: transport.mapped(entry, partial(_part, name, own=own.get(name)), kinds=TensorRef)
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
    return tensor if own is None else transport.part_like(tensor, own)


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
