"""What packing and rounding cost, tensor by tensor: `diff PLAIN PACKED`, against the tensors made plain."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.diffing import losses
from ckpttool.diffing.compare import diff
from ckpttool.diffing.compare_values import Change, Comparison
from ckpttool.numbers.dequantize import dequantize
from ckpttool.numbers.quantize import quantize
from tests.support.other_files import F32, Q8_0, Tensor, gguf_file
from tests.support.quantised import packed_words, plain, written
from tests.support.range_server import RangeServer
from tests.support.running import Cli

ROWS, COLUMNS, GROUP = 64, 128, 32
NEGATIVE = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911]
POSITIVE = [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0]
NF4_TABLE = torch.tensor([*NEGATIVE, 0.0, *POSITIVE])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


WEIGHT = normal(ROWS, COLUMNS)


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return (values[..., None] - levels).abs().argmin(-1)


def in_pairs(codes: torch.Tensor, *, low_first: bool = True) -> torch.Tensor:
    even, odd = codes[..., ::2], codes[..., 1::2]
    return (even | odd << 4 if low_first else even << 4 | odd).to(torch.uint8)


def rounded_in_groups(most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of the weight as integers around 0, and the scale of each group."""
    groups = WEIGHT.reshape(ROWS, -1, GROUP)
    scales = (groups.abs().amax(-1) / most).half()
    return (groups / scales[..., None].float()).round().clamp(-most - 1, most).reshape(ROWS, -1).int(), scales


def fp8_block() -> tuple[dict[str, Any], Any]:
    scale = WEIGHT.abs().max() / 448
    codes = (WEIGHT / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale.reshape(1, 1)}, {"quant_method": "fp8"}


