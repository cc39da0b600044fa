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
from train.config import command_line
from train.config.flags import Every
from train.config.sections import OptimizerConfig, TrainConfig
from train.model import groups, updater
from train.model import optimizer as optimizers
from train.model.groups import groups_of, layers_of

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
    return TrainConfig.of(**{"lr": 1.0, "momentum": 0.0, "weight_decay": 0.1, **settings}).optimizer


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


# ---- groups by rule ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2)
        self.wide, self.narrow = nn.Linear(4, 8), nn.Linear(8, 4)


class Vision(nn.Module):
    """Named as vision transformers are: a class token, an embedding, blocks, a norm, a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.places = nn.Parameter(torch.zeros(5, 4))
        self.embed = nn.Conv2d(3, 4, 2)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 10)


def rates(model: nn.Module, **settings: Any) -> dict[str, float]:
    """Return the learning rate of each parameter in a new optimizer."""
    groups = optimizers.build_optimizer(config(**settings), model).param_groups
    return {name: group["lr"] for group in groups for name in group["param_names"]}


def test_the_first_expression_that_is_found_in_a_name_scales_its_rate():
    found = rates(Vision(), lr_scale=(r"^head\.bias$=3", "head=10", "norm=0.5"), lr=0.1)
    assert found["head.bias"] == pytest.approx(0.3)
    assert found["head.weight"] == pytest.approx(1.0)
    assert found["norm.weight"] == found["blocks.2.norm.bias"] == pytest.approx(0.05)
    assert found["embed.weight"] == 0.1


def test_an_expression_may_hold_an_equals_sign():
    assert config(lr_scale=("a=b=2",)).lr_scale
    with pytest.raises(UsageFault, match=re.escape("--lr-scale a=b: is found in the name of no parameter")):
        groups_of(config(lr_scale=("a=b=2",)), Vision())


def test_the_layers_are_what_comes_before_the_blocks_the_blocks_and_what_comes_after():
    layers = layers_of(Vision())
    assert [layers[name] for name in ("cls_token", "places", "embed.bias")] == [0, 0, 0]
    assert [layers[f"blocks.{n}.narrow.weight"] for n in range(3)] == [1, 2, 3]
    assert layers["norm.weight"] == layers["head.bias"] == 4
    found = rates(Vision(), layer_decay=0.5, lr_scale=("head=2",))
    assert found["embed.weight"] == 0.5**4
    assert found["blocks.2.wide.bias"] == 0.5
    assert (found["norm.bias"], found["head.weight"]) == (1.0, 2.0)


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.ModuleList([Block()]), nn.Linear(4, 4)
        self.second, self.last = nn.ModuleList([Block()]), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))


def test_what_lies_between_two_blocks_is_of_the_second_and_a_last_block_of_plain_layers_is_the_head():
    layers = layers_of(Between())
    assert layers["first.0.wide.weight"] == 0
    assert layers["middle.weight"] == layers["second.0.wide.weight"] == 1
    assert layers["last.0.weight"] == layers["last.1.bias"] == 2


def test_layers_are_those_of_timm():
    timm = pytest.importorskip("timm", reason="its own layer decay is the oracle")
    from timm.optim import param_groups_layer_decay

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=12, num_heads=2, num_classes=5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    theirs = {
        names[id(parameter)]: group["lr_scale"]
        for group in param_groups_layer_decay(model, 0.1, layer_decay=0.7)
        for parameter in group["params"]
    }
    ours = rates(model, layer_decay=0.7)
    # timm has the last norm with the last block; in BEiT's own code it is with the head, as here.
    assert {name for name in ours if ours[name] != pytest.approx(theirs[name])} == {
        "norm.weight",
        "norm.bias",
    }


def test_what_is_named_does_not_decay_beside_norms_and_biases():
    groups = groups_of(config(no_decay=("^places$", "token"), decay_norms=True), Vision())
    assert [group.get("weight_decay") for group in groups] == [None, 0.0]
    assert groups[1]["param_names"] == ["cls_token", "places"]
    assert groups[1]["rule"] == "no decay"
    both = groups_of(config(no_decay=("embed",)), Vision())
    assert {"embed.weight", "embed.bias", "head.bias", "norm.weight"} <= {*both[1]["param_names"]}


def test_a_group_says_its_rule_and_the_names_in_a_checkpoint():
    settings = config(optimizer="muon", layer_decay=0.5, lr_scale=("head=2",), momentum=0.9)
    rules = [group["rule"] for group in groups_of(settings, Vision(1), "module.")]
    assert rules == [
        "muon, layer 1 of 2",
        *("adamw, layer 0 of 2", "adamw, layer 2 of 2, lr-scale head=2"),
        *("adamw, no decay, layer 1 of 2", "adamw, no decay, layer 0 of 2", "adamw, no decay, layer 2 of 2")[
            1:2
        ],
        *("adamw, no decay, layer 1 of 2", "adamw, no decay, layer 2 of 2"),
        "adamw, no decay, layer 2 of 2, lr-scale head=2",
    ]
    plain = groups_of(config(decay_norms=True), Vision(1), "module.")
    assert "rule" not in plain[0] and plain[0]["param_names"][0] == "module.cls_token"


def test_a_change_of_a_number_keeps_the_groups_and_their_order():
    before, after = (
        groups_of(config(lr_scale=(f"head={n}", "norm=2"), layer_decay=0.5), Vision()) for n in (9, 0.1)
    )
    assert [group["param_names"] for group in before] == [group["param_names"] for group in after]


UNMEANT = {
    "nothing found": ({"lr_scale": ("heed=2",)}, "--lr-scale heed: is found in the name of no parameter"),
    "found before": ({"lr_scale": ("head=2", "head.w=3")}, "--lr-scale head.w: is found only where head is"),
    "no decay": ({"no_decay": ("nowhere",)}, "--no-decay nowhere: is found in the name of no parameter"),
}


@pytest.mark.parametrize("what", UNMEANT)
def test_a_rule_that_can_not_be_meant_is_refused(what):
    settings, said = UNMEANT[what]
    with pytest.raises(UsageFault, match=re.escape(said)):
        groups_of(config(**settings), Vision())


def test_a_model_without_blocks_has_no_layers():
    for model in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Tanh()))):
        with pytest.raises(UsageFault, match=r"--layer-decay: .* has no blocks"):
            layers_of(model)


def test_a_frozen_parameter_is_in_no_group_and_its_layer_still_counts():
    model = Vision()
    model.blocks[0].requires_grad_(False)
    found = rates(model, layer_decay=0.5)
    assert not any(name.startswith("blocks.0") for name in found)
    assert found["blocks.1.wide.weight"] == 0.25


def taken(model: nn.Module) -> list[str]:
    chosen = groups.matrices(model)
    return [name for name, parameter in model.named_parameters() if id(parameter) in chosen]


def test_muon_takes_the_matrices_of_layers_and_attention():
    inside = ["attention.in_proj_weight", "attention.out_proj.weight", "wide.weight", "narrow.weight"]
    assert taken(Vision(1)) == [f"blocks.0.{name}" for name in inside]
    assert taken(nn.Sequential(nn.LSTM(3, 4), nn.LayerNorm([2, 4]), nn.Linear(4, 2))) == [
        "0.weight_ih_l0",
        "0.weight_hh_l0",
    ]


FLAGS = {
    "--betas 0.9,1.0": "out of range: it must be at least 0 and below 1",
    "--lr-scale head": "'head' is not REGEX=NUMBER",
    "--lr-scale head=0": "0 is out of range",
    "--lr-scale (=2": "'(' is not a regular expression",
    "--no-decay [": "'[' is not a regular expression",
    "--no-decay x --weight-decay 0": "--no-decay: there is no --weight-decay",
    "--optimizer own.py:make --zero": "--zero: the state of own.py:make is not divided",
    "--optimizer own.py:make --lr-scale a=2": "--lr-scale: needs --lr",
    "--optimizer own.py:make --min-lr 0.1": "--min-lr: needs --lr",
    "--scheduler cosin": "--scheduler cosin: no such schedule",
    "--scheduler none --min-lr 0.01": "--min-lr: with --scheduler none the learning rate stays as it is",
    "--min-lr 0.1": "--min-lr 0.1: is not below the learning rate, 0.1",
    "--cooldown 5steps": "--cooldown: needs --scheduler wsd",
    "--fused maybe": "invalid choice",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_wrong_flags_are_refused_before_torch_is_imported(flags):
    with pytest.raises(UsageFault) as caught:
        command_line.parse(flags.split())
    assert FLAGS[flags] in caught.value.message


def test_the_flags_of_groups_are_written_as_they_were_read():
    typed = ["--lr-scale", "head=0.1", "--lr-scale", "^a=2", "--no-decay", "x|y", "--betas", "0.8,0.9"]
    typed += ["--optimizer", "adamw", "--cooldown", "3steps", "--scheduler", "wsd", "--layer-decay", "0.5"]
    read = command_line.parse(typed)
    assert command_line.parse(command_line.arguments_of(read)) == read


# ---- the factor of the learning rate in each step ------------------------------------------------------


def factors(steps: int = 10, **settings: Any) -> list[float]:
    config = TrainConfig.of(**{"lr": 1.0, "epochs": 1, **settings})
    rate = updater.rate_of(config.schedule, config.optimizer.lr, steps, steps)
    return [rate(step) for step in range(steps)]


def test_a_minimum_is_where_the_schedule_ends_and_the_warm_up_still_begins_at_zero():
    plain, raised = (
        factors(scheduler="cosine", warmup=Every(2, "steps"), **m) for m in ({}, {"min_lr": 0.1})
    )
    assert raised[:2] == plain[:2] == [0.5, 1.0]
    assert raised[2:] == [pytest.approx(0.1 + 0.9 * factor) for factor in plain[2:]]
    config = TrainConfig.of(lr=2.0, min_lr=0.5, scheduler="linear")
    assert updater.rate_of(config.schedule, config.optimizer.lr, 10, 10)(10) == 0.25


def test_wsd_warms_up_stays_and_decays():
    found = factors(scheduler="wsd", warmup=Every(2, "steps"), cooldown=Every(4, "steps"))
    assert found == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert factors(scheduler="wsd")[-3:] == [1, 1, 0.5]
    assert factors(scheduler="wsd", min_lr=0.5)[-1] == 0.75


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (37, 0), (100, 20), (3, 2)])
def test_one_cycle_is_torchs(steps, warmup):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    given = {"total_steps": steps, "pct_start": warmup / steps if warmup else 0.3, "cycle_momentum": False}
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, **given)
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step() if len(expected) < steps else None
    assert factors(steps, scheduler="onecycle", warmup=Every(warmup, "steps")) == pytest.approx(
        expected, rel=1e-9
    )


def test_one_cycle_may_end_in_a_minimum():
    assert factors(scheduler="onecycle", min_lr=0.2)[-1] == pytest.approx(0.2)


OWN = """
import itertools
import torch

