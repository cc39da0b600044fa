"""The model as it is trained: BatchNorm, compiled code, checkpoints, shards. Imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ckpttool import batchnorm
from ckpttool.distributed import collectives
from ckpttool.distributed.group import Place
from ckpttool.distributed.plan import Plan
from ckpttool.errors import UsageFault
from ckpttool.models import factory
from train.config import command_line
from train.config.sections import ModelConfig

# Versions of one function that are compiled before torch gives up: each shape and each mode has its own.
GRAPHS = 64

SYNCHRONISED = nn.SyncBatchNorm, batchnorm.SyncBatchNorm


def compare(model: nn.Module, when: str) -> None:
    """Raise RanksDiffer unless all ranks have tensors of the same names, types and shapes. A collective."""
    state = model.state_dict().items()
    kinds = {name: (v.dtype, v.shape) if isinstance(v, torch.Tensor) else None for name, v in state}
    kinds |= dict.fromkeys(extra_states(model))
    collectives.compare(kinds, when, hint="let --model make the same on every rank")


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return what `get_extra_state` of a model's modules returns, by its names in the state dict."""
    state = model.state_dict()
    return {name: value for name, value in state.items() if name.endswith(_EXTRA_STATE_KEY_SUFFIX)}


def share_extra_states(model: nn.Module) -> None:
    """Give every rank rank 0's extra states, as DDP does with tensors. A collective."""
    if extra := extra_states(model):  # only rank 0 may have the file of --init
        state = model.state_dict()  # whole, as in a resume: a model may load nothing else
        state.update(collectives.broadcast(lambda: extra))
        model.load_state_dict(state)


def wrap(settings: ModelConfig, model: nn.Module) -> None:
    """Apply `--compile` and `--grad-checkpoint` to a model, in place, before DDP wraps it: no key changes.

    Each batch size has compiled code of its own. If torch made one for all sizes when it met the second,
    which code a step runs would depend on the steps before, and a resumed run would differ in the last bits.
    The code is made in the first step of each batch size, which takes seconds to minutes.
    """
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    if settings.grad_checkpoint:
        checkpoint_blocks(model, compiled=settings.compile)
    elif settings.compile:
        model.compile(dynamic=False)


def not_compiled() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled modules run as they are: for evaluation, and for single passes."""
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def checkpoint_blocks(model: nn.Module, *, compiled: bool = False) -> list[str]:
    """Let a model's blocks keep only their inputs in a forward pass, and compute the rest again in backward.

    The gradients are the same, to the bit (Chen et al. 2016, arXiv 1604.06174). A block is a module with
    submodules in an `nn.Sequential` or `nn.ModuleList`, such as a stage's residual blocks or the layers of a
    transformer, or an `nn.Sequential` of plain layers that is not the whole model. Blocks inside a block are
    not wrapped again.

    The second computation leaves no trace: it draws the same random numbers, starts from the same buffers,
    and running statistics are updated once.

    Returns the paths of the blocks; raises UsageFault if there are none.
    """
    # With `compiled`, each block is compiled by itself. Were the checkpoint compiled with the model, a break
    # of the compiler's graph inside a block would leave it without what undoes the changes.
    paths = [path for path in block_paths(model) if _is_trained(model.get_submodule(path))]
    for path in paths:
        module = model.get_submodule(path)
        forward = torch.compile(module.forward, dynamic=False) if compiled else module.forward
        module.forward = functools.partial(_checkpointed, module, forward)
    if not paths:
        blocks = "modules with submodules in an nn.Sequential or nn.ModuleList"
        what = f"--grad-checkpoint: {type(model).__name__} has no blocks: {blocks}"
        raise UsageFault(what, hint="leave it out, or group the model's layers")
    return paths


def block_paths(model: nn.Module) -> list[str]:
    """Return the paths of a model's blocks, as `checkpoint_blocks` says what they are."""
    paths: list[str] = []
    for path, _ in model.named_modules():
        if _is_block(model, path) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    return paths


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _is_block(model: nn.Module, path: str) -> bool:
    if not path:
        return False
    module, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    inner = list(module.children())
    if isinstance(module, nn.Sequential) and not any(list(child.children()) for child in inner):
        return True
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return bool(inner) and isinstance(parent, containers) and not isinstance(module, containers)


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    again = _Again(block)
    how: dict[str, Any] = {"context_fn": lambda: (contextlib.nullcontext(), again), "use_reentrant": False}
    return checkpoint(forward, *args, **how, **named)


