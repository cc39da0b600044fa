"""What opening says of a path: one of several files, a folder in which checkpoints lie, a URL."""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

import ckpttool
from ckpttool.core.checkpoint.checkpoint import Ranks
from ckpttool.core.formats.shards import piece_of
from ckpttool.errors import SeveralCheckpoints, Unreadable, Unsupported
from ckpttool.ranks import frameworks
from tests.support.comparing import opened, refused
from tests.support.crafting import list_of, torch_zip
from tests.support.running import Cli, assert_says

# ---- What opening says of a path: one of several files, another format, a URL; and what it does not disturb


# A file that is one of several of one model is named as such, with the rest and the way to the whole.

WEIGHTS = {"a.weight": torch.ones(3, 2)}


def put(folder: Path, *names: str) -> list[Path]:
    """Write a small file under each name, which may have folders."""
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        (save_file if path.suffix == ".safetensors" else torch.save)(WEIGHTS, path)  # type: ignore[operator]
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
def test_a_piece_is_named_with_the_rest(names: list[str], said: str, tmp_path: Path, cli: Cli) -> None:
    first, *others = put(tmp_path / "m", *names)
    ran = cli("convert", first, tmp_path / "out.pt")
    assert_says(ran, 0, "warning: ", said)
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
    named = ", ".join(map(str, shards[1:5]))
    assert warning.filename == __file__
    assert str(warning.message) == (
        f"{shards[0]} is shard 1 of 6; the others ({named} and 1 more) are not read. "
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
def test_a_whole_is_no_piece(name: str, tmp_path: Path, cli: Cli) -> None:
    (path,) = put(tmp_path, name)
    assert piece_of(str(path)) is None
    ran = cli("convert", path, tmp_path / "out.pt", "--json")
    assert ran.code == 0 and "piece" not in ran.json


def test_the_command_for_the_whole_depends_on_what_is_there(tmp_path: Path) -> None:
    first, second, _ = put(tmp_path / "m", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)))
    ways = [piece_of(str(first)).way]
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    ways += [piece_of(str(first)).way]
    assert ways == [f"ckpttool merge {tmp_path}/m{end} OUT" for end in ("/model-*-of-00003.safetensors", "")]
    second.unlink()
    piece = piece_of(str(first))
    assert piece is not None and piece.missing == 1 and "1 of them" in piece.way


def test_names_without_a_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(here, "mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt")
    monkeypatch.chdir("mp_rank_00")
    piece = piece_of("model_optim_rng.pt")
    assert piece is not None and piece.others == ("../mp_rank_01/model_optim_rng.pt",)
    assert piece_of("-") is None
    assert piece_of(str(here)) is None


# Other formats and URLs are named as what they are, with the way on.

TENSORS = save({"a": torch.ones(2)})


