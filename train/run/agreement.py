"""What ranks tell each other in passing: that one was told to end, how far a save is. Imports torch."""

from __future__ import annotations

import math
import signal
import time
from collections import deque

import torch
import torch.distributed as dist

from ckpttool.distributed import collectives
from train.checkpoint.saver import Saver
from train.launch.stopping import Stop

# Seconds between two messages. Where steps are shorter, there is none in some of them.
SPACING = 0.25

# Steps between two messages at most.
MOST = 10

# Seconds from which on a step is long: what is sent in it is read at its end, not at that of the next.
LONG = 1.0

# Seconds that are told of a step at most.
LONGEST = 1e6


class Agreement:
    """Tells all ranks that one was told to end, and how far the save has come on each.

        agreement.begin()     # in each step, before the optimizer's
        agreement.finish()    # after it

    To read a message in its own step is to wait once more for the slowest rank, which costs some per cent of
    a short step. By the next one it has arrived: the gradients have made the ranks wait for each other.
    """

    def __init__(self, stop: Stop, saver: Saver) -> None:
        self.stop, self.saver = stop, saver
        self._is_alone = collectives.world_size() == 1
        self._group: dist.ProcessGroup | None = None
        if not self._is_alone and dist.get_backend() != "gloo":
            group = dist.new_group(backend="gloo")  # over NCCL the CPU would wait for the GPU
            assert isinstance(group, dist.ProcessGroup)  # of all ranks, and this is one
            self._group = group
        # In which step, this rank's values, and the work after which they are the largest of all ranks'.
        self._sent: deque[tuple[int, torch.Tensor, dist.Work | None]] = deque()
        self._step = self._sent_in = 0
        self._spacing, self._waits = 1, True
        self._began, self._gap, self._seconds = time.monotonic(), math.inf, math.inf

    def begin(self) -> None:
        """Send what this rank has to tell, if it is time for that; do not wait."""
        self._step += 1
        gap, self._began = time.monotonic() - self._began, time.monotonic()
        # An evaluation or a save between two steps lengthens one gap: a step is long if two in a row are.
        self._gap, self._seconds = gap, min(gap, self._gap)
        if self._step - self._sent_in >= self._spacing and not self._is_alone:
            self._send()

    def finish(self, *, wait: bool = False) -> str:
        """Act on what the ranks have told, the same on each; return the signal by which one was told to end.

        A collective where a message was sent, and raises as `Saver.advance`. `wait` leaves nothing for later.
        """
        signal_of_any = self._act(self._word()) if self._is_alone else ""
        while self._sent and (wait or self._waits or signal_of_any or self._sent[0][0] < self._step):
            _, values, work = self._sent.popleft()
            if work is not None:
                work.wait()
            signal_of_any = self._act([int(value) for value in values.tolist()]) or signal_of_any
        return signal_of_any

    def ask(self) -> str:
        """Send a message in any case, and wait for it. A collective, as `finish`."""
        if not self._is_alone:
            self._send()
        return self.finish(wait=True)

    def _act(self, told: list[int]) -> str:
        number, milliseconds, microseconds, *of_save = told
        self._spacing = max(1, min(int(SPACING * 1e6) // max(microseconds, 1), MOST))
        self._waits = microseconds >= LONG * 1e6
        self.saver.advance(*of_save)
        if number:
            self.stop.heard(number, milliseconds / 1e3)
        return signal.Signals(number).name if number else ""

    def _send(self) -> None:
        values = torch.tensor(self._word(), dtype=torch.int64)
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._sent.append((self._step, values, work))
        self._sent_in = self._step

    def _word(self) -> list[int]:
        """Return what this rank tells; of each number, the largest of any rank counts."""
        number = self.stop.number
        since = int(self.stop.seconds() * 1e3) if number else 0
        return [number, since, int(min(self._seconds, LONGEST) * 1e6), *self.saver.word()]
