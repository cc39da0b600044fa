"""Files of ranks whose fields multiply are bounded by their bytes; files that each hold the whole are one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.errors import Unreadable
from ckpttool.files.copying import Output
from ckpttool.formats.pytorch import zip as torch_zip
from ckpttool.inert_pickle.values import Global, Record
from tests.support.comparing import assert_same
from tests.support.running import Cli, assert_says, within
from tests.support.saved import opened, refused

STRIDED = Global("torch.distributed.tensor.placement_types", "_StridedShard")
MANY = 1 << 18


def split(folder: Path, state: dict[str, Any], ranks: int = 2) -> Path:
    """Write a state as the files of ranks; return that of rank 0."""
    ckpttool.split(opened(state, folder), folder / "ranks", ranks, device="cpu")
    return folder / "ranks" / f"model_world_size_{ranks}_rank_0.pt"


def changed(file: Path, change: Callable[[Any], object]) -> Path:
    """Change the contents of a file, without asking whether a command would write them."""
    with ckpttool.open(file) as checkpoint:
        change(checkpoint.tree)
        new = file.with_suffix(".new")
        with new.open("wb") as raw, Output(raw) as out:
            torch_zip.write(checkpoint, out, file.name)
    new.rename(file)
    return file.parent


def spec(value: Any) -> Any:
    return value.args[3][1]["_spec"].state


def enlarged(value: Any, local: tuple[int, ...], stride: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Give a piece and its tensor other shapes, of as many bytes as before."""
    function, kind, args, state = value.args
    old = state[1]["_local_tensor"]
    state[1]["_local_tensor"] = ckpttool.TensorRef(old.storage, old.dtype, local, stride, 0)
    value.args = (function, kind, (*args[:2], whole, *args[3:]), state)


def strided(dim: int, factor: int) -> Record:
    return Record("newobj", STRIDED, (), state={"dim": dim, "split_factor": factor}, has_state=True)


def refuses(folder: Path, words: str) -> None:
    with within(10, time.process_time):
        assert refused(folder, words).path.endswith("rank_0.pt")


def test_many_tensors_in_many_chunks_are_refused(tmp_path: Path) -> None:
    state = {f"w{i}": torch.zeros(2, dtype=torch.int8).float() for i in range(40)}

    def cut(tree: Any) -> None:
        for i, value in enumerate(tree.values()):
            enlarged(value, (MANY - i,), (0,), (2 * MANY - 2 * i,))
            spec(value)["placements"] = (strided(0, MANY),)

    refuses(changed(split(tmp_path, state), cut), "more pieces than its bytes")


def test_a_piece_of_many_boxes_is_refused(tmp_path: Path) -> None:
    side = 1 << 13

    def cut(tree: Any) -> None:
        value = tree["w"]
        enlarged(value, (side, side), (0, 0), (2 * side, 2 * side))
        spec(value)["placements"] = (strided(0, side), strided(1, side))
        mesh = spec(value)["mesh"].state
        (axis,) = mesh["_layout"].state["axes"]
        axis.state.update(shape=(2,), stride=(1,))
        mesh.update(_coordinate_on_dim=(0, 0), _mesh_dim_names=None, _flatten_rank_map=(0, 1, 2, 3))
        second = Record("newobj", axis.callable, (), state={"shape": (2,), "stride": (2,)}, has_state=True)
        mesh["_layout"].state["axes"] = (axis, second)

    refuses(changed(split(tmp_path, {"w": torch.zeros(4, 2)}), cut), "more pieces than its bytes")


@pytest.mark.long
def test_many_large_meshes_are_refused(tmp_path: Path) -> None:
    state = {f"w{i}": torch.zeros(4, 2) + i for i in range(200)}
    ranks = tuple(range(MANY))

    def enlarge(tree: Any) -> None:
        for value in tree.values():
            old = spec(value)["mesh"]
            new = {**old.state, "_flatten_rank_map": ranks}
            spec(value)["mesh"] = Record("newobj", old.callable, (), state=new, has_state=True)

    refuses(changed(split(tmp_path, state), enlarge), "more pieces than its bytes")


def test_a_mesh_of_stride_0_is_refused(tmp_path: Path) -> None:
    def repeat(tree: Any) -> None:
        axis = spec(tree["w"])["mesh"].state["_layout"].state["axes"][0]
        axis.state.update(shape=(MANY,), stride=(0,))

    refuses(changed(split(tmp_path, {"w": torch.zeros(4, 2)}), repeat), f"mesh has {MANY} places for 2 ranks")


