"""A checkpoint is summarised without loading it; checks of very many and very odd tensors."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.optim import lr_scheduler

import ckpttool
from ckpttool.core.checkpoint.optimizer_names import to_names
from ckpttool.errors import CkptToolError, NoState, Unreadable, UsageFault
from ckpttool.inspecting.other_contents import OtherRow, describe_optimizer, describe_scheduler, in_words
from ckpttool.inspecting.summary import Summary, summarize, value_in_words
from ckpttool.inspecting.tables import Stats, TensorRow, measure, tensor_rows
from tests.support.comparing import opened
from tests.support.crafting import attacks_of, call, dict_of, list_of, name, storage, tensor, text, torch_zip
from tests.support.running import open_files, within

# ---- A checkpoint is summarised without loading it: its state, what else it holds, and statistics of values


ONE = torch.ones(1)


@pytest.fixture
def summary(tmp_path: Path) -> Any:
    def summary(value: Any, state: str | None = None) -> Summary:
        return summarize(opened(value, tmp_path), state)

    return summary


def test_a_training_checkpoint_is_summarised(summary: Any, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    wrapped = {f"module.{key}": value for key, value in net.state_dict().items()}
    found = summary({"epoch": 3, "state_dict": wrapped, "state_dict_ema": wrapped | {"x": ONE}})
    assert (found.format, found.state, found.keys) == ("torch-zip", "state_dict", 7)
    assert found.other_states == ("state_dict_ema",)
    assert [(p.prefix, p.keys, p.of) for p in found.prefixes] == [("module.", 7, 7)]
    assert found.parameters == sum(p.numel() for p in net.parameters())
    first = next(tensor_rows(ckpttool.open(tmp_path / "in.pt")))
    assert first == TensorRow("state_dict.module.0.weight", "float32", (8, 3, 3, 3), 864, None)
    assert found.other == (OtherRow("epoch", "int", 3, True),)
    assert found.unknown == ()


def test_the_size_is_that_of_the_file(summary: Any, tmp_path: Path) -> None:
    assert summary({"a": ONE}).nbytes == (tmp_path / "in.pt").stat().st_size


def test_tied_parameters_and_their_views_count_once(summary: Any, tmp_path: Path) -> None:
    weight = torch.ones(3, 4)
    found = summary({"embed": weight, "head": weight, "own": torch.ones(5)})
    assert found.parameters == 17
    rows = tensor_rows(ckpttool.open(tmp_path / "in.pt"))
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
    rows = [("args", "argparse.Namespace", None, 2), ("args.lr", "float", 0.1, None)]
    rows += [("args.model.depth", "int", 20, None)]
    assert [(row.name, row.type, row.value, row.size) for row in found.other] == rows
    assert found.unknown == ("argparse.Namespace",)


def test_a_dict_in_two_places_is_shown_at_both(summary: Any) -> None:
    config: dict[str, Any] = {"lr": 0.1}
    config["own"] = config
    found = summary({"model": {"w": ONE}, "config": config, "args": config}).other
    assert found[0] == OtherRow("config.lr", "float", 0.1, True)
    assert [(row.name, row.same_as) for row in found[1:]] == [("config.own", "config"), ("args", "config")]
    assert value_in_words(found[2]) == "the same dict as config"


def test_other_entries_of_the_state_are_listed_without_module_versions(summary: Any) -> None:
    state = OrderedDict(w=ONE, _extra_state=7)
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    assert [row.name for row in summary({"model": state}).other] == ["model._extra_state"]


def test_an_optimizers_lists_of_matrices_are_its_bytes(summary: Any) -> None:
    """As SOAP and Shampoo keep them."""
    kept = {"GG": [torch.ones(3, 3), None, {"x": (torch.ones(2),)}], "step": 1}
    optimizer = {"state": {0: kept}, "param_groups": [{"params": [0], "lr": 0.1}]}
    found = summary({"model": {"w": ONE}, "optimizer": optimizer})
    assert (found.optimizers[0].nbytes, found.other_tensors) == (4 * (9 + 2), ())


def test_optimizer_settings_are_listed(summary: Any) -> None:
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.named_parameters(), 0.1).state_dict()
    found = summary({"model": net.state_dict(), "optimizer": optimizer})
    assert [row.name for row in found.other] == ["optimizer.state", "optimizer.param_groups"]


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
    assert [row.name for row in tensor_rows(ckpttool.open(tmp_path / "in.pt"))] == ["0"]


def test_a_missing_state_that_was_asked_for_is_an_error(summary: Any) -> None:
    with pytest.raises(NoState):
        summary({"model": {"w": ONE}}, "teacher")


def test_a_safetensors_file_has_its_metadata(tmp_path: Path) -> None:
    save_file({"module.a": ONE}, tmp_path / "f", metadata={"format": "pt"})
    found = summarize(ckpttool.open(tmp_path / "f"))
    assert (found.format, found.state, found.metadata) == ("safetensors", "", {"format": "pt"})


HOSTILE = [
    *("a list that contains itself", "an object that contains itself", "lists doubled 60 times"),
    *("lists in lists", "dicts in dicts", "a number of 100,000 digits"),
    "a number of 100,000 digits as a key",
]


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_values_are_described_in_bounded_time(attack: str, tmp_path: Path) -> None:
    attacks_of()[attack](tmp_path / "f")
    found = summarize(ckpttool.open(tmp_path / "f"))
    assert found.state == "model"
    assert len(found.other) < 500


def test_a_numpy_scalar_is_shown_as_a_number(summary: Any) -> None:
    scores = {"d": np.float64(0.875), "f": np.float32(1.5), "i": np.int64(-3), "b": np.bool_(True)}
    scores |= {"h": np.int16(7), "u": np.uint8(255)}
    rows = summary({"model": {"w": ONE}, **scores, "s": np.str_("x")}).other
    assert {row.name: row.value for row in rows if row.has_value} == scores


class OddText:
    """Pickles as a text of NumPy's whose characters have numbers that no character has."""

    def __reduce__(self) -> Any:
        return np._core.multiarray.scalar, (np.dtype("U1"), b"\xff" * 4)


