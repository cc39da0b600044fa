"""Folders of Lightning and Megatron, recorded by `tests/support/framework_runs.py`, against their tools."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import framework_runs
from tests.support.running import Ran

Cli = Callable[..., Ran]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Unpack the recorded folders."""
    with tarfile.open(framework_runs.RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def same(a: Any, b: Any) -> bool:
    """Return whether two trees are equal, whatever the order of keys."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def test_lightning_s_folder_becomes_what_lightning_s_own_merger_makes(runs: Path, cli: Cli) -> None:
    assert cli("merge", runs / "lightning-fsdp", runs / "out.ckpt").code == 0
    wanted = torch.load(runs / "lightning-fsdp-whole.pt")
    assert {"state_dict", "optimizer_states", "loops"} < wanted.keys()
    assert same(torch.load(runs / "out.ckpt"), wanted)


def test_lightning_s_folder_of_fsdp2_becomes_a_whole_checkpoint_of_lightning(runs: Path, cli: Cli) -> None:
    assert cli("merge", runs / "lightning-fsdp2", runs / "out.ckpt").code == 0
    found, wanted = torch.load(runs / "out.ckpt"), torch.load(runs / "lightning-fsdp2-whole.pt")
    assert {key: same(found[key], wanted[key]) for key in wanted} == dict.fromkeys(wanted, True)
    assert (found["epoch"], found["global_step"]) == (1, 4)


def test_a_folder_of_fabric_keeps_the_names_of_its_user(runs: Path, cli: Cli) -> None:
    folder = runs / "lightning-fsdp"
    meta = torch.load(folder / "meta.pt")
    del meta["pytorch-lightning_version"]  # Fabric writes none
    torch.save(meta, folder / "meta.pt")
    assert cli("merge", folder, runs / "out.ckpt").code == 0
    assert {"model", "optimizer_0", "loops"} < torch.load(runs / "out.ckpt").keys()


def test_what_lies_in_lightning_s_meta_and_in_the_folder_is_an_error(runs: Path, cli: Cli) -> None:
    folder = runs / "lightning-fsdp"
    torch.save(torch.load(folder / "meta.pt") | {"state_dict": {}}, folder / "meta.pt")
    ran = cli("merge", folder, runs / "out.ckpt")
    assert (ran.code, "meta.pt: has 'state_dict', and so has" in ran.err) == (3, True)


def test_megatron_s_folder_is_what_one_rank_of_megatron_loads(runs: Path, cli: Cli) -> None:
    ran = cli("merge", runs / "megatron", runs / "out.pt")
    assert (ran.code, "common.pt" in ran.err) == (0, True)
    found = torch.load(runs / "out.pt")
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert same(tensors, torch.load(runs / "megatron-whole.pt"))
