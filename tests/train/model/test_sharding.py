"""`--shard`: which modules are units, and what is refused by name before any process group starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.errors import UsageFault
from tests.ranks import runs
from train.config import command_line
from train.config.sections import ModelConfig, TrainConfig
from train.model import wrapping
from train.model.builtin import resnet20


def config(**settings: Any) -> ModelConfig:
    return TrainConfig.of(**{"shard": True, **settings}).model


class Tied(nn.Module):
    """Two blocks of a transformer's kind that share a matrix, and one that shares none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.blocks[1][0].weight = self.blocks[0][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# ---- units ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "classes", "expected"), [
    (resnet20, (), [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]),
    (resnet20, ("BatchNorm2d",), 19),
    (runs.steady, ("Block", "Linear"), ["blocks.0", "blocks.1", "head"]),
    (runs.steady, ("Sequential", "Block"), ["blocks", "blocks.0", "blocks.1"]),  # one in the other
    (runs.steady, ("ReLU",), None),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), ("ReLU",), []),  # without parameters
    (lambda: nn.Linear(4, 4), (), []),
    (Tied, (), ["blocks.2"]),
])  # fmt: skip
def test_the_units_are_the_blocks_or_the_modules_of_the_named_classes(make, classes, expected):
    if expected is None:
        with pytest.raises(UsageFault, match="has no module of this class") as fault:
            wrapping.units(config(shard_blocks=classes), make())
        assert fault.value.hint == "one of Block, Conv2d, GroupNorm, Linear, Sequential"
        return
    found = wrapping.units(config(shard_blocks=classes), make())
    assert (len(found) if isinstance(expected, int) else found) == expected


def test_a_named_block_that_shares_a_parameter_is_refused_by_the_parameters_name():
    with pytest.raises(
        UsageFault, match=r"Sequential: 'blocks\.0' shares blocks\.0\.0\.weight with a module"
    ):
        wrapping.units(config(shard_blocks=("Sequential",)), Tied())


def test_a_container_without_a_forward_is_no_unit():
    with pytest.raises(UsageFault, match="ModuleList: 'blocks' has no forward"):
        wrapping.units(config(shard_blocks=("ModuleList",)), Tied())


# ---- models and optimizers ------------------------------------------------------------------------------


def having(parameter: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model.odd = nn.Parameter(parameter)
    return model


INDIVISIBLE = {
    "odd of .* is a single number, which has no rows": torch.tensor(1.0),
    "odd of .* is complex": torch.ones(2, dtype=torch.complex64),
    "odd of .* is not contiguous": torch.ones(3, 2).t(),
    "odd is bfloat16 and 0.weight float32|odd is bfloat16": torch.ones(2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("reason", INDIVISIBLE)
def test_a_parameter_that_cannot_be_divided_is_named(reason):
    with pytest.raises(UsageFault, match=reason):
        wrapping.check_sharding(config(), having(INDIVISIBLE[reason]), "sgd")
    wrapping.check_sharding(TrainConfig().model, having(INDIVISIBLE[reason]), "sgd")


def test_units_of_several_dtypes_are_fine_if_each_has_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1).bfloat16())
    with pytest.raises(UsageFault, match=r"0\.weight is float32 and 1\.weight bfloat16"):
        wrapping.check_sharding(config(), model, "sgd")
    wrapping.check_sharding(config(shard_blocks=("Conv1d",)), model, "sgd")


def test_a_frozen_parameter_may_have_any_dtype_as_it_has_no_gradient():
    model = having(torch.ones(2, dtype=torch.bfloat16))
    model.odd.requires_grad_(False)
    wrapping.check_sharding(config(), model, "sgd")


@pytest.mark.parametrize("name", ["muon", "adafactor", "Rprop"])
def test_an_optimizer_that_needs_whole_matrices_is_refused(name):
    with pytest.raises(UsageFault, match=f"--shard and --optimizer {name}: it needs whole matrices"):
        wrapping.check_sharding(config(), resnet20(), name)


def test_batchnorm_keeps_float32_statistics_and_is_refused_in_bfloat16():
    with pytest.raises(UsageFault, match="--shard bf16: 'bn1' of simple-cnn is a BatchNorm2d"):
        wrapping.check_sharding(config(shard_dtype="bf16"), resnet20(), "sgd")


@dataclasses.dataclass
class Own:
    logits: torch.Tensor


def test_outputs_in_which_fsdp_finds_no_tensor_are_refused():
    tensor = torch.ones(2, requires_grad=True)
    with pytest.raises(UsageFault, match="returns a Own, in which FSDP2 finds no tensor"):
        wrapping.check_outputs(config(), Own(tensor))
    for outputs in (tensor, {"logits": tensor, "n": 1}, (None, [tensor])):
        wrapping.check_outputs(config(), outputs)
    wrapping.check_outputs(TrainConfig().model, Own(tensor))


# ---- flags ----------------------------------------------------------------------------------------------

REFUSED = {
    "--shard-blocks Block": "--shard-blocks: needs --shard",
    "--shard --every 3 own.py:look": "--shard and --every: its function gets a copy of the model",
    "--shard --zero": "--shard and --zero: the optimizer's state is divided already",
    "--shard --virtual-ranks 4": "--shard and --virtual-ranks 4: they add whole gradients",
    "--shard --find-unused": "--shard and --find-unused: gradients of a unit are sent as one",
    "--shard --rank-share auto": "--shard and --rank-share auto: ranks wait for each other",
    "--shard 2x4": "--shard 2x4: is 8 ranks, and there are 4",
    "--shard 2x": "'2x' is none of bf16, offload, parts, and 2x4",
    "--shard bf16,0x4": "'0x4' is none of bf16, offload, parts, and 2x4",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_do_not_go_together_are_refused_by_name(monkeypatch, flags):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageFault, match=REFUSED[flags]):
        command_line.parse(flags.split())


def test_the_flags_are_written_again_as_they_were_read(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = [
        "--shard",
        "2x2,bf16,offload,parts",
        "--shard-blocks",
        "Block",
        "--shard-blocks",
        "Head",
    ]
    assert command_line.arguments_of(command_line.parse(flags)) == flags
