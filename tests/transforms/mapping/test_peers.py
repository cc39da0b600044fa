"""What the maps make is what the other program makes of the same weights, or computes the same with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import ckpttool
from ckpttool.transforms.mapping.applying import apply, config_of
from ckpttool.transforms.mapping.builtin import named
from tests.support.dialects import CASES, GPT, LLAMA, of_meta
from tests.support.mapped import State, assert_equal, mapped, random_state
from tests.support.titan import adapter

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """Return heads [length, heads, size] whose neighbouring numbers are turned as one complex number."""
    size = x.shape[-1]
    angles = torch.outer(torch.arange(len(x)).float(), theta ** -(torch.arange(0, size, 2).float() / size))
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], size // 2, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).reshape(x.shape)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of heads [length, heads, size], of which k and v may have fewer."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    length = len(q)
    scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def meta_llama(w: State, tokens: torch.Tensor) -> torch.Tensor:
    """Compute what Meta's Llama computes, under its names."""
    x = w["tok_embeddings.weight"][tokens]
    for i in range(2):
        layer = {name.removeprefix(f"layers.{i}."): each for name, each in w.items()}
        h = rms_norm(x, layer["attention_norm.weight"])
        q, k, v = ((h @ layer[f"attention.w{n}.weight"].t()).unflatten(-1, (-1, 4)) for n in ("q", "k", "v"))
        x = x + attended(rotated(q), rotated(k), v) @ layer["attention.wo.weight"].t()
        h = rms_norm(x, layer["ffn_norm.weight"])
        gate, up = (h @ layer[f"feed_forward.w{n}.weight"].t() for n in (1, 3))
        x = x + (F.silu(gate) * up) @ layer["feed_forward.w2.weight"].t()
    return rms_norm(x, w["norm.weight"]) @ w["output.weight"].t()


