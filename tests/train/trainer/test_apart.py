"""What would make parts of a batch another training than the whole, found before it begins."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from ckpttool.errors import UsageFault
from tests.ranks import runs, trainings
from train.config.sections import TrainConfig
from train.tasks import builtin as tasks
from train.trainer import preflight
from train.trainer.apart import Stateful


class Net(nn.Module):
    """Scores of images, which each pass may change in a model that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(192, 4), nn.Linear(4, 10)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("seen", torch.tensor(0))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, images: torch.Tensor) -> Any:
        hidden = self.body(images.flatten(1))
        if self.training:
            with torch.no_grad():
                self.note(hidden)
        return self.head(hidden - self.centre - self.frozen)

    def note(self, hidden: torch.Tensor) -> None:
        pass


class Centred(Net):
    def note(self, hidden: torch.Tensor) -> None:
        self.centre.lerp_(hidden.mean(dim=0), 0.1)


class Replaced(Net):
    def note(self, hidden: torch.Tensor) -> None:
        self.centre = self.centre * 0.9 + 0.1 * hidden.mean(dim=0)


class WithGraph(Net):
    """Keeps what it has computed with its graph."""

    def forward(self, images: torch.Tensor) -> Any:
        scores = super().forward(images)
        if self.training:
            self.centre = self.body(images.flatten(1)).mean(dim=0)
        return scores


class Logged(Net):
    """No pass depends on it, but what is saved does."""

    def forward(self, images: torch.Tensor) -> Any:
        scores = super().forward(images)
        if self.training:
            self.centre = scores.detach().mean(dim=0)[:4]
        return scores - self.centre.sum() * 0


class Counted(Net):
    def note(self, hidden: torch.Tensor) -> None:
        self.seen += 1


class Alternating(Counted):
    def forward(self, images: torch.Tensor) -> Any:
        return super().forward(images) * (1 + self.seen % 2)


class Codes(Net):
    def note(self, hidden: torch.Tensor) -> None:
        self.frozen.lerp_(hidden.mean(dim=0), 0.1)


class Renormed(Net):
    """Changes a trained parameter, by no sample."""

    def note(self, hidden: torch.Tensor) -> None:
        self.head.weight.div_(self.head.weight.norm())


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = spectral_norm(self.head)


class OldSpectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.spectral_norm(self.head)


