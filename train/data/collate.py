"""How samples become a batch: by torch's default_collate, or by a user's `collate(samples)`. Imports torch.

A data set's own comes first, then its task's. It may return any nesting of tensors, of any shapes: padded
texts, lists of boxes. A sample is then whatever it takes. What it draws at random is keyed by (seed, epoch,
samples of the batch), so it is the same after a resume and in any loading process. Another number of ranks
has other batches, and other draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, timedelta
from numbers import Number
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch.utils.data import default_collate

from ckpttool.distributed import collectives
from ckpttool.distributed.randomness import seeded
from ckpttool.errors import CkptToolError, UsageFault
from ckpttool.models import factory

Collate = Callable[[list[Any]], Any]

# What is compared as it is: its `repr` says all of it.
PLAIN = (torch.Tensor, str, bytes, Number, date, timedelta, PurePath)

CONTAINERS = (tuple, list, Mapping, set, frozenset)

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


def digest_of(value: Any) -> str:
    """Return a digest of a sample, or of another value: of its `leaves`, and of where they are in it."""
    parts = (f"{place} ".encode() + collectives.digest(leaf) for place, leaf in leaves(value))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a sample or a batch is made of, each with its place: `[1][0]['boxes']`.

    These are tensors, arrays and plain values. What gives itself as an array, as pictures of Pillow do, is
    one; of any other object that is no container, the parts are what pickle would keep of it.
    """
    return _leaves(value, "", {})


def _leaves(value: Any, place: str, known: dict[int, tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    inner = _parts(value)
    if inner is None:
        yield place, _leaf(value)
    elif id(value) in known:  # it holds itself, or others do: a data set that each sample refers to
        yield place, f"as {known[id(value)][0]}"
    else:
        known[id(value)] = place, value  # which keeps it, so no other gets its id
        parts = [leaf for where, part in inner for leaf in _leaves(part, f"{place}{where}", known)]
        yield from parts or [(place, type(value).__qualname__)]
        if isinstance(value, CONTAINERS):  # the same one twice, and two that are equal, are told alike
            del known[id(value)]


def _parts(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return the parts of a value, each with its place in it; None if it is a leaf."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return _numbered(value.unbind())
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        whole = value.to_sparse_coo().coalesce()
        return ((".indices", whole.indices()), (".values", whole.values()))
    if isinstance(value, numpy.ma.MaskedArray):
        return ((".data", value.data), (".mask", value.mask))
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", part) for key, part in value.items())
    if isinstance(value, tuple | list):
        return _numbered(value)
    if isinstance(value, set | frozenset):
        return _numbered(sorted(value, key=repr))
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{field.name}", getattr(value, field.name)) for field in fields(value))
    if value is None or isinstance(value, PLAIN) or callable(value):
        return None
    if hasattr(value, "__array_interface__"):
        return _of_picture(value) if callable(getattr(value, "getpalette", None)) else None
    if attributes := getattr(value, "__dict__", None):
        return ((f".{name}", part) for name, part in attributes.items())
    return _pickled(value)


def _numbered(parts: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"[{number}]", part) for number, part in enumerate(parts))


def _of_picture(picture: Any) -> Iterable[tuple[str, Any]]:
    """Return the parts of a picture of Pillow: with a palette, its numbers alone are no colours."""
    colours = picture.mode, picture.getpalette(None), picture.info.get("transparency")
    return ((".pixels", numpy.asarray(picture)), (".colours", colours))


def _pickled(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return what pickle would keep of an object without a dict, such as a deque; None if it refuses."""
    try:
        made = value.__reduce_ex__(4)
    except Exception:  # each class refuses in its own way
        return None
    if isinstance(made, str):  # it is known by its name
        return None
    # Its class comes first if it is made by that.
    arguments = tuple(part for part in made[1] if part is not type(value))
    parts = [arguments or None, *made[2:3], *(each and [*each] for each in made[3:5])]
    return None if all(part is None for part in parts) else _numbered(parts)


def _leaf(value: Any) -> Any:
    if value is None or isinstance(value, PLAIN):
        return value
    if hasattr(value, "__array_interface__"):
        return numpy.asarray(value)
    return type(value).__qualname__  # its `repr` may hold its address, which is another on each rank
