"""Work on several cores: results in the order of the jobs, errors where they belong, and checksums joined."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

from ckpttool.files import threads as threads_module
from ckpttool.files.crc32 import combined, crc32
from ckpttool.files.threads import NAME, Workers, cut, in_order, map_pieces


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
