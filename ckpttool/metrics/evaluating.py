"""Evaluations of a model: every sample once, with the same bits on any number of ranks. Imports torch.

    def loss(outputs, batch):                                  # of a batch: a sum, and of how many
        return F.mse_loss(outputs, batch[1], reduction="sum"), batch[1].numel()

    result = metrics.evaluate(model, test_set, loss, {"mae": metrics.MeanAbsoluteError})
    print(result.loss, result.metrics["mae"], result.samples)  # over all ranks, on every rank

Samples are cut into batches before whole batches are dealt to ranks, so a sample's batch does not depend on
the number of ranks; the batch size changes the last bits, as the number of threads does. All numbers are
computed from results joined by sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ..distributed import collectives, heartbeat, transport
from ..distributed.gather_rows import gather
from ..distributed.plan import evaluation_batches, index_digest
from ..distributed.uneven import modes_kept
from ..errors import CheckFailed
from .base import ExactSum, Measure, measures, reduce, update
from .certificate import COLUMNS, Certificate, Evaluation, LossCertificate, Predictions, certify

T = TypeVar("T")

# Samples in one forward pass, by default.
BATCH = 128

# (model, batch on its device) -> outputs.
Forward = Callable[[nn.Module, Any], Any]

# (outputs, batch) -> the sum of the losses, and of how many.
Loss = Callable[[Any, Any], tuple[Any, Any]]

# Batches of sample indices -> the loaded batches, in order, each time it is iterated.
Load = Callable[[list[list[int]]], Iterable[Any]]

# Checks a loaded batch, given the indices of its samples.
Check = Callable[[Any, Sequence[int]], None]


def _forward(model: nn.Module, batch: Any) -> Any:
    """Return the outputs for a batch of (inputs, target), or of inputs alone."""
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation of classes: this rank's rows, and the certificate over all ranks' rows."""

    own: Predictions
    certificate: Certificate


def evaluate(
    model: nn.Module,
    samples: Dataset[Any],
    loss: Loss,
    metrics: Mapping[str, Any] | None = None,
    *,
    forward: Forward = _forward,
    batch_size: int = BATCH,
    device: torch.device | str = "cpu",
    collate: Callable[[list[Any]], Any] | None = None,
) -> LossCertificate:
    """Evaluate a model with any loss and metrics, over the ranks. A collective.

    Args:
        model: the same on every rank, on `device`; its mode is restored afterwards.
        samples: a map-style data set whose samples `collate` takes; the same on every rank.
        loss: (outputs, batch) -> (sum, count): the sum of the batch's losses, and of how many samples, tokens
            or pixels, as numbers or tensors of one.
        metrics: name -> a metric of `ckpttool.metrics`, its class or a function that makes one; its `update`
            gets (outputs, target), the target being the last part of a batch. Or a pair of that and a
            function (outputs, batch) -> what `update` gets.
        forward: (model, batch) -> outputs; by default `model(inputs)` for a batch of (inputs, target).
        batch_size: samples in a forward pass; determines the last bits.
        device: where batches are moved to.
        collate: makes a batch of samples; by default torch's `default_collate`.

    Raises:
        TypeError: a metric is not one of `ckpttool.metrics`, or `loss` does not return (sum, count).
        CheckFailed: a metric does not take the outputs, or a count is below 0 or not finite.
        RankFailed: another rank failed; all ranks end after the current batch.
    """
    evaluator = Evaluator(samples, batch_size=batch_size, device=device, load=_loader(samples, collate))
    return evaluator.losses(model, loss, measures(metrics or {}), forward=forward)


