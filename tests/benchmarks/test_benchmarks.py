"""benchmarks/: it measures the right thing, prints all of it and leaves nothing behind; never how fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

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
