"""Every byte of a checkpoint read: checksums, frames of zips, values that are not finite; and the digest."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, require_all
from ..core.checkpoint.checksums import Checksums, expect, reads_of, tensors_that_differ, with_parts
from ..core.checkpoint.keys import stripping
from ..core.checkpoint.settings import misfits
from ..core.checkpoint.special_tensors import PLACEHOLDER, WRITTEN_BY_ALL
from ..core.checkpoint.state import parts_beside
from ..core.files import digest as hashing
from ..core.files.commit import reason
from ..core.files.copying import MOST_PIECES, is_tiny, read_together
from ..core.files.findings import Findings, Told, shared, takes_small
from ..core.files.threads import BytesPiece, Progress, map_bytes
from ..core.formats import folders
from ..core.formats.pytorch import exported, zip_writer
from ..core.formats.pytorch import zip as torch_zip
from ..core.formats.pytorch.zip_entries import ZipRecord, extra_fields, is_intact, read_directory
from ..core.formats.reading import File, opened
from ..core.formats.shards import TORCH
from ..core.inert_pickle.known_names import names_in, names_that_run
from ..core.lazy import shown_by
from ..core.remote.urls import canonical, is_url
from ..core.tensors.cast import FLOATS, count_non_finite
from ..core.tensors.ref import ByteRange, Source, Storage, TensorRef, real_dtype
from ..core.tensors.values import MAX_REPEATED, require_bounded, without_repeats
from ..diffing.compare import both_states, diff, outside_of
from ..diffing.compare_values import Change, Comparison
from ..rooms import find, need


def digest(
    file: File,
    *,
    state: str | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    known: hashing.Known | None = None,
) -> str:
    """Return one SHA-256 for a model's names, types, shapes and values, the same in every format.

    docs/digest.md defines it.

    Args:
        file: a path, or an open checkpoint.
        state: dotted path of the model's state in the file; found when None.
        verify: compare what is read with the checksums that the file states.
        progress: called with the number of bytes after each piece.
        known: digests of tensors in files whose hash a server tells, from calls before; gets those of this.

    Returns:
        64 hexadecimal digits.

    Raises:
        NoState: the file has no model state, or none at `state`.
        Refused: a tensor has values in other files or is of a class that is not known, or an expanded tensor
            is more than 64 GiB larger than what the file holds of it.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them; Damaged also if the file ends early,
            or if `verify` and a checksum is wrong.

    Example:
        >>> saved = ckpttool.convert("model.safetensors", "copy.pt")
        >>> ckpttool.digest("copy.pt") == ckpttool.digest("model.safetensors")
        True
    """
    with opened(file) as checkpoint:
        chosen = checkpoint.state(state)
        used = [(name, tensor.storage) for name, tensor in sorted(chosen.tensors.items())]
        expect(used)
        with Checksums(checkpoint, used if verify else []) as checksums:
            value = hashing.digest(with_parts(checkpoint.path, chosen), progress, known)
            checksums.finish()
        return value


# ---- The bytes of a zip between its records: headers, padding, descriptors, directory
#
# The reader refuses what readers of zips would understand differently. Here all else is compared with what it
# should be, and bytes that nothing determines are counted. Format: PKWARE APPNOTE 6.3; torch's padding:
# `caffe2/serialize/inline_container.cc`.


# A descriptor behind a record by its size: signature, CRC-32, bytes in the file, bytes once inflated
DESCRIPTORS = {16: struct.Struct("<4sIII"), 24: struct.Struct("<4sIQQ")}

# Bytes that nothing determines: of an entry of the directory its version made by, its internal and external
# attributes; of a ZIP64 end record its two versions
FREE_IN_ENTRY, FREE_AT_END = 8, 4


Frame = tuple[list[tuple[str, str]], Counter[str]]


def zip_frame(source: Source) -> Frame:
    """Compare the bytes around the records of a zip with what they should be.

    Returns the faults, each with its record, and the numbers of bytes that nothing determines, by their kind.
    """
    records = sorted(read_directory(source).values(), key=lambda record: record.data.offset)
    start, entries = _directory(source, len(records))
    faults: list[tuple[str, str]] = []
    free: Counter[str] = Counter({"header fields": FREE_IN_ENTRY * len(records)})
    ends = [header for header, _, _ in entries[1:]] + [start]
    if entries:
        free["between records"] += entries[0][0]
    between = _between(source, records, [header for header, _, _ in entries], ends)
    for record, (_, fields, extra), end, (before, after) in zip(records, entries, ends, between, strict=True):
        local = zip_writer.LOCAL.unpack_from(before)
        if local[1:6] != fields[2:7]:
            faults.append((record.name, "its two headers differ in version, flags or time"))
        own = bytes(before[len(before) - local[-1] :])
        for piece in (own, extra):
            parts = [*extra_fields(piece)]
            padding = b"".join(data for kind, data in parts if kind == zip_writer.PADDING_EXTRA)
            wide = sum(
                len(data)
                for kind, data in parts
                if kind == zip_writer.ZIP64_EXTRA and zip_writer.FULL32 in fields
            )
            # Readers pass over extra fields that they do not know, so nothing determines kind and length.
            free["header fields"] += len(piece) - len(padding) - wide
            if padding.strip(b"Z"):
                faults.append((record.name, "its padding is not what torch pads with"))
        gap = end - record.data.offset - record.data.nbytes
        descriptor = DESCRIPTORS.get(gap)
        if fields[3] & zip_writer.DESCRIPTOR and descriptor:
            if descriptor.unpack(after) != (b"PK\x07\x08", fields[7], record.data.nbytes, record.size):
                faults.append((record.name, "the descriptor behind it does not fit it"))
        else:
            free["between records"] += gap
    size = sum(zip_writer.CENTRAL.size + fields[10] + fields[11] + fields[12] for _, fields, _ in entries)
    free["comments"] += sum(fields[12] for _, fields, _ in entries)
    rest = source.size - start - size - zip_writer.END_OF_ZIP.size
    if rest >= zip_writer.END64.size + zip_writer.LOCATOR64.size:
        free["header fields"] += FREE_AT_END
        rest -= zip_writer.END64.size + zip_writer.LOCATOR64.size
    free["comments"] += rest
    return faults, +free


def _between(
    source: Source, records: Sequence[ZipRecord], headers: Sequence[int], ends: Sequence[int]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield what stands before each record and behind it, as far as a descriptor may; many read together."""
    for first in range(0, len(records), MOST_PIECES):
        ranges: list[tuple[int, int]] = []
        for number in range(first, min(first + MOST_PIECES, len(records))):
            data = records[number].data
            behind = data.offset + data.nbytes
            longest = min(ends[number] - behind, max(DESCRIPTORS))  # what lies there may fill the memory
            ranges += (headers[number], data.offset - headers[number]), (behind, longest)
        found = source.read_near(ranges)
        yield from zip(found[::2], found[1::2], strict=True)


