"""Outputs that are folders: which format they get, and what they are never put in place of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ran
from safetensors.torch import save_file

import ckpttool

Cli = Callable[..., Ran]

TRAINING = {
    "model": {"module.a": torch.ones(2), "module.b": torch.zeros(3)},
    "optimizer": {"state": {"a": {"m": torch.ones(2)}}, "param_groups": [{"params": ["a"]}]},
    "epoch": 3,
}
FOLDERS = ["safetensors-sharded", "torch-sharded", "dcp"]
COMMANDS: dict[str, list[str]] = {
    "rename-keys": ["--map", "module=m"],
    "strip-prefix": [],
    "add-prefix": ["--prefix", "x."],
    "slim": [],
    "convert": [],
}


def folder_of(kind: str, path: Path) -> Path:
    """A folder of that format, named without a slash."""
    torch.save(TRAINING, path.parent / "in.pt")
    ckpttool.save(ckpttool.open(path.parent / "in.pt"), path, to=kind)
    return path


def names(checkpoint: ckpttool.Checkpoint) -> set[str]:
    return {name for name, _ in checkpoint.tensors()}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_is_changed_in_place_keeps_its_format(
    kind: str, command: str, cli: Cli, tmp_path: Path
) -> None:
    folder = folder_of(kind, tmp_path / "d")
    ran = cli(command, folder, folder, *COMMANDS[command], "--force", "--json")
    assert (ran.code, ran.json["format"]) == (0, kind)
    assert ckpttool.open(folder).format == kind


def test_a_dcp_folder_keeps_all_that_it_holds_when_its_keys_are_renamed(cli: Cli, tmp_path: Path) -> None:
    folder = folder_of("dcp", tmp_path / "d")
    ran = cli("strip-prefix", folder, folder, "--force", "--json")
    assert ran.json["left_out"] == []
    found = ckpttool.open(folder)
    assert names(found) == {"model.a", "model.b", "optimizer.state.a.m"}
    assert isinstance(found.tree, dict) and found.tree["epoch"] == 3


def test_a_full_dcp_folder_stays_full(cli: Cli, tmp_path: Path) -> None:
    torch.save({**TRAINING, 5: ["five"]}, tmp_path / "in.pt")
    ckpttool.save(ckpttool.open(tmp_path / "in.pt"), tmp_path / "d", to="dcp", full=True)
    assert cli("strip-prefix", tmp_path / "d", tmp_path / "d", "--force").code == 0
    found = ckpttool.open(tmp_path / "d")
    assert (found.format, found.full) == ("dcp", True)
    assert isinstance(found.tree, dict) and found.tree[5] == ["five"]


@pytest.mark.parametrize("kind", FOLDERS)
def test_an_output_that_is_a_folder_tells_the_format_unless_it_is_said(
    kind: str, cli: Cli, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    folder = folder_of(kind, tmp_path / "d")
    words = ["convert", tmp_path / "m.safetensors", folder, "--force"]
    assert cli(*words).code == 0
    assert ckpttool.open(folder).format == kind
    other = FOLDERS[FOLDERS.index(kind) - 1]
    assert cli(*words, "--to", other).code == 0
    assert ckpttool.open(folder).format == other


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_new_folder_is_of_the_input_s_format_where_the_command_is_not_about_formats(
    kind: str, is_there: bool, cli: Cli, tmp_path: Path
) -> None:
    folder = folder_of(kind, tmp_path / "d")
    for command, found in (("strip-prefix", kind), ("convert", "safetensors-sharded")):
        if is_there:
            (tmp_path / command).mkdir()
        assert cli(command, folder, f"{tmp_path / command}/", "--force").code == 0
        assert ckpttool.open(tmp_path / command).format == found


@pytest.mark.parametrize("more", [[], ["--force"], ["--force", "--dry-run"]], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_other_files_in_a_folder_are_told_at_once(
    in_place: bool, more: list[str], cli: Cli, tmp_path: Path
) -> None:
    folder = folder_of("safetensors-sharded", tmp_path / "d")
    (folder / "config.json").write_text("{}")
    ran = cli("convert", folder if in_place else tmp_path / "in.pt", folder, *more)
    assert ran.code == 2
    assert f"{folder}: exists already, and holds other files too (config.json)\n" in ran.err
    assert ran.err.endswith("hint: name a new folder, or a file in it\n")


def test_what_contradicts_itself_is_told_before_force_is_proposed(cli: Cli, tmp_path: Path) -> None:
    folder = folder_of("dcp", tmp_path / "d")
    ran = cli("convert", tmp_path / "in.pt", folder, "--shard-size", "5GB")
    assert ran.code == 2 and "a size of shards was given" in ran.err


def test_a_folder_may_be_put_where_a_link_leads_nowhere(cli: Cli, tmp_path: Path) -> None:
    torch.save(TRAINING, tmp_path / "in.pt")
    (tmp_path / "link").symlink_to("target")
    words: list[Any] = ["convert", tmp_path / "in.pt", tmp_path / "link", "--to", "torch-sharded"]
    assert "write it anyway with --force" in cli(*words).err
    assert cli(*words, "--force").code == 0
    assert os.listdir(tmp_path / "target")


def test_a_dry_run_knows_about_the_size_of_a_dcp_folder(cli: Cli, tmp_path: Path) -> None:
    torch.save(TRAINING, tmp_path / "in.pt")
    words: list[Any] = ["convert", tmp_path / "in.pt", tmp_path / "d", "--dry-run", "--to"]
    assert "(about 28 bytes, " in cli(*words, "dcp").out
    assert "(about" not in cli(*words, "torch-sharded").out
