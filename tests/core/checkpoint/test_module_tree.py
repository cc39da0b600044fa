"""The tree of a state's modules: sums, folding, ties, and names of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.core.checkpoint import module_tree
from ckpttool.core.checkpoint.module_tree import Branch, outline, tensors_in_words
from ckpttool.core.tensors.ref import DTYPES, ByteRange, Source, Storage, TensorRef


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    def tree(state: Any) -> Branch:
        torch.save(dict(state), tmp_path / "f.pt")
        return outline(ckpttool.open(tmp_path / "f.pt").state("").tensors)

    return tree


def shown(branch: Branch) -> list[tuple[int, str, int, int]]:
    return [(level, each.name, each.copies, each.parameters) for level, each in branch.lines(99)]


def test_modules_have_their_parameters_and_bytes(tree: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    found = tree(net.state_dict())
    assert shown(found) == [(0, "", 1, 240), (1, "0", 1, 224), (1, "1", 1, 16)]
    assert found.nbytes == sum(t.numel() * t.element_size() for t in net.state_dict().values())
    assert tensors_in_words(found.branches[0], "float32", 9) == "weight 8×3×3×3; bias 8"
    said = "weight, bias, running_mean, running_var 8; num_batches_tracked scalar int64"
    assert tensors_in_words(found.branches[1], "float32", 9) == said
    assert tensors_in_words(found.branches[1], "float32", 1) == "weight 8; 4 more"


def test_consecutive_identical_blocks_are_one_line_with_their_sums(tree: Any) -> None:
    blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3)] + [torch.nn.Linear(2, 3)]
    found = tree({f"h.{i}.{k}": v for i, block in enumerate(blocks) for k, v in block.state_dict().items()})
    assert shown(found) == [(0, "h", 1, 27), (1, "0-2", 3, 18), (2, "0", 1, 18), (1, "3", 1, 9)]


def test_blocks_that_differ_in_type_shape_name_or_number_are_not_folded(tree: Any) -> None:
    one = torch.ones(1)
    state = {"a.0.w": one, "a.1.w": one.double(), "a.2.v": one, "a.4.v": one.clone(), "a.5.v": torch.ones(2)}
    assert [name for _, name, _, _ in shown(tree(state))][1:] == ["0", "1", "2", "4", "5"]


def test_numbered_blocks_are_sorted_as_numbers_when_the_file_sorts_them_as_text(tree: Any) -> None:
    names = sorted(f"layers.{i}.w" for i in range(12))
    assert shown(tree({name: torch.ones(1) for name in names}))[0][:3] == (0, "layers.0-11", 12)


def test_tied_tensors_count_once_at_their_first_name(tree: Any) -> None:
    weight = torch.ones(3, 4)
    found = shown(tree({"wte.weight": weight, "head.weight": weight}))
    assert found == [(0, "", 1, 12), (1, "wte", 1, 12), (1, "head", 1, 0)]


def test_tensors_beside_modules_have_their_own_lines_above_them(tree: Any) -> None:
    state = {"fc.weight": torch.ones(2), "cls_token": torch.ones(1, 4)}
    assert [name for _, name, _, _ in shown(tree(state))] == ["", "cls_token", "fc"]


def test_the_depth_fits_the_lines_and_is_at_least_one(tree: Any) -> None:
    found = tree({f"a.{x}.{y}.w": torch.ones(len(x + y)) for x in ("p", "qq") for y in ("r", "sss")})
    assert [found.depth_within(lines) for lines in (1, 3, 6, 7, 99)] == [1, 1, 1, 2, 2]


storage_ = Storage(ByteRange(Source("/dev/null", 0), 0, 400), "FloatStorage")
names = st.lists(st.text(".a01", max_size=8), unique=True, max_size=12)


@given(names)
def test_no_tensor_is_lost_or_counted_twice_for_any_names(names: list[str]) -> None:
    tensors = {name: TensorRef(storage_, DTYPES["float32"], (1,), (1,), i) for i, name in enumerate(names)}
    found = outline(tensors)
    assert (found.parameters, found.nbytes, found.count) == (len(names), 4 * len(names), len(names))
    for _, branch in found.lines(99):
        if branch.branches:
            assert branch.parameters == sum(inner.parameters for inner in branch.branches)


def test_a_name_of_a_hundred_thousand_dots_is_handled_quickly() -> None:
    tensor = TensorRef(storage_, DTYPES["float32"], (1,), (1,), 0)
    assert outline({"a." * 100_000 + "w": tensor}).parameters == 1


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["w", "a.w", "a.0.w", "a.1.w"])), max_size=30),
    st.sampled_from([0, 1, 8, 97, module_tree.MAX_NUMBER - 2]),
    st.sampled_from(["h.", "", "h.0", "x.h"]),
)
def test_a_row_of_identical_modules_is_the_same_when_it_is_compared_as_a_whole(
    inside: list[tuple[int, str]], first: int, text: str
) -> None:
    """Names in any order, and rows of 1 to 4 of them: those that are whole rows are folded either way."""
    names = [f"{text}{first + number}.{name}" for number, name in inside]
    names += [f"{text}{first + number}.row" for number in range(1 + len(inside) % 4)]
    shape = {True: (4,), False: (2, 2)}
    tensors = {name: like(shape[len(name) % 7 > 0]) for name in names}
    found = outline(tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_tree, "_one_row", lambda *_: None)
        assert outline(tensors) == found


def like(shape: tuple[int, ...]) -> TensorRef:
    """A tensor with its own storage."""
    data = ByteRange(None, 0, 16)  # type: ignore[arg-type]
    return TensorRef.contiguous(Storage(data, "FloatStorage"), DTYPES["float32"], shape)


def test_rows_of_identical_modules_are_compared_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 modules are not taken apart one by one."""
    tensors = {f"layers.{i}.{j}.w": like((4,)) for i in range(20) for j in range(10)}
    monkeypatch.setattr(module_tree, "_rows", lambda modules, _: pytest.fail("one by one") if modules else ())
    assert shown(outline(tensors)) == [(0, "layers.0-19", 20, 800), (1, "0-9", 10, 800)]
