"""Saving: what a checkpoint holds, which files are kept, saves beside the training, a disk that refuses."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import resource
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.core import system
from ckpttool.core.files import commit, digest
from ckpttool.core.files.reflink import BLOCK
from ckpttool.errors import CheckFailed, CkptToolError, FileError
from tests.ranks import runs, trainings
from tests.ranks.programs import ROOT, start
from tests.support.run_log import entries_of, epochs_of
from tests.support.trees import odd_state
from train.checkpoint import files as checkpoint_files
from train.checkpoint import format as checkpoints
from train.checkpoint import saver as saving
from train.checkpoint.files import numbered
from train.checkpoint.saver import Staging
from train.config.flags import Every
from train.main import main, steps_of_epoch
from train.run.run import Limits
from train.trainer.trainer import Trainer


def make_trainer(rank: int, size: int, **settings: Any) -> Trainer:
    data, model = trainings.tensors(runs.SHAPE, runs.SAMPLES), trainings.seeded(runs.restless)
    settings = {"batch_size": runs.BATCH, "lr": 0.05, "epochs": 9, **settings}
    return trainings.trainer(rank, size, data, model, **settings)


def telling(trainer: Trainer, folder: str) -> tuple[saving.Saver, list[str]]:
    """Return a saver, and the list of what it tells."""
    told = list[str]()
    return saving.Saver(trainer, folder, lambda event, text, *_, **__: told.append(f"{event}: {text}")), told


# ---- copies of a state ---------------------------------------------------------------------------------


def test_a_copy_is_written_with_the_bytes_of_the_original(tmp_path):
    state, staging = odd_state(), Staging()
    for name, value in (("a", state), ("b", staging.copy(state)), ("c", staging.copy(state))):
        with open(tmp_path / name, "wb") as file:
            torch.save(value, file)
    original = (tmp_path / "a").read_bytes()
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() == original


def test_a_copy_does_not_change_with_its_original_and_the_next_uses_the_same_memory():
    tensor, staging = torch.ones(1000), Staging()
    first = staging.copy({"a": tensor})["a"]
    tensor.zero_()
    assert first.sum() == 1000
    second = staging.copy({"a": tensor})["a"]
    assert second.sum() == 0 and second.data_ptr() == first.data_ptr()
    assert staging.copy({"a": torch.ones(7), "b": tensor})["a"].tolist() == [1.0] * 7


# ---- the file ------------------------------------------------------------------------------------------


ADAM = {"ema": 0.9, "optimizer": "adamw", "momentum": 0.0}


def save_both_ways(rank: int, size: int, folder: str, settings: dict[str, Any]) -> None:
    trainer = make_trainer(rank, size, **settings)
    for _ in steps_of_epoch(trainer):
        break
    for way in ("sync", "async"):
        trainer.config = trainer.config.changed(save=way)
        os.makedirs(os.path.join(folder, way), exist_ok=True)
        saver = saving.Saver(trainer, os.path.join(folder, way))
        saver.save(last=True, best=True)
        if way == "async":  # the file is of the step before these
            for _ in steps_of_epoch(trainer):
                saver.advance(1, 0)
        saver.finish()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [{}, ADAM, {"zero": True}, {"batchnorm": "pooled"}, {"virtual_ranks": 2}],
    ids=["plain", "ema", "zero", "pooled", "virtual-ranks"],
)
def test_a_save_in_the_background_writes_the_bytes_of_one_that_is_waited_for(
    run_ranks, tmp_path, size, settings
):
    run_ranks(size, save_both_ways, str(tmp_path), settings)
    for name in ("last.pt", "best.pt"):
        assert (tmp_path / "sync" / name).read_bytes() == (tmp_path / "async" / name).read_bytes()
    checkpoints.read(str(tmp_path / "async" / "last.pt"))


def save_what_differs(rank: int, size: int, folder: str) -> list[str]:
    trainer = make_trainer(rank, size)
    saver = saving.Saver(trainer, folder)
    if rank == 1:
        with torch.no_grad():
            trainer.ddp.module.head.bias[0] += 1
    saver.save(last=True, best=False)
    time.sleep(0.5)  # long enough to write it
    before = sorted(os.listdir(folder)) if rank == 0 else []
    try:
        saver.advance(0, 0)
    except CkptToolError as error:
        return [type(error).__name__, *before]
    return []


def test_a_file_takes_its_place_only_after_the_ranks_have_been_compared(run_ranks, tmp_path):
    first, second = run_ranks(2, save_what_differs, str(tmp_path))
    assert first[0] == second[0] == "RanksDiffer"
    assert "last.pt" not in first and len(first) == 2  # a temporary file
    assert os.listdir(tmp_path) == []


def save_often(rank: int, size: int, folder: str) -> list[str]:
    """Return what is told of saves that come faster than a slow disk takes."""
    trainer = make_trainer(rank, size, keep=9)
    saver, told = telling(trainer, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "NOTICEABLE", 0.1)
        patch.setattr(os, "fsync", lambda _: time.sleep(0.2))
        for _ in steps_of_epoch(trainer):
            saver.save(last=True, best=False)
        saver.finish()
    return told


def test_a_save_waits_for_the_one_before_and_says_so(run_ranks, tmp_path):
    first, second = run_ranks(2, save_often, str(tmp_path))
    assert len(first) == 2 and first == second
    waited = r"save waited: training waited [\d.]+ s in step 2 for the save of step 1"
    assert re.match(waited, first[0])
    assert sorted(os.listdir(tmp_path)) == ["last.pt", *(numbered(step) for step in (1, 2, 3))]


def save_numbered(rank: int, size: int, folder: str, settings: dict[str, Any], best: int = 0) -> list[str]:
    """Save after each of three steps, the best state after one of them; return what is told."""
    trainer = make_trainer(rank, size, keep=2, **settings)
    saver, told = telling(trainer, folder)
    for _ in steps_of_epoch(trainer):
        saver.save(last=True, best=trainer.progress.step == best)
        saver.finish_save()
    saver.finish()
    return told


@pytest.mark.parametrize("what", ["a file", "a link", "a link to nothing", "a folder"])
def test_a_save_leaves_what_is_not_the_trainers_under_a_number_and_says_so(run_ranks, tmp_path, what):
    """A link may lead to a checkpoint of another run."""
    run_ranks(1, save_numbered, str(tmp_path), {}, 2)
    other, number = tmp_path / "other.pt", tmp_path / numbered(2)
    number.rename(other)
    before = other.read_bytes()
    if what == "a folder":
        number.mkdir()
    elif what == "a file":
        number.write_bytes(b"of a user")
    else:
        number.symlink_to(other if what == "a link" else "nothing")
    facts = number.lstat()
    (said,) = run_ranks(1, save_numbered, str(tmp_path), {}, 2)
    assert said == [
        f"save failed: step 2 has no numbered checkpoint: {number}: is not a checkpoint of this run, and "
        "stays as it is"
    ]
    now = number.lstat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (facts.st_ino, facts.st_size, facts.st_mtime_ns)
    assert other.read_bytes() == before and not (tmp_path / "nothing").exists()
    for name, step in {"last.pt": 3, "best.pt": 2, numbered(1): 1, numbered(3): 3}.items():
        assert checkpoints.read(str(tmp_path / name))["progress"]["global_step"] == step


def test_a_checkpoint_of_another_run_under_a_number_is_not_the_runs_own(run_ranks, tmp_path):
    """It stays, and is neither counted among the last two nor overwritten."""
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    run_ranks(1, save_numbered, str(tmp_path / "other"), {"seed": 1})
    before = (tmp_path / "other" / numbered(3)).read_bytes()
    for path in (tmp_path / "run" / numbered(number) for number in (3, 9)):
        path.write_bytes(before)
        os.utime(path, (2e9, 2e9))  # the newest, for long
    (said,) = run_ranks(1, save_numbered, str(tmp_path / "run"), {})
    number = tmp_path / "run" / numbered(3)
    assert len(said) == 1 and f"{number}: is not a checkpoint of this run, and stays as it is" in said[0]
    names = [numbered(number) for number in (1, 2, 3, 9)]
    assert sorted(os.listdir(tmp_path / "run")) == ["last.pt", *names]
    assert all((tmp_path / "run" / name).read_bytes() == before for name in names[2:])


def test_a_change_that_a_resume_may_make_leaves_the_checkpoints_the_runs_own(run_ranks, tmp_path):
    for settings in ({"lr": 0.1}, {"lr": 0.05, "epochs": 7, "save": "sync", "accumulate": 2}):
        (said,) = run_ranks(1, save_numbered, str(tmp_path), settings)
        assert said == []
    assert sorted(os.listdir(tmp_path)) == ["last.pt", numbered(2), numbered(3)]


# ---- a disk that refuses -------------------------------------------------------------------------------


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def limit(size: int | None = None) -> None:
    """Let no file grow beyond a size. Python ignores the signal, so a write fails as on a full disk."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size or most, most))


