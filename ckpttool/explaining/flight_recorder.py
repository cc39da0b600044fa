"""Which rank did not come to which collective, by the dumps of torch's flight recorder, one a rank.

A dump is a pickle or JSON of `version`, `pg_config` (the ranks of each process group) and `entries`: the last
calls that a rank made, oldest first, in a ring. Collectives of a group have the same `collective_seq_id` on
all of its ranks; sends and receives are paired by order. torch's own reader unpickles the files; here the
values are inert. gloo's recorder leaves the state at `scheduled`, and says `retired` of what is done.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.inert_pickle.reader import PickleFault, read_pickle
from ..core.remote.places import is_folder, listed, open_source_at
from ..core.words import in_short, printable
from ..errors import Damaged, FileError, Unsupported, UsageFault
from .messages import Explanation

RANK = re.compile(r"(?:^|\D)(\d{1,7})(?:\.\w{1,8})?$")  # as in fr_trace_rank_7, nccl_trace_rank_7, rank7.json
MAX_BYTES = 1 << 28  # of a dump: one of torch's default 2,000 calls has a quarter of a megabyte
PAGE = "docs/hangs.md"
WHAT = "is no dump of torch's flight recorder"
LIBRARY = re.compile(r"[\\/](?:torch|multiprocessing)[\\/]|^<")

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
    elements: int
    sizes: Sequence[Sequence[int]]
    dtypes: tuple[str, ...]
    frames: Sequence[object]

    @property
    def is_done(self) -> bool:
        return self.state == "completed"

    @property
    def label(self) -> str:
        name, description = map(in_short, self.group[:2])
        number = "" if self.pair else f" {self.number}"
        return f"{in_short(self.name)}{number} of group {name}" + f" ({description})" * (
            description != "undefined"
        )

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


@dataclass(frozen=True)
class Stall(Explanation):
    """Why ranks wait.

    Attributes:
        kind: a stable word for scripts.
        message: what happened, with shapes and stacks.
        commands: none.
        page: the page of the documentation that has more.
        ranks: those that the others wait for.
        waiting: those that wait.
        is_root: whether one of those that are waited for waits for nothing itself.
    """

    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    is_root: bool = True


# ---- Reading


def is_dump(path: str) -> bool:
    """Return whether a path looks like a dump, or a folder of them, and not like a text."""
    if is_folder(path) or re.search(r"trace_(?:rank_)?\d+(?:\.\w+)?$", path):
        return True
    source = open_source_at(path)
    start = source.read(0, min(source.size, 4096))
    return start[:1] == b"\x80" or (
        start[:1] == b"{" and bool(re.search(rb'"(?:entries|pg_config|comm_lib_version)"', start))
    )


def paths_of(given: Sequence[str]) -> list[str]:
    """Return the files that are named, and those of folders whose names end in a rank."""
    found = []
    for path in given:
        inside = listed(path) if is_folder(path) else []
        found += [os.path.join(path, name) for name in inside if RANK.search(name)] if inside else [path]
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
        raise Damaged(
            path, f"{WHAT}, or one that is cut short: {fault}", hint="see the log of that rank"
        ) from None
    if not isinstance(value, dict) or not isinstance(value.get("version"), str):
        raise Unsupported(path, WHAT, hint=f"to see what it is: ckpttool inspect {path}")
    if not re.fullmatch(r"2\.\d{1,4}", value["version"]):
        raise Unsupported(
            path, f"is of version {value['version']} of the recorder; 2 is read", hint="update torch"
        )
    try:
        return _dump(rank, value)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as fault:
        raise Damaged(path, f"{WHAT}: an entry is not as torch writes it ({fault!r:.100})") from None


def _rank_in(path: str) -> int:
    if not (number := RANK.search(os.path.basename(path.rstrip("/")))):
        raise UsageFault(
            f"{path}: its name does not end in a rank", hint="name it as torch does: fr_trace_rank_0"
        )
    return int(number[1])


def _dump(rank: int, value: Mapping[str, Any]) -> RankDump:
    groups = {
        name: tuple(sorted(json.loads(each["ranks"]))) for name, each in value.get("pg_config", {}).items()
    }
    world = {rank, *(each for ranks in groups.values() for each in ranks)}
    entries: list[Mapping[str, Any]] = value.get("entries", [])
    if not all(type(each) is int for each in (*world, *(entry["record_id"] for entry in entries))):
        raise ValueError("a rank that is no number")
    # Those that are issued together keep the state of before; the entry that closes them has that of all.
    closing = {_together(entry): entry for entry in entries if entry["profiling_name"].endswith("coalesced")}
    calls = []
    for entry in entries:
        closed = closing.get(_together(entry), entry)
        if (
            closed is not entry
            or entry["profiling_name"].endswith("allreduce_coalesced")
            or _together(entry) not in closing
        ):
            calls.append(_call(rank, entry, _state(closed), groups))
    return RankDump(rank, tuple(calls), frozenset(world), not entries or entries[0]["record_id"] == 0)


def _together(entry: Mapping[str, Any]) -> tuple[object, ...]:
    is_p2p = bool(entry["is_p2p"])
    return *entry["process_group"], is_p2p, entry["p2p_seq_id" if is_p2p else "collective_seq_id"]


def _state(entry: Mapping[str, Any]) -> str:
    if not entry["profiling_name"].startswith("gloo:"):
        return str(entry["state"])
    return "completed" if entry["retired"] else "started"


def _call(
    rank: int, entry: Mapping[str, Any], state: str, groups: Mapping[str, tuple[int, ...]]
) -> RecordedCall:
    name, description = map(str, entry["process_group"])
    called, _, peers = str(entry["profiling_name"]).rpartition(":")[2].partition(" ")
    pair, members = None, groups.get(name, ())
    if entry["is_p2p"] and (ends := re.fullmatch(r"(\d{1,7})(?:->|<-)(\d{1,7})", peers)):
        here, there = (members[i] if i < len(members) else i for i in map(int, ends.groups()))
        pair = (here, there) if called == "send" else (there, here)
    which = "output" if called == "recv" else "input"
    sizes = [[*map(operator.index, each)] for each in entry[f"{which}_sizes"]]
    dtypes = tuple(map(str, dict.fromkeys(entry[f"{which}_dtypes"])))
    number = int(entry["p2p_seq_id" if pair else "collective_seq_id"])
    elements = sum(map(math.prod, sizes))
    group = (name, description, members)
    return RecordedCall(
        rank, group, number, called, pair, state, elements, sizes, dtypes, entry.get("frames", ())
    )


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
    return [*dumps.values()], {
        r: f"has no dump that can be read: it {f.reason}" for r, f in faults.items() if r not in dumps
    }


# ---- Judging


def stalls(dumps: Sequence[RankDump], missing: Mapping[int, str]) -> list[Stall]:
    """Return why ranks wait, causes first; none if no rank does.

    Args:
        dumps: one a rank.
        missing: the ranks whose dump can't be read, and why.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    world = {*missing, *(rank for dump in dumps for rank in dump.world)} - {*by_rank}
    lost = {
        rank: missing.get(rank, "left no dump: it never started, or was killed") for rank in sorted(world)
    }
    pending = {dump.rank: next((call for call in dump.calls if not call.is_done), None) for dump in dumps}
    judge = Judge(by_rank, lost, pending)
    groups: dict[object, dict[int, dict[int, RecordedCall]]] = {}
    for call in (call for dump in dumps for call in dump.calls if not call.pair):
        groups.setdefault(call.group, {}).setdefault(call.rank, {}).setdefault(call.number, call)
    found = [stall for calls in groups.values() if (stall := judge.collectives(calls))]
    found += judge.pairs([call for dump in dumps for call in dump.calls if call.pair])
    waits = {rank for rank, call in pending.items() if call}
    found.sort(key=lambda stall: (not stall.is_root, len(waits & {*stall.ranks})))
    if found and not found[0].is_root:
        order = (
            "each waits for another: they call collectives of several groups, or send, in different orders"
        )
        found[0] = replace(found[0], kind="deadlock", message=f"{order}\n{found[0].message}")
    return found


