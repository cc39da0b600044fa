"""Score a checkpoint on a test set, in one process or many: the same numbers on any number of ranks.

    python train/evaluate.py runs/a/best.pt
    torchrun --nproc-per-node 3 train/evaluate.py model.safetensors --model resnet20 --data folder:pictures

    python train/evaluate.py runs/a/best.pt --spawn 2 --also-test hard=folder:hard --out eval    # without it

The checkpoint can be any that ckpttool reads: saved from DDP or not, .pt, legacy .th or .safetensors. Only
rank 0 reads it. Every test sample is scored once; a folder with one level of classes is the test set itself.
`--out DIR` writes

    eval.json            the numbers and their basis: every sample once, and which checkpoint
    rank0.safetensors    the predictions of rank 0, and so on for each rank

from which `ckpttool gather-metrics eval/rank*.safetensors` recomputes the numbers. Other tasks than
classification (`--task`) have their loss and metrics in eval.json, and no files of predictions. A test set
that `--also-test NAME=DATA` names has the same files in DIR/NAME.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

# The packages of this clone, whichever other one is installed; afterwards the user's modules come first.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from ckpttool.core.files.commit import reason, replacing
from ckpttool.core.words import counted, printable, versioned
from ckpttool.distributed.group import given_rank
from ckpttool.distributed.heartbeat import phase
from ckpttool.errors import CkptToolError, OutputExists, UsageFault
from train import console
from train.config.command_line import without
from train.config.flags import Parser, Sections, add_flags, count, flag
from train.config.sections import OWN, DataConfig, RanksConfig, check_shared
from train.launch import program

sys.path.append(sys.path.pop(0))

# Imports torch: imported where it is needed, so that wrong flags are refused within a tenth of a second.
if TYPE_CHECKING:
    from torch import nn

    from ckpttool.distributed.group import Place
    from ckpttool.metrics.certificate import Predictions
    from train.data.data_set import Data
    from train.tasks.builtin import Task
    from train.trainer.progress import Score, Scores

STATEMENT = "eval.json"
RANK_FILE = re.compile(r"rank\d+\.safetensors")
SAVED: tuple[str, ...] = ("model", "data", "test_data", "block_size", "task", "eval_batch")
SAVED += ("mean", "std", "resize")
WITHOUT_CODE = re.compile(r"(?:folder|fake|tokens|wds|cifar10|mnist):|[^:]*$")


@dataclass(frozen=True)
class ScoringConfig:
    """What is evaluated, and where the scores go."""

    checkpoint: str = ""
    model: str = flag(
        "",
        "evaluation SPEC: simple-cnn, resnet20, torchvision:NAME, file.py:factory; without it, a run's "
        "checkpoint says its model, data and task",
    )
    state: str | None = flag(None, "evaluation WHERE: which state to take if the file holds several")
    json: bool = flag(False, "evaluation: print one JSON object on stdout")
    out: str | None = flag(
        None,
        f"evaluation DIR: write {STATEMENT} and one file of predictions per rank here; by default nothing is "
        "written",
    )
    force: bool = flag(False, "evaluation: overwrite an evaluation in --out")
    threads: int = count(1, "ranks: CPU threads per rank; their number changes the last bits (1)")


@dataclass(frozen=True)
class EvaluateConfig(Sections):
    """The settings of an evaluation."""

    data: DataConfig = DataConfig()
    ranks: RanksConfig = RanksConfig()
    scoring: ScoringConfig = ScoringConfig()


@dataclass(frozen=True)
class Job:
    """An evaluation that has passed all checks."""

    config: EvaluateConfig
    place: Place
    data: Data
    model: nn.Module
    task: Task


class Weights(NamedTuple):
    """What was loaded: the dotted path of a state in the checkpoint, and its digest."""

    state: str
    digest: str


class Evaluation(NamedTuple):
    """The scores by test set, and of which state of the checkpoint they are."""

    state: str
    scores: Scores


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program on this rank and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        config = parse(arguments)
    except CkptToolError as fault:
        return program.complain(fault, echo=given_rank() != 0, as_json="--json" in arguments)
    if config.ranks.spawn:
        return program.spawn(__file__, without("--spawn", arguments), config.ranks.spawn)
    return program.run_program(lambda: prepare(config), work, as_json=config.scoring.json)


def parse(arguments: Sequence[str]) -> EvaluateConfig:
    about = "Score a checkpoint on a test set, exactly, on one or many ranks."
    example = "example:\n  python train/evaluate.py runs/first/best.pt\n"
    parser = Parser("train/evaluate.py", "CKPT [--model SPEC] [flags]", about, example)
    parser.add_argument("checkpoint", metavar="CKPT", help="any checkpoint, with or without prefixes")
    add_flags(parser, EvaluateConfig)
    values = parser.parse_args(arguments)
    if not values.model:
        values = parser.parse_args([*saved_arguments(values.checkpoint, arguments), *arguments])
    config = EvaluateConfig.of(**vars(values) | {"also_test": tuple(values.also_test)})
    check_shared(config.data, config.ranks)
    return config


def saved_arguments(path: str, given: Sequence[str]) -> list[str]:
    """Return the flags of a run that its checkpoint says, as far as they are not given."""
    from ckpttool.core import formats  # only here, as it takes a tenth of a second

    with formats.open(path) as checkpoint:
        tree = checkpoint.tree
        settings = tree.get("config") if isinstance(tree, dict) else None
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), str):
        raise UsageFault(f"--model: not given, and {path} does not say it", hint="give --model SPEC")
    flags, usual = {}, EvaluateConfig()
    for name in SAVED:
        flag, value = f"--{name.replace('_', '-')}", settings.get(name)
        is_given = any(argument.partition("=")[0] == flag for argument in given)
        if value not in (None, usual[name]) and not is_given:
            flags[flag] = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    # What a file names is never run without being asked for.
    names = ("--model", "--data", "--test-data", "--task")
    code = [name for name in names if not WITHOUT_CODE.match(flags.get(name, "digits"))]
    if code:
        named = " ".join(f"{flag} {shlex.quote(flags[flag])}" for flag in flags)
        raise UsageFault(f"{path}: is of {flags[code[0]]}, code that is run only if you name it", hint=named)
    return [f"{flag}={value}" for flag, value in flags.items()]


def prepare(config: EvaluateConfig) -> Job:
    """Check that the evaluation is possible, on this rank alone."""
    import torch

    from ckpttool.distributed.group import find_place
    from train.data import data_set
    from train.model import builtin as models
    from train.tasks import builtin as tasks
    from train.trainer import preflight

    torch.set_num_threads(config.scoring.threads)  # the default differs with and without torchrun
    place = find_place(config.ranks.backend)
    own = (config[name] or "" for name in ("data", "test_data", "model", "task"))
    program.keep_importable(*own, *data_set.specs_of_others(config.data))
    own_task = tasks.users(config.data.task)
    collate = tasks.collate_of(own_task, config.data.task)
    data = data_set.load_test(config.data, collate=collate)
    data = data_set.with_others(config.data, data, collate=collate)
    task = tasks.build(config, data, own_task)
    model = models.build(config.scoring.model, shape=data.shape, classes=task.outputs(data))
    for each in (data, *data.others.values()):
        preflight.check_evaluation(config.scoring.model, each, model, task)
    return Job(config, place, data, model, task)


def work(job: Job) -> None:
    """Evaluate in a process group, and print the result on rank 0."""
    with program.process_group(job.place, job.config.ranks):
        phase("evaluation")
        evaluation = evaluate(job)
    if job.place.rank == 0:
        is_json = job.config.scoring.json
        console.say(json.dumps(as_json(job, evaluation), indent=2) if is_json else as_lines(job, evaluation))


def evaluate(job: Job) -> Evaluation:
    """Return the score of each test set. A collective; only rank 0 reads the checkpoint."""
    from ckpttool.distributed import collectives
    from train.data import data_set
    from train.launch import same_settings
    from train.model import wrapping

    config, model = job.config, job.model
    same_settings.report(config)
    data_set.compare(job.data, "before evaluating", workers=config.ranks.workers)
    wrapping.compare(model, "before evaluating")
    weights = collectives.from_rank_zero(lambda: load(job))
    model.load_state_dict(collectives.broadcast(model.state_dict))  # with what is no tensor
    model.to(job.place.device)
    test_sets = {OWN: job.data, **job.data.others}
    return Evaluation(
        weights.state, {name: score_one(job, name, each, weights) for name, each in test_sets.items()}
    )


def score_one(job: Job, name: str, data: Data, weights: Weights) -> Score:
    """Return the score of one test set, and write it with `--out`. A collective."""
    from train.tasks.builtin import Classification
    from train.trainer.progress import Scorer

    config, workers = job.config, job.config.ranks.workers
    scorer = Scorer(data, job.task, job.place, batch_size=config.data.eval_batch, workers=workers)
    has_classes = isinstance(job.task, Classification)
    scored = scorer.classes(job.model, checkpoint=weights.digest) if has_classes else None
    score = scored.certificate if scored else scorer.score(job.model, checkpoint=weights.digest)
    if config.scoring.out is not None:
        write(job, os.path.join(config.scoring.out, name), weights, score, scored.own if scored else None)
    return score


def load(job: Job) -> Weights:
    """Load a state, without `--state` that by which its run was scored; say which of several."""
    from ckpttool.core import formats
    from ckpttool.core.checkpoint.state import SCORED, scored_average
    from ckpttool.core.files.digest import digest
    from ckpttool.models.reloading import reload
    from train.checkpoint import files

    config = job.config
    earlier = [file for name in (OWN, *job.data.others) for file in prepare_output(config.scoring, name)]
    require_no_others(config.scoring.out, job.data.others)
    path, asked = files.parts_named_in(config.scoring.checkpoint), config.scoring.state
    with formats.open(path) as checkpoint:
        scored = scored_average(checkpoint.tree)
        loaded = reload(checkpoint, job.model, state=scored if asked is None else asked)
        state = checkpoint.state(loaded.state)
        of_state = digest(state.tensors)
        others = checkpoint.other_states(state.path) if asked is None else []
        settings = checkpoint.tree.get("config") if isinstance(checkpoint.tree, dict) else None
    if others:
        by = f", {SCORED}" * (loaded.state == scored)
        flags = ", ".join(f"--state {shlex.quote(other)}" for other in others)
        taken = f"'{loaded.state}'" if loaded.state else "the file itself"
        console.note(printable(f"state: {taken}{by}; also available: {flags}"))
    best = settings.get("best") if isinstance(settings, dict) else None
    test_set, has_one, _ = best.rpartition("/") if isinstance(best, str) else ("", "", "")
    if has_one and test_set not in job.data.others:
        of = f"its run's best is by {best}, of a test set that is not scored here"
        console.note(printable(f"{of}: --also-test {test_set}=DATA"))
    for file in earlier:  # last: an earlier evaluation is kept until the new one can begin
        os.remove(file)
    return Weights(loaded.state, of_state)


def require_no_others(out: str | None, names: Collection[str]) -> None:
    """Refuse to replace an evaluation that has the scores of a test set which this one does not score."""
    if out is None or not os.path.isfile(os.path.join(out, STATEMENT)):
        return
    for entry in sorted(os.listdir(out)):
        if entry not in names and os.path.isfile(os.path.join(out, entry, STATEMENT)):
            what = f"--out {out}: holds the scores of another test set, '{entry}'"
            hint = f"give another folder, --also-test {entry}=DATA too, or remove {entry}/"
            raise OutputExists(what, hint=hint)


def prepare_output(settings: ScoringConfig, name: str) -> list[str]:
    """Make a test set's folder in `--out`; return the files of an earlier evaluation, to be removed."""
    from train.run.folder import check_writable

    if settings.out is None:
        return []
    folder = os.path.join(settings.out, name) if name else settings.out
    try:
        os.makedirs(folder, exist_ok=True)
        check_writable(folder)
    except OSError as error:
        raise UsageFault(f"--out {folder}: {reason(error)}") from error
    earlier = [file for file in os.listdir(folder) if file == STATEMENT or RANK_FILE.fullmatch(file)]
    if earlier and not settings.force:
        raise OutputExists(f"--out {folder}: holds an evaluation", hint="overwrite it with --force")
    return [os.path.join(folder, file) for file in earlier]


