"""MXFP4 and NVFP4, against formulas that are written out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.quantised import equal, plain, refusal, weight, written

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def halves(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers of each byte, that of its lower half first."""
    return NUMBERS[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


def test_experts_of_gpt_oss_are_transposed(tmp_path: Path) -> None:
    blocks, scales = in_bytes(3, 10, 4, 16), torch.randint(90, 160, (3, 10, 4), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {
        f"{name}_blocks": blocks,
        f"{name}_scales": scales,
        f"{name}_bias": torch.ones(3, 10).bfloat16(),
    }
    got, report = plain(written(tmp_path, tensors, {"quant_method": "mxfp4"}))
    powers = (2.0 ** (scales.double() - 127)).float().repeat_interleave(32, 2)
    expected = halves(blocks.flatten(2)) * powers
    assert equal(got[name], expected.transpose(1, 2).bfloat16())
    assert sorted(got) == [name, f"{name}_bias"]
    assert report.dequantized == {"MXFP4": 1}


@pytest.mark.parametrize("name", ["weight", "weight_packed"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_rows_with_powers_of_two(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    packed, exponents = in_bytes(6, 32), torch.randint(100, 150, (6, 2), dtype=torch.uint8)
    tensors = {f"l.{name}": packed, "l.weight_scale": exponents.view(dtype)}
    torch.save(tensors, tmp_path / "a.pt")
    expected = halves(packed) * (2.0 ** (exponents.double() - 127)).float().repeat_interleave(32, 1)
    assert equal(plain(tmp_path / "a.pt")[0]["l.weight"], expected.bfloat16())


def test_the_ends_of_the_powers_of_two(tmp_path: Path) -> None:
    packed, exponents = in_bytes(2, 16), torch.tensor([[0], [254]], dtype=torch.uint8)
    tensors = {"l.weight_packed": packed, "l.weight_scale": exponents}
    got, _ = plain(written(tmp_path, tensors), "float32")
    assert equal(got["l.weight"], halves(packed) * torch.tensor([[2.0**-127], [2.0**127]]))
    exponents[1] = 255  # NaN, says the specification
    assert "'l.weight_scale' holds a NaN" in refusal(tmp_path, tensors)


@pytest.mark.parametrize("divides", [True, False])
def test_nvfp4_has_a_global_scale_that_divides_or_multiplies(tmp_path: Path, divides: bool) -> None:
    packed, whole = in_bytes(6, 16), torch.tensor([3.7])
    scale = (torch.rand(6, 2) * 400).to(torch.float8_e4m3fn)
    if divides:  # compressed-tensors'
        tensors = {"l.weight_packed": packed, "l.weight_scale": scale, "l.weight_global_scale": whole}
    else:  # ModelOpt's
        tensors = {"l.weight": packed, "l.weight_scale": scale, "l.weight_scale_2": whole[0]}
    tensors["l.input_scale"] = torch.tensor(1.0)
    both = scale.float() / whole if divides else scale.float() * whole
    got, report = plain(written(tmp_path, tensors))
    assert equal(got["l.weight"], (halves(packed) * both.repeat_interleave(16, 1)).bfloat16())
    assert report.dequantized == {"NVFP4": 1}
    assert report.left_out == ("l.input_scale",)


FP8 = torch.float8_e4m3fn
GLOBAL = {"l.weight_global_scale": torch.ones(1)}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a global scale of 0": (
        {"l.weight_global_scale": torch.zeros(1)},
        "'l.weight_scale' holds a NaN or an infinity",
    ),
    "two global scales": ({"l.weight_global_scale": torch.ones(2)}, "more than one global scale"),
    "no global scale": ({"l.weight_global_scale": None}, "there is no 'l.weight_scale_2'"),
    "too few scales": (
        {"l.weight_scale": torch.ones(6, 1).to(FP8)},
        "[6, 1], and [6, 2] fits it",
    ),
    "scales of another type": ({"l.weight_scale": torch.ones(6, 2)}, "'l.weight_scale' is of float32"),
    "rows that groups do not divide": (
        {"l.weight_packed": in_bytes(6, 9), "l.weight_scale": torch.ones(6, 2).to(FP8)},
        "rows of 18, which groups of 16 don't divide",
    ),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    scale = torch.ones(6, 2).to(torch.float8_e4m3fn)
    tensors = {"l.weight_packed": in_bytes(6, 16), "l.weight_scale": scale, **GLOBAL, **changes}
    assert said in refusal(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})


def test_blocks_of_another_form_are_refused(tmp_path: Path) -> None:
    for blocks, scales, said in (
        (in_bytes(3, 10, 4, 8), in_bytes(3, 10, 4), "isn't [E, rows, groups, 16]"),
        (in_bytes(10, 4, 16), in_bytes(10, 4), "isn't [E, rows, groups, 16]"),
        (in_bytes(3, 10, 4, 16), in_bytes(3, 10, 5), "is of shape [3, 10, 5], and [3, 10, 4] fits it"),
    ):
        assert said in refusal(tmp_path, {"e.up_blocks": blocks, "e.up_scales": scales})


def test_an_empty_tensor_becomes_an_empty_one(tmp_path: Path) -> None:
    got = weight(tmp_path, {"e_blocks": in_bytes(3, 0, 4, 16), "e_scales": in_bytes(3, 0, 4)})
    assert got.shape == (3, 128, 0)
