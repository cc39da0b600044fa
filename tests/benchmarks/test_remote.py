"""benchmarks/remote.py: each way reads what it should, all of it is in the tables, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpttool
from benchmarks import remote
from benchmarks.case import Case, Run, Way
from benchmarks.children.link_server import CountedLink
from benchmarks.remote import BARE, DOWNLOAD, FAKE, FSSPEC, HEADERS, LOCAL, NEEDS, OURS, Count, Hub, Job
from tests.support.running import ROOT

pytestmark = pytest.mark.timeout(300)

pytest.importorskip("huggingface_hub")
pytest.importorskip("urllib3")


def cells(text: str, begin: str) -> list[list[str]]:
    """Return the cells of all rows of tables whose first cell begins so."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0].startswith(begin)]


def run(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "benchmarks.remote", "--rounds", "1", "--folder", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


def shards(folder: Path, size: int) -> None:
    """Write shards with an index, as `make_shards` does in processes of their own."""
    state = {f"module.layers.{number}.weight": torch.ones(size // 64) for number in range(16)}
    torch.save(state, folder.with_name("whole.pt"))
    folder.rmdir()
    with ckpttool.open(folder.with_name("whole.pt")) as whole:
        ckpttool.save(whole, f"{folder}/", shard_size=size // 4)


def told(text: str) -> None:
    """Compare what is printed of an inspection of shards."""
    ways = [row for row in cells(text, "") if row[0] in (LOCAL, OURS, DOWNLOAD, HEADERS)]
    counted = {name: int(row[4]) for name, *row in ways if row[0] != "not installed"}
    assert {LOCAL, OURS} <= set(counted)
    assert counted[LOCAL] == 0
    assert all(count > 4 for way, count in counted.items() if way != LOCAL)
    assert cells(text, f"{OURS}, round trips")[0][3] in ("met", "MISSED")


@pytest.mark.long
def test_a_small_inspection_of_shards_prints_every_way_and_what_the_server_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if huggingface_hub were not installed, of which `make long` imports four."""
    monkeypatch.setattr(remote, "is_missing", NEEDS.__contains__)
    text = remote.measured(Job(shards, remote.inspect_shards), tmp_path, 4_000_000, 1)
    told(text)
    assert text.count("not installed") == 2


@pytest.mark.long
def test_a_small_inspection_as_a_program_compares_with_huggingface_hub(tmp_path: Path) -> None:
    text = run(tmp_path, "--only", "inspect-shards", "--size", "4MB")
    told(text)
    assert {row[0] for row in cells(text, "huggingface_hub")} == {DOWNLOAD, HEADERS}


@pytest.mark.long
def test_all_comparisons_print_every_way_and_target(tmp_path: Path) -> None:
    text = run(tmp_path, "--size", "4MB")
    for way, times in ((OURS, 5), (LOCAL, 5), (DOWNLOAD, 5), (BARE, 3), (FSSPEC, 3), (FAKE, 1)):
        assert len([row for row in cells(text, way) if row[0] == way]) == times
    assert len(cells(text, f"{OURS}, of the link")) == 3


@pytest.mark.parametrize(
    ("answered", "trips"),
    [
        ([], 0),
        ([(0.0, 0.1)], 1),
        ([(0.0, 0.1), (0.01, 0.1), (0.02, 0.12)], 1),
        ([(0.0, 0.1), (0.1, 0.2), (0.11, 0.2), (0.2, 0.3)], 3),
        ([(0.0, 1.0), (0.1, 0.2), (0.3, 0.4)], 2),
    ],
    ids=["none", "one", "at once", "one after another", "beside a long one"],
)
def test_round_trips_are_requests_that_waited_for_one_another(
    answered: list[tuple[float, float]], trips: int
) -> None:
    link = CountedLink(1e9)
    link.answered = answered
    link.wait(5000)
    assert link.counted() == (len(answered), 5000, trips)
    assert link.counted() == (0, 0, 0)


def test_a_way_whose_library_is_missing_is_in_the_table_and_its_target_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "NEEDS", {DOWNLOAD: ["no_such_library"]})
    assert remote.is_missing(DOWNLOAD)
    assert not remote.is_missing(OURS)
    with subprocess.Popen(["true"], text=True) as process:
        hub = Hub(process, "", "", 1000, tmp_path)
    hub.counts |= {name: [Count(9, 9, 9, 0.0), Count(2, 1000, 1, 0.0)] for name in (LOCAL, OURS)}
    case = Case("merge", [Way(name, []) for name in (LOCAL, OURS, DOWNLOAD)], remote._targets(1000))
    results = {name: [Run(1e-5, 1e-5, 1 << 20)] for name in (LOCAL, OURS)}
    text = remote.as_markdown(case, results, hub)
    assert cells(text, DOWNLOAD) == [[DOWNLOAD, "not installed"]]
    assert cells(text, f"{OURS}, of the link") == [[f"{OURS}, of the link", "≥ 0.90", "0.80", "MISSED"]]
