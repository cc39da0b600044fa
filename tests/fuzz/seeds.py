"""The honest files that are changed: a small one of every format. Imports torch."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.inert_pickle.values import Global, Record, rebuild
from ckpttool.metrics import certificate
from tests.support import other_files, scan_corpus
from tests.support.every_format import apart, as_dcp, as_script, as_tar, converted, with_objects
from tests.support.run_log import BEGIN, STEP, record

# The files of a checkpoint by name; that of a single file is empty
Files = dict[str, bytes]


def state() -> OrderedDict[str, torch.Tensor]:
    """Return a small state with a tie, a view, other dtypes and an empty tensor."""
    rows = torch.arange(12.0).reshape(3, 4)
    named = {"a": rows, "tied": rows, "view": rows.t()[1:], "half": torch.ones(3).half()}
    named |= {"count": torch.tensor(7), "empty": torch.zeros(0, 2), "flag": torch.tensor([True, False])}
    return OrderedDict((f"module.{name}", value) for name, value in named.items())


def training() -> dict[str, Any]:
    """Return a checkpoint of plain values, nested and shared, which `weights_only` reads."""
    shared = [1, 2]
    return {
        "model": state(),
        "optimizer": {"state": {0: {"m": torch.ones(2, 3)}}, "param_groups": [{"params": [0], "lr": 0.1}]},
        "epoch": 3,
        "betas": (0.9, 0.999),
        "big": 2**70,
        "lists": {"a": shared, "b": shared},
    }


def _trainers(path: Path) -> None:
    """Write what the trainer's checkpoint holds."""
    plan = {"samples": 8, "batch_size": 4, "seed": 0, "world_size": 2}
    sums = {"epoch": 1, "step": 0, "global_step": 2, "best": -float("inf"), "sums": [[0.0] * 4] * 2}
    random_state = {"python": [3, list(range(20)), None], "torch": torch.arange(40, dtype=torch.uint8)}
    whole = training() | {"progress": sums, "plan": plan, "rng": [random_state] * 2, "scaler": {}}
    torch.save(whole | {"digests": {"model": "0" * 64}, "config": {"lr": 0.1, "data": "digits"}}, path)


def _safetensors(path: Path) -> None:
    save_file(apart(state()), path, metadata={"who": "me"})


def _ranks(path: Path, rows: int = 4) -> None:
    """Write what two ranks hold: DTensors with their mesh and placements."""
    model = {"a": torch.arange(3.0 * rows).reshape(rows, 3), "b": torch.ones(rows), "n": torch.tensor(3)}
    momentum = {name: {"step": 1.0, "exp_avg": model[name] / 2} for name in ("a", "b")}
    optimizer = {"state": momentum, "param_groups": [{"params": ["a", "b"], "lr": 0.1}]}
    torch.save({"model": model, "optimizer": optimizer, "epoch": 3}, path.with_name("whole.pt"))
    with ckpttool.open(path.with_name("whole.pt")) as whole:
        ckpttool.split(whole, path, 2, device="cpu")


def _adapter(path: Path) -> None:
    """Write an adapter of LoRA, with patterns for its ranks, and the model it belongs to."""
    path.mkdir()
    weights = {f"layers.{i}.proj.weight": torch.ones(4, 6) for i in range(3)}
    save_file(weights, path / "base.safetensors")
    factors = {}
    for i in range(3):
        factors[f"base_model.model.layers.{i}.proj.lora_A.weight"] = torch.ones(2, 6)
        factors[f"base_model.model.layers.{i}.proj.lora_B.weight"] = torch.ones(4, 2)
    save_file(factors, path / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["proj"]}
    ranks = {"layers.0.proj": 2, r"layers\.[12]\.proj": 2}
    config |= {"fan_in_fan_out": False, "rank_pattern": ranks, "alpha_pattern": {"proj": 4}}
    (path / "adapter_config.json").write_text(json.dumps(config))


def _kohyas(path: Path) -> None:
    """Write an adapter under kohya's and diffusers' names, and the model in which its layers are found."""
    path.mkdir()
    names = ("mid_block.to_q", "mid_block.conv_in")
    save_file({f"{name}.weight": torch.ones(4, 6) for name in names}, path / "base.safetensors")
    held = {"lora_unet_mid_block_to_q.alpha": torch.tensor(1.0)}
    layers = {"lora_unet_mid_block_to_q.lora_": ("down", "up"), "unet.mid_block.conv_in.lora_": ("A", "B")}
    for begin, (first, second) in layers.items():
        held |= {f"{begin}{first}.weight": torch.ones(2, 6), f"{begin}{second}.weight": torch.ones(4, 2)}
    save_file(held, path / "pytorch_lora_weights.safetensors")


