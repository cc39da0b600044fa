"""Places of a model's state in a tree: dicts of tensors by name, nested or not, and pickled models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import islice

from ..inert_pickle.values import Record
from ..tensors.ref import TensorRef
from .dotted_names import EXTRA_STATE, Container, Path, follow, holds_only_tensors, is_tensor
from .optimizer_view import is_optimizer
from .pickled_modules import is_module
from .rebuilt_tensors import plain_tensor, special_tensor
from .special_tensors import Shape, SpecialTensor, placeholder

# Keys under which checkpoints keep the model's state, the likelier first.
_MODEL = "state_dict model_state_dict model_state model net_state_dict net network module weights params"
MODEL_NAMES = tuple(_MODEL.split())

# Keys under which they keep an average of it, which is taken only when there is nothing else.
AVERAGE_NAMES = ("state_dict_ema", "ema_state_dict", "model_ema", "ema_model", "ema")

# Words in other keys of averages.
AVERAGES = {"ema", "swa", "avg", "average", "averaged", "shadow"}

# Words in the keys of dicts that may hold tensors by name and are no model's state.
OF_TRAINING = {"optimizer", "optimizers", "optim", "opt", "scheduler", "schedulers", "scaler", "rng", "grads"}

# The buffers of BatchNorm: part of a model's state, but not parameters.
BUFFERS = MEAN, VARIANCE, COUNTER = "running_mean", "running_var", "num_batches_tracked"

# Levels that are searched for states: the file itself and three below it.
LEVELS = 4


def is_state(value: Container) -> bool:
    """Return whether a dict has a tensor directly inside and only text for keys."""
    return {*map(type, value)} == {str} and any(map(is_tensor, value.values()))


def is_nested(path: Path, value: Container) -> bool:
    """Return whether a dict and the dicts in it are one state: two entries or more, nothing but tensors."""
    # With a key that states have (`model`) or training has (`optimizer`) it holds several things, unless its
    # own path has a known name: a model may have a part called `net`.
    if len(value) < 2 or all_tensors(value.values()):
        return False
    names = [str(key) for key, item in value.items() if isinstance(item, dict)]
    if not names:
        return False
    known = any(_rank(name) is not None for name in path)
    apart = AVERAGES | OF_TRAINING | {"state"}
    if any(_words(name) & apart or (_rank(name) is not None and not known) for name in names):
        return False
    return holds_only_tensors(value)


def all_tensors(values: Iterable[object]) -> bool:
    """Return whether all values are tensors, in a tenth of the time that a loop takes."""
    return {*map(type, values)} == {TensorRef}


def candidates(root: object) -> Iterator[Path]:
    """Yield the paths of states: dicts by text with a tensor inside, nested dicts, and models.

    One that is in several places is yielded for the first, and for those whose names states have.
    """
    # A file that is one empty dict is the state of a model without parameters.
    found: dict[int, bool] = {}  # whether it is one, by what has been looked at
    inside = dict, Record  # not `dict | Record`, which would be made again for every tensor
    level: list[tuple[Path, object]] = [((), root)]
    for _ in range(LEVELS):
        below: list[tuple[Path, object]] = []
        for path, value in level:
            if id(value) in found:
                if found[id(value)] and _has_a_models_name(path):
                    yield path
                continue
            if is_optimizer(value):
                continue
            nested = isinstance(value, dict) and is_nested(path, value)
            is_one = nested or is_module(value)
            if isinstance(value, dict) and not is_one:
                is_one = is_state(value) or (value is root and not value)
            found[id(value)] = is_one
            if is_one:
                yield path
            if isinstance(value, dict):
                if nested or all_tensors(value.values()):
                    continue
                items = ((key, item) for key, item in value.items() if isinstance(item, inside))
                named = ((key, item) for key, item in items if isinstance(key, str))
                below.extend(((*path, key), item) for key, item in named if not key.endswith(EXTRA_STATE))
        level = below


def _has_a_models_name(path: Path) -> bool:
    return not is_average(path) and any(_rank(name) is not None for name in path)


class Kind(IntEnum):
    """What a candidate is by its name and place, the likeliest first."""

    NAMED = 0  # it has a name under which checkpoints keep the model's state
    FILE = 1  # it is a file that is mostly tensors
    UNKNOWN = 2
    AVERAGE = 3
    OF_TRAINING = 4


Likelihood = tuple[Kind, int, int]


def likelihood(path: Path, container: Callable[[], Mapping[object, object]]) -> Likelihood:
    """Return a sort key for a candidate, smaller is likelier."""
    # A known name comes first, then a file that is mostly tensors, then the most bytes; after these averages
    # of a model, and last what has a name of training's state.
    words = {word for name in path for word in _words(name)}
    ranks = [rank for name in path if (rank := _rank(name)) is not None]
    if is_average(path):
        averages = [AVERAGE_NAMES.index(n.lower()) for n in path if n.lower() in AVERAGE_NAMES]
        return Kind.AVERAGE, max(averages, default=len(AVERAGE_NAMES)), len(path)
    if ranks:
        return Kind.NAMED, max(ranks), len(path)
    if words & OF_TRAINING:
        return Kind.OF_TRAINING, 0, len(path)
    value = container()
    if not path and all_tensors(value.values()):
        return Kind.FILE, 0, 0
    tensors = (plain_tensor(item) or special_tensor(item) for item in value.values())
    sizes = [tensor.nbytes for tensor in tensors if tensor]
    if not path and 2 * len(sizes) > len(value):
        return Kind.FILE, 0, 0
    return Kind.UNKNOWN, -sum(sizes), len(path)


def is_average(path: Path) -> bool:
    """Return whether a name in a path is that of an average; `!ema` is all but that."""
    return any(_words(name) & AVERAGES for name in path if not name.startswith("!"))


def equally_likely(root: object, ranked: list[tuple[Likelihood, Path]]) -> list[Path]:
    """Return the likeliest candidate, and those that are no less likely to be the model's state."""
    # These have the same known name at the same depth, or all unknown names and a tensor that may be a
    # weight.
    (first, path), *rest = ranked
    if first[0] is Kind.UNKNOWN:
        rivals = [at for likely, at in rest if likely[0] is Kind.UNKNOWN and _is_rival(at, follow(root, at))]
    else:
        rivals = [at for likely, at in rest if likely == first]
    return [path, *rivals]


