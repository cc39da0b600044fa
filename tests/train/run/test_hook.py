"""`--every`: whatever the user's function does on rank 0, the training and its bits are as without it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import CheckFailed
from tests.ranks import runs
from tests.ranks.runs import contents
from tests.support.run_log import entries_of
from train import main
from train.run import hook

OWN = """
import os, random, sys, time
import numpy, torch

model = None

def quiet(model, step, folder):
    with open(folder + "/steps.txt", "a") as file:
        file.write(f"{step} {model.training} {torch.is_grad_enabled()} {os.path.isdir(folder)}\\n")

def rude(model, step, folder):
    random.random(), numpy.random.rand(), torch.rand(3), torch.manual_seed(step)
    model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(False).zero_()
        parameter.grad = torch.ones_like(parameter)
    for buffer in model.buffers():
        buffer.zero_()
    model.register_forward_hook(lambda *_: 1 / 0)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1 + torch.get_num_threads() % 2)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(True)
    torch.autocast("cpu", torch.bfloat16).__enter__()
    for _ in range(step % 3):  # open blocks, none, or fewer than none
        torch.autocast_decrement_nesting()
    torch.set_default_device("meta")
    os.chdir("/")

def failing(model, step, folder):
    rude(model, step, folder)
    sys.exit("on purpose") if step % 2 else 1 / 0

def hanging(model, step, folder):
    while step == 2:
        try:
            time.sleep(60)
        except Exception:
            pass

def averages(model, step, folder):
    torch.save(model.state_dict(), f"{folder}/averages-{step}.pt")

def with_argument(model, step, folder, name="a"):
    open(f"{folder}/{name}", "w")
