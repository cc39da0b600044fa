"""`--optimizer file.py:factory`: what a factory gets and may return, and that its state can be resumed."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.errors import UsageFault
from tests.ranks import runs, trainings
from train.config.sections import OptimizerConfig, TrainConfig
from train.data.samples import digest_of
from train.model import groups
from train.model import optimizer as optimizers
from train.model.updater import Updater

OWN = """
import numpy, torch
from torch.optim import SGD, AdamW, Optimizer

def of_params(params, lr=0.5, betas=(0.5, 0.5)):
    return AdamW(params, lr, betas)

def of_model(model, lr=0.2):
    head = [{"params": model[2].parameters(), "lr": 10 * lr}, {"params": []}]
    return SGD([{"params": model[0].parameters()}, *head], lr)

def anything(**given):
    return SGD(given["params"], given.get("lr", 0.1))

def nothing(): return SGD([torch.nn.Parameter(torch.ones(1))])
def no_optimizer(params): return [params]
def stranger(model): return SGD([*model.parameters(), torch.nn.Parameter(torch.ones(2, 3))], 0.1)
def part(model): return SGD(model[0].parameters(), 0.1)
def broken(params): raise KeyError("lost")
def twice(model):
    made = SGD(model.parameters(), 0.1)
    made.param_groups.append({**made.param_groups[0]})
    return made
def tensor_rate(params): return AdamW(params, lr=torch.tensor(0.1))

class Forgetful(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.steps = 0
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] / self.steps)

class Tenth(SGD):  # does something in each tenth step
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.count, self.begun = 0, False
    def step(self, closure=None):
        super().step()
        self.count, self.begun = self.count + 1, True

class Often(SGD):  # counts by name, and keeps a large tensor: the text of that is the same
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.counts, self.slow = {"steps": 0}, [torch.zeros(2000)]
    def step(self, closure=None):
        super().step()

class Named(Often):
    def step(self, closure=None):
        super().step()
        self.counts["steps"] += 1

class Large(Often):
    def step(self, closure=None):
        super().step()
        self.slow[0][1000] += 1

class OfAll(Often):
    def step(self, closure=None):
        super().step()
        self.state["steps"] = {"number": 1}

class ByNumber(Often):
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p][0] = 1.0

class Rounding(Often):  # its state is another after loading, of which the next step shows nothing
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            wide = self.state[p].setdefault("sum", torch.zeros_like(p, dtype=torch.float64))
            wide.add_(p.grad.double() / 3)
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = self.state[p]["sum"].half()

class Wide(Optimizer):
    # keeps sums in float64, counts as integers, and a text
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    wide = torch.zeros_like(p, dtype=torch.float64)
                    state.update(nested=[{"sum": wide}], count=torch.zeros(3, dtype=torch.int64), rule="mean")
                assert state["rule"] == "mean"
                state["nested"][0]["sum"].mul_(0.9).add_(p.grad.double())
                state["count"][1] += 1
                p.data.sub_(state["nested"][0]["sum"].to(p.dtype), alpha=group["lr"])

class Warming(SGD):  # its momentum rises
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr, momentum=0.5)
    def step(self, closure=None):
        for group in self.param_groups:
            group["momentum"] += 0.01
        super().step()

class Objects(Forgetful):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = object

class Beside(Forgetful):
    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

class Hooked(SGD):  # halves its weights after each step
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.register_step_post_hook(self.halve)
    def halve(self, *_):
        [p.data.mul_(0.5) for p in self.param_groups[0]["params"]]

class Numpy(Often):
    def step(self, closure=None):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["norm"] = numpy.float64(1)

class Restless(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad + torch.rand_like(p), alpha=group["lr"])
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def config(spec: str, **settings: Any) -> OptimizerConfig:
    return TrainConfig.of(
        optimizer=spec, **{"lr": None, "momentum": None, "weight_decay": None, **settings}
    ).optimizer


def test_a_factory_gets_the_groups_by_rule_and_the_flags_that_are_given(own):
    settings = config(f"{own}:of_params", lr=0.1, lr_scale=("^2=3",), betas=(0.8, 0.9))
    optimizers.check(settings, model(), "net")
    made = optimizers.build_optimizer(settings, model(), "module.")
    found = [(group["param_names"], group["lr"], group["betas"]) for group in made.param_groups]
    assert found[0] == (["module.0.weight"], 0.1, (0.8, 0.9))
    assert found[1] == (["module.2.weight"], pytest.approx(0.3), (0.8, 0.9))
    assert [group["weight_decay"] for group in made.param_groups] == [0.01, 0.01, 0.0, 0.0]
    plain = optimizers.build_optimizer(config(f"{own}:of_params"), model())
    assert {(group["lr"], group["betas"]) for group in plain.param_groups} == {(0.5, (0.5, 0.5))}


