"""What a small file describes costs time in proportion to its bytes: fields that multiply are bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.errors import Damaged
from ckpttool.files.copying import Output
from ckpttool.formats.pytorch import zip as torch_zip
from ckpttool.inert_pickle.values import Global, Record
from ckpttool.tensors.ref import TensorRef
from tests.support.saved import saved

STRIDED = Global("torch.distributed.tensor.placement_types", "_StridedShard")
MANY = 1 << 20


def split(folder: Path, state: dict[str, Any], ranks: int = 2) -> Path:
    """Write a state as the files of ranks; return that of rank 0."""
    with ckpttool.open(saved(state, folder / "whole.pt")) as checkpoint:
        ckpttool.split(checkpoint, folder / "ranks", ranks, device="cpu")
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
    state[1]["_local_tensor"] = TensorRef(old.storage, old.dtype, local, stride, 0)
    value.args = (function, kind, (*args[:2], whole, *args[3:]), state)


def strided(dim: int, factor: int) -> Record:
    return Record("newobj", STRIDED, (), state={"dim": dim, "split_factor": factor}, has_state=True)


def refuses(folder: Path, words: str) -> None:
    began = time.process_time()
    with pytest.raises(Damaged, match=words) as caught:
        ckpttool.open(folder)
    assert time.process_time() - began < 10
    assert caught.value.path.endswith("rank_0.pt")


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


def test_many_large_meshes_are_refused(tmp_path: Path) -> None:
    state = {f"w{i}": torch.zeros(4, 2) + i for i in range(200)}
    ranks = tuple(range(MANY))

    def enlarge(tree: Any) -> None:
        for value in tree.values():
            old = spec(value)["mesh"]
            spec(value)["mesh"] = Record("newobj", old.callable, (), state=dict(old.state), has_state=True)
            spec(value)["mesh"].state["_flatten_rank_map"] = ranks

    refuses(changed(split(tmp_path, state), enlarge), "more pieces than its bytes")


def test_a_mesh_of_stride_0_is_refused(tmp_path: Path) -> None:
    def repeat(tree: Any) -> None:
        axis = spec(tree["w"])["mesh"].state["_layout"].state["axes"][0]
        axis.state.update(shape=(MANY,), stride=(0,))

    refuses(changed(split(tmp_path, {"w": torch.zeros(4, 2)}), repeat), "mesh has 1048576 places for 2 ranks")


def test_places_and_orders_without_end_are_refused(tmp_path: Path) -> None:
    def order(tree: Any) -> None:
        for value in tree.values():
            (entry,) = spec(value)["shard_order"]
            spec(value)["shard_order"] = (entry,) * MANY

    state = {f"w{i}": torch.zeros(4, 2) + i for i in range(4)}
    refuses(changed(split(tmp_path, state), order), "description is malformed")


def test_an_honest_run_of_many_ranks_is_read(tmp_path: Path) -> None:
    file = split(tmp_path, {f"w{i}": torch.zeros(64, 3) + i for i in range(50)}, 64)
    with ckpttool.open(file.parent) as checkpoint:
        assert len(checkpoint.state("").tensors) == 50
