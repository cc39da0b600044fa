"""Optimizers and schedulers, recognised by the entries of their states, which do not name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..checkpoint.states import is_optimizer
from ..inert_pickle.values import tensor_of

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

# Names in a scheduler's state beside its counters, and the scheduler that has them; the first match counts.
# Source: torch/optim/lr_scheduler.py.
SCHEDULERS: tuple[tuple[set[str], str], ...] = (
    ({"_schedulers", "_milestones"}, "SequentialLR"),
    ({"_schedulers"}, "ChainedScheduler"),
    ({"T_0", "T_mult"}, "CosineAnnealingWarmRestarts"),
    ({"T_max"}, "CosineAnnealingLR"),
    ({"num_bad_epochs"}, "ReduceLROnPlateau"),
    ({"total_steps"}, "OneCycleLR"),
    ({"step_ratio"}, "CyclicLR"),
    ({"total_iters", "start_factor"}, "LinearLR"),
    ({"total_iters", "factor"}, "ConstantLR"),
    ({"total_iters", "power"}, "PolynomialLR"),
    ({"milestones"}, "MultiStepLR"),
    ({"step_size"}, "StepLR"),
    ({"lr_lambdas"}, "LambdaLR"),
    ({"gamma"}, "ExponentialLR"),
)

PARAMETERS = ("params", "param_names")
"""Entries of a group that name its parameters; the others are settings."""


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
    """

    name: str
    kind: str | None
    parameters: int
    with_state: int
    per_parameter: tuple[str, ...]
    nbytes: int
    settings: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    """A scheduler's state in short: what it probably is, its last epoch and learning rate."""

    name: str
    kind: str
    last_epoch: object
    last_lr: object


def describe_optimizer(name: str, value: Mapping[object, object]) -> OptimizerRow:
    """Return an optimizer's state in short.

    Args:
        name: its dotted path.
        value: the state dict; its parts may be missing or malformed.
    """
    groups = [group for group in _values(value["param_groups"]) if isinstance(group, dict)]
    state = value["state"] if isinstance(value["state"], dict) else {}
    entries: dict[str, None] = {}
    nbytes = 0
    for kept in state.values():
        for key, item in kept.items() if isinstance(kept, dict) else ():
            tensor = tensor_of(item)
            entries[str(key)] = None
            nbytes += tensor.nbytes if tensor is not None else 0
    settings = tuple(
        {str(key): item for key, item in group.items() if key not in PARAMETERS and _is_plain(item)}
        for group in groups
    )
    listed = sum(len(_values(group.get("params"))) for group in groups)
    kind = _optimizer(entries, groups)
    return OptimizerRow(name, kind, listed, len(state), tuple(entries), nbytes, settings)


def _optimizer(entries: Mapping[str, None], groups: list[dict[object, object]]) -> str | None:
    settings = {str(key) for group in groups[:1] for key in group}
    decoupled = groups[0].get("decoupled_weight_decay") if groups else None
    if "amsgrad" in settings and isinstance(decoupled, bool):  # since torch 2.7
        return "AdamW" if decoupled else "Adam"
    for of_parameter, of_group, kind in OPTIMIZERS:
        if of_parameter <= entries.keys() and of_group <= settings:
            return kind
    return None


def describe_scheduler(name: str, value: object) -> SchedulerRow | None:
    """Return a scheduler's state in short; None when the value is not one.

    Args:
        name: its dotted path.
        value: any value.
    """
    if not isinstance(value, dict) or "last_epoch" not in value or is_optimizer(value):
        return None
    kind = next((kind for keys, kind in SCHEDULERS if keys <= value.keys()), None)
    if kind is None and "_step_count" not in value:
        return None
    rate = value.get("_last_lr")
    last = value["last_epoch"]
    return SchedulerRow(
        name,
        kind or "a scheduler",
        last if isinstance(last, int | float) else None,
        rate if _is_plain(rate) else None,
    )


def _values(value: object) -> list[object] | tuple[object, ...]:
    return value if isinstance(value, list | tuple) else ()


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 8 and all(isinstance(item, int | float | bool | str) for item in value)
    return isinstance(value, int | float | bool | str | type(None)) and len(str(value)[:200]) < 200


def in_words(settings: Mapping[str, object]) -> Iterator[str]:
    """Yield a group's settings in words, without those that are off or not set."""
    for key, value in settings.items():
        if value not in (None, False, 0) or key in ("lr", "momentum", "weight_decay"):
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            yield f"{key} {text}"
