"""A training's state with what a copy of it can get wrong. Imports torch."""

from __future__ import annotations

import collections
from typing import Any

import torch


def odd_state() -> dict[str, Any]:
    """Return a state with what a copy can get wrong."""
    whole = torch.arange(24, dtype=torch.float32)
    picture = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    named: Any = collections.OrderedDict(a=whole[4:10].view(2, 3), tied=whole[4:10].view(2, 3))
    named._metadata = {"": {"version": 1}}
    same = torch.ones(3)
    return {
        "model": named,
        "views": [whole.view(4, 6).t(), whole[1::2], picture, torch.tensor(3.0), torch.empty(0, 3)],
        "dtypes": (same.bfloat16(), same.bool(), same.to(torch.complex64), same.long()),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "twice": [same, same],
        "plain": {"lr": 0.1, "names": ["momentum_buffer", "momentum_buffer"], "none": None, 3: b"bytes"},
    }
