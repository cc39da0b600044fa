"""Small models as other programs name and lay them out: the shapes of their tensors, by map."""

from __future__ import annotations

from typing import Any

# Two layers of width 8, with 4 heads of 4 rows (wider than the model), of which k and v have 2.
LLAMA: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"hidden_size": 8, "head_dim": 4, "vocab_size": 11, "num_experts": 3, "n_routed_experts": 3}
LLAMA |= {"num_local_experts": 3, "n_layer": 2}
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