Calls = Mapping[int, Mapping[int, RecordedCall]]  # by rank and number


@dataclass(frozen=True, slots=True)
class Judge:
    """What is known of all ranks."""

    dumps: Mapping[int, RankDump]
    lost: Mapping[int, str]  # ranks without a dump, and why
    pending: Mapping[int, RecordedCall | None]  # of each rank the oldest call that has not ended

    def collectives(self, of: Calls) -> Stall | None:
        """Return why the collectives of one group stand still; None if they do not."""
        name, description, ranks = next(iter(next(iter(of.values())).values())).group
        members = {*of, *ranks} | (
            {*self.dumps, *self.lost} if name == "0" or description == "default_pg" else set()
        )
        # A rank that has never called any: unless they may have left its ring.
        never = {rank for rank in members - {*of} if rank in self.dumps and self.dumps[rank].is_whole}
        calls: Calls = {**of, **{rank: {} for rank in never}}
        last = {rank: max(numbered, default=0) for rank, numbered in calls.items()}
        first = max(min(numbered, default=1) for numbered in calls.values())
        for number in range(first, min(last.values()) + 1):
            if differing := self._differing([at[number] for at in calls.values() if number in at]):
                return differing
        lacking = min(last.values()) + 1
        open_ = [
            next((c for c in at.values() if not c.is_done and c.number >= lacking), None)
            for at in calls.values()
        ]
        if waiting := [call for call in open_ if call]:
            absent = [rank for rank in calls if last[rank] < lacking]
            lines = [f"{_ranks(absent)} did not come to {waiting[0].label}, {waiting[0].tensors}"]
            return self._blamed("missing-rank", lines, absent, waiting)
        oldest = [next((call for call in at.values() if not call.is_done), None) for at in calls.values()]
        waiting = [call for call in oldest if call]
        return self._open(waiting, members) if waiting else None

    def _differing(self, at: Sequence[RecordedCall]) -> Stall | None:
        """Return that ranks called one collective in different ways; the fewer are said to be wrong."""
        signatures = Counter(call.signature for call in at)
        if len(signatures) < 2:
            return None
        usual = signatures.most_common(1)[0][0]
        odd, like = (
            (some := [call for call in at if call.signature != usual])[0],
            [c for c in at if c.signature == usual],
        )
        kind = (
            "another-size-or-type" if {call.name for call in some} == {like[0].name} else "another-collective"
        )
        sides = [[call for call in some if call.signature == odd.signature], like]
        lines = [
            f"{_ranks([c.rank for c in side])} called {side[0].label}, {side[0].tensors}" for side in sides
        ]
        lines += [line for side in sides for line in _stack(side[0])]
        return _stall(kind, lines, [call.rank for call in some], like)

    def _open(self, waiting: Sequence[RecordedCall], members: set[int]) -> Stall:
        """Return why a collective that all ranks with a dump have come to does not end."""
        call = waiting[0]
        if lost := sorted(members & {*self.lost}):
            lines = [f"rank {rank} {self.lost[rank]}" for rank in lost[:5]]
            lines += [f"nor {_ranks(lost[5:])}"] if len(lost) > 5 else []
            return self._blamed(
                "no-dump", [*lines, f"{call.label}, {call.tensors}, has not ended"], lost, waiting
            )
        started = [each for each in waiting if each.state == "started"]
        if behind := [each.rank for each in waiting if each.state != "started"] if started else []:
            lines = [
                f"{_ranks(behind)} came to {call.label}, and its GPU has not begun it: other work is first"
            ]
            return self._blamed("not-started", lines, behind, started)
        where = _ranks([each.rank for each in waiting])
        lines = [
            f"all came to {call.label}, {call.tensors}; on {where} it has not ended: the network, or a GPU"
        ]
        return _stall("not-finished", [*lines, *_stack(call)], [], waiting)

    def pairs(self, calls: Sequence[RecordedCall]) -> Iterator[Stall]:
        """Yield each send without its receive, the reverse, and those of different sizes."""
        ends: dict[object, tuple[list[RecordedCall], list[RecordedCall]]] = {}
        for call in calls:
            # Where some have left a ring only those that wait can be paired.
            if not call.is_done or all(
                self.dumps[rank].is_whole for rank in call.pair or () if rank in self.dumps
            ):
                ends.setdefault((call.group, call.pair), ([], []))[call.name == "recv"].append(call)
        for sent, received in ends.values():
            for both in zip(sent, received, strict=False):
                if len({(call.elements, call.dtypes) for call in both}) > 1:
                    lines = [f"rank {call.rank} called {call.label}, {call.tensors}" for call in both]
                    yield _stall(
                        "another-size-or-type", [*lines, *_stack(both[0]), *_stack(both[1])], [], both
                    )
                    break
            count = min(len(sent), len(received))
            for call in [
                call for call in (*sent[count:], *received[count:]) if not call.is_done and call.pair
            ][:1]:
                peer = (call.pair or ())[call.name == "send"]
                wanted = "receive from" if call.name == "send" else "send to"
                why = f": it {self.lost[peer]}" if peer in self.lost else ""
                lines = [f"rank {peer} did not {wanted} rank {call.rank}, {call.tensors}{why}"]
                yield self._blamed("missing-rank", lines, [peer], [call])

    def _blamed(
        self, kind: str, lines: list[str], ranks: Sequence[int], waiting: Sequence[RecordedCall]
    ) -> Stall:
        """Return a verdict, with where one of the ranks is itself, and where the others wait for it."""
        place = (waiting[0].group, waiting[0].number)
        own = {rank: self.pending.get(rank) for rank in ranks}
        roots = [rank for rank, call in own.items() if not call or (call.group, call.number) == place]
        if (rank := next(iter(roots or ranks))) in self.dumps:
            calls = self.dumps[rank].calls
            at = own[rank] or (calls[-1] if calls else None)
            where = f"waits in no collective; its last was {at.label}" if at else "has called no collective"
            where = f"waits itself in {at.label}, {at.tensors}" if at and own[rank] else where
            lines += [f"rank {rank} {where}", *(_stack(at) if at else ())]
        who = _ranks([call.rank for call in waiting])
        lines += [f"waiting for it: {who} in {waiting[0].label}", *_stack(waiting[0])]
        return _stall(kind, lines, ranks, waiting, is_root=bool(roots))


