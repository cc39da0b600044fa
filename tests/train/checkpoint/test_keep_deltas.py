"""`--keep-deltas`: every save can be read and gone on from, whatever fails or is damaged in between."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.deltas import differences
from ckpttool.errors import Damaged, Unreadable, UsageFault
from tests.ranks import runs, trainings
from tests.ranks.forked import Program
from tests.ranks.programs import ROOT, environment, start
from tests.support.run_log import entries_of
from tests.support.trees import odd_state
from train.checkpoint import files
from train.checkpoint import files as checkpoint_files
from train.checkpoint import saver as saving
from train.checkpoint.files import DELTA, numbered
from train.checkpoint.format import read
from train.config import command_line
from train.config.flags import Every
from train.main import steps_of_epoch
from train.run import folder as folders

EACH = {"save_every": Every(1, "steps")}
SETTINGS = {**EACH, "ema": 0.9, "optimizer": "adamw", "momentum": None, "keep_best": 1}
EVERY = 3


def whole(*steps: int) -> set[str]:
    return {numbered(step) for step in steps}


def delta(*steps: int) -> set[str]:
    return {numbered(step, ending=DELTA) for step in steps}


def steps_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("step-")}


def state_of(folder: Path, step: int) -> Path:
    """Return a file of the state of a step, the delta if there is one."""
    path = folder / numbered(step, ending=DELTA)
    return path if path.exists() else folder / numbered(step)


def same(one: Path, other: Path) -> bool:
    """Return whether two checkpoints hold the same, to the last bit, but for what says how they were kept."""
    return runs.different(read(str(one)), read(str(other))) == []


# ---- what is there -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs_of_two(run_ranks, tmp_path_factory) -> tuple[Path, Path]:
    """The same run on two ranks with deltas, and with whole checkpoints alone."""
    both = tmp_path_factory.mktemp("both")
    for name, keeps in (("deltas", {"keep_deltas": EVERY}), ("wholes", {"keep": 99})):
        settings = {**SETTINGS, **keeps, "prove_every": 2}
        said, _ = run_ranks(2, runs.run, runs.restless, str(both / name), settings)
        assert "Error" not in said, said
    return both / "deltas", both / "wholes"


@pytest.fixture
def run(runs_of_two: tuple[Path, Path], tmp_path: Path) -> Iterator[Path]:
    """A copy of the run with deltas, which may be changed; its last.pt is its newest checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(runs_of_two[0], folder)
    yield folder


# ---- what is there -------------------------------------------------------------------------------------


def test_each_third_is_whole_and_so_is_the_newest_and_all_hold_what_whole_ones_do(runs_of_two):
    kept, straight = runs_of_two
    assert steps_in(kept) == whole(1, 4, 6) | delta(2, 3, 5, 6)
    assert os.path.samefile(kept / "last.pt", kept / numbered(6))
    assert all(same(state_of(kept, step), straight / numbered(step)) for step in range(1, 7))
    assert same(kept / "last.pt", straight / "last.pt") and same(kept / "best.pt", straight / "best.pt")


def test_a_delta_is_read_back_with_its_views_ties_types_and_numbers(tmp_path):
    """Of a state with what a copy can get wrong, among it what is no tensor."""
    odd = {"lanes": {"0": {"state": {"at": -1, "left": [1.5, float("-inf"), None], ("a", 2): b"\0\xff"}}}}
    before, after = odd_state(), {**odd_state(), "stream": odd, "best": float("nan"), "big": 1 << 70}
    for number, state in enumerate((before, after), start=1):
        torch.save({**state, "digests": {}, "global_step": 1}, tmp_path / numbered(number))
    assert files.keep_delta(str(tmp_path), 2, 9, "") == ""
    path = tmp_path / numbered(2, ending=DELTA)
    with files.as_torch_reads(str(path)) as file:
        found = torch.load(file, weights_only=True)
    expected = torch.load(tmp_path / numbered(2), weights_only=True)
    assert list(found) == list(expected) and repr(found) == repr(expected)
    assert runs.different({"model": found}, {"model": expected}) == []
    strides = [[tensor.stride() for tensor in state["views"]] for state in (found, expected)]
    assert strides[0] == strides[1]
    assert found["twice"][0].data_ptr() == found["twice"][1].data_ptr()
    assert found["model"]._metadata == expected["model"]._metadata == {"": {"version": 1}}


