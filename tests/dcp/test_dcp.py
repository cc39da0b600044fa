"""DCP folders: read as torch's own library reads them, without running what they name; written by it."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import ckpttool
from ckpttool.core.tensors import values as values_of_tensors
from ckpttool.core.tensors.values import live_tensors, stream
from ckpttool.dcp import reading as dcp_tree
from ckpttool.dcp import reading as reading_dcp
from ckpttool.dcp import writing
from ckpttool.errors import CkptToolError, Refused, Unsupported
from tests.ranks import shardings
from tests.ranks.forked import WarmPython
from tests.support.comparing import assert_same, opened, refused, values
from tests.support.running import ROOT, assert_says


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


Index = tuple[int, ...]
Box = tuple[Index, Index]  # where a chunk begins, and its size

TREES: dict[str, Callable[[], dict[str, Any]]] = {
    "training": training,
    "flat": lambda: {"a": torch.ones(2, 3), "b": torch.tensor(7), "empty": torch.ones(0, 3)},
    "lists": lambda: {"l": [1, 2, {"a": torch.ones(2)}], "t": (torch.ones(2), 3), "plain": [1, None]},
    "numbers for keys": lambda: {5: {7: torch.ones(1)}, "state": {0: {"step": torch.tensor(1.0)}}},
    "dots in keys": lambda: {"a.b": {"c.d": torch.ones(1)}},
    "empties": lambda: {"e": {}, "l": [], "x": torch.ones(1), "n": None},
    "objects": lambda: {"args": argparse.Namespace(lr=1), "dtype": torch.float16, "size": torch.Size([1, 2])},
    "types": lambda: {
        str(dtype): torch.ones(3, dtype=dtype)
        for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    },
    "nothing": dict,
    "twice": lambda: (lambda state: {"model": state, "ema": state})({"w": torch.ones(2)}),
}


def in_bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: values(tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def sharded(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that two ranks saved in parts."""
    folder = tmp_path_factory.mktemp("sharded") / "d"
    run_ranks(2, shardings.save_sharded, str(folder), timeout=60)
    return folder


def saved(tree: dict[Any, Any], folder: Path, **given: Any) -> Path:
    dcp.save(tree, storage_writer=dcp.FileSystemWriter(folder, **given), no_dist=True)
    return folder


def written(tree: dict[Any, Any], folder: Path, **given: Any) -> Path:
    """Save a tree as `in.pt`, and write that as `d`."""
    torch.save(tree, folder / "in.pt", **given)
    writing.write(ckpttool.open(folder / "in.pt"), str(folder / "d"))
    return folder / "d"


