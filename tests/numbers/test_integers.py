"""Packed integers of GPTQ, AWQ, compressed-tensors and torchao, against formulas written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.numbers import lookup
from ckpttool.numbers.dequantize import dequantize
from tests.support.quantised import equal, packed_words, plain, refusal, weight, written

# ---- GPTQ, AWQ and compressed-tensors' packed integers, against formulas that are written out here ----


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def integers(bits: int, *shape: int, least: int = 0) -> torch.Tensor:
    return torch.randint(least, 1 << bits, shape)


def gptq(
    bits: int = 4,
    inputs: int = 32,
    outputs: int = 32,
    group: int = 8,
    *,
    less: int = 1,
    dtype: Any = torch.half,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a layer, and its weight: scale of the group · (code - zero of the group)."""
    groups = -(-inputs // group)
    codes, zeros = integers(bits, inputs, outputs), integers(bits, groups, outputs, least=less)
    scales = torch.rand(groups, outputs).to(dtype)
    of = torch.arange(inputs) // group
    expected = ((codes - zeros[of]).float() * scales[of].float()).to(dtype).T
    tensors = {"l.0.qweight": packed_words(codes, bits, 0), "l.0.qzeros": packed_words(zeros - less, bits, 1)}
    return tensors | {"l.0.scales": scales, "l.0.g_idx": of.int()}, expected


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gptq_of_both_formats(tmp_path: Path, bits: int, form: str, dtype: torch.dtype) -> None:
    tensors, expected = gptq(bits, less=int(form == "gptq"), dtype=dtype)
    section = GPTQ | {"bits": bits, "checkpoint_format": form}
    assert equal(weight(tmp_path, tensors, section), expected)
    del tensors["l.0.g_idx"]
    assert equal(weight(tmp_path, tensors, section), expected)


def test_a_zero_of_0_is_stored_as_the_largest_code_in_the_first_format(tmp_path: Path) -> None:
    tensors, _ = gptq()
    tensors["l.0.qzeros"] = torch.full_like(tensors["l.0.qzeros"], -1)
    got = weight(tmp_path, tensors, GPTQ)
    assert (got >= 0).all() and (got > 0).any()


def test_an_index_may_permute_the_groups(tmp_path: Path) -> None:
    tensors, _ = gptq()
    of = torch.randperm(32) // 8
    tensors["l.0.g_idx"] = of.int()
    got, report = plain(written(tmp_path, tensors, GPTQ | {"desc_act": True}))
    codes, zeros = (
        torch.stack([tensors[name] >> 4 * i & 15 for i in range(8)], axis + 1).flatten(axis, axis + 1)
        for name, axis in (("l.0.qweight", 0), ("l.0.qzeros", 1))
    )
    scales = tensors["l.0.scales"].float()
    assert equal(got["l.0.weight"], ((codes - zeros[of] - 1).float() * scales[of]).half().T)
    assert [*report.dequantized] == ["GPTQ, 4 bits, groups of 8, in no order (g_idx)"]


def test_the_last_group_may_be_shorter_and_a_row_may_be_one_group(tmp_path: Path) -> None:
    for group, size in ((24, 24), (32, -1)):
        tensors, expected = gptq(group=group)
        for kept in (True, False):
            given = tensors if kept else {k: v for k, v in tensors.items() if "g_idx" not in k}
            assert equal(weight(tmp_path, given, GPTQ | {"group_size": size}), expected)


def test_every_stretch_of_a_packed_tensor_is_the_same_as_in_the_whole(tmp_path: Path) -> None:
    tensors, expected = gptq(3, 64, 32)
    with ckpttool.open(written(tmp_path, tensors, GPTQ | {"bits": 3})) as checkpoint:
        data = dequantize(checkpoint)[0].state()["l.0.weight"].data
        whole = expected.contiguous().view(torch.uint8).numpy().tobytes()
        for start, count in ((0, 2), (2, 2), (62, 130), (126, 4), (1000, 1), (len(whole) - 6, 6)):
            count += count % 2
            assert data.part(start, count).read() == whole[start : start + count]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "no settings": ({}, None, "no config.json says so"),
    "settings of another method": ({}, {"quant_method": "fp8"}, "says 'fp8'"),
    "an unknown method": ({}, {"quant_method": "vptq"}, "is quantised by 'vptq'"),
    "a layout for one kernel": ({}, GPTQ | {"checkpoint_format": "marlin"}, "GPTQ's format 'marlin'"),
    "other bits than the words": (
        {},
        GPTQ | {"bits": 8},
        "'l.0.qzeros' is of shape [4, 4], and [4, 8] fits it",
    ),
    "odd bits": ({}, GPTQ | {"bits": 5}, "is of 5 bits"),
    "bits that are no number": ({}, GPTQ | {"bits": "4"}, "says bits = '4'"),
    "groups of another size": ({"l.0.g_idx": None}, GPTQ | {"group_size": 16}, "it has 4 groups"),
    "no zeros": ({"l.0.qzeros": None}, GPTQ, "there is no 'l.0.qzeros'"),
    "no scales": ({"l.0.scales": None}, GPTQ, "there is no 'l.0.scales'"),
    "an index past the end": ({"l.0.g_idx": torch.full((32,), 4)}, GPTQ, "names group 4, and there are 4"),
    "an index below 0": ({"l.0.g_idx": torch.full((32,), -1)}, GPTQ, "names group -1"),
    "a short index": (
        {"l.0.g_idx": torch.zeros(31, dtype=torch.int32)},
        GPTQ,
        "is of shape [31], and [32] fits",
    ),
    "an index of floats": ({"l.0.g_idx": torch.zeros(32)}, GPTQ, "'l.0.g_idx' is of float32"),
    "scales of no matrix": ({"l.0.scales": torch.rand(32).half()}, GPTQ, "are of shapes [4, 32] and [32]"),
    "a scale of NaN": ({"l.0.scales": torch.full((4, 32), float("nan")).half()}, GPTQ, "holds a NaN"),
    "its plain self": (
        {"l.0.weight": torch.ones(2)},
        GPTQ,
        "would become 'l.0.weight', which already exists",
    ),
}