def test_the_commands_and_evaluate_read_a_delta(runs_of_two, cli):
    kept, straight = runs_of_two
    path, other = kept / numbered(3, ending=DELTA), straight / numbered(3)
    assert cli("verify", path).code == 0
    assert "AdamW" in cli("inspect", path).out
    assert cli("digest", path).out.split()[0] == cli("digest", other).out.split()[0]
    assert files.parts_named_in(str(path)) == str(path)


# ---- going on ------------------------------------------------------------------------------------------


@pytest.mark.covered(lambda step: step == 1)
@pytest.mark.parametrize("step", [1, 3])
def test_a_run_goes_on_from_any_of_them_to_the_same_bits(run_ranks, tmp_path, runs_of_two, step):
    kept, straight = runs_of_two
    settings, stopped = {**SETTINGS, "keep_deltas": EVERY, "prove_every": 2}, state_of(kept, step)
    said = runs.go_on(run_ranks, 2, runs.restless, stopped, tmp_path, settings)
    assert f"continues from {stopped}" in said
    assert runs.different(*runs.ends(tmp_path, straight)) == []
    assert all(same(state_of(tmp_path, later), straight / numbered(later)) for later in range(step + 1, 7))


def test_another_number_of_ranks_goes_on_from_a_delta_as_from_a_whole_one(run_ranks, tmp_path, runs_of_two):
    for name, path in zip("ab", (state_of(runs_of_two[0], 3), runs_of_two[1] / numbered(3)), strict=True):
        said = runs.go_on(run_ranks, 1, runs.restless, path, tmp_path / name, SETTINGS)
        assert "saved by 2 ranks, now 1" in said
    assert same(tmp_path / "a" / "last.pt", tmp_path / "b" / "last.pt")


def test_a_run_that_goes_on_builds_on_what_it_had(run_ranks, run, runs_of_two):
    """It was killed as it had saved step 5 under one name, and made no delta of it."""
    for name in (*whole(6), *delta(5, 6)):
        (run / name).unlink()
    shutil.copy(runs_of_two[1] / numbered(4), run / "last.pt")
    shutil.copy(runs_of_two[1] / numbered(5), run / numbered(5))
    settings = {**SETTINGS, "resume": "auto", "keep_deltas": EVERY}
    run_ranks(2, runs.run, runs.restless, str(run), settings)
    assert steps_in(run) == whole(1, 4, 6) | delta(2, 3, 5, 6)
    assert all(same(state_of(run, step), runs_of_two[1] / numbered(step)) for step in range(1, 7))


def test_what_was_built_on_a_step_that_is_saved_anew_is_removed_and_named(run_ranks, run):
    """The run goes back to step 1, takes two other steps and ends: step 3 was built on the old step 2."""
    back = {**SETTINGS, "resume": str(run / numbered(1)), "keep_deltas": EVERY, "stop_at": 2}
    run_ranks(2, runs.run, runs.restless, str(run), {**back, "lr": 0.01, "change": ("lr",)})
    assert steps_in(run) == whole(1, 2, 4) | delta(2, 5, 6)
    events = [entry for entry in entries_of(run) if entry.get("event") == "deltas removed"]
    assert [entry["step"] for entry in events] == [2]
    for step in (1, 2, 4, 5, 6):
        assert read(str(state_of(run, step)))["progress"]["global_step"] == step
    assert not same(state_of(run, 2), run / numbered(1))


# ---- damage --------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    """Change a bit in the last tensor of a file."""
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 4
    path.write_bytes(raw)


def test_a_damaged_delta_costs_the_steps_up_to_the_next_whole_one_and_is_named(run_ranks, run, runs_of_two):
    wrong = run / numbered(2, ending=DELTA)
    damage(wrong)
    for step in (2, 3):
        with pytest.raises(Damaged, match=f"{wrong}: "):
            read(str(state_of(run, step)))
    for name in {*os.listdir(run)} - whole(1) - delta(2, 3) - {"config.toml", "run.jsonl", "log.jsonl"}:
        (run / name).unlink()
    settings = {**SETTINGS, "resume": "auto", "keep_deltas": EVERY}
    said, _ = run_ranks(2, runs.run, runs.restless, str(run), settings)
    assert said.count("passed over ") == said.count(str(wrong)) == 2, said
    assert f"continues from {run / numbered(1)}" in said
    assert same(run / "last.pt", runs_of_two[1] / "last.pt")


