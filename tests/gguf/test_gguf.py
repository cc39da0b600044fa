"""GGUF: key-values, names and shapes; values of plain types, and of packed ones block by block."""

from __future__ import annotations

import json
import math
import struct
import sys
import tempfile
import types
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.core.tensors.ref import DTYPES
from ckpttool.errors import CkptToolError, Unsupported, UsageFault
from ckpttool.gguf import reading
from tests.support.comparing import refused
from tests.support.other_files import (
    BF16,
    F16,
    F32,
    I64,
    Q4_0,
    Q8_0,
    Tensor,
    Typed,
    array,
    gguf_file,
    in_several_files,
    number,
    text,
)
from tests.support.running import Cli, assert_says

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(3, 64)).astype("<f4")
BLOCKS = RANDOM.integers(0, 256, (3 * 64 // 32, 34), np.uint8)
BLOCKS[:, 1] &= 0x3F  # no scale is infinite or NaN

PLAIN = {"embed.weight": Tensor(F32, (3, 64), ROWS.tobytes()), "count": Tensor(I64, (), struct.pack("<q", 7))}
MIXED = {**PLAIN, "blk.0.weight": Tensor(Q8_0, (3, 64), BLOCKS.tobytes())}
VALUES = [("general.architecture", "llama"), ("llama.block_count", 1)]


def q8_0(blocks: Any) -> Any:
    """The values of Q8_0: each block is a float16, and 32 int8 that it scales."""
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype("f4")
    return (scales * np.ascontiguousarray(blocks[:, 2:]).view("i1").astype("f4")).reshape(-1)


class _Kinds(IntEnum):
    Q8_0 = 8


@pytest.fixture
def unpacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand in for the package gguf, which may not be here; return how many blocks each call got."""
    calls: list[int] = []

    def dequantize(raw: Any, kind: _Kinds) -> Any:
        calls.append(raw.size // 34)
        return q8_0(raw.reshape(-1, 34)).reshape(1, -1)

    package, quants = types.ModuleType("gguf"), types.ModuleType("gguf.quants")
    package.GGMLQuantizationType, quants.dequantize = _Kinds, dequantize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gguf", package)
    monkeypatch.setitem(sys.modules, "gguf.quants", quants)
    return calls


def put(path: Path, *given: Any, **claims: Any) -> Path:
    path.write_bytes(gguf_file(*given, **claims))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_plain_tensors_are_places_in_the_file(version: int, tmp_path: Path) -> None:
    found = ckpttool.open(put(tmp_path / "m.gguf", PLAIN, VALUES, version=version))
    tensors = found.state().tensors
    assert (found.format, [*tensors]) == ("gguf", ["embed.weight", "count"])
    assert all(tensor.is_plain for tensor in tensors.values())
    assert tensors["embed.weight"].numpy().tobytes() == ROWS.tobytes()
    assert (tensors["count"].shape, int(tensors["count"].numpy())) == ((), 7)
    assert dict(found.metadata) == {"general.architecture": "llama", "llama.block_count": "1"}


def test_every_plain_type_is_read(tmp_path: Path) -> None:
    for kind, name in reading.PLAIN.items():
        size = DTYPES[name].itemsize
        path = put(tmp_path / "m.gguf", {"a": Tensor(kind, (2, 3), bytes(range(6 * size)))})
        tensor = ckpttool.open(path).state().tensors["a"]
        assert (tensor.dtype.name, tensor.shape) == (name, (2, 3))
        assert tensor.storage.data.read() == bytes(range(6 * size))


def test_a_big_endian_file_is_read(tmp_path: Path, cli: Cli) -> None:
    swapped = {"a": Tensor(F32, (3, 64), ROWS.byteswap().tobytes())}
    path = put(tmp_path / "m.gguf", swapped, VALUES, order=">")
    assert ckpttool.open(path).state().tensors["a"].numpy().tobytes() == ROWS.tobytes()
    put(tmp_path / "little.gguf", {"a": Tensor(F32, (3, 64), ROWS.tobytes())}, VALUES)
    assert cli("diff", path, tmp_path / "little.gguf").code == 0


def test_what_is_needed_to_unpack_is_asked_once_for_each_type(unpacks: list[int], tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf", {str(i): Tensor(Q8_0, (0,), b"") for i in range(1000)})
    with ckpttool.open(path) as checkpoint:
        ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    assert unpacks == [1]


def test_packed_values_of_a_big_endian_file_are_named(tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf", {"a": Tensor(Q8_0, (32,), bytes(34))}, order=">")
    with pytest.raises(Unsupported, match="'a' is Q8_0, which is read in little-endian files alone"):
        ckpttool.open(path).state().tensors["a"].numpy()


@pytest.mark.usefixtures("unpacks")
def test_packed_values_are_those_of_their_formula(tmp_path: Path, cli: Cli) -> None:
    path = put(tmp_path / "m.gguf", MIXED, VALUES)
    with ckpttool.open(path) as found:
        tensor = found.state().tensors["blk.0.weight"]
        assert (tensor.dtype.name, tensor.shape, tensor.is_plain) == ("float32", (3, 64), False)
        assert tensor.numpy().tobytes() == q8_0(BLOCKS).tobytes()
        ckpttool.save(found, tmp_path / "out.safetensors", verify=True)
    again = ckpttool.open(tmp_path / "out.safetensors")
    assert again.state().tensors["blk.0.weight"].numpy().tobytes() == q8_0(BLOCKS).tobytes()
    assert cli("diff", path, tmp_path / "out.safetensors").code == 0
    assert cli("digest", path).out.split()[0] == cli("digest", tmp_path / "out.safetensors").out.split()[0]


@pytest.mark.parametrize(("start", "count"), [(0, 1), (31, 2), (33, 90), (0, 192), (191, 1), (64, 0)])
def test_any_stretch_of_packed_values_can_be_made(
    start: int, count: int, unpacks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE", 64)
    tensor = ckpttool.open(put(tmp_path / "m.gguf", MIXED)).state().tensors["blk.0.weight"]
    made = tensor.storage.data.part(4 * start, 4 * count).read()
    assert made == q8_0(BLOCKS)[start : start + count].tobytes()
    assert max(unpacks, default=0) <= 2  # no more blocks at a time than PIECE has


def test_without_the_package_everything_but_packed_values_is_there(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = put(tmp_path / "m.gguf", MIXED, VALUES)
    shown = cli("inspect", path).out
    assert "stored as   1 F32, 1 I64, 1 Q8_0" in shown and "general.architecture: llama" in shown
    assert cli("convert", path, tmp_path / "out.safetensors", "--only", "embed*").code == 0
    for more in ((), ("--dry-run",), ("--dry-run", "--dtype", "bf16")):
        ran = cli("convert", path, tmp_path / "all.safetensors", *more)
        assert_says(ran, 2, "the values of 'blk.0.weight' are packed as Q8_0, and need the package gguf")
        assert ckpttool.errors.install("gguf") in ran.err and not (tmp_path / "all.safetensors").exists()
    with pytest.raises(UsageFault, match="need the package gguf"):
        ckpttool.open(path).state().tensors["blk.0.weight"].numpy()


def test_values_of_all_types_are_those_of_the_library(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    assert {kind: (each.name, *gguf.GGML_QUANT_SIZES[each]) for kind in reading.PACKED for each in
            [gguf.GGMLQuantizationType(kind)]} == reading.PACKED  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(["a"] * 100)
    expected = {}
    for kind in gguf.GGMLQuantizationType:
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        if elements > 1:
            raw = RANDOM.integers(0, 256, (3, 2 * nbytes), np.uint8)
            writer.add_tensor(kind.name, raw, raw_dtype=kind)
            with np.errstate(all="ignore"):
                try:
                    expected[kind.name] = gguf.quants.dequantize(raw, kind)
                except NotImplementedError:
                    expected[kind.name] = None
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = ckpttool.open(tmp_path / "m.gguf").state().tensors
    assert len(expected) > 20 and tensors.keys() == expected.keys()
    for name, values in expected.items():
        if values is None:
            with pytest.raises(Unsupported, match=f"'{name}' is {name}, which gguf does not unpack"):
                tensors[name].numpy()
        else:
            assert tensors[name].shape == values.shape
            assert tensors[name].numpy().tobytes() == values.tobytes(), name


# Key-values.


def test_key_values_are_kept_as_text_or_named(tmp_path: Path, cli: Cli) -> None:
    values = [
        *VALUES,
        ("rope", number(6, "f", 1e-5)),
        ("wide", number(12, "d", 0.1)),
        ("low", number(11, "q", -3)),
        ("flag", Typed(7, b"\1")),
        ("few", array(5, [struct.pack("<i", n) for n in (1, -2)])),
        ("nested", array(9, [array(8, [text("a")]).raw] * 2)),
        ("tokens", array(8, [text(f"t{n}") for n in range(100)])),
        ("scores", array(6, [bytes(4)] * 100)),
        ("many", array(9, [array(8, [text("a")]).raw] * 100)),
        ("odd", Typed(8, text(b"\xff"))),
        ("a tie", "embed.weight"),
    ]
    path = put(tmp_path / "m.gguf", PLAIN, values)
    found = ckpttool.open(path)
    kept = {"rope": "1e-05", "wide": "0.1", "low": "-3", "flag": "true", "few": "[1, -2]"}
    kept |= {"nested": '[["a"], ["a"]]', "general.architecture": "llama", "llama.block_count": "1"}
    assert dict(found.metadata) == kept
    named = ["tokens' (100 texts)", "scores' (100 numbers)", "many' (100 arrays)"]
    named += ["odd' (1 bytes that are not UTF-8)", "a tie' ('embed.weight')"]
    assert found.unread == tuple(f"metadata '{text}" for text in named)
    ran = cli("convert", path, tmp_path / "out.safetensors", "--json")
    assert ran.json["left_out"] == [*found.unread]
    again = ckpttool.open(tmp_path / "out.safetensors")
    assert (dict(again.metadata), [*again.state().tensors]) == (kept, ["count", "embed.weight"])
    ran = cli("convert", path, tmp_path / "out.pt", "--json")
    assert {*ran.json["left_out"]} == {*found.unread, *(f"metadata '{key}'" for key in kept)}


# What ggml refuses, and what would cost much.

ONE = [("a", Tensor(F32, (8,), bytes(32)))]
TWO = [*ONE, ("b", Tensor(F32, (8,), bytes(32)))]


BROKEN = {
    "two tensors of one name": (gguf_file(ONE * 2), "has the tensor 'a' twice"),
    "two keys of one name": (gguf_file(ONE, [("k", 1)] * 2), "has the key 'k' twice"),
    "unaligned": (gguf_file(TWO, offsets=(0, 33)), "lies at byte 33 of the values, and should at 32"),
    "overlapping": (gguf_file(TWO, offsets=(0, 0)), "lies at byte 0 of the values, and should at 32"),
    "a gap": (gguf_file(TWO, offsets=(0, 64)), "lies at byte 64 of the values, and should at 32"),
    "a billion tensors": (gguf_file(ONE, counts=(10**9, 0)), "claims 1000000000 tensors"),
    "a billion keys": (gguf_file(ONE, [("k", 1)], counts=(1, 10**9)), "and 1000000000 key-values"),
    "2^64 - 1 tensors": (gguf_file(ONE, counts=(2**64 - 1, 0)), "claims 1844"),
    "fewer tensors than said": (gguf_file([], counts=(1, 0)), "more than its 32 bytes can hold"),
    "a text without an end": (gguf_file(ONE, [("k", Typed(8, struct.pack("<Q", 2**63)))]), "cut short"),
    "a key of 2^64 - 1": (gguf_file(ONE, [("k", 1)]).replace(text("k"), b"\xff" * 9), "a key has 18446"),
    "a name not UTF-8": (gguf_file(ONE).replace(text("a"), text(b"\xff"), 1), "is not UTF-8"),
    "an array of 2^62 texts": (gguf_file([], [("k", array(8, [], 2**62))]), "is cut short"),
    "an array of 2^62 numbers": (gguf_file([], [("k", array(12, [], 2**62))]), "is cut short"),
    "an array of 2^62 arrays": (gguf_file([], [("k", array(9, [], 2**62))]), "is cut short"),
    "a value of unknown type": (gguf_file([], [("k", Typed(77, b""))]), "of unknown type 77"),
    "a bool that is 2": (gguf_file([], [("k", Typed(7, b"\2"))]), "a bool that is 2"),
    "an alignment of 0": (gguf_file(ONE, [("general.alignment", 0)]), "no power of two: 0"),
    "an alignment of 24": (gguf_file(ONE, [("general.alignment", 24)]), "no power of two: 24"),
    "a text as alignment": (gguf_file(ONE, [("general.alignment", "32")]), "no power of two: 32"),
    "five axes": (gguf_file([("a", Tensor(F32, (1,) * 5, bytes(4)))]), "has 5 axes"),
    "2^32 - 1 axes": (gguf_file(ONE).replace(text("a") + b"\1\0\0\0", text("a") + b"\xff" * 4), "axes"),
    "a shape of 2^80": (gguf_file([("a", Tensor(F32, (2**40, 2**40), b""))]), "larger than any file"),
    "rows of half blocks": (gguf_file([("a", Tensor(Q4_0, (2, 16), bytes(18)))]), "no whole blocks"),
    "a packed number": (gguf_file([("a", Tensor(Q4_0, (), bytes(18)))]), "no whole blocks of Q4_0"),
    "values cut short": (gguf_file(ONE)[:-1], "1 bytes of tensor 'a' are missing"),
    }  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_breaks_a_rule_is_refused(what: str, tmp_path: Path) -> None:
    raw, said = BROKEN[what]
    (tmp_path / "m.gguf").write_bytes(raw)
    refused(tmp_path / "m.gguf", said)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (gguf_file([("a", Tensor(4, (32,), bytes(20)))]), "has the type 4, which is not known here"),
        (gguf_file([("a", Tensor(99, (32,), bytes(20)))]), "has the type 99, which is not known here"),
        (gguf_file(ONE, version=1), "is a GGUF of version 1"),
        (gguf_file(ONE, version=4), "is a GGUF of version 4, and 2 and 3 are read"),
        (gguf_file(ONE, version=0), "is a GGUF of version 0"),
    ],
)
def test_what_is_not_known_is_named(raw: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(raw)
    refused(tmp_path / "m.gguf", said, Unsupported)


def test_long_names_are_refused_and_long_texts_named(tmp_path: Path) -> None:
    long = 1 << 20
    refused(put(tmp_path / "m.gguf", [], [("k" * long, 1)]), "a key has 1048576 bytes, and may have 65535")
    refused(put(tmp_path / "m.gguf", [("n" * long, ONE[0][1])]), "a tensor's name has 1048576 bytes")
    found = ckpttool.open(put(tmp_path / "m.gguf", ONE, [("kept", "t" * long), ("k", "t" * (long + 1))]))
    assert (len(found.metadata["kept"]), found.unread) == (long, ("metadata 'k' (1048577 bytes of text)",))


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    nested = array(4, [])
    for _ in range(10_000):
        nested = Typed(9, struct.pack("<IQ", 9, 1) + nested.raw)
    refused(put(tmp_path / "m.gguf", [], [("k", nested)]), "nested more than 4 deep", Unsupported)


def test_a_file_of_nothing_but_a_vocabulary_is_read(tmp_path: Path, cli: Cli) -> None:
    path = put(tmp_path / "v.gguf", [], [*VALUES, ("tokens", array(8, [text("t")] * 200_000))])
    assert "metadata 'tokens' (200000 texts)" in cli("inspect", path).out
    assert ckpttool.open(path).tree == {}


def test_another_alignment_moves_the_values(tmp_path: Path) -> None:
    for alignment in (1, 8, 256):
        values = [("general.alignment", alignment)]
        path = put(tmp_path / "m.gguf", PLAIN, values, alignment=alignment)
        assert ckpttool.open(path).state().tensors["embed.weight"].numpy().tobytes() == ROWS.tobytes()


# A model in several files.


def test_any_file_of_several_opens_all(tmp_path: Path, cli: Cli) -> None:
    paths = in_several_files(tmp_path)
    for path in paths:
        ran = cli("inspect", path, "--json")
        assert (ran.code, ran.err) == (0, "")
        assert [each["name"] for each in ran.json["tensors"]] == ["0.weight", "1.weight", "2.weight"]
        assert ran.json["metadata"]["general.architecture"] == "llama"
        assert ran.json["bytes"] == sum(each.stat().st_size for each in paths)
    assert len({cli("digest", path).out.split()[0] for path in paths}) == 1


def test_a_missing_or_foreign_file_of_several_is_named(tmp_path: Path) -> None:
    first, second, third = in_several_files(tmp_path)
    second.write_bytes(third.read_bytes())
    refused(first, "its file 'm-00002-of-00003.gguf' says that it is another one's part")
    second.unlink()
    refused(third, "its file 'm-00002-of-00003.gguf' can't be opened: no such file")
    first.rename(tmp_path / "other.gguf")
    refused(tmp_path / "other.gguf", "is file 1 of the 3 of a model", Unsupported)


def test_a_file_of_several_that_repeats_a_tensor_is_refused(tmp_path: Path) -> None:
    first, second = in_several_files(tmp_path, 2)
    second.write_bytes(second.read_bytes().replace(b"1.weight", b"0.weight"))
    refused(first, "tensor '0.weight' is in two of its files")


@pytest.mark.parametrize(("no", "count"), [(3, 3), (5, 2), (1, 0), (0, 65_535)])
def test_a_lie_about_the_number_of_files_is_refused(no: int, count: int, tmp_path: Path) -> None:
    split = [("split.no", number(2, "H", no)), ("split.count", number(2, "H", count))]
    path = put(tmp_path / "m-00001-of-00003.gguf", ONE, split)
    refused(path, "is file|says that it is", CkptToolError)


def test_inspect_shows_what_is_in_it_as_json(tmp_path: Path, cli: Cli) -> None:
    ran = cli("inspect", put(tmp_path / "m.gguf", MIXED, VALUES), "--json")
    assert (ran.json["format"], ran.json["packed"]) == ("gguf", {"F32": 1, "I64": 1, "Q8_0": 1})
    assert ran.json["dtypes"] == {"float32": 2, "int64": 1}
    assert json.loads(ran.out)["unread"] == []


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
SCALARS = st.one_of(
    TEXTS.map(lambda value: (Typed(8, text(value)), value)),
    st.integers(0, 2**64 - 1).map(lambda value: (number(10, "Q", value), str(value))),
    st.integers(-(2**31), 2**31 - 1).map(lambda value: (number(5, "i", value), str(value))),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(
        lambda value: (number(6, "f", value), value)
    ),
)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(st.dictionaries(TEXTS, SCALARS, max_size=5), st.dictionaries(TEXTS, SHAPES, max_size=5))
def test_whatever_is_written_is_read(values: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = {name: Tensor(F16, shape, bytes(2 * math.prod(shape))) for name, shape in shapes.items()}
    pairs = [(key, value) for key, (value, _) in values.items()]
    with tempfile.TemporaryDirectory() as folder:
        found = ckpttool.open(put(Path(folder) / "m", tensors, pairs))
        assert {name: tensor.shape for name, tensor in found.state().tensors.items()} == shapes
        for key, (_, meant) in values.items():
            kept = found.metadata.get(key)
            if isinstance(meant, float) and kept is not None:
                assert struct.pack("<f", float(kept)) == struct.pack("<f", meant)
            else:
                assert kept == meant or any(f"'{key[:80]}'" in each for each in found.unread)


def test_half_types_keep_their_bits(tmp_path: Path) -> None:
    raw = bytes(range(64))
    tensors = {"half": Tensor(F16, (32,), raw), "brain": Tensor(BF16, (2, 16), raw)}
    found = ckpttool.open(put(tmp_path / "m.gguf", tensors)).state().tensors
    assert [tensor.numpy().tobytes() for tensor in found.values()] == [raw, raw]
