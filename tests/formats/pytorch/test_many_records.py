"""Records that are alike are read and written together: the same answers and bytes as one by one."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch

from ckpttool.analysis.zip_structure import zip_frame
from ckpttool.errors import Damaged, FileError
from ckpttool.files.copying import Output
from ckpttool.formats.pytorch import zip_entries, zip_headers
from ckpttool.formats.pytorch.zip_writer import (
    CENTRAL,
    END,
    END64,
    FULL32,
    LOCAL,
    LOCATOR64,
    STORED,
    ZIP64_EXTRA,
    Signature,
    ZipWriter,
)
from ckpttool.tensors.ref import Storage
from tests.support.zips import directory, place_of

COUNT = 5 * zip_entries.MANY


@pytest.fixture(scope="module")
def whole() -> bytes:
    """A file of torch's with records of two sizes, whose headers come from our writer and from torch's."""
    file = io.BytesIO()
    torch.save({f"w{i}": torch.full((1 + i % 2,), i) for i in range(COUNT)}, file)
    return file.getvalue()


def answer(path: Path) -> object:
    """What a directory says, or why it is refused."""
    try:
        return [(*record[:1], *record[1][1:], *record[2:]) for record in directory(place_of(path)).values()]
    except FileError as fault:
        return type(fault).__name__, str(fault)


def one_by_one(path: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zip_entries, "_alike", lambda *_: None)
        patch.setattr(zip_headers, "_alike", lambda *_: None)
        return answer(path)


def test_nearly_all_records_of_a_file_are_read_together(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(whole)
    assert answer(tmp_path / "x") == one_by_one(tmp_path / "x")
    for module in (zip_entries, zip_headers):  # the first have shorter names, and others among them
        slow, seen = module._one_by_one, list[int]()
        monkeypatch.setattr(
            module, "_one_by_one", lambda *a, slow=slow, seen=seen: (seen.append(1), slow(*a))[1]
        )
        answer(tmp_path / "x")
        assert 0 < len(seen) <= 3


@pytest.mark.covered(lambda seed: seed > 0)
@pytest.mark.parametrize("seed", range(3))
def test_a_changed_byte_gives_the_same_answer(seed: int, whole: bytes, tmp_path: Path) -> None:
    """Half of them in the last directory entries, half in a local header of a record that is among others."""
    randomly, path = random.Random(seed), tmp_path / "x"
    headers = [at for at in range(0, len(whole), 64) if whole.startswith(b"PK\x03\x04", at)][
        -zip_entries.MANY :
    ]
    entries = [at for at in range(len(whole)) if whole.startswith(b"PK\x01\x02", at)][-zip_entries.MANY :]
    refused = 0
    for number in range(14):
        at = randomly.choice(headers if number % 2 else entries) + randomly.randrange(44)
        changed = bytearray(whole)
        changed[at] ^= 1 << randomly.randrange(8)
        path.write_bytes(changed)
        found = answer(path)
        assert found == one_by_one(path)
        refused += isinstance(found, tuple)
    assert refused > 2


@pytest.mark.parametrize("begin", [0, FULL32 - 5000, 5 << 30])
@pytest.mark.parametrize("stated", [True, False])
def test_storages_written_together_have_the_same_bytes(begin: int, stated: bool, tmp_path: Path) -> None:
    """Before, around and beyond 4 GiB, where a place takes 64 bits; the files are sparse."""
    content = random.Random(0).randbytes(50_000)
    (tmp_path / "in").write_bytes(content)
    place, storages = place_of(tmp_path / "in"), list[Storage]()
    for number in range(150):
        data = place.part(number * 100, (0, 4, 90, 5000)[number % 4])
        storages.append(Storage(data, "UntypedStorage", crc32=zlib.crc32(data.read()) if stated else None))
    found = []
    for together in (True, False):
        with open(tmp_path / f"{together}", "w+b") as file:
            with Output(file) as out:
                out.position = begin
                archive = ZipWriter(out, "root")
                if together:
                    archive.copy_all(storages)
                else:
                    for number, storage in enumerate(storages):
                        archive.copy(f"data/{number}", storage)
                entries = archive.directory()
            file.seek(begin)
            found.append((entries, out.position, file.read()))
    assert found[0] == found[1]


def test_a_size_that_fills_32_bits_needs_its_zip64_field_in_both_headers(tmp_path: Path) -> None:
    """A record of exactly 4 GiB - 1, whose local header lacks the field; the file is sparse."""
    name, path = b"r/data/0", tmp_path / "x"
    wide = struct.pack("<HHQQ", ZIP64_EXTRA, 16, FULL32, FULL32)
    with open(path, "wb") as file:
        alike = (0, STORED, 0, 0, 0, FULL32, FULL32, len(name))
        file.write(LOCAL.pack(Signature.LOCAL, 45, *alike, 0) + name)
        offset = file.seek(FULL32, 1)
        entry = CENTRAL.pack(Signature.CENTRAL, 45, 45, *alike, len(wide), 0, 0, 0, 0, 0) + name + wide
        file.write(entry + END64.pack(Signature.END64, 44, 45, 45, 0, 0, 1, 1, len(entry), offset))
        file.write(LOCATOR64.pack(Signature.LOCATOR64, 0, offset + len(entry), 1))
        file.write(END.pack(Signature.END, 0, 0, 1, 1, len(entry), FULL32, 0))
    assert answer(path) == one_by_one(path)
    with pytest.raises(Damaged, match="lacks its ZIP64 sizes"):
        directory(place_of(path))


def test_bytes_between_records_are_counted_and_not_read(tmp_path: Path) -> None:
    gap, entries, path = 64 << 20, b"", tmp_path / "x"
    with open(path, "wb") as file:
        for name in (b"r/data/0", b"r/data/1"):
            alike = (0, STORED, 0, 0, 0, 0, 0, len(name))
            entries += CENTRAL.pack(Signature.CENTRAL, 0, 0, *alike, 0, 0, 0, 0, 0, file.tell()) + name
            file.write(LOCAL.pack(Signature.LOCAL, 0, *alike, 0) + name)
            offset = file.seek(gap, 1)
        file.write(entries + END.pack(Signature.END, 0, 0, 2, 2, len(entries), offset, 0))
    place = place_of(path)
    tracemalloc.start()
    try:
        _, free = zip_frame(place.source)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert free["between records"] == 2 * gap