def test_a_lost_base_is_named(run):
    (run / numbered(4)).unlink()
    path = run / numbered(5, ending=DELTA)
    with pytest.raises(Unreadable, match=r"'step-000004.pt', does not lie beside it") as raised:
        read(str(path))
    assert raised.value.hint == f"put it there, or go on from: ckpttool apply BASE {path} WHOLE.pt"


def test_the_delta_of_the_newest_stands_in_for_its_damaged_whole_file(run_ranks, run, runs_of_two):
    for path in run.glob("best*.pt"):
        path.unlink()
    raw = (run / "last.pt").read_bytes()
    for name in ("last.pt", numbered(6)):
        (run / name).write_bytes(raw[:9000])
    settings = {**SETTINGS, "resume": "auto", "keep_deltas": EVERY, "epochs": 3}
    said, _ = run_ranks(2, runs.run, runs.restless, str(run), settings)
    assert f"continues from {run / numbered(6, ending=DELTA)}" in said, said
    assert same(run / numbered(5, ending=DELTA), runs_of_two[1] / numbered(5))


def test_prove_counts_deltas_among_the_checkpoints_and_names_a_damaged_one(run, cli):
    ran = cli("prove", run, "--no-replay", "--json")
    assert (ran.code, ran.json["problems"]) == (0, []), ran.out
    assert {each["file"] for each in ran.json["checkpoints"]} == steps_in(run) | {"last.pt", "best.pt"}
    damage(run / numbered(5, ending=DELTA))
    ran = cli("prove", run, "--no-replay", "--json")
    wrong = {problem["where"] for problem in ran.json["problems"]}
    assert (ran.code, wrong) == (1, delta(5, 6))
    said = [problem["where"] + problem["message"] for problem in ran.json["problems"]]
    assert all(numbered(5, ending=DELTA) in each for each in said), said


@pytest.mark.long
def test_a_part_is_trained_again_from_a_delta(tmp_path, cli):
    flags = ["--data", "fake:40", "--batch-size", 8, "--max-steps", 6, "--prove-every", 1]
    flags += ["--save-every", "2steps", "--keep-deltas", 3, "--out", tmp_path / "run"]
    done = start([sys.executable, "train/main.py", *map(str, flags)])
    assert done.returncode == 0, done.stderr
    ran = cli("prove", tmp_path / "run", "--from", 4, "--json")
    assert (ran.code, ran.json["replayed"]) == (0, [4, 6]), ran.out
    assert "step-000004.delta.safetensors" in " ".join(ran.json["command"])


# ---- saves, one by one ---------------------------------------------------------------------------------


def save_each(
    rank: int, size: int, folder: str, settings: dict[str, Any], before: Callable[[int], Any] | None = None
) -> list[str]:
    """Save after each step of two epochs; return what is told."""
    os.makedirs(folder, exist_ok=True)
    data, model = trainings.tensors(runs.SHAPE, runs.SAMPLES), trainings.seeded(runs.restless)
    trainer = trainings.trainer(rank, size, data, model, batch_size=runs.BATCH, lr=0.05, epochs=9, **settings)
    told = list[str]()
    saver = saving.Saver(trainer, folder, lambda event, text, *_, **__: told.append(f"{event}: {text}"))
    for _ in range(2):
        for _ in steps_of_epoch(trainer):
            with pytest.MonkeyPatch.context() as patch:
                step = trainer.progress.global_step
                in_haste = before is not None and bool(before(step, patch, Path(folder)))
                saver.save(last=True, best=False, in_haste=in_haste)
                saver.finish_save()
        trainer.finish_epoch()
    saver.finish()
    return told


KEPT = {2: whole(5, 6) | delta(6), 3: whole(1, 5, 6) | delta(2, 3, 4, 6)}


@pytest.mark.parametrize(("keep", "save"), [(2, "sync"), (3, "async")])
def test_keep_leaves_what_its_deltas_are_built_on(run_ranks, tmp_path, keep, save):
    settings = {"keep": keep, "keep_deltas": 4, "save": save}
    assert run_ranks(1, save_each, str(tmp_path), settings) == [[]]
    assert steps_in(tmp_path) == KEPT[keep]


