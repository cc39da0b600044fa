"""`slim --in-place`: room in a run's folder; never the newest, what is no checkpoint, or what others need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.formats import saving
from ckpttool.errors import FileError, NothingToDo, UsageFault
from ckpttool.slimming import slimming
from tests.support.sparse_updates import trl

RUN = "run"


def training(number: int, **more: Any) -> dict[str, Any]:
    """Return a training's state after a step."""
    weights = {"module.w": torch.full((40, 30), float(number)), "module.b": torch.arange(3.0)}
    slots = {0: {"exp_avg": torch.rand(40, 30), "exp_avg_sq": torch.rand(40, 30)}}
    optimizer = {"state": slots, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    return {"model": weights, "optimizer": optimizer, "step": number, **more}


def write(folder: Path, name: str, number: int, **more: Any) -> Path:
    """Write a checkpoint, changed `number` seconds after the epoch."""
    torch.save(training(number, **more), folder / name)
    os.utime(folder / name, (number, number))
    return folder / name


@pytest.fixture
def run(here: Path) -> Path:
    """A run: four numbered checkpoints, the last of which is last.pt too, the second best.pt; and others."""
    folder = here / RUN
    folder.mkdir()
    for number in range(1, 5):
        write(folder, f"step-{number}.pt", number)
    os.link(folder / "step-4.pt", folder / "last.pt")
    os.link(folder / "step-2.pt", folder / "best.pt")
    (folder / "first.pt").symlink_to("step-1.pt")
    (folder / "log.jsonl").write_text('{"epoch": 1}\n')
    (folder / "notes.pt").write_bytes(b"no checkpoint")
    torch.save({"images": torch.rand(50, 50), "names": ["a"] * 50}, folder / "data.pt")
    save_file({"w": torch.rand(60, 60)}, folder / "model.safetensors")
    os.utime(folder / "data.pt", (99, 99))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


# ---- what it does --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "said"), [("--dry-run", "would be left out"), ("--no-verify", "left out")])
def test_what_is_left_out_is_named_another_model_too(flag, said, run, cli):
    write(run, "step-1.pt", 1, ema={"module.w": torch.rand(40, 30)})
    ran = cli("slim", "--in-place", RUN, "--keep-newest", 2, flag)
    assert ran.code == 0 and f"\n{said}: optimizer, step, ema\n" in ran.err


def test_older_checkpoints_lose_the_optimizer_and_nothing_else_and_keep_links_and_times(run, cli):
    before = contents(run)
    ran = cli("slim", "--in-place", RUN, "--keep-newest", 2, "--drop", "optimizer")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("slimmed 2 checkpoints in run: ")
    assert "best.pt = step-2.pt" in ran.out and "step-1.pt = first.pt" in ran.out
    changed = {name for name, raw in contents(run).items() if raw != before[name]}
    assert changed == {"step-1.pt", "step-2.pt", "best.pt", "first.pt"}
    assert os.path.samefile(run / "step-2.pt", run / "best.pt") and (run / "first.pt").is_symlink()
    for number in (1, 2):
        found, wanted = load(run / f"step-{number}.pt"), training(number)
        del wanted["optimizer"]
        assert repr(found) == repr(wanted)
        assert (run / f"step-{number}.pt").stat().st_mtime == number


def test_without_drop_the_models_state_stays_alone(run, cli):
    ran = cli("slim", "--in-place", RUN, "--keep-newest", 1, "--json")
    assert ran.code == 0, ran.out
    assert [each["name"] for each in ran.json["slimmed"]] == ["step-3.pt", "best.pt", "step-1.pt"]
    assert ran.json["slimmed"][0]["left_out"] == ["optimizer", "step"]
    assert repr(load(run / "best.pt")) == repr(training(2)["model"])
    assert ran.json["freed"] == sum(each["before"] - each["after"] for each in ran.json["slimmed"])


def test_a_dry_run_says_what_would_become_free_to_the_byte_and_changes_nothing(run, cli):
    before, facts = contents(run), {path: path.lstat() for path in run.iterdir()}
    words = ["slim", "--in-place", RUN, "--keep-newest", 1, "--drop", "optimizer", "--json"]
    dry = cli(*words, "--dry-run").json
    assert contents(run) == before and {path: path.lstat() for path in run.iterdir()} == facts
    wet = cli(*words).json
    assert dry["dry_run"] is True and dry["freed"] == wet["freed"] > 30_000
    now = sum(os.stat(run / each["name"]).st_size for each in wet["slimmed"])
    assert now == sum(each["after"] for each in dry["slimmed"])


def test_again_there_is_nothing_to_do(run, cli):
    words = ["slim", "--in-place", RUN, "--keep-newest", 1, "--drop", "optimizer"]
    assert cli(*words).code == 0
    before = contents(run)
    ran = cli(*words)
    assert (ran.code, ran.out) == (1, "") and "holds no checkpoint that would become smaller" in ran.err
    assert contents(run) == before


@pytest.mark.parametrize("kind", ["full safetensors", "legacy", "other name"])
def test_files_of_other_formats_keep_them(run, cli, kind):
    shutil.rmtree(run)
    run.mkdir()
    write(run, "last.pt", 9)
    old = run / ("a.safetensors" if kind == "full safetensors" else "a.ckpt-7")
    if kind == "full safetensors":
        torch.save(training(1), "a.pt")
        assert cli("convert", "a.pt", old, "--full").code == 0
    else:
        torch.save(training(1), old, _use_new_zipfile_serialization=kind != "legacy")
    size = old.stat().st_size
    assert cli("slim", "--in-place", RUN, "--keep-newest", 1, "--drop", "optimizer").code == 0
    assert old.stat().st_size < size
    with ckpttool.open(old) as checkpoint:
        assert checkpoint.tree.keys() == {"model", "step"}


# ---- what stays ----------------------------------------------------------------------------------------


def reasons(found: slimming.SlimmedRun) -> dict[str, str]:
    return {file.name: file.why for file in found.kept}


def test_what_stays_is_named_with_the_reason(run):
    found = slimming.slim_in_place(RUN, keep_newest=2, leave_out=["optimizer"], dry_run=True)
    why = reasons(found)
    assert why["last.pt"] == why["step-3.pt"] == "is one of the newest 2"
    assert why["log.jsonl"].startswith("is no checkpoint") and why["notes.pt"].startswith("is no checkpoint")
    assert why["data.pt"] == why["model.safetensors"] == "holds nothing named 'optimizer'"
    without = slimming.slim_in_place(RUN, keep_newest=2, dry_run=True)
    assert reasons(without)["data.pt"] == "holds no optimizer's state"


def test_last_is_the_newest_whatever_its_time(run):
    """As after a copy of the folder, in which all files are of now."""
    os.utime(run / "last.pt", (0, 0))
    found = slimming.slim_in_place(RUN, keep_newest=1)
    assert reasons(found)["last.pt"] == "is the newest"
    assert load(run / "last.pt").keys() == training(4).keys()


def test_a_file_with_a_name_elsewhere_stays_as_nothing_would_become_free(run, here):
    os.link(run / "step-1.pt", here / "mine.pt")
    found = slimming.slim_in_place(RUN, keep_newest=1)
    assert reasons(found)["step-1.pt"] == "has 1 more name outside of this folder"


def test_what_deltas_are_built_on_stays_and_they_can_still_be_read(run):
    for base, new in ((1, 2), (2, 3)):
        name = f"step-{base}.pt" if base == 1 else "step-2.delta.safetensors"
        with ckpttool.open(run / name) as older:
            ckpttool.delta(older, run / f"step-{new}.pt", run / f"step-{new}.delta.safetensors")
    found = slimming.slim_in_place(RUN, keep_newest=1)
    why = reasons(found)
    assert why["step-1.pt"] == "is what step-2.delta.safetensors is built on"
    assert why["step-2.delta.safetensors"] == "is a delta"
    assert {file.name for file in found.slimmed} == {"best.pt", "step-3.pt"}
    with ckpttool.open(run / "step-3.delta.safetensors") as made:
        assert set(made.tree["model"]) == {"module.w", "module.b"} and "optimizer" in made.tree


def test_anchors_of_versions_stay_if_they_are_to(run, cli):
    ran = cli("slim", "--in-place", RUN, "--keep-newest", 1, "--keep-anchors", "--dry-run", "--json")
    assert len(ran.json["slimmed"]) == 3  # there are no deltas
    pair = run / "step-3.pt", run / "step-2.pt"  # another series
    ckpttool.delta(*pair, run / "weight_v000004", layout="weight-v")
    ran = cli("slim", "--in-place", RUN, "--keep-newest", 1, "--keep-anchors")
    assert ran.code == 1  # all have a step in one of their names
    assert len(slimming.slim_in_place(RUN, keep_newest=1, dry_run=True).slimmed) == 3


@pytest.mark.parametrize("lost", [False, True])
def test_a_delta_that_no_training_goes_on_from_is_not_the_newest(run, here, lost):
    """Of values alone, or over a base that is gone."""
    older, newer = ({"w": torch.full((5,), value).bfloat16()} for value in (1.0, 2.0))
    (run / "last.pt").unlink()
    if lost:
        write(run, "step-8.pt", 8), write(run, "step-9.pt", 9)
        ckpttool.delta(run / "step-8.pt", run / "step-9.pt", run / "step-9.delta.safetensors")
        (run / "step-8.pt").unlink(), (run / "step-9.pt").unlink()
    else:
        trl(run / "step_000009.safetensors", 9, older, newer)
    found = slimming.slim_in_place(RUN, keep_newest=1, dry_run=True)
    assert "is the newest" in {why for name, why in reasons(found).items() if name.endswith(".pt")}
    assert len(found.slimmed) == 3


@pytest.mark.parametrize("place", ["deltas/step_000004.safetensors", "v00000004", "delta-00000004"])
def test_anchors_stay_beside_deltas_of_any_series(run, here, place):
    older, newer = ({"w": torch.full((5,), value).bfloat16()} for value in (1.0, 2.0))
    save_file(older, here / "a.safetensors"), save_file(newer, here / "b.safetensors")
    (run / place).parent.mkdir(exist_ok=True)
    if place.endswith(".safetensors"):
        trl(run / place, 4, older, newer)
    else:
        layout = "weight-v" if place.startswith("v") else "skyrl"
        ckpttool.delta(here / "a.safetensors", here / "b.safetensors", run / place, layout=layout)
    write(run, "weight_v000001.pt", 1)
    with pytest.raises(NothingToDo):
        slimming.slim_in_place(RUN, keep_newest=1, keep_anchors=True, dry_run=True)


def test_what_would_take_the_model_too_stays(run):
    for name in ("model", "model.module.w"):
        with pytest.raises(NothingToDo):
            slimming.slim_in_place(RUN, keep_newest=1, leave_out=[name])


def test_a_link_out_of_the_folder_is_not_followed(run, here):
    theirs = write(here, "theirs.pt", 1)
    before = theirs.read_bytes()
    (run / "linked.pt").symlink_to(theirs)
    slimming.slim_in_place(RUN, keep_newest=1)
    assert theirs.read_bytes() == before and (run / "linked.pt").is_symlink()


# ---- what fails ----------------------------------------------------------------------------------------


def test_a_folder_in_which_a_run_writes_is_refused(run, cli):
    """The trainer holds such a lock; a look is allowed."""
    hold = (
        "import fcntl, os, sys; fcntl.flock(os.open('run', os.O_RDONLY), fcntl.LOCK_EX); print(flush=True); "
    )
    with subprocess.Popen([sys.executable, "-c", hold + "sys.stdin.read()"], stdin=-1, stdout=-1) as holder:
        assert holder.stdout and holder.stdout.readline()
        ran = cli("slim", "--in-place", RUN, "--keep-newest", 1)
        assert ran.code == 2 and "another run, or slim, writes there now" in ran.err
        assert cli("slim", "--in-place", RUN, "--keep-newest", 1, "--dry-run").code == 0
        assert holder.stdin
        holder.stdin.close()


@pytest.mark.parametrize("fails", range(1, 5))
def test_a_kill_leaves_each_file_old_or_new_and_the_next_call_goes_on(run, monkeypatch, fails):
    """Before each of the renames that the call makes."""
    before = {name: raw for name, raw in contents(run).items() if name.endswith(".pt")}
    count, usual = [0], os.replace

    class Killed(BaseException):
        pass

    def replace(path: str, other: str) -> None:
        count[0] += 1
        if count[0] == fails:
            raise Killed
        usual(path, other)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", replace)
        slimming.slim_in_place(RUN, keep_newest=1, leave_out=["optimizer"])
    for name, raw in before.items():
        if name.startswith(("step", "best")) and (run / name).read_bytes() != raw:
            assert load(run / name).keys() == {"model", "step"}
    slimming.slim_in_place(RUN, keep_newest=1, leave_out=["optimizer"])
    assert all(load(run / f"step-{number}.pt").keys() == {"model", "step"} for number in (1, 2, 3))
    assert load(run / "best.pt").keys() == {"model", "step"}
    assert set(before) == {name for name in os.listdir(run) if name.endswith(".pt")}
    assert not [name for name in os.listdir(run) if name.startswith(".") or name.endswith(".link")]


def test_a_full_disk_is_named_and_what_was_done_stays(run, monkeypatch):
    done: list[str] = []

    def save(checkpoint: Any, path: str, **how: Any) -> Any:
        if not how.get("dry_run"):
            if done:
                raise OSError(28, "No space left on device")
            done.append(path)
        return saving.save(checkpoint, path, **how)

    monkeypatch.setattr(slimming, "save", save)
    with pytest.raises(FileError, match="could not be written: no space left on device"):
        slimming.slim_in_place(RUN, keep_newest=1)
    assert set(load(Path(done[0]))) == {"module.w", "module.b"}
    slimmed = [number for number in (1, 2, 3) if "optimizer" not in load(run / f"step-{number}.pt")]
    assert len(slimmed) == 1


def test_the_newest_stays_where_no_file_has_an_optimizer(here, cli):
    (here / RUN).mkdir()
    for number in (1, 2):
        torch.save(
            {"model": {"w": torch.ones(40, 30)}, "ema": torch.ones(40, 30)}, here / RUN / f"{number}.pt"
        )
        os.utime(here / RUN / f"{number}.pt", (number, number))
    ran = cli("slim", "--in-place", RUN, "--keep-newest", 1, "--drop", "ema")
    assert ran.code == 0, ran.err
    assert ("ema" in load(here / RUN / "1.pt"), "ema" in load(here / RUN / "2.pt")) == (False, True)


def test_of_several_damaged_checkpoints_each_is_named(run, cli):
    for name, weight in (("step-1.pt", b"\0\0\x80\x3f"), ("step-2.pt", b"\0\0\0\x40")):
        raw = bytearray((run / name).read_bytes())
        raw[raw.index(weight * 8)] ^= 1
        (run / name).write_bytes(raw)
        os.utime(run / name, (1, 1))
    ran = cli("slim", "--in-place", RUN, "--keep-newest", 1)
    assert ran.code == 3 and "1 other checkpoint became smaller; these stay too: " in ran.err
    assert "step-1.pt: the bytes" in ran.err and "best.pt: the bytes" in ran.err  # which is step-2.pt too


def test_a_damaged_checkpoint_stays_and_is_named(run, cli):
    raw = bytearray((run / "step-1.pt").read_bytes())
    raw[raw.index(b"\0\0\x80\x3f" * 8)] ^= 1  # in the weights, which are all 1
    (run / "step-1.pt").write_bytes(raw)
    os.utime(run / "step-1.pt", (1, 1))
    ran = cli("slim", "--in-place", RUN, "--keep-newest", 1)
    assert ran.code == 3 and "step-1.pt" in ran.err and "do not match their checksum" in ran.err
    assert "it stays as it was, and 2 other checkpoints became smaller" in ran.err
    assert load(run / "step-2.pt").keys() == load(run / "step-3.pt").keys() == {"module.w", "module.b"}
    assert (run / "step-1.pt").read_bytes() == bytes(raw)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--in-place", RUN], "--keep-newest N"),
        (["--in-place", RUN, "out.pt", "--keep-newest", "1"], "writes no OUTPUT"),
        (["--in-place", RUN, "--keep-newest", "0"], "--keep-newest"),
        (["--in-place", RUN, "--keep-newest", "1", "--state", "model"], "--state: has no effect"),
        (["--in-place", RUN, "--keep-newest", "1", "--part", "1/2"], "--part: has no effect"),
        (["--in-place", "run/step-1.pt", "--keep-newest", "1"], "is not a folder"),
        (["run/step-1.pt", "out.pt", "--drop", "optimizer"], "--drop needs --in-place"),
        (["run/step-1.pt"], "--in-place RUN --keep-newest N"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(run, cli, words, said):
    before = contents(run)
    ran = cli("slim", *words)
    assert ran.code == 2 and said in ran.err, ran.err
    assert contents(run) == before


def test_the_library_takes_one_checkpoint_at_least(run):
    with pytest.raises(UsageFault, match="the newest always stays"):
        ckpttool.slim_in_place(RUN, keep_newest=0)


def test_where_nothing_is_to_do_all_names_of_a_file_are_said(run: Path) -> None:
    with pytest.raises(NothingToDo) as caught:
        ckpttool.slim_in_place(run, keep_newest=9, leave_out=["optimizer"])
    assert "last.pt = step-4.pt is one of the newest 9" in caught.value.message
