"""ckpttool convert --dequantize and --quantize, and what inspect says, as people and scripts use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpttool.gguf import reading
from tests.support.other_files import F32, Q8_0, Tensor, gguf_file
from tests.support.running import assert_says

SECTION = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(autouse=True)
def model(here: Path) -> None:
    """Write a model of two layers in fp8 to a folder."""
    tensors = {"lm_head.weight": torch.randn(64, 192).bfloat16()}
    for layer in ("model.layers.0.", "model.layers.1."):
        for name in ("q_proj", "up_proj"):
            tensors[f"{layer}{name}.weight"] = torch.randn(256, 192).to(torch.float8_e4m3fn)
            tensors[f"{layer}{name}.weight_scale_inv"] = torch.rand(2, 2)
        tensors[f"{layer}attn.k_scale"] = torch.tensor(1.0)
    (here / "model").mkdir()
    save_file(tensors, "model/model.safetensors")
    write_settings(SECTION)
    Path("model/quantize_config.json").write_text("{}")


def write_settings(section: dict[str, Any] | None) -> None:
    settings = {"model_type": "x", "dtype": "bfloat16"} | (
        {"quantization_config": section} if section else {}
    )
    Path("model/config.json").write_text(json.dumps(settings))


def test_the_result_is_one_line_and_what_was_left_out_is_named(cli: Any) -> None:
    ran = cli("convert model/model.safetensors out.safetensors --dequantize")
    assert ran.code == 0
    assert ran.out.startswith("converted safetensors, 4 tensors dequantised -> out.safetensors (")
    assert ran.err.splitlines() == [
        "fp8, blocks of 128 × 128: 4 tensors",
        "config.json beside the output must have no quantization_config",
        "left out: model.layers.0.attn.k_scale, model.layers.1.attn.k_scale",
    ]
    assert {each.dtype for each in load_file("out.safetensors").values()} == {torch.bfloat16}


def test_a_config_copied_along_is_corrected_and_files_that_are_no_longer_true_stay(cli: Any) -> None:
    ran = cli("convert model/ out/ --dequantize --companions")
    assert_says(ran, 0, "copying along: out/config.json", "not copied: quantize_config.json")
    assert "must have" not in ran.err
    assert json.loads(Path("out/config.json").read_text()) == {"model_type": "x", "dtype": "bfloat16"}
    assert not Path("out/quantize_config.json").exists()


def test_a_section_of_the_text_model_is_taken_out_where_it_was_found(cli: Any) -> None:
    text = {"quantization_config": SECTION, "hidden_size": 4}
    Path("model/config.json").write_text(json.dumps({"compression_config": None, "text_config": text}))
    assert cli("convert model/ out/ --dequantize --companions").code == 0
    assert json.loads(Path("out/config.json").read_text()) == {"text_config": {"hidden_size": 4}}
    assert cli("convert model/ again/ --dequantize --quantize fp8 --companions").code == 0
    settings = json.loads(Path("again/config.json").read_text())
    assert settings["text_config"] == {"hidden_size": 4}
    assert settings["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "compression_config" not in settings


def test_a_config_copied_along_names_the_type_of_the_numbers(cli: Any) -> None:
    settings = {"torch_dtype": "bfloat16", "text_config": {"dtype": "float16", "x_dtype": "float16"}}
    Path("model/config.json").write_text(json.dumps({**settings, "quantization_config": SECTION}))
    assert cli("convert model/ out/ --dequantize --dtype fp32 --companions").code == 0
    text = {"dtype": "float32", "x_dtype": "float16"}
    assert json.loads(Path("out/config.json").read_text()) == {"torch_dtype": "float32", "text_config": text}
    assert cli("convert out/ half/ --dtype fp16 --companions").code == 0
    text["dtype"] = "float16"
    assert json.loads(Path("half/config.json").read_text()) == {"torch_dtype": "float16", "text_config": text}


def test_what_quantizing_leaves_as_it_is_is_named(cli: Any) -> None:
    experts = {"model.layers.0.mlp.experts.down_proj": torch.randn(4, 64, 64)}
    save_file(experts | {"model.layers.0.q_proj.weight": torch.randn(64, 64)}, "moe.safetensors")
    ran = cli("convert moe.safetensors out.safetensors --quantize fp8")
    assert_says(ran, 0, "not quantised: model.layers.0.mlp.experts.down_proj")


def test_json_has_the_schemes(cli: Any) -> None:
    ran = cli("convert model/model.safetensors out.safetensors --dequantize --dtype fp32 --json")
    assert ran.json["dequantized"] == {"fp8, blocks of 128 × 128": 4}
    assert ran.json["settings"] == "model/config.json"
    assert ran.json["left_out"] == ["model.layers.0.attn.k_scale", "model.layers.1.attn.k_scale"]
    assert {each.dtype for each in load_file("out.safetensors").values()} == {torch.float32}


def test_finite_numbers_that_become_infinite_are_counted(cli: Any) -> None:
    codes = torch.full((2, 3), 448.0).to(torch.float8_e4m3fn)
    save_file({"w": codes, "w_scale": torch.tensor([1.0, 1e3])}, "big.safetensors")
    ran = cli("convert big.safetensors out.safetensors --dequantize --dtype fp16")
    assert_says(ran, 0, "3 finite values became infinite")


def test_a_gguf_becomes_plain_with_its_companions(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_unpacker", lambda *_: lambda raw: np.zeros((1, raw.size // 34 * 32)))
    tensors = {"a": Tensor(Q8_0, (2, 32), bytes(68)), "b": Tensor(F32, (1,), bytes(4))}
    Path("model/m.gguf").write_bytes(gguf_file(tensors))
    Path("model/model.safetensors").unlink()
    Path("model/config.json").write_text("{}")
    ran = cli("convert model/m.gguf plain/ --dequantize --companions --dtype bf16 -v")
    assert_says(ran, 0, "Q8_0: 1 tensor", "made plain whenever they are read")
    made = load_file(next(Path("plain").glob("*.safetensors")))
    assert {name: tensor.dtype for name, tensor in made.items()} == dict.fromkeys("ab", torch.bfloat16)
    assert Path("plain/config.json").read_text() == "{}"
    Path("model/m.gguf").write_bytes(gguf_file({"b": tensors["b"]}))
    assert_says(cli("convert model/m.gguf b.pt --dequantize"), 1, "no tensor is quantised")


def test_nothing_to_dequantise_is_exit_1_and_what_does_not_fit_exit_3(cli: Any) -> None:
    save_file({"w": torch.ones(3)}, "plain.safetensors")
    assert_says(cli("convert plain.safetensors out.pt --dequantize"), 1, "no tensor is quantised")
    write_settings(SECTION | {"weight_block_size": [64, 64]})
    ran = cli("convert model/model.safetensors out.pt --dequantize")
    assert_says(ran, 3, "can't be dequantised", "blocks of 64 × 64 of [256, 192] are [4, 3]")
    Path("model/config.json").write_text("[")
    assert_says(cli("convert model/model.safetensors out.pt --dequantize"), 3, "config.json: is not JSON")
    assert not Path("out.pt").exists()


def test_codes_and_scales_are_neither_cast_nor_averaged(cli: Any) -> None:
    hint = "ckpttool convert model/model.safetensors plain.safetensors --dequantize --dtype bfloat16"
    packed = "'model.layers.0.q_proj.weight' is packed, and its codes can't be "
    ran = cli("convert model/model.safetensors out.safetensors --dtype bf16")
    assert_says(ran, 3, f"{packed}cast", hint)
    ran = cli("average model/model.safetensors model/model.safetensors out.safetensors")
    assert_says(ran, 3, f"{packed}averaged", hint)
    assert not Path("out.safetensors").exists()
    words = torch.zeros(4, 8, dtype=torch.int32)
    save_file({"l.qweight": words, "l.scales": torch.ones(1, 8)}, "gptq.safetensors")
    assert_says(cli("average gptq.safetensors gptq.safetensors out.pt"), 3, "'l.qweight' is packed")
    ran = cli("convert gptq.safetensors out.pt --dtype fp16")
    assert_says(ran, 3, "'l.qweight' is packed", "--dequantize --dtype float16")
    # What is no part of them is cast, and so are 8-bit floats alone.
    rest = "--exclude *.weight_scale_inv --exclude *proj.weight"
    assert cli(f"convert model/model.safetensors rest.safetensors --dtype fp32 {rest}").code == 0
    save_file({"w": torch.ones(3).to(torch.float8_e4m3fn)}, "bare.safetensors")
    assert cli("convert bare.safetensors bare.pt --dtype fp16").code == 0


def test_there_and_back_with_the_error_of_each_tensor(cli: Any) -> None:
    cli("convert model/ plain/ --dequantize --companions")
    ran = cli("convert plain/ again/ --quantize fp8-block --companions --json")
    assert {each["name"] for each in ran.json["errors"]} == {
        f"model.layers.{i}.{name}_proj.weight" for i in (0, 1) for name in ("q", "up")
    }
    worst = [each["nmse"] for each in ran.json["errors"]]
    assert worst == sorted(worst, reverse=True)
    assert all(0.01 < each["relative"] < 0.04 and each["max_abs"] > 0 for each in ran.json["errors"])
    assert ran.json["left_plain"] == ["lm_head.weight"]
    section = json.loads(Path("again/config.json").read_text())["quantization_config"]
    assert section == ran.json["quantization_config"]
    assert section | SECTION == section
    assert section["modules_to_not_convert"] == ["lm_head"]
    ran = cli("convert plain/ once/ --quantize fp8")
    assert_says(ran, 0, "largest error: model.layers.", 'must have "quantization_config": {"quant_method":')
    ran = cli("convert plain/ twice/ --quantize fp8-channel -v")
    assert ran.err.count(": error ") == 4


def test_one_scheme_becomes_another_in_one_pass(cli: Any) -> None:
    ran = cli("convert model/ out.safetensors --dequantize --quantize fp8-channel")
    assert "4 tensors dequantised, 4 tensors in fp8-channel" in ran.out
    assert ran.err.count("config.json beside the output must have") == 1
    assert load_file("out.safetensors")["model.layers.0.q_proj.weight_scale"].shape == (256, 1)


def test_a_dry_run_reads_no_numbers(cli: Any) -> None:
    ran = cli("convert model/ out/ --dequantize --quantize fp8 --dry-run --json")
    assert ran.json["dry_run"] and "errors" not in ran.json
    assert not Path("out").exists()


def test_inspect_says_how_tensors_are_packed(cli: Any) -> None:
    ran = cli("inspect model/")
    assert "  quantised   fp8, blocks of 128 × 128, 2 layers (4 tensors)\n" in ran.out
    rows = cli("inspect model/ --json").json["quantised"]
    assert rows == [{"scheme": "fp8, blocks of 128 × 128", "tensors": 4, "layers": 2}]
    write_settings(SECTION | {"weight_block_size": [64, 64]})
    ran = cli("inspect model/")
    assert ran.code == 0
    assert "  unclear     " in ran.out and "can't be dequantised" in ran.out
    Path("model/config.json").write_text("[")
    assert cli("inspect model/").code == 0


def test_the_error_of_what_another_part_wrote_is_not_stated(cli: Any) -> None:
    state = {f"layers.{i}.weight": torch.randn(128, 256) for i in range(4)}
    save_file(state, "many.safetensors")
    asked = ("convert", "many.safetensors", "out/", "--shard-size", "30KB", "--quantize", "mxfp4")
    parts = [cli(*asked, "--part", part, "--json") for part in ("1/2", "2/2")]
    told = [[each["name"] for each in part.json["errors"]] for part in parts]
    assert sorted(told[0] + told[1]) == sorted(state) and all(told)
    assert all(each["nmse"] > 0 for part in parts for each in part.json["errors"])
    said = cli(*asked, "--part", "1/2", "--force").err
    assert "another process wrote 2 tensors: the errors are not known here" in said
