"""torchao's subclasses as they were recorded, and taken apart as its safetensors support does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.transforms.quantization.dequantize import dequantize
from tests.support.quantised import equal, plain, written

RECORDED = Path(__file__).with_name("recorded")


def test_a_pickled_state_becomes_plain_without_torchao(tmp_path: Path) -> None:
    with ckpttool.open(RECORDED / "torchao-0.18.pt") as checkpoint:
        new, report = dequantize(checkpoint)
        ckpttool.save(new, tmp_path / "plain.pt")
    got, expected = torch.load(tmp_path / "plain.pt"), load_file(RECORDED / "torchao-0.18-plain.safetensors")
    assert [*got] == ["int8.weight", "int8.bias", "float8.weight", "intx.weight"]
    assert all(equal(got[name], tensor) for name, tensor in expected.items())
    assert report.dequantized == {
        "torchao Int8Tensor, int8, per channel": 1,
        "torchao Float8Tensor, fp8, per channel": 1,
        "torchao IntxUnpackedToInt8Tensor, int8, groups of 32": 1,
    }


def apart(
    kind: str, tensors: dict[str, torch.Tensor], **settings: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors and header as `flatten_tensor_state_dict` makes them."""
    said = {"_type": kind, "_data": settings, "_tensor_data_names": [*tensors]}
    names = {"l.weight": json.dumps(said), "l.bias": json.dumps({"_type": "Tensor"})}
    parts = {f"l._weight_{name}": tensor for name, tensor in tensors.items()} | {"l.bias": torch.ones(3)}
    return parts, names | {"tensor_names": json.dumps([*names])}


BF16 = {"_type": "torch.dtype", "_data": "bfloat16"}


def test_tensors_that_were_taken_apart_become_one(tmp_path: Path) -> None:
    codes, scale = torch.randn(6, 8).to(torch.float8_e4m3fn), torch.rand(3, 2)
    parts, metadata = apart("Float8Tensor", {"qdata": codes, "scale": scale}, block_size=[2, 4], dtype=BF16)
    got, _ = plain(written(tmp_path, parts, metadata=metadata | {"format": "pt"}))
    assert sorted(got) == ["l.bias", "l.weight"]
    with ckpttool.open(tmp_path / "plain.safetensors") as checkpoint:
        assert checkpoint.metadata == {"format": "pt"}
    each = scale.repeat_interleave(2, 0).repeat_interleave(4, 1)
    assert equal(got["l.weight"], (codes.float() * each).bfloat16())


@pytest.mark.parametrize(
    ("kind", "changes", "settings", "said"),
    [
        ("Int4TilePackedTo4dTensor", {}, {}, "is torchao's Int4TilePackedTo4dTensor, and none of those read"),
        ("Float8Tensor", {"qdata": None}, {}, "is torchao's Float8Tensor"),
        ("Float8Tensor", {"scale": None}, {}, "there is no 'l.weight_scale'"),
        ("Float8Tensor", {"scale": torch.ones(5, 1)}, {}, "fits no shape|are \\[1, 1\\]|blocks of"),
        ("Float8Tensor", {"act_pre_scale": torch.ones(8)}, {}, "has act_pre_scale"),
        ("MXTensor", {}, {"is_swizzled_scales": True}, "has is_swizzled_scales"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, kind: str, changes: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    tensors = {"qdata": torch.randn(6, 8).to(torch.float8_e4m3fn), "scale": torch.rand(6, 1), **changes}
    parts, metadata = apart(
        kind, {name: each for name, each in tensors.items() if each is not None}, **settings
    )
    with pytest.raises(ckpttool.CkptToolError, match=said):
        plain(written(tmp_path, parts, metadata=metadata))


@pytest.mark.parametrize("text", ["", "[", "{}", "3", '["l.weight"]', '[3, "x"]', "[" * 100_000])
def test_a_header_that_makes_no_sense_is_no_subclass(tmp_path: Path, text: str) -> None:
    tensors = {"w": torch.randn(4, 4).to(torch.float8_e4m3fn), "w_scale": torch.ones(1)}
    for metadata in ({"tensor_names": text}, {"tensor_names": '["w"]', "w": text}):
        got, _ = plain(written(tmp_path, tensors, metadata=metadata))
        assert equal(got["w"], tensors["w"].bfloat16())
