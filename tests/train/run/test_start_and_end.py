"""Runs that start from a file, change samples or settings, or end in the middle of an epoch are exact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import runs, trainings
from tests.ranks.programs import TINY, start
from tests.ranks.runs import contents
from tests.support.run_log import entries_of, epochs_of
from tests.support.running import SHARED
from train import main
from train.checkpoint import resume
from train.config.flags import Every
from train.model import builtin as models

SAMPLES, BATCH, STEPS, EPOCHS = 22, 6, 4, 2
FILES = ["best.pt", "config.toml", "last.pt", "log.jsonl"]


def wide() -> nn.Module:
    """Return a model with more outputs than there are classes."""
    model = runs.restless()
    model.head = nn.Linear(6, 30)
    return model


def run(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> str:
    usual = {"data": "folder:x", "epochs": EPOCHS, "batch_size": BATCH, "lr": 0.05, "out": folder}
    settings = {**usual, **runs.OFTEN, **settings}
    data = trainings.tensors(runs.SHAPE, SAMPLES)
    model = trainings.seeded(wide if settings.get("model") == "wide" else runs.restless)
    init = settings.get("init")
    remarks = resume.load_weights(model, init) if init else ()
    return runs.outcome(rank, world_size, data, model, settings, remarks=remarks)


def numbered(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.pt"


# ---- samples that are changed --------------------------------------------------------------------------


def test_samples_are_changed_alike_on_any_number_of_ranks(run_ranks, tmp_path):
    settings = {"augment": "auto", "mixup": 0.4, "cutmix": 1.0, "batchnorm": "sync", "epochs": 1}
    states = []
    for size in (1, 2, 3):
        run_ranks(size, run, str(tmp_path / str(size)), settings)
        states.append(runs.read(numbered(tmp_path / str(size), 1))["model"])
    for other in states[1:]:  # dropout draws other numbers on other ranks: only what comes before it
        for name in ("running_mean", "running_var"):
            first, second = (state[f"module.blocks.0.norm.{name}"] for state in (states[0], other))
            assert torch.allclose(first, second, atol=1e-6)


def test_a_model_may_have_more_outputs_than_the_classes_that_are_mixed(run_ranks, tmp_path):
    settings = {"model": "wide", "mixup": 0.4, "label_smoothing": 0.1, "epochs": 1}
    assert "saved" in run_ranks(2, run, str(tmp_path), settings)[0]


# ---- where a run ends ----------------------------------------------------------------------------------


@pytest.mark.covered(lambda size: size == 3)
@pytest.mark.parametrize("size", [1, 3])
def test_more_steps_after_max_steps_give_the_run_that_had_them_at_once(run_ranks, tmp_path, size):
    settings = {"scheduler": "none", "save_every": Every(9, "epochs"), "keep": 0, "augment": "crop-flip"}
    run_ranks(size, run, str(tmp_path / "whole"), {**settings, "max_steps": 7})
    said = run_ranks(size, run, str(tmp_path / "parts"), {**settings, "max_steps": 6})
    assert "saved" in said[0]
    last = entries_of(tmp_path / "parts")[-1]
    assert (last["step"], last["train_samples"]) == (6, 2 * BATCH)
    row = next(line.split() for line in said[0].splitlines() if line.startswith(" 1.50/2"))
    assert row[1] == f"{last['train_loss']:.4f}" and row[3] == f"{last['test_loss']:.4f}"
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == FILES
    said = run_ranks(size, run, str(tmp_path / "parts"), {**settings, "max_steps": 7, "resume": "auto"})
    assert "epoch 2, step 2 of 4" in said[0]
    parts = ("model", "optimizer", "scheduler", "plan", "rng")
    ends = [contents(tmp_path / name / "last.pt", *parts) for name in ("parts", "whole")]
    assert ends[0] == ends[1]
    said = run_ranks(size, run, str(tmp_path / "parts"), {**settings, "max_steps": 7, "resume": "auto"})
    assert "already has 7 steps: nothing to do" in said[0]


@pytest.mark.covered(lambda size: size == 3)
@pytest.mark.parametrize("size", [1, 3])
def test_runs_of_max_time_one_after_the_other_give_the_uninterrupted_run(run_ranks, tmp_path, size):
    settings = {"save_every": Every(9, "epochs"), "keep": 0, "mixup": 0.4, "batch_size": SAMPLES // 2}
    run_ranks(size, run, str(tmp_path / "whole"), settings)
    short = {**settings, "resume": "auto", "max_time": 1e-9}  # time for one step
    for _ in range(EPOCHS * 2 - 1):
        said = run_ranks(size, run, str(tmp_path / "parts"), short)
        assert "ended   by --max-time\nto continue:\n  " in said[0]
    assert "ended" not in run_ranks(size, run, str(tmp_path / "parts"), short)[0]
    assert contents(tmp_path / "parts" / "last.pt") == contents(tmp_path / "whole" / "last.pt")
    losses = [[entry["loss"] for entry in epochs_of(tmp_path / name)] for name in ("parts", "whole")]
    assert losses[0] == losses[1]


def test_evaluations_between_epochs_are_logged_change_nothing_and_may_give_the_best(run_ranks, tmp_path):
    seldom = {"save_every": Every(9, "epochs"), "keep": 0}
    run_ranks(2, run, str(tmp_path / "seldom"), seldom)
    run_ranks(2, run, str(tmp_path / "often"), {**seldom, "eval_every": Every(1, "steps")})
    parts = ("model", "optimizer", "scheduler", "rng")
    ends = [contents(tmp_path / name / "last.pt", *parts) for name in ("often", "seldom")]
    assert ends[0] == ends[1]
    scored = [entry for entry in entries_of(tmp_path / "often") if "test_loss" in entry or "epoch" in entry]
    assert [entry.get("step", entry.get("epoch", 0) * STEPS) for entry in scored] == [*range(1, 9)]
    within = [entry for entry in scored if "step" in entry]
    assert [entry["epochs"] for entry in within] == [0.25, 0.5, 0.75, 1.25, 1.5, 1.75]
    assert all(entry["test_samples"] == 10 and 0 <= entry["test_accuracy"] <= 1 for entry in within)
    scores = [entry.get("test_accuracy", entry.get("accuracy")) for entry in scored]
    best = runs.read(tmp_path / "often" / "best.pt")["progress"]
    assert scores.index(max(scores)) + 1 == best["global_step"]


# ---- where a run starts --------------------------------------------------------------------------------


def weights(path: Path, seed: int = 9) -> str:
    model = trainings.seeded(runs.restless, seed)
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, path)
    return str(path)


def test_all_ranks_start_from_the_weights_of_the_file_that_only_rank_0_has(run_ranks, tmp_path):
    path = weights(tmp_path / "w.pt")
    said = run_ranks(2, run_where_only_rank_0_has_the_file, path, str(tmp_path / "a"))
    assert "18 tensors from" in said[0]
    for name, settings in (("b", {"init": path}), ("c", {})):
        run_ranks(2, run, str(tmp_path / name), settings)
    a, b, c = (contents(tmp_path / name / "last.pt") for name in "abc")
    assert a == b != c


def run_where_only_rank_0_has_the_file(rank: int, world_size: int, path: str, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        return run(rank, world_size, folder, {"init": path if rank == 0 else "/nowhere/w.pt"})


def test_a_resume_takes_the_same_init_from_anywhere_or_none_and_no_other(run_ranks, tmp_path):
    first, folder = weights(tmp_path / "w.pt"), tmp_path / "run"
    run_ranks(1, run, str(folder), {"init": first, "epochs": 1})
    moved = str((tmp_path / "w.pt").rename(tmp_path / "moved.pt"))
    for settings in ({"init": moved}, {}):
        run_ranks(1, run, str(folder), {**settings, "epochs": 2, "resume": str(numbered(folder, 3))})
        assert runs.read(folder / "last.pt")["progress"]["epoch"] == 2
    other = {"init": weights(tmp_path / "other.pt", seed=8), "epochs": 3, "resume": "auto"}
    (said,) = run_ranks(1, run, str(folder), other)
    assert said.startswith("UsageFault") and "did not start from the weights in" in said
    run_ranks(1, run, str(tmp_path / "plain"), {"epochs": 1})
    (said,) = run_ranks(1, run, str(tmp_path / "plain"), {"init": moved, "epochs": 2, "resume": "auto"})
    assert "did not start from the weights in" in said


# ---- what a resume may change --------------------------------------------------------------------------


def rates(folder: Path) -> dict[int, float]:
    """Return the learning rate of each step in a log."""
    return {entry["step"]: entry["lr"] for entry in entries_of(folder) if "step" in entry and "lr" in entry}


def groups_of(folder: Path) -> list[dict[str, Any]]:
    return runs.read(folder / "last.pt")["optimizer"]["param_groups"]


def test_a_changed_learning_rate_is_that_of_the_next_step(run_ranks, tmp_path):
    settings = {"scheduler": "none", "log_every": 1}
    run_ranks(2, run, str(tmp_path), {**settings, "epochs": 1})
    (refused, _) = run_ranks(2, run, str(tmp_path), {**settings, "resume": "auto", "lr": 0.01})
    assert "belongs to a run with --lr 0.05" in refused and "--change lr" in refused
    said = run_ranks(2, run, str(tmp_path), {**settings, "resume": "auto", "lr": 0.01, "change": ("lr",)})
    assert "lr 0.05 -> 0.01" in said[0]
    assert rates(tmp_path) == {step: 0.05 if step <= STEPS else 0.01 for step in range(1, 2 * STEPS + 1)}
    assert {group["lr"] for group in groups_of(tmp_path)} == {0.01}


def test_a_schedule_goes_on_with_the_changed_learning_rate(run_ranks, tmp_path):
    run_ranks(1, run, str(tmp_path), {"max_time": 1e-9, "log_every": 1})
    run_ranks(1, run, str(tmp_path), {"resume": "auto", "change": ("lr",), "lr": 0.5, "log_every": 1})
    run_ranks(1, run, str(tmp_path / "b"), {"lr": 0.5, "log_every": 1})
    changed, whole = (list(rates(folder).values()) for folder in (tmp_path, tmp_path / "b"))
    assert changed == pytest.approx([whole[0] / 10, *whole[1:]])


def test_momentum_and_weight_decay_reach_the_groups_and_decay_can_not_be_turned_off(run_ranks, tmp_path):
    run_ranks(1, run, str(tmp_path), {"epochs": 1})
    ended = {"weight_decay": 0.0, "change": ("weight_decay",), "resume": "auto"}
    (said,) = run_ranks(1, run, str(tmp_path), ended)
    assert "parameters are in other groups than the saved ones" in said
    changed = {"momentum": 0.5, "weight_decay": 0.01, "change": ("momentum", "weight-decay")}
    run_ranks(1, run, str(tmp_path), {**changed, "resume": "auto"})
    found = [(group["weight_decay"], group["momentum"]) for group in groups_of(tmp_path)]
    assert found == [(0.01, 0.5), (0.0, 0.5)]


def test_changing_nothing_changes_no_bit(run_ranks, tmp_path):
    run_ranks(2, run, str(tmp_path / "whole"), {})
    every = ("lr", "momentum", "weight_decay", "scheduler", "warmup", "clip_norm", "augment")
    settings = {"resume": str(numbered(tmp_path / "whole", 5)), "change": every}
    run_ranks(2, run, str(tmp_path / "rest"), settings)
    assert contents(tmp_path / "rest" / "last.pt") == contents(tmp_path / "whole" / "last.pt")


# ---- the command line ----------------------------------------------------------------------------------


def test_an_init_that_does_not_fit_says_on_a_line_each_what_to_do(here, capsys):
    torch.save({f"net.{k}": v for k, v in models.resnet20(num_classes=7).state_dict().items()}, "w.pt")
    assert main.main(["--data", "fake:20", "--model", "resnet20", "--init", "w.pt"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "  ckpttool strip-prefix w.pt w.mended.pt --prefix net." in lines
    assert lines[-1] == "  --init w.mended.pt --init-allow-missing 'linear.*'"


def test_two_ranks_train_with_loading_processes_and_say_how_to_go_on(tmp_path):
    flags = ["--augment", "auto", "--mixup", "0.2", "--workers", "1", "--max-time", "0.001s"]
    flags += ["--spawn", "2", "--out", str(tmp_path / "r")]
    done = start([sys.executable, "train/main.py", *TINY, *flags])
    assert done.returncode == 0, done.stderr
    said = done.stdout[done.stdout.index("ended   by --max-time\nto continue:\n  python") :]
    assert "--spawn 2" in said and "--resume auto" in said and "--augment auto" in said


@pytest.mark.long
@pytest.mark.timeout(420)
def test_a_published_network_does_not_get_worse_in_an_epoch(resnet20, tmp_path):
    """776 of 846 test images are right before it."""
    pictures = SHARED / "data" / "cifar10-mini"
    command = [sys.executable, "train/main.py", "--model", "resnet20", "--data", f"folder:{pictures}"]
    command += ["--init", str(resnet20), "--augment", "crop-flip", "--epochs", "1", "--batch-size", "128"]
    done = start([*command, "--lr", "0.02", "--out", str(tmp_path / "r")], patience=400.0)
    assert done.returncode == 0, done.stderr
    assert "init    97 tensors from" in done.stdout
    (entry,) = epochs_of(tmp_path / "r")
    assert entry["samples"] == 846
    assert entry["correct"] >= 776


@pytest.mark.long
def test_the_tutorial_s_network_is_trained_alike_on_one_process_and_on_four(tmp_path):
    pictures = SHARED / "data" / "cifar10-mini"
    if not pictures.exists():
        pytest.skip("needs the images in the folder `shared` beside the repository")
    command = [sys.executable, "train/main.py", "--model", "examples/tutorial_cnn.py:net(double=True)"]
    command += ["--data", f"folder:{pictures}", "--mean", "0.5", "--std", "0.5", "--batch-size", "16"]
    command += ["--lr", "0.001", "--weight-decay", "0", "--scheduler", "none", "--max-steps", "12"]
    states = []
    for name, ranks in (("one", []), ("four", ["--spawn", "4"])):
        done = start([*command, *ranks, "--out", str(tmp_path / name)])
        assert done.returncode == 0, done.stderr
        states.append(runs.read(tmp_path / name / "last.pt")["model"])
    one, four = states
    assert max(float((one[name] - four[name]).abs().max()) for name in one) < 1e-12
