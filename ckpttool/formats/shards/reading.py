"""Reading a checkpoint that is cut into shards, in the layout of the Hugging Face Hub.

The index, `model.safetensors.index.json` or another JSON file with a `weight_map`, says which shard holds
which name. Every shard is opened and compared with it: a name is in the shard that the index says and in no
other, and a shard holds nothing that the index does not name.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from ...checkpoint import full_json
from ...checkpoint.checkpoint import Checkpoint
from ...errors import Damaged, Unreadable, Unsupported
from ...files.open_source import allow_open_files, open_source_descriptor
from ...inert_pickle.values import OrderedDict_
from ...tensors.ref import Source, TensorRef
from ..pytorch import legacy as torch_legacy
from ..pytorch import zip as torch_zip
from ..safetensors import format as safetensors
from ..safetensors.format import parse_object
from ..strangers import stranger
from .writing import SAFETENSORS, TIES, TORCH

# The most bytes of an index; as many as a safetensors header may have.
MAX_INDEX = 100_000_000

# Entries of an index's metadata that are counted again, or read here.
KNOWN_FACTS = {"total_size", "total_parameters", full_json.ENTRY, TIES}

SHARD_FORMATS = ((safetensors, SAFETENSORS), (torch_zip, TORCH), (torch_legacy, TORCH))


Shards = Mapping[str, tuple[str, Checkpoint]]  # name -> the format that it makes of the whole, the shard

# How shards are named: by transformers and what follows it; by torchtune, with the epoch.
NUMBERED = re.compile(r"(?P<begin>.+-)(?P<number>\d{5,7})-of-(?P<count>\d{5,7})(?P<end>\.[a-z]+)")
OF_TORCHTUNE = re.compile(r"(?P<begin>hf_model_)(?P<number>\d{4})(?P<end>_\d{1,6}\.pt)")


def sniff(head: bytes) -> bool:
    """Return whether a file that begins with these bytes may be an index."""
    return head.lstrip()[:1] == b"{"


def read(source: Source) -> Checkpoint:
    """Read the index and the headers of all shards: one state in several files."""
    index = _parse(source)
    wanted = _wanted(source, index)
    shards = _read_shards(source, wanted)
    state, facts = _state_of_all(source, shards, wanted), _facts(source, index)
    tree, protocol = _whole(source, facts, state, _protocol(shards))
    unread = tuple(f"metadata '{key}' of the index" for key in facts if key not in KNOWN_FACTS)
    return replace(_checkpoint(source, shards, tree, protocol, unread), full=full_json.ENTRY in facts)


class Series(NamedTuple):
    """How the names of shards begin and end, and how many they say there are, or None where they don't."""

    begin: str
    end: str
    total: int | None


def series_in(names: Iterable[str]) -> dict[Series, dict[int, str]]:
    """Return the shards among names, by series and number."""
    found: dict[Series, dict[int, str]] = {}
    for name in names:
        if named := NUMBERED.fullmatch(name) or OF_TORCHTUNE.fullmatch(name):
            count = named.groupdict().get("count")
            series = Series(named["begin"], named["end"], int(count) if count else None)
            found.setdefault(series, {})[int(named["number"])] = name
    return found


def without_index(path: str, names: Iterable[str]) -> Checkpoint | None:
    """Return shards in a folder whose index is lost, by the numbers in their names; None if none has any."""
    series = series_in(names)
    whole = [numbers for each, numbers in series.items() if not _missing(each, numbers)]
    if not series:
        return None
    if not whole:
        (first, numbers), *_ = series.items()
        lacking, pattern = ", ".join(map(str, _missing(first, numbers))), f"{first.begin}*{first.end}"
        count = first.total or max(numbers)
        reason = f"has no index, and of its {count} shards {pattern} it lacks number {lacking}"
        raise Damaged(path, reason, hint="get them again, and the index with them")
    if len(whole) > 1:
        commands = (f"ckpttool merge {shlex.quote(path)}/{each.begin}*{each.end} OUTPUT" for each in series)
        raise Unreadable(path, "has several series of shards without an index", hint="; ".join(commands))
    shard_names = [whole[0][number] for number in sorted(whole[0])]
    first_shard = Source(path, open_source_descriptor(os.path.join(path, shard_names[0])))
    first_shard.size = 0  # its bytes are those of the first shard, which counts itself
    shards = _read_shards(first_shard, shard_names)
    wanted = {name: {*_state_of(first_shard, name, shard)} for name, (_, shard) in shards.items()}
    state = _state_of_all(first_shard, shards, wanted)
    return _checkpoint(first_shard, shards, state, _protocol(shards), ())


def _missing(series: Series, numbers: Mapping[int, str]) -> list[int]:
    """Return the first few numbers that are not there."""
    every = range(1, (series.total or max(numbers)) + 1)
    return list(islice((number for number in every if number not in numbers), 8))


def _read_shards(source: Source, names: Iterable[str]) -> Shards:
    """Read the shards of a folder, which the messages call by its index or itself."""
    folder = source.path if os.path.isdir(source.path) else os.path.dirname(source.path)
    names = list(names)
    allow_open_files(len(names), source.path)
    shards = {name: _read_shard(source, folder, name) for name in names}
    _check_distinct(source, {name: shard.source for name, (_, shard) in shards.items()})
    if len({kind for kind, _ in shards.values()}) > 1:
        raise Damaged(source.path, "its shards are of different formats")
    return shards


