"""How many threads a rank computes with: ranks × threads are no more than the cores that there are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ckpttool.distributed import processes
from tests.ranks.programs import ROOT, TORCHRUN
from train.launch import program

TELLS = """
import os, sys, torch
from train.launch import program
program.set_threads()
open(sys.argv[1] + os.environ.get("RANK", "0"), "w").write(str(torch.get_num_threads()))
"""


def cgroup(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/../other\n", {"cpu.max": "100000 100000\n"}, 1.0),
        ("4:cpu,cpuacct:/a\n0::/\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n"}, None),
        (
            "4:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/\n", {"cpu.max": "odd\n"}, None),
        ("0::/\n", {"cpu.max": "100 0\n"}, None),
        ("", {}, None),
    ],
)
def test_the_quota_of_a_control_group_is_read(tmp_path, groups, files, cores):
    (tmp_path / "of_process").write_text(groups)
    root = cgroup(tmp_path / "cgroup", files)
    assert processes.quota(str(tmp_path / "of_process"), str(root)) == cores


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.9, 2), (0.5, 1), (64.0, 8)])
def test_the_cores_are_those_of_the_affinity_and_of_the_quota(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(processes, "quota", lambda: quota)
    assert processes.usable_cores() == cores


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 12),
        ({"LOCAL_WORLD_SIZE": "5"}, 2),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
        ({"OMP_NUM_THREADS": "7"}, None),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, None),
        ({"MKL_NUM_THREADS": "3"}, None),
    ],
)
def test_a_rank_takes_its_part_of_the_cores_unless_the_user_has_said_how_many(
    monkeypatch, environment, threads
):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(program, "usable_cores", lambda: 12)
    assert program.threads() == threads


@pytest.mark.parametrize(("given", "expected"), [({}, 3), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_torchruns_default_of_one_thread_is_told_from_the_users(tmp_path, given, expected):
    """Both reach the rank as OMP_NUM_THREADS=1."""
    (tmp_path / "tells.py").write_text(
        "import ckpttool.distributed.processes as p; p.usable_cores = lambda: 6\n" + TELLS
    )
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [*TORCHRUN, "2", str(tmp_path / "tells.py"), f"{tmp_path}/threads"]
    subprocess.run(
        command, cwd=ROOT, env={**inherited, **given}, check=True, timeout=100, capture_output=True
    )
    assert [(tmp_path / f"threads{rank}").read_text() for rank in range(2)] == [str(expected)] * 2
