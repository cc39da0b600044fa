"""A seal read, and compared with a model: which tensors and files are not those that were sealed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.files.digest import digest_of
from ..core.files.threads import Progress
from ..core.formats.folders import folder_of
from ..core.formats.safetensors import parse_object
from ..core.remote.places import exists, is_plain, open_source_at
from ..core.tensors.ref import DTYPES, DType, is_count
from ..errors import Damaged, Unsupported
from .seal import VERSION, Hashes, SealScope, named_tensors, resources

HEX = re.compile(r"[0-9a-f]{64}")

# Bytes that a seal may have, whatever it covers, and for each tensor and file of the model: a hostile one
# could fill the memory.
USUAL, FOR_EACH = 1 << 20, 4 << 10

Mismatch = tuple[str, str]  # a tensor or file, and what is wrong with it


@dataclass(frozen=True, slots=True)
class SealedTensor:
    """What a seal says of a tensor."""

    dtype: DType
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype.name} {[*self.shape]}"


class ModelSeal:
    """The seal of a model. As a context manager it hashes the model's tensors while they are read.

    Attributes:
        path: where it lies.
        unread: files elsewhere of which only the tensors are compared, as no server tells their hash.
        covers: every byte was compared with the seal.

    Raises:
        Damaged: it is none, or what it says does not add up.
        Unsupported: it is of a later version.
        Unreadable: it is not there.
        Refused: as for `seal`.
    """

    def __init__(self, scope: SealScope, path: str) -> None:
        self.path, self.unread, self.covers, self._is_beside = path, list[str](), False, path == scope.beside
        self._inside, self._outside = named_tensors(scope.checkpoint)
        tensors = [*self._inside.values(), *self._outside.values()]
        own = scope.own()
        self._tensors, self._beside, self._files = _read(path, USUAL + FOR_EACH * (len(tensors) + len(own)))
        if not self._is_beside and self._files.keys() - own and self._files.keys() & own:
            scope = SealScope(scope.checkpoint, scope.home)  # of all in the folder
        self._scope, self._hashes = scope, Hashes(tensors)

    def __enter__(self) -> ModelSeal:
        self._hashes.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hashes.__exit__()

    def mismatches(self, progress: Progress | None = None) -> Iterator[Mismatch]:
        """Yield what is not as it was sealed; what was not read before is read now."""
        of_view = self._hashes.digests(progress)
        here, outside = (
            {name: SealedTensor(each.dtype, each.shape, of_view[each.view]) for name, each in tensors.items()}
            for tensors in (self._inside, self._outside)
        )
        changed = [*_changed(here, self._tensors)]
        both = self._beside.keys() & outside.keys()  # another format may lack an optimizer
        changed += _changed({n: outside[n] for n in both}, {n: self._beside[n] for n in both})
        yield from changed
        kept = "" if changed else ", though its tensors are"
        yield from ((name, what + kept * (what == ANOTHER)) for name, what in self._of_files(progress))

    def _of_files(self, progress: Progress | None) -> Iterator[Mismatch]:
        """Yield what is wrong with files; nothing of another form of the model, which has other files."""
        sums, own = self._files, self._scope.own()
        if not self._is_beside and sums.keys().isdisjoint(own):
            return
        names = self._scope.files()
        if self._is_beside and self._scope.folder is None and len(sums) == len(names) == 1:
            sums = dict(zip(names, sums.values(), strict=True))  # both may have got another name together
        yield from ((name, "is sealed, and is not here") for name in sorted(sums.keys() - {*names}))
        yield from ((name, "is not sealed") for name in names if name not in sums)
        both = [name for name in names if name in sums]
        remote = {name: own[name].content for name in both if name in own and not own[name].is_local}
        self.unread = [name for name, content in remote.items() if not content.startswith(TOLD)]
        self.covers = not self.unread
        found = {name: content.removeprefix(TOLD) for name, content in remote.items()}
        read = self._scope.hashed([name for name in both if name not in remote], progress)
        found |= {name: value for name, (value, _) in read}
        yield from ((n, ANOTHER) for n in both if n not in self.unread and found[n] != sums[n])


ANOTHER = "is not the file that was sealed"
TOLD = "sha256:"


def seal_of(checkpoint: Checkpoint, path: str | None = None) -> ModelSeal | None:
    """Return the seal at a path or URL, or that beside a model's file, or in its folder; None without any."""
    scope = SealScope(checkpoint, folder_of(checkpoint))
    if path is not None:
        return ModelSeal(scope, path)
    in_folder = scope if checkpoint.path == "-" else SealScope(checkpoint, scope.home)
    found = (each for each in (scope, in_folder) if checkpoint.path != "-" and exists(each.beside))
    return next((ModelSeal(each, each.beside) for each in found), None)