def fill_the_disk_in_step_3(step: int, patch: pytest.MonkeyPatch, folder: Path) -> None:
    if step == 3:
        patch.setattr(files, "delta", no_room)


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_delta_for_which_there_is_no_room_costs_no_checkpoint(run_ranks, tmp_path):
    (told,) = run_ranks(1, save_each, str(tmp_path), {"keep_deltas": 9}, fill_the_disk_in_step_3)
    path = tmp_path / numbered(3, ending=DELTA)
    assert told == [
        "delta failed: step 3 is kept whole, as its delta could not be made: "
        f"{path}: could not be written: no space left on device"
    ]
    assert steps_in(tmp_path) == whole(1, 3, 6) | delta(2, 4, 5, 6)
    assert [read(str(state_of(tmp_path, step)))["progress"]["global_step"] for step in range(1, 7)] == [
        *range(1, 7)
    ]


def be_told_to_end_in_step_3(step: int, patch: pytest.MonkeyPatch, folder: Path) -> bool:
    return step == 3


def test_a_run_that_is_told_to_end_takes_no_time_for_a_delta(run_ranks, tmp_path):
    run_ranks(1, save_each, str(tmp_path), {"keep_deltas": 9}, be_told_to_end_in_step_3)
    assert steps_in(tmp_path) == whole(1, 3, 6) | delta(2, 4, 5, 6)


