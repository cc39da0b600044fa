"""benchmarks/: it measures the right thing, prints all of it and leaves nothing behind; never how fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.case import Case, Run, Way
from benchmarks.disk_space import choose_folder
from benchmarks.markdown import check_marks, put_between_marks
from benchmarks.process import CommandFailed, timed
from benchmarks.report import as_text
from benchmarks.sizes import parse_size, show_size
from benchmarks.targets import at_least_times_faster, at_most_times, beyond, ratio
from benchmarks.turns import in_turns
from tests.support.running import ROOT

pytestmark = pytest.mark.timeout(300)  # half a minute alone, minutes where others work too

BENCH = [sys.executable, "-m", "benchmarks"]
ROWS = [
    "cp",
    "ckpttool strip-prefix",
    "torch.load(mmap=True) + save_file",
    "torch.load + save_file",
    "python -c pass",
    "ckpttool --help",
    "ckpttool strip-prefix, 1 MB",
    "python -c 'import torch'",
]
TARGETS = [
    "ckpttool strip-prefix / cp",
    "torch.load + save_file / ckpttool strip-prefix",
    "ckpttool strip-prefix, memory",
    "ckpttool --help, beyond python -c pass",
    "ckpttool strip-prefix, 1 MB, beyond python -c pass",
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, Path]:
    """One small run: the lines it printed, the folder of its files, the folder with the pages it filled."""
    folder, pages = tmp_path_factory.mktemp("bench"), tmp_path_factory.mktemp("pages")
    (pages / "docs").mkdir()
    (pages / "docs" / "benchmarks.md").write_text(
        "before\n<!-- benchmarks -->old<!-- /benchmarks -->\nafter\n"
    )
    # The other benchmarks consist of the same parts; a hundred thousand tensors would take a while.
    chosen = ["strip-prefix", "in-place", "start-up"]
    options = ["--size", "8MB", "--rounds", "1", "--folder", folder, "--markdown", pages]
    options += [word for name in chosen for word in ("--only", name)]
    done = subprocess.run([*BENCH, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), folder, pages


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS + TARGETS)
def test_every_row_is_printed_and_on_the_page(bench, row):
    lines, _, pages = bench
    page = (pages / "docs" / "benchmarks.md").read_text().splitlines()
    assert any(line.startswith(row + "  ") for line in lines)
    assert row in TARGETS or any(line.startswith(row + "  ") for line in page)


@pytest.mark.long
def test_the_text_tables_fit_80_columns(bench):
    lines, _, _ = bench
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.long
def test_a_missed_target_is_no_failure(bench):
    lines, _, _ = bench
    verdicts = [line.split()[-1] for line in lines if line.startswith(tuple(t + "  " for t in TARGETS))]
    assert set(verdicts[-5:]) <= {"met", "MISSED"}


@pytest.mark.long
def test_nothing_is_left_in_the_folder(bench):
    _, folder, _ = bench
    assert list(folder.iterdir()) == []


@pytest.mark.long
def test_all_tables_go_between_the_marks_of_the_page_about_speed(bench):
    _, _, pages = bench
    text = (pages / "docs" / "benchmarks.md").read_text()
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


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_ends_its_processes_and_leaves_no_file(tmp_path, number, code):
    process = subprocess.Popen(
        [*BENCH, "--only", "strip-prefix", "--size", "8MB", "--rounds", "1000", "--folder", tmp_path],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/plain.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=90) == code
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_does_not_fit_is_left_out_with_a_remark():
    done = subprocess.run(
        [*BENCH, "--only", "strip-prefix", "--size", "900TB"], cwd=ROOT, capture_output=True, text=True
    )
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


@pytest.mark.parametrize("text, size", [("2GB", 2_000_000_000), ("1.5 MB", 1_500_000), ("8kB", 8000)])
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "2", "GB", "2GiB", "-1GB", "1e3MB"])
def test_text_that_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    "size, text", [(2e9, "2 GB"), (24_123_000, "24.1 MB"), (999_600, "1 MB"), (0, "0 kB")]
)
def test_sizes_are_shown_with_three_digits(size, text):
    assert show_size(size) == text
