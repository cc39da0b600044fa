"""Checkpoints in shards: their names, their index, reading and writing them, and one shard alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from ...errors import Damaged, Unreadable, Unsupported
from ...rooms import need
from ..checkpoint import full
from ..checkpoint.checkpoint import Checkpoint, Remark
from ..files.commit import allow_open_files, writing_into
from ..files.copying import Output, settle_together
from ..inert_pickle.values import OrderedDict_, has_text_keys
from ..remote import urls
from ..remote.places import is_file, is_folder, is_plain, names_in, open_part, open_source_at, prepare
from ..system import join
from ..tensors.ref import Source, TensorRef
from . import safetensors
from .pytorch import legacy as torch_legacy
from .pytorch import zip as torch_zip
from .safetensors import parse_object
from .strangers import head_of, stranger

# How shards are named: by transformers and what follows it; by torchtune, with the epoch.
SERIES = re.compile(r"(?P<begin>.+-)(?P<number>\d{5,7})-of-(?P<count>\d{5,7})(?P<end>\.[a-z]+)")

OF_TORCHTUNE = re.compile(r"(?P<begin>hf_model_)(?P<number>\d{4})(?P<end>_\d{1,6}\.pt)")


class Series(NamedTuple):
    """How the names of shards begin and end, and how many they say there are, or None where they don't."""

    begin: str
    end: str
    total: int | None

    @property
    def pattern(self) -> str:
        return f"{self.begin}*{self.end}"

    def missing(self, numbers: Collection[int]) -> list[int]:
        """Return the first few numbers that are not there."""
        every = range(1, (self.total or max(numbers)) + 1)
        return list(islice((number for number in every if number not in numbers), 8))


def series_in(names: Iterable[str]) -> dict[Series, dict[int, str]]:
    """Return the shards among names, by series and number."""
    series: dict[Series, dict[int, str]] = {}
    for name in names:
        if match := SERIES.fullmatch(name) or OF_TORCHTUNE.fullmatch(name):
            count = match.groupdict().get("count")
            like = Series(match["begin"], match["end"], int(count) if count else None)
            series.setdefault(like, {})[int(match["number"])] = name
    return series


# ---- Shards with an index, in the layout of the Hugging Face Hub.
#
# `model-00001-of-00003.safetensors` and so on hold the tensors; `model.safetensors.index.json`, or
# another JSON file with a `weight_map`, says which holds which. Shards in torch's format are called
# `pytorch_model-….bin`. Every shard is opened and compared with the index: a name is in the shard that
# the index says and in no other, and a shard holds nothing that the index does not name.


SAFETENSORS, TORCH = "safetensors-sharded", "torch-sharded"
STEMS = {SAFETENSORS: ("model", ".safetensors"), TORCH: ("pytorch_model", ".bin")}
INDEX = ".index.json"

# What transformers calls the file of a model that is not cut.
ALONE = tuple(map("".join, STEMS.values()))

# What PEFT calls an adapter's, which may lie beside its model's.
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")

# What the trainer writes next to the checkpoints of a run, and what it calls those.
RECORDS, OF_RUN = {"log.jsonl", "run.jsonl"}, {"last.pt", "best.pt"}


# The entry of an index's metadata that records which names are another name of a tensor.
TIES = "ckpttool.ties"

# What tells of a delta of SkyRL or prime-rl, which lists its files.
MANIFESTS = {"manifest.json", "sparse_update_manifest.json"}

# Entries of an index's metadata that are counted again, or read here.
KNOWN_FACTS = {"total_size", "total_parameters", full.ENTRY, TIES}

# Shards that are written at once.
TOGETHER = 8

DEFAULT_SIZE = 5 * 10**9

Opened = Callable[[BinaryIO], Output]
Cut = Mapping[str, Mapping[str, TensorRef]]  # the name of a file -> the tensors in it
WriteShard = Callable[[str, Mapping[str, TensorRef], Output], None]


