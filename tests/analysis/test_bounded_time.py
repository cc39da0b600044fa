"""Names of very many dots, and very many keys that look alike, take time in proportion to their length."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.analysis.compare import diff
from ckpttool.errors import CkptToolError
from ckpttool.transforms.optimizer.rekey import to_names

DOTS = 60_000
LONG = "a." * DOTS + "w"
ONE = torch.ones(2)


def deep() -> OrderedDict[str, torch.Tensor]:
    state = OrderedDict({LONG: ONE, "x": ONE})
    state._metadata = OrderedDict({"": {"version": 1}, LONG[:-2]: {"version": 1}})  # type: ignore[attr-defined]
    return state


OPTIMIZER = {"state": {0: {"exp_avg": ONE}}, "param_groups": [{"params": [0], "param_names": [LONG]}]}
ALIKE = {"model": {"w": ONE}, "epoch": 1, "seen": {10**100 + i: torch.ones(1) for i in range(6000)}}

WORK: dict[str, tuple[Any, Callable[[Any, Path], object]]] = {
    "compare": (deep(), lambda found, out: diff(found, ckpttool.add_prefix(found, "b.")[0])),
    "strip": (deep(), lambda found, out: ckpttool.strip_prefix(found, "a.")),
    "strip everywhere": (
        {"a." * 20_000 + "b." * 20_000 + "w": ONE, "x": ONE},
        lambda found, out: ckpttool.strip_prefix(found, "a.b.", repeat=True, anywhere=True),
    ),
    "optimizer": (
        {"model": {LONG: ONE}, "o": OPTIMIZER},
        lambda found, out: to_names(found, parameters={"w": (2,)}),
    ),
    "alike keys": (ALIKE, lambda found, out: diff(found, found)),
    "alike names in a file": (ALIKE, lambda found, out: ckpttool.save(found, out, full=True)),
}


@pytest.mark.parametrize("what", WORK)
def test_long_and_repeated_names_take_time_in_proportion(what: str, tmp_path: Path) -> None:
    tree, work = WORK[what]
    torch.save(tree, tmp_path / "in.pt")
    checkpoint = ckpttool.open(tmp_path / "in.pt")
    start = time.process_time()
    with suppress(CkptToolError):
        work(checkpoint, tmp_path / "out.safetensors")
    assert time.process_time() - start < 5
