"""The trainer's flags and files of settings: how they are read, and what is refused before a start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import Unreadable, UsageFault
from tests.ranks.programs import TINY
from tests.support.running import ROOT
from train import evaluate, main
from train.config import command_line, flags
from train.config.flags import Every, flags_in, setting_of
from train.config.sections import CHANGEABLE, TrainConfig
from train.launch import program as launch


def test_no_record_holds_what_signs_a_url():
    signed = ["--init", "https://h.org/a.pt?sig=SECRET", "--init-allow-missing", "x*"]
    config = command_line.parse(signed)
    assert "SECRET" not in f"{config.plain()}{command_line.arguments_of(config)}"
    assert config.model.init == signed[1]


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)


def test_the_defaults_are_those_in_the_manual():
    config = command_line.parse([])
    assert (config.data.name, config.model.name, config.batch.size, config.saving.out) == (
        "digits",
        "simple-cnn",
        64,
        None,
    )
    assert (config.saving.save_every, config.saving.keep, config.saving.resume) == (
        Every(1, "epochs"),
        0,
        None,
    )


UNITS = {
    "epochs": ["3", "3epochs", "3 epoch"],
    "steps": ["3steps"],
    "min": ["3mins", "3 Minutes"],
    "s": ["3s"],
    "h": ["3hours"],
}


@pytest.mark.parametrize(("text", "unit"), [(text, unit) for unit, each in UNITS.items() for text in each])
def test_save_every_counts_epochs_steps_or_time(text, unit):
    config = command_line.parse(["--save-every", text])
    assert config.saving.save_every == (3, unit)
    assert command_line.parse(command_line.arguments_of(config)) == config


NO_INTERVALS = {
    "5m": "'5m' has none of the units epochs, steps, s, min, h",
    "5minits": "'5minits' has none of the units",
    "1.5h": "'1.5' is not an integer",
    "-3steps": "-3 is less than 1",
    "mins": "'mins' is not an integer",
    "": "'' is not an integer",
}


@pytest.mark.parametrize("text", NO_INTERVALS)
def test_an_interval_that_is_none_is_named_as_it_was_typed(text):
    with pytest.raises(UsageFault, match=NO_INTERVALS[text]):
        command_line.parse([f"--save-every={text}"])


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5 hrs", 5400), ("1e3s", 1000), ("2mins", 120)])
def test_a_time_may_have_a_unit(text, seconds):
    assert command_line.parse(["--max-time", text]).training.max_time == seconds


@pytest.mark.parametrize("how", ["2x4,4x2", "bf16,bf16", "both"])
def test_what_shard_is_told_twice_or_does_not_know_is_refused(how: str) -> None:
    with pytest.raises(UsageFault, match=r"says one thing twice|'both' is none of"):
        command_line.parse(["--shard", how])


def test_flags_that_are_not_given_get_the_optimizers_defaults():
    adamw = command_line.parse(["--optimizer", "adamw", "--lr", "0.5"])
    assert (adamw.optimizer.lr, adamw.optimizer.weight_decay) == (0.5, 0.01)
    assert command_line.parse([]).optimizer.lr == 0.1


LINES = [
    "",
    "--optimizer adamw --lr 0.5 --epochs 3",
    "--momentum 0 --weight-decay 1e-05 --save-every 20steps --warmup 2epochs --keep 3 --out a/b",
    "--data folder:x --mean 0.5,0.25,1 --std 1,2,3 --resize 32 --download --drop-last --batchnorm sync",
    "--out x --resume auto --workers 2 --seed 5 --deterministic --backend gloo --timeout 3.5",
    "--mean=-0.5,0.25,1",
    "--rank-share 1,3 --batch-size 8 --spawn 2",
    "--drop-last --sampler torch --save-every 3steps",
    "--init-allow-missing head.* --init-allow-missing a --init x.pt",
    "--optimizer adamw --lr 1e-05 --max-time 90",
    "--tracker tensorboard --tracker wandb --every 3 own.py:f --profile 3-5 --best mae:min --keep-best 2",
]


@pytest.mark.parametrize("line", LINES)
def test_a_configuration_becomes_flags_again_without_defaults(line):
    config = command_line.parse(line.split())
    again = command_line.arguments_of(config)
    assert command_line.parse(again) == config
    assert len(again) == len(line.split())


def test_resume_without_a_value_means_auto():
    assert command_line.parse(["--resume", "--out", "x"]).saving.resume == "auto"


# ---- flags that are mistyped ---------------------------------------------------------------------------


MEANT = {
    "--batch-size": ["--batchsize=64", "--batch_size", "--Batch-Size", "--batch-siez", "--batch"],
    "--epochs": ["--epoch"],
    "--weight-decay": ["--weight"],
    "--label-smoothing": ["--label-smooth"],
    "--resume": ["--resum"],
    "--lr": ["--learning-rate", "--learning_rate"],
    "--workers": ["--num-workers"],
}


@pytest.mark.parametrize(("typed", "meant"), [(one, meant) for meant, each in MEANT.items() for one in each])
def test_a_mistyped_flag_is_refused_with_the_one_that_was_meant(typed, meant):
    with pytest.raises(UsageFault, match=rf"^{typed.partition('=')[0]}: no such flag\b") as refused:
        command_line.parse([typed, "64"])
    assert refused.value.hint == f"did you mean {meant}?"


@pytest.mark.parametrize("typed", ["--frobnicate", "--x", "--"])
def test_nothing_is_suggested_for_what_resembles_no_flag(typed):
    assert flags.closest(typed, ["--batch-size", "--epochs", "--lr"]) is None


def test_a_value_too_many_is_named():
    with pytest.raises(UsageFault, match=r"^3: belongs to no flag\b") as refused:
        command_line.parse(["--drop-last", "3"])
    assert refused.value.hint == "train/main.py --help lists the flags"


@pytest.mark.parametrize("values", ["0.485 0.456 0.406", "0.5 0.5 0.5"])
def test_values_with_blanks_between_them_are_told_to_have_commas(values):
    with pytest.raises(UsageFault, match=rf"^{values.split()[1]}: belongs to no flag\b") as refused:
        command_line.parse(["--epochs", "2", "--mean", *values.split()])
    assert refused.value.hint == "--mean takes M,M,M: with commas, without blanks"


def test_the_flag_is_named_where_a_value_stands_before_it():
    with pytest.raises(UsageFault, match=r"^--batchsize: no such flag\b"):
        command_line.parse(["3", "--batchsize", "64"])


def test_other_programs_suggest_their_own_flags():
    with pytest.raises(UsageFault) as refused:
        evaluate.parse(["a.pt", "--model", "simple-cnn", "--thread", "2"])
    assert refused.value.hint == "did you mean --threads?"


def test_every_name_of_other_trainers_stands_for_a_flag_that_exists():
    known = command_line.train_parser()._option_string_actions
    assert set(flags.ELSEWHERE.values()) <= set(known) and not set(flags.ELSEWHERE) & set(known)


# ---- what is wrong -------------------------------------------------------------------------------------

# By the flag that is named.
WRONG = {
    "--epochs": ["--epochs 0"],
    "--batch-size": ["--batch-size 1.5", "--spawn 3 --batch-size 2", "--spawn 3 --sampler torch"],
    "--lr": ["--lr -1", "--lr nan", "--lr inf"],
    "--momentum": ["--momentum 1", "--optimizer adamw --momentum 0.5"],
    "--optimizer": ["--optimizer lion"],
    "--save-every": ["--save-every 0", "--save-every 5parsecs"],
    "--max-time": ["--max-time 0min"],
    "--resume": ["--resume auto"],
    "--force": ["--resume x.pt --force"],
    "--accumulate": ["--accumulate 65"],
    "--spawn": ["--spawn 0"],
    "--rank-share": [
        "--rank-share 1,3",
        *(f"--spawn 2 --rank-share {share}" for share in ("1,2,3", "1,0", "1,900")),
        *(f"--spawn 2 --rank-share 1,1 {other}" for other in ("--sampler torch",)),
    ],
    "--sampler": ["--sampler none"],
    "--mean": ["--mean 0,x", "--data fake:20 --mean 1,2"],
    "--std": ["--std 1,0,1"],
    "--resize": ["--resize 32"],
    "--timeout": ["--timeout 0"],
    "--workers": ["--workers -1"],
    "--no-such-flag": ["--no-such-flag"],
    "--batch": ["--batch 3"],
    # refused with a look at the data and the model
    "--data": ["--data no-such-data", "--data fake:none", "--data folder:/no/such/folder"],
    "--model": ["--data fake:20 --model no-such-model"],
    "torchvision:no_such_model": ["--data fake:20 --model torchvision:no_such_model"],
    "--drop-last": ["--data fake:20 --drop-last"],
    "--warmup": ["--data fake:20 --warmup 99steps"],
    "--backend": ["--backend nccl"],
    "--every": ["--every 3min own.py:f", "--data fake:20 --every 3 /no/such/file.py:f"],
    "--profile": ["--profile 5-3", "--profile 0"],
    "--tracker": ["--tracker neptune", "--data fake:20 --tracker tensorboard --tracker tensorboard"],
    "--also-test": [
        f"--data fake:20 --also-test {spec}" for spec in ("fake:9", "a=", "a=fake:9 --also-test a=fake:9")
    ],
    "--best": [f"--data fake:20 --best {best}" for best in ("mae", "b/loss", "loss:least")],
    "--config": ["--config no-such.toml --like x"],
}


@pytest.mark.parametrize(("line", "flag"), [(line, flag) for flag, each in WRONG.items() for line in each])
def test_wrong_flags_are_one_line_and_exit_code_2_before_any_process_group(
    line, flag, capsys, monkeypatch, here
):
    import torch
    import torch.distributed as dist

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert flag in said.err
    assert list(here.iterdir()) == []


OWN = """
from torch import nn

