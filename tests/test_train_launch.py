"""How a run is started and how it ends: real processes, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpttool.errors import CkptToolError, RanksDiffer
from ckpttool.ranks import RankFailed
from train import launch, main
from train.engine import Trainer
from train.launch import Place

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TINY = ["--data", "fake:10", "--epochs", "1", "--batch-size", "4"]


def start(command: list[str], cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "CKPTTOOL_DEBUG"}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


WAYS = {
    "torchrun by path": ([*TORCHRUN, "2", "train/main.py"], 2),
    "torchrun by module": ([*TORCHRUN, "2", "-m", "train.main"], 2),
    "python": ([sys.executable, "train/main.py"], 1),
    "spawn": ([sys.executable, "train/main.py", "--spawn", "2"], 2),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    """The same tiny training started in each way."""
    made = {}
    for name, (command, ranks) in WAYS.items():
        folder = tmp_path_factory.mktemp("run")
        done = start([*command, *TINY, "--out", str(folder)])
        made[name] = (done, folder, ranks)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_start_ends_well_and_says_nothing_on_stderr(runs, way):
    done, folder, ranks = runs[way]
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count(" 1/1 ") == 1  # rank 0 alone speaks
    assert f"ranks   {ranks} on cpu (gloo)" in done.stdout
    assert sorted(os.listdir(folder)) == ["best.pt", "last.pt", "log.jsonl"]
    assert max(map(len, done.stdout.replace(str(folder), "runs/x").splitlines())) <= 80


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_start_are_one_program(runs, way):
    _, folder, _ = runs[way]
    _, reference, _ = runs["torchrun by path"]
    state, expected = (torch.load(f / "last.pt", weights_only=True) for f in (folder, reference))
    assert list(state["model"]) == list(expected["model"])
    assert all(name.startswith("module.") for name in state["model"])
    for name, value in expected["model"].items():
        assert torch.allclose(state["model"][name], value, atol=1e-6)
    entry, wanted = (json.loads((f / "log.jsonl").read_text()) for f in (folder, reference))
    assert set(entry) >= {"epoch", "loss", "accuracy", "correct", "samples", "seconds"}
    assert entry["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    assert (entry["epoch"], entry["samples"]) == (1, 2)


def test_the_commands_that_a_run_proposes_work_when_pasted(runs, tmp_path):
    done, _, _ = runs["python"]
    proposed = done.stdout.split("next:\n")[1].splitlines()
    assert len(proposed) == 2
    for line in proposed:
        program, *rest = line.split()
        if program == "ckpttool":
            command = [sys.executable, "-m", "ckpttool", *rest]
        else:
            command = [sys.executable, str(ROOT / rest[0]), *rest[1:]]
        pasted = start(command, cwd=tmp_path)
        assert pasted.returncode == 0, pasted.stderr
    assert "of 2 correct" in pasted.stdout


# ---- ends ----------------------------------------------------------------------------------------------


def test_under_torchrun_a_refusal_is_one_line_from_rank_0(tmp_path):
    done = start([*TORCHRUN, "2", "train/main.py", "--data", "fake:0", "--out", str(tmp_path / "x")])
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("error: --data fake:0") == 1
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "x").exists()


def test_spawn_ends_with_the_ranks_exit_code_and_their_one_line(tmp_path):
    (tmp_path / "last.pt").touch()
    done = start([sys.executable, "train/main.py", "--spawn", "2", *TINY, "--out", str(tmp_path)])
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}: holds a run already")
    assert done.stderr.count("\n") == 1


MODEL = """
import os, torch
from torch import nn

class Fails(nn.Linear):
    def forward(self, x):
        if torch.distributed.is_initialized() and torch.is_grad_enabled() and len(x) > 1:
            if os.environ["RANK"] == "1":
                {how}
        return super().forward(x.flatten(1))

def model():
    return Fails(3072, 10)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise ValueError('on purpose')", 1, "ValueError: on purpose"),
        ("os.kill(os.getpid(), 9)", 137, "error: rank 1 was ended by SIGKILL\n"),
    ],
    ids=["raises", "killed"],
)
def test_when_one_rank_fails_the_others_end_too_and_only_it_is_heard(tmp_path, how, code, said):
    (tmp_path / "own.py").write_text(MODEL.format(how=how))
    model = ["--model", f"{tmp_path}/own.py:model", "--out", str(tmp_path / "x")]
    began = time.monotonic()
    done = start([sys.executable, "train/main.py", "--spawn", "2", *TINY, *model])
    assert time.monotonic() - began < 60  # not the ten minutes of the process group's timeout
    assert done.returncode == code, done.stderr
    assert done.stderr.count(said) == 1
    assert done.stderr.count("Traceback") == said.startswith("ValueError")


