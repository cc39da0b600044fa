"""A model's state, and the search for it in a tree: dicts of tensors, nested or not, and pickled models."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ...errors import Collision, Damaged, NoState, NoTensor, Refused, Unsupported
from ...rooms import need
from ..inert_pickle.values import OrderedDict_, Record, has_text_keys, in_brief, remade
from ..lazy import needing_torch, shown_by
from ..remote import urls
from ..tensors.ref import TensorRef
from ..words import first_few, first_key
from . import dotted_names, special_tensors
from .dotted_names import Container, Path, contents, dotted, follow, is_tensor
from .optimizer_view import is_optimizer
from .pickled_modules import BadModules, is_module, named
from .special_tensors import Shape, SpecialTensor, plain_tensor, special_tensor

if TYPE_CHECKING:
    import torch

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

MOST_ALIKE = 2000  # names that one which is not there is compared with

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
    return dotted_names.holds_only_tensors(value)


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
                below.extend(
                    ((*path, key), item) for key, item in named if not key.endswith(dotted_names.EXTRA_STATE)
                )
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


def likelihood_of(path: Path, container: Callable[[], Mapping[object, object]]) -> Likelihood:
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
    # Without a list, as in a `state_dict()` that was not gathered, weights do, if they are half of all.
    tensors = {str(key): plain_tensor(value) for key, value in container.items()}
    empty = {name: t for name, t in tensors.items() if t is not None and t.shape == (0,)}
    listed = [name for name in tensors if name in elsewhere]
    floats = {name for name, tensor in empty.items() if "float" in tensor.dtype.name}
    if not elsewhere:
        floats = {name for name in floats if name.endswith("weight")}
        weights = sum(name.endswith("weight") for name in tensors)
        floats = floats if 2 * len(floats) >= weights else set()
    missing = [name for name in empty if name in elsewhere or (not listed and name in floats)]
    return {name: special_tensors.placeholder(empty[name], elsewhere.get(name)) for name in missing}


# ---- The state.


@dataclass(frozen=True, slots=True)
class State:
    """A model's state as a file holds it.

    Attributes:
        path: the keys that lead from the top of the file to the state; empty when the file itself is the
            state.
        container: the dict in the checkpoint's tree; for a pickled model the dict made from its modules, for
            nested dicts their entries by dotted names.
        tensors: name -> tensor, in the file's order and under the file's names.
        others: the entries that are not plain tensors (`_extra_state`, counters kept as plain numbers, and
            those of `likes`).
        versions: torch's `_metadata`, module path -> {'version': …}; None when the file has none.
        likes: the tensors that are not plain ones (sharded, sparse, quantised, …), by name.
        module: the pickled model that holds the state; None when the state is a dict.
        nested: the outermost of the nested dicts that `container` lists; None when it is one dict.
        places: the path of each entry in `nested`, by its dotted name.
        part_of: the state whose keys these are a part of; None for a whole dict.
        prefix: the keys of that part: `ema.` for those that begin with it, here without it, and `!ema.` for
            those that do not.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     state = checkpoint.state()
        ...     len(state), state["0.weight"].shape, state["0.bias"].numpy().dtype.name
        (7, (8, 4), 'float32')
    """

    path: Path
    container: Container
    tensors: dict[str, TensorRef]
    others: dict[str, object]
    versions: dict[object, object] | None
    likes: Mapping[str, SpecialTensor] = field(default_factory=dict)
    module: Record | None = None
    nested: Container | None = None
    places: Mapping[str, Path] = field(default_factory=dict)
    part_of: State | None = None
    prefix: str = ""

    def __repr__(self) -> str:
        return f"<State '{self.where}': {len(self.tensors)} tensors>"

    _repr_html_ = shown_by("state_html")

    def __getitem__(self, name: str) -> TensorRef:
        """Return a tensor by its name; `.numpy()` has its values, without torch.

        Raises NoTensor, a KeyError, that names those like it.
        """
        try:
            return self.tensors[name]
        except KeyError:
            raise self._no_tensor(name) from None

    def _no_tensor(self, name: object) -> NoTensor:
        from difflib import get_close_matches

        text = str(name)[:200]
        same = [known for known in self.tensors if known.endswith(f".{text}") or text.endswith(f".{known}")]
        alike = same or get_close_matches(text, list(self.tensors)[:MOST_ALIKE])
        hint = f"did you mean {first_few([f'{known[:80]!r}' for known in alike], 3)}?" if alike else None
        if name in self.others:
            hint = "it is no plain tensor: state.others has it"
        return NoTensor(f"'{text}' is no tensor of the state", hint=hint or first_key(self.tensors))

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.tensors)

    def __bool__(self) -> bool:
        return True  # an empty state is one, too

    def keys(self) -> KeysView[str]:
        """Return the names of the tensors."""
        return self.tensors.keys()

    def items(self) -> ItemsView[str, TensorRef]:
        """Return names and tensors."""
        return self.tensors.items()

    @property
    def where(self) -> str:
        """The dotted path, with the prefix of a part; `""` when the file itself is the state."""
        return dotted((*self.path, self.prefix.removesuffix(".")) if self.prefix else self.path)

    @needing_torch("State.load")
    def load(self, *, verify: bool = True) -> dict[str, torch.Tensor]:
        """Return the tensors as torch tensors on the CPU, mapped from the file. Imports torch.

        Writing to a tensor changes memory, never the file. Names that share memory in the file share it here.

        Args:
            verify: read all bytes and compare them with the checksums that the file states, if it does. If
                not, values are read when they are first used.

        Raises:
            Refused: a tensor is not a plain one, but sharded, sparse, quantised or the like.
            Unsupported: the installed torch lacks the element type of a tensor.
            Damaged: a checksum is wrong, or the file ends early.
            Unreadable: the checkpoint was closed.
            NeedsTorch: torch is not installed.
        """
        from ..tensors.values import live_tensors

        parts = (part for like in self.likes.values() for part in like.parts.values())
        paths = (tensor.storage.data.path for tensor in chain(self.tensors.values(), parts))
        special_tensors.require_plain(next(paths, self.where), self.likes, "can't be loaded as plain tensors")
        urls.expect(tensor.storage for tensor in self.tensors.values())
        storages = [(name, tensor.storage) for name, tensor in self.tensors.items()]
        # What knows of checksums stands on this module.
        with need("core.checkpoint.checksums").compared(storages if verify else ()):
            return live_tensors(self.tensors)

    @property
    def anchor(self) -> object:
        """The object in the checkpoint's tree that holds the state: a dict, or the pickled model."""
        if self.part_of is not None:
            return self.part_of.anchor
        if self.module is not None:
            return self.module
        return self.container if self.nested is None else self.nested

    def restored(self, container: Container) -> Container:
        """Return a changed `container` in the form that the tree has: nested dicts when names stayed."""
        if self.part_of is not None:
            outer = self.part_of
            begin = "" if self.prefix.startswith("!") else self.prefix
            changed = {f"{begin}{key}": value for key, value in container.items()}
            is_own = {key: in_part(key, self.prefix) for key in outer.container}
            first = [*is_own.values()].index(True)  # where the whole part stands, before what follows it
            rest = [(key, value) for key, value in outer.container.items() if not is_own[key]]
            if both := [key for key, _ in rest if key in changed]:
                what = f"two keys would be named '{both[0]}'"
                raise Collision(what, hint=f"'{both[0]}' is there already, outside '{self.where}'")
            return outer.restored(remade(outer.container, [*rest[:first], *changed.items(), *rest[first:]]))
        return (
            container if self.nested is None else dotted_names.regrouped(self.nested, self.places, container)
        )


