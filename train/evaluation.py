"""Evaluations: every sample scored once, with the same bits on any number of ranks.

The test set is cut into batches before whole batches are dealt to ranks, so a sample's batch does not depend
on the number of ranks. The results are joined by sample, and all numbers are computed from the joined rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ckpttool.distributed import collectives
from ckpttool.distributed.gather_rows import gather
from ckpttool.distributed.place import Place
from ckpttool.distributed.plan import evaluation_batches
from ckpttool.metrics.certificate import Certificate, certify
from ckpttool.metrics.predictions import COLUMNS, Evaluation, Predictions
from train.data import Data
from train.loading import load
from train.samples import count

BATCH = 128
"""Test samples in one forward pass. Fixed, so that a sample always gets the same numbers."""


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation: this rank's rows, and the certificate over all ranks' rows."""

    own: Predictions
    certificate: Certificate


class Evaluator:
    """Scores bare models on one test set. Keeps its loading processes from one evaluation to the next."""

    def __init__(self, data: Data, place: Place, *, workers: int = 0) -> None:
        self.data, self.place, self.samples = data, place, count(data.test)
        dealt = [
            evaluation_batches(self.samples, BATCH, rank, place.world_size).values()
            for rank in range(place.world_size)
        ]
        self.batches = [list(batch) for batch in dealt[place.rank]]
        self.rank_samples = [sum(map(len, batches)) for batches in dealt]
        self.loader = load(data.test, self.batches, place, workers, again=True)

    def evaluate(self, model: nn.Module, *, checkpoint: str | None = None) -> Evaluated:
        """Score this rank's batches, and join the results of all ranks. A collective.

        Args:
            model: on this rank's device; its mode is restored afterwards.
            checkpoint: the digest of the model's state, for the certificate.

        Raises:
            CheckFailed: a label is not one of the classes; ranks without that sample raise RankFailed.
            RankFailed: another rank failed; all ranks end after the current batch.
        """
        own = self.rows(model)
        columns = {name: column for name, column in own.items() if name != "index"}
        joined = gather(own["index"], columns, samples=self.samples)
        whole = _predictions({"index": torch.arange(self.samples), **joined})
        about = self._about(checkpoint)
        return Evaluated(
            _predictions(own), collectives.alike(lambda: certify(whole, about, self.rank_samples))
        )

    def rows(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return this rank's rows, by column. A collective.

        All ranks advance batch by batch together, so none waits for one that has failed.

        Returns:
            `index`, `prediction`, `label` (int64) and `loss` (float64), each with one value per sample.

        Raises:
            CheckFailed: a label is not one of the classes; ranks without that sample raise RankFailed.
        """
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                return self._rows(model)
        finally:
            model.train(was_training)

    def _rows(self, model: nn.Module) -> dict[str, torch.Tensor]:
        found: list[tuple[torch.Tensor, ...]] = []
        loaded: Iterator[Any] | None = None
        for number in range(-(-self.samples // (BATCH * self.place.world_size))):
            with collectives.together():
                if number < len(self.batches):
                    loaded = loaded or iter(self.loader)
                    inputs, labels = next(loaded)
                    self.data.check_labels(labels, self.batches[number], "test")
                    labels = labels.to(torch.int64)
                    scores = model(inputs.to(self.place.device)).cpu()
                    losses = F.cross_entropy(scores.double(), labels, reduction="none")
                    found.append((torch.tensor(self.batches[number]), scores.argmax(dim=1), labels, losses))
        whole, real = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
        columns = zip((whole, whole, whole, real), *found, strict=True)
        return {name: torch.cat(column) for name, column in zip(COLUMNS, columns, strict=True)}

    def _about(self, checkpoint: str | None) -> Evaluation:
        return Evaluation(
            self.place.world_size,
            self.samples,
            checkpoint,
            self.data.fingerprint,
            self.data.classes,
            self.place.device.type,
            torch.get_num_threads(),
        )


def _predictions(columns: dict[str, torch.Tensor]) -> Predictions:
    return Predictions(**{name: column.numpy() for name, column in columns.items()})
