"""LoRA adapters added to their base models, ties too: PEFT's `merge_and_unload` is the oracle."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, Refused, Unreadable, Unsupported
from ckpttool.lora.merge import Merged
from tests.support.comparing import saved
from tests.support.quantised import pair, save_adapter

# ---- LoRA adapters added to their base models: PEFT's `merge_and_unload` is the oracle where it is installed


class Net(torch.nn.Module):
    """Layers of each kind that LoRA adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 6)
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6, bias=False)
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.point = torch.nn.Conv2d(4, 4, 1)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.down(self.up(self.embed(x))))
        return found


CONFIGS: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["up", "down"], "r": 4, "lora_alpha": 8},
    "all layers": {"target_modules": ["embed", "up", "conv", "point"], "r": 2, "lora_alpha": 3},
    "rslora": {"target_modules": ["up"], "r": 4, "lora_alpha": 8, "use_rslora": True},
    "patterns": {"target_modules": ["up", "down"], "r": 4, "lora_alpha": 8}
    | {"rank_pattern": {"up": 2}, "alpha_pattern": {"^down": 5}},
    "a module saved whole": {"target_modules": ["up"], "r": 2, "modules_to_save": ["head"]},
    "biases": {"target_modules": ["up"], "r": 2, "bias": "all"},
    "biases of a module saved whole": {"target_modules": ["up"], "r": 2, "bias": "all"}
    | {"modules_to_save": ["head"]},
}


