"""Deltas in the forms of other programs: written by us and read by others, and the other way round."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.deltas import forms, patches
from ckpttool.errors import CkptToolError, Damaged, Refused, Unsupported, UsageFault
from tests.support.running import Cli, assert_says, within
from tests.support.sparse_updates import prime_rl, trl

zstandard = pytest.importorskip("zstandard", reason="frames are made by a zstd of its own")
xxhash, blake3 = pytest.importorskip("xxhash"), pytest.importorskip("blake3")

Tensors = dict[str, torch.Tensor]
HASHES: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda raw: xxhash.xxh3_128(raw).hexdigest(),
    "blake3": lambda raw: blake3.blake3(raw).hexdigest(),
    "adler32": lambda raw: f"{zlib.adler32(raw):08x}",
}
INDEX = "model.safetensors.index.json"


def raw_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bytes_of(tensors: Tensors) -> dict[str, bytes]:
    return {name: raw_of(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def models(here: Path) -> tuple[Tensors, Tensors]:
    """Write base.safetensors and new.safetensors: types, no axis, no elements, more than a block."""
    torch.manual_seed(0)
    base: Tensors = {
        "wide": torch.randn(700_001).bfloat16(),
        "flat": torch.randn(300, 100),
        "scalar": torch.tensor(1.5),
        "empty": torch.ones(0, 4),
        "same": torch.arange(7),
        "eight": torch.randn(64, 64).to(torch.float8_e4m3fn),
        "bits": torch.tensor([True, False, True]),
    }
    new = {name: tensor.clone() for name, tensor in base.items()}
    new["wide"][[0, 3, 524_287, 524_288, 700_000]] = torch.tensor(float("nan")).bfloat16()
    new["flat"] *= 1.01
    new["scalar"] = torch.tensor(-0.0)
    new["eight"][5] = new["eight"][6]
    new["bits"][1] = True
    save_file(base, "base.safetensors")
    save_file(new, "new.safetensors")
    return base, new


@pytest.fixture
def shorts(here: Path) -> None:
    """Write the same in bfloat16 alone, which TRL's deltas hold."""
    base = {
        "w": torch.randn(70_000).bfloat16(),
        "v": torch.ones(3, 3).bfloat16(),
        "z": torch.tensor(1.0).bfloat16(),
    }
    new = {name: tensor.clone() for name, tensor in base.items()}
    new["w"][[1, 69_000, 69_999]] = -2.0
    new["z"] += 1
    save_file(base, "base.safetensors")
    save_file(new, "new.safetensors")


# ---- Readers and writers of the test's own, by what the forms' programs do


def header_of(path: Path) -> tuple[dict[str, Any], dict[str, str], bytes]:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    return header, header.pop("__metadata__", {}), raw[8 + size :]


def put(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]], metadata: Mapping[str, str]) -> None:
    at, header = 0, dict[str, Any]({"__metadata__": dict(metadata)} if metadata else {})
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def overwriting(old: bytes, new: bytes) -> bytes:
    after = np.frombuffer(new, np.uint8)
    where = np.flatnonzero(after != np.frombuffer(old, np.uint8)).astype("<u4")
    return struct.pack("<I", len(where)) + where.tobytes() + after[where].tobytes()


def xored(old: bytes, new: bytes) -> bytes:
    return (np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)).tobytes()


def weight_v(
    folder: Path, old: Tensors, new: Tensors, encoding: str = "xor", checksum: str = "xxh3-128", **facts: Any
) -> Path:
    """Write a version as slime does, two files of it where that many tensors change."""
    version = int(folder.name.removeprefix("weight_v"))
    folder.mkdir(parents=True)
    encode = {"xor": xored, "overwrite": overwriting}.get(encoding, xored)
    changed = [name for name in new if raw_of(old[name]) != raw_of(new[name])]
    weight_map: dict[str, str] = {}
    groups = [each for each in (changed[:1], changed[1:]) if each]
    for number, group in enumerate(groups):
        file, frames, sums = f"model-{number:05d}-of-{len(groups):05d}.safetensors", {}, {}
        for name in group:
            frame = zstandard.ZstdCompressor().compress(encode(raw_of(old[name]), raw_of(new[name])))
            frames[name] = ("U8", [len(frame)], frame)
            sums[name] = HASHES[checksum](raw_of(new[name]))
            weight_map[name] = file
        put(folder / file, frames, sums)
    said = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding}
    said |= {"compression_format": "zstd", "checksum_format": checksum, **facts}
    (folder / INDEX).write_text(json.dumps({"metadata": said, "weight_map": weight_map}))
    return folder


