"""Compressed records: read as torch reads them, and refused where it would return uninitialised memory."""

from __future__ import annotations

import contextlib
import gc
import random
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.errors import CkptToolError, Refused, Unsupported
from ckpttool.formats.pytorch import inflating
from ckpttool.tensors.to_torch import live_tensors
from tests.support.comparing import assert_same, values
from tests.support.crafting import dict_of, storage, tensor, torch_zip
from tests.support.running import open_files
from tests.support.saved import refused

RECORD = "archive/data/0"
LOCAL_SIZES, LOCAL_CRC, CENTRAL_SIZES, CENTRAL_CRC = 18, 14, 20, 16


def deflated(path: Path, *, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """Zip the records of a file again with compression."""
    out = path.with_suffix(".deflated")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return out


def one_tensor(path: Path, numel: int, raw: bytes) -> Path:
    body = dict_of({"a": tensor(storage(numel), (numel,))})
    return torch_zip(path, body, {"0": raw}, compression=zipfile.ZIP_DEFLATED)


def patched(path: Path, record: str, change: Callable[[bytes], bytes]) -> Path:
    """Replace the payload of one record, and correct the sizes and offsets that depend on it."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(record)
        entries = archive.infolist()
    raw = bytearray(path.read_bytes())
    start = info.header_offset + 30 + sum(struct.unpack_from("<HH", raw, info.header_offset + 26))
    new = change(bytes(raw[start : start + info.compress_size]))
    raw[start : start + info.compress_size] = new
    shift = len(new) - info.compress_size
    directory = raw.find(b"PK\x01\x02")
    struct.pack_into("<I", raw, info.header_offset + LOCAL_SIZES, len(new))
    for entry in entries:
        named = raw.find(entry.filename.encode(), directory) - 46
        if entry.filename == record:
            struct.pack_into("<I", raw, named + CENTRAL_SIZES, len(new))
        if entry.header_offset > info.header_offset:
            struct.pack_into("<I", raw, named + 42, entry.header_offset + shift)
    struct.pack_into("<I", raw, raw.rfind(b"PK\x05\x06") + 16, directory)
    path.write_bytes(raw)
    return path


def restated(path: Path, *, size: int | None = None, crc: int | None = None) -> Path:
    """State another size or checksum for the tensor's record in both of its headers."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(RECORD)
    raw = bytearray(path.read_bytes())
    named = raw.find(RECORD.encode(), raw.find(b"PK\x01\x02")) - 46
    headers = (info.header_offset, LOCAL_SIZES, LOCAL_CRC), (named, CENTRAL_SIZES, CENTRAL_CRC)
    for at, sizes, crcs in headers:
        if size is not None:
            struct.pack_into("<I", raw, at + sizes + 4, size)
        if crc is not None:
            struct.pack_into("<I", raw, at + crcs, crc)
    path.write_bytes(raw)
    return path


TREE: dict[str, Any] = {
    "model": {"a": torch.arange(1000.0), "b": torch.eye(8, dtype=torch.float16), "empty": torch.ones(0, 3)},
    "epoch": 3,
}


def test_a_compressed_file_has_the_same_contents(tmp_path: Path) -> None:
    torch.save(TREE, tmp_path / "in.pt")
    path = deflated(tmp_path / "in.pt")
    checkpoint = ckpttool.open(path)
    found = live_tensors(checkpoint.state().tensors)
    assert {name: values(tensor) for name, tensor in found.items()} == {
        name: values(tensor) for name, tensor in TREE["model"].items()
    }
    ckpttool.save(checkpoint, tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt"), torch.load(tmp_path / "in.pt"))


def test_an_inflated_storage_keeps_its_checksum(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1000.0)}, tmp_path / "in.pt")
    found = ckpttool.open(deflated(tmp_path / "in.pt")).state().tensors["a"].storage
    assert found.crc32 == zlib.crc32(values(torch.arange(1000.0)))


def test_inflated_bytes_leave_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(TREE, tmp_path / "in.pt")
    path = deflated(tmp_path / "in.pt")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    before = open_files()
    with ckpttool.open(path) as checkpoint:
        assert list((tmp_path / "temporary").iterdir()) == []
        checkpoint.state().tensors["a"].storage.data.read()
    del checkpoint
    gc.collect()
    assert not open_files() - before


