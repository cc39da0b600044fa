"""A short form of `python -m tests.fuzz`, the corpus, and proof that the fuzzer finds holes."""

from __future__ import annotations

import functools
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as saved

from ckpttool.core.checkpoint import checksums, prefixes
from ckpttool.core.formats import folders
from ckpttool.core.formats import safetensors as safetensors_format
from ckpttool.core.tensors import ref
from ckpttool.inspecting import run_log
from ckpttool.lora import adapter
from ckpttool.metrics import certificate
from ckpttool.onnx import reading
from ckpttool.ranks import sharded_values
from tests.fuzz.campaign import files_of, judged, kept, minimised
from tests.fuzz.seeds import SEEDS, Files, Odd, seeds, strided, written_by
from tests.fuzz.worker import Worker
from train.run import folder


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A fork has no threads but its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("kind", SEEDS)
def test_an_honest_file_is_read_and_equal_in_other_libraries(kind: str, worker: Worker) -> None:
    for files in seeds(kind):
        outcome = judged(worker, files)
        assert (outcome.accepted, outcome.wrong, outcome.details) == (True, "", "")


@pytest.mark.long
@pytest.mark.parametrize("kind", SEEDS)
def test_a_changed_file_is_refused_or_read_as_others_read_it(kind: str, worker: Worker) -> None:
    for number in range(5 if kind == "folder of a run" else 15):  # a picture takes a third of a second
        outcome = judged(worker, files_of(kind, 0, number))
        assert not outcome.wrong, f"number {number}: {outcome.wrong}: {outcome.details}"


@pytest.mark.parametrize("name", kept())
def test_a_file_that_was_wrong_once_is_not_again(name: str, worker: Worker) -> None:
    outcome = judged(worker, kept()[name])
    assert not outcome.wrong, f"{outcome.wrong}: {outcome.details}"


def test_the_same_number_gives_the_same_file() -> None:
    assert files_of("zip .pt", 3, 5) == files_of("zip .pt", 3, 5)
    assert files_of("zip .pt", 3, 5) != files_of("zip .pt", 4, 5)


# Holes. Each is made in the process that examines.


def ignore_the_end() -> None:
    """Take a safetensors file to end where its header says."""
    read = safetensors_format.read

    def without_check(source: Any) -> Any:
        size = struct.unpack("<Q", source.read(0, 8))[0]
        header = json.loads(source.read(8, size))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        source.size = min(source.size, 8 + size + max(ends, default=0))
        return read(source)

    safetensors_format.read = without_check


def reverse() -> None:
    """Read the bytes of each stretch from back to front."""
    chunks = ref.ByteRange.chunks

    def reversed_chunks(self: Any, buffer: memoryview) -> Iterator[memoryview]:
        for chunk in chunks(self, buffer):
            yield memoryview(bytes(chunk)[::-1])

    ref.ByteRange.chunks = reversed_chunks  # type: ignore[method-assign]


def finishing_with(do: Callable[[], object]) -> Callable[[], None]:
    """Return a hole: something else is done in the place where checksums are compared."""

    def break_it() -> None:
        checksums.Checksums.finish = lambda *_, **__: do()  # type: ignore[method-assign]

    return break_it


def loop() -> None:
    while True:
        pass


KEPT: list[bytes] = []


def waste() -> None:
    KEPT.append(b"x" * (200 << 20))


def follow_links() -> None:
    """Copy along what links lead to, wherever it lies."""
    folders.is_inside = lambda *_: True


def read_beside_anywhere() -> None:
    """Read an ONNX model's values wherever links lead to."""
    reading.is_inside = lambda *_: True  # type: ignore[attr-defined]


def open_anything() -> None:
    """Open pipes and devices too, and read whatever they have."""
    adapter.json_object = lambda path: json.loads(Path(path).read_text())


def match_without_end() -> None:
    """Give an expression all the time it takes."""
    prefixes.KEY_SECONDS = 1 << 30


def read_pipes() -> None:
    """Read a log from whatever is in its place."""
    run_log._without_waiting = os.open


def count_failures_in_anything() -> None:
    """Read the count of failures as if it were always well formed."""
    folder._failed = lambda path, _: json.loads(Path(path).read_text())["failed"]


def count_all_classes() -> None:
    """Take every number up to the largest label for a class."""

    def every_number(labels: Any, predictions: Any) -> Any:
        return tuple(map(str, range(int(labels.max()) + 1))), labels, predictions

    certificate._numbered = every_number


def place_without_bounds() -> None:
    """Follow placements for as many pieces as they say."""
    sharded_values.MAX_CHUNKS = 1 << 60
    sharded_values.WorkBound.spend = lambda *_: None  # type: ignore[method-assign]