def changed(folder: Path, change: Callable[[Metadata], object]) -> Path:
    """The folder with other metadata."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def chunks(*boxes: Box) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


@pytest.mark.parametrize("what", TREES)
def test_a_folder_is_read_as_torch_reads_it(what: str, tmp_path: Path) -> None:
    folder = saved(TREES[what](), tmp_path / "d")
    dcp_to_torch_save(folder, tmp_path / "theirs.pt")
    checkpoint = ckpttool.open(folder)
    assert checkpoint.format == "dcp"
    ckpttool.save(checkpoint, tmp_path / "ours.pt")
    mine, theirs = (torch.load(tmp_path / name, weights_only=False) for name in ("ours.pt", "theirs.pt"))
    assert_same(mine, theirs)


@pytest.mark.parametrize("given", [{"thread_count": 3}, {"single_file_per_rank": False}])
def test_several_files_are_read(given: dict[str, Any], tmp_path: Path) -> None:
    tree = training()
    checkpoint = ckpttool.open(saved(tree, tmp_path / "d", **given))
    assert len(checkpoint.shards) > 1
    assert in_bytes(live_tensors(checkpoint.state().tensors)) == in_bytes(tree["model"])


def test_the_metadata_file_may_be_named_itself_and_a_folder_moved(tmp_path: Path) -> None:
    folder = Path(shutil.move(saved(training(), tmp_path / "d"), tmp_path / "elsewhere"))
    for path in (folder, folder / ".metadata"):
        assert len(ckpttool.open(path).state().tensors) == 7


def test_a_strided_tensor_keeps_its_layout(tmp_path: Path) -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    found = ckpttool.open(saved({"a": turned}, tmp_path / "d")).state().tensors["a"]
    assert (found.shape, found.stride) == ((3, 2), (1, 3))
    assert values(live_tensors({"a": found})["a"]) == values(turned)


def test_tensors_that_ranks_saved_in_parts_are_whole_and_so_written(sharded: Path, tmp_path: Path) -> None:
    checkpoint = ckpttool.open(sharded)
    ckpttool.save(checkpoint, tmp_path / "out.pt")
    ckpttool.save(checkpoint, tmp_path / "out.safetensors", state="model")
    assert_same(torch.load(tmp_path / "out.pt"), {"model": shardings.whole(), "epoch": 3})
    writing.write(checkpoint, str(tmp_path / "again"))
    for folder in (sharded, tmp_path / "again"):
        state = {name: torch.zeros_like(tensor) for name, tensor in shardings.whole().items()}
        dcp.load({"model": state}, checkpoint_id=folder, no_dist=True)
        assert_same(state, shardings.whole())


def test_an_fsdp_checkpoint_is_whole(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(2, shardings.save_fsdp, str(tmp_path / "d"), timeout=60)
    ckpttool.convert(tmp_path / "d", tmp_path / "out.pt")
    wanted, found = torch.load(tmp_path / "d.pt"), torch.load(tmp_path / "out.pt")
    assert in_bytes(found["model"]) == in_bytes(wanted["model"])
    for name, moments in wanted["optimizer"]["state"].items():
        assert in_bytes(found["optimizer"]["state"][name]) == in_bytes(moments)


def test_no_values_are_read_to_look_at_a_folder(cli: Any, tmp_path: Path) -> None:
    folder = saved({"model": {"a": torch.ones(1 << 22)}}, tmp_path / "d")
    raw = (folder / "__0_0.distcp").read_bytes()
    one = b"\0\0\x80\x3f" * 1000
    (folder / "__0_0.distcp").write_bytes(raw.replace(one, b"\xee" * len(one), 1))
    assert cli("inspect", folder).code == 0


@st.composite
def divisions(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box]]:
    """A tensor, and boxes that are the whole of it: cut in two along some dimension, again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        begin, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[d]))
        after, rest = (*begin[:d], begin[d] + at, *begin[d + 1 :]), (*size[:d], size[d] - at, *size[d + 1 :])
        boxes += [(begin, (*size[:d], at, *size[d + 1 :])), (after, rest)]
    dtype = draw(st.sampled_from([torch.float32, torch.uint8, torch.int64, torch.complex128]))
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype), boxes


def declared(folder: Path, shape: Index, boxes: Sequence[Box]) -> Path:
    """The folder, whose tensors `0`, `1`, … become the chunks of one named `a`."""

    def declare(metadata: Metadata) -> None:
        places = {index.fqn: place for index, place in metadata.storage_data.items()}
        one = metadata.state_dict_metadata["0"]
        one.size, one.chunks = torch.Size(shape), chunks(*boxes)
        metadata.state_dict_metadata, metadata.planner_data = {"a": one}, {"a": ("a",)}
        metadata.storage_data = {MetadataIndex("a", box[0]): places[str(i)] for i, box in enumerate(boxes)}

    return changed(folder, declare)


@given(divisions(), st.integers(1, 64))
def test_a_tensor_cut_in_any_way_is_whole(division: tuple[torch.Tensor, list[Box]], chunk: int) -> None:
    whole, boxes = division
    boxes = [(begin, size) for begin, size in boxes if math.prod(size)]
    parts = [whole[tuple(slice(b, b + s) for b, s in zip(*box, strict=True))].clone() for box in boxes]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        cut = saved({str(i): part for i, part in enumerate(parts)}, Path(folder) / "d")
        patch.setattr(values_of_tensors, "CHUNK", 16 * chunk)
        found = ckpttool.open(declared(cut, tuple(whole.shape), boxes)).state().tensors["a"]
        assert b"".join(bytes(piece) for piece in stream(found)) == values(whole)


