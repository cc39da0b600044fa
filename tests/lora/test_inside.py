"""Adapters inside their base: a model in training, saved whole; folded, or taken out. PEFT is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, NothingToDo, Refused, Unsupported
from ckpttool.lora.inside import META, fold_lora, take_apart
from tests.support.comparing import saved

Tensors = dict[str, torch.Tensor]


class Net(torch.nn.Module):
    """An embedding whose table is the output's too, a layer, a convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(13, 6)
        self.up = torch.nn.Linear(6, 10)
        self.conv = torch.nn.Conv2d(6, 4, 3)
        self.score = torch.nn.Linear(6, 3)
        self.lm_head = torch.nn.Linear(6, 13, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"target_modules": ["up", "conv"], "r": 2, "lora_alpha": 3}),
    "rsLoRA with patterns": (
        "LoraConfig",
        {"target_modules": ["up", "conv"], "use_rslora": True, "r": 2, "lora_alpha": 3}
        | {"rank_pattern": {"up": 3}, "alpha_pattern": {"conv": 5}},
    ),
    "DoRA": ("LoraConfig", {"target_modules": ["up", "conv"], "r": 2, "use_dora": True}),
    "an embedding": ("LoraConfig", {"target_modules": ["embed_tokens"], "r": 2, "lora_alpha": 3}),
    "a module whole": ("LoraConfig", {"target_modules": ["up"], "r": 2, "modules_to_save": ["score"]}),
    "biases": ("LoraConfig", {"target_modules": ["up"], "r": 2, "bias": "all", "lora_bias": True}),
    "tokens": ("LoraConfig", {"target_modules": ["up"], "r": 2, "trainable_token_indices": [3, 1]}),
    "LoHa": ("LoHaConfig", {"target_modules": ["up", "conv"], "r": 2, "alpha": 3}),
    "LoKr": ("LoKrConfig", {"target_modules": ["up", "conv"], "r": 2, "alpha": 3}),
    "OFT": ("OFTConfig", {"target_modules": ["up"], "oft_block_size": 3}),
}


def model_of(folder: Path, case: str, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model with its adapter inside, and the settings beside it; return PEFT's model."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    kind, settings = SETTINGS[case]
    config = getattr(peft, kind)(**settings)
    model = peft.get_peft_model(Net().to(dtype), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(torch.randn_like(parameter) / 4)
    torch.save({"model": model.state_dict(), "epoch": 3}, folder / "whole.pt")
    config.save_pretrained(folder)
    return model


def folded(path: Path, **how: Any) -> Tensors:
    with ckpttool.open(path) as checkpoint:
        new, *_ = fold_lora(checkpoint, **how)
        ckpttool.save(new, path.with_name("out.pt"), force=True)
    held = torch.load(path.with_name("out.pt"), weights_only=True)
    found: Tensors = held.get("model", held)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SETTINGS)
def test_what_is_inside_is_folded_as_peft_merges_it(case: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, case, torch.float64)
    found, wanted = folded(tmp_path / "whole.pt"), model.merge_and_unload().state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-13, atol=1e-13)
    assert found["lm_head.weight"].data_ptr() == found["embed_tokens.weight"].data_ptr()
    assert torch.load(tmp_path / "out.pt")["epoch"] == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["LoRA", "DoRA", "a module whole", "rsLoRA with patterns"])
def test_what_is_taken_out_is_the_adapter_that_peft_saves(case: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, case)
    model.save_pretrained(tmp_path / "wanted")
    with ckpttool.open(tmp_path / "whole.pt") as checkpoint:
        base, adapter, others = take_apart(checkpoint)
        ckpttool.save_adapter(adapter.checkpoint, adapter.config, tmp_path / "taken")
        ckpttool.save(base, tmp_path / "base.pt")
    found, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("taken", "wanted"))
    assert others == ()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    again = ckpttool.open_adapter(tmp_path / "taken")
    with ckpttool.open(tmp_path / "base.pt") as opened, again.checkpoint:
        ckpttool.save(ckpttool.merge_lora(opened, again)[0], tmp_path / "merged.pt")
    assert ckpttool.diff(tmp_path / "merged.pt", _written(tmp_path)).same


def _written(folder: Path) -> Path:
    folded(folder / "whole.pt")
    return folder / "out.pt"
