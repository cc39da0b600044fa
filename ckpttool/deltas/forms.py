"""Deltas in the forms of other programs: what each can hold, and what one of them says (docs/deltas.md)."""

from __future__ import annotations

import json
import os
import re
import shlex
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.files.commit import Spool
from ..core.formats import safetensors
from ..core.formats.safetensors import DELTA, parse_object
from ..core.inert_pickle.values import OrderedDict_
from ..core.lazy import NDArray, hashlib, np
from ..core.remote.places import open_part, open_source_at
from ..core.system import join
from ..core.tensors.ref import ALL_DTYPES, PLAIN_FLOATS, ByteRange, Source, TensorRef, is_count
from ..errors import Damaged, Refused, Unsupported, install
from . import differences

XOR, OVERWRITE, PLACES, GAPS = "xor", "overwrite", "raw", "gap_delta"
SUMMED = "hash_tensor"  # a checksum of places and values, of the types that torch sums:
SUMMABLE = (*PLAIN_FLOATS, "int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True, slots=True)
class DeltaForm:
    """What a form can hold, and how its files are called.

    Attributes:
        encodings, checksums: what it may state, the default first.
        index: the file that tells of the rest; "" for a form of one file.
        called: how an output is named, for messages; "" for a form that is only read.
        files: what its other files are called.
        skips: its reader passes over tensors that the base lacks.
    """

    name: str
    encodings: tuple[str, ...]
    checksums: tuple[str, ...]
    index: str = ""
    called: str = ""
    files: str = ""
    skips: bool = False


FORMS = {
    form.name: form
    for form in (
        DeltaForm(
            "weight-v",
            (XOR, OVERWRITE),
            ("xxh3-128", "blake3", "adler32"),
            "model.safetensors.index.json",
            "weight_v000012/",
            "model-{:05d}-of-{:05d}.safetensors",
        ),
        DeltaForm(
            "skyrl",
            (XOR,),
            ("xxh3-128", "sha256"),
            "manifest.json",
            "delta-00000012/",
            "delta-rank00000-file{:06d}.safetensors",
            skips=True,
        ),
        DeltaForm("prime-rl", (PLACES,), (SUMMED,), "sparse_update_manifest.json"),
        DeltaForm("trl", (PLACES, GAPS), ()),
    )
}
WRITTEN = tuple(name for name, form in FORMS.items() if form.called)
OF_PRIME = "prime-rl-sparse-update"  # what its manifest states

# The number in the name of a version, after its stem: weight_v000012, v00000012, delta-00000012, step-200.
# What is not in its place yet ends in another way.
STEMS, ENDS = r"weight_v|delta-|v|(?:.*[-_])?step[-_]?", r"\.(?:delta\.)?(?:safetensors|pt|pth|bin|ckpt)"
NUMBER = re.compile(rf"(?P<stem>{STEMS})(?P<number>\d{{1,15}})(?:{ENDS})?")


def stem_of(path: str) -> tuple[str, int] | None:
    """Return the series and the version that the name of a file or folder states; None for none."""
    found = NUMBER.fullmatch(os.path.basename(path.rstrip("/")))
    return (found["stem"], int(found["number"])) if found else None


def number_in(path: str, like: str | None = None) -> int | None:
    """Return the version that a name states, if it is of the series of another; None for none."""
    found, other = stem_of(path), stem_of(path if like is None else like)
    return found[1] if found and other and found[0] == other[0] else None


# ---- Checksums, by the names that forms have for them.


class _Adler32:
    def __init__(self) -> None:
        self.value = 1

    def update(self, data: Any) -> None:
        self.value = zlib.adler32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


def hashing(path: str, checksum: str) -> Any:
    """Return what sums bytes: `update`, `hexdigest`. Raises Unsupported where its package is missing."""
    if checksum == "adler32":
        return _Adler32()
    if checksum == "sha256":
        return hashlib.sha256()
    package, name = {"xxh3-128": ("xxhash", "xxh3_128"), "blake3": ("blake3", "blake3")}[checksum]
    try:
        return getattr(import_module(package), name)()
    except ModuleNotFoundError:
        what = f"needs the package {package}, for checksums of the kind {checksum}"
        raise Unsupported(path, what, hint=install("delta")) from None


def summed(values: NDArray[Any], dtype: str) -> int:
    """Return the XOR of numbers as torch.hash_tensor has it: of their 64 bits, floats as doubles."""
    is_short = dtype == "bfloat16"
    values = (values.astype(np.uint32) << 16).view(np.float32) if is_short else values.view(dtype)
    wide = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
    return int(np.bitwise_xor.reduce(wide.view(np.uint64))) if len(wide) else 0


# ---- What a delta says, whatever its form.


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """What becomes of one tensor.

    Attributes:
        encoding: XOR, OVERWRITE (one frame), PLACES or GAPS (places and values).
        parts: the tensors of the delta that say it.
        dtype, shape: those of the tensor, where the form states them.
        checksum: a kind and its value, of the new bytes; of places and values for `hash_tensor`.
    """

    encoding: str
    parts: tuple[TensorRef, ...]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    checksum: tuple[str, str | int] | None = None


@dataclass(frozen=True, slots=True)
class VersionPatch:
    """A delta of another program: its version and its base's, None where its form has none, and changes."""

    form: DeltaForm
    version: int | None
    base: int | None
    changes: Mapping[str, TensorPatch]


def patch_of(file: Checkpoint) -> VersionPatch:
    """Return what a delta says that `of_index`, `of_folder` or safetensors' `read` has found.

    Raises:
        Damaged: it breaks the rules of its form.
        Unsupported: it is of a version or an encoding that is not read here.
    """
    said = parse_object(file.path, file.metadata[DELTA].encode(), "its index")
    return _READERS[file.format](file, said)


def of_index(whole: Checkpoint, facts: Mapping[str, Any], shards: Collection[Checkpoint]) -> Checkpoint:
    """Return shards whose index states a `delta_encoding`: no model, but what changes one."""
    sums = {name: text for shard in shards for name, text in shard.metadata.items()}
    said = {DELTA: json.dumps({**facts, "checksums": sums})}
    return replace(whole, format="weight-v", metadata=said, unread=(), remarks=())


def of_folder(folder: str, names: Collection[str]) -> Checkpoint | None:
    """Return a delta of SkyRL or prime-rl in a folder, as the tensors of its files; None for any other."""
    form = next(form for form in FORMS.values() if form.index in names and form.name != "weight-v")
    source = open_source_at(join(folder, form.index), shown=folder)
    if source.size > safetensors.MAX_HEADER:
        return None
    text = source.read(0, source.size)
    said = parse_object(folder, text, f"its {form.index}")
    is_one = said.get("format") == OF_PRIME or {"base_version", "payload_files", "tensors"} <= {*said}
    if not is_one:
        return None
    listed = [said["patch_file"]] if said.get("patch_file") else said.get("payload_files", [])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise Damaged(folder, f"its {form.index} names files that are none")
    tree, sources = OrderedDict_(), list[Source]()
    for name in sorted({*listed}):
        if name not in names:  # nor is a path one of them
            what = f"its {form.index} names {name[:80]!r}, which is not in the folder"
            raise Damaged(folder, what, hint="wait until its writer is done, or get it again")
        part = open_part(folder, f"its file '{name}'", join(folder, name), "get that file again")
        sources.append(part)
        tree[name] = OrderedDict_(safetensors.read(_unpacked(part, said)).tensors())
    return Checkpoint(source, form.name, tree, metadata={DELTA: text.decode()}, shards=tuple(sources))


def _unpacked(part: Source, said: Mapping[str, Any]) -> Source:
    """Return a file, or what it holds if it is one frame: no more than its manifest has told."""
    if part.read(0, min(4, part.size)) != b"\x28\xb5\x2f\xfd":
        return part
    differences.require(part.path)
    counts = [each.get("changed_numel", 0) for each in said.get("tensors", ()) if isinstance(each, dict)]
    left = safetensors.MAX_HEADER + 16 * sum(count for count in counts if is_count(count))
    spool = Spool(part.path)
    take = differences.taking(ByteRange(part, 0, part.size))
    try:
        while piece := take(min(1 << 20, left)):
            spool.append(piece)
            left -= len(piece)
    except differences.BadFrame as fault:
        raise Damaged(part.path, f"its frame {fault}") from None
    if not left:
        raise Damaged(part.path, "its frame holds more than its manifest states")
    return spool.source


def _weight_v(file: Checkpoint, said: Mapping[str, Any]) -> VersionPatch:
    form, read = FORMS["weight-v"], partial(_one_of, file, said)
    encoding = read("delta_encoding", form.encodings)
    checksum = read("checksum_format", form.checksums)
    read("compression_format", ("zstd",))
    read("checksum_scope", (None,))  # a fork sums what is packed
    sums = said["checksums"]
    changes = {}
    for name, tensor in file.tree.items():
        if not isinstance(value := sums.get(name), str):
            raise Damaged(file.path, f"states no checksum of '{name[:80]}'")
        changes[name] = TensorPatch(encoding, _flat(file, name, tensor), checksum=(checksum, value))
    return VersionPatch(form, _number(file, said, "version"), _number(file, said, "base_version"), changes)


def _skyrl(file: Checkpoint, said: Mapping[str, Any]) -> VersionPatch:
    form, changes = FORMS["skyrl"], dict[str, TensorPatch]()
    for name, each in _listed(file, said):
        kind, value = each.get("checksum_algorithm", form.checksums[0]), each.get("checksum")
        if value is None:
            kind, value = "sha256", each.get("sha256")
        if kind not in form.checksums:
            raise Unsupported(file.path, f"states checksums of the kind {kind!r}"[:80])
        payload = _part(file, name, each.get("payload_file"), each.get("payload_key"))
        declared = _declared(file, name, each)
        changes[name] = TensorPatch(XOR, _flat(file, name, payload), *declared, (kind, str(value)))
    return VersionPatch(form, _number(file, said, "version"), _number(file, said, "base_version"), changes)


def _prime_rl(file: Checkpoint, said: Mapping[str, Any]) -> VersionPatch:
    if said.get("version") != 1:
        raise Unsupported(file.path, f"is a sparse update of version {said.get('version')!r}"[:80])
    changes, only = dict[str, TensorPatch](), said.get("patch_file")
    for name, each in _listed(file, said):
        parts = tuple(_part(file, name, only, each.get(key)) for key in ("indices", "values"))
        stated = each.get("checksum")
        if not isinstance(stated, int | None):
            raise Damaged(file.path, f"states a checksum of '{name[:80]}' that is none")
        dtype, shape = _declared(file, name, each)
        if stated is not None and dtype not in SUMMABLE:
            raise Unsupported(file.path, f"states a checksum of '{name[:80]}', of {dtype}, which torch lacks")
        checksum = None if stated is None else (SUMMED, stated & 0xFFFF_FFFF_FFFF_FFFF)
        changes[name] = TensorPatch(PLACES, parts, dtype, shape, checksum)
    step, below = (_number(file, said, key) for key in ("step", "base_step"))
    return VersionPatch(FORMS["prime-rl"], step, below, changes)


def _trl(file: Checkpoint, said: Mapping[str, Any]) -> VersionPatch:
    form = FORMS["trl"]
    encoding = _one_of(file, said, "encoding", form.encodings)
    _one_of(file, said, "version", ("1",))
    changes = {}
    for key, values in file.tree.items():
        name, end = os.path.splitext(key)
        if end not in (".idx", ".val") or not {f"{name}.idx", f"{name}.val"} <= file.tree.keys():
            raise Damaged(file.path, f"'{key[:80]}' is no part of a delta, or lacks the other part")
        if end == ".val":
            changes[name] = TensorPatch(encoding, (file.tree[f"{name}.idx"], values), values.dtype.name)
    return VersionPatch(form, _number(file, said, "model_version"), None, changes)


_READERS = {"weight-v": _weight_v, "skyrl": _skyrl, "prime-rl": _prime_rl, "trl": _trl}


def _one_of(file: Checkpoint, said: Mapping[str, Any], key: str, known: tuple[Any, ...]) -> Any:
    if (value := said.get(key)) not in known:
        raise Unsupported(file.path, f"states the {key} {str(value)[:40]!r}, which is not read here")
    return value


def _number(file: Checkpoint, said: Mapping[str, Any], key: str) -> int:
    value = str(said.get(key))
    if not re.fullmatch(r"v?\d{1,15}", value):  # "v1" of ModelExpress
        raise Damaged(file.path, f"states the {key} {value[:40]!r}, which is no number")
    return int(value.removeprefix("v"))


def _listed(file: Checkpoint, said: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    seen, listed = set[str](), said.get("tensors")
    for each in listed if isinstance(listed, list) else [None]:
        about: dict[str, Any] = each if isinstance(each, dict) else {}
        name = about.get("name")
        if not isinstance(name, str) or name in seen:
            raise Damaged(file.path, "its manifest lists a tensor without a name, or twice")
        seen.add(name)
        yield name, about


def _declared(file: Checkpoint, name: str, each: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    dtype, shape = str(each.get("dtype")).removeprefix("torch."), each.get("shape")
    if dtype not in ALL_DTYPES or not isinstance(shape, list) or not all(map(is_count, shape)):
        raise Damaged(file.path, f"states a type or a shape of '{name[:80]}' that is none")
    return dtype, tuple(shape)


def _part(file: Checkpoint, name: str, of: object, key: object) -> TensorRef:
    found = file.tree.get(of, {}).get(key) if isinstance(of, str) and isinstance(key, str) else None
    if not isinstance(found, TensorRef):
        raise Damaged(
            file.path, f"lacks what '{name[:80]}' is kept in: {str(key)[:80]!r} of {str(of)[:80]!r}"
        )
    return found


def _flat(file: Checkpoint, name: str, payload: TensorRef) -> tuple[TensorRef]:
    if payload.dtype.name != "uint8" or len(payload.shape) != 1:
        raise Damaged(file.path, f"keeps '{name[:80]}' in a tensor that is no row of bytes")
    return (payload,)


def require_base(below: int | None, patch: VersionPatch, path: str, base: str) -> None:
    """Raise Refused if a version stands before a delta that is not its base."""
    if patch.base is not None and below is not None and patch.base != below:
        folder = shlex.quote(os.path.dirname(path) or ".")
        what = f"is made from version {patch.base}, and {base} is version {below}"
        raise Refused(path, what, hint=f"see which versions there are: ckpttool inspect {folder}")
