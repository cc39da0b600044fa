"""Small pieces are read with their neighbours and written together: the same bytes by few system calls."""

from __future__ import annotations

import os
import random
import zlib
from functools import partial
from pathlib import Path

import pytest

from ckpttool import system
from ckpttool.errors import Damaged
from ckpttool.files import gathering
from ckpttool.files.copying import Output
from ckpttool.tensors.source import ByteRange, Source

CONTENT = random.Random(1).randbytes(300_000)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "in"
    path.write_bytes(CONTENT)
    return Source(str(path), os.open(path, os.O_RDONLY))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The system calls that read and write, by name."""
    made: list[str] = []
    for name in ("pread", "preadv", "pwrite"):
        whole = getattr(system, name)
        monkeypatch.setattr(
            system, name, lambda *a, whole=whole, name=name: (made.append(name), whole(*a))[1]
        )
    return made


@pytest.mark.parametrize("seed", range(2))
def test_pieces_in_any_order_with_headers_between_them_arrive(
    seed: int, source: Source, tmp_path: Path
) -> None:
    randomly, parts, seen = random.Random(seed), list[bytes](), list[tuple[int, bytes]]()
    source.observers.append(lambda offset, data: seen.append((offset, bytes(data))))
    sums, done = list[int](), list[int]()
    with open(tmp_path / "out", "w+b") as file, Output(file, done.append) as out:
        for _ in range(3000):  # more than are gathered at a time
            offset, size = randomly.randrange(290_000), randomly.choice([0, 1, 7, 64, 4095, 4096, 9000])
            header = randomly.randbytes(randomly.randrange(3))
            out.write(header)
            out.copy(ByteRange(source, offset, size), sums.append)
            parts += header, CONTENT[offset : offset + size]
    assert (tmp_path / "out").read_bytes() == b"".join(parts)
    assert sum(done) == sum(len(data) for _, data in seen)
    assert all(CONTENT[offset : offset + len(data)] == data for offset, data in seen)
    assert sorted(sums) == sorted(zlib.crc32(data) for _, data in seen)


def test_a_thousand_neighbours_take_a_few_system_calls(
    source: Source, tmp_path: Path, calls: list[str]
) -> None:
    with open(tmp_path / "out", "w+b") as file, Output(file) as out:
        for start in range(0, 200_000, 200):
            out.write(b"head")
            out.copy(ByteRange(source, start, 64))
    assert len(calls) < 8
    assert (tmp_path / "out").read_bytes()[-64:] == CONTENT[199_800:199_864]


@pytest.mark.parametrize("count", [1, gathering.MOST_PIECES - 1, gathering.MOST_PIECES, 4500])
def test_a_header_that_waits_for_a_checksum_is_written(count: int, source: Source, tmp_path: Path) -> None:
    """As many of them as are gathered at a time, and more, as of a file without checksums made a zip."""

    def header(position: int, crc: int) -> None:
        out.write_at(position, crc.to_bytes(4, "little"))

    with open(tmp_path / "out", "w+b") as file, Output(file) as out:
        for start in range(count):
            place, out.position = out.position, out.position + 4
            out.copy(ByteRange(source, start, 16), partial(header, place))
    parts = [CONTENT[start : start + 16] for start in range(count)]
    whole = b"".join(zlib.crc32(part).to_bytes(4, "little") + part for part in parts)
    assert (tmp_path / "out").read_bytes() == whole


def test_pieces_far_apart_are_not_read_along_with_what_lies_between(source: Source) -> None:
    ranges = [(0, 10), (5, 20), (100_000, 10), (100_010, gathering.TINY)]
    read = list[int]()
    whole = source._read
    source._read = lambda offset, size: (read.append(size), whole(offset, size))[1]  # type: ignore[method-assign]
    found = source.read_near(ranges)
    assert [bytes(data) for data in found] == [CONTENT[at : at + size] for at, size in ranges]
    assert read == [25, 10 + gathering.TINY]


@pytest.mark.parametrize("offset", [299_999, 300_001, 10**12])
def test_a_piece_past_the_end_of_its_file_is_named(offset: int, source: Source, tmp_path: Path) -> None:
    with (
        pytest.raises(Damaged, match="ends at byte 300000"),
        open(tmp_path / "out", "w+b") as file,
        Output(file) as out,
    ):
        out.copy(ByteRange(source, 5, 10))
        out.copy(ByteRange(source, offset, 10))


def test_what_is_gathered_is_bounded_again_after_there_was_nothing_to_write() -> None:
    gathered = gathering.Gathered()
    assert gathered.taken() == ([], [])
    for position in range(gathering.MOST_PIECES):
        gathered.add(position, b"1")
    assert gathered.is_full
