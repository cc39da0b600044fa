"""`.pt` to `.pt`: torch.load returns what torch.save wrote; and what torch refuses is said."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.core.tensors.values import stream
from ckpttool.errors import Damaged, Refused, Unsupported
from tests.support.comparing import assert_same, assert_whole, directory, opened, place_of, refused, values
from tests.support.crafting import (
    DOUBLED,
    call,
    dict_of,
    list_of,
    name,
    number,
    storage,
    tensor,
    text,
    torch_legacy,
    torch_zip,
    tuple_of,
)
from tests.support.running import Cli, open_files
from tests.support.trees import (
    LAYOUTS,
    LAZY,
    PLAIN_DTYPES,
    TREES,
    big_endian,
    numbers,
    training_checkpoint,
    with_metadata,
)

# ---- `.pt` to `.pt`: torch.load returns from the output what torch.save wrote into the input ----------


def through(value: Any, folder: Path, **given: Any) -> Any:
    """Save with torch, convert with ckpttool, load with torch; the output is checked."""
    torch.save(value, folder / "in.pt", **given)
    ckpttool.convert(folder / "in.pt", folder / "out.pt", force=True)
    assert_whole(folder / "out.pt")
    records = directory(place_of(folder / "out.pt")).items()
    assert {record.data.offset % 64 for name, record in records if "/data/" in name} <= {0}
    return torch.load(folder / "out.pt", weights_only=False)


@pytest.mark.parametrize("what", TREES)
def test_every_tree_survives(what: str, tmp_path: Path) -> None:
    torch.save(TREES[what], tmp_path / "oracle.pt")
    expected = torch.load(tmp_path / "oracle.pt", weights_only=False)
    found = through(TREES[what], tmp_path)
    if isinstance(expected, torch.UntypedStorage):
        assert bytes(found) == bytes(expected)
    elif what == "a tensor with an attribute":
        assert found.note == expected.note
        assert_same(expected.tolist(), found.tolist())
    else:
        assert_same(expected, found)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_of_torch_save_survives(protocol: int, tmp_path: Path) -> None:
    tree = training_checkpoint() | {"sets": [{1}, frozenset({2})], "bytes": [b"x", bytearray(b"y")]}
    torch.save(tree, tmp_path / "oracle.pt", pickle_protocol=protocol)
    expected = torch.load(tmp_path / "oracle.pt", weights_only=False)
    assert_same(expected, through(tree, tmp_path, pickle_protocol=protocol))


@pytest.mark.parametrize("layout", LAYOUTS | LAZY)
def test_every_layout_survives_unchanged(layout: str, tmp_path: Path) -> None:
    original = (LAYOUTS | LAZY)[layout]
    assert_same({"t": original}, through({"t": original}, tmp_path))


@pytest.mark.filterwarnings("ignore:.*support is experimental")
@pytest.mark.parametrize("name", PLAIN_DTYPES)
def test_every_element_type_survives(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    original = torch.empty(6, dtype=dtype)
    counting = torch.arange(original.untyped_storage().nbytes(), dtype=torch.uint8)
    original.untyped_storage().copy_(counting.untyped_storage())
    found = through({"t": original, "view": original[2:4]}, tmp_path)
    assert (found["t"].dtype, found["view"].storage_offset()) == (dtype, 2)
    assert bytes(found["t"].untyped_storage()) == bytes(original.untyped_storage())


def test_weights_only_loads_the_output_and_may_map_it(tmp_path: Path) -> None:
    state = with_metadata() | {"p": torch.nn.Parameter(torch.ones(1)), "s": {1, 2}, "d": torch.float16}
    through(state | {f"{i}": torch.full((i * 1000,), float(i)) for i in range(60)}, tmp_path)
    for mapped in (False, True):
        found = torch.load(tmp_path / "out.pt", weights_only=True, mmap=mapped)
        assert_same(torch.load(tmp_path / "in.pt", weights_only=True), found)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("before", [0, 60])
def test_tensors_of_one_empty_storage_keep_their_types(before: int, zipped: bool, tmp_path: Path) -> None:
    """torch gives empty tensors of one storage one key, whatever their types."""
    empty = torch.empty(0)
    types = (torch.float32, torch.int32, torch.int64, torch.bool, torch.uint16)
    views = {str(dtype)[6:]: empty.view(dtype) for dtype in types}
    tree = {f"w{i}": torch.ones(2) for i in range(before)} | views
    tree |= {"again": views["int32"], "storage": empty.untyped_storage()}
    torch.save(tree, tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=False)
    opened = ckpttool.open(tmp_path / "in.pt").tree
    assert [opened[name].dtype.name for name in views] == [*views]
    assert [str(loaded[name].dtype) for name in views] == [f"torch.{name}" for name in views]
    assert (loaded["again"].dtype, loaded["storage"].nbytes()) == (torch.int32, 0)


@pytest.mark.parametrize("kind, numel, name", [("IntStorage", 4, "int32"), ("DoubleStorage", 2, "float64")])
def test_a_storage_of_two_classes_has_two_types(kind: str, numel: int, name: str, tmp_path: Path) -> None:
    """torch before 1.10 wrote views of another type like this."""
    tree = {"a": tensor(storage(4)), "b": tensor(storage(numel, kind=kind), (numel - 1,), (1,), 1)}
    data = torch.arange(4.0)
    path = torch_zip(tmp_path / "f", dict_of(tree), {"0": data.numpy().tobytes()})
    ckpttool.convert(path, tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt")
    assert_same({"a": data, "b": data.view(getattr(torch, name))[1:]}, loaded)
    assert loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()


def test_a_shared_storage_is_written_once(tmp_path: Path) -> None:
    through(dict(enumerate(torch.rand(100, 100))), tmp_path)
    assert (tmp_path / "out.pt").stat().st_size < 60_000


def test_the_records_are_those_that_torch_writes(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "in.pt")
    (tmp_path / "other").mkdir()
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "other" / "in.pt")
    with zipfile.ZipFile(tmp_path / "in.pt") as theirs, zipfile.ZipFile(tmp_path / "other" / "in.pt") as mine:
        names = {*theirs.namelist()} - {"in/.format_version"}  # by it torch computes places
        assert names <= set(mine.namelist())  # older versions wrote fewer
        alike = [name for name in names if not name.endswith(("data.pkl", "serialization_id"))]
        assert {name: mine.read(name) for name in alike} == {name: theirs.read(name) for name in alike}


def test_the_same_contents_give_the_same_bytes(tmp_path: Path) -> None:
    through(training_checkpoint(), tmp_path)
    before = (tmp_path / "out.pt").read_bytes()
    for source in ("in.pt", "out.pt"):  # also of an output that is rewritten
        ckpttool.convert(tmp_path / source, tmp_path / "out.pt", force=True)
        assert (tmp_path / "out.pt").read_bytes() == before


NAMES = ("my.model.v1.pt", "модель.pt", "a b.pt", ".pt.pt", "a...pt", "back\\slash.pt", "new\nline.pt")


@pytest.mark.parametrize("name", [*NAMES, "x" * 250 + ".pt"])
def test_any_name_of_the_output_makes_a_file_that_torch_loads(name: str, tmp_path: Path) -> None:
    ckpttool.save(opened({"a": torch.ones(1)}, tmp_path), tmp_path / name)
    assert torch.load(tmp_path / name)["a"].item() == 1
    assert list(ckpttool.open(tmp_path / name).state().tensors) == ["a"]
    assert_whole(tmp_path / name)


def test_the_format_is_found_whatever_the_file_is_called(tmp_path: Path) -> None:
    """A file that is written to a buffer has another folder inside."""
    torch.save({"a": torch.ones(1)}, tmp_path / "when.saved.pt")
    (tmp_path / "when.saved.pt").rename(tmp_path / "model.safetensors")
    with open(tmp_path / "buffered", "wb") as file:
        torch.save({"a": torch.ones(1)}, file)
    for file_name in ("model.safetensors", "buffered"):
        found = ckpttool.open(tmp_path / file_name)
        assert (found.format, list(found.state().tensors)) == ("torch-zip", ["a"])


def test_a_big_endian_file_stays_one_with_the_same_values(tmp_path: Path) -> None:
    path = big_endian(numbers(3, 4), tmp_path / "big.pt")
    ckpttool.save(ckpttool.open(path), tmp_path / "out.pt")
    assert_same(torch.load(path), torch.load(tmp_path / "out.pt"))


def test_a_file_without_a_byte_order_is_little_endian(tmp_path: Path) -> None:
    body = dict_of({"a": tensor(storage(2), (2,))})
    path = torch_zip(tmp_path / "f", body, {"0": np.array([1, 2], "<f4").tobytes()}, byteorder=None)
    assert torch.load(path)["a"].tolist() == [1, 2]
    assert ckpttool.open(path).state().tensors["a"].storage.byteorder == "little"


def test_a_flipped_bit_in_the_pickle_is_damaged(tmp_path: Path) -> None:
    torch.save({"name": torch.zeros(1)}, tmp_path / "in.pt")
    data = (tmp_path / "in.pt").read_bytes()
    (tmp_path / "in.pt").write_bytes(data.replace(b"X\x04\x00\x00\x00name", b"X\x04\x00\x00\x00nime"))
    refused(tmp_path / "in.pt", "data.pkl' does not match its checksum")


def six(dtype: torch.dtype) -> torch.Tensor:
    """Return six elements, of which torch can't cast all types to all."""
    if "float4" in str(dtype):
        return torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(dtype)
    return torch.arange(6).to(dtype).reshape(2, 3)


