"""Formats whose files name others of their folder, at a URL: GGUF in several files, ONNX with values."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpttool
from ckpttool.errors import Damaged
from tests.support.gguf_files import in_several_files
from tests.support.onnx_files import FLOAT, onnx_file, tensor
from tests.support.other_files import ROWS, as_onnx_folder
from tests.support.range_server import RangeServer


def test_all_files_of_a_gguf_are_read(server: RangeServer, tmp_path: Path) -> None:
    paths = in_several_files(tmp_path / "there")
    for path in paths:
        assert ckpttool.digest(f"{server.url}/{path.name}") == ckpttool.digest(path)
    paths[1].unlink()
    with pytest.raises(Damaged, match=r"its file 'm-00002-of-00003\.gguf' can't be opened"):
        ckpttool.open(f"{server.url}/{paths[0].name}")


def test_values_beside_an_onnx_model_are_read(server: RangeServer, tmp_path: Path) -> None:
    as_onnx_folder(tmp_path / "there" / "m")
    model = tmp_path / "there" / "m" / "model.onnx"
    with ckpttool.open(f"{server.url}/m/model.onnx") as found:
        assert found.state().tensors["fc.weight"].numpy().tobytes() == ROWS.tobytes()
    assert ckpttool.digest(f"{server.url}/m/model.onnx") == ckpttool.digest(model)


def test_nothing_is_asked_for_outside_the_folder(server: RangeServer, tmp_path: Path) -> None:
    there = tmp_path / "there"
    outside = "../secret", "http://other/x", "/secret", "..", "%2e%2e/secret", "x?at=/secret", "x#y"
    for number, location in enumerate(outside):
        raw = onnx_file([tensor("a", FLOAT, (1,), elsewhere={"location": location})])
        (there / f"{number}.onnx").write_bytes(raw)
        with pytest.raises(Damaged, match="names a file outside its folder"):
            ckpttool.open(f"{server.url}/{number}.onnx")
    asked = {request.path for request in server.requests} - {"/.metadata"}
    assert asked == {f"/{number}.onnx" for number in range(len(outside))}
