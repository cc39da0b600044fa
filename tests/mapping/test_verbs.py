"""Each verb makes what torch's operation of that name makes, of any layout, and its inverse undoes it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.core.tensors.ref import DTYPES, TensorRef
from ckpttool.core.tensors.values import stream
from ckpttool.errors import Irreversible, UsageFault
from ckpttool.mapping.rule_file import step_of
from ckpttool.mapping.verbs import (
    Bundle,
    Cast,
    Concat,
    CutAxis,
    PermuteHeads,
    Reshape,
    RuleContext,
    Scaling,
    Stack,
    Transpose,
    Unstack,
    Verb,
    VerbMisfit,
)


def ref(tensor: torch.Tensor) -> TensorRef:
    """Return a tensor of any strides as one in a file."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"w": tensor}, path := Path(folder, "in.pt"))
        return ckpttool.open(path).state("").tensors["w"]


def value(tensor: TensorRef) -> torch.Tensor:
    raw = b"".join(map(bytes, stream(tensor)))
    dtype = getattr(torch, tensor.dtype.name)
    if not raw:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(tensor.shape)


def after(step: Verb, *tensors: torch.Tensor, parts: int = 1, **numbers: int) -> list[torch.Tensor]:
    """Return what a step makes of tensors, each in the layout it has here."""
    bundle = Bundle((), {(): tuple(map(ref, tensors))})
    made = step.apply(bundle, RuleContext(numbers, parts))
    return [value(each) for those in made.tensors.values() for each in those]


def assert_bits(mine: Sequence[torch.Tensor], *theirs: torch.Tensor) -> None:
    assert [each.shape for each in mine] == [each.shape for each in theirs]
    assert all(
        a.numpy().tobytes() == b.contiguous().numpy().tobytes() for a, b in zip(mine, theirs, strict=True)
    )


