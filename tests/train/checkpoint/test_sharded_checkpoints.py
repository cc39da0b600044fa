"""Checkpoints of `--shard`: the file is that of DDP, or parts of the ranks; others go on with either."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

from ckpttool.core.files import digest
from ckpttool.errors import Damaged
from tests.ranks import mortal, runs, trainings
from tests.support.run_log import entries_of, timeless
from train.checkpoint import files
from train.checkpoint.saver import Saver

SHARD = {"shard": True, "shard_blocks": ("Block",)}
EVERY = {"ema": 0.7, "clip_norm": 1.0, "optimizer": "adamw", "momentum": 0.0, "lr": 0.01}


@pytest.fixture(scope="module")
def whole(run_ranks, tmp_path_factory) -> Path:
    """An uninterrupted run on two ranks, with a checkpoint of each of its steps."""
    folder = tmp_path_factory.mktemp("whole")
    said = run_ranks(2, runs.run, runs.steady, str(folder), {**SHARD, **EVERY, **runs.OFTEN})[0]
    assert "2 × Block, the rest" in said
    return folder


@pytest.fixture(scope="module")
def both(run_ranks, tmp_path_factory) -> tuple[Path, Path]:
    """The same run with `--shard` and under DDP, on two ranks."""
    folder = tmp_path_factory.mktemp("both")
    for name, settings in {"ours": SHARD, "ddp": {}}.items():
        settings = {**settings, "ema": 0.7, "prove_every": 2, **runs.OFTEN}
        run_ranks(2, runs.run, runs.restless, str(folder / name), settings)
    return folder / "ours", folder / "ddp"


@pytest.mark.long
def test_a_run_without_clipping_writes_the_files_that_ddp_writes_on_two_ranks(both):
    for name in ("last.pt", "best.pt", "step-000002.pt"):
        ours, theirs = (runs.read(folder / name) for folder in both)
        assert not runs.different(ours, theirs)
        assert ours["digests"] == {**theirs["digests"], "run": ours["digests"]["run"]}
        assert list(ours["model"]) == list(theirs["model"])
        assert {type(value) for value in ours["model"].values()} == {torch.Tensor}


@pytest.mark.long
def test_the_log_is_that_of_ddp_too(both):
    ours, theirs = (timeless(entries_of(folder)) for folder in both)
    norms = [[entry.pop("grad_norm", 0.0) for entry in entries] for entries in (ours, theirs)]
    assert any(norms[0]) and norms[0] == pytest.approx(norms[1], rel=1e-6)  # summed over the ranks' parts
    assert ours == theirs


@pytest.mark.long
def test_a_record_of_the_run_has_the_digests_that_ddp_gives_on_two_ranks(both):
    ours, theirs = ([link.entry for link in digest.read(str(folder / digest.NAME))[0]] for folder in both)
    told = [
        [(entry["kind"], entry["step"], entry.get("weights"), entry.get("score")) for entry in record[1:]]
        for record in (ours, theirs)
    ]
    assert [kind for kind, *_ in told[0]].count("step") == 3
    # A save is recorded when its file is there, which may be after the next step.
    in_kinds = [sorted(record, key=lambda entry: str(entry[0])) for record in told]
    assert in_kinds[0] == in_kinds[1]
    assert ours[0]["weights"] == theirs[0]["weights"]


MOVES = {
    "the same ranks": (2, SHARD, 0.0),
    "other units and offloaded": (2, {"shard": True, "shard_offload": True}, 0.0),
    "without --shard": (2, {}, 2e-6),  # the norm that clips is summed in another order
    "one rank": (1, {}, 2e-6),
    "one rank with --shard": (1, SHARD, 2e-6),
    "three ranks": (3, SHARD, 2e-6),
    "groups": (4, {**SHARD, "mesh": "2x2"}, 2e-6),
}


@pytest.mark.covered(lambda move: move != "without --shard")
@pytest.mark.parametrize("move", MOVES)
def test_a_run_goes_on_with_other_ranks_units_and_meshes_and_without_shard(run_ranks, tmp_path, whole, move):
    size, settings, bound = MOVES[move]
    stopped = whole / "step-000002.pt"
    said = runs.go_on(run_ranks, size, runs.steady, stopped, tmp_path, {**EVERY, **settings})
    ends = runs.ends(whole, tmp_path)
    assert (runs.different(*ends) == []) if bound == 0.0 else (runs.largest_difference(*ends) <= bound)
    assert ("the last bits may differ: shard True -> False" in said) == (not settings)


def test_a_run_without_shard_goes_on_with_it(run_ranks, tmp_path):
    run_ranks(2, runs.run, runs.restless, str(tmp_path / "ddp"), {**runs.OFTEN})
    stopped = tmp_path / "ddp" / "step-000002.pt"
    runs.go_on(run_ranks, 2, runs.restless, stopped, tmp_path / "rest", SHARD)
    assert runs.different(*runs.ends(tmp_path / "ddp", tmp_path / "rest")) == []


OWN = """
import torch

