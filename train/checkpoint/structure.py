"""The structure of a run's checkpoint: which entries it has, and of which types. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ckpttool.errors import Damaged


class Each(NamedTuple):
    """A list whose items have one structure."""

    item: Any


class Named(NamedTuple):
    """A dict whose keys have one type, and whose values have one structure."""

    key: type
    value: Any


# What a checkpoint holds: types, `Each` and `Named`, and dicts with keys, optional ones marked by `?`.
NUMBER = (int, float)
SETTING = (str, int, float, bool, type(None), list, tuple)
STRUCTURE: dict[str, Any] = {
    "model": Named(str, object),  # a tensor, or a module's extra state
    "optimizer": {
        "state": Named(int, Named(str, object)),
        "param_groups": Each({"params": Each(int), "param_names": Each(str)}),
    },
    "scheduler": {"base_lrs": Each(NUMBER), "last_epoch": int},
    "scaler": Named(str, NUMBER),
    "ema?": {"updates": int, "averages": Named(str, torch.Tensor)},
    "log": Each(Each(NUMBER)),
    "progress": {
        **dict.fromkeys(("epoch", "step", "global_step", "samples", "uncounted"), int),
        **dict.fromkeys(("best", "lr"), NUMBER),
        "sums": Each(Each(NUMBER)),
        "unscored": bool,
        "since_best?": int,
        "top?": Each(Each(NUMBER)),
    },
    "plan": {
        **dict.fromkeys(("samples", "batch_size", "world_size"), int),
        "data": str,
        "contents": Named(str, Named(str, str)),
        "init": (str, type(None)),
    },
    "stream?": {
        "steps": (int, type(None)),
        "lanes": Named(str, {"depth": int, "state": object, "digest": (str, type(None))}),
    },
    "rng": Each({"python": list, "torch": torch.Tensor}),
    "config": Named(str, SETTING),
    "digests": {"model": str, "optimizer": str, "run": str},
    "versions": Named(str, (str, int)),
    "training": str,
    "chain?": str,
    "parts?": {"folder": str, "files": Named(str, str)},
}


def check(path: str, state: Mapping[str, Any]) -> None:
    """Raise Damaged, naming the place, if a checkpoint does not have this structure."""
    _require(path, "", state, STRUCTURE)


def _require(path: str, where: str, value: Any, wanted: Any) -> None:
    """Raise Damaged, naming the place, if the value does not have the wanted structure."""
    if isinstance(wanted, Each):
        _check_type(path, where, value, (list, tuple))
        for number, item in enumerate(value):
            _require(path, f"{where}[{number}]", item, wanted.item)
    elif isinstance(wanted, Named):
        _check_type(path, where, value, (dict,))
        for key, item in value.items():
            _check_type(path, f"{where}: the key {key!r}", key, (wanted.key,))
            _require(path, f"{where}.{key}", item, wanted.value)
    elif isinstance(wanted, dict):
        _check_type(path, where, value, (dict,))
        for key, inner in wanted.items():
            name = key.removesuffix("?")
            if name in value:
                _require(path, f"{where}.{name}".lstrip("."), value[name], inner)
            elif key == name:
                raise Damaged(path, f"lacks {f'{where}.{name}'.lstrip('.')}")
    else:
        _check_type(path, where, value, wanted if isinstance(wanted, tuple) else (wanted,))


def _check_type(path: str, where: str, value: Any, types: tuple[type, ...]) -> None:
    if not isinstance(value, types) or (
        isinstance(value, bool) and bool not in types and object not in types
    ):
        names = " or ".join(kind.__name__ for kind in types)
        raise Damaged(path, f"{where} is a {type(value).__name__}, not a {names}")