class Extra(Net):
    passes = 0

    def note(self, hidden: torch.Tensor) -> None:
        self.passes += 1

    def get_extra_state(self) -> Any:
        return {"passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]


class Instance(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, images: torch.Tensor) -> Any:
        return super().forward(self.norm(images.flatten(2).flatten(1)[:, None])[:, 0])


class Lazy(Net):
    def note(self, hidden: torch.Tensor) -> None:
        self.centre.fill_(float("nan")).nan_to_num_(0)


FOUND: dict[str, tuple[Any, tuple[str, ...], bool]] = {
    "nothing": (Net, (), False),
    "BatchNorm": (runs.with_batchnorm, (), False),
    "dropout": (runs.restless, (), False),
    "the same value again": (Lazy, (), False),
    "a centre": (Centred, ("centre",), True),
    "another tensor": (Replaced, ("centre",), True),
    "a tensor with its graph": (WithGraph, ("centre",), True),
    "a log": (Logged, ("centre",), True),
    "a counter": (Counted, (), False),
    "a counter that matters": (Alternating, ("seen",), False),
    "a parameter": (Renormed, ("head.weight",), False),
    "codes": (Codes, ("frozen",), True),
    "extra state": (Extra, ("_extra_state",), False),
    "InstanceNorm": (Instance, ("norm.running_mean", "norm.running_var"), True),
    "spectral norm": (
        Spectral,
        ("head.parametrizations.weight.0._u", "head.parametrizations.weight.0._v"),
        False,
    ),
    "the old spectral norm": (OldSpectral, ("head.weight_u", "head.weight_v"), False),
}


def checked(make: Callable[[], nn.Module], ranks: int = 1, own: Any = None, **settings: Any) -> Stateful:
    config = TrainConfig.of(**{"batch_size": 12, **settings})
    data = runs.images()
    task = tasks.adapt(own, "own.py:make") if own else tasks.build(config, data)
    return preflight.check(config, data, trainings.seeded(make), trainings.place(0, ranks), task)


@pytest.mark.parametrize("what", FOUND)
def test_what_each_pass_changes_is_found_and_whether_its_samples_say_how(what):
    make, names, by_samples = FOUND[what]
    assert checked(make) == Stateful(names, by_samples)


def test_a_parameter_that_each_rank_would_change_by_its_samples_is_refused():
    with pytest.raises(UsageFault, match="a pass changes parameter frozen by its samples, and each rank"):
        checked(Codes, 2)
    assert checked(Renormed, 2).names == ("head.weight",)


# ---- and said -------------------------------------------------------------------------------------------


def run(rank: int, size: int, make: Any, folder: str, settings: dict[str, Any]) -> str:
    """Run the trainer for six steps as it is started, with its check."""
    usual = {"epochs": 2, "batch_size": 12, "lr": 0.05, "timeout": 20.0, "out": folder, **settings}
    config, model, data = TrainConfig.of(**usual), trainings.seeded(make), runs.images()
    task, place = tasks.build(config, data), trainings.place(rank, size)
    try:
        changed = preflight.check(config, data, model, place, task)
    except UsageFault as fault:
        return fault.message
    return runs.outcome(rank, size, data, model, usual, task, changed=changed)


def notes_of(said: str) -> list[str]:
    return [line.removeprefix("note    ") for line in said.splitlines() if line.startswith("note ")]


CENTRE, SPECTRAL = "each pass changes centre", "each pass changes head.weight_u, head.weight_v"
IDLE = "and rank 0 is without samples in some steps"
OF_ACCUMULATE, OF_RANKS = "not the training of --accumulate 1", "not the training of one rank"
# 34 images in batches of 12: the last is of 10.
NOTES: list[tuple[Any, int, dict[str, Any], list[str]]] = [
    (Net, 2, {"accumulate": 2}, []),
    (Centred, 1, {}, []),
    (Centred, 1, {"accumulate": 2}, [f"{OF_ACCUMULATE}: {CENTRE}"]),
    (Centred, 2, {}, [f"{OF_RANKS}: {CENTRE}, by rank 0's samples alone"]),
    (Centred, 2, {"virtual_ranks": 2}, []),
    (OldSpectral, 2, {}, []),
    (OldSpectral, 2, {"batch_size": 11}, []),
    (OldSpectral, 2, {"batch_size": 11, "rank_share": (1, 3)}, [f"{OF_RANKS}: {SPECTRAL}, {IDLE}"]),
    (OldSpectral, 2, {"accumulate": 2}, [f"{OF_ACCUMULATE}: {SPECTRAL}"]),
    (Counted, 2, {"accumulate": 2}, []),
]


@pytest.mark.parametrize("number", range(len(NOTES)))
def test_the_report_says_what_each_pass_changes_where_that_is_another_training(run_ranks, tmp_path, number):
    make, ranks, settings, notes = NOTES[number]
    said, *others = run_ranks(ranks, run, make, str(tmp_path), {"stop_at": 1, **settings})
    assert notes_of(said) == notes
    assert not any(others)


def test_a_resumed_run_with_other_passes_is_refused_by_the_name_of_what_they_change(run_ranks, tmp_path):
    (said,) = run_ranks(1, run, OldSpectral, str(tmp_path), {"stop_at": 1})
    assert "note " not in said
    again = {"resume": "auto", "accumulate": 2}
    (said,) = run_ranks(1, run, OldSpectral, str(tmp_path), again)
    assert f"belongs to a run with --accumulate 1, and {SPECTRAL}" in said
    assert "--change accumulate" in said
    (said,) = run_ranks(1, run, OldSpectral, str(tmp_path), {**again, "change": ("accumulate",)})
    assert notes_of(said) == [f"{OF_ACCUMULATE}: {SPECTRAL}"]


# ---- losses that couple samples ---------------------------------------------------------------------------


def added(outputs: Any, batch: Any) -> Any:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])


def weighted(outputs: Any, batch: Any) -> Any:
    weights = torch.arange(10.0)
    return F.cross_entropy(outputs, batch[1], weights, reduction="sum"), weights[batch[1]].sum()


def contrastive(outputs: Any, batch: Any) -> Any:
    """Each sample against all others of the batch."""
    features = F.normalize(outputs, dim=1)
    wanted = torch.arange(len(features))
    return F.cross_entropy(features @ features.T / 0.1, wanted, reduction="sum"), len(features)


def decorrelated(outputs: Any, batch: Any) -> Any:
    total, number = added(outputs, batch)
    spread = outputs.var(dim=0, correction=0).sum()
    return total + 0.1 * spread * number, number


