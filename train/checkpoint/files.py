"""The checkpoints in a run's folder: last.pt, best.pt, step-<number>.pt or a delta. Imports torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import zipfile
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from ckpttool.errors import FileError, UsageFault
from ckpttool.files.commit import give_name, replacing
from ckpttool.files.failures import naming, system_error
from ckpttool.formats.delta.chains import needed_by

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
    with naming(wanted[0]):
        foreign = [path for path in wanted if is_taken(path, state.get("training", ""))]
    paths = [path for path in wanted if path not in foreign]
    placed = [] if placed is None else placed
    with naming(wanted[0]):
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
            with replacing(path) as file:
                torch.save(state, file)
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
        with naming(path, "removed"):
            os.unlink(path)


def drop_worse(folder: str, keep: Collection[int], training: str = "") -> None:
    """Remove the checkpoints of `--keep-best` of other steps than `keep`; what is not the run's stays."""
    kept = {numbered(step, "best") for step in keep}
    for path in _own(folder, "best-", training):
        if os.path.basename(path) not in kept:
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
        begin = _header(path) if path.endswith(DELTA) else _pickle(path)
    except Exception as error:  # of any kind: another program's file may be anything
        behind = system_error(error)
        if behind is None or behind.errno in (errno.EINVAL, errno.EACCES, errno.EPERM):
            return True  # EINVAL: a zip that speaks of a place before its start
        raise behind from None
    return any(mark not in begin for mark in (b"digests", b"global_step", training.encode()))


def _pickle(path: str) -> bytes:
    with zipfile.ZipFile(path) as file:
        name = next(name for name in file.namelist() if name.endswith("/data.pkl"))
        return file.open(name).read(LONGEST_PICKLE)


def _header(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(min(int.from_bytes(file.read(8), "little"), LONGEST_PICKLE))
