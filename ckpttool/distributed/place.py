"""The rank that a launcher has given this process, and the backend and device that follow from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageFault

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks.

    Attributes:
        rank: from 0.
        world_size: the number of ranks.
        backend: `gloo` or `nccl`.
        device: of this rank.
    """

    rank: int
    world_size: int
    backend: str
    device: torch.device


def given_rank() -> int:
    """Return this process's rank as set by torchrun, 0 without it; needs no torch."""
    return int(os.environ.get("RANK", "0"))


def given_world_size() -> int:
    """Return the number of ranks as set by torchrun, 1 without it; needs no torch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def started_by_launcher() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, has given this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def find_place(backend: str = "auto") -> Place:
    """Return this process's place: with NCCL if each rank here can have its own GPU, else gloo on the CPU.

    Args:
        backend: `auto`, `nccl` or `gloo`.

    Raises:
        UsageFault: `nccl` was asked for, and this machine has fewer GPUs than ranks.
    """
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto":
        backend = "nccl" if gpus >= wanted else "gloo"
    if backend == "gloo":
        return Place(given_rank(), given_world_size(), "gloo", torch.device("cpu"))
    if gpus < wanted:
        raise UsageFault(
            f"{backend}: {wanted} rank{'s' * (wanted != 1)} on this machine, which has {gpus} usable "
            f"GPU{'s' * (gpus != 1)}",
            hint="start fewer ranks, or use gloo (--backend gloo)",
        )
    return Place(given_rank(), given_world_size(), backend, torch.device("cuda", local_rank))
