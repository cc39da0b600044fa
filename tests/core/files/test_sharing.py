"""Blocks of a file that another one shares, as btrfs and XFS can; elsewhere the same bytes are copied."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

import ckpttool
from ckpttool.core.files import copying
from ckpttool.core.files.copying import Output
from ckpttool.core.files.reflink import BLOCK
from ckpttool.core.system import NO_CLONE
from ckpttool.core.tensors.ref import ByteRange, Source
from ckpttool.errors import Damaged
from tests.support.extents import clone_range

CONTENT = random.Random(0).randbytes(300_001)


@pytest.fixture(autouse=True)
def shared(monkeypatch: MonkeyPatch) -> list[int]:
    """A file system that shares extents; the bytes of each stretch that was shared."""
    found: list[int] = []

    def ioctl(fd: int, request: int, wanted: bytes) -> int:
        clone_range(fd, request, wanted)
        found.append(int.from_bytes(wanted[16:24], "little"))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(copying, "SMALL", 0)
    return found


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "source").write_bytes(CONTENT)
    return Source("source", os.open(tmp_path / "source", os.O_RDONLY))


def copied(data: ByteRange, position: int, path: Path, tail: bytes = b"tail") -> bytes:
    """A stretch at a place of a file, between other bytes; checks that those are there."""
    moved: list[int] = []
    with open(path, "w+b") as file, Output(file, moved.append) as out:
        out.write(b"x" * position)
        out.copy(data)
        out.write(tail)
    written = path.read_bytes()
    assert written[:position] == b"x" * position
    assert written[position + data.nbytes :] == tail
    assert sum(moved) == data.nbytes
    return written[position : position + data.nbytes]


@pytest.mark.parametrize(
    ("offset", "nbytes", "position", "wanted"),
    [
        (0, 300_001, 0, 73 * BLOCK),  # more follows, so not the last block, which the source has in part
        (100, 200_000, 100, 48 * BLOCK - BLOCK),
        (100, 299_901, 100 + 5 * BLOCK, 72 * BLOCK),
        (BLOCK, 2 * BLOCK, 0, 2 * BLOCK),
        (BLOCK, 2 * BLOCK + 1, 0, 2 * BLOCK),
        (100, 200_000, 101, 0),
        (100, BLOCK, 100, 0),  # no whole block
        (100, 2, 100, 0),
    ],
)
def test_whole_blocks_at_the_same_place_in_a_block_are_shared(
    offset: int, nbytes: int, position: int, wanted: int, source: Source, tmp_path: Path, shared: list[int]
) -> None:
    data = ByteRange(source, offset, nbytes)
    assert copied(data, position, tmp_path / "out") == CONTENT[offset : offset + nbytes]
    assert sum(shared) == wanted


def test_the_last_block_is_shared_in_part(source: Source, tmp_path: Path, shared: list[int]) -> None:
    assert copied(ByteRange(source, 0, 300_001), 0, tmp_path / "out", tail=b"") == CONTENT
    assert shared == [300_001]


@pytest.mark.parametrize("number", [*sorted(NO_CLONE), errno.ENOSPC])
def test_where_blocks_can_not_be_shared_they_are_copied_unless_the_disk_is_full(
    number: int, source: Source, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "ioctl", refuses)
    is_full = number == errno.ENOSPC
    with pytest.raises(OSError, match=os.strerror(number)) if is_full else nullcontext():
        assert copied(ByteRange(source, 0, 300_001), 0, tmp_path / "out") == CONTENT


def test_a_source_that_became_shorter_is_damaged(source: Source, tmp_path: Path) -> None:
    os.truncate(tmp_path / "source", 200_000)
    with pytest.raises(Damaged, match="became shorter"):
        copied(ByteRange(source, 0, 300_001), 0, tmp_path / "out")


@pytest.mark.parametrize("damaged", [False, True])
def test_pt_to_pt_shares_large_storages_and_compares_checksums(
    damaged: bool, tmp_path: Path, shared: list[int], monkeypatch: MonkeyPatch
) -> None:
    state = {f"module.{i}": torch.arange(300_000.0) + i for i in range(3)} | {"module.small": torch.ones(9)}
    torch.save(state, tmp_path / "in.pt")
    if damaged:
        raw = bytearray((tmp_path / "in.pt").read_bytes())
        raw[raw.index(state["module.1"].numpy().tobytes()) + 500_000] ^= 1
        (tmp_path / "in.pt").write_bytes(raw)
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        renamed, _ = ckpttool.strip_prefix(checkpoint)
        if damaged:
            with pytest.raises(Damaged, match="do not match their checksum"):
                ckpttool.save(renamed, tmp_path / "out.pt")
            return
        planned = ckpttool.save(renamed, tmp_path / "out.pt", dry_run=True)
        saved = ckpttool.save(renamed, tmp_path / "out.pt", verify=True)
    assert planned.nbytes == saved.nbytes == (tmp_path / "out.pt").stat().st_size
    assert len(shared) == 3 and sum(shared) > 3 * (1_200_000 - 2 * BLOCK)
    loaded = torch.load(tmp_path / "out.pt", mmap=True)
    assert all(torch.equal(loaded[name.removeprefix("module.")], tensor) for name, tensor in state.items())
    monkeypatch.undo()
    (tmp_path / "copied").mkdir()
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        ckpttool.save(ckpttool.strip_prefix(checkpoint)[0], tmp_path / "copied/out.pt")
    assert (tmp_path / "copied/out.pt").read_bytes() == (tmp_path / "out.pt").read_bytes()


def test_bytes_that_are_shared_are_read_where_they_are_to_be_summed(
    source: Source, tmp_path: Path, shared: list[int]
) -> None:
    sums, moved, read = list[int](), list[int](), list[int]()
    source.observers.append(lambda offset, data: read.append(len(data)))
    with open(tmp_path / "out", "w+b") as file, Output(file, moved.append) as out:
        out.copy(ByteRange(source, 0, 300_001), sums.append)
    assert (tmp_path / "out").read_bytes() == CONTENT
    assert sums == [zlib.crc32(CONTENT)] and sum(shared) == out.shared == 300_001
    assert sum(moved) == sum(read) == 300_001
