"""Statistics of several ranks pooled, against those of the whole data computed in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckpttool
from ckpttool import batchnorm
from ckpttool.batchnorm.pool_files import PoolReport, pool, pool_states
from ckpttool.errors import NothingToDo, Refused, UsageFault


def ranks_of(batch: torch.Tensor, sizes: tuple[int, ...], **settings: Any) -> list[nn.BatchNorm1d]:
    """Return a layer per rank, after its part of the batch; an empty part leaves the layer as it is."""
    layers = [nn.BatchNorm1d(batch.shape[1], **settings).double() for _ in sizes]
    train(nn.Identity(), layers, batch, sizes)
    return layers


def train(whole: nn.Module, ranks: list[nn.BatchNorm1d], batch: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Pass a batch through one layer, and its parts through those of the ranks that have a part."""
    whole(batch)
    for layer, part in zip(ranks, batch.split(sizes), strict=True):
        if len(part):
            layer(part)


def statistics(layers: list[nn.BatchNorm1d]) -> tuple[list[Any], list[Any]]:
    return [layer.running_mean for layer in layers], [layer.running_var for layer in layers]


@pytest.mark.parametrize("sizes", [(4, 4), (2, 7, 3), (5, 0, 2), (0, 0, 9)], ids=str)
def test_pooled_statistics_are_those_of_the_whole_batch(sizes: tuple[int, ...]) -> None:
    batch = torch.randn(sum(sizes), 3, dtype=torch.float64) * 5 + torch.tensor([0.0, 100.0, -3e4])
    (whole,) = ranks_of(batch, (len(batch),), momentum=1.0)
    pooled = pool(*statistics(ranks_of(batch, sizes, momentum=1.0)), sizes)
    assert torch.allclose(pooled.mean, whole.running_mean, rtol=1e-13)
    assert torch.allclose(pooled.variance, whole.running_var, rtol=1e-11)
    assert pooled.count == len(batch)


def test_positions_count_as_values() -> None:
    batch = torch.randn(6, 2, 4, dtype=torch.float64)
    (whole,) = ranks_of(batch, (6,), momentum=1.0)
    pooled = pool(*statistics(ranks_of(batch, (2, 4), momentum=1.0)), [2 * 4, 4 * 4])
    assert torch.allclose(pooled.variance, whole.running_var, rtol=1e-12)


@given(st.lists(st.lists(st.integers(-1000, 1000), min_size=2, max_size=6), min_size=1, max_size=5))
def test_pooling_agrees_with_exact_arithmetic(parts: list[list[int]]) -> None:
    def exact(values: list[int]) -> tuple[Fraction, Fraction]:
        mean = Fraction(sum(values), len(values))
        return mean, sum((v - mean) ** 2 for v in values) / Fraction(len(values) - 1)

    each = [exact(part) for part in parts]
    mean, variance = exact([value for part in parts for value in part])
    pooled = pool([float(m) for m, _ in each], [float(v) for _, v in each], [len(part) for part in parts])
    assert pooled.mean == pytest.approx(float(mean), rel=1e-12, abs=1e-9)
    assert pooled.variance == pytest.approx(float(variance), rel=1e-12, abs=1e-9)


def test_averages_over_all_batches_weight_a_rank_by_its_batches() -> None:
    """The mean is exact; so is the variance if the ranks' means are equal."""
    torch.manual_seed(0)
    batches = torch.randn(5, 8, 2, dtype=torch.float64)
    batches -= batches.mean(1, keepdim=True)
    layers = [nn.BatchNorm1d(2, momentum=None).double() for _ in range(2)]
    for number, batch in enumerate(batches):
        layers[number % 2](batch)  # three batches for one rank, two for the other
    pooled = pool(*statistics(layers), [8, 8], batches=[3, 2])
    within = batches.var(1, correction=0).mean(0)
    assert torch.allclose(pooled.mean, torch.zeros(2, dtype=torch.float64), atol=1e-15)
    assert torch.allclose(pooled.variance, within * 16 / 15, rtol=1e-12)


