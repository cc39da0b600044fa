"""What a power cut may take from the files of a run, derived from the order of its system calls.

The disk may keep any part of what was written since the last fsync, and may do renames before writes. So a
file must be flushed before it is renamed to a name that people use, and the folder must be flushed after the
rename, before the program says that it is done (Pillai et al., "All File Systems Are Not Created Equal", OSDI
2014).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tests.fault.supervised import Seen

WRITES = {
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range", "splice"),
    *("ftruncate", "truncate", "fallocate"),
}
# Calls that open a file by a path, and which argument holds the flags
OPENS = {"open": 1, "creat": 1, "openat": 2}

FLUSHES = {"fsync", "fdatasync"}
RENAMES = {"rename", "renameat", "renameat2"}
LINKS = {"link", "linkat"}
# The ioctls that give a file the blocks of another (linux/fs.h)
CLONES = {0x40049409, 0x4020940D}

MAP_SHARED, PROT_WRITE, EXCHANGE = 1, 2, 2


@dataclass(slots=True)
class _Disk:
    """What is not known to be on the disk."""

    # The files and folders that must be whole after a power cut
    targets: tuple[str, ...]
    # Files with bytes that were not flushed
    dirty: set[str] = field(default_factory=set)
    # Folder -> names in it that were made or renamed since it was flushed
    entries: dict[str, set[str]] = field(default_factory=dict)
    # Files whose flush failed: what a later one says of them proves nothing
    failed: set[str] = field(default_factory=set)
    # What a power cut could damage, in words
    lost: list[str] = field(default_factory=list)

    def is_target(self, path: str) -> bool:
        return any(_is_below(path, target) for target in self.targets)

    def write(self, path: str) -> None:
        self.dirty.add(path)
        if self.is_target(path):
            self.lost.append(f"{path} is written where it lies")

    def enter(self, path: str) -> None:
        self.entries.setdefault(os.path.dirname(path) or ".", set()).add(path)

    def flush(self, path: str, error: int) -> None:
        if error and error != errno.EINTR:
            self.failed.add(path)
        elif not error:
            self.entries.pop(path, None)
            if path not in self.failed:
                self.dirty.discard(path)

    def rename(self, source: str, to: str, *, exchanged: bool) -> None:
        if self.is_target(to):
            unflushed = [path for path in sorted(self.dirty) if _is_below(path, source)]
            self.lost += [
                f"{to} gets its name before {_named(path, source, to)} is flushed" for path in unflushed
            ]
            if any(_is_below(folder, source) for folder in self.entries):
                self.lost.append(f"{to} gets its name before its own entries are flushed")
        self.dirty = {*_moved(self.dirty, source, to, exchanged)}
        self.failed = {*_moved(self.failed, source, to, exchanged)}
        self.entries = dict(
            zip(_moved(self.entries, source, to, exchanged), self.entries.values(), strict=True)
        )
        self.enter(to)

    def end(self) -> None:
        """Note the names that were given and may be gone."""
        for target in self.targets:
            if target in self.entries.get(os.path.dirname(target) or ".", ()):
                self.lost.append(f"the new name {target} is not flushed at the end")


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def _named(path: str, source: str, to: str) -> str:
    return "it" if path == source else to + path.removeprefix(source)


def _moved(paths: Collection[str], source: str, to: str, exchanged: bool) -> Iterator[str]:
    for path in paths:
        if _is_below(path, source):
            yield to + path.removeprefix(source)
        elif exchanged and _is_below(path, to):
            yield source + path.removeprefix(to)
        else:
            yield path


def lost_by_power_cut(seen: list[Seen], targets: tuple[str, ...], *, is_done: bool) -> list[str]:
    """Return what a power cut could damage."""
    disk = _Disk(targets)
    for call in seen:
        name = call.call.name
        path = call.paths[0] if call.paths else None
        if name in FLUSHES and path is not None:
            disk.flush(path, call.error)
        elif call.error or path is None:
            continue
        elif name in WRITES or _writes_otherwise(call):
            disk.write(path)
        elif name in OPENS and (name == "creat" or call.arguments[OPENS[name]] & os.O_CREAT):
            disk.dirty.add(path)
            disk.enter(path)
        elif name in RENAMES and call.paths[1] is not None:
            exchanged = name == "renameat2" and bool(call.arguments[4] & EXCHANGE)
            disk.rename(call.paths[1], path, exchanged=exchanged)
        elif name in ("mkdir", "mkdirat"):
            disk.enter(path)
        elif name in LINKS:
            if call.paths[1] in disk.dirty:
                disk.dirty.add(path)
            disk.enter(path)
    if is_done:
        disk.end()
    return list(dict.fromkeys(disk.lost))


def _writes_otherwise(call: Seen) -> bool:
    """Return whether a call lets a file be changed through memory, or gives it another file's blocks."""
    if call.call.name == "mmap":
        return bool(call.arguments[2] & PROT_WRITE and call.arguments[3] & MAP_SHARED)
    return call.call.name == "ioctl" and call.arguments[1] & 0xFFFFFFFF in CLONES
