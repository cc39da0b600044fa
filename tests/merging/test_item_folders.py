"""Folders of torch_checkpointing: a file for each item and rank, put together by what `metadata.pkl` says."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Damaged, RanksDiffer, Unreadable, Unsupported
from tests.ranks import item_saves
from tests.support import item_folders
from tests.support.comparing import refused
from tests.support.item_folders import REPLICATE, Placed, shard, strided
from tests.support.running import Cli, assert_says

WHOLE = torch.arange(7 * 5.0).reshape(7, 5)


def joined(folder: Path) -> Any:
    """Return what torch loads of the merged folder."""
    out = folder.parent / "out.pt"
    ckpttool.merge(folder, out, force=True)
    return torch.load(out, weights_only=True)


# ---- Real folders of the library


@pytest.fixture(scope="module", params=[(1, "torch"), (2, "torch"), (2, "safetensors")], ids=str)
def recorded(
    request: pytest.FixtureRequest, run_ranks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a folder that the library's CheckpointManager wrote, on 1 or 2 ranks."""
    pytest.importorskip("torch_checkpointing")
    world, form = request.param
    folder = tmp_path_factory.mktemp("recorded") / "step-7"
    versions = run_ranks(world, item_saves.save_items, str(folder), form, timeout=60)
    assert {*versions} == {"0.1.1"}
    return folder


def test_a_folder_of_the_library_becomes_whole_bit_for_bit(recorded: Path) -> None:
    found = joined(recorded)
    assert found["step"] == 7
    expected = item_saves.expected()
    assert found["model"].keys() == expected.keys()
    assert all(torch.equal(found["model"][name], value) for name, value in expected.items())
    assert all(found["model"][name].dtype == value.dtype for name, value in expected.items())


