"""Places of a model's state in a tree: dicts of tensors by name, and pickled models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from ..inert_pickle.values import Record, tensor_of
from ..tensors.ref import TensorRef
from .dotted_names import Path
from .pickled_modules import is_module

# Keys under which checkpoints keep the model's state, the likelier first. Averages come last: users ask for
# them by name.
STATE_NAMES = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "net_state_dict",
    "net",
    "network",
    "module",
    "weights",
    "params",
    "generator",
    "state_dict_ema",
    "ema_state_dict",
    "model_ema",
    "ema_model",
    "ema",
)

BUFFERS = MEAN, VARIANCE, COUNTER = "running_mean", "running_var", "num_batches_tracked"
"""The buffers of BatchNorm: part of a model's state, but not parameters."""

LEVELS = 4
"""Levels that are searched for states: the file itself and three below it."""


def is_state(value: dict[object, object]) -> bool:
    """Return whether a dict has a tensor directly inside and only text for keys."""
    return any(tensor_of(item) is not None for item in value.values()) and {*map(type, value)} == {str}


def all_tensors(values: Iterable[object]) -> bool:
    """Return whether all values are tensors, in a tenth of the time that a loop takes."""
    return {*map(type, values)} == {TensorRef}


def is_optimizer(value: object) -> bool:
    """Return whether a value is an optimizer's state dict."""
    return isinstance(value, dict) and "param_groups" in value and "state" in value


def candidates(root: object) -> Iterator[Path]:
    """Dicts by text with a tensor directly inside, and models, down to three levels, outside optimizers.

    A file that is one empty dict is the state of a model without parameters.
    """
    seen: set[int] = set()
    inside = dict, Record  # not `dict | Record`, which would be made anew for every tensor
    level: list[tuple[Path, object]] = [((), root)]
    for _ in range(LEVELS):
        below: list[tuple[Path, object]] = []
        for path, value in level:
            if id(value) in seen or is_optimizer(value):
                continue
            seen.add(id(value))
            if is_module(value):
                yield path
            if isinstance(value, dict):
                if is_state(value) or (value is root and not value):
                    yield path
                if all_tensors(value.values()):
                    continue
                below.extend(
                    ((*path, key), item)
                    for key, item in value.items()
                    if isinstance(item, inside) and isinstance(key, str)
                )
        level = below


def likelihood(path: Path, container: Callable[[], Mapping[object, object]]) -> tuple[int, int, int]:
    """Return a sort key for a candidate, smaller is likelier.

    A known name comes first, then a file that is mostly tensors, then the most bytes.

    Args:
        path: the candidate's path.
        container: returns its dict; called only when the path does not decide.
    """
    ranks = [STATE_NAMES.index(name.lower()) for name in path if name.lower() in STATE_NAMES]
    if ranks:
        return 0, max(ranks), len(path)
    value = container()
    tensors = [tensor for tensor in map(tensor_of, value.values()) if tensor is not None]
    if not path and 2 * len(tensors) > len(value):
        return 1, 0, 0
    return 2, -sum(tensor.nbytes for tensor in tensors), len(path)


def is_offered(path: Path, value: object) -> bool:
    """Whether a candidate that was not taken is worth a mention.

    A pickled model is, a dict of a name that states have, and one with two tensors that may be weights, being
    neither scalars (a best score) nor bytes (the state of a generator).
    """
    if is_module(value) or (path and path[-1].lower() in STATE_NAMES):
        return True
    tensors = map(tensor_of, value.values()) if isinstance(value, dict) else ()
    weights = (each for each in tensors if each is not None and each.shape and each.dtype.name != "uint8")
    return len(list(islice(weights, 2))) == 2


def follow(root: object, path: Path) -> object:
    """Return the value at a path; None when there is none."""
    value = root
    for name in path:
        value = value[name] if isinstance(value, dict) else None
    return value


def path_of(root: object, where: str) -> Path | None:
    """Return the path behind a dotted name; None when there is none.

    Keys may contain dots, so every way to split the name is tried, each once.
    """
    tried: set[tuple[int, str]] = set()
    stack: list[tuple[Path, object, str]] = [((), root, where + "." if where else "")]
    while stack:
        path, value, rest = stack.pop()
        if not rest:
            return path
        if isinstance(value, dict) and (id(value), rest) not in tried:
            tried.add((id(value), rest))
            inside = [key for key in value if isinstance(key, str) and rest.startswith(key + ".")]
            stack.extend(((*path, key), value[key], rest[len(key) + 1 :]) for key in reversed(inside))
    return None