def _directory(source: Source, count: int) -> tuple[int, list[tuple[int, tuple[int, ...], bytes]]]:
    """Return where the directory begins; of each entry where its header is, its fields and extra fields."""
    size = min(source.size, zip_writer.END_OF_ZIP.size + 0xFFFF)
    tail = source.read(source.size - size, size)
    at = tail.rfind(b"PK\x05\x06")
    size, start = zip_writer.END_OF_ZIP.unpack_from(tail, at)[5:7]
    end = source.size - len(tail) + at - zip_writer.LOCATOR64.size
    signature, _, wide, _ = (
        zip_writer.LOCATOR64.unpack(source.read(end, zip_writer.LOCATOR64.size)) if end >= 0 else (0, 0, 0, 0)
    )
    if signature == zip_writer.Signature.LOCATOR64:
        size, start = zip_writer.END64.unpack(source.read(wide, zip_writer.END64.size))[8:10]
    raw, at, entries = source.read(start, size), 0, []
    for _ in range(count):
        fields = zip_writer.CENTRAL.unpack_from(raw, at)
        begin = at + zip_writer.CENTRAL.size + fields[10]
        extra = raw[begin : begin + fields[11]]
        header = fields[16]
        if header == zip_writer.FULL32:
            (header,) = struct.unpack_from("<Q", extra, len(extra) - 8)
        entries.append((header, fields, extra))
        at = begin + fields[11] + fields[12]
    return start, sorted(entries, key=lambda entry: entry[0])


