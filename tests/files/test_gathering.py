"""Small pieces are read with their neighbours and written together: the same bytes by few system calls."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import pytest
import torch

import ckpttool
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
def test_pieces_of_any_size_and_order_arrive(seed: int, source: Source, tmp_path: Path) -> None:
    randomly, parts, seen = random.Random(seed), list[bytes](), list[tuple[int, bytes]]()
    source.observers.append(lambda offset, data: seen.append((offset, bytes(data))))
    sums, done, small = list[int](), list[int](), list[tuple[int, ByteRange]]()
    with open(tmp_path / "out", "w+b") as file, Output(file, done.append) as out:
        for _ in range(3000):
            offset, size = randomly.randrange(290_000), randomly.choice([0, 1, 7, 64, 4095, 4096, 9000])
            header, data = randomly.randbytes(randomly.randrange(3)), ByteRange(source, offset, size)
            out.write(header)
            if gathering.is_tiny(data):
                small.append((out.position, data))
                out.position += size
            else:
                out.copy(data, sums.append)
            parts += header, CONTENT[offset : offset + size]
        found = out.taken([data for _, data in small])
        out.write_pieces(zip((place for place, _ in small), found, strict=True))
    assert (tmp_path / "out").read_bytes() == b"".join(parts)
    assert sum(done) == sum(len(data) for _, data in seen)
    assert all(CONTENT[offset : offset + len(data)] == data for offset, data in seen)
    assert sorted(sums) == sorted(zlib.crc32(data) for _, data in seen if len(data) >= gathering.TINY)


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_thousand_tensors_take_a_few_system_calls(ending: str, tmp_path: Path, calls: list[str]) -> None:
    """With and without the checksums that a zip's headers need, which a file of safetensors lacks."""
    tensors = {f"layers.{i}.w": torch.full((i % 9, 3), float(i)) for i in range(1000)}
    torch.save(tensors, tmp_path / "in.pt")
    for source, out in (
        ("in.pt", f"one{ending}"),
        (f"one{ending}", f"two{ending}"),
        (f"two{ending}", "t.pt"),
    ):
        with ckpttool.open(tmp_path / source) as checkpoint:
            calls.clear()
            ckpttool.save(checkpoint, tmp_path / out)
        assert len(calls) < 50
    loaded = torch.load(tmp_path / "t.pt")
    assert [*loaded] == ([*tensors] if ending == ".pt" else sorted(tensors))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_pieces_far_apart_are_not_read_along_with_what_lies_between(source: Source) -> None:
    ranges = [(0, 10), (5, 20), (100_000, 10), (100_010, gathering.TINY)]
    read = list[int]()
    whole = source._read
    source._read = lambda offset, size: (read.append(size), whole(offset, size))[1]  # type: ignore[method-assign]
    found = source.read_near(ranges)
    assert [bytes(data) for data in found] == [CONTENT[at : at + size] for at, size in ranges]
    assert read == [25, 10 + gathering.TINY]


@pytest.mark.parametrize("offset", [299_999, 300_001, 10**12])
def test_a_piece_past_the_end_of_its_file_is_named(offset: int, source: Source) -> None:
    with pytest.raises(Damaged, match="ends at byte 300000"):
        gathering.read_together([ByteRange(source, 5, 10), ByteRange(source, offset, 10)])


def test_what_is_gathered_is_bounded_again_after_there_was_nothing_to_write() -> None:
    gathered = gathering.Gathered()
    assert [*gathered.taken()] == []
    for position in range(gathering.MOST_PIECES):
        gathered.add(position, b"1")
    assert gathered.is_full
    assert [*gathered.taken()] == [(0, b"1" * gathering.MOST_PIECES)]
    assert not gathered.is_full
