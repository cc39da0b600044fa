"""python -m benchmarks.tensor_cost: where the time of a small tensor goes, in µs of CPU for each.

Each step is run by itself in this process, several times, and the least counts. A command takes the sum of
its steps, and starting the program.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpttool import diff, inspect, strip_prefix
from ckpttool import open as open_checkpoint
from ckpttool.core.files.copying import Output
from ckpttool.core.formats import safetensors
from ckpttool.core.formats.pytorch.archive import Archive
from ckpttool.core.formats.pytorch.tensor_pickle import write_torch_pickle
from ckpttool.core.formats.pytorch.zip_entries import read_directory
from ckpttool.core.formats.pytorch.zip_writer import ZipWriter
from ckpttool.core.remote.places import open_source_at

from .commands import make_checkpoint


def cost(step: Callable[[], object], rounds: int) -> float:
    """Return the least seconds of CPU that a step takes, without letting go of what it made."""
    least = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        made = step()
        least = min(least, time.process_time() - begun)
        del made
    return least


def steps(path: Path, rounds: int) -> dict[str, float]:
    """Return what each step of reading and writing a `.pt` takes, in seconds."""
    source = open_source_at(str(path))
    found = {"zip directory and local headers": cost(lambda: read_directory(source), rounds)}
    pickle = cost(lambda: Archive(source).read_pickle(), rounds) - next(iter(found.values()))
    found["pickle and storages, read"] = pickle
    with open_checkpoint(path) as checkpoint, open_checkpoint(path) as same:
        state = checkpoint.state()
        storages = [tensor.storage for tensor in state.tensors.values()]
        found["inspect: modules, sizes, prefixes"] = cost(lambda: inspect(checkpoint), rounds)
        found["names without the prefix"] = cost(lambda: strip_prefix(checkpoint), rounds)
        found["pickle, written"] = cost(lambda: write_torch_pickle(checkpoint.tree, 2, None), rounds)
        with tempfile.TemporaryFile() as file:

            def zipped() -> None:
                with Output(file) as out:
                    ZipWriter(out, "many").copy_all(storages)

            def headed() -> None:
                with Output(file) as out:
                    safetensors.write("many", state.tensors, {}, out)

            found["storages of a `.pt`, copied with their headers"] = cost(zipped, rounds)
            found["`.safetensors`, header and values"] = cost(headed, rounds)
        found["diff: values read together and compared"] = cost(lambda: diff(checkpoint, same), rounds)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_cost", description=__doc__)
    parser.add_argument("--tensors", type=int, default=100_000, help="how many, 100,000 when left out")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ckpttool-tensor-cost-") as folder:
        path = Path(folder) / "many.pt"
        make_checkpoint(path, 16 * options.tensors, options.tensors)
        print("| step | µs |\n|---|---:|")
        for step, seconds in steps(path, options.rounds).items():
            print(f"| {step} | {seconds / options.tensors * 1e6:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
