"""Files and lines that appear complete or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from ckpttool.core.files import commit, resuming
from ckpttool.core.files.commit import replacing
from ckpttool.errors import UsageFault
from tests.support.running import ROOT

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")


def write(path: Path, contents: bytes = b"new") -> None:
    with replacing(path) as file:
        file.write(contents)


@pytest.fixture
def umask() -> Iterator[Callable[[int], object]]:
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "old").write_bytes(b"old")
    return tmp_path / "old"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o027])
def test_a_new_file_has_what_the_umask_gives(mask: int, umask: Callable[..., object], tmp_path: Path) -> None:
    umask(mask)
    write(tmp_path / "new", b"x")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~mask


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o444])
def test_a_replaced_file_keeps_its_permissions_and_has_no_wider_ones_before(mode: int, old: Path) -> None:
    os.chmod(old, mode)
    with replacing(old) as file:
        file.write(b"new")
        (temporary,) = (path for path in old.parent.iterdir() if path != old)
        assert stat.S_IMODE(temporary.stat().st_mode) & ~(mode | stat.S_IWUSR) == 0
        assert old.read_bytes() == b"old"
    assert (old.read_bytes(), stat.S_IMODE(old.stat().st_mode)) == (b"new", mode)


@needs_root
def test_root_leaves_a_replaced_file_to_its_owner_and_group(old: Path) -> None:
    os.chown(old, 65534, 65533)
    os.chmod(old, 0o640)
    write(old)
    facts = old.stat()
    assert (facts.st_uid, facts.st_gid, stat.S_IMODE(facts.st_mode)) == (65534, 65533, 0o640)


@needs_root
def test_where_the_group_can_not_be_kept_the_new_group_gets_no_more_than_everyone(folder: Path) -> None:
    (folder / "f").write_bytes(b"old")
    os.chown(folder / "f", 65534, 0)
    os.chmod(folder / "f", 0o664)
    assert write_as_nobody(folder / "f") == b"done\n"
    facts = (folder / "f").stat()
    assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (65534, 0o644)
    assert facts.st_gid != 0


def acl_of(mask: int, *users: tuple[int, int]) -> bytes:
    """An access control list as Linux keeps it: rw for the owner, nothing for the group and others."""
    entries = [(1, 6, -1), *((2, permissions, uid) for uid, permissions in users), (4, 0, -1), (16, mask, -1)]
    packed = b"".join(struct.pack("<HHi", *entry) for entry in [*entries, (32, 0, -1)])
    return struct.pack("<I", 2) + packed


def set_acl(path: Path, acl: bytes, name: str = "system.posix_acl_access") -> None:
    try:
        os.setxattr(path, name, acl)
    except OSError:
        pytest.skip("this file system has no access control lists")


def test_a_replaced_file_keeps_its_access_control_list(old: Path) -> None:
    set_acl(old, acl_of(4, (1234, 4)))
    before = os.getxattr(old, "system.posix_acl_access")
    write(old)
    assert os.getxattr(old, "system.posix_acl_access") == before
    assert old.read_bytes() == b"new"


def test_a_replaced_file_gets_no_list_from_the_folder_that_it_had_not(old: Path) -> None:
    old.chmod(0o600)
    set_acl(old.parent, acl_of(6, (1234, 6)), "system.posix_acl_default")
    write(old)
    assert "system.posix_acl_access" not in os.listxattr(old)
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


@pytest.mark.parametrize("fault", [ValueError(), KeyboardInterrupt(), SystemExit(), OSError(28, "full")])
def test_whatever_is_raised_leaves_the_old_file_and_nothing_else(fault: BaseException, old: Path) -> None:
    with pytest.raises(type(fault)), replacing(old) as file:
        file.write(b"new")
        raise fault
    assert {path.name: path.read_bytes() for path in old.parent.iterdir()} == {"old": b"old"}


def test_the_file_is_flushed_first_and_the_folder_last(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
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
    write(tmp_path / "f", b"12345")
    assert done == ["file of 5", "rename", "folder"]


def test_a_symbolic_link_stays_one_and_its_target_is_replaced_or_made(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real").write_bytes(b"old")
    for name, target in (("link", Path("elsewhere") / "real"), ("nowhere", Path("target"))):
        (tmp_path / name).symlink_to(target)
        write(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target).read_bytes() == b"new"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageFault, match="loop"):
        write(tmp_path / "loop")


def test_other_names_of_the_old_file_keep_the_old_contents(old: Path) -> None:
    os.link(old, old.with_name("hard"))
    write(old)
    assert old.with_name("hard").read_bytes() == b"old"


@pytest.mark.parametrize("length", [255, 240])
@pytest.mark.parametrize("letter", ["a", "ж", "鍵"])
def test_a_name_as_long_as_the_file_system_takes_is_written(letter: str, length: int, tmp_path: Path) -> None:
    name = letter * (length // len(letter.encode()))
    write(tmp_path / name, b"x")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing/f", "missing/f: can't write there: no such file"),
        *(("old/g", ""), ("folder", ""), ("folder/", ""), ("new/", "")),
        ("/dev/null", "not a regular file"),
    ],
)
def test_what_is_no_place_for_a_file_is_refused(name: str, words: str, old: Path) -> None:
    (old.parent / "folder").mkdir()
    with pytest.raises(UsageFault, match=words or None) as fault, replacing(os.path.join(old.parent, name)):
        pass
    assert fault.value.exit_code == 2
    assert sorted(os.listdir(old.parent)) == ["folder", "old"]


def failing(number: int, file: object) -> Callable[..., None]:
    """A function of `os` that fails with an error, which says of what."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), file)

    return fail


