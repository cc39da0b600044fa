"""Deltas: which form each tensor takes, how a block's XOR is encoded, and how BASE+DELTA… is opened."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.core.words import show_bytes
from ckpttool.deltas import applying, differences, reading
from ckpttool.deltas.differences import UNSIGNED, BadDifference, few_places, largest, packable, unpack
from ckpttool.deltas.header import BLOCK
from ckpttool.errors import Damaged, Refused, Unreadable, Unsupported, UsageFault
from tests.support.running import MOST, Cli, assert_says, peak

# ---- Each tensor takes the smallest form, and others can read what is in the file ---------------------


zstandard = pytest.importorskip("zstandard", reason="a second reader needs a zstd of its own")


def second_reader(delta: Path, base: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Read a delta by docs/deltas.md alone, with numpy, json and zstd: tensors as bytes, and the tree."""

    def opened(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
        raw = path.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        texts = header.pop("__metadata__", {})
        places = {name: entry["data_offsets"] for name, entry in header.items()}
        return {name: raw[8 + size + a : 8 + size + b] for name, (a, b) in places.items()}, texts

    def kept(raw: bytes, at: int, count: int) -> tuple[np.ndarray, int]:
        """Which of `count` items were not left out, and where what follows their gaps begins."""
        (size,) = struct.unpack_from("<I", raw, at)
        gaps = np.frombuffer(raw, np.uint8, size, at + 4)
        ends = np.flatnonzero(gaps < 255)
        places = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
        return places if size else np.arange(count), at + 4 + size

    parts, texts = opened(delta)
    older, _ = opened(base)
    said = json.loads(texts["ckpttool.delta"])
    assert said["version"] == 1
    widths = {"float32": 4, "bfloat16": 2, "int64": 8}
    made = {}
    for name, entry in said["tensors"].items():
        own = [parts[part] for part in entry["in"]]
        assert [zlib.crc32(part) for part in own] == [*entry["in"].values()]
        if entry["as"] == "new":
            made[name] = np.frombuffer(own[0], np.uint8)
            continue
        before = older[entry["base"]]
        assert zlib.crc32(before) == entry["base_crc32"]
        width = widths[entry["dtype"]]
        values = np.frombuffer(before, np.uint8).reshape(-1, width).copy()
        if entry["as"] == "sparse":
            values[np.frombuffer(own[0], "<i4")] = np.frombuffer(own[1], np.uint8).reshape(-1, width)
        if entry["as"] == "xor":
            count = -(-len(before) // said["block"])
            at, sizes = 0, np.frombuffer(own[0][len(own[0]) - 4 * count :], "<u4")
            for number, size in enumerate(sizes):
                rows = slice(number * said["block"] // width, (number + 1) * said["block"] // width)
                if size:
                    raw = zstandard.decompress(own[0][at : at + size])
                    elements, place = kept(raw, 0, len(values[rows]))
                    changed = np.zeros((len(elements), width), np.uint8)
                    for plane in changed.T:
                        some, place = kept(raw, place, len(elements))
                        plane[some] = np.frombuffer(raw, np.uint8, len(some), place)
                        place += len(some)
                    values[rows][elements] ^= changed
                at += size
        made[name] = values.reshape(-1)
    for name, entry in said["tensors"].items():
        pieces = [made[name][at : at + 2**24].tobytes() for at in range(0, len(made[name]), 2**24)]
        digests = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
        assert entry["digest"] == hashlib.sha256(digests).hexdigest()
        assert entry["crc32"] == zlib.crc32(made[name])
    return made, json.loads(texts["ckpttool.delta.tree"])["tree"]


def test_a_second_reader_written_from_the_page_reads_it(step: Path) -> None:
    ckpttool.delta("base.safetensors", "new.safetensors", "d.safetensors")
    made, tree = second_reader(step / "d.safetensors", step / "base.safetensors")
    expected = load_file("new.safetensors")
    assert {name: raw.tobytes() for name, raw in made.items()} == {
        name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in expected.items()
    }
    assert tree == ["ordered", {name: ["tensor", name] for name in tree[1]}]


def test_each_tensor_takes_the_smallest_form(step: Path) -> None:
    made = ckpttool.delta("base.safetensors", "new.safetensors", "d.safetensors", verify=True)
    assert made.kinds == {"same": 1, "sparse": 1, "xor": 1, "new": 1}
    with safe_open("d.safetensors", "pt") as file:
        assert set(file.keys()) == {"sparse.indices", "sparse.values", "xor.xor", "new"}
        assert file.get_tensor("sparse.indices").tolist() == [7, 262_143, 262_144, 299_999]
    assert made.new_digest == ckpttool.digest("new.safetensors")


def test_names_of_parts_that_are_taken_get_others(here: Path) -> None:
    base = {
        "w": torch.zeros(4000),
        "w.xor": torch.zeros(4),
        "w.indices": torch.zeros(4),
        "w.values": torch.zeros(4),
    }
    new = {name: tensor + (torch.arange(len(tensor)) == 3) for name, tensor in base.items()}
    save_file(base, "base.safetensors")
    save_file(new, "new.safetensors")
    ckpttool.delta("base.safetensors", "new.safetensors", "d.safetensors", verify=True)


@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 30), (torch.float32, 30)])
def test_one_value_in_a_hundred_changed_is_30_times_smaller(
    here: Path, dtype: torch.dtype, times: int
) -> None:
    base = (torch.randn(2_000_000) * 0.02).to(dtype)
    new = torch.where(torch.rand(2_000_000) < 0.01, base * 1.02, base)
    save_file({"w": base}, "base.safetensors")
    save_file({"w": new}, "new.safetensors")
    made = ckpttool.delta("base.safetensors", "new.safetensors", "d.safetensors")
    assert made.saved.nbytes * 30 <= made.of


