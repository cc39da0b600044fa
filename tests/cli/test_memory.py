"""Memory stays flat whatever the size: commands in processes of their own, by the kernel's figure."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.memory import MOST, peak


def numbers(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix of zeros, so many bytes."""
    return torch.zeros(size // (2048 * dtype.itemsize), 2048, dtype=dtype)


def of_big_endian(tensor: torch.Tensor, path: Path) -> None:
    """A file as a big-endian machine writes it; zeros are the same in any order of bytes."""
    little = path.with_suffix(".little")
    torch.save({"t": tensor}, little)
    with zipfile.ZipFile(little) as source, zipfile.ZipFile(path, "w") as target:
        for record in source.namelist():
            raw = b"big" if record.endswith("/byteorder") else source.read(record)
            target.writestr(record, raw)
    little.unlink()


Maker = Callable[[int], Mapping[str, torch.Tensor]]

STATES: dict[str, Maker] = {
    "plain": lambda size: {"t": numbers(size)},
    "transposed": lambda size: {"t": numbers(size).t()},
    "channels last": lambda size: {
        "t": torch.zeros(size // (512 * 3 * 3 * 4), 512, 3, 3).to(memory_format=torch.channels_last)
    },
    "one row after another of a tall matrix": lambda size: {"t": torch.zeros(size // 16, 4).t()},
    "complex": lambda size: {"t": numbers(size, torch.complex64)},
    "conjugate": lambda size: {"t": numbers(size, torch.complex64).conj()},
    "conjugate, transposed": lambda size: {"t": numbers(size, torch.complex64).mH},
    "negative": lambda size: {"t": numbers(2 * size, torch.complex64).conj().imag},
    "pairs": lambda size: {"t.real": numbers(size // 2), "t.imag": numbers(size // 2)},
    "pairs, transposed": lambda size: {"t.real": numbers(size // 2).t(), "t.imag": numbers(size // 2).t()},
    "repeated": lambda size: {"t": torch.zeros(2048).expand(size // 8192, 2048)},
}

CONVERSIONS: list[tuple[str, tuple[str, ...]]] = [
    ("transposed", ()),
    ("transposed", ("--dtype", "bf16")),
    ("channels last", ()),
    ("one row after another of a tall matrix", ()),
    ("conjugate", ()),
    ("conjugate, transposed", ()),
    ("negative", ()),
    ("repeated", ()),
    ("plain", ("--dtype", "bf16")),
    ("plain", ("--dtype", "float64")),
    ("complex", ("--complex", "split")),
    ("conjugate", ("--complex", "split")),
    ("pairs", ("--complex", "join")),
    ("pairs, transposed", ("--complex", "join")),
]

SIZE = 96 << 20
"""Bytes of each tensor: half as much again as a command may take, to which Python adds 30 MB."""

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
pytestmark = [needs_proc, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("state", "options"), CONVERSIONS, ids=lambda part: " ".join(part) if isinstance(part, tuple) else part
)
def test_a_conversion_takes_less_memory_than_the_tensor(state: str, options: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "in.pt", tmp_path / "out.safetensors"
    torch.save(STATES[state](SIZE), path)
    assert peak("convert", path, out, *options) <= MOST
    for file in (path, out):  # the folders of the last runs are kept
        file.unlink()


@pytest.mark.parametrize("state", ["transposed", "conjugate", "repeated"])
@pytest.mark.parametrize(
    "command", [("verify",), ("digest",), ("diff",), ("verify", "--against")], ids=" ".join
)
def test_reading_takes_less_memory_than_the_tensor(command: Any, state: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    torch.save(STATES[state](SIZE), path)
    twice = command[0] == "diff" or len(command) > 1
    assert peak(command[0], path, *command[1:], *([path] if twice else [])) <= MOST
    path.unlink()


def test_a_big_endian_file_takes_less_memory_than_the_tensor(tmp_path: Path) -> None:
    path, out = tmp_path / "in.pt", tmp_path / "out.safetensors"
    of_big_endian(numbers(SIZE), path)
    assert peak("convert", path, out) <= MOST
    assert peak("digest", path) <= MOST
    for file in (path, out):
        file.unlink()


def test_a_tensor_expanded_beyond_a_gibibyte_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    torch.save({"t": torch.zeros(1000, dtype=torch.uint8).expand(1_100_000, 1000)}, path)
    for command in (
        ["verify", path],
        ["verify", path, "--against", path],
        ["digest", path],
        ["diff", path, path],
    ):
        assert peak(*command) <= MOST, command
