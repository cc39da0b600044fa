"""Training samples changed at random, by (seed, epoch, sample) alone.

So a sample is the same on any rank, in any loading process, on any number of ranks, and after a resume. The
data set below stays as it is: what is compared between ranks and on a resume are its own samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from ckpttool.distributed.randomness import seeded
from ckpttool.errors import CheckFailed, FileError, UsageFault
from train.config import flags
from train.config.sections import TrainConfig
from train.data import samples as common
from train.data.batches import Undamaged
from train.data.samples import Samples, Scale, count, no_class, optional, scale_of

OF_TORCHVISION = {
    "resized-crop": "RandomResizedCrop",
    "trivial": "TrivialAugmentWide",
    "rand": "RandAugment",
    "erase": "RandomErasing",
}
Change = Callable[[torch.Tensor], torch.Tensor]
PARTNERS = 16  # that are drawn for a mixture, where damaged ones are left out

PADDING = 8  # crop-flip pads by an eighth: 4 pixels of 32, as for the ResNets of arXiv 1512.03385, 4.2


def augmented(samples: Samples, config: TrainConfig, classes: int) -> Samples:
    """Return training samples as `--augment`, `--mixup` and `--cutmix` change them, or as they are.

    With mixup or cutmix each target is a float32 tensor of `classes` probabilities.
    """
    if config.augment.pictures == "none" and not config.augment.mixup and not config.augment.cutmix:
        return samples
    _check(samples, config)
    return Augmented(samples, config, classes)


def _check(samples: Samples, config: TrainConfig) -> None:
    sample = _first(samples, config)
    picture = sample[0] if isinstance(sample, tuple | list) and len(sample) == 2 else None
    for flag, value in (("--mixup", config.augment.mixup), ("--cutmix", config.augment.cutmix)):
        if value and not (isinstance(picture, torch.Tensor) and picture.is_floating_point()):
            raise UsageFault(f"{flag}: samples of --data {config.data.name} are no tensors of real numbers")
    flag = "--cutmix" if config.augment.pictures == "none" else f"--augment {config.augment.pictures}"
    if config.augment.pictures == "none" and not config.augment.cutmix:
        return
    if not isinstance(picture, torch.Tensor) or picture.dim() != 3 or not picture.is_floating_point():
        what = f"{flag}: samples of --data {config.data.name} are no images (channels × height × width)"
        seeded_by = "what it draws is seeded by (seed, epoch, sample)"
        hint = f"leave it out; a data set of your own may change its samples itself, and {seeded_by}"
        raise UsageFault(what, hint=hint)
    names = config.augment.pictures.replace("auto", "crop-flip+trivial").split("+")
    if not {"trivial", "rand"}.isdisjoint(names):
        _check_policy(flag, config, picture)
    if not OF_TORCHVISION.keys().isdisjoint(names):
        _transforms(flag)


def _check_policy(flag: str, config: TrainConfig, picture: torch.Tensor) -> None:
    if _scale(config, picture) is None:
        what = f"{flag}: {config.data.name} scales its images, and pixels from 0 to 255 are needed"
        raise UsageFault(what, hint="give --augment crop-flip, or change the images in the data set")
    if picture.shape[0] not in (1, 3):
        raise UsageFault(f"{flag}: images have 1 or 3 channels, not {picture.shape[0]}")


def _first(samples: Samples, config: TrainConfig) -> Any:
    return Undamaged(samples)[0] if config.data.skip_damaged else samples[0]


class Augmented(Dataset[Any]):
    """Samples that are changed when they are read: cropped, flipped, recoloured, erased, then mixed in pairs.

    What crop-flip shifts in is black; 0 for a data set that scales its images itself. Batch statistics are
    sensitive to that: with grey edges a ResNet that was trained with black ones loses three per cent.

    The others are torchvision's own, with its defaults: `resized-crop` RandomResizedCrop to the image's size
    (arXiv 1409.4842), and every second image mirrored; `trivial` TrivialAugmentWide (arXiv 2103.10158), of
    the published policies the one without settings that were searched for on one data set; `rand` RandAugment
    (arXiv 1909.13719); `erase` RandomErasing (arXiv 1708.04896), which fills with 0.

    The partner of a sample is drawn from the whole data set, not from the rank's batch, so that it is the
    same on any number of ranks. Mixup: arXiv 1710.09412, cutmix: arXiv 1905.04899; with both, each sample
    gets one of them.
    """

    def __init__(self, samples: Samples, config: TrainConfig, classes: int) -> None:
        self.samples, self.config, self.classes, self.epoch = samples, config, classes, 0
        self.settings = config.augment
        self.changes = [*_changes(self.settings.pictures)]
        own = None if self.settings.pictures == "none" else _scale(config, _first(samples, config)[0])
        self.scale = own or Scale()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(epoch)

    def __len__(self) -> int:
        return count(self.samples)

    def __getitem__(self, index: int) -> Any:
        picture, label = self._changed(index)
        if not self.settings.mixup and not self.settings.cutmix:
            return picture, label
        draw = self._random("mix", index)
        partner, other, other_label = self._partner(draw) or (index, picture, label)
        if other.shape != picture.shape:
            sizes = ["×".join(map(str, each.shape)) for each in (picture, other)]
            what = f"training sample {index} has the shape {sizes[0]}, and {partner}, its partner, {sizes[1]}"
            raise CheckFailed(what, hint="mixed samples of --data have one shape")
        mixup, cutmix = self.settings.mixup, self.settings.cutmix
        is_cutmix = draw.random() < 0.5 if mixup and cutmix else cutmix
        if is_cutmix:
            mixed, part = cut(picture, other, draw, cutmix)
        else:
            part = draw.betavariate(mixup, mixup)
            mixed = picture * part + other * (1 - part)
        return mixed, part * label + (1 - part) * other_label

    def _partner(self, draw: random.Random) -> tuple[int, torch.Tensor, Any] | None:
        """Return another sample, to be mixed with, behind its index; None if all of several are damaged."""
        for _ in range(PARTNERS):
            number = draw.randrange(len(self))
            try:
                return number, *self._changed(number)
            except FileError:
                if not self.config.data.skip_damaged:
                    raise
        return None

    def _changed(self, index: int) -> tuple[torch.Tensor, Any]:
        """Return one sample, not mixed; its label as probabilities if samples are to be mixed."""
        picture, label = self._read(index)
        for name, change in self.changes:
            if change is None:
                black = self.scale.apply(torch.zeros(len(picture), 1, 1)).to(picture.dtype)
                picture = crop_flip(picture, self._random("crop-flip", index), black)
                continue
            with seeded(self.config.numbers.seed, name, self.epoch, index):
                takes_bytes = flags.PICTURES[name] == "policy"
                picture = self._recoloured(picture, change) if takes_bytes else change(picture)
        if self.settings.mixup or self.settings.cutmix:
            label = self._probabilities(index, int(label))
        return picture, label

    def _read(self, index: int) -> tuple[torch.Tensor, Any]:
        sample, where = self.samples[index], f"training sample {index}"
        try:
            if self.settings.mixup or self.settings.cutmix:
                return common.checked(sample, where)
            picture, label = sample
        except UsageFault as fault:  # this one alone: the first samples were looked at
            raise CheckFailed(fault.message, hint=fault.hint) from fault
        except (TypeError, ValueError):
            raise CheckFailed(f"{where} is {common.kind_of(sample)}, not (tensor, label)") from None
        else:
            return picture, label

    def _recoloured(self, picture: torch.Tensor, policy: Change) -> torch.Tensor:
        pixels = self.scale.undo(picture).mul(255).round().clamp(0, 255).to(torch.uint8)
        return self.scale.apply(policy(pixels).float().div(255))

    def _probabilities(self, index: int, label: int) -> torch.Tensor:
        if not 0 <= label < self.classes:
            raise no_class("training", index, label, self.classes, self.config.data.name)
        return F.one_hot(torch.tensor(label), self.classes).float()

    def _random(self, what: str, index: int) -> random.Random:
        # A string seed is hashed by random itself, the same way on every Python and machine.
        return random.Random(f"{self.config.numbers.seed}:{what}:{self.epoch}:{index}")


def crop_flip(picture: torch.Tensor, draw: random.Random, black: torch.Tensor) -> torch.Tensor:
    """Shift an image [channels, height, width] by up to an eighth, and mirror every second one."""
    _, height, width = picture.shape
    down, right = (max(1, round(size / PADDING)) for size in (height, width))
    padded = black.repeat(1, height + 2 * down, width + 2 * right)
    padded[:, down : down + height, right : right + width] = picture
    top, left = draw.randint(0, 2 * down), draw.randint(0, 2 * right)
    cropped = padded[:, top : top + height, left : left + width]
    return cropped.flip(2) if draw.random() < 0.5 else cropped.contiguous()


def cut(
    picture: torch.Tensor, other: torch.Tensor, draw: random.Random, alpha: float
) -> tuple[torch.Tensor, float]:
    """Replace a rectangle by that of another image; return the image, and the part of it that stayed.

    The part is from Beta(alpha, alpha), before the rectangle is cut off at the image's edges.
    """
    _, height, width = picture.shape
    side = (1 - draw.betavariate(alpha, alpha)) ** 0.5
    top, bottom = _stretch(height, side, draw)
    left, right = _stretch(width, side, draw)
    mixed = picture.clone()
    mixed[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def _stretch(size: int, part: float, draw: random.Random) -> tuple[int, int]:
    length, centre = int(size * part), draw.randrange(size)
    return max(centre - length // 2, 0), min(centre + length // 2, size)


def _scale(config: TrainConfig, picture: torch.Tensor) -> Scale | None:
    """Return how the images of a data set are normalised; None if it does that itself."""
    name, _, _ = config.data.name.partition(":")
    if name not in ("digits", "cifar10", "mnist", "folder", "fake"):
        return None
    return scale_of(config.data, picture.shape[0], usual=Scale() if name == "fake" else None)


def _changes(pictures: str) -> Iterator[tuple[str, Change | None]]:
    """Yield what changes an image, in order, each with the name that seeds it; None for `crop_flip`."""
    names = pictures.replace("auto", "crop-flip+trivial").split("+")
    for name in (name for name in flags.PICTURES if name in names):
        if name not in OF_TORCHVISION:
            yield name, None
        elif name == "resized-crop":
            yield name, _resized_crop
        else:
            yield name, getattr(_transforms(), OF_TORCHVISION[name])()


def _resized_crop(picture: torch.Tensor) -> torch.Tensor:
    transforms = _transforms()
    cropped = transforms.RandomResizedCrop(list(picture.shape[1:]), antialias=True)(picture)
    flipped: torch.Tensor = transforms.RandomHorizontalFlip()(cropped)
    return flipped


def _transforms(flag: str = "--augment") -> Any:
    return optional("torchvision.transforms", f"{flag}: needs torchvision", "; or give crop-flip")
