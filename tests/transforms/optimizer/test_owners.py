"""An optimizer changes with the state whose parameters it keeps, and with no other."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.errors import Refused
from ckpttool.transforms.mapping.applying import apply
from ckpttool.transforms.mapping.rule_file import rules_in
from tests.support.running import Cli
from tests.support.saved import loaded, opened, refused, saved

RULES = """
from = "a"
to = "b"
rest = "keep"
[[rule]]
from = "fc.weight"
to = "lin.weight"
steps = [{ transpose = [1, 0] }]
"""


def net(size: int = 3) -> nn.Module:
    return nn.Sequential(OrderedDict(fc=nn.Linear(size, size), out=nn.Linear(size, size)))


def stepped(model: nn.Module, *, named: bool = True) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.named_parameters() if named else model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def two_models(other: int = 3, *, named: bool = True) -> dict[str, Any]:
    """Return a file of two models of the same names, each with its optimizer."""
    one, two = net(), net(other)
    states = {"generator": one.state_dict(), "discriminator": two.state_dict()}
    return {**states, "opt_g": stepped(one, named=named), "opt_d": stepped(two, named=named)}


def names(optimizer: dict[str, Any]) -> list[str]:
    return [name for group in optimizer["param_groups"] for name in group["param_names"]]


def changed(kind: str, tree: dict[str, Any], folder: Path, state: str | None) -> Any:
    """Return what torch loads after a state got other names, or names and a turned matrix."""
    with opened(tree, folder) as checkpoint:
        if kind == "rename":
            new, _ = ckpttool.rename_keys(checkpoint, [("fc", "lin")], state=state)
        else:
            new, _ = apply(checkpoint, rules_in(RULES), state=state)
        return loaded(new, folder)


@pytest.mark.parametrize("kind", ["rename", "map"])
def test_the_optimizer_of_a_model_of_other_shapes_stays(kind: str, tmp_path: Path) -> None:
    tree = two_models(4)
    new = changed(kind, tree, tmp_path, "generator")
    assert "lin.weight" in new["generator"] and "lin.weight" in names(new["opt_g"])
    assert names(new["opt_d"]) == list(new["discriminator"]) == list(tree["discriminator"])
    assert torch.equal(new["opt_d"]["state"][0]["exp_avg"], tree["opt_d"]["state"][0]["exp_avg"])


@pytest.mark.parametrize("kind", ["rename", "map"])
def test_one_that_fits_a_model_that_changes_and_one_that_does_not_is_refused(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match="optimizer 'opt_g' may be of 'generator' or of 'discriminator'") as why:
        changed(kind, two_models(), tmp_path, "generator")
    assert "--drop opt_g" in (why.value.hint or "")


def test_numbers_are_told_apart_by_shapes_where_more_than_names_changes(tmp_path: Path) -> None:
    # As in reinforcement learning: two critics of one shape.
    tree = two_models(named=False)
    assert changed("rename", tree, tmp_path, "generator")["opt_d"].keys() == tree["opt_d"].keys()
    with pytest.raises(Refused, match="may be of 'generator' or of 'discriminator'"):
        changed("map", tree, tmp_path, "generator")


@pytest.mark.parametrize("kind", ["rename", "map"])
def test_an_average_has_no_optimizer(kind: str, tmp_path: Path) -> None:
    model = net()
    tree = {"model": model.state_dict(), "ema": net().state_dict(), "optimizer": stepped(model)}
    new = changed(kind, tree, tmp_path, "ema")
    assert "lin.weight" in new["ema"] and names(new["optimizer"]) == list(new["model"])
    assert torch.equal(new["optimizer"]["state"][0]["exp_avg"], tree["optimizer"]["state"][0]["exp_avg"])
    for state in ("model", None):
        new = changed(kind, tree, tmp_path, state)
        assert names(new["optimizer"]) == list(new["model"])
        assert ("lin.weight" in new["ema"]) is (state is None)
    alone = changed(kind, {"ema": tree["ema"], "optimizer": tree["optimizer"]}, tmp_path, None)
    assert names(alone["optimizer"]) == list(alone["ema"])


@pytest.mark.parametrize("where", ["encoder", "model.encoder", "!decoder"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_optimizer_of_a_whole_model_knows_a_part_of_it_by_longer_names(
    where: str, nested: bool, tmp_path: Path
) -> None:
    model = nn.ModuleDict({"encoder": net(), "decoder": net()})
    parts = {name: part.state_dict() for name, part in model.items()}
    tree = {"model": parts if nested else model.state_dict(), "optimizer": stepped(model)}
    with opened(tree, tmp_path) as checkpoint:
        new, _ = ckpttool.rename_keys(checkpoint, [("fc", "lin")], state=where)
        state, whole = new.state("model"), loaded(new, tmp_path)
        assert {*names(whole["optimizer"])} == {*state}
        assert names(whole["optimizer"])[0] == "encoder.lin.weight"
        assert names(whole["optimizer"])[4] == "decoder.fc.weight"
        assert names(whole["optimizer"]) == list(state)  # the part stays at its place
    if where != "!decoder":
        with opened(tree, tmp_path) as checkpoint:
            refused_map = {"opened": lambda _: apply(checkpoint, rules_in(RULES), state=where)}
            refused(Path(), "encoder.fc.weight", Refused, **refused_map)


@pytest.mark.parametrize(("where", "first"), [("module", "fc.weight"), ("!module", "lin.weight")])
def test_an_average_in_the_model_s_own_dict_is_told_from_the_model(
    where: str, first: str, tmp_path: Path
) -> None:
    model = net()
    both = {**model.state_dict(), "n_averaged": torch.tensor(3)}
    both |= {f"module.{name}": value.clone() for name, value in model.state_dict().items()}
    new = changed("rename", {"model": both, "optimizer": stepped(model)}, tmp_path, where)
    assert names(new["optimizer"])[0] == first and {*names(new["optimizer"])} <= {*new["model"]}


def complex_net() -> nn.Module:
    model = nn.ModuleDict({"fc": nn.Linear(3, 5), "square": nn.Linear(3, 3)})
    model.register_parameter("c", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    return model


FORMS = {
    "square.weight": ["--permute", "square.weight=1,0"],
    "fc.weight": ["--reshape", "fc.weight=5,3,1,1"],
    "c": ["--complex", "split"],
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("named", [True, False])
def test_momentum_does_not_stay_in_another_form_than_its_parameter(
    name: str, named: bool, cli: Cli, tmp_path: Path
) -> None:
    model = complex_net()
    tree = {"model": model.state_dict(), "ema": model.state_dict(), "optimizer": stepped(model, named=named)}
    saved(tree, tmp_path / "in.pt")
    ran = cli("convert", tmp_path / "in.pt", tmp_path / "out.pt", *FORMS[name])
    assert ran.code == 3 and "its optimizer 'optimizer' keeps momentum of" in ran.err
    assert (f"'{name}'" in ran.err or not named) and not (tmp_path / "out.pt").exists()
    for more in (["--drop", "optimizer"], ["--state", "ema"]):
        assert (
            cli("convert", tmp_path / "in.pt", tmp_path / "out.pt", *FORMS[name], *more, "--force").code == 0
        )
    assert cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors", *FORMS[name]).code == 0


def test_what_keeps_no_momentum_is_no_obstacle_to_another_form(cli: Cli, tmp_path: Path) -> None:
    model = net()
    kept = {**stepped(model), "state": {}}
    saved({"model": model.state_dict(), "optimizer": kept}, tmp_path / "in.pt")
    assert cli("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--permute", "fc.weight=1,0").code == 0
    saved({"model": model.state_dict(), "optimizer": stepped(model, named=False)}, tmp_path / "in.pt")
    assert cli("convert", tmp_path / "in.pt", tmp_path / "same.pt", "--permute", "fc.weight=0,1").code == 0
    head = stepped(nn.ModuleDict({"out": model.get_submodule("out")}))
    saved({"model": model.state_dict(), "optimizer": head}, tmp_path / "in.pt")
    assert cli("convert", tmp_path / "in.pt", tmp_path / "a.pt", "--permute", "fc.weight=1,0").code == 0


def test_a_map_that_does_not_fit_an_average_of_a_few_parameters_says_what_to_do_with_it(
    tmp_path: Path,
) -> None:
    model = net().state_dict()
    few = {name: model[name] for name in ("out.weight", "out.bias")}
    checkpoint = opened({"model": model, "ema": few}, tmp_path)
    with pytest.raises(Refused, match=r"in.pt, ema: the rule .* finds no tensor") as caught:
        apply(checkpoint, rules_in(RULES))
    assert str(caught.value.hint).startswith("leave it out by --drop ema, or as it is by --state model; ")
    new, _ = apply(checkpoint, rules_in(RULES), state="model")
    assert (list(new.tree["ema"]), "lin.weight" in new.tree["model"]) == ([*few], True)