def in_part(key: object, prefix: str) -> bool:
    """Return whether a key belongs to a part: `ema.` has the keys that begin with it, `!ema.` all others."""
    return (isinstance(key, str) and key.startswith(prefix.removeprefix("!"))) != prefix.startswith("!")


def part(state: State, prefix: str) -> State | None:
    """Return the part of a state whose keys begin with a prefix, without it; or all others, for `!prefix`."""
    cut = 0 if prefix.startswith("!") else len(prefix)
    entries = {key: value for key, value in state.container.items() if in_part(key, prefix)}
    if not cut and len(entries) == len(state.container):
        return None
    inner = make_state(state.path, OrderedDict_((str(key)[cut:], value) for key, value in entries.items()))
    return replace(inner, part_of=state, prefix=prefix) if inner.tensors or inner.likes else None


def make_state(
    path: Path,
    container: Container,
    *,
    module: Record | None = None,
    nested: Container | None = None,
    places: Mapping[str, Path] | None = None,
    elsewhere: Mapping[str, Shape] | None = None,
) -> State:
    """Return a dict as a state, its tensors apart from its other entries."""
    # `elsewhere` has the shapes of parameters whose values may be in other files (`placeholders`).
    tensors: dict[str, TensorRef] = {}
    others: dict[str, object] = {}
    likes: dict[str, SpecialTensor] = {}
    are_plain = {*map(type, container)} <= {str} and {*map(type, container.values())} == {TensorRef}
    if are_plain and not elsewhere and (0,) not in map(attrgetter("shape"), container.values()):
        tensors.update(container)  # type: ignore[arg-type]
    else:
        empty = stand_ins(container, elsewhere or {})
        for key, value in container.items():
            name = str(key)
            tensor = plain_tensor(value)
            if tensor is not None and name not in empty:
                tensors[name] = tensor
                continue
            others[name] = value
            if like := empty.get(name) or special_tensor(value):
                likes[name] = like
    attributes = container.attributes if isinstance(container, OrderedDict_) else None
    metadata = attributes.get("_metadata") if isinstance(attributes, dict) else None
    versions = metadata if isinstance(metadata, dict) else None
    return State(path, container, tensors, others, versions, likes, module, nested, places or {})


