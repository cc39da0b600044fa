"""stdout that is closed, full, or a pipe whose reader has gone: one line at most, and the right exit code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool.cli import group
from ckpttool.metrics import predictions
from tests.ranks.forked import WarmPython

ARGUMENTS = {
    "inspect": "last.pt",
    "digest": "last.pt",
    "strip-prefix": "last.pt OUT",
    "add-prefix": "last.pt OUT",
    "rename-keys": "last.pt OUT --map module=m",
    "convert": "last.pt OUT",
    "slim": "last.pt OUT",
    "disarm": "last.pt OUT",
    "convert-batchnorm": "old.pt OUT --to sync",
    "average": "last.pt last.pt OUT",
    "optimizer": "last.pt OUT --to names",
    "diff": "last.pt last.pt",
    "verify": "last.pt",
    "gather-metrics": "rank0.safetensors",
    "doctor": "last.pt --model net.py:make",
    "reload": "last.pt --model net.py:make",
}
MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
"""
NOTE = re.compile("left out|2 running statistics|7 of 7 keys had")
WRITERS = [name for name, words in ARGUMENTS.items() if "OUT" in words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    net = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
    (folder / "net.py").write_text(MODEL)
    adam = torch.optim.Adam(net.named_parameters())
    net(torch.ones(3, 200)).sum().backward()
    adam.step()
    state = {f"module.{key}": value for key, value in net.state_dict().items()}
    torch.save({"model": state, "optimizer": adam.state_dict()}, folder / "last.pt")
    torch.save({k: v for k, v in net.state_dict().items() if "num_" not in k}, folder / "old.pt")
    index = np.arange(4)
    rows = predictions.Predictions(index, index % 2, index % 2, index / 4)
    predictions.write(folder / "rank0.safetensors", rows, predictions.Evaluation(1, 4), 0)
    return folder


Run = Callable[[list[str]], tuple[int, list[str]]]


def ran(python: WarmPython, folder: Path, words: list[str], stdout: int) -> tuple[int, list[str]]:
    done = python.run("-m", "ckpttool", *words, stdout=stdout, cwd=folder)
    return done.returncode, [line for line in done.stderr.decode().splitlines() if not NOTE.match(line)]


@pytest.fixture
def into_a_full_disk(folder: Path, warm_python: WarmPython) -> Run:
    def run(words: list[str]) -> tuple[int, list[str]]:
        with open("/dev/full", "wb") as full:
            return ran(warm_python, folder, words, full.fileno())

    return run


@pytest.fixture
def into_a_broken_pipe(folder: Path, warm_python: WarmPython) -> Run:
    def run(words: list[str]) -> tuple[int, list[str]]:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            return ran(warm_python, folder, words, writer)
        finally:
            os.close(writer)

    return run


def words_of(name: str, output: str) -> list[str]:
    return [name, *ARGUMENTS[name].replace("OUT", output).split()]


def test_every_command_is_tried() -> None:
    of_folders = {"merge", "split", "merge-lora", "prove"}  # which need the files of a training
    assert list(ARGUMENTS) == [name for name in group.commands if name not in of_folders]


NOT_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@NOT_FULL
@pytest.mark.parametrize("more", [[], ["--json"]], ids=" ".join)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_result_that_stdout_has_no_space_for_is_one_line_and_exit_3(
    name: str, more: list[str], into_a_full_disk: Run, tmp_path: Path
) -> None:
    code, lines = into_a_full_disk([*words_of(name, str(tmp_path / "out.pt")), *more])
    assert (code, lines[0]) == (3, "error: stdout: no space left on device")
    assert len(lines) == 2 and lines[1].startswith("hint: ")


@NOT_FULL
@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["inspect", "--help"]], ids=" ".join)
def test_help_for_a_full_stdout_is_one_line_and_exit_3(words: list[str], into_a_full_disk: Run) -> None:
    code, lines = into_a_full_disk(words)
    assert (code, lines[0]) == (3, "error: stdout: no space left on device")


@NOT_FULL
@pytest.mark.parametrize("name", WRITERS)
def test_an_output_for_a_full_stdout_is_one_line_and_exit_3(name: str, into_a_full_disk: Run) -> None:
    code, lines = into_a_full_disk(words_of(name, "-"))
    assert code == 3
    assert lines[0].startswith("error: ") and lines[0].endswith("no space left on device")
    assert all(line.startswith("hint: ") for line in lines[1:])


@NOT_FULL
def test_an_error_whose_object_stdout_has_no_space_for_keeps_its_exit_code(into_a_full_disk: Run) -> None:
    code, lines = into_a_full_disk(["inspect", "missing.pt", "--json"])
    assert (code, lines[0]) == (3, "error: missing.pt: no such file")
    assert into_a_full_disk(["inspect", "--json"])[0] == 2


@pytest.mark.parametrize("more", [[], ["--json"]], ids=" ".join)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_reader_that_has_gone_is_exit_141_without_a_word(
    name: str, more: list[str], into_a_broken_pipe: Run, tmp_path: Path
) -> None:
    words = [*words_of(name, str(tmp_path / "out.pt")), *more]
    assert into_a_broken_pipe(words) == (141, [])


@pytest.mark.parametrize("name", WRITERS)
def test_a_reader_of_the_output_that_has_gone_is_exit_141(name: str, into_a_broken_pipe: Run) -> None:
    assert into_a_broken_pipe(words_of(name, "-")) == (141, [])


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], [], ["inspect", "missing.pt", "--json"], ["inspect", "--json"]],
    ids=" ".join,
)
def test_a_reader_of_help_and_errors_that_has_gone_is_exit_141(words: Any, into_a_broken_pipe: Run) -> None:
    assert into_a_broken_pipe(words)[0] == 141


def test_a_reader_of_completions_that_has_gone_is_exit_141(into_a_broken_pipe: Run, monkeypatch: Any) -> None:
    monkeypatch.setenv("_CKPTTOOL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "ckpttool ")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert into_a_broken_pipe([]) == (141, [])
