"""The zip container: Python's and torch's files are read, compressed ones too; ambiguous ones are refused."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import shutil
import struct
import subprocess
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
from ckpttool.core.files.copying import Output
from ckpttool.core.formats.pytorch import zip_entries, zip_writer
from ckpttool.core.formats.pytorch.zip_writer import ZipWriter
from ckpttool.core.tensors.ref import Storage
from ckpttool.core.tensors.values import live_tensors
from ckpttool.errors import CkptToolError, Damaged, FileError, Refused, Unsupported
from tests.support.comparing import assert_same, assert_whole, directory, place_of, refused, values
from tests.support.crafting import dict_of, storage, tensor, torch_zip
from tests.support.running import open_files

# ---- The zip container: Python's and torch's files are read, ambiguous ones refused; unzip reads the output


def zipped(path: Path, records: dict[str, bytes], **given: Any) -> Path:
    with zipfile.ZipFile(path, "w", **given) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return path


class Pipe(io.RawIOBase):
    """A file that can't seek, so that zipfile writes sizes and checksums behind the records."""

    def __init__(self) -> None:
        self.out = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.out += bytes(data)
        return len(data)


def streamed(path: Path, records: dict[str, bytes], *, wide: bool = False, pipe: bool = True) -> Path:
    target: Any = Pipe() if pipe else path
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in records.items():
            with archive.open(name, "w", force_zip64=wide) as record:
                record.write(data)
    if pipe:
        path.write_bytes(target.out)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {name: record.data.read() for name, record in directory(place_of(path)).items()}


def refused_file(path: Path, said: str = "", error: Any = Damaged) -> FileError:
    with pytest.raises(error, match=said or None) as refusal:
        directory(place_of(path))
    return refusal.value


RECORDS = {"r/data.pkl": b"pickle", "r/data/0": bytes(range(256)), "r/empty": b"", "r/ключ": b"unicode"}

# Reading.


READ: dict[str, Callable[[Path], Path]] = {
    "by python": lambda path: zipped(path, RECORDS),
    "with data descriptors": lambda path: streamed(path, RECORDS),
    "with wide data descriptors": lambda path: streamed(path, RECORDS, wide=True),
    "with ZIP64 fields": lambda path: streamed(path, RECORDS, wide=True, pipe=False),
    "with a comment": lambda path: commented(zipped(path, RECORDS)),
}


@pytest.mark.parametrize("how", READ)
def test_a_zip_written_by_others_is_read(how: str, tmp_path: Path) -> None:
    assert contents(READ[how](tmp_path / "z")) == RECORDS


def commented(path: Path) -> Path:
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"a comment of somebody's"
    return path


def test_a_zip_written_by_torch_is_read(tmp_path: Path) -> None:
    assert contents(of_torch(tmp_path / "f.pt")) == theirs(tmp_path / "f.pt")


def of_torch(path: Path) -> Path:
    torch.save({"a": torch.arange(10)}, path)
    return path


