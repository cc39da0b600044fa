"""How much work a training does: tokens, floating point operations, memory. Imports torch."""

from __future__ import annotations

import copy
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ckpttool.distributed.dummy_pass import run_dummy_pass
from ckpttool.distributed.group import Place
from train.config.training import TrainConfig
from train.tasks.task import Task

# Dense peaks of GPUs in FLOP/s, of bfloat16 and float16 with tensor cores and of float32 without, as NVIDIA's
# data sheets give them; the first name that a device's name contains.
PEAKS = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
}


@dataclass(frozen=True)
class Work:
    """What is known of a training's work.

    Attributes:
        unit: what the loss is a mean over, in the plural; empty where that is not worth saying.
        flops: of the forward and backward passes of a sample; None where they are not known.
        peak: FLOP/s of the devices of all ranks; None where they are not known.
    """

    unit: str = ""
    flops: int | None = None
    peak: float | None = None

    def rates(self, samples: int, count: float, seconds: float) -> dict[str, float]:
        """Return what is done in a second, for the log."""
        found: dict[str, float] = {}
        if self.unit:
            found[f"{self.unit}_per_second"] = round(count / seconds, 3)
        if self.flops:
            found["flops_per_second"] = float(round(self.flops * samples / seconds))
            if self.peak:
                found["mfu"] = round(found["flops_per_second"] / self.peak, 4)
        return found


def work_of(config: TrainConfig, task: Task, place: Place, model: nn.Module, batch: Any) -> Work:
    """Return what is known of the work of a model that is not wrapped yet; `batch` is of one sample.

    With `--shard` its operations are not counted: a rank may have no room for gradients of the whole.
    """
    peak = peak_of(place.device, config.amp, place.world_size)
    if config.shard:
        return Work(task.unit, peak=peak)
    copied = copy.deepcopy(model)  # one may count its passes
    forward = partial(task.forward, copied)
    flops = flops_of(lambda: run_dummy_pass(copied, batch, forward, together=False))
    return Work(task.unit, flops, peak)


def flops_of(one_pass: Callable[[], object]) -> int | None:
    """Return the floating point operations of a pass: torch counts matrix products and convolutions.

    None where it finds none, or can't count.
    """
    try:
        with FlopCounterMode(display=False) as counter:
            one_pass()
    except Exception:  # of a mode of torch's inside a user's model: without a count it trains as well
        return None
    return counter.get_total_flops() or None


def peak_of(device: torch.device, amp: str, ranks: int) -> float | None:
    """Return the FLOP/s of as many devices, in the precision of `--amp`; None if the device is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    low, single = next((peaks for known, peaks in PEAKS.items() if known in name), (None, None))
    peak = single if amp == "none" else low
    return None if peak is None else peak * ranks


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were in use so far: of a GPU, by tensors; else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
