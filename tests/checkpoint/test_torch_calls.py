"""Calls of torch's own functions with odd arguments: read as torch reads them, or the file is refused."""

from __future__ import annotations

import math
import struct
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpttool
from ckpttool.analysis.verify import verify
from ckpttool.errors import CkptToolError, Damaged
from tests.support.crafting import call, dict_of, list_of, name, number, storage, text, torch_zip, tuple_of
from tests.support.crafting import tensor as dense

EMPTY = call(name("collections", "OrderedDict"))
TRUE, FALSE, NONE = b"\x88", b"\x89", b"N"
V2 = name("torch._utils", "_rebuild_tensor_v2")
GET_LAYOUT, KINDS = name("torch.serialization", "_get_layout"), ("COO", "CSR", "CSC", "BSR", "BSC")
LAYOUTS = {kind: call(GET_LAYOUT, text(f"torch.sparse_{kind.lower()}")) for kind in KINDS}
COO = LAYOUTS["COO"]
BLOCKS = {"CSR": (1, 1), "CSC": (1, 1), "BSR": (1, 2), "BSC": (2, 1)}


def plain(*, shape: bytes = tuple_of(number(4)), grad: bytes = FALSE, hooks: bytes = EMPTY) -> bytes:
    return call(V2, storage(), number(0), shape, tuple_of(number(1)), grad, hooks)


def made_of(hooks: bytes) -> bytes:
    return tuple_of(storage(), number(0), tuple_of(number(4)), tuple_of(number(1)), FALSE, hooks)


def integers(key: str, *shape: int, kind: str = "LongStorage") -> bytes:
    stride = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * shape[axis + 1]
    count = stride[0] * shape[0]
    return dense(storage(count, kind=kind, key=key), shape, tuple(stride))


parameter = partial(call, name("torch._utils", "_rebuild_parameter"))
with_state = partial(call, name("torch._utils", "_rebuild_parameter_with_state"))
typed = partial(call, name("torch._tensor", "_rebuild_from_type_v2"))
meta = partial(call, name("torch._utils", "_rebuild_meta_tensor_no_storage"), name("torch", "float32"))


def sparse(layout: bytes, *data: bytes) -> bytes:
    return call(name("torch._utils", "_rebuild_sparse_tensor"), layout, tuple_of(*data))


def coo(key: str, size: int = 4, *coalesced: bytes, nnz: int = 2) -> bytes:
    values = dense(storage(4), (nnz,))
    return sparse(COO, integers(key, 1, nnz), values, tuple_of(number(size)), *coalesced)


def compressed(
    kind: str,
    starts: str,
    plain: str,
    *,
    lines: int = 2,
    across: int = 2,
    values: tuple[int, ...] | None = None,
    block: tuple[int, ...] = (),
    more: tuple[int, ...] = (),
    rest: int = 0,
) -> bytes:
    """A matrix of `lines` compressed rows or columns (of blocks), each `across` long, and two values."""
    of_kind = BLOCKS[kind]
    sizes = (lines, across) if kind.endswith("SR") else (across, lines)
    size = (*(n * b + rest for n, b in zip(sizes, of_kind, strict=True)), *more)
    shape = values or (2, *(block or (of_kind if kind[0] == "B" else ())))
    stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    indices = integers(starts, 3), integers(plain, 2)
    data = dense(storage(4), shape, tuple(stride))
    return sparse(LAYOUTS[kind], *indices, data, tuple_of(*map(number, size)))


# Each kind has the same faults, in its rows or columns, of elements or blocks.
COMPRESSED = {
    f"{kind}{fault}": compressed(kind, starts, plain, **options)
    for kind in BLOCKS
    for fault, (starts, plain, options) in {
        "": ("rows", "columns", {}),
        " in one row": ("rows of one", "none", {}),
        ", sorted in one row": ("rows of one", "up", {"across": 4}),
        ", not sorted in one row": ("rows of one", "columns", {}),
        ", one column twice in one row": ("rows of one", "same column", {}),
        ", one column twice in two rows": ("rows", "same column", {}),
        ", rows that end early": ("rows that end early", "columns", {}),
        ", rows from 1": ("rows from 1", "columns", {}),
        ", rows that go back": ("rows back", "columns", {}),
        ", a column past the end": ("rows", "column past", {}),
        ", a column past the end of a wide one": ("rows", "up", {"across": 3}),
        ", the last column of a wide one": ("rows", "up", {"across": 4}),
        ", a column below 0": ("rows", "below", {"across": 3}),
        " of more rows": ("rows", "columns", {"lines": 3}),
        " of fewer rows": ("rows", "columns", {"lines": 1}),
        " of one value": ("rows", "columns", {"values": (1, *(BLOCKS[kind] if kind[0] == "B" else ()))}),
        " of blocks of four": ("rows", "columns", {"values": (1, 2, 2)}),
        " of other blocks": ("rows", "columns", {"block": BLOCKS[kind][::-1]}),
        " of values without blocks": ("rows", "columns", {"values": (2,)}),
        " of blocks that do not fit": ("rows", "columns", {"rest": 1}),
        " with an axis of values": ("rows", "columns", {"values": (2, *BLOCKS[kind], 1), "more": (1,)}),
    }.items()
}