def drawn(outputs: Any, batch: Any) -> Any:
    kept = torch.rand(len(outputs)) < 0.5
    return (F.cross_entropy(outputs, batch[1], reduction="none") * kept).sum() * 2, len(outputs)


def unable(outputs: Any, batch: Any) -> Any:
    if len(outputs) > 2:
        raise ValueError("not so many")
    return added(outputs, batch)


class OwnLoss(Net):
    """Its own mean loss, of pairs in the batch."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        total, number = contrastive(super().forward(images), (images, labels))
        return {"loss": total / number}


def own(loss: Any) -> Any:
    return types.SimpleNamespace(loss=loss)


COUPLED: dict[str, tuple[Any, Any, dict[str, Any], bool]] = {
    "a sum": (Net, added, {}, False),
    "a weighted mean": (runs.restless, weighted, {}, False),
    "dropout and BatchNorm": (runs.restless, added, {}, False),
    "numbers that it draws": (Net, drawn, {}, False),
    "not of so many": (Net, unable, {"batch_size": 2}, False),
    "contrastive": (Net, contrastive, {}, True),
    "a part of it": (Net, decorrelated, {}, True),
    "in the model": (OwnLoss, None, {"task": "model-loss"}, True),
    "built in": (runs.restless, None, {}, False),
}


IN_PARTS: list[tuple[int, dict[str, Any]]] = [(2, {}), (1, {"accumulate": 2}), (1, {"virtual_ranks": 2})]
IN_PARTS += [(1, {})]


@pytest.mark.parametrize("what", COUPLED)
@pytest.mark.parametrize(("ranks", "settings"), IN_PARTS)
def test_a_loss_that_is_no_sum_over_samples_is_warned_of_where_batches_are_taken_apart(
    capsys, what, ranks, settings
):
    make, loss, of_task, is_coupled = COUPLED[what]
    checked(make, ranks, own(loss) if loss else None, **of_task, **settings)
    said = capsys.readouterr().err
    in_parts = ranks > 1 or bool(settings)
    assert ("and ranks and passes have parts of a batch" in said) == (is_coupled and in_parts), said
    if is_coupled and in_parts:
        assert said.startswith(f"warning: --{'model' if what == 'in the model' else 'task'} ")
        assert "the loss of 4 samples is" in said and "for its halves" in said


class Turns:
    """A loss that alternates, as of a generator and what judges it."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.calls += 1
        total, number = added(outputs, batch)
        return total * (1 + self.calls % 2), number


def test_a_loss_that_alternates_is_refused_where_ranks_or_passes_would_take_other_turns(capsys):
    for ranks, settings in ((2, {}), (1, {"accumulate": 2}), (1, {"virtual_ranks": 2})):
        with pytest.raises(UsageFault, match="the loss of the same outputs is another each time, and ranks"):
            checked(Net, ranks, Turns(), **settings)
    checked(Net, 1, Turns())
    assert "so a resume will not be exact" in capsys.readouterr().err


class Gathered(nn.Module):
    """Returns the features of its samples, those of all ranks', and at which of them its own begin."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(192, 10, dtype=torch.float64)

    def forward(self, images: torch.Tensor) -> Any:
        own = F.normalize(self.body(images.flatten(1)), dim=1)
        if not (self.training and dist.is_initialized()):
            return own, own, 0
        return own, torch.cat(dist_nn.all_gather(own)), dist.get_rank() * len(own)


def against_all(outputs: Any, batch: Any) -> Any:
    own, all_features, first = outputs
    wanted = first + torch.arange(len(own))
    return F.cross_entropy(own @ all_features.T / 0.1, wanted, reduction="sum"), len(own)


def gathered(rank: int, size: int) -> list[torch.Tensor]:
    data = trainings.tensors((3, 8, 8), 24, dtype=torch.float64)
    settings: dict[str, Any] = {"batch_size": 12, "task": "own.py:make", "lr": 0.5, "epochs": 1}
    task = tasks.adapt(own(against_all), "own.py:make")
    trainer = trainings.trainer(rank, size, data, trainings.seeded(Gathered), task, **settings)
    trainings.finish_epoch(trainer)
    return trainings.wholes(trainer)


def test_features_that_the_model_gathers_couple_the_samples_of_all_ranks_as_in_one_process(run_ranks):
    """As docs/own-code.md advises; the shares are equal."""
    (one,) = run_ranks(1, gathered)
    for ours in (*run_ranks(2, gathered), *run_ranks(3, gathered)):
        assert trainings.farthest(ours, one) <= 1e-12