WRONG_BOXES = {
    "a gap": [((0, 0), (2, 4)), ((3, 0), (1, 4))],
    "an overlap": [((0, 0), (3, 4)), ((2, 0), (2, 4))],
    "a gap and an overlap of one size": [((0, 0), (2, 4)), ((1, 0), (2, 4))],
    "past the end": [((0, 0), (2, 4)), ((2, 0), (3, 4))],
    "of other dimensions": [((0,), (4,)), ((2, 0), (2, 4))],
    "a pinwheel with a hole": [((0, 0), (1, 3)), ((0, 3), (3, 1)), ((3, 1), (1, 3)), ((1, 0), (3, 1))],
}


@pytest.mark.parametrize("what", WRONG_BOXES)
def test_chunks_that_are_not_the_whole_are_damage(what: str, tmp_path: Path) -> None:
    boxes = WRONG_BOXES[what]
    folder = saved({str(i): torch.ones(size) for i, (_, size) in enumerate(boxes)}, tmp_path / "d")
    refused(declared(folder, (4, 4), boxes), "whose chunks are not the whole of it")


@pytest.mark.parametrize("dtype", ["bits8", "bits16"])
def test_a_type_that_torch_can_t_write_is_refused_by_name(dtype: str, cli: Any, tmp_path: Path) -> None:
    torch.save({"odd": torch.empty(3, dtype=getattr(torch, dtype))}, tmp_path / "in.pt")
    said = f"in.pt: torch can't write 'odd' as DCP: its type is {dtype}\n"
    for more in ([], ["--dry-run"]):
        assert_says(cli("convert", tmp_path / "in.pt", tmp_path / "d", "--to", "dcp", *more), 3, said)
    assert os.listdir(tmp_path) == ["in.pt"]


def test_more_axes_than_are_supported_are_named(cli: Any, tmp_path: Path) -> None:
    ran = cli("inspect", saved({"a": torch.ones(1).reshape([1] * 70)}, tmp_path / "d"))
    assert (ran.code, "has a tensor of 70 axes, and at most 64 are supported\n" in ran.err) == (3, True)


CUTTING_METADATA = """
import os, sys, ckpttool
from ckpttool.dcp import reading
read_pickle = reading.read_pickle
def cut_and_read(data):
    os.truncate(sys.argv[1] + "/.metadata", 4096)
    return read_pickle(data)
reading.read_pickle = cut_and_read
try:
    ckpttool.open(sys.argv[1])
except ckpttool.CkptToolError:
    pass
"""


def test_metadata_shortened_while_read_ends_no_process(warm_python: WarmPython, tmp_path: Path) -> None:
    folder = saved({f"t{i}": torch.ones(1) for i in range(300)}, tmp_path / "d")
    assert warm_python.run("-c", CUTTING_METADATA, folder).returncode == 0


# Nothing that a folder names is run.


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["a value", "the metadata", "the metadata's place"])
def test_nothing_in_a_folder_is_run(where: str, tmp_path: Path) -> None:
    evil = Runs(tmp_path / "ran")
    folder = saved({"a": torch.ones(2)} | ({"evil": evil} if where == "a value" else {}), tmp_path / "d")
    if where == "the metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(evil) + b"torch.distributed.checkpoint")
        refused(folder)
    elif where == "the metadata's place":
        changed(folder, lambda metadata: setattr(metadata, "storage_meta", evil))
        assert list(ckpttool.open(folder).state().tensors) == ["a"]
    else:
        assert "evil" in ckpttool.open(folder).tree
    assert not (tmp_path / "ran").exists()


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    folder = saved(training(), tmp_path / "d")
    code = "import sys; sys.modules['torch'] = None; import ckpttool; ckpttool.convert(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, folder, tmp_path / "o.pt"], check=True, timeout=60, cwd=ROOT)
    assert len(ckpttool.open(tmp_path / "o.pt").state().tensors) == 7


