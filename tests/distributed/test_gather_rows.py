"""Rows of all ranks joined by sample, over real process groups, and samples that do not appear once."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.distributed import gather_rows, transport
from ckpttool.distributed.exactly_once import faults, index_digest
from tests.support.running import error_of

SAMPLES = 23
DTYPES = [
    *(torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float64),
    *(torch.float8_e4m3fn, torch.uint16, torch.complex128),
]


def whole(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(100, (SAMPLES, 3), generator=generator).float().to(dtype)


def shares(world_size: int, cuts: list[int]) -> list[torch.Tensor]:
    """Return each rank's part of the shuffled samples."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(2))
    edges = [0, *cuts[: world_size - 1], SAMPLES]
    return [order[start:end] for start, end in pairwise(edges)]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare bit for bit, also dtypes that torch can't compare."""
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


@pytest.mark.covered(lambda size, cuts, piece: piece == 100)
@pytest.mark.parametrize(
    ("size", "cuts"),
    [(1, []), (2, [11]), (2, [0]), (2, [SAMPLES]), (3, [0, 1]), (3, [SAMPLES, SAMPLES]), (4, [5, 5, 6])],
    ids=str,
)
@pytest.mark.parametrize("piece", [1, 100, gather_rows.PIECE])
def test_every_row_is_put_in_its_place_however_many_each_rank_has(run_ranks, size, cuts, piece):
    assert run_ranks(size, gather_every_dtype, cuts, piece, timeout=200) == [True] * size


def gather_nothing(rank: int, world_size: int) -> list[int]:
    nothing = torch.zeros(0, dtype=torch.int64)
    return gather_rows.gather(nothing, {"x": nothing}, samples=0)["x"].tolist()


def test_no_samples_at_all_can_be_gathered(run_ranks):
    assert run_ranks(2, gather_nothing, timeout=200) == [[], []]


BAD: dict[str, Callable[[int], dict[str, Any]]] = {
    "twice": lambda rank: {"index": torch.arange(rank * 4, rank * 4 + 6), "x": torch.zeros(6)},
    "gap": lambda rank: {"samples": 12},
    "far beyond": lambda rank: {} if rank else {"index": torch.tensor([0, 10**12, 4, 6, 8])},
    "none of many": lambda rank: {"samples": 10**15},
    "beyond": lambda rank: {"samples": 9},
    "dtype": lambda rank: {"x": torch.zeros(5, dtype=torch.float64 if rank else torch.float32)},
    "name": lambda rank: {"called": "y" if rank else "x"},
    "called number of samples": lambda rank: {"called": "number of samples", "x": torch.zeros(5, rank)},
    "called size of a piece": lambda rank: {"called": "size of a piece", "x": torch.zeros(5, rank)},
    "samples": lambda rank: {"samples": 10 - rank},
    "rows": lambda rank: {"x": torch.zeros(7 if rank else 5)},
    "float index": lambda rank: {} if rank else {"index": torch.arange(0.0, 10, 2)},
    "array": lambda rank: {"x": np.zeros(5)} if rank else {},
    "sparse": lambda rank: {"x": torch.eye(5).to_sparse()} if rank else {},
}
"""What is given otherwise on a rank: the index, the number of samples, or the column and its name."""


def gather_badly(rank: int, world_size: int, kind: str) -> tuple[str, str]:
    given = {"index": torch.arange(rank, 10, world_size), "x": torch.zeros(5), "samples": 10, "called": "x"}
    given |= BAD[kind](rank)
    columns = {given["called"]: given["x"]}
    return error_of(lambda: gather_rows.gather(given["index"], columns, samples=given["samples"]))


DIFFER = ["RanksDiffer", "RanksDiffer"]
CHECK = ["CheckFailed", "RankFailed"]


@pytest.mark.parametrize(("kind", "names", "said"), [
    ("twice", CHECK, "samples 4–5 appear more than once: in rank 0, rank 1"),
    ("gap", CHECK, "samples 10–11 of 12 are missing"),
    ("far beyond", CHECK, "sample 1000000000000 in rank 0 is not among the 10"),
    ("none of many", CHECK, "samples 10–999999999999999 of 1000000000000000 are"),
    ("beyond", CHECK, "sample 9 in rank 1 is not among the 9"),
    ("dtype", DIFFER, "rank 1 has a different kind of column 'x' than rank 0, in gather"),
    ("name", DIFFER, "different kind of column 'x' than rank 0, in gather"),
    ("called number of samples", DIFFER, "different kind of column 'number of samples'"),
    ("called size of a piece", DIFFER, "different kind of column 'size of a piece'"),
    ("samples", DIFFER, "rank 1 has a different number of samples than rank 0"),
    ("rows", ["RankFailed", "ValueError"], "'x' is [7], and index has 5 rows"),
    ("float index", ["TypeError", "RankFailed"], "index is int64 [n], not torch.float32"),
    ("array", ["RankFailed", "TypeError"], "'x' is a ndarray, not a tensor"),
    ("sparse", ["RankFailed", "TypeError"], "a torch.sparse_coo tensor can't be sent"),
])  # fmt: skip
def test_rows_that_can_not_be_joined_fail_on_every_rank_and_say_why(run_ranks, kind, names, said):
    answers = run_ranks(2, gather_badly, kind, timeout=200)
    assert [name for name, _ in answers] == names
    assert all(said in message for _, message in answers)


