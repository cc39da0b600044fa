"""Files of settings: the flags' names and values, what is refused, and what a run writes of its own."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import Unreadable, UsageFault
from tests.ranks.programs import TINY
from train import main
from train.config import command_line
from train.config.flags import Every, flags_in, setting_of
from train.config.sections import TrainConfig

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
        rank-batch = [2, 10]
        spawn = 2
        mean = [0.5, 0.25, 1]
        drop-last = true
        no-set-epoch = true
        save-every = "20steps"
        max-time = 90
        tracker = ["wandb", "tensorboard"]
        every = ["3steps", "own.py:f"]
        resume = "auto"
        out = "x"
    """
    line = (
        "--data fake:40 --lr 1e-3 --batch-size 12 --rank-batch 2,10 --spawn 2 --mean 0.5,0.25,1 --drop-last "
    )
    line += "--no-set-epoch --save-every 20steps --max-time 90 --tracker wandb --tracker tensorboard "
    line += "--every 3steps own.py:f --resume auto --out x"
    found = parsed(text)
    assert found.changed(config=None) == command_line.parse(line.split())
    assert command_line.arguments_of(found) == command_line.arguments_of(command_line.parse(line.split()))


def test_flags_win_and_lists_are_not_added_up(parsed):
    text = 'epochs = 3\nseed = 5\nchange = ["lr"]\nresume = "x.pt"\nema = 0.5\n'
    found = parsed(text, "--epochs", "4", "--change", "warmup")
    assert tuple(found[name] for name in ("epochs", "seed", "change", "ema")) == (4, 5, ("warmup",), 0.5)


def test_unset_leaves_a_setting_of_the_file_out(parsed):
    found = parsed("ema = 0.5\ndrop-last = true\nlr = 0.5\n", "--unset", "ema", "--unset", "drop-last")
    assert (found.optimizer.ema, found.batch.drop_last, found.optimizer.lr) == (None, False, 0.5)
    for name in ("epochs", "frobnicate"):
        with pytest.raises(UsageFault, match=f"--unset {name}: .*run.toml does not set it"):
            parsed("ema = 0.5", "--unset", name)


def test_what_is_false_is_left_out_and_an_empty_file_changes_nothing(parsed):
    found = parsed("drop-last = false\nno-set-epoch = false\nresume = false\n")
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


REFUSED = {
    "batch_size = 3": ("batch_size: no such setting", "did you mean batch-size?"),
    "learning-rate = 3": ("learning-rate: no such setting", "did you mean lr?"),
    "set-epoch = false": ("set-epoch: no such setting", "did you mean no-set-epoch?"),
    "zzzzqqqq = false": ("zzzzqqqq: no such setting", "lists the settings"),
    "epochs = 2\nseed = 1\nepochs = 3": ("line 3: epochs is given twice", "give it once"),
    "epochs = 0": ("--epochs: 0 is less than 1", ""),
    "epochs = 1.5": ("--epochs: '1.5' is not an integer", ""),
    "epochs = true": ("epochs: takes a value, not true", ""),
    "epochs = false": ("epochs: takes a value, not false", ""),
    "epochs = 1979-05-27": ("is no value of a flag", ""),
    "lr = nan": ("--lr: nan is out of range", ""),
    "drop-last = 1": ("drop-last: is true or false, not 1", ""),
    'drop-last = "true"': ('drop-last: is true or false, not "true"', ""),
    'batchnorm = "none"': ("--batchnorm: invalid choice: 'none'", ""),
    "rank-batch = []": ("--rank-batch: '' is not an integer", ""),
    "rank-batch = [[1], 2]": ("rank-batch: [1] is no value of a flag", ""),
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


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:30])
def test_what_is_wrong_in_a_file_is_refused_with_its_name_and_a_way_out(parsed, text):
    with pytest.raises(UsageFault) as refused:
        parsed(text)
    message, hint = REFUSED[text]
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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--config a.toml --like b", "--config and --like: settings come from one file"),
        ("--unset lr", "--unset: needs --config or --like"),
        ("--like no/such/run", "no/such/run/config.toml: no such file"),
        ("--config=", "--config: names nothing"),
    ],
)
def test_flags_about_files_that_make_no_sense_are_one_line(tmp_path, monkeypatch, capsys, line, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").touch()
    assert main.main(line.split()) in (2, 3)
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_what_is_printed_gives_the_same_configuration(tmp_path, monkeypatch, capsys):
    line = "--optimizer adamw --lr 0.5 --spawn 2 --rank-batch 2,10 --no-set-epoch --warmup 3steps"
    line += " --every 2 a.py:f --tracker wandb --mean=-0.5 --out x --best loss"
    assert main.main([*line.split(), "--print-config"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    again = command_line.parse(["--config", str(tmp_path / "run.toml")])
    assert again.changed(config=None) == command_line.parse(line.split())


def test_what_is_printed_shows_every_setting_and_comments_the_defaults(capsys):
    assert main.main(["--print-config", "--lr", "0.5"]) == 0
    said = capsys.readouterr().out
    assert tomllib.loads(said) == {"lr": 0.5}
    fields = [setting_of(field) for field in flags_in(TrainConfig)]
    for name in set(fields) - {*command_line.SOURCES, "set_epoch", "lr"}:
        assert f"\n# {name.replace('_', '-')}" in said


def test_printing_settings_imports_no_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main.main(["--print-config"]) == 0


def test_only_rank_0_prints_settings(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main.main(["--print-config"]) == 0
    assert capsys.readouterr().out.strip() == ""


def test_ranks_that_a_launcher_has_started_leave_out_the_files_spawn(parsed, monkeypatch):
    assert parsed("spawn = 2").ranks.spawn == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parsed("spawn = 2").ranks.spawn is None
    with pytest.raises(UsageFault, match="--spawn starts ranks, but"):
        parsed("", "--spawn", "2")


# ---- config.toml of a run, and --like ------------------------------------------------------------------

OWN = """
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


def test_a_run_is_repeated_and_what_differs_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
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
    (tmp_path / "own.py").write_text(OWN.replace("12", "4 * 4"))
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


def test_a_run_goes_on_with_the_settings_in_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained(capsys, *TINY, "--out", "a", "--save-every", "1steps", "--stop-at", "2")
    said = trained(capsys, "--like", "a", "--out", "a", "--resume")
    assert (
        "like    a: nothing differs\n" in said and "continues from a/last.pt at epoch 1, step 2 of 3" in said
    )


def test_a_file_of_the_users_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for make in (lambda path: path.write_text("epochs = 1\n"), lambda path: path.symlink_to("/etc/hosts")):
        path = tmp_path / "a" / "config.toml"
        make(path)
        for force in ([], ["--force"]):
            assert main.main([*TINY, "--config", "a/config.toml", "--out", "a", *force]) in (2, 3)
        assert "a/config.toml" in capsys.readouterr().err
        assert sorted(os.listdir("a")) == ["config.toml"]
        path.unlink()


def test_a_disk_that_refuses_the_file_ends_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def refuse(*_: Any) -> Any:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("train.run.folder.replacing", refuse)
    assert main.main([*TINY, "--out", "a"]) == 0
    why = "a/config.toml: could not be written: no space left on device"
    assert f"warning: {why}; training goes on\n" in capsys.readouterr().err
