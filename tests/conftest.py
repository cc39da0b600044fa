"""Fixtures for many tests: the command line in this process or its own, and public checkpoints."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ckpttool.core import cli as command_line
from ckpttool.proving import replay
from tests.ranks.forked import Program, WarmPython
from tests.ranks.pool import Pool
from tests.support import contracts
from tests.support.running import ROOT, SHARED, Ran

RunRanks = Callable[..., list[Any]]

# A shell that starts the tests in the background has them ignore Ctrl-C, and nohup the end of a terminal.
# Programs started by a test would inherit that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Threads of torch that wait for each other would spin, which is most of their time where cores are few.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Deterministic, so that a failure can be repeated; without a deadline, as time varies on shared machines.
settings.register_profile(
    "here", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("more", settings.get_profile("here"), max_examples=300)  # of `make long`
settings.register_profile("wide", settings.get_profile("here"), derandomize=False, max_examples=2000)
settings.load_profile("here")  # another by `pytest --hypothesis-profile wide`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is covered, and begin with the tests of the trainer: they take longest, and at the end one
    process would be left alone with them."""
    for item in items:
        if (mark := item.get_closest_marker("covered")) and mark.args[0](**item.callspec.params):  # type: ignore[attr-defined]
            item.add_marker("long")
    items.sort(key=lambda item: not item.nodeid.startswith("tests/train/"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Collect without the garbage collector: it would search half a million objects that all stay."""
    gc.disable()
    if worker := getattr(session.config, "workerinput", None):
        import_a_share(session.config.args, int(worker["workerid"][2:]), worker["workercount"])


def import_a_share(arguments: list[str], number: int, workers: int) -> None:
    """Import some modules of tests, as each worker does with others, before it collects all of them.

    pytest's own compiling of a module takes longer than all else here. In a fresh clone workers that collect
    in the same order do it at the same time; so a worker finds in the cache what others have compiled.
    """
    places = [Path(argument.partition("::")[0]).resolve() for argument in arguments]
    paths = [path for place in places for path in (sorted(place.rglob("test_*.py")) or [place])]
    for path in paths[number::workers]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # comes again when all are collected
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """No collection need visit torch and thousands of tests again."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Return a function that runs a command in this process and handles errors as `main` does.

    JSON is compared with the command's schema.
    """

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        words = [str(argument) for argument in arguments]
        code = command_line.run(words)
        said = capsys.readouterr()
        contracts.require(words, said.out, said.err)
        return Ran(code, said.out, said.err)

    return run


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Return a function that runs `python -m ckpttool` in a process of its own."""

    def run(*arguments: object, env: dict[str, str] | None = None, **given: Any) -> Any:
        given.setdefault("stdin", subprocess.DEVNULL) if "input" not in given else None
        given.setdefault("capture_output", "stdout" not in given)
        words = [*map(str, arguments)]
        ran = subprocess.run(
            [sys.executable, "-m", "ckpttool", *words],
            env={**os.environ, **(env or {})},
            timeout=60,
            **given,
        )
        contracts.require(words, *(os.fsdecode(said or b"") for said in (ran.stdout, ran.stderr)))
        return ran

    return run


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    """Run Python programs without the two seconds in which torch is imported."""
    return WarmPython()


@pytest.fixture
def forked_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replays be forks of a process that has imported torch."""

    def fork(command: list[str], *, env: dict[str, str], stderr: Any, **_: Any) -> Program:
        with open(os.devnull, "w") as nothing:
            return Program(command, ROOT, env, stdout=nothing.fileno(), stderr=stderr.fileno())

    kept = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    monkeypatch.setattr(replay, "subprocess", SimpleNamespace(Popen=fork, **kept))


def pools_of_ranks() -> Iterator[RunRanks]:
    pools: dict[int, Pool] = {}

    def run(world_size: int, case: Callable[..., Any], *arguments: Any, timeout: float = 30.0) -> list[Any]:
        return pools.setdefault(world_size, Pool(world_size)).run(case, *arguments, timeout=timeout)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """`run_ranks(world_size, case, *arguments, timeout=30)`: what the case returns on each rank."""
    yield from pools_of_ranks()


@pytest.fixture
def fresh_ranks() -> Iterator[RunRanks]:
    """`run_ranks` in processes that have run no case of another test, and end with the test."""
    yield from pools_of_ranks()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Start a process group of this process alone, for DDP and FSDP."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def resnet20() -> Path:
    """Return a public checkpoint of 2018 in the legacy format, with keys under `module.`."""
    path = SHARED / "data" / "checkpoints" / "resnet20-12fca82f.th"
    if not path.exists():
        pytest.skip(f"needs {path.name} in the folder `shared` beside the repository")
    return path