def trained(config: dict[str, Any], folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Save a base and an adapter whose factors are random; return the state that PEFT merges."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    base = Net().to(dtype)
    torch.save(base.state_dict(), folder / "base.pt")
    model = peft.get_peft_model(base, peft.LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) / 4)
    model.save_pretrained(folder / "adapter")
    found: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
    return found


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize("whole", ["auto", True])
def test_an_embedding_that_is_targeted_and_saved_whole_counts_as_both(whole: object, tmp_path: Path) -> None:
    """PEFT saves `base_layer.weight` with the factors of resized embeddings, or of known names."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)

    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens, self.lm_head = torch.nn.Embedding(13, 6), torch.nn.Linear(6, 13)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embed_tokens

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.lm_head

    torch.save(Tokens().state_dict(), tmp_path / "base.pt")
    targets = ["embed_tokens", "lm_head"]
    model = peft.get_peft_model(Tokens(), peft.LoraConfig(target_modules=targets, r=2, lora_alpha=3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=whole)
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.embed_tokens.base_layer.weight" in held
    found = merge(tmp_path)
    for name, tensor in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], tensor)


def merge(folder: Path, output: str = "out.pt") -> dict[str, torch.Tensor]:
    adapter = ckpttool.open_adapter(folder / "adapter")
    with ckpttool.open(folder / "base.pt") as base, adapter.checkpoint:
        new, _ = ckpttool.merge_lora(base, adapter)
        ckpttool.save(new, folder / output, force=True)
    return torch.load(folder / output, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CONFIGS)
def test_the_result_is_what_peft_merges(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    wanted, found = trained(CONFIGS[case], tmp_path, dtype), merge(tmp_path)
    assert found.keys() == wanted.keys()
    base = torch.load(tmp_path / "base.pt", weights_only=True)
    assert any(not torch.equal(found[name], base[name]) for name in base)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


# Without PEFT.


def factors(rows: int, columns: int, rank: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(rank, columns), torch.randn(rows, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_value_is_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.randn(700, 900).to(dtype)
    a, b = factors(700, 900)
    saved({"fc.weight": weight, "fc.bias": torch.ones(700)}, tmp_path / "base.pt")
    save_adapter(tmp_path, pair("fc", a, b))
    exact = weight.double() + 1.5 * (b.double() @ a.double())
    found = merge(tmp_path)
    if dtype == torch.float32:
        assert torch.equal(found["fc.weight"], exact.float())
    error, least = ((value.double() - exact).abs() for value in (found["fc.weight"], exact.to(dtype)))
    assert (error <= least).all()
    assert torch.equal(found["fc.bias"], torch.ones(700))


@pytest.mark.parametrize("of_adapter", [torch.float32, torch.float64])
def test_a_product_is_added_to_the_adapter_s_own_weight(of_adapter: torch.dtype, tmp_path: Path) -> None:
    base, own = torch.zeros(10, 4).bfloat16(), torch.randn(10, 4, dtype=of_adapter)
    a, b = factors(4, 10)
    saved({"embed.weight": base, "tied.weight": base}, tmp_path / "base.pt")
    named = {"lora_embedding_A": a, "lora_embedding_B": b, "base_layer.weight": own}
    save_adapter(tmp_path, {f"embed.{name}": tensor for name, tensor in named.items()})
    found = merge(tmp_path)
    exact = own.double() + 1.5 * (b.double() @ a.double()).t()
    assert torch.equal(found["embed.weight"], exact.bfloat16())
    assert found["tied.weight"].data_ptr() == found["embed.weight"].data_ptr()


SAME = {
    "with and without the prefix": "fc.lora_A.weight",
    "with and without .weight": "base_model.model.fc.lora_A",
    "whole, with and without the prefix": "head.weight",
    "whole, of the layer and of its base layer": "base_model.model.head.base_layer.weight",
}


@pytest.mark.parametrize("case", SAME)
def test_two_tensors_for_one_place_are_refused_by_name(case: str, tmp_path: Path) -> None:
    saved({"fc.weight": torch.ones(5, 4), "head.weight": torch.ones(2, 5)}, tmp_path / "base.pt")
    save_adapter(tmp_path, GOOD | {"head.weight": torch.ones(2, 5)}, modules_to_save=["head"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    held, name = load_file(file), SAME[case]
    other = f"base_model.model.{'head.weight' if 'head' in name else 'fc.lora_A.weight'}"
    save_file({**held, name: held[other].clone()}, file)
    with pytest.raises(Refused, match=f"{re.escape(name)}'") as refused:
        merge(tmp_path)
    assert f"'{other}'" in str(refused.value)
    assert not (tmp_path / "out.pt").exists()


def test_a_tied_weight_stays_tied(tmp_path: Path) -> None:
    weight = torch.randn(5, 4)
    saved({"embed.weight": weight, "head.weight": weight}, tmp_path / "base.pt")
    a, b = factors(5, 4)
    save_adapter(tmp_path, pair("head", a, b))
    found = merge(tmp_path)
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    torch.testing.assert_close(found["embed.weight"], weight + 1.5 * b @ a)


def test_a_turned_layer_and_an_odd_layout(tmp_path: Path) -> None:
    weight = torch.randn(4, 5)
    saved({"fc.weight": weight.t().contiguous().t()}, tmp_path / "base.pt")
    a, b = factors(5, 4)
    save_adapter(tmp_path, pair("fc", a, b), fan_in_fan_out=True)
    torch.testing.assert_close(merge(tmp_path)["fc.weight"], weight + 1.5 * (b @ a).t())


def save_layers(folder: Path, shapes: dict[str, tuple[int, int]], **config: Any) -> dict[str, torch.Tensor]:
    """Save a base of zeros and an adapter whose layers have more outputs than inputs; return the products."""
    saved({f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}, folder / "base.pt")
    made, tensors = {}, {}
    for name, shape in shapes.items():
        a, b = factors(max(shape), min(shape))
        tensors |= pair(name, a, b)
        made[name] = 1.5 * b @ a
    save_adapter(folder, tensors, **config)
    return made


@pytest.mark.parametrize("said", [True, False])
def test_the_shapes_of_a_layer_say_whether_it_is_turned(said: bool, tmp_path: Path) -> None:
    """PEFT has Conv1D and Linear in one adapter, and one setting for both, that of the last."""
    made = save_layers(tmp_path, {"conv1d": (4, 5), "linear": (5, 4)}, fan_in_fan_out=said)
    found = merge(tmp_path)
    torch.testing.assert_close(found["conv1d.weight"], made["conv1d"].t())
    torch.testing.assert_close(found["linear.weight"], made["linear"])


@pytest.mark.parametrize("said", [True, False])
def test_a_square_layer_is_turned_as_the_setting_says(said: bool, tmp_path: Path) -> None:
    same, other = ((4, 5), (5, 4)) if said else ((5, 4), (4, 5))
    made = save_layers(tmp_path, {"square": (4, 4), "same": same}, fan_in_fan_out=said)["square"]
    torch.testing.assert_close(merge(tmp_path)["square.weight"], made.t() if said else made)
    (tmp_path / "out.pt").unlink()
    save_layers(tmp_path, {"square": (4, 4), "same": same, "other": other}, fan_in_fan_out=said)
    said_so = "product of 'square' is transposed: its weight is square, and 'other'"
    with pytest.raises(Unsupported, match=said_so):
        merge(tmp_path)
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("said", [True, False])
def test_a_layer_beside_a_square_one_tells_of_which_kind_it_is(said: bool, tmp_path: Path) -> None:
    """GPT-2's `attn.c_proj` with `lm_head`: PEFT saves the latter's setting, and `attn.c_attn` has a bias."""
    a, b = factors(4, 4)
    save_adapter(tmp_path, pair("at.proj", a, b), fan_in_fan_out=said)
    state = {"at.proj.weight": torch.zeros(4, 4), "at.qkv.weight": torch.zeros(4, 12)}
    saved({**state, "at.qkv.bias": torch.zeros(12 if said else 4)}, tmp_path / "base.pt")
    torch.testing.assert_close(merge(tmp_path)["at.proj.weight"], 1.5 * ((b @ a).t() if said else b @ a))
    (tmp_path / "out.pt").unlink()
    saved({**state, "at.qkv.bias": torch.zeros(4 if said else 12)}, tmp_path / "base.pt")
    with pytest.raises(Unsupported, match=r"weight is square, and 'at\.qkv' is not as fan_in_fan_out"):
        merge(tmp_path)


def test_a_square_layer_apart_from_all_conv1d_is_not_turned_on_the_word_of_another(tmp_path: Path) -> None:
    save_layers(tmp_path, {"head.fc": (4, 4), "at.qkv": (4, 5)}, fan_in_fan_out=True)
    with pytest.raises(Unsupported, match=r"'head\.fc' is transposed: .* no Conv1D is beside it"):
        merge(tmp_path)


def test_a_convolution_is_never_turned(tmp_path: Path) -> None:
    a, b = torch.randn(2, 1, 2, 2), torch.randn(4, 2, 1, 1)
    saved({"conv.weight": torch.zeros(4, 1, 2, 2)}, tmp_path / "base.pt")
    save_adapter(tmp_path, pair("conv", a, b), fan_in_fan_out=True)
    wanted = 1.5 * torch.einsum("or,rihw->oihw", b[:, :, 0, 0], a)
    torch.testing.assert_close(merge(tmp_path)["conv.weight"], wanted)


A, B = factors(5, 4)
GOOD = pair("fc", A, B)

WRONG: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], type[CkptToolError], str]] = {
    "DoRA without norms": (GOOD, {"use_dora": True}, Damaged, "has no magnitude of 'fc', and .* = true"),
    "norms without DoRA": (
        GOOD | {"fc.lora_magnitude_vector": torch.ones(5)}, {}, Damaged, "a magnitude of .fc., .* = false"
    ),
    "norms of another number": (
        GOOD | {"fc.lora_magnitude_vector": torch.ones(4)}, {"use_dora": True}, Damaged, "4 magnitudes of"
    ),
    "a bias of the first factor": (
        GOOD | {"fc.lora_A.bias": torch.ones(2)}, {"lora_bias": True}, Unsupported, "no part of a layer"
    ),
    "two kinds in a layer": (
        GOOD | {"fc.oft_R.weight": torch.ones(2, 1)}, {}, Unsupported, "together: lora_A, lora_B, oft_R"
    ),
    "another start": (GOOD, {"init_lora_weights": "pissa"}, Unsupported, "init_lora_weights=pissa"),
    "another kind": (GOOD, {"peft_type": "IA3"}, Unsupported, "type IA3"),
    "one factor": ({"fc.lora_A.weight": A}, {}, Damaged, "only one of the two factors of 'fc'"),
    "another rank": (GOOD, {"r": 3}, Damaged, "says rank 3"),
    "no number": (GOOD, {"lora_alpha": "x"}, Damaged, "lora_alpha = 'x'"),
    "not a number": (GOOD, {"lora_alpha": float("nan")}, Damaged, "lora_alpha = nan, which is no finite"),
    "no finite number": (GOOD, {"lora_alpha": float("inf")}, Damaged, "lora_alpha = inf, which is no finite"),
    "a number too large": (GOOD, {"lora_alpha": 10**400}, Damaged, "lora_alpha = 1000.*, which is no finite"),
    "modules that are no list": (GOOD, {"modules_to_save": 5}, Damaged, "modules_to_save = 5, which is no"),
    "modules without names": (GOOD, {"modules_to_save": [5]}, Damaged, r"modules_to_save = \[5\], which"),
    "a type that is not cast": (
        GOOD | {"fc.bias": torch.ones(5, dtype=torch.int64)}, {}, Refused, "'fc.bias': its type is int64"
    ),
    "a malformed pattern": (GOOD, {"rank_pattern": {"(": 2}}, Damaged, "malformed rank_pattern"),
    "a pattern of repeated groups": (
        GOOD, {"alpha_pattern": {"((.+)+)+!": 8}}, Unsupported, r"alpha_pattern '\(\(.\+\)\+\)\+!'"
    ),
    "a pattern that looks ahead": (GOOD, {"rank_pattern": {"(?=fc)fc": 2}}, Unsupported, "has rank_pattern"),
    "another layer": (
        pair("up", A, B), {}, Refused, "'up.weight': the model has no"
    ),
    "another size": (
        GOOD | {"fc.lora_B.weight": B[:3].clone()}, {}, Refused, r"\[3, 4\] is to be added to \[5, 4\]"
    ),
    "a copy of PEFT's own": (
        GOOD | {"fc.modules_to_save.bias": torch.ones(5)}, {"modules_to_save": ["fc"]},
        Unsupported, "a copy that PEFT makes of a module"
    ),
    "a tensor of no use": (GOOD | {"x.weight": torch.ones(1)}, {}, Refused, "'x.weight': the model has"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_added_is_refused_by_name(case: str, tmp_path: Path) -> None:
    tensors, config, error, message = WRONG[case]
    saved({"fc.weight": torch.ones(5, 4), "fc.bias": torch.ones(5)}, tmp_path / "base.pt")
    save_adapter(tmp_path, tensors, **config)
    with pytest.raises(error, match=message):
        merge(tmp_path)
    assert not (tmp_path / "out.pt").exists()


def mended(cli: Any, hint: str, **places: Path) -> None:
    """Run the command that a hint names, with paths for the words in capitals."""
    words = shlex.split(hint[hint.index("ckpttool ") :])[1:]
    assert cli(*(places.get(word, word) for word in words)).code == 0


def test_a_base_with_a_prefix_is_told_how_to_lose_it(cli: Any, tmp_path: Path) -> None:
    saved({"module.fc.weight": torch.ones(5, 4), "module.fc.bias": torch.ones(5)}, tmp_path / "base.pt")
    save_adapter(tmp_path, GOOD)
    with pytest.raises(Refused, match=r"no such weight; it has 'module\.fc\.weight'") as refused:
        merge(tmp_path)
    mended(cli, refused.value.hint or "", OUT=tmp_path / "plain.pt")
    (tmp_path / "plain.pt").replace(tmp_path / "base.pt")
    torch.testing.assert_close(merge(tmp_path)["fc.weight"], 1 + 1.5 * B @ A)


def test_an_adapter_with_its_name_in_the_keys_is_told_how_to_lose_it(cli: Any, tmp_path: Path) -> None:
    saved({"fc.weight": torch.ones(5, 4)}, tmp_path / "base.pt")
    save_adapter(tmp_path, {"fc.lora_A.my-own.weight": A, "fc.lora_B.my-own.weight": B})
    with pytest.raises(Unsupported, match="with the adapter's name 'my-own' in it") as refused:
        merge(tmp_path)
    mended(cli, refused.value.hint or "")
    torch.testing.assert_close(merge(tmp_path)["fc.weight"], 1 + 1.5 * B @ A)


@pytest.mark.parametrize("held", [pair("lm_head", A, B), {"lm_head.weight": A}])
def test_an_output_layer_not_stored_may_be_tied(held: dict[str, torch.Tensor], tmp_path: Path) -> None:
    saved({"embed_tokens.weight": torch.ones(5, 4)}, tmp_path / "base.pt")
    save_adapter(tmp_path, held)
    with pytest.raises(Refused, match=r"'lm_head\.weight': the model has no such .* and may tie"):
        merge(tmp_path)


@pytest.mark.parametrize("of_adapter", [torch.float16, torch.float64])
def test_what_the_adapter_holds_whole_takes_the_model_s_type(of_adapter: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(2)
    head, bias = torch.randn(2, 5).to(of_adapter), torch.randn(5).to(of_adapter)
    held = {"head.weight": head, "fc.base_layer.bias": bias}
    base = {"fc.weight": torch.ones(5, 4), "fc.bias": torch.ones(5)}
    base["head.weight"] = torch.ones(2, 5).bfloat16()
    saved(base, tmp_path / "base.pt")
    save_adapter(tmp_path, GOOD | held, modules_to_save=["head"])
    found = merge(tmp_path)
    for name, adapter_name in (("head.weight", "head.weight"), ("fc.bias", "fc.base_layer.bias")):
        wanted = base[name].copy_(held[adapter_name])  # as PEFT's load_state_dict does
        assert torch.equal(found[name], wanted) and found[name].dtype == base[name].dtype


def test_both_copies_of_a_module_are_passed_over_beside_the_module(tmp_path: Path) -> None:
    """With bias="all" PEFT saves the biases of the trained copy and of the base's, and the bias itself."""
    saved({"fc.weight": torch.ones(5, 4), "head.bias": torch.zeros(3)}, tmp_path / "base.pt")
    held = {"head.bias": torch.ones(3), "head.modules_to_save.bias": torch.ones(3)}
    held |= {"head.original_module.bias": torch.zeros(3)}
    save_adapter(tmp_path, GOOD | held, modules_to_save=["head"], bias="all")
    found = merge(tmp_path)
    assert {*found} == {"fc.weight", "head.bias"} and torch.equal(found["head.bias"], torch.ones(3))


