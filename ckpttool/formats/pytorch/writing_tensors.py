"""Tensors written into a pickle as `torch.save` does, by a template for each form, not opcode by opcode.

Tensors of one form differ in the key of their storage and in places of the memo alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import attrgetter

from ...tensors.ref import Storage, TensorRef
from .templates import MOST_FORMS, TENSOR, OpcodeTemplate

UINT4 = struct.Struct("<I").pack

# What tensors of one form share: also where they are tagged to lie, which decides what is written of that.
LIKE = attrgetter(
    *("storage.kind", "storage.location", "storage.data.nbytes", "dtype.name"),
    *("offset", "shape", "stride", "conj", "neg", "requires_grad"),
)


class WrittenTensors:
    """What `fast_path` is for the reader: what was written of one tensor is the template of others."""

    def __init__(self, key_of: Callable[[Storage], str]) -> None:
        self.key_of = key_of
        self.templates: dict[tuple[object, ...], OpcodeTemplate] = {}

    def written(self, tensor: TensorRef, index: int) -> tuple[bytes, int] | None:
        """Return a tensor's opcodes, and how many values they put into the memo; None for a new form."""
        template = self.templates.get(LIKE(tensor))
        if template is None:
            return None
        return template.written(self.key_of(tensor.storage).encode(), index), template.count

    def in_a_row(
        self, items: Sequence[tuple[object, object]], begin: int, memo: dict[object, int], index: int
    ) -> tuple[list[bytes], int]:
        """Return the opcodes of names and tensors from `begin` on, to the first that does not fit."""
        opcodes, known, key_of = list[bytes](), self.templates, self.key_of
        for name, tensor in map(items.__getitem__, range(begin, len(items))):
            if type(name) is not str or type(tensor) is not TensorRef or id(tensor) in memo:
                break
            if (template := known.get(LIKE(tensor))) is None:
                break
            if (place := memo.get(name)) is None:
                memo[name] = index
                raw = name.encode("utf-8", "surrogatepass")
                named = b"X%b%br%b" % (UINT4(len(raw)), raw, UINT4(index))
                index += 1
            else:  # one of an optimizer's
                named = b"h%c" % place if place < 256 else b"j%b" % UINT4(place)
            # OpcodeTemplate.written, inlined: a call for each of 100,000.
            key, (base, step, size, count) = key_of(tensor.storage).encode(), template.numbers
            tail = (base + index * step).to_bytes(size, "little")
            opcodes.append(b"%b%b%c\0\0\0%b%b" % (named, template.head, len(key), key, tail))
            index += count
            memo[id(tensor)] = index - 1  # the last value is the tensor itself
        return opcodes, index

    def learn(self, tensor: TensorRef, opcodes: bytes, index: int) -> None:
        """Take what was written of a tensor for others of its form, unless it holds more than a template."""
        match = TENSOR.fullmatch(opcodes)
        if match and len(self.templates) < MOST_FORMS:
            template = OpcodeTemplate(match)
            if template.written(match["key"], index) == opcodes:
                self.templates[LIKE(tensor)] = template
