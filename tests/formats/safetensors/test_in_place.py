"""A safetensors file whose names change where it stands: no payload moves, and no moment is unsafe."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Damaged
from ckpttool.files.copying import Output
from ckpttool.formats.safetensors import in_place
from ckpttool.formats.safetensors.in_place import Journal, journal_path
from ckpttool.tensors.ref import Source
from ckpttool.transforms.keys import add_prefix, rename_keys, strip_prefix
from tests.support.comparing import values
from tests.support.running import Ran

STATE = {f"module.layer{i}.weight": torch.full((5, 3), float(i)) for i in range(4)}
PLAIN = {name.removeprefix("module."): tensor for name, tensor in STATE.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(STATE, tmp_path / "m.safetensors", metadata={"format": "pt"})
    return tmp_path / "m.safetensors"


def strip(path: Path, **given: Any) -> Any:
    with ckpttool.open(path) as checkpoint:
        new, _ = strip_prefix(checkpoint)
        return ckpttool.save(new, path, force=True, **given)


def contents(path: Path) -> dict[str, bytes]:
    """What this library finds in the file: names and values."""
    with ckpttool.open(path) as checkpoint:
        return {name: tensor.data.read() for name, tensor in checkpoint.state().tensors.items()}


def of(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: values(tensor) for name, tensor in state.items()}


@pytest.fixture
def unmoved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No payload may be copied."""

    def moved(*_: Any) -> None:
        raise AssertionError("payload was moved")

    monkeypatch.setattr(Output, "copy", moved)
    monkeypatch.setattr(Output, "write_all", moved)


# What changes, and what does not.


@pytest.mark.usefixtures("unmoved")
def test_a_header_that_shrinks_is_rewritten_where_it_stands(path: Path) -> None:
    inode, size, payload = path.stat().st_ino, path.stat().st_size, path.read_bytes()[-240:]
    saved = strip(path)
    assert (path.stat().st_ino, path.stat().st_size) == (inode, size)
    assert path.read_bytes()[-240:] == payload
    assert saved.nbytes == size
    assert contents(path) == of(PLAIN)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in PLAIN.items())
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.usefixtures("unmoved")
def test_a_header_that_grew_into_its_padding_is_rewritten_there_too(path: Path) -> None:
    strip(path)
    with ckpttool.open(path) as checkpoint:
        new, _ = add_prefix(checkpoint)
        ckpttool.save(new, path, force=True)
    assert contents(path) == of(STATE)


def test_a_header_that_does_not_fit_makes_a_new_file(path: Path) -> None:
    inode = path.stat().st_ino
    with ckpttool.open(path) as checkpoint:
        new, _ = add_prefix(checkpoint, "a.very.long.prefix." * 5)
        ckpttool.save(new, path, force=True)
        assert path.stat().st_ino != inode
    assert sorted(load_file(path)) == ["a.very.long.prefix." * 5 + name for name in STATE]
    assert os.listdir(path.parent) == [path.name]


def test_tensors_whose_order_in_the_file_is_another_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    state = {
        "module.b": torch.ones(3),
        "module.a": torch.zeros(2, dtype=torch.int64),
        "module.c": torch.ones(1),
    }
    save_file(state, path)
    with ckpttool.open(path) as checkpoint:
        new, _ = rename_keys(checkpoint, [("module.a", "z"), ("module.b", "y"), ("module.c", "x")])
        ckpttool.save(new, path, force=True)
    assert of(load_file(path)) == of(dict(zip("yzx", state.values(), strict=True)))


def test_fewer_tensors_make_a_new_file(path: Path) -> None:
    from ckpttool.transforms.selection import select

    inode = path.stat().st_ino
    with ckpttool.open(path) as checkpoint:
        new, _ = select(checkpoint, exclude=["*layer0*"])
        ckpttool.save(new, path, force=True)
        assert path.stat().st_ino != inode
    assert sorted(load_file(path)) == sorted(STATE)[1:]


