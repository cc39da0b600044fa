"""Outputs that appear whole or not at all: files and folders, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckpttool
from ckpttool.errors import Unreadable, UsageFault
from ckpttool.files import commit
from ckpttool.files.commit import replacing
from ckpttool.files.commit_folder import replacing_folder
from ckpttool.formats.folders import sharded
from tests.support.running import ROOT
from tests.support.shards import shards_of


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
    reason = "missing/f: can't write there: no such file"
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
    with pytest.raises(UsageFault, match="not a regular file"), replacing("/dev/null"):
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
        from ckpttool.files.commit import replacing
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
    assert b"can't write there: permission denied" in said


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
        from ckpttool.tensors.ref import ByteRange, Source
        from ckpttool.files.commit import replacing
        from ckpttool.files.copying import Output
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


FULL = """
    import resource, sys
    from ckpttool import cli
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    sys.argv = ["ckpttool", *sys.argv[1:]]
    cli.main()
"""


@pytest.mark.parametrize(
    "words, named",
    [
        (["convert", "in.pt", "out/"], "out/"),
        (["convert", "in.pt", "-", "--to", "safetensors"], "room"),
        (["digest", "-"], "room"),
    ],
)
def test_a_disk_that_is_full_is_named_by_what_was_written_to_it(
    words: list[str], named: str, tmp_path: Path
) -> None:
    """A folder of shards; the spools of what is streamed to standard output, and from standard input."""
    import torch

    torch.save({"a": torch.ones(100_000)}, tmp_path / "in.pt")
    (tmp_path / "room").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(FULL), *words]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "room"), "PYTHONPATH": str(ROOT)}
    raw = (tmp_path / "in.pt").read_bytes()
    ran = subprocess.run(command, input=raw, capture_output=True, cwd=tmp_path, env=environment, check=False)
    where = tmp_path / named if named == "room" else named
    assert (ran.returncode, ran.stderr.decode()) == (3, f"error: {where}: file too large\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "room"]


def test_a_standard_output_that_is_full_is_named(tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.ones(10)}, tmp_path / "in.pt")
    command = [sys.executable, "-m", "ckpttool", "convert", "in.pt", "-", "--to", "safetensors"]
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert b"error: standard output: no space left on device" in ran.stderr


SLOW = """
    import sys, time
    from ckpttool import cli, formats
    from ckpttool.files.copying import Output
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
        def command(arguments):
            os.kill(os.getpid(), signal.SIGHUP)
            print("still here")
            return 0
        cli.run = command
        cli.main()
    """)
    assert b"still here" in ran.stdout


# Folders.


REPLACED = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, "tests")
    from tests.support.shards import shards_of
    folder = Path(sys.argv[1])
    if sys.argv[2] == "in two steps":
        from ckpttool.files import commit
        commit._exchange = lambda one, other: False
    for number in range(int(sys.argv[3])):
        shards_of(number, folder)
        print(number, flush=True)
"""


def replacing_all_the_time(folder: Path, times: int, how: str = "") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(REPLACED), str(folder), how, str(times)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)


def values_in(folder: Path) -> set[float]:
    with ckpttool.open(folder) as checkpoint:
        return {
            value
            for tensor in checkpoint.state().tensors.values()
            for value in struct.unpack("<100f", tensor.storage.data.read())  # type: ignore[union-attr]
        }


def test_another_process_always_sees_a_whole_folder(tmp_path: Path) -> None:
    seen: set[float] = set()
    with replacing_all_the_time(tmp_path, 200) as running:
        assert running.stdout is not None
        running.stdout.readline()
        while running.poll() is None:
            found = values_in(tmp_path / "out")
            assert len(found) == 1, "shards of two checkpoints"
            seen |= found
    assert running.returncode == 0
    assert len(seen) > 20, "it was not looked at while it was replaced"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out"]


@pytest.mark.parametrize("seed", range(5))
def test_a_kill_at_any_moment_leaves_the_old_folder_or_the_new_one(seed: int, tmp_path: Path) -> None:
    with replacing_all_the_time(tmp_path, 10**6) as running:
        assert running.stdout is not None
        for _ in range(3):
            running.stdout.readline()
        time.sleep(random.Random(seed).random() / 50)
        running.kill()
    assert len(values_in(tmp_path / "out")) == 1


