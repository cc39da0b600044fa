"""A short form of `python -m tests.fault`, and proof that it finds holes: each was put in on purpose."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import click
import pytest

from ckpttool.core.cli import group
from tests.fault import inputs
from tests.fault.holes import HOLES
from tests.fault.judge import FLUSHES, RENAMES, WRITES, Bench
from tests.fault.scenarios import SCENARIOS, Scenario
from tests.fault.supervised import KILL, SHORT, TERM, Fault, run
from tests.fault.trials import place_for_runs
from tests.fault.trying import try_scenario

pytestmark = pytest.mark.long


def named(name: str) -> Scenario:
    return next(each for each in SCENARIOS if each.name == name)


OVER = named("strip-prefix, .pt over .safetensors")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all inputs; skips where the kernel lets nobody hold system calls."""
    with tempfile.TemporaryDirectory(dir=place_for_runs()) as folder:
        try:
            run(lambda: 0, Path(folder))
        except RuntimeError as error:
            pytest.skip(str(error))
        made = Path(folder).resolve() / "inputs"
        made.mkdir()
        inputs.write(made)
        yield made


SOME = [OVER.name, "strip-prefix, .safetensors in place", "rename-keys, shards in place"]
SOME += ["gather-metrics, two ranks to JSON", "the trainer's save, last, best and numbered"]


@pytest.mark.parametrize("name", SOME)
def test_every_output_is_old_or_new_whatever_fails(name: str, given: Path) -> None:
    """Some faults of some commands, drawn; `make fault` tries them all."""
    place = given.parent / name.replace("/", " ")
    tried = try_scenario(named(name), given, place, seed=1, most=6, until=time.monotonic() + 30)
    assert tried.wrong == []
    assert tried.held.total() > 0
    if named(name).wanted:
        inputs.check(place / "done" / named(name).targets[0], named(name).wanted or "")


UNFLUSHED = "gets its name before it is flushed"
FOUND: dict[str, tuple[Collection[str], Collection[str], tuple[str, ...]]] = {
    "remove-fsync": ((), (), (f"model {UNFLUSHED}", "the new name model is not flushed at the end")),
    "flush-after-the-rename": ((), (), (UNFLUSHED,)),
    "follow-links": ((), (), ("outside/theirs.txt is gone",)),
    # By the judge, or by the command itself where the header is cut: which write is first is up to threads.
    "trust-short-writes": (WRITES, [SHORT], ("the output is not that of one|exit code 3, not 0",)),
    "leave-temporaries": (WRITES, ["ENOSPC"], (r"leaves out/\.model\.safetensors\.",)),
    "write-in-place": (WRITES, [KILL], ("model is written where it lies", "model is neither old nor new")),
    "swallow-errors": (FLUSHES, ["EIO"], (UNFLUSHED,)),
    "": ({*WRITES, *FLUSHES, *RENAMES}, (SHORT, "ENOSPC", "EIO", KILL, TERM), ()),
}
"""By hole: the calls that fail, and how, and what is found; nothing without a hole."""


@pytest.mark.parametrize("hole", [*HOLES, ""], ids=lambda hole: hole or "none")
def test_a_hole_is_found_and_nothing_without_one(hole: str, given: Path) -> None:
    calls, ways, wanted = FOUND[hole]
    bench = Bench(OVER, given, given.parent / f"{hole or 'whole'}", HOLES.get(hole))
    counts = Counter(seen.call.name for seen in bench.dry.seen)
    made = [(name, nth) for name in calls for nth in {1, counts[name]} if counts[name]]
    faults = [Fault(*each, how) for each in made for how in ways]
    found = [*bench.wrong, *(wrong for fault in faults for wrong in bench.try_fault(fault).wrong)]
    said = "\n".join(found).replace("out/model.safetensors", "model")
    assert [words for words in wanted if not re.search(words, said)] == [], said
    assert bool(found) == bool(hole)


def test_a_call_is_answered_as_asked_in_any_thread(given: Path) -> None:
    """The second of two writes fails, whichever thread makes it."""

    def program() -> int:
        from concurrent.futures import ThreadPoolExecutor

        def write(name: str) -> int:
            with open(name, "wb") as file:
                return file.write(b"1234")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write, ["a", "b"]))
        return 0

    folder = given.parent / "threads"
    folder.mkdir()
    assert run(program, folder).code == 0
    ran = run(program, folder, Fault("write", 2, "ENOSPC"))
    assert (ran.code, ran.is_reached) == (1, True)
    assert "No space left on device" in ran.err
    assert sorted(path.stat().st_size for path in folder.iterdir()) == [0, 4]


def test_a_shortened_call_moves_half_of_the_bytes(given: Path) -> None:
    folder = given.parent / "half"
    folder.mkdir()
    (folder / "in").write_bytes(bytes(range(100)))

    def program() -> int:
        source, target = os.open("in", os.O_RDONLY), os.open("out", os.O_RDWR | os.O_CREAT, 0o600)
        buffers = [bytearray(10), bytearray(20)]
        done = [
            len(os.read(source, 10)),
            len(os.pread(source, 10, 50)),
            os.preadv(source, buffers, 60),
            os.write(target, b"0123456789"),
            os.pwrite(target, b"abcdefghij", 20),
            os.writev(target, [b"ABCD", b"EFGH"]),
            os.copy_file_range(source, target, 8, 40, 60),
            os.sendfile(target, source, 80, 6),
        ]
        print(done, bytes(buffers[0] + buffers[1]), os.pread(target, 100, 0))
        return 0

    full = [10, 10, 30, 10, 10, 8, 8, 6]
    assert run(program, folder).out.startswith(f"{full}".encode())
    names = ("read", "pread64", "preadv", "write", "pwrite64", "writev", "copy_file_range", "sendfile")
    for at, name in enumerate(names):
        (folder / "out").unlink()
        ran = run(program, folder, Fault(name, 1, SHORT))
        if not ran.is_reached and name == "preadv":
            (folder / "out").unlink()
            ran = run(program, folder, Fault("preadv2", 1, SHORT))
        assert ran.is_reached, name
        done = [int(number) for number in ran.out[1 : ran.out.index(b"]")].split(b",")]
        assert done == [size // 2 if index == at else size for index, size in enumerate(full)], name


def test_every_command_that_writes_a_checkpoint_is_tried() -> None:
    writing = {
        name
        for name, command in group.commands.items()
        if any(isinstance(each, click.Argument) and each.name == "output" for each in command.params)
    }
    tried = {shlex.split(each.words)[0] for each in SCENARIOS if each.words}
    assert writing - tried == set()
