"""DeepSpeed's ZeRO folders and its universal ones, against its own tools."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.core.files.digest import digest
from ckpttool.core.tensors.values import live_tensors
from ckpttool.errors import CkptToolError, Damaged, RanksDiffer, Unreadable, Unsupported, UsageFault
from ckpttool.ranks.zero import Layout, given_order, parameters_cut, vectors_cut
from tests.ranks.forked import WarmPython
from tests.support import deepspeed_runs, universal_runs
from tests.support.comparing import assert_same, refused, values
from tests.support.deepspeed_runs import CASES, Case, batch, make_model, make_optimizer
from tests.support.recording import unpack
from tests.support.running import ROOT, Cli, assert_says, within

# ---- DeepSpeed's ZeRO folders, recorded by `tests/support/deepspeed_runs.py`, against its own tools ---


Run = Callable[..., Path]
SAVED = [(case, step) for case in CASES for step in case.steps]
CUT = [pair for pair in SAVED if pair[0].stage]
IN_FP32 = [case for case in CASES if not case.config.keys() & {"bf16"} and case.stage]


def names(pairs: list[tuple[Case, int]]) -> list[str]:
    return [f"{case.name}-{step}" for case, step in pairs]


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Run:
    """Return a function that copies the folder of a case's last tag, to be changed."""

    def copied(name: str, step: int | None = None) -> Path:
        tag = f"global_step{case_of(name).steps[-1] if step is None else step}"
        return Path(shutil.copytree(runs / name / tag, tmp_path / name / tag))

    return copied


def opened(folder: Path, take_rank: int | None = 0) -> ckpttool.Checkpoint:
    """Open a folder; batch norm differs between ranks, and DeepSpeed's tools take rank 0's."""
    return ckpttool.open_ranks(folder, take_rank=take_rank)


def ranks_of(checkpoint: ckpttool.Checkpoint) -> Any:
    assert checkpoint.ranks is not None
    return checkpoint.ranks


def written(folder: Path, out: Path) -> Any:
    """Return what torch loads of a folder, saved as one file."""
    ckpttool.save(opened(folder), out)
    return torch.load(out, weights_only=True)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise AssertionError unless values differ by rounding alone."""
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)


def of_rank(rank: int) -> str:
    """Return the name of the file of a rank's model states under ZeRO-3."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def changed(file: Path, change: Callable[[Any], object]) -> None:
    """Change the contents of a file as torch would have saved them."""
    with ckpttool.open(file) as checkpoint:
        change(checkpoint.tree)
        ckpttool.save(checkpoint, file, force=True)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and values(found) == values(wanted)


def optimizer_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*optim_states.pt"))


def on_ranks(folder: Path, change: Callable[[Any, int], object]) -> Path:
    """Change what each rank keeps of the optimizer, in a way that may depend on the rank."""
    for rank, file in enumerate(optimizer_files(folder)):
        changed(file, lambda tree, rank=rank: change(tree["optimizer_state_dict"], rank))
    return folder


# What DeepSpeed's own tools make of the folders


@pytest.mark.parametrize(("case", "step"), SAVED, ids=names(SAVED))
def test_the_model_is_that_of_deepspeed_s_own_tools(case: Case, step: int, runs: Path) -> None:
    folder = runs / case.name / f"global_step{step}"
    wanted = load_file(f"{folder}.safetensors")
    found = opened(folder).state()
    tensors = live_tensors(found.tensors)
    model = {name.removeprefix("fp32/"): value for name, value in wanted.items() if name.startswith("fp32/")}
    assert (found.where, [*tensors]) == ("module", [*make_model(case).state_dict()])
    assert {name: tensors[name].shape for name in model} == {name: model[name].shape for name in model}
    assert [name for name in model if not same(tensors[name], model[name])] == []
    if set(model) < set(tensors):  # DeepSpeed's tools lose these, and `module` has them
        module = ckpttool.open(folder / "mp_rank_00_model_states.pt").state("module").load()
        assert [n for n in tensors.keys() - model if not same(tensors[n], module[n])] == []


@pytest.mark.parametrize(("case", "step"), CUT, ids=names(CUT))
def test_the_optimizer_is_that_of_deepspeed_s_universal_checkpoint(case: Case, step: int, runs: Path) -> None:
    folder = runs / case.name / f"global_step{step}"
    found = opened(folder).tree["optimizer"]["state"]
    kept = load_file(f"{folder}.safetensors")
    wanted = {tuple(name.split("/")): value for name, value in kept.items() if "fp32/" not in name}
    tensors = live_tensors({f"{k}/{n}": found[n][k] for k, n in wanted})
    assert [name for name, value in wanted.items() if not same(tensors["/".join(name)], value)] == []
    assert not wanted or {name for _, name in wanted} == set(found)


UNCERTAIN = "body.bias"
"""Batch norm follows it: its gradient is rounding errors, which Adam makes as large as any other."""


