"""bitsandbytes' NF4 and FP4, nested or not, against the formula written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.quantised import equal, plain, refusal, weight, written

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
