"""Text classification: in which language is a number written out? Words of any length, padded in each batch.

    python train/main.py --data examples/padded_text.py:data --model examples/padded_text.py:model \
        --optimizer adamw --lr 0.01 --batch-size 32 --epochs 3 --out runs/words

A sample is (characters, language), its first part as long as the words are. The data set's `collate` pads a
batch to its longest text and tells the model where each one ends, so a text gets the same scores whatever it
is batched with. It takes ten seconds to be right for 98 of 100 numbers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

Sample = tuple[torch.Tensor, int]

LANGUAGES = ("Danish", "Dutch", "German", "Swedish")
UNITS = (
    "en to tre fire fem seks syv otte ni",
    "een twee drie vier vijf zes zeven acht negen",
    "ein zwei drei vier fünf sechs sieben acht neun",
    "ett två tre fyra fem sex sju åtta nio",
)
TENS = (
    "ti tyve tredive fyrre halvtreds tres halvfjerds firs halvfems",
    "tien twintig dertig veertig vijftig zestig zeventig tachtig negentig",
    "zehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
    "tio tjugo trettio fyrtio femtio sextio sjuttio åttio nittio",
)
HUNDRED, AND = ("hundrede", "honderd", "hundert", "hundra"), ("og", "en", "und", "")
UNITS_FIRST = (True, True, True, False)
CHARACTERS = "abcdefghijklmnopqrstuvwxyzåäöøüß"


def words(number: int, language: int) -> str:
    """Return a number from 1 to 999 in words; teens are put together like the other tens."""
    unit, ten = UNITS[language].split(), TENS[language].split()
    hundreds, rest = divmod(number, 100)
    tens, units = divmod(rest, 10)
    parts = [unit[units - 1] * bool(units), ten[tens - 1] * bool(tens)]
    parts = parts if UNITS_FIRST[language] else parts[::-1]
    joined = (AND[language] * (units > 0 and tens > 0)).join(parts)
    return (unit[hundreds - 1] * (hundreds > 1) + HUNDRED[language]) * (hundreds > 0) + joined


def encoded(text: str) -> torch.Tensor:
    """Return a text as int64 [length]; 0 is for padding."""
    return torch.tensor([1 + CHARACTERS.index(character) for character in text])


class Numbers(Dataset[Sample]):
    """Numbers in the words of each language."""

    classes = LANGUAGES

    def __init__(self, numbers: range) -> None:
        self.samples = [(words(n, label), label) for n in numbers for label in range(len(LANGUAGES))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        text, label = self.samples[index]
        return encoded(text), label

    def collate(self, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (characters [n, longest], lengths [n], labels [n]), all int64."""
        texts, labels = zip(*samples, strict=True)
        lengths = torch.tensor([len(text) for text in texts])
        return nn.utils.rnn.pad_sequence(texts, batch_first=True), lengths, torch.tensor(labels)


def data() -> tuple[Numbers, Numbers]:
    """Return the numbers up to 799, and those above."""
    return Numbers(range(1, 800)), Numbers(range(800, 1000))


class Classifier(nn.Module):
    """The mean, over the characters of a text, of what a convolution makes of each three."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.characters = nn.Embedding(1 + len(CHARACTERS), width, padding_idx=0)
        self.threes, self.scores = nn.Conv1d(width, width, 3, padding=1), nn.Linear(width, classes)

    def forward(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        seen = self.threes(self.characters(texts).transpose(1, 2)).relu()
        is_text = torch.arange(texts.shape[1], device=texts.device) < lengths.unsqueeze(1)
        return self.scores((seen * is_text.unsqueeze(1)).sum(dim=2) / lengths.unsqueeze(1))


def model(num_classes: int = len(LANGUAGES)) -> nn.Module:
    return Classifier(num_classes)
