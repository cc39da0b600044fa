"""Copies on a disk, beside `cp` and `sync`: what a tmpfs does not show.

    python -m benchmarks.disk --size 1GB --folder DIR

Each way ends when its output is on the disk. *cold*: the pages of the inputs are dropped before each run;
*warm*: they are in memory. Verifying is beside reading with `dd`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from . import machine
from .case import Case, Way
from .commands import bare_copy, make_checkpoint, tool
from .own_program import parsed, parser_of, run, show
from .parts import as_markdown
from .sizes import parse_size, show_size
from .targets import at_most_times
from .turns import in_turns

COPY, READ = "cp and sync", "dd"
MOST, READS = 0.75, 1 / 0.9  # of cp and sync; of reading, when cold


def dropped(path: Path) -> Callable[[], None]:
    """Return what drops the pages of a file or folder, so that the next run reads it from the disk."""

    def drop() -> None:
        for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    return drop


def warmed(path: Path) -> Callable[[], None]:
    """Return what reads a file or folder, so that the next run finds it in memory."""
    return lambda: run("sh", "-c", f'cat "{path}"/* 2>/dev/null || cat "{path}"')


def synced(*words: str | Path, out: Path) -> list[str | Path]:
    """Return a command that ends once what it writes is on the disk."""
    return ["sh", "-c", '"$@" && sync "$0"', out, *words]


def cases(folder: Path, size: int) -> Iterator[Case]:
    """Yield the comparisons: cold and warm, copies and reading."""
    source, shards, out = folder / "in.pt", folder / "shards", folder / "out.safetensors"
    strip = tool("strip-prefix", source, out, "-q")
    make_checkpoint(source, size)
    run(*tool("convert", source, f"{shards}/", "--shard-size", str(size // 8), "--quiet"))
    for state, prepare in (("cold", dropped), ("warm", warmed)):
        copies = [
            Way(COPY, synced("cp", "--reflink=never", source, out, out=out), out, prepare(source)),
            Way("bare threads and sync", synced(*bare_copy(source, out), out=out), out, prepare(source)),
            Way("strip-prefix", strip, out, prepare(source)),
            Way("without checksums", [*strip, "--no-verify"], out, prepare(source)),
            Way("convert", tool("convert", source, out, "-q"), out, prepare(source)),
            Way("merge of 8 shards", tool("merge", shards, out, "-q"), out, prepare(shards)),
        ]
        asked = [at_most_times(way.name, COPY, MOST) for way in copies[2:] if state == "cold"]
        yield Case(f"{state}, written: {show_size(size)}", copies, asked)
        reads = [
            Way(READ, ["dd", f"if={source}", "of=/dev/null", "bs=4M"], before=prepare(source)),
            Way("verify", tool("verify", source, "-q"), before=prepare(source)),
        ]
        asked = [at_most_times("verify", READ, READS)] if state == "cold" else []
        yield Case(f"{state}, read: {show_size(size)}", reads, asked)


def main() -> int:
    parser = parser_of("disk", __doc__, rounds=3)
    parser.add_argument("--size", type=parse_size, default=parse_size("1GB"), help="of the checkpoint (1GB)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", default=Path(), help="on the disk (the current)"
    )
    options = parsed(parser)
    folder = Path(tempfile.mkdtemp(prefix="ckpttool-disk-", dir=options.folder))
    try:
        about = f"{machine.about(folder)}; {machine.load()} at the start"
        tables = [as_markdown(case, in_turns(case, options.rounds)) for case in cases(folder, options.size)]
        show("\n\n".join([*tables, f"{options.rounds} rounds, in turns. Measured {about}."]), options)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
