"""Package attributes that are imported when they are first used (PEP 562), so that start-up stays short."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from .errors import NeedsTorch


def attributes(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], list[str]]:
    """Return a package's `__getattr__` and `__all__`.

    Args:
        package: the package's `__name__`.
        modules: the public names that each module of the package defines.

    Returns:
        A function that imports the module of a public name, or a module of the package by its own name, and
        raises AttributeError for any other name, and NeedsTorch if the module imports torch, which is not
        installed; and the list of all public names.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> object:
        try:
            if name in home:
                return getattr(import_module(f".{home[name]}", package), name)
            return import_module(f".{name}", package)
        except ModuleNotFoundError as error:
            if error.name == "torch":
                raise NeedsTorch(f"{package}.{name}") from error
            if name in home or error.name != f"{package}.{name}":
                raise
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return __getattr__, list(home)
