"""Work on several cores: results in the order of the jobs, and errors where they belong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ckpttool import ahead
from ckpttool.ahead import in_order, together

Way = Callable[[Iterator[Callable[[], int]], int], Iterator[int]]
WAYS = [in_order, together]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(ahead, "cores", lambda most: min(count, most))
    return count


def late(number: int) -> int:
    time.sleep(0.001 * (number % 3))
    return number


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_come_in_the_order_of_the_jobs(way: Way, count: int, threads: int) -> None:
    assert list(way((partial(late, n) for n in range(count)), 3)) == list(range(count))


@pytest.mark.parametrize("way", WAYS)
def test_an_error_is_raised_and_ends_the_work(way: Way, threads: int) -> None:
    done: list[int] = []

    def job(number: int) -> int:
        time.sleep(0.001)
        if number == 5:
            raise ValueError("the sixth")
        done.append(number)
        return number

    with pytest.raises(ValueError, match="the sixth"):
        list(way((partial(job, n) for n in range(1000)), 3))
    assert len(done) < 20
    assert not running()


@pytest.mark.parametrize("way", WAYS)
def test_who_stops_asking_stops_the_work(way: Way, threads: int) -> None:
    done: list[int] = []

    def job(number: int) -> int:
        done.append(number)
        return number

    results = way((partial(job, n) for n in range(100_000)), 3)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert len(done) < 100_000
    assert not running()


def test_together_means_that_this_thread_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "cores", lambda most: min(2, most))
    both = threading.Barrier(2, timeout=10)  # passed by two threads at once, or by none

    def job() -> int:
        both.wait()
        return threading.get_ident()

    workers = set(together((job for _ in range(10)), 2))
    assert len(workers) == 2
    assert threading.get_ident() in workers


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
