"""A short drill: runs that are killed, at seeded moments. `make drill` has all kinds of kills."""

from __future__ import annotations

import re
import sys

import pytest

from tests.ranks.programs import start

SHORT = ["rank 0, in the middle of a save", "the agent, by SIGTERM in evaluation"]


@pytest.mark.timeout(400)
def test_runs_that_are_killed_end_in_the_bits_of_one_that_nothing_disturbed():
    kinds = [word for name in SHORT for word in ("--only", name)]
    done = start([sys.executable, "-m", "tests.drill", "--kills", "2", "--load", "0", *kinds], patience=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^2 of 2 held", done.stdout, re.MULTILINE)
    assert [line.partition("  ")[0] for line in done.stdout.splitlines()[1:3]] == SHORT


def test_an_unknown_kind_is_refused_with_the_names_of_all():
    done = start([sys.executable, "-m", "tests.drill", "--only", "nothing"])
    assert done.returncode == 2
    assert "no such kind" in done.stderr and "all at once, in a step" in done.stderr
