"""Element types cast as torch casts them, bit for bit."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch
from safetensors.torch import load_file

import ckpttool
from ckpttool.core.checkpoint import selection
from ckpttool.core.checkpoint.checkpoint import Checkpoint
from ckpttool.core.tensors import values as tensor_values
from ckpttool.core.tensors.cast import (
    CELL,
    CHUNK,
    FEW_LOSSES,
    CastReport,
    Conversion,
    count_non_finite,
    target,
)
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.errors import NothingToDo, UsageFault
from tests.support.comparing import saved, values
from tests.support.crafting import call, dict_of, name, number, storage, tensor, torch_zip, tuple_of
from tests.support.trees import strided

module = import_module("ckpttool.core.tensors.cast")
TARGETS = ["float64", "float32", "float16", "bfloat16"]
EIGHT_BITS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
SOURCES = [*TARGETS, *(name for name in EIGHT_BITS if hasattr(torch, name))]
PAIRS = [(source, to) for source in SOURCES for to in TARGETS]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


def bits(of: torch.Tensor) -> torch.Tensor:
    return of.view(WORDS[of.element_size()])


def assert_cast_as_torch_casts(raw: bytes, source: str, to: str) -> None:
    before = torch.frombuffer(bytearray(raw), dtype=of(source))
    wanted = before.to(of(to))
    conversion, mine, lost = Conversion(DTYPES[source], DTYPES[to]), bytearray(), Counter[str]()
    for start in range(0, len(raw), CHUNK):
        values, found = conversion.convert(memoryview(raw)[start : start + CHUNK])
        mine += values.tobytes()
        lost.update({loss: len(places) for loss, places in found.items()})
    after = torch.frombuffer(mine, dtype=of(to))
    numbers = ~wanted.isnan()
    assert torch.equal(after.isnan(), wanted.isnan())
    assert torch.equal(bits(after)[numbers], bits(wanted)[numbers])
    finite = before.to(torch.float64).isfinite()
    assert lost["infinite"] == int((wanted.isinf() & finite).sum())
    assert lost["zero"] == int(((wanted == 0) & (before.to(torch.float64) != 0)).sum())


def edges(itemsize: int) -> bytes:
    """Every sign and exponent, with mantissas next to those where rounding changes: ties, carries, NaNs."""
    below = 8 * itemsize - 14  # bits under the first fourteen
    tops = np.arange(1 << 14, dtype=np.uint64) << np.uint64(below)
    near = {0, 1, (1 << below) - 1}
    for bit in range(below):
        near |= {(1 << bit) - 1, 1 << bit, (1 << bit) + 1, ((1 << bit) + (1 << below - 1)) % (1 << below)}
        near |= {(3 << bit) % (1 << below)}
    parts = [tops | np.uint64(low) for low in sorted(near)]
    return np.concatenate(parts).astype(f"<u{itemsize}").tobytes()


@pytest.mark.covered(lambda source, to: (source, to) == ("float64", "float64"))
@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_what_is_near_a_tie_and_what_is_random_is_rounded_as_torch_rounds(source: str, to: str) -> None:
    itemsize = DTYPES[source].itemsize
    small = itemsize <= 2
    raw = np.arange(1 << 8 * itemsize, dtype=f"<u{itemsize}").tobytes() if small else edges(itemsize)
    assert_cast_as_torch_casts(raw, source, to)
    elements = torch.frombuffer(bytearray(raw), dtype=of(source))
    finite = elements[elements.to(of(to)).isfinite()]  # whole blocks of them take a shorter way
    assert_cast_as_torch_casts(bits(finite).numpy().tobytes(), source, to)
    assert_cast_as_torch_casts(np.random.default_rng(7).bytes(100_000 * itemsize), source, to)


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("zeros", [0, 5, 50_000])
def test_what_becomes_0_is_found_among_few_zeros_and_many(zeros: int, zero: float, to: str) -> None:
    numbers = np.ones(100_000, "<f4")
    numbers[:zeros] = zero
    assert_cast_as_torch_casts(numbers.tobytes(), "float32", to)
    numbers[[7, 60_000, 99_999]] = 1e-44, -1e-44, 2.0**-136
    assert_cast_as_torch_casts(numbers.tobytes(), "float32", to)


@given(st.sampled_from(PAIRS), st.binary(min_size=0, max_size=64))
def test_any_bits_are_rounded_as_torch_rounds(pair: tuple[str, str], raw: bytes) -> None:
    source, to = pair
    whole = raw[: len(raw) - len(raw) % DTYPES[source].itemsize]
    if whole:
        assert_cast_as_torch_casts(whole, source, to)


@given(st.lists(st.floats(allow_subnormal=True), min_size=1, max_size=20), st.sampled_from(TARGETS))
def test_any_doubles_are_rounded_as_torch_rounds(numbers: list[float], to: str) -> None:
    assert_cast_as_torch_casts(np.array(numbers, "<f8").tobytes(), "float64", to)


@pytest.mark.parametrize("source", SOURCES)
def test_nan_and_infinity_are_counted_as_torch_counts_them(source: str) -> None:
    raw = np.random.default_rng(3).bytes(60_000 * DTYPES[source].itemsize)
    theirs = torch.frombuffer(bytearray(raw), dtype=of(source)).to(torch.float64)
    assert count_non_finite(source, memoryview(raw)) == int((~theirs.isfinite()).sum())


# Whole checkpoints.


ENDINGS = pytest.mark.parametrize("ending", [".pt", ".safetensors"])


def cast_file(path: Path, to: str) -> tuple[Checkpoint, CastReport]:
    return selection.cast(ckpttool.open(path), target(to))


def cast_to(to: str, ending: str, path: Path) -> dict[str, Any]:
    """Return what the ending's own library loads from a file that was cast."""
    out = path.with_name(f"out{ending}")
    ckpttool.save(cast_file(path, to)[0], out, force=True)
    loaded: dict[str, Any] = (torch.load if ending == ".pt" else load_file)(out)
    return loaded