@pytest.mark.parametrize("zipped", [True, False])
def test_safetensors_becomes_a_pt_that_torch_loads(zipped: bool, tmp_path: Path) -> None:
    names = [name for name, dtype in DTYPES.items() if dtype.safetensors]
    state = {name: six(getattr(torch, name)) for name in names}
    state |= {"of several blocks": torch.arange(300_000), "empty": torch.empty(0)}
    torch.save(state, tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out.safetensors")
    ckpttool.convert(tmp_path / "out.safetensors", tmp_path / "back.pt")
    assert_whole(tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert isinstance(back, OrderedDict)
    assert_same(dict(sorted(state.items())), dict(sorted(back.items())))


def test_nesting_that_no_pickler_writes_is_refused(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "deep.pt", b"]" * 5000 + b"a" * 4999)
    with pytest.raises(Refused, match="nested too deeply"):
        ckpttool.save(ckpttool.open(path), tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_tensors_of_both_byte_orders_are_refused_in_one_file(tmp_path: Path) -> None:
    little = opened({"t": numbers(2)}, tmp_path)
    big = ckpttool.open(big_endian(numbers(2), tmp_path / "big.pt"))
    mixed = dataclasses.replace(little, tree={"a": little.tree, "b": big.tree})
    with pytest.raises(Refused, match="mixes big-endian and little-endian"):
        ckpttool.save(mixed, tmp_path / "out.pt")


# Reading what is damaged, or no checkpoint.


TWO = dict_of({"a": tensor(storage(2), (2,))})


def stored(nbytes: int) -> dict[str, Any]:
    return {"storages": {"0": bytes(nbytes)}}


CASES = ("archive/BYTEORDER", "ARCHIVE/byteOrder", "archive/Constants.pkl")
"""torch finds records in any case of letters."""

RECORDS: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "a missing record": (TWO, {}, "its record 'data/0' is missing"),
    "an unknown byte order": (b"}", {"byteorder": "middle"}, "byte order 'middle'"),
    **{f"{n} bytes": (TWO, stored(n), f"8 bytes, its record has {n}") for n in (0, 7, 9, 16)},
    **{case: (TWO, stored(8) | {"byteorder": None, "more": {case: b"big"}}, "for another") for case in CASES},
    **{f"{n} long": (dict_of({"a": tensor(storage(n), (1,))}), stored(4), "") for n in (2**63, -1, 2**61)},
}


@pytest.mark.parametrize("what", RECORDS)
def test_records_that_do_not_fit_the_pickle_are_damaged(what: str, tmp_path: Path) -> None:
    body, given, said = RECORDS[what]
    refused(torch_zip(tmp_path / "f", body, **given), said)


def test_a_message_shortens_a_long_key(tmp_path: Path) -> None:
    body = dict_of({"a": tensor(storage(2, key="7" * 60_000), (2,))})
    for records in ({}, {"7" * 60_000: bytes(4)}):
        damage = refused(torch_zip(tmp_path / "f", body, records), "777")
        assert len(damage.reason) < 200


def test_a_zip_without_a_pickle_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(tmp_path / "f.zip", r"zip archive without a 'data.pkl'", Unsupported)


def test_two_pickles_in_one_zip_are_refused(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "f", b"}", more={"other/data.pkl": b"\x80\x02}."})
    refusal = refused(path, error=(Damaged, Unsupported))
    assert "TorchScript" not in str(refusal)


# Any tree.

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2)
shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(lambda dtype, shape: numbers(*shape, dtype=dtype), st.sampled_from(TYPES), shapes)
keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.text(max_size=2)))
leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**66), 2**66), st.floats(), st.text(max_size=4)),
    *(st.binary(max_size=4), tensors, tensors.map(lambda t: t.t() if t.dim() == 2 else t)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        inner.map(lambda value: {"a": value, "b": value}),
    ),
    max_leaves=12,
)