def reference(case: Case, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Train a case in one process, without DeepSpeed: the mean of the ranks' gradients."""
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    for number in range(1, steps + 1):
        step(case, model, optimizer, number)
    return model, optimizer


def step(case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    for rank in range(case.ranks):
        (model(batch(number, rank)).square().mean() / case.ranks).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # DeepSpeed's default
    optimizer.step()


@pytest.mark.parametrize("case", IN_FP32, ids=lambda case: case.name)
def test_it_is_what_training_in_one_process_gives(case: Case, runs: Path, tmp_path: Path) -> None:
    found = written(runs / case.name / f"global_step{case.steps[0]}", tmp_path / "out.pt")
    model, optimizer = reference(case, case.steps[0])
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name in trained.keys() - {UNCERTAIN}:
        close(found["module"][name], trained[name])
        for key, value in optimizer.state[trained[name]].items():
            close(found["optimizer"]["state"][name][key], value)
    assert found["optimizer"]["state"].keys() == trained.keys()
    listed = [group["params"] for group in found["optimizer"]["param_groups"]]
    by_id = {id(parameter): name for name, parameter in trained.items()}
    assert listed == [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("name", ["zero2-fp32", "zero3-fp32"])
def test_training_goes_on_in_one_process(name: str, runs: Path, tmp_path: Path) -> None:
    case = case_of(name)
    found = written(runs / name / "global_step2", tmp_path / "out.pt")
    model = make_model(case)
    optimizer = make_optimizer(case, model)
    model.load_state_dict(found["module"])
    optimizer.load_state_dict(found["optimizer"])
    step(case, model, optimizer, 3)
    later = written(runs / name / "global_step3", tmp_path / "later.pt")["module"]
    for key, parameter in model.named_parameters():
        if key != UNCERTAIN:
            close(parameter, later[key])


def test_more_than_ten_ranks_are_in_order(warm_python: WarmPython, tmp_path: Path) -> None:
    words = ["-m", "benchmarks.children.make_zero3_folder", tmp_path / "run", 400_000, 4, 11]
    assert warm_python.run(*words, cwd=ROOT).returncode == 0
    found = opened(tmp_path / "run").state().load()
    assert [tensor.shape for tensor in found.values()] == [(24, 1001), (25, 1001), (26, 1001), (24, 1001)]
    for number, tensor in enumerate(found.values()):
        share = -(-tensor.numel() // 11)
        wanted = [torch.arange(share) + 1000.0 * number + rank for rank in range(11)]
        assert torch.equal(tensor.flatten(), torch.cat(wanted)[: tensor.numel()])


# What else is in a folder


@pytest.mark.parametrize("name", ["zero1-fp32", "zero2-bf16", "zero3-fp32"])
def test_tied_weights_are_one_tensor(name: str, runs: Path, tmp_path: Path) -> None:
    module = written(runs / name, tmp_path / "out.pt")["module"]
    assert module["embed.weight"].data_ptr() == module["head.weight"].data_ptr()


def test_no_tensor_shares_memory_with_its_neighbours_in_a_vector(runs: Path, tmp_path: Path) -> None:
    for name in ("zero2-fp32-one-rank", "zero3-fp32-one-rank"):
        found = written(runs / name, tmp_path / f"{name}.pt")
        entries = [found["module"], *found["optimizer"]["state"].values()]
        tensors = [tensor for entry in entries for tensor in entry.values()]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors) - 1  # a pair is tied


def test_what_the_run_kept_beside_the_model_stays(runs: Path, tmp_path: Path) -> None:
    found = written(runs / "zero3-bf16", tmp_path / "out.pt")
    assert (found["global_steps"], found["epoch"], found["notes"]) == (2, 2, ["tiny", 0.5])
    assert found["ds_config"]["bf16"] == {"enabled": True}
    assert "param_shapes" not in found


def test_what_is_known_of_the_run_is_told(runs: Path) -> None:
    found = opened(runs / "zero3-fp32")
    ranks = ranks_of(found)
    assert (found.format, ranks.framework) == ("deepspeed-zero", "DeepSpeed 0.19.8 ZeRO-3")
    assert (ranks.world_size, ranks.step, [*ranks.held], ranks.missing) == (3, 3, [0, 1, 2], ())


def test_what_each_rank_kept_for_itself_is_named(run: Run) -> None:
    folder = run("zero3-bf16")
    for rank in range(2):
        changed(folder / of_rank(rank), lambda tree, rank=rank: tree.update(noise=[rank]))
    assert opened(folder).unread == ("'noise.0' of rank 1, which differs from rank 0's",)


def test_a_scale_of_the_loss_is_named(run: Run) -> None:
    def scaled(states: Any, rank: int) -> None:
        states["loss_scaler"].state.update(cur_scale=1024.0, dynamic=True)

    assert opened(on_ranks(run("zero2-bf16"), scaled)).unread == ("the loss scaler (scale 1024.0)",)


def test_tensors_of_many_devices_are_written_for_the_cpu(run: Run, tmp_path: Path) -> None:
    def moved(states: Any, rank: int) -> None:
        momenta = states["base_optimizer_state"]["state"].values()
        weights = states["single_partition_of_fp32_groups"]
        for tensor in [*weights, *(tensor for entry in momenta for tensor in entry.values())]:
            tensor.storage.location = f"cuda:{rank}"

    found = written(on_ranks(run("zero2-bf16"), moved), tmp_path / "out.pt")
    assert {str(tensor.device) for tensor in found["module"].values()} == {"cpu"}
    assert found["optimizer"]["state"]["body.weight"]["step"].device.type == "cpu"


def test_state_of_an_unknown_form_is_named(run: Run) -> None:
    def shorter(states: Any, rank: int) -> None:
        entry = states["base_optimizer_state"]["state"][0]
        entry["factors"] = dataclasses.replace(entry["exp_avg"], shape=(3,))

    (left,) = opened(on_ranks(run("zero2-bf16"), shorter)).unread
    assert "'factors' of the optimizer's state" in left


def test_buffers_that_differ_between_ranks_are_named(runs: Path, tmp_path: Path, cli: Any) -> None:
    with pytest.raises(RanksDiffer, match=r"norm\.running_mean.*rank 0 and rank 1"):
        ckpttool.save(opened(runs / "zero3-fp32", None), tmp_path / "out.safetensors")
    assert_says(cli("merge", runs / "zero3-fp32", tmp_path / "out.pt"), 1, "--take-rank 0")
    refused(runs / "zero3-fp32", "rank 5", UsageFault, opened, take_rank=5)


# Which checkpoint of a folder


def test_latest_names_the_checkpoint(runs: Path) -> None:
    whole = runs / "zero2-fp32"
    assert [opened(path).tree["global_steps"] for path in (whole, whole / "global_step2")] == [3, 2]


def test_latest_that_names_nothing_is_refused(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "zero2-fp32", tmp_path / "run"))
    latest = folder / "latest"
    latest.unlink()
    os.mkfifo(latest)
    refused(folder, error=Unreadable, opened=opened)
    latest.unlink()
    latest.symlink_to("latest")
    refused(folder, "latest: too many levels of symbolic links", Unreadable, opened)
    latest.unlink()
    for wrong in ("global_step9", "", "../run/global_step2", ".", "a\0b"):
        latest.write_text(wrong)
        assert "global_step2" in str(refused(folder, "not next to it", opened=opened).hint)
    latest.unlink()
    refused(folder, "no file 'latest'", Unreadable, opened)
    shutil.rmtree(folder / "global_step3")
    assert opened(folder).tree["global_steps"] == 2


def test_the_file_that_names_the_checkpoint_is_no_output(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "zero2-fp32", tmp_path / "run"))
    with pytest.raises(UsageFault, match="is a part of the input"):
        ckpttool.save(opened(folder), folder / "latest", to="safetensors", force=True)
    assert (folder / "latest").read_text() == "global_step3"


@pytest.mark.long
def test_many_buffers_take_time_in_proportion(run: Run) -> None:
    folder = run("zero3-fp32-one-rank")
    names = [f"buffer{number}" for number in range(20_000)]

    def enlarge(tree: Any) -> None:
        empty = next(value for value in tree["module"].values() if value.shape == (0,))
        tree["module"].update(dict.fromkeys(names, empty))
        tree["buffer_names"] = [*tree["buffer_names"], *names[::-1]]

    changed(folder / of_rank(0), enlarge)
    with within(5, time.process_time):
        assert len(opened(folder).tree["module"]) > len(names)


def test_merging_takes_the_ranks_files_before_rounded_weights_beside_them(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "zero2-bf16", tmp_path / "checkpoint-2"))
    save_file({"w": torch.ones(2, dtype=torch.bfloat16)}, folder / "model.safetensors")
    assert opened(folder, None).format == "deepspeed-zero"
    assert ckpttool.open(folder).format == "safetensors"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_honest_folder_has_no_stray_record_and_no_unknown_name(case: Case, runs: Path, cli: Any) -> None:
    found = ckpttool.verify(opened(runs / case.name), no_code=True)
    assert [problem for problem in found.problems if problem.kind != "ranks"] == []
    page = cli("inspect", runs / case.name, "--json").json
    assert (page["format"], page["state"], page["unknown"]) == ("deepspeed-zero", "module", [])


