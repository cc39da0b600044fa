"""What updates the weights after each backward pass: optimizer, schedule, precision, averages. Imports torch.

Weights, gradients, the optimizer and the evaluation keep the model's own dtype, so a score is that of the
saved file.

float16 has few exponents, so small gradients would become 0. The loss is multiplied by a scale, and gradients
are divided by it (Micikevicius et al. 2018, arXiv 1710.03740; `torch.amp.GradScaler`). A step whose gradients
are infinite or NaN is skipped, and the scale is halved. Gradients are summed over ranks before that, so all
ranks skip the same steps. A skipped step has used its samples and counts as a step of the plan, but changes
nothing: not the weights, nor their average (`--ema`), nor the learning rate, as torch wants the scheduler
called after an optimizer's step. So `scheduler.last_epoch + skipped` is the number of steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ckpttool.distributed import collectives
from ckpttool.distributed.transport import part_like
from ckpttool.errors import CheckFailed, UsageFault
from ckpttool.models import factory
from train.config.sections import ScheduleConfig, TrainConfig, TrainingConfig, fields_of_change
from train.model import groups
from train.model import optimizer as optimizers
from train.model.groups import require_same

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Scaling has found no finite gradient on the way here from 65536, so it is not the range that is missing.
SMALLEST_SCALE = 2.0**-10


def check_precision(kind: str, device: torch.device, model: nn.Module) -> None:
    """Refuse `--amp fp16` on a CPU, and for a model with a parameter that is complex or float16."""
    if kind != "fp16":
        return
    if device.type == "cpu":
        raise UsageFault("--amp fp16: works only on a GPU", hint="give --amp bf16, or leave it out")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.is_complex() or parameter.dtype == torch.float16):
            dtype = str(parameter.dtype).removeprefix("torch.")
            what = f"--amp fp16: parameter {name} is {dtype}, whose gradients can't be scaled"
            hint = "give --amp bf16" if parameter.is_complex() else "keep the model's weights in float32"
            raise UsageFault(what, hint=hint)


class Precision:
    """The precision of training, with the state of its scaling. `none` changes nothing.

        with precision.autocast():
            loss = ...
        precision.scale(loss).backward()     # any number of times
        precision.unscale(optimizer)         # then clip
        if precision.step(optimizer):        # False: skipped
            scheduler.step()

    Attributes:
        skipped: steps that were skipped since the beginning.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.dtype, self.device = DTYPES.get(kind), device
        self.skipped = 0
        self._scaler = torch.amp.GradScaler(device.type, enabled=kind == "fp16")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale: once in a step, after they were summed over ranks."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Take the optimizer's step unless scaled gradients are not finite; return whether it was taken."""
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        after = self._scaler.get_scale()
        if after >= before:
            return True
        self.skipped += 1
        if after < SMALLEST_SCALE:
            what = f"--amp fp16: gradients are infinite or NaN even if the loss is multiplied by {before:.2g}"
            raise CheckFailed(what, hint="give a smaller --lr, --warmup, --clip-norm, or --amp bf16")
        return False

    def state_dict(self) -> dict[str, Any]:
        return {**self._scaler.state_dict(), "skipped": self.skipped} if self._scaler.is_enabled() else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state.get("skipped", 0)
        self._scaler.load_state_dict(state)


# ---- the schedule ------------------------------------------------------------------------------------

# A schedule is a function of the step alone, so a run continues with it wherever it stopped.


Rate = Callable[[int], float]  # step, from 0 -> factor

TRIED = 256  # steps whose factor is asked for twice before training
COOLDOWN = 0.2  # of all steps, as arXiv 2405.18392 found enough
# As torch.optim.lr_scheduler.OneCycleLR, of arXiv 1708.07120.
RISE, BEGIN, END = 0.3, 1 / 25, 1 / 25e4


