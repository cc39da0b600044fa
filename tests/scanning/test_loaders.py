"""`scan` next to the loaders: whatever one of them runs is not safe, wherever in a file it lies."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.scanning.scan import scan
from ckpttool.scanning.verdicts import DANGEROUS, SAFE, UNKNOWN
from tests.fuzz import loadable
from tests.fuzz.loaders import Loaders
from tests.support.crafting import dict_of, storage, torch_legacy, torch_zip
from tests.support.scan_corpus import PAYLOAD, tarred, zipped

torch = pytest.importorskip("torch", reason="opens what is scanned")
np = pytest.importorskip("numpy")
pytest.importorskip("joblib")

PLAIN = pickle.dumps({"w": 1})
OBJECTS = loadable.npy(PAYLOAD)
LONG = PAYLOAD + random.Random(0).randbytes(20_000)


def _tar(data: bytes, **fields: str) -> bytearray:
    """A tar whose one member has an extended header; the member's own header is the last."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("x")
        info.size, info.pax_headers = len(data), fields
        archive.addfile(info, io.BytesIO(data))
    return bytearray(out.getvalue())


def _in_header(raw: bytearray, at: int, place: int, value: bytes) -> bytes:
    """Change a field of the header at a place, and its checksum."""
    raw[at + place : at + place + len(value)] = value
    raw[at + 148 : at + 156] = b" " * 8
    raw[at + 148 : at + 156] = f"{sum(raw[at : at + 512]):06o}\0 ".encode()
    return bytes(raw)


def _size_apart(**fields: str) -> bytes:
    raw = _tar(PAYLOAD, **fields, size=str(len(PAYLOAD)))
    return _in_header(raw, raw.rindex(b"ustar") - 257, 124, b"00000000000\0")


def _solaris() -> bytes:
    raw = bytearray(_size_apart())
    return _in_header(raw, raw.index(b"ustar") - 257, 156, b"X")


def _checksum(form: str, *, signed: bool = False) -> bytes:
    """A tar without a magic number whose checksum is written or counted as tarfile alone takes it."""
    raw = bytearray(tarred("\xff\xfe" if signed else "x", PAYLOAD))
    raw[257:265], raw[148:156] = bytes(8), b" " * 8
    total = sum(byte - 256 * (signed and byte > 127) for byte in raw[:512])
    raw[148:156] = form.format(total).encode().ljust(8, b"\0")
    return bytes(raw)


def _alone(**given: int) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 20, "lc": 3, "lp": 0, "pb": 2} | given]
    return lzma.compress(PAYLOAD, lzma.FORMAT_ALONE, filters=filters)


def _zlib(window: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, window)
    return packer.compress(PAYLOAD) + packer.flush()


def _written(write: object, *args: object, **given: object) -> bytes:
    return loadable.to_file(lambda path: write(path, *args, **given))  # type: ignore[operator]


def _records(count: int, prefix: bytes = b"") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(count):
            archive.writestr(f"{number}", b"")
        archive.writestr("x.pkl", PAYLOAD)
    return prefix + out.getvalue()


def _pointing_back() -> bytes:
    """Two zips in a row; what torch finds by the second one's directory lies in a record of the first one."""
    hidden = zipped("x.pkl", PAYLOAD)
    return zipped("text.txt", hidden) + hidden[hidden.index(b"PK\x01\x02") :]


def _bad_block(data: bytes) -> bytes:
    packer = zlib.compressobj()
    return packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH) + b"\x07broken"


def _flagged(flag: int, more: bytes) -> bytes:
    packed = gzip.compress(PAYLOAD)
    return packed[:3] + bytes([flag]) + packed[4:10] + more + packed[10:]


NAMES_X = dict_of({"w": storage(1, key="x.npy")})
LEGACY = _written(torch_legacy, dict_of({}))
STORED = _written(torch_legacy, dict_of({"w": storage(2, view=b"N")}), {"0": (2, bytes(8))})
NUMBERS = loadable.npy(bytes(8), "'<f4'", "(2,)")
RECORDS = loadable.npy(bytes(9), "[('a', '<f4', (2,)), ('b', '|i1')]", "(1,)")
HUGE = "x" * 1_100_000

