"""The training modes of a model's modules, kept over a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give each module its own mode again after the block.

    `model.train(was_training)` would not: it also wakes layers that were frozen by `layer.eval()`, whose
    running statistics then drift.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
