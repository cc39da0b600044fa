"""What commands need: neither torch nor safetensors where they can do without, and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.core.cli import group
from ckpttool.errors import install
from ckpttool.rooms import ROOMS
from tests.support.comparing import saved_predictions
from tests.support.crafting import dict_of, storage, tensor, torch_zip
from tests.support.every_format import INPUTS
from tests.support.running import MOST, ROOT, peak

HIDDEN = ("torch", "torchvision", "safetensors", "sklearn")

RUN_ALL = """
import contextlib, io, json, os, sys
from ckpttool.core import cli
for folder, words in json.load(sys.stdin):
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(words)
    if code:
        print(" ".join(words), "exits", code, out.getvalue(), err.getvalue())
"""

NEED_NO_TORCH = """
inspect IN
inspect IN --stats
inspect IN --tensors --json
digest IN
verify IN
verify IN --against IN
scan IN --allow * --allow _io.StringIO
diff IN IN --rtol 0.1
slim IN slim.pt
add-prefix IN wrapped.safetensors
strip-prefix wrapped.safetensors plain.pt
rename-keys IN renamed.safetensors --map fc=head
average IN IN mean.pt --weights 1,2
average IN slerp.pt --method slerp --base IN
average IN ties.pt --method ties --base IN --density 0.5
convert IN copy.pt
convert IN copy.safetensors --verify
convert IN half.safetensors --dtype bf16
convert IN full.safetensors --full
convert full.safetensors back.pt
convert IN shards/ --shard-size 1kB
convert IN torch-shards/ --to torch-sharded
convert-batchnorm old.pt sync.safetensors --to sync
convert-batchnorm old.pt older.pt pooled.pt --counts 2,2 --keep-first *
gather-metrics rank0.safetensors rank1.safetensors --out metrics.json
"""

NEED_TORCH = {
    "reload in.pt --model torchvision:resnet18": "torch",
    "doctor in.pt --model torchvision:resnet18": "torch",
    "convert in.pt folder/ --to dcp": "torch",
    "optimizer in.pt out.pt --to names --model torchvision:resnet18": "train",
    "convert-batchnorm in.pt out.pt --to sync --model torchvision:resnet18": "torch",
    "optimizer in.pt o.pt --to names --model net.py:resnet18": "train",
}


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the libraries of HIDDEN are as if they were not installed."""
    stubs = tmp_path_factory.mktemp("stubs")
    for name in HIDDEN:
        missing = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')"
        (stubs / f"{name}.py").write_text(missing)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(stubs), str(ROOT)])}


