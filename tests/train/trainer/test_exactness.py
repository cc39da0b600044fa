"""docs/exactness.md: which trainings give the same bits, and how much others differ.

    python -m tests.train.trainer.test_exactness    # writes the page

The test runs it again, but resumes after the first step alone. Digests and the last digits differ between
machines and versions of torch, so what it compares is which digests of the page are equal, and whether
differences are below their bounds.
"""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ckpttool.distributed import collectives
from tests.ranks import runs
from tests.ranks.pool import Pool

PAGE = Path(__file__).parents[3] / "docs" / "exactness.md"
SIZES = (1, 2, 3, 4)
STOPS = (1, 3, 5)
FLOAT32, BF16 = 2e-6, 1e-2

Run = Callable[..., list[Any]]


class Row(NamedTuple):
    """A training of the table.

    Attributes:
        settings: of the trainer.
        make: the network.
        sizes: the numbers of ranks to run it on.
        bound: what the weights may differ by from the training on one rank, 0 for the same bits; None if they
            do not follow it.
        data: what it is trained on.
    """

    name: str
    settings: dict[str, Any]
    make: Any = runs.steady
    sizes: tuple[int, ...] = SIZES
    bound: float | None = FLOAT32
    data: Any = runs.images


GROUPS: dict[str, Any] = {
    "lr_scale": ("head=0.5",),
    "layer_decay": 0.8,
    "no_decay": ("stem",),
    "nesterov": True,
    "scheduler": "wsd",
    "min_lr": 0.01,
}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "momentum": 0.0, "betas": (0.8, 0.9), "eps": 0.01}
ADAMW["scheduler"] = "onecycle"
OWN: dict[str, Any] = {"optimizer": "tests.ranks.own_code:Smooth", "momentum": None, "weight_decay": None}
OWN["scheduler"] = "tests.ranks.own_code:halved"
LANGUAGE: dict[str, Any] = {"task": "language-model"}
BEST: dict[str, Any] = {"best": "few/loss", "keep_best": 2}
SHARD = {"shard": True, "shard_blocks": ("Block",)}

