"""The optimizer: torch's own, Muon, or the user's. Imports torch.

    def factory(params, lr=0.1):              # the groups by rule, as the classes of torch.optim take them
        return torch.optim.Rprop(params, lr)

    def factory(model, lr=0.1):               # or groups of its own
        return torch.optim.SGD([{"params": model.head.parameters(), "lr": 10 * lr}, ...], lr)

It gets, by name, what it takes of `params`, `model`, and those of the flags below that are given. A class is
a factory too. What its `state_dict` does not hold is lost on a resume, so that is tried before training.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpttool.distributed.randomness import seeded
from ckpttool.errors import CkptToolError, UsageFault
from ckpttool.models import factory
from train.config.sections import OptimizerConfig
from train.data.samples import CONTAINERS, digest_of
from train.data.stream import is_plain
from train.model.groups import groups_of, restore_state
from train.model.wrapping import two_dtypes

OFFERED = ("lr", "momentum", "nesterov", "betas", "eps", "weight_decay", "fused")
RESTORED = ("state", "param_groups", "defaults")
KEPT = (int, float, torch.Tensor, numpy.ndarray, deque, *CONTAINERS)
RULES = ("decay_norms", "no_decay", "lr_scale", "layer_decay")


def build_own(settings: OptimizerConfig, model: nn.Module, prefix: str, *, fused: bool) -> Optimizer:
    """Return the user's optimizer of a model, whose groups say the parameters' names.

    Raises:
        UsageFault: the factory does not take what a flag gives, or does not return an optimizer that has each
            parameter that requires gradients once.
    """
    takes = factory.takes(settings.name)
    if not (takes("params") or takes("model")):
        what = f"--optimizer {settings.name}: takes neither params nor model, so it can't train one"
        raise UsageFault(what, hint="def factory(params, lr=0.1): return torch.optim.SGD(params, lr)")
    values = {name: getattr(settings, name) for name in OFFERED} | {"fused": fused or None}
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    refused = [name for name in given if not takes(name)]
    refused += [name for name in RULES if getattr(settings, name) and not takes("params")]
    if refused:
        name = "params" if refused[0] in RULES else refused[0]
        what = f"--{refused[0].replace('_', '-')}: {settings.name} takes no {name}"
        raise UsageFault(what, hint=f"let the factory take {name}, or leave the flag out")
    made = factory.build(settings.name, params=groups_of(settings, model, prefix), model=model, **given)
    if not isinstance(made, Optimizer):
        what = f"--optimizer {settings.name}: returned a {type(made).__name__}, not a torch.optim.Optimizer"
        raise UsageFault(what)
    _name(made, settings.name, model, prefix)
    if has_modes(made):
        set_mode(made, training=True)
        if settings.ema:
            what = f"--ema: {settings.name} is scored by weights of its own, those after its eval()"
            raise UsageFault(what, hint="leave out --ema")
    return made


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether it gives the model other weights to be scored by, as schedule-free optimizers do."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def set_mode(optimizer: Any, *, training: bool) -> None:
    """Give the model the weights to train, or to be scored by."""
    optimizer.train() if training else optimizer.eval()


def _name(optimizer: Optimizer, spec: str, model: nn.Module, prefix: str) -> None:
    """Let the groups say the names of their parameters, each once, none missing."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left = dict(names)
    for number, group in enumerate(optimizer.param_groups):
        if not isinstance(group.get("lr"), int | float):
            what = f"--optimizer {spec}: group {number} has no learning rate that is a number"
            raise UsageFault(what, hint="give each group an lr, which the schedule multiplies")
        group["param_names"] = []
        for parameter in group["params"]:
            if id(parameter) not in left:
                shape = f"a parameter of the shape {list(parameter.shape)} that is none of the model's"
                which = f"parameter {names[id(parameter)]} twice" if id(parameter) in names else shape
                hint = "give it the model's parameters, each once"
                raise UsageFault(f"--optimizer {spec}: has {which}", hint=hint)
            group["param_names"].append(f"{prefix}{left.pop(id(parameter))}")
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) in left]
    if missing:
        what = f"--optimizer {spec}: leaves out parameter {missing[0]}, which requires a gradient"
        raise UsageFault(what, hint="add it to a group, or set requires_grad=False on it in the model")


