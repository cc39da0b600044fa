"""What NVIDIA's ModelOpt exports, against its formulas written out here: its settings name the algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.core.cli.program import run
from tests.support.quantised import equal, plain, refusal, written

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, torch.Tensor]


def nvfp4(*outer: int, rows: int = 24, whole: Any = 0.003) -> tuple[Tensors, torch.Tensor]:
    """Return codes, the first of two in the lower half, scales in rows, and one of all that multiplies."""
    codes = torch.randint(0, 16, (*outer, rows, 64))
    scale = (torch.rand(*outer, rows, 4) * 400 + 1).to(torch.float8_e4m3fn)
    of_all = torch.tensor(whole)
    parts = {
        "weight": (codes[..., 1::2] << 4 | codes[..., ::2]).to(torch.uint8),
        "weight_scale": scale,
        "weight_scale_2": of_all,
    }
    by = scale.float() * of_all.reshape(-1, *(1 for _ in range(len(outer) + 1)))
    return parts, NUMBERS[codes] * by.reshape(scale.shape).repeat_interleave(16, -1)


def of(module: str, parts: Tensors) -> Tensors:
    return {f"{module}.{name}": tensor for name, tensor in parts.items()}


def algorithm(name: str, **more: object) -> dict[str, Any]:
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": name, **more}}


SAID: dict[str, tuple[str, dict[str, Any]]] = {
    "its own file": ("hf_quant_config.json", algorithm("NVFP4", group_size=16, kv_cache_quant_algo="FP8")),
    "config.json": (
        "config.json",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    ),
    "config.json, nested": (
        "config.json",
        {"quantization_config": {**algorithm("nvfp4"), "quant_method": "modelopt"}},
    ),
    "each layer": (
        "hf_quant_config.json",
        algorithm("MIXED_PRECISION", quantized_layers={"m.l": {"quant_algo": "NVFP4", "group_size": 16}}),
    ),
}


@pytest.mark.parametrize(("file", "said"), SAID.values(), ids=SAID)
@pytest.mark.parametrize("rows", [1, 24, 300])
@pytest.mark.parametrize("module", ["l", "m.l"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_nvfp4_wherever_it_is_declared(
    tmp_path: Path, file: str, said: dict[str, Any], rows: int, module: str, as_bytes: bool
) -> None:
    parts, expected = nvfp4(rows=rows)
    if as_bytes:
        parts["weight_scale"] = parts["weight_scale"].view(torch.uint8)
    more = {"input_scale": torch.tensor(0.1), "k_proj.k_scale": torch.tensor(1.0)}
    path = written(tmp_path, of(module, {**parts, **more}))
    (tmp_path / file).write_text(json.dumps(said))
    got, report = plain(path, "float32")
    assert [*got] == [f"{module}.weight"]
    assert equal(got[f"{module}.weight"], expected)
    assert report.dequantized == {"NVFP4": 1}
    assert report.left_out == (f"{module}.input_scale", f"{module}.k_proj.k_scale")


@pytest.mark.parametrize("whole", [0.003, [0.003, 0.5, 7.0]])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("name", ["gate_up_proj", "w13.weight"])
def test_experts_in_one_tensor_keep_the_axes_of_their_model(
    tmp_path: Path, whole: Any, is_turned: bool, name: str
) -> None:
    parts, expected = nvfp4(3, whole=whole)
    if is_turned:  # [experts, inputs, outputs], of which two inputs share a byte
        expected = expected.transpose(1, 2)
        parts |= {each: parts[each].transpose(1, 2) for each in ("weight", "weight_scale")}
    ends = ("_weight_scale", "_weight_scale_2") if name == "gate_up_proj" else ("_scale", "_scale_2")
    tensors = {f"e.{name}{end}": parts[of] for end, of in zip(("", *ends), parts, strict=True)}
    tensors |= {"e.gate_up_proj_input_scale": torch.tensor(0.1)} if name == "gate_up_proj" else {}
    got, _ = plain(written(tmp_path, tensors), "float32")
    assert [*got] == [f"e.{name}"]
    assert equal(got[f"e.{name}"], expected)


def test_scales_of_zero_and_none_at_all(tmp_path: Path) -> None:
    parts, expected = nvfp4()
    parts["weight_scale"] = torch.zeros(24, 4).to(torch.float8_e4m3fn)
    got, _ = plain(written(tmp_path, of("l", parts)), "float32")
    assert equal(got["l.weight"], expected * 0.0)
    parts["weight_scale"] = torch.full((24, 4), float("nan")).to(torch.float8_e4m3fn)
    assert "holds a NaN" in refusal(tmp_path, of("l", parts))


def test_mxfp8_and_fp8_in_blocks(tmp_path: Path) -> None:
    codes = torch.randn(200, 256).to(torch.float8_e4m3fn)
    exponents = torch.randint(100, 140, (200, 8), dtype=torch.uint8)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(algorithm("MXFP8")))
    got, _ = plain(written(tmp_path, {"l.weight": codes, "l.weight_scale": exponents}), "float32")
    by = (2.0 ** (exponents.double() - 127)).float().repeat_interleave(32, 1)
    assert equal(got["l.weight"], codes.float() * by)
    scale = torch.rand(2, 1, 2, 1)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(algorithm("fp8_pb_wo")))
    got, _ = plain(written(tmp_path, {"l.weight": codes, "l.weight_scale": scale}), "float32")
    by = scale.reshape(2, 2).repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    assert equal(got["l.weight"], codes.float() * by)


@pytest.mark.parametrize("name", ["W4A16_AWQ", "W4A8_AWQ", "NVFP4_SVD", "NVFP9"])
def test_an_algorithm_that_is_not_known_is_refused_by_name(tmp_path: Path, name: str) -> None:
    said = f"ModelOpt's algorithm '{name}'"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(algorithm(name)))
    assert said in refusal(tmp_path, of("l", nvfp4()[0]))
    mixed = algorithm("MIXED_PRECISION", quantized_layers={"l": {"quant_algo": name}})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(mixed))
    assert said in refusal(tmp_path, of("l", nvfp4()[0]))


PARTS, _ = nvfp4()
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scale of all": ({**PARTS, "weight_scale_2": None}, "there is no 'l.weight_scale_2'"),
    "no scales": ({**PARTS, "weight_scale": None}, "'l.weight_scale_2' belongs to no packed tensor"),
    "two scales of all": ({**PARTS, "weight_scale_2": torch.ones(2)}, "more than one global scale"),
    "one that is no float32": ({**PARTS, "weight_scale_2": torch.ones(1).half()}, "is of float16"),
    "smoothing": ({**PARTS, "pre_quant_scale": torch.ones(64)}, "'l.pre_quant_scale' belongs to no packed"),
    "scales of another shape": (
        {**PARTS, "weight_scale": PARTS["weight_scale"][:, :3].contiguous()},
        "'l.weight_scale' is of shape [24, 3], and [24, 4] fits it",
    ),
    "scales in bf16": ({**PARTS, "weight_scale": torch.ones(24, 4).bfloat16()}, "is of bfloat16"),
    "rows that groups do not divide": (
        {**PARTS, "weight": PARTS["weight"][:, :30].contiguous()},
        "has rows of 60, which groups of 16 don't divide",
    ),
    "a vector": ({**PARTS, "weight": PARTS["weight"][0].clone()}, "and no matrix"),
}


@pytest.mark.parametrize(("parts", "said"), WRONG.values(), ids=WRONG)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, parts: dict[str, Any], said: str) -> None:
    there = {name: tensor for name, tensor in parts.items() if tensor is not None}
    assert said in refusal(tmp_path, of("l", there))


@pytest.mark.parametrize("said", [{"quantization": 3}, algorithm("MIXED_PRECISION", quantized_layers=[1])])
def test_settings_of_any_kind_are_refused_without_a_traceback(tmp_path: Path, said: dict[str, Any]) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert "which is no object" in refusal(tmp_path, of("l", nvfp4()[0]))


def test_its_own_file_is_not_copied_to_plain_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    written(tmp_path / "in", of("l", nvfp4()[0]))
    (tmp_path / "in" / "hf_quant_config.json").write_text(json.dumps(algorithm("NVFP4")))
    (tmp_path / "in" / "config.json").write_text("{}")
    command = ["convert", str(tmp_path / "in"), f"{tmp_path / 'out'}/", "--dequantize", "--companions"]
    assert run(command) == 0
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
