"""A rank's random state, taken, restored and seeded: Python's, torch's, and numpy's if it is imported."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils.data import Dataset


def seed_from(*parts: object) -> int:
    """Return a 63-bit seed that is completely different for any change of the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def seed_all(seed: int, *, gpu: bool = True) -> None:
    """Seed the generators of Python, torch and, if it is imported, numpy; those of GPUs only if `gpu`."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if gpu and torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def make_deterministic() -> None:
    """Allow only algorithms that give the same bits each time. Call it before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def take(*, gpu: bool = True) -> dict[str, Any]:
    """Return this process's random state as primitives and tensors, so that `weights_only` loads it."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        numbers = torch.tensor(keys.tolist(), dtype=torch.int64)
        state["numpy"] = [str(kind), numbers, int(position), int(has_gauss), float(cached)]
    if gpu and torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def put_back(state: dict[str, Any]) -> None:
    """Restore a random state that `take` returned, in this process or in another."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype=numpy.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Run the block with random numbers seeded by `parts`, on the CPU; restore the state afterwards."""
    with restored():
        seed_all(seed_from(*parts), gpu=False)
        yield


@contextmanager
def restored(*, gpu: bool = False) -> Iterator[None]:
    """Restore the random state after the block; that of the GPU only if `gpu`."""
    # Not by `take`: it makes tensors of the numbers, and this runs for every sample of `Keyed`.
    python, of_torch = random.getstate(), torch.get_rng_state()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    of_gpu = torch.cuda.get_rng_state() if gpu and torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(of_torch)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu)


class Keyed(Dataset[Any]):
    """A data set whose randomness depends on (seed, epoch, sample) alone.

    So an augmented sample is the same on any rank, in any worker process, and after a resume.
    """

    def __init__(self, samples: Dataset[Any], seed: int) -> None:
        self.samples, self.seed, self.epoch = samples, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Take the samples of another epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(cast(Sized, self.samples))

    def __getitem__(self, index: int) -> Any:
        with restored():
            return self.drawn(index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples of a batch, for a DataLoader; the random state is restored once."""
        with restored():
            return [self.drawn(index) for index in indices]

    def drawn(self, index: int) -> Any:
        """Return a sample; the generators are left as it leaves them."""
        seed_all(seed_from(self.seed, self.epoch, index), gpu=False)
        return self.samples[index]