def steps_of(run: Path, kind: str) -> list[int]:
    """Return the steps of the entries of a kind in a run's record, which is whole."""
    links, breaks = digest.read(str(run / "run.jsonl"))
    assert breaks == []
    return [link.entry["step"] for link in links if link.entry["kind"] == kind]


def save_on_a_full_disk(rank: int, size: int, folder: str, mended: bool) -> Any:
    """Save after each of three steps. Files may have 10 kB; after the last step more, if it is mended."""
    trainer = make_trainer(rank, size, keep=3 if mended else 0)
    saver, told = telling(trainer, folder)
    try:
        for _ in steps_of_epoch(trainer):
            if rank == 0:
                limit(10_000 if trainer.progress.global_step < 3 or not mended else None)
            saver.save(last=True, best=False)
            saver.finish_save()
        saver.finish()
    except CkptToolError as error:
        return told, type(error).__name__, error.message, error.exit_code
    finally:
        limit()
    return told, trainer.progress.global_step


@pytest.mark.parametrize("size", [1, 2])
def test_training_goes_on_after_a_failed_save_and_the_next_one_tries_again(run_ranks, tmp_path, size):
    for told, steps in run_ranks(size, save_on_a_full_disk, str(tmp_path), True):
        assert steps == 3 and len(told) == 2
        assert told[0].startswith("save failed: the save of step 1 failed: ") and "file too large" in told[0]
    assert checkpoints.read(str(tmp_path / "last.pt"))["progress"]["global_step"] == 3


