"""Running statistics of plain BatchNorm over the samples of all ranks, step by step. Imports torch.

Under DistributedDataParallel each rank normalises by its own samples, and rank 0's running statistics replace
the others'. What a rank keeps can't be pooled exactly afterwards: the variance between ranks within a step is
gone from its averages. So here each rank's moments are combined in every step, before they are averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..distributed import collectives
from .pool_files import pool
from .sync_batchnorm import SyncBatchNorm, combine, moments, update_running

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
    """Gives a model's BatchNorm layers the running statistics of all ranks' samples.

        statistics = RunningStatistics(model)       # before DistributedDataParallel
        for batch in batches:
            ...                                     # any number of forward and backward passes
            statistics.end_step()
            optimizer.step()

    After each step every rank has, to the bit, the statistics that one process would have after the same
    forward passes with the samples of all ranks. The n-th passes of all ranks through a layer in a step count
    as one; a rank that passes less often counts as without samples. Each layer's momentum, None included,
    applies as in torch. Layers in evaluation mode, without running statistics, or synchronised are left
    alone. Samples are still normalised by each rank's own, so weights are those of plain BatchNorm. Under
    `torch.compile` there is a graph break at each layer; `fullgraph=True` fails.

    Attributes:
        layers: path -> layer, each layer once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = {
            path: layer
            for path, layer in model.named_modules()
            if isinstance(layer, _BatchNorm)
            and not isinstance(layer, nn.SyncBatchNorm | SyncBatchNorm)
            and layer.running_mean is not None
        }
        self._calls: list[str] = []
        self._moments: list[torch.Tensor] = []
        self._before: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        torch.compiler.reset()  # code compiled before the hooks exist would run without them
        for path, layer in self.layers.items():
            # Inside a compiled graph, the lists that it appends to would be constants.
            hook = torch.compiler.disable(partial(self._record, path))  # type: ignore[no-untyped-call]
            layer.register_forward_pre_hook(hook, with_kwargs=True)

    def end_step(self) -> None:
        """Update the statistics with the passes since the last call, over all ranks. A collective.

        Each rank sends one message, with three float64 numbers per channel for each pass through a layer.
        """
        if not self.layers or collectives.world_size() == 1:
            return
        rows = torch.cat(self._moments, dim=1) if self._moments else torch.zeros(3, 0, dtype=torch.float64)
        of_ranks = collectives.gather((self._calls, rows.cpu().numpy()))
        for buffer, before in (pair for pairs in self._before.values() for pair in pairs):
            buffer.copy_(before)
        self._calls, self._moments, self._before = [], [], {}
        passes, aligned = self._aligned(of_ranks)
        counts, mean, variance = combine(aligned)
        device = next(iter(self.layers.values())).get_buffer("running_mean").device
        mean, variance = torch.stack([mean, variance]).to(device)
        start = 0
        for layer in passes:
            columns = slice(start, start + layer.num_features)
            start = columns.stop
            count = float(counts[columns][0])
            if count > 1:
                update_running(layer, mean[columns], variance[columns], count)

    def _record(self, path: str, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record the moments of a training input, and what the layer is about to change."""
        if not layer.training or collectives.world_size() == 1:
            return
        if torch._C._current_graph_task_id() != -1:
            return  # in a backward pass: a gradient checkpoint computes again what has been recorded
        input = next(iter((*given, *named.values())))
        if input.dim() < 2 or input.shape[1] != layer.num_features:
            return  # the layer will refuse it
        if path not in self._before:
            buffers = (getattr(layer, name) for name in BUFFERS)
            self._before[path] = [(buffer, buffer.clone()) for buffer in buffers if buffer is not None]
        self._calls.append(path)
        self._moments.append(moments(input))

    def _aligned(self, of_ranks: list[tuple[list[str], Any]]) -> tuple[list[Any], torch.Tensor]:
        """Return the layers, one a pass, and [ranks, 3, channels], 0 where a rank passed less often."""
        by_pass: dict[tuple[str, int], torch.Tensor] = {}
        for rank, (calls, rows) in enumerate(of_ranks):
            widths = [self.layers[path].num_features for path in calls]
            columns = torch.split(torch.from_numpy(rows), widths, dim=1)
            passes: Counter[str] = Counter()
            for path, column in zip(calls, columns, strict=True):
                key = path, passes[path]
                passes[path] += 1
                if key not in by_pass:
                    by_pass[key] = torch.zeros(len(of_ranks), *column.shape, dtype=torch.float64)
                by_pass[key][rank] = column
        nothing = torch.zeros(len(of_ranks), 3, 0, dtype=torch.float64)
        return [self.layers[path] for path, _ in by_pass], torch.cat([nothing, *by_pass.values()], dim=2)


def pool_over_ranks(
    layers: Sequence[nn.Module], seen: Sequence[tuple[float, float]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the running mean and variance of all ranks, which have their own. A collective.

    They are computed by `pool`, whose limits apply. `RunningStatistics` is exact for any momentum.

    Args:
        layers: with running statistics, the same on every rank and in the same order.
        seen: values per channel, and batches, that each layer has seen on this rank. Averages over all
            batches (`momentum=None`) weight a rank by its values, others by its values per batch.

    Returns:
        Mean and variance of each layer, float64, on the CPU; this rank's own if no rank has seen two values.
    """
    local = []
    for layer, (values, batches) in zip(layers, seen, strict=True):
        buffers = (layer.get_buffer(name).double().cpu().numpy() for name in BUFFERS[:2])
        local.append((*buffers, values / batches if batches else 0.0, batches))
    statistics = []
    gathered = zip(*collectives.gather(local), strict=True)
    for layer, this, of_ranks in zip(layers, local, gathered, strict=True):
        means, variances, sizes, counters = zip(*of_ranks, strict=True)
        mean, variance = this[:2]
        if sum(sizes) > 1:
            pooled = pool(means, variances, sizes, batches=counters if layer.momentum is None else None)
            mean, variance = pooled.mean, pooled.variance
        statistics.append((torch.from_numpy(mean), torch.from_numpy(variance)))
    return statistics
