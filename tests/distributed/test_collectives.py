"""Collectives, and rows joined by sample, on process groups of two to four ranks, and without one."""

from __future__ import annotations

import copy
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.distributed import collectives, gather_rows, transport
from ckpttool.distributed.plan import faults, index_digest
from ckpttool.errors import RanksDiffer, UsageFault
from tests.support.running import error_of

SIZES = [1, 2, 4]


def caught(call: Any) -> tuple[str, str, str | None, int] | None:
    """Return the class, message, hint and exit code of the error that a call ends in."""
    try:
        call()
    except Exception as error:
        hint, exit_code = getattr(error, "hint", None), getattr(error, "exit_code", -1)
        return type(error).__name__, getattr(error, "message", str(error)), hint, exit_code
    return None


def refuse() -> None:
    raise UsageFault("--data: not there", hint="give --data-root")


# ---- decide --------------------------------------------------------------------------------------------


def decide_own_rank(rank: int, world_size: int) -> Any:
    calls = []
    value = collectives.from_rank_zero(lambda: calls.append(rank) or {"by": rank, "text": "ü"})
    return value, calls


@pytest.mark.parametrize("size", SIZES)
def test_decide_calls_rank_0_only_and_gives_its_value_to_all_ranks(run_ranks, size):
    answers = run_ranks(size, decide_own_rank)
    assert [value for value, _ in answers] == [{"by": 0, "text": "ü"}] * size
    assert [calls for _, calls in answers] == [[0]] + [[]] * (size - 1)


REFUSED = ("UsageFault", "--data: not there", "give --data-root", 2)
FAILED = ("RankFailed", "rank 0 failed: --data: not there", "give --data-root", 2)
SPARSE, META = torch.eye(2).to_sparse(), torch.empty(2, device="meta")
ON_ONE = [{"a": torch.eye(2)}, {"a": SPARSE}]

FAILING: dict[str, tuple[Callable[[int], object], int, str, str]] = {
    "decide to refuse": (lambda rank: collectives.from_rank_zero(refuse), 0, "UsageFault", "--data"),
    "decide on a function": (lambda rank: collectives.from_rank_zero(lambda: lambda: None), 0, "", ""),
    "broadcast a failure": (lambda rank: collectives.broadcast(refuse), 0, "UsageFault", "--data"),
    "broadcast sparse": (lambda rank: broadcast_beside(SPARSE), 0, "", "a torch.sparse_coo tensor"),
    "broadcast meta": (lambda rank: broadcast_beside(META), 0, "", "a meta tensor"),
    "broadcast a function": (lambda rank: broadcast_beside(lambda: None), 0, "", ""),
    "gather a function": (lambda rank: collectives.gather((lambda: None) if rank else ""), 1, "", ""),
    "compare sparse": (lambda rank: collectives.compare(ON_ONE[rank]), 1, "TypeError", ""),
}
"""By call: what each rank does, which one fails, in what, and in what words."""


def broadcast_beside(value: object) -> object:
    return collectives.broadcast(lambda: [torch.ones(2), value])


def fail_in(rank: int, world_size: int, call: str) -> Any:
    return caught(lambda: FAILING[call][0](rank)), collectives.gather(rank)  # the ranks are still in step


@pytest.mark.parametrize("call", FAILING)
def test_a_call_that_fails_on_one_rank_fails_on_all_and_leaves_none_waiting(run_ranks, call):
    _, rank, kind, said = FAILING[call]
    answers, ranks = zip(*run_ranks(2, fail_in, call), strict=True)
    assert [*ranks] == [[0, 1], [0, 1]]
    own, other = answers[rank], answers[1 - rank]
    assert own[0] == kind or (not kind and own[0] != "RankFailed")
    assert other[0] == "RankFailed" and said in other[1] and f"rank {rank} failed" in other[1]


def test_a_failure_of_rank_0_is_raised_on_every_rank_with_its_hint_and_exit_code(run_ranks):
    assert [error for error, _ in run_ranks(4, fail_in, "decide to refuse")] == [REFUSED] + [FAILED] * 3


# ---- broadcast -----------------------------------------------------------------------------------------


