"""Files of ranks made from a whole checkpoint: FSDP2's own files and its own resharding are the oracle."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.core.inert_pickle.values import Record
from ckpttool.core.tensors.values import stream
from ckpttool.errors import NothingToDo, OutputExists, Refused, UsageFault
from tests.ranks import splits
from tests.support.comparing import assert_same, saved
from tests.support.running import ROOT, assert_says

RunRanks = Callable[..., Any]
RunOf = Callable[[int], Path]


# Cached hashes; and what a mesh has since torch 2.15, which older versions take too.
NOT_COMPARED = ("_hash", "_preserve_rank_order")


def plain(value: Any) -> Any:
    """Return a tree in which what a pickle means can be compared: tensors by value."""
    if isinstance(value, ckpttool.TensorRef):
        return "tensor", value.dtype.name, value.shape, value.stride, b"".join(map(bytes, stream(value)))
    if isinstance(value, Record):
        state = plain(value.state)
        return value.how, str(value.callable), plain(value.args), state
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in NOT_COMPARED}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def split(source: Path, out: Path, ranks: int, **given: Any) -> Any:
    """Split what a file or a folder holds."""
    with ckpttool.open(source) as checkpoint:
        return ckpttool.split(checkpoint, out, ranks, **given)


def cut(value: Any, folder: Path, ranks: int, **given: Any) -> Any:
    """Save a value as `in.pt`, and split it into `out`."""
    return split(saved(value, folder / "in.pt"), folder / "out", ranks, **given)


def merged(folder: Path) -> Path:
    """Return a file that holds what ranks wrote into a folder."""
    out = folder.with_suffix(".pt")
    with ckpttool.open_ranks(folder) as checkpoint:
        ckpttool.save(checkpoint, out, force=True)
    return out


@pytest.fixture(scope="module")
def run_of(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """Return a function that trains and saves on a number of ranks, once for each."""

    @functools.cache
    def run(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("run") / "ranks"
        folder.mkdir()
        run_ranks(ranks, splits.save, str(folder), timeout=90)
        return folder

    return run


@pytest.mark.covered(lambda ranks: ranks == 2)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_was_merged_splits_into_the_ranks_own_files(ranks: int, run_of: RunOf, tmp_path: Path) -> None:
    run = run_of(ranks)
    split(merged(run), tmp_path / "again", ranks, device="cpu")
    assert sorted(os.listdir(tmp_path / "again")) == sorted(os.listdir(run))
    for path in run.iterdir():
        with ckpttool.open(path) as theirs, ckpttool.open(tmp_path / "again" / path.name) as mine:
            assert plain(mine.tree) == plain(theirs.tree)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [*permutations([1, 2, 4], 2)])
def test_training_goes_on_as_after_the_framework_s_own_resharding(
    before: int, after: int, run_of: RunOf, run_ranks: RunRanks, tmp_path: Path
) -> None:
    run = run_of(before)
    split(merged(run), tmp_path / "ranks", after, device="cpu")
    found = run_ranks(after, splits.continue_alike, str(run), f"{tmp_path}/ranks", timeout=120)
    assert found[0] == [36, 36]


def test_an_optimizer_by_names_goes_on(run_of: RunOf, run_ranks: RunRanks, cli: Any, tmp_path: Path) -> None:
    folder = run_of(4)
    words = ["--to", "names", "--order", "state"]
    assert cli("optimizer", merged(folder), tmp_path / "one.pt", *words).code == 0
    for form in ("dtensor", "dcp"):
        words = ["--device", "cpu"] if form == "dtensor" else []
        ran = cli("split", tmp_path / "one.pt", tmp_path / form, "--ranks", 2, "--as", form, *words)
        assert ran.code == 0, ran.err
    optimizer = torch.load(tmp_path / "dtensor" / "optim_world_size_2_rank_1.pt", weights_only=False)
    assert "embed.weight" in optimizer["state"]
    run_ranks(2, splits.continue_alike, str(folder), f"{tmp_path}/dtensor", timeout=120)
    run_ranks(2, partial(splits.continue_alike, as_dcp=True), str(folder), f"{tmp_path}/dcp", timeout=120)


def test_a_mesh_with_a_name_takes_files_for_that_name(run_ranks: RunRanks, tmp_path: Path) -> None:
    cut(splits.Tied().state_dict(), tmp_path, 2, device="cpu", axis="fsdp")
    run_ranks(2, splits.load_named, f"{tmp_path}/out", "fsdp", timeout=60)


# The commands of docs/distributed.md, from a framework's folder to one file and to another number of ranks.

PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")


def commands_of(row: str) -> list[str]:
    """Return the commands of the row of the page's table that begins so."""
    (line,) = re.findall(rf"^\| {row}.*$", PAGE, re.MULTILINE)
    return re.findall(r"`ckpttool ([^`]+)`", line)


