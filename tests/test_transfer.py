"""Bytes from file to file by whichever way works, and outputs that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool import transfer
from ckpttool.errors import CkptToolError, Damaged, Unreadable, UsageFault
from ckpttool.tensor import ByteRange, Source
from ckpttool.transfer import DryOutput, Output, open_source_descriptor, replacing, replacing_folder

CONTENT = bytes(i * 7 % 251 for i in range(300_000))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "source").write_bytes(CONTENT)
    return Source("source", os.open(tmp_path / "source", os.O_RDONLY))


def copied(source: Source, path: Path, progress: Callable[[int], object] = lambda n: None) -> bytes:
    """Two ranges copied between bytes that were written, as a format does it."""
    with open(path, "w+b") as file:
        out = Output(file, progress)
        out.write(b"head")
        out.copy(ByteRange(source, 1000, 200_000))
        out.write(b"middle")
        out.copy(ByteRange(source, 0, 0))
        out.copy(ByteRange(source, 5, 3))
        out.write(b"tail")
        assert out.position == 4 + 200_000 + 6 + 3 + 4
    return path.read_bytes()


EXPECTED = b"head" + CONTENT[1000:201_000] + b"middle" + CONTENT[5:8] + b"tail"


def fails_with(number: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


WAYS = {"copy_file_range": [], "sendfile": ["copy_file_range"], "a buffer": ["copy_file_range", "sendfile"]}


@pytest.mark.parametrize("fault", [errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_moves_the_same_bytes(
    way: str, fault: int, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAYS[way]:
        monkeypatch.setattr(os, name, fails_with(fault))
    assert copied(source, tmp_path / "out") == EXPECTED


@pytest.mark.parametrize("way", WAYS)
def test_a_way_that_moves_less_than_asked_is_asked_again(
    way: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {name: getattr(os, name) for name in ("copy_file_range", "sendfile", "preadv", "pwrite")}
    short: dict[str, Callable[..., Any]] = {
        "copy_file_range": lambda i, o, n, at, to: whole["copy_file_range"](i, o, min(n, 999), at, to),
        "sendfile": lambda o, i, at, n: whole["sendfile"](o, i, at, min(n, 999)),
        "preadv": lambda fd, buffers, at: whole["preadv"](fd, [buffers[0][:999]], at),
        "pwrite": lambda fd, data, at: whole["pwrite"](fd, data[:500], at),
    }
    for name, call in short.items():
        monkeypatch.setattr(os, name, call)
    for name in WAYS[way]:
        monkeypatch.setattr(os, name, fails_with(errno.EXDEV))
    assert copied(source, tmp_path / "out") == EXPECTED


def test_the_ways_are_tried_once_and_the_first_that_works_is_kept(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def refuse(*_: Any) -> Any:
        calls.append(1)
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    copied(source, tmp_path / "out")
    assert len(calls) == 1


def test_python_without_these_calls_uses_the_buffer(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert copied(source, tmp_path / "out") == EXPECTED


def test_another_fault_is_no_reason_to_try_another_way(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", fails_with(errno.ENOSPC))
    monkeypatch.setattr(os, "sendfile", fails_with(errno.EIO))
    with pytest.raises(OSError) as fault:
        copied(source, tmp_path / "out")
    assert fault.value.errno == errno.ENOSPC


def test_progress_adds_up_to_the_bytes_copied(source: Source, tmp_path: Path) -> None:
    steps: list[int] = []
    copied(source, tmp_path / "out", steps.append)
    assert sum(steps) == 200_003


@pytest.mark.parametrize("way", WAYS)
def test_a_source_that_becomes_shorter_is_damaged(
    way: str, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAYS[way]:
        monkeypatch.setattr(os, name, fails_with(errno.EXDEV))
    (tmp_path / "source").write_bytes(b"short")
    with pytest.raises(Damaged, match="became shorter"):
        copied(source, tmp_path / "out")


def test_the_checksum_found_while_copying_is_that_of_the_bytes(source: Source, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as file:
        assert Output(file).copy_with_crc(ByteRange(source, 7, 250_000)) == zlib.crc32(CONTENT[7:250_007])
    assert (tmp_path / "out").read_bytes() == CONTENT[7:250_007]


def test_a_dry_output_only_counts(source: Source) -> None:
    out = DryOutput()
    out.write(b"head")
    out.copy(ByteRange(source, 0, 1000))
    out.copy_with_crc(ByteRange(source, 0, 100))
    out.write_at(2, b"x")
    assert (out.position, out.write_all([memoryview(b"abc")], 3)) == (1104, 0)
    assert out.position == 1107


# The commit of a whole file.


@pytest.fixture
def umask() -> Iterator[Callable[[int], object]]:
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o027])
def test_a_new_file_has_the_permissions_that_the_umask_gives(
    mask: int, umask: Callable[[int], object], tmp_path: Path
) -> None:
    umask(mask)
    with replacing(tmp_path / "new") as file:
        file.write(b"x")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444])
def test_a_replaced_file_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    os.chmod(tmp_path / "old", mode)
    with replacing(tmp_path / "old") as file:
        file.write(b"new")
    assert (tmp_path / "old").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "old").stat().st_mode) == mode


def test_the_old_file_stays_until_the_block_ends(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with replacing(tmp_path / "f") as file:
        file.write(b"new")
        assert (tmp_path / "f").read_bytes() == b"old"
    assert (tmp_path / "f").read_bytes() == b"new"


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, SystemExit, OSError(errno.ENOSPC, "full")])
def test_whatever_is_raised_leaves_the_old_file_and_nothing_else(fault: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(BaseException) as raised, replacing(tmp_path / "f") as file:
        file.write(b"new")
        raise fault
    assert isinstance(raised.value, type(fault) if isinstance(fault, OSError) else fault)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"f": b"old"}


def test_the_file_is_flushed_before_it_takes_the_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(fd: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"file of {os.fstat(fd).st_size}")
        fsync(fd)

    def renamed(old: str, new: str) -> None:
        done.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    with replacing(tmp_path / "f") as file:
        file.write(b"12345")
    assert done == ["file of 5", "rename", "folder"]


def test_a_symbolic_link_stays_one_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(Path("elsewhere") / "real")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "real").read_bytes() == b"new"


def test_a_link_to_nowhere_gets_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageFault, match="loop"), replacing(tmp_path / "loop"):
        pass


def test_other_names_of_the_old_file_keep_the_old_contents(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    os.link(tmp_path / "f", tmp_path / "hard")
    with replacing(tmp_path / "f") as file:
        file.write(b"new")
    assert (tmp_path / "hard").read_bytes() == b"old"


@pytest.mark.parametrize("length", [255, 240])
@pytest.mark.parametrize("letter", ["a", "ж", "鍵"])
def test_a_name_as_long_as_the_file_system_takes_is_written(letter: str, length: int, tmp_path: Path) -> None:
    name = letter * (length // len(letter.encode()))
    with replacing(tmp_path / name) as file:
        file.write(b"x")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("letter", ["a", "鍵"])
def test_a_folder_may_have_a_name_as_long_as_a_file(letter: str, tmp_path: Path) -> None:
    name = letter * (255 // len(letter.encode()))
    for _ in range(2):
        with replacing_folder(str(tmp_path / name), lambda name: name == "f") as folder:
            (Path(folder) / "f").write_bytes(b"x")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [name, f"{name}/f"]


def test_an_output_where_there_is_no_folder_is_refused(tmp_path: Path) -> None:
    reason = "missing/f: can't write there: No such file"
    with pytest.raises(UsageFault, match=reason) as fault, replacing(tmp_path / "missing" / "f"):
        pass
    assert fault.value.exit_code == 2


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(UsageFault), replacing(tmp_path / "f" / "g"):
        pass


@pytest.mark.parametrize("name", ["folder", "folder/", "new/"])
def test_a_folder_is_no_output(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageFault), replacing(f"{tmp_path}/{name}"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_device_is_no_output() -> None:
    with pytest.raises(UsageFault, match="not a plain file"), replacing("/dev/null"):
        pass


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may come to, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def write_as_nobody(path: Path) -> bytes:
    return python(f"""
        import os
        from ckpttool.transfer import replacing
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            with replacing({str(path)!r}) as file:
                file.write(b"x")
            print("done")
        except Exception as fault:
            print(type(fault).__name__, fault)
    """).stdout


def test_a_folder_that_may_not_be_written_is_refused(folder: Path) -> None:
    (folder / "locked").mkdir(mode=0o555)
    said = write_as_nobody(folder / "locked" / "f")
    assert said.startswith(b"UsageFault")
    assert b"can't write there: Permission denied" in said


def test_a_folder_that_can_be_entered_and_written_but_not_listed_will_do(folder: Path) -> None:
    (folder / "blind").mkdir()
    (folder / "blind").chmod(0o333)
    assert write_as_nobody(folder / "blind" / "f") == b"done\n"


def python(script: str, **given: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **given)


def test_a_disk_that_is_full_leaves_nothing_and_names_the_file(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk: the kernel refuses in the same place."""
    ran = python(f"""
        import os, resource
        from ckpttool.tensor import ByteRange, Source
        from ckpttool.transfer import Output, replacing
        open({str(tmp_path / "in")!r}, "wb").write(bytes(1 << 20))
        source = Source("in", os.open({str(tmp_path / "in")!r}, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            with replacing({str(tmp_path / "out")!r}) as file:
                Output(file).copy(ByteRange(source, 0, 1 << 20))
        except OSError as error:
            print(error.filename, error.strerror)
    """)
    assert ran.stdout.decode().split() == [str(tmp_path / "out"), "File", "too", "large"], ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


