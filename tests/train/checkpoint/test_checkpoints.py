"""What the trainer saves, what it refuses to save, and what it refuses to read."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.errors import CkptToolError, Damaged, FileError, Refused, Unreadable
from ckpttool.files import commit
from tests.ranks import trainings
from train.checkpoint import files as checkpoint_files
from train.checkpoint import format as checkpoints
from train.checkpoint import saver as saving
from train.config.shared import Every
from train.main import steps_of_epoch
from train.model import builtin as models
from train.run.run import Limits

PLAIN = (type(None), bool, int, float, str, torch.Tensor)


def small_resnet() -> models.ResNet:
    return models.ResNet(1, 10, 3)


def make_trainer(rank: int, world_size: int, **settings: Any) -> Any:
    settings = {"batch_size": 4, "lr": 0.1, **settings}
    data = trainings.tensors((3, 8, 8), 8)
    return trainings.trainer(rank, world_size, data, trainings.seeded(small_resnet), **settings)


def save_last(trainer: Any, folder: str, *, best: bool = False) -> None:
    saver = saving.Saver(trainer, folder)
    saver.save(last=True, best=best)
    saver.finish()


def save_after_an_epoch(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> Any:
    trainer = make_trainer(rank, world_size, **settings)
    trainings.finish_epoch(trainer)
    before = trainer.ddp.module.bn1.running_mean.clone()
    save_last(trainer, folder)
    return before, trainer.ddp.module.bn1.running_mean.clone()


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in [key, *leaves(item)]]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


@pytest.fixture(scope="module")
def saved(run_ranks, tmp_path_factory) -> dict[str, Any]:
    """A checkpoint saved by two ranks, as `weights_only` reads it, and the ranks before and after."""
    folder = tmp_path_factory.mktemp("saved")
    ranks = run_ranks(2, save_after_an_epoch, str(folder), {})
    return {"ranks": ranks, "state": torch.load(folder / "last.pt", weights_only=True), "folder": folder}


def test_a_checkpoint_is_primitives_and_tensors_that_weights_only_loads(saved):
    assert {type(leaf) for leaf in leaves(saved["state"])} <= set(PLAIN)


def test_the_model_has_the_keys_that_ddp_gives_and_ckpttool_strips(saved):
    keys = list(saved["state"]["model"])
    assert keys == [f"module.{name}" for name in small_resnet().state_dict()]


def test_the_optimizers_state_names_its_parameters_as_the_model_does(saved):
    (group,) = saved["state"]["optimizer"]["param_groups"]
    assert group["param_names"] == [f"module.{name}" for name, _ in small_resnet().named_parameters()]
    assert len(saved["state"]["optimizer"]["state"]) == len(group["param_names"])


def test_a_checkpoint_records_the_progress_the_plan_and_the_versions(saved):
    state = saved["state"]
    assert state["progress"] == {
        "epoch": 1, "step": 0, "global_step": 2, "samples": 8, "best": -math.inf, "unscored": False,
        "uncounted": 0, "lr": 0.1, "sums": [[0.0] * 4] * 2,
    }  # fmt: skip
    assert (state["plan"]["samples"], state["plan"]["world_size"]) == (8, 2)
    assert state["config"]["batch_size"] == 4
    assert state["versions"]["torch"] == str(torch.__version__)
    assert state["scheduler"]["last_epoch"] == 2


def test_the_random_state_of_every_rank_is_saved(saved):
    first, second = saved["state"]["rng"]
    assert {"python", "torch"} <= set(first)
    assert not torch.equal(first["torch"], second["torch"])


def test_batchnorm_statistics_are_made_equal_before_a_save(saved):
    (first, first_after), (second, second_after) = saved["ranks"]
    assert not torch.equal(first, second)
    assert torch.equal(first_after, first)
    assert torch.equal(second_after, first)
    assert torch.equal(saved["state"]["model"]["module.bn1.running_mean"], first)


def test_a_save_leaves_only_the_checkpoint_in_the_folder(saved):
    assert os.listdir(saved["folder"]) == ["last.pt"]


# ---- what is not saved ---------------------------------------------------------------------------------


def save_with_a_difference(rank: int, world_size: int, folder: str, where: str) -> Any:
    trainer = make_trainer(rank, world_size)
    trainings.finish_epoch(trainer)
    if rank == 1:
        with torch.no_grad():
            if where == "parameter":
                trainer.ddp.module.linear.bias[3] += 1e-6
            elif where == "momentum":
                state = trainer.updater.optimizer.state[trainer.ddp.module.conv1.weight]
                state["momentum_buffer"][0] *= 1.001
            else:
                trainer.updater.optimizer.param_groups[0]["lr"] = 0.2
    return trainings.error_of(lambda: save_last(trainer, folder))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("parameter", "module.linear.bias"),
        ("momentum", "momentum_buffer of module.conv1.weight"),
        ("settings", "the optimizer's settings of group 0"),
    ],
)
def test_ranks_that_differ_name_the_tensor_and_the_rank_and_write_no_file(
    run_ranks, tmp_path, size, where, what
):
    said = f"rank 1 has a different {what} than rank 0, before saving"
    assert run_ranks(size, save_with_a_difference, str(tmp_path), where) == [("RanksDiffer", said)] * size
    assert os.listdir(tmp_path) == []


def save_what_is_lost(rank: int, world_size: int, folder: str, name: str, value: float, on: int) -> Any:
    trainer = make_trainer(rank, world_size)
    trainings.finish_epoch(trainer)
    if rank == on:
        trainer.ddp.module.state_dict()[name][0] = value
    return trainings.error_of(lambda: save_last(trainer, folder, best=True))


@pytest.mark.parametrize(
    ("name", "value"), [("linear.bias", float("nan")), ("bn1.running_var", float("inf"))], ids=str
)
@pytest.mark.parametrize("on", [0, 1])
def test_nan_on_one_rank_ends_all_ranks_and_that_rank_reports_it(run_ranks, tmp_path, name, value, on):
    answers = run_ranks(2, save_what_is_lost, str(tmp_path), name, value, on)
    said = f"after step 2 {name} is NaN or infinite: training has diverged"
    assert answers.pop(on) == ("CheckFailed", said)
    assert answers == [("RankFailed", f"rank {on} failed: {said}")]
    assert os.listdir(tmp_path) == []


def save_on_a_full_disk(rank: int, world_size: int, folder: str) -> Any:
    trainer = make_trainer(rank, world_size)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:  # Python ignores the signal, so a write past the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    try:
        save_last(trainer, folder)
    except CkptToolError as error:
        return type(error).__name__, error.message, error.exit_code
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return None


@pytest.mark.parametrize("size", [1, 4])
def test_a_failed_write_on_rank_0_stops_every_rank_and_leaves_the_old_file(run_ranks, tmp_path, size):
    (tmp_path / "last.pt").write_bytes(b"the old one")
    first, *others = run_ranks(size, save_on_a_full_disk, str(tmp_path))
    path = tmp_path / "last.pt"
    assert first[0] == "FileError"
    assert first[1].startswith(f"{path}: could not be written: ")
    assert others == [("RankFailed", f"rank 0 failed: {first[1]}", 3)] * (size - 1)
    assert path.read_bytes() == b"the old one"
    assert os.listdir(tmp_path) == ["last.pt"]


# ---- which files, and when -----------------------------------------------------------------------------


def files_of_a_run(rank: int, world_size: int, folder: str, best: list[bool], settings: Any) -> Any:
    """Return the files after each epoch of a run in which the marked epochs are the best so far."""
    trainer = make_trainer(rank, world_size, epochs=len(best), **settings)
    saver, seen = saving.Saver(trainer, folder), []
    limits = Limits(trainer.config, trainer.feed.steps_per_epoch)
    for is_best in best:
        for _ in steps_of_epoch(trainer):
            due, ends = limits.due(trainer.progress), trainer.epoch_is_done()
            if ends:
                trainer.finish_epoch()
            saver.save(last=due.save, best=is_best and ends)
            saver.finish()
        seen.append(sorted(os.listdir(folder)))
    return seen


@pytest.mark.parametrize(
    ("settings", "best", "files"),
    [
        ({}, [True, False], [["best.pt", "last.pt"], ["best.pt", "last.pt"]]),
        ({"save_every": Every(2, "epochs")}, [False] * 3, [[], ["last.pt"], ["last.pt"]]),
        ({"save_every": Every(9, "epochs")}, [True, False], [["best.pt"], ["best.pt", "last.pt"]]),
        ({"save_every": Every(3, "steps")}, [False] * 3, [[], ["last.pt"], ["last.pt"]]),
        (
            {"keep": 2},
            [False] * 3,
            [
                ["last.pt", "step-000002.pt"],
                ["last.pt", "step-000002.pt", "step-000004.pt"],
                ["last.pt", "step-000004.pt", "step-000006.pt"],
            ],
        ),
    ],
    ids=["each epoch", "every second", "best only", "steps", "keep"],
)
def test_checkpoints_are_written_as_often_as_asked_after_the_last_epoch_and_for_the_best(
    run_ranks, tmp_path, settings, best, files
):
    assert run_ranks(1, files_of_a_run, str(tmp_path), best, settings) == [files]


def test_best_pt_is_not_changed_by_later_saves_of_last_pt(run_ranks, tmp_path):
    run_ranks(1, files_of_a_run, str(tmp_path), [True, False], {})
    states = [torch.load(tmp_path / name, weights_only=True) for name in ("best.pt", "last.pt")]
    assert [state["progress"]["epoch"] for state in states] == [1, 2]


def write_numbered(folder: Path, *numbers: int) -> None:
    """Write checkpoints, as far as `drop_old` looks at them, one second after the other."""
    for second, number in enumerate(numbers):
        path = folder / checkpoint_files.numbered(number)
        torch.save({"progress": {"global_step": number}, "digests": {}}, path)
        os.utime(path, (second, second))


def test_the_numbered_checkpoints_written_last_are_kept_even_if_their_numbers_are_smaller(tmp_path):
    write_numbered(tmp_path, 7, 8, 4, 5)
    checkpoint_files.drop_old(str(tmp_path), keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000004.pt", "step-000005.pt"]


def write_foreign(path: Path, what: str) -> None:
    """Write a file of another program, as whose reading fails in a way of its own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/other" if what == "no pickle" else "a/data.pkl", b"digests global_step" * 9)
    raw = bytearray(path.read_bytes())
    if what == "corrupt":  # behind the header and the name
        raw[40:44] = b"\xff" * 4
    elif what == "encrypted":
        raw[6] |= 1
        raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(b"text" if what == "text" else raw)


