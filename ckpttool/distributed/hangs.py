"""The verdict on which rank hangs, judged from what each says of itself, and its words. Needs no torch.

Ranks wait for one another in collectives. When one stops, all soon stand still; the question is which one the
others wait for. `heartbeat.py` collects the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# A rank that computes, reads or writes is given this many times the timeout: saves and compilation are long.
WORKING_FACTOR = 10

# How a rank's block ended: by its own exception, because another rank was lost, normally, or by a signal.
FAILED, LOST, LEFT, TOLD = "failed", "lost", "left", "told"

# The states of a stopped process, by proc(5).
STOPPED = ("T", "t")


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    number: int = 0  # counts beats; a rank whose number does not change is silent
    step: int = 0  # current or just taken; 0 before the first
    phase: str = "start"
    age: float = 0.0  # seconds since its last sign of progress, such as entering the phase
    idle: float = 0.0  # the same, where computing, reading and writing count as signs too
    waits: bool = False  # whether its main thread is in a collective, and so waits for other ranks
    counts: dict[str, int] = field(default_factory=dict)  # phase -> how often it was entered
    stack: str = ""  # of its main thread, if there was no progress for a while
    end: str = ""  # how its block ended, one of `FAILED`, `LOST`, `LEFT` and `TOLD`; empty while it is in it
    error: str = ""  # what ended it, an exception or a signal


@dataclass(frozen=True)
class Seen:
    """A rank as another one sees it."""

    rank: int
    beat: Beat  # its last
    silent: float = 0.0  # seconds since that came
    host: str = ""
    pid: int = 0
    # its state by the letter of proc(5), "" if it has ended; None if it runs on another machine
    process: str | None = None

    @property
    def position(self) -> str:
        return f"'{self.beat.phase}' of step {self.beat.step}" if self.beat.step else f"'{self.beat.phase}'"

    @property
    def balance(self) -> int:
        """Backward passes begun less forward passes begun; a forward pass that it is in does not count."""
        counts, is_in_one = self.beat.counts, self.beat.phase == "forward" and not self.beat.end
        return counts.get("backward", 0) - counts.get("forward", 0) + is_in_one


@dataclass(frozen=True)
class Verdict:
    """Which ranks are to blame, and why."""

    # `failed`, `gone`, `told`, `stopped`, `silent`, `hangs`, `skipped`, `left`, `deadlock` or `slow`
    kind: str
    ranks: Sequence[int]  # those to blame; none in a deadlock
    lines: Sequence[str]  # for the user


# ---- Judging


def judge(ranks: Sequence[Seen], timeout: float) -> Verdict | None:
    """Return who keeps the others waiting; None if no rank does, or it is too early to tell."""
    if (dead := _dead(ranks)) is not None:
        return dead
    inside = [seen for seen in ranks if not seen.beat.end]
    silent = [seen for seen in inside if seen.silent >= timeout]
    if silent:
        silent = [seen for seen in silent if seen.process in STOPPED] or silent
        return _verdict("stopped" if silent[0].process in STOPPED else "silent", silent, inside)
    if not inside or min(seen.beat.age for seen in inside) < timeout / 2:
        return None  # a rank makes progress
    kind, blamed = _blamed(ranks)
    accused = [seen for seen in blamed if not seen.beat.end] or inside
    return None if min(seen.beat.idle for seen in accused) < timeout else _verdict(kind, blamed, inside)


def lost(ranks: Sequence[Seen], own: int, silence: float, *, timed_out: bool) -> Verdict | None:
    """Return who was lost, after a collective of rank `own` has failed; None if that can't be told yet."""
    if (dead := _dead(ranks)) is not None:
        return dead
    inside = [seen for seen in ranks if not seen.beat.end]
    others = [seen for seen in inside if seen.rank != own]
    silent = [seen for seen in others if seen.silent >= silence]
    if silent:
        return _verdict("stopped" if silent[0].process in STOPPED else "silent", silent, inside)
    left = [seen for seen in ranks if seen.beat.end == LEFT]
    if left and not timed_out:
        return _verdict("left", left, inside)
    if not timed_out or not others:
        return None
    waits = [replace(s, beat=replace(s.beat, waits=True)) if s.rank == own else s for s in ranks]
    return _verdict(*_blamed(waits), inside)


def _dead(ranks: Sequence[Seen]) -> Verdict | None:
    gone = [seen for seen in ranks if not seen.beat.end and seen.process == ""]
    ended = {kind: [seen for seen in ranks if seen.beat.end == kind] for kind in (FAILED, TOLD)}
    verdicts = (_verdict(kind, blamed, []) for kind, blamed in {"gone": gone, **ended}.items() if blamed)
    return next(verdicts, None)


