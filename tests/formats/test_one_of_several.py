"""A file that is one of several of one model is named as such, with the rest and the way to the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.formats.one_of_several import piece_of

WEIGHTS = {"a.weight": torch.ones(3, 2)}


def put(folder: Path, *names: str) -> list[Path]:
    """Write a small file under each name, which may have folders."""
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            save_file(WEIGHTS, path)
        else:
            torch.save(WEIGHTS, path)
    return paths


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)], "shard 1 of 3"),
        ([f"pytorch_model-0000{i}-of-00002.bin" for i in (2, 1)], "shard 2 of 2"),
        (["consolidated.00.pth", "consolidated.01.pth"], "slices"),
        (["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"], "Megatron"),
        (["mp_rank_00_000/model_optim_rng.pt", "mp_rank_00_001/model_optim_rng.pt"], "Megatron"),
        (["checkpoint_last-shard0.pt", "checkpoint_last-shard1.pt"], "slices"),
        (["model_shard0", "model_shard1"], "slices"),
        (["consolidated.03.pth"], "slices"),
    ],
)
def test_a_piece_is_named_with_the_rest(names: list[str], said: str, tmp_path: Path, cli: Any) -> None:
    first, *others = put(tmp_path / "m", *names)
    ran = cli("convert", first, tmp_path / "out.pt")
    assert ran.code == 0
    assert "warning: " in ran.err and said in ran.err
    assert all(other.name in ran.err for other in others)
    data = cli("convert", first, tmp_path / "again.pt", "--json").json
    assert sorted(data["piece"]["others"]) == sorted(map(str, others))
    for command in ("inspect", "digest", "verify"):
        ran = cli(command, first)
        assert said in ran.err, command


def test_python_warns_of_the_rest_too_where_it_was_called(tmp_path: Path) -> None:
    shards = put(tmp_path / "m", *(f"model-0000{i}-of-00006.safetensors" for i in range(1, 7)))
    with pytest.warns(UserWarning, match="shard 1 of 6") as warned:
        saved = ckpttool.convert(shards[0], tmp_path / "out.pt")
    (warning,) = warned
    assert warning.filename == __file__
    assert str(warning.message) == (
        f"{shards[0]} is shard 1 of 6; the others ({', '.join(map(str, shards[1:5]))}, …) are not read. "
        f"The whole: ckpttool merge {tmp_path}/m/model-*-of-00006.safetensors OUT"
    )
    assert saved.keys == len(WEIGHTS)


def test_python_does_not_warn_of_a_whole(tmp_path: Path) -> None:
    """A warning would be an error here: of a whole file, and of shards opened together."""
    (whole,) = put(tmp_path, "model.safetensors")
    ckpttool.convert(whole, tmp_path / "out.pt")
    shards = put(tmp_path / "m", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)))
    save_file({"b.weight": torch.ones(2)}, shards[1])
    with ckpttool.open_ranks(shards) as checkpoint:
        ckpttool.convert(checkpoint, tmp_path / "merged.pt")


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model-00001-of-00001.safetensors", "consolidated.00.pth", "last_shard0.pt"],
)
def test_a_whole_is_no_piece(name: str, tmp_path: Path, cli: Any) -> None:
    (path,) = put(tmp_path, name)
    assert piece_of(str(path)) is None
    ran = cli("convert", path, tmp_path / "out.pt", "--json")
    assert ran.code == 0 and "piece" not in ran.json


def test_the_command_for_the_whole_depends_on_what_is_there(tmp_path: Path) -> None:
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    first, *_ = put(tmp_path / "m", *names)
    piece = piece_of(str(first))
    assert piece is not None
    assert piece.way == f"ckpttool merge {tmp_path}/m/model-*-of-00003.safetensors OUT"
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    piece = piece_of(str(first))
    assert piece is not None and piece.way == f"ckpttool merge {tmp_path}/m OUT"
    (tmp_path / "m" / names[1]).unlink()
    piece = piece_of(str(first))
    assert piece is not None and piece.missing == 1 and "1 of them" in piece.way


def test_names_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "mp_rank_00", "model_optim_rng.pt")
    put(tmp_path / "mp_rank_01", "model_optim_rng.pt")
    monkeypatch.chdir(tmp_path / "mp_rank_00")
    piece = piece_of("model_optim_rng.pt")
    assert piece is not None and piece.others == ("../mp_rank_01/model_optim_rng.pt",)
    assert piece_of("-") is None
    assert piece_of(str(tmp_path)) is None
