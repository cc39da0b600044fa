"""What must hold after an answer went wrong: the right result, or one error and the old one; no secret."""

from __future__ import annotations

import multiprocessing
import random
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.judge import Tree, tree
from tests.fault.remote.runner import LONGEST, Ended, Runner
from tests.fault.remote.scenarios import LOCAL, OLD, SERVED, Scenario, write
from tests.fault.trials import Trial, Tried, place_for_runs, words_of_errors
from tests.support.range_server import FAULTS, Request

# ---- What must hold after an answer went wrong: the right result, or one error and the old one; no secret


STALL = 0.4  # seconds without a byte that a command waits
LATE = 0.1  # seconds before an answer goes wrong, in which other threads get theirs
PART = ".ckpttool.part"  # of the names of what --resume goes on with
FINAL = ("damaged", "refused", "usage")  # errors after which nothing can be gone on with
VARYING = ("seconds", "requests", "bytes_read")  # of the JSON


@dataclass(frozen=True)
class Fault:
    """Which answer goes wrong, and how."""

    front: int  # the number of the server
    nth: int  # of its answers, from 0
    name: str  # of `range_server.FAULTS`, or a status

    def __str__(self) -> str:
        return f"'{self.name}' at answer {self.nth + 1}" + " of the other host" * self.front


class Bench:
    """A scenario with its servers, ready to be run again and again; a context manager."""

    def __init__(self, scenario: Scenario, inputs: Path, place: Path) -> None:
        """Start the servers and run it once without a fault.

        Args:
            inputs: a folder that `scenarios.write` has filled.
            place: a folder that is there, for the runs.
        """
        self.scenario, self._inputs = scenario, inputs
        self._open = ExitStack()
        self.site = self._open.enter_context(scenario.site(inputs / SERVED))
        env = {"CKPTTOOL_TIMEOUT": f"{STALL}", "CKPTTOOL_CACHE": ""}
        self._runner = self._open.enter_context(Runner({**self.site.env, **env}))
        self._pristine, self.folder = place / "pristine", place / "run"
        for name in ("out", "tmp"):
            (self._pristine / name).mkdir(parents=True)
        if scenario.before:
            ended = self._runner.run(self._words(scenario.before), self._pristine)
            assert ended.code == 0, ended.err
        self.old = tree(self._pristine)
        self._now: Tree = {}
        self.dry = self._run()
        self.new = self._now
        self.requests: list[list[Request]] = [[*front.requests] for front in self.site.fronts]
        self.uploaded = self.site.found(scenario.uploads) if scenario.uploads else None
        self.wrong = [] if self.dry.code == 0 else [f"fails: {self.dry.err[-300:]!r}"]
        if scenario.uploads and self.uploaded in (None, OLD):
            self.wrong.append("uploads nothing")
        self.wrong += [*self._secrets(self.dry), *self.site.wrongs()]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _words(self, words: str) -> list[str]:
        """Return a command line with its URLs and paths."""
        local = f"{self._inputs / LOCAL}/"
        split = [
            word.replace("IN/", local, 1) if word.startswith("IN/") else word for word in shlex.split(words)
        ]
        return [self.site.address(word[1:]) if word.startswith("@") else word for word in split]

    def _run(self, fault: Fault | None = None, *more: str, hole: str = "", longest: float = LONGEST) -> Ended:
        for front in self.site.fronts:
            front.heal()
        if fault is not None:
            self.site.fronts[fault.front].fault(fault.name, skip=fault.nth, times=1, after=LATE)
        words = [*self._words(self.scenario.words), "--json", *more]
        if not more:
            self._reset()
        ended = self._runner.run(words, self.folder, hole, longest)
        self._now = tree(self.folder)
        return ended

    def _reset(self) -> None:
        if self._now != self.old:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(self._pristine, self.folder)
        if self.scenario.uploads:
            self.site.begin(self.scenario.uploads)

    def try_fault(self, fault: Fault, hole: str = "", longest: float = LONGEST) -> Trial:
        """Run the scenario with a fault and examine what it leaves.

        Args:
            hole: a name of HOLES: what is broken in that run.
            longest: seconds that it may take.
        """
        ended = self._run(fault, hole=hole, longest=longest)
        is_reached = len(self.site.fronts[fault.front].requests) > fault.nth
        trial = Trial(fault, f"{ended.code}", is_reached, seconds=ended.seconds)
        if ended.hangs:
            trial.wrong.append(f"takes more than {longest:g} s")
            return trial
        trial.wrong += [
            *self._code(ended),
            *self._words_of(ended),
            *self._secrets(ended),
            *self.site.wrongs(),
        ]
        trial.wrong += self._uploaded(ended) if self.scenario.uploads else []
        parts = [path for path in self._now if PART in path]
        trial.wrong += self._files(ended, parts)
        if parts and ended.code:
            trial.is_noted = True
            trial.wrong += self._resume()
        return trial

    def _code(self, ended: Ended) -> list[str]:
        """Examine the exit code, and what it stands for."""
        if ended.code not in (0, 1, 3):
            return [f"exit code {ended.code}"]
        if ended.code == 0 and _told(ended) != _told(self.dry):
            return ["says that it is done, and other things than without a fault"]
        return []

    def _words_of(self, ended: Ended) -> list[str]:
        """Examine the messages: one error in one line, which names the URL."""
        errors = [line for line in ended.err.splitlines() if line.startswith("error:")]
        others = [line for line in ended.err.splitlines() if not line.startswith(("error:", "hint:"))]
        wrong = words_of_errors(ended.err, ended.code)
        if others and not wrong:
            wrong.append(f"says {others[0]!r}")
        urls = (self.site.url, *(front.url for front in self.site.fronts))
        return wrong + [
            f"does not name the URL: {line}" for line in errors if not any(url in line for url in urls)
        ]

    def _secrets(self, ended: Ended) -> list[str]:
        """Look for secrets in what was printed, and in files and their names."""
        texts = {"stdout": ended.out, "stderr": ended.err}
        texts |= {path: f"{path} {what!r}" for path, what in self._now.items()}
        return [
            f"{name} holds a secret"
            for name, text in texts.items()
            if any(s in text for s in self.site.secrets)
        ]

    def _uploaded(self, ended: Ended) -> list[str]:
        """Examine what is visible of an upload."""
        found = self.site.found(self.scenario.uploads)
        if found not in (OLD, self.uploaded):
            return ["the object is gone" if found is None else f"the object has {len(found)} other bytes"]
        return (
            ["says that it is done, and the object is the old one"] if not ended.code and found == OLD else []
        )

    def _files(self, ended: Ended, parts: list[str]) -> list[str]:
        """Examine the files: all as before or, after success, as without a fault, but for parts."""
        wanted = self.old if ended.code else self.new
        left = {path: what for path, what in self._now.items() if path not in parts}
        changed = [path for path in {**wanted, **left} if left.get(path) != wanted.get(path)]
        wrong = [f"not as it should be: {', '.join(sorted(changed)[:3])}"] if changed else []
        kind = ended.json.get("error", {}).get("kind")
        if parts and (not ended.code or kind in FINAL):
            wrong.append(f"leaves {parts[0]} after {'an error of kind ' + kind if ended.code else 'success'}")
        return wrong

    def _resume(self) -> list[str]:
        """Go on without a fault: the right output, of fewer bytes, and nothing else left."""
        ended = self._run(None, "--resume")
        if ended.code:
            return [f"--resume fails: {ended.err[-300:]!r}"]
        wrong = [] if self._now == self.new else ["--resume writes something else, or leaves something"]
        fetched, whole = ended.json.get("bytes_read", 0), self.dry.json.get("bytes_read", 0)
        return wrong + ([f"--resume fetches {fetched} bytes of {whole}"] if fetched >= whole else [])


