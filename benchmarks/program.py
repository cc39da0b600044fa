"""The program: benchmarks run by the command line, each table printed when it is ready."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from . import history, machine
from .case import Benchmark, Case, NotHere, Results
from .disk_space import choose_folder, in_memory, shortage
from .markdown import put_between_marks
from .options import TABLES, parse
from .process import CommandFailed
from .report import as_text, for_page
from .sizes import show_size
from .turns import Say, in_turns


def main(benchmarks: Iterable[Benchmark], arguments: Sequence[str] | None = None) -> int:
    """Run those of the benchmarks that the arguments, or the command line, ask for; return the exit code."""
    named = {benchmark.name: benchmark for benchmark in benchmarks}
    options = parse(arguments, named)
    # SIGTERM unwinds the stack as Ctrl-C does, so that no gigabytes are left in memory.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        _run([named[name] for name in options.only], options)
    except CommandFailed as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks: interrupted", file=sys.stderr)
        return 130
    return 0


def _run(chosen: Sequence[Benchmark], options: argparse.Namespace) -> None:
    """Run benchmarks, print each table when it is ready, and put all into the page."""
    # Space for each benchmark at its smallest size is enough: a larger size can be skipped.
    files = max(benchmark.need(min(options.size)).files for benchmark in chosen)
    folder, remark = (options.folder, "") if options.folder else choose_folder(files)
    about = _about(folder, options.ready_memory)
    _say_80(f"{about}; {machine.load()}", remark)
    measured: list[str] = []
    before, figures = history.last(), list[history.Figure]()
    of = machine.size(folder), machine.date(), history.commit()
    for benchmark, size in [(b, size) for b in chosen for size in (sorted(options.size) if b.sized else [0])]:
        lack = shortage(benchmark.need(size), folder)
        if lack:
            _say_80(f"{benchmark.name}, {show_size(size)}: left out, {lack}")
            continue
        try:
            case, results = _measure(benchmark, size, folder, options)
        except NotHere as why:
            _say_80(f"{benchmark.name}: left out, {why}")
            continue
        found = [history.figure_of(case, target, results, of) for target in case.targets]
        was = [before.get((figure.machine, figure.row)) for figure in found]
        print(f"\n{as_text(case, results, was)}", flush=True)
        measured.append(for_page(case, results))
        figures += [figure for figure in found if figure.limit is not None]  # of a floor, nothing is ours
    for text in history.worse(figures, before):
        print(f"\nWORSE than before, beyond its noise: {text}", flush=True)
    if options.record:
        history.record(figures)
    if measured and options.markdown:
        tables = "\n\n".join(f"```text\n{table}\n```" for table in measured)
        put_between_marks(options.markdown / TABLES, f"{tables}\n\nMeasured {about}.")


def _about(folder: Path, ready_memory: bool) -> str:
    """What the numbers apply to; printed wherever they are."""
    parts = [machine.date(), machine.versions(), machine.size(folder)]
    if not in_memory(folder):
        parts.append("on a disk, which only ckpttool waits for (fsync)")
    if ready_memory:
        parts.append("memory made ready before each run")
    return "; ".join(parts)


def _say_80(*texts: str) -> None:
    for text in filter(None, texts):
        print(textwrap.fill(text, 80))


def _measure(
    benchmark: Benchmark, size: int, parent: Path, options: argparse.Namespace
) -> tuple[Case, Results]:
    """One benchmark at one size, in its own folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-bench-", dir=parent) as folder, _progress() as say:
        say(f"{benchmark.name}: making its files")
        case = benchmark.set_up(Path(folder), size)

        def tell(text: str) -> None:
            say(f"{case.title}: {text}")

        try:
            return case, in_turns(case, options.rounds, tell, ready=options.ready_memory)
        finally:
            case.end()


@contextlib.contextmanager
def _progress() -> Iterator[Say]:
    """Progress of a long measurement: one line on a terminal, erased at the end; otherwise nothing."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    erase = "\r\x1b[K"
    try:
        yield lambda text: print(f"{erase}{text}", end="", file=sys.stderr, flush=True)
    finally:
        print(erase, end="", file=sys.stderr, flush=True)
