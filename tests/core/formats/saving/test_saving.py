"""What is written: checked before it counts, and what a saving says of itself."""

from __future__ import annotations

import errno
import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from safetensors import safe_open
from safetensors.torch import load_file
from torch._subclasses import FakeTensorMode

import ckpttool
from ckpttool.batchnorm.pool_files import pool_states
from ckpttool.core import system
from ckpttool.core.checkpoint.selection import cast
from ckpttool.core.files.copying import Output
from ckpttool.core.formats import safetensors
from ckpttool.core.formats.pytorch import zip as zip_format
from ckpttool.core.formats.pytorch.zip_entries import read_directory
from ckpttool.core.tensors.cast import target
from ckpttool.core.tensors.ref import DTYPES, ByteRange, TensorRef
from ckpttool.errors import CkptToolError, Damaged, NoState, OutputExists, Refused, UsageFault
from tests.support.comparing import convert, opened
from tests.support.crafting import BYTES, TENSOR, dict_of, name, storage, tensor, text, torch_zip
from tests.support.running import MOST, Cli, assert_says, peak

# ---- What is written: checked before it counts, as much as was meant, and not a byte read that need not be


base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
STATE = {"module.w": base, "module.row": base[1], "module.tied": base, "module.n": torch.tensor(7)}
OPTIMIZER: dict[str, Any] = {"state": {0: {"m": torch.ones(5)}}, "param_groups": []}
RUN = {"model": OrderedDict(STATE), "epoch": 3, "optimizer": OPTIMIZER}


def saved(value: Any, folder: Path, name: str = "in.pt", **given: Any) -> Path:
    torch.save(value, folder / name, **given)
    return folder / name


# Nothing counts before it was read back.


def changing(change: Callable[[dict[Any, Any]], object]) -> Callable[..., Any]:
    """Return a writer that changes the tree of a checkpoint, or the tensors beside a path."""

    def write(writer: Callable[..., Any], first: Any, second: Any, *more: Any) -> None:
        is_tree = isinstance(first, ckpttool.Checkpoint)
        change(changed := dict(first.tree if is_tree else second))
        given = (replace(first, tree=changed), second) if is_tree else (first, changed)
        writer(*given, *more)

    return write


def cut_short(writer: Callable[..., Any], *given: Any) -> None:
    writer(*given)
    (out,) = (each for each in given if isinstance(each, Output))
    out.settle()
    os.ftruncate(out.fd, out.position - 30)


def garbage(writer: Callable[..., Any], *given: Any) -> None:
    (out,) = (each for each in given if isinstance(each, Output))
    out.write(b"not a checkpoint at all")


def nothing(writer: Callable[..., Any], *given: Any) -> None:
    pass


def shaped(tensors: dict[Any, Any]) -> None:
    tensors["module.w"] = TensorRef.contiguous(tensors["module.w"].storage, tensors["module.w"].dtype, (6, 4))


def typed(tensors: dict[Any, Any]) -> None:
    tensors["module.w"] = replace(tensors["module.w"], dtype=DTYPES["int32"])


CHANGES: dict[str, Callable[[dict[Any, Any]], object]] = {
    "a tensor forgotten": lambda tensors: tensors.pop("module.n"),
    "a name changed": lambda tensors: tensors.update({"module.m": tensors.pop("module.n")}),
    "a tensor more": lambda tensors: tensors.update(more=tensors["module.n"]),
    "another shape": shaped,
    "another type": typed,
}
WRONG = {what: changing(change) for what, change in CHANGES.items()}
WRONG |= {"cut short": cut_short, "garbage": garbage, "nothing": nothing}
MODULES = {".pt": zip_format, ".safetensors": safetensors}


