"""Predictions of two ranks joined over gloo: `gather_rows.py KIND COUNT REPEATS`.

KIND: `start` joins the group, makes the predictions and sends nothing: it is the baseline of the others.
`rows` is metrics.gather; `tensors` and `tuples` are all_gather_object of four tensors, and of a list with one
tuple per sample, then sorted; `epoch` scores COUNT images with ResNet-20, and gathers nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from ckpttool import metrics
from ckpttool.metrics.evaluating import Evaluator
from train.model.builtin import resnet20

RANKS = 2


def rows_of(rank: int, count: int) -> dict[str, torch.Tensor]:
    """Every second sample, as an evaluation leaves them."""
    index = torch.arange(rank, count, RANKS)
    return {"index": index, "prediction": index % 10, "label": index % 10, "loss": index.double() / count}


def joined(kind: str, rows: dict[str, torch.Tensor], count: int) -> Any:
    if kind == "rows":
        columns = {name: column for name, column in rows.items() if name != "index"}
        return metrics.gather(rows["index"], columns, samples=count)["loss"]
    held: list[Any] = [None] * RANKS
    if kind == "tensors":
        dist.all_gather_object(held, rows)
        order = torch.cat([one["index"] for one in held])
        whole = {name: torch.cat([one[name] for one in held]) for name in rows}
        return {name: torch.empty_like(column).scatter_(0, order, column) for name, column in whole.items()}[
            "loss"
        ]
    dist.all_gather_object(held, list(zip(*(column.tolist() for column in rows.values()), strict=True)))
    return torch.tensor([row[3] for row in sorted(row for one in held for row in one)], dtype=torch.float64)


def work(rank: int, kind: str, count: int, repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    work_in_group(rank, RANKS, kind, count, repeats)


def work_in_group(rank: int, _: int, kind: str, count: int, repeats: int) -> None:
    rows, model = rows_of(rank, count), resnet20().eval()
    if kind == "epoch":
        pictures = TensorDataset(torch.randn(count, 3, 32, 32), torch.arange(count) % 10)
        Evaluator(pictures).rows(model)
    elif kind != "start":
        for _ in range(repeats):
            found = joined(kind, rows, count)
        assert torch.equal(found, torch.arange(count).double() / count)
    dist.barrier()


def main(kind: str, count: int, repeats: int) -> None:
    """The second rank is a fork, so that torch is imported once."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(1, kind, count, repeats, folder)
                code = 0
            finally:
                os._exit(code)
        work(0, kind, count, repeats, folder)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit("the second rank failed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
