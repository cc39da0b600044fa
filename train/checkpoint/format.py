"""The trainer's checkpoint as a file: its structure, and how it is read. Imports torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ckpttool.distributed import collectives
from ckpttool.errors import CkptToolError, Damaged, Refused, Unreadable
from ckpttool.files.failures import reason


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
    "model": Named(str, torch.Tensor),
    "optimizer": {
        "state": Named(int, Named(str, object)),
        "param_groups": Each({"params": Each(int), "param_names": Each(str)}),
    },
    "scheduler": {"base_lrs": Each(NUMBER), "last_epoch": int},
    "scaler": Named(str, NUMBER),
    "ema?": {"updates": int, "averages": Named(str, torch.Tensor)},
    "log": Each(Each(NUMBER)),
    "progress": {
        "epoch": int,
        "step": int,
        "global_step": int,
        "samples": int,
        "best": NUMBER,
        "uncounted": int,
        "sums": Each(Each(NUMBER)),
        "unscored": bool,
        "lr": NUMBER,
    },
    "plan": {
        "samples": int,
        "batch_size": int,
        "world_size": int,
        "data": str,
        "contents": Named(str, Named(str, str)),
        "init": (str, type(None)),
    },
    "rng": Each({"python": list, "torch": torch.Tensor}),
    "config": Named(str, SETTING),
    "digests": {"model": str, "optimizer": str, "run": str},
    "versions": Named(str, (str, int)),
    "training": str,
    "chain?": str,
}

# What `digests["run"]` is of.
PARTS = ("scheduler", "scaler", "progress", "plan", "rng", "config", "versions", "log")


def digest_of_run(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything in a checkpoint but the model and the optimizer."""
    return collectives.digest_all({part: _plain(state[part]) for part in PARTS if part in state})


def _plain(value: Any) -> Any:
    """Return the value with a digest in place of each tensor, so that its `repr` distinguishes it."""
    if isinstance(value, torch.Tensor):
        return ("tensor", collectives.digest(value).hex())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def named_optimizer(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state, flat and by name: `momentum_buffer of module.conv1.weight` -> tensor."""
    flat: dict[str, Any] = {}
    for number, group in enumerate(optimizer["param_groups"]):
        names = dict(zip(group["params"], group["param_names"], strict=True))
        flat[f"the optimizer's settings of group {number}"] = sorted(group.items())
        for index, name in names.items():
            for kind, value in optimizer["state"].get(index, {}).items():
                flat[f"{kind} of {name}"] = value
    return flat


def read(path: str) -> dict[str, Any]:
    """Return a checkpoint of this trainer, on the CPU, compared with its digests, as torch checks nothing.

    Raises Unreadable, Damaged, or Refused for another program's file.
    """
    require_file(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    except pickle.UnpicklingError as error:  # torch's own text tells how to run what is in it
        what = "it holds more than tensors and plain values, or is damaged; nothing in it was run"
        raise Damaged(path, f"can't be read: {what}") from error
    except Exception as error:  # torch raises all kinds of errors for damaged bytes
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Damaged(path, f"can't be read: {why}") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "progress", "digests"} <= state.keys():
        raise Refused(
            path, "is not a checkpoint of this trainer", hint=f"inspect it: ckpttool inspect {path}"
        )
    with malformed(path):
        _check(path, "", state, STRUCTURE)
        digests = {
            "model": collectives.digest_all(state["model"]),
            "optimizer": collectives.digest_all(named_optimizer(state["optimizer"])),
            "run": digest_of_run(state),
        }
        if "ema" in state:
            digests["ema"] = collectives.digest_all(state["ema"]["averages"])
    for part, digest in state["digests"].items():
        if digests.get(part, digest) != digest:
            what = "values of the run" if part == "run" else f"{part}'s values"
            raise Damaged(path, f"the {what} are not the saved ones")
    return state


@contextlib.contextmanager
def malformed(path: str) -> Iterator[None]:
    """Raise Damaged for any error in the block that the contents of a checkpoint can cause."""
    try:
        yield
    except CkptToolError:
        raise
    except Exception as error:  # torch's own checks of a state raise all kinds of errors
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Damaged(path, f"does not hold the state of a run: {why}") from error


def require_file(path: str) -> None:
    """Raise Unreadable if there is no file, and Refused for a pipe or a device, which may never end."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise Unreadable(path, "is a link to nothing" if os.path.islink(path) else reason(error)) from error
    if not stat.S_ISREG(mode):
        raise Refused(path, "is not a regular file", hint="name a checkpoint: --resume PATH")


def _check(path: str, where: str, value: Any, wanted: Any) -> None:
    """Raise Damaged, naming the place, if the value does not have the wanted structure."""
    if isinstance(wanted, Each):
        _check_type(path, where, value, (list, tuple))
        for number, item in enumerate(value):
            _check(path, f"{where}[{number}]", item, wanted.item)
    elif isinstance(wanted, Named):
        _check_type(path, where, value, (dict,))
        for key, item in value.items():
            _check_type(path, f"{where}: the key {key!r}", key, (wanted.key,))
            _check(path, f"{where}.{key}", item, wanted.value)
    elif isinstance(wanted, dict):
        _check_type(path, where, value, (dict,))
        for key, inner in wanted.items():
            name = key.removesuffix("?")
            if name in value:
                _check(path, f"{where}.{name}".lstrip("."), value[name], inner)
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
