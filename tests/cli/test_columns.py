"""Text in columns of a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import clip

import ckpttool
from ckpttool.analysis.summary import summarize
from ckpttool.analysis.tables import measure, tensor_rows
from ckpttool.cli.commands.inspect import stats_table, tensor_lines
from ckpttool.cli.console import columns, cut, cut_front, cut_middle, left, right, table, wrapped
from ckpttool.cli.inspect_page import page

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


@pytest.fixture(params=["long", "wide"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> ckpttool.Checkpoint:
    name = "a_very_long_name_of_a_module." * 8 if request.param == "long" else f"{WIDE * 4}."
    state = {f"{name}{i}.weight": torch.ones(4, i + 1) for i in range(3)} | {"w": torch.ones(3)}
    torch.save({"model": state, name + "epoch": 3, "x": 4}, tmp_path / "f.pt")
    return ckpttool.open(tmp_path / "f.pt")


@pytest.mark.parametrize("width", [60, 80])
def test_a_page_keeps_to_the_terminal_whatever_the_names(checkpoint: ckpttool.Checkpoint, width: int) -> None:
    lines = list(page(summarize(checkpoint), None, width, 40, everything=False))[1:]  # the path can be copied
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
    stats = {name: measure(name, tensor) for name, tensor in checkpoint.tensors()}
    measured = list(stats_table(tensor_rows(checkpoint), stats, 80))
    assert max(map(columns, measured)) <= 80
    rows = [line for line in measured if not line.startswith("without ")]
    assert [line.split()[1] for line in rows] == ["dtype", *["float32"] * 4]
    assert all("weight" in line.split()[0] for line in measured[1:4])


def saved(folder: Path, names: list[str], values: torch.Tensor) -> ckpttool.Checkpoint:
    torch.save(dict.fromkeys(names, values), folder / "f.pt")
    return ckpttool.open(folder / "f.pt")


def test_deviations_and_means_give_way_before_names_and_what_is_not_finite(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attention.weight" for i in range(3)]
    checkpoint = saved(tmp_path, names, torch.tensor([0.123456, 7.0, float("nan")]))
    stats = {name: measure(name, tensor) for name, tensor in checkpoint.tensors()}
    heads = [next(stats_table(tensor_rows(checkpoint), stats, width)).split() for width in (100, 84, 80)]
    assert [set(head) & {"mean", "std"} for head in heads] == [{"mean", "std"}, {"mean"}, set()]
    assert all(head[-2:] == ["not", "finite"] for head in heads)
    lines = list(stats_table(tensor_rows(checkpoint), stats, 80))
    assert [line.split()[0] for line in lines[1:-1]] == names
    assert lines[-1].startswith("without mean, std, ")


def test_names_are_cut_in_their_middle_before_a_shape_is(tmp_path: Path) -> None:
    names = [f"block.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
    checkpoint = saved(
        tmp_path, [*names, "a_table_of_relative_positions.with_a_long_name"], torch.ones(12, 34)
    )
    lines = list(page(summarize(checkpoint), None, 76, 40, everything=False))
    assert any(line.endswith("weight … running_var 12×34") for line in lines)
    assert any(line.startswith("  a_table_of") and line.endswith(" with_a_long_name 12×34") for line in lines)


def test_no_tensors_are_no_lines() -> None:
    assert list(tensor_lines([], 80)) == list(tensor_lines([], None)) == []
