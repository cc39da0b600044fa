"""Text in the columns of a terminal: nothing is wider than asked, whatever its characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.cli.layout import columns, cut, cut_front, cut_middle, left, right, table, wrapped

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
