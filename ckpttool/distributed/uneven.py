"""Exact steps of ranks with different numbers of samples, and passes that leave no trace. Imports torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _NormBase

from ..errors import CheckFailed, UsageFault
from . import collectives, randomness, transport
from .heartbeat import is_lost_rank
from .transport import tensors


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
        with gradients_changed(own_parameters(model), torch.zeros_like):  # also where it is 0 / 0
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])


def own_parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    """Return the parameters that get gradients in a pass; of a model that FSDP2 divides, its `wholes`."""
    return getattr(model, "wholes", None) or model.parameters()


@contextlib.contextmanager
def gradients_changed(
    of: Iterable[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor | None]
) -> Iterator[None]:
    """Let backward passes in the block change the gradients of these tensors before they are used."""
    trained = (each for each in of if each.requires_grad)
    hooks = [each.register_hook(change) for each in trained]  # type: ignore[no-untyped-call]
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
            call = "call ckpttool.batchnorm.to_sync(model) before moving the model to a GPU"
            raise UsageFault(
                f"'{path}' is torch's SyncBatchNorm, which can't take part on a rank without samples",
                hint=f"make it ckpttool.batchnorm.SyncBatchNorm: {call}",
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


# ---- Exact steps of ranks with different batches


Batch = TypeVar("Batch")

# One for each use, the same on all ranks, so that a failure of an earlier use is not taken for one of this.
NUMBERS = itertools.count()

# Marks in what a rank tells the others: it has no more batches; it never had one.
OVER, NEEDS = 1, 2


class Uneven(Generic[Batch]):
    """The batches of this rank, with as many steps on every rank, whose gradients are exact.

        with Uneven(ddp, loader) as uneven:
            for inputs, target in uneven:
                loss_sum = F.cross_entropy(ddp(inputs), target, reduction="sum")
                uneven.global_mean(loss_sum).backward()
                optimizer.step()
                optimizer.zero_grad()

    Each step's gradient is that of the mean loss over the samples of all ranks, as in one process. A rank
    that has run out repeats a batch with a gradient of 0 (`leaving_no_trace`), one that never had a batch
    borrows another rank's, so optimizers take the same steps everywhere. One small message per step tells the
    counts.

    torch's `Join` lets ranks run out too, but divides each step's gradients by the number of ranks: samples
    in small batches, or in steps that fewer ranks take, have another weight. Nor does it cover SyncBatchNorm
    (torch's docs of `DistributedDataParallel.join`) or `no_sync` (pytorch#44425). Here
    `ckpttool.batchnorm.SyncBatchNorm` counts a rank that has run out as without samples.

    For gradient accumulation let each batch be a list of as many micro-batches on every rank, with `count`
    their samples together; call `global_mean` for each, under `ddp.no_sync()` for all but the last.

    If loading a batch fails on a rank, all ranks raise at once. If the body fails on a rank, the others raise
    an error that names it as soon as it leaves `distributed.process_group` or exits.

    Attributes:
        is_dummy: whether this rank has no batch in this step, and the current one is a dummy.
        global_count: samples of all ranks in the current step.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[Batch], count: Callable[[Batch], int] | None = None
    ) -> None:
        """Wrap the batches of a rank. A collective in each step, so create it on every rank.

        Args:
            model: the DistributedDataParallel module, in training mode.
            batches: of this rank, any number; iterated over again by each `for`.
            count: batch -> how many samples, tokens or pixels its loss is summed over; by default the length
                of the first axis of a tensor, or of a flat list, tuple or mapping of tensors. A batch with a
                count of 0 is replaced by a dummy, and so is in no statistics of synchronised layers.
        """
        self.model, self.batches, self._count_of = model, batches, count or length
        self.is_dummy, self.global_count = False, 0
        self._over = False
        self._last: Batch | None = None
        self._pass = contextlib.ExitStack()
        self._note = f"ckpttool/uneven/{next(NUMBERS)}"

    def __enter__(self) -> Uneven[Batch]:
        if collectives.world_size() > 1:
            collectives.report_once(lambda: require_no_torch_sync(self.model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Restore the model; a failure is noted in the store for the others, whose next collective breaks.
        self._pass.close()
        if error is None or isinstance(error, collectives.RankFailed) or collectives.world_size() == 1:
            return
        said = ""
        with contextlib.suppress(RuntimeError):  # the store may have gone with rank 0
            store = distributed_c10d._get_default_store()
            if not is_lost_rank(error):
                failure = f"{type(error).__name__}: {getattr(error, 'message', error)}"
                store.set(self._note, f"rank {collectives.rank()} failed: {failure}")
            elif store.check([self._note]):
                said = bytes(store.get(self._note)).decode()
        if said:
            raise collectives.RankFailed(said) from error

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches, then dummies until all ranks have run out. A collective in each step.

        Raises:
            Exception: what loading or counting a batch raised; RankFailed on the other ranks.
            CheckFailed: no rank has a sample in a step, though some have a batch.
        """
        batches, self._over = iter(self.batches), False
        try:
            while True:
                told = collectives.agree(lambda: ({}, self._load(batches)), "in Uneven")
                if all(number & OVER for number in told):
                    return
                counts = [number >> 2 for number in told]
                self.global_count = sum(counts)
                if not self.global_count:
                    raise CheckFailed("no rank has a sample in this step", hint="leave out empty batches")
                if any(number & NEEDS for number in told):
                    self._borrow(next(rank for rank, count in enumerate(counts) if count))
                self.is_dummy = not counts[collectives.rank()]
                if self.is_dummy:
                    self._pass.enter_context(leaving_no_trace(self.model))
                assert self._last is not None
                yield self._last
                self._pass.close()
        finally:
            self._pass.close()
            self.is_dummy = False

    def global_mean(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on: this rank's part of the global mean, 0 for a dummy.

        Args:
            loss_sum: the sum of the losses of the batch's samples, tokens or pixels; a scalar.
        """
        return loss_sum * 0.0 if self.is_dummy else global_mean_loss(loss_sum, self.global_count)

    def _load(self, batches: Iterator[Batch]) -> int:
        """Load the next batch; return its count and the marks as one number."""
        count = 0
        if not self._over:
            try:
                batch = next(batches)
            except StopIteration:
                self._over = True
            else:
                given = self._count_of(batch)
                count = int(given)
                if count < 0 or count != given:
                    hint = "count= returns how many samples, tokens or pixels a batch has"
                    raise UsageFault(f"a batch has a count of {given}", hint=hint)
                if count:
                    self._last = batch
        return count << 2 | (self._last is None) * NEEDS | self._over * OVER

    def _borrow(self, lender: int) -> None:
        """Give ranks that never had a batch one of another rank."""
        mine = self._last if collectives.rank() == lender else None
        on_gpu = [not tensor.is_cpu for tensor in transport.tensors(mine)]
        if any(on_gpu):
            mine = transport.mapped(mine, lambda tensor: tensor.cpu())
        lent, were_on_gpu = collectives.gather((mine, on_gpu))[lender]
        if self._last is None:
            self._last = lent
            if any(were_on_gpu):
                device, were = next(self.model.parameters()).device, iter(were_on_gpu)
                self._last = transport.mapped(lent, lambda part: part.to(device) if next(were) else part)


def length(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first axis of its tensors."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    tensors = [parts] if isinstance(parts, torch.Tensor) else list(parts)
    plain = all(isinstance(part, torch.Tensor) and part.dim() for part in tensors)
    lengths = {len(tensor) for tensor in tensors} if plain else set()
    if len(lengths) != 1:
        reason = "the number of samples in a batch can't be told from its tensors"
        raise UsageFault(reason, hint="give count=, a function that returns it for a batch")
    return lengths.pop()


def global_mean_loss(loss_sum: torch.Tensor, global_count: float | torch.Tensor) -> torch.Tensor:
    """Return the loss on which a rank calls backward, so that DDP ends with the gradient of the global mean.

    DDP averages gradients over the W ranks. The gradient of the mean loss over the N samples of a global
    batch is the average of each rank's gradient of W · Σℓ / N, with Σℓ over its own samples: exact for shares
    of any size, 0 included. The usual mean of each rank's mean is not, when shares differ.

    Args:
        loss_sum: the sum of the losses of this rank's samples, tokens or pixels in a pass; a scalar.
        global_count: the samples, tokens or pixels of all ranks in the whole step, with all its passes, or
            the sum of their weights; the same number on every rank. A tensor on a GPU is waited for.

    Raises:
        ValueError: the count is not above 0, so no mean exists: skip such a step on every rank.
    """
    count = float(global_count)
    if not count > 0:  # nor NaN
        raise ValueError(f"the mean loss over {count:g} samples has no value: skip the step on every rank")
    return loss_sum * (transport.world_size() / count)