def follow(cli: Any, *commands: str) -> None:
    """Run commands of the page for four ranks, which train on the CPU, in this folder."""
    for command in commands:
        words = shlex.split(command.replace("--ranks 8", "--ranks 4"))
        ran = cli(*words, *(["--device", "cpu"] if "dtensor" in words else []))
        assert ran.code == 0, ran.err


def saved_by_accelerate(run_ranks: RunRanks, folder: Path, real: bool) -> None:
    for name in ("checkpoint-100", "new"):
        (folder / name).mkdir()
    run_ranks(2, partial(splits.save_as_accelerate, real=real), f"{folder}/checkpoint-100", timeout=60)


def test_the_page_s_commands_suit_verl(run_ranks: RunRanks, cli: Any, here: Path) -> None:
    (here / "checkpoint" / "actor").mkdir(parents=True)
    run_ranks(2, splits.save_as_verl, f"{here}/checkpoint/actor", timeout=60)
    follow(cli, *commands_of("verl with"), "convert run.safetensors run.pt")
    run_ranks(4, splits.load_as_verl, f"{here}/actor", f"{here}/run.pt", timeout=60)


@pytest.mark.parametrize("real", [False, True], ids=["its calls of torch", "its functions"])
def test_the_page_s_commands_suit_accelerate(real: bool, run_ranks: RunRanks, cli: Any, here: Path) -> None:
    if real:
        pytest.importorskip("accelerate")
    saved_by_accelerate(run_ranks, here, real)
    follow(cli, *commands_of("accelerate and"), "convert run.safetensors run.pt")
    load = partial(splits.load_as_accelerate, real=real)
    run_ranks(4, load, f"{here}/new", f"{here}/run.pt", timeout=60)


def test_the_page_s_commands_write_weights_alone_too(run_ranks: RunRanks, cli: Any, here: Path) -> None:
    saved_by_accelerate(run_ranks, here, False)
    commands = re.findall(r"^    ckpttool ((?:add-prefix|convert) .*)$", PAGE, re.MULTILINE)
    follow(cli, "merge checkpoint-100 model.safetensors", *commands)
    load = splits.load_weights_as_accelerate
    run_ranks(4, load, f"{here}/new", f"{here}/model.safetensors", timeout=60)


# In one process.

