"""`--best`, `--keep-best`, `--stop-early`, `--also-test`: which score is better, what is kept, what ends."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
from torch.utils.data import Subset

from ckpttool import metrics
from ckpttool.errors import CheckFailed, UsageFault
from ckpttool.metrics.certificate import Evaluation, LossCertificate
from tests.ranks import runs, trainings
from tests.support.run_log import entries_of, epochs_of
from train import evaluate, main
from train.checkpoint import files
from train.config.flags import Every
from train.config.sections import OWN
from train.data.data_set import Data
from train.tasks.builtin import Classification, Regression, Task
from train.trainer.progress import Progress, Selection, selection

CLASSES = Classification(trainings.tensors((3, 8, 8), 10))


class Own(Task):
    metrics: ClassVar[dict[str, Any]] = {
        "mae": metrics.MeanAbsoluteError,
        "top": lambda: metrics.TopK(2),
        "number": metrics.MeanVariance,
    }


# ---- which score is better -----------------------------------------------------------------------------


@pytest.mark.parametrize(("best", "task", "expected"), [
    (None, CLASSES, Selection(OWN, "accuracy", 1)),
    (None, Regression(), Selection(OWN, "loss", -1)),
    ("loss", CLASSES, Selection(OWN, "loss", -1)),
    ("accuracy", CLASSES, Selection(OWN, "accuracy", 1)),
    ("mae", Regression(), Selection(OWN, "mae", -1)),
    ("r2", Regression(), Selection(OWN, "r2", 1)),
    ("top", Own(), Selection(OWN, "top", 1)),
    ("mae:max", Own(), Selection(OWN, "mae", 1)),
    ("number:min", Own(), Selection(OWN, "number", -1)),
    ("ood/loss", CLASSES, Selection("ood", "loss", -1)),
    ("ood/r2:min", Regression(), Selection("ood", "r2", -1)),
])  # fmt: skip
def test_the_metric_says_whether_more_of_it_is_better(best, task, expected):
    assert selection(best, task, ("ood",)) == expected


@pytest.mark.parametrize(("best", "task", "said", "hint"), [
    ("mae", CLASSES, "has no 'mae'", "one of loss, accuracy"),
    ("accuracy", Regression(), "has no 'accuracy'", "one of loss, mse, mae, r2"),
    ("number", Own(), "nothing says whether more of it is better", "number:min or number:max"),
    ("loss:least", CLASSES, "nothing says", "loss:min or loss:max"),
    ("b/loss", CLASSES, "no test set is named 'b'", "--also-test names ood"),
    ("", CLASSES, "has no ''", "one of"),
])  # fmt: skip
def test_what_is_not_known_is_refused_and_not_guessed(best, task, said, hint):
    with pytest.raises(UsageFault, match=said) as refused:
        selection(best, task, ("ood",))
    assert hint in (refused.value.hint or "")


def of_loss(loss: float, **values: Any) -> LossCertificate:
    return LossCertificate(Evaluation(), 4, loss, (4,), "", 4, values)


def test_a_merit_is_the_larger_the_better_and_that_of_nan_is_the_least():
    least, most = Selection(OWN, "mae", -1), Selection("ood", "r2", 1)
    scores = {OWN: of_loss(1.0, mae=0.25), "ood": of_loss(2.0, r2=0.5)}
    assert (least.merit(scores), most.merit(scores)) == (-0.25, 0.5)
    assert least.merit({OWN: of_loss(1.0, mae=math.nan)}) == -math.inf
    assert least.merit({OWN: of_loss(math.nan, mae=0.1)}) == -math.inf
    assert least.in_words(-0.25) == "mae 0.25" and most.in_words(0.5) == "ood/r2 0.5"
    assert type(least.merit({OWN: of_loss(1.0, mae=numpy.float64(0.25))})) is float
    with pytest.raises(CheckFailed, match="--best mae: is a list, not a number"):
        least.merit({OWN: of_loss(1.0, mae=[1, 2])})


# ---- what is kept --------------------------------------------------------------------------------------


def noted(merits: list[float], keep: int) -> tuple[list[tuple[bool, bool]], Progress]:
    progress, found = Progress(), []
    for merit in merits:
        progress.global_step += 1
        found.append(progress.note(merit, keep))
    return found, progress


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_the_best_are_kept_and_of_equal_ones_the_first(keep):
    for merits in itertools.product((0.1, 0.2, 0.3, -math.inf), repeat=5):
        found, progress = noted(list(merits), keep)
        finite = [(merit, -step) for step, merit in enumerate(merits, 1) if merit > -math.inf]
        wanted = sorted(finite, reverse=True)[:keep]
        assert progress.top == [[merit, -step] for merit, step in wanted]
        firsts = [merit > max([*merits[:n], -math.inf]) for n, merit in enumerate(merits)]
        assert [best for best, _ in found] == firsts
        assert all(kept for best, kept in found if best and keep)
        assert progress.since_best == (firsts[::-1].index(True) if any(firsts) else len(merits))


def test_fewer_are_kept_when_a_run_goes_on_with_a_smaller_number():
    _, progress = noted([0.1, 0.2, 0.3, 0.4], 4)
    assert progress.note(0.15, 2) == (False, False)
    assert [step for _, step in progress.top] == [4, 3]


EACH = {"eval_every": Every(1, "steps"), "epochs": 2, "lr": 0.3}


def ranked(folder: Path, metric: str = "accuracy", sign: int = 1) -> list[int]:
    """Return the steps of a run's evaluations, by its log, the best first."""
    scored: dict[int, float] = {}
    for entry in entries_of(folder):
        if "test_loss" in entry:
            scored[entry["step"]] = entry[f"test_{metric}"]
        elif "epoch" in entry:
            scored[entry["epoch"] * 3] = entry[metric]
    return sorted(scored, key=lambda step: (-sign * scored[step], step))


