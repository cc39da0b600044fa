"""Documents of tokens, packed into blocks of one length for a language model.

Documents follow each other without padding; only the block that ends the stream is filled up. A target is the
next token of the same document, so the first token of a document is the target of none, and each other token
is the target of exactly one: the mean over tokens does not depend on the length of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from ckpttool.errors import UsageFault
from train.data.lane import Shard
from train.data.samples import IGNORED

LAST = torch.tensor([IGNORED])  # the target of a document's last token
END = object()  # of the documents; any value may be one
NAMES = ("input_ids", "tokens", "ids")  # of the tokens in a document that is a mapping


class Packed:
    """The blocks of documents: (inputs, targets), both int64 [block].

    Args:
        documents: an iterable of sequences of token numbers, or of mappings that hold one as `input_ids`,
            `tokens` or `ids`. It may know its position (`state_dict`, `load_state_dict`).
        block: tokens of a block.
    """

    def __init__(self, documents: Any, block: int) -> None:
        self.documents, self.block, self.epoch = Shard(documents), block, 0
        for name in ("classes", "name"):
            if hasattr(documents, name):
                setattr(self, name, getattr(documents, name))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.documents.source, "set_epoch"):
            self.documents.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return Blocks(self.documents, self.block, self.epoch)


class Blocks:
    """One pass over the blocks. It knows its position if the documents do."""

    def __init__(self, documents: Shard, block: int, epoch: int) -> None:
        self.shard, self.block, self.epoch = documents, block, epoch
        self.documents: Any = documents.open(epoch, None)
        self.inputs = self.targets = torch.empty(0, dtype=torch.int64)
        self.at = 0  # the first of them that is not in a block yet

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.inputs) - self.at < self.block:
            self._fill()
        if self.at == len(self.inputs):
            raise StopIteration
        end = min(self.at + self.block, len(self.inputs))
        missing = 0, self.at + self.block - end
        inputs, targets = self.inputs[self.at : end], self.targets[self.at : end]
        self.at = end
        # Padding copies: a block that is kept does not keep its document.
        return pad(inputs, missing), pad(targets, missing, value=IGNORED)

    def _fill(self) -> None:
        """Read documents until there are tokens for a block."""
        inputs, targets = [self.inputs[self.at :]], [self.targets[self.at :]]
        count = len(inputs[0])
        while count < self.block and (document := next(self.documents, END)) is not END:
            numbers = _tokens(document)
            inputs.append(numbers)
            targets += [numbers[1:], LAST] if len(numbers) else []
            count += len(numbers)
        self.inputs, self.targets, self.at = torch.cat(inputs), torch.cat(targets), 0

    def __getattr__(self, name: str) -> Any:
        # Where the documents have no position, these have none either.
        if name in ("state_dict", "load_state_dict") and self.shard.has_position(self.documents):
            return {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict}[name]
        raise AttributeError(name)

    def _state_dict(self) -> dict[str, Any] | None:
        documents = self.shard.state(self.documents)
        if documents is None:
            return None
        rest = {"inputs": self.inputs[self.at :].clone(), "targets": self.targets[self.at :].clone()}
        return {"documents": documents, **rest}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inputs, self.targets = (torch.as_tensor(state[name]).long() for name in ("inputs", "targets"))
        self.at = 0
        self.documents = self.shard.open(self.epoch, state["documents"])


def _require_all_count(document: Mapping[str, Any], tokens: Any) -> None:
    """Raise UsageFault for labels or a mask that say otherwise: all tokens of a document are targets."""
    numbers = torch.as_tensor(tokens)
    for name, plain in (("labels", numbers), ("attention_mask", torch.ones_like(numbers))):
        if name in document and not torch.equal(torch.as_tensor(document[name]).to(plain.dtype), plain):
            what = f"--block-size: a document's {name} leave some of its tokens out, and packing takes all"
            hint = "leave padding out of the documents; samples with labels of their own: (inputs, targets)"
            raise UsageFault(what, hint=hint)


def _tokens(document: Any) -> torch.Tensor:
    if isinstance(document, Mapping):
        found = next((document[name] for name in NAMES if name in document), None)
        if found is None:
            names = ", ".join(map(repr, document))
            hint = f"one of {', '.join(NAMES)}"
            raise UsageFault(f"--block-size: a document has no tokens among {names}", hint=hint)
        _require_all_count(document, found)
        document = found
    numbers = torch.as_tensor(document)
    if numbers.dim() == 1 and not len(numbers):  # of a dtype of its own
        return numbers.long()
    if numbers.dim() != 1 or numbers.is_floating_point() or numbers.is_complex():
        what = f"--block-size: a document is {type(document).__name__}, not a row of token numbers"
        raise UsageFault(what, hint="encode texts in the data set: its samples are packed as they come")
    return numbers.long()
