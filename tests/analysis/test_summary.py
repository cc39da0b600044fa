"""A checkpoint is summarised without loading it."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.analysis.other_contents import OtherRow
from ckpttool.analysis.summary import Summary, summarize
from ckpttool.analysis.tables import TensorRow, tensor_rows
from ckpttool.errors import NoState
from tests.support.crafting import call, dict_of, list_of, name, number, storage, tensor, text, torch_zip

ONE = torch.ones(1)


@pytest.fixture
def summary(tmp_path: Path) -> Any:
    def summary(value: Any, state: str | None = None) -> Summary:
        torch.save(value, tmp_path / "f.pt")
        return summarize(ckpttool.open(tmp_path / "f.pt"), state)

    return summary


def test_a_training_checkpoint_is_summarised(summary: Any, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    wrapped = {f"module.{key}": value for key, value in net.state_dict().items()}
    found = summary({"epoch": 3, "state_dict": wrapped, "state_dict_ema": wrapped | {"x": ONE}})
    assert (found.format, found.state, found.keys) == ("torch-zip", "state_dict", 7)
    assert found.other_states == ("state_dict_ema",)
    assert [(p.prefix, p.keys, p.of) for p in found.prefixes] == [("module.", 7, 7)]
    assert found.parameters == sum(p.numel() for p in net.parameters())
    first = next(tensor_rows(ckpttool.open(tmp_path / "f.pt")))
    assert first == TensorRow("state_dict.module.0.weight", "float32", (8, 3, 3, 3), 864, None)
    assert found.other == (OtherRow("epoch", "int", 3, True),)
    assert found.unknown == ()


def test_the_size_is_that_of_the_file(summary: Any, tmp_path: Path) -> None:
    assert summary({"a": ONE}).nbytes == (tmp_path / "f.pt").stat().st_size


def test_tied_parameters_and_their_views_count_once(summary: Any, tmp_path: Path) -> None:
    weight = torch.ones(3, 4)
    found = summary({"embed": weight, "head": weight, "own": torch.ones(5)})
    assert found.parameters == 17
    rows = tensor_rows(ckpttool.open(tmp_path / "f.pt"))
    assert [row.shared_with for row in rows] == [None, "embed", None]


def test_batchnorm_statistics_are_not_parameters(summary: Any) -> None:
    assert summary(torch.nn.BatchNorm2d(4).state_dict()).parameters == 8


OTHERS: dict[str, tuple[Any, OtherRow]] = {
    "int": (5, OtherRow("x", "int", 5, True)),
    "float": (0.5, OtherRow("x", "float", 0.5, True)),
    "bool": (True, OtherRow("x", "bool", True, True)),
    "none": (None, OtherRow("x", "NoneType", None, True)),
    "text": ("abc", OtherRow("x", "str", "abc", True)),
    "long text": ("a" * 2000, OtherRow("x", "str")),
    "bytes": (b"abc", OtherRow("x", "bytes", size=3)),
    "a short list": ([1, 2.5, "a", None], OtherRow("x", "list", [1, 2.5, "a", None], True, 4)),
    "a list of lists": ([[1, 2], [3]], OtherRow("x", "list", [[1, 2], [3]], True, 2)),
    "a long list": (list(range(100)), OtherRow("x", "list", None, False, 100)),
    "a deep list": ([[[1]]], OtherRow("x", "list", None, False, 1)),
    "a tuple": ((0.9, 0.99), OtherRow("x", "tuple", [0.9, 0.99], True, 2)),
    "an empty dict": ({}, OtherRow("x", "dict", size=0)),
    "a dtype": (torch.float16, OtherRow("x", "dtype", "torch.float16", True)),
    "a set": ({1, 2}, OtherRow("x", "set", size=2)),
    "a class": (argparse.Namespace, OtherRow("x", "name", "argparse.Namespace", True)),
    "a large number": (10**4000, OtherRow("x", "int")),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_values_are_shown_by_name_and_type_and_short_ones_by_value(what: str, summary: Any) -> None:
    value, row = OTHERS[what]
    assert summary({"x": value, "w": ONE}).other == (row,)


def test_contents_of_dicts_and_objects_are_named(summary: Any) -> None:
    found = summary({"args": argparse.Namespace(lr=0.1, model={"depth": 20}), "w": ONE})
    assert [(row.name, row.type, row.value, row.size) for row in found.other] == [
        ("args", "argparse.Namespace", None, 2),
        ("args.lr", "float", 0.1, None),
        ("args.model.depth", "int", 20, None),
    ]
    assert found.unknown == ("argparse.Namespace",)


def test_other_entries_of_the_state_are_listed_without_module_versions(summary: Any) -> None:
    state = OrderedDict(w=ONE, _extra_state=7)
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    assert [row.name for row in summary({"model": state}).other] == ["model._extra_state"]


def test_optimizer_settings_are_listed(summary: Any) -> None:
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.named_parameters(), 0.1).state_dict()
    found = summary({"model": net.state_dict(), "optimizer": optimizer})
    assert [row.name for row in found.other] == ["optimizer.state", "optimizer.param_groups"]


UNDERSTOOD = [
    *(torch.Size([1]), torch.device("cpu"), torch.float16, torch.bfloat16, {1, 2}, b"bytes", 1j),
    *(torch.nn.Parameter(ONE), OrderedDict(a=1)),
]


@pytest.mark.parametrize("value", UNDERSTOOD, ids=lambda v: type(v).__name__)
def test_plain_values_are_not_unknown_names(value: Any, summary: Any) -> None:
    assert summary({"x": value, "w": ONE}).unknown == ()


def test_names_that_run_code_are_listed_wherever_they_are(tmp_path: Path) -> None:
    eval_ = call(name("builtins", "eval"), text("1"))
    body = dict_of({"w": tensor(storage(1), (1,)), "x": list_of(call(name("os", "system"), list_of(eval_)))})
    found = summarize(ckpttool.open(torch_zip(tmp_path / "f", body, {"0": bytes(4)})))
    assert found.unknown == ("builtins.eval", "os.system")


@pytest.mark.parametrize("key", ["__reduce__", "system"])
def test_names_in_keys_states_and_keyword_arguments_are_listed(key: str, tmp_path: Path) -> None:
    made = name("m", "C") + b")}" + text("k") + name("evil", "a") + b"s\x92" + name("evil", "b") + b"b"
    body = b"}" + made + name("evil", key) + b"s"
    found = summarize(ckpttool.open(torch_zip(tmp_path / "f", body)))
    assert sorted(found.unknown) == sorted(["m.C", "evil.a", "evil.b", f"evil.{key}"])


def test_a_file_without_a_state_is_still_described(summary: Any, tmp_path: Path) -> None:
    found = summary([ONE, {"epoch": 1}])
    assert (found.state, found.keys, found.parameters, found.prefixes) == (None, 0, 0, ())
    assert [row.name for row in tensor_rows(ckpttool.open(tmp_path / "f.pt"))] == ["0"]


def test_a_missing_state_that_was_asked_for_is_an_error(summary: Any) -> None:
    with pytest.raises(NoState):
        summary({"model": {"w": ONE}}, "teacher")


def test_a_safetensors_file_has_its_metadata(tmp_path: Path) -> None:
    save_file({"module.a": ONE}, tmp_path / "f", metadata={"format": "pt"})
    found = summarize(ckpttool.open(tmp_path / "f"))
    assert (found.format, found.state, found.metadata) == ("safetensors", "", {"format": "pt"})


HOSTILE = {
    "itself": b"]q\x00h\x00a",
    "doubled": b"]" + b"".join(b"q%b0](h%bh%be" % ((bytes([i]),) * 3) for i in range(60)),
    "nested lists": b"]" * 100_000 + b"a" * 99_999,
    "nested dicts": b"".join(b"}" + text("k") for _ in range(50_000)) + b"N" + b"s" * 50_000,
    "attribute itself": call(name("m", "C")) + b"q\x00}" + text("a") + b"h\x00sb",
    "large number": number(10**10_000),
    "large key": b"}" + number(10**10_000) + b"Ns",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_values_are_described_in_bounded_time(body: bytes, tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "f", dict_of({"w": tensor(storage(1), (1,)), "x": body}), {"0": bytes(4)})
    found = summarize(ckpttool.open(path))
    assert found.state == ""
    assert len(found.other) < 500


def test_a_numpy_scalar_is_shown_as_a_number(tmp_path: Path) -> None:
    scores = {"d": np.float64(0.875), "f": np.float32(1.5), "i": np.int64(-3), "b": np.bool_(True)}
    scores |= {"h": np.int16(7), "u": np.uint8(255)}
    torch.save({"model": {"w": torch.ones(1)}, **scores, "s": np.str_("x")}, tmp_path / "f.pt")
    rows = summarize(ckpttool.open(tmp_path / "f.pt")).other
    assert {row.name: row.value for row in rows if row.has_value} == scores


class OddText:
    """Pickles as a text of NumPy's whose characters have numbers that no character has."""

    def __reduce__(self) -> Any:
        return np._core.multiarray.scalar, (np.dtype("U1"), b"\xff" * 4)


def test_a_numpy_text_of_no_characters_is_shown_by_its_type(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "best": OddText()}, tmp_path / "f.pt")
    (row,) = summarize(ckpttool.open(tmp_path / "f.pt")).other
    assert (row.name, row.has_value) == ("best", False)
