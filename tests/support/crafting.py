"""Build files that no library would write: pickles opcode by opcode, and containers around them."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ckpttool

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a legacy file


# Pickles: each function returns the opcodes that push one value.


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a" + bytes([len(raw)]) + raw
    return b"\x8b" + struct.pack("<I", len(raw)) + raw


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def list_of(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def dict_of(pairs: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in pairs.items()) + b"u"


def call(callable: bytes, *args: bytes) -> bytes:
    return callable + tuple_of(*args) + b"R"


def storage(
    numel: int = 4, *, kind: str = "FloatStorage", key: str = "0", module: str = "torch", view: bytes = b""
) -> bytes:
    """Return a storage; `view` is the sixth part of the legacy format: None, or (key, offset, numel)."""
    identity = (text("storage"), name(module, kind), text(key), text("cpu"), number(numel))
    return tuple_of(*identity, view) + b"Q"


def tensor(
    of: bytes, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0, *more: bytes
) -> bytes:
    return call(
        name("torch._utils", "_rebuild_tensor_v2"),
        of,
        number(offset),
        tuple_of(*map(number, shape)),
        tuple_of(*map(number, stride)),
        b"\x89",
        call(name("collections", "OrderedDict")),
        *more,
    )


def program(body: bytes, protocol: int = 2) -> bytes:
    """Return a whole pickle around the opcodes of its value."""
    return b"\x80" + bytes([protocol]) + body + b"."


# Containers.


def torch_zip(
    path: Path,
    body: bytes,
    storages: Mapping[str, bytes] | None = None,
    *,
    root: str = "archive",
    byteorder: str | None = "little",
    more: Mapping[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """Write a `.pt` file around the opcodes of its tree, or a whole pickle if they begin with PROTO."""
    data = body if body[:1] == b"\x80" and body[1:2] < b"\x06" else program(body)
    records = {f"{root}/data.pkl": data}
    records |= {} if byteorder is None else {f"{root}/byteorder": byteorder.encode()}
    records |= {f"{root}/data/{key}": raw for key, raw in (storages or {}).items()}
    records |= {f"{root}/version": b"3\n", **(more or {})}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for record, raw in records.items():
            archive.writestr(record, raw)
    return path


def torch_legacy(
    path: Path,
    body: bytes,
    storages: Mapping[str, tuple[int, bytes]] | None = None,
    *,
    keys: list[str] | None = None,
    little_endian: bool = True,
) -> Path:
    """Write a legacy file; `storages` are key -> (number of elements, bytes)."""
    facts = {"protocol_version": 1001, "little_endian": little_endian, "type_sizes": {"int": 4}}
    out = io.BytesIO()
    for value in (MAGIC, 1001, facts):
        pickle.dump(value, out, protocol=2)
    out.write(program(body))
    pickle.dump(sorted(storages or {}) if keys is None else keys, out, protocol=2)
    for key in sorted(storages or {}):
        numel, raw = (storages or {})[key]
        out.write(struct.pack("<q", numel) + raw)
    path.write_bytes(out.getvalue())
    return path


def safetensors_file(path: Path, header: object, data: bytes = b"", *, size: int | None = None) -> Path:
    """Write a safetensors file: the header as bytes or as a JSON object; `size` claims another length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if size is None else size) + raw + data)
    return path


# What one save wrote, made without torch, so that new processes start fast.


def shards_of(value: float, folder: Path) -> None:
    """Write `folder/out`, three shards of one tensor each, all of whose values are `value`."""
    entry = {"dtype": "F32", "shape": [100]}
    places = zip("abc", (0, 400, 800), strict=True)
    header = {name: {**entry, "data_offsets": [at, at + 400]} for name, at in places}
    made = safetensors_file(folder / "in.safetensors", header, struct.pack("<300f", *[value] * 300))
    given: dict[str, Any] = {"to": "safetensors-sharded", "shard_size": 400, "force": True}
    ckpttool.save(ckpttool.open(made), folder / "out", **given)


def values_in(folder: Path) -> set[float]:
    """Return the values in the shards of a folder: one, if all are of the same save."""
    with ckpttool.open(folder) as checkpoint:
        return {
            value
            for tensor in checkpoint.state().tensors.values()
            for value in struct.unpack("<100f", tensor.storage.data.read())  # type: ignore[union-attr]
        }