def check_schedule(config: TrainConfig, steps_per_epoch: int) -> None:
    """Raise UsageFault if a part of the schedule is longer than the training, or a user's is no schedule."""
    steps = total_steps(config.training, steps_per_epoch)
    schedule = config.schedule
    warmup = schedule.warmup.in_steps(steps_per_epoch)
    if warmup >= steps:
        what = f"--warmup {schedule.warmup}: is {warmup} steps, but the whole training has only {steps}"
        raise UsageFault(what)
    cooldown = schedule.cooldown.in_steps(steps_per_epoch) if schedule.cooldown else 0
    if schedule.cooldown and warmup + cooldown > steps:
        what = f"--cooldown {schedule.cooldown}: is {cooldown} steps, and the warm-up {warmup}"
        raise UsageFault(f"{what}, but the whole training has only {steps}")
    tried = sorted({0, steps // 2, steps - 1, *range(0, steps, max(1, steps // TRIED))})
    rate, again = (rate_of(schedule, config.optimizer.lr, steps, steps_per_epoch) for _ in range(2))
    first = {step: rate(step) for step in tried}
    for step in reversed(tried):  # a resumed run asks a new one, and not from the first step on
        if first[step] != again(step):
            what = f"--scheduler {schedule.name}: gives step {step} another factor each time"
            raise UsageFault(what, hint="let it depend on the step alone")


def total_steps(training: TrainingConfig, steps_per_epoch: int) -> int:
    """Return the steps that the schedule spans: of `--epochs` or `--max-steps`, whichever ends first.

    `--max-time` does not count: it interrupts a training run, which may be resumed.
    """
    steps = training.epochs * steps_per_epoch
    return min(steps, training.max_steps) if training.max_steps else steps


def build_scheduler(
    config: TrainConfig, optimizer: Optimizer, total_steps: int, steps_per_epoch: int | None = None
) -> LambdaLR:
    """Return the scheduler, to be called after each step that was not skipped."""
    steps_per_epoch = steps_per_epoch or total_steps // config.training.epochs
    rate = rate_of(config.schedule, config.optimizer.lr, total_steps, steps_per_epoch)
    return LambdaLR(optimizer, rate)


def rate_of(schedule: ScheduleConfig, lr: float | None, steps: int, steps_per_epoch: int) -> Rate:
    """Return the schedule of `--scheduler`, of `steps` in all."""
    warmup = schedule.warmup.in_steps(steps_per_epoch)
    if ":" in schedule.name:
        return _own(schedule.name, steps=steps, warmup=warmup, steps_per_epoch=steps_per_epoch)
    lowest = schedule.min_lr / lr if schedule.min_lr and lr else None
    if schedule.name == "onecycle":
        end = END if lowest is None else lowest
        return partial(one_cycle, steps=steps, rise=warmup or RISE * steps, end=end)
    cooldown = schedule.cooldown.in_steps(steps_per_epoch) if schedule.cooldown else round(COOLDOWN * steps)
    course = partial(rate, schedule.name, steps=steps, warmup=warmup, cooldown=cooldown)
    return partial(_above, course, lowest, warmup) if lowest else course


def rate(course: str, step: int, steps: int, warmup: int, cooldown: int = 0) -> float:
    """Return the factor of the learning rate in step `step` (from 0) of `steps`.

    `cosine`, `linear` and `wsd` would reach 0 in step `steps`, which is never taken.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if course == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if course == "linear":
        return 1.0 - done
    if course == "wsd":
        return max(0.0, min(1.0, (steps - step) / max(1, cooldown)))
    tenths = (step >= steps / 2) + (step >= steps * 3 / 4)  # as for the ResNets of arXiv 1512.03385
    return 0.1**tenths if course == "step" else 1.0


def _above(course: Rate, lowest: float, warmup: int, step: int) -> float:
    """Return the factor of a schedule that ends in `lowest` instead of 0."""
    factor = course(step)
    return factor if step < warmup else lowest + (1 - lowest) * factor


def one_cycle(step: int, *, steps: int, rise: float, end: float) -> float:
    """Return the factor of a schedule that rises from a 25th to 1 within `rise` steps, then falls to `end`.

    Both along a cosine; `end` is that of the last step. Source: torch's OneCycleLR, whose momentum this
    leaves as it is.
    """
    top = rise - 1
    if step <= top:
        return _along(BEGIN, 1.0, step / top if top else 1.0)
    return _along(1.0, end, min(1.0, (step - top) / max(1e-9, steps - 1 - top)))


def _along(first: float, last: float, part: float) -> float:
    return last + (first - last) / 2 * (1 + math.cos(math.pi * part))


def _own(spec: str, **known: int) -> Rate:
    """Return the function that a user's factory returns, checked in each step."""
    made: Any = factory.build(spec, **known)
    if not callable(made) or isinstance(made, type) or hasattr(made, "get_last_lr"):
        what = f"--scheduler {spec}: returned a {type(made).__name__}, not a function of the step"
        hint = "def factory(steps, warmup): return lambda step: 1 - step / steps"
        raise UsageFault(what, hint=hint)
    return partial(_checked, spec, made)


def _checked(spec: str, made: Callable[[int], Any], step: int) -> float:
    try:
        factor = float(made(step))
    except Exception as error:
        raise UsageFault(f"--scheduler {spec}: fails in step {step}: {factory.described(error)}") from error
    if not 0 <= factor < math.inf:
        what = f"--scheduler {spec}: gives step {step} the factor {factor:g}"
        raise UsageFault(what, hint="return 0 or more, by which the learning rate is multiplied")
    return factor


# ---- updating ----------------------------------------------------------------------------------------


Tensor = torch.Tensor


class Ema:
    """The exponential moving average of a model: average = decay · average + (1 - decay) · value, by step.

    It starts as the weights after the first step, as `torch.optim.swa_utils.AveragedModel` does. Parameters
    and the running statistics of normalisation layers are averaged; other buffers (counters, masks) are
    those of the last step. Parameters of two bytes are averaged in float32: in their own dtype, an addend of
    a thousandth would be rounded away. A tensor with two names has one average.

    Under plain BatchNorm each rank has its own statistics, and rank 0's are used; so are their averages.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.updates = model, decay, 0
        self._swapped = False
        self._averaged = {id(parameter) for parameter in model.parameters()}
        for layer in model.modules():
            if isinstance(layer, _NormBase):
                buffers = layer.named_buffers(recurse=False)
                self._averaged |= {id(buffer) for _, buffer in buffers if buffer.is_floating_point()}
        averages = {id(value): _average_of(value) for value in self._values().values()}
        self._averages = {name: averages[id(value)] for name, value in self._values().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's present values, after an optimizer's step."""
        self._require_own_weights()
        self.updates += 1
        first, done = self.updates == 1, set()
        for name, value in self._values().items():
            average = self._averages[name]
            if id(average) in done:
                continue
            done.add(id(average))
            if first or id(value) not in self._averaged:
                average.copy_(value)
            else:
                average.lerp_(value.to(average.dtype), 1 - self.decay)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model have the averages inside the block, and its own values, to the bit, afterwards.

        A collective: every rank has rank 0's buffers inside.
        """
        self._require_own_weights()
        self.share()
        values = self._values()
        before = {name: value.detach().clone() for name, value in values.items()}
        self._swapped = True
        try:
            _copy(self._averages, values)
            yield
        finally:
            _copy(before, values)
            self._swapped = False

    def share(self) -> None:
        """Give every rank the averages of rank 0's buffers. A collective."""
        buffers = {id(buffer) for buffer in self.model.buffers()}
        values = self._values()
        collectives.broadcast_into(self._averages[name] for name in values if id(values[name]) in buffers)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the averages, named as in the model's state. A collective."""
        self._require_own_weights()
        self.share()
        return {"updates": self.updates, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned; raise ValueError if it is of another model."""
        self._require_own_weights()
        saved = state["averages"]
        if saved.keys() != self._averages.keys():
            odd = sorted(saved.keys() ^ self._averages.keys())[0]
            raise ValueError(f"the averaged model has other names: {odd}")
        for name, average in self._averages.items():
            if saved[name].shape != average.shape:
                raise ValueError(f"the average of {name} has the shape {list(saved[name].shape)}")
            average.copy_(part_like(saved[name], average))
        self.updates = state["updates"]

    def _values(self) -> dict[str, Tensor]:
        return _values(self.model)

    def _require_own_weights(self) -> None:
        if self._swapped:
            raise RuntimeError("the model has its averages at present: leave `swapped` first")


class OwnAverages:
    """The weights by which an optimizer with modes is scored, as a schedule-free one: those of its `eval()`.

    They stand in for `Ema`, so a checkpoint has them beside the weights that are trained, as `ema.averages`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self.updates = model, optimizer, 0

    def update(self) -> None:
        self.updates += 1

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model be scored inside the block, and have its own values, to the bit, afterwards."""
        before = {name: value.detach().clone() for name, value in _values(self.model).items()}
        optimizers.set_mode(self.optimizer, training=False)
        try:
            yield
        finally:
            optimizers.set_mode(self.optimizer, training=True)
            _copy(before, _values(self.model))  # the optimizer's own way back rounds

    def state_dict(self) -> dict[str, Any]:
        """Return what `Ema.state_dict` does. A collective."""
        with self.swapped():
            averages = {name: value.detach().clone() for name, value in _values(self.model).items()}
        buffers = {id(buffer) for buffer in self.model.buffers()}
        names = (name for name, value in _values(self.model).items() if id(value) in buffers)
        collectives.broadcast_into(averages[name] for name in names)
        return {"updates": self.updates, "averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


def _values(model: nn.Module) -> dict[str, Tensor]:
    # Themselves, not copies; what `get_extra_state` returns is made anew each time, and has no average.
    state = model.state_dict(keep_vars=True).items()
    own = (pair for pair in state if not pair[0].endswith(_EXTRA_STATE_KEY_SUFFIX))
    return {name: value for name, value in own if isinstance(value, Tensor)}


def _average_of(value: Tensor) -> Tensor:
    """Return a copy, in float32 for a float dtype of two bytes or less."""
    small = value.is_floating_point() and value.element_size() <= 2
    return value.detach().to(torch.float32 if small else value.dtype, copy=True)


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])


# ---- steps ------------------------------------------------------------------------------------------


# What a group says of this machine and of the flags, and settings that `--change` lets differ. Others stay as
# they were saved: a user's own optimizer may change them from step to step.
ALWAYS = {"fused", "rule"}
OF_GROUPS = {"momentum", "weight_decay", "nesterov", "betas", "eps"}


class Updater:
    """Takes the optimizer's steps. Its state is the same on every rank, but for `--zero`'s parts."""

    def __init__(self, config: TrainConfig, model: nn.Module, device: torch.device, steps: int) -> None:
        """Take the steps of an epoch as `steps`."""
        self.config = config
        # Without DDP's prefix, as the user knows the names.
        named = ((name.removeprefix("module."), p) for name, p in model.named_parameters())
        self.parameters = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.total_steps = total_steps(config.training, steps)
        self.precision = Precision(config.numbers.amp, device)
        # The model itself knows its names as the user does; a checkpoint has them with DDP's prefix.
        bare = model.get_submodule("module")
        self.optimizer = optimizers.build_optimizer(config.optimizer, bare, "module.")
        self.scheduler = build_scheduler(config, self.optimizer, self.total_steps, steps)
        self.ema: Ema | OwnAverages | None = None
        if config.optimizer.ema:
            self.ema = Ema(model, config.optimizer.ema)
        elif optimizers.has_modes(self.optimizer):
            self.ema = OwnAverages(model, self.optimizer)
        self._has_stepped = False

    @property
    def lr(self) -> float:
        """The learning rate of what no rule scales; of the first group of a user's own optimizer."""
        first = self.optimizer.param_groups[0]["initial_lr"]
        base = first if self.config.optimizer.lr is None else self.config.optimizer.lr
        return float(base * self.scheduler.lr_lambdas[0](self.scheduler.last_epoch))

    def step(self, *, measured: bool) -> tuple[float, torch.Tensor | None]:
        """Change the weights and clear the gradients.

        Returns the learning rate, and the gradient's norm before clipping if that is wanted (`measured`).
        """
        self.precision.unscale(self.optimizer)
        norm = None
        if self.config.optimizer.clip_norm or measured:
            norm = optimizers.clip([p for _, p in self.parameters], self.config.optimizer.clip_norm)
        lr = self.lr
        if self.precision.step(self.optimizer):
            self.scheduler.step()
            if self.ema:
                self.ema.update()
        if self.config.model.shard and not self._has_stepped:
            who = f"--shard: a group of --optimizer {self.config.optimizer.name}"
            collectives.report_once(lambda: groups.require_of_parameters(self.optimizer, who))
        self._has_stepped = True
        self.clear_gradients()
        return lr, norm

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()  # a user's own may take no set_to_none
        for _, parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it. A collective.

        Tensors are the optimizer's own. With `--zero` its state is rank 0's alone, but for its settings.
        """
        state = {
            "optimizer": groups.consolidated(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.precision.state_dict(),
        }
        return state | ({"ema": self.ema.state_dict()} if self.ema else {})

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, with this run's own settings where `--change` lets them differ."""
        fresh = [dict(group) for group in self.optimizer.param_groups]
        groups.restore_state(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self._keep_own_settings(fresh)
        self.precision.load_state_dict(state["scaler"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])

    def require_same_names(self, saved: Mapping[str, Any]) -> None:
        """Raise UsageFault if a saved optimizer is of parameters with other names, or in other groups."""
        names = self.config.model.name, self.config.optimizer.name
        require_same(*names, saved["param_groups"], self.optimizer.param_groups)

    def _keep_own_settings(self, fresh: list[dict[str, Any]]) -> None:
        """Give the restored groups this run's settings; no bit differs if those are the same."""
        scheduler = self.scheduler
        scheduler.base_lrs = [group["initial_lr"] for group in fresh]
        changed = ALWAYS | (OF_GROUPS & fields_of_change(self.config.saving.change))
        groups = zip(self.optimizer.param_groups, fresh, scheduler.lr_lambdas, strict=True)
        for group, own, rate in groups:
            group.update({name: own[name] for name in (*changed, "initial_lr") if name in own})
            # Until it is called again, the scheduler would leave the rate of the schedule before.
            group["lr"] = own["initial_lr"] * rate(scheduler.last_epoch)
