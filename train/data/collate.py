"""How samples become a batch: by torch's default_collate, or by a user's `collate(samples)`. Imports torch.

A data set's own comes first, then its task's. It may return any nesting of tensors, of any shapes: padded
texts, lists of boxes. A sample is then whatever it takes. What it draws at random is keyed by (seed, epoch,
samples of the batch), so it is the same after a resume and in any loading process. Another number of ranks
has other batches, and other draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from ckpttool.distributed.randomness import seeded
from ckpttool.errors import CkptToolError, UsageFault
from ckpttool.models import factory

Collate = Callable[[list[Any]], Any]

NAMED = 6  # samples of a batch that an error names


@dataclass(frozen=True)
class Collation:
    """Makes batches of the samples of one part of a data set.

    Attributes:
        function: samples -> batch.
        whose: the flag that names who has given the function, `--data own.py:data`; empty for torch's own.
        part: "training" or "test".
    """

    function: Collate = default_collate
    whose: str = ""
    part: str = "training"
    seed: int = 0

    @property
    def is_own(self) -> bool:
        return bool(self.whose)

    def batch(self, samples: list[Any], indices: Sequence[int] = (), epoch: int = 0) -> Any:
        """Return samples as one batch; UsageFault names those on which a user's function fails."""
        if not self.is_own:
            return self.function(samples)
        try:
            with seeded(self.seed, "collate", epoch, *indices):
                return self.function(samples)
        except CkptToolError:
            raise
        except Exception as error:
            more = f" and {len(indices) - NAMED} more" * (len(indices) > NAMED)
            which = f"{self.part} samples {', '.join(map(str, indices[:NAMED]))}{more}"
            what = f"{self.whose}: collate fails on {which}: {factory.described(error)}"
            raise UsageFault(what, hint="collate(samples) gets a list, and returns a batch") from error


def collation_of(
    samples: Any, data: str, of_task: tuple[Collate, str] | None, part: str, seed: int
) -> Collation:
    """Return how a part of `--data` becomes batches; `of_task` is a task's own function, and its flag."""
    given = getattr(samples, "collate", None)
    function, whose = (given, f"--data {data}") if given is not None else of_task or (default_collate, "")
    if not callable(function):
        what = f"{whose}: collate is a {type(function).__name__}, not a function"
        raise UsageFault(what, hint="give it collate(samples), which returns a batch")
    return Collation(function, whose, part, seed)


def leaves(batch: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a batch is made of, tensors and plain values, each with its place: `[1][0]['boxes']`.

    The attributes of an object that is no container are its parts.
    """
    inner: Iterable[tuple[str, Any]]
    if isinstance(batch, torch.Tensor) and batch.is_nested:
        inner = ((f"[{number}]", part) for number, part in enumerate(batch.unbind()))
    elif isinstance(batch, torch.Tensor) and batch.layout != torch.strided:
        whole = batch.to_sparse_coo().coalesce()
        inner = ((".indices", whole.indices()), (".values", whole.values()))
    elif isinstance(batch, Mapping):
        inner = ((f"[{key!r}]", part) for key, part in batch.items())
    elif isinstance(batch, tuple | list):
        inner = ((f"[{number}]", part) for number, part in enumerate(batch))
    elif is_dataclass(batch) and not isinstance(batch, type):
        inner = ((f".{field.name}", getattr(batch, field.name)) for field in fields(batch))
    elif not isinstance(batch, torch.Tensor) and not callable(batch) and getattr(batch, "__dict__", None):
        inner = ((f".{name}", part) for name, part in vars(batch).items())
    else:
        yield place, batch if isinstance(batch, torch.Tensor | str | bytes | int | float) else _plain(batch)
        return
    for where, part in inner:
        yield from leaves(part, f"{place}{where}")


def _plain(value: Any) -> Any:
    # The `repr` of an object may hold its address, which is another on each rank.
    return value if value is None or hasattr(value, "dtype") else type(value).__qualname__
