"""ckpttool maps, and convert --map, as people and scripts use them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpttool.mapping import command
from tests.support.dialects import CASES, GPT, LLAMA, assert_equal, random_state
from tests.support.running import ROOT, Cli, assert_says

META = random_state(CASES["meta-llama"][1])
PARAMS = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}


@pytest.fixture(autouse=True)
def models(here: Path) -> None:
    """Save Meta's Llama beside its params.json, and nanoGPT's checkpoint, which holds its numbers."""
    torch.save(META, "consolidated.00.pth")
    Path("params.json").write_text(json.dumps(PARAMS), encoding="utf-8")
    Path("gpt").mkdir()
    state = random_state(GPT)
    names = [name for name in state if name != "lm_head.weight"]
    optimizer = {
        "state": {n: {"exp_avg": torch.zeros_like(state[name])} for n, name in enumerate(names)},
        "param_groups": [{"lr": 0.1, "params": [*range(len(names))], "param_names": names}],
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    whole = {"model": state, "model_args": {"n_layer": 2}, "optimizer": optimizer, "iter_num": 7}
    torch.save(whole, "gpt/ckpt.pt")


def test_the_maps_are_listed_with_both_ends(cli: Cli) -> None:
    ran = cli("maps")
    assert (ran.code, ran.err) == (0, "")
    assert re.search(r"^nanogpt-gpt2 +nanoGPT <-> Hugging Face GPT-2$", ran.out, re.M)
    listed = cli("maps --json").json
    assert {*listed[0]} == {"schema", "name", "from", "to", "reversible"}
    assert {each["name"]: each["reversible"] for each in listed}["meta-llama"] is True
    assert len(listed) == len(ran.out.splitlines()) == len([*(ROOT / "ckpttool").rglob("maps/*.toml")])


def test_a_narrow_terminal_cuts_no_name(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "terminal_width", lambda _: 50)
    names = [line.split()[0] for line in cli("maps").out.splitlines() if not line.startswith(" ")]
    assert names == [each["name"] for each in cli("maps --json").json]
    assert 40 < max(map(len, cli("maps").out.splitlines())) <= 50


def test_a_map_is_printed_as_a_rule_file_that_map_takes(cli: Cli) -> None:
    Path("mine.toml").write_text(cli("maps meta-llama").out, encoding="utf-8")
    for way in ("meta-llama", "mine.toml"):
        assert cli(f"convert consolidated.00.pth {way}.safetensors --map {way}").code == 0
    assert_equal(load_file("mine.toml.safetensors"), load_file("meta-llama.safetensors"))
    assert cli("maps meta-llama --json").json["rules"].rstrip() == cli("maps meta-llama").out.rstrip()
    assert_says(cli("maps meta-lama"), 2, "there is no such map", "did you mean meta-llama?")


def test_there_and_back_with_the_numbers_beside_the_file_or_named(cli: Cli) -> None:
    ran = cli("convert consolidated.00.pth hf/ --map meta-llama")
    assert (ran.code, ran.out[:59]) == (0, "converted torch-zip, 21 tensors made by meta-llama -> hf/ (")
    Path("hf/config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert cli("convert hf back.safetensors --map meta-llama --inverse").code == 0
    assert_equal(load_file("back.safetensors"), META)
    Path("params.json").unlink()
    ran = cli("convert consolidated.00.pth x.safetensors --map meta-llama")
    assert_says(ran, 3, "nothing says the number 'heads'", "--config config.json")
    assert cli("convert consolidated.00.pth x.safetensors --map meta-llama --config hf/config.json").code == 0
    assert_says(
        cli("convert hf x2.safetensors --map meta-llama --inverse --config none.json"), 3, "none.json"
    )


def test_json_has_what_was_renamed_and_left_out(cli: Cli) -> None:
    torch.save(META | {"rope.freqs": torch.ones(2)}, "consolidated.00.pth")
    data = cli("convert consolidated.00.pth x.safetensors --map meta-llama --json").json
    assert (data["keys"], data["renamed"], data["left_out"]) == (21, 21, ["rope.freqs"])
    assert cli("convert consolidated.00.pth y.safetensors --map meta-llama --dry-run").code == 0
    assert not Path("y.safetensors").exists()


def test_the_optimizer_goes_along_where_the_output_has_room_for_it(cli: Cli) -> None:
    assert cli("convert gpt/ckpt.pt out.pt --map nanogpt-gpt2").code == 0
    out = torch.load("out.pt")
    names = out["optimizer"]["param_groups"][0]["param_names"]
    moment = out["optimizer"]["state"][names.index("transformer.h.0.attn.c_attn.weight")]["exp_avg"]
    assert moment.shape == out["model"]["transformer.h.0.attn.c_attn.weight"].shape == (8, 24)
    assert out["iter_num"] == 7
    del (whole := torch.load("gpt/ckpt.pt"))["optimizer"]["param_groups"][0]["param_names"]
    torch.save(whole, "gpt/ckpt.pt")
    ran = cli("convert gpt/ckpt.pt out2.pt --map nanogpt-gpt2")
    assert_says(ran, 3, "names no parameters", "or of --model SPEC")
    assert cli(ran.err.rstrip().rpartition("ckpttool ")[2]).code == 0  # the hint's command, as it is
    assert cli("convert NAMED.pt out2.pt --map nanogpt-gpt2").code == 0
    assert cli("convert gpt/ckpt.pt out2.pt --map nanogpt-gpt2 --drop optimizer --force").code == 0
    ran = cli("convert gpt/ckpt.pt out3.safetensors --map nanogpt-gpt2")
    assert_says(ran, 0, "optimizer", "other names of one tensor, added or taken away: lm_head.weight")
    assert_equal(load_file("out3.safetensors"), out["model"])


def test_other_changes_come_after_the_map(cli: Cli) -> None:
    options = "--map meta-llama --dtype bf16 --tie head=lm_head.weight --permute lm_head.weight=1,0"
    assert cli(f"convert consolidated.00.pth x.pt {options}").code == 0
    state = torch.load("x.pt")
    assert state["lm_head.weight"].dtype is torch.bfloat16
    assert state["lm_head.weight"].shape == state["head"].shape == (8, 11)


def test_overflows_of_a_rule_s_cast_are_counted(cli: Cli) -> None:
    save_file({"a": torch.tensor([1.0, 1e9])}, "a.safetensors")
    Path("r.toml").write_text('[[rule]]\nfrom = "a"\nto = "b"\nsteps = [{ cast = "fp16" }]', encoding="utf-8")
    ran = cli("convert a.safetensors b.safetensors --map r.toml")
    assert_says(ran, 0, "1 finite value became infinite")
    assert_says(
        cli("convert a.safetensors c.safetensors --map r.toml --inverse"), 2, "'cast' can't be undone"
    )


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--inverse", 2, "--inverse is of --map"),
        ("--config c.json", 2, "--config is of --map"),
        ("--map nope", 2, "--map nope: there is no such map"),
        ("--map nope.toml", 3, "nope.toml"),
        ("--map timm-torchvision-resnet", 3, "finds no tensor"),
        ("--map meta-llama --inverse", 3, "finds no tensor"),
    ],
)
def test_what_is_wrong_is_one_line(options: str, code: int, said: str, cli: Cli) -> None:
    ran = cli(f"convert consolidated.00.pth x.safetensors {options}")
    assert_says(ran, code, said)
    assert ran.err.count("\n") <= 2 and not Path("x.safetensors").exists()
