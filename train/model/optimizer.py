"""The optimizer, its learning rate, and what happens to gradients before a step. Imports torch."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ckpttool.distributed.divided import part_like
from ckpttool.errors import UsageFault
from train.config.training import TrainConfig

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

NOT_FOR_THIS_LOOP = {
    "LBFGS": "calls the model several times in a step, and this trainer calls it once",
    "SparseAdam": "needs sparse gradients, and ranks average dense ones",
}


class Muon(Optimizer):
    """Muon for the matrices inside a model, AdamW for the rest, at one learning rate and decay.

    As its author advises (Jordan et al. 2024, kellerjordan.github.io/posts/muon), embeddings, the last layer,
    offsets, norms and kernels are AdamW's. The steps of both have the same size (arXiv 2502.16982).
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        inside = [group for group in groups if group["muon"]]
        others = [group for group in groups if not group["muon"]]
        if not inside:
            raise ValueError("it has no nn.Linear before the last one, whose matrix muon could orthogonalise")
        muon = torch.optim.Muon(inside, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
        self.parts: list[Optimizer] = [muon]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr, weight_decay=weight_decay))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        start = 0
        for part in self.parts:  # a restored state is in new dicts, which the parts shall have too
            part.state, end = self.state, start + len(part.param_groups)
            part.param_groups, start = self.param_groups[start:end], end

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.state = self.state
            part.step()


def check(config: TrainConfig, model: nn.Module) -> None:
    """Check that the optimizer exists, takes the settings, and can update the model's parameters.

    Takes one step with gradients of zero on copies of the parameters, in this process alone.
    """
    kind, options = _kind(config.optimizer), _options(config)
    groups = _groups(config, copy.deepcopy(model).cpu())
    if config.zero and kind is Muon:
        raise UsageFault("--zero: muon's state is not divided among ranks", hint="leave it out")
    if config.zero:
        _check_one_dtype(groups)
    try:
        optimizer = kind(groups, **options)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except Exception as error:  # each class checks in its own way
        reason = " ".join(str(error).split())
        raise UsageFault(f"--optimizer {config.optimizer}: can't train {config.model}: {reason}") from error


def build_optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    """Return the optimizer of the parameters that require gradients.

    Its groups say the parameters' names (`param_names`), so a saved state says which entry is whose. If there
    is weight decay, the second group is of the parameters that do not decay (`decays`).

    With `--zero` each rank holds the state of its own parameters only (ZeRO stage 1, Rajbhandari et al.
    2020, arXiv 1910.02054); the updates are the same, to the bit.
    """
    kind, options, groups = _kind(config.optimizer), _options(config), _groups(config, model)
    return ZeroRedundancyOptimizer(groups, kind, **options) if config.zero else kind(groups, **options)


def decays(name: str, parameter: nn.Parameter, norms: set[int]) -> bool:
    """Say whether weight decay is meant for a parameter: a matrix or kernel, no bias, nothing of a norm."""
    return parameter.dim() > 1 and name.rpartition(".")[2] != "bias" and id(parameter) not in norms