ENDS = {
    "well": (None, 0),
    "refused": (CkptToolError("no"), 3),
    "differing": (RanksDiffer("rank 1 differs"), 1),
    "lost": (RuntimeError("Connection closed by peer [127.0.0.1]"), 1),
    "timed out": (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), 1),
    "interrupted": (KeyboardInterrupt(), 130),
}


def gloo_threads() -> list[str]:
    """Threads of process groups in this process. One that outlives its group can end it by SIGABRT."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("end", ENDS)
def test_the_process_group_is_destroyed_with_its_threads_on_every_way_out(monkeypatch, end, tmp_path, capsys):
    error, code = ENDS[end]
    monkeypatch.setattr(launch, "PATIENCE", 0)
    seen = []

    def train(job: main.Job) -> None:
        trainer = Trainer(job.config, job.data, job.model, job.place)
        seen.append(dist.is_initialized() and bool(gloo_threads()))
        if error is not None:
            raise error
        del trainer

    monkeypatch.setattr(main, "train", train)
    assert main.main([*TINY, "--out", str(tmp_path)]) == code
    assert seen == [True]
    assert not dist.is_initialized()
    assert gloo_threads() == []
    said = capsys.readouterr().err
    assert len(said.split("\n")) == {"well": 1, "interrupted": 3}.get(end, 2)


def test_after_a_fault_of_the_program_itself_too_which_is_not_hidden(monkeypatch, tmp_path):
    def train(job: main.Job) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(main, "train", train)
    with pytest.raises(ZeroDivisionError):
        main.main([*TINY, "--out", str(tmp_path)])
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("error", "rank", "waits"),
    [
        (CkptToolError("own"), "1", False),
        (RankFailed("of another"), "1", True),
        (RanksDiffer("all know"), "0", False),
        (RanksDiffer("all know"), "1", True),
    ],
)
def test_a_rank_that_only_echoes_waits_for_the_one_that_speaks(monkeypatch, error, rank, waits):
    slept: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(launch.time, "sleep", slept.append)

    def work(_: None) -> None:
        raise error

    launch.run_program(lambda: None, work)
    assert bool(slept) == waits


def test_ranks_that_do_not_find_each_other_say_so(monkeypatch, tmp_path, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert main.main([*TINY, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: rank 0 did not find the others: ")
    assert "MASTER_PORT" in said
    assert said.count("\n") == 1


# ---- what must not matter ------------------------------------------------------------------------------

OWN_DATA = """
import random, torch
from torch.utils.data import Dataset

class Augmented(Dataset):
    classes = list("ab")
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.rand(1, 8, 8) + random.random(), index % 2

def pair():
    return Augmented(), Augmented()
"""


def test_worker_processes_change_nothing(tmp_path):
    (tmp_path / "own.py").write_text(OWN_DATA)
    saved = []
    for workers in ("0", "2"):
        out = tmp_path / workers
        flags = ["--epochs", "2", "--batch-size", "4", "--workers", workers, "--out", str(out)]
        assert main.main(["--data", f"{tmp_path}/own.py:pair", *flags]) == 0
        saved.append(torch.load(out / "last.pt", weights_only=True)["model"])
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_deterministic_sets_what_torch_asks_for(monkeypatch, tmp_path):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(main, "train", lambda job: None)
    try:
        assert main.main([*TINY, "--deterministic", "--out", str(tmp_path)]) == 0
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


# ---- places --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "gpus", "local", "expected"),
    [
        ("auto", 0, ("0", "1"), ("gloo", "cpu")),
        ("auto", 2, ("1", "2"), ("nccl", "cuda:1")),
        ("auto", 1, ("1", "2"), ("gloo", "cpu")),
        ("gloo", 4, ("1", "2"), ("gloo", "cpu")),
        ("nccl", 4, ("3", "4"), ("nccl", "cuda:3")),
    ],
)
def test_backend_and_device_follow_what_is_there(monkeypatch, backend, gpus, local, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", local[0])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local[1])
    place = launch.find_place(backend)
    assert (place.backend, str(place.device)) == expected


def test_one_process_has_a_group_of_its_own_without_torchrun_or_a_port(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with launch.process_group(Place(0, 1, "gloo", torch.device("cpu")), timeout=5):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert not dist.is_initialized()
