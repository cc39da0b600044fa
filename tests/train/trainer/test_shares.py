"""Unequal ranks and several passes: the training is that of one process, or it is said why it is not."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ckpttool.distributed.plan import Plan
from ckpttool.errors import UsageFault
from tests.ranks import runs, trainings
from train.trainer import shares
from train.trainer.shares import Speed, propose

SGD: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 10)).double()


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)).double()


def data_of(samples: int) -> Any:
    return trainings.tensors((10,), samples, dtype=torch.float64)


# ---- exactness -----------------------------------------------------------------------------------------


@pytest.mark.covered(lambda make, size, share, extra: (size, share["batch_size"]) != (4, 12))
@pytest.mark.parametrize(("make", "extra"), [
    (plain, {}), (plain, {"accumulate": 3}), (plain, {"clip_norm": 0.3}),
    (plain, {"accumulate": 4, "clip_norm": 0.3}), (normalised, {}), (normalised, {"clip_norm": 0.3}),
], ids=["plain", "accumulate", "clip", "both", "sync", "sync and clip"])  # fmt: skip
@pytest.mark.parametrize(("size", "share"), [
    (2, {"rank_share": (1, 3), "batch_size": 16}),
    (2, {"rank_share": (2, 10), "batch_size": 12}),  # the last batch of 5 is 1 and 4
    (4, {"rank_share": (1, 2, 3, 10), "batch_size": 16}),
    (4, {"rank_share": (9, 1, 1, 1), "batch_size": 12}),
])  # fmt: skip
def test_training_in_unequal_shares_is_that_of_one_process(run_ranks, make, size, share, extra):
    settings = {**SGD, **share, **extra, "epochs": 2, "batchnorm": "sync" if make is normalised else "plain"}
    clip = extra.get("clip_norm")
    expected = trainings.alone(make, data_of(53), share["batch_size"], 2, clip_norm=clip, **SGD).state_dict()
    for ours, _ in run_ranks(size, trainings.after_epochs, make, data_of(53), settings):
        assert trainings.farthest(ours.values(), expected.values()) < 1e-12


def test_ranks_with_other_numbers_of_passes_agree_under_sync_batchnorm(run_ranks):
    settings = {
        **SGD,
        "rank_share": (2, 10),
        "batch_size": 12,
        "accumulate": 4,
        "drop_last": True,
        "epochs": 2,
    }
    settings["batchnorm"] = "sync"
    (one, _), (other, _) = run_ranks(2, trainings.after_epochs, normalised, data_of(53), settings)
    assert all(map(torch.equal, one.values(), other.values()))


def test_with_torchs_sampler_the_repeats_count_as_samples(run_ranks):
    inputs, labels = data_of(21).train.tensors
    batches = Plan(21, 8, sampler="torch").batches(0, 4)
    losses = (lambda model, at=at: F.cross_entropy(model(inputs[at]), labels[at]) for at in batches)
    expected = trainings.descended(trainings.seeded(plain), losses, **SGD).state_dict()
    settings = {**SGD, "batch_size": 8, "sampler": "torch", "epochs": 1}
    for ours, score in run_ranks(4, trainings.after_epochs, plain, data_of(21), settings):
        assert score.samples == 24
        assert trainings.farthest(ours.values(), expected.values()) < 1e-12


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "said", "hint"), [
    ({"rank_share": (1, 7), "batch_size": 8},
     "--rank-share 1,7: a batch of 8 gives a rank a single sample", "other numbers as --rank-share"),
    ({"rank_share": (1, 3), "batch_size": 8},
     "--rank-share 1,3: the last batch of 4 gives a rank a single sample", "--drop-last"),
])  # fmt: skip
def test_a_share_of_one_sample_is_refused_for_batchnorm(settings, said, hint):
    with pytest.raises(UsageFault) as refused:
        trainings.check(normalised(), data_of(44), 2, **settings)
    assert said in str(refused.value)
    assert hint in refused.value.hint


# ---- shares by speed -----------------------------------------------------------------------------------


def test_shares_follow_the_speeds():
    assert propose([Speed(0, 1), Speed(0, 2)], Plan(300, 30)) == [20, 10]
    assert propose([Speed(0, 1)] * 4, Plan(300, 30)) == [8, 8, 7, 7]


def test_a_pause_that_each_step_takes_is_not_taken_for_slow_samples():
    assert propose([Speed(0, 1), Speed(10, 1)], Plan(300, 30)) == [20, 10]


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 9)), min_size=1, max_size=6), st.integers(1, 9))
def test_no_other_shares_would_be_done_sooner_than_those_proposed(speeds, times):
    ranks = [Speed(*speed) for speed in speeds]
    sizes = propose(ranks, Plan(10_000, 16 * len(ranks) * times, drop_last=True))
    assert sum(sizes) == 16 * len(ranks) * times
    done = [rank.pause + size * rank.per_sample for rank, size in zip(ranks, sizes, strict=True)]
    slowest = done.index(max(done))
    if sizes[slowest] > 2:  # fewer would leave BatchNorm a single sample
        for number, rank in enumerate(ranks):
            assert number == slowest or done[number] + rank.per_sample >= done[slowest] - 1e-9


def test_no_share_leaves_a_rank_a_single_sample_in_the_last_batch():
    plan = Plan(samples=36, batch_size=32)  # the last batch has 4
    assert Plan(36, 32, rank_share=tuple(propose([Speed(0, 1), Speed(0, 50)], plan))).splits(2)[-1] == [2, 2]


class Slow(nn.Module):
    """A model that takes twice as long on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(10, 10), nn.BatchNorm1d(10)
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.0006 * len(x) * (1 + self.rank))
        return torch.dropout(self.norm(self.layer(x)), 0.3, self.training)


