"""What the ranks of a run tell each other in each step, in one small message. Imports torch."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist

from ckpttool.distributed import collectives
from train.saving import Saver
from train.stopping import Stop


class Agreement:
    """What the ranks tell each other in each step: that one was told to end, and how the save gets on.

    agreement.begin()     # before the optimizer's step, which hides what the message takes
    agreement.finish()    # after it
    """

    def __init__(self, stop: Stop, saver: Saver) -> None:
        """Prepare. A collective: NCCL would make the CPU wait for the GPU, so there it is a gloo group."""
        self.stop, self.saver = stop, saver
        self._is_alone = collectives.world_size() == 1
        self._group: dist.ProcessGroup | None = None
        if not self._is_alone and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")
        self._sent: tuple[torch.Tensor, dist.Work | None] | None = None

    def begin(self) -> None:
        """Send what this rank has to tell; do not wait."""
        if self._is_alone:
            return
        told = torch.tensor(self._word(), dtype=torch.int64)
        self._sent = told, dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> str:
        """Act on what the ranks have told, the same on each. A collective.

        Returns:
            The signal by which any of them was told to end; `""` if none was.

        Raises:
            CheckFailed, RanksDiffer: as `Saver.advance`.
        """
        told = self._word()
        if not self._is_alone:
            if self._sent is None:
                self.begin()
            assert self._sent is not None
            values, work = self._sent
            self._sent = None
            if work is not None:
                work.wait()
            told = values.tolist()
        number, milliseconds, *of_save = told
        self.saver.advance(*of_save)
        if number:
            self.stop.heard(number, milliseconds / 1e3)
        return signal.Signals(number).name if number else ""

    def _word(self) -> list[int]:
        number = self.stop.number
        return [number, int(self.stop.seconds() * 1e3) if number else 0, *self.saver.word()]
