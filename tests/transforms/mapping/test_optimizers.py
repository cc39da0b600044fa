"""What an optimizer keeps of parameters follows them through the rules, and training goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.mapped import mapped, refusal, rules

FUSE = 'from = ["q.weight", "k.weight", "v.weight"]\nto = "qkv.weight"\n'
FUSE += "steps = [{ concat = 0, sizes = [4, 2, 2] }]"
TURN = 'from = "out.weight"\nto = "proj.weight"\nsteps = [{ transpose = [1, 0] }]'
NAME = 'from = "out.bias"\nto = "proj.bias"'
BY = rules(FUSE, TURN, NAME)


class Apart(nn.Module):
    """Attention without the attention: q, k and v of different sizes, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, size, bias=False) for size in (4, 2, 2))
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.q(x), self.k(x), self.v(x)], -1))


class Turned(nn.Module):
    """A linear layer whose weight is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(8, 5)), nn.Parameter(torch.zeros(5))


class Fused(nn.Module):
    """The same with q, k and v as one layer, and a transposed one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 8, bias=False)
        self.proj = Turned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x) @ self.proj.weight + self.proj.bias


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.1, amsgrad=True),
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    "plain": lambda named: torch.optim.SGD(named, lr=0.1),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(6, 3)).pow(2).sum().backward()
    optimizer.step()


def trained(
    make: Make, groups: Callable[[nn.Module], Any] = lambda m: m.named_parameters()
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Apart()
    optimizer = make(groups(model))
    for seed in range(3):
        step(model, optimizer, seed)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "live": (model, optimizer)}


def saved_of(run: dict[str, Any]) -> dict[str, Any]:
    return {"model": run["model"], "optimizer": run["optimizer"]}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    run = trained(OPTIMIZERS[kind])
    made, _ = mapped(saved_of(run), tmp_path, BY)
    model = Fused()
    model.load_state_dict(made["model"])
    optimizer = OPTIMIZERS[kind](model.named_parameters())
    optimizer.load_state_dict(made["optimizer"])
    assert made["optimizer"]["param_groups"][0]["param_names"] == ["qkv.weight", "proj.weight", "proj.bias"]
    old, its = run["live"]
    step(old, its, 9)
    step(model, optimizer, 9)
    fused = torch.cat([old.q.weight, old.k.weight, old.v.weight])
    torch.testing.assert_close(model.qkv.weight, fused, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.proj.weight.t(), old.out.weight, rtol=1e-5, atol=1e-6)


def by_name(run: dict[str, Any]) -> dict[str, Any]:
    names = run["optimizer"]["param_groups"][0]["param_names"]
    state = {names[number]: entry for number, entry in run["optimizer"]["state"].items()}
    group = {**run["optimizer"]["param_groups"][0], "params": names}
    del group["param_names"]
    return {"state": state, "param_groups": [group]}


def flat(run: dict[str, Any]) -> dict[str, Any]:
    nested = by_name(run)
    group = {key: value for key, value in nested["param_groups"][0].items() if key != "params"}
    state = {
        f"state.{name}.{key}": value
        for name, entry in nested["state"].items()
        for key, value in entry.items()
    }
    return state | {
        f"param_groups.{name}.{key}": value for name in nested["state"] for key, value in group.items()
    }


def test_every_form_of_an_optimizer_follows(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["adamw"])
    unnamed = {
        "state": run["optimizer"]["state"],
        "param_groups": [dict(run["optimizer"]["param_groups"][0])],
    }
    del unnamed["param_groups"][0]["param_names"]
    forms = {"names": by_name(run), "flat": flat(run), "numbers": run["optimizer"]}
    made = {
        form: mapped({"model": run["model"], "optimizer": its}, tmp_path, BY)[0]
        for form, its in forms.items()
    }
    old = by_name(run)["state"]
    moment = torch.cat([old[f"{each}.weight"]["exp_avg_sq"] for each in "qkv"])
    assert torch.equal(made["names"]["optimizer"]["state"]["qkv.weight"]["exp_avg_sq"], moment)
    assert torch.equal(made["flat"]["optimizer"]["state.qkv.weight.exp_avg_sq"], moment)
    assert torch.equal(made["numbers"]["optimizer"]["state"][0]["exp_avg_sq"], moment)
    turned = made["flat"]["optimizer"]["state.proj.weight.exp_avg"]
    assert torch.equal(turned, old["out.weight"]["exp_avg"].t())
    assert made["flat"]["optimizer"]["param_groups.qkv.weight.lr"] == 0.1
    assert made["names"]["optimizer"]["state"]["qkv.weight"]["step"] == 3
    back = mapped(made["numbers"], tmp_path, BY.inverse())[0]["optimizer"]
    assert back["param_groups"] == run["optimizer"]["param_groups"]
    assert all(
        torch.equal(back["state"][n][key], value)
        for n, e in run["optimizer"]["state"].items()
        for key, value in e.items()
    )


def test_what_nobody_stepped_stays_without_a_state(tmp_path: Path) -> None:
    model = Apart()
    fresh = torch.optim.AdamW(model.named_parameters()).state_dict()
    made, _ = mapped({"model": model.state_dict(), "optimizer": fresh}, tmp_path, BY)
    assert made["optimizer"]["state"] == {}
    assert made["optimizer"]["param_groups"][0]["params"] == [0, 1, 2]


def test_numbers_stay_where_rules_only_rename(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["adamw"])
    del run["optimizer"]["param_groups"][0]["param_names"]
    names = [f'from = "{old}"\nto = "new.{old}"' for old in run["model"]]
    run["model"]["k.weight"] = run["model"]["k.weight"].clone()  # k and v of one shape: no names are certain
    made, _ = mapped(saved_of(run), tmp_path, rules(*names))
    assert [*made["model"]] == [f"new.{old}" for old in run["model"]]
    assert made["optimizer"]["param_groups"] == run["optimizer"]["param_groups"]


