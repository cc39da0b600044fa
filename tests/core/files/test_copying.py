"""Bytes copied and computed into a file in blocks, and the descriptors that they are read from."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from ckpttool.core import system
from ckpttool.core.files import copying, threads
from ckpttool.core.files.commit import open_source_descriptor
from ckpttool.core.files.copying import DryOutput, Output, settle_together
from ckpttool.core.files.threads import NAME
from ckpttool.core.tensors.ref import LARGEST, ByteRange, Computed, Source
from ckpttool.errors import CkptToolError, Damaged, Unreadable

CONTENT = bytes(i * 7 % 251 for i in range(300_000))


@pytest.fixture(autouse=True, params=["two threads", "one core", "large blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> None:
    """Blocks of many sizes, moved by threads or by none."""
    if request.param != "large blocks":
        for module in (copying, threads):
            monkeypatch.setattr(module, "BUFFER", 10_000)
        monkeypatch.setattr(copying, "SMALL", 5_000)
    count = 1 if request.param == "one core" else 2
    monkeypatch.setattr(threads, "cores", lambda most: min(count, most))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "source").write_bytes(CONTENT)
    return Source("source", os.open(tmp_path / "source", os.O_RDONLY))


def copied(source: Source, path: Path, progress: Callable[[int], object] = lambda n: None) -> bytes:
    """Two ranges copied between bytes that were written, as a format does it."""
    with open(path, "w+b") as file, Output(file, progress) as out:
        out.write(b"head")
        out.copy(ByteRange(source, 1000, 200_000))
        out.write(b"middle")
        out.copy(ByteRange(source, 0, 0))
        out.copy(ByteRange(source, 5, 3))
        out.write(b"tail")
        assert out.position == 4 + 200_000 + 6 + 3 + 4
    return path.read_bytes()


EXPECTED = b"head" + CONTENT[1000:201_000] + b"middle" + CONTENT[5:8] + b"tail"


def test_what_is_best_computed_together_is(tmp_path: Path) -> None:
    made = dict[int, int]()

    def fill(start: int, out: memoryview) -> None:
        made[start] = len(out)
        out[:] = (start >> 20).to_bytes(1, "big") * len(out)

    data = Computed.filling("computed", LARGEST + 5, fill, together=LARGEST)
    with open(tmp_path / "out", "w+b") as file, Output(file) as out:
        out.copy(data)
        out.copy(data.part(LARGEST - 3, 8))
    assert made == {0: LARGEST, LARGEST: 5, LARGEST - 3: 8}
    assert (tmp_path / "out").read_bytes() == bytes(LARGEST) + b"\4" * 5 + b"\3" * 8


def test_blocks_moved_in_part_are_completed(source: Source, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    preadv, pwrite = system.preadv, system.pwrite
    monkeypatch.setattr(system, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:999]], at))
    monkeypatch.setattr(system, "pwrite", lambda fd, data, at: pwrite(fd, data[:500], at))
    steps: list[int] = []
    assert copied(source, tmp_path / "out", steps.append) == EXPECTED
    assert sum(steps) == 200_003


def test_a_copy_file_range_of_0_copies_all(source: Source, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Some file systems return 0 from copy_file_range for a file that is whole."""
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    assert copied(source, tmp_path / "out") == EXPECTED