def quantised(
    *params: bytes, kind: str = "QInt8Storage", grad: bytes = FALSE, scheme: str = "per_tensor_affine"
) -> bytes:
    given = tuple_of(name("torch", scheme), *params)
    where = storage(4, kind=kind, key="q")
    size, stride = tuple_of(number(2)), tuple_of(number(1))
    return call(name("torch._utils", "_rebuild_qtensor"), where, number(0), size, stride, given, grad, EMPTY)


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def by_channel(count: int, axis: int) -> bytes:
    scales, zeros = list_of(*[real(0.1)] * count), list_of(*[number(0)] * count)
    return quantised(scales, zeros, number(axis), scheme="per_channel_affine")


INTEGERS = {"none": (0, 0), "up": (1, 3), "twice": (3, 3), "down": (3, 1), "past": (0, 4), "below": (-1, 2)}
INTEGERS |= {"columns": (1, 0), "same column": (1, 1), "column past": (0, 2), "rows of one": (0, 2, 2)}
INTEGERS |= {"rows": (0, 1, 2), "rows that end early": (0, 1, 1), "rows from 1": (1, 1, 2)}
INTEGERS |= {"rows back": (0, 2, 1)}
STORAGES = {"0": torch.arange(4.0), "q": torch.arange(4, dtype=torch.int8)}
STORAGES |= {key: torch.tensor(values) for key, values in INTEGERS.items()}

