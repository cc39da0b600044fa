"""A safetensors file that gets other names: whoever reads it finds the old ones or the new ones."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool import system
from ckpttool.errors import Damaged
from ckpttool.files import copying
from ckpttool.files.copying import Output
from ckpttool.formats import Saved, safetensors
from tests.support.comparing import opened, values
from tests.support.extents import clone_range
from tests.support.running import Cli

STATE = {f"module.layer{i}.weight": torch.full((5, 3), float(i)) for i in range(4)}
PLAIN = {name.removeprefix("module."): tensor for name, tensor in STATE.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(STATE, tmp_path / "m.safetensors", metadata={"format": "pt"})
    return tmp_path / "m.safetensors"


def save_over(path: Path, change: Callable[..., Any], out: Path | None = None, **given: Any) -> Saved:
    with ckpttool.open(path) as checkpoint:
        return ckpttool.save(change(checkpoint)[0], out or path, force=True, **given)


def strip(path: Path, **given: Any) -> Saved:
    return save_over(path, ckpttool.strip_prefix, **given)


def contents(path: Path) -> dict[str, bytes]:
    """What this library finds in the file: names and values."""
    with ckpttool.open(path) as checkpoint:
        return {name: tensor.data.read() for name, tensor in checkpoint.state().tensors.items()}


def of(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: values(tensor) for name, tensor in state.items()}


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that shares blocks of a byte between files: no payload may be copied."""
    monkeypatch.setattr(fcntl, "ioctl", clone_range)
    monkeypatch.setattr("ckpttool.files.sharing.BLOCK", 1)
    monkeypatch.setattr(copying, "SMALL", 0)
    monkeypatch.setattr(Output, "_put", Mock(side_effect=AssertionError("payload was moved")))


@pytest.fixture(params=["copied", "shared"])
def both_ways(request: pytest.FixtureRequest) -> None:
    if request.param == "shared":
        request.getfixturevalue("sharing")


# What changes, and what does not.


@pytest.mark.usefixtures("both_ways")
def test_the_payload_stays_as_it_is_and_the_file_keeps_its_size(path: Path) -> None:
    size, payload = path.stat().st_size, path.read_bytes()[-240:]
    saved = strip(path)
    assert (path.stat().st_size, saved.nbytes) == (size, size)
    assert path.read_bytes()[-240:] == payload
    assert contents(path) == of(PLAIN)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in PLAIN.items())
    assert os.listdir(path.parent) == [path.name]


def test_the_file_is_the_same_whether_blocks_are_shared(path: Path, request: pytest.FixtureRequest) -> None:
    other = Path(shutil.copy(path, path.with_name("other.safetensors")))
    strip(path)
    request.getfixturevalue("sharing")
    strip(other)
    assert path.read_bytes() == other.read_bytes()


@pytest.mark.usefixtures("both_ways")
def test_a_header_grows_into_its_padding(path: Path) -> None:
    strip(path)
    save_over(path, ckpttool.add_prefix)
    assert contents(path) == of(STATE)


def test_a_header_that_does_not_fit_makes_a_longer_file(path: Path) -> None:
    size = path.stat().st_size
    save_over(path, partial(ckpttool.add_prefix, prefix="a.very.long.prefix." * 5))
    assert path.stat().st_size > size
    assert sorted(load_file(path)) == ["a.very.long.prefix." * 5 + name for name in STATE]
    assert os.listdir(path.parent) == [path.name]


def test_tensors_whose_order_in_the_file_is_another_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    state = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int64), "c": torch.ones(1)}
    save_file(state, path)
    save_over(path, partial(ckpttool.rename_keys, rules=[("^a", "z"), ("^b", "y"), ("^c", "x")]))
    assert of(load_file(path)) == of(dict(zip("yzx", state.values(), strict=True)))


