"""The loss whose gradient, averaged over ranks, is that of the mean over all samples. Imports torch."""

from __future__ import annotations

import torch

from . import transport


def global_mean_loss(loss_sum: torch.Tensor, global_count: int | torch.Tensor) -> torch.Tensor:
    """Return the loss on which a rank calls backward, so that DDP ends with the gradient of the global mean.

    DDP averages gradients over the W ranks. The gradient of the mean loss over all N samples of a global
    batch is the average of each rank's gradient of W · Σℓ / N, with Σℓ over its own samples: exact for
    shares of any size, 0 included. The usual mean of each rank's mean is not, when shares differ.

    Args:
        loss_sum: the sum of the losses of this rank's samples, tokens or pixels in a pass; a scalar. With
            several passes before a step, each pass's own sum.
        global_count: how many samples, tokens or pixels all ranks have together in the whole step; the same
            number on every rank. A tensor on a GPU is waited for.

    Raises:
        ValueError: the count is 0 or less, on every rank alike: no mean exists. Skip such a step.
    """
    count = int(global_count)
    if count <= 0:
        raise ValueError(f"the mean loss over {count} samples has no value: skip the step on every rank")
    return loss_sum * (transport.world_size() / count)
