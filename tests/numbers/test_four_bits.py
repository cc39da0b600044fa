"""Packed four-bit numbers, against formulas that are written out here; and tables that are looked up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.numbers import lookup
from ckpttool.numbers.dequantize import dequantize
from tests.support.quantised import equal, packed_words, plain, refusal, weight, written

# ---- bitsandbytes' NF4 and FP4, nested or not, against the formula written out here -------------------


BLOCK, OUTER = 64, 256


def statistics(
    shape: tuple[int, ...], kind: str, dtype: str, *, nested: bool
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the tensors of a weight as `QuantState.as_dict(packed=True)` has them, and the weight."""
    count = torch.Size(shape).numel()
    packed, table = torch.randint(0, 256, (-(-count // 2), 1), dtype=torch.uint8), torch.randn(16)
    if kind == "fp4":
        table = torch.cat([table[:8].abs(), -table[:8].abs()])
        table[0] = table[8] = 0.0
    said: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": dtype, "shape": list(shape)}
    blocks = -(-count // BLOCK)
    tensors = {"l.weight": packed, "l.weight.quant_map": table, "l.weight.absmax": torch.rand(blocks)}
    largest = tensors["l.weight.absmax"]
    if nested:
        codes, inner, outer = (
            torch.randint(0, 256, (blocks,)),
            torch.randn(256),
            torch.rand(-(-blocks // OUTER)),
        )
        said |= {"nested_blocksize": OUTER, "nested_dtype": "float32", "nested_offset": 0.0421}
        tensors |= {"l.weight.absmax": codes.to(torch.uint8), "l.weight.nested_quant_map": inner}
        tensors["l.weight.nested_absmax"] = outer
        largest = inner[codes] * outer.repeat_interleave(OUTER)[:blocks] + 0.0421
    text = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
    codes = torch.stack([packed[:, 0] >> 4, packed[:, 0] & 15], 1).flatten()[:count].long()
    numbers = table[codes]
    if kind == "fp4":
        numbers = torch.where(codes == 8, -0.0, numbers)
    values = numbers * largest.repeat_interleave(BLOCK)[:count]
    name = f"l.weight.quant_state.bitsandbytes__{kind}"
    return tensors | {name: text}, values.reshape(shape).to(getattr(torch, dtype))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(48, 96), (96, 64), (7, 31), (1, 1), (3, 5, 7), (300, 256)])
def test_blocks_are_cut_in_row_major_order_wherever_rows_end(
    tmp_path: Path, kind: str, dtype: str, nested: bool, shape: tuple[int, ...]
) -> None:
    tensors, expected = statistics(shape, kind, dtype, nested=nested)
    got, report = plain(written(tmp_path, tensors))
    assert [*got] == ["l.weight"]
    assert equal(got["l.weight"], expected)
    words = f"bitsandbytes {kind.upper()}, blocks of 64{', nested' if nested else ''}"
    assert report.dequantized == {words: 1}


def test_the_bytes_may_be_held_in_words_of_another_type(tmp_path: Path) -> None:
    tensors, expected = statistics((48, 64), "nf4", "bfloat16", nested=False)
    tensors["l.weight"] = tensors["l.weight"].reshape(-1).view(torch.bfloat16).reshape(-1, 1)
    assert equal(weight(tmp_path, tensors), expected)


def test_int8_is_times_the_largest_of_its_row_over_127(tmp_path: Path) -> None:
    codes, largest = torch.randint(-127, 128, (6, 8), dtype=torch.int8), torch.rand(6)
    tensors = {"l.weight": codes, "l.SCB": largest, "l.weight_format": torch.tensor(0, dtype=torch.uint8)}
    got = weight(tmp_path, tensors, {"quant_method": "bitsandbytes"}, torch_dtype="float16")
    assert equal(got, (codes * largest.reshape(-1, 1) * 7.874015718698502e-3).half())
    tensors["l.weight_format"] += 1
    assert "tiled for another kind of GPU" in refusal(tmp_path, tensors)
    assert "is of shape [5], and [6] fits it" in refusal(tmp_path, {**tensors, "l.SCB": largest[:5].clone()})


STATE = "l.weight.quant_state.bitsandbytes__nf4"
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no shape": ({"shape": None}, "its settings say the shape None"),
    "a shape of text": ({"shape": "48"}, "its settings say the shape '48'"),
    "a negative shape": ({"shape": [-48, 96]}, "say the shape [-48, 96]"),
    "a huge shape": ({"shape": [2**40, 2**40]}, "say the shape [1099511627776"),
    "more numbers than bytes": ({"shape": [48, 98]}, "has 2304 bytes for 4704 numbers"),
    "an unknown type": ({"dtype": "int3"}, "say the type 'int3'"),
    "blocks of nothing": ({"blocksize": 0}, "say blocksize = 0"),
    "blocks of another size": ({"blocksize": 32}, "'l.weight.absmax' is of shape [72], and [144] fits it"),
    "outer blocks of nothing": ({"nested_blocksize": -1}, "say nested_blocksize = -1"),
    "an offset of text": ({"nested_offset": "1"}, "say nested_offset = '1'"),
}


@pytest.mark.parametrize(("changes", "said"), CHANGES.values(), ids=CHANGES)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    tensors, _ = statistics((48, 96), "nf4", "bfloat16", nested=True)
    settings = json.loads(bytes(tensors[STATE].tolist())) | changes
    tensors[STATE] = torch.tensor([*json.dumps(settings).encode()], dtype=torch.uint8)
    assert said in refusal(tmp_path, tensors)


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "no JSON": ({STATE: torch.ones(9, dtype=torch.uint8)}, "is no JSON object"),
    "a list": ({STATE: torch.tensor([*b"[]"], dtype=torch.uint8)}, "is no JSON object"),
    "long settings": ({STATE: torch.zeros(1 << 17, dtype=torch.uint8)}, "is too long for settings"),
    "no weight": ({"l.weight": None}, "there is no 'l.weight'"),
    "no table": ({"l.weight.quant_map": None}, "there is no 'l.weight.quant_map'"),
    "a short table": ({"l.weight.quant_map": torch.ones(15)}, "is of shape [15], and [16] fits it"),
    "a table of NaN": ({"l.weight.quant_map": torch.full((16,), float("nan"))}, "holds a NaN"),
    "an infinite largest": ({"l.weight.nested_absmax": torch.full((1,), float("inf"))}, "holds a NaN"),
    "no statistics": ({STATE: None}, "belongs to no packed tensor"),
}


@pytest.mark.parametrize(("changes", "said"), PARTS.values(), ids=PARTS)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    tensors = statistics((48, 96), "nf4", "bfloat16", nested=True)[0] | changes
    assert said in refusal(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})


# ---- MXFP4 and NVFP4, against formulas that are written out here --------------------------------------


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


@pytest.mark.parametrize("name", ["weight", "weight_packed"])
def test_codes_may_be_of_the_type_of_four_bits(tmp_path: Path, name: str) -> None:
    packed, exponents = in_bytes(6, 32), torch.randint(100, 150, (6, 2), dtype=torch.uint8)
    scale = (torch.rand(6, 4) * 400).to(torch.float8_e4m3fn)
    powers = (2.0 ** (exponents.double() - 127)).float()
    codes = packed.view(torch.float4_e2m1fn_x2)
    micro = {f"l.{name}": codes, "l.weight_scale": exponents.view(torch.float8_e8m0fnu)}
    assert equal(weight(tmp_path, micro), (halves(packed) * powers.repeat_interleave(32, 1)).bfloat16())
    whole = {f"l.{name}": codes, "l.weight_scale": scale, "l.weight_scale_2": torch.tensor(3.7)}
    both = (scale.float() * torch.tensor(3.7)).repeat_interleave(16, 1)
    assert equal(weight(tmp_path, whole), (halves(packed) * both).bfloat16())


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
def test_parts_of_fp4_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
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


# ---- Numbers that are looked up in tables: the same as those that are computed one by one -------------


FP8_TYPES = {"quant_method": "fp8", "weight_block_size": [128, 128]}
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
    path = written(tmp_path, {"l.0.weight": codes, "l.0.weight_scale_inv": scale}, FP8_TYPES)
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


@pytest.mark.parametrize(
    ("name", "kind"), [("float8_e4m3fn",) * 2, ("float4_e2m1fn_x2", "float4_e2m1fn")], ids=["e4m3", "e2m1"]
)
def test_numbers_are_rounded_as_ml_dtypes_does(name: str, kind: str) -> None:
    upper = np.arange(1 << 16, dtype="<u4") << 16
    values = np.stack([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view("<f4")
    got = np.empty(values.shape, np.uint8)
    lookup.round_to(DTYPES[name], values, got)
    with np.errstate(all="ignore"):
        expected = values.astype(getattr(ml_dtypes, kind)).view("u1")
    assert np.array_equal(got, expected)
