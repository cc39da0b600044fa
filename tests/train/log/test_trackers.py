"""Trackers get what log.jsonl gets, read back with their own readers; nothing of them stops a training."""

from __future__ import annotations

import contextlib
import importlib.machinery
import itertools
import json
import os
import random
import resource
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpttool.errors import CkptToolError, UsageFault, install
from tests.ranks.programs import ROOT, TINY
from train import main
from train.config.sections import TrainConfig
from train.log import trackers

STEP = {"step": 2, "epochs": 0.5, "steps": 2, "loss": 1.5, "lr": 0.1, "grad_norm": None}
STEP |= {"samples_per_second": 99.5, "seconds": 3.0, "data_seconds": 0.25}
EPOCH = {"epoch": 1, "loss": 1.25, "accuracy": 0.5, "samples": 10, "train_loss": float("nan"), "seconds": 7.0}
EVALUATION = {"step": 3, "epochs": 0.75, "test_loss": 1.0, "test_samples": 9}
EVALUATION |= {"test_metrics": {"mae": 0.5, "all": [1], "a/b@1": 2.0, "lr": 3.0, "wait_seconds": 4.0}}
EVALUATION |= {"train_loss": 5.0}
CHARTS: dict[int, dict[str, float]] = {
    2: {"train/loss": 1.5, "train/lr": 0.1, "train/samples_per_second": 99.5}
    | {"time/seconds": 3.0, "time/data": 0.25},
    3: {"test/loss": 1.0, "test/samples": 9, "test/mae": 0.5, "epoch/train_loss": 5.0}
    | {"test/a/b@1": 2.0, "test/lr": 3.0, "test/wait_seconds": 4.0},
    4: {"test/loss": 1.25, "test/accuracy": 0.5, "test/samples": 10.0, "time/epoch": 7.0},
}


def write(folder: Path, config: TrainConfig) -> None:
    with trackers.opened(config, str(folder), 0, lambda: config.saving.stop_at) as sinks:
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
        with trackers.opened(TrainConfig.of(tracker=("tensorboard",)), str(tmp_path), step) as sinks:
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
        write(tmp_path, TrainConfig.of(tracker=("tensorboard",)))


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
    write(tmp_path, TrainConfig.of(tracker=("tensorboard", "wandb")))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    found = {row["_step"]: {k: v for k, v in row.items() if not k.startswith("_")} for row in rows(tmp_path)}
    assert found == CHARTS


# ---- MLflow, trackio -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of mlflow's and its database's own
def test_mlflow_gets_every_finite_number_at_its_step(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="the package of the extra mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow's own database")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(tmp_path, TrainConfig.of(tracker=("mlflow",)))
    store = f"sqlite:///{tmp_path}/mlflow.db"
    client = tracking.MlflowClient(store, store)
    (run,) = client.search_runs([client.get_experiment_by_name("ckpttool").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["epochs"]) == (
        tmp_path.name,
        "FINISHED",
        "10",
    )
    found: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            found.setdefault(metric.step, {})[name] = metric.value
    # It takes no @, and would refuse all that comes with it.
    taken = {name.replace("@", "_"): value for name, value in CHARTS[3].items()}
    assert found == {**CHARTS, 3: taken}


def test_trackio_gets_every_finite_number_at_its_step(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="the package of the extra trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    write(tmp_path, TrainConfig.of(tracker=("trackio",)))
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "ckpttool.db")) as database:
        found = {
            step: json.loads(values) for step, values in database.execute("select step, metrics from metrics")
        }
    assert found == CHARTS


# ---- servers that are away, clients that hang ----------------------------------------------------------