@pytest.mark.covered(lambda apart, sizes, momentum: momentum == 0.3)
@pytest.mark.parametrize("momentum", [0.1, 0.3, None, 1.0])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (2, 6), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_with_the_momentum_the_variance_is_that_of_one_process_on_average(sizes, momentum, apart):
    """Over 2,000 channels; each rank's samples may have a mean of their own."""
    torch.manual_seed(0)
    rank_of = torch.tensor([rank for rank, size in enumerate(sizes) for _ in range(size)])
    whole, *ranks = (nn.BatchNorm1d(2000, momentum=momentum).double() for _ in ("whole", *sizes))
    for layer in (whole, *ranks):
        layer.running_var.zero_()  # so that no channel has a past
    for _ in range(40):
        train(whole, ranks, torch.randn(sum(sizes), 2000).double() + apart * rank_of[:, None], sizes)
    batches = [40.0 if size else 0.0 for size in sizes] if momentum is None else None
    given = 0.1 if momentum is None else momentum
    pooled = pool(*statistics(ranks), sizes, batches=batches, momentum=given)
    without = pool(*statistics(ranks), sizes, batches=batches)
    assert torch.allclose(pooled.mean, whole.running_mean, atol=1e-12)
    ratio = pooled.variance.mean() / whole.running_var.mean()
    assert ratio == pytest.approx(1.0, abs=0.01)
    if momentum == 1.0:
        assert torch.equal(pooled.variance, without.variance)
        assert torch.allclose(pooled.variance, whole.running_var, rtol=1e-12)
    else:
        assert without.variance.mean() < 0.95 * whole.running_var.mean()


@pytest.mark.parametrize(("counts", "given", "said"), [
    *(([2, 2], {"momentum": momentum}, "momentum") for momentum in (0.0, 1.5, -0.1, float("nan"))),
    (None, {"momentum": 0.1}, "needs counts"),
    *((counts, {}, "count|two values") for counts in ([0, 0], [1, 0], [-1, 5], [3])),
], ids=str)  # fmt: skip
def test_counts_without_a_variance_and_a_momentum_out_of_range_are_refused(counts, given, said):
    with pytest.raises(ValueError, match=said):
        pool([0.0, 0.0], [1.0, 1.0], counts, **given)


def test_running_averages_have_the_mean_of_one_process_and_a_variance_no_larger() -> None:
    torch.manual_seed(0)
    whole, ranks = nn.BatchNorm1d(3).double(), [nn.BatchNorm1d(3).double() for _ in range(2)]
    for _ in range(20):
        train(whole, ranks, torch.randn(12, 3, dtype=torch.float64), (4, 8))
    pooled = pool(*statistics(ranks), (4, 8))
    assert torch.allclose(pooled.mean, whole.running_mean, rtol=1e-12)
    assert (pooled.variance <= whole.running_var * (1 + 1e-2)).all()


def test_without_counts_ranks_weigh_the_same_and_factors_are_kept() -> None:
    pooled = pool([np.array([0.0]), np.array([2.0])], [np.array([1.0]), np.array([3.0])])
    assert (pooled.mean.item(), pooled.variance.item()) == (1.0, 3.0)  # (1 + 3) / 2 + 1


def test_the_statistics_of_a_rank_without_samples_do_not_matter() -> None:
    assert batchnorm.pool is pool
    assert pool([1.0, float("nan")], [2.0, float("inf")], [5, 0]).variance == pytest.approx(2.0)


# ---- over a process group ---------------------------------------------------------------------------------


def pool_here(rank: int, world_size: int, sizes: tuple[int, ...], momentum: float | None) -> Any:
    torch.manual_seed(1)
    batches = torch.randn(3, sum(sizes), 4, 5, dtype=torch.float64) + torch.arange(sum(sizes))[:, None, None]
    layers = [nn.BatchNorm1d(4, momentum=momentum).double() for _ in range(2)]
    met = [(0, 0), (0, 0)]
    for batch in batches if momentum is None else batches[:1]:
        part = batch.split(sizes)[rank]
        for number, layer in enumerate(layers if len(part) else []):
            layer(part * (number + 1))
            met[number] = (met[number][0] + len(part) * 5, met[number][1] + 1)
    own = [(layer.running_mean, layer.running_var) for layer in layers]
    return batchnorm.pool_over_ranks(layers, met), own


