"""DeepSpeed's universal folders, made by its own tool, against their runs; places in ZeRO's vectors."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.errors import Unsupported
from ckpttool.files.digest import digest
from ckpttool.formats.deepspeed.zero import Layout, given_order, parameters_cut, vectors_cut
from tests.support import universal_runs
from tests.support.recording import unpack
from tests.support.running import Cli
from tests.support.saved import refused

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def recorded(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the universal folders beside the runs."""
    folder = Path(shutil.copytree(runs, tmp_path_factory.mktemp("universal") / "runs"))
    return unpack(universal_runs.RECORDED, folder)


STEP3 = "zero2-fp32/global_step3"


@pytest.fixture
def universal(recorded: Path, tmp_path: Path) -> Run:
    """Return a function that copies a universal folder, to be changed."""

    def copied(name: str = STEP3) -> Path:
        return Path(shutil.copytree(recorded / f"{name}_universal", tmp_path / f"{name}_universal"))

    return copied


def opened(folder: Path, take_rank: int | None = 0) -> ckpttool.Checkpoint:
    return ckpttool.open_ranks(folder, take_rank=take_rank)


@pytest.mark.parametrize("name", universal_runs.FOLDERS)
def test_it_is_the_checkpoint_of_the_run(name: str, recorded: Path, tmp_path: Path, cli: Cli) -> None:
    run, new = opened(recorded / name), opened(recorded / f"{name}_universal")
    assert [*new.tree] == [*run.tree]
    assert digest(dict(new.tensors())) == digest(dict(run.tensors()))
    assert new.tree["optimizer"]["param_groups"] == run.tree["optimizer"]["param_groups"]
    assert (new.unread, new.ranks.step) == (run.unread, run.ranks.step)  # type: ignore[union-attr]
    ran = cli("merge", recorded / f"{name}_universal", tmp_path / "out.pt", "--take-rank", "0")
    assert (ran.code, "merged DeepSpeed 0.19.8 universal" in ran.out) == (0, True), ran.err
    module = torch.load(tmp_path / "out.pt")["module"]
    head = module.get("head.weight")
    assert head is None or head.data_ptr() == module["embed.weight"].data_ptr()


def test_it_is_found_by_the_files_that_name_it(universal: Run) -> None:
    folder = universal()
    (folder.parent / "latest_universal").write_text(folder.name)
    assert opened(folder.parent).ranks.framework == "DeepSpeed 0.19.8 universal"  # type: ignore[union-attr]
    (folder.parent / "latest").write_text(folder.name)
    assert opened(folder.parent).ranks.step == 3  # type: ignore[union-attr]


def test_a_folder_of_both_kinds_is_that_which_latest_names(recorded: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(recorded / "zero2-fp32", tmp_path / "run"))
    (run / "latest_universal").write_text("global_step3_universal")
    assert opened(run).ranks.framework == "DeepSpeed 0.19.8 ZeRO-2"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["zero2-fp32/global_step3", "zero3-fp32/global_step3"])
def test_a_missing_parameter_is_named(name: str, universal: Run) -> None:
    folder = universal(name)
    shutil.rmtree(folder / "zero" / "body.weight")
    refused(folder, r"has no zero/body\.weight/fp32\.pt", opened=opened)


