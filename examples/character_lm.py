"""A language model of characters: a small transformer that learns seven sonnets, then writes on.

    python train/main.py --task language-model --data examples/character_lm.py:data \
        --model examples/character_lm.py:model --optimizer adamw --lr 0.003 --batch-size 16 \
        --epochs 60 --out runs/sonnets
    python examples/character_lm.py runs/sonnets/last.pt "When "

On any number of ranks (`torchrun --nproc-per-node 2 train/main.py ...`) the loss is the mean over all
characters of a step. A line at a time is a sample, and lines differ in length: they are padded, and what is
padding is no part of the loss, so the ranks count different numbers of characters in every step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

# Sonnets 18, 29, 30, 55, 73, 116 and 130 of William Shakespeare (1609), in the public domain.
LINES = [line for line in Path(__file__).with_name("sonnets.txt").read_text().splitlines() if line]
CHARACTERS = "\n" + "".join(sorted(set("".join(LINES))))
LENGTH = max(map(len, LINES)) + 1
IGNORED = -100  # a target that is no part of the loss


def encoded(text: str) -> torch.Tensor:
    return torch.tensor([CHARACTERS.index(character) for character in text])


def sample(line: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a line as (characters, what comes after each of them), both int64 [LENGTH]."""
    characters = encoded(f"\n{line}\n")
    rest = LENGTH - (len(line) + 1)
    return F.pad(characters[:-1], (0, rest)), F.pad(characters[1:], (0, rest), value=IGNORED)


def lines(chosen: list[str]) -> TensorDataset:
    made = TensorDataset(*(torch.stack(column) for column in zip(*map(sample, chosen), strict=True)))
    made.classes = list(CHARACTERS)  # how many characters there are; the model gets it as num_classes
    return made


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return all lines but every tenth, and every tenth."""
    return lines([line for number, line in enumerate(LINES) if number % 10]), lines(LINES[::10])


class Block(nn.Module):
    """Attention to the characters before, then a layer for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # each [n, heads, length, width of a head]
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """Scores [n, length, characters] for the character after each of int64 [n, length]."""

    def __init__(self, characters: int, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.scores(self.blocks(self.character(text) + self.place(places)))


def model(num_classes: int = len(CHARACTERS)) -> nn.Module:
    return Transformer(num_classes)


@torch.no_grad()
def write(trained: nn.Module, beginning: str) -> str:
    """Return a line with this beginning, each next character drawn by the probability the model gives it."""
    text = f"\n{beginning}"
    while len(text) < LENGTH and not text[1:].endswith("\n"):
        scores = trained(encoded(text).unsqueeze(0))[0, -1]
        text += CHARACTERS[int(torch.multinomial(torch.softmax(scores / 0.6, dim=0), 1))]
    return text.strip("\n")


if __name__ == "__main__":
    from ckpttool import reload

    trained = model().eval()
    reload(sys.argv[1], trained)  # without the prefix that DDP adds to each name
    torch.manual_seed(0)
    for _ in range(4):
        print(write(trained, sys.argv[2] if len(sys.argv) > 2 else ""))