def gather_without_memory(rank: int, world_size: int) -> tuple[str, str]:
    index, empty = torch.arange(rank, 10, world_size), torch.empty

    def fail_for_all_rows(size: Any, **choices: Any) -> torch.Tensor:
        if rank == 1 and size == (10, 1):
            raise MemoryError("too little")
        return empty(size, **choices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", fail_for_all_rows)
        return error_of(lambda: gather_rows.gather(index, {"x": index}, samples=10))


def test_a_rank_without_memory_for_all_rows_fails_all_ranks(run_ranks):
    first, second = run_ranks(2, gather_without_memory)
    assert first == ("RankFailed", "rank 1 failed: MemoryError: too little")
    assert second == ("MemoryError", "too little")


def messages_sent(rank: int, world_size: int, sizes: list[int], piece: int) -> list[int]:
    """Return the bytes of each message while rows are gathered, of which rank r has `sizes[r]` of 3 bytes."""
    seen = []
    send = torch.distributed.broadcast

    def watched(message: torch.Tensor, *arguments: Any, **choices: Any) -> Any:
        seen.append(message.numel())
        return send(message, *arguments, **choices)

    index = torch.arange(sum(sizes)).split(sizes)[rank]
    rows = torch.zeros(len(index), 3, dtype=torch.int8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "broadcast", watched)
        gather_rows.gather(index, {"x": rows}, samples=sum(sizes), piece=piece)
    return seen


def test_bytes_in_flight_are_bounded_and_short_messages_are_not_padded(run_ranks):
    """Rank 0 has many rows, and nothing more is sent of rank 1's few."""
    for sizes in run_ranks(2, messages_sent, [9_000, 1_000], 10_000, timeout=200):
        assert 2 * max(sizes) <= 10_000
        assert sum(sizes) == 10_000 * (8 + 3)


def test_few_rows_are_one_message_per_rank(run_ranks):
    assert run_ranks(3, messages_sent, [2, 0, 3], gather_rows.PIECE, timeout=200) == [[24, 40]] * 3


@pytest.mark.parametrize(("at_once", "each"), [(1, 1), (5, 5), (7, 7), (8, 8), (15, 8), (16, 16)])
def test_rows_are_sent_in_the_largest_pieces_that_fit_in_multiples_of_eight(run_ranks, at_once, each):
    piece = 2 * (8 + 3) * at_once
    for sent in run_ranks(2, messages_sent, [48, 0], piece, timeout=200):
        assert len(sent) == -(-48 // each)


def uneven_arrays(rank: int, world_size: int) -> list[list[int]]:
    return [part.tolist() for part in gather_rows.gather_arrays(np.arange(rank * 2))]


def test_arrays_of_any_length_come_in_rank_order(run_ranks):
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
        found = gather_rows.gather(order, {"x": order.float()}, samples=50)["x"]
        assert found.device.type == "cuda"
        assert found.tolist() == list(map(float, range(50)))
        # One rank sends nothing to itself, and two can't share a GPU over NCCL: send a buffer by hand.
        buffer = transport.as_bytes(order.bfloat16())
        assert buffer.device.type == "cuda" and transport.device().type == "cuda"
        transport.begin_broadcast(buffer, 0).wait()
        assert torch.equal(buffer.view(torch.bfloat16), order.bfloat16())
    finally:
        torch.distributed.destroy_process_group()


# ---- every sample once ---------------------------------------------------------------------------------


def parts(*shares: list[int]) -> dict[str, np.ndarray]:
    return {f"p{number}": np.array(share, dtype=np.int64) for number, share in enumerate(shares)}


TWICE, BEYOND = "sample 0 appears more than once: in p0", "sample 5 in p0 is not among the 3"


@pytest.mark.parametrize(
    ("shares", "samples", "said"),
    [
        (([2, 0], [1]), 3, []),
        (([], []), 0, []),
        (([0, 1], [1, 2]), 3, ["sample 1 appears more than once: in p0, p1"]),
        (([0, 0], [2]), 3, [TWICE, "sample 1 of 3 is missing"]),
        (([0, 0], [1]), 2, [TWICE]),
        (([0], [3]), 6, ["samples 1–2, 4–5 of 6 are missing"]),
        (([0],), 2, ["sample 1 of 2 is missing"]),
        (([-1, 0], [9]), 1, ["samples -1, 9 in p0, p1 are not among the 1"]),
        ((list(range(0, 40, 2)),), 40, ["samples 1, 3, 5, 7, 9, 11 and 14 more of 40 are missing"]),
        (([],), 10**15, ["samples 0–999999999999999 of 1000000000000000 are missing"]),
        (([0, 0, 5],), 3, [BEYOND, TWICE, "samples 1–2 of 3 are missing"]),
    ],
    ids=str,
)
def test_faults_name_the_samples_and_the_parts_that_hold_them(shares, samples, said):
    assert faults(parts(*shares), samples) == said


@given(st.integers(0, 4), st.data(), st.integers(0, 5))
def test_there_are_no_faults_exactly_if_every_sample_appears_once(samples, data, cut):
    """Mostly lists of the right length and range, where it is hardest to tell."""
    within = st.lists(st.integers(0, max(samples - 1, 0)), min_size=samples, max_size=samples)
    anything = st.lists(st.integers(-1, 4), max_size=5)
    index = data.draw(st.one_of(st.permutations(range(samples)), within, within, anything))
    said = faults(parts(index[:cut], index[cut:]), samples)
    assert (not said) == (sorted(index) == list(range(samples)))


def test_the_digest_of_the_index_set_follows_its_definition():
    expected = hashlib.sha256(b"ckpttool index set 1\n" + struct.pack("<3q", 0, 1, 2)).hexdigest()
    assert index_digest(3) == expected