@pytest.mark.parametrize("keep", [1, 4, 5, 8])
def test_only_checkpoints_of_the_trainer_beyond_keep_are_removed(tmp_path, keep):
    write_numbered(tmp_path, *range(5))
    foreign = ["step-7.pt", "step-0000007.pt", "step-000007.pt", "step-000008.pt", "step-000009.pt"]
    for name in foreign[:2]:
        shutil.copy(tmp_path / "step-000000.pt", tmp_path / name)
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / foreign[2])
    (tmp_path / foreign[3]).symlink_to("step-7.pt")
    (tmp_path / foreign[4]).mkdir()
    for number, damage in enumerate(("corrupt", "encrypted", "text", "no pickle"), start=10):
        foreign.append(checkpoint_files.numbered(number))
        write_foreign(tmp_path / foreign[-1], damage)
    checkpoint_files.drop_old(str(tmp_path), keep)
    own = [checkpoint_files.numbered(number) for number in range(5)]
    assert sorted(os.listdir(tmp_path)) == sorted(foreign + own[-keep:])


def test_an_old_checkpoint_that_can_not_be_removed_is_named(tmp_path, monkeypatch):
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    write_numbered(tmp_path, 1, 2)
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(FileError, match=r"step-000001\.pt: could not be removed: permission denied"):
        checkpoint_files.drop_old(str(tmp_path), keep=1)


