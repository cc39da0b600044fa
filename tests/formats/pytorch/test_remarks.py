"""What torch refuses or reads differently: said by inspect, counted by verify, and the values are torch's."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.tensors.values import stream
from tests.support.comparing import values
from tests.support.crafting import call, dict_of, name, number, storage, tensor, text, torch_legacy, tuple_of
from tests.support.running import Cli

BODY = dict_of({"a": tensor(storage(2), (2,))})
FOUR = np.array([1, 2, 3, 4], "<f4").tobytes()


def zip_file(path: Path, version: bytes | None = b"3\n", more: Any = (), body: bytes = BODY) -> Path:
    pickle = b"\x80\x02" + body + b"."
    records = {"archive/data.pkl": pickle, "archive/byteorder": b"little", "archive/data/0": FOUR[:8]}
    records |= {} if version is None else {"archive/version": version}
    with zipfile.ZipFile(path, "w") as archive:
        for record, raw in (records | dict(more)).items():
            info = zipfile.ZipInfo(record or "x")
            info.filename = record  # also an empty one
            with archive.open(info, "w") as file:
                file.write(raw)
    return path


def loads(path: Path) -> bool:
    try:
        torch.load(path)
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def assert_remark(path: Path, words: str, cli: Cli) -> None:
    assert words in " ".join(cli("inspect", path).out.split())
    ran = cli("verify", path, "--json")
    assert (ran.code, [problem["kind"] for problem in ran.json["problems"]]) == (1, ["torch"])
    assert words in cli("verify", path).err


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "record 'version': is missing"),
        *((version, "states no number") for version in (b"", b"three", "³".encode())),
        (b"0", "states version 0: torch reads 1 to 10"),
        *((version, f"states version {int(version)}") for version in (b"-1", b"11", b"99\n", b"9" * 30)),
        (b"0x3", "states version 0"),
    ],
)
def test_a_version_that_torch_refuses_is_said(version: Any, words: str, cli: Cli, tmp_path: Path) -> None:
    path = zip_file(tmp_path / "in.pt", version)
    assert not loads(path)
    assert_remark(path, words, cli)


VERSIONS = [b"1", b"3", b"10\n", b" 3", b"\n+3\n", b"3rd", b"03"]
ACCEPTED = [(b"3\n", {"archive/": b"", "archive/data/": b""}), *((version, {}) for version in VERSIONS)]
ACCEPTED += [(None, {"archive/VERSION": b"3"}), (None, {"archive/.data/version": b"3"})]


@pytest.mark.parametrize(("version", "more"), ACCEPTED)
def test_what_torch_accepts_is_accepted(version: Any, more: Any, cli: Cli, tmp_path: Path) -> None:
    path = zip_file(tmp_path / "in.pt", version, more)
    assert loads(path)
    assert cli("verify", path).code == 0


def test_of_two_versions_that_is_taken_which_torch_takes(cli: Cli, tmp_path: Path) -> None:
    path = zip_file(tmp_path / "in.pt", None, {"archive/.data/version": b"99", "archive/version": b"3"})
    assert not loads(path)
    assert cli("verify", path).code == 1


@pytest.mark.parametrize("record", ["", "x", "other/x"])
def test_a_record_outside_the_folder_is_said(record: str, cli: Cli, tmp_path: Path) -> None:
    path = zip_file(tmp_path / "in.pt", more={record: b"1"})
    assert not loads(path)
    assert_remark(path, f"record '{record}': is outside 'archive/'", cli)


def view(key: str, offset: int, numel: int, kind: str = "FloatStorage") -> bytes:
    return storage(4, kind=kind, view=tuple_of(text(key), number(offset), number(numel)))


WHOLE = tensor(storage(4, view=b"N"), (4,))
VIEWS = {
    "two dtypes": {"a": tensor(view("9", 0, 2), (2,)), "b": tensor(view("9", 0, 2, "IntStorage"), (2,))},
    "two offsets": {"a": tensor(view("9", 0, 2), (2,)), "b": tensor(view("9", 2, 2), (2,))},
    "the key of its storage": {"a": WHOLE, "b": tensor(view("0", 2, 2), (2,))},
    "the key of its storage alone": {"b": tensor(view("0", 2, 2), (2,))},
}


@pytest.mark.parametrize("what", VIEWS)
def test_of_two_views_under_one_key_the_first_is_taken(what: str, cli: Cli, tmp_path: Path) -> None:
    path = torch_legacy(tmp_path / "in.pt", dict_of(VIEWS[what]), {"0": (4, FOUR)})
    theirs = {key: (value.dtype, values(value)) for key, value in torch.load(path).items()}
    with ckpttool.open(path) as checkpoint:
        mine = {
            key: (getattr(torch, ref.dtype.name), b"".join(map(bytes, stream(ref))))
            for key, ref in checkpoint.state().tensors.items()
        }
    assert mine == theirs
    assert_remark(path, "is described twice, differently: torch takes the first", cli)


def test_views_under_keys_of_their_own_need_no_remark(cli: Cli, tmp_path: Path) -> None:
    tree = {"a": tensor(view("8", 0, 2), (2,)), "b": tensor(view("9", 2, 2), (2,)), "c": WHOLE}
    again = {"d": tensor(view("9", 2, 2), (2,))}
    path = torch_legacy(tmp_path / "in.pt", dict_of(tree | again), {"0": (4, FOUR)})
    assert cli("verify", path).code == 0


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_a_persistent_id_of_the_other_format_is_said(kind: str, cli: Cli, tmp_path: Path) -> None:
    of = storage(2, view=b"N") if kind == "zip" else storage(2)
    body = dict_of({"a": tensor(of, (2,))})
    path = torch_legacy(tmp_path / "in.pt", body, {"0": (2, FOUR[:8])})
    if kind == "zip":
        zip_file(path, body=body)
    assert not loads(path)
    assert_remark(path, "parts in its id, which torch refuses here", cli)


def parameter(around: bytes, requires_grad: bytes) -> bytes:
    hooks = call(name("collections", "OrderedDict"))
    return call(name("torch._utils", "_rebuild_parameter"), around, requires_grad, hooks)


def test_a_parameter_around_a_parameter_is_one_as_in_torch(cli: Cli, tmp_path: Path) -> None:
    inner = parameter(parameter(tensor(storage(2), (2,)), b"\x88"), b"\x88")
    path = zip_file(tmp_path / "in.pt", body=dict_of({"a": parameter(inner, b"\x89")}))
    theirs = torch.load(path)["a"]
    with ckpttool.open(path) as checkpoint:
        assert list(checkpoint.state().tensors) == ["a"]
        ckpttool.save(checkpoint, tmp_path / "out.pt")
    mine = torch.load(tmp_path / "out.pt")["a"]
    assert (type(mine), mine.requires_grad) == (type(theirs), theirs.requires_grad)
    assert mine.tolist() == theirs.tolist()
    assert_remark(path, "a Parameter around a Parameter", cli)
    assert cli("verify", tmp_path / "out.pt").code == 0