def test_a_file_system_without_an_exchange_gets_the_folder_in_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    for value in (1.0, 2.0, 3.0):
        shards_of(value, tmp_path)
        assert values_in(tmp_path / "out") == {value}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out"]


def test_an_old_kernel_or_file_system_has_no_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ctypes

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    def refuses(number: int) -> object:
        def call(*_: object) -> int:
            ctypes.set_errno(number)
            return -1

        return lambda *_, **__: SimpleNamespace(renameat2=call)

    for number in commit.NO_EXCHANGE:
        monkeypatch.setattr(ctypes, "CDLL", refuses(number))
        assert not commit._exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    monkeypatch.setattr(ctypes, "CDLL", refuses(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        commit._exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    assert not commit._exchange(str(tmp_path / "a"), str(tmp_path / "b"))


def test_a_second_step_that_fails_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards_of(1.0, tmp_path)
    monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    rename, calls = os.rename, []

    def second_fails(old: str, new: str) -> None:
        calls.append(old)
        if len(calls) == 2:
            raise OSError(errno.EIO, "broken")
        rename(old, new)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="broken"):
        shards_of(2.0, tmp_path)
    monkeypatch.undo()
    assert values_in(tmp_path / "out") == {1.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out"]


def test_a_kill_between_the_two_steps_leaves_the_old_folder_and_a_word_where_it_is(tmp_path: Path) -> None:
    shards_of(1.0, tmp_path)
    aside = tmp_path / f".out.0123456789ab{commit.ASIDE}"
    (tmp_path / "out").rename(aside)
    with pytest.raises(Unreadable, match="interrupted") as fault:
        ckpttool.open(tmp_path / "out")
    assert fault.value.hint == f"put them back: mv {aside} {tmp_path / 'out'}"
    subprocess.run(fault.value.hint.partition(": ")[2].split(), check=True)
    assert values_in(tmp_path / "out") == {1.0}


DELETING = """
    import shutil, sys, threading, time
    from ckpttool import cli
    delete = shutil.rmtree
    def slowly(folder, **given):
        print("deleting", flush=True)
        time.sleep(0.5)
        delete(folder, **given)
    shutil.rmtree = slowly
    threading.Thread(target=time.sleep, args=[30], daemon=True).start()  # one that hears what the first masks
    sys.argv = ["ckpttool", "convert", "--force", "--to", "safetensors-sharded", *sys.argv[1:]]
    cli.main()
"""


@pytest.mark.parametrize("by, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_while_the_old_folder_is_deleted_leaves_nothing_of_it(
    by: int, code: int, tmp_path: Path
) -> None:
    import torch

    shards_of(1.0, tmp_path)
    torch.save({name: torch.full((100,), 2.0) for name in "abc"}, tmp_path / "in.pt")
    command = [sys.executable, "-c", textwrap.dedent(DELETING), tmp_path / "in.pt", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"deleting\n"
        running.send_signal(by)
        assert running.wait(20) == code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out"]
    assert values_in(tmp_path / "out") == {2.0}


def test_a_folder_is_replaced_in_any_thread_and_handlers_are_left_as_they_were(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in commit.ENDING]
    for replace in (shards_of, in_a_thread(shards_of)):
        for value in (1.0, 2.0):
            replace(value, tmp_path)
            assert values_in(tmp_path / "out") == {value}
    assert [signal.getsignal(number) for number in commit.ENDING] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "out"]


def in_a_thread(function: Callable[..., None]) -> Callable[..., None]:
    def call(*given: object) -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(function, *given).result()

    return call


def test_a_folder_that_another_one_takes_the_place_of_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the new one has other shards, so that the old index leads nowhere."""
    shards_of(1.0, tmp_path)
    read, rest = sharded.read, [2.0, 3.0]

    def read_late(source: Any) -> Any:
        if rest and source.path == str(tmp_path / "out"):  # not what saving itself looks at
            shards_of(rest.pop(0), tmp_path)
        return read(source)

    monkeypatch.setattr(sharded, "read", read_late)
    assert values_in(tmp_path / "out") == {3.0}
