"""Mixed precision: what is refused, which steps are skipped, and how scaling is restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.errors import CheckFailed, UsageFault
from train.model.updater import Precision, check_precision

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
        check_precision("fp16", CPU, nn.Linear(1, 1))
    assert caught.value.hint == "give --amp bf16, or leave it out"
    check_precision("bf16", CPU, nn.Linear(1, 1))
    check_precision("none", CPU, nn.Linear(1, 1).half())
    check_precision("fp16", torch.device("cuda"), nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("dtype", "hint"), [(torch.complex64, "give --amp bf16"), (torch.float16, "keep the model's weights")]
)
def test_fp16_is_refused_for_weights_whose_gradients_can_not_be_scaled(dtype, hint):
    model = nn.Linear(1, 1).to(dtype)
    with pytest.raises(UsageFault, match="parameter weight is") as caught:
        check_precision("fp16", torch.device("cuda"), model)
    assert str(caught.value.hint).startswith(hint)
    check_precision("fp16", torch.device("cuda"), model.requires_grad_(False))


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
    course = [0.5, INFINITE, 0.25, 0.125, INFINITE, 1.0]
    whole, optimizer, weight = start("fp16")
    for gradient in course:
        take(whole, optimizer, weight, gradient)
    first, optimizer, weight = start("fp16")
    for gradient in course[:3]:
        take(first, optimizer, weight, gradient)
    rest = Precision("fp16", CPU)
    rest.load_state_dict(first.state_dict())
    for gradient in course[3:]:
        take(rest, optimizer, weight, gradient)
    assert rest.state_dict() == whole.state_dict()
    assert all(isinstance(value, int | float) for value in rest.state_dict().values())
