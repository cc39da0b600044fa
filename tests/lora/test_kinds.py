"""Adapters of other kinds than two factors: PEFT's `merge_and_unload` is the oracle of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, Unsupported
from tests.support.comparing import saved

peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

# PEFT computes in the type of the weights, and rounds after each step; here they are rounded once, from
# float64. So they differ by a few roundings of that type, of numbers up to about 4.
NEAR = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}


class Net(torch.nn.Module):
    """Layers of each kind that adapters change, the output tied to the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(13, 6)
        self.up = torch.nn.Linear(6, 10)
        self.conv1 = torch.nn.Conv1d(6, 8, 3)
        self.conv2 = torch.nn.Conv2d(6, 4, 3)
        self.conv3 = torch.nn.Conv3d(6, 4, (1, 2, 3))
        self.lm_head = torch.nn.Linear(6, 13, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


def lora(*targets: str, **settings: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(target_modules=[*targets], r=2, lora_alpha=3, **settings)


def of(kind: str, *targets: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, kind)(target_modules=[*targets], **settings)


CONVOLUTIONS = ("conv1", "conv2", "conv3")
KINDS: dict[str, Callable[[], Any]] = {
    "DoRA": lora("up", *CONVOLUTIONS, use_dora=True),
    "DoRA of an embedding": lora("embed_tokens", use_dora=True),
    "DoRA with rsLoRA and patterns": lora(
        "up", "conv2", use_dora=True, use_rslora=True, rank_pattern={"up": 3}, alpha_pattern={"conv2": 7}
    ),
    "three convolutions": lora(*CONVOLUTIONS),
    "a bias of the factors": lora("up", lora_bias=True, use_rslora=True),
    "the layers' own biases": lora("up", "conv2", bias="lora_only"),
    "LoHa": of("LoHaConfig", "up", "conv1", "conv2", r=2, alpha=3, rank_pattern={"up": 4}),
    "LoHa with cores": of("LoHaConfig", "conv1", "conv2", r=2, alpha=3, use_effective_conv2d=True),
    "LoKr": of("LoKrConfig", "up", "conv1", "conv2", r=1, alpha=3, alpha_pattern={"up": 5}),
    "LoKr of factors": of("LoKrConfig", "up", "conv2", r=1, alpha=3, decompose_both=True),
    "LoKr with cores": of("LoKrConfig", "conv2", r=1, alpha=3, use_effective_conv2d=True),
    "LoKr whole": of("LoKrConfig", "up", "conv2", r=64, alpha=3),
    **{
        f"OFT of {terms} terms": of(
            "OFTConfig", "up", "conv2", oft_block_size=3, num_cayley_neumann_terms=terms
        )
        for terms in (1, 2, 3, 4, 5, 7)
    },
    "OFT": of("OFTConfig", "up", "conv2", oft_block_size=3, use_cayley_neumann=False),
    "trained tokens": lora("up", trainable_token_indices=[11, 0, 3]),
    "trained tokens by name": lora("up", trainable_token_indices={"embed_tokens": [5, 1]}),
    "trained tokens alone": of("TrainableTokensConfig", "embed_tokens", token_indices=[4, 12]),
}


def trained(config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a base and an adapter whose parameters are random; return PEFT's model."""
    torch.manual_seed(0)
    base = Net().to(dtype)
    torch.save(base.state_dict(), folder / "base.pt")
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(torch.randn_like(parameter) / 4)
            elif parameter.requires_grad:
                parameter.mul_(1 + torch.rand_like(parameter))
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return model


def merge(folder: Path) -> dict[str, torch.Tensor]:
    adapter = ckpttool.open_adapter(folder / "adapter")
    with ckpttool.open(folder / "base.pt") as base, adapter.checkpoint:
        new, _ = ckpttool.merge_lora(base, adapter)
        ckpttool.save(new, folder / "out.pt", force=True)
    return torch.load(folder / "out.pt", weights_only=True)


def require_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name], tensor, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_what_peft_merges(kind: str, tmp_path: Path) -> None:
    model = trained(KINDS[kind](), tmp_path, torch.float64)
    before, found = torch.load(tmp_path / "base.pt"), merge(tmp_path)
    wanted = model.merge_and_unload().state_dict()
    require_near(found, wanted, torch.float64)
    is_still = kind == "OFT of 1 terms"
    assert is_still or any(not torch.equal(found[name], before[name]) for name in before)
    assert found["lm_head.weight"].data_ptr() == found["embed_tokens.weight"].data_ptr()


# In float32, bfloat16 and float16 PEFT computes in that type.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["DoRA", "LoHa", "LoKr", "OFT of 5 terms", "trained tokens"])
def test_other_types_are_rounded_once(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = trained(KINDS[kind](), tmp_path, dtype)
    require_near(merge(tmp_path), model.merge_and_unload().state_dict(), dtype)


REFUSED: dict[str, tuple[str, dict[str, Any], type[CkptToolError], str]] = {
    "blocks of OFT that are one": ("OFT", {"block_share": True}, Unsupported, "OFT with block_share"),
    "OFT with constraints": ("OFT", {"coft": True}, Unsupported, "OFT with coft"),
    "OFT of Conv1D": ("OFT", {"fan_in_fan_out": True}, Unsupported, "OFT with fan_in_fan_out"),
    "no number of terms": (
        "OFT of 5 terms", {"num_cayley_neumann_terms": "5"}, Damaged, "says terms = '5', which is no"
    ),
    "another rank": ("LoHa", {"rank_pattern": {}}, Damaged, "factors of 'up' of shapes .* says rank 2"),
    "no alpha": ("LoKr", {"alpha": 0}, Damaged, "says alpha = 0, which is no finite positive number"),
    "another type": ("LoKr", {"peft_type": "VERA"}, Unsupported, "type VERA, and those that are merged are"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_formula_is_known_of_is_refused_by_name(case: str, tmp_path: Path) -> None:
    kind, settings, error, said = REFUSED[case]
    trained(KINDS[kind](), tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(error, match=said):
        merge(tmp_path)
    assert not (tmp_path / "out.pt").exists()


def test_oft_as_older_versions_of_peft_wrote_it_is_refused(tmp_path: Path) -> None:
    """Those computed the transform itself, which new ones take for the series."""
    trained(KINDS["OFT"](), tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    said = json.loads(path.read_text())
    del said["use_cayley_neumann"]
    path.write_text(json.dumps(said))
    with pytest.raises(Unsupported, match="no word of use_cayley_neumann"):
        merge(tmp_path)


@pytest.mark.parametrize("lacking", ["up.hada_w1_b", "up.hada_w2_a"])
def test_a_factor_that_is_missing_is_damage(lacking: str, tmp_path: Path) -> None:
    trained(KINDS["LoHa"](), tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    held = load_file(file)
    del held[f"base_model.model.{lacking}"]
    save_file(held, file)
    with pytest.raises(Damaged, match="only one of the two factors of 'up'"):
        merge(tmp_path)


# ---- The same kinds under kohya's and ComfyUI's names, which no library here merges: by formula


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


W, BIAS, KERNEL = random(6, 4), random(6), random(6, 4, 3, 3)
UP, DOWN, MID = random(6, 2), random(2, 4), random(2, 2, 3, 3)
Parts = Mapping[str, torch.Tensor]


def decomposed(weight: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    return norms.reshape(-1, 1) * weight / weight.norm(dim=1, keepdim=True)


HADA = {f"hada_w{n}_{end}": random(*shape) for n in "12" for end, shape in (("a", (6, 2)), ("b", (2, 4)))}
TURNED = {f"hada_w{n}_{end}": random(2, size) for n in "12" for end, size in (("a", 6), ("b", 4))}
CORES = {"hada_t1": random(2, 2, 3, 3), "hada_t2": random(2, 2, 3, 3)}
KRON = {"lokr_w1": random(2, 2), "lokr_w2": random(3, 2)}
FACTORED = {"lokr_w1": random(2, 2), "lokr_w2_a": random(3, 1), "lokr_w2_b": random(1, 2)}
TUCKER = "ijkl,ip,jr->prkl"
NORMS = random(6, 1).abs() + 1
HALF = torch.tensor(1.0)  # alpha, of rank 2

NAMED: dict[str, tuple[Parts, torch.Tensor, torch.Tensor]] = {
    "DoRA": (
        {"lora_up.weight": UP, "lora_down.weight": DOWN, "dora_scale": NORMS, "alpha": HALF},
        W, decomposed(W + UP @ DOWN / 2, NORMS),
    ),
    "LoCon of three factors": (
        {"lora_up.weight": UP[..., None, None], "lora_down.weight": DOWN[..., None, None]}
        | {"lora_mid.weight": MID},
        KERNEL, KERNEL + torch.einsum(TUCKER, MID, UP.T, DOWN),
    ),
    "LoHa": (
        {**HADA, "alpha": HALF},
        W, W + (HADA["hada_w1_a"] @ HADA["hada_w1_b"]) * (HADA["hada_w2_a"] @ HADA["hada_w2_b"]) / 2,
    ),
    "LoHa with cores": (
        {**TURNED, **CORES},
        KERNEL, KERNEL + torch.einsum(TUCKER, CORES["hada_t1"], TURNED["hada_w1_a"], TURNED["hada_w1_b"])
        * torch.einsum(TUCKER, CORES["hada_t2"], TURNED["hada_w2_a"], TURNED["hada_w2_b"]),
    ),
    "LoKr whole, which is not scaled": (
        {**KRON, "alpha": HALF}, W, W + torch.kron(KRON["lokr_w1"], KRON["lokr_w2"]),
    ),
    "LoKr": (
        {**FACTORED, "alpha": HALF / 4},
        W, W + torch.kron(FACTORED["lokr_w1"], FACTORED["lokr_w2_a"] @ FACTORED["lokr_w2_b"]) / 4,
    ),
    "LoKr of a kernel": (
        {"lokr_w1": KRON["lokr_w1"], "lokr_w2": random(3, 2, 3, 3)}, KERNEL, torch.zeros(()),
    ),
    "a difference": ({"diff": UP @ DOWN}, W, W + UP @ DOWN),
    "a difference of a norm": ({"w_norm": BIAS, "b_norm": BIAS * 3}, BIAS, BIAS * 2),
}  # fmt: skip
KRONED = NAMED["LoKr of a kernel"]
NAMED["LoKr of a kernel"] = (
    *KRONED[:2],
    KERNEL + torch.kron(KRONED[0]["lokr_w1"][..., None, None], KRONED[0]["lokr_w2"].contiguous()),
)


@pytest.mark.parametrize("begin", ["lora_unet_{}", "diffusion_model.{}"])
@pytest.mark.parametrize("kind", NAMED)
def test_other_names_of_the_kinds_are_merged_too(kind: str, begin: str, tmp_path: Path) -> None:
    parts, weight, wanted = NAMED[kind]
    held = {f"{begin.format('fc')}.{name}": part.contiguous() for name, part in parts.items()}
    save_file({**held, f"{begin.format('proj')}.diff_b": BIAS * 2}, tmp_path / "adapter")
    base = {"fc.weight": weight, "fc.bias": BIAS, "proj.weight": W, "proj.bias": BIAS}
    saved({name: tensor.clone() for name, tensor in base.items()}, tmp_path / "base.pt")
    found = merge(tmp_path)
    torch.testing.assert_close(found["fc.weight"], wanted)
    torch.testing.assert_close(found["proj.bias"], BIAS * 3)
    torch.testing.assert_close(found["fc.bias"], BIAS * (4 if "b_norm" in parts else 1))
    assert torch.equal(found["proj.weight"], W)


ODD = {
    "a matrix without axes": ({"lokr_w1": torch.ones(()), "lokr_w2": random(6, 4)}, W),
    "a core of one axis": ({**TURNED, **CORES, "hada_t1": random(2)}, KERNEL),
    "factors of other ranks": ({**HADA, "hada_w2_a": random(6, 3)}, W),
    "factors without axes": ({**HADA, "hada_w1_b": torch.ones(())}, W),
    "a difference of another size": ({"diff": random(5, 4)}, W),
    "a Kronecker product of another size": ({"lokr_w1": random(3, 2), "lokr_w2": random(3, 2)}, W),
    "norms of no row": ({"lora_up.weight": UP, "lora_down.weight": DOWN, "dora_scale": torch.ones(())}, W),
}


@pytest.mark.parametrize("case", ODD)
def test_parts_of_odd_shapes_are_refused_by_name(case: str, tmp_path: Path) -> None:
    parts, weight = ODD[case]
    save_file({f"lora_unet_fc.{name}": part for name, part in parts.items()}, tmp_path / "adapter")
    saved({"fc.weight": weight.clone()}, tmp_path / "base.pt")
    with pytest.raises(CkptToolError, match="fc") as fault:
        merge(tmp_path)
    assert fault.value.exit_code == 3
    assert not (tmp_path / "out.pt").exists()