MIXED = {
    "weight": torch.linspace(-1e6, 1e6, 999).reshape(27, 37),
    "double": torch.tensor([1e300, -1e-300, 0.1], dtype=torch.float64),
    "half": torch.tensor([1.5, float("nan")], dtype=torch.float16),
    "eight": torch.tensor([1.5, 448.0]).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "counter": torch.tensor((1 << 24) + 1),
    "mask": torch.tensor([True, False]),
    "byte": torch.arange(5, dtype=torch.uint8),
    "phase": torch.tensor([1 + 2j]),
}


@ENDINGS
@pytest.mark.parametrize("to", TARGETS)
def test_floats_are_cast_and_other_types_stay(to: str, ending: str, tmp_path: Path) -> None:
    loaded = cast_to(to, ending, saved(MIXED, tmp_path / "in.pt"))
    for key, before in MIXED.items():
        wanted = before.to(of(to)) if before.is_floating_point() else before
        assert loaded[key].dtype == wanted.dtype, key
        assert torch.equal(loaded[key].nan_to_num(7), wanted.nan_to_num(7)), key
    assert loaded["half"].isnan().tolist() == [False, True]


def test_other_parts_of_a_checkpoint_keep_their_types(tmp_path: Path) -> None:
    whole = {"model": {"w": torch.ones(2)}, "ema": torch.ones(2), "lr": 0.1}
    loaded = cast_to("bf16", ".pt", saved(whole, tmp_path / "in.pt"))
    assert loaded["model"]["w"].dtype == torch.bfloat16
    assert (loaded["ema"].dtype, loaded["lr"]) == (torch.float32, 0.1)


def views() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    tied = {"base": base, "tied": base.view(6, 8), "parameter": torch.nn.Parameter(base)}
    parts = {"row": base[2], "every second": base[:, ::2], "expanded": base[0].expand(3, 8)}
    return {**tied, "turned": base.t(), **parts}


