"""Conversions between formats, which should cost what copying the source costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .case import Benchmark, Case, Need, Way
from .commands import FLOOR, bare_copy, cp, make_checkpoint, tool
from .process import timed
from .sizes import show_size
from .targets import at_most_times, floor, peak_at_most

PEAK = 64_000_000


@dataclass(frozen=True)
class Conversion:
    """One way to rewrite the source: the command's arguments, the output's name, and how slow it may be."""

    words: tuple[str, ...]
    output: str
    limit: float


SEVERAL = f"{FLOOR}, 4 files"


FROM_TORCH = {
    ".pt to .pt": Conversion(("strip-prefix",), "out.pt", 1.0),
    ".pt to .pt, --no-verify": Conversion(("strip-prefix", "--no-verify"), "out.pt", 0.8),
    ".pt to shards": Conversion(("convert", "--shard-size", "1GB"), "shards/", 1.2),
    ".pt, --dtype bf16": Conversion(("convert", "--dtype", "bf16"), "bf16.safetensors", 1.0),
}
FROM_SAFETENSORS = {
    ".safetensors to the same": Conversion(("strip-prefix",), "out.safetensors", 1.1),
    ".safetensors to .pt": Conversion(("convert",), "out.pt", 1.5),
}
RULES = "rules.toml"
STACK = '[[rule]]\nfrom = "module.layers.{i}.weight"\nto = "layers"\nsteps = [{ stack = "i" }]\n'
FUSED = {"--map, one to 128": Conversion(("convert", "--map", RULES, "--inverse"), "out.safetensors", 1.2)}
SPLIT = {"--map, 128 to one": Conversion(("convert", "--map", RULES), "out.safetensors", 1.5)}
FROM_SHARDS = {"shards to .safetensors": Conversion(("convert",), "out.safetensors", 1.2)}


def from_torch(folder: Path, size: int) -> Path:
    make_checkpoint(folder / "in.pt", size)
    return folder / "in.pt"


def from_safetensors(folder: Path, size: int) -> Path:
    return _through(folder, size, folder / "in.safetensors")


def from_split(folder: Path, size: int) -> Path:
    (folder / RULES).write_text(STACK, encoding="utf-8")
    return from_safetensors(folder, size)


def from_fused(folder: Path, size: int) -> Path:
    split, source = from_split(folder, size), folder / "fused.safetensors"
    timed(tool("convert", "-q", split, source, "--map", folder / RULES))
    split.unlink()
    return source


def from_shards(folder: Path, size: int) -> Path:
    return _through(folder, size, folder / "in", "--to", "safetensors-sharded", "--shard-size", "1GB")


def _through(folder: Path, size: int, source: Path, *options: str) -> Path:
    """The source, in a format other than torch's."""
    torch_file = from_torch(folder, size)
    timed(tool("convert", "-q", torch_file, source, *options))
    torch_file.unlink()
    return source


def set_up(
    title: str,
    make_source: Callable[[Path, int], Path],
    conversions: Mapping[str, Conversion],
    folder: Path,
    size: int,
) -> Case:
    source = make_source(folder, size)
    copy = folder / "copy"
    ways = [Way("cp", cp(source, copy), copy)]
    floors = {FLOOR: [copy]} if source.is_file() else {}
    if any(conversion.output.endswith("/") for conversion in conversions.values()):
        floors[SEVERAL] = [copy / str(number) for number in range(4)]
    ways += [Way(name, bare_copy(source, *outputs), copy) for name, outputs in floors.items()]
    for name, conversion in conversions.items():
        command, *words = conversion.words
        options = [folder / word if word == RULES else word for word in words]
        # A trailing slash asks for a folder, which Path would drop.
        written = f"{folder}/{conversion.output}"
        ways.append(Way(name, tool(command, source, written, *options), Path(written)))
    targets = [at_most_times(name, "cp", c.limit) for name, c in conversions.items()]
    targets += [floor(name, "cp") for name in floors]
    targets += [peak_at_most(name, PEAK) for name in conversions]
    return Case(f"{title}, {show_size(size)}", ways, targets, memory=2 * size)


IN_PLACE = "strip-prefix in place"


def set_up_in_place(folder: Path, size: int) -> Case:
    """Another header for a large file: a copy, or less where files can share blocks (btrfs, xfs)."""
    file = from_safetensors(folder, size)
    undo = tool("add-prefix", "-q", "--force", file, file)
    used = [False]

    def with_prefix() -> None:
        if used[0]:
            timed(undo)
        used[0] = True

    return Case(
        f"in place, .safetensors of {show_size(size)}",
        [
            Way("cp", cp(file, folder / "copy"), folder / "copy"),
            Way(IN_PLACE, tool("strip-prefix", "--force", file, file), before=with_prefix),
        ],
        [at_most_times(IN_PLACE, "cp", 1.15), peak_at_most(IN_PLACE, PEAK)],
        memory=2 * size,
    )


def need(size: int) -> Need:
    return Need(files=2 * size, memory=PEAK)


BENCHMARKS = [
    Benchmark("from-pt", True, need, partial(set_up, "from .pt", from_torch, FROM_TORCH)),
    Benchmark(
        "from-safetensors",
        True,
        need,
        partial(set_up, "from .safetensors", from_safetensors, FROM_SAFETENSORS),
    ),
    Benchmark("from-shards", True, need, partial(set_up, "from shards", from_shards, FROM_SHARDS)),
    Benchmark("fused", True, need, partial(set_up, "from one stack of layers", from_fused, FUSED)),
    Benchmark("split", True, need, partial(set_up, "from single layers", from_split, SPLIT)),
    Benchmark("in-place", True, need, set_up_in_place),
]
