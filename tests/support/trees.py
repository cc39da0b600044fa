"""Trees with every kind of value that `torch.save` writes, and tensors of every kind and layout."""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from ckpttool.core.tensors.ref import DTYPES

# ---- Trees with every kind of value that `torch.save` writes ------------------------------------------


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 2))


def training_checkpoint() -> dict[str, Any]:
    """Return everything that training scripts save."""
    net = model()
    optimizer = torch.optim.AdamW(list(net.named_parameters()), 0.1)
    net(torch.rand(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {
        "epoch": 3,
        "state_dict": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "args": argparse.Namespace(lr=0.1, out=pathlib.Path("runs"), devices=[0, 1]),
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
        "best": np.float64(0.5),
        "when": None,
    }


def shared() -> dict[str, Any]:
    weight = torch.rand(3, 4)
    values = [1, 2]
    tensors = {"a": weight, "b": weight, "view": weight[1:], "flat": weight.view(-1)}
    return {**tensors, "l": values, "m": {"l": values}}


def with_metadata() -> OrderedDict[str, Any]:
    state = OrderedDict(w=torch.ones(2), _extra_state={"scale": 2})
    state._metadata = OrderedDict([("", {"version": 1}), ("bn", {"version": 2, "note": "x"})])  # type: ignore[attr-defined]
    return state


class Odd:
    """A class that only the user's code knows; an object of it refers to itself."""

    def __init__(self) -> None:
        self.tensor = torch.arange(3)
        self.again = self.tensor
        self.me = self


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but files of it exist
        return torch.quantize_per_tensor(torch.rand(4), 0.1, 2, torch.qint8)


def sparse() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not check invariants
        return torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.tensor([3.0, 4.0]), (2, 3))


def with_attribute() -> torch.Tensor:
    made = torch.ones(2)
    made.note = "kept"  # type: ignore[attr-defined]
    return made


TREES: dict[str, Any] = {
    "a training checkpoint": training_checkpoint(),
    "a whole model": model(),
    "a whole model in evaluation": torch.nn.Sequential(torch.nn.Dropout(), torch.nn.LSTM(2, 3)).eval(),
    "what shares memory": shared(),
    "a state with versions": with_metadata(),
    "one tensor": torch.rand(3),
    "a list of tensors": [torch.rand(3), torch.tensor(2)],
    "a tuple": (1, torch.rand(1)),
    "a number": 5,
    "nothing": None,
    "an empty dict": {},
    "a deep tree": {"a": [{"b": ({"c": [torch.ones(1)]},)}]},
    "large numbers": [2**64, -(2**100), 10**3000, float("nan"), -0.0, float("inf")],
    "bytes": [b"\x00\xff", bytearray(b"x"), "é\ud800"],
    "sets": [{1, "a"}, frozenset({(1, 2)})],
    "dicts": [defaultdict(list, a=[1]), OrderedDict(b=1, a=2), {1: 2, None: 3, (1, "x"): 4, False: 5}],
    "a queue": deque([1, 2], maxlen=4),
    "torch's small things": [torch.Size([1, 2]), torch.float16, torch.device("cuda", 1), torch.strided],
    "numpy's things": [np.float32(1.5), np.arange(4), np.array(["a"]), np.dtype("int8"), np.bool_(True)],
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "a frozen parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "a tensor with gradient": torch.ones(2, requires_grad=True),
    "a list of parameters": torch.nn.ParameterList([torch.ones(2)]),
    "a sparse tensor": {"s": sparse(), "c": sparse().coalesce()},
    "a quantised tensor": quantised(),
    "a tensor without values": torch.empty(3, 4, device="meta"),
    "a tensor with an attribute": with_attribute(),
    "an object of the user's": Odd(),
    "a storage": torch.arange(4, dtype=torch.uint8).untyped_storage(),
    "keys with dots and slashes": {"a.b": {"c/d": 1}, "": 2, "..": 3, "\x1b[31m": 4},
}


# ---- Tensors that are not one strided view of a storage, as torch saves them --------------------------


PLAIN_DTYPES = [name for name in DTYPES if not name.startswith("q")]
"""The names of the dtypes of plain tensors; a tensor of another is quantised."""

ROWS = torch.arange(12.0).reshape(3, 4)


class Tagged(torch.Tensor):
    """A subclass that adds nothing but a name."""


def _tagged() -> torch.Tensor:
    made = ROWS.clone().as_subclass(Tagged)
    made.note = "mine"  # type: ignore[attr-defined]
    return made


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse COO": lambda: torch.eye(3).to_sparse(),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "sparse BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "a sparse Parameter": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    "quantised": lambda: torch.quantize_per_tensor(ROWS, 0.1, 3, torch.qint8),
    "quantised by channel": lambda: torch.quantize_per_channel(
        ROWS, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.quint8
    ),
    "nested": lambda: _nested(torch.strided),
    "nested and jagged": lambda: _nested(torch.jagged),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "masked": lambda: torch.masked.masked_tensor(ROWS, ROWS > 5),
    "uninitialised": lambda: torch.nn.LazyLinear(3).weight,
}
"""A tensor of each kind that one process can make."""

IN_WORDS = {
    "sparse COO": "sparse COO float32 [3, 3], coalesced",
    "sparse CSR": "sparse CSR float32 [3, 3]",
    "sparse BSR": "sparse BSR float32 [4, 4]",
    "a sparse Parameter": "sparse COO float32 [3, 3], coalesced",
    "quantised": "quantised qint8 [3, 4], per_tensor_affine, scale 0.1, zero point 3",
    "quantised by channel": "quantised quint8 [3, 4], per_channel_affine, axis 0",
    "nested": "nested float32",
    "nested and jagged": "nested float32, ragged axis 1",
    "meta": "meta float32 [3, 4]",
    "masked": "MaskedTensor float32 [3, 4]",
    "uninitialised": "uninitialised",
}


