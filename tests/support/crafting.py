"""Files that no library would write, opcode by opcode; and those made to cost much, or to mislead."""

from __future__ import annotations

import functools
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ckpttool
from tests.support.other_files import HOSTILE

# ---- Build files that no library would write: pickles opcode by opcode, and containers around them ----


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


# ---- Files made to cost a reader much memory or time, or to mislead it: by name, what writes each -----


DOUBLED = b"]" + b"".join(b"q%c0](h%ch%ce" % (i, i, i) for i in range(60))
TENSOR = tensor(storage(1), (1,))
BYTES = {"0": bytes(4)}


def in_zip(body: bytes) -> Callable[[Path], object]:
    """A value beside a state of one tensor, so that there is something to convert."""
    return lambda path: torch_zip(path, dict_of({"model": dict_of({"module.a": TENSOR}), "x": body}), BYTES)


def write(make: Callable[[], bytes], path: Path) -> None:
    path.write_bytes(make())


def alone(body: bytes, storages: dict[str, bytes] | None = None, **given: Any) -> Callable[[Path], object]:
    return lambda path: torch_zip(path, body, storages or {}, **given)


def repeating_tuple(times: int) -> bytes:
    return b")q\x00" + b"".join(b"0h%ch%c\x86q%c" % (i, i, i + 1) for i in range(times))


def long_key_deep(path: Path) -> None:
    key = text("k" * 300_000) + b"q\x01"
    levels = b"}" + text("w") + TENSOR + b"s" + key + (b"}" + text("w") + TENSOR + b"sh\x01") * 150
    torch_zip(path, levels + b"N" + b"s" * 151, BYTES)


def shared_shape(path: Path) -> None:
    """A shape of 900 axes that 5,000 tensors refer to."""
    shape = tuple_of(*[number(1)] * 900) + b"q\x01"
    four, one = tuple_of(number(4)), tuple_of(number(1))
    first = tensor(storage(1) + b"q\x02").replace(four, shape).replace(one, b"h\x01")
    again = tensor(b"h\x02").replace(four, b"h\x01").replace(one, b"h\x01")
    torch_zip(path, b"](" + first + again * 5000 + b"e", BYTES)


def module(parameters: bytes, inside: bytes = b"}") -> bytes:
    """A pickled nn.Module; the opcodes of its parameters, and of the modules inside it."""
    parts = {"_parameters": parameters, "_buffers": b"}", "_modules": inside}
    return name("m", "Net") + b")\x81" + dict_of(parts) + b"b"


def doubled_modules(path: Path) -> None:
    """Each module holds the one before twice: 2^60 ways to name one parameter."""
    body = module(dict_of({"w": TENSOR}))
    for index in range(60):
        kept = b"q" + bytes([index + 10])
        twice = b"h" + bytes([index + 10])
        body += kept + b"0" + module(b"}", dict_of({"a": twice, "b": twice}))
    torch_zip(path, body, BYTES)


def nested_modules(times: int) -> Callable[[Path], object]:
    parts = (text(part) + b"}" for part in ("_parameters", "_buffers", "_modules"))
    body = (name("m", "Net") + b")\x81}(" + b"".join(parts) + text("x")) * times
    return alone(body + b"N" + b"sub" * times, BYTES)


def tar(
    storages: bytes, tensors: bytes = b"\x80\x02K\x00.", tree: bytes = b"\x80\x02}."
) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with tarfile.open(path, "w") as archive:
            for member, raw in (("storages", storages), ("tensors", tensors), ("pickle", tree)):
                info = tarfile.TarInfo(member)
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))

    return write


