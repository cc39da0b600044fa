"""Parameters that did not affect the loss of a step: an error, or with `--find-unused` not updated.

Imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from ckpttool.distributed import collectives
from ckpttool.errors import CheckFailed

Named = Sequence[tuple[str, nn.Parameter]]


def require_used(model: str, parameters: Named, step: int) -> None:
    """Raise CheckFailed if a parameter did not affect this step's loss: DDP has not averaged it then."""
    for name, parameter in parameters:
        if parameter.grad is None:
            which = f"parameter {name} did not affect the output in step {step}"
            why = f"{which}, and ranks average the gradients of all parameters"
            ways = "let every forward pass use it (times 0 if need be), or set requires_grad=False"
            raise CheckFailed(f"--model {model}: {why}", hint=f"give --find-unused, {ways}")


class Used:
    """Which parameters the passes of a step have used, so that no rank updates the others.

    In one process these have no gradient, and an optimizer leaves them as they are. DDP leaves out those that
    no rank has used, but counts a pass without samples, whose gradients of zero bring momentum and decay.
    """

    def __init__(self, parameters: Named) -> None:
        self.parameters = parameters
        self._used: set[int] = set()
        self._counts = True
        for number, (_, parameter) in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))

    def _note(self, number: int, _: torch.Tensor) -> None:
        if self._counts:
            self._used.add(number)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let a pass in the block count as none."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def settle(self) -> None:
        """End a step's passes: take the gradients of parameters that no rank has used. A collective."""
        own = torch.tensor([number in self._used for number in range(len(self.parameters))])
        self._used.clear()
        of_ranks = collectives.total(own.long()).tolist()
        for (_, parameter), ranks in zip(self.parameters, of_ranks, strict=True):
            if not ranks:
                parameter.grad = None
