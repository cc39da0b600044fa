"""ckpttool convert, as people and scripts use it."""

from __future__ import annotations

import io
import math
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from tests.support.comparing import assert_same

base = torch.linspace(-1, 1, 12).reshape(3, 4)
STATE = OrderedDict(
    {"stem.weight": base, "stem.bias": base[0].clone(), "head.weight": base + 1}
    | {"head.count": torch.tensor(7)}
)


@pytest.fixture(autouse=True)
def training(here: Path) -> None:
    """Save a training checkpoint as in.pt."""
    optimizer = {"state": {0: {"m": base + 2}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": STATE, "optimizer": optimizer, "epoch": 3, "best": math.inf}, "in.pt")


def test_the_result_is_one_line(cli: Any) -> None:
    ran = cli("convert in.pt out.pt")
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(r"converted torch-zip -> out\.pt \(.* s\)\n", ran.out)
    assert_same(torch.load("in.pt"), torch.load("out.pt"))


def test_what_safetensors_can_t_hold_is_named(cli: Any) -> None:
    ran = cli("convert in.pt out.safetensors")
    assert (ran.code, ran.err) == (
        0,
        "left out, as safetensors holds only a state's tensors: optimizer, epoch, best\n",
    )
    assert list(load_file("out.safetensors")) == sorted(STATE)


def test_json_has_the_fields_that_scripts_rely_on(cli: Any) -> None:
    ran = cli("convert in.pt out.safetensors --exclude head.* --dtype bf16 --json")
    assert (ran.code, ran.err) == (0, "")
    assert 0 <= ran.json["seconds"] < 60
    left_out = ["head.weight", "head.count", "optimizer", "epoch", "best"]
    counts = dict.fromkeys(("renamed", "seconds", "overflows", "underflows", "nans"), 0)
    counts |= {"keys": 2, "bytes": os.path.getsize("out.safetensors")}
    nothing: dict[str, Any] = {key: [] for key in ("kept", "tied", "copied", "mentions", "devices")}
    written = {
        "schema": 1,
        "output": "out.safetensors",
        "format": "safetensors",
        "also_renamed": {},
        "left_out": left_out,
    }
    assert ran.json | {"seconds": 0} == written | counts | nothing


# --dtype


def test_floats_are_cast_and_counted(cli: Any) -> None:
    ran = cli("convert in.pt out.safetensors --dtype bf16")
    assert "converted torch-zip, 3 tensors cast to bfloat16 -> " in ran.out


@pytest.mark.parametrize(
    ("values", "said", "lost"),
    [
        ([1e5, 1.0], "1 finite value became infinite", (1, 0)),
        ([1e5, -1e6], "2 finite values became infinite", (2, 0)),
        ([-1e-60, 5e-324], "2 nonzero values became 0", (0, 2)),
        ([-1e-9, 1e5], "1 finite value became infinite\n1 nonzero value became 0", (1, 1)),
    ],
)
def test_losses_are_counted(values: list[float], said: str, lost: tuple[int, int], cli: Any) -> None:
    torch.save({"w": torch.tensor([*values, math.inf, math.nan, -0.0], dtype=torch.float64)}, "in.pt")
    ran = cli("convert in.pt out.pt --dtype fp16")
    assert (ran.code, ran.err) == (0, said + "\n")
    done = cli("convert in.pt out.pt --dtype fp16 --force --verify --json").json
    assert (done["overflows"], done["underflows"], done["nans"]) == (*lost, 0)


def test_no_overflow_is_not_mentioned_and_a_dry_run_does_not_know(cli: Any) -> None:
    assert "overflows" not in cli("convert in.pt out.pt --dtype fp16 --dry-run --json").json
    assert cli("convert in.pt out.pt --dtype fp16").err == ""


# --only, --exclude, --drop, --state


def test_keys_are_selected_and_the_others_are_named(cli: Any) -> None:
    ran = cli("convert in.pt out.pt --only stem.* --only head.w* --exclude *.bias")
    kept = "optimizer is kept whole, with what it has of parameters that were left out: --drop optimizer"
    kept += " leaves it out, and ckpttool slim all but the model"
    assert (ran.code, ran.err) == (0, f"{kept}\nleft out: stem.bias, head.count\n")
    assert list(torch.load("out.pt")["model"]) == ["stem.weight", "head.weight"]
    assert "kept whole" not in cli("convert in.pt two.pt --exclude head.* --drop optimizer").err
    assert "kept whole" not in cli("convert in.pt out.safetensors --exclude head.*").err


def test_entries_are_dropped_by_name(cli: Any) -> None:
    ran = cli("convert in.pt out.pt --drop optimizer --drop model.head.count --json")
    assert ran.json["left_out"] == ["optimizer", "model.head.count"]


def test_a_state_is_named_where_only_one_is_converted(cli: Any) -> None:
    torch.save({"model": {"w": base}, "ema": {"w": base + 1}}, "in 1.pt")
    assert cli("convert 'in 1.pt' out.pt").err == ""
    assert "state: 'model'; also available: --state ema" in cli("convert 'in 1.pt' a.safetensors").err
    assert "--state ema" in cli("convert 'in 1.pt' out.pt --force --dtype fp16").err
    ran = cli("convert 'in 1.pt' out.pt --force --state ema")
    hint = "hint: for that state alone: ckpttool slim --state ema 'in 1.pt' out.pt"
    assert (ran.code, ran.err.splitlines()[1]) == (2, hint)
    assert cli("convert 'in 1.pt' out.pt --force --state ema --dtype fp16").code == 0
    cli("convert 'in 1.pt' b.safetensors --state ema --dtype fp16")
    assert torch.equal(load_file("b.safetensors")["w"], (base + 1).half())


def test_another_name_of_the_very_dict_that_changes_is_told(cli: Any) -> None:
    state = {"w": base, "b": base + 1}
    torch.save({"model": state, "ema": state, "epoch": 3}, "in 2.pt")
    ran = cli("convert 'in 2.pt' out.pt --exclude b")
    said = ["'ema' is the same dict as 'model', and changed with it", "left out: b"]
    assert (ran.code, ran.err.splitlines()[-2:]) == (0, said)
    assert "same dict" not in cli("convert 'in 2.pt' whole.pt --drop epoch").err


# --complex


def test_complex_tensors_are_split_and_joined(cli: Any) -> None:
    torch.save({"z": torch.complex(base, -base), "w": base}, "in.pt")
    ran = cli("convert in.pt split.safetensors --complex split --dtype bf16")
    assert "converted torch-zip, 1 complex tensor split, 3 tensors cast to bfloat16 -> " in ran.out
    assert torch.equal(load_file("split.safetensors")["z.imag"], -base.bfloat16())
    assert cli("convert in.pt plain.safetensors --complex split").code == 0
    ran = cli("convert plain.safetensors joined.pt --complex join")
    assert "1 complex tensor joined" in ran.out
    assert torch.equal(torch.load("joined.pt")["z"], torch.complex(base, -base))


# Ties.


def test_ties_and_copies_are_named(cli: Any) -> None:
    torch.save({"embed": base, "head": base, "row": base[0]}, "in.pt")
    assert cli("convert in.pt out.safetensors --json").json["tied"] == ["head"]
    ran = cli("convert in.pt out.safetensors --force")
    assert "written once, with the tie in the metadata: head" in ran.err
    assert "written once per name, though they share memory: row" in ran.err
    ran = cli("convert in.pt out.safetensors --force --keep-copies")
    assert ran.err == "written once per name, though they share memory: head, row\n"


# Where from and where to.


def test_to_sets_the_format_and_takes_any_case_as_dtype_does(cli: Any) -> None:
    assert cli("convert in.pt weights --to safetensors").code == 0
    assert sorted(load_file("weights")) == sorted(STATE)
    assert cli("convert in.pt out --to onnx").code == 2
    assert cli("convert in.pt out --dtype BF16 --to Safetensors --json").json["format"] == "safetensors"
    assert load_file("out")["stem.bias"].dtype == torch.bfloat16


def test_a_file_is_converted_from_pipe_to_pipe(process: Any) -> None:
    ran = process("convert", "in.pt", "-", "--full", "--to", "safetensors")
    assert "optimizer.state.0.m" in load(ran.stdout)
    back = process("convert", "-", "-", "--to", "torch-zip", input=ran.stdout)
    assert_same(torch.load("in.pt"), torch.load(io.BytesIO(back.stdout)))


def test_permute_reshape_and_tie_change_the_layout(cli: Any) -> None:
    torch.save({"a.weight": base, "b.weight": base + 1, "c": torch.arange(6)}, "in.pt")
    flags = "--permute *.weight=1,0 --reshape c=2,3,1 --tie head=a.weight"
    ran = cli(f"convert in.pt out.safetensors {flags}")
    assert ran.code == 0 and "2 tensors permuted, 1 tensor reshaped, 1 name tied" in ran.out
    assert "written once, with the tie in the metadata: head" in ran.err
    shapes = {name: [*value.shape] for name, value in load_file("out.safetensors").items()}
    assert shapes == {"a.weight": [4, 3], "b.weight": [4, 3], "c": [2, 3, 1]}


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--dtype int8", 2, ["--dtype int8: not a dtype to cast to", "bf16"]),
        ("--dtype fp32", 1, ["no tensor to cast"]),
        ("--only body.*", 1, ["no key matches 'body.*'", "first key is 'w'"]),
        ("--drop scheduler", 1, ["holds nothing named 'scheduler'", "ckpttool inspect"]),
        ("--complex both", 2, ["--complex"]),
        ("--complex split", 3, ["'z' would be split into 'z.real', which already exists"]),
        ("--permute w=0,0", 2, ["0,0 is not a permutation of the 2 axes of 'w'"]),
        ("--permute w=1,x", 2, ["'1,x' is not a shape"]),
        ("--reshape w", 2, ["'w' is not two parts separated by ="]),
        ("--reshape w=5", 2, ["'w' has 12 elements, and 5 5"]),
        ("--tie w=w", 3, ["'w' would be another name of 'w', but already exists"]),
        ("--tie x=y", 1, ["no tensor is named 'y'"]),
        ("--permute x*=1,0", 1, ["no tensor's key matches 'x*'"]),
    ],
)
def test_an_impossible_change_is_refused(flags: str, code: int, said: Any, cli: Any) -> None:
    torch.save({"w": base, "z": torch.complex(base, base), "z.real": base}, "in.pt")
    ran = cli(f"convert in.pt out.pt {flags}")
    assert (ran.code, ran.out) == (code, "") and all(words in ran.err for words in said)
    assert not os.path.exists("out.pt")