def test_ties_and_views_survive_in_a_pt_file(tmp_path: Path) -> None:
    state = views()
    loaded = cast_to("bf16", ".pt", saved(state, tmp_path / "in.pt"))
    assert len({each.untyped_storage().data_ptr() for each in loaded.values()}) == 1
    for key, before in state.items():
        assert loaded[key].stride() == before.stride()
        assert loaded[key].storage_offset() == before.storage_offset()
        assert values(loaded[key]) == values(before.to(torch.bfloat16)), key
    assert isinstance(loaded["parameter"], torch.nn.Parameter)


def test_one_tensor_under_two_names_stays_one_tensor(tmp_path: Path) -> None:
    plain, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(2))
    tree = {"a": plain, "b": plain, "c": parameter, "d": parameter}
    loaded = cast_to("fp16", ".pt", saved(tree, tmp_path / "in.pt"))
    assert loaded["a"] is loaded["b"]
    assert loaded["c"] is loaded["d"]


@pytest.mark.parametrize("chunk", [tensor_values.CHUNK, 32])
def test_views_of_cast_tensors_are_written_out(chunk: int, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    state = {key: each.detach() for key, each in views().items()}
    loaded = cast_to("fp16", ".safetensors", saved(state, tmp_path / "in.pt"))
    for key in loaded:
        assert values(loaded[key]) == values(state[key].to(torch.float16)), key
    assert len(loaded) == 5  # "tied" and "parameter" are "base" again


@ENDINGS
def test_a_negative_view_is_cast_with_its_sign(ending: str, tmp_path: Path) -> None:
    state = {"t": torch.tensor([1 + 2j, 3 - 4j, -5.5j]).conj().imag}
    loaded = cast_to("bf16", ending, saved(state, tmp_path / "in.pt"))
    assert loaded["t"].resolve_neg().tolist() == [-2, 4, 5.5]


@ENDINGS
def test_big_endian_sources_are_cast_by_value(ending: str, tmp_path: Path) -> None:
    """A .pt file stays big-endian whole, as it must agree with the storages that are not cast."""
    numbers, counts = np.array([1.5, -2.25, 1e5, np.inf], ">f4"), np.array([1, 2, 3, 4], ">i8")
    tensors = {"w": tensor(storage()), "every second": tensor(storage(), (2,), (2,), 1)}
    body = dict_of(tensors | {"count": tensor(storage(kind="LongStorage", key="1"))})
    raw = {"0": numbers.tobytes(), "1": counts.tobytes()}
    loaded = cast_to("bf16", ending, torch_zip(tmp_path / "in.pt", body, raw, byteorder="big"))
    wanted = torch.from_numpy(numbers.astype("<f4")).to(torch.bfloat16)
    assert torch.equal(loaded["w"], wanted)
    assert torch.equal(loaded["every second"], wanted[1::2])
    assert loaded["count"].tolist() == [1, 2, 3, 4]


def test_a_storage_is_cast_from_the_type_of_each_tensor_that_uses_it(tmp_path: Path) -> None:
    halves = np.array([1.0, 2.0, 3.0, 4.0], "<f2")

    def typed(dtype: str) -> bytes:
        untyped = storage(8, kind="UntypedStorage", module="torch.storage")
        args = (untyped, number(0), tuple_of(number(4)), tuple_of(number(1)), b"\x89")
        hooks = call(name("collections", "OrderedDict"))
        return call(name("torch._utils", "_rebuild_tensor_v3"), *args, hooks, name("torch", dtype))

    body = dict_of({"half": typed("float16"), "brain": typed("bfloat16")})
    path = torch_zip(tmp_path / "in.pt", body, {"0": halves.tobytes()})
    before, loaded = torch.load(path), cast_to("fp32", ".pt", path)
    assert loaded["half"].tolist() == [1, 2, 3, 4]
    assert torch.equal(loaded["brain"], before["brain"].float())


@ENDINGS
def test_a_tensor_of_many_pieces_is_cast_whole(ending: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1 << 10)
    monkeypatch.setattr(tensor_values, "CHUNK", 1 << 10)
    long = torch.randn(100_003, generator=torch.Generator().manual_seed(2))
    loaded = cast_to("bf16", ending, saved({"t": long, "part": long[5:90_000]}, tmp_path / "in.pt"))
    assert torch.equal(loaded["t"], long.bfloat16())
    assert torch.equal(loaded["part"], long[5:90_000].bfloat16())


@pytest.mark.parametrize("verify", [False, True])
@ENDINGS
def test_losses_are_counted_once(ending: str, verify: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "CHUNK", 16)
    monkeypatch.setattr(tensor_values, "CHUNK", 16)
    big = torch.tensor([1e5, 1e-9, -1e5, float("inf"), float("nan"), 65519.0, 65520.0, -0.0])
    torch.save({"a": big, "row": big[:4], "turned": big.view(2, 4).t(), "b": big.clone()}, tmp_path / "in.pt")
    new, report = cast_file(tmp_path / "in.pt", "fp16")
    ckpttool.save(new, tmp_path / f"out{ending}", verify=verify)
    assert (report.tensors, report.overflows, report.underflows, report.nans) == (4, 6, 2, 0)


def test_an_element_is_counted_once_however_often_it_is_cast() -> None:
    report = CastReport()
    for key, places in (0, [0, 7]), (0, [7, 9]), (1, [7]), (0, [9, CELL - 1, CELL, 5 * CELL + 7]):
        report.note("infinite", key, np.array(places))
    assert report.overflows == 7
    for at in range(0, 3 * FEW_LOSSES, FEW_LOSSES // 2):  # first as places, then as bits
        report.note("zero", 1, np.arange(at, at + FEW_LOSSES))
    assert (report.overflows, report.underflows) == (7, 7 * FEW_LOSSES // 2)


def test_several_threads_lose_no_loss() -> None:
    report, threads, each = CastReport(), 4, 40
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda place: report.note("nan", 0, np.array([place])), range(threads * each)))
    finally:
        sys.setswitchinterval(before)
    assert report.nans == threads * each


def test_a_file_already_of_the_wanted_type_is_nothing_to_do(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "n": torch.arange(3)}, tmp_path / "in.pt")
    with pytest.raises(NothingToDo, match="none has a float dtype other than float32"):
        cast_file(tmp_path / "in.pt", "fp32")