def run(env: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    how = [] if arguments[0] == "-c" else ["-m", "ckpttool"]
    command = [sys.executable, *how, *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)


def failures(env: dict[str, str], commands: Iterable[tuple[Path, str]]) -> str:
    """Run commands, each in a folder, one after another in one process; say which failed, and how."""
    words = json.dumps([(str(folder), command.split()) for folder, command in commands])
    given: Any = {"env": env, "input": words, "capture_output": True, "text": True}
    ran = subprocess.run([sys.executable, "-c", RUN_ALL], check=False, **given)
    return ran.stdout + ran.stderr


def written(folder: Path) -> Path:
    """Write files of every kind that commands take beside the checkpoint itself."""
    folder.mkdir(exist_ok=True)
    norm = torch.nn.BatchNorm1d(2).state_dict()
    del norm["num_batches_tracked"]
    torch.save(norm, folder / "old.pt")
    torch.save({name: values + 1 for name, values in norm.items()}, folder / "older.pt")
    saved_predictions(folder, 2, 5)
    return folder


def test_what_describes_the_tool_needs_no_torch(without_torch: dict[str, str], tmp_path: Path) -> None:
    commands = [*(f"schema {name}" for name in group.commands), "skill"]
    assert failures(without_torch, [(tmp_path, command) for command in commands]) == ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


@pytest.mark.parametrize("name", HIDDEN)
def test_the_stubs_hide_the_library(name: str, without_torch: dict[str, str], tmp_path: Path) -> None:
    ran = run(without_torch, tmp_path, "-c", f"import {name}")
    assert f"No module named '{name}'" in ran.stderr


def test_commands_run_without_torch_on_every_format(without_torch: Any, tmp_path: Path) -> None:
    commands = []
    for number, kind in enumerate(INPUTS):
        folder = written(tmp_path / str(number))
        INPUTS[kind](folder / "in")
        commands += [(folder, command) for command in NEED_NO_TORCH.replace("IN", "in").strip().splitlines()]
        if kind in ("torch zip (since 1.6)", "torch legacy (before 1.6)", "safetensors `--full`"):
            commands += [(folder, "optimizer in named.pt --to names")]
            commands += [(folder, "optimizer named.pt again.pt --to indices")]
        elif kind == "DCP folder":
            commands += [(folder, "optimizer in again.pt --to indices")]
    assert not failures(without_torch, commands)


@pytest.mark.parametrize("command", NEED_TORCH)
def test_a_command_that_needs_torch_names_the_extra(command: str, without_torch: Any, folder: Path) -> None:
    (folder / "net.py").write_text("from torchvision.models import resnet18\n")
    torch.save({"model": torch.nn.BatchNorm1d(2).state_dict()}, folder / "in.pt")
    before = sorted(folder.glob("*.*"))
    ran = run(without_torch, folder, *command.split())
    message, hint = ran.stderr.splitlines()
    assert (ran.returncode, ran.stdout) == (2, "")
    where = "net.py:resnet18: " if "net.py" in command else ""
    assert message.startswith(f"error: {where}") and "torch" in message
    assert hint == f"hint: {install(NEED_TORCH[command])}"
    assert sorted(folder.glob("*.*")) == before


def test_with_json_the_extra_is_in_the_object(without_torch: dict[str, str], folder: Path) -> None:
    torch.save({"w": torch.ones(2)}, folder / "in.pt")
    ran = run(without_torch, folder, "reload", "in.pt", "--model", "torchvision:resnet18", "--json")
    error = json.loads(ran.stdout)["error"]
    assert error["kind"] == "not-installed"
    assert error["hint"] == install("torch")


def hiding(folder: Path, env: dict[str, str], *names: str) -> dict[str, str]:
    """Return an environment in which further modules must not be imported."""
    for name in names:
        (folder / f"{name}.py").write_text("raise AssertionError")
    return env | {"PYTHONPATH": os.pathsep.join([str(folder), env["PYTHONPATH"]])}


def test_help_and_versions_need_no_torch_numpy_or_wcwidth(without_torch: Any, tmp_path: Path) -> None:
    env = hiding(tmp_path, without_torch, "numpy", "wcwidth", "tqdm")
    commands = ["--help", *(f"{name} --help" for name in group.commands)]
    assert not failures(env, [(tmp_path, command) for command in commands])
    assert run(env, tmp_path, "--version").returncode == 0


MOVE_BYTES = """
inspect IN
digest IN
diff IN IN
slim IN slim.pt
strip-prefix IN OUT.safetensors
add-prefix IN OUT.pt
convert IN OUT/
"""


def test_help_imports_the_shell_and_the_rooms_commands_and_nothing_of_the_library() -> None:
    script = "from ckpttool.core import cli; cli.run(['--help']); import sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    found = [name for name in ran.stdout.split() if name.startswith("ckpttool.")]
    light = {"core", "core.cli", "core.lazy", "core.system", "core.words", "errors", "rooms", *ROOMS}
    light |= {f"{room}.command" for room in ROOMS}
    heavy = [name for name in found if name.removeprefix("ckpttool.") not in light]
    assert [name for name in heavy if not name.startswith("ckpttool.core.cli.")] == []


def test_moving_bytes_imports_no_numpy(without_torch: dict[str, str], tmp_path: Path) -> None:
    env = hiding(tmp_path, without_torch, "numpy")
    torch.save({"model": {"module.w": torch.ones(2)}}, tmp_path / "in.pt")
    commands = MOVE_BYTES.replace("IN", "in.pt").replace("OUT", "out").strip().splitlines()
    assert not failures(env, [(tmp_path, command) for command in commands])


def test_the_declared_dependencies_are_those_of_a_plain_install() -> None:
    tomllib: Any = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"ml_dtypes", "click", "numpy", "tomli", "tqdm", "wcwidth"}
    assert {name.partition(">")[0] for name in project["dependencies"]} == wanted


# Memory stays flat whatever the size: commands in processes of their own, by the kernel's figure.


