"""A heartbeat of each rank: it names the rank that hangs, and ends the job. Imports torch where it is used.

A rank has two threads. One exchanges beats through the store of the process group. It has its own connection,
since a client of a TCPStore waits in one call at a time. The other thread judges (`hangs.py`), because a call
to a store on a stopped machine never returns. Neither needs the main thread, so a rank that hangs still says
where. A rank that is stopped or killed says nothing; that tells the two apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from . import hangs, observer
from .hangs import Beat, Seen, Verdict
from .observer import ASKED, Observer, Watch

# Seconds that a rank waits for the launcher to end it after another rank has failed, and reported that.
PATIENCE = 5.0

# Seconds after which a rank that others wait for is called slow, unless half of the timeout is shorter.
WARN_AFTER = 30.0


LOST_PEER = re.compile(r"connection (closed|reset) by peer|broken pipe|remote process exited", re.IGNORECASE)
TIMED_OUT = re.compile(r"timed out waiting|operation timeout", re.IGNORECASE)


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error of gloo or NCCL says that another rank has gone, by its message."""
    return isinstance(error, RuntimeError) and bool(LOST_PEER.search(str(error)))


def is_timeout(error: BaseException) -> bool:
    """Return whether an error of gloo or NCCL says that another rank has not answered, by its message."""
    return isinstance(error, RuntimeError) and bool(TIMED_OUT.search(str(error)))


