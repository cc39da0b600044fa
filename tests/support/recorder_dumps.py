"""Dumps of torch's flight recorder, as NCCL's are: what some ranks called, in order."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class RecordedProgram:
    """What one rank called, in order."""

    def __init__(self, rank: int, groups: Mapping[str, Sequence[int]]) -> None:
        self.rank, self.groups, self.entries = rank, groups, list[dict[str, Any]]()
        self.numbers = dict.fromkeys(groups, 0)
        self.numbers_p2p = dict.fromkeys(groups, 0)

    def call(
        self,
        name: str = "all_reduce",
        sizes: Sequence[int] = (3, 4),
        state: str = "completed",
        group: str = "0",
        dtype: str = "Float",
    ) -> RecordedProgram:
        is_p2p = name.startswith(("send", "recv"))
        numbers = self.numbers_p2p if is_p2p else self.numbers
        numbers[group] += 1
        return self.put(name, sizes, state, group, dtype, is_p2p=is_p2p)

    def put(
        self, name: str, sizes: Sequence[int], state: str, group: str, dtype: str, *, is_p2p: bool
    ) -> RecordedProgram:
        self.entries.append(
            {
                "frames": [
                    {"name": "step", "filename": f"rank{self.rank}.py", "line": len(self.entries) + 1}
                ],
                "record_id": len(self.entries),
                "pg_id": int(group),
                "process_group": (group, "default_pg" if group == "0" else f"part {group}"),
                "collective_seq_id": self.numbers[group],
                "p2p_seq_id": self.numbers_p2p[group],
                "op_id": len(self.entries) + 1,
                "profiling_name": f"nccl:{name}",
                "time_created_ns": 1_700_000_000_000 + len(self.entries),
                "input_sizes": [] if name.startswith("recv") else [list(sizes)],
                "output_sizes": [] if name.startswith("send") else [list(sizes)],
                "input_dtypes": [] if name.startswith("recv") else [dtype],
                "output_dtypes": [] if name.startswith("send") else [dtype],
                "state": state,
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": is_p2p,
            }
        )
        return self

    @property
    def dump(self) -> dict[str, Any]:
        config = {
            name: {
                "name": name,
                "desc": "default_pg" if name == "0" else f"part {name}",
                "ranks": str([*ranks]),
            }
            for name, ranks in self.groups.items()
            if self.rank in ranks
        }
        return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": self.entries}


def programs(ranks: int, **groups: Sequence[int]) -> list[RecordedProgram]:
    every = {"0": range(ranks), **{name.removeprefix("g"): of for name, of in groups.items()}}
    return [RecordedProgram(rank, every) for rank in range(ranks)]


def write_dumps(folder: Path, made: Sequence[RecordedProgram]) -> list[str]:
    paths = []
    for each in made:
        paths.append(str(folder / f"fr_trace_rank_{each.rank}"))
        Path(paths[-1]).write_bytes(pickle.dumps(each.dump, protocol=2))
    return paths