# Reading.


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes may be an index."""
    return head.lstrip()[:1] == b"{"


def read(source: Source) -> Checkpoint:
    """Read the index and the headers of all shards: one state in several files."""
    index = _parse(source)
    wanted = _wanted(source, index)
    try:
        kind, shards = _read_shards(source, wanted)
        state, facts = _joined(source, shards, wanted), index.get("metadata")
    except Damaged as fault:
        fault.hint = _instead(source, wanted) or fault.hint
        raise
    whole = _whole(source, kind, shards, state)
    if isinstance(facts, dict) and "delta_encoding" in facts:
        return cast(Checkpoint, need("deltas.forms").of_index(whole, facts, shards.values()))
    remarks = (Remark(like.pattern, what) for like, what in _gaps(wanted))
    whole = replace(whole, remarks=(*whole.remarks, *remarks))
    if facts is None:
        return whole
    ties = facts.get(TIES, {}) if isinstance(facts, dict) else None
    if not isinstance(ties, dict) or not isinstance(text := facts.get(full.ENTRY), str | None):
        raise Damaged(source.path, "its index has malformed metadata")
    for name, kept in ties.items():
        if name in state or not isinstance(kept, str) or kept not in state:
            raise Damaged(source.path, f"its index ties '{name[:80]}' to a tensor that is not there")
        state[name] = state[kept]
    unread = (f"metadata '{key}' of the index" for key in facts if key not in KNOWN_FACTS)
    whole = replace(whole, unread=(*whole.unread, *unread), full=full.ENTRY in facts)
    if text is None:
        return whole
    tree, protocol = full.decode_entry(source.path, state, text)
    return replace(whole, tree=tree, protocol=protocol)


def _gaps(names: Iterable[str]) -> Iterator[tuple[Series, str]]:
    """Yield the series of shards of which an index names some and not all."""
    for like, numbers in series_in(names).items():
        if like.total and (missing := like.missing(numbers)):
            lacking = ", ".join(map(str, missing))
            yield like, f"are {like.total} shards, and the index does not name number {lacking}"


def alone_among(names: Collection[str]) -> list[str]:
    """Return the files of whole models in a folder, or else of adapters; none in that of a run."""
    if RECORDS & {*names} and OF_RUN & {*names}:  # of which they are but exports
        return []
    return [name for name in names if name in ALONE] or [name for name in names if name in ADAPTERS]


def without_index(path: str, names: Iterable[str]) -> Checkpoint | None:
    """Return shards in a folder whose index is lost, by the numbers in their names; None if none has any."""
    series = series_in(names)
    if not series:
        return None
    whole = [numbers for like, numbers in series.items() if not like.missing(numbers)]
    if not whole:
        first, numbers = next(iter(series.items()))
        lacking = ", ".join(map(str, first.missing(numbers)))
        count = first.total or max(numbers)
        reason = f"has no index, and of its {count} shards {first.pattern} it lacks number {lacking}"
        raise Damaged(path, reason, hint="get them again, and the index with them")
    if len(whole) > 1:
        commands = (f"ckpttool merge {shlex.quote(path)}/{like.pattern} OUTPUT" for like in series)
        raise Unreadable(path, "has several series of shards without an index", hint="; ".join(commands))
    file_names = [name for _, name in sorted(whole[0].items())]
    prepare([join(path, name) for name in file_names])
    source = open_source_at(join(path, file_names[0])).called(path)
    kind, shards = _read_shards(source, file_names)
    wanted = {name: {*_state_of(source, name, shard)} for name, shard in shards.items()}
    return _whole(source, kind, shards, _joined(source, shards, wanted))


def shard_names(source: Source) -> list[str]:
    """Return the names of the shards that an index names, without opening them."""
    return list(_wanted(source, _parse(source)))


def _parse(source: Source) -> dict[str, Any]:
    if source.path == "-":
        raise Unsupported("-", "is the index of a sharded checkpoint, whose shards are not in it")
    if source.size > safetensors.MAX_HEADER:
        raise Unsupported(source.path, "is too large for the index of a sharded checkpoint")
    return parse_object(source.path, source.read(0, source.size), "its index")


def _wanted(source: Source, index: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the names that the index puts into each shard, the shards sorted by name."""
    weight_map = index.get("weight_map")
    if weight_map is None:
        raise Unsupported(source.path, "is JSON, but not the index of a sharded checkpoint")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise Damaged(source.path, "its weight_map is not a map of names to files")
    shards: dict[str, set[str]] = {name: set() for name in sorted(set(weight_map.values()))}
    folded: dict[str, str] = {}
    for name in shards:
        if not is_plain(source.place, name) or name[0] == ".":
            raise Damaged(source.path, f"names a shard outside its folder: {name[:80]!r}")
        if (other := folded.setdefault(name.casefold(), name)) != name:
            raise Damaged(source.path, f"names a shard twice: as '{other}' and '{name}'")
    for key, name in weight_map.items():
        shards[name].add(key)
    return shards


