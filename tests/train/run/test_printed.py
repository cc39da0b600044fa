"""What a run prints: its plan with `--preview`, a table of scores, and a bar that leaves nothing behind."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from ckpttool.distributed.plan import Plan
from tests.ranks import runs
from tests.ranks.forked import Program
from tests.ranks.programs import TORCHRUN, environment, start
from tests.support.run_log import entries_of, epochs_of
from tests.support.running import ROOT
from train import console
from train.config import command_line
from train.config.sections import TrainConfig
from train.data import data_set
from train.log import step_log
from train.log.step_log import Work
from train.main import main
from train.run import preview, report
from train.run.report import BEST_MARK, Bar, Clock, Column, ScoreTable, describe, in_hours
from train.trainer.trainer import Trainer


def seen(capsys: Any, *flags: str, kind: str = "plan") -> str:
    assert main(["--preview", kind, *flags]) == 0
    return capsys.readouterr().out


def of_torch(samples: int, batch_size: int, *, drop_last: bool = False) -> Plan:
    return Plan(samples, batch_size, sampler="torch", drop_last=drop_last)


@pytest.mark.parametrize(("plan", "world_size", "said"), [
    (of_torch(5, 4), 2, ["5 samples on 2 ranks: sample 4 is seen twice"]),
    (of_torch(10, 4), 4, ["10 samples on 4 ranks: samples 1 and 4 are seen twice"]),
    (of_torch(10, 4, drop_last=True), 4, ["10 samples on 4 ranks: samples 2 and 6 are left out of epoch 0"]),
    (of_torch(3, 8), 8, ["3 samples on 8 ranks: samples 0 and 2 are seen 3 times, sample 1 is seen twice"]),
    (of_torch(9, 32), 32, ["9 samples on 32 ranks: 5 samples are seen 4 times, 4 samples are seen 3 times"]),
    (of_torch(6, 8, drop_last=True), 2, ["6 samples on 2 ranks, batch 8: no rank gets a batch"]),
    (Plan(10, 4), 4, [
        "10 samples on 4 ranks: each is seen exactly once in an epoch",
        "10 samples, batch 4 on 4 ranks: the last batch leaves 2 ranks with nothing",
    ]),
    (Plan(7, 4), 4, [
        "7 samples on 4 ranks: each is seen exactly once in an epoch",
        "7 samples, batch 4 on 4 ranks: the last batch leaves one rank with nothing",
    ]),
])  # fmt: skip
def test_the_sentences_say_what_is_repeated_left_out_or_missing(plan, world_size, said):
    assert preview.sentences(plan, world_size) == said


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("world_size", [1, 32])
@pytest.mark.parametrize("plan", [Plan(1, 1), Plan(5000, 64), Plan(3000, 1024), Plan(3, 8, drop_last=True)])
def test_the_table_fits_the_terminal(plan, world_size, width):
    lines = preview.table(plan, world_size, width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= preview.STEPS + 3


def test_the_table_shows_each_ranks_samples_by_step():
    assert preview.table(Plan(7, 4, rank_batch=(1, 3)), 2, 80) == [
        "epoch 0  rank 0  rank 1",
        "step 0   3       2 1 0",
        "step 1   5       6 4",
    ]


def test_a_long_table_names_what_it_leaves_out():
    lines = preview.table(Plan(5000, 64), 32, 80)
    assert "... 67 more steps" in lines
    assert lines[-1] == "(26 ranks between the last two columns)"
    assert lines[-2].startswith("step 78")


def test_the_json_is_what_torchs_classes_take(capsys):
    flags = "--data fake:10 --sampler torch --spawn 2 --batch-size 4 --epochs 2 --seed 3"
    entries = json.loads(seen(capsys, *flags.split(), kind="json"))
    assert [(entry["epoch"], entry["rank"]) for entry in entries] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    samples = range(sum(map(len, entries[0]["steps"] + entries[1]["steps"])))
    for entry in entries:
        sampler = DistributedSampler(samples, 2, entry["rank"], seed=3)
        sampler.set_epoch(entry["epoch"])
        loader = DataLoader(samples, 2, sampler=sampler, collate_fn=list)
        assert entry["steps"] == list(loader)


def test_shares_that_are_measured_are_said_to_be_equal_until_then(capsys):
    text = seen(capsys, "--data", "fake:10", "--rank-share", "auto", "--spawn", "2")
    assert "shares are equal until the speeds of the ranks have been measured" in text


@pytest.mark.parametrize("task", ["classification", "language-model", "own.py:no_such_task"])
def test_samples_need_no_classes_and_are_not_read(tmp_path, capsys, task):
    code = "class Texts(list):\n    def __getitem__(self, index):\n        raise OSError\n"
    (tmp_path / "own.py").write_text(f"{code}def data():\n    return Texts('abcde'), Texts('ab')\n")
    assert "5 training samples" in seen(capsys, "--data", f"{tmp_path}/own.py:data", "--task", task)


@pytest.mark.parametrize(
    "launcher", [[*TORCHRUN, "2", "train/main.py"], [sys.executable, "train/main.py", "--spawn", "2"]]
)
def test_one_table_is_printed_whoever_starts_the_ranks(launcher, tmp_path):
    flags = ["--preview", "--data", "fake:10", "--batch-size", "4", "--out", str(tmp_path / "run")]
    ran = start([*launcher, *flags], cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("epoch 0  rank 0  rank 1") == 1
    assert not (tmp_path / "run").exists()


# ---- scores and commands --------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    inputs = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs[:40], inputs[:40, :1]), TensorDataset(inputs[40:], inputs[40:, :1])

def model():
    return nn.Linear(4, 1)


def images(size):
    return TensorDataset(torch.zeros(size, 1, 8, 8), torch.arange(size) % 2)

def alone():
    return images(12)

def both():
    return images(1200), images(4)

class Stream:
    classes = ["a", "b"]

    def __init__(self, *samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples * 9)

class Sized(Stream):
    def __len__(self):
        return 1200

class Positioned(Stream):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

IMAGE = torch.zeros(1, 8, 8), 1

def stream():
    return Stream(IMAGE, IMAGE)

def tested():
    return Sized(IMAGE, IMAGE), images(4)

def positioned():
    return Positioned(IMAGE, IMAGE)

def documents(kind=Stream):
    made = kind([1, 2, 3, 4, 5], [1, 2])
    made.classes = []
    return made

def held():
    return documents(Positioned), documents()

class Texts(Stream):
    def collate(self, samples):
        texts = [torch.tensor(text) for text, _ in samples]
        return torch.nn.utils.rnn.pad_sequence(texts).T, torch.tensor([label for _, label in samples])

def texts():
    return Texts(([1, 2], 0), ([1], 1))
"""


