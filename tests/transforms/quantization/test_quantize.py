"""Matrices made fp8: the inverse of making them plain, with its error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import NothingToDo
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.transforms.quantization.dequantize import dequantize
from ckpttool.transforms.quantization.quantize import Quantized, quantize
from tests.support.quantised import equal, plain, written


def quantised(
    folder: Path, tensors: dict[str, torch.Tensor], scheme: str
) -> tuple[dict[str, Any], Quantized]:
    save_file(tensors, folder / "in.safetensors")
    with ckpttool.open(folder / "in.safetensors") as checkpoint:
        new, report = quantize(checkpoint, scheme)
        ckpttool.save(new, folder / "fp8.safetensors", force=True)
    return load_file(folder / "fp8.safetensors"), report


def largest(values: torch.Tensor, scheme: str) -> torch.Tensor:
    """Return the largest magnitude that each scale is for, block by block."""
    sizes = {"fp8": values.shape, "fp8-channel": (1, values.shape[1]), "fp8-block": (128, 128)}[scheme]
    rows = [
        [part.abs().max() for part in torch.split(row, sizes[1], 1)]
        for row in torch.split(values, sizes[0], 0)
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-channel", "fp8-block"])
@pytest.mark.parametrize("shape", [(64, 64), (130, 300), (257, 128), (64, 5000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_are_the_largest_over_448_and_codes_are_rounded_once(
    tmp_path: Path, scheme: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    values = torch.randn(shape).to(dtype)
    got, report = quantised(tmp_path, {"l.0.q.weight": values}, scheme)
    name = "l.0.q.weight_scale_inv" if scheme == "fp8-block" else "l.0.q.weight_scale"
    scale = largest(values.float(), scheme) / 448
    assert torch.equal(got[name], scale.flatten() if scheme == "fp8" else scale)
    rows, columns = (-(-n // s) for n, s in zip(shape, scale.shape, strict=True))
    sizes = (128, 128) if scheme == "fp8-block" else (rows, columns)
    each = scale.repeat_interleave(sizes[0], 0)[: shape[0]].repeat_interleave(sizes[1], 1)[:, : shape[1]]
    codes = (values.float() / each).to(torch.float8_e4m3fn)
    assert torch.equal(got["l.0.q.weight"].view(torch.uint8), codes.view(torch.uint8))
    off = (codes.float() * each - values.float()).double()
    error = report.errors["l.0.q.weight"]
    assert error.largest == pytest.approx(off.abs().max().item(), rel=1e-6)
    assert error.relative == pytest.approx(
        (off.square().sum() / values.double().square().sum()).sqrt().item()
    )
    assert 0.01 < error.relative < 0.05


@pytest.mark.parametrize("scheme", ["fp8", "fp8-channel", "fp8-block"])
def test_what_is_made_plain_again_is_within_the_error(tmp_path: Path, scheme: str) -> None:
    values = torch.randn(130, 300)
    got, report = quantised(tmp_path, {"l.0.q.weight": values}, scheme)
    again, _ = plain(written(tmp_path, got, report.quantization_config), "float32")
    off = (again["l.0.q.weight"] - values).abs().max().item()
    assert off == pytest.approx(report.errors["l.0.q.weight"].largest, rel=1e-6)
    with ckpttool.open(tmp_path / "plain.safetensors") as checkpoint:  # what was fp8 stays as it was
        ckpttool.save(quantize(checkpoint, scheme)[0], tmp_path / "twice.safetensors")
    twice = load_file(tmp_path / "twice.safetensors")
    assert all(
        torch.equal(twice[name].view(torch.uint8), each.view(torch.uint8)) for name, each in got.items()
    )


def test_only_the_matrices_of_layers_are_quantised(tmp_path: Path) -> None:
    matrix = torch.randn(64, 64)
    kept = {
        "model.embed_tokens.weight": matrix,
        "lm_head.weight": matrix.clone(),
        "model.layers.0.mlp.gate.weight": matrix.clone(),
        "model.layers.0.norm.weight": torch.randn(64),
        "model.layers.0.small.weight": torch.randn(63, 64),
        "model.layers.0.conv.weight": torch.randn(64, 64, 3),
        "model.layers.0.q.bias": torch.randn(64),
        "model.layers.0.ids.weight": torch.ones(64, 64, dtype=torch.int32),
    }
    tensors = kept | {f"model.layers.0.{name}.weight": matrix.clone() for name in ("q_proj", "gate_proj")}
    got, report = quantised(tmp_path, tensors, "fp8-block")
    assert [name for name, each in got.items() if each.dtype == torch.float8_e4m3fn] == [
        "model.layers.0.gate_proj.weight",
        "model.layers.0.q_proj.weight",
    ]
    assert all(torch.equal(got[name], tensor) for name, tensor in kept.items())
    assert sorted(report.quantization_config["modules_to_not_convert"]) == [  # type: ignore[call-overload]
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.conv",
        "model.layers.0.ids",
        "model.layers.0.mlp.gate",
        "model.layers.0.small",
    ]


EMBEDDINGS = (
    *("embed_tokens", "wte", "wpe", "embeddings.position_embeddings", "decoder.embed_positions"),
    *("token_embd", "shared", "tok_emb", "cls.token_embedding"),
)


def test_tables_of_tokens_and_positions_and_a_conv1d_stay(tmp_path: Path) -> None:
    """Only `Linear` is replaced by those who load it: of another module the codes would be its weight."""
    conv1d = {"h.0.attn.c_attn": (64, 192), "h.0.attn.c_proj": (64, 64), "h.0.mlp.c_fc": (64, 256)}
    kept = {f"{name}.weight": torch.randn(shape) for name, shape in conv1d.items()}
    kept |= {f"{name}.bias": torch.randn(shape[1]) for name, shape in conv1d.items()}
    kept |= {f"{name}.weight": torch.randn(80, 64) for name in EMBEDDINGS}
    linear = {"l.0.fc.weight": torch.randn(192, 64), "l.0.fc.bias": torch.randn(192)}
    got, report = quantised(tmp_path, kept | linear, "fp8")
    assert [name for name, each in got.items() if each.dtype == torch.float8_e4m3fn] == ["l.0.fc.weight"]
    assert {*report.quantization_config["ignore"]} == {*EMBEDDINGS, *conv1d, "lm_head"}  # type: ignore[call-overload]
    with pytest.raises(NothingToDo):
        quantised(tmp_path, kept, "fp8")


def test_zeros_and_the_smallest_numbers_keep_their_values(tmp_path: Path) -> None:
    values = torch.zeros(192, 128)
    values[64:128] = 1e-42
    values[128:, 0] = 3e38
    got, report = quantised(tmp_path, {"l.weight": values}, "fp8-channel")
    again, _ = plain(written(tmp_path, got, report.quantization_config), "float32")
    assert not again["l.weight"][:64].any() and torch.isfinite(again["l.weight"]).all()
    assert torch.equal(again["l.weight"][128:, 0], (torch.tensor(3e38) / 448 * 448).expand(64))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e60])
@pytest.mark.parametrize("scheme", ["fp8", "fp8-channel", "fp8-block"])
def test_numbers_that_no_scale_brings_into_fp8_are_refused_by_name(
    tmp_path: Path, number: float, scheme: str
) -> None:
    values = torch.randn(200, 64, dtype=torch.float64)
    values[150, 3] = number
    with pytest.raises(ckpttool.CkptToolError, match=r"'l\.weight' holds a NaN, an infinity or more"):
        quantised(tmp_path, {"l.weight": values}, scheme)
    assert not (tmp_path / "fp8.safetensors").exists()


def test_nothing_to_quantise_and_names_that_are_taken(tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match="no matrix of a linear layer"):
        quantised(tmp_path, {"l.weight": torch.randn(8, 8)}, "fp8")
    with pytest.raises(ckpttool.CkptToolError, match=r"'l\.weight_scale' would hold the scales"):
        quantised(tmp_path, {"l.weight": torch.randn(64, 64), "l.weight_scale": torch.ones(1)}, "fp8")
    with pytest.raises(ckpttool.CkptToolError, match="'fp4' is no scheme"):
        quantised(tmp_path, {"l.weight": torch.randn(64, 64)}, "fp4")


def test_a_transposed_view_and_a_pickled_state(tmp_path: Path) -> None:
    values = torch.randn(128, 70)
    torch.save({"state_dict": {"l.weight": values.t()}, "epoch": 1}, tmp_path / "a.pt")
    with ckpttool.open(tmp_path / "a.pt") as checkpoint:
        new, _ = quantize(checkpoint, "fp8")
        ckpttool.save(new, tmp_path / "b.pt")
    got = torch.load(tmp_path / "b.pt")
    scale = values.abs().max() / 448
    assert torch.equal(
        got["state_dict"]["l.weight"].float(), (values.t() / scale).to(torch.float8_e4m3fn).float()
    )
    assert equal(got["state_dict"]["l.weight_scale"], scale.reshape(1)) and got["epoch"] == 1


@pytest.mark.parametrize("end", ["pt", "safetensors"])
def test_tied_matrices_stay_tied_packed_and_plain_again(tmp_path: Path, end: str) -> None:
    matrix, table = torch.randn(64, 64), torch.randn(64, 64)
    state = {"a.weight": matrix, "b.weight": matrix, "embed.weight": table, "c.weight": table}
    torch.save(state, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        new, report = quantize(checkpoint, "fp8")
        ckpttool.save(new, tmp_path / f"fp8.{end}")
    assert [*report.errors] == ["a.weight", "b.weight"] and report.left_plain == ("embed.weight", "c.weight")
    tied = (("a.weight", "b.weight"), ("a.weight_scale", "b.weight_scale"), ("embed.weight", "c.weight"))
    assert {*map(frozenset, ckpttool.inspect(tmp_path / f"fp8.{end}").ties)} == {*map(frozenset, tied)}
    with ckpttool.open(tmp_path / f"fp8.{end}") as checkpoint:
        ckpttool.save(dequantize(checkpoint, dtype=DTYPES["bfloat16"])[0], tmp_path / f"plain.{end}")
    ties = ckpttool.inspect(tmp_path / f"plain.{end}").ties
    assert {*map(frozenset, ties)} == {frozenset(tied[0]), frozenset(tied[2])}