def check_resumes(settings: OptimizerConfig, model: nn.Module) -> None:
    """Raise UsageFault unless a new optimizer that loads the state of another takes the same next step.

    On copies of the parameters; the random numbers are put back.
    """
    said = f"--optimizer {settings.name}"
    models = [factory.copy_of(model).cpu() for _ in range(2)]
    first, second = (build_own(settings, each, "", fused=False) for each in models)
    _step(models[0], first, 0)
    state = first.state_dict()
    if has_modes(first):
        _check_modes(said, models[0], first)
    if odd := sorted(map(str, state.keys() - {"state", "param_groups"})):
        what = f"{said}: its state_dict has {odd[0]} beside state and param_groups"
        raise UsageFault(f"{what}, which is not saved")
    _check_entries(said, state["state"])
    try:
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        state = torch.load(file, weights_only=True)
    except Exception as error:  # torch's own text tells how to run what is in a file
        entries = *state["state"].values(), *state["param_groups"]
        of_all = [pair for entry in entries for pair in entry.items()]
        odd = [f": {name} is a {type(value).__name__}" for name, value in of_all if not is_plain(value)]
        what = f"{said}: its state holds more than tensors and plain values{''.join(odd[:1])}"
        raise UsageFault(what, hint="keep tensors and numbers in its state") from error
    models[1].load_state_dict(models[0].state_dict())
    restore_state(second, state)
    for each, optimizer in zip(models, (first, second), strict=True):
        _step(each, optimizer, 1)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
            what = f"{said}: after its state_dict is loaded, the next step changes parameter {name} otherwise"
            raise UsageFault(f"{what}: a resume could not be exact", hint="keep all it needs in its state")
    states = [each.state_dict() for each in (first, second)]
    if digest_of(states[0]) != digest_of(states[1]):
        what = f"{said}: after its state_dict is loaded, the next step leaves another state"
        raise UsageFault(f"{what}: a resume could not be exact", hint="keep its dtypes and values on loading")
    # It may need them only in a later step: one that does something in each tenth, say.
    kept, restored = map(_attributes, (first, second))
    if differing := [name for name in kept if kept[name] != restored.get(name)]:
        what = f"{said}: its attribute {differing[0]} changes with the steps, and its state_dict lacks it"
        raise UsageFault(what, hint="keep it in its state, or in a group")


