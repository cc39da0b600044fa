"""What of a training depends on the number of passes in a step (--accumulate), and how that is said."""

from __future__ import annotations

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
    return runs.run(rank, size, make, folder, {**runs.OFTEN, **settings})


@pytest.mark.parametrize("name", MODELS)
def test_before_training_it_is_said_why_accumulate_is_another_training(run_ranks, tmp_path, name):
    make, settings, why = MODELS[name]
    said, other = run_ranks(2, run, make, str(tmp_path / "a"), {**settings, "accumulate": 2, "stop_at": 1})
    notes = [line for line in said.splitlines() if line.startswith("note ")]
    assert notes == [f"note    not the training of --accumulate 1: {why}"] * bool(why)
    assert other == ""


@pytest.mark.parametrize("name", MODELS)
def test_a_resume_changes_the_passes_only_where_that_is_the_same_training(run_ranks, tmp_path, name):
    make, settings, why = MODELS[name]
    said, _ = run_ranks(2, run, make, str(tmp_path / "a"), settings)
    assert "note " not in said
    stopped = {**settings, "accumulate": 3, "resume": str(tmp_path / "a/step-000002.pt")}
    said, other = run_ranks(2, run, make, str(tmp_path / "b"), stopped)
    if not why:
        assert "continues from" in said
        ends = [runs.read(tmp_path / folder / "last.pt") for folder in "ab"]
        assert runs.largest_difference(*ends) < 1e-5
        return
    assert said.startswith("UsageFault") and f"belongs to a training with --accumulate 1, and {why}" in said
    assert "--change accumulate" in said and "rank 0 failed" in other
    said, _ = run_ranks(2, run, make, str(tmp_path / "b"), {**stopped, "change": ("accumulate",)})
    assert "accumulate 1 -> 3" in said


@pytest.mark.parametrize("other", [{"rank_batch": (3, 9)}, {"rank_share": (1, 3)}], ids=["batch", "share"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("both", "virtual ranks")])
def test_a_resume_on_as_many_ranks_keeps_the_shares_that_the_training_depends_on(
    run_ranks, tmp_path, name, other
):
    make, settings, why = MODELS[name]
    why = "" if name == "sync" else why  # it normalises by the samples of all ranks
    run_ranks(2, run, make, str(tmp_path / "a"), settings)
    saved = {**settings, "resume": str(tmp_path / "a/step-000002.pt")}
    said, _ = run_ranks(2, run, make, str(tmp_path / "b"), {**saved, **other})
    if not why:
        assert "continues from" in said
        ends = [runs.read(tmp_path / folder / "last.pt") for folder in "ab"]
        assert runs.largest_difference(*ends) < 1e-5
        return
    flag = next(iter(other)).replace("_", "-")
    assert said.startswith("UsageFault") and f"belongs to a training with no --{flag}, and {why}" in said
    assert f"--change {flag}" in said
    said, _ = run_ranks(2, run, make, str(tmp_path / "b"), {**saved, **other, "change": (flag,)})
    assert f"{flag} None -> {next(iter(other.values()))}" in said


def test_a_resume_on_other_ranks_may_deal_batches_as_it_likes(run_ranks, tmp_path):
    run_ranks(2, run, runs.restless, str(tmp_path / "a"), {})
    settings = {"rank_share": (1, 2, 3), "resume": str(tmp_path / "a/step-000002.pt")}
    said, *_ = run_ranks(3, run, runs.restless, str(tmp_path / "b"), settings)
    assert "saved by 2 ranks, now 3" in said


def test_asking_leaves_no_trace(run_ranks, tmp_path):
    for size in (1, 2):
        for folder, accumulate in (("a", 1), ("b", 2)):
            settings = {"accumulate": accumulate, "stop_at": 1}
            run_ranks(size, run, runs.restless, str(tmp_path / f"{size}{folder}"), settings)
        first, second = (runs.read(tmp_path / f"{size}{folder}/last.pt") for folder in "ab")
        assert first["rng"][0]["python"] == second["rng"][0]["python"]
    again = {"accumulate": 2, "stop_at": 1}
    run_ranks(2, run, runs.restless, str(tmp_path / "c"), again)
    assert runs.different(runs.read(tmp_path / "2b/last.pt"), runs.read(tmp_path / "c/last.pt")) == []
