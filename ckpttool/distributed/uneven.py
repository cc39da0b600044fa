"""Exact steps of ranks that have different numbers of batches, of different sizes. Imports torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed import distributed_c10d

from ..errors import CheckFailed, UsageFault
from . import collectives, nested, transport
from .dummy_pass import leaving_no_trace, require_no_torch_sync
from .heartbeat import is_lost_rank

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
                count of 0 is replaced by a dummy.
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
                    raise UsageFault(
                        f"a batch has a count of {given}",
                        hint="count= returns how many samples, tokens or pixels a batch has",
                    )
                if count:
                    self._last = batch
        return count << 2 | (self._last is None) * NEEDS | self._over * OVER

    def _borrow(self, lender: int) -> None:
        """Give ranks that never had a batch one of another rank."""
        mine = self._last if collectives.rank() == lender else None
        on_gpu = [not tensor.is_cpu for tensor in nested.tensors(mine)]
        if any(on_gpu):
            mine = nested.mapped(mine, lambda tensor: tensor.cpu())
        lent, were_on_gpu = collectives.gather((mine, on_gpu))[lender]
        if self._last is None:
            self._last = lent
            if any(were_on_gpu):
                device, were = next(self.model.parameters()).device, iter(were_on_gpu)
                self._last = nested.mapped(lent, lambda tensor: tensor.to(device) if next(were) else tensor)


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
