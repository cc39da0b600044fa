"""Pages and tables in a terminal: the important stands first, and nothing is wider than asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import clip

import ckpttool
from ckpttool.core.cli.console import columns, cut, cut_front, cut_middle, left, right, table, wrapped
from ckpttool.inspecting.command import stats_table, tensor_lines
from ckpttool.inspecting.page import page
from ckpttool.inspecting.summary import summarize
from ckpttool.inspecting.tables import measure, tensor_rows
from tests.support.comparing import opened

# ---- Pages and tables in a terminal: what people look for stands first, is cut in its middle and fits -


def page_of(checkpoint: ckpttool.Checkpoint, width: int = 80, everything: bool = False) -> list[str]:
    return list(page(summarize(checkpoint), None, width, 40, everything=everything))


def measured(checkpoint: ckpttool.Checkpoint) -> Callable[[int], list[str]]:
    """Return a function from a width to the table of a checkpoint's figures."""
    stats = {name: measure(name, tensor) for name, tensor in checkpoint.tensors()}
    return lambda width: list(stats_table(tensor_rows(checkpoint), stats, width))


@pytest.fixture(params=["long", "wide"])
def checkpoint(request: pytest.FixtureRequest, here: Path) -> ckpttool.Checkpoint:
    name = "a_very_long_name_of_a_module." * 8 if request.param == "long" else f"{'層重み' * 4}."
    state = {f"{name}{i}.weight": torch.ones(4, i + 1) for i in range(3)} | {"w": torch.ones(3)}
    return opened({"model": state, name + "epoch": 3, "x": 4}, here)


@pytest.mark.parametrize("width", [60, 80])
def test_a_page_keeps_to_the_terminal_whatever_the_names(checkpoint: ckpttool.Checkpoint, width: int) -> None:
    lines = page_of(checkpoint, width)[1:]  # the path can be copied
    assert max(map(columns, lines)) <= width
    (head,) = (line for line in lines if line.startswith("module"))
    place = head.index("parameters") + len("parameters")
    rows = lines[lines.index(head) + 1 : lines.index("", lines.index(head))]
    assert len(rows) >= 4
    for row in rows:
        until = clip(row, 0, place)
        assert columns(until) == place and until[-1].isdigit()  # the figures stand below their head


@pytest.mark.parametrize("width", [60, 80])
def test_tables_show_the_end_of_a_name_and_all_figures(checkpoint: ckpttool.Checkpoint, width: int) -> None:
    lines = list(tensor_lines(tensor_rows(checkpoint), width))
    assert max(map(columns, lines)) <= width
    assert all(line.split()[1] == "float32" for line in lines)
    assert lines[2].split()[0].endswith("2.weight") and lines[2].split()[2:] == ["[4,3]", "48"]
    figures = measured(checkpoint)(80)
    assert max(map(columns, figures)) <= 80
    rows = [line for line in figures if not line.startswith("without ")]
    assert [line.split()[1] for line in rows] == ["dtype", *["float32"] * 4]
    assert all("weight" in line.split()[0] for line in figures[1:4])


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_columns_that_do_not_fit_are_named(width: int, here: Path) -> None:
    lines = measured(opened({"blocks.0.attention.query.weight": torch.rand(1200, 3) * 1e-9}, here))(width)
    gone = [name for name in ("dtype", "shape", "mean", "std") if name not in lines[0]]
    note = " ".join(lines[2:])
    assert note == (
        f"without {', '.join(gone)}, for which the terminal is too narrow; | cat has them" if gone else ""
    )
    assert all(len(line) <= width for line in lines) == bool(gone) or width == 200
    if width >= 50:
        assert lines[1].split()[-2:][0][-1].isdigit() and "…" not in lines[1][16:]


