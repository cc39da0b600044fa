"""Evaluations: the trainer and train/evaluate.py give the same digits on any number of ranks."""

from __future__ import annotations

import gc
import json
import os
import sys
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
from train.data.data_set import Data
from train.model import builtin as models
from train.tasks.builtin import Classification
from train.trainer.progress import Scorer

SAME = ("correct", "samples", "accuracy", "loss", "threads", "batch_size")

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def made(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(samples, 1, 8, 8, generator=generator), torch.arange(samples) % 10)

def data():
    return made(100, 1), made(300, 2)

def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
"""
"""300 test samples are three batches of an evaluation."""


def train_on_ranks(rank: int, world_size: int, arguments: list[str]) -> tuple[str, str] | None:
    """A whole run, and the error that it ended in."""
    job = main.prepare(command_line.parse(arguments))
    return trainings.error_of(lambda: main.train(job), Exception)


def score_on_ranks(rank: int, world_size: int, arguments: list[str]) -> dict[str, Any]:
    job = evaluate.prepare(evaluate.parse(arguments))
    return evaluate.as_json(job, evaluate.evaluate(job))


@pytest.mark.covered(lambda size, batchnorm: (size, batchnorm) not in {(1, "sync"), (3, "pooled")})
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batchnorm", ["plain", "sync", "pooled"])
def test_the_log_and_the_evaluation_of_the_checkpoint_agree_to_the_last_digit(
    run_ranks, own, tmp_path, size, batchnorm
):
    model = ["--model", f"{own}:net", "--data", f"{own}:data"]
    saving = ["--out", str(tmp_path / "run"), "--keep", "9"]
    training = [*model, *saving, "--epochs", "2", "--batchnorm", batchnorm]
    assert run_ranks(size, train_on_ranks, training) == [None] * size
    logged = epochs_of(tmp_path / "run")
    assert logged[0]["loss"] != logged[1]["loss"]
    checkpoints = sorted((tmp_path / "run").glob("step-*.pt"))
    for entry, checkpoint, other in zip(logged, checkpoints, (1, 5 - size), strict=True):
        for found in run_ranks(other, score_on_ranks, [str(checkpoint), *model]):
            assert [found[name] for name in SAME] == [entry[name] for name in SAME]


def test_a_rank_that_fails_during_an_evaluation_ends_all_at_once_with_its_error(run_ranks, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN_DATA)
    arguments = ["--data", f"{tmp_path}/broken.py:make", "--epochs", "1"]
    answers = run_ranks(3, train_on_ranks, [*arguments, "--out", str(tmp_path / "run")], timeout=200)
    assert [name for name, _ in answers] == ["RankFailed", "RankFailed", "Unreadable"]
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
    model = trainings.seeded(lambda: nn.Linear(10, 10))
    if last_label is not None:
        return trainings.error_of(lambda: scorer.classes(model))
    found = scorer.classes(model)
    return found.certificate.rank_samples, len(found.own), found.certificate.score() | {"ranks": 0}


DEALT = [(0, 0, 0), (1, 0, 0), (BATCH, 1, 0), (BATCH, BATCH, BATCH)]


@pytest.mark.parametrize("dealt", DEALT)
def test_ranks_with_few_or_no_samples_take_part(run_ranks, dealt):
    (alone,) = run_ranks(1, evaluate_some, sum(dealt))
    assert alone[2]["samples"] == sum(dealt)
    assert run_ranks(3, evaluate_some, sum(dealt)) == [(dealt, own, alone[2]) for own in dealt]


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


def test_loading_processes_live_as_long_as_the_scorer():
    whole = Data("loader", Loader(), Loader(), ("one",), (1,), "loader")
    scorer = Scorer(whole, Classification(whole), trainings.place(0, 1), batch_size=BATCH, workers=2)
    model, seen = nn.Identity(), [set(), set()]
    for pids in seen:
        with model.register_forward_pre_hook(lambda _, given, pids=pids: pids.update(map(int, given[0]))):
            scorer.score(model)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2
    assert os.getpid() not in seen[0]
    del scorer
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in seen[0])


# ---- as users start it ---------------------------------------------------------------------------------


def said_by(folder: Path, *command: str, launcher: tuple[str, ...] = (sys.executable,), **more: str) -> str:
    done = start([*launcher, *command], folder, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchrun_with_3_ranks_prints_the_json_of_one_process_except_for_their_number(tmp_path):
    model = trainings.seeded(lambda: models.build("simple-cnn", shape=(3, 32, 32), classes=10))
    torch.save(model.state_dict(), tmp_path / "cnn.pt")
    program = [str(ROOT / "train/evaluate.py"), "cnn.pt", "--model", "simple-cnn", "--json"]
    program += ["--data", "fake:50", "--eval-batch", "4"]  # three batches
    said, statements = [], []
    for launcher in ((sys.executable,), (*TORCHRUN, "3")):
        out = tmp_path / str(len(said))
        said.append(said_by(tmp_path, *program, "--out", str(out), launcher=launcher))
        statements.append(json.loads((out / "eval.json").read_text()))
    one, three = statements
    assert said[0].count('"ranks": 1') == 1
    assert said[0].replace('"ranks": 1', '"ranks": 3') == said[1]
    assert json.loads(said[0])["samples"] == one["samples"] == sum(three["rank_samples"]) == 10
    assert {name for name in one if one[name] != three[name]} == {"ranks", "rank_samples"}


def test_the_proposed_evaluation_gives_the_logged_numbers_on_as_many_threads(tmp_path, cli):
    tiny = ["--data", "fake:50", "--epochs", "1", "--batch-size", "25", "--out", "run"]
    said = said_by(tmp_path, str(ROOT / "train/main.py"), *tiny, OMP_NUM_THREADS="2")
    program, *arguments = said.replace("\\\n", "").rpartition("  python ")[2].split()
    assert arguments[-2:] == ["--threads", "2"]
    assert cli("strip-prefix", tmp_path / "run/best.pt", tmp_path / "run/model.safetensors").code == 0
    found = json.loads(said_by(tmp_path, str(ROOT / program), *arguments, "--json", OMP_NUM_THREADS="2"))
    (logged,) = epochs_of(tmp_path / "run")
    assert [found[name] for name in SAME] == [logged[name] for name in SAME]