def test_what_has_nothing_in_common_is_no_larger_than_itself(here: Path) -> None:
    for name in ("base", "new"):
        save_file({"a": torch.randn(700_000), "b": torch.randn(700_000).half()}, f"{name}.safetensors")
    made = ckpttool.delta("base.safetensors", "new.safetensors", "d.safetensors")
    assert made.saved.nbytes <= 1.001 * made.of


def test_a_delta_that_saves_nothing_says_so(here: Path, cli: Cli) -> None:
    for name in ("base", "new"):
        save_file({"a": torch.randn(8)}, f"{name}.safetensors")
    ran = cli("delta", "base.safetensors", "new.safetensors", "d.safetensors")
    assert ran.code == 0 and "the delta is no smaller than NEW: keep NEW itself" in ran.err


def test_without_zstd_a_delta_is_written_without_packed_parts(
    step: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpttool.delta("base.safetensors", "new.safetensors", "packed.safetensors")
    monkeypatch.setattr(differences, "_find", lambda module: False)
    ran = cli("delta", "base.safetensors", "new.safetensors", "d.safetensors", "--verify")
    assert ran.code == 0 and "zstd is missing, so no tensor is kept as a packed XOR" in ran.err
    with pytest.raises(Unsupported, match=r"packed\.safetensors: holds differences packed by zstd") as raised:
        ckpttool.apply("base.safetensors", ["packed.safetensors"])
    assert ckpttool.errors.install("delta") in (raised.value.hint or "")
    ran = cli("convert", "base.safetensors+packed.safetensors", "out.safetensors")
    assert ran.code == 3 and not Path("out.safetensors").exists()


def patched(base: dict[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
    """Apply a patch as vLLM does: `index_copy_` of values to int32 places of a flat parameter."""
    parts = load_file(path)
    for name in [key.removesuffix(".indices") for key in parts if key.endswith(".indices")]:
        indices, values = parts[f"{name}.indices"], parts[f"{name}.values"]
        assert indices.dtype is torch.int32 and indices.ndim == values.ndim == 1
        assert values.dtype is base[name].dtype and len(indices) == len(values)
        base[name].view(-1).index_copy_(0, indices.long(), values)
    return base


def test_a_patch_is_what_vllm_applies(step: Path) -> None:
    new = load_file("new.safetensors")
    del new["new"]
    new["sparse"].fill_(2.0)  # it holds changed values alone, however many
    save_file(new, "new.safetensors")
    made = ckpttool.delta("base.safetensors", "new.safetensors", "patch.safetensors", layout="vllm")
    assert made.kinds == {"same": 1, "sparse": 2, "xor": 0, "new": 0}
    found = patched(load_file("base.safetensors"), "patch.safetensors")
    assert all(torch.equal(found[name].view(torch.uint8), new[name].view(torch.uint8)) for name in new)
    with safe_open("patch.safetensors", "pt") as file:
        assert json.loads(file.metadata()["shapes"]) == {"sparse": [300_000], "xor": [900_001]}


def test_a_patch_can_t_add_take_away_or_change_form(step: Path) -> None:
    with pytest.raises(Refused, match=r"'new' is int64 \[5\], and missing in base\.safetensors"):
        ckpttool.delta("base.safetensors", "new.safetensors", "p.safetensors", layout="vllm")
    with pytest.raises(Refused, match="'new' is missing"):
        ckpttool.delta("new.safetensors", "base.safetensors", "p.safetensors", layout="vllm")
    assert not Path("p.safetensors").exists()


@pytest.mark.long
def test_memory_stays_flat(here: Path) -> None:
    base = {"a": (torch.randn(30_000_000) * 0.02).bfloat16(), "b": torch.randn(15_000_000)}
    new = {"a": base["a"] + 1e-4, "b": torch.where(torch.rand(15_000_000) < 0.02, 0.5, base["b"])}
    save_file(base, "base.safetensors")
    save_file(new, "new.safetensors")
    assert peak("delta", "base.safetensors", "new.safetensors", "d.safetensors") < MOST
    assert peak("apply", "base.safetensors", "d.safetensors", "out.safetensors") < MOST
    assert Path("out.safetensors").read_bytes() == Path("new.safetensors").read_bytes()


# ---- The XOR of a block as bytes, and back: whatever is left out, and whatever stands there instead ---


def packed(changes: np.ndarray) -> bytes:
    return bytes(packable(changes, few_places(changes)))


def assert_kept(changes: np.ndarray) -> bytes:
    """Pack changes, and make them again of a block of other values; return what they were packed as."""
    raw = packed(changes)
    before = np.random.default_rng(1).integers(0, 255, changes.nbytes, np.uint8).view(changes.dtype)
    after = before.copy()
    unpack(raw, after)
    assert (after == before ^ changes).all()
    assert len(raw) <= largest(changes.nbytes, changes.itemsize)
    return raw


def changes_of(width: int, count: int, share: float, seed: int = 0, planes: int = 8) -> np.ndarray:
    """Return changes of a share of the elements, in their lowest bytes alone."""
    random = np.random.default_rng(seed)
    values = random.integers(1, 256 ** min(width, planes) - 1, count, np.uint64, endpoint=True)
    return np.where(random.random(count) < share, values, 0).astype(UNSIGNED[width])


@pytest.mark.parametrize("width", UNSIGNED)
@pytest.mark.parametrize("share", [0.00003, 0.01, 0.33, 0.34, 1.0])
@pytest.mark.parametrize("planes", [1, 8])
def test_changes_of_a_whole_block(width: int, share: float, planes: int) -> None:
    changes = changes_of(width, BLOCK // width, share, planes=planes)
    changes[-1] = 1
    assert_kept(changes)


@given(
    st.sampled_from([*UNSIGNED]), st.integers(1, 3000), st.floats(0, 1), st.integers(0, 9), st.integers(1, 8)
)
def test_changes_of_any_part(width: int, count: int, share: float, seed: int, planes: int) -> None:
    changes = changes_of(width, count, share, seed, planes)
    changes[seed % count] = 1  # a block that is the base's is not packed
    assert_kept(changes)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
@pytest.mark.parametrize("before", [0, 700])
def test_a_gap_of_any_length(gap: int, before: int) -> None:
    changes = np.zeros(before + gap + 3000, "<u2")
    changes[[before, before + gap + 1]] = 7
    raw = assert_kept(changes)
    (size,) = struct.unpack_from("<I", raw)
    assert raw[4 : 4 + size] == bytes(
        [255] * (before // 255) + [before % 255] + [255] * (gap // 255) + [gap % 255]
    )


def test_what_is_kept_of_few_changes_in_one_byte_is_a_gap_and_a_byte_of_each() -> None:
    changes = np.zeros(90, "<u4")
    changes[[5, 70]] = 0x300, 0x400
    zeros, nothing = struct.pack("<IB", 1, 255), struct.pack("<I", 0)
    assert packed(changes) == struct.pack("<IBB", 2, 5, 64) + zeros + nothing + b"\3\4" + zeros + zeros


@pytest.mark.parametrize("width", UNSIGNED)
def test_a_call_does_not_change_what_another_width_gave(width: int) -> None:
    """The memory of a thread is used again."""
    for other in UNSIGNED:
        assert_kept(changes_of(other, 100, 1.0))
        assert_kept(changes_of(width, 70, 0.1))


GOOD = packed(np.arange(9).astype("<u2") % 2)  # of nine elements, four are 1

HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "less than a size": lambda: GOOD[:3],
    "less than its gaps": lambda: struct.pack("<I", 99) + b"\1",
    "more gaps than memory": lambda: struct.pack("<I", 0xFFFFFFFF) + GOOD[4:],
    "less than its items": lambda: GOOD[:-1],
    "more than a block": lambda: GOOD + b"\0",
    "a place outside": lambda: struct.pack("<IB", 1, 9) + GOOD[8:],
    "a place far outside": lambda: struct.pack("<I", 2) + b"\xff\0" + GOOD[8:],
    "a place outside of what changed": lambda: struct.pack("<IBIBB", 1, 0, 1, 1, 5) + bytes(4),
    "no plane after the first": lambda: struct.pack("<I", 0) + struct.pack("<I", 0) + bytes(9),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_bytes_that_are_no_difference_are_refused(kind: str) -> None:
    with pytest.raises(BadDifference):
        unpack(HOSTILE[kind](), np.zeros(9, "<u2"))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_whatever_byte_is_another_it_is_refused_or_some_difference(place: int, byte: int) -> None:
    raw = bytearray(GOOD)
    raw[place] = byte
    values = np.zeros(9, "<u2")
    try:
        unpack(bytes(raw), values)
    except BadDifference:
        return
    unpack(bytes(raw), values)
    assert not values.any()


# ---- `BASE+DELTA…`, and a delta whose base lies beside it, wherever a checkpoint stands; and what is no base


STEPS = 4


@pytest.fixture
def chain(here: Path) -> list[str]:
    """Write 0.safetensors, what it became in steps, and the delta of each: d1.safetensors, …"""
    state = {"w": torch.randn(3000).bfloat16(), "b": torch.randn(40)}
    for number in range(STEPS):
        save_file(state, f"{number}.safetensors")
        state = {name: torch.where(torch.rand(len(t)) < 0.1, t * 1.5, t) for name, t in state.items()}
    before = "0.safetensors"
    for number in range(1, STEPS):
        ckpttool.delta(before, f"{number}.safetensors", f"d{number}.safetensors")
        before = f"d{number}.safetensors"  # so each is a delta of a delta
    return [f"d{number}.safetensors" for number in range(1, STEPS)]


@pytest.mark.parametrize(
    "name",
    [
        "d3.safetensors",
        "0.safetensors+d1.safetensors+d2.safetensors+d3.safetensors",
        "d2.safetensors+d3.safetensors",
    ],
)
def test_every_reading_command_takes_a_chain(chain: list[str], cli: Cli, name: str) -> None:
    assert cli("inspect", name, "--json").json["format"] == "delta"
    assert cli("diff", name, "3.safetensors", "--json").json["same"]
    assert cli("verify", name, "--against", "3.safetensors").code == 0
    assert cli("digest", name, "-q").out == cli("digest", "3.safetensors", "-q").out
    assert cli("convert", name, "out.safetensors", "-q").code == 0
    assert Path("out.safetensors").read_bytes() == Path("3.safetensors").read_bytes()
    with ckpttool.open(name) as checkpoint:
        loaded, expected = checkpoint.state().load(), load_file("3.safetensors")
        assert all(
            torch.equal(loaded[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in expected
        )
        assert checkpoint.state()["b"].numpy().tobytes() == expected["b"].numpy().tobytes()


def test_each_piece_of_a_chain_may_be_a_url_of_a_file(chain: list[str]) -> None:
    pieces = ["0.safetensors", chain[0]]
    name = "+".join(Path(piece).absolute().as_uri() for piece in pieces)
    assert ckpttool.diff(name, "1.safetensors").identical


def test_inspect_names_the_size_of_each_delta_and_of_its_base(chain: list[str], cli: Cli) -> None:
    files = ["d2.safetensors", "d1.safetensors", "0.safetensors"]
    sizes = {name: Path(name).stat().st_size for name in files}
    said = cli("inspect", "d2.safetensors", "--json").json
    assert said["made_of"] == sizes and [*said["made_of"]] == files
    assert said["bytes"] == sum(sizes.values())
    shown = ", ".join(f"{name} ({show_bytes(size)})" for name, size in sizes.items())
    assert f"\n  made of     {shown}\n" in cli("inspect", "d2.safetensors").out
    assert "made_of" not in cli("inspect", "0.safetensors", "--json").json


def test_apply_takes_several_deltas(chain: list[str], cli: Cli) -> None:
    ran = cli("apply", "0.safetensors", *chain, "out.safetensors")
    assert ran.code == 0 and ran.out.startswith("applied 3 deltas -> out.safetensors")
    assert Path("out.safetensors").read_bytes() == Path("3.safetensors").read_bytes()
    assert_says(cli("apply", "0.safetensors", "d2.safetensors", "x.safetensors"), 3, "is not the base of d2")
    assert_says(
        cli("apply", "0.safetensors", "d1.safetensors", "d3.safetensors", "x.safetensors"), 3, "not the base"
    )
    assert not Path("x.safetensors").exists()


def test_a_plus_in_a_name_is_part_of_it_where_the_name_exists(chain: list[str], cli: Cli) -> None:
    shutil.copy("0.safetensors", "0+a.safetensors")
    shutil.copy("0.safetensors", "0.safetensors+d1.safetensors")
    assert cli("inspect", "0.safetensors+d1.safetensors", "--json").json["format"] == "safetensors"
    os.remove("0.safetensors+d1.safetensors")
    assert cli("inspect", "0+a.safetensors+d1.safetensors", "--json").json["format"] == "delta"
    assert_says(cli("inspect", "0.safetensors+missing.safetensors"), 3, "no such file")


def test_a_delta_without_its_base_beside_it_says_what_to_name(chain: list[str], cli: Cli, here: Path) -> None:
    (here / "away").mkdir()
    shutil.move("d1.safetensors", "away/d1.safetensors")
    what = "away/d1.safetensors: is a delta, and its base, '0.safetensors', does not lie beside it"
    assert_says(cli("inspect", "away/d1.safetensors"), 3, what, "BASE+away/d1.safetensors")
    assert cli("verify", "0.safetensors+away/d1.safetensors", "--against", "1.safetensors").code == 0


def test_another_base_is_refused_by_name_before_anything_is_written(chain: list[str], cli: Cli) -> None:
    ran = cli("apply", "1.safetensors", "d1.safetensors", "out.safetensors")
    assert_says(ran, 3, "1.safetensors: is not the base of d1.safetensors", "'0.safetensors'")
    assert sorted(path.name for path in Path().iterdir() if path.name.startswith(("out", "."))) == []
    for words in (
        "convert 1.safetensors+d1.safetensors out.safetensors",
        "digest 1.safetensors+d1.safetensors",
    ):
        assert_says(cli(*words.split()), 3, "1.safetensors")
    assert cli("verify", "1.safetensors+d1.safetensors").code == 1
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "value"])
def test_a_base_of_another_form_is_refused(chain: list[str], change: str) -> None:
    state = load_file("0.safetensors")
    b = state.pop("b")
    other = {"name": {"c": b}, "shape": {"b": b[:39]}, "dtype": {"b": b.half()}, "value": {"b": b + 1}}
    save_file(state | other[change], "base.safetensors")
    save_file({"w": state["w"], "b": b}, "new.safetensors")
    ckpttool.delta("0.safetensors", "new.safetensors", "d.safetensors")
    for lazily in (False, True):
        with pytest.raises(
            Refused, match=r"base\.safetensors: is not the base of d\.safetensors: .*'b'"
        ) as told:
            ckpttool.apply("base.safetensors", ["d.safetensors"], lazily=lazily)
        assert "'0.safetensors'" in (told.value.hint or "")


def test_a_base_needs_no_more_than_is_taken_of_it(chain: list[str]) -> None:
    state = load_file("0.safetensors")
    save_file({"w": state["w"], "b": torch.arange(40) + 0.1, "c": state["b"]}, "new.safetensors")
    ckpttool.delta("0.safetensors", "new.safetensors", "d.safetensors")
    save_file({"w": state["w"]}, "base.safetensors")
    with ckpttool.apply("base.safetensors", ["d.safetensors"], lazily=True) as checkpoint:
        ckpttool.save(checkpoint, "out.safetensors")
    assert Path("out.safetensors").read_bytes() == Path("new.safetensors").read_bytes()


def test_a_base_that_changes_after_it_was_compared_makes_nothing(chain: list[str]) -> None:
    checkpoint = ckpttool.apply("0.safetensors", ["d1.safetensors"], lazily=True)
    raw = bytearray(Path("0.safetensors").read_bytes())
    raw[-9] ^= 1
    with open("0.safetensors", "r+b") as file:  # the same file, which is open already
        file.write(raw)
    with checkpoint, pytest.raises(Damaged, match="do not match their digest"):
        ckpttool.save(checkpoint, "out.safetensors")
    assert not Path("out.safetensors").exists()


def test_a_pt_with_other_values_is_refused_when_it_is_opened(here: Path) -> None:
    for number in range(3):
        torch.save({"w": torch.arange(300.0) + number * (torch.arange(300) % 9 == 0)}, f"{number}.pt")
    ckpttool.delta("0.pt", "1.pt", "d.safetensors")
    with pytest.raises(Refused, match="'w' has other values"):
        ckpttool.open("2.pt+d.safetensors")


def test_a_delta_in_the_place_of_another_is_refused(chain: list[str]) -> None:
    save_file({name: t + 1 for name, t in load_file("1.safetensors").items()}, "other.safetensors")
    ckpttool.delta("0.safetensors", "other.safetensors", "d1.safetensors", force=True)
    with pytest.raises(Refused, match=r"is not the base of \S*d2\.safetensors"):
        ckpttool.open("d2.safetensors")


def with_base(path: str, name: str) -> None:
    """Let a delta name another base."""
    with safe_open(path, "pt") as file:
        texts, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    said = json.loads(texts["ckpttool.delta"])
    said["base"]["name"] = name
    save_file(tensors, path, metadata={**texts, "ckpttool.delta": json.dumps(said)})


@pytest.mark.parametrize("name", ["d2.safetensors", "d3.safetensors"])
def test_a_circle_is_refused(chain: list[str], name: str) -> None:
    with_base("d2.safetensors", name)
    with pytest.raises(Unreadable, match="is its own base, by way of others"):
        ckpttool.open("d3.safetensors")


@pytest.mark.parametrize("name", ["../0.safetensors", "/0.safetensors", "..", "a/b", "0\0.safetensors"])
def test_a_base_in_another_folder_is_not_followed(chain: list[str], name: str) -> None:
    with_base("d1.safetensors", name)
    with pytest.raises(Damaged, match="is no name of a file beside it"):
        ckpttool.open("d1.safetensors")


def test_a_chain_has_an_end(chain: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading.LONGEST == 64
    monkeypatch.setattr(reading, "LONGEST", 2)
    monkeypatch.setattr(applying, "LONGEST", 2)
    ckpttool.open("d2.safetensors").close()
    with pytest.raises(Unreadable, match="has too many deltas below"):
        ckpttool.open("d3.safetensors")
    with pytest.raises(Unreadable, match="is a chain of more than 2 deltas"):
        ckpttool.open("d2.safetensors+d3.safetensors")
    with pytest.raises(UsageFault, match="3 deltas were given"):
        ckpttool.apply("0.safetensors", chain)


def test_what_is_no_delta_is_refused(chain: list[str], cli: Cli) -> None:
    assert_says(cli("inspect", "0.safetensors+1.safetensors"), 3, "1.safetensors: is no delta")
    assert_says(cli("apply", "0.safetensors", "1.safetensors", "out.pt"), 3, "1.safetensors: is no delta")
    torch.save({"w": torch.ones(1)}, "x.pt")
    assert_says(cli("apply", "0.safetensors", "x.pt", "out.pt"), 3, "x.pt: is no delta")