def read_weight_v(folder: Path, before: dict[str, bytes]) -> dict[str, bytes]:
    """Apply a version as SGLang's reader does: names of index and headers equal, and checksums."""
    index = json.loads((folder / INDEX).read_text())
    said, after = index["metadata"], dict(before)
    assert (said["compression_format"], int(said["base_version"])) == ("zstd", int(said["version"]) - 1)
    for file in sorted(set(index["weight_map"].values())):
        header, sums, data = header_of(folder / file)
        assert set(header) == {name for name, of in index["weight_map"].items() if of == file}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            assert (entry["dtype"], entry["shape"]) == ("U8", [end - begin])
            raw = zstandard.ZstdDecompressor().decompress(data[begin:end])
            if said["delta_encoding"] == "xor":
                after[name] = xored(before[name], raw)
            else:
                count = int.from_bytes(raw[:4], "little")
                values = np.frombuffer(before[name], np.uint8).copy()
                values[np.frombuffer(raw, "<u4", count, 4)] = np.frombuffer(raw[4 + 4 * count :], np.uint8)
                after[name] = values.tobytes()
            assert HASHES[said["checksum_format"]](after[name]) == sums[name]
    return after


def read_skyrl(folder: Path, before: dict[str, bytes]) -> dict[str, bytes]:
    said, after = json.loads((folder / "manifest.json").read_text()), dict(before)
    assert said["base_version"] == said["version"] - 1
    for each in said["tensors"]:
        assert each["payload_file"] in said["payload_files"]
        header, _, data = header_of(folder / each["payload_file"])
        begin, end = header[each["payload_key"]]["data_offsets"]
        assert each["compressed_num_bytes"] == end - begin
        raw = zstandard.ZstdDecompressor().decompress(data[begin:end])
        assert len(raw) == each["uncompressed_num_bytes"] == len(before[each["name"]])
        after[each["name"]] = xored(before[each["name"]], raw)
        assert each["checksum_algorithm"] == "xxh3-128"
        assert HASHES["xxh3-128"](after[each["name"]]) == each["checksum"]
    return after


def same(path: str, other: str = "new.safetensors") -> bool:
    return ckpttool.digest(path) == ckpttool.digest(other)


# ---- Written by us


@pytest.mark.parametrize("checksum", [*HASHES])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_weight_v_written_here_is_read_by_a_reader_like_sglangs(
    models: tuple[Tensors, Tensors], encoding: str, checksum: str
) -> None:
    made = ckpttool.delta(
        "base.safetensors",
        "new.safetensors",
        "weight_v000001",
        layout="weight-v",
        encoding=encoding,
        checksum=checksum,
        verify=True,
    )
    assert (made.kinds["xor"], made.kinds["same"]) == (5, 2)
    assert read_weight_v(Path("weight_v000001"), bytes_of(models[0])) == bytes_of(models[1])
    assert same("base.safetensors+weight_v000001")


def test_skyrl_written_here_is_read_by_a_reader_like_its_own(models: tuple[Tensors, Tensors]) -> None:
    choices: dict[str, Any] = {"layout": "skyrl", "verify": True}
    planned = ckpttool.delta("base.safetensors", "new.safetensors", "delta-00000001", dry_run=True, **choices)
    made = ckpttool.delta("base.safetensors", "new.safetensors", "delta-00000001", **choices)
    assert planned == made
    assert made.saved.nbytes == sum(path.stat().st_size for path in Path("delta-00000001").iterdir())
    assert read_skyrl(Path("delta-00000001"), bytes_of(models[0])) == bytes_of(models[1])
    assert same("base.safetensors+delta-00000001")


@pytest.mark.parametrize("layout", ["weight-v", "skyrl"])
def test_a_delta_of_nothing_advances_the_version(models: object, layout: str) -> None:
    output = {"weight-v": "weight_v000004", "skyrl": "delta-00000004"}[layout]
    ckpttool.delta("base.safetensors", "base.safetensors", output, layout=layout, verify=True)
    assert same(f"base.safetensors+{output}", "base.safetensors")
    assert len([*Path(output).iterdir()]) == 1