def _state_of_all(source: Source, shards: Shards, wanted: Mapping[str, set[str]]) -> OrderedDict_:
    state = OrderedDict_()
    for name, (_, shard) in shards.items():
        _take(source, state, name, _state_of(source, name, shard), wanted)
    return state


def _protocol(shards: Shards) -> int:
    return max((shard.protocol for _, shard in shards.values()), default=2)


def _checkpoint(
    source: Source, shards: Shards, tree: object, protocol: int, unread: tuple[str, ...]
) -> Checkpoint:
    maps = {name: shard.metadata for name, (_, shard) in shards.items()}
    common = _common(maps)
    apart = [(name, key) for name, metadata in maps.items() for key in metadata if key not in common]
    return Checkpoint(
        source,
        next((kind for kind, _ in shards.values()), SAFETENSORS),
        tree,
        protocol,
        common,
        tuple(shard.source for _, shard in shards.values()),
        unread=(*(f"metadata '{key}' of the shard '{name}'" for name, key in apart), *unread),
        names=frozenset().union(*(shard.names for _, shard in shards.values())),
        remarks=tuple(remark for _, shard in shards.values() for remark in shard.remarks),
    )


def shard_names(source: Source) -> list[str]:
    """Return the names of the shards that an index names, without opening them."""
    return list(_wanted(source, _parse(source)))


def _facts(source: Source, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the index says of the whole; nothing if its metadata is absent or `null`."""
    facts = index.get("metadata")
    if not isinstance(facts, dict | None):
        raise Damaged(source.path, "its index has malformed metadata")
    return facts or {}


def _whole(
    source: Source, facts: Mapping[str, Any], state: OrderedDict_, protocol: int
) -> tuple[object, int]:
    """Return the state with the ties that the index records, or the whole tree if it holds one (`--full`)."""
    text, ties = facts.get(full_json.ENTRY), facts.get(TIES, {})
    if not isinstance(ties, dict) or not isinstance(text, str | None):
        raise Damaged(source.path, "its index has malformed metadata")
    for name, kept in ties.items():
        if name in state or not isinstance(kept, str) or kept not in state:
            raise Damaged(source.path, f"its index ties '{name[:80]}' to a tensor that is not there")
        state[name] = state[kept]
    if text is None:
        return state, protocol
    return full_json.decode_entry(source.path, state, text)


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
        if not name or name != os.path.normpath(name) or name[0] in "/." or "\\" in name or "\0" in name:
            raise Damaged(source.path, f"names a shard outside its folder: {name[:80]!r}")
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise Damaged(source.path, f"names a shard twice: as '{other}' and '{name}'")
    for key, name in weight_map.items():
        shards[name].add(key)
    return shards


def _parse(source: Source) -> dict[str, Any]:
    if source.path == "-":
        raise Unsupported("-", "is the index of a sharded checkpoint, whose shards are not in it")
    if source.size > MAX_INDEX:
        raise Unsupported(source.path, "is too large for the index of a sharded checkpoint")
    return parse_object(source.path, source.read(0, source.size), "its index")


def _read_shard(index: Source, folder: str, name: str) -> tuple[str, Checkpoint]:
    """Read a shard; return the format that it makes of the whole, and the shard."""
    path = os.path.join(folder, name)
    try:
        source = Source(path, open_source_descriptor(path))
    except Unreadable as fault:
        raise Damaged(
            index.path, f"its shard '{name}' can't be opened: {fault.reason}", hint="get that file again"
        ) from None
    head = source.read(0, min(source.size, 512))
    for module, kind in SHARD_FORMATS:
        if module.sniff(head):
            return kind, module.read(source)
    other = stranger(path, head)
    hint = other.hint or "get that file again"
    raise Damaged(index.path, f"its shard '{name}' {other.reason}", hint=hint)


def _check_distinct(index: Source, sources: Mapping[str, Source]) -> None:
    """Refuse two names of one file (a link, or a file system that ignores case): it would be read twice."""
    files: dict[tuple[int, int], str] = {}
    for name, source in sources.items():
        facts = os.fstat(source.fd)
        other = files.setdefault((facts.st_dev, facts.st_ino), name)
        if other != name:
            raise Damaged(index.path, f"its shards '{other}' and '{name}' are the same file")


def _state_of(index: Source, name: str, shard: Checkpoint) -> dict[str, object]:
    tree = shard.tree
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise Damaged(index.path, f"its shard '{name}' holds something other than tensors by name")
    return tree


def _take(
    index: Source,
    state: dict[Any, object],
    name: str,
    tensors: Mapping[str, object],
    wanted: Mapping[str, set[str]],
) -> None:
    """Add a shard to the whole. A tie that the shard itself records needs no entry in the index."""
    for key in sorted(wanted[name] - tensors.keys()):
        raise Damaged(index.path, f"'{key}' should be in the shard '{name}', and is not")
    ties = {
        id(value) for key, value in tensors.items() if key in wanted[name] and isinstance(value, TensorRef)
    }
    for key, value in tensors.items():
        if key in state:
            raise Damaged(index.path, f"'{key}' is in the shard '{name}' and in another")
        if key not in wanted[name] and id(value) not in ties:
            elsewhere = next((other for other, keys in wanted.items() if key in keys), None)
            where = f"puts it in '{elsewhere}'" if elsewhere else "does not know it"
            raise Damaged(index.path, f"'{key}' is in the shard '{name}', but the index {where}")
        state[key] = value


def _common(maps: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the metadata that all shards have in common."""
    first = next(iter(maps.values()), {})
    return {key: value for key, value in first.items() if all(m.get(key) == value for m in maps.values())}
