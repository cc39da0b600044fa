"""Samples of any shape: batches that a data set or a task makes, trained on ranks as in one process."""

from __future__ import annotations

import copy
import functools
import io
import types
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, time
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ckpttool import metrics
from ckpttool.distributed import transport
from ckpttool.errors import CheckFailed, UsageFault
from tests.ranks import trainings
from tests.ranks.runs import TEXTS, Masked, OfTexts, Ragged
from train.config.sections import TrainConfig
from train.data import data_set
from train.data.batches import batch_of, load
from train.data.data_set import Data
from train.data.samples import Collation, digest_of, leaves_of
from train.tasks import builtin as tasks
from train.trainer import preflight

BATCH, EPOCHS = 5, 2
SETTINGS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
BOUND = 1e-13


class Boxes(Ragged):
    """Images of several sizes with 0 to 3 boxes; a batch is a list of images and a list of dicts."""

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        image = torch.rand(3, 4 + index % 3, 5, generator=draw, dtype=torch.float64)
        return image, {
            "boxes": torch.rand(index % 4, 4, generator=draw, dtype=torch.float64),
            "name": str(index),
        }

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        images, found = zip(*samples, strict=True)
        return list(images), list(found)


class OfBoxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box = nn.Linear(3, 4)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        return self.box(torch.stack([image.mean(dim=(1, 2)) for image in images]))


