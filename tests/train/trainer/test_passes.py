"""What of a training depends on the number of passes in a step (--accumulate), and how that is said."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.ranks import runs

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


CHANGES = {"accumulate": 3, "rank_batch": (3, 9), "rank_share": (1, 3)}
CASES = [(name, "accumulate") for name in MODELS]
CASES += [(name, one) for name in [*MODELS][:6] for one in ("rank_batch", "rank_share")]


@pytest.mark.covered(
    lambda name, setting: (
        name in ("both", "frozen", "pooled", "virtual ranks", "dropout, by a function")
        or (
            setting != "accumulate"
            and (name, setting) not in {("neither", "rank_batch"), ("sync", "rank_share")}
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
        assert (
            runs.largest_difference(*(runs.read(folder / "last.pt") for folder in (whole, tmp_path))) < 1e-5
        )
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
