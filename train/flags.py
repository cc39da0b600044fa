"""The command line of the trainer, and the flags that it shares with the evaluation."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn

from ckpttool.errors import UsageFault
from train import launch
from train.config import OPTIMIZERS, DataConfig, Every, TrainConfig, check

BACKENDS = ("auto", "gloo", "nccl")
BATCHNORMS = ("plain", "sync", "pooled")

EXAMPLES = """\
examples:
  torchrun --nproc-per-node 2 train/main.py
  python train/main.py --spawn 2 --epochs 3 --out runs/first
  python train/main.py --epochs 5 --out runs/first --resume auto
  python train/main.py --data fake:64 --model resnet20 --epochs 1
"""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageFault instead of exiting, and prints the help only on rank 0."""

    def __init__(self, **options: Any) -> None:
        # An abbreviated flag would reach torchrun's ranks under a name that is not recognised.
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageFault(message, hint=f"{self.prog} --help lists the flags")

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if launch.rank() == 0:
            launch.say(message.rstrip())


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """Return the configuration that a command line gives.

    Raises:
        UsageFault: a value is wrong whatever the data and the model; names the flag.
    """
    values = vars(train_parser().parse_args(arguments))
    for name, usual in OPTIMIZERS[values["optimizer"]].items():
        if values[name] is None:
            values[name] = usual
    config = TrainConfig(**values)
    check(config)
    return config


def without(flag: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments without one flag that takes a value."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != flag and not argument.startswith(f"{flag}="):
            kept.append(argument)
        skip = argument == flag
    return kept


def arguments_of(config: TrainConfig) -> list[str]:
    """Return the command line that gives this configuration, without defaults."""
    usual = {**TrainConfig().plain(), **OPTIMIZERS[config.optimizer]}
    found = []
    for name, value in config.plain().items():
        if value != usual[name]:
            given = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            found += [f"--{name.replace('_', '-')}", *([] if value is True else [given])]
    return found


def train_parser() -> Parser:
    """Return the parser of train/main.py."""
    parser = Parser(
        prog="train/main.py",
        usage="python train/main.py [flags]",
        description="Train a model on one or many ranks, exactly.",
        epilog=EXAMPLES,
    )
    add_data_flags(parser)
    _add_training_flags(parser)
    _add_optimizer_flags(parser)
    _add_saving_flags(parser)
    add_start_flags(parser).add_argument(
        "--spawn", type=_at_least(1), metavar="N", help="start N ranks on this machine, without torchrun"
    )
    return parser


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `DataConfig`."""
    default = DataConfig()
    flags = parser.add_argument_group("data")
    flags.add_argument(
        "--data",
        default=default.data,
        metavar="DATA",
        help="digits (the default), cifar10, mnist, folder:PATH (PATH/train/<class>/* and PATH/test/..., or "
        "one level of classes), fake:N, or file.py:factory, which returns (train, test)",
    )
    flags.add_argument(
        "--data-root",
        default=default.data_root,
        metavar="DIR",
        help="where cifar10 and mnist are stored (data)",
    )
    flags.add_argument("--download", action="store_true", help="download cifar10 or mnist if it is missing")
    flags.add_argument(
        "--mean",
        type=_numbers,
        metavar="M,M,M",
        help="subtracted from each channel in [0, 1] (colour images: 0.485,0.456,0.406; others: none)",
    )
    flags.add_argument(
        "--std", type=_numbers, metavar="S,S,S", help="each channel is then divided by it (0.229,0.224,0.225)"
    )
    flags.add_argument("--resize", type=_at_least(1), metavar="N", help="resize a folder's images to N by N")


def add_start_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags about ranks, and return their group."""
    default = TrainConfig()
    flags = parser.add_argument_group("ranks")
    flags.add_argument(
        "--workers",
        type=_at_least(0),
        default=default.workers,
        metavar="N",
        help="processes that load data, per rank (0: the rank itself)",
    )
    flags.add_argument(
        "--backend",
        choices=BACKENDS,
        default=default.backend,
        help="auto: nccl if each rank has a GPU, otherwise gloo on the CPU",
    )
    flags.add_argument(
        "--timeout",
        type=_number(above=0),
        default=default.timeout,
        metavar="SECONDS",
        help=f"how long a rank waits for the others ({default.timeout:.0f})",
    )
    return flags


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    default = TrainConfig()
    add = parser.add_argument_group("training").add_argument
    add(
        "--model",
        default=default.model,
        metavar="MODEL",
        help="simple-cnn (the default), resnet20, torchvision:NAME, or file.py:factory",
    )
    add(
        "--epochs",
        type=_at_least(1),
        default=default.epochs,
        metavar="N",
        help=f"passes over the training samples ({default.epochs})",
    )
    add(
        "--batch-size",
        type=_at_least(1),
        default=default.batch_size,
        metavar="N",
        help=f"samples per optimizer step over all ranks ({default.batch_size})",
    )
    add(
        "--accumulate",
        type=_at_least(1),
        default=default.accumulate,
        metavar="N",
        help="take each rank's share of the batch in N passes: the same training in less memory (1)",
    )
    add("--drop-last", action="store_true", help="leave out the short batch that ends an epoch")
    add(
        "--batchnorm",
        choices=BATCHNORMS,
        default=default.batchnorm,
        help="plain (the default): normalise by each rank's samples, keep rank 0's statistics; sync: by all "
        "ranks' samples; pooled: as plain, but with the running statistics of all ranks' samples",
    )
    add(
        "--seed",
        type=_at_least(0),
        default=default.seed,
        metavar="N",
        help="seeds weights, dropout and the order of samples (0)",
    )
    add("--deterministic", action="store_true", help="use only algorithms that give the same bits each time")


def _add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    default = TrainConfig()
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=tuple(OPTIMIZERS), default=default.optimizer, help="sgd by default")
    add("--lr", type=_number(above=0), metavar="X", help="learning rate (sgd 0.1, adamw 0.001)")
    add("--momentum", type=_number(least=0, below=1), metavar="X", help="for sgd (0.9)")
    add("--weight-decay", type=_number(least=0), metavar="X", help="sgd 0.0001, adamw 0.01")
    add(
        "--scheduler",
        choices=("none", "cosine", "step"),
        default=default.scheduler,
        help="learning rate schedule: cosine by default; step divides it by ten after half and after three "
        "quarters of the epochs",
    )
    add(
        "--warmup",
        type=_every(least=0),
        default=default.warmup,
        metavar="N[steps|epochs]",
        help="raise the learning rate from zero over this many (0)",
    )