def every_kind() -> dict[str, Any]:
    """Return a structure with tensors of every kind that is hard to send."""
    return {
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "float8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j, -3j], dtype=torch.complex64),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "nan": torch.tensor([float("nan"), -0.0]),
        "scalar": torch.tensor(2**53 + 1),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "list": [1, None, "text", (2.5, torch.ones(1))],
        "ordered": OrderedDict(b=torch.zeros(1), a=torch.ones(1)),
    }


def broadcast_every_kind(rank: int, world_size: int) -> Any:
    received = collectives.broadcast(every_kind)
    return {
        "digests": {n: collectives.digest(v).hex() for n, v in received.items() if torch.is_tensor(v)},
        "list": [*received["list"][:3], received["list"][3][0], received["list"][3][1].tolist()],
        "keys": list(received),
        "ordered": (type(received["ordered"]).__name__, list(received["ordered"])),
    }


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_carries_every_dtype_and_structure_bit_for_bit(run_ranks, size):
    sent = every_kind()
    for answer in run_ranks(size, broadcast_every_kind):
        assert answer["keys"] == list(sent)
        assert answer["digests"] == {
            n: collectives.digest(v).hex() for n, v in sent.items() if torch.is_tensor(v)
        }
        assert answer["list"] == [1, None, "text", 2.5, [1.0]]
        assert answer["ordered"] == ("OrderedDict", ["b", "a"])


def broadcast_in_place(rank: int, world_size: int) -> Any:
    strided = torch.full((2, 3), float(rank)).t()
    complex_ = torch.full((2,), complex(rank, 1), dtype=torch.complex64)
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    collectives.broadcast_into([strided, complex_, parameter])
    return strided.tolist(), complex_.tolist(), parameter.tolist(), parameter.requires_grad


def test_broadcast_into_overwrites_in_place_whatever_the_strides(run_ranks):
    expected = ([[0.0, 0.0]] * 3, [1j, 1j], [0.0, 0.0], True)
    assert run_ranks(2, broadcast_in_place) == [expected] * 2


# ---- sums ----------------------------------------------------------------------------------------------


def add_large_counts(rank: int, world_size: int) -> Any:
    counts = torch.tensor([2**53 + 1, rank])
    return collectives.total(counts).tolist(), counts.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_totals_of_counts_are_exact_and_do_not_change_the_argument(run_ranks, size):
    answers = run_ranks(size, add_large_counts)
    assert [total for total, _ in answers] == [[size * (2**53 + 1), sum(range(size))]] * size
    assert [own for _, own in answers] == [[2**53 + 1, rank] for rank in range(size)]


def add_around_another_message(rank: int, world_size: int) -> Any:
    counts = torch.tensor([1.0, rank], dtype=torch.float64)
    wait = collectives.begin_total(counts)
    counts.zero_()
    between = collectives.gather(rank)
    return between, wait().tolist()


@pytest.mark.parametrize("size", SIZES)
def test_a_total_that_was_begun_is_of_what_was_sent_whatever_is_sent_in_between(run_ranks, size):
    expected = (list(range(size)), [float(size), float(sum(range(size)))])
    assert run_ranks(size, add_around_another_message) == [expected] * size


def test_totals_in_float32_are_refused():
    with pytest.raises(TypeError, match="int64 or float64"):
        collectives.total(torch.zeros(1))


def gather_sizes(rank: int, world_size: int) -> Any:
    return collectives.gather((rank, bytes(rank * 1000)))


def test_gather_gives_every_value_in_rank_order_to_all_whatever_its_size(run_ranks):
    assert run_ranks(4, gather_sizes) == [[(rank, bytes(rank * 1000)) for rank in range(4)]] * 4


# ---- compare -------------------------------------------------------------------------------------------


def same_state() -> dict[str, Any]:
    return {
        "module.weight": torch.tensor([1.0, float("nan")]),
        "module.phase": torch.ones(2, dtype=torch.complex64),
        "lr": 0.1,
    }


def compare_same(rank: int, world_size: int) -> Any:
    return collectives.compare(same_state())


@pytest.mark.parametrize("size", SIZES)
def test_equal_states_have_one_digest_on_all_ranks_nan_included(run_ranks, size):
    assert run_ranks(size, compare_same) == [collectives.digest_all(same_state())] * size


