"""ONNX and NumPy's files: every type that torch has; whatever is no tensor is named."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.arrays import reading
from ckpttool.core.formats.pytorch import zip_entries
from ckpttool.core.inert_pickle.plain_objects import NUMBERS
from ckpttool.errors import Damaged, Refused, Unsupported
from ckpttool.onnx import reading as onnx_format
from tests.support.comparing import refused
from tests.support.other_files import (
    BOOL,
    FLOAT,
    HALF,
    INT4,
    INT8,
    INT32,
    INT64,
    STRING,
    UINT8,
    integer,
    message,
    onnx_file,
    tensor,
    varint,
)
from tests.support.running import Cli, assert_says

# ---- ONNX: the initialisers of a model, in its file or beside it; whatever is no tensor is named ------


ROWS = np.arange(6, dtype="<f4").reshape(2, 3)


def put(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def coded(field: int, values: list[int]) -> tuple[int, bytes]:
    return field, b"".join(map(varint, values))


def test_values_are_read_from_every_field_that_holds_some(tmp_path: Path, cli: Cli) -> None:
    half = np.array([1, -2, 0.5], "<f2")
    tensors = [
        tensor("raw", FLOAT, (2, 3), ROWS.tobytes()),
        tensor("float", FLOAT, (2, 3), numbers=(4, ROWS.tobytes())),
        tensor("double", 11, (2,), numbers=(10, struct.pack("<2d", 1, -2))),
        tensor("long", INT64, (3,), numbers=coded(7, [1, -2, 2**62])),
        tensor("int", INT32, (2,), numbers=coded(5, [-1, 70_000])),
        tensor("byte", INT8, (2,), numbers=coded(5, [-128, 127])),
        tensor("half", HALF, (3,), numbers=coded(5, half.view("u2").tolist())),
        tensor("flag", BOOL, (2,), numbers=coded(5, [1, 0])),
        tensor("unsigned", 13, (2,), numbers=coded(11, [2**64 - 1, 0])),
        tensor("scalar", FLOAT, (), ROWS[:1, 1].tobytes()),
        tensor("empty", FLOAT, (0, 3)),
    ]
    path = put(tmp_path / "m.onnx", onnx_file(tensors, texts={"who": "me", "a tie": "raw"}))
    found = ckpttool.open(path)
    mine = {name: each.numpy() for name, each in found.state().tensors.items()}
    expected = {"raw": ROWS, "float": ROWS, "double": [1, -2], "long": [1, -2, 2**62], "int": [-1, 70_000]}
    expected |= {"byte": [-128, 127], "half": half, "flag": [True, False], "unsigned": [2**64 - 1, 0]}
    expected |= {"scalar": np.float32(1), "empty": np.zeros((0, 3))}
    assert [*mine] == [*expected]
    for name, values in expected.items():
        assert np.array_equal(mine[name], values) and mine[name].shape == np.shape(values), name
    assert (found.format, dict(found.metadata)) == ("onnx", {"who": "me"})
    assert found.unread == ("the graph (nodes: 1)", "metadata 'a tie' ('raw')")
    assert cli("convert", path, tmp_path / "out.safetensors", "--verify").code == 0
    assert_says(cli("diff", path, tmp_path / "out.safetensors"), 0, "the graph (nodes: 1)")


def test_what_torch_has_no_type_for_is_named(tmp_path: Path) -> None:
    tensors = [
        tensor("ok", FLOAT, (2, 3), ROWS.tobytes()),
        tensor("words", STRING, (2,), numbers=(6, b"ab")),
        tensor("nibbles", INT4, (2,), b"\x21"),
    ]
    sparse = message(15, message(1, tensor("s", FLOAT, (1,), bytes(4))))
    found = ckpttool.open(put(tmp_path / "m.onnx", onnx_file(tensors, more=sparse)))
    assert [*found.state().tensors] == ["ok"]
    assert {"'words' (text)", "'nibbles' (int4)", "a sparse initialiser"} < {*found.unread}


def test_values_are_the_same_as_in_the_library(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
    from onnx import TensorProto, helper, numpy_helper

    kinds = {number: name for number, name in onnx_format.TYPES.items() if "complex" not in name}
    made = [helper.make_tensor(name, number, [2, 2], [1, 0, 1, 1]) for number, name in kinds.items()]
    made += [
        numpy_helper.from_array(np.arange(24.0).reshape(2, 3, 4).astype(kind), kind) for kind in ("f2", "f8")
    ]
    made.append(helper.make_tensor("complex", TensorProto.COMPLEX64, [2], [1 + 2j, -3]))
    made.append(helper.make_tensor("negative", TensorProto.INT64, [300], [*range(-150, 150)]))
    graph = helper.make_graph([], "g", [], [], initializer=made)
    model = helper.make_model(graph, producer_name="tests")
    paths = [str(tmp_path / name) for name in ("in.onnx", "one.onnx", "many.onnx")]
    onnx.save(model, paths[0])
    onnx.save(
        onnx.load(paths[0]), paths[1], save_as_external_data=True, location="one.data", size_threshold=0
    )
    options = {"all_tensors_to_one_file": False, "size_threshold": 0}
    onnx.save(onnx.load(paths[0]), paths[2], save_as_external_data=True, **options)
    for path in paths:
        mine = ckpttool.open(path).state().tensors
        theirs = {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}
        assert mine.keys() == theirs.keys()
        for name, values in theirs.items():
            assert mine[name].numpy().tobytes() == values.tobytes(), (path, name)


# Values in other files.


def beside(location: str, **more: str) -> bytes:
    place = {"location": location} | more
    return onnx_file([tensor("a", FLOAT, (2, 3), elsewhere=place), tensor("b", UINT8, (1,), b"x")])


@pytest.mark.parametrize("more", [{}, {"offset": "0"}, {"offset": "8", "length": "24", "checksum": "x"}])
def test_values_beside_the_model_are_read(more: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    put(tmp_path / "data" / "m.bin", bytes(int(more.get("offset", "0"))) + ROWS.tobytes() + b"more")
    path = put(tmp_path / "m.onnx", beside("data/m.bin", **more))
    found = ckpttool.open(path)
    assert np.array_equal(found.state().tensors["a"].numpy(), ROWS)
    assert found.nbytes == path.stat().st_size + (tmp_path / "data" / "m.bin").stat().st_size
    found.source.path = "-"
    with pytest.raises(Unsupported, match="whose values are in other files"):
        onnx_format.read(found.source)


OUTSIDE = (
    "../secret",
    "/etc/hostname",
    "a/../../secret",
    "..",
    "",
    ".",
    "a//b",
    "a\\b",
    "x\0",
    "data/..",
    "./../secret",
)


@pytest.mark.parametrize("location", OUTSIDE)
def test_a_file_outside_the_folder_is_never_opened(location: str, tmp_path: Path) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    put(tmp_path / "secret", ROWS.tobytes())
    refused(put(tmp_path / "in" / "m.onnx", beside(location)), "names a file outside its folder")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    put(tmp_path / "secret", ROWS.tobytes())
    (tmp_path / "in" / "m.bin").symlink_to("../secret")
    path = put(tmp_path / "in" / "m.onnx", beside("m.bin"))
    refused(path, "names a file outside its folder: 'm.bin'")
    (tmp_path / "in" / "m.bin").unlink()
    put(tmp_path / "in" / "other", ROWS.tobytes())
    (tmp_path / "in" / "m.bin").symlink_to("other")  # one that stays inside is no danger
    assert np.array_equal(ckpttool.open(path).state().tensors["a"].numpy(), ROWS)


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "0" / "onnx"
    blobs.mkdir()
    folder.mkdir(parents=True)
    put(blobs / "1", beside("m.bin"))
    put(blobs / "2", ROWS.tobytes())
    for name, blob in (("m.onnx", "1"), ("m.bin", "2")):
        (folder / name).symlink_to(f"../../../blobs/{blob}")
    assert np.array_equal(ckpttool.open(folder / "m.onnx").state().tensors["a"].numpy(), ROWS)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"offset": "1"}, "reaches past the end of m.bin"),
        ({"offset": str(2**63)}, "reaches past the end of m.bin"),
        ({"length": "23"}, "should have 24 bytes by its shape, has 23"),
        ({"offset": "-1"}, "a malformed place"),
        ({"offset": "１"}, "a malformed place"),
        ({"length": "9" * 400}, "a malformed place"),
    ],
)
def test_a_place_that_is_not_in_the_file_is_refused(more: dict[str, str], said: str, tmp_path: Path) -> None:
    put(tmp_path / "m.bin", ROWS.tobytes())
    refused(put(tmp_path / "m.onnx", beside("m.bin", **more)), said)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(put(tmp_path / "m.onnx", beside("m.bin")), "its values in 'm.bin' can't be opened: no such file")
    os.mkfifo(tmp_path / "m.bin")
    refused(tmp_path / "m.onnx", "its values in 'm.bin' can't be opened: is not a regular file")


# What breaks a rule.

WHOLE = onnx_file([tensor("a", FLOAT, (2, 3), ROWS.tobytes())])


def one(*given: object, **more: object) -> bytes:
    return onnx_file([tensor(*given, **more)])  # type: ignore[arg-type]


BROKEN = {
    "two of one name": (onnx_file([tensor("a", FLOAT, (1,), bytes(4))] * 2), "'a' is there twice"),
    "no name": (one("", FLOAT, (1,), bytes(4)), "without a name"),
    "no values": (one("a", FLOAT, (1,)), "'a' has no values"),
    "values too few": (one("a", FLOAT, (2,), bytes(7)), "should have 8 bytes by its shape, has 7"),
    "numbers too many": (one("a", INT64, (1,), numbers=coded(7, [1, 2])), "1 values by its shape, has 2"),
    "numbers of another type": (one("a", FLOAT, (1,), numbers=coded(7, [1])), "of another type than its own"),
    "values in two places": (one("a", FLOAT, (1,), bytes(4), numbers=(4, bytes(4))), "in two places"),
    "a negative size": (one("a", FLOAT, (-1,), bytes(4)), "larger than any file"),
    "a shape of 2^80": (one("a", FLOAT, (2**40, 2**40), bytes(4)), "larger than any file"),
    "no graph": (integer(1, 8) + message(2, b"x") + message(3, b"1"), "has 0 graphs"),
    "two graphs": (WHOLE + message(7, b""), "has 2 graphs"),
    "a number without an end": (integer(1, 8) + message(2, b"x") + b"\xff" * 40, "number without an end"),
    "a length beyond the file": (integer(1, 8) + message(2, b"x") + message(7, b"", 2**62), "is cut short"),
    "a field of number 0": (WHOLE + b"\2\0", "a field of unknown kind"),
    "a group": (WHOLE + b"\x3b", "a field of unknown kind"),
    "a name not UTF-8": (WHOLE.replace(message(8, b"a"), message(8, b"\xff")), "not UTF-8"),
    "values cut short": (WHOLE[:-1], "is cut short"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_model_that_breaks_a_rule_is_refused(what: str, tmp_path: Path) -> None:
    raw, said = BROKEN[what]
    refused(put(tmp_path / "m.onnx", raw), said)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (one("a", 99, (1,), bytes(4)), "has the type 99, unknown here"),
        (one("a", FLOAT, (1,) * 65, bytes(4)), "of more than 64 axes"),
        (onnx_file([tensor("a", FLOAT, (2,), bytes(4)) + message(9, bytes(4))]), "in several pieces"),
        (onnx_file([tensor("a", FLOAT, (1,), bytes(4)) + message(3, b"")]), "in segments"),
    ],
)
def test_what_is_not_known_is_named(raw: bytes, said: str, tmp_path: Path) -> None:
    refused(put(tmp_path / "m.onnx", raw), said, Unsupported)


@pytest.mark.parametrize("values", [b"\x80" * 11 + b"\1", b"\x80" * 5000 + b"\1"])
def test_a_number_of_too_many_bytes_is_refused_when_it_is_read(values: bytes, tmp_path: Path) -> None:
    found = ckpttool.open(put(tmp_path / "m.onnx", one("a", INT64, (1,), numbers=(7, values))))
    with pytest.raises(Damaged, match="'a' has a number without an end"):
        found.state().tensors["a"].numpy()


@given(st.lists(st.integers(0, 2**64 - 1), max_size=60), st.integers(1, 40))
def test_numbers_are_decoded_whatever_their_size_and_that_of_a_piece(values: list[int], chunk: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_format, "CHUNK", chunk)
        path = put(Path(folder) / "m", one("a", 13, (len(values),), numbers=coded(11, values)))
        found = ckpttool.open(path).state().tensors["a"]
        assert found.numpy().tolist() == values
        part = found.storage.data.part(8 * (len(values) // 3), 8 * (len(values) // 2)).read()
        assert part == np.array(values, "<u8").tobytes()[8 * (len(values) // 3) :][: len(part)]


def test_other_messages_of_protobuf_are_no_models(tmp_path: Path) -> None:
    core_ml = integer(1, 8) + message(2, message(1, message(1, b"image")))
    saved_model = integer(1, 1) + message(2, message(1, b"x"))
    for raw in (core_ml, saved_model):
        assert not onnx_format.sniff(raw)
        refused(put(tmp_path / "m.bin", raw), "SavedModel|not a checkpoint", Unsupported)


def test_long_names_are_refused_and_long_texts_named(tmp_path: Path) -> None:
    long, one = (1 << 20) + 1, tensor("a", FLOAT, (1,), bytes(4))
    refused(
        put(tmp_path / "m.onnx", onnx_file([tensor("n" * long, FLOAT, (1,), bytes(4))])), "a name of 10485"
    )
    found = ckpttool.open(put(tmp_path / "m.onnx", onnx_file([one], texts={"k": "t" * long, "who": "me"})))
    assert (found.metadata, found.unread[-1]) == ({"who": "me"}, f"metadata of {long + 7} bytes")


def test_a_large_model_is_passed_over_in_little_memory(tmp_path: Path) -> None:
    raw = onnx_file([tensor(f"w{n}", FLOAT, (1,), bytes(4)) for n in range(3000)], nodes=20_000)
    found = ckpttool.open(put(tmp_path / "m.onnx", raw))
    assert (len(found.state().tensors), found.unread) == (3000, ("the graph (nodes: 20000)",))


# ---- NumPy's .npy and .npz: every type and order that torch has; pickled arrays are named, never loaded


GRID = np.arange(12.0).reshape(3, 4)


class Trap:
    """An object that makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("CANARY", "w")


