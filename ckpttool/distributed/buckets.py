"""DistributedDataParallel's buckets, settled before the first step. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .modes import modes_kept


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