# ---- The bytes that checksums cover, and the records of no tensor


ZIPS = (torch_zip.NAME, torch_zip.TORCHSCRIPT, TORCH)  # The formats that are zips, or folders of zips
OTHER_ZIPS = ("npz", exported.NAME)  # Those whose other records and frame are not torch.save's

# The records that torch.save writes in addition to storages.
OWN_RECORDS = {"data.pkl", "version", "byteorder", ".format_version", ".storage_alignment"}
OWN_RECORDS |= {".data/version", ".data/serialization_id"}

# The first byte of a pickle of protocol 2 or newer, and the newest protocol, which follows it
PROTO, NEWEST = b"\x80", b"\x05"

SIGNATURE = b"PK\x03\x04"  # The first bytes of a zip; the index of a folder has others

MISMATCH = "its bytes do not match their checksum"


@dataclass(frozen=True, slots=True)
class FileProblem:
    """Something wrong with a file.

    Attributes:
        kind: `checksum`, `frame` (the bytes around a record), `non-finite`, `torch` (a remark of the reader),
            `ranks` (ranks differ, or have its values), `code` (a name that could run, or a record that
            nothing refers to), `seal` (not as it was sealed), `config` (not as config.json says), or the
            difference from another file: `only-here`, `only-there`, `form` (dtype or shape) or `values`.
        name: the tensor or record.
        message: the problem, to be read after the name.
    """

    kind: str
    name: str
    message: str


