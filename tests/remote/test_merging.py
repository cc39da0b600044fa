"""Files of many ranks in a repository: read one after another, in few requests, into the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpttool.formats import shards
from ckpttool.remote import ahead
from tests.support.hub_server import Hub, Reply, Seen
from tests.support.running import Cli, assert_says

pytest.importorskip("obstore")

RANKS = 16


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, hub_server: Hub) -> Path:
    """Return a folder of the files of 16 ranks, 1 MB each, that the hub has as o/ranks."""
    from ckpttool import open as open_checkpoint
    from ckpttool import split

    top = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    state = {f"layers.{n}.weight": torch.randn(RANKS * 80, 128) for n in range(24)}
    state |= {f"layers.{n}.bias": torch.randn(9 * n + 1) for n in range(8)}  # some ranks have none of it
    torch.save({"model": state, "epoch": 3}, top / "whole.pt")
    with open_checkpoint(top / "whole.pt") as checkpoint:
        split(checkpoint, f"{top}/ranks/", ranks=RANKS)
    hub_server.create("o/ranks").commit_folder(top / "ranks")
    return top / "ranks"


OUTPUTS = {
    "safetensors": ["out.safetensors"],
    "pt": ["out.pt"],
    "cast": ["out.safetensors", "--dtype", "bf16"],
    "shards": ["out/", "--shard-size", "3MB"],
}


@pytest.mark.covered(lambda output: output in ("pt", "cast", "shards"))
@pytest.mark.parametrize("output", OUTPUTS)
def test_the_files_of_ranks_are_each_read_once_and_front_to_back(
    output: str, ranks: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As little room as there is for the files of a thousand ranks.
    monkeypatch.setattr(ahead, "HELD", 4 << 20)
    written = {}
    for name, place in (("local", str(ranks)), ("remote", "hf://o/ranks")):
        (tmp_path / name).mkdir()
        file, *options = OUTPUTS[output]
        ran = cli("merge", place, f"{tmp_path / name}/{file}", *options, "--json")
        assert ran.code == 0, ran.err
        paths = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        written[name] = {path.name: path.read_bytes() for path in paths}
    assert written["remote"] == written["local"]
    nbytes = sum(path.stat().st_size for path in ranks.iterdir())
    # Of each file: where it is, its beginning and its end, and all of it; and the small ones beside them.
    assert ran.json["requests"] <= 1 + 6 * RANKS
    assert ran.json["bytes_read"] <= nbytes + RANKS * (200 << 10)


def test_shards_that_are_written_in_turn_do_not_fetch_files_again(
    ranks: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "HELD", 4 << 20)
    monkeypatch.setattr(shards, "TOGETHER", 1)
    ran = cli("merge", "hf://o/ranks", f"{tmp_path}/out/", "--shard-size", "3MB", "--json")
    nbytes = sum(path.stat().st_size for path in ranks.iterdir())
    assert (ran.code, ran.json["bytes_read"] <= nbytes * 1.3 + RANKS * (200 << 10)) == (0, True), ran.json
    assert (
        cli("verify", f"{tmp_path}/out/", "--against", ranks.parent / "whole.pt", "--state", "model").code
        == 0
    )


@pytest.mark.usefixtures("soon_again")
def test_an_interrupted_merge_goes_on_where_it_was(
    ranks: Path, hub_server: Hub, tmp_path: Path, cli: Cli
) -> None:
    words = ("merge", "hf://o/ranks", tmp_path / "out.safetensors", "--no-verify")
    left = 3 * RANKS + 12  # small files, beginnings, ends, and the values of some files

    def fault(seen: Seen) -> Reply | None:
        nonlocal left
        left -= seen.host == "127.0.0.2"
        return Reply.fault(503) if left < 0 else None

    hub_server.faults.append(fault)
    assert_says(cli(*words), 3, "--resume goes on with it")
    hub_server.faults.clear()
    ran = cli(*words, "--resume", "--json")
    assert (ran.code, "begun from the start" in ran.err) == (0, False), ran.err
    assert cli("verify", tmp_path / "out.safetensors", "--against", ranks.parent / "whole.pt").code == 0
