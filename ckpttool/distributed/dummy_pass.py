"""The forward and backward pass of a rank that has no samples, while the others have some. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import UsageFault
from . import randomness
from .nested import tensors


def run_dummy_pass(
    model: nn.Module,
    batch: Any,
    forward: Callable[[Any], Any] | None = None,
    *,
    together: bool = True,
) -> None:
    """Take part in one forward and backward pass with a gradient of zero, on a rank that has no samples.

    DistributedDataParallel waits for every rank in every backward pass. A real batch stands in for the empty
    one, because models fail on empty batches (`view(0, -1)`) and a mean over nothing is NaN. It leaves no
    trace: parameters get a gradient of zero, plain normalisation layers are frozen, and buffers and random
    states are restored. Layers with an attribute `absent` (`ckpttool.batchnorm.SyncBatchNorm`) take part with
    a count of 0, since the other ranks wait for this one in them, and all ranks keep the same statistics.

    Args:
        model: usually a DistributedDataParallel module, in training mode.
        batch: any batch that `forward` takes, such as one of a single sample, on the model's device.
        forward: returns the outputs or a loss for a batch, as tensors in any nesting; by default `model`.
            Every parameter that other ranks' passes use must affect it.
        together: whether other ranks train in this pass. If not, synchronised layers are frozen too.

    Raises:
        UsageFault: the model has torch's own SyncBatchNorm, which can't take part without samples.
    """
    with leaving_no_trace(model, together=together):
        outputs = [one for one in tensors((forward or model)(batch)) if one.requires_grad]
        torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])


@contextlib.contextmanager
def leaving_no_trace(model: nn.Module, *, together: bool = True) -> Iterator[None]:
    """Let what the block passes through a model leave no trace in it, as `run_dummy_pass` does.

    Args:
        model: in training mode.
        together: whether other ranks train meanwhile, so that synchronised layers have to take part.

    Raises:
        UsageFault: the model has torch's own SyncBatchNorm, which can't take part without samples.
    """
    layers = [one for one in model.modules() if isinstance(one, _NormBase) and one.training]
    taking_part = [one for one in layers if together and hasattr(one, "absent")]
    if together:
        require_no_torch_sync(model)
    # A frozen layer changes nothing itself; DDP gives it rank 0's statistics, as it does on every rank.
    kept = {id(buffer) for layer in layers for buffer in layer.buffers()}
    with (
        _set(taking_part, "absent", True),
        _set([one for one in layers if one not in taking_part], "training", False),
        buffers_restored(model, kept),
        _random_state_restored(),
    ):
        yield


def require_no_torch_sync(model: nn.Module) -> None:
    """Raise UsageFault if a layer in training mode is torch's own SyncBatchNorm."""
    for path, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training:
            raise UsageFault(
                f"'{path}' is torch's SyncBatchNorm, which can't take part on a rank without samples",
                hint="make it ckpttool.batchnorm.SyncBatchNorm: call ckpttool.batchnorm.to_sync(model) "
                "before moving the model to a GPU",
            )


@contextlib.contextmanager
def _set(layers: list[_NormBase], name: str, value: bool) -> Iterator[None]:
    """Set an attribute that has the other value, and set it back after the block."""
    for layer in layers:
        setattr(layer, name, value)
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, name, not value)


@contextlib.contextmanager
def buffers_restored(model: nn.Module, kept: Collection[int] = ()) -> Iterator[None]:
    """Restore the buffers of a model after the block, also those that it replaces."""
    before = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and id(buffer) not in kept
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffers, name, buffer, value in before:
                buffers[name] = buffer.copy_(value)


@contextlib.contextmanager
def _random_state_restored() -> Iterator[None]:
    before = randomness.take()
    try:
        yield
    finally:
        randomness.put_back(before)


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give each module its own mode again after the block."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def settle_buckets(ddp: nn.Module, one_pass: Callable[[], None]) -> None:
    """Let DDP settle on its buckets now. A collective; call it once, before the first step.

    DDP groups gradients into buckets, and groups them anew after the first backward pass, in the order in
    which gradients became ready (`rebuild_buckets` in torch's reducer.cpp, called by the second forward
    pass). With three or more ranks a gradient's sum depends in its last bits on where in a bucket it lies. So
    a resumed run, whose first step is in the old order, would differ from a run that never stopped. If both
    begin with this, they do not. With `find_unused_parameters=True` DDP never groups anew, and this does
    nothing of use.

    Args:
        ddp: the DistributedDataParallel module; its mode is restored; its gradients are cleared.
        one_pass: runs one forward and backward pass that leaves no trace, in training mode, such as
            `lambda: run_dummy_pass(ddp, batch, together=False)`. It is called twice.
    """
    with modes_kept(ddp):
        ddp.train()
        for _ in range(2):
            one_pass()
    for parameter in ddp.parameters():
        parameter.grad = None