def test_a_folder_without_an_adapter_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"adapter_config\.json"):
        ckpttool.open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(Damaged, match="not JSON"):
        ckpttool.open_adapter(tmp_path)


def test_the_command_names_what_it_did(cli: Any, tmp_path: Path) -> None:
    state = {"fc.weight": torch.ones(5, 4), "head.weight": torch.ones(2, 5)}
    save_file(state, tmp_path / "base.safetensors")
    save_adapter(tmp_path, GOOD | {"head.weight": torch.zeros(2, 5)}, modules_to_save=["head"])
    words = ["merge-lora", tmp_path / "base.safetensors", tmp_path / "adapter", tmp_path / "out.safetensors"]
    ran = cli(*words)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"added 1 update of {tmp_path / 'adapter'} -> ")
    assert "replaced by the adapter's: head.weight" in ran.err
    assert load_file(tmp_path / "out.safetensors")["head.weight"].sum() == 0
    data = cli(*words, "--json", "--force").json
    assert data["cast"] == []
    state["head.weight"] = state["head.weight"].half()
    save_file(state, tmp_path / "base.safetensors")
    ran = cli(*words, "--force")
    assert "of other types in the adapter, and cast to the model's: head.weight" in ran.err
    assert (data["updated"], data["replaced"], data["added"]) == (["fc.weight"], ["head.weight"], [])
    missing = cli("merge-lora", tmp_path / "base.safetensors", tmp_path / "none", tmp_path / "x.pt")
    assert missing.code == 3 and "save_pretrained" in missing.err