def evaluate_classes(
    model: nn.Module,
    samples: Dataset[Any],
    classes: Sequence[str],
    *,
    batch_size: int = BATCH,
    device: torch.device | str = "cpu",
) -> Certificate:
    """Evaluate a classifier over the ranks: accuracy, mean cross entropy, counts by class. A collective.

    Args:
        model: the same on every rank, on `device`; returns scores [n, classes or more].
        samples: a map-style data set of (input, label), the same on every rank.
        classes: their names, by label.
        batch_size, device: as for `evaluate`.

    Raises:
        CheckFailed: a label is not one of the classes.
        RankFailed: another rank failed; all ranks end after the current batch.
    """
    evaluator = Evaluator(samples, batch_size=batch_size, device=device)
    about = Evaluation(classes=tuple(classes))

    def check(batch: Any, indices: Sequence[int]) -> None:
        for index, label in zip(indices, batch[-1].tolist(), strict=True):
            if not 0 <= label < len(classes):
                raise CheckFailed(f"sample {index} has the label {label}, none of the {len(classes)} classes")

    return evaluator.classes(model, about=about, check=check).certificate


class Evaluator:
    """Evaluates models on one data set, whose loader is kept from one evaluation to the next."""

    def __init__(
        self,
        samples: Dataset[Any],
        *,
        batch_size: int = BATCH,
        device: torch.device | str = "cpu",
        load: Load | None = None,
        in_step: bool = False,
    ) -> None:
        """Deal the batches to the ranks.

        Args:
            in_step: ranks pass the model equally often, as a pass sends (FSDP2); those without a batch of
                their own pass one sample, which does not count.
        """
        self.samples, self.batch_size = len(cast(Sized, samples)), batch_size
        self.device = torch.device(device)
        self.number_of_batches = -(-self.samples // batch_size)
        self.world_size = collectives.world_size()
        ranks = range(self.world_size)
        of_ranks = [evaluation_batches(self.samples, batch_size, rank, self.world_size) for rank in ranks]
        self.rank_samples = [sum(map(len, batches.values())) for batches in of_ranks]
        self.numbers = list(of_ranks[collectives.rank()])
        self.batches = [list(batch) for batch in of_ranks[collectives.rank()].values()]
        self.rounds = -(-self.number_of_batches // self.world_size)
        self.in_step = in_step
        spare = [[0]] * (self.rounds - len(self.batches)) if in_step else []
        self.loader: Iterable[Any] = (load or _loader(samples))([*self.batches, *spare])

    def classes(
        self,
        model: nn.Module,
        *,
        about: Evaluation,
        check: Check | None = None,
        forward: Forward = _forward,
    ) -> Evaluated:
        """Score the class of each sample, and join the results of all ranks. A collective."""
        rows = self.rows(model, check, forward)
        columns = {name: column for name, column in rows.items() if name != "index"}
        joined = gather(rows["index"], columns, samples=self.samples)
        all_rows = _predictions({"index": torch.arange(self.samples), **joined})
        about = self.described(about)
        certificate = collectives.report_once(lambda: certify(all_rows, about, self.rank_samples))
        return Evaluated(_predictions(rows), certificate)

    def rows(
        self, model: nn.Module, check: Check | None = None, forward: Forward = _forward
    ) -> dict[str, torch.Tensor]:
        """Return this rank's rows: `index`, `prediction`, `label` (int64), `loss` (float64). A collective."""

        def score(indices: list[int], batch: Any, outputs: Any) -> tuple[torch.Tensor, ...]:
            labels = batch[-1].to(device="cpu", dtype=torch.int64)
            scores = outputs.cpu()
            losses = F.cross_entropy(scores.double(), labels, reduction="none")
            return torch.tensor(indices), scores.argmax(dim=1), labels, losses

        none = [torch.zeros(0, dtype=getattr(torch, dtype)) for dtype in COLUMNS.values()]
        rows = self._each(model, score, check, forward)
        columns = zip(none, *rows, strict=True)
        return {name: torch.cat(column) for name, column in zip(COLUMNS, columns, strict=True)}

    def losses(
        self,
        model: nn.Module,
        loss: Loss,
        measured: Mapping[str, Measure],
        *,
        about: Evaluation | None = None,
        check: Check | None = None,
        forward: Forward = _forward,
        move: Callable[[Any, torch.device], Any] = transport.moved,
    ) -> LossCertificate:
        """Sum the losses of all samples and compute metrics, over all ranks. A collective."""
        metrics = {name: measure.make() for name, measure in measured.items()}

        def score(indices: list[int], batch: Any, outputs: Any) -> tuple[list[int], float, float]:
            total, count = _pair(loss(outputs, batch))
            for name, measure in measured.items():
                update(name, metrics[name], measure.arguments, outputs, batch)
            return indices, total, count

        rows = self._each(model, score, check, forward, move)
        # Each rank has taken whole batches; that all samples were taken once is what the certificate says.
        taken = [index for indices, _, _ in rows for index in indices]
        gather(torch.tensor(taken, dtype=torch.int64), {}, samples=self.samples)
        totals = torch.tensor([total for _, total, _ in rows], dtype=torch.float64)
        sizes = torch.tensor([count for _, _, count in rows], dtype=torch.float64)
        numbers = torch.tensor(self.numbers, dtype=torch.int64)
        joined = gather(numbers, {"loss": totals, "count": sizes}, samples=self.number_of_batches)
        loss_sum, counts = ExactSum(), ExactSum()
        loss_sum.add(joined["loss"].numpy())
        counts.add(joined["count"].numpy())
        of = counts.fraction
        taken_once = tuple(self.rank_samples), index_digest(self.samples)
        computed = {name: reduce(metric).compute() for name, metric in metrics.items()}
        certified = self.described(about or Evaluation()), self.samples, loss_sum.over(of), *taken_once
        return LossCertificate(*certified, int(of) if of.denominator == 1 else float(of), computed)

    def described(self, about: Evaluation) -> Evaluation:
        """Return the description of an evaluation, completed by what this evaluator knows."""
        about = replace(about, world_size=self.world_size, samples=self.samples, batch_size=self.batch_size)
        return replace(about, device=self.device.type, threads=torch.get_num_threads())

    def _each(
        self,
        model: nn.Module,
        score: Callable[[list[int], Any, Any], T],
        check: Check | None,
        forward: Forward,
        move: Callable[[Any, torch.device], Any] = transport.moved,
    ) -> list[T]:
        """Return what `score` returns for each of this rank's batches. A collective in each batch."""
        scored: list[T] = []
        batches: Iterator[Any] = iter(())

        def load(number: int) -> Any:
            nonlocal batches
            batches = iter(self.loader) if number == 0 else batches
            batch = next(batches, None)
            if check is not None and number < len(self.batches):
                check(batch, self.batches[number])
            return batch

        def take(number: int, batch: Any) -> None:
            if batch is None:
                return
            batch = move(batch, self.device)
            outputs = forward(model, batch)
            if number < len(self.batches):
                scored.append(score(self.batches[number], batch, outputs))

        # Not inference_mode: a tensor that a model caches, as a mask by length, could not be trained with.
        with modes_kept(model), torch.no_grad():
            model.eval()
            for number in range(self.rounds):
                heartbeat.progress()
                with collectives.fail_together():
                    batch = load(number)
                    if not self.in_step:
                        take(number, batch)
                if self.in_step:  # a rank whose batch is bad must not leave the others in a pass
                    with collectives.fail_together():
                        take(number, batch)
        return scored


def _pair(returned: Any) -> tuple[float, float]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"loss returned a {type(returned).__name__}, not (sum, count)")
    count = float(returned[1])
    if not 0 <= count < math.inf:  # else the sum of all counts would leave it out
        raise CheckFailed(f"loss returned a count of {count:g}", hint="it is how many the sum is over")
    return float(returned[0]), count


def _loader(samples: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None) -> Load:
    # Without its own generator, each pass would draw from the global one and shift dropout.
    how: dict[str, Any] = {"collate_fn": collate, "generator": torch.Generator()}
    return lambda batches: DataLoader(samples, batch_sampler=batches, **how)


def _predictions(columns: dict[str, torch.Tensor]) -> Predictions:
    return Predictions(**{name: column.numpy() for name, column in columns.items()})
