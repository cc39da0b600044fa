"""What Windows has in the place of POSIX: the same bytes are written, and what it refuses is refused by name.

On Windows itself this file runs alone: `pytest --noconftest tests/test_system.py`, without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpttool import system
from tests.support.crafting import dict_of, number, storage, tensor, torch_zip
from tests.support.running import ROOT

RULES = b'[[rules]]\r\nfrom = "layer.{i}.weight"\r\nto = "blocks.{i}.w"\r\n'
COUNT = 700_000  # numbers of a storage that several threads copy


def write_inputs(folder: Path) -> None:
    """Write checkpoints of a wrapped model with an optimizer, which differ in a few values."""
    for name, step in (("a", 1.0), ("b", 2.0)):
        values = [float(at % 251) for at in range(COUNT)]
        values[::1000] = [step] * len(values[::1000])
        sizes = {"0": COUNT, "1": 4, "2": COUNT}
        raw = {"0": values, "1": [step] * 4, "2": values[::-1]}
        tensors = {
            "model": dict_of(
                {
                    "module.layer.0.weight": tensor(storage(COUNT, key="0"), (COUNT // 100, 100), (100, 1)),
                    "module.layer.1.weight": tensor(storage(4, key="1"), (2, 2), (2, 1)),
                    "module.ключ→×": tensor(storage(4, key="1"), (2, 2), (2, 1)),
                }
            ),
            "optimizer": dict_of({"exp_avg": tensor(storage(COUNT, key="2"), (COUNT,), (1,))}),
            "epoch": number(3),
        }
        storages = {key: struct.pack(f"<{sizes[key]}f", *each) for key, each in raw.items()}
        torch_zip(folder / f"{name}.pt", dict_of(tensors), storages)
    (folder / "rules.toml").write_bytes(RULES)
    (folder / "run").mkdir()


# Exit codes, and commands in one process and one folder: outputs of some are inputs of others.
COMMANDS = """
0 inspect a.pt
0 inspect a.pt --stats --tensors
0 verify a.pt
0 digest a.pt b.pt
1 diff a.pt b.pt
0 strip-prefix a.pt plain.safetensors --verify
0 strip-prefix b.pt other.pt
0 convert plain.safetensors shards/ --shard-size 1MB
0 convert other.pt torch-shards/ --to torch-sharded --shard-size 1MB
0 inspect shards
0 verify shards --against plain.safetensors
0 convert a.pt half.safetensors --dtype bf16
0 convert a.pt full.safetensors --full
0 convert full.safetensors back.pt
0 slim a.pt slim.pt
0 slim a.pt slim.pt --force
0 delta plain.safetensors other.pt changed.safetensors
0 apply plain.safetensors changed.safetensors newer.safetensors
0 verify newer.safetensors --against other.pt
0 split plain.safetensors ranks/ --ranks 2 --as dtensor --device cpu
0 merge ranks/ merged.safetensors
0 average a.pt b.pt mean.pt
0 scan . --allow *
0 report a.pt page.html
0 inspect a.pt --html inspected.html
0 rename-keys plain.safetensors renamed.safetensors --map ^layer=block
"""

# The input is the output, or lies in the same folder: what is open has to be closed before.
IN_PLACE = """
0 strip-prefix a.pt a.pt --force
0 rename-keys plain.safetensors plain.safetensors --force --map layer=block
0 convert shards/ shards/ --force --dtype bf16
0 rename-keys shards shards --force --map layer=part
0 convert torch-shards/ torch-shards/ --force --to torch-sharded --dtype bf16
1 rename-keys shards shards --force --map nothing=else
0 verify shards
0 inspect shards --json
0 slim --in-place run --keep-newest 1 --drop optimizer
"""


def words_of(text: str) -> list[tuple[int, list[str]]]:
    return [(int(line[0]), line[2:].split()) for line in text.strip().splitlines()]


def ran(folder: Path, commands: list[tuple[int, list[str]]], *half: str) -> list[list[Any]]:
    """Run commands in one process; raise AssertionError for one that ends otherwise."""
    given: Any = {
        "cwd": folder,
        "input": json.dumps([words for _, words in commands]).encode(),
        "timeout": 100,
    }
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CKPTTOOL_DEBUG": ""}
    program = [sys.executable, "-m", "tests.support.without_posix", *half]
    done = subprocess.run(program, env=env, capture_output=True, **given)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    results = json.loads(done.stdout)
    wrong = [
        (words, code, out, err)
        for (expected, words), (code, out, err) in zip(commands, results, strict=True)
        if code != expected or "Traceback" in err
    ]
    assert not wrong, "\n".join(map(str, wrong))
    return results


def written(folder: Path) -> dict[str, str]:
    """Return the digests of all files in a folder, but for times in pages and the lock of a run."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".ckpttool.lock")
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def in_folder(folder: Path, *half: str) -> tuple[dict[str, str], list[str]]:
    """Run all commands; return what was written by them, and what was said."""
    folder.mkdir()
    write_inputs(folder)
    results = ran(folder, words_of(COMMANDS), *half)
    for name, source in (("step-1.pt", "b.pt"), ("step-2.pt", "back.pt")):
        (folder / "run" / name).write_bytes((folder / source).read_bytes())
        os.utime(folder / "run" / name, ns=(10**18, 10**18 + int(name[5])))
    results += ran(folder, words_of(IN_PLACE), *half)
    said = [out for _, out, _ in results]
    return written(folder), said


@pytest.mark.skipif(not system.IS_POSIX, reason="there is one half alone")
def test_both_halves_write_the_same_bytes(tmp_path: Path) -> None:
    usual, other = (in_folder(tmp_path / name, *half) for name, half in (("posix", ()), ("w", ("windows",))))
    assert other[0] == usual[0]
    assert len(usual[0]) > 30
    assert not any("\\" in out for out in (other[1][9], other[1][10]))
    assert os.stat(tmp_path / "w" / "run" / "step-1.pt").st_mtime_ns == 10**18 + 1