class _Again:
    """The context of a second computation, which has copies of the buffers: those that the first one met.

    So it computes the same, and what it changes is thrown away. BatchNorm's running statistics play no part
    in training, and are not copied before they are needed. The context may be entered again.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.before = {
            id(buffer): buffer.clone()
            for layer in block.modules()
            if not (isinstance(layer, _BatchNorm) and layer.training)
            for buffer in layer.buffers(recurse=False)
        }
        self.replaced: list[tuple[nn.Module, str, torch.Tensor]] = []

    def __enter__(self) -> None:
        copies: dict[int, torch.Tensor] = {}
        for layer in self.block.modules():
            for name, buffer in list(layer.named_buffers(recurse=False, remove_duplicate=False)):
                copy = copies.setdefault(id(buffer), self.before.get(id(buffer), buffer).clone())
                self.replaced.append((layer, name, buffer))
                setattr(layer, name, copy)

    def __exit__(self, *_: object) -> None:
        for layer, name, buffer in self.replaced:
            setattr(layer, name, buffer)
        self.replaced = []


# ---- --batchnorm: the layers that a model trains with, and what they ask of the plan --------------------


def as_trained(settings: ModelConfig, model: nn.Module) -> nn.Module:
    """Return the model with the layers that `--batchnorm` gives it on a CPU; a copy if any is converted."""
    has_norms = any(isinstance(module, _BatchNorm) for module in model.modules())
    if settings.batchnorm != "plain" and not has_norms:
        hint = "leave out --batchnorm"
        raise UsageFault(f"--batchnorm {settings.batchnorm}: {settings.name} has no BatchNorm", hint=hint)
    if settings.batchnorm != "sync":
        return model
    try:
        return batchnorm.to_sync(factory.copy_of(model))
    except UsageFault as fault:
        what = f"--batchnorm sync: {settings.name}: {fault.message}"
        raise UsageFault(what, hint="give plain or pooled") from None


def has_sync(model: nn.Module) -> bool:
    """Return whether a model has synchronised layers, ours or torch's, of `--batchnorm` or its own."""
    return any(isinstance(module, SYNCHRONISED) for module in model.modules())


def has_torchs_sync(model: nn.Module) -> bool:
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def check_batchnorm(
    settings: ModelConfig, model: nn.Module, trained: nn.Module, device: torch.device, plan: Plan, ranks: int
) -> None:
    """Raise UsageFault if synchronised layers can't work on this device, or with this plan."""
    if device.type == "cuda" and (settings.batchnorm == "sync" or has_torchs_sync(model)):
        _check_passes(plan, ranks)
    if device.type == "cpu" and has_torchs_sync(trained):
        hint = "give --batchnorm sync, which works on a CPU too" if settings.batchnorm != "sync" else None
        raise UsageFault(f"--model {settings.name}: torch's SyncBatchNorm works only on GPUs", hint=hint)


def check_scored(name: str, model: nn.Module) -> None:
    """Raise UsageFault for a layer that normalises by the batch when it is scored: no score is exact then."""
    for layer, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None and module.running_var is None:
            what = f"--model {name}: {layer} keeps no running statistics (track_running_stats=False)"
            why = "so a test sample's score would depend on those in its batch"
            hint = "give it track_running_stats=True, or take GroupNorm"
            raise UsageFault(f"{what}, {why}", hint=hint)


def _check_passes(plan: Plan, world_size: int) -> None:
    """Refuse a plan in which a rank skips a pass: in torch's SyncBatchNorm the others would wait for it."""
    for sizes in plan.splits(world_size):
        size, passes = sum(sizes), {min(plan.accumulate, share) for share in sizes}
        if len(passes) == 1:
            continue
        fault = f"gives one of {world_size} ranks fewer passes than another"
        if 0 in passes:
            fault = f"leaves one of {world_size} ranks without a sample"
        of_last = size < plan.batch_size < plan.length(world_size)
        batch = f"{'the last' if of_last else 'a'} batch of {size}"
        what = f"--batch-size {plan.batch_size}: {batch} {fault}, and SyncBatchNorm on GPUs needs every rank"
        other = "another --batch-size" + " or --accumulate" * (0 not in passes)
        raise UsageFault(what, hint=f"give {'--drop-last or ' * of_last}{other}")


def batch_of_one(model: str, plan: Plan, world_size: int) -> UsageFault:
    """Return the error for a plan that gives a rank a single sample, whose statistics have no value."""
    without_last = dataclasses.replace(plan, drop_last=True)
    last_only = without_last.steps_of(world_size) and 1 not in without_last.micro_batch_sizes(world_size)
    last = plan.steps_of(world_size) - 1 if last_only else 0
    given = f"--batch-size {plan.batch_size}"
    ways = [f"another --batch-size than {plan.batch_size}"]
    if plan.rank_share:
        given = f"--rank-share {','.join(map(str, plan.rank_share))}"
        ways = ["other numbers as --rank-share", *ways]
    if last_only:
        ways.insert(0, "--drop-last")
    if plan.accumulate > 1:
        ways.append(f"a smaller --accumulate than {plan.accumulate}")
    batch = f"{'the last' if last_only else 'a'} batch of {plan.global_size(last, world_size)}"
    why = f"BatchNorm in {model} can't compute the statistics of one value"
    what = f"{given}: {batch} gives a rank a single sample, and {why}"
    return UsageFault(what, hint=f"give {' or '.join(ways)}")


def two_dtypes(named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, str]]:
    """Return two of the dtypes of parameters, each with the first name; [] where all have one."""
    first: dict[str, str] = {}
    for name, parameter in named:
        first.setdefault(str(parameter.dtype).removeprefix("torch."), name)
    return [*first.items()][:2] if len(first) > 1 else []


