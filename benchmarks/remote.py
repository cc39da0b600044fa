"""A checkpoint read where it lies: beside downloading it first, and beside fsspec with torch.load.

    pip install -e '.[remote]' 'fsspec[http]'
    python -m benchmarks.remote

A server of the project's own stands for the hub, behind a link of 1 Gbit/s that answers after 20 ms; all
ways share it in turns, each in its own process, with empty caches. `link` is the part of the link that a
way uses from its start to its end: the bytes of the checkpoint in that time. Requests, bytes and round
trips are the server's count; round trips are those that waited for one another. Connections cost none here.
CPU is in seconds, that of the way and that of the server during it: two cores have both.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

from . import machine
from .case import Case, Results, Target, Way
from .commands import CHILDREN, PYTHON, make_checkpoint, peer, tool
from .markdown import table
from .own_program import parsed, parser_of, show
from .process import timed
from .sizes import parse_size, show_size
from .targets import at_least_times_faster, peak, ratio
from .turns import in_turns

LATENCY, BANDWIDTH = 0.02, 125e6  # seconds, bytes a second
RANKS, SHARDS = 64, 16
ROOT = Path(__file__).parents[1]

OURS, LOCAL, BARE, THREADS = "ckpttool", "ckpttool, a local file", "bare GET", "bare urllib3, to nowhere"
DOWNLOAD, HEADERS = "huggingface_hub, then ckpttool", "huggingface_hub, headers alone"
FSSPEC, FAKE = "fsspec + torch.load", "fsspec + torch.load, fake tensors"
NEEDS = {
    DOWNLOAD: ["huggingface_hub"],
    HEADERS: ["huggingface_hub"],
    FSSPEC: ["fsspec", "aiohttp"],
    FAKE: ["fsspec", "aiohttp"],
}
SHARE, TRIPS, SLOWER = 0.9, 5, 1.5
MEMORY = 64 << 20  # bytes beyond a local conversion


class Count(NamedTuple):
    """What the server saw of one run."""

    requests: int
    nbytes: int
    trips: int
    cpu: float  # seconds of the server's own


@dataclass
class Hub:
    """The server's process, and what it counted of each way."""

    process: subprocess.Popen[str]
    url: str
    storage: str  # the URL of the other host, which has the files
    size: int  # bytes of the repository
    folder: Path  # of caches and outputs
    counts: dict[str, list[Count]] = field(default_factory=lambda: defaultdict(list))
    _way: str = ""

    def begin(self, way: str) -> None:
        """Give what was counted to the way that ran last; empty the caches for the next."""
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        self.counts[self._way].append(Count(*json.loads(self.process.stdout.readline())))
        self._way = way
        for name in ("hf", "cache"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def way(self, name: str, command: Sequence[str | Path], output: Path | None = None) -> Way:
        """Return a way that reads from this hub."""
        settings = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": self.folder / "hf",
            "HF_HUB_DISABLE_XET": 1,
            "HF_HUB_DISABLE_TELEMETRY": 1,
            "CKPTTOOL_CACHE": self.folder / "cache",
        }
        words = ["env", *(f"{key}={value}" for key, value in settings.items()), *command]
        return Way(name, words, output, before=partial(self.begin, name))

    def middle(self, way: str) -> Count:
        """Return the medians over the rounds, without the warm-up."""
        *numbers, cpu = (median(each) for each in zip(*self.counts[way][1:], strict=True))
        return Count(*map(int, numbers), cpu=cpu)


@contextmanager
def hub_of(repository: Path, work: Path) -> Iterator[Hub]:
    """Serve a folder, and those beside it, from a process of its own."""
    size = sum(path.stat().st_size for path in repository.iterdir())
    command = [PYTHON, "-m", "benchmarks.children.link_server", repository.parent, LATENCY, BANDWIDTH]
    words, pipe = [*map(str, command)], subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        try:
            hub, storage = process.stdout.readline().split()
            yield Hub(process, hub, storage, size, work)
        finally:
            process.kill()


