"""inspect of a Lightning file and of a whole pickled model: what people look for stands first, and fits."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.analysis.summary import summarize
from ckpttool.cli.console import columns
from ckpttool.cli.inspect_page import page

MONITOR = (
    "ModelCheckpoint{'monitor': 'val_loss', 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 1}"
)


@pytest.fixture
def lightning(tmp_path: Path) -> Path:
    """A file as Lightning 2 writes it, cut to the kinds of entries that it has."""
    net = torch.nn.Linear(2, 2)
    progress = {"total": {"ready": 8, "completed": 8}, "current": {"ready": 4, "completed": 4}}
    torch.save(
        {
            "epoch": 2,
            "global_step": 8,
            "pytorch-lightning_version": "2.6.0",
            "state_dict": {f"backbone.{k}": v for k, v in net.state_dict().items()},
            "loops": {
                loop: {f"p{i}": deepcopy(progress) for i in range(6)} for loop in ("fit_loop", "test_loop")
            },
            "callbacks": {
                "EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}": {"wait_count": 0, "patience": 3},
                MONITOR: {"best_model_path": "/a/long/path/to/the/best/of/all/checkpoints.ckpt"},
                "Sampler": {"seed": 1},
            },
            "optimizer_states": [torch.optim.SGD(net.parameters(), 0.1).state_dict()],
            "hparams_name": "kwargs",
            "hyper_parameters": {"lr": 0.1, "classes": ["cat", "dog"], "augment": None},
        },
        tmp_path / "lit.ckpt",
    )
    return tmp_path / "lit.ckpt"


def other_contents(text: str) -> list[tuple[str, str]]:
    lines = text.partition("other contents\n")[2].splitlines()
    return [(name, value.strip()) for name, _, value in (line.strip().partition("  ") for line in lines)]


def test_hyper_parameters_stand_first(lightning: Path, cli: Any) -> None:
    rows = other_contents(cli("inspect", lightning).out)
    assert rows[:3] == [
        ("hyper_parameters.lr", "0.1"),
        ("hyper_parameters.classes", "['cat', 'dog']"),
        ("hyper_parameters.augment", "None"),
    ]


def test_loops_and_callbacks_are_a_line_each(lightning: Path, cli: Any) -> None:
    rows = other_contents(cli("inspect", lightning).out)
    assert rows[3:] == [
        ("epoch", "2"),
        ("global_step", "8"),
        ("pytorch-lightning_version", "2.6.0"),
        ("loops", "48 values of fit_loop, test_loop"),
        ("callbacks", "4 values of EarlyStopping, ModelCheckpoint, Sampler"),
        ("hparams_name", "kwargs"),
    ]


def test_verbose_and_json_hold_every_value(lightning: Path, cli: Any) -> None:
    everything = cli("inspect", lightning, "-v").out
    assert (
        "loops.fit_loop.p5.current.ready" in everything
        and f"callbacks.{MONITOR}.best_model_path" in everything
    )
    names = [row["name"] for row in cli("inspect", lightning, "--json").json["other"]]
    assert f"callbacks.{MONITOR}.best_model_path" in names and "loops.test_loop.p0.total.ready" in names


def test_a_dict_called_loops_in_another_file_is_shown(cli: Any, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "loops": {"inner": 3}}, tmp_path / "in.pt")
    assert ("loops.inner", "3") in other_contents(cli("inspect", tmp_path / "in.pt").out)


@pytest.mark.parametrize("width", [80, 120])
def test_names_are_cut_in_their_middle_at_the_terminal_s_width(lightning: Path, width: int) -> None:
    with ckpttool.open(lightning) as checkpoint:
        lines = list(page(summarize(checkpoint), None, width, 40, everything=True))
    assert max(map(columns, lines[1:])) <= width
    (line,) = (line for line in lines if "best_model_path" in line)
    assert (
        line.startswith("  callbacks.ModelChe") and "….best_" not in line and "best_model_path  /a/" in line
    )
    assert columns(line) > width - 8
    assert any(line.split() == ["hyper_parameters.lr", "0.1"] for line in lines)


def test_short_values_leave_names_the_width(tmp_path: Path) -> None:
    name = "a_rather_long_name_of_a_setting_that_somebody_chose_with_great_care"
    torch.save({"model": {"w": torch.ones(1)}, name: 12}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        assert f"  {name}  12" in page(summarize(checkpoint), None, 80, 40, everything=False)


class Net(torch.nn.Sequential):
    """A model with settings of its own beside its modules."""


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    net = Net(torch.nn.Linear(2, 2))
    net.class_names, net.stride, net.note = {0: "cat", 1: "dog"}, torch.ones(3), None
    torch.save({"model": net, "epoch": 3}, tmp_path / "whole.pt")
    return tmp_path / "whole.pt"


def test_attributes_of_a_whole_pickled_model_are_shown(whole: Path, cli: Any) -> None:
    rows = other_contents(cli("inspect", whole).out)
    assert ("model.class_names.0", "cat") in rows and ("model.class_names.1", "dog") in rows
    assert ("epoch", "3") in rows
    names = [name for name, _ in rows]
    assert not any("hooks" in name or "_parameters" in name or "training" in name for name in names)
    assert not any(name.startswith("model.0") for name in names)


@pytest.mark.parametrize("command", ["convert", "slim", "strip-prefix"])
def test_attributes_of_a_whole_pickled_model_are_named_as_left_out(
    command: str, whole: Path, cli: Any, tmp_path: Path
) -> None:
    more = ["--prefix", "0."] if command == "strip-prefix" else []
    ran = cli(command, whole, tmp_path / "out.safetensors", *more, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["left_out"] == ["model.class_names", "model.stride", "model.note", "epoch"]
    said = cli(command, whole, tmp_path / "again.safetensors", *more).err
    assert "model.class_names" in said


def test_a_pt_output_keeps_the_whole_model(whole: Path, cli: Any, tmp_path: Path) -> None:
    assert cli("convert", whole, tmp_path / "out.pt", "--json").json["left_out"] == []