def _add_saving_flags(parser: argparse.ArgumentParser) -> None:
    default = TrainConfig()
    add = parser.add_argument_group("saving").add_argument
    add("--out", metavar="DIR", help="for last.pt, best.pt and log.jsonl (runs/<time>)")
    add(
        "--save-every",
        type=_every(least=1),
        default=default.save_every,
        metavar="N[steps|epochs]",
        help="how often to write last.pt; in epochs by default (1)",
    )
    add(
        "--keep",
        type=_at_least(0),
        default=default.keep,
        metavar="K",
        help="also keep the last K of them, as step-<number>.pt (0)",
    )
    add(
        "--resume",
        nargs="?",
        const="auto",
        metavar="auto|PATH",
        help="continue from this checkpoint; auto: from last.pt in --out, if it exists",
    )
    add("--force", action="store_true", help="start over in a folder that holds a run, and overwrite it")


# ---- flag values ---------------------------------------------------------------------------------------


def _at_least(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return convert


def _number(
    *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf
) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (above < value < below and value >= least):
            raise argparse.ArgumentTypeError(f"{text} is out of range")
        return value

    return convert


def _numbers(text: str) -> tuple[float, ...]:
    convert = _number()
    return tuple(convert(part) for part in text.split(","))


def _every(least: int) -> Callable[[str], Every]:
    def convert(text: str) -> Every:
        for unit in ("steps", "epochs"):
            if text.endswith(unit):
                return Every(_at_least(least)(text.removesuffix(unit)), unit)
        return Every(_at_least(least)(text), "epochs")

    return convert
