"""Imports on first use: numpy, the attributes of a package (PEP 562), and views for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__all__ = ["NDArray", "attributes", "needing_torch", "np", "shown_by", "views_in"]

_views = ""


class _Module:
    """A module that is imported when a name in it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        module = import_module(self._name)
        vars(self).update(vars(module))  # so that later look-ups cost what those in a module do
        return getattr(module, name)


if TYPE_CHECKING:
    import hashlib as hashlib

    import numpy as np
    from numpy.typing import NDArray
else:  # most commands need no numpy, and start sooner without it
    np, NDArray = _Module("numpy"), Any
    hashlib = _Module("hashlib")  # loads OpenSSL, which most commands do without


def attributes(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__` for the public names of its modules.

    Names are separated by spaces; under `""` are modules that are public themselves. `__getattr__` raises
    NeedsTorch where torch is needed and missing.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        where = home[name] or name
        with needing_torch(f"{package}.{name}"):
            try:
                module = import_module(f"{package}.{where}")
            except ModuleNotFoundError as error:
                room = where.partition(".")[0]
                if error.name != f"{package}.{room}":
                    raise
                what = f"module '{package}' has no attribute '{name}': its room '{room}' was taken out"
                raise AttributeError(what) from None
        return getattr(module, name) if home[name] else module

    return __getattr__, lambda: sorted(home), list(home)


@contextmanager
def needing_torch(what: str) -> Iterator[None]:
    """Raise NeedsTorch where the block, or the function, lacks torch; `what` is its name."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "torch":
            from ..errors import NeedsTorch

            raise NeedsTorch(what) from error
        raise


def views_in(module: str) -> None:
    """Set the module of the functions that `shown_by` calls."""
    global _views
    _views = module


def shown_by(view: str) -> Callable[[Any], str | None]:
    """Return a `_repr_html_` that calls a function of the module set by `views_in`."""

    def _repr_html_(self: Any) -> str | None:
        html: str | None = getattr(import_module(_views), view)(self) if find_spec(_views) else None
        return html

    return _repr_html_
