"""The hint of an error is the next command, with flags that this command has and the names that are there."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.running import Ran

TWO = torch.ones(2)


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def pasted(cli: Any, hint: str, before: str = "ckpttool ") -> Ran:
    """Run the command in a hint."""
    return cli(*shlex.split(hint.partition(before)[2]))


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    return saved(tmp_path / "s.pt", {"w[0]": torch.eye(2).to_sparse(), "b": TWO})


def test_what_can_t_be_averaged_is_left_out(sparse: Path, cli: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("average", sparse, sparse, "mean.pt")
    assert ran.code == 3
    assert ran.err.endswith(f"leave them out: ckpttool convert {sparse} plain.pt --exclude 'w[[]0]'\n")
    assert "keep them" not in ran.err
    assert pasted(cli, ran.err).code == 0
    assert list(torch.load("plain.pt")) == ["b"]


def test_what_safetensors_can_t_hold_another_format_keeps(sparse: Path, cli: Any, tmp_path: Path) -> None:
    ran = cli("convert", sparse, tmp_path / "o.safetensors")
    assert f"hint: keep them: ckpttool convert {sparse} out.pt; or leave them out: " in ran.err


def test_a_dtype_that_can_t_be_averaged_has_a_command(cli: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path / "q.pt", {"w": torch.zeros(2).to(torch.float8_e4m3fn)})
    ran = cli("average", path, path, "mean.pt")
    assert ran.code == 3
    assert pasted(cli, ran.err).code == 0, ran.err
    assert torch.load("bf16.pt")["w"].dtype is torch.bfloat16


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_an_average_of_a_wrapped_file_and_a_plain_one_strips_the_prefix(
    wrapped_first: bool, cli: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    wrapped = saved(tmp_path / "w.pt", {"module.a": TWO, "module.b": TWO})
    files = [wrapped, saved(tmp_path / "p.pt", {"a": TWO, "b": TWO})]
    ran = cli("average", *(files if wrapped_first else files[::-1]), "mean.pt")
    assert ran.code == 3 and f"ckpttool strip-prefix {wrapped} plain.safetensors --prefix module." in ran.err
    assert pasted(cli, ran.err).code == 0


def test_a_name_without_an_ending_may_be_a_dcp_folder(cli: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "p.pt", {"a": TWO})
    ran = cli("convert", path, tmp_path / "folder")
    assert ran.code == 2 and f"ckpttool convert IN {tmp_path}/folder --to dcp" in ran.err


def test_the_folder_of_a_run_has_the_command_for_its_last_checkpoint(cli: Any, tmp_path: Path) -> None:
    for name in ("best.pt", "last.pt"):
        saved(tmp_path / name, {"w": TWO})
    (tmp_path / "log.jsonl").write_text("{}\n")
    os.utime(tmp_path / "last.pt", (1, 1))  # copied, say
    ran = cli("merge", tmp_path, tmp_path / "o.pt")
    assert ran.code == 3
    assert "is the folder of a training run, in which each checkpoint is a file: last.pt, best.pt" in ran.err
    assert f"{tmp_path}/last.pt: torch-zip" in pasted(cli, ran.err).out
    wanted = [f"{tmp_path}/last.pt", f"{tmp_path}/best.pt"]
    assert [entry["path"] for entry in cli("inspect", tmp_path, "--json").json["checkpoints"]] == wanted


def test_metrics_of_a_folder_name_its_files(cli: Any, tmp_path: Path) -> None:
    ran = cli("gather-metrics", tmp_path)
    assert ran.code == 3 and "is not a prediction file but a folder" in ran.err
    assert f"ckpttool gather-metrics {tmp_path}/*.safetensors" in ran.err


def test_two_entries_of_one_dotted_name_have_the_dicts_to_choose_from(cli: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "t.pt", {"a": {"b.c": TWO}, "a.b": {"c": TWO}})
    ran = cli("convert", path, tmp_path / "o.safetensors")
    assert ran.code == 3
    assert "hint: take one of the dicts: --state a or --state a.b\n" in ran.err
    assert cli("convert", path, tmp_path / "o.safetensors", "--state", "a").code == 0


@pytest.mark.parametrize("count", [2, 30])
def test_keys_that_differ_between_ranks_are_all_in_the_hint(count: int, cli: Any, tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(2)
    states = []
    for rank in (0, 1):
        norm(torch.randn(4, 2) + rank)
        own = {f"block.w{i}": torch.full((2,), float(rank)) for i in range(count)}
        states.append({**own, **{f"bn.{name}": t.clone() for name, t in norm.state_dict().items()}})
    files = [saved(tmp_path / f"r{rank}.pt", state) for rank, state in enumerate(states)]
    ran = cli("convert-batchnorm", *files, tmp_path / "o.pt")
    assert ran.code == 3
    flags = shlex.split(ran.err.partition("to take the first file's: ")[2])
    assert len(flags) == (4 if count == 2 else 2)
    assert cli("convert-batchnorm", *files, tmp_path / "o.pt", *flags).code == 0


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("conv*", "--only 'module.conv*' matches 1 of 3 keys"),
        ("0.weight", "--only '*.0.weight' matches 1 of 3 keys"),
        ("nothing", "the first key is 'module.conv.weight'"),
    ],
)
def test_a_pattern_that_matches_behind_a_prefix(pattern: str, hint: str, cli: Any, tmp_path: Path) -> None:
    keys = ("module.conv.weight", "module.fc.0.weight", "module.fc.1.weight")
    path = saved(tmp_path / "m.pt", dict.fromkeys(keys, TWO))
    ran = cli("convert", path, tmp_path / "o.pt", "--only", pattern)
    assert (ran.code, ran.err.partition("hint: ")[2]) == (1, f"{hint}\n")


def test_a_tie_that_is_there_already_is_nothing_to_do(cli: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "t.pt", {"a": TWO, "b": TWO, "c": torch.zeros(2)})
    ran = cli("convert", path, tmp_path / "o.pt", "--tie", "a=b")
    assert ran.code == 1 and f"nothing to do: {path}: 'a' and 'b' are one tensor already" in ran.err
    assert cli("convert", path, tmp_path / "o.pt", "--tie", "a=c").code == 3


@pytest.mark.parametrize(
    ("tree", "flags", "where"),
    [
        ({0: TWO, 1: TWO}, [], "the dict at the top"),
        ({"a": TWO, 3: TWO}, [], "the dict at the top"),
        ({"model": {0: TWO}}, [], "'model'"),
    ],
)
def test_a_dict_with_numbers_as_keys_is_named_with_one_of_them(
    tree: Any, flags: list[str], where: str, cli: Any, tmp_path: Path
) -> None:
    ran = cli("convert", saved(tmp_path / "n.pt", tree), tmp_path / "o.pt", "--to", "safetensors", *flags)
    assert ran.code == 3
    number = next(key for key in tree.get("model", tree) if isinstance(key, int))
    assert f"no dict of tensors by name, so no model's state: {where} has tensors, " in ran.err
    assert f"but its key {number} is no text\n" in ran.err


def test_a_tensor_of_too_many_axes_is_called_that(cli: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "axes.pt", {"a": TWO, "w": torch.zeros([1] * 70)})
    ran = cli("inspect", path)
    assert ran.code == 3
    assert "its pickle has a tensor of 70 axes, more than the 64 that are read here\n" in ran.err