def test_the_optimizer_comes_along_by_names_and_continues_in_one_process(recorded: Path) -> None:
    found = joined(recorded)["optimizer"]
    model, optimizer = item_saves.model_and_optimizer()
    assert [*found["state"]] == found["param_groups"][0]["params"] == ["weight", "bias"]
    for entry, mine in zip(found["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(entry[name], value) for name, value in mine.items())
    again = torch.optim.AdamW(model.named_parameters())
    again.load_state_dict(found)


def test_inspect_and_verify_know_the_run(recorded: Path, cli: Cli) -> None:
    shown = cli("inspect", recorded).out
    assert "torch-checkpointing" in shown and "torch_checkpointing, " in shown
    assert cli("verify", recorded).code == 0


# ---- The same layout without the library


CUTS: dict[str, tuple[tuple[int, ...], list[dict[str, Any]]]] = {
    "rows": ((2,), [shard(0)]),
    "columns": ((3,), [shard(1)]),
    "more ranks than rows": ((8,), [shard(1)]),
    "replicated": ((3,), [REPLICATE]),
    "both dimensions": ((2, 2), [shard(0), shard(1)]),
    "one dimension twice": ((2, 2), [shard(0), shard(0)]),
    "right to left": ((2, 2), [strided(0, 2), shard(0)]),
    "three axes": ((2, 2, 2), [REPLICATE, shard(1), shard(0)]),
}


@pytest.mark.parametrize("as_safetensors", [True, False])
@pytest.mark.parametrize("cut", CUTS)
def test_pieces_are_put_where_the_metadata_says(cut: str, as_safetensors: bool, tmp_path: Path) -> None:
    mesh, placements = CUTS[cut]
    world = int(torch.tensor(mesh).prod())
    wholes = {"a.w": WHOLE, "b": WHOLE.to(torch.bfloat16)[:6], "c": torch.arange(14).reshape(2, 7)}
    items = {"model": {name: Placed(whole, mesh, placements) for name, whole in wholes.items()}}
    item_folders.write(tmp_path / "step", items, world, as_safetensors=as_safetensors)
    found = joined(tmp_path / "step")["model"]
    assert all(torch.equal(found[name], whole) for name, whole in wholes.items())


def test_numbers_of_ranks_in_a_mesh_may_be_in_any_order(tmp_path: Path) -> None:
    said = two_ranks(tmp_path)
    mesh(said)["mesh_data"] = (1, 0)
    item_folders.tell(tmp_path / "step", said)
    for rank, rows in enumerate((WHOLE[4:], WHOLE[:4])):
        save_file({"w": rows.clone()}, tmp_path / "step" / f"model_{rank}.safetensors")
    assert torch.equal(joined(tmp_path / "step")["model"]["w"], WHOLE)


def test_tensors_that_say_themselves_where_they_lie_are_put_there(tmp_path: Path) -> None:
    said, folder = two_ranks(tmp_path), tmp_path / "step"
    of_rank = [
        ([[0, 0], [5, 2]], [[0, 0], [4, 0]], [[4, 5], [2, 3]]),
        ([[4, 0], [5, 0]], [[0, 0], [1, 0]], [[1, 5], [2, 2]]),
    ]
    groups = []
    for rank, (begins, starts, sizes) in enumerate(of_rank):
        local = torch.zeros(7, 5)
        for (r, c), (i, j), (rows, columns) in zip(begins, starts, sizes, strict=True):
            local[i : i + rows, j : j + columns] = WHOLE[r : r + rows, c : c + columns]
        save_file({"w": local}, folder / f"model_{rank}.safetensors")
        places = {"global_offsets": begins, "local_offsets": starts, "local_sizes": sizes}
        data = {"global_shape": [7, 5], "dtype": "torch.float32", **places}
        groups.append({"ranks": (rank,), "sharding_metadata": {"type": "default_tensor_v1", "data": data}})
    said["metadata"]["model"]["nested_path_to_metadata"]['["w"]'] = groups
    item_folders.tell(folder, said)
    assert torch.equal(joined(folder)["model"]["w"], WHOLE)


def test_metadata_of_version_1_is_read(tmp_path: Path) -> None:
    said, folder = two_ranks(tmp_path), tmp_path / "step"
    item = said["metadata"]["model"]
    layouts = {rank: {"model": layout} for rank, layout in item["rank_to_layout_info"].items()}
    listed = {'["model","w"]': item["nested_path_to_metadata"]['["w"]']}
    old = {"metadata": listed, "rank_to_layout_info_mappings": layouts, "world_size": 2}
    item_folders.tell(folder, old)
    assert torch.equal(joined(folder)["model"]["w"], WHOLE)


def test_an_item_of_one_rank_and_a_file_of_json_are_left_where_they_are(tmp_path: Path, cli: Cli) -> None:
    said, folder = two_ranks(tmp_path), tmp_path / "step"
    json_layouts = {
        rank: {
            "file_path": f"conf_{rank}.json",
            "serialization_format": {"type": "JsonSerialization", "cls": None},
        }
        for rank in range(2)
    }
    said["metadata"]["conf"] = {"nested_path_to_metadata": {}, "rank_to_layout_info": json_layouts}
    item_folders.tell(folder, said)
    (folder / "conf_0.json").write_text("{}")
    torch.save({"lr": 0.5}, folder / "scheduler_0.pt")
    ran = cli("merge", folder, tmp_path / "out.pt")
    assert_says(ran, 0, "conf_0.json")
    assert torch.load(tmp_path / "out.pt")["scheduler"] == {"lr": 0.5}


def test_values_that_all_ranks_should_hold_are_compared(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    item_folders.write(folder, {"model": {"w": Placed(WHOLE, (2,), [REPLICATE])}}, 2)
    save_file({"w": WHOLE + 1}, folder / "model_1.safetensors")
    with ckpttool.open_ranks(folder) as checkpoint, pytest.raises(RanksDiffer):
        ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    with ckpttool.open_ranks(folder, take_rank=1) as checkpoint:
        ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], WHOLE + 1)


# ---- What is incomplete, mixed or hostile


def two_ranks(tmp_path: Path) -> Any:
    """Write `step`, a folder of one tensor cut into rows by two ranks; return what its metadata says."""
    return item_folders.write(tmp_path / "step", {"model": {"w": Placed(WHOLE, (2,), [shard(0)])}}, 2)


def entry(said: Any) -> Any:
    return said["metadata"]["model"]["nested_path_to_metadata"]['["w"]'][0]["sharding_metadata"]


def data(said: Any) -> Any:
    return entry(said)["data"]


def mesh(said: Any) -> Any:
    return data(said)["mesh_spec"]


def group(said: Any) -> Any:
    return said["metadata"]["model"]["nested_path_to_metadata"]['["w"]'][0]


def layout(said: Any, rank: int) -> Any:
    return said["metadata"]["model"]["rank_to_layout_info"][rank]


PARTIAL = {"type": "Partial"}

LIES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "world of another run": (lambda said: said.update(world_size=1), Damaged, "ranks"),
    "world too large": (lambda said: said.update(world_size=1 << 40), Damaged, r"metadata\.pkl"),
    "world is text": (lambda said: said.update(world_size="2"), Damaged, r"metadata\.pkl"),
    "newer version": (lambda said: said.update(version="9.0"), Unsupported, "version '9.0'"),
    "Partial": (
        lambda said: data(said).update(placements=[{"type": "Partial"}]),
        Unsupported,
        "'model.w'.*Partial",
    ),
    "no placements": (
        lambda said: data(said).pop("placements"),
        Damaged,
        r"metadata\.pkl.*'model\.w'",
    ),
    "other shape": (lambda said: data(said).update(global_shape=[9, 5]), Damaged, "'model.w'"),
    "other axis": (lambda said: data(said).update(placements=[shard(1)]), Damaged, "'model.w'"),
    "axis there is none of": (
        lambda said: data(said).update(placements=[shard(2)]),
        Damaged,
        "'model.w'",
    ),
    "other type": (lambda said: data(said).update(dtype="torch.int64"), Damaged, "'model.w'.*int64"),
    "unknown type": (lambda said: data(said).update(dtype="torch.strange"), Damaged, "'model.w'"),
    "unknown sharding": (lambda said: entry(said).update(type="Mine"), Damaged, "'model.w'"),
    "mesh of others": (
        lambda said: mesh(said).update(mesh_data=(0, 5)),
        Damaged,
        "mesh",
    ),
    "mesh twice the same": (
        lambda said: mesh(said).update(mesh_data=(0, 0)),
        Damaged,
        "mesh",
    ),
    "mesh too small": (
        lambda said: mesh(said).update(mesh_shape=(3,)),
        Damaged,
        "mesh",
    ),
    "ranks beyond": (lambda said: group(said).update(ranks=(0, 7)), Damaged, "ranks"),
    "tensor not listed": (
        lambda said: said["metadata"]["model"]["nested_path_to_metadata"].clear(),
        Damaged,
        "model_0.*'model.w' may be a piece",
    ),
    "file outside": (lambda said: layout(said, 0).update(file_path="../x"), Damaged, "outside its folder"),
    "file of two ranks": (
        lambda said: layout(said, 0).update(file_path="model_1.safetensors"),
        Damaged,
        "for two items or ranks",
    ),
    "item without files": (
        lambda said: said["metadata"].update(other=said["metadata"]["model"] | {"rank_to_layout_info": {}}),
        Damaged,
        "no file of 'other'",
    ),
    "path is no list": (
        lambda said: said["metadata"]["model"]["nested_path_to_metadata"].update({"{": []}),
        Damaged,
        r"metadata\.pkl",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_is_not_true_is_refused_by_name(lie: str, tmp_path: Path) -> None:
    said = two_ranks(tmp_path)
    change, error, words = LIES[lie]
    change(said)
    item_folders.tell(tmp_path / "step", said)
    refused(tmp_path / "step", words, error)  # type: ignore[arg-type]


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ckpttool-ran",)


@pytest.mark.parametrize("where", ["root", "inside"])
def test_metadata_that_would_run_code_is_refused_and_not_run(where: str, tmp_path: Path) -> None:
    said = two_ranks(tmp_path)
    torch.save({"lr": 1}, tmp_path / "step" / "scheduler_0.pt")
    item_folders.tell(tmp_path / "step", _Bomb() if where == "root" else said | {"more": _Bomb()})
    refused(tmp_path / "step", r"metadata\.pkl: names (posix|nt|os)\.system")
    assert not Path("/tmp/ckpttool-ran").exists()


def test_another_s_metadata_beside_files_of_ranks_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "metadata.pkl").write_bytes(pickle.dumps({"mine": 1}))
    for rank in range(2):
        torch.save({"w": WHOLE}, tmp_path / "step" / f"rank_{rank}.pt")
    assert torch.equal(joined(tmp_path / "step")["w"], WHOLE)


def test_a_rank_s_file_that_is_missing_is_named(tmp_path: Path, cli: Cli) -> None:
    two_ranks(tmp_path)
    (tmp_path / "step" / "model_1.safetensors").unlink()
    assert "model_1.safetensors" in cli("inspect", tmp_path / "step").out
    ran = cli("merge", tmp_path / "step", tmp_path / "out.pt")
    assert_says(ran, 3, "the file of rank 1 of 2 is missing", "model_1.safetensors")


def test_the_file_of_another_world_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    items = {"model": {"w": Placed(WHOLE, (2,), [shard(0)])}}
    item_folders.write(folder, items, 2, as_safetensors=False)
    torch.save({"w": WHOLE[:1].clone()}, folder / "model_3.pt")
    refused(folder, r"model_3\.pt: is of rank 3, and metadata\.pkl beside it of 2 ranks")


def test_the_file_of_another_shape_is_named(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    save_file({"w": WHOLE[:1].clone()}, tmp_path / "step" / "model_1.safetensors")
    refused(tmp_path / "step", r"model_1\.safetensors.*'model\.w' has shape \[1, 5\]")


def test_a_tensor_that_a_rank_lacks_is_named(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    save_file({"x": WHOLE[:1].clone()}, tmp_path / "step" / "model_1.safetensors")
    refused(tmp_path / "step", r"model_1\.safetensors.*'model\.(x|w)'")


def test_without_its_metadata_a_share_is_no_whole(recorded: Path, tmp_path: Path, cli: Cli) -> None:
    folder = shutil.copytree(recorded, tmp_path / "step")
    (folder / "metadata.pkl").unlink()
    assert cli("merge", folder, tmp_path / "out.pt").code == 3


def test_a_save_that_is_still_staged_is_named_as_unfinished(tmp_path: Path, cli: Cli) -> None:
    for is_told in (True, False):
        folder = tmp_path / "runs" / "tmp_step-5"
        folder.parent.mkdir(exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        items = {"model": {"w": Placed(WHOLE, (2,), [shard(0)])}}
        item_folders.write(folder, items, 2, as_safetensors=False)
        if not is_told:
            (folder / "metadata.pkl").unlink()
        refused(folder, "stages step-5: the save did not finish", Unreadable)
