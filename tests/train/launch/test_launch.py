"""The ways to start a run, in processes of their own; whose modules they find; their threads."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpttool.distributed import observer
from ckpttool.distributed.group import Place, find_place, process_group
from tests.ranks.programs import OWN_DATA, ROOT, TINY, TORCHRUN, start
from tests.support.run_log import epochs_of
from train import main
from train.launch import program

WAYS = {
    "torchrun by path": ([*TORCHRUN, "2", "train/main.py"], 2),
    "torchrun by module": ([*TORCHRUN, "1", "-m", "train.main"], 1),
    "python": ([sys.executable, "train/main.py"], 1),
    "spawn": ([sys.executable, "train/main.py", "--spawn", "2"], 2),
    "torchrun anew": ([*TORCHRUN, "2", "train/main.py"], 2),  # not as a fork, and so are its ranks
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory) -> Callable[[str], Any]:
    """Return a function that starts the same tiny training in a way, once."""

    @functools.cache
    def run(way: str) -> Any:
        (command, ranks), folder = WAYS[way], tmp_path_factory.mktemp("run")
        anew = way in ("torchrun anew", "python")
        return start([*command, *TINY, "--out", str(folder)], anew=anew), folder, ranks

    return run


@pytest.mark.covered(lambda way: way == "torchrun anew")
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_start_succeeds_with_an_empty_stderr(run_of, way):
    done, folder, ranks = run_of(way)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(" 1/1 ") == 1  # rank 0 alone speaks
    assert f"ranks   {ranks} on cpu (gloo)" in done.stdout
    assert sorted(os.listdir(folder)) == ["best.pt", "config.toml", "last.pt", "log.jsonl"]
    assert max(map(len, done.stdout.replace(str(folder), "runs/x").splitlines())) <= 80


@pytest.mark.covered(lambda way: way == "torchrun anew")
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_start_give_the_same_training(run_of, way):
    folders = [run_of(name)[1] for name in (way, "torchrun by path")]
    model, expected = (torch.load(folder / "last.pt", weights_only=True)["model"] for folder in folders)
    assert list(model) == list(expected)
    assert all(name.startswith("module.") for name in model)
    assert all(torch.allclose(model[name], value, atol=1e-6) for name, value in expected.items())
    (entry,), (wanted,) = map(epochs_of, folders)
    assert set(entry) >= {"epoch", "loss", "accuracy", "correct", "samples", "seconds"}
    assert entry["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    assert (entry["epoch"], entry["samples"]) == (1, 2)


def test_the_commands_proposed_by_a_run_work_when_pasted(run_of, tmp_path):
    done, _, _ = run_of("python")
    proposed = done.stdout.split("next:\n")[1].replace("\\\n", "").splitlines()
    assert len(proposed) == 2
    for line in proposed:
        name, *rest = line.split()
        program = ["-m", name, *rest] if name == "ckpttool" else [str(ROOT / rest[0]), *rest[1:]]
        pasted = start([sys.executable, *program], cwd=tmp_path)
        assert pasted.returncode == 0, pasted.stderr
    assert "of 2 correct" in pasted.stdout


# ---- a user's own modules, whatever their names --------------------------------------------------------

NAMES = sorted(
    path.stem
    for path in (ROOT / "train").iterdir()
    if (path.suffix == ".py" or any(path.glob("*.py"))) and path.stem != "__init__"
)
OWN = """
import importlib, torch
from torch.utils.data import Dataset

NAMES = {names!r}

def checked():
    for name in NAMES:
        assert importlib.import_module(name).WHOSE == "the user's", name

class Samples(Dataset):
    classes = ["a", "b"]
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info():
            import later  # for the first time, in a process that loads data
            assert later.WHOSE == "the user's"
            checked()
        return torch.full((3,), float(index)), index % 2

def data():
    checked()
    return Samples(), Samples()

def model(num_classes):
    checked()
    return torch.nn.Linear(3, num_classes)