def odd(name: str, raw: bytes) -> Callable[[str], Files]:
    """Return a function that puts something else in the place of a file of a format."""
    return lambda kind: {**seeds(kind)[0], name: Odd(raw)}


def honest(kind: str) -> Files:
    return seeds(kind)[0]


def with_large_label(kind: str) -> Files:
    """Return columns in which the last 3, a label, is 2^26."""
    before, _, after = seeds(kind)[1][""].rpartition(b"\x03" + bytes(7))
    return {"": before + (1 << 26).to_bytes(8, "little") + after}


def longer(kind: str) -> Files:
    return {"": honest(kind)[""] + b"more"}


def deep(kind: str) -> Files:
    return {**honest(kind), "attempts.json": b"[" * 100_000}


def backtracks(kind: str) -> Files:
    return {"": saved({"a" * 40 + "!": torch.ones(1)})}


def pieces(kind: str) -> Files:
    return written_by(functools.partial(strided, rows=1 << 18))


HANGS = "the package hangs"

# Each is refused or costs little without the hole: some are no regular files, or have fields that multiply.
FOUND: dict[str, tuple[str, Callable[[], object], Callable[[str], Files], str]] = {
    "a skipped check of the length": ("safetensors", ignore_the_end, longer, "accepted alone"),
    "wrong values": ("safetensors", reverse, honest, "safetensors reads another tensor"),
    "wrong values of torch's": ("legacy .pt", reverse, honest, "torch reads another tensor"),
    "an error of another kind": ("zip .pt", finishing_with(lambda: {}["x"]), honest, "KeyError in "),
    "a hang": ("zip .pt", finishing_with(loop), honest, HANGS),
    "memory beyond the bound": ("zip .pt", finishing_with(waste), honest, "takes too much memory"),
    "a link out of the folder": (
        "folder of the hub",
        follow_links,
        odd("config.json", b"../secret"),
        "copies a file from outside the folder",
    ),
    "a link out of an ONNX model's folder": (
        "ONNX folder",
        read_beside_anywhere,
        lambda kind: {**seeds(kind)[1], "model.data": Odd(b"../secret")},
        "reads a file from outside the folder",
    ),
    "a pipe": ("LoRA", open_anything, odd("adapter_config.json", b"fifo"), HANGS),
    "a device without an end": ("LoRA", open_anything, odd("adapter_config.json", b"/dev/zero"), ""),
    "an expression that backtracks": ("safetensors", match_without_end, backtracks, HANGS),
    "a log that is a pipe": ("folder of a run", read_pipes, odd("log.jsonl", b"fifo"), HANGS),
    "failures nested deeply": ("folder of a run", count_failures_in_anything, deep, "RecursionError in "),
    "a label of 2^26": ("predictions", count_all_classes, with_large_label, ""),
    "a placement of 2^18 pieces": ("files of ranks", place_without_bounds, pieces, ""),
}


@pytest.mark.long
@pytest.mark.parametrize("hole", FOUND)
def test_a_hole_is_found(hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, break_it, make, wrong = FOUND[hole]
    files = make(kind)
    with Worker() as worker:
        assert judged(worker, files).wrong == ""
    if wrong in ("", HANGS):  # any other would seem to hang where the machine is busy
        for name, value in (("HANGS", 0.7), ("WAITS", 1.0), ("LOOKS", 0.2)):
            monkeypatch.setattr(f"tests.fuzz.worker.{name}", value)
    monkeypatch.setattr("tests.fuzz.worker.ROOM", 1 << 30)
    with Worker(break_it) as worker:
        found = judged(worker, files).wrong
    assert found and wrong in found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "hole", "wrong"),
    [("safetensors", ignore_the_end, "accepted alone"), ("folder of the hub", follow_links, "copies a file")],
)
def test_a_hole_is_found_by_chance_too(kind: str, hole: Callable[[], None], wrong: str) -> None:
    drawn = (files_of(kind, 0, number) for number in range(100))
    if hole is follow_links:  # which is quicker, and the others show nothing
        drawn = (files for files in drawn if any(isinstance(raw, Odd) for raw in files.values()))
    with Worker(hole) as worker:
        assert any(wrong in judged(worker, files).wrong for files in drawn)


@pytest.mark.long
def test_what_is_found_is_made_smaller() -> None:
    files = {"a": bytes(range(256)), "b": b"needed"}

    def is_same(tried: Files) -> bool:
        return b"\x07" in tried.get("a", b"") and "b" in tried

    small = minimised(files, is_same, time.monotonic() + 10)
    assert small["a"].strip(b"\0") == b"\x07" and len(small["a"]) < 4
    assert small["b"] == b""
