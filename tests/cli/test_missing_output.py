"""A command with several INPUTs takes the last argument for OUTPUT: a forgotten OUTPUT must cost no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool.metrics import predictions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        torch.save(
            {"norm." + k: v + number for k, v in torch.nn.BatchNorm1d(2).state_dict().items()}, f"{number}.pt"
        )
        index = np.arange(number, 9, 3)
        rows = predictions.Predictions(index, index % 2, index % 2, index / 4)
        predictions.write(f"rank{number}.safetensors", rows, predictions.Evaluation(3, 9), number)
    return tmp_path


@pytest.mark.parametrize("command", ["average", "convert-batchnorm"])
def test_a_checkpoint_as_last_argument_is_named(command: str, folder: Path, cli: Any) -> None:
    before = Path("2.pt").read_bytes()
    ran = cli(command, "0.pt", "1.pt", "2.pt")
    assert (ran.code, ran.err.splitlines()) == (
        2,
        [
            "error: 2.pt: is a checkpoint that is there already, and the last argument is the OUTPUT",
            f"hint: if 2.pt is an INPUT, name the OUTPUT after it: ckpttool {command} 0.pt 1.pt 2.pt OUTPUT",
        ],
    )
    assert Path("2.pt").read_bytes() == before


@pytest.mark.parametrize("command", ["average", "convert-batchnorm"])
def test_it_is_said_before_any_file_is_read(command: str, folder: Path, cli: Any) -> None:
    assert "is a checkpoint" in cli(command, "missing.pt", "0.pt", "1.pt").err


def test_folders_of_shards_are_checkpoints_too(folder: Path, cli: Any) -> None:
    cli("convert", "0.pt", "shards/")
    assert "shards/: is a checkpoint" in cli("average", "1.pt", "2.pt", "shards/").err


def test_another_file_in_the_place_of_the_output_needs_force(folder: Path, cli: Any) -> None:
    Path("mean.pt").write_text("notes")
    ran = cli("average", "0.pt", "1.pt", "mean.pt")
    assert (ran.code, ran.err.splitlines()[-1]) == (2, "hint: write it anyway with --force")


def test_force_replaces_a_checkpoint(folder: Path, cli: Any) -> None:
    cli("average", "0.pt", "1.pt", "mean.pt")
    assert cli("average", "0.pt", "1.pt", "mean.pt", "--force").code == 0


def test_one_input_alone_is_a_missing_output(folder: Path, cli: Any) -> None:
    for command in ("average", "convert-batchnorm", "convert"):
        ran = cli(command, "0.pt")
        assert ran.code == 2 and "Missing argument" in ran.err


def test_gather_metrics_writes_its_certificate_over_no_prediction_file(folder: Path, cli: Any) -> None:
    files = [f"rank{number}.safetensors" for number in range(3)]
    before = Path(files[2]).read_bytes()
    for force in ((), ("--force",)):
        for words in ([*files, "--out", files[2]], [*files[:2], "--out", files[2]]):
            ran = cli("gather-metrics", *words, *force)
            assert ran.code == 2, ran.err
            assert "rank2.safetensors: is a prediction file" in ran.err and "--force" not in ran.err
    assert Path(files[2]).read_bytes() == before


def test_gather_metrics_replaces_an_old_certificate_with_force(folder: Path, cli: Any) -> None:
    files = [f"rank{number}.safetensors" for number in range(3)]
    assert cli("gather-metrics", *files, "--out", "metrics.json").code == 0
    ran = cli("gather-metrics", *files, "--out", "metrics.json")
    assert (ran.code, ran.err.splitlines()[-1]) == (2, "hint: write it anyway with --force")
    assert cli("gather-metrics", *files, "--out", "metrics.json", "--force").code == 0


@pytest.mark.parametrize("command", ["average", "merge", "convert-batchnorm"])
def test_one_argument_is_an_input_and_lacks_the_output(command: str, folder: Path, cli: Any) -> None:
    for path in ("0.pt", "not-there.pt"):
        ran = cli(command, path)
        assert (ran.code, ran.err.splitlines()[0]) == (2, "error: Missing argument 'OUTPUT'.")
    assert cli(command).err.startswith("error: Missing argument 'INPUT… OUTPUT'.\n")


def test_what_is_no_prediction_file_is_said_to_be_none(folder: Path, cli: Any) -> None:
    Path("metrics.json").write_text('{"samples": 9}')
    Path("notes.txt").write_text("mine")
    Path("empty").write_text("")
    Path("sub").mkdir()
    rows = sorted(str(path) for path in Path().glob("rank*"))
    for name in ("metrics.json", "notes.txt", "empty", "sub", "0.pt"):
        ran = cli("gather-metrics", name, *rows)
        assert ran.code == 3 and f"{name}: is not a prediction file" in ran.err
        assert "checkpoint" not in ran.err and "hint: " in ran.err, name
    assert "name the files of ranks alone" in cli("gather-metrics", "metrics.json", *rows).err
