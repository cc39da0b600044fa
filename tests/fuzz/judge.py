"""What must hold of a changed file, and how it is found out. Imports torch when it is called.

The package refuses the file with one of its own errors, or reads it. What it reads must survive a conversion,
and be what torch (`weights_only=True`), the safetensors library and `zipfile` read, where they read it too.
"""

from __future__ import annotations

import importlib.util
import io
import os
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ckpttool
from ckpttool.arrays import reading as numpy_files
from ckpttool.core.checkpoint import full
from ckpttool.core.checkpoint.prefixes import rename_names
from ckpttool.core.files.digest import digest
from ckpttool.core.formats import folders
from ckpttool.core.formats.pytorch.zip_entries import read_directory
from ckpttool.core.inert_pickle.known_names import TAKEN, names_that_run
from ckpttool.core.inert_pickle.values import TooDeep
from ckpttool.core.tensors.ref import DTYPES, ByteRange, Source, TensorRef
from ckpttool.core.tensors.values import stream
from ckpttool.errors import CkptToolError, UsageFault
from ckpttool.gguf import reading as gguf
from ckpttool.inspecting import run_log
from ckpttool.inspecting.summary import summarize
from ckpttool.lora import adapter
from ckpttool.metrics import certificate
from ckpttool.metrics.certificate import recompute
from ckpttool.numbers.dequantize import dequantize
from ckpttool.onnx import reading as onnx
from ckpttool.proving.proof import prove
from ckpttool.scanning.scan import scan
from ckpttool.verifying.verify import verify
from tests.fuzz.seeds import SECRET
from tests.support import other_files
from tests.support.comparing import assert_same, values
from train import plot
from train.config.sections import TrainConfig
from train.run.folder import attempts, claimed

# Bytes of a tensor's values that are compared at most: a view may repeat one byte without end
COMPARED = 1 << 26


@dataclass(slots=True)
class Outcome:
    """What came of a file."""

    # The package read it and `verify` found nothing
    accepted: bool = False
    # What did not hold, as kind and place: the same words for the same fault
    wrong: str = ""
    details: str = ""
    # The libraries that read it too
    also: list[str] = field(default_factory=list)
    # Bytes that the process grew by at most, while the package was at work
    memory: int = 0
    seconds: float = 0.0

    def fail(self, wrong: str, details: object = "") -> None:
        """Note a fault, unless there is one already."""
        if not self.wrong:
            self.wrong, self.details = wrong, f"{details}"[-3000:]


def _memory() -> tuple[int, int]:
    """Return this process's resident memory and its peak, in bytes."""
    found = {}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("VmHWM", "VmRSS"):
                found[name] = int(rest.split()[0]) << 10
    return found["VmRSS"], found["VmHWM"]


def use(path: Path, out: Path) -> Outcome:
    """Do with a file what commands do, and note what it takes."""
    outcome = Outcome()
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak
    before, started = _memory()[0], time.process_time()
    try:
        outcome.accepted = _use(path, out, outcome)
    except CkptToolError as error:
        said = str(error).replace(str(path), "")
        if not 0 < len(said) < 1000:
            outcome.fail(f"a long message of {type(error).__name__}", said[:300])
    except BaseException as error:
        outcome.fail(_place_of(error), traceback.format_exc())
    outcome.memory = max(0, _memory()[1] - before)
    outcome.seconds = time.process_time() - started
    return outcome


