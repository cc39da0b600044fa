"""`scan`: each attack of the corpus is found, honest files are safe, and what can't be looked at is named."""

from __future__ import annotations

import gc
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.scanning import pickles, unpacking
from ckpttool.scanning import scan as scans
from ckpttool.scanning.scan import scan
from ckpttool.scanning.verdicts import DANGEROUS, SAFE, UNKNOWN, UNREADABLE, Scanned
from tests.support.crafting import call, dict_of, name, program, safetensors_file, storage, text, torch_zip
from tests.support.running import ROOT, open_files, within
from tests.support.scan_corpus import ATTACKS, HONEST, MKDIR, PAYLOAD, tarred, written, zipped

LOGS = program(name("logging", "FileHandler") + text("x") + b"\x85R")


def one(path: Path | str) -> Scanned:
    (found,) = scan(path)
    return found


def of(data: bytes, path: Path) -> Scanned:
    path.write_bytes(data)
    return one(path)


@pytest.fixture(scope="module")
def attacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    for library in ("torch", "joblib"):
        pytest.importorskip(library, reason="writes a part of the corpus")
    return written(ATTACKS, tmp_path_factory.mktemp("attacks"))


# The corpus.


def test_every_attack_is_found_and_is_dangerous_or_unknown(attacks: dict[str, Path]) -> None:
    verdicts = {title: one(path).verdict for title, path in attacks.items()}
    assert {title: each for title, each in verdicts.items() if each not in (DANGEROUS, UNKNOWN)} == {}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_attacks_run_when_they_are_loaded(attacks: dict[str, Path]) -> None:
    """The corpus is what it says: Python, torch, joblib and NumPy run the code in it."""
    loaded = {title: [str(path), ATTACKS[title].how] for title, path in attacks.items() if ATTACKS[title].how}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.scan_loading"],
        input=json.dumps(loaded),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    refused = {"torch zip, a folder's bit"}  # of torch itself
    assert {*loaded} - {*json.loads(ran.stdout.splitlines()[-1])} <= refused


NOT_SAFE = {  # by what they are: code, a call that unpickles its bytes, a class of a package
    "TorchScript": UNKNOWN,
    "pickle of a tensor": DANGEROUS,
    "scikit-learn": UNKNOWN,
}


def test_honest_files_are_safe(tmp_path: Path) -> None:
    for library in ("torch", "joblib", "sklearn"):
        pytest.importorskip(library, reason="writes a part of the corpus")
    found = {title: one(path) for title, path in written(HONEST, tmp_path).items()}
    assert {title: each.verdict for title, each in found.items() if each.verdict != SAFE} == NOT_SAFE
    assert [each for each in found.values() if each.problems] == []


@pytest.mark.parametrize("size", [0x80, 0x280, 0x178, 0x9C78, 0x8B1F])
def test_the_size_with_which_safetensors_begins_is_not_taken_for_anything(size: int, tmp_path: Path) -> None:
    safetensors_file(tmp_path / "a.safetensors", b"{}".ljust(size))
    assert one(tmp_path / "a.safetensors").verdict == SAFE


# What is said.


def test_a_name_is_said_with_the_way_to_it(tmp_path: Path) -> None:
    data = zipped("x.tar", tarred("y.pkl.gz", gzip.compress(PAYLOAD)), zipfile.ZIP_DEFLATED)
    (finding,) = of(data, tmp_path / "a.zip").found
    assert (finding.name, finding.where) == ("os.mkdir", "x.tar > y.pkl.gz > gzip")


def test_dangerous_names_come_first_and_decide(tmp_path: Path) -> None:
    found = of(LOGS + PAYLOAD, tmp_path / "a.pkl")
    assert (found.verdict, found.names, found.pickles) == (DANGEROUS, ("os.mkdir", "logging.FileHandler"), 2)
    assert of(LOGS, tmp_path / "b.pkl").verdict == UNKNOWN


