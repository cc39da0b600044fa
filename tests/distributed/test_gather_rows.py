"""Rows of all ranks joined by sample, over real process groups; what is said where one is not there once."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.distributed import gather_rows, transport
from ckpttool.distributed.exactly_once import faults, index_digest
from tests.support.running import ROOT

SAMPLES = 23
DTYPES = [
    *(torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float64),
    *(torch.float8_e4m3fn, torch.uint16, torch.complex128),
]


def whole(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(100, (SAMPLES, 3), generator=generator).float().to(dtype)


def shares(world_size: int, cuts: list[int]) -> list[torch.Tensor]:
    """A shuffled set of samples, cut anywhere."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(2))
    edges = [0, *cuts[: world_size - 1], SAMPLES]
    return [order[start:end] for start, end in pairwise(edges)]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the bit, for dtypes too that torch can't compare."""
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def gather_every_dtype(rank: int, world_size: int, cuts: list[int], piece: int) -> bool:
    index = shares(world_size, cuts)[rank]
    columns = {str(dtype): whole(dtype)[index] for dtype in DTYPES}
    columns["scalar"] = index.clone()
    columns["empty"] = torch.zeros(len(index), 0)
    columns["at an odd byte"] = torch.cat(
        [torch.zeros(1, dtype=torch.int8), index.repeat_interleave(8).to(torch.int8)]
    )[1:].reshape(-1, 8)
    columns["transposed"] = whole(torch.float32).t().contiguous().t()[index]
    found = gather_rows.gather(index, columns, samples=SAMPLES, piece=piece)
    return (
        list(found) == list(columns)
        and all(same(found[str(dtype)], whole(dtype)) for dtype in DTYPES)
        and found["scalar"].tolist() == list(range(SAMPLES))
        and found["at an odd byte"].tolist() == [[sample] * 8 for sample in range(SAMPLES)]
        and found["empty"].shape == (SAMPLES, 0)
        and torch.equal(found["transposed"], whole(torch.float32))
    )


@pytest.mark.parametrize(
    ("size", "cuts"),
    [(1, []), (2, [11]), (2, [0]), (2, [SAMPLES]), (3, [0, 1]), (3, [SAMPLES, SAMPLES]), (4, [5, 5, 6])],
    ids=str,
)
@pytest.mark.parametrize("piece", [1, 100, gather_rows.PIECE])
def test_every_row_comes_to_its_place_on_every_rank_however_many_each_has(run_ranks, size, cuts, piece):
    assert run_ranks(size, gather_every_dtype, cuts, piece, timeout=200) == [True] * size


def gather_nothing(rank: int, world_size: int) -> list[int]:
    nothing = torch.zeros(0, dtype=torch.int64)
    return gather_rows.gather(nothing, {"x": nothing}, samples=0)["x"].tolist()


def test_no_samples_at_all_are_gathered_too(run_ranks):
    assert run_ranks(2, gather_nothing, timeout=200) == [[], []]