@pytest.mark.parametrize("call, file", [("chmod", 5), ("fsync", None), ("replace", ".old.tmp")])
def test_an_error_names_the_output(call: str, file: object, old: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(os, call, failing(errno.EIO, file))
    with pytest.raises(OSError) as raised:
        write(old)
    assert (raised.value.filename, raised.value.filename2) == (str(old), None)
    assert [path.read_bytes() for path in old.parent.iterdir()] == [b"old"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_without_room_is_no_mistake_of_the_user(number: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "open", failing(number, "temporary"))
    with pytest.raises(OSError) as raised, replacing(tmp_path / "f"):
        pass
    assert not isinstance(raised.value, UsageFault)
    assert (raised.value.errno, raised.value.filename) == (number, f"{tmp_path}/f")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may come to, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def write_as_nobody(path: Path) -> bytes:
    return python(f"""
        import os
        from ckpttool.core.files.commit import replacing
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            with replacing({str(path)!r}) as file:
                file.write(b"x")
            print("done")
        except Exception as fault:
            print(type(fault).__name__, fault)
    """).stdout


def test_a_folder_must_be_one_that_can_be_written_but_not_listed(folder: Path) -> None:
    (folder / "locked").mkdir(mode=0o555)
    said = write_as_nobody(folder / "locked" / "f")
    assert said.startswith(b"UsageFault")
    assert b"can't write there: permission denied" in said
    (folder / "blind").mkdir()
    (folder / "blind").chmod(0o333)
    assert write_as_nobody(folder / "blind" / "f") == b"done\n"


def python(script: str, **given: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **given)


FULL = """
    import resource, sys
    from ckpttool.core import cli
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    sys.argv = ["ckpttool", *sys.argv[1:]]
    cli.main()
"""


@pytest.mark.parametrize("words", ["convert in.pt - --to safetensors", "digest -"])
def test_a_full_disk_is_named_by_what_was_written_to_it(words: str, tmp_path: Path) -> None:
    """The spools of what is streamed to standard output, and from standard input."""
    torch.save({"a": torch.ones(100_000)}, tmp_path / "in.pt")
    spool = tmp_path / "spool"
    spool.mkdir()
    command = [sys.executable, "-c", textwrap.dedent(FULL), *words.split()]
    environment = {**os.environ, "TMPDIR": str(spool), "PYTHONPATH": str(ROOT)}
    raw = (tmp_path / "in.pt").read_bytes()
    ran = subprocess.run(command, input=raw, capture_output=True, cwd=tmp_path, env=environment, check=False)
    assert (ran.returncode, ran.stderr.decode().splitlines()[0]) == (3, f"error: {spool}: file too large")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "spool"]


SLOW = """
    import sys, time
    from ckpttool.core import cli, formats
    from ckpttool.core.files.copying import Output
    def slowly(self, ranges):
        self.write(b"half")
        print("writing", flush=True)
        for _ in range(3000):
            time.sleep(0.01)  # a signal that comes just before a sleep does not end it
    Output.taken = slowly
    sys.argv = ["ckpttool", "strip-prefix", "--force", *sys.argv[1:]]
    cli.main()
"""


def interrupted(folder: Path, by: int) -> tuple[int, dict[str, bytes]]:
    """A command that is sent a signal in the middle of writing over an old file: exit code, files left."""
    torch.save({"module.a": torch.ones(10)}, folder / "in.pt")
    (folder / "out.safetensors").write_bytes(b"old")
    command = [sys.executable, "-c", textwrap.dedent(SLOW), folder / "in.pt", folder / "out.safetensors"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"writing\n"
        running.send_signal(by)
        code = running.wait(20)
    return code, {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "in.pt"}


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_in_the_middle_leaves_the_old_file_and_no_other(by: int, tmp_path: Path) -> None:
    assert interrupted(tmp_path, by) == (-by, {"out.safetensors": b"old"})


def test_a_kill_leaves_the_old_file_whole_and_the_next_save_removes_the_rest(tmp_path: Path) -> None:
    code, left = interrupted(tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert left.pop("out.safetensors") == b"old"
    assert len(left) == 1
    write(tmp_path / "another.pt")
    assert sorted(os.listdir(tmp_path)) == ["another.pt", "in.pt", "out.safetensors"]


def test_what_a_living_process_writes_is_never_removed(tmp_path: Path) -> None:
    with replacing(tmp_path / "slow") as slow:
        slow.write(b"slow")
        for name in "fast", "slow":
            write(tmp_path / name, b"fast")
        write_elsewhere = python(f"""
            from ckpttool.core.files.commit import replacing
            with replacing({str(tmp_path / "slow")!r}) as file:
                file.write(b"elsewhere")
        """)
        assert write_elsewhere.returncode == 0
        assert (tmp_path / "slow").read_bytes() == b"elsewhere"
    assert (tmp_path / "slow").read_bytes() == b"slow"
    assert sorted(os.listdir(tmp_path)) == ["fast", "slow"]


def test_writers_that_remove_what_is_abandoned_never_take_a_file_from_each_other(tmp_path: Path) -> None:
    script = f"""
        import sys
        from ckpttool.core.files.commit import replacing
        for number in range(150):
            with replacing({str(tmp_path / "f")!r}) as file:
                file.write(b"%d" % number)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    for each in running:
        _, said = each.communicate(timeout=60)
        assert (each.returncode, said) == (0, b"")
    assert os.listdir(tmp_path) == ["f"]


def test_other_programs_temporary_files_stay(tmp_path: Path) -> None:
    names = [".f.0123456789ab.tmp", ".f.tmp", "f.ckpttool.tmp", ".f.12345678.ckpttool.tmp", ".f.swp"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    write(tmp_path / "f", b"x")
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "f"])


def test_a_temporary_of_another_machine_is_removed_once_it_was_left_alone_for_a_day(tmp_path: Path) -> None:
    """Its process may hold a lock that does not reach this machine."""
    for name, age in (("new", 0), ("old", 25 * 3600)):
        path = tmp_path / f".{name}.{'0' * 20}.ckpttool.tmp"
        path.write_bytes(b"")
        os.utime(path, (time.time() - age,) * 2)
    later = SimpleNamespace(time=lambda: time.time() + 25 * 3600)
    with replacing(tmp_path / "f"):
        pass
    assert len(os.listdir(tmp_path)) == 3  # the inode of the older one was changed just now
    with MonkeyPatch.context() as patch:
        patch.setattr(resuming, "time", later)
        with replacing(tmp_path / "f"):
            pass
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("what", ["a link", "a link to nowhere", "a pipe"])
def test_what_only_bears_the_name_of_a_temporary_is_not_touched(what: str, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    name = tmp_path / f".f.{'0' * 20}.ckpttool.tmp"
    os.mkfifo(name) if what == "a pipe" else name.symlink_to("target" if what == "a link" else "nowhere")
    with replacing(tmp_path / "f"):
        pass
    assert sorted(os.listdir(tmp_path)) == sorted([name.name, "f", "target"])
    assert (tmp_path / "target").read_bytes() == b"kept"


def test_without_locks_files_are_written_and_none_removed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    interrupted(tmp_path, signal.SIGKILL)
    before = {*os.listdir(tmp_path)}

    def refuses(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    write(tmp_path / "f", b"x")
    assert {*os.listdir(tmp_path)} == before | {"f"}


def test_a_hang_up_that_was_to_be_ignored_is_ignored() -> None:
    """As under nohup."""
    ran = python("""
        import os, signal, sys
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        from ckpttool.core.cli import program
        def command(*arguments):
            os.kill(os.getpid(), signal.SIGHUP)
            print("still here", flush=True)
            return 0
        program.run = command
        program.main()
    """)
    assert b"still here" in ran.stdout


def test_a_line_that_is_refused_when_closing_is_taken_back(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    class RefusedWhenClosed(io.FileIO):
        """As on NFS, which sends what was written when the file is closed."""

        def close(self) -> None:
            is_open = not self.closed
            super().close()
            if is_open:
                raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "lines"
    commit.append_line(str(path), b"first")
    with monkeypatch.context() as patch:
        patch.setattr(commit, "open", lambda path, *_, **__: RefusedWhenClosed(path, "ab"), raising=False)
        with pytest.raises(OSError, match="No space left"):
            commit.append_line(str(path), b"second", durably=True)
    assert path.read_bytes() == b"first\n"
