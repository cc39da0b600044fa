"""benchmarks/: each measures the right thing, prints all of it and names a step back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import counted, delta_tools, history, turns
from benchmarks.case import Benchmark, Case, Need, Run, Way
from benchmarks.counted import COMMANDS, RECORD, SLACK, steps_back
from benchmarks.disk_space import choose_folder
from benchmarks.history import Figure, worse
from benchmarks.markdown import check_marks, put_between_marks
from benchmarks.process import CommandFailed, timed
from benchmarks.program import main
from benchmarks.report import as_text
from benchmarks.sizes import parse_size, show_size
from benchmarks.targets import at_least_times_faster, at_most_times, beyond, floor, ratio
from benchmarks.turns import in_turns
from tests.support.running import ROOT

# ---- benchmarks/: it measures the right thing, prints all of it and leaves nothing behind; never how fast


pytestmark = pytest.mark.timeout(300)  # half a minute alone, minutes where others work too

BENCH = [sys.executable, "-m", "benchmarks"]
ROWS = ["cp", "ckpttool strip-prefix", "torch.load(mmap=True) + save_file", "torch.load + save_file"]
ROWS += ["python -c pass", "ckpttool --help", "ckpttool strip-prefix, 1 MB", "python -c 'import torch'"]
TARGETS = [
    "ckpttool strip-prefix / cp",
    "torch.load + save_file / ckpttool strip-prefix",
    "ckpttool strip-prefix, memory",
    "ckpttool --help, beyond python -c pass",
    "ckpttool strip-prefix, 1 MB, beyond python -c pass",
]


@pytest.mark.long
def test_a_small_run_prints_every_row_puts_them_on_the_page_and_leaves_nothing(tmp_path):
    """A missed target is no failure. The other benchmarks consist of the same parts."""
    folder, page = tmp_path / "run", tmp_path / "docs" / "benchmarks.md"
    folder.mkdir()
    page.parent.mkdir()
    page.write_text("before\n<!-- benchmarks -->old<!-- /benchmarks -->\nafter\n")
    options = ["--size", "8MB", "--rounds", "1", "--folder", folder, "--markdown", tmp_path]
    options += [word for name in ("strip-prefix", "in-place", "start-up") for word in ("--only", name)]
    done = subprocess.run([*BENCH, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines, text = done.stdout.splitlines(), page.read_text()
    assert [row for row in ROWS + TARGETS if not any(line.startswith(row + "  ") for line in lines)] == []
    assert [row for row in ROWS if f"\n{row}  " not in text] == []
    assert [line for line in lines if len(line) > 80] == []
    verdicts = [line.split()[-1] for line in lines if line.startswith(tuple(t + "  " for t in TARGETS))]
    assert set(verdicts[-5:]) <= {"met", "MISSED"}
    assert list(folder.iterdir()) == []
    assert text.startswith("before\n<!-- benchmarks -->\n```text\nstrip-prefix, 8 MB")
    assert text.endswith("\n<!-- /benchmarks -->\nafter\n")
    assert "old" not in text
    assert f"Python {sys.version.split()[0]}" in text


def test_pages_without_marks_are_refused_before_measuring(tmp_path):
    page = tmp_path / "docs" / "benchmarks.md"
    page.parent.mkdir()
    page.write_text("nothing to put it between")
    done = subprocess.run([*BENCH, "--markdown", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{page}: has no lines <!-- benchmarks -->" in done.stderr
    with pytest.raises(ValueError, match="has no lines"):
        put_between_marks(page, "x")


def test_the_page_of_this_repository_has_the_marks():
    check_marks(ROOT / "docs" / "benchmarks.md")


@pytest.mark.long
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_ends_its_processes_and_leaves_no_file(tmp_path, number, code):
    options = ["--only", "strip-prefix", "--size", "8MB", "--rounds", "1000", "--folder", tmp_path]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen([*BENCH, *options], cwd=ROOT, stdout=nothing, stderr=nothing)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/plain.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=90) == code
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_does_not_fit_is_left_out_with_a_remark():
    options = ["--only", "strip-prefix", "--size", "900TB"]
    done = subprocess.run([*BENCH, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "strip-prefix, 900 TB: left out, it needs" in done.stdout


def test_without_a_large_enough_tmpfs_the_temporary_folder_is_used_with_a_remark():
    folder, remark = choose_folder(10**18)
    assert folder.is_dir()
    assert "tmpfs" in remark


def test_ratios_are_taken_within_a_round():
    # The second round was three times slower for both, the third for neither.
    results = {
        "cp": [Run(seconds, 0, 0) for seconds in (1.0, 3.0, 1.0)],
        "tool": [Run(seconds, 0, 0) for seconds in (1.1, 3.3, 1.2)],
    }
    assert ratio(results, "tool", "cp") == pytest.approx(1.1)
    assert beyond(results, "tool", "cp") == pytest.approx(0.2)
    assert at_most_times("tool", "cp", 1.15).met(results)
    assert not at_most_times("tool", "cp", 1.05).met(results)
    assert at_least_times_faster("cp", "tool", 1.05).met(results)
    assert not at_least_times_faster("cp", "tool", 1.15).met(results)


def test_the_ways_take_turns_after_a_warm_up(tmp_path):
    log = tmp_path / "log"
    ways = [Way(name, ["sh", "-c", f"echo {name} >> {log}"]) for name in "AB"]
    results = in_turns(Case("letters", ways), rounds=2)
    assert log.read_text().split() == ["A", "B", "A", "B", "B", "A"]
    assert [len(runs) for runs in results.values()] == [2, 2]


def test_each_run_is_prepared_and_writes_a_new_output(tmp_path):
    out, used = tmp_path / "out", tmp_path / "used"
    way = Way("once", ["sh", "-c", f"set -C; : > {out}; rm {used}"], output=out, before=used.touch)
    in_turns(Case("fresh", [way], memory=1 << 22), rounds=2, ready=True)
    assert not out.exists()


def test_compared_ways_must_write_the_same_bytes(tmp_path):
    out = tmp_path / "out"
    ways = [Way(x, ["sh", "-c", f"echo {x} > {out}"], output=out, compared=True) for x in "AB"]
    with pytest.raises(CommandFailed, match="A, B"):
        in_turns(Case("different", ways), rounds=1)


def test_the_peak_is_that_of_the_command_not_of_the_harness():
    grown = bytearray(os.urandom(1)) * 200_000_000
    small, large = timed(["true"]), timed([sys.executable, "-c", "x = b'x' * 100_000_000"])
    del grown
    assert small.peak < 20_000_000
    assert 100_000_000 < large.peak < 140_000_000


def test_a_failed_command_says_why():
    with pytest.raises(CommandFailed, match=r"exit code 3.*\noh no"):
        timed(["sh", "-c", "echo oh no >&2; exit 3"])
    with pytest.raises(CommandFailed, match="could not be started"):
        timed(["no-such-program"])


def test_a_table_without_targets_is_one_table():
    case = Case("nothing", [Way("true", ["true"])])
    assert as_text(case, in_turns(case, 1)).count("---\n") == 1


def test_sizes_are_read_as_people_write_them_and_other_text_is_refused():
    assert [parse_size(text) for text in ("2GB", "1.5 MB", "8kB")] == [2_000_000_000, 1_500_000, 8000]
    for text in ("", "2", "GB", "2GiB", "-1GB", "1e3MB"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(text)


def test_sizes_are_shown_with_three_digits():
    assert [show_size(size) for size in (2e9, 24_123_000, 999_600, 0)] == ["2 GB", "24.1 MB", "1 MB", "0 kB"]


# ---- benchmarks/counted.py: what commands take is counted, and more than was recorded is a step back --


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


# ---- Deltas beside other tools: each makes the file again, and one that is absent is named ------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    base = torch.randn(200_000).bfloat16()
    for name, tensor in (("base", base), ("new", base + (torch.rand(200_000) < 0.01))):
        save_file({"w": tensor}, tmp_path / f"{name}.safetensors")
    return tmp_path / "base.safetensors", tmp_path / "new.safetensors"


@pytest.mark.long
def test_each_tool_that_is_installed_makes_the_newer_file_again(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    tools = [delta_tools.OURS, *delta_tools.others("step")[0]]
    found = delta_tools.packed(tools, *files, tmp_path)
    assert [*found] == [each.name for each in tools]
    assert min(found, key=lambda name: found[name].stat().st_size) == "ckpttool"


def test_a_tool_that_makes_another_file_gets_no_row(files: tuple[Path, Path], tmp_path: Path) -> None:
    wrong = delta_tools.Tool(
        "cp", lambda base, new, out: ["cp", base, out], lambda base, out, to: ["cp", out, to]
    )
    with pytest.raises(CommandFailed, match="cp made another file than it was given"):
        delta_tools.packed([wrong], *files, tmp_path)


def test_a_tool_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_tools.shutil, "which", lambda name: None)
    monkeypatch.setattr(delta_tools, "find_spec", lambda name: None)
    names = ["zipnn", "xdelta3 -1", "zstd -3 --patch-from"]
    assert delta_tools.others("step") == ([], names)
    assert all(f"{name} is absent" in delta_tools._versions() for name in names)


# ---- benchmarks/history.py: a row that became worse by more than its noise is named, beside what it was


OLD_ROWS = Figure("cp; x / cp", 1.0, 0.9, 1.1, 1.5, False, "2 cores", "2026-11-01", "abc")
KEY = (OLD_ROWS.machine, OLD_ROWS.row)


@pytest.mark.parametrize(
    ("at_least", "low", "high", "is_worse"),
    [
        (False, 1.13, 1.3, True),
        (False, 1.11, 1.3, False),  # less than 2 % beyond what it was at its worst
        (False, 1.05, 9.0, False),
        (False, 0.1, 0.2, False),
        (True, 0.5, 0.87, True),
        (True, 0.5, 0.89, False),
        (True, 2.0, 3.0, False),
    ],
)
def test_a_figure_is_worse_if_its_best_round_is_worse_than_the_worst_was(at_least, low, high, is_worse):
    was = replace(OLD_ROWS, at_least=at_least)
    now = replace(was, value=(low + high) / 2, low=low, high=high)
    found = worse([now], {KEY: was})
    assert bool(found) == is_worse
    assert all(text.startswith("cp; x / cp: 1 (0.9–1.1, 2026-11-01, abc) -> ") for text in found)


def test_another_machine_and_a_new_row_are_compared_with_nothing():
    now = replace(OLD_ROWS, low=9.0, high=9.0)
    assert worse([replace(now, machine="4 cores"), replace(now, row="other")], {KEY: OLD_ROWS}) == []


def benchmark(seconds: Callable[[str], float], monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """Return a benchmark of two ways that take as long as is said."""

    def timed(command: list[str]) -> Run:
        return Run(seconds(command[0]), 0.1, 1_000_000)

    monkeypatch.setattr(turns, "timed", timed)
    limits = [at_most_times("b", "a", 1.5), at_least_times_faster("b", "a", 0.1), floor("b", "a")]
    case = Case("work", [Way("a", ["a"]), Way("b", ["b"])], limits)
    return Benchmark("work", False, lambda size: Need(0, 0), lambda folder, size: case)


def test_a_run_prints_what_was_before_names_what_is_worse_and_adds_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(history, "HISTORY", tmp_path / "history.jsonl")
    words = ["--folder", str(tmp_path), "--rounds", "3", "--record"]
    for factor in (1.0, 1.01, 2.0):
        work = benchmark(lambda way, f=factor: 1.0 if way == "a" else f, monkeypatch)  # type: ignore[misc]
        assert main([work], words) == 0
    first, second, third = capsys.readouterr().out.split("\nwork ")[1:]
    assert "before" not in first and "WORSE" not in first + second
    assert re.search(r"b / a +≤ 1\.50 × +1\.01 × +2\.00 × +MISSED", third)
    assert third.count("WORSE than before, beyond its noise: work; ") == 2
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["value"] for line in lines[::2]] == [1.0, 1.01, 2.0]
    assert [line["limit"] for line in lines[:2]] == [1.5, 0.1]
    assert all(line["machine"] and line["date"] for line in lines)


def test_without_record_nothing_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "HISTORY", tmp_path / "history.jsonl")
    assert main([benchmark(lambda way: 1.0, monkeypatch)], ["--folder", str(tmp_path)]) == 0
    assert not (tmp_path / "history.jsonl").exists()