class Idle(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(3072, num_classes)
        self.idle = nn.Linear(2, 2)
    def forward(self, x):
        return super().forward(x.flatten(1))

def linear(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, num_classes))

idle = lambda num_classes: Idle(num_classes)
normalised = lambda num_classes: linear(num_classes).append(nn.BatchNorm1d(num_classes))
synchronised = lambda num_classes: linear(num_classes).append(nn.SyncBatchNorm(num_classes))
frozen = lambda num_classes: linear(num_classes).requires_grad_(False)
short = lambda: linear(3)
"""


@pytest.mark.parametrize("rest", ["", "--accumulate 2"])
def test_a_batchnorm_batch_of_one_is_refused_and_names_the_flags(own, capsys, rest):
    size = "2" if rest else "4"
    assert main.main(f"--model {own}:normalised --data fake:9 --batch-size {size} {rest}".split()) == 2
    said = capsys.readouterr().err
    assert f"--batch-size {size}" in said and "BatchNorm" in said
    assert ("--drop-last" in said) == (not rest)
    assert ("--accumulate" in said) == bool(rest)


def test_a_model_that_does_not_fit_the_data_is_refused_with_its_own_reason(capsys):
    assert main.main(["--data", "digits", "--model", "torchvision:resnet18"]) == 2
    said = capsys.readouterr().err
    assert "does not take the 1×8×8 samples" in said and "channels" in said


UNFIT = {
    "idle": "parameter idle.weight does not affect the output",
    "synchronised": "torch's SyncBatchNorm works only on GPUs (give --batchnorm sync",
    "frozen": "has no parameters to train",
    "short": "has 3 outputs, but fake:9 has 10 classes",
}


@pytest.mark.parametrize("name", UNFIT)
def test_models_that_ddp_cant_train_are_refused(own, capsys, monkeypatch, name):
    be_rank(monkeypatch, "0", "2")
    assert main.main(f"--data fake:9 --batch-size 4 --model {own}:{name}".split()) == 2
    assert UNFIT[name] in capsys.readouterr().err


def test_wrong_flags_are_refused_without_importing_torch():
    code = "import sys; sys.modules['torch'] = None; from train.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--epochs", "0"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: argument --epochs")


def test_under_torchrun_only_rank_0_reports_wrong_flags_at_once(monkeypatch, capsys):
    waited: list[float] = []
    be_rank(monkeypatch, "1", "2")
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    assert main.main(["--epochs", "0"]) == 2
    assert waited == [launch.PATIENCE]  # within which torchrun ends it, when rank 0 has spoken and gone


@pytest.mark.parametrize("line", ["--batch-size 3", "--spawn 2"])
def test_a_batch_smaller_than_torchruns_ranks_and_spawn_under_torchrun_are_refused(monkeypatch, line):
    be_rank(monkeypatch, "0", "4")
    with pytest.raises(UsageFault, match=line.removesuffix(" 2")):
        command_line.parse(line.split())


@pytest.mark.parametrize("line", ["--spawn 2 --epochs 3", "--epochs 3 --spawn=2", "--epochs 3"])
def test_spawned_ranks_get_all_flags_but_spawn(line):
    assert command_line.without("--spawn", line.split()) == ["--epochs", "3"]
    assert command_line.without("--spawn", ["--out", "--spawned"]) == ["--out", "--spawned"]


def test_help_fits_into_80_columns_and_ends_in_examples_that_parse(here, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    (here / "runs" / "first").mkdir(parents=True)
    (here / "runs" / "first" / "config.toml").write_text("epochs = 3")
    for program in (evaluate.main, main.main):
        with pytest.raises(SystemExit) as left:
            program(["--help"])
        assert left.value.code == 0
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= 80
    examples = said.split("examples:\n")[1].splitlines()
    assert len(examples) == 5
    for example in examples:
        command_line.parse(example.split("train/main.py")[1].split())


def test_only_rank_0_prints_the_help(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        main.main(["--help"])
    assert capsys.readouterr().out == ""


# ---- files of settings ---------------------------------------------------------------------------------


tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


@pytest.fixture
def parsed(tmp_path: Path) -> Any:
    """Return a function: text of a file, arguments -> the configuration of both."""

    def parse(text: str, *arguments: str) -> TrainConfig:
        (tmp_path / "run.toml").write_text(text)
        return command_line.parse(["--config", str(tmp_path / "run.toml"), *arguments])

    return parse


def test_a_file_holds_what_the_command_line_would(parsed):
    text = """
        data = "fake:40"
        lr = 1e-3
        batch-size = 12
        rank-share = [2, 10]
        spawn = 2
        mean = [0.5, 0.25, 1]
        drop-last = true
        deterministic = true
        save-every = "20steps"
        max-time = 90
        tracker = ["wandb", "tensorboard"]
        every = ["3steps", "own.py:f"]
        resume = "auto"
        out = "x"
    """
    line = (
        "--data fake:40 --lr 1e-3 --batch-size 12 --rank-share 2,10 --spawn 2 --mean 0.5,0.25,1 --drop-last "
    )
    line += "--deterministic --save-every 20steps --max-time 90 --tracker wandb --tracker tensorboard "
    line += "--every 3steps own.py:f --resume auto --out x"
    found = parsed(text)
    assert found.changed(config=None) == command_line.parse(line.split())
    assert command_line.arguments_of(found) == command_line.arguments_of(command_line.parse(line.split()))


def test_flags_win_and_lists_are_not_added_up(parsed):
    text = 'epochs = 3\nseed = 5\nchange = ["lr"]\nresume = "x.pt"\nema = 0.5\n'
    found = parsed(text, "--epochs", "4", "--change", "warmup")
    assert tuple(found[name] for name in ("epochs", "seed", "change", "ema")) == (4, 5, ("warmup",), 0.5)


def test_what_is_false_is_left_out_and_an_empty_file_changes_nothing(parsed):
    found = parsed("drop-last = false\nzero = false\nresume = false\n")
    assert found.changed(config=None) == command_line.parse([]) == TrainConfig()
    assert parsed("# nothing\n").changed(config=None) == TrainConfig()


def test_an_optimizer_of_the_command_line_has_its_own_defaults(parsed):
    found = parsed('optimizer = "sgd"\nweight-decay = 0.5\n', "--optimizer", "adamw")
    assert tuple(found[name] for name in ("optimizer", "lr", "momentum", "weight_decay")) == (
        "adamw",
        1e-3,
        0.0,
        0.5,
    )


REFUSED_IN_A_FILE = {
    "batch_size = 3": ("batch_size: no such setting", "did you mean batch-size?"),
    "learning-rate = 3": ("learning-rate: no such setting", "did you mean lr?"),
    "zzzzqqqq = false": ("zzzzqqqq: no such setting", "lists the settings"),
    "epochs = 2\nseed = 1\nepochs = 3": ("line 3: epochs is given twice", "give it once"),
    "epochs = 0": ("--epochs: 0 is less than 1", ""),
    "epochs = 1.5": ("--epochs: '1.5' is not an integer", ""),
    "epochs = true": ("epochs: takes a value, not true", ""),
    "epochs = false": ("epochs: takes a value, not false", ""),
    "epochs = 1979-05-27": ("is no value of a flag", ""),
    "lr = nan": ("--lr: nan is out of range: it must be above 0", ""),
    "drop-last = 1": ("drop-last: is true or false, not 1", ""),
    'drop-last = "true"': ('drop-last: is true or false, not "true"', ""),
    'batchnorm = "none"': ("--batchnorm: invalid choice: 'none'", ""),
    "rank-share = []": ("--rank-share: '' is not an integer", ""),
    "rank-share = [[1], 2]": ("rank-share: [1] is no value of a flag", ""),
    'every = ["1", "a.py:f", "--lr=9"]': ("every: takes 2 values, not 3", ""),
    'every = ["1"]': ("every: takes 2 values, not 1", ""),
    "[optimizer]\nlr = 2": ("[optimizer]: a table, and no setting is one", "stand above all tables"),
    "[about.torch]\nx = 2\n[about.torch]": ("is not TOML", ""),
    'config = "other.toml"': ("config: belongs on the command line", ""),
    'like = "runs/a"': ("like: belongs on the command line", ""),
    "help = true": ("help: belongs on the command line", ""),
    "a = = 2": ("is not TOML: Invalid value (at line 1", ""),
    "x = " + "[" * 30000: ("is not TOML", ""),
    "x = " + "9" * 50000: ("is not TOML", ""),
    "#" * 70000: ("is longer than 64 KiB", ""),
}


@pytest.mark.parametrize("text", REFUSED_IN_A_FILE, ids=lambda text: text[:30])
def test_what_is_wrong_in_a_file_is_refused_with_its_name_and_a_way_out(parsed, text):
    with pytest.raises(UsageFault) as refused:
        parsed(text)
    message, hint = REFUSED_IN_A_FILE[text]
    assert "run.toml: " in refused.value.message and message in refused.value.message
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize("kind", ["missing", "a folder", "a pipe", "no text"])
def test_what_is_no_file_of_settings_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "run.toml"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "no text":
        path.write_bytes(b"\xff\xfe")
    with pytest.raises((Unreadable, UsageFault), match=r"run\.toml"):
        command_line.parse(["--config", str(path)])


@pytest.mark.parametrize(("line", "said"), [
    ("--config a.toml --like b", "--config and --like: settings come from one file"),
    ("--like no/such/run", "no/such/run/config.toml: no such file"),
    ("--config=", "--config: names nothing"),
])  # fmt: skip
def test_flags_about_files_that_make_no_sense_are_one_line(here, capsys, line, said):
    (here / "a.toml").touch()
    assert main.main(line.split()) in (2, 3)
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_what_is_printed_gives_the_same_configuration(tmp_path, monkeypatch, capsys):
    line = "--optimizer adamw --lr 0.5 --spawn 2 --rank-share 2,10 --deterministic --warmup 3steps"
    line += " --every 2 a.py:f --tracker wandb --mean=-0.5 --out x --best loss"
    assert main.main([*line.split(), "--preview", "settings"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    again = command_line.parse(["--config", str(tmp_path / "run.toml")])
    assert again.changed(config=None) == command_line.parse(line.split())


def test_what_is_printed_shows_every_setting_and_comments_the_defaults(capsys):
    assert main.main(["--preview", "settings", "--lr", "0.5"]) == 0
    said = capsys.readouterr().out
    assert tomllib.loads(said) == {"lr": 0.5}
    fields = [setting_of(field) for field in flags_in(TrainConfig)]
    for name in set(fields) - {*command_line.SOURCES, "preview", "lr"}:
        assert f"\n# {name.replace('_', '-')}" in said


def test_printing_settings_imports_no_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main.main(["--preview", "settings"]) == 0


def test_only_rank_0_prints_settings(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main.main(["--preview", "settings"]) == 0
    assert capsys.readouterr().out.strip() == ""


def test_ranks_that_a_launcher_has_started_leave_out_the_files_spawn(parsed, monkeypatch):
    assert parsed("spawn = 2").ranks.spawn == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parsed("spawn = 2").ranks.spawn is None
    with pytest.raises(UsageFault, match="--spawn starts ranks, but"):
        parsed("", "--spawn", "2")


# ---- config.toml of a run, and --like ------------------------------------------------------------------

DATA = """
import torch
from torch.utils.data import TensorDataset
SIZE = 12