@pytest.mark.parametrize(("changes", "section", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_whole_layer_of_gptq_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], section: dict[str, Any] | None, said: str
) -> None:
    tensors = {name: tensor for name, tensor in (gptq()[0] | changes).items() if tensor is not None}
    assert said in refusal(tmp_path, tensors, section)


def awq(inputs: int = 32, outputs: int = 16, group: int = 8) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, zeros = integers(4, inputs, outputs), integers(4, inputs // group, outputs)
    scales, of = torch.rand(inputs // group, outputs).half(), torch.arange(inputs) // group
    expected = ((codes - zeros[of]).float() * scales[of].float()).half().T
    places = [8 * (i // 8) + ORDER[i % 8] for i in range(outputs)]
    words = {
        name: packed_words(each[:, places], 4, 1) for name, each in (("qweight", codes), ("qzeros", zeros))
    }
    return {f"l.0.{name}": each for name, each in words.items()} | {"l.0.scales": scales}, expected


def test_awq(tmp_path: Path) -> None:
    for group in (8, 32):
        tensors, expected = awq(group=group)
        assert equal(weight(tmp_path, tensors, AWQ | {"group_size": group if group == 8 else -1}), expected)


def test_settings_in_the_files_of_their_own_are_read(tmp_path: Path) -> None:
    for name, said, (tensors, expected) in (
        ("quantize_config.json", {"bits": 4, "group_size": 8, "sym": False}, gptq()),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 8, "zero_point": True}, awq()),
    ):
        (tmp_path / name).write_text(json.dumps(said))
        assert equal(weight(tmp_path, tensors), expected)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("changes", "section", "said"),
    [
        ({}, AWQ | {"version": "gemv"}, "version 'gemv' with 4 bits"),
        ({}, AWQ | {"bits": 8}, "version 'gemm' with 8 bits"),
        ({}, AWQ | {"group_size": 16}, "4 groups of 16, and 32 inputs"),
        (
            {"l.0.qweight": torch.zeros(32, 3, dtype=torch.int32)},
            AWQ,
            "is of shape [32, 3], and [32, 2] fits",
        ),
        ({"l.0.qzeros": torch.zeros(4, 3).int()}, AWQ, "is of shape [4, 3], and [4, 2] fits it"),
    ],
)
def test_what_is_no_whole_layer_of_awq_is_refused(
    tmp_path: Path, changes: Any, section: Any, said: str
) -> None:
    assert said in refusal(tmp_path, awq()[0] | changes, section)


def compressed(bits: int, size: int, *, zeros: bool, columns: int = 64) -> tuple[Any, Any, torch.Tensor]:
    """Return the tensors of a layer, its settings and its weight."""
    codes, groups = integers(bits, 6, columns), columns // size
    scale, zero = torch.rand(6, groups).bfloat16(), integers(bits, 6, groups)
    tensors = {
        "l.0.weight_packed": packed_words(codes, bits, 1),
        "l.0.weight_scale": scale,
        "l.0.weight_shape": torch.tensor([6, columns]),
    }
    if zeros:
        tensors["l.0.weight_zero_point"] = packed_words(zero, bits, 0)
    less = zero if zeros else torch.full_like(zero, 1 << bits - 1)
    expected = (codes - less.repeat_interleave(size, 1)).float() * scale.float().repeat_interleave(size, 1)
    weights = {"num_bits": bits, "group_size": size}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return tensors, section | {"config_groups": {"group_0": {"weights": weights}}}, expected.bfloat16()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("size", [32, 64])
def test_compressed_tensors_of_any_bits(tmp_path: Path, bits: int, zeros: bool, size: int) -> None:
    tensors, section, expected = compressed(bits, size, zeros=zeros)
    assert equal(weight(tmp_path, tensors, section), expected)


def test_older_versions_put_whole_codes_of_3_bits_into_each_word(tmp_path: Path) -> None:
    _, section, _ = compressed(3, 300, zeros=False, columns=300)
    codes, scale = integers(3, 6, 300), torch.rand(6, 1).bfloat16()
    words = sum(codes[:, i::10] << 3 * i for i in range(10)).int()
    tensors = {
        "l.0.weight_packed": words,
        "l.0.weight_scale": scale,
        "l.0.weight_shape": torch.tensor([6, 300]),
    }
    assert equal(weight(tmp_path, tensors, section), ((codes - 4) * scale.float()).bfloat16())


def test_mixed_widths_are_told_by_their_shapes(tmp_path: Path) -> None:
    one, _, four = compressed(4, 32, zeros=False)
    other, _, eight = compressed(8, 32, zeros=True)
    tensors = one | {name.replace("l.0", "l.1"): tensor for name, tensor in other.items()}
    groups = {name: {"weights": {"num_bits": bits}} for name, bits in (("a", 4), ("b", 8))}
    section = {"quant_method": "compressed-tensors", "config_groups": groups}
    got, report = plain(written(tmp_path, tensors, section))
    assert equal(got["l.0.weight"], four) and equal(got["l.1.weight"], eight)
    assert [*report.dequantized.values()] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_shape": torch.tensor([6, 65])}, "[6, 65] numbers of ['4'] bits"),
        ({"weight_shape": torch.tensor([7, 64])}, "[7, 64] numbers"),
        ({"weight_shape": torch.tensor([6, 2**62])}, "in 0 ways"),
        ({"weight_shape": torch.tensor([6, -1])}, "in 0 ways"),
        ({"weight_shape": torch.tensor([6])}, "is of shape [1], and [2] fits it"),
        ({"weight_shape": None}, "there is no 'l.0.weight_shape'"),
        ({"weight_scale": torch.rand(6, 3).bfloat16()}, "3 groups don't divide 64 inputs"),
        ({"weight_scale": torch.rand(5, 2).bfloat16()}, "is of shape [5, 2], and [6, 2] fits it"),
        (
            {"weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)},
            "is of shape [2, 2], and [1, 2] fits it",
        ),
        ({"weight_g_idx": torch.full((64,), 2)}, "names group 2, and there are 2"),
    ],
)
def test_what_is_no_whole_layer_of_compressed_tensors_is_refused(
    tmp_path: Path, changes: Any, said: str
) -> None:
    tensors, section, _ = compressed(4, 32, zeros=False)
    changed = tensors | {f"l.0.{name}": tensor for name, tensor in changes.items()}
    assert said in refusal(
        tmp_path, {name: tensor for name, tensor in changed.items() if tensor is not None}, section
    )


