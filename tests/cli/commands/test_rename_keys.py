"""ckpttool rename-keys and add-prefix, as people and scripts use them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.comparing import assert_same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"backbone.0.weight": torch.ones(2), "head.bias": torch.zeros(1)}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def keys(path: Path) -> list[str]:
    return list(torch.load(path))


def test_one_line_says_how_many_keys_and_the_others_are_named(path: Path, cli: Any) -> None:
    out = path.parent / "out.pt"
    ran = cli("rename-keys", path, out, "--map", r"^backbone\.=model.")
    assert (ran.code, ran.err) == (0, "kept as they were: head.bias\n")
    assert ran.out.startswith(f"renamed 1 of 2 keys -> {out} (")
    assert keys(out) == ["model.0.weight", "head.bias"]


def test_json_has_the_fields_that_scripts_rely_on(path: Path, cli: Any) -> None:
    ran = cli("rename-keys", path, path.parent / "out.safetensors", "--map", "head=tail", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json.keys() >= {"output", "keys", "renamed", "left_out", "bytes", "seconds"}
    assert (ran.json["keys"], ran.json["renamed"], ran.json["left_out"]) == (2, 1, [])
    assert set(load_file(path.parent / "out.safetensors")) == {"backbone.0.weight", "tail.bias"}


@pytest.mark.parametrize(
    ("maps", "wanted"),
    [
        (["backbone=b", "^b=c"], ["c.0.weight", "head.bias"]),
        ([r"(\w+)\.(\w+)$=\2.\1"], ["backbone.weight.0", "bias.head"]),
        (["e=E", "E=="], ["backbon=.0.w=ight", "h=ad.bias"]),
        ([r"(?<=backbone)\.0=_zero"], ["backbone_zero.weight", "head.bias"]),
        ([r"(?=bias)=the_"], ["backbone.0.weight", "head.the_bias"]),
        ([r"[=a]=A"], ["bAckbone.0.weight", "heAd.biAs"]),
        ([r"\.bias="], ["backbone.0.weight", "head"]),
        (["$=.x=1"], ["backbone.0.weight.x=1", "head.bias.x=1"]),
    ],
)
def test_maps_are_applied_in_order(maps: list[str], wanted: list[str], path: Path, cli: Any) -> None:
    arguments = [word for each in maps for word in ("--map", each)]
    assert cli("rename-keys", path, path.parent / "out.pt", *arguments).code == 0
    assert keys(path.parent / "out.pt") == wanted


MALFORMED = dict.fromkeys(
    ["backbone", "=x", "", "(=x", "[a=b", "(?=x", "*=y"], "'{}' is not REGEX=REPLACEMENT"
)
MALFORMED |= {"(a=x": "'{}' is not REGEX=REPLACEMENT: missing ), unterminated subpattern at position 0"}
MALFORMED |= dict.fromkeys([r"head=\1", r"(head)=\g<x>", r"head=\q"], "error: --map: ")


@pytest.mark.parametrize(
    ("rule", "code", "said"),
    [
        *((rule, 2, said) for rule, said in MALFORMED.items()),
        ("^.*$=w", 3, "'backbone.0.weight' and 'head.bias' would both be named 'w'"),
        ("stem=x", 1, "no key would change\nhint: the first key is 'backbone.0.weight'"),
    ],
)
def test_a_rule_that_can_t_be_applied(rule: str, code: int, said: str, path: Path, cli: Any) -> None:
    ran = cli("rename-keys", path, path.parent / "out.pt", "--map", rule)
    assert ran.code == code and said.format(rule) in ran.err
    assert not (path.parent / "out.pt").exists()


def test_without_a_map_it_is_a_wrong_call(path: Path, cli: Any) -> None:
    ran = cli("rename-keys", path, path.parent / "out.pt")
    assert ran.code == 2 and "--map" in ran.err


def test_only_the_state_that_is_named_is_renamed(cli: Any, tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(1)}, "ema": {"a": torch.ones(1)}}, tmp_path / "in.pt")
    cli("rename-keys", tmp_path / "in.pt", tmp_path / "out.pt", "--map", "a=b", "--state", "ema")
    loaded = torch.load(tmp_path / "out.pt")
    assert (list(loaded["model"]), list(loaded["ema"])) == (["a"], ["b"])


def test_every_key_gets_the_prefix(cli: Any, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "module.b": torch.zeros(1)}, tmp_path / "in.safetensors")
    ran = cli("add-prefix", tmp_path / "in.safetensors", tmp_path / "out.pt")
    assert ran.out.startswith(f"added 'module.' to 2 of 2 keys -> {tmp_path}/out.pt (")
    assert set(torch.load(tmp_path / "out.pt")) == {"module.a", "module.module.b"}


def test_the_way_there_and_back_is_the_file_again(cli: Any, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(net.named_parameters(), 0.1).state_dict()
    torch.save({"model": net.state_dict(), "optimizer": optimizer, "epoch": 1}, tmp_path / "a.pt")
    assert cli("add-prefix", tmp_path / "a.pt", tmp_path / "b.pt", "--prefix", "x.y.").code == 0
    assert cli("strip-prefix", tmp_path / "b.pt", tmp_path / "c.pt", "--prefix", "x.y.").code == 0
    assert_same(torch.load(tmp_path / "a.pt"), torch.load(tmp_path / "c.pt"))


def test_json_has_the_fields_that_scripts_rely_on_of_add_prefix(cli: Any, tmp_path: Path) -> None:
    torch.save(OrderedDict(a=torch.ones(1)), tmp_path / "in.pt")
    found = cli("add-prefix", tmp_path / "in.pt", tmp_path / "out.safetensors", "--json").json
    assert (found["keys"], found["renamed"], found["left_out"]) == (1, 1, [])
    assert found["bytes"] == (tmp_path / "out.safetensors").stat().st_size
    assert list(load_file(tmp_path / "out.safetensors")) == ["module.a"]


def test_an_empty_prefix_is_a_usage_error(cli: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "in.pt")
    assert cli("add-prefix", tmp_path / "in.pt", tmp_path / "out.pt", "--prefix", "").code == 2
    assert not (tmp_path / "out.pt").exists()


def test_metadata_of_a_safetensors_file_stays(cli: Any, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "in.safetensors", metadata={"format": "pt"})
    cli("add-prefix", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    save_file({"module.a": torch.ones(1)}, tmp_path / "oracle", metadata={"format": "pt"})
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "oracle").read_bytes()


def test_a_prefix_without_a_dot_is_noted(cli: Any, tmp_path: Path) -> None:
    torch.save({"emb.weight": torch.ones(1)}, tmp_path / "in.pt")
    ran = cli("add-prefix", tmp_path / "in.pt", tmp_path / "out.pt", "--prefix", "model")
    assert (ran.code, ran.err.strip()) == (
        0,
        "the prefix ends in no dot, so keys are like 'modelemb.weight'; with a dot: --prefix model.",
    )
    assert cli("add-prefix", tmp_path / "in.pt", tmp_path / "out.pt", "--force").err == ""
