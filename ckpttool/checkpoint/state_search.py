"""The search for a model's state in a tree of values: by its name, its path, or as the likeliest."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

from ..errors import Damaged, NoState, Refused, Unsupported
from ..inert_pickle.values import OrderedDict_, Record, has_text_keys, in_brief
from ..words import first_few
from . import dotted_names, states
from .dotted_names import Entry, Path, contents, dotted, follow, is_tensor
from .pickled_modules import BadModules, is_module, named
from .special_tensors import placeholders
from .state import State, elsewhere, make_state, part
from .states import Likelihood


@dataclass(frozen=True, slots=True)
class StateSearch:
    """Finds states in a tree of values, and names values."""

    path: str  # the file, for messages
    tree: object
    most: int  # characters that all dotted names together may have

    def named(
        self, inside: Callable[[object], Iterable[Entry] | None], *, again: bool = False
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
        path = next(fitting, None) or states.path_of(self.tree, where)
        if path is not None:
            return self.at(path)
        for state in self._parts(where):
            return state
        raise NoState(self.path, f"holds no state named '{where[:80]}'", hint=self._where_to_look())

    def at(self, path: Path) -> State:
        """Return the state at a path."""
        value, elsewhere = follow(self.tree, path), placeholders(self.tree)
        if isinstance(value, Record) and is_module(value):
            return make_state(path, self._of_module(value), module=value, elsewhere=elsewhere)
        if not has_text_keys(value):
            raise self._no_dict(path)
        if not states.is_nested(path, value) and (states.is_state(value) or not value):
            return make_state(path, value, elsewhere=elsewhere)
        places = self._places(value)
        entries = OrderedDict_((name, follow(value, place)) for name, place in places.items())
        if not any(map(is_tensor, entries.values())):
            raise self._no_dict(path)
        return make_state(path, entries, nested=value, places=places, elsewhere=elsewhere)

    def _ranked(self) -> list[tuple[Likelihood, Path]]:
        """Return the paths of states with their likelihood, the likeliest first; of one, its likeliest."""
        paths = states.candidates(self.tree)
        rated = [(states.likelihood(path, partial(self._entries, path)), path) for path in paths]
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
            places = self._places(value) if states.is_nested(path, value) else {}
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
        first, *rivals = states.equally_likely(self.tree, ranked)
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
            yield from filter(None, (part(state, f"{name}.") for name in names if name.strip("!")))

    def _places(self, value: dict[object, object]) -> dict[str, Path]:
        try:
            return dotted_names.flattened(value, self.most)
        except dotted_names.TooManyNames:
            raise Unsupported(self.path, "its dotted names need too much memory") from None
        except dotted_names.TwiceNamed as fault:
            reason = f"two entries of its nested dicts are named '{str(fault)[:80]}'"
            dicts = (
                (path, value) for path, value in self.named(contents) if path and isinstance(value, dict)
            )
            paths = (path for path, value in dicts if states.is_state(value))
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