"""


def plain(run_ranks: Any, size: int, folder: Path, settings: dict[str, Any]) -> dict[str, bytes]:
    run_ranks(size, runs.run, runs.restless, str(folder), settings)
    return contents(folder / "last.pt")


@pytest.mark.covered(lambda size, function: size == 3)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("function", ["rude", "failing"])
def test_it_changes_no_bit_of_the_training_whatever_it_does(run_ranks, tmp_path, own, size, function):
    settings = {"ema": 0.7, "eval_every": runs.Every(1, "epochs")}
    without = plain(run_ranks, size, tmp_path / "without", settings)
    hooked = {**settings, "every": ("1", f"{own}:{function}")}
    assert plain(run_ranks, size, tmp_path / "with", hooked) == without
    events = [entry for entry in entries_of(tmp_path / "with") if entry.get("event") == "hook failed"]
    assert len(events) == (runs.STEPS if function == "failing" else 0)
    assert torch.get_default_dtype() == torch.float32


def test_casts_of_weights_are_not_kept_after_autocast_that_it_leaves_on(run_ranks, tmp_path, own):
    without = plain(run_ranks, 1, tmp_path / "without", {"amp": "bf16"})
    hooked = {"amp": "bf16", "every": ("1", f"{own}:rude")}
    assert plain(run_ranks, 1, tmp_path / "with", hooked) == without


def test_a_resumed_run_with_it_equals_the_straight_one(run_ranks, tmp_path, own):
    arguments = runs.restless, str(tmp_path), {"every": ("2steps", f"{own}:rude")}, (1, 2, 3)
    _, differences = run_ranks(2, runs.straight_and_resumed, *arguments)[0]
    assert differences == {1: [], 2: [], 3: []}


def test_it_is_called_on_rank_0_alone_every_so_often_in_eval_mode(run_ranks, tmp_path, own):
    for every, steps in (("2", (2, 4, 6)), ("1epochs", (3, 6))):
        folder = tmp_path / every
        run_ranks(2, runs.run, runs.restless, str(folder), {"every": (every, f"{own}:quiet")})
        lines = [f"{step} False False True" for step in steps]
        assert (folder / "steps.txt").read_text().splitlines() == lines


def test_it_gets_the_model_as_it_is_scored_and_saved(run_ranks, tmp_path, own):
    settings = {"ema": 0.7, "every": ("3", f"{own}:averages"), **runs.OFTEN}
    run_ranks(2, runs.run, runs.restless, str(tmp_path), settings)
    averages = runs.read(tmp_path / "step-000003.pt")["ema"]["averages"]
    given = torch.load(tmp_path / "averages-3.pt", weights_only=True)
    assert [f"module.{name}" for name in given] == list(averages)
    assert all(torch.equal(given[name], averages[f"module.{name}"]) for name in given)


@pytest.mark.parametrize("size", [1, 2])
def test_one_that_does_nothing_is_given_up_and_named(run_ranks, tmp_path, own, size):
    began = time.monotonic()
    settings = {"every": ("1", f"{own}:hanging"), "timeout": 4.0}
    said = run_ranks(size, runs.run, runs.steady, str(tmp_path), settings, timeout=100)[0]
    assert "Error" not in said and time.monotonic() - began < 60
    (event,) = [entry for entry in entries_of(tmp_path) if entry.get("event") == "hook failed"]
    assert event["step"] == 2 and event["error"].startswith("it has done nothing for 2 s (at ")
    assert "own.py:" in event["error"]


@pytest.mark.long
def test_one_that_works_is_left_alone_and_one_that_is_told_to_end_is_not():
    def busy(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    before = signal.getsignal(signal.SIGALRM)
    with hook.limited(0.5, None, lambda: False):
        busy(1.5)
    with pytest.raises(hook.GivenUp, match="takes more than"), hook.limited(None, 0.5, lambda: False):
        busy(60)
    with pytest.raises(hook.GivenUp, match="told to end"), hook.limited(None, None, lambda: True):
        time.sleep(60)
    assert signal.getsignal(signal.SIGALRM) == before  # pytest's own


def writing_to_the_training(rank: int, size: int, own: str, folder: str) -> str:
    """Run with a function that changes the weights of the model in training, through a global."""
    found: list[Any] = []

    def make() -> Any:
        found.append(runs.steady())
        return found[0]

    import builtins

    builtins.found_by_the_hook = found  # type: ignore[attr-defined]
    Path(folder).mkdir(exist_ok=True)
    path = Path(folder, f"writes{rank}.py")
    path.write_text("import builtins\ndef f(*_):\n    builtins.found_by_the_hook[0].head.bias.add_(1)\n")
    return runs.run(rank, size, make, f"{folder}/run", {"every": ("2", f"{path}:f")})


@pytest.mark.parametrize("size", [1, 2])
def test_one_that_gets_at_the_weights_of_the_training_ends_the_run(run_ranks, tmp_path, own, size):
    said = run_ranks(size, writing_to_the_training, own, str(tmp_path))
    assert (
        said[0].startswith(CheckFailed.__name__) and "changed head.bias of the model in training" in said[0]
    )
    assert all(text.startswith("RankFailed") for text in said[1:])
    assert all(entry.get("step", 0) <= 2 for entry in log_of(tmp_path / "run"))


def log_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_its_failures_are_said_three_times_and_no_step_is_lost(here, capsys, own):
    given = ["--data", "fake:20", "--batch-size", "4", "--epochs", "1", "--every", "1", f"{own}:failing"]
    assert main.main([*given, "--out", "run"]) == 0
    said = capsys.readouterr().err
    assert said.count("warning: --every ") == 3 and said.count("later failures are only in the log") == 1
    assert "in step 1: SystemExit: on purpose (at " in said and "in step 2: ZeroDivisionError: " in said
    assert sum(entry.get("event") == "hook failed" for entry in entries_of(Path("run"))) == 5
    assert Path.cwd() == here


def test_a_spec_may_have_arguments(run_ranks, tmp_path, own):
    run_ranks(1, runs.run, runs.steady, str(tmp_path), {"every": ("6", f"{own}:with_argument(name='b')")})
    assert (tmp_path / "b").exists()


class Remembering(torch.nn.Linear):
    """A model that keeps its last outputs, which `deepcopy` refuses."""

    def __init__(self) -> None:
        super().__init__(192, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(inputs.flatten(1))
        return self.last


class Refusing(Remembering):
    def __deepcopy__(self, memo: Any) -> Any:
        if hasattr(self, "last"):
            raise RuntimeError("no copies")
        return Refusing()


def test_a_model_that_keeps_its_outputs_is_copied_with_them(run_ranks, tmp_path, own):
    run_ranks(2, runs.run, Remembering, str(tmp_path / "a"), {"every": ("1", f"{own}:quiet")})
    assert not [entry for entry in entries_of(tmp_path / "a") if entry.get("event") == "hook failed"]


def test_a_model_that_can_not_be_copied_is_named_and_the_training_goes_on(run_ranks, tmp_path, own):
    run_ranks(2, runs.run, Refusing, str(tmp_path / "a"), {"every": ("1", f"{own}:quiet")})
    failed = [entry["error"] for entry in entries_of(tmp_path / "a") if entry.get("event") == "hook failed"]
    assert failed and all("can't be copied: RuntimeError: no copies" in text for text in failed)
    assert (tmp_path / "a" / "last.pt").exists()
