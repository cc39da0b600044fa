"""A base and what it became, in the folder of each test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def step(here: Path) -> Path:
    """Write base.safetensors and new.safetensors: a tensor of each form that a delta knows."""
    torch.manual_seed(0)
    base = {
        "same": torch.randn(50, 20),
        "sparse": torch.randn(300_000),
        "xor": (torch.randn(900_001) * 0.02).bfloat16(),
    }
    new = {name: tensor.clone() for name, tensor in base.items()}
    new["sparse"][[7, 262_143, 262_144, 299_999]] = 1.0
    new["xor"] += (torch.randn(900_001) * 1e-4).bfloat16()
    new["new"] = torch.arange(5)
    save_file(base, here / "base.safetensors")
    save_file(new, here / "new.safetensors")
    return here