# Damage.


def info(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def tensor_of(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["a"]


DAMAGE: dict[str, Callable[[Metadata], object]] = {
    "a file that climbs": lambda m: setattr(info(m), "relative_path", "../x.distcp"),
    "a file elsewhere": lambda m: setattr(info(m), "relative_path", "/etc/passwd"),
    "a file that is no name": lambda m: setattr(info(m), "relative_path", 3),
    "a place past the end": lambda m: setattr(info(m), "length", 1 << 40),
    "a negative place": lambda m: setattr(info(m), "offset", -1),
    "a place that overlaps": lambda m: [setattr(i, "offset", 0) for i in m.storage_data.values()],
    "a length too short": lambda m: setattr(info(m), "length", 100),
    "no places": lambda m: setattr(m, "storage_data", None),
    "an item without a place": lambda m: m.storage_data.clear(),
    "no names": lambda m: setattr(m, "state_dict_metadata", []),
    "another size": lambda m: setattr(tensor_of(m), "size", torch.Size([3])),
    "a giant size": lambda m: setattr(tensor_of(m), "size", torch.Size([2**62])),
    "another type": lambda m: setattr(tensor_of(m).properties, "dtype", torch.float64),
    "no chunks": lambda m: setattr(tensor_of(m), "chunks", []),
    "a chunk elsewhere": lambda m: setattr(tensor_of(m), "chunks", chunks(((1,), (2,)))),
    "a chunk of another size": lambda m: setattr(tensor_of(m), "chunks", chunks(((0,), (1,)))),
    "a chunk twice": lambda m: setattr(tensor_of(m), "chunks", chunks(((0,), (2,)), ((0,), (2,)))),
    "chunks that are none": lambda m: setattr(tensor_of(m), "chunks", [1]),
    "a path of nothing": lambda m: m.planner_data.update(a=()),
    "a path of wrong things": lambda m: m.planner_data.update(a=("a", 1.5)),
    "a negative path": lambda m: m.planner_data.update(a=("a", -1)),
    "a giant list": lambda m: m.planner_data.update(a=("a", 2**40)),
    "two values in one place": lambda m: m.planner_data.update(a=("x",), b=("x",)),
    "paths that contradict": lambda m: m.planner_data.update(a=("x", 0), b=("x", "y")),
    "a path through a value": lambda m: m.planner_data.update(a=("x",), b=("x", "y")),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_metadata_that_does_not_fit_is_damage(what: str, tmp_path: Path) -> None:
    folder = saved({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "d")
    refused(changed(folder, DAMAGE[what]))


def test_a_place_that_is_listed_often_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved({"a": torch.ones(2)}, tmp_path / "d")
    changed(folder, lambda m: setattr(tensor_of(m), "chunks", tensor_of(m).chunks * 1000))
    read = Mock(side_effect=reading_dcp.Archive)
    monkeypatch.setattr(reading_dcp, "Archive", read)
    refused(folder, "chunks are not the whole")
    assert read.call_count == 1


def test_an_incomplete_folder_can_be_looked_at(sharded: Path, tmp_path: Path, cli: Any) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "d"))
    (folder / "__1_0.distcp").unlink()
    ran = cli("inspect", folder)
    assert ran.code == 0, ran.err
    assert "the files of rank 1: __1_0.distcp" in ran.out
    assert cli("inspect", folder, "--json").json["ranks"]["missing"] == [1]
    for command in (["merge", folder, tmp_path / "out.pt"], ["verify", folder], ["digest", folder]):
        ran = cli(*command)
        assert ran.code in (1, 3)
        assert "the file of rank 1 is missing: __1_0.distcp" in ran.err + ran.out
    (folder / "__0_0.distcp").unlink()
    assert "all ranks" in str(refused(folder, r"'__\d_0\.distcp' can't be opened: no such file").hint)


@pytest.mark.parametrize("make", [training, lambda: {"w": torch.zeros(3)}], ids=["many zips", "one zip"])
def test_a_part_of_a_folder_is_named_as_such(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    folder = saved(make(), tmp_path / "d")
    part = folder / "__0_0.distcp"
    for path in [part, folder / "renamed"] if make is training else [part]:
        refusal = refused(part.rename(path), "is a part of a DCP folder", Unsupported)
        assert refusal.hint == f"name the folder: {folder}"
    if make is training:
        refused(Path(shutil.copy(folder / "renamed", tmp_path / "other.pt")))


def test_an_extension_is_named(tmp_path: Path) -> None:
    folder = saved({"a": torch.ones(2)}, tmp_path / "d")
    changed(folder, lambda m: setattr(info(m), "transform_descriptors", ["stream.zstd"]))
    refused(folder, r"extension.*stream\.zstd", Unsupported)


def test_old_metadata_without_paths_gives_the_flat_names(tmp_path: Path) -> None:
    folder = saved({"m": {"a": torch.ones(2)}}, tmp_path / "d")
    changed(folder, lambda m: setattr(m, "planner_data", None))
    assert list(ckpttool.open(folder).state().tensors) == ["m.a"]


def test_a_place_that_is_told_twice_is_damage(tmp_path: Path) -> None:
    """Equal keys can't be in a dict of torch's, but in a pickle of one they can."""
    folder = saved({"a": torch.ones(2)}, tmp_path / "d")
    changed(folder, lambda m: m.storage_data.update({MetadataIndex("b", torch.Size([0])): info(m)}))
    raw = (folder / ".metadata").read_bytes()
    at = raw.index(b"fqn")
    (folder / ".metadata").write_bytes(raw[:at] + raw[at:].replace(b"\x8c\x01b", b"\x8c\x01a"))
    refused(folder, "twice")


# Writing.


@pytest.mark.parametrize("what", ["training", "flat", "lists", "dots in keys", "types", "twice"])
def test_what_is_written_is_what_torch_would_have_saved(what: str, tmp_path: Path) -> None:
    tree = TREES[what]()
    dcp_to_torch_save(written(tree, tmp_path), tmp_path / "ours.pt")
    dcp_to_torch_save(saved(tree, tmp_path / "theirs"), tmp_path / "theirs.pt")
    assert_same(torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "theirs.pt"))


CUTTING_INPUT = """
import os, sys, ckpttool
from ckpttool.dcp import writing
made = writing._Live.value
def cut_and_make(*given, **named):
    os.truncate(path, 4096)
    return made(*given, **named)
writing._Live.value = cut_and_make
for path in sys.argv[1:]:
    try:
        ckpttool.save(ckpttool.open(path), path + ".d", to="dcp", verify=False)
        print("written")
    except ckpttool.errors.Damaged as fault:
        print("became shorter" in str(fault))
"""


def test_an_input_shortened_while_it_is_written_is_damaged(warm_python: WarmPython, tmp_path: Path) -> None:
    """A mapping of it would kill the process. What is in a tuple was read before."""
    whole = torch.ones(300_000)
    torch.save({"w": whole}, tmp_path / "named.pt")
    torch.save({"t": (whole, 1)}, tmp_path / "tuple.pt")
    ran = warm_python.run("-c", CUTTING_INPUT, tmp_path / "named.pt", tmp_path / "tuple.pt")
    assert (ran.returncode, ran.stdout.split()) == (0, [b"True", b"written"]), ran.stderr
    assert sorted(os.listdir(tmp_path)) == ["named.pt", "tuple.pt", "tuple.pt.d"]


@pytest.mark.parametrize("step", [2, 1], ids=["a view", "a whole storage"])
def test_tensors_in_tuples_share_what_they_shared(step: int, tmp_path: Path) -> None:
    whole = torch.arange(50_000.0)
    tree = {"l": [(whole, 1), (whole[::step], [whole[5:]])], "w": whole}
    dcp_to_torch_save(written(tree, tmp_path), tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert_same(found["l"], tree["l"])
    assert torch.equal(found["w"], whole)


def test_a_user_loads_it_with_dcp(tmp_path: Path) -> None:
    tree = training()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.state_dict(), "optimizer": training()["optimizer"], "epoch": 0}
    dcp.load(state, checkpoint_id=written(tree, tmp_path), no_dist=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_same(dict(model.state_dict()), dict(tree["model"]))
    assert_same(optimizer.state_dict()["state"], tree["optimizer"]["state"])
    assert state["epoch"] == 3


@pytest.mark.parametrize(
    "tree, said",
    [
        ({"args": {"n": argparse.Namespace(lr=1)}}, r"'args\.n' is an object \(argparse\.Namespace\)"),
        ({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}, r"a\.b"),
    ],
    ids=["an object, which is not made", "two paths that become one"],
)
def test_what_has_no_place_in_dcp_is_named(tree: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=said):
        written(tree, tmp_path)


class Own:
    """An object of the user's."""


OBJECTS = {"best": argparse.Namespace(lr=1), "run": {"args": Own()}, "list": [{"o": Own()}], "t": (Own(),)}
OBJECTS |= {"s": {"o o": Own()}}


def test_all_objects_are_named_at_once_and_the_ways_out(cli: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), **OBJECTS}, tmp_path / "in.pt")
    words = ["convert", tmp_path / "in.pt", tmp_path / "d", "--to", "dcp"]
    named = {"best": "argparse.Namespace"} | dict.fromkeys(("run.args", "list.0.o", "t.0"), f"{__name__}.Own")
    listed = ", ".join(f"'{name}' ({kind})" for name, kind in named.items())
    for more in ([], ["--dry-run"]):
        ran = cli(*words, *more)
        assert ran.code == 3
        assert f"holds objects: {listed} and 1 more; objects are never created from a file here" in ran.err
        assert "hint: keep everything with convert --full, or leave out" in ran.err
        assert ran.err.endswith("--drop best --drop run.args --drop list.0.o --drop t.0\n")
    assert not (tmp_path / "d").exists()
    assert cli(*words, "--full").code == 0


def test_objects_are_dropped_by_the_words_of_the_hint(cli: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "best": Own(), "s": {"o o": Own()}}, tmp_path / "in.pt")
    words = ["convert", tmp_path / "in.pt", tmp_path / "d", "--to", "dcp"]
    told = shlex.split(cli(*words).err.rpartition("without: ")[2])
    assert told == ["--drop", "best", "--drop", "s.o o"]
    assert cli(*words, *told).code == 0
    assert list(ckpttool.open(tmp_path / "d").tree) == ["a"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_sets_sizes_and_types_are_data(protocol: int, tmp_path: Path) -> None:
    tree = {"s": {1, 2}, "f": ({torch.Size([2])}, {torch.float16}), "x": [torch.Size([1])]}
    dcp_to_torch_save(written(tree, tmp_path, pickle_protocol=protocol), tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=False) == tree


@pytest.mark.parametrize("tree", [torch.ones(2), {5: torch.ones(1), "5": torch.zeros(1)}])
def test_what_dcp_can_t_name_is_refused_and_full_keeps_it(tree: object, tmp_path: Path) -> None:
    checkpoint = opened(tree, tmp_path)
    for dry_run in (True, False):
        with pytest.raises(Refused, match=r"as DCP needs|all keys are text in DCP") as refusal:
            ckpttool.save(checkpoint, tmp_path / "d", to="dcp", dry_run=dry_run)
        assert "--full" in str(refusal.value.hint)
    ckpttool.save(checkpoint, tmp_path / "d", to="dcp", full=True)
    ckpttool.convert(tmp_path / "d", tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt"), tree)


def test_what_dcp_drops_is_known(tmp_path: Path) -> None:
    checkpoint = opened({**training(), "nothing": {}, "deep": {"l": [], "e": {}}}, tmp_path)
    assert dcp_tree.lost(checkpoint) == ("model._metadata", "nothing", "deep.e")
    assert dcp_tree.with_keys_made_text(checkpoint) == ("optimizer.state",)


def test_keys_that_become_text_can_be_made_numbers_again(cli: Any, tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "in.pt")
    way = ["convert", tmp_path / "in.pt", tmp_path / "d", "--to", "dcp"]
    for words in (way, ["convert", tmp_path / "d", tmp_path / "back.pt"]):
        ran = cli(*words)
        assert ran.code == 0
        told = shlex.split(ran.err.rpartition("outside DCP: optimizer; numbers again: ckpttool ")[2])
        assert told[:2] == ["optimizer", str(words[2])]
        assert cli(*told).code == 0
    into = cli(*way, "--force")
    assert "keys became text" not in into.err  # it is said once
    found = torch.load(tmp_path / "back.pt")["optimizer"]
    assert_same(found["state"], training()["optimizer"]["state"])


def test_json_tells_the_keys_that_became_text(cli: Any, tmp_path: Path) -> None:
    torch.save({5: torch.ones(1), "b": {7: torch.ones(2)}, **training()}, tmp_path / "in.pt")
    words = ["convert", tmp_path / "in.pt", tmp_path / "d", "--to", "dcp", "--json"]
    ran = cli(*words).json
    assert ran["text_keys"] == ["the dict at the top", "b", "optimizer.state"]
    assert (ran["keyed_by_text"], ran["left_out"]) == (["optimizer"], ["model._metadata"])
    ran = cli(*words, "--full", "--force").json
    assert "text_keys" not in ran and "keyed_by_text" not in ran


@pytest.mark.parametrize("key", ["number", "name"])
def test_an_optimizer_keyed_by_names_needs_no_mending(key: str, cli: Any, tmp_path: Path) -> None:
    torch.save(training(), tmp_path / "number.pt")
    words = ["--to", "names", "--order", "state"]
    assert cli("optimizer", tmp_path / "number.pt", tmp_path / "name.pt", *words).code == 0
    cli("convert", tmp_path / f"{key}.pt", tmp_path / "d", "--to", "dcp")
    ran = cli("convert", tmp_path / "d", tmp_path / "back.pt")
    assert ("numbers again" in ran.err) == (key == "number")


def test_a_list_in_many_places_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reference takes a few bytes of pickle: looking again at each would be their product."""
    shared, walk = [0] * 100, Mock(side_effect=dcp_tree.inert.walk)
    torch.save({"w": torch.ones(1), **{f"k{i}": shared for i in range(50)}}, tmp_path / "in.pt")
    monkeypatch.setattr(dcp_tree.inert, "walk", walk)
    with ckpttool.open(tmp_path / "in.pt") as checkpoint:
        assert dcp_tree.with_keys_made_text(checkpoint) == ()
    assert walk.call_count == 1


def test_metadata_cut_short_or_changed_anywhere_is_read_or_refused(tmp_path: Path) -> None:
    folder = saved({"a": torch.ones(2), "l": [1, {"b": torch.ones(3)}]}, tmp_path / "d")
    raw = (folder / ".metadata").read_bytes()
    for at in range(0, len(raw), 7):
        for damaged in (raw[:at], *(raw[:at] + byte + raw[at + 1 :] for byte in (b"\xff", b"0"))):
            (folder / ".metadata").write_bytes(damaged)
            with contextlib.suppress(CkptToolError), ckpttool.open(folder) as checkpoint:
                for _, tensor in checkpoint.tensors():
                    assert len(tensor.storage.data.read()) == tensor.storage.nbytes
