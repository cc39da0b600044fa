"""The models known by name. Each is a plain module; the trainer wraps it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ckpttool.errors import UsageFault
from ckpttool.models import factory

NAMES = "simple-cnn, resnet20, torchvision:NAME or file.py:factory"


def build(name: str, *, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the model that `--model` names, for samples of this shape.

    A user's factory gets `classes`, the outputs that the model needs, as `num_classes`; nothing if that is 0.
    """
    if name in ("simple-cnn", "resnet20"):
        if not classes:
            hint = "give --model file.py:factory, or classes = [...] to the data set"
            raise UsageFault(f"--model {name}: has an output per class, and --data names none", hint=hint)
        if len(shape) != 3:
            raise UsageFault(f"--model {name}: takes images, not samples of shape {list(shape)}")
        if name == "resnet20":
            return resnet20(num_classes=classes, channels=shape[0])
        return simple_cnn(num_classes=classes, channels=shape[0], height=shape[1], width=shape[2])
    if ":" not in name:
        raise UsageFault(f"--model {name}: no such model", hint=f"one of {NAMES}")
    made: Any = factory.build(name, **({"num_classes": classes} if classes else {}))
    if not isinstance(made, nn.Module):
        raise UsageFault(f"--model {name}: returned {type(made).__name__}, not a torch.nn.Module")
    return in_training(made)


def in_training(model: nn.Module) -> nn.Module:
    """Put a model into training mode, but for the layers that the user's code froze by `eval()`."""
    frozen = [module for module in model.modules() if not module.training]
    if len(frozen) == len(list(model.modules())):
        frozen = []  # from_pretrained returns a whole model in eval(), also one that is to be trained
    model.train()  # which a model may have overridden, to freeze layers itself
    for module in frozen:
        module.training = False
    return model


def simple_cnn(num_classes: int = 10, channels: int = 1, height: int = 8, width: int = 8) -> nn.Sequential:
    """Return convolutions that halve the image until it is small, then one hidden layer.

    The defaults suit the digits. The model has no BatchNorm, so a batch gives the same gradient however it
    is divided among ranks.
    """
    features: list[nn.Module] = [nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU()]
    width_of_layer = 32
    while min(height, width) > 4:
        wider = min(2 * width_of_layer, 128)
        features += [nn.Conv2d(width_of_layer, wider, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        width_of_layer, height, width = wider, height // 2, width // 2
    classifier = nn.Sequential(
        nn.Flatten(), nn.Linear(width_of_layer * height * width, 64), nn.ReLU(), nn.Linear(64, num_classes)
    )
    return nn.Sequential(OrderedDict(features=nn.Sequential(*features), classifier=classifier))


class ResNet(nn.Module):
    """The residual networks for CIFAR of arXiv 1512.03385, section 4.2: 6n + 2 layers, 16, 32 and 64 wide.

    Parameters are named as in akamaster/pytorch_resnet_cifar10, whose published weights load strictly.
    """

    def __init__(self, blocks: int, num_classes: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: torch.Tensor = self.linear(x.mean(dim=(2, 3)))
        return scores


class Block(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)
        self.stride, self.added = stride, width_out - width_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))

    def shortcut(self, x: torch.Tensor) -> torch.Tensor:
        """Return option A of the paper: no parameters; every second pixel, zero channels on both sides."""
        if self.stride == 1 and not self.added:
            return x
        half = self.added // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.added - half))


def _stage(width_in: int, width_out: int, blocks: int, stride: int) -> nn.Sequential:
    first = Block(width_in, width_out, stride)
    return nn.Sequential(first, *(Block(width_out, width_out, 1) for _ in range(blocks - 1)))


def resnet20(num_classes: int = 10, channels: int = 3) -> ResNet:
    """Return ResNet-20 for CIFAR, with 0.27 million parameters."""
    return ResNet(3, num_classes, channels)
