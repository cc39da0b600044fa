"""log.jsonl: what whole runs log, what one that continues removes, and what a reader refuses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from torch import nn

from ckpttool.analysis import run_log
from ckpttool.errors import Damaged, FileError, Unreadable
from tests.ranks import runs, trainings
from tests.support.run_log import entries_of
from train.log import step_log
from train.log.step_log import PHASES


def test_a_log_that_cant_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(FileError, match=r"log\.jsonl: could not be written"):
        step_log.append_entry(str(tmp_path), {"epoch": 1})


def test_a_loss_of_nan_is_null_in_the_log(tmp_path):
    infinite = {"mse": float("inf"), "each": [1.0, float("nan")]}
    step_log.append_entry(str(tmp_path), {"epoch": 1, "loss": float("nan"), "metrics": infinite})
    (text,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert text == '{"epoch": 1, "loss": null, "metrics": {"mse": null, "each": [1.0, null]}}'


def test_cutting_removes_later_epochs_and_a_line_cut_off_by_a_crash(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}\n{"epoch": 3}\n{"epo')
    step_log.cut_log(str(tmp_path), epoch=2, step=10)
    assert (tmp_path / "log.jsonl").read_text() == '{"epoch": 1}\n{"epoch": 2}\n'


LOG = [{"step": 2}, {"step": 4}, {"epoch": 1}, {"note": "x"}]
LOG += [{"step": 6}, {"step": 8}, {"epoch": 2}, {"a": 1}]


@pytest.mark.parametrize(
    ("epoch", "step", "kept"),
    [(0, 0, 0), (0, 3, 1), (0, 4, 2), (1, 4, 4), (1, 6, 5), (1, 7, 5), (1, 8, 6), (2, 8, 8), (9, 99, 8)],
)
def test_cutting_keeps_what_came_before_the_step_that_the_run_continues_from(tmp_path, epoch, step, kept):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in LOG))
    step_log.cut_log(str(tmp_path), epoch=epoch, step=step)
    assert entries_of(tmp_path) == LOG[:kept]


def test_a_whole_last_line_without_a_line_break_is_kept_apart_from_the_next_one(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 2}')
    step_log.cut_log(str(tmp_path), epoch=0, step=2)
    step_log.append_entry(str(tmp_path), {"step": 4})
    assert entries_of(tmp_path) == [{"step": 2}, {"step": 4}]


def test_a_run_without_a_log_has_nothing_to_cut(tmp_path):
    step_log.cut_log(str(tmp_path), epoch=1, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_log_is_read_by_its_folder_or_its_own_path_without_a_line_cut_off(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 2}\n\n{"epoch": 1}\n{"st')
    for path in (tmp_path, tmp_path / "log.jsonl"):
        assert run_log.read(path) == [{"step": 2}, {"epoch": 1}]


@pytest.mark.parametrize("text", ["", "\n\n", '{"st'])
def test_a_log_without_entries_is_refused(tmp_path, text):
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(Damaged, match="holds no entries yet"):
        run_log.read(tmp_path)


@pytest.mark.parametrize("line", [b"[1]", b"epoch 1", b'"epoch"', b"\xff\xfe", b"3", b"[" * 100_000])
def test_a_line_that_is_no_object_is_refused_by_its_number(tmp_path, line):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 2}\n' + line + b'\n{"step": 4}\n')
    with pytest.raises(Damaged, match="line 2 is not a JSON object"):
        run_log.read(tmp_path)


def test_a_missing_log_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(Unreadable, match=r"log\.jsonl: no such file") as refused:
        run_log.read(tmp_path)
    assert "folder of a run" in refused.value.hint


# ---- whole runs on several ranks -----------------------------------------------------------------------

EPOCHS, STEPS, SAMPLES = 2, 5, 55


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 10))


def run(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> str:
    """Train with a checkpoint of each step; return what was printed."""
    usual = {"epochs": EPOCHS, "batch_size": 12, "lr": 0.05, "out": folder, "log_every": 4, **runs.OFTEN}
    data, made = trainings.tensors((10,), SAMPLES), trainings.seeded(model)
    return runs.outcome(rank, world_size, data, made, {**usual, **settings})


@pytest.fixture(scope="module", params=[1, 3], ids=lambda size: f"{size}-ranks")
def whole(request: Any, run_ranks: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """The log of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(request.param, run, str(folder), {})
    return entries_of(folder)