@pytest.mark.parametrize("ending", MODULES)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_writing_is_not_kept(ending: str, what: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    module, out = MODULES[ending], tmp_path / f"out{ending}"
    out.write_bytes(b"the old file")
    checkpoint = ckpttool.open(saved(STATE, tmp_path))
    monkeypatch.setattr(module, "write", partial(WRONG[what], module.write))
    with pytest.raises(CkptToolError, match=f"^{out}: ") as fault:
        ckpttool.save(checkpoint, out, force=True)
    assert fault.value.exit_code == 3
    assert out.read_bytes() == b"the old file"
    assert sorted(os.listdir(tmp_path)) == ["in.pt", out.name]


def test_a_fault_in_writing_is_told_with_a_hint(cli: Any, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(zip_format, "write", partial(WRONG["another shape"], zip_format.write))
    ran = cli("convert", saved(STATE, tmp_path), tmp_path / "out.pt")
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 2)
    assert "does not read back as intended, and was not kept" in ran.err
    assert os.listdir(tmp_path) == ["in.pt"]


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("full", [False, True])
def test_wrong_values_are_found(ending: str, full: bool, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    checkpoint = ckpttool.open(saved(RUN, tmp_path))
    copy = Output.copy

    def flipping(self: Output, data: ByteRange, *_: object, **__: object) -> None:
        last = self.position + data.nbytes - 1
        copy(self, data)
        self.settle()
        os.pwrite(self.fd, bytes([os.pread(self.fd, 1, last)[0] ^ 1]), last)

    def flipped(self: Output, ranges: Sequence[ByteRange]) -> list[bytes]:
        found = [bytearray(data.read()) for data in ranges]
        for data in filter(None, found):
            data[-1] ^= 1
        return [bytes(data) for data in found]

    with monkeypatch.context() as patch:
        patch.setattr(Output, "copy", flipping)
        patch.setattr(Output, "taken", flipped)  # of small tensors
        with pytest.raises(Damaged, match="does not read back as intended"):
            ckpttool.save(checkpoint, tmp_path / f"out{ending}", full=full, verify=True)
    assert os.listdir(tmp_path) == ["in.pt"]
    ckpttool.save(checkpoint, tmp_path / f"out{ending}", full=full, verify=True)


def flip(path: Path, values: torch.Tensor) -> None:
    """Changes a bit of the last of these values in a file."""
    raw = bytearray(path.read_bytes())
    raw[raw.rindex(values.numpy().tobytes()) + values.nbytes - 1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("join", [False, True])
def test_a_flipped_bit_in_complex_tensors_is_found(join: bool, tmp_path: Path) -> None:
    """tests/core/checkpoint/test_checksums.py has the other transforms."""
    weight = torch.arange(8.0)
    parts = {"a.weight.real": weight.clone(), "a.weight.imag": weight}
    path = saved(parts if join else {"a.weight": torch.complex(weight, weight)}, tmp_path)
    flip(path, weight[-1:])
    change = ckpttool.join_complex if join else ckpttool.split_complex
    changed, _ = change(ckpttool.open(path))
    (tmp_path / "folder").mkdir()
    for end in "out.pt", "out.safetensors", "folder/":
        ckpttool.save(changed, tmp_path / end, verify=False, force=True)  # as it is
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(Damaged, match=re.escape(f"{path}: the bytes of 'a.weight")) as caught:
            ckpttool.save(changed, tmp_path / end, force=True)
        assert str(caught.value.hint).endswith(f"ckpttool verify {path}")
        assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_storage_that_is_cut_is_held_to_the_checksum_of_the_whole(ending: str, tmp_path: Path) -> None:
    long = torch.arange(1000.0)
    path = saved({"model": {"part": long[:10], "whole": torch.ones(3)}}, tmp_path)
    ckpttool.save(ckpttool.slim(ckpttool.open(path)), tmp_path / f"intact{ending}", verify=True)
    flip(path, long[:10])
    with pytest.raises(Damaged, match="the bytes of 'part'"):
        ckpttool.save(ckpttool.slim(ckpttool.open(path)), tmp_path / f"out{ending}", verify=True)


@pytest.mark.parametrize("full", [False, True])
def test_damage_in_a_dcp_folder_is_found_and_the_folder_is_named(full: bool, tmp_path: Path) -> None:
    weight = torch.arange(8.0)
    path = saved({"model": {"a": weight}, "epoch": 3}, tmp_path)
    folder = tmp_path / "d"
    ckpttool.save(ckpttool.open(path), folder, to="dcp", full=full)
    flip(folder / "__0_0.distcp", weight)
    (problem,) = ckpttool.verify(ckpttool.open(folder)).problems
    assert problem.kind == "checksum"
    said = re.escape(f"{folder}/__0_0.distcp: the bytes of '") + r"(model\.)?a'"
    with pytest.raises(Damaged, match=said) as caught:
        ckpttool.save(ckpttool.open(folder), tmp_path / "out.safetensors", state="model", verify=True)
    assert str(caught.value.hint).endswith(f"ckpttool verify {folder}")


def test_pooled_statistics_are_held_to_the_checksums_of_all_ranks_counters_too(tmp_path: Path) -> None:
    def layer(mean: float, count: int) -> dict[str, torch.Tensor]:
        values = {"weight": 1.0, "bias": 0.0, "running_mean": mean, "running_var": 1.0}
        state = {f"bn.{name}": torch.full((3,), float(value)) for name, value in values.items()}
        return {**state, "bn.num_batches_tracked": torch.tensor(count)}

    paths = [saved(layer(mean, 300 + mean), tmp_path, f"{mean}.pt") for mean in (1, 2, 3)]

    def pooled() -> ckpttool.Checkpoint:
        return pool_states([ckpttool.open(path) for path in paths], None)[0]

    ckpttool.save(pooled(), tmp_path / "intact.pt", verify=True)
    flip(paths[1], torch.tensor(302))
    with pytest.raises(Damaged, match=re.escape(f"{paths[1]}: the bytes of 'bn.running_")) as caught:
        ckpttool.save(pooled(), tmp_path / "out.pt", verify=True)
    assert str(caught.value.hint).endswith(f"ckpttool verify {paths[1]}")


def test_what_is_expected_is_what_is_reported(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1000), "turned": torch.ones(30, 40).t(), "tied": torch.ones(7)}
    path = saved({"model": {**tensors, "other": tensors["tied"]}, "momentum": torch.ones(5000)}, tmp_path)
    for ending, verify_too, dry in product((".pt", ".safetensors"), (False, True), (False, True)):
        expected: list[int] = []
        seen: list[int] = []
        given: dict[str, Any] = {"progress": seen.append, "expect": expected.append, "force": True}
        given |= {"verify": verify_too, "dry_run": dry}
        ckpttool.save(ckpttool.open(path), tmp_path / f"out{ending}", **given)
        (total,) = expected  # without the pickle, and what aligns storages
        assert total == pytest.approx(sum(seen), rel=0.02), (ending, verify_too, dry)


@pytest.mark.parametrize("to", ["safetensors-sharded", "torch-sharded", "dcp"])
def test_folders_are_read_back_too(to: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    checkpoint = ckpttool.open(saved(STATE, tmp_path))
    monkeypatch.setattr("ckpttool.core.files.digest.digest", lambda tensors, _: str(id(tensors)))
    with pytest.raises(Damaged, match="does not read back as intended"):
        ckpttool.save(checkpoint, tmp_path / "out", to=to, verify=True)
    assert os.listdir(tmp_path) == ["in.pt"]


# From .pt to .pt: everything stays, and payloads are moved unseen.


@pytest.fixture
def reads(monkeypatch: MonkeyPatch) -> list[int]:
    """The sizes of all that comes from files into this process."""
    seen: list[int] = []

    def count(name: str, size: Callable[[Any], int]) -> None:
        call = getattr(system, name)

        def read(fd: int, wanted: Any, offset: int) -> Any:
            seen.append(size(wanted))
            return call(fd, wanted, offset)

        monkeypatch.setattr(system, name, read)

    count("pread", int)
    count("preadv", lambda buffers: sum(map(len, buffers)))
    return seen


def payloads(path: Path) -> dict[str, tuple[range, int | None]]:
    """Where each storage lies in a .pt file, and its checksum."""
    with ckpttool.open(path) as checkpoint:
        records = read_directory(checkpoint.source)
    return {
        name.partition("/data/")[2]: (range(r.data.offset, r.data.offset + r.data.nbytes), r.crc32)
        for name, r in records.items()
        if "/data/" in name
    }


BIG = {f"module.{i}": torch.full((500_000,), float(i)) for i in range(3)}


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_payloads_are_read_once(name: str, tmp_path: Path, reads: list[int]) -> None:
    path = saved({"model": BIG, "epoch": 1}, tmp_path)
    before = payloads(path)
    reads.clear()
    with ckpttool.open(path) as checkpoint:
        ckpttool.save(ckpttool.strip_prefix(checkpoint)[0], tmp_path / name)
    assert 0 <= sum(reads) - sum(tensor.nbytes for tensor in BIG.values()) < 500_000
    if name == "out.pt":
        after = payloads(tmp_path / name)
        assert [crc for _, crc in after.values()] == [crc for _, crc in before.values()]


def test_with_no_verify_a_wrong_checksum_is_copied_too(tmp_path: Path) -> None:
    """The damage stays to be found: the bytes are copied, not vouched for anew."""
    path = saved({"module.w": base}, tmp_path)
    place, crc = payloads(path)["0"]
    raw = bytearray(path.read_bytes())
    raw[place.start] ^= 1
    path.write_bytes(raw)
    ckpttool.save(ckpttool.strip_prefix(ckpttool.open(path))[0], tmp_path / "out.pt", verify=False)
    assert payloads(tmp_path / "out.pt")["0"][1] == crc
    assert not ckpttool.verify(ckpttool.open(tmp_path / "out.pt")).ok


def test_checksums_that_the_source_lacks_are_made(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(STATE, tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert {checksum for _, checksum in payloads(path).values()} == {None}
    ckpttool.convert(path, tmp_path / "out.pt")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
        assert all(info.CRC for info in archive.infolist() if info.file_size)


def test_torch_finds_each_storage_without_loading_it(tmp_path: Path) -> None:
    """Of fake tensors torch keeps the places, which it computes if there is a record `.format_version`."""
    state = {str(number): torch.full((size,), 1.0) for number, size in enumerate((5, 400_000, 7, 300_000, 9))}
    out = tmp_path / "a-name-that-is-longer-than-before.pt"
    ckpttool.save(ckpttool.open(saved(state, tmp_path)), out)
    with FakeTensorMode():
        fake = torch.load(out)
    records = torch._C.PyTorchFileReader(str(out))
    found = [tensor.untyped_storage()._checkpoint_offset for tensor in fake.values()]
    assert found == [records.get_record_offset(f"data/{number}") for number in range(len(state))]


# What is said of it.


CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("out.pt", {}),
    ("out.safetensors", {}),
    ("out.safetensors", {"keep_copies": True}),
    ("out.safetensors", {"full": True}),
    ("out", {"to": "safetensors-sharded", "shard_size": 60}),
    ("out", {"to": "torch-sharded", "shard_size": 60}),
    ("out", {"to": "safetensors-sharded", "full": True}),
]


@pytest.mark.parametrize("name, given", CHOICES, ids=str)
def test_a_dry_run_gives_the_same_answer_and_writes_nothing(name: str, given: Any, tmp_path: Path) -> None:
    checkpoint, out = ckpttool.open(saved(RUN, tmp_path)), tmp_path / name
    dry = ckpttool.save(checkpoint, out, dry_run=True, **given)
    assert os.listdir(tmp_path) == ["in.pt"]
    assert ckpttool.save(checkpoint, out, **given) == dry
    assert dry.nbytes == sum(file.stat().st_size for file in (out.iterdir() if out.is_dir() else [out]))


@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_dry_run_of_a_cast_knows_its_size(ending: str, dtype: str, tmp_path: Path) -> None:
    path = saved({"w": torch.zeros(3_000_000), "t": torch.zeros(1000, 3000).t()}, tmp_path)
    new, _ = cast(ckpttool.open(path), target(dtype))
    dry = ckpttool.save(new, tmp_path / f"out{ending}", dry_run=True)
    assert ckpttool.save(new, tmp_path / f"out{ending}") == dry
    assert dry.nbytes == (tmp_path / f"out{ending}").stat().st_size


def test_a_dry_run_refuses_what_the_format_can_t_hold(tmp_path: Path) -> None:
    wide = ckpttool.open(saved({"w": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path))
    for dry in (True, False):
        with pytest.raises(Refused, match="expands 4 bytes"):
            ckpttool.save(wide, tmp_path / "out.safetensors", dry_run=dry)


def test_what_a_file_of_tensors_leaves_behind_is_named(tmp_path: Path) -> None:
    state = OrderedDict({**STATE, "module._extra_state": {"a": 1}})
    state._metadata = OrderedDict()  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1).state_dict()
    tree = {"a": {"model": state, "x": 1}, 7: "seven", "epoch": 1, "optimizer": optimizer}
    checkpoint = ckpttool.open(saved(tree, tmp_path))
    out = ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    inside = {"a.model.module._extra_state", "a.model._metadata", "a.x"}
    assert set(out.left_out) == {*inside, "7", "epoch", "optimizer"}
    assert (out.keys, out.tied, out.copied) == (4, ("module.tied",), ("module.row",))
    assert load_file(tmp_path / "out.safetensors").keys() == STATE.keys() - {"module.tied"}
    assert ckpttool.save(checkpoint, tmp_path / "full.safetensors", full=True).left_out == ()
    assert ckpttool.save(checkpoint, tmp_path / "out.pt").left_out == ()


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
@pytest.mark.parametrize("source", ["zip", "legacy"])
def test_progress_adds_up_to_the_payload(source: str, name: str, tmp_path: Path) -> None:
    path = saved(BIG, tmp_path, _use_new_zipfile_serialization=source == "zip")
    moved: list[int] = []
    ckpttool.save(ckpttool.open(path), tmp_path / name, progress=moved.append)
    payload = sum(each.nbytes for each in BIG.values())
    assert payload <= sum(moved) <= payload + 3000


# Where it goes.


@pytest.mark.parametrize("ending", [".pt", ".pth", ".th", ".bin", ".ckpt", ".PT"])
def test_the_name_s_ending_asks_for_a_pt_file(ending: str, tmp_path: Path) -> None:
    checkpoint = ckpttool.open(saved(STATE, tmp_path, "in"))
    assert ckpttool.save(checkpoint, tmp_path / f"out{ending}").format == "torch-zip"
    assert list(torch.load(tmp_path / f"out{ending}")) == list(STATE)


def test_the_format_can_be_named_where_the_ending_does_not_tell(tmp_path: Path) -> None:
    checkpoint = ckpttool.open(saved(STATE, tmp_path))
    assert ckpttool.save(checkpoint, tmp_path / "weights", to="safetensors").format == "safetensors"
    assert "module.w" in load_file(tmp_path / "weights")
    with pytest.raises(UsageFault, match="its ending does not say which format") as fault:
        ckpttool.save(checkpoint, tmp_path / "out.weights")
    assert ".safetensors" in str(fault.value.hint)
    with pytest.raises(UsageFault, match="there is no format 'onnx'") as fault:
        ckpttool.save(checkpoint, tmp_path / "out.pt", to="onnx")
    assert "torch-zip" in str(fault.value.hint)
    assert sorted(os.listdir(tmp_path)) == ["in.pt", "weights"]


def test_an_output_that_is_there_needs_force(tmp_path: Path) -> None:
    checkpoint = ckpttool.open(saved(STATE, tmp_path))
    (tmp_path / "out.pt").symlink_to("nowhere")
    for dry in (True, False):
        with pytest.raises(OutputExists, match=r"out\.pt: already exists") as exists:
            ckpttool.save(checkpoint, tmp_path / "out.pt", dry_run=dry)
    assert "force=True" in str(exists.value.hint)


def test_a_file_without_a_state_can_be_copied_but_not_made_safetensors(tmp_path: Path) -> None:
    checkpoint = ckpttool.open(saved({"epoch": 1}, tmp_path))
    assert ckpttool.save(checkpoint, tmp_path / "out.pt").keys == 0
    assert torch.load(tmp_path / "out.pt") == {"epoch": 1}
    with pytest.raises(NoState, match="no dict of tensors"):
        ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    ckpttool.save(checkpoint, tmp_path / "full.safetensors", full=True)
    assert ckpttool.open(tmp_path / "full.safetensors").tree == {"epoch": 1}


def test_the_input_may_be_the_output_of_another_format(tmp_path: Path) -> None:
    path = saved(STATE, tmp_path)
    ckpttool.convert(path, path, to="safetensors", force=True)
    assert "module.w" in load_file(path)
    with ckpttool.open(path) as checkpoint:
        ckpttool.save(ckpttool.add_prefix(checkpoint)[0], path, force=True)
    assert set(torch.load(path)) == {f"module.{name}" for name in STATE}


def test_a_name_that_is_no_unicode_can_be_written_to(tmp_path: Path) -> None:
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt")
    ckpttool.convert(saved(STATE, tmp_path), out)
    assert list(ckpttool.open(out).state().tensors) == list(STATE)


# Memory.


def test_memory_stays_flat_whatever_the_size(tmp_path: Path) -> None:
    """80 MB in each direction, in processes of their own; `test_needs.py` has one large tensor."""
    big = {f"module.{i}": torch.zeros(5_000_000) for i in range(4)}
    saved({**big, "module.turned": torch.zeros(2000, 500).t()}, tmp_path)
    for words in (
        "strip-prefix in.pt out.pt",
        "strip-prefix in.pt out.safetensors",
        "convert in.pt cast.pt --dtype bf16",
        "convert in.pt full.safetensors --full",
        "digest in.pt",
        "verify in.pt",
    ):
        files = [f"{tmp_path}/{word}" if "." in word else word for word in words.split()]
        assert peak(*files) < MOST, words


def test_an_output_that_a_failing_disk_hides_stays(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    path, out, lstat = saved(STATE, tmp_path), tmp_path / "out.pt", os.lstat
    out.write_bytes(b"old")

    def fail(path: Any, **given: Any) -> os.stat_result:
        if str(path) == str(out):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return lstat(path, **given)

    monkeypatch.setattr(os, "lstat", fail)
    with ckpttool.open(path) as checkpoint, pytest.raises(OSError, match="Input/output"):
        ckpttool.save(checkpoint, out)
    assert out.read_bytes() == b"old"


# ---- What a saving says of itself: contradicting choices, what stays, what is left out, and which devices


TRAINING = {
    "model": OrderedDict({"module.a": torch.arange(4.0), "module.b": torch.ones(2)}),
    "ema": OrderedDict({"module.a": torch.zeros(4)}),
    "optimizer": {
        "state": {0: {"momentum": torch.ones(4)}},
        "param_groups": [{"params": [0], "param_names": ["module.a"]}],
    },
    "epoch": 3,
}


def full_file(folder: Path, tree: object = TRAINING) -> ckpttool.Checkpoint:
    torch.save(tree, folder / "in.pt")
    ckpttool.save(ckpttool.open(folder / "in.pt"), folder / "full.safetensors", full=True)
    return ckpttool.open(folder / "full.safetensors")


SHARDS = {"to": "torch-sharded"}


@pytest.mark.parametrize(
    "output, choices, said",
    [
        ("o.safetensors", {"full": True, "state": "ema"}, "one state of it was named"),
        ("o.pt", {"full": True, "state": "ema"}, "one state of it was named"),
        ("o/", {"full": True, **SHARDS}, "holds only the model's state"),
        ("o.pt", {"keep_copies": True}, "copies were asked for"),
        ("o.safetensors", {"keep_copies": True, "full": True}, "copies were asked for"),
        ("o/", {"keep_copies": True, **SHARDS}, "copies were asked for"),
        ("o.pt", {"shard_size": 100}, "is one file, but a shard size was given"),
        ("o", {"shard_size": 100, "to": "dcp"}, "is one folder that is not cut"),
    ],
)
def test_choices_that_would_do_nothing_are_told(output: str, choices: Any, said: str, tmp_path: Path) -> None:
    for dry_run in (False, True):
        with pytest.raises(UsageFault, match=said) as fault:
            ckpttool.save(opened(TRAINING, tmp_path), f"{tmp_path}/{output}", dry_run=dry_run, **choices)
        assert fault.value.hint
        assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("output", ["out.safetensors", "out/"])
def test_a_full_file_stays_full_when_its_keys_are_renamed(output: str, tmp_path: Path) -> None:
    new, _ = ckpttool.strip_prefix(full_file(tmp_path))
    saved = ckpttool.save(new, f"{tmp_path}/{output}")
    assert saved.left_out == ()
    found = ckpttool.open(tmp_path / output)
    ckpttool.save(found, tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt")
    assert list(back) == list(TRAINING)
    assert (list(back["model"]), list(back["ema"])) == (["a", "b"], ["a"])  # what carries the prefix loses it
    assert back["optimizer"]["param_groups"][0]["param_names"] == ["a"]
    assert back["epoch"] == 3
    if output == "out.safetensors":
        with safe_open(tmp_path / output, "pt") as file:
            assert {"model.a", "model.b", "ema.a"} <= set(file.keys())


def test_tensors_alone_are_taken_out_of_a_full_file_by_asking_for_them(tmp_path: Path) -> None:
    whole = full_file(tmp_path)
    saved = ckpttool.save(whole, tmp_path / "alone.safetensors", full=False)
    assert saved.left_out == ("ema", "optimizer", "epoch")
    ckpttool.save(ckpttool.slim(whole), tmp_path / "slim.safetensors")
    for which in ("alone", "slim"):
        with safe_open(tmp_path / f"{which}.safetensors", "pt") as file:
            assert set(file.keys()) == {"module.a", "module.b"}
            assert "ckpttool.full" not in (file.metadata() or {})


def test_the_command_line_keeps_a_full_file_full_and_convert_asks(cli: Cli, tmp_path: Path) -> None:
    full_file(tmp_path)
    source = tmp_path / "full.safetensors"
    for command, flags, left_out in (
        ("strip-prefix", [], []),
        ("convert", [], ["ema", "optimizer", "epoch"]),
        ("convert", ["--full"], []),
    ):
        ran = cli(command, source, tmp_path / "out.safetensors", *flags, "--json", "--force")
        assert ran.code == 0 and ran.json["left_out"] == left_out
    ran = cli("convert", source, tmp_path / "d.safetensors", "--full", "--state", "ema")
    assert ran.code == 2 and "leave out --full or --state" in ran.err


@pytest.mark.parametrize("kind", ["safetensors", "safetensors-sharded", "dcp"])
def test_names_that_could_run_are_reported_for_each_pickle(kind: str, cli: Cli, tmp_path: Path) -> None:
    """A file of tensors can't run anything; a .pt that is made of it can, where it is loaded so."""
    body = dict_of({"model": dict_of({"a": TENSOR}), "f": name("os", "system")})
    source = ckpttool.open(torch_zip(tmp_path / "in.pt", body, BYTES))
    assert ckpttool.save(source, tmp_path / "same.pt").mentions == ("os.system",)
    ckpttool.save(source, tmp_path / "full", to=kind, full=True)
    saved = ckpttool.save(ckpttool.open(tmp_path / "full"), tmp_path / "out.pt")
    assert saved.mentions == ("os.system",)
    assert_says(cli("convert", tmp_path / "full", tmp_path / "again.pt"), 0, "os.system")
    ran = cli("convert", tmp_path / "full", tmp_path / "still", "--to", "safetensors", "--full")
    assert "os.system" not in ran.err


def test_what_a_format_has_no_place_for_is_called_so(cli: Cli, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "in.pt")
    for ending in ("pt", "safetensors"):
        assert "left out: code\n" in cli("convert", tmp_path / "in.pt", tmp_path / f"out.{ending}").err


# The devices that a `.pt` tags its storages with: said when they are not the CPU, and mapped by --device.

SAID = "torch.load needs map_location='cpu' on a machine without it; --device cpu writes it for any"


def tagged(path: Path, *devices: str) -> Path:
    """A state of one tensor on each device, as torch would have saved it there."""
    weights = {
        f"module.w{i}": tensor(storage(1, key=str(i)), (1,)).replace(text("cpu"), text(device))
        for i, device in enumerate(devices)
    }
    return torch_zip(path, dict_of(weights), {str(i): bytes(4) for i in range(len(devices))})


@pytest.fixture
def on_cuda(tmp_path: Path) -> Path:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    return tagged(tmp_path / "in.pt", "cuda:0", "cpu")


RENAMING = [["strip-prefix"], ["add-prefix", "--prefix", "x."], ["rename-keys", "--map", "module=x"]]
COMMANDS = [["convert"], *RENAMING, ["slim"], ["average"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_device_is_said_and_mapped(command: list[str], on_cuda: Path, cli: Cli, tmp_path: Path) -> None:
    is_computed = command == ["average"]  # such values are on the CPU
    words = [*command, *([on_cuda] * (1 + is_computed))]
    ran = cli(*words, tmp_path / "out.pt")
    assert ran.code == 0, ran.err
    if not is_computed:
        assert "cuda:0: " + SAID in ran.err
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(tmp_path / "out.pt")
    ran = cli(*words, tmp_path / "cpu.pt", "--device", "cpu")
    assert ran.code == 0 and "cuda" not in ran.err
    assert {value.device.type for value in torch.load(tmp_path / "cpu.pt").values()} == {"cpu"}


def test_shards_of_torch_are_mapped_too(on_cuda: Path, cli: Cli, tmp_path: Path) -> None:
    assert_says(cli("convert", on_cuda, tmp_path / "a", "--to", "torch-sharded"), 0, SAID)
    ran = cli("convert", on_cuda, tmp_path / "b", "--to", "torch-sharded", "--device", "cpu")
    assert ran.code == 0 and "cuda" not in ran.err
    for shard in (tmp_path / "b").glob("*.bin"):
        torch.load(shard)


def test_every_storage_is_mapped_wherever_it_is(tmp_path: Path) -> None:
    """Storages inside objects and bare ones too; those of the meta device have no bytes, and stay."""
    body = dict_of({"a": TENSOR.replace(text("cpu"), text("cuda:3")), "b": storage(1, key="1")})
    body = body.replace(text("cpu"), text("cuda:1"))
    path = torch_zip(tmp_path / "in.pt", body, {"0": bytes(4), "1": bytes(4)})
    assert ckpttool.save(ckpttool.open(path), tmp_path / "out.pt").devices == ("cuda:1", "cuda:3")
    assert ckpttool.save(ckpttool.open(path), tmp_path / "1.pt", device="cuda:1").devices == ("cuda:1",)
    assert ckpttool.save(ckpttool.open(path), tmp_path / "cpu.pt", device="cpu").devices == ()
    with ckpttool.open(tmp_path / "cpu.pt") as checkpoint:
        assert {each.location for _, each in checkpoint.storages()} == {"cpu"}
    tree = {"m": torch.empty(2, device="meta"), "c": torch.ones(1)}
    assert convert(tree, tmp_path / "again.pt", device="cpu").devices == ()
    assert torch.load(tmp_path / "again.pt")["m"].device.type == "meta"


def test_values_and_sharing_stay(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    convert({"a": weight, "b": weight[1:]}, tmp_path / "out.pt", device="cpu")
    loaded = torch.load(tmp_path / "out.pt")
    assert loaded["b"].tolist() == [1, 2, 3]
    assert loaded["a"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()


@pytest.mark.parametrize("device", ["", "CPU!", "cpu,cuda", "meta", "a b"])
def test_a_word_that_is_no_device_is_a_usage_error(device: str, cli: Cli, tmp_path: Path) -> None:
    path = tagged(tmp_path / "in.pt", "cpu")
    ran = cli("convert", path, tmp_path / "out.pt", "--device", device)
    assert ran.code == 2 and not (tmp_path / "out.pt").exists()


def test_a_format_without_devices_takes_and_tells_none(on_cuda: Path, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert_says(cli("convert", on_cuda, out, "--device", "cpu"), 2, "--device")
    with pytest.raises(UsageFault):
        ckpttool.save(ckpttool.open(on_cuda), out, device="cpu")
    assert "cuda" not in cli("convert", on_cuda, out).err
