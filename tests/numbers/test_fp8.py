"""fp8 and int8 with scales made plain, and plain matrices made fp8."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.errors import NothingToDo
from ckpttool.numbers.dequantize import dequantize
from ckpttool.numbers.quantize import Quantized, quantize
from tests.support.quantised import equal, plain, refusal, weight, written

# ---- fp8 and int8 with a scale per tensor, channel, group or block, against torch's own fp8 -----------


FP8 = torch.float8_e4m3fn
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def fp8(*shape: int, dtype: torch.dtype = FP8) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def by_blocks(codes: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Multiply each block with its scale in float32, one after another, the last ones being shorter."""
    values = codes.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = values[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            block *= scale[i, j].float()
    return values


@pytest.mark.parametrize(
    "shape", [(256, 384), (300, 517), (128, 128), (1, 129), (127, 1), (129, 128), (5, 700)]
)
def test_blocks_are_multiplied_with_their_scale_also_where_ends_do_not_divide(
    tmp_path: Path, shape: Any
) -> None:
    codes, scale = fp8(*shape), torch.rand(-(-shape[0] // 128), -(-shape[1] // 128))
    got = weight(tmp_path, {"l.0.weight": codes, "l.0.weight_scale_inv": scale}, DEEPSEEK)
    assert equal(got, by_blocks(codes, scale, 128, 128).bfloat16())


def test_blocks_that_hold_all_rows_are_128_columns_wide_without_settings(tmp_path: Path) -> None:
    codes, scale = fp8(64, 192), torch.tensor([[1.0, 100.0]])
    got = weight(tmp_path, {"l.0.weight": codes, "l.0.weight_scale_inv": scale})
    assert equal(got, by_blocks(codes, scale, 128, 128).bfloat16())


def test_groups_of_rows_that_may_be_of_two_sizes_are_refused(tmp_path: Path) -> None:
    tensors = {"l.0.weight": fp8(64, 192), "l.0.weight_scale": torch.rand(64, 2)}
    assert "of 96 elements or of 128" in refusal(tmp_path, tensors)


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.data(),
)
def test_any_blocks_of_any_shape(shape: tuple[int, int], block: tuple[int, int], data: Any) -> None:
    codes = fp8(*shape)
    scale = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    with TemporaryDirectory() as folder:
        tensors = {"w": codes, "w_scale_inv": scale}
        got = weight(Path(folder), tensors, {"quant_method": "fp8", "weight_block_size": [*block]})
    assert equal(got, by_blocks(codes, scale, *block).bfloat16())


def test_every_code_of_every_8_bit_float(tmp_path: Path) -> None:
    for dtype in (FP8, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(2, 128)
        got = weight(tmp_path, {"w": codes, "w_scale": torch.tensor(0.37)})
        expected = (codes.float() * 0.37).bfloat16()
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(got.isnan(), codes.float().isnan())


SCALES = {
    "one": torch.tensor(0.3),
    "one in a list": torch.tensor([0.3]),
    "one in a matrix": torch.tensor([[0.3]]),
    "per row": torch.rand(6),
    "per row, in a column": torch.rand(6, 1),
    "per group": torch.rand(6, 4),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize(
    "name", ["weight_scale", "weight_scale_inv", "scale_weight", "qscale_weight", "scale"]
)
def test_a_scale_may_be_for_the_tensor_a_row_or_a_group_under_any_known_name(
    tmp_path: Path, scale: torch.Tensor, name: str
) -> None:
    codes = fp8(6, 16)
    each = scale.reshape(6, -1) if scale.numel() > 1 else scale.reshape(1, 1)
    expected = codes.float() * each.repeat_interleave(16 // each.shape[1], 1)
    assert equal(weight(tmp_path, {"m.weight": codes, f"m.{name}": scale}), expected.bfloat16())


def test_the_default_type_is_that_of_a_16_bit_scale_else_of_the_model_else_bfloat16(tmp_path: Path) -> None:
    codes = fp8(4, 8)
    for scale, model, dtype in (
        (torch.float16, {}, torch.float16),
        (torch.bfloat16, {"torch_dtype": "float16"}, torch.bfloat16),
        (torch.float32, {"torch_dtype": "float16"}, torch.float16),
        (torch.float32, {"text_config": {"dtype": "float32"}}, torch.float32),
        (torch.float32, {}, torch.bfloat16),
    ):
        tensors = {"w": codes, "w_scale": torch.tensor(0.5, dtype=scale)}
        assert weight(tmp_path, tensors, {"quant_method": "fp8"}, **model).dtype == dtype


def test_dtype_rounds_once_and_casts_the_others_too(tmp_path: Path) -> None:
    codes, scale = fp8(8, 8), torch.rand(8, 1).bfloat16()
    path = written(tmp_path, {"w": codes, "w_scale": scale, "norm": torch.rand(3).half()})
    tensors, _ = plain(path, "float32")
    assert equal(tensors["w"], codes.float() * scale.float())
    assert tensors["norm"].dtype == torch.float32


def test_stacked_experts_have_scales_of_their_own(tmp_path: Path) -> None:
    codes, scale = fp8(3, 130, 8), torch.rand(3, 2, 1)
    got = weight(tmp_path, {"experts.up": codes, "experts.up_scale_inv": scale}, DEEPSEEK)
    expected = torch.stack([by_blocks(*pair, 128, 128) for pair in zip(codes, scale, strict=True)])
    assert equal(got, expected.bfloat16())
    got = weight(tmp_path, {"experts.up": codes, "experts.up_scale": torch.arange(1.0, 4)})
    assert equal(got, (codes.float() * torch.arange(1.0, 4).reshape(3, 1, 1)).bfloat16())


def test_scales_may_be_powers_of_two_in_8_bits(tmp_path: Path) -> None:
    codes, exponents = (
        fp8(4, 64),
        torch.tensor([[0, 1], [126, 127], [128, 200], [130, 254]], dtype=torch.uint8),
    )
    expected = codes.float() * (2.0 ** (exponents.double() - 127)).float().repeat_interleave(32, 1)
    assert equal(weight(tmp_path, {"w": codes, "w_scale": exponents}), expected.bfloat16())


def test_int8_with_a_zero_of_each_row(tmp_path: Path) -> None:
    codes = torch.randint(-128, 128, (6, 10), dtype=torch.int8)
    scale, zero = torch.rand(6, 1).bfloat16(), torch.randint(-128, 128, (6, 1), dtype=torch.int8)
    got = weight(tmp_path, {"w": codes, "w_scale": scale, "w_zero_point": zero})
    assert equal(got, ((codes.float() - zero.float()) * scale.float()).bfloat16())


def test_the_scale_may_lie_in_another_shard(tmp_path: Path) -> None:
    codes, scale = fp8(130, 128), torch.rand(2, 1)
    tensors = {"l.weight": codes, "l.weight_scale_inv": scale, "norm.weight": torch.ones(4000)}
    path = written(tmp_path, tensors)
    with ckpttool.open(path) as whole:
        ckpttool.save(whole, tmp_path / "shards", to="safetensors-sharded", shard_size=17_000)
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 1
    with ckpttool.open(tmp_path / "shards") as folder:
        new, report = dequantize(folder)
        values = new.state()["l.weight"].numpy().astype("float32")
    assert (torch.from_numpy(values) == by_blocks(codes, scale, 128, 128).bfloat16().float()).all()
    assert report.dequantized == {"fp8, blocks of 128 × 128": 1}


def test_tensors_left_as_they_were_stay_and_scales_of_activations_are_named(tmp_path: Path) -> None:
    tensors = {
        "lm_head.weight": torch.rand(4, 4).bfloat16(),
        "l.0.mlp.weight": fp8(4, 4),
        "l.0.mlp.weight_scale": torch.tensor(1.0),
        "l.0.mlp.input_scale": torch.tensor(2.0),
        "l.0.attn.k_scale": torch.tensor(2.0),
        "l.0.mlp.gate.weight": torch.rand(2, 4),
        "logit_scale": torch.tensor(3.0),
    }
    got, report = plain(written(tmp_path, tensors))
    assert sorted(got) == ["l.0.mlp.gate.weight", "l.0.mlp.weight", "lm_head.weight", "logit_scale"]
    assert report.left_out == ("l.0.attn.k_scale", "l.0.mlp.input_scale")
    assert equal(got["lm_head.weight"], tensors["lm_head.weight"])


def test_a_pickled_state_with_views_is_read_as_well(tmp_path: Path) -> None:
    codes, scale = fp8(12, 8), torch.rand(6, 4)
    torch.save(
        {"model": {"w": codes.t(), "w_scale": scale.t()[:, :1].repeat(2, 1)}, "epoch": 3}, tmp_path / "a.pt"
    )
    with ckpttool.open(tmp_path / "a.pt") as checkpoint:
        ckpttool.save(dequantize(checkpoint)[0], tmp_path / "b.pt")
    got = torch.load(tmp_path / "b.pt")
    assert got["epoch"] == 3
    expected = codes.t().float() * scale.t()[:, :1].repeat(2, 1)
    assert equal(got["model"]["w"], expected.bfloat16())


def test_zero_and_subnormal_scales_are_numbers_like_others(tmp_path: Path) -> None:
    codes = fp8(3, 4)
    scale = torch.tensor([[0.0], [2.0**-140], [1e-45]])
    got, _ = plain(written(tmp_path, {"w": codes, "w_scale": scale}), "float32")
    assert equal(got["w"], codes.float() * scale)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path: Path, number: float) -> None:
    scale = torch.ones(3, 3)
    scale[2, 1] = number
    said = refusal(tmp_path, {"w": fp8(300, 300), "w_scale_inv": scale})
    assert "'w_scale_inv' holds a NaN or an infinity" in said
    assert not (tmp_path / "plain.safetensors").exists()


REFUSED = {
    "a scale that is missing": (
        {"a.weight": fp8(4, 4), "b.weight": fp8(4, 4), "a.weight_scale": torch.ones(1)},
        "'b.weight' is of float8_e4m3fn, and has no scale",
    ),
    "a scale without its tensor": (
        {"a.weight_scale_inv": torch.ones(2, 2)},
        "'a.weight_scale_inv' belongs to no",
    ),
    "too few blocks": (
        {"w": fp8(300, 300), "w_scale_inv": torch.ones(2, 3)},
        "blocks of 128 × 128 of [300, 300] are [3, 3]",
    ),
    "too many axes": ({"w": fp8(4, 4), "w_scale": torch.ones(4, 4, 2)}, "fits no shape [4, 4]"),
    "rows of another tensor": ({"w": fp8(4, 4), "w_scale": torch.ones(3)}, "fits no shape [4, 4]"),
    "integers for scales": (
        {"w": fp8(4, 4), "w_scale": torch.ones(4, dtype=torch.int32)},
        "'w_scale' is of int32",
    ),
    "groups that do not divide": ({"w": fp8(4, 10), "w_scale": torch.ones(4, 3)}, "3 groups don't divide"),
    "a zero of another shape": (
        {"w": fp8(4, 4).view(torch.int8), "w_scale": torch.ones(4, 1), "w_zero_point": torch.ones(3, 1)},
        "'w_zero_point' is of shape [3, 1], and [4, 1] fits it",
    ),
}


@pytest.mark.parametrize(("tensors", "said"), REFUSED.values(), ids=REFUSED)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path: Path, tensors: Any, said: str) -> None:
    assert said in refusal(tmp_path, tensors)


def test_plain_8_bit_floats_are_no_packed_tensors(tmp_path: Path) -> None:
    with pytest.raises(NothingToDo, match="cast them: --dtype bf16"):
        plain(written(tmp_path, {"w": fp8(4, 4)}))
    with pytest.raises(NothingToDo, match="no tensor is quantised"):
        plain(written(tmp_path, {"w": torch.ones(3)}))


def test_an_unknown_method_is_named(tmp_path: Path) -> None:
    section = {"quant_method": "aqlm"}
    for tensors in ({"w": fp8(4, 4), "w_scale": torch.ones(1)}, {"w.codes": torch.ones(3)}):
        assert "is quantised by 'aqlm'" in refusal(tmp_path, tensors, section)
    section = {"quant_method": "compressed-tensors", "format": "marlin-24"}
    assert "format 'marlin-24'" in refusal(tmp_path, {"w": fp8(4, 4), "w_scale": torch.ones(1)}, section)


@pytest.mark.parametrize("size", [[0, 128], [128], "128", [2**40, 1], [-1, 5], [True, 2]])
def test_settings_that_make_no_sense_are_refused_by_name(tmp_path: Path, size: Any) -> None:
    tensors = {"w": fp8(130, 4), "w_scale_inv": torch.rand(2, 1)}
    section = {"quant_method": "fp8", "weight_block_size": size}
    assert "config.json: says weight_block_size = " in refusal(tmp_path, tensors, section)
    got = weight(tmp_path, tensors, section | {"weight_block_size": None})
    assert equal(got, by_blocks(tensors["w"], tensors["w_scale_inv"], 128, 128).bfloat16())


# ---- Matrices made fp8: the inverse of making them plain, with its error ------------------------------


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