def _check_modes(said: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UsageFault if scores would change the training: what is saved, but for the weights themselves."""
    before, weights = digest_of(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    set_mode(optimizer, training=False)
    set_mode(optimizer, training=True)
    model.load_state_dict(weights)
    if digest_of(optimizer.state_dict()) != before:
        what = f"{said}: its eval() and then train() leave another state"
        raise UsageFault(f"{what}: a score would change the training", hint="let them change weights alone")


def _check_entries(said: str, entries: Mapping[Any, Any]) -> None:
    """Raise UsageFault for a state that is not of parameters, each with values by name: none can be read."""
    for index, entry in entries.items():
        if not isinstance(index, int):
            what = f"{said}: its state has an entry {index!r}, which is of no parameter"
        elif not isinstance(entry, Mapping):
            what = f"{said}: its state of a parameter is a {type(entry).__name__}, not values by name"
        elif odd := [key for key in entry if not isinstance(key, str)]:
            what = f"{said}: its state of a parameter has the key {odd[0]!r}, which is no name"
        else:
            continue
        raise UsageFault(what, hint="keep what is of all parameters in a group, and of one in state[p][name]")


def _attributes(optimizer: Optimizer) -> dict[str, str]:
    """Return digests of the numbers, tensors and collections of these that it keeps beside its state."""
    found = {name: value for name, value in vars(optimizer).items() if isinstance(value, KEPT)}
    # torch keeps hooks by a number that it gives each one of a process.
    own = (name for name in found if name not in RESTORED and not name.startswith("_optimizer_"))
    return {name: digest_of(found[name]) for name in own}


def _step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    with seeded("optimizer", number):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter) / 100
        optimizer.step()
        optimizer.zero_grad()


# ---- torch's own -------------------------------------------------------------------------------------


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


def check(settings: OptimizerConfig, model: nn.Module, name: str) -> None:
    """Check that the optimizer exists, takes the settings, and can update the model's parameters.

    Takes one step with gradients of zero on copies of the parameters, in this process alone.
    """
    is_own = ":" in settings.name
    if settings.zero and not is_own and _kind(settings.name) is Muon:
        raise UsageFault("--zero: muon's state is not divided among ranks", hint="leave it out")
    copied = factory.copy_of(model).cpu()
    if settings.zero:
        _check_one_dtype(groups_of(settings, copied))
    try:
        if is_own:
            check_resumes(settings, copied)
            return
        optimizer = build_optimizer(dataclasses.replace(settings, zero=False), copied)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except CkptToolError:
        raise
    except Exception as error:  # each class checks in its own way
        reason = " ".join(str(error).split())
        raise UsageFault(f"--optimizer {settings.name}: can't train {name}: {reason}") from error


def build_optimizer(settings: OptimizerConfig, model: nn.Module, prefix: str = "") -> Optimizer:
    """Return the optimizer of the parameters that require gradients.

    Its groups say the parameters' names (`param_names`), so a saved state says which entry is whose.

    With `--zero` each rank holds the state of its own parameters only (ZeRO stage 1, Rajbhandari et al.
    2020, arXiv 1910.02054); the updates are the same, to the bit.

    Args:
        prefix: what precedes the model's own names in a checkpoint.
    """
    if ":" in settings.name:
        return build_own(settings, model, prefix, fused=_is_fused(settings, model))
    kind, options, groups = _kind(settings.name), _options(settings), groups_of(settings, model, prefix)
    if settings.fused != "off" and "fused" in inspect.signature(kind).parameters:
        options |= {"fused": True} if _is_fused(settings, model) else {}
    elif settings.fused == "on":
        raise UsageFault(f"--fused on: {settings.name} has no fused step", hint="give auto, or leave it out")
    return ZeroRedundancyOptimizer(groups, kind, **options) if settings.zero else kind(groups, **options)


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
    classes = (each for each in vars(torch.optim).items() if isinstance(each[1], type))
    known = {key.lower(): each for key, each in classes if issubclass(each, Optimizer)}
    del known["optimizer"]
    kind: type[Optimizer] | None = known.get(name.lower())
    if kind is None:
        names = ", ".join(sorted(known.keys() - {class_name.lower() for class_name in NOT_FOR_THIS_LOOP}))
        raise UsageFault(f"--optimizer {name}: torch.optim has none of that name", hint=f"one of {names}")
    if kind.__name__ in NOT_FOR_THIS_LOOP:
        hint = "give sgd, adamw or another"
        raise UsageFault(f"--optimizer {name}: {NOT_FOR_THIS_LOOP[kind.__name__]}", hint=hint)
    return kind


def _options(settings: OptimizerConfig) -> dict[str, Any]:
    """Return what the class is called with; refuse an option that it does not have."""
    taken = inspect.signature(_kind(settings.name)).parameters
    options: dict[str, Any] = {"lr": settings.lr}
    for name in ("momentum", "weight_decay", "nesterov", "betas", "eps"):
        value = getattr(settings, name)
        # A momentum of 0 is not passed on: a class other than SGD has its own.
        if name in taken and (value or name == "weight_decay"):
            options[name] = value
        elif value:
            flag = name.replace("_", "-")
            raise UsageFault(f"--{flag}: {settings.name} has none", hint="leave it out")
    return options


def _is_fused(settings: OptimizerConfig, model: nn.Module) -> bool:
    if settings.fused != "auto":
        return settings.fused == "on"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return all(parameter.is_cuda and parameter.is_floating_point() for parameter in trained)


def _check_one_dtype(groups: list[dict[str, Any]]) -> None:
    """Refuse what ZeroRedundancyOptimizer can't divide: parameters of several dtypes."""
    named = (pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True))
    if found := two_dtypes(named):
        (one, name), (other, second) = found
        what = f"--zero: needs parameters of one dtype, but {name} is {one} and {second} {other}"
        raise UsageFault(what, hint="leave it out")
