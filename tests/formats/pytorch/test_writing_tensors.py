"""How much work it is to write values of which only some are tensors of forms written before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ckpttool.formats.pytorch import tensor_pickle, writing_tensors
from ckpttool.tensors.dtypes import DTYPES
from ckpttool.tensors.ref import Storage, TensorRef
from ckpttool.tensors.source import ByteRange


class Reads(list[Any]):
    """A list that counts how many of its items are read."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(items)
        self.count = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.count += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.count += 1
            yield item


def items_tried(tree: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how often the shortcut for tensors is taken while a tree is written, and the items it reads."""
    taken = list[Reads]()

    def counted(self: Any, items: Sequence[Any], *args: Any) -> Any:
        taken.append(Reads(items))
        return in_a_row(self, taken[-1], *args)

    in_a_row = writing_tensors.WrittenTensors.in_a_row
    monkeypatch.setattr(writing_tensors.WrittenTensors, "in_a_row", counted)
    tensor_pickle.write_torch_pickle(tree, 2, None)
    return len(taken), sum(reads.count for reads in taken)


def tensors_of(shapes: Sequence[tuple[int]]) -> list[TensorRef]:
    data = ByteRange(None, 0, 4096)  # type: ignore[arg-type]
    kind, dtype = "FloatStorage", DTYPES["float32"]
    return [TensorRef(Storage(data, kind), dtype, shape, (1,), 0, False) for shape in shapes]


def test_plain_values_are_written_without_a_look_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert items_tried({f"k{i}": i for i in range(3000)}, monkeypatch) == (0, 0)


@pytest.mark.parametrize("mixed", ["numbers between", "forms change"])
def test_items_read_of_mixed_tensors_grow_linearly(mixed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of([(1 + i * (mixed == "forms change") // 2,) for i in range(2000)])
    tree: dict[str, object] = {f"w{i}": tensor for i, tensor in enumerate(tensors)}
    if mixed == "numbers between":
        tree = {f"{name}{part}": v for name, t in tree.items() for part, v in enumerate((t, 1))}
    times, reads = items_tried(tree, monkeypatch)
    assert times > 900
    assert reads <= 2 * len(tree)
