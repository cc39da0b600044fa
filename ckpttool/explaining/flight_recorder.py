"""Dumps of torch's flight recorder, one a rank: which calls each rank made, and how far they came.

A dump is a pickle or JSON of `version`, `pg_config` (the ranks of each process group) and `entries`: the last
calls that a rank made, oldest first, in a ring. Collectives of a group have the same `collective_seq_id` on
all of its ranks; sends and receives are paired by order. torch's own reader unpickles the files; here the
values are inert. gloo's recorder leaves the state at `scheduled`, and says `retired` of what is done.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.inert_pickle.reader import PickleFault, read_pickle
from ..core.remote.places import is_folder, listed, open_source_at
from ..core.tensors.ref import extent, is_count
from ..core.words import in_short
from ..errors import Damaged, FileError, Unsupported, UsageFault

RANK = re.compile(r"(?:^|\D)(\d{1,7})(?:\.\w{1,8})?$")  # as in fr_trace_rank_7, nccl_trace_rank_7, rank7.json
MAX_BYTES = 1 << 28  # of a dump: one of torch's default 2,000 calls has a quarter of a megabyte
MOST = 1 << 25  # items and characters that are looked at: a pickle may name one list millions of times
WHAT = "is no dump of torch's flight recorder"

# Collectives that every rank calls with as many elements: others may differ (a root, uneven pieces)
ALIKE = (
    *("all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"),
    *("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor"),
)
ROOTED = ("scatter", "gather", "broadcast")  # whose dtypes a rank other than the root may not have


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A collective, a send or a receive, as one rank recorded it."""

    rank: int
    group: tuple[str, str, tuple[int, ...]]  # name, description, and ranks as far as they are known
    number: int
    name: str  # without the backend
    pair: tuple[int, int] | None  # of a send or a receive: from which rank to which
    state: str  # scheduled, started or completed
    sizes: Sequence[Sequence[int]]
    dtypes: tuple[str, ...]
    frames: Sequence[object]

    @property
    def elements(self) -> int:
        return sum(0 if 0 in each else extent(each) for each in self.sizes)

    @property
    def is_done(self) -> bool:
        return self.state == "completed"

    @property
    def label(self) -> str:
        name, description = map(in_short, self.group[:2])
        number = "" if self.pair else f" {self.number}"
        more = "" if description == "undefined" else f" ({description})"
        return f"{in_short(self.name)}{number} of group {name}{more}"

    @property
    def tensors(self) -> str:
        shapes = [f"[{', '.join(map(str, sizes))}]" for sizes in self.sizes[:3]]
        more = [f"and {len(self.sizes) - 3} more"] * (len(self.sizes) > 3)
        return in_short(" ".join([*self.dtypes, *shapes, *more])) or "no tensor"

    @property
    def signature(self) -> tuple[object, ...]:
        """What all ranks of a group have alike."""
        elements = self.elements if self.name.startswith(ALIKE) else None
        return self.name, elements, None if self.name.startswith(ROOTED) else self.dtypes


@dataclass(frozen=True, slots=True)
class RankDump:
    """What the recorder of a rank has."""

    rank: int
    calls: tuple[RecordedCall, ...]
    world: frozenset[int]  # all ranks that it knows of
    is_whole: bool  # from the first call on: none has left the ring


def is_dump(path: str) -> bool:
    """Return whether a path looks like a dump, or a folder of them, and not like a text."""
    if is_folder(path) or re.search(r"trace_(?:rank_)?\d+(?:\.\w+)?$", path):
        return True
    source = open_source_at(path)
    start = source.read(0, min(source.size, 4096))
    return bool(re.match(rb'\x80|\{.*"(?:entries|pg_config|comm_lib_version)"', start, re.DOTALL))


def paths_of(given: Sequence[str]) -> list[str]:
    """Return the files that are named, and those of folders whose names end in a rank.

    Raises UsageFault for a folder that has none.
    """
    found: list[str] = []
    for path in given:
        inside = [path]
        if is_folder(path):
            named = [os.path.join(path, name) for name in listed(path) if RANK.search(name)]
            inside = [each for each in named if not is_folder(each)]
        if not inside:
            hint = "name the folder of fr_trace_rank_0 and so on"
            raise UsageFault(f"{path}: no file in it is named as the dump of a rank", hint=hint)
        found += inside
    return found


def read_dump(path: str) -> RankDump:
    """Read the dump of one rank, whose number its name ends in.

    Raises UsageFault where it has none, Damaged for one that is empty or cut short, Unsupported for another
    version or for what is no dump.
    """
    rank = _rank_in(path)
    source = open_source_at(path)
    if not source.size:
        raise Damaged(path, "is empty: its rank ended before it could write", hint="see the log of that rank")
    if source.size > MAX_BYTES:
        raise Unsupported(path, f"{WHAT}: it is larger than {MAX_BYTES >> 20} MB")
    data = source.read(0, source.size)
    try:
        value: Any = json.loads(data) if data.lstrip()[:1] == b"{" else read_pickle(data).value
    except (PickleFault, ValueError, RecursionError) as fault:
        what = f"{WHAT}, or one that is cut short: {fault}"
        raise Damaged(path, what, hint="see the log of that rank") from None
    if not isinstance(value, dict) or not isinstance(value.get("version"), str):
        raise Unsupported(path, WHAT, hint=f"to see what it is: ckpttool inspect {path}")
    if not re.fullmatch(r"2\.\d{1,4}", value["version"]):
        what = f"is of version {value['version'][:20]} of the recorder; 2 is read"
        raise Unsupported(path, what, hint="update torch")
    try:
        return _dump(rank, value)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as fault:
        raise Damaged(path, f"{WHAT}: an entry is not as torch writes it ({fault!r:.100})") from None


