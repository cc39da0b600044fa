"""Norms of tensors that differ, and the cosine between them, against torch in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ckpttool.analysis.compare_values import Norms
from tests.support.comparing import compared
from tests.support.layouts import LAYOUTS, LAZY


def measured(tmp_path: Path, a: torch.Tensor, b: torch.Tensor, **given: object) -> Norms:
    (change,) = compared(tmp_path, {"t": a}, {"t": b}, **given).changed
    assert change.norms is not None
    return change.norms


def assert_right(found: Norms, a: torch.Tensor, b: torch.Tensor) -> None:
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = (each.to(wide).reshape(-1) for each in (a, b))
    expected = float((x * y.conj()).sum().real / (x.norm() * y.norm()))
    assert found.a == pytest.approx(float(x.norm()), rel=1e-12)
    assert found.b == pytest.approx(float(y.norm()), rel=1e-12)
    assert found.difference == pytest.approx(float((x - y).norm()), rel=1e-12)
    assert found.relative == pytest.approx(float((x - y).norm() / y.norm()), rel=1e-12)
    assert found.cosine == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int32]
)
def test_norms_are_those_of_float64(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b = (
        10 * torch.randn(300, 1000, dtype=torch.float64 if dtype != torch.complex64 else dtype) for _ in "ab"
    )
    a, b = a.to(dtype), b.to(dtype)
    assert_right(measured(tmp_path, a, b), a, b)


FINITE = {layout: tensor for layout, tensor in (LAYOUTS | LAZY).items() if tensor.isfinite().all()}


@pytest.mark.parametrize("layout", FINITE)
def test_norms_cover_finite_tensors_of_every_layout(layout: str, tmp_path: Path) -> None:
    a = FINITE[layout]
    b = a.clone(memory_format=torch.contiguous_format)
    b.view(-1)[0] += 3
    if float(b.norm()) and float(a.norm()):
        assert_right(measured(tmp_path, a, b), a, b)


def test_what_both_files_repeat_counts_every_time(tmp_path: Path) -> None:
    a, b = (torch.randn(1, 5).expand(6, 5) for _ in "ab")
    assert_right(measured(tmp_path, a, b), a, b)


def test_equal_elements_count_too(tmp_path: Path) -> None:
    """Only elements that differ are compared as numbers, but norms are of the whole tensor."""
    a = torch.ones(1_000_000)
    b = a.clone()
    b[-1] = 2
    assert_right(measured(tmp_path, a, b), a, b)


def test_tensors_of_two_dtypes_are_measured_by_value(tmp_path: Path) -> None:
    a = torch.randn(1000)
    found = measured(tmp_path, a, a.bfloat16(), rtol=0.0)
    assert_right(found, a, a.bfloat16())


def test_elements_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    a = torch.tensor([1.0, math.nan, 2.0, math.inf, 3.0])
    b = torch.tensor([1.0, 5.0, 2.5, 4.0, math.nan])
    kept = [0, 2]
    assert_right(measured(tmp_path, a, b), a[kept], b[kept])


def test_a_tensor_of_zeros_has_no_cosine(tmp_path: Path) -> None:
    found = measured(tmp_path, torch.ones(3), torch.zeros(3))
    assert (found.relative, found.cosine) == (math.inf, None)


def test_sums_that_exceed_float64_give_no_ratio(tmp_path: Path) -> None:
    huge = torch.full((3,), 1e300, dtype=torch.float64)
    found = measured(tmp_path, huge, -huge)
    assert (found.relative, found.cosine) == (None, None)


def test_types_without_numbers_have_no_norms(tmp_path: Path) -> None:
    a, b = (torch.tensor(values, dtype=torch.uint8).view(torch.bits8) for values in ([1, 2], [1, 3]))
    (change,) = compared(tmp_path, {"t": a}, {"t": b}).changed
    assert change.norms is None


def test_norms_of_several_tensors_are_those_of_the_tensors_joined(tmp_path: Path) -> None:
    pairs = [(torch.randn(5), torch.randn(5)), (torch.randn(2, 3), torch.randn(2, 3))]
    total = sum((measured(tmp_path, a, b) for a, b in pairs), Norms())
    a, b = (torch.cat([pair[side].reshape(-1) for pair in pairs]) for side in (0, 1))
    assert_right(total, a, b)
