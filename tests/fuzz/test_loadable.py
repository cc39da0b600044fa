"""The fuzzer of loaders finds what scan was blind to once, put in again one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.formats.pytorch import tar
from ckpttool.scanning import contents, pickles, unpacking
from ckpttool.scanning.scan import scan
from ckpttool.scanning.verdicts import SAFE
from tests.fuzz.campaign import CORPUS
from tests.fuzz.loadable import LoadableTally, examine, file_of
from tests.fuzz.loaders import Loaders

for library in ("torch", "numpy", "joblib"):
    pytest.importorskip(library, reason="opens what is scanned")


@pytest.fixture(scope="module")
def loaders() -> Iterator[Loaders]:
    with Loaders() as process:
        yield process


def usual_windows(patch: pytest.MonkeyPatch) -> None:
    """zlib by four of its beginnings alone."""
    patch.setattr(unpacking, "_begins_zlib", lambda head: head.startswith(unpacking.USUAL[1:]))


def usual_lzma(patch: pytest.MonkeyPatch) -> None:
    """lzma-alone by one of its beginnings alone."""
    patch.setattr(unpacking, "_begins_lzma_alone", lambda head: head.startswith(b"\x5d\0\0"))


def no_second_array(patch: pytest.MonkeyPatch) -> None:
    """An array's file has nothing behind the array."""

    def to_the_end(rest: Any, found: pickles.PickleFindings) -> bool | None:
        end = found.end + rest.nbytes
        if not (holds_objects := pass_array(rest, found)):
            found.end = end
        return holds_objects

    pass_array = pickles._pass_array
    patch.setattr(pickles, "_pass_array", to_the_end)


def no_zip_behind(patch: pytest.MonkeyPatch) -> None:
    """A zip is one by how it begins."""
    patch.setattr(unpacking, "ends_as_zip", lambda place: False)


def all_numbers(patch: pytest.MonkeyPatch) -> None:
    """What a pickle calls a storage of numbers is one."""
    patch.setattr(contents.Contents, "_begins_as_array", lambda *_: False)


def tars_by_magic(patch: pytest.MonkeyPatch) -> None:
    """A tar is one by its magic number, not by a checksum."""
    patch.setattr(tar, "is_header", tar.sniff)


def whole_steps(patch: pytest.MonkeyPatch) -> None:
    """What an engine had made of a damaged stream is lost."""
    pieces = unpacking._pieces

    def none_again(place: Any, stream: Any, spend: Any, exact_from: int | None) -> Iterator[bytes]:
        if exact_from is not None:
            raise unpacking._Broken(False)
        yield from pieces(place, stream, spend, None)

    patch.setattr(unpacking, "_pieces", none_again)


def silent(patch: pytest.MonkeyPatch) -> None:
    """What is not sure to be there is no fault, whatever a loader does."""
    fault = contents.Contents._fault

    def only_sure(self: Any, part: Any, wrong: Any, *, goes_on: bool | None = None) -> None:
        if part.is_sure:
            fault(self, part, wrong, goes_on=False)

    patch.setattr(contents.Contents, "_fault", only_sure)


RARE = (no_second_array, all_numbers, tars_by_magic, whole_steps)  # found after hundreds of files
HOLES = [
    usual_windows,
    usual_lzma,
    no_zip_behind,
    silent,
    *(pytest.param(h, marks=pytest.mark.long) for h in RARE),
]


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.__name__)
def test_a_hole_is_found(
    hole: Callable[[pytest.MonkeyPatch], None],
    loaders: Loaders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hole(monkeypatch)
    tally = LoadableTally()
    for number in count():
        examine(number, file_of(3, number), tmp_path, loaders, tally)
        if any(wrong.startswith("called safe") for wrong in tally.found):
            return
        assert number < 1500, "the hole is not found"


@pytest.mark.parametrize("path", sorted(CORPUS.glob("loaders-*")), ids=lambda path: path.name)
def test_what_ran_once_is_not_safe(path: Path, loaders: Loaders) -> None:
    assert loaders.run(path.read_bytes())
    assert scan(path)[0].verdict != SAFE


def test_the_same_number_gives_the_same_file() -> None:
    assert file_of(3, 5) == file_of(3, 5) != file_of(4, 5)
