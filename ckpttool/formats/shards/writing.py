"""Cutting a state into shards of a bounded size, with an index, in the layout of the Hugging Face Hub.

`model-00001-of-00003.safetensors` and so on hold the tensors, `model.safetensors.index.json` says which holds
which. Shards in torch's format are called `pytorch_model-….bin`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from ...errors import UsageFault
from ...files.commit import writing_into
from ...files.copying import Output, settle_together
from ...tensors.ref import TensorRef

SAFETENSORS, TORCH = "safetensors-sharded", "torch-sharded"
STEMS = {SAFETENSORS: ("model", ".safetensors"), TORCH: ("pytorch_model", ".bin")}
INDEX = ".index.json"

# What transformers calls the file of a model that is not cut.
ALONE = tuple(map("".join, STEMS.values()))

# The entry of an index's metadata that records which names are another name of a tensor.
TIES = "ckpttool.ties"

# Shards that are written at once.
TOGETHER = 8

DEFAULT_SIZE = 5 * 10**9
PREFIXES = "KMGT"
# Factors of units in capitals: `5G` is `5GB`, `5Gi` is `5GiB`.
UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}{b}": 1000 ** (i + 1) for i, p in enumerate(PREFIXES) for b in ("", "B")},
    **{f"{p}I{b}": 1024 ** (i + 1) for i, p in enumerate(PREFIXES) for b in ("", "B")},
}

Opened = Callable[[BinaryIO], Output]
WriteShard = Callable[[str, Mapping[str, TensorRef], Output], None]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name and the tensors in it."""

    name: str
    tensors: Mapping[str, TensorRef]


def parse_size(text: str) -> int:
    """Return the bytes that a size such as `5GB`, `5G`, `500MB` or `1GiB` means."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if (
        not found
        or found[2].upper() not in UNITS
        or not (size := int(float(found[1]) * UNITS[found[2].upper()]))
    ):
        raise UsageFault(f"'{text[:80]}' is not a shard size", hint="for example 5GB, 5G, 500MB or 1GiB")
    return size


def cut(kind: str, tensors: Mapping[str, TensorRef], size: int) -> list[Shard]:
    """Cut a state into shards."""
    # Tensors that share a storage go into one shard, so that they can share it there.
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor.storage), []).append(name)
    shards: list[list[str]] = [[]]
    left = size
    for names in groups.values():
        nbytes = max(tensors[names[0]].storage.nbytes, *(tensors[name].nbytes for name in names))
        if nbytes > left and shards[-1]:
            shards.append([])
            left = size
        shards[-1] += names
        left -= nbytes
    stem, ending = STEMS[kind]
    return [
        Shard(
            f"{stem}-{number:05d}-of-{len(shards):05d}{ending}",
            {name: tensor for name, tensor in tensors.items() if name in chosen},
        )
        for number, chosen in enumerate(map(set, shards), 1)
    ]


def index_name(kind: str) -> str:
    """Return the name of the index in a folder of this format."""
    return "".join(STEMS[kind]) + INDEX


def index(shards: list[Shard], metadata: Mapping[str, object]) -> str:
    """Return the text of the index."""
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors.values())
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    content = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def write(
    folder: str, kind: str, shards: list[Shard], text: str, write_shard: WriteShard, opened: Opened
) -> None:
    """Write shards and their index into a folder."""
    for first in range(0, len(shards), TOGETHER):
        with contextlib.ExitStack() as stack:
            outputs = []
            for shard in shards[first : first + TOGETHER]:
                file = stack.enter_context(writing_into(os.path.join(folder, shard.name)))
                outputs.append(stack.enter_context(opened(file)))
                write_shard(shard.name, shard.tensors, outputs[-1])
            settle_together(outputs)
    with writing_into(os.path.join(folder, index_name(kind))) as file:
        file.write(text.encode())
