"""`explain` of the flight recorder's dumps: recorded by gloo, and made as NCCL's; torch's analysis agrees."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.flight_recorder.components.builder import build_db

from ckpttool.errors import CkptToolError
from ckpttool.explaining.flight_recorder import read_dump, read_dumps
from ckpttool.explaining.stalls import Stall, stalls
from tests.ranks.forked import WarmPython
from tests.support.recorder_dumps import RecordedProgram, programs, write_dumps
from tests.support.running import Cli, assert_says

# ---- Recorded by gloo -----------------------------------------------------------------------------------

# Ranks as forks of a process that has imported torch; each runs `work(rank)` and writes both kinds of dumps.
RECORDING = """
import os, time, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d

def step(tensor):
    return dist.all_reduce(tensor, async_op=True)

def work(rank):
    tensor = torch.ones(3, 4)
    dist.all_reduce(tensor)
    {work}

for rank in range({ranks}):
    if not os.fork():
        dist.init_process_group("gloo", store=dist.FileStore("store", {ranks}), rank=rank, world_size={ranks})
        kept = work(rank)
        time.sleep(0.3)
        open(f"fr_trace_rank_{{rank}}", "wb").write(c10d._dump_fr_trace())
        os.makedirs("json", exist_ok=True)
        open(f"json/rank{{rank}}.json", "wb").write(c10d._dump_fr_trace_json())
        time.sleep(1)
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


@pytest.fixture
def recorded(warm_python: WarmPython, here: Path) -> Callable[[str, int], list[Path]]:
    """Return what runs a line on each rank, and returns the dumps."""

    def run(work: str, ranks: int) -> list[Path]:
        code = RECORDING.format(work=work, ranks=ranks)
        done = warm_python.run("-c", code, cwd=here, env={"TORCH_FR_BUFFER_SIZE": "100"})
        assert done.returncode == 0, done.stderr.decode()
        return sorted(here.glob("fr_trace_rank_*"))

    return run


def test_a_rank_that_did_not_come_is_named_with_shapes_and_stacks(
    recorded: Callable[[str, int], list[Path]], cli: Cli
) -> None:
    paths = recorded("return step(tensor) if rank != 1 else None", 3)
    ran = cli("explain", *paths)
    assert ran.code == 0
    assert ran.out.splitlines()[:2] == [
        "missing-rank: rank 1 did not come to all_reduce 2 of group 0 (default_pg), Float [3, 4]",
        "rank 1 waits in no collective; its last was all_reduce 1 of group 0 (default_pg)",
    ]
    assert "waiting for it: ranks 0, 2 in all_reduce 2 of group 0 (default_pg)" in ran.out
    assert "stack of rank 0 in all_reduce, most recent call last:" in ran.out
    for folder in (".", "json"):  # in JSON without stacks
        answer = cli("explain", folder, "--json").json
        assert (answer["kind"], answer["ranks"], answer["waiting"]) == ("missing-rank", [1], [0, 2])


def test_ranks_that_all_came_wait_for_none(recorded: Callable[[str, int], list[Path]], cli: Cli) -> None:
    ran = cli("explain", *recorded("dist.all_reduce(tensor)", 2))
    assert (ran.code, ran.out.splitlines()[0]) == (1, "no rank waits for another, by the dumps of 2 ranks")


# ---- Made as NCCL's are ---------------------------------------------------------------------------------


def judged(folder: Path, made: Sequence[RecordedProgram]) -> list[Stall]:
    return stalls(*read_dumps(write_dumps(folder, made)))


def one(folder: Path, made: Sequence[RecordedProgram]) -> Stall:
    return judged(folder, made)[0]


def by_torch(made: Sequence[RecordedProgram]) -> tuple[set[int], set[str]]:
    """Return the missing ranks, and the kinds of mismatches, by torch's own analysis."""
    details = {
        str(each.rank): {"rank": each.rank, "host_name": "", **copy.deepcopy(each.dump)} for each in made
    }
    options = {
        "verbose": False,
        "just_print_entries": False,
        "allow_incomplete_ranks": True,
        "mismatch_cap": 10,
    }
    logging.disable()
    try:
        found = build_db(details, argparse.Namespace(**options), "2.10").collectives
    finally:
        logging.disable(logging.NOTSET)
    wrong = {
        str(other.type_of_mismatch.state.name)
        for each in found
        for other in (each.mismatch_collectives or {}).values()
        if other.type_of_mismatch
    }
    return {rank for each in found for rank in each.missing_ranks or ()}, wrong