def _delta(path: Path) -> None:
    """Write a base, and what it became: a tensor that is the same, some that changed, one that is new."""
    path.mkdir()
    base = {"same": torch.ones(3), "few": torch.zeros(200), "many": torch.rand(900).half()}
    new = {**base, "few": torch.eye(20)[:10].reshape(-1), "new": torch.arange(4), "tied": base["same"]}
    new["many"] = base["many"] + 0.01
    save_file(base, path / "base.safetensors")
    torch.save({"model": new, "epoch": 3}, path / "new.pt")
    ckpttool.delta(path / "base.safetensors", path / "new.pt", path / "delta.safetensors")
    (path / "new.pt").unlink()


def packed(path: Path, scheme: str) -> None:
    """Write a layer of packed numbers, and the settings that say how they are packed."""
    words, codes = torch.arange(128).int().reshape(4, 32) * 77_777_777, torch.arange(96, dtype=torch.uint8)
    tensors: dict[str, torch.Tensor] = {"l.0.bias": torch.ones(3)}
    section: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [4, 8]}
    if scheme == "fp8":
        weight = codes.view(torch.float8_e4m3fn).reshape(6, 16)
        tensors |= {"l.0.weight": weight, "l.0.weight_scale_inv": torch.rand(2, 2)}
    elif scheme == "gptq":
        section = {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq"}
        tensors |= {
            "l.0.qweight": words,
            "l.0.qzeros": words[:2, :4].clone(),
            "l.0.scales": torch.rand(2, 32),
        }
        tensors["l.0.g_idx"] = torch.arange(32).flip(0).int() // 16
    elif scheme == "compressed-tensors":
        weights = {"num_bits": 4, "group_size": 32}
        section = {"quant_method": scheme, "config_groups": {"0": {"weights": weights}}}
        tensors |= {"l.0.weight_packed": words[:, :8].clone(), "l.0.weight_scale": torch.rand(4, 2)}
        tensors["l.0.weight_shape"] = torch.tensor([4, 64])
    elif scheme == "nf4":
        section = {"quant_method": "bitsandbytes"}
        said = {"blocksize": 64, "dtype": "bfloat16", "shape": [12, 16], "nested_blocksize": 256}
        text = [*json.dumps(said | {"nested_offset": 0.5}).encode()]
        tensors |= {"l.0.weight": codes.reshape(-1, 1), "l.0.weight.absmax": codes[:3].clone()}
        tensors |= {"l.0.weight.quant_map": torch.rand(16), "l.0.weight.nested_quant_map": torch.rand(256)}
        tensors["l.0.weight.nested_absmax"] = torch.rand(1)
        tensors["l.0.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(text, dtype=torch.uint8)
    else:
        section = {"quant_method": "mxfp4"}
        blocks = codes.reshape(1, 3, 2, 16)
        tensors |= {"l.0.up_blocks": blocks, "l.0.up_scales": codes[90:].clone().reshape(1, 3, 2)}
    path.mkdir()
    save_file(tensors, path / "packed.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": section}))


PACKED = ("fp8", "gptq", "compressed-tensors", "nf4", "mxfp4")


def _with_companions(path: Path) -> None:
    """Write a folder as the hub has it: shards, their index, and files that are no checkpoint's."""
    converted(training, to="safetensors-sharded", shard_size=64)(path)
    (path / "config.json").write_text('{"model_type": "x"}')
    (path / "tokenizer.json").write_text("{}")


def _predictions(path: Path) -> None:
    import numpy as np

    rows = np.arange(8)
    columns = certificate.Predictions(rows, rows % 3, rows % 4, np.ones(8))
    certificate.write(path, columns, certificate.Evaluation(1, 8), 0)


def _rows(path: Path) -> None:
    """Write the columns alone, as a script of the user's may: no digest says that they were changed."""
    rows = torch.arange(8)
    labels = {"index": rows, "prediction": rows % 3, "label": rows % 4}
    save_file({**labels, "loss": torch.ones(8, dtype=torch.float64)}, path)