@pytest.mark.parametrize(
    ("dtype", "alpha", "many"),
    [
        (torch.float32, 1e300, 11),
        (torch.bfloat16, 1e39, 11),
        (torch.float16, 2e5, 11),
        (torch.float64, 1e300, 0),
        (torch.float32, 1e5, 0),
    ],
)
def test_numbers_that_become_infinite_are_counted_and_said(
    dtype: torch.dtype, alpha: float, many: int, cli: Any, tmp_path: Path
) -> None:
    """A finite alpha may be larger than the weight's type holds. One weight was infinite before."""
    weight = torch.zeros(4, 4, dtype=dtype)
    weight[0, 0] = torch.inf
    saved({"fc.weight": weight, "tied.weight": weight}, tmp_path / "base.pt")
    factors = pair("fc", torch.ones(1, 4), torch.tensor([[1.0], [1], [1], [0]]))
    save_adapter(tmp_path, factors, r=1, lora_alpha=alpha)
    words = ["merge-lora", *(tmp_path / name for name in ("base.pt", "adapter", "out.pt"))]
    ran = cli(*words)
    assert ran.code == 0 and (f"{many} finite values became infinite" in ran.err) == bool(many)
    overflows = json.loads(cli(*words, "--force", "--json").out)["overflows"]
    assert overflows == many
    assert torch.load(tmp_path / "out.pt")["fc.weight"].isinf().sum() == overflows + 1