class ByteCoverage:
    """The bytes of a checkpoint's files: those of storages, and the rest, with the problems found there."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.problems: list[FileProblem] = []  # of records, and of what lies around them
        self.strays: list[FileProblem] = []  # records that nothing refers to
        self.checked = self.unsummed = 0  # bytes of storages and records
        self.free: Counter[str] = Counter()  # bytes that no checksum covers, by what they are
        self._within: Counter[int] = Counter()  # bytes of storages in each source, by its id
        self._known: set[tuple[int, int]] = set()
        self._pieces: set[tuple[int, int]] = set()  # the records that whole tensors are put together from
        for storage in {id(storage): storage for _, storage in checkpoint.storages()}.values():
            self._count(storage)
            if checkpoint.format == "delta":  # whose files hold nothing but what tensors are made of
                self._count_origins(storage)
        of_ranks = checkpoint.ranks is not None
        zips = checkpoint.format in ZIPS or (of_ranks and checkpoint.format != folders.DCP)
        for source in filter(attrgetter("size"), checkpoint.sources):
            is_one = not source.path.endswith(folders.PART)  # many zips in a row
            is_zip = zips and is_one and source.read(0, 4) == SIGNATURE
            if checkpoint.format in OTHER_ZIPS:
                self._check_records(source)
            else:
                self._check_rest(source, is_zip=is_zip, is_of_rank=is_zip and of_ranks)

    def _count(self, storage: Storage) -> None:
        data = storage.data
        self.checked += data.nbytes
        pieces = (each.data for each in storage.origins)
        self._pieces |= {(id(each.source), each.offset) for each in pieces if isinstance(each, ByteRange)}
        are_summed = storage.origins and all(each.crc32 is not None for each in storage.origins)
        if data.nbytes and storage.crc32 is None and not are_summed:
            self.unsummed += 1
            self.free["values"] += data.nbytes
        if data.nbytes and isinstance(data, ByteRange):
            self._known.add((id(data.source), data.offset))
            self._within[id(data.source)] += data.nbytes

    def _count_origins(self, storage: Storage) -> None:
        for data in reads_of(("", each) for each in storage.origins):
            if (id(data.source), data.offset) not in self._known:
                self._known.add((id(data.source), data.offset))
                self._within[id(data.source)] += data.nbytes

    def _check_rest(self, source: Source, *, is_zip: bool, is_of_rank: bool) -> None:
        """Check everything else in a zip: the pickle, code, and storages that no tensor uses."""
        if not is_zip:
            self.free["contents"] += source.size - self._within[id(source)]
            return
        faults, free = _shared_frame(zip_frame)(source)
        self.free.update(free)
        self.problems += [FileProblem("frame", f"record {name}", message) for name, message in faults]
        # Only a rank's file may refer to storages that no whole tensor uses.
        referred: set[int] | None = None if is_of_rank else set()
        for record in read_directory(source).values():
            if (id(source), record.data.offset) in self._known:
                continue
            self.checked += record.size
            is_piece = (id(source), record.data.offset) in self._pieces
            if record.size and not is_piece and record.name.partition("/")[2] not in OWN_RECORDS:
                referred = _referred(source) if referred is None else referred
                if record.data.offset not in referred:
                    self.strays.append(_stray(source, record))
            self._check_record(source, record)

    def _check_records(self, source: Source) -> None:
        """Check what another tool zipped but for the tensors: all other records."""
        records = [*read_directory(source, folded=False).values()]
        rest = [each for each in records if (id(source), each.data.offset) not in self._pieces | self._known]
        self.free["contents"] += source.size - sum(record.data.nbytes for record in records)
        for record in rest:
            self.checked += record.size
            self._check_record(source, record)

    def _check_record(self, source: Source, record: ZipRecord) -> None:
        def told(now: Findings, record: ZipRecord) -> Told:
            return now.told(record.data, "")

        def check(record: ZipRecord) -> bool | None:
            return is_intact(source, record)

        nothing: bool | None = None
        intact = shared("record", told, nothing)(check)(record)
        if intact is None:
            self.free["records"] += record.size
        if intact is False:
            self.problems.append(FileProblem("checksum", f"record {record.name}", MISMATCH))


def _shared_frame(work: Callable[[Source], Frame]) -> Callable[[Source], Frame]:
    """Return the check of a zip's frame, which one of several parts does."""

    def told(now: Findings, source: Source) -> Told:
        return source.path, now.version(source)

    def pack(found: Frame) -> list[object]:
        return [found[0], dict(found[1])]

    def unpack(found: list[Any]) -> Frame:
        return [(name, message) for name, message in found[0]], Counter(found[1])

    nothing: Frame = [], Counter()
    return shared("frame", told, nothing, pack, unpack)(work)


def _referred(source: Source) -> set[int]:
    """Return where the storages lie that the pickle of a zip refers to."""
    storages = (storage.data for _, storage in torch_zip.read(source).storages())
    return {data.offset for data in storages if isinstance(data, ByteRange)}


def _stray(source: Source, record: ZipRecord) -> FileProblem:
    """Return the problem of a record that torch.save does not write and that no tensor lies in."""
    head = source.read(record.data.offset, min(2, record.data.nbytes))
    what = "is a pickle that" if head[:1] == PROTO and head[1:] <= NEWEST else "is a record that"
    return FileProblem("code", f"record {record.name}", f"{what} nothing in the file refers to")


# ---- Every byte read, and compared with another file


