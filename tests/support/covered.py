"""Cases that others of the same test cover, for `make long`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def with_long(cases: Iterable[Any], covered: Container[Any]) -> list[Any]:
    """Return cases as parameters, of which `make long` runs the covered ones."""
    whole = [
        (case if isinstance(case, tuple) else (case,), [pytest.mark.long] * (case in covered))
        for case in cases
    ]
    return [pytest.param(*case, marks=marks) for case, marks in whole]
