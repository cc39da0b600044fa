"""Optimizers, their groups, clipping, schedules, and states that are divided among ranks."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.distributed import collectives
from ckpttool.errors import UsageFault
from train.checkpoint import format as checkpoints
from train.config.flags import Every
from train.config.sections import OptimizerConfig, TrainConfig
from train.model import groups, updater
from train.model import optimizer as optimizers

OTHERS = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"]
OTHERS += ["NAdam", "RAdam", "RMSprop", "Rprop", "sgd"]


class Net(nn.Module):
    """Matrices, offsets, norms of one and two axes, a shared weight, a frozen and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.plane = nn.LayerNorm([4, 5])
        self.scale = nn.Parameter(torch.ones(4))
        self.phase = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight


def config(**settings: Any) -> OptimizerConfig:
    return TrainConfig.of(**{"momentum": 0.0, "weight_decay": 0.1, **settings}).optimizer


def named(optimizer: Any) -> list[tuple[list[str], float]]:
    return [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]


def one_step(model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    model.zero_grad()
    model(inputs).square().sum().backward()
    optimizer.step()


# ---- groups and names -----------------------------------------------------------------------------------


def test_norms_and_biases_do_not_decay_and_a_shared_weight_stands_once():
    optimizer = optimizers.build_optimizer(config(), Net())
    assert named(optimizer) == [
        (["phase", "embed.weight", "conv.weight"], 0.1),
        (["scale", "conv.bias", "norm.weight", "norm.bias", "plane.weight", "plane.bias", "head.bias"], 0.0),
    ]


@pytest.mark.parametrize("settings", [{"decay_norms": True}, {"weight_decay": 0.0}])
def test_there_is_one_group_if_all_decay_or_none(settings):
    ((names, decay),) = named(optimizers.build_optimizer(config(**settings), Net()))
    assert len(names) == 10
    assert decay == settings.get("weight_decay", 0.1)


def test_a_model_without_matrices_has_one_group_without_decay():
    assert named(optimizers.build_optimizer(config(), nn.BatchNorm1d(3))) == [(["weight", "bias"], 0.0)]


@pytest.mark.parametrize("name", OTHERS)
def test_every_optimizer_of_torch_is_found_and_follows_torch(name):
    decay = 0.0 if name == "Rprop" else 0.1
    kind = torch.optim.SGD if name == "sgd" else getattr(torch.optim, name)
    ours = nn.Linear(3, 2)
    theirs = copy.deepcopy(ours)
    reference = kind(theirs.parameters(), lr=0.01, **({"weight_decay": decay} if decay else {}))
    for spelt in (name, name.lower()):
        both = config(optimizer=spelt, lr=0.01, decay_norms=True, weight_decay=decay)
        optimizers.check(both, ours, "net")
        optimizer = optimizers.build_optimizer(both, ours)
    for _ in range(3):
        one_step(ours, optimizer, torch.ones(4, 3))
        one_step(theirs, reference, torch.ones(4, 3))
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "typo": ({"optimizer": "sdg"}, "--optimizer sdg: torch.optim has none of that name"),
    "base class": ({"optimizer": "Optimizer"}, "--optimizer Optimizer: torch.optim has none"),
    "momentum": ({"optimizer": "adagrad", "momentum": 0.9}, "--momentum: adagrad has none"),
    "decay": ({"optimizer": "rprop"}, "--weight-decay: rprop has none"),
    "closure": ({"optimizer": "LBFGS"}, "--optimizer LBFGS: calls the model several times in a step"),
    "sparse": ({"optimizer": "sparseadam"}, "--optimizer sparseadam: needs sparse gradients"),
    "complex": ({"optimizer": "adafactor"}, "Adafactor does not support complex parameters"),
    "no matrix": ({"optimizer": "muon"}, "muon: can't train net: it has no matrix before the last"),
    "muon, zero": ({"optimizer": "Muon", "zero": True}, "--zero: muon's state is not divided"),
    "two dtypes": ({"zero": True}, "--zero: needs parameters of one dtype, but"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_used_is_refused_by_name(what):
    settings, said = REFUSED[what]
    with pytest.raises(UsageFault, match=re.escape(said)) as caught:
        optimizers.check(config(**settings), Net(), "net")
    assert caught.value.exit_code == 2


def test_the_check_leaves_the_model_as_it_was():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    optimizers.check(config(optimizer="adamw"), model, "net")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- clipping -------------------------------------------------------------------------------------------


def gradients(*values: complex) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros_like(torch.tensor([value]))) for value in values]
    for parameter, value in zip(found, values, strict=True):
        parameter.grad = torch.tensor([value])
    return found