PIECE = 4 << 20  # Bytes of values read as one piece; whole elements


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of reading every byte.

    Attributes:
        checked_bytes: bytes of storages and, in a zip, of all other records that were read, and compared
            with a checksum where there is one.
        unsummed: storages that no checksum covers.
        free: how many bytes no checksum covers, by what they are: values and contents,
            and of a zip fields of its headers, bytes between records, comments.
        non_finite: tensor -> number of values that are NaN or infinite.
        problems: the problems found.
        compared: what was compared with another file: `state`, or `everything` when both hold more than a
            model's state, or either holds none; None when there was no other file.
        hint: the next thing to do about the problems; None when there is none.
        sealed: a seal was compared.
        unsealed: files elsewhere of which only the tensors were compared with the seal.
        text_keys_here, text_keys_there: dicts of this file, and of the other, keyed by text where those of
            the other, or of this one, are keyed by numbers.
    """

    checked_bytes: int
    unsummed: int
    non_finite: Mapping[str, int]
    problems: tuple[FileProblem, ...]
    free: Mapping[str, int] = field(default_factory=dict, metadata={"json": "unvouched"})
    compared: str | None = None
    hint: str | None = None
    sealed: bool = False
    unsealed: tuple[str, ...] = ()
    text_keys_here: tuple[str, ...] = ()
    text_keys_there: tuple[str, ...] = ()

    _repr_html_ = shown_by("verified_html")

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify(
    file: File,
    *,
    against: File | None = None,
    state: str | None = None,
    seal: str | os.PathLike[str] | None = None,
    finite: bool = False,
    no_code: bool = False,
    progress: Progress | None = None,
) -> Verified:
    """Read and check every byte of a file, whose structure was checked when it was opened.

    Args:
        file: a path, or an open checkpoint as it was read.
        against: another, whose state must have the same names, types, shapes and values. When both files hold
            more than that, or either holds no state, and none is named, everything else but module versions
            must be the same too.
        state: dotted path of the model's state, in both or in one of them; found when None.
        seal: a path or URL of what `seal` wrote; when None that of a folder, or the one beside the file, if
            there is one.
        finite: NaN and infinity are problems; otherwise they are only counted.
        no_code: names in the file's pickle that could run something are problems, and records of the zip that
            nothing in it refers to.
        progress: called with the number of bytes after each piece. All bytes are read once, and once more to
            compare them, or to hash files of a model that is sealed.

    Returns:
        What was read and found: `.ok`, `.problems`, `.checked_bytes`, `.non_finite`.

    Raises:
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them; Damaged also if a file ends early,
            or bytes of `against` do not match their checksum.
        NoState: neither file has a state at `state`.
        Refused: an expanded tensor more than 64 GiB larger than its bytes.

    Example:
        >>> ckpttool.verify("last.pt").ok
        True
    """
    with ExitStack() as stack:
        checkpoint = stack.enter_context(opened(file))
        if (ranks := checkpoint.ranks) is not None:
            require_all(checkpoint.path, ranks.missing, ranks.world_size, ranks.lacking)
        sealing = find("sealing.checking")
        sealed = sealing.seal_of(checkpoint, seal_for(file, seal)) if sealing else None
        expect(checkpoint.storages())
        with (
            Checksums(checkpoint, checkpoint.storages(), every=True) as checksums,
            sealed.hashes if sealed else nullcontext(),
        ):
            differing = tensors_that_differ(checkpoint, verify=False)
            piece = hashing.PIECE if sealed else PIECE  # as one thread hashes them
            non_finite = dict(_non_finite(checkpoint, differing, piece, progress))
            damaged = checksums.damaged(progress)
        for source in checkpoint.sources:
            source.check_rest()
        coverage = ByteCoverage(checkpoint)
        problems = _code(checkpoint, coverage.strays) if no_code else []
        problems += [FileProblem("torch", name, message) for name, message in checkpoint.remarks]
        problems += [FileProblem("torch", name, f"has {fault}") for name, fault in checkpoint.index_faults()]
        problems += [FileProblem("ranks", name, fault.reason) for name, fault in differing.items()]
        where = " (in {})" if checkpoint.format == "delta" else ""  # of several files one is damaged
        problems += [FileProblem("checksum", n, MISMATCH + where.format(s.data.path)) for n, s in damaged]
        problems += coverage.problems
        problems += _parts(checkpoint)
        problems += _left_empty(checkpoint)
        problems += [FileProblem("seal", *found) for found in (sealed.mismatches(progress) if sealed else ())]
        if checkpoint.format == "delta":
            false = need("deltas.applying").false_digests(checkpoint, progress)
            known = {problem.name for problem in problems}
            problems += [FileProblem("checksum", name, what) for name, what in false if name not in known]
        if (lora := find("lora.adapter")) is not None:
            problems += [FileProblem("form", name, what) for name, what in lora.misfits(checkpoint)]
        problems += [FileProblem("config", name, what) for name, what in misfits(checkpoint)]
        if finite:
            infinite = "of its values are NaN or infinite"
            problems += [FileProblem("non-finite", n, f"{c} {infinite}") for n, c in non_finite.items()]
        compared = hint = None
        keyed: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        if against is not None:
            other = stack.enter_context(opened(against))
            compared, comparison, hint = _compare(checkpoint, other, state, progress)
            problems += _differences(comparison)
            keyed = comparison.text_keys_a, comparison.text_keys_b
    free = {} if sealed and sealed.covers else dict(coverage.free)
    said = tuple(problems), free, compared, hint
    of_seal = sealed is not None, tuple(sealed.unread) if sealed else ()
    return Verified(coverage.checked, coverage.unsummed, non_finite, *said, *of_seal, *keyed)


def seal_for(file: File, seal: str | os.PathLike[str] | None) -> str | None:
    """Return the seal that was named, or that of the folder that was named; None for whatever lies beside."""
    sealing = find("sealing.checking")
    if seal is not None or isinstance(file, Checkpoint) or not sealing:
        return None if seal is None else canonical(os.fspath(seal))
    name = os.fspath(file)  # a base and its deltas are no folder
    found: str | None = None if is_url(name) and "+" in name else sealing.seal_in(canonical(name))
    return found


def _code(checkpoint: Checkpoint, strays: list[FileProblem]) -> list[FileProblem]:
    """Return names that could run, and records that nothing refers to, where TorchScript keeps its code."""
    running = names_that_run(checkpoint.names | names_in(checkpoint.tree))
    problems = [FileProblem("code", name, "could run, when loaded without weights_only") for name in running]
    return problems if checkpoint.format == torch_zip.TORCHSCRIPT else strays + problems


def _left_empty(checkpoint: Checkpoint) -> Iterator[FileProblem]:
    """Yield the parameters that ZeRO-3 left empty, in a file that is none of DeepSpeed's own."""
    state = checkpoint.found_state()
    for name, like in state.likes.items() if state else ():
        if like.kind == PLACEHOLDER and like.shape is None:
            message = f"is empty, as ZeRO-3 leaves it on each rank: {WRITTEN_BY_ALL}"
            yield FileProblem("ranks", name, message)