SLOW = """
    import sys, time
    from ckpttool import cli, formats
    from ckpttool.transfer import Output
    def slowly(self, range):
        self.write(b"half")
        print("writing", flush=True)
        time.sleep(30)
    Output.copy = slowly
    sys.argv = ["ckpttool", "strip-prefix", "--force", *sys.argv[1:]]
    cli.main()
"""


def interrupted(folder: Path, by: int) -> tuple[int, dict[str, bytes]]:
    """A command that is sent a signal in the middle of writing over an old file: exit code, files left."""
    import torch

    torch.save({"module.a": torch.ones(10)}, folder / "in.pt")
    (folder / "out.safetensors").write_bytes(b"old")
    command = [sys.executable, "-c", textwrap.dedent(SLOW), folder / "in.pt", folder / "out.safetensors"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"writing\n"
        running.send_signal(by)
        code = running.wait(20)
    return code, {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "in.pt"}


@pytest.mark.parametrize("by, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_in_the_middle_leaves_the_old_file_and_no_other(by: int, code: int, tmp_path: Path) -> None:
    assert interrupted(tmp_path, by) == (code, {"out.safetensors": b"old"})


def test_a_killed_process_leaves_the_old_file_whole(tmp_path: Path) -> None:
    code, left = interrupted(tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert left.pop("out.safetensors") == b"old"
    assert all(name.startswith(".") and name.endswith(".tmp") for name in left)


def test_a_hang_up_that_was_to_be_ignored_is_ignored() -> None:
    """As under nohup."""
    ran = python("""
        import os, signal, sys
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        from ckpttool import cli
        sys.argv = ["ckpttool", "--version"]
        try:
            cli.main()
        except SystemExit:
            os.kill(os.getpid(), signal.SIGHUP)
            print("still here")
    """)
    assert b"still here" in ran.stdout


# Opening.


def reason(path: str) -> str:
    with pytest.raises(Unreadable) as fault:
        open_source_descriptor(path)
    return fault.value.reason


def test_what_can_t_be_opened_says_why(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert reason(str(tmp_path / "missing")) == "no such file"
    assert reason(str(tmp_path)) == "is a folder"
    assert reason(str(tmp_path / "pipe")) == "is no plain file"
    assert reason("/dev/null") == "is no plain file"
    assert reason(str(tmp_path / ("x" * 300))) == "file name too long"


def test_an_empty_name_and_one_with_a_zero_are_errors_of_this_library() -> None:
    for path in ("", "a\0b"):
        with pytest.raises(CkptToolError):
            open_source_descriptor(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    started = time.monotonic()
    reason(str(tmp_path / "pipe"))
    assert time.monotonic() - started < 5


def test_the_buffer_is_no_larger_than_needed_for_speed() -> None:
    assert transfer.BUFFER <= 8 << 20