def numbers(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix of zeros, so many bytes."""
    return torch.zeros(size // (2048 * dtype.itemsize), 2048, dtype=dtype)


STATES: dict[str, Callable[[int], Any]] = {
    "plain": lambda size: {"t": numbers(size)},
    "transposed": lambda size: {"t": numbers(size).t()},
    "channels last": lambda size: {
        "t": torch.zeros(size // (512 * 3 * 3 * 4), 512, 3, 3).to(memory_format=torch.channels_last)
    },
    "one row after another of a tall matrix": lambda size: {"t": torch.zeros(size // 16, 4).t()},
    "complex": lambda size: {"t": numbers(size, torch.complex64)},
    "conjugate": lambda size: {"t": numbers(size, torch.complex64).conj()},
    "conjugate, transposed": lambda size: {"t": numbers(size, torch.complex64).mH},
    "negative": lambda size: {"t": numbers(2 * size, torch.complex64).conj().imag},
    "pairs": lambda size: {"t.real": numbers(size // 2), "t.imag": numbers(size // 2)},
    "pairs, transposed": lambda size: {"t.real": numbers(size // 2).t(), "t.imag": numbers(size // 2).t()},
    "repeated": lambda size: {"t": torch.zeros(2048).expand(size // 8192, 2048)},
}

CONVERSIONS = [
    *(("transposed", ""), ("transposed", "--dtype bf16"), ("channels last", ""), ("conjugate", "")),
    *(("one row after another of a tall matrix", ""), ("conjugate, transposed", ""), ("negative", "")),
    *(("repeated", ""), ("plain", "--dtype bf16"), ("plain", "--dtype float64")),
    *(("complex", "--complex split"), ("conjugate", "--complex split")),
    *(("pairs", "--complex join"), ("pairs, transposed", "--complex join")),
]

COMBINED = [one for one in CONVERSIONS if ", " in one[0] or (one[0] == "conjugate" and one[1])]
COMBINED += [(state, "") for state in ("channels last", "negative", "conjugate", "repeated")]
COMBINED += [("pairs", "--complex join"), ("transposed", "--dtype bf16"), ("plain", "--dtype float64")]

SIZE = 96 << 20
"""Bytes of each tensor: half as much again as a command may take, to which Python adds 30 MB."""

NEEDS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
READING = ["verify in.pt", "digest in.pt", "diff in.pt in.pt", "verify in.pt --against in.pt"]


@pytest.fixture
def cleared(here: Path) -> Iterator[None]:
    """Remove large files, as the folders of the last runs are kept."""
    yield
    for file in here.iterdir():
        file.unlink()


@pytest.mark.covered(lambda state, options: (state, options) in COMBINED)
@NEEDS_PROC
@pytest.mark.usefixtures("cleared")
@pytest.mark.parametrize(("state", "options"), CONVERSIONS)
def test_a_conversion_takes_less_memory_than_the_tensor(state: str, options: str) -> None:
    torch.save(STATES[state](SIZE), "in.pt")
    assert peak("convert", "in.pt", "out.safetensors", *options.split()) <= MOST


# Each command, and twice each order of numbers
SOME_READING = {"transposed": READING[:2], "conjugate": READING[1:3], "repeated": READING[2:]}


@pytest.mark.covered(lambda state, commands: (state, commands) != ("transposed", SOME_READING["transposed"]))
@NEEDS_PROC
@pytest.mark.usefixtures("cleared")
@pytest.mark.parametrize(
    ("state", "commands"), [*SOME_READING.items(), *((state, READING) for state in SOME_READING)]
)
def test_reading_takes_less_memory_than_the_tensor(state: str, commands: list[str]) -> None:
    torch.save(STATES[state](SIZE), "in.pt")
    for command in commands:
        assert peak(*command.split()) <= MOST, command


@pytest.mark.long
@NEEDS_PROC
@pytest.mark.usefixtures("cleared")
def test_a_big_endian_file_takes_less_memory_than_the_tensor(here: Path) -> None:
    body = dict_of({"t": tensor(storage(SIZE // 4), (SIZE // 4,))})
    torch_zip(here / "in.pt", body, {"0": bytes(SIZE)}, byteorder="big")
    assert peak("convert", "in.pt", "out.safetensors") <= MOST
    assert peak("digest", "in.pt") <= MOST


@pytest.mark.covered(lambda command: "digest" in command)
@NEEDS_PROC
@pytest.mark.parametrize("command", READING)
def test_a_tensor_expanded_beyond_a_gibibyte_is_read_in_bounded_memory(command: str) -> None:
    torch.save({"t": torch.zeros(1000, dtype=torch.uint8).expand(1_100_000, 1000)}, "in.pt")
    assert peak(*command.split()) <= MOST


def test_loading_a_state_without_torch_names_the_extra(without_torch: dict[str, str], tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "in.pt")
    loading = "ckpttool.reload('in.pt', None)", "ckpttool.doctor('in.pt', 1)"
    for call in ("ckpttool.open('in.pt').state().load()", "ckpttool.skeletons().__enter__()", *loading):
        ran = run(without_torch, tmp_path, "-c", f"import ckpttool; {call}")
        assert "NeedsTorch: " in ran.stderr and install("torch") in ran.stderr