@pytest.mark.parametrize("momentum", [1.0, None])
@pytest.mark.parametrize("sizes", [(6,), (4, 2), (3, 0, 5)], ids=str)
def test_pooling_over_ranks_equals_pooling_arrays(run_ranks: Any, sizes: Any, momentum: Any) -> None:
    answers = run_ranks(len(sizes), pool_here, sizes, momentum)
    for number in range(2):
        means, variances = zip(*(own[number] for _, own in answers), strict=True)
        expected = pool(means, variances, [size * 5 for size in sizes])
        for pooled, _ in answers:
            assert torch.allclose(pooled[number][0], expected.mean, rtol=1e-12)
            assert torch.allclose(pooled[number][1], expected.variance, rtol=1e-12)
            assert torch.equal(pooled[number][1], answers[0][0][number][1])


# ---- files ------------------------------------------------------------------------------------------------


def make_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=1.0))
    net.append(nn.Sequential(nn.Conv2d(3, 2, 3, stride=2), nn.BatchNorm2d(2, momentum=1.0)))
    return net


def save_ranks(folder: Path, sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Path]:
    """Save one file per rank, and whole.pt of one process with all samples. The first layer sees the same."""
    net, batch = make_net().double(), torch.randn(sum(sizes), 1, 8, 8, dtype=torch.float64)
    return save_parts(folder, batch, sizes, lambda part: passed(copy.deepcopy(net), [part]).to(dtype))


def save_parts(folder: Path, data: torch.Tensor, sizes: tuple[int, ...], use: Any) -> list[Path]:
    """Save what a model is after each part of the data as rank0.pt, …, and after all as whole.pt."""
    paths = [folder / f"{name}.pt" for name in ("whole", *(f"rank{rank}" for rank in range(len(sizes))))]
    for path, part in zip(paths, (data, *data.split(sizes)), strict=True):
        torch.save({"model": use(part).state_dict(), "epoch": 1}, path)
    return paths[1:]


def passed(model: nn.Module, batches: Iterable[torch.Tensor]) -> nn.Module:
    for batch in batches:
        if len(batch):
            model(batch)
    return model


def change(path: Path, name: str, value: Any = ...) -> None:
    """Put another value into a saved state, or take one out."""
    saved = torch.load(path)
    saved["model"][name] = value
    if value is ...:
        del saved["model"][name]
    torch.save(saved, path)


def pool_files(paths: list[Path], *arguments: Any, **options: Any) -> tuple[Any, PoolReport]:
    opened = [ckpttool.open(path) for path in paths]
    new, report = pool_states(opened, *arguments, **options)
    out = paths[0].parent / "pooled.pt"
    ckpttool.save(new, out, force=True)
    return torch.load(out, weights_only=True), report


