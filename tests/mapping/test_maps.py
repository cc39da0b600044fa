"""Each map that comes with the package: every bit there and back, and what the other program makes."""

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
from ckpttool.errors import Refused
from ckpttool.mapping.applying import apply, apply_map, config_of, maps, named, names
from ckpttool.mapping.rule_file import rules_in
from tests.support.comparing import opened
from tests.support.dialects import (
    CASES,
    ENDS,
    EXPERTS,
    GPT,
    LINEAR,
    LLAMA,
    MEGATRON,
    OF_LAYERS,
    State,
    adapter,
    assert_equal,
    assert_reversible,
    mapped,
    of_meta,
    random_state,
    refusal,
    resnet,
)

# ---- Each map that comes with the package: every bit there and back, and the layout by a formula of its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_way_there_and_back_is_the_identity(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name, shapes = CASES[case]
    state = random_state(shapes, dtype)
    there = assert_reversible(state, tmp_path, named(name), config=LLAMA)
    assert sum(each.numel() for each in there.values()) == sum(each.numel() for each in state.values())


def test_every_map_has_such_a_case_and_is_written_as_it_is_read() -> None:
    assert {name for name, _ in CASES.values()} | {"nanogpt-gpt2"} == {*names()}
    for each in maps():
        assert rules_in(each.to_toml()) == each
        assert each.inverse().inverse() == each
        assert each.start and each.end and each.source


# Layouts.