@pytest.mark.parametrize(
    ("data", "counts"),
    [
        (b"cmine\nrun\n(tR\xff", True),  # was called before the end broke off
        (b"cmine\nrun\nq\x00.", True),  # ends as a pickle does
        (b"cos\nsystem\n\xff", True),  # of what attacks use
        (b"cat\ndog\n\xff", False),  # a list of words
        (b"class A:\n  os.system\n", False),
        (b"(in English)\nand more words\n", False),  # (, i, and the two lines of a name
        (b"Introduction\n", False),
        (b"good morning\n", False),
        (b"L2 norm\n", False),
        (b"MODULE char_test\n", False),  # two bytes are a number, which nothing can be appended to
    ],
)
def test_names_of_what_begins_in_no_way_count_where_it_is_a_pickle(
    data: bytes, counts: bool, tmp_path: Path
) -> None:
    assert (of(data, tmp_path / "a.bin").verdict != SAFE) == counts


def _of_bytes(raw: bytes) -> bytes:
    """Text that only Python makes: what `str(raw, "ascii")` returns."""
    return call(name("builtins", "str"), b"B" + struct.pack("<I", len(raw)) + raw, text("ascii"))


_MKDIR = b"cos\nmkdir\n(S'canary'\ntR."
# Before the call stands what Python's machine takes, and the inert one does not, or did not.
GOING_ON = {
    "a number in base 16": b"I0x1\n0" + _MKDIR,
    "a number behind a space": b"I 1\n0" + _MKDIR,
    "a number with a separator": b"I1_0\n0" + _MKDIR,
    "a long number in base 16": b"L0x10L\n0" + _MKDIR,
    "a number in base 8": b"I010\n0" + _MKDIR,
    "a number of many digits": b"I0x" + b"1" * 5000 + b"\n0" + _MKDIR,
    "an index behind a space": b"Np 1\n0" + _MKDIR,
    "an index with a sign": b"Np+1\n0" + _MKDIR,
    "an integer before a NUL": b"I1\0one\n0" + _MKDIR,
    "no integer before a NUL": b"I\0one\n0" + _MKDIR,
    "a long integer before a NUL": b"L1\0oneL\n0" + _MKDIR,
    "a fraction before a NUL": b"F1.5\0one\n0" + _MKDIR,
    "an index before a NUL": b"Np1\0one\n0" + _MKDIR,
    "a reference before a NUL": b"Np1\n0g1\0one\n0" + _MKDIR,
    "no state for a list": b"]Nb0" + _MKDIR,
    "no items appended to a number": b"K\0(e(u0" + _MKDIR,
    "items appended to bytes": b"\x96" + bytes(8) + b"(K\x01e0" + _MKDIR,
    "an item of a list": b"]NaK\0K\1s0" + _MKDIR,
    "a state set twice": b"ctypes\nSimpleNamespace\n(tR}b}b0" + _MKDIR,
    "a deep key": b"})" + b"\x85" * 60 + b"Ns0" + _MKDIR,
    "many sets": b"\x8f0" * 800_000 + _MKDIR,
    "a long line": b"S'" + bytes(17 << 20) + b"'\n0" + _MKDIR,
    "a name of computed text": _of_bytes(b"os") + _of_bytes(b"mkdir") + b"\x93(S'canary'\ntR.",
    "computed arguments": b"cbuiltins\nlist\ncbuiltins\ntuple\n(]tRR0"
    + (_of_bytes(b"os") + _of_bytes(b"mkdir") + b"\x93(S'canary'\ntR."),
}


