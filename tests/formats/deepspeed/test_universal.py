"""DeepSpeed's universal folders, made by its own `ds_to_universal.py`, against the runs they were made of."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.errors import Unsupported
from ckpttool.files.digest import digest
from tests.support import deepspeed_runs, universal_runs
from tests.support.running import Ran
from tests.support.saved import refused

Run = Callable[..., Path]
Cli = Callable[..., Ran]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the runs and their universal folders."""
    folder = tmp_path_factory.mktemp("universal")
    for record in (deepspeed_runs.RECORDED, universal_runs.RECORDED):
        with tarfile.open(record) as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def universal(recorded: Path, tmp_path: Path) -> Run:
    """Return a function that copies a universal folder, to be changed."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(recorded / f"{name}_universal", tmp_path / f"{name}_universal"))

    return copied


def opened(folder: Path, take_rank: int | None = 0) -> Checkpoint:
    return ckpttool.open_ranks(folder, take_rank=take_rank)


@pytest.mark.parametrize("name", universal_runs.FOLDERS)
def test_it_is_the_checkpoint_of_the_run(name: str, recorded: Path, tmp_path: Path, cli: Cli) -> None:
    run, universal = opened(recorded / name), opened(recorded / f"{name}_universal")
    assert [*universal.tree] == [*run.tree]
    assert digest(dict(universal.tensors())) == digest(dict(run.tensors()))
    assert universal.tree["optimizer"]["param_groups"] == run.tree["optimizer"]["param_groups"]
    assert (universal.unread, universal.ranks.step) == (run.unread, run.ranks.step)  # type: ignore[union-attr]
    ran = cli("merge", recorded / f"{name}_universal", tmp_path / "out.pt", "--take-rank", "0")
    assert (ran.code, "merged DeepSpeed 0.19.8 universal" in ran.out) == (0, True), ran.err
    module = torch.load(tmp_path / "out.pt")["module"]
    head = module.get("head.weight")
    assert head is None or head.data_ptr() == module["embed.weight"].data_ptr()


def test_it_is_found_by_the_files_that_name_it(universal: Run) -> None:
    folder = universal("zero2-fp32/global_step3")
    (folder.parent / "latest_universal").write_text(folder.name)
    assert opened(folder.parent).ranks.framework == "DeepSpeed 0.19.8 universal"  # type: ignore[union-attr]
    (folder.parent / "latest").write_text(folder.name)
    assert opened(folder.parent).ranks.step == 3  # type: ignore[union-attr]


def test_a_folder_of_both_kinds_is_that_which_latest_names(recorded: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(recorded / "zero2-fp32", tmp_path / "run"))
    (run / "latest_universal").write_text("global_step3_universal")
    assert opened(run).ranks.framework == "DeepSpeed 0.19.8 ZeRO-2"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["zero2-fp32/global_step3", "zero3-fp32/global_step3"])
def test_a_missing_parameter_is_named(name: str, universal: Run) -> None:
    folder = universal(name)
    shutil.rmtree(folder / "zero" / "body.weight")
    refused(folder, r"has no zero/body\.weight/fp32\.pt", opened=opened)


def test_model_states_that_are_missing_are_named(universal: Run) -> None:
    folder = universal("zero2-fp32/global_step3")
    (folder / "mp_rank_00_model_states.pt").unlink()
    refused(folder, r"has no file \*_model_states\.pt", opened=opened)


def test_a_parameter_of_another_model_is_refused(universal: Run) -> None:
    folder = universal("zero2-fp32/global_step3")
    shutil.copytree(folder / "zero" / "body.weight", folder / "zero" / "foreign.weight")
    refused(folder, r"has 'foreign\.weight' in zero/", opened=opened)


def test_a_tensor_of_another_size_is_refused(universal: Run) -> None:
    folder = universal("zero3-fp32/global_step3")
    torch.save(torch.zeros(3), folder / "zero" / "body.weight" / "fp32.pt")
    refused(folder, r"body\.weight/fp32\.pt: has shape \[3\], and the parameter", opened=opened)
    torch.save({"other": 1}, folder / "zero" / "body.weight" / "fp32.pt")
    refused(folder, r"body\.weight/fp32\.pt: has no tensor", opened=opened)


def test_another_step_than_that_of_the_model_states_is_refused(universal: Run) -> None:
    folder = universal("zero2-fp32/global_step3")
    for path in (folder / "zero").glob("*/step.pt"):
        torch.save(torch.tensor(9.0), path)
    refused(folder, "'global_steps' states 3, the optimizer states 9", opened=opened)


def test_a_model_that_was_cut_is_whole(universal: Run) -> None:
    folder = universal("zero2-fp32/global_step3")
    whole = dict(opened(folder).state("module").tensors)
    states = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    for part in range(2):  # tensor parallelism: each has a half of this weight
        half = states["module"]["body.weight"].chunk(2)[part].clone()
        cut: dict[str, Any] = {**states, "module": {**states["module"], "body.weight": half}}
        torch.save(cut, folder / f"mp_rank_{part:02}_model_states.pt")
    found = opened(folder)
    assert digest(found.state("module").tensors) == digest(whole)
    assert found.tree["optimizer"]["state"]["body.weight"].keys() == {"exp_avg", "exp_avg_sq", "step"}


def test_layers_of_a_pipeline_are_named_as_what_they_are(tmp_path: Path, cli: Cli) -> None:
    for layer in ("00", "03"):
        torch.save({"weight": torch.zeros(2)}, tmp_path / f"layer_{layer}-model_00-model_states.pt")
    torch.save({"module": None, "dp_world_size": 1}, tmp_path / "mp_rank_00_model_states.pt")
    refused(tmp_path, r"layer_00-model_00.*: is layer 0 of a pipeline, part 0 of it", Unsupported)
    assert "ds_to_universal.py" in cli("merge", tmp_path, tmp_path / "out.pt").err
