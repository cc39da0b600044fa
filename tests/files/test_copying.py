"""Bytes from file to file by whichever way works, and outputs that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import CkptToolError, Damaged, Unreadable
from ckpttool.files import copying
from ckpttool.files.copying import DryOutput, Output
from ckpttool.files.open_source import open_source_descriptor
from ckpttool.tensors.ref import ByteRange, Source

CONTENT = bytes(i * 7 % 251 for i in range(300_000))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "source").write_bytes(CONTENT)
    return Source("source", os.open(tmp_path / "source", os.O_RDONLY))


def copied(source: Source, path: Path, progress: Callable[[int], object] = lambda n: None) -> bytes:
    """Two ranges copied between bytes that were written, as a format does it."""
    with open(path, "w+b") as file:
        out = Output(file, progress)
        out.write(b"head")
        out.copy(ByteRange(source, 1000, 200_000))
        out.write(b"middle")
        out.copy(ByteRange(source, 0, 0))
        out.copy(ByteRange(source, 5, 3))
        out.write(b"tail")
        assert out.position == 4 + 200_000 + 6 + 3 + 4
    return path.read_bytes()


EXPECTED = b"head" + CONTENT[1000:201_000] + b"middle" + CONTENT[5:8] + b"tail"


def fails_with(number: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


WAYS = {"copy_file_range": [], "sendfile": ["copy_file_range"], "a buffer": ["copy_file_range", "sendfile"]}


@pytest.mark.parametrize("fault", [errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_moves_the_same_bytes(
    way: str, fault: int, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAYS[way]:
        monkeypatch.setattr(os, name, fails_with(fault))
    assert copied(source, tmp_path / "out") == EXPECTED


@pytest.mark.parametrize("way", WAYS)
def test_a_way_that_moves_less_than_asked_is_asked_again(
    way: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {name: getattr(os, name) for name in ("copy_file_range", "sendfile", "preadv", "pwrite")}
    short: dict[str, Callable[..., Any]] = {
        "copy_file_range": lambda i, o, n, at, to: whole["copy_file_range"](i, o, min(n, 999), at, to),
        "sendfile": lambda o, i, at, n: whole["sendfile"](o, i, at, min(n, 999)),
        "preadv": lambda fd, buffers, at: whole["preadv"](fd, [buffers[0][:999]], at),
        "pwrite": lambda fd, data, at: whole["pwrite"](fd, data[:500], at),
    }
    for name, call in short.items():
        monkeypatch.setattr(os, name, call)
    for name in WAYS[way]:
        monkeypatch.setattr(os, name, fails_with(errno.EXDEV))
    assert copied(source, tmp_path / "out") == EXPECTED


def test_the_ways_are_tried_once_and_the_first_that_works_is_kept(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def refuse(*_: Any) -> Any:
        calls.append(1)
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    copied(source, tmp_path / "out")
    assert len(calls) == 1


def test_python_without_these_calls_uses_the_buffer(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert copied(source, tmp_path / "out") == EXPECTED


def test_another_fault_is_no_reason_to_try_another_way(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", fails_with(errno.ENOSPC))
    monkeypatch.setattr(os, "sendfile", fails_with(errno.EIO))
    with pytest.raises(OSError) as fault:
        copied(source, tmp_path / "out")
    assert fault.value.errno == errno.ENOSPC


def test_progress_adds_up_to_the_bytes_copied(source: Source, tmp_path: Path) -> None:
    steps: list[int] = []
    copied(source, tmp_path / "out", steps.append)
    assert sum(steps) == 200_003


@pytest.mark.parametrize("way", WAYS)
def test_a_source_that_becomes_shorter_is_damaged(
    way: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAYS[way]:
        monkeypatch.setattr(os, name, fails_with(errno.EXDEV))
    (tmp_path / "source").write_bytes(b"short")
    with pytest.raises(Damaged, match="became shorter"):
        copied(source, tmp_path / "out")


@pytest.fixture(params=["summed by another thread", "read once"])
def summing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "COPY", 100_000)
    monkeypatch.setattr(copying, "MIN_TO_THREAD", 100_000)
    count = 2 if request.param == "summed by another thread" else 1
    monkeypatch.setattr(copying, "cores", lambda most: min(count, most))


@pytest.mark.usefixtures("summing")
def test_the_checksum_found_while_copying_is_that_of_the_bytes(source: Source, tmp_path: Path) -> None:
    moved: list[int] = []
    with open(tmp_path / "out", "w+b") as file:
        out = Output(file, moved.append)
        out.write(b"head")
        assert out.copy_with_crc(ByteRange(source, 7, 250_000)) == zlib.crc32(CONTENT[7:250_007])
        assert out.copy_with_crc(ByteRange(source, 9, 0)) == 0
        out.write(b"end")
    assert (tmp_path / "out").read_bytes() == b"head" + CONTENT[7:250_007] + b"end"
    assert sum(moved) == 250_000


@pytest.mark.usefixtures("summing")
def test_a_source_that_becomes_shorter_while_it_is_summed_is_damaged(source: Source, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"short")
    with open(tmp_path / "out", "w+b") as file, pytest.raises(Damaged, match="became shorter"):
        Output(file).copy_with_crc(ByteRange(source, 7, 250_000))


def test_a_dry_output_only_counts(source: Source) -> None:
    out = DryOutput()
    out.write(b"head")
    out.copy(ByteRange(source, 0, 1000))
    out.copy_with_crc(ByteRange(source, 0, 100))
    out.write_at(2, b"x")
    out.write_all([memoryview(b"abc")], 3)
    assert out.position == 1107


def reason(path: str) -> str:
    with pytest.raises(Unreadable) as fault:
        open_source_descriptor(path)
    return fault.value.reason


def test_what_can_t_be_opened_says_why(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert reason(str(tmp_path / "missing")) == "no such file"
    assert reason(str(tmp_path)) == "is a folder"
    assert reason(str(tmp_path / "pipe")) == "is not a regular file"
    assert reason("/dev/null") == "is not a regular file"
    assert reason(str(tmp_path / ("x" * 300))) == "file name too long"


def test_an_empty_name_and_one_with_a_zero_are_errors_of_this_library() -> None:
    for path in ("", "a\0b"):
        with pytest.raises(CkptToolError):
            open_source_descriptor(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    started = time.monotonic()
    reason(str(tmp_path / "pipe"))
    assert time.monotonic() - started < 5
