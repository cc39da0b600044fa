"""`scan` of what is behind URLs: the same verdicts, and few bytes."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpttool.scanning.scan import scan
from tests.support.crafting import dict_of, torch_zip
from tests.support.range_server import RangeServer
from tests.support.scan_corpus import MKDIR


def test_a_file_behind_a_url_is_judged_by_few_of_its_bytes(server: RangeServer, tmp_path: Path) -> None:
    there = tmp_path / "there"
    torch.save({f"w{number}": torch.randn(1 << 20) for number in range(4)}, there / "fine.pt")
    torch_zip(there / "bad.pt", dict_of({"w": MKDIR}))
    ((fine,), (bad,)) = (scan(f"{server.url}/{name}") for name in ("fine.pt", "bad.pt"))
    assert (fine.verdict, bad.verdict, bad.names) == ("safe", "dangerous", ("os.mkdir",))


def test_what_is_not_there_is_unreadable(server: RangeServer) -> None:
    (found,) = scan(f"{server.url}/missing.pt")
    assert found.verdict == "unreadable" and server.url in found.path
