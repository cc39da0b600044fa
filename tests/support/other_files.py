"""What others write, honest and not: GGUF, ONNX, NumPy's files, exported programs; byte by byte."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# ---- Write GGUF files byte by byte, honest ones and others. Source: docs/gguf.md of ggml --------------


Q4_0, Q8_0, F32, F16, BF16, I64 = 2, 8, 0, 1, 30, 27


class Typed(NamedTuple):
    """A key-value with its type: a number of `struct`, or the items of an array with theirs."""

    kind: int
    raw: bytes


def text(value: str | bytes, order: str = "<") -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack(f"{order}Q", len(raw)) + raw


def number(kind: int, code: str, value: float, order: str = "<") -> Typed:
    return Typed(kind, struct.pack(order + code, value))


def array(kind: int, raw: Sequence[bytes], count: int | None = None, order: str = "<") -> Typed:
    head = struct.pack(f"{order}IQ", kind, len(raw) if count is None else count)
    return Typed(9, head + b"".join(raw))


class Tensor(NamedTuple):
    """A tensor: type by number, shape as torch has it, values."""

    kind: int
    shape: tuple[int, ...]
    data: bytes


def gguf_file(
    tensors: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]],
    values: Sequence[tuple[str, Any]] = (),
    *,
    order: str = "<",
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
    offsets: Sequence[int] | None = None,
) -> bytes:
    """Return a file; `counts` and `offsets` are what it claims instead of the truth."""
    rows = [*tensors.items()] if isinstance(tensors, Mapping) else [*tensors]
    n, pairs = counts or (len(rows), len(values))
    out = b"GGUF" + struct.pack(f"{order}IQQ", version, n, pairs)
    for key, value in values:
        if isinstance(value, str):
            value = Typed(8, text(value, order))
        elif isinstance(value, int):
            value = number(4, "I", value, order)
        out += text(key, order) + struct.pack(f"{order}I", value.kind) + value.raw
    data = b""
    for index, (name, tensor) in enumerate(rows):
        offset = len(data) if offsets is None else offsets[index]
        out += text(name, order) + struct.pack(f"{order}I", len(tensor.shape))
        out += struct.pack(f"{order}{len(tensor.shape)}Q", *reversed(tensor.shape))
        out += struct.pack(f"{order}IQ", tensor.kind, offset)
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    return out + bytes(-len(out) % alignment) + data


def in_several_files(folder: Path, count: int = 3) -> list[Path]:
    """Write a model in several files, each with one tensor."""
    paths = []
    for index in range(count):
        split = [("split.no", number(2, "H", index)), ("split.count", number(2, "H", count))]
        first = [("general.architecture", "llama")] if not index else []
        paths.append(folder / f"m-{index + 1:05d}-of-{count:05d}.gguf")
        tensors = {f"{index}.weight": Tensor(F32, (8,), bytes([index] * 32))}
        paths[-1].write_bytes(gguf_file(tensors, [*first, *split]))
    return paths


# ---- Write ONNX models byte by byte, honest ones and others. Source: `onnx.proto`; protobuf's wire format


FLOAT, UINT8, INT8, INT32, INT64, STRING, BOOL, HALF, INT4 = 1, 2, 3, 6, 7, 8, 9, 10, 22


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def integer(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, raw: bytes, size: int | None = None) -> bytes:
    return varint(field << 3 | 2) + varint(len(raw) if size is None else size) + raw


def pair(key: str, value: str) -> bytes:
    return message(1, key.encode()) + message(2, value.encode())


def tensor(
    name: str,
    kind: int,
    shape: Sequence[int],
    raw: bytes | None = None,
    *,
    numbers: tuple[int, bytes] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> bytes:
    """Return a TensorProto: its values raw, in a field of their type, or in another file."""
    out = b"".join(integer(1, size) for size in shape) + integer(2, kind)
    out += message(*numbers) if numbers else b""
    out += message(8, name.encode())
    out += message(9, raw) if raw is not None else b""
    out += b"".join(message(13, pair(key, value)) for key, value in (elsewhere or {}).items())
    return out + (integer(14, 1) if elsewhere is not None else b"")


def onnx_file(
    tensors: Sequence[bytes], *, nodes: int = 1, texts: Mapping[str, str] | None = None, more: bytes = b""
) -> bytes:
    """Return a ModelProto with a graph of such tensors; `more` are fields of the graph."""
    node = message(1, message(1, b"x") + message(2, b"y") + message(4, b"Identity"))
    graph = node * nodes + message(2, b"main") + b"".join(message(5, each) for each in tensors) + more
    head = integer(1, 10) + message(2, b"pytorch") + message(3, b"2.15.0")
    texts = texts or {}
    return head + message(7, graph) + b"".join(message(14, pair(*each)) for each in texts.items())


# ---- What others write, small and honest: GGUF, ONNX with values beside it, NumPy's files, exported programs


ROWS = np.arange(64, dtype="<f4").reshape(2, 32)
NUMBERS = b"".join(map(varint, (1, -2, 2**40)))


def as_gguf(path: Path) -> None:
    """Write key-values of many types, and tensors; packed ones where they can be unpacked."""
    values = [("general.architecture", "llama"), ("general.alignment", 32), ("rope", number(6, "f", 1e-5))]
    values += [("tokens", array(8, [text(f"t{n}") for n in range(80)])), ("few", array(4, [bytes(4)] * 3))]
    values.append(("nested", array(9, [array(8, [text("a")]).raw] * 2)))
    tensors = {
        "token_embd.weight": Tensor(F32, (2, 32), ROWS.tobytes()),
        "half": Tensor(BF16, (3,), bytes(range(6))),
        "count": Tensor(I64, (), struct.pack("<q", 7)),
    }
    if importlib.util.find_spec("gguf"):
        tensors["blk.0.weight"] = Tensor(Q8_0, (2, 32), bytes(range(68)))
    path.write_bytes(gguf_file(tensors, values))


def _initialisers(elsewhere: Mapping[str, str] | None = None) -> list[bytes]:
    raw = None if elsewhere else ROWS.tobytes()
    return [
        tensor("fc.weight", FLOAT, (2, 32), raw, elsewhere=elsewhere),
        tensor("steps", INT64, (3,), numbers=(7, NUMBERS)),
        tensor("bias", FLOAT, (2,), numbers=(4, ROWS[:1, :2].tobytes())),
    ]


def as_onnx(path: Path) -> None:
    path.write_bytes(onnx_file(_initialisers(), texts={"who": "me"}))


def as_onnx_folder(path: Path) -> None:
    """Write a model and the file beside it that has most of its values."""
    path.mkdir()
    place = {"location": "model.data", "offset": "16", "length": str(ROWS.nbytes)}
    (path / "model.onnx").write_bytes(onnx_file(_initialisers(place)))
    (path / "model.data").write_bytes(bytes(16) + ROWS.tobytes())


def as_small_onnx_folder(path: Path) -> None:
    path.mkdir()
    first = tensor("first", UINT8, (16,), elsewhere={"location": "model.data"})
    (path / "model.onnx").write_bytes(onnx_file([first]))
    (path / "model.data").write_bytes(bytes(range(16)))


def _arrays() -> dict[str, Any]:
    return {
        "w": ROWS,
        "fortran": np.asfortranarray(ROWS.astype("f8")),
        "big": ROWS[0].astype(">i4"),
        "b": ROWS > 3,
    }


def as_npz(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, **{name: each for name, each in _arrays().items() if name != "big"})


def as_compressed_npz(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez_compressed(file, big=_arrays()["big"])


def as_npy(path: Path) -> None:
    with open(path, "wb") as file:
        np.save(file, ROWS)


def described(shape: tuple[int, ...], stride: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """Return what a package says of a tensor (PayloadMeta)."""
    sizes, strides = ([{"as_int": n} for n in numbers] for numbers in (shape, stride))
    tensor = {"dtype": 7, "sizes": sizes, "strides": strides, "storage_offset": {"as_int": 0}, "layout": 7}
    tensor |= {"requires_grad": False, "device": {"type": "cpu", "index": None}}
    return {"path_name": "weight_0", "is_param": False, "use_pickle": False, "tensor_meta": tensor | changes}


def as_package(path: Path) -> None:
    """Write a package as torch.export.save does, without what makes it a program."""
    config = {
        "w": described((2, 32), (32, 1)),
        "tied": described((2, 32), (32, 1)),
        "t": described((32, 2), (1, 32)),
    }
    _write_package(path, config, [ROWS])


def _write_package(path: Path, config: Mapping[str, Any], weights: Iterable[Any]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for index, each in enumerate(weights):
            archive.writestr(f"m/data/weights/weight_{index}", each.tobytes())
        archive.writestr("m/data/weights/model_weights_config.json", json.dumps({"config": config}))
        archive.writestr("m/models/model.json", "{}")
        archive.writestr("m/archive_format", "pt2")


# Any state in each of these formats.


def state_as_gguf(path: Path, state: Mapping[str, Any]) -> None:
    kinds = {"float32": F32, "int64": I64}
    tensors = {name: Tensor(kinds[str(a.dtype)], a.shape, a.tobytes()) for name, a in state.items()}
    tokens = array(8, [text(f"t{n}") for n in range(80)])
    path.write_bytes(gguf_file(tensors, [("general.architecture", "net"), ("tokens", tokens)]))


def state_as_onnx(path: Path, state: Mapping[str, Any]) -> None:
    kinds = {"float32": FLOAT, "int64": INT64}
    path.write_bytes(
        onnx_file([tensor(name, kinds[str(a.dtype)], a.shape, a.tobytes()) for name, a in state.items()])
    )


def state_as_npz(path: Path, state: Mapping[str, Any]) -> None:
    with open(path, "wb") as file:
        np.savez(file, **state)


def state_as_package(path: Path, state: Mapping[str, Any]) -> None:
    """Write a package as torch.export.save does, without what makes it a program."""
    config = {}
    for index, (name, a) in enumerate(state.items()):
        stride = tuple(step // a.itemsize for step in a.strides)
        changes = {"dtype": {"float32": 7, "int64": 5}[str(a.dtype)]}
        config[name] = described(a.shape, stride, **changes) | {"path_name": f"weight_{index}"}
    _write_package(path, config, state.values())


# What their own libraries read: names and arrays, those that they can't read left out.


def read_by_numpy(path: Path) -> Iterator[tuple[str, Any]]:
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        yield "arr_0", loaded
        return
    for name in loaded.files:
        with contextlib.suppress(Exception):
            yield name, loaded[name]


def read_by_onnx(path: Path) -> Iterator[tuple[str, Any]]:
    import onnx

    for each in onnx.load(path).graph.initializer:
        yield each.name, onnx.numpy_helper.to_array(each)


def read_by_gguf(path: Path) -> Iterator[tuple[str, Any]]:
    import gguf

    for each in gguf.GGUFReader(path).tensors:
        is_plain = each.tensor_type.name[0] in "FI" and each.tensor_type.name[1] != "Q"
        yield each.name, each.data if is_plain else gguf.quants.dequantize(each.data, each.tensor_type)


def npy(header: str, data: bytes = b"") -> bytes:
    """Return an array with any text as its header."""
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + data


def npz(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return raw.getvalue()


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"
LONG = 2 << 20  # bytes
EVIL = {"location": "../../../../etc/passwd", "length": "4"}

# Files made to cost much, or to mislead, by name; each is made when it is asked for.
HOSTILE: dict[str, Callable[[], bytes]] = {
    "GGUF: a billion tensors": lambda: gguf_file([], counts=(10**9, 0)),
    "GGUF: a text without an end": lambda: gguf_file([], [("k", Typed(8, struct.pack("<Q", 2**63)))]),
    "GGUF: 2^62 texts": lambda: gguf_file([], [("k", array(8, [], 2**62))]),
    "GGUF: 100,000 arrays in arrays": lambda: gguf_file(
        [], [("k", Typed(9, struct.pack("<IQ", 9, 1) * 100_000 + struct.pack("<IQ", 4, 0)))]
    ),
    "GGUF: 100,000 empty arrays in an array": lambda: gguf_file(
        [], [("k", array(9, [struct.pack("<IQ", 4, 0)] * 100_000))]
    ),
    "GGUF: 3,000 tensors of no values": lambda: gguf_file(
        [(f"{n}", Tensor(F32, (0, 2**30), b"")) for n in range(3000)]
    ),
    "GGUF: values of 2^60 elements": lambda: gguf_file([("a", Tensor(Q8_0, (2**30, 2**30), bytes(34)))]),
    "GGUF: an alignment of 2^31": lambda: gguf_file(
        [("a", Tensor(F32, (1,), bytes(4)))], [("general.alignment", 2**31)]
    ),
    "GGUF: a key of 2 MiB": lambda: gguf_file([], [("k" * LONG, 1)]),
    "GGUF: a text of 2 MiB": lambda: gguf_file([], [("k", "t" * LONG)]),
    "GGUF: a name of 2 MiB": lambda: gguf_file([("n" * LONG, Tensor(F32, (1,), bytes(4)))]),
    "ONNX: a name of 2 MiB": lambda: onnx_file([tensor("n" * LONG, FLOAT, (1,), bytes(4))]),
    "ONNX: a text of 2 MiB": lambda: onnx_file([], texts={"k": "t" * LONG}),
    "ONNX: 2^20 sizes in one field": lambda: onnx_file(
        [message(1, b"\1" * (1 << 20)) + tensor("a", FLOAT, ())]
    ),
    "ONNX: values outside the folder": lambda: onnx_file([tensor("a", FLOAT, (1,), elsewhere=EVIL)]),
    "ONNX: a number without an end": lambda: onnx_file(
        [tensor("a", INT64, (1,), numbers=(7, b"\xff" * 100_000))]
    ),
    "ONNX: 100,000 sizes": lambda: onnx_file([tensor("a", FLOAT, (2**62,) * 100_000)]),
    "ONNX: 100,000 graphs": lambda: onnx_file([]) + message(7, b"") * 100_000,
    "ONNX: messages in messages": lambda: onnx_file([message(5, b"")] * 50_000),
    "ONNX: 100,000 nodes": lambda: onnx_file([], nodes=100_000),
    "NumPy: brackets": lambda: npy("{'descr': " + "(" * 9000),
    "NumPy: a size of 2^80": lambda: npy(HEADER % f"({2**40}, {2**40})"),
    "NumPy: sizes that multiply": lambda: npy(HEADER % f"({2**40}, 0, {2**40})"),
    "NumPy: spaces": lambda: npy("{" + " " * 9000 + "'" * 900),
    "NumPy: zeros that were packed": lambda: npz(
        {"a.npy": npy(HEADER % f"({2**23},)", bytes(2**25))}, zipfile.ZIP_DEFLATED
    ),
    "NumPy: a pickle of 17 MiB": lambda: npz(
        {"a.npy": npy(HEADER.replace("<f4", "|O") % "()", b"]" * (17 << 20))}, zipfile.ZIP_DEFLATED
    ),
    "NumPy: a record of the name of an array": lambda: npz(
        {"a.npy": npy(HEADER % "()", bytes(4)), "a": b"x"}
    ),
    "NumPy: 500 arrays": lambda: npz({f"{n}.npy": npy(HEADER % "()", bytes(4)) for n in range(500)}),
    "exported: nested": lambda: npz(
        {"m/data/weights/model_weights_config.json": b"[" * 100_000, "m/archive_format": b"pt2"}
    ),
    "exported: a shape of 2^80": lambda: npz(
        {
            "m/data/weights/weight_0": b"",
            "m/data/weights/model_weights_config.json": json.dumps(
                {"config": {"w": described((2**40, 2**40), (0, 0))}}
            ).encode(),
        }
    ),
}