TWO, LONGS = dense(storage(4), (2,)), storage(2, kind="LongStorage", key="up")
CASES = {
    "a tensor": plain(), "hooks": plain(hooks=dict_of({"a": number(1)})),
    "hooks that are a list": plain(hooks=list_of(number(1))),
    "hooks of a typed tensor": typed(V2, name("torch", "Tensor"), made_of(list_of(NONE)), dict_of({})),
    "a size in a list": plain(shape=list_of(number(4))),
    "gradients of integers": call(V2, LONGS, number(0), *[tuple_of(number(1))] * 2, TRUE, EMPTY),
    "a Parameter": parameter(plain(), TRUE, EMPTY),
    "a Parameter around a str": parameter(text("x"), TRUE, EMPTY),
    "a Parameter around a number": parameter(number(3), FALSE, EMPTY),
    "a Parameter around nothing": parameter(NONE, FALSE, EMPTY),
    "a Parameter around a list": parameter(list_of(plain()), FALSE, EMPTY),
    "a Parameter without hooks": parameter(plain(), TRUE),
    "a Parameter with hooks": parameter(plain(), TRUE, list_of(number(1))),
    "a Parameter that may need gradients": parameter(plain(), number(1), EMPTY),
    "a Parameter of integers with gradients": parameter(integers("up", 2), TRUE, EMPTY),
    "a Parameter of integers": parameter(integers("up", 2), FALSE, EMPTY),
    "a Parameter with a state too many": parameter(plain(), TRUE, EMPTY, dict_of({})),
    "a Parameter with attributes": with_state(plain(), TRUE, EMPTY, dict_of({"note": text("x")})),
    "a Parameter whose attributes are text": with_state(plain(), TRUE, EMPTY, text("x")),
    "a Parameter whose attributes are three": with_state(plain(), TRUE, EMPTY, tuple_of(*[dict_of({})] * 3)),
    "a Parameter that is changed": parameter(plain(), TRUE, EMPTY) + dict_of({"note": text("x")}) + b"b",
    "a Parameter that gets another storage": parameter(plain(), TRUE, EMPTY)
    + tuple_of(storage(2, kind="LongStorage", key="up"), number(0), tuple_of(number(2)), tuple_of(number(1)))
    + b"b",
    "a typed tensor": typed(V2, name("torch", "Tensor"), made_of(EMPTY), dict_of({})),
    "a typed tensor of three parts": typed(V2, name("torch", "Tensor"), tuple_of(storage())),
    "a typed tensor of nothing": typed(V2, name("torch", "Tensor"), tuple_of(), dict_of({})),
    "a typed sparse tensor of nothing": typed(
        name("torch._utils", "_rebuild_sparse_tensor"), name("torch", "Tensor"), tuple_of(COO), dict_of({})
    ),
    "COO": coo("up"), "COO, coalesced": coo("up", 4, TRUE), "COO, coalesced by nothing": coo("up", 4, NONE),
    "COO, coalesced by a number": coo("up", 4, number(1)), "COO, one index twice": coo("twice"),
    "COO, one index twice, coalesced": coo("twice", 4, TRUE), "COO, out of order": coo("down"),
    "COO, out of order, coalesced": coo("down", 4, TRUE), "COO, past the end": coo("past"),
    "COO, below 0": coo("below"),
    "COO of other sizes": sparse(COO, integers("up", 1, 2), dense(storage(4), (3,)), tuple_of(number(4))),
    "COO of other axes": sparse(COO, integers("up", 1, 2), TWO, tuple_of(number(4), number(4))),
    "COO whose indices are a list": sparse(COO, integers("up", 2), TWO, tuple_of(number(4))),
    "COO whose size is text": sparse(COO, integers("up", 1, 2), dense(storage(4), (2,)), text("x")),
    "COO of two parts": sparse(COO, integers("up", 1, 2), dense(storage(4), (2,))),
    "COO with an axis of values": sparse(
        COO, integers("up", 1, 2), dense(storage(4), (2, 2), (2, 1)), tuple_of(number(4), number(2))
    ),
    "a layout that is none": sparse(call(name("torch.serialization", "_get_layout"), text("torch.strided"))),
    **COMPRESSED,
    "quantised": quantised(real(0.1), number(3)),
    "quantised by a whole number": quantised(number(1), number(3)),
    "quantised by text": quantised(text("x"), number(3)),
    "quantised around a fraction": quantised(real(0.1), real(0.5)),
    "quantised around a huge number": quantised(real(0.1), number(2**70)),
    "quantised by one number": quantised(real(0.1)),
    "quantised, symmetric": quantised(real(0.1), number(0), scheme="per_tensor_symmetric"),
    "quantised by no scheme": quantised(real(0.1), number(0), scheme="float32"),
    "quantised floats": quantised(real(0.1), number(0), kind="FloatStorage"),
    "quantised with gradients": quantised(real(0.1), number(0), grad=TRUE),
    "quantised by channel": by_channel(2, axis=0),
    "quantised by three channels of two": by_channel(3, axis=0),
    "quantised along no axis": by_channel(2, axis=1),
    "meta": meta(tuple_of(number(2)), tuple_of(number(1)), FALSE),
    "meta of other strides": meta(tuple_of(number(2)), tuple_of(), FALSE),
    "meta of three parts": meta(tuple_of(number(2)), tuple_of(number(1))),
    "meta of no size": meta(text("x"), tuple_of(number(1)), FALSE),
}  # fmt: skip


def saved(case: str, folder: Path) -> Path:
    raw = {key: values.numpy().tobytes() for key, values in STORAGES.items()}
    return torch_zip(folder / "in.pt", dict_of({"w": CASES[case], "b": dense(storage())}), raw)


def torch_reads(path: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(path, weights_only=True)
        except Exception:
            return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_a_call_is_read_as_torch_reads_it_or_refused(case: str, tmp_path: Path) -> None:
    path = saved(case, tmp_path)
    if not torch_reads(path):
        with pytest.raises(Damaged), ckpttool.open(path) as checkpoint:
            assert not verify(checkpoint).ok
            ckpttool.save(checkpoint, tmp_path / "out.pt")
        assert not (tmp_path / "out.pt").exists()
        return
    try:
        checkpoint = ckpttool.open(path)
        ckpttool.save(checkpoint, tmp_path / "out.pt")
    except CkptToolError:
        return
    state = checkpoint.state()
    assert {*state.tensors, *state.likes} == {"w", "b"}
    assert torch_reads(tmp_path / "out.pt")
