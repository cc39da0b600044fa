"""The average of a model's weights, and mixed precision: their values, what is refused, and their resume."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckpttool.errors import CheckFailed, UsageFault
from train.model import updater
from train.model.updater import Ema, Precision


class Net(nn.Module):
    """Weights of three dtypes, one of them with two names, and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.small = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def change(self, step: int) -> None:
        torch.manual_seed(step)
        self.train()(torch.rand(4, 3))
        self.passes += 1
        move(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


@torch.no_grad()
def move(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.rand(parameter.shape))


def averaged(steps: int, part: str = "") -> tuple[Net, Ema]:
    """Return a model after some steps, and the average of it or of a part of it."""
    torch.manual_seed(0)
    model = Net()
    ema = Ema(model.get_submodule(part), 0.9)
    for step in range(steps):
        model.change(step)
        ema.update()
    return model, ema


def test_parameters_follow_torchs_averaged_model_to_the_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.PReLU())
    ema, reference = Ema(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(5):
        move(model)
        ema.update()
        reference.update_parameters(model)
    for name, value in reference.module.state_dict().items():
        assert torch.equal(ema.state_dict()["averages"][name], value)


def test_running_statistics_are_averaged_and_other_buffers_are_the_last():
    model, ema = averaged(1)
    before = copy.deepcopy(ema.state_dict()["averages"])
    model.change(1)
    ema.update()
    now, own = ema.state_dict()["averages"], model.state_dict()
    for name in ("norm.running_mean", "norm.running_var", "phase"):
        torch.testing.assert_close(now[name], 0.9 * before[name] + 0.1 * own[name])
    assert now["passes"].item() == 2
    assert now["norm.num_batches_tracked"].item() == 2
    assert now["mask"].tolist() == [0.0, float("-inf")]


def test_a_weight_with_two_names_has_one_average_and_the_names_are_the_models():
    model, ema = averaged(3)
    averages = ema.state_dict()["averages"]
    assert list(averages) == list(model.state_dict())
    assert averages["first.weight"].data_ptr() == averages["second.weight"].data_ptr()
    _, alone = averaged(3, "first")
    assert torch.equal(alone.state_dict()["averages"]["weight"], averages["first.weight"])


def test_weights_of_two_bytes_are_averaged_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    ema = Ema(model, 0.999)
    nn.init.ones_(model.weight)
    ema.update()
    nn.init.constant_(model.weight, 2.0)
    ema.update()
    assert ema.state_dict()["averages"]["weight"].item() == pytest.approx(1.001)


def test_the_model_has_the_averages_inside_and_its_own_bits_afterwards():
    model, ema = averaged(4)
    own = copy.deepcopy(model.state_dict())
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ZeroDivisionError), ema.swapped():
        for name, value in model.state_dict().items():
            assert torch.equal(value, ema._averages[name].to(value.dtype)), name
        raise ZeroDivisionError
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]


def test_a_model_that_has_its_averages_is_not_averaged_or_saved():
    _, ema = averaged(1)
    with ema.swapped():
        for call in (ema.update, ema.state_dict, ema.swapped().__enter__):
            with pytest.raises(RuntimeError, match="leave `swapped` first"):
                call()


def test_a_restored_average_continues_bit_for_bit():
    _, whole = averaged(6)
    model, ema = averaged(3)
    torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, file := io.BytesIO())
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = Net()
    rest = Ema(again, 0.9)
    again.load_state_dict(state["model"])
    rest.load_state_dict(state["ema"])
    for step in range(3, 6):
        again.change(step)
        rest.update()
    assert rest.state_dict()["updates"] == 6
    for name, value in whole.state_dict()["averages"].items():
        assert torch.equal(rest.state_dict()["averages"][name], value), name


def test_the_average_of_another_model_is_refused():
    _, ema = averaged(1)
    with pytest.raises(ValueError, match="other names: "):
        ema.load_state_dict(Ema(nn.Linear(3, 3), 0.9).state_dict())
    with pytest.raises(ValueError, match="average of weight has the shape"):
        Ema(nn.Linear(3, 4), 0.9).load_state_dict(Ema(nn.Linear(2, 4), 0.9).state_dict())


def with_statistics_of_its_own(rank: int, size: int) -> Any:
    model = nn.BatchNorm1d(2)
    ema = Ema(model, 0.5)
    for step in range(3):
        model(torch.full((2, 2), float(step + 10 * rank)))
        ema.update()
    with ema.swapped():
        inside = model.running_mean.tolist()
    return inside, ema.state_dict()["averages"]["running_mean"].tolist(), model.running_mean.tolist()


