"""The atomic commit of a whole folder: it appears complete, or not at all.

A folder is built next to its target and exchanged with it in one step (renameat2). Then the old folder is
taken apart: the files that the new checkpoint replaces are removed, and everything else, such as a file that
another process put there meanwhile, moves into the new folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from ...errors import CkptToolError, OutputExists, Unreadable, UsageFault, already_exists
from .. import system
from . import resuming
from .commit import keep_permissions, no_room_named, not_writable, reason, require_name
from .resuming import OLD, Attempt, begin_of
from .threads import signals_deferred

T = TypeVar("T")

ATTEMPTS = 5  # times that an old folder is looked through while other processes still write into it

# Returns the names of those files of a folder that a new checkpoint replaces, the index or metadata last.
Replaced = Callable[[str], Collection[str]]


@dataclass(frozen=True, slots=True)
class NewFolder:
    """A folder being written."""

    path: str
    # Names, known at the end, of what another process put into the old folder meanwhile.
    given_back: list[str] = field(default_factory=list)
    # Paths of what could not be removed from the old folder, each with the reason.
    not_removed: list[str] = field(default_factory=list)


@contextlib.contextmanager
def replacing_folder(
    path: str,
    replaced: Replaced,
    kept: Collection[str] = (),
    attempt: Attempt | None = None,
    *,
    exclusive: bool = False,
    mode: int = 0o666,
) -> Iterator[NewFolder]:
    """Make an empty folder that takes the place of `path` when the block ends without an error.

    Only the regular files (and links to them) that `replaced` names are removed from the old folder; it is
    asked again after the exchange. Files named by `kept` are in the new folder too, as hard links. Whatever
    else is found afterwards moves into the new folder, as `NAME.other-<hex>` where that has such a name.
    An `exclusive` folder replaces an empty one at most. Files that replace none have no more permissions than
    `mode`, nor has a folder that replaces none, but to be entered. Raises OutputExists where it would replace
    more, and UsageFault where the place can't be written, or holds something neither replaced nor kept.
    """
    target = system.real(path)
    exists = check_folder(path, replaced, lambda: kept)
    parent = os.path.dirname(target)
    resuming.remove_abandoned(parent)
    try:
        of_folder = system.PRIVATE_FOLDER if exists else mode | (mode & 0o444) >> 2
        claimed = attempt.claim_folder(of_folder) if attempt else None
        if claimed is None:  # another process goes on with the same output
            attempt = None
        lock, temporary = resuming.new_folder(target, of_folder) if claimed is None else claimed
    except OSError as error:
        raise not_writable(path, error) from error
    new = NewFolder(temporary)
    try:
        with no_room_named(path):
            yield new
            for name in os.listdir(temporary) if mode != 0o666 else ():
                file = os.path.join(temporary, name)
                os.chmod(file, stat.S_IMODE(os.stat(file).st_mode) & mode)
            if exists:
                unmoved(target, lambda: _keep_permissions_of_files(temporary, target, replaced(target)))
                _link(path, kept, target, temporary)
                keep_permissions(temporary, target)
            system.sync_folder(temporary)
        with signals_deferred():
            _commit(new, target, replaced, kept, path if exclusive else None)
        if attempt:
            attempt.forget()
    except BaseException as error:
        with signals_deferred():
            if attempt:
                attempt.give_up(error)
            else:
                shutil.rmtree(temporary, ignore_errors=True)  # what stays is removed by the next save
        raise
    finally:
        os.close(lock)
    system.sync_folder(parent)


def check_folder(
    path: str, replaced: Replaced, stay: Callable[[], Collection[str]], form: str = "the output"
) -> bool:
    """Check that nothing but what is replaced or stays is in the old folder; return whether there is one.

    `form` is what messages call it. Raises OutputExists, or UsageFault where the place can't be written.
    """
    require_name(path)
    target = system.real(path)
    try:
        if not _exists(target):
            return False
    except OSError as error:
        raise not_writable(path, error) from error
    what, hint = f"is a file, where {form} is a folder", "name a new folder"
    if os.path.isdir(target):
        others = unmoved(target, lambda: others_in(target, {*replaced(target), *stay()}))
        if not others:
            return True
        what, hint = f"holds other files too ({', '.join(others[:3])})", f"{hint}, or a file in it"
    raise OutputExists(f"{path}: already exists, and {what}", hint=hint)


def unmoved(folder: str, look: Callable[[], T]) -> T:
    """Return what `look` finds in a folder; if the folder is replaced meanwhile, look again.

    Raises Unreadable where the folder is replaced continuously, and whatever `look` raises.
    """
    for _ in range(1000):
        with _held(folder) as is_still_there:
            try:
                found = look()
            except (CkptToolError, OSError):
                if is_still_there():
                    raise
                continue
            if is_still_there():
                return found
    raise Unreadable(folder, "is being replaced continuously by another process")


@contextlib.contextmanager
def _held(folder: str) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a folder was replaced; held open, its inode can't be reused."""
    try:
        fd = os.open(folder, system.FOLDER)
    except OSError:  # looking into it raises a better error; what can't be listed may still be read
        yield lambda: True
        return

    def is_still_there() -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(folder))
        except FileNotFoundError:
            return False

    try:
        yield is_still_there
    finally:
        os.close(fd)


def others_in(folder: str, names: Collection[str]) -> list[str]:
    """Return what a folder holds besides files of these names, sorted; links to files are files."""
    return sorted(
        name for name in os.listdir(folder) if name not in names or not _is_file(os.path.join(folder, name))
    )


