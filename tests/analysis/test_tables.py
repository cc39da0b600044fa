"""Extremes, mean and deviation of a tensor's values agree with torch's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.analysis.tables import Stats, measure


@pytest.fixture
def stats(tmp_path: Path) -> Any:
    def stats(tensor: torch.Tensor) -> Stats | None:
        torch.save({"t": tensor}, tmp_path / "f.pt")
        return measure("t", ckpttool.open(tmp_path / "f.pt").state().tensors["t"])

    return stats


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_statistics_are_those_that_torch_computes(dtype: torch.dtype, stats: Any) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(700, 900) * 3 + 1).to(dtype)  # more than one block
    wide = tensor.double()
    found = stats(tensor)
    assert (found.minimum, found.maximum) == (wide.min().item(), wide.max().item())
    assert math.isclose(found.mean, wide.mean().item(), rel_tol=1e-12)
    assert math.isclose(found.deviation, wide.std(correction=0).item(), rel_tol=1e-12)
    assert found.non_finite == 0


def test_non_finite_values_are_counted_and_left_out(stats: Any) -> None:
    tensor = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf])
    assert stats(tensor) == Stats(1.0, 3.0, 2.0, 1.0, 3)
    assert stats(torch.full((4,), math.nan)) == Stats(non_finite=4)
    assert stats(torch.tensor(math.nan).expand(5, 7)) == Stats(non_finite=35)


def test_large_integers_are_exact(stats: Any) -> None:
    found = stats(torch.tensor([2**62 + 1, -(2**62) - 1]))
    assert (found.minimum, found.maximum) == (-(2**62) - 1, 2**62 + 1)


def test_views_and_empty_tensors_have_statistics(stats: Any) -> None:
    assert stats(torch.arange(6.0).reshape(2, 3).t()) == stats(torch.arange(6.0))
    assert stats(torch.ones(0)) == Stats()
    assert stats(torch.tensor(2.0).expand(1000, 1000)) == Stats(2.0, 2.0, 2.0, 0.0)


def test_types_without_an_order_have_no_statistics(stats: Any) -> None:
    assert stats(torch.ones(2, dtype=torch.complex64)) is None