def kept(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("best-")) for path in folder.glob("best-*.pt"))


@pytest.mark.parametrize("size", [1, 2])
def test_the_best_checkpoints_are_those_that_the_log_says_and_hold_these_steps(run_ranks, tmp_path, size):
    settings = {**EACH, "best": "loss", "keep_best": 3}
    said = run_ranks(size, runs.run, runs.restless, str(tmp_path), settings)[0]
    best = ranked(tmp_path, "loss", -1)
    assert kept(tmp_path) == sorted(best[:3])
    for step in best[:3]:
        assert runs.read(tmp_path / f"best-{step:06d}.pt")["progress"]["global_step"] == step
    assert runs.read(tmp_path / "best.pt")["progress"]["global_step"] == best[0]
    assert (tmp_path / "best.pt").samefile(tmp_path / f"best-{best[0]:06d}.pt")
    assert f"best.pt (loss {-runs.read(tmp_path / 'best.pt')['progress']['best']:.4f})" in said


def test_a_run_that_is_stopped_and_resumed_keeps_the_same(run_ranks, tmp_path):
    settings = {**EACH, "keep_best": 2, "stop_early": 99}
    arguments = runs.restless, str(tmp_path), settings, (3,)
    _, differences = run_ranks(2, runs.straight_and_resumed, *arguments)[0]
    assert differences == {3: []}
    whole = tmp_path / "whole"
    run_ranks(2, runs.run, runs.restless, str(whole), {**settings, **runs.OFTEN})
    for stop in (2, 4):
        parts = tmp_path / f"parts-{stop}"
        for more in ({"stop_at": stop}, {"resume": "auto"}):
            run_ranks(2, runs.run, runs.restless, str(parts), {**settings, **more})
        assert kept(parts) == kept(whole), stop


def test_what_is_not_the_runs_stays_and_is_said(tmp_path):
    for name in ("best-000003.pt", "best-7.pt", "best-of-all.pt"):
        (tmp_path / name).write_text("a user's")
    files.drop_worse(str(tmp_path), [5], "training")
    assert len(list(tmp_path.iterdir())) == 3