def _parts(checkpoint: Checkpoint) -> list[FileProblem]:
    """Compare the files that the trainer's `--shard parts` has written with their digests."""
    if (parts := parts_beside(checkpoint.tree)) is None:
        return []
    from ..core.files.digest import sha256_of_file  # whose hashlib loads OpenSSL

    folder, problems = os.path.join(os.path.dirname(checkpoint.path), parts["folder"]), []
    for name, digest in parts["files"].items():
        path = os.path.join(folder, os.path.basename(str(name)))
        try:
            stated = shared("file", lambda _, path: (path, path), "", str, str)(sha256_of_file)(path)
            wrong = "" if stated == digest else "is not the part that was saved"
        except OSError as error:
            wrong = f"can't be read: {reason(error)}"
        if wrong:
            problems.append(FileProblem("checksum", path, wrong))
    return problems


def _compare(
    a: Checkpoint, b: Checkpoint, where: str | None, progress: Progress | None
) -> tuple[str, Comparison, str | None]:
    """Return what was compared, how it differs, and the next thing to do about that."""
    states = both_states(a, b, where)
    whole = where is None and (states is None or all(map(outside_of, (a, b), states)))
    expect([*a.storages(), *b.storages()])
    with Checksums(b, b.storages()) as checksums:  # those of `a` are among the problems already
        comparison = diff(
            a, b, state=where, model_only=not whole, as_stored=True, verify=False, progress=progress
        )
        checksums.finish()
    hint = None
    if states and not comparison.same:
        hint = stripping(a.path, *states) or stripping(b.path, *reversed(states))
    return "everything" if whole else "state", comparison, hint


