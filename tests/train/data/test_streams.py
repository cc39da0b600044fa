"""Streams: each sample exactly once on any number of ranks, workers and shards, resumed from any step.

The reference is plain PyTorch in one process, in float64; what a run used is read from its record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from ckpttool.distributed.plan import ENDLESS, Plan
from tests.ranks import runs, trainings
from tests.ranks.runs import contents
from train.config.shared import Every
from train.data.batches import load
from train.data.data_set import Data
from train.data.stream import Stream

BATCH = 8
EVERY = {"save_every": Every(1, "steps"), "keep": 99}


def sample(number: int) -> tuple[torch.Tensor, int]:
    return torch.sin(torch.arange(1.0, 6.0, dtype=torch.float64) * (number + 1)), number % 3


class Counted(IterableDataset[Any]):
    """Samples first to last. It says nothing of its position."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, range(self.first, self.last))


class Placed(Counted):
    """The same, and knows its position; what it reads is counted."""

    reads = 0

    def __init__(self, first: int, last: int) -> None:
        super().__init__(first, last)
        self.at = first

    def __iter__(self) -> Iterator[Any]:
        begin, self.at = self.at, self.first
        for number in range(begin, self.last):
            self.at = number + 1
            Placed.reads += 1
            yield sample(number)
        self.at = self.first

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


SHAPES: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "one": (1, [(0, 45)]),
    "shards": (1, [(0, 20), (20, 20), (20, 45)]),
    "lanes": (3, [(0, 13), (13, 24), (24, 45)]),
    "an empty one": (3, [(0, 22), (22, 22), (22, 40), (40, 45)]),
}
"""Lanes, and the samples of each shard."""
SAMPLES = 45


def stream(shape: str, kind: Any = Counted, **how: Any) -> Data:
    lanes, shards = SHAPES[shape]
    made = Stream([kind(*shard) for shard in shards], "numbers", seed=0, lanes=lanes, **how)
    return Data("numbers", made, None, tuple("abc"), (5,), "numbers")


def linear() -> nn.Module:
    return nn.Linear(5, 3, dtype=torch.float64)


def run(
    rank: int, size: int, folder: str, shape: str, kind: Any, settings: dict[str, Any], window: int = 1
) -> str:
    usual = {"epochs": 2, "batch_size": BATCH, "lr": 0.3, "scheduler": "none", "prove_every": 1}
    data = stream(shape, kind, window=window)
    return runs.outcome(rank, size, data, trainings.seeded(linear), {"out": folder, **usual, **settings})


def used(folder: Path) -> dict[int, dict[int, str]]:
    """Return the digest of each sample by its place, of each step, as the record says it."""
    steps: dict[int, dict[int, str]] = {}
    entries = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    for entry in (entry for entry in entries if entry["kind"] == "step"):
        for step, (places, digests) in entry["samples"].items():
            assert int(step) not in steps
            pieces = [digests[16 * at : 16 * at + 16] for at in range(len(places))]
            assert len(set(places)) == len(places)
            steps[int(step)] = dict(zip(places, pieces, strict=True))
    return steps


def of_epochs(steps: dict[int, dict[int, str]]) -> list[list[str]]:
    """Return the digests of the samples of each epoch, sorted; an epoch begins where places begin anew."""
    epochs: list[list[str]] = []
    for step in sorted(steps):
        if not steps[step] or min(steps[step]) < BATCH:
            epochs.append([])
        epochs[-1] += steps[step].values()
    return [sorted(epoch) for epoch in epochs]


def reference(batches: list[list[int]]) -> nn.Module:
    """Return the model after plain SGD in one process, on the means of these batches."""
    model = trainings.seeded(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
    optimizer.param_groups[0]["params"] = [model.weight]
    optimizer.add_param_group({"params": [model.bias], "weight_decay": 0.0})
    for batch in filter(None, batches):
        inputs, labels = zip(*map(sample, batch), strict=True)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.stack(inputs)), torch.tensor(labels)).backward()
        optimizer.step()
    return model


def in_turn(shape: str) -> list[list[int]]:
    """Return the numbers of the samples in each batch of an epoch, where lanes take turns."""
    number, shards = SHAPES[shape]
    lanes = [[n for span in shards[lane::number] for n in range(*span)] for lane in range(number)]
    deepest = max(map(len, lanes))
    places = [lane[depth] if depth < len(lane) else None for depth in range(deepest) for lane in lanes]
    batches = [places[at : at + BATCH] for at in range(0, len(places), BATCH)]
    return [[number for number in batch if number is not None] for batch in batches]


@pytest.mark.covered(lambda size, shape: size in (2, 4) and shape in ("shards", "lanes"))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_sample_comes_once_and_trains_as_in_one_process(run_ranks, tmp_path, size, shape):
    said, *_ = run_ranks(size, run, str(tmp_path), shape, Counted, {})
    assert "Error" not in said
    first, second = of_epochs(used(tmp_path))
    assert first == second
    assert len(set(first)) == len(first) == SAMPLES
    expected = reference(in_turn(shape) * 2)
    trained = runs.read(tmp_path / "last.pt")
    assert trained["progress"]["samples"] == 2 * SAMPLES
    for name, parameter in expected.named_parameters():
        assert (trained["model"][f"module.{name}"] - parameter.detach()).abs().max() < 1e-13