def data():
    torch.manual_seed(0)
    return (TensorDataset(torch.randn(SIZE, 3, 8, 8), torch.arange(SIZE) % 3),) * 2
"""


def trained(capsys: Any, *arguments: str) -> str:
    assert main.main([*arguments]) == 0
    return capsys.readouterr().out


def test_a_run_is_repeated_and_what_differs_is_named(here, capsys):
    (here / "own.py").write_text(DATA)
    given = "--data own.py:data --epochs 1 --batch-size 4 --save-every 2steps --lr 0.05"
    trained(capsys, *given.split(), "--out", "a", "--stop-at", "3")
    about = tomllib.loads(Path("a/config.toml").read_text())
    written = {"data": "own.py:data", "epochs": 1, "batch-size": 4, "save-every": "2steps", "lr": 0.05}
    assert {name: value for name, value in about.items() if name != "about"} == written
    assert about["about"]["ranks"] == 1 and list(about["about"]["code"]) == ["own.py"]

    assert "like    a: nothing differs\n" in trained(capsys, "--like", "a", "--out", "b")
    config = command_line.of_run("b")[0]
    assert config == command_line.parse(given.split()).changed(out=None)
    assert config.saving.save_every == Every(2, "steps")

    # Of another length: Python takes an old .pyc of the same second and size for true.
    (here / "own.py").write_text(DATA.replace("12", "4 * 4"))
    said = trained(capsys, "--like", "a", "--out", "c", "--lr", "0.1", "--clip-norm", "1")
    line = next(line for line in said.splitlines() if line.startswith("like"))
    assert line.startswith("like    a, but ")
    for difference in (
        "lr 0.05 -> 0.1",
        "clip-norm none -> 1.0",
        "samples own.py:data 12/12 -> own.py:data 16/16",
    ):
        assert difference in line
    assert "own.py is another now" in line and "epochs" not in line


def test_a_run_goes_on_with_the_settings_in_its_folder(here, capsys):
    trained(capsys, *TINY, "--out", "a", "--save-every", "1steps", "--stop-at", "2")
    said = trained(capsys, "--like", "a", "--out", "a", "--resume")
    assert (
        "like    a: nothing differs\n" in said and "continues from a/last.pt at epoch 1, step 2 of 3" in said
    )


def test_a_file_of_the_users_is_not_overwritten(here, capsys):
    (here / "a").mkdir()
    for make in (lambda path: path.write_text("epochs = 1\n"), lambda path: path.symlink_to("/etc/hosts")):
        path = here / "a" / "config.toml"
        make(path)
        for force in ([], ["--force"]):
            assert main.main([*TINY, "--config", "a/config.toml", "--out", "a", *force]) in (2, 3)
        assert "a/config.toml" in capsys.readouterr().err
        assert sorted(os.listdir("a")) == ["config.toml"]
        path.unlink()


def test_a_disk_that_refuses_the_file_ends_no_run(here, monkeypatch, capsys):

    def refuse(*_: Any) -> Any:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("train.run.folder.replacing", refuse)
    assert main.main([*TINY, "--out", "a"]) == 0
    why = "a/config.toml: could not be written: no space left on device"
    assert f"warning: {why}; training goes on\n" in capsys.readouterr().err


def test_the_page_on_a_resume_names_every_setting_that_may_change():
    page = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    _, _, listed = page.partition("These may be changed")
    listed, _, _ = listed.partition("The next step")
    assert sorted(re.findall(r"`([a-z][a-z-]*)`", listed)) == sorted(n.replace("_", "-") for n in CHANGEABLE)


VALUES = {
    "--shard-blocks": "Block", "--cooldown": "1", "--init-allow-missing": "x", "--change": "lr",
    "--virtual-ranks": "2",
    "--no-decay": "x --weight-decay 0", "--rank-share": "1,1", "--every": "2 a.py:f", "--prove-every": "2",
    "--keep-deltas": "2", "--config": "a.toml", "--like": "b", "--resume": "auto --out x",
}  # fmt: skip


def named_on_the_page(column: str) -> list[tuple[str, str]]:
    """Return the pairs of flags that a table of the page names; without a stream's, which need data."""
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| flag \| {column} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.M)[0].splitlines()
    cells = [[re.findall(r"`(--[^`]+)`", cell) for cell in row.split("|")[1:3]] for row in rows]
    return [(one, other) for ones, others in cells for one in ones for other in others]


def typed(flag: str) -> str:
    return f"{flag} {VALUES.get(flag, '')}" if " " not in flag else flag


@pytest.mark.parametrize(("one", "other"), named_on_the_page("not with"))
def test_what_the_page_says_does_not_go_together_is_refused(here, one, other):
    (here / "a.toml").touch()
    with pytest.raises(UsageFault) as refused:
        command_line.parse(f"{typed(one)} {typed(other)} --spawn 2".split())
    assert one.split()[0] in refused.value.message and other.split()[0] in refused.value.message


@pytest.mark.parametrize(("one", "other"), [
    pair for pair in named_on_the_page("needs") if pair[0] not in ("--resize",)
])  # fmt: skip
def test_what_the_page_says_is_needed_is_asked_for(one, other):
    given = VALUES.get(one, "").replace("--shard", "")
    with pytest.raises(UsageFault) as refused:
        command_line.parse(f"{one} {given} --spawn 2".split())
    said = f"{refused.value.message} {refused.value.hint}"
    assert one in said and other.split()[0] in said