def test_a_full_disk_raises_its_own_error(source: Source, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    pwrite = system.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if at > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(system, "pwrite", full)
    with pytest.raises(OSError) as fault:
        copied(source, tmp_path / "out")
    assert fault.value.errno == errno.ENOSPC


def test_a_source_that_becomes_shorter_is_damaged(source: Source, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"short")
    with pytest.raises(Damaged, match="became shorter"):
        copied(source, tmp_path / "out")


def test_a_copy_reports_the_checksum_of_its_bytes(source: Source, tmp_path: Path) -> None:
    moved: list[int] = []
    sums: dict[str, int] = {}
    with open(tmp_path / "out", "w+b") as file, Output(file, moved.append) as out:
        out.write(b"head")
        out.copy(ByteRange(source, 7, 250_000), partial(sums.__setitem__, "long"))
        out.copy(ByteRange(source, 9, 0), partial(sums.__setitem__, "empty"))
        out.copy(ByteRange(source, 9, 8), partial(sums.__setitem__, "short"))
        out.write(b"end")
    wanted = {"long": CONTENT[7:250_007], "empty": b"", "short": CONTENT[9:17]}
    assert sums == {name: zlib.crc32(data) for name, data in wanted.items()}
    assert (tmp_path / "out").read_bytes() == b"".join([b"head", *wanted.values(), b"end"])
    assert sum(moved) == 250_008


def doubled(content: bytes, *, is_divisible: bool, threads: set[int]) -> Computed:
    """Each byte twice, made in pieces of an odd size."""

    twice = bytes(byte for byte in content for _ in range(2))

    def make(start: int, nbytes: int) -> Iterator[memoryview]:
        threads.add(threading.get_ident())
        whole = twice[start : start + nbytes]
        for begin in range(0, nbytes, 999):
            yield memoryview(whole)[begin : begin + 999]

    return Computed("computed", 2 * len(content), make, is_divisible=is_divisible)


@pytest.mark.parametrize("is_divisible", [False, True])
def test_computed_bytes_are_written_whole_and_summed(is_divisible: bool, tmp_path: Path) -> None:
    content, sums, threads = CONTENT[:150_000], list[int](), set[int]()
    with open(tmp_path / "out", "w+b") as file, Output(file) as out:
        out.write(b"head")
        out.copy(doubled(content, is_divisible=is_divisible, threads=threads), sums.append)
        out.write(b"end")
    wanted = bytes(byte for byte in content for _ in range(2))
    assert (tmp_path / "out").read_bytes() == b"head" + wanted + b"end"
    assert sums == [zlib.crc32(wanted)]
    assert is_divisible or threads == {threading.get_ident()}


def test_the_disk_is_written_to_early(source: Source, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []

    def advise(fd: int, start: int, nbytes: int, advice: int) -> None:
        begun.append((start, nbytes))
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(copying, "FLUSHED", 65_536)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    assert copied(source, tmp_path / "out") == EXPECTED
    wanted = [(start, 65_536) for start in range(0, len(EXPECTED) - 65_536, 65_536)]
    assert sorted(begun) == (wanted if copying.BUFFER < 65_536 else wanted[-1:])


def test_an_interrupted_copy_leaves_no_thread(source: Source, tmp_path: Path) -> None:
    def interrupts(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copied(source, tmp_path / "out", interrupts)
    assert not [each for each in threading.enumerate() if each.name == NAME]


def test_several_files_are_written_by_turns(source: Source, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    order, pwrite = list[int](), os.pwrite
    monkeypatch.setattr(system, "pwrite", lambda fd, *more: order.append(fd) or pwrite(fd, *more))
    wanted = {"a": (0, 200_000), "b": (7, 250_000), "c": (99, 3)}
    with contextlib.ExitStack() as stack:
        outputs = []
        for name, (start, size) in wanted.items():
            file = stack.enter_context(open(tmp_path / name, "w+b"))
            outputs.append(stack.enter_context(Output(file)))
            outputs[-1].copy(ByteRange(source, start, size))
        settle_together(outputs)
    for name, (start, size) in wanted.items():
        assert (tmp_path / name).read_bytes() == CONTENT[start : start + size]
    if copying.BUFFER < 200_000:  # the last block of the first file is written while the second goes on
        first, second, _ = (out.fd for out in outputs)
        assert order.index(second) < 5
        assert len(order) - order[::-1].index(first) > len(order) // 2


def test_an_error_of_one_file_ends_the_writing_of_all(source: Source, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"short")
    short = Source("short", os.open(tmp_path / "short", os.O_RDONLY))
    with open(tmp_path / "a", "w+b") as a, open(tmp_path / "b", "w+b") as b:
        outputs = [Output(a), Output(b)]
        outputs[0].copy(ByteRange(source, 0, 300_000))
        outputs[1].copy(ByteRange(short, 0, 300_000))
        with pytest.raises(Damaged, match="short"):
            settle_together(outputs)
    assert not [each for each in threading.enumerate() if each.name == NAME]


def test_many_pieces_are_written_early(source: Source, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PLANNED", 3)
    with open(tmp_path / "out", "w+b") as file, Output(file) as out:
        for start in range(10):
            out.copy(ByteRange(source, start, 150_000))
        assert (tmp_path / "out").stat().st_size == 9 * 150_000
    assert (tmp_path / "out").read_bytes() == b"".join(CONTENT[i : i + 150_000] for i in range(10))


def test_a_dry_output_only_counts(source: Source) -> None:
    out = DryOutput()
    out.write(b"head")
    out.copy(ByteRange(source, 0, 1000))
    out.copy(ByteRange(source, 0, 100), lambda crc: None)
    out.write_at(2, b"x")
    out.write_all([memoryview(b"abc")], 3)
    assert out.position == 1107


REASONS = {"missing": "no such file", "": "is a folder", "pipe": "is not a regular file"}
REASONS |= {"/dev/null": "is not a regular file", "x" * 300: "file name too long"}


def test_a_path_that_can_not_be_opened_is_refused_with_the_reason(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # that nobody writes to: waiting for it would never end
    for name, reason in REASONS.items():
        with pytest.raises(Unreadable) as fault:
            open_source_descriptor(os.path.join(tmp_path, name))
        assert fault.value.reason == reason
    for path in ("", "a\0b"):
        with pytest.raises(CkptToolError):
            open_source_descriptor(path)


READ = """
import os
from ckpttool.core.files.commit import open_source_descriptor
print(os.pread(open_source_descriptor("-"), 99, 0))
"""


@pytest.mark.parametrize("skipped", [0, 3])
def test_standard_input_is_read_from_where_it_stands(skipped: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdefgh")
    with open(tmp_path / "file", "rb", buffering=0) as file:
        file.seek(skipped)
        run = subprocess.run([sys.executable, "-c", READ], stdin=file, capture_output=True, check=True)
    assert run.stdout.decode() == f"{b'abcdefgh'[skipped:]!r}\n"
