"""Commands as plans: in Python, where mistakes are said before a part is sent anywhere; and `--jobs`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from tests.support.running import Cli, assert_says


@pytest.fixture
def folder(here: Path) -> Path:
    """Return the working directory, with a small checkpoint in it."""
    torch.save({"module.w": torch.full((3000,), 1e30), "module.v": torch.full((3000,), 1e30)}, "in.pt")
    save_file({"w": torch.full((300, 70), 1e30), "v": torch.full((300, 70), 1e30)}, "in.safetensors")
    return here


MISTAKES: dict[str, tuple[tuple[str, ...], dict[str, Any], int, str]] = {
    "an unknown command": (("convrt", "in.pt", "out.pt"), {}, 2, "did you mean convert"),
    "an unknown flag": (("convert", "in.pt", "out.pt"), {"dtpye": "bf16"}, 2, "--dtpye"),
    "a missing input": (("convert", "nowhere.pt", "out.pt"), {}, 3, "nowhere.pt: no such file"),
    "no output": (("convert", "in.pt"), {}, 2, "OUTPUT"),
    "an output that exists": (("convert", "in.pt", "in.safetensors"), {}, 2, "already exists"),
    "a command without parts": (("delta", "in.pt", "in.pt", "out.pt"), {}, 2, "--part"),
    "an output that is no file": (("convert", "in.pt", "-"), {}, 2, "no place where parts can meet"),
    "an output that torch writes": (("convert", "in.pt", "d"), {"to": "dcp"}, 2, "torch's library"),
    "nothing to do": (("strip-prefix", "in.safetensors", "out.pt"), {}, 1, "no key begins with"),
    "a part of its own": (("convert", "in.pt", "out.pt"), {"part": "1/2"}, 2, "part=…"),
}


@pytest.mark.parametrize(("words", "flags", "code", "what"), MISTAKES.values(), ids=MISTAKES)
def test_a_plan_says_mistakes_before_a_part_is_written(
    words: tuple[str, ...], flags: dict[str, Any], code: int, what: str, folder: Path
) -> None:
    before = sorted(os.listdir())
    with pytest.raises(ckpttool.CkptToolError) as raised:
        ckpttool.plan(*words, **flags)
    assert what in str(raised.value) and raised.value.exit_code == code
    assert sorted(os.listdir()) == before


def test_a_plan_is_small_pickles_and_is_written_by_a_pool(large: tuple[Path, bytes], tmp_path: Path) -> None:
    source, _ = large
    out = tmp_path / "out.pt"
    plan = ckpttool.plan("convert", source, out, dtype="bf16")
    assert os.listdir(tmp_path) == []
    assert len(pickle.dumps(plan)) < 500 + 2 * len(str(tmp_path)) + len(str(source))
    assert pickle.loads(pickle.dumps(plan.parts(3))) == plan.parts(3)
    with ProcessPoolExecutor(2) as pool:
        written = pool.map(methodcaller("write"), plan.parts(3))
        result = plan.finish(written)
    assert result["output"] == str(out) and "part" not in result
    assert ckpttool.digest(out) == ckpttool.digest(source.parent / "out.pt")
    with pytest.raises(ckpttool.CkptToolError, match="already exists"):
        plan.parts(1)[0].write()
    with pytest.raises(ckpttool.CkptToolError, match="0 parts"):
        plan.parts(0)


# --jobs


def test_jobs_write_what_one_process_does_and_say_what_it_says(folder: Path, cli: Cli) -> None:
    for out in ("one", "many"):
        os.mkdir(out)
    words = ("convert", "in.safetensors", "--dtype", "fp16", "--json")
    alone, many = cli(*words, "one/out.pt"), cli(*words, "many/out.pt", "--jobs", "3")
    assert (alone.code, many.code) == (0, 0), many
    assert many.json["overflows"] == alone.json["overflows"] == 2 * 300 * 70
    assert "part" not in many.json and many.json["bytes"] == alone.json["bytes"]
    assert Path("many/out.pt").read_bytes() == Path("one/out.pt").read_bytes()
    assert os.listdir("many") == ["out.pt"]
    ran = cli(*words[:-1], "many/out.pt", "--jobs", "2", "--force")
    assert (ran.code, "42000 finite values became infinite\n" in ran.err) == (0, True), ran
    assert os.listdir("many") == ["out.pt"]


def test_one_job_and_a_dry_run_start_no_process(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert cli("convert", "in.pt", "out.pt", "--dtype", "bf16", "--jobs", "1").code == 0
    assert cli("convert", "in.pt", "2.pt", "--dtype", "bf16", "--jobs", "4", "--dry-run").code == 0
    assert not os.path.exists("2.pt")


def test_what_jobs_can_not_do_is_refused(folder: Path, cli: Cli) -> None:
    words = ("convert", "in.pt", "out.pt")
    assert_says(cli(*words, "--jobs", "2", "--part", "1/2"), 2, "--jobs makes parts of its own", "--part")
    assert_says(cli(*words, "--jobs", "0"), 2, "0 is not in the range")
    assert_says(cli("convert", "nowhere.pt", "out.pt", "--jobs", "2"), 3, "nowhere.pt: no such file")
    assert_says(cli("convert", "in.pt", "-", "--jobs", "2"), 2, "no place where parts can meet", "--jobs")
    assert sorted(os.listdir()) == ["in.pt", "in.safetensors"]


def test_a_job_that_fails_is_what_the_command_says_and_the_next_one_goes_on(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("convert", "in.pt", "out.pt", "--dtype", "bf16", "--jobs", "2")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))  # where `json` is a program that ends at once
        Path("json.py").write_text("raise SystemExit(7)")
        ran = cli(*words)
    assert_says(ran, 3, "ended with exit code 7")
    assert not os.path.exists("out.pt")
    os.unlink("json.py")
    assert cli(*words).code == 0
    assert not [name for name in os.listdir() if name.endswith("parts")]


KILLED = pytest.param(signal.SIGKILL, marks=pytest.mark.long)


@pytest.mark.parametrize("number", [signal.SIGTERM, KILLED])
def test_jobs_end_with_their_command(large: tuple[Path, bytes], tmp_path: Path, number: int) -> None:
    source, expected = large
    words = [
        sys.executable,
        "-m",
        "ckpttool",
        "convert",
        str(source),
        f"{tmp_path}/out.pt",
        "--dtype",
        "bf16",
    ]
    with subprocess.Popen([*words, "--jobs", "3"], stderr=subprocess.PIPE) as running:
        while not os.listdir(tmp_path):
            time.sleep(0.01)
        running.send_signal(number)
        running.communicate(timeout=60)
    assert not (tmp_path / "out.pt").exists()
    assert subprocess.run([*words, "--jobs", "3"], check=False).returncode == 0
    assert (tmp_path / "out.pt").read_bytes() == expected
    assert os.listdir(tmp_path) == ["out.pt"]
