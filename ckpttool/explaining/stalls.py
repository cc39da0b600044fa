"""Which rank did not come to which collective, judged by the dumps of torch's flight recorder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.tensors.ref import is_count
from ..core.words import in_short, printable
from .flight_recorder import RankDump, RecordedCall
from .messages import Explanation

PAGE = "docs/hangs.md"
LIBRARY = re.compile(r"[\\/](?:torch|multiprocessing)[\\/]|^<")
FRAME = ("filename", "line", "name")
CROSSED = "each waits for another: they call collectives of several groups, or send, in different orders"


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


def stalls(dumps: Sequence[RankDump], missing: Mapping[int, str]) -> list[Stall]:
    """Return why ranks wait, causes first; none if no rank does.

    Args:
        dumps: one a rank.
        missing: the ranks whose dump can't be read, and why.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    absent = {*missing}.union(*(dump.world for dump in dumps)) - {*by_rank}
    unknown = "left no dump: it never started or was killed, or its file is not among these"
    lost = {rank: missing.get(rank, unknown) for rank in absent}
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
        found[0] = replace(found[0], kind="deadlock", message=f"{CROSSED}\n{found[0].message}")
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
        is_default = name == "0" or description == "default_pg"
        members = {*of, *ranks, *(self.dumps if is_default else ()), *(self.lost if is_default else ())}
        # A rank that has never called any: unless they may have left its ring.
        never = {rank for rank in members - {*of} if rank in self.dumps and self.dumps[rank].is_whole}
        calls: Calls = {**of, **{rank: {} for rank in never}}
        last = {rank: max(numbered, default=0) for rank, numbered in calls.items()}
        first = max(min(numbered, default=1) for numbered in calls.values())
        common = {number for at in calls.values() for number in at if first <= number <= min(last.values())}
        for number in sorted(common):
            if differing := self._differing([at[number] for at in calls.values() if number in at]):
                return differing
        lacking = min(last.values()) + 1
        if waiting := _oldest_open(calls, lacking):
            absent = [rank for rank in calls if last[rank] < lacking]
            lines = [f"{_ranks(absent)} did not come to {waiting[0].label}, {waiting[0].tensors}"]
            return self._blamed("missing-rank", lines, absent, waiting)
        waiting = _oldest_open(calls)
        return self._open(waiting, members) if waiting else None

    def _differing(self, at: Sequence[RecordedCall]) -> Stall | None:
        """Return that ranks called one collective in different ways; the fewer are said to be wrong."""
        signatures = Counter(call.signature for call in at)
        if len(signatures) < 2:
            return None
        usual = signatures.most_common(1)[0][0]
        like = [call for call in at if call.signature == usual]
        odd = [call for call in at if call.signature != usual]
        is_same_name = {call.name for call in odd} == {like[0].name}
        sides = [[call for call in odd if call.signature == odd[0].signature], like]
        lines = [_called(side) for side in sides] + [line for side in sides for line in _stack(side[0])]
        kind = "another-size-or-type" if is_same_name else "another-collective"
        return _stall(kind, lines, _ranks_of(odd), like)

    def _open(self, waiting: Sequence[RecordedCall], members: set[int]) -> Stall:
        """Return why a collective that all ranks with a dump have come to does not end."""
        call = waiting[0]
        if lost := sorted(members & {*self.lost}):
            lines = [f"rank {rank} {self.lost[rank]}" for rank in lost[:5]]
            lines += [f"nor {_ranks(lost[5:])}"] if len(lost) > 5 else []
            lines.append(f"{call.label}, {call.tensors}, has not ended")
            return self._blamed("no-dump", lines, lost, waiting)
        started = [each for each in waiting if each.state == "started"]
        if behind := [each.rank for each in waiting if each.state != "started"] if started else []:
            what = f"{_ranks(behind)} came to {call.label}, and its GPU has not begun it: other work is first"
            return self._blamed("not-started", [what], behind, started)
        where = f"on {_ranks(_ranks_of(waiting))} it has not ended: the network, or a GPU"
        what = f"all came to {call.label}, {call.tensors}; {where}"
        return _stall("not-finished", [what, *_stack(call)], [], waiting)

    def pairs(self, calls: Sequence[RecordedCall]) -> Iterator[Stall]:
        """Yield each send without its receive, the reverse, and those of different sizes."""
        ends: dict[object, tuple[list[RecordedCall], list[RecordedCall]]] = {}
        cut = {rank for rank, dump in self.dumps.items() if not dump.is_whole}
        for call in calls:
            if call.is_done and not cut.isdisjoint(call.pair or ()):
                continue  # where some have left a ring only those that wait can be paired
            ends.setdefault((call.group, call.pair), ([], []))[call.name == "recv"].append(call)
        for sent, received in ends.values():
            for both in zip(sent, received, strict=False):
                if len({(call.elements, call.dtypes) for call in both}) > 1:
                    lines = [_called([call]) for call in both] + [*_stack(both[0]), *_stack(both[1])]
                    yield _stall("another-size-or-type", lines, [], both)
                    break
            count = min(len(sent), len(received))
            rest = (call for call in (*sent[count:], *received[count:]) if not call.is_done)
            if (alone := next(rest, None)) and alone.pair:
                peer = alone.pair[alone.name == "send"]
                wanted = "receive from" if alone.name == "send" else "send to"
                why = f": it {self.lost[peer]}" if peer in self.lost else ""
                lines = [f"rank {peer} did not {wanted} rank {alone.rank}, {alone.tensors}{why}"]
                yield self._blamed("missing-rank", lines, [peer], [alone])

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
        who = _ranks(_ranks_of(waiting))
        lines += [f"waiting for it: {who} in {waiting[0].label}", *_stack(waiting[0])]
        return _stall(kind, lines, ranks, waiting, is_root=bool(roots))


def _oldest_open(calls: Calls, first: int = 0) -> list[RecordedCall]:
    """Return of each rank the oldest call from a number on that has not ended."""
    open_ = ([c for c in at.values() if not c.is_done and c.number >= first] for at in calls.values())
    return [some[0] for some in open_ if some]


# ---- Wording


def _called(some: Sequence[RecordedCall]) -> str:
    return f"{_ranks(_ranks_of(some))} called {some[0].label}, {some[0].tensors}"


def _ranks_of(calls: Sequence[RecordedCall]) -> list[int]:
    return [call.rank for call in calls]


def _stall(
    kind: str,
    lines: Sequence[str],
    ranks: Sequence[int],
    waiting: Sequence[RecordedCall],
    *,
    is_root: bool = True,
) -> Stall:
    waits = tuple(sorted({*_ranks_of(waiting)}))
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
    joined = [(" to " if span[-1] - span[0] > 1 else ", ").join(map(str, span)) for span in spans[:8]]
    said = ", ".join(joined)
    more = f" and {sum(span[-1] - span[0] + 1 for span in spans[8:])} more" if len(spans) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {said}{more}"


def _stack(call: RecordedCall) -> list[str]:
    """Return the stack of a call in the user's own files, as Python prints one."""
    frames = [[*map(_shown, map(frame.get, FRAME))] for frame in call.frames if isinstance(frame, dict)]
    own = [frame for frame in frames if not LIBRARY.search(frame[0])] or frames
    lines = [f'  File "{file}", line {line}, in {name}' for file, line, name in reversed(own[:12])]
    first = f"stack of rank {call.rank} in {in_short(call.name)}, most recent call last:"
    return [first, *lines] if lines else []


def _shown(value: object) -> str:
    return in_short(value) if isinstance(value, str) else str(value) if is_count(value) else "?"