def parts_beside(tree: object) -> Mapping[str, Any] | None:
    """Return what the trainer's `--shard parts` says of the folder that holds its tensors, or None.

    Its `folder` is a name, and its `files` are names there and the SHA-256 of each.
    """
    parts = tree.get("parts") if isinstance(tree, dict) else None
    if not isinstance(parts, dict) or not isinstance(folder := parts.get("folder"), str):
        return None
    is_name = folder == os.path.basename(folder) and folder not in ("", ".", "..")
    return parts if is_name and isinstance(parts.get("files"), dict) else None


SCORED = "by which its run was scored"


def scored_average(tree: object) -> str | None:
    """Return the place of the average by which a run of the trainer with `--ema` was scored, if any."""
    ema = tree.get("ema") if isinstance(tree, dict) and "model" in tree else None
    return "ema.averages" if isinstance(ema, dict) and ema.get("averages") else None


def elsewhere(path: str, tree: object) -> NoState | None:
    """Return the error for a file whose tensors `--shard parts` wrote beside it; None for any other."""
    if (parts := parts_beside(tree)) is None:
        return None
    there = os.path.join(os.path.dirname(path), parts["folder"])
    reason = f"holds no tensors: they are in {parts['folder']}, beside it"
    return NoState(path, reason, hint=f"name that: {shlex.quote(there)}")


# ---- The search: by name, by path, or for the likeliest state.


