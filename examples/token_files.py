"""Token files of a text, and the model of character_lm.py trained on them: nanoGPT's way, with this trainer.

    python examples/token_files.py examples/sonnets.txt runs/tokens
    python train/main.py --data tokens:runs/tokens/train.bin --test-data tokens:runs/tokens/test.bin \
        --block-size 40 --task language-model --model examples/token_files.py:model \
        --optimizer adamw --lr 0.003 --batch-size 8 --epochs 8 --out runs/tokens/run

A token is a byte of the text. The last tenth of it is for testing. A block is 40 tokens and the one after
each, so that every token of an epoch but the first is a target exactly once. After some seconds on two cores
the perplexity of the text that it has not seen is 13: it guesses as if among so many bytes, at first 256.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
from torch import nn


def write(text: Path, folder: Path) -> None:
    """Write train.bin and test.bin: the bytes of a text as uint16, little-endian."""
    tokens = numpy.frombuffer(text.read_bytes(), dtype=numpy.uint8).astype("<u2")
    folder.mkdir(parents=True, exist_ok=True)
    division = len(tokens) * 9 // 10
    tokens[:division].tofile(folder / "train.bin")
    tokens[division:].tofile(folder / "test.bin")


def model() -> nn.Module:
    from character_lm import Transformer  # this folder is on the path, as that of any --model

    return Transformer(256)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