class Pulse:
    """The two threads of a rank, and what they know of the others. Made by all ranks together."""

    def __init__(self, watched: Watch) -> None:
        import torch.distributed as dist

        from . import collectives

        self.watched, self.timeout = watched, watched.timeout
        self.interval = min(1.0, watched.timeout / 20)
        self.rank, self.size = collectives.rank(), collectives.world_size()
        self.over, self.speaks = threading.Event(), threading.Lock()
        self.own = Observer(watched, self.interval, self.over)
        self.memory_kills = observer.memory_kills()
        about: dict[str, Any] = {"host": socket.gethostname(), "machine": observer.machine()}
        about |= {"pid": os.getpid(), "began": observer.began(os.getpid()), "dump": self.own.dump}
        met = collectives.gather((uuid.uuid4().hex, about))
        self.about = [about for _, about in met]
        # Keys of this watch alone: a store may outlive a job, and still hold what dead ranks wrote.
        self.keys = [f"ckpttool/watch/{met[0][0]}/{name}" for name in (*range(self.size), "verdict")]
        self.store: Any = dist.distributed_c10d._get_default_store().clone()
        self.clock = self.own.clock
        self.exchanged = self.clock.now()
        self.beats = [(Beat(), self.exchanged)] * self.size
        self.verdict = self.end = self.error = ""
        self.slow: Sequence[int] = ()
        self._asked: set[int] = set()  # silent ranks that were asked for their stacks
        self.store_is_gone = False
        self._asking: threading.Thread | None = None
        self.warn_after = [min(WARN_AFTER, self.timeout / 2)] * self.size
        self._send()
        self.own.begin()
        if self.rank == 0:
            self.store.set(self.keys[-1], "")
        collectives.gather(None)  # now every key is there; reading an absent one would wait
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._exchange, self._judge)]
        for thread in self.threads:
            thread.start()

    def stop(self, end: str, error: BaseException | str = "") -> None:
        """Tell the others how the block has ended here, and stop the threads."""
        # The other thread tells them: a signal, as of a dead loader process, may raise another error here.
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            end = hangs.LEFT
        said = getattr(error, "message", error)  # a hint is for the rank that raised it
        text = f"{type(error).__name__}: {said}" if isinstance(error, BaseException) else error
        self.error = " ".join(text.split())[:500]
        self.end = end
        self.over.set()
        for thread in self.threads:
            thread.join(timeout=2 * self.interval)
        # One that is late still uses the file of the stack: another file may get its number.
        if not any(thread.is_alive() for thread in self.threads):
            self.own.close()

    # ---- exchanging

    def _exchange(self) -> None:
        try:
            while not self.over.wait(self.interval):
                self._send()
                self._receive(self.store)
            self._send()
        except RuntimeError:
            self.store_is_gone = True  # with the process that served it; the judging thread finds out why

    def _send(self) -> None:
        beat, at = self.own.beat, self.watched
        if self.end:
            beat = dataclasses.replace(beat, step=at.step, phase=at.doing, counts=dict(at.counts))
            beat = dataclasses.replace(beat, end=self.end, error=self.error)
        self.store.set(self.keys[self.rank], json.dumps(dataclasses.asdict(beat)))

    def _receive(self, store: Any) -> None:
        read = store.multi_get(self.keys) if store.has_extended_api() else map(store.get, self.keys)
        *beats, verdict = [bytes(value).decode() for value in read]
        now = self.clock.now()
        for rank, written in enumerate(beats):
            beat = Beat(**json.loads(written))
            if beat.number != self.beats[rank][0].number or beat.end:
                self.beats[rank] = beat, now
        self.exchanged, self.verdict = now, verdict

    def seen(self) -> list[Seen]:
        """Return all ranks as this one sees them."""
        self._ask_for_stacks()
        now, ranks = self.clock.now(), []
        for rank, (about, (beat, came)) in enumerate(zip(self.about, self.beats, strict=True)):
            beat, silent = (self.own.beat, 0.0) if rank == self.rank else (beat, now - came)
            process = self._process(rank)
            if silent >= self.timeout and process and not beat.end:
                beat = dataclasses.replace(beat, stack=_dumped(about))
            ranks.append(Seen(rank, beat, silent, about["host"], about["pid"], process))
        return ranks

    def _ask_for_stacks(self) -> None:
        """Have silent ranks of this machine write their stacks, once each; wait for at most a second."""
        before, since, asked = self._asked, self.clock.now() - self.timeout, []
        silent = {rank for rank, (beat, came) in enumerate(self.beats) if came <= since and not beat.end}
        self._asked = silent - {self.rank}
        for rank in self._asked - before:
            about, process = self.about[rank], self._process(rank)
            if ASKED is None or about["dump"] is None or not process or process in hangs.STOPPED:
                continue
            with contextlib.suppress(OSError):
                os.kill(about["pid"], ASKED)
                asked.append(about)
        stacks: list[str] = []
        for _ in range(20 if asked else 0):
            time.sleep(0.05)
            last, stacks = stacks, [_dumped(about) for about in asked]
            if all(stacks) and stacks == last:
                return

    def _process(self, rank: int) -> str | None:
        """Return the state of a rank's process; None if it runs on another machine."""
        about = self.about[rank]
        if not about["machine"] or about["machine"] != self.about[self.rank]["machine"]:
            return None
        return observer.state(about["pid"], about["began"])

    # ---- judging

    def _judge(self) -> None:
        while not self.over.wait(self.interval):
            self.own.look()
            ranks = self.seen()
            told = Verdict(**json.loads(self.verdict)) if self.verdict else None
            verdict = told or hangs.judge(ranks, self.timeout)
            if verdict is None and self.clock.now() - self.exchanged >= self.timeout <= self.own.beat.idle:
                verdict = hangs.no_store(ranks[self.rank], self.clock.now() - self.exchanged)
            if self.over.is_set():
                return  # the block has ended while this thread was late: nothing is left to judge
            if verdict is None:
                self._warn(ranks)
            # A dead rank's last words may be on their way, and this rank may have useful work left.
            elif verdict.kind not in ("failed", "gone", "told") or self.own.beat.idle >= PATIENCE:
                self._leave(self._agreed(verdict))

    def _warn(self, ranks: list[Seen]) -> None:
        """Warn of a rank that others wait for, on the first of these, each time after twice as long."""
        if self.slow and all(ranks[rank].beat.age < 3 * self.interval for rank in self.slow):
            _say("warning", self.rank, [f"rank {', '.join(map(str, self.slow))} has continued"])
            self.slow = ()
        if (verdict := hangs.slow(ranks, self.warn_after)) is None:
            return
        for rank in verdict.ranks:
            self.warn_after[rank] *= 2
        if self.rank == min(set(range(self.size)) - set(verdict.ranks)):
            self.slow = verdict.ranks
            lines = [*verdict.lines, f"it counts as hung once it has done nothing for {self.timeout:g} s"]
            _say("warning", self.rank, lines)

    def explain(self, *, timed_out: bool) -> str:
        """Write and return which rank was lost, after a collective has failed; empty if that is unknown."""
        # Written at once: the launcher ends this process as soon as it sees that the other one is dead.
        for _ in range(5):
            self._ask(self._receive)
            if self.verdict:
                self._leave(Verdict(**json.loads(self.verdict)))
            verdict = hangs.lost(self.seen(), self.rank, 3 * self.interval, timed_out=timed_out)
            if verdict is not None:
                lines = self._lines(verdict)
                self.speaks.acquire()  # for good; if the judging thread speaks already, it ends this process
                _say("error", self.rank, lines)
                return "\n".join(lines)
            time.sleep(self.interval)
        return ""

    # ---- ending

    def _agreed(self, verdict: Verdict) -> Verdict:
        """Return what all ranks say: of several verdicts at once, the first one."""
        if self.clock.now() - self.exchanged < self.timeout:
            text = json.dumps(dataclasses.asdict(verdict))
            agreed = self._ask(lambda store: store.compare_set(self.keys[-1], "", text))
            return verdict if agreed is None else Verdict(**json.loads(agreed))
        return verdict

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return what a call to the store returns; None if it does not answer, as once rank 0 has ended."""
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question(self.store.clone()))

        # A thread of its own: to connect to a store that is gone takes torch as long as ranks have to join.
        if not self.store_is_gone and not (self._asking and self._asking.is_alive()):
            self._asking = threading.Thread(target=ask, daemon=True)
            self._asking.start()
            self._asking.join(2 * self.interval)
        return answers[0] if answers else None

    def _leave(self, verdict: Verdict) -> None:
        """Say what has happened and end this process."""
        self.speaks.acquire()
        lines = [*self._lines(verdict), "the job ends (exit 1)"]
        if verdict.kind == "stopped" and self.rank in verdict.ranks:  # and goes on: the others have said it
            lines = ["this rank was stopped, as by SIGSTOP, and the others have ended the job (exit 1)"]
        _say("error", self.rank, lines)
        time.sleep(self.interval + 0.5)  # until all ranks have said it
        self._release(verdict.ranks)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(1)

    def _lines(self, verdict: Verdict) -> list[str]:
        lines = list(verdict.lines)
        if verdict.kind == "told":
            self.watched.excuse()
        if verdict.kind == "gone" and observer.memory_kills() > self.memory_kills:
            lines.append("meanwhile the kernel killed a process on this machine, as memory ran out")
        return lines

    def _release(self, ranks: Iterable[int]) -> None:
        """End ranks of this machine that can't end themselves; a launcher would wait for them."""
        for seen in self.seen():
            if seen.rank in ranks and seen.silent >= self.timeout and seen.process and not seen.beat.end:
                stopped = seen.process in hangs.STOPPED  # when it goes on it will read the verdict
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(seen.pid, signal.SIGCONT if stopped else signal.SIGKILL)