ZERO3 = "zero3-fp32/global_step3"
VALUES, STATES = "zero/body.weight/fp32.pt", "mp_rank_00_model_states.pt"
CHANGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no model states": (STEP3, lambda at: (at / STATES).unlink(), r"has no file \*_model_states\.pt"),
    "a parameter of another model": (
        STEP3,
        lambda at: shutil.copytree(at / "zero" / "body.weight", at / "zero" / "foreign.weight"),
        r"has 'foreign\.weight' in zero/",
    ),
    "another size": (
        ZERO3,
        lambda at: torch.save(torch.zeros(3), at / VALUES),
        r"body\.weight/fp32\.pt: has shape \[3\], and the parameter",
    ),
    "no tensor": (ZERO3, lambda at: torch.save({}, at / VALUES), r"body\.weight/fp32\.pt: has no tensor"),
    "another step than the model states": (
        STEP3,
        lambda at: [torch.save(torch.tensor(9.0), path) for path in (at / "zero").glob("*/step.pt")],
        "'global_steps' states 3, the optimizer states 9",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_does_not_fit_is_refused_by_name(what: str, universal: Run) -> None:
    name, change, said = CHANGES[what]
    change(folder := universal(name))
    refused(folder, said, opened=opened)


def test_a_model_that_was_cut_is_whole(universal: Run) -> None:
    folder = universal()
    whole = dict(opened(folder).state("module").tensors)
    states = torch.load(folder / STATES, weights_only=False)
    for part in range(2):  # tensor parallelism: each has a half of this weight
        half = states["module"]["body.weight"].chunk(2)[part].clone()
        cut: dict[str, Any] = {**states, "module": {**states["module"], "body.weight": half}}
        torch.save(cut, folder / f"mp_rank_{part:02}_model_states.pt")
    found = opened(folder)
    assert digest(found.state("module").tensors) == digest(whole)
    assert found.tree["optimizer"]["state"]["body.weight"].keys() == {"exp_avg", "exp_avg_sq", "step"}


def test_layers_of_a_pipeline_are_named_as_what_they_are(tmp_path: Path, cli: Cli) -> None:
    for layer in ("00", "03"):
        torch.save({"weight": torch.zeros(2)}, tmp_path / f"layer_{layer}-model_00-model_states.pt")
    torch.save({"module": None, "dp_world_size": 1}, tmp_path / "mp_rank_00_model_states.pt")
    refused(tmp_path, r"layer_00-model_00.*: is layer 0 of a pipeline, part 0 of it", Unsupported)
    assert "ds_to_universal.py" in cli("merge", tmp_path, tmp_path / "out.pt").err


# The places of parameters in ZeRO's vectors: cut as DeepSpeed cuts them, put together again.

Shape = tuple[int, ...]

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
groups = st.lists(st.lists(shapes, max_size=6), min_size=1, max_size=3)
ranks = st.integers(1, 13)


def named(listed: list[list[Shape]]) -> list[dict[str, Shape]]:
    return [{f"{group}.{i}": shape for i, shape in enumerate(each)} for group, each in enumerate(listed)]


def put_together(layout: Layout, parts: dict[int, list[list[int]]]) -> dict[str, list[int]]:
    """Return the elements of each parameter, taken from the ranks' parts."""
    found: dict[str, list[int]] = {}
    for slot in layout.slots:
        runs = sorted(slot.runs, key=lambda run: run.begin)
        taken = [parts[run.rank][slot.group][run.start : run.start + run.count] for run in runs]
        found[slot.name] = [*itertools.chain(*taken)]
        ends = itertools.accumulate(map(len, taken))
        assert [run.begin for run in runs] == [0, *ends][: len(runs)]
    return found


def numbered(listed: list[dict[str, Shape]]) -> dict[str, list[int]]:
    """Return other numbers for the elements of each parameter."""
    numbers = itertools.count(1)
    return {
        name: [next(numbers) for _ in range(math.prod(shape))]
        for each in listed
        for name, shape in each.items()
    }


@given(groups, ranks, st.integers(0, 2))
def test_a_vector_is_put_together(listed: list[list[Shape]], world_size: int, fill: int) -> None:
    named_groups = named(listed)
    wanted = numbered(named_groups)
    fills = [[fill] * len(each) for each in listed]
    layout = vectors_cut(named_groups, fills if fill else [], world_size, range(world_size))
    parts: dict[int, list[list[int]]] = {rank: [] for rank in range(world_size)}
    for group in named_groups:
        vector = [*itertools.chain(*(wanted[name] + [0] * fill for name in group))]
        size = math.ceil(len(vector) / (2 * world_size)) * 2
        for rank in range(world_size):
            parts[rank].append(vector[rank * size : (rank + 1) * size])
    assert put_together(layout, parts) == wanted
    for rank, kept in parts.items():
        assert layout.least[rank] == [len(each) for each in kept]


@given(groups, ranks)
def test_parameters_that_are_cut_each_are_put_together(listed: list[list[Shape]], world_size: int) -> None:
    named_groups = named(listed)
    wanted = numbered(named_groups)
    layout = parameters_cut(named_groups, world_size, range(world_size))
    parts: dict[int, list[list[int]]] = {rank: [] for rank in range(world_size)}
    for group in named_groups:
        for rank in range(world_size):
            parts[rank].append([])
            for name in group:
                share = math.ceil(len(wanted[name]) / world_size)
                padded = wanted[name] + [0] * (share * world_size - len(wanted[name]))
                parts[rank][-1] += padded[rank * share : (rank + 1) * share]
    assert put_together(layout, parts) == wanted
    for rank, kept in parts.items():
        assert layout.least[rank] == layout.most[rank] == [len(each) for each in kept]


@given(st.integers(0, 20), ranks)
def test_dealt_out_parameters_are_put_in_order(count: int, world_size: int) -> None:
    order = [f"{i}" for i in range(count)]
    dealt = [name for first in range(world_size) for name in order[first::world_size]]
    assert given_order(dealt, world_size) == order
