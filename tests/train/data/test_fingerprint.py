"""What is compared of a data set: between ranks, and when a run resumes."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ckpttool.distributed import collectives
from ckpttool.distributed.randomness import Keyed
from ckpttool.errors import CkptToolError
from tests.ranks import trainings
from train import evaluate, main
from train.config.sections import DataConfig, TrainConfig
from train.data import data_set
from train.data import data_set as contents
from train.data import data_set as data

OWN = """
import os, random, numpy, torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

def whole():
    generator = torch.Generator().manual_seed(1)
    made = TensorDataset(torch.rand(100, 3, generator=generator), torch.arange(100) % 2)
    made.classes = ["a", "b"]
    return made

def named(parts):
    parts[0].classes = ["a", "b"]
    return parts

halves = lambda: named(tuple(random_split(whole(), [80, 20])))

def divided(order):
    return named((Subset(whole(), order[:80]), Subset(whole(), order[80:])))

halves_by_numpy = lambda: divided(numpy.random.permutation(100).tolist())
halves_by_python = lambda: divided(random.sample(range(100), 100))

def differing():
    return int(os.environ.get("DIFFERING", os.environ.get("RANK", "0")))

def halves_of_other_seeds():
    return named(tuple(random_split(whole(), [80, 20], generator=torch.Generator().manual_seed(differing()))))

def seedless():
    generator = torch.Generator()
    generator.seed()
    return generator

def other_labels():
    made = whole()
    made.tensors[1][33] = differing()
    return made, whole()

class Jittered(Dataset):
    classes = ["a", "b"]
    generator = None

    def __len__(self):
        return 40

    def __getitem__(self, index):
        Jittered.generator = Jittered.generator or seedless()
        return torch.full((3,), float(index)) * torch.rand(1, generator=Jittered.generator), index % 2

jittered = lambda: (Jittered(), Jittered())

def jittered_differently():
    made = Jittered()
    made.targets = [differing()] * 40
    return made, Jittered()

class Noisy(Jittered):
    # Draws from a generator with a seed, which a resumed run begins again.
    def __init__(self, draws):
        self.draws = draws
    def __getitem__(self, index):
        return torch.full((3,), float(index)) + self.draws.normal(), index % 2

counted = lambda: (Noisy(numpy.random.default_rng(0)), Noisy(numpy.random.default_rng(1)))
keyed = lambda: (Noisy(numpy.random), Noisy(numpy.random))

def apart():
    made = TensorDataset(torch.rand(100, 3, generator=seedless()), torch.arange(100) % 2)
    made.classes, made.fingerprint = ["a", "b"], "shards of one night"
    return made, whole()
