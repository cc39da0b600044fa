"""ckpttool add-prefix: the inverse of strip-prefix."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.comparing import assert_same


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


def test_json_has_the_fields_that_scripts_rely_on(cli: Any, tmp_path: Path) -> None:
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
