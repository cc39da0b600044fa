"""`ckpttool merge`: what many ranks wrote, one checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpttool
from tests.ranks import shardings
from tests.support.running import MOST, peak

pytestmark = pytest.mark.filterwarnings("ignore")  # torch wonders at a save without a process group


@pytest.fixture(scope="module")
def run(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model and its optimizer by names under FSDP2 on 4 ranks; the run 5 steps later is beside it."""
    folder = tmp_path_factory.mktemp("run") / "actor"
    folder.mkdir()
    run_ranks(4, shardings.save_straight, str(folder), 5, timeout=60)
    (folder / "fsdp_config.json").write_text("{}")
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text('{"a": 1}')
    return folder


@pytest.fixture(scope="module")
def hybrid(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model and its optimizer by indices under hybrid sharding on 4 ranks."""
    folder = tmp_path_factory.mktemp("hybrid") / "ranks"
    folder.mkdir()
    run_ranks(4, shardings.save_hsdp, str(folder), timeout=60)
    return folder


def same_tensors(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_one_process_goes_on_where_the_ranks_were(run: Path, tmp_path: Path, cli: Any) -> None:
    ran = cli("merge", run, tmp_path / "run.pt")
    assert ran.code == 0 and ran.out.startswith("merged 4 ranks of DTensor -> ")
    assert "run         DTensor, 4 ranks, step 3\n" in cli("inspect", run).out
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    model = shardings.net()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    assert list(saved["optimizer"]["state"]) == [name for name, _ in model.named_parameters()]
    optimizer.load_state_dict(saved["optimizer"])
    shardings.steps(model, optimizer, 5)
    weights, moments = torch.load(f"{run}-ended.pt")
    found = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)
    for index, (name, _) in enumerate(model.named_parameters()):
        ours, theirs = optimizer.state_dict()["state"][index], moments["state"][name]
        assert ours["step"] == theirs["step"] == 8


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks_goes_on_from_dcp(
    world_size: int, run: Path, run_ranks: Any, tmp_path: Path, cli: Any
) -> None:
    assert cli("merge", run, tmp_path / "dcp", "--to", "dcp").code == 0
    run_ranks(world_size, shardings.go_on_from_dcp, str(tmp_path / "dcp"), 5, timeout=60)
    weights, moments = torch.load(f"{run}-ended.pt")
    found, found_moments = torch.load(tmp_path / "dcp-ended.pt")
    if world_size == 4:
        same_tensors(found, weights)
        for name in moments["state"]:
            same_tensors(found_moments["state"][name], moments["state"][name])
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


def test_an_optimizer_gets_names_only_if_certain(hybrid: Path, tmp_path: Path, cli: Any) -> None:
    ran = cli("merge", hybrid, tmp_path / "run.pt")
    assert ran.code == 0
    assert "more than one assignment of the state's tensors fits: it stays keyed by numbers" in ran.err
    assert set(torch.load(tmp_path / "run.pt")["optimizer"]["state"]) == set(range(5))


def test_safetensors_get_the_model_alone_or_with_full_everything(run: Path, tmp_path: Path, cli: Any) -> None:
    ran = cli("merge", run, tmp_path / "model.safetensors")
    assert ran.code == 0 and "left out, as safetensors holds only a state's tensors: optimizer" in ran.err
    for words in (("all.safetensors", "--full"), ("all.pt",)):
        assert cli("merge", run, *words).code == 0
    assert ckpttool.diff(tmp_path / "all.safetensors", tmp_path / "all.pt", model_only=False).same
    assert ckpttool.digest(tmp_path / "model.safetensors") == ckpttool.digest(run)


def test_json(run: Path, tmp_path: Path, cli: Any) -> None:
    ran = cli("merge", run, tmp_path / "m.safetensors", "--json", "--dtype", "bf16")
    assert ran.json["ranks"] == {"framework": "DTensor", "world_size": 4, "mesh": "4", "step": 3}
    assert (ran.json["keys"], ran.json["left_out"]) == (6, ["model._metadata", "optimizer"])
    tensors = ckpttool.open(tmp_path / "m.safetensors").state().tensors.values()
    assert {tensor.dtype.name for tensor in tensors} == {"bfloat16"}
    page = cli("inspect", run, "--json").json
    assert (page["format"], page["ranks"]["world_size"]) == ("dtensor-ranks", 4)
    assert page["ranks"]["missing"] == []


def test_a_dry_run_writes_nothing(run: Path, tmp_path: Path, cli: Any) -> None:
    dry = cli("merge", run, tmp_path / "m.pt", "--dry-run", "--companions", "--json")
    assert dry.code == 0
    assert list(tmp_path.iterdir()) == []
    assert cli("merge", run, tmp_path / "m.pt", "--json").json["bytes"] == dry.json["bytes"]


def test_companions_are_copied_when_asked_and_else_named(run: Path, tmp_path: Path, cli: Any) -> None:
    assert cli("merge", run, tmp_path / "a" / "m.safetensors").code == 2
    (tmp_path / "a").mkdir()
    ran = cli("merge", run, tmp_path / "a" / "m.safetensors")
    assert "not copied (--companions does): fsdp_config.json, config.json" in ran.err
    assert cli("merge", run, tmp_path / "a" / "m.safetensors", "--force", "--companions").code == 0
    assert (tmp_path / "a" / "config.json").read_text() == '{"a": 1}'
    assert sorted(os.listdir(tmp_path / "a")) == ["config.json", "fsdp_config.json", "m.safetensors"]
    again = cli("merge", run, tmp_path / "a" / "o.safetensors", "--companions")  # the same contents
    assert again.code == 0
    assert f"copying along: {tmp_path}/a/fsdp_config.json, {tmp_path}/a/config.json" in again.err
    (tmp_path / "a" / "config.json").write_text("older")
    again = cli("merge", run, tmp_path / "a" / "n.safetensors", "--companions")
    assert again.code == 2 and "config.json: already exists" in again.err
    assert not (tmp_path / "a" / "n.safetensors").exists()
    assert cli("merge", run, f"{tmp_path}/b/", "--companions").code == 0
    (tmp_path / "b" / "config.json").write_text("older")
    assert cli("merge", run, f"{tmp_path}/b/", "--companions").code == 2
    assert "other files too (config.json" in cli("merge", run, f"{tmp_path}/b/", "--force").err
    assert cli("merge", run, f"{tmp_path}/b/", "--companions", "--force").code == 0
    assert (tmp_path / "b" / "config.json").read_text() == '{"a": 1}'
    (tmp_path / "b" / "notes.txt").write_text("mine")
    ran = cli("merge", run, f"{tmp_path}/b/", "--companions", "--force")
    assert (ran.code, "other files too (notes.txt)" in ran.err) == (2, True)
    twice = Path(shutil.copytree(run, tmp_path / "twice"))
    (twice / "config.json").write_text("{}")
    ran = cli("merge", twice, tmp_path / "c.pt", "--companions")
    assert ran.code == 2
    assert f"{twice}/config.json and {twice}/huggingface/config.json would both become" in ran.err


def test_a_dtype_that_all_tensors_have_is_a_merge_all_the_same(run: Path, tmp_path: Path, cli: Any) -> None:
    ran = cli("merge", run, tmp_path / "one.safetensors", "--dtype", "fp32")
    assert ran.code == 0, ran.err
    assert "none has a float dtype other than float32" in ran.err
    assert cli("merge", run, tmp_path / "two.safetensors").code == 0
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_the_file_of_a_rank_as_the_last_argument_is_no_output(run: Path, cli: Any) -> None:
    """With two ranks there is one input before it; a folder is an input by itself."""
    files = sorted(run.glob("model_*.pt"))[:2]
    before = files[1].read_bytes()
    ran = cli("merge", *files)
    assert ran.code == 2 and "the last argument is the OUTPUT" in ran.err and "--force" not in ran.err
    assert files[1].read_bytes() == before


def test_full_in_dcp_hides_the_optimizer_s_settings_from_torch(run: Path, tmp_path: Path, cli: Any) -> None:
    ran = cli("merge", run, tmp_path / "a", "--to", "dcp", "--full")
    assert "without --full dcp.load finds them too" in ran.err
    assert "--full" not in cli("merge", run, tmp_path / "b", "--to", "dcp").err
    readers = [torch.distributed.checkpoint.FileSystemReader(tmp_path / name) for name in "ab"]
    names = [" ".join(reader.read_metadata().state_dict_metadata) for reader in readers]
    assert [".param_groups." in each for each in names] == [False, True]


@pytest.mark.parametrize("output", ["one.pt", "one.safetensors", "new/", "beside/actor/one.pt"])
def test_what_lies_beside_the_ranks_is_named(output: str, run: Path, tmp_path: Path, cli: Any) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "beside" / "actor"))
    of_run = ["custom_checkpoint_0.pkl", "model.safetensors.index.json", "optimizer.pt", "scheduler.bin"]
    for name in (*of_run, "huggingface/training_args.bin", "latest", ".hidden"):
        (folder / name).write_bytes(b"{}")
    ran = cli("merge", folder, f"{tmp_path}/{output}")
    assert ran.code == 0 and "not copied (--companions does): fsdp_config.json, config.json\n" in ran.err
    assert f"other files of the folder, not copied: {', '.join(of_run[:3])}" in ran.err
    again = cli("merge", folder, f"{tmp_path}/{output}", "--force", "--json")
    left = [*of_run, "huggingface/training_args.bin", "config.json", "fsdp_config.json"]
    assert sorted(again.json["not_copied"]) == sorted(left)
    (tmp_path / "companions").mkdir()
    ran = cli("merge", folder, tmp_path / "companions" / "one.pt", "--companions", "--json")
    assert set(again.json["not_copied"]) - set(ran.json["not_copied"]) == {"config.json", "fsdp_config.json"}


def test_the_files_of_the_ranks_are_never_overwritten(run: Path, tmp_path: Path, cli: Any) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "copy"))
    first = folder / "model_world_size_4_rank_0.pt"
    before = first.read_bytes()
    ran = cli("merge", folder, first, "--force")
    assert ran.code == 2 and "is a part of the input" in ran.err
    assert cli("merge", folder, f"{folder}/", "--force").code == 2
    assert first.read_bytes() == before


def test_a_dcp_folder_of_ranks_is_merged_as_by_torch(run_ranks: Any, tmp_path: Path, cli: Any) -> None:
    run_ranks(4, shardings.save_sharded, str(tmp_path / "d"), timeout=60)
    assert cli("merge", tmp_path / "d", tmp_path / "out.pt").code == 0
    dcp_to_torch_save(tmp_path / "d", tmp_path / "torch.pt")
    same_tensors(torch.load(tmp_path / "out.pt")["model"], torch.load(tmp_path / "torch.pt")["model"])
    assert "run         DCP" in cli("inspect", tmp_path / "d").out
    assert cli("merge", tmp_path / "d", tmp_path / "o.pt", "--take-rank", 0).code == 2


@pytest.mark.parametrize("kind", ["one", "two"])
def test_hugging_face_s_pieces_are_merged(kind: str, run_ranks: Any, tmp_path: Path, cli: Any) -> None:
    folder = tmp_path / "hf"
    run_ranks(4, shardings.save_as_hugging_face, str(folder), timeout=60)
    ran = cli("merge", folder / kind, tmp_path / "out.safetensors")
    assert ran.code == 0 and "no file says how many ranks there were; those of 4 were found" in ran.err
    assert ckpttool.digest(tmp_path / "out.safetensors") == ckpttool.digest(f"{folder}-whole.pt")
    for path in sorted((folder / kind).glob("shard-00002-*")):
        path.unlink()
    ran = cli("merge", folder / kind, tmp_path / "gap.safetensors")
    assert ran.code == 3 and "the file of rank 1 is missing" in ran.err


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_what_accelerate_saves_is_merged(kind: str, run_ranks: Any, tmp_path: Path, cli: Any) -> None:
    pytest.importorskip("accelerate")
    run_ranks(2, shardings.save_as_accelerate, str(tmp_path / "saved"), timeout=60)
    (tmp_path / "saved" / kind / "random_states_0.pkl").write_bytes(b"\x80\x02N.")
    ran = cli("merge", tmp_path / "saved" / kind, tmp_path / "out.pt")
    assert ran.code == 0 and "random_states_0.pkl" in ran.err
    saved, whole = torch.load(tmp_path / "out.pt"), torch.load(tmp_path / "saved-whole.pt")
    same_tensors(saved["model"], whole["model"])
    for name, moments in whole["optimizer"]["state"].items():
        same_tensors(saved["optimizer"]["state"][name], moments)


# Large folders.


def large(folder: Path, template: Path, size: int) -> Path:
    """Write four ranks' files with `size` bytes in all, half cut by rows and half by columns."""
    import torch.distributed.tensor

    folder.mkdir()
    rows = size // 4 // 4096 // 4 // 2
    for rank in range(4):
        tree = torch.load(template / f"model_world_size_4_rank_{rank}.pt", weights_only=False)
        kept = {}
        for name, placement in (("0.weight", (4 * rows, 4096)), ("2.weight", (rows, 4 * 4096))):
            spec = tree[name]._spec
            spec.placements = (torch.distributed.tensor.Shard(int(name == "2.weight")),)
            shape, stride = torch.Size(placement), (placement[1], 1)
            spec.tensor_meta = spec.tensor_meta._replace(shape=shape, stride=stride)
            local = torch.full((rows, 4096), float(rank))
            kept[name] = torch.distributed.tensor.DTensor(local, spec, requires_grad=False)
        torch.save(kept, folder / f"model_world_size_4_rank_{rank}.pt")
    return folder


@pytest.mark.covered(lambda output: output != "out.pt")
@pytest.mark.parametrize("output", ["out.safetensors", "out.pt", "out/"])
def test_memory_stays_flat(output: str, run: Path, tmp_path: Path) -> None:
    assert peak("merge", large(tmp_path / "large", run, 100_000_000), f"{tmp_path}/{output}") < MOST
