"""SLERP, task arithmetic, TIES and DARE: each formula, written again for whole tensors, and mergekit's."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Refused, UsageFault
from ckpttool.transforms.average import Averaged, average
from ckpttool.transforms.merging.aligned import BLOCK
from ckpttool.transforms.merging.methods import Kept
from tests.support.running import MOST, peak
from tests.support.trees import big_endian

nan, inf = float("nan"), float("inf")
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
    chosen = iter(Kept(f"0\0w\0{number}", density).mask(0, np.empty(4200)) for number in range(3))
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
    monkeypatch.setattr(import_module("ckpttool.transforms.merging.methods"), "SORTED", 10)
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
