"""One evaluation: every sample scored once, with the same bits on any number of ranks.

The test set is cut into batches first, and whole batches are dealt to ranks, so no sample's neighbours depend
on how many ranks there are. What was found is joined by sample, and all numbers are made of the joined rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ckpttool import ranks
from ckpttool.gathering import gather
from ckpttool.predictions import COLUMNS, Predictions
from train.data import Samples, count
from train.launch import Place
from train.plan import evaluation_batches

BATCH = 128
"""Test samples in one forward pass. Always the same, so that the same sample gets the same numbers."""


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found: this rank's rows, those of all in order, and how many each rank has."""

    own: Predictions
    joined: Predictions
    rank_samples: tuple[int, ...]


def evaluate(model: nn.Module, samples: Samples, place: Place, *, workers: int = 0) -> Evaluated:
    """Scores a bare model on a test set, on all ranks; every rank returns all of it. A collective.

    Raises:
        RankFailed: another rank failed; all end after the batch that they were at.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            own = _score(model, samples, place, workers)
    finally:
        model.train(was_training)
    columns = {name: column for name, column in own.items() if name != "index"}
    joined = {"index": torch.arange(count(samples)), **gather(own["index"], columns, samples=count(samples))}
    counts = torch.zeros(place.world_size, dtype=torch.int64)
    counts[place.rank] = len(own["index"])
    return Evaluated(_rows(own), _rows(joined), tuple(ranks.total(counts).tolist()))


def _score(model: nn.Module, samples: Samples, place: Place, workers: int) -> dict[str, torch.Tensor]:
    """This rank's rows. All ranks go from batch to batch together: none waits for one that has failed."""
    batches = evaluation_batches(count(samples), BATCH, place.rank, place.world_size)
    indices = [list(batch) for batch in batches.values()]
    rounds = -(-count(samples) // (BATCH * place.world_size))
    found: list[tuple[torch.Tensor, ...]] = []
    loaded: Iterator[Any] | None = None
    for number in range(rounds):
        with ranks.together():
            if number < len(indices):
                loaded = loaded or iter(load(samples, indices, place, workers))
                inputs, labels = next(loaded)
                scores = model(inputs.to(place.device)).cpu()
                losses = F.cross_entropy(scores.double(), labels, reduction="none")
                found.append((torch.tensor(indices[number]), scores.argmax(dim=1), labels, losses))
    nothing = (*(torch.zeros(0, dtype=torch.int64) for _ in range(3)), torch.zeros(0, dtype=torch.float64))
    columns = zip(nothing, *found, strict=True)
    return {name: torch.cat(column) for name, column in zip(COLUMNS, columns, strict=True)}


def _rows(columns: dict[str, torch.Tensor]) -> Predictions:
    return Predictions(**{name: column.numpy() for name, column in columns.items()})


def load(samples: Samples, batches: list[list[int]], place: Place, workers: int) -> DataLoader[Any]:
    """Loads these batches of samples, in order."""
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        # Forked where that is safe: then data sets out of a user's file need not be picklable.
        multiprocessing_context=("fork" if sys.platform == "linux" else None) if workers else None,
        pin_memory=place.device.type == "cuda",
        # Without a generator of its own, each pass would draw from the global one and shift dropout.
        generator=torch.Generator().manual_seed(0),
    )
