"""`--shard`: a model of which each rank holds a part, in the place of DDP (FSDP2). Imports torch.

Each rank has its rows of every parameter, of its gradient and of the optimizer's state for it. A unit of
the model, such as a layer of a transformer, is put together for its passes and taken apart after them (Zhao
et al. 2023, arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`). Names, gradients and updates are those
under DDP. What differs is that every pass sends, so ranks pass the model equally often.

With `--mesh RxS` there are R groups of S ranks; each group holds the whole model, and gradients are summed
over all ranks (HSDP). So less is sent between groups, as between machines.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ckpttool.distributed import collectives
from ckpttool.distributed.group import Place
from ckpttool.errors import UsageFault
from train.config import command_line
from train.config.training import TrainConfig
from train.model.groups import two_dtypes
from train.model.wrapping import block_paths

# They update each number by itself; others of torch.optim need whole matrices, of which a rank has a part.
OPTIMIZERS = {"sgd", "adam", "adamw", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "asgd"}


class Sharded(nn.Module):
    """A model divided among the ranks, with what the trainer uses of DistributedDataParallel.

    All ranks begin with rank 0's parameters, and each pass in training with its buffers.

    Attributes:
        about: how it is divided, for the report: `divided as 3 × Block, the rest; 2 groups of 4`.
        wholes: the parameters as they are put together for a pass, which get the gradients that are summed;
            those of a unit are known from its first pass on.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, place: Place) -> None:
        super().__init__()
        self.parameters_to_ignore = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        collectives.broadcast_into([*model.parameters(), *model.buffers()])
        groups, ranks = command_line.mesh_sizes(config, place.world_size)
        mesh = init_device_mesh(place.device.type, (groups, ranks), mesh_dim_names=("groups", "ranks"))
        how: dict[str, Any] = {"mesh": mesh if groups > 1 else mesh["ranks"]}
        if config.shard_offload:
            how["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=place.device.type == "cuda")
        paths = units(config, model)
        self.about = _described(
            Counter(type(model.get_submodule(path)).__name__ for path in paths), groups, ranks
        )
        for path in reversed(paths):  # inner ones first
            fsdp.fully_shard(model.get_submodule(path), mp_policy=_precision(config), **how)
        fsdp.fully_shard(model, mp_policy=_precision(config, outputs=torch.float32), **how)
        model.register_forward_hook(_take_apart)
        self.wholes: list[nn.Parameter] = []
        for path in ("", *paths):
            self._note_wholes(model.get_submodule(path))
        self.module = model

    def _note_wholes(self, unit: nn.Module) -> None:
        """Note the parameters of a unit in its first pass, once FSDP2's own hook has put them together."""

        def note(*_: object) -> None:
            self.wholes += [each for each in unit.parameters() if not isinstance(each, DTensor)]
            hook.remove()

        hook = unit.register_forward_pre_hook(torch.compiler.disable(note))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            apart = self.parameters_to_ignore
            collectives.broadcast_into(b for name, b in self.module.named_buffers() if name not in apart)
        return self.module(*inputs, **named)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for all passes of a step but the last, in which DDP would not sum gradients.

        Here they are summed in each: a rank has no room for those of the whole model.
        """
        return contextlib.nullcontext()


def _described(blocks: Counter[str], groups: int, ranks: int) -> str:
    named = [f"{number} × {name}" for name, number in blocks.items()]
    mesh = f"; {groups} groups of {ranks}" * (groups > 1)
    return f"divided as {', '.join([*named, 'the rest'] if named else ['one unit'])}{mesh}"


def _precision(config: TrainConfig, outputs: torch.dtype | None = None) -> fsdp.MixedPrecisionPolicy:
    if config.shard_dtype is None:
        return fsdp.MixedPrecisionPolicy()
    return fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, outputs)


def _take_apart(model: nn.Module, inputs: Any, outputs: Any) -> None:
    # A pass without gradients leaves the outermost unit whole, for a backward pass. The optimizer would then
    # update the parts, and the next pass would compute with the whole as it was.
    if not torch.is_grad_enabled():
        model.reshard()  # type: ignore[operator]


# ---- the units ------------------------------------------------------------------------------------------


def units(config: TrainConfig, model: nn.Module) -> list[str]:
    """Return the paths of the modules that are put together one at a time, outer ones first.

    They are those of `--shard-blocks`, or else the blocks that `--grad-checkpoint` takes. What is in none of
    them is a unit of its own. A block that shares a parameter with what is outside of it is none.

    Raises:
        UsageFault: there is no module of a class that was named, or it can't be a unit.
    """
    found = block_paths(model) if not config.shard_blocks else _of_classes(config, model)
    paths = [path for path in found if any(True for _ in model.get_submodule(path).parameters())]
    if config.shard_blocks:
        for path in paths:
            _require_unit(model, path)
    return [path for path in paths if not _shared(model, path)]


def _of_classes(config: TrainConfig, model: nn.Module) -> list[str]:
    classes = {path: type(module).__name__ for path, module in model.named_modules() if path}
    for name in config.shard_blocks:
        if name not in classes.values():
            what = f"--shard-blocks {name}: {config.model} has no module of this class"
            raise UsageFault(what, hint=f"one of {', '.join(sorted({*classes.values()}))}")
    return [path for path, name in classes.items() if name in config.shard_blocks]


def _require_unit(model: nn.Module, path: str) -> None:
    module = model.get_submodule(path)
    flag, hint = f"--shard-blocks {type(module).__name__}", "name another class, or leave it out"
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise UsageFault(f"{flag}: '{path}' has no forward: it only holds other modules", hint=hint)
    if name := _shared(model, path):
        what = f"{flag}: '{path}' shares {name} with a module outside of it, and both need it whole"
        raise UsageFault(what, hint=hint)


def _shared(model: nn.Module, path: str) -> str:
    """Return the name of a parameter that a module shares with what is outside of it; "" if there is none."""
    inside = {id(parameter): name for name, parameter in model.get_submodule(path).named_parameters(path)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and not name.startswith(f"{path}."):
            return inside[id(parameter)]
    return ""


# ---- what can't be divided ------------------------------------------------------------------------------


def check(config: TrainConfig, model: nn.Module) -> None:
    """Raise UsageFault if `--shard` can't divide this model or its optimizer's state. Sends nothing."""
    if not config.shard:
        return
    if (
        config.optimizer.lower() not in OPTIMIZERS and ":" not in config.optimizer
    ):  # of a user's: we can't know
        what = f"--shard and --optimizer {config.optimizer}: it needs whole matrices"
        hint = f"give one of {', '.join(sorted(OPTIMIZERS))}, or leave out --shard"
        raise UsageFault(f"{what}, and a rank has a part of each", hint=hint)
    for name, parameter in model.named_parameters():
        if reason := _indivisible(parameter):
            what = f"--shard: parameter {name} of {config.model} {reason}"
            raise UsageFault(what, hint="leave out --shard, or change the model")
    inner = units(config, model)
    for path in ("", *inner):
        _require_one_dtype(model, path, inner)
    for path, module in model.named_modules():
        if config.shard_dtype and isinstance(module, _BatchNorm):
            what = f"--shard-dtype bf16: '{path}' of {config.model} is a {type(module).__name__}"
            hint = "give --amp bf16, which normalises in float32"
            raise UsageFault(f"{what}, whose statistics are float32", hint=hint)


def _indivisible(parameter: nn.Parameter) -> str:
    if parameter.dim() == 0:
        return "is a single number, which has no rows: make it torch.ones(1)"
    if parameter.is_complex():
        return "is complex"
    return "" if parameter.is_contiguous() else "is not contiguous in memory"


def _require_one_dtype(model: nn.Module, path: str, inner: list[str]) -> None:
    """Refuse a unit with trained parameters of several dtypes, whose gradients are sent as one."""
    below = tuple(f"{other}." for other in inner if other != path and f".{other}".startswith(f".{path}"))
    trained = [pair for pair in model.get_submodule(path).named_parameters(path) if pair[1].requires_grad]
    if found := two_dtypes(pair for pair in trained if not pair[0].startswith(below)):
        (one, name), (other, second) = found
        what = f"--shard: {name} is {one} and {second} {other}, and gradients of a unit are sent as one"
        raise UsageFault(what, hint="give the layers of each dtype a class of their own, as --shard-blocks")


def check_outputs(config: TrainConfig, outputs: Any) -> None:
    """Raise UsageFault for outputs in which FSDP2 finds no tensor: it would sum no gradient."""
    found = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    if config.shard and not any(tensor.requires_grad for tensor in found):
        what = f"--shard: {config.model} returns a {type(outputs).__name__}, in which FSDP2 finds no tensor"
        raise UsageFault(what, hint="return a tensor, or a tuple, list or dict of them")
