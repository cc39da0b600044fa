"""Detection: squares, discs and crosses in drawings of any size; a small network says which are where.

    python train/main.py --data examples/shapes.py:data --model examples/shapes.py:model \
        --task examples/shapes.py:Detection --optimizer adamw --lr 0.008 --warmup 20steps \
        --batch-size 8 --epochs 8 --out runs/shapes

A sample is (drawing, boxes, kinds): drawings differ in size, and each has one to four shapes. `collate` pads
the drawings of a batch and keeps boxes and kinds as lists. The loss is a mean over the shapes in all ranks'
drawings, whose number is another in every step. `found` is the part of the shapes that are found, with the
right kind and a box that shares half of its area; what is seen where nothing is counts as a shape missed. It
takes twenty seconds to find nine of ten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ckpttool import metrics

KINDS = ("square", "disc", "cross")
NONE = len(KINDS)  # the kind of what is not there
STRIDE = 4  # pixels from one place of the network's output to the next

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Boxes = list[torch.Tensor]


def drawn(seed: int) -> Sample:
    """Return a drawing [1, height, width], its boxes [shapes, 4], from the left top, and their kinds."""
    draw = torch.Generator().manual_seed(seed)

    def between(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=draw))

    height, width = 4 * between(6, 10), 4 * between(6, 10)
    drawing = 0.2 * torch.rand(1, height, width, generator=draw)
    rows, columns = torch.arange(height).unsqueeze(1), torch.arange(width)
    boxes, kinds = [], []
    for _ in range(between(1, 4)):
        radius, kind = between(3, 5), between(0, len(KINDS) - 1)
        x, y = between(radius, width - 1 - radius), between(radius, height - 1 - radius)
        box = torch.tensor([x - radius, y - radius, x + radius + 1, y + radius + 1])
        if boxes and (shared(box, torch.stack(boxes)) > 0).any():
            continue  # shapes stand apart
        across, down = (columns - x).abs(), (rows - y).abs()
        square = across.maximum(down) <= radius
        inside = square, across**2 + down**2 <= radius**2, square & (across.minimum(down) < 2)
        drawing[0, inside[kind]] += 0.8
        boxes.append(box)
        kinds.append(kind)
    return drawing, torch.stack(boxes).float(), torch.tensor(kinds)


def shared(box: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the area that a box [4] shares with each of others [n, 4], as part of what both cover."""
    sides = (torch.minimum(box[2:], others[:, 2:]) - torch.maximum(box[:2], others[:, :2])).clamp(min=0)
    areas = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(dim=1)
    return sides.prod(dim=1) / (areas - sides.prod(dim=1))


class Drawings(Dataset[Sample]):
    classes = KINDS

    def __init__(self, seeds: range) -> None:
        self.samples = [drawn(seed) for seed in seeds]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def collate(self, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, Boxes, Boxes]:
        """Return (drawings [n, 1, highest, widest], which pixels are theirs, boxes, kinds)."""
        drawings, boxes, kinds = zip(*samples, strict=True)
        highest, widest = (max(drawing.shape[axis] for drawing in drawings) for axis in (1, 2))
        rests = [(0, widest - drawing.shape[2], 0, highest - drawing.shape[1]) for drawing in drawings]
        padded = torch.stack([F.pad(drawing, rest) for drawing, rest in zip(drawings, rests, strict=True)])
        theirs = torch.stack(
            [F.pad(torch.ones_like(d), rest) for d, rest in zip(drawings, rests, strict=True)]
        )
        return padded, theirs, list(boxes), list(kinds)


def data() -> tuple[Drawings, Drawings]:
    return Drawings(range(600)), Drawings(range(1000, 1200))


class Detector(nn.Module):
    """At each fourth pixel: scores of each kind of shape with its centre there, and how far its sides are."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        widths = (1, width, width, 2 * width, 2 * width)
        layers = zip(widths, widths[1:], (1, 2, 1, 2), strict=False)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, stride=stride, padding=1) for a, b, stride in layers)
        self.wider = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.kinds, self.sides = nn.Conv2d(2 * width, NONE, 1), nn.Conv2d(2 * width, 4, 1)
        nn.init.constant_(self.kinds.bias, -3.0)  # nearly everywhere is no shape

    def forward(self, drawings: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores [n, kinds, height / 4, width / 4] and distances [n, 4, ...] in pixels."""
        seen = drawings
        for layer in (*self.layers, self.wider):
            seen = layer(seen).relu()
            # What is padding stays 0, so a drawing's outputs do not depend on what it is batched with.
            stride = theirs.shape[2] // seen.shape[2]
            seen = seen * theirs[:, :, ::stride, ::stride]
        outside = theirs[:, :, ::STRIDE, ::STRIDE] == 0
        return self.kinds(seen).masked_fill(outside, -99.0), STRIDE * F.softplus(self.sides(seen))


def model() -> nn.Module:
    return Detector()


class Detection:
    """The cross entropy of the kinds at all places, and how far sides are off, over the number of shapes."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(*batch[:2])

    def loss(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, int]:
        (scores, distances), (_, _, boxes, kinds) = outputs, batch
        centres = [((box[:, :2] + box[:, 2:]) / 2 / STRIDE).long() for box in boxes]
        n = torch.cat([torch.full_like(kind, number) for number, kind in enumerate(kinds)])
        x, y = torch.cat(centres).unbind(1)
        wanted = torch.zeros_like(scores)
        wanted[n, torch.cat(kinds), y, x] = 1.0
        of_kinds = F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")
        off = (boxes_at(distances[n, :, y, x], x, y) - torch.cat(boxes)).abs().sum()
        return of_kinds + 0.1 * off, len(n)

    def detected(self, outputs: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the boxes [found, 4] and kinds [found] that are seen in a drawing, the surest first."""
        scores, distances = outputs[0][number], outputs[1][number]
        peaks = F.max_pool2d(scores.amax(dim=0, keepdim=True), 3, stride=1, padding=1)
        kind, y, x = ((scores == peaks) & (scores > 0)).nonzero(as_tuple=True)
        order = scores[kind, y, x].argsort(descending=True, stable=True)
        return boxes_at(distances[:, y, x].T, x, y)[order], kind[order]

    def found(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kind seen and the right one, of each shape, and of each box where there is none."""
        seen, right = [], []
        for number, (boxes, kinds) in enumerate(zip(batch[2], batch[3], strict=True)):
            missed = dict(enumerate(kinds.tolist()))
            for box, kind in zip(*self.detected(outputs, number), strict=True):
                areas = shared(box, boxes)
                best = int(areas.argmax())
                seen.append(int(kind))
                right.append(missed.pop(best, NONE) if areas[best] >= 0.5 else NONE)
            seen += [NONE] * len(missed)
            right += missed.values()
        return torch.tensor(seen), torch.tensor(right)

    @property
    def metrics(self) -> dict[str, Any]:
        return {"found": (metrics.Accuracy, self.found)}


def boxes_at(distances: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return boxes [n, 4] with these distances [n, 4] from these places [n] to their sides."""
    centres = STRIDE * torch.stack([x, y], dim=1) + STRIDE / 2
    return torch.cat([centres - distances[:, :2], centres + distances[:, 2:]], dim=1)
