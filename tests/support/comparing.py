"""Files saved, opened and refused, and two trees that torch loads compared: what tests do all the time."""

from __future__ import annotations

import os
import shutil
import subprocess
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.core.formats import Saved
from ckpttool.core.formats.pytorch.zip_entries import ZipRecord, read_directory
from ckpttool.core.tensors.ref import ByteRange, Source
from ckpttool.diffing.compare import diff
from ckpttool.diffing.compare_values import Comparison
from ckpttool.disarming.disarm import Disarmed, disarm
from ckpttool.errors import CkptToolError, Damaged, FileError, UsageFault
from ckpttool.metrics import certificate

# ---- Two trees that torch loads are the same: values, types, order, shared memory; or what `diff` finds


def compared(folder: Path, a: Any, b: Any, **given: Any) -> Comparison:
    """Save both trees in a folder and return what `diff` finds; `given` are its keyword arguments."""
    torch.save(a, folder / "a.pt")
    torch.save(b, folder / "b.pt")
    with ckpttool.open(folder / "a.pt") as mine, ckpttool.open(folder / "b.pt") as theirs:
        return diff(mine, theirs, **given)


def values(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values in row-major order, conjugation and negation applied."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.dtype == torch.bool:  # a copy would make any byte but 0 a 1
        flat = flat.view(torch.uint8)
    return torch.empty(flat.numel(), dtype=flat.dtype).copy_(flat).view(torch.uint8).numpy().tobytes()


def assert_same(a: Any, b: Any) -> None:
    """Raise AssertionError, naming the place, unless two trees are the same."""
    _Pair().compare(a, b, "")


class _Pair:
    """Two trees side by side, in which the same places must share objects and storages."""

    def __init__(self) -> None:
        self.partners: dict[tuple[str, int], int] = {}
        self.kept: list[Any] = []

    def compare(self, a: Any, b: Any, where: str) -> None:
        assert type(a) is type(b), f"{where}: {type(a)} became {type(b)}"
        if isinstance(a, torch.Tensor):
            self.tensors(a, b, where)
        elif isinstance(a, weakref.ref):
            self.compare(a(), b(), where)
        elif isinstance(a, np.ndarray | np.generic):
            assert a.dtype == b.dtype and np.array_equal(a, b), where
        elif isinstance(a, float):
            assert repr(a) == repr(b), f"{where}: {a!r} became {b!r}"  # tells -0.0, takes NaN for NaN
        elif isinstance(a, type | FunctionType | BuiltinFunctionType):
            assert a is b, where
        elif isinstance(a, frozenset):  # equal ones are one object or two, as Python likes
            assert a == b, where
        elif isinstance(a, dict | list | tuple | set) or hasattr(a, "__dict__"):
            if not self.met("object", id(a), id(b), where):
                self.kept += [a, b]
                self.containers(a, b, where)
        else:
            assert a == b, f"{where}: {a!r} became {b!r}"

    def met(self, kind: str, a: int, b: int, where: str) -> bool:
        """Return whether the pair was seen before; raise AssertionError if one had another partner."""
        known = self.partners.get((kind, a))
        assert known in (None, b), f"{where}: the {kind} was shared, and is no longer"
        other = self.partners.get((kind + " back", b))
        assert other in (None, a), f"{where}: the {kind} is shared, and was not"
        self.partners[kind, a], self.partners[kind + " back", b] = b, a
        return known is not None

    def containers(self, a: Any, b: Any, where: str) -> None:
        if isinstance(a, dict):
            assert list(map(str, a)) == list(map(str, b)), f"{where}: keys or their order"
            for (key, x), (other, y) in zip(a.items(), b.items(), strict=True):
                self.compare(key, other, f"{where}.{key} (key)")
                self.compare(x, y, f"{where}.{key}")
        elif isinstance(a, list | tuple):
            assert len(a) == len(b), where
            for index, (x, y) in enumerate(zip(a, b, strict=True)):
                self.compare(x, y, f"{where}.{index}")
        elif isinstance(a, set):
            assert a == b, where
        if hasattr(a, "__dict__"):
            self.compare(dict(a.__dict__), dict(b.__dict__), f"{where}.__dict__")

    def tensors(self, a: torch.Tensor, b: torch.Tensor, where: str) -> None:
        assert (a.dtype, a.shape, a.layout, a.device) == (b.dtype, b.shape, b.layout, b.device), where
        assert a.requires_grad == b.requires_grad, f"{where}: requires_grad"
        if a.layout is not torch.strided:
            self.compare(a._indices(), b._indices(), where)
            self.compare(a._values(), b._values(), where)
            assert a.is_coalesced() == b.is_coalesced(), where
            return
        assert a.stride() == b.stride(), f"{where}: stride"
        if a.is_meta:
            return
        self.met("tensor", id(a), id(b), where)
        self.kept += [a, b]
        if a.is_quantized:
            assert (a.q_scale(), a.q_zero_point()) == (b.q_scale(), b.q_zero_point()), where
            a, b = a.int_repr(), b.int_repr()
        else:
            assert a.storage_offset() == b.storage_offset(), f"{where}: offset"
            assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg()), where
            if a.untyped_storage().nbytes():
                self.met("storage", a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr(), where)
        assert values(a) == values(b), f"{where}: values"


