"""What a checkpoint holds besides its model: optimizers and schedulers in short, and every other value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.dotted_names import Again, Entry, dotted, entries
from ..core.checkpoint.optimizer_view import LISTS, OptimizerView, is_optimizer
from ..core.checkpoint.pickled_modules import is_module, own_attributes
from ..core.checkpoint.special_tensors import special_tensor
from ..core.checkpoint.state import State, all_tensors
from ..core.inert_pickle import values
from ..core.inert_pickle.known_names import UNDERSTOOD
from ..core.inert_pickle.plain_objects import scalar_of
from ..core.inert_pickle.values import MAX_DEPTH, Global, Record, in_brief, tensor_of, walk
from ..core.tensors.ref import DTYPES, TensorRef
from ..core.words import counted

MAX_ITEMS = 16  # plain values that a list shows, at most
MAX_OPTIMIZERS = 16  # entries of a list that are searched for optimizers, at most

# Names in a parameter's state, names in a group, and the optimizer that has them; the first match counts.
# Sources: torch/optim/*.py; the code of the papers for Lion and LAMB.
OPTIMIZERS: tuple[tuple[set[str], set[str], str], ...] = (
    ({"mu_product"}, set(), "NAdam"),
    ({"exp_avg", "exp_inf"}, set(), "Adamax"),
    ({"exp_avg", "exp_avg_sq"}, {"amsgrad"}, "Adam or AdamW"),
    ({"exp_avg", "exp_avg_sq"}, {"decoupled_weight_decay"}, "RAdam"),
    ({"exp_avg", "exp_avg_sq"}, set(), "of the Adam family"),
    ({"square_avg", "acc_delta"}, set(), "Adadelta"),
    ({"square_avg"}, set(), "RMSprop"),
    ({"eta", "ax"}, set(), "ASGD"),
    ({"prev", "step_size"}, set(), "Rprop"),
    ({"row_var", "col_var"}, set(), "Adafactor"),
    ({"exp_avg_sq_row", "exp_avg_sq_col"}, set(), "Adafactor"),
    ({"old_dirs", "old_stps"}, set(), "LBFGS"),
    ({"sum"}, set(), "Adagrad"),
    ({"momentum_buffer"}, {"ns_steps"}, "Muon"),
    ({"momentum_buffer"}, set(), "SGD with momentum"),
    ({"exp_avg"}, set(), "Lion"),
    (set(), {"momentum", "dampening", "nesterov"}, "SGD"),
    (set(), {"betas", "amsgrad"}, "Adam or AdamW"),
    (set(), {"betas"}, "of the Adam family"),
)

# Schedulers, and names in their states besides the counters; the first match counts.
# Source: torch/optim/lr_scheduler.py.
SCHEDULERS = """
    SequentialLR: _schedulers _milestones, ChainedScheduler: _schedulers, CosineAnnealingLR: T_max,
    CosineAnnealingWarmRestarts: T_0 T_mult, ReduceLROnPlateau: num_bad_epochs, OneCycleLR: total_steps,
    CyclicLR: step_ratio, LinearLR: total_iters start_factor, ConstantLR: total_iters factor,
    PolynomialLR: total_iters power, MultiStepLR: milestones, StepLR: step_size, LambdaLR: lr_lambdas,
    ExponentialLR: gamma
"""


@dataclass(frozen=True, slots=True)
class OtherRow:
    """A value that is not a tensor.

    Attributes:
        name: its dotted path.
        type: its type, as a person would call it.
        value: the value, when it is plain and short.
        has_value: whether `value` is set; it may be None itself.
        size: the number of entries of a container.
        same_as: the first name of a container that is in several places: its entries are shown there.
    """

    name: str
    type: str
    value: object = None
    has_value: bool = False
    size: int | None = None
    same_as: str | None = None


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """An optimizer's state in short.

    Attributes:
        name: its dotted path.
        kind: the optimizer it probably is; None when unknown.
        parameters: the number of parameters that its groups list.
        with_state: how many of them have a state.
        per_parameter: the names of a parameter's entries, in their order.
        nbytes: the size of all its tensors.
        settings: for each group, the plain entries other than its parameters.
        groups: the number of parameters in each group.
    """

    name: str
    kind: str | None
    parameters: int
    with_state: int
    per_parameter: tuple[str, ...]
    nbytes: int
    settings: tuple[dict[str, object], ...]
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    """A scheduler's state in short: what it probably is, its last epoch and learning rate."""

    name: str
    kind: str
    last_epoch: object
    last_lr: object


