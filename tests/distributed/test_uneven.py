"""Loops of one's own train as one process does, with uneven batches too; and the parts that they use."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ckpttool import batchnorm
from ckpttool.distributed import (
    RankFailed,
    Uneven,
    find_place,
    global_mean_loss,
    leaving_no_trace,
    process_group,
    run_dummy_pass,
    settle_buckets,
    world_size,
)
from ckpttool.errors import CheckFailed, UsageFault
from tests.ranks.programs import TORCHRUN, start

SIZES = ((3, 1), (5, 2, 4), ())
"""Samples of each batch of each rank; the last rank has none at all."""

Pair = tuple[torch.Tensor, torch.Tensor]


def network(kind: str = "plain") -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)]
    if kind == "batchnorm":
        layers.insert(1, nn.BatchNorm1d(5))
    return nn.Sequential(*layers).double()


def samples_of(rank: int, number: int, size: int) -> Pair:
    generator = torch.Generator().manual_seed(100 * rank + number)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


def batches_of(rank: int) -> list[Pair]:
    return [samples_of(rank, number, size) for number, size in enumerate(SIZES[rank])]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def summed(model: nn.Module, batch: Pair) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}


def alone(kind: str = "plain") -> dict[str, torch.Tensor]:
    """Return the state after the same steps in one process."""
    model = network(kind)
    optimizer = sgd(model)
    for number in range(max(map(len, SIZES))):
        parts = [batches_of(rank)[number] for rank, sizes in enumerate(SIZES) if number < len(sizes)]
        inputs, target = (torch.cat(part) for part in zip(*parts, strict=True))
        F.cross_entropy(model(inputs), target).backward()
        step(optimizer)
    return state(model)


def trained(rank: int, world_size: int, kind: str) -> dict[str, torch.Tensor]:
    model = DistributedDataParallel(batchnorm.to_sync(network(kind)))
    optimizer = sgd(model)
    with Uneven(model, batches_of(rank)) as uneven:
        for batch in uneven:
            uneven.global_mean(summed(model, batch)).backward()
            step(optimizer)
    assert all(module.training for module in model.modules())
    return state(model)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["plain", "batchnorm"])
def test_the_weights_are_those_of_one_process(run_ranks: Any, kind: str) -> None:
    """With batchnorm the layers are synchronised, and their statistics are compared too."""
    for found in run_ranks(3, trained, kind):
        assert_same(found, alone(kind))


def tokens(rank: int, world_size: int) -> float:
    """Train on padded batches, of which a mapping says how many tokens count; return the final weight."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).double())
    torch.nn.init.ones_(model.module.weight)
    batches = [{"x": torch.full((4, 1), rank + 1.0).double(), "tokens": rank + 1}] * (2 - rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Uneven(model, batches, count=lambda batch: batch["tokens"]) as uneven:
        for batch in uneven:
            uneven.global_mean(model(batch["x"])[: batch["tokens"]].sum()).backward()
            step(optimizer)
    return model.module.weight.item()


def test_a_count_of_tokens_is_the_users(run_ranks: Any) -> None:
    """First 1 token of 1 on rank 0 and 2 of 2 on rank 1, whose mean is 5/3; then 1 of 1 on rank 0 alone."""
    assert run_ranks(2, tokens) == pytest.approx([1 - 5 / 3 - 1] * 2, abs=1e-15)


def accumulated(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = DistributedDataParallel(network())
    optimizer = sgd(model)
    steps = [[(inputs[:2], target[:2]), (inputs[2:], target[2:])] for inputs, target in batches_of(rank)]
    with Uneven(model, steps, count=lambda step: sum(len(target) for _, target in step)) as uneven:
        for first, last in uneven:
            with model.no_sync():
                uneven.global_mean(summed(model, first)).backward()
            uneven.global_mean(summed(model, last)).backward()
            step(optimizer)
    return state(model)


def test_a_batch_may_be_a_list_of_micro_batches(run_ranks: Any) -> None:
    for found in run_ranks(3, accumulated):
        assert_same(found, alone())


def no_batch_at_all(rank: int, world_size: int) -> int:
    with Uneven(DistributedDataParallel(network()), list[Any]()) as uneven:
        return sum(1 for _ in uneven)


def test_ranks_without_any_batch_take_no_step(run_ranks: Any) -> None:
    assert run_ranks(2, no_batch_at_all) == [0, 0]


def empty_ones(rank: int, world_size: int) -> list[bool]:
    model = DistributedDataParallel(network())
    found = []
    with Uneven(model, [samples_of(rank, 0, size) for size in [(0, 2), (3, 0)][rank]]) as uneven:
        for batch in uneven:
            uneven.global_mean(summed(model, batch)).backward()
            found.append(uneven.is_dummy)
    return found


def test_an_empty_batch_is_stood_in_for(run_ranks: Any) -> None:
    assert run_ranks(2, empty_ones) == [[True, False], [False, True]]


def test_one_process_without_a_group_takes_its_own_batches() -> None:
    model = network()
    with Uneven(model, batches_of(1)) as uneven:
        sizes = [(len(batch[0]), uneven.global_count, uneven.is_dummy) for batch in uneven]
    assert sizes == [(5, 5, False), (2, 2, False), (4, 4, False)]


# ---- failures ------------------------------------------------------------------------------------------


def failing_loader(rank: int) -> Iterator[Pair]:
    yield samples_of(rank, 0, 2)
    if rank == 1:
        raise OSError("picture 17 is damaged")
    yield samples_of(rank, 1, 2)


LOADERS: dict[str, Callable[[int], Any]] = {
    "failing": failing_loader,
    "nested": lambda rank: [[samples_of(rank, 0, 2), samples_of(rank, 1, 2)]],
    "without samples": lambda rank: [samples_of(rank, 0, 0)],
}


def caught(rank: int, world_size: int, loader: str) -> tuple[str, str, int]:
    """Return the error that ends the loop, and after how many steps."""
    model, steps = DistributedDataParallel(network()), 0
    try:
        with Uneven(model, LOADERS[loader](rank)) as uneven:
            for batch in uneven:
                uneven.global_mean(summed(model, batch)).backward()
                steps += 1
    except (OSError, RankFailed, UsageFault, CheckFailed) as error:
        return type(error).__name__, getattr(error, "message", str(error)), steps
    return "", "", steps


def test_a_batch_that_cant_be_loaded_ends_all_ranks_at_that_step(run_ranks: Any) -> None:
    one, other = run_ranks(2, caught, "failing")
    assert one == ("RankFailed", "rank 1 failed: OSError: picture 17 is damaged", 1)
    assert other == ("OSError", "picture 17 is damaged", 1)


def test_a_batch_whose_samples_cant_be_counted_is_refused(run_ranks: Any) -> None:
    one, _ = run_ranks(2, caught, "nested")
    assert one[0] == "UsageFault"
    assert "count" not in one[1] and "number of samples in a batch can't be told" in one[1]


@pytest.mark.parametrize("count", [2.5, -1])
def test_a_count_that_no_batch_can_have_is_refused(count: float) -> None:
    uneven = Uneven(network(), [samples_of(0, 0, 2)], count=lambda batch: count)
    with uneven, pytest.raises(UsageFault, match=f"a batch has a count of {count}"):
        next(iter(uneven))


def test_a_step_without_a_sample_on_any_rank_is_refused(run_ranks: Any) -> None:
    assert [one[0] for one in run_ranks(2, caught, "without samples")] == ["CheckFailed"] * 2


OWN_LOOP = """
import time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ckpttool import distributed

def train(place):
    model = DistributedDataParallel(nn.Linear(4, 2))
    batches = [torch.randn(3, 4) for _ in range(5)]
    try:
        with distributed.Uneven(model, batches) as uneven:
            for number, batch in enumerate(uneven):
                if place.rank == 1 and number == 2:
                    raise ZeroDivisionError("in step 2")
                uneven.global_mean(model(batch).sum()).backward()
    except distributed.RankFailed as error:
        print(f"on rank {place.rank}: {error}", flush=True)

try:
    with distributed.process_group(timeout=100) as place:
        train(place)
except ZeroDivisionError:
    time.sleep(5)  # torchrun ends the other rank as soon as this one has ended
    raise
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "own_loop.py").write_text(OWN_LOOP)
    return f"{tmp_path}/own_loop.py"


@pytest.mark.long
def test_a_body_that_fails_on_a_rank_ends_the_others_which_name_it(script: str) -> None:
    """The group's timeout is 100 s, more than a test program may take with its start."""
    done = start([*TORCHRUN, "2", script])
    assert done.returncode == 1
    assert "on rank 0: rank 1 failed: ZeroDivisionError: in step 2" in done.stdout
    assert done.stderr.count("ZeroDivisionError: in step 2") == 1


def test_the_same_script_runs_without_a_launcher(script: str) -> None:
    done = start([sys.executable, script])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class OnGpu(torch.Tensor):
    """Stands in for a tensor on a GPU, which `cpu` copies into memory as a plain one."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def borrowed(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Return the types of the two parts of each batch, of which only rank 0 has one."""
    model, found = DistributedDataParallel(nn.Linear(6, 1)), []
    inputs, target = torch.ones(3, 6), torch.ones(3, 1)
    with Uneven(model, [(inputs.as_subclass(OnGpu), target)] if rank == 0 else []) as uneven:
        for batch in uneven:
            found.append((type(batch[0]).__name__, type(batch[1]).__name__))
            uneven.global_mean((model(batch[0].cpu()) - batch[1]).sum()).backward()
    return found


def test_a_batch_is_not_borrowed_with_the_device_of_the_rank_that_lends_it(run_ranks: Any) -> None:
    assert run_ranks(2, borrowed) == [[("OnGpu", "Tensor")], [("Tensor", "Tensor")]]


# ---- parts of a loop of your own: the process group, the mean of all samples, passes without a sample --


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
