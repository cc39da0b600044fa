"""Opening what many ranks wrote, each a file of its own, as one checkpoint: the frameworks that are known.

A framework is a module with two functions:

    candidates(folder) -> paths                       # by name alone, cheap: the files that may be a run's
    read(path, files, take_rank) -> Checkpoint | None  # None: these are not the files of its ranks

`read` puts whole tensors in the place of the pieces (`pieces.Wholes`), with `whole_of` as its last step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.ranks import Ranks
from ...errors import Unreadable, UsageFault
from ...files.descriptors import allow_open_files
from ...files.open_source import open_source_descriptor
from ...tensors.ref import Source
from ..pytorch import legacy as torch_legacy
from ..pytorch import zip as torch_zip
from ..safetensors import format as safetensors

READERS = (torch_zip, torch_legacy, safetensors)


class Framework(Protocol):
    """A module that reads the files of one framework's ranks."""

    def candidates(self, folder: str) -> list[str]:
        """Return the paths of the files in a folder whose names are those of this framework's ranks.

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


FRAMEWORKS: tuple[Framework, ...] = ()


def read_folder(folder: str, take_rank: int | None = None) -> Checkpoint | None:
    """Return what ranks wrote into a folder as one checkpoint; None if no framework knows the files.

    Raises:
        Unreadable, Damaged, Unsupported: as `Framework.read`, and as a file can't be read.
    """
    for framework in FRAMEWORKS:
        paths = framework.candidates(folder)
        if paths:
            found = framework.read(folder, opened(paths), take_rank)
            if found is not None:
                return found
    return None


def read_files(paths: Sequence[str], take_rank: int | None = None) -> Checkpoint:
    """Return files that ranks wrote as one checkpoint.

    Raises:
        UsageFault: they are not the files of ranks that a framework wrote.
        Unreadable, Damaged, Unsupported: as `read_folder`.
    """
    folders = {os.path.dirname(path) or "." for path in paths}
    name = folders.pop() if len(folders) == 1 else paths[0]
    files = opened(paths)
    for framework in FRAMEWORKS:
        found = framework.read(name, files, take_rank)
        if found is not None:
            return found
    raise UsageFault(
        f"{paths[0]}: holds no piece of a tensor that one rank of several wrote",
        hint="for the mean of checkpoints: ckpttool average; for shards, name their index or folder",
    )


def opened(paths: Sequence[str]) -> list[Checkpoint]:
    """Return files as checkpoints, each by itself; those in no format of tensors are left out.

    Raises:
        Unreadable, Damaged, Unsupported: as a file can't be read.
    """
    allow_open_files(len(paths), paths[0])
    files = []
    for path in paths:
        source = Source(path, open_source_descriptor(path))
        head = source.read(0, min(source.size, 512))
        reader = next((reader for reader in READERS if reader.sniff(head)), None)
        if reader is None:
            raise Unreadable(path, "is not a file that torch or safetensors wrote", hint="copy it again")
        files.append(reader.read(source))
    return files


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
        ranks=ranks,
    )