STUB = """
import json, os, sys, time
folder = os.path.dirname(os.path.abspath(__file__))

def init(**given):
    end = time.monotonic() + 99
    while os.path.exists(folder + "/hangs") and time.monotonic() < end:
        time.sleep(0.05)
    if os.path.exists(folder + "/away"):
        raise ConnectionError("no route to host")
    note(init=given["name"])

def note(**entry):
    with open(folder + "/taken.jsonl", "a") as file:
        file.write(json.dumps(entry) + "\\n")

def log(values, step):
    if step == 3 and os.path.exists(folder + "/leaves"):
        os.unlink(folder + "/leaves")
        sys.exit(3)
    if os.path.exists(folder + "/away"):
        raise ConnectionError("no route to host")
    note(step=step, values=values)

def finish():
    note(finished=True)
"""
"""A client of a tracker, whose server is away while there is a file `away` beside it, and so on."""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of a client under the name trackio."""
    folder = tmp_path / "client"
    folder.mkdir()
    (folder / "trackio.py").write_text(STUB)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    yield folder
    for each in ("hangs", "away"):
        (folder / each).unlink(missing_ok=True)
    for thread in threading.enumerate():
        if thread.name == "tracker trackio":  # else it warns of the folder that is gone, in another test
            thread.join(60)
    sys.modules.pop("trackio", None)


def taken(folder: Path) -> list[dict[str, Any]]:
    path = folder / "taken.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


STUBBED = TrainConfig.of(tracker=("trackio",))
SENT = [{"step": step, "values": values} for step, values in CHARTS.items()]


def test_a_client_gets_all_in_order_and_is_ended_before_the_run_is(tmp_path, stub, capfd):
    write(tmp_path, STUBBED)
    assert taken(stub) == [{"init": tmp_path.name}, *SENT, {"finished": True}]
    assert capfd.readouterr() == ("", "")


def test_what_a_server_that_is_away_does_not_take_it_gets_when_it_is_back(tmp_path, stub, capfd):
    (stub / "away").touch()
    with trackers.opened(STUBBED, str(tmp_path), 0) as sinks:
        began = time.monotonic()
        sinks[1].write(STEP, 2)
        assert time.monotonic() - began < 0.5, "a step waits for no server"
        until(lambda: hears(capfd))
        (stub / "away").unlink()
        sinks[1].write(EVALUATION, 3)
        until(lambda: len(taken(stub)) > 1)
        sinks[1].write(EPOCH, 4)
    assert taken(stub) == [{"init": tmp_path.name}, *SENT, {"finished": True}]


def hears(capfd: Any) -> bool:
    """Return whether the run has said, once, that the server is away."""
    said = capfd.readouterr().err
    assert said.count("\n") <= 1
    why = "ConnectionError: no route to host; training goes on, and it is tried again"
    return f"warning: --tracker trackio: {why}\n" == said


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("how", "said"), [("hangs", "not all was taken within 1 s"), ("away", "not all was taken within 1 s")]
)
def test_a_run_that_is_told_to_end_ends_in_time_though_its_tracker_does_not(tmp_path, stub, capfd, how, said):
    (stub / how).touch()
    began = time.monotonic()
    write(tmp_path, TrainConfig.of(tracker=("trackio",), grace=3.0, stop_at=1))
    assert time.monotonic() - began < 20
    assert f"warning: --tracker trackio: {said}; log.jsonl has it\n" in capfd.readouterr().err
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


def test_a_client_that_raises_systemexit_ends_no_run(tmp_path, stub, capfd):
    (stub / "leaves").touch()
    write(tmp_path, STUBBED)
    assert taken(stub) == [{"init": tmp_path.name}, *SENT, {"finished": True}]
    said = [line.removeprefix("warning: --tracker trackio: ") for line in capfd.readouterr().err.splitlines()]
    assert said == ["SystemExit: 3; training goes on, and it is tried again", "answers again"]


def test_a_client_that_hangs_costs_no_step_and_no_memory(tmp_path, stub, capfd, monkeypatch):
    (stub / "hangs").touch()
    monkeypatch.setattr(trackers, "MOST", 50)
    config = TrainConfig.of(tracker=("trackio",), grace=3.0)
    with trackers.opened(config, str(tmp_path), 0, lambda: True) as sinks:
        began = time.monotonic()
        for step in range(3000):
            sinks[1].write({"step": step, "loss": 0.5, "lr": 0.1}, step)
        assert time.monotonic() - began < 10 and sinks[1]._entries.qsize() == 50
    assert "entries were left out; log.jsonl has them" in capfd.readouterr().err


HANGING = """
from train.config.sections import TrainConfig
from train.log import trackers
with trackers.opened(TrainConfig.of(tracker=("trackio",), grace=3.0), {folder!r}, 0, lambda: True) as sinks:
    sinks[1].write({{"step": 1, "loss": 0.5}}, 1)
"""


def test_a_program_whose_client_hangs_ends_within_the_limit(tmp_path, stub):
    (stub / "hangs").touch()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(stub), str(ROOT)])}
    began = time.monotonic()
    program = [sys.executable, "-c", HANGING.format(folder=str(tmp_path))]
    subprocess.run(program, env=env, check=True, timeout=90, stderr=subprocess.DEVNULL)
    assert time.monotonic() - began < 90, "the client hangs for 99 s"


# ---- missing packages ----------------------------------------------------------------------------------


def test_a_folder_named_wandb_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageFault, match="the package wandb is not installed"):
        trackers.check(TrainConfig.of(tracker=("wandb",)))


def test_nothing_is_needed_where_nothing_is_asked_for(monkeypatch):
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda *_, **__: None)
    trackers.check(TrainConfig())


def test_a_test_set_of_the_name_of_other_charts_is_refused(monkeypatch):
    trackers.check(TrainConfig.of(also_test=("train=digits",)))
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: SimpleNamespace(origin=""))
    with pytest.raises(UsageFault, match="--also-test train=digits: trackers have charts of that name"):
        trackers.check(TrainConfig.of(tracker=("wandb",), also_test=("ood=digits", "train=digits")))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_run_without_the_package_ends_in_one_line_before_its_folder_is_made(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setitem(sys.modules, name, None)
    assert main.main(["--tracker", name, *TINY, "--out", str(tmp_path / "run")]) == 2
    hint = install(name)
    assert (
        capsys.readouterr().err == f"error: --tracker {name}: the package {name} is not installed ({hint})\n"
    )
    assert not (tmp_path / "run").exists()
