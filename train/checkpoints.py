"""The trainer's checkpoint as a file: its structure, and how it is read."""

from __future__ import annotations

from typing import Any

import torch

from ckpttool.distributed import collectives
from ckpttool.errors import Damaged, Refused, Unreadable


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

    Raises:
        Unreadable: the file is missing, or may not be read.
        Damaged: torch can't read it, or its values are not those that were saved.
        Refused: it is a checkpoint of another program.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Unreadable(path, (error.strerror or str(error)).lower()) from error
    except Exception as error:  # torch raises all kinds of errors for damaged bytes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Damaged(path, f"can't be read: {reason}") from error
    if not isinstance(state, dict) or not {"model", "optimizer", "progress", "digests"} <= state.keys():
        raise Refused(
            path, "is not a checkpoint of this trainer", hint=f"inspect it: ckpttool inspect {path}"
        )
    found = {
        "model": collectives.digest_all(state["model"]),
        "optimizer": collectives.digest_all(named_optimizer(state["optimizer"])),
    }
    for part, digest in state["digests"].items():
        if found[part] != digest:
            raise Damaged(path, f"the {part}'s values are not the saved ones")
    return state
