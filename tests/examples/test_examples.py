"""The examples of docs/own-loops.md and of examples/, run on several ranks and compared with one process."""

from __future__ import annotations

import copy
import json
import random
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from ckpttool.distributed import Plan
from examples import demo
from tests.ranks.programs import TORCHRUN, start
from tests.support.run_log import epochs_of
from tests.support.running import ROOT

PAGE = (ROOT / "docs/own-loops.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def example(name: str) -> Any:
    """Return a function that the page defines."""
    made: dict[str, Any] = {}
    exec("\n".join(BLOCKS), made)
    return made[name]


def network() -> nn.Module:
    torch.manual_seed(4)
    layers = [nn.BatchNorm1d(6, affine=False), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def without_norm() -> nn.Module:
    return network()[1:]  # type: ignore[index]


def samples(count: int = 45) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (count,), generator=generator))


def trained_alone(model: nn.Module, batches: list[Any]) -> nn.Module:
    """Return the model after plain steps of one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, target in batches:
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same(found: dict[str, torch.Tensor], expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-13)


# ---- the cases: what each rank does ---------------------------------------------------------------------


def by_plan(rank: int, size: int) -> Any:
    model = without_norm()
    example("train_by_plan")(model, samples())
    return model.state_dict()


def texts(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 2 texts of 4 tokens, of which 8 count on rank 0 and 3 on rank 1."""
    inputs, target = samples(8 + rank)[:8]
    target = torch.where(torch.arange(8) < (8, 3)[rank], target, -100)
    return inputs.view(2, 4, 6), target.view(2, 4)


def on_tokens(rank: int, size: int) -> Any:
    model = without_norm()
    ddp = DistributedDataParallel(model)
    example("step_on_tokens")(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), *texts(rank))
    return model.state_dict()


def watched(rank: int, size: int) -> Any:
    model = without_norm()
    example("train_watched")(model, [torch.ones(3, 6, dtype=torch.float64)] * 2)
    return [float(parameter.grad.sum()) for parameter in model.parameters()]


def batches_of(rank: int, sizes: tuple[int, ...]) -> list[Any]:
    return [samples(10 * rank + number + 20)[:size] for number, size in enumerate(sizes)]


UNEVEN = ((4, 3, 5), (6,))


def unevenly(rank: int, size: int) -> Any:
    model = network()
    example("train_unevenly")(model, batches_of(rank, UNEVEN[rank]))
    return model.state_dict()


class Texts(Dataset[Any]):
    """45 texts of 1 to 5 tokens; every third has one whose target does not count."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = samples(100 + index)[: 1 + index % 5]
        if index % 3 == 0:
            target[0] = -100
        return inputs, target


def padded(texts: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, target = zip(*texts, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(list(inputs), batch_first=True), pad(list(target), batch_first=True, padding_value=-100)


def on_texts(rank: int, size: int) -> Any:
    model = without_norm()
    example("train_on_texts")(model, Texts(), padded)
    return model.state_dict()


def on_stream(rank: int, size: int, start: int) -> Any:
    model = without_norm()
    example("train_on_stream")(model, samples(), start)
    return model.state_dict()


def divided(rank: int, size: int) -> Any:
    return example("train_divided")(without_norm(), batches_of(rank, (4, 7, 3)))


def pooled(rank: int, size: int) -> Any:
    model = network()
    example("train_pooled")(model, batches_of(rank, (4, 7, 3)))
    return model.state_dict()


def resumed(rank: int, size: int, settled: bool) -> bool:
    """Return whether a run that was stopped in the middle ends as one that never stopped, to the bit."""

    def wrap(model: nn.Module) -> DistributedDataParallel:
        return example("wrapped")(model, torch.zeros(1, 64)) if settled else DistributedDataParallel(model)

    def steps(ddp: DistributedDataParallel, numbers: range) -> dict[str, torch.Tensor]:
        for number in numbers:
            torch.manual_seed(100 * number + rank)
            ddp.zero_grad()
            ddp(torch.randn(5, 64)).square().mean().backward()
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter -= 0.05 * parameter.grad
        return copy.deepcopy(ddp.module.state_dict())

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())))

    whole = steps(wrap(fresh()), range(4))
    model = fresh()
    model.load_state_dict(steps(wrap(fresh()), range(2)))
    again = steps(wrap(model), range(2, 4))
    return all(torch.equal(whole[name], again[name]) for name in whole)


class Noisy(Dataset[Any]):
    """Draws from three generators for each sample."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        drawn = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        return index, torch.tensor([index, *drawn], dtype=torch.float64)