def test_numbers_that_become_nan_are_not_said_to_become_infinite(cli: Any, tmp_path: Path) -> None:
    saved({"fc.weight": torch.zeros(4, 4)}, tmp_path / "base.pt")
    save_adapter(tmp_path, pair("fc", torch.ones(1, 4), torch.tensor([[torch.nan], [1], [1], [1]])), r=1)
    ran = cli("merge-lora", *(tmp_path / name for name in ("base.pt", "adapter", "out.pt")))
    assert ran.code == 0 and "4 finite values became NaN" in ran.err and "infinite" not in ran.err


def test_whole_tensors_that_overflow_in_the_model_s_type_are_counted(cli: Any, tmp_path: Path) -> None:
    state = {"fc.weight": torch.ones(2, 2), "head.weight": torch.ones(2, 2, dtype=torch.float16)}
    saved(state, tmp_path / "base.pt")
    whole = {"head.weight": torch.full((2, 2), 1e6)}
    save_adapter(tmp_path, whole, modules_to_save=["head"])
    ran = cli("merge-lora", *(tmp_path / name for name in ("base.pt", "adapter", "out.pt")))
    assert "4 finite values became infinite" in ran.err


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder", "sparse"])
def test_settings_that_are_no_small_file_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    saved({"fc.weight": torch.ones(5, 4)}, tmp_path / "base.pt")
    save_adapter(tmp_path, pair("fc", torch.ones(2, 4), torch.ones(5, 2)))
    config = tmp_path / "adapter" / "adapter_config.json"
    config.unlink()
    if kind == "sparse":
        config.touch()
        os.truncate(config, 1 << 40)
    elif kind == "folder":
        config.mkdir()
    else:
        os.mkfifo(config) if kind == "FIFO" else config.symlink_to("/dev/zero")
    with pytest.raises(CkptToolError, match=r"is not a regular file|is a folder|is longer than 16 MiB"):
        ckpttool.open_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_a_base_s_settings_that_are_no_file_are_passed_over(kind: str, tmp_path: Path) -> None:
    saved({"model.embed_tokens.weight": torch.ones(5, 4)}, tmp_path / "base.pt")
    whole = {"model.embed_tokens.weight": torch.zeros(5, 4)}
    save_adapter(tmp_path, whole, modules_to_save=["embed_tokens"], task_type="SEQ_CLS")
    config = tmp_path / "config.json"
    os.mkfifo(config) if kind == "FIFO" else config.symlink_to("/dev/zero")
    assert merge(tmp_path)["model.embed_tokens.weight"].sum() == 0