def test_places_and_orders_without_end_are_refused(tmp_path: Path) -> None:
    def order(tree: Any) -> None:
        for value in tree.values():
            (entry,) = spec(value)["shard_order"]
            spec(value)["shard_order"] = (entry,) * MANY

    state = {f"w{i}": torch.zeros(4, 2) + i for i in range(4)}
    refuses(changed(split(tmp_path, state), order), "description is malformed")


def test_an_honest_run_of_many_ranks_is_read(tmp_path: Path) -> None:
    file = split(tmp_path, {f"w{i}": torch.zeros(64, 3) + i for i in range(20)}, 64)
    with ckpttool.open(file.parent) as checkpoint:
        assert len(checkpoint.state("").tensors) == 20


# Files of ranks that each hold the whole: DDP programs whose every rank saves.


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"module.w": torch.arange(6.0).reshape(2, 3), "module.mean": torch.full((3,), value)}


def save(folder: Path, name: str, trees: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, tree in enumerate(trees):
        torch.save(tree, folder / name.format(rank))
    return folder


@pytest.mark.parametrize("name", ["model_rank{}.pt", "r{}.pth", "ckpt-rank-{}.bin"])
def test_equal_copies_are_one(name: str, tmp_path: Path, cli: Cli) -> None:
    folder = save(tmp_path / "run", name, [state(), state(), state()])
    for inputs in ([folder], sorted(folder.iterdir(), reverse=True)):
        ran = cli("merge", *inputs, out := tmp_path / "out.pt", "--force")
        assert (ran.code, "merged 3 ranks of whole copies" in ran.out) == (0, True), ran.err
        assert_same(torch.load(out), state())
    assert "whole copies" in cli("inspect", folder).out


def test_copies_that_differ_are_named_and_one_is_taken(tmp_path: Path, cli: Cli) -> None:
    folder = save(tmp_path / "run", "rank{}.pt", [state(), state(2.0)])
    ran = cli("merge", folder, out := tmp_path / "out.pt")
    assert (ran.code, out.exists()) == (1, False)
    assert "module.mean" in ran.err
    assert "--take-rank 0" in ran.err
    assert cli("merge", folder, out, "--take-rank", "1").code == 0
    assert_same(torch.load(out), state(2.0))
    assert cli("merge", folder, out, "--take-rank", "2", "--force").code == 2


def test_numbers_that_differ_are_named(tmp_path: Path, cli: Cli) -> None:
    trees = [{"model": state(), "seed": rank, "step": 3} for rank in range(2)]
    folder = save(tmp_path / "run", "rank{}.pt", trees)
    assert_says(cli("merge", folder, out := tmp_path / "out.pt"), 0, "'seed' of rank 1")
    assert torch.load(out)["seed"] == 0
    trees[1]["step"] = 4
    assert_says(cli("merge", save(folder, "rank{}.pt", trees), out, "--force"), 3, "is of another save")


def test_files_of_two_kinds_become_one_dict(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "model_rank{}.pt", [state(), state()])
    save(folder, "ema_rank{}.pt", [state(5.0), state(5.0)])
    assert {*ckpttool.open(folder).tree} == {"ema", "model"}  # type: ignore[misc]


@pytest.mark.parametrize(
    "trees",
    [
        [state()],
        [state(), {"module.w": torch.zeros(1, 3), "module.mean": torch.zeros(3)}],
        [state(), {**state(), "more": torch.zeros(1)}],
        [state(), None, state()],
    ],
    ids=["one file", "other shapes", "other names", "a copy is missing"],
)
def test_what_is_no_copy_is_left_alone(trees: list[Any], tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "rank{}.pt", trees)
    if None in trees:
        (folder / "rank1.pt").unlink()
    refused(folder, error=Unreadable)


def test_a_model_s_own_number_is_no_rank(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "net_r50_rank{}.pt", [state(), state()])
    assert ckpttool.open(folder).ranks.world_size == 2  # type: ignore[union-attr]
    for number in (18, 50):
        save(tmp_path / "other", f"net-r{number}.pth", [state()])
    refused(tmp_path / "other", "holds checkpoints, and is none itself", Unreadable)
