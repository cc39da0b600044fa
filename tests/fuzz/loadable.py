"""Files that loaders open: a pickle, in containers, at some position, drawn by number; honest ones too.

`python -m tests.fuzz` has each opened by `loaders`: `scan` may call nothing safe in which code ran, and must
call honest files safe.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import multiprocessing
import pickle
import struct
import tarfile
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from ckpttool.scanning.scan import scan
from ckpttool.scanning.verdicts import SAFE
from tests.fuzz.loaders import CANARY, Loaders
from tests.fuzz.mutations import BYTES
from tests.support.crafting import call, dict_of, name, program, storage, text, torch_legacy, torch_zip
from tests.support.scan_corpus import ARRAY

SLOWEST, SECONDS_PER_BYTE = 20.0, 20e-6  # CPU time of a scan


class Step(NamedTuple):
    """How bytes are wrapped, and whether an honest writer would."""

    wrap: Callable[[bytes, Random], bytes]
    is_honest: bool = True


# ---- Pickles

_RAN = name("os", "mkdir"), text(CANARY)
CODE = f"__import__('os').mkdir('{CANARY}')"
PAYLOADS: tuple[bytes, ...] = (
    program(call(*_RAN)),
    f"cos\nmkdir\n(S'{CANARY}'\ntR.".encode(),
    program(text("os") + text("mkdir") + b"\x93" + text(CANARY) + b"\x85R", 4),
    program(b"(" + text(CANARY) + b"ios\nmkdir\n"),
    program(b"(" + name("os", "mkdir") + text(CANARY) + b"o"),
    program(call(name("builtins", "exec"), text(CODE))),
    program(b"N0" * 999 + call(*_RAN)),
    program(call(*_RAN))[:-1],
    program(call(*_RAN) + b"0"),
    program(b"B" + struct.pack("<I", 70_000) + bytes(70_000) + b"0" + call(*_RAN), 3),
    program(b"C\x08PK\x03\x04PK\x01\x020" + call(*_RAN), 3),
)
PLAIN = tuple(pickle.dumps({"w": [1, 2.5, None], "name": "x" * 40}, protocol) for protocol in range(6))


def npy(data: bytes, descr: str = "'|O'", shape: str = "(1,)") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    header = header.ljust((-len(header) - 11) % 64 + len(header)) + "\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header.encode() + data


def _numbers(random: Random) -> bytes:
    count = random.randrange(4)
    forms = (("'<f4'", 4), ("'|b1'", 1), ("'<U3'", 12), ("'|S5'", 5), ("'<M8[ns]'", 8), ("'|V2'", 2))
    descr, size = random.choice((*forms, ("[('a', '<f4', (2,)), ('b', '|i1')]", 9)))
    return npy(random.randbytes(count * size), descr, f"({count},)")


def to_file(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "a")
        return (Path(folder) / "a").read_bytes()


def _legacy(extra: Callable[[bytes, Random], tuple[bytes, bytes]]) -> Callable[[bytes, Random], bytes]:
    def wrap(data: bytes, random: Random) -> bytes:
        body, behind = extra(data, random)
        numel = random.choice((0, 1, 46, 78, 640))
        state = body or dict_of({"w": storage(numel, view=b"N")} if random.random() < 0.5 else {})
        stored = {"0": (numel, random.randbytes(4 * numel))} if b"FloatStorage" in state else {}
        return to_file(lambda path: torch_legacy(path, state, stored)) + behind

    return wrap


def _inside(data: bytes) -> bytes:
    """A pickle without its first opcode and its last one."""
    return (data[2:] if data[:1] == b"\x80" else data).removesuffix(b".")


LEAVES: tuple[Step, ...] = (
    Step(lambda data, _: data),
    Step(lambda data, _: data),
    Step(lambda data, _: npy(data)),
    Step(lambda data, _: npy(data, "[('a', '|O'), ('b', '<i4')]")),
    Step(lambda data, _: npy(data, "'O'", "(3,)")),
    Step(lambda data, _: npy(data, "('|' 'O')"), False),
    Step(lambda data, _: npy(data, "'|O'" + " " * 11_000), False),
    Step(_legacy(lambda data, _: (b"", data))),
    Step(_legacy(lambda data, _: (_inside(data), b""))),
    Step(lambda data, _: to_file(lambda path: torch_zip(path, _inside(data)))),
    Step(lambda data, _: to_file(lambda path: torch_zip(path, dict_of({}), more={"archive/more.pkl": data}))),
    Step(
        lambda data, _: to_file(
            lambda path: torch_zip(path, dict_of({"w": storage(1, key="x.npy")}), {"x.npy": npy(data)})
        )
    ),
    Step(lambda data, _: to_file(lambda path: torch_zip(path, dict_of({"w": storage(1)}), {"0": npy(data)}))),
    Step(lambda data, _: b"ZF" + hex(len(data)).encode().ljust(19) + zlib.compress(data)),
    Step(lambda data, _: b"ZF" + f"{len(data):x}".encode().ljust(20) + zlib.compress(data)),
    Step(lambda data, _: program(ARRAY + b")\x81}b", 2)[:-1] + _inside(data) + b".", False),
)


# ---- Containers


def _gzip(data: bytes, random: Random) -> bytes:
    packed = gzip.compress(data, random.randrange(10))
    match random.randrange(7):
        case 0:
            return gzip.compress(b"") + bytes(random.randrange(5)) + packed
        case 1:
            return packed[:3] + b"\x08" + packed[4:10] + b"name\0" + packed[10:]
        case 2:
            return packed[:3] + b"\x04" + packed[4:10] + b"\x03\0abc" + packed[10:]
        case 3:
            return packed + random.randbytes(random.randrange(9))
    return packed


def _odd_gzip(data: bytes, random: Random) -> bytes:
    packed = gzip.compress(data)
    match random.randrange(4):
        case 0:
            return packed[:3] + b"\x02" + packed[4:10] + b"xx" + packed[10:]
        case 1:
            return packed[:3] + bytes([0x20 << random.randrange(3)]) + packed[4:]
        case 2:
            return packed[:-8] + random.randbytes(8)
    return packed[: -random.randrange(1, 12)]


def _zlib(data: bytes, random: Random) -> bytes:
    packer = zlib.compressobj(random.randrange(10), zlib.DEFLATED, random.randrange(9, 16))
    return packer.compress(data) + packer.flush()


def _broken_zlib(data: bytes, random: Random) -> bytes:
    """What is unpacked before a block that is none."""
    packer = zlib.compressobj(random.randrange(10))
    return packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH) + b"\x07" + random.randbytes(9)


def _alone(data: bytes, random: Random) -> bytes:
    lc, lp, pb = random.choice(((3, 0, 2), (0, 0, 0), (0, 2, 0), (4, 0, 4), (2, 2, 1)))
    size = random.choice((4096, 1 << 16, 3 << 15, 1 << 20, 1 << 23, 5000, 100_000))
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": size, "lc": lc, "lp": lp, "pb": pb}]
    packed = lzma.compress(data, lzma.FORMAT_ALONE, filters=filters)
    return (
        packed[:5] + (struct.pack("<Q", len(data)) if random.random() < 0.2 else packed[5:13]) + packed[13:]
    )


def lzip(data: bytes, random: Random) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 20, "lc": 3, "lp": 0, "pb": 2}]
    packed = lzma.compress(data, lzma.FORMAT_ALONE, filters=filters)[13:]
    return b"LZIP\x01\x14" + packed + struct.pack("<IQQ", zlib.crc32(data), len(data), len(packed) + 26)


def _zip(data: bytes, random: Random) -> bytes:
    out = io.BytesIO()
    methods = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2
    with zipfile.ZipFile(out, "w", random.choice(methods)) as archive:
        before = random.choice((0, 0, 0, 1, 3, 1100 if random.random() < 0.2 else 2))
        for number in range(before):
            archive.writestr(
                f"{number}.txt", random.choice((b"", b"text", random.randbytes(50).hex().encode()))
            )
        archive.writestr(
            random.choice(("a.npy", "x", "data.pkl", "archive/data/0", "x.gz", "a/version")), data
        )
        archive.comment = random.choice((b"", b"", b"a comment"))
    return out.getvalue()


def _odd_zip(data: bytes, random: Random) -> bytes:
    raw = bytearray(_zip(data, random))
    header = raw.rindex(b"PK\x01\x02")
    local = raw.index(b"PK\x03\x04")
    match random.randrange(8):
        case 0:  # the directory says another method, or has a flag, than the record
            raw[local + 8] ^= 8
        case 1:
            raw[local + 6] |= 1
        case 2:
            raw[local + 14] ^= 1
        case 3:
            raw[local + 30] ^= 1
        case 4:
            raw[header + 16] ^= 1
        case 5:
            raw[header + 38] = 0x10
        case 6:
            return bytes(raw) + random.randbytes(random.randrange(1, 99))
        case 7:  # twice the same name
            with (
                zipfile.ZipFile(out := io.BytesIO(raw), "a") as archive,
                warnings.catch_warnings(action="ignore"),
            ):
                archive.writestr(archive.namelist()[-1], b"another")
            return out.getvalue()
    return bytes(raw)


def _tar(data: bytes, random: Random, *, form: int | None = None, **fields: str) -> bytes:
    out = io.BytesIO()
    form = (
        random.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
        if form is None
        else form
    )
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for number in range(random.choice((0, 0, 1, 3))):
            archive.addfile(tarfile.TarInfo(f"empty{number}"))
        long = "x" * random.choice((3, 90)) if form == tarfile.USTAR_FORMAT else "x" * random.choice((5, 300))
        info = tarfile.TarInfo(random.choice(("a.pkl", "x", "storages", long)))
        info.size, info.mtime, info.pax_headers = len(data), random.randrange(1 << 30), fields
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _checked(header: bytearray, random: Random) -> bytearray:
    header[148:156] = b" " * 8
    total = sum(header)
    header[148:156] = random.choice(
        (f"{total:06o}\0 ", f"0o{total:o}".ljust(8), f"+{total:o}\0".ljust(8))
    ).encode()
    return header


def _odd_tar(data: bytes, random: Random) -> bytes:
    way = random.randrange(6)
    if way == 0:  # a size in an extended header, perhaps far behind
        padding = "x" * random.choice((0, 100, 1_100_000))
        raw = bytearray(_tar(data, random, form=tarfile.PAX_FORMAT, comment=padding, size=str(len(data))))
        at = raw.rindex(b"ustar") - 257
        raw[at + 124 : at + 136] = b"00000000000\0"
        raw[at : at + 512] = _checked(raw[at : at + 512], random)
        return bytes(raw)
    raw = bytearray(_tar(data, random, form=tarfile.PAX_FORMAT, comment="x"))
    at = raw.rindex(b"ustar") - 257
    if way == 1:  # Solaris's type of extended headers
        extended = raw.index(b"ustar") - 257
        raw[extended + 156 : extended + 157] = b"X"
        raw[extended : extended + 512] = _checked(raw[extended : extended + 512], random)
    elif way == 2:  # no magic number, and a number as Python alone reads it
        raw[at + 257 : at + 265] = bytes(8)
        raw[at : at + 512] = _checked(raw[at : at + 512], random)
        return bytes(raw[at:])
    elif way == 3:  # a name that adds more than signed bytes do
        raw[at : at + 3] = b"\xff\xfe\xfd"
        header = raw[at : at + 512]
        header[148:156] = b" " * 8
        signed = sum(byte - 256 * (byte > 127) for byte in header)
        raw[at + 148 : at + 156] = f"{signed:06o}\0 ".encode()
        return bytes(raw[at:])
    elif way == 4:
        return bytes(raw[: at + 512 + len(data)])
    else:
        return bytes(512 * random.randrange(2)) + _tar(b"text", random) + bytes(raw)
    return bytes(raw)


CONTAINERS: tuple[Step, ...] = (
    Step(_gzip),
    Step(lambda data, random: bz2.compress(data, random.randrange(1, 10))),
    Step(lambda data, random: lzma.compress(data, check=random.choice((0, 1, 4, 10)))),
    Step(_alone),
    Step(lzip),
    Step(_zlib),
    Step(_zip),
    Step(_tar),
    Step(_odd_gzip, False),
    Step(_broken_zlib, False),
    Step(_odd_zip, False),
    Step(_odd_tar, False),
)


# ---- Positions


def _behind(before: Callable[[Random], bytes]) -> Callable[[bytes, Random], bytes]:
    return lambda data, random: b"".join(before(random) for _ in range(random.choice((1, 1, 2)))) + data


POSITIONS: tuple[Step, ...] = (
    Step(lambda data, _: data),
    Step(lambda data, _: data),
    Step(_behind(lambda random: random.choice(PLAIN))),
    Step(_behind(lambda random: random.choice(PLAIN) * random.choice((1, 5, 50)))),
    Step(_behind(_numbers)),
    Step(_behind(lambda random: npy(random.choice(PLAIN)))),
    Step(_behind(lambda random: gzip.compress(random.choice(PLAIN))), False),
    Step(_behind(lambda random: random.randbytes(random.randrange(200))), False),
    Step(_behind(lambda random: b"MZ" + bytes(100)), False),
    Step(_behind(lambda random: _zip(b"text", random)), False),
    Step(_behind(lambda random: _tar(b"text", random)), False),
    Step(_behind(lambda random: _legacy(lambda *_: (b"", b""))(b"", random))),
    Step(lambda data, random: data + random.randbytes(random.randrange(1, 200)), False),
    Step(lambda data, random: data + random.choice(PLAIN), False),
)


# ---- Files drawn by number


class Loadable(NamedTuple):
    """A file, with code in it or honest."""

    data: bytes
    is_honest: bool
    made: str  # of which steps


def file_of(seed: int, number: int) -> Loadable:
    """Return a file: a pickle at some position in containers, and maybe with some bytes changed."""
    random = Random(f"loadable {seed} {number}")
    is_honest = number % 4 == 0
    steps = [random.choice(_among(LEAVES, is_honest))]
    steps += random.choices(_among(CONTAINERS, is_honest), k=random.choice((0, 0, 1, 1, 1, 2)))
    steps.append(random.choice(_among(POSITIONS, is_honest)))
    data = random.choice(PLAIN if is_honest else PAYLOADS)
    for step in steps:
        data = step.wrap(data, random)
    if not is_honest and random.random() < 0.25:
        data = random.choice(BYTES)(data, random)
    return Loadable(data, is_honest, f"{[*map(_place, steps)]}")


def _among(steps: tuple[Step, ...], is_honest: bool) -> tuple[Step, ...]:
    return tuple(step for step in steps if step.is_honest) if is_honest else steps


def _place(step: Step) -> str:
    return f"{step.wrap.__qualname__}, line {step.wrap.__code__.co_firstlineno}"


@dataclass(slots=True)
class LoadableTally:
    """What came of many files: how many, in how many code ran, and what is wrong by what it is."""

    tried: int = 0
    ran: int = 0
    honest: int = 0
    slowest: float = 0.0
    found: dict[str, tuple[int, Loadable]] = field(default_factory=dict)

    def __str__(self) -> str:
        alarms = sum(not wrong.startswith("called safe") for wrong in self.found)
        missed = len(self.found) - alarms or "none"
        return (
            f"{self.tried:,} files for loaders: code ran in {self.ran:,}, of which {missed} were called safe;"
            f" {self.honest:,} honest ones, {alarms or 'no'} false alarms. At most "
            f"{self.slowest:.1f} s a scan."
        )

    def add(self, other: LoadableTally) -> None:
        """Join the tally of another process."""
        self.tried += other.tried
        self.ran += other.ran
        self.honest += other.honest
        self.slowest, self.found = max(self.slowest, other.slowest), other.found | self.found


def examine(number: int, file: Loadable, folder: Path, loaders: Loaders, tally: LoadableTally) -> None:
    """Scan a file, open what is called safe with all loaders, and note what is wrong."""
    path = folder / "a.bin"
    path.write_bytes(file.data)
    started = time.process_time()
    (scanned,) = scan(path)
    took = time.process_time() - started
    ran = not file.is_honest and loaders.run(file.data)
    tally.tried, tally.ran, tally.honest = tally.tried + 1, tally.ran + ran, tally.honest + file.is_honest
    tally.slowest = max(tally.slowest, took)
    if ran and scanned.verdict == SAFE:
        tally.found.setdefault(f"called safe, and runs: {file.made}", (number, file))
    elif file.is_honest and scanned.verdict != SAFE:
        reasons = "; ".join(problem.reason for problem in scanned.problems)
        tally.found.setdefault(f"{scanned.verdict}, and is honest: {file.made} {reasons}", (number, file))
    if took > SLOWEST + SECONDS_PER_BYTE * len(file.data):
        tally.found.setdefault(f"takes {took:.0f} s: {file.made}", (number, file))


def fuzz_loadable(
    seed: int, until: float, job: int = 0, jobs: int = 1, most: float = float("inf")
) -> LoadableTally:
    """Examine every `jobs`-th file until a time of the monotonic clock, or of the first `most`."""
    tally, number = LoadableTally(), job
    with Loaders() as loaders, tempfile.TemporaryDirectory() as folder:
        while number < most and time.monotonic() < until:
            examine(number, file_of(seed, number), Path(folder), loaders, tally)
            number += jobs
    return tally


def fuzz_loadable_in_processes(seed: int, seconds: float, jobs: int) -> LoadableTally:
    """Do as `fuzz_loadable` in several processes."""
    joined, until = LoadableTally(), time.monotonic() + seconds
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for future in [pool.submit(fuzz_loadable, seed, until, job, jobs) for job in range(jobs)]:
            joined.add(future.result())
    return joined