def lacking(made: list[RecordedProgram]) -> None:
    for each in made:
        each.call()
        if each.rank != 2:
            each.call(state="started")


def another_size(made: list[RecordedProgram]) -> None:
    for each in made:
        each.call().call(sizes=(3, 4 + (each.rank == 2)), state="started")


def another_type(made: list[RecordedProgram]) -> None:
    for each in made:
        each.call().call(dtype="Half" if each.rank == 2 else "Float", state="started")


def another_collective(made: list[RecordedProgram]) -> None:
    for each in made:
        each.call().call("broadcast" if each.rank == 2 else "all_reduce", state="started")


@pytest.mark.parametrize(
    ("work", "kind", "said", "torchs"),
    [
        (lacking, "missing-rank", "rank 2 did not come to all_reduce 2", ""),
        (
            another_size,
            "another-size-or-type",
            "rank 2 called all_reduce 2 of group 0 (default_pg), Float [3, 5]",
            "SIZE",
        ),
        (
            another_type,
            "another-size-or-type",
            "rank 2 called all_reduce 2 of group 0 (default_pg), Half [3, 4]",
            "DTYPE",
        ),
        (another_collective, "another-collective", "rank 2 called broadcast 2", "COLLECTIVE_TYPE"),
    ],
)
def test_torchs_own_analysis_says_the_same(
    work: Callable[[list[RecordedProgram]], None], kind: str, said: str, torchs: str, tmp_path: Path
) -> None:
    made = programs(4)
    work(made)
    found = one(tmp_path, made)
    assert (found.kind, found.ranks, found.waiting) == (kind, (2,), (0, 1, 3)) and said in found.message
    missing, wrong = by_torch(made)
    assert missing == ({2} if not torchs else set())
    assert not torchs or any(torchs in each for each in wrong)


def test_a_rank_that_waits_elsewhere_is_not_the_cause(tmp_path: Path) -> None:
    # Rank 3 hangs; rank 1 waits for it in a group of its own, and all others for rank 1.
    made = programs(4, g1=(1, 3))
    for each in made:
        each.call()
    made[1].call(group="1", state="started")
    made[0].call(state="started")
    made[2].call(state="started")
    first, second = judged(tmp_path, made)
    assert (first.ranks, first.waiting) == (
        (3,),
        (1,),
    ) and "rank 3 did not come to all_reduce 1 of group 1" in first.message
    assert "rank 3 waits in no collective" in first.message
    assert (second.ranks, second.waiting) == ((1, 3), (0, 2))


def test_two_ranks_that_wait_for_each_other_are_a_deadlock(tmp_path: Path) -> None:
    made = programs(2, g1=(0, 1))
    made[0].call(group="0", state="started")
    made[1].call(group="1", state="started")
    found = one(tmp_path, made)
    assert found.kind == "deadlock" and found.message.startswith("each waits for another")
    assert "rank 1 waits itself in all_reduce 1 of group 1 (part 1)" in found.message


def test_a_rank_that_never_started_or_was_killed_is_named(tmp_path: Path) -> None:
    made = programs(4)
    for each in made:
        each.call(state="started")
    found = one(tmp_path, made[:3])
    assert (found.kind, found.ranks, found.waiting) == ("no-dump", (3,), (0, 1, 2))
    assert "rank 3 left no dump: it never started or was killed, or its file is not" in found.message
    assert "ranks 0 to 2 in all_reduce 1" in found.message
    assert "ranks 0, 1 in all_reduce 1" in one(tmp_path, made[:2]).message


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02}q\x00(X\x07\x00\x00\x00vers", b"\x80\x02}q\x00."], ids=len
)
def test_a_dump_that_is_empty_cut_short_or_none_counts_as_missing(
    content: bytes, tmp_path: Path, cli: Cli
) -> None:
    made = programs(3)
    for each in made:
        each.call(state="started")
    paths = write_dumps(tmp_path, made)
    Path(paths[1]).write_bytes(content)
    ran = cli("explain", *paths)
    assert ran.code == 0 and ran.out.startswith("no-dump: rank 1 has no dump that can be read: it is ")
    assert cli("explain", paths[1]).code == 3  # none can be read


def test_a_collective_that_all_came_to_and_that_does_not_end_is_the_networks(tmp_path: Path) -> None:
    made = programs(3)
    for each in made:
        each.call().call("_all_gather_base", state="started")
    found = one(tmp_path, made)
    assert (found.kind, found.ranks, found.waiting) == ("not-finished", (), (0, 1, 2))
    made[1].entries[-1]["state"] = "scheduled"
    found = one(tmp_path, made)
    assert (found.kind, found.ranks, found.waiting) == ("not-started", (1,), (0, 2))
    assert "its GPU has not begun it" in found.message


