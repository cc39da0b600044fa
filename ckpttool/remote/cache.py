"""What was read to open remote checkpoints, kept for the next time: headers, directories, pickles.

Values are there only as far as they lie within the 256 kB at a beginning or an end that are read at once.

A file for each version of an object, named by a hash of its URL and identity, in the user's cache folder or
in CKPTTOOL_CACHE, 100 MB at most. Processes share it: a file appears whole, and one that is damaged is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable

from .. import system
from ..errors import UsageFault
from ..files.commit import replacing
from .store import DATED, Facts

MOST = 100_000_000  # bytes of all files together
LARGEST = 32 << 20  # bytes of one
ENDING = ".ranges"

Stretches = dict[int, bytes]  # begin -> bytes


def folder() -> str | None:
    """Return the folder of the cache; None where CKPTTOOL_CACHE is empty, which asks for none."""
    named = os.environ.get("CKPTTOOL_CACHE")
    if named is not None:
        return named or None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "ckpttool") if os.path.isabs(base) else None


def _path(url: str, facts: Facts) -> str | None:
    place = folder()
    if place is None or not facts.identity or facts.identity.startswith(DATED):  # it may have changed since
        return None
    key = json.dumps([url, facts.identity, facts.size])
    return os.path.join(place, hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest() + ENDING)


def kept(url: str, facts: Facts) -> Stretches:
    """Return what was read of this version of an object when it was opened before."""
    path = _path(url, facts)
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            facts_of_file = os.fstat(file.fileno())
            if not system.is_mine_alone(facts_of_file):
                return {}  # another user may have written what is in it
            digest, body = file.read(32), file.read(LARGEST + (1 << 20))
        os.utime(path)  # it is the least recently used that goes first
        stretches = _parsed(body) if hashlib.sha256(body).digest() == digest else {}
    except (OSError, ValueError, TypeError):
        return {}
    inside = all(begin + len(data) <= facts.size for begin, data in stretches.items())
    return stretches if inside and 0 in stretches else {}


def _parsed(body: bytes) -> Stretches:
    length = int.from_bytes(body[:4], "little")
    at, stretches = 4 + length, Stretches()
    for begin, nbytes in json.loads(body[4:at]):
        stretches[begin] = body[at : at + nbytes]
        at += nbytes
    return stretches


def keeper(url: str, facts: Facts, known: Stretches) -> Callable[[Stretches], None]:
    """Return what keeps the stretches that were read, if they are more than those known before."""
    had = {begin: len(data) for begin, data in known.items()}

    def keep(stretches: Stretches) -> None:
        path = _path(url, facts)
        nbytes = sum(map(len, stretches.values()))
        if path is None or nbytes > LARGEST or {at: len(data) for at, data in stretches.items()} == had:
            return
        places = json.dumps([[begin, len(data)] for begin, data in stretches.items()]).encode()
        body = b"".join([len(places).to_bytes(4, "little"), places, *stretches.values()])
        # A cache that can't be written (a full disk, a home that is read-only) is only slower.
        with contextlib.suppress(OSError, UsageFault):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with replacing(path) as file:
                file.write(hashlib.sha256(body).digest() + body)
            _shrink(os.path.dirname(path))

    return keep


def _shrink(place: str) -> None:
    """Remove the files that were not used for the longest time, down to MOST bytes."""
    with os.scandir(place) as entries:
        files = [(e.stat().st_mtime, e.stat().st_size, e.path) for e in entries if e.name.endswith(ENDING)]
    left = sum(size for _, size, _ in files) - MOST
    for _, size, path in sorted(files):
        if left <= 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        left -= size
