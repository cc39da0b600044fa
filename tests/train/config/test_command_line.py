"""Flags that are mistyped: what is suggested, in one line and before anything starts."""

from __future__ import annotations

import pytest

from ckpttool.errors import UsageFault
from train import evaluate
from train.config import command_line


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--batchsize", "--batch-size"),
        ("--batch_size", "--batch-size"),
        ("--Batch-Size", "--batch-size"),
        ("--batch-siez", "--batch-size"),
        ("--batchsize=64", "--batch-size"),
        ("--epoch", "--epochs"),
        ("--weight", "--weight-decay"),
        ("--label-smooth", "--label-smoothing"),
        ("--resum", "--resume"),
        ("--learning-rate", "--lr"),
        ("--learning_rate", "--lr"),
        ("--num-workers", "--workers"),
        ("--set-epoch", "--no-set-epoch"),
    ],
)
def test_a_mistyped_flag_is_refused_with_the_one_that_was_meant(typed, meant):
    with pytest.raises(UsageFault, match=rf"^{typed.partition('=')[0]}: no such flag\b") as refused:
        command_line.parse([typed, "64"])
    assert refused.value.hint == f"did you mean {meant}?"


@pytest.mark.parametrize("typed", ["--frobnicate", "--x", "--"])
def test_nothing_is_suggested_for_what_resembles_no_flag(typed):
    assert command_line.closest(typed, ["--batch-size", "--epochs", "--lr"]) is None


def test_a_value_too_many_is_named():
    with pytest.raises(UsageFault, match=r"^3: belongs to no flag\b") as refused:
        command_line.parse(["--drop-last", "3"])
    assert refused.value.hint == "train/main.py --help lists the flags"


def test_the_flag_is_named_where_a_value_stands_before_it():
    with pytest.raises(UsageFault, match=r"^--batchsize: no such flag\b"):
        command_line.parse(["3", "--batchsize", "64"])


def test_other_programs_suggest_their_own_flags():
    with pytest.raises(UsageFault) as refused:
        evaluate.parse(["a.pt", "--model", "simple-cnn", "--thread", "2"])
    assert refused.value.hint == "did you mean --threads?"


def test_every_name_of_other_trainers_stands_for_a_flag_that_exists():
    known = command_line.train_parser()._option_string_actions
    assert set(command_line.ELSEWHERE.values()) <= set(known) and not set(command_line.ELSEWHERE) & set(known)


@pytest.mark.parametrize(
    "typed",
    [
        ["--mean=-0.5,0.25,1"],
        ["--rank-share", "1,3", "--batch-size", "8", "--spawn", "2"],
        ["--no-set-epoch", "--sampler", "torch", "--save-every", "3steps"],
        ["--init-allow-missing", "head.*", "--init-allow-missing", "a b", "--init", "x.pt"],
        ["--optimizer", "adamw", "--lr", "1e-05", "--max-time", "90s"],
    ],
)
def test_a_configuration_gives_the_command_line_that_gives_it(typed):
    config = command_line.parse(typed)
    assert command_line.parse(command_line.arguments_of(config)) == config