def test_rings_that_begin_at_different_calls_are_compared_where_both_have_some(tmp_path: Path) -> None:
    made = programs(3)
    for each in made:
        for _ in range(20):
            each.call()
        if each.rank:
            each.call(state="started")
        del each.entries[: 4 * each.rank]
    found = one(tmp_path, made)
    assert (found.kind, found.ranks, found.waiting) == ("missing-rank", (0,), (1, 2))
    assert "all_reduce 21" in found.message


def test_a_rank_whose_calls_of_a_group_have_left_the_ring_is_not_blamed(tmp_path: Path) -> None:
    made = programs(2, g1=(0, 1))
    for each in made:
        each.call(group="1").call().call()
    made[0].call(group="1", state="started")
    del made[1].entries[0]
    assert [stall.ranks for stall in judged(tmp_path, made)] != [(1,)]


def test_dumps_taken_one_after_another_blame_nobody_for_what_has_ended(tmp_path: Path) -> None:
    made = programs(2)
    for each in made:
        each.call()
    made[0].call().call()
    assert judged(tmp_path, made) == []


def test_gathers_and_uneven_pieces_may_differ(tmp_path: Path) -> None:
    made = programs(3)
    for each in made:
        each.call("all_gather", sizes=(each.rank + 1,)).call("all_to_all", sizes=(7 * each.rank,))
        each.call("scatter", sizes=(1 + 2 * (each.rank == 0),)).call(sizes=(12,) if each.rank else (3, 4))
    assert judged(tmp_path, made) == []


def test_sends_and_receives_are_paired_by_ranks_of_their_group(tmp_path: Path) -> None:
    made = programs(4, g1=(2, 3))
    for each in made:
        each.call()
    made[2].call("send 0->1", group="1").call("send 0->1", group="1", sizes=(5,), state="started")
    made[3].call("recv 1<-0", group="1")
    found = one(tmp_path, made)
    assert (found.kind, found.ranks, found.waiting) == ("missing-rank", (3,), (2,))
    assert "rank 3 did not receive from rank 2, Float [5]" in found.message
    made[3].call("recv 1<-0", group="1", sizes=(6,), state="started")
    found = one(tmp_path, made)
    assert found.kind == "another-size-or-type" and found.waiting == (2, 3)
    made[3].entries.pop()
    found = one(tmp_path, made[:3])  # rank 3 is gone
    assert "rank 3 did not receive from rank 2, Float [5]: it left no dump" in found.message


def test_ring_exchanges_and_batches_that_end_are_no_stall(tmp_path: Path) -> None:
    made = programs(3)
    for each in made:
        each.numbers_p2p["0"] += 1
        there, back = (each.rank + 1) % 3, (each.rank - 1) % 3
        for name in (f"send {each.rank}->{there}", f"recv {each.rank}<-{back}"):
            each.put(name, (4,), "scheduled", "0", "Float", is_p2p=True)
        each.put("coalesced", (), "completed", "0", "Float", is_p2p=True)
        each.numbers["0"] += 1
        for _ in range(2):
            each.put("all_gather_into_tensor", (4,), "scheduled", "0", "Float", is_p2p=False)
        each.put("ALLGATHER_coalesced", (), "completed", "0", "Float", is_p2p=False)
        each.call("allreduce_coalesced")
    assert judged(tmp_path, made) == []
    made[1].entries[2]["state"] = "started"  # the batch of one rank has not ended
    assert judged(tmp_path, made) == []  # each send has its receive
    made[1].entries[-2]["state"] = "started"
    assert one(tmp_path, made).kind == "not-finished"


def test_another_version_is_refused_by_name_and_a_rank_twice(tmp_path: Path, cli: Cli) -> None:
    made = programs(2)
    (path, other) = write_dumps(tmp_path, made)
    Path(path).write_bytes(pickle.dumps({**made[0].dump, "version": "1.5"}, protocol=2))
    with pytest.raises(CkptToolError, match=r"is of version 1.5 of the recorder"):
        read_dump(path)
    twice = tmp_path / "copy_1"
    twice.write_bytes(Path(other).read_bytes())
    assert "is a second dump of rank 1" in cli("explain", other, twice).err
    unnamed = tmp_path / "trace.pkl"
    unnamed.write_bytes(Path(other).read_bytes())
    assert "its name does not end in a rank" in cli("explain", unnamed).err