def compare_with_difference(rank: int, world_size: int, wrong: list[int], name: str) -> Any:
    state = same_state()
    if rank in wrong:
        value = state[name]
        state[name] = value + 1e-7 * (rank + 1) if isinstance(value, torch.Tensor) else value + 1
    return caught(lambda: collectives.compare(state, "before saving", hint="look there"))


@pytest.mark.parametrize(("size", "wrong", "name", "said"), [
    (2, [1], "module.weight", "rank 1 has a different module.weight than rank 0, before saving"),
    (4, [2], "module.phase", "rank 2 has a different module.phase than rank 0, before saving"),
    (4, [1, 3], "module.phase", "ranks 1, 3 have a different module.phase than rank 0, before saving"),
    (4, [0], "lr", "rank 0 has a different lr than rank 1, before saving"),
])  # fmt: skip
def test_a_difference_names_the_tensor_and_the_ranks_that_differ_from_most(
    run_ranks, size, wrong, name, said
):
    for kind, message, hint, exit_code in run_ranks(size, compare_with_difference, wrong, name):
        assert (kind, message, hint, exit_code) == ("RanksDiffer", said, "look there", 1)


def compare_other_shapes(rank: int, world_size: int, how: str) -> Any:
    values = torch.zeros(4)
    states = {
        "dtype": {"a": values.to(torch.int32) if rank else values},
        "shape": {"a": values.reshape(2, 2) if rank else values},
        "missing": {} if rank else {"a": values},
        "order": {"a": values, "b": values} if rank else {"b": values, "a": values},
    }
    return caught(lambda: collectives.compare(states[how], hint="look there"))


@pytest.mark.parametrize("how", ["dtype", "shape", "missing", "order"])
def test_states_with_equal_bytes_differ_by_dtype_shape_names_or_order(run_ranks, how):
    for kind, message, hint, _ in run_ranks(2, compare_other_shapes, how):
        assert (kind, hint) == (RanksDiffer.__name__, "look there")
        assert "different a than" in message or how == "order"


def test_a_digest_depends_on_values_not_on_memory_layout():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert collectives.digest(tensor.t().contiguous().t()) == collectives.digest(tensor)
    assert collectives.digest(torch.arange(8.0)[2:].reshape(2, 3) - 2) == collectives.digest(tensor)
    assert collectives.digest(torch.tensor(0.0)) != collectives.digest(torch.tensor(-0.0))
    plain = torch.tensor([complex(0.0, -1.0)])
    assert collectives.digest(torch.tensor([1j]).conj()) == collectives.digest(plain)


class Pair(NamedTuple):
    name: str
    value: Any


@pytest.mark.parametrize("around", [
    lambda value: value,
    lambda value: [1, value],
    lambda value: {"state": {"GG": [value, None]}},
    lambda value: Pair("lr", (value,)),
    lambda value: sorted({"lr": value, "betas": (0.9, 0.999)}.items()),
], ids=["bare", "a list", "an optimizer's list of matrices", "a named tuple", "settings"])  # fmt: skip
@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.zeros(2000), torch.zeros(2000).index_fill(0, torch.tensor([1000]), 1)),
        (torch.tensor(0.1), torch.tensor(0.100001)),
        (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)),
        (np.zeros(2000), np.eye(1, 2000, 1000)[0]),
        (np.array([1 / 3]), np.array([1 / 3 + 1e-12])),
        (np.array(["a"] * 2000, dtype=object), np.array(["a"] * 1000 + ["b"] * 1000, dtype=object)),
    ],
    ids=[
        "in the middle",
        "by the sixth digit",
        "dtype",
        "array, in the middle",
        "array, last digits",
        "objects",
    ],
)
def test_a_tensor_or_an_array_anywhere_in_a_value_is_compared_whole(around, value, other):
    """Their `repr` has the first and last three values, of four digits."""
    assert collectives.digest(around(value)) != collectives.digest(around(other))
    assert collectives.digest(around(value)) == collectives.digest(around(copy.deepcopy(value)))


def test_a_plain_value_keeps_the_digest_that_checkpoints_hold():
    for value in ([("betas", (0.9, 0.999)), ("lr", 0.1)], {"a": [None, 2]}, "text", (1, "2")):
        assert collectives.digest(value) == hashlib.sha256(repr(value).encode()).digest()


