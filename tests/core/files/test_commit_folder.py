"""Folders that appear complete or not at all, and what becomes of everything in the folder they replace."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import MonkeyPatch

import ckpttool
from ckpttool.core.files.commit_folder import replacing_folder
from ckpttool.core.files.threads import ENDING
from ckpttool.core.formats import shards as sharded
from ckpttool.core.system import NO_EXCHANGE
from ckpttool.errors import Unreadable, UsageFault
from tests.support.crafting import shards_of, values_in
from tests.support.running import ROOT


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def without_renameat2(*_: object, **__: object) -> Any:
    """An old C library."""
    return SimpleNamespace()


def refusing(number: int) -> Callable[..., Any]:
    """A C library whose renameat2 fails with this error."""

    def call(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    return lambda *_, **__: SimpleNamespace(renameat2=call)


@pytest.fixture(params=["in one step", "in two steps"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> None:
    if request.param == "in two steps":
        monkeypatch.setattr(ctypes, "CDLL", without_renameat2)


def replace(path: Path, meanwhile: Callable[[Path], object] = lambda _: None, **given: Any) -> Any:
    """Replace a folder in which only `mine` may be replaced by one with a new `mine`."""
    with replacing_folder(str(path), lambda _: ["mine"], **given) as new:
        (Path(new.path) / "mine").write_text("new")
        meanwhile(Path(new.path))
    return new


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "mine").write_text("old")
    return tmp_path / "f"


# What becomes of the old folder.


@pytest.mark.usefixtures("both_ways")
def test_what_another_process_put_there_meanwhile_is_in_the_new_folder(folder: Path) -> None:
    def meanwhile(_: Path) -> None:
        (folder / "trainer_state.json").write_text("{}")
        (folder / "logs" / "deep").mkdir(parents=True)
        (folder / "logs" / "deep" / "notes.txt").write_text("kept")

    new = replace(folder, meanwhile)
    assert (folder / "mine").read_text() == "new"
    assert (folder / "trainer_state.json").read_text() == "{}"
    assert (folder / "logs" / "deep" / "notes.txt").read_text() == "kept"
    assert (sorted(new.given_back), new.not_removed) == (["logs", "trainer_state.json"], [])
    assert names(folder.parent) == ["f"]


@pytest.mark.usefixtures("both_ways")
def test_a_folder_that_is_replaced_while_a_writer_looks_at_it_is_looked_at_again(folder: Path) -> None:
    """What was listed of the old folder says nothing of the new one."""
    others = [0, 1, 2]

    def replaced(_: str) -> list[str]:
        if not others:
            return ["mine"]
        others.pop()
        replace(folder)
        return []  # the old folder is empty by now

    with replacing_folder(str(folder), replaced) as new:
        (Path(new.path) / "mine").write_text("newest")
    assert (others, (folder / "mine").read_text(), names(folder.parent)) == ([], "newest", ["f"])


def test_what_has_a_name_of_the_new_folder_s_gets_another_one(folder: Path) -> None:
    """A file of theirs, and a folder by the name of a file that may be replaced."""

    def meanwhile(new: Path) -> None:
        (new / "notes.txt").write_text("new")
        (folder / "notes.txt").write_text("theirs")
        (folder / "mine").unlink()
        (folder / "mine").mkdir()
        (folder / "mine" / "notes.txt").write_text("kept")

    mine, notes = sorted(replace(folder, meanwhile).given_back)
    assert notes.startswith("notes.txt.other-")
    assert (folder / "mine").read_text() == (folder / "notes.txt").read_text() == "new"
    assert ((folder / mine / "notes.txt").read_text(), (folder / notes).read_text()) == ("kept", "theirs")


def test_of_a_link_that_is_replaced_the_target_stays(folder: Path) -> None:
    (folder / "mine").rename(folder.parent / "blob")
    (folder / "mine").symlink_to("../blob")
    assert replace(folder).given_back == []
    assert (folder / "mine").read_text() == "new"
    assert (folder.parent / "blob").read_text() == "old"


def test_a_kept_file_that_changes_meanwhile_keeps_the_change(folder: Path, monkeypatch: MonkeyPatch) -> None:
    (folder / "config.json").write_text("old")
    link = os.link

    def link_and_change(*given: Any, **more: Any) -> None:
        link(*given, **more)
        (folder / "edited").write_text("changed")
        (folder / "edited").rename(folder / "config.json")

    monkeypatch.setattr(os, "link", link_and_change)
    replace(folder, kept=["config.json"])
    assert (folder / "config.json").read_text() == "changed"
    assert names(folder) == ["config.json", "mine"]


def test_only_what_is_in_the_folder_is_removed_whatever_is_named(folder: Path) -> None:
    (folder.parent / "outside").write_text("kept")
    for name in ("../outside", str(folder.parent / "outside")):
        with replacing_folder(str(folder), lambda _, name=name: [name, "mine"]) as new:  # type: ignore[misc]
            (Path(new.path) / "mine").write_text("new")
    assert (folder.parent / "outside").read_text() == "kept"


def test_a_new_folder_taken_for_abandoned_is_made_again(folder: Path, monkeypatch: MonkeyPatch) -> None:
    """Between mkdir and the lock it looks like one that a killed process left."""
    mkdir, removed = os.mkdir, []

    def mkdir_and_lose(path: str, mode: int) -> None:
        mkdir(path, mode)
        if not removed:
            removed.append(path)
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", mkdir_and_lose)
    replace(folder)
    assert removed
    assert (folder / "mine").read_text() == "new"
    assert names(folder.parent) == ["f"]


def test_what_can_not_be_removed_is_named(folder: Path, monkeypatch: MonkeyPatch) -> None:
    unlink = os.unlink

    def refuses(path: Any, *given: Any, **more: Any) -> None:
        if ".ckpttool.old" in str(path):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, *given, **more)

    monkeypatch.setattr(os, "unlink", refuses)
    new = replace(folder)
    assert (folder / "mine").read_text() == "new"
    (left,) = new.not_removed
    assert left.startswith(f"{folder.parent}/.f.") and left.endswith(" (operation not permitted)")
    monkeypatch.undo()
    assert replace(folder).not_removed == []  # the next save removes it
    assert names(folder.parent) == ["f"]


def test_a_folder_that_holds_something_else_is_refused(folder: Path) -> None:
    (folder / "theirs").write_text("kept")
    with pytest.raises(UsageFault, match=r"holds other files too \(theirs\)"):
        replace(folder)
    assert names(folder) == ["mine", "theirs"]
    assert names(folder.parent) == ["f"]


# What killed processes leave.

WRITTEN = "while it is written"


def killed(folder: Path, where: str) -> None:
    """Replace a folder in a process that ends at a certain moment."""
    script = f"""
        import os
        from pathlib import Path
        from ckpttool.core.files.commit_folder import replacing_folder
        folder, where = Path({str(folder)!r}), {where!r}
        rename = os.rename
        def rename_and_end(source, target):
            rename(source, target)
            if where == "before the exchange" and target.endswith(".old"):
                os._exit(9)
        os.rename = rename_and_end
        def replaced(name):
            if where == "after the exchange" and name.endswith(".old"):
                os._exit(9)
            return ["mine"]
        with replacing_folder(str(folder), replaced) as new:
            Path(new.path, "mine").write_text("new")
            if where == "while it is written":
                os._exit(9)
            if where == "after the exchange":
                Path(folder, "theirs").write_text("kept")
    """
    ends(script)


def ends(script: str) -> None:
    """Run a program that ends itself in the middle."""
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, cwd=ROOT)
    assert ran.returncode == 9


LEFT = [(WRITTEN, "old", []), ("before the exchange", "old", []), ("after the exchange", "new", ["theirs"])]


@pytest.mark.parametrize(("where", "mine", "given_back"), LEFT)
def test_the_next_save_removes_what_is_left(where: str, mine: str, given_back: Any, folder: Path) -> None:
    killed(folder, where)
    assert (folder / "mine").read_text() == mine
    assert (names(folder), len(names(folder.parent))) == (["mine"], 2)
    replace(folder.parent / "another")  # also one of another name
    assert where != WRITTEN or names(folder.parent) == ["another", "f"]
    assert replace(folder).given_back == given_back
    assert (names(folder.parent), names(folder)) == (["another", "f"], ["mine", *given_back])


def test_the_folder_of_a_living_process_is_never_removed(folder: Path) -> None:
    def meanwhile(new: Path) -> None:
        replace(folder)
        assert (new / "mine").read_text() == "new"

    replace(folder, meanwhile)
    assert names(folder.parent) == ["f"]


REPLACED_OVER_AND_OVER = """
    import contextlib, os, sys
    from pathlib import Path
    from ckpttool.errors import UsageFault
    from ckpttool.core.files.commit_folder import replacing_folder
    folder = Path(sys.argv[1])
    while True:
        with contextlib.suppress(FileNotFoundError):  # the other writer was faster
            for name in os.listdir(folder):
                if name not in ("mine", "index"):
                    (folder / name).rename(folder.parent / "taken" / name)
        with contextlib.suppress(UsageFault):  # there is a new one already
            with replacing_folder(str(folder), lambda _: ["mine", "index"]) as new:
                for name in "mine", "index":
                    Path(new.path, name).write_text("new")
