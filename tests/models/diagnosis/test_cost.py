"""What doctor and conform cost grows as the names do, whatever they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import process_time

import pytest

import ckpttool
from ckpttool.errors import CkptToolError
from tests.support.crafting import safetensors_file

Shapes = dict[str, tuple[int, ...]]
Sides = tuple[Shapes, Shapes]


def layers(count: int, name: str = "layers.{}.weight", *sizes: int, first: int = 0) -> Shapes:
    return {name.format(number): sizes or (4, 4) for number in range(first, first + count)}


def nested(count: int, word: str = "a") -> Shapes:
    return {f"{word}." * depth + "weight": (4, 4) for depth in range(1, count + 1)}


def prefixed(count: int, word: str) -> Sides:
    plain = layers(50, "l{}.weight")
    return {word * count + name: shape for name, shape in plain.items()}, plain


# The state and the reference, by the number of names; and how many a hostile or odd file may have
SIDES: dict[str, tuple[Callable[[int], Sides], int]] = {
    "names in each other": (lambda n: (nested(n), nested(n, "b")), 3000),
    "one level more": (lambda n: (nested(n), nested(n + 1)), 3000),
    "prefixes in a row": (lambda n: prefixed(n, "module."), 1500),
    "parts in a row": (lambda n: prefixed(n, "p."), 1500),
    "numbers in a row": (lambda n: prefixed(n, "0."), 1500),
    "another stem": (lambda n: (layers(n), layers(n, "h.{}.weight")), 30_000),
    "counted from 1": (lambda n: (layers(n), layers(n, first=1)), 30_000),
    "fewer": (lambda n: (layers(n), layers(n // 2)), 30_000),
    "more of another name": (lambda n: (layers(n) | layers(n, "more.{}.weight"), layers(n)), 30_000),
    "more of many names": (lambda n: (layers(n) | layers(n, "x{}"), layers(n)), 30_000),
    "transposed": (lambda n: (layers(n, "{}.w", 4, 8), layers(n, "{}.w", 8, 4)), 30_000),
    "each of another size": (
        lambda n: ({f"{i}.w": (4, i + 2) for i in range(n)}, {f"{i}.w": (i + 2, 4) for i in range(n)}),
        30_000,
    ),
    "flat": (lambda n: (layers(n, "l{}"), layers(n, "m{}")), 30_000),
}


def written(sides: Sides, folder: Path) -> tuple[Path, Path]:
    """Write both sides as headers over a hole."""
    paths = folder / "in.safetensors", folder / "like.safetensors"
    for path, shapes in zip(paths, sides, strict=True):
        header, at = {}, 0
        for name, shape in shapes.items():
            end = at + 4 * shape[0] * shape[1]
            header[name] = {"dtype": "F32", "shape": [*shape], "data_offsets": [at, end]}
            at = end
        safetensors_file(path, header)
        os.truncate(path, path.stat().st_size + at)
    return paths


def diagnosed(path: Path, like: Path) -> None:
    ckpttool.doctor(path, like=like)


def conformed(path: Path, like: Path) -> None:
    with suppress(CkptToolError), ckpttool.open(path) as checkpoint:
        ckpttool.conform(checkpoint, like)


def calls(use: Callable[[Path, Path], None], paths: tuple[Path, Path]) -> int:
    """Return how many functions are called, of Python and of C."""
    count = 0

    def see(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        use(*paths)
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture(autouse=True)
def no_profile_left() -> Iterator[None]:
    yield
    sys.setprofile(None)


@pytest.mark.parametrize("case", SIDES)
@pytest.mark.parametrize("use", [diagnosed, conformed], ids=lambda use: use.__name__)
def test_twice_the_names_are_twice_the_work(
    use: Callable[[Path, Path], None], case: str, tmp_path: Path
) -> None:
    make, _ = SIDES[case]
    use(*written(make(40), tmp_path))  # compiles the maps, and fills caches
    least = 1500 if case == "counted from 1" else 250  # fewer are renumbered, by a rule for each
    few, many = (calls(use, written(make(n), tmp_path)) for n in (least, 2 * least))
    assert many < 2.6 * few


@pytest.mark.long
@pytest.mark.parametrize("case", SIDES)
@pytest.mark.parametrize("use", [diagnosed, conformed], ids=lambda use: use.__name__)
def test_the_worst_lists_of_names_end_in_seconds(
    use: Callable[[Path, Path], None], case: str, tmp_path: Path
) -> None:
    make, most = SIDES[case]
    paths = written(make(most), tmp_path)
    began = process_time()
    use(*paths)
    assert process_time() - began < 40  # on a machine that does as much else
