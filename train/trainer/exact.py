"""The gradient of the mean over a whole batch, whatever each rank has of it. Imports torch.

Wanted in each step is the gradient of L = Σ S / C, as in one process that has all samples. S is the sum of
the losses of one rank in one pass, and C how many they are, over all ranks and passes of the step: samples,
tokens or pixels, or the total of their weights. Of N samples on W ranks:

1. A pass of a rank calls backward on W · S / N, where N is known beforehand (`global_mean_loss`). DDP and
   FSDP2 average over ranks, so the gradients of all passes are those of Σ S / N.
2. C may be known only after the last forward pass. Then all gradients are multiplied by N / C (`average`). It
   is one factor for all ranks, after the reduction, so this is exact under SyncBatchNorm too.
3. A rank that has no sample in a pass takes part in what the others send, with a gradient of 0, and its
   dummy is in no statistics (`run_dummy_pass`).
4. Samples that do not count, as of weight 0, add nothing to Σ S, but are in the statistics of synchronised
   layers. So the losses of other ranks depend on them, and on the parameters that they pass: such a rank has
   a gradient. Only what is 0 / 0 in it, as the gradient of a mean of nothing, is made 0 (`backward_of`).
5. A parameter that no rank has used has no gradient, as in one process; one that only some passes have used
   is refused, or has the gradient of these (`AllUsed`, `Used`).
6. Where nothing counts on any rank, C = 0 and L has no value: the step changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpttool.distributed import collectives, transport
from ckpttool.distributed.plan import Step
from ckpttool.distributed.uneven import gradients_changed, own_parameters, run_dummy_pass
from ckpttool.errors import CheckFailed
from train.config.sections import ModelConfig, TrainConfig
from train.model import wrapping
from train.model.updater import Updater
from train.model.wrapping import Sharded
from train.tasks.builtin import ModelLoss, Task, UserTask
from train.trainer.feed import Feed
from train.trainer.preflight import NO_GRADIENT
from train.trainer.progress import Progress, Sums

Named = Sequence[tuple[str, nn.Parameter]]

# What autograd calls the backward passes of synchronised layers: ours, and torch's.
SINK = "_DDPSinkBackward"  # with --find-unused, in which a model's outputs are copied
SYNCHRONISED = ("_SynchronisedBackward", "SyncBatchNormBackward")


class Exact:
    """The passes of a rank's steps, as the head of this file says.

    for number in range(1, passes + 1):
        with exact.one_pass(number, passes):
            ...                                                 # or exact.run_dummy_pass(...)
            with exact.backward_of(loss, outputs, count): ...
    exact.end_passes()
    step, counted = exact.average(step, sums)

    Attributes:
        dummy: a batch of one sample, the same on all ranks.
        used: which parameters the passes use.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        feed: Feed,
        ddp: DistributedDataParallel | Sharded,
        updater: Updater,
        progress: Progress,
        dummy: Any,
    ) -> None:
        self.config, self.task, self.feed, self.ddp = config, task, feed, ddp
        self.updater, self.progress = updater, progress
        self.dummy = dummy
        trained, settings = updater.parameters, config.model
        all_used = AllUsed(settings, trained, may_search=not config.batch.virtual_ranks)
        self.used = Used(trained) if settings.find_unused else all_used
        self._sends = settings.shard or wrapping.has_sync(ddp)
        self._count_sum: Callable[[], torch.Tensor] | None = None  # over ranks, of the present step

    def passes(self, step: Step) -> int:
        """Return the number of forward passes of this rank in a step: its own, at least one; or the most of
        any rank, if a pass sends, as through synchronised layers, and ranks must take equally many."""
        return step.passes if self._sends else max(len(step.micro_batches), 1)

    @contextmanager
    def one_pass(self, number: int, passes: int) -> Iterator[None]:
        """Return the context of pass `number` of `passes`, from 1, forward and backward.

        DDP reduces the gradients in the last pass, and only adds them to its own in those before.
        """
        if number > 1:
            self.used.between()
        with nullcontext() if number == passes else self.ddp.no_sync():
            yield

    def run_dummy_pass(self, after_forward: Callable[[], object] | None = None, **how: bool) -> None:
        """Run a pass with a gradient of zero, as this rank has no samples for it.

        Other ranks train in it, unless `together=False` is given.
        """

        def forward(batch: Any) -> Any:
            outputs = self.task.forward(self.ddp, batch)
            if after_forward is not None:
                after_forward()
            return outputs

        eager = wrapping.not_compiled() if self.config.model.compile else nullcontext()
        with eager, self.updater.precision.autocast(), self.used.paused():
            run_dummy_pass(self.ddp, self.dummy, forward, **how)

    def begin_count(self, sums: Sums) -> None:
        """Send what this rank has counted in a step, unless all know it. A collective, between the last
        forward pass and its backward pass: the sum over ranks arrives with the gradients.
        """
        if self.task.counts_samples and self.feed.is_planned:
            return
        # A count that lies on the GPU is not waited for here, or backward would begin later.
        count = torch.as_tensor(sums.count, dtype=torch.float64).reshape(1)
        others = torch.tensor([sums.samples, *self.feed.told()], dtype=torch.float64)
        own = torch.cat([count, others.to(count.device, non_blocking=True)])
        self._count_sum = collectives.begin_total(own)

    def backward_of(
        self, loss: torch.Tensor, outputs: Any, count: float | torch.Tensor
    ) -> AbstractContextManager[None]:
        """Return the context of a pass's backward: where nothing counts, what is 0 / 0 in it is 0.

        Raises:
            CheckFailed: the loss depends on no parameter; or is a mean of nothing, whose NaN a synchronised
                layer would send to the other ranks.
        """
        if not loss.requires_grad:  # torch's own error does not say in which step
            what = f"{self._loss()} does not depend on the parameters of --model {self.config.model.name}"
            raise CheckFailed(f"--task {self.task.name}: {what}", hint=NO_GRADIENT)
        is_far = isinstance(count, torch.Tensor) and count.device.type != "cpu"
        if not is_far or isinstance(self.task, ModelLoss):  # there, a model's count is waited for
            return nullcontext() if count else self._of_nothing(loss, outputs)
        if not isinstance(self.task, UserTask):  # the gradients of our own sums are 0 there
            return nullcontext()
        nothing = torch.as_tensor(count, device=loss.device) == 0
        return gradients_changed(transport.tensors(outputs), partial(_without_nan, nothing))

    @contextmanager
    def _of_nothing(self, loss: torch.Tensor, outputs: Any) -> Iterator[None]:
        """Let what is 0 / 0 be 0: where it begins, at the model's outputs; or else where it ends."""

        def refuse(gradients: Sequence[torch.Tensor | None]) -> None:
            if any(each is not None and not bool(each.isfinite().all()) for each in gradients):
                what = f"{self._loss()} is a mean of nothing, whose gradient is NaN"
                hint = "let the model return its scores too, or a mean that is 0 there"
                raise CheckFailed(f"--task {self.task.name}: {what} in a synchronised layer", hint=hint)

        def clean(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
            return tuple(_without_nan(True, each) for each in gradients)

        with ExitStack() as hooks:
            for copied in _nodes(loss.grad_fn, (SINK,)):
                for node in (node for node, _ in copied.next_functions if node is not None):
                    hooks.callback(node.register_prehook(clean).remove)
            for each in transport.tensors(outputs), own_parameters(self.ddp):
                hooks.enter_context(gradients_changed(each, partial(_without_nan, True)))
            for node in _nodes(loss.grad_fn, SYNCHRONISED):
                hooks.callback(node.register_prehook(refuse).remove)
            yield

    def _loss(self) -> str:
        return f"in step {self.progress.global_step + 1} the loss of rank {collectives.rank()}"

    def end_passes(self) -> None:
        """End a step's passes: what none has used has no gradient, or is an error. A collective."""
        self.used.end(self.progress.global_step + 1)

    def average(self, step: Step, sums: Sums) -> tuple[Step, bool]:
        """Make the reduced gradients those of the mean over all that the ranks counted.

        It waits for what `begin_count` sent. A collective where samples may be missing.

        Returns the step with the samples that it had, which may be fewer than planned, and whether anything
        counted: else the mean loss has no value, and the step is to change nothing.
        """
        if self._count_sum is None:
            return step, True
        total, *told = self._count_sum().tolist()
        self._count_sum = None
        planned = step.global_size
        if not self.feed.is_planned:
            step = self.feed.settle(step, int(told[0]), told[1:])
        if not total > 0:
            sums.loss = sums.count = 0  # a user's own sum over nothing may be NaN
            return step, False
        if total != planned:
            gradients = [p.grad for _, p in self.updater.parameters if p.grad is not None]
            torch._foreach_mul_(gradients, planned / total)
        return step, True


def _without_nan(nothing: bool | torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.masked_fill(~gradient.isfinite() & nothing, 0)


def _nodes(root: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the nodes of autograd's graph below a root that have one of these names."""
    open_nodes, seen = [root], {root}
    while open_nodes:
        node = open_nodes.pop()
        if node.name() in names:
            yield node
        new = {below for below, _ in node.next_functions if below is not None} - seen
        seen |= new
        open_nodes += new


# ---- which parameters the passes use ---------------------------------------------------------------------


class AllUsed:
    """Makes sure that each pass of a step uses all parameters, as ranks sum gradients by their order.

    used.between()      # after each pass but the last
    used.end()          # CheckFailed names a parameter that a pass has left out

    A parameter that only an earlier pass has used has a gradient all the same. Under DDP the last pass
    matters, in which all gradients are averaged, and so written to. FSDP2 sums over ranks in each pass.
    """

    def __init__(self, settings: ModelConfig, parameters: Named, *, may_search: bool = True) -> None:
        self.settings, self.parameters, self.may_search = settings, parameters, may_search
        self._kept: list[torch.Tensor] = []  # with --shard, of the passes before
        self._versions: list[int | None] = []  # else, before the last pass

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()  # a pass without samples uses all, too

    def between(self) -> None:
        gradients = [parameter.grad for _, parameter in self.parameters]
        if not self.settings.shard:
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
        flag = "give --find-unused, " if self.may_search and not self.settings.shard else ""
        ways = "let every forward pass use it (times 0 if need be), or set requires_grad=False"
        return CheckFailed(f"--model {self.settings.name}: {why}", hint=f"{flag}{ways}")


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

    @contextmanager
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
