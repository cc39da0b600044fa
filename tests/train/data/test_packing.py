"""Documents packed into blocks: each token is a target once, within its document, whatever the blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from ckpttool.errors import UsageFault
from train.data.samples import IGNORED
from train.data.stream import Packed, Shard

DOCUMENTS = [[1, 2, 3], [], [10], [20, 21], [30, 31, 32, 33, 34, 35, 36, 37, 38], [40, 41]]
PAIRS = sorted((a, b) for document in DOCUMENTS for a, b in itertools.pairwise(document))


class Known:
    """Documents whose position is the data set's."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        begin, self.at = self.at, 0
        for number in range(begin, len(DOCUMENTS)):
            self.at = number + 1
            yield DOCUMENTS[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("block", [1, 2, 5, 50])
@pytest.mark.parametrize("kind", [list, numpy.array, torch.tensor, lambda tokens: {"input_ids": tokens}])
def test_each_token_is_the_target_of_the_one_before_it_in_its_document(block, kind):
    documents = [kind(document) for document in DOCUMENTS if document]
    blocks = list(Packed(documents, block))
    inputs, targets = (torch.cat(part) for part in zip(*blocks, strict=True))
    assert {len(part) for pair in blocks for part in pair} == {block}
    counts = targets != IGNORED
    assert sorted(zip(inputs[counts].tolist(), targets[counts].tolist(), strict=True)) == PAIRS
    assert sum(map(len, DOCUMENTS)) <= len(inputs) < sum(map(len, DOCUMENTS)) + block


@pytest.mark.parametrize("done", range(6))
def test_a_position_is_restored_with_what_is_left_of_a_document(done):
    whole = [pair[0].tolist() for pair in Packed(Known(), 3)]
    shard = Shard(Packed(Known(), 3))
    iterator = shard.open(0, None)
    for _ in range(done):
        next(iterator)
    state = shard.state(iterator)
    rest = Shard(Packed(Known(), 3)).open(0, state)
    assert [pair[0].tolist() for pair in rest] == whole[done:]


def test_documents_that_go_on_where_they_were_left_begin_anew():
    packed = Packed(Known(), 3)
    whole = [pair[0].tolist() for pair in packed]
    shard = Shard(Packed(Known(), 3))
    for _ in range(2):
        next(shard.open(0, None))
    assert [pair[0].tolist() for pair in shard.open(0, None)] == whole


@pytest.mark.long
def test_a_long_document_is_packed_in_a_time_that_grows_with_its_length():
    """Not with its square: to move four million numbers 20,000 times would take minutes."""
    packed = Packed([list(range(4_000_000))], 4)
    assert sum(1 for _ in itertools.islice(packed, 20_000)) == 20_000


def test_documents_without_a_position_have_none_when_packed():
    packed = Packed(DOCUMENTS, 3)
    assert Shard(packed).state(iter(packed)) is None


@pytest.mark.parametrize("document", [{"text": "a"}, [0.5], [[1]]], ids=["no tokens", "numbers", "rows"])
def test_what_is_no_document_is_refused(document):
    with pytest.raises(UsageFault, match="--block-size"):
        list(Packed([document], 3))


@pytest.mark.parametrize("more", [{"labels": [-100, 2, 3]}, {"attention_mask": [1, 1, 0]}])
def test_a_document_of_which_not_all_tokens_count_is_refused_and_not_packed_as_if_they_did(more):
    with pytest.raises(UsageFault, match=next(iter(more))):
        next(iter(Packed([{"input_ids": [1, 2, 3], **more}], 3)))
    plain = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 1]}
    assert next(iter(Packed([plain], 3)))[1].tolist() == [2, 3, IGNORED]