def theirs(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.skipif(not shutil.which("zip"), reason="needs zip")
@pytest.mark.parametrize("options", [["-0"], ["-0", "-fd"], ["-0", "-fz"]])
def test_a_file_unpacked_and_zipped_again_is_read(options: list[str], tmp_path: Path) -> None:
    """Folders have entries of their own, without bytes."""
    records = contents(of_torch(tmp_path / "f.pt"))
    shutil.unpack_archive(tmp_path / "f.pt", tmp_path, "zip")
    subprocess.run(["zip", "-q", "-r", *options, "z.zip", "f"], cwd=tmp_path, check=True)
    found = contents(tmp_path / "z.zip")
    assert found.pop("f/") == b""
    assert {name: data for name, data in found.items() if name[-1] != "/"} == records


def test_a_name_may_be_as_long_as_the_format_allows(tmp_path: Path) -> None:
    records = {"n" * 65_535: b"abc"}
    assert contents(zipped(tmp_path / "z", records)) == records


# Reading what two readers could understand differently.

LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"


def patched(path: Path, signature: bytes, offset: int, raw: bytes, which: int = 0) -> Path:
    """Change bytes at an offset of the which-th header with this signature."""
    data = bytearray(path.read_bytes())
    at = -1
    for _ in range(which + 1):
        at = data.index(signature, at + 1)
    data[at + offset : at + offset + len(raw)] = raw
    path.write_bytes(data)
    return path


def short(value: int) -> bytes:
    return struct.pack("<H", value)


def word(value: int) -> bytes:
    return struct.pack("<I", value)


TWO = {"r/data.pkl": b"pickle", "r/data/0": b"12345"}
DISAGREEMENTS = {
    "signature of the local header": (LOCAL, 0, b"PK\x07\x08"),
    "flags of the local header": (LOCAL, 6, short(1)),
    "compression of the local header": (LOCAL, 8, short(8)),
    "checksum of the local header": (LOCAL, 14, word(1)),
    "size of the local header": (LOCAL, 22, word(5)),
    "packed size of the local header": (LOCAL, 18, word(5)),
    "name of the local header": (LOCAL, 30, b"x"),
    "length of the name of the local header": (LOCAL, 26, short(5)),
    "extra field of the local header past the end": (LOCAL, 28, short(0xFFFF)),
    "signature in the directory": (CENTRAL, 0, b"PK\x07\x08"),
    "size in the directory": (CENTRAL, 24, word(5)),
    "both sizes in the directory": (CENTRAL, 20, word(5) * 2),
    "giant sizes in the directory": (CENTRAL, 20, word(0x7FFFFFFF) * 2),
    "sizes said to be elsewhere": (CENTRAL, 20, word(0xFFFFFFFF) * 2),
    "compression in the directory": (CENTRAL, 10, short(8)),
    "name in the directory": (CENTRAL, 46, b"x"),
    "place in the directory": (CENTRAL, 42, word(1)),
    "place past the end": (CENTRAL, 42, word(0x7FFFFFFF)),
    "name past the end": (CENTRAL, 28, short(0xFFFF)),
    "a symbolic link": (CENTRAL, 38, word(0o120777 << 16)),
    "a folder with bytes, by its attributes": (CENTRAL, 38, word(0x10)),
    "a checksum said to be elsewhere": (LOCAL, 14, word(0xFFFFFFFF)),
    "sizes of the local header said to be elsewhere": (LOCAL, 18, word(0xFFFFFFFF) * 2),
    **{f"flag {flag:#x} of the local header": (LOCAL, 6, short(flag)) for flag in (0x20, 0x40, 0x2000)},
    "count of entries": (END, 8, short(9) * 2),
    "fewer entries": (END, 8, short(1) * 2),
    "size of the directory": (END, 12, word(7)),
    "place of the directory": (END, 16, word(7)),
    "a comment that is not there": (END, 20, short(7)),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_headers_that_disagree_or_lie_are_damaged(what: str, tmp_path: Path) -> None:
    refused_file(patched(zipped(tmp_path / "z", TWO), *DISAGREEMENTS[what]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *[((CENTRAL, 8, short(flag)), "encrypted") for flag in (0x1, 0x20, 0x40, 0x2000)],
        ((CENTRAL, 34, short(1)), "another volume"),
        *[((END, field, short(1)), "split") for field in (4, 8)],
    ],
)
def test_encrypted_and_split_zips_are_unsupported(change: Any, reason: str, tmp_path: Path) -> None:
    refused_file(patched(zipped(tmp_path / "z", TWO), *change), reason, Unsupported)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("again", ["r/data/0", "R/DATA/0", "r/Data/0"])
def test_a_duplicate_record_is_damaged_in_any_case_of_letters(again: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z", "w") as archive:
        archive.writestr("r/data/0", b"1")
        archive.writestr(again, b"2")
    refused_file(tmp_path / "z", "twice")


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "r/../../up", "r\\data", "r/..", ".."])
def test_names_that_leave_the_archive_are_damaged(name: str, tmp_path: Path) -> None:
    refused_file(zipped(tmp_path / "z", {name: b"1"}), "leaves the archive")


def test_a_name_that_is_not_utf_8_is_damaged(tmp_path: Path) -> None:
    path = zipped(tmp_path / "z", {"r/aé": b"1"})
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xff"))
    refused_file(path, "not UTF-8")


def test_zeros_in_a_local_header_need_a_data_descriptor(tmp_path: Path) -> None:
    path = zipped(tmp_path / "z", {"r/a": b"", "r/b": b"123"})
    patched(path, LOCAL, 4, b"\x2d")  # another version: the two headers are not the same bytes
    assert set(contents(path)) == {"r/a", "r/b"}
    patched(path, LOCAL, 4, b"\x2d", which=1)
    patched(path, LOCAL, 14, bytes(12), which=1)
    refused_file(path, "'r/b' has two headers that disagree")


def test_a_wrong_name_length_in_a_local_header_is_damaged(tmp_path: Path) -> None:
    """torch finds the bytes by the length that the local header states."""
    path = streamed(tmp_path / "z", {"r/a": b"123", "r/bb": b"123"})
    patched(path, LOCAL, 26, short(3), which=1)
    refused_file(path, "'r/bb' has another name in its local header")


def test_a_folder_that_holds_bytes_is_damaged(tmp_path: Path) -> None:
    """torch reads none of them, and returns uninitialised memory."""
    assert contents(zipped(tmp_path / "z", {"r/data/": b""})) == {"r/data/": b""}
    refused_file(zipped(tmp_path / "z", {"r/data/": b"1"}), "'r/data/' is a folder")


def with_extra(path: Path, extra: bytes) -> Path:
    info = zipfile.ZipInfo("r/a")
    info.extra = extra
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, b"123")
    return path


