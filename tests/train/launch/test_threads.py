"""How many threads a rank computes with: ranks × threads are no more than the cores that there are."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
import torch

from ckpttool.distributed import processes
from tests.ranks.programs import ROOT, TORCHRUN
from train.launch import program

TELLS = """
import os, sys
from ckpttool.distributed import processes
processes.usable_cores = lambda: 6
from train.launch import program
threads = program.threads()
assert "torch" not in sys.modules  # which takes seconds
if os.environ["RANK"] == "0":  # the others would only repeat it
    program.set_threads()
    import torch
    threads = f"{threads} {torch.get_num_threads()}"
open(sys.argv[1] + os.environ["RANK"], "w").write(f"{threads}")
"""

# The group of a process, the files of groups, and the cores that they leave.
OLD, QUOTA, PERIOD = "4:cpu,cpuacct:/a\n0::/\n", "cpu.cfs_quota_us", "cpu.cfs_period_us"
GROUPS: list[tuple[str, dict[str, str], float | None]] = [
    ("0::/\n", {}, None),
    ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
    ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
    ("0::/../other\n", {"cpu.max": "100000 100000\n"}, 1.0),
    (OLD, {f"cpu,cpuacct/a/{QUOTA}": "50000\n"}, None),
    (OLD, {f"cpu,cpuacct/a/{QUOTA}": "50000\n", f"cpu,cpuacct/a/{PERIOD}": "100000\n"}, 0.5),
    ("1:cpu:/\n", {f"cpu/{QUOTA}": "-1\n", f"cpu/{PERIOD}": "100000\n"}, None),
    ("0::/\n", {"cpu.max": "odd\n"}, None),
    ("0::/\n", {"cpu.max": "100 0\n"}, None),
    ("", {}, None),
]


@pytest.mark.parametrize(("groups", "files", "cores"), GROUPS)
def test_the_quota_of_a_control_group_is_read(tmp_path, groups, files, cores):
    for name, text in {
        "of_process": groups,
        **{f"root/{name}": text for name, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processes.quota(str(tmp_path / "of_process"), str(tmp_path / "root")) == cores


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.9, 2), (0.5, 1), (64.0, 8)])
def test_the_cores_are_those_of_the_affinity_and_of_the_quota(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(processes, "quota", lambda: quota)
    assert processes.usable_cores() == cores


NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
ENVIRONMENTS: list[tuple[dict[str, str], int | None]] = [
    ({}, 12),
    ({"LOCAL_WORLD_SIZE": "5"}, 2),
    ({"LOCAL_WORLD_SIZE": "16"}, 1),
    ({"OMP_NUM_THREADS": "7"}, None),
    ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, None),
    ({"MKL_NUM_THREADS": "3"}, None),
]


@pytest.mark.parametrize(("given", "threads"), ENVIRONMENTS)
def test_a_rank_takes_its_part_of_the_cores_unless_the_user_has_said_how_many(monkeypatch, given, threads):
    taken: list[Any] = []
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", {**others, **given})
    monkeypatch.setattr(program, "usable_cores", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    program.set_threads()
    assert (program.threads(), taken) == (threads, [threads] * (threads is not None))


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "threads"), [({}, ["3 3", "3"]), ({"OMP_NUM_THREADS": "1"}, ["None 1", "None"])]
)
def test_torchruns_default_of_one_thread_is_told_from_the_users(tmp_path, given, threads):
    """Both reach the rank as OMP_NUM_THREADS=1."""
    (tmp_path / "tells.py").write_text(TELLS)
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [*TORCHRUN, "2", str(tmp_path / "tells.py"), f"{tmp_path}/threads"]
    subprocess.run(command, cwd=ROOT, env=inherited | given, check=True, timeout=100, capture_output=True)
    assert [(tmp_path / f"threads{rank}").read_text() for rank in range(2)] == threads