def _place_of(error: BaseException) -> str:
    """Return an exception's type and the last line of the package that it passed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/ckpttool/" in f.filename]
    at = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {os.path.basename(at.filename)}, {at.name}"


def _use(path: Path, out: Path, outcome: Outcome) -> bool:
    scanned = {name for file in scan(path) for name in file.names}
    if os.path.lexists(path / "scanned.zip"):
        return True
    if any(os.path.lexists(path / name) for name in (adapter.CONFIG, *adapter.OF_DIFFUSERS)):
        return _use_adapter(path, out)
    if os.path.lexists(path / "delta.safetensors"):
        return _use_delta(path, out, outcome)
    if os.path.lexists(path / "packed.safetensors"):
        return _use_packed(path, out)
    if os.path.lexists(path / "attempts.json"):
        return _use_run(path)
    model = path / "model.onnx"
    with ckpttool.open(model if model.is_file() else path) as checkpoint:
        summarize(checkpoint)
        if missed := {*names_that_run(checkpoint.names)} - scanned:
            outcome.fail("scan misses what the reader finds", missed)
        with suppress(UsageFault):  # the expression backtracks without end on some names
            rename_names(dict(checkpoint.tensors()), [(r"^(\w+\.?)+$", r"\g<0>.x")])
        meant = _contents(checkpoint)
        is_whole = verify(checkpoint).ok
        _copy_companions(checkpoint, path, out, outcome)
        if {"index", "label", "prediction", "loss"} <= {*dict(checkpoint.tensors())}:
            file = certificate.read(path)
            recompute([file], len(file.predictions))
        try:
            ckpttool.save(checkpoint, out / "out.pt", force=True)
            ckpttool.save(checkpoint, out / "out.safetensors", force=True, full=True)
        except CkptToolError as error:
            if not is_whole or error.kind in ("refused", "unsupported", "damaged"):
                return False
            raise
    for name in ("out.pt", "out.safetensors"):
        if SECRET[:16] in (out / name).read_bytes():
            outcome.fail("reads a file from outside the folder", path)
        with ckpttool.open(out / name) as again:
            if _contents(again)[0] != meant[0]:
                outcome.fail(f"{name} has other tensors", path)
            elif _contents(again)[1] != meant[1]:
                outcome.fail(f"{name} has another tree", f"{meant[1][:1500]}\n{_contents(again)[1][:1500]}")
    return is_whole


def _use_adapter(path: Path, out: Path) -> bool:
    with ckpttool.open(path / "base.safetensors") as base:
        opened = ckpttool.open_adapter(path)
        with opened.checkpoint:
            merged, _ = ckpttool.merge_lora(base, opened)
            ckpttool.save(merged, out / "out.safetensors", force=True)
            ckpttool.save(merged, out / "out.pt", force=True)
    return True


def _use_delta(path: Path, out: Path, outcome: Outcome) -> bool:
    """Read a delta over the base beside it, and apply it: both make the same."""
    with ckpttool.open(path / "delta.safetensors") as read:
        summarize(read)
        ckpttool.save(read, out / "out.pt", force=True)
        with ckpttool.apply(path / "base.safetensors", [path / "delta.safetensors"]) as applied:
            ckpttool.save(applied, out / "out.safetensors", force=True, full=True)
    with ckpttool.open(out / "out.pt") as one, ckpttool.open(out / "out.safetensors") as other:
        if _contents(one) != _contents(other):
            outcome.fail("apply makes another checkpoint than a reader", path)
    return True


def _use_packed(path: Path, out: Path) -> bool:
    with ckpttool.open(path / "packed.safetensors") as checkpoint:
        summarize(checkpoint)
        ckpttool.save(dequantize(checkpoint)[0], out / "out.safetensors", force=True)
        ckpttool.save(dequantize(checkpoint, dtype=DTYPES["float16"])[0], out / "out.pt", force=True)
    return True


def _use_run(path: Path) -> bool:
    """Do with a run's own files what its next start, `prove`, and plot.py do."""

    def start() -> None:
        config = TrainConfig.of(resume="auto", out=str(path))
        with claimed(config.saving, "") as folder, attempts(folder, config, 0) as begin:
            begin(1)

    def draw() -> None:
        plot.picture(run_log.read_runs([str(path)])).draw_without_rendering()

    # All three, whichever of them refuse: an error that is none of ours is never hidden by a refusal.
    refusals = [*filter(None, map(_refusal, (lambda: prove(path), draw, start)))]
    if refusals:
        raise refusals[0]
    return True


def _refusal(do: Callable[[], object]) -> CkptToolError | None:
    try:
        do()
    except CkptToolError as error:
        return error
    return None


def _copy_companions(checkpoint: ckpttool.Checkpoint, path: Path, out: Path, outcome: Outcome) -> None:
    """Copy what lies next to the files of a folder, which must come from the folder itself."""
    if not path.is_dir():
        return
    paths, _ = folders.listed_beside(checkpoint, str(path), str(path))
    (out / "copied").mkdir()
    places = {path: str(out / "copied" / os.path.basename(path)) for path in paths}
    folders.copy_companions(places, force=True)
    for place in places.values():
        if SECRET in Path(place).read_bytes():
            outcome.fail("copies a file from outside the folder", place)


def _contents(checkpoint: ckpttool.Checkpoint) -> tuple[str, str]:
    """Return the digest of the tensors, and the tree as text; empty if it is too deep for one."""
    try:
        text = full.encode(checkpoint.tree).text
    except TooDeep:
        text = ""
    return digest(dict(checkpoint.tensors())), text


