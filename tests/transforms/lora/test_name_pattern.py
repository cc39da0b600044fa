"""Regular expressions of layer names: Python's `re` is the oracle, as PEFT uses it."""

from __future__ import annotations

import contextlib
import re
import time
from itertools import permutations, product

import pytest

from ckpttool.transforms.lora.adapter import FirstMatch, TooMuchWork, UnknownPattern, fits

PATTERNS = [
    *("q", "q_proj", "0.q", r"0\.q", "^q", "^l.0.q", "q$", ".*q", ".+q", r"l\.\d+\.q", r"l\.[0-9]\.q"),
    *("l.[01].(q|k)", "q|k", "(q|k)|l", "(?:l.0|l.1).q", "l.*.q_?", r"l\.(0|1\d)\..*", "", "()", "l?"),
    *("[^.]+.k", "(l|l.0).q", r"\w+", "a*b", "^", "$", "q^", "ll*", "l.(.*|q).k"),
]  # fmt: skip

NAMES = [
    *("", ".", "q", "k", "qq", "q_proj", "l", "l.0.q", "l.1.k", "l.10.q", "x.l.0.q", "l.0.q.k", "lll"),
    "l.0.q_",
]  # fmt: skip


def python_fits(pattern: str, name: str) -> bool:
    return bool(re.match(rf"(.*\.)?({pattern})\Z", name))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_fits_the_names_that_peft_finds(pattern: str) -> None:
    for name in NAMES:
        assert fits(pattern, name) == python_fits(pattern, name), name


def test_pieces_in_any_order_fit_as_in_python() -> None:
    pieces = ["a", ".", r"\.", ".*", "a+", "|", "(a", "(?:", ")", "ab?", "$"]
    for pattern, name in product(map("".join, product(pieces, repeat=3)), ("a", "a.b", "ab.a", "aa")):
        with contextlib.suppress(UnknownPattern, re.error):
            assert fits(pattern, name) == python_fits(pattern, name), (pattern, name)


@pytest.mark.parametrize("pattern", [".*" * 30 + "b", "(a|a)" * 40 + "c", "a?" * 40 + "a" * 41])
def test_a_pattern_takes_no_exponential_time(pattern: str) -> None:
    assert not fits(pattern, "a" * 40)


@pytest.mark.parametrize(
    "pattern", ["((.+)+)+!", "(a)*", "(?=a)", "a{2}", "a*?", "a*+", r"\bq", r"(a)\1", "a" * 1001]
)
def test_other_pieces_are_refused(pattern: str) -> None:
    with pytest.raises(UnknownPattern):
        fits(pattern, "a")


@pytest.mark.parametrize("pattern", ["a)(", "(", "[b-a]", "*"])
def test_what_is_no_pattern_is_told_apart(pattern: str) -> None:
    with pytest.raises(re.error):
        fits(pattern, "a")


def test_the_first_of_many_patterns_is_the_one_that_peft_takes() -> None:
    names = [*NAMES, "l_0_q", "l.q.0_q"]
    for patterns in permutations([*PATTERNS[:3], *PATTERNS[7:9], "l.0.q", "q.", "l.....q"], 3):
        first = FirstMatch(patterns)
        for name in names:
            wanted = next((pattern for pattern in patterns if python_fits(pattern, name)), None)
            assert first.of(name) == wanted, (patterns, name)


def test_a_pattern_for_each_of_thousands_of_layers_takes_no_time() -> None:
    """Mixtures of experts: 32 layers of 64 experts, each with its rank."""
    places = product(range(32), range(64), "gud")
    names = [f"model.layers.{i}.mlp.experts.{j}.{p}_proj" for i, j, p in places]
    first = FirstMatch(names)
    begun = time.process_time()
    assert [first.of(f"x.{name}") for name in names] == names
    assert time.process_time() - begun < 3


def test_patterns_that_would_take_minutes_are_refused() -> None:
    first = FirstMatch([r"\w*" * 60 + f"x{number}" for number in range(1000)])
    begun = time.process_time()
    with pytest.raises(TooMuchWork):
        [first.of("y" * 200) for _ in range(1000)]
    assert time.process_time() - begun < 20