def of_boxes(outputs: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """Return how far each box is from the one that is seen, and how many boxes there are."""
    pairs = list(zip(outputs, batch[1], strict=True))
    return sum((row - found["boxes"]).abs().sum() for row, found in pairs), sum(
        len(f["boxes"]) for _, f in pairs
    )


@dataclass
class Nest:
    """A batch: texts one after another, and what belongs to them."""

    packed: PackedSequence
    more: dict[str, tuple[torch.Tensor, list[str]]]


class Nested(Ragged):
    @staticmethod
    def collate(samples: list[Any]) -> Any:
        texts, labels = zip(*samples, strict=True)
        return Nest(pack_sequence(texts, enforce_sorted=False), {"of": (torch.tensor(labels), ["x"])})


class OfNests(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.scores = nn.RNN(4, 5), nn.Linear(5, 3)

    def forward(self, nest: Nest) -> torch.Tensor:
        return self.scores(self.rnn(nest.packed)[1][0])


def of_nests(outputs: Any, batch: Any) -> tuple[torch.Tensor, int]:
    labels = batch.more["of"][0]
    return F.cross_entropy(outputs, labels, reduction="sum"), len(labels)


class Kind(NamedTuple):
    samples: Callable[[], Any]
    model: Callable[[], nn.Module]
    task: Any  # a loss, or a name
    forward: Callable[[nn.Module, Any], Any]


def of_labels(outputs: Any, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(outputs, batch[2], reduction="sum"), len(batch[2])


KINDS = {
    "padded texts": Kind(Ragged, OfTexts, of_labels, lambda model, batch: model(*batch[:2])),
    "lists of boxes": Kind(Boxes, OfBoxes, of_boxes, lambda model, batch: model(batch[0])),
    "nested batches": Kind(Nested, OfNests, of_nests, lambda model, batch: model(batch)),
}


def double(make: Callable[[], nn.Module]) -> nn.Module:
    return trainings.seeded(make).double()


def data_of(samples: Any, task: str = "own.py:task") -> Data:
    names = ("training", "test")
    collations = {name: Collation(samples.collate, "--data own.py:data", name) for name in names}
    return Data("own", samples, samples, samples.classes, (), "own", {}, task, collations)


@functools.cache
def alone(kind: str) -> list[torch.Tensor]:
    """Return the parameters after plain training: one process, no DDP, the mean over what counts."""
    samples, make = KINDS[kind].samples(), KINDS[kind].model

    def mean(model: nn.Module, indices: list[int]) -> torch.Tensor:
        batch = samples.collate([samples[index] for index in indices])
        total, count = KINDS[kind].task(KINDS[kind].forward(model, batch), batch)
        return total / count

    batches = trainings.batches_of(TEXTS, BATCH, EPOCHS)
    losses = (functools.partial(mean, indices=batch) for batch in batches)
    model = trainings.descended(double(make), losses, **SETTINGS)
    return [parameter.detach() for parameter in model.parameters()]


def on_ranks(rank: int, size: int, kind: str, settings: dict[str, Any]) -> tuple[float, Any, float]:
    """Return how far the parameters are from those of one process, and the score of an evaluation."""
    samples, make, loss, forward = KINDS[kind]
    is_texts = kind == "padded texts"
    data = data_of(samples(), "classification" if is_texts else "own.py:task")
    own = types.SimpleNamespace(loss=loss, forward=forward)
    task = None if is_texts else tasks.adapt(own, "own.py:task")
    settings = {"batch_size": BATCH, "epochs": EPOCHS, **SETTINGS, **settings}
    trainings.check(double(make), data, size, rank=rank, own_task=task, **settings)
    trainer = trainings.trainer(rank, size, data, double(make), task, **settings)
    for _ in range(EPOCHS):
        trained = trainings.finish_epoch(trainer)
    far = trainings.farthest((p.detach() for p in trainer.ddp.parameters()), alone(kind))
    return far, trainer.evaluate().loss, trained.loss


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_any_shape_train_as_in_one_process(run_ranks, kind):
    scores = set()
    for size, settings in ((1, {}), (2, {}), (3, {"accumulate": 2})):
        for far, score, _ in run_ranks(size, on_ranks, kind, settings):
            assert far <= BOUND, (size, settings)
            scores.add(round(score, 12))
    assert len(scores) == 1


# ---- random numbers -------------------------------------------------------------------------------------


def test_what_collate_draws_is_keyed_by_the_samples_and_leaves_the_generators_alone():
    samples, collation = Masked(), Collation(Masked.collate, "--data own", seed=3)
    torch.manual_seed(1)
    one = batch_of(samples, collation, [1, 2])
    then = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), then)
    assert torch.equal(batch_of(samples, collation, [1, 2])[0], one[0])
    (loaded,) = load(samples, [[1, 2]], trainings.place(0, 1), 1, collation=collation)
    assert torch.equal(loaded[0], one[0])
    other = Collation(Masked.collate, "--data own", seed=4)
    assert not torch.equal(batch_of(samples, other, [1, 2])[0], one[0])
    again = collation.batch([samples[1], samples[2]], [1, 2], epoch=1)
    assert not torch.equal(again[0], one[0])


# ---- whose function makes the batches -------------------------------------------------------------------

OWN = """
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from tests.ranks.runs import OfTexts, Ragged

class Plain(Dataset):
    classes = Ragged.classes
    def __len__(self): return len(Ragged())
    def __getitem__(self, index): return Ragged()[index]

class Task:
    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[-1], reduction="sum"), len(batch[-1])
    def forward(self, model, batch): return model(*batch[:2])
    def collate(self, samples): return Ragged.collate(samples)

def data(): return Ragged(), Ragged()
def plain(): return Plain(), Plain()
def model(): return OfTexts().double()
def odd():
    made = Plain(); made.collate = 3
    return made, made
def failing():
    class Failing(Plain):
        def collate(self, samples): return samples[0][9]
    return Failing(), Failing()
def dropping():
    class Dropping(Ragged):
        def collate(self, samples): return Ragged.collate(samples[:1])
    return Dropping(), Dropping()
def mapping():
    class Mapping(Ragged):
        def collate(self, samples): return {"texts": Ragged.collate(samples)}
    return Mapping(), Mapping()
"""


def prepared(own: str, data: str, task: str = "classification") -> tuple[TrainConfig, Data, Any]:
    """Check a training as train/main.py does; return its configuration, data and task."""
    config = TrainConfig.of(
        data=f"{own}:{data}", model=f"{own}:model", task=task.format(own=own), batch_size=4
    )
    made = tasks.users(config.data.task)
    loaded = data_set.load(config.data, collate=tasks.collate_of(made, config.data.task))
    task_ = tasks.build(config, loaded, made)
    preflight.check(config, loaded, OfTexts().double(), trainings.place(0, 1), task_)
    return config, loaded, task_


def test_a_task_makes_the_batches_if_its_data_set_does_not(own):
    _, data, _ = prepared(own, "plain", "{own}:Task")
    assert data.collation("training").whose == data.collation("test").whose == f"--task {own}:Task"
    _, data, _ = prepared(own, "data", "{own}:Task")
    assert data.collation("training").whose == f"--data {own}:data"
    assert data.shape == (1, 4)


REFUSED = {
    "plain": "×4, and sample 0 has 1×4",
    "odd": "collate is a int, not a function",
    "failing": "collate fails on test samples 0: IndexError",
    "mapping": "training samples is a dict, not (inputs, ..., labels)",
}


@pytest.mark.parametrize("data", REFUSED)
def test_what_makes_no_batch_is_refused_by_name(own, data):
    with pytest.raises(CheckFailed if data == "failing" else UsageFault) as caught:
        prepared(own, data)
    assert REFUSED[data] in caught.value.message


def test_a_batch_that_lacks_a_sample_is_refused_where_each_counts(own):
    _, data, task = prepared(own, "dropping")
    with pytest.raises(UsageFault, match=r"a batch of 2 training samples ends in .* not a label for each"):
        task.check(batch_of(data.train, data.collation("training"), [3, 4]), [3, 4], "training")


def test_an_error_names_the_samples_of_the_batch_from_loading_processes_too():
    def fail(samples: list[Any]) -> Any:
        return Ragged.collate(samples) if len(samples) < 8 else samples[99]

    collation = Collation(fail, "--data own.py:data")
    for workers in (0, 1):
        loaded = load(Ragged(), [[1], [*range(8)]], trainings.place(0, 1), workers, collation=collation)
        with pytest.raises(
            CheckFailed, match="collate fails on training samples 0, 1, 2, 3, 4, 5 and 2 more"
        ):
            list(loaded)


class Lists(nn.Linear):
    def forward(self, images: list[torch.Tensor], found: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.stack([image.mean(dim=(1, 2)) for image in images])).mean()


def test_a_model_whose_mean_is_of_an_unknown_number_of_samples_is_refused():
    settings = {"task": "model-loss", "batch_size": 3, "optimizer": "sgd"}
    with pytest.raises(UsageFault, match="--task model-loss: finds 3 samples in a batch of 1"):
        trainings.check(Lists(3, 1).double(), data_of(Boxes(), "model-loss"), **settings)


def another_on_one_rank(rank: int, size: int) -> Any:
    samples = Ragged() if rank == 0 else Nested()
    data = data_of(samples, "classification")
    contents = {kind: each for part in data.parts() for kind, each in part.describe().items()}
    data = Data(
        *(getattr(data, name) for name in ("name", "train", "test", "classes", "shape", "fingerprint")),
        contents,
        data.task,
        data.collations,
    )
    return trainings.error_of(lambda: data_set.compare(data, "before training"))


def test_a_function_that_returns_something_else_on_one_rank_is_found_before_training(run_ranks):
    for error in run_ranks(2, another_on_one_rank):
        assert error is not None and error[0] == "RanksDiffer"


# ---- batches of other kinds -----------------------------------------------------------------------------


def test_the_parts_of_any_batch_have_places():
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    own = types.SimpleNamespace(x=torch.ones(1), name="a")
    batch = Nested.collate([Ragged()[0], Ragged()[1]]), {"r": ragged}, own, None, object()
    found = dict(leaves_of(batch))
    assert {"[0].packed[0]", "[0].more['of'][0]", "[1]['r'][1]", "[2].x", "[2].name"} <= found.keys()
    assert (found["[3]"], found["[4]"]) == (None, "object")
    sparse = dict(leaves_of(torch.eye(2).to_sparse_csr()))
    assert sparse[".values"].tolist() == [1.0, 1.0]


@dataclass
class Boxed:
    value: Any


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def painted(*colours: int) -> Image.Image:
    """Return a picture of one number, which its palette makes the colour."""
    picture = Image.new("P", (1, 1))
    picture.putpalette(colours)
    return picture


ANYTHING: dict[str, tuple[Any, Any]] = {
    "a dataclass": (Boxed(torch.zeros(2000)), Boxed(torch.arange(2000) // 1000)),
    "an object": (types.SimpleNamespace(x=[torch.zeros(1)]), types.SimpleNamespace(x=[torch.ones(1)])),
    "a picture": (Image.new("RGB", (2, 2), (0, 0, 0)), Image.new("RGB", (2, 2), (0, 0, 1))),
    "an array": (np.zeros(2000), np.arange(2000) // 1000.0),
    "an array of objects": (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    "a set": ({1, 2}, {1, 3}),
    "a complex number": (1j, 2j),
    "a date": (date(2026, 1, 1), date(2026, 1, 2)),
    "a fraction": (Fraction(1, 3), Fraction(2, 3)),
    "a path": (Path("a"), Path("b")),
    "a palette": (painted(0, 0, 0), painted(0, 0, 1)),
    "a mask": (np.ma.array([1, 2], mask=[0, 0]), np.ma.array([1, 2], mask=[0, 1])),
    "an object with slots": (Slotted(torch.zeros(2000)), Slotted(torch.arange(2000) // 1000)),
    "a queue": (deque([torch.zeros(1)]), deque([torch.ones(1)])),
    "bytes that can be changed": (bytearray(b"a"), bytearray(b"b")),
    "an array of Python's": (array("d", [0.0] * 2000), array("d", [0.0] * 1999 + [1.0])),
    "a file in memory": (io.BytesIO(b"a"), io.BytesIO(b"b")),
    "an hour": (time(1), time(2)),
    "an identifier": (UUID(int=1), UUID(int=2)),
    "a range": (range(3), range(4)),
    "no items": ([[]], [[], []]),
    "other brackets": ([[1], [2]], [[1, 2]]),
}


@pytest.mark.parametrize("kind", ANYTHING)
def test_samples_of_any_kind_have_a_digest_that_tells_them_apart(kind):
    one, other = ANYTHING[kind]
    assert digest_of({"x": (one, 1)}) != digest_of({"x": (other, 1)})
    assert digest_of({"x": (one, 1)}) == digest_of({"x": (copy.deepcopy(one), 1)})


def test_a_sample_that_holds_itself_has_a_digest():
    node = types.SimpleNamespace(value=torch.ones(1))
    node.children = [types.SimpleNamespace(parent=node)]
    assert [place for place, _ in leaves_of(node)] == [".value", ".children[0].parent"]
    assert digest_of(node) == digest_of(copy.deepcopy(node))


def test_what_samples_refer_to_again_and_again_is_followed_once():
    chain = types.SimpleNamespace(value=0)
    for _ in range(60):  # 2^60 ways lead to the end
        chain = types.SimpleNamespace(left=chain, right=chain)
    assert len([*leaves_of(chain)]) == 61
    pair = (1, 2)
    assert digest_of([pair, pair]) == digest_of([(1, 2), tuple(range(1, 3))])


def test_what_moves_itself_is_moved_as_a_whole():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    moved = transport.moved({"packed": [packed], "plain": torch.ones(2)}, "meta")
    assert moved["packed"][0].data.device.type == moved["plain"].device.type == "meta"
    assert moved["packed"][0].batch_sizes.device.type == "cpu"


def test_an_evaluation_of_ones_own_takes_a_function_too():
    model = double(OfTexts)
    found = metrics.evaluate(
        model, Ragged(), of_labels, forward=lambda m, b: m(*b[:2]), batch_size=4, collate=Ragged.collate
    )
    alone = (Ragged.collate([Ragged()[index]]) for index in range(TEXTS))
    with torch.no_grad():
        one_by_one = [of_labels(model(*batch[:2]), batch)[0] for batch in alone]
    assert found.loss == pytest.approx(float(sum(one_by_one)) / TEXTS, rel=1e-12)
