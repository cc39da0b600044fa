"""The safetensors format: written as the library writes it, read more strictly, and renamed in its place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model, save, save_file, save_model

import ckpttool
from ckpttool.core import system
from ckpttool.core.files import copying, reflink
from ckpttool.core.files.copying import Output
from ckpttool.core.formats import Saved, safetensors
from ckpttool.core.tensors import values as tensor_values
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.errors import Damaged, Refused, Unsupported
from tests.support.comparing import convert, opened, refused, values
from tests.support.crafting import safetensors_file
from tests.support.extents import clone_range
from tests.support.running import Cli

# ---- The safetensors format: written as the library writes it to the byte, read more strictly than it reads


F = torch.float32


def converted(state: Mapping[str, Any], folder: Path, **given: Any) -> bytes:
    """What this library makes of a `.pt` file of these tensors."""
    convert(dict(state), folder / "out.safetensors", force=True, **given)
    return (folder / "out.safetensors").read_bytes()


def saved_by_the_library(state: Mapping[str, torch.Tensor], folder: Path, **given: Any) -> bytes:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "oracle", **given)
    return (folder / "oracle").read_bytes()


def savable(name: str) -> bool:
    """Whether this torch has the type and this version of the library saves it."""
    with contextlib.suppress(AttributeError, KeyError, ValueError, SafetensorError):
        return bool(save({"t": torch.empty(0, dtype=getattr(torch, name))}))
    return False


SAVABLE = [name for name, dtype in DTYPES.items() if dtype.safetensors and savable(name)]


def cast(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return small integers in a type; of F4, which torch casts nothing to, they are the bits."""
    dtype = getattr(torch, name)
    return values.to(torch.uint8).view(dtype) if name == "float4_e2m1fn_x2" else values.to(dtype)


@pytest.mark.parametrize("name", SAVABLE)
def test_a_tensor_of_each_type_gives_the_bytes_of_save_file(name: str, tmp_path: Path) -> None:
    state = {"t": cast(torch.arange(11), name)}
    assert converted(state, tmp_path) == saved_by_the_library(state, tmp_path)


def test_all_types_together_stand_in_the_order_of_save_file(tmp_path: Path) -> None:
    state = {f"{i}.{name}": cast(torch.arange(3), name) for i, name in enumerate(SAVABLE)}
    assert converted(state, tmp_path) == saved_by_the_library(state, tmp_path)


ODD_NAMES = [
    *("a", "", " ", "ключ", "鍵", "🔑", 'quo"te', "back\\slash", "new\nline", "tab\t", "nul\0", "\x1b[31m"),
    *("\u2028", "\x08\x0c\r", "é", "e\u0301", "/etc/passwd", "..", "a/b", "{", "%s", "\ufeff", "\ue000"),
    *("\x7f", "\uffff", "x" * 100_000, "\U0010ffff", "__metadata", "dtype", "shape", "data_offsets"),
]


