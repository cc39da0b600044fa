"""--shard-size: every command that writes takes it, and the number of shards is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.cli import group

COMMANDS = {
    "strip-prefix": "in.pt OUT",
    "add-prefix": "in.pt OUT",
    "rename-keys": "in.pt OUT --map module=m",
    "convert": "in.pt OUT",
    "slim": "in.pt OUT",
    "convert-batchnorm": "norm.pt OUT --to sync",
    "average": "in.pt in.pt OUT",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({f"module.w{i}": torch.ones(100) for i in range(4)}, "in.pt")
    norm = torch.nn.BatchNorm1d(100).state_dict()
    del norm["num_batches_tracked"]
    torch.save(norm, "norm.pt")
    return tmp_path


@pytest.mark.parametrize("size, shards", [("400", 4), ("0.8k", 2), ("800B", 2), ("1G", 1)])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_writer_cuts_shards_and_says_how_many(command: str, size: str, shards: int, cli: Any) -> None:
    words = COMMANDS[command].replace("OUT", "out/").split()
    shards += shards > 1 and command == "convert-batchnorm"  # for its counter of 8 bytes
    ran = cli(command, *words, "--shard-size", size)
    assert ran.code == 0, ran.err
    assert len(list(Path("out").glob("*.safetensors"))) == shards
    assert f" in {shards} shard{'s' * (shards > 1)}, " in ran.out
    assert cli(command, *words, "--shard-size", size, "--force", "--json").json["shards"] == shards


def test_every_writer_of_a_state_has_the_option() -> None:
    for name, command in group.commands.items():
        flags = {flag for parameter in command.params for flag in parameter.opts}
        if name not in ("split", "disarm") and "output" in {parameter.name for parameter in command.params}:
            assert "--shard-size" in flags, name


def test_a_file_has_no_shards(cli: Any) -> None:
    assert "shard" not in cli("convert", "in.pt", "out.safetensors").out
    assert "shards" not in cli("convert", "in.pt", "again.safetensors", "--json").json


def test_a_shard_size_for_a_file_is_refused(cli: Any) -> None:
    for output in ("out.pt", "out.safetensors"):
        ran = cli("strip-prefix", "in.pt", output, "--shard-size", "1G")
        assert (ran.code, ran.err.splitlines()[1][:6]) == (2, "hint: ")
        assert "shard" in ran.err


@pytest.mark.parametrize("size", ["", "0", "-1", "1X", "G", "many"])
def test_a_malformed_size_is_exit_2(size: str, cli: Any) -> None:
    ran = cli("slim", "in.pt", "out/", "--shard-size", size)
    assert ran.code == 2 and "is not a shard size" in ran.err


def test_a_folder_that_is_rewritten_keeps_its_format(cli: Any) -> None:
    cli("convert", "in.pt", "out/", "--to", "torch-sharded")
    ran = cli("strip-prefix", "out/", "plain/", "--shard-size", "800", "--json")
    assert (ran.code, ran.json["format"], ran.json["shards"]) == (0, "torch-sharded", 2)
