"""The exact mean of checkpoints, rounded once; SLERP, task arithmetic, TIES and DARE by their formulas."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.averaging.average import Averaged, average
from ckpttool.averaging.mean import mean
from ckpttool.averaging.methods import BLOCK, RandomMask
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.errors import Refused, UsageFault
from tests.support import comparing
from tests.support.running import MOST, peak
from tests.support.trees import big_endian

# ---- The mean of checkpoints: every number is the exact mean, rounded once ----------------------------


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
    monkeypatch.setattr(import_module("ckpttool.averaging.mean"), "mean", counted)
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
    module = import_module("ckpttool.averaging.mean")
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


# ---- SLERP, task arithmetic, TIES and DARE: each formula, written again for whole tensors, and mergekit's


Tensors = dict[str, torch.Tensor]
METHODS = ("slerp", "task", "ties", "dare")


def merged(
    folder: Path, method: str, base: Tensors | None, *files: Tensors, **given: Any
) -> tuple[Tensors, Averaged]:
    """Save models with torch, merge them and return what torch loads."""
    names = []
    for number, state in enumerate((*files, *([] if base is None else [base]))):
        torch.save(state, folder / f"{number}.pt")
        names.append(folder / f"{number}.pt")
    last = None if base is None else names.pop()
    new, done = average(names, method=method, base=last, **given)
    ckpttool.save(new, folder / "out.pt", state="", force=True, verify=True)
    return torch.load(folder / "out.pt", weights_only=True), done


def one(folder: Path, method: str, base: torch.Tensor, *others: torch.Tensor, **given: Any) -> torch.Tensor:
    """Merge models of one tensor."""
    return merged(folder, method, {"w": base}, *({"w": each} for each in others), **given)[0]["w"]


def models(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return a base, and models that learnt a little."""
    generator = torch.Generator().manual_seed(len(shape) + count)
    base = torch.randn(shape, generator=generator)
    steps = [torch.randn(shape, generator=generator) / 10 for _ in range(count)]
    return [base.to(dtype), *((base + step).to(dtype) for step in steps)]


# The formulas, for whole tensors of float64.


def slerp(t: float, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    if abs(cosine) > 0.9995:
        return (1 - t) * a + t * b
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


def task(base: np.ndarray, others: list[np.ndarray], weights: list[float], scale: float) -> np.ndarray:
    return base + scale * sum(w * (each - base) for w, each in zip(weights, others, strict=True))


def ties(
    base: np.ndarray, others: list[np.ndarray], weights: list[float], scale: float, density: float
) -> np.ndarray:
    left = []
    for each, weight in zip(others, weights, strict=True):
        difference = (each - base).ravel()
        kept = np.argsort(-np.abs(difference), kind="stable")[: max(1, int(density * difference.size))]
        trimmed = np.zeros_like(difference)
        trimmed[kept] = difference[kept]
        left.append(weight * trimmed.reshape(base.shape))
    sign = np.where(sum(left) >= 0, 1, -1)
    agree = [np.sign(each) == sign for each in left]
    total = sum(each * yes for each, yes in zip(left, agree, strict=True))
    by = sum(weight * yes for weight, yes in zip(weights, agree, strict=True))
    return base + scale * total / np.where(by == 0, 1, by)


def close(found: torch.Tensor, exact: np.ndarray) -> bool:
    """Return whether each number is the nearest one of its type."""
    wanted, values = torch.from_numpy(np.asarray(exact)).to(found.dtype), torch.from_numpy(np.asarray(exact))
    ends = [wanted.nextafter(torch.full_like(wanted, end)) for end in (inf, -inf)]
    step = torch.maximum(*((end - wanted).abs().double() for end in ends))
    return bool(((found.double() - values).abs() <= 0.501 * step).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (7,), (300, 500)], ids=str)