def test_other_names_of_a_tensor_are_not_written_and_follow(here: Path) -> None:
    old, new = torch.zeros(50), torch.ones(50)
    torch.save({"embed.weight": old, "head.weight": old}, "base.pt")
    torch.save({"embed.weight": new, "head.weight": new}, "new.pt")
    ckpttool.delta("base.pt", "new.pt", "weight_v000001", layout="weight-v", verify=True)
    weight_map = json.loads(Path("weight_v000001", INDEX).read_text())["weight_map"]
    assert [*weight_map] == ["embed.weight"]
    with ckpttool.apply("base.pt", ["weight_v000001"]) as made:
        made_of = made.state().tensors
        assert made_of["embed.weight"].view == made_of["head.weight"].view
    torch.save({"embed.weight": new, "head.weight": old}, "apart.pt")
    with pytest.raises(Refused, match="no longer another name"):
        ckpttool.delta("base.pt", "apart.pt", "weight_v000002", layout="weight-v")


@pytest.mark.parametrize("layout", ["weight-v", "skyrl", "vllm"])
@pytest.mark.parametrize("change", ["shape", "dtype", "more", "fewer"])
def test_what_no_form_holds_is_refused_by_name(shorts: None, layout: str, change: str) -> None:
    new = load_file("base.safetensors")
    changes: dict[str, Callable[[], object]] = {
        "shape": lambda: new.update(v=torch.ones(9).bfloat16()),
        "dtype": lambda: new.update(v=torch.ones(3, 3)),
        "more": lambda: new.update(u=torch.ones(1)),
        "fewer": lambda: new.pop("v"),
    }
    changes[change]()
    save_file(new, "other.safetensors")
    with pytest.raises(Refused, match="'u' is" if change == "more" else "'v' is"):
        ckpttool.delta("base.safetensors", "other.safetensors", "step_1.safetensors", layout=layout)
    assert not Path("step_1.safetensors").exists()


def test_a_name_without_a_version_and_options_of_another_form_are_usage_faults(models: object) -> None:
    for output, choices, said in (
        ("out", {}, "ends with its version"),
        ("weight_v000000", {}, "ends with its version"),
        ("weight_v000001", {"encoding": "raw"}, "weight-v has xor or overwrite"),
        ("weight_v000001", {"checksum": "md5"}, "weight-v has xxh3-128 or blake3 or adler32"),
    ):
        with pytest.raises(UsageFault, match=said):
            ckpttool.delta("base.safetensors", "new.safetensors", output, layout="weight-v", **choices)
    with pytest.raises(UsageFault, match="says otherwise") as fault:
        ckpttool.delta("base.safetensors", "new.safetensors", "out/", layout="vllm")
    assert fault.value.hint == "name it out.safetensors"
    with pytest.raises(UsageFault, match="forms of other programs"):
        ckpttool.delta("base.safetensors", "new.safetensors", "d.safetensors", checksum="blake3")
    with pytest.raises(UsageFault, match="no such form is written"):
        ckpttool.delta("base.safetensors", "new.safetensors", "step_1", layout="prime-rl")


# ---- Written by others


@pytest.mark.parametrize("checksum", [*HASHES])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_weight_v_of_others_is_read(
    models: tuple[Tensors, Tensors], encoding: str, checksum: str, cli: Cli
) -> None:
    weight_v(Path("weight_v000001"), *models, encoding, checksum)
    assert same("base.safetensors+weight_v000001")
    with ckpttool.apply("base.safetensors", ["weight_v000001"]) as made:
        assert bytes_of(made.state().load()) == bytes_of(models[1])
    done = cli("apply", "base.safetensors", "weight_v000001", "out.safetensors")
    assert done.code == 0 and bytes_of(load_file("out.safetensors")) == bytes_of(models[1])


def test_a_full_name_of_modelexpress_and_what_is_not_known(models: tuple[Tensors, Tensors]) -> None:
    weight_v(Path("weight_v000001"), *models, version="v1", base_version="v0")
    assert same("base.safetensors+weight_v000001")
    for number, facts in enumerate(
        ({"delta_encoding": "sum"}, {"compression_format": "lz4"}, {"checksum_scope": "compressed_delta"}), 2
    ):
        weight_v(Path(f"weight_v00000{number}"), *models, **facts)
        with pytest.raises(Unsupported, match=next(iter(facts))):
            ckpttool.digest(f"base.safetensors+weight_v00000{number}")


