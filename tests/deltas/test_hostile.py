"""A delta that is damaged or made to mislead is refused by name, in bounded memory and time."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckpttool
from ckpttool.errors import CkptToolError, Damaged, Refused, Unsupported
from tests.support.running import Cli, assert_says, within

zstandard = pytest.importorskip("zstandard", reason="hostile frames are made by a zstd of the test's own")

Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.fixture
def delta(step: Path) -> Path:
    ckpttool.delta("base.safetensors", "new.safetensors", "d.safetensors")
    return step


def whole(said: dict[str, Any]) -> str:
    """Return the digest of all tensors by docs/digest.md, from what is said of each."""
    lines = hashlib.sha256(b"ckpttool digest 1\n")
    for name in sorted(said["tensors"]):
        entry = said["tensors"][name]
        shape = ",".join(map(str, entry["shape"]))
        lines.update(f"{len(name)}:{name} {entry['dtype']} [{shape}] {entry['digest']}\n".encode())
    return lines.hexdigest()


def rewritten(change: Change, *, sums: bool = True) -> None:
    """Change what a delta says and holds; with checksums that fit again, as an attacker would."""
    tensors: dict[str, Any] = load_file("d.safetensors")
    raw = Path("d.safetensors").read_bytes()
    texts = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])["__metadata__"]
    said = json.loads(texts["ckpttool.delta"])
    change(said, tensors)
    for entry in said["tensors"].values() if sums and isinstance(said.get("tensors"), dict) else ():
        entry["in"] = {part: zlib.crc32(tensors[part].tobytes()) for part in entry["in"] if part in tensors}
    with suppress(TypeError, KeyError, AttributeError):
        if said["new"]["whole"] != "kept":
            said["new"]["whole"] = whole(said)
    save_file(tensors, "d.safetensors", metadata={**texts, "ckpttool.delta": json.dumps(said)})


def tried() -> None:
    """Read all values through the delta."""
    with ckpttool.open("d.safetensors") as checkpoint:
        ckpttool.save(checkpoint, "out.safetensors", force=True)


PLACES: dict[str, Callable[[Any], Any]] = {
    "outside": lambda places: np.array([7, 8, 9, 300_000], "<i4"),
    "negative": lambda places: np.array([-1, 8, 9, 10], "<i4"),
    "unsorted": lambda places: places[::-1].copy(),
    "repeated": lambda places: np.array([7, 7, 9, 10], "<i4"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_places_that_are_none(delta: Path, kind: str) -> None:
    def change(said: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["sparse.indices"] = PLACES[kind](tensors["sparse.indices"])

    rewritten(change)
    with pytest.raises(Damaged, match="'sparse' is no difference: "):
        tried()
    assert not Path("out.safetensors").exists()


def payload(frames: list[bytes]) -> Any:
    raw = b"".join(frames) + b"".join(struct.pack("<I", len(frame)) for frame in frames)
    return np.frombuffer(raw, np.uint8)


def bomb() -> bytes:
    """Return a frame of a few kilobytes that states, and holds, four gigabytes."""
    pack = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 32)
    zeros = bytes(1 << 24)
    return b"".join([*(pack.compress(zeros) for _ in range(4)), b"rest"])


def unsized(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(raw)


# The only element that changed lies behind the last, after gaps of 255 bytes; one byte plane of it changed.
OUTSIDE = struct.pack("<I", 2057) + b"\xff" * 2056 + b"\x08" + bytes(4) + b"\1" + struct.pack("<IB", 1, 255)

FRAMES: dict[str, Callable[[], list[bytes]]] = {
    "a bomb": lambda: [bomb(), b""],
    "one that states no size": lambda: [unsized(bytes(1 << 20)), b""],
    "one that is too long": lambda: [zstandard.compress(bytes((1 << 20) + 1)), b""],
    "one that is too short": lambda: [zstandard.compress(bytes(5)), b""],
    "no frame": lambda: [b"no frame at all", b""],
    "two frames as one": lambda: [zstandard.compress(bytes(1 << 20)) + zstandard.compress(b"x"), b""],
    "a place outside of its block": lambda: [zstandard.compress(OUTSIDE), b""],
    "too few frames": lambda: [zstandard.compress(bytes(1 << 20))],
    "nothing": list,
}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_that_are_none(delta: Path, kind: str) -> None:
    def change(said: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["xor.xor"] = payload(FRAMES[kind]())

    rewritten(change)
    with within(10, time.process_time), pytest.raises(Damaged, match="'xor' is no difference: "):
        tried()
    assert not Path("out.safetensors").exists()


def put(*path: str | int, value: Any) -> Change:
    def change(said: dict[str, Any], tensors: dict[str, Any]) -> None:
        for key in path[:-1]:
            said = said[key]
        said[path[-1]] = value

    return change


HEADERS: dict[str, Change] = {
    "no tensors": put("tensors", value=[]),
    "an unknown form": put("tensors", "xor", "as", value="diff"),
    "a form with other parts": put("tensors", "xor", "as", value="sparse"),
    "the base's where it is new": put("tensors", "new", "as", value="same"),
    "an unknown type": put("tensors", "xor", "dtype", value="float31"),
    "a type without values": put("tensors", "xor", "dtype", value="qint8"),
    "a negative size": put("tensors", "xor", "shape", value=[-1]),
    "a size that is no number": put("tensors", "xor", "shape", value=["9"]),
    "more than any file": put("tensors", "xor", "shape", value=[1 << 62, 1 << 62]),
    "many axes": put("tensors", "xor", "shape", value=[1] * 1000),
    "no base": put("base", value=None),
    "a base that is no text": put("base", "name", value=7),
    "a digest that is none": put("new", "digest", value="abc"),
    "a digest of a tensor that is none": put("tensors", "xor", "digest", value="A" * 64),
    "no digest of a tensor": lambda said, tensors: said["tensors"]["xor"].pop("digest"),
    "no checksum of a tensor": lambda said, tensors: said["tensors"]["xor"].pop("crc32"),
    "a digest of the whole that is none": put("new", "whole", value="kept"),
    "metadata that is no text": put("new", "metadata", value={"a": 1}),
    "another tree": put("new", "tree", value="0" * 64),
    "a checksum that is none": put("tensors", "xor", "base_crc32", value=-1),
    "what is the base's with another checksum": put("tensors", "same", "crc32", value=7),
    "a part that is not there": put("tensors", "new", "in", value={"elsewhere": 0}),
    "another form of a part": put("tensors", "new", "shape", value=[6]),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_that_are_none(delta: Path, kind: str) -> None:
    rewritten(HEADERS[kind], sums=False)
    with pytest.raises(Damaged, match=r"d\.safetensors: "):
        tried()
    assert not Path("out.safetensors").exists()


def test_a_later_version_is_unsupported(delta: Path) -> None:
    rewritten(put("version", value=2))
    with pytest.raises(Unsupported, match=r"is a delta of version 2, and this reads 1"):
        tried()


def test_a_shape_that_the_base_does_not_have(delta: Path) -> None:
    rewritten(put("tensors", "xor", "shape", value=[1 << 40]))
    with pytest.raises(Refused, match=r"base\.safetensors: is not the base of"):
        tried()


@pytest.mark.parametrize("part", ["sparse.values", "sparse.indices", "xor.xor", "new"])
def test_a_flipped_bit_in_any_part_is_found_by_every_command(delta: Path, part: str, cli: Cli) -> None:
    rewritten(lambda said, tensors: tensors[part].view(np.uint8).__setitem__(3, 0x55), sums=False)
    with pytest.raises(Damaged):
        tried()
    with pytest.raises(Damaged):
        ckpttool.apply("base.safetensors", ["d.safetensors"])
    assert cli("apply", "base.safetensors", "d.safetensors", "out.safetensors").code == 3
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize("name", ["same", "sparse", "xor", "new"])
@pytest.mark.parametrize("out", ["out.safetensors", "out.pt", "out/", "--full out.safetensors"])
def test_a_result_that_has_another_digest_is_not_written(delta: Path, cli: Cli, name: str, out: str) -> None:
    def change(said: dict[str, Any], tensors: dict[str, Any]) -> None:
        said["tensors"][name]["digest"] = "0" * 64

    rewritten(change)
    for flag in ((), ("--no-verify",), ("--dry-run",)):
        ran = cli("apply", "base.safetensors", "d.safetensors", *out.split(), *flag)
        assert_says(ran, 3, f"the bytes of '{name}' do not match their digest")
    assert not Path(out.split()[-1]).exists()
    with pytest.raises(Damaged, match=f"'{name}' do not match their digest"):
        ckpttool.apply("base.safetensors", ["d.safetensors"])


@pytest.mark.parametrize("name", ["same", "sparse", "xor", "new"])
def test_verify_compares_each_digest_that_a_delta_states(delta: Path, cli: Cli, name: str) -> None:
    assert cli("verify", "d.safetensors").code == 0
    rewritten(put("tensors", name, "digest", value="0" * 64))
    for file in ("d.safetensors", "base.safetensors+d.safetensors"):
        assert_says(cli("verify", file), 1, name, "do not match their digest (in d.safetensors)")


def test_verify_compares_the_digest_of_the_state(delta: Path, cli: Cli) -> None:
    rewritten(put("new", "digest", value="0" * 64))
    assert_says(cli("verify", "d.safetensors"), 1, "has another digest than d.safetensors states")


def test_values_with_checksums_that_fit_are_found_by_their_digest(delta: Path, cli: Cli) -> None:
    def change(said: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["sparse.values"] = tensors["sparse.values"] + 1

    rewritten(change)
    ran = cli("apply", "base.safetensors", "d.safetensors", "out.safetensors")
    assert_says(ran, 3, "the bytes of 'sparse' do not match their digest")
    assert not Path("out.safetensors").exists()


def test_whatever_byte_is_changed_it_makes_the_checkpoint_or_is_refused(delta: Path) -> None:
    raw, chosen = Path("d.safetensors").read_bytes(), random.Random(0)
    expected = ckpttool.digest("new.safetensors")
    size = struct.unpack("<Q", raw[:8])[0]
    for number in range(40):
        place = chosen.randrange(8 + size if number % 3 else len(raw))
        changed = bytearray(raw)
        changed[place] ^= 1 << chosen.randrange(8)
        Path("d.safetensors").write_bytes(changed)
        try:
            with ckpttool.apply("base.safetensors", ["d.safetensors"]) as checkpoint:
                assert ckpttool.digest(checkpoint) == expected, place
        except CkptToolError as fault:
            assert fault.exit_code == 3