def test_fewer_tensors_make_a_shorter_file(path: Path) -> None:
    size = path.stat().st_size
    save_over(path, partial(ckpttool.select, exclude=["*layer0*"]))
    assert path.stat().st_size < size
    assert sorted(load_file(path)) == sorted(STATE)[1:]


@pytest.mark.usefixtures("both_ways")
def test_ties_are_kept_in_the_metadata_of_the_new_header(tmp_path: Path) -> None:
    path, metadata = tmp_path / "m.safetensors", {"module.head": "module.wte", "who": "me"}
    save_file({"module.wte": torch.ones(2, 2)}, path, metadata=metadata)
    strip(path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"head": "wte", "who": "me", "format": "pt"}
        assert list(file.keys()) == ["wte"]


def test_copies_of_ties_make_a_longer_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"module.wte": torch.ones(2, 2)}, path, metadata={"module.head": "module.wte"})
    strip(path, keep_copies=True)
    assert of(load_file(path)) == of(dict.fromkeys(("head", "wte"), torch.ones(2, 2)))


def test_a_whole_checkpoint_in_safetensors_is_not_taken_for_a_state(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ckpttool.save(opened({"model": STATE, "epoch": 3}, tmp_path), path, full=True)
    strip(path, full=True)
    again = ckpttool.open(path)
    assert again.tree["epoch"] == 3
    assert list(again.state().tensors) == list(PLAIN)


@pytest.mark.usefixtures("both_ways")
def test_values_are_compared_before_a_file_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strip(path, verify=True)
    assert contents(path) == of(PLAIN)
    before = path.read_bytes()
    monkeypatch.setattr("ckpttool.files.digest.digest", lambda tensors, progress: id(tensors))
    with pytest.raises(Damaged, match="does not read back"):
        save_over(path, lambda checkpoint: ckpttool.rename_keys(checkpoint, [("layer", "l")]), verify=True)
    assert path.read_bytes() == before


def test_a_header_that_does_not_read_back_is_never_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, before = safetensors.header, path.read_bytes()

    def wrong(*given: Any, **more: Any) -> bytes:
        return right(*given, **more).replace(b"layer1", b"layer2")

    monkeypatch.setattr(safetensors, "header", wrong)
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


# Where other files or people are concerned.


@pytest.mark.usefixtures("both_ways")
def test_through_a_symbolic_link_the_file_behind_it_is_rewritten(path: Path) -> None:
    link = path.parent / "link.safetensors"
    link.symlink_to(path.name)
    strip(link)
    assert link.is_symlink()
    assert contents(path) == of(PLAIN)


@pytest.mark.parametrize("is_output", [False, True])
@pytest.mark.usefixtures("both_ways")
def test_other_hard_links_keep_what_they_have(is_output: bool, path: Path) -> None:
    other = path.parent / "other.safetensors"
    os.link(path, other)
    save_over(path, ckpttool.strip_prefix, other if is_output else path)
    assert contents(path if is_output else other) == of(STATE)
    assert contents(other if is_output else path) == of(PLAIN)


def test_a_file_that_may_not_be_written_is_replaced_and_keeps_its_permissions(path: Path) -> None:
    path.chmod(0o444)
    strip(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert contents(path) == of(PLAIN)


@pytest.mark.usefixtures("both_ways")
def test_a_full_disk_leaves_the_file_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        strip(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_nothing_beside_the_file_is_read_or_written(kind: str, path: Path) -> None:
    """A journal had this name once: a link of it led a write elsewhere, a pipe kept every reader waiting."""
    journal, bashrc = path.with_name(f".{path.name}.ckpttool-journal"), path.with_name("bashrc")
    bashrc.write_text("mine")
    if kind == "link":
        journal.symlink_to("bashrc")
    elif kind == "pipe":
        os.mkfifo(journal)
    else:
        header = path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
        forged, half = header.replace(b"layer", b"lAyer"), len(header) // 2
        both = header[:half] + forged[half:] + forged[:half] + header[half:]
        journal.write_bytes(b"ckpttool journal 1\n" + hashlib.sha256(both).digest() + both)
    assert contents(path) == of(STATE)
    strip(path)
    assert contents(path) == of(PLAIN)
    assert bashrc.read_text() == "mine"
    assert sorted(path.parent.iterdir()) == sorted([journal, bashrc, path])


# Crashes.


CHANGING = ("pwrite", "fsync", "unlink", "replace", "rename", "open", "fchmod", "ftruncate")


def crash(at: int, half: bool) -> None:
    """End this process at the n-th call that changes files, before it or in the middle of it."""
    calls = itertools.count(1)

    def wrapped(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def changing(*given: Any, **more: Any) -> Any:
            if next(calls) == at:
                if half and name == "pwrite":
                    fd, data, position = given
                    call(fd, bytes(data)[: len(data) // 2], position)
                os._exit(9)
            return call(*given, **more)

        return changing

    for name in CHANGING:
        owner = system if name == "pwrite" else os
        setattr(owner, name, wrapped(getattr(owner, name), name))


def ends_after(calls: int, half: bool, action: Callable[[], object]) -> bool:
    """Runs the action in a process of its own that dies at a call; whether it got to its end."""
    child = os.fork()
    if child == 0:
        try:
            crash(calls, half)
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 0


@pytest.mark.covered(lambda half, both_ways: not half)
@pytest.mark.parametrize("half", [False, True], ids=["before the call", "in the middle of a write"])
@pytest.mark.usefixtures("both_ways")
def test_killed_at_any_call_the_file_holds_the_old_names_or_the_new(half: bool, path: Path) -> None:
    kept, seen = path.read_bytes(), []
    for calls in range(1, 100):
        copy = path.parent / f"{calls}" / path.name
        copy.parent.mkdir()
        copy.write_bytes(kept)
        ended = ends_after(calls, half, lambda copy=copy: strip(copy))  # type: ignore[misc]
        assert of(load_file(copy)) == contents(copy)
        assert contents(copy) in (of(STATE), of(PLAIN))
        seen.append(contents(copy) == of(PLAIN))
        # And the next save leaves nothing of the killed one.
        save_over(copy, lambda checkpoint: ckpttool.rename_keys(checkpoint, [("^.*layer", "x")]))
        assert os.listdir(copy.parent) == [copy.name]
        if ended:
            break
    assert ended and calls > 4
    assert seen[0] is False and seen[-1] is True


# Others who read meanwhile.


def test_a_reader_who_came_before_keeps_his_names_and_values(path: Path) -> None:
    with ckpttool.open(path) as before:
        strip(path)
        assert {name: tensor.data.read() for name, tensor in before.state().tensors.items()} == of(STATE)


def test_whoever_reads_while_names_change_all_the_time_sees_one_set_of_them(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    state = {f"module.{i}.{'n' * 100}": torch.full((1,), float(i)) for i in range(200)}
    sets = {frozenset(state), frozenset(name.removeprefix("module.") for name in state)}
    save_file(state, path)
    child = os.fork()
    if child == 0:
        try:
            for change in itertools.cycle((ckpttool.strip_prefix, ckpttool.add_prefix)):
                save_over(path, change)
        finally:
            os._exit(1)
    try:
        seen, began = set(), time.monotonic()
        while time.monotonic() < began + 1 or (len(seen) < 2 and time.monotonic() < began + 20):
            with safe_open(path, "pt") as theirs:
                seen.add(frozenset(theirs.keys()))
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


def test_the_command_line_renames_in_place(cli: Cli, path: Path) -> None:
    assert cli("strip-prefix", path, path).code == 2  # not without --force
    ran = cli("strip-prefix", path, path, "--force", "--json")
    assert (ran.code, ran.json["keys"], ran.json["renamed"]) == (0, 4, 4)
    assert of(load_file(path)) == of(PLAIN)
