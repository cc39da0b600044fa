"""The libraries themselves: what they pack becomes what they make of it, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.numbers.quantize import quantize
from tests.support.quantised import equal, plain, weight, written

DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitsandbytes_of_4_bits(tmp_path: Path, kind: str, nested: bool, dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    for shape in ((96, 128), (48, 96), (64, 640)):
        packed, state = bnb.quantize_4bit(
            torch.randn(shape, dtype=dtype), quant_type=kind, compress_statistics=nested
        )
        parts = {f"l.weight.{name}": each for name, each in state.as_dict(packed=True).items()}
        got = weight(tmp_path, {"l.weight": packed, **parts})
        assert equal(got, bnb.dequantize_4bit(packed, state))


def test_bitsandbytes_of_8_bits(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    codes, largest, _ = bnb.int8_vectorwise_quant(torch.randn(40, 64, dtype=torch.float16))
    got = weight(tmp_path, {"l.weight": codes, "l.SCB": largest})
    assert equal(got, bnb.int8_vectorwise_dequant(codes, largest).bfloat16())


def test_mxfp4_of_transformers(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="needs transformers")
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(0, 250, (3, 10, 4), dtype=torch.uint8)
    got = weight(tmp_path, {"e.up_proj_blocks": blocks, "e.up_proj_scales": scales})
    assert equal(got, mxfp4.convert_moe_packed_tensors(blocks, scales))


def test_fp8_of_transformers_where_blocks_divide(tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="needs transformers")
    codes, scale = torch.randn(256, 384).to(torch.float8_e4m3fn), torch.rand(2, 3)
    convert = fp8.Fp8Dequantize(None)
    made = convert.convert({"weight": [codes], "weight_scale_inv": [scale]})["weight"]
    got, _ = plain(written(tmp_path, {"weight": codes, "weight_scale_inv": scale}), "float32")
    assert equal(got["weight"], made)


def _compressed(form: str, settings: dict[str, Any], tensors: dict[str, Any]) -> tuple[Any, Any]:
    """Return what compressed-tensors writes, and what it reads again."""
    base = pytest.importorskip("compressed_tensors.compressors", reason="needs compressed-tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(**settings)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = base.BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(dict(tensors), scheme)
    return packed, compressor.decompress(dict(packed), scheme)["weight"]


def _section(form: str, settings: dict[str, Any]) -> dict[str, Any]:
    weights = {name: value for name, value in settings.items() if name != "scale_dtype"}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"0": {"weights": weights}},
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, None])
def test_packed_integers_of_compressed_tensors(
    tmp_path: Path, bits: int, symmetric: bool, size: int | None
) -> None:
    groups = 160 // size if size else 1
    settings = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    settings |= {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    for dtype in DTYPES:
        tensors = {"weight": torch.randn(48, 160).to(dtype), "weight_scale": torch.rand(48, groups).to(dtype)}
        if not symmetric:
            zeros = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (48, groups))
            tensors["weight_zero_point"] = zeros.to(torch.int8)
        packed, expected = _compressed("pack-quantized", settings, tensors)
        parts = {f"l.{name}": each for name, each in packed.items()}
        assert equal(weight(tmp_path, parts, _section("pack-quantized", settings)), expected)


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "int8 by channel": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"},
        {
            "weight_scale": torch.rand(48, 1).bfloat16(),
            "weight_zero_point": torch.randint(-100, 100, (48, 1)).to(torch.int8),
        },
    ),
    "fp8 by channel": (
        "float-quantized",
        FLOAT | {"strategy": "channel"},
        {"weight_scale": torch.rand(48, 1).bfloat16()},
    ),
    "fp8 by tensor": (
        "float-quantized",
        FLOAT | {"strategy": "tensor"},
        {"weight_scale": torch.rand(1).half()},
    ),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
        {"weight_scale": torch.rand(48, 10), "weight_global_scale": torch.tensor([37.3])},
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        FLOAT | {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        {"weight_scale": 2.0 ** torch.randint(-3, 3, (48, 5))},
    ),
    "MXFP8": (
        "mxfp8-quantized",
        FLOAT | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        {"weight_scale": 2.0 ** torch.randint(-3, 3, (48, 5))},
    ),
}


@pytest.mark.parametrize(("form", "settings", "parts"), OTHERS.values(), ids=OTHERS)
def test_other_formats_of_compressed_tensors(
    tmp_path: Path, form: str, settings: dict[str, Any], parts: dict[str, torch.Tensor]
) -> None:
    packed, expected = _compressed(form, settings, {"weight": torch.randn(48, 160).bfloat16(), **parts})
    tensors = {f"l.{name}": each for name, each in packed.items()}
    assert equal(weight(tmp_path, tensors, _section(form, settings)), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_torchao_pickled_and_taken_apart(tmp_path: Path, dtype: torch.dtype) -> None:
    ao = pytest.importorskip("torchao.quantization", reason="needs torchao")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    values, made = torch.randn(48, 64, dtype=dtype), []
    for config in (
        ao.Int8WeightOnlyConfig(),
        ao.Float8WeightOnlyConfig(),
        ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    ):
        layer = torch.nn.Linear(64, 48, bias=False, dtype=dtype)
        ao.quantize_(layer, config)
        made.append(layer.weight.data)
    if dtype != torch.float16:
        made += [
            mx.MXTensor.to_mx(values, kind, 32) for kind in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2)
        ]
        made.append(nv.NVFP4Tensor.to_nvfp4(values, per_tensor_scale=torch.tensor(0.01)))
        made += [
            mx.MXTensor.to_mx(each, kind, 32, is_swizzled_scales=is_swizzled)
            for kind in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
            for each, is_swizzled in ((values, True), (values.repeat(3, 5), True), (values[None], False))
        ]
        scale, each = torch.tensor(0.01), torch.tensor([0.01, 0.02]).reshape(2, 1, 1)
        nvfp4 = nv.NVFP4Tensor.to_nvfp4
        made += [nvfp4(values, is_swizzled_scales=True), nvfp4(torch.stack([values, -values]))]
        made.append(nvfp4(values.repeat(3, 5), per_tensor_scale=scale, is_swizzled_scales=True))
        made.append(nvfp4(torch.stack([values, values]), per_tensor_scale=each))
    for tensor in made:
        parts, metadata = support.flatten_tensor_state_dict({"l.weight": tensor})
        assert equal(weight(tmp_path, parts, metadata=metadata), tensor.dequantize())
        torch.save({"l.weight": tensor}, tmp_path / "a.pt")
        assert equal(plain(tmp_path / "a.pt")[0]["l.weight"], tensor.dequantize())


def test_what_torchao_s_header_names_must_be_there(tmp_path: Path) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support", reason="needs torchao")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    tensor = nv.NVFP4Tensor.to_nvfp4(torch.randn(16, 64), per_tensor_scale=torch.tensor(0.01))
    parts, metadata = support.flatten_tensor_state_dict({"l.weight": tensor})
    for name in ("l._weight_per_tensor_scale", "l._weight_scale", "l._weight_qdata"):
        fewer = {each: part for each, part in parts.items() if each != name}
        with pytest.raises(ckpttool.errors.Refused, match=f"{name.removeprefix('l._')}' is missing"):
            plain(written(tmp_path, fewer, metadata=metadata))


@pytest.mark.filterwarnings("ignore")  # of the libraries', about their own settings
@pytest.mark.parametrize("scheme", ["fp8", "fp8-channel", "fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_transformers_loads_what_was_packed(tmp_path: Path, scheme: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    if scheme != "fp8-block":
        pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, dtype="bfloat16")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "whole")
    (tmp_path / "packed").mkdir()
    with ckpttool.open(tmp_path / "whole" / "model.safetensors") as checkpoint:
        new, report = quantize(checkpoint, scheme)
        ckpttool.save(new, tmp_path / "packed" / "model.safetensors")
    settings = json.loads((tmp_path / "whole" / "config.json").read_text())
    settings["quantization_config"] = report.quantization_config
    (tmp_path / "packed" / "config.json").write_text(json.dumps(settings))
    got, _ = plain(tmp_path / "packed" / "model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", quantization_config=_plainly(transformers, scheme), dtype=torch.bfloat16
    )
    state = loaded.state_dict()
    assert len(report.errors) == 14
    assert all(equal(state[name].bfloat16(), got[name]) for name in report.errors)


def _plainly(transformers: Any, scheme: str) -> Any:
    """Return the settings by which transformers makes the tensors plain when it loads them."""
    if scheme == "fp8-block":
        return transformers.FineGrainedFP8Config(dequantize=True)
    return transformers.CompressedTensorsConfig(dequantize=True)


# ---- ComfyUI's own code, in float32: on a CPU it rounds the scales of NVFP4 to the type asked for


@pytest.mark.parametrize("kind", ["nvfp4.TensorCoreNVFP4Layout", "mxfp8.TensorCoreMXFP8Layout"])
@pytest.mark.parametrize("shape", [(40, 72), (128, 64), (1, 16), (300, 200), (17, 33)], ids=str)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_comfy_kitchen_s_padded_blocks(
    tmp_path: Path, kind: str, shape: tuple[int, int], as_bytes: bool
) -> None:
    module, _, name = kind.partition(".")
    layout = getattr(pytest.importorskip(f"comfy_kitchen.tensor.{module}"), name)
    values = torch.randn(shape)
    codes, params = layout.quantize(values)
    parts = {f"l.weight{end}": each for end, each in layout.state_dict_tensors(codes, params).items()}
    if as_bytes:
        parts["l.weight_scale"] = parts["l.weight_scale"].view(torch.uint8)
    said = {"format": module, "orig_shape": [*shape], "orig_dtype": "torch.float32"}
    mark = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
    got = weight(tmp_path, {**parts, "l.comfy_quant": mark})
    assert equal(got, layout.dequantize(codes, params)[: shape[0], : shape[1]])


@pytest.mark.parametrize("by_row", [False, True])
def test_comfy_kitchen_s_int8_and_fp8(tmp_path: Path, by_row: bool) -> None:
    int8 = pytest.importorskip("comfy_kitchen.tensor.int8", reason="needs comfy-kitchen")
    fp8 = pytest.importorskip("comfy_kitchen.tensor.fp8", reason="needs comfy-kitchen")
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "int8_tensorwise": (int8.TensorWiseINT8Layout, {"per_channel": by_row}),
        "float8_e4m3fn": (fp8.TensorCoreFP8Layout, {"dtype": torch.float8_e4m3fn}),
        "float8_e5m2": (fp8.TensorCoreFP8Layout, {"dtype": torch.float8_e5m2}),
    }
    for form, (layout, how) in made.items():
        codes, params = layout.quantize(torch.randn(24, 80), **how)
        mark = torch.tensor([*json.dumps({"format": form}).encode()], dtype=torch.uint8)
        parts = {"l.weight": codes, "l.weight_scale": params.scale, "l.comfy_quant": mark}
        got, _ = plain(written(tmp_path, parts), "float32")
        assert equal(got["l.weight"], layout.dequantize(codes, params))


def test_comfy_kitchen_s_rotations(tmp_path: Path) -> None:
    int8 = pytest.importorskip("comfy_kitchen.tensor.int8", reason="needs comfy-kitchen")
    layout, said = int8.TensorWiseINT8Layout, {"format": "int8_tensorwise", "convrot": True}
    codes, params = layout.quantize(torch.randn(24, 512), per_channel=True, convrot=True)
    mark = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
    parts = {"l.weight": codes, "l.weight_scale": params.scale, "l.comfy_quant": mark}
    got, _ = plain(written(tmp_path, parts), "float32")
    assert torch.allclose(got["l.weight"], layout.dequantize(codes, params), rtol=1e-5, atol=1e-6)