def test_odd_names_are_sorted_and_escaped_as_save_file_does(tmp_path: Path) -> None:
    state = {name: torch.full((i % 3,), i, dtype=F) for i, name in enumerate(ODD_NAMES)}
    assert converted(state, tmp_path) == saved_by_the_library(state, tmp_path)


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"näme": 'va"lue\n\x1b'}, {"": ""}], ids=str)
def test_metadata_goes_through_as_save_file_writes_it(metadata: dict[str, str], tmp_path: Path) -> None:
    state = {"b": torch.ones(2), "a": torch.zeros(3)}
    expected = saved_by_the_library(state, tmp_path, metadata=metadata or None)
    ckpttool.convert(tmp_path / "oracle", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == expected


def test_no_tensors_at_all_give_the_file_of_save_file(tmp_path: Path) -> None:
    expected = saved_by_the_library({}, tmp_path)
    assert converted({}, tmp_path) == expected
    ckpttool.convert(tmp_path / "oracle", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == expected


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3)


@given(st.dictionaries(names, st.tuples(st.sampled_from(SAVABLE), shapes), max_size=6), st.randoms())
def test_any_tensors_give_the_bytes_of_save_file(wanted: dict[str, Any], random: Any) -> None:
    state = {}
    for name, (dtype, shape) in wanted.items():
        bits = torch.tensor([random.randrange(2) for _ in range(torch.Size(shape).numel())])
        # The library fails for F4 without an axis.
        state[name] = cast(bits, dtype).reshape(shape or (*[1] * (dtype == "float4_e2m1fn_x2"),))
    with tempfile.TemporaryDirectory() as folder:
        assert converted(state, Path(folder)) == saved_by_the_library(state, Path(folder))


def tied() -> dict[str, torch.Tensor]:
    weight = torch.arange(12, dtype=F).reshape(3, 4)
    return {"embed": weight, "head": weight, "row": weight[1], "flat": weight.view(-1), "turned": weight.t()}


VIEWS: dict[str, dict[str, torch.Tensor]] = {
    "tied": tied(),
    "overlapping": {"a": torch.arange(10)[:6], "b": torch.arange(10)[4:]},
    "transposed": {"t": torch.arange(12, dtype=F).reshape(3, 4).t()},
    "channels last": {"t": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)},
    "strided": {"t": torch.arange(20)[1::3]},
    "expanded": {"t": torch.arange(3).expand(5, 3)},
    "conjugate": {"t": torch.tensor([1 + 2j, 3 - 4j]).conj()},
    "negative": {"t": torch.tensor([1 + 2j, 3 - 4j]).conj().imag},
    "part of a storage": {"t": torch.arange(100)[40:43]},
    "0-d of a storage": {"t": torch.arange(5)[2]},
    "parameters": {"t": torch.nn.Parameter(torch.ones(3))},
}


@pytest.mark.parametrize("chunk", [tensor_values.CHUNK, 32])
@pytest.mark.parametrize("what", VIEWS)
def test_views_become_tensors(what: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_values, "CHUNK", chunk)
    state = {name: tensor.detach() for name, tensor in VIEWS[what].items()}
    converted(state, tmp_path, keep_copies=True)
    loaded = load_file(tmp_path / "out.safetensors").items()
    shown = {name: (tensor.shape, values(tensor)) for name, tensor in state.items()}
    assert {name: (tensor.shape, values(tensor)) for name, tensor in loaded} == shown


def test_what_was_written_out_for_each_of_its_names_is_said(tmp_path: Path) -> None:
    checkpoint = opened(tied() | {"own": torch.ones(2)}, tmp_path)
    saved = ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    assert (saved.tied, saved.copied) == (("head",), ("row", "flat", "turned"))
    saved = ckpttool.save(checkpoint, tmp_path / "copies.safetensors", keep_copies=True)
    assert (saved.tied, saved.copied) == ((), ("head", "row", "flat", "turned"))


def test_parts_of_one_storage_that_do_not_overlap_are_no_copies(tmp_path: Path) -> None:
    whole = torch.arange(10)
    parts = {"a": whole[:5], "b": whole[5:], "empty": whole[3:3]}
    assert convert(parts, tmp_path / "out.safetensors").copied == ()


# Ties.


