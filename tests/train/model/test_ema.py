"""The average of a model's weights: its values, what it does with buffers, and how it is restored."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from train.model.updater import Ema


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
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.rand(parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def averaged(steps: int, decay: float = 0.9) -> tuple[Net, Ema]:
    torch.manual_seed(0)
    model = Net()
    ema = Ema(model, decay)
    for step in range(steps):
        model.change(step)
        ema.update()
    return model, ema


def test_parameters_follow_torchs_averaged_model_to_the_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.PReLU())
    ema, reference = Ema(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.rand(parameter.shape))
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
    single = copy.deepcopy(model)
    torch.manual_seed(0)
    alone = Net()
    one = Ema(alone.first, 0.9)
    for step in range(3):
        alone.change(step)
        one.update()
    assert torch.equal(one.state_dict()["averages"]["weight"], averages["first.weight"])
    assert set(single.state_dict()) == set(averages)


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
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
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
