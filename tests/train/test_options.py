"""Options of a training through the whole trainer: bits after a resume, and what two ranks give."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.core import cli as command_line
from tests.ranks import runs, trainings
from tests.support.run_log import entries_of
from tests.support.running import ROOT
from train import evaluate, main
from train.config.flags import Every
from train.data.data_set import Data
from train.data.samples import Collation

ADAMW = {"optimizer": "adamw", "momentum": 0.0, "lr": 0.01, "weight_decay": 0.1}
ALL_BUT_ZERO = {"amp": "bf16", "clip_norm": 0.5, "ema": 0.7, "accumulate": 2}
SHARES = {"amp": "bf16", "rank_share": (1, 3)}

OPTIONS: dict[str, dict[str, Any]] = {
    "clipped, averaged, accumulated, checkpoints": {**ALL_BUT_ZERO, "amp": "none", "grad_checkpoint": True},
    "all decay, linear": {"decay_norms": True, "weight_decay": 0.1, "scheduler": "linear"},
    "find unused, step": {"find_unused": True, "scheduler": "step", "warmup": Every(1, "steps")},
    "adam": {**ADAMW, "optimizer": "adam"},
    "Adagrad": {**ADAMW, "optimizer": "Adagrad"},
    "RMSprop with momentum": {"optimizer": "RMSprop", "lr": 0.01, "weight_decay": 0.1},
    "bf16, clipped, averaged, accumulated": ALL_BUT_ZERO,
    "divided, clipped": {**ADAMW, "zero": True, "clip_norm": 0.5},
    "divided, all": {**ALL_BUT_ZERO, **ADAMW, "zero": True, "grad_checkpoint": True},
}
ALSO_RESUMED: dict[str, dict[str, Any]] = {
    "shares, bf16": SHARES,
    "muon": {**ADAMW, "optimizer": "muon", "momentum": 0.95, "weight_decay": 0.1},
    "synchronised, shares": {**SHARES, "batchnorm": "sync"},
    "pooled, shares": {**SHARES, "batchnorm": "pooled"},
    "synchronised, all": {**ALL_BUT_ZERO, "grad_checkpoint": True, "batchnorm": "sync"},
    "pooled, all": {**ALL_BUT_ZERO, "grad_checkpoint": True, "batchnorm": "pooled"},
}


COVERED = ["synchronised, all", "adam", "Adagrad", "bf16, clipped, averaged, accumulated", "divided, clipped"]
COVERED += ["synchronised, shares", "pooled, shares", "shares, bf16"]
COVERED += ["all decay, linear", "RMSprop with momentum"]


def perceptron() -> nn.Module:
    """Return a network that is compiled within seconds, with random numbers and buffers."""
    hidden = nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, 10))


def masked_texts() -> Data:
    """Return texts of which numbers are hidden at random, drawn for the batch."""
    samples, names = runs.Masked(), ("training", "test")
    collations = {name: Collation(samples.collate, "--data own.py:data", name) for name in names}
    return Data("own", samples, samples, samples.classes, (), "own", {}, "classification", collations)


def of_masked_texts() -> nn.Module:
    return runs.OfTexts().double()


CROP: dict[str, Any] = {"augment": "crop-flip", "data": "folder:x"}
AUTO: dict[str, Any] = {"augment": "auto", "mixup": 0.4, "data": "folder:x"}
MIXED: dict[str, Any] = {"mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1, "data": "folder:x"}


# By what changes: the ranks, the model, the settings, the step after which the run stops, and the samples.
CHANGED: dict[str, tuple[int, Any, dict[str, Any], int, Any]] = {
    "crop-flip": (3, runs.restless, CROP, 5, runs.images),
    "crop-flip on one rank": (1, runs.restless, CROP, 5, runs.images),
    "mixup and cutmix": (3, runs.restless, MIXED, 5, runs.images),
    "auto and mixup": (3, runs.restless, AUTO, 5, runs.images),
    "all on one rank": (1, runs.restless, {**AUTO, **MIXED}, 5, runs.images),
    "what collate draws": (2, of_masked_texts, {"lr": 0.1}, 2, masked_texts),
    "what collate draws, on three ranks": (3, of_masked_texts, {"lr": 0.1}, 2, masked_texts),
}
NOT_QUICK = ["crop-flip", "crop-flip on one rank", "mixup and cutmix", "what collate draws, on three ranks"]


@pytest.mark.covered(lambda changed: changed in NOT_QUICK)
@pytest.mark.parametrize("changed", CHANGED)
def test_a_resumed_run_with_changed_samples_equals_the_straight_one(run_ranks, tmp_path, changed):
    """In the middle of the first epoch, or of the second."""
    size, make, settings, stop, data = CHANGED[changed]
    arguments = make, str(tmp_path), settings, (stop,), data
    assert run_ranks(size, runs.straight_and_resumed, *arguments)[0][1] == {stop: []}


FROM_BOTH = ["divided, all"]
RESUMED = [(option, (2,)) for option in [*OPTIONS, *ALSO_RESUMED] if option not in [*COVERED, *FROM_BOTH]]
RESUMED += [(option, (2, 3)) for option in FROM_BOTH]
OTHERS = [(option, (2, 3)) for option in [*OPTIONS, *ALSO_RESUMED] if (option, (2, 3)) not in RESUMED]


@pytest.mark.covered(lambda option, stops: (option, stops) in OTHERS)
@pytest.mark.parametrize(("option", "stops"), [*RESUMED, *OTHERS])
def test_a_resumed_run_equals_the_straight_one_bit_for_bit(run_ranks, tmp_path, option, stops):
    """From the middle of an epoch, and from its end."""
    make = perceptron if option == "muon" else runs.restless
    arguments = make, str(tmp_path), {**OPTIONS, **ALSO_RESUMED}[option], stops
    _, differences = run_ranks(2, runs.straight_and_resumed, *arguments)[0]
    assert differences == {stop: [] for stop in stops}


def last(run_ranks: Any, size: int, make: Any, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the last checkpoint of a run."""
    said = run_ranks(size, runs.run, make, str(folder), settings)[0]
    assert "Error" not in said and ("continues from" in said) == bool(settings.get("resume")), said
    return runs.read(folder / "last.pt")


