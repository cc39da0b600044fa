"""The head of a run's report says what its data are."""

from __future__ import annotations

import pytest

from train.config.sections import TrainConfig
from train.data import data_set
from train.run.report import describe

OWN = """
import torch
from torch.utils.data import TensorDataset

def images(size):
    return TensorDataset(torch.zeros(size, 1, 8, 8), torch.arange(size) % 2)

def alone():
    return images(12)

def both():
    return images(1200), images(4)

class Stream:
    classes = ["a", "b"]

    def __init__(self, *samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples * 9)

class Sized(Stream):
    def __len__(self):
        return 1200

class Positioned(Stream):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

IMAGE = torch.zeros(1, 8, 8), 1

def stream():
    return Stream(IMAGE, IMAGE)

def tested():
    return Sized(IMAGE, IMAGE), images(4)

def positioned():
    return Positioned(IMAGE, IMAGE)

def documents(kind=Stream):
    made = kind([1, 2, 3, 4, 5], [1, 2])
    made.classes = []
    return made

def held():
    return documents(Positioned), documents()

class Texts(Stream):
    def collate(self, samples):
        texts = [torch.tensor(text) for text, _ in samples]
        return torch.nn.utils.rnn.pad_sequence(texts).T, torch.tensor([label for _, label in samples])

def texts():
    return Texts(([1, 2], 0), ([1], 1))
"""

LANGUAGE = {"task": "language-model", "block_size": 4}


@pytest.mark.parametrize(
    ("factory", "settings", "said"),
    [
        ("both", {}, "1,200 training and 4 test samples of 1×8×8, 2 classes"),
        ("alone", {}, "12 training samples of 1×8×8, no test samples, 2 classes"),
        ("alone", {"test": "both"}, "12 training and 4 test samples of 1×8×8, 2 classes"),
        (
            "stream",
            {},
            "a stream of samples of 1×8×8 that does not know its position, no test samples, 2 classes",
        ),
        (
            "tested",
            {},
            "a stream of 1,200 samples of 1×8×8 that does not know its position, 4 test samples, 2 classes",
        ),
        ("positioned", {}, "a stream of samples of 1×8×8, no test samples, 2 classes"),
        ("texts", {}, "a stream of samples that does not know its position, no test samples, 2 classes"),
        (
            "documents",
            LANGUAGE,
            "a stream of packed blocks of 4 tokens that does not know its position, no test samples",
        ),
        ("held", LANGUAGE, "a stream of packed blocks of 4 tokens, 16 test samples"),
    ],
)
def test_data_are_described_as_they_are(tmp_path, factory, settings, said):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    settings = dict(settings)
    test_data = f"{own}:{settings.pop('test')}" if "test" in settings else None
    data = data_set.load(TrainConfig.of(data=f"{own}:{factory}", test_data=test_data, **settings).data)
    assert describe(data) == said