def test_another_metric_begins_anew_where_it_is_allowed(run_ranks, tmp_path):
    usual = {**EACH, "keep_best": 1, "epochs": 1}
    run_ranks(1, runs.run, runs.restless, str(tmp_path), usual)
    other = {**usual, "best": "loss", "resume": "auto", "epochs": 2}
    said = run_ranks(1, runs.run, runs.restless, str(tmp_path), other)[0]
    hint = "belongs to a run with no --best (give the same, or --change best)"
    assert said.startswith("UsageFault") and hint in said
    said = run_ranks(1, runs.run, runs.restless, str(tmp_path), {**other, "change": ("best",)})[0]
    assert "best None -> loss" in said
    progress = runs.read(tmp_path / "best.pt")["progress"]
    assert progress["best"] < 0 and progress["global_step"] > 3


# ---- where a run ends ----------------------------------------------------------------------------------


def never_better(rank: int, size: int, folder: str, settings: dict[str, Any]) -> str:
    """Run with scores that get worse from the second one on."""
    merits = itertools.chain([0.1, 0.2], itertools.repeat(0.2))
    if settings.get("resume"):
        merits = itertools.repeat(0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Selection, "merit", lambda *_: next(merits))
        return runs.run(rank, size, runs.steady, folder, {**EACH, **settings})


@pytest.mark.covered(lambda size: size == 3)
@pytest.mark.parametrize("size", [1, 3])
def test_a_run_ends_early_and_a_larger_number_goes_on_from_there(run_ranks, tmp_path, size):
    said = run_ranks(size, never_better, str(tmp_path), {"stop_early": 2})[0]
    assert "ended   by --stop-early: 2 scores were not better" in said and "to continue" not in said
    last = runs.read(tmp_path / "last.pt")["progress"]
    assert (last["global_step"], last["since_best"]) == (4, 2)
    again = run_ranks(size, never_better, str(tmp_path), {"stop_early": 2, "resume": "auto"})[0]
    assert "already has 2 evaluations without a better score: nothing to do (--stop-early N" in again
    more = run_ranks(size, never_better, str(tmp_path), {"stop_early": 3, "resume": "auto"})[0]
    assert "ended   by --stop-early: 3 scores" in more
    rest = run_ranks(size, never_better, str(tmp_path), {"resume": "auto"})[0]
    assert "ended" not in rest and runs.read(tmp_path / "last.pt")["progress"]["global_step"] == runs.STEPS


def test_it_is_better_scores_that_count_and_the_end_of_a_training_is_no_early_one(run_ranks, tmp_path):
    said = run_ranks(1, never_better, str(tmp_path), {"stop_early": 5})[0]
    assert "ended" not in said and runs.read(tmp_path / "last.pt")["progress"]["global_step"] == runs.STEPS


def never_finite(rank: int, size: int, folder: str, settings: dict[str, Any]) -> str:
    merits = itertools.chain([0.1, 0.0], itertools.repeat(-math.inf))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Selection, "merit", lambda *_: next(merits))
        return runs.run(rank, size, runs.steady, folder, {**EACH, **settings})


def test_scores_that_are_no_numbers_are_said_where_they_end_a_run(run_ranks, tmp_path):
    said = run_ranks(1, never_finite, str(tmp_path), {"stop_early": 3})[0]
    assert "ended   by --stop-early: 3 scores were not better, 2 of them NaN or infinite\n" in said


# ---- several test sets ---------------------------------------------------------------------------------


def with_others(rank: int, size: int, folder: str, settings: dict[str, Any]) -> str:
    usual = {"epochs": 2, "batch_size": runs.BATCH, "lr": 0.05, "timeout": 20.0, "out": folder}
    data, few = trainings.tensors(runs.SHAPE, runs.SAMPLES), settings.pop("few", 3)
    others = {"few": dataclasses.replace(data, test=_first(data, few), fingerprint=f"{few}"), "same": data}
    data = dataclasses.replace(data, others=others)
    return runs.outcome(rank, size, data, trainings.seeded(runs.restless), {**usual, **settings})


