"""Folders in which each rank saved its own file: opened as one whole checkpoint, in bounded memory."""

from __future__ import annotations

import pickle
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # so that torch.load knows DTensor
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.files.copying import Output
from ckpttool.core.formats.pytorch import zip as torch_zip
from ckpttool.core.inert_pickle.values import Global, Record
from ckpttool.errors import CkptToolError, Damaged, RanksDiffer, Unreadable, Unsupported, UsageFault
from tests.ranks import shardings
from tests.support.comparing import assert_same, opened, refused
from tests.support.running import Cli, assert_says, within

# ---- Folders in which each rank saved its own file with torch.save: opened as one whole checkpoint ----


RunRanks = Callable[..., Any]


def saved(run_ranks: RunRanks, case: Callable[..., None], folder: Path, world_size: int = 4) -> Path:
    """Run a case of `shardings` and return the folder of its files, beside which is `…-whole.pt`."""
    folder = folder / "ranks"
    folder.mkdir()
    run_ranks(world_size, case, str(folder), timeout=60)
    return folder


@pytest.fixture(scope="module")
def placed(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save tensors placed in many ways by 4 ranks."""
    return saved(run_ranks, shardings.save_placed, tmp_path_factory.mktemp("placed"))


@pytest.fixture(scope="module")
def hsdp(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model under hybrid sharding, with frozen layers, BatchNorm and the optimizer, by 4 ranks."""
    return saved(run_ranks, shardings.save_hsdp, tmp_path_factory.mktemp("hsdp"))


@pytest.fixture(scope="module")
def fsdp1(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model under FSDP1 in folders `sharded`, `local` and `own`, by 2 ranks."""
    return saved(run_ranks, shardings.save_fsdp1, tmp_path_factory.mktemp("fsdp1"), 2)


@pytest.fixture
def copied(hsdp: Path, tmp_path: Path) -> Path:
    """Return a copy of the hybrid run's folder, to be damaged."""
    return Path(shutil.copytree(hsdp, tmp_path / "copied"))


def loaded(folder: Path, **choices: Any) -> Any:
    """Return what torch loads of a folder, converted to one file."""
    out = folder.parent / f"{folder.name}-out.pt"
    with ckpttool.open(folder) as checkpoint:
        ckpttool.save(checkpoint, out, force=True, **choices)
    return torch.load(out, weights_only=True)


def apart(tree: Any) -> Any:
    """Return a tree whose tensors are contiguous copies, each with its own storage."""
    if isinstance(tree, dict):
        new = type(tree)((key, apart(value)) for key, value in tree.items())
        if hasattr(tree, "_metadata"):
            new._metadata = tree._metadata  # type: ignore[attr-defined]
        return new
    if isinstance(tree, list):
        return [apart(value) for value in tree]
    return tree.detach().clone(memory_format=torch.contiguous_format) if torch.is_tensor(tree) else tree


def assert_is(found: Any, whole: Path | str) -> None:
    """Raise AssertionError unless a tree has the values of a file, wherever in memory."""
    assert_same(apart(found), apart(torch.load(whole)))


def changed(path: Path, change: Callable[[Any], object]) -> Path:
    """Change what torch loads of a rank's file, and save it again."""
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)
    return path


@pytest.fixture
def anew(placed: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder of placed tensors, to be changed."""
    return Path(shutil.copytree(placed, tmp_path / "anew"))


def on_ranks(folder: Path, change: Callable[[Any, int], object]) -> Path:
    """Change each file of a folder, in a way that depends on the rank."""
    for rank, path in enumerate(sorted(folder.iterdir())):
        changed(path, partial(change, rank=rank))
    return folder


def test_tensors_placed_in_any_way_are_whole(placed: Path) -> None:
    found = loaded(placed)
    assert_is(found, f"{placed}-whole.pt")
    assert found["tied"].data_ptr() == found["rows"].data_ptr()


def test_cuts_in_another_order_than_the_mesh_s_are_whole(run_ranks: RunRanks, tmp_path: Path) -> None:
    specs = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    if not hasattr(specs, "ShardOrderEntry"):
        pytest.skip("this torch has no order of shards")
    folder = saved(run_ranks, shardings.save_in_order, tmp_path)
    assert torch.equal(torch.load(f"{folder}-whole.pt")["uneven"], torch.arange(35.0).reshape(7, 5))
    assert_is(loaded(folder), f"{folder}-whole.pt")

    def forget(tree: Any) -> None:
        tree["even"]._spec.__dict__.update(shard_order=(specs.ShardOrderEntry(0, (1,)),))

    changed(folder / "model_world_size_4_rank_1.pt", forget)
    refused(folder, r"rank_1\.pt: 'even' is a sharded tensor whose description is malf")


def test_fsdp2_over_tensor_parallel_is_whole_with_the_optimizer(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder = saved(run_ranks, shardings.save_fsdp_tp, tmp_path)
    assert_is(loaded(folder), f"{folder}-whole.pt")
    ranks = ckpttool.open(folder).ranks
    assert ranks is not None
    found = ranks.world_size, ranks.mesh, ranks.step, sorted(ranks.held)
    assert found == (4, "fsdp 2 x tp 2", 1, [0, 1, 2, 3])


def test_hsdp_and_fsdp1_are_whole(hsdp: Path, fsdp1: Path) -> None:
    assert_is(loaded(hsdp), f"{hsdp}-whole.pt")
    assert_is(loaded(fsdp1 / "sharded"), fsdp1 / "whole.pt")


@pytest.mark.long
def test_fsdp1_on_a_mesh_is_whole(run_ranks: RunRanks, tmp_path: Path) -> None:
    on_a_mesh = saved(run_ranks, shardings.save_fsdp1_on_a_mesh, tmp_path, 2)
    assert_is(loaded(on_a_mesh), f"{on_a_mesh}-whole.pt")


def test_local_state_dicts_of_fsdp1_are_refused_by_name(fsdp1: Path) -> None:
    refused(fsdp1 / "local", r"LOCAL_STATE_DICT.*without their names and shapes", Unsupported)


def test_flat_momentum_of_fsdp1_is_left_out_by_name(fsdp1: Path) -> None:
    checkpoint = ckpttool.open(fsdp1 / "own")
    assert checkpoint.unread == ("optim_world_size_2_rank_*.pt (flat pieces without names and places)",)
    assert_same(apart(loaded(fsdp1 / "own")), apart(torch.load(fsdp1 / "whole.pt")["model"]))


def test_files_of_any_name_are_merged_in_any_order(placed: Path, tmp_path: Path) -> None:
    for rank, name in enumerate("zbxa"):
        shutil.copy(placed / f"model_world_size_4_rank_{rank}.pt", tmp_path / f"{name}.pt")
    with ckpttool.open_ranks(sorted(tmp_path.iterdir())) as checkpoint:
        ckpttool.save(checkpoint, tmp_path / "out.safetensors")
    assert ckpttool.digest(tmp_path / "out.safetensors") == ckpttool.digest(f"{placed}-whole.pt")


@pytest.mark.parametrize("form", ["mesh", "layout"])
def test_meshes_as_older_torch_pickles_them_are_read(form: str, placed: Path, anew: Path) -> None:
    """Torch up to 2.9 keeps a mesh's ranks as a tensor, 2.10 a layout of one shape and stride."""

    def age(state: Any, rank: int) -> None:
        seen = set()
        for value in state.values():
            mesh = value._spec.mesh if hasattr(value, "_spec") else None
            if mesh is not None and id(mesh) not in seen:
                seen.add(id(mesh))
                older(mesh, form)

    on_ranks(anew, age)
    assert ckpttool.digest(anew) == ckpttool.digest(f"{placed}-whole.pt")


@pytest.fixture(params=["mesh", "apart"])
def staged(request: pytest.FixtureRequest, anew: Path) -> Path:
    """Return files of tensors on 2 of the 4 ranks, whose meshes do not say of what they are a part."""

    def stage(state: Any, rank: int) -> None:
        part, rows = state["numbers"], state["rows"]
        older(part._spec.mesh, request.param)
        state.clear()
        state.update({f"stage{rank // 2}": part, "rows": rows})

    return on_ranks(anew, stage)


def test_a_mesh_of_some_ranks_does_not_say_how_many_there_were(staged: Path, placed: Path) -> None:
    whole = torch.load(f"{placed}-whole.pt")
    wanted = {"stage0": whole["numbers"], "rows": whole["rows"], "stage1": whole["numbers"]}
    assert_same(apart(loaded(staged)), apart(wanted))
    for path in staged.iterdir():
        changed(path, lambda tree: tree.pop("rows"))
    found = loaded(staged)
    assert_same(apart(found), apart({name: wanted[name] for name in ("stage0", "stage1")}))
    for rank in (2, 3):
        (staged / f"model_world_size_4_rank_{rank}.pt").unlink()
    with pytest.raises(Damaged, match="the files of ranks 2, 3 of 4 are missing"):
        ckpttool.open(staged).state()


def older(mesh: Any, form: str) -> None:
    """Give a device mesh the attributes that an older torch pickles, or those of a mesh of two ranks."""
    if form == "apart":
        ranks = list(mesh._root_mesh._flatten_rank_map)
        here = ranks[mesh._rank // 2 * 2 :][:2]
        vars(mesh).update(_root_mesh=None, _flatten_rank_map=tuple(here), _rank_map=torch.tensor(here))
        return
    if form == "layout":
        axes = mesh._layout.axes
        layout = object.__new__(type(mesh._layout))
        vars(layout).update(
            shape=tuple(axis.shape[0] for axis in axes), stride=tuple(axis.stride[0] for axis in axes)
        )
        vars(mesh)["_layout"] = layout
        return
    several = mesh._layout.remap_to_tensor(mesh._rank_map)
    ranks = next(one for one in several if (one == mesh._rank).any()).to(torch.int32)
    now = dict(vars(mesh))
    vars(mesh).clear()
    vars(mesh).update(
        device_type="cpu",
        mesh=ranks,
        mesh_dim_names=now["_mesh_dim_names"],
        _flatten_mesh_list=tuple(ranks.flatten().tolist()),
        _coordinate_on_dim=list(now["_coordinate_on_dim"]),
        _thread_id=None,
    )


# What does not fit.


@pytest.mark.parametrize("rank", range(4))
def test_a_missing_rank_is_named(rank: int, copied: Path, tmp_path: Path, cli: Cli) -> None:
    name = f"model_world_size_4_rank_{rank}.pt"
    (copied / name).unlink()
    page = cli("inspect", copied)
    assert page.code == 0
    assert f"missing     the files of rank {rank}: {name}" in page.out
    of_file = ("merge", tmp_path / "o.pt"), ("convert", tmp_path / "o.safetensors")
    for command, *output in (*of_file, ("digest",), ("verify",)):
        ran = cli(command, copied, *output)
        assert_says(ran, 3, f"copied: the file of rank {rank} of 4 is missing: {name}")
    assert not (tmp_path / "o.pt").exists()


def test_all_but_one_missing(copied: Path) -> None:
    for path in copied.glob("*_rank_[013].pt"):
        path.unlink()
    with pytest.raises(Damaged, match="the files of ranks 0, 1, 3 of 4 are missing"):
        ckpttool.open(copied).state()


def test_a_file_that_is_there_twice_is_named(copied: Path) -> None:
    shutil.copy(copied / "model_world_size_4_rank_1.pt", copied / "model_world_size_4_rank_2.pt")
    refused(copied, r"rank_2\.pt: was written by rank 1, and so was .*rank_1\.pt")


def test_a_rank_of_another_world_size_is_named(run_ranks: RunRanks, placed: Path, tmp_path: Path) -> None:
    small = saved(run_ranks, shardings.save_pieces, tmp_path, 2) / "placed-0.pt"
    said = r"placed-0\.pt: was written by one of 2 ranks, and .* by one of 4"
    refused([*sorted(placed.iterdir())[1:], small], said, opened=ckpttool.open_ranks)


def test_a_rank_of_another_step_is_named(copied: Path) -> None:
    def later(tree: Any) -> None:
        for entry in tree["state"].values():
            entry["step"] += 5

    changed(copied / "optim_world_size_4_rank_2.pt", later)
    refused(copied, r"optim_world_size_4_rank_2\.pt: is of another save: .*step' is 6, and 1 in .*rank_0\.pt")


COUNTERS: dict[str, Callable[[int], Any]] = {
    "epoch": lambda n: n,
    "global_step": torch.tensor,
    "steps": lambda n: torch.tensor([n], dtype=torch.bfloat16),
    "iteration": lambda n: torch.tensor(3.0 if n == 3 else torch.nan),
    "trainer.1.step": lambda n: {0: {"step": torch.tensor(3)}, 1: {"step": torch.tensor(n)}},
}


@pytest.mark.parametrize("take", [(), ("--take-rank", 0)])
@pytest.mark.parametrize("case", COUNTERS)
def test_counters_of_other_saves_are_told(case: str, take: Any, anew: Path, tmp_path: Path, cli: Cli) -> None:
    made, number = COUNTERS[case], "nan" if case == "iteration" else "4"
    on_ranks(anew, lambda tree, rank: tree.update({case.partition(".")[0]: made(3 if rank < 3 else 4)}))
    ran = cli("merge", anew, tmp_path / "o.pt", *take)
    assert ran.code == 3
    said = rf"rank_3\.pt: is of another save: '{case}' is {number}, and 3 in .*rank_0\.pt"
    assert re.search(said, ran.err)


@pytest.mark.parametrize("step", [made(n) for made in (float, torch.tensor) for n in (torch.nan, torch.inf)])
def test_a_step_that_is_no_number_is_kept(step: Any, anew: Path) -> None:
    state = {0: {"step": step, "exp_avg": torch.ones(2)}}
    optimizer = {"state": state, "param_groups": [{"params": [0]}]}
    ranks = ckpttool.open(on_ranks(anew, lambda tree, rank: tree.update(optimizer=optimizer))).ranks
    assert ranks is not None and ranks.step is None
    assert str(float(loaded(anew)["optimizer"]["state"][0]["step"])) == str(float(step))


FORMS: dict[str, tuple[Callable[[int, Any], Any], str]] = {
    "None": (lambda rank, piece: None if rank else {"w": piece}, r"rank_1\.pt: lacks 'ema\.w', .*rank_0\.pt"),
    "lists": (lambda rank, piece: [piece] * (1 + rank // 3), r"rank_0\.pt: lacks 'ema\.1', .*rank_3\.pt"),
    "types": (
        lambda rank, piece: [piece] if rank < 3 else (piece,),
        r"rank_3\.pt: holds 'ema' in another form than .*rank_0\.pt",
    ),
}


@pytest.mark.parametrize("output", ["o.pt", "o.safetensors"])
@pytest.mark.parametrize("form", FORMS)
def test_a_piece_of_some_ranks_is_named(form: str, output: str, anew: Path, tmp_path: Path, cli: Cli) -> None:
    held, message = FORMS[form]
    on_ranks(anew, lambda tree, rank: tree.update(ema=held(rank, tree["rows"])))
    ran = cli("merge", anew, tmp_path / output)
    assert ran.code == 3
    assert re.search(message, ran.err), ran.err


def test_a_counter_of_another_save_is_named_beside_the_same_numbers(anew: Path) -> None:
    on_ranks(anew, lambda tree, rank: tree.update(local_rank=rank, epoch=rank))
    refused(anew, r"is of another save: 'epoch' is 1, and 0 in")


def test_trees_that_contain_themselves_are_refused(anew: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    on_ranks(anew, lambda tree, rank: tree.update(endless=endless))
    with pytest.raises(CkptToolError, match="nested too deeply"):
        ckpttool.open(anew).state()


def test_other_values_that_differ_are_named_and_the_first_kept(anew: Path) -> None:
    on_ranks(anew, lambda tree, rank: tree.update(host=f"node{rank // 2}", lr=0.1))
    checkpoint = ckpttool.open(anew)
    assert checkpoint.unread == ("'host' of rank 2, 3, which differs from rank 0's",)
    assert (checkpoint.tree["host"], checkpoint.tree["lr"]) == ("node0", 0.1)


def test_a_piece_that_does_not_fit_its_place_is_named(anew: Path) -> None:
    def grow(tree: Any) -> None:
        tree["rows"]._local_tensor = torch.zeros(3, 5)

    changed(anew / "model_world_size_4_rank_1.pt", grow)
    refused(anew, r"rank_1\.pt: its piece of 'rows' has shape \[3, 5\], and its placement")


def on_mesh(**fields: Any) -> Callable[[Any], None]:
    """Return what changes the mesh of a tensor."""
    return lambda tree: tree["rows"]._spec.mesh.__dict__.update(fields)


OF_OTHER_RANKS = {"_root_mesh": None, "_flatten_rank_map": (0, 1, 2, 3, 1 << 40)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: tree.pop("rows"), "rank_3.pt: lacks 'rows', of which .*rank_0.pt has a piece"),
        (lambda tree: tree.update(rows=torch.zeros(7, 5)), "rank_3.pt: has no piece of 'rows'"),
        (lambda tree: tree.update(rows=tree["large"]), r"a piece of 'rows' as float32 \[300, 1100\]"),
        (lambda tree: tree.update(alike=torch.zeros(4)), r"'alike' is float32 \[4\], and float32 \[3\] in"),
        (lambda tree: tree.update(alike=1), "'alike' is no tensor"),
        (on_mesh(_coordinate_on_dim=(9,)), "device mesh has a coordinate outside its axes"),
        (on_mesh(_rank=1), "device mesh has strides that lead outside its ranks"),
        (on_mesh(_flatten_rank_map=(0, 1, 3, 3)), "device mesh lists a rank twice"),
        (on_mesh(_mesh_dim_names=("a", "b", "c")), "device mesh has other names than axes"),
        (on_mesh(**OF_OTHER_RANKS), "says that rank 3 of 1099511627777 ranks wrote it"),
        (lambda tree: tree["rows"]._spec.__dict__.update(placements=()), "description is malformed"),
    ],
)
def test_a_tampered_file_is_named(change: Callable[[Any], object], words: str, anew: Path) -> None:
    changed(anew / "model_world_size_4_rank_3.pt", change)
    with pytest.raises(Damaged, match=words) as caught:
        ckpttool.open(anew).state()
    assert "rank_3.pt" in caught.value.path


def test_a_partial_tensor_is_refused_by_name(anew: Path) -> None:
    from torch.distributed.tensor import Partial

    on_ranks(anew, lambda tree, rank: tree["rows"]._spec.__dict__.update(placements=(Partial(),)))
    refused(anew, "'rows' is a DTensor placed as Partial", Unsupported)


def test_a_hostile_pickle_in_the_place_of_a_rank_runs_nothing(copied: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"0.weight": Evil(), "x": [Evil()]}, copied / "model_world_size_4_rank_1.pt")
    with pytest.raises(CkptToolError):
        ckpttool.open(copied).state()
    (copied / "model_world_size_4_rank_1.pt").write_bytes(pickle.dumps(Evil()))
    refused(copied, r"rank_1\.pt", CkptToolError)
    assert not (tmp_path / "ran").exists()


def test_every_truncated_file_is_named(copied: Path, tmp_path: Path, cli: Cli) -> None:
    for path in sorted(copied.glob("[mo]*_rank_*.pt")):
        raw = path.read_bytes()
        for size in (0, 1, len(raw) // 3, len(raw) - 1):
            path.write_bytes(raw[:size])
            assert_says(cli("merge", copied, tmp_path / "out.pt"), 3, path.name)
        path.write_bytes(raw)
    assert not (tmp_path / "out.pt").exists()


def test_a_byte_that_changed_is_found_by_its_checksum(copied: Path, tmp_path: Path, cli: Cli) -> None:
    path = copied / "model_world_size_4_rank_3.pt"
    one = torch.load(path, weights_only=False)["2.weight"]._local_tensor.numpy().tobytes()
    raw = path.read_bytes()
    assert raw.count(one) == 1
    path.write_bytes(raw.replace(one, bytes([one[0] ^ 1]) + one[1:]))
    assert cli("verify", copied).code == 1
    for options in ([], ["--take-rank", 3]):
        ran = cli("merge", copied, tmp_path / "out.pt", *options)
        assert_says(ran, 3, "rank_3.pt: the bytes of 'model.2.weight' do not match their checksum")


def test_a_file_of_something_else_among_the_ranks_is_named(copied: Path) -> None:
    (copied / "log_rank_0.bin").write_bytes(b"hello")
    refused(copied, r"log_rank_0\.bin: is not a file that torch or safetensors wrote", CkptToolError)


def test_links_to_the_files_are_files(hsdp: Path, tmp_path: Path) -> None:
    for path in hsdp.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert ckpttool.digest(tmp_path) == ckpttool.digest(hsdp)


# Replicas.


@pytest.fixture
def differing(copied: Path) -> Path:
    """Return a folder in which rank 3 has other running statistics, and one other bit in a weight."""

    def change(tree: Any) -> None:
        tree["3.running_mean"] += 1
        tree["2.weight"]._local_tensor.view(torch.int32)[0, 0] ^= 1

    changed(copied / "model_world_size_4_rank_3.pt", change)
    return copied


def test_ranks_that_differ_are_named_with_every_tensor(differing: Path, tmp_path: Path, cli: Cli) -> None:
    ran = cli("merge", differing, tmp_path / "out.safetensors")
    assert ran.code == 1
    assert f"error: {differing}: 'model.2.weight' differs between rank 1 and rank 3" in ran.err
    assert "1 other tensor differs too: model.3.running_mean" in ran.err
    assert "hint: take one rank's values: --take-rank 1" in ran.err
    assert not (tmp_path / "out.safetensors").exists()


def test_all_names_of_a_tied_tensor_that_differs_are_told(anew: Path, tmp_path: Path, cli: Cli) -> None:
    def tie(tree: Any, rank: int) -> None:
        tensor, parameter = torch.ones(3) + rank, torch.nn.Parameter(torch.ones(2) * rank)
        tree.update(a=tensor, b=tensor, c=parameter, d=parameter)

    ran = cli("merge", on_ranks(anew, tie), tmp_path / "o.pt")
    assert "'a' differs between rank 0 and rank 1" in ran.err
    assert "3 other tensors differ too: b, c, d" in ran.err
    assert {*"abcd"} <= {*ckpttool.open(anew).ranks.replicated}  # type: ignore[union-attr]


@pytest.mark.parametrize("command", ["digest", "convert", "slim", "disarm", "average"])
def test_other_commands_compare_replicas_too(command: str, differing: Path, cli: Cli, here: Path) -> None:
    inputs, output = [differing] * (1 + (command == "average")), ["o.pt"] * (command != "digest")
    ran = cli(command, *inputs, *output)
    assert (ran.code, f"error: {differing}: '" in ran.err) == (1, True), ran.err
    assert "differs between rank" in ran.err
    assert f"hint: take one rank's values: ckpttool merge {differing} OUT --take-rank 1" in ran.err
    assert not (here / "o.pt").exists()


def test_verify_names_every_tensor_in_which_ranks_differ(differing: Path, cli: Cli) -> None:
    ran = cli("verify", differing, "--json")
    assert ran.code == 1
    found = {problem["name"]: problem["message"] for problem in ran.json["problems"]}
    assert found.keys() == {"model.2.weight", "model.3.running_mean"}
    assert found["model.2.weight"].startswith("'model.2.weight' differs between rank 1 and rank 3")


@pytest.mark.parametrize("rank", [0, 3])
def test_one_rank_s_replicas_can_be_taken(rank: int, differing: Path) -> None:
    with ckpttool.open_ranks(differing, take_rank=rank) as checkpoint:
        found = checkpoint.state().load()
    held = torch.load(differing / f"model_world_size_4_rank_{rank}.pt", weights_only=False)
    assert torch.equal(found["3.running_mean"], held["3.running_mean"])


def test_only_a_rank_that_is_there_can_be_taken(hsdp: Path, tmp_path: Path) -> None:
    refused(hsdp, "no file of it was written by rank 4", UsageFault, ckpttool.open_ranks, take_rank=4)
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    refused([tmp_path / "model.pt"], "holds no piece of a tensor", UsageFault, ckpttool.open_ranks)


def test_reading_alone_tells_that_ranks_differ(differing: Path) -> None:
    state = ckpttool.open(differing).state()
    with pytest.raises(RanksDiffer, match="differs between rank") as caught:
        state.load()
    error = caught.value
    assert (error.path, error.ranks) == (str(differing), (1, 3))
    assert error.hint == "take one rank's values: ckpttool.open_ranks(path, take_rank=1)"


def test_a_piece_takes_little_memory_while_all_ranks_are_read(tmp_path: Path) -> None:
    """A pickled DTensor takes 2.6 kB; only those of one file are there at a time."""
    save_file({f"layers.{i}.weight": torch.zeros(8, 1) for i in range(60)}, tmp_path / "m.safetensors")
    ckpttool.split(ckpttool.open(tmp_path / "m.safetensors"), tmp_path / "ranks", 8)
    ckpttool.open_ranks(tmp_path / "ranks")  # which imports what it needs
    tracemalloc.start()
    try:
        ckpttool.open_ranks(tmp_path / "ranks")
        assert tracemalloc.get_traced_memory()[1] < 2000 * 8 * 60
    finally:
        tracemalloc.stop()


# ---- Files of ranks whose fields multiply are bounded by their bytes; files that each hold the whole are one


STRIDED = Global("torch.distributed.tensor.placement_types", "_StridedShard")
MANY = 1 << 18


def split(folder: Path, state: dict[str, Any], ranks: int = 2) -> Path:
    """Write a state as the files of ranks; return that of rank 0."""
    ckpttool.split(opened(state, folder), folder / "ranks", ranks, device="cpu")
    return folder / "ranks" / f"model_world_size_{ranks}_rank_0.pt"


def altered(file: Path, change: Callable[[Any], object]) -> Path:
    """Change the contents of a file, without asking whether a command would write them."""
    with ckpttool.open(file) as checkpoint:
        change(checkpoint.tree)
        new = file.with_suffix(".new")
        with new.open("wb") as raw, Output(raw) as out:
            torch_zip.write(checkpoint, out, file.name)
    new.rename(file)
    return file.parent


def spec(value: Any) -> Any:
    return value.args[3][1]["_spec"].state


def enlarged(value: Any, local: tuple[int, ...], stride: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Give a piece and its tensor other shapes, of as many bytes as before."""
    function, kind, args, state = value.args
    old = state[1]["_local_tensor"]
    state[1]["_local_tensor"] = ckpttool.TensorRef(old.storage, old.dtype, local, stride, 0)
    value.args = (function, kind, (*args[:2], whole, *args[3:]), state)


def strided(dim: int, factor: int) -> Record:
    return Record("newobj", STRIDED, (), state={"dim": dim, "split_factor": factor}, has_state=True)


def refuses(folder: Path, words: str) -> None:
    with within(10, time.process_time):
        assert refused(folder, words).path.endswith("rank_0.pt")


def test_many_tensors_in_many_chunks_are_refused(tmp_path: Path) -> None:
    state = {f"w{i}": torch.zeros(2, dtype=torch.int8).float() for i in range(40)}

    def cut(tree: Any) -> None:
        for i, value in enumerate(tree.values()):
            enlarged(value, (MANY - i,), (0,), (2 * MANY - 2 * i,))
            spec(value)["placements"] = (strided(0, MANY),)

    refuses(altered(split(tmp_path, state), cut), "more pieces than its bytes")


def test_a_piece_of_many_boxes_is_refused(tmp_path: Path) -> None:
    side = 1 << 13

    def cut(tree: Any) -> None:
        value = tree["w"]
        enlarged(value, (side, side), (0, 0), (2 * side, 2 * side))
        spec(value)["placements"] = (strided(0, side), strided(1, side))
        mesh = spec(value)["mesh"].state
        (axis,) = mesh["_layout"].state["axes"]
        axis.state.update(shape=(2,), stride=(1,))
        mesh.update(_coordinate_on_dim=(0, 0), _mesh_dim_names=None, _flatten_rank_map=(0, 1, 2, 3))
        second = Record("newobj", axis.callable, (), state={"shape": (2,), "stride": (2,)}, has_state=True)
        mesh["_layout"].state["axes"] = (axis, second)

    refuses(altered(split(tmp_path, {"w": torch.zeros(4, 2)}), cut), "more pieces than its bytes")


@pytest.mark.long
def test_many_large_meshes_are_refused(tmp_path: Path) -> None:
    state = {f"w{i}": torch.zeros(4, 2) + i for i in range(200)}
    ranks = tuple(range(MANY))

    def enlarge(tree: Any) -> None:
        for value in tree.values():
            old = spec(value)["mesh"]
            new = {**old.state, "_flatten_rank_map": ranks}
            spec(value)["mesh"] = Record("newobj", old.callable, (), state=new, has_state=True)

    refuses(altered(split(tmp_path, state), enlarge), "more pieces than its bytes")


def test_a_mesh_of_stride_0_is_refused(tmp_path: Path) -> None:
    def repeat(tree: Any) -> None:
        axis = spec(tree["w"])["mesh"].state["_layout"].state["axes"][0]
        axis.state.update(shape=(MANY,), stride=(0,))

    refuses(altered(split(tmp_path, {"w": torch.zeros(4, 2)}), repeat), f"mesh has {MANY} places for 2 ranks")


def test_places_and_orders_without_end_are_refused(tmp_path: Path) -> None:
    def order(tree: Any) -> None:
        for value in tree.values():
            (entry,) = spec(value)["shard_order"]
            spec(value)["shard_order"] = (entry,) * MANY

    state = {f"w{i}": torch.zeros(4, 2) + i for i in range(4)}
    refuses(altered(split(tmp_path, state), order), "description is malformed")


def test_an_honest_run_of_many_ranks_is_read(tmp_path: Path) -> None:
    file = split(tmp_path, {f"w{i}": torch.zeros(64, 3) + i for i in range(20)}, 64)
    with ckpttool.open(file.parent) as checkpoint:
        assert len(checkpoint.state("").tensors) == 20


# Files of ranks that each hold the whole: DDP programs whose every rank saves.


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"module.w": torch.arange(6.0).reshape(2, 3), "module.mean": torch.full((3,), value)}


def save(folder: Path, name: str, trees: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, tree in enumerate(trees):
        torch.save(tree, folder / name.format(rank))
    return folder


@pytest.mark.parametrize("name", ["model_rank{}.pt", "r{}.pth", "ckpt-rank-{}.bin"])
def test_equal_copies_are_one(name: str, tmp_path: Path, cli: Cli) -> None:
    folder = save(tmp_path / "run", name, [state(), state(), state()])
    for inputs in ([folder], sorted(folder.iterdir(), reverse=True)):
        ran = cli("merge", *inputs, out := tmp_path / "out.pt", "--force")
        assert (ran.code, "merged 3 ranks of whole copies" in ran.out) == (0, True), ran.err
        assert_same(torch.load(out), state())
    assert "whole copies" in cli("inspect", folder).out


def test_copies_that_differ_are_named_and_one_is_taken(tmp_path: Path, cli: Cli) -> None:
    folder = save(tmp_path / "run", "rank{}.pt", [state(), state(2.0)])
    ran = cli("merge", folder, out := tmp_path / "out.pt")
    assert (ran.code, out.exists()) == (1, False)
    assert "module.mean" in ran.err
    assert "--take-rank 0" in ran.err
    assert cli("merge", folder, out, "--take-rank", "1").code == 0
    assert_same(torch.load(out), state(2.0))
    assert cli("merge", folder, out, "--take-rank", "2", "--force").code == 2


def test_numbers_that_differ_are_named(tmp_path: Path, cli: Cli) -> None:
    trees = [{"model": state(), "seed": rank, "step": 3} for rank in range(2)]
    folder = save(tmp_path / "run", "rank{}.pt", trees)
    assert_says(cli("merge", folder, out := tmp_path / "out.pt"), 0, "'seed' of rank 1")
    assert torch.load(out)["seed"] == 0
    trees[1]["step"] = 4
    assert_says(cli("merge", save(folder, "rank{}.pt", trees), out, "--force"), 3, "is of another save")


def test_files_of_two_kinds_become_one_dict(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "model_rank{}.pt", [state(), state()])
    save(folder, "ema_rank{}.pt", [state(5.0), state(5.0)])
    assert {*ckpttool.open(folder).tree} == {"ema", "model"}  # type: ignore[misc]


@pytest.mark.parametrize(
    "trees",
    [
        [state()],
        [state(), {"module.w": torch.zeros(1, 3), "module.mean": torch.zeros(3)}],
        [state(), {**state(), "more": torch.zeros(1)}],
        [state(), None, state()],
    ],
    ids=["one file", "other shapes", "other names", "a copy is missing"],
)
def test_what_is_no_copy_is_left_alone(trees: list[Any], tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "rank{}.pt", trees)
    if None in trees:
        (folder / "rank1.pt").unlink()
    refused(folder, error=Unreadable)


def test_a_model_s_own_number_is_no_rank(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "net_r50_rank{}.pt", [state(), state()])
    assert ckpttool.open(folder).ranks.world_size == 2  # type: ignore[union-attr]
    for number in (18, 50):
        save(tmp_path / "other", f"net-r{number}.pth", [state()])
    refused(tmp_path / "other", "holds checkpoints, and is none itself", Unreadable)
