"""What per-rank BatchNorm statistics cost in accuracy, and what pooling recovers.

    python -m benchmarks.running_statistics

Each rank trains on its own classes (`children/digits_by_class.py`), once with `--batchnorm plain` and once
with `--batchnorm pooled`; nothing else differs. Then the statistics that each rank alone would keep are
written to a separate file, and the files pooled by `ckpttool convert-batchnorm`. All are scored on the test
set of all classes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpttool.inspecting import run_log

from . import machine
from .commands import CHILDREN, PYTHON, tool
from .markdown import table
from .own_program import parsed, parser_of, show

EXAMPLE = CHILDREN / "digits_by_class.py"
ROOT = Path(__file__).parents[1]
RANK_BATCH = 16

Train = Callable[[Sequence[str], int, Path], object]


@dataclass(frozen=True)
class Measured:
    """Accuracies on the test set, between 0 and 1."""

    plain: list[float]  # plain, pooled: of the two trainings, after each epoch
    pooled: list[float]
    ranks: list[float]  # at the end, with each rank's statistics
    offline: float  # at the end, with the statistics pooled by `convert-batchnorm`
    same_weights: bool  # whether both trainings ended with the same parameters, bit for bit


def train(arguments: Sequence[str], ranks: int, statistics: Path) -> None:
    """Run `train/main.py` on several ranks, which leave their statistics in the folder `statistics`."""
    _run(PYTHON, ROOT / "train/main.py", "--spawn", ranks, *arguments, STATISTICS=str(statistics))


def measure(
    folder: Path, *, ranks: int = 4, epochs: int = 4, seed: int = 0, train: Train = train
) -> Measured:
    """Run the whole example in an empty folder; about 40 seconds on two cores."""
    for kind in ("plain", "pooled"):
        arguments = ["--batchnorm", kind, "--out", folder / kind, "--drop-last", "--lr", 0.05]
        arguments += ["--data", f"{EXAMPLE}:shards", "--model", f"{EXAMPLE}:network"]
        arguments += ["--batch-size", RANK_BATCH * ranks, "--epochs", epochs, "--seed", seed]
        train([str(argument) for argument in arguments], ranks, folder)
    own, offline = write_rank_files(folder / "pooled/last.pt", folder), folder / "offline.pt"
    counts = ",".join([str(RANK_BATCH)] * ranks)
    _run(*tool("convert-batchnorm", *own, offline, "--counts", counts))
    _run(PYTHON, CHILDREN / "evaluate_each.py", f"{EXAMPLE}:network", "digits", *own, offline)
    scores = [_accuracy((path.with_suffix("") / "eval.json").read_text()) for path in (*own, offline)]
    plain, pooled = (
        [entry["accuracy"] for entry in run_log.read(folder / kind) if "epoch" in entry]
        for kind in ("plain", "pooled")
    )
    return Measured(plain, pooled, scores[:-1], scores[-1], _same_weights(folder))


def write_rank_files(checkpoint: Path, folder: Path) -> list[Path]:
    """Writes the model of a checkpoint once per rank, with the statistics in `statistics<rank>.pt`."""
    import torch

    model, paths = torch.load(checkpoint, weights_only=True)["model"], []
    for rank, path in enumerate(sorted(folder.glob("statistics*.pt"))):
        own = {f"module.{name}": buffer for name, buffer in torch.load(path, weights_only=True).items()}
        paths.append(folder / f"rank{rank}.pt")
        torch.save({"model": {**model, **own}}, paths[-1])
    return paths


def _same_weights(folder: Path) -> bool:
    import torch

    one, other = (torch.load(folder / k / "last.pt", weights_only=True)["model"] for k in ("plain", "pooled"))
    weights = [name for name in one if name.endswith((".weight", ".bias"))]
    return all(torch.equal(one[name], other[name]) for name in weights)


def _run(*command: object, **environment: str) -> None:
    arguments = [str(part) for part in command]
    given = {**os.environ, **environment}
    done = subprocess.run(arguments, stdout=subprocess.PIPE, cwd=ROOT, text=True, env=given)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()


def _accuracy(text: str) -> float:
    return float(json.loads(text)["accuracy"])


def as_markdown(measured: Measured) -> str:
    epochs, ranks = range(1, len(measured.plain) + 1), range(len(measured.ranks))
    return "\n\n".join(
        [
            table(
                [
                    ["after epoch", *map(str, epochs)],
                    ["`--batchnorm plain`", *map(_percent, measured.plain)],
                    ["`--batchnorm pooled`", *map(_percent, measured.pooled)],
                ]
            ),
            table(
                [
                    ["at the end, statistics of", *(f"rank {rank}" for rank in ranks), "all"],
                    ["`convert-batchnorm`", *map(_percent, [*measured.ranks, measured.offline])],
                ]
            ),
        ]
    )


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def main() -> int:
    options = parsed(parser_of("running_statistics", __doc__, ranks=4, epochs=4, seed=0))
    with tempfile.TemporaryDirectory(prefix="ckpttool-bench-") as name:
        folder = Path(name)
        about = machine.about(folder)
        measured = measure(folder, ranks=options.ranks, epochs=options.epochs, seed=options.seed)
    weights = "the same" if measured.same_weights else "DIFFERENT"
    markdown = f"{as_markdown(measured)}\n\nWeights of both trainings: {weights}. Measured {about}."
    show(markdown, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
