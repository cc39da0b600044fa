"""Damaged and hostile files are refused or described in little time and memory; nothing is run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.errors import CkptToolError
from ckpttool.inspecting.summary import summarize
from tests.support import crafting
from tests.support.crafting import BYTES, TENSOR, attacks_of, call, dict_of, name, number, text, tuple_of
from tests.support.every_format import as_tar
from tests.support.running import ROOT

STATE = {"module.a": torch.arange(3, dtype=torch.float32), "module.b": torch.ones(2, dtype=torch.int64)}


def small_zip(path: Path, **given: Any) -> Path:
    torch.save({"model": STATE, "epoch": 1}, path, **given)
    return path


WRITERS: dict[str, Callable[[Path], object]] = {
    "zip": small_zip,
    "legacy": partial(small_zip, _use_new_zipfile_serialization=False),
    "safetensors": partial(save_file, STATE, metadata={"a": "b"}),
}


def use(path: Path) -> CkptToolError | None:
    """Do with a file what a command does; return the error that refused it, if one did."""
    try:
        with ckpttool.open(path) as checkpoint:
            summarize(checkpoint)
            for ending in (".pt", ".safetensors"):
                ckpttool.save(checkpoint, path.with_name(f"new{ending}"), dry_run=True)
    except CkptToolError as error:
        assert len(str(error)) < 1000
        return error
    return None


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_cut_at_any_byte_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    WRITERS[kind](path)
    assert use(path) is None
    for end in reversed(range(path.stat().st_size)):
        os.truncate(path, end)
        error = use(path)
        assert error is not None, f"cut after {end} bytes"
        assert error.exit_code == 3


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_with_any_byte_changed_is_used_or_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "changed.pt"
    WRITERS[kind](path)
    randomly = random.Random(0)
    with open(path, "r+b", buffering=0) as file:
        for at, byte in enumerate(path.read_bytes()):
            os.pwrite(file.fileno(), bytes([byte ^ randomly.randrange(1, 256)]), at)
            use(path)
            os.pwrite(file.fileno(), bytes([byte]), at)


ATTACKS = attacks_of(20_000)
"""Deeper than any limit of recursion; `make long` tries larger ones."""

COVERED = ["ONNX: 100,000 graphs", "GGUF: 100,000 empty arrays in an array"]
COVERED += ["dicts in dicts", "modules in modules", "ONNX: 100,000 nodes", "states in states"]
COVERED += ["a thousand copies of a list", "GGUF: 3,000 tensors of no values"]
COVERED += ["a pickle that compresses well", "NumPy: zeros that were packed"]
"""Others nest, repeat or compress in the same way."""


@pytest.mark.covered(lambda attack: attack in COVERED)
@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_ends_with_an_exit_code_and_no_traceback(attack: str, cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    ATTACKS[attack](path)
    for command in (
        ["inspect", path],
        ["inspect", path, "--json"],
        ["strip-prefix", path, tmp_path / "out.safetensors"],
        ["add-prefix", path, tmp_path / "out.pt"],
        ["strip-prefix", path, tmp_path / "dry.pt", "--dry-run", "--json"],
    ):
        ran = cli(*command)
        assert ran.code in (0, 1, 3), ran.err
        assert "Traceback" not in ran.err
        assert not any(c in ran.out + ran.err for c in "\x1b\x07\ud800\u202e")
        if "--json" in command:
            json.loads(ran.out)
    assert not [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


WATCHED = """
import contextlib, io, json, os, re, sys, time
from ckpttool.core import cli
def use(path):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli.run(["inspect", path, "--json"])
        cli.run(["strip-prefix", path, path + ".safetensors"])
        cli.run(["add-prefix", path, path + ".pt"])
def peak():
    "Most resident memory so far, in KiB. (That of getrusage begins with what the parent had.)"
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
first, *files = sys.argv[1:]
use(first)
found = {}
for path in files:
    before, started = peak(), time.process_time()
    use(path)
    found[os.path.basename(path)] = [peak() - before, time.process_time() - started]
