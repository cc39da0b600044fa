"""Matrices packed in blocks of their rows: MXFP8, MXFP4 and NVFP4, with compressed-tensors as the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import NothingToDo
from ckpttool.numbers.quantize import Quantized, quantize
from tests.support.quantised import equal, plain, written

SCHEMES = ("mxfp8", "mxfp4", "nvfp4")
SIZES = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, torch.Tensor]


def quantised(folder: Path, tensors: Tensors, scheme: str) -> tuple[Tensors, Quantized]:
    """Return the tensors of a file after it was packed, and the report."""
    path = folder / "whole.safetensors"
    save_file(tensors, path)
    with ckpttool.open(path) as checkpoint:
        new, report = quantize(checkpoint, scheme)
        ckpttool.save(new, folder / "packed.safetensors", force=True)
    return load_file(folder / "packed.safetensors"), report


def peer(scheme: str, report: Quantized) -> tuple[Any, Any]:
    """Return the compressor of compressed-tensors, and its scheme, by the settings that were written."""
    base = pytest.importorskip("compressed_tensors.compressors", reason="needs compressed-tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = quantization.QuantizationConfig(**report.quantization_config)
    return base.BaseCompressor.get_value_from_registry(config.format), config.config_groups["group_0"]


def numbers(got: Tensors, scheme: str, name: str = "l.weight") -> torch.Tensor:
    """Return what codes stand for, by the formula."""
    size, scale = SIZES[scheme], got[f"{name}_scale"]
    if scheme == "nvfp4":
        by = scale.float() / got[f"{name}_global_scale"]
    else:
        by = (2.0 ** (scale.double() - 127)).float()
    if scheme == "mxfp8":
        return got[name].float() * by.repeat_interleave(size, 1)
    codes = got[f"{name}_packed"].int()
    return NUMBERS[torch.stack([codes & 15, codes >> 4], -1).flatten(1)] * by.repeat_interleave(size, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 64), (72, 96), (130, 4096), (2048, 128)], ids=str)
def test_codes_and_scales_are_those_of_compressed_tensors(
    tmp_path: Path, scheme: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    values = (torch.randn(shape) * torch.logspace(-1, 1, shape[1])).to(dtype)
    values[0, :64] = 0.5
    got, report = quantised(tmp_path, {"l.weight": values}, scheme)
    compressor, its = peer(scheme, report)
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    blocks = values.float().reshape(shape[0], -1, SIZES[scheme])
    more = {}
    if scheme == "nvfp4":
        more = {"global_scale": helpers.generate_gparam(values.float().min(), values.float().max())}
    scale, _ = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), its.weights, **more)
    state = {"weight": values.float(), "weight_scale": scale}
    state |= {f"weight_{name}": each for name, each in more.items()}
    expected = compressor.compress(state, its)
    parts = {name.removeprefix("l."): each for name, each in got.items()}
    assert {*parts} == {*expected}
    for name, each in parts.items():
        other = expected[name]
        assert (each.dtype, each.shape) == (other.dtype, other.shape), name
        assert torch.equal(each.view(torch.uint8), other.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_its_own_decompression_and_ours_agree(tmp_path: Path, scheme: str) -> None:
    values = torch.randn(80, 160)
    got, report = quantised(tmp_path, {"l.weight": values}, scheme)
    compressor, its = peer(scheme, report)
    parts = {name.removeprefix("l."): each for name, each in got.items()}
    theirs = compressor.decompress(parts, its)["weight"]
    ours, _ = plain(written(tmp_path, got, report.quantization_config), "float32")
    assert equal(ours["l.weight"], numbers(got, scheme))
    assert torch.allclose(theirs.float(), ours["l.weight"], rtol=2**-8, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_is_that_of_the_numbers(tmp_path: Path, scheme: str) -> None:
    values = torch.randn(96, 3200)
    got, report = quantised(tmp_path, {"l.weight": values}, scheme)
    off = numbers(got, scheme).double() - values.double()
    error = report.errors["l.weight"]
    assert error.nmse == pytest.approx(float((off**2).sum() / (values.double() ** 2).sum()), rel=1e-6)
    assert error.relative == pytest.approx(error.nmse**0.5)
    assert error.largest == pytest.approx(float(off.abs().max()), rel=1e-6)
    assert 0 < error.nmse < (0.001 if scheme == "mxfp8" else 0.02)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_and_the_smallest_and_largest_numbers(tmp_path: Path, scheme: str) -> None:
    values = torch.zeros(192, 128)
    values[64:128] = 1e-42
    values[128:, 0] = 3e38
    got, report = quantised(tmp_path, {"l.weight": values}, scheme)
    again, _ = plain(written(tmp_path, got, report.quantization_config), "float32")
    assert not again["l.weight"][:64].any() and torch.isfinite(again["l.weight"]).all()
    assert torch.allclose(again["l.weight"][128:, 0], torch.tensor(3e38), rtol=0.2)
    got, _ = quantised(tmp_path, {"l.weight": torch.zeros(64, 64)}, scheme)
    assert not numbers(got, scheme).any()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("number", [float("nan"), float("-inf"), 1e60])
def test_numbers_that_no_scale_helps_are_refused_by_name(tmp_path: Path, scheme: str, number: float) -> None:
    values = torch.randn(200, 64, dtype=torch.float64)
    values[150, 3] = number
    with pytest.raises(ckpttool.errors.Refused, match=r"'l\.weight' holds a NaN, an infinity or more"):
        quantised(tmp_path, {"l.weight": values}, scheme)
    assert not (tmp_path / "packed.safetensors").exists()


def test_rows_that_blocks_do_not_divide_stay_and_are_named(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(64, 80),
        "b.weight": torch.randn(64, 72),
        "c.weight": torch.randn(64, 64),
    }
    for scheme, kept in (("mxfp8", ("a.weight", "b.weight")), ("nvfp4", ("b.weight",))):
        got, report = quantised(tmp_path, tensors, scheme)
        assert report.left_plain == kept
        assert all(torch.equal(got[name], tensors[name]) for name in kept)
        ignored = [*(name.removesuffix(".weight") for name in kept), "lm_head"]
        assert report.quantization_config["ignore"] == ignored
    with pytest.raises(NothingToDo, match="columns in blocks of 32"):
        quantised(tmp_path, {"b.weight": torch.randn(64, 72)}, "mxfp4")


def test_what_inference_joins_has_one_scale_of_all(tmp_path: Path) -> None:
    joined = (("a.q_proj", "a.k_proj", "a.v_proj"), ("m.gate_proj", "m.up_proj"), ("e.w1", "e.w3"), ("e.w2",))
    names = [*(name for those in joined for name in those), "b.q_proj"]
    tensors = {f"{name}.weight": torch.randn(64, 64) * 2**at for at, name in enumerate(names)}
    got, _ = quantised(tmp_path, tensors, "nvfp4")
    of = {name: float(got[f"{name}.weight_global_scale"]) for name in names}
    largest = {name: float(tensors[f"{name}.weight"].abs().max()) for name in names}
    for those in joined:
        most = max(largest[name] for name in those)
        assert {of[name] for name in those} == {float(1 / torch.tensor(most) * 2688)}
    assert of["b.q_proj"] != of["a.q_proj"]


@pytest.mark.parametrize("taken", ["l.weight_packed", "l.weight_scale", "l.weight_global_scale"])
def test_names_that_are_taken_are_refused(tmp_path: Path, taken: str) -> None:
    tensors = {"l.weight": torch.randn(64, 64), taken: torch.ones(1)}
    with pytest.raises(
        ckpttool.CkptToolError, match=f"'{taken}' would hold the (codes|scales) of 'l.weight'"
    ):
        quantised(tmp_path, tensors, "nvfp4")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tied_and_turned_matrices(tmp_path: Path, scheme: str) -> None:
    matrix = torch.randn(96, 64).t()
    torch.save({"a.weight": matrix, "b.weight": matrix, "c.bias": torch.ones(2)}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        ckpttool.save(quantize(checkpoint, scheme)[0], tmp_path / "out.pt")
    got = torch.load(tmp_path / "out.pt")
    code = "weight" if scheme == "mxfp8" else "weight_packed"
    for end in (code, "weight_scale"):
        assert got[f"a.{end}"].data_ptr() == got[f"b.{end}"].data_ptr()
    alone, _ = quantised(tmp_path, {"a.weight": matrix.contiguous()}, scheme)
    assert torch.equal(alone[f"a.{code}"].view(torch.uint8), got[f"a.{code}"].view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_command_says_the_worst_layers_first(cli: Any, here: Path, scheme: str) -> None:
    coarse = torch.randn(128, 64)
    coarse[:, 5] = 1000
    tensors = {"a.weight": torch.randn(128, 64), "b.weight": coarse, "c.weight": torch.zeros(64, 64)}
    save_file(tensors, "a.safetensors")
    ran = cli("convert", "a.safetensors", "b.safetensors", "--quantize", scheme, "--json")
    errors = json.loads(ran.out)["errors"]
    assert [each["nmse"] for each in errors] == sorted((each["nmse"] for each in errors), reverse=True)
    assert errors[-1] == {"name": "c.weight", "nmse": 0.0, "relative": 0.0, "max_abs": 0.0}
    said = cli("convert", "a.safetensors", "c.safetensors", "--quantize", scheme, "-v")
    text = said.out + said.err
    places = [text.index(f"{each['name']}: error") for each in errors]
    assert places == sorted(places) and "NMSE" in text
    assert f"3 tensors in {scheme}" in text
    assert cli("verify", "b.safetensors").code == 0
    assert cli("convert", "b.safetensors", "d.safetensors", "--quantize", scheme).code == 3  # packed already
