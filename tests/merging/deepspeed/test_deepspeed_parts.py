"""DeepSpeed runs that cut the model (experts, pipelines, tensor parallelism), against its own values."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.core.tensors.values import live_tensors
from ckpttool.errors import RanksDiffer, Unsupported, UsageFault
from tests.support import deepspeed_cut_runs
from tests.support.comparing import refused
from tests.support.deepspeed_cut_runs import CASES, Case
from tests.support.recording import unpack
from tests.support.running import Cli, assert_says

TAG = "global_step2"
OF_ZERO = [case for case in CASES if case.config["zero_optimization"]["stage"]]
CONVERTED = [case for case in CASES if case.universal]

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the recorded folders, which tests only read."""
    return unpack(deepspeed_cut_runs.RECORDED, tmp_path_factory.mktemp("cut"))


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Run:
    """Return a function that copies the folder of a case's tag, to be changed."""
    return lambda name, tag=TAG: Path(shutil.copytree(recorded / name / tag, tmp_path / name / tag))


def found_in(folder: Path, **given: Any) -> dict[str, torch.Tensor]:
    """Return the weights and momenta of a folder: `fp32/NAME`, `exp_avg/NAME`, …"""
    with ckpttool.open_ranks(folder, **given) as checkpoint:
        state = checkpoint.tree["optimizer"]["state"]
        kept = {f"{key}/{name}": each[key] for name, each in state.items() for key in each if key != "step"}
        model = {f"fp32/{name}": value for name, value in checkpoint.state().tensors.items()}
        return {name: value.clone() for name, value in live_tensors({**model, **kept}).items()}


def changed(file: Path, change: Callable[[Any], object]) -> None:
    """Change what torch loads of a file, and save it under its name."""
    pytest.importorskip("deepspeed")  # whose objects are in it
    tree = torch.load(file, weights_only=False)
    change(tree)
    torch.save(tree, file)


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


# What DeepSpeed's own ranks and tools have


@pytest.mark.parametrize("case", OF_ZERO, ids=lambda case: case.name)
def test_weights_and_momenta_are_those_that_deepspeed_gathers(case: Case, recorded: Path) -> None:
    wanted = load_file(recorded / case.name / f"{TAG}.safetensors")
    found = found_in(recorded / case.name)
    assert differing(found, wanted) == []
    whole = {"fp32/frozen.weight", "fp32/frozen.bias"} if case.kind == "experts" else {"fp32/3.factor"}
    assert found.keys() - wanted.keys() == (set() if case.kind == "tensor" else whole)


@pytest.mark.parametrize("name", ["experts-zero0", "pipeline-zero0"])
def test_without_zero_the_optimizer_is_left_out_by_name(name: str, recorded: Path, tmp_path: Path) -> None:
    wanted = load_file(recorded / name / f"{TAG}.safetensors")
    with ckpttool.open_ranks(recorded / name) as checkpoint:
        found = live_tensors(checkpoint.state().tensors)
        assert [each for each in checkpoint.unread if "numbers its parameters" in each]
        for key, value in found.items():
            # No file says that layer 0 is the embedding that the last stage uses too.
            full = f"fp32/{key}".replace("fp32/0.", "fp32/tied_modules.embed.")
            assert full not in wanted or torch.equal(value, wanted[full])
        model = {key for key in wanted if key.startswith("fp32/")}
        assert len(model) <= len(found)
        assert checkpoint.tree["optimizer"] is None


@pytest.mark.parametrize("name", ["experts-zero1", "experts-data-first"])
def test_experts_are_those_of_their_own_files(name: str, recorded: Path) -> None:
    found = found_in(recorded / name)
    for file in (recorded / name / TAG).glob("layer_*_expert_*"):
        wanted = {f"fp32/{key}": value for key, value in torch.load(file).items()}
        assert differing(found, wanted) == []


@pytest.mark.parametrize("case", CONVERTED, ids=lambda case: case.name)
def test_a_universal_folder_of_it_holds_the_same(case: Case, recorded: Path) -> None:
    wanted, found = found_in(recorded / case.name), found_in(recorded / case.name / f"{TAG}_universal")
    assert differing(wanted, {name: found[name] for name in found if name in wanted}) == []
    assert {name for name in wanted if name not in found} <= {"fp32/3.factor"}


