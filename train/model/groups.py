"""Groups of parameters, and the state of an optimizer by parameter. Imports torch.

A rule is said by a flag: norms and biases do not decay (`--decay-norms`), nor what `--no-decay` names;
`--lr-scale` and `--layer-decay` multiply the learning rate; muon takes matrices. Parameters to which the same
rules apply are a group, which says in `rule` what they are, so that a checkpoint does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ckpttool.distributed import transport
from ckpttool.distributed.transport import holds_parts, part_like
from ckpttool.errors import UsageFault
from train.config.sections import OptimizerConfig
from train.model.wrapping import block_paths

Groups = list[dict[str, Any]]

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# whose weights neither decay nor are muon's, whatever their axes
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Rules(NamedTuple):
    """What applies to a parameter, and in which place its group stands."""

    adamw: bool  # with --optimizer muon
    no_decay: bool
    layer: int  # from 0, with --layer-decay
    scaled: int  # the number of its --lr-scale, from 1; 0 for none


def groups_of(settings: OptimizerConfig, model: nn.Module, prefix: str = "") -> Groups:
    """Return the parameters that require gradients, each once, in groups; those that decay come first.

    Args:
        prefix: what precedes the names in a checkpoint (`param_names`), and not in the flags' expressions.
    """
    is_muon = settings.name.lower() == "muon"
    inside = matrices(model) if is_muon else set()
    keeps = _not_decaying(settings, model)
    layers = layers_of(model) if settings.layer_decay else {}
    parts = (text.rpartition("=") for text in settings.lr_scale)
    scales = [(name, float(factor)) for name, _, factor in parts]
    scaled = found_in("--lr-scale", [name for name, _ in scales], model)
    groups: dict[Rules, dict[str, Any]] = {}
    for name, parameter in trained(model).items():
        is_adamw = is_muon and id(parameter) not in inside
        rules = Rules(is_adamw, name in keeps, layers.get(name, 0), scaled.get(name, -1) + 1)
        group = groups.setdefault(rules, {"params": [], "param_names": []})
        group["params"].append(parameter)
        group["param_names"].append(f"{prefix}{name}")
    last = max(layers.values(), default=0)
    for rules, group in groups.items():
        factor = scales[rules.scaled - 1][1] if rules.scaled else 1.0
        factor *= settings.layer_decay ** (last - rules.layer) if settings.layer_decay else 1.0
        group |= {"weight_decay": 0.0} if rules.no_decay else {}
        group |= {"muon": not rules.adamw} if is_muon else {}
        group |= {"lr": settings.lr * factor} if factor != 1 and settings.lr is not None else {}
        if rule := _in_words(settings, rules, last, is_muon=is_muon):
            group["rule"] = rule
    return [groups[rules] for rules in sorted(groups)]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name; one with two names by its first."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def found_in(flag: str, patterns: Sequence[str], model: nn.Module) -> dict[str, int]:
    """Return the number of the first pattern that is found in the name of a parameter, for each that has one.

    Raises:
        UsageFault: a pattern is found in no name, or only where one before it is.
    """
    found: dict[str, int] = {}
    for number, pattern in enumerate(patterns):
        names = [name for name in trained(model) if re.search(pattern, name)]
        if not names:
            some = ", ".join([*trained(model)][:4])
            what = f"{flag} {pattern}: is found in the name of no parameter that is trained"
            raise UsageFault(what, hint=f"their names are {some}, …")
        if not {*names} - {*found}:
            before = patterns[found[names[0]]]
            what = f"{flag} {pattern}: is found only where {before} is, which comes first"
            raise UsageFault(what, hint="give it first, or leave it out")
        found = {**dict.fromkeys(names, number), **found}
    return found


def _in_words(settings: OptimizerConfig, rules: Rules, last: int, *, is_muon: bool) -> str:
    """Return what applies to a group, as `no decay, layer 2 of 6, lr-scale '^head'=10`."""
    parts = ["adamw" if rules.adamw else "muon"] if is_muon else []
    parts += ["no decay"] * rules.no_decay
    parts += [f"layer {rules.layer} of {last}"] * bool(settings.layer_decay)
    if rules.scaled:
        parts.append(f"lr-scale {settings.lr_scale[rules.scaled - 1]}")
    return ", ".join(parts)


def _not_decaying(settings: OptimizerConfig, model: nn.Module) -> set[str]:
    """Return the names of the parameters that do not decay."""
    if settings.weight_decay == 0:
        return set()
    names = set(found_in("--no-decay", settings.no_decay, model))
    if settings.decay_norms:
        return names
    layers = (layer for layer in model.modules() if isinstance(layer, NORMS))
    norms = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    return names | {name for name, p in trained(model).items() if not decays(name, p, norms)}


def decays(name: str, parameter: nn.Parameter, norms: set[int]) -> bool:
    """Say whether weight decay is meant for a parameter: a matrix or kernel, no bias, nothing of a norm."""
    return parameter.dim() > 1 and name.rpartition(".")[2] != "bias" and id(parameter) not in norms


def matrices(model: nn.Module) -> set[int]:
    """Return the `id` of each parameter that muon takes: those inside.

    These are the weights of two axes but the last one, that of the scores; of layers without layers in them
    and of attention, and none that is an embedding too. So what a model holds of its own, such as a table of
    places, is not among them.
    """
    weights: list[nn.Parameter] = []
    for layer in model.modules():
        has_layers = any(True for _ in layer.children()) and not isinstance(layer, nn.MultiheadAttention)
        if has_layers or isinstance(layer, (*EMBEDDINGS, *NORMS)):
            continue
        own = layer.named_parameters(recurse=False)
        weights += [p for name, p in own if p.dim() == 2 and "weight" in name and not p.is_complex()]
    embeddings = {id(layer.weight) for layer in model.modules() if isinstance(layer, EMBEDDINGS)}
    return {id(weight) for weight in weights[:-1]} - {id(weight) for weight in weights[-1:]} - embeddings


def layers_of(model: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter, from 0: what comes before the blocks, each block, what comes after.

    As for BEiT (arXiv 2106.08254). What lies between two blocks belongs to the second. A last block of plain
    layers is the head, with what precedes it.

    Raises:
        UsageFault: the model has no blocks.
    """
    names = [name for name, _ in model.named_parameters()]
    blocks = block_paths(model)
    block_of = {name: block for name in names for block in blocks if name.startswith(f"{block}.")}
    if not block_of:
        what = f"--layer-decay: {type(model).__name__} has no blocks"
        hint = "it needs modules in an nn.Sequential or nn.ModuleList; or give --lr-scale for each layer"
        raise UsageFault(what, hint=hint)
    first = next(place for place, name in enumerate(names) if name in block_of)
    number = {block: place + (first > 0) for place, block in enumerate(dict.fromkeys(block_of.values()))}
    layers = dict.fromkeys(names[:first], 0)
    after = max(number.values()) + 1
    for name in reversed(names[first:]):
        after = layers[name] = number[block_of[name]] if name in block_of else after
    return layers


