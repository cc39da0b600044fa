"""torchtitan's flat optimizer states, as torch's own `get_optimizer_state_dict` writes them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckpttool
from ckpttool.core.checkpoint.optimizer_names import rekeyed, to_indices, to_names
from ckpttool.core.checkpoint.optimizer_view import flattened, is_flat, nested
from ckpttool.errors import Refused
from ckpttool.inspecting.summary import summarize
from tests.support.comparing import assert_same
from tests.support.running import Cli, within

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = make(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in parameters.items() if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in parameters.items() if n.endswith("bias")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


MADE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.01),
    "two groups": decayed,
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "without state": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "tensor rate": lambda model: torch.optim.Adam(model.parameters(), torch.tensor(0.01), foreach=False),
}


def flat_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def nested_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(get_optimizer_state_dict(model, optimizer))


def titan(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torchtitan saves: the model's names at the top, the optimizer flat, the rest in dicts."""
    counts = {"step": torch.tensor(2), "ntokens_seen": torch.tensor(64)}
    rest = {"train_state": counts, "lr_scheduler": {"last_epoch": 2}}
    return {**model.state_dict(), "optimizer": flat_of(model, optimizer), **rest}


def loads(state: dict[str, Any], made: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load into another optimizer of the same making, and compare."""
    _, other = trained(MADE[made])
    for entry in other.state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    other.load_state_dict(copy.deepcopy(state))
    ours, theirs = other.state_dict(), optimizer.state_dict()
    assert_same(theirs["state"], ours["state"])
    mine, meant = ([group["params"] for group in each["param_groups"]] for each in (ours, theirs))
    assert mine == meant


@pytest.mark.parametrize("made", MADE)
def test_flat_and_nested_are_torch_s_own(made: str, tmp_path: Path) -> None:
    model, optimizer = trained(MADE[made])
    flat = flat_of(model, optimizer)
    assert is_flat(flat)
    torch.save(flat, tmp_path / "flat.pt")
    with ckpttool.open(tmp_path / "flat.pt") as checkpoint:
        named, _ = to_names(checkpoint)
        ckpttool.save(named, tmp_path / "named.pt")
        back, _ = rekeyed(named, to="flat")
        ckpttool.save(back, tmp_path / "back.pt")
    found = torch.load(tmp_path / "named.pt")
    assert_same(nested_of(model, optimizer)["state"], found["state"])
    assert_same(flat, torch.load(tmp_path / "back.pt"))
    loads(found, made, model, optimizer)


@pytest.mark.parametrize("made", MADE)
def test_a_merged_checkpoint_of_torchtitan_s_loads(made: str, cli: Cli, tmp_path: Path) -> None:
    model, optimizer = trained(MADE[made])
    dcp.save(titan(model, optimizer), checkpoint_id=tmp_path / "dcp", no_dist=True)
    ran = cli("merge", tmp_path / "dcp", tmp_path / "out.pt")
    assert ran.code == 0, ran.err
    merged = torch.load(tmp_path / "out.pt")
    loads(merged["optimizer"], made, model, optimizer)
    assert int(merged["train_state"]["step"]) == 2


def test_a_copy_in_dcp_stays_flat(cli: Cli, tmp_path: Path) -> None:
    model, optimizer = trained(MADE["AdamW"])
    dcp.save(titan(model, optimizer), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert cli("merge", tmp_path / "dcp", tmp_path / "copy/", "--to", "dcp").code == 0
    again = titan(*trained(MADE["momentum"]))
    flat = flat_of(model, optimizer)
    zeros = {key: torch.zeros_like(each) for key, each in flat.items() if isinstance(each, torch.Tensor)}
    again["optimizer"] = flat | zeros
    dcp.load(again, checkpoint_id=tmp_path / "copy", no_dist=True)
    for key, value in flat.items():
        assert_same(value, again["optimizer"][key])


def test_names_and_numbers_and_flat_again(cli: Cli, tmp_path: Path) -> None:
    model, optimizer = trained(MADE["two groups"])
    torch.save({"model": model.state_dict(), "optimizer": flat_of(model, optimizer)}, tmp_path / "in.pt")
    assert cli("optimizer", tmp_path / "in.pt", tmp_path / "numbers.pt", "--to", "indices").code == 0
    loads(torch.load(tmp_path / "numbers.pt")["optimizer"], "two groups", model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": nested_of(model, optimizer)}, tmp_path / "named.pt")
    assert cli("optimizer", tmp_path / "named.pt", tmp_path / "again.pt", "--to", "flat").code == 0
    assert_same(flat_of(model, optimizer), torch.load(tmp_path / "again.pt")["optimizer"])
    assert cli("optimizer", tmp_path / "again.pt", tmp_path / "x.pt", "--to", "flat").code == 1


def test_inspect_sums_it_up(cli: Cli, tmp_path: Path) -> None:
    model, optimizer = trained(MADE["two groups"])
    torch.save(titan(model, optimizer), tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        (row,) = summarize(checkpoint).optimizers
    assert (row.name, row.kind, row.parameters, len(row.settings)) == ("optimizer", "AdamW", 6, 2)
    shown = cli("inspect", tmp_path / "in.pt").out
    assert "AdamW" in shown and "param_groups.0.weight" not in shown


@pytest.mark.parametrize("place", ["top", "model"])
def test_split_cuts_it_into_files_of_the_optimizer(place: str, cli: Cli, tmp_path: Path) -> None:
    model, optimizer = trained(MADE["AdamW"])
    whole = titan(model, optimizer)
    if place == "model":
        whole = {"model": model.state_dict(), **{key: whole[key] for key in ("optimizer", "train_state")}}
    torch.save(whole, tmp_path / "in.pt")
    ran = cli("split", tmp_path / "in.pt", tmp_path / "out/", "--ranks", 2, "--as", "dtensor")
    assert ran.code == 0, ran.err
    for rank in range(2):
        names = {path.name for path in (tmp_path / "out").glob(f"*_rank_{rank}.pt")}
        assert names == {f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state")}
    with ckpttool.open(tmp_path / "out" / "model_world_size_2_rank_0.pt") as piece:
        assert {*piece.tree} == {*model.state_dict()}
    assert cli("merge", tmp_path / "out", tmp_path / "again.pt").code == 0
    loads(torch.load(tmp_path / "again.pt")["optimizer"], "AdamW", model, optimizer)


def test_prefixes_are_stripped_from_it_too(cli: Cli, tmp_path: Path) -> None:
    model, optimizer = trained(MADE["AdamW"])
    wrapped = nn.Module()
    wrapped.module = model
    flat = flat_of(wrapped, optimizer)
    torch.save({"model": wrapped.state_dict(), "optimizer": flat}, tmp_path / "in.pt")
    assert cli("strip-prefix", tmp_path / "in.pt", tmp_path / "out.pt").code == 0
    assert_same(flat_of(model, optimizer), torch.load(tmp_path / "out.pt")["optimizer"])


def test_nested_entries_of_a_parameter_stay_with_it() -> None:
    flat = {"state.a.block.0": 1, "state.a.b.step": 2}
    for name in ("a", "a.b"):
        flat |= {f"param_groups.{name}.lr": 0.1, f"param_groups.{name}.betas": (0.9, 0.95)}
    made = nested(flat)
    assert made["state"] == {"a": {"block": {"0": 1}}, "a.b": {"step": 2}}
    assert made["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a", "a.b"]}]
    assert flattened(made) == flat


NOT_FLAT: list[Any] = [{}, {"state.w": 1}, {"state.w.exp_avg": 1}, {"state.a.b": 1, "x": 2}, {1: 2}]
NOT_FLAT += [{"state": {}}, None, []]


@pytest.mark.parametrize("value", NOT_FLAT, ids=str)
def test_what_is_no_flat_optimizer(value: object) -> None:
    assert not is_flat(value)


def test_many_settings_and_long_names_take_little_time() -> None:
    flat = {f"param_groups.p{i}.lr": float(i) for i in range(50_000)}
    flat |= {f"state.{'.' * 100_000}{i}": 0.0 for i in range(20)}
    with within(5, time.process_time):
        nested(flat)


def test_momentum_of_another_shape_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(MADE["AdamW"])
    flat = flat_of(model, optimizer)
    flat["state.0.weight.exp_avg"] = torch.zeros(9)
    torch.save({"model": model.state_dict(), "optimizer": flat}, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint, pytest.raises(Refused, match="shape"):
        to_indices(checkpoint)