def _differences(comparison: Comparison) -> list[FileProblem]:
    return [
        *(FileProblem("only-here", name, "is not in the other file") for name in comparison.only_a),
        *(FileProblem("only-there", name, "is only in the other file") for name in comparison.only_b),
        *map(_problem, comparison.changed),
    ]


def _problem(change: Change) -> FileProblem:
    if (found := change.distance) is not None:
        return FileProblem("values", change.name, f"{found.differ} of {found.of} values differ")
    kind = "form" if change.why in ("shape", "dtype") else "values"
    return FileProblem(kind, change.name, f"{change.a}, there {change.b}")


def _non_finite(
    checkpoint: Checkpoint, apart: Container[str], size: int, progress: Progress | None
) -> Iterator[tuple[str, int]]:
    """Yield tensors and how many of their values are not finite, read on several cores."""
    names: dict[tuple[object, ...], list[str]] = {}  # by view, so that ties are read once
    views: list[tuple[TensorRef, int]] = []
    for name, tensor in checkpoint.tensors():
        if real_dtype(tensor.dtype).name not in FLOATS or name in apart:
            continue
        if tensor.view not in names:
            once, repeats = without_repeats(tensor)  # an expanded tensor may be too large to read
            require_bounded(name, once, MAX_REPEATED)
            views.append((once, repeats))
        names.setdefault(tensor.view, []).append(name)
    non_finite_counts = [0] * len(views)
    left = [*_without_finite([tensor for tensor, _ in views], progress)]

    def work(number: int, chunks: Iterator[memoryview]) -> int:
        kind = real_dtype(views[left[number]][0].dtype).name
        return sum(count_non_finite(kind, chunk) for chunk in chunks)

    def of(now: Findings, piece: BytesPiece) -> Told:
        view, _ = views[left[piece.number]]
        by, told = now.piece(piece.data, first_names[left[piece.number]])
        return by, f"{real_dtype(view.dtype).name} {told}"

    first_names = [some[0] for some in names.values()]
    sharing = shared("not finite", of, 0, int, int)
    for piece, odd in map_bytes(work, [views[number][0] for number in left], size, progress, sharing):
        non_finite_counts[left[piece.number]] += odd
    counts = [odd * repeats for odd, (_, repeats) in zip(non_finite_counts, views, strict=True)]
    named = {name: odd for odd, those in zip(counts, names.values(), strict=True) for name in those}
    yield from ((name, named[name]) for name, _ in checkpoint.tensors() if named.get(name))


def _without_finite(tensors: Sequence[TensorRef], progress: Progress | None) -> Iterator[int]:
    """Yield the numbers of tensors, but not of small finite ones; small tensors are read together."""
    for first in range(0, len(tensors), MOST_PIECES):
        numbers = range(first, min(first + MOST_PIECES, len(tensors)))
        tiny: dict[str, dict[int, ByteRange]] = {}
        for number in numbers:
            data = tensors[number].data if tensors[number].is_plain else None
            if isinstance(data, ByteRange) and is_tiny(data):
                tiny.setdefault(real_dtype(tensors[number].dtype).name, {})[number] = data
        finite: set[int] = set()
        for kind, places in tiny.items() if takes_small() else ():
            found = b"".join(read_together([*places.values()]))
            if not count_non_finite(kind, memoryview(found)):
                finite.update(places)
                if progress and found:
                    progress(len(found))
        yield from (number for number in numbers if number not in finite)
