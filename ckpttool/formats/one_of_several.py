"""Whether a file is one of several that hold a model together, by its name and by what lies next to it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..remote.places import is_folder, names_in
from ..system import join
from .shards import INDEX

# model-00001-of-00005.safetensors: the layout of the Hugging Face Hub. Of a GGUF all files are read.
SHARD = re.compile(r"(.+)-(\d{1,6})-of-(?P<count>\d{1,6})(\.(?!gguf$)\w+)")

CUT = "its tensors are slices, and no file says how they were cut, so ckpttool can't join them"

# Names of files that hold a slice of each tensor, or some layers: the number stands alone, so what lies next
# to them tells whether there are others. Sources: Meta's llama, Megatron-LM and NeMo, fairseq and metaseq,
# vLLM's sharded_state, TensorRT-LLM, DeepSpeed with tensor parallelism.
NUMBERED = {
    r"(consolidated\.)(\d\d)(\.pth)": "transformers' convert_llama_weights_to_hf.py does, and its folder can "
    "be read",
    r"(.*[-_.]shard[-_]?)(\d+)((?:\.\w+)?)": "the framework that saved them does",
    r"(model-rank-)(\d+)(-part-\d+\.safetensors)": "use the weights from before they were cut for vLLM",
    r"(rank)(\d+)(\.safetensors)": "use the weights from before they were cut for TensorRT-LLM",
    r"(mp_rank_)(\d+)(_model_states\.pt)": "DeepSpeed's ds_to_universal.py does",
}

# A folder for each rank of Megatron: tensor parallel rank, and pipeline rank if there is more than one.
MEGATRON = re.compile(r"(mp_rank_\d+(_\d+)?|tp_rank_\d+(_pp_rank_\d+)?)")
OF_MEGATRON = (
    "Megatron's tools/checkpoint/convert.py does, and merge reads what a run saves with "
    "--ckpt-format torch_dist"
)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that is one of several of one model.

    Attributes:
        path: the file.
        what: which it is: `shard 1 of 5`.
        others: paths of the other files, as far as they are there.
        missing: how many are not there, as far as names tell.
        way: the command for the whole, or what can't be done.
    """

    path: str = field(metadata={"json": None})
    what: str
    others: tuple[str, ...]
    missing: int
    way: str

    def warning(self, shown: Callable[[Sequence[str]], str]) -> str:
        """Say that the others are not read; `shown` joins as many names as are to be shown."""
        rest = f"the others ({shown(self.others)}) are" if self.others else "the others are"
        way = f"The whole: {self.way}" if self.way.startswith("ckpttool ") else self.way
        return f"{shown([self.path])} is {self.what}; {rest} not read. {way[:1].upper()}{way[1:]}"


def piece_of(path: str) -> ModelFile | None:
    """Return what a file is a piece of; None for one that is whole by its name, and for folders and stdin."""
    folder, name = os.path.split(path)
    if path == "-" or is_folder(path):
        return None
    if (match := SHARD.fullmatch(name)) and int(match["count"]) > 1:
        return _shard(path, match)
    above, rank = os.path.split(folder) if folder else ("..", os.path.basename(os.getcwd()))
    if MEGATRON.fullmatch(rank):
        ranks = [other for other in names_in(above or ".") if other != rank and MEGATRON.fullmatch(other)]
        others = [join(above, other, name) for other in ranks]
        return _numbered(path, rank, int(re.findall(r"\d+", rank)[0]), others, OF_MEGATRON)
    for pattern, way in NUMBERED.items():
        if match := re.fullmatch(pattern, name):
            begin, number, end = match.groups()
            same = re.compile(rf"{re.escape(begin)}\d+{re.escape(end)}")
            return _numbered(path, name, int(number), _others(folder, name, same), way)
    return None


def _others(folder: str, name: str, same: re.Pattern[str]) -> list[str]:
    """Return the paths of the other files of one pattern in a folder."""
    names = [other for other in names_in(folder or ".") if other != name and same.fullmatch(other)]
    return [join(folder, other) for other in names]


def _numbered(path: str, name: str, number: int, others: list[str], way: str) -> ModelFile | None:
    """Return a piece whose name has no count: number 0 alone may be the whole, as with Meta's 7B."""
    what = f"one of {len(others) + 1} files that ranks wrote ({name})"
    return ModelFile(path, what, tuple(others), 0, f"{CUT}; {way}") if others or number else None


def _shard(path: str, match: re.Match[str]) -> ModelFile:
    folder, name = os.path.split(path)
    begin, number, count, end = match.groups()
    others = _others(folder, name, re.compile(rf"{re.escape(begin)}-\d+-of-{count}{re.escape(end)}"))
    missing = int(count) - 1 - len(others)
    whole = join(shlex.quote(folder), f"{shlex.quote(begin)}-*-of-{count}{end}")
    if any(other.endswith(INDEX) for other in names_in(folder or ".")):
        whole = shlex.quote(folder or ".")
    lacking = f"{missing} of them are not here: copy them too, then ckpttool merge"
    way = lacking if missing else f"ckpttool merge {whole} OUT"
    return ModelFile(path, f"shard {int(number)} of {int(count)}", tuple(others), missing, way)
