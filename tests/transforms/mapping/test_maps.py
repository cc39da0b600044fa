"""Each map that comes with the package: every bit there and back, and the layout by a formula of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckpttool.errors import Refused
from ckpttool.transforms.mapping.applying import apply_map
from ckpttool.transforms.mapping.builtin import maps, named, names
from ckpttool.transforms.mapping.rule_file import rules_in
from tests.support.dialects import (
    CASES,
    ENDS,
    EXPERTS,
    GPT,
    LINEAR,
    LLAMA,
    MEGATRON,
    OF_LAYERS,
    of_meta,
    resnet,
)
from tests.support.mapped import State, assert_equal, assert_reversible, mapped, random_state, refusal
from tests.support.saved import opened


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
    assert "strip-prefix IN OUT --prefix _orig_mod." in refusal(state, tmp_path, named("nanogpt-gpt2"))
