"""What the readers of frameworks have in common, whose ranks each wrote a file of their own.

A framework is a module with two functions:

    candidates(folder) -> Candidates                   # by name alone, cheap: the files that may be a run's
    read(path, files, take_rank) -> Checkpoint | None  # None: these are not the files of its ranks

`read` puts whole tensors in the place of the pieces (`pieces.Wholes`), with `whole_of` as its last step; the
module is then listed in `frameworks.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, Protocol

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.ranks import Ranks
from ...errors import Unreadable
from ...files.open_source import allow_open_files, open_source_descriptor
from ...tensors.ref import Source
from ..pytorch import legacy as torch_legacy
from ..pytorch import zip as torch_zip
from ..safetensors import format as safetensors
from .sharded_values import with_pieces

READERS = (torch_zip, torch_legacy, safetensors)


class Candidates(NamedTuple):
    """The paths of the files that may be a run's, and the open files that named them."""

    paths: list[str]
    telling: tuple[Source, ...] = ()


class Framework(Protocol):
    """A module that reads the files of one framework's ranks."""

    def candidates(self, folder: str) -> Candidates:
        """Return the files in a folder whose names are those of this framework's ranks.

        They may lie in folders below it. No file is opened, but one that names others.
        """

    def read(self, path: str, files: Sequence[Checkpoint], take_rank: int | None) -> Checkpoint | None:
        """Return the files of a run's ranks as one checkpoint; None if they are something else.

        Args:
            path: the folder, or what the user named, for messages.
            files: all of them, in any order.
            take_rank: the rank whose replicas are taken without comparing them; None compares.

        Raises:
            Damaged: a file is of another run, world size or step, is there twice, or does not fit the others.
            Unsupported: the files do not hold enough to make the tensors whole.
        """


def opened(paths: Sequence[str]) -> list[Checkpoint]:
    """Return files as checkpoints, each by itself, in whose trees sharded tensors are `Sharded` ones.

    Raises:
        Unreadable, Damaged, Unsupported: as a file can't be read, or a sharded tensor in it.
    """
    allow_open_files(len(paths), paths[0])
    files = []
    for path in paths:
        source = Source(path, open_source_descriptor(path))
        reader = _reader_of(source)
        if reader is None:
            raise Unreadable(
                path,
                "is not a file that torch or safetensors wrote",
                hint="copy it again, or name the files to merge",
            )
        files.append(with_pieces(reader.read(source)))
    return files


def is_known(path: str) -> bool:
    """Return whether a file begins as those do that torch or safetensors write; Unreadable if it can't be."""
    return _reader_of(Source(path, open_source_descriptor(path))) is not None


def _reader_of(source: Source) -> ModuleType | None:
    head = source.read(0, min(source.size, 512))
    return next((reader for reader in READERS if reader.sniff(head)), None)


def whole_of(
    path: str, kind: str, tree: object, files: Sequence[Checkpoint], ranks: Ranks, unread: tuple[str, ...]
) -> Checkpoint:
    """Return the files of ranks as one checkpoint.

    Args:
        path: the folder.
        kind: the name of the format, such as `dtensor-ranks`.
        tree: the contents, with whole tensors.
        files: those that were read.
        ranks: what is known of the run.
        unread: what the tree does not hold, in words.
    """
    telling = Source(path, os.dup(files[0].source.fd))
    telling.size = 0  # its bytes are those of the first file, which counts itself
    return Checkpoint(
        telling,
        kind,
        tree,
        max(file.protocol for file in files),
        shards=tuple(file.source for file in files),
        unread=unread,
        names=frozenset().union(*(file.names for file in files)),
        remarks=tuple(remark for file in files for remark in file.remarks),
        device="cpu",  # each rank's storages are tagged with its own device
        ranks=ranks,
    )