# Files that are not those of one step of one run


def without(folder: Path, pattern: str) -> None:
    for file in folder.glob(pattern):
        file.unlink()


STAGES = ["zero1-fp32", "zero2-fp32", "zero3-fp32"]


@pytest.mark.parametrize("name", STAGES)
def test_a_missing_rank_is_named(name: str, run: Run, cli: Any) -> None:
    folder = run(name)
    without(folder, "*rank_1_*optim_states.pt")
    assert ranks_of(ckpttool.open(folder)).missing == (1,)
    assert "the files of rank 1" in cli("inspect", folder).out
    ran = cli("merge", folder, folder.with_name("out.pt"))
    words = r"the file of rank 1 of 3 is missing: zero_pp_rank_1_mp_rank_00_\w+_states\.pt"
    assert ran.code == 3 and re.search(words, ran.err)
    assert not folder.with_name("out.pt").exists()


@pytest.mark.parametrize("name", ["zero2-bf16", "zero3-bf16"])
def test_without_any_optimizer_file_all_ranks_are_missing(name: str, run: Run) -> None:
    folder = run(name)
    without(folder, "*optim_states.pt")
    assert ranks_of(ckpttool.open(folder)).missing == (0, 1)


def test_missing_model_states_are_named(run: Run) -> None:
    folder = run("zero3-fp32")
    without(folder, "*rank_0_*model_states.pt")
    assert ranks_of(ckpttool.open(folder)).missing == (0,)
    without(folder, "*model_states.pt")
    refused(folder, r"no file \*_model_states\.pt")


