"""An optimizer of the user's: `--optimizer file.py:factory`. Imports torch.

    def factory(params, lr=0.1):              # the groups by rule, as the classes of torch.optim take them
        return torch.optim.Rprop(params, lr)

    def factory(model, lr=0.1):               # or groups of its own
        return torch.optim.SGD([{"params": model.head.parameters(), "lr": 10 * lr}, ...], lr)

It gets, by name, what it takes of `params`, `model`, and those of the flags below that are given. A class is
a factory too. What its `state_dict` does not hold is lost on a resume, so that is tried before training.
"""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

from ckpttool.distributed.randomness import seeded
from ckpttool.errors import UsageFault
from ckpttool.models import factory
from train.config.training import TrainConfig
from train.data.collate import CONTAINERS, digest_of
from train.data.lane import is_plain
from train.model.groups import groups_of
from train.model.optimizer_state import restore

OFFERED = ("lr", "momentum", "nesterov", "betas", "eps", "weight_decay", "fused")
RESTORED = ("state", "param_groups", "defaults")
KEPT = (int, float, torch.Tensor, numpy.ndarray, deque, *CONTAINERS)
RULES = ("decay_norms", "no_decay", "lr_scale", "layer_decay")


def build(config: TrainConfig, model: nn.Module, prefix: str, *, fused: bool) -> Optimizer:
    """Return the user's optimizer of a model, whose groups say the parameters' names.

    Raises:
        UsageFault: the factory does not take what a flag gives, or does not return an optimizer that has each
            parameter that requires gradients once.
    """
    takes = factory.takes(config.optimizer)
    if not (takes("params") or takes("model")):
        what = f"--optimizer {config.optimizer}: takes neither params nor model, so it can't train one"
        raise UsageFault(what, hint="def factory(params, lr=0.1): return torch.optim.SGD(params, lr)")
    values = {name: getattr(config, name) for name in OFFERED} | {"fused": fused or None}
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    refused = [name for name in given if not takes(name)]
    refused += [name for name in RULES if getattr(config, name) and not takes("params")]
    if refused:
        name = "params" if refused[0] in RULES else refused[0]
        what = f"--{refused[0].replace('_', '-')}: {config.optimizer} takes no {name}"
        raise UsageFault(what, hint=f"let the factory take {name}, or leave the flag out")
    made = factory.build(config.optimizer, params=groups_of(config, model, prefix), model=model, **given)
    if not isinstance(made, Optimizer):
        what = (
            f"--optimizer {config.optimizer}: returned a {type(made).__name__}, not a torch.optim.Optimizer"
        )
        raise UsageFault(what)
    _name(made, config.optimizer, model, prefix)
    return made


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


def check_resumes(config: TrainConfig, model: nn.Module) -> None:
    """Raise UsageFault unless a new optimizer that loads the state of another takes the same next step.

    On copies of the parameters; the random numbers are put back.
    """
    said = f"--optimizer {config.optimizer}"
    models = [copy.deepcopy(model).cpu() for _ in range(2)]
    first, second = (build(config, each, "", fused=False) for each in models)
    _step(models[0], first, 0)
    state = first.state_dict()
    if odd := sorted(map(str, state.keys() - {"state", "param_groups"})):
        raise UsageFault(
            f"{said}: its state_dict has {odd[0]} beside state and param_groups, which is not saved"
        )
    _check_entries(said, state["state"])
    try:
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        state = torch.load(file, weights_only=True)
    except Exception as error:  # torch's own text tells how to run what is in a file
        of_all = [
            pair for entry in (*state["state"].values(), *state["param_groups"]) for pair in entry.items()
        ]
        odd = [f": {name} is a {type(value).__name__}" for name, value in of_all if not is_plain(value)]
        what = f"{said}: its state holds more than tensors and plain values{''.join(odd[:1])}"
        raise UsageFault(what, hint="keep tensors and numbers in its state") from error
    models[1].load_state_dict(models[0].state_dict())
    restore(second, state)
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
