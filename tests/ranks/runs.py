"""Whole runs of the trainer in the ranks of a pool: straight, and stopped and resumed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ckpttool.distributed import collectives
from ckpttool.errors import CkptToolError
from examples import padded_text
from tests.ranks import trainings
from train.config.flags import Every
from train.config.sections import TrainConfig
from train.data.data_set import Data
from train.data.samples import Collation
from train.data.stream import Packed, Stream
from train.main import train
from train.run.run import Job
from train.tasks import builtin as tasks
from train.tasks.builtin import Task
from train.trainer.apart import NOTHING, Stateful

SHAPE = (3, 8, 8)
BATCH, SAMPLES = 12, 34
"""Three steps in an epoch, and the last is short."""
STEPS = 6

OFTEN = {"keep": 99, "save_every": Every(1, "steps")}
"""A numbered checkpoint of each step."""

PARTS = ("model", "optimizer", "ema", "scheduler", "scaler", "progress", "plan", "rng", "log")


class Block(nn.Module):
    """A convolution with a shortcut around it."""

    def __init__(self, norm: nn.Module, dropout: float) -> None:
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(6, 6, 3, padding=1), norm, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.dropout(self.norm(self.conv(x)).relu(), self.dropout, self.training)


class Net(nn.Module):
    """A small network for images, with BatchNorm and dropout, or with neither."""

    def __init__(self, *, batchnorm: bool, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2)
        norms = [nn.BatchNorm2d(6) if batchnorm else nn.GroupNorm(2, 6) for _ in range(2)]
        self.blocks = nn.Sequential(*(Block(norm, dropout) for norm in norms))
        self.head = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def restless() -> nn.Module:
    """Return a network with what a resume can get wrong: buffers and random numbers."""
    return Net(batchnorm=True, dropout=0.3)


def steady() -> nn.Module:
    """Return a network whose outputs for a sample do not depend on other samples or on random numbers."""
    return Net(batchnorm=False, dropout=0.0)


def with_batchnorm() -> nn.Module:
    """Return a network without random numbers whose outputs depend on the other samples of a batch."""
    return Net(batchnorm=True, dropout=0.0)


def deep() -> nn.Module:
    """Return a network with a matrix inside."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 10))


def of_texts() -> nn.Module:
    return padded_text.model()


def texts() -> Data:
    """Return 36 texts of many lengths, whose data set makes the batches."""
    train, test = padded_text.Numbers(range(1, 10)), padded_text.Numbers(range(20, 22))
    collations = {part: Collation(train.collate, "--data texts", part) for part in ("training", "test")}
    return Data("texts", train, test, train.classes, (), "texts", collations=collations)


def images() -> Data:
    return trainings.tensors(SHAPE, SAMPLES)


def images_twice() -> Data:
    """Return images with a second test set."""
    return replace(images(), others={"few": trainings.tensors(SHAPE, SAMPLES, tests=3)})


