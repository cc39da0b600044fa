"""Every element type of torch and safetensors, read from their own tables: known here, or refused by name."""

from __future__ import annotations

import io
import json
import re
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.core.formats import safetensors as ours
from ckpttool.core.tensors.ref import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:BComplex32 support is experimental")

OF_TORCH = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
NAMES = sorted({f"{each}".removeprefix("torch.") for each in OF_TORCH.values()})
QUANTISED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}  # of tensors with scales of their own


def is_saved(name: str) -> bool:
    """Return whether torch can save tensors of a type: it has some that are but names yet, such as int4."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bcomplex32 is experimental
            torch.save(torch.empty(0, dtype=getattr(torch, name)), io.BytesIO())
    except KeyError:
        return False
    return True


PLAIN = [name for name in NAMES if name not in QUANTISED and is_saved(name)]
WITHOUT_TORCH = {"F6_E2M3": "float6_e2m3fn_x4", "F6_E3M2": "float6_e3m2fn_x4"}  # which torch can't hold


def with_header(path: Path, dtype: str, shape: list[int], nbytes: int) -> Path:
    raw = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(range(nbytes)))
    return path


def types_of_the_library(tmp_path: Path) -> list[str]:
    """Return the types of the format, narrow ones first, as the library lists them of an unknown one."""
    with pytest.raises(SafetensorError) as caught, safe_open(with_header(tmp_path / "x", "?", [1], 1), "pt"):
        pass
    return re.findall(r"`(\w+)`", str(caught.value).partition("expected one of")[2])


def tensor(name: str, shape: tuple[int, ...] = (2, 4)) -> torch.Tensor:
    """Return a tensor of a type with bits of all kinds, whatever they mean."""
    dtype = getattr(torch, name)
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * dtype.itemsize, dtype=torch.uint8) * 37
    return (raw % 2).bool().reshape(shape) if name == "bool" else raw.view(dtype).reshape(shape)


def bits(values: torch.Tensor) -> bytes:
    return bytes(values.contiguous().reshape(-1).view(torch.uint8).tolist()) if values.numel() else b""


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))


def test_the_types_of_torch_are_those_known_here() -> None:
    assert {*DTYPES} == {*PLAIN, *QUANTISED}
    for name in DTYPES:
        assert DTYPES[name].itemsize == getattr(torch, name).itemsize


def test_the_types_of_safetensors_are_those_known_here_in_the_library_s_order(tmp_path: Path) -> None:
    library = types_of_the_library(tmp_path)
    assert {*library} == {*ours.BY_NAME}
    assert [*reversed(library)] == [*ours.ORDER]
    assert {name: ours.BY_NAME[name].name for name in WITHOUT_TORCH} == WITHOUT_TORCH
    written = {f"{each}".removeprefix("torch.") for each in safetensors.torch._SIZE}
    assert {name for name, dtype in DTYPES.items() if dtype.safetensors} == written


def test_all_types_in_one_file_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    state = {name: tensor(name) for name in PLAIN if DTYPES[name].safetensors}
    torch.save(state, tmp_path / "a.pt")
    save_file(state, tmp_path / "oracle.safetensors")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    header, oracle = (
        (tmp_path / name).read_bytes().replace(b'"__metadata__":{"format":"pt"},', b"").replace(b" ", b"")
        for name in ("b.safetensors", "oracle.safetensors")
    )
    assert header[8:] == oracle[8:]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", [(2, 4), (3,), (), (0,), (2, 0)], ids=str)
def test_each_type_goes_through_each_command(cli: Any, here: Path, name: str, shape: tuple[int, ...]) -> None:
    state = {"m.a": tensor(name, shape), "m.b": torch.ones(2)}
    torch.save(state, "a.pt")
    assert cli("inspect", "a.pt").code == 0
    assert cli("verify", "a.pt").code == 0
    assert cli("strip-prefix", "a.pt", "b.pt", "--prefix", "m.").code == 0
    loaded = torch.load("b.pt", weights_only=True)["a"]
    assert (loaded.dtype, tuple(loaded.shape), bits(loaded)) == (
        state["m.a"].dtype,
        shape,
        bits(state["m.a"]),
    )
    assert cli("diff", "a.pt", "a.pt").code == 0
    digest = cli("digest", "a.pt").out.split()[0]
    converted = cli("convert", "a.pt", "c.safetensors")
    is_held = DTYPES[name].safetensors is not None and (name != "float4_e2m1fn_x2" or shape != ())
    assert converted.code == (0 if is_held else 3)
    if not is_held:
        assert name in converted.err and "'m.a'" in converted.err
        assert cli("convert", "a.pt", "c.safetensors", "--full").code == 0
    else:
        held = load_file("c.safetensors")["m.a"]
        assert_equal(held, state["m.a"])
        assert cli("strip-prefix", "c.safetensors", "d.safetensors", "--prefix", "m.").code == 0
        assert bits(load_file("d.safetensors")["a"]) == bits(state["m.a"])
        assert cli("inspect", "d.safetensors").code == 0
        assert cli("diff", "a.pt", "c.safetensors").code == 0
    assert cli("digest", "c.safetensors").out.split()[0] == digest
    assert cli("verify", "c.safetensors", "--against", "a.pt").code == 0
    assert cli("convert", "c.safetensors", "e.pt").code == 0
    again = torch.load("e.pt", weights_only=True)["m.a"]
    assert_equal(again, state["m.a"])


@pytest.mark.parametrize("name", PLAIN)
def test_a_changed_value_of_each_type_is_found(cli: Any, here: Path, name: str) -> None:
    state = {"a": tensor(name), "b": torch.ones(2)}
    torch.save(state, "a.pt")
    changed = state["a"].clone()
    changed.view(torch.uint8).reshape(-1)[-1] ^= 1
    torch.save({**state, "a": changed}, "b.pt")
    said = cli("diff", "a.pt", "b.pt")
    assert said.code == 1
    assert "a" in said.out


def test_shards_deltas_and_copies_hold_what_the_format_does(cli: Any, here: Path) -> None:
    state = {name: tensor(name) for name in PLAIN if DTYPES[name].safetensors}
    state["scalar"] = tensor("float4_e2m1fn_x2", ())
    new = {**state, "float4_e2m1fn_x2": tensor("float4_e2m1fn_x2", (6, 2)), "uint8": state["uint8"] + 1}
    torch.save(state, "a.pt")
    torch.save(new, "b.pt")
    assert cli("delta", "a.pt", "b.pt", "d.safetensors").code == 0
    assert cli("verify", "a.pt+d.safetensors", "--against", "b.pt").code == 0
    assert cli("apply", "a.pt", "d.safetensors", "c.pt").code == 0
    for name, each in torch.load("c.pt", weights_only=True).items():
        assert_equal(each, new[name])
    assert cli("convert", "b.pt", "shards/", "--exclude", "scalar", "--shard-size", "20").code == 0
    files = [load_file(path) for path in Path("shards").glob("*.safetensors")]
    loaded = {name: each for file in files for name, each in file.items()}
    assert loaded.keys() == new.keys() - {"scalar"}
    for name, each in loaded.items():
        assert_equal(each, new[name])
    assert cli("verify", "shards", "--against", "b.pt").code == 1  # it has a scalar more
    assert cli("convert", "b.pt", "dcp/", "--to", "dcp").code == 0
    assert cli("convert", "dcp", "e.pt").code == 0
    for name, each in torch.load("e.pt", weights_only=True).items():
        assert_equal(each, new[name])


@pytest.mark.parametrize(
    ("shape", "nbytes", "said"),
    [([2, 3], 3, "in rows of 3"), ([4, 1], 2, "in rows of 1"), ([0, 3], 0, "in rows of 3"), ([], 1, "'a'")],
)
def test_fours_that_torch_can_t_hold_are_refused_by_name(
    cli: Any, here: Path, shape: list[int], nbytes: int, said: str
) -> None:
    """Two share a byte, and torch's shape counts bytes."""
    with_header(here / "a.safetensors", "F4", shape, nbytes)
    with pytest.raises(SafetensorError):
        load_file("a.safetensors")
    for command in (["inspect"], ["verify"], ["convert", "b.pt"]):
        ran = cli(command[0], "a.safetensors", *command[1:])
        assert ran.code == 3
        assert "'a'" in ran.err and said in ran.err