ROWS = [
    Row("plain", {}),
    Row("`--accumulate 2`", {"accumulate": 2}),
    Row("`--clip-norm 0.2`", {"clip_norm": 0.2}),
    Row("`--ema 0.7`", {"ema": 0.7}),
    Row("`--augment crop-flip`", {"augment": "crop-flip"}),
    Row("`--grad-checkpoint`", {"grad_checkpoint": True}),
    Row("`--zero`", {"zero": True}),
    Row("`--amp bf16`", {"amp": "bf16"}, bound=BF16),
    Row("`--lr-scale`, `--layer-decay`, `--no-decay`, `--nesterov`, wsd, `--min-lr`", GROUPS),
    Row("`--optimizer adamw --betas --eps`, onecycle", ADAMW),
    Row("`--optimizer muon`", {**ADAMW, "optimizer": "muon", "momentum": 0.9}, runs.deep, bound=BF16),
    Row("an optimizer and a schedule of one's own", OWN),
    Row("padded texts, by `collate`", {}, runs.of_texts, data=runs.texts),
    Row("a stream in two lanes, shuffled", {}, data=runs.streamed),
    Row("packed documents, by `--block-size`", LANGUAGE, runs.of_tokens, data=runs.documents),
    Row("`--also-test`, `--best`, `--keep-best`", BEST, data=runs.images_twice),
    Row("`--rank-share 1,1`", {"rank_share": (1, 1)}, sizes=(2,)),
    Row("`--rank-share 1,3`", {"rank_share": (1, 3)}, sizes=(2,)),
    Row("`--rank-share 2,10`", {"rank_share": (2, 10)}, sizes=(2,)),
    Row("BatchNorm, `--batchnorm sync`", {"batchnorm": "sync"}, runs.with_batchnorm),
    Row("BatchNorm and dropout, `--virtual-ranks 12`", {"virtual_ranks": 12}, runs.restless, bound=0.0),
    Row("BatchNorm, each rank's own", {}, runs.with_batchnorm, bound=None),
    Row("dropout", {}, runs.restless, bound=None),
    Row("`--shard`", SHARD),
    Row("`--shard --accumulate 2`", {**SHARD, "accumulate": 2}),
    Row("`--shard --clip-norm 0.2`", {**SHARD, "clip_norm": 0.2}),
    Row("`--shard --ema 0.7`", {**SHARD, "ema": 0.7}),
    Row("`--shard --grad-checkpoint`", {**SHARD, "grad_checkpoint": True}),
    Row("`--shard offload`", {**SHARD, "shard_offload": True}),
    Row("`--shard --amp bf16`", {**SHARD, "amp": "bf16"}, bound=BF16),
    Row("`--shard bf16`", {**SHARD, "shard_dtype": "bf16"}, bound=BF16),
    Row("`--shard --rank-share 1,3`", {**SHARD, "rank_share": (1, 3)}, sizes=(2,)),
    Row("`--shard 2x2`", {**SHARD, "mesh": "2x2"}, sizes=(4,)),
    Row("`--shard`, a stream in two lanes", SHARD, data=runs.streamed),
    Row("`--shard`, packed documents", {"shard": True, **LANGUAGE}, runs.of_tokens, data=runs.documents),
    Row("`--shard --lr-scale --layer-decay`", {**SHARD, **GROUPS}),
    Row("`--shard`, an optimizer and a schedule of one's own", {**SHARD, **OWN}),
    Row("`--shard --also-test --best`", {**SHARD, **BEST}, data=runs.images_twice),
    Row("`--shard`, padded texts", {"shard": True}, runs.of_texts, data=runs.texts),
    Row("BatchNorm, `--shard --batchnorm sync`", {**SHARD, "batchnorm": "sync"}, runs.with_batchnorm),
    Row("BatchNorm, each rank's own, `--shard`", SHARD, runs.with_batchnorm, bound=None),
    Row("dropout, `--shard`", SHARD, runs.restless, bound=None),
]

MOVED = ((1, 2), (2, 4), (4, 3), (3, 1))
"""Numbers of ranks before and after a resume."""


class Found(NamedTuple):
    """The results of one row: digests and differences from one rank by the number of ranks, and what differed
    after each resume."""

    digests: dict[int, str]
    differences: dict[int, float]
    resumed: dict[tuple[int, int], list[str]]


def measure(
    run_ranks: Run, row: Row, folder: str, alone: dict[str, Any] | None, stops: tuple[int, ...]
) -> Found:
    """Run a row of the table.

    Args:
        alone: the last checkpoint of the training on one rank, if this row has none of its own.
    """
    digests, differences, resumed = {}, {}, {}
    for size in row.sizes:
        arguments = row.make, folder, row.settings, stops, row.data
        last, different = run_ranks(size, runs.straight_and_resumed, *arguments)[0]
        alone = alone or last
        digests[size] = digest(last)
        differences[size] = runs.largest_difference(alone, last)
        resumed |= {(size, stop): names for stop, names in different.items()}
    return Found(digests, differences, resumed)


def digest(state: dict[str, Any]) -> str:
    """Return the first digits of the SHA-256 of a checkpoint's weights, and of their averages."""
    parts = {"model": state["model"], **state.get("ema", {}).get("averages", {})}
    flat = {**parts.pop("model"), **{f"average of {name}": value for name, value in parts.items()}}
    return str(collectives.digest_all(flat))[:8]


def moved(run_ranks: Run, folder: str) -> dict[tuple[int, int], float]:
    """Return what the weights differ by if a run stops on some ranks and continues on others."""
    found = {}
    for before, after in MOVED:
        whole, rest = Path(folder, f"{before}-straight"), Path(folder, f"{before}-to-{after}")
        runs.go_on(run_ranks, after, runs.steady, whole / "step-000002.pt", rest, {})
        found[before, after] = runs.largest_difference(*runs.ends(whole, rest))
    return found


