"""Evaluations: the trainer and train/evaluate.py give the same digits on any number of ranks."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from ckpttool.metrics.evaluating import BATCH
from tests.ranks import trainings
from tests.ranks.programs import BROKEN_DATA, ROOT, TORCHRUN, start
from tests.support.run_log import epochs_of
from train import evaluate, main
from train.config import command_line
from train.data import data_set as data
from train.data.data_set import Data
from train.model import builtin as models
from train.tasks.builtin import Classification
from train.trainer.progress import Scorer

SAME = ("correct", "samples", "accuracy", "loss", "threads", "batch_size")

MODEL = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
"""


def train_on_ranks(rank: int, world_size: int, arguments: list[str]) -> tuple[str, str] | None:
    """A whole run, and the error that it ended in."""
    job = main.prepare(command_line.parse(arguments))
    return trainings.error_of(lambda: main.train(job), Exception)


def score_on_ranks(rank: int, world_size: int, arguments: list[str]) -> dict[str, Any]:
    job = evaluate.prepare(evaluate.parse(arguments))
    return evaluate.as_json(job, evaluate.evaluate(job))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batchnorm", ["plain", "sync", "pooled"])
def test_the_log_and_the_evaluation_of_the_checkpoint_agree_to_the_last_digit(
    run_ranks, tmp_path, size, batchnorm
):
    (tmp_path / "own.py").write_text(MODEL)
    model = ["--model", f"{tmp_path}/own.py:net", "--data", "digits"]
    saving = ["--out", str(tmp_path / "run"), "--keep", "9"]
    training = [*model, *saving, "--epochs", "2", "--batchnorm", batchnorm]
    assert run_ranks(size, train_on_ranks, training, timeout=200) == [None] * size
    logged = epochs_of(tmp_path / "run")
    for entry, checkpoint in zip(logged, sorted((tmp_path / "run").glob("step-*.pt")), strict=True):
        for other in {1, 5 - size}:
            for found in run_ranks(other, score_on_ranks, [str(checkpoint), *model], timeout=200):
                assert [found[name] for name in SAME] == [entry[name] for name in SAME]


def test_a_rank_that_fails_during_an_evaluation_ends_all_at_once_with_its_error(run_ranks, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN_DATA)
    arguments = ["--data", f"{tmp_path}/broken.py:make", "--epochs", "1"]
    answers = run_ranks(3, train_on_ranks, [*arguments, "--out", str(tmp_path / "run")], timeout=200)
    assert [name for name, _ in answers] == ["RankFailed", "RankFailed", "ValueError"]
    assert all("sample 300 is broken" in said for _, said in answers)


# ---- uneven ends ---------------------------------------------------------------------------------------


def evaluate_some(rank: int, world_size: int, samples: int, last_label: int | None = None) -> Any:
    inputs = torch.arange(10.0 * samples).reshape(samples, 10) % 7
    labels = torch.arange(samples) % 10
    if last_label is not None:
        labels[-1] = last_label
    rows = TensorDataset(inputs, labels)
    whole = Data("some", rows, rows, tuple("0123456789"), (10,), "some")
    scorer = Scorer(whole, Classification(whole), trainings.place(rank, world_size), batch_size=BATCH)
    try:
        found = scorer.classes(trainings.seeded(lambda: nn.Linear(10, 10)))
    except Exception as error:
        return type(error).__name__, getattr(error, "message", str(error))
    return found.certificate.rank_samples, len(found.own), found.certificate.score() | {"ranks": 0}


@pytest.mark.parametrize(
    ("samples", "dealt"),
    [(0, [0, 0, 0]), (1, [1, 0, 0]), (BATCH + 1, [BATCH, 1, 0]), (3 * BATCH, [BATCH] * 3)],
)
def test_ranks_with_few_or_no_samples_take_part(run_ranks, samples, dealt):
    (alone,) = run_ranks(1, evaluate_some, samples)
    assert alone[2]["samples"] == samples
    for own, answer in zip(dealt, run_ranks(3, evaluate_some, samples), strict=True):
        assert answer == (tuple(dealt), own, alone[2])


@pytest.mark.parametrize("label", [10, -1, -100])
def test_a_test_label_without_a_class_ends_all_ranks_and_names_its_sample(run_ranks, label):
    """-100 is the label that torch's loss skips."""
    first, second = run_ranks(2, evaluate_some, BATCH + 2, label)
    said = f"test sample {BATCH + 1} has the label {label}, which is not one of the 10 classes (0 to 9)"
    assert second == ("CheckFailed", said)
    assert first == ("RankFailed", f"rank 1 failed: {said}")


# ---- workers -------------------------------------------------------------------------------------------


class Loader(Dataset[Any]):
    """Each sample is the number of the process that loaded it."""

    def __len__(self) -> int:
        return 3 * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(os.getpid())]), 0


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen |= set(map(int, inputs.flatten().tolist()))
        return inputs


def test_loading_processes_live_as_long_as_the_scorer():
    whole = Data("loader", Loader(), Loader(), ("one",), (1,), "loader")
    scorer = Scorer(whole, Classification(whole), trainings.place(0, 1), batch_size=BATCH, workers=2)
    seen = []
    for _ in range(2):
        watching = Watching()
        scorer.score(watching)
        seen.append(watching.seen)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2
    assert os.getpid() not in seen[0]
    del scorer
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in seen[0])


# ---- as users start it ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str, Any]]:
    """`train/evaluate.py` on the digits, under torchrun for several ranks: its JSON, and eval.json."""
    folder = tmp_path_factory.mktemp("started")
    model = trainings.seeded(lambda: models.build("simple-cnn", shape=(1, 8, 8), classes=10))
    torch.save(model.state_dict(), folder / "cnn.pt")

    def run(ranks: int) -> tuple[str, Any]:
        out = folder / f"on-{ranks}"
        program = [str(ROOT / "train" / "evaluate.py"), "cnn.pt", "--model", "simple-cnn", "--json"]
        launcher = [sys.executable] if ranks == 1 else [*TORCHRUN, str(ranks)]
        done = start([*launcher, *program, "--out", str(out)], folder)
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads((out / "eval.json").read_text())

    return run


def test_torchrun_with_3_ranks_prints_the_json_of_one_process_except_for_their_number(started):
    (one, statement), (three, of_three) = started(1), started(3)
    assert one.count('"ranks": 1') == 1
    assert one.replace('"ranks": 1', '"ranks": 3') == three
    assert json.loads(one)["samples"] == len(data.load(command_line.parse([])).test)  # type: ignore[arg-type]
    apart = {"ranks", "rank_samples"}
    assert {name for name in statement if statement[name] != of_three[name]} == apart
    assert sum(of_three["rank_samples"]) == statement["samples"]


def test_the_proposed_evaluation_gives_the_logged_numbers_on_as_many_threads(tmp_path):
    def said_by(*command: str) -> str:
        done = start([sys.executable, *command], tmp_path, OMP_NUM_THREADS="2")
        assert done.returncode == 0, done.stderr
        return done.stdout

    tiny = ["--data", "digits", "--epochs", "1", "--batch-size", "256", "--out", "run"]
    said = said_by(str(ROOT / "train/main.py"), *tiny)
    program, *arguments = said.replace("\\\n", "").rpartition("  python ")[2].split()
    assert arguments[-2:] == ["--threads", "2"]
    said_by("-m", "ckpttool", "strip-prefix", "run/best.pt", "run/model.safetensors")
    found = json.loads(said_by(str(ROOT / program), *arguments, "--json"))
    (logged,) = epochs_of(tmp_path / "run")
    assert [found[name] for name in SAME] == [logged[name] for name in SAME]
