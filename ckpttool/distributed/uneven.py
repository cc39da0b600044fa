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

# One for each use, the same on all ranks, so that a failure is not taken for one of another use.
NUMBERS = itertools.count()

# Marks in what a rank tells the others: it has no more batches; it has nothing to stand in with.
OVER, NEEDS = 1, 2


class Uneven(Generic[Batch]):
    """The batches of this rank, with as many steps on every rank, whose gradients are exact.

        with Uneven(ddp, loader) as uneven:
            for inputs, target in uneven:
                loss_sum = F.cross_entropy(ddp(inputs), target, reduction="sum")
                uneven.global_mean(loss_sum).backward()
                optimizer.step()
                optimizer.zero_grad()

    In each step the gradient is that of the mean loss over the samples of all ranks, as one process would
    have it. A rank that has run out goes on with a batch that it has had, whose gradient is 0 and which
    leaves no trace (`dummy_pass.leaving_no_trace`); a rank that never had one borrows another rank's. So
    optimizers take the same steps on all ranks. One small message per step tells the counts before forward.

    torch's `Join` lets ranks run out too, but it divides each step's gradients by the number of ranks: a
    sample in a small batch, or in a step that fewer ranks take, weighs more or less than the others. Nor does
    it cover SyncBatchNorm, as torch's documentation of `DistributedDataParallel.join` says, or
    `no_sync` (pytorch#44425). Here `ckpttool.batchnorm.SyncBatchNorm` counts a rank that has run out as
    without samples.

    For gradient accumulation let each batch be a list of micro-batches, as many on every rank, with `count`
    their samples together; call `global_mean` for each, under `ddp.no_sync()` for all but the last.

    If a batch can't be loaded on a rank, all ranks raise at once. If the body fails on a rank, that rank
    raises its own error, and the others raise one that names it as soon as it leaves its process group
    (`distributed.process_group`) or exits; for a rank that does neither, they wait up to the group's timeout.

    Attributes:
        is_dummy: whether the current batch is a dummy, since this rank has none.
        count: samples of all ranks in the current step.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[Batch], count: Callable[[Batch], int] | None = None
    ) -> None:
        """Wrap the batches of a rank. A collective in each step, so create it on every rank.

        Args:
            model: the DistributedDataParallel module, in training mode.
            batches: of this rank; iterated over anew by each `for`. As many as there are, also none.
            count: returns how many samples, tokens or pixels a batch's loss is summed over. By default the
                batch is a tensor, or a flat list, tuple or mapping of tensors, and it is the length of
                their first axis. A batch with a count of 0 is replaced by one that stands in.
        """
        self.model, self.batches, self._count_of = model, batches, count or length
        self.is_dummy, self.count = False, 0
        self._over = False
        self._last: Batch | None = None
        self._held = contextlib.ExitStack()
        self._note = f"ckpttool/uneven/{next(NUMBERS)}"

    def __enter__(self) -> Uneven[Batch]:
        """Check the model.

        Raises:
            UsageFault: the model has torch's own SyncBatchNorm, in which a rank without samples can't take
                part; RankFailed on the other ranks.
        """
        if collectives.world_size() > 1:
            collectives.alike(lambda: require_no_torch_sync(self.model))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the model. If this rank failed, note it for the others; if another did, raise its failure.

        Raises:
            RankFailed: another rank's failure has ended this one.
        """
        self._held.close()
        if error is None or isinstance(error, collectives.RankFailed) or collectives.world_size() == 1:
            return
        said = ""
        with contextlib.suppress(RuntimeError):  # the store may have gone with rank 0
            store = distributed_c10d._get_default_store()
            if not is_lost_rank(error):
                failure = f"{type(error).__name__}: {error}"
                store.set(self._note, f"rank {collectives.rank()} failed: {failure}")
            elif store.check([self._note]):
                said = bytes(store.get(self._note)).decode()
        if said:
            raise collectives.RankFailed(said) from error

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches, then batches that stand in until all ranks have run out. A collective.

        Raises:
            Exception: what loading or counting a batch raised; RankFailed on the other ranks.
            CheckFailed: no rank has a sample in a step, though some have a batch.
        """
        batches, self._over = iter(self.batches), False
        try:
            while True:
                told = collectives.agree(lambda: ({}, self._load(batches)), "in Uneven")
                if all(one & OVER for one in told):
                    return
                counts = [one >> 2 for one in told]
                self.count = sum(counts)
                if not self.count:
                    raise CheckFailed("no rank has a sample in this step", hint="leave out empty batches")
                if any(one & NEEDS for one in told):
                    self._borrow(next(rank for rank, count in enumerate(counts) if count))
                self.is_dummy = not counts[collectives.rank()]
                if self.is_dummy:
                    self._held.enter_context(leaving_no_trace(self.model))
                assert self._last is not None
                yield self._last
                self._held.close()
        finally:
            self._held.close()
            self.is_dummy = False

    def global_mean(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on: this rank's part of the global mean, 0 if it stands in.

        Args:
            loss_sum: the sum of the losses of the batch's samples, tokens or pixels; a scalar.
        """
        return loss_sum * 0.0 if self.is_dummy else global_mean_loss(loss_sum, self.count)

    def _load(self, batches: Iterator[Batch]) -> int:
        """Load the next batch. Return its count and the marks, as one number."""
        count = 0
        if not self._over:
            try:
                batch = next(batches)
            except StopIteration:
                self._over = True
            else:
                count = int(self._count_of(batch))
                if count < 0:
                    raise UsageFault(f"a batch has a count of {count}")
                if count:
                    self._last = batch
        return count << 2 | (self._last is None) * NEEDS | self._over * OVER

    def _borrow(self, lender: int) -> None:
        """Let ranks that never had a batch stand in with one of another rank."""
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
    plain = all(isinstance(one, torch.Tensor) and one.dim() for one in tensors)
    lengths = {len(one) for one in tensors} if plain else set()
    if len(lengths) != 1:
        raise UsageFault(
            "the number of samples in a batch can't be told from its tensors",
            hint="give count=, a function that returns it for a batch",
        )
    return lengths.pop()


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