"""


@pytest.mark.covered(lambda seed, writers: (seed, writers) != (0, 1))
@pytest.mark.parametrize(("seed", "writers"), [(0, 1), (0, 2), (1, 2)])
def test_no_file_is_lost_however_often_writers_are_killed(seed: int, writers: int, folder: Path) -> None:
    (folder.parent / "taken").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(REPLACED_OVER_AND_OVER), str(folder)]
    drawn = random.Random(seed)
    put: set[str] = set()
    running: list[subprocess.Popen[bytes]] = []
    until, seen = time.monotonic() + 1.5, set()
    while time.monotonic() < until:
        lacking = writers - sum(each.poll() is None for each in running)
        running += [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(lacking)]
        for _ in range(drawn.randrange(50, 250)):
            name = f"theirs-{len(put)}"
            write_into_a_replaced_folder(folder / name)
            put.add(name)
            seen.add(folder.stat().st_ino)
            time.sleep(0.003)
        running[-1].kill()
    for each in running:
        each.kill()
        each.wait()
    for name in names(folder):
        if name.startswith("theirs"):
            (folder / name).rename(folder.parent / "taken" / name)
    replace_with_index(folder)
    found = {*names(folder), *names(folder.parent / "taken")}
    assert put <= found
    assert len(seen) > 5, "it was not replaced while files were put there"
    assert names(folder.parent) == ["f", "taken"]


def write_into_a_replaced_folder(path: Path) -> None:
    """Write a file; again if its folder was replaced and removed after the kernel had found it."""
    for _ in range(99):
        with contextlib.suppress(FileNotFoundError):
            path.write_text(path.name)
            return
        assert path.parent.is_dir(), "there is a moment without a folder"
    pytest.fail(f"{path} can't be written")


def replace_with_index(folder: Path) -> None:
    with replacing_folder(str(folder), lambda _: ["mine", "index"]) as new:
        (Path(new.path) / "mine").write_text("last")


# Permissions.


@pytest.fixture
def private(folder: Path) -> Iterator[Path]:
    before = os.umask(0o022)
    folder.chmod(0o700)
    (folder / "mine").chmod(0o600)
    yield folder
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_folder_stays_private_and_what_is_kept_as_it_was(private: Path) -> None:
    (private / "config.json").write_text("{}")
    (private / "config.json").chmod(0o644)

    def meanwhile(new: Path) -> None:
        (new / "more").write_text("new")
        assert mode(new) == 0o700  # so nobody comes to the files, whose permissions are set last

    replace(private, meanwhile, kept=["config.json"])
    found = {name: mode(private / name) for name in names(private)}
    assert mode(private) == 0o700
    assert found == {"mine": 0o600, "more": 0o600, "config.json": 0o644}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_root_leaves_a_replaced_folder_to_its_owner(private: Path) -> None:
    for path in (private, private / "mine"):
        os.chown(path, 65534, 65533)
    replace(private)
    facts = [path.stat() for path in (private, private / "mine")]
    assert {(each.st_uid, each.st_gid) for each in facts} == {(65534, 65533)}


@pytest.mark.parametrize("kind", ["safetensors-sharded", "torch-sharded", "dcp"])
def test_a_private_checkpoint_stays_private(kind: str, private: Path, cli: Callable[..., Any]) -> None:
    import torch

    torch.save({"module.a": torch.ones(3)}, private.parent / "in.pt")
    shards = private.parent / "shards"
    ckpttool.save(ckpttool.open(private.parent / "in.pt"), shards, to=kind)
    for path in (shards, *shards.iterdir()):
        path.chmod(0o700 if path == shards else 0o600)
    assert cli("strip-prefix", shards, shards, "--force").code == 0
    assert mode(shards) == 0o700
    assert {mode(path) for path in shards.iterdir()} == {0o600}


@pytest.mark.parametrize("letter", ["a", "鍵"])
def test_a_folder_may_have_a_name_as_long_as_a_file(letter: str, tmp_path: Path) -> None:
    name = letter * (255 // len(letter.encode()))
    for _ in range(2):
        with replacing_folder(str(tmp_path / name), lambda _: ["f"]) as new:
            (Path(new.path) / "f").write_bytes(b"x")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [name, f"{name}/f"]


# Readers meanwhile, signals and kills.


REPLACED = """
    import sys, time
    from pathlib import Path
    from tests.support.crafting import shards_of, values_in
    folder = Path(sys.argv[1])
    for number in range(int(sys.argv[2])):
        shards_of(number, folder)
        print(number, flush=True)