def order_of(entries: list[dict[str, Any]]) -> list[tuple[int | None, ...]]:
    return [(entry.get("step"), entry.get("epoch"), entry.get("steps")) for entry in entries]


ORDER = [(4, None, 4), (None, 1, None), (8, None, 4), (10, None, 2), (None, 2, None)]


def test_a_log_is_in_the_order_of_the_training(whole):
    assert order_of(whole) == ORDER


def test_every_line_has_its_fields(whole):
    for entry in whole:
        if "epoch" in entry:
            wanted = {"loss", "accuracy", "correct", "samples", "seconds", "train_loss", "train_accuracy"}
            wanted |= {"train_seconds", "evaluate_seconds"}
            assert wanted | {"train_samples", "test_samples", "lr"} <= set(entry)
            assert (entry["train_samples"], entry["test_samples"], entry["samples"]) == (SAMPLES, 10, 10)
        else:
            wanted = {"epochs", "steps", "loss", "lr", "grad_norm", "samples_per_second", "seconds"}
            wanted |= {"peak_memory", "flops_per_second"}
            assert wanted | {f"{phase}_seconds" for phase in PHASES} <= set(entry)
            assert entry["epochs"] == entry["step"] / STEPS and entry["grad_norm"] > 0
            assert 0 < sum(entry[f"{phase}_seconds"] for phase in PHASES) <= entry["seconds"] * 1.001


def test_the_losses_of_steps_add_up_to_those_of_epochs(whole):
    """Of the whole training: intervals and epochs end at different steps, but both cover each step once."""
    samples = {4: 48, 8: SAMPLES + 36 - 48, 10: 2 * SAMPLES - SAMPLES - 36}
    by_step = math.fsum(e["loss"] * samples[e["step"]] for e in whole if "step" in e)
    by_epoch = math.fsum(e["train_loss"] * e["train_samples"] for e in whole if "epoch" in e)
    assert by_step == pytest.approx(by_epoch, rel=1e-12)


def test_training_longer_goes_on_with_the_log(run_ranks, tmp_path):
    run_ranks(2, run, str(tmp_path), {"scheduler": "none"})
    run_ranks(2, run, str(tmp_path), {"scheduler": "none", "resume": "auto", "epochs": 3})
    assert order_of(entries_of(tmp_path)) == [*ORDER, (12, None, 2), (15, None, 3), (None, 3, None)]


@pytest.mark.long
def test_on_another_number_of_ranks_an_interval_goes_on_with_the_same_sums(run_ranks, tmp_path):
    """The weights of the saved step are the same, so with a rate of almost nothing the losses are too."""
    settings = {"lr": 1e-9, "batch_size": 5, "log_every": 10}
    run_ranks(2, run, str(tmp_path / "two"), settings)
    saved = str(tmp_path / "two" / "step-000006.pt")
    run_ranks(1, run, str(tmp_path / "one"), {**settings, "resume": saved})
    two, one = (next(e for e in entries_of(tmp_path / name) if "steps" in e) for name in ("two", "one"))
    assert (two["step"], two["steps"]) == (one["step"], one["steps"]) == (10, 10)
    assert one["loss"] == pytest.approx(two["loss"], rel=0.05)  # dropout is drawn anew


def test_how_often_and_where_to_it_is_logged_changes_no_bit_of_the_weights(run_ranks, tmp_path):
    """Forced over the old run, TensorBoard shows only the new one."""
    pytest.importorskip("tensorboard")
    events = {"log_every": 1, "tracker": ("tensorboard",)}
    ends = []
    for name, settings in (("a", events), ("b", {"log_every": 999}), ("a", {**events, "force": True})):
        run_ranks(2, run, str(tmp_path / name), settings)
        ends.append(runs.contents(tmp_path / name / "last.pt", "model"))
    assert ends == [ends[0]] * 3
    assert len(list((tmp_path / "a" / "tensorboard").iterdir())) == 1
