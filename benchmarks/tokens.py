"""Steps per second of `--data tokens:` against a bare DDP loop that loads as nanoGPT does.

    python -m benchmarks.tokens

The same transformer, file of tokens, global batch and optimizer, on two ranks over gloo on the CPU. The ways
take turns, as in `python -m benchmarks.training`; the bare loop runs twice, and what the two differ by is
noise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from . import machine, training
from .own_program import parsed, parser_of, show

# Here, and there
NAMES = {"bare": "nanogpt", "again": "nanogpt-again", "exact": "nanogpt-exact", "ours": "tokens"}


def measure(folder: Path, **counts: int) -> training.Seconds:
    """Return the seconds of each way, under the names of `benchmarks.training`."""
    seconds = training.measure(folder, list(NAMES.values()), **counts)
    return {name: seconds[way] for name, way in NAMES.items()}


def main() -> int:
    options = parsed(parser_of("tokens", __doc__, ranks=2, launches=3, rounds=12, steps=4, batch=32))
    counts = {name: getattr(options, name) for name in ("ranks", "launches", "rounds", "steps", "batch")}
    with tempfile.TemporaryDirectory(prefix="ckpttool-bench-") as name:
        load = machine.load()
        seconds = measure(Path(name), **counts)
        about = f"{machine.about(Path(name))}; {load} at the start"
    what = f"a transformer, blocks of 128 tokens, {options.ranks} ranks, gloo, global batch {options.batch}"
    turns = f"{options.launches} launches of {options.rounds} rounds of {options.steps} steps"
    show(f"{training.as_markdown(seconds, options.steps)}\n\n{what}; {turns}. Measured {about}.", options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
