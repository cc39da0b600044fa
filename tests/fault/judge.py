"""What must hold after a call failed: the old output or the new one, whole, and nothing else touched."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from ckpttool import cli
from tests.fault.power_cut import lost_by_power_cut
from tests.fault.scenarios import Scenario, inside
from tests.fault.supervised import KILL, SHORT, TERM, Fault, Ran, run
from tests.fault.system_calls import CALLS, LOOK
from tests.fault.trials import Trial, words_of_errors

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
