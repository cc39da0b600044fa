"""Writing an adapter as the folder that PEFT reads: the factors and their settings, both or none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ...checkpoint.checksums import Checksums
from ...errors import UsageFault
from ...files.commit import writing_into
from ...files.copying import Output
from ...files.dry_output import DryOutput
from ...files.pieces import Progress
from ...formats import safetensors
from ...formats.output import OutputPlace
from ...formats.reading import open as open_any
from ...formats.saving.reading_back import read_back, require_same
from ...formats.shards import ADAPTERS
from .adapter import CONFIG


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """What `save_adapter` wrote.

    Attributes:
        path: the folder.
        nbytes: bytes of its files.
        keys: how many tensors are in it.
    """

    path: str = field(metadata={"json": "output"})
    nbytes: int = field(metadata={"json": "bytes"})
    keys: int


@takes_checkpoint
def save_adapter(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    verify: bool | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SavedAdapter:
    """Write an adapter's folder; it appears complete or not at all.

    Args:
        checkpoint: the adapter that `extract_lora` returned.
        config: its settings.
        path: the folder to write. It may be a URL, as for `save`.
        verify: None: compare what is read with the checksums that its file states, and read back names, types
            and shapes. True: read back the values too. False: do not compare checksums either.
        force: replace the adapter in an existing folder.
        dry_run: write nothing: the same result and the same errors.
        progress: called with the number of bytes after each piece.

    Returns:
        What was written.

    Raises:
        UsageFault: the place can't be written.
        OutputExists: the folder is there, and `force` is not given; or it holds other files.
        Damaged: what was read does not have its checksum, or what was written does not read back as intended.

    Example:
        >>> with ckpttool.open("model.safetensors") as base, ckpttool.open("tuned.safetensors") as tuned:
        ...     adapter, extracted = ckpttool.extract_lora(base, tuned, 1)
        ...     saved = ckpttool.save_adapter(adapter, extracted.config, "learnt")
        >>> ckpttool.open_adapter("learnt").config["r"]
        1
    """
    named, tensors = OutputPlace.at(path, force, (checkpoint,)), checkpoint.tree
    text = json.dumps(config, indent=2).encode() + b"\n"
    with named.local(dry_run, progress) as place:
        name = place.path
        require_place(place)
        if dry_run:
            dry = DryOutput()
            safetensors.write(checkpoint.path, tensors, checkpoint.metadata, dry)
            return SavedAdapter(named.path, dry.position + len(text), len(tensors))
        read = checkpoint.storages() if verify is not False else ()
        with place.folder(_replaced) as new:
            file = os.path.join(new.path, ADAPTERS[0])
            with Checksums(checkpoint, read) as checksums:
                with writing_into(file) as raw, Output(raw, progress=progress) as out:
                    safetensors.write(checkpoint.path, tensors, checkpoint.metadata, out)
                checksums.finish()
            with writing_into(os.path.join(new.path, CONFIG)) as raw:
                raw.write(text)
            with read_back(name, new.path), open_any(file) as written:
                again = written.state("").tensors
                require_same(name, again, tensors, values=bool(verify), progress=progress)
    return SavedAdapter(named.path, out.position + len(text), len(tensors))


def require_place(place: OutputPlace) -> None:
    """Raise OutputExists or UsageFault unless an adapter's folder may be written."""
    if place.path == "-":
        raise UsageFault("-: an adapter is a folder, and can't be streamed", hint="name a folder")
    place.require(_replaced)


def _replaced(folder: str) -> list[str]:
    return [name for name in (*ADAPTERS, CONFIG) if os.path.exists(os.path.join(folder, name))]