@pytest.mark.parametrize("size", [1, 4])
def test_a_run_whose_last_save_failed_ends_with_exit_code_3(run_ranks, tmp_path, size):
    (tmp_path / "last.pt").write_bytes(b"the old one")
    first, *others = run_ranks(size, save_on_a_full_disk, str(tmp_path), False)
    told, kind, message, code = first
    assert (len(told), kind, code) == (3, "FileError", 3)
    assert message.startswith(f"{tmp_path}/last.pt: could not be written: ")
    assert [other[1:] for other in others] == [("RankFailed", f"rank 0 failed: {message}", 3)] * (size - 1)
    assert os.listdir(tmp_path) == ["last.pt"]
    assert (tmp_path / "last.pt").read_bytes() == b"the old one"


def train_on_a_full_disk(rank: int, size: int, folder: str, until: int, fails: int = 0) -> str:
    """Run the trainer with a record; the disk is full from its second step on, until it has done `until`.

    Then no file may grow beyond 6 kB; or, if a step is to fail, no line finds room in the record.
    """
    usual, end_step = digest.append_line, Trainer.end_step

    def watched(trainer: Trainer, *given: Any) -> None:
        full = rank == 0 and 1 <= trainer.progress.global_step < until
        if fails:
            digest.append_line = failing(errno.ENOSPC) if full else usual
        else:
            limit(6_000 if full else None)
        if trainer.progress.global_step + 1 == fails:
            raise CheckFailed("the step failed")
        end_step(trainer, *given)

    saves = {"prove_every": 1, "save": "sync", "save_every": runs.Every(1, "steps"), "keep": 9}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "end_step", watched)
        patch.setattr(digest, "append_line", usual)  # and put it back at the end
        try:
            return runs.run(rank, size, runs.restless, folder, saves)
        finally:
            limit()


@pytest.mark.parametrize(("size", "until", "saved"), [(1, 4, [1, 5, 6]), (2, 99, [1])])
def test_a_full_disk_ends_no_run_with_a_record_which_names_what_was_saved_and_no_more(
    run_ranks, tmp_path, size, until, saved
):
    said, *others = run_ranks(size, train_on_a_full_disk, str(tmp_path), until)
    assert said.startswith("FileError") == (until == 99), said
    assert all(other.startswith("RankFailed: rank 0 failed") for other in others)
    assert steps_of(tmp_path, "checkpoint") == saved
    assert sorted(tmp_path.glob("step-*.pt")) == [tmp_path / numbered(step) for step in saved]
    links, _ = digest.read(str(tmp_path / "run.jsonl"))
    heads = {checkpoints.read(str(tmp_path / numbered(step)))["chain"] for step in saved}
    assert heads <= {link.hash for link in links}
    if until < 99:
        assert steps_of(tmp_path, "step") == [1, 2, 3, 4, 5, 6]
        assert links[-1].entry["kind"] == "end"


