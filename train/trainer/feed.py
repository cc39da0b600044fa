"""The training samples on their way to this rank, planned or streamed. Imports torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from ckpttool.distributed import collectives, randomness
from ckpttool.distributed.group import Place
from ckpttool.distributed.plan import Plan, Step, check
from ckpttool.errors import CheckFailed, RanksDiffer
from train.config import command_line
from train.config.sections import TrainConfig
from train.data.augment import augmented
from train.data.batches import Undamaged, load, trial_batch
from train.data.data_set import Data
from train.data.samples import count, digest_of
from train.data.stream import Position, Read, Stream
from train.tasks.builtin import Task
from train.trainer.progress import Progress, Recorder

MARK = 5  # hexadecimal digits of a digest that ranks compare: squares are exact in float64 on 8192 ranks
SEEDS = "seed its generators by the epoch (set_epoch); Python's, numpy's and torch's own are seeded"


MOST = 16  # samples of an epoch that may be left out in any case; above that, not more than are used


def _give_up(what: str) -> NoReturn:
    raise CheckFailed(what, hint="that is no damage of a few: look at the code or the disk they come from")


class Feed:
    """The training samples on their way to this rank, as the plan deals them.

    A stream is planned as if it had no end. That it has ended the ranks tell each other in the step after
    which none has a sample left, and how many samples a step really had.
    """

    def __init__(self, config: TrainConfig, data: Data, task: Task, place: Place) -> None:
        self.config, self.data, self.task, self.place = config, data, task, place
        self.samples = augmented(data.train, config, len(data.classes))
        self.collation = data.collation("training")
        self.plan: Plan = command_line.make_plan(config, count(data.train))
        self.stream = data.train if isinstance(data.train, Stream) else None
        if self.stream is not None:
            self.stream.batch_size = config.batch.size
        elif config.data.skip_damaged:
            self.samples = Undamaged(self.samples)
        self.is_planned = self.stream is None and not config.data.skip_damaged  # no planned sample is missing
        self.ends_at: int | None = None  # steps of the current epoch of a stream, once that is known
        self.positions: dict[int, Position] = {}  # of the stream's lanes, as far as this rank has used them
        self.skipped = 0  # what was left out with --skip-damaged, on all ranks
        self.left_out: list[str] = []  # what is to be said of that
        self._more: dict[int, str] = {}
        self._damaged: list[tuple[int, str]] = []
        self._known: set[str] = set()  # digests of what was left out in this epoch
        self.recorder = Recorder()

    @property
    def steps_per_epoch(self) -> int:
        """The steps of the current epoch; of a stream that has not ended, more than it can have."""
        return self.ends_at or self.plan.steps_of(self.place.world_size)

    @property
    def known_steps(self) -> int | None:
        """The steps of the current epoch, as far as the source says; None if it does not say its length."""
        if self.stream is None or self.ends_at is not None:
            return self.steps_per_epoch
        return self.stream.steps(self.plan.batch_size)

    @property
    def expected_steps(self) -> int:
        """The steps of an epoch that the schedule spans; of a stream of no known length, any number."""
        said = None if self.stream is None else self.stream.steps(self.plan.batch_size)
        return self.steps_per_epoch if said is None else said

    def batches(self, steps: Iterable[Step], progress: Progress) -> Iterator[tuple[Any, int]]:
        """Yield the micro-batches of these steps of the current epoch, in order, on this rank's device.

        Each with its number of samples; None for one of which no sample is there.

        Raises:
            CheckFailed: a batch does not suit the task, such as a label that is not one of the classes.
        """
        epoch, step = progress.epoch, progress.step
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(epoch)
        # Lists of indices are made while they are loaded and dropped when used: of 10^7 they take 400 MB.
        indices, taken = itertools.tee(micro_batch for step in steps for micro_batch in step.micro_batches)
        # With the step: a run resumed in the middle of an epoch would otherwise draw its first numbers again.
        seed = randomness.seed_from(self.config.numbers.seed, "workers", self.place.rank, epoch, step)
        how: dict[str, Any] = {"collation": self.collation, "seed": seed}
        loaded = load(self.samples, indices, self.place, self.config.ranks.workers, **how)
        for micro_batch, batch in zip(taken, loaded, strict=True):
            if isinstance(batch, Read):
                self._note(batch)
                batch, micro_batch = batch.samples, batch.taken
            if batch is not None:
                self.task.check(batch, micro_batch, "training")
                self.recorder.take(micro_batch, batch)
                batch = self.task.batch_to(batch, self.place.device)
            yield batch, len(micro_batch)

    def _note(self, read: Read) -> None:
        """Note what was read besides samples."""
        self._more |= read.more
        self._damaged += read.skipped
        for number, position in read.positions.items():
            self._require_same(self.positions.get(number), position)
            if number not in self.positions or self.positions[number].depth < position.depth:
                self.positions[number] = position

    def _require_same(self, before: Position | None, now: Position) -> None:
        """Raise CheckFailed if two loading processes have found different samples in one place."""
        if before and before.depth == now.depth and before.digest not in (None, now.digest):
            what = f"--data {self.data.name}: sample {now.depth} of a lane is another one in each process"
            raise CheckFailed(f"{what} that loads it", hint=SEEDS)

    def told(self) -> list[float]:
        """Return what this rank tells of a step: how much it left out; and of each lane whether it has
        read it, has more of it, and what comes next, as a number and its square.
        """
        numbers = [float(len(self._damaged))]
        for lane in range(self.stream.lanes if self.stream is not None else 0):
            following = self._more.get(lane)
            mark = int(following[:MARK], 16) if following else 0
            numbers += [following is not None, bool(following), mark, mark**2]
        return numbers

    def settle(self, step: Step, samples: int, told: list[float]) -> Step:
        """Return a step with the samples that it had; `samples` and `told` are sums over ranks. A collective.

        Raises:
            RanksDiffer: a lane has ended for one rank, and goes on for another, or with another sample.
            CheckFailed: the epoch has no samples.
        """
        skipped, lanes = told[0], [tuple(map(int, told[at : at + 4])) for at in range(1, len(told), 4)]
        if skipped:
            self._leave_out(step)
        differing = [number for number, (read, more, *_) in enumerate(lanes) if more not in (0, read)]
        if differing:
            of_ranks = collectives.gather(self._more.get(differing[0]))
            more_on = [None if following is None else bool(following) for following in of_ranks]
            ended = f"the stream ends in step {step.index + 1} of the epoch on rank {more_on.index(False)}"
            hint = "every rank reads it from its beginning, so its files must be the same for all"
            what = f"--data {self.data.name}: {ended}, and goes on on rank {more_on.index(True)}"
            raise RanksDiffer(what, hint=hint)
        # All equal: the mean of the squares is the square of the mean.
        if any(read * squares != marks**2 for read, _, marks, squares in lanes):
            what = f"--data {self.data.name}: after step {step.index + 1} of the epoch the stream"
            raise RanksDiffer(f"{what} goes on with another sample on each rank", hint=SEEDS)
        self._more = {}
        if self.stream is not None and not any(more for _, more, *_ in lanes):
            self.ends_at = step.index + 1
            if not samples and not step.index:
                what = f"--data {self.data.name}: its stream has no samples in this epoch"
                raise CheckFailed(what, hint="its __iter__ has to begin anew each time it is called")
        return dataclasses.replace(step, global_size=samples)

    def _leave_out(self, step: Step) -> None:
        """Count what could not be read, in the data's order; CheckFailed if it is most. A collective."""
        of_ranks = collectives.gather(self._damaged)
        found = dict.fromkeys(what for _, what in sorted(itertools.chain(*of_ranks)))
        new = [what for what in found if digest_of(what) not in self._known]
        self._known |= set(map(digest_of, new))
        self.left_out += new
        self.skipped += len(new)
        self._damaged = []
        so_far = min((step.index + 1) * self.plan.batch_size, self.plan.samples)
        if self.stream is None and len(self._known) >= MOST and 2 * len(self._known) > so_far:
            what = f"--skip-damaged: {len(self._known)} of {so_far} samples of this epoch can't be read"
            collectives.report_once(partial(_give_up, f"{what}; the last is {new[-1] if new else 'known'}"))

    def begin_epoch(self) -> None:
        self.ends_at, self.positions, self._known = None, {}, set()

    def batch_of(self, indices: list[int]) -> Any:
        """Return samples as one batch on this rank's device, loaded in this process."""
        return self.task.batch_to(trial_batch(self.samples, self.collation, indices), self.place.device)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the plan and the data."""
        facts = {"world_size": self.place.world_size, "data": self.data.fingerprint}
        return dataclasses.asdict(self.plan) | facts | {"contents": self.data.contents}

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint holds of a stream's position, over all ranks. A collective."""
        if self.stream is None:
            return {}
        furthest: dict[str, Any] = {}
        for of_rank in collectives.gather(self.positions):
            for number, position in of_rank.items():
                if position.depth >= furthest.get(str(number), {"depth": 0})["depth"]:
                    furthest[str(number)] = position._asdict()
        lanes = dict(sorted(furthest.items(), key=lambda lane: int(lane[0])))
        return {"stream": {"steps": self.ends_at, "lanes": lanes}}

    def go_on(self, saved: Mapping[str, Any], epoch: int) -> None:
        """Go on from a position that `position` has returned, on any number of ranks."""
        assert self.stream is not None
        lanes = {int(number): Position(**position) for number, position in saved["lanes"].items()}
        if self.stream.varies():  # there is nothing to compare
            lanes = {number: position._replace(digest=None) for number, position in lanes.items()}
        self.stream.start, self.positions, self.ends_at = (epoch, dict(lanes)), lanes, saved["steps"]

    def load(self, saved: Mapping[str, Any], rank_share: object) -> None:
        """Follow the shares that a run with `--rank-share auto` has measured on as many ranks.

        Raises:
            UsageFault: the shares can't be dealt: the file was changed.
        """
        ranks, shares = self.place.world_size, saved.get("rank_share")
        if shares and self.config.batch.rank_share == rank_share == "auto" and saved["world_size"] == ranks:
            self.plan = dataclasses.replace(self.plan, rank_share=tuple(shares))
            check(self.plan, ranks, command_line.flag)
