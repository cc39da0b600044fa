"""ckpttool convert-batchnorm, as people and scripts use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

MODEL = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(12))

def with_instances():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True))
"""


def make_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(12))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """old.pt without counters, and two ranks of one run."""
    (tmp_path / "model.py").write_text(MODEL)
    net = make_net()
    old = {f"module.{k}": v for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save({"state_dict": old, "epoch": 7}, tmp_path / "old.pt")
    for rank in range(2):
        net[1].running_mean.fill_(rank)
        net[3].running_mean.fill_(rank)
        torch.save(net.state_dict(), tmp_path / f"rank{rank}.pt")
    return tmp_path


def test_missing_counters_are_added(folder: Path, cli: Any) -> None:
    ran = cli("convert-batchnorm", folder / "old.pt", folder / "out.pt", "--to", "sync")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("converted 2 BatchNorm layers for sync, 2 counters added -> ")
    saved = torch.load(folder / "out.pt", weights_only=True)
    assert saved["epoch"] == 7
    net = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())
    net.load_state_dict({k.removeprefix("module."): v for k, v in saved["state_dict"].items()}, strict=True)


def test_sync_records_the_kinds_of_a_model_and_plain_removes_them(folder: Path, cli: Any) -> None:
    spec = f"{folder}/model.py:net"
    out = folder / "sync.safetensors"
    ran = cli("convert-batchnorm", folder / "rank0.pt", out, "--to", "sync", "--model", spec)
    assert (ran.code, "2 kinds recorded" in ran.out) == (0, True), ran.err
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"batchnorm.kinds": '{"1": "BatchNorm2d", "3": "BatchNorm1d"}'}
    ran = cli("convert-batchnorm", out, folder / "back.safetensors", "--to", "plain", "--json")
    assert ran.json["restored"] == {"1": "BatchNorm2d", "3": "BatchNorm1d"}
    cli("convert", folder / "rank0.pt", folder / "straight.safetensors")
    assert (folder / "back.safetensors").read_bytes() == (folder / "straight.safetensors").read_bytes()


def test_removing_the_kinds_in_place_leaves_the_tensors_as_they_are(folder: Path, cli: Any) -> None:
    spec, file = f"{folder}/model.py:net", folder / "sync.safetensors"
    cli("convert-batchnorm", folder / "rank0.pt", file, "--to", "sync", "--model", spec)
    payload = file.read_bytes()[-60:]
    ran = cli("convert-batchnorm", file, file, "--to", "plain", "--force")
    assert (ran.code, file.read_bytes()[-60:]) == (0, payload), ran.err
    with safe_open(file, "pt") as opened:
        assert not opened.metadata()


def test_kinds_come_from_a_safetensors_file_into_a_torch_file(folder: Path, cli: Any) -> None:
    spec = f"{folder}/model.py:net"
    cli("convert", folder / "rank0.pt", folder / "in.safetensors")
    ran = cli(
        "convert-batchnorm", folder / "in.safetensors", folder / "o.pt", "--to", "sync", "--model", spec
    )
    assert (ran.code, ran.err) == (0, "")
    assert torch.load(folder / "o.pt")._metadata["1"] == {"kind": "BatchNorm2d"}