@pytest.mark.parametrize("sizes", [(2, 3), (4, 0, 1)], ids=str)
def test_files_of_ranks_become_the_file_of_one_process(sizes: tuple[int, ...], tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, sizes)
    counts = {"1": [n * 36 for n in sizes], "*": [n * 4 for n in sizes]}
    after, report = pool_files(paths, counts)
    whole = torch.load(tmp_path / "whole.pt")["model"]
    assert report.layers == ("1", "2.1") and report.exact
    assert after["epoch"] == 1
    assert list(after["model"]) == list(whole)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.allclose(after["model"][name], whole[name], rtol=1e-12), name
    for name in set(whole) - set(report.pooled):
        assert torch.equal(after["model"][name], whole[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values_are_computed_in_float64_and_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, (2, 3), dtype)
    after, _ = pool_files(paths, {"*": [72, 108]})
    states = [torch.load(path)["model"] for path in paths]
    both = ([state[f"1.running_{which}"] for state in states] for which in ("mean", "var"))
    expected = pool(*both, [72, 108])
    assert after["model"]["1.running_mean"].dtype == dtype
    # Torch rounds to the narrow types through float32; these few values have no double rounding.
    assert torch.equal(after["model"]["1.running_mean"], expected.mean.to(dtype))
    assert torch.equal(after["model"]["1.running_var"], expected.variance.to(dtype))


def test_bfloat16_is_not_rounded_twice(tmp_path: Path) -> None:
    """Just above the middle of two neighbours: rounded to float32 first, it would be a tie and go down."""
    low, high, large = 1.0, 1 + 2**-7, 2**34
    special = {float("nan"): float("nan"), float("inf"): float("inf"), 0.0: 0.0}
    paths = []
    for rank, mean in enumerate((low, high)):
        state = {
            "running_mean": torch.tensor([mean, -mean, *special], dtype=torch.bfloat16),
            "running_var": torch.ones(5, dtype=torch.bfloat16),
        }
        paths.append(tmp_path / f"rank{rank}.pt")
        torch.save({"model": state}, paths[-1])
    above, _ = pool_files(paths, {"*": [large - 1, large + 1]})
    assert str(above["model"]["running_mean"].tolist()) == str([high, -high, *special])
    tie, _ = pool_files(paths, {"*": [large, large]})
    assert tie["model"]["running_mean"][:2].tolist() == [low, -low]  # ties go to the even neighbour


def test_statistics_that_are_no_numbers_are_named_and_a_negative_variance_is_refused(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, (2, 3))
    change(paths[1], "1.running_mean", torch.full((3,), torch.inf).double())
    change(paths[0], "2.1.running_var", torch.full((2,), torch.nan).double())
    assert pool_files(paths)[1].not_finite == ("1.running_mean", "1.running_var", "2.1.running_var")
    assert pool_files(paths, {"*": [180, 0]})[1].not_finite == ("2.1.running_var",)
    change(paths[1], "1.running_var", -torch.ones(3).double())
    with pytest.raises(ckpttool.CkptToolError, match=r"rank1\.pt: '1\.running_var' is negative"):
        pool_files(paths)
    assert pool_files(paths, {"*": [180, 0]})[1].not_finite == ("2.1.running_var",)
    with pytest.raises(UsageFault, match=r"below 2\^63"):
        pool_files(paths, {"*": [10**400, 2]})


def test_layers_that_are_tied_stay_tied(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{rank}.pt" for rank in range(2)]
    for rank, path in enumerate(paths):
        mean, variance, other = torch.full((2,), float(rank)), torch.ones(2), torch.full((2,), float(rank))
        state = {
            f"{n}.running_{end}": each for n in "ab" for end, each in (("mean", mean), ("var", variance))
        }
        torch.save({"model": {**state, "c.running_mean": other, "c.running_var": variance}}, path)
    pool_files(paths)
    ties = ckpttool.inspect(tmp_path / "pooled.pt").ties
    assert ties == (("a.running_mean", "b.running_mean"), ("a.running_var", "b.running_var"))


def test_a_rank_without_samples_does_not_lower_the_counter(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, (0, 5))
    after, _ = pool_files(paths, {"*": [0, 180]})
    assert after["model"]["1.num_batches_tracked"].item() == 1


def save_averages(folder: Path, batches: tuple[int, ...]) -> list[Path]:
    """Save one file per rank, with averages over this many batches of 8; whole.pt averages over all."""
    torch.manual_seed(0)
    data = torch.randn(sum(batches), 8, 2, dtype=torch.float64)
    data -= data.mean(1, keepdim=True)  # so that the variance is exact too

    def averaged(part: torch.Tensor) -> nn.Module:
        return passed(nn.Sequential(nn.BatchNorm1d(2, momentum=None)).double(), part)

    return save_parts(folder, data, batches, averaged)


@pytest.mark.parametrize("batches", [(3, 2), (1, 0, 6)], ids=str)
def test_cumulative_averages_weight_a_rank_by_its_counter(batches: tuple[int, ...], tmp_path: Path) -> None:
    paths = save_averages(tmp_path, batches)
    eights = {"*": [8] * len(batches)}
    variance = torch.load(tmp_path / "whole.pt")["model"]["0.running_var"] * 7 / 8  # of each batch alone

    def pooled(**options: Any) -> torch.Tensor:
        after, _ = pool_files(paths, eights, **options)
        count = 8 * sum(1 for number in batches if number or not options)
        return after["model"]["0.running_var"] * (count - 1) / count

    assert torch.allclose(pooled(cumulative=["*"]), variance, rtol=1e-12)
    assert not torch.allclose(pooled(), variance, rtol=1e-3)


def test_a_cumulative_layer_without_a_counter_is_refused(tmp_path: Path) -> None:
    paths = save_averages(tmp_path, (3, 2))
    for path in paths:
        change(path, "0.num_batches_tracked")
    with pytest.raises(Refused, match=r"'0\.num_batches_tracked' is not there"):
        pool_files(paths, cumulative=["*"])


def test_ranks_that_together_have_one_value_are_refused(tmp_path: Path) -> None:
    paths = save_averages(tmp_path, (3, 0))
    with pytest.raises(Refused, match="'0' can't be pooled: a variance needs at least two values"):
        pool_files(paths, {"*": [0, 8]}, cumulative=["*"])


@pytest.mark.parametrize(
    "name, value",
    [("0.weight", torch.zeros(3, 1, 3, 3).double()), ("more", torch.ones(1)), ("0.bias", None), ("n", 3)],
)
def test_ranks_that_differ_in_anything_else_are_refused_by_name(name, value, tmp_path):
    paths = save_ranks(tmp_path, (2, 3))
    change(paths[1], name, value)
    with pytest.raises(Refused, match=rf"rank1.pt: '{name}' is not as in .*rank0.pt") as caught:
        pool_files(paths)
    assert f"--keep-first {name}" in str(caught.value.hint)
    _, report = pool_files(paths, keep_first=[name])
    assert report.from_first == (name,)


def test_layers_of_different_lengths_are_refused(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, (2, 3))
    change(paths[1], "1.running_var", torch.ones(4).double())
    with pytest.raises(Refused, match=r"1\.running_var"):
        pool_files(paths)


@pytest.mark.parametrize(("given", "said"), [
    ({"counts": {"*": [1, 2, 3]}}, "2 files, 3 counts"),
    ({"counts": {"*": [0, 1]}}, "at least two values"),
    ({"counts": {"*": [1, 64]}}, "at least two values"),  # BatchNorm itself refuses such a batch
    ({"counts": {"*": [0, 0]}}, "at least two values"),
    ({"counts": {"*": [-4, 8]}}, "at least two values"),
    ({"counts": {"1": [4, 4]}}, "none matches the layer '2.1'"),
    ({"counts": {"typo*": [8, 8], "*": [8, 8]}}, r"no BatchNorm layer matches 'typo\*'"),
    ({"cumulative": ["typo*"]}, r"no BatchNorm layer matches 'typo\*'"),
])  # fmt: skip
def test_counts_and_patterns_that_do_not_fit_the_files_are_a_usage_error(given, said, tmp_path):
    with pytest.raises(UsageFault, match=said):
        pool_files(save_ranks(tmp_path, (2, 3)), **given)


def test_a_single_file_is_refused_and_equal_ones_leave_nothing_to_do(tmp_path: Path) -> None:
    path, _ = save_ranks(tmp_path, (2, 3))
    with pytest.raises(UsageFault, match="two ranks"):
        pool_files([path])
    with pytest.raises(NothingToDo, match="the same statistics"):
        pool_files([path, path])


def test_statistics_larger_than_their_type_holds_are_refused_by_name(tmp_path: Path) -> None:
    files = [tmp_path / f"{rank}.pt" for rank in range(2)]
    for file, mean in zip(files, (-200.0, 200.0), strict=True):
        bn = {"bn.running_mean": torch.full((2,), mean), "bn.running_var": torch.full((2,), 6e4)}
        torch.save({name: value.half() for name, value in bn.items()}, file)
    with pytest.raises(Refused, match=r"'bn.running_var' of all ranks is larger than float16 holds"):
        pool_files(files, {"*": [8, 8]})
