"""LoRA adapters as PEFT saves them, without PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> None:
    """Save tensors, by the names that they have in the model, as the folder `adapter` of rank 2."""
    (folder / "adapter").mkdir(exist_ok=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))


def pair(layer: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the two factors of a layer's product by their names."""
    return {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
