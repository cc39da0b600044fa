"""Steps per second of train/main.py against a bare DDP loop, accelerate and Lightning Fabric.

    python -m benchmarks.training
    python -m benchmarks.training --shard    # --shard against a bare loop of fully_shard

The same ResNet-20, data in memory, global batch and optimizer, on two ranks over gloo on the CPU. Each way is
a program of its own, and they take turns of some steps, round after round; a ratio is the median of the
rounds'. The bare loop runs twice: what the two differ by is noise. Where a process has laid its memory makes
it some per cent faster or slower for as long as it lives, so there are several launches. CPU seconds of rank
0 depend less on what else the machine does. accelerate and Lightning are left out where they are not
installed (`pip install -e '.[interop]'`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from . import machine
from .commands import CHILDREN, PYTHON
from .markdown import table
from .own_program import parsed, parser_of, show

CHILD = CHILDREN / "training_turns.py"
NAMES = {
    "bare": "a bare loop",
    "again": "the same loop again (noise)",
    "accelerate": "accelerate",
    "fabric": "Lightning Fabric",
    "ours": "train/main.py",
}
SHARDED = {
    "fully_shard": "a bare loop of `fully_shard`",
    "fully_shard_again": "the same loop again (noise)",
    "fully_shard_buffers": "the same loop, with rank 0's buffers as under DDP",
    "ours_shard": "train/main.py --shard",
}
LABELS = {**NAMES, **SHARDED, "exact": "the same loop, exact where tokens are left out"}
Seconds = dict[str, list[tuple[float, float]]]

STARTS = 120.0  # seconds in which a rank has to have started

NEEDS = {"accelerate": "accelerate", "fabric": "lightning"}


def measure(
    folder: Path,
    ways: Sequence[str],
    *,
    ranks: int = 2,
    launches: int = 5,
    rounds: int = 12,
    steps: int = 2,
    batch: int = 64,
) -> Seconds:
    """Return the seconds, and the CPU seconds of rank 0, of each way's steps in each round."""
    seconds: Seconds = {way: [] for way in ways}
    for launch in range(launches):
        inner = folder / str(launch)
        inner.mkdir()
        with _launched(inner, ways, ranks, steps, batch) as programs:
            for round_ in range(rounds + 1):
                shift = round_ % len(ways)
                for way in (*ways[shift:], *ways[:shift]):  # none is always first
                    took = _take_turn(way, programs[way])
                    if round_:  # the first one imports, and settles buckets and memory
                        seconds[way].append(took)
                print(f"launch {launch + 1}, round {round_} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def nccl(ranks: int) -> bool:
    """Return whether each rank has a GPU, so that they are measured on those."""
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks


@contextlib.contextmanager
def _launched(
    folder: Path, ways: Sequence[str], ranks: int, steps: int, batch: int
) -> Iterator[dict[str, list[TextIO]]]:
    """Start every way; yield a connection to each of its ranks, rank 0's first. It ends them afterwards."""
    launcher = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), CHILD]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    programs: dict[str, list[TextIO]] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(STARTS)
        for way in ways:
            command = [*launcher, str(server.getsockname()[1]), str(steps), str(batch), folder, way]
            started = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
            stack.callback(_end, started)
            found: dict[int, TextIO] = {}
            while len(found) < ranks:
                lines = stack.enter_context(server.accept()[0].makefile("rw"))
                found[int(lines.readline())] = lines
            programs[way] = [found[rank] for rank in range(ranks)]
        yield programs


def _end(started: subprocess.Popen[bytes]) -> None:
    """Wait for a program whose ranks have no more turns; end one that does not end."""
    try:
        started.wait(timeout=20)
    except subprocess.TimeoutExpired:
        started.terminate()
        started.wait()


def _take_turn(way: str, ranks: list[TextIO]) -> tuple[float, float]:
    """Let the ranks of a way take their steps; return rank 0's seconds, and those of its processor."""
    for lines in ranks:
        print("go", file=lines, flush=True)
    took = ranks[0].readline().split()
    if not took:
        raise SystemExit(f"error: {LABELS.get(way, way)} ended, and said above why")
    return float(took[0]), float(took[1])


def ratio(seconds: Seconds, way: str, *, cpu: bool = False) -> float:
    """Return the speed of a way against the bare loop: the median over rounds."""
    return statistics.median(ratios(seconds, way, cpu=cpu))


def ratios(seconds: Seconds, way: str, *, cpu: bool = False) -> list[float]:
    """Return the speed of a way against the bare loop in each round."""
    loop = seconds["bare" if "bare" in seconds else "fully_shard"]
    return [bare[cpu] / own[cpu] for bare, own in zip(loop, seconds[way], strict=True)]


def as_markdown(seconds: Seconds, steps: int) -> str:
    """Return the table of steps per second and of ratios, with the middle half of the rounds."""
    head = ["", "steps/s", "× the bare loop", "middle half of the rounds", "× by CPU time"]
    rows = [head]
    for way, own in seconds.items():
        of_rounds, quarter = sorted(ratios(seconds, way)), len(own) // 4
        spread = f"{of_rounds[quarter]:.2f} – {of_rounds[-1 - quarter]:.2f}"
        speed = steps / statistics.median(wall for wall, _ in own)
        both = [f"{ratio(seconds, way, cpu=cpu):.3f}" for cpu in (False, True)]
        rows.append([_named(way), f"{speed:.2f}", both[0], spread, both[1]])
    return table(rows)


def _named(way: str) -> str:
    name = LABELS[way]
    try:
        return f"{name} {version(NEEDS[way])}" if way in NEEDS else name
    except PackageNotFoundError:
        return name


def main() -> int:
    parser = parser_of("training", __doc__, ranks=2, launches=5, rounds=12, steps=2, batch=64)
    parser.add_argument("--shard", action="store_true", help="compare --shard with fully_shard")
    options = parsed(parser)
    ways = list(SHARDED if options.shard else NAMES)
    ways = [way for way in ways if way not in NEEDS or find_spec(NEEDS[way])]
    with tempfile.TemporaryDirectory(prefix="ckpttool-bench-") as name:
        folder = Path(name)
        load = machine.load()
        counts = {"ranks": options.ranks, "launches": options.launches, "rounds": options.rounds}
        seconds = measure(folder, ways, **counts, steps=options.steps, batch=options.batch)
        about = f"{machine.about(folder)}; {load} at the start"
    backend = "NCCL" if nccl(options.ranks) else "gloo"
    ranks = f"{options.ranks} rank{'s' * (options.ranks != 1)}"
    what = f"ResNet-20, {ranks}, {backend}, global batch {options.batch}"
    turns = f"{options.launches} launches of {options.rounds} rounds of {options.steps} steps"
    markdown = f"{as_markdown(seconds, options.steps)}\n\n{what}; {turns}. Measured {about}."
    show(markdown, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
