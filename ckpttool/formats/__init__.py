"""The one place that chooses a format: by content when reading, by name when writing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Protocol

from ..checkpoint import Checkpoint, State
from ..errors import OutputExists, Unsupported, UsageFault
from ..inert import in_brief
from ..tensor import Source
from ..transfer import DryOutput, Output, Progress, open_source_descriptor, replacing
from . import safetensors, torch_legacy, torch_zip


class Format(Protocol):
    """What one file a format provides: its name, a look at the first 512 bytes, and reading."""

    NAME: str

    def sniff(self, head: bytes) -> bool: ...

    def read(self, source: Source) -> Checkpoint: ...


READERS: tuple[Format, ...] = (torch_zip, torch_legacy, safetensors)
ENDINGS = {
    **dict.fromkeys(safetensors.EXTENSIONS, safetensors.NAME),
    **dict.fromkeys(torch_zip.EXTENSIONS, torch_zip.NAME),
}

# Things that stand where a checkpoint should be, by how they begin.
STRANGERS = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself", "fetch it: git lfs pull"),
    (b"<!doctype html", "is an HTML page, not a checkpoint", "download the file again, from its raw link"),
    (b"<html", "is an HTML page, not a checkpoint", "download the file again, from its raw link"),
    (b"\x1f\x8b", "is compressed with gzip", "unpack it first: gunzip"),
    (b"GGUF", "is a GGUF model, another format", None),
    (b"\x89HDF", "is an HDF5 file, another format", None),
)


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save` wrote.

    Attributes:
        path: the output.
        format: `safetensors` or `torch-zip`.
        nbytes: its size.
        left_out: dotted names of what the format can't hold.
        copied: names that shared their memory with an earlier one and were written out again.
    """

    path: str
    format: str
    nbytes: int
    left_out: tuple[str, ...]
    copied: tuple[str, ...]


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads what a file holds, without its values, torch, or running anything the file names.

    Args:
        path: a `.pt` file of any torch since 0.4 or a `.safetensors` file, whatever its name; `-` is stdin.

    Raises:
        Unreadable, Damaged, Unsupported: with the file and the reason.
    """
    name = os.fspath(path)
    source = Source(name, open_source_descriptor(name))
    head = source.read(0, min(source.size, 512))
    if not head:
        raise Unsupported(name, "is empty", hint="it was never written, or a copy failed; get it again")
    for reader in READERS:
        if reader.sniff(head):
            return reader.read(source)
    raise _stranger(name, head)


def _stranger(name: str, head: bytes) -> Unsupported:
    for start, what, hint in STRANGERS:
        if head.lstrip()[: len(start)].lower() == start.lower():
            return Unsupported(name, what, hint=hint)
    if head[257:262] == b"ustar":
        return Unsupported(
            name, "is a tar archive, torch's format before 0.1.12", hint="save it anew with torch"
        )
    if head[:1] == b"\x80":
        return Unsupported(name, "is a pickle, but not one that torch.save wrote")
    return Unsupported(name, "is not a checkpoint in any format known here")


def format_of_output(path: str | os.PathLike[str], default: str | None = None) -> str:
    """The format that a name asks for. Raises UsageFault for a name that tells none."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix in ENDINGS:
        return ENDINGS[suffix]
    if default is not None and os.fspath(path) == "-":
        return default
    raise UsageFault(
        f"{os.fspath(path)}: its ending does not tell the format",
        hint=f"end it in {', '.join(ENDINGS)}",
    )


def save(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    state: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Saved:
    """Writes a checkpoint; the format follows the name. The file appears whole or not at all.

    safetensors gets the model's state alone, a `.pt` file everything. Bytes are moved from file to file, so
    memory stays flat. The input may be the output: its old contents are read until the new file replaces it.

    Args:
        state: dotted path of the model's state; found when None.
        force: replace an existing file.
        progress: called with the number of bytes after each piece.

    Raises:
        OutputExists, UsageFault: nothing was written.
        Refused: something that the format can't hold.
        NoState: safetensors was asked for and there is no state.
    """
    saved = _intent(checkpoint, path, state, force)
    with replacing(saved.path) as file:
        out = Output(file, progress) if progress else Output(file)
        _write(checkpoint, saved, state, out)
    return replace(saved, nbytes=out.position)


def plan(
    checkpoint: Checkpoint, path: str | os.PathLike[str], *, state: str | None = None, force: bool = False
) -> Saved:
    """What `save` would do, without writing: the same answer, exact size included, and the same errors."""
    saved = _intent(checkpoint, path, state, force)
    out = DryOutput()
    _write(checkpoint, saved, state, out)
    return replace(saved, nbytes=out.position)


def _intent(checkpoint: Checkpoint, path: str | os.PathLike[str], state: str | None, force: bool) -> Saved:
    name = os.fspath(path)
    kind = format_of_output(
        name, torch_zip.NAME if checkpoint.format.startswith("torch") else safetensors.NAME
    )
    if name != "-" and os.path.lexists(name) and not force:
        raise OutputExists(f"{name}: exists already", hint="write it anyway with --force")
    if kind == torch_zip.NAME:
        return Saved(name, kind, 0, (), ())
    found = checkpoint.state(state)
    return Saved(name, kind, 0, _left_out(checkpoint, found), _copied(found))


def _write(checkpoint: Checkpoint, saved: Saved, state: str | None, out: Output) -> None:
    if saved.format == safetensors.NAME:
        tensors = checkpoint.state(state).tensors
        safetensors.write(checkpoint.path, tensors, checkpoint.metadata, out)
    else:
        torch_zip.write(checkpoint, out, saved.path)


def _left_out(checkpoint: Checkpoint, state: State) -> tuple[str, ...]:
    """What a file of the state's tensors alone leaves behind, by the shortest names that say it."""
    names = [_join(state.where, name) for name in state.others]
    if state.versions is not None:
        names.append(_join(state.where, "_metadata"))
    value, path = checkpoint.tree, ""
    for step in state.path:
        assert isinstance(value, dict)
        names.extend(_join(path, in_brief(key)) for key in value if key != step)
        value, path = value[step], _join(path, step)
    return tuple(names)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _copied(state: State) -> tuple[str, ...]:
    """Names whose bytes stand under another name too: each name gets a copy in a format without sharing."""
    storages: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in state.tensors.items():
        storages.setdefault(id(tensor.storage), []).append((*tensor.span, name))
    copied = set()
    for spans in storages.values():
        reached = 0
        for begin, end, name in sorted(spans, key=lambda span: span[0]):
            if begin < min(end, reached):
                copied.add(name)
            reached = max(reached, end)
    return tuple(name for name in state.tensors if name in copied)