WIDE = struct.pack("<HHQQ", zip_writer.ZIP64_EXTRA, 16, 3, 3)
OTHER_WIDE = struct.pack("<HHQQ", zip_writer.ZIP64_EXTRA, 16, 2, 2)


def test_zip64_fields_of_both_headers_agree(tmp_path: Path) -> None:
    path = with_extra(tmp_path / "z", WIDE)
    patched(path, LOCAL, 18, word(0xFFFFFFFF) * 2)
    assert contents(path) == {"r/a": b"123"}
    patched(path, CENTRAL, 20, word(0xFFFFFFFF) * 2)
    assert contents(path) == {"r/a": b"123"}
    patched(path, LOCAL, 33, OTHER_WIDE)  # the 32-bit fields are the same in both headers
    refused_file(path, "two headers that disagree")
    patched(path, CENTRAL, 20, word(3) * 2)
    refused_file(path, "two headers that disagree")


@pytest.mark.parametrize("sizes", [(LOCAL, 18), (CENTRAL, 20)])
@pytest.mark.parametrize(
    "extra", [WIDE[:8], WIDE[:-1], WIDE[:2] + short(8) + bytes(8), b"\7\7\xff\xff" + WIDE]
)
def test_a_zip64_field_that_is_cut_short_is_damaged(extra: bytes, sizes: Any, tmp_path: Path) -> None:
    path = patched(with_extra(tmp_path / "z", extra), *sizes, word(0xFFFFFFFF) * 2)
    refused_file(path, "'r/a' lacks its ZIP64 sizes")


def test_bytes_between_the_zip64_end_records_are_damaged(tmp_path: Path) -> None:
    """Python takes the last bytes there for the end record, and finds another directory by it."""
    data = of_torch(tmp_path / "f.pt").read_bytes()
    at = data.rindex(b"PK\x06\x06")
    end, rest = data[at : at + 56], data[at + 56 :]
    longer = end[:4] + struct.pack("<Q", 44 + 56) + end[12:]
    (tmp_path / "z").write_bytes(data[:at] + longer + end + rest)
    refused_file(tmp_path / "z", "ZIP64 directory is malformed")


@pytest.mark.parametrize("offset, raw", [(4, word(1)), (16, word(2))])
def test_a_zip64_directory_in_another_volume_is_unsupported(offset: int, raw: bytes, tmp_path: Path) -> None:
    refused_file(patched(of_torch(tmp_path / "f.pt"), b"PK\x06\x07", offset, raw), "split", Unsupported)


@pytest.mark.parametrize(
    "change",
    [
        *[(LOCAL, 14, word(1)), (LOCAL, 26, short(1)), (LOCAL, 28, short(0xFFFF)), (CENTRAL, 8, short(1))],
        *[(CENTRAL, 34, short(1)), (CENTRAL, 20, word(5)), (CENTRAL, 20, word(0xFFFFFFFF))],
        *[(CENTRAL, 38, word(0o120777 << 16)), (CENTRAL, 38, word(0x10))],
    ],
)
def test_a_message_shortens_a_long_name(change: Any, tmp_path: Path) -> None:
    path = patched(zipped(tmp_path / "z", {"n" * 60_000: b"123"}), *change)
    assert len(refused_file(path, "n" * 80, (Damaged, Unsupported)).reason) < 200


def test_records_that_overlap_are_damaged(tmp_path: Path) -> None:
    """Two entries of the directory for the same bytes, as in a zip bomb."""
    path = zipped(tmp_path / "z", {"r/a": b"1", "r/b": b"1"})
    refused_file(patched(path, CENTRAL, 42, bytes(4) + b"r/A", which=1))  # by another name than the first's


def test_a_record_inside_another_is_damaged(tmp_path: Path) -> None:
    inner = zipped(tmp_path / "inner", {"r/b": b"1"}).read_bytes()
    path = zipped(tmp_path / "z", {"r/a": inner, "r/b": b"1"})
    data = path.read_bytes()
    at, entry = data.index(LOCAL, 4), data.rindex(CENTRAL)
    path.write_bytes(data[: entry + 42] + word(at) + data[entry + 46 :])
    refused_file(path, "overlap")


def test_a_deflated_record_is_listed_with_its_compression(tmp_path: Path) -> None:
    path = zipped(tmp_path / "z", {"r/a": bytes(1000)}, compression=zipfile.ZIP_DEFLATED)
    assert directory(place_of(path))["r/a"].compression == zipfile.ZIP_DEFLATED