def _is_file(path: str) -> bool:
    """Return whether something is a regular file, or a link to one or to nothing."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:  # a link that leads nowhere can be replaced, too
        return stat.S_ISLNK(os.lstat(path).st_mode)


def _exists(path: str) -> bool:
    """Return whether there is something, if only a dangling link."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _keep_permissions_of_files(new: str, old: str, replaced: Collection[str]) -> None:
    """Give new files the permissions of old ones: of the same name, or of the most private one replaced."""
    names = {*os.listdir(old)}
    files = [path for name in replaced if name in names and os.path.isfile(path := os.path.join(old, name))]
    most_private = min(files, key=_openness, default=None)
    for name in os.listdir(new):
        same = os.path.join(old, name)
        model = same if os.path.isfile(same) else most_private
        if model is not None:
            keep_permissions(os.path.join(new, name), model)


def _openness(path: str) -> tuple[int, int]:
    """Return how many permissions everyone has, and how many the group has."""
    mode = os.stat(path).st_mode
    return (mode & 0o007).bit_count(), (mode & 0o070).bit_count()


def _link(path: str, names: Collection[str], old: str, new: str) -> None:
    """Give files of the old folder a place in the new one too."""
    try:
        for name in names:
            system.link(os.path.join(old, name), os.path.join(new, name))
    except OSError as error:
        failed = not_writable(path, error)
        if isinstance(failed, OSError):
            raise failed from error
        listed = ", ".join(sorted(names)[:3])
        what = f"{path}: holds other files too ({listed}), which can't be kept: {reason(error)}"
        raise UsageFault(what, hint="choose a new folder as output") from error


def _commit(
    new: NewFolder, target: str, replaced: Replaced, kept: Collection[str], exclusive: str | None
) -> None:
    """Put the new folder in its place, and take apart the old one and those that killed processes left.

    `exclusive` is the name, for the error, of a place where nothing may be.
    """
    with _locked(target):  # so that no other process takes the old folder for abandoned
        if exclusive is not None:
            _name(new.path, target, exclusive)
        elif (old := _put(new.path, target)) is not None:
            _take_apart(old, target, replaced, kept, new)
        for path in resuming.abandoned(os.path.dirname(target), OLD, begin_of(target)):
            _take_apart(path, target, replaced, (), new)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder, if there is one and its lock is free."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fd = os.open(folder, system.FOLDER)
            stack.callback(os.close, fd)
            system.lock(fd)
        yield


def _put(new: str, target: str) -> str | None:
    """Put a folder in its place; return where the old one then lies, None if there was none."""
    # The new folder gets the ending of an old one first: what has the ending of a temporary is removed
    # completely when its process was killed, and that must never happen to the old one.
    system.release(new)
    if not _exists(target):
        os.rename(new, target)
        return None
    system.release(target)
    old = resuming.temporary_name(target, OLD)
    os.rename(new, old)
    exchanged = False
    try:
        exchanged = system.exchange(old, target)
    finally:
        if not exchanged:
            os.rename(old, new)
    if not exchanged:
        _swap(new, target, old)
    return old


def _name(new: str, target: str, shown: str) -> None:
    """Put a folder where nothing is, or only an empty folder."""
    system.release(new)
    try:
        if _exists(target):
            os.rmdir(target)
        os.rename(new, target)  # fails if there is a file by now, or a folder that is not empty
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise already_exists(shown) from None
        raise


def _swap(new: str, target: str, old: str) -> None:
    """Put a folder in the place of another in two steps; `set_aside` finds what a kill leaves."""
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise


def _take_apart(old: str, target: str, replaced: Replaced, kept: Collection[str], new: NewFolder) -> None:
    """Remove from an old folder what the new one replaces, and move everything else into the new one."""
    try:
        for _ in range(ATTEMPTS):
            names = {*os.listdir(old)}
            # Only names in the folder itself: an index may hold a path that leads elsewhere.
            obsolete = dict.fromkeys(name for name in replaced(old) if name in names)
            for name in (*(names - obsolete.keys()), *obsolete):  # the index last: only it names the others
                _remove_or_give_back(old, target, name, name in obsolete, name in kept, new)
            with contextlib.suppress(OSError):  # a process that has the folder open wrote into it again
                os.rmdir(old)
                return
        os.rmdir(old)
    except OSError as error:
        new.not_removed.append(f"{old} ({reason(error)})")


def _remove_or_give_back(
    old: str, target: str, name: str, is_replaced: bool, is_kept: bool, new: NewFolder
) -> None:
    source, place = os.path.join(old, name), os.path.join(target, name)
    try:
        is_taken = _exists(place)
        is_linked = is_taken and os.path.samestat(os.lstat(source), os.lstat(place))
        if is_linked or (is_replaced and _is_file(source)):
            os.unlink(source)
            return
        # What was linked, and has changed since, gives way to the change.
        if is_taken and not is_kept:
            name += f".other-{os.urandom(4).hex()}"
            place = os.path.join(target, name)
        os.rename(source, place)
    except FileNotFoundError:  # removed meanwhile
        return
    new.given_back.append(name)


def set_aside(path: str) -> str | None:
    """Return where a replacement that was killed between its two steps left the old folder, or None."""
    target = os.path.realpath(path)
    old = resuming.temporaries_in(os.path.dirname(target), OLD, begin_of(target))
    return old[0][0] if len(old) == 1 and not os.path.lexists(path) else None