def compare(path: Path, out: Path, outcome: Outcome) -> None:
    """Compare what the package read with what other libraries read."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        if (out / "out.pt").exists() and outcome.accepted:
            _require_loadable(out / "out.pt", outcome)
        if path.is_symlink() or not path.is_file():  # a pipe would wait, and a device never end
            return
        head = path.read_bytes()[:512]
        if head[:2] == b"PK":
            _compare_with_zipfile(path, outcome)
        for name, begins, theirs in PEERS:
            if begins(head) and importlib.util.find_spec(name):
                _compare_with_peer(path, name, theirs, outcome)
        if head[8:9] == b"{":
            _compare_with_safetensors(path, outcome)
        else:
            _compare_with_torch(path, out, outcome)


def _require_loadable(path: Path, outcome: Outcome) -> None:
    """Have torch read a written file that names nothing but what `weights_only` takes."""
    import torch

    with ckpttool.open(path) as written:
        if not written.names <= TAKEN or written.protocol > 2:
            return
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except RecursionError:
        pass
    except Exception as error:
        if "Unsupported operand 139" not in str(error):  # an integer of more than 2040 bits
            outcome.fail(f"torch does not read what was written: {str(error)[-60:]}", error)


def _compare_with_zipfile(path: Path, outcome: Outcome) -> None:
    with open(path, "rb") as file:
        source = Source(str(path), os.dup(file.fileno()))
    try:
        mine = read_directory(source, ByteRange(source, 0, source.size))
    except CkptToolError:
        return
    try:
        archive = zipfile.ZipFile(path)
    except Exception:
        return
    with archive:
        for name, record in mine.items():
            try:
                theirs = archive.read(name)
            except Exception:
                continue
            if record.compression == zipfile.ZIP_STORED and record.data.read() != theirs:
                outcome.fail("zipfile reads another record", name)
        outcome.also.append("zipfile")


# Other formats' own libraries: how a file of theirs begins, and what reads its arrays by name.
PEERS: tuple[tuple[str, Callable[[bytes], bool], Callable[[Path], Iterator[tuple[str, Any]]]], ...] = (
    ("numpy", numpy_files.sniff, other_files.read_by_numpy),
    ("onnx", onnx.sniff, other_files.read_by_onnx),
    ("gguf", gguf.sniff, other_files.read_by_gguf),
)


def _compare_with_peer(
    path: Path, name: str, read: Callable[[Path], Iterator[tuple[str, Any]]], outcome: Outcome
) -> None:
    import numpy as np

    if not outcome.accepted:  # the peers take seconds to refuse what lies about its counts
        return
    try:
        with np.errstate(all="ignore"):
            theirs = dict(read(path))
    except Exception:
        return
    outcome.also.append(name)
    with ckpttool.open(path) as checkpoint:
        for key, tensor in checkpoint.state().tensors.items():
            if key not in theirs or tensor.nbytes > COMPARED or tensor.dtype.name == "bfloat16":
                continue
            mine, array = tensor.numpy(), theirs[key]
            if mine.size and mine.tobytes() != np.ascontiguousarray(array.astype(mine.dtype)).tobytes():
                outcome.fail(f"{name} reads another tensor", key)


def _compare_with_safetensors(path: Path, outcome: Outcome) -> None:
    from safetensors.torch import load

    try:
        theirs = load(path.read_bytes())
    except Exception as error:
        if outcome.accepted:
            outcome.fail(f"accepted alone: {str(error)[:60]}", error)
        return
    outcome.also.append("safetensors")
    if not outcome.accepted:
        return
    with ckpttool.open(path) as checkpoint:
        state = checkpoint.state("") if not checkpoint.full else None
        mine = dict(checkpoint.tensors()) if state is None else state.tensors
        for name, tensor in mine.items():
            if name in theirs and _differ(tensor, theirs[name]):
                outcome.fail("safetensors reads another tensor", name)
        if state is not None and not mine.keys() >= theirs.keys():
            outcome.fail("safetensors reads other names", theirs.keys() - mine.keys())


def _compare_with_torch(path: Path, out: Path, outcome: Outcome) -> None:
    import torch

    try:
        theirs = torch.load(path, weights_only=True)
    except BaseException:
        return
    outcome.also.append("torch")
    if not outcome.accepted:
        return
    with ckpttool.open(path) as checkpoint:
        for wrong in _differences(checkpoint.tree, theirs, set()):
            outcome.fail(f"torch reads {wrong}")
    try:
        converted = torch.load(out / "out.pt", weights_only=True)
    except Exception as error:
        outcome.fail(f"torch does not read what was written: {str(error)[:60]}", error)
        return
    try:
        assert_same(theirs, converted)
    except AssertionError as error:
        outcome.fail("torch reads something else from what was written", error)
    except RecursionError:
        pass


def _differences(mine: Any, theirs: Any, met: set[tuple[int, int]]) -> Iterator[str]:
    """Yield how a tree differs from the one that torch reads, where it holds plain values and tensors."""
    import torch

    if (id(mine), id(theirs)) in met or len(met) > 100_000:
        return
    met.add((id(mine), id(theirs)))
    if isinstance(mine, TensorRef):
        if isinstance(theirs, torch.Tensor) and _differ(mine, theirs):
            yield "another tensor"
    elif isinstance(mine, dict) and isinstance(theirs, dict):
        if len(mine) != len(theirs):
            yield "another number of keys"
        for key, value in mine.items():
            if isinstance(key, str | int) and not isinstance(value, bool):
                if key not in theirs:
                    yield "other keys"
                else:
                    yield from _differences(value, theirs[key], met)
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            yield "a list of another length"
        for one, other in zip(mine, theirs, strict=False):
            yield from _differences(one, other, met)
    elif isinstance(mine, int | str | bytes | float) and repr(mine) != repr(theirs):
        yield f"another {type(mine).__name__}"


def _differ(mine: TensorRef, theirs: Any) -> bool:
    import torch

    if theirs.layout is not torch.strided or theirs.is_quantized or theirs.is_meta:
        return False
    if tuple(theirs.shape) != mine.shape or str(theirs.dtype) != f"torch.{mine.dtype.name}":
        return True
    if mine.nbytes > COMPARED:
        return False
    return b"".join(bytes(piece) for piece in stream(mine)) != values(theirs)