# The largest difference of a parameter after six steps. Parameters are about 1, in float32.
ROUNDING = 2e-6
BF16 = 1e-2
BF16_ADAMW = 5e-2
"""AdamW divides a gradient by its own size, and so makes the rounding of a small one large."""


def bound(settings: dict[str, Any]) -> float:
    if settings.get("amp", "none") == "none":
        return ROUNDING
    return BF16_ADAMW if settings.get("optimizer") == "adamw" else BF16


@pytest.mark.covered(lambda option: option in COVERED and option != "adam")
@pytest.mark.parametrize("option", OPTIONS)
def test_two_ranks_give_what_one_gives_but_for_rounding(run_ranks, tmp_path, option):
    one, two = (last(run_ranks, n, runs.steady, tmp_path / str(n), OPTIONS[option]) for n in (1, 2))
    assert (difference := runs.largest_difference(one, two)) < bound(OPTIONS[option]), difference


@pytest.mark.parametrize(
    "settings",
    [{"rank_share": (1, 3)}, {"grad_checkpoint": True, "ema": 0.7, "clip_norm": 0.5}, {"amp": "bf16"}],
    ids=["shares", "checkpoints, averaged, clipped", "bf16"],
)
def test_synchronised_layers_give_on_two_ranks_what_one_gives(run_ranks, tmp_path, settings):
    alone = {name: value for name, value in settings.items() if name != "rank_share"}
    one = last(run_ranks, 1, runs.with_batchnorm, tmp_path / "one", alone)
    two = last(run_ranks, 2, runs.with_batchnorm, tmp_path / "two", {**settings, "batchnorm": "sync"})
    assert (difference := runs.largest_difference(one, two)) < bound(settings), difference


@pytest.mark.long
def test_what_saves_memory_changes_no_bit_and_may_begin_on_a_resume(run_ranks, tmp_path):
    plain = last(run_ranks, 2, runs.restless, tmp_path / "plain", {**ADAMW, **runs.OFTEN})
    for change in ({"grad_checkpoint": True}, {"zero": True}):
        for name, resume in (("straight", None), ("on", str(tmp_path / "plain" / "step-000002.pt"))):
            settings = {**ADAMW, **change, "resume": resume, "force": True}
            found = last(run_ranks, 2, runs.restless, tmp_path / name, settings)
            assert runs.different(plain, found) == [], (change, name)