# ---- Adapters with a module saved whole, and bases that tie it: what PEFT 0.21 merges, measured with Llama


EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
Q = "model.layers.0.q_proj"
OLD, NEW = torch.arange(42.0).reshape(7, 6), -torch.arange(42.0).reshape(7, 6)


def base_state() -> dict[str, torch.Tensor]:
    return {EMBEDDING: OLD.clone(), f"{Q}.weight": torch.ones(4, 6), "model.norm.weight": torch.ones(6)}


def config(folder: Path, **settings: object) -> None:
    (folder / "config.json").write_text(json.dumps(settings))


def in_memory(folder: Path) -> str:
    state = base_state()
    torch.save({**state, OUTPUT: state[EMBEDDING]}, folder / "base.pt")
    return "base.pt"


def in_metadata(folder: Path) -> str:
    save_file(base_state(), folder / "base.safetensors", metadata={OUTPUT: EMBEDDING})
    return "base.safetensors"


def unnamed(folder: Path) -> str:
    save_file(base_state(), folder / "model.safetensors", metadata={"format": "pt"})
    return "model.safetensors"


def unnamed_and_configured(folder: Path) -> str:
    config(folder, architectures=["LlamaForCausalLM"], tie_word_embeddings=True)
    return unnamed(folder)


def copied(folder: Path) -> str:
    save_file({**base_state(), OUTPUT: OLD.clone()}, folder / "model.safetensors")
    return "model.safetensors"


def shards(folder: Path) -> str:
    whole = unnamed_and_configured(folder)
    (folder / "hf").mkdir()
    with ckpttool.open(folder / whole) as checkpoint:
        ckpttool.save(checkpoint, folder / "hf", to="safetensors-sharded", shard_size=200, force=True)
    (folder / "config.json").rename(folder / "hf" / "config.json")
    return "hf"


TIED: dict[str, Callable[[Path], str]] = {
    "shared memory": in_memory,
    "metadata": in_metadata,
    "one name, and the task says": unnamed,
    "one name, and the settings say": unnamed_and_configured,
    "two equal copies": copied,
    "a folder of shards": shards,
}


