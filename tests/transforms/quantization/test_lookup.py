"""Numbers that are looked up in tables: the same as those that are computed one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.tensors.dtypes import DTYPES, numpy_type
from ckpttool.transforms.quantization import lookup
from ckpttool.transforms.quantization.dequantize import dequantize
from tests.support.quantised import equal, packed_words, plain, weight, written

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def by_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply each block of 128 × 128 with its scale in float32, the last ones being shorter."""
    each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * each[: codes.shape[0], : codes.shape[1]]


def gptq(
    bits: int, group: int, dtype: torch.dtype, *, is_permuted: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a layer with 256 inputs and 64 outputs, and its weight."""
    of = torch.arange(256) // group
    of = of[torch.randperm(256)] if is_permuted else of
    codes = torch.randint(0, 1 << bits, (256, 64))
    zeros = torch.randint(1, 1 << bits, (256 // group, 64))
    scales = torch.rand(zeros.shape).to(dtype)
    words = {"qweight": packed_words(codes, bits, 0), "qzeros": packed_words(zeros - 1, bits, 1)}
    tensors = {**words, "scales": scales, "g_idx": of.int()}
    weight = ((codes - zeros[of]).float() * scales[of].float()).to(dtype).T
    return {f"l.0.{name}": tensor for name, tensor in tensors.items()}, weight


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many elements were looked up together, each time."""
    sizes: list[int] = []
    look_up = lookup._look_up

    def counted(*args: Any) -> None:
        sizes.append(args[-1].size)
        look_up(*args)

    monkeypatch.setattr(lookup, "_look_up", counted)
    return sizes


@pytest.mark.parametrize("piece", [lookup.PIECE, 40_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_blocks_of_8_bits(
    piece: int, dtype: torch.dtype, tmp_path: Path, looked_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "PIECE", piece)  # pieces begin and end anywhere in a row
    codes, scale = fp8(300, 517), torch.rand(3, 5)
    codes.view(torch.uint8)[7, :256] = torch.arange(256).byte()  # NaN and all
    path = written(tmp_path, {"l.0.weight": codes, "l.0.weight_scale_inv": scale}, FP8)
    (got,) = plain(path, str(dtype).removeprefix("torch."))[0].values()
    expected = by_blocks(codes, scale).to(dtype)
    assert torch.equal(got.isnan(), expected.isnan()) and equal(got.nan_to_num(), expected.nan_to_num())
    assert 0.9 * codes.numel() < sum(looked_up) <= codes.numel()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_gptq(bits: int, dtype: torch.dtype, is_permuted: bool, tmp_path: Path, looked_up: list[int]) -> None:
    tensors, expected = gptq(bits, 64, dtype, is_permuted=is_permuted)
    assert equal(weight(tmp_path, tensors, GPTQ | {"bits": bits}), expected)
    assert sum(looked_up) == expected.numel()


@pytest.mark.parametrize("rows", [300, 1100])  # more numbers than 16 bits count, and than are cast at once
def test_large_tables(rows: int, tmp_path: Path, looked_up: list[int]) -> None:
    codes, scale = fp8(rows, 600), torch.rand(rows, 1)
    got = weight(tmp_path, {"l.0.weight": codes, "l.0.weight_scale": scale})
    assert equal(got, (codes.float() * scale).bfloat16()) and looked_up == [codes.numel()]


def test_small_blocks_are_computed(tmp_path: Path, looked_up: list[int]) -> None:
    tensors, expected = gptq(4, 8, torch.float16)
    got = weight(tmp_path, tensors, GPTQ | {"group_size": 8})
    assert equal(got, expected) and not looked_up


@pytest.mark.parametrize("rows", [128, 1100])  # whose last number is cast with all others, or after some
def test_overflows_are_counted_one_by_one(rows: int, tmp_path: Path, looked_up: list[int]) -> None:
    codes, scale = fp8(rows, 600), torch.ones(rows, 1)
    scale[-1] = 60_000
    path = written(tmp_path, {"l.0.weight": codes, "l.0.weight_scale": scale})
    with ckpttool.open(path) as checkpoint:
        new, report = dequantize(checkpoint, dtype=DTYPES["float16"])
        ckpttool.save(new, tmp_path / "out.safetensors")
    values = (codes.float() * scale).half()
    assert report.casting.overflows == int(values.isinf().sum()) > 0 and not looked_up


def test_fp8_is_rounded_as_ml_dtypes_does() -> None:
    upper = np.arange(1 << 16, dtype="<u4") << 16
    values = np.stack([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view("<f4")
    got = np.empty(values.shape, np.uint8)
    lookup.rounded_to_fp8(values, got)
    with np.errstate(all="ignore"):
        expected = values.astype(numpy_type(DTYPES["float8_e4m3fn"])).view("u1")
    assert np.array_equal(got, expected)