def test_a_run_that_fails_writes_the_lines_that_a_full_disk_had_refused(run_ranks, tmp_path):
    (said,) = run_ranks(1, train_on_a_full_disk, str(tmp_path), 3, 4)
    assert said.startswith("CheckFailed: the step failed")
    assert steps_of(tmp_path, "step") == [1, 2, 3]


def save_the_best_on_a_disk_that_fails_once(rank: int, size: int, folder: str) -> list[float]:
    """Stand in for a failing disk: `os.fsync` raises EIO, as it does where a block can't be written."""
    trainer = make_trainer(rank, size)
    saver = saving.Saver(trainer, folder)
    found, usual = [], os.fsync
    for selection_score, broken in ((0.5, False), (0.7, True), (0.6, False)):
        trainer.progress.best = max(trainer.progress.best, selection_score)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", failing(errno.EIO) if broken else usual)
            saver.save(last=False, best=selection_score == trainer.progress.best)
            saver.finish_save()
        found.append(trainer.progress.best)
    saver.finish()
    return found


def test_a_best_state_that_could_not_be_written_is_not_the_one_to_beat(run_ranks, tmp_path):
    assert run_ranks(2, save_the_best_on_a_disk_that_fails_once, str(tmp_path)) == [[0.5, 0.5, 0.6]] * 2
    assert checkpoints.read(str(tmp_path / "best.pt"))["progress"]["best"] == 0.6


ON_A_SMALL_DISK = """
import ctypes, shutil, subprocess, sys
mount = "mount --make-rprivate / && mount -t tmpfs -o size=5m none disk"
if ctypes.CDLL(None).unshare(0x20000) or subprocess.run(mount, shell=True).returncode:  # CLONE_NEWNS
    sys.exit(77)
from train import main
code = main.main(sys.argv[1:])
shutil.copytree("disk/run", "out")
sys.exit(code)
"""


def test_a_disk_that_is_full_ends_no_run_before_its_last_step(tmp_path):
    """On a file system of 5 MB, which has room for one checkpoint and not for the next beside it."""
    flags = ["--data", "fake:40", "--epochs", "3", "--batch-size", "8", "--prove-every", "2"]
    (tmp_path / "disk").mkdir()
    command = [sys.executable, "-c", ON_A_SMALL_DISK, *flags, "--out", "disk/run"]
    done = start(command, tmp_path, PYTHONPATH=str(ROOT))
    if done.returncode == 77:
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 3, done.stderr
    refused = "disk/run/last.pt: could not be written: no space left on device"
    assert f"warning: the save of step 10 failed: {refused}" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {refused.rpartition(' left')[0]}")
    out = tmp_path / "out"
    assert [entry["epoch"] for entry in epochs_of(out)] == [1, 2, 3]
    assert next(entry["event"] for entry in entries_of(out) if "event" in entry) == "save failed"
    assert checkpoints.read(str(out / "last.pt"))["progress"]["epoch"] == 1
    assert not list(out.glob(".*"))
    assert steps_of(out, "checkpoint") == [5]


# ---- what a checkpoint holds, and which files are written, kept and removed ----------------------------


PLAIN = (type(None), bool, int, float, str, torch.Tensor)


def small_trainer(rank: int, world_size: int, **settings: Any) -> Any:
    settings = {"batch_size": 4, "lr": 0.1, **settings}
    data = trainings.tensors(runs.SHAPE, 8)
    return trainings.trainer(rank, world_size, data, trainings.seeded(runs.restless), **settings)


def save_last(trainer: Any, folder: str, *, best: bool = False) -> None:
    saver = saving.Saver(trainer, folder)
    saver.save(last=True, best=best)
    saver.finish()


def save_after_an_epoch(rank: int, world_size: int, folder: str) -> Any:
    trainer = small_trainer(rank, world_size)
    trainings.finish_epoch(trainer)
    mean = trainer.ddp.module.blocks[0].norm.running_mean
    before = mean.clone()
    save_last(trainer, folder)
    return before, mean.clone()


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in [key, *leaves(item)]]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