def train_by_speed(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> str:
    settings = {"out": folder, "batch_size": 36, "rank_share": "auto", "epochs": 2, **runs.OFTEN, **settings}
    model = trainings.seeded(lambda: Slow(rank))
    return runs.outcome(rank, world_size, trainings.tensors((10,), 144), model, settings)


def test_a_rank_of_half_the_speed_gets_half_the_samples_and_a_resume_follows(run_ranks, tmp_path):
    whole = run_ranks(2, train_by_speed, str(tmp_path / "a"), {}, timeout=60)[0]
    share = runs.read(tmp_path / "a" / "last.pt")["plan"]["rank_share"]
    assert 20 <= share[0] * 36 / sum(share) <= 28, share
    given = ",".join(map(str, share))
    assert f"shares  --rank-share {given}, by measured speed" in whole
    resumed = {"resume": str(tmp_path / "a" / "step-000003.pt")}
    again = run_ranks(2, train_by_speed, str(tmp_path / "b"), resumed, timeout=60)[0]
    assert f"shares  --rank-share {given}, as measured when the run began" in again
    ends = (runs.contents(tmp_path / folder / "last.pt", "model", "optimizer") for folder in "ab")
    assert next(ends) == next(ends)


def measure(rank: int, world_size: int) -> Any:
    """Return the measured speed, and what a training goes on from, before and after."""
    data, model = trainings.tensors((10,), 64), trainings.seeded(lambda: Slow(rank))
    trainer = trainings.trainer(rank, world_size, data, model, rank_share="auto")
    traces = []
    for _ in range(2):
        traces.append({**copy.deepcopy(model.state_dict()), "drawn": torch.get_rng_state()})
        speed = shares.measure(trainer)
    assert all(parameter.grad is None for parameter in model.parameters())
    return speed, *traces


def test_measuring_leaves_no_trace(run_ranks):
    for speed, before, after in run_ranks(2, measure):
        assert speed.per_sample > 0
        assert all(torch.equal(before[name], after[name]) for name in before)


def train_with_shares(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> None:
    settings = {"out": folder, "batch_size": 16, "epochs": 1, **runs.OFTEN, **settings}
    said = runs.outcome(rank, world_size, data_of(64), trainings.seeded(plain), settings)
    assert "Error" not in said and "Fault" not in said, said


def test_a_run_continues_with_other_shares_on_other_ranks(run_ranks, tmp_path):
    run_ranks(1, train_with_shares, str(tmp_path / "one"), {})
    run_ranks(2, train_with_shares, str(tmp_path / "two"), {"rank_share": (1, 3), "stop_at": 2})
    resumed = {"rank_share": (1, 1, 1, 5), "resume": str(tmp_path / "two" / "step-000002.pt")}
    run_ranks(4, train_with_shares, str(tmp_path / "four"), resumed)
    assert runs.largest_difference(*runs.ends(tmp_path / "one", tmp_path / "four")) < 1e-12


def shares_of_one_sample(rank: int, world_size: int) -> Any:
    data = trainings.tensors((10,), 1)
    trainer = trainings.trainer(rank, world_size, data, nn.Linear(10, 10), rank_share="auto", batch_size=2)
    return shares.settle(trainer)


def test_nothing_is_measured_where_a_rank_has_no_sample(run_ranks):
    said = ["equal shares: a batch leaves a rank without a sample, so there is nothing to measure"]
    assert run_ranks(2, shares_of_one_sample) == [said, said]


# ---- what depends on the number of passes in a step ----------------------------------------------------


BATCHNORM = "BatchNorm normalises each pass by itself"
DRAWN = "random numbers (as of dropout) are drawn pass by pass"


class Frozen(runs.Net):
    """BatchNorm that the user has put into eval mode for good."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        for block in self.blocks:
            block.norm.eval()
        return self


def frozen() -> nn.Module:
    return Frozen(batchnorm=True, dropout=0.0).train()


def dropping() -> nn.Module:
    return runs.Net(batchnorm=False, dropout=0.1)


MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "neither": (runs.steady, {}, ""),
    "BatchNorm": (runs.with_batchnorm, {}, BATCHNORM),
    "sync": (runs.with_batchnorm, {"batchnorm": "sync"}, BATCHNORM),
    "pooled": (runs.with_batchnorm, {"batchnorm": "pooled"}, BATCHNORM),
    "frozen": (frozen, {}, ""),
    "dropout, by a function": (dropping, {}, DRAWN),
    "both": (runs.restless, {}, f"{BATCHNORM}, and {DRAWN}"),
    "virtual ranks": (runs.restless, {"virtual_ranks": 2}, f"{BATCHNORM}, and {DRAWN}"),
}


def run(rank: int, size: int, make: Any, folder: str, settings: dict[str, Any]) -> str:
    return runs.run(rank, size, make, folder, {"keep": 99, "save_every": runs.Every(2, "steps"), **settings})


@pytest.fixture(scope="module")
def straight(run_ranks, tmp_path_factory) -> Callable[[str], Path]:
    """`straight(name)`: the folder of a whole run of a model on two ranks; each is run once."""

    @functools.cache
    def whole(name: str) -> Path:
        make, settings, _ = MODELS[name]
        folder = tmp_path_factory.mktemp("straight")
        said, _ = run_ranks(2, run, make, str(folder), settings)
        assert "note " not in said
        return folder

    return whole


@pytest.mark.covered(lambda name: name in ("both", "frozen", "pooled"))
@pytest.mark.parametrize("name", MODELS)
def test_before_training_it_is_said_why_accumulate_is_another_training(run_ranks, tmp_path, name):
    make, settings, why = MODELS[name]
    said, other = run_ranks(2, run, make, str(tmp_path / "a"), {**settings, "accumulate": 2, "stop_at": 1})
    notes = [line for line in said.splitlines() if line.startswith("note ")]
    assert notes == [f"note    not the training of --accumulate 1: {why}"] * bool(why)
    assert other == ""


CHANGES = {"accumulate": 3, "rank_share": (1, 3)}
CASES = [(name, "accumulate") for name in MODELS]
CASES += [(name, "rank_share") for name in [*MODELS][:6]]


@pytest.mark.covered(
    lambda name, setting: (
        name in ("both", "frozen", "pooled", "virtual ranks", "dropout, by a function")
        or (
            setting != "accumulate"
            and (name, setting) not in {("neither", "rank_share"), ("sync", "rank_share")}
        )
    )
)
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_resume_on_as_many_ranks_changes_passes_and_shares_only_where_that_is_the_same_training(
    run_ranks, straight, tmp_path, name, setting
):
    make, settings, why = MODELS[name]
    if name == "sync" and setting != "accumulate":
        why = ""  # it normalises by the samples of all ranks
    flag, whole = setting.replace("_", "-"), straight(name)
    given = "--accumulate 1" if setting == "accumulate" else f"no --{flag}"
    changed = {**settings, setting: CHANGES[setting], "resume": str(whole / "step-000002.pt")}
    said, other = run_ranks(2, run, make, str(tmp_path), changed)
    if not why:
        assert "continues from" in said
        assert runs.largest_difference(*runs.ends(whole, tmp_path)) < 1e-5
        return
    assert said.startswith("UsageFault") and f"belongs to a run with {given}, and {why}" in said
    assert f"--change {flag}" in said and "rank 0 failed" in other
    said, _ = run_ranks(2, run, make, str(tmp_path), {**changed, "change": (flag,), "stop_at": 3})
    before = 1 if setting == "accumulate" else None
    assert f"{flag} {before} -> {CHANGES[setting]}" in said


def test_a_resume_on_other_ranks_may_deal_batches_as_it_likes(run_ranks, straight, tmp_path):
    settings = {"rank_share": (1, 2, 3), "resume": str(straight("both") / "step-000002.pt"), "stop_at": 3}
    said, *_ = run_ranks(3, run, runs.restless, str(tmp_path), settings)
    assert "saved by 2 ranks, now 3" in said


def test_asking_leaves_no_trace(run_ranks, tmp_path):
    def last_of(size: int, folder: str, accumulate: int) -> dict[str, Any]:
        settings = {"accumulate": accumulate, "stop_at": 1}
        run_ranks(size, run, runs.restless, str(tmp_path / folder), settings)
        return runs.read(tmp_path / folder / "last.pt")

    for size in (1, 2):
        one, other = (last_of(size, f"{size}-{accumulate}", accumulate) for accumulate in (1, 2))
        assert one["rng"][0]["python"] == other["rng"][0]["python"]
    assert runs.different(other, last_of(2, "again", 2)) == []
