"""Deltas written in the forms of other programs (docs/deltas.md has the table of them). Imports numpy."""

from __future__ import annotations

import json
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.special_tensors import require_plain
from ..core.files.commit import Spool, writing_into
from ..core.files.copying import DryOutput, Output
from ..core.files.threads import MOST_THREADS, Progress, cores, cut, map_pieces
from ..core.formats import safetensors, shards
from ..core.formats.destination import Saved
from ..core.formats.output import OutputPlace
from ..core.lazy import NDArray, np
from ..core.remote.urls import is_url
from ..core.system import join
from ..core.tensors.ref import DTYPES, ByteRange, TensorRef
from ..core.tensors.values import CHUNK, in_pieces, same_values
from ..errors import Refused, UsageFault
from . import differences, forms
from .encoding import DeltaPair
from .forms import OVERWRITE, DeltaForm

SIZE = 1 << 30  # bytes of a file of payloads
MOST = 1 << 32  # bytes that places of 4 bytes can name


@dataclass(frozen=True, slots=True)
class Publication:
    """A delta to be written.

    Attributes:
        form: its form.
        version: its number; its base is the version before.
        encoding, checksum: what it states.
    """

    form: DeltaForm
    version: int
    encoding: str
    checksum: str

    @classmethod
    def of(
        cls, layout: str, path: str, base: Checkpoint, encoding: str | None, checksum: str | None
    ) -> Publication:
        """Return what a path and options ask for.

        Raises UsageFault where the name has no version, an option is not of the form, or BASE is of a version
            that is not the one before; Unsupported where a package is missing.
        """
        form = forms.FORMS[layout]
        for option, given, known in (
            ("--encoding", encoding, form.encodings),
            ("--checksum", checksum, form.checksums),
        ):
            if given is not None and given not in known:
                raise UsageFault(f"{option} {given}: {layout} has {' or '.join(known)}", hint="leave it out")
        number = forms.number_in(path)
        if not number or path == "-" or is_url(path):
            what = f"{path}: the name of a delta in the form {layout} ends with its version"
            raise UsageFault(what, hint=f"such as {form.called} on this machine; the first version is 1")
        before = forms.number_in(base.path.rpartition("+")[2], path)
        if before not in (None, number - 1):
            what = f"{path}: its base would be version {number - 1}, and {base.path} is version {before}"
            raise UsageFault(what, hint=f"name it as version {before + 1}")
        differences.require(path)
        forms.hashing(path, checksum := checksum or form.checksums[0])
        return cls(form, number, encoding or form.encodings[0], checksum)


def alike(base: Checkpoint, newer: Checkpoint, where: str | None) -> dict[str, DeltaPair]:
    """Return the tensors of both states in pairs; refuse what is no change of values alone."""
    states = [checkpoint.state(where) for checkpoint in (base, newer)]
    for checkpoint, state in zip((base, newer), states, strict=True):
        require_plain(checkpoint.path, state.likes, "can't be patched")
    old, new = (state.tensors for state in states)
    for name in (*new, *old):
        forms = [(each[name].dtype.name, each[name].shape) if name in each else None for each in (old, new)]
        if forms[0] != forms[1]:
            said = [f"{form[0]} {list(form[1])}" if form else "missing" for form in forms]
            what = f"'{name[:80]}' is {said[1]}, and {said[0]} in {base.path}: a patch changes values alone"
            raise Refused(newer.path, what, hint="leave out --as: our own form holds it")
        if (kind := new[name].dtype).safetensors is None or kind.itemsize not in differences.UNSIGNED:
            raise Refused(newer.path, f"'{name[:80]}' is {kind.name}, a type that such patches lack")
    return {name: DeltaPair(name, new[name], old[name], name) for name in new}


def each_once(base: Checkpoint, newer: Checkpoint, pairs: Mapping[str, DeltaPair]) -> dict[str, DeltaPair]:
    """Return pairs without the other names of tensors, which no file of safetensors has.

    Raises Refused where such a name is no longer one: there is no place for its values.
    """
    olds = {name: pair.base for name, pair in pairs.items() if pair.base is not None}
    ties = safetensors.ties(olds, base.metadata)
    for name, kept in ties.items():
        if pairs[name].new.view != pairs[kept].new.view and not same_values(pairs[name].new, pairs[kept].new):
            what = f"'{name[:80]}' is no longer another name of '{kept[:80]}', as in {base.path}"
            raise Refused(newer.path, what, hint="leave out --as: our own form holds it")
    return {name: pair for name, pair in pairs.items() if name not in ties}


