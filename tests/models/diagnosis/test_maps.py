"""doctor proposes a map where a model of another program would fit, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.transforms.mapping.builtin import named
from tests.support.dialects import CASES, LLAMA
from tests.support.mapped import State, mapped, random_state


def model_of(state: State) -> nn.Module:
    """Return a module with parameters of these names and shapes."""
    root = nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.empty_like(tensor)))
    return root


@pytest.fixture
def pair(tmp_path: Path) -> tuple[State, State]:
    """Return Meta's Llama and the same of Hugging Face, the config of which lies in the folder."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    meta = random_state(CASES["meta-llama"][1])
    return meta, mapped(meta, tmp_path, named("meta-llama"), config=LLAMA)[0]


def advised(state: State, model: nn.Module, folder: Path) -> list[str | None]:
    torch.save(state, folder / "a.pt")
    return [problem.command for problem in ckpttool.doctor(folder / "a.pt", model).problems]


def test_a_map_is_proposed_in_the_direction_that_fits(pair: tuple[State, State], tmp_path: Path) -> None:
    meta, hf = pair
    (there,) = advised(meta, model_of(hf), tmp_path)
    assert there is not None and there.startswith("ckpttool convert") and there.endswith("--map meta-llama")
    (back,) = advised(hf, model_of(meta), tmp_path)
    assert back is not None and back.endswith("--map meta-llama --inverse")


def test_none_is_for_another_model_or_without_numbers(pair: tuple[State, State], tmp_path: Path) -> None:
    meta, hf = pair
    commands = advised(meta, nn.Linear(2, 2), tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    commands += advised(meta, model_of(hf), tmp_path)
    assert not any("meta-llama" in (command or "") for command in commands)
