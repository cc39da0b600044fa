"""TensorBoard and W&B get what log.jsonl gets; read back with their own readers."""

from __future__ import annotations

import importlib.machinery
import itertools
import json
import random
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import CkptToolError, UsageFault
from tests.ranks.programs import TINY
from train import main
from train.config.training import TrainConfig
from train.log import trackers

STEP = {"step": 2, "epochs": 0.5, "steps": 2, "loss": 1.5, "lr": 0.1, "grad_norm": None}
STEP |= {"samples_per_second": 99.5, "seconds": 3.0, "data_seconds": 0.25}
EPOCH = {"epoch": 1, "loss": 1.25, "accuracy": 0.5, "samples": 10, "train_loss": float("nan"), "seconds": 7.0}
EVALUATION = {"step": 3, "epochs": 0.75, "test_loss": 1.0, "test_samples": 9}
EVALUATION |= {"test_metrics": {"mae": 0.5, "all": [1]}}
CHARTS: dict[int, dict[str, float]] = {
    2: {"train/loss": 1.5, "train/lr": 0.1, "train/samples_per_second": 99.5}
    | {"time/seconds": 3.0, "time/data": 0.25},
    3: {"test/loss": 1.0, "test/samples": 9, "test/mae": 0.5},
    4: {"test/loss": 1.25, "test/accuracy": 0.5, "test/samples": 10.0, "time/epoch": 7.0},
}


def write(folder: Path, config: TrainConfig) -> None:
    with trackers.opened(config, str(folder), 0) as sinks:
        for sink, (entry, at) in itertools.product(sinks, ((STEP, 2), (EVALUATION, 3), (EPOCH, 4))):
            sink.write(entry, at)


def test_numbers_get_the_groups_of_charts_of_trackers():
    assert [trackers.tagged(entry) for entry in (STEP, EVALUATION, EPOCH)] == list(CHARTS.values())
    found = trackers.tagged({"epoch": 1, "train_loss": 2.0, "lr": 0.1})
    assert found == {"epoch/train_loss": 2.0, "epoch/lr": 0.1}


def test_without_flags_only_the_log_is_written(tmp_path):
    write(tmp_path, TrainConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    assert [json.loads(line).get("epoch") for line in (tmp_path / "log.jsonl").open()] == [None, None, 1]


# ---- TensorBoard ---------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {(tag, one.step): one.value for tag in events.Tags()["scalars"] for one in events.Scalars(tag)}


def test_tensorboard_has_every_finite_number_at_its_step_before_the_run_ends_and_when_it_continues(tmp_path):
    pytest.importorskip("tensorboard")
    before = [(STEP, 2), ({"step": 3, "loss": 9.0}, 3)]  # a run that continues after step 2 forgets the last
    for step, entries in ((0, before), (2, [(EVALUATION, 3), (EPOCH, 4)])):
        with trackers.opened(TrainConfig(tensorboard=True), str(tmp_path), step) as sinks:
            for sink, (entry, at) in itertools.product(sinks, entries):
                sink.write(entry, at)
            assert (entries == before) == (("train/loss", 3) in scalars(tmp_path))
    expected = {(tag, step): value for step, chart in CHARTS.items() for tag, value in chart.items()}
    assert scalars(tmp_path) == pytest.approx(expected)


def test_tensorboard_gets_later_what_a_full_disk_refused(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    with trackers.TensorBoard(str(tmp_path), 0) as events:
        events.write({"step": 1, "loss": 1.0}, 1)
        (file,) = (tmp_path / "tensorboard").iterdir()
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, usual[1]))
        try:
            events.write({"step": 2, "loss": 2.0}, 2)
            events.write({"step": 3, "loss": 3.0}, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert scalars(tmp_path) == {("train/loss", 1): 1.0}
        events.write({"step": 4, "loss": 4.0}, 4)
    assert scalars(tmp_path) == {("train/loss", step): float(step) for step in range(1, 5)}
    warning = f"warning: {tmp_path}/tensorboard: could not be written: file too large; training goes on"
    assert capsys.readouterr().err.count(warning) == 1


def test_a_folder_that_tensorboard_cant_make_is_an_error_that_names_it(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").touch()
    with pytest.raises(CkptToolError, match=r"tensorboard: could not be written"):
        write(tmp_path, TrainConfig(tensorboard=True))


# ---- Weights & Biases ----------------------------------------------------------------------------------

BLOCK, WHOLE, LAST = 1 << 15, 1, 4


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format, after seven bytes of W&B's own."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # what is left of a block is too short for a header
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            yield record
            record = b""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return what W&B has logged in a folder, step by step."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = record.history.item
            if items:
                found.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    return found


def test_wandb_writes_every_finite_number_at_its_step_without_a_network(tmp_path, monkeypatch):
    """And trackers draw no random numbers of the training."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    before = random.getstate(), torch.get_rng_state()
    write(tmp_path, TrainConfig(tensorboard=True, wandb=True))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    found = {row["_step"]: {k: v for k, v in row.items() if not k.startswith("_")} for row in rows(tmp_path)}
    assert found == CHARTS


# ---- missing packages ----------------------------------------------------------------------------------


def test_a_folder_named_wandb_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageFault, match="the package wandb is not installed"):
        trackers.check(TrainConfig(wandb=True))


def test_nothing_is_needed_where_nothing_is_asked_for(monkeypatch):
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda *_, **__: None)
    trackers.check(TrainConfig())


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_run_without_the_package_ends_in_one_line_before_its_folder_is_made(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setitem(sys.modules, name, None)
    assert main.main([f"--{name}", *TINY, "--out", str(tmp_path / "run")]) == 2
    hint = f"in a clone of ckpttool: pip install -e '.[{name}]'"
    assert capsys.readouterr().err == f"error: --{name}: the package {name} is not installed ({hint})\n"
    assert not (tmp_path / "run").exists()