@pytest.mark.usefixtures("unmoved")
def test_ties_are_kept_in_the_metadata_of_the_new_header(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"module.wte": torch.ones(2, 2)}, path, metadata={"module.head": "module.wte", "who": "me"})
    strip(path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"head": "wte", "who": "me", "format": "pt"}
        assert list(file.keys()) == ["wte"]


def test_copies_of_ties_make_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"module.wte": torch.ones(2, 2)}, path, metadata={"module.head": "module.wte"})
    strip(path, keep_copies=True)
    assert of(load_file(path)) == of({"head": torch.ones(2, 2), "wte": torch.ones(2, 2)})


def test_a_whole_checkpoint_in_safetensors_is_not_taken_for_a_state(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    torch.save({"model": STATE, "epoch": 3}, tmp_path / "in.pt")
    ckpttool.save(ckpttool.open(tmp_path / "in.pt"), path, full=True)
    with ckpttool.open(path) as checkpoint:
        new, _ = strip_prefix(checkpoint)
        ckpttool.save(new, path, full=True, force=True)
    again = ckpttool.open(path)
    assert again.tree["epoch"] == 3
    assert list(again.state().tensors) == list(PLAIN)


@pytest.mark.usefixtures("unmoved")
def test_the_values_are_compared_before_the_header_changes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strip(path, verify=True)
    assert contents(path) == of(PLAIN)
    before = path.read_bytes()
    monkeypatch.setattr("ckpttool.files.digest.digest", lambda tensors, progress: id(tensors))
    with ckpttool.open(path) as checkpoint, pytest.raises(Damaged, match="does not read back"):
        ckpttool.save(rename_keys(checkpoint, [("layer", "l")])[0], path, force=True, verify=True)
    assert path.read_bytes() == before


def test_a_header_that_does_not_read_back_is_never_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.formats.safetensors import format as safetensors

    right, before = safetensors.header, path.read_bytes()
    monkeypatch.setattr(
        safetensors, "header", lambda *given, **more: right(*given, **more).replace(b"layer1", b"layer2")
    )
    with pytest.raises(Damaged):
        strip(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_dry_run_writes_nothing_and_tells_the_size(path: Path) -> None:
    before, changed = path.read_bytes(), path.stat().st_mtime_ns
    assert strip(path, dry_run=True).nbytes == len(before)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, changed)
    assert os.listdir(path.parent) == [path.name]
    assert strip(path).nbytes == len(before)


def test_a_pt_file_over_itself_is_written_anew(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "m.pt")
    strip(tmp_path / "m.pt")
    assert of(torch.load(tmp_path / "m.pt")) == of(PLAIN)
    assert os.listdir(tmp_path) == ["m.pt"]


# Where other files or people are concerned.


@pytest.mark.usefixtures("unmoved")
def test_through_a_symbolic_link_the_file_behind_it_is_rewritten(path: Path) -> None:
    link = path.parent / "link.safetensors"
    link.symlink_to(path.name)
    strip(link)
    assert link.is_symlink()
    assert contents(path) == of(PLAIN)


def test_other_hard_links_keep_what_they_have(path: Path) -> None:
    other = path.parent / "backup.safetensors"
    os.link(path, other)
    strip(path)
    assert contents(other) == of(STATE)
    assert contents(path) == of(PLAIN)


def test_a_hard_link_as_output_does_not_change_the_input(path: Path) -> None:
    other = path.parent / "out.safetensors"
    os.link(path, other)
    with ckpttool.open(path) as checkpoint:
        ckpttool.save(strip_prefix(checkpoint)[0], other, force=True)
    assert contents(path) == of(STATE)
    assert contents(other) == of(PLAIN)


def test_a_file_that_was_replaced_meanwhile_is_not_touched(path: Path) -> None:
    save_file({"other": torch.ones(1)}, path.parent / "new")
    with ckpttool.open(path) as checkpoint:
        header = in_place.read_header(checkpoint.source)
        os.replace(path.parent / "new", path)
        assert not in_place.replace_header(checkpoint.source, header)
    assert list(load_file(path)) == ["other"]


def test_a_file_that_may_not_be_written_is_replaced_and_keeps_its_permissions(path: Path) -> None:
    path.chmod(0o444)
    strip(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert contents(path) == of(PLAIN)


def test_a_file_that_another_one_rewrites_is_left_to_it(path: Path) -> None:
    with open(path, "rb") as other, ckpttool.open(path) as checkpoint:
        fcntl.flock(other, fcntl.LOCK_EX)
        header = in_place.read_header(checkpoint.source)
        assert not in_place.replace_header(checkpoint.source, header)


def test_a_folder_without_room_for_a_journal_leaves_the_file_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write = path.read_bytes(), os.fsync

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        strip(path)
    monkeypatch.setattr(os, "fsync", write)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def cloning(fd: int, request: int, source: int) -> int:
    """What a file system with reflinks does."""
    assert request == in_place.FICLONE
    os.sendfile(fd, source, 0, os.fstat(source).st_size)
    return 0


def test_where_blocks_can_be_shared_a_clone_takes_the_file_s_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "ioctl", cloning)
    inode = path.stat().st_ino
    with ckpttool.open(path) as checkpoint:
        ckpttool.save(strip_prefix(checkpoint)[0], path, force=True)
        assert path.stat().st_ino != inode
    assert contents(path) == of(PLAIN)
    assert of(load_file(path)) == of(PLAIN)
    assert os.listdir(path.parent) == [path.name]


# Crashes.


class Crash(BaseException):
    """The process ends here."""


class Crashing:
    """Ends the process at the n-th call that changes files, before it or in the middle of it."""

    CHANGING = ("pwrite", "fsync", "unlink", "replace", "rename", "open", "fchmod", "ftruncate")

    def __init__(self, at: int, half: bool) -> None:
        self.left, self.half = at, half

    def install(self) -> None:
        for name in self.CHANGING:
            setattr(os, name, self.wrapped(getattr(os, name)))

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*given: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if self.half and call.__name__ == "pwrite":
                    fd, data, position = given
                    call(fd, bytes(data)[: len(data) // 2], position)
                os._exit(9)
            return call(*given, **more)

        changing.__name__ = call.__name__
        return changing


def ends_after(calls: int, half: bool, action: Callable[[], object]) -> bool:
    """Runs the action in a process of its own that dies at a call; whether it got to its end."""
    child = os.fork()
    if child == 0:
        try:
            Crashing(calls, half).install()
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 0


@pytest.mark.parametrize("half", [False, True], ids=["before the call", "in the middle of a write"])
@pytest.mark.parametrize("cloned", [False, True], ids=["journal", "clone"])
def test_killed_at_any_call_the_file_holds_the_old_names_or_the_new(
    half: bool, cloned: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cloned:
        monkeypatch.setattr(fcntl, "ioctl", cloning)
    kept = path.read_bytes()
    seen = []
    for calls in range(1, 100):
        folder = path.parent / f"{calls}"
        folder.mkdir()
        copy = folder / path.name
        copy.write_bytes(kept)
        ended = ends_after(calls, half, lambda copy=copy: strip(copy))  # type: ignore[misc]
        found = contents(copy)
        assert found in (of(STATE), of(PLAIN))
        seen.append(found == of(PLAIN))
        with ckpttool.open(copy) as checkpoint:  # and the next one puts all in order
            ckpttool.save(rename_keys(checkpoint, [("^.*layer", "x")])[0], copy, force=True)
        assert of(load_file(copy)) == of({f"x{i}.weight": each for i, each in enumerate(STATE.values())})
        assert not Path(journal_path(str(copy))).exists()
        if ended:
            break
    assert ended and calls > 8
    assert seen[0] is False and seen[-1] is True


def test_a_header_half_written_is_read_from_the_journal(path: Path) -> None:
    old = path.read_bytes()
    for calls in range(1, 100):
        path.write_bytes(old)
        in_place.forget(str(path))
        assert not ends_after(calls, True, lambda: strip(path))
        if path.read_bytes() != old:
            break
    with pytest.raises(Exception, match=r"[Hh]eader|JSON"):  # nothing else can read it now
        load_file(path)
    assert contents(path) == of(STATE)


def test_a_crash_while_putting_right_what_a_crash_left_is_safe_too(path: Path) -> None:
    half = half_written(path)
    for calls in range(1, 100):
        folder = path.parent / f"again{calls}"
        shutil.copytree(half, folder)
        ended = ends_after(calls, True, lambda folder=folder: strip(folder / path.name))  # type: ignore[misc]
        assert contents(folder / path.name) in (of(STATE), of(PLAIN))
        if ended:
            break
    assert ended


def half_written(path: Path) -> Path:
    """A folder as a crash in the middle of the header leaves it."""
    folder = path.parent / "half"
    folder.mkdir()
    old = path.read_bytes()
    with ckpttool.open(path) as checkpoint:
        source = checkpoint.source
        (folder / path.name).write_bytes(old)
        before = in_place.read_header(source)
        new = strip_prefix(checkpoint)[0].state().tensors
        from ckpttool.formats.safetensors.format import header

        after = header(source.path, sorted(new.items(), key=in_place.by_place), {}, fill=len(before))
    write_journal(folder / path.name, before, after)
    torn = after[: len(after) // 2] + before[len(after) // 2 :]
    (folder / path.name).write_bytes(torn + old[len(torn) :])
    return folder


def write_journal(path: Path, old: bytes, new: bytes) -> None:
    import hashlib

    raw = in_place.MAGIC + hashlib.sha256(old + new).digest() + old + new
    Path(journal_path(str(path))).write_bytes(raw)


def test_an_interrupted_rewriting_is_taken_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM and control-C raise in the middle; the process still can put things right."""
    before, pwrite = path.read_bytes(), os.pwrite

    def interrupted(fd: int, data: Any, position: int) -> int:
        if position == 0 and bytes(data) != before[: len(data)] and os.fstat(fd).st_ino == path.stat().st_ino:
            pwrite(fd, bytes(data)[:100], position)
            raise KeyboardInterrupt
        return pwrite(fd, data, position)

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        strip(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_where_even_putting_back_fails_the_journal_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, inode = os.pwrite, path.stat().st_ino

    def failing(fd: int, data: Any, position: int) -> int:
        if os.fstat(fd).st_ino == inode:
            pwrite(fd, bytes(data)[:100], position)
            raise OSError(errno.EIO, "Input/output error")
        return pwrite(fd, data, position)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match="Input/output"):
        strip(path)
    assert Path(journal_path(str(path))).exists()
    assert contents(path) == of(STATE)


# Journals that are somebody else's.


def stale(path: Path) -> None:
    """A journal as a crash after the last byte of the header leaves it."""
    old = path.read_bytes()
    with ckpttool.open(path) as checkpoint:
        before = in_place.read_header(checkpoint.source)
    strip(path)
    write_journal(path, before, path.read_bytes()[: len(before)])
    assert old != path.read_bytes()


def test_a_journal_that_outlived_its_rewriting_is_ignored(path: Path) -> None:
    stale(path)
    assert contents(path) == of(PLAIN)


@pytest.mark.parametrize("how", ["replaced", "overwritten", "shorter"])
def test_a_journal_of_a_file_that_others_wrote_anew_is_ignored(how: str, path: Path) -> None:
    stale(path)
    other = (
        {"w": torch.arange(3)}
        if how == "shorter"
        else {name[7:]: tensor + 1 for name, tensor in STATE.items()}
    )
    save_file(other, path.parent / "new")
    if how == "replaced":
        os.replace(path.parent / "new", path)
    else:
        path.write_bytes((path.parent / "new").read_bytes())
    assert contents(path) == of(other)


def test_a_new_file_from_this_library_has_no_journal_of_the_old_one(path: Path) -> None:
    stale(path)
    with ckpttool.open(path) as checkpoint:
        ckpttool.save(checkpoint, path.parent / "other.safetensors")
    with ckpttool.open(path.parent / "other.safetensors") as checkpoint:
        ckpttool.save(checkpoint, path, force=True)
    assert not Path(journal_path(str(path))).exists()
    assert contents(path) == of(PLAIN)


@pytest.mark.parametrize("cut", [0, 1, 10, 19, 40, 51, 60, -1])
def test_a_journal_that_is_cut_short_is_none(cut: int, path: Path) -> None:
    stale(path)
    journal = Path(journal_path(str(path)))
    journal.write_bytes(journal.read_bytes()[:cut])
    assert contents(path) == of(PLAIN)


def test_a_journal_that_is_no_file_is_none(path: Path) -> None:
    Path(journal_path(str(path))).mkdir()
    assert contents(path) == of(STATE)
    strip(path)
    assert contents(path) == of(PLAIN)


@given(st.binary(min_size=4, max_size=12), st.integers(0, 12), st.data())
def test_a_journal_explains_mixtures_of_its_two_headers_alone(
    old: bytes, cut: int, data: st.DataObject
) -> None:
    new = data.draw(st.binary(min_size=len(old), max_size=len(old)))
    journal = Journal(old, new)
    mixed = new[:cut] + old[cut:]
    assert journal.explains(mixed) == (mixed not in (old, new))
    assert not journal.explains(old) and not journal.explains(new)
    other = data.draw(st.binary(min_size=len(old), max_size=len(old)))
    if journal.explains(other):
        assert all(byte in pair for byte, *pair in zip(other, old, new, strict=True))
    assert not journal.explains(mixed + b"x")


# Others who read meanwhile.


def test_a_reader_who_came_before_keeps_his_names_and_values(path: Path) -> None:
    with ckpttool.open(path) as before:
        strip(path)
        assert {name: tensor.data.read() for name, tensor in before.state().tensors.items()} == of(STATE)


def test_a_header_that_was_seen_half_rewritten_is_looked_at_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewriting may have ended, journal and all, between the first look and the look for its journal."""
    looks = iter([b"old half, new half", b"new", b"new"])
    monkeypatch.setattr(in_place, "_header_now", lambda source: next(looks))
    with open(path, "rb") as file:
        assert in_place.read_header(Source(str(path), os.dup(file.fileno()))) == b"new"


def test_whoever_reads_while_names_change_all_the_time_sees_one_set_of_them(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    state = {f"module.{i}.{'n' * 100}": torch.full((1,), float(i)) for i in range(200)}
    save_file(state, path)
    child = os.fork()
    if child == 0:
        try:
            while True:
                for change in (strip_prefix, add_prefix):
                    with ckpttool.open(path) as checkpoint:
                        ckpttool.save(change(checkpoint)[0], path, force=True)
        finally:
            os._exit(1)
    try:
        sets = {frozenset(state), frozenset(name.removeprefix("module.") for name in state)}
        seen, until = set(), time.monotonic() + 2
        while time.monotonic() < until:
            with ckpttool.open(path) as checkpoint:
                tensors = checkpoint.state().tensors
                seen.add(frozenset(tensors))
                name = next(iter(tensors))
                value = struct.unpack("<f", tensors[name].data.read())[0]
                assert int(value) == int(name.removeprefix("module.").split(".")[0])
        assert seen == sets
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_the_command_line_renames_in_place(cli: Callable[..., Ran], path: Path) -> None:
    assert cli("strip-prefix", path, path).code == 2  # not without --force
    inode = path.stat().st_ino
    ran = cli("strip-prefix", path, path, "--force", "--json")
    assert (ran.code, ran.json["keys"], ran.json["renamed"]) == (0, 4, 4)
    assert path.stat().st_ino == inode
    assert of(load_file(path)) == of(PLAIN)
