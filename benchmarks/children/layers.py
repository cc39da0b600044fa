"""A model for the checkpoints that `make_checkpoint.py` writes: layers with one large vector each."""

import torch


class Layer(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()  # which reads every value


class Layers(torch.nn.Module):
    def __init__(self, nbytes: int, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(nbytes // count // 4) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layers(nbytes: int, count: int = 128) -> Layers:
    return Layers(nbytes, count)
