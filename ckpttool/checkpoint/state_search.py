"""The search for a model's state in the tree of a file: the likeliest one, or one by its name."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

from ..errors import Damaged, NoState, Refused, Unsupported
from ..inert_pickle.values import OrderedDict_, Record, in_brief
from .dotted_names import Entry, Path, TooManyNames, contents, dotted, named_values
from .nested_states import TwiceNamed, flattened, is_tensor, values_at
from .pickled_modules import BadModules, is_module, named
from .special_tensors import placeholders
from .state import State, make_state, part
from .states import (
    Likelihood,
    candidates,
    equally_likely,
    follow,
    is_nested,
    is_state,
    likelihood,
    path_of,
)


@dataclass(frozen=True, slots=True)
class StateSearch:
    """Finds states in a tree of values, and names values.

    Attributes:
        path: the file, for messages.
        tree: its contents.
        most: the most characters that all dotted names together may have.
    """

    path: str
    tree: object
    most: int

    def named(self, inside: Callable[[object], Iterable[Entry] | None]) -> Iterator[tuple[Path, object]]:
        """Yield every value with its path, as `Checkpoint.named` does."""
        try:
            yield from named_values(self.tree, inside, self.most)
        except TooManyNames:
            raise Unsupported(self.path, "its dotted names need too much memory") from None

    def states(self) -> list[Path]:
        """Return the paths of everything that could be a model's state, the likeliest first."""
        return [path for _, path in self._ranked()]

    def only(self) -> State:
        """Return the one state that is likelier than all others.

        Raises:
            NoState: there is none, or several are equally likely.
            Damaged, Refused, Unsupported: as `Checkpoint.state`.
        """
        return self.at(self._only())

    def by_name(self, where: str) -> State:
        """Return the state behind a dotted name, or the part of one whose keys begin so.

        Raises:
            NoState: there is none.
            Damaged, Refused, Unsupported: as `Checkpoint.state`.
        """
        if (path := self._named(where)) is not None:
            return self.at(path)
        if (found := self._part(where)) is not None:
            return found
        raise NoState(self.path, f"holds no state named '{where[:80]}'", hint=self._where_to_look())

    def at(self, path: Path) -> State:
        """Return the state at a path.

        Raises:
            NoState: the path leads to no dict of tensors.
            Damaged, Refused, Unsupported: as `Checkpoint.state`.
        """
        value, elsewhere = follow(self.tree, path), placeholders(self.tree)
        if isinstance(value, Record) and is_module(value):
            return make_state(path, self._of_module(value), module=value, elsewhere=elsewhere)
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self._no_dict(path)
        if not is_nested(path, value) and (is_state(value) or not value):
            return make_state(path, value, elsewhere=elsewhere)
        places = self._places(value)
        entries = OrderedDict_(values_at(value, places))
        if not any(map(is_tensor, entries.values())):
            raise self._no_dict(path)
        return make_state(path, entries, nested=value, places=places, elsewhere=elsewhere)

    def _ranked(self) -> list[tuple[Likelihood, Path]]:
        """Return the paths of states with their likelihood, the likeliest first."""
        paths = candidates(self.tree)
        found = [(likelihood(path, partial(self._entries, path)), path) for path in paths]
        return sorted(found, key=lambda pair: pair[0])

    def _entries(self, path: Path) -> Mapping[object, object]:
        value = follow(self.tree, path)
        if isinstance(value, Record):
            return self._of_module(value)
        assert isinstance(value, dict)
        try:
            return dict(values_at(value, self._places(value))) if is_nested(path, value) else value
        except Refused:  # as soon as this state is taken; another one may be named
            return value

    def _only(self) -> Path:
        """Return the path of the one state that is likelier than all others."""
        ranked = self._ranked()
        if not ranked:
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
            shown = ", ".join(f"'{name[:80]}'" for name in names[:8])
            more = f" and {len(names) - 8} more" if names[8:] else ""
            raise NoState(
                self.path,
                f"holds {len(names)} states, and nothing says which is the model's: {shown}{more}",
                hint=f"name one: --state {shlex.quote(names[0])}; or take all of them as one: --state ''",
            )
        return first

    def _named(self, where: str) -> Path | None:
        """Return the path behind a dotted name; of several that fit it, the likeliest state's."""
        # Keys may contain dots, so one dotted name may fit several paths.
        fitting = (path for path in self.states() if where == dotted(path))
        return next(fitting, None) or path_of(self.tree, where)

    def _part(self, where: str) -> State | None:
        """Return the part of a state whose keys a dotted name is a prefix of: `state_dict.ema_model`."""
        for path in self.states():
            inner = f"{dotted(path)}." if path else ""
            try:
                whole = self.at(path)
            except (NoState, Refused):  # whose names are ambiguous; another state may have the keys
                continue
            for name in dict.fromkeys((where.removeprefix(inner), where)):
                found = part(whole, f"{name}.") if name.strip("!") else None
                if found is not None:
                    return found
        return None

    def _places(self, value: dict[object, object]) -> dict[str, Path]:
        try:
            return flattened(value, self.most)
        except TooManyNames:
            raise Unsupported(self.path, "its dotted names need too much memory") from None
        except TwiceNamed as fault:
            reason = f"two entries of its nested dicts are named '{str(fault)[:80]}'"
            named = self.named(contents)
            dicts = (path for path, each in named if path and isinstance(each, dict) and is_state(each))
            choices = " or ".join(f"--state {shlex.quote(dotted(path))}" for path in islice(dicts, 4))
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
        return f"there are: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if names[8:] else "")


def _key_that_is_no_name(value: object) -> str | None:
    """Return a key of a dict of tensors that is no text, as a number; None if all keys are text."""
    if not isinstance(value, dict) or not any(map(is_tensor, value.values())):
        return None
    return next((in_brief(key) for key in value if not isinstance(key, str)), None)