def other_rows(checkpoint: Checkpoint, state: State | None) -> Iterator[OtherRow]:
    """Yield everything but the tensors, as deep as names go; long lists and objects stay closed."""

    def inside(value: object) -> Iterable[Entry] | None:
        if state is not None and value is state.anchor and isinstance(value, dict):
            return state.others.items()  # its module versions are for torch, not for people
        if special_tensor(value) is not None:
            return None
        if is_module(value):
            return own_attributes(value)  # not those of the modules inside it
        return entries(value) if isinstance(value, dict) or _attributes(value) is not None else None

    for path, value in checkpoint.named(inside, again=True):
        if isinstance(value, Again):
            if state is None or value.value is not state.anchor:  # its places have their own lines
                yield OtherRow(dotted(path), type_name(value.value), same_as=dotted(value.first))
        elif is_module(value):
            yield OtherRow(dotted(path), type_name(value))
        elif special_tensor(value) is not None:
            continue
        elif (attributes := _attributes(value)) is not None:
            yield OtherRow(dotted(path), type_name(value), size=len(attributes))
        elif isinstance(value, dict):
            if path and (not value or len(path) == MAX_DEPTH):
                yield OtherRow(dotted(path), type_name(value), size=len(value))
        elif tensor_of(value) is None:
            plain = _plain(value)
            size = len(value) if isinstance(value, list | tuple | set | frozenset | bytes) else None
            yield OtherRow(dotted(path), type_name(value), plain, plain is not None or value is None, size)


def _attributes(value: object) -> dict[object, object] | None:
    """Return the attributes of an object pickled with a dict of them, such as argparse.Namespace."""
    if not isinstance(value, Record) or value.elements or value.items or not isinstance(value.state, dict):
        return None
    return value.state if all(isinstance(key, str) for key in value.state) else None


def _plain(value: object, levels: int = 2) -> object:
    """Return a value when it is plain and short, else None; lists may hold lists, `levels` deep."""
    if isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 4096):
        return value
    if isinstance(value, str):
        return value if len(value) <= 1000 else None
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS and levels:
        items = [_plain(item, levels - 1) for item in value]
        return items if all(i is not None or v is None for i, v in zip(items, value, strict=True)) else None
    if isinstance(value, Global):
        return str(value)
    number = scalar_of(value)  # of NumPy, as a best score often is
    return number if isinstance(number, bool | int | float) else None


def type_name(value: object) -> str:
    """Return what a person would call the type of an inert value."""
    if isinstance(value, Record):
        name = value.type_name
        return name.rpartition(".")[2] if name in UNDERSTOOD else name
    if isinstance(value, values.OrderedDict_):
        return "OrderedDict"
    if isinstance(value, TensorRef):
        return "Tensor"
    if isinstance(value, Global):
        return "dtype" if str(value).removeprefix("torch.") in DTYPES else "name"
    return values.container_name(value)


