"""Augmentation, mixup and cutmix: samples depend on (seed, epoch, sample) alone, and only for images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ckpttool.distributed.randomness import seeded
from ckpttool.errors import CheckFailed, UsageFault
from tests.ranks import trainings
from train.config import command_line
from train.config.sections import TrainConfig
from train.data.augment import augmented
from train.data.batches import Loader

CLASSES = 10
KINDS: dict[str, dict[str, Any]] = {
    "crop-flip": {"augment": "crop-flip"},
    "auto": {"augment": "auto"},
    "as for ImageNet": {"augment": "resized-crop+rand+erase"},
    "erase": {"augment": "erase"},
    "mixup": {"mixup": 0.2},
    "cutmix": {"cutmix": 1.0},
    "all": {"augment": "auto", "mixup": 0.2, "cutmix": 1.0},
}
UNIT: dict[str, Any] = {"mean": (0.0,), "std": (1.0,)}


def images(samples: int = 12) -> Any:
    return trainings.tensors((3, 16, 16), samples).train


def made(samples: Any = None, *, epoch: int = 0, **settings: Any) -> Any:
    config = TrainConfig.of(**{"data": "folder:x", **settings})
    found = augmented(images() if samples is None else samples, config, CLASSES)
    if hasattr(found, "set_epoch"):
        found.set_epoch(epoch)
    return found


def all_of(samples: Any) -> torch.Tensor:
    rows = [samples[index] for index in range(len(samples))]
    return torch.stack([torch.cat([x.reshape(-1), torch.as_tensor(y).reshape(-1)]) for x, y in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_the_same_in_any_order_and_whatever_was_drawn_before_and_draws_nothing(kind):
    samples, before = made(**KINDS[kind]), torch.get_rng_state()
    first = all_of(samples)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    for index in reversed(range(len(samples))):
        picture = samples[index][0].reshape(-1)
        assert torch.equal(picture, first[index][: len(picture)])


@pytest.mark.parametrize("kind", KINDS)
def test_loading_processes_give_the_same_samples(kind):
    samples = made(epoch=3, **KINDS[kind])
    loader = Loader(samples, batch_size=5, num_workers=2, multiprocessing_context="fork")
    loaded = torch.cat([batch.flatten(1) for batch, _ in loader])
    assert torch.equal(loaded, all_of(samples)[:, : loaded.shape[1]])


@pytest.mark.parametrize("kind", KINDS)
def test_another_epoch_and_another_seed_give_other_samples(kind):
    first = all_of(made(**KINDS[kind]))
    assert not torch.equal(first, all_of(made(epoch=1, **KINDS[kind])))
    assert not torch.equal(first, all_of(made(seed=1, **KINDS[kind])))


def test_nothing_asked_changes_nothing():
    samples = images()
    assert made(samples) is samples


def test_crop_flip_shifts_by_up_to_an_eighth_and_flips_half_of_the_images():
    picture = torch.arange(1.0, 257).reshape(1, 16, 16)
    samples = made(TensorDataset(picture.expand(200, 1, 16, 16), torch.zeros(200)), augment="crop-flip")
    found = [samples[index][0] for index in range(200)]
    flipped = [bool(one[0, 8, 7] > one[0, 8, 8]) for one in found]
    middles = [one[0, 8, 7 if is_flipped else 8] for one, is_flipped in zip(found, flipped, strict=True)]
    shifts = {divmod(int(middle) - 1, 16) for middle in middles}
    assert shifts == {(8 + down, 8 + right) for down in range(-2, 3) for right in range(-2, 3)}
    assert 80 <= sum(flipped) <= 120


@pytest.mark.parametrize(("name", "black"), [("folder:x", -0.485 / 0.229), ("own.py:pair", 0.0)])
def test_crop_flip_shifts_in_black_where_the_normalisation_is_known(name, black):
    samples = made(TensorDataset(torch.ones(20, 3, 8, 8), torch.zeros(20)), augment="crop-flip", data=name)
    found = torch.stack([samples[index][0][0] for index in range(20)]).unique()
    assert found.tolist() == pytest.approx([black, 1.0])


def test_auto_gives_images_in_the_range_of_the_normalised_ones():
    found = torch.stack([made(augment="auto")[index][0] for index in range(12)])
    low, high = -0.485 / 0.229, (1 - 0.406) / 0.225
    assert found.dtype == torch.float32
    assert low - 1e-4 <= found.min() and found.max() <= high + 1e-4


OWN = {"resized-crop": "RandomResizedCrop", "rand": "RandAugment", "trivial": "TrivialAugmentWide"}


@pytest.mark.parametrize("name", [*OWN, "erase"])
def test_torchvision_s_own_transforms_draw_what_the_sample_says(name):
    """With its defaults; a policy gets bytes, and a crop is mirrored afterwards."""
    transforms = pytest.importorskip("torchvision.transforms")
    bytes_ = torch.randint(256, (6, 3, 12, 10), generator=torch.Generator().manual_seed(1))
    samples = made(TensorDataset(bytes_.float() / 255, torch.zeros(6)), augment=name, epoch=2, **UNIT)
    for index in range(6):
        with seeded(0, name, 2, index):
            if name == "resized-crop":
                cropped = transforms.RandomResizedCrop((12, 10), antialias=True)(bytes_[index].float() / 255)
                wanted = transforms.RandomHorizontalFlip()(cropped)
            elif name == "erase":
                wanted = transforms.RandomErasing()(bytes_[index].float() / 255)
            else:
                wanted = getattr(transforms, OWN[name])()(bytes_[index].to(torch.uint8)).float() / 255
        assert torch.allclose(samples[index][0], wanted, atol=1e-7)


def test_names_are_put_in_order_and_refused_where_two_are_of_a_kind():
    def read(text: str) -> str:
        return command_line.parse(["--augment", text]).augment.pictures

    assert [read(one) for one in ("none", "auto", "crop-flip+trivial")] == [
        "none",
        "auto",
        "crop-flip+trivial",
    ]
    assert (
        read("erase+auto") == "crop-flip+trivial+erase" and read("rand+resized-crop") == "resized-crop+rand"
    )
    for text in ("resized-crop+auto", "rand+trivial", "erase+erase", "none+erase", "cutout", "+", ""):
        with pytest.raises(UsageFault, match="--augment"):
            read(text)


def test_auto_returns_an_image_that_no_change_was_drawn_for_as_it_was():
    bytes_ = torch.randint(256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(1)).float() / 255
    whole = TensorDataset(bytes_, torch.zeros(4))
    samples, plain = (made(whole, augment=kind, **UNIT) for kind in ("auto", "crop-flip"))
    samples.changes[-1] = ("trivial", nn.Identity())
    assert all(torch.allclose(samples[i][0], plain[i][0], atol=1e-7) for i in range(4))


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixed_samples_are_the_weighted_mean_of_two(kind):
    pictures = torch.eye(CLASSES).reshape(CLASSES, 1, 10, 1).expand(CLASSES, 1, 10, 10).contiguous()
    # The image of class k is 1 in row k: so the mean of a row of pixels shows the weight of its class.
    samples = made(TensorDataset(pictures, torch.arange(CLASSES)), **{kind: 1.0})
    partners = set()
    for index in range(CLASSES):
        picture, target = samples[index]
        assert target.dtype == torch.float32 and target.sum() == pytest.approx(1)
        others = [k for k in range(CLASSES) if target[k] > 0 and k != index]
        assert len(others) <= 1
        partners.update(others)
        if kind == "mixup":
            assert torch.allclose(picture[0].mean(dim=1), target, atol=1e-6)
        else:
            assert set(picture.unique().tolist()) <= {0.0, 1.0}
    assert len(partners) > 2


def test_cutmix_weighs_labels_by_the_area_that_was_cut():
    pictures = torch.stack([torch.zeros(1, 9, 7), torch.ones(1, 9, 7)])
    samples = made(TensorDataset(pictures, torch.tensor([0, 1])), cutmix=1.0)
    areas = set()
    for epoch in range(20):
        samples.set_epoch(epoch)
        picture, target = samples[0]
        assert target[1] == pytest.approx(float(picture.mean()))
        areas.add(float(picture.mean()))
    assert len(areas) > 5


def test_the_partner_is_augmented_as_it_is_by_itself():
    samples = TensorDataset(torch.rand(CLASSES, 1, 8, 8), torch.arange(CLASSES))
    plain, mixed = made(samples, augment="crop-flip"), made(samples, augment="crop-flip", mixup=1.0)
    for index in range(CLASSES):
        picture, target = mixed[index]
        weighted = [plain[k][0] * float(target[k]) for k in range(CLASSES)]
        assert torch.allclose(picture, torch.stack(weighted).sum(dim=0), atol=1e-6)


def test_a_label_that_is_no_class_is_named():
    samples = made(TensorDataset(torch.rand(2, 1, 8, 8), torch.tensor([0, 12])), mixup=1.0)
    with pytest.raises(CheckFailed, match="training sample 1 has the label 12"):
        samples[1]


REFUSED = [
    (torch.rand(2, 5), {"augment": "crop-flip"}, "--augment crop-flip"),
    (torch.rand(2, 5), {"cutmix": 1.0}, "--cutmix"),
    (torch.zeros(2, 5, dtype=torch.int64), {"mixup": 1.0}, "--mixup"),
    (torch.rand(2, 3, 16, 16), {"augment": "auto", "data": "own.py:pair"}, "own.py:pair scales its images"),
    (torch.rand(2, 4, 8, 8), {"augment": "auto", **UNIT}, "1 or 3 channels"),
]


@pytest.mark.parametrize(("inputs", "settings", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_can_not_be_augmented_is_refused_with_its_flag(inputs, settings, words):
    with pytest.raises(UsageFault, match=words):
        made(TensorDataset(inputs, torch.zeros(2)), **settings)


def test_mixup_takes_samples_that_are_no_images():
    samples = made(TensorDataset(torch.rand(4, 5), torch.arange(4)), mixup=1.0)
    assert samples[0][0].shape == (5,)
