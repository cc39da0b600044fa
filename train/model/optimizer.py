"""The optimizer, and what happens to gradients before a step. Imports torch."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpttool.errors import CkptToolError, UsageFault
from train.config.training import TrainConfig
from train.model import own_optimizer
from train.model.groups import groups_of, two_dtypes

NOT_FOR_THIS_LOOP = {
    "LBFGS": "calls the model several times in a step, and this trainer calls it once",
    "SparseAdam": "needs sparse gradients, and ranks average dense ones",
}


class Muon(Optimizer):
    """Muon for the matrices inside a model, AdamW for the rest, at one learning rate and decay.

    As its author advises (Jordan et al. 2024, kellerjordan.github.io/posts/muon), embeddings, the last layer,
    offsets, norms and kernels are AdamW's. The steps of both have the same size (arXiv 2502.16982). `betas`,
    `eps` and `fused` are of AdamW.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        inside = [group for group in groups if group["muon"]]
        others = [group for group in groups if not group["muon"]]
        if not inside:
            raise ValueError("it has no matrix before the last one that muon could orthogonalise")
        muon = torch.optim.Muon(inside, lr, weight_decay, momentum, nesterov, adjust_lr_fn="match_rms_adamw")
        self.parts: list[Optimizer] = [muon]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr, betas, eps, weight_decay, fused=fused))
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
    is_own = ":" in config.optimizer
    if config.zero and not is_own and _kind(config.optimizer) is Muon:
        raise UsageFault("--zero: muon's state is not divided among ranks", hint="leave it out")
    copied = copy.deepcopy(model).cpu()
    if config.zero:
        _check_one_dtype(groups_of(config, copied))
    try:
        if is_own:
            own_optimizer.check_resumes(config, copied)
            return
        optimizer = build_optimizer(dataclasses.replace(config, zero=False), copied)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except CkptToolError:
        raise
    except Exception as error:  # each class checks in its own way
        reason = " ".join(str(error).split())
        raise UsageFault(f"--optimizer {config.optimizer}: can't train {config.model}: {reason}") from error


def build_optimizer(config: TrainConfig, model: nn.Module, prefix: str = "") -> Optimizer:
    """Return the optimizer of the parameters that require gradients.

    Its groups say the parameters' names (`param_names`), so a saved state says which entry is whose.

    With `--zero` each rank holds the state of its own parameters only (ZeRO stage 1, Rajbhandari et al.
    2020, arXiv 1910.02054); the updates are the same, to the bit.

    Args:
        prefix: what precedes the model's own names in a checkpoint.
    """
    if ":" in config.optimizer:
        return own_optimizer.build(config, model, prefix, fused=_is_fused(config, model))
    kind, options, groups = _kind(config.optimizer), _options(config), groups_of(config, model, prefix)
    if config.fused != "off" and "fused" in inspect.signature(kind).parameters:
        options |= {"fused": True} if _is_fused(config, model) else {}
    elif config.fused == "on":
        raise UsageFault(
            f"--fused on: {config.optimizer} has no fused step", hint="give auto, or leave it out"
        )
    return ZeroRedundancyOptimizer(groups, kind, **options) if config.zero else kind(groups, **options)


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
    for name in ("momentum", "weight_decay", "nesterov", "betas", "eps"):
        value = getattr(config, name)
        # A momentum of 0 is not passed on: a class other than SGD has its own.
        if name in taken and (value or name == "weight_decay"):
            options[name] = value
        elif value:
            flag = name.replace("_", "-")
            raise UsageFault(f"--{flag}: {config.optimizer} has none", hint="leave it out")
    return options


def _is_fused(config: TrainConfig, model: nn.Module) -> bool:
    if config.fused != "auto":
        return config.fused == "on"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return all(parameter.is_cuda and parameter.is_floating_point() for parameter in trained)


def _check_one_dtype(groups: list[dict[str, Any]]) -> None:
    """Refuse what ZeroRedundancyOptimizer can't divide: parameters of several dtypes."""
    named = (pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True))
    if found := two_dtypes(named):
        (one, name), (other, second) = found
        what = f"--zero: needs parameters of one dtype, but {name} is {one} and {second} {other}"
        raise UsageFault(what, hint="leave it out")
