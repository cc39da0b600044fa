"""Parameters renamed inside an optimizer's state, whatever it is keyed by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpttool.inert import OrderedDict_
from ckpttool.optimizer import Misfit, mismatched_order, rename_parameters

NAMES = {"module.a": "a", "module.b": "b"}


def test_names_beside_indices_are_renamed_and_indices_stay() -> None:
    optimizer = {
        "state": {0: {"step": 1}, 1: {"step": 2}},
        "param_groups": [{"lr": 0.1, "params": [0, 1], "param_names": ["module.a", "module.b"]}],
    }
    assert rename_parameters(optimizer, NAMES) == {
        "state": {0: {"step": 1}, 1: {"step": 2}},
        "param_groups": [{"lr": 0.1, "params": [0, 1], "param_names": ["a", "b"]}],
    }


def test_a_state_by_name_is_renamed_in_its_order() -> None:
    optimizer = {
        "state": {"module.b": 2, "module.a": 1},
        "param_groups": [{"params": ["module.b", "module.a"]}],
    }
    renamed = rename_parameters(optimizer, NAMES)
    assert list(renamed["state"].items()) == [("b", 2), ("a", 1)]
    assert renamed["param_groups"][0]["params"] == ["b", "a"]


def test_names_that_are_not_known_stay() -> None:
    optimizer = {"state": {"x": 1}, "param_groups": [{"params": ["x"], "param_names": ["x", "module.a"]}]}
    assert rename_parameters(optimizer, NAMES)["param_groups"][0]["param_names"] == ["x", "a"]


def test_nothing_else_is_touched_and_the_original_is_not_changed() -> None:
    optimizer: dict[str, Any] = {
        "state": {},
        "param_groups": [{"params": [0], "param_names": ["module.a"], "betas": (0.9, 0.99), "module.a": 1}],
        "module.a": "kept",
    }
    renamed = rename_parameters(optimizer, NAMES)
    assert renamed["module.a"] == "kept"
    assert renamed["param_groups"][0]["module.a"] == 1
    assert optimizer["param_groups"][0]["param_names"] == ["module.a"]


@pytest.mark.parametrize(
    "odd", [{"state": 1, "param_groups": 2}, {"state": {}, "param_groups": [None, {"params": 3}]}], ids=str
)
def test_what_only_looks_like_an_optimizer_goes_through(odd: dict[str, Any]) -> None:
    assert rename_parameters(odd, NAMES) == odd


def test_an_ordered_state_stays_one_with_its_attributes() -> None:
    state, optimizer = OrderedDict_({"module.a": 1}), OrderedDict_()
    state.attributes, optimizer.attributes = {"x": 1}, {"y": 2}
    optimizer.update({"state": state, "param_groups": []})
    renamed = rename_parameters(optimizer, NAMES)
    assert isinstance(renamed, OrderedDict_) and isinstance(renamed["state"], OrderedDict_)
    assert (renamed.attributes, renamed["state"].attributes) == ({"y": 2}, {"x": 1})


# Whether a state loaded by index meets the parameters it belongs to. Real optimizers, as torch saves them.


class Net(torch.nn.Module):
    """Two layers of the same shape and one of another, made in the order that is asked for."""

    def __init__(self, order: str = "abc") -> None:
        super().__init__()
        layers = {"a": (4, 4), "b": (4, 4), "c": (4, 2)}
        for name in order:
            self.add_module(name, torch.nn.Linear(*layers[name]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)).tanh())  # type: ignore[no-any-return, operator]


def trained(order: str = "abc", named: bool = False, groups: bool = False, **given: Any) -> tuple[Net, Any]:
    """A net and its optimizer after a step; the gradients do not depend on the order."""
    net = Net(order)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (1 + len(name)))
    make = given.pop("make", torch.optim.AdamW)
    optimizer = make(parameters_of(net, named, groups), **{"lr": 0.1, **given})
    step(net, optimizer)
    return net, optimizer


def parameters_of(net: torch.nn.Module, named: bool, groups: bool) -> Any:
    """What a script hands to an optimizer: all parameters, or weights and biases in groups of their own."""
    pairs = list(net.named_parameters())
    chosen = [pairs]
    if groups:
        chosen = [[pair for pair in pairs if (pair[1].ndim > 1) is matrices] for matrices in (True, False)]
    lists = [group if named else [parameter for _, parameter in group] for group in chosen]
    return [{"params": part, "weight_decay": 0.1 * i} for i, part in enumerate(lists)] if groups else lists[0]


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    optimizer.zero_grad()
    x = torch.linspace(-1, 1, 12).view(3, 4) + seed
    net(x).square().sum().backward()
    optimizer.step(*([lambda: 0.0] if isinstance(optimizer, torch.optim.LBFGS) else []))


def shapes(net: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("groups", [False, True])
def test_momentum_in_the_model_s_own_order_fits(named: bool, groups: bool) -> None:
    net, optimizer = trained(named=named, groups=groups)
    check = mismatched_order(net.state_dict(), optimizer.state_dict(), shapes(net))
    assert check.fits
    assert bool(check.problem) == (groups and not named)  # nothing tells which parameter is in which group


def test_momentum_of_another_shape_than_the_parameter_at_its_place_is_found() -> None:
    _, optimizer = trained("abc")
    check = mismatched_order({}, optimizer.state_dict(), shapes(Net("acb")))
    assert not check.fits
    assert check.shapes == (
        Misfit(2, "c.weight", "[4, 4]", "[2, 4]"),
        Misfit(3, "c.bias", "[4]", "[2]"),
        Misfit(4, "b.weight", "[2, 4]", "[4, 4]"),
        Misfit(5, "b.bias", "[2]", "[4]"),
    )


@pytest.mark.parametrize("groups", [False, True])
def test_layers_of_one_shape_that_changed_places_are_found_by_the_names_in_the_file(groups: bool) -> None:
    _, optimizer = trained("abc", named=True, groups=groups)
    check = mismatched_order({}, optimizer.state_dict(), shapes(Net("bac")))
    assert (check.shapes, check.order) == ((), ())
    assert check.names[0] == Misfit(0, "b.weight", "a.weight", "b.weight")


def test_without_names_they_are_found_by_the_order_of_the_state_beside_it() -> None:
    net, optimizer = trained("abc", make=torch.optim.SGD, momentum=0.9)
    wrapped = {f"module.{name}": tensor for name, tensor in net.state_dict().items()}
    for state in (net.state_dict(), wrapped):
        check = mismatched_order(state, optimizer.state_dict(), shapes(Net("bac")))
        assert (check.shapes, check.names) == ((), ())
        assert check.order[0] == Misfit(0, "b.weight", "a.weight", "b.weight")
    assert mismatched_order({}, optimizer.state_dict(), shapes(Net("bac"))).fits  # nothing tells


def test_a_state_in_an_order_that_its_own_optimizer_does_not_fit_says_nothing() -> None:
    net, optimizer = trained("abc")
    upside_down = dict(reversed(net.state_dict().items()))
    assert mismatched_order(upside_down, optimizer.state_dict(), shapes(net)).fits


def test_a_wrapper_s_prefix_on_the_names_is_no_misfit_and_an_unknown_name_is_one() -> None:
    net, optimizer = trained(named=True)
    saved = optimizer.state_dict()
    wrapped = rename_parameters(saved, {name: f"module.{name}" for name in shapes(net)})
    assert mismatched_order({}, wrapped, shapes(net)).fits
    other = rename_parameters(saved, {"b.bias": "d.bias"})
    unknown = Misfit(3, "", "d.bias", "no such parameter")
    assert mismatched_order({}, other, shapes(net)).names == (unknown,)


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        ({"state": 1, "param_groups": []}, "usual form"),
        ({"state": {}, "param_groups": [{"params": 3}]}, "without a list"),
        ({"state": {}, "param_groups": [{"params": [0, 0]}]}, "twice"),
        ({"state": {5: {}}, "param_groups": [{"params": [0]}]}, "in no group"),
        ({"state": {}, "param_groups": [{"params": [0], "param_names": []}]}, "0 names"),
    ],
)
def test_what_no_optimizer_would_load_is_said(odd: Any, problem: str) -> None:
    assert problem in mismatched_order({}, odd, {"w": (1,)}).problem