"""


@pytest.mark.parametrize(("where", "named", "ranks"), [
    ("next to own.py", "file", []),
    ("next to own.py", "module", []),
    # as the library `evaluate` may be
    pytest.param("installed", "file", ["--spawn", "2"], marks=pytest.mark.long),
])  # fmt: skip
def test_a_user_s_modules_are_found_before_the_trainer_s(tmp_path, where, named, ranks):
    assert {"data", "config", "model", "tasks", "log", "run", "main", "evaluate", "plot"} <= set(NAMES)
    (tmp_path / "own.py").write_text(OWN.format(names=NAMES))
    folder = tmp_path / "installed" if where == "installed" else tmp_path
    folder.mkdir(exist_ok=True)
    for path in (tmp_path / "later.py", *(folder / f"{name}.py" for name in NAMES)):
        path.write_text('WHOSE = "the user\'s"\n')
    spec = f"{tmp_path}/own.py" if named == "file" else "own"
    own_code = ["--data", f"{spec}:data", "--model", f"{spec}:model", "--workers", "1", *ranks]
    flags = ["--batch-size", "4", "--epochs", "1", "--out", "run"]
    for script, *given in (["main.py", *flags], ["evaluate.py", "run/last.pt"]):
        command = [sys.executable, str(ROOT / "train" / script), *given, *own_code]
        # A rank that is a fork of its launcher would take the trainer's folder off the path no second time.
        done = start(command, tmp_path, anew=bool(ranks), PYTHONPATH=str(folder))
        assert done.returncode == 0, done.stderr


# ---- what must not matter ------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["main.py", "evaluate.py", "plot.py"])
def test_a_clone_runs_its_own_packages_whichever_are_installed(tmp_path, program):
    for name in ("ckpttool", "train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of another clone')")
    command = [sys.executable, f"{ROOT}/train/{program}", "--help"]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("command", "said"), [
    ("main.py", "torch is not installed"),
    ("evaluate.py x.pt --model simple-cnn", "torch is not installed"),
    ("plot.py run -o run.png", "train/plot.py needs matplotlib, which is not installed"),
])  # fmt: skip
def test_a_clone_that_is_not_installed_says_what_is_missing(command, said):
    script, *arguments = command.split()
    without_packages = [sys.executable, "-S", f"{ROOT}/train/{script}", *arguments]
    done = subprocess.run(without_packages, env={}, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.partition(" (")[0]) == (2, f"error: {said}")
    assert "in a clone of ckpttool: pip install -e" in line


def test_worker_processes_change_nothing(tmp_path):
    (tmp_path / "own.py").write_text(OWN_DATA)
    saved = []
    for workers in ("0", "2"):
        out = tmp_path / workers
        flags = ["--epochs", "2", "--batch-size", "4", "--workers", workers, "--out", str(out)]
        assert main.main(["--data", f"{tmp_path}/own.py:pair", *flags]) == 0
        saved.append(torch.load(out / "last.pt", weights_only=True)["model"])
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_deterministic_makes_the_settings_that_torch_requires(monkeypatch, tmp_path):
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


PLACES = [
    ("auto", 0, "0 of 1", ("gloo", "cpu")),
    ("auto", 2, "1 of 2", ("nccl", "cuda:1")),
    ("auto", 1, "1 of 2", ("gloo", "cpu")),
    ("gloo", 4, "1 of 2", ("gloo", "cpu")),
    ("nccl", 4, "3 of 4", ("nccl", "cuda:3")),
]


@pytest.mark.parametrize(("backend", "gpus", "local", "expected"), PLACES)
def test_backend_and_device_depend_on_the_gpus(monkeypatch, backend, gpus, local, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local.split(" of "), strict=True):
        monkeypatch.setenv(name, value)
    place = find_place(backend)
    assert (place.backend, str(place.device)) == expected


def test_one_process_has_a_process_group_without_torchrun_or_a_port(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with process_group(Place(0, 1, "gloo", torch.device("cpu")), timeout=5):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert not dist.is_initialized()


# ---- how many threads a rank computes with -------------------------------------------------------------


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
    assert observer.quota(str(tmp_path / "of_process"), str(tmp_path / "root")) == cores


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.9, 2), (0.5, 1), (64.0, 8)])
def test_the_cores_are_those_of_the_affinity_and_of_the_quota(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(observer, "quota", lambda: quota)
    assert observer.usable_cores() == cores


VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
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
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
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
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [*TORCHRUN, "2", str(tmp_path / "tells.py"), f"{tmp_path}/threads"]
    subprocess.run(command, cwd=ROOT, env=inherited | given, check=True, timeout=100, capture_output=True)
    assert [(tmp_path / f"threads{rank}").read_text() for rank in range(2)] == threads


@pytest.mark.parametrize(("flags", "said"), [
    (["--lr", "x"], "error: argument --lr: 'x' is not a number (train/main.py --help lists the flags)"),
    (["--data", "{own}:data"], "error: --data {own}:data: training sample 7 can't be read: ValueError: odd"),
])  # fmt: skip
def test_under_torchrun_the_error_is_also_the_last_that_is_said(tmp_path, flags, said):
    """Below torchrun's own thirty lines; of the rank that failed first."""
    code = "import torch\nfrom torch.utils.data import TensorDataset\nclass Own(TensorDataset):\n"
    code += "    def __getitem__(self, at):\n        if at == 7:\n            raise ValueError('odd')\n"
    code += "        return super().__getitem__(at)\n"
    (tmp_path / "own.py").write_text(
        f"{code}data = lambda: Own(torch.rand(30, 1, 8, 8), torch.arange(30) % 2)\n"
    )
    given = [flag.format(own=tmp_path / "own.py") for flag in flags]
    done = start([*TORCHRUN, "2", "train/main.py", *given, "--out", f"{tmp_path}/run"])
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    *_, last, border = done.stderr.splitlines()
    assert border.strip("=") == "" and said.format(own=tmp_path / "own.py") in last