def consolidated(optimizer: Optimizer) -> dict[str, Any] | None:
    """Return the optimizer's whole state, to be saved. A collective if it is divided among ranks.

    Its tensors are the optimizer's own, or copies on the CPU if it is divided; it is then None on all ranks
    but 0.
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.state_dict()
    optimizer.consolidate_state_dict(to=0)
    whole = optimizer.state_dict() if optimizer.rank == 0 else None
    # Or rank 0 would keep all of it until the next time.
    optimizer._all_state_dicts.clear()  # type: ignore[attr-defined]
    return whole


def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore a whole state that `consolidated` returned, given on every rank; it is left unchanged."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.load_state_dict({**state, "state": _parts(optimizer, state["state"])})
        return
    # It puts None in place of what other ranks hold, and keeps a second copy in the outer optimizer.
    entries = {index: dict(entry) for index, entry in state["state"].items()}
    optimizer.load_state_dict({**state, "state": copy.deepcopy(entries)})
    optimizer.state.clear()


def _parts(optimizer: Optimizer, state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return this rank's part of a state whose parameters are divided, as with `--shard`."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    return {
        index: {name: _part(value, parameters.get(index)) for name, value in entry.items()}
        for index, entry in state.items()
    }


def _part(value: Any, parameter: nn.Parameter | None) -> Any:
    if not isinstance(value, torch.Tensor) or parameter is None:
        return value
    return part_like(value, parameter)


def clip(parameters: Iterable[nn.Parameter], norm: float | None) -> torch.Tensor:
    """Scale the gradients down so that their norm is at most `norm`; return the norm before, on their device.

    To be called after gradients were averaged over ranks and unscaled, so every rank computes the same. A
    norm that is infinite or NaN can't be scaled down: as in torch, parameters become NaN in that step, which
    the next save refuses. A parameter given twice counts once, a complex number by its absolute value.
    """
    once = {id(parameter): parameter for parameter in parameters if parameter.grad is not None}.values()
    total = nn.utils.get_total_norm([parameter.grad for parameter in once])  # type: ignore[misc]
    if isinstance(total, DTensor):  # with --shard each rank has the norm of its part
        total = total.full_tensor()
    if norm is not None:
        nn.utils.clip_grads_with_norm_(once, norm, total)
    return total


# ---- which class, and with what -----------------------------------------------------------------------


def _kind(name: str) -> type[Optimizer]:
    """Return the class of torch.optim with this name, in any case; or the Muon above."""
    if name.lower() == "muon":
        return Muon
    known = {
        class_name.lower(): kind
        for class_name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    kind = known.get(name.lower())
    if kind is None:
        names = ", ".join(sorted(known.keys() - {class_name.lower() for class_name in NOT_FOR_THIS_LOOP}))
        raise UsageFault(f"--optimizer {name}: torch.optim has none of that name", hint=f"one of {names}")
    if kind.__name__ in NOT_FOR_THIS_LOOP:
        hint = "give sgd, adamw or another"
        raise UsageFault(f"--optimizer {name}: {NOT_FOR_THIS_LOOP[kind.__name__]}", hint=hint)
    return kind


def _options(config: TrainConfig) -> dict[str, Any]:
    """Return what the class is called with; refuse an option that it does not have."""
    taken = inspect.signature(_kind(config.optimizer)).parameters
    options: dict[str, Any] = {"lr": config.lr}
    for name in ("momentum", "weight_decay"):
        value = getattr(config, name)
        # A momentum of 0 is not passed on: a class other than SGD has its own.
        if name in taken and (value or name == "weight_decay"):
            options[name] = value
        elif value:
            flag = name.replace("_", "-")
            raise UsageFault(f"--{flag}: {config.optimizer} has none", hint="leave it out")
    return options


def _groups(config: TrainConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters that require gradients, each once: in a group that decays, and one that doesn't.

    For muon, the matrices inside are a group before these.
    """
    is_muon = config.optimizer.lower() == "muon"
    inside = _matrices_inside(model) if is_muon else set()
    norms = {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, NORMS)
        for parameter in layer.parameters(recurse=False)
    }
    all_decay = config.decay_norms or not config.weight_decay
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = id(parameter) in inside, all_decay or decays(name, parameter, norms)
            group = groups.setdefault(kind, {"params": [], "param_names": []})
            group["params"].append(parameter)
            group["param_names"].append(name)
    for (for_muon, decaying), group in groups.items():
        group |= {} if decaying else {"weight_decay": 0.0}
        group |= {"muon": for_muon} if is_muon else {}
    return [groups[kind] for kind in sorted(groups, reverse=True)]


def _matrices_inside(model: nn.Module) -> set[int]:
    """Return the `id` of the matrix of each linear layer but the last; none that is an embedding too."""
    linear = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    embeddings = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    return {id(weight) for weight in linear[:-1]} - {id(weight) for weight in linear[-1:]} - embeddings


def _check_one_dtype(groups: list[dict[str, Any]]) -> None:
    """Refuse what ZeroRedundancyOptimizer can't divide: parameters of several dtypes."""
    dtypes: dict[str, str] = {}
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            dtypes.setdefault(str(parameter.dtype).removeprefix("torch."), name)
    if len(dtypes) > 1:
        (one, name), (other, second) = list(dtypes.items())[:2]
        what = f"--zero: needs parameters of one dtype, but {name} is {one} and {second} {other}"
        raise UsageFault(what, hint="leave it out")


# ---- the learning rate over the steps of a whole training ----------------------------------------------


def check_warmup(config: TrainConfig, steps_per_epoch: int) -> None:
    """Raise UsageFault if the training ends before its warm-up does."""
    warmup, steps = config.warmup.in_steps(steps_per_epoch), total_steps(config, steps_per_epoch)
    if warmup >= steps:
        what = f"--warmup {config.warmup}: is {warmup} steps, but the whole training has only {steps}"
        raise UsageFault(what)


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Return the steps that the schedule spans: of `--epochs` or `--max-steps`, whichever ends first.

    `--max-time` does not count: it interrupts a training run, which may be resumed.
    """
    steps = config.epochs * steps_per_epoch
    return min(steps, config.max_steps) if config.max_steps else steps


def build_scheduler(
    config: TrainConfig, optimizer: Optimizer, total_steps: int, steps_per_epoch: int | None = None
) -> LambdaLR:
    """Return the scheduler, to be called after each step that was not skipped."""
    warmup = config.warmup.in_steps(steps_per_epoch or total_steps // config.epochs)
    return LambdaLR(optimizer, lambda step: rate(config.scheduler, step, total_steps, warmup))


def rate(course: str, step: int, steps: int, warmup: int) -> float:
    """Return the factor of the learning rate in step `step` (from 0) of `steps`.

    `cosine` and `linear` would reach 0 in step `steps`, which is never taken.
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if course == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if course == "linear":
        return 1.0 - done
    tenths = (step >= steps / 2) + (step >= steps * 3 / 4)  # as for the ResNets of arXiv 1512.03385
    return 0.1**tenths if course == "step" else 1.0
