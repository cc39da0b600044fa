"""Commands that only read, in parts: text, JSON and exit code of one process, whoever found what."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.checkpoint import checksums
from ckpttool.core.files import copying, digest, findings, parts
from ckpttool.core.files.meeting import PLAN, folder_of
from ckpttool.diffing import compare_values
from ckpttool.verifying import verify
from tests.support.range_server import RangeServer
from tests.support.running import Cli, Ran, assert_says

PATCHED = [(copying, "TINY"), (digest, "PIECE"), (compare_values, "PIECE"), (verify, "PIECE")]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files of some kilobytes consist of many pieces."""
    for module, name in PATCHED:
        monkeypatch.setattr(module, name, 1 << 8 if name == "TINY" else 1 << 12)
    monkeypatch.setattr(checksums, "PIECE", 1 << 12)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def flip(path: Path, at: float, into: Path) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1
    into.write_bytes(content)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of every kind, equal, differing and damaged ones."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    state = {f"{number}.weight": torch.randn(64, 64 + number) for number in range(5)}
    state |= {"tiny": torch.ones(3), "none": torch.ones(0), "half": torch.randn(999).half()}
    state |= {"nan": torch.full((3000,), float("nan")), "whole": torch.arange(20_000)}
    state |= {"complex": torch.randn(900, dtype=torch.complex64), "bool": torch.ones(5000).bool()}
    state["view"], state["tied"] = state["0.weight"].t()[3:7], state["1.weight"]
    torch.save({"state_dict": state, "epoch": 3, "other": torch.randn(5000)}, folder / "in.pt")
    other = {**state, "2.weight": state["2.weight"] + 1e-4, "complex": state["complex"] * 2}
    other |= {"view": state["view"] * 3, "half": state["half"].float(), "whole": state["whole"] + 1}
    other |= {"tiny": torch.zeros(3), "new": torch.ones(4000)}
    torch.save({"state_dict": other, "epoch": 4, "other": torch.randn(5000)}, folder / "other.pt")
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    plain = {name: tensor.contiguous().clone() for name, tensor in state.items() if name != "complex"}
    save_file(plain, folder / "plain.safetensors")
    tuned = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in plain.items()}
    save_file(tuned, folder / "tuned.safetensors")
    ckpttool.convert(folder / "plain.safetensors", f"{folder}/shards/", shard_size=30_000)
    ckpttool.delta(folder / "plain.safetensors", folder / "tuned.safetensors", folder / "d.safetensors")
    with ckpttool.open(folder / "plain.safetensors") as checkpoint:
        ckpttool.split(checkpoint, folder / "ranks", 3)
        ckpttool.save(checkpoint, f"{folder}/dcp", to="dcp")
    for number in range(6):
        flip(folder / "in.pt", 0.1 + number / 7, folder / f"damaged{number}.pt")
    flip(folder / "d.safetensors", 0.9, folder / "e.safetensors")
    (folder / "cut.pt").write_bytes((folder / "in.pt").read_bytes()[:90_000])
    (folder / "cut.safetensors").write_bytes((folder / "plain.safetensors").read_bytes()[:-9])
    (folder / "evil.pkl").write_bytes(pickle.dumps({"a": [Evil()] * 3}))
    (folder / "page.pt").write_text("<!DOCTYPE html>")
    return folder


COMMANDS = {
    "digest": "digest in.pt",
    "digest of each format": "digest old.pt plain.safetensors shards dcp ranks d.safetensors",
    "digest of one that is damaged": "digest damaged3.pt",
    "digest of one cut short": "digest cut.pt",
    "digest of none": "digest missing.pt",
    "digest of no state": "digest in.pt --state model",
    "digest without checksums": "digest damaged3.pt --no-verify",
    "verify": "verify in.pt",
    "verify -q": "verify in.pt -q",
    "verify each format": "verify old.pt plain.safetensors shards dcp ranks d.safetensors",
    "verify finite": "verify in.pt --finite --no-code",
    "verify against": "verify shards --against in.pt",
    "verify against its base": "verify d.safetensors --against plain.safetensors",
    "verify damaged": "verify damaged0.pt damaged1.pt damaged2.pt damaged3.pt damaged4.pt damaged5.pt",
    "verify against what is damaged": "verify in.pt --against damaged3.pt",
    "verify a damaged delta": "verify e.safetensors",
    "verify cut short": "verify cut.safetensors",
    "verify code": "verify evil.pkl --no-code",
    "diff": "diff in.pt other.pt",
    "diff -v": "diff in.pt other.pt -v",
    "diff within": "diff in.pt other.pt --rtol 1e-3 --atol 1e-3 --sort size",
    "diff of formats": "diff dcp ranks",
    "diff of all tensors": "diff plain.safetensors tuned.safetensors",
    "diff of one and itself": "diff in.pt in.pt",
    "diff with a delta": "diff shards d.safetensors",
    "diff of damage": "diff in.pt damaged4.pt",
    "diff of damage, read all the same": "diff in.pt damaged4.pt --no-verify",
    "scan": "scan .",
    "scan allowed": "scan evil.pkl in.pt missing.pt --allow posix.system",
    "scan sarif": "scan . --sarif",
}