class Tied(torch.nn.Module):
    """A language model's two ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_tie_is_kept_once_and_recorded_as_save_model_does(tmp_path: Path) -> None:
    model, oracles = Tied(), set()
    for _ in range(64):  # the library writes metadata in one of two orders, at random
        save_model(model, str(tmp_path / "oracle"), metadata={"format": "pt"})
        oracles.add((tmp_path / "oracle").read_bytes())
    assert converted(model.state_dict(), tmp_path) in oracles
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"head.weight": "embed.weight", "format": "pt"}
        assert list(file.keys()) == ["embed.weight"]


def test_a_tied_model_is_loaded_by_load_model(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    convert(model.state_dict(), tmp_path / "out.safetensors")
    assert load_model(other, tmp_path / "out.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight


@pytest.mark.parametrize("writer", [convert, save_model])
def test_ties_are_ties_again_on_the_way_back(writer: Any, tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / "f.safetensors"
    writer(model if writer is save_model else model.state_dict(), path)
    checkpoint = ckpttool.open(path)
    assert set(checkpoint.state().tensors) == {"embed.weight", "head.weight"}
    assert "head.weight" not in checkpoint.metadata
    ckpttool.save(checkpoint, tmp_path / "back.pt")
    loaded = torch.load(tmp_path / "back.pt")
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert (tmp_path / "back.pt").stat().st_size < 2_000
    Tied().load_state_dict(loaded)


def test_a_tie_goes_on_from_safetensors_to_safetensors(tmp_path: Path) -> None:
    save_model(Tied(), tmp_path / "a.safetensors", metadata={"who": "me"})
    saved = ckpttool.save(ckpttool.open(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    assert saved.tied == ("head.weight",)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == {"head.weight": "embed.weight", "who": "me", "format": "pt"}


def test_only_the_same_view_of_the_same_storage_is_a_tie(tmp_path: Path) -> None:
    base, none = torch.arange(4, dtype=F).reshape(2, 2), torch.empty(0, 3)
    state = {"a": base, "same values": base.clone(), "turned": base.t(), "flat": base.view(4), "row": base[0]}
    state |= {"empty": none, "also empty": none}
    converted(state, tmp_path)
    assert load_file(tmp_path / "out.safetensors").keys() == state.keys()


def test_a_tie_whose_name_the_metadata_needs_is_written_out(tmp_path: Path) -> None:
    """`format` tells which library the tensors are for; transformers reads nothing without it."""
    weight = torch.ones(2, 2)
    for names, ties in ((("w", "format", "who"), {}), (("w", "v"), {"v": "w"})):
        tensors = opened(dict.fromkeys(names, weight), tmp_path).state().tensors
        assert safetensors.ties(tensors, {"format": "pt", "who": "me"}) == ties


def test_a_tensor_that_is_named_like_the_format_makes_no_tie_of_it(tmp_path: Path) -> None:
    save_file({"pt": torch.ones(1)}, tmp_path / "f", metadata={"format": "pt"})
    checkpoint = ckpttool.open(tmp_path / "f")
    assert list(checkpoint.state().tensors) == ["pt"]
    assert checkpoint.metadata == {"format": "pt"}


@pytest.mark.parametrize("dtype", ["complex128", "complex32", "bits8", "bits16"])
def test_a_type_that_the_format_lacks_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    state = {"odd": torch.empty(3, dtype=getattr(torch, dtype)), "a": torch.ones(1)}
    with pytest.raises(Refused, match=f"can't hold 'odd': it has no type {dtype}") as refusal:
        convert(state, tmp_path / "out.safetensors")
    assert ".pt" in str(refusal.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("__metadata__", "can't hold a tensor named '__metadata__'"),
        ("file\udcff", r"the key 'file\\udcff' is not valid Unicode"),
    ],
)
def test_a_name_that_the_format_can_not_hold_is_refused(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=said):
        convert({name: torch.ones(1)}, tmp_path / "out.safetensors")


# Reading.


def test_a_file_of_the_library_is_read_in_file_order_with_its_metadata(tmp_path: Path) -> None:
    state = {"b": torch.ones(2, 3), "a": torch.zeros(3, dtype=torch.int64), "c": torch.tensor(1.5)}
    save_file(state, tmp_path / "f", metadata={"format": "pt"})
    checkpoint = ckpttool.open(tmp_path / "f")
    with safe_open(tmp_path / "f", "pt") as theirs:
        assert list(checkpoint.state().tensors) == theirs.offset_keys()
    assert (checkpoint.format, checkpoint.metadata) == ("safetensors", {"format": "pt"})
    for name, ref in checkpoint.state().tensors.items():
        assert (ref.dtype.name, ref.shape) == (str(state[name].dtype)[6:], tuple(state[name].shape))
        assert ref.data.read() == values(state[name])


@pytest.mark.parametrize("extra", [b"", b"   ", b"\n"])
def test_padding_behind_the_header_may_be_any_blank(extra: bytes, tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}' + extra
    checkpoint = ckpttool.open(safetensors_file(tmp_path / "f", header, b"ab"))
    assert checkpoint.state().tensors["a"].data.read() == b"ab"


U8 = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": U8 | changes}


WRONG: dict[str, list[Any]] = {
    "shape": [[3], [-1, -2], [2**32, 2**32], [2**63, 2], [2**62] * 1000, [2**62] * 100_000],
    "shape of no sizes": [2, ["2"], [2.0], [True, 2], None],
    "data_offsets": [[2, 0], [-2, 0], "02", [0, 2.0], [0], [0, 2, 2]],
    "dtype": [8, ["U8"]],
    "requires_grad": [True],
}
"""Of fields, values that they can't have."""

