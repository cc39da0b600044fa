"""What opening says of a path: one of several files, another format, a URL; and what it does not disturb."""

from __future__ import annotations

import bz2
import gc
import io
import json
import lzma
import pickle
import tarfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

import ckpttool
from ckpttool.checkpoint.ranks import Ranks
from ckpttool.formats import frameworks
from ckpttool.formats.one_of_several import piece_of
from tests.support.crafting import list_of, torch_zip
from tests.support.running import Cli, assert_says

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
