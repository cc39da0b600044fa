"""Packed tensors and LoRA adapters as files, as others save them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.numbers.dequantize import Dequantized, dequantize

# ---- Packed tensors as files: written with the settings beside them, and made plain -------------------


Tensors = Mapping[str, torch.Tensor]


def written(
    folder: Path,
    tensors: Tensors,
    section: Mapping[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
    **model: Any,
) -> Path:
    """Write tensors as safetensors, with a config.json that has the section `quantization_config`."""
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    if section is not None:
        (folder / "config.json").write_text(json.dumps({**model, "quantization_config": section}))
    return path


def plain(path: Path, dtype: str | None = None) -> tuple[dict[str, torch.Tensor], Dequantized]:
    """Return the tensors of a file after they were made plain, and the report."""
    out = path.with_name("plain.safetensors")
    with ckpttool.open(path) as checkpoint:
        new, report = dequantize(checkpoint, dtype=DTYPES[dtype] if dtype else None)
        ckpttool.save(new, out, force=True)
    return load_file(out), report


def weight(
    folder: Path, tensors: Tensors, section: Mapping[str, Any] | None = None, **given: Any
) -> torch.Tensor:
    """Return the one tensor that others become."""
    (tensor,) = plain(written(folder, tensors, section, **given))[0].values()
    return tensor


def refusal(folder: Path, tensors: Tensors, section: Mapping[str, Any] | None = None) -> str:
    """Return what is said of tensors that can't be made plain."""
    try:
        plain(written(folder, tensors, section))
    except ckpttool.CkptToolError as error:
        assert error.exit_code == 3
        return str(error)
    raise AssertionError("they became plain")


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two float tensors are of one type and have the same bits."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(bits), other.contiguous().view(bits))


def packed_words(codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Return codes as a stream of bits in int32 words along an axis, by the plainest of loops."""
    rows = codes.movedim(axis, 1).tolist()
    words = []
    for row in rows:
        stream = sum(code << bits * place for place, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        words.append([(stream >> 32 * i) % 2**32 for i in range(count)])
    signed = torch.tensor(words, dtype=torch.int64)
    signed = torch.where(signed >= 2**31, signed - 2**32, signed)
    return signed.to(torch.int32).movedim(1, axis)


# ---- LoRA adapters as PEFT saves them, without PEFT ---------------------------------------------------


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