@pytest.mark.covered(lambda before, after: (before, after) == (1, 2))
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_a_divided_run_continues_on_another_number_of_ranks(run_ranks, tmp_path, before, after):
    settings = {**ADAMW, "zero": True, "ema": 0.7}
    whole = last(run_ranks, before, runs.steady, tmp_path, {**settings, **runs.OFTEN})
    said = runs.go_on(run_ranks, after, runs.steady, tmp_path / "step-000002.pt", tmp_path / "on", settings)
    assert f"saved by {before} rank" in said
    assert runs.largest_difference(whole, runs.read(tmp_path / "on" / "last.pt")) < ROUNDING


def with_a_scale_that_is_too_large(rank: int, size: int, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**21))
        return runs.straight_and_resumed(rank, size, *arguments)


def test_skipped_steps_of_fp16_count_and_change_nothing(run_ranks, tmp_path):
    """A CPU is refused, as it would be slow; the arithmetic is the same."""
    arguments = runs.restless, str(tmp_path), {"amp": "fp16", "ema": 0.7}, (1, 2, 4)
    state, differences = run_ranks(2, with_a_scale_that_is_too_large, *arguments)[0]
    assert differences == {1: [], 2: [], 4: []}
    skipped = state["scaler"]["skipped"]
    assert 1 < skipped < runs.STEPS
    assert state["progress"]["global_step"] == runs.STEPS
    assert state["scheduler"]["last_epoch"] == state["ema"]["updates"] == runs.STEPS - skipped
    first = runs.read(tmp_path / "2-straight" / "step-000001.pt")["model"]
    initial = trainings.seeded(runs.restless).named_parameters()
    assert all(torch.equal(first[f"module.{name}"], parameter) for name, parameter in initial)


def test_the_proposed_evaluation_of_a_run_with_averages_gives_their_logged_score(here, capsys):
    tiny = ["--data", "fake:40", "--batch-size", "20", "--epochs", "1", "--ema", "0.5", "--out", "run"]
    assert main.main(tiny) == 0
    said = capsys.readouterr().out.replace("\\\n", "")
    strip, proposed = said.rpartition("next:\n")[2].strip().splitlines()
    assert "--state ema.averages" in strip
    assert command_line.run(strip.split()[1:]) == 0
    _, path, *arguments = proposed.split()
    assert path == f"{ROOT}/train/evaluate.py"
    capsys.readouterr()
    assert evaluate.main([*arguments, "--json"]) == 0
    found, logged = json.loads(capsys.readouterr().out), entries_of(here / "run")[-1]
    assert (logged["loss"], logged["correct"]) == (found["loss"], found["correct"])


@pytest.mark.long
def test_a_compiled_run_resumes_bit_for_bit_and_saves_the_usual_keys(run_ranks, tmp_path):
    settings = {"compile": True, "ema": 0.7, "clip_norm": 0.5, "drop_last": True}
    arguments = perceptron, str(tmp_path), settings, (1,)
    compiled, differences = run_ranks(2, runs.straight_and_resumed, *arguments, timeout=110)[0]
    assert differences == {1: []}
    plain = last(run_ranks, 2, perceptron, tmp_path / "plain", {**settings, "compile": False})
    group = compiled["optimizer"]["param_groups"][0]
    for part in (compiled["model"], compiled["ema"]["averages"], group["param_names"]):
        assert not any("_orig_mod" in name for name in part)
    assert list(compiled["model"]) == list(plain["model"])


