"""Refuse anything but an open checkpoint as the first argument of a function, and say what to pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from .checkpoint import Checkpoint

P = ParamSpec("P")
R = TypeVar("R")


def takes_checkpoint(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose first parameter, `checkpoint`, is an open Checkpoint.

    Raises:
        TypeError: the function is called with something else, such as a path.
    """

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = args[:1] or [kwargs[name] for name in ("checkpoint",) if name in kwargs]
        if given and not isinstance(given[0], Checkpoint):
            raise TypeError(_what_to_pass(function.__name__, given[0]))
        return function(*args, **kwargs)

    return checked


def _what_to_pass(name: str, given: object) -> str:
    if isinstance(given, str | os.PathLike):
        path = repr(os.fspath(given))
        return (
            f"{name}() takes an open checkpoint, not a path: "
            f"with ckpttool.open({path}) as checkpoint: ckpttool.{name}(checkpoint, …)"
        )
    if isinstance(given, tuple) and given and isinstance(given[0], Checkpoint):
        return (
            f"{name}() takes a checkpoint, not the pair that a function returned: pass the first of the two"
        )
    return f"{name}() takes a checkpoint that ckpttool.open returned, not {type(given).__name__}"
