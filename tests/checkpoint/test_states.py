"""Which state of a file is taken: nested dicts are one state, equal ones must be named."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.analysis.compare import diff
from ckpttool.analysis.verify import verify
from ckpttool.errors import NoState, Refused, Unsupported
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.transforms.selection import cast, select, slim
from tests.support.running import Ran


def weights(seed: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), float(seed)), "bias": torch.full((2,), float(seed))}


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}


# Nested dicts.

NESTED: dict[str, tuple[Any, str, list[str]]] = {
    "layers": (
        {"layer1": weights(1), "layer2": weights(2)},
        "",
        ["layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias"],
    ),
    "layers of unequal size": ({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(9)}}, "", ["a.w", "b.w"]),
    "two modules saved together": (
        {"generator": {"w": torch.ones(1)}, "discriminator": {"w": torch.ones(9)}},
        "",
        ["generator.w", "discriminator.w"],
    ),
    "inside one key": (
        {"encoder": {"layer_0": {"w": torch.ones(1)}, "layer_1": {"w": torch.ones(1)}}, "epoch": 3},
        "encoder",
        ["layer_0.w", "layer_1.w"],
    ),
    "under a known name": (
        {"model": {"encoder": {"w": torch.ones(1)}, "decoder": {"w": torch.ones(1)}}, "optimizer": OPTIMIZER},
        "model",
        ["encoder.w", "decoder.w"],
    ),
    "a part with a name that states have": (
        {"model": {"net": {"w": torch.ones(1)}, "head": {"w": torch.ones(1)}}},
        "model",
        ["net.w", "head.w"],
    ),
    "tensors beside dicts": (
        {"scale": torch.ones(1), "block": {"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}},
        "",
        ["scale", "block.a.w", "block.b.w"],
    ),
    "keys with dots": (
        {"a.b": {"w": torch.ones(1)}, "c": {"d.e": torch.ones(1)}},
        "",
        ["a.b.w", "c.d.e"],
    ),
    "no plain tensor": (
        {"a": {"w": torch.eye(2).to_sparse()}, "b": {"w": torch.ones(1)}},
        "",
        ["b.w"],
    ),
}


@pytest.mark.parametrize("what", NESTED)
def test_nested_dicts_of_tensors_are_one_state_with_dotted_names(what: str, opened: Any) -> None:
    tree, where, names = NESTED[what]
    state = opened(tree).state()
    assert (state.where, list(state.tensors)) == (where, names)


def test_the_whole_nested_state_is_written(opened: Any, tmp_path: Path) -> None:
    ckpttool.save(opened(NESTED["layers"][0]), tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert {name: float(value.flatten()[0]) for name, value in found.items()} == {
        "layer1.weight": 1,
        "layer1.bias": 1,
        "layer2.weight": 2,
        "layer2.bias": 2,
    }


def test_nested_dicts_stay_nested_in_a_pt_file_while_names_stay(opened: Any, tmp_path: Path) -> None:
    tree = OrderedDict(scale=torch.ones(2), inner={"layer1": weights(1), "layer2": weights(2)})
    halves, _ = cast(opened(tree), DTYPES["float16"])
    ckpttool.save(halves, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert type(found) is OrderedDict
    assert list(found) == ["scale", "inner"]
    assert found["inner"]["layer2"]["weight"].dtype == torch.float16
    fewer, _ = select(opened(tree), exclude=["inner.layer1.*"])
    ckpttool.save(fewer, tmp_path / "fewer.pt")
    found = torch.load(tmp_path / "fewer.pt")
    assert (list(found), list(found["inner"])) == (["scale", "inner"], ["layer2"])


def test_renamed_keys_of_nested_dicts_are_written_flat(opened: Any, tmp_path: Path) -> None:
    plain, _ = ckpttool.add_prefix(opened({"model": {"a": weights(1), "b": weights(2)}, "epoch": 3}))
    ckpttool.save(plain, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert found["epoch"] == 3
    assert list(found["model"]) == ["module.a.weight", "module.a.bias", "module.b.weight", "module.b.bias"]


def test_slim_takes_a_nested_state_whole(opened: Any, tmp_path: Path) -> None:
    ckpttool.save(
        slim(opened({"model": {"a": weights(1), "b": weights(2)}, "epoch": 3})), tmp_path / "out.pt"
    )
    assert list(torch.load(tmp_path / "out.pt")) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_two_entries_of_one_dotted_name_are_refused(opened: Any) -> None:
    one = torch.ones(1)
    with pytest.raises(Refused, match=r"two entries of its nested dicts are named 'a\.b\.c'"):
        opened({"a.b": {"c": one}, "a": {"b.c": one}}).state()


def test_an_extra_state_stays_one_entry(opened: Any) -> None:
    state = opened({"a": {**weights(1), "_extra_state": {"scale": torch.ones(1)}}, "b": weights(2)}).state()
    assert list(state.tensors) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert list(state.others) == ["a._extra_state"]


def test_shared_dicts_nested_in_too_many_ways_are_refused(opened: Any) -> None:
    """Each dict holds the next twice: 2^60 paths lead to the last."""
    inner: dict[str, Any] = weights(1)
    for _ in range(60):
        inner = {"a": inner, "b": inner}
    with pytest.raises(Unsupported, match="names need too much memory"):
        opened(inner).state()


def test_a_dict_that_holds_itself_is_refused(opened: Any) -> None:
    tree: dict[str, Any] = {"a": weights(1), "b": weights(2)}
    tree["self"] = tree
    with pytest.raises(Unsupported, match="names need too much memory"):
        opened(tree).state()


# Several states.

GAN = {"generator": weights(1), "discriminator": weights(2), "epoch": 3}

_ENCODERS = {"enc": {"a": weights(1), "b": weights(2)}, "dec": {"a": weights(3), "b": weights(4)}, "n": 1}
_BRANCHES = {"gen": {"state_dict": weights(1), "lr": 1}, "disc": {"state_dict": weights(2), "lr": 1}}
_UNEQUAL = {"actor": {**weights(1), "more": torch.ones(99)}, "critic": weights(2), "steps": 5}

AMBIGUOUS: dict[str, tuple[Any, str]] = {
    "a GAN beside a counter": (GAN, "generator discriminator"),
    "two of a kind": (
        {"student": weights(1), "teacher": weights(2), "optimizer": OPTIMIZER},
        "student teacher",
    ),
    "unequal sizes": (_UNEQUAL, "actor critic"),
    "one known name twice": (_BRANCHES, "gen.state_dict disc.state_dict"),
    "nested ones": (_ENCODERS, "enc dec"),
    "two pickled models": ({"g": torch.nn.Linear(1, 1), "d": torch.nn.Linear(1, 1), "n": 1}, "g d"),
    "two averages": ({"ema_g": weights(1), "ema_d": weights(2), "n": 1}, "ema_g ema_d"),
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_equal_states_are_refused_with_their_names(what: str, opened: Any) -> None:
    tree, listed = AMBIGUOUS[what]
    checkpoint, names = opened(tree), listed.split()
    with pytest.raises(NoState, match="holds 2 states, and nothing says which is the model's") as refused:
        checkpoint.state()
    assert all(f"'{name}'" in str(refused.value) for name in names)
    assert "--state " in refused.value.hint
    assert {checkpoint.state(name).where for name in names} == set(names)


def test_a_command_that_needs_one_state_is_exit_3(cli: Callable[..., Ran], tmp_path: Path) -> None:
    torch.save(GAN, tmp_path / "gan.pt")
    ran = cli("convert", tmp_path / "gan.pt", tmp_path / "out.safetensors")
    assert ran.code == 3
    assert "'generator', 'discriminator'" in ran.err
    assert "--state generator" in ran.err
    assert not (tmp_path / "out.safetensors").exists()
    assert cli("convert", tmp_path / "gan.pt", tmp_path / "g.safetensors", "--state", "generator").code == 0
    assert list(load_file(tmp_path / "g.safetensors")) == ["bias", "weight"]


def test_all_of_them_are_taken_as_one_state_by_an_empty_name(cli: Callable[..., Ran], tmp_path: Path) -> None:
    by_name = {"state": {"weight": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["weight"]}]}
    torch.save({**GAN, "optimizer": by_name}, tmp_path / "gan.pt")
    ran = cli("convert", tmp_path / "gan.pt", tmp_path / "all.safetensors", "--state", "", "--json")
    assert ran.code == 0
    assert ran.json["left_out"] == ["epoch", "optimizer"]
    names = {f"{name}.{part}" for name in ("generator", "discriminator") for part in ("weight", "bias")}
    assert set(load_file(tmp_path / "all.safetensors")) == names


def test_a_prefix_of_nested_dicts_names_a_part_of_the_state(opened: Any) -> None:
    checkpoint = opened({"model": {"enc": {"a": weights(1), "b": weights(2)}, "dec": weights(3)}, "n": 1})
    assert list(checkpoint.state("model.enc").tensors) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert list(checkpoint.state("model.enc.b").tensors) == ["weight", "bias"]


def test_inspect_of_several_states_names_them(cli: Callable[..., Ran], tmp_path: Path) -> None:
    torch.save(GAN, tmp_path / "gan.pt")
    ran = cli("inspect", tmp_path / "gan.pt")
    assert ran.code == 0
    assert "--state generator" in ran.out
    assert "--state discriminator" in ran.out
    assert "holds no dict of tensors" not in ran.out
    found = json.loads(cli("inspect", tmp_path / "gan.pt", "--json").out)
    assert found["state"] is None
    assert found["other_states"] == ["generator", "discriminator"]


def test_several_states_are_kept_and_compared_whole(opened: Any, tmp_path: Path) -> None:
    saved = ckpttool.save(opened(GAN), tmp_path / "copy.pt")
    assert saved.left_out == ()
    copy = ckpttool.open(tmp_path / "copy.pt")
    assert diff(opened(GAN), copy).same
    assert verify(opened(GAN), against=copy).compared == "everything"
    other = opened({**GAN, "discriminator": weights(4)})
    changed = [change.name for change in diff(other, copy).changed]
    assert changed == ["discriminator.weight", "discriminator.bias"]
