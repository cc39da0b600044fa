"""GGUF files of llama.cpp under Hugging Face's names, by what their key-values say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.dialects import LLAMA, State, of_gguf, random_state
from tests.support.other_files import F32, Tensor, gguf_file
from tests.support.running import Cli

QWEN2 = ("attn_q", "attn_k", "attn_v")
QWEN3 = ("attn_q_norm", "attn_k_norm")
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 4}


def written(path: Path, state: State, architecture: str | None = "llama", **keys: Any) -> Path:
    """Write a GGUF; what is None in `keys` is left out."""
    said = {"block_count": 2, "embedding_length": 8, **HEADS, **keys}
    values: list[Any] = [(f"{architecture}.{key}", n) for key, n in said.items() if n is not None]
    tensors = {name: Tensor(F32, tuple(each.shape), each.numpy().tobytes()) for name, each in state.items()}
    path.write_bytes(
        gguf_file(tensors, [("general.architecture", architecture), *values] if architecture else [])
    )
    return path


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows as llama.cpp's conversion permutes those of Llama."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def mapped(cli: Cli, path: Path, *words: object) -> Mapping[str, torch.Tensor]:
    out = path.with_suffix(".safetensors")
    ran = cli("convert", path, out, "--map", "gguf-llama", "--force", *words)
    assert ran.code == 0, ran.err
    return load_file(out)


@pytest.mark.parametrize(
    ("architecture", "more"), [("llama", QWEN2), ("mistral", ()), ("qwen2", QWEN2), ("qwen3", QWEN3)]
)
def test_q_and_k_of_llama_are_permuted_and_of_no_other(
    architecture: str, more: tuple[str, ...], tmp_path: Path, cli: Cli
) -> None:
    state = random_state(of_gguf(*more))
    made = mapped(cli, written(tmp_path / "model.gguf", state, architecture))
    assert len(made) == len(state)
    for name, heads in (("q", 4), ("k", 2)):
        for end in ("weight", "bias") if "attn_q" in more else ("weight",):
            ours = made[f"model.layers.1.self_attn.{name}_proj.{end}"]
            theirs = permuted(ours, heads) if architecture == "llama" else ours
            assert torch.equal(theirs, state[f"blk.1.attn_{name}.{end}"])
    for theirs, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        *([("blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight")] if more is QWEN3 else []),
    ):
        assert torch.equal(made[ours], state[theirs])


def test_a_head_that_is_not_there_is_the_embeddings(tmp_path: Path, cli: Cli) -> None:
    state = random_state(of_gguf())
    del state["output.weight"]
    path = written(tmp_path / "model.gguf", state | {"rope_freqs.weight": torch.ones(2)})
    ran = cli("convert", path, tmp_path / "model.pt", "--map", "gguf-llama", "--json")
    assert "rope_freqs.weight" in ran.json["left_out"] and "rope_freqs.weight" in ran.json["dropped"]
    made = torch.load(tmp_path / "model.pt")
    assert made["lm_head.weight"].data_ptr() == made["model.embed_tokens.weight"].data_ptr()


def test_the_head_counts_are_the_file_s_and_else_the_config_s(tmp_path: Path, cli: Cli) -> None:
    state, out = random_state(of_gguf()), tmp_path / "out.safetensors"
    expected = mapped(cli, written(tmp_path / "model.gguf", state))
    path = written(tmp_path / "other.gguf", state, **dict.fromkeys(HEADS), embedding_length=None)
    ran = cli("convert", path, out, "--map", "gguf-llama")
    assert ran.code == 3 and "nothing says the number 'heads'" in ran.err
    assert "attention.head_count nor num_attention_heads" in ran.err
    said = {"num_attention_heads": 4, "num_key_value_heads": 2, "general.architecture": "qwen2"}
    (tmp_path / "heads.json").write_text(json.dumps(said))
    for name, tensor in mapped(cli, path, "--config", tmp_path / "heads.json").items():
        assert torch.equal(tensor, expected[name])  # what the file says of itself comes first
    wrong = written(tmp_path / "wrong.gguf", state, **{"attention.head_count": 2})
    ran = cli("convert", wrong, out, "--map", "gguf-llama")
    assert ran.code == 3 and "has 16 rows, not those of 2 heads of 4" in ran.err


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3moe", "mistral3", "phi3", None])
def test_other_architectures_are_refused_by_name(architecture: str | None, tmp_path: Path, cli: Cli) -> None:
    path = written(tmp_path / "model.gguf", random_state(of_gguf()), architecture)
    ran = cli("convert", path, tmp_path / "out.safetensors", "--map", "gguf-llama")
    assert ran.code == 3 and "the map is for llama, mistral, qwen2, qwen3" in ran.err
    said = f"is of '{architecture}' as" if architecture else "nothing says"
    assert f"{said} general.architecture" in ran.err
    assert not (tmp_path / "out.safetensors").exists()


def test_experts_and_a_missing_layer_are_refused_by_name(tmp_path: Path, cli: Cli) -> None:
    state = random_state(of_gguf())
    path = written(tmp_path / "a.gguf", state | {"blk.0.ffn_gate_exps.weight": torch.ones(2, 12, 8)})
    ran = cli("convert", path, tmp_path / "out.safetensors", "--map", "gguf-llama")
    assert ran.code == 3 and "'blk.0.ffn_gate_exps.weight'" in ran.err
    ran = cli(
        "convert",
        written(tmp_path / "b.gguf", state, block_count=3),
        tmp_path / "o.pt",
        "--map",
        "gguf-llama",
    )
    assert ran.code == 3 and "has 2 of 'i', and the config says 3" in ran.err


def test_packed_values_are_mapped_as_the_plain_ones_are(tmp_path: Path, cli: Cli) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    writer = gguf.GGUFWriter(tmp_path / "packed.gguf", "llama")
    for name, value in (("block_count", 1), ("attention.head_count", 4), ("attention.head_count_kv", 2)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.embedding_length", 64)
    shapes = {
        name.replace("blk.0", "blk.0"): shape for name, shape in of_gguf().items() if "blk.1" not in name
    }
    wide = {name: tuple({8: 64, 16: 64, 4: 16}.get(n, 32) for n in shape) for name, shape in shapes.items()}
    wide |= {"blk.0.attn_k.weight": (32, 64), "blk.0.attn_v.weight": (32, 64)}
    state, plain = random_state(wide), {}
    for name, tensor in state.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        raw = gguf.quantize(tensor.numpy(), kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        plain[name] = torch.from_numpy(np.array(gguf.dequantize(raw, kind)).reshape(tensor.shape))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    made = mapped(cli, tmp_path / "packed.gguf", "--dequantize")
    for name, heads in (("q", 4), ("k", 2)):
        ours = made[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert torch.equal(permuted(ours, heads), plain[f"blk.0.attn_{name}.weight"])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_transformers_loads_the_same_from_the_gguf_itself(kind: str, tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("gguf", reason="needs gguf")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    more = {"qwen2": QWEN2, "qwen3": QWEN3}.get(kind, ())
    keys = {"context_length": 32, "feed_forward_length": 12, "rope.dimension_count": 4, "vocab_size": 11}
    written(tmp_path / "model.gguf", random_state(of_gguf(*more)), kind, **keys)
    shape = LLAMA | {"intermediate_size": 12, "tie_word_embeddings": False}
    names = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "head_dim")
    names += ("vocab_size", "intermediate_size", "tie_word_embeddings")
    config = transformers.AutoConfig.for_model(kind, **{name: shape[name] for name in names})
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path, gguf_file="model.gguf", config=config).state_dict()
    made = mapped(cli, tmp_path / "model.gguf")
    assert made.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(made[name], tensor.float()), name


def test_what_became_safetensors_still_says_what_it_is(tmp_path: Path, cli: Cli) -> None:
    path = written(tmp_path / "model.gguf", random_state(of_gguf()))
    expected = mapped(cli, path)
    assert cli("convert", path, tmp_path / "same.safetensors").code == 0
    ran = cli("convert", tmp_path / "same.safetensors", tmp_path / "hf.safetensors", "--map", "gguf-llama")
    assert ran.code == 0, ran.err
    assert load_file(tmp_path / "hf.safetensors").keys() == expected.keys()
    save_file({"w": torch.ones(2)}, tmp_path / "none.safetensors")
    ran = cli("convert", tmp_path / "none.safetensors", tmp_path / "o.pt", "--map", "gguf-llama")
    assert ran.code == 3 and "nothing says general.architecture" in ran.err