@given(trees, st.sampled_from([2, 4]))
def test_any_tree_survives(tree: Any, protocol: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected_in = Path(folder) / "oracle.pt"
        torch.save(tree, expected_in, pickle_protocol=protocol)
        expected = torch.load(expected_in, weights_only=False)
        assert_same(expected, through(tree, Path(folder), pickle_protocol=protocol))


def test_an_open_checkpoint_is_read_though_its_file_was_removed_until_it_is_closed(tmp_path: Path) -> None:
    with opened({"a": torch.ones(2)}, tmp_path) as checkpoint:
        fd = checkpoint.source.fd
        (tmp_path / "in.pt").unlink()
        ckpttool.save(checkpoint, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["a"].tolist() == [1, 1]
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_failed_open_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"PK\x03\x04 and no more")
    before = open_files()
    for _ in range(3):
        with pytest.raises(Damaged):
            ckpttool.open(tmp_path / "f")
    assert not open_files() - before


@pytest.mark.parametrize(
    "layout",
    [
        *[((5,), (1,), 0), ((4,), (1,), 1), ((2,), (4,), 0), ((2, 2), (2, 2), 0), ((1,), (1,), 4)],
        *[((1,), (1,), 2**62), ((2**40,), (0,), 2**63 - 1), ((2**62, 4), (0, 0), 0), ((-1,), (1,), 0)],
        *[((2**32, 2**32), (0, 0), 0), ((1,), (-1,), 0), ((1,), (1,), -1), ((1, 1), (1,), 0)],
        *[((2**62,) * 100, (0,) * 100, 0), ((2,), (2**62,), 0)],
    ],
)
def test_a_tensor_that_reaches_past_its_storage_is_damaged(layout: Any, tmp_path: Path) -> None:
    body = dict_of({"a": tensor(storage(4), *layout)})
    refused(torch_zip(tmp_path / "f", body, {"0": bytes(16)}), "its pickle has a tensor")


FOUR = tuple_of(number(4))

MALFORMED = {
    "no storage": tensor(b"N"),
    "a number for storage": tensor(number(5)),
    "shape a list": tensor(storage()).replace(FOUR, list_of(number(4))),
    "requires_grad a number": tensor(storage()).replace(b"\x89", b"K\x00"),
    "an unknown storage class": tensor(storage(kind="Storage")),
    "a storage of another module": tensor(storage(module="os")),
    "flags of unknown name": tensor(storage(), (4,), (1,), 0, dict_of({"odd": b"\x88"})),
    "a conjugate of floats": tensor(storage(), (4,), (1,), 0, dict_of({"conj": b"\x88"})),
    "flags in a list": tensor(storage(), (4,), (1,), 0, b"]N\x61"),
    "an identity of text": text("storage") + b"Q",
    "an identity in a doubled list": DOUBLED + b"Q",
    "a class in a doubled list": tuple_of(text("storage"), DOUBLED, text("0"), text("cpu"), number(1)) + b"Q",
    "a shape in a doubled list": tensor(storage()).replace(FOUR, DOUBLED, 1),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_tensor_is_damaged(what: str, tmp_path: Path) -> None:
    damage = refused(torch_zip(tmp_path / "f", dict_of({"a": MALFORMED[what]}), {"0": bytes(16)}))
    assert len(damage.reason) < 300


# ---- What torch refuses or reads differently: said by inspect, counted by verify, and the values are torch's


BODY = dict_of({"a": tensor(storage(2), (2,))})
FOUR_BYTES = np.array([1, 2, 3, 4], "<f4").tobytes()


def zip_file(path: Path, version: bytes | None = b"3\n", more: Any = (), body: bytes = BODY) -> Path:
    pickle = b"\x80\x02" + body + b"."
    records = {"archive/data.pkl": pickle, "archive/byteorder": b"little", "archive/data/0": FOUR_BYTES[:8]}
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
    path = torch_legacy(tmp_path / "in.pt", dict_of(VIEWS[what]), {"0": (4, FOUR_BYTES)})
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
    path = torch_legacy(tmp_path / "in.pt", dict_of(tree | again), {"0": (4, FOUR_BYTES)})
    assert cli("verify", path).code == 0


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_a_persistent_id_of_the_other_format_is_said(kind: str, cli: Cli, tmp_path: Path) -> None:
    of = storage(2, view=b"N") if kind == "zip" else storage(2)
    body = dict_of({"a": tensor(of, (2,))})
    path = torch_legacy(tmp_path / "in.pt", body, {"0": (2, FOUR_BYTES[:8])})
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