def test_a_second_name_that_can_not_be_given_leaves_no_third(tmp_path, monkeypatch):
    checkpoint_files.write({"a": torch.ones(2)}, str(tmp_path), ["best.pt"])
    replace = os.replace

    def refuse(source, target):
        if source.endswith(checkpoint_files.LINK):
            raise OSError(errno.EDQUOT, "Disk quota exceeded", source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(FileError, match="quota"):
        checkpoint_files.write({"a": torch.zeros(2)}, str(tmp_path), ["last.pt", "best.pt"])
    assert os.listdir(tmp_path) == ["best.pt"]  # the first name is given last
    assert torch.load(tmp_path / "best.pt")["a"].sum() == 0


def test_an_error_of_the_folder_after_the_file_got_its_name_is_no_error_of_the_placing(tmp_path, monkeypatch):
    seen, placed = [], []

    @contextlib.contextmanager
    def placing():
        try:
            yield
        except BaseException as error:
            seen.append(error)
            raise

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for name in ("sync_folder", "keep_permissions"):  # behind the rename, and before it
        with monkeypatch.context() as patch, pytest.raises(FileError, match="error"):
            patch.setattr(commit, name, fail)
            state = {"a": torch.full((2,), len(placed))}
            checkpoint_files.write(state, str(tmp_path), ["last.pt"], placing=placing, placed=placed)
        assert (placed, len(seen)) == (["last.pt"], int(name != "sync_folder"))
    assert os.listdir(tmp_path) == ["last.pt"]
    assert torch.load(tmp_path / "last.pt")["a"].sum() == 0


def test_the_second_file_is_a_copy_if_the_file_system_has_no_links(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    checkpoint_files.write({"a": torch.ones(2)}, str(tmp_path), ["last.pt", "best.pt"])
    assert (tmp_path / "last.pt").read_bytes() == (tmp_path / "best.pt").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]


# ---- reading -------------------------------------------------------------------------------------------


def test_a_saved_checkpoint_can_be_read(saved):
    assert checkpoints.read(str(saved["folder"] / "last.pt"))["progress"]["epoch"] == 1


def test_a_missing_file_is_unreadable(tmp_path):
    with pytest.raises(Unreadable, match="no such file"):
        checkpoints.read(str(tmp_path / "absent.pt"))


@pytest.mark.parametrize(
    "state", [{"model": {}}, [1], nn.Linear(2, 2).state_dict()], ids=["a dict", "a list", "a state dict"]
)
def test_another_programs_checkpoint_is_refused(tmp_path, state):
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(Refused, match="not a checkpoint of this trainer") as refused:
        checkpoints.read(str(tmp_path / "other.pt"))
    assert "ckpttool inspect" in refused.value.hint


def test_a_checkpoint_that_would_run_something_is_refused_without_torchs_advice_to_run_it(tmp_path):
    torch.save({"model": subprocess.Popen}, tmp_path / "hostile.pt")
    with pytest.raises(Damaged, match="holds more than tensors and plain values, or is damaged") as refused:
        checkpoints.read(str(tmp_path / "hostile.pt"))
    assert "weights_only" not in str(refused.value)


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.999])
def test_a_truncated_file_is_damaged(saved, tmp_path, kept):
    data = Path(saved["folder"], "last.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(Damaged, match=r"cut\.pt"):
        checkpoints.read(str(tmp_path / "cut.pt"))


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_flipped_bit_that_torch_would_load_is_damaged(saved, tmp_path, part):
    data = bytearray(Path(saved["folder"], "last.pt").read_bytes())
    state = saved["state"]
    tensor = state["model"]["module.linear.weight"]
    if part == "optimizer":
        last = max(state["optimizer"]["state"])
        tensor = state["optimizer"]["state"][last - 1]["momentum_buffer"]
    values = bytes(tensor.numpy().tobytes())
    assert data.count(values) == 1
    data[data.index(values) + 5] ^= 1
    (tmp_path / "flipped.pt").write_bytes(data)
    torch.load(tmp_path / "flipped.pt", weights_only=True)
    with pytest.raises(Damaged, match=f"the {part}'s values"):
        checkpoints.read(str(tmp_path / "flipped.pt"))
