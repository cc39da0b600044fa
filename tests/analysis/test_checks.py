"""The functions of the library: what they take and return, and in what time on very many and long names."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.errors import CkptToolError, NoState, Unreadable, UsageFault
from ckpttool.transforms.optimizer.rekey import to_names
from tests.support.running import open_files, within
from tests.support.saved import opened

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
ONE = torch.ones(2)


def deep() -> OrderedDict[str, torch.Tensor]:
    state = OrderedDict({LONG: ONE, "x": ONE})
    state._metadata = OrderedDict({"": {"version": 1}, LONG[:-2]: {"version": 1}})  # type: ignore[attr-defined]
    return state


OPTIMIZER = {"state": {0: {"exp_avg": ONE}}, "param_groups": [{"params": [0], "param_names": [LONG]}]}
ALIKE = {"model": {"w": ONE}, "epoch": 1, "seen": {10**100 + i: torch.ones(1) for i in range(6000)}}


def strip_everywhere(found: Any, out: Path) -> object:
    return ckpttool.strip_prefix(found, "a.b.", repeat=True, anywhere=True)


def name_optimizer(found: Any, out: Path) -> object:
    return to_names(found, parameters={"w": (2,)})


WORK: dict[str, tuple[Any, Callable[[Any, Path], object]]] = {
    "compare": (deep(), lambda found, out: ckpttool.diff(found, ckpttool.add_prefix(found, "b.")[0])),
    "strip": (deep(), lambda found, out: ckpttool.strip_prefix(found, "a.")),
    "strip everywhere": ({"a." * 20_000 + "b." * 20_000 + "w": ONE, "x": ONE}, strip_everywhere),
    "optimizer": ({"model": {LONG: ONE}, "o": OPTIMIZER}, name_optimizer),
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
