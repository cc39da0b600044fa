"""Ranks with different numbers of batches of different sizes train as one process does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ckpttool import batchnorm
from ckpttool.distributed import RankFailed, Uneven
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