def gptq() -> tuple[dict[str, Any], Any]:
    codes, scales = rounded_in_groups(7)
    zeros = torch.full((COLUMNS // GROUP, ROWS), 7)  # stored less one
    parts = {"qweight": packed_words(codes.T + 8, 4, 0), "qzeros": packed_words(zeros, 4, 1)}
    return parts | {"scales": scales.T}, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}


def awq() -> tuple[dict[str, Any], Any]:
    codes, scales = rounded_in_groups(7)
    places = torch.arange(ROWS).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    zeros = torch.full((COLUMNS // GROUP, ROWS), 8)
    parts = {"qweight": packed_words(codes.T[:, places] + 8, 4, 1), "qzeros": packed_words(zeros, 4, 1)}
    section = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    return parts | {"scales": scales.T}, section


def nf4() -> tuple[dict[str, Any], Any]:
    blocks = WEIGHT.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    codes = nearest(blocks / largest[:, None], NF4_TABLE).flatten()
    said = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [ROWS, COLUMNS]}
    state = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
    parts = {"weight": in_pairs(codes, low_first=False).reshape(-1, 1), "weight.absmax": largest}
    parts |= {"weight.quant_map": NF4_TABLE, "weight.quant_state.bitsandbytes__nf4": state}
    return parts, {"quant_method": "bitsandbytes"}


def int8() -> tuple[dict[str, Any], Any]:
    largest = WEIGHT.abs().amax(1)
    codes = (WEIGHT * 127 / largest[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": largest}, {"quant_method": "bitsandbytes"}


def compressed() -> tuple[dict[str, Any], Any]:
    codes, scales = rounded_in_groups(7)
    parts = {"weight_packed": packed_words(codes + 8, 4, 1), "weight_scale": scales}
    weights = {"num_bits": 4, "group_size": GROUP}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    section |= {"config_groups": {"0": {"weights": weights}}}
    return parts | {"weight_shape": torch.tensor([ROWS, COLUMNS])}, section


def e2m1() -> tuple[torch.Tensor, torch.Tensor]:
    groups = WEIGHT.reshape(ROWS, -1, GROUP)
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    return nearest(groups / 2 ** exponents[..., None], E2M1), (exponents + 127).to(torch.uint8)


def mxfp4() -> tuple[dict[str, Any], Any]:
    codes, scales = e2m1()
    parts = {"weight_packed": in_pairs(codes.reshape(ROWS, -1)), "weight_scale": scales}
    return parts, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


def experts() -> tuple[dict[str, Any], Any]:
    """Experts of gpt-oss, whose plain tensor is [1, columns, rows]."""
    codes, scales = e2m1()
    return {"weight_blocks": in_pairs(codes)[None], "weight_scales": scales[None]}, {"quant_method": "mxfp4"}


def comfy() -> tuple[dict[str, Any], Any]:
    scale = WEIGHT.abs().max() / 448
    mark = torch.tensor([*b'{"format": "float8_e4m3fn"}'], dtype=torch.uint8)
    parts = {"weight": (WEIGHT / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    return parts | {"comfy_quant": mark}, None


FORMS = {f.__name__: f for f in (fp8_block, gptq, awq, nf4, int8, compressed, mxfp4, experts, comfy)}
ERRORS = {"fp8_block": 1e-3, "int8": 1e-4, "comfy": 1e-3}  # others of 4 bits


def pack(folder: Path, form: str, more: Mapping[str, Any] | None = None) -> Path:
    """Write the packed layer `l` and a norm, with their settings."""
    folder.mkdir(exist_ok=True)
    tensors, section = FORMS[form]()
    named = {f"l.{name}": tensor for name, tensor in tensors.items()} | {"norm.weight": torch.ones(4)}
    return written(folder, named | dict(more or {}), section)


def exact(path: Path, form: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write the plain model that the packed one was made of."""
    weight = WEIGHT.T[None] if form == "experts" else WEIGHT
    save_file({"l.weight": weight.to(dtype).contiguous(), "norm.weight": torch.ones(4)}, path)
    return path


def only(comparison: Comparison) -> Change:
    assert not comparison.only_a and not comparison.only_b
    (change,) = comparison.changed
    return change


def nmse(of: torch.Tensor, kept: torch.Tensor) -> float:
    x, y = of.double(), kept.double()
    return float(((x - y) ** 2).sum() / (x**2).sum())


# Each form, each order.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_tensor_is_measured_as_the_plain_one_it_stands_for(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    packed, original = pack(tmp_path / "packed", form), exact(tmp_path / "plain.safetensors", form, dtype)
    name = str(dtype).removeprefix("torch.")
    made, of = plain(packed, name)[0]["l.weight"], load_file(original)["l.weight"]
    packed.with_name("plain.safetensors").unlink()
    for a, b, side in ((original, packed, "a"), (packed, original, "b")):
        change = only(diff(a, b))
        assert (change.name, change.why) == ("l.weight", "values")
        assert change.loss and change.loss.of == side and change.nmse and change.distance
        assert change.nmse == pytest.approx(nmse(of, made), rel=1e-9)
        assert change.nmse < ERRORS.get(form, 2e-2)
        assert change.distance.max_abs == (of.double() - made.double()).abs().max().item()
        assert change.loss.zeroed == ((of != 0) & (made == 0)).sum()
        assert change.loss.saturated == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_tensor_and_itself_made_plain_are_the_same(form: str, tmp_path: Path) -> None:
    packed = pack(tmp_path / "packed", form)
    with ckpttool.open(packed) as checkpoint:
        ckpttool.save(dequantize(checkpoint)[0], tmp_path / "plain.safetensors")
    found = diff(packed, tmp_path / "plain.safetensors")
    assert found.same and not found.identical
    assert [*found.tolerated] == ["l.weight"]
    assert diff(packed, packed).identical


@pytest.mark.parametrize("one", ["fp8_block", "int8", "mxfp4"])
@pytest.mark.parametrize("other", ["gptq", "nf4", "compressed"])
def test_both_may_be_packed(one: str, other: str, tmp_path: Path) -> None:
    paths = [pack(tmp_path / form, form) for form in (one, other)]
    of, made = (plain(path, "float32")[0]["l.weight"] for path in paths)
    for path in paths:
        path.with_name("plain.safetensors").unlink()
    found = diff(*paths)
    assert only(found).nmse == pytest.approx(nmse(of, made), rel=1e-9)
    assert [*found.packed_a.values()] == [*found.packed_b.values()] == [1]


def test_a_gguf_is_measured_as_it_is_read(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf")
    blocks = WEIGHT.reshape(-1, 32).numpy()
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
    codes = np.round(blocks / scales.astype("f4")).astype("i1")
    raw = np.concatenate([scales.view("u1"), codes.view("u1")], 1).tobytes()
    norm = Tensor(F32, (4,), np.ones(4, "<f4").tobytes())
    tensors = {"l.weight": Tensor(Q8_0, (ROWS, COLUMNS), raw), "norm.weight": norm}
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file(tensors, [("general.architecture", "llama")]))
    original = exact(tmp_path / "plain.safetensors", "")
    made = torch.from_numpy(codes * scales.astype("f4")).reshape(ROWS, COLUMNS)
    for a, b in ((original, path), (path, original)):
        change = only(diff(a, b))
        assert change.nmse == pytest.approx(nmse(WEIGHT, made), rel=1e-9)
        assert change.loss and change.loss.saturated is None
    assert diff(path, path).identical


def test_torchao_s_classes_are_measured_too(tmp_path: Path) -> None:
    ao = pytest.importorskip("torchao.quantization", reason="needs torchao")
    linear = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, bias=False))
    linear[0].weight.data.copy_(WEIGHT)
    save_file({"0.weight": WEIGHT}, tmp_path / "plain.safetensors")
    ao.quantize_(linear, ao.Int8WeightOnlyConfig(version=2))
    torch.save(linear.state_dict(), tmp_path / "packed.pt")
    change = only(diff(tmp_path / "plain.safetensors", tmp_path / "packed.pt"))
    assert change.name == "0.weight" and change.nmse and change.nmse < 1e-3
    assert change.nmse == pytest.approx(nmse(WEIGHT, linear[0].weight.dequantize()), rel=1e-6)


# What went wrong is the first row.


def quantised(folder: Path, wrong: Any = None) -> tuple[Path, Path]:
    """Write three layers, plain and in 4 bits (compressed-tensors), the second of which may be wrong."""
    tensors, section = compressed()
    square = {f"{i}.{name}": each.clone() for i in range(3) for name, each in tensors.items()}
    if wrong:
        wrong(square)
    folder.mkdir(exist_ok=True)
    save_file({f"{i}.weight": WEIGHT.clone() for i in range(3)}, folder / "exact.safetensors")
    return folder / "exact.safetensors", written(folder, square, section)


def scale_doubled(tensors: dict[str, torch.Tensor]) -> None:
    tensors["1.weight_scale"] *= 2


def nibbles_swapped(tensors: dict[str, torch.Tensor]) -> None:
    words = tensors["1.weight_packed"].view(torch.uint8)
    tensors["1.weight_packed"] = (words >> 4 | words << 4).view(torch.int32)


def scales_transposed(tensors: dict[str, torch.Tensor]) -> None:
    scale = tensors["1.weight_scale"]
    tensors["1.weight_scale"] = scale.T.contiguous().reshape(scale.shape)


def scale_halved(tensors: dict[str, torch.Tensor]) -> None:
    """Half the scale, and codes that were made with it: the largest no longer fit."""
    half = tensors["1.weight_scale"].float() / 2
    codes = (WEIGHT / half.repeat_interleave(GROUP, 1)).round().clamp(-8, 7).int()
    tensors["1.weight_scale"] = half.half()
    tensors["1.weight_packed"] = packed_words(codes + 8, 4, 1)


@pytest.mark.parametrize("wrong", [scale_doubled, nibbles_swapped, scales_transposed, scale_halved])
def test_what_was_quantised_wrongly_comes_first(wrong: Any, tmp_path: Path, cli: Cli) -> None:
    ran = cli("diff", *quantised(tmp_path, wrong), "--json")
    assert ran.code == 1
    first, second, third = ran.json["changed"]
    assert first["name"] == "1.weight" and first["nmse"] > 4 * second["nmse"] >= 4 * third["nmse"]
    assert second["saturated"] == third["saturated"] == 0
    shown = cli("diff", *quantised(tmp_path, wrong)).out.splitlines()
    assert shown[0].split() == ["NMSE", "largest", "saturated", "zeroed"]
    assert shown[1].startswith("~ 1.weight")
    assert [*ran.json["packed_b"].values()] == [3] and not ran.json["packed_a"]


def test_what_was_transposed_is_of_another_shape_or_comes_first(tmp_path: Path) -> None:
    original = {f"{i}.weight": normal(64, 64) + i for i in range(3)}
    save_file(original, tmp_path / "plain.safetensors")
    with ckpttool.open(tmp_path / "plain.safetensors") as checkpoint:
        made, _ = quantize(checkpoint, "fp8")
        ckpttool.save(made, tmp_path / "fp8.safetensors")
    tensors = load_file(tmp_path / "fp8.safetensors")
    tensors["1.weight"] = tensors["1.weight"].view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "fp8.safetensors")
    found = diff(tmp_path / "plain.safetensors", tmp_path / "fp8.safetensors")
    worst = max(found.changed, key=lambda change: change.nmse or 0)
    assert worst.name == "1.weight" and worst.nmse and worst.nmse > 0.5
    save_file(original | {"1.weight": normal(32, 128)}, tmp_path / "plain.safetensors")
    found = diff(tmp_path / "plain.safetensors", tmp_path / "fp8.safetensors")
    assert {change.name: change.why for change in found.changed}["1.weight"] == "shape"


def test_saturated_are_elements_beyond_the_last_step_of_their_code(tmp_path: Path) -> None:
    original, packed = quantised(tmp_path, scale_halved)
    change = next(each for each in diff(original, packed).changed if each.name == "1.weight")
    scale = plain(packed, "float32")[0] and load_file(packed)["1.weight_scale"].float()
    steps = WEIGHT / scale.repeat_interleave(GROUP, 1)
    assert change.loss and change.loss.saturated == ((steps > 7.5) | (steps < -8.5)).sum() > 100


# Rounded, and nothing lost.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("is_first", [True, False])
def test_floats_of_two_types_are_measured_too(dtype: torch.dtype, is_first: bool, tmp_path: Path) -> None:
    values = torch.cat([WEIGHT.flatten(), torch.tensor([65519.0, -65520.0, 1e5, 1e-30, 0.0, -0.0])])
    rounded = values.to(dtype)
    save_file({"w": values}, tmp_path / "a.safetensors")
    save_file({"w": rounded}, tmp_path / "b.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    change = only(diff(*(paths if is_first else paths[::-1])))
    assert change.why == "dtype" and change.loss and change.loss.of == "ab"[not is_first]
    finite = rounded.isfinite()
    assert change.nmse == pytest.approx(nmse(values[finite], rounded[finite]), rel=1e-9)
    assert change.loss.saturated == (~finite).sum()
    assert change.loss.zeroed == ((values != 0) & (rounded == 0)).sum()


def test_floats_of_two_types_and_equal_values_differ_in_their_type_alone(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(4).half()}, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found.changed == (Change("w", "dtype", "float32 [4]", "float16 [4]"),)
    assert diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", atol=0.0).same


def test_a_tolerance_holds_for_packed_tensors(tmp_path: Path, cli: Cli) -> None:
    original, packed = quantised(tmp_path)
    most = max(change.distance.max_abs for change in diff(original, packed).changed if change.distance)
    assert cli("diff", original, packed, "--atol", str(most * 1.01)).code == 0
    assert cli("diff", original, packed, "--atol", str(most * 0.99)).code == 1
    ran = cli("diff", packed, packed)
    assert ran.code == 0 and ran.err == ""


def test_nothing_and_zeros_have_no_norm_to_divide_by(tmp_path: Path) -> None:
    tensors = {"z.weight": torch.zeros(64, 64), "e.weight": torch.zeros(0, 64), "s": torch.tensor(1.3)}
    save_file(tensors, tmp_path / "a.safetensors")
    scale = torch.ones(1)
    packed = {f"{n}.weight": tensors[f"{n}.weight"].to(torch.float8_e4m3fn) for n in "ze"}
    packed["z.weight"][0, 0] = 1.0
    packed |= {"z.weight_scale": scale, "e.weight_scale": scale.clone(), "s": tensors["s"].bfloat16()}
    save_file(packed, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    costs = {change.name: change.nmse for change in found.changed}
    assert {*costs} == {"z.weight", "s"} and found.tolerated == ("e.weight",)
    assert costs["z.weight"] == math.inf and 0 < (costs["s"] or 0) < 1e-4


# Names that have no counterpart, and packings that are not known.


def test_scales_of_activations_are_set_aside_and_named(tmp_path: Path, cli: Cli) -> None:
    packed = pack(tmp_path / "packed", "comfy", {"l.input_scale": torch.ones(())})
    ran = cli("diff", exact(tmp_path / "plain.safetensors", ""), packed, "--json")
    assert ran.json["only_b"] == [] and ran.json["not_compared"] == ["l.input_scale"]
    ran = cli("diff", packed, packed, "--json")
    assert ran.json["not_compared"] == [] and ran.json["identical"]


def test_what_can_not_be_made_plain_is_compared_as_it_is_stored_and_said(tmp_path: Path, cli: Cli) -> None:
    packed = pack(tmp_path / "packed", "gptq")
    (packed.parent / "config.json").unlink()
    ran = cli("diff", exact(tmp_path / "plain.safetensors", ""), packed)
    assert ran.code == 1 and "'l.qweight' can't be dequantised" in ran.err and "compared as stored" in ran.err
    assert "+ l.qweight" in ran.out and "- l.weight" in ran.out


def test_as_stored_compares_codes_and_scales(tmp_path: Path, cli: Cli) -> None:
    packed, original = pack(tmp_path / "packed", "fp8_block"), exact(tmp_path / "plain.safetensors", "")
    ran = cli("diff", original, packed, "--as-stored", "--json")
    assert ran.json["only_b"] == ["l.weight_scale_inv"] and not ran.json["packed_b"]
    assert [(each["name"], each["why"], "nmse" in each) for each in ran.json["changed"]] == [
        ("l.weight", "dtype", False)
    ]


def test_without_the_room_names_are_compared_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, original = pack(tmp_path / "packed", "gptq"), exact(tmp_path / "plain.safetensors", "")
    monkeypatch.setattr("ckpttool.diffing.packed.find", lambda name: None)
    found = diff(original, packed)
    assert found.only_a == ("l.weight",) and found.only_b == ("l.qweight", "l.qzeros", "l.scales")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_scale_that_is_no_number_is_refused_by_name(number: float, tmp_path: Path, cli: Cli) -> None:
    packed = pack(tmp_path / "packed", "fp8_block", {"l.weight_scale_inv": torch.full((1, 1), number)})
    ran = cli("diff", exact(tmp_path / "plain.safetensors", ""), packed)
    assert ran.code == 3 and "'l.weight_scale_inv' holds a NaN or an infinity" in ran.err
    assert cli("diff", exact(tmp_path / "plain.safetensors", ""), packed, "--as-stored").code == 1


# However it is read.


def test_blocks_of_any_size_make_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, packed = quantised(tmp_path, scale_halved)
    whole = diff(original, packed).changed
    monkeypatch.setattr(losses, "ELEMENTS", 640)
    monkeypatch.setattr(losses, "STRETCH", 3200)
    for one, other in zip(whole, diff(original, packed).changed, strict=True):
        assert (one.loss, one.index) == (other.loss, other.index)
        assert one.nmse == pytest.approx(other.nmse, rel=1e-12)


def test_shards_and_urls_make_the_same_answer_in_few_requests(tmp_path: Path) -> None:
    original, packed = quantised(tmp_path / "one", scale_halved)
    expected = [(change.name, change.loss, change.nmse) for change in diff(original, packed).changed]
    shards = tmp_path / "shards"
    with ckpttool.open(packed) as checkpoint:
        ckpttool.save(checkpoint, f"{shards}/", shard_size=6000)
    shutil.copy(packed.parent / "config.json", shards)
    files = {path.name: path.read_bytes() for path in (original, packed, packed.parent / "config.json")}
    assert [(c.name, c.loss, c.nmse) for c in diff(original, shards).changed] == expected
    with RangeServer(files) as server:
        found = diff(f"{server.url}/{original.name}", f"{server.url}/{packed.name}")
    assert [(c.name, c.loss, c.nmse) for c in found.changed] == expected
    assert len([each for each in server.requests if each.path.endswith(packed.name)]) <= 4


def test_parts_find_what_one_process_finds(tmp_path: Path, cli: Cli) -> None:
    original, packed = quantised(tmp_path, scale_halved)
    alone = cli("diff", original, packed, "--json")
    for number in (1, 2, 3):
        ran = cli(
            *("diff", original, packed, "--json"),
            *("--part", f"{number}/3", "--parts-in", tmp_path / "meeting"),
        )
    assert (ran.code, ran.json["changed"]) == (alone.code, alone.json["changed"])


def test_checksums_of_what_is_read_are_compared(tmp_path: Path, cli: Cli) -> None:
    tensors, _ = fp8_block()
    torch.save({f"l.{name}": each for name, each in tensors.items()}, tmp_path / "packed.pt")
    original = exact(tmp_path / "plain.safetensors", "")
    raw = bytearray((tmp_path / "packed.pt").read_bytes())
    place = raw.find(tensors["weight"].view(torch.uint8).numpy().tobytes()[:64])
    raw[place + 5] ^= 1
    (tmp_path / "packed.pt").write_bytes(raw)
    ran = cli("diff", original, tmp_path / "packed.pt")
    assert ran.code == 3 and "l.weight" in ran.err


def test_a_prefix_is_ignored_when_asked(tmp_path: Path) -> None:
    original, packed = quantised(tmp_path)
    wrapped = {f"module.{name}": each for name, each in load_file(original).items()}
    save_file(wrapped, tmp_path / "wrapped.safetensors")
    found = diff(tmp_path / "wrapped.safetensors", packed, ignore_prefix=True)
    assert {change.name for change in found.changed} == {*wrapped}