@pytest.fixture(scope="module")
def saved(run_ranks, tmp_path_factory) -> dict[str, Any]:
    """A checkpoint saved by two ranks, as `weights_only` reads it, and the ranks before and after."""
    folder = tmp_path_factory.mktemp("saved")
    ranks = run_ranks(2, save_after_an_epoch, str(folder))
    return {"ranks": ranks, "state": torch.load(folder / "last.pt", weights_only=True), "folder": folder}


def test_a_checkpoint_is_primitives_and_tensors_that_weights_only_loads(saved):
    assert {type(leaf) for leaf in leaves(saved["state"])} <= set(PLAIN)


def test_tensors_lie_on_block_boundaries_which_other_files_can_share(saved):
    path = saved["folder"] / "last.pt"
    with ckpttool.open(path) as checkpoint:
        offsets = [storage.data.offset for _, storage in checkpoint.storages()]
    assert len(offsets) > 10 and not any(offset % BLOCK for offset in offsets)
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert all(map(torch.equal, mapped["model"].values(), saved["state"]["model"].values()))


def test_the_keys_are_those_that_ddp_gives_and_ckpttool_strips_also_in_the_optimizers_state(saved):
    model, state = runs.restless(), saved["state"]
    assert list(state["model"]) == [f"module.{name}" for name in model.state_dict()]
    (group,) = state["optimizer"]["param_groups"]
    assert group["param_names"] == [f"module.{name}" for name, _ in model.named_parameters()]
    assert len(state["optimizer"]["state"]) == len(group["param_names"])


def test_a_checkpoint_records_the_progress_the_plan_and_the_versions(saved):
    state = saved["state"]
    assert state["progress"] == {
        "epoch": 1, "step": 0, "global_step": 2, "samples": 8, "best": -math.inf, "unscored": False,
        "uncounted": 0, "lr": 0.1, "sums": [[0.0] * 4] * 2, "since_best": 0, "not_finite": 0, "top": [],
    }  # fmt: skip
    assert (state["plan"]["samples"], state["plan"]["world_size"], state["config"]["batch_size"]) == (8, 2, 4)
    assert (state["versions"]["torch"], state["scheduler"]["last_epoch"]) == (str(torch.__version__), 2)


def test_the_bytes_of_a_checkpoint_say_what_was_trained_not_where_when_or_how(tmp_path, monkeypatch):
    flags = ["--data", "fake:12", "--model", "resnet20", "--epochs", "2", "--batch-size", "4"]
    flags += ["--max-steps", "5", "--out"]
    watched = ["--save-every", "1steps", "--keep", "2", "--timeout", "9", "--workers", "1"]
    monkeypatch.setenv("TZ", "UTC")
    assert main([*flags, str(tmp_path / "a")]) == 0
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert main([*flags, "b", *watched]) == 0
    assert main([*flags, "c", "--stop-at", "2"]) == 0
    assert main([*flags, "c", "--resume", "auto"]) == 0
    folders = [tmp_path / "a", tmp_path / "else/b", tmp_path / "else/c"]
    for name in ("last.pt", "best.pt"):
        first, *others = [(folder / name).read_bytes() for folder in folders]
        assert [other == first for other in others] == [True, True]
        assert str(tmp_path).encode() not in first


def test_the_random_state_of_every_rank_is_saved(saved):
    first, second = saved["state"]["rng"]
    assert {"python", "torch"} <= set(first)
    assert not torch.equal(first["torch"], second["torch"])


def test_batchnorm_statistics_are_made_equal_before_a_save(saved):
    (first, first_after), (second, second_after) = saved["ranks"]
    assert not torch.equal(first, second)
    in_file = saved["state"]["model"]["module.blocks.0.norm.running_mean"]
    assert all(torch.equal(mean, first) for mean in (first_after, second_after, in_file))


def test_a_save_leaves_only_the_checkpoint_in_the_folder(saved):
    assert os.listdir(saved["folder"]) == ["last.pt"]


# ---- what is not saved ---------------------------------------------------------------------------------


def momentum(trainer: Any) -> torch.Tensor:
    return trainer.updater.optimizer.state[trainer.ddp.module.stem.weight]["momentum_buffer"]