"""


def indices(samples: Any) -> list[int]:
    return [int(index) for index in samples.samples.indices]


# ---- the same on every rank, in every run --------------------------------------------------------------


@pytest.mark.parametrize("factory", ["halves", "halves_by_numpy", "halves_by_python"])
def test_a_factory_that_draws_its_split_draws_the_same_one_each_time(own, factory):
    """With any --seed, in a training and in an evaluation: no test sample is trained on."""
    given, splits = {"data": f"{own}:{factory}", "model": _model(own)}, []
    trainings = [TrainConfig.of(**given, seed=seed) for seed in (0, 0, 7)]
    for number, config in enumerate([*trainings, evaluate.EvaluateConfig.of(**given)]):
        random.seed(number), numpy.random.seed(number), torch.manual_seed(number)
        job = (main if isinstance(config, TrainConfig) else evaluate).prepare(config)
        splits.append((indices(job.data.train), indices(job.data.test)))
    assert splits == [splits[0]] * 4
    assert sorted(splits[0][0] + splits[0][1]) == list(range(100))


def _model(own: str) -> str:
    path = Path(own).with_name("model.py")
    path.write_text("from torch import nn\ndef net(num_classes):\n    return nn.Linear(3, num_classes)\n")
    return f"{path}:net"


def test_the_seed_of_the_data_does_not_change_the_weights(own):
    configs = [
        TrainConfig.of(data=f"{own}:{factory}", model=_model(own)) for factory in ("halves", "jittered")
    ]
    assert torch.equal(*(main.prepare(config).model.weight for config in configs))


# ---- ranks ---------------------------------------------------------------------------------------------


DIFFERING = {
    "halves_of_other_seeds": "test sample 0",
    "other_labels": "labels of training samples 28 to 34",
    "jittered_differently": "labels of training samples 0 to 2",
}


def compare_on_ranks(rank: int, world_size: int, name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        try:
            data.compare(data.load(DataConfig(name=name)), "before training")
        except CkptToolError as error:
            return error.message, error.hint, error.exit_code
    return None


@pytest.mark.parametrize("factory", DIFFERING)
def test_ranks_whose_samples_or_labels_differ_are_refused_with_the_first(run_ranks, own, factory):
    for said, hint, code in run_ranks(2, compare_on_ranks, f"{own}:{factory}"):
        assert said.startswith(f"rank 1 has a different {DIFFERING[factory]} than rank 0, before training")
        assert hint.startswith("the files of --data must be") and "must seed its own generators" in hint
        assert code == 1


@pytest.mark.parametrize("factory", ["halves", "jittered", "apart"])
def test_ranks_with_equal_random_or_declared_data_are_accepted(run_ranks, own, factory):
    """`jittered` draws from generators of its own at each access; `apart` says what is to be compared."""
    assert run_ranks(2, compare_on_ranks, f"{own}:{factory}") == [None, None]


# ---- a resume ------------------------------------------------------------------------------------------


def train(own: str, factory: str, folder: Path, *more: str) -> int:
    settings = ["--batch-size", "20", "--out", str(folder), *more]
    return main.main(["--data", f"{own}:{factory}", "--model", _model(own), *settings])


@pytest.mark.parametrize("factory", ["halves_of_other_seeds", "other_labels"])
def test_a_resume_with_other_samples_is_refused_with_the_first(own, tmp_path, monkeypatch, capsys, factory):
    last = tmp_path / "run" / "last.pt"
    assert train(own, factory, last.parent, "--epochs", "1", "--stop-at", "1") == 0
    monkeypatch.setenv("DIFFERING", "1")
    before = last.read_bytes()
    capsys.readouterr()
    assert train(own, factory, last.parent, "--epochs", "1", "--resume") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {last}: belongs to a run on other samples: {DIFFERING[factory]} of ")
    assert said.count("\n") == 1
    assert last.read_bytes() == before


DRAWS_ITSELF = {"halves": False, "jittered": True, "counted": True, "keyed": False, "apart": False}


@pytest.mark.parametrize("factory", DRAWS_ITSELF)
def test_a_resume_continues_and_says_if_the_data_draws_from_generators_of_its_own(
    own, tmp_path, capsys, factory
):
    """Those of numpy, Python and torch are seeded for each sample; one that the data set made is not."""
    assert train(own, factory, tmp_path / "run", "--epochs", "1", "--stop-at", "1") == 0
    assert train(own, factory, tmp_path / "run", "--epochs", "1", "--resume") == 0
    said = "draws from random generators of its own, so this run differs from one that never stopped"
    assert (said in capsys.readouterr().out) is DRAWS_ITSELF[factory]


# ---- what it costs -------------------------------------------------------------------------------------


class Slow(Dataset[Any]):
    """Counts how often a sample is read."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return torch.zeros(2), 0


@pytest.mark.parametrize(("size", "reads"), [(1, 1), (2, 2), (5, 5), (10**9, 6)])
def test_few_samples_are_read_whatever_the_size(size, reads):
    slow = Slow(size)
    contents.Part("training", slow, "slow").describe()
    assert len(slow.read) == len(set(slow.read)) == reads
    assert {0, size - 1} <= set(slow.read)


def test_labels_are_listed_without_reading_samples():
    slow = Slow(4)
    for labels in ([1, 2, 3, 4], numpy.array([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4], dtype=torch.uint8)):
        slow.targets = labels
        assert contents.listed_labels(slow).tolist() == [1, 2, 3, 4]
        picked = torch.utils.data.Subset(slow, [3, 0])
        both = torch.utils.data.ConcatDataset([slow, picked])
        assert contents.listed_labels(both).tolist() == [1, 2, 3, 4, 4, 1]
    for labels in (["cat"] * 4, [[1, 2], [3]], [1, 2], [0.5] * 4, None, {1: 2}):
        slow.targets = labels
        assert contents.listed_labels(slow) is None
    assert slow.read == []


