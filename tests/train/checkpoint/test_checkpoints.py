"""What the trainer saves, what it refuses to save, and which files it writes, keeps and removes."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool import system
from ckpttool.errors import FileError
from ckpttool.files import commit
from tests.ranks import runs, trainings
from train.checkpoint import files as checkpoint_files
from train.checkpoint import saver as saving
from train.config.flags import Every
from train.main import steps_of_epoch
from train.run.run import Limits

PLAIN = (type(None), bool, int, float, str, torch.Tensor)


def make_trainer(rank: int, world_size: int, **settings: Any) -> Any:
    settings = {"batch_size": 4, "lr": 0.1, **settings}
    data = trainings.tensors(runs.SHAPE, 8)
    return trainings.trainer(rank, world_size, data, trainings.seeded(runs.restless), **settings)


def save_last(trainer: Any, folder: str, *, best: bool = False) -> None:
    saver = saving.Saver(trainer, folder)
    saver.save(last=True, best=best)
    saver.finish()


def save_after_an_epoch(rank: int, world_size: int, folder: str) -> Any:
    trainer = make_trainer(rank, world_size)
    trainings.finish_epoch(trainer)
    mean = trainer.ddp.module.blocks[0].norm.running_mean
    before = mean.clone()
    save_last(trainer, folder)
    return before, mean.clone()


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
    ranks = run_ranks(2, save_after_an_epoch, str(folder))
    return {"ranks": ranks, "state": torch.load(folder / "last.pt", weights_only=True), "folder": folder}


def test_a_checkpoint_is_primitives_and_tensors_that_weights_only_loads(saved):
    assert {type(leaf) for leaf in leaves(saved["state"])} <= set(PLAIN)


def test_the_keys_are_those_that_ddp_gives_and_ckpttool_strips_also_in_the_optimizers_state(saved):
    model, state = runs.restless(), saved["state"]
    assert list(state["model"]) == [f"module.{name}" for name in model.state_dict()]
    (group,) = state["optimizer"]["param_groups"]
    assert group["param_names"] == [f"module.{name}" for name, _ in model.named_parameters()]
    assert len(state["optimizer"]["state"]) == len(group["param_names"])


def test_a_checkpoint_records_the_progress_the_plan_and_the_versions(saved):
    state = saved["state"]
    assert state["progress"] == {
        "epoch": 1, "step": 0, "global_step": 2, "samples": 8, "best": -math.inf, "unscored": False,
        "uncounted": 0, "lr": 0.1, "sums": [[0.0] * 4] * 2, "since_best": 0, "top": [],
    }  # fmt: skip
    assert (state["plan"]["samples"], state["plan"]["world_size"], state["config"]["batch_size"]) == (8, 2, 4)
    assert (state["versions"]["torch"], state["scheduler"]["last_epoch"]) == (str(torch.__version__), 2)


def test_the_random_state_of_every_rank_is_saved(saved):
    first, second = saved["state"]["rng"]
    assert {"python", "torch"} <= set(first)
    assert not torch.equal(first["torch"], second["torch"])


def test_batchnorm_statistics_are_made_equal_before_a_save(saved):
    (first, first_after), (second, second_after) = saved["ranks"]
    assert not torch.equal(first, second)
    in_file = saved["state"]["model"]["module.blocks.0.norm.running_mean"]
    assert all(torch.equal(mean, first) for mean in (first_after, second_after, in_file))


def test_a_save_leaves_only_the_checkpoint_in_the_folder(saved):
    assert os.listdir(saved["folder"]) == ["last.pt"]


# ---- what is not saved ---------------------------------------------------------------------------------


def momentum(trainer: Any) -> torch.Tensor:
    return trainer.updater.optimizer.state[trainer.ddp.module.stem.weight]["momentum_buffer"]


CHANGES: dict[str, Callable[[Any], object]] = {
    "module.head.bias": lambda trainer: trainer.ddp.module.head.bias[3].add_(1e-6),
    "momentum_buffer of module.stem.weight": lambda trainer: momentum(trainer)[0].mul_(1.001),
    "the optimizer's settings of group 0": lambda t: t.updater.optimizer.param_groups[0].update(lr=0.2),
    "head.bias": lambda trainer: trainer.ddp.module.head.bias[0].fill_(math.nan),
    "blocks.1.norm.running_var": lambda t: t.ddp.module.blocks[1].norm.running_var[0].fill_(math.inf),
}


def save_a_change(
    rank: int, world_size: int, folder: str, what: str, on: int, settings: dict[str, Any] | None = None
) -> Any:
    """Save after an epoch, and after a change on one rank; return the error."""
    trainer = make_trainer(rank, world_size, **settings or {})
    trainings.finish_epoch(trainer)
    if rank == on:
        with torch.no_grad():
            CHANGES[what](trainer)
    return trainings.error_of(lambda: save_last(trainer, folder, best=True))


@pytest.mark.parametrize(("what", "size", "settings"), [
    *((what, size, {}) for what in list(CHANGES)[:3] for size in (2, 4)),
    (list(CHANGES)[2], 2, {"zero": True}),
])  # fmt: skip
def test_ranks_that_differ_name_the_tensor_and_the_rank_and_write_no_file(
    run_ranks, tmp_path, what, size, settings
):
    said = f"rank 1 has a different {what} than rank 0, before saving"
    assert run_ranks(size, save_a_change, str(tmp_path), what, 1, settings) == [("RanksDiffer", said)] * size
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", list(CHANGES)[3:])
@pytest.mark.parametrize("on", [0, 1])
def test_nan_on_one_rank_ends_all_ranks_and_that_rank_reports_it(run_ranks, tmp_path, name, on):
    answers = run_ranks(2, save_a_change, str(tmp_path), name, on)
    said = f"after step 2 {name} is NaN or infinite: training has diverged"
    assert answers.pop(on) == ("CheckFailed", said)
    assert answers == [("RankFailed", f"rank {on} failed: {said}")]
    assert os.listdir(tmp_path) == []


# ---- which files, and when -----------------------------------------------------------------------------


def files_of_a_run(rank: int, world_size: int, folder: str, best: list[bool], settings: Any) -> Any:
    """Return the files and their steps after each epoch of a run; the marked epochs are the best so far."""
    trainer = make_trainer(rank, world_size, epochs=len(best), **settings)
    saver, seen = saving.Saver(trainer, folder), []
    limits = Limits(trainer.config, lambda: trainer.feed.steps_per_epoch)
    for is_best in best:
        for _ in steps_of_epoch(trainer):
            due, ends = limits.due(trainer.progress), trainer.epoch_is_done()
            if ends:
                trainer.finish_epoch()
            saver.save(last=due.save, best=is_best and ends)
            saver.finish()
        states = {path.name: runs.read(path) for path in Path(folder).iterdir()}
        seen.append({name: state["progress"]["global_step"] for name, state in states.items()})
    return seen


def kept(*steps: int) -> dict[str, int]:
    """Return the files of `--keep` after the last of these steps."""
    return {"last.pt": steps[-1], **{checkpoint_files.numbered(step): step for step in steps}}


@pytest.mark.parametrize(
    ("settings", "best", "files"),
    [
        ({}, [True, False], [{"best.pt": 2, "last.pt": 2}, {"best.pt": 2, "last.pt": 4}]),
        ({"save_every": Every(2, "epochs")}, [False] * 3, [{}, {"last.pt": 4}, {"last.pt": 6}]),
        ({"save_every": Every(9, "epochs")}, [True, False], [{"best.pt": 2}, {"best.pt": 2, "last.pt": 4}]),
        ({"save_every": Every(3, "steps")}, [False] * 3, [{}, {"last.pt": 3}, {"last.pt": 6}]),
        ({"keep": 2}, [False] * 3, [kept(2), kept(2, 4), kept(4, 6)]),
    ],
    ids=["each epoch", "every second", "best only", "steps", "keep"],
)
def test_checkpoints_are_written_as_often_as_asked_after_the_last_epoch_and_for_the_best(
    run_ranks, tmp_path, settings, best, files
):
    """A later save of last.pt changes no best.pt, which may be the same file."""
    assert run_ranks(1, files_of_a_run, str(tmp_path), best, settings) == [files]


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


# ---- system calls that fail ----------------------------------------------------------------------------


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_an_old_checkpoint_that_can_not_be_removed_is_named(tmp_path, monkeypatch):
    write_numbered(tmp_path, 1, 2)
    monkeypatch.setattr(os, "unlink", failing(errno.EACCES))
    with pytest.raises(FileError, match=r"step-000001\.pt: could not be removed: permission denied"):
        checkpoint_files.drop_old(str(tmp_path), keep=1)


def test_a_second_name_that_can_not_be_given_leaves_no_third(tmp_path, monkeypatch):
    checkpoint_files.write({"a": torch.ones(2)}, str(tmp_path), ["best.pt"])
    replace, refuse = os.replace, failing(errno.EDQUOT)

    def give(path: str, to: str) -> None:
        (refuse if path.endswith(commit.LINK) else replace)(path, to)

    monkeypatch.setattr(os, "replace", give)
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

    for module, name in ((system, "sync_folder"), (commit, "keep_permissions")):  # behind the rename; before
        with monkeypatch.context() as patch, pytest.raises(FileError, match="error"):
            patch.setattr(module, name, failing(errno.EIO))
            state = {"a": torch.full((2,), len(placed))}
            checkpoint_files.write(state, str(tmp_path), ["last.pt"], placing=placing, placed=placed)
        assert (placed, len(seen)) == (["last.pt"], int(name != "sync_folder"))
    assert os.listdir(tmp_path) == ["last.pt"]
    assert torch.load(tmp_path / "last.pt")["a"].sum() == 0


def test_the_second_file_is_a_copy_if_the_file_system_has_no_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    checkpoint_files.write({"a": torch.ones(2)}, str(tmp_path), ["last.pt", "best.pt"])
    assert (tmp_path / "last.pt").read_bytes() == (tmp_path / "best.pt").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]