def adapter(folder: Path, whole: dict[str, torch.Tensor], **settings: object) -> None:
    given = {"task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, **settings}
    save_adapter(folder, {**pair(Q, torch.ones(1, 6), torch.ones(4, 1)), **whole}, **given)


def merged(folder: Path, base: str) -> tuple[dict[str, torch.Tensor], Merged]:
    opened = ckpttool.open_adapter(folder / "adapter")
    with ckpttool.open(folder / base) as checkpoint, opened.checkpoint:
        new, report = ckpttool.merge_lora(checkpoint, opened)
        ckpttool.save(new, folder / "out.pt", force=True)
        ckpttool.save(new, folder / "out.safetensors", force=True)
    state = torch.load(folder / "out.pt", weights_only=True)
    for name, tensor in load_file(folder / "out.safetensors").items():
        assert torch.equal(tensor, state[name])
    return state, report


WHOLE = {
    "embedding": (["embed_tokens"], {EMBEDDING: NEW}, (NEW, OLD), [(OUTPUT,)]),
    "output": (["lm_head"], {OUTPUT: NEW}, (OLD, NEW), [(OUTPUT,), (EMBEDDING,)]),
    "both": (["embed_tokens", "lm_head"], {EMBEDDING: NEW, OUTPUT: NEW + 1}, (NEW, NEW + 1), None),
}


@pytest.mark.parametrize("which", WHOLE)
@pytest.mark.parametrize("kind", TIED)
def test_a_tied_layer_that_is_not_saved_keeps_its_values(kind: str, which: str, tmp_path: Path) -> None:
    modules, whole, wanted, untied = WHOLE[which]
    base = TIED[kind](tmp_path)
    adapter(tmp_path, whole, modules_to_save=modules)
    state, report = merged(tmp_path, base)
    assert torch.equal(state[EMBEDDING], wanted[0]) and torch.equal(state[OUTPUT], wanted[1])
    assert untied is None or report.untied in untied


@pytest.mark.parametrize("kind", TIED)
def test_peft_s_own_tie_stays(kind: str, tmp_path: Path) -> None:
    """`ensure_weight_tying` writes both names with the same values."""
    base = TIED[kind](tmp_path)
    settings = {"modules_to_save": ["embed_tokens", "model.embed_tokens"], "ensure_weight_tying": True}
    adapter(tmp_path, {EMBEDDING: NEW, OUTPUT: NEW.clone()}, **settings)
    state, report = merged(tmp_path, base)
    assert torch.equal(state[EMBEDDING], NEW)
    if OUTPUT in state:
        assert state[OUTPUT].data_ptr() == state[EMBEDDING].data_ptr()
    assert report.untied == ()


def test_a_tie_that_peft_was_asked_for_and_did_not_make_is_none(tmp_path: Path) -> None:
    """GPT-2: the adapter holds the embedding alone, and merging parts it from the output layer."""
    base = in_memory(tmp_path)
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    state, report = merged(tmp_path, base)
    assert torch.equal(state[OUTPUT], OLD)
    assert report.untied == (OUTPUT,)


@pytest.mark.parametrize("kind", ["shared memory", "metadata"])
def test_what_is_tied_to_an_updated_weight_follows_and_is_named(kind: str, tmp_path: Path) -> None:
    base = TIED[kind](tmp_path)
    factors = {"lora_embedding_A": torch.ones(1, 7), "lora_embedding_B": torch.ones(6, 1)}
    adapter(tmp_path, {f"model.embed_tokens.{name}": tensor for name, tensor in factors.items()})
    state, report = merged(tmp_path, base)
    assert state[OUTPUT].data_ptr() == state[EMBEDDING].data_ptr()
    assert torch.equal(state[OUTPUT], OLD + 1)
    assert (report.untied, report.followed) == ((), (OUTPUT,))


def test_an_updated_output_layer_and_an_embedding_that_is_saved_whole_part(tmp_path: Path) -> None:
    base = in_memory(tmp_path)
    factors = pair("lm_head", torch.ones(1, 6), torch.ones(7, 1))
    adapter(tmp_path, {EMBEDDING: NEW, **factors}, modules_to_save=["embed_tokens"])
    state, _ = merged(tmp_path, base)
    assert torch.equal(state[EMBEDDING], NEW)
    assert torch.equal(state[OUTPUT], OLD + 1)


def test_a_tie_inside_a_module_that_is_saved_whole_stays(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    tied = {"head.a.weight": weight, "head.b.weight": weight}
    torch.save({**tied, f"{Q}.weight": torch.ones(4, 6)}, tmp_path / "b.pt")
    adapter(tmp_path, {"head.a.weight": 2 * weight}, modules_to_save=["head"])
    state, report = merged(tmp_path, "b.pt")
    assert state["head.a.weight"].data_ptr() == state["head.b.weight"].data_ptr()
    assert torch.equal(state["head.b.weight"], 2 * weight)
    assert report.untied == ()


NOT_TIED: dict[str, dict[str, Any]] = {
    "the settings say so": {"config": {"tie_word_embeddings": False}},
    "no output layer of words": {"config": {"tie_word_embeddings": True}, "task_type": "SEQ_CLS"},
    "a model without a head": {"config": {"architectures": ["LlamaModel"]}, "task_type": None},
}


@pytest.mark.parametrize("case", NOT_TIED)
def test_a_base_that_is_not_tied_gets_no_output_layer(case: str, tmp_path: Path) -> None:
    settings = dict(NOT_TIED[case])
    base = unnamed(tmp_path)
    config(tmp_path, **settings.pop("config"))
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"], **settings)
    state, report = merged(tmp_path, base)
    assert OUTPUT not in state
    assert report.untied == ()


def test_layers_of_one_s_own_are_never_said_to_be_untied(tmp_path: Path) -> None:
    save_file({**base_state(), OUTPUT: OLD + 1}, tmp_path / "model.safetensors")
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"])
    state, report = merged(tmp_path, "model.safetensors")
    assert torch.equal(state[OUTPUT], OLD + 1)
    assert report.untied == ()


@pytest.mark.parametrize("case", ["nothing says", "another architecture"])
def test_a_layer_that_may_be_tied_is_refused(cli: Any, case: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    name = EMBEDDING if case == "nothing says" else "encoder.shared.weight"
    state = base_state()
    state[name] = state.pop(EMBEDDING)
    save_file(state, "base.safetensors")
    task = None if case == "nothing says" else "SEQ_2_SEQ_LM"
    adapter(tmp_path, {name: NEW}, modules_to_save=["embed_tokens", "shared"], task_type=task)
    with pytest.raises(Refused, match="does not name the layer that it may tie to it") as caught:
        merged(tmp_path, "base.safetensors")
    assert caught.value.hint is not None
    command = caught.value.hint.split(": ", 1)[1].split(", and merge", 1)[0]
    output = f"tied.safetensors --tie lm_head.weight={name}"
    assert command == f"ckpttool convert {tmp_path}/base.safetensors {output}"
    assert cli(*shlex.split(command)[1:]).code == 0
    state, report = merged(tmp_path, "tied.safetensors")
    assert torch.equal(state[OUTPUT], OLD)
    assert report.untied == (OUTPUT,)


def test_the_command_says_what_must_be_loaded_untied(cli: Any, tmp_path: Path) -> None:
    base = unnamed_and_configured(tmp_path)
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"])
    words = ["merge-lora", str(tmp_path / base), str(tmp_path / "adapter"), str(tmp_path / "out.pt")]
    done = cli(*words)
    assert 'no longer tied: set "tie_word_embeddings": false in config.json: lm_head.weight' in done.err
    assert json.loads(cli(*words, "--force", "--json").out)["untied"] == [OUTPUT]


def test_single_tokens_that_were_trained_take_the_place_of_their_rows(tmp_path: Path) -> None:
    base = unnamed(tmp_path)
    delta = {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.full((2, 6), 9.0)}
    adapter(tmp_path, delta, trainable_token_indices=[4, 1])
    state, report = merged(tmp_path, base)
    assert state[EMBEDDING][[1, 4]].eq(9).all()
    assert torch.equal(state[EMBEDDING][[0, 2, 3, 5, 6]], OLD[[0, 2, 3, 5, 6]])
    assert EMBEDDING in report.updated
    assert report.untied == ()


@pytest.mark.parametrize("indices", [None, [1], [1, 1], [1, 7], [-1, 2], ["1", 2], {"lm_head": [1, 2]}])
def test_tokens_that_no_setting_names_are_refused(indices: object, tmp_path: Path) -> None:
    base = unnamed(tmp_path)
    delta = {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 6)}
    adapter(tmp_path, delta, trainable_token_indices=indices)
    with pytest.raises(Damaged, match=r"does not say which 2 of 7 rows of 'model\.embed_tokens' are trained"):
        merged(tmp_path, base)


@pytest.mark.long
def test_many_saved_modules_and_many_tensors_take_no_time(tmp_path: Path) -> None:
    names = [f"model.layers.{number}.mlp.gate.weight" for number in range(4000)]
    save_file({**base_state(), **{name: torch.ones(1) for name in names}}, tmp_path / "model.safetensors")
    saved = [*(f"x{number}" for number in range(100_000)), "gate"]
    adapter(tmp_path, {name: torch.zeros(1) for name in names}, modules_to_save=saved)
    begun = time.process_time()
    opened = ckpttool.open_adapter(tmp_path / "adapter")
    with ckpttool.open(tmp_path / "model.safetensors") as checkpoint, opened.checkpoint:
        _, report = ckpttool.merge_lora(checkpoint, opened)
    assert len(report.replaced) == 4000
    assert time.process_time() - begun < 10


def test_settings_that_are_copied_along_say_that_the_model_is_not_tied(cli: Any, tmp_path: Path) -> None:
    base = shards(tmp_path)
    adapter(tmp_path, {EMBEDDING: NEW}, modules_to_save=["embed_tokens"])
    words = ("merge-lora", tmp_path / base, tmp_path / "adapter", f"{tmp_path / 'out'}/", "--companions")
    assert cli(*words).code == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    assert json.loads((tmp_path / base / "config.json").read_text())["tie_word_embeddings"] is True