def test_two_numbers_in_an_element_are_not_laid_out_anew(cli: Any, here: Path) -> None:
    """torch would transpose the bytes, and leave each two numbers as neighbours."""
    save_file({"a": tensor("float4_e2m1fn_x2", (4, 8)), "b": torch.ones(2, 3)}, "a.safetensors")
    for change in ("--permute a=1,0", "--reshape a=8,4"):
        ran = cli("convert", "a.safetensors", "b.safetensors", *change.split())
        assert ran.code == 3
        assert "'a' holds two numbers of four bits in each element" in ran.err
    assert cli("convert", "a.safetensors", "b.safetensors", "--permute", "b=1,0").code == 0


def with_sixes(path: Path, changed: bool = False) -> Path:
    """Write a file of all types of six bits, of one of four and of one of eight."""
    a, b = bytearray(range(48)), bytes(range(3))
    a[5] ^= changed
    entries = {
        "m.a": ("F6_E2M3", [8, 8], bytes(a)),
        "m.b": ("F6_E3M2", [4], b),
        "m.e": ("F6_E3M2", [0, 4], b""),
    }
    entries |= {"m.f": ("F4", [1, 2], b"7"), "m.s": ("F8_E8M0", [2], bytes([0, 127]))}
    header, data = {}, b""
    for name, (dtype, shape, raw) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def held(path: str | Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return what a file holds: name -> type, shape and bytes; the library must read its header."""
    raw = Path(path).read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + size])
    entries.pop("__metadata__", None)
    with safe_open(path, "pt") as file:
        assert {*file.keys()} == {*entries}
    found = {}
    for name, each in entries.items():
        begin, end = each["data_offsets"]
        found[name] = each["dtype"], each["shape"], raw[8 + size + begin : 8 + size + end]
    return found


def test_six_bits_go_through_each_command_that_moves_bytes(cli: Any, here: Path) -> None:
    expected, new = held(with_sixes(here / "a.safetensors")), held(with_sixes(here / "b.safetensors", True))
    short = {name.removeprefix("m."): each for name, each in expected.items()}
    assert cli("strip-prefix", "a.safetensors", "s.safetensors", "--prefix", "m.").code == 0
    assert held("s.safetensors") == short
    assert cli("rename-keys", "a.safetensors", "r.safetensors", "--map", r"^m\.=").code == 0
    assert held("r.safetensors") == short
    for command in ("convert a.safetensors c.safetensors", "slim a.safetensors l.safetensors"):
        assert cli(*command.split()).code == 0
        assert held(command.split()[-1]) == expected
    assert cli("convert", "a.safetensors", "shards/", "--shard-size", "20").code == 0
    assert cli("merge", "shards", "m.safetensors").code == 0
    assert held("m.safetensors") == expected
    digest = cli("digest", "a.safetensors").out.split()[0]
    assert cli("digest", "m.safetensors").out.split()[0] == digest
    assert cli("digest", "b.safetensors").out.split()[0] != digest
    assert cli("verify", "a.safetensors").code == 0
    assert cli("verify", "m.safetensors", "--against", "a.safetensors").code == 0
    assert cli("verify", "b.safetensors", "--against", "a.safetensors").code == 1
    assert cli("diff", "a.safetensors", "m.safetensors").code == 0
    for more in ([], ["--rtol", "0.5"]):
        said = cli("diff", "a.safetensors", "b.safetensors", *more)
        assert said.code == 1 and "m.a" in said.out and "1 of 16 differs" in said.out
    assert cli("delta", "a.safetensors", "b.safetensors", "d.safetensors").code == 0
    assert cli("verify", "a.safetensors+d.safetensors", "--against", "b.safetensors").code == 0
    assert cli("apply", "a.safetensors", "d.safetensors", "n.safetensors").code == 0
    assert held("n.safetensors") == new
    assert cli("seal", "a.safetensors").code == 0
    assert "as it was sealed" in cli("verify", "a.safetensors").out
    Path("b.safetensors").rename("a.safetensors")
    assert cli("verify", "a.safetensors").code == 1
    shown = cli("inspect", "a.safetensors", "--stats")
    assert shown.code == 0 and "float6_e2m3fn_x4" in shown.out
    assert cli("report", "a.safetensors", "a.html").code == 0


def test_six_bits_are_refused_by_name_where_they_can_t_be(cli: Any, here: Path) -> None:
    with_sixes(here / "a.safetensors")
    with_sixes(here / "b.safetensors", True)
    for command in (
        "convert a.safetensors b.pt --force",
        "convert a.safetensors dcp/ --to dcp",
        "split a.safetensors ranks/ --ranks 2 --as dtensor",
        "disarm a.safetensors b.pt --force",
        "average a.safetensors b.safetensors c.safetensors",
        "convert a.safetensors c.safetensors --permute m.a=1,0",
        "convert a.safetensors c.safetensors --reshape m.a=16",
        "delta a.safetensors b.safetensors weight_v000001/ --as weight-v",
    ):
        ran = cli(*command.split())
        assert ran.code == 3, command
        assert re.search("F6_E2M3|float6_e2m3fn_x4|four numbers of six bits", ran.err), command
        assert "Traceback" not in ran.err
    with (
        ckpttool.open("a.safetensors") as checkpoint,
        pytest.raises(ckpttool.errors.Unsupported, match="float6"),
    ):
        checkpoint.state().load()


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
@pytest.mark.parametrize(("shape", "nbytes", "count"), [([2, 2], 3, 2), ([4, 1], 3, 1), ([8, 6], 36, 6)])
def test_sixes_whose_rows_end_inside_three_bytes_are_refused_by_name(
    cli: Any, here: Path, name: str, shape: list[int], nbytes: int, count: int
) -> None:
    with_header(here / "a.safetensors", name, shape, nbytes)
    for command in (["inspect"], ["verify"], ["convert", "b.safetensors"]):
        ran = cli(command[0], "a.safetensors", *command[1:])
        assert ran.code == 3
        assert f"'a' has {name} in rows of {count}, and 4 of them share 3 bytes" in ran.err