def hf_llama(meta: State) -> State:
    """Return the q and k of Meta's Llama as Hugging Face's rotate them, row by row."""
    new = {}
    for layer in range(2):
        for name, heads in (("q", 4), ("k", 2)):
            rows = meta[f"layers.{layer}.attention.w{name}.weight"]
            order = [head * 4 + 2 * p + half for head in range(heads) for half in (0, 1) for p in (0, 1)]
            new[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = rows[order]
    return new


@pytest.mark.parametrize("config", [LLAMA, {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}])
def test_meta_s_q_and_k_are_permuted_and_nothing_else_is(config: dict[str, int], tmp_path: Path) -> None:
    meta = random_state(of_meta() | {"output.weight": (11, 8)})
    made, _ = mapped(meta | {"rope.freqs": torch.ones(2)}, tmp_path, named("meta-llama"), config=config)
    assert_equal({name: made[name] for name in hf_llama(meta)}, hf_llama(meta))
    for mine, theirs in (("v_proj", "attention.wv"), ("o_proj", "attention.wo")):
        assert torch.equal(made[f"model.layers.1.self_attn.{mine}.weight"], meta[f"layers.1.{theirs}.weight"])
    for mine, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        assert torch.equal(
            made[f"model.layers.1.mlp.{mine}_proj.weight"], meta[f"layers.1.feed_forward.{theirs}.weight"]
        )
    assert "rope.freqs" not in made and torch.equal(made["lm_head.weight"], meta["output.weight"])


def test_numbers_of_another_model_are_refused(tmp_path: Path) -> None:
    meta, by = random_state(of_meta() | {"output.weight": (11, 8)}), named("meta-llama")
    wrong = LLAMA | {"num_attention_heads": 2}  # q divides by it, too
    said = refusal(meta, tmp_path, by, config=wrong)
    assert "'layers.0.attention.wq.weight' has 16 rows, not those of 2 heads of 4" in said
    assert "has 2 of 'i', and the config says 3" in refusal(
        meta, tmp_path, by, config=LLAMA | {"num_hidden_layers": 3}
    )
    said = refusal(meta, tmp_path, by, config={})
    assert "nothing says the number 'heads'" in said and "--config config.json" in said
    said = refusal(meta, tmp_path, by, config={"dim": 16})
    assert "the config has no n_heads nor num_attention_heads; [numbers]" in said


def test_the_wrong_way_and_the_wrong_map_are_said(tmp_path: Path) -> None:
    meta = random_state(of_meta() | {"output.weight": (11, 8)})
    there, _ = mapped(meta, tmp_path, named("meta-llama"), config=LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for value, inverse, said in (
        (there, False, "with --inverse the map takes them"),
        (meta, True, "without --inverse the map takes them"),
        (random_state({"conv1.weight": (4, 3)}), False, "is it Meta Llama (consolidated.*.pth)? --exclude"),
        ({f"module.{name}": tensor for name, tensor in there.items()}, False, "strip-prefix"),
        (there | {"model.norm.bias": torch.ones(8)}, True, "--exclude"),
    ):
        with opened(value, tmp_path) as checkpoint, pytest.raises(Refused) as refused:
            apply_map(checkpoint, "meta-llama", inverse=inverse)
        assert said in str(refused.value)


def test_a_tied_head_is_left_out_where_the_config_says_so_and_comes_back(tmp_path: Path) -> None:
    meta, config = random_state(of_meta()), LLAMA | {"tie_word_embeddings": True}
    meta["output.weight"] = meta["tok_embeddings.weight"].clone()
    there = assert_reversible(meta, tmp_path, named("meta-llama"), config=config)
    assert "lm_head.weight" not in there
    meta["output.weight"] += 1
    said = refusal(meta, tmp_path, named("meta-llama"), config=config)
    assert "'lm_head.weight' is not 'model.embed_tokens.weight' under another name" in said


def test_megatron_s_rows_lie_by_groups_of_heads(tmp_path: Path) -> None:
    state = random_state(OF_LAYERS)
    made, _ = mapped(state, tmp_path, named("megatron-hf"), config=LLAMA)
    fused = state["decoder.layers.1.self_attention.linear_qkv.weight"]
    # A group has the rows of two heads of q, one of k and one of v, four each.
    rows = {
        "q": [*range(8), *range(16, 24)],
        "k": [*range(8, 12), *range(24, 28)],
        "v": [*range(12, 16), *range(28, 32)],
    }
    for name, its in rows.items():
        assert torch.equal(made[f"model.layers.1.self_attn.{name}_proj.weight"], fused[its])
    bias = state["decoder.layers.1.self_attention.linear_qkv.bias"]
    assert torch.equal(made["model.layers.1.self_attn.v_proj.bias"], bias[rows["v"]])
    gate_up = state["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(made["model.layers.0.mlp.gate_proj.weight"], gate_up[:12])
    assert torch.equal(made["model.layers.0.mlp.up_proj.weight"], gate_up[12:])


def test_stacked_layers_are_the_same_as_layers_by_name(tmp_path: Path) -> None:
    apart = random_state(OF_LAYERS)
    layers = {name: [apart[f"decoder.layers.{i}.{name}"] for i in (0, 1)] for name in MEGATRON}
    stacked = {f"decoder.layers.{name}": torch.stack(pair) for name, pair in layers.items()}
    stacked |= {name: apart[name] for name in ENDS}
    of_engine = "decoder.layers.mlp.linear_fc1._extra_state"
    stacked |= {of_engine: torch.zeros(3), f"{of_engine}/shard_0_2": torch.zeros(3)}
    made = [
        mapped(state, tmp_path, named(name), config=LLAMA)[0]
        for state, name in ((apart, "megatron-hf"), (stacked, "megatron-stacked-hf"))
    ]
    assert_equal(*made)


def test_a_vocabulary_that_megatron_padded_is_refused_by_name(tmp_path: Path) -> None:
    said = refusal(random_state(OF_LAYERS), tmp_path, named("megatron-hf"), config=LLAMA | {"vocab_size": 10})
    assert "'embedding.word_embeddings.weight' has shape [11, 8], not [10, -1]" in said


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_s_linear_layers_are_transposed(bias: bool, tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in GPT.items() if bias or not name.endswith("bias")}
    state = random_state(shapes)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    masked = state | {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 5, 5) for i in (0, 1)}
    made, report = mapped({"model": masked, "model_args": {"n_layer": 2}}, tmp_path, named("nanogpt-gpt2"))
    assert report.dropped == ("transformer.h.0.attn.bias", "transformer.h.1.attn.bias")
    assert {*made["model"]} == {*state} - {"lm_head.weight"}
    for name, tensor in made["model"].items():
        is_linear = name.endswith(".weight") and any(f".{layer}." in name for layer in LINEAR)
        assert torch.equal(tensor, state[name].t() if is_linear else state[name]), name
    back, _ = mapped(made["model"], tmp_path, named("nanogpt-gpt2").inverse(), config=LLAMA)
    assert_equal(back, state)
    assert back["lm_head.weight"].data_ptr() == back["transformer.wte.weight"].data_ptr()


def test_the_experts_of_transformers_5_are_gate_before_up_expert_by_expert(tmp_path: Path) -> None:
    state = random_state(CASES["mixtral-v4-v5"][1])
    made, _ = mapped(state, tmp_path, named("mixtral-v4-v5"), config=LLAMA)
    expert = "model.layers.0.block_sparse_moe.experts.2."
    fused = made["model.layers.0.mlp.experts.gate_up_proj"][2]
    assert torch.equal(fused, torch.cat([state[f"{expert}w1.weight"], state[f"{expert}w3.weight"]]))
    assert torch.equal(made["model.layers.0.mlp.experts.down_proj"][2], state[f"{expert}w2.weight"])


# Neighbours.


@pytest.mark.parametrize(
    ("case", "lost", "said"),
    [
        ("meta-llama", "layers.1.attention.wv.weight", "finds no tensor for i = 1"),
        ("meta-llama", "layers.1.", "has 1 of 'i', and the config says 2"),
        ("meta-llama", "layers.0.", "has no 'i' = 0, and others up to 1"),
        ("meta-llama", "output.weight", "the rule 'output.weight' -> 'lm_head.weight' finds no tensor"),
        (
            "mixtral-v4-v5",
            "model.layers.0.block_sparse_moe.experts.2.",
            "has 2 of 'e', and the config says 3",
        ),
        ("mixtral-v4-v5", "model.layers.0.block_sparse_moe.experts.1.", "has no 'e' = 1"),
        (
            "mixtral-v4-v5",
            "model.layers.1.block_sparse_moe.experts.0.w3",
            "and no 'model.layers.1.block_sparse_moe.experts.0.w3.weight'",
        ),
        ("torchtitan-qwen3, experts", f"{EXPERTS}w2_EDF", "finds no tensor for i = 1"),
        ("megatron-hf", "decoder.layers.0.self_attention.linear_qkv.bias", "finds no tensor for i = 0"),
        ("timm-torchvision-resnet, bottleneck", "layer3.0.conv3.weight", "finds no tensor for l = 3, b = 0"),
        ("timm-torchvision-resnet, basic", "layer4.", "has 3 of 'l', and the config says 4"),
        (
            "timm-torchvision-resnet, basic",
            "layer2.0.bn2.running_var",
            "for l = 2, b = 0, m = bn2, p = running_var",
        ),
    ],
)
def test_what_is_missing_is_refused_by_name(case: str, lost: str, said: str, tmp_path: Path) -> None:
    name, shapes = CASES[case]
    state = random_state({key: shape for key, shape in shapes.items() if not key.startswith(lost)})
    assert said in refusal(state, tmp_path, named(name), config=LLAMA)


@pytest.mark.parametrize("odd", ["layer1.0.se.fc1.weight", "conv1.0.weight", "maxpool.1.filt"])
def test_a_resnet_that_torchvision_has_not_is_refused(odd: str, tmp_path: Path) -> None:
    state = random_state(resnet(2) | {odd: (1,)})
    assert f"no rule names 1 of 63 tensors: '{odd}'" in refusal(
        state, tmp_path, named("timm-torchvision-resnet")
    )


def test_a_wrapper_s_prefix_is_named(tmp_path: Path) -> None:
    state = {f"_orig_mod.{name}": tensor for name, tensor in random_state(GPT).items()}
    assert " OUT --prefix _orig_mod." in refusal(state, tmp_path, named("nanogpt-gpt2"))


# ---- What the maps make is what the other program makes of the same weights, or computes the same with


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
