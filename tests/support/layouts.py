"""Tensors of every memory layout and element width, and files of either byte order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return 0, 1, 2, … in a shape; complex numbers count down in their imaginary part."""
    count = torch.Size(shape).numel()
    if dtype.is_complex:
        real = torch.arange(count, dtype=torch.float64)
        return torch.complex(real, -real - 1).to(dtype).reshape(shape)
    return torch.arange(count).to(dtype).reshape(shape)


LAYOUTS: dict[str, torch.Tensor] = {
    "transposed": numbers(5, 7).t(),
    "permuted": numbers(3, 4, 5).permute(2, 0, 1),
    "channels last": numbers(2, 3, 5, 5).contiguous(memory_format=torch.channels_last),
    "channels last 3d": numbers(2, 3, 2, 4, 4).contiguous(memory_format=torch.channels_last_3d),
    "every third of a row": numbers(100)[1::3],
    "a column": numbers(10, 10)[:, 3],
    "a corner": numbers(10, 10)[2:5, 3:9],
    "expanded": numbers(1, 5).expand(6, 5),
    "expanded inside": numbers(4, 1, 3).expand(4, 5, 3),
    "one number expanded": numbers(1).expand(1000),
    "overlapping windows": numbers(50).unfold(0, 8, 3),
    "a diagonal": numbers(9, 9).diagonal(),
    "a scalar inside": numbers(10)[7],
    "rows of one": numbers(12)[::4].reshape(3, 1).t(),
    "the end of a storage": numbers(10)[8:],
    "many short axes": numbers(2, 2, 2, 2, 2, 2).permute(5, 3, 1, 0, 2, 4),
}


WIDTHS = [
    *(torch.uint8, torch.bool, torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.uint16),
    *(torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128),
]


LAZY: dict[str, torch.Tensor] = {
    "conjugate": numbers(5, dtype=torch.complex64).conj(),
    "conjugate, transposed": numbers(3, 4, dtype=torch.complex64).mH,
    "conjugate of doubles": numbers(5, dtype=torch.complex128).conj(),
    "negative": numbers(5, dtype=torch.complex64).conj().imag,
    "negative of doubles": numbers(5, dtype=torch.complex128).conj().imag,
    "conjugate of one number": torch.tensor(1 + 2j).conj(),
    "negative zero and infinity": torch.complex(torch.zeros(2), torch.tensor([0.0, float("inf")]))
    .conj()
    .imag,
}


def strided(ranks: tuple[int, int], least: int, stride: int) -> st.SearchStrategy[Any]:
    """Draw a view: a shape of axes of `least` to 4, strides up to the largest, and an offset up to 20."""

    def view(rank: int) -> st.SearchStrategy[Any]:
        shapes = st.lists(st.integers(least, 4), min_size=rank, max_size=rank)
        strides = st.lists(st.integers(0, stride), min_size=rank, max_size=rank)
        return st.tuples(shapes, strides, st.integers(0, 20))

    return st.integers(*ranks).flatmap(view)


def big_endian(tensor: torch.Tensor, path: Path) -> Any:
    """Save a tensor as torch does on a big-endian machine: the bytes of each number reversed."""
    import zipfile

    torch.save({"t": tensor}, path.with_suffix(".little"))
    part = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
    with zipfile.ZipFile(path.with_suffix(".little")) as little, zipfile.ZipFile(path, "w") as big:
        for record in little.namelist():
            raw = little.read(record)
            if record.endswith("/byteorder"):
                raw = b"big"
            elif "/data/" in record:
                raw = b"".join(raw[i : i + part][::-1] for i in range(0, len(raw), part))
            big.writestr(record, raw)
    return path
