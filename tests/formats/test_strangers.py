"""Other formats and URLs are named as what they are, with the way on."""

from __future__ import annotations

import bz2
import io
import lzma
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

TENSORS = save({"a": torch.ones(2)})


def zipped(**members: bytes) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), data)
    return raw.getvalue()


def array() -> bytes:
    raw = io.BytesIO()
    np.save(raw, np.ones(3))
    return raw.getvalue()


def tarred() -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        member = tarfile.TarInfo("model.safetensors")
        member.size = len(TENSORS)
        archive.addfile(member, io.BytesIO(TENSORS))
    return raw.getvalue()


FILES = {
    "model.gguf": (b"GGUF\x03" + bytes(99), "is a GGUF model", "gguf_file='model.gguf'"),
    "model.onnx": (b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:" + bytes(99), "is an ONNX model", "onnx.load"),
    "model.h5": (b"\x89HDF\r\n\x1a\n" + bytes(99), "is an HDF5 file", "h5py"),
    "array.npy": (array(), "is a NumPy array", "numpy.load"),
    "model.pt.xz": (lzma.compress(b"a" * 99), "is compressed with xz", "unxz"),
    "model.pt.bz2": (bz2.compress(b"a" * 99), "is compressed with bzip2", "bunzip2"),
    "model.pt.zst": (b"\x28\xb5\x2f\xfd" + bytes(99), "is compressed with zstd", "unzstd"),
    "flax.msgpack": (b"\x81\xa6params\x81", "is a Flax msgpack file", "from_flax=True"),
    "a.zip": (zipped(m_safetensors=TENSORS), "holds checkpoints: m.safetensors", "unzip"),
    "b.zip": (zipped(m__n_pt=b"x", m__o_ckpt=b"y"), "holds checkpoints: m/n.pt, m/o.ckpt", "unzip"),
    "k.keras": (zipped(model_weights_h5=b"x", config_json=b"{}"), "is a Keras model", "Keras"),
    "t.tar": (tarred(), "holds checkpoints: model.safetensors", "tar -xf"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_format_that_is_not_read_is_named_with_the_way_on(name: str, cli: Any, tmp_path: Path) -> None:
    raw, said, hint = FILES[name]
    (tmp_path / name).write_bytes(raw)
    for command, *output in (["inspect"], ["convert", tmp_path / "out.pt"]):
        ran = cli(command, tmp_path / name, *output)
        assert ran.code == 3
        assert said in ran.err
        assert hint in ran.err.splitlines()[1]


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("https://a.b/c/model.safetensors?x=1&y=2", "curl -LO 'https://a.b/c/model.safetensors?x=1&y=2'"),
        ("s3://bucket/a.pt", "aws s3 cp s3://bucket/a.pt ."),
        ("gs://bucket/a.pt", "gcloud storage cp gs://bucket/a.pt ."),
        ("hf://org/model", "hf download org/model"),
        ("ftp://host/a.pt", "download it first\n"),
    ],
)
def test_urls_are_named_as_such(url: str, command: str, cli: Any, tmp_path: Path) -> None:
    said = f"error: {url}: is a URL, and URLs are not read yet\nhint: download it first"
    out = tmp_path / "o.pt"
    for arguments in (["inspect", url], ["convert", url, out], ["merge", url, out]):
        ran = cli(*arguments)
        assert ran.code == 3 and ran.err.startswith(said)
        assert command in ran.err


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("y.gguf", "can't write GGUF"),
        ("y.onnx", "can't write ONNX"),
        ("y.NPZ", "can't write NumPy archives"),
        ("s3://b/x.pt", "URLs are not written yet"),
        ("https://b/x/", "URLs are not written yet"),
    ],
)
def test_an_output_that_is_not_written_is_named(
    output: str, said: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2)}, "in.pt")
    ran = cli("convert", "in.pt", output)
    assert (ran.code, said in ran.err) == (2, True)
    assert len(ran.err.splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


def test_a_folder_of_such_a_name_and_a_given_format_are_no_mistake(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2)}, "in.pt")
    assert cli("convert", "in.pt", "y.gguf", "--to", "safetensors").code == 0
    Path("http:/x").mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, "http:/x/in.pt")
    assert cli("inspect", "http://x/in.pt").code == 0