class Source:
    """Samples in their order, from a position on."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples, self.at = samples, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def streamed() -> Data:
    """Return the images as a stream of three shards in two lanes, shuffled within a window."""
    data = images()
    samples = [data.train[index] for index in range(SAMPLES)]
    shards = [Source(samples[:9]), Source(samples[9:20]), Source(samples[20:])]
    stream = Stream(shards, "images", seed=0, lanes=2, shuffled=True, window=4)
    return replace(data, name="stream", train=stream, fingerprint=stream.fingerprint)


def of_tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10))


def documents() -> Data:
    """Return a stream of documents of 0 to 10 tokens, packed into blocks."""
    packed = Packed(Source([[n % 10 for n in range(k, k + k % 11)] for k in range(60)]), 7)
    stream = Stream([packed], "documents", seed=0)
    return Data(
        "documents", stream, None, tuple("0123456789"), (7,), stream.fingerprint, task="language-model"
    )


def run(
    rank: int, size: int, make: Any, folder: str, settings: dict[str, Any], data: Callable[[], Data] = images
) -> str:
    """Run the trainer for two epochs of three steps; return what it printed, or the error that ended it."""
    usual = {"epochs": 2, "batch_size": BATCH, "lr": 0.05, "warmup": Every(2, "steps"), "timeout": 20.0}
    return outcome(rank, size, data(), trainings.seeded(make), {"out": folder, **usual, **settings})


def outcome(
    rank: int,
    size: int,
    data: Data,
    model: nn.Module,
    settings: dict[str, Any],
    task: Task | None = None,
    remarks: Iterable[str] = (),
    changed: Stateful = NOTHING,
) -> str:
    """Run the trainer; return what it printed, or the error that ended it, with its hint and exit code."""
    config = TrainConfig.of(**settings)
    place, task = (trainings.place(rank, size), task or tasks.build(config, data))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            train(Job(config, place, data, model, task, list(remarks), changed))
    except CkptToolError as error:
        return f"{type(error).__name__}: {error.message} ({error.hint}) {error.exit_code}"
    return said.getvalue()


def straight_and_resumed(
    rank: int,
    size: int,
    make: Any,
    folder: str,
    settings: dict[str, Any],
    stops: Iterable[int],
    data: Callable[[], Data] = images,
) -> tuple[dict[str, Any], dict[int, list[str]]]:
    """Run straight, and again from the checkpoint of each of these steps.

    Returns:
        The straight run's last checkpoint; and for each step the entries that differ in the last checkpoint
        of the run that was resumed there, of all that a checkpoint holds. Empty on ranks other than 0.
    """
    whole = Path(folder, f"{size}-straight")
    said = run(rank, size, make, str(whole), {**settings, **OFTEN}, data)
    assert "Error" not in said, said
    found: dict[int, list[str]] = {}
    for stop in stops:
        rest = Path(folder, f"{size}-from-{stop}")
        stopped = {"resume": str(whole / f"step-{stop:06d}.pt")}
        said = run(rank, size, make, str(rest), {**settings, **stopped}, data)
        if rank == 0:
            assert "continues from" in said, said
            found[stop] = different(read(whole / "last.pt"), read(rest / "last.pt"))
    return (read(whole / "last.pt") if rank == 0 else {}), found


def go_on(
    run_ranks: Any,
    size: int,
    make: Any,
    saved: Path,
    folder: Path,
    settings: dict[str, Any],
    data: Callable[[], Data] = images,
) -> str:
    """Go on from a checkpoint in a folder, on ranks of the pool; return what rank 0 says."""
    said: str = run_ranks(size, run, make, str(folder), {**settings, "resume": str(saved)}, data)[0]
    assert "continues from" in said, said
    return said


def ends(*folders: Path) -> list[dict[str, Any]]:
    """Return the last checkpoints of some runs."""
    return [read(folder / "last.pt") for folder in folders]


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def contents(path: Path, *parts: str) -> dict[str, bytes]:
    """Return the digest of each entry of a checkpoint, of these parts or of all."""
    return dict(entries({part: value for part, value in read(path).items() if part in (parts or PARTS)}))


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what differs in two checkpoints, in any bit."""
    flat = [dict(entries(each)) for each in (one, other)]
    names = flat[0].keys() | flat[1].keys()
    return sorted(name for name in names if flat[0].get(name) != flat[1].get(name))


def entries(state: Any, name: str = "") -> Iterable[tuple[str, bytes]]:
    """Yield the name and digest of each entry of a checkpoint."""
    if isinstance(state, dict):
        for key, value in state.items():
            if name or key in PARTS:
                yield from entries(value, f"{name}/{key}")
    elif isinstance(state, list | tuple):
        yield from entries(dict(enumerate(state)), name)
    else:
        yield name, collectives.digest(state)


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two models' parameters and averages."""
    pairs = [(one["model"], other["model"])]
    if "ema" in one:
        pairs.append((one["ema"]["averages"], other["ema"]["averages"]))
    return max(float((a[name].double() - b[name].double()).abs().max()) for a, b in pairs for name in a)


# ---- texts of several lengths, whose data set makes the batches, and a model for them ------------------


TEXTS = 13


class Ragged(Dataset[Any]):
    """Texts of 1 to 13 numbers, each with a class; `collate` pads them."""

    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        return torch.randn((index * 5) % 13 + 1, 4, generator=draw, dtype=torch.float64), index % 3

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        texts, labels = zip(*samples, strict=True)
        lengths = torch.tensor([len(text) for text in texts])
        return pad_sequence(texts, batch_first=True), lengths, torch.tensor(labels)


class OfTexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.scores = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        inside = torch.arange(texts.shape[1]) < lengths.unsqueeze(1)
        return self.scores((self.each(texts).tanh() * inside.unsqueeze(2)).sum(dim=1) / lengths.unsqueeze(1))


class Masked(Ragged):
    """Hides numbers at random, drawn for the batch."""

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        texts, lengths, labels = Ragged.collate(samples)
        return texts * (torch.rand(texts.shape) > 0.3), lengths, labels
