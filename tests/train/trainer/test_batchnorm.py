"""`--batchnorm sync` and `pooled` in the trainer, against plain BatchNorm in one process with all samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.distributed import collectives
from ckpttool.errors import UsageFault
from tests.ranks import trainings
from tests.ranks.trainings import state
from train.checkpoint import resume
from train.checkpoint.format import capture, restore
from train.config import command_line
from train.main import steps_of_epoch
from train.model import builtin as models

SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
SHAPE = (1, 6, 6)


def make_net() -> nn.Sequential:
    first = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    second = [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16, 10)).double()


def reference(samples: int, batch_size: int, epochs: int) -> dict[str, torch.Tensor]:
    """Plain BatchNorm in one process, which sees the whole batch."""
    data = trainings.tensors(SHAPE, samples, dtype=torch.float64)
    return state(trainings.alone(make_net, data, batch_size, epochs, **SETTINGS))


def make_trainer(rank: int, world_size: int, samples: int, make: Any = make_net, **settings: Any) -> Any:
    data = trainings.tensors(SHAPE, samples, dtype=torch.float64)
    model = trainings.seeded(make)
    return trainings.trainer(rank, world_size, data, model, **{**SETTINGS, **settings})


def train(rank: int, world_size: int, samples: int, epochs: int, settings: dict[str, Any]) -> Any:
    trainer = make_trainer(rank, world_size, samples, epochs=epochs, **settings)
    for _ in range(epochs):
        trainings.finish_epoch(trainer)
    return state(trainer.ddp.module), trainer.progress.global_step, trainer.evaluate()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# ---- sync -------------------------------------------------------------------------------------------------


@pytest.mark.covered(lambda size, samples: (size, samples) not in {(1, 60), (4, 58), (2, 49)})
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("samples", [60, 58, 49], ids=["even", "uneven", "with idle ranks"])
def test_sync_follows_the_one_process_run_for_20_steps(run_ranks, size, samples):
    """Parameters, and running statistics too; 49 samples leave a last batch of one."""
    expected = reference(samples, 12, epochs=4)
    for ours, steps, _ in run_ranks(size, train, samples, 4, {"batchnorm": "sync", "batch_size": 12}):
        assert steps >= 20
        for name, tensor in expected.items():
            assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-6), name


def of_torch() -> nn.Sequential:
    return nn.SyncBatchNorm.convert_sync_batchnorm(make_net())


def test_a_model_that_torch_has_converted_trains_on_a_cpu(run_ranks):
    expected = reference(60, 12, epochs=1)
    settings = {"make": of_torch, "batchnorm": "sync", "batch_size": 12}
    for ours, *_ in run_ranks(2, train, 60, 1, settings):
        assert all(torch.allclose(ours[name], tensor, atol=1e-9) for name, tensor in expected.items())


def test_plain_does_not_follow_the_one_process_run(run_ranks):
    expected = reference(60, 12, epochs=4)
    ours, *_ = run_ranks(2, train, 60, 4, {"batch_size": 12})[0]
    assert not torch.allclose(ours["0.weight"], expected["0.weight"], rtol=0, atol=1e-3)


def test_ranks_with_fewer_passes_of_an_accumulated_batch_stay_equal(run_ranks):
    settings = {"batchnorm": "sync", "batch_size": 5, "accumulate": 3}
    (one, *_), (other, *_) = run_ranks(2, train, 10, 2, settings)
    assert equal(one, other)


# ---- pooled -----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Layers that see the samples themselves, so what they see depends on no other layer's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.BatchNorm2d(1)
        self.average = nn.BatchNorm2d(1, momentum=None)
        self.twice = nn.BatchNorm2d(1, momentum=0.3, affine=False)
        self.untracked = nn.BatchNorm2d(1, track_running_stats=False)
        self.fixed = nn.BatchNorm2d(1)
        self.head = nn.Linear(36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fixed.eval()  # even if the whole model is put into training mode
        if x.dtype == torch.float64:
            x = x + 1000  # a large mean must cost no digits; float32 itself loses them
        seen = self.usual(x) + self.average(input=x) + self.twice(x) + self.twice(x * 2)
        return self.head((seen + self.untracked(x) + self.fixed(x)).flatten(1))


def train_branches(rank: int, world_size: int, dtype: torch.dtype, settings: dict[str, Any]) -> Any:
    data = trainings.tensors(SHAPE, 22, dtype=dtype)
    model = trainings.seeded(Branches).to(dtype)
    settings = {"batch_size": 8, "batchnorm": "pooled", "lr": 0.01, **settings}
    trainer = trainings.trainer(rank, world_size, data, model, **settings)
    trainings.finish_epoch(trainer)
    trainings.finish_epoch(trainer)
    saved = capture(trainer)["model"]
    return state(trainer.ddp.module), {name.removeprefix("module."): value for name, value in saved.items()}


TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.mark.covered(
    lambda size, dtype, batch_size: (
        dtype == torch.float32 or (size, batch_size) in ((3, 8), (4, 8), (1, 8), (2, 8), (3, 5))
    )
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4], ids="{} ranks".format)
@pytest.mark.parametrize("batch_size", [8, 5])
def test_pooled_statistics_are_those_of_one_process_with_the_whole_batch(run_ranks, size, dtype, batch_size):
    """Batches of 8 and 6 samples are two samples on each of four ranks, those of 5 and 2 are one or none."""
    data, tolerance = trainings.tensors(SHAPE, 22, dtype=dtype), TOLERANCES[dtype]
    expected = state(trainings.alone(lambda: Branches().to(dtype), data, batch_size, 2, lr=0.01))
    for own, saved in run_ranks(size, train_branches, dtype, {"batch_size": batch_size}):
        for name, tensor in expected.items():
            if "running" in name:
                for found in (own[name], saved[name]):
                    assert found.dtype == dtype
                    assert torch.allclose(found, tensor, rtol=tolerance, atol=0), name
            elif "num_batches" in name:
                assert own[name].item() == saved[name].item() == tensor.item(), name


def record_passes(rank: int, world_size: int) -> Any:
    """Train on a batch of 10 in three passes, of which rank 1 has fewer samples in the last ones."""
    settings = {"batch_size": 5, "accumulate": 3, "batchnorm": "pooled"}
    trainer = make_trainer(rank, world_size, 10, lambda: Branches().double(), **settings)
    passes, inputs = [], []
    usual = trainer.ddp.module.usual
    usual.register_forward_pre_hook(lambda layer, given: inputs.append(given[0].detach().clone()))
    for _ in steps_of_epoch(trainer):
        passes.append([*inputs])
        inputs.clear()
    return passes, state(trainer.ddp.module)


def test_passes_of_an_accumulated_batch_are_pooled_one_by_one(run_ranks):
    """Rank 0 has 3 samples in 3 passes and rank 1 has 2 in 2: the last pass is of rank 0 alone."""
    (first, own), (second, other) = run_ranks(2, record_passes)
    layer = nn.BatchNorm2d(1).double()
    for ours, theirs in zip(first, second, strict=True):
        assert (len(ours), len(theirs)) == (3, 2)
        for number, part in enumerate(ours):
            layer(torch.cat([part, *theirs[number : number + 1]]))
    for name, tensor in layer.named_buffers():
        assert torch.allclose(own[f"usual.{name}"], tensor, rtol=1e-12)
        assert torch.equal(own[f"usual.{name}"], other[f"usual.{name}"])


def go_on(rank: int, world_size: int, stop: int | None) -> Any:
    """Take six steps, without a stop or resumed from a checkpoint in between and evaluated there."""
    settings = {"batchnorm": "pooled", "batch_size": 10, "epochs": 1}
    trainer = make_trainer(rank, world_size, 60, **settings)
    for step, _ in enumerate(steps_of_epoch(trainer), 1):
        if step == stop:
            saved = copy.deepcopy(capture(trainer))
            trainer = make_trainer(rank, world_size, 60, **settings)
            restore(trainer, saved)
            trainer.evaluate()
            for _ in steps_of_epoch(trainer):
                pass
            break
    return collectives.digest_all(capture(trainer)["model"])


def test_a_resumed_pooled_run_equals_one_that_never_stopped(run_ranks):
    assert run_ranks(2, go_on, None) == run_ranks(2, go_on, 2)


def test_pooled_changes_no_weight_and_ranks_agree_to_the_bit_and_evaluate_the_same_model(run_ranks):
    kinds = [{"batchnorm": kind, "batch_size": 10} for kind in ("plain", "pooled")]
    ((plain, *_), *_), ((pooled, *ends), *others) = (run_ranks(3, train, 30, 1, kind) for kind in kinds)
    for other, *others_ends in others:
        assert equal(pooled, other)
        assert others_ends == ends
    for name, tensor in plain.items():
        assert torch.equal(pooled[name], tensor) == ("running" not in name), name


def train_compiled(rank: int, world_size: int) -> Any:
    torch._dynamo.reset()
    data = trainings.tensors(SHAPE, 30, dtype=torch.float64)
    net = flat()
    model = torch.compile(net, backend="eager")
    copy.deepcopy(model).train()(torch.rand(6, *SHAPE).double())  # as a model is tried before it is trained
    trainer = trainings.trainer(rank, world_size, data, model, batchnorm="pooled", batch_size=12, epochs=2)
    trainings.finish_epoch(trainer)
    with torch._dynamo.config.patch(error_on_recompile=True):
        trainings.finish_epoch(trainer)
    return state(trainer.ddp.module)["_orig_mod.2.running_mean"], net[2].num_batches_tracked.item()


@pytest.mark.long
def test_a_compiled_model_is_pooled_without_being_compiled_anew(run_ranks):
    (mean, batches), (other, _) = run_ranks(2, train_compiled, timeout=90)
    assert torch.equal(mean, other)
    assert batches == 6


# ---- what is refused before training ---------------------------------------------------------------------


class Mine(nn.BatchNorm2d):
    pass


class Torchs(nn.SyncBatchNorm):
    pass


def changed(net: nn.Sequential, place: int, layer: nn.Module) -> nn.Module:
    net[place] = layer.double()
    return net


def another() -> nn.Module:
    return changed(make_net(), 1, Mine(4))


def of_torchs_class() -> nn.Module:
    return changed(make_net(), 1, Torchs(4))


def wide_head() -> nn.Module:
    return changed(of_torch(), 7, nn.Linear(17, 10))


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 10), nn.BatchNorm1d(10)).double()


def one_graph() -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(flat(), backend="eager", fullgraph=True)


def without() -> nn.Module:
    return models.simple_cnn(channels=1, height=6, width=6).double()


def check(
    model: nn.Module, batchnorm: str = "plain", *, samples: int = 12, device: str = "cpu", **settings: Any
) -> None:
    """Run the preflight check of two ranks on a device; the check itself runs the model on the CPU."""
    data = trainings.tensors(SHAPE, samples, dtype=torch.float64)
    settings = {"scheduler": "none", "batchnorm": batchnorm, "batch_size": 4, **settings}
    trainings.check(model, data, 2, device=device, **settings)


GPUS, IDLE = "works only on GPUs", "leaves one of 2 ranks without a sample"
CUDA = {"device": "cuda"}
ODD = {"samples": 13}  # in batches of 4 on 2 ranks, the last is one sample
FIVE = {"samples": 10, "batch_size": 5}  # in 3 passes on 2 ranks: 3 samples in 3, and 2 in 2
REFUSED: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "no layer, sync": (without, "sync", {}, "--batchnorm sync: .* has no BatchNorm"),
    "no layer, pooled": (without, "pooled", {}, "--batchnorm pooled: .* has no BatchNorm"),
    "another class": (another, "sync", {}, "--batchnorm sync: simple-cnn: '1' is a .*Mine"),
    "torch's": (of_torch, "plain", {}, GPUS),
    "a class of torch's": (of_torchs_class, "sync", {}, GPUS),
    "an idle rank": (make_net, "sync", ODD | CUDA, IDLE),
    "an idle rank, converted": (of_torch, "sync", ODD | CUDA, IDLE),
    "an idle rank, no flag": (of_torch, "plain", ODD | CUDA, IDLE),
    "passes": (make_net, "sync", {**FIVE, "accumulate": 3} | CUDA, "a batch of 5 gives one of 2 ranks fewer"),
    "unfit": (wide_head, "sync", {}, "does not take the 1×6×6 samples"),
    "one graph": (one_graph, "pooled", {}, "--batchnorm pooled: .* is compiled with fullgraph=True"),
    "one sample": (flat, "plain", {"batch_size": 2}, "single sample"),
}
HINTS = {
    "torch's": "give --batchnorm sync, which works on a CPU too",
    "a class of torch's": None,
    "passes": "give another --batch-size or --accumulate",
    "one graph": "leave out fullgraph, or give --batchnorm plain or sync",
}
TAKEN: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "another class": (another, "pooled", {}),
    "torch's, converted": (of_torch, "sync", {}),
    "an idle rank on a CPU": (make_net, "sync", ODD),
    "an idle rank on a CPU, converted": (of_torch, "sync", ODD),
    "no last batch": (make_net, "sync", {**ODD, "drop_last": True} | CUDA),
    "no last batch, converted": (of_torch, "sync", {**ODD, "drop_last": True} | CUDA),
    "fewer passes on a CPU": (make_net, "sync", {**FIVE, "accumulate": 3}),
    "as many passes": (make_net, "sync", {**FIVE, "accumulate": 2} | CUDA),
    "one graph": (one_graph, "plain", {}),
    "compiled": (lambda: torch.compile(flat(), backend="eager"), "pooled", {}),
    "one sample a rank": (flat, "sync", {"batch_size": 2}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_trained_so_is_refused_by_its_reason(what):
    make, kind, settings, said = REFUSED[what]
    with pytest.raises(UsageFault, match=said) as fault:
        check(make(), kind, **settings)
    assert fault.value.hint == HINTS.get(what, fault.value.hint)


@pytest.mark.parametrize("what", TAKEN)
def test_what_can_be_trained_so_is_not_refused(what):
    make, kind, settings = TAKEN[what]
    check(make(), kind, **settings)


def test_the_flag_is_read_and_plain_is_the_default():
    assert command_line.parse([]).model.batchnorm == "plain"
    assert command_line.parse(["--batchnorm", "pooled"]).model.batchnorm == "pooled"
    with pytest.raises(UsageFault, match="--batchnorm"):
        command_line.parse(["--batchnorm", "global"])


# ---- layers that the user has frozen -----------------------------------------------------------------------


def half_frozen() -> nn.Module:
    """A net whose first BatchNorm and Dropout are frozen, as for fine-tuning."""
    layers = [nn.Conv2d(SHAPE[0], 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.BatchNorm2d(4)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)).double()
    net[1].running_mean.fill_(0.25)
    net[1].eval()
    net[2].eval()
    return net


def modes_and_statistics(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    trainer, modes = make_trainer(rank, world_size, 24, half_frozen, **settings), []
    for _ in range(2):
        for _ in steps_of_epoch(trainer):
            modes.append([module.training for module in trainer.ddp.module.modules()])
            trainer.evaluate()  # in the middle of an epoch
        trainer.finish_epoch()
    return modes, state(trainer.ddp.module)


@pytest.mark.parametrize("kind", ["plain", "pooled", "sync", "virtual"])
def test_what_the_user_froze_stays_frozen(run_ranks, kind):
    settings = {"virtual_ranks": 4} if kind == "virtual" else {"batchnorm": kind}
    for modes, final in run_ranks(2, modes_and_statistics, {"batch_size": 12, **settings}):
        assert modes == [[True, True, False, False, True, True, True, True]] * 4
        assert (final["1.running_mean"] == 0.25).all()
        assert int(final["1.num_batches_tracked"]) == 0
        assert int(final["3.num_batches_tracked"]) > 0


@pytest.mark.parametrize("missing", [(), ("6.*",)], ids=["whole", "another head"])
def test_init_leaves_what_the_user_froze_frozen(tmp_path, missing):
    saved, net = trainings.seeded(half_frozen).train(), trainings.seeded(half_frozen)
    saved[1].running_mean.fill_(0.75)
    values = {name: value for name, value in saved.state_dict().items() if not missing or name[0] != "6"}
    torch.save(values, tmp_path / "a.pt")
    resume.load_weights(net, str(tmp_path / "a.pt"), missing)
    assert [layer.training for layer in net] == [True, False, False, True, True, True, True]
    assert (net[1].running_mean == 0.75).all()


def test_a_frozen_layer_takes_a_batch_of_one():
    net = flat()
    net[2].eval()
    check(net, batch_size=2)  # one sample a rank
    with pytest.raises(UsageFault, match="single sample"):
        check(net.train(), batch_size=2)