def on_terminal(folder: Path, columns: int, *arguments: str) -> list[str]:
    """Return what is on a terminal of this width when the trainer has ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, str(ROOT / "train" / "main.py"), *arguments, "--out", "x"]
    env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")}
    run = Program(command, folder, env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 4096):
            said += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
    assert run.wait(timeout=60) == 0, said.decode()
    return [overprinted(line) for line in said.decode().replace("\r\n", "\n").split("\n")]


def overprinted(line: str) -> str:
    """Return what is seen of a line in which carriage returns begin again."""
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()


def pasted(lines: list[str]) -> str:
    """Return what a shell takes lines for."""
    return " ".join("\n".join(lines).replace("\\\n", "").split())


@pytest.mark.parametrize("columns", [40, 80])
def test_the_scores_of_any_task_are_a_table_and_the_bar_leaves_nothing(tmp_path, columns):
    (tmp_path / "own.py").write_text(OWN)
    given = ["--data", "own.py:data", "--model", "own.py:model", "--task", "regression", "--epochs", "2"]
    lines = on_terminal(tmp_path, columns, *given, "--batch-size", "8", "--eval-every", "3steps")
    start = next(i for i, line in enumerate(lines) if "train loss" in line)
    heading, *rows = lines[start : lines.index("", start)]
    figures = ["mse", "mae", "r2", "seconds"] if columns == 80 else []
    assert heading.split() == ["epoch", "train", "loss", "test", "loss", *figures]
    named = "note the terminal is too narrow for columns that the log has: r2, mae, mse, seconds"
    assert (named in " ".join(" ".join(lines).split())) == (columns == 40)
    assert [row.split()[0] for row in rows] == ["0.60/2", "1/2", "1.20/2", "1.80/2", "2/2"]
    for row in rows if columns == 80 else ():
        assert row[len(heading) - 1].isdigit() and row[len(heading) :] in ("", "  best")
    assert not any("step/s" in line for line in lines)
    assert "ckpttool strip-prefix x/best.pt x/model.safetensors" in pasted(lines)
    assert max(len(line) for line in lines if "evaluate.py" not in line) <= columns
    assert not any(line.endswith("-") or line.startswith(" " * 9) for line in lines[: start - 1])


def test_one_step_is_no_steps():
    said = [report._steps(SimpleNamespace(feed=SimpleNamespace(known_steps=n, stream=None))) for n in (1, 2)]  # type: ignore[arg-type]
    assert said == ["1 step per epoch", "2 steps per epoch"]


def test_a_recipe_is_broken_between_its_parts():
    config = TrainConfig.of(amp="bf16", clip_norm=1.0, ema=0.999, augment="crop-flip", mixup=0.2, seed=123)
    text = f"train   {report.in_lines(command_line.recipe(config))}"
    first = "train   10 epochs, sgd lr 0.1, cosine, amp bf16, clip-norm 1.0, ema 0.999,"
    assert text == f"{first}\n        augment crop-flip, mixup 0.2, seed 123"


def test_a_command_is_broken_before_flags_and_is_the_same_for_a_shell():
    words = ["python", "train/main.py", "--model", "own.py:model", "--data", "own.py:data", "--mean=-1,2"]
    words += ["--out", "my \\ run", "--init-allow-missing", "linear.*", "--epochs", "20", "--resume", "auto"]
    text = command_line.to_paste(words)
    assert shlex.split(text.replace(" \\\n", " ")) == words
    assert 1 < len(text.splitlines()) == text.count("\n      --") + 1
    assert max(map(len, text.splitlines())) <= 80


def test_a_command_is_broken_between_paths_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    words = "ckpttool strip-prefix runs/2026-11-26-201001/best.pt runs/2026-11-26-201001/model.safetensors"
    program, *paths = words.split(" runs")
    broken = "".join(f" \\\n      runs{path}" for path in paths)
    assert command_line.to_paste(words.split()) == f"  {program}{broken}"
    assert command_line.to_paste(["ckpttool"]) == "  ckpttool"


# ---- the head of a report says what the data are -------------------------------------------------------


LANGUAGE = {"task": "language-model", "block_size": 4}


@pytest.mark.parametrize(("factory", "settings", "said"), [
    ("both", {}, "1,200 training and 4 test samples of 1×8×8, 2 classes"),
    ("alone", {}, "12 training samples of 1×8×8, no test samples, 2 classes"),
    ("alone", {"test": "both"}, "12 training and 4 test samples of 1×8×8, 2 classes"),
    (
        "stream",
        {},
        "a stream of samples of 1×8×8 that does not know its position, no test samples, 2 classes",
    ),
    (
        "tested",
        {},
        "a stream of 1,200 samples of 1×8×8 that does not know its position, 4 test samples, 2 classes",
    ),
    ("positioned", {}, "a stream of samples of 1×8×8, no test samples, 2 classes"),
    ("texts", {}, "a stream of samples that does not know its position, no test samples, 2 classes"),
    (
        "documents",
        LANGUAGE,
        "a stream of packed blocks of 4 tokens that does not know its position, no test samples",
    ),
    ("held", LANGUAGE, "a stream of packed blocks of 4 tokens, 16 test samples"),
])  # fmt: skip
def test_data_are_described_as_they_are(own, factory, settings, said):
    settings = dict(settings)
    test_data = f"{own}:{settings.pop('test')}" if "test" in settings else None
    data = data_set.load(TrainConfig.of(data=f"{own}:{factory}", test_data=test_data, **settings).data)
    assert describe(data) == said


# ---- columns that do not fit a terminal give way in an order, and are named ----------------------------


TEXTS = ["2.3076", "97.50%", "2.3037", "100.00%", "(8123/10000)", "1234.5"]
CELLS: dict[Column | str, str] = {**dict(zip(Column, TEXTS, strict=True)), "mae": "1.234e-05"}


@pytest.mark.parametrize(("width", "hidden"), [
    (120, []),
    (78, []),
    (77, ["correct of all"]),
    (60, ["correct of all", "seconds"]),
    (50, ["correct of all", "seconds", "train correct"]),
    (40, ["correct of all", "seconds", "train correct", "train loss"]),
])  # fmt: skip
def test_columns_give_way_to_the_width_and_are_named(width, hidden):
    table = ScoreTable(7, None, width)
    line = table.line("3/10", CELLS, best=True)
    assert table.hidden == hidden
    assert len(line) <= width and line.endswith(BEST_MARK)
    assert len(table.heading()) == len(line) - len(BEST_MARK)
    assert line.split() == [
        "3/10",
        *(text for column, text in zip(Column, TEXTS, strict=True) if column.value[0] not in hidden),
        "best",
    ]


def test_the_metrics_of_a_task_give_way_from_the_last_and_before_the_seconds():
    assert ScoreTable(7, ["mse", "mae", "r2"], 80).hidden == []
    assert ScoreTable(7, ["mse", "mae", "r2"], 70).hidden == ["r2"]
    table = ScoreTable(7, ["mse", "mae"], 57)
    assert table.hidden == ["mae"]
    assert table.heading().split() == ["epoch", "train", "loss", "test", "loss", "mse", "seconds"]


def test_what_has_no_score_stays_empty_below_its_head():
    table = ScoreTable(7, None, 80)
    line = table.line("1/2", {Column.TEST_LOSS: "2.3037"}, best=False)
    assert line.split() == ["1/2", "2.3037"]
    assert line.index("2.3037") + 6 == table.heading().index("test loss") + len("test loss")


def test_a_metric_may_have_the_name_of_another_column():
    table = ScoreTable(7, ["seconds", "train loss"], 120)
    cells = CELLS | {"seconds": "0.5", "train loss": "0.25"}
    assert table.line("1/2", cells, best=False).split() == [
        "1/2",
        "2.3076",
        "2.3037",
        "0.5",
        "0.25",
        "1234.5",
    ]


# ---- the figures behind the bar ------------------------------------------------------------------------


def test_seconds_of_training_and_of_evaluations_are_told_apart():
    clock = Clock()

    def steps() -> Iterator[None]:
        for _ in range(3):
            time.sleep(0.05)
            yield

    for _ in clock.training(steps()):
        time.sleep(0.02)  # a save, say
        with clock.evaluating():
            time.sleep(0.03)
    times = clock.times()
    assert times["train_seconds"] >= 0.15 and times["evaluate_seconds"] >= 0.09
    assert times["seconds"] >= times["train_seconds"] + times["evaluate_seconds"] + 0.05


def slowly_scored(rank: int, size: int, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        score = Trainer.scores
        patch.setattr(Trainer, "scores", lambda self: (time.sleep(0.2), score(self))[1])
        return runs.run(rank, size, runs.steady, folder, {"eval_every": runs.Every(1, "steps")})


def test_the_log_has_the_seconds_of_each_epochs_training_and_evaluations(run_ranks, tmp_path):
    run_ranks(2, slowly_scored, str(tmp_path))
    for epoch in epochs_of(tmp_path):
        assert epoch["evaluate_seconds"] >= 0.6  # three evaluations
        assert 0 < epoch["train_seconds"] <= epoch["seconds"] - epoch["evaluate_seconds"]


# ---- FLOPs, memory, the bar ----------------------------------------------------------------------------


def test_the_operations_of_a_pass_are_those_that_paper_and_pencil_give():
    model, inputs = nn.Linear(30, 20, bias=False), torch.rand(5, 30, requires_grad=True)
    flops = step_log.flops_of(lambda: model(inputs).sum().backward())
    assert flops == 3 * 2 * 5 * 30 * 20  # forward, and the gradients of weights and of inputs
    assert step_log.flops_of(lambda: torch.ones(3).sum()) is None
    assert step_log.flops_of(lambda: 1 / 0) is None


def test_rates_are_of_all_ranks_and_left_out_where_they_are_not_known():
    assert Work().rates(10, 10, 2.0) == {}
    known = Work("tokens", flops=1000, peak=50_000.0).rates(10, 640, 2.0)
    assert known == {"tokens_per_second": 320.0, "flops_per_second": 5000.0, "mfu": 0.1}


@pytest.mark.parametrize(("name", "amp", "peak"), [
    ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
    ("NVIDIA H100 PCIe", "bf16", 756e12),
    ("NVIDIA A100-SXM4-40GB", "none", 19.5e12),
    ("Tesla T4", "fp16", 65e12),
    ("NVIDIA L40S", "bf16", 362e12),
    ("Radeon", "bf16", None),
])  # fmt: skip
def test_the_peak_of_a_gpu_is_known_by_its_name(monkeypatch, name, amp, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    expected = None if peak is None else 4 * peak
    assert step_log.peak_of(torch.device("cuda", 0), amp, 4) == expected
    assert step_log.peak_of(torch.device("cpu"), amp, 4) is None


def test_the_log_says_how_much_is_computed_in_a_second_and_the_memory(run_ranks, tmp_path):
    run_ranks(2, runs.run, runs.steady, str(tmp_path), {"log_every": 2})
    model, (image, _) = runs.steady(), (torch.rand(1, *runs.SHAPE), 0)
    of_sample = step_log.flops_of(lambda: F.cross_entropy(model(image), torch.zeros(1).long()).backward())
    assert of_sample
    for entry in (entry for entry in entries_of(tmp_path) if "grad_norm" in entry):
        assert entry["flops_per_second"] == pytest.approx(of_sample * entry["samples_per_second"], rel=1e-3)
        assert "mfu" not in entry and 1e7 < entry["peak_memory"] < 1e11


def figures(
    latest: dict[str, float], unit: str = "", done: int = 30, steps: int | None = 50, most: int | None = None
) -> list[str]:
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(training=SimpleNamespace(max_steps=most)),
        feed=SimpleNamespace(known_steps=steps),
        log=SimpleNamespace(latest=latest, work=Work(unit)),
        place=SimpleNamespace(device=torch.device("cpu")),
        progress=SimpleNamespace(global_step=10),
        updater=SimpleNamespace(total_steps=100),
    )
    bar = Bar(trainer, shown=True)
    bar._began -= 60.0
    trainer.progress.global_step += done
    return bar.figures()


def test_the_bar_has_the_speed_the_utilisation_the_memory_and_the_time_left():
    rate, mfu, memory, left = figures({"samples_per_second": 1234.5, "mfu": 0.41, "tokens_per_second": 9.0})
    assert (rate, mfu) == ("1,234 samples/s", "MFU 41%")
    assert memory.endswith(" GB") and left == "2:00 left"  # 60 of 90 steps, 2 s each
    assert figures({"tokens_per_second": 56789.0}, "tokens")[0] == "56,789 tokens/s"
    assert len(figures({}, done=0)) == 1
    assert len(figures({}, steps=None)) == 1  # of a stream of no known length, nobody knows the time left
    assert figures({}, steps=None, most=100)[1] == "2:00 left"


def test_a_time_is_shown_in_hours_minutes_and_seconds():
    assert [in_hours(seconds) for seconds in (0, 59.6, 3599, 3600, 90061)] == [
        *("0:00", "1:00", "59:59", "1:00:00", "25:01:01")
    ]


# ---- lines on a terminal end between words -------------------------------------------------------------


LONG = "error: --data folder:nowhere: no such folder (give folder:PATH with a sub-folder for each class)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_gets_lines_that_end_between_words(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    console.note(f"{LONG}\n  python train/main.py --a-command-to-paste --that-is-longer-than-forty-columns")
    *lines, command, end = terminal.getvalue().split("\n")
    assert " ".join(lines) == LONG and len(lines) > 1
    assert max(map(len, lines)) <= columns
    assert command.endswith("--that-is-longer-than-forty-columns") and end == ""


def test_a_file_gets_the_line_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    console.note(LONG)
    assert capsys.readouterr().err == f"{LONG}\n"


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_help_breaks_no_word_and_keeps_to_the_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text, end, _ = command_line.train_parser().format_help().partition("\nexamples:")
    assert end and "torch.distributed.checkpoint" in text.split() and "--grad-checkpoint" in text
    helps = [line for line in text.splitlines() if not line.startswith(("  -", "usage", "Train"))]
    assert max(map(len, helps)) <= columns
    assert not any(line.endswith("-") for line in helps)


@pytest.mark.parametrize(
    ("words", "code"), [("--no-such-flag 2>&-", 2), ("--no-such-flag >&- 2>&-", 2), ("--help >&-", 0)]
)
def test_a_program_whose_streams_are_closed_ends_as_usual(words, code):
    command = f"{sys.executable} train/main.py {words}"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=100).returncode == code


@pytest.mark.long
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_run_whose_streams_are_closed_trains(tmp_path, closed):
    command = f"{sys.executable} train/main.py --data fake:8 --epochs 1 --out {tmp_path}/run {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=100).returncode == 0
    assert (tmp_path / "run" / "last.pt").exists()


def test_what_is_meant_for_a_closed_stderr_does_not_go_to_stdout(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", None)
    console.note(LONG)
    assert capsys.readouterr().out == ""
