"""What config.json says of a model's tensors: a mistake is named, and an odd but honest model is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool

EMBEDDINGS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.{}.mlp.experts.{}.weight"


def state(layers: Any = (0, 1, 2)) -> dict[str, torch.Tensor]:
    found = {LAYER.format(layer, expert): torch.ones(4, 4) for layer in layers for expert in range(2)}
    return {EMBEDDINGS: torch.ones(8, 4), **found, OUTPUT: torch.zeros(8, 4)}


def said(
    folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors", **config: Any
) -> list[str]:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / name)
    problems = ckpttool.verify(folder / name).problems
    assert {problem.kind for problem in problems} <= {"config"}
    return [problem.message for problem in problems]


def test_a_config_that_fits(tmp_path: Path) -> None:
    assert said(tmp_path, state()) == []
    assert said(tmp_path, {**state(), OUTPUT: torch.ones(8, 4)}, tie_word_embeddings=True) == []
    quantised = {**state(), "model.layers.0.q.qweight": torch.ones(2, 2, dtype=torch.int32)}
    assert said(tmp_path, quantised, quantization_config={"quant_method": "gptq"}) == []


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "words": ({"vocab_size": 9}, state(), "says vocab_size = 9, and the embeddings are of 8 tokens"),
    "words of the text": (
        {"vocab_size": 8, "text_config": {"vocab_size": 9}} | dict.fromkeys(["vocab_size"], 7),
        state(),
        "says vocab_size = 7, and the embeddings are of 8 tokens",
    ),
    "a layer": ({}, state((0, 2)), "says num_hidden_layers = 3, and there is no layer 1"),
    "the last layer": ({}, state((0, 1)), "says num_hidden_layers = 3, and there is no layer 2"),
    "a tie": (
        {"tie_word_embeddings": True},
        state(),
        "says tie_word_embeddings = true, and 'lm_head.weight' has other values than the embeddings",
    ),
    "no output": (
        {},
        {name: each for name, each in state().items() if name != OUTPUT},
        "says tie_word_embeddings = false, and there is no output layer",
    ),
    "packing": (
        {"quantization_config": {"quant_method": "gptq"}},
        state(),
        "says quantization_config (gptq), and no tensor is packed",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_config_that_does_not_fit(mistake: str, tmp_path: Path) -> None:
    config, tensors, message = MISTAKES[mistake]
    assert said(tmp_path, tensors, **config) == [message]
    assert said(tmp_path, tensors, "other.safetensors", **config) == []  # of which it says nothing


HONEST: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "layers that are shared": ({"num_hidden_layers": 12}, state((0,))),
    "more layers, for speculation": ({"num_hidden_layers": 2}, state()),
    "layers without numbers": ({}, {"a": torch.ones(2)}),
    "odd values": (
        {"vocab_size": "8", "num_hidden_layers": 10**30, "text_config": 7, "architectures": 7},
        state(),
    ),
    "an output of another name": (
        {},
        {**{n: t for n, t in state().items() if n != OUTPUT}, "embed_out.weight": torch.zeros(8, 4)},
    ),
}


@pytest.mark.parametrize("case", HONEST)
def test_an_odd_but_honest_model(case: str, tmp_path: Path) -> None:
    config, tensors = HONEST[case]
    assert said(tmp_path, tensors, **config) == []


def test_words_may_be_padded_where_no_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    save_file(state(), tmp_path / "model.safetensors")
    assert ckpttool.verify(tmp_path / "model.safetensors").ok


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    (problem,) = ckpttool.verify(tmp_path).problems
    assert "is not JSON" in problem.message
