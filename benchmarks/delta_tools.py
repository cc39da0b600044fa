"""Deltas beside the tools that a user would pack a difference with: sizes, seconds and memory, as a table.

    python -m benchmarks.delta_tools

What changed is packed and made again, in turns, round after round; with `--rounds 0` once, without times.
A tool that is not installed is named.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from . import machine
from .case import Case, Results, Way
from .commands import CHILDREN, PYTHON, cp, peer, tool
from .markdown import table
from .own_program import parsed, parser_of, show
from .process import CommandFailed, timed
from .sizes import show_size
from .targets import peak, ratio
from .turns import in_turns

Words = list[str | Path]
KINDS = {
    "step": "1 % of the values changed, bf16",
    "tuned-bf16": "fine-tuned in bf16",
    "tuned-fp32": "fine-tuned in fp32",
}
READ, COPY = "`cat` of both", "`cp` of the result"


@dataclass(frozen=True)
class Tool:
    """A way to pack what changed from one file to another.

    Attributes:
        pack: base, new and output -> the command.
        unpack: base, what was packed and output -> the command that makes the new file again.
    """

    name: str
    pack: Callable[[Path, Path, Path], Words]
    unpack: Callable[[Path, Path, Path], Words]


OURS = Tool(
    "ckpttool",
    lambda base, new, out: tool("delta", "-q", base, new, out),
    lambda base, delta, out: tool("apply", "-q", base, delta, out),
)
ZSTD = Tool(
    "zstd -3 --patch-from",
    lambda base, new, out: ["zstd", "-qf3", "--long=31", f"--patch-from={base}", new, "-o", out],
    lambda base, delta, out: ["zstd", "-qfd", "--long=31", f"--patch-from={base}", delta, "-o", out],
)
XDELTA = Tool(
    "xdelta3 -1",
    lambda base, new, out: ["xdelta3", "-fq1e", "-s", base, new, out],
    lambda base, delta, out: ["xdelta3", "-fqd", "-s", base, delta, out],
)


def _zipnn(kind: str) -> Tool:
    """Return zipnn, which has to be told the type of all values."""
    dtype = "float32" if kind == "tuned-fp32" else "bfloat16"

    def words(what: str, base: Path, source: Path, out: Path) -> Words:
        return peer("difference_with_zipnn.py", what, dtype, base, source, out)

    return Tool("zipnn", lambda *paths: words("pack", *paths), lambda *paths: words("unpack", *paths))


def others(kind: str) -> tuple[list[Tool], list[str]]:
    """Return the tools that are installed, each of which holds the whole base in memory; and the absent."""
    known = [
        (_zipnn(kind), find_spec("zipnn") is not None),
        (XDELTA, shutil.which("xdelta3") is not None),
        (ZSTD, shutil.which("zstd") is not None),
    ]
    return [each for each, is_there in known if is_there], [each.name for each, there in known if not there]


def make_files(folder: Path, kind: str, size: int) -> tuple[Path, Path]:
    """Write a base and what it became, of `size` bytes each."""
    timed([PYTHON, CHILDREN / "make_step.py", folder, kind, str(size)])
    return folder / "base.safetensors", folder / "new.safetensors"


def packed(tools: list[Tool], base: Path, new: Path, folder: Path) -> dict[str, Path]:
    """Return what each tool makes of two files, by its name.

    Raises CommandFailed where a tool does not make the newer file of it again.
    """
    found, again = {}, folder / "again.safetensors"
    for number, each in enumerate(tools):
        found[each.name] = delta = folder / f"packed-{number}"
        timed(each.pack(base, new, delta))
        timed(each.unpack(base, delta, again))
        if subprocess.run(["cmp", "-s", new, again]).returncode:
            raise CommandFailed(f"{each.name} made another file than it was given")
        again.unlink()
    return found


def measure(folder: Path, kind: str, size: int, rounds: int) -> list[list[str]]:
    """Return the rows of a kind of change."""
    base, new = make_files(folder, kind, size)
    tools = [OURS, *others(kind)[0]]
    files = packed(tools, base, new, folder)
    if not rounds:
        return [_row(kind, each.name, new, files, []) for each in tools]
    out = folder / "out.safetensors"
    packing = [Way(each.name, each.pack(base, new, out), out) for each in tools]
    unpacking = [Way(each.name, each.unpack(base, files[each.name], out), out) for each in tools]
    turns = [
        in_turns(Case(kind, [Way(READ, ["cat", base, new]), *packing]), rounds),
        in_turns(Case(kind, [Way(COPY, cp(new, out), out), *unpacking]), rounds),
    ]
    return [_row(kind, each.name, new, files, turns) for each in tools]


def _row(kind: str, name: str, new: Path, files: Mapping[str, Path], turns: list[Results]) -> list[str]:
    row = [KINDS[kind], name, f"{new.stat().st_size / files[name].stat().st_size:.2f} ×"]
    if not turns:
        return row
    for results, against in zip(turns, (READ, COPY), strict=True):
        seconds = median(run.seconds for run in results[name])
        row.append(f"{seconds:.2f} s ({ratio(results, name, against):.1f} ×)")
    cpu = " + ".join(f"{median(run.cpu for run in results[name]):.2f}" for results in turns)
    return [*row, f"{cpu} s", show_size(max(peak(results, name) for results in turns))]


HEADER = ["what changed", "tool", "smaller", f"packed (× {READ})", f"made again (× {COPY})"]
HEADER += ["of the processors", "memory"]


def _versions() -> str:
    """Return the versions of the tools, and name the absent."""
    there, absent = others("step")
    said = [f"{name} {metadata.version(name)}" for name in ("zstandard", "zipnn") if find_spec(name)]
    for each, words in ((ZSTD, ["zstd", "--version"]), (XDELTA, ["xdelta3", "-V"])):
        if each in there:
            told = subprocess.run(words, capture_output=True, text=True)
            said.append((told.stdout + told.stderr).strip().split(",")[0].strip("* "))
    return "; ".join([", ".join(said), *(f"{name} is absent" for name in absent)])


def main() -> int:
    parser = parser_of("delta_tools", __doc__, megabytes=1000, rounds=5)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the files (a temporary one)")
    options = parsed(parser)
    rows, load = [HEADER if options.rounds else HEADER[:3]], machine.load()
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="ckpttool-bench-", dir=options.folder) as name:
            rows += measure(Path(name), kind, options.megabytes * 1_000_000, options.rounds)
            about = f"{machine.about(Path(name))}; {_versions()}; {load} at the start"
    how = f"{options.rounds} rounds, medians" if options.rounds else "sizes alone"
    what = f"Files of {options.megabytes} MB; {how}."
    show(f"{table(rows, left=2)}\n\n{what} Measured {about}.", options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