def _run(path: Path) -> None:
    """Write what a run keeps in its folder besides checkpoints: its failures, its log, and its record."""
    path.mkdir()
    failures = {"flags": "0" * 16, "step": 3, "failed": [2, 3]}
    (path / "attempts.json").write_text(json.dumps(failures))
    steps = ({"step": step, "epochs": step / 4, "loss": 3.0 / step, "lr": 0.2} for step in (2, 4))
    log: list[dict[str, Any]] = [*steps]
    log.append({"epoch": 1, "loss": 2.0, "train_loss": 1.5, "accuracy": 0.5, "metrics": {"mae": 0.5}})
    (path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    record(path, BEGIN, STEP)


def _scanned(path: Path) -> None:
    """Write what `scan` alone looks into: containers in containers, with code in them; arrays of joblib."""
    path.mkdir()
    inner = scan_corpus.tarred("x.pkl.gz", gzip.compress(scan_corpus.PAYLOAD))
    (path / "scanned.zip").write_bytes(scan_corpus.zipped("x.tar", inner, zipfile.ZIP_DEFLATED))
    for name in ("joblib, xz", "a row of zips", "npz", "the bytes of joblib's array"):
        scan_corpus.ATTACKS[name].write(path / name.replace(" ", "-"))


def strided(path: Path, rows: int = 4) -> None:
    """Write what two ranks hold, each every other row, as FSDP2 over tensor parallelism may place them."""
    _ranks(path, rows)
    state = {"dim": 0, "split_factor": rows // 2}

    def change(value: object) -> object:
        if isinstance(value, Record) and value.type_name.endswith(".Shard"):
            name = Global("torch.distributed.tensor.placement_types", "_StridedShard")
            return Record("newobj", name, (), state=state, has_state=True)
        return value

    for file in sorted(path.iterdir()):
        with ckpttool.open(file) as piece:
            new = dataclasses.replace(piece, tree=rebuild(piece.tree, change))
            ckpttool.save(new, file, force=True)


# By format, what writes each seed
SEEDS: dict[str, tuple[Callable[[Path], object], ...]] = {
    "zip .pt": (
        lambda path: torch.save(training(), path),
        lambda path: torch.save(with_objects(), path),
        lambda path: torch.save(state(), path),
    ),
    "trainer's last.pt": (_trainers,),
    "legacy .pt": (
        lambda path: torch.save(training(), path, _use_new_zipfile_serialization=False),
        lambda path: torch.save(with_objects(), path, _use_new_zipfile_serialization=False),
    ),
    "tar": (as_tar,),
    "TorchScript": (as_script,),
    "safetensors": (_safetensors,),
    "safetensors --full": (converted(training, to="safetensors", full=True),),
    "shards, safetensors": (
        converted(training, to="safetensors-sharded", shard_size=64),
        converted(training, to="safetensors-sharded", shard_size=64, full=True),
    ),
    "shards, torch": (converted(training, to="torch-sharded", shard_size=64),),
    "DCP": (as_dcp(training), converted(training, to="dcp", full=True)),
    "files of ranks": (_ranks, strided),
    "LoRA": (_adapter, _kohyas),
    "delta": (_delta,),
    "packed numbers": tuple(functools.partial(packed, scheme=scheme) for scheme in PACKED),
    "folder of the hub": (_with_companions,),
    "predictions": (_predictions, _rows),
    "folder of a run": (_run,),
    "scanned": (_scanned,),
    "GGUF": (other_files.as_gguf,),
    "ONNX": (other_files.as_onnx,),
    "ONNX folder": (other_files.as_onnx_folder, other_files.as_small_onnx_folder),
    "NumPy": (other_files.as_npz, other_files.as_compressed_npz, other_files.as_npy),
    "exported program": (other_files.as_package,),
}


@functools.cache
def seeds(kind: str) -> tuple[Files, ...]:
    """Return the seeds of a format."""
    return tuple(map(written_by, SEEDS[kind]))


def written_by(write: Callable[[Path], object]) -> Files:
    """Return the files that a function writes to a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in"
        write(path)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return {"" if file == path else file.name: file.read_bytes() for file in files}


class Odd(bytes):
    """What stands in a file's place and is no regular file: `fifo`, `folder`, or where a link leads."""


ODD = (Odd(b"fifo"), Odd(b"folder"), Odd(b"/dev/zero"), Odd(b"../secret"), Odd(b"."), Odd(b"nothing"))
SECRET = b"the user's own, next to the checkpoint"


def put(files: Files, path: Path) -> None:
    """Write files to a path: a file, or a folder of them."""
    if "" not in files:
        path.mkdir()
    for name, raw in files.items():
        place = path / name if name else path
        if not isinstance(raw, Odd):
            place.write_bytes(raw)
        elif raw == b"fifo":
            os.mkfifo(place)
        elif raw == b"folder":
            place.mkdir()
        else:
            place.symlink_to(raw.decode())
