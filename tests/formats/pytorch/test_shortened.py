"""A file that another process shortens while it is read: one line and exit 3, not SIGBUS."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.support.every_format import as_tar
from tests.support.running import ROOT

SHORTENING = """
    import os, sys
    from ckpttool import cli
    from ckpttool.inert_pickle import machine

    path, shortened_to = sys.argv[1], int(sys.argv[2])
    put = machine.Machine.put

    def shorten(*given):
        os.truncate(path, shortened_to)
        return put(*given)

    machine.Machine.put = shorten
    raise SystemExit(cli.run(["inspect", path]))
"""

TREE = {f"layer{i}.weight": torch.full((3000,), float(i)) for i in range(200)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("left", [0, 100, 5000])
@pytest.mark.parametrize("kind", ["zip", "legacy", "tar"])
def test_a_file_shortened_while_it_is_read_is_an_error_message(kind: str, left: int, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    if kind == "tar":
        as_tar(path)
    else:
        torch.save(TREE, path, _use_new_zipfile_serialization=kind == "zip")
    command = [sys.executable, "-c", textwrap.dedent(SHORTENING), str(path), str(left)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if kind == "zip":  # its pickle is in memory already, and its storages are not read
        assert ran.returncode == 0
        return
    assert ran.returncode == 3
    assert len(ran.stderr.splitlines()) <= 2
    assert str(path) in ran.stderr and "Traceback" not in ran.stderr
