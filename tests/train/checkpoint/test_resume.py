"""Resuming: a resumed run and its log equal the uninterrupted one's, bit for bit, from any step."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import runs, trainings
from tests.ranks.runs import contents
from tests.support.run_log import entries_of, epochs_of, timeless
from train.checkpoint import format as checkpoints
from train.config.flags import Every

EPOCHS, STEPS, SAMPLES = 2, 4, 44


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


def run(rank: int, world_size: int, folder: str, settings: dict[str, Any], samples: int = SAMPLES) -> str:
    usual = {"epochs": EPOCHS, "batch_size": 12, "warmup": Every(2, "steps"), "log_every": 3, **runs.OFTEN}
    data = trainings.tensors((10,), samples)
    return runs.outcome(
        rank, world_size, data, trainings.seeded(Restless), {"out": folder, **usual, **settings}
    )


def log(folder: Path) -> list[dict[str, Any]]:
    return timeless(entries_of(folder))


def logged_epochs(folder: Path) -> list[int]:
    return [entry["epoch"] for entry in epochs_of(folder)]


@pytest.fixture(scope="module")
def wholes(run_ranks, tmp_path_factory) -> Callable[[int], Path]:
    """`wholes(size)`: an uninterrupted run with a checkpoint of each of its steps."""
    folders: dict[int, Path] = {}

    def whole(size: int) -> Path:
        if size not in folders:
            folders[size] = tmp_path_factory.mktemp("whole")
            run_ranks(size, run, str(folders[size]), {})
        return folders[size]

    return whole


@pytest.fixture(scope="module")
def short(run_ranks, tmp_path_factory) -> Path:
    """A run of one epoch on two ranks."""
    folder = tmp_path_factory.mktemp("short")
    run_ranks(2, run, str(folder), {"epochs": 1})
    return folder


@pytest.mark.covered(lambda size, step: (size, step) not in {(1, 1), (2, STEPS), (3, 3), (3, STEPS + 1)})
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 3, STEPS, STEPS + 1])
def test_a_resumed_run_and_its_log_equal_the_uninterrupted_ones(run_ranks, tmp_path, wholes, size, step):
    folder = wholes(size)
    said, *silent = run_ranks(size, run, str(tmp_path), {"resume": str(folder / f"step-{step:06d}.pt")})
    epoch, in_epoch = divmod(step, STEPS)
    assert f"epoch {epoch + 1}, step {in_epoch} of {STEPS}" in said
    assert set(silent) <= {""}
    names = [*(f"step-{later:06d}.pt" for later in range(step + 1, EPOCHS * STEPS + 1)), "last.pt"]
    assert all(contents(tmp_path / name) == contents(folder / name) for name in names)
    assert contents(folder / "step-000007.pt") != contents(folder / "step-000008.pt")
    found, before = log(tmp_path), log(folder)
    assert [before.pop() for _ in found] == found[::-1]
    assert all(entry.get("step", 0) <= step and entry.get("epoch", 0) <= epoch for entry in before)


def run_where_only_rank_0_sees_the_file(rank: int, world_size: int, path: str, folder: str) -> Any:
    return run(rank, world_size, folder, {"resume": path if rank == 0 else "/nowhere/last.pt"})


def test_only_rank_0_needs_the_file(run_ranks, tmp_path, wholes):
    folder = wholes(2)
    run_ranks(2, run_where_only_rank_0_sees_the_file, str(folder / "step-000005.pt"), str(tmp_path))
    assert contents(tmp_path / "last.pt") == contents(folder / "last.pt")


@pytest.mark.parametrize("size", [1, 3])
def test_resume_auto_continues_in_the_same_folder_and_logs_nothing_twice(run_ranks, tmp_path, wholes, size):
    parts = shutil.copytree(wholes(size), tmp_path / "parts")
    os.replace(parts / "step-000006.pt", parts / "last.pt")  # as if it had died after step 7
    with (parts / "log.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    run_ranks(size, run, str(parts), {"resume": "auto"})
    assert contents(parts / "last.pt") == contents(wholes(size) / "last.pt")
    assert log(parts) == log(wholes(size))


def resume_auto_where_only_rank_0_sees_the_folder(rank: int, world_size: int, folder: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(os.path, "exists", lambda _: False)
        return run(rank, world_size, folder, {"resume": "auto", "epochs": 2})


def test_only_rank_0_decides_whether_there_is_a_checkpoint_to_resume(run_ranks, tmp_path, short):
    folder = shutil.copytree(short, tmp_path / "run")
    said, _ = run_ranks(2, resume_auto_where_only_rank_0_sees_the_folder, str(folder))
    assert "continues from" in said and logged_epochs(folder) == [1, 2]


def test_resume_auto_without_a_checkpoint_starts_a_new_run(run_ranks, tmp_path):
    said, _ = run_ranks(2, run, str(tmp_path), {"resume": "auto", "epochs": 1})
    assert f"start   a new run: {tmp_path} has no checkpoint\n" in said
    assert "resume  " not in said and logged_epochs(tmp_path) == [1]


def damage(path: Path) -> None:
    """Change one bit of a weight; torch still reads the file. A file of two names is changed under one."""
    data = bytearray(path.read_bytes())
    weight = runs.read(path)["model"]["module.wide.weight"]
    data[data.index(weight.numpy().tobytes()) + 5] ^= 1
    path.unlink()
    path.write_bytes(data)


NOT_SAVED = "the model's values are not the saved ones"


@pytest.mark.parametrize(("size", "how", "passed_over"), [
    (1, "damaged", [f"last.pt: {NOT_SAVED}", f"step-000007.pt: {NOT_SAVED}"]),
    (2, "cut off", [r"last.pt: is cut short: .* \(also named step-000007.pt\)"]),  # is read once
    (3, "missing", ["step-000098.pt: is not a checkpoint of this trainer"]),
    (2, "a link to nothing", ["last.pt: is a link to nothing"]),
])  # fmt: skip
def test_resume_auto_takes_the_newest_checkpoint_that_is_whole(
    run_ranks, tmp_path, wholes, size, how, passed_over
):
    for step in (5, 6, 7):  # as after step 7
        shutil.copy2(wholes(size) / f"step-{step:06d}.pt", tmp_path)
    os.link(tmp_path / "step-000007.pt", tmp_path / "last.pt")
    for path in (tmp_path / "last.pt", tmp_path / "step-000007.pt"):
        if how == "damaged":
            damage(path)
        elif how == "cut off":
            os.truncate(path, 5000)
        else:
            path.unlink()
    if how == "a link to nothing":
        (tmp_path / "last.pt").symlink_to(tmp_path / "nothing.pt")
    elif how == "missing":  # and names of the run at files that are not
        (tmp_path / "else").mkdir()
        (tmp_path / "step-000099.pt").symlink_to("else")
        torch.save({"model": {}}, tmp_path / "step-000098.pt")
    said, *_ = run_ranks(size, run, str(tmp_path), {"resume": "auto", "keep": 0})
    *over, goes_on = [line for line in said.splitlines() if line.startswith("resume")]
    for line, pattern in zip(over, passed_over, strict=True):
        assert re.fullmatch(f"resume  passed over {re.escape(str(tmp_path))}/{pattern}", line)
    assert f"continues from {tmp_path}/step-000006.pt at epoch 2, step 2 of 4" in goes_on
    assert contents(tmp_path / "last.pt") == contents(wholes(size) / "last.pt")


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
    assert said.startswith(f"UsageFault: {tmp_path}/last.pt: belongs to a run with --lr 0.1")


def test_an_older_checkpoint_of_another_training_does_not_hide_what_was_passed_over(run_ranks, tmp_path):
    run_ranks(1, run, str(tmp_path), {"epochs": 1})
    cut = (tmp_path / "best.pt").read_bytes()[:5000]
    (tmp_path / "last.pt").unlink()  # it is best.pt
    (tmp_path / "last.pt").write_bytes(cut)
    (said,) = run_ranks(1, run, str(tmp_path), {"resume": "auto", "lr": 0.5})
    older, newer = f"{tmp_path}/step-000004.pt: belongs to a run with --lr 0.1", f"{tmp_path}/last.pt"
    assert said.startswith(f"UsageFault: {older}; passed over {newer}: is cut short: ")


def test_resuming_a_finished_run_does_nothing_and_says_how_to_train_longer(run_ranks, tmp_path, short):
    """On another number of ranks, and in another folder, it says nothing else."""
    before = (short / "last.pt").read_bytes()
    done = f"{short}/last.pt already has 1 epoch: nothing to do (--epochs N trains longer)"
    for size, folder, resume in ((2, short, "auto"), (1, tmp_path / "b", str(short / "last.pt"))):
        said, *_ = run_ranks(size, run, str(folder), {"epochs": 1, "resume": resume})
        remarks = [line for line in said.splitlines() if line.startswith("resume")]
        assert remarks == [f"resume  {done}"] and "saved" not in said
        assert ("next:" in said) == (folder == short)  # there is no file in the other folder
    assert (short / "last.pt").read_bytes() == before
    assert logged_epochs(short) == [1]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (3, 1)])
def test_a_run_can_continue_within_an_epoch_on_another_number_of_ranks(
    run_ranks, tmp_path, wholes, before, after
):
    said, *_ = run_ranks(after, run, str(tmp_path), {"resume": str(wholes(before) / "step-000006.pt")})
    assert f"saved by {before} ranks, now {after}: the same samples in the same steps" in said
    final = runs.read(tmp_path / "last.pt")
    assert final["progress"]["samples"] == EPOCHS * SAMPLES
    assert final["plan"]["world_size"] == after
    # The epoch that is left was met in part before: its sums are taken along.
    sums = runs.read(tmp_path / "step-000007.pt")["progress"]["sums"]
    assert sum(samples for _, _, samples, _ in sums) == 36
    assert logged_epochs(tmp_path) == [2]


@pytest.mark.parametrize(("settings", "samples", "said"), [
    ({"batch_size": 10}, 44, "to a run with --batch-size 12"),
    ({"lr": 0.3, "seed": 5}, 44, "to a run with --lr 0.1 --seed 0"),
    ({"model": "resnet20"}, 44, "to a run with --model simple-cnn"),
    ({"warmup": Every(0, "epochs")}, 44, "to a run with --warmup 2steps"),
    ({"drop_last": True}, 44, "to a run with no --drop-last"),
    ({}, 45, "to a run on other samples"),
], ids=["batch size", "several", "model", "warmup", "switch", "data"])  # fmt: skip
def test_a_checkpoint_of_another_training_is_refused_naming_the_flags(
    run_ranks, tmp_path, short, settings, samples, said
):
    settings = {"resume": str(short / "last.pt"), **settings}
    first, second = run_ranks(2, run, str(tmp_path / "on"), settings, samples)
    assert first.startswith("UsageFault") and said in first
    assert second.startswith("RankFailed")
    assert (first[-1], second[-1]) == ("2", "2")


def test_a_resume_from_elsewhere_does_not_overwrite_the_run_in_the_folder(run_ranks, tmp_path, short):
    for name in ("a", "b"):
        shutil.copytree(short, tmp_path / name)
    before = (tmp_path / "b" / "last.pt").read_bytes()
    elsewhere = {"epochs": 2, "resume": str(tmp_path / "a" / "last.pt")}
    (said,) = run_ranks(1, run, str(tmp_path / "b"), elsewhere)
    assert "already holds a run" in said
    assert (tmp_path / "b" / "last.pt").read_bytes() == before


def test_other_versions_and_a_longer_schedule_are_reported(run_ranks, tmp_path):
    run_ranks(1, run, str(tmp_path), {"epochs": 1})
    state = runs.read(tmp_path / "last.pt")
    state["versions"]["torch"] = "1.0"
    state["digests"]["run"] = checkpoints.digest_of_run(state)
    torch.save(state, tmp_path / "old.pt")
    (said,) = run_ranks(1, run, str(tmp_path / "on"), {"epochs": 2, "resume": str(tmp_path / "old.pt")})
    assert f"the last bits may differ: torch 1.0 -> {torch.__version__}" in said
    assert "the learning rate now follows 2 epochs" in said


# ---- what ends every rank ------------------------------------------------------------------------------


WHOLE = "Damaged: {}/last.pt: can't be read: .*no other checkpoint in .*--force starts over"
NO_FILE = "Unreadable: {}-2/nope.pt: no such file or directory"


@pytest.mark.parametrize(("files", "resume", "said"), [
    ({"last.pt": b"cut", "step-000004.pt": b"cut off"}, "auto", WHOLE),
    ({"cut.pt": b"PK\3\4 and no more"}, "{}/cut.pt", "Damaged: {}/cut.pt: "),
    ({}, "{}-2/nope.pt", NO_FILE),
    ({"last.pt": b"of a run"}, "{}-2/nope.pt", NO_FILE),
], ids=["none is whole", "damaged", "no such file", "no such file, used folder"])  # fmt: skip
def test_what_rank_0_cant_read_or_write_ends_every_rank(run_ranks, tmp_path, files, resume, said):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    first, second = run_ranks(2, run, str(tmp_path), {"resume": resume.format(tmp_path), "epochs": 1})
    assert re.match(said.format(re.escape(str(tmp_path))), first)
    assert second.startswith("RankFailed: rank 0 failed: ")
    assert (first[-1], second[-1]) == ("3", "3")
    assert resume == "auto" or {path.name for path in tmp_path.iterdir()} == {*files}


def test_a_log_that_rank_0_cant_write_ends_every_rank(run_ranks, tmp_path):
    said = f"{tmp_path}/log.jsonl: could not be written: is a directory"
    (tmp_path / "log.jsonl").mkdir()
    first, second = run_ranks(2, run, str(tmp_path), {"resume": "auto", "epochs": 1})
    assert first.startswith(f"FileError: {said}") and second.startswith(f"RankFailed: rank 0 failed: {said}")
    assert (first[-1], second[-1]) == ("3", "3")


# ---- what is lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_a_run_whose_weights_become_nan_ends_and_overwrites_nothing(run_ranks, tmp_path, unit):
    failed = {"epochs": 2, "lr": 1e30, "save_every": Every(1, unit), "log_every": 99}
    first, second = run_ranks(2, run, str(tmp_path / unit), failed)
    assert first.startswith("CheckFailed: ")
    assert re.search(r"is NaN (or infinite|by step \d+): training has diverged", first)
    assert "a smaller --lr" in first
    assert second.startswith("RankFailed: rank 0 failed: ")
    assert first[-1] == second[-1] == "1"
    for path in (tmp_path / unit).glob("*.pt"):
        assert all(torch.isfinite(value).all() for value in runs.read(path)["model"].values()), path
        assert unit == "steps"
        assert "is from before" in first
