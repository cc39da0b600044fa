"""Resuming: a resumed run equals the uninterrupted one, bit for bit, from any step."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import runs, trainings
from tests.ranks.runs import contents
from tests.support.run_log import entries_of, epochs_of, timeless
from train.checkpoint import format as checkpoints
from train.config.shared import Every

EPOCHS, STEPS = 3, 4


class Restless(nn.Module):
    """A model with what a resume can get wrong: buffers, random numbers, sums whose order DDP changes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(10, 60)
        self.norm = nn.BatchNorm1d(60)
        self.deep = nn.Linear(60, 70)
        self.last = nn.Linear(70, 10)
        self.phase = nn.Parameter(torch.ones(10, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.dropout(self.norm(self.wide(x)).relu(), 0.3, self.training)
        return self.last(self.deep(x).relu()) * self.phase.abs()


def run(rank: int, world_size: int, folder: str, settings: dict[str, Any], samples: int = 44) -> str:
    usual = {"epochs": EPOCHS, "batch_size": 12, "warmup": Every(2, "steps"), "out": folder, **runs.OFTEN}
    data = trainings.tensors((10,), samples)
    return runs.outcome(rank, world_size, data, trainings.seeded(Restless), {**usual, **settings})


def log(folder: Path) -> list[dict[str, Any]]:
    return timeless(entries_of(folder))


def logged_epochs(folder: Path) -> list[int]:
    return [entry["epoch"] for entry in epochs_of(folder)]


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda size: f"{size}-ranks")
def whole(request, run_ranks, tmp_path_factory) -> tuple[int, Path]:
    """An uninterrupted run with a checkpoint of each of its steps."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(request.param, run, str(folder), {})
    return request.param, folder


@pytest.fixture(scope="module")
def short(run_ranks, tmp_path_factory) -> Path:
    """A run of one epoch on two ranks."""
    folder = tmp_path_factory.mktemp("short")
    run_ranks(2, run, str(folder), {"epochs": 1})
    return folder


@pytest.mark.parametrize("step", [1, 3, STEPS, STEPS + 2, 2 * STEPS])
def test_a_resumed_run_equals_the_uninterrupted_run_bit_for_bit(run_ranks, tmp_path, whole, step):
    size, folder = whole
    stopped_at = folder / f"step-{step:06d}.pt"
    said, *silent = run_ranks(size, run, str(tmp_path), {"resume": str(stopped_at)})
    epoch, in_epoch = divmod(step, STEPS)
    assert f"epoch {epoch + 1}, step {in_epoch} of {STEPS}" in said
    assert set(silent) <= {""}
    for later in range(step + 1, EPOCHS * STEPS + 1):
        name = f"step-{later:06d}.pt"
        assert contents(tmp_path / name) == contents(folder / name)
    assert contents(tmp_path / "last.pt") == contents(folder / "last.pt")
    assert log(tmp_path) == [entry for entry in log(folder) if entry.get("epoch", EPOCHS) > epoch]


def test_checkpoints_of_different_steps_differ(whole):
    _, folder = whole
    assert contents(folder / "step-000011.pt") != contents(folder / "step-000012.pt")


def run_where_only_rank_0_sees_the_file(rank: int, world_size: int, path: str, folder: str) -> Any:
    return run(rank, world_size, folder, {"resume": path if rank == 0 else "/nowhere/last.pt"})


def test_only_rank_0_needs_the_file(run_ranks, tmp_path, whole):
    size, folder = whole
    path = str(folder / "step-000005.pt")
    run_ranks(size, run_where_only_rank_0_sees_the_file, path, str(tmp_path))
    assert contents(tmp_path / "last.pt") == contents(folder / "last.pt")


def test_resume_auto_continues_in_the_same_folder_and_logs_no_epoch_twice(run_ranks, tmp_path, whole):
    size, folder = whole
    parts = shutil.copytree(folder, tmp_path / "parts")
    os.replace(parts / "step-000010.pt", parts / "last.pt")  # as if it had died after step 11
    run_ranks(size, run, str(parts), {"resume": "auto"})
    assert contents(parts / "last.pt") == contents(folder / "last.pt")
    assert log(parts) == log(folder)


def resume_auto_where_only_rank_0_sees_the_folder(rank: int, world_size: int, folder: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(os.path, "exists", lambda _: False)
        return run(rank, world_size, folder, {"resume": "auto", "epochs": 2})


def test_only_rank_0_decides_whether_there_is_a_checkpoint_to_resume(run_ranks, tmp_path, short):
    folder = shutil.copytree(short, tmp_path / "run")
    said, _ = run_ranks(2, resume_auto_where_only_rank_0_sees_the_folder, str(folder))
    assert "continues from" in said
    assert logged_epochs(folder) == [1, 2]


def test_resume_auto_without_a_checkpoint_starts_a_new_run(run_ranks, tmp_path):
    said, _ = run_ranks(2, run, str(tmp_path), {"resume": "auto", "epochs": 1})
    assert "resume  " not in said
    assert logged_epochs(tmp_path) == [1]


def damage(path: Path) -> None:
    """Change one bit of a weight; torch still reads the file. A file of two names is changed under one."""
    data = bytearray(path.read_bytes())
    state = torch.load(path, weights_only=True)["model"]["module.wide.weight"]
    data[data.index(state.numpy().tobytes()) + 5] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["damaged", "cut off", "missing", "a link to nothing"])
def test_resume_auto_takes_the_newest_checkpoint_that_is_whole(run_ranks, tmp_path, whole, how):
    size, folder = whole
    parts = tmp_path / "parts"  # as after step 8
    parts.mkdir()
    for step in (6, 7, 8):
        shutil.copy2(folder / f"step-{step:06d}.pt", parts)
    os.link(parts / "step-000008.pt", parts / "last.pt")
    for name in ("last.pt", "step-000008.pt"):
        if how in ("missing", "a link to nothing"):
            (parts / name).unlink()
        elif how == "damaged":
            damage(parts / name)
        else:
            os.truncate(parts / name, 5000)
    if how == "a link to nothing":
        (parts / "last.pt").symlink_to(parts / "nothing.pt")
    elif how == "missing":  # and names of the run at files that are not
        (parts / "else").mkdir()
        (parts / "step-000099.pt").symlink_to("else")
        torch.save({"model": {}}, parts / "step-000098.pt")
    said, *_ = run_ranks(size, run, str(parts), {"resume": "auto", "keep": 0})
    remarks = [line for line in said.splitlines() if line.startswith("resume")]
    over = [line.removeprefix("resume  ") for line in remarks if "passed over" in line]
    if how == "damaged":
        saved = "the model's values are not the saved ones"
        assert over == [f"passed over {parts}/{name}: {saved}" for name in ("last.pt", "step-000008.pt")]
    elif how == "cut off":  # the two names of one file are looked at once
        (only,) = over
        assert only.startswith(f"passed over {parts}/last.pt: ")
        assert only.endswith(" (also named step-000008.pt)")
    elif how == "missing":
        foreign = "is not a checkpoint of this trainer"
        assert over == [f"passed over {parts}/step-000098.pt: {foreign}"]
    else:
        assert over == [f"passed over {parts}/last.pt: is a link to nothing"]
    assert f"continues from {parts}/step-000007.pt at epoch 2, step 3 of 4" in remarks[len(over)]
    assert contents(parts / "last.pt") == contents(folder / "last.pt")


def test_resume_auto_starts_nothing_anew_if_no_checkpoint_is_whole(run_ranks, tmp_path, short):
    for path in short.glob("*.pt"):
        (tmp_path / path.name).write_bytes(b"no checkpoint")
    first, second = run_ranks(2, run, str(tmp_path), {"resume": "auto"})
    assert first.startswith(f"Damaged: {tmp_path}/last.pt: can't be read: ")
    assert "no other checkpoint in" in first and "--force starts over" in first
    assert second.startswith("RankFailed: rank 0 failed: ")


def test_resume_auto_beside_only_another_programs_file_starts_nothing_anew(run_ranks, tmp_path):
    torch.save({"model": {}}, tmp_path / "step-000098.pt")
    (said,) = run_ranks(1, run, str(tmp_path), {"resume": "auto"})
    assert "step-000098.pt: is not a checkpoint of this trainer (move it away) 3" in said
    (tmp_path / "step-000098.pt").rename(tmp_path / "last.pt")
    (said,) = run_ranks(1, run, str(tmp_path), {"resume": "auto"})
    assert said.startswith(f"Refused: {tmp_path}/last.pt: is not a checkpoint of this trainer")


def test_resume_auto_passes_over_no_checkpoint_of_another_training(run_ranks, tmp_path):
    run_ranks(1, run, str(tmp_path), {"epochs": 1})
    (said,) = run_ranks(1, run, str(tmp_path), {"resume": "auto", "lr": 0.5})
    assert said.startswith(f"UsageFault: {tmp_path}/last.pt: belongs to a training with --lr 0.1")


def test_resuming_a_finished_run_does_nothing_and_says_how_to_train_longer(run_ranks, short):
    before = (short / "last.pt").read_bytes()
    said, _ = run_ranks(2, run, str(short), {"epochs": 1, "resume": "auto"})
    remarks = [line for line in said.splitlines() if line.startswith("resume")]
    done = f"{short}/last.pt already has 1 epoch: nothing to do (--epochs N trains longer)"
    assert remarks == [f"resume  {done}"]
    assert "saved" not in said
    assert (short / "last.pt").read_bytes() == before
    assert logged_epochs(short) == [1]


def test_resuming_a_finished_run_reports_no_other_difference(run_ranks, tmp_path, whole):
    elsewhere = {"epochs": 1, "resume": str(whole[1] / "last.pt")}
    said, *_ = run_ranks(2 if whole[0] == 1 else 1, run, str(tmp_path / "b"), elsewhere)
    assert said.count("resume  ") == 1
    assert "nothing to do" in said
    assert "next:" not in said  # there is no file in that folder


def test_a_run_can_continue_within_an_epoch_on_another_number_of_ranks(run_ranks, tmp_path, whole):
    before, folder = whole
    after = {1: 2, 2: 4, 4: 1}[before]
    path = str(folder / "step-000006.pt")
    said, *_ = run_ranks(after, run, str(tmp_path / "on"), {"resume": path})
    assert f"saved by {before} ranks, now {after}: the same samples in the same steps" in said
    final = torch.load(tmp_path / "on" / "last.pt", weights_only=True)
    assert final["progress"]["samples"] == EPOCHS * 44
    assert final["plan"]["world_size"] == after
    # Two epochs are left, and the first of them was met in part before: its sums are taken along.
    sums = torch.load(tmp_path / "on" / "step-000007.pt", weights_only=True)["progress"]["sums"]
    assert sum(samples for _, _, samples, _ in sums) == 36
    assert logged_epochs(tmp_path / "on") == [2, 3]


@pytest.mark.parametrize(
    ("settings", "samples", "said"),
    [
        ({"batch_size": 10}, 44, "to a training with --batch-size 12"),
        ({"lr": 0.3, "seed": 5}, 44, "to a training with --seed 0 --lr 0.1"),
        ({"model": "resnet20"}, 44, "to a training with --model simple-cnn"),
        ({"warmup": Every(0, "epochs")}, 44, "to a training with --warmup 2steps"),
        ({"drop_last": True}, 44, "to a training with no --drop-last"),
        ({}, 45, "to a training on other samples"),
    ],
    ids=["batch size", "several", "model", "warmup", "switch", "data"],
)
def test_a_checkpoint_of_another_training_is_refused_naming_the_flags(
    run_ranks, tmp_path, short, settings, samples, said
):
    settings = {"resume": str(short / "last.pt"), **settings}
    first, second = run_ranks(2, run, str(tmp_path / "on"), settings, samples)
    assert said in first
    assert first.startswith("UsageFault")
    assert first.endswith("2")
    assert second.startswith("RankFailed")
    assert second.endswith("2")


def test_a_resume_from_elsewhere_does_not_overwrite_the_run_in_the_folder(run_ranks, tmp_path, short):
    for name in ("a", "b"):
        shutil.copytree(short, tmp_path / name)
    before = (tmp_path / "b" / "last.pt").read_bytes()
    elsewhere = {"epochs": 2, "resume": str(tmp_path / "a" / "last.pt")}
    (said,) = run_ranks(1, run, str(tmp_path / "b"), elsewhere)
    assert "already holds a run" in said
    assert (tmp_path / "b" / "last.pt").read_bytes() == before


def test_a_damaged_checkpoint_stops_every_rank_with_exit_code_3(run_ranks, tmp_path):
    (tmp_path / "cut.pt").write_bytes(b"PK\3\4 and no more")
    first, second = run_ranks(2, run, str(tmp_path / "on"), {"resume": str(tmp_path / "cut.pt")})
    assert first.startswith("Damaged")
    assert "cut.pt" in first
    assert (first[-1], second[-1]) == ("3", "3")


def test_other_versions_and_a_longer_schedule_are_reported(run_ranks, tmp_path):
    run_ranks(1, run, str(tmp_path), {"epochs": 1})
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    state["versions"]["torch"] = "1.0"
    state["digests"]["run"] = checkpoints.digest_of_run(state)
    torch.save(state, tmp_path / "old.pt")
    (said,) = run_ranks(1, run, str(tmp_path / "on"), {"epochs": 2, "resume": str(tmp_path / "old.pt")})
    assert f"the last bits may differ: torch 1.0 -> {torch.__version__}" in said
    assert "the learning rate now follows 2 epochs" in said


# ---- files that rank 0 alone writes -------------------------------------------------------------------


def test_a_log_that_rank_0_cant_write_ends_every_rank(run_ranks, tmp_path):
    said = "log.jsonl: could not be written: is a directory"
    (tmp_path / "log.jsonl").mkdir()
    first, second = run_ranks(2, run, str(tmp_path), {"resume": "auto", "epochs": 1})
    assert first.startswith(f"FileError: {tmp_path}/{said}")
    assert second.startswith(f"RankFailed: rank 0 failed: {tmp_path}/{said}")
    assert (first[-1], second[-1]) == ("3", "3")


# ---- what is lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_a_run_whose_weights_become_nan_ends_and_overwrites_nothing(run_ranks, tmp_path, unit):
    failed = {"epochs": 2, "lr": 1e30, "save_every": Every(1, unit)}
    first, second = run_ranks(2, run, str(tmp_path / unit), failed)
    assert first.startswith("CheckFailed: ")
    assert re.search(r"is NaN (or infinite|by step \d+): training has diverged", first)
    assert "a smaller --lr" in first
    assert second.startswith("RankFailed: rank 0 failed: ")
    assert first[-1] == second[-1] == "1"
    for path in (tmp_path / unit).glob("*.pt"):
        state = torch.load(path, weights_only=True)["model"]
        assert all(torch.isfinite(value).all() for value in state.values()), path
        assert unit == "steps"
        assert "is from before" in first


@pytest.mark.parametrize("used", [True, False])
def test_a_file_to_resume_from_that_is_missing_is_named_also_in_a_used_folder(
    run_ranks, tmp_path, short, used
):
    if used:
        shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    before = sorted(os.listdir(tmp_path))
    first, second = run_ranks(2, run, str(tmp_path), {"resume": f"{tmp_path}-2/nope.pt"})
    assert first.startswith(f"Unreadable: {tmp_path}-2/nope.pt: no such file or directory")
    assert second.startswith("RankFailed: rank 0 failed: ")
    assert sorted(os.listdir(tmp_path)) == before