class _Packer:
    """Packs what changed in a tensor as one frame of zstd, several tensors at once."""

    def __init__(self, job: Publication, path: str) -> None:
        self.job, self.path, self._of_thread = job, path, threading.local()

    def packed(self, item: DeltaPair) -> tuple[TensorRef, str] | None:
        """Return the frame and the checksum of the new bytes; None where nothing changed."""
        if not hasattr(self._of_thread, "spools"):
            self._of_thread.spools = [Spool(self.path) for _ in range(3)]
        out, places, values = self._of_thread.spools
        begin, value = out.source.size, forms.hashing(self.path, self.job.checksum)
        write = self._overwrite if self.job.encoding == OVERWRITE else self._xor
        if not write(item, value.update, out, places, values):
            out.source.size = begin
            return None
        frame = ByteRange(out.source, begin, out.source.size - begin)
        return TensorRef.of_bytes(frame, DTYPES["uint8"], (frame.nbytes,)), value.hexdigest()

    def _xor(self, item: DeltaPair, update: Callable[[Any], object], out: Spool, *_: Spool) -> bool:
        frame, changed = differences.packing(item.nbytes), False
        for one, difference in _differences(item):
            update(one)
            changed = changed or bool(difference.any())
            out.append(frame.compress(difference.tobytes()))
        out.append(frame.flush())
        return changed

    def _overwrite(
        self, item: DeltaPair, update: Callable[[Any], object], out: Spool, places: Spool, values: Spool
    ) -> bool:
        if item.nbytes > MOST:
            what = f"'{item.name[:80]}' has more bytes than places of 4 bytes can name"
            raise Refused(self.path, what, hint="leave out --encoding overwrite")
        at = 0
        for one, difference in _differences(item):
            update(one)
            where = np.flatnonzero(difference)
            places.append((where + at).astype("<u4").tobytes())
            values.append(np.frombuffer(one, np.uint8)[where].tobytes())
            at += len(one)
        count = values.source.size
        frame = differences.packing(4 + 5 * count)
        out.append(frame.compress(struct.pack("<I", count)))
        for spool in (places, values):
            for start, size in cut(spool.source.size, CHUNK):
                out.append(frame.compress(spool.source.read(start, size)))
            spool.source.size = 0
        out.append(frame.flush())
        return bool(count)


def _differences(item: DeltaPair) -> Iterator[tuple[bytes | bytearray, NDArray[np.uint8]]]:
    assert item.base is not None
    pieces = (in_pieces(each, CHUNK) for each in (item.new, item.base))
    for one, other in zip(*pieces, strict=True):
        yield one, np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)


class PublishedContents(NamedTuple):
    """What is in a folder: the tensors of its files, the text in their headers, and what tells of them."""

    files: shards.Cut
    texts: Mapping[str, Mapping[str, str]]
    about: Mapping[str, Any]

    @property
    def keys(self) -> int:
        """How many tensors changed."""
        return sum(map(len, self.files.values()))


def of_frames(
    job: Publication, path: str, pairs: Mapping[str, DeltaPair], progress: Progress
) -> PublishedContents:
    """Return what is in the folder, whose payloads lie in temporary files."""
    frames, sums = dict[str, TensorRef](), dict[str, str]()
    for item, found in map_pieces(_Packer(job, path).packed, pairs.values(), cores(MOST_THREADS)):
        progress(item.nbytes)
        if found is not None:
            frames[item.name], sums[item.name] = found
    groups = [each for each in shards.cut_by_size(shards.SAFETENSORS, frames, SIZE).values() if each]
    files = {job.form.files.format(number, len(groups)): each for number, each in enumerate(groups)}
    if job.form.name == "skyrl":
        return PublishedContents(files, {}, _manifest(job, files, pairs, sums))
    texts = {file: {name: sums[name] for name in each} for file, each in files.items()}
    facts = {"version": f"{job.version:06d}", "base_version": f"{job.version - 1:06d}"}
    facts |= {"delta_encoding": job.encoding, "compression_format": "zstd", "checksum_format": job.checksum}
    weight_map = {name: file for file, each in files.items() for name in each}
    return PublishedContents(files, texts, {"metadata": facts, "weight_map": weight_map})


def _manifest(
    job: Publication, files: shards.Cut, pairs: Mapping[str, DeltaPair], sums: Mapping[str, str]
) -> dict[str, Any]:
    listed: list[dict[str, Any]] = []
    for file, each in files.items():
        for name, payload in each.items():
            new = pairs[name].new
            entry = {"name": name, "dtype": new.dtype.name, "shape": new.shape, "checksum": sums[name]}
            entry |= {"checksum_algorithm": job.checksum, "payload_file": file, "payload_key": name}
            sizes = {"uncompressed_num_bytes": new.nbytes, "compressed_num_bytes": payload.nbytes}
            listed.append(entry | sizes)
    keys = ("uncompressed_num_bytes", "compressed_num_bytes")
    totals = {f"total_{key}": sum(each[key] for each in listed) for key in keys}
    said = {"version": job.version, "base_version": job.version - 1, "tensors": listed}
    return {**said, "payload_files": [*files], **totals}


def written(job: Publication, place: OutputPlace, contents: PublishedContents, *, dry_run: bool) -> Saved:
    """Write a folder in one of the forms; it takes its place at once, whole."""
    text = json.dumps(contents.about, ensure_ascii=False).encode()

    def write_file(name: str, tensors: Mapping[str, TensorRef], out: Output) -> None:
        safetensors.write(join(place.path, name), tensors, contents.texts.get(name, {}), out)

    nbytes = len(text)
    for name, tensors in contents.files.items():
        write_file(name, tensors, dry := DryOutput())
        nbytes += dry.position
    if not dry_run:
        with place.folder(partial(files_of, job.form)) as new:
            shards.write_files(new.path, contents.files, write_file, Output)
            with writing_into(join(new.path, job.form.index)) as file:
                file.write(text)
    return Saved(place.path, job.form.name, nbytes, contents.keys, shards=len(contents.files))


def files_of(form: DeltaForm, folder: str) -> list[str]:
    """Return the names in a folder that a delta of a form has there."""
    like = re.compile(re.sub(r"\\{.*?\\}", r"\\d+", re.escape(form.files)))
    return [name for name in os.listdir(folder) if name == form.index or like.fullmatch(name)]
