"""An optimizer's parameters: renamed, rekeyed, checked; and which optimizer a change of the state reaches."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckpttool
from ckpttool.core.checkpoint.keys import rename_parameters
from ckpttool.core.checkpoint.optimizer_names import by_shapes, in_order, rekeyed, to_indices, to_names
from ckpttool.core.inert_pickle.values import OrderedDict_
from ckpttool.errors import NothingToDo, Refused, UsageFault
from ckpttool.mapping.applying import apply
from ckpttool.mapping.rule_file import rules_in
from ckpttool.models.fit import Misfit, mismatched_order
from tests.support.comparing import assert_same, loaded, opened, prefixed, refused, saved
from tests.support.running import Cli

# ---- Parameters of an optimizer's state: renamed, checked against a model, keyed by name and by index -


NAMES = {"module.a": "a", "module.b": "b"}


def group(params: list[Any], *names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"lr": 0.1, "params": params, **({"param_names": [*names]} if names else {}), **more}]


@pytest.mark.parametrize(
    ("state", "groups", "wanted"),
    [
        ({0: {"step": 1}, 1: {}}, group([0, 1], "module.a", "module.b"), group([0, 1], "a", "b")),
        ({"module.b": 2, "module.a": 1}, group(["module.b", "module.a"]), group(["b", "a"])),
        ({"x": 1}, group(["x"], "x", "module.a"), group(["x"], "x", "a")),
    ],
    ids=["beside indices", "by name", "unknown"],
)
def test_names_are_renamed_in_their_order(state: Any, groups: Any, wanted: Any) -> None:
    renamed = rename_parameters({"state": state, "param_groups": groups}, NAMES)
    assert renamed["param_groups"] == wanted
    assert list(renamed["state"].items()) == [(NAMES.get(key, key), value) for key, value in state.items()]


def test_other_entries_and_the_original_are_not_changed() -> None:
    groups = group([0], "module.a", **{"betas": (0.9, 0.99), "module.a": 1})
    optimizer: dict[str, Any] = {"state": {}, "param_groups": groups, "module.a": "kept"}
    renamed = rename_parameters(optimizer, NAMES)
    assert (renamed["module.a"], renamed["param_groups"][0]["module.a"]) == ("kept", 1)
    assert optimizer["param_groups"][0]["param_names"] == ["module.a"]


@pytest.mark.parametrize(
    "odd", [{"state": 1, "param_groups": 2}, {"state": {}, "param_groups": [None, {"params": 3}]}], ids=str
)
def test_malformed_optimizers_are_returned_as_they_are(odd: dict[str, Any]) -> None:
    assert rename_parameters(odd, NAMES) == odd


def test_an_ordered_state_keeps_its_kind_and_attributes() -> None:
    state, optimizer = OrderedDict_({"module.a": 1}), OrderedDict_()
    state.attributes, optimizer.attributes = {"x": 1}, {"y": 2}
    optimizer.update({"state": state, "param_groups": []})
    renamed = rename_parameters(optimizer, NAMES)
    assert isinstance(renamed, OrderedDict_) and isinstance(renamed["state"], OrderedDict_)
    assert (renamed.attributes, renamed["state"].attributes) == ({"y": 2}, {"x": 1})


# Whether a state loaded by index fits the parameters, with real optimizers as torch saves them.


SCALES = {"a": 0.3, "b": 0.7, "c": 1.1}


class Net(torch.nn.Module):
    """A net of two layers of one shape and one of another, created in the given order."""

    def __init__(self, order: str = "abc") -> None:
        super().__init__()
        layers = {"a": (4, 4), "b": (4, 4), "c": (4, 2)}
        for name in order:
            self.add_module(name, torch.nn.Linear(*layers[name]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)).tanh())  # type: ignore[no-any-return, operator]


def trained(order: str = "abc", named: bool = False, groups: bool = False, **given: Any) -> tuple[Net, Any]:
    """Return a net and its optimizer after a step; the gradients do not depend on the order."""
    net = Net(order)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * SCALES[name[0]])
    make = given.pop("make", torch.optim.AdamW)
    optimizer = make(parameters_of(net, named, groups), **{"lr": 0.1, **given})
    step(net, optimizer)
    return net, optimizer


def parameters_of(net: torch.nn.Module, named: bool, groups: bool) -> Any:
    """Return the arguments of an optimizer: all parameters, or weights and biases in separate groups."""
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
def test_momentum_in_the_order_of_the_model_fits(named: bool, groups: bool) -> None:
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
def test_swapped_layers_of_one_shape_are_found_by_the_names_in_the_file(groups: bool) -> None:
    _, optimizer = trained("abc", named=True, groups=groups)
    check = mismatched_order({}, optimizer.state_dict(), shapes(Net("bac")))
    assert (check.shapes, check.order) == ((), ())
    assert check.names[0] == Misfit(0, "b.weight", "a.weight", "b.weight")


def test_swapped_layers_without_names_are_found_by_the_order_of_the_state() -> None:
    net, optimizer = trained("abc", make=torch.optim.SGD, momentum=0.9)
    wrapped = prefixed(net.state_dict(), "module.")
    for state in (net.state_dict(), wrapped):
        check = mismatched_order(state, optimizer.state_dict(), shapes(Net("bac")))
        assert (check.shapes, check.names) == ((), ())
        assert check.order[0] == Misfit(0, "b.weight", "a.weight", "b.weight")
    assert mismatched_order({}, optimizer.state_dict(), shapes(Net("bac"))).fits  # nothing tells


def test_a_state_that_its_own_optimizer_does_not_fit_proves_nothing() -> None:
    net, optimizer = trained("abc")
    upside_down = dict(reversed(net.state_dict().items()))
    assert mismatched_order(upside_down, optimizer.state_dict(), shapes(net)).fits


def test_a_prefix_on_the_names_is_no_misfit_and_an_unknown_name_is_one() -> None:
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
def test_an_optimizer_that_cannot_be_compared_says_why(odd: Any, problem: str) -> None:
    assert problem in mismatched_order({}, odd, {"w": (1,)}).problem


# Keyed by name, and back to indices.


def tree_of(net: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD without momentum": (torch.optim.SGD, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}),
    "LBFGS": (torch.optim.LBFGS, {}),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("named", [False, True])
def test_to_names_and_back_restores_the_file(maker: str, named: bool, tmp_path: Path) -> None:
    make, given = MAKERS[maker]
    net, optimizer = trained(make=make, named=named and maker != "LBFGS", **given)
    tree = tree_of(net, optimizer) | {"epoch": 3}
    by_name, done = to_names(opened(tree, tmp_path), order="state")
    found = loaded(by_name, tmp_path)["optimizer"]
    names = list(shapes(net))
    is_named = "param_names" in tree["optimizer"]["param_groups"][0]
    assert done.ordered == (() if is_named else ("optimizer",))
    assert found["param_groups"][0]["params"] == names
    assert set(found["state"]) <= set(names)
    assert (done.optimizers, done.parameters, done.moved) == (("optimizer",), 6, 0)
    back, _ = to_indices(ckpttool.open(tmp_path / "out.pt"))
    assert_same(loaded(back, tmp_path), tree)


@pytest.mark.parametrize("groups", [False, True])
def test_the_state_by_name_equals_the_one_torch_writes(groups: bool, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net, optimizer = trained(groups=groups)
    tree = tree_of(net, optimizer)
    found = loaded(to_names(opened(tree, tmp_path), parameters=shapes(net))[0], tmp_path)["optimizer"]
    theirs = get_optimizer_state_dict(net, optimizer)
    ours = [group["params"] for group in found["param_groups"]]
    assert ours == [group["params"] for group in theirs["param_groups"]]
    assert_same(dict(sorted(found["state"].items())), dict(sorted(theirs["state"].items())))


@pytest.mark.parametrize("maker", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("order", ["bac", "cab", "acb"])
def test_the_next_step_after_reordering_equals_the_original_bit_for_bit(
    maker: str, groups: bool, order: str, tmp_path: Path
) -> None:
    make, given = MAKERS[maker]
    net, optimizer = trained("abc", make=make, groups=groups, **given)
    tree = tree_of(net, optimizer)
    other = Net(order)
    new, done = to_indices(opened(tree, tmp_path), parameters=shapes(other), order="state")
    found = loaded(new, tmp_path)
    other.load_state_dict(found["model"])
    theirs = make(parameters_of(other, False, groups), **{"lr": 0.5, **given})
    theirs.load_state_dict(found["optimizer"])
    step(net, optimizer, seed=1)
    step(other, theirs, seed=1)
    assert done.moved and (done.absent == ())
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_every_optimizer_of_a_file_is_keyed(tmp_path: Path) -> None:
    net, first = trained()
    other = torch.nn.Linear(3, 5)
    second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    other(torch.ones(1, 3)).sum().backward()
    second.step()
    tree: dict[str, Any] = {"generator": net.state_dict(), "discriminator": other.state_dict()}
    tree["optimizers"] = [first.state_dict(), second.state_dict()]
    new, done = to_names(opened(tree, tmp_path), order="state")
    found = loaded(new, tmp_path)["optimizers"]
    assert done.optimizers == ("optimizers.0", "optimizers.1")
    assert done.ordered == ("optimizers.0",)  # the shapes of the other are certain
    assert set(found[1]["state"]) == {"weight", "bias"} and "a.weight" in found[0]["state"]


def test_keys_that_dcp_turned_into_text_become_numbers_again(tmp_path: Path) -> None:
    net, optimizer = trained()
    tree = tree_of(net, optimizer)
    as_text = {**tree["optimizer"], "state": {str(k): v for k, v in tree["optimizer"]["state"].items()}}
    new, _ = to_indices(opened({**tree, "optimizer": as_text}, tmp_path))
    assert_same(loaded(new, tmp_path), tree)


def test_buffers_and_ties_are_not_counted_as_parameters(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    net[2].weight = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    tree = tree_of(net, optimizer)
    found = loaded(to_names(opened(tree, tmp_path), order="state")[0], tmp_path)["optimizer"]
    assert found["param_groups"][0]["params"] == [name for name, _ in net.named_parameters()]


# Which parameter is which, without names.


def new_layers_first(layers: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return a checkpoint whose optimizer was given the last layer's parameters before the others'."""
    net = torch.nn.Sequential()
    for name, sizes in layers.items():
        net.add_module(name, torch.nn.Linear(*sizes))
    *first, last = net.children()
    parameters = [parameter for layer in (last, *first) for parameter in layer.parameters()]
    optimizer = torch.optim.Adam(parameters)
    net(torch.ones(3, layers["body"][0])).square().sum().backward()
    optimizer.step()
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in net.named_parameters()}
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "moments": [moments]}


