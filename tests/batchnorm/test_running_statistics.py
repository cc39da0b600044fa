"""Running statistics over all ranks in a loop of the user's own, against one process with all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpttool import batchnorm
from tests.support.running import error_of

STEPS, SAMPLES = 5, 8


def batches() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(STEPS, SAMPLES, 3, 4, generator=generator, dtype=torch.float64) * 3 + 100


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


class Shared(nn.Module):
    """One layer under two names, and one that is used on some ranks and in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(3)
        self.sometimes = nn.BatchNorm1d(3, momentum=0.5)

    def forward(self, x: torch.Tensor, often: bool = True) -> torch.Tensor:
        if often:
            self.sometimes(x)
        return self.second(self.first(x)[:, :, :2] + x[:, :, :2])


def run_shared(rank: int, world_size: int, sizes: list[int]) -> Any:
    model = Shared().double()
    statistics = batchnorm.RunningStatistics(model)
    for step, batch in enumerate(batches()):
        own = batch.split(sizes)[rank]
        if len(own):
            model(own, often=(step + rank) % 2 == 0)
        statistics.end_step()
    return list(statistics.layers), buffers(model)


@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [3, 5], [0, 6, 2]], ids=str)
def test_a_layer_that_only_some_ranks_use_in_a_step_has_their_samples(run_ranks: Any, sizes: Any) -> None:
    layer = nn.BatchNorm1d(3, momentum=0.5).double()
    for step, batch in enumerate(batches()):
        parts = [part for rank, part in enumerate(batch.split(sizes)) if (step + rank) % 2 == 0]
        if sum(map(len, parts)):
            layer(torch.cat(parts))
    answers = run_ranks(len(sizes), run_shared, sizes)
    for paths, found in answers:
        assert paths == ["first", "sometimes"]
        for name, expected in buffers(layer).items():
            assert torch.allclose(found[f"sometimes.{name}"], expected, rtol=1e-12), name
        assert all(torch.equal(found[name], other) for name, other in answers[0][1].items())
        assert found["first.num_batches_tracked"].item() == 2 * STEPS


def run_switched(rank: int, world_size: int) -> Any:
    """Freeze the layer from the third step on, in which it normalises by its statistics."""
    layer = nn.BatchNorm1d(3).double()
    statistics, outputs = batchnorm.RunningStatistics(layer), []
    for step, batch in enumerate(batches()):
        layer.train(step < 2)
        output = layer(batch.chunk(world_size)[rank])
        statistics.end_step()
        if step >= 2:
            outputs.append(output.detach())
    return outputs, buffers(layer)


def test_a_layer_that_is_frozen_later_normalises_by_all_ranks_samples(run_ranks: Any) -> None:
    layer, expected = nn.BatchNorm1d(3).double(), []
    for step, batch in enumerate(batches()):
        layer.train(step < 2)
        expected.append(layer(batch))
    answers = run_ranks(2, run_switched)
    for step in range(3):
        found = torch.cat([outputs[step] for outputs, _ in answers])
        assert torch.allclose(found, expected[step + 2], rtol=1e-10)
    for name, buffer in layer.named_buffers():
        assert torch.allclose(answers[1][1][name], buffer, rtol=1e-12)


def run_narrow(rank: int, world_size: int, dtype: torch.dtype) -> Any:
    layer = nn.BatchNorm1d(3)
    statistics = batchnorm.RunningStatistics(layer)
    for batch in batches():
        layer(batch.chunk(world_size)[rank].to(dtype))
        statistics.end_step()
    return buffers(layer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_inputs_as_under_autocast_keep_statistics_in_float32(run_ranks: Any, dtype: Any) -> None:
    layer = nn.BatchNorm1d(3)
    for batch in batches():
        layer(batch.to(dtype))
    for found in run_ranks(2, run_narrow, dtype):
        assert torch.allclose(found["running_mean"], layer.running_mean, rtol=1e-5)
        assert torch.allclose(found["running_var"], layer.running_var, rtol=1e-3)


def run_refused(rank: int, world_size: int) -> tuple[str, str]:
    layer = nn.BatchNorm1d(3)
    batchnorm.RunningStatistics(layer)
    return error_of(lambda: layer(torch.zeros(2, 4 + rank)))


def test_an_input_that_does_not_fit_is_refused_by_the_layer_itself(run_ranks: Any) -> None:
    for kind, said in run_ranks(2, run_refused):
        assert kind in ("ValueError", "RuntimeError") and "should contain" in said


def test_in_one_process_nothing_is_different_to_the_bit() -> None:
    plain, ours = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    statistics = batchnorm.RunningStatistics(ours)
    for batch in batches():
        plain(batch)
        ours(batch)
        statistics.end_step()
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(ours.named_buffers())[name]), name


def test_synchronised_layers_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), batchnorm.SyncBatchNorm(2), nn.SyncBatchNorm(2))
    assert list(batchnorm.RunningStatistics(model).layers) == ["0"]