def _told(ended: Ended) -> dict[str, Any]:
    return {name: value for name, value in ended.json.items() if name not in VARYING}


# ---- The faults of a scenario in the order in which they are tried, and the trials of many scenarios --


STATUSES = ("401", "403", "404", "410", "416", "429", "500", "503")
OF_RANGES = ("unranged", "other bytes", "other size")  # which change nothing where no range is asked for
WAYS = (*(name for name in FAULTS if name not in ("redirect", "headers")), *STATUSES)


def faults(requests: Sequence[Sequence[Request]], seed: int) -> list[Fault]:
    """Return every fault of the answers to some requests, in a drawn order."""
    drawn = [
        Fault(front, nth, name)
        for front, those in enumerate(requests)
        for nth, request in enumerate(those)
        for name in WAYS
        if request.range or name not in OF_RANGES
    ]
    random.Random(seed).shuffle(drawn)
    return drawn


def try_scenario(scenario: Scenario, inputs: Path, seed: int, most: int, seconds: float) -> Tried:
    """Try the faults of a scenario."""
    tried, until = Tried(scenario), time.monotonic() + seconds
    with (
        tempfile.TemporaryDirectory(dir=place_for_runs()) as place,
        Bench(scenario, inputs, Path(place).resolve()) as bench,
    ):
        tried.calls = sum(map(len, bench.requests))
        tried.wrong += [f"{scenario.name}: without a fault: {each}" for each in bench.wrong]
        tried.try_faults(faults(bench.requests, seed), bench.try_fault, most=most, until=until)
    return tried


def try_all(
    scenarios: Sequence[Scenario], *, seed: int, seconds: float, most: int, jobs: int
) -> Iterator[Tried]:
    """Try scenarios in several processes; yield what came of each."""
    part = seconds * jobs / max(len(scenarios), jobs)
    with tempfile.TemporaryDirectory(dir=place_for_runs()) as folder:
        inputs = Path(folder).resolve()
        write(inputs)
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for future in [pool.submit(try_scenario, each, inputs, seed, most, part) for each in scenarios]:
                yield future.result()
