"""The rooms of the house, which of them need others, and how the core finds what they offer.

A room is a folder beside this file. It holds all of one capability: what reads or changes a checkpoint, its
results, its commands. Whoever deletes the folder takes the capability away, and nothing else: the core never
imports a room, it asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

ROOMS: dict[str, tuple[str, ...]] = {
    "inspecting": (),
    "diffing": (),
    "verifying": ("diffing",),
    "sealing": (),
    "reporting": ("inspecting", "diffing", "metrics"),
    "conforming": ("mapping",),
    "mapping": (),
    "numbers": (),
    "ranks": (),
    "dividing": (),
    "slimming": ("deltas",),
    "disarming": (),
    "batchnorm": ("distributed",),
    "lora": (),
    "folding": (),
    "averaging": (),
    "optimizers": (),
    "deltas": (),
    "scanning": ("arrays",),
    "proving": ("verifying",),
    "metrics": ("distributed",),
    "models": ("conforming", "mapping"),
    "explaining": (),
    "dcp": (),
    "gguf": (),
    "onnx": (),
    "arrays": (),
    "distributed": (),
}
"""Each room, and the rooms that it needs; their commands are shown in this order."""


@cache
def find(name: str) -> ModuleType | None:
    """Return a module of a room by its name, `dcp.reading`; None where it is not there."""
    room, _, _ = name.partition(".")
    if find_spec(f"{__package__}.{room}") is None or find_spec(f"{__package__}.{name}") is None:
        return None
    return import_module(f"{__package__}.{name}")


def need(name: str) -> ModuleType:
    """Return a module of a room. Raises MissingRoom where it is not there."""
    if (found := find(name)) is None:
        from .errors import MissingRoom

        raise MissingRoom(name.partition(".")[0])
    return found


def offered(file: str) -> Iterator[ModuleType]:
    """Yield the module of that name of every room that has one, in the order of the rooms."""
    return (module for room in ROOMS if (module := find(f"{room}.{file}")))