ATTACKS: dict[str, bytes] = {
    # Tars.
    "a Solaris extended header": _solaris(),
    "a size in an extended header": _size_apart(),
    "a size beyond the first MiB of an extended header": _size_apart(comment=HUGE),
    "a checksum of signed bytes": _checksum("{:06o}\0 ", signed=True),
    "a checksum with a prefix": _checksum("0o{:o}"),
    "a checksum with a sign": _checksum("+{:o}"),
    "a last member that is cut short": tarred("x", LONG)[:15_000],
    "a tar whose name is a pickle": tarred("cos\nmkdir\n(S'canary'\ntR.", b"text"),
    # Zips.
    "an array that is a storage": _written(torch_zip, NAMES_X, {"x.npy": OBJECTS}),
    "an array that is storage 0": _written(torch_zip, dict_of({"w": storage(1)}), {"0": OBJECTS}),
    "a zip behind a stub": b"#!/bin/sh\n" + zipped("x.pkl", PAYLOAD),
    "a zip behind a pickle": PLAIN + zipped("x.pkl", PAYLOAD),
    "a zip behind an array": NUMBERS + zipped("x.pkl", PAYLOAD),
    "a zip behind gzip": gzip.compress(b"text") + zipped("x.pkl", PAYLOAD),
    "a zip behind a tar": tarred("x", b"text") + zipped("x.pkl", PAYLOAD),
    "a zip behind a zip": zipped("x", b"text") + zipped("x.pkl", PAYLOAD),
    "a zip of many records": _records(1200),
    "a zip of many records behind a stub": _records(1200, b"stub"),
    "a directory that points back": _pointing_back(),
    "an encrypted record": zipped("x.pkl", PAYLOAD).replace(b"PK\x03\x04\x14\0\0", b"PK\x03\x04\x14\0\1"),
    "another method in the local header": zipped("x.pkl", PAYLOAD).replace(
        b"PK\x03\x04\x14\0\0\0\0", b"PK\x03\x04\x14\0\0\0\x08"
    ),
    "lzma in a zip": zipped("x.pkl", PAYLOAD, zipfile.ZIP_LZMA),
    "a zip in gzip behind a stub": gzip.compress(b"stub" + zipped("x.pkl", PAYLOAD)),
    "a header in a record": b"stub" + zipped("x.pkl", b"\x80\x04C\x04PK\x03\x040" + PAYLOAD[2:]),
    # Streams.
    "lzma-alone, a dictionary of 4 KiB": _alone(dict_size=4096),
    "lzma-alone, a dictionary of 100 kB": _alone(dict_size=100_000),
    "lzma-alone, 5d 00 10": _alone(dict_size=1 << 12, lc=3, lp=0, pb=2),
    "lzma-alone, other lc, lp, pb": _alone(lc=0, lp=2, pb=0),
    "lzip": loadable.lzip(PAYLOAD, random.Random(0)),
    **{f"zlib, a window of 2^{window}": _zlib(window) for window in range(9, 16)},
    "zlib, broken behind the pickle": _bad_block(PAYLOAD),
    "gzip, a checksum of its header": _flagged(2, b"xx"),
    "gzip, a reserved flag": _flagged(0x20, b""),
    "gzip, a wrong checksum": gzip.compress(LONG)[:-8] + b"wrong...",
    "bzip2, the second stream": bz2.compress(b"") + bz2.compress(PAYLOAD),
    "joblib's old header": b"ZF" + f"{len(PAYLOAD):x}".encode().ljust(20) + zlib.compress(PAYLOAD),
    # Streams of objects.
    "legacy torch, a sixth pickle": LEGACY + PAYLOAD,
    "legacy torch, a seventh pickle": LEGACY + PLAIN + PAYLOAD,
    "legacy torch, a pickle behind its storages": STORED + PAYLOAD,
    "legacy torch twice": STORED + _written(torch_legacy, PAYLOAD[2:-1]),
    "a second array": NUMBERS + OBJECTS,
    "an array behind a record of fields": RECORDS + OBJECTS,
    "an array behind one of objects": loadable.npy(PLAIN) + OBJECTS,
    "a pickle behind an array": NUMBERS + PAYLOAD,
    "an array behind a pickle": PLAIN + OBJECTS,
    "zlib behind a pickle": PLAIN + zlib.compress(PAYLOAD),
    "an array with a field of objects": loadable.npy(PAYLOAD, "[('a', '|O'), ('b', '<i4')]"),
    "an array of computed type": loadable.npy(PAYLOAD, "('|' 'O')"),
    "an array with a long header": loadable.npy(PAYLOAD, "'|O'" + " " * 11_000),
}


@pytest.fixture(scope="module")
def loaders() -> Iterator[Loaders]:
    with Loaders() as process:
        yield process


@pytest.mark.parametrize("title", ATTACKS)
def test_what_a_loader_runs_is_not_safe(title: str, loaders: Loaders, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(ATTACKS[title])
    (found,) = scan(path)
    assert loaders.run(ATTACKS[title]) or title in NOT_ALONE, "no loader runs it"
    assert found.verdict in (DANGEROUS, UNKNOWN)


# What needs something that is not here: torch's own reader of a slice, a password.
NOT_ALONE = ("a directory that points back", "an encrypted record")


def _random_files() -> Iterator[tuple[str, bytes]]:
    """Honest files whose numbers may look like anything."""
    draw = random.Random(1)
    for number in range(40):
        raw = draw.randbytes(400)
        out = io.BytesIO()
        bytes_of = torch.frombuffer(bytearray(b"x\x9c" * (number == 0) + raw), dtype=torch.uint8)
        torch.save({"a": bytes_of, "b": bytes_of.float(), "n": list(range(number))}, out)
        yield "torch", out.getvalue()
        array = io.BytesIO()
        np.save(array, np.frombuffer(raw, np.uint8))
        yield "npy", array.getvalue()
        yield "npz", zipped("a.npy", array.getvalue())
        legacy = io.BytesIO()
        torch.save({"a": bytes_of}, legacy, _use_new_zipfile_serialization=False)
        yield "legacy", legacy.getvalue()
        header = b'{"w":{"dtype":"U8","shape":[400],"data_offsets":[0,400]}}'.ljust(57 + number)
        yield "safetensors", struct.pack("<Q", len(header)) + header + raw
    for dtype in (np.int64, np.int32, np.uint16, np.float32, np.float64):
        yield f"numbers, {dtype.__name__}", np.arange(5000, dtype=dtype).tobytes()
        yield f"zeros, {dtype.__name__}", np.array([5, 7, *[0] * 9000], dtype=dtype).tobytes()


def test_honest_numbers_are_safe(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for title, data in _random_files():
        path.write_bytes(data)
        (found,) = scan(path)
        assert (title, found.verdict, found.problems) == (title, SAFE, ())


def test_files_drawn_by_number_agree_with_the_loaders() -> None:
    tally = loadable.fuzz_loadable(7, float("inf"), most=120)
    assert tally.ran > 20 and tally.honest == 30
    assert {wrong: number for wrong, (number, _) in tally.found.items()} == {}
