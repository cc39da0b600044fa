"""Each test of the command line runs in a folder of its own, and types its commands as people do."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running import Ran


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    """Make a new folder the current one."""
    return here


@pytest.fixture
def cli(cli: Callable[..., Ran]) -> Callable[..., Ran]:
    """Return a function that runs a command; its first argument is split as a shell does."""
    return lambda typed="", *words: cli(*shlex.split(typed), *words)