@pytest.mark.parametrize("what", GOING_ON)
def test_a_pickle_that_begins_in_no_way_is_never_safe_where_python_goes_on(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (DANGEROUS,) if "NUL" in what else (DANGEROUS, UNKNOWN)
    assert of(GOING_ON[what], tmp_path / "a.bin").verdict in expected
    monkeypatch.chdir(tmp_path)
    pickle.loads(GOING_ON[what])
    assert (tmp_path / "canary").is_dir()


def test_so_is_one_that_is_a_file_of_safetensors_too(tmp_path: Path) -> None:
    attack = GOING_ON["a name of computed text"]
    quoted = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    size = b"(U\x08\0\0\0\0\0"  # as a pickle: a group, and text of five bytes of this and three of the header
    header = (quoted[:3] + attack).ljust(int.from_bytes(size, "little"))
    path = tmp_path / "a.safetensors"
    assert of(size + header, path).verdict == UNKNOWN


@pytest.mark.parametrize("protocol", range(6))
def test_names_before_a_broken_end_count(protocol: int, tmp_path: Path) -> None:
    whole = pickle.dumps([os.getcwd, 1], protocol)
    for end in (len(whole) - 1, len(whole) - 2):
        found = of(whole[:end], tmp_path / "a.pkl")
        assert (found.verdict, found.names) == (DANGEROUS, ("posix.getcwd",))
        assert found.problems


@given(st.binary(max_size=40), st.sampled_from([b"", b"\x80\x02", b"\x80\x04", b"PK\x03\x04", b"x\x9c"]))
def test_no_bytes_raise_anything(tmp_path_factory: pytest.TempPathFactory, data: bytes, begin: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.bin"
    assert of(begin + data, path).verdict in (DANGEROUS, UNKNOWN, SAFE, UNREADABLE)


# What can't be looked at.

LZMA_ZIP = zipped("x.pkl", PAYLOAD, zipfile.ZIP_LZMA)
BROKEN: dict[str, tuple[bytes, str]] = {  # no loader opens them either
    "a.7z": (b"7z\xbc\xaf'\x1c" + bytes(32), "7z archive"),
    "a.rar": (b"Rar!\x1a\x07\x00", "RAR archive"),
    "a.pt": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "git lfs pull"),
    "b.pt": (b"", "is empty"),
    "c.pt": (b"<!doctype html>", "is an HTML page"),
    "d.gz": (gzip.compress(bytes(2000))[:-9], "cut short"),
    "e.gz": (b"\x1f\x8b\x08\x00" + bytes(30), "damaged stream"),
    "h.tar": (tarred("x", b"1" * 500)[:600], "cut short"),
    "j.pkl": (b"\x80\x04\x95", "cut short"),
}
CLOSED: dict[str, tuple[bytes, str]] = {  # a loader might open them
    "a.zst": (b"\x28\xb5\x2f\xfd\x00", "zstd"),
    "b.zst": (b"\x5e\x2a\x4d\x18\x04\0\0\0abcd\x28\xb5\x2f\xfd\x00", "zstd"),
    "a.lz4": (b"\x04\x22\x4d\x18\x00", "lz4"),
    "b.lz4": (b"\x02\x21\x4c\x18\x00", "lz4"),
    "f.lzma": (b"\x5d\0\0" + struct.pack("<H", 0x8000) + b"\xff" * 40, "more memory"),  # 2 GiB
    "g.zip": (LZMA_ZIP, "method 14"),
    "i.npy": (b"\x93NUMPY\x01\x00\x06\x00{}\n   ", "header"),
}


@pytest.mark.parametrize("called", [*BROKEN, *CLOSED])
def test_what_cannot_be_looked_at_is_not_safe_and_says_why(called: str, tmp_path: Path) -> None:
    data, why = (BROKEN | CLOSED)[called]
    found = of(data, tmp_path / called)
    assert found.verdict == (UNKNOWN if called in CLOSED else UNREADABLE)
    assert any(why in problem.reason for problem in found.problems), found.problems


def test_what_stands_before_the_damage_counts(tmp_path: Path) -> None:
    rest = os.urandom(5000)
    found = of(gzip.compress(PAYLOAD + rest)[:3000], tmp_path / "a.gz")
    assert (found.verdict, found.names) == (DANGEROUS, ("os.mkdir",))
    assert found.problems


def test_what_would_grow_without_bound_is_unpacked_up_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "SMALL", 1 << 20)
    for data in (gzip.compress(bytes(1 << 23)), zipped("x", bytes(1 << 23), zipfile.ZIP_DEFLATED)):
        found = of(data, tmp_path / "a.bin")
        assert found.verdict == UNKNOWN and "would grow" in found.problems[0].reason