def _read_shards(source: Source, names: Collection[str]) -> tuple[str, dict[str, Checkpoint]]:
    """Read the shards of a folder, which the messages call by its index or itself; and their format."""
    folder = source.path if is_folder(source.path) else os.path.dirname(source.path)
    allow_open_files(len(names), source.path)
    prepare([join(folder, name) for name in names])
    shards = {name: _read_shard(source, folder, name) for name in names}
    files: dict[tuple[object, object], str] = {}
    for name, shard in shards.items():
        # Two names of one file (a link, or a file system that ignores case) would be read twice.
        if (other := files.setdefault(shard.source.identity, name)) != name:
            raise Damaged(source.path, f"its shards '{other}' and '{name}' are the same file")
    are_safetensors = {shard.format == safetensors.NAME for shard in shards.values()}
    if len(are_safetensors) > 1:
        raise Damaged(source.path, "its shards are of different formats")
    return TORCH if False in are_safetensors else SAFETENSORS, shards


class Format(Protocol):
    """A module that reads one format: a check of the first 512 bytes, and reading."""

    def sniff(self, head: bytes) -> bool: ...

    def read(self, source: Source) -> Checkpoint: ...


READERS: tuple[Format, ...] = (torch_zip, torch_legacy, safetensors)


def reader_of(source: Source) -> Format | None:
    """Return the module that reads a file of torch or safetensors; None for any other file."""
    head = head_of(source)
    return next((reader for reader in READERS if reader.sniff(head)), None)


def _read_shard(index: Source, folder: str, name: str) -> Checkpoint:
    source = open_part(index.path, f"its shard '{name}'", join(folder, name), "get that file again")
    if reader := reader_of(source):
        return reader.read(source)
    other = stranger(source)
    raise Damaged(index.path, f"its shard '{name}' {other.reason}", hint=other.hint or "get that file again")


def _instead(index: Source, names: Collection[str]) -> str | None:
    """Return the way on where shards are not as an index says, and a whole model lies beside it."""
    folder = index.path if is_folder(index.path) else os.path.dirname(index.path)
    whole = next((name for name in ALONE if name not in names and is_file(join(folder, name))), None)
    if whole is None:
        return None
    beside = shlex.quote(join(folder, whole))
    return f"if the index is left from an older save, take the file beside it: ckpttool inspect {beside}"


def _state_of(index: Source, name: str, shard: Checkpoint) -> dict[str, object]:
    tree = shard.tree
    if not has_text_keys(tree):
        raise Damaged(index.path, f"its shard '{name}' holds something other than tensors by name")
    return tree


