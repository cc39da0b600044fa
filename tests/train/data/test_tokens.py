"""`--data tokens:`: blocks of flat files, each token a target exactly once."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from pathlib import Path

import numpy
import pytest
import torch

from ckpttool.errors import Damaged, Unreadable, UsageFault
from tests.support.running import open_files
from train.config.sections import TrainConfig
from train.data import data_set
from train.data.formats import OPEN, Tokens
from train.data.samples import IGNORED


def write(path: Path, tokens: object) -> str:
    numpy.asarray(tokens, dtype="<u2").tofile(path)
    return str(path)


@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_each_token_but_a_files_first_is_a_target_once(tmp_path, block):
    lengths = [0, 1, 2, 22, 7, 8]
    files = [list(range(100 * n, 100 * n + length)) for n, length in enumerate(lengths)]
    blocks = Tokens([write(tmp_path / f"{n}.bin", tokens) for n, tokens in enumerate(files)], block)
    inputs, targets = (
        torch.stack(part) for part in zip(*map(blocks.__getitem__, range(len(blocks))), strict=True)
    )
    assert inputs.shape == targets.shape == (len(blocks), block)
    counts = targets != IGNORED
    assert sorted(targets[counts].tolist()) == sorted(t for tokens in files for t in tokens[1:])
    assert (targets[counts] == inputs[counts] + 1).all()
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_more_files_to_test_with_are_named_by_also_test(tmp_path):
    names = [write(tmp_path / f"{n}.bin", range(10 * n + 1)) for n in (1, 2, 3)]
    config = TrainConfig.of(
        data=f"tokens:{names[0]}", task="language-model", block_size=5, test_data="fake:1"
    )
    data = data_set.load(config.changed(test_data=f"tokens:{names[1]}").data)
    named = config.changed(also_test=(f"ood=tokens:{names[2]}",))
    (name, other), *_ = data_set.with_others(named.data, data).others.items()
    assert (name, len(data.test), len(other.test)) == ("ood", 4, 6)


def test_tokens_above_32767_are_read_as_unsigned(tmp_path):
    inputs, targets = Tokens([write(tmp_path / "a.bin", [65535, 40000])], 1)[0]
    assert (inputs.item(), targets.item()) == (65535, 40000)


def test_more_files_than_may_be_open(tmp_path):
    paths = [write(tmp_path / f"{n}.bin", [n, n + 1]) for n in range(OPEN + 20)]
    blocks = pickle.loads(pickle.dumps(Tokens(paths, 1)))
    before = open_files()
    assert [blocks[n][1].item() for n in range(len(blocks))] == [n + 1 for n in range(OPEN + 20)]
    assert 0 < (open_files() - before).total() <= OPEN


def test_10_to_the_9_blocks_take_no_memory(tmp_path):
    path = tmp_path / "sparse.bin"
    path.touch()
    os.truncate(path, 2 * (4 * 10**9 + 1))
    tracemalloc.start()
    blocks = Tokens([str(path)], 4)
    assert len(blocks) == 10**9
    assert blocks[10**9 - 1][1].tolist() == [0, 0, 0, 0]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1e6


def test_a_file_that_becomes_shorter_or_goes_is_named(tmp_path):
    paths = [write(tmp_path / f"{n}.bin", range(40)) for n in range(2)]
    blocks = Tokens(paths, 4)
    os.truncate(paths[0], 20)
    assert blocks[0][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(Damaged, match=r"0.bin: has become shorter"):
        blocks[5]
    os.remove(paths[1])
    with pytest.raises(Unreadable, match=r"1.bin"):
        blocks[15]


def test_what_is_no_token_file_is_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(Damaged, match="3 bytes are no uint16 tokens"):
        Tokens([str(tmp_path / "odd.bin")], 4)
    empty = write(tmp_path / "empty.bin", [])
    for flags, wrong in (
        ({"task": "language-model"}, "needs the tokens of a sample"),
        ({"block_size": 4}, "tokens have no classes"),
        ({"block_size": 4, "task": "language-model"}, "there are no training samples"),
    ):
        with pytest.raises(UsageFault, match=wrong):
            data_set.load(TrainConfig.of(data=f"tokens:{empty}", **flags).data)