# ---- Wording


def _stall(
    kind: str,
    lines: Sequence[str],
    ranks: Sequence[int],
    waiting: Sequence[RecordedCall],
    *,
    is_root: bool = True,
) -> Stall:
    waits = tuple(sorted({call.rank for call in waiting}))
    said = "\n".join(map(printable, lines))
    return Stall(kind, said, (), PAGE, tuple(sorted(ranks)), waits, is_root)


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: `ranks 0 to 3, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    said = ", ".join(" to ".join(map(str, span)) for span in spans[:8])
    more = f" and {sum(span[-1] - span[0] + 1 for span in spans[8:])} more" if len(spans) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {said}{more}"


def _stack(call: RecordedCall) -> list[str]:
    """Return the stack of a call in the user's own files, as Python prints one."""
    frames = [frame for frame in call.frames if isinstance(frame, dict)]
    own = [frame for frame in frames if not LIBRARY.search(str(frame.get("filename")))] or frames
    told = [[in_short(str(frame.get(key))) for key in ("filename", "line", "name")] for frame in own[:12]]
    lines = [f'  File "{file}", line {line}, in {name}' for file, line, name in reversed(told)]
    return (
        [f"stack of rank {call.rank} in {in_short(call.name)}, most recent call last:", *lines]
        if lines
        else []
    )
