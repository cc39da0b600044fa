"""Work on several cores, and small pieces that are read and written together."""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

import ckpttool
from ckpttool.core import system
from ckpttool.core.files import copying
from ckpttool.core.files import threads as threads_module
from ckpttool.core.files.copying import Output
from ckpttool.core.files.crc import combined, crc32
from ckpttool.core.files.threads import NAME, Workers, cut, in_order, map_pieces
from ckpttool.core.tensors.ref import ByteRange, Source
from ckpttool.errors import Damaged

# ---- Work on several cores: results in the order of the jobs, errors where they belong, and checksums joined


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(threads_module, "cores", lambda most: min(count, most))
    return count


def late(number: int) -> int:
    time.sleep(0.001 * (number % 3))
    return number


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_come_in_the_order_of_the_jobs(count: int, threads: int) -> None:
    assert list(in_order((partial(late, n) for n in range(count)), 3)) == list(range(count))


def test_a_reader_that_stops_early_ends_the_work(threads: int) -> None:
    done: list[int] = []

    def job(number: int) -> int:
        done.append(number)
        return number

    results = in_order((partial(job, n) for n in range(100_000)), 3)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert len(done) < 20
    assert not running()


class Sized(NamedTuple):
    number: int
    nbytes: int


@pytest.mark.parametrize("nbytes", [0, 1, threads_module.GROUP // 3, threads_module.GROUP, 1 << 30])
def test_pieces_of_any_size_are_worked_on_once_and_in_order(nbytes: int, threads: int) -> None:
    pieces = [Sized(number, nbytes if number % 7 else 5) for number in range(2_000)]
    found = list(map_pieces(lambda piece: piece.number, pieces, 3))
    assert found == list(zip(pieces, range(2_000), strict=True))
    assert not running()


def test_small_pieces_are_handed_over_together_and_large_ones_alone(threads: int) -> None:
    jobs: list[int] = []

    def ask() -> Iterator[Sized]:
        for number in range(10):
            yield Sized(number, threads_module.GROUP if number in (3, 4) else 1)
            jobs.append(number)

    results = map_pieces(lambda piece: piece.number, ask(), 3)
    assert next(results)[1] == 0
    assert jobs[:3] == [0, 1, 2]
    assert [number for _, number in results] == list(range(1, 10))


@pytest.mark.parametrize(("nbytes", "most"), [(0, 5), (5, 5), (11, 5), (4, 5)])
def test_stretches_add_up_to_the_whole(nbytes: int, most: int) -> None:
    stretches = list(cut(nbytes, most))
    assert [start for start, _ in stretches] == list(range(0, nbytes, most))
    assert sum(size for _, size in stretches) == nbytes


def test_results_are_taken_while_later_jobs_are_added(threads: int) -> None:
    found: list[int] = []
    with Workers[int](3) as workers:
        for number in range(50):
            workers.add(partial(late, number))
            found += workers.results(pending=4)
        assert len(found) == 46
        found += workers.results()
    assert found == list(range(50))
    assert not running()


def test_who_waits_for_a_result_runs_jobs_meanwhile(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "cores", lambda most: most)
    began = threading.Event()

    def long() -> int:
        began.set()
        time.sleep(0.2)
        return threading.get_ident()

    with Workers[int](2) as workers:
        workers.add(long)
        workers.add(long)
        assert began.wait(5)
        ran_by = list(workers.results())
    assert threading.get_ident() in ran_by
    assert len(set(ran_by)) == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_or_interrupt_within_a_job_ends_the_work(error: type[BaseException], threads: int) -> None:
    done: list[int] = []

    def job(number: int) -> int:
        time.sleep(0.001)
        if number == 5:
            raise error("the sixth")
        done.append(number)
        return number

    with pytest.raises(error, match="the sixth"):
        list(in_order((partial(job, n) for n in range(1000)), 3))
    assert len(done) < 20
    assert not running()


@pytest.fixture(params=[0, 1, 2])
def startable(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> int:
    """Only so many threads can be started, as under a limit on processes."""
    count: int = request.param
    rest, start = [None] * count, threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not rest:
            raise RuntimeError("can't start new thread")
        rest.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(threads_module, "cores", lambda most: most)
    return count


@pytest.mark.parametrize("count", [2, 3, 200])
def test_without_threads_the_caller_runs_each_job_once_and_has_its_errors(count: int, startable: int) -> None:
    done: list[int] = []

    def job(number: int) -> int:
        done.append(number)
        return late(number)

    assert list(in_order((partial(job, n) for n in range(count)), 3)) == list(range(count))
    assert sorted(done) == list(range(count))
    with pytest.raises(ZeroDivisionError):
        list(in_order((partial(divmod, 1, n) for n in (2, 1, 0, 1)), 3))
    assert not running()


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


# CRCs put together are those of the bytes put together.


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_the_checksum_of_two_stretches_is_that_of_their_bytes(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.binary(max_size=3000), st.integers(0, 2**32 - 1))
def test_checksums_are_those_of_zlib_with_any_library(data: bytes, before: int) -> None:
    assert crc32(data, before) == zlib.crc32(data, before)


def test_the_checksum_of_a_stretch_longer_than_any_buffer() -> None:
    """Zeros change a CRC too, by an amount that their number alone decides."""
    block, crc, zeros = bytes(1 << 20), zlib.crc32(b"before"), 0
    expected = crc
    for _ in range(300):
        expected = zlib.crc32(block, expected)
        zeros = combined(zeros, zlib.crc32(block), len(block))
    assert combined(crc, zeros, 300 << 20) == expected


# ---- Small pieces are read with their neighbours and written together: the same bytes by few system calls


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
            if copying.is_tiny(data):
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
    assert sorted(sums) == sorted(zlib.crc32(data) for _, data in seen if len(data) >= copying.TINY)


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
    ranges = [(0, 10), (5, 20), (100_000, 10), (100_010, copying.TINY)]
    read = list[int]()
    whole = source._read
    source._read = lambda offset, size: (read.append(size), whole(offset, size))[1]  # type: ignore[method-assign]
    found = source.read_near(ranges)
    assert [bytes(data) for data in found] == [CONTENT[at : at + size] for at, size in ranges]
    assert read == [25, 10 + copying.TINY]


@pytest.mark.parametrize("offset", [299_999, 300_001, 10**12])
def test_a_piece_past_the_end_of_its_file_is_named(offset: int, source: Source) -> None:
    with pytest.raises(Damaged, match="ends at byte 300000"):
        copying.read_together([ByteRange(source, 5, 10), ByteRange(source, offset, 10)])


def test_what_is_gathered_is_bounded_again_after_there_was_nothing_to_write() -> None:
    gathered = copying.Gathered()
    assert [*gathered.taken()] == []
    for position in range(copying.MOST_PIECES):
        gathered.add(position, b"1")
    assert gathered.is_full
    assert [*gathered.taken()] == [(0, b"1" * copying.MOST_PIECES)]
    assert not gathered.is_full