def training_rows(tree: object) -> tuple[tuple[OptimizerRow, ...], tuple[SchedulerRow, ...]]:
    """Return the optimizers and schedulers at the top of a file, or in dicts and lists at its top."""
    optimizers: list[OptimizerRow] = []
    schedulers: list[SchedulerRow] = []
    inside = dict, list  # `dict | list` would be made anew for every tensor
    level: list[tuple[str, object]] = [("", tree)]
    for _ in range(3):
        below: list[tuple[str, object]] = []
        for name, value in level:
            scheduler = describe_scheduler(name, value)
            if is_optimizer(value):
                optimizers.append(describe_optimizer(name, value))
            elif scheduler is not None:
                schedulers.append(scheduler)
            elif isinstance(value, dict | list):
                entries = value if isinstance(value, dict) else dict(enumerate(value[:MAX_OPTIMIZERS]))
                if all_tensors(entries.values()):
                    continue
                begin = f"{name}." if name else ""
                items = ((key, item) for key, item in entries.items() if isinstance(item, inside))
                below += [(begin + in_brief(key), item) for key, item in items]
        level = below
    return tuple(optimizers), tuple(schedulers)


def describe_optimizer(name: str, value: dict[Any, Any]) -> OptimizerRow:
    """Return an optimizer's state in short."""
    view = OptimizerView(value)
    entries: dict[str, None] = {}
    nbytes = 0
    for key, item in (pair for kept in view.entries for pair in kept.items()):
        entries[str(key)] = None
        held = map(tensor_of, walk(item) if isinstance(item, list | tuple | dict) else [item])
        nbytes += sum(tensor.nbytes for tensor in held if tensor is not None)
    pairs = ([pair for pair in group.items() if pair[0] not in LISTS] for group in view.groups)
    settings = tuple({str(key): item for key, item in rest if _is_plain(item)} for rest in pairs)
    sizes = tuple(map(len, view.keys))
    kind = _optimizer(entries, view.groups)
    return OptimizerRow(name, kind, sum(sizes), len(view.state), tuple(entries), nbytes, settings, sizes)


def _optimizer(entries: Mapping[str, None], groups: list[dict[object, object]]) -> str | None:
    settings = {str(key) for group in groups[:1] for key in group}
    decoupled = groups[0].get("decoupled_weight_decay") if groups else None
    if "amsgrad" in settings and isinstance(decoupled, bool):  # since torch 2.7
        return "AdamW" if decoupled else "Adam"
    kinds = (kind for names, group, kind in OPTIMIZERS if names <= entries.keys() and group <= settings)
    return next(kinds, None)


def describe_scheduler(name: str, value: object) -> SchedulerRow | None:
    """Return a scheduler's state in short; None when the value is not one."""
    if not isinstance(value, dict) or "last_epoch" not in value or is_optimizer(value):
        return None
    known = (entry.split(":") for entry in SCHEDULERS.split(","))
    kind = next((kind.strip() for kind, keys in known if {*keys.split()} <= value.keys()), None)
    if kind is None and "_step_count" not in value:
        return None
    rate = value.get("_last_lr")
    last = value["last_epoch"] if isinstance(value["last_epoch"], int | float) else None
    return SchedulerRow(name, kind or "a scheduler", last, rate if _is_plain(rate) else None)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 8 and all(isinstance(item, int | float | bool | str) for item in value)
    return isinstance(value, int | float | bool | str | type(None)) and len(str(value)[:200]) < 200


def groups_in_words(row: OptimizerRow) -> Iterator[str]:
    """Yield the settings that an optimizer's groups share, then the rule, size and other settings of each.

    The trainer writes the rule of a group into it.
    """
    if len(row.settings) < 2:
        yield from ("; ".join(in_words(settings)) for settings in row.settings)
        return
    first, *others = row.settings
    shared = {k: v for k, v in first.items() if all(k in group and group[k] == v for group in others)}
    yield "; ".join(in_words(shared))
    for number, (settings, size) in enumerate(zip(row.settings, row.groups, strict=True)):
        own = {key: value for key, value in settings.items() if key not in shared and key != "rule"}
        rule = settings.get("rule") or f"group {number}"
        yield "; ".join([f"{rule}: {counted(size, 'parameter')}", *in_words(own)])


def in_words(settings: Mapping[str, object]) -> Iterator[str]:
    """Yield a group's settings in words, without those that are off or not set."""
    for key, value in settings.items():
        if value not in (None, False, 0) or key in ("lr", "momentum", "weight_decay"):
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            yield f"{key} {text}"