def npy(header: str | bytes, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    raw = header if isinstance(header, bytes) else header.encode()
    size = len(raw).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + bytes(version) + size + raw + data


def npz(members: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(raw := io.BytesIO(), "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return raw.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_type_and_order_is_what_numpy_loads(
    save: Callable[..., None], tmp_path: Path, cli: Cli
) -> None:
    arrays = {code: np.arange(6).astype(code).reshape(2, 3) for code in NUMBERS if code != "b1"}
    arrays |= {f"big {code}": array.astype(f">{code}") for code, array in arrays.items()}
    arrays |= {
        "flag": GRID > 3,
        "fortran": np.asfortranarray(GRID),
        "view": GRID.T[1:],
        "cube": GRID.reshape(3, 2, 2),
    }
    arrays |= {"scalar": np.array(3.5), "empty": np.zeros((0, 3)), "a/b.c": GRID, "A": GRID, "a": GRID + 1}
    save(tmp_path / "in.npz", **arrays)
    found = ckpttool.open(tmp_path / "in.npz")
    mine = found.state().tensors
    assert (found.format, [*mine], found.unread) == ("npz", [*arrays], ())
    for name, array in arrays.items():
        assert mine[name].numpy().dtype.kind == array.dtype.kind
        assert np.array_equal(mine[name].numpy(), array), name
    ran = cli("convert", tmp_path / "in.npz", tmp_path / "out.safetensors", "--exclude", "*c16", "--verify")
    assert ran.code == 0, ran.err
    compared = cli("diff", tmp_path / "in.npz", tmp_path / "out.safetensors", "--json")
    assert compared.json["only_a"] == ["c16", "big c16"] and not compared.json["changed"]


def test_an_array_alone_is_read_under_the_name_that_savez_gives(tmp_path: Path, cli: Cli) -> None:
    for version in ((1, 0), (2, 0), (3, 0)):
        with open(tmp_path / "in.npy", "wb") as file:
            np.lib.format.write_array(file, GRID, version=version)
        found = ckpttool.open(tmp_path / "in.npy")
        assert (found.format, [*found.state().tensors]) == ("npy", ["arr_0"])
        assert np.array_equal(found.state().tensors["arr_0"].numpy(), GRID)
    np.savez(tmp_path / "in.npz", GRID)
    assert cli("diff", tmp_path / "in.npy", tmp_path / "in.npz").code == 0


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_torch_reads_the_same_of_both_byte_orders_in_one_file(
    save: Callable[..., None], tmp_path: Path
) -> None:
    """A `.pt` has one byte order, and torch swaps no type without a storage class of its own (uint16)."""
    arrays = {f"{order}{code}": np.arange(6).astype(order + code) for code in NUMBERS for order in "<>"}
    arrays |= {"fortran": np.asfortranarray(GRID.astype(">u4")), "scalar": np.array(3, ">u2")}
    save(tmp_path / "in.npz", **arrays)
    ckpttool.convert(tmp_path / "in.npz", tmp_path / "out.pt")
    found, mapped = torch.load(tmp_path / "out.pt"), ckpttool.open(tmp_path / "in.npz").state().load()
    for name, array in arrays.items():
        assert np.array_equal(found[name].numpy(), array) and np.array_equal(mapped[name].numpy(), array), (
            name
        )


def test_plain_arrays_are_copied_as_they_lie(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", a=GRID)
    tensor = ckpttool.open(tmp_path / "in.npz").state().tensors["a"]
    assert tensor.is_plain and tensor.storage.nbytes == GRID.nbytes


OTHERS: dict[str, tuple[Any, str]] = {
    "objects": (np.array([Trap(), 1], object), "pickled objects, which are never loaded"),
    "text": (np.array(["a", "b"]), "text"),
    "bytes": (np.array([b"a"]), "bytes of text"),
    "dates": (np.array(["2026-01-01"], "M8[s]"), "dates"),
    "times": (np.array([1], "m8[s]"), "times"),
    "fields": (np.zeros(2, [("a", "f4"), ("b", "i4", 2)]), "records of several fields"),
    "void": (np.zeros(2, "V2"), "elements that NumPy has no type for"),
    "long double": (np.zeros(2, "g"), "elements of type <f16"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_torch_has_no_type_for_is_named_and_left(
    kind: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    array, said = OTHERS[kind]
    np.savez("in.npz", ok=GRID, odd=array)
    found = ckpttool.open("in.npz")
    assert [*found.state().tensors] == ["ok"] and said in found.unread[0]
    assert_says(cli("convert", "in.npz", "out.pt"), 0, "left out", "'odd'")
    np.save("in.npy", array)
    ran = cli("inspect", "in.npy")
    assert_says(ran, 3, said, "and no array of numbers")
    assert not os.path.exists("CANARY")


def test_what_a_pickled_array_names_is_shown_and_not_run(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", ok=GRID, odd=np.array([Trap()], object))
    assert cli("inspect", "in.npz", "--json").json["could_run"] == ["io.open"]
    assert cli("verify", "in.npz").code == 0
    assert cli("verify", "in.npz", "--no-code").code == 1
    np.savez("in.npz", ok=GRID)
    assert cli("verify", "in.npz", "--no-code").code == 0
    raw = npz({"ok.npy": npy(GOOD, bytes(8)), "odd.npy": npy(GOOD.replace("<f4", "|O"), b"no pickle")})
    refused(put(tmp_path / "bad.npz", raw), "its pickle has an unknown opcode")
    np.savez_compressed("in.npz", ok=GRID, odd=np.array([" " * (8 << 20)], object))
    refused(tmp_path / "in.npz", "pickle of 8388[0-9]+ bytes", Refused)
    np.save("in.npy", np.array([" " * (17 << 20)], object))
    refused(tmp_path / "in.npy", "pickle of 1782[0-9]+ bytes", Refused)
    assert not os.path.exists("CANARY")


def test_other_records_of_an_archive_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", a=GRID)
    with zipfile.ZipFile(tmp_path / "in.npz", "a") as archive:
        archive.writestr("notes.pkl", pickle.dumps(Trap()))
    assert ckpttool.open(tmp_path / "in.npz").unread == ("record 'notes.pkl'",)


def test_a_record_of_the_name_of_an_array_is_refused_as_numpy_may_take_either(tmp_path: Path) -> None:
    raw = npz({"a.npy": npy(GOOD, bytes(8)), "a": npy(GOOD, b"\1" * 8)})
    refused(put(tmp_path / "in.npz", raw), "holds the records 'a' and 'a.npy'")


def test_an_archive_that_begins_with_something_else_is_named(tmp_path: Path) -> None:
    path = put(tmp_path / "in.npz", npz({"notes.txt": b"x", "a.npy": npy(GOOD, bytes(8))}))
    refused(path, "holds NumPy arrays .*, but first something else", Unsupported)


def test_a_large_archive_of_zip64_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive:
        for name in ("a", "b"):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, GRID)
    assert np.array_equal(ckpttool.open(tmp_path / "in.npz").state().tensors["b"].numpy(), GRID)


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize(
    "header",
    [
        GOOD,
        GOOD + " " * 60 + "\n",
        '{"shape": (2,),"fortran_order":False,"descr":"<f4"}',
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L,)}",
        "{'descr':'<f4' , 'fortran_order' : True , 'shape' : ( 2 , )}",
    ],
)
def test_headers_of_other_writers_are_read(header: str, tmp_path: Path) -> None:
    found = ckpttool.open(put(tmp_path / "in.npy", npy(header, np.ones(2, "f4").tobytes())))
    assert found.state().tensors["arr_0"].numpy().tolist() == [1, 1]


def with_shape(text: str) -> str:
    return GOOD.replace("(2,)", text)


BROKEN_NPY: dict[str, tuple[bytes, str]] = {
    "code": (npy(GOOD.replace("(2,)", "(open('CANARY', 'w'),)")), "malformed header"),
    "a name": (npy(GOOD.replace("False", "nothing")), "malformed header"),
    "no dict": (npy("[1, 2]"), "malformed header"),
    "nothing": (npy(""), "malformed header"),
    "brackets without end": (npy("{" + "(" * 5000 + "}"), "malformed header"),
    "an entry twice": (npy(GOOD.replace("{", "{'descr': '<f4', ")), "malformed header"),
    "an entry too few": (npy("{'descr': '<f4', 'shape': (2,)}"), "without its three entries"),
    "an entry too many": (npy(GOOD.replace("}", "'x': True}")), "without its three entries"),
    "a text as shape": (npy(GOOD.replace("(2,)", "'2'")), "malformed header"),
    "a type of no form": (npy(GOOD.replace("<f4", "f f")), "malformed header"),
    "a negative size": (npy(with_shape("(-2,)")), "malformed header"),
    "a size of 2^64": (npy(with_shape(f"({2**64},)")), "malformed shape"),
    "sizes of 2^80": (npy(with_shape(f"({2**40}, {2**40})")), "malformed shape"),
    "a size of a thousand digits": (npy(with_shape(f"({'9' * 1000},)")), "malformed shape"),
    "two commas": (npy(with_shape("(2,,)")), "malformed shape"),
    "values too few": (npy(GOOD, bytes(7)), "should have 8 bytes by its shape, has 7"),
    "values too many": (npy(GOOD, bytes(9)), "should have 8 bytes by its shape, has 9"),
    "a header cut short": (npy(GOOD)[:40], "is cut short"),
    "a header of no UTF-8": (npy(b"\xff", version=(3, 0)), "not UTF-8"),
    "a magic alone": (b"\x93NUMPY", "does not begin as an array"),
}


@pytest.mark.parametrize("what", BROKEN_NPY)
def test_a_header_that_breaks_a_rule_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw, said = BROKEN_NPY[what]
    refused(put(tmp_path / "in.npy", raw), said)
    with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive:
        archive.writestr("a.npy", raw)
    refused(tmp_path / "in.npz", said)
    assert not os.path.exists("CANARY")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (npy(GOOD, version=(4, 0)), "has version 4 of the format"),
        (npy(b"x" * 10_001, version=(2, 0)), "a header of 10001 bytes, more than numpy.load takes"),
        (npy(b"", version=(2, 0))[:8] + b"\xff" * 4, "a header of 4294967295 bytes"),
        (npy(with_shape(f"({'1, ' * 65})"), bytes(4)), "has 65 axes"),
    ],
)
def test_what_is_beyond_the_limits_is_named(raw: bytes, said: str, tmp_path: Path) -> None:
    refused(put(tmp_path / "in.npy", raw), said, Unsupported)


def test_a_flipped_bit_is_found(tmp_path: Path, cli: Cli) -> None:
    np.savez(tmp_path / "in.npz", a=GRID)
    raw = bytearray((tmp_path / "in.npz").read_bytes())
    at = raw.index(GRID.tobytes()[8:])
    for place, code in ((at, 3), (at - 40, 3)):  # in the values, and in the spaces of the header
        changed = bytearray(raw)
        changed[place] ^= 1 if place == at else ord(" ") ^ ord("\t")
        put(tmp_path / "bad.npz", bytes(changed))
        assert cli("convert", tmp_path / "bad.npz", tmp_path / "out.pt").code == code
        assert not (tmp_path / "out.pt").exists()
        assert cli("verify", tmp_path / "bad.npz").code == 1


def test_what_grows_without_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_entries, "SMALL", 1 << 20)
    np.savez_compressed(tmp_path / "in.npz", a=np.zeros(1 << 20))
    refused(tmp_path / "in.npz", "would grow from", Refused)


@given(st.text(max_size=200))
def test_any_text_as_a_header_is_read_or_refused(text: str) -> None:
    for header in (text, "{" + text + "}", GOOD[:-2] + text + "}"):
        with contextlib.suppress(Damaged, Unsupported):
            reading._parsed("f", "'a'", header)