print(json.dumps(found))
"""


def watched(folder: Path, most_bytes: float) -> dict[str, tuple[int, float]]:
    """By attack: the growth of the process in KiB, and CPU seconds."""
    small_zip(folder / "honest")
    files = [folder / "honest"]
    for index, write in enumerate(attacks_of().values()):
        path = folder / str(index)
        write(path)
        if path.stat().st_size <= most_bytes:
            files.append(path)
    command = [sys.executable, "-c", WATCHED, *files]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return {list(ATTACKS)[int(index)]: tuple(used) for index, used in json.loads(ran.stdout).items()}


@pytest.mark.long
def test_attacks_of_any_size_take_little_memory_and_time(tmp_path: Path) -> None:
    taken = watched(tmp_path, float("inf"))
    assert taken.keys() == ATTACKS.keys()
    assert {attack: used for attack, used in taken.items() if used[0] > 200 << 10 or used[1] > 15} == {}


def test_a_file_of_a_kilobyte_takes_less_than_100_mb_of_memory(tmp_path: Path) -> None:
    taken = watched(tmp_path, 2048)
    assert len(taken) > 10
    assert {attack: used for attack, used in taken.items() if used[0] > 100 << 10} == {}


# Nothing is run.


def harmful(canary: str) -> dict[str, bytes]:
    """Pickles that would make a file if they were loaded, one for each opcode that runs something."""
    shell, touch = text(f"touch {canary}"), text(f"open({canary!r}, 'w')")
    system, evaluate = name("os", "system"), name("builtins", "eval")
    made = call(evaluate, touch)
    return {
        "REDUCE": call(system, shell),
        "REDUCE of Python 2's name": call(name("__builtin__", "eval"), touch),
        "REDUCE under torch's own names": call(name("torch.serialization", "os.system"), shell),
        "INST": b"(" + shell + b"ios\nsystem\n",
        "OBJ": b"(" + system + shell + b"o",
        "NEWOBJ": system + tuple_of(shell) + b"\x81",
        "NEWOBJ_EX": system + tuple_of(shell) + b"}\x92",
        "STACK_GLOBAL": text("builtins") + text("eval") + b"\x93" + tuple_of(touch) + b"R",
        "BUILD": call(name("m", "C")) + dict_of({"__setstate__": evaluate}) + b"b" + touch + b"b",
        "a hook of a tensor": TENSOR.replace(call(name("collections", "OrderedDict")), made),
        "a parameter's maker": call(name("torch._utils", "_rebuild_parameter"), made),
        "a storage's key": tuple_of(text("storage"), made, text("0"), text("cpu"), number(1)) + b"Q",
        "a key of a dict": b"}" + made + b"Ns",
        "an element of a set": b"\x8f(" + made + b"\x90",
    }


@pytest.mark.covered(lambda kind, what: kind == "legacy" and what != "REDUCE")
@pytest.mark.parametrize("what", harmful("x"))
@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_no_command_runs_what_a_pickle_names(kind: str, what: str, cli: Any, here: Path) -> None:
    body = dict_of({"model": dict_of({"module.a": TENSOR}), "x": harmful("CANARY")[what]})
    if kind == "zip":
        crafting.torch_zip(here / "in.pt", body, BYTES)
    else:
        crafting.torch_legacy(here / "in.pt", body, {"0": (1, bytes(4))})
    inspected = cli("inspect", "in.pt", "--json")
    stripped = cli("strip-prefix", "in.pt", "out.safetensors", "--json")
    cli("strip-prefix", "in.pt", "out.pt")
    cli("reload", "in.pt", "--model", "torch.nn:Identity")
    assert not (here / "CANARY").exists()
    if inspected.code == 0:  # a malformed storage or hook is refused instead
        assert inspected.json["unknown"]
        assert "x" in stripped.json["left_out"]


@pytest.mark.parametrize("what", ["REDUCE", "INST", "STACK_GLOBAL", "a key of a dict"])
def test_torch_load_runs_these_pickles(what: str, here: Path) -> None:
    """Proves that the test above can fail."""
    with contextlib.suppress(Exception):
        path = crafting.torch_zip(here / "in.pt", harmful("CANARY")[what], BYTES)
        torch.load(path, weights_only=False)
    assert (here / "CANARY").exists()


# Zips.


def test_bytes_behind_the_zip_directory_are_refused(tmp_path: Path) -> None:
    whole = (small := small_zip(tmp_path / "in.pt")).read_bytes()
    for tail in (b"x", whole, bytes(100)):
        small.write_bytes(whole + tail)
        assert use(small) is not None or tail is whole


def test_impossible_numbers_in_a_zip64_directory_are_refused(tmp_path: Path) -> None:
    whole = (small := small_zip(tmp_path / "in.pt")).read_bytes()
    end = whole.rindex(b"PK\x05\x06")
    for value in (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1):
        for field in range(4):
            numbers = [1, 1, 50, 50]
            numbers[field] = value
            wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, *numbers)
            locator = struct.pack("<IIQI", 0x07064B50, 0, value if field == 3 else end, 1)
            small.write_bytes(whole[:end] + wide + locator + whole[end:])
            assert use(small) is not None


# Shortened by another process while it is read: one line and exit 3, not SIGBUS.

SHORTENING = """
import os, sys
from ckpttool.core import cli
from ckpttool.core.inert_pickle import machine

path, shortened_to = sys.argv[1], int(sys.argv[2])
put = machine.Machine.put

def shorten(*given):
    os.truncate(path, shortened_to)
    return put(*given)

machine.Machine.put = shorten
raise SystemExit(cli.run(["inspect", path]))
"""


@pytest.mark.covered(lambda kind, left: left == 100 or (kind, left) in (("tar", 0), ("legacy", 5000)))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "left"), [("zip", 0), *((kind, left) for kind in ("legacy", "tar") for left in (0, 100, 5000))]
)
def test_a_file_shortened_while_it_is_read_is_an_error_message(kind: str, left: int, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    if kind == "tar":
        as_tar(path)
    else:
        tree = {f"layer{i}.weight": torch.full((3000,), float(i)) for i in range(200)}
        torch.save(tree, path, _use_new_zipfile_serialization=kind == "zip")
    command = [sys.executable, "-c", SHORTENING, path, str(left)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if kind == "zip":  # its pickle is in memory already, and its storages are not read
        assert ran.returncode == 0
        return
    assert ran.returncode == 3
    assert len(ran.stderr.splitlines()) <= 2
    assert str(path) in ran.stderr and "Traceback" not in ran.stderr
