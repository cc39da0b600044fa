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


# ---- Norms. torch sums in the type of the weight, in an order that the processor's vectors decide, and
# rounds the norm, the quotient and the product; here all is float64, and rounded once. So the two are a few
# units of the last place apart, of which half a unit is ours.

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


def test_of_a_square_kernel_the_values_show_which_axis_is_normed(tmp_path: Path) -> None:
    """A ConvTranspose's is the second, and a Conv's the first: no shape says it."""
    torch.manual_seed(0)
    for make in (torch.nn.Conv2d, torch.nn.ConvTranspose2d):
        module = parametrizations.spectral_norm(make(8, 8, 3)).eval()
        found = folded(tmp_path, state_of(module), "norm")["net.weight"]
        torch.testing.assert_close(found, module.weight.detach())
    state = state_of(module)
    state["net.parametrizations.weight.0._u"] = torch.nn.functional.normalize(torch.randn(8), dim=0)
    with pytest.raises(Refused, match=r"'net.parametrizations.weight.original' .* nothing shows along which"):
        folded(tmp_path, state, "norm")


def test_norms_of_zero_are_what_torch_makes_of_them_and_are_counted(cli: Any, tmp_path: Path) -> None:
    v, g = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[1.0], [2.0]])
    path = saved({"w_v": v, "w_g": g}, tmp_path / "in.pt")
    done = cli("convert", path, tmp_path / "out.pt", "--fold", "norm", "--json")
    found = torch.load(tmp_path / "out.pt")["w"]
    torch.testing.assert_close(found, torch._weight_norm(v, g, 0), equal_nan=True)
    assert json.loads(done.out)["nans"] == 2


def test_a_mask_on_a_part_of_weight_norm_is_folded_first(tmp_path: Path) -> None:
    module = weight_norm(torch.nn.Linear(5, 7))
    prune.random_unstructured(module, "weight_v", 0.3)
    found = folded(tmp_path, state_of(module), "norm", "mask")
    prune.remove(module, "weight_v")
    torch.nn.utils.remove_weight_norm(module)
    assert found.keys() == {"net.weight", "net.bias"}
    torch.testing.assert_close(found["net.weight"], module.weight.detach())


def test_an_adapter_on_a_normed_layer_is_added_to_what_the_norm_makes(tmp_path: Path) -> None:
    v, g, a, b = torch.randn(5, 4), torch.rand(5, 1) + 1, torch.randn(2, 4), torch.randn(5, 2)
    state = {"fc.base_layer.weight_v": v, "fc.base_layer.weight_g": g}
    state |= {"fc.lora_A.default.weight": a, "fc.lora_B.default.weight": b}
    found = folded(tmp_path, state, "lora", "norm", alpha=4.0)
    torch.testing.assert_close(found["fc.weight"], torch._weight_norm(v, g, 0) + 2 * b @ a)