@dataclass(frozen=True, slots=True)
class StateSearch:
    """Finds states in a tree of values, and names values."""

    path: str  # the file, for messages
    tree: object
    most: int  # characters that all dotted names together may have

    def named(
        self, inside: Callable[[object], Iterable[dotted_names.Entry] | None], *, again: bool = False
    ) -> Iterator[tuple[Path, object]]:
        """Yield every value with its path, as `Checkpoint.named` does."""
        try:
            yield from dotted_names.named_values(self.tree, inside, self.most, again=again)
        except dotted_names.TooManyNames:
            raise Unsupported(self.path, "its dotted names need too much memory") from None

    def states(self) -> list[Path]:
        """Return the paths of everything that could be a model's state, the likeliest first."""
        return [path for _, path in self._ranked()]

    def by_name(self, where: str) -> State:
        """Return the state behind a dotted name, or the part of one whose keys begin so."""
        # Keys may contain dots, so one dotted name may fit several paths.
        fitting = (path for path in self.states() if where == dotted(path))
        path = next(fitting, None) or path_of(self.tree, where)
        if path is not None:
            return self.at(path)
        for state in self._parts(where):
            return state
        raise NoState(self.path, f"holds no state named '{where[:80]}'", hint=self._where_to_look())

    def at(self, path: Path) -> State:
        """Return the state at a path."""
        value, elsewhere = follow(self.tree, path), special_tensors.placeholders(self.tree)
        if isinstance(value, Record) and is_module(value):
            return make_state(path, self._of_module(value), module=value, elsewhere=elsewhere)
        if not has_text_keys(value):
            raise self._no_dict(path)
        if not is_nested(path, value) and (is_state(value) or not value):
            return make_state(path, value, elsewhere=elsewhere)
        places = self._places(value)
        entries = OrderedDict_((name, follow(value, place)) for name, place in places.items())
        if not any(map(is_tensor, entries.values())):
            raise self._no_dict(path)
        return make_state(path, entries, nested=value, places=places, elsewhere=elsewhere)

    def _ranked(self) -> list[tuple[Likelihood, Path]]:
        """Return the paths of states with their likelihood, the likeliest first; of one, its likeliest."""
        paths = candidates(self.tree)
        rated = [(likelihood_of(path, partial(self._entries, path)), path) for path in paths]
        best: dict[int, tuple[Likelihood, Path]] = {}
        for likelihood, path in sorted(rated, key=lambda pair: pair[0]):
            best.setdefault(id(follow(self.tree, path)), (likelihood, path))
        return [*best.values()]

    def _entries(self, path: Path) -> Mapping[object, object]:
        value = follow(self.tree, path)
        if isinstance(value, Record):
            return self._of_module(value)
        assert isinstance(value, dict)
        try:
            places = self._places(value) if is_nested(path, value) else {}
            return {name: follow(value, place) for name, place in places.items()} or value
        except Refused:  # as soon as this state is taken; another one may be named
            return value

    def only(self) -> State:
        """Return the one state that is likelier than all others."""
        ranked = self._ranked()
        if not ranked:
            if error := elsewhere(self.path, self.tree):
                raise error
            reason = "holds no dict of tensors by name, so no model's state"
            for path, value in self.named(contents):
                if (key := _key_that_is_no_name(value)) is not None:
                    where = f"'{dotted(path)[:80]}'" if path else "the dict at the top"
                    reason += f": {where} has tensors, but its key {key} is no text"
                    break
            raise NoState(self.path, reason, hint=self._where_to_look())
        first, *rivals = equally_likely(self.tree, ranked)
        if rivals:
            names = [dotted(path) for path in (first, *rivals)]
            listed = first_few([f"'{name[:80]}'" for name in names], 8)
            reason = f"holds {len(names)} states, and nothing says which is the model's: {listed}"
            hint = f"name one: --state {shlex.quote(names[0])}; or take all of them as one: --state ''"
            raise NoState(self.path, reason, hint=hint)
        return self.at(first)

    def _parts(self, where: str) -> Iterator[State]:
        """Yield the parts of states whose keys a dotted name is a prefix of: `state_dict.ema_model`."""
        for path in self.states():
            inner = f"{dotted(path)}." if path else ""
            try:
                state = self.at(path)
            except (NoState, Refused):  # whose names are ambiguous; another state may have the keys
                continue
            names = dict.fromkeys((where.removeprefix(inner), where))
            # mmcv's averages are named without dots: `ema_` is a prefix as it stands.
            begins = (name if name.endswith("_") else f"{name}." for name in names if name.strip("!"))
            yield from filter(None, (part(state, begin) for begin in begins))

    def _places(self, value: dict[object, object]) -> dict[str, Path]:
        try:
            return dotted_names.flattened(value, self.most)
        except dotted_names.TooManyNames:
            raise Unsupported(self.path, "its dotted names need too much memory") from None
        except dotted_names.TwiceNamed as fault:
            reason = f"two entries of its nested dicts are named '{str(fault)[:80]}'"
            below = ((path, value) for path, value in self.named(contents) if path)
            paths = (path for path, value in below if isinstance(value, dict) and is_state(value))
            choices = " or ".join(f"--state {shlex.quote(dotted(path))}" for path in islice(paths, 4))
            hint = f"take one of the dicts: {choices}" if choices else None
            raise Refused(self.path, reason, hint=hint) from None

    def _of_module(self, value: Record) -> dict[object, object]:
        try:
            return OrderedDict_(named(value))
        except BadModules as fault:
            raise Damaged(self.path, str(fault)) from None

    def _no_dict(self, path: Path) -> NoState:
        reason = f"'{dotted(path)[:80]}' is not a dict of tensors by name"
        if (key := _key_that_is_no_name(follow(self.tree, path))) is not None:
            reason += f": it has the key {key}, which is no text"
        return NoState(self.path, reason, hint=self._where_to_look())

    def _where_to_look(self) -> str:
        names = [shlex.quote(dotted(path)) for path in self.states()]
        if not names:
            return f"see what is in it: ckpttool inspect {shlex.quote(self.path)}"
        if names == ["''"]:
            return "the file itself is the state: leave out --state"
        return f"there are: {first_few(names, 8)}"


def _key_that_is_no_name(value: object) -> str | None:
    """Return a key of a dict of tensors that is no text, as a number; None if all keys are text."""
    if not isinstance(value, dict) or not any(map(is_tensor, value.values())):
        return None
    return next((in_brief(key) for key in value if not isinstance(key, str)), None)
