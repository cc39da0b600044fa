"""Who hangs: a judgement over what each rank says of itself, and the words for it. Needs no torch.

`heartbeat.py` collects what is judged. Ranks wait for one another in collectives, so when one stops, soon all
stand still, and the question is which of them the others wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# A rank that computes, reads or writes is given this many times the timeout.
WORKING_FACTOR = 10

# How a rank's block ended: by an exception of its own, because another rank was lost, well, or as a signal
# told it to.
FAILED, LOST, LEFT, TOLD = "failed", "lost", "left", "told"

# The states of a stopped process, by proc(5).
STOPPED = ("T", "t")


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    number: int = 0  # of the beat; a rank whose number does not change is silent
    step: int = 0  # that it takes or has just taken; 0 before the first
    phase: str = "start"  # what it does in it
    age: float = 0.0  # seconds since its last sign of progress, as entering the phase
    idle: float = 0.0  # the same, where computing, reading and writing count as signs too
    waits: bool = False  # whether its main thread is in a collective, and so waits for other ranks
    counts: dict[str, int] = field(default_factory=dict)  # how often it has entered each phase
    stack: str = ""  # of its main thread, if there was no progress for a while
    end: str = ""  # how its block ended, one of `FAILED`, `LOST`, `LEFT` and `TOLD`; empty while it is in it
    error: str = ""  # what ended it, an exception or a signal


@dataclass(frozen=True)
class Seen:
    """A rank as another one sees it."""

    rank: int  # which one
    beat: Beat  # its last
    silent: float = 0.0  # seconds since that came
    host: str = ""  # the machine's name
    pid: int = 0  # of its process there
    # the state of its process by the letter of proc(5), "" if it has ended; None if it runs on another
    # machine
    process: str | None = None

    @property
    def position(self) -> str:
        """The phase and the step, in words."""
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
    ranks: Sequence[int]  # to blame; none of a deadlock
    lines: Sequence[str]  # what to tell the user

    @property
    def is_final(self) -> bool:
        """Whether the ranks can't come back, so that nobody needs to wait for the timeout."""
        return self.kind in ("failed", "gone", "told")


# ---- judging -------------------------------------------------------------------------------------------


def judge(ranks: Sequence[Seen], timeout: float) -> Verdict | None:
    """Return who keeps the others from going on; None if nobody does, or it is too early to tell."""
    dead = _dead(ranks)
    if dead is not None:
        return dead
    inside = [one for one in ranks if not one.beat.end]
    silent = [one for one in inside if one.silent >= timeout]
    if silent:
        silent = [one for one in silent if one.process in STOPPED] or silent
        kind = "stopped" if silent[0].process in STOPPED else "silent"
        return _verdict(kind, silent, inside)
    if not inside or min(one.beat.age for one in inside) < timeout / 2:
        return None  # somebody goes on
    kind, blamed = _blamed(ranks)
    accused = [one for one in blamed if not one.beat.end] or inside
    if min(one.beat.idle for one in accused) < timeout:
        return None
    return _verdict(kind, blamed, inside)


def lost(ranks: Sequence[Seen], own: int, silence: float, *, timed_out: bool) -> Verdict | None:
    """Return who was lost, after a collective of rank `own` has failed; None if that can't be told yet."""
    dead = _dead(ranks)
    if dead is not None:
        return dead
    inside = [one for one in ranks if not one.beat.end]
    others = [one for one in inside if one.rank != own]
    silent = [one for one in others if one.silent >= silence]
    if silent:
        return _verdict("stopped" if silent[0].process in STOPPED else "silent", silent, inside)
    left = [one for one in ranks if one.beat.end == LEFT]
    if left and not timed_out:
        return _verdict("left", left, inside)
    if not timed_out or not others:
        return None
    waiting = [replace(one, beat=replace(one.beat, waits=True)) if one.rank == own else one for one in ranks]
    return _verdict(*_blamed(waiting), inside)


def _dead(ranks: Sequence[Seen]) -> Verdict | None:
    failed = [one for one in ranks if one.beat.end == FAILED]
    gone = [one for one in ranks if not one.beat.end and one.process == ""]
    told = [one for one in ranks if one.beat.end == TOLD]
    for kind, blamed in (("gone", gone), ("failed", failed), ("told", told)):
        if blamed:
            return _verdict(kind, blamed, [])
    return None


def slow(ranks: Sequence[Seen], after: Sequence[float]) -> Verdict | None:
    """Return who lets the others wait, long before it is taken for hung."""
    inside = [one for one in ranks if not one.beat.end]
    if not inside or min(one.beat.age for one in inside) < min(after) / 2:
        return None
    kind, blamed = _blamed(inside)
    named = [
        one
        for one in blamed
        if (one.beat.age if one.beat.phase == "data" else one.beat.idle) >= after[one.rank]
    ]
    return _verdict("slow", named, []) if named and kind == "hangs" else None