def measure_all(
    run_ranks: Run, folder: str, stops: tuple[int, ...] = STOPS
) -> tuple[list[Found], dict[tuple[int, int], float]]:
    folders = [os.path.join(folder, str(number)) for number in range(len(ROWS))]
    first = measure(run_ranks, ROWS[0], folders[0], None, stops)
    alone = runs.read(Path(folders[0], "1-straight", "last.pt"))
    rest = [
        measure(run_ranks, row, own, None if 1 in row.sizes else alone, stops)
        for row, own in zip(ROWS[1:], folders[1:], strict=True)
    ]
    return [first, *rest], moved(run_ranks, folders[0])


# ---- the page -------------------------------------------------------------------------------------------

HEAD = """# What is exact

Generated by `python -m tests.train.trainer.test_exactness`; a test of `make long` checks it.

A small convolutional network (float32; 34 images, batches of 12) is trained for {steps} steps in 2 epochs,
on 1 to 4 ranks, on the CPU. Shown is the beginning of the SHA-256 of the final weights, and of their
averages with `--ema`. Equal digests are equal bits.

- **Resumed**: each run is also restarted from its checkpoints after steps {stops}: within an epoch, at its
  end, and in the next. The last checkpoint then equals the uninterrupted run's in every bit: weights,
  averages, optimizer, schedule, progress, random numbers.
- **Other ranks**: the gradient is that of the mean over the same batch, also with unequal shares. Sums are
  taken in another order, so the last digits differ, by at most what the column says.
- **Adam and AdamW** divide each gradient by its own size: where that is zero but for rounding, as of the bias
  of attention's keys, they make the rounding a whole step. Such a parameter differs; what the model computes
  does not.
"""

WHY = """
What does not follow one rank: with each rank's own BatchNorm, a rank normalises by its own samples, as
everywhere with DDP (`--batchnorm sync` normalises by all ranks'). With dropout, each rank draws its own
random numbers. Buffers that each pass changes by its samples are rank 0's; the trainer names them. bfloat16
has three digits, so another order of sums shows sooner.

With `--shard` gradients are summed in another order than by DDP, which shows from three ranks on. The norm
of `--clip-norm` is summed over the ranks' parts, and `--accumulate` adds passes after they were summed over
ranks. `--shard parts` changes no bit. Refused with `--shard` are `--zero`, `--virtual-ranks`,
`--find-unused`, `--rank-share auto`, `--every` and optimizers that need whole matrices (muon, adafactor,
rprop); with `--shard parts` `--prove-every`; and with `--shard bf16` BatchNorm.

## Continued on another number of ranks

| stopped after step 2 on | continued on | largest difference from the uninterrupted run | promised |
|---|---|---|---|
"""


NEVER = """
## What has never run

No machine with a GPU has run the trainer, so nothing above is known of GPUs. `make gpu` runs what is open,
and writes [gpu.md](gpu.md): NCCL; loading and copies through pinned memory; `--amp fp16` with its scaler (on
the CPU a test has all ranks skip a step for one rank's infinite gradient); `--compile` on a GPU, and with
`--shard`; asynchronous saves from a GPU; `--shard` with all its words over NCCL; fused
optimizers; torch's SyncBatchNorm. `--shard 2x4` and `--shard parts` have not run on several machines.
"""


def page(found: list[Found], on_others: dict[tuple[int, int], float]) -> str:
    """Return the page as text."""
    stops = f"{', '.join(map(str, STOPS[:-1]))} and {STOPS[-1]}"
    lines = [
        HEAD.format(steps=runs.STEPS, stops=stops),
        f"| | {' | '.join(ranks(size) for size in SIZES)} | resumed | from 1 rank at most | promised |",
        f"|---|{'---|' * (len(SIZES) + 3)}",
    ]
    for row, result in zip(ROWS, found, strict=True):
        digests = [f"`{result.digests[size]}`" if size in result.digests else "" for size in SIZES]
        equal = "equal" if not any(result.resumed.values()) else "**differs**"
        largest = f"{max(result.differences.values()):.1e}" if row.bound is not None else "not followed"
        promised = "" if row.bound is None else f"{row.bound:g}" if row.bound else "the same bits"
        lines.append(f"| {' | '.join([row.name, *digests, equal, largest, promised])} |")
    lines.append(WHY.rstrip("\n"))
    lines += [
        f"| {ranks(before)} | {ranks(after)} | {value:.1e} | {FLOAT32:g} |"
        for (before, after), value in on_others.items()
    ]
    lines.append(f"\nMeasured with {versions()}.\n{NEVER}")
    return "\n".join(lines)


