"""An exponential moving average of a model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ckpttool.distributed import collectives

Tensor = torch.Tensor


class Ema:
    """The exponential moving average of a model: average = decay · average + (1 - decay) · value, by step.

    It starts as the weights after the first step, as `torch.optim.swa_utils.AveragedModel` does. Parameters
    and the running statistics of normalisation layers are averaged; other buffers (counters, masks) are
    those of the last step. Parameters of two bytes are averaged in float32: in their own dtype, an addend of
    a thousandth would be rounded away. A tensor with two names has one average.

    Under plain BatchNorm each rank has its own statistics, and rank 0's are used; so are their averages.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.updates = model, decay, 0
        self._swapped = False
        self._averaged = {id(parameter) for parameter in model.parameters()}
        for layer in model.modules():
            if isinstance(layer, _NormBase):
                buffers = layer.named_buffers(recurse=False)
                self._averaged |= {id(buffer) for _, buffer in buffers if buffer.is_floating_point()}
        averages = {id(value): _average_of(value) for value in self._values().values()}
        self._averages = {name: averages[id(value)] for name, value in self._values().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's present values, after an optimizer's step."""
        self._require_own_weights()
        self.updates += 1
        first, done = self.updates == 1, set()
        for name, value in self._values().items():
            average = self._averages[name]
            if id(average) in done:
                continue
            done.add(id(average))
            if first or id(value) not in self._averaged:
                average.copy_(value)
            else:
                average.lerp_(value.to(average.dtype), 1 - self.decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model have the averages inside the block, and its own values, to the bit, afterwards.

        A collective: every rank has rank 0's buffers inside.
        """
        self._require_own_weights()
        self.share()
        values = self._values()
        before = {name: value.detach().clone() for name, value in values.items()}
        self._swapped = True
        try:
            _copy(self._averages, values)
            yield
        finally:
            _copy(before, values)
            self._swapped = False

    def share(self) -> None:
        """Give every rank the averages of rank 0's buffers. A collective."""
        buffers = {id(buffer) for buffer in self.model.buffers()}
        values = self._values()
        collectives.broadcast_into(self._averages[name] for name in values if id(values[name]) in buffers)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the averages, named as in the model's state. A collective."""
        self._require_own_weights()
        self.share()
        return {"updates": self.updates, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned; raise ValueError if it is of another model."""
        self._require_own_weights()
        saved = state["averages"]
        if saved.keys() != self._averages.keys():
            odd = sorted(saved.keys() ^ self._averages.keys())[0]
            raise ValueError(f"the averaged model has other names: {odd}")
        for name, average in self._averages.items():
            if saved[name].shape != average.shape:
                raise ValueError(f"the average of {name} has the shape {list(saved[name].shape)}")
            average.copy_(saved[name])
        self.updates = state["updates"]

    def _values(self) -> dict[str, Tensor]:
        # Themselves, not copies.
        state = self.model.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def _require_own_weights(self) -> None:
        if self._swapped:
            raise RuntimeError("the model has its averages at present: leave `swapped` first")


def _average_of(value: Tensor) -> Tensor:
    """Return a copy, in float32 for a float dtype of two bytes or less."""
    small = value.is_floating_point() and value.element_size() <= 2
    return value.detach().to(torch.float32 if small else value.dtype, copy=True)


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])
