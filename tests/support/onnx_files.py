"""Write ONNX models byte by byte, honest ones and others. Source: `onnx.proto`; protobuf's wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
