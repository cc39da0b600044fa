"""Build models without memory for their parameters, and fill them from a mapped file."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.errors import UsageFault
from ckpttool.models.skeleton import skeleton, skeletons
from tests.support import architectures


class Positions(nn.Module):
    """A buffer that no file holds, and a parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(4.0), persistent=False)
        shared = nn.Parameter(torch.rand(4))
        shared.is_mine = True  # type: ignore[attr-defined]
        self.first, self.second = shared, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions * self.first


def test_skeletons_have_parameters_without_values_and_real_buffers() -> None:
    with skeletons():
        model = Positions()
    assert model.first is model.second
    assert (model.first.is_meta, model.first.shape, model.first.requires_grad) == (True, (4,), True)
    assert model.first.is_mine
    assert torch.equal(model.positions, torch.arange(4.0))
    assert not nn.Linear(2, 2).weight.is_meta  # outside, all is as it was


def test_a_constructor_that_computes_with_its_parameters_gets_their_values(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 2)\n"
        "        self.scale = self.weight.detach().abs().mean()\n"
    )
    assert not skeleton(f"{tmp_path}/m.py:Net").scale.is_meta


def test_an_error_inside_skeletons_leaves_torch_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), skeletons():
        nn.Linear(1 // 0, 2)
    assert not nn.Linear(2, 2).weight.is_meta


def test_assigned_tensors_are_mapped_and_a_shared_parameter_stays_one(tmp_path: Path) -> None:
    original = Positions()
    torch.save(original.state_dict(), tmp_path / "f.pt")
    with skeletons():
        model = Positions()
    ckpttool.reload(tmp_path / "f.pt", model, assign=True)
    assert model.first is model.second
    assert torch.equal(model.first, original.first)
    assert torch.equal(model(torch.ones(4)), original(torch.ones(4)))
    with torch.no_grad():
        model.first.zero_()
    assert torch.equal(torch.load(tmp_path / "f.pt")["first"], original.first)  # the file is as it was


def test_assigned_tensors_have_the_dtypes_that_copying_would_give(tmp_path: Path) -> None:
    state = {
        name: value.half() if value.is_floating_point() else value
        for name, value in architectures.net().state_dict().items()
    }
    torch.save(state, tmp_path / "f.pt")
    copied, assigned = architectures.net(), architectures.net()
    ckpttool.reload(tmp_path / "f.pt", copied)
    ckpttool.reload(tmp_path / "f.pt", assigned, assign=True)
    for (name, mine), theirs in zip(assigned.state_dict().items(), copied.state_dict().values(), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), name


def test_a_frozen_parameter_stays_frozen_when_assigned(tmp_path: Path) -> None:
    model = architectures.net()
    torch.save(model.state_dict(), tmp_path / "f.pt")
    model.head.requires_grad_(False)
    ckpttool.reload(tmp_path / "f.pt", model, assign=True)
    assert not model.head.weight.requires_grad
    assert model.conv.weight.requires_grad


def test_a_constructor_that_reads_or_keeps_values_gets_them(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\n"
        "class Scaled(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 2)\n"
        "        self.scale = float(self.weight.abs().max())\n"
        "class Kept(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 2)\n"
        "        self.register_buffer('start', self.weight.detach().clone(), persistent=False)\n"
    )
    assert skeleton(f"{tmp_path}/m.py:Scaled").scale > 0  # type: ignore[operator]
    assert not skeleton(f"{tmp_path}/m.py:Kept").start.is_meta  # type: ignore[union-attr]


def test_a_factory_that_fails_or_makes_no_module_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "def net():\n    return 3\ndef needs(width):\n    return width\ndef breaks():\n    return 1 / 0\n"
    )
    with pytest.raises(UsageFault, match="returned an object of type int, not a torch"):
        skeleton(f"{tmp_path}/m.py:net")
    with pytest.raises(UsageFault) as raised:
        skeleton(f"{tmp_path}/m.py:needs")
    assert f"{tmp_path}/m.py:needs(width=…)" in str(raised.value.hint)
    with pytest.raises(UsageFault, match=r"ZeroDivisionError: division by zero \(at .*m.py:6\)"):
        skeleton(f"{tmp_path}/m.py:breaks")


NO_MODELS = {
    "nothing": ("pass", "None", "return model"),
    "the class": ("return torch.nn.Linear", "the class Linear", "call it"),
    "a pair": ("return torch.nn.Linear(1, 1), 'tokenizer'", "an object of type tuple", "the model alone"),
    "a list": ("return [torch.nn.Linear(1, 1)]", "an object of type list", "the model alone"),
    "a state": (
        "return torch.nn.Linear(1, 1).state_dict()",
        "an object of type OrderedDict",
        "not its state",
    ),
    "a generator": ("yield torch.nn.Linear(1, 1)", "an object of type generator", None),
    "a coroutine": ("async def inner(): pass\n    return inner()", "an object of type coroutine", None),
}


@pytest.mark.parametrize("what", NO_MODELS)
@pytest.mark.filterwarnings("error")
def test_a_factory_that_returns_no_module_is_told_what_to_return(what: str, tmp_path: Path) -> None:
    body, returned, hint = NO_MODELS[what]
    (tmp_path / "m.py").write_text(f"import torch\ndef net():\n    {body}\n")
    with pytest.raises(UsageFault) as raised:
        skeleton(f"{tmp_path}/m.py:net")
    assert raised.value.message == f"{tmp_path}/m.py:net: returned {returned}, not a torch.nn.Module"
    assert (raised.value.hint is None) if hint is None else hint in str(raised.value.hint)
    gc.collect()


def test_a_buffer_with_two_names_stays_one_when_assigned(tmp_path: Path) -> None:
    def twice() -> nn.Module:
        shared = torch.arange(3.0)
        model = nn.Sequential(nn.Module(), nn.Module())
        for part in model:
            part.register_buffer("table", shared)
        return model

    torch.save(twice().state_dict(), tmp_path / "f.pt")
    model: Any = twice()
    ckpttool.reload(tmp_path / "f.pt", model, assign=True)
    assert model[0].table is model[1].table


def test_copying_into_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    """torch only warns, and the model has no values afterwards."""
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "f.pt")
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(UsageFault, match="'weight' and 1 more are on the meta device") as raised:
        ckpttool.reload(tmp_path / "f.pt", model)
    assert "assign=True" in str(raised.value.hint)
    ckpttool.reload(tmp_path / "f.pt", model, assign=True)
    assert not model.weight.is_meta


def test_tensors_that_stay_without_values_are_named(tmp_path: Path) -> None:
    """A buffer that is not saved has its values from the constructor, and on the meta device none."""
    torch.save(Positions().state_dict(), tmp_path / "f.pt")
    with torch.device("meta"):
        model = Positions()
    assert ckpttool.reload(tmp_path / "f.pt", model, assign=True).without_values == ("positions",)
    assert ckpttool.reload(tmp_path / "f.pt", Positions()).without_values == ()
