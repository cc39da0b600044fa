"""The folder of a run: its claim, its settings, and how often a step has failed in it.

By rank 0 alone. While it trains, attempts.json says which step it is in. A run that ends well, or by a signal
in good order, removes it; one that a rank leaves as `--grace` is over, or by a second Ctrl-C, takes the step
back. Otherwise the next start finds the step that failed there, also if rank 0 was killed. After the third
failure of one step in a row it refuses to go on, as another start would end in the same way.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckpttool.core.files import digest
from ckpttool.core.files.commit import LINK, locked, naming, reason, replacing
from ckpttool.core.files.resuming import remove_abandoned
from ckpttool.errors import CheckFailed, FileError, UsageFault
from ckpttool.inspecting.run_log import LOG
from train import console
from train.checkpoint.files import BEST, DELTA, LAST, NUMBERED, is_taken, remove_unnamed
from train.checkpoint.format import require_file, versions
from train.config import command_line
from train.config.sections import SavingConfig, TrainConfig
from train.launch import same_settings
from train.trainer.trainer import Trainer

ATTEMPTS = "attempts.json"
TRIES = 3
# Digits of the step, which is overwritten in place.
WIDTH = 12
# Bytes of it that are read; a run writes some hundred.
LONGEST = 1 << 16
TENSORBOARD = os.path.join("tensorboard", "events.out.tfevents.*")


@contextlib.contextmanager
def claimed(saving: SavingConfig, now: str) -> Iterator[str]:
    """Make the folder for the run's files (runs/`now` without `--out`), and keep other runs out of it.

    UsageFault if it can't be written, another run writes there, or it holds a run and no flag allows that.
    """
    if saving.resume not in (None, "auto"):
        require_file(saving.resume)
    folder = saving.out or _unused(os.path.join("runs", now))
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(folder, exist_ok=True)
            stack.enter_context(locked(folder, f"--out {folder}"))
            _check_files(folder, saving)
            check_writable(folder)
            remove_abandoned(folder)
            _remove_leftovers(folder)
            if not saving.resume:
                _clear(folder)
        except OSError as error:
            raise UsageFault(f"--out {folder}: {reason(error)}") from error
        yield folder


def _check_files(folder: str, saving: SavingConfig) -> None:
    """Raise UsageFault if the folder holds a run that no flag allows to touch, or something to wait for."""
    own, settings = _own_files(folder), os.path.join(folder, command_line.CONFIG_FILE)
    if os.path.lexists(settings) and not command_line.is_of_a_run(settings):
        what = f"{settings}: is not of a run, and each run writes its settings there"
        raise UsageFault(what, hint="give it another name")
    if own and not saving.force and not _goes_on_in(folder, saving):
        hint = "--resume auto continues it, --force overwrites it, --out names another folder"
        raise UsageFault(f"{folder}: already holds a run", hint=hint)
    for path in own if saving.resume else ():
        if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
            raise UsageFault(f"{path}: is a named pipe, not a file of a run", hint="remove it")
        real = os.path.realpath(path)
        is_folder, has_none = os.path.isdir(real), not os.path.isdir(os.path.dirname(real))
        if os.path.basename(path) in (LAST, BEST) and (is_folder or has_none):
            what = "a folder" if is_folder else "a link into a folder that does not exist"
            raise UsageFault(f"{path}: is {what}: no checkpoint can be written there", hint="move it away")
        is_replaced = path.endswith((".pt", DELTA))  # as checkpoints are, which are not written into
        if os.path.islink(path) and not is_replaced:
            hint = "remove it"
            raise UsageFault(f"{path}: is a link, and what it leads to would be written into", hint=hint)


def check_writable(folder: str) -> None:
    """Raise OSError if no file can be made in the folder: now, and not after an epoch."""
    tempfile.TemporaryFile(dir=folder).close()


def _goes_on_in(folder: str, saving: SavingConfig) -> bool:
    """Return whether the resumed run is the one in the folder, and not another that would overwrite it."""
    if saving.resume in (None, "auto"):
        return saving.resume == "auto"
    return os.path.realpath(os.path.dirname(saving.resume)) == os.path.realpath(folder)


def _unused(folder: str) -> str:
    number, name = 1, folder
    while os.path.exists(name):
        number += 1
        name = f"{folder}-{number}"
    return name


def _clear(folder: str) -> None:
    """Remove a run's own files from its folder, so that nothing is left of an overwritten run."""
    for path in (*_own_files(folder), *glob.glob(os.path.join(glob.escape(folder), TENSORBOARD))):
        if not is_taken(path):
            os.unlink(path)
    remove_unnamed(folder)


def _remove_leftovers(folder: str) -> None:
    """Remove second names that a killed run did not put in place; the lock says that no other run is at work.

    What `replacing` leaves behind, its next use in the folder removes.
    """
    for name in os.listdir(folder):
        if name.endswith(LINK) and _is_own(name.removesuffix(LINK)):
            os.unlink(os.path.join(folder, name))


