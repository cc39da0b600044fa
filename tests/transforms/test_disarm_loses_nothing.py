"""`disarm` loses nothing without naming it: every value of the input is in the output, or in the report."""

from __future__ import annotations

import collections
import decimal
import functools
import pathlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.transforms.disarm import disarm
from tests.support.tensor_kinds import Tagged
from tests.support.user_classes import Config, Key


class Items(dict[str, Any]):
    """A dict of a user's."""


class Marks:
    """Makes values that are found again in any text: each number and each text is made once."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def number(self) -> int:
        self.made.append(str(7_000_001 + len(self.made)))
        return int(self.made[-1])

    def text(self) -> str:
        self.made.append(f"mark{7_000_001 + len(self.made)}")
        return self.made[-1]

    def tensor(self) -> torch.Tensor:
        return torch.tensor([float(self.number())])

    def tagged(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.note, tensor.scale = Config(self.number(), self.text()), self.number()  # type: ignore[attr-defined]
        return tensor


HOLDERS: dict[str, Callable[[Marks], Any]] = {
    "a Parameter": lambda m: m.tagged(torch.nn.Parameter(m.tensor())),
    "a tensor": lambda m: m.tagged(m.tensor()),
    "a subclass": lambda m: m.tagged(m.tensor().as_subclass(Tagged)),
    "a Parameter of a subclass": lambda m: m.tagged(torch.nn.Parameter(m.tensor().as_subclass(Tagged))),
    "a buffer": lambda m: m.tagged(torch.nn.Buffer(m.tensor())),
    "an object": lambda m: Config(m.number(), [m.text(), m.tensor()]),
    "a key": lambda m: {Key(m.number(), m.text()): m.text(), (Key(m.number()), m.text()): m.number()},
    "a set": lambda m: {Key(m.number(), (m.text(), frozenset([m.text()]))), m.text(), np.int64(m.number())},
    "a set of sets": lambda m: {frozenset([m.text(), Key(m.number())])},
    "keys of NumPy": lambda m: {np.str_(m.text()): np.int64(m.number()), np.float64(m.number()): 1},
    "keys of the library": lambda m: {decimal.Decimal(m.number()): 1, pathlib.PurePath(m.text()): m.text()},
    "an ordered dict with attributes": lambda m: _with(collections.OrderedDict(a=m.text()), note=m.text()),
    "a dict with attributes": lambda m: _with(Items(a=m.text()), note=Config(m.number(), m.text())),
    "a dict of a class": lambda m: Items(a=m.text(), b=Config(m.number())),
    "a defaultdict": lambda m: collections.defaultdict(functools.partial(int, m.text()), {m.text(): 1}),
    "a deque": lambda m: collections.deque([m.text()], maxlen=m.number()),
    "a counter": lambda m: collections.Counter({m.text(): m.number()}),
    "a partial": lambda m: functools.partial(print, m.text(), sep=m.text()),
    "an array": lambda m: np.array([m.number(), m.number()]),
    "an array of objects": lambda m: np.array([Config(m.number()), m.text()], dtype=object),
    "an array of text": lambda m: np.array([m.text(), m.text()]),
    "a date of NumPy": lambda m: [np.dtype([(m.text(), "f4")]), m.text()],
    "a UUID": lambda m: {uuid.UUID(int=5): m.text()},
    "a tuple in itself": lambda m: _in_itself(m.text(), m.number()),
    "an exception": lambda m: ValueError(m.text(), m.number()),
    "a long number": lambda m: [m.text(), 2**3000],
    "a model": lambda m: _with(torch.nn.Linear(1, 1), note=[m.text()], stats={"mean": m.number()}),
}  # fmt: skip
HOLDERS["all of them"] = lambda m: [hold(m) for name, hold in HOLDERS.items() if name != "all of them"]


def _with(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def _in_itself(*items: Any) -> Any:
    made: tuple[Any, ...] = ([], *items)
    made[0].append(made)
    return made


def _texts(value: object, seen: dict[int, object]) -> Iterator[str]:
    """Yield every leaf of a value that torch has loaded, as text."""
    if isinstance(value, dict | list | tuple | set | torch.Tensor):
        if id(value) in seen:
            return
        seen[id(value)] = value
        inside: Any = [*value.items()] if isinstance(value, dict) else value
        if isinstance(value, torch.Tensor):
            inside = value.flatten().tolist()
        for each in [*inside, *getattr(value, "__dict__", {}).items()]:
            yield from _texts(each, seen)
    else:
        yield str(int(value)) if isinstance(value, float) else str(value)


@pytest.mark.parametrize(
    "options",
    [{}, {"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}],
    ids=["protocol 2", "protocol 4", "legacy"],
)
@pytest.mark.parametrize("holder", HOLDERS)
def test_every_value_is_in_the_output_or_named(holder: str, options: Any, tmp_path: Path) -> None:
    marks = Marks()
    value = {"model": {"w": marks.tensor(), "b": marks.tensor()}, "it": HOLDERS[holder](marks)}
    torch.save(value, tmp_path / "in.pt", **options)
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        new, report = disarm(checkpoint)
        ckpttool.save(new, tmp_path / "safe.pt")
    loaded = torch.load(tmp_path / "safe.pt", weights_only=True)
    found = " ".join(_texts(loaded, {}))
    lost = [mark for mark in marks.made if mark not in found]
    unnamed = {"a defaultdict": 1, "a deque": 1, "a model": 2, "all of them": 4}
    assert len(lost) == unnamed.get(holder, 0) <= len(report.left_out)
    one, other = (ckpttool.digest(tmp_path / name, state="model") for name in ("in.pt", "safe.pt"))
    assert one == other
