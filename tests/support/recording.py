"""Archives of folders that frameworks saved, as the tests keep them."""

from __future__ import annotations

import tarfile
from pathlib import Path


def pack(folder: Path, archive: Path) -> None:
    """Write all that lies in a folder into an archive, alike on every machine."""
    archive.parent.mkdir(exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as file:
        for path in sorted(folder.rglob("*")):
            file.add(path, path.relative_to(folder), recursive=False, filter=_plain)


def unpack(recorded: Path, folder: Path) -> Path:
    """Unpack an archive into a folder, which is returned."""
    with tarfile.open(recorded) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 has none
        archive.extractall(folder)
    return folder


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an entry without the user, the time and the permissions of this machine."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    return member
