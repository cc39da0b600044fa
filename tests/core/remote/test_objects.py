"""Remote objects: what is fetched of them ahead, formats of several files, and what `scan` reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.remote.ahead import Ahead, Line
from ckpttool.deltas.header import ENTRY
from ckpttool.errors import Damaged, Unreadable
from ckpttool.scanning.scan import scan
from tests.support.crafting import dict_of, torch_zip
from tests.support.hub_server import Hub
from tests.support.other_files import FLOAT, ROWS, as_onnx_folder, in_several_files, onnx_file, tensor
from tests.support.range_server import RangeServer
from tests.support.scan_corpus import MKDIR

# ---- What is fetched of a remote object before it is asked for, in whatever order it is then read -----


PIECE, PIECES = 64 << 10, 6


def expected(asked: Counter[int]) -> Ahead:
    """Return an object of six pieces that are all expected; requests are counted by piece."""

    def fetch(begin: int, end: int) -> bytes:
        asked[begin // PIECE] += 1
        return bytes(end - begin)

    one, line, whole = Ahead(fetch), Line(), (0, PIECES * PIECE)
    one.expect([whole], [whole], PIECE, 0, line)
    line.add(one, *whole)
    return one


def read(one: Ahead, *pieces: int) -> None:
    for piece in pieces:
        one.fill(piece * PIECE, memoryview(bytearray(PIECE)))


def test_what_was_read_is_not_fetched_again_with_a_piece_that_had_to_make_room() -> None:
    asked: Counter[int] = Counter()
    one = expected(asked)
    read(one, 0, 1, 2)
    one.put_off(one._pieces[3 * PIECE])  # as too much is held while many objects are read
    read(one, 4, 5, 3)
    assert asked == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1}
    assert not one._pieces, "and nothing is held that nobody will take"


def test_the_rest_of_a_piece_that_had_to_make_room_is_all_that_is_waited_for() -> None:
    asked: Counter[int] = Counter()
    one = expected(asked)
    read(one, 0)
    one.fill(PIECE, memoryview(bytearray(PIECE - 8)))
    one.put_off(one._pieces[PIECE])
    one.fill(2 * PIECE - 8, memoryview(bytearray(8)))
    assert PIECE not in one._pieces, "or it would be held, and take room, until the end"
    read(one, 2, 3, 4, 5)
    assert asked[1] == 2
    assert not one._pieces


def test_pieces_read_out_of_order_are_fetched_once() -> None:
    asked: Counter[int] = Counter()
    one = expected(asked)
    read(one, 5, 3, 0, 1, 4, 2)
    assert asked == dict.fromkeys(range(PIECES), 1)
    assert not one._pieces


def test_what_is_read_a_second_time_is_fetched_ahead_again() -> None:
    asked: Counter[int] = Counter()
    one = expected(asked)
    read(one, *range(PIECES))
    read(one, 0)
    assert len(one._pieces) == PIECES - 1
    read(one, *range(1, PIECES))
    assert asked == dict.fromkeys(range(PIECES), 2)
    assert not one._pieces


# ---- Formats whose files name others of their folder, at a URL: GGUF in several files, ONNX with values


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


NAMES = (
    *("x\ud800.safetensors", "..%2Fx.safetensors", "a/..%2f..%2Fx.safetensors", "../x.safetensors", "a//x"),
    *("/x", "x?a=/..", "x#y", "a\\..\\x", "x\0", "%2e%2e/x", ".", ""),
)


@pytest.fixture(params=["http", "hf", "s3", "here"])
def put_in(
    request: pytest.FixtureRequest, server: RangeServer, tmp_path: Path, hub_server: Hub, s3: Any
) -> Callable[[str, bytes], str]:
    """Return a function that puts a file where a name leads to, and returns that."""

    def put(name: str, data: bytes) -> str:
        (tmp_path / "there" / name).write_bytes(data)
        if request.param == "hf":
            hub_server.create("o/named").commit({name: data})
        if request.param == "s3":
            s3.create_bucket(Bucket="named")
            s3.put_object(Bucket="named", Key=name, Body=data)
        folders = {"http": server.url, "hf": "hf://o/named", "s3": "s3://named", "here": tmp_path / "there"}
        return f"{folders[request.param]}/{name}"

    return put


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_an_index_leads_nowhere_else(name: str, put_in: Callable[[str, bytes], str]) -> None:
    path = put_in("model.safetensors.index.json", json.dumps({"weight_map": {"w": name}}).encode())
    with pytest.raises(
        (Damaged, Unreadable), match=r"outside its folder|half of a character|can't be opened"
    ):
        ckpttool.open(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_base_of_a_delta_lies_beside_it(
    name: str, tmp_path: Path, put_in: Callable[[str, bytes], str]
) -> None:
    for number in (1, 2):
        save_file({"w": torch.full((9,), float(number))}, tmp_path / f"{number}.safetensors")
    ckpttool.delta(tmp_path / "1.safetensors", tmp_path / "2.safetensors", tmp_path / "d.safetensors")
    raw = (tmp_path / "d.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    said = json.loads(header["__metadata__"][ENTRY])
    said["base"]["name"] = name
    header["__metadata__"][ENTRY] = json.dumps(said)
    path = put_in(
        "d.safetensors", len(text := json.dumps(header).encode()).to_bytes(8, "little") + text + raw[begin:]
    )
    with pytest.raises((Damaged, Unreadable), match=r"no name of a file beside|half of|does not lie beside"):
        ckpttool.open(path)


@pytest.mark.parametrize("url", ["hf://o/r/x\udcff.pt", "s3://b/x\udcff.pt", "http://127.0.0.1:1/x\ud800"])
def test_half_a_character_is_refused(url: str, s3: object, hub_server: Hub) -> None:
    with pytest.raises(Unreadable, match="half of a character"):
        ckpttool.open(url)


# ---- `scan` of what is behind URLs: the same verdicts, and few bytes ----------------------------------


def test_a_file_behind_a_url_is_judged_by_few_of_its_bytes(server: RangeServer, tmp_path: Path) -> None:
    there = tmp_path / "there"
    torch.save({f"w{number}": torch.randn(1 << 20) for number in range(4)}, there / "fine.pt")
    torch_zip(there / "bad.pt", dict_of({"w": MKDIR}))
    ((fine,), (bad,)) = (scan(f"{server.url}/{name}") for name in ("fine.pt", "bad.pt"))
    assert (fine.verdict, bad.verdict, bad.names) == ("safe", "dangerous", ("os.mkdir",))


def test_what_is_not_there_is_unreadable(server: RangeServer) -> None:
    (found,) = scan(f"{server.url}/missing.pt")
    assert found.verdict == "unreadable" and server.url in found.path
