"""`--save-parts`: each rank's part in a folder, that the run goes on from and other programs read."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpttool.errors import Damaged
from tests.ranks import runs
from tests.support.run_log import entries_of
from train.checkpoint import files

SHARD = {"shard": True, "shard_blocks": ("Block",)}
PARTS = {**SHARD, "save_parts": True, "ema": 0.7}


def folders(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.endswith(".dcp"))


def folder_of(file: Path) -> Path:
    return file.parent / torch.load(file, weights_only=True)["parts"]["folder"]


@pytest.fixture(scope="module")
def run(run_ranks, tmp_path_factory) -> Path:
    """A run on two ranks with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("parts")
    said = run_ranks(2, runs.run, runs.steady, str(folder), {**PARTS, **runs.OFTEN})[0]
    assert "Error" not in said, said
    return folder


@pytest.fixture(scope="module")
def gathered(run_ranks, tmp_path_factory) -> Path:
    """The same run, gathered into files."""
    folder = tmp_path_factory.mktemp("files")
    run_ranks(2, runs.run, runs.steady, str(folder), {**PARTS, "save_parts": False, **runs.OFTEN})
    return folder


def test_the_file_holds_no_tensor_of_the_model_and_names_a_folder_with_a_file_of_each_rank(run):
    state = torch.load(run / "last.pt", weights_only=True)
    assert (state["model"], state["optimizer"]["state"], state["ema"]["averages"]) == ({}, {}, {})
    assert set(state["parts"]["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert sorted(os.listdir(folder_of(run / "last.pt"))) == sorted(state["parts"]["files"])


@pytest.mark.parametrize("reader", ["ckpttool", "torch"])
def test_the_folder_holds_the_weights_of_the_gathered_file(run, gathered, tmp_path, cli, reader):
    folder, out = folder_of(run / "last.pt"), tmp_path / "out.pt"
    if reader == "torch":
        dcp_to_torch_save(folder, out)
        found = torch.load(out, weights_only=True)["model"]
    else:
        ran = cli("merge", folder, out.with_suffix(".safetensors"))
        assert ran.code == 0, ran.err
        found = load_file(out.with_suffix(".safetensors"))
    expected = runs.read(gathered / "last.pt")["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_the_file_is_evaluated_by_the_folder_that_it_names(run, gathered):
    assert files.parts_named_in(str(run / "last.pt")) == str(folder_of(run / "last.pt"))
    assert files.parts_named_in(str(gathered / "last.pt")) == str(gathered / "last.pt")


@pytest.mark.parametrize("name", ["../elsewhere", "step-000001-abcd.dcp/..", 3])
def test_a_folder_elsewhere_is_not_followed(tmp_path, name):
    parts_of_run = {"parts": {"folder": name, "files": {}}, "digests": {}, "progress": {}}
    torch.save(parts_of_run, tmp_path / "last.pt")
    with pytest.raises(Damaged, match=r"parts\.folder is"):
        files.parts_named_in(str(tmp_path / "last.pt"))


def test_each_checkpoint_has_a_folder_and_folders_without_one_are_removed(run_ranks, tmp_path):
    settings = {**PARTS, "save_every": runs.OFTEN["save_every"], "keep": 2}
    run_ranks(2, runs.run, runs.steady, str(tmp_path), settings)
    files = [tmp_path / name for name in os.listdir(tmp_path) if name.endswith(".pt")]
    assert len(files) == 4  # last, best and two numbered ones
    assert folders(tmp_path) == sorted({folder_of(file).name for file in files})


MOVES = {
    "the same ranks": (2, PARTS, 0.0),
    "into files": (2, {**PARTS, "save_parts": False}, 0.0),
    "three ranks": (3, PARTS, 2e-6),
    "groups": (4, {**PARTS, "mesh": "2x2"}, 2e-6),
    "one rank without --shard": (1, {"ema": 0.7}, 2e-6),
}


@pytest.mark.covered(lambda move: move not in ("into files", "three ranks"))
@pytest.mark.parametrize("move", MOVES)
def test_a_run_goes_on_from_the_parts_of_other_ranks_and_without_shard(
    run_ranks, tmp_path, run, gathered, move
):
    size, settings, bound = MOVES[move]
    stopped = {"resume": str(run / "step-000002.pt"), **settings}
    said = run_ranks(size, runs.run, runs.steady, str(tmp_path / "rest"), stopped)[0]
    assert "continues from" in said, said
    expected, found = (runs.read(folder / "last.pt") for folder in (gathered, tmp_path / "rest"))
    if "parts" in found:
        whole = tmp_path / "whole.pt"
        dcp_to_torch_save(tmp_path / "rest" / found["parts"]["folder"], whole)
        tree = torch.load(whole, weights_only=True)
        found = {"model": tree["model"], "ema": {"averages": tree["ema"]["averages"]}}
    assert runs.largest_difference(expected, found) <= bound


# ---- what goes wrong ------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    folder = folder_of(path)
    if how == "one bit":
        raw = bytearray((folder / "__1_0.distcp").read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / "__1_0.distcp").write_bytes(raw)
    elif how == "no part of rank 1":
        (folder / "__1_0.distcp").unlink()
    else:
        (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")


DAMAGES = {
    "one bit": "its part .*__1_0.distcp is not the saved one",
    "no part of rank 1": "its part .*__1_0.distcp can't be read",
    "another index": "its part .*.metadata is not the saved one",
}


@pytest.mark.covered(lambda how: how != "one bit")
@pytest.mark.parametrize("how", DAMAGES)
def test_a_checkpoint_with_a_damaged_part_is_passed_over_for_the_one_before(run_ranks, tmp_path, how):
    settings = {**PARTS, "save_every": runs.OFTEN["save_every"], "keep": 2, "epochs": 1}
    run_ranks(2, runs.run, runs.steady, str(tmp_path), settings)
    (tmp_path / "best.pt").unlink()
    damage(tmp_path / "last.pt", how)
    said = run_ranks(2, runs.run, runs.steady, str(tmp_path), {**PARTS, "resume": "auto"})[0]
    assert f"passed over {tmp_path}/last.pt" in said
    assert f"continues from {tmp_path}/step-000002.pt" in said


def run_with_a_full_disk(rank: int, size: int, folder: str, save: str, *, stays: bool = False) -> str:
    """Run where the disk of rank 1 refuses the second save; if it `stays` full, all later ones too."""
    written, saves = files.Parts.write, iter(range(99))

    def write(self: files.Parts) -> None:
        number = next(saves)
        if rank == 1 and (number == 1 or (stays and number > 1)):
            with pytest.MonkeyPatch.context() as patch:

                def refuse(*_: Any, **__: Any) -> None:
                    raise OSError(errno.ENOSPC, "No space left on device")

                patch.setattr(os, "makedirs", refuse)
                written(self)
            return
        written(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Parts, "write", write)
        return runs.run(rank, size, runs.steady, folder, {**PARTS, **runs.OFTEN, "save": save})


@pytest.mark.covered(lambda save: save == "sync")
@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_full_disk_of_one_rank_fails_one_save_and_not_the_run(run_ranks, tmp_path, save):
    run_ranks(2, run_with_a_full_disk, str(tmp_path), save)
    (failed,) = (entry for entry in entries_of(tmp_path) if entry.get("event") == "save failed")
    assert "no space left on device" in failed["error"]
    assert not (tmp_path / "step-000002.pt").exists()
    assert runs.read(tmp_path / "last.pt")["progress"]["global_step"] == runs.STEPS
    assert len(folders(tmp_path)) == runs.STEPS - 1


def test_what_a_full_disk_has_cut_short_is_removed_at_once(run_ranks, tmp_path):
    run_ranks(2, partial(run_with_a_full_disk, stays=True), str(tmp_path), "sync")
    assert folders(tmp_path) == [folder_of(tmp_path / "step-000001.pt").name]


def test_starting_over_removes_the_folders(run_ranks, tmp_path):
    run_ranks(2, runs.run, runs.steady, str(tmp_path), {**PARTS, "epochs": 1})
    before = folders(tmp_path)
    run_ranks(2, runs.run, runs.steady, str(tmp_path), {**SHARD, "epochs": 1, "force": True})
    assert before
    assert folders(tmp_path) == []


def test_a_users_folder_of_a_similar_name_stays(tmp_path):
    for name in ("step-000001.dcp", "step-000001-abcd.dcp.bak", "step-000001-abcd.dcp"):
        (tmp_path / name).mkdir()
    files.remove_unnamed(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step-000001-abcd.dcp.bak", "step-000001.dcp"]


def test_torch_loads_the_folder_into_a_model_of_its_own(run):
    model = runs.steady()
    state = {"model": {f"module.{name}": torch.empty_like(v) for name, v in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder_of(run / "last.pt"))
    model.load_state_dict({name.removeprefix("module."): value for name, value in state["model"].items()})


def test_folders_stay_while_a_checkpoint_that_may_name_them_cannot_be_read(tmp_path):
    (tmp_path / "step-000001-abcd.dcp").mkdir()
    torch.save({"parts": {"folder": "step-000001-abcd.dcp"}}, tmp_path / "last.pt")
    (tmp_path / "last.pt").write_bytes((tmp_path / "last.pt").read_bytes()[:-40])
    files.remove_unnamed(str(tmp_path))
    assert folders(tmp_path) == ["step-000001-abcd.dcp"]


def test_a_file_that_is_no_checkpoint_of_this_run_keeps_its_own_folder(tmp_path):
    """Some program's `parts` are its own."""
    torch.save({"parts": ["a"], "w": torch.ones(2)}, tmp_path / "other.pt")
    assert files.parts_named_in(str(tmp_path / "other.pt")) == str(tmp_path / "other.pt")


def test_a_damaged_part_is_not_scored(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    damage(tmp_path / "run" / "last.pt", "one bit")
    with pytest.raises(Damaged, match="is not the saved one"):
        files.parts_named_in(str(tmp_path / "run" / "last.pt"))


@pytest.mark.parametrize("how", [None, *DAMAGES])
def test_the_tool_says_where_the_tensors_are_and_verifies_them(run, tmp_path, cli, how):
    shutil.copytree(run, tmp_path / "run")
    last = tmp_path / "run" / "last.pt"
    assert f"state       in {folder_of(last).name}, beside it (--save-parts)" in cli("inspect", last).out
    for command in "strip-prefix", "merge":
        assert f"name that: {folder_of(last)}" in cli(command, last, tmp_path / "out.pt").err
    assert f"name that: {folder_of(last)}" in cli("delta", last, last, tmp_path / "one.safetensors").err
    assert f"not compared, of {last}: its tensors, in {folder_of(last).name}" in cli("diff", last, last).err
    if how:
        damage(last, how)
    ran = cli("verify", last)
    assert ran.code == (1 if how else 0), ran.out + ran.err
    assert not how or ".dcp/" in ran.out + ran.err
