"""Conversions in parts, each process behind a link of its own, beside one process.

    pip install -e '.[remote]'
    python -m benchmarks.parts

A server of the project's own stands for the hub. Each process has a link of 1 Gbit/s, which answers after
20 ms, so parts are as fast as on several machines while the cores of this one suffice. All write into one
folder, or, with --into, to a URL that takes parts (its settings are those of the environment). The files of
64 ranks are of float32; fp8 has blocks of 128 × 128, and the result is twice as large.

Planning is what a part takes whose bytes are written already. --jobs is measured without a link.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from . import machine
from .case import Case, Results, Way
from .commands import CHILDREN, PYTHON, make_checkpoint, tool
from .markdown import table
from .own_program import parsed, parser_of, show
from .process import timed
from .remote import BANDWIDTH, LATENCY, RANKS, Hub, hub_of, make_ranks, make_single
from .sizes import parse_size, show_size
from .targets import at_least_times_faster, at_most_seconds, peak, ratio
from .turns import in_turns

COUNTS = {1: 0.0, 2: 1.8, 4: 3.4}  # parts, and how many times faster than one process they should be
MANY, PLANNED, LARGE, SHARE = 100_000, 64, 100_000_000_000, 0.05
ONE = "one process"


class Linked(NamedTuple):
    """A conversion from a repository."""

    title: str
    make: Callable[[Path, int], None]
    words: tuple[str, ...]  # the command, {} for the repository, and flags


def make_fp8(folder: Path, size: int) -> None:
    """Write a file of fp8; half a byte of its result is one of its own."""
    folder.rmdir()
    timed([PYTHON, CHILDREN / "make_packed.py", folder, "fp8", str(2 * size)])


LINKED = {
    "strip-prefix": Linked("strip-prefix, .pt", make_single, ("strip-prefix", "{}/model.pt")),
    "merge": Linked(f"merge, files of {RANKS} ranks", make_ranks, ("merge", "{}")),
    "fp8": Linked("fp8 → bf16", make_fp8, ("convert", "{}/model.safetensors", "--dequantize")),
}


def linked(job: Linked, hub: Hub, into: str | None) -> Case:
    """Return the ways to convert a repository: one process, and parts."""
    command, source, *flags = (word.format("hf://bench/model") for word in job.words)
    local = None if into else hub.folder / "out.safetensors"
    words = tool(command, source, local or f"{into}/out.safetensors", *flags, "--quiet", "--force")
    start = [PYTHON, CHILDREN / "in_parts.py"]
    ways = [hub.way(name_of(count), [*start, str(count), *words], local) for count in COUNTS]
    targets = [at_least_times_faster(name_of(count), ONE, limit) for count, limit in COUNTS.items() if limit]
    return Case(f"{job.title}, {show_size(hub.size)}", ways, targets)


def name_of(count: int) -> str:
    return ONE if count == 1 else f"{count} parts"


def planning(folder: Path) -> Case:
    """What each part does before its first byte, of very many tensors: here all its bytes are there."""
    source, out = folder / "many.pt", folder / "out.safetensors"
    make_checkpoint(source, 16 * MANY, MANY)
    words = tool("strip-prefix", source, out, "--quiet", "--part", f"1/{PLANNED}")
    timed(words)
    name = "planning, a part"
    limit = at_most_seconds(name, SHARE * LARGE / BANDWIDTH)
    title = f"{MANY:,} tensors in {PLANNED} parts; {show_size(LARGE)} at {BANDWIDTH * 8 / 1e9:g} Gbit/s"
    return Case(f"{title} take one process {LARGE / BANDWIDTH:.0f} s", [Way(name, words)], [limit])


def jobs(folder: Path, size: int) -> Case:
    """Packed tensors of GPTQ, of which Python itself takes the time."""
    packed, out = folder / "packed", folder / "out.safetensors"
    timed([PYTHON, CHILDREN / "make_packed.py", packed, "gptq", str(size)])
    words = tool("convert", packed / "model.safetensors", out, "--dequantize", "--quiet")
    ways = [Way(ONE, words, out), *(Way(f"--jobs {n}", [*words, "--jobs", str(n)], out) for n in (2, 4))]
    return Case(f"GPTQ → fp16, {show_size(size)}, local", ways)


def as_markdown(case: Case, results: Results) -> str:
    """Return the table of the ways, and what is asked of them."""
    first = case.ways[0].name
    rows = [["way", "seconds", "min-max", f"{first} / it", "CPU", "memory", "asked"]]
    for way in case.ways:
        runs = results[way.name]
        seconds = [run.seconds for run in runs]
        asked = [target for target in case.targets if target.way == way.name]
        rows.append(
            [
                way.name,
                f"{median(seconds):.2f}",
                f"{min(seconds):.2f}-{max(seconds):.2f}",
                f"{1 / ratio(results, way.name, first):.2f}",
                f"{median(run.cpu for run in runs):.2f}",
                show_size(peak(results, way.name)),
                "; ".join(
                    f"{'≥' if target.at_least else '≤'} {target.show(target.limit)}: "
                    f"{'met' if target.met(results) else 'MISSED'}"
                    for target in asked
                ),
            ]
        )
    return f"**{case.title}**\n\n{table(rows)}"


def measured(folder: Path, size: int, rounds: int, only: list[str], into: str | None) -> Iterator[str]:
    """Yield the tables."""
    for name in only:
        with tempfile.TemporaryDirectory(prefix="ckpttool-bench-", dir=folder) as temporary:
            place = Path(temporary)
            if job := LINKED.get(name):
                files, work = place / "repositories/model", place / "work"
                files.mkdir(parents=True)
                work.mkdir()
                job.make(files, size)
                with hub_of(files, work) as hub:
                    case = linked(job, hub, into)
                    yield as_markdown(case, in_turns(case, rounds))
            else:
                case = planning(place) if name == "planning" else jobs(place, size)
                yield as_markdown(case, in_turns(case, rounds))


def main() -> int:
    names = [*LINKED, "planning", "jobs"]
    parser = parser_of("parts", __doc__, rounds=2)
    parser.add_argument("--size", type=parse_size, default=parse_size("1GB"), help="of each checkpoint (1GB)")
    parser.add_argument("--only", choices=names, action="append", help="one of the comparisons + (all)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the files (a temporary one)")
    parser.add_argument("--into", metavar="URL", help="of a folder in a bucket, in the place of a local one")
    options = parsed(parser)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = options.folder or Path(tempfile.gettempdir())
    about = f"{machine.about(folder)}; {machine.load()} at the start"
    tables = [*measured(folder, options.size, options.rounds, options.only or names, options.into)]
    link = f"A link of {BANDWIDTH * 8 / 1e9:g} Gbit/s and {LATENCY * 1000:g} ms for each process"
    show("\n\n".join([*tables, f"{link}; {options.rounds} rounds, in turns. Measured {about}."]), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
