"""Batches of given samples, loaded in this process or ahead of it by workers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

from train.data import Samples
from train.launch import Place


def load(
    samples: Samples,
    batches: list[list[int]],
    place: Place,
    workers: int,
    *,
    seed: int = 0,
    again: bool = False,
) -> DataLoader[Any]:
    """Loads these batches of samples, in order.

    Args:
        workers: loading processes; 0 to load in this process.
        seed: with the worker's number, determines the random numbers that each worker draws.
        again: the same batches will be loaded again, so the workers are kept.
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