def test_a_bomb_of_bombs_is_bounded_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "SMALL", 1 << 20)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(12):
            archive.writestr(str(number), gzip.compress(bytes(1 << 18)))
    with within(5, time.process_time):
        assert of(gzip.compress(out.getvalue()), tmp_path / "a.gz").verdict == UNKNOWN


def test_containers_in_containers_are_looked_into_up_to_a_depth(tmp_path: Path) -> None:
    data, depth = PAYLOAD, 0
    for depth in range(1, 200):
        data = zipped("x.zip", data)
        if depth == 10:
            assert of(data, tmp_path / "a.zip").verdict == DANGEROUS
    found = of(data, tmp_path / "a.zip")
    assert found.verdict == UNKNOWN and "nested" in found.problems[0].reason


@pytest.mark.parametrize("mark", [b"PK\x03\x04", b"PK\x05\x06"])
def test_the_mark_of_a_zip_alone_is_unreadable(tmp_path: Path, mark: bytes) -> None:
    assert of(mark, tmp_path / "a.zip").verdict == UNREADABLE


def test_thousands_of_zips_in_a_zip_take_no_time_to_speak_of(tmp_path: Path) -> None:
    inner, out = zipped("x.txt", b"text"), io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(2000):
            archive.writestr(f"{number}.zip", inner)
        archive.writestr("last.zip", zipped("x.pkl", PAYLOAD))
    with within(10, time.process_time):
        assert of(out.getvalue(), tmp_path / "a.zip").found[0].where == "last.zip > x.pkl"


def test_very_many_pickles_one_after_another_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "MAX_IN_A_ROW", 50)
    assert of(b"\x80\x02N." * 50, tmp_path / "a.pkl").verdict == SAFE
    assert "one after another" in of(b"\x80\x02N." * 51, tmp_path / "a.pkl").problems[0].reason


def test_a_pickle_longer_than_is_read_is_said_and_what_comes_before_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "MAX_PICKLE", 1 << 16)
    long = b"B" + struct.pack("<I", 1 << 17) + bytes(1 << 17)
    found = of(program(long + b"0" + MKDIR, 3), tmp_path / "a.pkl")
    assert found.verdict == UNKNOWN and "longer than" in found.problems[0].reason
    assert of(program(MKDIR + long, 3), tmp_path / "a.pkl").names == ("os.mkdir",)


def test_of_a_pickle_that_was_packed_small_the_beginning_is_read(tmp_path: Path) -> None:
    padding = b"B" + struct.pack("<I", 1 << 21) + bytes(1 << 21) + b"0"
    for pack in (gzip.compress, lambda data: zipped("x.pkl", data, zipfile.ZIP_DEFLATED)):
        assert of(pack(program(MKDIR + b"0" + padding + b"N", 3)), tmp_path / "a.bin").names == ("os.mkdir",)
        found = of(pack(program(padding + MKDIR, 3)), tmp_path / "a.bin")
        assert found.verdict == UNKNOWN and "longer than" in found.problems[0].reason
    assert of(gzip.compress(b"one two, " * (1 << 18)), tmp_path / "a.bin").verdict == SAFE


# A pickle of one opcode after another: they are 2 here and 30 million in a file of 60 MB.
IN_VAIN = {
    "none": b"N0",
    "lists": b"]0",
    "tuples": b"(t",
    "integers": b"I1\n0",
    "twins": b"20",
    "memo": b"q\0",
}


