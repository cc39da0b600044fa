"""Permuted axes, other shapes and further names agree with what torch makes of the same tensors."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import CkptToolError, Collision, NothingToDo, UsageFault
from ckpttool.transforms.layout import permute, reshape, tie
from tests.support.comparing import assert_same
from tests.support.saved import loaded, opened

BASE = torch.arange(24.0).reshape(2, 3, 4)

VIEWS: dict[str, torch.Tensor] = {
    "contiguous": BASE,
    "with an offset": torch.arange(40.0)[7:31].reshape(2, 3, 4),
    "transposed": BASE.transpose(0, 2).contiguous().transpose(0, 2),
    "with gaps": torch.arange(96.0).reshape(4, 6, 4)[::2, ::2],
    "expanded": torch.arange(4.0).expand(2, 3, 4),
    "conjugate": torch.complex(BASE, BASE + 1).conj(),
}


@pytest.mark.parametrize("axes", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_axes_are_permuted_as_torch_permutes_them(view: str, axes: tuple[int, ...], tmp_path: Path) -> None:
    new, changed = permute(opened({"w": VIEWS[view], "b": BASE}, tmp_path), [("w", axes)])
    assert changed == ("w",)
    assert_same({"w": VIEWS[view].permute(axes), "b": BASE}, loaded(new, tmp_path))
    if view != "conjugate":
        ckpttool.save(new, tmp_path / "out.safetensors")
        assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], VIEWS[view].permute(axes))


@given(st.lists(st.integers(0, 4), max_size=4), st.randoms(use_true_random=False))
def test_any_shape_with_the_same_number_of_elements_matches_torch(sizes: list[int], random: Any) -> None:
    tensor = torch.arange(math.prod(sizes)).reshape(sizes)
    shape = [*sizes, *[1] * random.randint(0, 2)]
    random.shuffle(shape)
    if len(shape) > 1:
        shape[:2] = [shape[0] * shape[1]]
    with tempfile.TemporaryDirectory() as folder:
        new, _ = reshape(opened({"w": tensor}, Path(folder)), [("w", tuple(shape))])
        assert_same({"w": tensor.reshape(shape)}, loaded(new, Path(folder)))


@pytest.mark.parametrize("view", [view for view in VIEWS if view not in ("contiguous", "with an offset")])
def test_only_axes_of_size_1_may_change_in_a_strided_view(view: str, tmp_path: Path) -> None:
    found = opened({"w": VIEWS[view]}, tmp_path)
    if view == "conjugate":  # contiguous in memory
        new, _ = reshape(found, [("w", (6, 4))])
        assert torch.equal(loaded(new, tmp_path)["w"], VIEWS[view].reshape(6, 4))
        return
    new, _ = reshape(found, [("w", (2, 1, 3, 4, 1))])
    assert torch.equal(loaded(new, tmp_path)["w"], VIEWS[view].reshape(2, 1, 3, 4, 1))
    with pytest.raises(UsageFault, match="'w' is a strided view and can't be viewed as 4,6") as fault:
        reshape(found, [("w", (4, 6))])
    assert fault.value.hint and "contiguous" in fault.value.hint
    ckpttool.save(found, tmp_path / "copy.safetensors")  # as the hint says
    new, _ = reshape(ckpttool.open(tmp_path / "copy.safetensors"), [("w", (4, 6))])
    assert torch.equal(loaded(new, tmp_path)["w"], VIEWS[view].reshape(4, 6))


def test_rules_are_applied_in_order_to_every_matching_key(tmp_path: Path) -> None:
    state = {f"h.{i}.c_attn.weight": BASE[i] for i in range(2)} | {"h.0.bias": BASE[0, 0]}
    rules = [("*.weight", (1, 0)), ("h.1.*", (1, 0))]
    new, changed = permute(opened(state, tmp_path), rules)
    assert changed == ("h.0.c_attn.weight", "h.1.c_attn.weight")
    found = loaded(new, tmp_path)
    assert torch.equal(found["h.0.c_attn.weight"], BASE[0].T)
    assert torch.equal(found["h.1.c_attn.weight"], BASE[1])


def test_everything_else_stays(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    tree = {"epoch": 3, "model": net.state_dict(), "args": [1, {"x": BASE}]}
    new, _ = permute(opened(tree, tmp_path), [("0.weight", (1, 0))])
    found = loaded(new, tmp_path)
    state = OrderedDict(tree["model"])  # type: ignore[call-overload]
    state._metadata = net.state_dict()._metadata  # type: ignore[attr-defined]
    state["0.weight"] = state["0.weight"].T
    assert_same(tree | {"model": state}, found)
    assert found["model"]._metadata == net.state_dict()._metadata


def test_a_parameter_stays_a_parameter(tmp_path: Path) -> None:
    new, _ = permute(opened({"w": torch.nn.Parameter(BASE), "b": BASE}, tmp_path), [("w", (2, 1, 0))])
    found = loaded(new, tmp_path)["w"]
    assert isinstance(found, torch.nn.Parameter) and torch.equal(found, BASE.permute(2, 1, 0))


def test_tied_tensors_stay_tied_when_both_change(tmp_path: Path) -> None:
    new, _ = permute(opened({"a": BASE, "b": BASE, "c": BASE}, tmp_path), [("[ab]", (1, 0, 2))])
    found = loaded(new, tmp_path)
    assert len({tensor.data_ptr() for tensor in found.values()}) == 1
    assert found["a"].shape == found["b"].shape == (3, 2, 4) and torch.equal(found["c"], BASE)


@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_a_lost_tie_is_restored_and_the_model_loads(output: str, tmp_path: Path) -> None:
    state = {"embed.weight": torch.rand(5, 3), "norm": torch.rand(3)}
    new = tie(opened({"model": state, "epoch": 1}, tmp_path), [("head.weight", "embed.weight")])
    saved = ckpttool.save(new, tmp_path / output)
    assert saved.tied == (("head.weight",) if output == "out.safetensors" else ())
    found = ckpttool.open(tmp_path / output).state().load()
    assert set(found) == {*state, "head.weight"}
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert torch.equal(found["embed.weight"], state["embed.weight"])
    assert (tmp_path / output).stat().st_size < 4000


REFUSED: dict[str, tuple[Any, type[CkptToolError], str]] = {
    "an axis twice": (lambda c: permute(c, [("w", (0, 0, 1))]), UsageFault, "a permutation of the 3 axes of"),
    "an axis too few": (lambda c: permute(c, [("w", (1, 0))]), UsageFault, "1,0 is not a permutation"),
    "an axis too far": (lambda c: permute(c, [("w", (0, 1, 3))]), UsageFault, "0,1,3 is not a permutation"),
    "elements lost": (lambda c: reshape(c, [("w", (2, 3))]), UsageFault, "'w' has 24 elements, and 2,3 6"),
    "elements gained": (lambda c: reshape(c, [("w", (2**70,))]), UsageFault, "'w' has 24 elements"),
    "no key": (lambda c: permute(c, [("x*", (0,))]), NothingToDo, "no tensor's key matches 'x\\*'"),
    "no tensor": (lambda c: reshape(c, [("n", (1,))]), NothingToDo, "no tensor's key matches 'n'"),
    "more axes than torch has": (lambda c: reshape(c, [("w", (1,) * 65)]), UsageFault, "65 axes"),
    "no such name": (lambda c: tie(c, [("v", "x")]), NothingToDo, "no tensor is named 'x'"),
    "a name taken": (lambda c: tie(c, [("w", "b")]), Collision, "'w' would be another name of 'b'"),
    "a name taken by what is no tensor": (lambda c: tie(c, [("n", "b")]), Collision, "already exists"),
    "a name twice": (lambda c: tie(c, [("v", "b"), ("v", "w")]), Collision, "already exists"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_layouts_are_refused_by_name(what: str, tmp_path: Path) -> None:
    change, error, said = REFUSED[what]
    with pytest.raises(error, match=said) as fault:
        change(opened({"w": BASE, "b": BASE[0], "n": 3}, tmp_path))
    if error is not Collision and said != "65 axes":
        assert "in.pt" in fault.value.message


def test_only_the_named_state_is_changed(tmp_path: Path) -> None:
    checkpoint = opened({"model": {"w": BASE}, "ema": {"w": BASE + 1}}, tmp_path)
    new, _ = permute(checkpoint, [("w", (2, 0, 1))], state="ema")
    assert_same({"model": {"w": BASE}, "ema": {"w": (BASE + 1).permute(2, 0, 1)}}, loaded(new, tmp_path))


def test_a_parameter_of_two_names_stays_one_parameter(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(BASE.clone())
    new, _ = permute(opened({"a": parameter, "b": parameter}, tmp_path), [("*", (2, 1, 0))])
    found = loaded(new, tmp_path)
    assert found["a"] is found["b"]
    assert torch.equal(found["a"], BASE.permute(2, 1, 0))
