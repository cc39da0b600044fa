"""ckpttool inspect: what is in a file, for people and for scripts."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.crafting import call, dict_of, name, storage, tensor, text, torch_zip
from tests.support.running import ROOT

ONE = torch.ones(1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weight = torch.ones(2, 3)
    state = OrderedDict({"module.fc.weight": weight, "module.head.weight": weight, "n": torch.tensor(1)})
    tree = {"epoch": 3, "model": state, "ema": {"x": ONE}, "args": argparse.Namespace(lr=0.1)}
    torch.save(tree | {"nan": float("nan")}, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def test_the_page_shows_format_state_prefix_modules_and_the_rest(checkpoint: Path, cli: Any) -> None:
    ran = cli("inspect", checkpoint)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"{checkpoint}: torch-zip, ")
    assert "  state       'model': 3 tensors, 7 parameters" in lines
    assert "  dtypes      2 float32, 1 int64" in lines
    assert "  also        --state ema" in lines
    assert "  tied        module.fc.weight = module.head.weight" in lines
    assert "  unknown     argparse.Namespace (kept inert, never imported)" in lines
    assert any(line.startswith("  prefix      'module.' on 2 of 3 keys") for line in lines)
    rows = [line.split() for line in lines]
    assert ["fc", "6", "24", "bytes", "weight", "2×3"] in rows
    assert ["head", "0", "0", "bytes", "weight", "2×3"] in rows
    assert ["n", "1", "8", "bytes", "scalar", "int64"] in rows
    assert ["epoch", "3"] in rows
    assert ["args.lr", "0.1"] in rows


def test_one_line_a_tensor_for_grep_and_cut(checkpoint: Path, cli: Any) -> None:
    assert cli("inspect", checkpoint, "--tensors").out.splitlines() == [
        "model.module.fc.weight\tfloat32\t[2,3]\t24\t",
        "model.module.head.weight\tfloat32\t[2,3]\t24\tmodel.module.fc.weight",
        "model.n\tint64\t[]\t8\t",
        "ema.x\tfloat32\t[1]\t4\t",
    ]


def test_stats_measures_every_tensor(checkpoint: Path, cli: Any) -> None:
    rows = [line.split() for line in cli("inspect", checkpoint, "--stats").out.splitlines()]
    assert rows[0] == ["tensor", "dtype", "shape", "min", "max", "mean", "std"]
    assert rows[1] == ["model.module.fc.weight", "float32", "2×3", "1", "1", "1", "0"]
    found = cli("inspect", checkpoint, "--stats", "--json").json["tensors"]
    assert found[2]["stats"] == {"minimum": 1, "maximum": 1, "mean": 1.0, "deviation": 0.0, "non_finite": 0}


def test_values_that_are_not_finite_have_a_column_where_there_are_any(tmp_path: Path, cli: Any) -> None:
    torch.save({"a": torch.tensor([float("nan"), 2.0]), "b": ONE}, tmp_path / "f.pt")
    lines = cli("inspect", tmp_path / "f.pt", "--stats").out.splitlines()
    assert lines[0].endswith("not finite") and [line.split()[-1] for line in lines[1:]] == ["1", "0"]


def test_tensors_for_grep_have_their_figures_too_when_asked(checkpoint: Path, cli: Any) -> None:
    lines = cli("inspect", checkpoint, "--tensors", "--stats").out.splitlines()
    assert (lines[1], len(lines)) == ("model.module.fc.weight\tfloat32\t[2,3]\t24\t\t1\t1\t1\t0\t0", 5)


def test_json_names_the_class_of_a_pickled_model(tmp_path: Path, cli: Any) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "f.pt")
    found = cli("inspect", tmp_path / "f.pt", "--json").json
    assert (found["model"], found["state_bytes"]) == ("torch.nn.modules.linear.Linear", 24)


def test_json_has_the_fields_that_scripts_rely_on(checkpoint: Path, cli: Any) -> None:
    ran = cli("inspect", checkpoint, "--json")
    found = ran.json
    assert ran.err == ""
    assert found["path"] == str(checkpoint)
    assert (found["format"], found["bytes"]) == ("torch-zip", checkpoint.stat().st_size)
    assert (found["state"], found["parameters"]) == ("model", 7)
    prefixes = [(prefix["prefix"], prefix["keys"], prefix["of"]) for prefix in found["prefixes"]]
    assert prefixes == [("module.", 2, 3)]
    first = {k: found["tensors"][0][k] for k in ("name", "dtype", "shape", "nbytes")}
    assert first == {"name": "model.module.fc.weight", "dtype": "float32", "shape": [2, 3], "nbytes": 24}
    assert {"name": "epoch", "type": "int", "value": 3} in found["other"]
    assert found["unknown"] == ["argparse.Namespace"]


def test_json_has_no_numbers_that_json_lacks(checkpoint: Path, cli: Any) -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    found = json.loads(cli("inspect", checkpoint, "--json").out, parse_constant=refuse)
    assert {"name": "nan", "type": "float", "value": "nan"} in found["other"]


def test_json_of_a_file_without_a_state(tmp_path: Path, cli: Any) -> None:
    torch.save([1], tmp_path / "f.pt")
    assert cli("inspect", tmp_path / "f.pt", "--json").json["state"] is None
    torch.save({"a": ONE}, tmp_path / "g.pt")
    assert cli("inspect", tmp_path / "g.pt", "--json").json["state"] == ""


def test_state_selects_what_is_shown(checkpoint: Path, cli: Any) -> None:
    assert cli("inspect", checkpoint, "--state", "ema", "--json").json["state"] == "ema"
    ran = cli("inspect", checkpoint, "--state", "teacher")
    assert ran.code == 3 and "hint: there are: model, ema" in ran.err


def test_quiet_prints_nothing(checkpoint: Path, cli: Any) -> None:
    ran = cli("inspect", checkpoint, "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_every_format_is_named(tmp_path: Path, cli: Any) -> None:
    torch.save({"a": ONE}, tmp_path / "zip")
    torch.save({"a": ONE}, tmp_path / "legacy", _use_new_zipfile_serialization=False)
    save_file({"a": ONE}, tmp_path / "safe")
    names = [cli("inspect", tmp_path / f, "--json").json["format"] for f in ("zip", "legacy", "safe")]
    assert names == ["torch-zip", "torch-legacy", "safetensors"]


def test_a_public_checkpoint_of_2018(resnet20: Path, cli: Any) -> None:
    found = cli("inspect", resnet20, "--json").json
    assert (found["format"], found["state"], found["parameters"]) == ("torch-legacy", "state_dict", 269722)
    assert found["prefixes"][0]["prefix"] == "module."


def test_the_page_in_the_readme_is_what_is_printed(resnet20: Path, cli: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(resnet20.parent)
    command = f"inspect {resnet20.name} --depth 1"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"    $ ckpttool {command}\n" in text
    told = text.partition(f"    $ ckpttool {command}\n")[2].partition("    $ ")[0]
    assert textwrap.dedent(told).strip() == cli(*command.split()).out.strip()


def test_a_file_is_read_from_standard_input(checkpoint: Path, process: Any) -> None:
    with open(checkpoint, "rb") as file:
        ran = process("inspect", "-", "--json", stdin=file)
    assert json.loads(ran.stdout)["state"] == "model"
    ran = process("inspect", "-", "--json", input=checkpoint.read_bytes())
    assert (ran.returncode, json.loads(ran.stdout)["path"]) == (0, "-")


ESCAPES = "\x1b]0;title\x07\x1b[2J\r\n\u202e\ud800"


def test_nothing_from_the_file_steers_the_terminal(tmp_path: Path, cli: Any) -> None:
    """In keys, values, names of classes, and metadata."""
    body = dict_of(
        {
            ESCAPES: tensor(storage(1), (1,)),
            "b" + ESCAPES: text(ESCAPES),
            "c": call(name("evil\x1b[2J", "C\x07")) + dict_of({ESCAPES: text(ESCAPES)}) + b"b",
            "d": name("evil\x1b[2J", "C\x07"),
            "e" + ESCAPES: dict_of({ESCAPES: tensor(storage(1), (1,))}),
        }
    )
    path = torch_zip(tmp_path / "f.pt", body, {"0": bytes(4)})
    ran = cli("inspect", path)
    assert ran.code == 0
    assert not any(c in ran.out for c in "\x1b\x07\r\u202e\ud800")
    assert r"\x1b]0;title\x07\x1b[2J\r\n\u202e\ud800" in ran.out
    assert cli("inspect", path, "--json").json["unknown"] == ["evil\x1b[2J.C\x07"]


def test_metadata_does_not_steer_the_terminal(tmp_path: Path, cli: Any) -> None:
    save_file({"a": ONE}, tmp_path / "f", metadata={"\x1b[2J": "\x1b[2J\n"})
    ran = cli("inspect", tmp_path / "f")
    assert "\x1b" not in ran.out
    assert r"metadata    \x1b[2J: \x1b[2J\n" in ran.out


def test_colour_and_bars_are_not_for_pipes(checkpoint: Path, process: Any) -> None:
    ran = process("inspect", checkpoint)
    assert b"\x1b" not in ran.stdout + ran.stderr
    assert ran.stderr == b""


def test_an_empty_state_is_shown(tmp_path: Path, cli: Any) -> None:
    torch.save({}, tmp_path / "f.pt")
    assert "the file itself: 0 tensors, 0 parameters" in cli("inspect", tmp_path / "f.pt").out


def test_other_states_are_ready_to_paste_and_none_is_a_score_or_a_generator(tmp_path: Path, cli: Any) -> None:
    tree = {"state_dict": {"a": ONE}, "rng": torch.get_rng_state(), "best": torch.tensor(0.5)}
    torch.save(tree | {"cuda": {"rng": torch.get_rng_state()}, "loop": {"score": ONE[0]}}, tmp_path / "f.pt")
    assert "--state" not in cli("inspect", tmp_path / "f.pt").out
    torch.save(tree | {"w": ONE, "v": ONE, "my copy": {"a": ONE, "b": ONE}}, tmp_path / "f.pt")
    lines = cli("inspect", tmp_path / "f.pt").out.splitlines()
    others = [line.split(maxsplit=1)[1] for line in lines if "--state" in line]
    assert others == ["--state ''", "--state 'my copy'"]
    ran = cli("slim", tmp_path / "f.pt", tmp_path / "g.pt")
    assert "state: 'state_dict'; also available: --state '', --state 'my copy'\n" in ran.err


def test_a_state_named_where_the_file_is_the_state(tmp_path: Path, cli: Any) -> None:
    torch.save({"a": ONE}, tmp_path / "f.pt")
    ran = cli("inspect", tmp_path / "f.pt", "--state", "model")
    assert (ran.code, ran.err.splitlines()[1]) == (3, "hint: the file itself is the state: leave out --state")


def test_tensors_beside_the_state_are_named_with_count_and_size(tmp_path: Path, cli: Any) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    callback = {"a": torch.zeros(4), "deep": {"b": torch.ones(2, 2)}}
    tree = {
        "run": {"state_dict": model.state_dict(), "cb": callback},
        "optimizer": optimizer.state_dict(),
        "queue": torch.zeros(7, dtype=torch.int64),
        "mixed": {"shadow": torch.zeros(3), "decay": 0.9},
    }
    torch.save(tree, tmp_path / "last.pt")
    lines = cli("inspect", tmp_path / "last.pt").out.partition("other contents\n")[2].splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["mixed.decay", "0.9"],
        ["run.cb", "2 tensors, 32 bytes"],
        ["queue", "1 tensor, 56 bytes"],
        ["mixed", "1 tensor, 12 bytes"],
    ]
    data = json.loads(cli("inspect", tmp_path / "last.pt", "--json").out)
    assert data["other_tensors"][0] == {"name": "run.cb", "tensors": 2, "nbytes": 32}
