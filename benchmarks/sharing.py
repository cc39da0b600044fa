"""`--reflink always`: files that share their blocks, on an XFS and a btrfs of their own, beside `cp`."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

from .case import Benchmark, Case, Need, NotHere, Way
from .commands import CHILDREN, PYTHON, cp, tool
from .process import timed
from .sizes import show_size
from .targets import at_most_times, floor

KINDS = {"XFS": ("mkfs.xfs", "-q", "-m", "reflink=1"), "btrfs": ("mkfs.btrfs", "-q")}
STRIP, UNCHECKED = "strip-prefix --reflink always", "strip-prefix --reflink always --no-verify"
SLIM, SLIM_UNCHECKED = "slim --in-place --reflink always", "slim --in-place --reflink always --no-verify"
SYNCED, CLONED = "cp and sync", "cp --reflink=always"
LIMIT = 0.1
IMAGE = 5  # times the input: it, a run, a copy of each, and room
LEAST = 1 << 30  # bytes of an image


def set_up(kind: str, folder: Path, size: int) -> Case:
    disk = _mounted(folder, kind, size)
    source, run, kept = disk / "ddp.pt", disk / "run", disk / "kept"
    copied, written = disk / "copy.pt", disk / "plain.safetensors"
    try:
        kept.mkdir()
        timed([PYTHON, CHILDREN / "make_aligned.py", source, kept, str(size)])
    except BaseException:
        _unmount(disk)
        raise
    strip = partial(tool, "strip-prefix", "--reflink", "always", source, written)
    slim = partial(tool, "slim", "--in-place", run, "--keep-newest", "1")

    def restore() -> None:
        shutil.rmtree(run, ignore_errors=True)
        subprocess.run(["cp", "-a", "--reflink=always", kept, run], check=True)

    return Case(
        f"--reflink always on {kind}, {show_size(size)} .pt to .safetensors, and a run of as much",
        [
            Way("cp", cp(source, copied), copied),
            Way(SYNCED, ["sh", "-c", 'cp --reflink=never "$0" "$1" && sync "$1"', source, copied], copied),
            Way(CLONED, ["cp", "--reflink=always", source, copied], copied),
            Way(STRIP, strip(), written, compared=True),
            Way(UNCHECKED, strip("--no-verify"), written, compared=True),
            Way("slim --in-place --reflink never", slim("--reflink", "never"), run, restore),
            Way(SLIM, slim("--reflink", "always"), run, restore),
            Way(SLIM_UNCHECKED, slim("--reflink", "always", "--no-verify"), run, restore),
        ],
        [
            floor(CLONED, "cp"),
            *(at_most_times(way, "cp", LIMIT) for way in (STRIP, UNCHECKED, SLIM, SLIM_UNCHECKED)),
            *(at_most_times(way, SYNCED, LIMIT) for way in (STRIP, SLIM)),
        ],
        end=partial(_unmount, disk),
    )


def _mounted(folder: Path, kind: str, size: int) -> Path:
    image, disk = folder / "image", folder / "mounted"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(max(IMAGE * size, LEAST))
    try:
        for command in ([*KINDS[kind], image], ["mount", "-o", "loop", image, disk]):
            subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        raise NotHere(f"no {kind} can be mounted here: {why}".strip()) from None
    return disk


def _unmount(disk: Path) -> None:
    subprocess.run(["umount", "--lazy", disk], check=True)


def _need(size: int) -> Need:
    return Need(max(IMAGE * size, LEAST), 2 * size)


BENCHMARKS = [
    Benchmark(f"reflink-{kind.lower()}", sized=True, need=_need, set_up=partial(set_up, kind))
    for kind in KINDS
]