@st.composite
def layouts(draw: st.DrawFn, least: int = 1) -> torch.Tensor:
    """Draw a tensor of up to four axes, in any order in memory, perhaps cut out of a larger one."""
    shape = draw(st.lists(st.integers(0, 4), min_size=least, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    base = torch.arange(float(np.prod([size + 1 for size in shape]))).reshape([size + 1 for size in shape])
    turned = base.permute(order)
    return turned[tuple(slice(draw(st.integers(0, 1)), None) for _ in shape)]


@given(layouts(), st.data())
def test_transpose_is_torch_s_permute(tensor: torch.Tensor, data: st.DataObject) -> None:
    axes = tuple(data.draw(st.permutations(range(tensor.dim()))))
    (made,) = after(Transpose(axes=axes), tensor)
    assert_bits([made], tensor.permute(axes))
    assert_bits(after(Transpose(axes=axes).inverse(), made), tensor)


@given(layouts(), st.integers(1, 3), st.data())
def test_concat_is_torch_s_cat_and_split_undoes_it(
    tensor: torch.Tensor, count: int, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(-tensor.dim(), tensor.dim() - 1))
    sizes = tuple(data.draw(st.integers(0, tensor.shape[axis])) for _ in range(count))
    parts = [tensor.narrow(axis, tensor.shape[axis] - size, size) + n for n, size in enumerate(sizes)]
    (made,) = after(Concat(axis, sizes), *parts)
    assert_bits([made], torch.cat(parts, axis))
    assert_bits(after(Concat(axis, sizes).inverse(), made, parts=count), *parts)


@given(layouts(0), st.integers(1, 3), st.data())
def test_stack_is_torch_s_stack_and_unstack_undoes_it(
    tensor: torch.Tensor, count: int, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(-tensor.dim() - 1, tensor.dim()))
    tensors = [tensor + n for n in range(count)]
    bundle = Bundle(("e",), {(n,): (ref(each),) for n, each in enumerate(tensors)})
    stacked = Stack("e", axis).apply(bundle, RuleContext({}, 1))
    assert_bits([value(stacked.tensors[()][0])], torch.stack(tensors, axis))
    again = Stack("e", axis).inverse().apply(stacked, RuleContext({}, 1))
    assert (again.fields, [*again.tensors]) == (("e",), [(n,) for n in range(count)])
    assert_bits([value(again.tensors[n,][0]) for n in range(count)], *tensors)


def test_experts_are_stacked_in_the_order_of_their_numbers() -> None:
    bundle = Bundle(("e",), {(n,): (ref(torch.tensor([n])),) for n in (10, 2, 0, 1)})
    (made,) = Stack("e").apply(bundle, RuleContext({}, 1)).tensors[()]
    assert value(made).tolist() == [[0], [1], [2], [10]]


@given(layouts(), st.data())
def test_reshape_is_torch_s_reshape(tensor: torch.Tensor, data: st.DataObject) -> None:
    sizes = [n for n in range(1, tensor.numel() + 1) if tensor.numel() % n == 0] or [1]
    first = data.draw(st.sampled_from(sizes))
    step = Reshape(shape=(first, -1) if tensor.numel() else (0, 3), before=tuple(tensor.shape))
    (made,) = after(step, tensor)
    assert_bits([made], tensor.reshape(made.shape))
    assert_bits(after(step.inverse(), made), tensor)


@pytest.mark.parametrize(("heads", "size", "width"), [(1, 2, 1), (4, 8, 3), (3, 6, 5), (2, 2, 0)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_heads_go_from_pairs_to_halves_row_by_row(heads: int, size: int, width: int, is_turned: bool) -> None:
    rows = torch.arange(heads * size * width).reshape(heads * size, width)
    given = rows.t().contiguous().t() if is_turned else rows
    (made,) = after(PermuteHeads(heads=heads, to="halves"), given)
    halves = [
        head * size + 2 * p + half for head in range(heads) for half in (0, 1) for p in range(size // 2)
    ]
    assert_bits([made], rows[halves])
    assert_bits(after(PermuteHeads(heads=heads, to="pairs"), made), rows)
    columns = PermuteHeads(heads="heads // 2", to="halves", axis=1)
    assert_bits(after(columns, given.t(), heads=2 * heads), made.t())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_scale_rounds_once(dtype: torch.dtype) -> None:
    numbers = torch.tensor([1.0, -3.3, 0.0, -0.0, torch.inf, torch.nan, 1e-30, 6e4]).to(dtype)
    (made,) = after(Scaling(by=0.3), numbers.reshape(2, 4).t())
    exact = (numbers.double() * 0.3).to(dtype).reshape(2, 4).t()
    assert torch.equal(made.nan_to_num(9), exact.nan_to_num(9)) and made.dtype is dtype


def test_cast_is_the_cast_of_convert_and_counts_what_overflows() -> None:
    context = RuleContext({}, 1)
    bundle = Bundle((), {(): (ref(torch.tensor([1.0, 1e30])),)})
    (made,) = Cast(to="fp16").apply(bundle, context).tensors[()]
    assert (made.dtype.name, value(made).tolist()) == ("float16", [1.0, torch.inf])
    assert [report.overflows for report in context.reports] == [1]


def test_parts_limit_a_step_to_some_of_the_tensors() -> None:
    q, k = torch.arange(4.0).reshape(4, 1), torch.arange(4.0, 8).reshape(4, 1)
    made = after(PermuteHeads(heads=1, to="halves", parts=(1,)), q, k)
    assert_bits(made, q, k[[0, 2, 1, 3]])
    with pytest.raises(VerbMisfit, match="are 2, and transpose names the parts"):
        after(Transpose(parts=(2,)), q, k)


ROWS = torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("step", "tensors", "said"),
    [
        (Transpose(axes=(1, 0)), [torch.zeros(2, 2, 2)], "do not permute"),
        (Concat(2), [ROWS, ROWS], "has 2 axes, and none is number 2"),
        (Concat(0), [ROWS, ROWS[:2]], "has sizes [6, 2] along axis 0, not one size"),
        (Concat(0, (6, 4)), [ROWS, ROWS[:2]], "has sizes [6, 2] along axis 0, not [6, 4]"),
        (Concat(0, (6, 6)), [ROWS, torch.zeros(6, 5)], "has shapes [6, 4] and [6, 5]"),
        (Concat(0, (6, 6)), [ROWS, torch.zeros(6)], "has shapes [6, 4] and [6]"),
        (Concat(0), [ROWS, ROWS.half()], "has types float32 and float16"),
        (CutAxis(0), [ROWS], "has 6 along axis 0, which do not divide by 4"),
        (CutAxis(0, (1, 2, 3, 4)), [ROWS], "has 6 along axis 0, not 1 + 2 + 3 + 4"),
        (CutAxis(0, (7, -1, 0, 0)), [ROWS], "not 7 + -1 + 0 + 0"),
        (CutAxis(0), [ROWS, ROWS], "are 2, and split takes one"),
        (Unstack("e", 1), [torch.zeros(3, 0)], "is cut into 1 to"),
        (PermuteHeads(heads=4, to="halves"), [ROWS], "has 6 rows, which do not divide into 4 heads"),
        (PermuteHeads(heads=2, to="halves"), [ROWS], "has heads of 3 rows, which do not divide into pairs"),
        (PermuteHeads(heads=0, to="halves"), [ROWS], "do not divide into 0 heads"),
        (PermuteHeads(heads=3, to="halves", size=4), [ROWS], "has 6 rows, not those of 3 heads of 4"),
        (Reshape(shape=(5, 5)), [ROWS], "has 24 elements in shape [6, 4], not those of [5, 5]"),
        (Reshape(shape=(-1, -1)), [ROWS], "not those of [-1, -1]"),
        (Reshape(shape=(24,), before=(4, 6)), [ROWS], "has shape [6, 4], not [4, 6]"),
        (Scaling(by=2), [torch.zeros(2, dtype=torch.int64)], "is int64, which is not scaled"),
    ],
)
def test_tensors_that_do_not_fit_are_said(step: Verb, tensors: list[torch.Tensor], said: str) -> None:
    with pytest.raises(VerbMisfit) as fault:
        after(step, *tensors, parts=4)
    assert said in str(fault.value)


def test_a_claimed_size_of_no_elements_makes_no_million_tensors() -> None:
    huge = TensorRef.contiguous(ref(torch.zeros(0)).storage, DTYPES["float32"], (10**12, 0))
    with pytest.raises(VerbMisfit, match="is cut into 1 to 256 tensors"):
        Unstack("e").apply(Bundle((), {(): (huge,)}), RuleContext({}, 1))


STEPS = [
    {"concat": 0},
    {"split": 1, "sizes": [3, "heads * 2"]},
    {"stack": "e", "axis": 1},
    {"unstack": "e"},
    {"transpose": [1, 0], "parts": [0, 2]},
    {"permute-heads": "heads", "to": "pairs", "size": 8},
    {"reshape": ["heads", -1], "from": [-1]},
    {"scale": 0.5},
    {"cast": "bf16"},
]


@pytest.mark.parametrize("table", STEPS, ids=lambda table: next(iter(table)))
def test_a_step_is_written_as_it_is_read(table: dict[str, object]) -> None:
    assert step_of(table).table() == table
    assert step_of(step_of(table).table()) == step_of(table)


@pytest.mark.parametrize("step", [Scaling(by=2), Cast(to="bf16"), Reshape(shape=(4,))])
def test_what_loses_something_has_no_inverse(step: Verb) -> None:
    with pytest.raises(Irreversible, match=step.verb):
        step.inverse()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "has 0 verbs"),
        ({"concat": 0, "split": 0}, "has 2 verbs"),
        ({"concat": "0"}, "concat: concat = '0'"),
        ({"concat": True}, "concat: concat = True"),
        ({"concat": 0, "axes": 1}, "takes no 'axes'"),
        ({"concat": 0, "axis": 1}, "takes no 'axis'"),
        ({"concat": 0, "sizes": [1, 1.5]}, "sizes"),
        ({"reshape": "x"}, "reshape = 'x'"),
        ({"reshape": [1], "before": [1]}, "takes no 'before'"),
        ({"permute-heads": 4}, "to = ''"),
        ({"permute-heads": "f()", "to": "pairs"}, "'f()' is no number"),
        ({"scale": "2"}, "scale = '2'"),
        ({"scale": float("nan")}, "scale = nan"),
        ({"cast": "int3"}, "int3"),
        ({"transpose": [0], "parts": [-1]}, "parts"),
    ],
)
def test_a_malformed_step_is_refused(table: dict[str, object], said: str) -> None:
    with pytest.raises(UsageFault) as fault:
        step_of(table)
    assert said in str(fault.value)