def test_one_file_holds_it_all(recorded: Path, tmp_path: Path, cli: Cli) -> None:
    for name, axis in (
        ("experts-zero2-bf16", "experts"),
        ("pipeline-bf16", "pipeline 2"),
        ("tensor-zero1", "tp 2"),
    ):
        out = tmp_path / f"{name}.pt"
        assert_says(cli("merge", recorded / name, out), 0)
        assert_says(cli("verify", recorded / name), 0)
        whole = torch.load(out, weights_only=True)
        names = [key for group in whole["optimizer"]["param_groups"] for key in group["params"]]
        assert set(names) == set(whole["optimizer"]["state"]) <= set(whole["module"])
        shapes = {key: value.shape for key, value in whole["module"].items()}
        assert all(whole["optimizer"]["state"][key]["exp_avg"].shape == shapes[key] for key in names)
        assert axis in cli("inspect", recorded / name).out


# What is missing or does not belong


MISSING = [
    ("experts-zero1", "layer_1_expert_3_mp_rank_00_model_states.pt"),
    ("experts-zero0", "layer_0_expert_0_mp_rank_00_model_states.pt"),
    ("pipeline-zero1", "layer_04-model_states.pt"),
    ("pipeline-zero1", "mp_rank_01_model_states.pt"),
    ("tensor-zero1", "mp_rank_01_model_states.pt"),
    ("experts-zero2-bf16", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"),
    ("pipeline-bf16", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"),
]


@pytest.mark.parametrize(("name", "file"), MISSING)
def test_a_missing_file_is_named(name: str, file: str, run: Run, tmp_path: Path, cli: Cli) -> None:
    folder = run(name)
    (folder / file).unlink()
    ran = cli("merge", folder, tmp_path / "out.pt")
    assert_says(ran, 3, file)


def test_a_rank_without_a_file_is_named(run: Run, tmp_path: Path, cli: Cli) -> None:
    folder = run("tensor-zero3")
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert_says(cli("merge", folder, tmp_path / "out.pt"), 3, "rank 2 of 4 is missing")
    assert "rank 2" in cli("inspect", folder).out


def test_parts_of_two_steps_are_refused(run: Run) -> None:
    folder = run("pipeline-zero1")
    for file in folder.glob("*mp_rank_01_optim*"):
        changed(
            file,
            lambda tree: tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"].add_(1),
        )
    refused(folder, "another step")
    folder = run("tensor-zero1").rename(folder.with_name("moved"))
    changed(folder / "mp_rank_01_model_states.pt", lambda tree: tree.update(global_steps=5))
    refused(folder, "step")


def test_a_tied_embedding_is_compared_between_the_stages(run: Run, tmp_path: Path, cli: Cli) -> None:
    folder, groups = run("pipeline-zero1"), "single_partition_of_fp32_groups"
    file = folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    wanted = found_in(folder)
    changed(file, lambda tree: tree["optimizer_state_dict"][groups][0].data[:1].add_(1))
    assert_says(cli("merge", folder, tmp_path / "out.pt"), 1, "tied_modules.embed.weight", "--take-rank")
    with pytest.raises(RanksDiffer):
        found_in(folder)
    tied = "fp32/tied_modules.embed.weight"
    assert torch.equal(found_in(folder, take_rank=0)[tied], wanted[tied])
    assert found_in(folder, take_rank=2)[tied].flatten()[0] == wanted[tied].flatten()[0] + 1


def test_a_stage_without_parameters_is_no_matter(run: Run) -> None:
    folder = run("pipeline-zero0")
    wanted = ckpttool.open_ranks(folder).state().load()
    for file in folder.glob("mp_rank_0?_model_states.pt"):
        changed(file, lambda tree: tree.update(mp_world_size=3, checkpoint_parallel_dimensions=None))
    shutil.copy(folder / "mp_rank_01_model_states.pt", folder / "mp_rank_02_model_states.pt")
    changed(folder / "mp_rank_02_model_states.pt", lambda tree: tree.update(optimizer=None, buffer_names=[]))
    found = ckpttool.open_ranks(folder).state().load()
    assert {name: value.tolist() for name, value in found.items()} == {
        n: v.tolist() for n, v in wanted.items()
    }


def test_another_number_of_parts_or_ranks_is_refused(run: Run) -> None:
    folder = run("pipeline-zero1")
    changed(folder / "mp_rank_01_model_states.pt", lambda tree: tree.update(dp_world_size=3))
    refused(folder, "was written by one of")
    folder = run("tensor-zero1")
    changed(folder / "mp_rank_00_model_states.pt", lambda tree: tree.update(mp_world_size=1))
    refused(folder, "part 1 of the model, and the run cut it into|cut into other parts")


def test_an_expert_under_another_s_name_is_refused(run: Run) -> None:
    folder = run("experts-zero1")
    names = [f"layer_0_expert_{number}_mp_rank_00_model_states.pt" for number in (1, 2)]
    shutil.copy(folder / names[0], folder / names[1])
    refused(folder, "no name of expert 2", ckpttool.errors.Damaged)


def test_a_rank_that_there_is_not_is_named(recorded: Path) -> None:
    for rank, said in ((4, "no file of it was written by rank 4"), (1, "rank 0 holds model states")):
        refused(recorded / "pipeline-zero1", said, UsageFault, ckpttool.open_ranks, take_rank=rank)


# How tensor parallelism cut a parameter


def ruled(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change what the model states say of how parameters were cut."""
    for file in folder.glob("*mp_rank_0?_model_states.pt"):
        changed(file, lambda tree: change(tree["universal_checkpoint_info"]))
    return folder


def test_what_no_file_says_is_refused(run: Run, tmp_path: Path, cli: Cli) -> None:
    folder = run("tensor-zero1")
    for file in folder.glob("mp_rank_0?_model_states.pt"):
        changed(file, lambda tree: tree.pop("universal_checkpoint_info"))
    refused(folder, "cut 'embed.weight' over 2 tensor-parallel parts: no file says how", Unsupported)
    assert_says(cli("merge", folder, tmp_path / "out.pt"), 3, "universal_checkpoint_info")


ROWS = "parameter_with_row_parallelism_patterns"
WHOLE = "tp_replicated_parameter_patterns"
IN_TWO = "parameter_with_2_sub_params_cat_dim_0"


def test_rules_of_megatron_deepspeed_are_followed(run: Run) -> None:
    folder = run("tensor-zero1")
    parts = [torch.load(folder / f"mp_rank_0{part}_model_states.pt", weights_only=False) for part in range(2)]
    rules: dict[str, Any] = {
        ROWS: [r"blocks.\d+.fc_out.weight"],
        WHOLE: [r"norm.*", r".*fc_out.bias"],
        IN_TWO: [r"blocks.\d+.fused.weight"],
        "vocabulary_parameter_patterns": ["embed.weight"],
        "original_vocab_size": 11,
    }
    ruled(folder, lambda info: (info.clear(), info.update(rules)))
    found = found_in(folder)
    halves = [part["module"]["blocks.0.fused.weight"].chunk(2) for part in parts]
    wanted = torch.cat([halves[0][0], halves[1][0], halves[0][1], halves[1][1]])
    assert torch.equal(found["fp32/blocks.0.fused.weight"], wanted)
    embed = torch.cat([part["module"]["embed.weight"] for part in parts])
    assert torch.equal(found["fp32/embed.weight"], embed[:11])
    assert found["exp_avg/embed.weight"].shape == (11, 4)
    rows = torch.cat([part["module"]["blocks.1.fc_out.weight"] for part in parts], 1)
    assert torch.equal(found["fp32/blocks.1.fc_out.weight"], rows)


def test_what_should_be_whole_on_each_part_is_compared(run: Run, tmp_path: Path, cli: Cli) -> None:
    folder = ruled(run("tensor-zero1"), lambda info: info[WHOLE].append("blocks.0.fc_in.weight"))
    assert_says(cli("merge", folder, tmp_path / "out.pt"), 1, "blocks.0.fc_in.weight")


@pytest.mark.parametrize("pattern", ["(a+)+$", "(", 3, "a*b*c*d*e*f*", "x{1,99999}"])
def test_a_pattern_that_is_none_of_names_is_refused(pattern: object, run: Run) -> None:
    refused(ruled(run("tensor-zero1"), lambda info: info.update({ROWS: [pattern]})), "has the pattern")


WRONG: list[tuple[str, Any]] = [
    ("sub_param_shard_widths", {r"^blocks\.0\.fused\.weight$": [[2, 2], [1, 1], [9, 1]]}),
    ("sub_param_shard_widths", {r"^blocks\.0\.fused\.weight$": "none"}),
    ("parameter_with_sub_params", [{"patterns": ["embed"], "shape": [2, 2, 2], "partition_dim": 0}]),
    ("parameter_with_sub_params", [{"patterns": ["norm.weight"], "shape": [3], "partition_dim": 4}]),
    (ROWS, ["blocks.0.fc_in.bias"]),
    ("autotp_unsupported_parameter_patterns", ["blocks.0.fc_in.weight"]),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_rules_that_do_not_fit_are_refused(key: str, value: Any, run: Run) -> None:
    folder = ruled(run("tensor-zero1"), lambda info: info.update({key: value, WHOLE: []}))
    refused(folder, "cut '.*universal_checkpoint_info", Unsupported)
