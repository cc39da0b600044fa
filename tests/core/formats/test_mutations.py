"""Any change of a whole file or folder is read correctly or refused: in bounded memory, with nothing run.

Where checksums cover everything, "correctly" means the same contents, or a problem that `verify` reports;
where only the structure can be checked, the values may differ.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.core.checkpoint import full
from ckpttool.core.files.digest import digest
from ckpttool.errors import CkptToolError
from ckpttool.inspecting.summary import summarize
from tests.support.every_format import as_dcp, as_tar, converted

TREE: dict[str, Any] = {
    "model": OrderedDict({"module.a": torch.arange(6.0).reshape(2, 3), "module.b": torch.ones(3).half()}),
    "optimizer": {"state": {0: {"m": torch.ones(2, 3)}}, "param_groups": [{"params": [0], "lr": 0.1}]},
    "epoch": 3,
    "betas": (0.9, 0.999),
    "args": argparse.Namespace(lr=0.1),
}

MEMORY = 64 << 20
"""Bytes that Python may allocate for a file of some kilobytes."""


PLAIN = {name: value for name, value in TREE.items() if name != "args"}
written = partial(converted, lambda: TREE)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "zip": lambda path: torch.save(TREE, path),
    "legacy": lambda path: torch.save(TREE, path, _use_new_zipfile_serialization=False),
    "tar": as_tar,
    "full": written(to="safetensors", full=True),
    "shards": written(to="safetensors-sharded", shard_size=24),
    "shards, full": written(to="safetensors-sharded", shard_size=24, full=True),
    "shards, torch": written(to="torch-sharded", shard_size=24),
    "dcp": as_dcp(lambda: PLAIN),
    "dcp, full": written(to="dcp", full=True),
}

INDEXES = {
    "shards": "model.safetensors.index.json",
    "shards, full": "model.safetensors.index.json",
    "shards, torch": "pytorch_model.bin.index.json",
    "dcp": ".metadata",
    "dcp, full": ".metadata",
}
"""The file of a folder that lists what is in the others."""

PLACES = [(kind, "") for kind in WRITERS if kind not in INDEXES] + [
    *INDEXES.items(),
    ("dcp", "__0_0.distcp"),
    ("shards, torch", "pytorch_model-00001-of-00002.bin"),
]
"""What is changed: a file, or one of a folder."""

SUMMED = {("zip", ""), ("shards, torch", "pytorch_model-00001-of-00002.bin")}
"""Formats in which checksums cover everything."""


@functools.cache
def whole(kind: str) -> dict[str, bytes]:
    """The bytes of a whole file, or of all files of a folder by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in"
        WRITERS[kind](path)
        files = path.iterdir() if path.is_dir() else [path]
        return {"" if file == path else file.name: file.read_bytes() for file in files}


def put(kind: str, path: Path, changed: dict[str, bytes]) -> None:
    if kind in INDEXES:
        path.mkdir(exist_ok=True)
    for name, raw in (whole(kind) | changed).items():
        (path / name if name else path).write_bytes(raw)


def contents(checkpoint: ckpttool.Checkpoint) -> tuple[str, str]:
    return digest(dict(checkpoint.tensors())), full.encode(checkpoint.tree).text


@functools.cache
def honest(kind: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        put(kind, Path(folder) / "in", {})
        with ckpttool.open(Path(folder) / "in") as checkpoint:
            return contents(checkpoint)


def found_in(kind: str, path: Path) -> tuple[str, str] | None:
    """The contents; None when the file was refused, or `verify` finds fault with it."""
    tracemalloc.start()
    try:
        with ckpttool.open(path) as checkpoint:
            summarize(checkpoint)
            ckpttool.save(checkpoint, path.with_name("out.pt"), dry_run=True)
            ckpttool.save(checkpoint, path.with_name("out.safetensors"), dry_run=True, full=True)
            found = contents(checkpoint)
            return found if ckpttool.verify(checkpoint).ok else None
    except CkptToolError as error:
        assert error.exit_code == 3 and len(str(error)) < 1000
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY


@pytest.mark.parametrize("kind", WRITERS)
def test_unchanged_files_are_read(kind: str, tmp_path: Path) -> None:
    """Proves that the other tests can fail."""
    put(kind, tmp_path / "in", {})
    assert found_in(kind, tmp_path / "in") == honest(kind)


@pytest.mark.parametrize("kind, name", PLACES)
def test_a_file_cut_at_any_byte_is_refused_or_reads_the_same(kind: str, name: str, tmp_path: Path) -> None:
    raw = whole(kind)[name]
    put(kind, tmp_path / "in", {})
    at = tmp_path / "in" / name if name else tmp_path / "in"
    step = 1 + len(raw) // 25  # tests/core/formats/test_hostile.py cuts some formats at every byte
    for end in sorted({*range(0, len(raw), step), *range(max(0, len(raw) - 8), len(raw))}):
        at.write_bytes(raw[:end])
        assert found_in(kind, tmp_path / "in") in (None, honest(kind)), f"cut after {end} bytes"


KINDS = ["flip", "cut", "copy over", "copy in", "take out", "zero", "put in"]
NOISE = st.binary(min_size=1, max_size=12)
STEP = st.tuples(st.sampled_from(KINDS), st.floats(0, 1), st.floats(0, 1), st.integers(1, 200), NOISE)


def changed(raw: bytes, steps: list[tuple[str, float, float, int, bytes]]) -> bytes:
    """Make changes at positions given as fractions of the length."""
    out = bytearray(raw)
    for what, first, second, size, noise in steps:
        at, to = int(first * len(out)), int(second * len(out))
        piece = bytes(out[at : at + size])
        begin, end, new = {
            "flip": (at, at + 1, bytes(byte ^ (noise[0] or 1) for byte in piece[:1])),
            "cut": (at, len(out), b""),
            "copy over": (to, to + len(piece), piece),
            "copy in": (to, to, piece),
            "take out": (at, at + size, b""),
            "zero": (at, at + size, bytes(len(piece))),
            "put in": (at, at, noise),
        }[what]
        out[begin:end] = new
    return bytes(out)


@pytest.mark.parametrize("kind, name", PLACES)
@settings(max_examples=settings().max_examples // 2)
@given(steps=st.lists(STEP, min_size=1, max_size=3))
def test_any_change_is_read_correctly_or_refused(kind: str, name: str, steps: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        put(kind, Path(folder) / "in", {name: changed(whole(kind)[name], steps)})
        found = found_in(kind, Path(folder) / "in")
        if (kind, name) in SUMMED:
            assert found in (None, honest(kind))