CHANGES: dict[str, Callable[[Any], object]] = {
    "module.head.bias": lambda trainer: trainer.ddp.module.head.bias[3].add_(1e-6),
    "momentum_buffer of module.stem.weight": lambda trainer: momentum(trainer)[0].mul_(1.001),
    "the optimizer's settings of group 0": lambda t: t.updater.optimizer.param_groups[0].update(lr=0.2),
    "head.bias": lambda trainer: trainer.ddp.module.head.bias[0].fill_(math.nan),
    "blocks.1.norm.running_var": lambda t: t.ddp.module.blocks[1].norm.running_var[0].fill_(math.inf),
}


def save_a_change(
    rank: int, world_size: int, folder: str, what: str, on: int, settings: dict[str, Any] | None = None
) -> Any:
    """Save after an epoch, and after a change on one rank; return the error."""
    trainer = small_trainer(rank, world_size, **settings or {})
    trainings.finish_epoch(trainer)
    if rank == on:
        with torch.no_grad():
            CHANGES[what](trainer)
    return trainings.error_of(lambda: save_last(trainer, folder, best=True))


@pytest.mark.parametrize(("what", "size", "settings"), [
    *((what, size, {}) for what in list(CHANGES)[:3] for size in (2, 4)),
    (list(CHANGES)[2], 2, {"zero": True}),
])  # fmt: skip
def test_ranks_that_differ_name_the_tensor_and_the_rank_and_write_no_file(
    run_ranks, tmp_path, what, size, settings
):
    said = f"rank 1 has a different {what} than rank 0, before saving"
    assert run_ranks(size, save_a_change, str(tmp_path), what, 1, settings) == [("RanksDiffer", said)] * size
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", list(CHANGES)[3:])
@pytest.mark.parametrize("on", [0, 1])
def test_nan_on_one_rank_ends_all_ranks_and_that_rank_reports_it(run_ranks, tmp_path, name, on):
    answers = run_ranks(2, save_a_change, str(tmp_path), name, on)
    said = f"after step 2 {name} is NaN or infinite: training has diverged"
    assert answers.pop(on) == ("CheckFailed", said)
    assert answers == [("RankFailed", f"rank {on} failed: {said}")]
    assert os.listdir(tmp_path) == []


# ---- which files, and when -----------------------------------------------------------------------------


def files_of_a_run(rank: int, world_size: int, folder: str, best: list[bool], settings: Any) -> Any:
    """Return the files and their steps after each epoch of a run; the marked epochs are the best so far."""
    trainer = small_trainer(rank, world_size, epochs=len(best), **settings)
    saver, seen = saving.Saver(trainer, folder), []
    limits = Limits(trainer.config, lambda: trainer.feed.steps_per_epoch)
    for is_best in best:
        for _ in steps_of_epoch(trainer):
            due, ends = limits.due(trainer.progress), trainer.epoch_is_done()
            if ends:
                trainer.finish_epoch()
            saver.save(last=due.save, best=is_best and ends)
            saver.finish()
        states = {path.name: runs.read(path) for path in Path(folder).iterdir()}
        seen.append({name: state["progress"]["global_step"] for name, state in states.items()})
    return seen


def kept(*steps: int) -> dict[str, int]:
    """Return the files of `--keep` after the last of these steps."""
    return {"last.pt": steps[-1], **{checkpoint_files.numbered(step): step for step in steps}}


@pytest.mark.parametrize(("settings", "best", "files"), [
    ({}, [True, False], [{"best.pt": 2, "last.pt": 2}, {"best.pt": 2, "last.pt": 4}]),
    ({"save_every": Every(2, "epochs")}, [False] * 3, [{}, {"last.pt": 4}, {"last.pt": 6}]),
    ({"save_every": Every(9, "epochs")}, [True, False], [{"best.pt": 2}, {"best.pt": 2, "last.pt": 4}]),
    ({"save_every": Every(3, "steps")}, [False] * 3, [{}, {"last.pt": 3}, {"last.pt": 6}]),
    ({"keep": 2}, [False] * 3, [kept(2), kept(2, 4), kept(4, 6)]),
], ids=["each epoch", "every second", "best only", "steps", "keep"])  # fmt: skip
def test_checkpoints_are_written_as_often_as_asked_after_the_last_epoch_and_for_the_best(
    run_ranks, tmp_path, settings, best, files
):
    """A later save of last.pt changes no best.pt, which may be the same file."""
    assert run_ranks(1, files_of_a_run, str(tmp_path), best, settings) == [files]


def write_numbered(folder: Path, *numbers: int) -> None:
    """Write checkpoints, as far as `drop_old` looks at them, one second after the other."""
    for second, number in enumerate(numbers):
        path = folder / checkpoint_files.numbered(number)
        torch.save({"progress": {"global_step": number}, "digests": {}}, path)
        os.utime(path, (second, second))


