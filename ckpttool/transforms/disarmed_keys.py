"""Keys of dicts and items of sets in the plain forms that `disarm` gives them: they need a hash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..checkpoint.dotted_names import Path
from ..errors import Refused
from ..inert_pickle.numpy_values import scalar_of
from ..inert_pickle.plain_objects import NoText, described, text_of
from ..inert_pickle.values import FrozenSet_, Record, in_brief, tensor_of
from ..inert_pickle.weights_only import is_value


class Keys:
    """Makes the keys of one checkpoint.

    Args:
        value: returns the plain form of a value at a path.
        note: is told the path of a key that changed, its type, and what it became.
        refusal: returns the error for a key at a path that has no plain form.
    """

    def __init__(
        self,
        value: Callable[[object, Path], object],
        note: Callable[[Path, str, str], None],
        refusal: Callable[[Path, str], Refused],
    ) -> None:
        self.value, self.note, self.refusal = value, note, refusal

    def apart(self, old: list[Any], places: list[Path]) -> list[Any]:
        """Return the keys of a dict or the items of a set in their plain forms, no two of them equal.

        Those that change give way: they get a number behind.
        """
        new = [key if type(key) is str else self._key(key, at) for key, at in zip(old, places, strict=True)]
        changes = [b is not a and (type(b) is not type(a) or b != a) for a, b in zip(old, new, strict=True)]
        taken = {key for key, is_changed in zip(new, changes, strict=True) if not is_changed}
        for number, is_changed in enumerate(changes):
            if is_changed:
                new[number] = _apart(new[number], taken)
                taken.add(new[number])
        return new

    def _key(self, key: object, path: Path) -> object:
        """Return a key or an item of a set as something that has a hash."""
        if isinstance(key, tuple):
            return tuple(self._key(item, path) for item in key)
        if isinstance(key, FrozenSet_):
            self.note(path, "frozenset", "tuple")
            return tuple(self._key(item, path) for item in key)
        if not isinstance(key, Record):
            return self.value(key, path)
        if tensor_of(key) is not None or is_value(key):
            return self.value(key, path)
        number = scalar_of(key)
        plain = number if isinstance(number, int | float | str | bytes) else text_of(key)
        if plain is None:
            plain = self._described(key, path)
        self.note(path, key.type_name, type(plain).__name__)
        return plain

    def _described(self, key: Record, path: Path) -> str:
        try:
            return described(key)
        except NoText as why:
            what = f"is a key or an item of a set that can't become text: it holds {why}"
            raise self.refusal(path, what) from None


def _apart(key: object, taken: set[Any]) -> object:
    """Return a key, with a number behind it if it is among those taken."""
    found, count = key, 1
    text = str(key) if isinstance(key, str | int | float | bytes) else in_brief(key)
    while found in taken:
        count += 1
        found = f"{text}~{count}"
    return found