def test_a_folder_without_dumps_is_named_and_folders_in_it_are_none(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "version_1").mkdir()
    ran = cli("explain", tmp_path)
    assert_says(ran, 2, f"{tmp_path}: no file in it is named as the dump of a rank", "fr_trace_rank_0")
    write_dumps(tmp_path, programs(2))
    ran = cli("explain", tmp_path)
    assert ran.code == 1 and ran.out == "no rank waits for another, by the dumps of 2 ranks\n"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("change", ["entries", "version", "pg_config", "inside"])
def test_nothing_that_a_dump_names_is_run(change: str, cli: Cli) -> None:
    dump = programs(1)[0].call(state="started").dump
    if change == "inside":
        dump["entries"][0] |= {"profiling_name": Evil(), "frames": Evil()}
    else:
        dump[change] = Evil()
    Path("fr_trace_rank_0").write_bytes(pickle.dumps(dump))
    assert cli("explain", "fr_trace_rank_0").code == 3
    assert not Path("evil").exists()


def values() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=3)
    return st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    )


@given(st.data())
def test_any_odd_value_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    made = programs(2)
    for each in made:
        each.call().call("send 0->1" if each.rank == 0 else "recv 1<-0").call(state="started")
    dump = copy.deepcopy(made[0].dump)
    where = data.draw(
        st.sampled_from([dump, dump["pg_config"]["0"], *dump["entries"], dump["entries"][0]["frames"][0]])
    )
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(values())
    folder = tmp_path_factory.mktemp("odd")
    paths = write_dumps(folder, made)
    Path(paths[0]).write_bytes(pickle.dumps(dump))
    for stall in stalls(*read_dumps(paths)):
        assert isinstance(stall.message, str)


def doubled(depth: int) -> list[Any]:
    value: list[Any] = ["text"]
    for _ in range(depth):
        value = [value, value]
    return value


SHAPE = [1] * 50_000


@pytest.mark.parametrize(
    "odd",
    [
        {"collective_seq_id": 10**15},
        {"collective_seq_id": 10**5000},
        {"collective_seq_id": float("inf")},
        {"state": doubled(40)},
        {"frames": [{"filename": doubled(40), "line": 10**5000, "name": "step"}]},
        {"frames": 5},
        {"profiling_name": doubled(40)},
        {"process_group": ("0", doubled(40))},
        {"input_sizes": [SHAPE] * len(SHAPE)},
        {"input_sizes": [[10**4000] * 20_000]},
    ],
    ids=lambda odd: next(iter(odd)),
)
@pytest.mark.timeout(60)
def test_a_small_dump_takes_neither_endless_time_nor_memory(odd: dict[str, Any], tmp_path: Path) -> None:
    made = [each.call().call(state="started") for each in programs(2)]
    for each in made:
        each.entries[-1] |= odd
    try:
        found = stalls(*read_dumps(write_dumps(tmp_path, made)))
    except CkptToolError as fault:
        assert "an entry is not as torch writes it" in str(fault)
    else:
        assert [stall.kind for stall in found] == ["not-finished"]


def test_ranks_nested_too_deep_are_refused(tmp_path: Path) -> None:
    made = programs(1)
    path = tmp_path / "fr_trace_rank_0"
    path.write_bytes(pickle.dumps({**made[0].dump, "pg_config": {"0": {"ranks": "[" * 100_000}}}))
    with pytest.raises(CkptToolError, match="an entry is not as torch writes it"):
        read_dump(str(path))


@pytest.mark.parametrize("ranks", [2, 512])
def test_hundreds_of_ranks_are_read_in_about_a_second(ranks: int, tmp_path: Path) -> None:
    made = programs(ranks)
    for each in made:
        for _ in range(20):
            each.call()
        if each.rank != 1:
            each.call(state="started")
    paths = write_dumps(tmp_path, made)
    started = time.process_time()
    (found,) = stalls(*read_dumps(paths))
    assert time.process_time() - started < 10
    assert found.ranks == (1,) and len(found.waiting) == ranks - 1
    assert ranks == 2 or "waiting for it: ranks 0, 2 to 511 in" in found.message


def test_json_as_torch_writes_it_says_the_same(tmp_path: Path) -> None:
    made = programs(3)
    lacking(made)
    paths = []
    for each in made:
        dump = json.loads(json.dumps(each.dump))
        for entry in dump["entries"]:
            del entry["frames"]
        paths.append(str(tmp_path / f"rank{each.rank}.json"))
        Path(paths[-1]).write_text(json.dumps(dump))
    (found,) = stalls(*read_dumps(paths))
    assert (found.kind, found.ranks) == ("missing-rank", (2,)) and "stack of" not in found.message
