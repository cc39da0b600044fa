"""A second process helps to cast; the file is the one that a single process writes, whatever befalls it."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool import formats, transforms, two_processes
from ckpttool.dtypes import DTYPES
from ckpttool.errors import Damaged

Fork = Callable[[], "int | None"]


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Lets small files fork too, beside the threads of pytest; holds what each fork gave."""
    made: list[int | None] = []

    def fork(real: Fork = two_processes._fork) -> int | None:
        made.append(real())
        return made[-1]

    monkeypatch.setattr(two_processes, "WORTH", 1)
    monkeypatch.setattr(two_processes, "_fork", fork)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(two_processes, "cores", lambda most: most)
    return made


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
        new, report = transforms.cast(checkpoint, DTYPES[to])
        formats.save(new, output, **choices)
        return report.overflows


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "shards/"])
def test_the_file_is_the_one_that_one_process_writes(
    source: Path, tmp_path: Path, forks: list[int | None], name: str
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


@pytest.mark.parametrize("fate", ["ends at once", "ends in the middle", "never starts"])
def test_what_the_second_process_leaves_undone_the_first_one_does(
    source: Path, tmp_path: Path, forks: list[int | None], monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    def ends_at_once(real: Fork = two_processes._fork) -> int | None:
        pid = real()
        if pid == 0:
            os._exit(1)
        return pid

    def no_process() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    made = iter(range(99))

    def put_or_die(*args: Any, real: Any = two_processes._Second._put) -> Any:
        if next(made) == 2:
            os._exit(1)
        return real(*args)

    if fate == "ends at once":
        monkeypatch.setattr(two_processes, "_fork", ends_at_once)
    elif fate == "never starts":
        monkeypatch.setattr(os, "fork", no_process)
    else:
        monkeypatch.setattr(two_processes._Second, "_put", put_or_die)
    cast(source, tmp_path / "alone.safetensors")
    cast(source, tmp_path / "helped.safetensors", fork=True)
    assert (tmp_path / "alone.safetensors").read_bytes() == (tmp_path / "helped.safetensors").read_bytes()
    assert forks


def test_values_that_overflow_are_counted_once_whoever_meets_them(
    tmp_path: Path, forks: list[int | None]
) -> None:
    values = torch.zeros(2_000_000, dtype=torch.float64)
    values[::100_000] = 1e300
    values[7] = float("nan")
    torch.save({"a": values}, tmp_path / "in.pt")
    assert cast(tmp_path / "in.pt", tmp_path / "out.pt", fork=True) == 20
    assert forks
    assert torch.load(tmp_path / "out.pt")["a"].isinf().sum() == 20


def test_an_error_in_the_share_of_the_second_process_is_raised(
    source: Path, tmp_path: Path, forks: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.safetensors").write_bytes(b"old")
    with formats.open(source) as checkpoint:
        new, _ = transforms.cast(checkpoint, DTYPES["float32"])
        os.truncate(source, os.path.getsize(source) // 3)
        with pytest.raises(Damaged, match="became shorter"):
            formats.save(new, tmp_path / "out.safetensors", fork=True, force=True)
    assert forks
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out.safetensors"]


def test_whoever_stops_the_first_process_stops_the_second(
    source: Path, tmp_path: Path, forks: list[int | None]
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cast(source, tmp_path / "out.safetensors", fork=True, progress=interrupt)
    assert not (tmp_path / "out.safetensors").exists()
    assert forks[0]
    with pytest.raises(ProcessLookupError):  # ended, and waited for
        os.kill(forks[0], 0)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & two_processes.ENDING


def test_progress_tells_of_all_bytes(source: Path, tmp_path: Path, forks: list[int | None]) -> None:
    told: list[int] = []
    helped: list[int] = []
    cast(source, tmp_path / "alone.pt", progress=told.append)
    cast(source, tmp_path / "out.pt", fork=True, progress=helped.append)
    assert forks
    assert sum(helped) == sum(told)


def test_a_process_with_threads_writes_alone(
    source: Path, tmp_path: Path, forks: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    cast(source, tmp_path / "out.safetensors", fork=True)
    assert not forks
    assert ckpttool.open(tmp_path / "out.safetensors").state().tensors["big"].dtype.name == "bfloat16"


def test_a_small_checkpoint_is_not_worth_a_process(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with formats.open(source) as checkpoint:
        new, _ = transforms.cast(checkpoint, DTYPES["bfloat16"])
        assert not two_processes.is_worth_it(new.storages())
        monkeypatch.setattr(two_processes, "WORTH", 1 << 20)
        assert two_processes.is_worth_it(new.storages())
        assert not two_processes.is_worth_it(checkpoint.storages())
