"""The process group of a script: it leaves nothing behind, and another one alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ckpttool.distributed import find_place, process_group, world_size
from ckpttool.errors import UsageFault


def test_a_script_without_a_launcher_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with process_group(find_place("gloo")) as place:
        assert (place.rank, place.world_size, str(place.device)) == (0, 1, "cpu")
        assert dist.is_initialized()
    assert not dist.is_initialized()


def second(rank: int, size: int) -> int:
    with pytest.raises(UsageFault, match="already has a process group"), process_group():
        pass
    return world_size()


def test_a_group_that_exists_is_refused_and_left_whole(run_ranks: Any) -> None:
    assert run_ranks(2, second) == [2, 2]
