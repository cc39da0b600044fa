"""Every byte of a checkpoint read: checksums, values that are not finite, and another file's contents."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checksums import Checksums, expect
from ..checkpoint.ranks import require_all
from ..checkpoint.state import parts_beside
from ..errors import RanksDiffer
from ..files.failures import reason
from ..files.gathering import MOST_PIECES, is_tiny, read_together
from ..files.pieces import Progress, map_bytes
from ..formats.delta.reading import NAME as DELTA
from ..formats.pytorch import zip as torch_zip
from ..formats.reading import File, opened
from ..inert_pickle.known_names import names_in, names_that_run
from ..tensors.cast import FLOATS, count_non_finite
from ..tensors.dtypes import real_dtype
from ..tensors.ref import TensorRef
from ..tensors.source import ByteRange
from ..tensors.values import MAX_REPEATED, require_bounded, stream, without_repeats
from ..transforms.keys import stripping
from .compare import both_states, diff, outside_of
from .comparison import Change, Comparison
from .coverage import MISMATCH, ByteCoverage, FileProblem

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
    text_keys_here: tuple[str, ...] = ()
    text_keys_there: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def verify(
    file: File,
    *,
    against: File | None = None,
    state: str | None = None,
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
        finite: NaN and infinity are problems; otherwise they are only counted.
        no_code: names in the file's pickle that could run something are problems, and records of the zip that
            nothing in it refers to.
        progress: called with the number of bytes after each piece. All bytes are read once, and once more to
            compare them.

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
        expect(checkpoint.storages())
        with Checksums(checkpoint, checkpoint.storages(), every=True) as checksums:
            differing = tensors_that_differ(checkpoint, verify=False)
            non_finite = dict(_non_finite(checkpoint, differing, progress))
            damaged = checksums.damaged(progress)
        for source in checkpoint.sources:
            source.check_rest()
        coverage = ByteCoverage(checkpoint)
        problems = _code(checkpoint, coverage.strays) if no_code else []
        problems += [FileProblem("torch", name, message) for name, message in checkpoint.remarks]
        problems += [FileProblem("torch", name, f"has {fault}") for name, fault in checkpoint.index_faults()]
        problems += [FileProblem("ranks", name, fault.reason) for name, fault in differing.items()]
        where = " (in {})" if checkpoint.format == DELTA else ""  # of several files one is damaged
        problems += [FileProblem("checksum", n, MISMATCH + where.format(s.data.path)) for n, s in damaged]
        problems += coverage.problems
        problems += _parts(checkpoint)
        if finite:
            infinite = "of its values are NaN or infinite"
            problems += [
                FileProblem("non-finite", n, f"{count} {infinite}") for n, count in non_finite.items()
            ]
        compared = hint = None
        keyed: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        if against is not None:
            other = stack.enter_context(opened(against))
            compared, comparison, hint = _compare(checkpoint, other, state, progress)
            problems += _differences(comparison)
            keyed = comparison.text_keys_a, comparison.text_keys_b
    said = tuple(problems), dict(coverage.free), compared, hint
    return Verified(coverage.checked, coverage.unsummed, non_finite, *said, *keyed)


def _code(checkpoint: Checkpoint, strays: list[FileProblem]) -> list[FileProblem]:
    """Return what could run, and records that nothing refers to; TorchScript has its code in such."""
    running = names_that_run(checkpoint.names | names_in(checkpoint.tree))
    problems = [FileProblem("code", name, "could run, when loaded without weights_only") for name in running]
    return problems if checkpoint.format == torch_zip.TORCHSCRIPT else strays + problems


def _parts(checkpoint: Checkpoint) -> list[FileProblem]:
    """Compare the files that the trainer's `--save-parts` has written with their digests."""
    if (parts := parts_beside(checkpoint.tree)) is None:
        return []
    from ..files.digest import sha256_of_file  # whose hashlib loads OpenSSL

    folder, problems = os.path.join(os.path.dirname(checkpoint.path), parts["folder"]), []
    for name, digest in parts["files"].items():
        path = os.path.join(folder, os.path.basename(str(name)))
        try:
            wrong = "" if sha256_of_file(path) == digest else "is not the part that was saved"
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
        comparison = diff(a, b, state=where, model_only=not whole, verify=False, progress=progress)
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
    checkpoint: Checkpoint, apart: Container[str], progress: Progress | None
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

    for piece, odd in map_bytes(work, [views[number][0] for number in left], PIECE, progress):
        non_finite_counts[left[piece.number]] += odd
    counts = [odd * repeats for odd, (_, repeats) in zip(non_finite_counts, views, strict=True)]
    named = {name: odd for odd, those in zip(counts, names.values(), strict=True) for name in those}
    yield from ((name, named[name]) for name, _ in checkpoint.tensors() if named.get(name))


def _without_finite(tensors: Sequence[TensorRef], progress: Progress | None) -> Iterator[int]:
    """Yield the numbers of tensors without small ones of finite values, which are read together."""
    for first in range(0, len(tensors), MOST_PIECES):
        numbers = range(first, min(first + MOST_PIECES, len(tensors)))
        tiny: dict[str, dict[int, ByteRange]] = {}
        for number in numbers:
            data = tensors[number].data if tensors[number].is_plain else None
            if isinstance(data, ByteRange) and is_tiny(data):
                tiny.setdefault(real_dtype(tensors[number].dtype).name, {})[number] = data
        finite: set[int] = set()
        for kind, places in tiny.items():
            found = b"".join(read_together([*places.values()]))
            if not count_non_finite(kind, memoryview(found)):
                finite.update(places)
                if progress and found:
                    progress(len(found))
        yield from (number for number in numbers if number not in finite)


def tensors_that_differ(checkpoint: Checkpoint, *, verify: bool = True) -> dict[str, RanksDiffer]:
    """Return the error of each tensor in which the files of ranks differ, by dotted name."""
    replicated = {*checkpoint.ranks.replicated} if checkpoint.ranks else set[str]()
    found: dict[str, RanksDiffer] = {}
    for name, tensor in checkpoint.tensors():
        if name in replicated:
            try:
                for _ in stream(tensor):
                    pass
            except RanksDiffer as fault:
                if verify:
                    with Checksums(checkpoint, [(name, tensor.storage)]) as checksums:
                        checksums.finish()
                found[name] = fault
    return found