def test_an_average_of_the_weights_is_changed_too(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["plain"])
    average = {name: tensor + 1 for name, tensor in run["model"].items()}
    made, report = mapped({"model": run["model"], "ema": average}, tmp_path, BY)
    assert report.also == ("ema",)
    assert torch.equal(made["ema"]["proj.weight"], average["out.weight"].t())


def test_an_average_that_does_not_fit_is_named_and_left_alone_where_it_is_left_out(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["plain"])
    average = {name: tensor for name, tensor in run["model"].items() if name != "out.bias"}
    tree = {"model": run["model"], "ema": average}
    assert "in.pt, ema: the rule 'out.bias' -> 'proj.bias' finds no tensor" in refusal(tree, tmp_path, BY)
    made, _ = mapped(tree, tmp_path, BY, optimizers=False)
    assert [*made["ema"]] == [*average] and "qkv.weight" in made["model"]


def test_parameters_whose_names_are_numbers_stay_keyed_by_numbers(tmp_path: Path) -> None:
    state = {"0": torch.ones(2, 3), "1": torch.ones(4)}
    moments = {n: {"exp_avg": state[str(n)] * 2} for n in range(2)}
    group = {"params": [0, 1], "param_names": ["0", "1"]}
    by = rules('from = "{n}"\nto = "w.{n}"', top='rest = "keep"')
    tree = {"model": state, "optimizer": {"state": moments, "param_groups": [group]}}
    made = mapped(tree, tmp_path, by)[0]["optimizer"]
    assert (made["param_groups"][0]["params"], [*made["state"]]) == ([0, 1], [0, 1])
    assert made["param_groups"][0]["param_names"] == ["w.0", "w.1"]


# What can't follow.


def change(run: dict[str, Any], how: str) -> dict[str, Any]:
    """Return a checkpoint whose optimizer is no longer like its model, or keeps something else."""
    optimizer = run["optimizer"]
    state, group = optimizer["state"], optimizer["param_groups"][0]
    if how == "another step":
        state[1]["step"] = torch.tensor(2.0)
    elif how == "factored":
        for number in range(3):
            state[number] = {"exp_avg_sq_row": torch.ones(4 - number)}
    elif how == "one never stepped":
        del state[1]
    elif how == "other entries":
        del state[1]["exp_avg"]
    elif how == "unknown names":
        group["param_names"][4] = "module.out.bias"
    elif how == "a part only":
        group["params"].remove(1)
        group["param_names"].remove("k.weight")
        del state[1]
    return saved_of(run)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("another step", "keeps another 'step' of 'q.weight' and 'k.weight'"),
        ("factored", "keeps 'exp_avg_sq_row' of 'q.weight' in another shape"),
        ("one never stepped", "keeps other things of 'k.weight' than of 'q.weight'"),
        ("other entries", "keeps other things of 'k.weight' than of 'q.weight'"),
        ("unknown names", "would keep 'module.out.bias', which the state does not have"),
        ("a part only", "keeps 'q.weight' and not 'k.weight', which the rule"),
    ],
)
def test_what_can_t_follow_is_refused_by_name(how: str, said: str, tmp_path: Path) -> None:
    tree = change(trained(OPTIMIZERS["adamw"]), how)
    tree["opt_g"] = tree.pop("optimizer")
    message = refusal(tree, tmp_path, BY)
    assert said in message and "its optimizer" in message and "--drop opt_g" in message


@pytest.mark.parametrize("verb", ["scale = 2.0", 'cast = "bf16"'])
def test_values_that_change_leave_the_moments_behind_and_are_refused(verb: str, tmp_path: Path) -> None:
    names = [f'from = "{name}"\nto = "{name}"' for name in ("q.weight", "k.weight", "v.weight", "out.weight")]
    by = rules(*names, f'from = "out.bias"\nto = "out.bias"\nsteps = [{{ {verb} }}]')
    run = saved_of(trained(OPTIMIZERS["adamw"]))
    assert f"keeps 'out.bias', whose state can't follow '{verb.split()[0]}'" in refusal(run, tmp_path, by)
    assert mapped(run, tmp_path, by, optimizers=False)[0]["optimizer"]["state"]


def test_two_groups_do_not_become_one(tmp_path: Path) -> None:
    run = trained(
        OPTIMIZERS["sgd"],
        lambda model: [
            {"params": [each for each in model.named_parameters() if each[0] != "k.weight"]},
            {"params": [("k.weight", model.k.weight)], "lr": 1.0},
        ],
    )
    said = refusal(saved_of(run), tmp_path, BY)
    assert "has 'q.weight' and 'k.weight' in two groups" in said


def test_unnamed_parameters_of_one_shape_are_refused_with_the_way_out(tmp_path: Path) -> None:
    run = trained(OPTIMIZERS["adamw"])
    del run["optimizer"]["param_groups"][0]["param_names"]
    said = refusal(saved_of(run), tmp_path, BY)
    assert "names no parameters, and more than one assignment" in said and "--model SPEC" in said


def test_what_is_dropped_leaves_the_optimizer_too(tmp_path: Path) -> None:
    by = rules(FUSE, TURN, 'drop = "out.bias"')
    made, report = mapped(saved_of(trained(OPTIMIZERS["adamw"])), tmp_path, by)
    assert report.dropped == ("out.bias",)
    assert made["optimizer"]["param_groups"][0]["param_names"] == ["qkv.weight", "proj.weight"]
    assert [*made["optimizer"]["state"]] == [0, 1]
