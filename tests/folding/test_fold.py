"""Weights that a wrapper computes, folded into plain ones: what torch's own removal leaves is the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import ckpttool
from ckpttool.errors import CkptToolError, Collision, NothingToDo, Refused, UsageFault
from ckpttool.folding.fold import fold, folds_in
from tests.support.comparing import saved

pytestmark = pytest.mark.filterwarnings("ignore")

Module = torch.nn.Module
LAYERS: dict[str, Callable[[], Module]] = {
    "linear": lambda: torch.nn.Linear(5, 7),
    "square": lambda: torch.nn.Linear(6, 6),
    "one row": lambda: torch.nn.Linear(5, 1),
    "conv1d": lambda: torch.nn.Conv1d(4, 6, 3),
    "conv2d": lambda: torch.nn.Conv2d(8, 8, 3, groups=2),
    "conv3d": lambda: torch.nn.Conv3d(3, 4, (1, 2, 3)),
    "turned": lambda: torch.nn.ConvTranspose2d(6, 6, 3),
    "embedding": lambda: torch.nn.Embedding(9, 4),
}


def state_of(module: Module) -> dict[str, torch.Tensor]:
    return {f"net.{name}": tensor.clone() for name, tensor in module.state_dict().items()}


def folded(
    tmp_path: Path, state: dict[str, torch.Tensor], *kinds: str, **how: Any
) -> dict[str, torch.Tensor]:
    saved(state, tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        new, _ = fold(checkpoint, kinds, **how)
        ckpttool.save(new, tmp_path / "out.pt", force=True)
    found: dict[str, torch.Tensor] = torch.load(tmp_path / "out.pt", weights_only=True)
    return found


def ulps(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest distance in units of the last place of the wanted numbers."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    size = torch.finfo(wanted.dtype)
    unit = torch.clamp(wanted.double().abs(), min=size.tiny).log2().floor().exp2() * size.eps
    return float(((found.double() - wanted.double()).abs() / unit).max())


# ---- Masks: a product of two numbers, which is exact in float64, so the bits are torch's


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_mask_is_folded_to_the_bits_that_torch_leaves(
    layer: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = LAYERS[layer]().to(dtype)
    prune.random_unstructured(module, "weight", 0.4)
    if getattr(module, "bias", None) is not None:
        prune.random_unstructured(module, "bias", 1)
    found = folded(tmp_path, state_of(module), "mask")
    for name in ("weight", "bias"):
        if hasattr(module, f"{name}_mask"):
            prune.remove(module, name)
    wanted = state_of(module)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_mask_of_other_numbers_and_types_multiplies_as_in_torch(tmp_path: Path) -> None:
    weight = torch.tensor([1.5, -2.0, float("inf"), float("nan"), 1e-40, -0.0, 3e38])
    for mask in (
        torch.tensor([1, 0, 0, 1, 1, 1, 0], dtype=torch.bool),
        torch.tensor([1, 0, 1, 1, 1, 1, 0], dtype=torch.uint8),
        torch.tensor([0.3, -0.0, 1, 1, 0.1, 2, 2]),
        torch.tensor([0.3, -0.0, 1, 1, 0.1, 2, 2]).bfloat16(),
    ):
        found = folded(tmp_path, {"w_orig": weight, "w_mask": mask}, "mask")["w"]
        torch.testing.assert_close(found, weight * mask.to(weight.dtype), rtol=0, atol=0, equal_nan=True)


# ---- Norms. torch sums in the type of the weight, in an order that the processor's vectors decide, and rounds
# the norm, the quotient and the product; here all is float64, and rounded once. So both are a few units of the
# last place apart, of which half a unit is ours; bfloat16 and float16 have few digits for the three roundings.

FEW = {torch.float32: 3, torch.float64: 3, torch.bfloat16: 3, torch.float16: 3}


@pytest.mark.parametrize("dtype", FEW)
@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("layer", LAYERS)
def test_weight_norm_is_what_torch_computes(
    layer: str, form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    for dim in (0, 1, None):
        module = LAYERS[layer]()
        apply = weight_norm if form == "old" else parametrizations.weight_norm
        module = apply(module, dim=dim).to(dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) / 3)
        found = folded(tmp_path, state_of(module), "norm")
        if form == "old":
            torch.nn.utils.remove_weight_norm(module)
        else:
            parametrize.remove_parametrizations(module, "weight")
        wanted = state_of(module)
        assert found.keys() == wanted.keys()
        assert ulps(found["net.weight"], wanted["net.weight"]) <= FEW[dtype]


INPUTS = {
    "linear": torch.zeros(2, 5),
    "one row": torch.zeros(2, 5),
    "square": torch.zeros(2, 6),
    "conv1d": torch.zeros(2, 4, 9),
    "conv3d": torch.zeros(2, 3, 4, 4, 4),
    "embedding": torch.zeros(2),
}
TYPE = {"embedding": torch.int64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("layer", LAYERS)
def test_spectral_norm_is_what_torch_computes(
    layer: str, form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = LAYERS[layer]().to(dtype)
    module = (spectral_norm if form == "old" else parametrizations.spectral_norm)(module)
    for _ in range(20):  # steps of training, in which u and v follow the weight
        module(
            INPUTS.get(layer, torch.zeros(2, getattr(module, "in_channels", 1), 9, 9)).to(
                TYPE.get(layer, dtype)
            )
        )
    module.eval()
    found = folded(tmp_path, state_of(module), "norm")
    if form == "old":
        torch.nn.utils.remove_spectral_norm(module)
    else:
        parametrize.remove_parametrizations(module, "weight")
    wanted = state_of(module)
    assert found.keys() == wanted.keys()
    assert ulps(found["net.weight"], wanted["net.weight"]) <= 4
