"""Statistics under `--batchnorm pooled`: each rank keeps its own; those of all ranks replace them on request.

Plain BatchNorm under DDP keeps rank 0's statistics and discards the others' before each forward pass. Here
every rank keeps its own, and counts what it saw; evaluations and checkpoints use the statistics of all
samples. The ranks' own are saved in the checkpoint too, so that a resumed run equals one that never stopped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ckpttool import batchnorm
from ckpttool.distributed import collectives

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
    """The running statistics of one rank's model.

    Attributes:
        layers: path -> layer, each layer that keeps statistics once.
        met: layer -> (values per channel, batches) that it saw in training, on this rank.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = {
            path: layer
            for path, layer in model.named_modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        }
        self.met: dict[str, tuple[int, int]] = dict.fromkeys(self.layers, (0, 0))
        torch.compiler.reset()  # code compiled before the hooks exist would run without them
        for path, layer in self.layers.items():
            # Compiled with the model, counts would be constants: recompiled for each, and batches missed.
            count = torch.compiler.disable(functools.partial(self._count, path))
            layer.register_forward_pre_hook(count, with_kwargs=True)

    def buffer_names(self, model: nn.Module) -> list[str]:
        """The buffers that DDP must not overwrite with rank 0's; shared layers under each of their names."""
        own = {id(getattr(layer, name)) for layer in self.layers.values() for name in BUFFERS}
        return [name for name, buffer in model.named_buffers(remove_duplicate=False) if id(buffer) in own]

    @contextlib.contextmanager
    def pooled(self) -> Iterator[None]:
        """Inside this context the layers have the statistics of all ranks. A collective."""
        own = {path: {name: getattr(layer, name) for name in BUFFERS} for path, layer in self.layers.items()}
        for path, values in self._of_all_ranks().items():
            self._put(path, values)
        try:
            yield
        finally:
            for path, values in own.items():
                self._put(path, values)

    def take(self) -> dict[str, Any]:
        """This rank's own statistics, as stored in a checkpoint."""
        return {
            path: {
                "met": list(self.met[path]),
                **{name: getattr(layer, name).cpu().clone() for name in BUFFERS},
            }
            for path, layer in self.layers.items()
        }

    def put_back(self, saved: dict[str, Any]) -> None:
        with torch.no_grad():
            for path, layer in self.layers.items():
                values, batches = saved[path]["met"]
                self.met[path] = values, batches
                for name in BUFFERS:
                    getattr(layer, name).copy_(saved[path][name])

    def _count(self, path: str, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if layer.training:
            input, (values, batches) = next(iter((*given, *named.values()))), self.met[path]
            self.met[path] = values + input.numel() // input.shape[1], batches + 1

    def _put(self, path: str, values: dict[str, torch.Tensor]) -> None:
        """Replaces a layer's own tensors, which DDP still holds."""
        self.layers[path]._buffers.update(values)

    def _of_all_ranks(self) -> dict[str, dict[str, torch.Tensor]]:
        layers = list(self.layers.values())
        pooled = batchnorm.pool_over_ranks(layers, [self.met[path] for path in self.layers])
        steps = collectives.gather([int(layer.num_batches_tracked) for layer in layers])
        found = {}
        for number, (path, layer) in enumerate(self.layers.items()):
            # A rank without samples in a step did not count it.
            most = torch.full_like(layer.num_batches_tracked, max(of_rank[number] for of_rank in steps))
            mean, variance = (
                value.to(own.device, own.dtype)
                for value, own in zip(pooled[number], (layer.running_mean, layer.running_var), strict=True)
            )
            found[path] = dict(zip(BUFFERS, (mean, variance, most), strict=True))
        return found
