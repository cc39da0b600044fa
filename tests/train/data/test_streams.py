"""Streams: each sample exactly once on any number of ranks, workers and shards, resumed from any step.

The reference is plain PyTorch in one process, in float64; what a run used is read from its record.
"""

from __future__ import annotations

import errno
import itertools
import json
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ckpttool.distributed.plan import ENDLESS, Plan
from ckpttool.errors import CheckFailed, UsageFault
from tests.ranks import runs, trainings
from tests.ranks.runs import contents
from tests.support.run_log import entries_of
from train.config.flags import Every
from train.config.sections import TrainConfig
from train.data import data_set
from train.data import stream as stream_module
from train.data.batches import load
from train.data.data_set import Data
from train.data.stream import Stream, is_stream, listed
from train.tasks import builtin as tasks
from train.trainer.feed import Feed
from train.trainer.progress import Progress

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
SHORT = [(1, "shards"), (2, "lanes"), (3, "one"), (4, "an empty one")]


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
    usual["decay_norms"] = True
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

    def mean(model: nn.Module, batch: list[int]) -> torch.Tensor:
        inputs, labels = zip(*map(sample, batch), strict=True)
        return F.cross_entropy(model(torch.stack(inputs)), torch.tensor(labels))

    losses = (partial(mean, batch=batch) for batch in batches if batch)
    return trainings.descended(trainings.seeded(linear), losses, lr=0.3, momentum=0.9, weight_decay=1e-4)


def in_turn(shape: str) -> list[list[int]]:
    """Return the numbers of the samples in each batch of an epoch, where lanes take turns."""
    number, shards = SHAPES[shape]
    lanes = [[n for span in shards[lane::number] for n in range(*span)] for lane in range(number)]
    deepest = max(map(len, lanes))
    places = [lane[depth] if depth < len(lane) else None for depth in range(deepest) for lane in lanes]
    batches = [places[at : at + BATCH] for at in range(0, len(places), BATCH)]
    return [[number for number in batch if number is not None] for batch in batches]


@pytest.mark.covered(lambda size, shape: (size, shape) not in SHORT)
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


@pytest.mark.covered(lambda size, workers: (size, workers) == (2, 3))
@pytest.mark.parametrize(("size", "workers"), [(1, 1), (2, 3), (3, 2)])
def test_more_workers_than_shards_change_nothing(size, workers):
    for shape in ("one", "an empty one"):
        steps = loaded(shape, size, workers)
        assert steps == loaded(shape, 1, 0)
        assert sum(map(len, steps)) == SAMPLES


RESUMED = [(2, Counted, (8,)), (3, Placed, (11,))]


@pytest.mark.covered(lambda size, kind, stops: (size, kind, stops) not in RESUMED)
@pytest.mark.parametrize(
    ("size", "kind", "stops"), [*RESUMED, *itertools.product((2, 3, 4), (Counted, Placed), [(2, 8, 11)])]
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(run_ranks, tmp_path, size, kind, stops):
    whole = tmp_path / "whole"
    run_ranks(size, run, str(whole), "lanes", kind, EVERY, 4)
    for step in stops:
        rest = tmp_path / str(step)
        stopped = {"resume": str(whole / f"step-{step:06d}.pt")}
        said, *_ = run_ranks(size, run, str(rest), "lanes", kind, {**EVERY, **stopped}, 4)
        assert "continues from" in said
        assert contents(rest / "last.pt") == contents(whole / "last.pt")
        assert used(rest) == {after: taken for after, taken in used(whole).items() if after > step}


@pytest.mark.covered(lambda kind: kind is Counted)
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
    positions: dict[int, Any] = {}
    for place in range(0, 9000, 10):
        positions |= data.__getitems__([place]).positions
    torch.save(positions[0], tmp_path / "position")
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


@pytest.mark.covered(lambda settings: "accumulate" in settings)
@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"virtual_ranks": 4}, {"rank_share": (1, 3)}])
def test_streams_go_with_other_ways_to_deal_a_batch(run_ranks, tmp_path, settings):
    run_ranks(2, run, str(tmp_path), "lanes", Counted, settings)
    first, second = of_epochs(used(tmp_path))
    assert first == second
    assert len(set(first)) == SAMPLES
    expected = reference(in_turn("lanes") * 2)
    trained = runs.read(tmp_path / "last.pt")["model"]
    assert (trained["module.weight"] - expected.weight.detach()).abs().max() < 1e-13