DTYPES = ["float32", "bfloat16", "float16", "float64", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_type_and_layout_is_cut_and_merges_into_the_same(dtype: str, ranks: int, tmp_path: Path) -> None:
    base = torch.arange(77.0).to(getattr(torch, dtype))
    state = {
        "rows": base.reshape(7, 11),
        "turned": base.reshape(11, 7).t(),
        "part": base[3:5],
        "middle": base[:60].reshape(3, 5, 4)[:, 1:3],
        "none": base[:0].reshape(0, 3),
        "narrow": base[:5].reshape(5, 1),
        "scalar": base[1],
        "count": torch.tensor([1, 2]),
        "tied": base.reshape(7, 11),
    }
    assert cut(state, tmp_path, ranks, verify=True).whole == ("scalar", "count")
    assert ckpttool.digest(tmp_path / "out") == ckpttool.digest(tmp_path / "in.pt")
    assert ckpttool.verify(tmp_path / "out", against=tmp_path / "in.pt").ok


def test_a_rank_s_file_holds_only_its_own_bytes(tmp_path: Path) -> None:
    cut({"w": torch.zeros(1 << 12, 64)}, tmp_path, 4)
    sizes = [entry.stat().st_size for entry in os.scandir(tmp_path / "out")]
    assert max(sizes) < (tmp_path / "in.pt").stat().st_size / 4 + 8192


def test_everything_beside_model_and_optimizer_is_kept_whole(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).state_dict()
    beside = {"epoch": 3, "rng": torch.get_rng_state()}
    value = {"run": {"model": model.state_dict(), "name": "x"}, "optimizer": optimizer, **beside}
    found = cut(value, tmp_path, 2)
    assert (found.optimizer, found.repeated) == ("optimizer", ("run", "epoch", "rng"))
    extra = torch.load(tmp_path / "out" / "extra_state_world_size_2_rank_1.pt", weights_only=True)
    assert_same(extra, {"run": {"name": "x"}, **beside})
    again = torch.load(merged(tmp_path / "out"), weights_only=True)
    assert_same(again, {"model": value["run"]["model"], "optimizer": optimizer, **extra})


def test_what_differs_is_left_out_by_name_unless_a_rank_is_taken(tmp_path: Path, cli: Any) -> None:
    value = {"model": torch.nn.Linear(3, 2).state_dict(), "rng": {"cpu": torch.ones(20_000)}, "epoch": 3}
    cut(value, tmp_path, 2)
    second = tmp_path / "out" / "extra_state_world_size_2_rank_1.pt"
    saved({"rng": {"cpu": torch.zeros(20_000)}, "epoch": 3, "host": "b"}, second)
    ran = cli("merge", tmp_path / "out", tmp_path / "merged.pt")
    words = "(differs between ranks; merge --take-rank R takes one's)"
    assert f"left out: 'rng.cpu' {words}, 'host' {words}\n" in ran.err
    assert torch.load(tmp_path / "merged.pt").keys() == {"model", "epoch"}
    whole = tmp_path / "merged.pt"
    for words in (["diff", second.parent, whole], ["verify", whole, "--against", second.parent]):
        assert_says(cli(*words), 0, f"not compared, of {second.parent}: 'rng.cpu'")
    assert cli("merge", tmp_path / "out", tmp_path / "taken.pt", "--take-rank", 1).code == 0
    assert torch.load(tmp_path / "taken.pt")["host"] == "b"
    second.rename(tmp_path / "out" / "extra_state_world_size_3_rank_1.pt")
    ran = cli("merge", tmp_path / "out", whole, "--force")
    assert "(of 3 ranks, and the pieces are of 2)" in ran.err


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Return a folder with what two ranks hold of a model alone."""
    cut({"model": {"w": torch.ones(4, 2)}}, tmp_path, 2)
    return tmp_path / "out"


BESIDE = {
    "two saves": (
        {"rng_step10_rank_0": {}, "rng_step10_rank_1": {}, "rng_step20_rank_0": {}, "rng_step20_rank_1": {}},
        r"left out: rng_step\d0_rank_\*\.pt \(rng_step20_rank_0\.pt was written by rank 0, and so was \S+10",
    ),
    "no rank": ({"settings": {"lr": 1}}, r"left out: settings\.pt \(.*its name does not say which rank"),
    "another world size": (
        {f"extra_state_world_size_4_rank_{rank}": {"a": 1} for rank in range(4)},
        r"left out: extra_state_world_size_4_rank_\*\.pt \(of 4 ranks, and the pieces are of 2\)",
    ),
    "one missing": (
        {"extra_state_world_size_2_rank_0": {"a": 1}},
        r"left out: extra_state_\S+ \(extra_state_\S+_rank_0\.pt lies here without that of rank 1; merge",
    ),
    "one missing of an unknown number": (
        {"rng_rank_0": {"a": 1}},
        r"left out: rng_rank_\*\.pt \(.* of rank 1; merge --take-rank R takes one rank's\)",
    ),
    "a rank too many": (
        {f"rng_rank_{rank}": {"a": 1} for rank in range(3)},
        r"left out: rng_rank_\*\.pt \(rng_rank_2\.pt was written by rank 2, and there were 2 ranks\)",
    ),
    "all different": ({"extra_state_rank_0": {"a": 1}, "extra_state_rank_1": {"a": 2}}, "left out: 'a' "),
    "all alike": ({"extra_state_rank_0": {}, "extra_state_rank_1": {}}, ""),
}


@pytest.mark.parametrize("case", BESIDE)
def test_files_beside_the_model_never_stop_its_merging(case: str, two: Path, cli: Any) -> None:
    files, message = BESIDE[case]
    paths = [*two.iterdir(), *(saved(value, two / f"{name}.pt") for name, value in files.items())]
    ran = cli("merge", *paths, two.parent / "merged.pt")
    assert ran.code == 0
    assert re.search(message, ran.err)
    assert_same(torch.load(two.parent / "merged.pt"), {"model": {"w": torch.ones(4, 2)}})


def beside(folder: Path, values: list[Any]) -> list[Path]:
    """Write what each rank keeps beside the model."""
    name = f"extra_state_world_size_{len(values)}_rank"
    return [saved(value, folder / f"{name}_{rank}.pt") for rank, value in enumerate(values)]


def test_leftovers_of_another_world_size_hide_nothing_of_the_run_s_own_files(two: Path, cli: Any) -> None:
    for world_size in (2, 4):
        beside(two, [{"a": world_size}] * world_size)
    ran = cli("merge", two, two.parent / "merged.pt")
    assert "left out: extra_state_world_size_4_rank_*.pt (of 4 ranks, and the pieces are of 2)\n" in ran.err
    assert torch.load(two.parent / "merged.pt")["a"] == 2
    assert "ranks hold  0: 16 bytes, 1: 16 bytes\n" in cli("inspect", two).out


def test_the_file_of_one_rank_alone_can_be_taken(two: Path, cli: Any) -> None:
    saved({"a": 1}, two / "extra_state_world_size_2_rank_0.pt")
    for rank, keys in enumerate([{"model", "a"}, {"model"}]):
        assert cli("merge", two, two.parent / f"{rank}.pt", "--take-rank", rank).code == 0
        assert torch.load(two.parent / f"{rank}.pt").keys() == keys


def test_another_step_beside_the_model_is_refused(two: Path, cli: Any) -> None:
    beside(two, [{"trainer": {"global_step": step}} for step in (100, 200)])
    ran = cli("merge", two, two.parent / "merged.pt")
    assert ran.code == 3
    assert "rank_1.pt: is of another save: 'trainer.global_step' is 200, and 100 in" in ran.err


@pytest.mark.parametrize("legacy", [False, True])
def test_large_tensors_beside_the_model_are_compared(legacy: bool, two: Path, cli: Any) -> None:
    for rank in range(2):
        views = torch.arange(40_000.0).reshape(200, 200)
        value = {"alike": views[1:], "turned": views.t() if rank else views.t().contiguous()}
        value |= {"buf": views[1:] + rank, "repeated": torch.ones(1).expand(1 << 40)}
        path = two / f"extra_state_world_size_2_rank_{rank}.pt"
        value["buf"] = torch.cat([torch.zeros(9), value["buf"].flatten()])[9:]
        torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    ran = cli("merge", two, two.parent / "merged.pt")
    assert_says(ran, 0, "left out: 'buf' (differs", "'repeated' (differs")
    assert torch.load(two.parent / "merged.pt").keys() == {"model", "alike", "turned"}


def test_one_rank_s_files_of_several_kinds_are_merged(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    cut(value, tmp_path, 1)
    assert_same(torch.load(merged(tmp_path / "out"), weights_only=True), value)
    model_file = tmp_path / "out" / "model_world_size_1_rank_0.pt"
    shutil.copy(model_file, model_file.with_name("shadow_world_size_1_rank_0.pt"))
    again = torch.load(merged(tmp_path / "out"), weights_only=True)
    assert_same(again.pop("shadow"), value["model"])
    assert_same(again, value)


def test_what_is_tied_to_a_whole_tensor_stays_whole_and_views_that_part_are_named(tmp_path: Path) -> None:
    w = torch.arange(12.0).view(6, 2)
    state = {"a": w, "b": w, "x": (x := torch.arange(8.0)), "y": x, "part": x[2:]}
    state |= {"apart": (both := torch.arange(8.0))[:4], "from it": both[4:]}
    state |= {"0.running_mean": (mean := torch.arange(4.0)), "1.running_mean": mean[:3]}  # both whole
    report = cut({"model": state}, tmp_path, 2, whole=["b"])
    assert (report.whole, report.copied) == (("a", "b", "0.running_mean", "1.running_mean"), ("part",))
    again = torch.load(merged(tmp_path / "out"), weights_only=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    assert again["a"].data_ptr() == again["b"].data_ptr() and again["x"].data_ptr() == again["y"].data_ptr()


def test_keys_that_whole_names_are_not_cut(tmp_path: Path) -> None:
    state = {"w": torch.ones(4, 2), "rope.inv_freq": torch.ones(4)}
    assert cut(state, tmp_path, 2, whole=["*.inv_freq"]).whole == ("rope.inv_freq",)
    loaded = torch.load(tmp_path / "out" / "model_world_size_2_rank_0.pt", weights_only=False)
    assert type(loaded["rope.inv_freq"]) is torch.Tensor
    with pytest.raises(NothingToDo, match="no key matches 'x'"):
        split(tmp_path / "in.pt", tmp_path / "other", 2, whole=["x"])


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([{"params": ["a", "b"]}], ("inv_freq",)),  # b is frozen: it is in a group and has no state
        ([{"params": ["a"]}], ("b", "inv_freq")),
        ([{"params": [0, 1], "param_names": ["a", "b"]}], ("inv_freq",)),
        ([{"params": [0, 1]}], ()),  # it names nothing
    ],
)
def test_what_the_optimizer_does_not_name_may_be_a_buffer(groups: Any, expected: Any, tmp_path: Path) -> None:
    """A buffer of floats looks like a parameter; fully_shard leaves it whole. A tie is no other tensor."""
    weight = torch.ones(4, 2)
    model = {"a": weight, "tied": weight, "b": torch.ones(3, 3), "inv_freq": torch.ones(6)}
    key = "a" if groups[0]["params"][0] == "a" else 0
    optimizer = {"state": {key: {"exp_avg": torch.zeros(4, 2)}}, "param_groups": groups}
    value = {"model": model, "optimizer": optimizer}
    assert cut(value, tmp_path, 2, device="cpu", state="model").perhaps_buffers == expected


def test_the_optimizer_keeps_whole_what_it_keeps_of_parameters_that_stay_whole(tmp_path: Path) -> None:
    model = {"w": torch.ones(4, 2), "rope.inv_freq": torch.ones(4)}
    groups = [{"lr": 0.1, "params": [0, 1]}]
    state = {0: {"exp_avg": torch.ones(4, 2)}, 1: {"exp_avg": torch.arange(4.0)}}
    value = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    with pytest.raises(Refused, match="does not say whether its parameter 0 stays whole"):
        cut(value, tmp_path, 2, whole=["*.inv_freq"])
    groups[0]["param_names"] = [*model]
    cut(value, tmp_path, 2, whole=["*.inv_freq"])
    loaded = torch.load(tmp_path / "out" / "optim_world_size_2_rank_1.pt", weights_only=False)["state"]
    assert torch.equal(loaded[1]["exp_avg"], torch.arange(4.0))
    assert loaded[0]["exp_avg"].to_local().shape == (2, 2)
    assert_same(torch.load(merged(tmp_path / "out"), weights_only=True), value)


def with_optimizer(**moments: Any) -> dict[str, Any]:
    """Return a checkpoint with a weight and a bias, of which the optimizer keeps something of the first."""
    return with_state({0: moments})


def with_state(state: Any, **group: Any) -> dict[str, Any]:
    return {
        "model": {"w": torch.ones(4, 3), "b": torch.ones(3)},
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1], **group}]},
    }


W, B = torch.ones(4, 3), torch.ones(3)

REFUSED: dict[str, tuple[Any, str]] = {
    "a moment of another shape": (
        with_optimizer(row=torch.ones(4)),
        r"keeps 'row' of parameter 0 in shape \[4\], which no parameter has",
    ),
    "Adafactor's columns, in the shape of a bias": (
        with_optimizer(row=torch.ones(4), column=B) | {"model": {"w": W, "b": B, "c": torch.ones(4)}},
        r"keeps 'column' of parameter 0 in shape \[3\], and something else in \[4\]",
    ),
    "a count in the shape of a bias": (
        with_optimizer(step=torch.ones(1), exp_avg=W) | {"model": {"w": W, "b": torch.ones(1)}},
        r"keeps 'exp_avg' of parameter 0 in shape \[4, 3\], and something else in \[1\]",
    ),
    "more moments than parameters of their shape": (
        with_state({0: {"row": B}, 1: {"exp_avg": B}}),
        r"keeps 'exp_avg' of parameter 1 in shape \[3\], which fewer parameters have",
    ),
    "a moment of another shape than the parameter of that name": (
        with_state({"w": {"exp_avg": B}}),
        r"keeps 'exp_avg' of parameter w in shape \[3\], and the parameter has \[4, 3\]",
    ),
    "a moment of another shape than the parameter named in the group": (
        with_state({0: {"exp_avg": B}}, param_names=["w", "b"]),
        r"keeps 'exp_avg' of parameter 0 in shape \[3\], and the parameter has \[4, 3\]",
    ),
    "moments in a list": (
        with_optimizer(old_dirs=[W, W]),
        r"keeps a tensor of shape \[4, 3\] in 'old_dirs' of parameter 0",
    ),
    "moments in a dict": (with_optimizer(q={"exp_avg": W}), r"keeps a tensor of shape \[4, 3\] in 'q' of"),
    "a sparse moment": (
        with_optimizer(exp_avg=W.to_sparse()),
        "keeps a tensor that is sparse COO in 'exp_avg' of parameter 0",
    ),
    "a moment that is no entry": (with_state({0: W}), r"keeps a tensor of shape \[4, 3\] in 'all' of par"),
    "an optimizer whose state is a list": (with_state([1]), "'optimizer' has a list for its `state`"),
    "two optimizers": (
        with_optimizer() | {"other": with_optimizer()["optimizer"]},
        "holds 2 optimizers \\('optimizer', 'other'\\)",
    ),
    "a sparse tensor": ({"w": torch.ones(2), "s": torch.eye(2).to_sparse()}, "'s' .*can't be cut"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_cut_is_refused_by_name(case: str, tmp_path: Path) -> None:
    value, message = REFUSED[case]
    with pytest.raises(Refused, match=message):
        cut(value, tmp_path, 2)
    assert not (tmp_path / "out").exists()


def test_numbers_beside_the_moments_stay_whole(tmp_path: Path) -> None:
    value = with_optimizer(step=torch.tensor(3.0), exp_avg=W, settings={"scale": torch.tensor(2.0)}, at=[1])
    cut(value, tmp_path, 2)
    assert_same(torch.load(merged(tmp_path / "out"), weights_only=True), value)


@pytest.mark.parametrize(
    ("part", "left"), [("state_dict.ema", ["net.w", "count"]), ("state_dict.!ema", ["ema.w", "ema.b"])]
)
def test_the_other_part_of_a_dict_is_named_as_left_out(part: str, left: list[str], tmp_path: Path) -> None:
    state = {"net.w": torch.ones(4), "ema.w": torch.ones(4), "ema.b": torch.ones(2), "count": 1}
    found = cut({"state_dict": state, "epoch": 3}, tmp_path, 2, state=part)
    assert found.left_out == tuple(f"state_dict.{name}" for name in left)
    assert found.repeated == ("epoch",)


@pytest.mark.parametrize(
    "given", [{"ranks": 2, "out": "-"}, {"ranks": 0}, {"ranks": 70_000}, {"ranks": 2, "device": "cuda:1"}]
)
def test_what_is_no_number_of_ranks_and_no_device_is_a_usage_error(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageFault):
        split(saved({"w": torch.ones(2)}, tmp_path / "in.pt"), **{"out": tmp_path / "out", **given})


def test_a_folder_is_replaced_only_when_asked_and_only_if_it_holds_nothing_else(tmp_path: Path) -> None:
    out, state = tmp_path / "out", {"w": torch.ones(5)}
    cut(state, tmp_path, 3)
    with pytest.raises(OutputExists, match="already exists"):
        cut(state, tmp_path, 2)
    cut(state, tmp_path, 2, force=True)
    assert len(os.listdir(out)) == 2
    (out / "config.json").write_text("{}")
    with pytest.raises(OutputExists, match="holds other files"):
        cut(state, tmp_path, 2, force=True)
    assert len(os.listdir(out)) == 3


def test_files_that_have_no_successor_are_named_and_removed_only_when_asked(tmp_path: Path, cli: Any) -> None:
    run = with_optimizer(exp_avg=W) | {"epoch": 3}
    whole, bare = saved(run, tmp_path / "run.pt"), saved(run["model"], tmp_path / "bare.pt")

    def into(source: Path, *more: object, ranks: int = 2) -> Any:
        return cli("split", source, f"{tmp_path}/out/", "--ranks", ranks, "--as", "dtensor", *more)

    assert into(whole).code == 0
    before = sorted(os.listdir(tmp_path / "out"))
    for more in ((), ("--dry-run",)):
        ran = into(bare, "--force", *more)
        assert ran.code == 2
        assert "extra_state_world_size_2_rank_0.pt, extra_state_world_size_2_rank_1.pt and 2 more" in ran.err
        assert "--replace-all" in ran.err
    assert sorted(os.listdir(tmp_path / "out")) == before
    assert into(whole, "--force").code == 0, "each has a successor"
    ran = into(bare, "--force", "--replace-all", "-v")
    assert ran.code == 0
    assert "removed, as files of an earlier split: extra_state_world_size_2_rank_0.pt" in ran.err
    assert "optim_world_size_2_rank_1.pt" in ran.err
    assert len(os.listdir(tmp_path / "out")) == 2
    again = into(bare, "--force", "--json", ranks=3).json
    assert again["removed"] == ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]


def test_the_input_is_not_replaced(tmp_path: Path) -> None:
    cut({"model": {"w": torch.ones(4)}, "epoch": 1}, tmp_path, 2)
    with pytest.raises(OutputExists, match="is the input"):
        split(tmp_path / "out", tmp_path / "out", 4, force=True)
    found = split(tmp_path / "out", tmp_path / "four", 4)
    assert (found.repeated, found.left_out) == (("epoch",), ())


@pytest.mark.parametrize("state", [{}, {"count": torch.tensor(3), "ids": torch.arange(4)}])
def test_a_state_of_which_nothing_is_cut_is_nothing_to_do(state: Any, tmp_path: Path) -> None:
    with pytest.raises(NothingToDo):
        cut(state, tmp_path, 2)


KILLED = """
import os, signal, ckpttool, sys
from ckpttool.ranks import splitting
splitting.SplitPlan.compare = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
ckpttool.split(ckpttool.open(sys.argv[1]), sys.argv[2], 3, force=True)
"""


def test_a_killed_split_leaves_the_old_folder(tmp_path: Path) -> None:
    cut({"w": torch.zeros(1 << 16, 8)}, tmp_path, 2)
    path, out = tmp_path / "in.pt", tmp_path / "out"
    before = sorted(os.listdir(out))
    ran = subprocess.run([sys.executable, "-c", KILLED, path, out], check=False)
    assert ran.returncode == -signal.SIGKILL
    assert sorted(os.listdir(out)) == before
    assert ckpttool.digest(out) == ckpttool.digest(path)


def test_a_dry_run_writes_nothing_and_knows_the_sizes(tmp_path: Path) -> None:
    state = {"w": torch.ones(5, 3)}
    dry = cut(state, tmp_path, 3, dry_run=True)
    assert not (tmp_path / "out").exists()
    assert cut(state, tmp_path, 3) == dry


def test_an_optimizer_whose_names_are_not_certain_stays_numbered_in_dcp(cli: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    def trained(factor: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        optimizer = torch.optim.Adam([*model[1].parameters(), *model[0].parameters()])
        (model(torch.ones(2, 3)).sum() * factor).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(1)
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ran = cli("split", saved(value, tmp_path / "in.pt"), tmp_path / "out", "--ranks", 2, "--as", "dcp")
    assert_says(ran, 0, f"ckpttool optimizer {tmp_path}/in.pt NAMED --to names --order state")
    found = {"optimizer": trained(2)[1].state_dict()}
    dcp.load(found, checkpoint_id=f"{tmp_path}/out")
    assert_same(found["optimizer"], value["optimizer"])


def test_safetensors_and_folders_split_too(tmp_path: Path) -> None:
    cut({"w": torch.rand(5, 3), "b": torch.rand(5)}, tmp_path, 2)
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "in.safetensors")
    for number, source in enumerate(("in.safetensors", "out")):
        split(tmp_path / source, tmp_path / f"{number}", 3)
        assert ckpttool.digest(tmp_path / f"{number}") == ckpttool.digest(tmp_path / "in.pt")


@pytest.mark.parametrize("form", ["dtensor", "dcp"])
def test_a_wrapper_s_prefix_is_noted_with_the_command(form: str, cli: Any, tmp_path: Path) -> None:
    path = saved({"model": {"module.w": torch.ones(4), "module.b": torch.ones(2)}}, tmp_path / "in.pt")
    words = ["--ranks", 2, "--as", form]
    ran = cli("split", path, tmp_path / "a", *words)
    assert ran.code == 0
    command = f"ckpttool strip-prefix {path} OUT --prefix module.; then split that"
    said = "2 of 2 keys begin with 'module.', and those of a model under fully_shard do not"
    assert f"{said}: {command}" in ran.err
    assert cli("strip-prefix", path, tmp_path / "out.pt").code == 0
    assert "strip-prefix" not in cli("split", tmp_path / "out.pt", tmp_path / "b", *words).err


def test_the_command_says_what_was_cut_and_what_was_not(cli: Any, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    path = saved({"model": model.state_dict(), "epoch": 1}, tmp_path / "in.pt")
    ran = cli("split", path, f"{tmp_path}/out/", "--ranks", 4, "--as", "dtensor")
    assert ran.code == 0, ran.err
    assert re.match(r"split 4 tensors over 4 ranks -> \S+/out/ \(8 files, \S+ kB, ", ran.out)
    assert "whole on every rank, as buffers are (--whole adds others): 1.running_mean" in ran.err
    assert "the same in extra_state of every rank: epoch" in ran.err
    data = cli("split", path, f"{tmp_path}/out/", "--ranks", 2, "--as", "dtensor", "--json", "--force").json
    assert (data["ranks"], data["sharded"], len(data["files"])) == (2, 4, 4)
    dcp = cli("split", path, tmp_path / "dcp", "--ranks", 2, "--as", "dcp", "--whole", "x")
    assert dcp.code == 2
    assert "--whole has no effect on a DCP folder" in dcp.err


def test_the_device_is_that_of_the_input_s_mesh(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4, 2)}
    assert cut(state, tmp_path, 2).device == "cuda"
    cut(state, tmp_path, 2, device="cpu", force=True)
    assert split(tmp_path / "out", tmp_path / "four", 4).device == "cpu"
    assert split(tmp_path / "out", tmp_path / "xpu", 4, device="xpu").device == "xpu"
    with ckpttool.open(tmp_path / "four") as checkpoint:
        assert checkpoint.ranks is not None
        assert checkpoint.ranks.device == "cpu"


def unnamed(folder: Path) -> Path:
    """Write a model of two equal shapes, one of them a buffer, and its optimizer, keyed by numbers."""
    model, table = {"w": torch.zeros(4, 2)}, torch.zeros(4, 2)
    optimizer = {"state": {0: {"exp_avg": torch.ones(4, 2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return saved({"model": model | {"table": table}, "optimizer": optimizer}, folder / "in.pt")


def test_a_named_buffer_stays_whole_though_the_optimizer_names_nothing(tmp_path: Path, cli: Any) -> None:
    flags = ["--ranks", "2", "--as", "dtensor", "--whole", "table"]
    assert_says(cli("split", path := unnamed(tmp_path), tmp_path / "out", *flags), 0, "table")
    with ckpttool.open(tmp_path / "out") as checkpoint:
        assert checkpoint.tree["optimizer"]["state"][0]["exp_avg"].shape == (4, 2)
    tree = torch.load(path)
    tree["model"]["frozen"] = torch.zeros(4, 2)  # which of these two is the optimizer's?
    assert_says(cli("split", saved(tree, path), tmp_path / "again", *flags), 3, "--to names --order state")


def test_notes_on_an_optimizer_in_dcp_do_not_contradict_each_other(tmp_path: Path, cli: Any) -> None:
    ran = cli("split", unnamed(tmp_path), tmp_path / "out", "--ranks", "2", "--as", "dcp")
    assert (ran.code, "stays keyed by numbers" in ran.err) == (0, False)
    assert "DCP keeps its numbers as text" in ran.err
    assert "keyed by text" in ran.err