@pytest.mark.parametrize("name", STAGES)
def test_doubled_and_swapped_files_are_refused(name: str, run: Run) -> None:
    folder = run(name)
    first, second, _ = optimizer_files(folder)
    kept = {first: second.read_bytes(), second: first.read_bytes()}
    second.write_bytes(kept[second])
    assert refused(folder, "another rank's file").path == str(second)
    first.write_bytes(kept[first])
    refused(folder, "another rank's file")


def test_stages_1_and_2_tell_swapped_files_that_keep_no_name_of_their_own(run: Run) -> None:
    folder = run("zero2-fp32")
    first, second, _ = optimizer_files(folder)
    for file, name in ((first, "other"), (second, "another")):
        ckpttool.convert(file, folder.with_name(f"{name}.pt"))
    folder.with_name("other.pt").replace(second)
    folder.with_name("another.pt").replace(first)
    refused(folder, "param_slice_mappings")


@pytest.mark.parametrize("name", ["zero2-fp32", "zero3-fp32"])
def test_a_file_of_another_step_is_refused(name: str, run: Run, runs: Path) -> None:
    folder = run(name)
    file = optimizer_files(folder)[1]
    shutil.copy(runs / name / "global_step2" / file.name, file)
    assert refused(folder, "'step' of its optimizer is 2, and 3 in").path == str(file)


def test_model_states_of_another_step_are_refused(run: Run, runs: Path) -> None:
    folder = run("zero3-fp32")
    file = Path(shutil.copy(runs / "zero3-fp32" / "global_step2" / of_rank(2), folder))
    assert refused(folder, "'global_steps' is 2, and 3").path == str(file)


@pytest.mark.parametrize("name", ["zero2-fp32", "zero3-fp32"])
def test_a_model_and_an_optimizer_of_two_steps_are_refused(name: str, run: Run, runs: Path, cli: Any) -> None:
    folder = run(name)
    for path in (runs / name / "global_step2").glob("*_model_states.pt"):
        shutil.copy(path, folder)
    words = ["merge", folder, folder.with_name("out.pt"), "--force", "--take-rank", "0"]
    ran = cli(*words)
    assert ran.code == 3
    assert "'global_steps' states 2, the optimizer states 3, the folder's name states 3" in ran.err
    assert f"ckpttool merge {folder} OUTPUT --take-step 3" in ran.err
    ran = cli(*words, "--take-step", "3")
    assert (ran.code, torch.load(folder.with_name("out.pt"))["global_steps"]) == (0, 3), ran.err
    assert_says(cli(*words, "--take-step", "4"), 2, "is of no step 4")


@pytest.mark.parametrize("name", ["zero0-fp32", "zero1-fp32"])
def test_a_folder_named_after_another_step_is_refused(name: str, run: Run) -> None:
    folder = run(name)
    said = "the optimizer states 2, the folder's name states 9"
    refused(folder.rename(folder.with_name("global_step9")), said, opened=opened, take_rank=None)


def test_steps_that_overflowed_are_no_contradiction(run: Run) -> None:
    folder = run("zero2-bf16")
    for path in folder.glob("*model_states.pt"):
        changed(path, lambda tree: tree.update(global_steps=5, skipped_steps=3))
    folder = folder.rename(folder.with_name("best"))
    assert ranks_of(opened(folder)).step == 5


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("zero3-fp32", "zero3-sgd", "was written by one of"),  # of another number of ranks
        ("zero3-sgd", "zero1-sgd", "of ZeRO stage"),
    ],
)
def test_a_file_of_another_run_is_refused(name: str, other: str, said: str, run: Run, runs: Path) -> None:
    folder = run(name)
    for file in (runs / other / "global_step2").glob("*rank_1_*optim*"):
        shutil.copy(file, folder)
    refused(folder, said)
    if name == "zero3-sgd":
        shutil.copytree(runs / other / "global_step2", folder, dirs_exist_ok=True)
        refused(folder)


