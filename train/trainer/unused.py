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
from train.config.training import TrainConfig

Named = Sequence[tuple[str, nn.Parameter]]


class AllUsed:
    """Makes sure that each pass of a step uses all parameters, as ranks sum gradients by their order.

    used.between()      # after each pass but the last
    used.end()          # CheckFailed names a parameter that a pass has left out

    A parameter that only an earlier pass has used has a gradient all the same. Under DDP the last pass
    matters, in which all gradients are averaged, and so written to. FSDP2 sums over ranks in each pass.
    """

    def __init__(self, config: TrainConfig, parameters: Named) -> None:
        self.config, self.parameters = config, parameters
        self._kept: list[torch.Tensor] = []  # with --shard, of the passes before
        self._versions: list[int | None] = []  # else, before the last pass

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # a pass without samples uses all, too

    def between(self) -> None:
        gradients = [parameter.grad for _, parameter in self.parameters]
        if not self.config.shard:
            self._versions = [None if grad is None else grad._version for grad in gradients]
            return
        self._kept = self._added()
        for _, parameter in self.parameters:
            parameter.grad = None

    def end(self, step: int) -> None:
        before, self._versions = self._versions or [None] * len(self.parameters), []
        for (name, parameter), version in zip(self.parameters, before, strict=True):
            if parameter.grad is None or parameter.grad._version == version:
                raise self._unused(name, f"in step {step}")
        if self._kept:
            for (_, parameter), grad in zip(self.parameters, self._added(), strict=True):
                parameter.grad = grad
            self._kept = []

    @torch.no_grad()
    def _added(self) -> list[torch.Tensor]:
        """Return the gradients with those of the passes before."""
        for name, parameter in self.parameters:
            if parameter.grad is None:
                raise self._unused(name, "in a pass")
        new = [parameter.grad for _, parameter in self.parameters if parameter.grad is not None]
        return [kept.add_(grad) for kept, grad in zip(self._kept, new, strict=True)] if self._kept else new

    def _unused(self, name: str, where: str) -> CheckFailed:
        which = f"parameter {name} did not affect the output {where}"
        why = f"{which}, and ranks average the gradients of all parameters"
        flag = "" if self.config.shard or self.config.virtual_ranks else "give --find-unused, "
        ways = "let every forward pass use it (times 0 if need be), or set requires_grad=False"
        return CheckFailed(f"--model {self.config.model}: {why}", hint=f"{flag}{ways}")


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

    def between(self) -> None:
        """A pass is done, and not the last one of a step."""

    def end(self, step: int) -> None:
        """End a step's passes: take the gradients of parameters that no rank has used. A collective."""
        own = torch.tensor([number in self._used for number in range(len(self.parameters))])
        self._used.clear()
        of_ranks = collectives.total(own.long()).tolist()
        for (_, parameter), ranks in zip(self.parameters, of_ranks, strict=True):
            if not ranks:
                parameter.grad = None