def ranks(size: int) -> str:
    return f"{size} rank{'s' * (size != 1)}"


def versions() -> str:
    return f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread"


def relations(text: str) -> str:
    """Return a page without what differs between machines: digests become their number on the page."""
    numbers: dict[str, str] = {}
    text = re.sub(r"`[0-9a-f]{8}`", lambda each: numbers.setdefault(each[0], f"#{len(numbers)}"), text)
    text = re.sub(r"\d\.\de[+-]\d\d", "…", text)
    return re.sub(r"Measured with .*", "", text)


@pytest.fixture(scope="module")
def measured(run_ranks: Run, tmp_path_factory: Any) -> Any:
    return measure_all(run_ranks, str(tmp_path_factory.mktemp("exactness")), STOPS[:1])


@pytest.mark.long
def test_the_plain_training_is_the_same_on_other_ranks_and_after_a_resume(run_ranks, tmp_path):
    found = measure(run_ranks, ROWS[0], str(tmp_path), None, STOPS[:1])
    assert not any(found.resumed.values()), found.resumed
    assert max(found.differences.values()) <= FLOAT32


def long(test: Any) -> Any:
    return pytest.mark.long(pytest.mark.timeout(900)(test))


@long
def test_every_run_resumes_bit_for_bit_and_gives_what_one_rank_gives_within_the_promised_bounds(measured):
    found, on_others = measured
    for row, result in zip(ROWS, found, strict=True):
        assert len(result.resumed) == len(row.sizes)
        assert not any(result.resumed.values()), (row.name, result.resumed)
        if row.bound is not None:
            assert max(result.differences.values()) <= row.bound, (row.name, result.differences)
    assert max(on_others.values()) <= FLOAT32


@long
def test_what_saves_memory_and_equal_shares_give_the_bits_of_the_plain_run(measured):
    by_name = {row.name: result.digests for row, result in zip(ROWS, measured[0], strict=True)}
    assert by_name["`--grad-checkpoint`"] == by_name["`--zero`"] == by_name["plain"]
    assert by_name["`--rank-share 1,1`"][2] == by_name["plain"][2]


@long
def test_dividing_the_model_changes_no_bit_on_one_and_two_ranks_but_where_a_norm_clips_or_passes_add_up(
    measured,
):
    by_name = {row.name: result.digests for row, result in zip(ROWS, measured[0], strict=True)}
    for name in ("`--ema 0.7`", "`--amp bf16`", "dropout", "BatchNorm, each rank's own"):
        ours = by_name[f"`--shard {name[1:]}" if name.startswith("`") else f"{name}, `--shard`"]
        assert [ours[size] for size in (1, 2)] == [by_name[name][size] for size in (1, 2)]
    assert all(by_name["`--shard`"][size] == by_name["plain"][size] for size in (1, 2))
    same = "`--shard`", "`--shard --grad-checkpoint`", "`--shard offload`"
    assert by_name[same[0]] == by_name[same[1]] == by_name[same[2]]


@long
def test_the_page_says_what_was_measured(measured):
    assert relations(PAGE.read_text()) == relations(page(*measured)), (
        "run python -m tests.train.trainer.test_exactness"
    )


def main() -> None:
    pools = {size: Pool(size) for size in SIZES}

    def run_ranks(size: int, case: Any, *arguments: Any) -> list[Any]:
        return pools[size].run(case, *arguments)

    try:
        with tempfile.TemporaryDirectory() as folder:
            PAGE.write_text(page(*measure_all(run_ranks, folder)))
    finally:
        for pool in pools.values():
            pool.close()


if __name__ == "__main__":
    main()
