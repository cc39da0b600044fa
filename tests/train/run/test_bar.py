"""The figures behind the bar, and the seconds of an epoch by what they were spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import runs
from tests.support.run_log import entries_of, epochs_of
from train.log import step_log
from train.log.step_log import Work
from train.run.report import Bar, Clock, in_hours
from train.trainer.trainer import Trainer


def test_seconds_of_training_and_of_evaluations_are_told_apart():
    clock = Clock()

    def steps() -> Iterator[None]:
        for _ in range(3):
            time.sleep(0.05)
            yield

    for _ in clock.training(steps()):
        time.sleep(0.02)  # a save, say
        with clock.evaluating():
            time.sleep(0.03)
    times = clock.times()
    assert times["train_seconds"] >= 0.15 and times["evaluate_seconds"] >= 0.09
    assert times["seconds"] >= times["train_seconds"] + times["evaluate_seconds"] + 0.05


def slowly_scored(rank: int, size: int, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        score = Trainer.scores
        patch.setattr(Trainer, "scores", lambda self: (time.sleep(0.2), score(self))[1])
        return runs.run(rank, size, runs.steady, folder, {"eval_every": runs.Every(1, "steps")})


def test_the_log_has_the_seconds_of_each_epochs_training_and_evaluations(run_ranks, tmp_path):
    run_ranks(2, slowly_scored, str(tmp_path))
    for epoch in epochs_of(tmp_path):
        assert epoch["evaluate_seconds"] >= 0.6  # three evaluations
        assert 0 < epoch["train_seconds"] <= epoch["seconds"] - epoch["evaluate_seconds"]


# ---- FLOPs, memory, the bar ----------------------------------------------------------------------------


def test_the_operations_of_a_pass_are_those_that_paper_and_pencil_give():
    model, inputs = nn.Linear(30, 20, bias=False), torch.rand(5, 30, requires_grad=True)
    flops = step_log.flops_of(lambda: model(inputs).sum().backward())
    assert flops == 3 * 2 * 5 * 30 * 20  # forward, and the gradients of weights and of inputs
    assert step_log.flops_of(lambda: torch.ones(3).sum()) is None
    assert step_log.flops_of(lambda: 1 / 0) is None


def test_rates_are_of_all_ranks_and_left_out_where_they_are_not_known():
    assert Work().rates(10, 10, 2.0) == {}
    known = Work("tokens", flops=1000, peak=50_000.0).rates(10, 640, 2.0)
    assert known == {"tokens_per_second": 320.0, "flops_per_second": 5000.0, "mfu": 0.1}


@pytest.mark.parametrize(
    ("name", "amp", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "none", 19.5e12),
        ("Tesla T4", "fp16", 65e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("Radeon", "bf16", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(monkeypatch, name, amp, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    expected = None if peak is None else 4 * peak
    assert step_log.peak_of(torch.device("cuda", 0), amp, 4) == expected
    assert step_log.peak_of(torch.device("cpu"), amp, 4) is None


def test_the_log_says_how_much_is_computed_in_a_second_and_the_memory(run_ranks, tmp_path):
    run_ranks(2, runs.run, runs.steady, str(tmp_path), {"log_every": 2})
    model, (image, _) = runs.steady(), (torch.rand(1, *runs.SHAPE), 0)
    of_sample = step_log.flops_of(lambda: F.cross_entropy(model(image), torch.zeros(1).long()).backward())
    assert of_sample
    for entry in (entry for entry in entries_of(tmp_path) if "grad_norm" in entry):
        assert entry["flops_per_second"] == pytest.approx(of_sample * entry["samples_per_second"], rel=1e-3)
        assert "mfu" not in entry and 1e7 < entry["peak_memory"] < 1e11


def figures(
    latest: dict[str, float], unit: str = "", done: int = 30, steps: int | None = 50, most: int | None = None
) -> list[str]:
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(training=SimpleNamespace(max_steps=most)),
        feed=SimpleNamespace(known_steps=steps),
        log=SimpleNamespace(latest=latest, work=Work(unit)),
        place=SimpleNamespace(device=torch.device("cpu")),
        progress=SimpleNamespace(global_step=10),
        updater=SimpleNamespace(total_steps=100),
    )
    bar = Bar(trainer, shown=True)
    bar._began -= 60.0
    trainer.progress.global_step += done
    return bar.figures()


def test_the_bar_has_the_speed_the_utilisation_the_memory_and_the_time_left():
    rate, mfu, memory, left = figures({"samples_per_second": 1234.5, "mfu": 0.41, "tokens_per_second": 9.0})
    assert (rate, mfu) == ("1,234 samples/s", "MFU 41%")
    assert memory.endswith(" GB") and left == "2:00 left"  # 60 of 90 steps, 2 s each
    assert figures({"tokens_per_second": 56789.0}, "tokens")[0] == "56,789 tokens/s"
    assert len(figures({}, done=0)) == 1
    assert len(figures({}, steps=None)) == 1  # of a stream of no known length, nobody knows the time left
    assert figures({}, steps=None, most=100)[1] == "2:00 left"


def test_a_time_is_shown_in_hours_minutes_and_seconds():
    assert [in_hours(seconds) for seconds in (0, 59.6, 3599, 3600, 90061)] == [
        *("0:00", "1:00", "59:59", "1:00:00", "25:01:01")
    ]