def test_shared_layers_stay_shared(tmp_path: Path) -> None:
    module = weight_norm(torch.nn.Linear(5, 7))
    torch.save(torch.nn.Sequential(module, module).state_dict(), tmp_path / "in.pt")
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        ckpttool.save(fold(checkpoint, ["norm"])[0], tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()


def test_a_view_that_is_not_contiguous_and_many_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    v = torch.randn(300, 5000).t()
    for g in (torch.rand(5000, 1), torch.rand(1, 300), torch.rand(())):
        state = {"net.parametrizations.weight.original0": g, "net.parametrizations.weight.original1": v}
        found = folded(tmp_path, state, "norm")["net.weight"]
        dim = g.shape.index(max(g.shape)) if g.shape else -1
        wanted = torch._weight_norm(v.double(), g.double(), dim)
        torch.testing.assert_close(found, wanted.float(), rtol=2e-7, atol=1e-9)


ONES, THREE = torch.ones(3, 2), torch.ones(3)
STACKED = (("original0", ONES[:, :1]), ("original1", ONES), ("1.base", ONES))
REFUSED: dict[str, tuple[dict[str, torch.Tensor], str, type[CkptToolError], str]] = {
    "no such kind": ({"w_orig": ONES, "w_mask": ONES}, "batchnorm", UsageFault, "--fold batchnorm"),
    "no mask": ({"w_v": ONES, "w_g": ONES[:, :1]}, "mask", NothingToDo, "computed by masks of pruning"),
    "no norm": ({"w_orig": ONES, "w_mask": ONES}, "norm", NothingToDo, "by weight or spectral norm"),
    "no adapter": ({"w": ONES}, "lora", NothingToDo, "no adapter is inside"),
    "names alone": (
        {"w_v": ONES, "w_g": ONES, "b_u": THREE, "b_v": THREE}, "norm", NothingToDo, "computed by"
    ),
    "as many norms as numbers": (
        {"att.time_mix_v": ONES[:1, None, :], "att.time_mix_g": ONES[:1, None, :]},
        "norm", Refused, "'att.time_mix_v' may be of weight norm, or plain: 'att.time_mix_g' has a shape",
    ),
    "a vector's norm": (
        {"b_v": THREE, "b_g": torch.tensor(1.0), "w_v": ONES, "w_g": ONES[:, :1]},
        "norm", Refused, "'b_v' may be of weight norm, or plain",
    ),
    "a mask of another shape": ({"w_orig": ONES, "w_mask": THREE}, "mask", NothingToDo, "by masks"),
    "the name is taken": (
        {"w": ONES, "w_orig": ONES, "w_mask": ONES}, "mask", Collision, "'w_orig' would become 'w', which"
    ),
    "integers": (
        {"w_orig": ONES.int(), "w_mask": ONES}, "mask", Refused, "'w_orig' is int32, of which no a mask"
    ),
    "complex numbers": (
        {"w_v": ONES.cfloat(), "w_g": ONES[:, :1]}, "norm", Refused, "'w_v' is complex64, of which no weight"
    ),
    "another parametrization": (
        {"a.parametrizations.w.original": ONES, "a.parametrizations.w.0.base": ONES},
        "norm", Refused, "'a.parametrizations.w.original' is of a parametrization that is not known",
    ),
    "one on top of another": (
        {f"a.parametrizations.w.{end}": part for end, part in STACKED},
        "norm", Refused, "is of a parametrization that is not known",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_or_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    state, kind, error, said = REFUSED[case]
    with pytest.raises(error, match=said):
        folded(tmp_path, {name: tensor.clone() for name, tensor in state.items()}, kind)
    assert not (tmp_path / "out.pt").exists()


def test_what_is_in_a_state_is_counted_by_kind(tmp_path: Path) -> None:
    state = {
        "a.w_v": ONES,
        "a.w_g": ONES[:, :1],
        "mix_v": THREE,
        "mix_g": THREE,
        "b.w_orig": ONES,
        "b.w_mask": ONES,
        "c.w": ONES,
    }
    state |= {"d.w_orig": ONES, "d.w_u": THREE, "d.w_v": THREE[:2]}
    with ckpttool.open(saved(state, tmp_path / "in.pt")) as checkpoint:
        assert folds_in(checkpoint.state()) == {"mask": 1, "norm": 2}
    assert ckpttool.inspect(tmp_path / "in.pt").folds == {"mask": 1, "norm": 2}


def test_safetensors_and_shards_are_written_with_what_is_not_computed(cli: Any, tmp_path: Path) -> None:
    state = {"a.weight_v": ONES, "a.weight_g": ONES[:, :1] * 2, "steps": torch.tensor(3), "b": THREE.half()}
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "in.safetensors")
    words = ["convert", tmp_path / "in.safetensors", f"{tmp_path}/out/", "--fold", "norm"]
    done = cli(*words, "--shard-size", "30")
    assert done.code == 0, done.err
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == {"a.weight", "steps", "b"}
    torch.testing.assert_close(found["a.weight"], ONES * 2**0.5)
    assert (found["steps"], found["b"].dtype) == (3, torch.float16)


def test_doctor_proposes_it_where_the_model_is_plain(cli: Any, tmp_path: Path) -> None:
    module = weight_norm(torch.nn.Linear(5, 7))
    saved(state_of(module), tmp_path / "in.pt")
    torch.nn.utils.remove_weight_norm(module)
    saved(state_of(module), tmp_path / "like.pt")
    said = json.loads(cli("doctor", tmp_path / "in.pt", "--like", tmp_path / "like.pt", "--json").out)
    assert [problem["kind"] for problem in said["problems"]] == ["wrapped"]
    words = said["problems"][0]["command"].split()
    assert cli(*words[1:]).code == 0
    made = torch.load(tmp_path / "in.mended.pt")["net.weight"]
    torch.testing.assert_close(made, module.weight.detach())
    saved(state_of(parametrizations.weight_norm(torch.nn.Linear(5, 7))), tmp_path / "new.pt")
    said = json.loads(cli("doctor", tmp_path / "in.pt", "--like", tmp_path / "new.pt", "--json").out)
    assert [problem["kind"] for problem in said["problems"]] == ["weight-norm"]
