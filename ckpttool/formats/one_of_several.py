"""Whether a file is one of several that hold a model together, by its name and by what lies next to it."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass

from ..files.open_source import names_in
from .shards.writing import INDEX

# model-00001-of-00005.safetensors: the layout of the Hugging Face Hub.
SHARD = re.compile(r"(?P<begin>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})(?P<end>\.\w+)")

CUT = "its tensors are slices, and no file says how they were cut, so ckpttool can't join them"

# Names of files that hold a slice of each tensor, or some layers: the number stands alone, so what lies next
# to them tells whether there are others. Sources: Meta's llama, Megatron-LM and NeMo, fairseq and metaseq,
# vLLM's sharded_state, TensorRT-LLM, DeepSpeed with tensor parallelism.
NUMBERED = (
    (
        re.compile(r"(?P<begin>consolidated\.)(?P<number>\d\d)(?P<end>\.pth)"),
        f"{CUT}; transformers' convert_llama_weights_to_hf.py does, and its folder can be read",
    ),
    (
        re.compile(r"(?P<begin>.*[-_.]shard[-_]?)(?P<number>\d+)(?P<end>(\.\w+)?)"),
        f"{CUT}; the framework that saved them does",
    ),
    (
        re.compile(r"(?P<begin>model-rank-)(?P<number>\d+)(?P<end>-part-\d+\.safetensors)"),
        f"{CUT}; use the weights from before they were cut for vLLM",
    ),
    (
        re.compile(r"(?P<begin>rank)(?P<number>\d+)(?P<end>\.safetensors)"),
        f"{CUT}; use the weights from before they were cut for TensorRT-LLM",
    ),
    (
        re.compile(r"(?P<begin>mp_rank_)(?P<number>\d+)(?P<end>_model_states\.pt)"),
        f"{CUT}; DeepSpeed's ds_to_universal.py does",
    ),
)

# A folder for each rank of Megatron: tensor parallel rank, and pipeline rank if there is more than one.
MEGATRON = re.compile(r"(mp_rank_\d+(_\d+)?|tp_rank_\d+(_pp_rank_\d+)?)")
OF_MEGATRON = (
    f"{CUT}; Megatron's tools/checkpoint/convert.py does, and merge reads what a run saves with "
    "--ckpt-format torch_dist"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A file that is one of several of one model."""

    what: str  # "shard 1 of 5"
    others: tuple[str, ...]  # paths of the other files, as far as they are there
    missing: int  # how many are not there, as far as names tell
    way: str  # the command for the whole, or what can't be done


def piece_of(path: str) -> Piece | None:
    """Return what a file is a piece of; None for one that is whole by its name, and for folders and stdin."""
    folder, name = os.path.split(path)
    if path == "-" or os.path.isdir(path):
        return None
    if (found := SHARD.fullmatch(name)) and int(found["count"]) > 1:
        return _shard(folder, name, found)
    above, own = os.path.split(folder) if folder else ("..", os.path.basename(os.getcwd()))
    if MEGATRON.fullmatch(own):
        ranks = [other for other in names_in(above or ".") if other != own and MEGATRON.fullmatch(other)]
        others = [os.path.join(above, other, name) for other in ranks]
        return _numbered(own, int(re.findall(r"\d+", own)[0]), others, OF_MEGATRON)
    for pattern, way in NUMBERED:
        if found := pattern.fullmatch(name):
            same = re.compile(re.escape(found["begin"]) + r"\d+" + re.escape(found["end"]))
            names = [other for other in names_in(folder or ".") if other != name and same.fullmatch(other)]
            others = [os.path.join(folder, other) for other in names]
            return _numbered(name, int(found["number"]), others, way)
    return None


def _numbered(name: str, number: int, others: list[str], way: str) -> Piece | None:
    """Return a piece whose name has no count: number 0 alone may be the whole, as with Meta's 7B."""
    if not others and not number:
        return None
    return Piece(f"one of {len(others) + 1} files that ranks wrote ({name})", tuple(others), 0, way)


def _shard(folder: str, name: str, found: re.Match[str]) -> Piece:
    begin, count, end = re.escape(found["begin"]), found["count"], re.escape(found["end"])
    same = re.compile(rf"{begin}-\d+-of-{count}{end}")
    names = names_in(folder or ".")
    others = tuple(os.path.join(folder, other) for other in names if other != name and same.fullmatch(other))
    missing = int(count) - 1 - len(others)
    if missing:
        way = f"{missing} of them are not here: copy them too, then ckpttool merge"
    elif any(other.endswith(INDEX) for other in names):
        way = f"ckpttool merge {shlex.quote(folder or '.')} OUT"
    else:
        files = os.path.join(shlex.quote(folder), f"{shlex.quote(found['begin'])}-*-of-{count}{found['end']}")
        way = f"ckpttool merge {files} OUT"
    return Piece(f"shard {int(found['number'])} of {int(count)}", others, missing, way)
