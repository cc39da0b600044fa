"""What a user's loss returned: whether it is a sum and a count."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from train.tasks.outputs import kind_of

PAIR = "return (sum, count): the sum of the batch's losses as a tensor, and their number as an integer"


def wrong_pair(returned: Any) -> str | None:
    """Return what is wrong with a loss that should be (sum, count), in words; None if it is one."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        return f"{kind_of(returned)}, not (sum, count)"
    total, count = returned
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.is_floating_point():
        return f"{kind_of(total)} as its sum, not a tensor of one number"
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.is_floating_point() or count.dtype in (torch.bool, torch.complex64):
            return f"{kind_of(count)} as its count, not an integer"
        if count.device.type != "cpu":  # looking at it would wait for the device
            return None
    elif isinstance(count, bool) or not isinstance(count, int | numpy.integer):
        return f"{count if isinstance(count, float) else kind_of(count)} as its count, not an integer"
    if not 0 <= int(count) < 2**63:
        return f"a count of {int(count)}"
    if int(count) == 0 and total.device.type == "cpu" and float(total.detach()) != 0:
        return f"a count of 0 for a sum of {float(total.detach()):g}"
    return None
