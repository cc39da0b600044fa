"""A second process helps to cast; the file is the one that a single process writes, whatever befalls it."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool import formats
from ckpttool.errors import Damaged
from ckpttool.files import fork
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.transforms import selection

Fork = Callable[[], int]


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lets small files fork too, whatever other tests left running; holds what each fork gave."""
    made: list[int] = []

    def fork(real: Fork = os.fork) -> int:
        made.append(real())
        return made[-1]

    monkeypatch.setattr(fork, "MIN_TO_FORK", 1)
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(fork, "cores", lambda most: most)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's DataLoader puts one in its place
    yield made
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Tensors of several stretches and of a part of one, a view, and one that is not cast."""
    torch.manual_seed(0)
    big = torch.randn(1_500_000, dtype=torch.float64)
    state = {f"layer{i}.weight": torch.randn(10 * i + 1, 7) for i in range(9)}
    state |= {"big": big, "turned": torch.randn(300, 4000).t(), "count": torch.arange(9), "other": big[5:]}
    torch.save(state, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def cast(source: Path, output: str | Path, to: str = "bfloat16", **choices: Any) -> int:
    with formats.open(source) as checkpoint:
        new, report = selection.cast(checkpoint, DTYPES[to])
        formats.save(new, output, **choices)
        return report.overflows


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "shards/"])
def test_the_file_is_the_one_that_one_process_writes(
    source: Path, tmp_path: Path, forks: list[int], name: str
) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "helped").mkdir()
    size = {"shard_size": 1_000_000} if name.endswith("/") else {}
    cast(source, f"{tmp_path}/alone/{name}", **size)
    assert not forks
    cast(source, f"{tmp_path}/helped/{name}", fork=True, **size)
    assert forks
    alone, helped = (
        {path.name: path.read_bytes() for path in (tmp_path / way).rglob("*") if path.is_file()}
        for way in ("alone", "helped")
    )
    assert alone == helped


@pytest.mark.parametrize("fate", ["ends at once", "ends in the middle", "never starts", "has no pipe"])
def test_what_the_second_process_leaves_undone_the_first_one_does(
    source: Path, tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    def ends_at_once(real: Fork = os.fork) -> int:
        pid = real()
        if pid == 0:
            os._exit(1)
        return pid

    def refused() -> Any:
        forks.append(-1)
        raise OSError(errno.EAGAIN, "too many")

    made = iter(range(99))

    def put_or_die(*args: Any, real: Any = fork._Child._put) -> Any:
        if next(made) == 2:
            os._exit(1)
        return real(*args)

    if fate == "ends in the middle":
        monkeypatch.setattr(fork._Child, "_put", put_or_die)
    else:
        call = "pipe" if fate == "has no pipe" else "fork"
        monkeypatch.setattr(os, call, ends_at_once if fate == "ends at once" else refused)
    before = len(os.listdir("/proc/self/fd"))
    cast(source, tmp_path / "alone.safetensors")
    cast(source, tmp_path / "helped.safetensors", fork=True)
    assert (tmp_path / "alone.safetensors").read_bytes() == (tmp_path / "helped.safetensors").read_bytes()
    assert forks
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "shards/"])
def test_values_that_overflow_are_counted_once_whoever_meets_them(
    tmp_path: Path, forks: list[int], name: str, verify: bool
) -> None:
    values = torch.zeros(3_000_000, dtype=torch.float64)
    values[::100_000] = 1e300
    values[7] = float("nan")
    grid = values[:2_000_000].view(1000, 2000)
    torch.save(
        {"a": values, "part": values[100_001:2_900_000], "grid": grid.t(), "even": values[::2]},
        tmp_path / "in.pt",
    )
    assert cast(tmp_path / "in.pt", f"{tmp_path}/{name}", fork=True, verify=verify) == 30
    assert forks
    forks.clear()
    assert cast(tmp_path / "in.pt", f"{tmp_path}/{name}", force=True, verify=verify) == 30
    assert not forks


def test_an_error_in_the_share_of_the_second_process_is_raised(
    source: Path, tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.safetensors").write_bytes(b"old")
    with formats.open(source) as checkpoint:
        new, _ = selection.cast(checkpoint, DTYPES["float32"])
        os.truncate(source, os.path.getsize(source) // 3)
        with pytest.raises(Damaged, match="became shorter"):
            formats.save(new, tmp_path / "out.safetensors", fork=True, force=True)
    assert forks
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out.safetensors"]


def test_whoever_stops_the_first_process_stops_the_second(
    source: Path, tmp_path: Path, forks: list[int]
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cast(source, tmp_path / "out.safetensors", fork=True, progress=interrupt)
    assert not (tmp_path / "out.safetensors").exists()
    assert forks[0]
    with pytest.raises(ProcessLookupError):  # ended, and waited for
        os.kill(forks[0], 0)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & fork.ENDING


def test_progress_tells_of_all_bytes(source: Path, tmp_path: Path, forks: list[int]) -> None:
    told: list[int] = []
    helped: list[int] = []
    cast(source, tmp_path / "alone.pt", progress=told.append)
    cast(source, tmp_path / "out.pt", fork=True, progress=helped.append)
    assert forks
    assert sum(helped) == sum(told)


def test_a_process_with_threads_writes_alone(
    source: Path, tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    cast(source, tmp_path / "out.safetensors", fork=True)
    assert not forks
    assert ckpttool.open(tmp_path / "out.safetensors").state().tensors["big"].dtype.name == "bfloat16"


def test_a_process_whose_children_are_not_its_own_to_wait_for_writes_alone(
    source: Path, tmp_path: Path, forks: list[int]
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        cast(source, tmp_path / "out.safetensors", fork=True)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert not forks
    assert (tmp_path / "out.safetensors").exists()


def test_each_file_is_worth_a_process_by_itself_or_not(
    source: Path, tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork, "MIN_TO_FORK", 3_000_000)  # bytes of the largest tensor, cast
    cast(source, f"{tmp_path}/shards/", shard_size=1000, fork=True)
    assert len(list((tmp_path / "shards").iterdir())) > 5
    assert len(forks) == 1
    with formats.open(source) as checkpoint:  # nothing is computed
        formats.save(checkpoint, tmp_path / "same.pt", fork=True)
    assert len(forks) == 1


def test_the_command_casts_in_two_processes_and_renames_in_one(
    source: Path, tmp_path: Path, forks: list[int], cli: Any
) -> None:
    assert cli("convert", "--dtype", "bf16", source, tmp_path / "cast.pt").code == 0
    assert len(forks) == 1
    assert cli("add-prefix", source, tmp_path / "renamed.pt").code == 0
    assert len(forks) == 1
