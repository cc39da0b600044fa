"""The folder of a run: kept from other runs, checked and cleared before it trains. By rank 0 alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import stat
import tempfile
from collections.abc import Iterator

from ckpttool.errors import UsageFault
from ckpttool.files import chain
from ckpttool.files.failures import reason
from ckpttool.files.temporaries import remove_abandoned
from train.checkpoint import files as checkpoint_files
from train.checkpoint.files import BEST, LAST, LINK, NUMBERED
from train.config.training import TrainConfig
from train.log.log_file import LOG
from train.run import attempts

TENSORBOARD = os.path.join("tensorboard", "events.out.tfevents.*")

_held: set[int] = set()
"""Descriptors of the folders that this process has locked."""


def _release_in_child() -> None:
    """Close the descriptors that a fork has copied.

    A lock lasts as long as any process has one, and a process that loads data may outlive its rank.
    """
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def claimed(config: TrainConfig, now: str) -> Iterator[str]:
    """Make the folder for the run's files, and keep other runs out of it during the block.

    Args:
        now: names the folder, below runs/, if `--out` does not.

    Returns:
        Its path.

    Raises:
        UsageFault: it can't be made or written, another run writes to it now, or it already holds a run and
            no flag says what to do with it.
    """
    folder = config.out or _unused(os.path.join("runs", now))
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(folder, exist_ok=True)
            stack.enter_context(_locked(folder))
            _check_files(folder, config)
            check_writable(folder)
            remove_abandoned(folder)
            _remove_leftovers(folder)
            if not config.resume:
                _clear(folder)
        except OSError as error:
            raise UsageFault(f"--out {folder}: {reason(error)}") from error
        yield folder


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock a folder, itself and not a file in it, until the block or the process ends."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _held.add(fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageFault(
                f"--out {folder}: another run writes there now",
                hint="name another folder, or wait for it to end",
            ) from None
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
                raise  # those are of file systems that lock no folders, as NFS
        yield
    finally:
        _held.discard(fd)
        os.close(fd)


def _check_files(folder: str, config: TrainConfig) -> None:
    """Raise UsageFault if the folder holds a run that no flag allows to touch, or something to wait for."""
    own = _own_files(folder)
    if own and not config.force and not _goes_on_in(folder, config):
        raise UsageFault(
            f"{folder}: already holds a run",
            hint="--resume auto continues it, --force overwrites it, --out names another folder",
        )
    for path in own if config.resume else ():
        if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
            raise UsageFault(f"{path}: is a named pipe, not a file of a run", hint="remove it")
        real = os.path.realpath(path)
        is_folder, has_none = os.path.isdir(real), not os.path.isdir(os.path.dirname(real))
        if os.path.basename(path) in (LAST, BEST) and (is_folder or has_none):
            what = "a folder" if is_folder else "a link into a folder that does not exist"
            raise UsageFault(f"{path}: is {what}: no checkpoint can be written there", hint="move it away")
        if os.path.islink(path) and not path.endswith(".pt"):  # a checkpoint is replaced, not written into
            raise UsageFault(
                f"{path}: is a link, and what it leads to would be written into", hint="remove it"
            )


def check_writable(folder: str) -> None:
    """Raise OSError if no file can be made in the folder: now, and not after an epoch."""
    tempfile.TemporaryFile(dir=folder).close()


def _goes_on_in(folder: str, config: TrainConfig) -> bool:
    """Return whether the resumed run is the one in the folder, and not another that would overwrite it."""
    if config.resume in (None, "auto"):
        return config.resume == "auto"
    return os.path.realpath(os.path.dirname(config.resume)) == os.path.realpath(folder)


def _unused(folder: str) -> str:
    number, name = 1, folder
    while os.path.exists(name):
        number += 1
        name = f"{folder}-{number}"
    return name


def _clear(folder: str) -> None:
    """Remove a run's own files from its folder, so that nothing is left of an overwritten run."""
    for path in (*_own_files(folder), *glob.glob(os.path.join(glob.escape(folder), TENSORBOARD))):
        if not checkpoint_files.is_taken(path):
            os.unlink(path)


def _remove_leftovers(folder: str) -> None:
    """Remove second names that a killed run did not put in place; the lock says that no other run is at work.

    What `replacing` leaves behind, its next use in the folder removes.
    """
    for name in os.listdir(folder):
        if name.endswith(LINK) and _is_own(name.removesuffix(LINK)):
            os.unlink(os.path.join(folder, name))


def _is_own(name: str) -> bool:
    return name in (LAST, BEST, LOG, attempts.FILE, chain.NAME) or NUMBERED.fullmatch(name) is not None


def _own_files(folder: str) -> list[str]:
    """Return a run's files in its folder. One that ended early may have left only a log and a best.pt."""
    if not os.path.isdir(folder):
        return []
    return [os.path.join(folder, name) for name in os.listdir(folder) if _is_own(name)]
