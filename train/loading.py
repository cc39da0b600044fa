"""Batches of given samples, loaded in this process or ahead of time by other processes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

from train.launch import Place
from train.samples import Samples


def load(
    samples: Samples,
    batches: list[list[int]],
    place: Place,
    workers: int,
    *,
    seed: int = 0,
    again: bool = False,
) -> DataLoader[Any]:
    """Return a loader of these batches of samples, in order.

    Args:
        samples: a map-style data set.
        batches: the indices of the samples of each batch.
        place: of this rank; memory is pinned if it has a GPU.
        workers: loading processes; 0 to load in this process.
        seed: with the process's number, determines the random numbers that it draws.
        again: keep the processes, because the same batches will be loaded again.
    """
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=again and workers > 0,
        # Forked where that is safe: then data sets from a user's file need not be picklable.
        multiprocessing_context=("fork" if sys.platform == "linux" else None) if workers else None,
        pin_memory=place.device.type == "cuda",
        # Without a generator of its own, each pass would draw from the global one and shift dropout.
        generator=torch.Generator().manual_seed(seed),
    )