def test_a_numpy_text_of_no_characters_is_shown_by_its_type(summary: Any) -> None:
    (row,) = summary({"model": {"w": ONE}, "best": OddText()}).other
    assert (row.name, row.has_value) == ("best", False)


# Optimizers and schedulers, by the states that torch writes.


OPTIMIZERS = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"


@pytest.mark.parametrize("kind", [*OPTIMIZERS.split(), "SGD with momentum"])
def test_torch_optimizers_are_recognised_by_their_states(kind: str) -> None:
    net = torch.nn.Linear(2, 2)
    given = {"momentum": 0.9} if "momentum" in kind else {}
    optimizer = getattr(torch.optim, kind.split()[0])(net.parameters(), lr=0.1, **given)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = describe_optimizer("optimizer", optimizer.state_dict())
    known = {kind, "Adam or AdamW"} if kind in ("Adam", "AdamW") else {kind}  # alike before torch 2.7
    assert found.kind in known
    assert (found.parameters, found.settings[0]["lr"]) == (2, 0.1)


def test_optimizers_are_recognised_by_their_groups_before_the_first_step() -> None:
    state = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1, momentum=0.9).state_dict()
    found = describe_optimizer("o", state)
    assert (found.kind, found.with_state) == ("SGD", 0)
    assert list(in_words(found.settings[0]))[:2] == ["lr 0.1", "momentum 0.9"]


MALFORMED: dict[str, Any] = {
    "numbers": {"state": 1, "param_groups": 2},
    "no dicts": {"state": {0: 1}, "param_groups": [3, {"params": 4}]},
    "long": {"state": {}, "param_groups": [{"lr": [[1]], "x": "a" * 1000, "betas": tuple(range(99))}]},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_state_is_described_as_far_as_possible(what: str) -> None:
    found = describe_optimizer("o", MALFORMED[what])
    assert all(len(str(group)) < 100 for group in found.settings)


SCHEDULERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["LinearLR", "ConstantLR", "PolynomialLR", "ReduceLROnPlateau"], ()),
    "StepLR": (1,),
    "MultiStepLR": ([1],),
    "ExponentialLR": (0.5,),
    "CosineAnnealingLR": (3,),
    "CosineAnnealingWarmRestarts": (3,),
    "LambdaLR": (lambda epoch: 1.0,),
    "OneCycleLR": (1, 5),
    "CyclicLR": (0.1, 0.2),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_torch_schedulers_are_recognised_by_their_states(kind: str) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1, momentum=0.9)
    made = getattr(lr_scheduler, kind)(optimizer, *SCHEDULERS[kind])
    found = describe_scheduler("s", made.state_dict())
    assert found is not None
    assert (found.kind, found.last_epoch) == (kind, 0)


