"""What the ranks of a run tell each other while they train, in one small message. Imports torch."""

from __future__ import annotations

import signal
import time

import torch
import torch.distributed as dist

from ckpttool.distributed import collectives
from train.saving import Saver
from train.stopping import Stop

SPACING = 0.02
"""Seconds between two messages. Where steps are shorter, there is none in some of them."""

MOST = 10
"""Steps between two messages at most."""


class Agreement:
    """Tells all ranks that one was told to end, and how far the save has come on each.

        agreement.begin()     # in each step, before the optimizer's, which hides what the message takes
        agreement.finish()    # after it

    Attributes:
        stop: what this rank was told.
        saver: of this rank.
    """

    def __init__(self, stop: Stop, saver: Saver) -> None:
        """Prepare. A collective: over NCCL the CPU would wait for the GPU, so there it makes a gloo group."""
        self.stop, self.saver = stop, saver
        self._is_alone = collectives.world_size() == 1
        self._group: dist.ProcessGroup | None = None
        if not self._is_alone and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")
        self._sent: tuple[torch.Tensor, dist.Work | None] | None = None
        self._steps, self._until_next, self._last = 0, 1, time.monotonic()

    def begin(self) -> None:
        """Send what this rank has to tell, if it is time for that; do not wait."""
        self._steps += 1
        if not self._is_alone and self._steps >= self._until_next:
            self._send()

    def finish(self, *, now: bool = False) -> str:
        """Act on what the ranks have told, the same on each. A collective where a message was sent.

        Args:
            now: send one here, if none was.

        Returns:
            The signal by which any rank was told to end; `""` if none was.

        Raises:
            CheckFailed, RanksDiffer: as `Saver.advance`.
        """
        told = self._word()
        if not self._is_alone:
            if self._sent is None:
                if not now:
                    return ""
                self._send()
            told = self._received()
        number, milliseconds, fewest, *of_save = told
        self._steps, self._until_next, self._last = 0, -fewest, time.monotonic()
        self.saver.advance(*of_save)
        if number:
            self.stop.heard(number, milliseconds / 1e3)
        return signal.Signals(number).name if number else ""

    def _send(self) -> None:
        told = torch.tensor(self._word(), dtype=torch.int64)
        self._sent = told, dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _received(self) -> list[int]:
        """Return the largest of what the ranks have told, of each number."""
        assert self._sent is not None
        (values, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
        return [int(value) for value in values.tolist()]

    def _word(self) -> list[int]:
        """Return what this rank tells. Steps are negative: the fewest to the next message are the largest."""
        number, passed = self.stop.number, (time.monotonic() - self._last) / max(self._steps, 1)
        steps = max(1, min(int(SPACING / max(passed, 1e-6)), MOST))
        return [number, int(self.stop.seconds() * 1e3) if number else 0, -steps, *self.saver.word()]
