"""Scores a checkpoint on a test set, on one process or many: the same numbers on any number of ranks.

    python train/evaluate.py runs/a/best.pt --model simple-cnn --data digits
    torchrun --nproc-per-node 3 train/evaluate.py model.safetensors --model resnet20 --data folder:pictures

Any checkpoint that ckpttool reads: saved from DDP or not, .pt, legacy .th or .safetensors. Only rank 0 reads
it. Every test sample is scored once; a folder with one level of classes is the test set itself.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.errors import UsageFault
from train import flags, launch
from train.config import DataConfig, check_pictures

if TYPE_CHECKING:
    from torch import nn

    from train.data import Data
    from train.engine import Score


@dataclass(frozen=True)
class EvaluateConfig(DataConfig):
    checkpoint: str = ""
    model: str = ""
    state: str | None = None
    json: bool = False
    workers: int = 0
    backend: str = "auto"
    timeout: float = 600.0


@dataclass(frozen=True)
class Job:
    """An evaluation that has been found possible."""

    config: EvaluateConfig
    place: launch.Place
    data: Data
    model: nn.Module


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        config = parse(arguments)
    except UsageFault as fault:
        return launch.complain(fault, echo=launch.rank() != 0, as_json="--json" in arguments)
    return launch.run_program(lambda: prepare(config), work, as_json=config.json)


def parse(arguments: Sequence[str]) -> EvaluateConfig:
    parser = flags.Parser(
        prog="train/evaluate.py",
        usage="python train/evaluate.py CKPT --model SPEC [flags]",
        description="Scores a checkpoint on a test set, exactly, on one or many ranks.",
        epilog="example:\n  python train/evaluate.py runs/first/best.pt --model simple-cnn\n",
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="any checkpoint, with or without prefixes")
    parser.add_argument(
        "--model",
        required=True,
        metavar="SPEC",
        help="simple-cnn, resnet20, torchvision:NAME, file.py:factory",
    )
    parser.add_argument("--state", metavar="WHERE", help="which state to take, when the file holds several")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    flags.add_data_flags(parser)
    flags.add_start_flags(parser)
    config = EvaluateConfig(**vars(parser.parse_args(arguments)))
    check_pictures(config)
    return config


def prepare(config: EvaluateConfig) -> Job:
    """Finds out whether the evaluation is possible, on this rank alone."""
    from train import data, models, preflight

    place = launch.find_place(config.backend)
    loaded = data.load_test(config)
    model = models.build(config.model, shape=loaded.shape, classes=len(loaded.classes))
    preflight.check_evaluation(config.model, loaded, model)
    return Job(config, place, loaded, model)


def work(job: Job) -> None:
    with launch.process_group(job.place, job.config.timeout):
        score = evaluate(job)
    if job.place.rank == 0:
        print(json.dumps(as_json(job, score), indent=2) if job.config.json else in_words(job, score))


def evaluate(job: Job) -> Score:
    """The score, on every rank of the process group; rank 0 alone reads the file."""
    from ckpttool import ranks
    from ckpttool import reload
    from train import engine

    config, model = job.config, job.model
    ranks.compare({"--data": (job.data.fingerprint, job.data.classes)}, "before evaluating")
    ranks.decide(lambda: reload(config.checkpoint, model, state=config.state).loaded)
    model.to(job.place.device)
    ranks.broadcast_into(model.state_dict().values())
    return engine.evaluate(model, job.data.test, job.data.classes, job.place, workers=config.workers)


def as_json(job: Job, score: Score) -> dict[str, Any]:
    return {
        "checkpoint": job.config.checkpoint,
        "correct": score.correct,
        "samples": score.samples,
        "accuracy": score.accuracy,
        "loss": score.loss if math.isfinite(score.loss) else None,
        "per_class": [
            {"class": name, "correct": correct, "samples": samples}
            for name, correct, samples in score.per_class
        ],
        "ranks": job.place.world_size,
    }


def in_words(job: Job, score: Score) -> str:
    size = job.place.world_size
    return (
        f"{job.config.checkpoint}: {score.correct} of {score.samples} correct ({score.accuracy:.2%}), "
        f"loss {score.loss:.4f}, on {size} rank{'s' * (size != 1)}"
    )


if __name__ == "__main__":
    launch.leave(main())