@pytest.mark.parametrize("value", [1, {}, {"last_epoch": 3}, {"epoch": 1, "gamma": 2}])
def test_other_values_are_not_schedulers(value: Any) -> None:
    assert describe_scheduler("s", value) is None


# Extremes, mean and deviation of values, against torch's.


@pytest.fixture
def stats(tmp_path: Path) -> Any:
    def stats(tensor: torch.Tensor) -> Stats | None:
        return measure("t", opened({"t": tensor}, tmp_path).state().tensors["t"])

    return stats


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_statistics_are_those_that_torch_computes(dtype: torch.dtype, stats: Any) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(700, 900) * 3 + 1).to(dtype)  # more than one block
    wide = tensor.double()
    found = stats(tensor)
    assert (found.minimum, found.maximum) == (wide.min().item(), wide.max().item())
    assert math.isclose(found.mean, wide.mean().item(), rel_tol=1e-12)
    assert math.isclose(found.deviation, wide.std(correction=0).item(), rel_tol=1e-12)
    assert found.non_finite == 0


def test_non_finite_values_are_counted_and_left_out(stats: Any) -> None:
    tensor = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf])
    assert stats(tensor) == Stats(1.0, 3.0, 2.0, 1.0, 3)
    assert stats(torch.full((4,), math.nan)) == Stats(non_finite=4)
    assert stats(torch.tensor(math.nan).expand(5, 7)) == Stats(non_finite=35)


def test_large_integers_are_exact(stats: Any) -> None:
    found = stats(torch.tensor([2**62 + 1, -(2**62) - 1]))
    assert (found.minimum, found.maximum) == (-(2**62) - 1, 2**62 + 1)


def test_views_and_empty_tensors_have_statistics(stats: Any) -> None:
    assert stats(torch.arange(6.0).reshape(2, 3).t()) == stats(torch.arange(6.0))
    assert stats(torch.ones(0)) == Stats()
    assert stats(torch.tensor(2.0).expand(1000, 1000)) == Stats(2.0, 2.0, 2.0, 0.0)


def test_types_without_an_order_have_no_statistics(stats: Any) -> None:
    assert stats(torch.ones(2, dtype=torch.complex64)) is None


# ---- The functions of the library: what they take and return, and in what time on very many and long names


Pair = tuple[Path, Path]


@pytest.fixture
def files(tmp_path: Path) -> Pair:
    """Two files of one model, in two formats, that differ in one element."""
    state = {"w": torch.arange(6.0), "b": torch.ones(2)}
    torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "a.pt")
    other = {**state, "w": state["w"].clone()}
    other["w"][5] += 0.5
    save_file(other, tmp_path / "b.safetensors")
    return tmp_path / "a.pt", tmp_path / "b.safetensors"


def test_the_digest_of_a_path_is_that_of_what_was_made_of_it(files: Pair, tmp_path: Path) -> None:
    with ckpttool.open(files[0]) as checkpoint:
        plain, _ = ckpttool.strip_prefix(checkpoint)
        before = ckpttool.digest(plain)
        ckpttool.save(plain, tmp_path / "plain.safetensors")
        assert ckpttool.digest(files[0]) == ckpttool.digest(str(files[0])) == ckpttool.digest(checkpoint)
    assert before == ckpttool.digest(tmp_path / "plain.safetensors") != ckpttool.digest(files[1])
    assert len(before) == 64


def test_diff_returns_what_differs(files: Pair) -> None:
    found = ckpttool.diff(*files, ignore_prefix=True)
    (change,) = found.changed
    assert (found.same, found.only_a, found.only_b, change.name) == (False, (), (), "module.w")
    assert change.norms is not None
    assert change.norms.difference == 0.5
    assert ckpttool.diff(*files, ignore_prefix=True, atol=0.5).same
    assert dataclasses.is_dataclass(found)


def test_verify_returns_what_was_read(files: Pair) -> None:
    assert ckpttool.verify(files[0]).ok
    found = ckpttool.verify(files[1], against=files[1])
    assert (found.ok, found.compared) == (True, "state")
    assert not ckpttool.verify(files[0], against=files[1]).ok


def test_the_mean_of_paths_is_computed_when_it_is_saved(tmp_path: Path) -> None:
    for value in (1.0, 4.0):
        torch.save({"w": torch.full((3,), value)}, tmp_path / f"{value}.pt")
    mean, averaged = ckpttool.average([tmp_path / "1.0.pt", str(tmp_path / "4.0.pt")])
    ckpttool.save(mean, tmp_path / "mean.pt")
    assert torch.load(tmp_path / "mean.pt")["w"].tolist() == [2.5] * 3
    assert (averaged.files, averaged.averaged) == (2, ("w",))