def test_a_folder_of_images_is_compared_by_the_bytes_of_its_files(tmp_path):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    before = data.load(DataConfig(name=f"folder:{tmp_path}")).contents
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "cat" / "0.png")
    after = data.load(DataConfig(name=f"folder:{tmp_path}")).contents
    changed = [name for name, digest in contents.flat(after).items() if contents.flat(before)[name] != digest]
    assert changed == ["training sample 0"]


# ---- as many samples as can be read quickly are compared: of a small data set, all ---------------------


SAMPLES = 400


class Listed(Dataset[Any]):
    """Samples that no list of tensors shows; `differs` is one that is another on this rank."""

    broken: tuple[int, ...] = ()
    pause = 0.0

    def __init__(self, differs: int | None, draws: str = "") -> None:
        self.differs, self.draws = differs, draws
        self.own = torch.Generator()
        self.own.seed()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.pause)
        if index in self.broken:
            raise OSError("can't be read") if index % 2 else SystemExit("left")
        sample = torch.full((8,), float(index + (index == self.differs) * 0.5))
        if self.draws and (self.draws != "seldom" or index % 97 == 5):
            sample += torch.rand(8, generator=None if self.draws == "torch" else self.own)
        return sample, index % 10


DRAWS = {"keyed": "torch", "own": "own", "seldom": "seldom"}


def made(kind: str, differs: int | None) -> Any:
    if kind == "tensors":
        inputs = torch.arange(2.0 * SAMPLES)[:, None].repeat(1, 8)
        if differs is not None:
            inputs[differs, 3] += 0.5
        return Subset(TensorDataset(inputs, torch.arange(2 * SAMPLES) % 10), range(SAMPLES))
    listed = Listed(differs, DRAWS.get(kind, ""))
    listed.broken = (200, 201) if kind == "broken" else ()
    listed.pause = 0.05 * collectives.rank() if kind == "slow on rank 1" else 0.0
    return Keyed(listed, 0) if kind in DRAWS else listed


def compared(
    rank: int, size: int, kind: str, part: str, differs: int | None, on: int, seconds: float, workers: int = 0
) -> str:
    data = trainings.tensors((8,), SAMPLES, tests=SAMPLES)
    samples = made(kind, differs if rank == on else None)
    contents: dict[str, Any] = data_set.Part(part, samples, "own.py:data").describe()
    data = replace(data, contents=contents, **{"train" if part == "training" else "test": samples})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_set, "SECONDS", seconds)
        error = trainings.error_of(lambda: data_set.compare(data, "before training", workers=workers))
    return ": ".join(error or ())


@pytest.mark.covered(lambda kind, part, on: on != (2 if part == "test" else 1))
@pytest.mark.parametrize("on", [0, 1, 2])
@pytest.mark.parametrize("part", ["training", "test"])
@pytest.mark.parametrize("kind", ["listed", "keyed", "tensors"])
def test_a_sample_anywhere_that_differs_on_one_rank_is_found_before_training(run_ranks, kind, part, on):
    for said in run_ranks(3, compared, kind, part, 137, on, 20.0):
        assert said.startswith(f"RanksDiffer: rank {on} has a different {part} sample 137 than rank ")


@pytest.mark.parametrize("kind", ["listed", "keyed", "tensors", "own", "seldom", "broken"])
def test_the_same_samples_are_no_difference(run_ranks, kind):
    assert run_ranks(2, compared, kind, "training", None, 0, 20.0) == ["", ""]


@pytest.mark.parametrize(("kind", "found"), [("listed", False), ("tensors", True)])
def test_with_loading_processes_a_rank_itself_reads_more_only_from_memory(run_ranks, kind, found):
    for said in run_ranks(2, compared, kind, "training", 137, 1, 20.0, 2):
        assert ("training sample 137" in said) == found


def test_a_slow_rank_reads_for_as_long_as_the_others(run_ranks):
    assert run_ranks(2, compared, "slow on rank 1", "training", None, 0, 0.3, timeout=20) == ["", ""]


def test_reading_ends_after_a_while_at_the_same_sample_on_all_ranks(run_ranks):
    assert run_ranks(2, compared, "listed", "training", 137, 1, 0.0) == ["", ""]
