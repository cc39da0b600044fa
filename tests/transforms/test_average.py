"""The mean of checkpoints: every number is the exact mean, rounded once."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Refused, UsageFault
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.transforms.average import average
from ckpttool.transforms.mean import mean
from tests.support import comparing

nan, inf = float("nan"), float("inf")
TYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


def meant(values: list[torch.Tensor], weights: list[float] | None = None) -> torch.Tensor:
    dtype = DTYPES[str(values[0].dtype).removeprefix("torch.")]
    raw = mean([memoryview(comparing.values(v)) for v in values], weights or [1.0] * len(values), dtype)
    return torch.frombuffer(bytearray(raw), dtype=values[0].dtype)


def nearest(exact: Fraction, dtype: torch.dtype) -> float:
    """Return the number of a type nearest to a fraction, even at ties, by comparing neighbours."""
    near = torch.tensor(float(exact), dtype=torch.float64).to(dtype)
    up, down = near.nextafter(torch.tensor(inf, dtype=dtype)), near.nextafter(torch.tensor(-inf, dtype=dtype))
    candidates = [x for x in (down, near, up) if math.isfinite(float(x))]

    def key(x: torch.Tensor) -> tuple[Fraction, int]:
        bits = x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])
        return abs(Fraction(float(x)) - exact), int(bits) & 1

    return float(min(candidates, key=key))


def assert_nearest(name: str, rows: list[list[float]], weights: list[float] | None = None) -> None:
    """Compare the means of rows, number by number, with exact ones."""
    dtype, given = TYPES[name], [*map(Fraction, weights or [1.0] * len(rows))]
    found = meant([torch.tensor(row, dtype=torch.float64).to(dtype) for row in rows], weights)
    for values, value in zip(zip(*rows, strict=True), found.tolist(), strict=True):
        exact = sum((w * Fraction(v) for w, v in zip(given, values, strict=True)), Fraction())
        assert value == nearest(exact / sum(given), dtype), values


def drawn(dtype: torch.dtype, chosen: random.Random, spread: int) -> float:
    value = chosen.choice([0, *[chosen.uniform(-1, 1)] * 9]) * 2.0 ** -chosen.randint(0, 2 * spread)
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("count", [2, 3, 5, 7])
@pytest.mark.parametrize("spread", [0, 2, 20])
def test_each_number_is_the_nearest_to_the_exact_mean(name: str, count: int, spread: int) -> None:
    chosen = random.Random(count)
    assert_nearest(name, [[drawn(TYPES[name], chosen, spread) for _ in range(100)] for _ in range(count)])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1.0, 0.0, 3.0], [1e-20, 1.0, 7.0]])
def test_weights_are_taken_exactly_as_they_are_written(name: str, weights: list[float]) -> None:
    chosen = random.Random(1)
    assert_nearest(name, [[drawn(TYPES[name], chosen, 3) for _ in range(100)] for _ in range(3)], weights)


@pytest.mark.parametrize("name", TYPES)
def test_many_numbers_are_averaged_as_each_would_be_alone(name: str) -> None:
    """Ties, zeros, infinities and NaN stand among numbers that need no care."""
    dtype = TYPES[name]
    rows = [torch.randn(100_000, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3)]
    for row, *odd in zip(rows, [1.0] * 3, [-0.0] * 3, [inf, 1.0, 2.0], [nan, 1.0, 1.0], strict=True):
        row[70_000:70_004] = torch.tensor(odd)
    for weights in (None, [0.5, 0.3, 0.2], [0.0, 2.0, 1.0]):
        found = meant(rows, weights)
        places = [*range(0, 100_000, 997), *range(69_999, 70_005)]
        alone = torch.cat([meant([row[i : i + 1] for row in rows], weights) for i in places])
        assert torch.equal(found[places].view(torch.uint8), alone.view(torch.uint8))


def rounded(name: str, values: list[float]) -> list[list[float]]:
    """Return numbers as a type holds them, each a row of its own."""
    return [[value] for value in torch.tensor(values, dtype=torch.float64).to(TYPES[name]).tolist()]


def test_ties_round_to_even_and_near_ties_do_not() -> None:
    one, up = 1.0, 1.0 + 2.0**-7  # neighbours in bfloat16
    found = meant([torch.tensor([one, up], dtype=torch.bfloat16), torch.tensor([up, up + 2**-7]).bfloat16()])
    assert found.tolist() == [1.0, 1.0 + 2.0**-6]
    assert_nearest("float32", rounded("float32", [1.0, 1.0 + 2.0**-22, 1.0 + 2.0**-23 - 2.0**-24]))
    smalls = [(x, 0.0) for x in (0.0, 2.0**-24, 2.0**-40, 2.0**-60)] + [(2.0**-35 + 2.0**-58, -(2.0**-35))]
    for name, step in (("float32", 2.0**-22), ("bfloat16", 2.0**-6), ("float16", 2.0**-9)):
        for small in smalls:
            assert_nearest(name, rounded(name, [4.0, step, *small]))
    tiny = [torch.tensor([1.0, 2.0**-60], dtype=torch.float64), torch.tensor([1.0 + 2**-52, -(2.0**-60)])]
    assert meant([tiny[0], tiny[1].to(torch.float64)]).tolist()[1] == 0


@pytest.mark.parametrize(
    "name, row, weights",
    [
        ("float32", [2.0**30, 1 + 2.0**-23, -(2.0**30), -1 - 2.0**-23], None),
        ("float32", [2.0**60, 3, -(2.0**60), -3], None),
        ("float32", [1e38, 1e20, 1, -1e38, -1e20], None),
        ("bfloat16", [2.0**60, 3, -(2.0**60), -3], None),
        ("float64", [1e16, 1.0, -1e16], None),
        ("float64", [0.7, 0.9, -0.7, -0.9], None),
        ("float64", [1e26, 0.3, -1e26, -0.1, 1e-9], None),
        ("float64", [-0.5356693863868713, 0.25048819184303284, 0.14259059727191925], [0.1, 0.1, 0.2]),
    ],
)
def test_numbers_that_nearly_cancel_leave_the_remainder(name: str, row: list[float], weights: Any) -> None:
    assert_nearest(name, rounded(name, row), weights)


def test_the_largest_and_smallest_doubles_are_averaged() -> None:
    largest, smallest = 1.7976931348623157e308, 5e-324
    rows = [[largest, smallest, largest, 3e-310], [largest, smallest, -largest, 5e-310]]
    found = meant([torch.tensor(row, dtype=torch.float64) for row in rows])
    assert found.tolist() == [largest, smallest, 0.0, 4e-310]


@pytest.mark.parametrize("name", TYPES)
def test_infinities_nan_and_zeros_keep_their_meaning(name: str) -> None:
    rows = [[inf, inf, nan, -0.0, -0.0, 1.0], [inf, -inf, 1.0, -0.0, 0.0, inf]]
    found = meant([torch.tensor(row, dtype=TYPES[name]) for row in rows]).tolist()
    assert list(map(repr, found)) == ["inf", "nan", "nan", "-0.0", "0.0", "inf"]


# Whole checkpoints.


def averaged(folder: Path, *trees: Any, to: str = "out.pt", **given: Any) -> Any:
    for index, tree in enumerate(trees):
        torch.save(tree, folder / f"{index}.pt")
    new, done = average([ckpttool.open(folder / f"{i}.pt") for i in range(len(trees))], **given)
    ckpttool.save(new, folder / to, state="", force=True, verify=True)
    return torch.load(folder / to, weights_only=True) if to.endswith(".pt") else load_file(folder / to), done


def test_only_the_state_is_averaged_and_counters_come_from_the_last_file(tmp_path: Path) -> None:
    def tree(i: int) -> Any:
        state = {"w": torch.full((2, 3), float(i)), "n": torch.tensor(2**53 + i), "m": torch.tensor([True])}
        return {"model": state, "epoch": i}

    found, done = averaged(tmp_path, *map(tree, (1, 2, 6)))
    assert set(found) == {"w", "n", "m"}
    assert torch.equal(found["w"], torch.full((2, 3), 3.0))
    assert found["n"].item() == 2**53 + 6 and found["n"].dtype is torch.int64
    assert (done.files, done.averaged, done.kept, done.taken) == (3, ("w",), ("m",), ("n",))


def test_entries_that_are_no_tensors_come_from_the_last_file_and_those_that_differ_are_named(
    tmp_path: Path,
) -> None:
    def tree(scale: float) -> Any:
        same = {"n": 3, "shape": (1, 2), "z": 1j}
        return {"w": torch.ones(2), "scale": scale, "nested": [torch.tensor(scale)], **same}

    found, done = averaged(tmp_path, tree(0.5), tree(0.5), tree(0.25))
    assert (found["scale"], found["nested"][0].item(), found["n"]) == (0.25, 0.25, 3)
    assert set(done.taken) == {"scale", "nested"}
    assert averaged(tmp_path, tree(-0.0), tree(0.0))[1].taken[0] == "scale"


def test_a_number_in_the_place_of_a_tensor_is_refused(tmp_path: Path) -> None:
    trees = {"w": torch.ones(2), "n": torch.tensor(3)}, {"w": torch.ones(2), "n": 3}
    for pair in (trees, trees[::-1]):
        with pytest.raises(Refused, match="'n'"):
            averaged(tmp_path, *pair)


def test_an_average_of_a_file_with_itself_is_the_file_and_ties_stay_if_every_file_has_them(
    tmp_path: Path,
) -> None:
    base = torch.randn(300, 300)
    state = {"w": base, "tied": base, "turned": torch.randn(30, 70).t()}
    state |= {"half": base.bfloat16(), "z": base[0] * 1j}
    found, _ = averaged(tmp_path, state, state, state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert found["w"].data_ptr() == found["tied"].data_ptr()
    base = torch.ones(4)
    found, _ = averaged(tmp_path, {"a": base, "b": base}, {"a": base, "b": base * 3})
    assert (found["a"][0].item(), found["b"][0].item()) == (1.0, 2.0)


@pytest.mark.parametrize("to", ["out.pt", "out.safetensors"])
def test_layouts_may_differ_from_file_to_file(to: str, tmp_path: Path) -> None:
    a, b = torch.randn(400, 500), torch.randn(500, 400)
    found, _ = averaged(tmp_path, {"w": a}, {"w": b.t()}, to=to)
    assert torch.equal(found["w"], ((a.double() + b.t().double()) / 2).float())


def test_the_mean_agrees_with_torch_averaged_model_and_running_statistics_are_listed(tmp_path: Path) -> None:
    from torch.optim.swa_utils import AveragedModel

    nets = [torch.nn.Linear(20, 20) for _ in range(4)]
    swa = AveragedModel(nets[0])
    for net in nets:
        swa.update_parameters(net)
    found, _ = averaged(tmp_path, *(net.state_dict() for net in nets))
    for name, tensor in swa.module.state_dict().items():
        torch.testing.assert_close(found[name], tensor)
    state = torch.nn.BatchNorm1d(3).state_dict()
    assert averaged(tmp_path, state, state)[1].statistics == ("running_mean", "running_var")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"v": torch.ones(2)}, "has no"),
        ({"w": torch.ones(2), "v": torch.ones(2)}, "has no 'v'"),
        ({"w": torch.ones(3)}, r"'w' is float32 \[2\], and float32 \[3\]"),
        ({"w": torch.ones(2).half()}, r"'w' is float32 \[2\], and float16 \[2\]"),
        ({"w": torch.ones(2), "t": 0.5}, "has no 't'"),
    ],
)
def test_another_structure_is_refused(other: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=said) as caught:
        averaged(tmp_path, {"w": torch.ones(2)}, other)
    assert str(caught.value.hint).startswith("ckpttool diff --model-only ")


def test_types_without_a_mean_and_malformed_weights_are_refused(tmp_path: Path) -> None:
    eight = {"w": torch.ones(2).to(torch.float8_e4m3fn)}
    with pytest.raises(Refused, match="float8_e4m3fn, which can't be averaged"):
        averaged(tmp_path, eight, eight)
    state = {"w": torch.ones(2)}
    for weights in ([1.0], [0.0, 0.0], [1.0, -1.0], [nan, 1.0], [inf, 1.0]):
        with pytest.raises(UsageFault, match="weights"):
            averaged(tmp_path, state, state, weights=weights)
    with pytest.raises(UsageFault, match="two files"):
        averaged(tmp_path, state)


def test_files_of_other_formats_are_averaged_together(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    save_file({"w": torch.zeros(2)}, tmp_path / "b.safetensors")
    new, _ = average([ckpttool.open(tmp_path / "a.pt"), ckpttool.open(tmp_path / "b.safetensors")])
    ckpttool.save(new, tmp_path / "c.safetensors")
    assert load_file(tmp_path / "c.safetensors")["w"].tolist() == [0.5, 0.5]


@pytest.mark.long
def test_many_small_tensors_are_averaged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Mock(wraps=mean)
    monkeypatch.setattr(import_module("ckpttool.transforms.mean_tensors"), "mean", counted)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
    files = [
        {f"{i}": torch.full((i % 5, 3), i % 100 + 2.0 * turn, dtype=dtypes[i % 4]) for i in range(2000)}
        for turn in range(2)
    ]
    for turn, state in enumerate(files):
        torch.save(state, tmp_path / f"{turn}.pt")
    for out in ("out.pt", "out.safetensors"):
        new, _ = average([ckpttool.open(tmp_path / f"{turn}.pt") for turn in range(2)])
        counted.reset_mock()
        if out == "out.safetensors":
            new, _ = ckpttool.split_complex(new)
        ckpttool.save(new, tmp_path / out)
        assert 0 < counted.call_count < 20
        loaded = ckpttool.open(tmp_path / out).state().load()
        for i in range(2000):
            found = loaded[f"{i}"] if f"{i}" in loaded else loaded[f"{i}.real"]
            assert found.shape == (i % 5, 3)
            assert bool((found == files[0][f"{i}"] + 1).all()), i


def test_means_do_not_depend_on_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("ckpttool.transforms.mean_tensors")
    generator = torch.Generator().manual_seed(3)
    for turn in range(3):
        state = {f"{i}": torch.randn(i % 7, generator=generator) * 10.0 ** (i % 30) for i in range(200)}
        torch.save(state | {"nan": torch.tensor([nan, 1.0, inf])}, tmp_path / f"{turn}.pt")
    digests = set()
    for batch, small, held in ((1 << 18, 1 << 14, 16), (64, 1 << 14, 1), (1, 0, 1)):
        for name, value in (("BATCH", batch), ("SMALL", small), ("HELD", held)):
            monkeypatch.setattr(module, name, value)
        new, _ = average([ckpttool.open(tmp_path / f"{turn}.pt") for turn in range(3)])
        ckpttool.save(new, tmp_path / "out.safetensors", force=True, verify=True)
        digests.add((tmp_path / "out.safetensors").read_bytes())
    assert len(digests) == 1