SQUARE = {"body": (4, 4), "head": (4, 4)}
HEAD_FIRST = {"head.weight": (4, 4), "head.bias": (4,), "body.weight": (4, 4), "body.bias": (4,)}
BODY_FIRST = {name: HEAD_FIRST[name] for name in ("body.weight", "body.bias", "head.weight", "head.bias")}


def moments_of(folder: Path, checkpoint: ckpttool.Checkpoint) -> dict[str, Any]:
    state = loaded(checkpoint, folder)["optimizer"]["state"]
    return {name: state[name]["exp_avg"] for name in BODY_FIRST}


def test_shapes_that_are_all_different_name_parameters_in_any_order(tmp_path: Path) -> None:
    tree = new_layers_first({"body": (3, 4), "head": (4, 5)})
    new, done = to_names(opened(tree, tmp_path))
    assert done.ordered == ()
    assert_same(moments_of(tmp_path, new), tree["moments"][0])


def test_an_order_that_is_not_that_of_the_file_s_state_must_be_said(tmp_path: Path) -> None:
    tree = new_layers_first(SQUARE)
    checkpoint = opened(tree, tmp_path)
    with pytest.raises(Refused, match="more than one assignment of the state's tensors fits") as caught:
        to_names(checkpoint)  # the order of the model is no evidence by itself
    assert "--model SPEC" in str(caught.value.hint) and "--order state" in str(caught.value.hint)
    with pytest.raises(UsageFault, match="needs the model"):
        to_names(checkpoint, order="model")
    with pytest.raises(Refused, match="orders that both fit") as caught:
        to_names(checkpoint, parameters=HEAD_FIRST)
    assert "--order model" in str(caught.value.hint)
    new, done = to_names(checkpoint, parameters=HEAD_FIRST, order="model")
    assert done.ordered == ("optimizer",)
    assert_same(moments_of(tmp_path, new), tree["moments"][0])
    by_word = to_names(checkpoint, parameters=BODY_FIRST)[1]  # of the order in which the optimizer lists them
    assert by_word.ordered == ("optimizer",)


