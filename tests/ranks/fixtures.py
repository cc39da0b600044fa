"""Fixtures for tests of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks.pool import Pool

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """`run_ranks(world_size, case, *arguments, timeout=30)`: what the case returns on each rank."""
    pools: dict[int, Pool] = {}

    def run(world_size: int, case: Callable[..., Any], *arguments: Any, timeout: float = 30.0) -> list[Any]:
        return pools.setdefault(world_size, Pool(world_size)).run(case, *arguments, timeout=timeout)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture
def fresh_ranks() -> Iterator[RunRanks]:
    """`run_ranks` in processes that have run no case before, and end with the test."""
    pools: list[Pool] = []

    def run(world_size: int, case: Callable[..., Any], *arguments: Any, timeout: float = 30.0) -> list[Any]:
        pools.append(Pool(world_size))
        return pools[-1].run(case, *arguments, timeout=timeout)

    yield run
    for pool in pools:
        pool.close()