@functools.cache
def attacks_of(times: int = 100_000) -> dict[str, Callable[[Path], object]]:
    """Return what writes each attack, in which what is nested or repeated is so this many times."""
    return {
        "a memo index of 2^31": in_zip(b"Nr\xff\xff\xff\x7f"),
        "a list that contains itself": in_zip(b"]q\x00h\x00a"),
        "a dict that contains itself": in_zip(b"}q\x00" + text("x") + b"h\x00s"),
        "an object that contains itself": in_zip(call(name("m", "C")) + b"q\x00}" + text("x") + b"h\x00sb"),
        "lists doubled 60 times": in_zip(DOUBLED),
        "lists doubled 60 times, in the tree's place": alone(DOUBLED),
        "a tuple that repeats itself": in_zip(repeating_tuple(60)),
        "a tuple that repeats itself, as a key": in_zip(b"}" + repeating_tuple(60) + b"Ns"),
        "lists in lists": in_zip(b"]" * times + b"a" * (times - 1)),
        "tuples in tuples": in_zip(b")" + b"\x85" * times),
        "dicts in dicts": in_zip((b"}" + text("k")) * times + b"N" + b"s" * times),
        "calls in calls": in_zip(name("m", "f") + b"q\x00" + b"h\x00" * times + b"N" + b"\x85R" * times),
        "states in states": in_zip(call(name("m", "f")) * times + b"b" * (times - 1)),
        "groups": alone(b"(" * times),
        "keys of equal hash": in_zip(
            b"}(" + b"".join(number((2**61 - 1) * i << 8) + b"N" for i in range(1, times)) + b"u"
        ),
        "a number of 100,000 digits": in_zip(number(10**100_000)),
        "a number of 100,000 digits as a key": in_zip(b"}" + number(10**100_000) + b"Ns"),
        "a number of 100,000 digits as a size": in_zip(tensor(storage(10**100_000))),
        "keys that steer the terminal": in_zip(
            b"}" + text("\x1b]0;x\x07\x1b[2J\ud800\u202e") + TENSOR + b"s"
        ),
        "keys with dots and slashes": in_zip(
            dict_of({"../../etc/passwd": TENSOR, "a.b": TENSOR, "": TENSOR, "a/b": TENSOR})
        ),
        "a long key at every level": long_key_deep,
        "a long class name": in_zip(call(name("m" * times, "C"))),
        "a key of 140,000 prefixes": in_zip(dict_of({"module." * 140_000: TENSOR})),
        "a doubled list for a storage": in_zip(DOUBLED + b"Q"),
        "a doubled list for a size": in_zip(tensor(storage(1)).replace(tuple_of(number(4)), DOUBLED)),
        "a doubled list for a call": in_zip(DOUBLED + b")R"),
        "a doubled list for arguments": in_zip(name("m", "C") + DOUBLED + b"R"),
        "an object of doubled lists as a key": in_zip(b"}" + call(name("m", "C"), DOUBLED) + b"Ns"),
        "a shape that many tensors refer to": shared_shape,
        "a giant of stride 0": alone(dict_of({"a": tensor(storage(1), (1 << 50,), (0,))}), BYTES),
        "a storage past the end": alone(dict_of({"a": tensor(storage(1 << 40), (1,))}), BYTES),
        "a storage of negative size": alone(dict_of({"a": tensor(storage(-1), (1,))}), BYTES),
        "a storage of 2^63 elements": alone(dict_of({"a": tensor(storage(2**63), (1,))}), BYTES),
        "sizes that overflow": alone(dict_of({"a": tensor(storage(1), (2**62, 4), (0, 0))}), BYTES),
        "a pickle that compresses well": alone(text("x" * 50_000_000), compression=zipfile.ZIP_DEFLATED),
        "a thousand copies of a list": in_zip(
            b"("
            + list_of(*(b"M%bN\x86" % i.to_bytes(2, "little") for i in range(9999)))
            + b"q\x00"
            + name("collections", "OrderedDict")
            + b"q\x01"
            + b"0h\x01h\x00\x85R" * 9999
            + b"l"
        ),
        "modules doubled 60 times": doubled_modules,
        "modules in modules": nested_modules(times // 5),
        "a module that contains itself": alone(
            name("m", "Net")
            + b")\x81q\x00"
            + dict_of({"_parameters": b"}", "_buffers": b"}", "_modules": dict_of({"x": b"h\x00"})})
            + b"b"
        ),
        "a module with an object of doubled lists for a name": alone(
            module(b"}" + call(name("m", "C"), DOUBLED) + TENSOR + b"s"), BYTES
        ),
        "a module with a large number for a name": alone(
            module(b"}" + number(10**10_000) + TENSOR + b"s"), BYTES
        ),
        "tar: a doubled list for a count": tar(program(DOUBLED)),
        "tar: a doubled list for a key": tar(
            program(b"K\x01")
            + program(b"(" + DOUBLED + text("cpu") + name("torch", "FloatStorage") + b"t")
            + bytes(8)
        ),
        "tar: a doubled list for a class": tar(
            program(b"K\x01") + program(b"(K\x01" + text("cpu") + DOUBLED + b"t") + bytes(8)
        ),
        "tar: a large number for a count": tar(program(number(10**10_000))),
        "tar: a doubled list for an identity": tar(
            program(b"K\x00") + program(b"]"), tree=program(DOUBLED + b"Q")
        ),
        "legacy: a storage of 2^60 bytes": lambda path: torch_legacy(
            path, dict_of({"a": tensor(storage(2**58), (1,))}), {"0": (2**58, b"abcd")}
        ),
        "legacy: a list of keys without end": lambda path: torch_legacy(path, b"}", keys=["k"] * times),
        "safetensors: many axes": lambda path: safetensors_file(
            path, {"a": {"dtype": "U8", "shape": [2**62] * times, "data_offsets": [0, 0]}}
        ),
        "safetensors: nested": lambda path: safetensors_file(
            path, b'{"a":' + b"[" * times + b"]" * times + b"}"
        ),
        "safetensors: a header of 2^63 bytes": lambda path: safetensors_file(path, b"{}", size=2**63),
        "safetensors: a number of 100,000 digits": lambda path: safetensors_file(
            path, b'{"a":{"dtype":"U8","shape":[' + b"9" * times + b'],"data_offsets":[0,0]}}'
        ),
        **{name: partial(write, make) for name, make in HOSTILE.items()},
    }