@pytest.fixture
def meeting(tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder where parts meet, among the inputs."""
    monkeypatch.chdir(inputs)
    yield tmp_path / "meeting"


def in_parts(cli: Cli, words: str, meeting: Path, count: int, *more: str) -> Ran:
    """Do all parts in some order, and return what the last one has printed; no other prints a result."""
    said = Ran(-1, "", "")
    for place, number in enumerate(random.Random(count).sample(range(1, count + 1), count), 1):
        part = ["--part", f"{number}/{count}", "--parts-in", str(meeting)]
        said = cli(*words.split(), *part, *more)
        if place < count and said.code != 0:
            assert said.out == cli(*words.split(), *more).out  # nothing could be read
        elif place < count:
            assert f"{number}/{count}" in said.out or ("-q" in words.split() or "--json" not in more), said
    assert not meeting.exists() or os.listdir(meeting) == []
    return said


def pairs() -> Iterator[Any]:
    """Yield each command with each number of parts; half of them in `make long` alone."""
    for place, (name, words) in enumerate(COMMANDS.items()):
        for count in (1, 2, 3, 7):
            is_usual = (
                name in ("digest", "verify against", "diff", "scan") or count in ((1, 3), (2, 7))[place % 2]
            )
            marks = () if is_usual else pytest.mark.long
            yield pytest.param(words, count, id=f"{name}, {count}", marks=marks)


@pytest.mark.parametrize(("words", "count"), [*pairs()])
def test_the_result_is_that_of_one_process(words: str, count: int, meeting: Path, cli: Cli) -> None:
    more = [] if "sarif" in words or count == 3 else ["--json"]
    alone = cli(*words.split(), *more)
    assert in_parts(cli, words, meeting, count, *more) == alone


def test_a_page_is_written_by_the_last_part_alone(meeting: Path, cli: Cli, tmp_path: Path) -> None:
    alone, page = tmp_path / "alone.html", tmp_path / "page.html"
    ran = cli("diff", "in.pt", "other.pt", "--html", alone)
    for number in (2, 1):
        assert not page.exists()
        last = cli(
            *("diff", "in.pt", "other.pt", "--html", page, "--part", f"{number}/2", "--parts-in", meeting)
        )
    assert (last.code, last.out) == (ran.code, ran.out)
    assert page.read_text() == alone.read_text()


TYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
SHAPES = st.lists(st.integers(0, 50), max_size=3)
STATES = st.lists(st.tuples(st.sampled_from(TYPES), SHAPES, st.integers(0, 2)), max_size=7)
READERS = [
    "digest a.pt",
    "verify a.pt --against b.pt",
    "verify b.pt --finite",
    "diff a.pt b.pt",
    "diff b.pt a.pt --atol 0.5",
    "scan .",
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(
    tensors=STATES,
    count=st.sampled_from([1, 2, 3, 7]),
    words=st.sampled_from(READERS),
    at=st.none() | st.floats(0, 0.99),
)
def test_any_checkpoint_in_any_number_of_parts(
    tensors: list[tuple[torch.dtype, list[int], int]],
    count: int,
    words: str,
    at: float | None,
    tmp_path_factory: Any,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    state = {f"t{n}": torch.ones(shape, dtype=dtype) * n for n, (dtype, shape, _) in enumerate(tensors)}
    other = {f"t{n}": state[f"t{n}"] + change for n, (_, _, change) in enumerate(tensors)}
    torch.save(state, folder / "a.pt")
    torch.save(other, folder / "b.pt")
    if at is not None:
        flip(folder / "b.pt", at, folder / "b.pt")
    monkeypatch.chdir(folder)
    alone = cli(*words.split(), "--json")
    assert in_parts(cli, words, folder.parent / f"{folder.name}-meeting", count, "--json") == alone


# What the last part reads, and what the others


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two checkpoints that differ in one place, a tensor of which lies in all parts."""
    folder = tmp_path_factory.mktemp("large")
    state = {"w": torch.randn(3_000_000), **{f"{n}.w": torch.randn(400_000) for n in range(8)}}
    torch.save(state, folder / "a.pt")
    state["w"][1000] += 1
    torch.save(state, folder / "b.pt")
    save_file(state, folder / "b.safetensors")
    return folder


@pytest.mark.parametrize("words", ["digest {}/a.pt", "verify {}/b.safetensors", "diff {0}/a.pt {0}/b.pt"])
def test_a_part_asks_a_server_for_its_own_bytes_and_whoever_joins_for_few(
    words: str, large: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in PATCHED[1:]:
        monkeypatch.setattr(module, name, 1 << 18)
    place, read = ("--parts-in", tmp_path / "meeting", "--json"), list[int]()
    with RangeServer(large) as server:
        words = words.format(server.url)
        alone = cli(*words.split(), "--json")
        with monkeypatch.context() as patch:  # the last part ends before it can join
            patch.setattr(parts.OutputParts, "waiting", lambda self: [parts.OutputPart(3, 3)])
            for number in (1, 2, 3):
                read.append(cli(*words.split(), "--part", f"{number}/3", *place).json["bytes_read"])
        ran = cli("finish", tmp_path / "meeting", "--json")
    whole = alone.json["bytes_read"]
    assert {**ran.json, "requests": 0, "bytes_read": 0} == {**alone.json, "requests": 0, "bytes_read": 0}
    # The norms of a tensor need what is the same too, which no part knows that finds no difference.
    most = 0.3 if words.startswith("diff") else 0.05
    assert max(read) < 0.45 * whole and ran.json["bytes_read"] < most * whole


# What is refused


def part(number: int, meeting: Path, count: int = 2) -> list[str]:
    return ["--part", f"{number}/{count}", "--parts-in", str(meeting)]


@pytest.mark.parametrize("given", ["0/4", "5/4", "4", "a/b", ""])
def test_what_is_no_part_is_refused(given: str, meeting: Path, cli: Cli) -> None:
    ran = cli("digest", "in.pt", "--part", given, "--parts-in", meeting)
    assert_says(ran, 2, f"'{given}' is not a part", "--part 3/16")
    assert not meeting.exists()


def test_parts_need_a_place_and_a_place_parts(meeting: Path, cli: Cli) -> None:
    assert_says(cli("verify", "in.pt", "--part", "1/2"), 2, "no output says where", "--parts-in FOLDER")
    assert_says(cli("verify", "in.pt", "--parts-in", meeting), 2, "say with --part I/N which one this is")
    for words in (["digest", "-"], ["verify", "in.pt", "--against", "-"], ["scan", "in.pt", "-"]):
        assert_says(cli(*words, *part(1, meeting)), 2, "only one process can read stdin", "leave out --part")
    assert_says(cli("finish", meeting), 2, "no part of it is here")
    ran = cli("digest", "in.pt", "--part", "1/2", "--parts-in", "s3://bucket/meeting")
    assert_says(ran, 2, "meet in no URL", "name a folder")
    (meeting.parent / "file").write_text("")
    assert_says(cli("digest", "in.pt", *part(1, meeting.parent / "file")), 3, "file")
    assert not meeting.exists()


OTHERS = {
    "another number of parts": ("digest in.pt --part 2/3", "number of parts"),
    "another command": ("verify in.pt --part 2/2", "command"),
    "another flag": ("digest in.pt --no-verify --part 2/2", "command"),
    "another input": ("digest old.pt --part 2/2", "command"),
}


@pytest.mark.parametrize(("words", "what"), OTHERS.values(), ids=OTHERS)
def test_a_part_of_another_plan_is_refused(words: str, what: str, meeting: Path, cli: Cli) -> None:
    assert cli("digest", "in.pt", *part(1, meeting)).code == 0
    ran = cli(*words.split(), "--parts-in", meeting)
    assert_says(ran, 2, f"{meeting}: parts of another plan meet here: the {what} differs", "rm -r")
    ran = cli("digest", "in.pt", *part(2, meeting))
    assert ran == cli("digest", "in.pt")


def test_another_version_of_ckpttool_is_refused(
    meeting: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("digest", "in.pt", *part(1, meeting)).code == 0
    monkeypatch.setattr("ckpttool.core.cli.joined.__version__", "99")
    assert_says(cli("digest", "in.pt", *part(2, meeting)), 2, "version of ckpttool differs")


@pytest.mark.parametrize(
    "words", ["digest a.pt", "verify a.pt", "diff a.pt b.pt", "verify b.pt --against a.pt"]
)
def test_an_input_that_changed_between_two_parts_is_named(words: str, tmp_path: Path, cli: Cli) -> None:
    paths = [tmp_path / word if word.endswith(".pt") else word for word in words.split()]
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(5000)}, tmp_path / name)
    assert cli(*paths, *part(1, tmp_path / "m")).code == 0
    torch.save({"w": torch.zeros(5000)}, tmp_path / "a.pt")
    assert_says(cli(*paths, *part(2, tmp_path / "m")), 2, f"input {tmp_path}/a.pt differs")


@pytest.mark.parametrize("words", ["digest a.pt b.pt", "verify a.pt b.pt", "scan a.pt b.pt", "scan ."])
def test_of_several_inputs_one_that_changed_is_read_again(
    words: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found of it counts no more, as the whole plan is not known when the first one is read."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(5000)}, name)
    assert cli(*words.split(), *part(1, tmp_path / ".." / "m")).code == 0
    torch.save({"w": torch.zeros(5000), "evil": Evil()}, "b.pt")
    last = cli(*words.split(), *part(2, tmp_path / ".." / "m"))
    assert last == cli(*words.split())


def test_a_server_that_states_no_version_is_refused(inputs: Path, tmp_path: Path, cli: Cli) -> None:
    with RangeServer(inputs) as server:
        server.etag = ""
        for words in (["digest", f"{server.url}/in.pt"], ["scan", f"{server.url}/in.pt"]):
            ran = cli(*words, *part(1, tmp_path / words[0]))
            assert_says(ran, 2, "states no version", "leave out --part")


def changed(there: Path, change: Callable[[Any], object]) -> None:
    said = json.loads((there / "1-of-2.json").read_text())
    change(said["seen"])
    (there / "1-of-2.json").write_text(json.dumps(said))


HARMS: dict[str, Callable[[Path], object]] = {
    "a record cut short": lambda there: (there / "1-of-2.json").write_text('{"files"'),
    "a record of nothing": lambda there: changed(there, lambda seen: seen.update(found=3)),
    "a record of less": lambda there: changed(there, lambda seen: seen.pop("hash")),
    "another finding": lambda there: changed(
        there, lambda seen: seen["found"].update({next(iter(seen["found"])): "00"})
    ),
    "a finding less": lambda there: changed(there, lambda seen: seen["found"].popitem()),
    "a plan that is none": lambda there: (there / PLAN).write_text("[]"),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_record_that_was_tampered_with_is_none(
    harm: Callable[[Path], None], meeting: Path, cli: Cli
) -> None:
    assert cli("digest", "in.pt", *part(1, meeting)).code == 0
    harm(Path(folder_of(str(meeting / parts.RESULT))))
    ran = cli("digest", "in.pt", *part(2, meeting))
    assert ran.code == 3 and ran.out == "" and "rm -r" in ran.err, ran


def test_findings_that_make_no_sense_are_made_again(
    meeting: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a later version, or of somebody who also wrote the hash anew."""
    for words in ("digest in.pt", "verify in.pt", "diff in.pt other.pt", "scan ."):
        with monkeypatch.context() as patch:
            patch.setattr(findings.Findings, "_told", nonsense)
            assert cli(*words.split(), *part(1, meeting)).code == 0
        assert cli(*words.split(), *part(2, meeting)) == cli(*words.split())


def nonsense(self: Any, *, joined: bool = False) -> dict[str, object]:
    sums = {key: [{"rows": 3, "done": [[]]}, 7] for key in self._sums}
    found = {"found": {key: {"x": []} for key in self._known}, "sums": sums}
    return {**found, "hash": findings._hash(json.dumps(found))}


# Parts that are done twice, late, or not at all


def test_a_part_that_is_missing_is_named_by_finish(meeting: Path, cli: Cli) -> None:
    words = ("verify", "in.pt", "--against", "other.pt")
    assert cli(*words, *part(2, meeting, 3)).code == 0
    assert_says(cli("finish", meeting), 1, f"error: {meeting}: lacks parts 1/3, 3/3", "--part 1/3")
    assert cli(*words, *part(1, meeting, 3)).code == 0
    with pytest.MonkeyPatch.context() as patch:  # the last part ends before it can join
        patch.setattr(parts.OutputParts, "waiting", lambda _: [parts.OutputPart(1, 2)])
        assert cli(*words, *part(3, meeting, 3)).code == 0
    alone = cli(*words, "--json")
    ran = cli("finish", meeting, "--json")
    assert (ran.out, ran.code) == (alone.out, alone.code) and alone.code == 1
    assert_says(cli("finish", meeting), 2, "no part of it is here")


def test_a_part_that_is_done_again_reads_nothing(
    meeting: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert cli("verify", "in.pt", *part(1, meeting)).code == 0
        monkeypatch.setattr(verify, "count_non_finite", None)  # which would be called
    monkeypatch.undo()
    monkeypatch.chdir(meeting.parent)
    assert os.listdir(meeting) == [".result.ckpttool.parts"]


def test_a_part_that_was_stopped_goes_on_where_it_was(
    meeting: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = cli("digest", "in.pt")
    begun, hashed, original = [0], [0], digest._hash

    def stopped(chunks: Any) -> bytes:
        if begun[0] == 5:
            raise KeyboardInterrupt
        begun[0] += 1
        return original(chunks)

    def counted(chunks: Any) -> bytes:
        hashed[0] += 1
        return original(chunks)

    with monkeypatch.context() as patch:
        patch.setattr(findings, "NOTED_AFTER", 0)
        patch.setattr(findings, "SHARE", 0)
        patch.setattr(digest, "_hash", stopped)
        assert cli("digest", "in.pt", *part(1, meeting)).code == 130
    monkeypatch.setattr(digest, "_hash", counted)
    assert cli("digest", "in.pt", *part(1, meeting)).code == 0
    all_of_part, hashed[0] = hashed[0] + 5, 0
    assert cli("digest", "in.pt", *part(2, meeting)) == alone
    assert abs(all_of_part - hashed[0]) < 15 and all_of_part > 10


def started(words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckpttool", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_parts_at_once_and_twice_print_nothing_but_the_result(large: Path, tmp_path: Path) -> None:
    words = ["diff", str(large / "a.pt"), str(large / "b.safetensors")]
    running = [started([*words, *part(number, tmp_path / "m", 3)]) for number in (1, 2, 3, 1, 2, 3)]
    said = [each.communicate(timeout=120) for each in running]
    results = [out for out, _ in said if out]  # of two rounds, if those that come late begin another
    assert 1 <= len(results) <= 2 and b"differ: 1 tensor changed" in results[0] == results[-1], said
    assert sorted(each.returncode for each in running) == [0] * (6 - len(results)) + [1] * len(results), said


def test_no_kill_of_a_part_changes_the_result(large: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    words = ["verify", str(large / "a.pt"), "--against", str(large / "b.pt"), "--json"]
    for _ in range(2):
        each = started([*words, *part(chance.randint(1, 2), tmp_path / "m", 3)])
        time.sleep(chance.uniform(0.1, 0.5))
        each.send_signal(signal.SIGKILL)
        each.communicate()
    last = [
        started([*words, *part(number, tmp_path / "m", 3)]).communicate(timeout=60) for number in (1, 2, 3)
    ]
    assert last[-1] == started(words).communicate(timeout=60)


# Engines


def test_ranks_of_torchrun_print_one_result(large: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "ckpttool", "verify", str(large / "a.pt"), "--against", str(large / "b.safetensors")]
    ran = subprocess.run(
        [*torchrun, *words, "--json"],
        capture_output=True,
        timeout=120,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    out, _ = started([*words[2:], "--json"]).communicate(timeout=60)
    assert out.decode() in ran.stdout and ran.stdout.count('"problems"') == 1, ran
    assert '"waiting"' in ran.stdout and ran.returncode == 1  # some value differs
    assert not [*tmp_path.glob("ckpttool-*")]


def test_ranks_of_several_machines_need_a_place_and_rank_0_reads_alone_else(
    meeting: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = cli("digest", "in.pt")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        for module in ("options", "joined"):
            monkeypatch.setattr(f"ckpttool.core.cli.{module}.rank_of_torchrun", lambda rank=rank: (rank, 2))
        ran = cli("digest", "in.pt")
        assert (ran.out, ran.code) == (alone.out * (rank == 0), 0)
        ran = cli("digest", "in.pt", "--parts-in", meeting)
        assert (ran.out, ran.code) == (alone.out * (rank == 0), 0)
    assert os.listdir(meeting) == []


def test_a_plan_in_python_has_readers_too(large: Path, tmp_path: Path) -> None:
    plan = ckpttool.plan("digest", str(large / "a.pt"), parts_in=str(tmp_path / "m"))
    with ProcessPoolExecutor(2) as pool:
        results = [*pool.map(methodcaller("write"), plan.parts(3))]
    out, _ = started(["digest", str(large / "a.pt"), "-q"]).communicate(timeout=60)
    assert plan.finish(results)["digest"] == out.decode().strip()
