"""A seal read, and compared with a model: which tensors and files are not those that were sealed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.files.digest import digest_of
from ..core.files.threads import Progress
from ..core.formats.folders import folder_of
from ..core.formats.safetensors import parse_object
from ..core.remote.places import exists, is_folder, is_plain, open_source_at
from ..core.system import join
from ..core.tensors.ref import ALL_DTYPES, DType, is_count
from ..errors import Damaged, Unsupported
from .covered import IN_FOLDER, Hashes, SealScope, named_tensors
from .seal import VERSION, resources

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
    file: str | None = field(default=None, compare=False)  # that its values are in, where the seal says it

    @classmethod
    def parse(cls, said: dict[str, Any]) -> SealedTensor:
        """Return what an entry says; raise an error of any kind for one that says nothing."""
        if not all(map(is_count, shape := said["shape"])):
            raise ValueError
        place = said.get("place")
        file = place[0] if isinstance(place, list) and place and isinstance(place[0], str) else None
        return cls(ALL_DTYPES[said["dtype"]], tuple(shape), _sha256(said["sha256"]), file)

    def __str__(self) -> str:
        return f"{self.dtype.name} {[*self.shape]}"


class ModelSeal:
    """The seal of a model.

    Attributes:
        hashes: hashes the model's tensors while they are read.
        unread: files elsewhere of which only the tensors are compared, as no server tells their hash.
        covers: every byte was compared with the seal.

    Raises:
        Damaged: it is none, or what it says does not add up.
        Unsupported: it is of a later version.
        Unreadable: it is not there.
        Refused: as for `seal`.
    """

    def __init__(self, scope: SealScope, path: str) -> None:
        self.unread, self.covers, self._is_beside = list[str](), False, path == scope.beside
        self._inside, self._outside = named_tensors(scope.checkpoint)
        tensors = [*self._inside.values(), *self._outside.values()]
        own = scope.own()
        most = USUAL + FOR_EACH * (len(tensors) + len(own))
        self._tensors, self._outside_sealed, self._files = _read(path, most)
        if not self._is_beside and self._files.keys() - own and self._files.keys() & own:
            scope = SealScope(scope.checkpoint, scope.home)  # of all in the folder
        self._scope, self.hashes = scope, Hashes(tensors)

    def mismatches(self, progress: Progress | None = None) -> Iterator[Mismatch]:
        """Yield what is not as it was sealed; what was not read before is read now."""
        of_view = self.hashes.of_views(progress)
        here, outside = (
            {name: SealedTensor(each.dtype, each.shape, of_view[each.view]) for name, each in tensors.items()}
            for tensors in (self._inside, self._outside)
        )
        both = self._outside_sealed.keys() & outside.keys()  # another format may lack an optimizer
        sealed = {name: self._outside_sealed[name] for name in both}
        changed = [*_changed(here, self._due()), *_changed({n: outside[n] for n in both}, sealed)]
        yield from changed
        own = {} if changed else self._scope.own()
        for name, what in self._of_files(progress):
            yield name, f"{what}, though its tensors are" if what == ANOTHER and name in own else what

    def _due(self) -> dict[str, SealedTensor]:
        """Return the sealed tensors that are to be here: of one shard not those of the others."""
        own, sealed = self._scope.own().keys(), self._tensors
        if folder_of(self._scope.checkpoint) is not None or not own <= self._files.keys():
            return sealed
        others = self._files.keys() - own
        return {
            name: each for name, each in sealed.items() if name in self._inside or each.file not in others
        }

    def _of_files(self, progress: Progress | None) -> Iterator[Mismatch]:
        """Yield what is wrong with files; nothing of another form of the model, which has other files."""
        sums, own = self._files, self._scope.own()
        if not self._is_beside and sums.keys().isdisjoint(own):
            return
        names = self._scope.files()
        if self._is_beside and self._scope.folder is None and len(sums) == len(names) == 1:
            sums = dict(zip(names, sums.values(), strict=True))  # both may have got another name together
        both = [name for name in names if name in sums and self._scope.is_file(name)]
        yield from ((name, "is sealed, and is not here") for name in sorted(sums.keys() - {*both}))
        yield from ((name, "is not sealed") for name in names if name not in sums)
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
    in_folder = scope if checkpoint.path == "-" else SealScope(checkpoint, scope.home)
    if path is not None:
        return ModelSeal(in_folder if path == in_folder.beside else scope, path)
    found = (each for each in (scope, in_folder) if checkpoint.path != "-" and exists(each.beside))
    return next((ModelSeal(each, each.beside) for each in found), None)


def seal_in(path: str) -> str | None:
    """Return the seal of the folder at a path or URL; None if it is none, or has none."""
    place = join(path.rstrip("/"), IN_FOLDER)
    return place if is_folder(path) and exists(place) else None


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
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        tensors, outside = (
            {name: SealedTensor.parse(each) for name, each in said.get(part, {}).items()}
            for part in ("tensors", "outside")
        )
        files = {name: _sha256(each) for name, each in said["files"].items()}
        stated = said.get("statement", {}).get("predicate")
        digest = digest_of(tensors, {name: each.sha256 for name, each in tensors.items()})
        holds = type(version) is int and version == VERSION and said["digest"] == digest
        holds &= not stated or stated["resources"] in resources(files)
        if holds and all(is_plain("", name) for name in files):
            return tensors, outside, files
    raise Damaged(path, "is no seal, or was changed: what it says does not add up", hint=hint)


def _sha256(value: str) -> str:
    if not HEX.fullmatch(value):
        raise ValueError
    return value
