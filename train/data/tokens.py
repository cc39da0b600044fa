"""`--data tokens:PATTERN`: flat files of tokens, uint16 little-endian, as nanoGPT and others write them.

A sample is a block: `--block-size` tokens, and for each the token after it, which is its target. Blocks don't
overlap, so in an epoch each token but the first of a file is a target exactly once. The last block of a file
may be short: it is filled up with targets that don't count. Files are read in place, not mapped: one that
becomes shorter while it is mapped kills the process.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

from ckpttool.errors import Damaged, Unreadable, UsageFault
from ckpttool.files.failures import reason
from train.config.shared import DataConfig
from train.data.patterns import files_of
from train.data.samples import IGNORED, Parts

BYTES = 2  # of a token
OPEN = 64  # files held open


class Files:
    """Reads bytes at their places in many files, of which some are held open."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return bytes of a file. Raises Unreadable, or Damaged if the file has become shorter."""
        try:
            data = os.pread(self._descriptor(path), length, start)
            while data and len(data) < length:
                more = os.pread(self._open[path], length - len(data), start + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise Unreadable(path, reason(error)) from error
        if len(data) < length:
            at = f"{length:,} bytes at {start:,} are gone"
            raise Damaged(path, f"has become shorter: {at}", hint="don't change files that a run reads")
        return data

    def _descriptor(self, path: str) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        while len(self._open) >= OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": OrderedDict()}  # for a process that is not forked

    def __del__(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class Tokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Blocks of token files: (inputs, targets), both int64 [block]."""

    def __init__(self, paths: Sequence[str], block: int) -> None:
        self.paths, self.block = paths, block
        self.tokens = [_length(path) for path in paths]
        blocks = (-(-max(tokens - 1, 0) // block) for tokens in self.tokens)
        self.ends = list(itertools.accumulate(blocks))  # of each file, in blocks
        self.files = Files()

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self.ends, index)
        first = (index - (self.ends[number - 1] if number else 0)) * self.block
        count = min(self.block + 1, self.tokens[number] - first)
        data = self.files.read(self.paths[number], first * BYTES, count * BYTES)
        tokens = torch.from_numpy(numpy.frombuffer(data, "<u2").astype(numpy.int64))
        if count == self.block + 1:
            return tokens[:-1], tokens[1:]
        missing = (0, self.block + 1 - count)
        return (
            torch.nn.functional.pad(tokens[:-1], missing),
            torch.nn.functional.pad(tokens[1:], missing, value=IGNORED),
        )


def _length(path: str) -> int:
    """Return how many tokens a file has."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    if size % BYTES:
        what = f"its {size:,} bytes are no uint16 tokens, which have {BYTES} each"
        raise Damaged(
            path, what, hint="write it as numpy.uint16, little-endian: tokens.astype('<u2').tofile(path)"
        )
    return size // BYTES


def load(config: DataConfig, pattern: str, seed: int) -> Parts:
    """Return the blocks of the files that `tokens:PATTERN` names, as training samples."""
    name = f"--data tokens:{pattern}"
    if config.block_size is None:
        raise UsageFault(f"{name}: needs the tokens of a sample", hint="for example --block-size 256")
    if config.task == "classification":
        raise UsageFault(f"{name}: tokens have no classes", hint="give --task language-model")
    paths = files_of(pattern, "--data tokens:")
    return Parts(Tokens(paths, config.block_size), None, (), f"tokens in blocks of {config.block_size}")
