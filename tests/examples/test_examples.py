"""The examples of tasks, as their docstrings start them, on any number of ranks; and the demo's report."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from examples import demo
from tests.ranks.programs import TORCHRUN, start
from tests.support.run_log import epochs_of
from tests.support.running import ROOT

SHORT = {"regression": (4, 1e-14, "2"), "character_lm": (2, 1e-6, "1")}
"""The ranks, the largest difference of weights, and the epochs of each example."""

PLAIN = ["--optimizer", "sgd", "--lr", "0.1"]
"""AdamW divides by the size of each gradient, so that rounding in the smallest ones is seen in weights."""


def commands(name: str) -> list[list[str]]:
    """Return the commands in the docstring of an example."""
    text = (ROOT / "examples" / f"{name}.py").read_text().partition('"""')[2].partition('"""')[0]
    found = re.findall(r"^    python ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [shlex.split(command.replace("\\\n", "")) for command in found]


@pytest.fixture(scope="module", params=SHORT)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Train an example briefly on one rank and on many; return its name and the folder of both runs."""
    name, folder = request.param, tmp_path_factory.mktemp("runs")
    ranks, _, epochs = SHORT[name]
    more = [*commands(name)[0], "--epochs", epochs, *PLAIN, "--out"]
    for launcher, run in (([sys.executable], "alone"), ([*TORCHRUN, str(ranks)], "many")):
        done = start([*launcher, *more, str(folder / run)])
        assert done.returncode == 0, done.stderr
    return name, folder


@pytest.mark.timeout(300)
def test_an_example_ends_with_the_same_weights_on_one_rank_and_on_many(runs: tuple[str, Path]) -> None:
    name, folder = runs
    ranks, bound, _ = SHORT[name]
    alone, many = (torch.load(folder / run / "last.pt", weights_only=True) for run in ("alone", "many"))
    assert many["plan"]["world_size"] == ranks
    apart = ((one - many["model"][key]).abs().max().item() for key, one in alone["model"].items())
    assert max(apart) <= bound
    logs = [epochs_of(folder / run) for run in ("alone", "many")]
    for one, other in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-5)
    if name == "character_lm":
        assert_writes_lines(folder / "alone/last.pt")


def assert_writes_lines(checkpoint: Path) -> None:
    """Have the language model write on, as its docstring shows."""
    program, _, beginning = commands("character_lm")[1]
    done = start([sys.executable, program, str(checkpoint), beginning])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(beginning.rstrip()) for line in lines)


# The report of the demo.

SAID = "stripped 'module.' from 8 of 8 keys -> runs/demo.safetensors (341 kB, 0.00 s)"


def entry(correct: int, samples: int = 355, epoch: int = 1) -> dict[str, float]:
    return {"epoch": epoch, "correct": correct, "samples": samples, "accuracy": correct / samples}


def test_the_report_shows_both_counts_and_the_line_of_strip_prefix_in_80_columns():
    text, passed = demo.report(entry(353, epoch=10), SAID, entry(353))
    assert passed
    assert text.count("353 of 355 test images correct (99.44%)") == 2
    assert SAID in text.splitlines()
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("trained", "scored"),
    [(entry(353), entry(352)), (entry(353), entry(353, samples=356)), (entry(300), entry(300))],
    ids=["another count", "another test set", "too few right"],
)
def test_the_demo_fails_if_the_counts_differ_or_too_few_are_right(trained, scored):
    text, passed = demo.report(trained, SAID, scored)
    assert not passed
    assert "FAILED" in text
    assert "passed" not in text


def test_best_pt_is_from_the_first_epoch_with_the_best_accuracy():
    log = [entry(340, epoch=1), entry(350, epoch=2), entry(350, epoch=3), entry(345, epoch=4)]
    assert demo.best_epoch(log)["epoch"] == 2