class Nested(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
    def own(self, tensor):
        return tensor
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                of_it, gradient = self.state[p], self.own(p.grad)
                if not of_it:
                    of_it["sums"] = [torch.zeros_like(gradient), {"sum": torch.zeros_like(gradient)}]
                first, second = of_it["sums"][0], of_it["sums"][1]["sum"]
                first.mul_(0.9).add_(gradient)
                second.add_(gradient)
                self.own(p).sub_(first + 0.1 * second, alpha=group["lr"])

class Local(Nested):  # its state is plain tensors, another on each rank
    def own(self, tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor
"""
PLAIN = {"lr": 0.01, "momentum": None, "weight_decay": None}


@pytest.mark.covered(lambda more: not more)
@pytest.mark.parametrize("more", [{}, {"save_parts": True}], ids=["whole", "parts"])
def test_tensors_in_the_lists_of_an_optimizers_state_are_divided_again(run_ranks, tmp_path, own, more):
    settings = {**SHARD, **PLAIN, "optimizer": f"{own}:Nested"}
    run_ranks(2, runs.run, runs.steady, str(tmp_path / "whole"), {**settings, **runs.OFTEN, **more})
    runs.go_on(run_ranks, 2, runs.steady, tmp_path / "whole" / "step-000002.pt", tmp_path / "rest", settings)
    run_ranks(2, runs.run, runs.steady, str(tmp_path / "gathered"), settings)
    assert runs.different(*runs.ends(tmp_path / "rest", tmp_path / "gathered")) == []


@pytest.mark.covered(lambda more: not more)
@pytest.mark.parametrize("more", [{}, {"save_parts": True}], ids=["whole", "parts"])
def test_a_state_that_is_another_on_each_rank_is_not_saved_as_that_of_rank_0(run_ranks, tmp_path, own, more):
    settings = {**SHARD, **PLAIN, "optimizer": f"{own}:Local", **more}
    said = run_ranks(2, runs.run, runs.steady, str(tmp_path / "run"), settings)[0]
    assert "rank 1 has a different sums of module.stem.weight than rank 0, before saving" in said
    assert not (tmp_path / "run" / "last.pt").exists()


def test_another_model_is_refused_by_what_differs(run_ranks, tmp_path, whole):
    stopped = {"resume": str(whole / "step-000002.pt"), **EVERY, **SHARD}
    said = run_ranks(2, runs.run, wide, str(tmp_path), stopped)[0]
    assert "differs from the saved model" in said
    assert "size mismatch for module.head.weight" in said


def wide() -> torch.nn.Module:
    model = runs.steady()
    model.head = torch.nn.Linear(6, 11)
    return model


# ---- what goes wrong ------------------------------------------------------------------------------------


def save_after_a_change(rank: int, size: int, folder: str, value: float, name: str) -> Any:
    """Save after an epoch and a change of a part, or of a buffer, on rank 1 alone; return the error."""
    model, data = trainings.seeded(runs.restless), trainings.tensors(runs.SHAPE, 8)
    trainer = trainings.trainer(rank, size, data, model, batch_size=4, lr=0.1, **SHARD)
    trainings.finish_epoch(trainer)
    tensor = trainer.ddp.module.state_dict()[name]
    if rank == 1:
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(value)
    saver = Saver(trainer, folder)

    def save() -> None:
        saver.save(last=True, best=False)
        saver.finish()

    return trainings.error_of(save)


def test_a_part_of_nan_on_another_rank_is_found_before_it_is_saved(run_ranks, tmp_path):
    first, second = run_ranks(2, save_after_a_change, str(tmp_path), torch.nan, "head.bias")
    assert first[0] == "CheckFailed"
    assert "after step 2 head.bias is NaN or infinite" in first[1]
    assert second[0] == "RankFailed"
    assert not (tmp_path / "last.pt").exists()


def test_buffers_are_rank_0s_as_under_ddp(run_ranks, tmp_path):
    name = "blocks.0.norm.num_batches_tracked"
    assert run_ranks(2, save_after_a_change, str(tmp_path), 77.0, name) == [None, None]
    assert runs.read(tmp_path / "last.pt")["model"][f"module.{name}"] == 2


def die_in_the_second_save(rank: int, folder: Path) -> None:
    written = files.write

    def write(*given: Any, **named: Any) -> None:
        if (folder / "last.pt").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        written(*given, **named)

    files.write = write  # type: ignore[assignment]
    settings = {**SHARD, "save": "sync", "keep": 0, "save_every": runs.OFTEN["save_every"]}
    runs.run(rank, 2, runs.steady, str(folder), settings)


def test_a_rank_that_dies_in_a_save_leaves_the_file_before(run_ranks, tmp_path):
    mortal.run(die_in_the_second_save, tmp_path)
    assert runs.read(tmp_path / "last.pt")["progress"]["global_step"] == 1
    said = run_ranks(2, runs.run, runs.steady, str(tmp_path), {**SHARD, "resume": "auto"})[0]
    assert "continues from" in said
    assert runs.read(tmp_path / "last.pt")["progress"]["global_step"] == runs.STEPS


# ---- --shard parts: a part of each rank in a folder -----------------------------------------------------


PARTS = {**SHARD, "save_parts": True, "ema": 0.7}


def folders(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.endswith(".dcp"))


def folder_of(file: Path) -> Path:
    return file.parent / torch.load(file, weights_only=True)["parts"]["folder"]


@pytest.fixture(scope="module")
def run(run_ranks, tmp_path_factory) -> Path:
    """A run on two ranks with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("parts")
    said = run_ranks(2, runs.run, runs.steady, str(folder), {**PARTS, **runs.OFTEN})[0]
    assert "Error" not in said, said
    return folder


@pytest.fixture(scope="module")
def gathered(run_ranks, tmp_path_factory) -> Path:
    """The same run, gathered into files."""
    folder = tmp_path_factory.mktemp("files")
    run_ranks(2, runs.run, runs.steady, str(folder), {**PARTS, "save_parts": False, **runs.OFTEN})
    return folder


def test_the_file_holds_no_tensor_of_the_model_and_names_a_folder_with_a_file_of_each_rank(run):
    state = torch.load(run / "last.pt", weights_only=True)
    assert (state["model"], state["optimizer"]["state"], state["ema"]["averages"]) == ({}, {}, {})
    assert set(state["parts"]["files"]) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert sorted(os.listdir(folder_of(run / "last.pt"))) == sorted(state["parts"]["files"])


@pytest.mark.parametrize("reader", ["ckpttool", "torch"])
def test_the_folder_holds_the_weights_of_the_gathered_file(run, gathered, tmp_path, cli, reader):
    folder, out = folder_of(run / "last.pt"), tmp_path / "out.pt"
    if reader == "torch":
        dcp_to_torch_save(folder, out)
        found = torch.load(out, weights_only=True)["model"]
    else:
        ran = cli("merge", folder, out.with_suffix(".safetensors"))
        assert ran.code == 0, ran.err
        found = load_file(out.with_suffix(".safetensors"))
    expected = runs.read(gathered / "last.pt")["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_the_file_is_evaluated_by_the_folder_that_it_names(run, gathered):
    assert files.parts_named_in(str(run / "last.pt")) == str(folder_of(run / "last.pt"))
    assert files.parts_named_in(str(gathered / "last.pt")) == str(gathered / "last.pt")


@pytest.mark.parametrize("name", ["../elsewhere", "step-000001-abcd.dcp/..", 3])
def test_a_folder_elsewhere_is_not_followed(tmp_path, name):
    parts_of_run = {"parts": {"folder": name, "files": {}}, "digests": {}, "progress": {}}
    torch.save(parts_of_run, tmp_path / "last.pt")
    with pytest.raises(Damaged, match=r"parts\.folder is"):
        files.parts_named_in(str(tmp_path / "last.pt"))


def test_each_checkpoint_has_a_folder_and_folders_without_one_are_removed(run_ranks, tmp_path):
    settings = {**PARTS, "save_every": runs.OFTEN["save_every"], "keep": 2}
    run_ranks(2, runs.run, runs.steady, str(tmp_path), settings)
    files = [tmp_path / name for name in os.listdir(tmp_path) if name.endswith(".pt")]
    assert len(files) == 4  # last, best and two numbered ones
    assert folders(tmp_path) == sorted({folder_of(file).name for file in files})


MOVES_OF_PARTS = {
    "the same ranks": (2, PARTS, 0.0),
    "into files": (2, {**PARTS, "save_parts": False}, 0.0),
    "three ranks": (3, PARTS, 2e-6),
    "groups": (4, {**PARTS, "mesh": "2x2"}, 2e-6),
    "one rank without --shard": (1, {"ema": 0.7}, 2e-6),
}


@pytest.mark.covered(lambda move: move not in ("into files", "three ranks"))
@pytest.mark.parametrize("move", MOVES_OF_PARTS)
def test_a_run_goes_on_from_the_parts_of_other_ranks_and_without_shard(
    run_ranks, tmp_path, run, gathered, move
):
    size, settings, bound = MOVES_OF_PARTS[move]
    runs.go_on(run_ranks, size, runs.steady, run / "step-000002.pt", tmp_path / "rest", settings)
    expected, found = runs.ends(gathered, tmp_path / "rest")
    if "parts" in found:
        whole = tmp_path / "whole.pt"
        dcp_to_torch_save(tmp_path / "rest" / found["parts"]["folder"], whole)
        tree = torch.load(whole, weights_only=True)
        found = {"model": tree["model"], "ema": {"averages": tree["ema"]["averages"]}}
    assert runs.largest_difference(expected, found) <= bound


# ---- what goes wrong ------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    folder = folder_of(path)
    if how == "one bit":
        raw = bytearray((folder / "__1_0.distcp").read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / "__1_0.distcp").write_bytes(raw)
    elif how == "no part of rank 1":
        (folder / "__1_0.distcp").unlink()
    else:
        (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")


DAMAGES = {
    "one bit": "its part .*__1_0.distcp is not the saved one",
    "no part of rank 1": "its part .*__1_0.distcp can't be read",
    "another index": "its part .*.metadata is not the saved one",
}


@pytest.mark.covered(lambda how: how != "one bit")
@pytest.mark.parametrize("how", DAMAGES)
def test_a_checkpoint_with_a_damaged_part_is_passed_over_for_the_one_before(run_ranks, tmp_path, how):
    settings = {**PARTS, "save_every": runs.OFTEN["save_every"], "keep": 2, "epochs": 1}
    run_ranks(2, runs.run, runs.steady, str(tmp_path), settings)
    (tmp_path / "best.pt").unlink()
    damage(tmp_path / "last.pt", how)
    said = run_ranks(2, runs.run, runs.steady, str(tmp_path), {**PARTS, "resume": "auto"})[0]
    assert f"passed over {tmp_path}/last.pt" in said
    assert f"continues from {tmp_path}/step-000002.pt" in said


def run_with_a_full_disk(rank: int, size: int, folder: str, save: str, *, stays: bool = False) -> str:
    """Run where the disk of rank 1 refuses the second save; if it `stays` full, all later ones too."""
    written, saves = files.Parts.write, iter(range(99))

    def write(self: files.Parts) -> None:
        number = next(saves)
        if rank == 1 and (number == 1 or (stays and number > 1)):
            with pytest.MonkeyPatch.context() as patch:

                def refuse(*_: Any, **__: Any) -> None:
                    raise OSError(errno.ENOSPC, "No space left on device")

                patch.setattr(os, "makedirs", refuse)
                written(self)
            return
        written(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Parts, "write", write)
        return runs.run(rank, size, runs.steady, folder, {**PARTS, **runs.OFTEN, "save": save})


@pytest.mark.covered(lambda save: save == "sync")
@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_full_disk_of_one_rank_fails_one_save_and_not_the_run(run_ranks, tmp_path, save):
    run_ranks(2, run_with_a_full_disk, str(tmp_path), save)
    (failed,) = (entry for entry in entries_of(tmp_path) if entry.get("event") == "save failed")
    assert "no space left on device" in failed["error"]
    assert not (tmp_path / "step-000002.pt").exists()
    assert runs.read(tmp_path / "last.pt")["progress"]["global_step"] == runs.STEPS
    assert len(folders(tmp_path)) == runs.STEPS - 1


def test_what_a_full_disk_has_cut_short_is_removed_at_once(run_ranks, tmp_path):
    run_ranks(2, partial(run_with_a_full_disk, stays=True), str(tmp_path), "sync")
    assert folders(tmp_path) == [folder_of(tmp_path / "step-000001.pt").name]


def test_starting_over_removes_the_folders(run_ranks, tmp_path):
    run_ranks(2, runs.run, runs.steady, str(tmp_path), {**PARTS, "epochs": 1})
    before = folders(tmp_path)
    run_ranks(2, runs.run, runs.steady, str(tmp_path), {**SHARD, "epochs": 1, "force": True})
    assert before
    assert folders(tmp_path) == []


def test_a_users_folder_of_a_similar_name_stays(tmp_path):
    for name in ("step-000001.dcp", "step-000001-abcd.dcp.bak", "step-000001-abcd.dcp"):
        (tmp_path / name).mkdir()
    files.remove_unnamed(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step-000001-abcd.dcp.bak", "step-000001.dcp"]


def test_torch_loads_the_folder_into_a_model_of_its_own(run):
    model = runs.steady()
    state = {"model": {f"module.{name}": torch.empty_like(v) for name, v in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder_of(run / "last.pt"))
    model.load_state_dict({name.removeprefix("module."): value for name, value in state["model"].items()})


def test_folders_stay_while_a_checkpoint_that_may_name_them_cannot_be_read(tmp_path):
    (tmp_path / "step-000001-abcd.dcp").mkdir()
    torch.save({"parts": {"folder": "step-000001-abcd.dcp"}}, tmp_path / "last.pt")
    (tmp_path / "last.pt").write_bytes((tmp_path / "last.pt").read_bytes()[:-40])
    files.remove_unnamed(str(tmp_path))
    assert folders(tmp_path) == ["step-000001-abcd.dcp"]


def test_a_file_that_is_no_checkpoint_of_this_run_keeps_its_own_folder(tmp_path):
    """Some program's `parts` are its own."""
    torch.save({"parts": ["a"], "w": torch.ones(2)}, tmp_path / "other.pt")
    assert files.parts_named_in(str(tmp_path / "other.pt")) == str(tmp_path / "other.pt")


def test_a_damaged_part_is_not_scored(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    damage(tmp_path / "run" / "last.pt", "one bit")
    with pytest.raises(Damaged, match="is not the saved one"):
        files.parts_named_in(str(tmp_path / "run" / "last.pt"))


@pytest.mark.parametrize("how", [None, *DAMAGES])
def test_the_tool_says_where_the_tensors_are_and_verifies_them(run, tmp_path, cli, how):
    shutil.copytree(run, tmp_path / "run")
    last = tmp_path / "run" / "last.pt"
    assert f"state       in {folder_of(last).name}, beside it (--shard parts)" in cli("inspect", last).out
    for command in "strip-prefix", "merge":
        assert f"name that: {folder_of(last)}" in cli(command, last, tmp_path / "out.pt").err
    assert f"name that: {folder_of(last)}" in cli("delta", last, last, tmp_path / "one.safetensors").err
    assert f"not compared, of {last}: its tensors, in {folder_of(last).name}" in cli("diff", last, last).err
    if how:
        damage(last, how)
    ran = cli("verify", last)
    assert ran.code == (1 if how else 0), ran.out + ran.err
    assert not how or ".dcp/" in ran.out + ran.err
