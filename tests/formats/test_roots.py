"""Folders in which checkpoints lie: each layout that trainers leave, and what commands say of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.errors import SeveralCheckpoints, Unreadable, Unsupported
from tests.support.running import Ran
from tests.support.saved import refused

Cli = Callable[..., Ran]

STATE = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.zeros(2)}


def model(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(STATE, folder / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")


def in_one_file(folder: Path, tree: Any) -> ckpttool.Checkpoint:
    """Return a checkpoint whose file is gone before others look at the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tree, folder.parent / "in.pt")
    checkpoint = ckpttool.open(folder.parent / "in.pt")
    (folder.parent / "in.pt").unlink()
    return checkpoint


def dcp(folder: Path) -> None:
    ckpttool.save(in_one_file(folder, {"model": STATE}), folder, to="dcp")


def ranks(folder: Path) -> None:
    ckpttool.split(in_one_file(folder, STATE), folder, 2, device="cpu")


def file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": STATE}, path)


Make = Callable[[Path], None]

# Of each trainer: what it leaves, and which of these is the newest.
LAYOUTS: dict[str, tuple[dict[str, Make], str]] = {
    "verl": ({"global_step_90/actor": ranks, "global_step_100/actor": ranks}, "global_step_100/actor"),
    "torchtitan": ({"checkpoint/step-90": dcp, "checkpoint/step-1000": dcp}, "checkpoint/step-1000"),
    "transformers": ({"checkpoint-500": model, "checkpoint-1000": model}, "checkpoint-1000"),
    "megatron": ({"iter_0000090": dcp, "iter_0000100": dcp}, "iter_0000100"),
    "megatron, legacy": (
        {"iter_0000100/mp_rank_00/model_optim_rng.pt": file},
        "iter_0000100/mp_rank_00/model_optim_rng.pt",
    ),
    "nemo": ({"m--step=99-last/weights": dcp, "m--step=100/weights": dcp}, "m--step=100/weights"),
    "olmo": ({"step90/model_and_optim": dcp, "step1000/model_and_optim": dcp}, "step1000/model_and_optim"),
    "olmo, unsharded": ({"step90-unsharded/model.pt": file}, "step90-unsharded/model.pt"),
    "composer": ({"ep1-ba100-rank0.pt": file, "ep2-ba200-rank0.pt": file}, "ep2-ba200-rank0.pt"),
    "composer, sharded": ({"ep1/ba100": dcp, "ep2/ba200": dcp}, "ep2/ba200"),
    "torchtune": ({"epoch_0": model, "epoch_1": model}, "epoch_1"),
}


