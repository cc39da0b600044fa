"""The entries of two containers by name, side by side."""

from __future__ import annotations

from collections import Counter
from itertools import chain, count

from ..checkpoint.dotted_names import contents
from ..inert_pickle.values import Record
from .equality import Bare


def both_by_name(
    x: object, y: object, bare: tuple[Bare, Bare]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the entries of two containers by name.

    Equal elements of two sets have one name; the other elements go by order.

    Args:
        x, y: containers that `contents` opens.
        bare: for each a rule that takes prefixes off its names.
    """
    if not (isinstance(x, set | frozenset) and isinstance(y, set | frozenset)):
        return _by_name(x, bare[0]), _by_name(y, bare[1])
    names = {element: str(index) for index, element in enumerate(x)}
    spare = chain((name for element, name in names.items() if element not in y), map(str, count(len(x))))
    theirs = {names[element] if element in names else next(spare): element for element in y}
    return {name: element for element, name in names.items()}, theirs


def _by_name(container: object, bare: Bare) -> dict[str, object]:
    """Return a container's entries by name; of two names that are alike (0 and '0'), the later is marked."""
    found: dict[str, object] = {}
    repeats: Counter[str] = Counter()  # of names that are taken, so that many alike take no longer
    for name, value in contents(container) or ():
        if name is None:
            if isinstance(container, Record):  # an object's attributes
                found.update(_by_name(value, bare) if isinstance(value, dict) else {"": value})
            continue
        name = wanted = bare(name)
        while name in found:
            repeats[wanted] += 1
            name = f"{wanted}'{repeats[wanted]}"
        found[name] = value
    return found