def gather_badly(rank: int, world_size: int, kind: str) -> tuple[str, str]:
    index = torch.arange(rank, 10, world_size)
    samples, columns = 10, {"x": torch.zeros(len(index))}
    if kind == "twice":
        index = torch.arange(10)[rank * 4 : rank * 4 + 6]
        columns = {"x": torch.zeros(len(index))}
    elif kind == "gap":
        samples = 12
    elif kind == "far beyond" and not rank:
        index[1] = 10**12
    elif kind == "none of many":
        samples = 10**15
    elif kind == "beyond":
        samples = 9
    elif kind == "dtype" and rank:
        columns = {"x": torch.zeros(len(index), dtype=torch.float64)}
    elif kind == "name" and rank:
        columns = {"y": torch.zeros(len(index))}
    elif kind.startswith("called "):
        columns = {kind.removeprefix("called "): torch.zeros(len(index), rank)}
    elif kind == "samples" and rank:
        samples = 9
    elif kind == "rows" and rank:
        columns = {"x": torch.zeros(7)}
    elif kind == "float index" and not rank:
        index = index.float()
    try:
        gather_rows.gather(index, columns, samples=samples)
    except Exception as error:
        return type(error).__name__, str(error)
    return "gathered", ""


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("twice", ["CheckFailed", "RankFailed"], "samples 4–5 appear more than once: in rank 0, rank 1"),
        ("gap", ["CheckFailed", "RankFailed"], "samples 10–11 of 12 are missing"),
        ("far beyond", ["CheckFailed", "RankFailed"], "sample 1000000000000 in rank 0 is not among the 10"),
        ("none of many", ["CheckFailed", "RankFailed"], "samples 10–999999999999999 of 1000000000000000 are"),
        ("beyond", ["CheckFailed", "RankFailed"], "sample 9 in rank 1 is not among the 9"),
        (
            "dtype",
            ["RanksDiffer", "RanksDiffer"],
            "rank 1 holds another kind of column 'x' than rank 0, in gather",
        ),
        ("name", ["RanksDiffer", "RanksDiffer"], "another kind of column 'x' than rank 0, in gather"),
        (
            "called number of samples",
            ["RanksDiffer", "RanksDiffer"],
            "another kind of column 'number of samples'",
        ),
        (
            "called size of a piece",
            ["RanksDiffer", "RanksDiffer"],
            "another kind of column 'size of a piece'",
        ),
        ("samples", ["RanksDiffer", "RanksDiffer"], "rank 1 holds another number of samples than rank 0"),
        ("rows", ["RankFailed", "ValueError"], "'x' is [7], and index has 5 rows"),
        ("float index", ["TypeError", "RankFailed"], "index is int64 [n], not torch.float32"),
    ],
)
def test_what_can_not_be_joined_fails_on_every_rank_and_says_why(run_ranks, kind, names, said):
    answers = run_ranks(2, gather_badly, kind, timeout=200)
    assert [name for name, _ in answers] == names
    assert all(said in message for _, message in answers)


def gather_without_memory(rank: int, world_size: int) -> tuple[str, str]:
    class Large(gather_rows._Column):
        def __init__(self, *_: Any) -> None:
            raise MemoryError("too little")

    kept, index = gather_rows._Column, torch.arange(rank, 10, world_size)
    try:
        gather_rows._Column = Large if rank == 1 else kept  # type: ignore[misc]
        gather_rows.gather(index, {"x": index}, samples=10)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        gather_rows._Column = kept  # type: ignore[misc]
    return "gathered", ""


def test_a_rank_without_memory_for_the_rows_of_all_ends_all(run_ranks):
    first, second = run_ranks(2, gather_without_memory)
    assert (first, second) == (
        ("RankFailed", "rank 1 failed: MemoryError: too little"),
        ("MemoryError", "too little"),
    )


def messages_sent(rank: int, world_size: int, sizes: list[int], piece: int) -> list[int]:
    """Bytes of each message of a gathering in which rank r has `sizes[r]` rows of 3 bytes and an index."""
    seen = []
    send = torch.distributed.broadcast

    def watched(message: torch.Tensor, *arguments: Any, **choices: Any) -> Any:
        seen.append(message.numel())
        return send(message, *arguments, **choices)

    index = torch.arange(sum(sizes)).split(sizes)[rank]
    torch.distributed.broadcast = watched
    try:
        rows = torch.zeros(len(index), 3, dtype=torch.int8)
        gather_rows.gather(index, {"x": rows}, samples=sum(sizes), piece=piece)
    finally:
        torch.distributed.broadcast = send
    return seen


def test_what_is_under_way_is_bounded_and_nothing_is_filled_up(run_ranks):
    """Rank 0's many rows are no reason to send more of rank 1's."""
    for sizes in run_ranks(2, messages_sent, [9_000, 1_000], 10_000, timeout=200):
        assert 2 * max(sizes) <= 10_000
        assert sum(sizes) == 10_000 * (8 + 3)


def test_few_rows_are_one_message_a_rank(run_ranks):
    assert run_ranks(3, messages_sent, [2, 0, 3], gather_rows.PIECE, timeout=200) == [[24, 40]] * 3


