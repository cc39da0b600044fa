"""Small models that tests save, and name as `architectures.py:net` to load them."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import torch
from torch import nn


class Net(nn.Module):
    """Convolution, BatchNorm and a head; all sizes differ."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, (5, 2))
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.norm(self.conv(x)).mean((2, 3)))
        return made


class HeadFirst(Net):
    """`Net` with its parameters in another order."""

    def __init__(self) -> None:
        super().__init__()
        head = self.head
        del self.head
        layers = self._modules.copy()
        self._modules.clear()
        self._modules.update({"head": head, **layers})


class Square(nn.Module):
    """Two layers of one shape, whose momentum can't be told apart by shape."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.tanh(self.first(x)))  # type: ignore[operator]
        return made


class Tied(nn.Module):
    """A tiny language model whose output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.norm(self.embed(x)))
        return made


class Waves(nn.Module):
    """A model with one complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.rand(3, dtype=torch.complex64))


class Pairs(nn.Module):
    """`Waves` with its parameter as two real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.ParameterDict({"real": torch.rand(3), "imag": torch.rand(3)})


class Counted(nn.Module):
    """A model with one scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))


class Inside(nn.Module):
    """`Net` as an attribute of another module, as Lightning modules hold their models."""

    def __init__(self, name: str = "model") -> None:
        super().__init__()
        setattr(self, name, Net())


net, head_first, tied, waves, pairs, counted, inside = Net, HeadFirst, Tied, Waves, Pairs, Counted, Inside


def first_second() -> Square:
    return Square(("first", "second"))


def second_first() -> Square:
    return Square(("second", "first"))


def numbered() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def named() -> nn.Sequential:
    layers = [("input", nn.Linear(3, 5)), ("act", nn.ReLU()), ("output", nn.Linear(5, 2))]
    return nn.Sequential(OrderedDict(layers))


def convolved() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 5, 1))


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5))


def weight_normed() -> nn.Sequential:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)))


def weight_normed_before() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but files of it exist
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 5)))  # type: ignore[no-untyped-call]


def spectral_normed() -> nn.Sequential:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)))


def spectral_normed_before() -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but files of it exist
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 5)))  # type: ignore[no-untyped-call]
