"""benchmarks/merging: small runs end, and print every way and target."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import ROOT


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_small_run_of_merging(tmp_path: Path) -> None:
    options = ["--size", "4MB", "--rounds", "1", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.merging", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for kind in (", cut by rows", ", cut by rows and columns", " of ZeRO-3"):
        assert f"merge 8 ranks{kind}, 4 MB" in done.stdout
    for way in ("cp", "ckpttool merge", "torch.load + copy + save_file"):
        assert f"\n{way}" in done.stdout
    assert list(tmp_path.iterdir()) == []
