"""The log of whole runs on several ranks: its contents, after a resume too; and that it changes no weight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import runs, trainings
from tests.support.run_log import entries_of, timeless
from train.config.shared import Every
from train.log.step_log import PHASES

EPOCHS, STEPS, SAMPLES = 2, 5, 55


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 10))


def run(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> str:
    """Train with a checkpoint of each step; return what was printed."""
    usual = {"epochs": EPOCHS, "batch_size": 12, "lr": 0.05, "out": folder, "log_every": 4, **runs.OFTEN}
    data, made = trainings.tensors((10,), SAMPLES), trainings.seeded(model)
    return runs.outcome(rank, world_size, data, made, {**usual, **settings})


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"{size}-ranks")
def whole(request: Any, run_ranks: Any, tmp_path_factory: Any) -> tuple[int, Path]:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(request.param, run, str(folder), {})
    return request.param, folder


def test_a_log_is_in_the_order_of_the_training(whole):
    order = [(e.get("step"), e.get("epoch"), e.get("steps")) for e in entries_of(whole[1])]
    assert order == [(4, None, 4), (None, 1, None), (8, None, 4), (10, None, 2), (None, 2, None)]


def test_every_line_has_its_fields(whole):
    for entry in entries_of(whole[1]):
        if "epoch" in entry:
            wanted = {"loss", "accuracy", "correct", "samples", "seconds", "train_loss", "train_accuracy"}
            assert wanted | {"train_samples", "test_samples", "lr"} <= set(entry)
            assert (entry["train_samples"], entry["test_samples"], entry["samples"]) == (SAMPLES, 10, 10)
        else:
            wanted = {"epochs", "steps", "loss", "lr", "grad_norm", "samples_per_second", "seconds"}
            assert wanted | {f"{phase}_seconds" for phase in PHASES} <= set(entry)
            assert entry["epochs"] == entry["step"] / STEPS and entry["grad_norm"] > 0
            assert 0 < sum(entry[f"{phase}_seconds"] for phase in PHASES) <= entry["seconds"] * 1.001


def test_the_losses_of_steps_add_up_to_those_of_epochs(whole):
    """Of the whole training: intervals and epochs end at different steps, but both cover each step once."""
    found = entries_of(whole[1])
    samples = {4: 48, 8: SAMPLES + 36 - 48, 10: 2 * SAMPLES - SAMPLES - 36}
    by_step = math.fsum(e["loss"] * samples[e["step"]] for e in found if "step" in e)
    by_epoch = math.fsum(e["train_loss"] * e["train_samples"] for e in found if "epoch" in e)
    assert by_step == pytest.approx(by_epoch, rel=1e-12)


@pytest.mark.parametrize("step", [1, 4, 5, 6, 9])
def test_a_run_resumed_at_any_step_logs_what_the_uninterrupted_one_logs(run_ranks, tmp_path, whole, step):
    size, folder = whole
    stopped = str(folder / f"step-{step:06d}.pt")
    run_ranks(size, run, str(tmp_path), {"resume": stopped})
    found, all_of_them = timeless(entries_of(tmp_path)), timeless(entries_of(folder))
    assert found == all_of_them[-len(found) :]
    before = all_of_them[: -len(found)]
    assert all(e.get("step", 0) <= step and e.get("epoch", 0) <= step // STEPS for e in before)


def test_a_run_that_goes_back_in_its_own_folder_has_each_line_once(run_ranks, tmp_path):
    run_ranks(2, run, str(tmp_path), {})
    before = timeless(entries_of(tmp_path))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')  # as a crash leaves it
    run_ranks(2, run, str(tmp_path), {"resume": str(tmp_path / "step-000006.pt")})
    assert timeless(entries_of(tmp_path)) == before


def test_training_longer_goes_on_with_the_log(run_ranks, tmp_path):
    run_ranks(2, run, str(tmp_path), {"scheduler": "none"})
    run_ranks(2, run, str(tmp_path), {"scheduler": "none", "resume": "auto", "epochs": 3})
    found = entries_of(tmp_path)
    assert [e["step"] for e in found if "step" in e] == [4, 8, 10, 12, 15]
    assert [e["steps"] for e in found if "step" in e] == [4, 4, 2, 2, 3]
    assert [e["epoch"] for e in found if "epoch" in e] == [1, 2, 3]


def test_on_another_number_of_ranks_an_interval_goes_on_with_the_same_sums(run_ranks, tmp_path):
    """The weights of the saved step are the same, so with a rate of almost nothing the losses are too."""
    settings = {"lr": 1e-9, "batch_size": 5, "log_every": 10}
    run_ranks(2, run, str(tmp_path / "two"), settings)
    saved = str(tmp_path / "two" / "step-000006.pt")
    run_ranks(1, run, str(tmp_path / "one"), {**settings, "resume": saved})
    two, one = (next(e for e in entries_of(tmp_path / name) if "steps" in e) for name in ("two", "one"))
    assert (two["step"], two["steps"]) == (one["step"], one["steps"]) == (10, 10)
    assert one["loss"] == pytest.approx(two["loss"], rel=0.05)  # dropout is drawn anew


def test_an_evaluation_within_an_epoch_is_a_line_of_its_own(run_ranks, tmp_path):
    run_ranks(2, run, str(tmp_path), {"eval_every": Every(3, "steps")})
    found = [e for e in entries_of(tmp_path) if "test_loss" in e]
    assert [(e["step"], e["epochs"]) for e in found] == [(3, 0.6), (6, 1.2), (9, 1.8)]
    assert all(e["test_samples"] == 10 and 0 <= e["test_accuracy"] <= 1 for e in found)


def weights(folder: Path) -> list[torch.Tensor]:
    return list(torch.load(folder / "last.pt", weights_only=True)["model"].values())


def test_how_often_and_where_to_it_is_logged_changes_no_bit_of_the_weights(run_ranks, tmp_path):
    pytest.importorskip("tensorboard")
    every = [{"log_every": 1, "tensorboard": True}, {"log_every": 3}, {"log_every": 999}]
    for number, settings in enumerate(every):
        run_ranks(2, run, str(tmp_path / str(number)), settings)
    first, *others = (weights(tmp_path / str(number)) for number in range(len(every)))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_forced_over_an_old_run_tensorboard_shows_only_the_new_one(run_ranks, tmp_path):
    pytest.importorskip("tensorboard")
    for settings in ({}, {"force": True}):
        run_ranks(2, run, str(tmp_path), {"tensorboard": True, **settings})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