def nanogpt(w: State, tokens: torch.Tensor) -> torch.Tensor:
    """Compute what nanoGPT computes, with two heads of 4."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (8,), w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: len(tokens)]
    for i in range(2):
        at = f"transformer.h.{i}"
        parts = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").split(8, -1)
        x = x + linear(attended(*(part.unflatten(-1, (2, 4)) for part in parts)), f"{at}.attn.c_proj")
        h = F.gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate="tanh")
        x = x + linear(h, f"{at}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].t()


def loaded_by(kind: Any, config: Any, state: State) -> Any:
    """Return a model of transformers with these weights, all of which it must have, and no others."""
    model = kind(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert ({*missing} - tied, unexpected) == (set(), [])
    model.tie_weights()
    return model


def test_meta_s_llama_computes_the_same_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    meta = random_state(of_meta() | {"output.weight": (11, 8)})
    made, _ = mapped(meta, tmp_path, named("meta-llama"), config=LLAMA)
    given = {key: value for key, value in LLAMA.items() if "expert" not in key and key != "n_layer"}
    config = transformers.LlamaConfig(
        **given, intermediate_size=12, rms_norm_eps=1e-6, max_position_embeddings=16
    )
    with torch.no_grad():
        theirs = loaded_by(transformers.LlamaForCausalLM, config, made)(TOKENS).logits[0]
    torch.testing.assert_close(theirs, meta_llama(meta, TOKENS[0]), rtol=1e-4, atol=1e-4)
    wrong = {**made, "model.layers.0.self_attn.q_proj.weight": meta["layers.0.attention.wq.weight"]}
    with torch.no_grad():  # without the permutation it computes something else
        theirs = loaded_by(transformers.LlamaForCausalLM, config, wrong)(TOKENS).logits[0]
    assert not torch.allclose(theirs, meta_llama(meta, TOKENS[0]), rtol=1e-2, atol=1e-2)


def test_nanogpt_computes_the_same_as_gpt_2_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    state = random_state(GPT)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    made, _ = mapped(state, tmp_path, named("nanogpt-gpt2"), config=LLAMA)
    config = transformers.GPT2Config(vocab_size=11, n_positions=5, n_embd=8, n_layer=2, n_head=2)
    with torch.no_grad():
        theirs = loaded_by(transformers.GPT2LMHeadModel, config, made)(TOKENS).logits[0]
    torch.testing.assert_close(theirs, nanogpt(state, TOKENS[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Mixtral", "mixtral-v4-v5"), ("Qwen3Moe", "qwen3-moe-v4-v5"), ("DeepseekV3", "qwen3-moe-v4-v5")],
)
def test_transformers_reads_and_writes_the_experts_as_the_map_does(
    kind: str, name: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", "5.0")
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 11,
    }
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 12, "moe_intermediate_size": 6, "head_dim": 4}
    sizes |= {"num_experts": 3, "num_local_experts": 3, "n_routed_experts": 3, "n_group": 1, "topk_group": 1}
    sizes |= {"num_experts_per_tok": 2, "kv_lora_rank": 4, "q_lora_rank": 4, "first_k_dense_replace": 1}
    sizes |= {"qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 4, "pad_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "v4")  # in the names of transformers 4, which are those of the hub
    with ckpttool.open(tmp_path / "v4") as checkpoint:
        settings = config_of(checkpoint)
        made, _ = apply(checkpoint, named(name), config=settings)
        ckpttool.save(made, tmp_path / "v5.safetensors")
    assert_equal(load_file(tmp_path / "v5.safetensors"), {**model.state_dict()})
    with ckpttool.open(tmp_path / "v5.safetensors") as checkpoint:
        back, _ = apply(checkpoint, named(name).inverse(), config=settings)
        ckpttool.save(back, tmp_path / "back.safetensors")
    assert_equal(load_file(tmp_path / "back.safetensors"), whole(tmp_path / "v4"))


def whole(folder: Path) -> State:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.parametrize("model", ["resnet18", "resnext50_32x4d"])
def test_a_resnet_of_timm_computes_the_same_in_torchvision(model: str, tmp_path: Path) -> None:
    timm, torchvision = pytest.importorskip("timm"), pytest.importorskip("torchvision")
    torch.manual_seed(0)
    theirs = timm.create_model(model, num_classes=3).eval()
    made, _ = mapped(theirs.state_dict(), tmp_path, named("timm-torchvision-resnet"))
    mine = getattr(torchvision.models, model)(num_classes=3).eval()
    mine.load_state_dict(made)
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(mine(image), theirs(image))


@pytest.mark.parametrize("model", ["resnet18d", "seresnet18", "resnet50_gn"])
def test_timm_s_other_resnets_are_refused(model: str, tmp_path: Path) -> None:
    state = pytest.importorskip("timm").create_model(model, num_classes=3).state_dict()
    with pytest.raises(ckpttool.errors.Refused):
        mapped(state, tmp_path, named("timm-torchvision-resnet"))


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("llama3", "torchtitan-llama3"),
        ("qwen3", "torchtitan-qwen3"),
        ("qwen3", "torchtitan-qwen3, experts"),
        ("deepseek_v3", "torchtitan-deepseek-v3"),
    ],
)
def test_torchtitan_s_own_adapter_makes_the_same(
    model: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = adapter(model, monkeypatch)
    name, shapes = CASES[case]
    state = random_state(shapes)
    made, _ = mapped(state, tmp_path, named(name), config=LLAMA)
    assert_equal(made, theirs.to_hf(dict(state)))


def test_a_model_that_transformers_saved_goes_to_megatron_and_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(**sizes, intermediate_size=12, vocab_size=11, tie_word_embeddings=True)
    model = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    said: Mapping[str, Any] = json.loads((tmp_path / "hf" / "config.json").read_text())
    state = whole(tmp_path / "hf")
    assert "lm_head.weight" not in state
    for name in ("megatron-hf", "megatron-stacked-hf"):
        there, _ = mapped(state, tmp_path, named(name).inverse(), config=said)
        assert "output_layer.weight" not in there  # Megatron shares the embeddings, too
        back, _ = mapped(there, tmp_path, named(name), config=said)
        assert_equal(back, state)
