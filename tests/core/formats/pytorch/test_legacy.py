"""The format before torch 1.6: read as torch.load reads it, refused where torch returns uninitialised
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.core.tensors.values import stream
from tests.support.comparing import assert_same, assert_whole, refused, values
from tests.support.crafting import call, dict_of, name, number, storage, tensor, text, torch_legacy, tuple_of
from tests.support.trees import LAYOUTS, LAZY, PLAIN_DTYPES, TREES, shared


def legacy(value: Any, path: Path, **given: Any) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=False, **given)
    return path


def rewritten(path: Path) -> tuple[Any, Any]:
    """What torch reads of a file after ckpttool rewrote it, and of the file itself."""
    out = path.with_name("out.pt")
    ckpttool.convert(path, out)
    assert_whole(out)
    return tuple(torch.load(each, weights_only=False, map_location="cpu") for each in (out, path))


def floats(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


FOUR = {"0": (4, floats(1, 2, 3, 4))}
SKIPPED = {"a storage", "a tensor with an attribute", "a whole model", "a whole model in evaluation"}


@pytest.mark.parametrize("what", sorted(TREES.keys() - SKIPPED))
def test_every_tree_survives_into_a_zip_file(what: str, tmp_path: Path) -> None:
    assert_same(*rewritten(legacy(TREES[what], tmp_path / "in.pth")))


@pytest.mark.filterwarnings("ignore:.*Couldn't retrieve source code")
def test_a_whole_model_survives_without_the_source_text_beside_it(tmp_path: Path) -> None:
    found, _ = rewritten(legacy(TREES["a whole model"], tmp_path / "in.pth"))
    assert_same(TREES["a whole model"].state_dict(), found.state_dict())
    assert str(found) == str(TREES["a whole model"])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(protocol: int, tmp_path: Path) -> None:
    assert_same(*rewritten(legacy(shared(), tmp_path / "in.pth", pickle_protocol=protocol)))


@pytest.mark.parametrize("layout", LAYOUTS | LAZY)
def test_values_of_every_layout_are_read(layout: str, tmp_path: Path) -> None:
    original = (LAYOUTS | LAZY)[layout]
    ref = ckpttool.open(legacy({"t": original}, tmp_path / "f")).state().tensors["t"]
    assert b"".join(bytes(piece) for piece in stream(ref)) == values(original)


@pytest.mark.parametrize("name", PLAIN_DTYPES)
def test_every_element_type_is_read(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    zeros = torch.zeros(16, dtype=torch.uint8)
    original = torch.ones(4).bool() if name == "bool" else zeros.view(dtype)
    path = legacy({"t": original, "after": torch.arange(3)}, tmp_path / "f")
    found = ckpttool.open(path).state().tensors
    assert (found["t"].dtype.name, found["t"].shape) == (name, tuple(original.shape))
    assert found["after"].data.read() == values(torch.arange(3))


def test_shared_tensors_have_one_storage(tmp_path: Path) -> None:
    found = ckpttool.open(legacy(shared(), tmp_path / "f")).state().tensors
    assert len({id(ref.storage) for ref in found.values()}) == 1


def test_a_public_checkpoint_of_2018_is_read_as_torch_reads_it(resnet20: Path, tmp_path: Path) -> None:
    theirs = torch.load(resnet20, weights_only=False, map_location="cpu")
    checkpoint = ckpttool.open(resnet20)
    assert (checkpoint.format, checkpoint.state().where) == ("torch-legacy", "state_dict")
    tensors = checkpoint.state().tensors
    assert list(tensors) == list(theirs["state_dict"])
    for key, ref in tensors.items():
        assert ref.data.read() == values(theirs["state_dict"][key])
    ckpttool.save(checkpoint, tmp_path / "out.pt")
    assert_same(theirs, torch.load(tmp_path / "out.pt", weights_only=False, map_location="cpu"))


def test_values_are_little_endian_whatever_machine_wrote_them(tmp_path: Path) -> None:
    """torch converts on writing (THPStorage_writeFileRaw), and ignores the facts about the machine."""
    body = dict_of({"a": tensor(storage(2, view=b"N"), (2,))})
    path = torch_legacy(tmp_path / "f", body, {"0": (2, floats(1, 2))}, little_endian=False)
    assert torch.load(path)["a"].tolist() == [1, 2]
    ckpttool.save(ckpttool.open(path), tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["a"].tolist() == [1, 2]


def test_a_tensor_of_before_0_4_is_read(tmp_path: Path) -> None:
    two = tuple_of(number(2))
    old = call(name("torch._utils", "_rebuild_tensor"), storage(4, view=b"N"), number(1), two, two)
    path = torch_legacy(tmp_path / "f", dict_of({"a": old}), FOUR)
    assert torch.load(path)["a"].tolist() == [2, 4]
    ref = ckpttool.open(path).state().tensors["a"]
    assert b"".join(bytes(piece) for piece in stream(ref)) == floats(2, 4)


def view_of(root: str, key: str, offset: int, numel: int, of: int) -> bytes:
    return storage(of, key=root, view=tuple_of(text(key), number(offset), number(numel)))


def test_a_view_of_a_storage_is_read_where_torch_reads_it(tmp_path: Path) -> None:
    tree = {
        "view": tensor(view_of("0", "9", 1, 2, 4), (2,)),
        "shifted": tensor(view_of("0", "8", 1, 3, 4), (2,), (1,), 1),
        "whole": tensor(storage(4, view=b"N")),
    }
    path = torch_legacy(tmp_path / "f", dict_of(tree), FOUR)
    theirs = {key: value.tolist() for key, value in torch.load(path, weights_only=False).items()}
    mine = {key: ref.data.read() for key, ref in ckpttool.open(path).state().tensors.items()}
    assert mine == {key: floats(*value) for key, value in theirs.items()}
    assert theirs["shifted"] == [3, 4]


def test_a_tensor_past_the_end_of_its_view_is_damaged(tmp_path: Path) -> None:
    body = dict_of({"a": tensor(view_of("0", "9", 1, 2, 4), (3,))})
    refused(torch_legacy(tmp_path / "f", body, FOUR), "reaches past")


TWO = dict_of({key: tensor(storage(1, key=key, view=b"N"), (1,)) for key in ("a", "b")})
BOTH = {"a": (1, floats(1)), "b": (1, floats(2))}


LISTS = [["a"], ["a", "b", "b"], ["a", "a"], ["a", "c"], [], ["a", "b", "c"], ["a", 1]]


@pytest.mark.parametrize("keys", LISTS)
def test_a_list_of_storages_that_does_not_fit_the_tree_is_damaged(keys: list[Any], tmp_path: Path) -> None:
    """torch.load returns uninitialised memory."""
    refused(torch_legacy(tmp_path / "f", TWO, BOTH, keys=keys), "list of storages")


def test_storages_are_read_in_the_order_of_the_list(tmp_path: Path) -> None:
    path = torch_legacy(tmp_path / "f", TWO, BOTH, keys=["b", "a"])
    found = {key: ref.data.read() for key, ref in ckpttool.open(path).state().tensors.items()}
    assert found == {"a": floats(2), "b": floats(1)}
    assert {key: floats(value.item()) for key, value in torch.load(path).items()} == found


@pytest.mark.parametrize("numel", [0, 1, 3, -1, 2**62])
def test_a_storage_of_another_size_than_the_tree_states_is_damaged(numel: int, tmp_path: Path) -> None:
    body = dict_of({"a": tensor(storage(2), (1,))})
    path = torch_legacy(tmp_path / "f", body, {"0": (numel, floats(1, 2))})
    refused(path, r"storage '0' has -?\d+ elements, its tensors say 2")


def test_two_sizes_for_one_storage_are_damaged(tmp_path: Path) -> None:
    body = dict_of({"a": tensor(storage(2), (1,)), "b": tensor(storage(3), (1,))})
    refused(torch_legacy(tmp_path / "f", body, {"0": (2, floats(1, 2))}), "two sizes")


def test_another_version_of_the_format_is_refused_by_number(tmp_path: Path) -> None:
    path = legacy({}, tmp_path / "f")
    path.write_bytes(path.read_bytes().replace(b"M\xe9\x03.", b"M\xea\x03.", 1))
    refused(path, "version 1002 of the legacy format")


def test_bytes_after_the_last_storage_are_ignored(tmp_path: Path) -> None:
    path = legacy({"a": torch.arange(3)}, tmp_path / "f")
    path.write_bytes(path.read_bytes() + b"more")
    assert ckpttool.open(path).state().tensors["a"].data.read() == values(torch.load(path)["a"])


def test_facts_about_the_machine_are_ignored(tmp_path: Path) -> None:
    path = torch_legacy(tmp_path / "f", b"N")
    assert ckpttool.open(path).tree is None
