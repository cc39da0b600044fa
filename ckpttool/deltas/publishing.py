"""Deltas written in the forms of other programs (docs/deltas.md has the table of them). Imports numpy."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.checkpoint.checkpoint import OF_TORCH, Checkpoint
from ..core.files.commit import Spool, writing_into
from ..core.files.copying import Output
from ..core.files.threads import MOST_THREADS, Progress, cores, cut, map_pieces
from ..core.formats import safetensors, shards
from ..core.formats.destination import Saved
from ..core.formats.output import OutputPlace
from ..core.lazy import NDArray, np
from ..core.remote.urls import is_url
from ..core.system import join
from ..core.tensors.ref import DTYPES, ByteRange, TensorRef
from ..core.tensors.values import CHUNK, in_pieces, stream
from ..errors import Refused, UsageFault
from . import differences, forms
from .differences import UNSIGNED
from .encoding import DeltaPair, Encoded
from .forms import OVERWRITE, DeltaForm
from .header import SPARSE

SIZE = 1 << 30  # bytes of a file of payloads
MOST = 1 << 32  # bytes that places of 4 bytes can name


@dataclass(frozen=True, slots=True)
class Publication:
    """A delta to be written.

    Attributes:
        form: its form.
        version, base: its number and that of its base.
        encoding, checksum: what it states.
    """

    form: DeltaForm
    version: int
    base: int
    encoding: str
    checksum: str

    @classmethod
    def of(
        cls, layout: str, path: str, base: Checkpoint, encoding: str | None, checksum: str | None
    ) -> Publication:
        """Return what a path and options ask for.

        Raises UsageFault where the name has no version, an option is not of the form, or BASE is of a version
            that is not the one before.
        """
        form = forms.FORMS[layout]
        for option, given, known in (
            ("--encoding", encoding, form.encodings),
            ("--checksum", checksum, form.checksums),
        ):
            if given is not None and given not in known:
                listed = " or ".join(known) or "none"
                raise UsageFault(f"{option} {given}: {layout} has {listed}", hint="leave it out")
        number = forms.number_in(path)
        if not number or path == "-" or is_url(path):
            what = f"{path}: the name of a delta in the form {layout} ends with its version"
            raise UsageFault(what, hint=f"name it as {form.called} is, on this machine; the first is 1")
        before = forms.number_in(base.path.rpartition("+")[2], path)
        if form.counts and before not in (None, number - 1):
            what = f"{path}: its base would be version {number - 1}, and {base.path} is version {before}"
            raise UsageFault(what, hint=f"name it as version {before + 1}")
        below = number - 1 if before is None else before
        return cls(form, number, below, encoding or form.encodings[0], checksum or (*form.checksums, "")[0])

    def require_packages(self) -> None:
        """Raise Unsupported where a package is missing."""
        if self.form.counts:
            differences.require(self.form.called)
            forms.hashing(self.form.called, self.checksum)


class _Packer:
    """Packs what changed in a tensor as one frame of zstd, several tensors at once."""

    def __init__(self, job: Publication, path: str) -> None:
        self.job, self.path = job, path
        self._spare: list[tuple[Spool, Spool, Spool]] = []  # frames, places, values, of no thread now

    def packed(self, item: DeltaPair) -> tuple[ByteRange, str] | None:
        """Return the frame and the checksum of the new bytes; None where nothing changed."""
        spools = self._spare.pop() if self._spare else (Spool(self.path), Spool(self.path), Spool(self.path))
        out, begin = spools[0].source, spools[0].source.size
        value = forms.hashing(self.path, self.job.checksum)
        write = self._overwrite if self.job.encoding == OVERWRITE else self._xor
        is_changed = write(item, value.update, *spools)
        found = ByteRange(out, begin, out.size - begin), value.hexdigest()
        if not is_changed:
            out.size = begin
        self._spare.append(spools)
        return found if is_changed else None

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


Contents = tuple[shards.Cut, Mapping[str, Mapping[str, str]], Mapping[str, Any]]  # and texts, and the index


def of_frames(
    job: Publication, path: str, pairs: Mapping[str, DeltaPair], progress: Progress
) -> tuple[Contents, int]:
    """Return what is in the files of weight-v and of SkyRL, and how many tensors changed."""
    made = dict[str, tuple[TensorRef, str]]()
    for item, found in map_pieces(_Packer(job, path).packed, pairs.values(), cores(MOST_THREADS)):
        progress(item.nbytes)
        if found is not None:
            place = found[0]
            made[item.name] = TensorRef.of_bytes(place, DTYPES["uint8"], (place.nbytes,)), found[1]
    cuts = shards.cut_by_size(shards.SAFETENSORS, {name: tensor for name, (tensor, _) in made.items()}, SIZE)
    groups = [each for each in cuts.values() if each]
    cut_ = {job.form.files.format(i, len(groups)): each for i, each in enumerate(groups)}
    if job.form.name == "weight-v":
        texts = {file: {name: made[name][1] for name in each} for file, each in cut_.items()}
        facts = {"version": f"{job.version:06d}", "base_version": f"{job.base:06d}"}
        facts |= {"delta_encoding": job.encoding, "compression_format": "zstd"}
        facts["checksum_format"] = job.checksum
        weight_map = {name: file for file, each in cut_.items() for name in each}
        return (cut_, texts, {"metadata": facts, "weight_map": weight_map}), len(made)
    listed: list[dict[str, Any]] = []
    for file, each in cut_.items():
        for name, payload in each.items():
            new = pairs[name].new
            sizes = {"uncompressed_num_bytes": new.nbytes, "compressed_num_bytes": payload.nbytes}
            about = {"name": name, "dtype": new.dtype.name, "shape": new.shape, **sizes}
            about |= {"payload_file": file, "payload_key": name}
            listed.append({**about, "checksum": made[name][1], "checksum_algorithm": job.checksum})
    index: dict[str, Any] = {"version": job.version, "base_version": job.base, "tensors": listed}
    index["payload_files"] = [*cut_]
    for key in ("uncompressed_num_bytes", "compressed_num_bytes"):
        index[f"total_{key}"] = sum(each[key] for each in listed)
    return (cut_, {}, index), len(made)


def of_places(job: Publication, path: str, made: Encoded) -> Contents:
    """Return what is in the file of prime-rl, or of TRL: places and values of the tensors that changed."""
    changed = {name: entry for name, entry in made.entries.items() if entry.kind == SPARSE}
    tensors, listed = dict[str, TensorRef](), []
    for number, (name, entry) in enumerate(changed.items()):
        places, values = (made.tensors[part] for part in entry.parts)
        dtype = entry.dtype.name
        if job.form.name == "trl":
            if dtype != "bfloat16":
                raise Refused(path, f"'{name[:80]}' is {dtype}, and TRL's deltas hold bfloat16 alone")
            tensors |= {f"{name}.idx": places, f"{name}.val": values}
            continue
        if dtype not in forms.SUMMABLE:
            raise Refused(path, f"'{name[:80]}' is {dtype}, of which prime-rl's readers take no checksum")
        total = 0
        for part, kind in ((places, places.dtype.name), (values, dtype)):
            for piece in stream(part):
                total ^= forms.summed(np.frombuffer(piece, UNSIGNED[part.dtype.itemsize]), kind)
        keys = {"indices": f"tensor_{number}.indices", "values": f"tensor_{number}.values"}
        tensors |= {keys["indices"]: places, keys["values"]: values}
        about = {"name": name, "shape": entry.shape, "dtype": dtype, "numel": entry.numel, **keys}
        listed.append({**about, "changed_numel": places.numel, "checksum": total})
    if job.form.name == "trl":
        total = sum(tensor.numel for tensor in tensors.values())
        every = sum(entry.numel for entry in made.entries.values())
        facts = {"format": safetensors.PATCH, "version": "1", "sparse": "True", "encoding": job.encoding}
        facts |= {"model_version": str(job.version), "num_changed_params": str(len(changed))}
        facts |= {"total_changed_elements": str(total // 2), "total_elements": str(every)}
        facts["sparsity"] = str(1 - total / 2 / max(every, 1))
        return {"": tensors}, {"": facts}, {}
    file = job.form.files if tensors else None
    index = {"format": forms.OF_PRIME, "version": 1, "step": job.version, "base_step": job.base}
    index |= {"compute_dtype": None, "compressed": False, "patch_file": file, "tensors": listed}
    return {file: tensors} if file else {}, {file: OF_TORCH} if file else {}, index


def written(job: Publication, place: OutputPlace, contents: Contents, *, dry_run: bool) -> Saved:
    """Write a folder in one of the forms; it takes its place at once, whole."""
    cut_, texts, index = contents
    text = json.dumps(index, ensure_ascii=False).encode()

    def write_file(name: str, tensors: Mapping[str, TensorRef], out: Output) -> None:
        safetensors.write(join(place.path, name), tensors, texts.get(name, {}), out)

    payloads = sum(tensor.nbytes for tensors in cut_.values() for tensor in tensors.values())
    if dry_run:
        return Saved(place.path, job.form.name, payloads + len(text), len(index), shards=len(cut_))
    with place.folder(partial(files_of, job.form)) as new:
        shards.write_files(new.path, cut_, write_file, Output)
        with writing_into(join(new.path, job.form.index)) as file:
            file.write(text)
        nbytes = sum(entry.stat().st_size for entry in os.scandir(new.path))
    keys = sum(map(len, cut_.values()))
    return Saved(place.path, job.form.name, nbytes, keys, shards=len(cut_))


def files_of(form: DeltaForm, folder: str) -> list[str]:
    """Return the names in a folder that a delta of a form has there."""
    like = re.compile(re.sub(r"\\{.*?\\}", r"\\d+", re.escape(form.files)))
    return [name for name in os.listdir(folder) if name == form.index or like.fullmatch(name)]