def made(folder: Path, name: str) -> str:
    """Leave what a trainer does; return the path of the newest."""
    checkpoints, newest = LAYOUTS[name]
    for path, make in checkpoints.items():
        make(folder / path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    torch.save({"state": {}, "param_groups": []}, folder / "optim.pt")
    return str(folder / newest)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_newest_checkpoint_is_named_with_a_line_to_paste(name: str, tmp_path: Path, cli: Cli) -> None:
    newest = made(tmp_path / "run", name)
    for command in (["verify"], ["convert", tmp_path / "out.pt"], ["merge", tmp_path / "out.pt"]):
        ran = cli(command[0], tmp_path / "run", *command[1:])
        assert (ran.code, f"hint: name one: ckpttool inspect {newest}" in ran.err) == (3, True), ran.err
    assert cli("inspect", newest).code == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_inspect_lists_the_checkpoints_of_a_run(name: str, tmp_path: Path, cli: Cli) -> None:
    newest = made(tmp_path / "run", name)
    ran = cli("inspect", tmp_path / "run", "--json")
    listed = ran.json["checkpoints"]
    assert (ran.code, listed[0]["path"], len(listed)) == (0, newest, len(LAYOUTS[name][0]))
    assert all(entry["whole"] and entry["step"] is not None and entry["bytes"] > 0 for entry in listed)
    text = cli("inspect", tmp_path / "run").out
    assert text.endswith(f"ckpttool inspect {newest}\n")
    assert os.path.relpath(newest, tmp_path / "run") in text


def test_the_newest_whole_one_comes_before_one_that_is_not(tmp_path: Path, cli: Cli) -> None:
    newest = Path(made(tmp_path / "run", "torchtitan"))
    (newest / ".metadata").unlink()
    ran = cli("verify", tmp_path / "run")
    assert "name one: ckpttool inspect " + str(newest.with_name("step-90")) in ran.err
    assert f"others: {newest}" in ran.err
    first, second = cli("inspect", tmp_path / "run", "--json").json["checkpoints"]
    assert (first["whole"], second["whole"], first["format"]) == (False, True, None)
    assert "without their .metadata" in first["problem"]
    assert cli("inspect", tmp_path / "run").out.endswith(f"inspect {newest.with_name('step-90')}\n")


def test_a_rank_that_is_missing_is_told_in_the_list(tmp_path: Path, cli: Cli) -> None:
    newest = made(tmp_path / "run", "verl")
    Path(newest, "model_world_size_2_rank_1.pt").unlink()
    listed = cli("inspect", tmp_path / "run", "--json").json["checkpoints"]
    assert [entry["whole"] for entry in listed] == [False, True]
    assert "ranks 1 are missing" in listed[0]["problem"]


def test_a_link_to_a_checkpoint_is_no_other_one(tmp_path: Path, cli: Cli) -> None:
    made(tmp_path / "run", "transformers")
    (tmp_path / "run" / "latest").symlink_to("checkpoint-1000")
    (tmp_path / "run" / "loop").symlink_to(".")
    assert len(cli("inspect", tmp_path / "run", "--json").json["checkpoints"]) == 2


def test_an_empty_folder_holds_none(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "run" / "deep" / "deeper").mkdir(parents=True)
    assert not isinstance(refused(tmp_path / "run", "without the index", Unreadable), SeveralCheckpoints)
    assert cli("inspect", tmp_path / "run").code == 3


# Folders of one checkpoint that lack something, and files that are nobody's.


def test_dcp_without_its_metadata_is_told(tmp_path: Path, cli: Cli) -> None:
    dcp(tmp_path / "d")
    (tmp_path / "d" / ".metadata").rename(tmp_path / "d" / ".metadata.tmp")
    ran = cli("inspect", tmp_path / "d")
    assert (ran.code, "without their .metadata, which torch writes last" in ran.err) == (3, True), ran.err
    assert f"mv {tmp_path}/d/.metadata.tmp {tmp_path}/d/.metadata" in ran.err
    (tmp_path / "d" / ".metadata.tmp").unlink()
    assert "mv " not in cli("inspect", tmp_path / "d").err
    refused(tmp_path / "d", r"without their \.metadata", Unreadable)


def test_metadata_of_each_rank_is_told(tmp_path: Path) -> None:
    dcp(tmp_path / "d")
    (tmp_path / "d" / ".metadata").rename(tmp_path / "d" / "__0.metadata")
    refusal = refused(tmp_path / "d", "each rank saved for itself", Unsupported)
    assert "use_collectives=True" in str(refusal.hint)


@pytest.mark.parametrize(
    "raw", [b"", b"junk", b"version https://git-lfs.github.com/spec/v1\n", b"\x80\x04]."]
)
def test_hostile_metadata_is_named_and_not_its_folder(raw: bytes, tmp_path: Path) -> None:
    dcp(tmp_path / "d")
    (tmp_path / "d" / ".metadata").write_bytes(raw)
    with pytest.raises(ckpttool.CkptToolError, match=r"d/\.metadata: "):
        ckpttool.open(tmp_path / "d")


@pytest.mark.parametrize("make", [model, dcp, ranks])
def test_lfs_pointers_in_a_folder_are_named(make: Make, tmp_path: Path, cli: Cli) -> None:
    make(tmp_path / "d")
    (path,) = [path for path in (tmp_path / "d").iterdir() if path.name in POINTED]
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    ran = cli("merge", tmp_path / "d", tmp_path / "out.pt")
    found = ran.code, f"{path}: is a Git LFS pointer" in ran.err, "git lfs pull" in ran.err
    assert found == (3, True, True)


POINTED = ("model.safetensors", "__0_0.distcp", "model_world_size_2_rank_1.pt")


@pytest.mark.parametrize("make", [model, dcp, ranks])
def test_files_of_macos_are_nobody_s(make: Make, tmp_path: Path, cli: Cli) -> None:
    make(tmp_path / "d")
    for path in list((tmp_path / "d").iterdir()):
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X")
    assert cli("inspect", tmp_path / "d").code == 0
    assert cli("merge", tmp_path / "d", tmp_path / "out.pt").code == 0


def test_a_second_download_is_told(tmp_path: Path, cli: Cli) -> None:
    ranks(tmp_path / "d")
    second = tmp_path / "d" / "model_world_size_2_rank_0 (1).pt"
    shutil.copy(tmp_path / "d" / "model_world_size_2_rank_0.pt", second)
    ran = cli("merge", tmp_path / "d", tmp_path / "out.pt")
    assert (ran.code, f"rm '{second}'" in ran.err) == (3, True), ran.err


def test_pieces_under_other_names_get_the_command_that_works(tmp_path: Path, cli: Cli) -> None:
    ranks(tmp_path / "d")
    for rank, path in enumerate(sorted((tmp_path / "d").iterdir())):
        path.rename(path.with_name(f"part{rank}.pth"))
    ran = cli("merge", tmp_path / "d", tmp_path / "out.pt")
    assert (ran.code, f"ckpttool merge {tmp_path}/d/*.pth OUTPUT" in ran.err) == (3, True), ran.err
    assert cli("merge", *(tmp_path / "d").glob("*.pth"), tmp_path / "out.pt").code == 0


def test_no_hint_has_an_ellipsis_in_a_command(tmp_path: Path, cli: Cli) -> None:
    for step in range(9):
        model(tmp_path / "run" / f"checkpoint-{step}")
    ran = cli("verify", tmp_path / "run")
    assert "…" not in ran.err
    assert "and 5 more" in ran.err