OF_OTHERS = [
    ("mp_rank_01_model_states.pt", "was saved as 'mp_rank_00_model_states.pt'"),
    ("layer_0_expert_1_mp_rank_00_model_states.pt", "has no layer_0_expert_0_mp_rank_00"),
    ("expp_rank_0_mp_rank_00_optim_states.pt", "has no layer_L_expert_E_mp_rank_XX"),
    ("layer_00-model_states.pt", "the layers of a pipeline, as of another run"),
    ("own_mp_rank_00_model_states.pt", "has a name that is none of"),
]


@pytest.mark.parametrize(("name", "said"), OF_OTHERS)
def test_a_file_of_another_part_of_the_model_is_refused(name: str, said: str, run: Run) -> None:
    folder = run("zero2-bf16")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / name)
    refused(folder, said, (Damaged, Unsupported))


# Damage


@pytest.mark.parametrize("name", ["zero2-fp32", "zero3-fp32"])
def test_every_truncated_file_is_named(name: str, run: Run, tmp_path: Path) -> None:
    folder = run(name)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:size])
            with pytest.raises(CkptToolError) as caught:
                ckpttool.save(ckpttool.open(folder), tmp_path / "out.pt")
            assert str(file) in str(caught.value)
        file.write_bytes(whole)


@pytest.mark.parametrize("name", ["zero1-fp32", "zero1-bf16-sums-fp32", "zero2-tiny", "zero3-sub-groups"])
def test_a_part_of_another_size_is_refused(name: str, run: Run) -> None:
    def shorter(values: Any) -> None:
        part = values[0]
        found = part.args[0] if hasattr(part, "args") else part
        found.shape = (found.shape[0] - 1,)

    def weights(tree: Any) -> Any:
        states = tree["optimizer_state_dict"]
        return states.get("fp32_flat_groups") or states["single_partition_of_fp32_groups"]

    folder = run(name)
    file = optimizer_files(folder)[0]
    changed(file, lambda tree: shorter(weights(tree)))
    assert refused(folder, "part of the weights of group 0 has shape").path == str(file)


def stating(**fields: Any) -> Callable[[Any], object]:
    return lambda states: states.update(fields)


def of_base(**fields: Any) -> Callable[[Any], object]:
    return lambda states: states["base_optimizer_state"].update(fields)