def test_doctor_and_reload_take_paths_and_checkpoints(files: Pair) -> None:
    model: Any = torch.nn.ParameterDict({"w": torch.zeros(6), "b": torch.zeros(2)})
    assert not ckpttool.doctor(files[0], model).loads
    with ckpttool.open(files[0]) as checkpoint:
        found = ckpttool.doctor(checkpoint, model)
        assert [problem.kind for problem in found.problems] == ["prefix", "reload"]
        assert ckpttool.reload(checkpoint, model).prefix == "module."
        assert ckpttool.digest(checkpoint)  # still open
    assert model["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_path_is_closed_and_a_checkpoint_stays_open(files: Pair) -> None:
    before = open_files()
    ckpttool.digest(files[0])
    ckpttool.diff(*files)
    ckpttool.verify(files[0], against=files[1])
    assert not open_files() - before
    with ckpttool.open(files[0]) as checkpoint:
        ckpttool.verify(checkpoint)
        assert ckpttool.diff(checkpoint, checkpoint).same


def test_what_is_neither_a_path_nor_a_checkpoint_is_a_type_error() -> None:
    given: Any = {"w": torch.ones(1)}
    for check in (ckpttool.digest, ckpttool.verify):
        with pytest.raises(TypeError, match="takes a path or an open checkpoint, not dict"):
            check(given)
    with pytest.raises(TypeError, match=r"ckpttool.average\(\[a, b\]\)"):
        ckpttool.average("a.pt")  # type: ignore[arg-type]


def test_errors_are_those_of_opening(files: Pair, tmp_path: Path) -> None:
    with pytest.raises(Unreadable):
        ckpttool.digest(tmp_path / "none.pt")
    with pytest.raises(NoState):
        ckpttool.digest(files[0], state="ema")
    with pytest.raises(UsageFault, match="a tolerance is a number from 0 on"):
        ckpttool.diff(*files, rtol=float("nan"))


# Names of very many dots, and very many keys that look alike.

DOTS = 60_000
LONG = "a." * DOTS + "w"
ONE_VALUE = torch.ones(2)


def deep() -> OrderedDict[str, torch.Tensor]:
    state = OrderedDict({LONG: ONE_VALUE, "x": ONE_VALUE})
    state._metadata = OrderedDict({"": {"version": 1}, LONG[:-2]: {"version": 1}})  # type: ignore[attr-defined]
    return state


OPTIMIZER = {"state": {0: {"exp_avg": ONE_VALUE}}, "param_groups": [{"params": [0], "param_names": [LONG]}]}
ALIKE = {"model": {"w": ONE_VALUE}, "epoch": 1, "seen": {10**100 + i: torch.ones(1) for i in range(6000)}}


def strip_everywhere(found: Any, out: Path) -> object:
    return ckpttool.strip_prefix(found, "a.b.", repeat=True, anywhere=True)


def name_optimizer(found: Any, out: Path) -> object:
    return to_names(found, parameters={"w": (2,)})


WORK: dict[str, tuple[Any, Callable[[Any, Path], object]]] = {
    "compare": (deep(), lambda found, out: ckpttool.diff(found, ckpttool.add_prefix(found, "b.")[0])),
    "strip": (deep(), lambda found, out: ckpttool.strip_prefix(found, "a.")),
    "strip everywhere": ({"a." * 20_000 + "b." * 20_000 + "w": ONE_VALUE, "x": ONE_VALUE}, strip_everywhere),
    "optimizer": ({"model": {LONG: ONE_VALUE}, "o": OPTIMIZER}, name_optimizer),
    "alike keys": (ALIKE, lambda found, out: ckpttool.diff(found, found)),
    "alike names in a file": (ALIKE, lambda found, out: ckpttool.save(found, out, full=True)),
}


@pytest.mark.covered(lambda what: what == "alike keys")
@pytest.mark.parametrize("what", WORK)
def test_long_and_repeated_names_take_time_in_proportion(what: str, tmp_path: Path) -> None:
    tree, work = WORK[what]
    checkpoint = opened(tree, tmp_path)
    with within(5, time.process_time), suppress(CkptToolError):
        work(checkpoint, tmp_path / "out.safetensors")