LIES: dict[str, tuple[object, bytes]] = {
    "a hole before": (entry(data_offsets=[1, 3]), b"abc"),
    "a hole between": ({"a": U8, "b": U8 | {"data_offsets": [3, 5]}}, b"abcde"),
    "an overlap": ({"a": U8, "b": U8 | {"data_offsets": [1, 3]}}, b"abc"),
    "the same bytes twice": ({"a": U8, "b": U8}, b"ab"),
    "bytes after the last": ({"a": U8}, b"abc"),
    "bytes missing": ({"a": U8}, b"a"),
    "bytes though no tensor": ({}, b"a"),
    **{
        f"{field}: {str(value)[:40]}, {len(str(value))} long": (entry(**{field.split()[0]: value}), b"ab")
        for field, values in WRONG.items()
        for value in values
    },
    "a field missing": ({"a": {"dtype": "U8", "shape": [2]}}, b"ab"),
    **{f"an entry: {value}": ({"a": value}, b"ab") for value in (["U8", [2], [0, 2]], "U8")},
    **{f"metadata: {m}": ({"__metadata__": m, "a": U8}, b"ab") for m in ({"n": 1}, {"n": {}}, [])},
    "an entry twice": (b'{"a":%b,"a":%b}' % ((json.dumps(U8).encode(),) * 2), b"ab"),
    "a field twice": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab"),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', b""),
    "no UTF-8": (b'{"\xff":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab"),
    "10,000 digits": (b'{"a":{"dtype":"U8","shape":[1%b],"data_offsets":[0,2]}}' % (b"0" * 10_000), b"ab"),
    "infinity": (b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,2]}}', b"ab"),
    "nested a hundred thousand deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""),
    "more after the object": (b"{}{}", b""),
    "no JSON": (b"{]", b""),
    "only a brace": (b"{", b""),
    "zeros for padding": (b"{}\0\0", b""),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_breaks_the_rules_is_damaged(lie: str, tmp_path: Path) -> None:
    damage = refused(safetensors_file(tmp_path / "f.safetensors", *LIES[lie]))
    assert len(damage.reason) < 300


ONE = b'"a%b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
TEXT = b'{"__metadata__":{"%b":"%b"},' + ONE % b"" + b"}"


@pytest.mark.parametrize(
    "header",
    [
        *(b"{" + ONE % text + b"}" for text in (rb"\ud800", rb"\udfff", rb"\ude00\ud83d", rb"\ud800\u0041")),
        TEXT % (rb"\uD800", b""),
        TEXT % (b"", rb"\udC00"),
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[ -0 ,1]}}',
    ],
)
def test_text_and_numbers_that_only_python_takes_are_damaged(header: bytes, tmp_path: Path) -> None:
    path = safetensors_file(tmp_path / "f", header, b"a")
    with pytest.raises(SafetensorError):
        load_file(path)
    refused(path)