def test_a_class_of_a_library_is_a_factory_and_so_is_one_with_arguments():
    made = optimizers.build_optimizer(config("torch.optim:NAdam(betas=(0.5, 0.6))", lr=0.2), model())
    assert isinstance(made, torch.optim.NAdam)
    assert {(group["lr"], group["betas"]) for group in made.param_groups} == {(0.2, (0.5, 0.6))}


def test_a_factory_may_make_groups_of_its_own_even_an_empty_one(own):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizers.check(config(f"{own}:of_model"), net, "net")
    made = optimizers.build_optimizer(config(f"{own}:of_model"), net, "module.")
    assert [(group["param_names"], group["lr"]) for group in made.param_groups] == [
        (["module.0.weight", "module.0.bias"], 0.2),
        (["module.2.weight", "module.2.bias"], 2.0),
        ([], 0.2),
    ]


@pytest.mark.parametrize("name", ["anything", "Restless", "Hooked"])
def test_one_that_takes_anything_or_draws_at_random_can_be_resumed(own, name):
    net, before = model(), torch.get_rng_state()
    optimizers.check(config(f"{own}:{name}"), net, "net")
    assert torch.equal(torch.get_rng_state(), before)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "takes neither params nor model"),
    "no_optimizer": ({}, "returned a list, not a torch.optim.Optimizer"),
    "stranger": ({}, "has a parameter of the shape [2, 3] that is none of the model's"),
    "part": ({}, "leaves out parameter 1.weight, which requires a gradient"),
    "twice": ({}, "has parameter 0.weight twice"),
    "broken": ({}, "KeyError: 'lost'"),
    "tensor_rate": ({}, "group 0 has no learning rate that is a number"),
    "Forgetful": ({}, "after its state_dict is loaded, the next step changes parameter 0.weight otherwise"),
    "Tenth": ({}, "its attribute count changes with the steps, and its state_dict lacks it"),
    "Named": ({}, "its attribute counts changes with the steps, and its state_dict lacks it"),
    "Large": ({}, "its attribute slow changes with the steps, and its state_dict lacks it"),
    "OfAll": ({}, "its state has an entry 'steps', which is of no parameter"),
    "ByNumber": ({}, "its state of a parameter has the key 0, which is no name"),
    "Rounding": ({}, "after its state_dict is loaded, the next step leaves another state"),
    "Objects": ({}, "its state holds more than tensors and plain values"),
    "Numpy": ({}, "its state holds more than tensors and plain values: norm is a float64"),
    "Beside": ({}, "its state_dict has steps beside state and param_groups"),
    "of_params": ({"momentum": 0.9}, "--momentum: "),
    "of_model": ({"no_decay": ("x",)}, "--no-decay: "),
    "lost": ({}, "has no factory 'lost'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_trained_with_or_resumed_is_refused(own, name):
    settings, said = REFUSED[name]
    with pytest.raises(UsageFault, match=re.escape(said)):
        optimizers.check(config(f"{own}:{name}", **settings), model(), "net")


def test_what_it_changes_in_its_groups_is_restored_and_not_made_anew(own):
    optimizers.check(config(f"{own}:Warming", lr=0.1), model(), "net")
    settings = TrainConfig.of(optimizer=f"{own}:Warming", lr=0.1, momentum=None, weight_decay=None)

    def updater() -> Updater:
        return Updater(settings, nn.ModuleDict({"module": model()}), torch.device("cpu"), 5)

    first, second = updater(), updater()
    for _, parameter in first.parameters:
        parameter.grad = torch.ones_like(parameter)
    first.step(measured=False)
    second.load(first.state())
    assert [group["momentum"] for group in second.optimizer.param_groups] == [0.51, 0.51]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["Wide", "torch.optim:NAdam", "torch.optim:ASGD", "adamw"])
def test_a_state_of_another_dtype_than_its_parameter_is_restored_as_it_was(own, name, dtype):
    spec = f"{own}:{name}" if name == "Wide" else name
    settings = config(spec, lr=0.1, weight_decay=0.0) if ":" not in spec else config(spec, lr=0.1)
    optimizers.check(settings, model().to(dtype), "net")
    one, other = (model().to(dtype) for _ in range(2))
    first, second = (optimizers.build_optimizer(settings, net) for net in (one, other))
    one_step(one, first)
    other.load_state_dict(one.state_dict())
    torch.save(first.state_dict(), file := io.BytesIO())
    file.seek(0)
    groups.restore_state(second, torch.load(file, weights_only=True))
    assert digest_of(first.state_dict()) == digest_of(second.state_dict())
    for net, optimizer in ((one, first), (other, second)):
        one_step(net, optimizer)
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert digest_of(first.state_dict()) == digest_of(second.state_dict())


def one_step(net: nn.Module, optimizer: Any) -> None:
    torch.manual_seed(len(optimizer.state))
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


# ---- the flags of torch's own optimizers ----------------------------------------------------------------