def loaded(shape: str, size: int, workers: int) -> list[dict[int, list[float]]]:
    """Return the samples of each of an epoch's first steps by their place, as the ranks load them."""
    steps: list[dict[int, list[float]]] = [{} for _ in range(11)]
    for rank in range(size):
        samples = stream(shape, Placed).train
        samples.batch_size = BATCH
        indices = [
            Plan(ENDLESS, BATCH, in_order=True).of_rank(0, rank, size).share(step) for step in range(11)
        ]
        loader = load(samples, indices, trainings.place(rank, size), workers)
        for step, read in zip(steps, loader, strict=True):
            assert not step.keys() & set(read.taken)
            if read.samples is not None:
                step |= dict(zip(read.taken, read.samples[0].tolist(), strict=True))
    return steps


@pytest.mark.parametrize(("size", "workers"), [(1, 1), (2, 3), (3, 2)])
def test_more_workers_than_shards_change_nothing(size, workers):
    for shape in ("one", "an empty one"):
        steps = loaded(shape, size, workers)
        assert steps == loaded(shape, 1, 0)
        assert sum(map(len, steps)) == SAMPLES


@pytest.mark.covered(lambda size, kind: (size, kind) != (3, Placed) and (size, kind) != (2, Counted))
@pytest.mark.parametrize("kind", [Counted, Placed])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(run_ranks, tmp_path, size, kind):
    whole = tmp_path / "whole"
    run_ranks(size, run, str(whole), "lanes", kind, EVERY, 4)
    for step in (2, 8, 11):
        rest = tmp_path / str(step)
        stopped = {"resume": str(whole / f"step-{step:06d}.pt")}
        said, *_ = run_ranks(size, run, str(rest), "lanes", kind, {**EVERY, **stopped}, 4)
        assert "continues from" in said
        assert contents(rest / "last.pt") == contents(whole / "last.pt")
        assert used(rest) == {after: taken for after, taken in used(whole).items() if after > step}


@pytest.mark.parametrize("kind", [Counted, Placed])
def test_a_resume_on_other_ranks_uses_the_rest_of_the_samples_once(run_ranks, tmp_path, kind):
    folder = tmp_path / "whole"
    run_ranks(2, run, str(folder), "lanes", kind, EVERY, 4)
    rest = {"resume": str(folder / "step-000003.pt"), "accumulate": 2}
    said, *_ = run_ranks(3, run, str(tmp_path / "rest"), "lanes", kind, rest, 4)
    skipping = "does not know its position: 24 samples are read again"
    assert (skipping in said) == (kind is Counted)
    whole, again = used(folder), used(tmp_path / "rest")
    assert again == {step: taken for step, taken in whole.items() if step > 3}


def resumed_reads(rank: int, size: int, folder: str) -> int:
    Placed.reads = 0
    data = Stream([Placed(0, 10_000)], "numbers", seed=0)
    data.batch_size = 10
    data.start = 0, {0: torch.load(Path(folder, "position"), weights_only=False)}
    data.__getitems__([9000])
    return Placed.reads


def test_a_source_that_knows_its_position_reads_nothing_again(tmp_path):
    data = Stream([Placed(0, 10_000)], "numbers", seed=0)
    data.batch_size = 10
    for place in range(0, 9000, 10):
        read = data.__getitems__([place])
    torch.save(read.positions[0], tmp_path / "position")
    assert 0 < resumed_reads(0, 1, str(tmp_path)) < 400


def test_the_shuffle_within_a_window_is_the_same_on_any_number_of_ranks(run_ranks, tmp_path):
    for size in (1, 3):
        run_ranks(size, run, str(tmp_path / str(size)), "shards", Counted, {}, 10)
    one, three = used(tmp_path / "1"), used(tmp_path / "3")
    assert one == three
    run_ranks(1, run, str(tmp_path / "plain"), "shards", Counted, {})
    plain = used(tmp_path / "plain")
    assert one[1] != plain[1]
    assert one[1] != one[7]  # another order in the next epoch
    assert of_epochs(one) == of_epochs(plain)


@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"virtual_ranks": 4}, {"rank_share": (1, 3)}])
def test_streams_go_with_other_ways_to_deal_a_batch(run_ranks, tmp_path, settings):
    run_ranks(2, run, str(tmp_path), "lanes", Counted, settings)
    first, second = of_epochs(used(tmp_path))
    assert first == second
    assert len(set(first)) == SAMPLES
    expected = reference(in_turn("lanes") * 2)
    trained = runs.read(tmp_path / "last.pt")["model"]
    assert (trained["module.weight"] - expected.weight.detach()).abs().max() < 1e-13