@pytest.mark.parametrize(("second", "times"), [(4j, 1), (4.0, 2)], ids=["complex", "given twice"])
def test_the_norm_is_over_all_gradients_once_and_each_is_scaled(second, times):
    parameters = gradients(3.0, second)
    assert optimizers.clip(parameters * times, 1.0).item() == pytest.approx(5.0)
    assert parameters[0].grad.item() == pytest.approx(0.6)
    assert parameters[1].grad.item() == pytest.approx(second / 5)


def test_a_short_gradient_keeps_its_bits_and_no_norm_only_measures():
    for norm in (5.1, None):
        parameters = gradients(3.0, 4.0)
        assert optimizers.clip(parameters, norm).item() == 5.0
        assert [parameter.grad.item() for parameter in parameters] == [3.0, 4.0]


def test_without_gradients_the_norm_is_0():
    assert optimizers.clip([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    assert optimizers.clip(iter([]), 1.0).item() == 0.0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_without_a_finite_norm_is_not_hidden_by_clipping(value):
    parameters = gradients(value, 1.0)
    assert not torch.isfinite(optimizers.clip(parameters, 1.0))
    assert not torch.isfinite(parameters[0].grad).all()


# ---- the learning rate ----------------------------------------------------------------------------------


RATES = {
    "none": [0.5, 1, 1, 1, 1, 1],
    "linear": [0.5, 1, 1, 0.75, 0.5, 0.25],
    "cosine": [0.5, 1, 1, 0.853553, 0.5, 0.146447],
    "step": [0.5, 1, 1, 0.1, 0.1, 0.01],
}


@pytest.mark.parametrize("course", RATES)
def test_the_rate_rises_over_the_warm_up_and_falls_over_the_rest(course):
    optimizer = optimizers.build_optimizer(config(lr=2.0), Net())
    chosen = TrainConfig.of(scheduler=course, warmup=Every(2, "steps"), epochs=2)
    scheduler = updater.build_scheduler(chosen, optimizer, 6)
    met = []
    for _ in range(6):
        met.append([group["lr"] / 2 for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert met == [pytest.approx([each, each], abs=1e-6) for each in RATES[course]]


# ---- states that are divided among ranks ------------------------------------------------------------------


def take_steps(optimizer: Any, model: nn.Module, first: int, last: int) -> None:
    """Take steps whose gradients depend on the step and the parameter alone."""
    for step in range(first, last):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(step * 100 + number)
            parameter.grad = torch.rand(parameter.shape, generator=generator)
        optimizer.step()


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def divided(rank: int, size: int, name: str, first: int, last: int, saved: bytes, zero: bool) -> Any:
    """Continue a training of a saved state; return the state, and how much of it this rank held."""
    model = layers()
    settings = {"optimizer": name, "lr": 0.01, "zero": zero, "momentum": 0.9 * (name == "sgd")}
    optimizer = optimizers.build_optimizer(config(**settings), model)
    if saved:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(state["model"])
        groups.restore_state(optimizer, state["optimizer"])
    take_steps(optimizer, model, first, last)
    whole = groups.consolidated(optimizer)
    if rank and zero:
        assert whole["state"] == {}
    held = len(optimizer.optim.state) if zero else len(optimizer.state)
    digest = collectives.digest_all(model.state_dict())
    torch.save({"model": model.state_dict(), "optimizer": whole}, file := io.BytesIO())
    return digest, held, collectives.digest_all(checkpoints.named_optimizer(whole)), file.getvalue()


@pytest.mark.parametrize("name", ["sgd", "adamw", "Adagrad"])
def test_a_divided_state_gives_the_same_bits_on_any_number_of_ranks(run_ranks, name):
    """Straight, and stopped on one number of ranks and resumed on another, divided or not."""
    ((model, _, state, _),) = run_ranks(1, divided, name, 0, 6, b"", False)
    for before, after in ((1, 2), (2, 1), (2, 2), (4, 2), (2, 4)):
        parts = run_ranks(before, divided, name, 0, 3, b"", True)
        assert sum(held for _, held, _, _ in parts) == 6
        rest = run_ranks(after, divided, name, 3, 6, parts[0][3], True)
        assert {digest for digest, *_ in rest} == {model}
        assert rest[0][2] == state
    ((whole, _, also, _),) = run_ranks(1, divided, name, 3, 6, parts[0][3], False)
    assert (whole, also) == (model, state)


def more_ranks_than_parameters(rank: int, size: int) -> Any:
    model = nn.Linear(2, 1, bias=False)
    optimizer = optimizers.build_optimizer(config(optimizer="adamw", zero=True), model)
    take_steps(optimizer, model, 0, 2)
    whole = groups.consolidated(optimizer)
    groups.restore_state(optimizer, collectives.broadcast(lambda: whole))
    take_steps(optimizer, model, 2, 3)
    return len(optimizer.optim.state), len(whole["state"]), whole["param_groups"][0]["param_names"]


def test_ranks_without_a_parameter_of_their_own_hold_nothing(run_ranks):
    assert run_ranks(2, more_ranks_than_parameters) == [(1, 1, ["weight"]), (0, 0, ["weight"])]


# ---- muon -----------------------------------------------------------------------------------------------


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(7, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 7)]
    layers[-1].weight = layers[0].weight  # tied
    return nn.Sequential(*layers)


TOKENS = torch.arange(7)


def test_muon_is_torchs_for_the_matrices_inside_and_adamw_for_the_rest():
    ours, theirs = transformer(), transformer()
    optimizer = optimizers.build_optimizer(config(optimizer="muon", lr=0.01, momentum=0.9), ours)
    assert named(optimizer) == [
        (["1.weight", "3.weight"], 0.1),
        (["0.weight"], 0.1),
        (["1.bias", "2.weight", "2.bias", "3.bias", "4.bias"], 0.0),
    ]
    inside = {"1.weight", "3.weight"}
    others = [parameter for name, parameter in theirs.named_parameters() if name not in inside]
    matrices = [theirs[1].weight, theirs[3].weight]
    muon = torch.optim.Muon(matrices, 0.01, 0.1, 0.9, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": others[:1]}, {"params": others[1:], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, 0.01, weight_decay=0.1)
    for _ in range(3):
        one_step(ours, optimizer, TOKENS)
        one_step(theirs, muon, TOKENS)
        adamw.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_muon_goes_on_from_its_state_with_another_rate():
    straight, resumed = transformer(), transformer()
    settings = config(optimizer="muon", lr=0.01)
    first = optimizers.build_optimizer(settings, straight)
    one_step(straight, first, TOKENS)
    resumed.load_state_dict(straight.state_dict())
    second = optimizers.build_optimizer(settings, resumed)
    groups.restore_state(second, copy.deepcopy(first.state_dict()))
    for optimizer in (first, second):
        for group in optimizer.param_groups:
            group["lr"] = 0.5
    for _ in range(2):
        one_step(straight, first, TOKENS)
        one_step(resumed, second, TOKENS)
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))
    assert first.state_dict()["state"].keys() == second.state_dict()["state"].keys() == set(range(8))
