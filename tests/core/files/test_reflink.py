"""`--reflink`: blocks that outputs share with inputs, on real XFS and btrfs; elsewhere, refusals by name."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils.serialization import config

import ckpttool
from ckpttool.core.files.reflink import ALWAYS, BLOCK, LARGE, NEVER, NotShared
from ckpttool.core.formats import saving
from ckpttool.errors import Damaged, Refused, UsageFault
from ckpttool.slimming.slimming import slim_in_place
from tests.support.extents import clone_range, mounted, shared_bytes
from tests.support.running import Cli

XFS, BTRFS = ("mkfs.xfs", "-q", "-m", "reflink=1"), ("mkfs.btrfs", "-q")
STATE = {
    f"layers.{i}.{name}": size for i in range(3) for name, size in (("w", 1 << 18), ("norm", 192), ("b", 768))
}
STATE |= {"embedding": 300 * 1027, "count": 1}  # no whole blocks


def state_of(sizes: dict[str, int] = STATE, prefix: str = "module.") -> dict[str, torch.Tensor]:
    return {prefix + name: torch.arange(float(size)) + size for name, size in sizes.items()}


def save(state: Any, path: Path, alignment: int = BLOCK) -> Path:
    with config.patch("save.storage_alignment", alignment):
        torch.save(state, path)
    return path


def stripped(source: Path, target: Path, **choices: Any) -> ckpttool.Saved:
    with ckpttool.open(source) as checkpoint:
        return ckpttool.save(ckpttool.strip_prefix(checkpoint)[0], target, **choices)


def load(path: Path) -> dict[str, torch.Tensor]:
    is_torch = path.suffix == ".pt"
    found: dict[str, torch.Tensor] = torch.load(path, mmap=True) if is_torch else load_file(path)
    return found


def is_as_meant(path: Path) -> bool:
    found, meant = load(path), state_of(prefix="")
    return found.keys() == meant.keys() and all(torch.equal(found[name], meant[name]) for name in meant)


# ---- real file systems


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    make = {"xfs": XFS, "btrfs": BTRFS}[request.param]
    with mounted(tmp_path_factory.mktemp(request.param), *make) as folder:
        yield folder


@pytest.fixture
def place(disk: Path) -> Any:
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        yield Path(folder)


def used(folder: Path) -> int:
    os.sync()
    facts = os.statvfs(folder)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_always_shares_all_but_headers_and_small_tensors(place: Path, name: str) -> None:
    source, target = save(state_of(), place / "in.pt"), place / name
    before, planned = used(place), stripped(source, target, reflink=ALWAYS, dry_run=True)
    saved = stripped(source, target, reflink=ALWAYS, verify=True)
    assert planned.nbytes == saved.nbytes == target.stat().st_size
    assert used(place) - before < 1 << 20 and saved.nbytes > 4 << 20
    assert shared_bytes(target) >= saved.shared > 0.99 * saved.nbytes
    assert is_as_meant(target)


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_safetensors_are_shared_in_their_order_wherever_their_header_ends(place: Path, name: str) -> None:
    save_file(state_of(), place / "in.safetensors")
    saved = stripped(place / "in.safetensors", place / name, reflink=ALWAYS)
    assert shared_bytes(place / name) >= saved.shared > 0.98 * saved.nbytes
    assert is_as_meant(place / name)
    ckpttool.verify(place / name)


def test_what_torch_aligned_to_64_bytes_is_shared_by_a_pt_and_refused_by_safetensors_with_the_way(
    place: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    sizes = {f"w{i}": (1 << 18) + 1024 * i for i in range(4)}
    save(state_of(sizes, ""), place / "in.pt", 64)
    refused = cli("convert", "in.pt", "out.safetensors", "--reflink", "always")
    assert refused.code == 3 and " and 2 more would lie elsewhere" in refused.err
    hint = refused.err.splitlines()[-1].rpartition("boundaries: ckpttool ")[2]
    assert cli(*hint.split()).code == 0
    assert shared_bytes(place / "aligned.pt") == 0
    assert cli("convert", "in.pt", "out.pt", "--reflink", "always").code == 0
    assert (
        cli("convert", "aligned.pt", "out.safetensors", "--reflink", "always", "--json").json["shared"]
        > 4 << 20
    )
    assert sorted(os.listdir(place)) == ["aligned.pt", "in.pt", "out.pt", "out.safetensors"]
    assert {name: tensor.numel() for name, tensor in load(place / "out.safetensors").items()} == sizes


def test_auto_and_never_write_the_librarys_bytes_and_never_shares_none(place: Path, tmp_path: Path) -> None:
    source = save(state_of(), place / "in.pt")
    for mode in ("auto", NEVER):
        stripped(source, place / f"{mode}.safetensors", reflink=mode)
    save_file({k.removeprefix("module."): v for k, v in state_of().items()}, tmp_path / "theirs.safetensors")
    theirs = (tmp_path / "theirs.safetensors").read_bytes()
    assert [(place / f"{mode}.safetensors").read_bytes() == theirs for mode in ("auto", NEVER)] == [
        True,
        True,
    ]
    assert stripped(source, place / "never.pt", reflink=NEVER).shared == shared_bytes(place / "never.pt") == 0
    assert stripped(source, place / "auto.pt").shared > 3 << 20


def test_shards_and_the_files_of_ranks_and_what_a_delta_leaves_are_shared(place: Path, cli: Cli) -> None:
    source = save(state_of(prefix=""), place / "in.pt")
    with ckpttool.open(source) as checkpoint:
        saved = ckpttool.save(checkpoint, f"{place}/cut/", shard_size=2 << 20, reflink=ALWAYS)
        ckpttool.split(checkpoint, place / "ranks", 2, reflink=ALWAYS)
    assert saved.shards > 1 and saved.shared > 0.98 * saved.nbytes
    assert sum(map(shared_bytes, (place / "ranks").iterdir())) > 3 << 20
    newer = save(state_of(prefix="") | {"layers.0.w": torch.ones(1 << 18)}, place / "new.pt")
    ckpttool.delta(source, newer, place / "delta.safetensors")
    words = ["apply", source, place / "delta.safetensors", place / "again.safetensors"]
    assert cli(*words, "--reflink", "always").code == 0
    assert shared_bytes(place / "again.safetensors") > 3 << 20
    assert torch.equal(load(place / "again.safetensors")["layers.0.w"], torch.ones(1 << 18))


def test_a_run_is_slimmed_in_place_without_a_copy(place: Path) -> None:
    for number in (1, 2):
        optimizer = {"state": {0: {"exp_avg": torch.rand(1 << 18)}}, "param_groups": [{"params": [0]}]}
        save({"model": state_of(), "optimizer": optimizer}, place / f"step-{number}.pt")
        os.utime(place / f"step-{number}.pt", (number, number))
    free = used(place)
    with open(place / "step-1.pt", "rb"):  # which keeps its blocks: what is new are those of no other
        run = slim_in_place(place, keep_newest=1, reflink=ALWAYS)
        assert used(place) - free < 1 << 20
        assert shared_bytes(place / "step-1.pt") > 4 << 20
    assert [file.name for file in run.slimmed] == ["step-1.pt"] and run.freed > 1 << 20


def test_a_damaged_input_is_found_though_its_blocks_are_shared(place: Path) -> None:
    source = save(state_of(), place / "in.pt")
    with ckpttool.open(source) as checkpoint:
        offset = checkpoint.tree["module.layers.1.w"].data.offset
    with open(source, "r+b") as file:
        file.seek(offset + 500_000)
        file.write(b"!")
    with pytest.raises(Damaged, match="do not match their checksum"):
        stripped(source, place / "out.safetensors", reflink=ALWAYS)
    assert os.listdir(place) == ["in.pt"]


def test_an_input_that_changes_while_it_is_shared_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(state_of(), place / "in.pt")
    write = saving.SavePlan._write

    def change(self: Any, out: Any) -> None:
        write(self, out)
        out.settle()
        os.utime(source)

    monkeypatch.setattr(saving.SavePlan, "_write", change)
    with pytest.raises(Damaged, match="changed while it was read"):
        stripped(source, place / "out.safetensors", reflink=ALWAYS)
    assert os.listdir(place) == ["in.pt"]


def test_an_output_on_another_file_system_is_refused_and_not_begun(place: Path, tmp_path: Path) -> None:
    source = save(state_of(), place / "in.pt")
    with pytest.raises(
        Refused, match=r"in\.pt: can't share its blocks with the output: Invalid cross-device link"
    ):
        stripped(source, tmp_path / "out.safetensors", reflink=ALWAYS)
    assert not os.listdir(tmp_path)
    stripped(source, tmp_path / "out.safetensors")


def test_holes_and_a_last_block_in_part_are_shared(place: Path) -> None:
    source = save(state_of(), place / "in.pt")
    with ckpttool.open(source) as checkpoint:
        data = checkpoint.tree["module.embedding"].data
    with open(source, "r+b") as file:
        os.truncate(file.fileno(), source.stat().st_size)
    assert data.nbytes % BLOCK
    shutil.copy(source, place / "copy.pt")
    saved = stripped(place / "copy.pt", place / "out.safetensors", reflink=ALWAYS)
    assert saved.shared > 0.99 * saved.nbytes and is_as_meant(place / "out.safetensors")


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "options"),
    [
        ((*XFS, "-b", "size=1024"), "loop"),
        ((*XFS, "-b", "size=65536"), "loop"),
        (BTRFS, "loop,compress-force=zstd"),
        (BTRFS, "loop,nodatacow"),
    ],
    ids=["1k", "64k", "compressed", "nodatacow"],
)
def test_other_sizes_of_blocks_and_ways_to_store_them(
    make: tuple[str, ...], options: str, tmp_path: Path
) -> None:
    with mounted(tmp_path, *make, options=options) as folder:
        source = save(state_of(), folder / "in.pt", max(BLOCK, os.statvfs(folder).f_bsize))
        for name in ("out.safetensors", "out.pt"):
            saved = stripped(source, folder / name, reflink=ALWAYS)
            assert shared_bytes(folder / name) >= saved.shared > 0.9 * saved.nbytes
            assert is_as_meant(folder / name)
        stripped(source, folder / "auto.pt")
        assert is_as_meant(folder / "auto.pt")


# ---- elsewhere


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("strip-prefix in.pt out.safetensors", 3, "in.pt: can't share its blocks with the output: "),
        (
            "strip-prefix in.pt out.safetensors --dry-run",
            3,
            "in.pt: can't share its blocks with the output: ",
        ),
        ("strip-prefix in.pt new/", 3, "in.pt: can't share its blocks with the output: "),
        ("convert tiny.pt out.pt", 3, "tiny.pt: can't share its blocks"),
        ("convert in.pt -", 3, "-: is no file of this machine"),
        ("convert in.pt out --to dcp", 3, "torch's library, which shares no blocks"),
        ("convert in.pt out.safetensors --part 1/2", 2, "has no parts"),
        ("slim --in-place . --keep-newest 1", 3, "can't share its blocks"),
        ("slim --in-place . --keep-newest 1 --dry-run", 3, "can't share its blocks"),
        ("split tiny.pt out --ranks 2 --as dtensor", 3, "tiny.pt: can't share its blocks"),
    ],
)
def test_where_blocks_can_not_be_shared_always_refuses_and_leaves_nothing(
    words: str, code: int, said: str, here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fcntl, "ioctl", lambda *_: (_ for _ in ()).throw(OSError(95, "Operation not supported"))
    )
    optimizer = {"state": {0: {"exp_avg": torch.rand(9)}}, "param_groups": [{"params": [0]}]}
    save({"model": state_of(), "optimizer": optimizer}, here / "in.pt")
    save({"model": state_of(), "optimizer": optimizer}, here / "last.pt")
    save({"w": torch.ones(4, 2), "b": torch.ones(4)}, here / "tiny.pt")
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    ran = cli(*words.split(), "--reflink", "always")
    assert ran.code == code and said in ran.err
    assert {path.name: path.read_bytes() for path in here.iterdir()} == before
    assert cli("strip-prefix", "in.pt", "out.safetensors", "--reflink", "auto").code == 0


def test_a_mode_that_there_is_not_is_a_wrong_usage(tmp_path: Path) -> None:
    source = save(state_of(), tmp_path / "in.pt")
    with pytest.raises(UsageFault, match="'sometimes' is no way to share"):
        stripped(source, tmp_path / "out.pt", reflink="sometimes")


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", clone_range)


@pytest.mark.usefixtures("sharing")
def test_values_that_are_computed_share_nothing(here: Path, cli: Cli) -> None:
    save(state_of(), here / "in.pt")
    ran = cli("convert", "in.pt", "out.safetensors", "--dtype", "bf16", "--reflink", "always")
    assert ran.code == 3 and "in.pt: has no values that stay as they lie there" in ran.err
    ran = cli("convert", "in.pt", "out.pt", "--dtype", "bf16", "--reflink", "always")
    assert ran.code == 3 and "in.pt: has no values that stay as they lie there" in ran.err


TENSORS = st.tuples(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]),
    st.sampled_from([0, 1, 7, 256, 700, 1024, LARGE, LARGE + 1, LARGE + 512, 2 * LARGE]),
)


@pytest.mark.usefixtures("sharing")
@given(
    st.lists(TENSORS, max_size=12), st.sampled_from([8, 64, BLOCK]), st.sampled_from(["pt", "safetensors"])
)
@example([(torch.float64, 1024), (torch.float64, LARGE)], 8, "safetensors")  # a small one begins the row
def test_any_tensors_are_written_as_they_were_or_refused(tensors: Any, alignment: int, kind: str) -> None:
    state = {f"t{i}": torch.full((count,), i % 2, dtype=dtype) for i, (dtype, count) in enumerate(tensors)}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, f"in.{kind}"), Path(folder, "out.safetensors")
        save(state, source, alignment) if kind == "pt" else save_file(state, source)
        with ckpttool.open(source) as checkpoint:
            try:
                saved = ckpttool.save(checkpoint, target, reflink=ALWAYS, verify=True)
            except NotShared:
                assert kind == "pt" and not target.exists()
                return
            assert (
                ckpttool.save(checkpoint, target, reflink=ALWAYS, dry_run=True, force=True).nbytes
                == saved.nbytes
            )
        found = load_file(target)
        assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
        rows = sum(tensor.nbytes for tensor in state.values())
        assert kind == "pt" or saved.shared > rows - 2 * BLOCK or rows < 2 * LARGE