@pytest.mark.parametrize(("width", "shown"), [(40, 4), (80, 5), (120, 5)])
def test_a_long_second_name_leaves_room_for_the_first_ones(width: int, shown: int, here: Path) -> None:
    state = {f"model.layers.{i}.attention.weight": torch.ones(3, 4) for i in range(2)}
    state["head.weight"] = state["model.layers.0.attention.weight"]
    lines = list(tensor_lines(tensor_rows(opened(state, here)), width))
    assert max(map(columns, lines[:3])) <= width
    assert lines[1].split()[1:3] == ["float32", "[3,4]"]
    assert len(lines[2].split()) == shown
    assert (len(lines) > 3) == (width == 40)
    if width >= 80:
        assert lines[1].split()[0] == "model.layers.1.attention.weight"
        assert lines[2].split()[4].startswith("model.layers.0")
    else:
        assert " ".join(lines[3:]).startswith("without shared with, ")


def test_a_narrow_terminal_shows_modules_with_their_figures(here: Path) -> None:
    names = ["embedding.weight", "a_block_with_a_name.attention.weight", "a_block_with_a_name.norm.weight"]
    lines = page_of(opened({name: torch.ones(1200, 34) for name in names}, here), 40)
    place = next(i for i, line in enumerate(lines) if line.startswith("module"))
    assert lines[place].split() == ["module", "parameters", "bytes"]
    assert [re.split("  +", line.strip())[-2:] for line in lines[place + 1 : place + 3]] == [
        ["122,400", "490 kB"],
        ["40,800", "163 kB"],
    ]
    assert max(map(columns, lines[1:])) <= 40


def test_deviations_and_means_give_way_before_names_and_what_is_not_finite(here: Path) -> None:
    names = [f"model.layers.{i}.self_attention.weight" for i in range(3)]
    figures = measured(opened(dict.fromkeys(names, torch.tensor([0.123456, 7.0, float("nan")])), here))
    heads = [figures(width)[0].split() for width in (100, 84, 80)]
    assert [set(head) & {"mean", "std"} for head in heads] == [{"mean", "std"}, {"mean"}, set()]
    assert all(head[-2:] == ["not", "finite"] for head in heads)
    lines = figures(80)
    assert [line.split()[0] for line in lines[1:-1]] == names
    assert lines[-1].startswith("without mean, std, ")


