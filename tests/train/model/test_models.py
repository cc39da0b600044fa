"""The models that `--model` knows by name."""

from __future__ import annotations

import pytest
import torch

from ckpttool.errors import UsageFault
from train.model import builtin as models

OWN = """
from torch import nn

sized = lambda num_classes: nn.Linear(4, num_classes)
fixed = lambda: nn.Linear(4, 3)
other = lambda: 5

class Freezes(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self

half = lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout().eval())
whole = lambda: half().eval()
method = lambda: Freezes(nn.Linear(3, 2), nn.Dropout())
"""


def test_resnet20_has_the_names_and_shapes_of_the_published_weights(resnet20):
    published = torch.load(resnet20, map_location="cpu", weights_only=True)["state_dict"]
    state = {name.removeprefix("module."): value for name, value in published.items()}
    model = models.resnet20()
    model.load_state_dict(state, strict=True)
    # The file is older than BatchNorm's counters, which torch then starts at zero.
    names = [name for name in model.state_dict() if not name.endswith("num_batches_tracked")]
    assert names == list(state)


def test_resnet20_has_the_size_of_the_paper():
    parameters = sum(parameter.numel() for parameter in models.resnet20().parameters())
    assert parameters == 269_722
    assert models.resnet20(num_classes=7, channels=1)(torch.rand(2, 1, 32, 32)).shape == (2, 7)


def test_option_a_shortcuts_take_every_second_pixel_and_pad_channels_with_zeros():
    block, x = models.Block(16, 32, stride=2), torch.rand(1, 16, 6, 6)
    shortcut = block.shortcut(x)
    assert torch.equal(shortcut[:, 8:24], x[:, :, ::2, ::2])
    assert shortcut[:, :8].count_nonzero() == shortcut[:, 24:].count_nonzero() == 0
    assert models.Block(16, 16, stride=1).shortcut(x) is x


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 1, 1), (2, 5, 40), (3, 96, 64)])
def test_simple_cnn_adapts_to_the_images_and_classes(shape):
    model = models.build("simple-cnn", shape=shape, classes=7)
    assert model(torch.rand(2, *shape)).shape == (2, 7)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_simple_cnn_has_no_batchnorm_and_fits_the_digits_without_arguments():
    model = models.simple_cnn()
    assert not list(model.buffers())
    assert model(torch.rand(1, 1, 8, 8)).shape == (1, 10)


def test_torchvisions_models_and_a_users_factory_that_takes_it_get_the_number_of_classes(own):
    assert models.build("torchvision:resnet18", shape=(3, 32, 32), classes=7).fc.out_features == 7
    for factory, outputs in (("sized", 7), ("sized(num_classes=2)", 2), ("fixed", 3)):
        made = models.build(f"{own}:{factory}", shape=(4,), classes=7)
        assert made.out_features == outputs
    with pytest.raises(UsageFault, match=r"returned int, not a torch\.nn\.Module"):
        models.build(f"{own}:other", shape=(4,), classes=7)


def test_an_unknown_model_and_one_of_images_for_other_samples_are_refused():
    with pytest.raises(UsageFault, match="no such model") as fault:
        models.build("resnet99", shape=(3, 8, 8), classes=10)
    assert "simple-cnn" in fault.value.hint
    with pytest.raises(UsageFault, match="takes images"):
        models.build("simple-cnn", shape=(5,), classes=10)


# A model that is wholly in eval mode is one as from_pretrained returns it, and is to be trained.
@pytest.mark.parametrize(("factory", "dropout"), [("half", False), ("whole", True), ("method", False)])
def test_a_model_is_trained_in_the_modes_that_its_factory_gave(own, factory, dropout):
    made = models.build(f"{own}:{factory}", shape=(3,), classes=2)
    assert [module.training for module in made.modules()] == [True, True, dropout]