def require_same(model: str, optimizer: str, saved: Groups, groups: Groups) -> None:
    """Raise UsageFault if saved groups are of parameters with other names, or divide them otherwise."""
    theirs, ours = ([group["param_names"] for group in each] for each in (saved, groups))
    if {*chain(*theirs)} != {*chain(*ours)}:
        raise UsageFault(f"--model {model}: its parameters have other names than the saved ones")
    if theirs != ours:
        what = f"--optimizer {optimizer}: parameters are in other groups than the saved ones"
        hint = "on a resume only numbers can change, and weight decay can't begin or end"
        raise UsageFault(what, hint=hint)


# ---- state -------------------------------------------------------------------------------------------


def consolidated(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's whole state, to be saved. A collective if it is divided among ranks.

    Its tensors are the optimizer's own, or copies on the CPU if it is divided; all ranks but 0 then have the
    settings of its groups alone.
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.state_dict()
    optimizer.consolidate_state_dict(to=0)
    # Of the others, torch's own class would ask for the whole.
    whole = optimizer.state_dict() if optimizer.rank == 0 else Optimizer.state_dict(optimizer)
    # Or rank 0 would keep all of it until the next time.
    optimizer._all_state_dicts.clear()  # type: ignore[attr-defined]
    return whole


def restore_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore a whole state that `consolidated` returned, given on every rank; it is left unchanged."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        parts = {index: _part(entry, parameters.get(index)) for index, entry in state["state"].items()}
        optimizer.load_state_dict({**state, "state": parts})
        for index, entry in parts.items():
            if own := optimizer.state.get(parameters[index]):
                own.update(_as_saved(own, entry, parameters[index]))
        return
    # It puts None in place of what other ranks hold, and keeps a second copy in the outer optimizer.
    entries = {index: dict(entry) for index, entry in state["state"].items()}
    optimizer.load_state_dict({**state, "state": copy.deepcopy(entries)})
    optimizer.state.clear()


def require_of_parameters(optimizer: Optimizer, who: str) -> None:
    """Raise UsageFault for divided tensors in a group: no resume would know how to divide them again."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params" and holds_parts(value):
                hint = "keep what is of a parameter in state[p][name]"
                raise UsageFault(f"{who} keeps '{name}', in parts of the ranks", hint=hint)


def _part(entry: Any, parameter: torch.nn.Parameter | None) -> Any:
    """Return this rank's part of a parameter's state, as with `--shard`."""
    if parameter is None:
        return entry
    return transport.mapped(entry, lambda tensor: part_like(tensor, parameter))


def _as_saved(own: Any, saved: Any, parameter: torch.nn.Parameter) -> Any:
    """Return what was loaded, with dtypes and texts as saved: torch gives tensors the parameter's dtype, and
    makes of a text that of a generator."""
    if isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor):
        is_cast = own.dtype == parameter.dtype != saved.dtype
        return saved.to(own.device, copy=True) if is_cast else own
    if isinstance(own, dict) and isinstance(saved, dict):
        return {name: _as_saved(value, saved.get(name), parameter) for name, value in own.items()}
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple) and len(own) == len(saved):
        return type(own)(_as_saved(*pair, parameter) for pair in zip(own, saved, strict=True))
    return saved if isinstance(saved, str | bytes) and isinstance(own, str | bytes) else own
