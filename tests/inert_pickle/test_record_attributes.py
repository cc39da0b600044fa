"""Attributes of pickled objects are read from their state, without running code."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckpttool
from ckpttool.inert_pickle.values import Global, Record


class Slotted:
    """An object with slots, whose state is a pair."""

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 18


def test_attributes_of_a_namespace_are_read_by_name(tmp_path: Path) -> None:
    args = argparse.Namespace(lr=0.1, model="resnet18", inner=SimpleNamespace(steps=[1, 2]))
    torch.save({"w": torch.ones(1), "args": args, "slotted": Slotted()}, tmp_path / "in.pt")
    tree = ckpttool.open(tmp_path / "in.pt").tree
    assert isinstance(tree, dict)
    assert (tree["args"].lr, tree["args"].model, tree["args"].inner.steps) == (0.1, "resnet18", [1, 2])
    assert tree["slotted"].depth == 18
    assert not hasattr(tree["args"], "epochs")
    with pytest.raises(
        AttributeError, match=r"'argparse.Namespace' has no attribute 'epochs' in its pickled state"
    ):
        tree["args"].epochs  # noqa: B018


def test_names_of_the_record_s_own_are_never_taken_from_the_file() -> None:
    state = {"args": 1, "items": 2, "state": 3, "type_name": 4, "__class__": 5, "__len__": 6, "lr": 7}
    record = Record("newobj", Global("m", "C"), (), state=state, has_state=True)
    assert (record.args, record.items, record.state, record.type_name) == ((), (), state, "m.C")
    assert (record.__class__, record.lr) == (Record, 7)
    assert not hasattr(record, "__len__")
    assert record.state["items"] == 2


@pytest.mark.parametrize("state", [None, 1, [("lr", 1)], "lr", ({},), (None, {"x": 1})])
def test_a_state_without_the_name_has_no_attribute(state: object) -> None:
    with pytest.raises(AttributeError):
        Record("newobj", Global("m", "C"), (), state=state, has_state=True).lr  # noqa: B018


def test_records_are_copied_as_before() -> None:
    record = Record("newobj", Global("m", "C"), (), state={"x": [1]}, has_state=True)
    assert copy.deepcopy(record).x == [1]
    with pytest.raises(AttributeError):
        Record.__new__(Record).x  # noqa: B018