def make_single(folder: Path, size: int) -> None:
    """Write a file of torch."""
    make_checkpoint(folder / "model.pt", size, max(SHARDS, min(128, size // 1_000_000)))


def make_shards(folder: Path, size: int) -> None:
    """Write shards with an index."""
    make_single(folder, size)
    whole = (folder / "model.pt").rename(folder.with_suffix(".pt"))
    folder.rmdir()
    limit = f"{max(size // SHARDS // 1_000_000, 1)}MB"
    timed(tool("convert", "-q", whole, f"{folder}/", "--shard-size", limit))
    whole.unlink()


def make_ranks(folder: Path, size: int) -> None:
    """Write a file for each rank."""
    tensors = max(1, min(64, size // 8_000_000))
    timed([PYTHON, CHILDREN / "make_ranks.py", folder, str(size), str(tensors), "fsdp", str(RANKS)])


def inspect_file(hub: Hub, files: Path) -> Case:
    """What is in one large file."""
    url, downloaded = "hf://bench/model/model.pt", ["bench/model", "model.pt", "--"]
    ways = [
        hub.way(LOCAL, tool("inspect", files / "model.pt")),
        hub.way(OURS, tool("inspect", url)),
        hub.way(DOWNLOAD, peer("download_from_hub.py", *downloaded, *tool("inspect", "{}"))),
        hub.way(FAKE, peer("read_with_fsspec.py", "fake", "-", f"{hub.storage}/model/model.pt")),
        hub.way(FSSPEC, peer("read_with_fsspec.py", "show", "-", f"{hub.storage}/model/model.pt")),
    ]
    return Case(f"inspect, .pt of {show_size(hub.size)}", ways, [_trips(hub)])


def inspect_shards(hub: Hub, files: Path) -> Case:
    """What is in a repository of shards."""
    count = len(list(files.glob("*.safetensors")))
    ways = [
        hub.way(LOCAL, tool("inspect", files)),
        hub.way(OURS, tool("inspect", "hf://bench/model")),
        hub.way(DOWNLOAD, peer("download_from_hub.py", "bench/model", "--", *tool("inspect", "{}"))),
        hub.way(HEADERS, peer("headers_from_hub.py", "bench/model")),
    ]
    title = f"inspect, {count} shards of {show_size(hub.size)}"
    return Case(title, ways, [_trips(hub)])


def convert_file(hub: Hub, files: Path) -> Case:
    """A file of torch, without its prefix, as safetensors."""
    return _streamed(hub, [files / "model.pt"], "strip-prefix", "a .pt file", "strip")


def convert_shards(hub: Hub, files: Path) -> Case:
    """All shards as one file, without their prefix."""
    return _streamed(hub, sorted(files.iterdir()), "strip-prefix", f"{SHARDS} shards")


def merge(hub: Hub, files: Path) -> Case:
    """The files of 64 ranks as one."""
    return _streamed(hub, sorted(files.iterdir()), "merge", f"{RANKS} files of ranks", "merge")


def _streamed(hub: Hub, paths: list[Path], command: str, what: str, with_torch: str | None = None) -> Case:
    """Return the ways to write one file from a file, or from all that are in its repository."""
    out, copy = hub.folder / "out.safetensors", hub.folder / "copy"
    urls = [f"{hub.storage}/model/{path.name}" for path in paths]
    names = [path.name for path in paths if len(paths) == 1]
    local = paths[0].parent.joinpath(*names)
    downloaded = ["bench/model", *names, "--", *tool(command, "{}", out)]
    ways = [
        hub.way(BARE, [PYTHON, CHILDREN / "bare_download.py", copy, *urls], copy),
        hub.way(THREADS, [PYTHON, CHILDREN / "bare_threads.py", *urls]),
        hub.way(LOCAL, tool(command, local, out), out),
        hub.way(OURS, tool(command, "/".join(["hf://bench/model", *names]), out), out),
        hub.way(DOWNLOAD, peer("download_from_hub.py", *downloaded), out),
    ]
    if with_torch:
        ways.append(hub.way(FSSPEC, peer("read_with_fsspec.py", with_torch, out, *urls), out))
    return Case(f"{command}, {what} of {show_size(hub.size)}", ways, _targets(hub.size))


def _targets(size: int) -> list[Target]:
    def memory(results: Results) -> float:
        return peak(results, OURS) - peak(results, LOCAL)

    return [
        Target(f"{OURS}, of the link", _share(size, OURS), SHARE, "{:.2f}".format, OURS, at_least=True),
        Target(f"{OURS}, memory beyond {LOCAL}", memory, MEMORY, show_size, OURS),
        at_least_times_faster(OURS, DOWNLOAD, SLOWER),
    ]


def _share(size: int, way: str) -> Callable[[Results], float]:
    return lambda results: median(size / BANDWIDTH / run.seconds for run in results[way])


def _trips(hub: Hub) -> Target:
    return Target(f"{OURS}, round trips", lambda _: hub.middle(OURS).trips, TRIPS, "{:.0f}".format, OURS)


def is_missing(way: str) -> bool:
    return not all(map(find_spec, NEEDS.get(way, [])))


def as_markdown(case: Case, results: Results, hub: Hub) -> str:
    """Return the table of the ways, and that of the targets that could be measured."""
    first = case.ways[0].name
    rows = [["way", "seconds", "min-max", f"× {first}", "link", "requests", "bytes", "round trips", "memory"]]
    rows[0] += ["CPU", "the server's"]
    for way in case.ways:
        if way.name not in results:
            rows.append([way.name, "not installed", *[""] * 9])
            continue
        seconds, count = [run.seconds for run in results[way.name]], hub.middle(way.name)
        share = f"{_share(hub.size, way.name)(results):.2f}" if count.nbytes >= hub.size else ""
        rows.append(
            [
                way.name,
                f"{median(seconds):.2f}",
                f"{min(seconds):.2f}-{max(seconds):.2f}",
                f"{ratio(results, way.name, first):.2f}",
                share,
                *(f"{count.requests}", show_size(count.nbytes), f"{count.trips}"),
                show_size(peak(results, way.name)),
                f"{median(run.cpu for run in results[way.name]):.2f}",
                f"{count.cpu:.2f}",
            ]
        )
    targets = [["target", "limit", "measured", ""]]
    for target in case.targets:
        if all(name in results for name in NEEDS if name in target.text):
            limit = f"{'≥' if target.at_least else '≤'} {target.show(target.limit)}"
            verdict = "met" if target.met(results) else "MISSED"
            targets.append([target.text, limit, target.show(target.measure(results)), verdict])
    return f"**{case.title}**\n\n{table(rows)}\n\n{table(targets)}"


class Job(NamedTuple):
    """One comparison: what writes its repository, and what reads it."""

    make: Callable[[Path, int], None]
    ways: Callable[[Hub, Path], Case]


JOBS = {
    "inspect-file": Job(make_single, inspect_file),
    "inspect-shards": Job(make_shards, inspect_shards),
    "convert-file": Job(make_single, convert_file),
    "convert-shards": Job(make_shards, convert_shards),
    "merge": Job(make_ranks, merge),
}


def measured(job: Job, folder: Path, size: int, rounds: int) -> str:
    """Return the tables of one comparison, made in an empty folder."""
    files, work = folder / "repositories/model", folder / "work"
    files.mkdir(parents=True)
    work.mkdir()
    job.make(files, size)
    with hub_of(files, work) as hub:
        case = job.ways(hub, files)
        present = [way for way in case.ways if not is_missing(way.name)]
        results = in_turns(Case(case.title, present), rounds)
        hub.begin("")
        return as_markdown(case, results, hub)


def main() -> int:
    parser = parser_of("remote", __doc__, rounds=3)
    parser.add_argument("--size", type=parse_size, default=parse_size("1GB"), help="of each checkpoint (1GB)")
    parser.add_argument("--only", choices=JOBS, action="append", help="one of the comparisons + (all)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the files (a temporary one)")
    options = parsed(parser)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    about = f"{machine.about(options.folder or Path(tempfile.gettempdir()))}; {machine.load()} at the start"
    tables = []
    for name in options.only or JOBS:
        with tempfile.TemporaryDirectory(prefix="ckpttool-bench-", dir=options.folder) as folder:
            tables.append(measured(JOBS[name], Path(folder), options.size, options.rounds))
    link = f"A link of {BANDWIDTH * 8 / 1e9:g} Gbit/s and {LATENCY * 1000:g} ms; {options.rounds} rounds."
    show("\n\n".join([*tables, f"{link} Measured {about}."]), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