def put_another_in_the_place_of_step_2(step: int, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """As somebody who has another state of step 2, which its delta knows nothing of."""
    if step == 3:
        shutil.copy(folder / numbered(1), folder / numbered(2))


def test_a_base_that_is_not_what_its_own_delta_makes_is_found_before_it_goes(run_ranks, tmp_path):
    (told,) = run_ranks(1, save_each, str(tmp_path), {"keep_deltas": 9}, put_another_in_the_place_of_step_2)
    assert len(told) == 1 and "is not the base of" in told[0]
    assert steps_in(tmp_path) == whole(1, 3, 6) | delta(2, 4, 5, 6)


def test_a_users_file_with_the_name_of_a_delta_stays(run_ranks, tmp_path):
    theirs = tmp_path / numbered(2, ending=DELTA)
    theirs.write_bytes(b"of a user")
    (told,) = run_ranks(1, save_each, str(tmp_path), {"keep_deltas": 9, "keep": 3})
    assert len(told) == 1
    assert told[0].endswith(f": {theirs} is not a checkpoint of this run, and stays as it is")
    assert theirs.read_bytes() == b"of a user"
    assert steps_in(tmp_path) == whole(2, 6) | delta(2, 3, 4, 5, 6)


def test_force_removes_the_deltas_of_the_run_that_it_overwrites(run):
    folders._clear(str(run))
    assert not steps_in(run)


class Killed(BaseException):
    """Stands in for a kill: nothing changes a name after it."""


def save(folder: Path, step: int) -> None:
    """Save as the trainer does, after each step of a tiny training."""
    state = {"w": torch.full((50,), float(step)), "digests": {}, "global_step": step}
    checkpoint_files.write(state, str(folder), ["last.pt", numbered(step)])
    assert files.keep_delta(str(folder), step, 9, "") == ""
    files.drop_wholes(str(folder), step, "")


def kill_before(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let this call that changes a name, and all after it, do nothing."""
    left = [number]

    def dying(usual: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
            usual(*given)

        return call

    for name in ("replace", "link", "unlink"):
        patch.setattr(os, name, dying(getattr(os, name)))


def steps_read(folder: Path, *steps: int) -> list[float]:
    found = []
    for step in steps:
        with files.as_torch_reads(str(state_of(folder, step))) as file:
            found.append(torch.load(file, weights_only=True)["w"][0].item())
    return found


def test_a_kill_before_any_change_of_a_name_costs_no_checkpoint(tmp_path):
    before = tmp_path / "before"
    before.mkdir()
    for step in (1, 2):
        save(before, step)
    for number in range(1, 99):
        folder = tmp_path / str(number)
        shutil.copytree(before, folder)
        with pytest.MonkeyPatch.context() as patch:
            kill_before(patch, number)
            try:
                save(folder, 3)
                break
            except Killed:
                pass
        assert steps_read(folder, 1, 2) == [1, 2]
        save(folder, 3)  # the run comes back
        assert steps_read(folder, 1, 2, 3) == [1, 2, 3]
        assert steps_in(folder) == whole(1, 3) | delta(2, 3)
    assert number > 5


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "named"), [
    (["--keep-deltas", "4", "--shard", "parts"], "--keep-deltas and --shard parts"),
    (["--keep-deltas", "66"], "not more than 64 in a row are read"),
])  # fmt: skip
def test_what_does_not_go_with_deltas_is_refused_by_name(flags, named):
    with pytest.raises(UsageFault, match=named):
        command_line.parse(flags)


def test_without_zstd_deltas_are_refused_before_training(monkeypatch):
    monkeypatch.setattr(differences, "is_there", lambda: False)
    with pytest.raises(UsageFault, match="zstd, which is not installed"):
        trainings.check(runs.steady(), runs.images(), keep_deltas=4)


# ---- a kill at any moment ------------------------------------------------------------------------------


STEPS = range(1, 7)

OWN = """
import os, signal, threading, time
from pathlib import Path
from torch import nn
from train.checkpoint import files

here, usual = Path(__file__).parent, files.keep_delta

def keep_delta(folder, step, *given):
    order = here / f"kill-{step}"
    if order.exists():
        seconds = float(order.read_text())
        order.unlink()
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    failure = usual(folder, step, *given)
    (here / f"took-{step}").write_text(str(time.monotonic() - began))
    return failure

files.keep_delta = keep_delta

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))
"""

FLAGS = ["--data", "fake:40", "--batch-size", "8", "--max-steps", "6", "--save-every", "1steps", "--momentum"]
FLAGS += ["0.9", "--keep-deltas", str(EVERY), "--model", "own.py:model", "--out", "run"]


def train(folder: Path, *flags: str) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(OWN)
    command = [sys.executable, str(ROOT / "train" / "main.py"), *FLAGS, *flags]
    run = Program(command, folder, environment(PYTHONPATH=str(ROOT)))
    _, errors = run.communicate(timeout=90)
    assert run.returncode in (0, -signal.SIGKILL), errors
    return run.returncode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("undisturbed")
    assert train(folder) == 0
    return folder


@pytest.mark.long
@pytest.mark.parametrize("number", range(10))
def test_a_kill_at_any_moment_of_a_delta_costs_no_step(undisturbed, tmp_path, number):
    step, straight, run = (2, 3, 5)[number % 3], undisturbed / "run", tmp_path / "run"
    seconds = float((undisturbed / f"took-{step}").read_text()) * 1.2 * (number + 0.5) / 10
    (tmp_path / f"kill-{step}").write_text(str(seconds))
    mode = ("--save", "async" if number % 2 else "sync")
    assert train(tmp_path, *mode) == -signal.SIGKILL
    assert all(same(state_of(run, earlier), state_of(straight, earlier)) for earlier in range(1, step + 1))
    assert train(tmp_path, *mode, "--resume", "auto") == 0
    assert all(same(state_of(run, each), state_of(straight, each)) for each in STEPS)
    assert same(run / "last.pt", straight / "last.pt")
    assert [name for name in os.listdir(run) if name.startswith(".")] == []
    assert len(steps_in(run)) <= len(steps_in(straight)) + 1


def told_in_a_delta(rank: int, size: int, folder: str, settings: dict[str, Any]) -> str:
    """Run the trainer, which is told to end while it makes the delta of step 3."""
    usual = files.keep_delta

    def struck(where: str, step: int, every: int, training: str) -> str:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # a thread takes it
        return usual(where, step, every, training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "keep_delta", struck)
        return runs.run(rank, size, runs.restless, folder, settings)


@pytest.mark.covered(lambda save: save == "sync")
@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_run_that_is_told_to_end_within_a_delta_completes_it(run_ranks, tmp_path, save):
    straight, run = tmp_path / "straight", tmp_path / "run"
    run_ranks(1, runs.run, runs.restless, str(straight), {**SETTINGS, "keep": 99})
    settings = {**SETTINGS, "keep_deltas": EVERY, "save": save}
    run_ranks(1, told_in_a_delta, str(run), settings)
    last = max(step for step in STEPS if (run / numbered(step)).exists())
    assert 3 <= last < 6 and delta(3) <= steps_in(run)
    run_ranks(1, runs.run, runs.restless, str(run), {**settings, "resume": "auto"})
    assert all(same(state_of(run, step), straight / numbered(step)) for step in STEPS)
    assert same(run / "last.pt", straight / "last.pt")