DEEP: Any = 4
for _ in range(600):
    DEEP = [DEEP]
ODD = {"a truth": True, "a float": 4.5, "huge": 10**30, "a list": [4], "an object": {"4": 4}, "deep": DEEP}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_a_setting_of_another_type_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    for name in ("bits", "group_size", "checkpoint_format", "packing_format", "quant_method"):
        assert f"config.json: says {name} = " in refusal(tmp_path, gptq()[0], GPTQ | {name: value})
    assert "config.json: says version = " in refusal(tmp_path, awq()[0], AWQ | {"version": value})
    tensors, section, _ = compressed(4, 32, zeros=False)
    for name in ("num_bits", "group_size"):
        groups = {"config_groups": {"0": {"weights": {name: value}}}}
        if name == "group_size":
            groups["config_groups"]["0"]["weights"]["num_bits"] = 4
        assert f"config.json: says {name} = " in refusal(tmp_path, tensors, section | groups)
    assert "config.json: says format = " in refusal(tmp_path, tensors, section | {"format": value})
    for groups in ({"config_groups": value}, {"config_groups": {"0": value}}):
        if not isinstance(value, dict):
            assert "which is no object" in refusal(tmp_path, tensors, section | groups)
    fp8 = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 2)}
    said = refusal(tmp_path, fp8, {"quant_method": "fp8", "weight_block_size": value})
    assert "config.json: says weight_block_size = " in said
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": value}))
    fp8["a.weight_scale_inv"] = torch.ones(1, 1)
    assert "config.json: says torch_dtype = " in refusal(tmp_path, fp8)
    if not isinstance(value, dict):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": value}))
        assert "config.json: says quantization_config = " in refusal(tmp_path, gptq()[0])


@pytest.mark.parametrize("nbytes", [64, 600, 1 << 12])
def test_strips_of_any_size_give_the_same_numbers(
    tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "STRIP", nbytes)
    monkeypatch.setattr(lookup, "KEPT", 2)
    monkeypatch.setattr(lookup, "FEWEST", 3)
    for bits in (3, 4):
        tensors, expected = gptq(bits, 96, 160)
        assert equal(weight(tmp_path, tensors, GPTQ | {"bits": bits}), expected)
    tensors, expected = awq(96, 160)
    assert equal(weight(tmp_path, tensors, AWQ), expected)


def test_a_pickled_layer_whose_words_are_views_is_read_as_well(tmp_path: Path) -> None:
    tensors, expected = gptq()
    views = {name: torch.stack([each, each], -1)[..., 0] for name, each in tensors.items()}
    torch.save(views, tmp_path / "a.pt")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    assert equal(plain(tmp_path / "a.pt")[0]["l.0.weight"], expected)


# ---- torchao's subclasses as they were recorded, and taken apart as its safetensors support does ------


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
        ("MXTensor", {}, {"is_swizzled_scales": True}, "'l.weight_scale' is of float32"),
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