def test_ranks_are_pooled(folder: Path, cli: Any) -> None:
    ranks = [folder / "rank0.pt", folder / "rank1.pt"]
    ran = cli("convert-batchnorm", *ranks, folder / "out.pt", "--counts", "30,10", "--verify", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["layers"] == ["1", "3"]
    assert ran.json["pooled"] == ["1.running_mean", "1.running_var", "3.running_mean", "3.running_var"]
    state = torch.load(folder / "out.pt", weights_only=True)
    assert torch.allclose(state["1.running_mean"], torch.full((3,), 0.25))
    within = (30 * 29 / 30 + 10 * 9 / 10) / 40
    expected = (within + 0.25 * 0.75) * 40 / 39
    assert torch.allclose(state["1.running_var"], torch.full((3,), expected))
    make_net().load_state_dict(state, strict=True)


FORMS = {
    "shards": ["--to", "safetensors-sharded", "--shard-size", "200B"],
    "torch's shards": ["--to", "torch-sharded", "--shard-size", "200B"],
    "DCP": ["--to", "dcp"],
    "one file": ["--to", "safetensors"],
}


def digest(path: Path, cli: Any) -> Any:
    return cli("digest", path, "--json").json["digest"]


@pytest.mark.parametrize("form", [*FORMS, "legacy"])
def test_ranks_are_pooled_in_every_format(form: str, folder: Path, cli: Any) -> None:
    ranks = [folder / "rank0.pt", folder / "rank1.pt"]
    cli("convert-batchnorm", *ranks, folder / "expected.safetensors", "--counts", "30,10")
    inputs = [folder / f"in{rank}" for rank in range(2)]
    for source, path in zip(ranks, inputs, strict=True):
        if form == "legacy":
            torch.save(torch.load(source), path, _use_new_zipfile_serialization=False)
        else:
            assert cli("convert", source, path, *FORMS[form]).code == 0
    ran = cli("convert-batchnorm", *inputs, folder / "out.safetensors", "--counts", "30,10")
    assert ran.code == 0, ran.err
    assert digest(folder / "out.safetensors", cli) == digest(folder / "expected.safetensors", cli)


def test_the_way_back_of_a_sharded_folder_is_exact(folder: Path, cli: Any) -> None:
    one, sync, back = (folder / name for name in ("one", "sync", "back"))
    cli("convert", folder / "rank0.pt", one, *FORMS["shards"])
    model = f"{folder}/model.py:net"
    said = cli("convert-batchnorm", one, f"{sync}/", "--to", "sync", "--model", model).out
    assert "2 kinds recorded" in said
    assert cli("convert-batchnorm", sync, f"{back}/", "--to", "plain").code == 0
    assert digest(back, cli) == digest(one, cli) == digest(sync, cli)
    assert not any(b"batchnorm.kinds" in file.read_bytes() for file in back.iterdir())
    assert any(b"batchnorm.kinds" in file.read_bytes() for file in sync.iterdir())


def test_layers_can_have_counts_of_their_own(folder: Path, cli: Any) -> None:
    ranks = [folder / "rank0.pt", folder / "rank1.pt"]
    ran = cli("convert-batchnorm", *ranks, folder / "o.pt", "--counts", "1=30,10", "--counts", "20,20")
    assert ran.code == 0, ran.err
    state = torch.load(folder / "o.pt")
    assert (state["1.running_mean"][0].item(), state["3.running_mean"][0].item()) == (0.25, 0.5)


def test_cumulative_layers_weigh_ranks_by_their_counters(folder: Path, cli: Any) -> None:
    ranks = [folder / "rank0.pt", folder / "rank1.pt"]
    for path, counter in zip(ranks, (1, 3), strict=True):
        state = torch.load(path)
        state["1.num_batches_tracked"].fill_(counter)
        torch.save(state, path)
    ran = cli("convert-batchnorm", *ranks, folder / "o.pt", "--counts", "8,8", "--cumulative", "1")
    assert ran.code == 0, ran.err
    state = torch.load(folder / "o.pt")
    assert (state["1.running_mean"][0].item(), state["3.running_mean"][0].item()) == (0.75, 0.5)


def test_the_momentum_of_the_layers_adds_what_their_averages_lack(folder: Path, cli: Any) -> None:
    ranks = [folder / "rank0.pt", folder / "rank1.pt"]
    found = {}
    for name, flags in {"less": [], "one": ["--momentum", "1"], "usual": ["--momentum", "0.1"]}.items():
        ran = cli("convert-batchnorm", *ranks, folder / f"{name}.pt", "--counts", "2,2", *flags)
        assert (ran.code, ran.err) == (0, "")
        found[name] = torch.load(folder / f"{name}.pt")["1.running_var"]
    assert torch.equal(found["less"], found["one"])
    # Variances 1 of 2 + 2 values, means 0 and 1: 4/3 · (1/2 + 1/4), and then 1/4 · (1 − 1/19) more.
    assert torch.allclose(found["less"], torch.full((3,), 1.0))
    assert torch.allclose(found["usual"], torch.full((3,), 1 + 4 / 3 * 1 / 4 * 18 / 19))


def test_without_counts_the_result_says_that_equal_ones_are_assumed(folder: Path, cli: Any) -> None:
    ran = cli("convert-batchnorm", folder / "rank0.pt", folder / "rank1.pt", folder / "out.pt")
    assert ran.out.startswith(
        "pooled the statistics of 2 ranks in 2 BatchNorm layers, "
        "assuming equal counts (--counts gives others) -> "
    )


def test_a_dry_run_writes_nothing(folder: Path, cli: Any) -> None:
    ran = cli("convert-batchnorm", folder / "old.pt", folder / "out.pt", "--to", "plain", "--dry-run")
    assert (ran.code, (folder / "out.pt").exists()) == (0, False)


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["rank0.pt", "out.pt", "--to", "sync"], 1, "have the same keys"),
        (["rank0.pt", "out.pt"], 2, "--to is needed"),
        (["rank0.pt", "out.pt", "--to", "sync", "--counts", "3,4"], 2, "--counts is for several"),
        (["rank0.pt", "out.pt", "--to", "sync", "--cumulative", "*"], 2, "--cumulative is for several"),
        (["rank0.pt", "rank1.pt", "out.pt", "--cumulative", "x*"], 2, "no BatchNorm layer matches 'x*'"),
        (["old.pt", "out.pt", "--to", "plain", "--model", "model.py:with_instances"], 3, "'module.1' is no"),
        (["rank0.pt", "out.pt", "--to", "sync", "--momentum", "0.1"], 2, "--momentum is for several"),
        (["rank0.pt", "rank1.pt", "out.pt", "--momentum", "0.1"], 2, "needs --counts"),
        (["rank0.pt", "rank1.pt", "out.pt", "--counts", "3,4", "--momentum", "1.5"], 2, "at most 1"),
        (["rank0.pt", "rank1.pt", "out.pt", "--counts", "3,4", "--momentum", "nan"], 2, "at most 1"),
        (["rank0.pt", "rank1.pt", "out.pt", "--counts", "3"], 2, "2 files, 1 counts"),
        (["rank0.pt", "rank1.pt", "out.pt", "--counts", "3,x"], 2, "is not N0,N1"),
        (["rank0.pt", "old.pt", "out.pt"], 3, "is not as in"),
        (["rank0.pt", "rank0.pt", "out.pt"], 1, "the same statistics"),
        (["rank0.pt", "missing.pt", "out.pt"], 3, "missing.pt: no such file"),
        (["old.pt", "out.pt", "--to", "sync", "--model", "model.py:with_instances"], 3, "'module.1' is no"),
    ],
    ids=str,
)
def test_an_impossible_conversion_is_refused(
    arguments: list[str], code: int, said: str, folder: Path, cli: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(folder)
    ran = cli("convert-batchnorm", *arguments)
    assert (ran.code, said in ran.err) == (code, True), ran.err
    assert "hint:" in ran.err
    assert not (folder / "out.pt").exists()
