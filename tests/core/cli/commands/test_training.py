"""ckpttool convert-batchnorm, optimizer and average: what a training leaves, for another training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

MODELS = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(12))

def with_instances():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True))

def layers(order):
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in order})
"""
DEFINED: dict[str, Any] = {}
exec(MODELS, DEFINED)


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    """Save old.pt without counters, two ranks of one run, in.pt with an optimizer, and three epochs."""
    Path("models.py").write_text(MODELS)
    net = DEFINED["net"]()
    old = {f"module.{k}": v for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save({"state_dict": old, "epoch": 7}, "old.pt")
    for rank in range(2):
        net[1].running_mean.fill_(rank)
        net[3].running_mean.fill_(rank)
        torch.save(net.state_dict(), f"rank{rank}.pt")
    layers = DEFINED["layers"]("ab")
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    layers["b"](layers["a"](torch.ones(1, 4))).sum().backward()
    optimizer.step()
    torch.save({"model": layers.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, "in.pt")
    for i in (0, 1, 5):
        state = {"w": torch.full((3,), float(i)), "n": torch.tensor(i), "bn.running_var": torch.ones(1) * i}
        torch.save({"model": state, "epoch": i}, f"epoch{i}.pt")


# convert-batchnorm, for SyncBatchNorm and back.


def test_missing_counters_are_added(cli: Any) -> None:
    ran = cli("convert-batchnorm old.pt out.pt --to sync")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("converted 2 BatchNorm layers for sync, 2 counters added -> ")
    saved = torch.load("out.pt", weights_only=True)
    assert saved["epoch"] == 7
    net = nn.SyncBatchNorm.convert_sync_batchnorm(DEFINED["net"]())
    net.load_state_dict({k.removeprefix("module."): v for k, v in saved["state_dict"].items()}, strict=True)


def test_sync_records_the_kinds_of_a_model_and_plain_removes_them(cli: Any) -> None:
    kinds = {"1": "BatchNorm2d", "3": "BatchNorm1d"}
    ran = cli("convert-batchnorm rank0.pt sync.safetensors --to sync --model models.py:net")
    assert (ran.code, "2 kinds recorded" in ran.out) == (0, True), ran.err
    with safe_open("sync.safetensors", "pt") as file:
        assert file.metadata() == {"batchnorm.kinds": '{"1": "BatchNorm2d", "3": "BatchNorm1d"}'}
    ran = cli("convert-batchnorm sync.safetensors back.safetensors --to plain --json")
    assert ran.json["restored"] == kinds
    cli("convert rank0.pt straight.safetensors")
    assert Path("back.safetensors").read_bytes() == Path("straight.safetensors").read_bytes()
    payload = Path("sync.safetensors").read_bytes()[-60:]
    ran = cli("convert-batchnorm sync.safetensors sync.safetensors --to plain --force")  # in place
    assert (ran.code, Path("sync.safetensors").read_bytes()[-60:]) == (0, payload), ran.err
    with safe_open("sync.safetensors", "pt") as file:
        assert not file.metadata()
    ran = cli("convert-batchnorm straight.safetensors o.pt --to sync --model models.py:net")
    assert (ran.code, ran.err) == (0, "")
    assert torch.load("o.pt")._metadata["1"] == {"kind": "BatchNorm2d"}


SHARDS = "--to safetensors-sharded --shard-size 200B"


def digest(path: str, cli: Any) -> Any:
    return cli(f"digest {path} --json").json["digest"]


def test_the_way_back_of_a_sharded_folder_is_exact(cli: Any) -> None:
    cli(f"convert rank0.pt one {SHARDS}")
    assert "2 kinds recorded" in cli("convert-batchnorm one sync/ --to sync --model models.py:net").out
    assert cli("convert-batchnorm sync back/ --to plain").code == 0
    assert digest("back", cli) == digest("one", cli) == digest("sync", cli)
    assert not any(b"batchnorm.kinds" in file.read_bytes() for file in Path("back").iterdir())
    assert any(b"batchnorm.kinds" in file.read_bytes() for file in Path("sync").iterdir())


# convert-batchnorm, pooling the statistics of ranks.


def test_ranks_are_pooled(cli: Any) -> None:
    ran = cli("convert-batchnorm rank0.pt rank1.pt out.pt --counts 30,10 --verify --json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["layers"] == ["1", "3"]
    assert ran.json["pooled"] == ["1.running_mean", "1.running_var", "3.running_mean", "3.running_var"]
    DEFINED["net"]().load_state_dict(torch.load("out.pt", weights_only=True), strict=True)


@pytest.mark.parametrize(
    "form", [SHARDS, "--to torch-sharded --shard-size 200B", "--to dcp", "--to safetensors", "legacy"]
)
def test_ranks_are_pooled_in_every_format(form: str, cli: Any) -> None:
    cli("convert-batchnorm rank0.pt rank1.pt expected.safetensors --counts 30,10")
    for rank in range(2):
        if form == "legacy":
            torch.save(torch.load(f"rank{rank}.pt"), f"in{rank}", _use_new_zipfile_serialization=False)
        else:
            assert cli(f"convert rank{rank}.pt in{rank} {form}").code == 0
    ran = cli("convert-batchnorm in0 in1 out.safetensors --counts 30,10")
    assert ran.code == 0, ran.err
    assert digest("out.safetensors", cli) == digest("expected.safetensors", cli)


def test_layers_can_have_counts_of_their_own(cli: Any) -> None:
    ran = cli("convert-batchnorm rank0.pt rank1.pt o.pt --counts 1=30,10 --counts 20,20")
    assert ran.code == 0, ran.err
    state = torch.load("o.pt")
    assert (state["1.running_mean"][0].item(), state["3.running_mean"][0].item()) == (0.25, 0.5)


def test_cumulative_layers_weigh_ranks_by_their_counters(cli: Any) -> None:
    for path, counter in (("rank0.pt", 1), ("rank1.pt", 3)):
        state = torch.load(path)
        state["1.num_batches_tracked"].fill_(counter)
        torch.save(state, path)
    ran = cli("convert-batchnorm rank0.pt rank1.pt o.pt --counts 8,8 --cumulative 1")
    assert ran.code == 0, ran.err
    state = torch.load("o.pt")
    assert (state["1.running_mean"][0].item(), state["3.running_mean"][0].item()) == (0.75, 0.5)


def test_the_momentum_of_the_layers_adds_what_their_averages_lack(cli: Any) -> None:
    found = {}
    for name, flags in {"less": "", "one": "--momentum 1", "usual": "--momentum 0.1"}.items():
        ran = cli(f"convert-batchnorm rank0.pt rank1.pt {name}.pt --counts 2,2 {flags}")
        assert (ran.code, ran.err) == (0, "")
        found[name] = torch.load(f"{name}.pt")["1.running_var"]
    assert torch.equal(found["less"], found["one"])
    assert (found["usual"] > found["less"]).all()


def test_without_counts_the_result_says_that_equal_ones_are_assumed(cli: Any) -> None:
    said = cli("convert-batchnorm rank0.pt rank1.pt out.pt").out
    assert said.startswith("pooled the statistics of 2 ranks in 2 BatchNorm layers, assuming equal counts ")
    assert "layers, assuming equal counts (--counts gives others) -> " in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("rank0.pt out.pt --to sync", 1, "have the same keys"),
        ("rank0.pt out.pt", 2, "--to is needed"),
        ("rank0.pt out.pt --to sync --counts 3,4", 2, "--counts is for several"),
        ("rank0.pt out.pt --to sync --cumulative *", 2, "--cumulative is for several"),
        ("rank0.pt rank1.pt out.pt --cumulative x*", 2, "no BatchNorm layer matches 'x*'"),
        ("old.pt out.pt --to plain --model models.py:with_instances", 3, "'module.1' is no"),
        ("rank0.pt out.pt --to sync --momentum 0.1", 2, "--momentum is for several"),
        ("rank0.pt rank1.pt out.pt --momentum 0.1", 2, "needs --counts"),
        ("rank0.pt rank1.pt out.pt --counts 3,4 --momentum 1.5", 2, "at most 1"),
        ("rank0.pt rank1.pt out.pt --counts 3,4 --momentum nan", 2, "at most 1"),
        ("rank0.pt rank1.pt out.pt --counts 3", 2, "2 files, 1 counts"),
        ("rank0.pt rank1.pt out.pt --counts 3,x", 2, "is not N0,N1"),
        ("rank0.pt old.pt out.pt", 3, "is not as in"),
        ("rank0.pt rank0.pt out.pt", 1, "the same statistics"),
        ("rank0.pt missing.pt out.pt", 3, "missing.pt: no such file"),
        ("old.pt out.pt --to sync --model models.py:with_instances", 3, "'module.1' is no"),
    ],
)
def test_an_impossible_conversion_is_refused(arguments: str, code: int, said: str, cli: Any) -> None:
    ran = cli(f"convert-batchnorm {arguments}")
    assert (ran.code, said in ran.err, "hint:" in ran.err) == (code, True, True), ran.err
    assert not os.path.exists("out.pt")


# optimizer


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_to_names_and_back_keeps_everything_else(ending: str, cli: Any) -> None:
    ran = cli(f"optimizer in.pt named{ending} --to names --order state")
    assert ran.code == 0, ran.err
    assert "it names no parameters: they were taken in the order of the file's state" in ran.err
    assert ran.out.startswith(f"keyed 1 optimizer of 4 parameters by names -> named{ending} (")
    if ending == ".pt":
        wanted = ["a.weight", "a.bias", "b.weight", "b.bias"]
        assert list(torch.load("named.pt", weights_only=True)["optimizer"]["state"]) == wanted
    assert cli(f"optimizer named{ending} back.pt --to indices").code == 0
    assert cli("diff in.pt back.pt").code == 0


def test_the_order_of_another_model(cli: Any) -> None:
    command = ("optimizer in.pt out.pt --to indices --model", "models.py:layers(order='ba')")
    ran = cli(*command)
    assert ran.code == 3 and "orders that both fit" in ran.err and "--order state" in ran.err
    ran = cli(*command, "--order", "state", "--json")
    assert (ran.code, ran.json["moved"], ran.json["parameters"]) == (0, 4, 4)
    assert ran.json["ordered"] == ["optimizer"]
    assert (
        cli("optimizer in.pt out.pt --to indices --force --model", "models.py:layers(order='ab')").code == 1
    )


def test_what_can_not_be_known_is_exit_3_and_a_file_without_an_optimizer_exit_1(cli: Any) -> None:
    torch.save(torch.load("in.pt", weights_only=True)["optimizer"], "in.pt")
    ran = cli("optimizer in.pt out.pt --to names")
    assert ran.code == 3 and "names no parameters" in ran.err and "--model SPEC" in ran.err
    assert cli("optimizer epoch0.pt out.pt --to names").code == 1
    assert cli("optimizer epoch0.pt out.pt").code == 2


def test_a_state_can_be_named(cli: Any) -> None:
    assert cli("optimizer in.pt out.pt --to names --order state --state model").code == 0
    assert "epoch" in torch.load("out.pt", weights_only=True)


# average

EPOCHS = "epoch0.pt epoch1.pt epoch5.pt"


def test_the_mean_is_written_and_what_is_not_averaged_is_said(cli: Any) -> None:
    ran = cli(f"average {EPOCHS} mean.pt")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("averaged 2 tensors of 3 files -> mean.pt (")
    assert "have no mean, and differ: taken from epoch5.pt: n" in ran.err
    assert "1 running statistics of BatchNorm were averaged too" in ran.err
    assert "left out: epoch" in ran.err
    found = torch.load("mean.pt", weights_only=True)
    assert (found["w"].tolist(), found["n"].item()) == ([2.0] * 3, 5)


def test_weights_json_dry_run_and_force(cli: Any) -> None:
    command = f"average {EPOCHS} mean.safetensors"
    ran = cli(f"{command} --weights 0,3,1 --json --dry-run")
    assert (ran.code, ran.json["files"], ran.json["averaged"], ran.json["dry_run"]) == (0, 3, 2, True)
    assert ran.json["taken_from_last"] == ["n"] and not os.path.exists("mean.safetensors")
    assert cli(f"{command} --weights 0,3,1 --verify").code == 0
    assert (cli("inspect mean.safetensors").code, cli(command).code) == (0, 2)
    assert cli(f"{command} --force").code == 0
    for wrong in ("1,2", "a,b,c", "0,0,0", "1,-1,1"):
        assert cli(f"{command} --force --weights {wrong}").code == 2


def test_other_structures_are_refused_with_the_command_that_tells_more(cli: Any) -> None:
    torch.save({"model": {"w": torch.ones(4)}}, "epoch1.pt")
    ran = cli(f"average {EPOCHS} mean.pt")
    assert ran.code == 3 and "hint: ckpttool diff --model-only" in ran.err
    assert cli("average epoch0.pt mean.pt").code == 2


def test_other_methods_say_what_they_did_and_refuse_what_has_no_effect(cli: Any) -> None:
    torch.save({"model": {"w": torch.zeros(3), "n": torch.tensor(0)}}, "base.pt")
    torch.save({"model": {"w": torch.tensor([1.0, -4, 2]), "n": torch.tensor(0)}}, "a.pt")
    ran = cli("average a.pt ties.pt --method ties --base base.pt --density 0.7 --lambda 0.5")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("merged 1 tensor of 1 file by ties -> ties.pt (")
    assert torch.load("ties.pt", weights_only=True)["w"].tolist() == [0, -2, 1]
    ran = cli("average base.pt a.pt half.pt --method slerp --t 0.5 --json")
    assert (ran.json["method"], ran.json["files"], ran.json["overflows"]) == ("slerp", 2, 0)
    torch.save({"model": {"w": torch.tensor([2.0, -8, 4]), "n": torch.tensor(0)}}, "b.pt")
    ran = cli("average a.pt b.pt line.pt --method slerp")
    assert "too nearly parallel for slerp, so merged linearly: w" in ran.err
    assert torch.load("line.pt", weights_only=True)["w"].tolist() == [1.5, -6, 3]
    for wrong in ("--method task", "--t 0.5", "--method ties --base base.pt --density 2", "--method magic"):
        assert cli(f"average a.pt b.pt no.pt {wrong}").code == 2, wrong
    assert cli("average a.pt no.pt --method task --base missing.pt").code == 3