@given(st.binary(min_size=1, max_size=8), st.integers(0, 500))
def test_a_zip_changed_anywhere_is_read_within_the_file_or_refused(noise: bytes, where: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = zipped(Path(folder) / "z", RECORDS)
        data = bytearray(path.read_bytes())
        data[where : where + len(noise)] = noise
        path.write_bytes(data)
        place = place_of(path)
        try:
            records = directory(place)
        except (Damaged, Unsupported):
            return
        for record in records.values():
            assert 0 <= record.data.offset <= record.data.offset + record.data.nbytes <= place.nbytes


# Writing.


def written(path: Path, records: dict[str, bytes], root: str = "root") -> Path:
    with open(path, "w+b") as file, Output(file) as out:
        archive = ZipWriter(out, root)
        for name, data in records.items():
            archive.write(name, data)
        archive.close()
    return path


def test_python_and_unzip_find_written_files_whole(tmp_path: Path) -> None:
    records = {"data.pkl": b"pickle", "data/0": bytes(range(256)), "empty": b""}
    path = written(tmp_path / "z", records)
    assert_whole(path)
    assert contents(path) == {f"root/{name}": data for name, data in records.items()}


def test_every_payload_starts_on_64_bytes(tmp_path: Path) -> None:
    records = {"n" * length: b"x" * length for length in range(1, 130)}
    found = directory(place_of(written(tmp_path / "z", records)))
    assert len(found) == len(records)
    assert {record.data.offset % 64 for record in found.values()} == {0}


def test_a_zip_without_records_is_empty(tmp_path: Path) -> None:
    assert theirs(written(tmp_path / "z", {})) == contents(tmp_path / "z") == {}


def test_more_than_65535_records_make_a_zip64_directory(tmp_path: Path) -> None:
    path = written(tmp_path / "z", {str(i): b"" for i in range(66_000)})
    assert len(zipfile.ZipFile(path).namelist()) == len(directory(place_of(path))) == 66_000


def test_a_copied_record_has_the_known_or_computed_checksum(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(range(100)))
    whole = place_of(tmp_path / "source").part(10, 50)
    with open(tmp_path / "z", "w+b") as file, Output(file) as out:
        archive = ZipWriter(out, "r")
        archive.copy("known", Storage(whole, "UntypedStorage", crc32=zlib.crc32(bytes(range(10, 60)))))
        archive.copy("found", Storage(whole, "UntypedStorage"))
        archive.close()
    assert_whole(tmp_path / "z")
    assert contents(tmp_path / "z") == {"r/known": bytes(range(10, 60)), "r/found": bytes(range(10, 60))}


class LeavesHoles(Output):
    """An output that skips what it should copy."""

    def copy(self, data: Any, *_: Any) -> None:
        self.position += data.nbytes


def test_records_past_4_gib_are_written_and_read(tmp_path: Path) -> None:
    """A sparse record of 4.5 GiB, and one behind it whose offset needs 64 bits."""
    size, path, hole = (9 << 30) // 2, tmp_path / "z", tmp_path / "hole"
    hole.touch()
    os.truncate(hole, size)
    with open(path, "w+b") as file, LeavesHoles(file) as out:
        archive = ZipWriter(out, "r")
        archive.copy("large", Storage(place_of(hole), "UntypedStorage", crc32=1))
        archive.write("after", b"behind")
        archive.close()
    records = directory(place_of(path))
    assert records["r/large"].data.nbytes == size
    assert records["r/large"].data.offset % zip_writer.ALIGNMENT == 0
    assert records["r/after"].data.read() == b"behind"
    with zipfile.ZipFile(path) as archive:
        assert (archive.getinfo("r/large").file_size, archive.read("r/after")) == (size, b"behind")


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(st.dictionaries(names, st.binary(), max_size=5))
def test_any_records_are_read_back_by_python(records: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert list(theirs(written(Path(folder) / "z", records)).values()) == list(records.values())


# ---- Compressed records: read as torch reads them, and refused where it would return uninitialised memory


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


def with_record(path: Path, record: str, change: Callable[[bytes], bytes]) -> Path:
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
    assert ckpttool.open(with_record(path, RECORD, lambda raw: b"x" * len(raw))).tree == {}


NOISE = random.Random(0).randbytes(4000)
SHORT, WRONG = "does not inflate to exactly 4000 bytes", f"'{RECORD}' does not match its checksum"


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: with_record(path, RECORD, change)


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
    monkeypatch.setattr(zip_entries, "SMALL", 1 << 20)
    tensors = {str(i): tensor(storage(1 << 18, key=str(i)), (1 << 18,)) for i in range(3)}
    records = dict.fromkeys(tensors, bytes(1 << 20))
    path = torch_zip(tmp_path / "f", dict_of(tensors), records, compression=zipfile.ZIP_DEFLATED)
    refused(path, "would grow from", Refused)
    monkeypatch.setattr(zip_entries, "SMALL", 3 << 20)
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
        patch.setattr(zip_entries, "CHUNK", chunk)
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
