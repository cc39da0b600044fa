"""The parts of a loop of one's own: the process group, the mean of all samples, passes without a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpttool import batchnorm
from ckpttool.distributed import (
    find_place,
    global_mean_loss,
    leaving_no_trace,
    process_group,
    run_dummy_pass,
    settle_buckets,
    world_size,
)
from ckpttool.errors import UsageFault

# ---- the process group ---------------------------------------------------------------------------------


def test_a_script_without_a_launcher_is_one_rank_and_leaves_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with process_group(find_place("gloo")) as place:
        assert (place.rank, place.world_size, str(place.device)) == (0, 1, "cpu")
        assert dist.is_initialized()
    assert not dist.is_initialized()


def second(rank: int, size: int) -> int:
    with pytest.raises(UsageFault, match="already has a process group"), process_group():
        pass
    return world_size()


def test_a_group_that_exists_is_refused_and_left_whole(run_ranks: Any) -> None:
    assert run_ranks(2, second) == [2, 2]


# ---- the gradient of the mean over all ranks' samples --------------------------------------------------


def gradient(rank: int, world_size: int) -> float:
    """Return the gradient of one sample on rank 0 and three on rank 1."""
    samples = [torch.tensor([[8.0]]), torch.tensor([[1.0], [2.0], [3.0]])][rank]
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    global_mean_loss(ddp(samples).sum(), 4).backward()
    return float(ddp.module.weight.grad)


def test_every_sample_counts_the_same_whatever_its_rank_has(run_ranks: Any) -> None:
    """The mean of 8, 1, 2 and 3 is 3.5; the mean of the means 8 and 2 would be 5."""
    assert run_ranks(2, gradient) == [3.5] * 2


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), -1, -0.5, math.nan])
def test_a_mean_over_nothing_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="has no value"):
        global_mean_loss(torch.zeros(()), count)


@pytest.mark.parametrize(
    "count", [4, torch.tensor(4), 2.5, torch.tensor(2.5), torch.tensor(2.5).double(), 0.5]
)
def test_the_count_may_be_a_tensor_or_a_sum_of_weights(count: Any) -> None:
    assert global_mean_loss(torch.tensor(5.0), count).item() == 5 / float(count)


# ---- a rank without samples takes part in backward, and leaves no trace --------------------------------


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


BATCH = {"x": torch.ones(1, 4), "scale": torch.tensor(2.0)}


def test_nothing_is_changed_but_gradients_of_zero() -> None:
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers, random = dict(model.named_buffers()), torch.get_rng_state()
    run_dummy_pass(model, BATCH, lambda given: model(**given).logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert torch.equal(random, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert all(bool((one.grad == 0).all()) for one in model.parameters() if one.grad is not None)


def test_outputs_may_be_nested_in_any_way() -> None:
    model = Odd()
    run_dummy_pass(model, BATCH, lambda given: {"of": [model(**given).logits, 3]})
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


def with_batchnorm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def backward(model: nn.Module, times: int) -> None:
    torch.manual_seed(2)
    (model(torch.randn(5, 4).double()).pow(2).sum() * times).backward()


def one_rank_without_samples(rank: int, world_size: int) -> Any:
    net = batchnorm.to_sync(with_batchnorm())
    ddp = DistributedDataParallel(net)
    settle_buckets(ddp, lambda: run_dummy_pass(ddp, torch.ones(1, 4).double(), together=False))
    assert all(one.grad is None for one in ddp.parameters())
    if rank == 0:
        backward(ddp, world_size)
    else:
        run_dummy_pass(ddp, torch.ones(1, 4).double())
    return [one.grad for one in ddp.parameters()], list(net.buffers())


def test_synchronised_layers_of_all_ranks_see_only_the_samples_that_there_are(run_ranks: Any) -> None:
    net = with_batchnorm()
    backward(net, 1)
    expected = [one.grad for one in net.parameters()], list(net.buffers())
    for found in run_ranks(2, one_rank_without_samples):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