def _first(data: Data, samples: int) -> Any:
    return Subset(data.test, range(samples))


@pytest.mark.covered(lambda size: size == 3)
@pytest.mark.parametrize("size", [1, 3])
def test_each_test_set_is_scored_by_its_name_and_changes_nothing(run_ranks, tmp_path, size):
    said = run_ranks(size, with_others, str(tmp_path / "with"), {"eval_every": Every(2, "steps")})[0]
    run_ranks(size, runs.run, runs.restless, str(tmp_path / "without"), {"warmup": Every(0, "epochs")})
    parts = "model", "optimizer", "rng"
    with_them, without = (runs.contents(tmp_path / name / "last.pt", *parts) for name in ("with", "without"))
    assert with_them == without
    for entry in (each for each in entries_of(tmp_path / "with") if "tests" in each):
        own = {name.removeprefix("test_"): value for name, value in entry.items()}
        for name in ("loss", "accuracy", "correct"):
            assert entry["tests"]["same"][name] == own[name]
        assert entry["tests"]["few"]["samples"] == 3 and "per_class" not in entry["tests"]["few"]
    assert "few: 3 samples" in said and said.count("    few  ") >= 2


def test_best_may_be_the_best_of_another_test_set(run_ranks, tmp_path):
    run_ranks(2, with_others, str(tmp_path), {"best": "few/loss"})
    losses = [epoch["tests"]["few"]["loss"] for epoch in epochs_of(tmp_path)]
    assert runs.read(tmp_path / "best.pt")["progress"]["epoch"] == losses.index(min(losses)) + 1


def test_scores_of_another_test_set_of_that_name_are_not_compared_with_those_before(run_ranks, tmp_path):
    usual = {"best": "few/loss", "stop_early": 9}
    run_ranks(1, with_others, str(tmp_path), {**usual, "epochs": 1})
    again = {**usual, "resume": "auto", "few": 5}
    said = run_ranks(1, with_others, str(tmp_path), again)[0]
    assert "whose --best few/loss is on another test set (3; now 5)" in said
    assert "belongs to" not in run_ranks(1, with_others, str(tmp_path), {**again, "change": ("best",)})[0]
    (losses,) = ([epoch["tests"]["few"]["loss"] for epoch in epochs_of(tmp_path)],)
    assert runs.read(tmp_path / "last.pt")["progress"]["best"] == -losses[-1]


OWN_DATA = """
import torch
from torch.utils.data import TensorDataset

def sets(size, classes=3):
    inputs = torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(size))
    return TensorDataset(inputs, torch.arange(size) % classes)

def data():
    return sets(12), sets(6)

def ood(classes=3):
    return sets(9, classes), sets(9, classes)
"""


def test_a_test_set_is_named_on_the_command_line_and_scores_as_evaluate_does(here, capsys):
    (here / "own.py").write_text(OWN_DATA)
    given = ["--data", "own.py:data", "--batch-size", "4", "--epochs", "1", "--out", "run"]
    assert main.main([*given, "--also-test", "ood=own.py:ood", "--best", "ood/accuracy"]) == 0
    (epoch,) = epochs_of(Path("run"))
    capsys.readouterr()
    threads = ["--threads", str(epoch["threads"])]
    checkpoint = ["run/best.pt", "--model", "simple-cnn", "--data", "own.py:ood"]
    assert evaluate.main([*checkpoint, "--json", *threads]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert epoch["tests"]["ood"] == {
        name: scored[name] for name in ("correct", "samples", "accuracy", "loss")
    }
    assert main.main([*given, "--force", "--also-test", "ood=own.py:ood(classes=2)"]) == 2
    assert "--also-test ood=own.py:ood(classes=2): its classes are not those of" in capsys.readouterr().err
