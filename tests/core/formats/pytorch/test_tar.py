"""The tar files of torch before 0.1.12, compared with what torch.load reads of them."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import tarfile
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.core.formats.pytorch import tar as torch_tar
from ckpttool.core.tensors.ref import ByteRange, Source
from ckpttool.core.tensors.values import live_tensors
from ckpttool.errors import CkptToolError, Damaged
from tests.support.comparing import assert_same, refused, values
from tests.support.crafting import dict_of, name, program, text, tuple_of
from tests.support.running import within

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of tar files in general

Storages = list[tuple[int, str, torch.Tensor]]  # key, location, elements
Views = list[tuple[int, int, int, int]]  # key, key of the storage, offset, count
Tensors = list[tuple[int, int, tuple[int, ...], tuple[int, ...], int]]  # key, storage, size, stride, offset


def reference(key: int) -> bytes:
    """The opcodes of a reference to a tensor or a storage."""
    return text(str(key)) + b"Q"


CLASSES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.int64: torch.LongStorage,
    torch.uint8: torch.ByteStorage,
}


def storages_member(storages: Storages, views: object) -> bytes:
    out = io.BytesIO()
    pickle.dump(len(storages), out, 2)
    for key, location, elements in storages:
        pickle.dump((key, location, CLASSES[elements.dtype]), out, 2)
        out.write(struct.pack("<q", elements.numel()) + values(elements))
    pickle.dump(views, out, 2)
    return out.getvalue()


def tensors_member(tensors: Tensors) -> bytes:
    out = io.BytesIO()
    pickle.dump(len(tensors), out, 2)
    for key, storage, size, stride, offset in tensors:
        pickle.dump((key, storage, torch.Tensor), out, 2)
        out.write(struct.pack("<ii", len(size), 0))
        out.write(struct.pack(f"<{len(size)}q", *size) + struct.pack(f"<{len(size)}q", *stride))
        out.write(struct.pack("<q", offset))
    return out.getvalue()


def tar(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w:", format=form) as archive:
        for member, raw in members:
            info = tarfile.TarInfo(member)
            info.size, info.mtime = len(raw), 1480000000.25  # a fraction needs an extended header
            archive.addfile(info, io.BytesIO(raw))
    return path


WEIGHT, BIAS = torch.arange(12.0), torch.tensor([1, 2, 3])
ITEMS = text("w") + reference(10) + text("b") + reference(11)
ORDERED = name("collections", "OrderedDict") + b")R(" + ITEMS + b"u"
STORAGES: Storages = [(1, "cpu", WEIGHT), (2, "cpu", BIAS)]
TENSORS: Tensors = [(10, 1, (3, 4), (4, 1), 0), (11, 2, (3,), (1,), 0)]


def members(
    body: bytes = ORDERED, storages: Storages = STORAGES, tensors: Tensors = TENSORS, views: object = ()
) -> dict[str, bytes]:
    facts = {"protocol_version": 1000, "little_endian": True, "type_sizes": {"int": 4}}
    return {
        "sys_info": pickle.dumps(facts, 2),
        "pickle": program(body),
        "tensors": tensors_member(tensors),
        "storages": storages_member(storages, [] if views == () else views),
    }


def saved(path: Path, *parts: Any, form: int = tarfile.PAX_FORMAT) -> Path:
    """Write a file as torch 0.1.11 would have."""
    return tar(path, members(*parts).items(), form)


def both(path: Path) -> tuple[Any, Any]:
    """What torch reads of a file after ckpttool rewrote it, and of the file itself."""
    ckpttool.save(ckpttool.open(path), path.with_suffix(".pt"), force=True)
    return torch.load(path.with_suffix(".pt"), weights_only=False), torch.load(path, weights_only=False)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_state_is_read_as_torch_reads_it(form: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "old.tar", form=form)
    ours, theirs = both(path)
    assert_same(ours, theirs)
    assert type(ours) is OrderedDict and ours["w"].shape == (3, 4)
    assert ckpttool.open(path).format == "torch-tar"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.uint8, torch.int64])
def test_every_element_type_of_that_time_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(6).to(dtype)
    path = saved(tmp_path / "f", dict_of({"a": reference(5)}), [(1, "cpu", raw)], [(5, 1, (2, 3), (3, 1), 0)])
    assert_same(*both(path))


def test_tensors_that_share_a_storage_still_do(tmp_path: Path) -> None:
    tensors: Tensors = [(10, 1, (3, 4), (4, 1), 0), (11, 1, (4, 3), (1, 4), 0), (12, 1, (2,), (1,), 3)]
    names = {"a": 10, "turned": 11, "part": 12, "again": 10}
    body = dict_of({name: reference(key) for name, key in names.items()})
    ours, theirs = both(saved(tmp_path / "f", body, [(1, "cpu", WEIGHT)], tensors))
    assert_same(ours, theirs)
    assert ours["a"] is ours["again"] and ours["a"].data_ptr() == ours["turned"].data_ptr()


def test_tensors_of_a_view_of_a_storage_share_its_memory(tmp_path: Path) -> None:
    tensors: Tensors = [(10, 1, (12,), (1,), 0), (11, 7, (2, 2), (2, 1), 1)]
    body = dict_of({"whole": reference(10), "view": reference(11)})
    ours, theirs = both(saved(tmp_path / "f", body, [(1, "cpu", WEIGHT)], tensors, [(7, 1, 4, 6)]))
    assert torch.equal(ours["view"], torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    assert values(ours["view"]) == values(theirs["view"])
    ours["whole"][5] = 100
    assert ours["view"][0, 0] == 100


def test_a_storage_in_the_tree_is_read(tmp_path: Path) -> None:
    body = dict_of({"s": reference(1), "v": reference(7)})
    ours, theirs = both(saved(tmp_path / "f", body, [(1, "cpu", WEIGHT)], [], [(7, 1, 4, 2)]))
    assert list(ours["s"]) == list(theirs["s"]) and list(ours["v"]) == list(theirs["v"]) == [4.0, 5.0]


def test_a_class_with_its_source_text_is_read(tmp_path: Path) -> None:
    """torch saved modules with the text of their source file, to compare it on loading."""
    source = tuple_of(name("torch.nn.modules.container", "Sequential"), text(""), text("")) + b"Q"
    ours, theirs = both(saved(tmp_path / "f", dict_of({"kind": source, "w": reference(10)})))
    assert ours["kind"] is theirs["kind"] is torch.nn.Sequential


def test_a_whole_model_has_the_names_of_its_state_dict(tmp_path: Path) -> None:
    attributes = {
        "training": b"\x88",
        "_parameters": dict_of({"weight": reference(10), "bias": b"N"}),
        "_buffers": dict_of({"mean": reference(11)}),
        "_modules": b"}",
    }
    body = name("models.net", "Net") + b")\x81" + dict_of(attributes) + b"b"
    state = ckpttool.open(saved(tmp_path / "f", body)).state()
    assert list(state.tensors) == ["weight", "mean"]
    assert values(live_tensors(state.tensors)["weight"]) == values(WEIGHT)


@pytest.mark.parametrize("missing", ["storages", "tensors", "pickle"])
def test_a_tar_without_one_of_its_members_is_damaged(missing: str, tmp_path: Path) -> None:
    parts = members()
    del parts[missing]
    refused(tar(tmp_path / "f", parts.items()), f"without '{missing}'")


def test_a_duplicate_member_is_damaged(tmp_path: Path) -> None:
    parts = [(name, b"") for name in ("pickle", "tensors", "storages", "pickle")]
    refused(tar(tmp_path / "f", parts), "holds 'pickle' twice")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_a_member_that_is_not_a_regular_file_is_damaged(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "f", "w:") as archive:
        info = tarfile.TarInfo("storages")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    refused(tmp_path / "f", "'storages' is not a regular file")


HOSTILE: dict[str, tuple[bytes, Storages, Any, Any]] = {
    "a tensor past its storage": (ORDERED, STORAGES, [(10, 1, (4, 4), (4, 1), 0), TENSORS[1]], ()),
    "a negative offset": (ORDERED, STORAGES, [(10, 1, (3, 4), (4, 1), -1), TENSORS[1]], ()),
    "a negative size": (ORDERED, STORAGES, [(10, 1, (-3, 4), (4, 1), 0), TENSORS[1]], ()),
    "a negative stride": (ORDERED, STORAGES, [(10, 1, (3, 4), (-4, 1), 11), TENSORS[1]], ()),
    "a size that overflows": (ORDERED, STORAGES, [(10, 1, (2**62, 2**62), (0, 0), 0), TENSORS[1]], ()),
    "a storage that is not there": (ORDERED, STORAGES, [(10, 3, (3, 4), (4, 1), 0), TENSORS[1]], ()),
    "a tensor that is not there": (ORDERED, STORAGES, TENSORS[:1], ()),
    "a key that stands twice": (ORDERED, STORAGES, [TENSORS[0], TENSORS[0], TENSORS[1]], ()),
    "a storage that stands twice": (ORDERED, [STORAGES[0], STORAGES[0], STORAGES[1]], TENSORS, ()),
    "a view past its storage": (ORDERED, STORAGES, TENSORS, [(7, 1, 8, 5)]),
    "a view of a view": (ORDERED, STORAGES, TENSORS, [(7, 1, 0, 5), (8, 7, 0, 5)]),
    "a negative view": (ORDERED, STORAGES, TENSORS, [(7, 1, -4, 5)]),
    "views that are no list": (ORDERED, STORAGES, TENSORS, {}),
    "a reference that is no key": (dict_of({"a": text("../x") + b"Q"}), STORAGES, TENSORS, ()),
    "a reference of a thousand digits": (dict_of({"a": text("1" * 1000) + b"Q"}), STORAGES, TENSORS, ()),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_members_that_do_not_fit_together_are_damaged(what: str, tmp_path: Path) -> None:
    refused(saved(tmp_path / "f", *HOSTILE[what]))


@pytest.mark.parametrize("member", ["storages", "tensors"])
@pytest.mark.parametrize("count", [2**62, -1, "x", 3])
def test_a_count_that_the_member_can_not_hold_is_damaged(member: str, count: object, tmp_path: Path) -> None:
    parts = members()
    parts[member] = pickle.dumps(count, 2) + parts[member][len(pickle.dumps(2, 2)) :]
    refused(tar(tmp_path / "f", parts.items()))


def test_more_dimensions_than_torch_has_are_damaged(tmp_path: Path) -> None:
    parts = members()
    at = parts["tensors"].index(struct.pack("<ii", 2, 0))
    parts["tensors"] = parts["tensors"][:at] + struct.pack("<i", 2**31 - 1) + parts["tensors"][at + 4 :]
    refused(tar(tmp_path / "f", parts.items()))


def sealed(raw: bytearray, at: int = 0) -> bytearray:
    """Correct the checksum of the header at `at`."""
    raw[at + 148 : at + 156] = b" " * 8
    raw[at + 148 : at + 156] = b"%06o\0 " % sum(raw[at : at + 512])
    return raw


def header(kind: bytes, size: int) -> bytearray:
    raw = bytearray(512)
    raw[0:1], raw[124:136], raw[156:157], raw[257:265] = b"a", b"%011o\0" % size, kind, b"ustar\x0000"
    return sealed(raw)


def test_an_extended_header_of_digits_is_refused_at_once(tmp_path: Path) -> None:
    """tarfile takes ten seconds for these 100 KB."""
    (tmp_path / "f").write_bytes(header(b"x", 100_000) + b"1" * 100_000 + bytes(352))
    with within(1, time.process_time):
        refused(tmp_path / "f", "extended header")


def test_a_sparse_member_whose_map_goes_on_behind_the_file_is_damaged(tmp_path: Path) -> None:
    raw = header(b"S", 0)
    raw[482], raw[483:495] = 1, b"00000000001\0"
    (tmp_path / "f").write_bytes(sealed(raw))
    refused(tmp_path / "f", "'a' is not a regular file")


@pytest.mark.parametrize("record", [b"15 path=pickle\n", b"9 size=1\n", b"22 GNU.sparse.major=1\n", b"mtime"])
def test_an_extended_header_that_changes_the_next_entry_is_damaged(record: bytes, tmp_path: Path) -> None:
    raw = saved(tmp_path / "f").read_bytes()
    extended = header(b"x", len(record)) + record.ljust(512, b"\0")
    (tmp_path / "f").write_bytes(extended + raw)
    refused(tmp_path / "f", "extended header")


def test_a_tar_of_many_files_is_refused_by_its_first_few(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(header(b"0", 0) + sealed(header(b"x", 0)) * 100_000)
    refused(tmp_path / "f", "many files")


def test_a_binary_size_field_is_read(tmp_path: Path) -> None:
    """GNU tar writes sizes of 8 GB and more as bytes, not as octal digits."""
    raw = bytearray(saved(tmp_path / "f", form=tarfile.GNU_FORMAT).read_bytes())
    with tarfile.open(tmp_path / "f") as archive:
        for member in archive:
            raw[member.offset + 124 : member.offset + 136] = b"\x80" + member.size.to_bytes(11, "big")
            sealed(raw, member.offset)
    (tmp_path / "f").write_bytes(raw)
    assert_same(*both(tmp_path / "f"))


TIMES = st.sampled_from([0, 1480000000.25])
FIELDS = [*range(100), *range(124, 136), 156, *range(257, 265), *range(345, 500)]  # name, size, kind, …


@given(st.data())
def test_entries_are_those_that_tarfile_finds(data: st.DataObject) -> None:
    raw = io.BytesIO()
    names = st.lists(st.sampled_from(["pickle", "ж", "f/" * 60 + "f", "n" * 100]), max_size=4)
    forms = st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
    with tarfile.open(fileobj=raw, mode="w:", format=data.draw(forms)) as archive:
        for member in data.draw(names):
            info = tarfile.TarInfo(member)
            info.size, info.mtime = data.draw(st.sampled_from([0, 1, 511, 512, 513])), data.draw(TIMES)
            archive.addfile(info, io.BytesIO(bytes(info.size)))
    changed = bytearray(raw.getvalue())
    for _ in range(data.draw(st.integers(0, 3))):
        at = 512 * data.draw(st.integers(0, 6))
        byte = data.draw(st.sampled_from(b"\x00\xff\x8017 /x5SLa"))
        changed[at + data.draw(st.sampled_from(FIELDS))] = byte
        sealed(changed, at)
    with tempfile.TemporaryFile() as file:
        file.write(changed)
        file.flush()
        try:
            source = Source("f", os.dup(file.fileno()))
            found = list(torch_tar.entries(ByteRange(source, 0, source.size)))
            with tarfile.open(fileobj=io.BytesIO(changed), mode="r:") as archive:
                theirs = [(m.name, m.offset_data, m.size) for m in archive]
        except (Damaged, tarfile.ReadError):  # tarfile refuses a last extended header
            return
    assert [(name, place.offset, place.nbytes) for name, place in found] == theirs


def test_extended_headers_one_after_another_are_damaged(tmp_path: Path) -> None:
    """tarfile reads them recursively."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 10
    block = info.tobuf(tarfile.GNU_FORMAT) + b"x" * 10 + bytes(502)
    (tmp_path / "f").write_bytes(block * 5000)
    refused(tmp_path / "f")


def test_a_file_cut_short_anywhere_is_damaged(tmp_path: Path) -> None:
    raw = saved(tmp_path / "f").read_bytes()
    with tarfile.open(tmp_path / "f") as archive:
        last = archive.getmember("storages")
    for end in range(512, last.offset_data + last.size, 97):
        (tmp_path / "f").write_bytes(raw[:end])
        refused(tmp_path / "f")


@given(st.data())
def test_a_tar_changed_anywhere_is_read_within_the_file_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = saved(Path(folder) / "f", ORDERED, STORAGES, TENSORS, [(7, 1, 4, 6)])
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
        with contextlib.suppress(CkptToolError), ckpttool.open(path) as checkpoint:
            for _, tensor in checkpoint.tensors():
                assert len(tensor.storage.data.read()) == tensor.storage.nbytes
