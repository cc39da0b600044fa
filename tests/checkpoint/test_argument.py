"""A path where an open checkpoint belongs is an error that says what to pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool

FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "strip_prefix": lambda given: ckpttool.strip_prefix(given),
    "add_prefix": lambda given: ckpttool.add_prefix(given),
    "rename_keys": lambda given: ckpttool.rename_keys(given, [("a", "b")]),
    "select": lambda given: ckpttool.select(given, only=["*"]),
    "drop": lambda given: ckpttool.drop(given, ["epoch"]),
    "slim": lambda given: ckpttool.slim(given),
    "split_complex": lambda given: ckpttool.split_complex(given),
    "join_complex": lambda given: ckpttool.join_complex(given),
    "with_metadata": lambda given: ckpttool.with_metadata(given, {"a": "b"}),
    "save": lambda given: ckpttool.save(given, "never.pt"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_path_is_refused_with_the_call_that_opens_it(name: str, tmp_path: Path) -> None:
    for path in ("it's.pt", tmp_path / "last.pt"):
        with pytest.raises(TypeError) as raised:
            FUNCTIONS[name](path)
        assert str(raised.value) == (
            f"{name}() takes an open checkpoint, not a path: "
            f"with ckpttool.open({str(path)!r}) as checkpoint: ckpttool.{name}(checkpoint, …)"
        )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_state_dict_is_refused_by_its_type(name: str) -> None:
    with pytest.raises(TypeError, match=r"takes a checkpoint that ckpttool\.open returned, not dict"):
        FUNCTIONS[name]({"w": torch.ones(1)})


def test_the_pair_that_a_transform_returns_is_refused_with_what_to_pass(tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(1)}, tmp_path / "f.pt")
    pair: Any = ckpttool.strip_prefix(ckpttool.open(tmp_path / "f.pt"))
    with pytest.raises(TypeError, match="not the pair that a function returned: pass the first of the two"):
        ckpttool.save(pair, tmp_path / "out.pt")


def test_a_missing_argument_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'checkpoint'"):
        ckpttool.strip_prefix()  # type: ignore[call-arg]


def test_a_checkpoint_may_be_passed_by_name(tmp_path: Path) -> None:
    torch.save({"module.w": torch.ones(1)}, tmp_path / "f.pt")
    with ckpttool.open(tmp_path / "f.pt") as checkpoint:
        plain, _ = ckpttool.strip_prefix(checkpoint=checkpoint)
    assert list(plain.state().tensors) == ["w"]
