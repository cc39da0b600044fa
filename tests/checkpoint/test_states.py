"""Which state of a file is taken: nested dicts are one state, equal ones must be named."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.analysis.compare import diff
from ckpttool.analysis.verify import verify
from ckpttool.errors import NoState, Unsupported
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.transforms.selection import cast, select, slim
from tests.support.running import Cli
from tests.support.saved import opened


def weights(seed: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), float(seed)), "bias": torch.full((2,), float(seed))}


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}


# Nested dicts.

ONE, NINE = {"w": torch.ones(1)}, {"w": torch.ones(9)}
LAYERS = {"layer1": weights(1), "layer2": weights(2)}
NESTED: dict[str, tuple[Any, str, str]] = {
    "layers": (LAYERS, "", "layer1.weight layer1.bias layer2.weight layer2.bias"),
    "layers of unequal size": ({"a": ONE, "b": NINE}, "", "a.w b.w"),
    "two modules": ({"generator": ONE, "discriminator": NINE}, "", "generator.w discriminator.w"),
    "inside one key": ({"encoder": {"a_0": ONE, "a_1": ONE}, "epoch": 3}, "encoder", "a_0.w a_1.w"),
    "under a known name": ({"model": {"a": ONE, "b": ONE}, "optimizer": OPTIMIZER}, "model", "a.w b.w"),
    "a part named as states are": ({"model": {"net": ONE, "head": ONE}}, "model", "net.w head.w"),
    "tensors beside dicts": ({"a": torch.ones(1), "b": {"c": ONE, "d": ONE}}, "", "a b.c.w b.d.w"),
    "keys with dots": ({"a.b": ONE, "c": {"d.e": torch.ones(1)}}, "", "a.b.w c.d.e"),
    "no plain tensor": ({"a": {"w": torch.eye(2).to_sparse()}, "b": ONE}, "", "b.w"),
}


@pytest.mark.parametrize("what", NESTED)
def test_nested_dicts_of_tensors_are_one_state_with_dotted_names(what: str, tmp_path: Path) -> None:
    tree, where, names = NESTED[what]
    state = opened(tree, tmp_path).state()
    assert (state.where, list(state.tensors)) == (where, names.split())


def test_the_whole_nested_state_is_written(tmp_path: Path) -> None:
    ckpttool.save(opened(LAYERS, tmp_path), tmp_path / "out.safetensors")
    found = {name: float(value.max()) for name, value in load_file(tmp_path / "out.safetensors").items()}
    assert found == {"layer1.weight": 1, "layer1.bias": 1, "layer2.weight": 2, "layer2.bias": 2}


def test_nested_dicts_stay_nested_in_a_pt_file_while_names_stay(tmp_path: Path) -> None:
    tree = OrderedDict(scale=torch.ones(2), inner={"layer1": weights(1), "layer2": weights(2)})
    halves, _ = cast(opened(tree, tmp_path), DTYPES["float16"])
    ckpttool.save(halves, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert type(found) is OrderedDict
    assert list(found) == ["scale", "inner"]
    assert found["inner"]["layer2"]["weight"].dtype == torch.float16
    fewer, _ = select(opened(tree, tmp_path), exclude=["inner.layer1.*"])
    ckpttool.save(fewer, tmp_path / "fewer.pt")
    found = torch.load(tmp_path / "fewer.pt")
    assert (list(found), list(found["inner"])) == (["scale", "inner"], ["layer2"])


def test_renamed_keys_of_nested_dicts_are_written_flat_and_by_slim_too(tmp_path: Path) -> None:
    checkpoint = opened({"model": {"a": weights(1), "b": weights(2)}, "epoch": 3}, tmp_path)
    ckpttool.save(slim(checkpoint), tmp_path / "out.pt")
    assert list(torch.load(tmp_path / "out.pt")) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    plain, _ = ckpttool.add_prefix(checkpoint)
    ckpttool.save(plain, tmp_path / "out.pt", force=True)
    found = torch.load(tmp_path / "out.pt")
    assert found["epoch"] == 3
    assert list(found["model"]) == ["module.a.weight", "module.a.bias", "module.b.weight", "module.b.bias"]


def test_an_extra_state_stays_one_entry(tmp_path: Path) -> None:
    tree = {"a": {**weights(1), "_extra_state": {"scale": torch.ones(1)}}, "b": weights(2)}
    state = opened(tree, tmp_path).state()
    assert list(state.tensors) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert list(state.others) == ["a._extra_state"]


def test_dicts_nested_in_too_many_ways_or_in_themselves_are_refused(tmp_path: Path) -> None:
    shared: dict[str, Any] = weights(1)
    for _ in range(60):  # each dict holds the next twice: 2^60 paths lead to the last
        shared = {"a": shared, "b": shared}
    cyclic: dict[str, Any] = {"a": weights(1), "b": weights(2)}
    cyclic["self"] = cyclic
    for tree in (shared, cyclic):
        with pytest.raises(Unsupported, match="names need too much memory"):
            opened(tree, tmp_path).state()


# Several states.

GAN = {"generator": weights(1), "discriminator": weights(2), "epoch": 3}

_ENCODERS = {"enc": {"a": weights(1), "b": weights(2)}, "dec": {"a": weights(3), "b": weights(4)}, "n": 1}
_BRANCHES = {"gen": {"state_dict": weights(1), "lr": 1}, "disc": {"state_dict": weights(2), "lr": 1}}
_UNEQUAL = {"actor": {**weights(1), "more": torch.ones(99)}, "critic": weights(2), "steps": 5}

AMBIGUOUS: dict[str, tuple[Any, str]] = {
    "a GAN beside a counter": (GAN, "generator discriminator"),
    "two of a kind": ({"student": weights(1), "teacher": weights(2), "opt": OPTIMIZER}, "student teacher"),
    "unequal sizes": (_UNEQUAL, "actor critic"),
    "one known name twice": (_BRANCHES, "gen.state_dict disc.state_dict"),
    "nested ones": (_ENCODERS, "enc dec"),
    "two pickled models": ({"g": torch.nn.Linear(1, 1), "d": torch.nn.Linear(1, 1), "n": 1}, "g d"),
    "two averages": ({"ema_g": weights(1), "ema_d": weights(2), "n": 1}, "ema_g ema_d"),
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_equal_states_are_refused_with_their_names(what: str, tmp_path: Path) -> None:
    tree, listed = AMBIGUOUS[what]
    checkpoint, names = opened(tree, tmp_path), listed.split()
    with pytest.raises(NoState, match="holds 2 states, and nothing says which is the model's") as refused:
        checkpoint.state()
    assert all(f"'{name}'" in str(refused.value) for name in names)
    assert "--state " in refused.value.hint
    assert {checkpoint.state(name).where for name in names} == set(names)


def test_all_of_them_are_taken_as_one_state_by_an_empty_name(cli: Cli, tmp_path: Path) -> None:
    by_name = {"state": {"weight": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["weight"]}]}
    torch.save({**GAN, "optimizer": by_name}, tmp_path / "gan.pt")
    ran = cli("convert", tmp_path / "gan.pt", tmp_path / "all.safetensors", "--state", "", "--json")
    assert ran.code == 0
    assert ran.json["left_out"] == ["epoch", "optimizer"]
    names = {f"{name}.{part}" for name in ("generator", "discriminator") for part in ("weight", "bias")}
    assert set(load_file(tmp_path / "all.safetensors")) == names


def test_a_prefix_of_nested_dicts_names_a_part_of_the_state(tmp_path: Path) -> None:
    model = {"enc": {"a": weights(1), "b": weights(2)}, "dec": weights(3)}
    checkpoint = opened({"model": model, "n": 1}, tmp_path)
    assert list(checkpoint.state("model.enc").tensors) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert list(checkpoint.state("model.enc.b").tensors) == ["weight", "bias"]


def test_inspect_of_several_states_names_them(cli: Cli, tmp_path: Path) -> None:
    torch.save(GAN, tmp_path / "gan.pt")
    ran = cli("inspect", tmp_path / "gan.pt")
    assert ran.code == 0
    assert "--state generator" in ran.out
    assert "--state discriminator" in ran.out
    assert "holds no dict of tensors" not in ran.out
    found = json.loads(cli("inspect", tmp_path / "gan.pt", "--json").out)
    assert found["state"] is None
    assert found["other_states"] == ["generator", "discriminator"]


def test_several_states_are_kept_and_compared_whole(tmp_path: Path) -> None:
    saved = ckpttool.save(opened(GAN, tmp_path), tmp_path / "copy.pt")
    assert saved.left_out == ()
    copy = ckpttool.open(tmp_path / "copy.pt")
    assert diff(opened(GAN, tmp_path), copy).same
    assert verify(opened(GAN, tmp_path), against=copy).compared == "everything"
    other = opened({**GAN, "discriminator": weights(4)}, tmp_path)
    changed = [change.name for change in diff(other, copy).changed]
    assert changed == ["discriminator.weight", "discriminator.bias"]


def test_a_state_in_two_places_is_taken_by_its_likelier_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    for tree in ({"ema": state, "model": state}, {"a": state, "net": {"model": state}}):
        with opened(tree, tmp_path) as checkpoint:
            assert checkpoint.state().where.endswith("model")
            assert len(checkpoint.states()) == 1
    assert ckpttool.inspect(tmp_path / "in.pt").other_states == ("a",)
