"""Each tensor takes the smallest form, and others can read what is in the file."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Refused, Unsupported
from ckpttool.formats.delta import compression
from tests.support.memory import MOST, peak
from tests.support.running import Cli

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
    monkeypatch.setattr(compression, "_find", lambda module: False)
    ran = cli("delta", "base.safetensors", "new.safetensors", "d.safetensors", "--verify")
    assert ran.code == 0 and "zstd is missing, so no tensor is kept as a packed XOR" in ran.err
    with pytest.raises(Unsupported, match=r"packed\.safetensors: holds differences packed by zstd") as raised:
        ckpttool.apply("base.safetensors", ["packed.safetensors"])
    assert "[delta]" in (raised.value.hint or "")
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
