"""docs/at-scale.md: what starts the parts does so as the page has it; the output is that of one process."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.running import ROOT, free_port

PAGE = (ROOT / "docs/at-scale.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w[^\n]*)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))
OUT = "model.safetensors"


def blocks(section: str) -> list[str]:
    """Return the blocks of code of a section of the page."""
    return re.findall(r"^```\w+\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def expected(large: tuple[Path, bytes], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return what one process writes of the page's command."""
    out = tmp_path_factory.mktemp("one") / OUT
    words = [sys.executable, "-m", "ckpttool", "convert", large[0], out, "--dtype", "bf16", "-q"]
    subprocess.run([*map(str, words)], check=True)
    return out.read_bytes()


@pytest.fixture(autouse=True)
def folder(here: Path, large: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with what the page converts and its programs on the path."""
    (here / "step-4000.pt").symlink_to(large[0])
    path = [os.path.dirname(sys.executable), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return here


def ran(*words: str, **variables: str) -> str:
    """Run a program to its end, and return what it prints."""
    environment = {**os.environ, **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_written(folder: Path, expected: bytes) -> None:
    """Compare the output, beside which nothing is left of the parts."""
    assert (folder / OUT).read_bytes() == expected
    assert not [name for name in os.listdir(folder) if "ckpttool" in name]


def test_every_engine_of_the_page_has_a_test() -> None:
    assert [*SECTIONS] == ["torchrun", "Slurm", "Kubernetes", "A shell", "Python", "Dask", "Ray"]


@pytest.mark.long
def test_torchrun_on_one_machine(folder: Path, expected: bytes) -> None:
    assert "wrote part" in ran("sh", "-c", blocks("torchrun")[0])
    assert_written(folder, expected)


@pytest.mark.long
def test_torchrun_on_two_machines(folder: Path, expected: bytes) -> None:
    line = blocks("torchrun")[1].replace("HOST:29500", f"127.0.0.1:{free_port()}")
    both = [subprocess.Popen(["sh", "-c", line], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [each.wait(200) for each in both] == [0, 0]
    assert_written(folder, expected)


def test_an_indexed_job_and_an_array_of_tasks(folder: Path, expected: bytes) -> None:
    """Each task has but its own number; those of Slurm come in the place of two pods that never ran."""
    (pod,), (task,) = blocks("Kubernetes"), blocks("Slurm")
    for index in (3, 1):
        ran("sh", "-c", pod, JOB_COMPLETION_INDEX=str(index))
    for number in (1, 3):
        assert not (folder / OUT).exists()
        ran("sh", "-c", task, SLURM_ARRAY_TASK_ID=str(number))
    assert_written(folder, expected)


@pytest.mark.parametrize("number", [0, 2, pytest.param(1, marks=pytest.mark.long)])
def test_a_shell(number: int, folder: Path, expected: bytes) -> None:
    ran("sh", "-c", blocks("A shell")[number])
    assert_written(folder, expected)


PROGRAMS = [
    pytest.param("Python", "ckpttool"),
    pytest.param("Dask", "distributed", marks=pytest.mark.long),
    pytest.param("Ray", "ray", marks=[pytest.mark.long, pytest.mark.timeout(600)]),
]


@pytest.mark.parametrize(("section", "needs"), PROGRAMS)
def test_a_program(section: str, needs: str, folder: Path, expected: bytes) -> None:
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    Path("program.py").write_text(blocks(section)[0])
    quiet = {"HOME": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    assert ran(sys.executable, "program.py", **quiet).splitlines()[-1].endswith(OUT)
    assert_written(folder, expected)


# Slurm's own daemons, which one machine can hold


DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
SETTINGS = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthInfo=socket={place}/munge/socket
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a cluster of this machine alone, with four processors, whatever it has."""
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    if absent := [name for name in DAEMONS if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(absent)} (Debian: munge slurmctld slurmd slurm-client)")
    if os.geteuid():
        pytest.skip("slurmd runs as root")
    place = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "state", "spool"):
        (place / name).mkdir()
    (place / "key").write_bytes(os.urandom(1024))
    (place / "key").chmod(0o400)
    settings = SETTINGS.format(host=socket.gethostname(), place=place, ports=(free_port(), free_port()))
    (place / "slurm.conf").write_text(settings)
    monkeypatch.setenv("SLURM_CONF", str(place / "slurm.conf"))
    files = {"socket": "munge/socket", "pid-file": "munged.pid", "log-file": "log", "seed-file": "seed"}
    given = [f"--{flag}={place / name}" for flag, name in {"key-file": "key", **files}.items()]
    try:
        ran("munged", "--force", *given)
        ran("slurmctld", "-c")
        ran("slurmd", "-c")
        deadline = time.monotonic() + 60
        while "idle" not in ran("sinfo", "--noheader", "--format=%t"):
            assert time.monotonic() < deadline, (place / "slurmctld.log").read_text()
            time.sleep(0.2)
        yield
    finally:
        for name in ("slurmd", "slurmctld", "munged"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
                os.kill(int((place / f"{name}.pid").read_text()), 15)


@pytest.mark.long
def test_an_array_of_slurms_own(slurm: None, folder: Path, expected: bytes) -> None:
    """The block is the job's file: as it stands, and with the tasks of an array that never ran."""
    Path("job.sh").write_text(blocks("Slurm")[0])
    ran("sbatch", "--wait", "job.sh")
    assert_written(folder, expected)
    (folder / OUT).unlink()
    for tasks in ("4,2", "1,3"):
        assert not (folder / OUT).exists()
        ran("sbatch", f"--array={tasks}", "--wait", "job.sh")
    assert_written(folder, expected)
