"""Inputs of every command that writes one output, and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from tests.support.quantised import written
from tests.support.running import Cli


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
    write_packed(folder / "packed", 150, 200)
    write_gptq(folder / "gptq", 3, 64)
    (folder / "rules.toml").write_text(STACKING.format("1.weight", "2.weight"))
    write_adapter(folder / "adapter", {"A": torch.randn(4, 64), "B": torch.randn(64, 4)})
    return folder


def write_adapter(folder: Path, factors: dict[str, torch.Tensor]) -> None:
    """Write a LoRA adapter of the layer 0, as PEFT does."""
    folder.mkdir()
    of_peft = {f"base_model.model.0.lora_{name}.weight": factor for name, factor in factors.items()}
    save_file(of_peft, folder / "adapter_model.safetensors")
    config = {"r": len(factors["A"]), "lora_alpha": 8, "peft_type": "LORA", "target_modules": ["0"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_packed(folder: Path, rows: int, columns: int) -> None:
    """Write a matrix of fp8 with a scale for each block."""
    folder.mkdir()
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    tensors = {"w.weight": codes, "w.weight_scale_inv": torch.rand(-(-rows // 128), -(-columns // 128))}
    written(folder, tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def write_gptq(folder: Path, groups: int, outputs: int) -> None:
    """Write a matrix of GPTQ of 4 bits, in groups of 32."""
    folder.mkdir()
    words = torch.randint(-(2**31), 2**31, (groups * 32 // 8, outputs)).int()
    tensors = {"l.qweight": words, "l.qzeros": words[:groups, : outputs // 8].clone()}
    tensors |= {"l.scales": torch.rand(groups, outputs).half(), "other": torch.ones(7)}
    written(folder, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32})


STACKING = """from = "a"
to = "b"
rest = "keep"
[[rule]]
from = "{}"
to = "x"
steps = [{{ transpose = [1, 0] }}]
[[rule]]
from = "{}"
to = "y"
optional = true
"""

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
    "from fp8": "convert packed/model.safetensors out.safetensors --dequantize",
    "from fp8, cast": "convert packed/model.safetensors out.pt --dequantize --dtype fp32",
    "from GPTQ": "convert gptq/model.safetensors out/ --dequantize --shard-size 30KB",
    "map": "convert plain.safetensors out.safetensors --map rules.toml",
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

OTHERS = {
    "another number of parts": ("strip-prefix in.pt out.safetensors --part 2/3", "number of parts"),
    "another command": ("convert in.pt out.safetensors --part 2/2", "command"),
    "another flag": ("strip-prefix in.pt out.safetensors --drop module.tiny --part 2/2", "command"),
    "another input": ("strip-prefix old.pt out.safetensors --part 2/2", "command"),
}


def run(cli: Cli, words: str, folder: Path | str, *more: str) -> Any:
    """Run a command whose output, which begins with `out`, goes into a folder."""
    return cli(*(f"{folder}/{word}" if word.startswith("out") else word for word in words.split()), *more)
