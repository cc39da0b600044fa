"""Models as other programs name and lay them out, and states taken through rules between them."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.mapping.applying import Mapped, apply
from ckpttool.mapping.rule_file import rules_in
from ckpttool.mapping.rules import MapRules
from tests.support.comparing import loaded, opened, values

# ---- Small models as other programs name and lay them out: the shapes of their tensors, by map --------


# Two layers of width 8, with 4 heads of 4 rows (wider than the model), of which k and v have 2.
LLAMA: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"hidden_size": 8, "head_dim": 4, "vocab_size": 11, "num_experts": 3, "n_routed_experts": 3}
LLAMA |= {"num_local_experts": 3, "n_layer": 2, "general.architecture": "llama"}
Q, KV = 16, 8


def each_layer(count: int, *shapes: tuple[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name.replace("{i}", str(i)): shape for i in range(count) for name, shape in shapes}


def of_meta(q: str = "attention.wq", k: str = "attention.wk", v: str = "attention.wv") -> dict[str, Any]:
    """Return the names and shapes of Meta's Llama, and of torchtitan's where q, k and v are called so."""
    layer = ((f"{q}.weight", (Q, 8)), (f"{k}.weight", (KV, 8)), (f"{v}.weight", (KV, 8)))
    layer += (("attention.wo.weight", (8, Q)), ("feed_forward.w1.weight", (12, 8)))
    layer += (("feed_forward.w2.weight", (8, 12)), ("feed_forward.w3.weight", (12, 8)))
    layer += (("attention_norm.weight", (8,)), ("ffn_norm.weight", (8,)))
    ends = {"tok_embeddings.weight": (11, 8), "norm.weight": (8,)}
    return ends | each_layer(2, *((f"layers.{{i}}.{name}", shape) for name, shape in layer))


TITAN = of_meta(*(f"attention.qkv_linear.w{each}" for each in "qkv")) | {"lm_head.weight": (11, 8)}
NORMS = each_layer(2, *((f"layers.{{i}}.attention.{n}_norm.weight", (4,)) for n in "qk"))
EXPERTS = "layers.1.moe.routed_experts.inner_experts."
MOE = {f"{EXPERTS}w1_EFD": (3, 6, 8), f"{EXPERTS}w3_EFD": (3, 6, 8), f"{EXPERTS}w2_EDF": (3, 8, 6)}
MOE |= {"layers.1.moe.router.gate.weight": (3, 8)}
DENSE_FIRST = {name: shape for name, shape in TITAN.items() if not name.startswith("layers.1.feed_forward")}
LATENT = {name: shape for name, shape in DENSE_FIRST.items() if "qkv_linear" not in name}
LATENT |= each_layer(
    2,
    ("layers.{i}.attention.wkv_a.weight", (6, 8)),
    ("layers.{i}.attention.kv_norm.weight", (4,)),
    ("layers.{i}.attention.wkv_b.weight", (20, 4)),
    ("layers.{i}.attention.wq_a.weight", (5, 8)),
    ("layers.{i}.attention.q_norm.weight", (5,)),
    ("layers.{i}.attention.wq_b.weight", (Q, 5)),
)
LATENT |= {f"layers.1.moe.shared_experts.w{n}.weight": (6, 8) for n in (1, 3)}
LATENT |= {"layers.1.moe.shared_experts.w2.weight": (8, 6), "layers.1.moe.expert_bias_E": (3,)}

GPT = {"transformer.wte.weight": (11, 8), "transformer.wpe.weight": (5, 8), "lm_head.weight": (11, 8)}
GPT |= {f"transformer.ln_f.{p}": (8,) for p in ("weight", "bias")}
LINEAR = {"attn.c_attn": (24, 8), "attn.c_proj": (8, 8), "mlp.c_fc": (32, 8), "mlp.c_proj": (8, 32)}
GPT |= each_layer(2, *((f"transformer.h.{{i}}.{m}.weight", shape) for m, shape in LINEAR.items()))
GPT |= each_layer(2, *((f"transformer.h.{{i}}.{m}.bias", shape[:1]) for m, shape in LINEAR.items()))
GPT |= each_layer(
    2, *((f"transformer.h.{{i}}.{m}.{p}", (8,)) for m in ("ln_1", "ln_2") for p in ("weight", "bias"))
)

MEGATRON = {
    "self_attention.linear_qkv.weight": (Q + 2 * KV, 8),
    "self_attention.linear_qkv.bias": (Q + 2 * KV,),
    "self_attention.linear_qkv.layer_norm_weight": (8,),
    "self_attention.q_layernorm.weight": (4,),
    "self_attention.k_layernorm.weight": (4,),
    "self_attention.linear_proj.weight": (8, Q),
    "mlp.linear_fc1.layer_norm_weight": (8,),
    "mlp.linear_fc1.weight": (24, 8),
    "mlp.linear_fc2.weight": (8, 12),
}
ENDS = {"embedding.word_embeddings.weight": (11, 8), "output_layer.weight": (11, 8)}
ENDS |= {"decoder.final_layernorm.weight": (8,)}
OF_LAYERS = ENDS | each_layer(
    2, *((f"decoder.layers.{{i}}.{name}", shape) for name, shape in MEGATRON.items())
)
STACKED = ENDS | {f"decoder.layers.{name}": (2, *shape) for name, shape in MEGATRON.items()}


def of_experts(layer: str, *projections: str) -> dict[str, tuple[int, ...]]:
    """Return two layers of three experts each, in the names of transformers 4."""
    shapes = zip(projections, [(6, 8), (6, 8), (8, 6)], strict=True)
    each = [(f"{layer}.experts.{e}.{p}.weight", shape) for p, shape in shapes for e in range(3)]
    return each_layer(2, *each, (f"{layer}.gate.weight", (3, 8)))


def of_gguf(*more: str) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a Llama in a GGUF, with further tensors of each layer by their ends."""
    shapes = {"attn_q": (Q, 8), "attn_k": (KV, 8), "attn_v": (KV, 8), "attn_output": (8, Q)}
    shapes |= {"ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12)}
    layer = [(f"blk.{{i}}.{name}.weight", shape) for name, shape in shapes.items()]
    layer += [(f"blk.{{i}}.{name}.bias", shapes[name][:1]) for name in more if name in shapes]
    layer += [(f"blk.{{i}}.{name}.weight", (4,)) for name in more if name not in shapes]
    layer += [(f"blk.{{i}}.{name}_norm.weight", (8,)) for name in ("attn", "ffn")]
    ends = {"token_embd.weight": (11, 8), "output_norm.weight": (8,), "output.weight": (11, 8)}
    return ends | each_layer(2, *layer)


BATCHNORM = {f"{p}": (4,) for p in ("weight", "bias", "running_mean", "running_var")} | {
    "num_batches_tracked": ()
}


def resnet(depth: int) -> dict[str, tuple[int, ...]]:
    """Return a ResNet of one block a layer, of two or three convolutions."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (4, 3, 7, 7), "fc.weight": (5, 4), "fc.bias": (5,)}
    modules = ["bn1", "layer1.0.downsample.1"]
    for layer in range(1, 5):
        modules += [f"layer{layer}.0.bn{n + 1}" for n in range(depth)]
        shapes |= {f"layer{layer}.0.conv{n + 1}.weight": (4, 4, 3, 3) for n in range(depth)}
    shapes["layer1.0.downsample.0.weight"] = (4, 4, 1, 1)
    return shapes | {f"{module}.{p}": shape for module in modules for p, shape in BATCHNORM.items()}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama": ("meta-llama", of_meta() | {"output.weight": (11, 8)}),
    "gguf-llama": ("gguf-llama", of_gguf()),
    "gguf-llama, biases": (
        "gguf-llama",
        of_gguf("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    ),
    "torchtitan-llama3": ("torchtitan-llama3", TITAN),
    "torchtitan-qwen3": ("torchtitan-qwen3", TITAN | NORMS),
    "torchtitan-qwen3, experts": ("torchtitan-qwen3", DENSE_FIRST | NORMS | MOE),
    "torchtitan-deepseek-v3": ("torchtitan-deepseek-v3", LATENT | MOE),
    "megatron-hf": ("megatron-hf", OF_LAYERS),
    "megatron-stacked-hf": ("megatron-stacked-hf", STACKED),
    "mixtral-v4-v5": ("mixtral-v4-v5", of_experts("model.layers.{i}.block_sparse_moe", "w1", "w3", "w2")),
    "qwen3-moe-v4-v5": (
        "qwen3-moe-v4-v5",
        of_experts("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj") | {"model.norm.weight": (8,)},
    ),
    "timm-torchvision-resnet, basic": ("timm-torchvision-resnet", resnet(2)),
    "timm-torchvision-resnet, bottleneck": ("timm-torchvision-resnet", resnet(3)),
}


# ---- States whose values follow from names alone, so that a recorded checksum can say what they became


State = dict[str, torch.Tensor]


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of a tensor: noise that its name seeds, around 1 where it is a vector."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    made = torch.from_numpy(np.asarray(noise * np.float32(0.2) + np.float32(len(shape) == 1)))
    return made.abs() if name.endswith("running_var") else made


def filled(shapes: Mapping[str, Any]) -> State:
    """Return tensors of these shapes; an empty list with `int64` is a counter."""
    return {
        name: torch.zeros((), dtype=torch.int64) if shape == "counter" else value(name, tuple(shape))
        for name, shape in shapes.items()
    }


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.contiguous().numpy().tobytes())


def llama(layers: int = 2, rows: int = 50, dim: int = 16, hidden: int = 40, small: int = 8) -> State:
    """Return a Llama in the names of transformers."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, dim)}
    for number in range(layers):
        block = f"model.layers.{number}."
        for letter, size in zip("qkvo", (dim, small, small, dim), strict=True):
            shapes[f"{block}self_attn.{letter}_proj.weight"] = (size, dim)
        for name in ("gate", "up"):
            shapes[f"{block}mlp.{name}_proj.weight"] = (hidden, dim)
        shapes[f"{block}mlp.down_proj.weight"] = (dim, hidden)
        for name in ("input", "post_attention"):
            shapes[f"{block}{name}_layernorm.weight"] = (dim,)
    return filled({**shapes, "model.norm.weight": (dim,), "lm_head.weight": (rows, dim)})


def renamed(state: State, words: Mapping[str, str]) -> State:
    """Return a state with parts of its names in other words."""
    return {".".join(words.get(part, part) for part in name.split(".")): t for name, t in state.items()}


def fused(state: State) -> State:
    """Return a Llama with q, k and v in one layer, and gate and up in another."""
    joined = {"q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj"))}
    joined["gate_proj"] = ("gate_up_proj", ("gate_proj", "up_proj"))
    made: State = {}
    for name, tensor in state.items():
        layer = name.split(".")[-2]
        if layer in joined:
            new, parts = joined[layer]
            pieces = [state[name.replace(layer, part)] for part in parts]
            made[name.replace(layer, new)] = torch.cat(pieces)
        elif layer not in ("k_proj", "v_proj", "up_proj"):
            made[name] = tensor
    return made