"""


def replacing_all_the_time(folder: Path, times: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(REPLACED), str(folder), str(times)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)


def test_another_process_always_sees_a_whole_folder(tmp_path: Path) -> None:
    seen: set[float] = set()
    with replacing_all_the_time(tmp_path, 120) as running:
        assert running.stdout is not None
        running.stdout.readline()
        while running.poll() is None:
            found = values_in(tmp_path / "out")
            assert len(found) == 1, "shards of two checkpoints"
            seen |= found
    assert running.returncode == 0
    assert len(seen) > 10, "it was not looked at while it was replaced"
    assert names(tmp_path) == ["in.safetensors", "out"]


@pytest.mark.covered(lambda seed: seed > 2)
@pytest.mark.parametrize("seed", range(5))
def test_a_kill_at_any_moment_leaves_the_old_folder_or_the_new_one(seed: int, tmp_path: Path) -> None:
    with replacing_all_the_time(tmp_path, 10**6) as running:
        assert running.stdout is not None
        for _ in range(3):
            running.stdout.readline()
        time.sleep(random.Random(seed).random() / 50)
        running.kill()
    assert len(values_in(tmp_path / "out")) == 1


@pytest.mark.parametrize("library", [without_renameat2, *map(refusing, sorted(NO_EXCHANGE))])
def test_without_an_exchange_there_are_two_steps(library: Any, tmp_path: Path, monkeypatch: Any) -> None:
    shards_of(1.0, tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", library)
    for value in (2.0, 3.0):
        shards_of(value, tmp_path)
        assert values_in(tmp_path / "out") == {value}
    assert names(tmp_path) == ["in.safetensors", "out"]


@pytest.mark.parametrize("library", [refusing(errno.EIO), without_renameat2], ids=["exchange", "second step"])
def test_a_step_that_fails_leaves_all_as_it_was(library: Any, tmp_path: Path, monkeypatch: Any) -> None:
    rename = os.rename

    def second_fails(source: str, target: str) -> None:
        if source.endswith(".tmp") and target == str(tmp_path / "out"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    shards_of(1.0, tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", library)
    if library is without_renameat2:
        monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="Input/output"):
        shards_of(2.0, tmp_path)
    monkeypatch.undo()
    assert values_in(tmp_path / "out") == {1.0}
    assert names(tmp_path) == ["in.safetensors", "out"]


def test_a_kill_between_the_two_steps_leaves_the_old_folder_and_a_word_where_it_is(tmp_path: Path) -> None:
    shards_of(1.0, tmp_path)
    script = f"""
        import ctypes, os
        from pathlib import Path
        from tests.support.crafting import shards_of, values_in
        ctypes.CDLL, rename = None, os.rename
        def end_before_the_second(source, target):
            if source.endswith(".tmp") and target.endswith("out"):
                os._exit(9)
            rename(source, target)
        os.rename = end_before_the_second
        shards_of(2.0, Path({str(tmp_path)!r}))
    """
    ends(script)
    with pytest.raises(Unreadable, match="interrupted") as fault:
        ckpttool.open(tmp_path / "out")
    assert str(fault.value.hint).startswith("put them back: mv ")
    subprocess.run(str(fault.value.hint).partition(": ")[2].split(), check=True)
    assert values_in(tmp_path / "out") == {1.0}
    shards_of(3.0, tmp_path)
    assert values_in(tmp_path / "out") == {3.0}
    assert names(tmp_path) == ["in.safetensors", "out"]


DELETING = """
    import os, sys, threading, time
    from ckpttool.core import cli
    unlink = os.unlink
    def slowly(path, **given):
        if ".ckpttool.old" in str(path):
            print("deleting", flush=True)
            time.sleep(0.2)
        unlink(path, **given)
    os.unlink = slowly
    threading.Thread(target=time.sleep, args=[30], daemon=True).start()  # one that hears what the first masks
    sys.argv = ["ckpttool", "convert", "--force", "--to", "safetensors-sharded", *sys.argv[1:]]
    cli.main()