def save_kind(kind: str, path: Path) -> Path:
    """Save a state of a plain tensor and one of a kind, and return the path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes, all of them
        torch.save({"plain": ROWS, "x": KINDS[kind]()}, path)
    return path


def save_tagged(path: Path) -> Path:
    """Save a plain tensor of a subclass with an attribute, and return the path."""
    torch.save({"plain": ROWS, "x": _tagged()}, path)
    return path


def save_zero3(path: Path) -> Path:
    """Save a file of the form that DeepSpeed's ZeRO stage 3 writes, and return the path."""
    module = {name: torch.empty(0) for name in ("fc.weight", "fc.bias", "norm.running_mean", "norm.empty")}
    module["norm.running_mean"] = torch.ones(4)
    shapes = [{"fc.weight": torch.Size([4, 3]), "fc.bias": torch.Size([4])}]
    torch.save({"module": module, "param_shapes": shapes, "buffer_names": ["norm.running_mean"]}, path)
    return path


# ---- Tensors of every memory layout and element width, and files of either byte order -----------------


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return 0, 1, 2, … in a shape; complex numbers count down in their imaginary part."""
    count = torch.Size(shape).numel()
    if dtype.is_complex:
        real = torch.arange(count, dtype=torch.float64)
        return torch.complex(real, -real - 1).to(dtype).reshape(shape)
    return torch.arange(count).to(dtype).reshape(shape)


LAYOUTS: dict[str, torch.Tensor] = {
    "transposed": numbers(5, 7).t(),
    "permuted": numbers(3, 4, 5).permute(2, 0, 1),
    "channels last": numbers(2, 3, 5, 5).contiguous(memory_format=torch.channels_last),
    "channels last 3d": numbers(2, 3, 2, 4, 4).contiguous(memory_format=torch.channels_last_3d),
    "every third of a row": numbers(100)[1::3],
    "a column": numbers(10, 10)[:, 3],
    "a corner": numbers(10, 10)[2:5, 3:9],
    "expanded": numbers(1, 5).expand(6, 5),
    "expanded inside": numbers(4, 1, 3).expand(4, 5, 3),
    "one number expanded": numbers(1).expand(1000),
    "overlapping windows": numbers(50).unfold(0, 8, 3),
    "a diagonal": numbers(9, 9).diagonal(),
    "a scalar inside": numbers(10)[7],
    "rows of one": numbers(12)[::4].reshape(3, 1).t(),
    "the end of a storage": numbers(10)[8:],
    "many short axes": numbers(2, 2, 2, 2, 2, 2).permute(5, 3, 1, 0, 2, 4),
}


WIDTHS = [
    *(torch.uint8, torch.bool, torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.uint16),
    *(torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128),
]


LAZY: dict[str, torch.Tensor] = {
    "conjugate": numbers(5, dtype=torch.complex64).conj(),
    "conjugate, transposed": numbers(3, 4, dtype=torch.complex64).mH,
    "conjugate of doubles": numbers(5, dtype=torch.complex128).conj(),
    "negative": numbers(5, dtype=torch.complex64).conj().imag,
    "negative of doubles": numbers(5, dtype=torch.complex128).conj().imag,
    "conjugate of one number": torch.tensor(1 + 2j).conj(),
    "negative zero and infinity": torch.complex(torch.zeros(2), torch.tensor([0.0, float("inf")]))
    .conj()
    .imag,
}


def strided(ranks: tuple[int, int], least: int, stride: int) -> st.SearchStrategy[Any]:
    """Draw a view: a shape of axes of `least` to 4, strides up to the largest, and an offset up to 20."""

    def view(rank: int) -> st.SearchStrategy[Any]:
        shapes = st.lists(st.integers(least, 4), min_size=rank, max_size=rank)
        strides = st.lists(st.integers(0, stride), min_size=rank, max_size=rank)
        return st.tuples(shapes, strides, st.integers(0, 20))

    return st.integers(*ranks).flatmap(view)


def big_endian(tensor: torch.Tensor, path: Path) -> Any:
    """Save a tensor as torch does on a big-endian machine: the bytes of each number reversed."""
    import zipfile

    torch.save({"t": tensor}, path.with_suffix(".little"))
    part = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
    with zipfile.ZipFile(path.with_suffix(".little")) as little, zipfile.ZipFile(path, "w") as big:
        for record in little.namelist():
            raw = little.read(record)
            if record.endswith("/byteorder"):
                raw = b"big"
            elif "/data/" in record:
                raw = b"".join(raw[i : i + part][::-1] for i in range(0, len(raw), part))
            big.writestr(record, raw)
    return path


# ---- A training's state with what a copy of it can get wrong. Imports torch ---------------------------


def odd_state() -> dict[str, Any]:
    """Return a state with what a copy can get wrong."""
    whole = torch.arange(24, dtype=torch.float32)
    picture = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    named: Any = collections.OrderedDict(a=whole[4:10].view(2, 3), tied=whole[4:10].view(2, 3))
    named._metadata = {"": {"version": 1}}
    same = torch.ones(3)
    return {
        "model": named,
        "views": [whole.view(4, 6).t(), whole[1::2], picture, torch.tensor(3.0), torch.empty(0, 3)],
        "dtypes": (same.bfloat16(), same.bool(), same.to(torch.complex64), same.long()),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "twice": [same, same],
        "plain": {"lr": 0.1, "names": ["momentum_buffer", "momentum_buffer"], "none": None, 3: b"bytes"},
    }