def drawn(rank: int, size: int) -> dict[int, list[float]]:
    torch.manual_seed(rank)
    found = [batch[1] for batch in example("loader_of")(Noisy(), 2)]
    return {int(row[0]): row[1:].tolist() for batch in found for row in batch}


def evaluated(rank: int, size: int) -> Any:
    found = example("evaluate")(without_norm(), samples())
    return found.correct, found.samples, found.loss, found.per_class, found.index_digest


# ---- the comparisons ------------------------------------------------------------------------------------


def test_the_page_has_ten_lines_for_each_part() -> None:
    assert len(BLOCKS) == PAGE.count("\n## ") + 1
    assert max(len(block.splitlines()) for block in BLOCKS) <= 12


def test_the_plan_as_a_sampler_gives_the_weights_of_one_process(run_ranks: Any) -> None:
    plan, data = Plan(45, 16), samples()
    batches = [data[torch.tensor(batch)] for epoch in range(3) for batch in plan.batches(epoch)]
    alone = trained_alone(without_norm(), batches)
    for found in run_ranks(2, by_plan):
        assert_same(found, alone)


def test_a_watched_loop_trains_as_before(run_ranks: Any) -> None:
    alone = without_norm()
    for _ in range(2):
        alone(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
    expected = [float(parameter.grad.sum()) for parameter in alone.parameters()]
    assert run_ranks(2, watched) == [pytest.approx(expected, rel=1e-13)] * 2


def test_the_mean_over_tokens_gives_the_weights_of_one_process(run_ranks: Any) -> None:
    inputs, target = (torch.cat(part) for part in zip(texts(0), texts(1), strict=True))
    alone = trained_alone(without_norm(), [(inputs.flatten(0, 1), target.flatten())])
    for found in run_ranks(2, on_tokens):
        assert_same(found, alone)


def test_texts_of_any_length_give_the_weights_of_one_process(run_ranks: Any) -> None:
    batches = [padded([Texts()[index] for index in batch]) for batch in Plan(45, 15).batches(0)]
    alone = trained_alone(without_norm(), [(inputs.flatten(0, 1), to.flatten()) for inputs, to in batches])
    for found in run_ranks(2, on_texts):
        assert_same(found, alone)


@pytest.mark.parametrize(("size", "start"), [(2, 0), (3, 16), (4, 0)])  # the last batch has 13 samples
def test_a_stream_gives_the_weights_of_one_process(run_ranks: Any, size: int, start: int) -> None:
    batches = [samples()[at : at + 16] for at in range(start, 45, 16)]
    alone = trained_alone(without_norm(), batches)
    for found in run_ranks(size, on_stream, start):
        assert_same(found, alone)


def test_a_model_divided_among_ranks_gets_the_weights_of_one_process(run_ranks: Any) -> None:
    ranks = [batches_of(rank, (4, 7, 3)) for rank in range(2)]
    whole = [tuple(torch.cat(part) for part in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
    assert_same(run_ranks(2, divided)[0], trained_alone(without_norm(), whole))


def test_ranks_that_run_out_give_the_weights_of_one_process(run_ranks: Any) -> None:
    ranks = [batches_of(rank, sizes) for rank, sizes in enumerate(UNEVEN)]
    steps = [[own[number] for own in ranks if number < len(own)] for number in range(3)]
    whole = [tuple(torch.cat(part) for part in zip(*step, strict=True)) for step in steps]
    alone = trained_alone(network(), whole)
    for found in run_ranks(2, unevenly):
        assert_same(found, alone)


def test_pooled_statistics_are_those_of_one_process(run_ranks: Any) -> None:
    """The layer is the first, so its inputs do not depend on the weights."""
    ranks = [batches_of(rank, (4, 7, 3)) for rank in range(2)]
    norm = network()[0]  # type: ignore[index]
    for one, other in zip(*ranks, strict=True):
        norm(torch.cat([one[0], other[0]]))
    for found in run_ranks(2, pooled):
        for name, value in norm.state_dict().items():
            torch.testing.assert_close(found[f"0.{name}"], value, rtol=1e-14, atol=1e-14)


def test_settled_buckets_make_a_resume_exact(run_ranks: Any) -> None:
    assert run_ranks(3, resumed, True) == [True] * 3


def test_keyed_samples_are_those_of_one_process(run_ranks: Any) -> None:
    one, other = run_ranks(2, drawn)
    assert not one.keys() & other.keys()
    assert {**one, **other} == drawn(0, 1)


def test_an_evaluation_is_that_of_one_process_to_the_bit(run_ranks: Any) -> None:
    assert run_ranks(2, evaluated) == run_ranks(1, evaluated) * 2  # on as many threads


@pytest.mark.parametrize("launcher", [[sys.executable], [*TORCHRUN, "2"]], ids=["python", "torchrun"])
def test_the_script_runs_under_torchrun_and_alone(tmp_path: Path, launcher: list[str]) -> None:
    script = tmp_path / "own.py"
    script.write_text("\n".join([*BLOCKS, "main()"]))
    done = start([*launcher, str(script)])
    assert (done.returncode, done.stderr) == (0, "")
    mean = torch.arange(24.0).view(4, 6).mean(dim=0).tolist()
    assert json.loads(done.stdout) == [mean] * 3


# ---- the tasks of examples/, as their docstrings start them ---------------------------------------------

SHORT = {
    "regression": (4, 1e-14, "2"),
    "character_lm": (2, 1e-6, "1"),
    "padded_text": (2, 1e-6, "1"),
    "shapes": (2, 1e-5, "1"),
}
"""The ranks, the largest difference of weights, and the epochs of each example."""

FEW = """
from examples.padded_text import Numbers
from examples.shapes import Drawings

def padded_text():
    return Numbers(range(1, 160)), Numbers(range(800, 840))

def shapes():
    return Drawings(range(240)), Drawings(range(1000, 1040))
"""
"""Fewer samples of an example's data sets: steps enough to compare."""

PLAIN = ["--optimizer", "sgd", "--lr", "0.02"]
"""AdamW divides by the size of each gradient, so that rounding in the smallest ones is seen in weights."""


def commands(name: str) -> list[list[str]]:
    """Return the commands in the docstring of an example."""
    text = (ROOT / "examples" / f"{name}.py").read_text().partition('"""')[2].partition('"""')[0]
    found = re.findall(r"^    python ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [shlex.split(command.replace("\\\n", "")) for command in found]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.long] * (name in ("shapes", "character_lm", "padded_text")))
        for name in SHORT
    ],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Train an example briefly on one rank and on many; return its name and the folder of both runs."""
    name, folder = request.param, tmp_path_factory.mktemp("runs")
    ranks, _, epochs = SHORT[name]
    (folder / "few.py").write_text(FEW)
    data = ["--data", f"{folder}/few.py:{name}"] if f"def {name}()" in FEW else []
    more = [*commands(name)[0], *data, "--epochs", epochs, *PLAIN, "--out"]
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
    assert logs[0]
    for one, other in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one.get("metrics", {}) == pytest.approx(other.get("metrics", {}), rel=1e-5)
    if name == "character_lm":
        assert_writes_lines(folder / "alone/last.pt")


SCORES = {"padded_text": ("accuracy", 0.98), "shapes": ("found", 0.9)}
"""What each example of samples of any shape reaches, as its docstring says."""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCORES)
def test_an_example_reaches_the_score_that_it_names_in_under_a_minute(tmp_path: Path, name: str) -> None:
    metric, least = SCORES[name]
    command = [*commands(name)[0], "--out", str(tmp_path)]
    done = start([sys.executable, *command, "--spawn", "2", "--max-time", "60"])
    assert done.returncode == 0, done.stderr
    last = epochs_of(tmp_path)[-1]
    assert last["epoch"] == int(command[command.index("--epochs") + 1])
    assert {**last, **last.get("metrics", {})}[metric] >= least


def assert_writes_lines(checkpoint: Path) -> None:
    """Have the language model write on, as its docstring shows."""
    program, _, beginning = commands("character_lm")[1]
    done = start([sys.executable, program, str(checkpoint), beginning])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(beginning.rstrip()) for line in lines)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_transformer_learns_from_token_files_what_its_docstring_says(tmp_path: Path) -> None:
    first, second = commands("token_files")
    text, name = first[1:]
    assert start([sys.executable, first[0], text, str(tmp_path / "runs/tokens")], ROOT).returncode == 0
    there = [argument.replace(name, str(tmp_path / name)) for argument in second]
    done = start([*TORCHRUN, "2", *there], patience=380)
    assert done.returncode == 0, done.stderr
    epochs = epochs_of(tmp_path / "runs/tokens/run")
    assert epochs[0]["metrics"]["perplexity"] > 20
    assert min(epoch["metrics"]["perplexity"] for epoch in epochs) < 14


# ---- the report of the demo -----------------------------------------------------------------------------

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
