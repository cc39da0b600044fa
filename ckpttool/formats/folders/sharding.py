"""A state cut into files of a bounded size, with an index: the layout of the Hugging Face Hub.

`model-00001-of-00003.safetensors` and its kin hold the tensors, `model.safetensors.index.json` says which
holds which. The shards of torch files are called `pytorch_model-….bin`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from ...errors import UsageFault
from ...files.commit import writing_into
from ...files.copying import Output
from ...tensors.ref import TensorRef

SAFETENSORS, TORCH = "safetensors-sharded", "torch-sharded"
STEMS = {SAFETENSORS: ("model", ".safetensors"), TORCH: ("pytorch_model", ".bin")}
INDEX = ".index.json"

TIES = "ckpttool.ties"
"""The entry of an index's metadata that records which names are another name of a tensor."""

DEFAULT_SIZE = 5 * 10**9
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Opened = Callable[[BinaryIO], Output]
WriteShard = Callable[[str, Mapping[str, TensorRef], Output], None]


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name and what goes into it."""

    name: str
    tensors: Mapping[str, TensorRef]


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MB` or `1GiB`. Raises UsageFault."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if (
        not found
        or found[2].upper() not in UNITS
        or not (size := int(float(found[1]) * UNITS[found[2].upper()]))
    ):
        raise UsageFault(f"'{text[:80]}' is not a shard size", hint="for example 5GB, 500MB or 1GiB")
    return size


def cut(kind: str, tensors: Mapping[str, TensorRef], size: int) -> list[Shard]:
    """Shards of at most `size` bytes, in the order of the tensors; a larger tensor gets its own.

    Tensors that share a storage go into one shard, so that they can share it there.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor.storage), []).append(name)
    shards: list[list[str]] = [[]]
    room = size
    for names in groups.values():
        nbytes = max(tensors[names[0]].storage.nbytes, *(tensors[name].nbytes for name in names))
        if nbytes > room and shards[-1]:
            shards.append([])
            room = size
        shards[-1] += names
        room -= nbytes
    stem, ending = STEMS[kind]
    return [
        Shard(
            f"{stem}-{number:05d}-of-{len(shards):05d}{ending}",
            {name: tensor for name, tensor in tensors.items() if name in chosen},
        )
        for number, chosen in enumerate(map(set, shards), 1)
    ]


def index_name(kind: str) -> str:
    return "".join(STEMS[kind]) + INDEX


def index(shards: list[Shard], metadata: Mapping[str, object]) -> str:
    """The index file's text."""
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors.values())
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    content = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def write(
    folder: str, kind: str, shards: list[Shard], text: str, write_shard: WriteShard, opened: Opened
) -> None:
    """Writes the shards and their index into a folder.

    Args:
        write_shard: writes one of the shards.
        opened: makes an output of a file.
    """
    for shard in shards:
        with writing_into(os.path.join(folder, shard.name)) as file, opened(file) as out:
            write_shard(shard.name, shard.tensors, out)
    with writing_into(os.path.join(folder, index_name(kind))) as file:
        file.write(text.encode())