def _blamed(ranks: Sequence[Seen]) -> tuple[str, list[Seen]]:
    """Return a kind of verdict and the ranks that the others wait for, if all hearts beat."""
    inside = [one for one in ranks if not one.beat.end]
    left = [one for one in ranks if one.beat.end]
    elsewhere = [one for one in inside if not one.beat.waits]
    if elsewhere and (left or len(elsewhere) < len(inside)):
        return "hangs", elsewhere
    skipped = [one for one in ranks if one.balance < max(each.balance for each in ranks)]
    if skipped:
        return "skipped", skipped
    if left:
        return "left", left
    behind = _behind(inside)
    return ("hangs", behind) if behind else ("deadlock", [])


def _behind(inside: Sequence[Seen]) -> list[Seen]:
    """Return the ranks in the earliest step, and of these the ones in the earliest phase; none of equals."""
    phases = list(dict.fromkeys(name for one in inside for name in one.beat.counts))

    def place(one: Seen) -> tuple[int, int]:
        return one.beat.step, phases.index(one.beat.phase) if one.beat.phase in phases else -1

    first = min(map(place, inside))
    behind = [one for one in inside if place(one) == first]
    return behind if len(behind) < len(inside) else []


# ---- words ---------------------------------------------------------------------------------------------


def no_store(own: Seen, seconds: float) -> Verdict:
    """Return what to say if the store does not answer, and this rank waits."""
    line = (
        f"the store of the process group has not answered for {seconds:.0f} s, and this rank waits in "
        f"{own.position}: the process or the machine that serves it is stopped, gone or cut off"
    )
    return Verdict("silent", (), (line,))


def _verdict(kind: str, blamed: Sequence[Seen], inside: Sequence[Seen]) -> Verdict:
    lines = [line for one in blamed for line in (_about(kind, one), *_stack(one))]
    others = [one for one in inside if one not in blamed]
    if not blamed:
        lines = [
            f"no rank goes on, and none is behind: all are in {inside[0].position}, for "
            f"{inside[0].beat.age:.0f} s. Do all call the same collectives in the same order?",
            *_stack(inside[0]),
        ]
    elif others:
        lines.append(_waiting(others))
    return Verdict(kind, [one.rank for one in blamed], lines)


def _about(kind: str, one: Seen) -> str:
    """Return what a rank is blamed for."""
    rank, beat, process = f"rank {one.rank}", one.beat, f"process {one.pid} on {one.host}"
    silence = f"no heartbeat for {one.silent:.0f} s; the last one said {one.position}"
    if kind == "failed":
        return f"{rank} failed in {one.position}: {beat.error}"
    if kind == "told":
        return f"{rank} has ended in {one.position}, as {beat.error} had told it to"
    if kind == "gone":
        return (
            f"{rank} is gone: {process} has ended without a word, as if killed; its last heartbeat "
            f"said {one.position}"
        )
    if kind == "stopped":
        return f"{rank} is stopped, as by SIGSTOP ({process}): {silence}"
    if kind == "silent" and one.process is None:
        return (
            f"{rank} is silent ({process}): {silence}. That machine or the network is down, or it is stopped"
        )
    if kind == "silent":
        return f"{rank} does not answer ({process}): {silence}. It lives, but something holds its interpreter"
    if kind == "skipped":
        passes = (
            f"{beat.counts.get('forward', 0)} forward and {beat.counts.get('backward', 0)} backward passes"
        )
        where = "has ended its loop" if beat.end else f"is in {one.position}"
        return f"{rank} skipped backward: it has begun {passes}, and {where}"
    if kind == "left":
        return f"{rank} has ended its loop after step {beat.step}: it had fewer steps than the others"
    if kind == "slow":
        return f"{rank} is slow: in {one.position} for {beat.age:.0f} s, and other ranks wait for it"
    does = "does nothing" if beat.idle > 0.5 * beat.age else "computes"
    return f"{rank} hangs: in {one.position} for {beat.age:.0f} s ({process} lives and {does})"


def _stack(one: Seen) -> list[str]:
    if not one.beat.stack or one.beat.end:
        return []
    return [f"stack of rank {one.rank}, most recent call last:", *one.beat.stack.rstrip().split("\n")]


def _waiting(others: Sequence[Seen]) -> str:
    places: dict[str, list[str]] = {}
    for one in others:
        places.setdefault(one.position, []).append(str(one.rank))
    said = [f"rank{'s' * (len(at) > 1)} {', '.join(at)} in {where}" for where, at in places.items()]
    return f"it is waited for by {'; '.join(said)}"
