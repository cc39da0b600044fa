"""Write GGUF files byte by byte, honest ones and others. Source: docs/gguf.md of ggml."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