def test_names_are_cut_in_their_middle_before_a_shape_is(here: Path) -> None:
    names = [f"block.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
    names += ["a_table_of_relative_positions.with_a_long_name"]
    lines = page_of(opened(dict.fromkeys(names, torch.ones(12, 34)), here), 76)
    assert any(line.endswith("weight … running_var 12×34") for line in lines)
    assert any(line.startswith("  a_table_of") and line.endswith(" with_a_long_name 12×34") for line in lines)


def test_short_values_leave_names_the_width(here: Path) -> None:
    name = "a_rather_long_name_of_a_setting_that_somebody_chose_with_great_care"
    assert f"  {name}  12" in page_of(opened({"model": {"w": torch.ones(1)}, name: 12}, here))


def test_no_tensors_are_no_lines() -> None:
    assert list(tensor_lines([], 80)) == list(tensor_lines([], None)) == []


# A file of Lightning.

MONITOR = (
    "ModelCheckpoint{'monitor': 'val_loss', 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 1}"
)


@pytest.fixture
def lightning(here: Path) -> ckpttool.Checkpoint:
    """A file as Lightning 2 writes it, cut to the kinds of entries that it has."""
    net = torch.nn.Linear(2, 2)
    progress = {"total": {"ready": 8, "completed": 8}, "current": {"ready": 4, "completed": 4}}
    loops = {f"{loop}_loop": {f"p{i}": deepcopy(progress) for i in range(6)} for loop in ("fit", "test")}
    callbacks = {
        "EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}": {"wait_count": 0, "patience": 3},
        MONITOR: {"best_model_path": "/a/long/path/to/the/best/of/all/checkpoints.ckpt"},
        "Sampler": {"seed": 1},
    }
    tree = {"epoch": 2, "global_step": 8, "pytorch-lightning_version": "2.6.0"}
    tree |= {"state_dict": {f"backbone.{k}": v for k, v in net.state_dict().items()}}
    tree |= {"loops": loops, "callbacks": callbacks, "hparams_name": "kwargs"}
    tree |= {"optimizer_states": [torch.optim.SGD(net.parameters(), 0.1).state_dict()]}
    return opened(tree | {"hyper_parameters": {"lr": 0.1, "classes": ["cat", "dog"], "augment": None}}, here)


def other_contents(text: str) -> list[tuple[str, str]]:
    lines = text.partition("other contents\n")[2].splitlines()
    return [(name, value.strip()) for name, _, value in (line.strip().partition("  ") for line in lines)]


@pytest.mark.usefixtures("lightning")
def test_hyper_parameters_stand_first_and_loops_and_callbacks_are_a_line_each(cli: Any) -> None:
    assert other_contents(cli("inspect in.pt").out) == [
        ("hyper_parameters.lr", "0.1"),
        ("hyper_parameters.classes", "['cat', 'dog']"),
        ("hyper_parameters.augment", "None"),
        ("epoch", "2"),
        ("global_step", "8"),
        ("pytorch-lightning_version", "2.6.0"),
        ("loops", "48 values of fit_loop, test_loop"),
        ("callbacks", "4 values of EarlyStopping, ModelCheckpoint, Sampler"),
        ("hparams_name", "kwargs"),
    ]
    everything = cli("inspect in.pt -v").out
    assert "loops.fit_loop.p5.current.ready" in everything
    assert f"callbacks.{MONITOR}.best_model_path" in everything
    names = [row["name"] for row in cli("inspect in.pt --json").json["other"]]
    assert f"callbacks.{MONITOR}.best_model_path" in names and "loops.test_loop.p0.total.ready" in names


def test_a_dict_called_loops_in_another_file_is_shown(cli: Any) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "loops": {"inner": 3}}, "in.pt")
    assert ("loops.inner", "3") in other_contents(cli("inspect in.pt").out)


@pytest.mark.parametrize("width", [80, 120])
def test_names_are_cut_in_their_middle_at_the_terminal_s_width(
    lightning: ckpttool.Checkpoint, width: int
) -> None:
    lines = page_of(lightning, width, everything=True)
    assert max(map(columns, lines[1:])) <= width
    (line,) = (line for line in lines if "best_model_path" in line)
    assert line.startswith("  callbacks.ModelChe")
    assert "….best_" not in line and "best_model_path  /a/" in line
    assert columns(line) > width - 8
    assert any(line.split() == ["hyper_parameters.lr", "0.1"] for line in lines)


# A whole pickled model.


class Net(torch.nn.Sequential):
    """A model with settings of its own beside its modules."""


@pytest.fixture
def whole(here: Path) -> None:
    net = Net(torch.nn.Linear(2, 2))
    net.class_names, net.stride, net.note = {0: "cat", 1: "dog"}, torch.ones(3), None
    torch.save({"model": net, "epoch": 3}, "whole.pt")


@pytest.mark.usefixtures("whole")
def test_attributes_of_a_whole_pickled_model_are_shown(cli: Any) -> None:
    rows = other_contents(cli("inspect whole.pt").out)
    assert ("model.class_names.0", "cat") in rows and ("model.class_names.1", "dog") in rows
    assert ("epoch", "3") in rows
    names = [name for name, _ in rows]
    assert not any("hooks" in name or "_parameters" in name or "training" in name for name in names)
    assert not any(name.startswith("model.0") for name in names)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("command", ["convert", "slim", "strip-prefix --prefix 0."])