def test_the_numbered_checkpoints_written_last_are_kept_even_if_their_numbers_are_smaller(tmp_path):
    write_numbered(tmp_path, 7, 8, 4, 5)
    checkpoint_files.drop_old(str(tmp_path), keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000004.pt", "step-000005.pt"]


def write_foreign(path: Path, what: str) -> None:
    """Write a file of another program, as whose reading fails in a way of its own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/other" if what == "no pickle" else "a/data.pkl", b"digests global_step" * 9)
    raw = bytearray(path.read_bytes())
    if what == "corrupt":  # behind the header and the name
        raw[40:44] = b"\xff" * 4
    elif what == "encrypted":
        raw[6] |= 1
        raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(b"text" if what == "text" else raw)


@pytest.mark.parametrize("keep", [1, 4, 5, 8])
def test_only_checkpoints_of_the_trainer_beyond_keep_are_removed(tmp_path, keep):
    write_numbered(tmp_path, *range(5))
    foreign = ["step-7.pt", "step-0000007.pt", "step-000007.pt", "step-000008.pt", "step-000009.pt"]
    for name in foreign[:2]:
        shutil.copy(tmp_path / "step-000000.pt", tmp_path / name)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / foreign[2])
    (tmp_path / foreign[3]).symlink_to("step-7.pt")
    (tmp_path / foreign[4]).mkdir()
    for number, damage in enumerate(("corrupt", "encrypted", "text", "no pickle"), start=10):
        foreign.append(checkpoint_files.numbered(number))
        write_foreign(tmp_path / foreign[-1], damage)
    checkpoint_files.drop_old(str(tmp_path), keep)
    own = [checkpoint_files.numbered(number) for number in range(5)]
    assert sorted(os.listdir(tmp_path)) == sorted(foreign + own[-keep:])


# ---- system calls that fail ----------------------------------------------------------------------------


def test_an_old_checkpoint_that_can_not_be_removed_is_named(tmp_path, monkeypatch):
    write_numbered(tmp_path, 1, 2)
    monkeypatch.setattr(os, "unlink", failing(errno.EACCES))
    with pytest.raises(FileError, match=r"step-000001\.pt: could not be removed: permission denied"):
        checkpoint_files.drop_old(str(tmp_path), keep=1)


def test_a_second_name_that_can_not_be_given_leaves_no_third(tmp_path, monkeypatch):
    checkpoint_files.write({"a": torch.ones(2)}, str(tmp_path), ["best.pt"])
    replace, refuse = os.replace, failing(errno.EDQUOT)

    def give(path: str, to: str) -> None:
        (refuse if path.endswith(commit.LINK) else replace)(path, to)

    monkeypatch.setattr(os, "replace", give)
    with pytest.raises(FileError, match="quota"):
        checkpoint_files.write({"a": torch.zeros(2)}, str(tmp_path), ["last.pt", "best.pt"])
    assert os.listdir(tmp_path) == ["best.pt"]  # the first name is given last
    assert torch.load(tmp_path / "best.pt")["a"].sum() == 0


def test_an_error_of_the_folder_after_the_file_got_its_name_is_no_error_of_the_placing(tmp_path, monkeypatch):
    seen, placed = [], []

    @contextlib.contextmanager
    def placing():
        try:
            yield
        except BaseException as error:
            seen.append(error)
            raise

    for module, name in ((system, "sync_folder"), (commit, "keep_permissions")):  # behind the rename; before
        with monkeypatch.context() as patch, pytest.raises(FileError, match="error"):
            patch.setattr(module, name, failing(errno.EIO))
            state = {"a": torch.full((2,), len(placed))}
            checkpoint_files.write(state, str(tmp_path), ["last.pt"], placing=placing, placed=placed)
        assert (placed, len(seen)) == (["last.pt"], int(name != "sync_folder"))
    assert os.listdir(tmp_path) == ["last.pt"]
    assert torch.load(tmp_path / "last.pt")["a"].sum() == 0


def test_the_second_file_is_a_copy_if_the_file_system_has_no_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    checkpoint_files.write({"a": torch.ones(2)}, str(tmp_path), ["last.pt", "best.pt"])
    assert (tmp_path / "last.pt").read_bytes() == (tmp_path / "best.pt").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]
