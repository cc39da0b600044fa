"""Tensors that are not one strided view of a storage, as torch saves them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from ckpttool.tensors.dtypes import DTYPES

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