HOSTILE = {
    "ranks": stating(partition_count=10**18),
    "no ranks": stating(partition_count=[]),
    "many ranks": stating(partition_count=60_000),
    "stage": stating(zero_stage=-1),
    "groups": stating(single_partition_of_fp32_groups=3),
    "a list of states": stating(base_optimizer_state=[5]),
    "a number of states": stating(base_optimizer_state=5),
    "no groups": stating(single_partition_of_fp32_groups=[]),
    "paddings": stating(param_alignment_paddings=[[-5]]),
    "paddings of text": stating(param_alignment_paddings="abc"),
    "mapping": stating(param_slice_mappings=[1, 2]),
    "state": of_base(state=[]),
    "entry": lambda states: states["base_optimizer_state"]["state"].update({0: 7}),
    "settings": of_base(param_groups=5),
    "a group that is no dict": of_base(param_groups=[(None, {"params": [0]})]),
    "indices": of_base(param_groups=[{"params": [9]}]),
    "nothing at all": None,
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_malformed_optimizer_states_are_refused(change: Any, run: Run) -> None:
    folder = run("zero2-fp32-one-rank")
    (file,) = optimizer_files(folder)
    changed(file, lambda tree: change(tree["optimizer_state_dict"]) if change else tree.clear())
    refused(folder)


MALFORMED = {
    "no dict": lambda tree: tree.clear(),
    "no module": stating(module=None),
    "ranks": stating(dp_world_size="two"),
    "shapes": stating(param_shapes=[{"embed.weight": (7, -3)}]),
    "shapes of numbers": stating(param_shapes=[{5: (7, 3)}]),
    "no shapes": stating(param_shapes=7),
    "huge shapes": lambda tree: tree["param_shapes"][0].update({"embed.weight": (2**62, 2**62)}),
    "more groups": lambda tree: tree["param_shapes"].append({}),
    "another parameter": lambda tree: tree["param_shapes"][0].update(other=(3,)),
    "frozen": lambda tree: tree["frozen_param_fragments"].clear(),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("name", ["zero2-fp32-one-rank", "zero3-fp32-one-rank"])
def test_malformed_model_states_are_refused(name: str, change: Any, run: Run) -> None:
    folder = run(name)
    (file,) = folder.glob("*model_states.pt")
    changed(file, change)
    refused(folder)


STATED = {
    "a trained parameter": lambda tree: tree["param_shapes"][0].update({"embed.weight": (3, 7)}),
    "a frozen parameter": lambda tree: tree["frozen_param_shapes"].update({"middle.weight": (5, 3)}),
}


@pytest.mark.parametrize("change", STATED.values(), ids=STATED)
def test_shapes_that_are_not_those_of_the_model_are_refused(change: Any, run: Run) -> None:
    folder = run("zero2-fp32")
    changed(folder / "mp_rank_00_model_states.pt", change)
    refused(folder, r"'(embed|middle)\.weight' in")


def test_optimizers_of_two_forms_are_refused(run: Run) -> None:
    folder = run("zero2-fp32")
    for file in optimizer_files(folder)[:2]:
        changed(file, lambda tree: tree["optimizer_state_dict"].update(base_optimizer_state=[{}, {}]))
        refused(folder)


def test_a_file_with_another_name_is_not_taken_for_a_rank_s(run: Run, tmp_path: Path) -> None:
    folder = run("zero2-fp32")
    (tmp_path / "other").mkdir()
    other = shutil.copy(folder / "mp_rank_00_model_states.pt", tmp_path / "other" / "best_model_states.pt")
    refused(tmp_path / "other", "holds checkpoints, and is none itself", Unreadable)
    refused([other, *folder.iterdir()], "no file of DeepSpeed's ranks", opened=ckpttool.open_ranks)


def test_nothing_of_a_hostile_pickle_runs(run: Run, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = run("zero3-bf16")
    torch.save({"module": Hostile()}, folder / of_rank(1))
    refused(folder)
    assert not (tmp_path / "ran").exists()


# The commands


def test_a_folder_is_merged_into_one_file(runs: Path, tmp_path: Path, cli: Any) -> None:
    words = ["merge", runs / "zero2-bf16", out := tmp_path / "model.safetensors"]
    ran = cli(*words, "--json")
    assert ran.code == 0, ran.err
    told = {"framework": "DeepSpeed 0.19.8 ZeRO-2", "world_size": 2, "mesh": "", "step": 2}
    assert ran.json["ranks"] == told
    assert "optimizer" in ran.json["left_out"]
    wanted = load_file(runs / "zero2-bf16" / "global_step2.safetensors")
    assert [n for n, v in load_file(out).items() if not same(v, wanted[f"fp32/{n}"])] == []
    assert cli(*words, "--force", "--dtype", "bf16").code == 0
    assert load_file(out)["body.weight"].dtype == torch.bfloat16


def test_everything_goes_into_safetensors_and_back(runs: Path, tmp_path: Path, cli: Any) -> None:
    full, back = tmp_path / "full.safetensors", tmp_path / "back.pt"
    assert cli("merge", runs / "zero3-bf16", full, "--full", "--take-rank", "0").code == 0
    assert cli("convert", full, back).code == 0
    wanted = written(runs / "zero3-bf16", tmp_path / "out.pt")
    assert_same(torch.load(back, weights_only=True), wanted)


def test_stage_0_goes_on_in_one_process(runs: Path, tmp_path: Path, cli: Any) -> None:
    case = case_of("zero0-fp32")
    assert cli("merge", runs / case.name, tmp_path / "numbered.pt").code == 0
    words = ["--to", "names", "--order", "state"]  # DeepSpeed was given model.parameters()
    assert cli("optimizer", tmp_path / "numbered.pt", tmp_path / "out.pt", *words).code == 0
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"]
    model, optimizer = reference(case, 2)
    parameters = dict(model.named_parameters())
    for name in found.keys() - {UNCERTAIN}:
        close(found[name]["exp_avg"], optimizer.state[parameters[name]]["exp_avg"])


def test_a_file_of_one_rank_names_the_command_for_all(runs: Path, tmp_path: Path, cli: Any) -> None:
    file = runs / "zero3-fp32" / "global_step3" / of_rank(0)
    ran = cli("convert", file, tmp_path / "out.safetensors")
    assert_says(ran, 3, f"ckpttool merge {file.parent} out.safetensors")


def test_verify_finds_damage_in_any_rank_s_file(run: Run, cli: Any) -> None:
    folder = run("zero2-bf16")
    assert cli("verify", folder).code == 0
    file = optimizer_files(folder)[1]
    with ckpttool.open(file) as checkpoint:
        place = checkpoint.tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data
    raw = bytearray(file.read_bytes())
    raw[place.offset + 5] ^= 1
    file.write_bytes(raw)
    ran = cli("verify", folder)
    assert (ran.code, file.stem in ran.out + ran.err) == (1, True)
    assert cli("merge", folder, folder.parent / "out.safetensors").code == 3


# The installed DeepSpeed, which may be a newer one


@pytest.mark.timeout(500)
def test_what_the_installed_deepspeed_saves_is_read(tmp_path: Path) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("needs the extra interop-ranks")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "tests.support.deepspeed_runs", tmp_path]
    subprocess.run(words, check=True, env=environment)
    for name in deepspeed_runs.OF_INSTALLED:
        wanted = load_file(tmp_path / name / "global_step2.safetensors")
        found = opened(tmp_path / name)
        tensors = live_tensors(found.state().tensors)
        momenta = found.tree["optimizer"]["state"]
        for key, value in wanted.items():
            kind, parameter = key.split("/")
            of_optimizer = {} if kind == "fp32" else live_tensors({parameter: momenta[parameter][kind]})
            assert same((of_optimizer or tensors)[parameter], value), (name, key)


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (1, "only rank 0 holds model states, and rank 1 parts of"),
        (9, "no file of it was written by rank 9"),
    ],
)
def test_a_rank_without_model_states_can_not_be_taken(rank: int, said: str, runs: Path) -> None:
    refused(runs / "zero2-bf16", said, UsageFault, opened, take_rank=rank)


