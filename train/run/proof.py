"""The record of a run, run.jsonl: how it began and what came of it, so that it can be proved. Imports torch.

With `--prove-every K` rank 0 writes lines, each with the hash of the one before (`core/files/digest.py`):
how the run began or was resumed, who takes which samples in each epoch, every K steps the digests of the
weights and of the samples used, the digests of each checkpoint, and each evaluation. `ckpttool prove` reads
it, and trains a part of the run again to compare. docs/proof.md says what that proves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ckpttool.core.files import digest
from ckpttool.core.files.commit import naming
from ckpttool.core.files.digest import Link
from ckpttool.core.words import finite
from ckpttool.distributed import collectives, transport
from ckpttool.distributed.plan import InOrder
from ckpttool.errors import FileError
from train.checkpoint.format import versions
from train.config.command_line import arguments_of
from train.config.sections import TrainConfig
from train.data.samples import leaves_of
from train.launch import same_settings
from train.log.step_log import HeldLines
from train.trainer.progress import Recorder
from train.trainer.trainer import Trainer

# The samples of some steps on one rank: each step's indices and digests.
Used = dict[int, list[tuple[int, str]]]

# Bytes of a sample's digest that are kept.
SHORT = 8

# Settings that change no bit of the weights, or that a replay gives itself.
NOT_OF_THE_TRAINING = (
    *("out", "resume", "spawn", "force", "max_time", "stop_at", "change", "download", "preview"),
    *("save_every", "save", "keep", "keep_deltas", "keep_best", "grace", "prove_every"),
    *("tracker", "every", "profile"),
    *("init", "init_allow_missing", "timeout"),
)


class Proof(Recorder):
    """Writes the record of a run, and the digests of its weights after each `every` steps. Rank 0 writes.

    A full disk ends no run: lines are held, and written when there is room again. The line of a checkpoint
    is in the file before the checkpoint takes its place, so while lines are held none is saved.
    """

    def __init__(self, trainer: Trainer, folder: str, every: int) -> None:
        self.trainer, self.every = trainer, every
        self.path = os.path.join(folder, digest.NAME)
        self.last: Link | None = None
        self._lines = HeldLines(self._append)
        self._alone = threading.Lock()  # the thread that saves writes too
        self._of_step: list[tuple[int, str]] = []
        self._of_steps: Used = {}

    @property
    def head(self) -> str:
        """The hash of the last line in the file; on rank 0."""
        with self._alone:
            return self.last.hash if self.last else digest.FIRST

    def begin(self, source: Mapping[str, Any] | None) -> None:
        """Write how the run begins here; `source` is of the checkpoint that it goes on from."""
        weights = self._weights()
        collectives.from_rank_zero(lambda: self._write_begin(source, weights))

    def _write_begin(self, source: Mapping[str, Any] | None, weights: Mapping[str, Any]) -> None:
        trainer, config = self.trainer, self.trainer.config
        if os.path.exists(self.path):  # a record that goes on
            with naming(self.path):
                digest.cut_off(self.path)
            if os.path.getsize(self.path):
                self.last = digest.read(self.path)[0][-1]
        usual = {name: TrainConfig()[name] for name in NOT_OF_THE_TRAINING}
        self._write(
            "begin",
            step=trainer.progress.global_step,
            source=source,
            arguments=arguments_of(config.changed(**usual)),
            init=config.model.init and [config.plain()["init"], *config.model.init_allow_missing],
            code={name: config[name] for name in same_settings.SPECS},
            every=self.every,
            ranks=collectives.world_size(),
            virtual_ranks=config.batch.virtual_ranks,
            samples=trainer.feed.plan.samples,
            data=trainer.data.fingerprint,
            contents=trainer.data.contents,
            versions=versions(trainer.place.device),
            weights=collectives.digest_all(weights),
        )

    def take(self, indices: list[int], batch: Any) -> None:
        """Note the samples of a micro-batch of this rank, as they are used."""
        rows: list[torch.Tensor] = []
        shared = hashlib.sha256()  # of what is not told apart by sample, as the boxes of all images
        for _, leaf in leaves_of(batch):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == len(indices):
                rows.append(leaf.detach().cpu())
            else:
                shared.update(collectives.digest(leaf))
        for row, index in enumerate(indices):
            sample = shared.copy()
            for leaf in rows:
                sample.update(bytes(transport.memory_of(transport.as_bytes(leaf[row]))))
            self._of_step.append((index, sample.digest()[:SHORT].hex()))

    def step(self, number: int) -> None:
        """End a step. A collective where it is one of every K."""
        self._of_steps[number] = self._of_step
        self._of_step = []
        if number % self.every and number != self.trainer.log.last:
            return
        of_ranks = collectives.gather(self._of_steps)
        self._of_steps = {}
        collectives.from_rank_zero(partial(self._write_step, number, of_ranks, self._weights()))

    def _write_step(self, number: int, of_ranks: list[Used], weights: Mapping[str, Any]) -> None:
        samples: dict[str, list[Any]] = {}
        for step in of_ranks[0]:
            pairs = sorted(pair for rank in of_ranks for pair in rank[step])
            samples[str(step)] = [[index for index, _ in pairs], "".join(digest for _, digest in pairs)]
        self._write("step", step=number, weights=collectives.digest_all(weights), samples=samples)

    def epoch(self) -> None:
        """Write who takes which samples in the current epoch. A collective."""
        collectives.from_rank_zero(self._write_epoch)

    def _write_epoch(self) -> None:
        plan, progress, order = self.trainer.feed.plan, self.trainer.progress, hashlib.sha256()
        ranks = self.trainer.config.batch.virtual_ranks or collectives.world_size()
        if isinstance(plan.order(progress.epoch), InOrder):  # computed from the plan where it is used
            order.update(repr((plan, progress.epoch, ranks)).encode())
        else:
            for steps in plan.of_ranks(progress.epoch, range(ranks), ranks):
                for step in steps:
                    order.update(repr(step.micro_batches).encode())
        self._write("epoch", step=progress.global_step, epoch=progress.epoch + 1, plan=order.hexdigest())

    @contextlib.contextmanager
    def checkpoint(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Write the digests of a checkpoint, whose file takes its place in the block. On rank 0 alone.

        If the block fails, the file did not get its name, and the line is taken back.
        """
        with self._alone:
            self._lines.flush()
            before, size = self.last, os.path.getsize(self.path)
            step = state["progress"]["global_step"]
            self._append({"kind": "checkpoint", "step": step, "digests": state["digests"]})
            try:
                yield
            except BaseException:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)
                    self.last = before
                raise

    def evaluation(self, score: Mapping[str, Any]) -> None:
        """Write the score of an evaluation."""
        step, left_out = self.trainer.progress.global_step, ("ranks", "per_class", "seconds")
        plain = {name: finite(value, repr) for name, value in score.items() if name not in left_out}
        collectives.from_rank_zero(lambda: self._write("evaluation", step=step, score=plain))

    def end(self, ended_by: str) -> None:
        """Write that the run ends. A collective; FileError if lines are left that can't be written."""
        with collectives.fail_together():
            if collectives.rank() == 0:
                if ended_by:
                    self._write("end", step=self.trainer.progress.global_step, by=ended_by)
                self._lines.flush()

    def leave(self) -> None:
        """Write what is held if the disk takes it now; send nothing."""
        if not self._alone.acquire(blocking=False):  # the thread that saves still waits for the disk
            return
        try:
            with contextlib.suppress(FileError):
                self._lines.flush()
        finally:
            self._alone.release()

    def _weights(self) -> dict[str, Any]:
        """Return the model's state, whole on rank 0. A collective with `--shard`."""
        state: dict[str, Any] = self.trainer.ddp.module.state_dict()
        return transport.whole(state) if self.trainer.config.model.shard else state

    def _write(self, kind: str, **fields: Any) -> None:
        with self._alone:
            self._lines.add({"kind": kind, **fields})

    def _append(self, entry: Mapping[str, Any]) -> None:
        with naming(self.path):
            durably = entry["kind"] in ("checkpoint", "end")
            self.last = digest.append(self.path, self.last, entry, durably=durably)


def recorder_of(trainer: Trainer, folder: str) -> Recorder:
    """Return what writes the record, if `--prove-every` or the folder's own record says so. A collective."""
    config = trainer.config

    def every() -> int | None:
        path = os.path.join(folder, digest.NAME)
        if config.saving.prove_every or not config.saving.resume or not os.path.exists(path):
            return config.saving.prove_every
        begun = [link.entry for link in digest.read(path)[0] if link.entry.get("kind") == "begin"]
        return int(begun[-1]["every"]) if begun else None

    steps = collectives.from_rank_zero(every)
    return Proof(trainer, folder, steps) if steps else Recorder()
