"""Inputs of every command that writes one output, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpttool


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with inputs of every command that writes one output."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    state = {f"module.{number}.weight": torch.randn(64, 64 + number) for number in range(5)}
    state |= {
        "module.tiny": torch.ones(3),
        "module.none": torch.ones(0),
        "module.half": torch.randn(999).half(),
    }
    state["module.view"] = state["module.0.weight"].t()[3:7]
    state["module.tied"] = state["module.1.weight"]
    torch.save({"state_dict": state, "epoch": 3, "other": torch.randn(5000)}, folder / "in.pt")
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    plain = {name.removeprefix("module."): tensor.contiguous().clone() for name, tensor in state.items()}
    save_file(plain, folder / "plain.safetensors")
    save_file({name: tensor + 1 for name, tensor in plain.items()}, folder / "other.safetensors")
    ckpttool.convert(folder / "plain.safetensors", f"{folder}/shards/", shard_size=30_000)
    ckpttool.delta(folder / "plain.safetensors", folder / "other.safetensors", folder / "d.safetensors")
    with ckpttool.open(folder / "plain.safetensors") as checkpoint:
        ckpttool.split(checkpoint, folder / "ranks", 3)
    net = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.BatchNorm1d(50))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "net.pt")
    net(torch.randn(8, 40))
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "net2.pt")
    (folder / "net.py").write_text(NET)
    (folder / "adapter").mkdir()
    of_peft = "base_model.model.0.lora_{}.weight"
    factors = {of_peft.format("A"): torch.randn(4, 64), of_peft.format("B"): torch.randn(64, 4)}
    save_file(factors, folder / "adapter" / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 8, "peft_type": "LORA", "target_modules": ["0"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return folder


NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50))
"""

JOBS = {
    "strip-prefix": "strip-prefix in.pt out.safetensors",
    "strip-prefix to .pt": "strip-prefix in.pt out.pt",
    "legacy": "strip-prefix old.pt out.safetensors",
    "add-prefix": "add-prefix plain.safetensors out.safetensors",
    "rename-keys": "rename-keys in.pt out.pt --map module=model",
    "cast": "convert in.pt out.safetensors --dtype bf16",
    "cast to .pt": "convert in.pt out.pt --dtype fp16",
    "shards": "convert in.pt out/ --shard-size 20KB",
    "torch shards": "convert in.pt out/ --shard-size 20KB --to torch-sharded",
    "from shards": "convert shards out.safetensors",
    "full": "convert in.pt out.safetensors --full",
    "fp8": "convert plain.safetensors out.safetensors --quantize fp8",
    "merge shards": "merge shards out.safetensors",
    "merge ranks": "merge ranks out.safetensors",
    "merge ranks, cast": "merge ranks out.pt --dtype bf16",
    "merge-lora": "merge-lora plain.safetensors adapter out.safetensors",
    "average": "average plain.safetensors other.safetensors out.safetensors",
    "ties": "average plain.safetensors other.safetensors out.pt --method ties --base plain.safetensors",
    "apply": "apply plain.safetensors d.safetensors out.safetensors",
    "conform": "conform in.pt out.safetensors --like plain.safetensors",
    "slim": "slim in.pt out.pt",
    "optimizer": "optimizer net.pt out.pt --to names --model net.py:net",
    "convert-batchnorm": "convert-batchnorm net.pt net2.pt out.pt --counts 4,4",
}