@pytest.mark.parametrize("wanted", ["int8", "fp8", "float8_e4m3fn", "complex64", "", "BF16"])
def test_an_unknown_target_type_is_a_usage_fault(wanted: str) -> None:
    with pytest.raises(UsageFault, match=f"--dtype {wanted}: not a dtype") as fault:
        target(wanted)
    assert "bf16" in str(fault.value.hint)


@given(strided(ranks=(1, 3), least=1, stride=9))
def test_any_view_keeps_its_values(view: tuple[list[int], list[int], int]) -> None:
    seen = torch.randn(120, generator=torch.Generator().manual_seed(5)).as_strided(*view)
    with tempfile.TemporaryDirectory() as folder:
        path = saved({"t": seen}, Path(folder) / "in.pt")
        for ending in (".pt", ".safetensors"):
            assert values(cast_to("bf16", ending, path)["t"]) == values(seen.to(torch.bfloat16))


def test_every_float16_and_the_middles_between_two_are_rounded_as_numpy_does() -> None:
    halves = np.arange(65536, dtype="<u2").view("<f2")
    bits = halves[np.isfinite(halves)].astype("<f4").view("<u4").astype("<i8")
    near = [bits + step for step in (0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, -1, -0xFFF, -0x1000, -0x1001)]
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18)
    for each in (*near, drawn):
        singles = each.clip(0, (1 << 32) - 1).astype("<u4").view("<f4")
        for part in np.array_split(singles, 4):
            got, _ = Conversion(DTYPES["float32"], DTYPES["float16"]).convert(memoryview(part.tobytes()))
            with np.errstate(all="ignore"):
                wanted = part.astype("<f2")
            assert np.array_equal(got.view("<f2"), wanted, equal_nan=True)
