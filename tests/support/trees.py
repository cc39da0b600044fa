"""Trees with every kind of value that `torch.save` writes."""

from __future__ import annotations

import argparse
import pathlib
import random
import warnings
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch


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
