"""`--batchnorm sync` and `pooled` in the trainer, against plain BatchNorm in one process with all samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.distributed import collectives
from ckpttool.distributed.group import Place
from ckpttool.errors import UsageFault
from tests.ranks import trainings
from train.checkpoint import init_from
from train.checkpoint.format import capture, restore
from train.config import command_line
from train.config.training import TrainConfig
from train.main import steps_of_epoch
from train.model import builtin as models
from train.tasks import builtin as tasks
from train.trainer import preflight

SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
SHAPE = (1, 6, 6)


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 10),
    ).double()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def reference(samples: int, batch_size: int, epochs: int) -> dict[str, torch.Tensor]:
    """Plain BatchNorm in one process, which sees the whole batch."""
    data = trainings.tensors(SHAPE, samples, dtype=torch.float64)
    return state(trainings.alone(make_net, data, batch_size, epochs, **SETTINGS))


def make_trainer(rank: int, world_size: int, samples: int, **settings: Any) -> Any:
    data = trainings.tensors(SHAPE, samples, dtype=torch.float64)
    model = trainings.seeded(make_net)
    return trainings.trainer(rank, world_size, data, model, **{**SETTINGS, **settings})


def train(rank: int, world_size: int, samples: int, epochs: int, settings: dict[str, Any]) -> Any:
    trainer = make_trainer(rank, world_size, samples, epochs=epochs, **settings)
    for _ in range(epochs):
        trainings.finish_epoch(trainer)
    return state(trainer.ddp.module), trainer.progress.global_step, trainer.evaluate()


# ---- sync -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("samples", [60, 58, 49], ids=["even", "uneven", "with idle ranks"])
def test_sync_follows_the_one_process_run_for_20_steps(run_ranks, size, samples):
    """Parameters, and running statistics too; 49 samples leave a last batch of one."""
    expected = reference(samples, 12, epochs=4)
    for ours, steps, _ in run_ranks(size, train, samples, 4, {"batchnorm": "sync", "batch_size": 12}):
        assert steps >= 20
        for name, tensor in expected.items():
            assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-6), name


def train_as_torch_converted_it(rank: int, world_size: int) -> Any:
    data = trainings.tensors(SHAPE, 60, dtype=torch.float64)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(trainings.seeded(make_net))
    trainer = trainings.trainer(rank, world_size, data, model, **SETTINGS, batchnorm="sync", batch_size=12)
    trainings.finish_epoch(trainer)
    return state(trainer.ddp.module)


def test_a_model_that_torch_has_converted_trains_on_a_cpu(run_ranks):
    expected = reference(60, 12, epochs=1)
    for ours in run_ranks(2, train_as_torch_converted_it):
        assert all(torch.allclose(ours[name], tensor, atol=1e-9) for name, tensor in expected.items())


def test_plain_does_not_follow_the_one_process_run(run_ranks):
    expected = reference(60, 12, epochs=4)
    ours, _, _ = run_ranks(2, train, 60, 4, {"batch_size": 12})[0]
    assert not torch.allclose(ours["0.weight"], expected["0.weight"], rtol=0, atol=1e-3)


def test_ranks_with_fewer_passes_of_an_accumulated_batch_stay_equal(run_ranks):
    settings = {"batchnorm": "sync", "batch_size": 5, "accumulate": 3}
    (one, _, _), (other, _, _) = run_ranks(2, train, 10, 2, settings)
    assert all(torch.equal(one[name], other[name]) for name in one)


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


TOLERANCES = [(torch.float32, 1e-6), (torch.float64, 1e-12)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 7], ids="{} ranks".format)
def test_pooled_statistics_are_those_of_one_process_with_the_whole_batch(run_ranks, size, dtype, tolerance):
    """Batches of 8, 8 and 6 samples: with four ranks two samples a rank, with seven one or none."""
    data = trainings.tensors(SHAPE, 22, dtype=dtype)
    expected = state(trainings.alone(lambda: Branches().to(dtype), data, 8, 2, lr=0.01))
    for own, saved in run_ranks(size, train_branches, dtype, {}):
        for name, tensor in expected.items():
            if "running" in name:
                for found in (own[name], saved[name]):
                    assert found.dtype == dtype
                    assert torch.allclose(found, tensor, rtol=tolerance, atol=0), name
            elif "num_batches" in name:
                assert own[name].item() == saved[name].item() == tensor.item(), name


def record_passes(rank: int, world_size: int) -> Any:
    """Train on a batch of 10 in three passes, of which rank 1 has fewer samples in the last ones."""
    data = trainings.tensors(SHAPE, 10, dtype=torch.float64)
    model, inputs = trainings.seeded(Branches).double(), []
    model.usual.register_forward_pre_hook(lambda layer, given: inputs.append(given[0].detach().clone()))
    settings = {"batch_size": 5, "accumulate": 3, "batchnorm": "pooled"}
    trainer = trainings.trainer(rank, world_size, data, model, **settings)
    inputs.clear()
    passes = []
    for _ in steps_of_epoch(trainer):
        passes.append(inputs[: len(inputs)])
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


def weights_after(rank: int, world_size: int, kind: str) -> Any:
    trainer = make_trainer(rank, world_size, 30, batchnorm=kind, batch_size=10)
    trainings.finish_epoch(trainer)
    return state(trainer.ddp.module)


def test_pooled_changes_no_weight_and_ranks_agree_to_the_bit(run_ranks):
    plain, _ = run_ranks(2, weights_after, "plain")
    pooled, other = run_ranks(2, weights_after, "pooled")
    assert all(torch.equal(pooled[name], other[name]) for name in pooled)
    for name, tensor in plain.items():
        assert torch.equal(pooled[name], tensor) == ("running" not in name), name


def train_compiled(rank: int, world_size: int) -> Any:
    torch._dynamo.reset()
    data = trainings.tensors(SHAPE, 30, dtype=torch.float64)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 10), nn.BatchNorm1d(10)).double()
    model = torch.compile(net, backend="eager")
    copy.deepcopy(model).train()(torch.rand(6, *SHAPE).double())  # as a model is tried before it is trained
    trainer = trainings.trainer(rank, world_size, data, model, batchnorm="pooled", batch_size=12, epochs=2)
    trainings.finish_epoch(trainer)
    with torch._dynamo.config.patch(error_on_recompile=True):
        trainings.finish_epoch(trainer)
    return state(trainer.ddp.module)["_orig_mod.2.running_mean"], net[2].num_batches_tracked.item()


def test_a_compiled_model_is_pooled_without_being_compiled_anew(run_ranks):
    (mean, batches), (other, _) = run_ranks(2, train_compiled, timeout=90)
    assert torch.equal(mean, other)
    assert batches == 6


def evaluate_pooled(rank: int, world_size: int) -> Any:
    trainer = make_trainer(rank, world_size, 30, batchnorm="pooled", batch_size=10)
    trainings.finish_epoch(trainer)
    trainer.share_buffers()
    digest = collectives.digest_all(trainer.ddp.module.state_dict())
    return digest, trainer.evaluate()


def test_every_rank_evaluates_the_same_model(run_ranks):
    first, *others = run_ranks(3, evaluate_pooled)
    assert others == [first, first]


# ---- what is refused before training ---------------------------------------------------------------------


class Mine(nn.BatchNorm2d):
    pass


def check(
    model: nn.Module, world_size: int = 2, *, samples: int = 12, device: str = "cpu", **settings: Any
) -> None:
    """Run the preflight check for a device; the check itself runs the model on the CPU."""
    data = trainings.tensors(SHAPE, samples, dtype=torch.float64)
    place = Place(0, world_size, "gloo", torch.device(device))
    config = TrainConfig(scheduler="none", **settings)
    preflight.check(config, data, model, place, tasks.build(config, data))


@pytest.mark.parametrize("kind", ["sync", "pooled"])
def test_a_model_without_batchnorm_is_refused(kind):
    model = models.simple_cnn(channels=1, height=6, width=6).double()
    with pytest.raises(UsageFault, match=f"--batchnorm {kind}: .* has no BatchNorm"):
        check(model, batchnorm=kind, batch_size=4)


def test_a_layer_that_can_not_be_synchronised_is_refused_by_name():
    net = make_net()
    net[1] = Mine(4).double()
    with pytest.raises(UsageFault, match=r"--batchnorm sync: simple-cnn: '1' is a .*Mine"):
        check(net, batchnorm="sync", batch_size=4)
    check(net, batchnorm="pooled", batch_size=4)


def test_torchs_layers_that_need_a_gpu_are_refused_on_a_cpu_with_a_hint():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())
    with pytest.raises(UsageFault, match="works only on GPUs") as fault:
        check(net, batchnorm="plain", batch_size=4)
    assert "--batchnorm sync" in str(fault.value.hint)
    check(net, batchnorm="sync", batch_size=4)


class Torchs(nn.SyncBatchNorm):
    pass


def test_a_class_derived_from_torchs_syncbatchnorm_is_refused_on_a_cpu():
    net = make_net()
    net[1] = Torchs(4).double()
    with pytest.raises(UsageFault, match="works only on GPUs") as fault:
        check(net, batchnorm="sync", batch_size=4)
    assert fault.value.hint is None


@pytest.mark.parametrize("convert", [lambda net: net, nn.SyncBatchNorm.convert_sync_batchnorm])
def test_a_last_batch_that_leaves_a_rank_idle_is_refused_under_sync_on_gpus_alone(convert):
    """13 samples in batches of 4 on 2 ranks: the last is one sample."""
    fitting = {"samples": 13, "batch_size": 4, "batchnorm": "sync"}
    check(convert(make_net()), **fitting)
    with pytest.raises(UsageFault, match="leaves one of 2 ranks without a sample"):
        check(convert(make_net()), **fitting, device="cuda")
    check(convert(make_net()), **fitting, device="cuda", drop_last=True)


def test_torchs_own_layers_need_every_rank_on_gpus_whatever_the_flag():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())
    with pytest.raises(UsageFault, match="leaves one of 2 ranks without a sample"):
        check(net, samples=13, batch_size=4, device="cuda")


def test_ranks_that_pass_through_torchs_layers_less_often_than_others_are_refused_on_gpus():
    """A batch of 5 on 2 ranks in 3 passes: 3 samples in 3, and 2 in 2."""
    fitting = {"batchnorm": "sync", "samples": 10, "batch_size": 5}
    check(make_net(), **fitting, accumulate=3)
    check(make_net(), **fitting, accumulate=2, device="cuda")
    with pytest.raises(UsageFault, match="a batch of 5 gives one of 2 ranks fewer passes") as fault:
        check(make_net(), **fitting, accumulate=3, device="cuda")
    assert fault.value.hint == "give another --batch-size or --accumulate"


def test_a_model_that_torch_has_converted_is_tried_before_training():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())
    net[7] = nn.Linear(17, 10).double()
    with pytest.raises(UsageFault, match="does not take the 1×6×6 samples"):
        check(net, batchnorm="sync", batch_size=4)


def test_a_model_compiled_as_one_graph_is_refused_under_pooled():
    torch._dynamo.reset()
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 10), nn.BatchNorm1d(10)).double()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    check(compiled, batchnorm="plain", batch_size=4)
    with pytest.raises(UsageFault, match=r"--batchnorm pooled: .* is compiled with fullgraph=True") as fault:
        check(compiled, batchnorm="pooled", batch_size=4)
    assert "plain or sync" in str(fault.value.hint)
    check(torch.compile(net, backend="eager"), batchnorm="pooled", batch_size=4)


def test_one_sample_a_rank_is_a_batch_for_sync_and_not_for_plain():
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 10), nn.BatchNorm1d(10)).double()
    check(net, batchnorm="sync", batch_size=2)
    with pytest.raises(UsageFault, match="single sample"):
        check(net, batchnorm="plain", batch_size=2)


def test_the_flag_is_read_and_plain_is_the_default():
    assert command_line.parse([]).batchnorm == "plain"
    assert command_line.parse(["--batchnorm", "pooled"]).batchnorm == "pooled"
    with pytest.raises(UsageFault, match="--batchnorm"):
        command_line.parse(["--batchnorm", "global"])


# ---- layers that the user has frozen -----------------------------------------------------------------------


def half_frozen() -> nn.Module:
    """A net whose first BatchNorm and Dropout are frozen, as for fine-tuning."""
    net = nn.Sequential(
        nn.Conv2d(SHAPE[0], 4, 3, dtype=torch.float64),
        nn.BatchNorm2d(4, dtype=torch.float64),
        nn.Dropout(0.5),
        nn.BatchNorm2d(4, dtype=torch.float64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 10, dtype=torch.float64),
    )
    net[1].running_mean.fill_(0.25)
    net[1].eval()
    net[2].eval()
    return net


def modes_and_statistics(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    data = trainings.tensors(SHAPE, 24, dtype=torch.float64)
    trainer = trainings.trainer(rank, world_size, data, trainings.seeded(half_frozen), **SETTINGS, **settings)
    modes = []
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
    init_from.load(net, str(tmp_path / "a.pt"), missing)
    assert [layer.training for layer in net] == [True, False, False, True, True, True, True]
    assert (net[1].running_mean == 0.75).all()


def test_a_frozen_layer_takes_a_batch_of_one():
    config = TrainConfig(batch_size=1)
    data = trainings.tensors((3,), 4)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 10))
    preflight.check(config, data, net, trainings.place(0, 1), tasks.build(config, data))
    with pytest.raises(UsageFault, match="single sample"):
        preflight.check(config, data, net.train(), trainings.place(0, 1), tasks.build(config, data))