@pytest.mark.parametrize(("arguments", "said"), [
    ("--amp fp16", "--amp fp16: works only on a GPU (give --amp bf16"),
    ("--optimizer lbfgs", "--optimizer lbfgs: calls the model several times in a step"),
    ("--optimizer Adagrad --momentum 0.5", "--momentum: Adagrad has none"),
    ("--optimizer muon --zero", "--zero: muon's state is not divided among ranks"),
    ("--grad-checkpoint --model own.py:net", "--grad-checkpoint: Flat has no blocks"),
    ("--zero --model own.py:mixed", "--zero: needs parameters of one dtype"),
    ("--model own.py:sparse", "parameter 1.weight gets a sparse gradient, and ranks average dense ones"),
    ("--model own.py:sparse --weight-decay 0", "parameter 1.weight gets a sparse gradient"),
    ("--model own.py:unlike", "--model own.py:unlike: does not take the 3×32×32 samples"),
    ("--init W", "does not fit the model"),
    ("--init W --init-allow-missing x.*", "--init-allow-missing"),
    ("--init-allow-missing x.*", "--init-allow-missing: needs --init"),
    ("--resume --out R --change seed", "--change seed: can't"),
    ("--change lr", "--change: says what may differ on a resume"),
    ("--task regression --mixup 1", "--mixup: --task regression has no labels to change"),
    ("--max-steps 3 --warmup 3steps", "--warmup 3steps: is 3 steps, but the whole training has only 3"),
])  # fmt: skip
def test_what_can_not_be_trained_so_is_refused_before_any_process_group(
    here, monkeypatch, capsys, arguments, said
):
    monkeypatch.setattr("torch.distributed.init_process_group", None)
    (here / "own.py").write_text(OWN)
    torch.save({"w": torch.ones(2)}, "W")
    assert main.main(["--data", "fake:20", "--batch-size", "4", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error
    assert sorted(path.name for path in here.iterdir() if path.name != "__pycache__") == ["W", "own.py"]


OWN = """
import torch
from torch import nn

class Flat(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(3072, 10)
        self.scale = nn.Parameter(torch.ones(10, dtype=dtype))

    def forward(self, x):
        return self.linear(x.flatten(1)) * self.scale

def net(num_classes=10):
    return Flat(torch.float32)

def mixed(num_classes=10):
    return Flat(torch.float64)

class Tokens(nn.Sequential):
    def forward(self, x):
        return super().forward(x.flatten(1)[:, :5].abs().long().clamp(max=6))

def sparse(num_classes=10):
    return Tokens(nn.Identity(), nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(20, 10))

def lazy(num_classes=10):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(10))

def unlike(num_classes=10):
    return nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyLinear(10))
"""


def test_a_lazy_model_is_trained_resumed_and_evaluated(here, capsys):
    (here / "own.py").write_text(OWN)
    given = ["--data", "fake:20", "--model", "own.py:lazy"]
    flags = ["--batch-size", "4", "--out", "run", "--epochs"]
    assert main.main([*given, *flags, "1"]) == 0
    assert main.main([*given, *flags, "2", "--resume", "auto", "--optimizer", "sgd"]) == 0
    assert evaluate.main(["run/last.pt", *given]) == 0
    assert capsys.readouterr().err == ""


# ---- a data set that chooses anew in each epoch ------------------------------------------------------------


def balanced() -> Data:
    """Return images drawn as docs/own-code.md draws them, of which most are of class 0."""
    page = (ROOT / "docs" / "own-code.md").read_text(encoding="utf-8")
    code = next(block for block in page.split("```python\n") if block.startswith("class Balanced"))
    found: dict[str, Any] = {"torch": torch, "__name__": "own"}
    exec(code.partition("```")[0], found)
    data = runs.images()
    labels = torch.where(torch.arange(len(data.train)) % 8 > 0, 0, torch.arange(len(data.train)) % 10)
    samples = [(data.train[index][0], int(label)) for index, label in enumerate(labels)]
    return replace(data, train=found["Balanced"](samples, labels, data.classes))


def test_what_is_drawn_by_the_epoch_is_the_same_on_any_ranks_and_after_a_resume(run_ranks, tmp_path):
    states = []
    for size in (1, 3):
        case = runs.straight_and_resumed, runs.steady, str(tmp_path), {}, (2, 4), balanced
        (state, found), *_ = run_ranks(size, *case)
        assert found == {2: [], 4: []}
        states.append(state)
    assert runs.largest_difference(*states) <= 2e-6
    drawn = balanced().train
    counts = torch.zeros(10)
    for epoch in range(40):
        drawn.set_epoch(epoch)
        for _, label in drawn:
            counts[label] += 1
    present = counts[counts > 0] / counts.sum()
    assert torch.allclose(present, torch.full_like(present, 1 / len(present)), atol=0.05)
