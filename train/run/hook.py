"""A function of the user's, called on rank 0 after every K steps (`--every`), that can't change training.

It gets a copy of the model, in eval mode and without gradients, with the averages of `--ema`. Whatever it
does to that goes away with it. Random states and torch's global settings are put back. If it raises, or
does nothing for half of --timeout, the run says so and goes on. One that writes to the training's own
weights, as through a global variable, ends the run (through `.data`, torch does not tell). Imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from ckpttool.distributed import collectives, heartbeat, randomness
from ckpttool.errors import CheckFailed, UsageFault
from ckpttool.models import factory
from train.checkpoint.saver import Tell
from train.trainer.trainer import Trainer

# From this much processor time per second a function counts as working, as a rank does.
BUSY = 0.05

# Seconds between two looks at what it does.
TICK = 0.2

# Failures that are printed; the log has all.
SHOWN = 3

# Of which each has its own settings of autocast.
DEVICES = ("cpu", "cuda")


def _put_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _open_autocasts() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _put_autocasts(level: int) -> None:
    """Count so many blocks of autocast as open: casts of weights are forgotten only where none is left."""
    while (now := _open_autocasts()) != level:
        torch.autocast_decrement_nesting() if now > level else torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


# (What it is now, how it is set) of settings that hold for the whole process.
GLOBALS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_device, _put_device),
    *((partial(torch.is_autocast_enabled, on), partial(torch.set_autocast_enabled, on)) for on in DEVICES),
    *((partial(torch.get_autocast_dtype, on), partial(torch.set_autocast_dtype, on)) for on in DEVICES),
    (_open_autocasts, _put_autocasts),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on)),
    (os.getcwd, os.chdir),
)


class GivenUp(BaseException):
    """The function does nothing, or takes too long; no `except Exception` of the user's holds it up."""


class Hook:
    """The function of `--every`, which `call` calls. A collective, as the ranks wait for rank 0."""

    def __init__(self, trainer: Trainer, folder: str, tell: Tell, is_told: Callable[[], object]) -> None:
        config = trainer.config
        self.trainer, self.folder, self.tell, self.is_told = trainer, folder, tell, is_told
        self.spec = config.log.every[1] if config.log.every else ""
        self.function = factory.function(self.spec) if self.spec else None
        # Other ranks wait for twice --timeout, and half as long for one that does nothing.
        several = trainer.place.world_size > 1
        self.idle = config.ranks.timeout / 2
        self.most = config.ranks.timeout if several else None
        self.failures = 0

    def call(self) -> None:
        """Call the function with a copy of the model, the number of the step and the run's folder.

        CheckFailed if it has changed the training's model.
        """
        heartbeat.phase(f"--every {self.spec}")
        step, model = self.trainer.progress.global_step, self.trainer.ddp.module
        with self.trainer.as_scored():
            copied = _copied(model) if self.trainer.place.rank == 0 else None
        failed = collectives.from_rank_zero(lambda: self._call(model, copied, step))
        if failed:
            self.failures += 1
            later = "; later failures are only in the log" if self.failures == SHOWN else ""
            text = f"--every {self.spec}: in step {step}: {failed}; training goes on{later}"
            self.tell("hook failed", text if self.failures <= SHOWN else "", step, error=failed)

    def _call(self, model: nn.Module, copied: nn.Module | str | None, step: int) -> str:
        """Return why the function has failed, or the model could not be copied for it; "" if neither has."""
        assert self.function is not None
        if isinstance(copied, str):
            return copied
        before = _marks(model)
        failed = ""
        with unchanged(), limited(self.idle, self.most, self.is_told):
            try:
                self.function(copied, step, self.folder)
            except GivenUp as error:
                failed = str(error)
            except (Exception, SystemExit) as error:
                failed = factory.described(error)
        if touched := [name for name, mark in _marks(model).items() if before.get(name) != mark]:
            what = f"--every {self.spec}: changed {touched[0]} of the model in training"
            raise CheckFailed(what, hint="let it use the model that it is given, which is a copy")
        return failed


def _copied(model: nn.Module) -> nn.Module | str:
    """Return a copy in eval mode; why there is none, as of a model that keeps its last outputs."""
    try:
        return factory.copy_of(model).eval()
    except Exception as error:
        return error.message if isinstance(error, UsageFault) else factory.described(error)


def _marks(model: nn.Module) -> dict[str, Any]:
    """Return what changes when a tensor of a model is written to, or replaced."""
    marks: dict[str, Any] = {f"the mode of '{name}'": each.training for name, each in model.named_modules()}
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        marks[name] = (id(each), each._version, each.requires_grad, each.is_leaf and id(each.grad))
    return marks


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Put random states and torch's global settings back after the block, which has no gradients."""
    before = [now() for now, _ in GLOBALS]
    with randomness.restored(gpu=True), torch.no_grad():
        try:
            yield
        finally:
            for (now, put), value in zip(GLOBALS, before, strict=True):
                if now() != value:
                    put(value)


@contextlib.contextmanager
def limited(idle: float | None, most: float | None, is_told: Callable[[], object]) -> Iterator[None]:
    """Raise GivenUp in the block if it does nothing for `idle` seconds, takes more than `most`, or `is_told`.

    Only in the main thread, whose signal it is; a call that never returns to Python is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = since = time.monotonic()
    used = time.process_time()

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal since, used
        now, worked = time.monotonic(), time.process_time() - used
        place = f" (at {frame.f_code.co_filename}:{frame.f_lineno})" if frame is not None else ""
        if worked >= BUSY * (now - since):
            since, used = now, used + worked
        elif idle and now - since >= idle:
            raise GivenUp(f"it has done nothing for {idle:g} s{place}")
        if most and now - began >= most:
            raise GivenUp(f"it takes more than {most:g} s, and the other ranks wait{place}")
        if is_told():
            raise GivenUp(f"the run is told to end{place}")

    handler = signal.signal(signal.SIGALRM, look)
    timer = signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
