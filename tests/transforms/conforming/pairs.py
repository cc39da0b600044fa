"""Bring each pair of `architectures` over, both ways, and say what came of it: right, refused or wrong.

    python -m tests.transforms.conforming.pairs [WORD…] [--write]

`--write` puts the table into docs/dialects.md; words choose the pairs whose names have one of them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import CkptToolError
from ckpttool.transforms.conforming.conform import conform
from tests.transforms.conforming.architectures import Made, Pair, State, pairs


def brought(state: State, like: State, folder: Path, *, values: bool) -> tuple[str, State]:
    """Return why a state can't be brought under the names of another, or what it is there."""
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "in.safetensors")
    save_file({k: v.contiguous() for k, v in like.items()}, folder / "like.safetensors")
    with ckpttool.open(folder / "in.safetensors") as checkpoint:
        try:
            new, _ = conform(checkpoint, folder / "like.safetensors", check_values=values)
        except CkptToolError as error:
            return f"refused ({error.kind}): {error.message.partition(': ')[2]}", {}
        ckpttool.save(new, folder / "out.safetensors", force=True)
    return "", load_file(folder / "out.safetensors")


def result(state: State, like: State, holds: Callable[[State], bool], *, values: bool = False) -> str:
    """Return `right`, `wrong`, or why it was refused."""
    with tempfile.TemporaryDirectory() as folder:
        refused, made = brought(state, like, Path(folder), values=values)
    if refused:
        return refused
    try:
        return "right" if holds(made) else "WRONG"
    except RuntimeError as error:
        return f"WRONG: {str(error)[:200]}"


def results(made: Made) -> list[str]:
    """Return what comes of a pair there and back, by header alone and by values."""
    found = [result(made.left, made.right, made.is_right), result(made.right, made.left, made.is_left)]
    if made.same:
        found += [
            result(made.left, made.right, made.is_right, values=True),
            result(made.right, made.left, made.is_left, values=True),
        ]
    return found


def row(pair: Pair) -> tuple[list[str], float]:
    """Return the results of a pair, and the seconds that they took."""
    started = time.perf_counter()
    return results(pair.make()), time.perf_counter() - started


def main(words: list[str]) -> None:
    """Print the table, or write it."""
    chosen = [word for word in words if not word.startswith("--")]
    counts: Counter[str] = Counter()
    for pair in pairs():
        title = f"{pair.left} <-> {pair.right}"
        if chosen and not any(word in title for word in chosen):
            continue
        try:
            found, seconds = row(pair)
        except Exception as error:
            print(f"{title}: cannot be made: {error!r:.300}", flush=True)
            continue
        counts.update(each.partition(" ")[0] for each in found)
        print(f"{title}: {seconds:.1f} s", *(f"    {each[:400]}" for each in found), sep="\n", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