@pytest.mark.parametrize("count", [0, 1])
def test_one_value_or_none_of_any_stride_has_a_digest(count):
    """torch calls them contiguous, and refuses to view them as bytes."""
    odd = torch.empty_strided((count,), (7,)).fill_(3.0)
    assert collectives.digest(odd) == collectives.digest(torch.full((count,), 3.0))
    from_numpy = torch.from_numpy(np.full((4, 6), 3.0, dtype=np.float32)[:count, 2])
    assert collectives.digest(from_numpy) == collectives.digest(odd)


# ---- agreeing ------------------------------------------------------------------------------------------


def agree_on(rank: int, world_size: int, kind: str) -> Any:
    def look() -> Any:
        if kind == "fails" and rank == 1:
            refuse()
        return {"piece": rank if kind == "differs" and rank == 2 else 7}, rank * 10

    found: list[Any] = []
    return caught(lambda: found.append(collectives.agree(look, "in gather", hint="look there"))), found


@pytest.mark.parametrize("size", SIZES)
def test_agree_gives_each_ranks_number_to_all(run_ranks, size):
    assert run_ranks(size, agree_on, "") == [(None, [[rank * 10 for rank in range(size)]])] * size


def test_ranks_that_do_not_agree_all_fail_and_say_why(run_ranks):
    said = "rank 2 has a different piece than rank 0, in gather"
    for error, found in run_ranks(4, agree_on, "differs"):
        assert (error, found) == (("RanksDiffer", said, "look there", 1), [])
    failed = [error for error, _ in run_ranks(4, agree_on, "fails")]
    assert failed.pop(1) == REFUSED
    assert [error[:2] for error in failed] == [("RankFailed", "rank 1 failed: --data: not there")] * 3


def find_the_same_fault(rank: int, world_size: int) -> Any:
    return caught(lambda: collectives.report_once(refuse)), collectives.report_once(lambda: 5)


def test_a_fault_that_every_rank_finds_is_reported_by_rank_0(run_ranks):
    assert run_ranks(4, find_the_same_fault) == [(REFUSED, 5)] + [(FAILED, 5)] * 3


# ---- failing together ----------------------------------------------------------------------------------


def fail_on(rank: int, world_size: int, failing: list[int]) -> Any:
    def block() -> None:
        with collectives.fail_together():
            if rank in failing:
                raise OSError(28, f"disk of rank {rank} is full")

    return caught(block)


@pytest.mark.parametrize("failing", [[0], [2], [1, 3]])
def test_a_block_that_fails_on_some_ranks_fails_on_all_with_the_first_ones_message(run_ranks, failing):
    first, answers = failing[0], run_ranks(4, fail_on, failing)
    assert answers.pop(first)[:2] == ("OSError", f"[Errno 28] disk of rank {first} is full")
    said = f"rank {first} failed: OSError: [Errno 28] disk of rank {first} is full"
    assert [answer[:2] for answer in answers] == [("RankFailed", said)] * 3


def test_a_block_that_fails_nowhere_continues(run_ranks):
    assert run_ranks(2, fail_on, []) == [None, None]


def fail_twice(rank: int, world_size: int) -> Any:
    def block() -> None:
        with collectives.fail_together():
            if rank:
                raise UsageFault(f"rank {rank}", hint="a hint")

    return [caught(block) for _ in range(2)]


def test_ranks_can_fail_together_more_than_once(run_ranks):
    expected = ("RankFailed", "rank 1 failed: rank 1", "a hint", 2)
    first, second, third = run_ranks(3, fail_twice)
    assert first == third == [expected] * 2
    assert second == [("UsageFault", "rank 1", "a hint", 2)] * 2


def test_without_a_process_group_there_is_one_rank():
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    assert collectives.from_rank_zero(lambda: 5) == 5
    assert collectives.gather("x") == ["x"]
    assert collectives.broadcast(lambda: {"a": 1}) == {"a": 1}
    assert collectives.total(torch.tensor([1.5], dtype=torch.float64)).tolist() == [1.5]
    assert collectives.compare({"a": torch.ones(1)}) == collectives.digest_all({"a": torch.ones(1)})
    with pytest.raises(UsageFault, match="not there"), collectives.fail_together():
        refuse()


# ---- rows of all ranks joined by sample ----------------------------------------------------------------


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


@pytest.mark.parametrize(("shares", "samples", "said"), [
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
], ids=str)  # fmt: skip
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