def test_unused_records_are_not_inflated(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "f", b"}", {"0": bytes(1 << 20)}, compression=zipfile.ZIP_DEFLATED)
    assert ckpttool.open(patched(path, RECORD, lambda raw: b"x" * len(raw))).tree == {}


NOISE = random.Random(0).randbytes(4000)
SHORT, WRONG = "does not inflate to exactly 4000 bytes", f"'{RECORD}' does not match its checksum"


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: patched(path, RECORD, change)


STREAMS: dict[str, tuple[bytes, Callable[[Path], object], str]] = {
    "cut short": (NOISE, changed(lambda raw: raw[: len(raw) // 2]), f"'{RECORD}' {SHORT}"),
    "ending before its record": (NOISE, changed(lambda raw: raw + b"more"), SHORT),
    "inflating to more than is stated": (bytes(8000), lambda path: restated(path, size=4000), SHORT),
    "inflating to less than is stated": (bytes(3000), lambda path: restated(path, size=4000), SHORT),
    "a wrong checksum": (bytes(4000), lambda path: restated(path, crc=1), WRONG),
    "invalid": (bytes(4000), changed(lambda raw: b"\xff" * 9), "not a valid deflate stream"),
}


@pytest.mark.parametrize("what", STREAMS)
def test_a_stream_that_is_not_what_the_directory_states_is_damaged(what: str, tmp_path: Path) -> None:
    raw, change, said = STREAMS[what]
    path = one_tensor(tmp_path / "f", 1000, raw)
    change(path)
    refused(path, said)


def test_a_missing_checksum_is_accepted(tmp_path: Path) -> None:
    path = restated(one_tensor(tmp_path / "f", 1000, bytes(4000)), crc=0)
    assert ckpttool.open(path).state().tensors["a"].storage.crc32 is None


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"])
def test_compression_methods_that_torch_lacks_are_unsupported(method: int, tmp_path: Path) -> None:
    torch.save(TREE, tmp_path / "in.pt")
    path = deflated(tmp_path / "in.pt", method=method)
    refusal = refused(path, "compressed in a way that is not read here", Unsupported)
    assert "without compression" in str(refusal.hint)


# Bombs.


def test_a_size_beyond_what_deflate_can_do_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = one_tensor(tmp_path / "f", 1 << 28, bytes(1 << 20))
    restated(path, size=1 << 30)
    refused(path, "states a size that deflate can't reach")


def test_a_pickle_that_grows_too_much_is_refused(tmp_path: Path) -> None:
    body = b"]" * (8 << 20) + b"."
    path = torch_zip(tmp_path / "f", b"\x80\x02" + body, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 20_000
    refused(path, r"'archive/data\.pkl' would grow", Refused)


def test_the_growth_of_all_records_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflating, "SMALL", 1 << 20)
    tensors = {str(i): tensor(storage(1 << 18, key=str(i)), (1 << 18,)) for i in range(3)}
    records = dict.fromkeys(tensors, bytes(1 << 20))
    path = torch_zip(tmp_path / "f", dict_of(tensors), records, compression=zipfile.ZIP_DEFLATED)
    refused(path, "would grow from", Refused)
    monkeypatch.setattr(inflating, "SMALL", 3 << 20)
    assert len(ckpttool.open(path).state().tensors) == 3


@given(st.binary(max_size=3000), st.integers(1, 4096), st.integers(0, 9))
def test_any_bytes_are_inflated_with_any_chunk_size(raw: bytes, chunk: int, level: int) -> None:
    raw = raw * 4
    body = dict_of({"a": tensor(storage(len(raw) // 4), (len(raw) // 4,))})
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path, method = Path(folder) / "f", zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(path, "w", method, compresslevel=level) as file:
            file.writestr("a/data.pkl", b"\x80\x02" + body + b".")
            file.writestr("a/data/0", raw)
        patch.setattr(inflating, "CHUNK", chunk)
        assert ckpttool.open(path).state().tensors["a"].storage.data.read() == raw


@given(st.data())
def test_a_compressed_file_changed_anywhere_is_read_as_it_was_or_refused(data: st.DataObject) -> None:
    """A checksum covers every byte of every record."""
    with tempfile.TemporaryDirectory() as folder:
        path = one_tensor(Path(folder) / "f", 64, NOISE[:256])
        raw = bytearray(path.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        with contextlib.suppress(CkptToolError):
            found = ckpttool.open(path).state().tensors.values()
            assert [tensor.storage.data.read() for tensor in found] in ([NOISE[:256]], [])