META = {"model": "", "embed_tokens": "tok_embeddings", "self_attn": "attention", "mlp": "feed_forward"}
META |= {f"{letter}_proj": f"w{letter}" for letter in "qkvo"}
META |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "lm_head": "output"}
META |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}


def meta(state: State, heads: tuple[int, int] = (4, 2)) -> State:
    """Return a Llama in Meta's names: rows of queries and keys in pairs, not in halves."""
    made: State = {}
    for name, tensor in state.items():
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            count = heads[name.split(".")[-2] == "k_proj"]
            halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        parts = (META.get(part, part) for part in name.split("."))
        made[".".join(filter(None, parts))] = tensor.clone()
    return made


# ---- States taken through rules, from file to file; and what models of other programs call their tensors


def rules(*tables: str, top: str = 'rest = "refuse"') -> MapRules:
    """Return the rules that these texts describe, each a table of a rule file."""
    return rules_in("\n".join([top, *(f"[[rule]]\n{table}" for table in tables)]))


def mapped(value: Any, folder: Path, by: MapRules, **given: Any) -> tuple[Any, Mapped]:
    """Return what torch loads from a value that torch saved, after rules, and what they report."""
    with opened(value, folder) as checkpoint:
        new, report = apply(checkpoint, by, **given)
        return loaded(new, folder), report