def _say(kind: str, rank: int, lines: Iterable[str]) -> None:
    """Write to stderr, in one piece, whatever lock the main thread holds."""
    text = f"{kind}: rank {rank}: " + "\n  ".join(lines) + "\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _dumped(about: dict[str, Any]) -> str:
    """Return the stacks that faulthandler has written in a process of this machine."""
    path = f"/proc/{about['pid']}/fd/{about['dump']}"
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        return file.read(4000)
    return ""


# The watch in force; without a `watch` block, one that no thread looks at.
_current = Watch(0.0)
_pulse: Pulse | None = None


def phase(name: str) -> None:
    """Note for the `watch` in force that this rank now does `name`."""
    _current.phase(name)


def begin_step(number: int) -> None:
    """Note for the `watch` in force that this rank begins an optimizer step."""
    _current.step = number


def progress() -> None:
    """Note for the `watch` in force that this rank has made progress within its phase."""
    _current.marks += 1


def excuse(call: Callable[[], object]) -> None:
    """Call `call` if the job ends because another rank has called `end_as_told`."""
    _current.excuse = call


def end_as_told(signal: str) -> None:
    """Tell the other ranks that a signal ends this process now, just before it does. For any thread."""
    if _pulse is not None:
        _pulse.stop(hangs.TOLD, signal)


@contextlib.contextmanager
def watch(timeout: float = 300.0) -> Iterator[Watch]:
    """Watch the ranks of the process group during the block. If one hangs, say which, and end the job.

    A rank hangs if the others wait for it and it has done nothing for `timeout` seconds: it has entered no
    phase, and neither computed nor read or written. A rank that works, as in a long save or while a model is
    compiled, has ten times as long. Every rank then writes to stderr which rank it is, since when, in which
    phase, and with which Python stack; and each process ends with exit code 1, at most five seconds later.
    A rank that was killed is named at once. One that is slow is named in a warning, after 30 seconds or
    half of the timeout.

    All ranks enter and leave together. With one rank nothing is watched.

    Args:
        timeout: seconds; 0 watches nothing.

    Yields:
        What is told of phases and steps; `watched.steps(loader)` is enough.

    Raises:
        RankLost: a collective in the block failed because another rank was lost; names it and how it ended.
    """
    from . import collectives

    global _current, _pulse
    watched = Watch(timeout)
    if not timeout or collectives.world_size() == 1:
        yield watched
        return
    pulse = Pulse(watched)
    before, _current, _pulse = (_current, _pulse), watched, pulse
    end, cause = hangs.LEFT, cast("BaseException | str", "")
    try:
        yield watched
    except BaseException as error:
        end, cause = hangs.FAILED, error
        if is_lost_rank(error) or is_timeout(error):
            end = hangs.LOST
            if explained := pulse.explain(timed_out=is_timeout(error)):
                raise collectives.RankLost(explained) from error
        raise
    finally:
        _current, _pulse = before
        pulse.stop(end, cause)