def trained(optimizer: Any, net: nn.Module) -> list[torch.Tensor]:
    for step in range(3):
        torch.manual_seed(step)
        net.zero_grad()
        net(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


PASSED: dict[str, tuple[dict[str, Any], Any]] = {
    "betas and eps": (
        {"optimizer": "adamw", "betas": (0.8, 0.95), "eps": 1e-3},
        lambda params: torch.optim.AdamW(params, 0.1, (0.8, 0.95), 1e-3, 0.0),
    ),
    "nesterov": (
        {"optimizer": "sgd", "momentum": 0.9, "nesterov": True},
        lambda params: torch.optim.SGD(params, 0.1, 0.9, nesterov=True),
    ),
    "fused": (
        {"optimizer": "adamw", "fused": "on"},
        lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.0, fused=True),
    ),
    "fused where there is no GPU": (
        {"optimizer": "adamw", "fused": "auto"},
        lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.0),
    ),
}


@pytest.mark.parametrize("what", PASSED)
def test_flags_reach_torchs_optimizer(what):
    settings, torchs = PASSED[what]
    ours, theirs = model(), model()
    usual = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    made = optimizers.build_optimizer(TrainConfig.of(**{**usual, **settings}).optimizer, ours)
    assert all(map(torch.equal, trained(made, ours), trained(torchs(theirs.parameters()), theirs)))


NONE = {
    "adagrad has none": {"optimizer": "adagrad", "betas": (0.9, 0.9)},
    "--fused on: rprop has no fused step": {"optimizer": "rprop", "fused": "on"},
    "--nesterov: adam has none": {"optimizer": "adam", "nesterov": True},
    "Nesterov momentum requires a momentum": {"optimizer": "sgd", "nesterov": True},
}


@pytest.mark.parametrize("said", NONE)
def test_flags_that_an_optimizer_has_no_use_for_are_refused(said):
    with pytest.raises(UsageFault, match=re.escape(said)):
        optimizers.check(
            TrainConfig.of(**{"momentum": 0.0, "weight_decay": 0.0, **NONE[said]}).optimizer, model(), "net"
        )


# ---- one with weights of its own to be scored by -----------------------------------------------------------


FREE: dict[str, Any] = {"optimizer": "tests.ranks.own_code:Free", "momentum": None, "weight_decay": None}
FREE |= {"scheduler": "none", "lr": 0.2}
WHERE: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {}), (2, {"shard": True, "accumulate": 2})]


@pytest.mark.parametrize(("size", "settings"), WHERE)
def test_a_schedule_free_run_is_scored_by_its_own_weights_and_resumes_to_the_bit(
    run_ranks, tmp_path, size, settings
):
    run = size, runs.straight_and_resumed, runs.steady, str(tmp_path), {**FREE, **settings}, (1, 3)
    (state, found), *_ = run_ranks(*run)
    assert found == {1: [], 3: []}
    # Half way between the two of each parameter, z is known: x = y + (z - y) · (1 - 1 / 0.9).
    weights, averages = state["model"], state["ema"]["averages"]
    entries = state["optimizer"]["state"]
    names = [name for group in state["optimizer"]["param_groups"] for name in group["param_names"]]
    for index, name in enumerate(names):
        wanted = torch.lerp(weights[name], entries[index]["z"], 1 - 1 / 0.9)
        assert torch.equal(averages[name], wanted) and not torch.equal(averages[name], weights[name])
    assert all(group["train_mode"] for group in state["optimizer"]["param_groups"])


def test_its_scores_are_those_of_its_own_weights_and_change_no_bit(run_ranks, tmp_path):
    ends = []
    for number in (1, 6):
        folder, every = tmp_path / str(number), runs.Every(number, "steps")
        often = {"eval_every": every, "save_every": every}
        run_ranks(2, runs.run, runs.steady, str(folder), {**FREE, **often})
        ends.append(runs.read(folder / "last.pt"))
    assert all(name.startswith("/progress/") for name in runs.different(*ends)), runs.different(*ends)
    state = ends[0]
    net = trainings.seeded(runs.steady)
    net.load_state_dict({k.removeprefix("module."): v for k, v in state["ema"]["averages"].items()})
    inputs, labels = runs.images().test.tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net.eval()(inputs), labels)
    log = [json.loads(line) for line in (tmp_path / "1" / "log.jsonl").read_text().splitlines()]
    scores = [line["loss"] for line in log if "epoch" in line]
    assert scores[-1] == pytest.approx(float(loss), rel=1e-6)


def test_one_whose_evaluations_would_change_the_training_is_refused_and_averages_twice_too():
    with pytest.raises(UsageFault, match=r"its eval\(\) and then train\(\) leave another state"):
        optimizers.check(config("tests.ranks.own_code:Averaging", lr=0.1), model(), "net")
    with pytest.raises(UsageFault, match=r"--ema: .* is scored by weights of its own"):
        optimizers.check(config("tests.ranks.own_code:Free", lr=0.1, ema=0.9), model(), "net")
    optimizers.check(config("tests.ranks.own_code:Free", lr=0.1), model(), "net")