def slow(ranks: Sequence[Seen], after: Sequence[float]) -> Verdict | None:
    """Return who keeps the others waiting, long before it counts as hung."""
    # A rank that computes or writes, as in a long save, is not named. A rank that waits for data is.
    inside = [seen for seen in ranks if not seen.beat.end]
    if not inside or min(seen.beat.age for seen in inside) < min(after) / 2:
        return None
    kind, blamed = _blamed(inside)
    ages = [seen.beat.age if seen.beat.phase == "data" else seen.beat.idle for seen in blamed]
    named = [seen for seen, age in zip(blamed, ages, strict=True) if age >= after[seen.rank]]
    return _verdict("slow", named, []) if named and kind == "hangs" else None


def _blamed(ranks: Sequence[Seen]) -> tuple[str, list[Seen]]:
    """Return the kind of verdict and the ranks that the others wait for, while all have a heartbeat."""
    inside = [seen for seen in ranks if not seen.beat.end]
    left = [seen for seen in ranks if seen.beat.end]
    elsewhere = [seen for seen in inside if not seen.beat.waits]
    if elsewhere and (left or len(elsewhere) < len(inside)):
        return "hangs", elsewhere
    skipped = [seen for seen in ranks if seen.balance < max(other.balance for other in ranks)]
    if skipped:
        return "skipped", skipped
    if left:
        return "left", left
    behind = _behind(inside)
    return ("hangs", behind) if behind else ("deadlock", [])


def _behind(inside: Sequence[Seen]) -> list[Seen]:
    """Return the ranks in the earliest phase of the earliest step; none if all are there."""
    phases = list(dict.fromkeys(name for seen in inside for name in seen.beat.counts))

    def place(seen: Seen) -> tuple[int, int]:
        return seen.beat.step, phases.index(seen.beat.phase) if seen.beat.phase in phases else -1

    first = min(map(place, inside))
    behind = [seen for seen in inside if place(seen) == first]
    return behind if len(behind) < len(inside) else []


# ---- Wording


def no_store(own: Seen, seconds: float) -> Verdict:
    """Return the verdict of a rank that waits while the store does not answer."""
    waits = f"the store of the process group has not answered for {seconds:.0f} s, and this rank waits in"
    why = "the process or the machine that serves it is stopped, gone or cut off"
    return Verdict("silent", (), (f"{waits} {own.position}: {why}",))


def _verdict(kind: str, blamed: Sequence[Seen], inside: Sequence[Seen]) -> Verdict:
    lines = [line for seen in blamed for line in (_about(kind, seen), *_stack(seen))]
    others = [seen for seen in inside if seen not in blamed]
    if not blamed:
        lines = [
            f"no rank makes progress, and none is behind: all are in {inside[0].position}, for "
            f"{inside[0].beat.age:.0f} s. Do all call the same collectives in the same order?",
            *_stack(inside[0]),
        ]
    elif others:
        lines.append(_waiting(others))
    return Verdict(kind, [seen.rank for seen in blamed], lines)


def _about(kind: str, seen: Seen) -> str:
    beat, process = seen.beat, f"process {seen.pid} on {seen.host}"
    counts = [f"{beat.counts.get(name, 0)} {name}" for name in ("forward", "backward")]
    silence = f"({process}): no heartbeat for {seen.silent:.0f} s; the last one said {seen.position}"
    does = "does nothing" if beat.idle > 0.5 * beat.age else "computes"
    since = f"in {seen.position} for {beat.age:.0f} s"
    said = {
        "failed": f"failed in {seen.position}: {beat.error}",
        "told": f"was ended by {beat.error} in {seen.position}",
        "gone": f"is gone: {process} exited without reporting, probably killed; its last heartbeat said "
        f"{seen.position}",
        "stopped": f"is stopped, as by SIGSTOP {silence}",
        "silent": f"does not answer {silence}. It is alive, but something holds its interpreter",
        "skipped": f"skipped backward: it has begun {' and '.join(counts)} passes, and "
        f"{'has ended its loop' if beat.end else f'is in {seen.position}'}",
        "left": f"has ended its loop after step {beat.step}: it had fewer steps than the others",
        "slow": f"is slow: {since}, and other ranks wait for it",
        "hangs": f"hangs: {since} ({process} is alive and {does})",
    }
    if kind == "silent" and seen.process is None:
        return f"rank {seen.rank} is silent {silence}. That machine or the network is down, or it is stopped"
    return f"rank {seen.rank} {said.get(kind, said['hangs'])}"


def _stack(seen: Seen) -> list[str]:
    lines = [f"stack of rank {seen.rank}, most recent call last:", *seen.beat.stack.rstrip().split("\n")]
    return lines if seen.beat.stack and not seen.beat.end else []


def _waiting(others: Sequence[Seen]) -> str:
    places: dict[str, list[str]] = {}
    for seen in others:
        places.setdefault(seen.position, []).append(str(seen.rank))
    said = [f"rank{'s' * (len(at) > 1)} {', '.join(at)} in {where}" for where, at in places.items()]
    return f"waiting for it: {'; '.join(said)}"
