"""A rank without samples takes part in backward, and leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpttool import batchnorm
from ckpttool.distributed import leaving_no_trace, run_dummy_pass, settle_buckets
from ckpttool.errors import UsageFault


@dataclass
class Output:
    """What models of some libraries return."""

    loss: torch.Tensor
    logits: dict[str, list[torch.Tensor]]
    note: str = ""


class Odd(nn.Module):
    """Counts its passes in one buffer, replaces another, drops out, and returns a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("passes", torch.zeros(1))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Output:
        y = nn.functional.dropout(self.norm(self.linear(x)), 0.5, self.training) * scale
        self.passes += 1
        self.average = 0.9 * self.average + y.detach().mean(dim=0)
        return Output(y.sum() / 0.0, {"all": [y]})


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(1, 4), "scale": torch.tensor(2.0)}


def test_nothing_is_changed_but_gradients_of_zero() -> None:
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers, random = dict(model.named_buffers()), torch.get_rng_state()
    run_dummy_pass(model, batch(), lambda given: model(**given).logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert torch.equal(random, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert all(bool((one.grad == 0).all()) for one in model.parameters() if one.grad is not None)


def test_outputs_may_be_nested_in_any_way() -> None:
    model = Odd()
    run_dummy_pass(model, batch(), lambda given: {"of": [model(**given).logits, 3]})
    assert model.linear.weight.grad is not None


def test_a_model_is_restored_after_a_failure() -> None:
    model = Odd()
    with pytest.raises(ZeroDivisionError), leaving_no_trace(model):
        assert not model.norm.training
        raise ZeroDivisionError
    assert model.norm.training


def test_torchs_synchronised_layers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    with pytest.raises(UsageFault, match=r"'1' is torch's SyncBatchNorm"):
        run_dummy_pass(model, torch.ones(1, 4))


def one_rank_without_samples(rank: int, world_size: int) -> Any:
    torch.manual_seed(1)
    net = batchnorm.to_sync(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double())
    ddp = DistributedDataParallel(net)
    settle_buckets(ddp, lambda: run_dummy_pass(ddp, torch.ones(1, 4).double(), together=False))
    assert all(one.grad is None for one in ddp.parameters())
    if rank == 0:
        torch.manual_seed(2)
        (ddp(torch.randn(5, 4).double()).pow(2).sum() * world_size).backward()
    else:
        run_dummy_pass(ddp, torch.ones(1, 4).double())
    return [one.grad for one in ddp.parameters()], dict(net.named_buffers())


def test_synchronised_layers_of_all_ranks_see_only_the_samples_that_there_are(run_ranks: Any) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    torch.manual_seed(2)
    net(torch.randn(5, 4).double()).pow(2).sum().backward()
    for gradients, buffers in run_ranks(2, one_rank_without_samples):
        for found, parameter in zip(gradients, net.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12)
        for name, value in net.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-12)
