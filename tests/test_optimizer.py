"""Parameters renamed inside an optimizer's state, whatever it is keyed by."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.inert import OrderedDict_
from ckpttool.optimizer import rename_parameters

NAMES = {"module.a": "a", "module.b": "b"}


def test_names_beside_indices_are_renamed_and_indices_stay() -> None:
    optimizer = {
        "state": {0: {"step": 1}, 1: {"step": 2}},
        "param_groups": [{"lr": 0.1, "params": [0, 1], "param_names": ["module.a", "module.b"]}],
    }
    assert rename_parameters(optimizer, NAMES) == {
        "state": {0: {"step": 1}, 1: {"step": 2}},
        "param_groups": [{"lr": 0.1, "params": [0, 1], "param_names": ["a", "b"]}],
    }


def test_a_state_by_name_is_renamed_in_its_order() -> None:
    optimizer = {
        "state": {"module.b": 2, "module.a": 1},
        "param_groups": [{"params": ["module.b", "module.a"]}],
    }
    renamed = rename_parameters(optimizer, NAMES)
    assert list(renamed["state"].items()) == [("b", 2), ("a", 1)]
    assert renamed["param_groups"][0]["params"] == ["b", "a"]


def test_names_that_are_not_known_stay() -> None:
    optimizer = {"state": {"x": 1}, "param_groups": [{"params": ["x"], "param_names": ["x", "module.a"]}]}
    assert rename_parameters(optimizer, NAMES)["param_groups"][0]["param_names"] == ["x", "a"]


def test_nothing_else_is_touched_and_the_original_is_not_changed() -> None:
    optimizer: dict[str, Any] = {
        "state": {},
        "param_groups": [{"params": [0], "param_names": ["module.a"], "betas": (0.9, 0.99), "module.a": 1}],
        "module.a": "kept",
    }
    renamed = rename_parameters(optimizer, NAMES)
    assert renamed["module.a"] == "kept"
    assert renamed["param_groups"][0]["module.a"] == 1
    assert optimizer["param_groups"][0]["param_names"] == ["module.a"]


@pytest.mark.parametrize(
    "odd", [{"state": 1, "param_groups": 2}, {"state": {}, "param_groups": [None, {"params": 3}]}], ids=str
)
def test_what_only_looks_like_an_optimizer_goes_through(odd: dict[str, Any]) -> None:
    assert rename_parameters(odd, NAMES) == odd


def test_an_ordered_state_stays_one_with_its_attributes() -> None:
    state, optimizer = OrderedDict_({"module.a": 1}), OrderedDict_()
    state.attributes, optimizer.attributes = {"x": 1}, {"y": 2}
    optimizer.update({"state": state, "param_groups": []})
    renamed = rename_parameters(optimizer, NAMES)
    assert isinstance(renamed, OrderedDict_) and isinstance(renamed["state"], OrderedDict_)
    assert (renamed.attributes, renamed["state"].attributes) == ({"y": 2}, {"x": 1})