def _is_own(name: str) -> bool:
    return name in (LAST, BEST, LOG, ATTEMPTS, digest.NAME) or NUMBERED.fullmatch(name) is not None


def _own_files(folder: str) -> list[str]:
    """Return a run's files in its folder. One that ended early may have left only a log and a best.pt."""
    return [os.path.join(folder, name) for name in os.listdir(folder) if _is_own(name)]


# ---- attempts ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attempts(folder: str, config: TrainConfig, rank: int) -> Iterator[Callable[[int], None]]:
    """Count this start until the block ends; raise CheckFailed if the last three have failed at one step.

    Other flags than before begin a new count, as they may mend what failed. Yields a function to call with
    the number of each step, from 1, before it is taken, which costs a microsecond; and with 0 before a
    process is ended on purpose, as by the second Ctrl-C: then no step has failed.
    """
    if rank != 0:
        yield lambda _: None
        return
    path, flags = os.path.join(folder, ATTEMPTS), _digest(config)
    failed = _failed(path, flags)
    if len(failed) == TRIES and max(failed) - min(failed) <= 1:  # rank 0 may be a step behind the failed rank
        what = f"step {max(failed)} has failed {TRIES} times in a row, and is not tried again"
        hint = f"the output of those starts says why; rm {path} tries it again, and so does another flag"
        raise CheckFailed(what, hint=hint)
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        head = json.dumps({"flags": flags, "failed": failed})[:-1]
        start = os.write(fd, f'{head}, "step": {0:{WIDTH}}}}\n'.encode()) - WIDTH - 2

    over = False

    def begin(step: int) -> None:
        nonlocal over
        over = over or step == 0  # another thread says so, while this one may begin a step
        with contextlib.suppress(OSError):  # the next save reports a disk that fails
            if not over:
                os.pwrite(fd, f"{step:{WIDTH}}".encode(), start)
                return
            with open(path, "r+b") as file:  # maybe after the block, where the file tells of a failure
                os.pwrite(file.fileno(), f"{0:{WIDTH}}".encode(), start)

    try:
        yield begin
    except KeyboardInterrupt:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    with naming(path, "removed"):
        os.unlink(path)


def _digest(config: TrainConfig) -> str:
    """Return a digest of the flags that say how a run trains."""
    flags = {name: value for name, value in config.plain().items() if name not in ("resume", "force")}
    return hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:16]


def _failed(path: str, flags: str) -> list[int]:
    """Return the steps at which the last starts with these flags have failed, at most three.

    A start that ended before its first step, or while it wrote the file, is not counted.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return []
        with open(path, "rb") as file:
            record = json.loads(file.read(LONGEST))
        steps = [*record["failed"], record["step"]] if record["flags"] == flags else []
        return [step for step in steps if isinstance(step, int) and step > 0][-TRIES:]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


# ---- config.toml -------------------------------------------------------------------------------------


def write_settings(trainer: Trainer, folder: str) -> list[str]:
    """Write config.toml, and return what differs from the run of `--like`, as remarks. On rank 0.

    A disk that refuses it ends no run.
    """
    config, about = trainer.config, _about(trainer)
    # Before it is written: the run may be the same.
    remarks = [] if config.settings.like is None else list(_differences(config, config.settings.like, about))
    path = os.path.join(folder, command_line.CONFIG_FILE)
    try:
        with naming(path), replacing(path) as file:
            file.write(command_line.settings_text(config, about=about).encode())
    except FileError as error:
        console.warn(f"{error.message}; training goes on")
    return remarks


def _about(trainer: Trainer) -> dict[str, Any]:
    """Return what a run depends on besides its settings."""
    return {
        **versions(trainer.place.device),
        "ranks": trainer.place.world_size,
        "samples": trainer.data.fingerprint,
        "init": trainer.init or "",
        "code": same_settings.code(trainer.config),
    }


def _differences(config: TrainConfig, run: str, about: Mapping[str, Any]) -> Iterator[str]:
    before, was = command_line.of_run(run)
    now, then = config.plain(), before.plain()
    names = [name for name in now if name not in command_line.OF_A_START and now[name] != then[name]]
    found = [f"{name.replace('_', '-')} {_shown(then[name])} -> {_shown(now[name])}" for name in names]
    for name, value in about.items():
        old = was.get(name)
        if name == "code":
            files = old if isinstance(old, dict) else {}
            found += [f"{file} is another now" for file in value if files.get(file) != value[file]]
        elif old != value:
            found.append(f"{name} {_shown(old)} -> {_shown(value)}")
    yield f"{run}, but {'; '.join(found)}" if found else f"{run}: nothing differs"


def _shown(value: Any) -> str:
    if value is None or value == () or value == "":
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