# ---- What tests of files do all the time: save by torch, open, convert, load again, and be refused ----


def prefixed(state: Any, prefix: str) -> Any:
    return OrderedDict((prefix + key, value) for key, value in state.items())


def saved(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def opened(value: Any, folder: Path) -> ckpttool.Checkpoint:
    """Save a value with torch as `in.pt`, and open that."""
    return ckpttool.open(saved(value, folder / "in.pt"))


def convert(value: object, out: Path, **given: Any) -> Saved:
    """Save a value with torch as `in.pt` beside an output, and write that."""
    return ckpttool.save(opened(value, out.parent), out, **given)


def saved_predictions(folder: Path, ranks: int, samples: int) -> None:
    """Write what each rank of an evaluation predicted, as `rank0.safetensors` and so on."""
    for rank in range(ranks):
        index = np.arange(rank, samples, ranks)
        rows = certificate.Predictions(index, index % 2, index % 2, index / 4)
        about = certificate.Evaluation(ranks, samples)
        certificate.write(folder / f"rank{rank}.safetensors", rows, about, rank)


def loaded(checkpoint: ckpttool.Checkpoint, folder: Path) -> Any:
    """Return what torch reads from the checkpoint written as a `.pt` file."""
    ckpttool.save(checkpoint, folder / "out.pt", force=True)
    return torch.load(folder / "out.pt", weights_only=False)


def disarmed(given: Any, folder: Path, **options: Any) -> tuple[Any, Disarmed]:
    """Disarm a file, or a value that torch saves with these options as `in.pt`.

    Return what torch loads from `safe.pt` without trusting it, and what was changed.
    """
    path = given if isinstance(given, Path) else folder / "in.pt"
    if path is not given:
        torch.save(given, path, **options)
    with ckpttool.open(path) as checkpoint:
        new, report = disarm(checkpoint)
        ckpttool.save(new, folder / "safe.pt", force=True)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(folder / "safe.pt") == []
    return torch.load(folder / "safe.pt", weights_only=True), report


def refused(
    path: Path | list[Path],
    said: str = "",
    error: type[CkptToolError] | tuple[type[CkptToolError], ...] = Damaged,
    opened: Callable[..., Any] = ckpttool.open,
    **given: Any,
) -> Any:
    """Open what must be refused, in words that match; return the error."""
    with pytest.raises(error, match=said or None) as refusal:
        opened(path, **given)
    fault = refusal.value.with_traceback(None)  # whose frames would keep files open
    del refusal
    assert isinstance(fault, FileError | UsageFault) and len(str(fault)) < 1000
    return fault


# ---- Check zip files with the package's reader and with other programs --------------------------------


def place_of(path: Path) -> ByteRange:
    """Open a file and return all of its bytes as a place."""
    source = Source(str(path), os.open(path, os.O_RDONLY))
    return ByteRange(source, 0, source.size)


def directory(place: ByteRange) -> dict[str, ZipRecord]:
    """Return the records of a zip that fills a place."""
    return read_directory(place.source, place)


def assert_whole(path: Path) -> None:
    """Raise AssertionError unless Python's zipfile, and `unzip` if it is there, find a zip whole."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    if shutil.which("unzip"):
        tested = subprocess.run(["unzip", "-t", "-q", path], capture_output=True, check=False)
        assert tested.returncode == 0, tested.stdout