def _changed(here: Mapping[str, SealedTensor], there: Mapping[str, SealedTensor]) -> Iterator[Mismatch]:
    """Yield the tensors that are not as they were sealed."""
    missing = {name: each for name, each in there.items() if name not in here}
    old_names = defaultdict[SealedTensor, list[str]](list)
    for name, each in reversed(missing.items()):
        old_names[each].append(name)
    for name, found in here.items():
        sealed = there.get(name)
        if sealed is None and old_names[found]:
            del missing[old := old_names[found].pop()]
            yield name, f"is sealed as '{old[:200]}'"
        elif sealed is None:
            yield name, "is not sealed"
        elif (found.dtype, found.shape) != (sealed.dtype, sealed.shape):
            yield name, f"is {found}, sealed as {sealed}"
        elif found.sha256 != sealed.sha256:
            yield name, "has other values than were sealed"
    yield from ((name, "is sealed, and is not here") for name in missing)


# ---- The file of a seal


class BadSeal(ValueError):
    """Something that no seal says; its text follows the word "it"."""


def _read(path: str, most: int) -> tuple[dict[str, SealedTensor], dict[str, SealedTensor], dict[str, str]]:
    """Return what a seal says of tensors, of those outside of the state, and of files."""
    source = open_source_at(path)
    hint = "if you trust the model, write it anew: ckpttool seal MODEL --force"
    if source.size > most:
        raise Damaged(path, f"is too large for a seal of this model: {source.size} bytes", hint=hint)
    said = parse_object(path, source.read(0, source.size), "the seal")
    version = said.get("seal")
    if type(version) is int and version > VERSION:
        raise Unsupported(path, f"is a seal of version {version}, and this reads {VERSION}")
    try:
        tensors, outside = (
            {name: _tensor(name, each) for name, each in _object(said.get(part, {})).items()}
            for part in ("tensors", "outside")
        )
        files = {name: _file(name, each) for name, each in _object(said.get("files")).items()}
        stated = _object(_object(said.get("statement", {})).get("predicate", {}))
    except BadSeal as fault:
        raise Damaged(path, f"is no seal, or was changed: it {fault}", hint=hint) from None
    digest = digest_of(tensors, {name: each.sha256 for name, each in tensors.items()})
    holds = version == VERSION and version is not True and said.get("digest") == digest
    if not holds or (stated and stated.get("resources") not in resources(files)):
        raise Damaged(path, "is no seal, or was changed: what it says does not add up", hint=hint)
    return tensors, outside, files


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadSeal("lacks something, or has it in another form")
    return value


def _sha256(name: str, value: Any) -> str:
    if not isinstance(value, str) or not HEX.fullmatch(value):
        raise BadSeal(f"has no SHA-256 of '{name[:80]}'")
    return value


def _file(name: str, value: Any) -> str:
    if not is_plain("", name):
        raise BadSeal(f"names a file outside of its folder: '{name[:80]}'")
    return _sha256(name, value)


def _tensor(name: str, value: Any) -> SealedTensor:
    said = _object(value)
    kind, shape = said.get("dtype"), said.get("shape")
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None or not isinstance(shape, list) or not all(map(is_count, shape)):
        raise BadSeal(f"has a malformed entry for '{name[:80]}'")
    return SealedTensor(dtype, tuple(shape), _sha256(name, said.get("sha256")))
