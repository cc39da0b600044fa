"""Before they train, ranks compare as many samples as can be read quickly: of a small data set, all."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ckpttool.distributed import collectives
from ckpttool.distributed.randomness import Keyed
from tests.ranks import trainings
from train.data import data_set

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