# Trainable parameters alone, as fine-tuning gives them to an optimizer.


@pytest.mark.parametrize("frozen", ["a", "b", "c", "ab", ""])
@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("order", [None, "model", "state"])
def test_an_optimizer_of_trainable_parameters_gets_their_names(
    frozen: str, prefix: str, order: Any, tmp_path: Path
) -> None:
    net = Net()
    for name, parameter in net.named_parameters():
        parameter.requires_grad = name[0] not in frozen
    named = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)
    step(net, optimizer)
    state = {f"{prefix}{name}": value for name, value in net.state_dict().items()}
    live: Any = {"parameters": shapes(net), "trainable": [name for name, _ in named]}
    checkpoint = opened({"model": state, "optimizer": optimizer.state_dict()}, tmp_path)
    new, done = to_names(checkpoint, order=order, **live)
    found = loaded(new, tmp_path)["optimizer"]["state"]
    names = [name for name, _ in named]
    assert [*found] in ([f"{prefix}{name}" for name in names], names)
    for momentum, (_, parameter) in zip(found.values(), named, strict=True):
        assert torch.equal(momentum["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])
    assert done.absent == tuple(name for name in shapes(net) if name[0] in frozen)


def test_one_of_all_parameters_keeps_the_frozen_ones(tmp_path: Path) -> None:
    net = Net()
    net.a.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step(net, optimizer)
    live: Any = {"parameters": shapes(net), "trainable": [name for name in shapes(net) if name[0] != "a"]}
    new, done = to_names(opened(tree_of(net, optimizer), tmp_path), order="model", **live)
    assert loaded(new, tmp_path)["optimizer"]["param_groups"][0]["params"] == [*shapes(net)]
    assert done.absent == ()


def test_the_word_of_a_model_that_freezes_others_is_not_taken_against_the_shapes(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.c.parameters(), lr=0.1, momentum=0.9)
    step(net, optimizer)
    live: Any = {"parameters": shapes(net), "trainable": ["a.weight", "a.bias"]}
    new, _ = to_names(opened(tree_of(net, optimizer), tmp_path), **live)
    assert [*loaded(new, tmp_path)["optimizer"]["state"]] == ["c.weight", "c.bias"]


def test_the_average_that_mmcv_keeps_beside_the_model_is_no_parameter(tmp_path: Path) -> None:
    net = torch.nn.Sequential(OrderedDict(body=torch.nn.Linear(3, 4), head=torch.nn.Linear(4, 5)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    averages = {f"ema_{name.replace('.', '_')}": value + 1 for name, value in net.state_dict().items()}
    tree = {"state_dict": {**net.state_dict(), **averages}, "optimizer": optimizer.state_dict()}
    new, _ = to_names(opened(tree, tmp_path))
    assert [*loaded(new, tmp_path)["optimizer"]["state"]] == [*net.state_dict()]


# Refusals.


def test_groups_with_ambiguous_parameters_are_refused(tmp_path: Path) -> None:
    net = Net()
    groups = [{"params": net.a.parameters()}, {"params": net.b.parameters()}]
    optimizer = torch.optim.SGD([*groups, {"params": net.c.parameters()}], lr=0.1, momentum=0.9)
    step(net, optimizer)
    tree = tree_of(net, optimizer)
    with pytest.raises(Refused, match="more than one assignment") as caught:
        to_names(opened(tree, tmp_path))
    assert "--model" in str(caught.value.hint)
    with pytest.raises(Refused, match="no model's state that would"):
        to_names(opened(optimizer.state_dict(), tmp_path))
    with pytest.raises(Refused, match="no assignment"):
        to_names(opened({**tree, "model": {"w": torch.ones(7)}}, tmp_path))


def test_parameters_are_neither_added_nor_dropped_and_have_the_shape_of_the_model(tmp_path: Path) -> None:
    net, optimizer = trained(named=True)
    checkpoint = opened(tree_of(net, optimizer), tmp_path)
    live = shapes(net)
    with pytest.raises(Refused, match=r"keeps 'b\.bias', which the model does not have"):
        to_indices(checkpoint, parameters={name: live[name] for name in live if name != "b.bias"})
    with pytest.raises(Refused, match=r"momentum of shape \[2, 4\] for 'c.weight'.* is \[5, 4\]"):
        to_indices(checkpoint, parameters={**live, "c.weight": (5, 4)})
    done = to_names(checkpoint, parameters={**live, "new": (1,)})[1]
    assert done.absent == ("new",)


def test_names_that_contradict_the_file_s_own_shapes_are_refused(tmp_path: Path) -> None:
    net, optimizer = trained(named=True)
    swapped = rename_parameters(optimizer.state_dict(), {"a.bias": "c.bias", "c.bias": "a.bias"})
    with pytest.raises(Refused, match=r"\[4\] for 'c.bias', whose shape in the file is \[2\]"):
        to_names(opened({"model": net.state_dict(), "optimizer": swapped}, tmp_path))


def test_reordering_lbfgs_is_refused(tmp_path: Path) -> None:
    net, optimizer = trained(make=torch.optim.LBFGS)
    checkpoint = opened(tree_of(net, optimizer), tmp_path)
    with pytest.raises(Refused, match="LBFGS"):
        to_indices(checkpoint, parameters=shapes(Net("bac")), order="state")


def test_nothing_to_do_is_an_error(tmp_path: Path) -> None:
    net, optimizer = trained(named=True)
    tree = tree_of(net, optimizer)
    with pytest.raises(NothingToDo, match="by numbers in this order already"):
        to_indices(opened(tree, tmp_path), parameters=shapes(net))
    by_name = to_names(opened(tree, tmp_path))[0]
    with pytest.raises(NothingToDo, match="by names in this order already"):
        to_names(by_name)
    with pytest.raises(NothingToDo, match="no optimizer"):
        to_names(opened(net.state_dict(), tmp_path))


def test_names_of_a_wrapped_model_match_those_of_the_live_model(tmp_path: Path) -> None:
    net, optimizer = trained("abc")
    tree = tree_of(net, optimizer) | {"model": prefixed(net.state_dict(), "module.")}
    new, done = to_indices(opened(tree, tmp_path), parameters=shapes(Net("cab")))
    assert done.moved == 6
    assert loaded(new, tmp_path)["optimizer"]["state"][0]["exp_avg"].shape == (2, 4)


# Parameters by the shapes of their momentum.


SHAPES = st.lists(st.sampled_from([(1,), (2,), (3, 3), (4,)]), max_size=5)


@given(parameters=SHAPES, groups=st.integers(1, 3), data=st.data())
def test_an_assignment_in_order_is_certain_exactly_when_it_is_the_only_one(
    parameters: list[tuple[int, ...]], groups: int, data: st.DataObject
) -> None:
    def held(way: Any) -> list[list[tuple[int, ...]]]:
        """Return the shapes that each group holds if its parameters are chosen in this way."""
        return [[p for p, g in zip(parameters, way, strict=True) if g == group] for group in range(groups)]

    count = len(parameters)
    kept = held(data.draw(st.lists(st.integers(-1, groups - 1), min_size=count, max_size=count)))
    found = in_order(kept, [(f"p{i}", shape) for i, shape in enumerate(parameters)])
    every = {
        tuple(f"p{i}" for group in range(groups) for i, g in enumerate(way) if g == group)
        for way in itertools.product(range(-1, groups), repeat=count)
        if held(way) == kept
    }
    assert set(found) <= every
    assert len(found) == min(len(every), 2)


@given(parameters=SHAPES, places=st.lists(st.sampled_from([None, (1,), (2,), (3, 3), (4,)]), max_size=4))
def test_an_assignment_in_any_order_is_certain_exactly_when_it_is_the_only_one(
    parameters: list[tuple[int, ...]], places: list[tuple[int, ...] | None]
) -> None:
    named = [(f"p{i}", shape) for i, shape in enumerate(parameters)]
    every = {
        tuple(name for name, _ in way)
        for way in itertools.permutations(named, len(places))
        if all(place in (None, shape) for place, (_, shape) in zip(places, way, strict=True))
    }
    found = by_shapes(places, named)
    assert set(found) <= every
    assert len(found) == min(len(every), 2)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"d": {0: torch.ones(1)}}, r"keeps '0' \(int\) in 'state.a.d'"),
        ({"d": {"x.y": torch.ones(1)}}, r"keeps 'x.y' \(str\) in 'state.a.d'"),
        ({"x.y": torch.ones(1)}, r"keeps 'x.y' \(str\) in 'state.a'"),
        ({"step": 1, "d": {"e": {}}}, "keeps an empty dict as 'state.a.d.e'"),
    ],
)
def test_what_a_flat_state_can_not_give_back_is_refused_by_name(
    entry: Any, said: str, tmp_path: Path
) -> None:
    optimizer = {"state": {"a": entry}, "param_groups": group(["a"])}
    with pytest.raises(Refused, match=said) as caught:
        rekeyed(opened({"model": {"a": torch.ones(2)}, "optimizer": optimizer}, tmp_path), "flat")
    assert caught.value.hint == "--to names keeps it"


@pytest.mark.parametrize("to", ["names", "indices", "flat"])
def test_a_state_under_a_number_and_another_under_its_text_is_refused(to: Any, tmp_path: Path) -> None:
    state = {0: {"exp_avg": torch.ones(2)}, "0": {"exp_avg": torch.zeros(2)}}
    tree = {"model": {"a": torch.ones(2)}, "optimizer": {"state": state, "param_groups": group([0], "a")}}
    with pytest.raises(Refused, match="keeps two states of parameter 0"):
        rekeyed(opened(tree, tmp_path), to)


def test_settings_that_a_flat_state_can_not_give_back_are_refused_by_name(tmp_path: Path) -> None:
    optimizer = {"state": {"a": {}}, "param_groups": group(["a"], **{"x.y": 1})}
    with pytest.raises(Refused, match=r"keeps 'x.y' \(str\) in 'param_groups.0'"):
        rekeyed(opened({"model": {"a": torch.ones(2)}, "optimizer": optimizer}, tmp_path), "flat")


# ---- An optimizer changes with the state whose parameters it keeps, and with no other -----------------


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