def write(job: Job, folder: str, weights: Weights, score: Score, predicted: Predictions | None) -> None:
    """Write each rank's predictions, if the task has classes, and then eval.json. A collective."""
    from ckpttool.distributed import collectives
    from ckpttool.metrics import certificate

    rank = job.place.rank
    with collectives.fail_together():
        os.makedirs(folder, exist_ok=True)  # ranks of another machine have another disk
        if predicted is not None:
            path = os.path.join(folder, f"rank{rank}.safetensors")
            certificate.write(path, predicted, score.evaluation, rank, force=job.config.scoring.force)
    with collectives.fail_together():
        if rank == 0:
            about = {"checkpoint": job.config.scoring.checkpoint, "state": weights.state}
            statement = about | score.statement()
            path = os.path.join(folder, STATEMENT)
            with replacing(path, exclusive=not job.config.scoring.force) as file:
                file.write(f"{json.dumps(statement, indent=2, allow_nan=False)}\n".encode())


def as_json(job: Job, evaluation: Evaluation) -> dict[str, Any]:
    """Return the result as `--json` prints it."""
    scores = evaluation.scores
    own = scores[OWN]
    basis = {"threads": own.evaluation.threads, "batch_size": own.evaluation.batch_size}
    tests = {name: score.score() for name, score in scores.items() if name != OWN}
    about = {"checkpoint": job.config.scoring.checkpoint, "state": evaluation.state}
    result = {**about, **own.score(), **basis}
    return versioned(result | ({"tests": tests} if tests else {}))


def as_lines(job: Job, evaluation: Evaluation) -> str:
    """Return the result as one line of each test set."""
    from train.trainer.progress import in_words

    path, on = job.config.scoring.checkpoint, f", on {counted(job.place.world_size, 'rank')}"
    lines = (f"{name or path}: {in_words(score)}{on}" for name, score in evaluation.scores.items())
    return "\n".join(console.folded(line, sys.stdout) for line in lines)


if __name__ == "__main__":
    program.leave(main())