# ---- divided among the ranks -------------------------------------------------------------------------

# Each rank has its rows of every parameter, of its gradient and of the optimizer's state for it. A unit of
# the model, such as a layer of a transformer, is put together for its passes and taken apart after them (Zhao
# et al. 2023, arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`). Names, gradients and updates are those
# under DDP. What differs is that every pass sends, so ranks pass the model equally often.
#
# With `--shard RxS` there are R groups of S ranks; each group holds the whole model, and gradients are summed
# over all ranks (HSDP). So less is sent between groups, as between machines.


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

    def __init__(self, settings: ModelConfig, model: nn.Module, place: Place) -> None:
        super().__init__()
        self.parameters_to_ignore = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        collectives.broadcast_into([*model.parameters(), *model.buffers()])
        groups, ranks = command_line.mesh_sizes(settings.mesh, place.world_size)
        mesh = init_device_mesh(place.device.type, (groups, ranks), mesh_dim_names=("groups", "ranks"))
        how: dict[str, Any] = {"mesh": mesh if groups > 1 else mesh["ranks"]}
        if settings.shard_offload:
            how["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=place.device.type == "cuda")
        paths = units(settings, model)
        blocks = Counter(type(model.get_submodule(path)).__name__ for path in paths)
        self.about = _described(blocks, groups, ranks)
        for path in reversed(paths):  # inner ones first
            fsdp.fully_shard(model.get_submodule(path), mp_policy=_precision(settings), **how)
        fsdp.fully_shard(model, mp_policy=_precision(settings, outputs=torch.float32), **how)
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


def _precision(settings: ModelConfig, outputs: torch.dtype | None = None) -> fsdp.MixedPrecisionPolicy:
    if settings.shard_dtype is None:
        return fsdp.MixedPrecisionPolicy()
    return fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, outputs)


def _take_apart(model: nn.Module, inputs: Any, outputs: Any) -> None:
    # A pass without gradients leaves the outermost unit whole, for a backward pass. The optimizer would then
    # update the parts, and the next pass would compute with the whole as it was.
    if not torch.is_grad_enabled():
        model.reshard()  # type: ignore[operator]


# ---- the units ------------------------------------------------------------------------------------------


def units(settings: ModelConfig, model: nn.Module) -> list[str]:
    """Return the paths of the modules that are put together one at a time, outer ones first.

    They are those of `--shard-blocks`, or else the blocks that `--grad-checkpoint` takes. What is in none of
    them is a unit of its own. A block that shares a parameter with what is outside of it is none.

    Raises:
        UsageFault: there is no module of a class that was named, or it can't be a unit.
    """
    found = block_paths(model) if not settings.shard_blocks else _of_classes(settings, model)
    paths = [path for path in found if any(True for _ in model.get_submodule(path).parameters())]
    if settings.shard_blocks:
        for path in paths:
            _require_unit(model, path)
    return [path for path in paths if not _shared(model, path)]


def _of_classes(settings: ModelConfig, model: nn.Module) -> list[str]:
    classes = {path: type(module).__name__ for path, module in model.named_modules() if path}
    for name in settings.shard_blocks:
        if name not in classes.values():
            what = f"--shard-blocks {name}: {settings.name} has no module of this class"
            raise UsageFault(what, hint=f"one of {', '.join(sorted({*classes.values()}))}")
    return [path for path, name in classes.items() if name in settings.shard_blocks]


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


def check_sharding(settings: ModelConfig, model: nn.Module, optimizer: str) -> None:
    """Raise UsageFault if `--shard` can't divide this model or its optimizer's state. Sends nothing."""
    if not settings.shard:
        return
    if optimizer.lower() not in OPTIMIZERS and ":" not in optimizer:  # of a user's: we can't know
        what = f"--shard and --optimizer {optimizer}: it needs whole matrices"
        hint = f"give one of {', '.join(sorted(OPTIMIZERS))}, or leave out --shard"
        raise UsageFault(f"{what}, and a rank has a part of each", hint=hint)
    for name, parameter in model.named_parameters():
        if reason := _indivisible(parameter):
            what = f"--shard: parameter {name} of {settings.name} {reason}"
            raise UsageFault(what, hint="leave out --shard, or change the model")
    inner = units(settings, model)
    for path in ("", *inner):
        _require_one_dtype(model, path, inner)
    for path, module in model.named_modules():
        if settings.shard_dtype and isinstance(module, _BatchNorm):
            what = f"--shard bf16: '{path}' of {settings.name} is a {type(module).__name__}"
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


def check_outputs(settings: ModelConfig, outputs: Any) -> None:
    """Raise UsageFault for outputs in which FSDP2 finds no tensor: it would sum no gradient."""
    found = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    if settings.shard and not any(tensor.requires_grad for tensor in found):
        what = f"--shard: {settings.name} returns a {type(outputs).__name__}, in which FSDP2 finds no tensor"
        raise UsageFault(what, hint="return a tensor, or a tuple, list or dict of them")
