"""The trainer's flags: how they are parsed, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckpttool.errors import UsageFault
from tests.support.running import ROOT
from train import evaluate
from train.config import command_line, flags
from train.config.flags import Every
from train.launch import program as launch
from train.main import main


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
    "--no-set-epoch --sampler torch --save-every 3steps",
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


def test_a_rank_batch_stands_for_the_batch_size():
    assert command_line.parse(["--spawn", "2", "--rank-batch", "2,10"]).batch.size == 12
    assert command_line.parse(["--spawn", "2", "--rank-batch", "2,10", "--batch-size", "12"]).batch.size == 12


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
    "--no-set-epoch": ["--set-epoch"],
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
        *(f"--spawn 2 --rank-share 1,1 {other}" for other in ("--rank-batch 2,2", "--sampler torch")),
    ],
    "--rank-batch": ["--spawn 2 --rank-batch 2,10 --batch-size 16", "--spawn 2 --rank-batch 2,0"],
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
    "--unset": ["--unset lr"],
}


@pytest.mark.parametrize(("line", "flag"), [(line, flag) for flag, each in WRONG.items() for line in each])
def test_wrong_flags_are_one_line_and_exit_code_2_before_any_process_group(
    line, flag, capsys, monkeypatch, tmp_path
):
    import torch
    import torch.distributed as dist

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert flag in said.err
    assert list(tmp_path.iterdir()) == []


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
    assert main(f"--model {own}:normalised --data fake:9 --batch-size {size} {rest}".split()) == 2
    said = capsys.readouterr().err
    assert f"--batch-size {size}" in said and "BatchNorm" in said
    assert ("--drop-last" in said) == (not rest)
    assert ("--accumulate" in said) == bool(rest)


def test_a_model_that_does_not_fit_the_data_is_refused_with_its_own_reason(capsys):
    assert main(["--data", "digits", "--model", "torchvision:resnet18"]) == 2
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
    assert main(f"--data fake:9 --batch-size 4 --model {own}:{name}".split()) == 2
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
    assert main(["--epochs", "0"]) == 2
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


def test_help_fits_into_80_columns_and_ends_in_examples_that_parse(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.toml").write_text("epochs = 3")
    for program in (evaluate.main, main):
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
        main(["--help"])
    assert capsys.readouterr().out == ""