count = itertools.count()
def halves(steps, warmup): return lambda step: 0.5 ** (step // (steps // 2))
def constant(): return lambda step: 1
def negative(): return lambda step: 1 - step
def broken(): return lambda step: 1 / step
def restless(): return lambda step: next(count)
def counting():
    calls = itertools.count()
    return lambda step: 0.5 ** (next(calls) // 8)
def scheduler(): return torch.optim.lr_scheduler.LambdaLR
def number(): return 0.1
"""


def test_a_factory_returns_a_function_of_the_step(own):
    assert factors(4, scheduler=f"{own}:halves") == [1, 1, 0.5, 0.5]
    assert factors(2, scheduler=f"{own}:constant") == [1, 1]


WRONG = {
    "negative": "gives step 2 the factor -1",
    "broken": "fails in step 0: ZeroDivisionError",
    "restless": "gives step 9 another factor each time",
    "counting": "gives step 9 another factor each time",
    "scheduler": "returned a type, not a function of the step",
    "number": "returned a float, not a function of the step",
    "gone": "has no factory 'gone'",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_schedule_is_refused(own, name):
    with pytest.raises(UsageFault, match=re.escape(WRONG[name])):
        updater.check_schedule(TrainConfig.of(scheduler=f"{own}:{name}", epochs=1), 10)


def test_parts_that_are_longer_than_the_training_are_refused():
    parts = {"warmup": Every(3, "steps"), "cooldown": Every(8, "steps")}
    with pytest.raises(UsageFault, match="--cooldown 8steps: is 8 steps, and the warm-up 3"):
        updater.check_schedule(TrainConfig.of(scheduler="wsd", epochs=1, **parts), 10)
    updater.check_schedule(TrainConfig.of(scheduler="wsd", epochs=1, **parts), 11)