@pytest.mark.parametrize("text", [rb"\ud83d\ude00", rb"\\ud800", rb"\u00e9", b"-0", b",-0", "é".encode()])
def test_text_that_looks_like_that_is_read_as_the_library_reads_it(text: bytes, tmp_path: Path) -> None:
    path = safetensors_file(tmp_path / "f", TEXT % (text, text) + b" ", b"a")
    with safe_open(path, "pt") as theirs:
        assert ckpttool.open(path).metadata == theirs.metadata()
    path = safetensors_file(tmp_path / "g", b"{" + ONE % text + b"}", b"a")
    assert list(ckpttool.open(path).state().tensors) == list(load_file(path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "F6_E3M3", "shape": [4], "data_offsets": [0, 3]}, "has the type F6_E3M3"),
        ({"shape": [1] * 70, "data_offsets": [0, 1]}, "has 70 axes, and at most 64 are supported"),
    ],
)
def test_what_torch_lacks_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = safetensors_file(tmp_path / "f", entry(**changes), bytes(changes["data_offsets"][1]))
    refused(path, f"tensor 'a' {said}", Unsupported)


@pytest.mark.parametrize("size", [0, 1, 10_000, 100_000_001, 2**32, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused_without_room_for_it(size: int, tmp_path: Path) -> None:
    path = safetensors_file(tmp_path / "f", {"a": U8}, b"ab", size=size)
    refused(path, error=(Damaged, Unsupported))


def test_a_blank_before_the_header_is_no_safetensors(tmp_path: Path) -> None:
    """safetensors 0.8 takes it; the format says that the header begins with a brace."""
    path = safetensors_file(tmp_path / "f", b' {"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab")
    refused(path, "not a checkpoint", Unsupported)


@given(st.binary(max_size=60), st.integers(0, 60))
def test_any_header_is_read_as_the_library_reads_it_or_refused(noise: bytes, where: int) -> None:
    """Whatever this reader takes, the library takes too, and finds the same in it."""
    whole = {"a": U8, "b": {"dtype": "U8", "shape": [0], "data_offsets": [2, 2]}}
    header = bytearray(json.dumps(whole, separators=(",", ":")).encode())
    header[where : where + len(noise)] = noise
    with tempfile.TemporaryDirectory() as folder:
        path = safetensors_file(Path(folder) / "f", bytes(header), b"ab")
        try:
            mine = ckpttool.open(path)
        except (Damaged, Unsupported):
            return
        theirs = load_file(path)
        assert {n: values(t) for n, t in theirs.items()} == {n: t.data.read() for n, t in mine.tensors()}


def test_reading_looks_at_the_header_alone(tmp_path: Path) -> None:
    whole = entry(shape=[1 << 33], data_offsets=[0, 1 << 33])
    path = safetensors_file(tmp_path / "huge.safetensors", whole)
    os.truncate(path, path.stat().st_size + (1 << 33))  # a hole: 8 GiB that nobody reads
    assert ckpttool.open(path).state().tensors["a"].nbytes == 1 << 33


def test_the_magic_is_a_length_and_a_brace() -> None:
    starts = {(2, b"{}"): True, (2, b"[]"): False, (1 << 40, b"{}"): False}
    found = {(size, text): safetensors.sniff(struct.pack("<Q", size) + text) for size, text in starts}
    assert found == starts
    assert not safetensors.sniff(b"{}")


def test_what_this_test_calls_the_library_refuses_what_is_cut_short(tmp_path: Path) -> None:
    """The oracle is no yes-man."""
    (tmp_path / "f").write_bytes(saved_by_the_library({"a": torch.ones(3)}, tmp_path)[:-1])
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "f")
    refused(tmp_path / "f")


# ---- A safetensors file that gets other names: whoever reads it finds the old ones or the new ones ----


STATE = {f"module.layer{i}.weight": torch.full((5, 3), float(i)) for i in range(4)}
PLAIN = {name.removeprefix("module."): tensor for name, tensor in STATE.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(STATE, tmp_path / "m.safetensors", metadata={"format": "pt"})
    return tmp_path / "m.safetensors"


def save_over(path: Path, change: Callable[..., Any], out: Path | None = None, **given: Any) -> Saved:
    with ckpttool.open(path) as checkpoint:
        return ckpttool.save(change(checkpoint)[0], out or path, force=True, **given)


def strip(path: Path, **given: Any) -> Saved:
    return save_over(path, ckpttool.strip_prefix, **given)


def contents(path: Path) -> dict[str, bytes]:
    """What this library finds in the file: names and values."""
    with ckpttool.open(path) as checkpoint:
        return {name: tensor.data.read() for name, tensor in checkpoint.state().tensors.items()}


def of(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: values(tensor) for name, tensor in state.items()}


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that shares blocks of a byte between files: no payload may be copied."""
    monkeypatch.setattr(fcntl, "ioctl", clone_range)
    monkeypatch.setattr(reflink, "BLOCK", 1)
    monkeypatch.setattr(system, "block_size", lambda _: 1)
    monkeypatch.setattr(copying, "SMALL", 0)
    monkeypatch.setattr(Output, "_put", Mock(side_effect=AssertionError("payload was moved")))


@pytest.fixture(params=["copied", "shared"])
def both_ways(request: pytest.FixtureRequest) -> None:
    if request.param == "shared":
        request.getfixturevalue("sharing")


# What changes, and what does not.


@pytest.mark.usefixtures("both_ways")
def test_the_payload_stays_as_it_is_and_the_file_keeps_its_size(path: Path) -> None:
    size, payload = path.stat().st_size, path.read_bytes()[-240:]
    saved = strip(path)
    assert (path.stat().st_size, saved.nbytes) == (size, size)
    assert path.read_bytes()[-240:] == payload
    assert contents(path) == of(PLAIN)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in PLAIN.items())
    assert os.listdir(path.parent) == [path.name]


def test_the_file_is_the_same_whether_blocks_are_shared(path: Path, request: pytest.FixtureRequest) -> None:
    other = Path(shutil.copy(path, path.with_name("other.safetensors")))
    strip(path)
    request.getfixturevalue("sharing")
    strip(other)
    assert path.read_bytes() == other.read_bytes()


@pytest.mark.usefixtures("both_ways")
def test_a_header_grows_into_its_padding(path: Path) -> None:
    strip(path)
    save_over(path, ckpttool.add_prefix)
    assert contents(path) == of(STATE)


def test_a_header_that_does_not_fit_makes_a_longer_file(path: Path) -> None:
    size = path.stat().st_size
    save_over(path, partial(ckpttool.add_prefix, prefix="a.very.long.prefix." * 5))
    assert path.stat().st_size > size
    assert sorted(load_file(path)) == ["a.very.long.prefix." * 5 + name for name in STATE]
    assert os.listdir(path.parent) == [path.name]


def test_tensors_whose_order_in_the_file_is_another_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    state = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int64), "c": torch.ones(1)}
    save_file(state, path)
    save_over(path, partial(ckpttool.rename_keys, rules=[("^a", "z"), ("^b", "y"), ("^c", "x")]))
    assert of(load_file(path)) == of(dict(zip("yzx", state.values(), strict=True)))


def test_fewer_tensors_make_a_shorter_file(path: Path) -> None:
    size = path.stat().st_size
    save_over(path, partial(ckpttool.select, exclude=["*layer0*"]))
    assert path.stat().st_size < size
    assert sorted(load_file(path)) == sorted(STATE)[1:]


@pytest.mark.usefixtures("both_ways")
def test_ties_are_kept_in_the_metadata_of_the_new_header(tmp_path: Path) -> None:
    path, metadata = tmp_path / "m.safetensors", {"module.head": "module.wte", "who": "me"}
    save_file({"module.wte": torch.ones(2, 2)}, path, metadata=metadata)
    strip(path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"head": "wte", "who": "me", "format": "pt"}
        assert list(file.keys()) == ["wte"]


def test_copies_of_ties_make_a_longer_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"module.wte": torch.ones(2, 2)}, path, metadata={"module.head": "module.wte"})
    strip(path, keep_copies=True)
    assert of(load_file(path)) == of(dict.fromkeys(("head", "wte"), torch.ones(2, 2)))


def test_a_whole_checkpoint_in_safetensors_is_not_taken_for_a_state(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ckpttool.save(opened({"model": STATE, "epoch": 3}, tmp_path), path, full=True)
    strip(path, full=True)
    again = ckpttool.open(path)
    assert again.tree["epoch"] == 3
    assert list(again.state().tensors) == list(PLAIN)


@pytest.mark.usefixtures("both_ways")
def test_values_are_compared_before_a_file_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strip(path, verify=True)
    assert contents(path) == of(PLAIN)
    before = path.read_bytes()
    monkeypatch.setattr("ckpttool.core.files.digest.digest", lambda tensors, progress: id(tensors))
    with pytest.raises(Damaged, match="does not read back"):
        save_over(path, lambda checkpoint: ckpttool.rename_keys(checkpoint, [("layer", "l")]), verify=True)
    assert path.read_bytes() == before


def test_a_header_that_does_not_read_back_is_never_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, before = safetensors.header, path.read_bytes()

    def wrong(*given: Any, **more: Any) -> bytes:
        return right(*given, **more).replace(b"layer1", b"layer2")

    monkeypatch.setattr(safetensors, "header", wrong)
    with pytest.raises(Damaged):
        strip(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_dry_run_writes_nothing_and_tells_the_size(path: Path) -> None:
    before, changed = path.read_bytes(), path.stat().st_mtime_ns
    assert strip(path, dry_run=True).nbytes == len(before)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, changed)
    assert os.listdir(path.parent) == [path.name]
    assert strip(path).nbytes == len(before)


# Where other files or people are concerned.


@pytest.mark.usefixtures("both_ways")
def test_through_a_symbolic_link_the_file_behind_it_is_rewritten(path: Path) -> None:
    link = path.parent / "link.safetensors"
    link.symlink_to(path.name)
    strip(link)
    assert link.is_symlink()
    assert contents(path) == of(PLAIN)


@pytest.mark.parametrize("is_output", [False, True])
@pytest.mark.usefixtures("both_ways")
def test_other_hard_links_keep_what_they_have(is_output: bool, path: Path) -> None:
    other = path.parent / "other.safetensors"
    os.link(path, other)
    save_over(path, ckpttool.strip_prefix, other if is_output else path)
    assert contents(path if is_output else other) == of(STATE)
    assert contents(other if is_output else path) == of(PLAIN)


def test_a_file_that_may_not_be_written_is_replaced_and_keeps_its_permissions(path: Path) -> None:
    path.chmod(0o444)
    strip(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert contents(path) == of(PLAIN)


@pytest.mark.usefixtures("both_ways")
def test_a_full_disk_leaves_the_file_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        strip(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_nothing_beside_the_file_is_read_or_written(kind: str, path: Path) -> None:
    """A journal had this name once: a link of it led a write elsewhere, a pipe kept every reader waiting."""
    journal, bashrc = path.with_name(f".{path.name}.ckpttool-journal"), path.with_name("bashrc")
    bashrc.write_text("mine")
    if kind == "link":
        journal.symlink_to("bashrc")
    elif kind == "pipe":
        os.mkfifo(journal)
    else:
        header = path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
        forged, half = header.replace(b"layer", b"lAyer"), len(header) // 2
        both = header[:half] + forged[half:] + forged[:half] + header[half:]
        journal.write_bytes(b"ckpttool journal 1\n" + hashlib.sha256(both).digest() + both)
    assert contents(path) == of(STATE)
    strip(path)
    assert contents(path) == of(PLAIN)
    assert bashrc.read_text() == "mine"
    assert sorted(path.parent.iterdir()) == sorted([journal, bashrc, path])


# Crashes.


CHANGING = ("pwrite", "fsync", "unlink", "replace", "rename", "open", "fchmod", "ftruncate")


def crash(at: int, half: bool) -> None:
    """End this process at the n-th call that changes files, before it or in the middle of it."""
    calls = itertools.count(1)

    def wrapped(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def changing(*given: Any, **more: Any) -> Any:
            if next(calls) == at:
                if half and name == "pwrite":
                    fd, data, position = given
                    call(fd, bytes(data)[: len(data) // 2], position)
                os._exit(9)
            return call(*given, **more)

        return changing

    for name in CHANGING:
        owner = system if name == "pwrite" else os
        setattr(owner, name, wrapped(getattr(owner, name), name))


def ends_after(calls: int, half: bool, action: Callable[[], object]) -> bool:
    """Runs the action in a process of its own that dies at a call; whether it got to its end."""
    child = os.fork()
    if child == 0:
        try:
            crash(calls, half)
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 0


@pytest.mark.covered(lambda half, both_ways: not half)
@pytest.mark.parametrize("half", [False, True], ids=["before the call", "in the middle of a write"])
@pytest.mark.usefixtures("both_ways")
def test_killed_at_any_call_the_file_holds_the_old_names_or_the_new(half: bool, path: Path) -> None:
    kept, seen = path.read_bytes(), []
    for calls in range(1, 100):
        copy = path.parent / f"{calls}" / path.name
        copy.parent.mkdir()
        copy.write_bytes(kept)
        ended = ends_after(calls, half, lambda copy=copy: strip(copy))  # type: ignore[misc]
        assert of(load_file(copy)) == contents(copy)
        assert contents(copy) in (of(STATE), of(PLAIN))
        seen.append(contents(copy) == of(PLAIN))
        # And the next save leaves nothing of the killed one.
        save_over(copy, lambda checkpoint: ckpttool.rename_keys(checkpoint, [("^.*layer", "x")]))
        assert os.listdir(copy.parent) == [copy.name]
        if ended:
            break
    assert ended and calls > 4
    assert seen[0] is False and seen[-1] is True


# Others who read meanwhile.


def test_a_reader_who_came_before_keeps_his_names_and_values(path: Path) -> None:
    with ckpttool.open(path) as before:
        strip(path)
        assert {name: tensor.data.read() for name, tensor in before.state().tensors.items()} == of(STATE)


def test_whoever_reads_while_names_change_all_the_time_sees_one_set_of_them(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    state = {f"module.{i}.{'n' * 100}": torch.full((1,), float(i)) for i in range(200)}
    sets = {frozenset(state), frozenset(name.removeprefix("module.") for name in state)}
    save_file(state, path)
    child = os.fork()
    if child == 0:
        try:
            for change in itertools.cycle((ckpttool.strip_prefix, ckpttool.add_prefix)):
                save_over(path, change)
        finally:
            os._exit(1)
    try:
        seen, began = set(), time.monotonic()
        while time.monotonic() < began + 1 or (len(seen) < 2 and time.monotonic() < began + 20):
            with safe_open(path, "pt") as theirs:
                seen.add(frozenset(theirs.keys()))
            with ckpttool.open(path) as checkpoint:
                tensors = checkpoint.state().tensors
                seen.add(frozenset(tensors))
                name = next(iter(tensors))
                value = struct.unpack("<f", tensors[name].data.read())[0]
                assert int(value) == int(name.removeprefix("module.").split(".")[0])
        assert seen == sets
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_the_command_line_renames_in_place(cli: Cli, path: Path) -> None:
    assert cli("strip-prefix", path, path).code == 2  # not without --force
    ran = cli("strip-prefix", path, path, "--force", "--json")
    assert (ran.code, ran.json["keys"], ran.json["renamed"]) == (0, 4, 4)
    assert of(load_file(path)) == of(PLAIN)


def test_no_metadata_may_be_said_as_null_which_the_library_reads(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for header in ({"__metadata__": None, "a": entry}, {"__metadata__": None}):
        raw = json.dumps(header).encode()
        values = bytes(4) if "a" in header else b""
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + values)
        assert load_file(tmp_path / "a.safetensors").keys() == header.keys() - {"__metadata__"}
        with ckpttool.open(tmp_path / "a.safetensors") as checkpoint:
            assert checkpoint.metadata == {}
            ckpttool.save(checkpoint, tmp_path / "b.safetensors", force=True)
    for wrong in (0, False, "", []):
        raw = json.dumps({"__metadata__": wrong, "a": entry}).encode()
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
        with pytest.raises(Damaged, match="is not a map of text to text"):
            ckpttool.open(tmp_path / "a.safetensors")