def _rank_in(path: str) -> int:
    if not (number := RANK.search(os.path.basename(path.rstrip("/")))):
        hint = "name it as torch does: fr_trace_rank_0"
        raise UsageFault(f"{path}: its name does not end in a rank", hint=hint)
    return int(number[1])


class _Values:
    """What takes the values of a dump by their types, and only so many in all."""

    def __init__(self) -> None:
        self.left = MOST

    def items(self, value: Any, kind: Any = (list, tuple)) -> Any:
        if not isinstance(value, kind):
            raise TypeError("a value of another type")
        self.left -= len(value) + 1
        if self.left < 0:
            raise ValueError("more values than any recorder has")
        return value

    def text(self, value: object) -> str:
        return str(self.items(value, str))

    def group(self, entry: Mapping[str, Any]) -> tuple[str, str]:
        name, description = map(self.text, self.items(entry["process_group"]))
        return name, description

    def together(self, entry: Mapping[str, Any]) -> tuple[object, ...]:
        """Return what those have alike that are issued together."""
        is_p2p = bool(entry["is_p2p"])
        return *self.group(entry), is_p2p, _count(entry["p2p_seq_id" if is_p2p else "collective_seq_id"])

    def state(self, entry: Mapping[str, Any]) -> str:
        if not self.text(entry["profiling_name"]).startswith("gloo:"):
            return self.text(entry["state"])
        return "completed" if entry["retired"] else "started"


def _count(value: object) -> int:
    if not is_count(value):
        raise ValueError("a rank or a number that is none")
    return value


def _dump(rank: int, value: Mapping[str, Any]) -> RankDump:
    values = _Values()
    stated = {
        values.text(name): json.loads(values.text(each["ranks"]))
        for name, each in value.get("pg_config", {}).items()
    }
    groups = {name: tuple(sorted(map(_count, ranks))) for name, ranks in stated.items()}
    world = {rank}.union(*groups.values())
    entries: Sequence[Mapping[str, Any]] = values.items(value.get("entries", []))
    # Those that are issued together keep the state of before; the entry that closes them has that of all.
    closing = {
        values.together(entry): entry
        for entry in entries
        if values.text(entry["profiling_name"]).endswith("coalesced")
    }
    calls = []
    for entry in entries:
        last = closing.get(values.together(entry))
        if last is not entry or entry["profiling_name"].endswith("allreduce_coalesced"):
            calls.append(_call(values, rank, entry, values.state(last or entry), groups))
    is_whole = not entries or _count(entries[0]["record_id"]) == 0
    return RankDump(rank, tuple(calls), frozenset(world), is_whole)


def _call(
    values: _Values, rank: int, entry: Mapping[str, Any], state: str, groups: Mapping[str, tuple[int, ...]]
) -> RecordedCall:
    name, description = values.group(entry)
    called, _, peers = values.text(entry["profiling_name"]).rpartition(":")[2].partition(" ")
    pair, members = None, groups.get(name, ())
    if entry["is_p2p"] and (ends := re.fullmatch(r"(\d{1,7})(?:->|<-)(\d{1,7})", peers)):
        here, there = (members[i] if i < len(members) else i for i in map(int, ends.groups()))
        pair = (here, there) if called == "send" else (there, here)
    which = "output" if called == "recv" else "input"
    sizes = [[*map(_count, values.items(each))] for each in values.items(entry[f"{which}_sizes"])]
    dtypes = tuple(dict.fromkeys(map(values.text, values.items(entry[f"{which}_dtypes"]))))
    number = _count(entry["p2p_seq_id" if pair else "collective_seq_id"])
    where = rank, (name, description, members), number, called, pair
    return RecordedCall(*where, state, sizes, dtypes, values.items(entry.get("frames", ())))


def read_dumps(paths: Sequence[str]) -> tuple[list[RankDump], dict[int, str]]:
    """Return the dumps of all ranks, and of which ranks none can be read, and why.

    Raises UsageFault where a rank is named twice, and what `read_dump` raises where none can be read.
    """
    dumps: dict[int, RankDump] = {}
    faults: dict[int, FileError] = {}
    for path in paths:
        try:
            dump = read_dump(path)
        except (Damaged, Unsupported) as fault:
            faults[_rank_in(path)] = fault
            continue
        if dump.rank in dumps:
            what = f"{path}: is a second dump of rank {dump.rank}"
            raise UsageFault(what, hint="name the dumps of one hang, one a rank")
        dumps[dump.rank] = dump
    if not dumps and faults:
        raise next(iter(faults.values()))
    lacking = {rank: fault.reason for rank, fault in faults.items() if rank not in dumps}
    return [*dumps.values()], {r: f"has no dump that can be read: it {why}" for r, why in lacking.items()}
