"""The training step that the optimizers in the files of ranks state."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from ...checkpoint.ranks import HINT
from ...checkpoint.states import is_optimizer
from ...errors import Damaged
from ...inert_pickle.values import tensor_of
from ...tensors.ref import TensorRef
from ...tensors.values import stream
from .pieces import RankFile


def step_of(files: Sequence[RankFile]) -> int | None:
    """Return the step that the optimizers of the files state; None where none does.

    Raises:
        Damaged: two files state different ones.
    """
    stated = [(file, step) for file in files if (step := next(_steps(file.tree), None)) is not None]
    for file, step in stated:
        if step != stated[0][1]:
            first, _ = stated[0]
            raise Damaged(
                file.source.path,
                f"is of step {step}, and {first.source.path} of step {stated[0][1]}",
                hint=HINT,
            )
    return stated[0][1] if stated else None


def _steps(tree: Any) -> Iterator[int]:
    """Yield the steps in a file's optimizers, which lie at its top or one level below."""
    inside = tree.values() if isinstance(tree, dict) else ()
    for optimizer in (each for each in (tree, *inside) if is_optimizer(each)):
        state = optimizer["state"]
        for entry in state.values() if isinstance(state, dict) else ():
            step = entry.get("step") if isinstance(entry, dict) else None
            tensor = tensor_of(step)
            if tensor is not None and not tensor.shape:
                yield _number(tensor)
            elif type(step) is int:
                yield step


def _number(tensor: TensorRef) -> int:
    code = {"float32": "f", "float64": "d", "int64": "q", "int32": "i"}.get(tensor.dtype.name)
    raw = b"".join(map(bytes, stream(tensor)))
    return int(struct.unpack(f"<{code}", raw)[0]) if code else int.from_bytes(raw, "little")