def skyrl(folder: Path, old: Tensors, new: Tensors, **more: Any) -> dict[str, Any]:
    folder.mkdir(parents=True)
    frames, listed = {}, []
    for name in new:
        frame = zstandard.ZstdCompressor(level=3).compress(xored(raw_of(old[name]), raw_of(new[name])))
        frames[name] = ("U8", [len(frame)], frame)
        about = {
            "name": name,
            "dtype": str(new[name].dtype).removeprefix("torch."),
            "shape": [*new[name].shape],
        }
        about |= {"uncompressed_num_bytes": len(raw_of(new[name])), "compressed_num_bytes": len(frame)}
        about |= {"payload_file": "delta-rank00000-file000000.safetensors", "payload_key": name}
        listed.append({**about, "checksum": HASHES["xxh3-128"](raw_of(new[name]))})
    put(folder / "delta-rank00000-file000000.safetensors", frames, {})
    said = {"version": 1, "base_version": 0, "tensors": listed}
    said |= {"payload_files": ["delta-rank00000-file000000.safetensors"], **more}
    (folder / "manifest.json").write_text(json.dumps(said))
    return said


def test_skyrl_of_others_is_read_and_tensors_that_the_base_lacks_are_named(
    models: tuple[Tensors, Tensors], cli: Cli
) -> None:
    base, new = models
    skyrl(Path("delta-00000001"), base | {"tied": base["flat"]}, new | {"tied": new["flat"]})
    with ckpttool.open("base.safetensors+delta-00000001") as made:
        assert [remark.name for remark in made.remarks] == ["tied"]
        assert bytes_of(made.state().load()) == bytes_of(new)
    done = cli("apply", "base.safetensors", "delta-00000001", "out.safetensors")
    assert_says(done, 0, "left out: tied")


def test_prime_rl_of_others_is_read_packed_or_not(shorts: None) -> None:
    base, want = load_file("base.safetensors"), load_file("base.safetensors")
    want["w"][0], want["w"][-1] = 2.0, -1.0
    prime_rl(Path("step_12"), 10, base, want)
    assert bytes_of(ckpttool.open("base.safetensors+step_12").state().load()) == bytes_of(want)
    file = Path("step_12/sparse_update_patch.safetensors")
    file.write_bytes(zstandard.ZstdCompressor().compress(file.read_bytes()))
    assert bytes_of(ckpttool.open("base.safetensors+step_12").state().load()) == bytes_of(want)
    file.write_bytes(zstandard.ZstdCompressor().compress(bytes(120_000_000)))
    with pytest.raises(Damaged, match="more than its manifest states"):
        ckpttool.open("base.safetensors+step_12")
    prime_rl(Path("step_13"), 12, base, want, checksum=7)
    with pytest.raises(Damaged, match="another checksum"):
        ckpttool.digest("base.safetensors+step_13")
    prime_rl(Path("step_14"), 13, base, want, dtype="float8_e4m3fn")
    with pytest.raises(Unsupported, match="checksum of 'w', of float8_e4m3fn, which torch lacks"):
        ckpttool.digest("base.safetensors+step_14")


@pytest.mark.parametrize("encoding", ["raw", "gap_delta"])
def test_trl_of_others_is_read(shorts: None, encoding: str) -> None:
    base, want, path = load_file("base.safetensors"), load_file("base.safetensors"), "step_000003.safetensors"
    want["w"][[0, 65_000, 69_999]] = torch.tensor([2.0, -1.0, 5.0]).bfloat16()
    trl(Path(path), 3, base, want, encoding)
    assert bytes_of(ckpttool.open(f"base.safetensors+{path}").state().load()) == bytes_of(want)
    trl(Path(path), 3, base, want, "nvcomp")
    with pytest.raises(Unsupported, match="encoding 'nvcomp'"):
        ckpttool.digest(f"base.safetensors+{path}")


def test_our_deltas_and_theirs_in_one_chain(models: tuple[Tensors, Tensors]) -> None:
    base, new = models
    weight_v(Path("weight_v000001"), base, new)
    ckpttool.delta("base.safetensors+weight_v000001", "base.safetensors", "back.safetensors", verify=True)
    weight_v(Path("again/weight_v000001"), base, new, "overwrite")
    Path("other").mkdir()
    chain = "base.safetensors+weight_v000001+back.safetensors"
    assert same(chain, "base.safetensors") and same(f"{chain}+again/weight_v000001")
    whole = f"{chain}+again/weight_v000001"
    made = ckpttool.delta("base.safetensors", whole, "other/weight_v000001", layout="weight-v")
    assert made.kinds["xor"] == 5 and same("base.safetensors+other/weight_v000001")


