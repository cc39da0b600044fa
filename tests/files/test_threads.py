"""Work on several cores: results in the order of the jobs, and errors where they belong."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from ckpttool.files import threads as threads_module
from ckpttool.files.threads import beside, in_order


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(threads_module, "cores", lambda most: min(count, most))
    return count


def late(number: int) -> int:
    time.sleep(0.001 * (number % 3))
    return number


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_come_in_the_order_of_the_jobs(count: int, threads: int) -> None:
    assert list(in_order((partial(late, n) for n in range(count)), 3)) == list(range(count))


def test_an_error_is_raised_and_ends_the_work(threads: int) -> None:
    done: list[int] = []

    def job(number: int) -> int:
        time.sleep(0.001)
        if number == 5:
            raise ValueError("the sixth")
        done.append(number)
        return number

    with pytest.raises(ValueError, match="the sixth"):
        list(in_order((partial(job, n) for n in range(1000)), 3))
    assert len(done) < 20
    assert not running()


def test_who_stops_asking_stops_the_work(threads: int) -> None:
    done: list[int] = []

    def job(number: int) -> int:
        done.append(number)
        return number

    results = in_order((partial(job, n) for n in range(100_000)), 3)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert len(done) < 20
    assert not running()


def test_one_job_is_done_beside_what_this_thread_does() -> None:
    both = threading.Barrier(2, timeout=10)  # passed by two threads at once, or by none

    def job() -> int:
        both.wait()
        return threading.get_ident()

    assert beside(job, both.wait) != threading.get_ident()
    assert not running()


@pytest.mark.parametrize("which", ["beside", "here"])
def test_an_error_beside_or_here_is_raised_when_both_have_ended(which: str) -> None:
    ended: list[str] = []

    def job(name: str) -> None:
        time.sleep(0.001)
        ended.append(name)
        if name == which:
            raise ValueError(name)

    with pytest.raises(ValueError, match=which):
        beside(partial(job, "beside"), partial(job, "here"))
    assert sorted(ended) == ["beside", "here"]
    assert not running()


@pytest.fixture(params=[0, 1, 2])
def startable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
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
def test_where_threads_can_not_be_started_this_one_does_each_job_once(count: int, startable: int) -> None:
    done: list[int] = []

    def job(number: int) -> int:
        done.append(number)
        return late(number)

    assert list(in_order((partial(job, n) for n in range(count)), 3)) == list(range(count))
    assert sorted(done) == list(range(count))
    assert not running()


def test_where_no_thread_can_be_started_both_jobs_are_done_here(startable: int) -> None:
    done: list[str] = []
    beside(partial(done.append, "beside"), partial(done.append, "here"))
    assert sorted(done) == ["beside", "here"]
    assert not running()


def test_an_error_is_raised_where_threads_can_not_be_started(startable: int) -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_order((partial(divmod, 1, n) for n in (2, 1, 0, 1)), 3))
    with pytest.raises(ZeroDivisionError):
        beside(partial(divmod, 1, 0), int)
    assert not running()


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
