"""benchmarks/counted.py: what commands take is counted, and more than was recorded is a step back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import counted
from benchmarks.counted import COMMANDS, RECORD, SLACK, steps_back

BEFORE = {"inspect": {"calls": 100, "bytes": 1_000_000, "memory": 5_000_000}}


@pytest.mark.parametrize(
    ("kind", "number", "is_back"),
    [
        ("calls", 115, False),
        ("calls", 116, True),
        ("bytes", 1_040_000, False),
        ("bytes", 1_040_001, True),
        ("memory", 6_450_000, False),
        ("memory", 6_450_001, True),
        ("calls", 1, False),
    ],
)
def test_a_count_beyond_its_slack_is_named(kind, number, is_back):
    now = {"inspect": {**BEFORE["inspect"], kind: number}}
    found = list(steps_back(now, BEFORE))
    assert bool(found) == is_back
    assert all(text.startswith(f"inspect: {kind} ") for text in found)


def test_a_command_that_only_one_of_the_two_counts_is_named():
    assert list(steps_back({}, BEFORE)) == ["inspect: is not counted any more"]
    assert list(steps_back(BEFORE, {})) == ["inspect: was not counted before"]


def test_every_command_is_recorded():
    recorded = json.loads(RECORD.read_text())
    assert recorded.keys() == COMMANDS.keys()
    assert all(counts.keys() == SLACK.keys() for counts in recorded.values())


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel counts no calls here")
def test_the_counts_are_those_of_the_command_and_the_same_each_time(tmp_path):
    """Of 4 MB that are copied, each byte is read and written once."""
    torch.save({"model": {"module.w": torch.arange(1_000_000.0)}}, tmp_path / "large.pt")
    first, second = (counted.count(tmp_path, "strip-prefix large.pt OUT.safetensors") for _ in range(2))
    assert 8_000_000 < first["bytes"] < 8_200_000
    assert first["calls"] == second["calls"]
    assert not list(steps_back({"": first}, {"": second}))
