"""Tensors that a file declares to be packed, as ComfyUI does, against its formulas written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.checkpoint import selection
from ckpttool.core.cli.program import run
from ckpttool.core.tensors.ref import DTYPES
from tests.support.quantised import equal, plain, refusal, weight, written

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, torch.Tensor]


def mark(form: str, **more: object) -> torch.Tensor:
    """Return the tensor that says how a layer is packed."""
    return torch.tensor([*json.dumps({"format": form, **more}).encode()], dtype=torch.uint8)


def header(layers: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a header that says how layers are packed."""
    said = {"format_version": "1.0", "layers": layers}
    return {"format": "pt", "_quantization_metadata": json.dumps(said)}


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in cuBLAS' order, by its formula for the place of each: rows of 128, columns of 4."""
    rows, columns = scales.shape
    wide = -(-columns // 4)
    out = torch.zeros(-(-rows // 128) * wide * 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * wide + column // 4
            within = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            out[tile * 512 + within] = scales.view(torch.uint8)[row, column]
    return out.reshape(-(-rows // 128) * 128, wide * 4).view(scales.dtype)


def hadamard(size: int) -> torch.Tensor:
    """Return the orthonormal matrix of a rotation, from its blocks of 4 × 4."""
    four = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
    made = torch.ones(1, 1)
    while len(made) < size:
        made = torch.kron(made, four)
    return made / size**0.5


def rotated(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rows of a matrix rotated in groups; doing it twice changes nothing."""
    groups = values.double().unflatten(-1, (-1, size))
    return (groups @ hadamard(size).double()).flatten(-2)


def nvfp4(rows: int = 144, columns: int = 96) -> tuple[Tensors, torch.Tensor]:
    """Return the parts of a matrix, of which the first of two codes is in the upper half of a byte."""
    codes = torch.randint(0, 16, (rows, columns))
    scale = (torch.rand(rows, columns // 16) * 400 + 1).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.0037)
    parts = {
        "l.weight": (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8),
        "l.weight_scale": swizzled(scale),
        "l.weight_scale_2": whole,
    }
    return parts, NUMBERS[codes] * (scale.float() * whole).repeat_interleave(16, 1)


def mxfp8(rows: int = 160, columns: int = 64) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    exponents = torch.randint(100, 140, (rows, columns // 32), dtype=torch.uint8)
    powers = (2.0 ** (exponents.double() - 127)).float().repeat_interleave(32, 1)
    return {"l.weight": codes, "l.weight_scale": swizzled(exponents)}, codes.float() * powers


def int8(rows: int = 24, columns: int = 64, *, by_row: bool = True) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scale = torch.rand(rows, 1) if by_row else torch.tensor(0.031)
    return {"l.weight": codes, "l.weight_scale": scale}, codes.float() * scale


def fp8(dtype: torch.dtype) -> tuple[Tensors, torch.Tensor]:
    codes, scale = torch.randn(24, 40).to(dtype), torch.tensor(0.21)
    parts = {"l.weight": codes, "l.weight_scale": scale, "l.input_scale": torch.tensor(1.5)}
    return parts, codes.float() * scale


FORMS: dict[str, tuple[str, Any]] = {
    "nvfp4": ("nvfp4", nvfp4),
    "mxfp8": ("mxfp8", mxfp8),
    "int8 by row": ("int8_tensorwise", int8),
    "int8 by tensor": ("int8_tensorwise", lambda: int8(by_row=False)),
    "fp8": ("float8_e4m3fn", lambda: fp8(torch.float8_e4m3fn)),
    "fp8 e5m2": ("float8_e5m2", lambda: fp8(torch.float8_e5m2)),
}


@pytest.mark.parametrize(("form", "make"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("where", ["tensor", "header", "both"])
def test_a_declared_format_is_read_as_it_is_declared(
    tmp_path: Path, form: str, make: Any, where: str
) -> None:
    parts, expected = make()
    if where != "header":
        parts["l.comfy_quant"] = mark(form, full_precision_matrix_mult=True)
    said = header({"l": {"format": form}}) if where != "tensor" else None
    path = written(tmp_path, {**parts, "l.bias": torch.ones(len(expected))}, metadata=said)
    got, report = plain(path, "float32")
    assert equal(got.pop("l.weight"), expected)
    assert [*got] == ["l.bias"]
    assert [*report.dequantized.values()] == [1]
    assert next(iter(report.dequantized)).startswith("ComfyUI ")
    with safe_open(tmp_path / "plain.safetensors", "pt") as file:
        assert file.metadata() == ({"format": "pt"} if said else None)


@pytest.mark.parametrize("size", [4, 16, 64, 256])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_rotation_is_turned_back(tmp_path: Path, size: int, by_row: bool, dtype: str | None) -> None:
    parts, turned = int8(24, 768, by_row=by_row)
    given = {"params": {"convrot": True, "convrot_groupsize": size}} if size == 16 else {}
    said = given or {"convrot": True, "convrot_groupsize": size}
    parts["l.comfy_quant"] = mark("int8_tensorwise", **said)
    got = plain(written(tmp_path, parts), dtype)[0]["l.weight"]
    expected = rotated(turned, size).float()
    if dtype is None:
        assert got.dtype == torch.bfloat16
        assert torch.allclose(got.float(), expected, rtol=2**-8, atol=1e-4)
    else:
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("full", [0, 2])
def test_the_older_mark_of_fp8_is_read_and_left_out(
    tmp_path: Path, prefix: str, kind: torch.dtype, full: int
) -> None:
    codes, scale = torch.randn(24, 40).to(kind), torch.tensor(0.21)
    parts = {"l.weight": codes, "l.scale_weight": scale, "l.scale_input": torch.tensor(1.0)}
    parts |= {"l.bias": torch.ones(24), "scaled_fp8": torch.zeros(full).to(kind)}
    got, report = plain(
        written(tmp_path, {f"{prefix}{name}": each for name, each in parts.items()}), "float32"
    )
    assert {*got} == {f"{prefix}l.weight", f"{prefix}l.bias"}
    assert equal(got[f"{prefix}l.weight"], codes.float() * scale)
    assert {*report.left_out} == {f"{prefix}l.scale_input", f"{prefix}scaled_fp8"}


def test_the_usual_rotation_is_of_256_and_experts_are_rotated_by_row(tmp_path: Path) -> None:
    codes = torch.randint(-128, 128, (3, 8, 512), dtype=torch.int8)
    scale = torch.rand(3, 8)
    said = mark("int8_tensorwise", convrot=True, num_experts=3)
    parts = {"e.weight": codes, "e.weight_scale": scale, "e.comfy_quant": said}
    got, _ = plain(written(tmp_path, parts), "float32")
    expected = rotated(codes.float() * scale[..., None], 256).float()
    assert torch.allclose(got["e.weight"], expected, rtol=1e-6, atol=1e-6)


def test_four_bits_with_a_rotation(tmp_path: Path) -> None:
    codes, scale = torch.randint(-8, 8, (6, 256)), torch.rand(6)
    packed = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    parts = {"l.weight": packed, "l.weight_scale": scale, "l.comfy_quant": mark("convrot_w4a4")}
    got, _ = plain(written(tmp_path, parts), "float32")
    expected = rotated(codes * scale[:, None], 256).float()
    assert torch.allclose(got["l.weight"], expected, rtol=1e-6, atol=1e-6)


def test_a_header_may_leave_out_the_beginning_of_names(tmp_path: Path) -> None:
    parts, expected = nvfp4()
    named = {f"model.diffusion_model.{name}": tensor for name, tensor in parts.items()}
    path = written(tmp_path, named, metadata=header({"l": {"format": "nvfp4"}}))
    assert equal(plain(path, "float32")[0]["model.diffusion_model.l.weight"], expected)
    twice = {**named, **{f"text_encoder.{name}": tensor.clone() for name, tensor in parts.items()}}
    path = written(tmp_path, twice, metadata=header({"l": {"format": "nvfp4"}}))
    with pytest.raises(ckpttool.errors.Refused, match=r"says how 'l' is packed, and may mean"):
        plain(path)


def refused(folder: Path, tensors: Tensors, layers: dict[str, Any]) -> str:
    with pytest.raises(ckpttool.CkptToolError) as caught:
        plain(written(folder, tensors, metadata=header(layers)))
    assert caught.value.exit_code == 3
    return str(caught.value)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        f"the format {name}": (name, {}, f"is packed as '{name}', which is none of those read")
        for name in ("awq_w4a16", "svdquant_w4a4", "nvfp5")
    },
    "an unknown format": ("asym_w4a8_int8", {}, "is packed as 'asym_w4a8_int8', which is none of those read"),
    "an unknown setting": ("nvfp4", {"swirl": 2}, "says swirl, which is not known here"),
    "another rotation": ("int8_tensorwise", {"convrot": True, "convrot_groupsize": 128}, "128, which is no"),
    "a size of text": ("int8_tensorwise", {"convrot": True, "convrot_groupsize": "4"}, "'4', which is no"),
    "groups that do not divide": ("int8_tensorwise", {"convrot": True}, "rows of 64, which groups of 256"),
    "a type of no number": ("int8_tensorwise", {"orig_dtype": "torch.int3"}, "'torch.int3'"),
    "another shape": ("int8_tensorwise", {"orig_shape": [24, 60]}, "of shape [24, 64], and [24, 60] is said"),
}


@pytest.mark.parametrize(("form", "more", "said"), WRONG.values(), ids=WRONG)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, form: str, more: dict[str, Any], said: str
) -> None:
    parts, _ = int8() if form != "nvfp4" else nvfp4()
    assert said in refusal(tmp_path, {**parts, "l.comfy_quant": mark(form, **more)})
    assert said in refused(tmp_path, parts, {"l": {"format": form, **more}})


def test_parts_that_do_not_fit_what_is_declared_are_refused(tmp_path: Path) -> None:
    parts, _ = nvfp4()
    told = {**parts, "l.comfy_quant": mark("nvfp4")}
    flat = torch.ones(144, 6).to(torch.float8_e4m3fn)  # as others than ComfyUI have them
    assert "864 scales, and 2048 fit it" in refusal(tmp_path, {**told, "l.weight_scale": flat})
    assert "more than one global scale" in refusal(tmp_path, {**told, "l.weight_scale_2": torch.ones(2)})
    assert "pre_quant_scale" in refusal(tmp_path, {**told, "l.pre_quant_scale": torch.ones(96)})
    without = {name: tensor for name, tensor in told.items() if name != "l.weight_scale_2"}
    assert "there is no 'l.weight_scale_2'" in refusal(tmp_path, without)
    assert "is of int8" in refusal(tmp_path, {**int8()[0], "l.comfy_quant": mark("mxfp8")})
    by_group = {**int8()[0], "l.weight_scale": torch.rand(24, 2), "l.comfy_quant": mark("int8_tensorwise")}
    assert "has scales by groups" in refusal(tmp_path, by_group)
    alone = {"l.comfy_quant": mark("nvfp4"), "k.weight": torch.ones(2)}
    assert "there is no 'l.weight'" in refusal(tmp_path, alone)
    text = {**int8()[0], "l.comfy_quant": torch.tensor([*b"{"], dtype=torch.uint8)}
    assert "is no JSON object" in refusal(tmp_path, text)


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": []}', '{"layers": {"l": "nvfp4"}}', "{}"])
def test_a_header_that_says_nothing_readable_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, nvfp4()[0], metadata={"_quantization_metadata": text})
    with pytest.raises(ckpttool.CkptToolError, match="_quantization_metadata"):
        plain(path)


def test_what_is_packed_and_not_declared_is_refused_beside_what_is(tmp_path: Path) -> None:
    parts, _ = nvfp4()
    more = {f"k{name[1:]}": tensor.clone() for name, tensor in parts.items()}
    said = "says how others are packed, and nothing of 'k.weight'"
    assert said in refusal(tmp_path, {**parts, "l.comfy_quant": mark("nvfp4"), **more})
    assert said in refused(tmp_path, {**parts, **more}, {"l": {"format": "nvfp4"}})
    gone = refused(tmp_path, parts, {"other": {"format": "nvfp4"}})  # the layer was renamed since
    assert "says how others are packed, and nothing of 'l.weight'" in gone


def test_a_shape_that_was_made_whole_is_cut_back(tmp_path: Path) -> None:
    parts, expected = nvfp4(32, 48)
    parts["l.weight"][19:] = 0
    parts["l.weight"][:, 20:] = 0
    expected = torch.where(parts["l.weight"].repeat_interleave(2, 1) == 0, 0.0, expected)
    told = {**parts, "l.comfy_quant": mark("nvfp4", orig_shape=[19, 40], orig_dtype="torch.float32")}
    got = weight(tmp_path, told)
    assert got.shape == (19, 40)
    assert torch.equal(got, expected[:19, :40])
    parts["l.comfy_quant"] = mark("nvfp4")
    assert "ends in rows of zeros" in refusal(tmp_path, parts)
    parts["l.bias"] = torch.ones(19)
    assert "ends in columns of zeros" in refusal(tmp_path, parts)
    full, expected = nvfp4(32, 48)
    got, _ = plain(
        written(tmp_path, {**full, "l.comfy_quant": mark("nvfp4"), "l.bias": torch.ones(19)}), "float32"
    )
    assert torch.equal(got["l.weight"], expected[:19])
    zeros = {**full, "l.weight": torch.zeros(32, 24, dtype=torch.uint8), "l.comfy_quant": mark("nvfp4")}
    assert weight(tmp_path, zeros).shape == (32, 48)  # as trained from zero
    short = {**full, "l.comfy_quant": mark("nvfp4"), "l.bias": torch.ones(16)}
    assert "'l.bias' is of shape [16]" in refusal(tmp_path, short)


def test_other_commands_know_what_is_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, _ = int8(24, 256)
    parts["l.weight_scale"] = parts["l.weight_scale"].half()
    named = {f"model.{name}": tensor for name, tensor in parts.items()}
    said = header({"model.l": {"format": "int8_tensorwise", "convrot": True}})
    path = str(written(tmp_path, named, metadata=said))
    assert run(["convert", path, str(tmp_path / "cast.safetensors"), "--dtype", "bf16"]) == 3
    assert "'model.l.weight' is packed" in capsys.readouterr().err
    assert run(["inspect", path]) == 0
    assert "ComfyUI int8_tensorwise, per channel, rotated in groups of 256" in capsys.readouterr().out
    moved = str(tmp_path / "moved.safetensors")
    assert run(["strip-prefix", path, moved, "--prefix", "model."]) == 0
    with safe_open(moved, "pt") as file:
        text = json.loads(file.metadata()["_quantization_metadata"])
    assert text == {"format_version": "1.0", "layers": {"l": {"format": "int8_tensorwise", "convrot": True}}}
    got, _ = plain(Path(moved), "float32")
    exact = rotated(parts["l.weight"].float() * parts["l.weight_scale"].float(), 256).float()
    assert torch.allclose(got["l.weight"], exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_file_that_is_packed_in_part_is_not_packed_in_another_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_declared: bool
) -> None:
    parts, _ = fp8(torch.float8_e4m3fn)
    more = {"l.comfy_quant": mark("float8_e4m3fn")} if is_declared else {}
    path = str(written(tmp_path, {**parts, **more, "k.weight": torch.randn(128, 128)}))
    assert run(["convert", path, str(tmp_path / "q.safetensors"), "--quantize", "fp8"]) == 3
    assert "'l.weight' is packed" in capsys.readouterr().err
    both = ["convert", path, str(tmp_path / "q.safetensors"), "--dequantize", "--quantize", "fp8"]
    assert run(both) == 0


def test_layers_that_are_left_out_are_no_longer_declared(tmp_path: Path) -> None:
    parts, expected = nvfp4()
    more = {f"k{name[1:]}": tensor.clone() for name, tensor in parts.items()}
    said = header({"l": {"format": "nvfp4"}, "k": {"format": "nvfp4"}})
    path = str(written(tmp_path, {**parts, **more}, metadata=said))
    assert run(["convert", path, str(tmp_path / "one.safetensors"), "--only", "l.*"]) == 0
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert [*json.loads(file.metadata()["_quantization_metadata"])["layers"]] == ["l"]
    assert equal(plain(tmp_path / "one.safetensors", "float32")[0]["l.weight"], expected)


@pytest.mark.parametrize("out", ["out.pt", "dcp/ --to dcp", "bin/ --to torch-sharded"])
def test_no_format_loses_what_a_header_declares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    name, *to = out.split()
    parts, expected = nvfp4()
    path = str(written(tmp_path, parts, metadata=header({"l": {"format": "nvfp4"}})))
    assert run(["convert", path, f"{tmp_path}/{name}", *to]) == 3
    assert "says in its header how tensors are packed" in capsys.readouterr().err
    assert run(["convert", path, f"{tmp_path}/{name}", *to, "--dequantize", "--dtype", "fp32"]) == 0
    with ckpttool.open(f"{tmp_path}/{name}") as checkpoint:
        assert equal(torch.from_numpy(checkpoint.state()["l.weight"].numpy()), expected)
    parts["l.comfy_quant"] = mark("nvfp4")  # which is a tensor, and goes everywhere
    path = str(written(tmp_path, parts))
    assert run(["convert", path, f"{tmp_path}/two.pt"]) == 0
    assert equal(plain(tmp_path / "two.pt", "float32")[0]["l.weight"], expected)


def test_shards_that_declare_each_its_own_are_refused(tmp_path: Path) -> None:
    for number, name in enumerate("lk", 1):
        parts = {f"{name}{key[1:]}": tensor for key, tensor in nvfp4()[0].items()}
        file = tmp_path / f"model-0000{number}-of-00002.safetensors"
        save_file(parts, file, header({name: {"format": "nvfp4"}}))
    with pytest.raises(ckpttool.CkptToolError, match="of its own in its header"):
        plain(tmp_path / ".")


HOSTILE = {
    "deep": "[" * 50_000,
    "deep settings": '{"format": "nvfp4", "params": ' + "[" * 3000 + "]" * 3000 + "}",
    "a list": "[1]",
    "no format": "{}",
    "a format that is a list": '{"format": []}',
    "a size of truth": '{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": true}',
    "a huge size": '{"format": "int8_tensorwise", "convrot": 1, "convrot_groupsize": 4e99}',
    "a negative shape": '{"format": "nvfp4", "orig_shape": [-1, 2]}',
    "a shape of text": '{"format": "nvfp4", "orig_shape": "ab"}',
    "another group": '{"format": "nvfp4", "group_size": 32}',
    "a type that is a list": '{"format": "nvfp4", "orig_dtype": [1]}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_settings_of_any_kind_are_refused_without_a_traceback(tmp_path: Path, text: str) -> None:
    parts, _ = nvfp4() if "nvfp4" in text else int8()
    raw = torch.tensor([*text.encode()], dtype=torch.uint8)
    assert refusal(tmp_path, {**parts, "l.comfy_quant": raw})
    for wrong in (
        raw[:0],
        torch.ones(2, 2, dtype=torch.uint8),
        torch.ones(3),
        torch.zeros(1 << 17, dtype=torch.uint8),
    ):
        assert refusal(tmp_path, {**parts, "l.comfy_quant": wrong})


def test_empty_and_tiny_matrices_of_each_format(tmp_path: Path) -> None:
    for form, unit, dtype in (("nvfp4", 16, torch.uint8), ("mxfp8", 32, torch.float8_e4m3fn)):
        scales = torch.float8_e4m3fn if form == "nvfp4" else torch.uint8
        for rows, columns in ((0, unit), (3, 0), (1, unit)):
            parts = {
                "l.weight": torch.zeros(rows, columns // (2 if form == "nvfp4" else 1)).to(dtype),
                "l.weight_scale": torch.ones(512 if rows and columns else 0).to(scales),
                "l.comfy_quant": mark(form),
            }
            parts |= {"l.weight_scale_2": torch.tensor(1.0)} if form == "nvfp4" else {}
            assert weight(tmp_path, parts).shape == (rows, columns)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("end", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("section", [None, BLOCKS])
@pytest.mark.parametrize(
    ("shape", "given"), [((256, 256), (1, 2)), ((256, 256), (2, 1)), ((300, 256), (1, 2))]
)
def test_blocks_of_one_side_alone_are_refused(
    tmp_path: Path, end: str, section: dict[str, Any] | None, shape: tuple[int, int], given: tuple[int, int]
) -> None:
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    tensors = {"l.weight": codes, f"l.weight{end}": torch.rand(given)}
    assert "blocks of 128 × 128 of" in refusal(tmp_path, tensors, section)


# ---- The core alone, where this room was taken away: it knows no scheme, and casts none ---------------


ROWS, FLOAT8 = torch.rand(4, 1), torch.ones(4, 8).to(torch.float8_e4m3fn)
BYTES, WORDS = torch.ones(4, 8, dtype=torch.uint8), torch.ones(4, 8, dtype=torch.int32)
PACKED: dict[str, Tensors] = {
    "fp8": {"l.weight": FLOAT8, "l.weight_scale_inv": ROWS},
    "fp8 of Mistral": {"l.weight": FLOAT8, "l.qscale_weight": torch.rand(())},
    "int8 of bitsandbytes": {"l.weight": BYTES.to(torch.int8), "l.SCB": torch.rand(4)},
    "nf4": {
        "l.weight": BYTES.reshape(-1, 1),
        "l.weight.absmax": torch.rand(1),
        "l.weight.quant_state.bitsandbytes__nf4": BYTES[0].clone(),
    },
    "gptq": {"l.qweight": WORDS, "l.qzeros": WORDS.clone(), "l.scales": ROWS.half()},
    "experts": {"e.up_blocks": BYTES, "e.up_scales": BYTES[:, :1].contiguous(), "e.up_bias": ROWS},
    "rows": {"l.weight_packed": WORDS, "l.weight_scale": ROWS, "l.weight_shape": torch.tensor([4, 64])},
    "MLX": {"l.weight": WORDS.to(torch.uint32), "l.scales": ROWS.half(), "l.biases": ROWS.clone()},
    "ComfyUI": {"l.weight": BYTES, "l.comfy_quant": mark("nvfp4"), "l.bias": ROWS},
    "in a header": {"l.weight": BYTES, "l.bias": ROWS},
}


@pytest.mark.parametrize("tensors", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("is_here", [True, False])
def test_no_packed_tensor_is_cast_with_this_room_or_without(
    tmp_path: Path, tensors: Tensors, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = header({"l": {"format": "nvfp4"}}) if len(tensors) == 2 and "l.bias" in tensors else None
    if not is_here:
        monkeypatch.setattr("ckpttool.core.checkpoint.settings.find", lambda name: None)
    path = written(tmp_path, {**tensors, "norm.weight": torch.ones(3)}, metadata=said)
    with ckpttool.open(path) as checkpoint, pytest.raises(ckpttool.errors.Refused, match="packed, and its"):
        selection.cast(checkpoint, DTYPES["bfloat16"])


@pytest.mark.parametrize("is_here", [True, False])
def test_what_only_resembles_packed_tensors_is_cast(
    tmp_path: Path, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_here:
        monkeypatch.setattr("ckpttool.core.checkpoint.settings.find", lambda name: None)
    tensors = {
        "bare.weight": FLOAT8,
        "attn.logit_scale": ROWS,
        "attn.relative_position_index": torch.ones(4, dtype=torch.int64),
        "norm.scale": torch.ones(3),
        "norm.num_batches_tracked": torch.tensor(2),
        "embed.position_ids": torch.ones(4, dtype=torch.int64),
        "mask": torch.ones(4, dtype=torch.bool),
    }
    with ckpttool.open(written(tmp_path, tensors)) as checkpoint:
        new, _ = selection.cast(checkpoint, DTYPES["bfloat16"])
        assert new.state()["norm.scale"].dtype.name == "bfloat16"
