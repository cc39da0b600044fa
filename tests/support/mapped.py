"""States taken through rules, from file to file; and what models of other programs call their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import ckpttool
from ckpttool.transforms.mapping.applying import Mapped, apply
from ckpttool.transforms.mapping.rule_file import rules_in
from ckpttool.transforms.mapping.rules import MapRules
from tests.support.comparing import values
from tests.support.saved import loaded, opened

State = dict[str, torch.Tensor]


def rules(*tables: str, top: str = 'rest = "refuse"') -> MapRules:
    """Return the rules that these texts describe, each a table of a rule file."""
    return rules_in("\n".join([top, *(f"[[rule]]\n{table}" for table in tables)]))


def mapped(value: Any, folder: Path, by: MapRules, **given: Any) -> tuple[Any, Mapped]:
    """Return what torch loads from a value that torch saved, after rules, and what they report."""
    with opened(value, folder) as checkpoint:
        new, report = apply(checkpoint, by, **given)
        return loaded(new, folder), report


def assert_reversible(state: Mapping[str, torch.Tensor], folder: Path, by: MapRules, **given: Any) -> State:
    """Return a state after rules; raise AssertionError unless the way back gives every bit again."""
    there: State = mapped(dict(state), folder, by, **given)[0]
    back = mapped(there, folder, by.inverse(), **given)[0]
    assert_equal(back, state)
    return there


def assert_equal(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Raise AssertionError unless two states have the same names, types, shapes and bits."""
    assert {*mine} == {*theirs}
    for name, tensor in theirs.items():
        assert (mine[name].dtype, mine[name].shape) == (tensor.dtype, tensor.shape), name
        assert values(mine[name]) == values(tensor), name


def random_state(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32) -> State:
    """Return random tensors, the same in each run."""
    torch.manual_seed(0)
    return {name: torch.randn(tuple(shape)).to(dtype) for name, shape in shapes.items()}


def refusal(value: Any, folder: Path, by: MapRules, **given: Any) -> str:
    """Return the message and the hint with which rules refuse a state."""
    try:
        mapped(value, folder, by, **given)
    except ckpttool.CkptToolError as error:
        return str(error)
    raise AssertionError("not refused")
