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

from ckpttool.checkpoint import checksums
from ckpttool.formats import folders
from ckpttool.formats import safetensors as safetensors_format
from ckpttool.formats.ranks import device_meshes, sharded_values
from ckpttool.metrics import certificate
from ckpttool.tensors import ref
from ckpttool.transforms import renaming
from ckpttool.transforms.lora import adapter
from tests.fuzz.campaign import files_of, judged, kept, minimised
from tests.fuzz.seeds import SEEDS, Files, Odd, seeds, strided, written_by
from tests.fuzz.worker import Worker
from train.log import log_file
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


@pytest.mark.parametrize("kind", SEEDS)
def test_an_honest_file_is_read_and_equal_in_other_libraries(kind: str, worker: Worker) -> None:
    for files in seeds(kind):
        outcome = judged(worker, files)
        assert (outcome.accepted, outcome.wrong, outcome.details) == (True, "", "")


@pytest.mark.parametrize("kind", SEEDS)
def test_a_changed_file_is_refused_or_read_as_others_read_it(kind: str, worker: Worker) -> None:
    for number in range(12 if kind == "folder of a run" else 40):  # a picture takes a third of a second
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


def crash() -> None:
    """Raise something that is no error of the package's."""

    def fail(*_: object, **__: object) -> None:
        raise KeyError("x")

    checksums.Checksums.finish = fail  # type: ignore[method-assign]


def hang() -> None:
    """Never end."""

    def loop(*_: object, **__: object) -> None:
        while True:
            pass

    checksums.Checksums.finish = loop  # type: ignore[method-assign]


def waste() -> None:
    """Take memory without need."""
    kept: list[bytes] = []
    finish = checksums.Checksums.finish

    def take(self: Any) -> None:
        kept.append(b"x" * (200 << 20))
        finish(self)

    checksums.Checksums.finish = take  # type: ignore[method-assign]


def follow_links() -> None:
    """Copy along what links lead to, wherever it lies."""
    folders._is_inside = lambda *_: True


def open_anything() -> None:
    """Open pipes and devices too, and read whatever they have."""
    adapter.json_object = lambda path: json.loads(Path(path).read_text())


def match_without_end() -> None:
    """Give an expression all the time it takes."""
    renaming.KEY_SECONDS = 1 << 30


def read_pipes() -> None:
    """Read a log from whatever is in its place."""
    log_file._without_waiting = os.open


def count_failures_in_anything() -> None:
    """Read the count of failures as if it were always well formed."""
    folder._failed = lambda path, _: json.loads(Path(path).read_text())["failed"]


def count_all_classes() -> None:
    """Take every number up to the largest label for a class."""
    certificate._numbered = lambda labels, predictions: (
        tuple(map(str, range(int(labels.max()) + 1))),
        labels,
        predictions,
    )


def place_without_bounds() -> None:
    """Follow placements for as many pieces as they say."""
    sharded_values.MAX_CHUNKS = 1 << 60
    device_meshes.Work.spend = lambda *_: None  # type: ignore[method-assign]


def wrong_of(kind: str, hole: Callable[[], None], files: Files | None = None) -> str:
    """Return what the fuzzer says of an honest file, or another, with something broken."""
    with Worker(hole) as worker:
        return judged(worker, files or seeds(kind)[0]).wrong


def test_a_skipped_check_of_the_length_is_found() -> None:
    longer = {"": seeds("safetensors")[0][""] + b"more"}
    assert wrong_of("safetensors", lambda: None, longer) == ""
    assert wrong_of("safetensors", ignore_the_end, longer).startswith("accepted alone")


def test_a_skipped_check_of_the_length_is_found_by_chance_too() -> None:
    with Worker(ignore_the_end) as worker:
        wrong = {judged(worker, files_of("safetensors", 0, number)).wrong for number in range(40)}
    assert any(each.startswith("accepted alone") for each in wrong)


def test_wrong_values_are_found() -> None:
    assert "safetensors reads another tensor" in wrong_of("safetensors", reverse)
    assert "torch reads another tensor" in wrong_of("legacy .pt", reverse)


def test_an_error_that_is_none_of_the_packages_is_found() -> None:
    assert wrong_of("zip .pt", crash).startswith("KeyError in ")


def test_memory_beyond_the_bound_is_found() -> None:
    assert wrong_of("zip .pt", waste) == "takes too much memory"


def with_odd(kind: str, name: str, odd: bytes) -> Files:
    return {**seeds(kind)[0], name: Odd(odd)}


# Files that are no regular files, and fields that multiply: without the hole each is refused or costs little.
SHAPES: dict[str, tuple[str, Callable[[], None], Callable[[], Files], str]] = {
    "a link out of the folder": (
        "folder of the hub",
        follow_links,
        lambda: with_odd("folder of the hub", "config.json", b"../secret"),
        "copies a file from outside the folder",
    ),
    "a pipe": (
        "LoRA",
        open_anything,
        lambda: with_odd("LoRA", "adapter_config.json", b"fifo"),
        "the package hangs",
    ),
    "a device without an end": (
        "LoRA",
        open_anything,
        lambda: with_odd("LoRA", "adapter_config.json", b"/dev/zero"),
        "",
    ),
    "an expression that backtracks": (
        "safetensors",
        match_without_end,
        lambda: {"": saved({"a" * 40 + "!": torch.ones(1)})},
        "the package hangs",
    ),
    "a log that is a pipe": (
        "folder of a run",
        read_pipes,
        lambda: with_odd("folder of a run", "log.jsonl", b"fifo"),
        "the package hangs",
    ),
    "failures nested deeply": (
        "folder of a run",
        count_failures_in_anything,
        lambda: {**seeds("folder of a run")[0], "attempts.json": b"[" * 100_000},
        "RecursionError in ",
    ),
    "a label of 2^26": (
        "predictions",
        count_all_classes,
        lambda: {"": with_large_label(seeds("predictions")[1][""])},
        "",
    ),
    "a placement of 2^18 pieces": (
        "files of ranks",
        place_without_bounds,
        lambda: written_by(functools.partial(strided, rows=1 << 18)),
        "",
    ),
}


def with_large_label(raw: bytes) -> bytes:
    """Return columns in which the last 3, a label, is 2^26."""
    before, _, after = raw.rpartition(b"\x03" + bytes(7))
    return before + (1 << 26).to_bytes(8, "little") + after


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_costs_without_end_is_found(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.worker.HANGS", 3.0)
    monkeypatch.setattr("tests.fuzz.worker.WAITS", 2)
    kind, hole, make, wrong = SHAPES[shape]
    files = make()
    assert wrong_of(kind, lambda: None, files) == ""
    found = wrong_of(kind, hole, files)
    assert found and found.startswith(wrong)


def test_a_link_out_of_the_folder_is_found_by_chance_too() -> None:
    drawn = (files_of("folder of the hub", 0, number) for number in range(100))
    with Worker(follow_links) as worker:
        links = (files for files in drawn if any(isinstance(raw, Odd) for raw in files.values()))
        assert any(judged(worker, files).wrong for files in links)


def test_a_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.worker.HANGS", 1.0)
    assert wrong_of("zip .pt", hang) == "the package hangs"


def test_what_is_found_is_made_smaller() -> None:
    files = {"a": bytes(range(256)), "b": b"needed"}

    def is_same(tried: Files) -> bool:
        return b"\x07" in tried.get("a", b"") and "b" in tried

    small = minimised(files, is_same, time.monotonic() + 10)
    assert small["a"].strip(b"\0") == b"\x07" and len(small["a"]) < 4
    assert small["b"] == b""