@pytest.mark.parametrize("what", IN_VAIN)
def test_steps_without_end_are_followed_up_to_a_number(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "MAX_STEPS", 100_000)
    unit = IN_VAIN[what]
    data = program(b"N" + unit * (2_000_000 // len(unit)) + MKDIR)
    with within(6, time.process_time):
        found = of(data, tmp_path / "a.pkl")
        assert found.verdict == UNKNOWN and "more steps" in found.problems[0].reason
        row = program(b"N" + unit * 1000) * 200
        assert of(row + PAYLOAD, tmp_path / "b.pkl").verdict == UNKNOWN  # the steps are those of all
    assert of(program(b"N" + unit * 1000 + b"0" + MKDIR), tmp_path / "c.pkl").verdict == DANGEROUS


def test_60_mb_of_steps_take_seconds(tmp_path: Path) -> None:
    with within(40, time.process_time):
        assert of(b"\x80\x02" + b"N0" * 30_000_000 + b"N.", tmp_path / "a.pkl").verdict == UNKNOWN


def test_a_fault_keeps_no_buffer_until_a_collection(tmp_path: Path) -> None:
    """A command collects no garbage, and a file may have thousands of damaged streams."""
    (tmp_path / "a.gz").write_bytes(gzip.compress(os.urandom(5000))[:4000])
    gc.collect()
    gc.disable()
    try:
        assert one(tmp_path / "a.gz").verdict == UNREADABLE
        assert [each for each in gc.get_objects() if isinstance(each, unpacking.Damaged)] == []
    finally:
        gc.enable()


# Storages of torch.


def test_storages_of_numbers_are_not_taken_for_pickles(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    data = bytearray(PAYLOAD + bytes(-len(PAYLOAD) % 4))
    torch.save(torch.frombuffer(data, dtype=torch.float32), tmp_path / "a.pt")
    assert one(tmp_path / "a.pt").verdict == SAFE
    torch.save(torch.frombuffer(data, dtype=torch.uint8), tmp_path / "b.pt")
    assert one(tmp_path / "b.pt").found[0].where == "b/data/0"


def test_a_pickle_is_looked_at_though_another_calls_it_numbers(tmp_path: Path) -> None:
    torch_zip(tmp_path / "a.pt", dict_of({"w": storage(1, key="evil.pkl")}), {"evil.pkl": PAYLOAD})
    assert one(tmp_path / "a.pt").names == ("os.mkdir",)


def test_records_that_nothing_refers_to_are_looked_at(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", dict_of({}), more={"archive/extra/x": PAYLOAD})
    assert one(path).found[0].where == "archive/extra/x"
    assert one(torch_zip(tmp_path / "b.pt", dict_of({}), {"0": PAYLOAD})).verdict == DANGEROUS


# Folders.


def test_folders_are_looked_into_by_content_and_links_are_followed_once(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "notes.txt").write_bytes(PAYLOAD)
    (tmp_path / "z.pt").symlink_to(deep / "notes.txt")
    (deep / "up").symlink_to(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_bytes(PAYLOAD)
    found = scan(tmp_path)
    assert [os.path.relpath(each.path, tmp_path) for each in found] == ["a/b/c/notes.txt", "z.pt"]
    assert {each.verdict for each in found} == {DANGEROUS}


@pytest.mark.timeout(20)
def test_a_lattice_of_links_is_walked_once(tmp_path: Path) -> None:
    """30 folders with two links each from one to the next: 2^30 paths."""
    for number in range(30):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "x.txt").write_bytes(b"text")
        for called in "ab":
            (tmp_path / str(number) / called).symlink_to(tmp_path / str(number + 1))
    (tmp_path / "30").mkdir()
    (tmp_path / "30" / "y.pkl").write_bytes(PAYLOAD)
    for start in (tmp_path, tmp_path / "0"):
        found = scan(start)
        assert len(found) == len({os.path.realpath(each.path) for each in found}) == 31
        assert [each.verdict for each in found].count(DANGEROUS) == 1
    assert scan(tmp_path)[0].path == str(tmp_path / "0" / "x.txt")


def test_a_folder_is_named_by_its_own_path_rather_than_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "x.pkl").write_bytes(PAYLOAD)
    (tmp_path / "a").symlink_to(tmp_path / "z")
    assert one(tmp_path).path == str(tmp_path / "z" / "x.pkl")


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "zero").symlink_to("/dev/zero")
    found = {os.path.basename(each.path): each.problems[0].reason for each in scan(tmp_path)}
    assert sorted(found) == ["fifo", "loop", "nowhere", "zero"]
    assert "regular file" in found["fifo"] and "links" in found["loop"]
    assert one(tmp_path / "missing.pt").verdict == UNREADABLE


def test_a_folder_of_very_many_files_is_looked_at_whole(tmp_path: Path) -> None:
    for number in range(1500):
        (tmp_path / f"{number:05}.txt").write_bytes(b"x")
    (tmp_path / "z.bin").write_bytes(PAYLOAD)
    found = scan(tmp_path)
    assert (len(found), found[-1].verdict) == (1501, DANGEROUS)


def test_very_many_files_take_neither_descriptors_nor_memory(tmp_path: Path) -> None:
    for number in range(100):  # each is unpacked into a temporary file, and is no pickle
        (tmp_path / f"{number}.gz").write_bytes(gzip.compress(b"cat\n%d" % number))
    gc.collect()
    gc.disable()  # as the program does
    try:
        before = open_files()
        assert {file.verdict for file in scan(tmp_path)} == {SAFE}
        assert not open_files() - before
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        ours = [each for each in gc.garbage if type(each).__module__.startswith("ckpttool")]
        assert len(ours) < 100  # of each file there would be some; other threads have garbage too
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_folders_deeper_than_are_looked_at_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "MAX_DEEP", 2)
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (found,) = scan(tmp_path)
    assert found.path.endswith("a/b/c") and "deep" in found.problems[0].reason


def test_the_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert scan(tmp_path) == []


# Archives as tar writes them.


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_of_tar_is_looked_into(form: int, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        for called, kind in (("d", tarfile.DIRTYPE), ("l", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(called)
            info.type, info.linkname = kind, "elsewhere" if kind == tarfile.SYMTYPE else ""
            archive.addfile(info)
        info = tarfile.TarInfo("/".join(["long" * 20] * (1 if form == tarfile.USTAR_FORMAT else 4)))
        info.size = len(PAYLOAD)
        archive.addfile(info, io.BytesIO(PAYLOAD))
    assert one(tmp_path / "a.tar").verdict == DANGEROUS


def test_a_link_that_states_a_size_hides_nothing(tmp_path: Path) -> None:
    """tarfile reads on behind its header, whatever size it states."""
    info = tarfile.TarInfo("link")
    info.type, info.size = tarfile.SYMTYPE, 10_000
    head = info.tobuf(tarfile.USTAR_FORMAT)
    path = tmp_path / "a.tar"
    path.write_bytes(head + tarred("x.pkl", PAYLOAD))
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["link", "x.pkl"]
    assert one(path).verdict == DANGEROUS


WRITERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", WRITERS)
def test_streams_one_after_another_are_all_unpacked(kind: str, tmp_path: Path) -> None:
    pack = WRITERS[kind]
    data = pack(pickle.dumps(1)) + pack(PAYLOAD)
    assert of(data, tmp_path / "a").verdict == DANGEROUS
    assert of(pack(pickle.dumps(1)) + b"garbage" * 9, tmp_path / "a").names == ()


def test_a_page_and_an_empty_file_are_unreadable_by_what_they_are(tmp_path: Path) -> None:
    page = of(b"<!DOCTYPE html><html>log in</html>", tmp_path / "page.pt")
    assert page.verdict == UNREADABLE and "is an HTML page" in page.problems[0].reason
    empty = of(b"", tmp_path / "empty.safetensors")
    assert empty.verdict == UNREADABLE and "is empty" in empty.problems[0].reason
    assert of(b"", tmp_path / "empty.txt").verdict == SAFE
