"""Passes that leave no trace: of a rank without samples, or before the first step. Imports torch."""

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
    model: nn.Module, batch: Any, forward: Callable[[Any], Any] | None = None, *, together: bool = True
) -> None:
    """Take part in one forward and backward pass with a gradient of zero, on a rank that has no samples.

    DistributedDataParallel waits for every rank in every backward pass. A real batch replaces the empty one:
    models fail on empty batches (`view(0, -1)`), and a mean over nothing is NaN. Parameters get a gradient of
    zero, plain normalisation layers are frozen, buffers and random states restored. Layers with an attribute
    `absent` (`ckpttool.batchnorm.SyncBatchNorm`) take part with a count of 0: the others wait in them.

    Args:
        model: usually a DistributedDataParallel module, in training mode.
        batch: any batch that `forward` takes, on the model's device.
        forward: batch -> outputs or loss, tensors in any nesting; by default `model`. Every parameter that
            other ranks' passes use must affect it.
        together: whether other ranks train in this pass; if not, synchronised layers are frozen too.

    Raises:
        UsageFault: the model has torch's own SyncBatchNorm, which can't take part without samples.
    """
    with leaving_no_trace(model, together=together):
        outputs = [output for output in tensors((forward or model)(batch)) if output.requires_grad]
        with gradients_zeroed(model):
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])


@contextlib.contextmanager
def gradients_zeroed(model: nn.Module) -> Iterator[None]:
    """Let backward passes in the block bring gradients of zero, also where that is 0 / 0, as of a mean.

    Of a model that FSDP2 divides, `wholes` are the parameters that get gradients.
    """
    parameters = getattr(model, "wholes", None) or model.parameters()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    hooks = [each.register_hook(torch.zeros_like) for each in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def leaving_no_trace(model: nn.Module, *, together: bool = True) -> Iterator[None]:
    """Let passes in the block leave no trace in a model in training mode, as in `run_dummy_pass`.

    Args and Raises are those of `run_dummy_pass`.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _NormBase) and layer.training]
    taking_part = [layer for layer in layers if together and hasattr(layer, "absent")]
    if together:
        require_no_torch_sync(model)
    # A frozen layer changes nothing itself; DDP gives it rank 0's statistics, as it does on every rank.
    kept = {id(buffer) for layer in layers for buffer in layer.buffers()}
    with (
        _set(taking_part, "absent", True),
        _set([layer for layer in layers if layer not in taking_part], "training", False),
        buffers_restored(model, kept),
        randomness.restored(gpu=True),
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
    """Restore the buffers of a model after the block, except those whose `id` is in `kept`."""
    # By module and name, since the block may replace a buffer instead of writing to it.
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
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give each module its own mode again after the block."""
    # `model.train(was_training)` would also wake layers frozen by `layer.eval()`, whose statistics then
    # drift.
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def settle_buckets(ddp: nn.Module, one_pass: Callable[[], None]) -> None:
    """Let DDP settle on its buckets now. A collective; call it once, before the first step.

    DDP regroups gradients into buckets after the first backward pass, in the order in which they became ready
    (`rebuild_buckets` in torch's reducer.cpp, called by the second forward pass). With three or more ranks a
    gradient's sum depends in its last bits on its place in a bucket, so a resumed run, whose first step has
    the old order, would differ from one that never stopped; not if both begin with this. With
    `find_unused_parameters=True` DDP never regroups, and this has no effect.

    Args:
        ddp: the DistributedDataParallel module, in its training modes; its gradients are cleared.
        one_pass: runs a forward and backward pass that leaves no trace, such as
            `lambda: run_dummy_pass(ddp, batch, together=False)`. Called twice.
    """
    for _ in range(2):
        one_pass()
    for parameter in ddp.parameters():
        parameter.grad = None