@pytest.mark.parametrize(("at_once", "each"), [(1, 1), (5, 5), (7, 7), (8, 8), (15, 8), (16, 16)])
def test_as_many_rows_go_at_once_as_may_be_under_way_by_eights_where_they_are_more(run_ranks, at_once, each):
    piece = 2 * (8 + 3) * at_once
    for sent in run_ranks(2, messages_sent, [48, 0], piece, timeout=200):
        assert len(sent) == -(-48 // each)


def uneven_arrays(rank: int, world_size: int) -> list[list[int]]:
    return [part.tolist() for part in gather_rows.arrays_of_all_ranks(np.arange(rank * 2))]


def test_arrays_of_any_lengths_come_in_the_order_of_ranks(run_ranks):
    assert run_ranks(3, uneven_arrays, timeout=200) == [[[], [0, 1], [0, 1, 2, 3]]] * 3


@pytest.mark.skipif(
    not torch.cuda.is_available() or not torch.distributed.is_nccl_available(), reason="needs NCCL and a GPU"
)
def test_over_nccl_rows_stay_on_the_gpu(tmp_path):
    torch.cuda.set_device(0)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    try:
        order = torch.randperm(50, device="cuda")
        # One rank would send nothing to itself, and two can't share a GPU: so its rows are sent all the same.
        data = [transport.as_bytes(column) for column in (order, order.bfloat16())]
        pieces = [
            [raw.view(dtype).clone() for raw, dtype in zip(rows, (torch.int64, torch.bfloat16), strict=True)]
            for _, _, rows in gather_rows._exchanged(data, [8, 2], [50], 8)
        ]
        found = gather_rows.gather(order, {"x": order.float()}, samples=50)["x"]
        assert found.device.type == "cuda"
        assert found.tolist() == list(map(float, range(50)))
        assert len(pieces) == 7
        assert torch.equal(torch.cat([rows for rows, _ in pieces]), order)
        assert torch.equal(torch.cat([rows for _, rows in pieces]), order.bfloat16())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["rows", "tuples", "tensors", "epoch"])
def test_each_way_of_the_benchmark_runs(kind):
    """They check what they joined themselves."""
    command = [sys.executable, "benchmarks/children/gather_rows.py", kind, "130", "2"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")


# ---- every sample once ---------------------------------------------------------------------------------


def parts(*shares: list[int]) -> dict[str, np.ndarray]:
    return {f"p{number}": np.array(share, dtype=np.int64) for number, share in enumerate(shares)}


@pytest.mark.parametrize(
    ("shares", "samples", "said"),
    [
        (([2, 0], [1]), 3, []),
        (([], []), 0, []),
        (([0, 1], [1, 2]), 3, ["sample 1 appears more than once: in p0, p1"]),
        (([0, 0], [2]), 3, ["sample 0 appears more than once: in p0", "sample 1 of 3 is missing"]),
        (([0, 0], [1]), 2, ["sample 0 appears more than once: in p0"]),
        (([0], [3]), 6, ["samples 1–2, 4–5 of 6 are missing"]),
        (([0],), 2, ["sample 1 of 2 is missing"]),
        (([-1, 0], [9]), 1, ["samples -1, 9 in p0, p1 are not among the 1"]),
        ((list(range(0, 40, 2)),), 40, ["samples 1, 3, 5, 7, 9, 11 and 14 more of 40 are missing"]),
        (([],), 10**15, ["samples 0–999999999999999 of 1000000000000000 are missing"]),
        (
            ([0, 0, 5],),
            3,
            [
                "sample 5 in p0 is not among the 3",
                "sample 0 appears more than once: in p0",
                "samples 1–2 of 3 are missing",
            ],
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_samples_is_said_with_their_holders(shares, samples, said):
    assert faults(parts(*shares), samples) == said


@given(st.integers(0, 4), st.data(), st.integers(0, 5))
def test_nothing_is_said_exactly_where_every_sample_stands_once(samples, data, cut):
    """Mostly of as many as there are, and within bounds: there it is hardest to tell."""
    within = st.lists(st.integers(0, max(samples - 1, 0)), min_size=samples, max_size=samples)
    anything = st.lists(st.integers(-1, 4), max_size=5)
    index = data.draw(st.one_of(st.permutations(range(samples)), within, within, anything))
    said = faults(parts(index[:cut], index[cut:]), samples)
    assert (not said) == (sorted(index) == list(range(samples)))


def test_the_digest_of_the_index_set_is_defined_without_this_code():
    import hashlib
    import struct

    expected = hashlib.sha256(b"ckpttool index set 1\n" + struct.pack("<3q", 0, 1, 2)).hexdigest()
    assert index_digest(3) == expected