def test_the_averages_of_statistics_are_rank_0s_as_statistics_are(run_ranks):
    (inside, saved, own), (also, same, others) = run_ranks(2, with_statistics_of_its_own)
    assert inside == saved == also == same
    assert own != others


# ---- mixed precision -----------------------------------------------------------------------------------

CPU = torch.device("cpu")
INFINITE = float("inf")


def take(precision: Precision, optimizer: Any, weight: nn.Parameter, gradient: float) -> bool:
    """Take one step in which the gradient of the unscaled loss is this number."""
    optimizer.zero_grad()
    precision.scale((weight * gradient).sum()).backward()
    precision.unscale(optimizer)
    return precision.step(optimizer)


def start(kind: str) -> tuple[Precision, Any, nn.Parameter]:
    """Return a training of one weight; the scaling of fp16 also works on a CPU."""
    weight = nn.Parameter(torch.zeros(1))
    return Precision(kind, CPU), torch.optim.SGD([weight], lr=1.0), weight


def test_fp16_is_refused_on_a_cpu_and_nothing_else_is():
    with pytest.raises(UsageFault, match="--amp fp16: works only on a GPU") as caught:
        updater.check_precision("fp16", CPU, nn.Linear(1, 1))
    assert caught.value.hint == "give --amp bf16, or leave it out"
    updater.check_precision("bf16", CPU, nn.Linear(1, 1))
    updater.check_precision("none", CPU, nn.Linear(1, 1).half())
    updater.check_precision("fp16", torch.device("cuda"), nn.Linear(1, 1))


UNSCALED = {torch.complex64: "give --amp bf16", torch.float16: "keep the model's weights"}


@pytest.mark.parametrize("dtype", UNSCALED, ids=str)
def test_fp16_is_refused_for_weights_whose_gradients_can_not_be_scaled(dtype):
    model = nn.Linear(1, 1).to(dtype)
    with pytest.raises(UsageFault, match="parameter weight is") as caught:
        updater.check_precision("fp16", torch.device("cuda"), model)
    assert str(caught.value.hint).startswith(UNSCALED[dtype])
    updater.check_precision("fp16", torch.device("cuda"), model.requires_grad_(False))


@pytest.mark.parametrize(("kind", "dtype"), [("none", torch.float32), ("bf16", torch.bfloat16)])
def test_the_forward_pass_is_in_the_precision_and_weights_and_gradients_are_not(kind, dtype):
    model, precision = nn.Linear(3, 2), Precision(kind, CPU)
    with precision.autocast():
        outputs = model(torch.rand(4, 3))
    assert outputs.dtype == dtype
    precision.scale(outputs.float().sum()).backward()
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32
    assert precision.state_dict() == {}


@pytest.mark.parametrize("kind", ["none", "bf16"])
def test_without_scaling_every_step_is_taken(kind):
    precision, optimizer, weight = start(kind)
    assert take(precision, optimizer, weight, INFINITE)
    assert not torch.isfinite(weight).all()


def test_scaling_leaves_the_update_as_it_is_and_skips_what_is_infinite():
    precision, optimizer, weight = start("fp16")
    taken = [take(precision, optimizer, weight, gradient) for gradient in (0.25, INFINITE, float("nan"), 0.5)]
    assert taken == [True, False, False, True]
    assert weight.item() == -0.75
    assert precision.skipped == 2
    assert precision.state_dict()["scale"] == 2.0**14


def test_gradients_that_are_never_finite_end_the_run():
    precision, optimizer, weight = start("fp16")
    with pytest.raises(CheckFailed, match="--amp fp16: gradients are infinite or NaN even if") as caught:
        for _ in range(100):
            take(precision, optimizer, weight, INFINITE)
    assert precision.skipped == 27
    assert "give a smaller --lr" in str(caught.value.hint)


def test_restored_scaling_continues_as_it_would_have():
    ends = []
    for stop in (None, 3):
        precision, optimizer, weight = start("fp16")
        for step, gradient in enumerate([0.5, INFINITE, 0.25, 0.125, INFINITE, 1.0]):
            if step == stop:
                saved, precision = precision.state_dict(), Precision("fp16", CPU)
                precision.load_state_dict(saved)
            take(precision, optimizer, weight, gradient)
        ends.append(precision.state_dict())
    assert ends[0] == ends[1]
    assert all(isinstance(value, int | float) for value in ends[0].values())
