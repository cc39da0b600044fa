"""`--keep-deltas`: each K-th checkpoint is kept whole, the others as what they change. Imports torch.

A delta, `step-000012.delta.safetensors`, is built on the file of the save before, by its name. The newest
checkpoint has a whole file too, `step-000012.pt`, which is last.pt by another name. It goes once the next is
there, if its delta can be read: so a delta that fails, and a kill at any time, cost room and no checkpoint. A
delta is built on lower steps alone; those that are built on a step which is saved anew go before it does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from ckpttool import formats
from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.checkpoint.checksums import Checksums
from ckpttool.errors import CkptToolError, Damaged, Unreadable
from ckpttool.files.copying import Output
from ckpttool.files.failures import naming
from ckpttool.formats import safetensors
from ckpttool.formats.delta.chains import base_of, chain
from ckpttool.formats.delta.reading import BaseMissing, DeltaLink, joined
from ckpttool.formats.delta.writing import delta
from ckpttool.formats.pytorch import zip as torch_zip
from ckpttool.formats.reading import open_alone
from ckpttool.models.diagnosis.script_lines import command_line
from train.checkpoint.files import DELTA, NUMBERED, is_taken, number_of, numbered

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
        if named != base:
            _require_same(named, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _require_same(base: str, path: str) -> None:
    """Raise Refused unless a delta was made from what another one makes."""
    with open_alone(path) as new, formats.open(base) as old:
        joined(DeltaLink(old), new)  # compares the checksums that both state


def drop_wholes(folder: str, newest: int, training: str) -> None:
    """Remove the whole files of numbered checkpoints whose deltas can be read, but that of the newest.

    One that a delta is built on stays: its own delta could not be read then.
    """
    for step in _steps(folder, ".pt") & _steps(folder, DELTA) - {newest}:
        whole, path = _files(folder, step, training)
        if whole and _links(path) and all(base != whole for _, base in _later(folder, step)):
            with naming(whole, "removed"):
                os.unlink(whole)


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
        with naming(path, "removed"):
            os.unlink(path)
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