def is_offered(path: Path, value: object) -> bool:
    """Return whether a candidate that was not taken is worth a mention."""
    # Two tensors that may be weights are: neither scalars (a best score) nor bytes (a random generator's
    # state).
    if is_module(value) or (path and (_rank(path[-1]) is not None or path[-1].lower() in AVERAGE_NAMES)):
        return True
    return isinstance(value, dict) and len(list(islice(_weights(value), 2))) == 2


def _is_rival(path: Path, value: object) -> bool:
    """Return whether a candidate may be the state as well: one weight of more than one element is enough."""
    if is_offered(path, value) or not isinstance(value, dict):
        return True
    return any(getattr(weight, "numel", 2) > 1 for weight in _weights(value))


def _weights(value: Container) -> Iterator[object]:
    """Yield the tensors of a dict, and of dicts directly in it, that may be weights."""
    inner = [item.values() for item in value.values() if isinstance(item, dict)]
    for item in (*value.values(), *(item for items in inner for item in items)):
        tensor = plain_tensor(item)
        if tensor is not None and tensor.shape and tensor.dtype.name != "uint8":
            yield tensor
        elif special_tensor(item) is not None:
            yield item


def _rank(name: str) -> int | None:
    """Return the place of a name among those of states, the likelier first; None for any other name."""
    return MODEL_NAMES.index(name.lower()) if name.lower() in MODEL_NAMES else None


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()[:200]))


def path_of(root: object, where: str) -> Path | None:
    """Return the path behind a dotted name; None when there is none."""
    # Keys may contain dots, so every way to split the name is tried, each once.
    tried: set[tuple[int, int]] = set()
    dotted = where + "." if where else ""
    stack: list[tuple[Path, object, int]] = [((), root, 0)]
    while stack:
        path, value, at = stack.pop()
        if at == len(dotted):
            return path
        if isinstance(value, dict) and (id(value), at) not in tried:
            tried.add((id(value), at))
            inside = [key for key in value if isinstance(key, str) and dotted.startswith(key + ".", at)]
            stack.extend(((*path, key), value[key], at + len(key) + 1) for key in reversed(inside))
    return None


def places_of(root: object, value: object) -> list[Path]:
    """Return the paths of dicts, as deep as states are searched for, at which a tree has one value."""
    found: list[Path] = []
    seen: set[int] = set()
    level: list[tuple[Path, object]] = [((), root)]
    for _ in range(LEVELS - 1):
        below: list[tuple[Path, object]] = []
        for path, outer in level:
            if isinstance(outer, dict) and id(outer) not in seen and outer is not value:
                seen.add(id(outer))
                below += [((*path, key), item) for key, item in outer.items() if isinstance(key, str)]
        found += [path for path, item in below if item is value]
        level = below
    return found


def stand_ins(container: Container, elsewhere: Mapping[str, Shape]) -> dict[str, SpecialTensor]:
    """Return the empty tensors of a state that stand for parameters in other files."""
    # Names that are not listed were renamed since: when none is listed, every empty float tensor counts.
    tensors = {str(key): plain_tensor(value) for key, value in container.items()} if elsewhere else {}
    empty = {name: t for name, t in tensors.items() if t is not None and t.shape == (0,)}
    listed = [name for name in tensors if name in elsewhere]
    return {
        name: placeholder(tensor, elsewhere.get(name))
        for name, tensor in empty.items()
        if name in elsewhere or (not listed and "float" in tensor.dtype.name)
    }