def assert_reversible(state: Mapping[str, torch.Tensor], folder: Path, by: MapRules, **given: Any) -> State:
    """Return a state after rules; raise AssertionError unless the way back gives every bit again."""
    there: State = mapped(dict(state), folder, by, **given)[0]
    back = mapped(there, folder, by.inverse(), **given)[0]
    assert_equal(back, state)
    return there


def assert_equal(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Raise AssertionError unless two states have the same names, types, shapes and bits."""
    assert {*mine} == {*theirs}
    for name, tensor in theirs.items():
        assert (mine[name].dtype, mine[name].shape) == (tensor.dtype, tensor.shape), name
        assert values(mine[name]) == values(tensor), name


def random_state(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32) -> State:
    """Return random tensors, the same in each run."""
    torch.manual_seed(0)
    return {name: torch.randn(tuple(shape)).to(dtype) for name, shape in shapes.items()}


def refusal(value: Any, folder: Path, by: MapRules, **given: Any) -> str:
    """Return the message and the hint with which rules refuse a state."""
    try:
        mapped(value, folder, by, **given)
    except ckpttool.CkptToolError as error:
        return str(error)
    raise AssertionError("not refused")


# ---- torchtitan's own adapters to Hugging Face, without the rest of it, which few machines can import -


STUBS = ("protocols.model", "tools.logging", "models.common.rope", "models.common.decoder")


class _Empty(ModuleType):
    """A module in which every name is a class with nothing in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"Config": type("Config", (), {}), "__getattr__": lambda *_: print})


def adapter(model: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the adapter of `llama3`, `qwen3` or `deepseek_v3`, for two layers of which one has experts."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("torchtitan is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    folders = ("", "protocols", "tools", "models", "models.common", f"models.{model}")
    for name in (*folders, *STUBS, f"models.{model}.model"):
        full = f"torchtitan.{name}".rstrip(".")
        module = _Empty(full)
        module.__path__, module.__spec__ = [], ModuleSpec(full, None)
        monkeypatch.setitem(sys.modules, full, module)
    for name in ("protocols.state_dict_adapter", "models.utils", f"models.{model}.state_dict_adapter"):
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        found = importlib.util.spec_from_file_location(f"torchtitan.{name}", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        monkeypatch.setitem(sys.modules, f"torchtitan.{name}", module)
        found.loader.exec_module(module)
    attention = SimpleNamespace(n_heads=4, n_kv_heads=2, head_dim=4, q_lora_rank=5)
    layers = [SimpleNamespace(attention=attention, moe=moe) for moe in (None, SimpleNamespace(num_experts=3))]
    config = SimpleNamespace(layers=layers, dim=8, enable_weight_tying=False)
    kind = next(
        each
        for name, each in vars(module).items()
        if name.lower().startswith(model.replace("_", "")) and name.endswith("Adapter")
    )
    return kind(config, None)
