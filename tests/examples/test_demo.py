"""The report of the demo: its contents, and when it fails."""

from __future__ import annotations

import pytest

from examples import demo

SAID = "stripped 'module.' from 8 of 8 keys -> runs/demo.safetensors (341 kB, 0.00 s)"


def entry(correct: int, samples: int = 355, epoch: int = 1) -> dict[str, float]:
    return {"epoch": epoch, "correct": correct, "samples": samples, "accuracy": correct / samples}


def test_the_report_shows_both_counts_and_the_line_of_strip_prefix_in_80_columns():
    text, passed = demo.report(entry(353, epoch=10), SAID, entry(353))
    assert passed
    assert text.count("353 of 355 test images correct (99.44%)") == 2
    assert SAID in text.splitlines()
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("trained", "scored"),
    [
        (entry(353), entry(352)),
        (entry(353), entry(353, samples=356)),
        (entry(300), entry(300)),
    ],
    ids=["another count", "another test set", "too few right"],
)
def test_the_demo_fails_if_the_counts_differ_or_too_few_are_right(trained, scored):
    text, passed = demo.report(trained, SAID, scored)
    assert not passed
    assert "FAILED" in text
    assert "passed" not in text


def test_best_pt_is_from_the_first_epoch_with_the_best_accuracy():
    log = [entry(340, epoch=1), entry(350, epoch=2), entry(350, epoch=3), entry(345, epoch=4)]
    assert demo.best_epoch(log)["epoch"] == 2