# The text of a safetensors header.


@pytest.mark.parametrize("output", ["out.safetensors", "shards/"])
def test_text_is_added_to_the_header(output: str, cli: Any) -> None:
    save_file({"w": torch.ones(2)}, "in.safetensors", metadata={"who": "me", "when": "then"})
    ran = cli(f"convert in.safetensors {output} --metadata format=pt --metadata who=a=b")
    assert (ran.code, ran.err) == (0, "")
    (file,) = Path(output).glob("*.safetensors") if output == "shards/" else [output]
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "who": "a=b", "when": "then"}


@pytest.mark.parametrize(
    ("output", "given", "said"),
    [
        ("o.pt", "format=pt", "--metadata: torch-zip has no place for it"),
        ("o.safetensors", "format", "'format' is not two parts separated by ="),
        (
            "o.safetensors",
            "stem.b=stem.bias",
            "'stem.b' would be read as another name of the tensor 'stem.bias'",
        ),
        ("o.safetensors", "ckpttool.full={}", "is what --full keeps"),
    ],
)
def test_metadata_that_has_no_place_or_another_meaning_is_refused(
    output: str, given: str, said: str, cli: Any
) -> None:
    ran = cli(f"convert in.pt {output} --metadata", given)
    assert ran.code == 2 and said in ran.err
    assert not os.path.exists(output)


def test_a_checkpoint_without_a_tensor_is_said_to_hold_none(cli: Any) -> None:
    torch.save({}, "none.pt")
    ran = cli("convert none.pt none.safetensors")
    assert (ran.code, ran.err) == (0, "none.pt holds no tensor\n")
    assert "it holds no tensor" in cli("strip-prefix none.safetensors out.safetensors").err


@pytest.mark.parametrize("name", ["f32", "F32", "F16", "BF16", "f64"])
def test_dtype_takes_the_spellings_of_safetensors(name: str, cli: Any) -> None:
    save_file({"w": torch.ones(2, dtype=torch.float64 if name != "f64" else torch.float32)}, "w.safetensors")
    assert cli(f"convert w.safetensors out.safetensors --dtype {name}").code == 0
    with safe_open("out.safetensors", "pt") as file:
        assert file.get_slice("w").get_dtype() == name.upper()
