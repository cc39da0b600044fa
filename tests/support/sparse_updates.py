"""Sparse updates as prime-rl and TRL wrote them: places and values of what changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def changed(old: Tensors, new: Tensors) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the flat places at which tensors differ, and the values there."""
    places = {name: (new[name] != old[name]).reshape(-1).nonzero().reshape(-1).int() for name in new}
    return {name: (at, new[name].reshape(-1)[at.long()]) for name, at in places.items() if len(at)}


def prime_rl(folder: Path, base_step: int, old: Tensors, new: Tensors, **change: Any) -> None:
    """Write the folder `step_12`, whose entries may say something else than is true."""
    folder.mkdir(parents=True)
    patch, listed = Tensors(), list[dict[str, Any]]()
    for number, (name, (places, values)) in enumerate(changed(old, new).items()):
        keys = {"indices": f"tensor_{number}.indices", "values": f"tensor_{number}.values"}
        patch |= {keys["indices"]: places, keys["values"]: values}
        total = int(torch.hash_tensor(places).item()) ^ int(torch.hash_tensor(values).item())
        about = {"name": name, "shape": [*new[name].shape], "dtype": str(values.dtype)[6:], **keys}
        about |= {"numel": new[name].numel(), "changed_numel": len(places), "checksum": total}
        listed.append(about | change)
    save_file(patch, folder / "sparse_update_patch.safetensors", metadata={"format": "pt"})
    step = int("".join(filter(str.isdigit, folder.name)))
    said = {"format": "prime-rl-sparse-update", "version": 1, "step": step, "base_step": base_step}
    said |= {"compute_dtype": "bfloat16", "compressed": False, "tensors": listed}
    said["patch_file"] = "sparse_update_patch.safetensors"
    (folder / "sparse_update_manifest.json").write_text(json.dumps(said))


def trl(path: Path, version: int, old: Tensors, new: Tensors, encoding: str = "raw") -> None:
    """Write the file `step_000012.safetensors`."""
    tensors = Tensors()
    for name, (places, values) in changed(old, new).items():
        gaps = torch.diff(places, prepend=torch.tensor([-1])) - 1
        tensors |= {f"{name}.idx": gaps.to(torch.uint16) if encoding == "gap_delta" else places}
        tensors |= {f"{name}.val": values}
    said = {"format": "sparse_weight_patch", "version": "1", "sparse": "True", "encoding": encoding}
    save_file(tensors, path, metadata={**said, "model_version": str(version)})
