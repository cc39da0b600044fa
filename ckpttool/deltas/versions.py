"""A folder of versions: whole checkpoints, its anchors, and deltas, each made from another version."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.formats import folders, shards
from ..core.formats.reading import open_alone
from ..core.remote.places import is_folder, names_in
from ..core.system import join
from ..errors import CkptToolError, Unreadable, UsageFault
from . import forms, header

# Where TRL keeps its files; other forms have theirs in the folder itself.
BELOW = ("anchors", "deltas")


@dataclass(frozen=True, slots=True)
class Version:
    """A version in a folder.

    Attributes:
        version: its number.
        base: the number of what it is made from; None for a whole checkpoint.
        nbytes: of its files.
        complete: it can be made of what is in the folder, or of that and a base from elsewhere.
        name: its file or folder.
        form: its format.
        problem: why it can't be made; "" where it can.
    """

    version: int
    base: int | None
    nbytes: int = field(metadata={"json": "bytes"})
    complete: bool
    name: str
    form: str | None
    problem: str = ""


def in_folder(folder: str) -> list[Version]:
    """Return the versions in a folder, the oldest first; of two of one number a whole one.

    What a writer has not put in its place yet has a name of its own, and is none.
    """
    found: dict[int, Version] = {}
    for name in _names(folder):
        each = _looked_at(folder, name, sorted(found))
        if each.version not in found or found[each.version].base is not None:
            found[each.version] = each
    problems = {number: _links(number, found)[1] for number in found}
    return [replace(found[n], complete=not problems[n], problem=problems[n]) for n in sorted(found)]


def holds_deltas(folder: str) -> bool:
    """Return whether a folder holds, in any series, a version that is made from another."""
    names = [name for named in _series(folder).values() for _, name in named]
    return any(_looked_at(folder, name, []).base is not None for name in names)


def expanded(paths: Sequence[str], version: int | None = None) -> list[str]:
    """Return paths, a folder of versions as the files that one of them is made of.

    A whole version takes the place of what stands before it. Raises Unreadable as `chain_of`, and UsageFault
    for a version where no path is such a folder.
    """
    found: list[str] = []
    for path in paths:
        if not _holds_versions(path):
            found.append(path)
            continue
        names, is_whole = chain_of(path, version)
        found = names if is_whole else [*found, *names]
    if version is not None and found == [*paths]:
        hint = "name a folder that holds versions, or leave out --version"
        raise UsageFault(f"--version {version}: no input is a folder of versions", hint=hint)
    return found


def _holds_versions(path: str) -> bool:
    if not is_folder(path):
        return False
    known = (shards.INDEX, folders.METADATA, *shards.MANIFESTS)
    return not any(name.endswith(known) for name in names_in(path)) and bool(_names(path))


def _series(folder: str) -> dict[str, list[tuple[int, str]]]:
    """Return what is named as versions are, with its number, by what stands before that."""
    names = names_in(folder)
    for below in {*BELOW} & {*names}:
        names += [f"{below}/{name}" for name in names_in(join(folder, below))]
    series: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if found := forms.stem_of(name):
            series.setdefault(found[0], []).append((found[1], name))
    return series


def _names(folder: str) -> list[str]:
    """Return the versions of one series, by number: of a form's, or the longest."""
    series = _series(folder)
    of_forms = [each for stem in ("weight_v", "delta-", "v") if (each := series.get(stem))]
    chosen = of_forms[0] if of_forms else max(series.values(), key=len, default=[])
    return [name for _, name in sorted(chosen)]


def _looked_at(folder: str, name: str, before: list[int]) -> Version:
    path, number = join(folder, name), forms.number_in(name) or 0
    try:
        with open_alone(path) as file:
            base = None
            if file.format in forms.FORMS:
                patch = forms.patch_of(file)
                number = number if patch.version is None else patch.version
                base = patch.base
                if base is None:  # TRL's, which state none
                    base = before[-1] if before else 0
            elif header.is_delta(file):
                base = forms.number_in(header.read_header(file).base.name, path) or 0
            return Version(number, base, file.nbytes, True, name, file.format)
    except CkptToolError as fault:
        return Version(number, None, 0, False, name, None, fault.reason)


def _links(version: int, found: Mapping[int, Version]) -> tuple[list[Version], str]:
    """Return what a version is made of, itself first, and what stands in its way.

    Version 0 may be missing: it is what the reader has.
    """
    links, seen = list[Version](), set[int]()
    below: int | None = version
    while below is not None and (each := found.get(below)):
        if below in seen:
            return links, f"version {links[-1].version} is its own base, by way of others"
        links.append(each)
        seen.add(below)
        if each.problem:
            return links, each.problem if below == version else f"version {below}: {each.problem}"
        below = each.base
    lacks = f"version {below} is missing, which version {links[-1].version} is made from"
    return links, lacks if below else ""


def chain_of(folder: str, version: int | None) -> tuple[list[str], bool]:
    """Return the files that a version is made of, from front to back, and whether the first is a whole one.

    Args:
        folder: a folder of versions.
        version: its number; None for the newest that can be made.

    Raises:
        Unreadable: it is not there, or can't be made; the error names the link that is missing or cut.
    """
    found = {each.version: each for each in in_folder(folder)}
    hint = f"see what is there: ckpttool inspect {shlex.quote(folder)}"
    if version is None:
        version = max((number for number, each in found.items() if each.complete), default=None)
    if version is None or version not in found:
        what = "holds no version that can be made" if version is None else f"has no version {version}"
        raise Unreadable(folder, what, hint=hint)
    each = found[version]
    if not each.complete:
        raise Unreadable(join(folder, each.name), f"can't be made: {each.problem}", hint=hint)
    links, _ = _links(version, found)
    return [join(folder, link.name) for link in reversed(links)], links[-1].base is None


def before(file: Checkpoint) -> str | None:
    """Return where the version lies that a delta of another form is made from; None where it does not."""
    patch, folder = forms.patch_of(file), os.path.dirname(file.path.rstrip("/"))
    if os.path.basename(folder) in BELOW and file.format == "trl":
        folder = os.path.dirname(folder)
    numbered = [(forms.number_in(name) or 0, name) for name in _names(folder or ".")]
    base = patch.base
    if base is None:
        base = max((number for number, _ in numbered if number < (patch.version or 0)), default=None)
    names = [name for number, name in numbered if number == base]
    return join(folder, names[0]) if names and base != patch.version else None