"""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_old_folder_is_deleted_leaves_nothing_of_it(by: int, tmp_path: Path) -> None:
    shards_of(2.0, tmp_path)
    shutil.move(tmp_path / "out", tmp_path / "of 2")
    shards_of(1.0, tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(DELETING), tmp_path / "of 2", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"deleting\n"
        running.send_signal(by)
        assert running.wait(20) == -by
    assert names(tmp_path) == ["in.safetensors", "of 2", "out"]
    assert values_in(tmp_path / "out") == {2.0}


def test_a_folder_is_replaced_in_any_thread_and_handlers_are_left_as_they_were(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in ENDING]
    for replace in (shards_of, in_a_thread(shards_of)):
        for value in (1.0, 2.0):
            replace(value, tmp_path)
            assert values_in(tmp_path / "out") == {value}
    assert [signal.getsignal(number) for number in ENDING] == before
    assert names(tmp_path) == ["in.safetensors", "out"]


def in_a_thread(function: Callable[..., None]) -> Callable[..., None]:
    def call(*given: object) -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(function, *given).result()

    return call


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: Any) -> None:
    """Also when the new one has other shards, so that the old index leads nowhere."""
    shards_of(1.0, tmp_path)
    read, rest = sharded.read, [2.0, 3.0]

    def read_late(source: Any) -> Any:
        if rest and source.path == str(tmp_path / "out"):  # not what saving itself looks at
            shards_of(rest.pop(0), tmp_path)
        return read(source)

    monkeypatch.setattr(sharded, "read", read_late)
    assert values_in(tmp_path / "out") == {3.0}
