"""States whose values follow from names alone, so that a recorded checksum can say what they became."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

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