def test_attributes_of_a_whole_pickled_model_are_named_as_left_out(command: str, cli: Any) -> None:
    ran = cli(f"{command} whole.pt out.safetensors --json")
    assert ran.code == 0, ran.err
    assert ran.json["left_out"] == ["model.class_names", "model.stride", "model.note", "epoch"]
    assert "model.class_names" in cli(f"{command} whole.pt again.safetensors").err
    assert cli("convert whole.pt out.pt --json").json["left_out"] == []


@pytest.mark.parametrize("width", [40, 80])
def test_modules_that_are_alike_are_counted_and_contents_that_do_not_fit_are_named(
    width: int, here: Path
) -> None:
    names = [f"encoder.layers.{i}.attention" for i in range(3)]
    names = [f"{name}.{part}.weight" for name in names for part in ("query", "key")]
    state = {name: torch.ones(1200, 34) for name in [*names, "head.weight"]}
    lines = page_of(opened(state, here), width)
    assert any(("×3" if width == 40 else "(3 identical)") in line for line in lines)
    note = "without shapes, for which the terminal is too narrow; | cat has them"
    assert (note in " ".join(" ".join(lines).split())) == (width == 40)
    assert max(map(columns, lines[1:])) <= width


# ---- Text in the columns of a terminal: nothing is wider than asked, whatever its characters ----------


WIDE = "層重み"  # two columns each
COMBINED = "e\N{COMBINING ACUTE ACCENT}"  # one column

words = st.text("ab 層é\N{COMBINING ACUTE ACCENT}.", max_size=30)


def test_east_asian_characters_take_two_columns_and_combining_ones_none() -> None:
    assert [columns(text) for text in ("abc", WIDE, COMBINED, "Ａ", "")] == [3, 6, 1, 2, 0]
    assert (left(WIDE, 8), right(WIDE, 8)) == (WIDE + "  ", "  " + WIDE)
    assert (cut(WIDE, 5), cut_front(WIDE, 5), cut(WIDE, 6), cut(WIDE, None)) == ("層重…", "…重み", WIDE, WIDE)


@given(words, st.integers(2, 20))
def test_nothing_is_wider_than_asked_and_a_cut_shows_as_much_as_fits(text: str, width: int) -> None:
    assert all(columns(shorten(text, width)) <= width for shorten in (cut, cut_front, cut_middle))
    if columns(text) > width:  # a character of two columns may leave one free at each cut
        assert all(columns(shorten(text, width)) >= width - 2 for shorten in (cut, cut_front, cut_middle))
    assert all(columns(line) <= width for line in wrapped(text, width))
    assert "".join(wrapped(text, width)).replace(" ", "") == text.replace(" ", "")


@given(st.lists(st.tuples(words, words, words), max_size=4), st.integers(40, 80))
def test_columns_begin_at_one_place_whatever_is_in_them(rows: list[tuple[str, str, str]], width: int) -> None:
    marked = [(first, f"|{second}", f"{third}|") for first, second, third in rows]
    lines = list(table(marked, (0, 1)))
    assert len({columns(line[: line.index("|")]) for line in lines}) <= 1
    assert len({columns(line) for line in lines}) <= 1
    assert all(columns(line) <= width for line in table(marked, (0, 1), width))


def test_names_in_facts_are_broken_behind_their_dots() -> None:
    assert wrapped("of model.module.1.running_mean, b", 20) == ["of model.module.1.", "running_mean, b"]
    assert wrapped("num_batches_tracked", 12) == ["num_batches_", "tracked"]
    assert wrapped("/a/long/path/of/a/file", 12) == ["/a/long/", "path/of/a/", "file"]
    assert wrapped("  a  b\nc", 80) == ["  a  b c"] and wrapped("", 8) == []
    assert wrapped("a.long.name of it", 6, whole_words=True) == ["a.long.name", "of it"]


@given(words.filter(str.strip), st.integers(1, 9))
def test_each_word_is_shown_whole_or_in_parts_whatever_the_width(text: str, width: int) -> None:
    assert "".join(wrapped(text, width)).replace(" ", "") == text.replace(" ", "")