def test_files_of_another_run_beside_them_are_not_one_checkpoint(run: Run, tmp_path: Path) -> None:
    folder = run("zero3-bf16")
    save_file({"w": torch.ones(6, 2)}, tmp_path / "w.safetensors")
    ckpttool.split(ckpttool.open(tmp_path / "w.safetensors"), tmp_path / "ranks", 3)
    shutil.copytree(tmp_path / "ranks", folder, dirs_exist_ok=True)
    refused(folder, "files of two kinds, of different numbers of ranks: 2 and 3", opened=opened)


# ---- DeepSpeed's universal folders, made by its own tool, against their runs; places in ZeRO's vectors


@pytest.fixture(scope="module")
def recorded(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the universal folders beside the runs."""
    folder = Path(shutil.copytree(runs, tmp_path_factory.mktemp("universal") / "runs"))
    return unpack(universal_runs.RECORDED, folder)


STEP3 = "zero2-fp32/global_step3"


@pytest.fixture
def universal(recorded: Path, tmp_path: Path) -> Run:
    """Return a function that copies a universal folder, to be changed."""

    def copied(name: str = STEP3) -> Path:
        return Path(shutil.copytree(recorded / f"{name}_universal", tmp_path / f"{name}_universal"))

    return copied


def opened_universal(folder: Path, take_rank: int | None = 0) -> ckpttool.Checkpoint:
    return ckpttool.open_ranks(folder, take_rank=take_rank)


@pytest.mark.parametrize("name", universal_runs.FOLDERS)
def test_it_is_the_checkpoint_of_the_run(name: str, recorded: Path, tmp_path: Path, cli: Cli) -> None:
    run, new = opened_universal(recorded / name), opened_universal(recorded / f"{name}_universal")
    assert [*new.tree] == [*run.tree]
    assert digest(dict(new.tensors())) == digest(dict(run.tensors()))
    assert new.tree["optimizer"]["param_groups"] == run.tree["optimizer"]["param_groups"]
    assert (new.unread, new.ranks.step) == (run.unread, run.ranks.step)  # type: ignore[union-attr]
    ran = cli("merge", recorded / f"{name}_universal", tmp_path / "out.pt", "--take-rank", "0")
    assert (ran.code, "merged DeepSpeed 0.19.8 universal" in ran.out) == (0, True), ran.err
    module = torch.load(tmp_path / "out.pt")["module"]
    head = module.get("head.weight")
    assert head is None or head.data_ptr() == module["embed.weight"].data_ptr()


def test_it_is_found_by_the_files_that_name_it(universal: Run) -> None:
    folder = universal()
    (folder.parent / "latest_universal").write_text(folder.name)
    assert opened_universal(folder.parent).ranks.framework == "DeepSpeed 0.19.8 universal"  # type: ignore[union-attr]
    (folder.parent / "latest").write_text(folder.name)
    assert opened_universal(folder.parent).ranks.step == 3  # type: ignore[union-attr]


def test_a_folder_of_both_kinds_is_that_which_latest_names(recorded: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(recorded / "zero2-fp32", tmp_path / "run"))
    (run / "latest_universal").write_text("global_step3_universal")
    assert opened_universal(run).ranks.framework == "DeepSpeed 0.19.8 ZeRO-2"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["zero2-fp32/global_step3", "zero3-fp32/global_step3"])
def test_a_missing_parameter_is_named(name: str, universal: Run) -> None:
    folder = universal(name)
    shutil.rmtree(folder / "zero" / "body.weight")
    refused(folder, r"has no zero/body\.weight/fp32\.pt", opened=opened_universal)


ZERO3 = "zero3-fp32/global_step3"
VALUES, STATES = "zero/body.weight/fp32.pt", "mp_rank_00_model_states.pt"
CHANGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no model states": (STEP3, lambda at: (at / STATES).unlink(), r"has no file \*_model_states\.pt"),
    "a parameter of another model": (
        STEP3,
        lambda at: shutil.copytree(at / "zero" / "body.weight", at / "zero" / "foreign.weight"),
        r"has 'foreign\.weight' in zero/",
    ),
    "another size": (
        ZERO3,
        lambda at: torch.save(torch.zeros(3), at / VALUES),
        r"body\.weight/fp32\.pt: has shape \[3\], and the parameter",
    ),
    "no tensor": (ZERO3, lambda at: torch.save({}, at / VALUES), r"body\.weight/fp32\.pt: has no tensor"),
    "another step than the model states": (
        STEP3,
        lambda at: [torch.save(torch.tensor(9.0), path) for path in (at / "zero").glob("*/step.pt")],
        "'global_steps' states 3, the optimizer states 9",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_does_not_fit_is_refused_by_name(what: str, universal: Run) -> None:
    name, change, said = CHANGES[what]
    change(folder := universal(name))
    refused(folder, said, opened=opened_universal)


def test_a_model_that_was_cut_is_whole(universal: Run) -> None:
    folder = universal()
    whole = dict(opened_universal(folder).state("module").tensors)
    states = torch.load(folder / STATES, weights_only=False)
    for part in range(2):  # tensor parallelism: each has a half of this weight
        half = states["module"]["body.weight"].chunk(2)[part].clone()
        cut: dict[str, Any] = {**states, "module": {**states["module"], "body.weight": half}}
        torch.save(cut, folder / f"mp_rank_{part:02}_model_states.pt")
    found = opened_universal(folder)
    assert digest(found.state("module").tensors) == digest(whole)
    assert found.tree["optimizer"]["state"]["body.weight"].keys() == {"exp_avg", "exp_avg_sq", "step"}


# The places of parameters in ZeRO's vectors: cut as DeepSpeed cuts them, put together again.

Shape = tuple[int, ...]

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
groups = st.lists(st.lists(shapes, max_size=6), min_size=1, max_size=3)
ranks = st.integers(1, 13)


def named(listed: list[list[Shape]]) -> list[dict[str, Shape]]:
    return [{f"{group}.{i}": shape for i, shape in enumerate(each)} for group, each in enumerate(listed)]


def put_together(layout: Layout, parts: dict[int, list[list[int]]]) -> dict[str, list[int]]:
    """Return the elements of each parameter, taken from the ranks' parts."""
    found: dict[str, list[int]] = {}
    for slot in layout.slots:
        runs = sorted(slot.runs, key=lambda run: run.begin)
        taken = [parts[run.rank][slot.group][run.start : run.start + run.count] for run in runs]
        found[slot.name] = [*itertools.chain(*taken)]
        ends = itertools.accumulate(map(len, taken))
        assert [run.begin for run in runs] == [0, *ends][: len(runs)]
    return found


def numbered(listed: list[dict[str, Shape]]) -> dict[str, list[int]]:
    """Return other numbers for the elements of each parameter."""
    numbers = itertools.count(1)
    return {
        name: [next(numbers) for _ in range(math.prod(shape))]
        for each in listed
        for name, shape in each.items()
    }


@given(groups, ranks, st.integers(0, 2))
def test_a_vector_is_put_together(listed: list[list[Shape]], world_size: int, fill: int) -> None:
    named_groups = named(listed)
    wanted = numbered(named_groups)
    fills = [[fill] * len(each) for each in listed]
    layout = vectors_cut(named_groups, fills if fill else [], world_size, range(world_size))
    parts: dict[int, list[list[int]]] = {rank: [] for rank in range(world_size)}
    for group in named_groups:
        vector = [*itertools.chain(*(wanted[name] + [0] * fill for name in group))]
        size = math.ceil(len(vector) / (2 * world_size)) * 2
        for rank in range(world_size):
            parts[rank].append(vector[rank * size : (rank + 1) * size])
    assert put_together(layout, parts) == wanted
    for rank, kept in parts.items():
        assert layout.least[rank] == [len(each) for each in kept]


@given(groups, ranks)
def test_parameters_that_are_cut_each_are_put_together(listed: list[list[Shape]], world_size: int) -> None:
    named_groups = named(listed)
    wanted = numbered(named_groups)
    layout = parameters_cut(named_groups, world_size, range(world_size))
    parts: dict[int, list[list[int]]] = {rank: [] for rank in range(world_size)}
    for group in named_groups:
        for rank in range(world_size):
            parts[rank].append([])
            for name in group:
                share = math.ceil(len(wanted[name]) / world_size)
                padded = wanted[name] + [0] * (share * world_size - len(wanted[name]))
                parts[rank][-1] += padded[rank * share : (rank + 1) * share]
    assert put_together(layout, parts) == wanted
    for rank, kept in parts.items():
        assert layout.least[rank] == layout.most[rank] == [len(each) for each in kept]


@given(st.integers(0, 20), ranks)
def test_dealt_out_parameters_are_put_in_order(count: int, world_size: int) -> None:
    order = [f"{i}" for i in range(count)]
    dealt = [name for first in range(world_size) for name in order[first::world_size]]
    assert given_order(dealt, world_size) == order