def _joined(index: Source, shards: Mapping[str, Checkpoint], wanted: Mapping[str, set[str]]) -> OrderedDict_:
    """Return all shards as one state. A tie that a shard itself records needs no entry in the index."""
    state = OrderedDict_()
    for name, shard in shards.items():
        tensors, listed = _state_of(index, name, shard), wanted[name]
        if absent := listed - tensors.keys():
            raise Damaged(index.path, f"'{min(absent)}' should be in the shard '{name}', and is not")
        tied = {id(tensors[key]) for key in listed if isinstance(tensors[key], TensorRef)}
        for key, value in tensors.items():
            if key in state:
                raise Damaged(index.path, f"'{key}' is in the shard '{name}' and in another")
            if key not in listed and id(value) not in tied:
                elsewhere = next((other for other, keys in wanted.items() if key in keys), None)
                where = f"puts it in '{elsewhere}'" if elsewhere else "does not know it"
                raise Damaged(index.path, f"'{key}' is in the shard '{name}', but the index {where}")
            state[key] = value
    return state


def _whole(source: Source, kind: str, shards: Mapping[str, Checkpoint], state: OrderedDict_) -> Checkpoint:
    first, *others = [shard.metadata for shard in shards.values()] or [{}]
    common = {key: text for key, text in first.items() if all(other.get(key) == text for other in others)}
    apart = ((key, name) for name, shard in shards.items() for key in shard.metadata if key not in common)
    unread = tuple(f"metadata '{key}' of the shard '{name}'" for key, name in apart)
    return Checkpoint(source, kind, state, metadata=common, **{**of_all(shards.values()), "unread": unread})


def of_all(files: Collection[Checkpoint]) -> dict[str, Any]:
    """Return the fields that a checkpoint of several files has from all of them."""
    return {
        "protocol": max((file.protocol for file in files), default=2),
        "shards": tuple(source for file in files for source in file.sources),
        "unread": tuple(dict.fromkeys(text for file in files for text in file.unread)),
        "names": frozenset().union(*(file.names for file in files)),
        "remarks": tuple(remark for file in files for remark in file.remarks),
    }


# Writing.


def cut_by_size(kind: str, tensors: Mapping[str, TensorRef], size: int) -> Cut:
    """Cut a state into shards."""
    # Tensors that share a storage go into one shard, so that they can share it there.
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor.storage), []).append(name)
    shards: list[set[str]] = [set()]
    left = size
    for names in groups.values():
        nbytes = max(tensors[names[0]].storage.nbytes, *(tensors[name].nbytes for name in names))
        if nbytes > left and shards[-1]:
            shards.append(set())
            left = size
        shards[-1].update(names)
        left -= nbytes
    stem, ending = STEMS[kind]
    cut = {}
    for number, held in enumerate(shards, 1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}{ending}"
        cut[file] = {name: tensor for name, tensor in tensors.items() if name in held}
    return cut


def index_text(cut: Cut, metadata: Mapping[str, object]) -> str:
    """Return the text of the index."""
    total = sum(tensor.nbytes for tensors in cut.values() for tensor in tensors.values())
    weight_map = {name: file for file, tensors in cut.items() for name in tensors}
    content = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def write(
    folder: str, kind: str, cut: Cut, text: str, write_shard: WriteShard, opened: Opened, index: str = ""
) -> None:
    """Write shards and their index into a folder."""
    write_files(folder, cut, write_shard, opened)
    with writing_into(join(folder, index or "".join(STEMS[kind]) + INDEX)) as file:
        file.write(text.encode())


def write_files(folder: str, cut: Cut, write_shard: WriteShard, opened: Opened) -> None:
    """Write shards into a folder."""
    names = [*cut]
    for first in range(0, len(names), TOGETHER):
        group = names[first : first + TOGETHER]
        with contextlib.ExitStack() as stack:
            outputs = []
            for name in group:
                file = stack.enter_context(writing_into(join(folder, name)))
                outputs.append(stack.enter_context(opened(file)))
            if outputs and not outputs[0].announce:
                storages = (tensor.storage for name in group for tensor in cut[name].values())
                urls.expect(storages, as_they_lie=True)
            for name, output in zip(group, outputs, strict=True):
                write_shard(name, cut[name], output)
            settle_together(outputs)


# ---- A file that is one of several of a model, recognised by its name and its neighbours.


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
