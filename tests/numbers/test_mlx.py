"""What MLX packs: against its own library where it is installed, and against its formula written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.core.cli.program import run
from tests.support.quantised import equal, packed_words, plain, refusal, weight, written

BITS = (1, 2, 3, 4, 5, 6, 8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FOURS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, torch.Tensor]


def affine(
    shape: tuple[int, ...], bits: int, size: int, dtype: torch.dtype = torch.bfloat16, name: str = "l"
) -> tuple[Tensors, torch.Tensor]:
    """Return a packed tensor, and its numbers as MLX computes them: each step in the type of the scales."""
    codes = torch.randint(0, 1 << bits, shape)
    scales, biases = (torch.randn(*shape[:-1], shape[-1] // size).to(dtype) for _ in range(2))
    words = packed_words(codes.flatten(0, -2), bits, 1).view(torch.uint32).reshape(*shape[:-1], -1)
    parts = {f"{name}.weight": words, f"{name}.scales": scales, f"{name}.biases": biases}
    scale, bias = (each.repeat_interleave(size, -1) for each in (scales, biases))
    return parts, codes.to(dtype) * scale + bias


def with_quantization(folder: Path, tensors: Tensors, section: object, **model: object) -> Path:
    """Write tensors with a config.json as mlx-lm writes it."""
    path = written(folder, tensors)
    (folder / "config.json").write_text(json.dumps({**model, "quantization": section}))
    return path


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(5, 192), (1, 64), (3, 4, 128), (2, 64 * 33)], ids=str)
def test_affine_groups_are_read_by_the_formula_in_the_type_of_the_scales(
    tmp_path: Path, bits: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    parts, expected = affine(shape, bits, 64, dtype)
    path = with_quantization(tmp_path, parts, {"group_size": 64, "bits": bits})
    got, report = plain(path)
    assert equal(got["l.weight"], expected)
    assert report.dequantized == {f"MLX {bits} bits, groups of 64": 1}
    assert equal(plain(path, "float32")[0]["l.weight"], expected.float())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_affine_groups_are_those_of_mlx(tmp_path: Path, bits: int, dtype: str, size: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="needs mlx[cpu]")
    values = mx.random.normal((3, 7, 256)).astype(getattr(mx, dtype))
    words, scales, biases = mx.quantize(values, group_size=size, bits=bits)
    parts = {"l.weight": words, "l.scales": scales, "l.biases": biases}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), parts, {"format": "mlx"})
    said = {"group_size": size, "bits": bits, "mode": "affine"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": said, "quantization_config": said}))
    expected = mx.dequantize(words, scales, biases, group_size=size, bits=bits)
    got = plain(tmp_path / "model.safetensors")[0]["l.weight"]
    assert got.dtype == getattr(torch, dtype)
    assert equal(got.float(), torch.tensor(expected.astype(mx.float32).tolist()))


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_floats_are_those_of_mlx(tmp_path: Path, mode: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="needs mlx[cpu]")
    words, scales = mx.quantize(mx.random.normal((3, 5, 256)) * 9, mode=mode)
    parts = {"l.weight": words, "l.scales": scales}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), parts)
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"mode": mode}}))
    expected = mx.dequantize(words, scales, mode=mode, dtype=mx.float32)
    got = plain(tmp_path / "model.safetensors", "float32")[0]["l.weight"]
    assert equal(got, torch.tensor(expected.tolist()))
    assert plain(tmp_path / "model.safetensors")[0]["l.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("mode", "size"), [("mxfp4", 32), ("nvfp4", 16), ("mxfp8", 32)])
@pytest.mark.parametrize("rows", [1, 6])
def test_floats_are_read_by_the_formula(tmp_path: Path, mode: str, size: int, rows: int) -> None:
    codes = torch.randint(0, 256, (rows, 96 if mode == "mxfp8" else 48), dtype=torch.uint8)
    levels = torch.stack([FOURS[codes.int() & 15], FOURS[codes.int() >> 4]], -1).flatten(1)
    if mode == "mxfp8":
        codes[codes & 127 == 127] = 0  # NaN
        levels = codes.view(torch.float8_e4m3fn).float()
    scales = torch.randint(0, 120, (rows, 96 // size), dtype=torch.uint8)
    by = scales.view(torch.float8_e4m3fn).float() if mode == "nvfp4" else 2.0 ** (scales.double() - 127)
    expected = (levels.double() * by.double().repeat_interleave(size, 1)).float()
    parts = {"l.weight": codes.view(torch.uint32), "l.scales": scales}
    path = with_quantization(tmp_path, parts, {"mode": mode, "group_size": size})
    got, report = plain(path, "float32")
    assert equal(got["l.weight"], expected)
    assert report.dequantized == {f"MLX {mode}": 1}


def test_a_layer_may_have_settings_of_its_own(tmp_path: Path) -> None:
    parts, expected = affine((4, 128), 4, 64)
    more, own = affine((4, 128), 6, 32, name="model.k")
    said = {"group_size": 64, "bits": 4, "model.k": {"group_size": 32, "bits": 6}, "norm": False}
    path = with_quantization(tmp_path, {**parts, **more, "norm.weight": torch.ones(3)}, said)
    got, report = plain(path)
    assert equal(got["l.weight"], expected) and equal(got["model.k.weight"], own)
    assert len(report.dequantized) == 2
    assert {*got} == {"l.weight", "model.k.weight", "norm.weight"}
    path = with_quantization(tmp_path, parts, {"group_size": 64, "bits": 4, "l": True})
    assert equal(plain(path)[0]["l.weight"], expected)


def test_a_nan_of_e4m3_stays_one_and_one_of_a_scale_is_refused(tmp_path: Path) -> None:
    codes = torch.full((1, 32), 0x7F, dtype=torch.uint8)
    parts = {"l.weight": codes.view(torch.uint32), "l.scales": torch.tensor([[127]], dtype=torch.uint8)}
    path = with_quantization(tmp_path, parts, {"mode": "mxfp8"})
    assert plain(path, "float32")[0]["l.weight"].isnan().all()
    parts["l.scales"] = torch.tensor([[255]], dtype=torch.uint8)
    with pytest.raises(ckpttool.errors.Refused, match=r"'l\.scales' holds a NaN or an infinity"):
        plain(with_quantization(tmp_path, parts, {"mode": "mxfp8"}))


def test_scales_of_zero_leave_the_biases(tmp_path: Path) -> None:
    parts, _ = affine((2, 64), 4, 64)
    parts["l.scales"] = torch.zeros(2, 1, dtype=torch.bfloat16)
    path = with_quantization(tmp_path, parts, {"bits": 4})
    assert equal(plain(path)[0]["l.weight"], parts["l.biases"].expand(2, 64))


PARTS = affine((4, 128), 4, 64)[0]
LACKING = {name: tensor for name, tensor in PARTS.items() if name != "l.biases"}
BYTES = {"l.weight": PARTS["l.weight"], "l.scales": torch.ones(4, 4, dtype=torch.uint8)}
WRONG: dict[str, tuple[Tensors, Any, str]] = {
    "no settings": (PARTS, None, "no config.json says its bits and groups"),
    "settings that are no object": (PARTS, [4], "no config.json says its bits and groups"),
    "settings of another kind": (PARTS, {"load_in_4bit": True}, "no config.json says its bits"),
    "another mode": (PARTS, {"mode": "iq4"}, "MLX's mode 'iq4', none of affine, mxfp4, mxfp8, nvfp4"),
    "bits of no scheme": (PARTS, {"bits": 7}, "is affine of 7 bits"),
    "a negative group": (PARTS, {"group_size": -1}, "is affine of 4 bits in groups of -1"),
    "bits of text": (PARTS, {"bits": "4"}, "says bits = '4'"),
    "bits that do not fit": (PARTS, {"bits": 3}, "groups of 64 numbers of 3 bits fill"),
    "groups that do not fit": (PARTS, {"group_size": 32, "bits": 4}, "[4, 2], and [4, 4] fits it"),
    "no biases": (LACKING, {"bits": 4}, "there is no 'l.biases'"),
    "biases too many": ({**BYTES, "l.biases": PARTS["l.biases"]}, {"mode": "mxfp4"}, "and mxfp4 has none"),
    "floats of another size": (BYTES, {"mode": "mxfp4", "group_size": 64}, "mxfp4 of 4 bits in groups of 64"),
    "scales of another type": (PARTS, {"mode": "nvfp4"}, "'l.scales' is of shape [4, 2]"),
    "bytes for affine": ({**PARTS, **BYTES}, {"group_size": 32, "bits": 4}, "'l.scales' is of uint8"),
    "a layer that is plain": (PARTS, {"bits": 4, "l": False}, "says that it is not packed"),
    "a vector": ({**PARTS, "l.weight": PARTS["l.weight"][0].clone()}, {"bits": 4}, "and no matrix"),
    "biases of another type": ({**PARTS, "l.biases": PARTS["l.biases"].half()}, {"bits": 4}, "is of float16"),
}


@pytest.mark.parametrize(("tensors", "section", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(tmp_path: Path, tensors: Tensors, section: Any, said: str) -> None:
    if section is not None:
        (tmp_path / "config.json").write_text(json.dumps({"quantization": section}))
    assert said in refusal(tmp_path, tensors)


def test_an_empty_matrix_stays_empty(tmp_path: Path) -> None:
    for shape in ((0, 64), (3, 0)):
        parts = {
            "l.weight": torch.zeros(shape[0], shape[1] // 8, dtype=torch.uint32),
            "l.scales": torch.zeros(shape[0], shape[1] // 64),
            "l.biases": torch.zeros(shape[0], shape[1] // 64),
        }
        (tmp_path / "config.json").write_text('{"quantization": {"bits": 4}}')
        assert weight(tmp_path, parts).shape == shape


def test_the_command_names_the_scheme_and_corrects_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, expected = affine((4, 128), 4, 64)
    said = {"group_size": 64, "bits": 4}
    (tmp_path / "in").mkdir()
    with_quantization(tmp_path / "in", parts, said, quantization_config=said, dtype="bfloat16")
    assert run(["inspect", str(tmp_path / "in")]) == 0
    assert "MLX 4 bits, groups of 64" in capsys.readouterr().out
    assert run(["convert", str(tmp_path / "in"), f"{tmp_path / 'out'}/", "--dequantize", "--companions"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "bfloat16"}
    assert equal(plain(tmp_path / "in" / "model.safetensors")[0]["l.weight"], expected)
    capsys.readouterr()
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "b.safetensors"), "--dequantize"]) == 0
    assert "config.json beside the output must have no quantization\n" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "c.safetensors"), "--dtype", "fp32"]) == 3
    assert "'l.weight' is packed" in capsys.readouterr().err