def zipped(*names: str) -> bytes:
    with zipfile.ZipFile(raw := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return raw.getvalue()


def tarred() -> bytes:
    with tarfile.open(fileobj=(raw := io.BytesIO()), mode="w") as archive:
        member = tarfile.TarInfo("model.safetensors")
        member.size = len(TENSORS)
        archive.addfile(member, io.BytesIO(TENSORS))
    return raw.getvalue()


FILES = {
    "model.h5": (b"\x89HDF\r\n\x1a\n" + bytes(99), "is an HDF5 file", "h5py"),
    "model.pt.xz": (lzma.compress(b"a" * 99), "is compressed with xz", "unxz"),
    "model.pt.bz2": (bz2.compress(b"a" * 99), "is compressed with bzip2", "bunzip2"),
    "model.pt.zst": (b"\x28\xb5\x2f\xfd" + bytes(99), "is compressed with zstd", "unzstd"),
    "flax.msgpack": (b"\x82\xa3abc\x81", "is a Flax msgpack file", "from_flax=True"),
    "flax": (b"\x81\xa6params\x81", "is a Flax msgpack file", "from_flax=True"),
    "m.tflite": (b"\x1c\0\0\0TFL3" + bytes(99), "is a TensorFlow Lite model", "the checkpoint that it was"),
    "m.pte": (b"\x1c\0\0\0ET12" + bytes(99), "is an ExecuTorch program", "the checkpoint that it was"),
    "m.params": (b"\x12\x01" + bytes(99), "is an MXNet file", "mxnet.nd.load"),
    "saved_model.pb": (b"\x08\x01\x12\x05" + bytes(99), "is a TensorFlow SavedModel", "load_checkpoint"),
    "frozen.pb": (b"\x0a\x05" + bytes(99), "is a TensorFlow graph", "the checkpoint that it was"),
    "checkpoint": (b'model_checkpoint_path: "m"\n', "which TensorFlow checkpoint", "load_checkpoint"),
    "m.ckpt-7.index": (bytes(99), "is a TensorFlow checkpoint", "load_checkpoint"),
    "m.data-00000-of-00001": (bytes(99), "is a TensorFlow checkpoint", "load_checkpoint"),
    "m.mlmodel": (b"\x08\x08\x12\x09\x0a\x05" + bytes(99), "is a Core ML model", "the checkpoint that it"),
    "m.pdparams": (pickle.dumps({"w": [1]}, 2), "is a PaddlePaddle file", "paddle.load"),
    "m.pkl": (
        b"\x80\x04\x95\xff\x8c\x1asklearn.linear_model._base\x94",
        "is a pickle of scikit-learn",
        "arrays",
    ),
    "m.joblib": (zlib.compress(b"a" * 99), "is compressed with zlib", "where you trust it"),
    "a.zip": (zipped("m.safetensors"), "holds checkpoints: m.safetensors", "unzip"),
    "b.zip": (zipped("m/n.pt", "m/o.ckpt"), "holds checkpoints: m/n.pt, m/o.ckpt", "unzip"),
    "k.keras": (zipped("model.weights.h5", "config.json"), "is a Keras model", "Keras"),
    "t.tar": (tarred(), "holds checkpoints: model.safetensors", "tar -xf"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_format_that_is_not_read_is_named_with_the_way_on(name: str, cli: Cli, tmp_path: Path) -> None:
    raw, said, hint = FILES[name]
    (tmp_path / name).write_bytes(raw)
    for command, *output in (["inspect"], ["convert", tmp_path / "out.pt"]):
        ran = cli(command, tmp_path / name, *output)
        assert_says(ran, 3, said)
        assert hint in ran.err.splitlines()[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("saved_model.pb", "TensorFlow SavedModel"),
        ("manifest.ocdbt", "Orbax"),
        ("Manifest.json", "Core ML package"),
    ],
)
def test_a_folder_of_another_tool_is_named_with_the_way_on(
    name: str, said: str, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / name).write_bytes(b"x")
    assert_says(cli("inspect", tmp_path / "m"), 3, said, "which is not read here")


def test_a_url_of_another_kind_is_named_as_such(cli: Cli, tmp_path: Path) -> None:
    url, out = "ftp://host/a.pt", tmp_path / "o.pt"
    for arguments in (["inspect", url], ["convert", url, out], ["merge", url, out]):
        ran = cli(*arguments)
        assert_says(ran, 3, f"error: {url}: is a URL of a kind that is not read here\n")
        assert "https, hf, s3, gs and az are read" in ran.err


OUTPUTS = {
    "y.gguf": "can't write GGUF",
    "y.onnx": "can't write ONNX",
    "y.NPZ": "can't write NumPy archives",
    "https://b/x/": "is a URL of a kind that is not written here",
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_that_is_not_written_is_named(output: str, cli: Cli, here: Path) -> None:
    torch.save(WEIGHTS, "in.pt")
    ran = cli("convert", "in.pt", output)
    assert (ran.code, OUTPUTS[output] in ran.err) == (2, True)
    assert len(ran.err.splitlines()) == 2
    assert [path.name for path in here.iterdir()] == ["in.pt"]


@pytest.mark.usefixtures("here")
def test_a_folder_of_such_a_name_and_a_given_format_are_no_mistake(cli: Cli) -> None:
    put(Path(), "in.pt", "http:/x/in.pt")
    assert cli("convert", "in.pt", "y.gguf", "--to", "safetensors").code == 0
    assert cli("inspect", "http://x/in.pt").code == 0


# What opening leaves as it was, and adds up.


@pytest.mark.parametrize("running", [True, False])
def test_the_garbage_collector_is_left_as_it_was_and_need_not_search(running: bool, tmp_path: Path) -> None:
    torch_zip(tmp_path / "many.pt", list_of(*[b"]"] * 50_000), {})
    gc.unfreeze()  # conftest.py has frozen what was collected
    try:
        if not running:
            gc.disable()
        kept = ckpttool.open(tmp_path / "many.pt")
        assert gc.isenabled() is running
        assert gc.get_freeze_count() == 0
        assert not running or len(gc.get_objects(generation=0)) < 1000
        gc.freeze()
        ckpttool.open(tmp_path / "many.pt").close()
        assert gc.get_freeze_count(), "what a caller has frozen stays so"
    finally:
        gc.freeze()
        gc.enable()
    kept.close()


def test_what_ranks_hold_in_several_folders_is_added_up(tmp_path: Path) -> None:
    """accelerate saves the model and each optimizer as a DCP folder of its own."""
    checkpoint = ckpttool.open(torch_zip(tmp_path / "in.pt", b"}", {}))
    ranks = Ranks("DCP", held={0: 4, 1: 8}, missing=(2,), lacking=("__2_0.distcp",))
    parts = [replace(checkpoint, ranks=ranks)] * 2
    assert frameworks._of_one_run("m", parts) == replace(ranks, held={0: 8, 1: 16})


# ---- Folders in which checkpoints lie: each layout that trainers leave, and what commands say of it ---


STATE = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.zeros(2)}


def model(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(STATE, folder / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")


def in_one_file(folder: Path, tree: Any) -> ckpttool.Checkpoint:
    """Return a checkpoint whose file is gone before others look at the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = opened(tree, folder.parent)
    (folder.parent / "in.pt").unlink()
    return checkpoint


def dcp(folder: Path) -> None:
    ckpttool.save(in_one_file(folder, {"model": STATE}), folder, to="dcp")


def ranks(folder: Path) -> None:
    ckpttool.split(in_one_file(folder, STATE), folder, 2, device="cpu")


def file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": STATE}, path)


Make = Callable[[Path], None]

# Of each trainer: what it leaves, the newest last.
LAYOUTS: dict[str, tuple[list[str], Make]] = {
    "verl": (["global_step_90/actor", "global_step_100/actor"], ranks),
    "torchtitan": (["checkpoint/step-90", "checkpoint/step-1000"], dcp),
    "transformers": (["checkpoint-500", "checkpoint-1000"], model),
    "megatron": (["iter_0000090", "iter_0000100"], dcp),
    "megatron, legacy": (["iter_0000100/mp_rank_00/model_optim_rng.pt"], file),
    "nemo": (["m--step=99-last/weights", "m--step=100/weights"], dcp),
    "olmo": (["step90/model_and_optim", "step1000/model_and_optim"], dcp),
    "olmo, unsharded": (["step90-unsharded/model.pt"], file),
    "composer": (["ep1-ba100-rank0.pt", "ep2-ba200-rank0.pt"], file),
    "composer, sharded": (["ep1/ba100", "ep2/ba200"], dcp),
    "torchtune": (["epoch_0", "epoch_1"], model),
}


def made(folder: Path, name: str) -> str:
    """Leave what a trainer does; return the path of the newest."""
    checkpoints, make = LAYOUTS[name]
    for path in checkpoints:
        make(folder / path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    torch.save({"state": {}, "param_groups": []}, folder / "optim.pt")
    return str(folder / checkpoints[-1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_newest_checkpoint_is_named_and_all_are_listed(name: str, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    newest = made(run, name)
    for command, *output in (["verify"], ["convert", tmp_path / "out.pt"], ["merge", tmp_path / "out.pt"]):
        assert_says(cli(command, run, *output), 3, f": ckpttool inspect {newest}\n")
    assert cli("inspect", newest).code == 0
    ran = cli("inspect", run, "--json")
    listed = ran.json["checkpoints"]
    assert (ran.code, listed[0]["path"], len(listed)) == (0, newest, len(LAYOUTS[name][0]))
    assert all(entry["whole"] and entry["step"] is not None and entry["bytes"] > 0 for entry in listed)
    text = cli("inspect", run).out
    assert text.endswith(f"ckpttool inspect {newest}\n")
    assert os.path.relpath(newest, run) in text


def test_the_newest_whole_one_comes_before_one_that_is_not(tmp_path: Path, cli: Cli) -> None:
    newest = Path(made(tmp_path / "run", "torchtitan"))
    (newest / ".metadata").unlink()
    ran = cli("verify", tmp_path / "run")
    assert f": ckpttool inspect {newest.with_name('step-90')}\n" in ran.err
    assert f"others: {newest}" in ran.err
    first, second = cli("inspect", tmp_path / "run", "--json").json["checkpoints"]
    assert (first["whole"], second["whole"], first["format"]) == (False, True, None)
    assert "without their .metadata" in first["problem"]
    assert cli("inspect", tmp_path / "run").out.endswith(f"inspect {newest.with_name('step-90')}\n")


def test_the_checkpoints_of_each_run_stand_together_the_newest_run_first(tmp_path: Path, cli: Cli) -> None:
    names = ["b/last.pt", "b/best.pt", "a/step-30.pt", "a/step-9.pt", "c/ckpt/step-20/w.pt", "own.pt"]
    for age, name in enumerate(names):
        file(tmp_path / name)
        os.utime(tmp_path / name, (0, 9 * (name == "own.pt") - age))
    listed = cli("inspect", tmp_path, "--json").json["checkpoints"]
    assert [os.path.relpath(entry["path"], tmp_path) for entry in listed] == names


def test_a_rank_that_is_missing_is_told_in_the_list(tmp_path: Path, cli: Cli) -> None:
    newest = made(tmp_path / "run", "verl")
    Path(newest, "model_world_size_2_rank_1.pt").unlink()
    listed = cli("inspect", tmp_path / "run", "--json").json["checkpoints"]
    assert [entry["whole"] for entry in listed] == [False, True]
    assert "ranks 1 are missing" in listed[0]["problem"]


def test_a_link_to_a_checkpoint_is_no_other_one(tmp_path: Path, cli: Cli) -> None:
    made(tmp_path / "run", "transformers")
    (tmp_path / "run" / "latest").symlink_to("checkpoint-1000")
    (tmp_path / "run" / "loop").symlink_to(".")
    assert len(cli("inspect", tmp_path / "run", "--json").json["checkpoints"]) == 2


def test_an_empty_folder_holds_none(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "run" / "deep" / "deeper").mkdir(parents=True)
    assert not isinstance(refused(tmp_path / "run", "without the index", Unreadable), SeveralCheckpoints)
    assert cli("inspect", tmp_path / "run").code == 3


# Folders of one checkpoint that lack something, and files that are nobody's.


def test_dcp_without_its_metadata_is_told(tmp_path: Path, cli: Cli) -> None:
    dcp(tmp_path / "d")
    (tmp_path / "d" / ".metadata").rename(tmp_path / "d" / ".metadata.tmp")
    ran = cli("inspect", tmp_path / "d")
    assert (ran.code, "without their .metadata, which torch writes last" in ran.err) == (3, True), ran.err
    assert f"mv {tmp_path}/d/.metadata.tmp {tmp_path}/d/.metadata" in ran.err
    (tmp_path / "d" / ".metadata.tmp").unlink()
    assert "mv " not in cli("inspect", tmp_path / "d").err
    refused(tmp_path / "d", r"without their \.metadata", Unreadable)


def test_metadata_of_each_rank_is_told(tmp_path: Path) -> None:
    dcp(tmp_path / "d")
    (tmp_path / "d" / ".metadata").rename(tmp_path / "d" / "__0.metadata")
    refusal = refused(tmp_path / "d", "each rank saved for itself", Unsupported)
    assert "use_collectives=True" in str(refusal.hint)


@pytest.mark.parametrize("raw", [b"", b"junk", b"version https://git-lfs.github.com/\n", b"\x80\x04]."])
def test_hostile_metadata_is_named_and_not_its_folder(raw: bytes, tmp_path: Path) -> None:
    dcp(tmp_path / "d")
    (tmp_path / "d" / ".metadata").write_bytes(raw)
    refused(tmp_path / "d", r"d/\.metadata: ", ckpttool.CkptToolError)


@pytest.mark.parametrize("make", [model, dcp, ranks])
def test_lfs_pointers_in_a_folder_are_named(make: Make, tmp_path: Path, cli: Cli) -> None:
    make(tmp_path / "d")
    (path,) = [path for path in (tmp_path / "d").iterdir() if path.name in POINTED]
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    ran = cli("merge", tmp_path / "d", tmp_path / "out.pt")
    assert_says(ran, 3, f"{path}: is a Git LFS pointer", "git lfs pull")


POINTED = ("model.safetensors", "__0_0.distcp", "model_world_size_2_rank_1.pt")


@pytest.mark.parametrize("make", [model, dcp, ranks])
def test_files_of_macos_are_nobody_s(make: Make, tmp_path: Path, cli: Cli) -> None:
    make(tmp_path / "d")
    for path in list((tmp_path / "d").iterdir()):
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X")
    assert cli("inspect", tmp_path / "d").code == 0
    assert cli("merge", tmp_path / "d", tmp_path / "out.pt").code == 0


def test_a_second_download_is_told(tmp_path: Path, cli: Cli) -> None:
    ranks(tmp_path / "d")
    second = tmp_path / "d" / "model_world_size_2_rank_0 (1).pt"
    shutil.copy(tmp_path / "d" / "model_world_size_2_rank_0.pt", second)
    assert_says(cli("merge", tmp_path / "d", tmp_path / "out.pt"), 3, f"rm '{second}'")


def test_pieces_under_other_names_get_the_command_that_works(tmp_path: Path, cli: Cli) -> None:
    ranks(tmp_path / "d")
    for rank, path in enumerate(sorted((tmp_path / "d").iterdir())):
        path.rename(path.with_name(f"part{rank}.pth"))
    ran = cli("merge", tmp_path / "d", tmp_path / "out.pt")
    assert (ran.code, f"ckpttool merge {tmp_path}/d/*.pth OUTPUT" in ran.err) == (3, True), ran.err
    assert cli("merge", *(tmp_path / "d").glob("*.pth"), tmp_path / "out.pt").code == 0


def test_no_hint_has_an_ellipsis_in_a_command(tmp_path: Path, cli: Cli) -> None:
    for step in range(9):
        model(tmp_path / "run" / f"checkpoint-{step}")
    ran = cli("verify", tmp_path / "run")
    assert "…" not in ran.err
    assert "and 5 more" in ran.err


def test_a_file_that_a_training_cannot_go_on_from_is_told_from_one_that_it_can(
    tmp_path: Path, cli: Cli
) -> None:
    for name, state in {
        "step-1.pt": {"model": {"w": torch.ones(2)}},
        "step-2.pt": {"model": {"w": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": []}},
    }.items():
        torch.save(state, tmp_path / name)
    newest, older = cli("inspect", tmp_path, "--json").json["checkpoints"]
    assert (newest["optimizer"], older["optimizer"], older["whole"]) == (True, False, True)
    lines = cli("inspect", tmp_path).out.splitlines()
    assert lines[2].endswith("  whole") and lines[3].endswith("  whole, without an optimizer")


def test_a_file_whose_parts_lie_beside_it_is_whole_only_with_all_of_them(tmp_path: Path, cli: Cli) -> None:
    parts = {"folder": "step-2.dcp", "files": {".metadata": "00", "__0_0.distcp": "00", "__1_0.distcp": "00"}}
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "best.pt")
    torch.save({"model": {}, "parts": parts}, tmp_path / "last.pt")
    newest, older = cli("inspect", tmp_path, "--json").json["checkpoints"]
    assert newest["problem"] == "step-2.dcp, which holds its tensors, is not beside it" and older["whole"]
    assert cli("inspect", tmp_path).out.endswith("best.pt\n")
    assert_says(cli("verify", tmp_path), 3, f"): ckpttool inspect {tmp_path / 'best.pt'}\n")
    (tmp_path / "step-2.dcp").mkdir()
    (tmp_path / "step-2.dcp" / "__0_0.distcp").touch()
    newest, *_ = cli("inspect", tmp_path, "--json").json["checkpoints"]
    assert newest["problem"] == "step-2.dcp, which holds its tensors, lacks .metadata, __1_0.distcp"


@pytest.mark.parametrize("count", [1, 2])
def test_the_predictions_of_an_evaluation_are_no_checkpoint(count: int, tmp_path: Path, cli: Cli) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "last.pt")
    folder = tmp_path / "eval"
    folder.mkdir()
    (folder / "eval.json").write_text("{}", encoding="utf-8")
    for rank in range(count):
        save_file({"index": torch.arange(3)}, folder / f"rank{rank}.safetensors")
    assert [Path(row["path"]).name for row in cli("inspect", tmp_path, "--json").json["checkpoints"]] == [
        "last.pt"
    ]
    what = "is the folder of an evaluation, whose files are predictions"
    assert_says(cli("inspect", folder), 3, what, f"ckpttool gather-metrics {folder}/rank*.safetensors")


@pytest.mark.parametrize("of_run", [False, True])
def test_the_folder_of_an_adapter_is_its_adapter(of_run: bool, tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "run" / "checkpoint-5"
    folder.mkdir(parents=True)
    save_file({"base_model.model.w.lora_A.weight": torch.ones(1, 2)}, folder / "adapter_model.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    if of_run:
        assert f"ckpttool inspect {folder}\n" in cli("inspect", tmp_path / "run").out
        return
    assert cli("convert", folder, tmp_path / "adapter.pt").code == 0
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    assert "model.safetensors: " in cli("inspect", folder).out


def test_a_run_that_states_no_step_has_no_column_of_steps(tmp_path: Path, cli: Cli) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    assert cli("inspect", tmp_path).out.splitlines()[1].split() == ["checkpoint", "format", "bytes"]
    torch.save({"w": torch.ones(2)}, tmp_path / "step-3.pt")
    assert cli("inspect", tmp_path).out.splitlines()[1].split() == ["checkpoint", "step", "format", "bytes"]


PACKED = {
    "model.nemo": ("w:gz", None),
    "model.tar.gz": ("w:gz", None),
    "no name of an archive": ("w:gz", None),
    "x.tar.xz": ("w:xz", None),
    "model.pt.gz": (None, gzip.compress),
    "model.safetensors": (None, gzip.compress),
    "a b.xz": (None, lzma.compress),
    "MODEL.BZ2": (None, bz2.compress),
}


@pytest.mark.parametrize("name", PACKED)
def test_the_command_that_unpacks_a_file_unpacks_it(name: str, cli: Cli, here: Path) -> None:
    """gunzip and the like refuse names that end otherwise than they name files themselves."""
    mode, pack = PACKED[name]
    torch.save({"a": torch.ones(3)}, "inside.pt")
    raw = Path("inside.pt").read_bytes()
    if pack is not None:
        Path(name).write_bytes(pack(raw))
        Path("inside.pt").unlink()
    else:
        with tarfile.open(name, mode) as archive:  # type: ignore[call-overload]
            archive.add("inside.pt")
        Path("inside.pt").unlink()
    command = cli("inspect", name).err.partition("unpack it first: ")[2].strip()
    subprocess.run(command, shell=True, check=True, capture_output=True)
    made = next(path for path in Path().iterdir() if path.name != name)
    assert made.read_bytes() == raw
    assert cli("inspect", made).code == 0


def test_a_folder_that_leads_into_itself_ends(cli: Cli, here: Path) -> None:
    for name in ("adapter_model.safetensors", "model.safetensors"):
        folder = Path(name).with_suffix(".d")
        folder.mkdir()
        (folder / name).symlink_to(".")
        ran = cli("inspect", folder)
        assert_says(ran, 3, f"{folder}: is a folder without the index of a checkpoint")
