"""NumPy's .npy and .npz: every type and order that torch has; pickled arrays are named, never loaded."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
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
from ckpttool.errors import Damaged, Refused, Unsupported
from ckpttool.formats import numpy_files
from ckpttool.formats.pytorch import inflating
from ckpttool.inert_pickle.numpy_values import NUMBERS
from tests.support.running import Cli, assert_says
from tests.support.saved import refused

ROWS = np.arange(12.0).reshape(3, 4)


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


def put(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_type_and_order_is_what_numpy_loads(
    save: Callable[..., None], tmp_path: Path, cli: Cli
) -> None:
    arrays = {code: np.arange(6).astype(code).reshape(2, 3) for code in NUMBERS if code != "b1"}
    arrays |= {f"big {code}": array.astype(f">{code}") for code, array in arrays.items()}
    arrays |= {
        "flag": ROWS > 3,
        "fortran": np.asfortranarray(ROWS),
        "view": ROWS.T[1:],
        "cube": ROWS.reshape(3, 2, 2),
    }
    arrays |= {"scalar": np.array(3.5), "empty": np.zeros((0, 3)), "a/b.c": ROWS, "A": ROWS, "a": ROWS + 1}
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
            np.lib.format.write_array(file, ROWS, version=version)
        found = ckpttool.open(tmp_path / "in.npy")
        assert (found.format, [*found.state().tensors]) == ("npy", ["arr_0"])
        assert np.array_equal(found.state().tensors["arr_0"].numpy(), ROWS)
    np.savez(tmp_path / "in.npz", ROWS)
    assert cli("diff", tmp_path / "in.npy", tmp_path / "in.npz").code == 0


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_torch_reads_the_same_of_both_byte_orders_in_one_file(
    save: Callable[..., None], tmp_path: Path
) -> None:
    """A `.pt` has one byte order, and torch swaps no type without a storage class of its own (uint16)."""
    arrays = {f"{order}{code}": np.arange(6).astype(order + code) for code in NUMBERS for order in "<>"}
    arrays |= {"fortran": np.asfortranarray(ROWS.astype(">u4")), "scalar": np.array(3, ">u2")}
    save(tmp_path / "in.npz", **arrays)
    ckpttool.convert(tmp_path / "in.npz", tmp_path / "out.pt")
    found, mapped = torch.load(tmp_path / "out.pt"), ckpttool.open(tmp_path / "in.npz").state().load()
    for name, array in arrays.items():
        assert np.array_equal(found[name].numpy(), array) and np.array_equal(mapped[name].numpy(), array), (
            name
        )


def test_plain_arrays_are_copied_as_they_lie(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", a=ROWS)
    tensor = ckpttool.open(tmp_path / "in.npz").state().tensors["a"]
    assert tensor.is_plain and tensor.storage.nbytes == ROWS.nbytes


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
    np.savez("in.npz", ok=ROWS, odd=array)
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
    np.savez("in.npz", ok=ROWS, odd=np.array([Trap()], object))
    assert cli("inspect", "in.npz", "--json").json["could_run"] == ["io.open"]
    assert cli("verify", "in.npz").code == 0
    assert cli("verify", "in.npz", "--no-code").code == 1
    np.savez("in.npz", ok=ROWS)
    assert cli("verify", "in.npz", "--no-code").code == 0
    raw = npz({"ok.npy": npy(GOOD, bytes(8)), "odd.npy": npy(GOOD.replace("<f4", "|O"), b"no pickle")})
    refused(put(tmp_path / "bad.npz", raw), "its pickle has an unknown opcode")
    np.savez_compressed("in.npz", ok=ROWS, odd=np.array([" " * (8 << 20)], object))
    refused(tmp_path / "in.npz", "pickle of 8388[0-9]+ bytes", Refused)
    np.save("in.npy", np.array([" " * (17 << 20)], object))
    refused(tmp_path / "in.npy", "pickle of 1782[0-9]+ bytes", Refused)
    assert not os.path.exists("CANARY")


def test_other_records_of_an_archive_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", a=ROWS)
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
                np.lib.format.write_array(file, ROWS)
    assert np.array_equal(ckpttool.open(tmp_path / "in.npz").state().tensors["b"].numpy(), ROWS)


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


BROKEN: dict[str, tuple[bytes, str]] = {
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


@pytest.mark.parametrize("what", BROKEN)
def test_a_header_that_breaks_a_rule_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw, said = BROKEN[what]
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
    np.savez(tmp_path / "in.npz", a=ROWS)
    raw = bytearray((tmp_path / "in.npz").read_bytes())
    at = raw.index(ROWS.tobytes()[8:])
    for place, code in ((at, 3), (at - 40, 3)):  # in the values, and in the spaces of the header
        changed = bytearray(raw)
        changed[place] ^= 1 if place == at else ord(" ") ^ ord("\t")
        put(tmp_path / "bad.npz", bytes(changed))
        assert cli("convert", tmp_path / "bad.npz", tmp_path / "out.pt").code == code
        assert not (tmp_path / "out.pt").exists()
        assert cli("verify", tmp_path / "bad.npz").code == 1


def test_what_grows_without_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflating, "SMALL", 1 << 20)
    np.savez_compressed(tmp_path / "in.npz", a=np.zeros(1 << 20))
    refused(tmp_path / "in.npz", "would grow from", Refused)


@given(st.text(max_size=200))
def test_any_text_as_a_header_is_read_or_refused(text: str) -> None:
    for header in (text, "{" + text + "}", GOOD[:-2] + text + "}"):
        with contextlib.suppress(Damaged, Unsupported):
            numpy_files._parsed("f", "'a'", header)