def test_each_method_is_its_formula_rounded_once(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    base, a, b = models(2, *shape, dtype=dtype)
    exact = [each.double().numpy() for each in (base, a, b)]
    assert close(one(tmp_path, "slerp", a, b, t=0.3), slerp(0.3, exact[1], exact[2]))
    found = one(tmp_path, "task", base, a, b, weights=[0.5, -2], scale=0.7)
    assert close(found, task(exact[0], exact[1:], [0.5, -2], 0.7))
    found = one(tmp_path, "ties", base, a, b, weights=[1, 2], scale=0.9, density=0.3)
    assert close(found, ties(exact[0], exact[1:], [1, 2], 0.9, 0.3))


@pytest.fixture
def mergekit() -> Any:
    return pytest.importorskip("mergekit.merge_methods.registry", reason="mergekit is not installed")


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("case", ["far", "parallel", "opposite", "zero", "zeros"])
def test_slerp_is_mergekit_s(case: str, t: float, mergekit: Any, tmp_path: Path) -> None:
    a, b = torch.randn(2, 40, 50, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(40, 50)
    a, b = {
        "far": (a, b),
        "parallel": (a, a + b / 1000),
        "opposite": (a, -2 * a),
        "zero": (zeros, b),
        "zeros": (zeros, zeros),
    }[case]
    theirs = import_module("mergekit.merge_methods.slerp").slerp
    found = one(tmp_path, "slerp", a, b, t=t)
    torch.testing.assert_close(found, theirs(torch.tensor([t]), a[None], b[None])[0])


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, 2.0, -1.0], [0.0, 1.0, 0.0]])
@pytest.mark.parametrize("density", [0.01, 0.4, 1.0])
@pytest.mark.parametrize("method", ["task", "ties", "dare"])
def test_what_is_added_to_the_base_is_mergekit_s(
    method: str,
    density: float,
    weights: list[float],
    mergekit: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the random choice of ours, as torch's is another."""
    base, *others = models(3, 60, 70, dtype=torch.float64)
    entries = [SimpleNamespace(id=number, tensor=each) for number, each in enumerate(others)]
    group = SimpleNamespace(base=SimpleNamespace(tensor=base), non_base=entries)
    theirs = mergekit.get({"task": "task_arithmetic", "dare": "dare_linear"}.get(method, method))
    chosen = iter(RandomMask(f"0\0w\0{number}", density).mask(0, np.empty(4200)) for number in range(3))
    monkeypatch.setattr(
        torch, "bernoulli", lambda like: torch.from_numpy(next(chosen)).reshape(like.shape).to(like.dtype)
    )
    given = {"weight": dict(enumerate(weights)), "density": dict.fromkeys(range(3), density), "lambda": 0.8}
    more = {"normalize": theirs.default_normalize, "rescale": theirs.default_rescale, "int8_mask": False}
    wanted = theirs.merge_group(group, **given, **more)
    kept = {} if method == "task" else {"density": density}
    found = one(tmp_path, method, base, *others, weights=weights, scale=0.8, **kept)
    exact = {} if method != "dare" else {"rtol": 1e-6, "atol": 1e-7}  # whose masks are of float32
    torch.testing.assert_close(found, wanted, **exact)


# DARE, whose choice is random.


def test_dare_keeps_the_share_that_is_asked_for_and_the_sum_of_magnitudes(tmp_path: Path) -> None:
    base, other = models(1, 300, 500, dtype=torch.float64)
    change = one(tmp_path, "dare", base, other, density=0.25) - base
    kept, learnt = change != 0, other - base
    assert abs(kept.double().mean() - 0.25) < 0.005
    factor = learnt.abs().sum() / learnt[kept].abs().sum()
    torch.testing.assert_close(change[kept], learnt[kept] * factor)
    assert abs(factor - 4) < 0.1
    rows = kept.double().mean(dim=1)
    assert rows.std() < 2 * math.sqrt(0.25 * 0.75 / 500), "neighbours depend on each other"


def test_dare_drops_others_for_each_model_name_and_seed_and_the_same_again(tmp_path: Path) -> None:
    base = torch.zeros(1000, dtype=torch.float64)
    learnt = {"a": torch.ones(1000).double(), "b": torch.ones(1000).double()}

    def kept(seed: int, *others: Tensors) -> list[torch.Tensor]:
        state = dict.fromkeys("ab", base)
        found, _ = merged(tmp_path, "dare", state, *others, density=0.5, seed=seed)
        return [each != 0 for each in found.values()]

    a, b = kept(1, learnt)
    second = kept(1, dict.fromkeys("ab", base), learnt)[0]
    for other in (b, second, kept(2, learnt)[0]):
        assert 400 < int((a == other).sum()) < 600
    assert torch.equal(a, kept(1, learnt)[0])


@pytest.mark.parametrize("method", METHODS)
def test_results_do_not_depend_on_stretches_threads_or_the_format(method: str, tmp_path: Path) -> None:
    base, a, b = models(2, 3, BLOCK + 37)
    given: dict[str, Any] = {"density": 0.3} if method in ("ties", "dare") else {}
    files = [a] if method == "slerp" else [a, b]
    whole = one(tmp_path, method, base, *files, **given).reshape(-1)
    new, _ = average(
        [tmp_path / f"{n}.pt" for n in range(len(files))],
        method=method,
        base=tmp_path / f"{len(files)}.pt",
        **given,
    )
    data = new.state("").tensors["w"].storage.data
    for start, count in ((0, 4), (4 * BLOCK - 4, 8), (4 * BLOCK + 400, 400_000), (data.nbytes - 4, 4)):
        piece = b"".join(map(bytes, data.make(start, count)))  # type: ignore[union-attr]
        assert piece == whole.numpy().tobytes()[start : start + count]
    ckpttool.save(new, tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"].reshape(-1), whole)


# Neighbours.


@pytest.mark.parametrize("method", ["task", "ties", "dare"])
def test_a_model_that_learnt_nothing_leaves_the_base_bit_for_bit(method: str, tmp_path: Path) -> None:
    base = torch.tensor([1.0, -0.0, 0.0, inf, -inf, 1e-45, 3e38])
    given = {} if method == "task" else {"density": 0.5}
    found = one(tmp_path, method, base, base, base, **given)
    assert found.numpy().tobytes() == base.numpy().tobytes()


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_density_0_leaves_the_base_and_density_1_all(method: str, tmp_path: Path) -> None:
    base, other = models(1, 40)
    assert torch.equal(one(tmp_path, method, base, other, density=0.0), base)
    assert torch.equal(one(tmp_path, method, base, other, density=1.0), other)
    assert torch.equal(one(tmp_path, method, base, other), other), "1 is the default"


def test_numbers_that_are_none_stay_where_they_are(tmp_path: Path) -> None:
    base, other = torch.zeros(100), torch.ones(100)
    other[3], other[5], base[7] = nan, inf, nan
    for method, given in {"task": {}, "ties": {"density": 0.5}, "dare": {"density": 0.5}}.items():
        found = one(tmp_path, method, base, other, **given)
        assert torch.equal(found.isnan().nonzero().flatten()[:1], torch.tensor([3]))
        assert not found[5].isfinite() and found[7].isnan()
        assert int(found.isfinite().sum()) == 97, method
    found, done = merged(tmp_path, "slerp", {"w": base}, {"w": other})
    assert (int(found["w"].isfinite().sum()), done.parallel) == (97, ["w"])


def test_equal_magnitudes_are_kept_from_the_first_on(tmp_path: Path) -> None:
    base = torch.zeros(3, BLOCK)
    other = torch.ones(3, BLOCK)
    other[1:, ::2] = -1
    found = one(tmp_path, "ties", base, other, density=0.5).reshape(-1)
    assert torch.equal(found[: 3 * BLOCK // 2], other.reshape(-1)[: 3 * BLOCK // 2])
    assert not found[3 * BLOCK // 2 :].any()


def test_a_large_tensor_is_trimmed_as_a_small_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("ckpttool.averaging.methods"), "SORTED", 10)
    for dtype in (torch.float32, torch.bfloat16):
        base, a, b = models(2, 400, 300, dtype=dtype)
        exact = [each.double().numpy() for each in (base, a, b)]
        found = one(tmp_path, "ties", base, a, b, density=0.2)
        assert close(found, ties(exact[0], exact[1:], [1, 1], 1, 0.2))


def test_what_is_no_float_is_taken_from_the_last_file_and_ties_layouts_and_empty_ones_stay(
    tmp_path: Path,
) -> None:
    base, a, b = models(2, 30, 20)
    states = [
        {
            "w": each,
            "tied": each,
            "n": torch.tensor(n),
            "turned": each.t(),
            "none": each[:0],
            "z": each[0] * 1j,
        }
        for n, each in enumerate((base, a, b))
    ]
    found, done = merged(tmp_path, "ties", *states, density=0.5)
    exact = [each.double().numpy() for each in (base, a, b)]
    assert close(
        found["turned"].t().contiguous(), ties(exact[0].T, [e.T for e in exact[1:]], [1, 1], 1, 0.5).T
    )
    assert found["w"].data_ptr() == found["tied"].data_ptr() and found["none"].shape == (0, 20)
    assert (found["n"].item(), done.taken, done.method, done.files) == (2, ("n",), "ties", 2)
    assert found["z"].dtype == torch.complex64 and not found["z"].real.any()


def test_files_of_a_big_endian_machine_are_merged(tmp_path: Path) -> None:
    values = torch.arange(6.0).reshape(2, 3)
    paths = [big_endian(values * n, tmp_path / f"{n}.pt") for n in (1, 3)]
    for method, given in {"linear": {}, "slerp": {}, "task": {"base": paths[0]}}.items():
        new, _ = average(paths if "base" not in given else paths[1:], method=method, **given)
        ckpttool.save(new, tmp_path / "out.pt", force=True, verify=True)
        found = next(iter(ckpttool.open(tmp_path / "out.pt").state().tensors.values())).numpy()
        assert np.array_equal(found, values.numpy() * (3 if method == "task" else 2)), method


def test_what_becomes_infinite_or_nan_is_counted(tmp_path: Path) -> None:
    base, other = torch.zeros(4).half(), torch.tensor([1, 6e4, inf, -6e4]).half()
    found, done = merged(tmp_path, "task", {"w": base}, {"w": other}, scale=2.0)
    assert found["w"].tolist() == [2, inf, inf, -inf]
    assert (done.casting.overflows, done.casting.nans) == (2, 0)
    far = torch.tensor([1.7e308], dtype=torch.float64)  # the difference is infinite
    _, done = merged(tmp_path, "task", {"w": -far}, {"w": far}, scale=0.0)
    assert (done.casting.overflows, done.casting.nans) == (0, 1)


WRONG: dict[str, tuple[int, dict[str, Any], str]] = {
    "another method": (2, {"method": "magic"}, "no method 'magic'"),
    "three for slerp": (3, {"method": "slerp"}, "3 are given"),
    "one for slerp": (1, {"method": "slerp"}, "1 are given"),
    "no base": (2, {"method": "ties"}, "none is given"),
    "nothing beside the base": (0, {"method": "task", "base": "0.pt"}, "needs a file"),
    "t beyond": (2, {"method": "slerp", "t": 1.5}, "--t 1.5"),
    "no density": (1, {"method": "ties", "base": "0.pt", "density": nan}, "--density nan"),
    "infinite weights": (1, {"method": "task", "base": "0.pt", "weights": [inf]}, "must be finite"),
    "weights that are all 0": (2, {"method": "ties", "base": "0.pt", "weights": [0, 0]}, "must not all be 0"),
    "too few weights": (2, {"method": "task", "base": "0.pt", "weights": [1]}, "1 weights for 2 files"),
    "lambda of a mean": (2, {"scale": 1.0}, "--lambda has no effect on linear"),
    "a base of a mean": (2, {"base": "0.pt"}, "--base has no effect on linear"),
    "weights of slerp": (2, {"method": "slerp", "weights": [1, 1]}, "--weights has no effect on slerp"),
    "a seed of ties": (2, {"method": "ties", "base": "0.pt", "seed": 1}, "--seed has no effect on ties"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_without_sense_are_refused_by_name(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    count, given, said = WRONG[case]
    for number in range(3):
        torch.save({"w": torch.ones(2)}, f"{number}.pt")
    with pytest.raises(UsageFault, match=said):
        average([f"{number}.pt" for number in range(count)], **given)


@pytest.mark.parametrize("other", [{"v": torch.ones(2)}, {"w": torch.ones(3)}, {"w": torch.ones(2).half()}])
def test_a_base_of_another_structure_is_refused(other: Tensors, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"has no '|'w' is float"):
        merged(tmp_path, "task", other, {"w": torch.ones(2)})


@pytest.mark.long
@pytest.mark.covered(lambda method: method == "slerp")
@pytest.mark.parametrize("method", ["slerp", "ties"])
def test_memory_stays_flat(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "a"):
        save_file({"w": torch.randn(12 << 20)}, tmp_path / f"{name}.safetensors")
    given = "--density 0.2" if method == "ties" else ""
    command = f"average a.safetensors out.safetensors --method {method} --base base.safetensors {given}"
    assert peak(*command.split()) < MOST


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_names_that_the_inputs_tie_stay_tied_where_the_base_has_equal_copies(
    tmp_path: Path, method: str
) -> None:
    head = torch.randn(20, 8)
    torch.save({"head": head, "tied": head.clone()}, tmp_path / "base.pt")
    for name in ("a", "b"):
        tuned = head + torch.randn(20, 8)
        torch.save({"head": tuned, "tied": tuned}, tmp_path / f"{name}.pt")
    files = [tmp_path / "a.pt", tmp_path / "b.pt"]
    with ckpttool.open(files[-1]):
        merged, _ = ckpttool.average(files, method=method, base=tmp_path / "base.pt", density=0.5)
        ckpttool.save(merged, tmp_path / "o.pt")
    out = torch.load(tmp_path / "o.pt")
    assert out["head"].data_ptr() == out["tied"].data_ptr()