def test_blocks_in_any_order_and_the_window_that_stays(
    models: tuple[Tensors, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "WINDOW", 1 << 19)
    weight_v(Path("weight_v000001"), *models)
    with ckpttool.open("base.safetensors+weight_v000001") as made:
        data, want = made.state().tensors["wide"].storage.data, raw_of(models[1]["wide"])
        fill = getattr(data, "fill")  # noqa: B009
        for start, size in ((0, 7), (1_400_000, 2), (1_000_000, 400_002), (2, 1_400_000), (1_200_000, 100)):
            out = bytearray(size)
            fill(start, memoryview(out))
            assert out == want[start : start + size]


# ---- What is damaged, foreign or made to mislead


def test_a_flipped_bit_a_missing_link_and_a_wrong_base_are_named(
    models: tuple[Tensors, Tensors], cli: Cli
) -> None:
    base, new = models
    weight_v(Path("sync/weight_v000001"), base, new)
    weight_v(Path("sync/weight_v000002"), new, base)
    done = cli("apply", "new.safetensors", "sync/weight_v000001", "out.safetensors")
    assert_says(done, 3, "comes out with another checksum (xxh3-128) than is stated", "not its base")
    with pytest.raises(Refused, match=r"made from version 1, and .* is version 2"):
        ckpttool.digest("base.safetensors+sync/weight_v000002+sync/weight_v000002")
    file = next(Path("sync/weight_v000001").glob("model-00001*"))
    raw = bytearray(file.read_bytes())
    raw[-40] ^= 1
    file.write_bytes(raw)
    with pytest.raises(Damaged, match="weight_v000001"):
        ckpttool.digest("base.safetensors+sync/weight_v000001")
    done = cli("verify", "base.safetensors+sync/weight_v000001")
    assert_says(done, 3, "weight_v000001")
    assert not Path("out.safetensors").exists()


def test_each_thread_is_told_that_values_are_not_those_stated(models: tuple[Tensors, Tensors]) -> None:
    base, new = models
    weight_v(Path("weight_v000001"), base, new)
    with ckpttool.open("new.safetensors+weight_v000001") as made:
        data = made.state().tensors["wide"].storage.data
        for _ in range(2):
            with pytest.raises(Damaged, match="comes out with another checksum"):
                getattr(data, "fill")(data.nbytes - 5, memoryview(bytearray(5)))  # noqa: B009


def test_other_types_and_names_of_a_base_are_refused(models: tuple[Tensors, Tensors]) -> None:
    base, new = models
    weight_v(Path("weight_v000001"), base, new)
    save_file({name: tensor for name, tensor in base.items() if name != "flat"}, "less.safetensors")
    with pytest.raises(Refused, match="no tensor 'flat'"):
        ckpttool.digest("less.safetensors+weight_v000001")
    skyrl(Path("delta-00000001"), base, new)
    save_file(base | {"flat": base["flat"].half()}, "half.safetensors")
    with pytest.raises(Refused, match="'flat' has the type float16, and float32 in the delta"):
        ckpttool.digest("half.safetensors+delta-00000001")


def hostile_frame(raw: bytes, *, of: str = "w", encoding: str = "overwrite") -> str:
    """Write a version of one tensor that holds a frame, with a checksum that fits nothing."""
    folder = Path("weight_v000001")
    folder.mkdir()
    put(folder / "model-00000-of-00001.safetensors", {of: ("U8", [len(raw)], raw)}, {of: "00000001"})
    said = {"version": "000001", "base_version": "000000", "delta_encoding": encoding}
    said |= {"compression_format": "zstd", "checksum_format": "adler32"}
    index = {"metadata": said, "weight_map": {of: "model-00000-of-00001.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    return "base.safetensors+weight_v000001"


def places_frame(places: list[int], values: bytes, count: int | None = None) -> bytes:
    raw = (
        struct.pack("<I", len(places) if count is None else count)
        + np.array(places, "<u4").tobytes()
        + values
    )
    packed: bytes = zstandard.ZstdCompressor().compress(raw)
    return packed


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (lambda: places_frame([5, 5], b"ab"), "do not ascend"),
        (lambda: places_frame([9, 5], b"ab"), "do not ascend"),
        (lambda: places_frame([140_000], b"a"), "outside of its 140000 elements"),
        (lambda: places_frame([5, 6], b"a"), "fewer values than places"),
        (lambda: places_frame([5], b"ab"), "more places or values"),
        (lambda: places_frame([5], b"", count=2), "cut short"),
        (lambda: places_frame([], b"", count=1 << 31), "no places, or more than bytes"),
        (lambda: places_frame([5, 6], b"ab")[:-3], "damaged|fewer values"),
        (lambda: b"no frame at all", "damaged"),
        (lambda: b"", "no places"),
    ],
)
def test_hostile_places_are_refused(shorts: None, frame: Callable[[], bytes], said: str) -> None:
    with pytest.raises(Damaged, match=said):
        ckpttool.digest(hostile_frame(frame()))


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_frame_that_swells_costs_what_the_tensor_costs(shorts: None, encoding: str) -> None:
    bomb = zstandard.ZstdCompressor(level=1).compressobj()
    raw = b"".join(bomb.compress(bytes(1 << 24)) for _ in range(24)) + bomb.flush()
    path = hostile_frame(raw, encoding=encoding)
    with within(5), pytest.raises(Damaged, match=r"another checksum|longer than|more places or"):
        ckpttool.digest(path)


@pytest.mark.parametrize("name", ["../base.safetensors", "/etc/passwd", "gone.safetensors", "a/b", ".."])
def test_names_that_lead_out_of_the_folder_are_refused(models: tuple[Tensors, Tensors], name: str) -> None:
    said = skyrl(Path("delta-00000001"), *models)
    said["payload_files"] = [name]
    said["tensors"][0]["payload_file"] = name
    Path("delta-00000001/manifest.json").write_text(json.dumps(said))
    with pytest.raises(Damaged, match="not in the folder"):
        ckpttool.open("base.safetensors+delta-00000001")
    weight_v(Path("weight_v000001"), *models)
    index = json.loads(Path("weight_v000001", INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    Path("weight_v000001", INDEX).write_text(json.dumps(index))
    with pytest.raises(CkptToolError):
        ckpttool.open("base.safetensors+weight_v000001")


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.update(tensors=3),
        lambda said: said["tensors"].append(said["tensors"][0]),
        lambda said: said["tensors"][0].pop("name"),
        lambda said: said["tensors"][0].update(dtype="float33"),
        lambda said: said["tensors"][0].update(shape=[-1]),
        lambda said: said["tensors"][0].update(shape="long"),
        lambda said: said["tensors"][0].update(payload_key=["w"]),
        lambda said: said["tensors"][0].update(checksum_algorithm="md5"),
        lambda said: said["tensors"][0].update(checksum=None),
        lambda said: said.update(version="one"),
        lambda said: said.update(base_version=None),
        lambda said: said.update(payload_files={"a": 1}),
    ],
)
def test_a_manifest_that_is_none_is_refused(
    models: tuple[Tensors, Tensors], change: Callable[[dict[str, Any]], object]
) -> None:
    said = skyrl(Path("delta-00000001"), *models)
    change(said)
    Path("delta-00000001/manifest.json").write_text(json.dumps(said))
    with pytest.raises(CkptToolError):
        ckpttool.digest("base.safetensors+delta-00000001")


def test_an_index_whose_names_are_not_those_of_the_files_is_refused(models: tuple[Tensors, Tensors]) -> None:
    weight_v(Path("weight_v000001"), *models)
    index = json.loads(Path("weight_v000001", INDEX).read_text())
    del index["weight_map"]["flat"]
    Path("weight_v000001", INDEX).write_text(json.dumps(index))
    with pytest.raises(Damaged, match="'flat' is in the shard"):
        ckpttool.open("base.safetensors+weight_v000001")


def test_payloads_of_another_shape_and_missing_checksums_are_refused(shorts: None) -> None:
    path = hostile_frame(b"abcd")
    folder = Path("weight_v000001/model-00000-of-00001.safetensors")
    put(folder, {"w": ("U8", [2, 2], b"abcd")}, {"w": "00000001"})
    with pytest.raises(Damaged, match="no row of bytes"):
        ckpttool.open(path)
    put(folder, {"w": ("U8", [4], b"abcd")}, {})
    with pytest.raises(Damaged, match="states no checksum of 'w'"):
        ckpttool.open(path)


def test_a_package_that_is_missing_is_named(models: object, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_v(Path("weight_v000001"), *models)  # type: ignore[misc]

    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(forms, "import_module", missing)
    with pytest.raises(Unsupported, match="needs the package xxhash") as caught:
        ckpttool.apply("base.safetensors", ["weight_v000001"])
    assert caught.value.hint and "pip install" in caught.value.hint
