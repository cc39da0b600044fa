"""States that ZeRO-3 left empty: what `model.state_dict()` is on one rank, where nobody gathered it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from tests.support.quantised import save_adapter
from tests.support.running import assert_says

EMPTY = torch.empty(0)


def of_rank(layers: int = 2) -> dict[str, torch.Tensor]:
    """Return a state whose matrices are cut over the ranks; what is small stays whole on each."""
    state = {"embed.weight": EMPTY.clone(), "norm.weight": torch.ones(4)}
    for layer in range(layers):
        for name in ("q", "k", "v"):
            state[f"layers.{layer}.{name}.weight"] = EMPTY.clone()
        state |= {f"layers.{layer}.q.bias": torch.ones(4), f"layers.{layer}.norm.weight": torch.ones(4)}
    return state


@pytest.fixture(params=["a.safetensors", "a.pt", "nested.pt"])
def file(request: pytest.FixtureRequest, here: Path) -> str:
    name: str = request.param
    if name.endswith(".safetensors"):
        save_file(of_rank(), name)
    else:
        torch.save({"model": of_rank(), "epoch": 1} if name == "nested.pt" else of_rank(), name)
    return name


def test_no_command_takes_them_for_a_model(cli: Any, file: str) -> None:
    said = ("embed.weight", "ZeRO-3", "ckpttool merge")
    assert_says(cli("verify", file), 1, *said)
    for command in (
        ["convert", file, "out.safetensors"],
        ["average", file, file, "out.pt"],
        ["digest", file],
    ):
        assert_says(cli(*command), 3, *said)
    assert not Path("out.safetensors").exists()
    assert "7 float32 ZeRO-3 placeholder" in cli("inspect", file).out
    with ckpttool.open(file) as checkpoint, pytest.raises(ckpttool.errors.Refused, match="ZeRO-3"):
        checkpoint.state().load()


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_a_state_of_nothing_else_is_named_too(cli: Any, here: Path, name: str) -> None:
    state = {f"layers.{layer}.weight": EMPTY.clone() for layer in range(3)}
    save_file(state, name) if name.endswith("s") else torch.save(state, name)
    assert_says(cli("verify", name), 1, "ZeRO-3")
    assert_says(cli("convert", name, "out.safetensors"), 3, "ZeRO-3")


def test_an_adapter_of_empty_factors_is_named(cli: Any, here: Path) -> None:
    save_file({"l.weight": torch.ones(4, 6), "k.weight": torch.ones(4, 6)}, "base.safetensors")
    save_adapter(here, {f"l.lora_{which}.weight": EMPTY.clone() for which in "AB"})
    assert_says(cli("merge-lora", "base.safetensors", "adapter", "out.safetensors"), 3, "ZeRO-3")
    assert_says(cli("verify", "adapter/adapter_model.safetensors"), 1, "ZeRO-3")


HONEST = {
    "an empty buffer": {"a.weight": torch.ones(2, 2), "a.empty": EMPTY},
    "an empty matrix": {"a.weight": torch.ones(0, 4), "b.weight": torch.ones(4, 0)},
    "a layer without features": {f"l{i}.weight": torch.ones(3) for i in range(3)} | {"n.weight": EMPTY},
    "empty integers": {"a.weight": torch.empty(0, dtype=torch.int64), "b.weight": torch.ones(2)},
    "nothing but an empty tensor": {"x": EMPTY},
}


@pytest.mark.parametrize("state", HONEST.values(), ids=HONEST)
def test_what_is_empty_for_another_reason_stays(cli: Any, here: Path, state: dict[str, torch.Tensor]) -> None:
    state = {name: tensor.clone() for name, tensor in state.items()}
    save_file(state, "a.safetensors")
    assert cli("verify", "a.safetensors").code == 0
    assert cli("convert", "a.safetensors", "b.pt").code == 0
    assert cli("convert", "b.pt", "c.safetensors").code == 0
    assert load_file("c.safetensors").keys() == state.keys()