# ---- streams that are not as they should be -----------------------------------------------------------


class Early(Counted):
    """A stream that ends on the second rank before it does on the others."""

    def __iter__(self) -> Iterator[Any]:
        early = torch.distributed.get_rank() == 1
        yield from map(sample, range(20 if early else self.last))


class Endless(Counted):
    def __iter__(self) -> Iterator[Any]:
        return map(sample, itertools.count())


class Drawn(Counted):
    """A stream whose order is drawn from a generator that nobody seeds."""

    def __iter__(self) -> Iterator[Any]:
        return map(sample, numpy.random.default_rng().permutation(self.last).tolist())


class Shuffled(Counted):
    """A stream whose order, and samples, are drawn from Python's and torch's own generators."""

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self.first, self.last))
        random.shuffle(numbers)
        for number in numbers:
            inputs, label = sample(number)
            yield inputs + torch.rand(5), label


class Divided(Counted):
    """A stream that each rank, or each loading process, takes a part of by itself."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        of_worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        yield from map(sample, range(rank + of_worker * size, self.last, size * workers))


class Broken(Counted):
    """A shard of which the end can't be read."""

    name = "broken.tar"

    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, range(self.first, self.last - 3))
        raise OSError(errno.EIO, "Input/output error")


class Liar(Placed):
    """A source that goes elsewhere than it was told."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] + (state["at"] > 0)


def test_a_stream_that_ends_early_on_one_rank_is_named_and_no_rank_waits(run_ranks, tmp_path):
    for said in run_ranks(3, run, str(tmp_path), "one", Early, {}):
        assert "the stream ends in step 3 of the epoch on rank 1, and goes on on rank 0" in said
        assert said.startswith(("RanksDiffer", "RankFailed"))


class Late(Counted):
    """A stream whose first samples are the same each time, and the later ones are not."""

    def __iter__(self) -> Iterator[Any]:
        later = list(range(12, self.last))
        random.SystemRandom().shuffle(later)
        yield from map(sample, [*range(12), *later])


def numbers(kind: Any) -> Data:
    made = Stream([kind(0, 900)], "numbers", seed=0)
    made.start = 0, {}  # as where samples are not the same each time
    return Data("numbers", made, None, tuple("abc"), (5,), "numbers")


def run_numbers(rank: int, size: int, folder: str, kind: Any) -> str:
    settings = {"out": folder, "scheduler": "none", "batch_size": 300, "epochs": 2}
    return runs.outcome(rank, size, numbers(kind), trainings.seeded(linear), settings)


def test_samples_that_differ_later_in_the_stream_are_found_before_they_train(run_ranks, tmp_path):
    for said in run_ranks(3, run_numbers, str(tmp_path), Late):
        assert "after step 1 of the epoch the stream goes on with another sample on each rank" in said
    assert not (tmp_path / "last.pt").exists()


def test_samples_that_differ_in_two_loading_processes_are_found():
    data, config = numbers(Late), TrainConfig.of(scheduler="none", workers=2, batch_size=BATCH)
    feed = Feed(config, data, tasks.build(config, data), trainings.place(0, 1))
    batches = feed.batches(feed.plan.of_rank(0, 0, 1), Progress())
    with pytest.raises(CheckFailed, match="sample 256 of a lane is another one in each process that loads"):
        list(itertools.islice(batches, 40))


class Once(Counted):
    """A stream that goes on where it was left, and so has nothing in a second epoch."""

    def __init__(self, first: int, last: int) -> None:
        self.numbers = iter(range(first, last))

    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, self.numbers)


def test_an_epoch_without_samples_ends_the_run(run_ranks, tmp_path):
    (said,) = run_ranks(1, run_numbers, str(tmp_path), Once)
    assert "its stream has no samples in this epoch" in said
    assert "__iter__ has to begin anew" in said


def test_an_endless_stream_ends_with_max_steps(run_ranks, tmp_path):
    said, *_ = run_ranks(2, run, str(tmp_path), "one", Endless, {"max_steps": 12, "scheduler": "cosine"})
    assert "saved" in said
    progress = runs.read(tmp_path / "last.pt")["progress"]
    assert (progress["epoch"], progress["step"], progress["samples"]) == (0, 12, 96)


def test_a_stream_that_ranks_divide_themselves_is_refused(run_ranks, tmp_path):
    said = run_ranks(2, run_compared, str(tmp_path), Divided)
    assert all(
        "a different fingerprint" in of_rank and "don't divide it by rank" in of_rank for of_rank in said
    )


def run_compared(rank: int, size: int, folder: str, kind: Any) -> str:
    """Run with a stream whose first samples are compared, as `data_set.load` has it."""
    data = stream("one", kind)
    contents = {"fingerprint": {"of the training samples": data.train.fingerprint}}
    data = replace(data, contents=contents)
    return runs.outcome(rank, size, data, trainings.seeded(linear), {"out": folder, "scheduler": "none"})


def test_workers_are_hidden_from_a_stream_that_would_divide_itself_among_them(tmp_path):
    samples = Stream([DividedByWorkers(0, SAMPLES)], "numbers", seed=0)
    samples.batch_size = BATCH
    plan = Plan(ENDLESS, BATCH, in_order=True).of_rank(0, 0, 1)
    loader = load(samples, [plan.share(step) for step in range(6)], trainings.place(0, 1), 3)
    labels = [label for read in loader for label in read.samples[1].tolist()]
    assert labels == [number % 3 for number in range(SAMPLES)]


class DividedByWorkers(Counted):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        of_worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        yield from map(sample, range(of_worker, self.last, workers))


def test_what_is_drawn_from_the_seeded_generators_is_the_same_on_any_number_of_ranks(run_ranks, tmp_path):
    for size in (1, 3):
        run_ranks(size, run, str(tmp_path / str(size)), "one", Shuffled, EVERY)
    one = used(tmp_path / "1")
    assert one == used(tmp_path / "3")
    assert one[1] != one[7]
    stopped = {"resume": str(tmp_path / "3" / "step-000004.pt")}
    run_ranks(2, run, str(tmp_path / "rest"), "one", Shuffled, stopped)
    assert used(tmp_path / "rest") == {step: taken for step, taken in one.items() if step > 4}


def test_a_stream_that_is_drawn_anew_each_time_is_refused_where_several_processes_read_it(capsys):
    data = stream("one", Drawn)
    for settings, ranks in (({}, 2), ({"workers": 2}, 1)):
        with pytest.raises(UsageFault, match="gives other samples each time it is read"):
            trainings.check(linear(), data, ranks, scheduler="none", **settings)
    trainings.check(linear(), data, scheduler="none")
    assert "read as a check, are lost" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{"block_size": 8}, {"shuffle_window": 8}])
def test_settings_of_streams_are_refused_where_they_would_change_nothing(settings):
    data = data_set.load(TrainConfig.of(**settings).data)
    (name,) = settings
    with pytest.raises(UsageFault, match=f"--{name.replace('_', '-')}: --data digits has samples by index"):
        trainings.check(nn.Linear(2, 2), data, **settings)


@pytest.mark.parametrize(("settings", "wrong"), [
    ({}, "does not say its length, which --scheduler cosine needs"),
    ({"scheduler": "none", "warmup": Every(1, "epochs")}, "does not say its length"),
    ({"scheduler": "none", "sampler": "torch"}, "--sampler torch needs samples by number"),
    ({"scheduler": "none", "drop_last": True}, "--drop-last needs samples by number"),
    ({"scheduler": "none", "mixup": 0.5}, "--mixup"),
    ({"scheduler": "none", "rank_share": "auto"}, "--rank-share auto needs samples by number"),
])  # fmt: skip
def test_settings_that_need_the_numbers_of_samples_are_refused(settings, wrong):
    with pytest.raises(UsageFault, match=wrong):
        trainings.check(linear(), stream("one"), **settings)


@pytest.mark.parametrize(
    "settings", [{"best": "loss"}, {"keep_best": 2}, {"stop_early": 3}, {"also_test": ("ood=fake:9",)}]
)
def test_what_needs_scores_is_refused_where_nothing_is_scored(settings):
    (name,) = settings
    with pytest.raises(UsageFault, match=f"--{name.replace('_', '-')}: --data digits has no test samples"):
        trainings.check(linear(), stream("one"), scheduler="none", **settings)


def test_a_schedule_longer_than_the_stream_says_it_is_is_refused():
    data = stream("one")
    settings: dict[str, Any] = {"scheduler": "none", "warmup": Every(99, "steps"), "batch_size": BATCH}
    trainings.check(linear(), data, **settings)
    data.train.length = SAMPLES
    with pytest.raises(UsageFault, match="--warmup 99steps: is 99 steps, but the whole training has only 60"):
        trainings.check(linear(), data, **settings)


def run_longer_than_said(rank: int, size: int, folder: str) -> str:
    data = stream("one")
    data.train.length = 20
    settings = {"out": folder, "scheduler": "linear", "batch_size": BATCH, "epochs": 1}
    return runs.outcome(rank, size, data, trainings.seeded(linear), settings)


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_ends_within_an_epoch_shows_its_loss(run_ranks, tmp_path, size):
    settings = {"max_steps": 9, "log_every": 1}  # an epoch has six
    said, *_ = run_ranks(size, run, str(tmp_path), "one", Counted, settings)
    *steps, last = (entry for entry in entries_of(tmp_path) if "epoch" not in entry)
    mean = sum(step["loss"] for step in steps[-3:]) / 3
    assert (last["step"], last["train_samples"]) == (9, 3 * BATCH)
    assert last["train_loss"] == pytest.approx(mean, rel=1e-12)
    row = next(line for line in said.splitlines() if line.startswith(" step 9"))
    assert row.split()[2] == f"{last['train_loss']:.4f}"


def test_a_schedule_that_ends_before_the_stream_is_said(run_ranks, tmp_path):
    run_ranks(1, run_longer_than_said, str(tmp_path))
    (event,) = (entry for entry in entries_of(tmp_path) if entry.get("event"))
    assert event == {"step": 3, "event": "schedule ended"}


def test_the_source_of_a_stream_may_make_the_batches(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    data = data_set.load(TrainConfig.of(data=f"{tmp_path}/own.py:ragged").data)
    data.train.batch_size = 4
    places, place = [[0, 1, 2, 3], [4, 5, 6, 7]], trainings.place(0, 1)
    for workers in (0, 2):
        batches = load(data.train, places, place, workers, collation=data.collation("training"))
        assert [tuple(read.samples[0].shape) for read in batches] == [(4, 4), (3, 7)]
    tested = load(data.test, places, place, 0, collation=data.collation("test"))
    assert [tuple(texts.shape) for texts, _ in tested] == [(4, 4), (4, 8)]


def test_a_position_that_is_not_restored_is_found_before_a_step_is_taken(run_ranks, tmp_path):
    run_ranks(1, run, str(tmp_path / "whole"), "one", Liar, EVERY, 4)
    stopped = {"resume": str(tmp_path / "whole" / "step-000003.pt")}
    said, *_ = run_ranks(1, run, str(tmp_path / "rest"), "one", Liar, stopped, 4)
    assert "sample 24 is another one than before, set by load_state_dict" in said
    assert not (tmp_path / "rest" / "last.pt").exists()


def lanes_with(broken: int, kind: Any = Counted) -> Stream:
    spans = [(0, 20), (20, 33), (33, 45)]
    shards = [(Broken if number == broken else kind)(*span) for number, span in enumerate(spans)]
    return Stream(shards, "numbers", seed=0, skip_damaged=kind is not Placed)


def run_broken(rank: int, size: int, folder: str, kind: Any) -> str:
    data = Data("numbers", lanes_with(1, kind), None, tuple("abc"), (5,), "numbers")
    settings = {"out": folder, "scheduler": "none", "epochs": 2, "batch_size": BATCH, "prove_every": 1}
    settings |= {"skip_damaged": kind is not Placed}
    return runs.outcome(rank, size, data, trainings.seeded(linear), settings)


def test_a_shard_that_breaks_off_is_named(run_ranks, tmp_path):
    for said in run_ranks(2, run_broken, str(tmp_path), Placed):
        assert "broken.tar: sample 30 can't be read: input/output error" in said
        assert "--skip-damaged" in said


def test_with_skip_damaged_the_rest_of_a_shard_is_left_out_and_counted_once(run_ranks, tmp_path):
    said, *_ = run_ranks(3, run_broken, str(tmp_path), Counted)
    assert "left out 2 that can't be read" in said  # one in each epoch
    first, second = of_epochs(used(tmp_path))
    assert first == second
    assert len(set(first)) == len(first) == SAMPLES - 3
    events = [entry for entry in entries_of(tmp_path) if entry.get("event") == "left out"]
    assert len(events) == 2
    assert "broken.tar" in events[0]["what"]


@pytest.mark.parametrize("made", [iter([sample(0)]), DataLoader([sample(0)]), map(sample, [1])])
def test_what_can_be_read_only_once_is_no_data_set(made):
    with pytest.raises(UsageFault, match="is no data set"):
        is_stream(made)


def test_an_empty_stream_and_one_without_an_end_to_test_with_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "MOST_LISTED", 50)
    (tmp_path / "own.py").write_text(OWN)
    wrong = {"empty": "there are no training samples", "endless": "more than 50 test samples"}
    for name, what in wrong.items():
        with pytest.raises(UsageFault, match=what):
            data_set.load(TrainConfig.of(data=f"{tmp_path}/own.py:{name}").data)
    data = data_set.load(TrainConfig.of(data=f"{tmp_path}/own.py:both").data)
    assert len(data.test) == 7
    assert data.classes == ("a", "b")


def test_what_is_left_out_of_the_samples_to_test_with_is_said(capsys):
    broken = lanes_with(1, Counted)
    assert len(listed(broken)) == SAMPLES - 3
    assert (
        "--skip-damaged: left out of the test samples: --data numbers, broken.tar" in capsys.readouterr().err
    )


class OfNumpy(Placed):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "mean": numpy.float64(0.5)}


def test_a_position_that_no_checkpoint_can_hold_is_not_saved():
    assert not Stream([OfNumpy(0, 9)], "numbers", seed=0).resumes


OWN = """
import itertools, torch
class Numbers:
    classes = ["a", "b"]
    def __init__(self, numbers):
        self.numbers = numbers
    def __iter__(self):
        for number in self.numbers:
            yield torch.ones(3) * number, number % 2
class Endless(Numbers):
    def __iter__(self):
        for number in itertools.count():
            yield torch.ones(3) * number, number % 2
empty = lambda: Numbers([])
endless = lambda: (Numbers([1]), Endless([]))
both = lambda: (Numbers(range(9)), Numbers(range(7)))
class Ragged(Numbers):
    def __iter__(self):
        for number in self.numbers:
            yield torch.ones(number + 1), number % 2
    def collate(self, samples):
        texts, labels = zip(*samples)
        return torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(labels)
ragged = lambda: (Ragged(range(7)), Ragged(range(8)))
"""


def test_a_long_stream_takes_no_memory():
    tracemalloc.start()
    samples = Stream([Counted(0, 10**9)], "numbers", seed=0)
    samples.batch_size = 64
    for place in range(0, 6400, 64):
        samples.__getitems__([place, place + 63])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1e6
