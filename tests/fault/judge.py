"""What must hold after a call failed: the old output or the new one, whole, also after a power cut."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool.core import cli
from tests.fault.scenarios import Scenario, inside
from tests.fault.supervised import CALLS, KILL, LOOK, SHORT, TERM, Fault, Ran, Seen, run
from tests.fault.trials import Trial, words_of_errors

# ---- What a power cut may take from the files of a run, derived from the order of its system calls ----
# The disk may keep any part of what was written since the last fsync, and may do renames before writes. So
# a file must be flushed before it is renamed to a name that people use, and the folder must be flushed
# after the rename, before the program says that it is done (Pillai et al., "All File Systems Are Not
# Created Equal", OSDI 2014).


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


# ---- What must hold after a call failed: the old output or the new one, whole, and nothing else touched


TEMPORARY = re.compile(r"\..+\.[0-9a-f]{20}\.ckpttool\.(tmp|old)|.+\.link")
# Calls without which nothing can be removed: if one of them fails, the next save cleans up
REMOVES = {"unlink", "unlinkat", "rmdir", "getdents64", "openat", "flock", "newfstatat", "lstat"}

# A folder's files by path: bytes, where a link leads, or `folder`
Tree = dict[str, bytes | str]


def tree(folder: Path) -> Tree:
    """Return what is in a folder."""
    found: Tree = {}
    for top, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(top, name)
            short = os.path.relpath(path, folder)
            if os.path.islink(path):
                found[short] = f"link to {os.readlink(path)}"
            elif os.path.isdir(path):
                found[short] = "folder"
            else:
                with open(path, "rb") as file:
                    found[short] = _without_ids(file.read()) if name == ".metadata" else file.read()
    return found


def _without_ids(raw: bytes) -> bytes:
    """Return the metadata of a DCP folder without the save's random id and place."""
    return re.sub(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{20}(?=\.ckpttool\.tmp)", b"", raw)


class Bench:
    """A scenario, ready to be run again and again."""

    def __init__(
        self, scenario: Scenario, inputs: Path, place: Path, hole: Callable[[], object] | None = None
    ) -> None:
        self.scenario, self.hole = scenario, hole
        self.pristine, self.folder = place / "pristine", place / "run"
        scenario.prepare(inputs, self.pristine)
        self.old = tree(self.pristine)
        self.current: Tree = {}
        self._warm(place / "warm")
        self._reset()
        self.dry = self._run()
        self.new = self.current = tree(self.folder)
        shutil.copytree(self.folder, place / "done", symlinks=True)
        self.wrong = lost_by_power_cut(self.dry.seen, scenario.targets, is_done=self.dry.code == 0)
        self.wrong += [
            *self._others(),
            *words_of_errors(self.dry.err, self.dry.code),
            *["hangs"] * self.dry.hangs,
        ]

    def _warm(self, folder: Path) -> None:
        """Do it once in this process, so that forks find imported what they need."""
        if not self.scenario.words:
            return
        shutil.copytree(self.pristine, folder, symlinks=True)
        with inside(folder), open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
            cli.run(shlex.split(self.scenario.words))
        shutil.rmtree(folder)

    def _run(self, fault: Fault | None = None) -> Ran:
        def program() -> object:
            if self.hole is not None:
                self.hole()
            return self.scenario.run()

        return run(program, self.folder, fault)

    def _reset(self) -> None:
        if self.current != self.old:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(self.pristine, self.folder, symlinks=True)

    def try_fault(self, fault: Fault) -> Trial:
        """Run the scenario with a fault and examine what it leaves."""
        self._reset()
        ran = self._run(fault)
        self.current = tree(self.folder)
        trial = Trial(fault, fault.how, ran.is_reached, self._is(self.new))
        if ran.hangs:
            trial.wrong.append("hangs")
        else:
            trial.wrong += [
                *self._code(ran, fault),
                *words_of_errors(ran.err, ran.code),
                *self._files(fault, ran),
            ]
            trial.wrong += lost_by_power_cut(ran.seen, self.scenario.targets, is_done=ran.code == 0)
            if self._leftovers():
                trial.wrong += self._again()
        return trial

    def _is(self, wanted: Tree) -> bool:
        return self._targets(self.current) == self._targets(wanted)

    def _targets(self, found: Tree) -> Tree:
        return {path: what for path, what in found.items() if self._target_of(path)}

    def _target_of(self, path: str) -> str | None:
        return next((target for target in self.scenario.targets if _is_in(path, target)), None)

    def _leftovers(self) -> list[str]:
        """Return the temporaries in the folder that were not there before."""
        return [
            path
            for path in self.current
            if path not in self.old and any(TEMPORARY.fullmatch(part) for part in path.split("/"))
        ]

    def _code(self, ran: Ran, fault: Fault) -> list[str]:
        """Examine the exit code: that of a run without the fault, or of an error, or of the signal."""
        done = self.dry.code
        if fault.how == KILL and ran.is_reached:
            allowed = {-9}
        elif fault.how == TERM and ran.is_reached:
            allowed = {-15} if self.scenario.ends_at_term else {-15, 143, done}
        elif fault.how == SHORT or not ran.is_reached:
            allowed = {done}
        else:  # of what can't be looked at, click says that it is not readable
            allowed = {done, 3, 2} if CALLS[fault.call].kind == LOOK else {done, 3}
        wrong = []
        if ran.code not in allowed:
            wrong.append(f"exit code {ran.code}, not {' or '.join(map(str, sorted(allowed)))}")
        if ran.code == 0 and ran.out != self.dry.out and not self.scenario.targets:
            wrong.append("says it is done, and wrote something else to stdout")
        if ran.code == done and not self._is(self.new):
            wrong.append("ends as a run without a fault does, and the output is not that of one")
        return wrong

    def _files(self, fault: Fault, ran: Ran) -> list[str]:
        """Examine the files: each target old or new, nothing else changed, nothing left without a word."""
        wrong = []
        for target in self.scenario.targets:
            now, old, new = (
                {path: what for path, what in found.items() if _is_in(path, target)}
                for found in (self.current, self.old, self.new)
            )
            if now not in (old, new):
                wrong.append(f"{target} is neither old nor new: {_difference(now, old, new)}")
        wrong += self._others()
        left = [path for path in self._leftovers() if path.split("/")[1] not in ran.err]
        if left and ran.code >= 0 and fault.call not in REMOVES:
            wrong.append(f"leaves {', '.join(sorted(left)[:3])}")
        return wrong

    def _others(self) -> list[str]:
        """Say what has changed besides the targets, but for new temporaries."""
        wrong, left = [], set(self._leftovers())
        for path in {**self.old, **self.current}:
            if self._target_of(path) or path in left or self.current.get(path) == self.old.get(path):
                continue
            both = path in self.current and path in self.old
            only = "is new" if path in self.current else "is gone"
            wrong.append(f"{path} {'is changed' if both else only}")
        return wrong

    def _again(self) -> list[str]:
        """Run what succeeds; return what is still left."""
        is_new = self._is(self.new)
        ran = run(lambda: self.scenario.run_again(is_new), self.folder)
        self.current = tree(self.folder)
        wrong = [] if ran.code == 0 else [f"the next attempt ends with {ran.code}: {ran.err[-300:]!r}"]
        left = self._leftovers()
        return wrong + ([f"the next success leaves {', '.join(sorted(left)[:3])}"] if left else [])


def _difference(now: Tree, old: Tree, new: Tree) -> str:
    """Say in short how a target differs from both."""
    if not now:
        return "it is gone"
    names = [path for path in {**now, **new} if now.get(path) != new.get(path)]
    sizes = f"{len(now)} files, {len(old)} old, {len(new)} new"
    return f"{', '.join(sorted(names)[:3])} differ from the new one ({sizes})"


def _is_in(path: str, target: str) -> bool:
    return path == target or path.startswith(f"{target}/")
