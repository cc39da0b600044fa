"""URLs in canonical form, without secrets, and the announcement of what will be read behind them.

A canonical URL is split, joined and shown like a path. Its query, which may sign it, stays in this module:
no message, JSON or cache can hold it. In its place stand `?…` and eight digits.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from ...errors import WEB, Unreadable, Unsupported, is_login
from .. import system
from ..tensors.ref import ByteRange, Computed, Source, Storage
from . import ahead

OFFLINE = "CKPTTOOL_OFFLINE"  # the variable that --offline sets
ON = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads its variables

BUCKETS, HUB = ("s3", "gs", "az"), "hf"

URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.IGNORECASE | re.DOTALL)
SIGNING = re.compile(r"\?(.*&)?(sig|signature|token|[\w-]*-(signature|credential|token))=", re.IGNORECASE)
KEPT = re.compile(r"(%2f|%25|%23|%3f)", re.IGNORECASE)  # /, # and ? in a name, and % itself

_queries: dict[str, str] = {}  # of canonical URLs


class RemotePlace(NamedTuple):
    """Where a canonical URL leads."""

    scheme: str
    store: str  # a host with its port, or a bucket; "" for the hub, where the key names the repository
    key: str
    query: str = ""  # secret


def is_url(path: str) -> bool:
    """Return whether a path is a URL, and not an existing local path that looks like one."""
    return "://" in path and URL.match(path) is not None and not os.path.lexists(path)


def canonical(path: str, revision: str | None = None) -> str:
    """Return a URL without its secrets, the path of a file:// URL, or a path as it is.

    Args:
        path: a path or URL; a canonical one stays as it is.
        revision: of a repository of the hub that names none itself.

    Raises:
        Unsupported: URLs of this scheme are not read. Unreadable: the URL is malformed, or holds a password.
    """
    if path in _queries:
        return path
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise Unreadable(path, "holds what no path can: half of a character") from None
    if "\0" in path:
        raise Unreadable(path, "holds what no path can: a zero byte")
    if not is_url(path):
        return system.local(path)
    match = URL.match(path)
    assert match is not None
    scheme, rest = match[1].lower(), match[2]
    if _has_login(scheme, rest):
        what = "holds a password, which others on this machine can see"
        raise Unreadable(path, what, hint="name it without; ask the owner for a signed link")
    if scheme == "file":
        return _local(path, rest)
    if scheme == HUB:
        return _of_hub(rest, revision)
    if os.environ.get(OFFLINE):
        raise Unreadable(path, "is not asked for while offline", hint="leave out --offline")
    if scheme in WEB:
        return _web(scheme, rest)
    if scheme in BUCKETS:
        if not rest.partition("/")[0]:
            raise Unreadable(path, "names no bucket", hint=f"for example: {scheme}://BUCKET/KEY")
        if SIGNING.search(rest):
            what = "is signed, and buckets are asked with the credentials of the environment"
            raise Unreadable(path, what, hint="name it by https://, or without what signs it")
        return f"{scheme}://{rest}"
    hint = "https, hf, s3, gs and az are read; download it first"
    raise Unsupported(path, "is a URL of a kind that is not read here", hint=hint)


def place_of(url: str) -> RemotePlace:
    """Return where a canonical URL leads."""
    scheme, _, rest = without_query(url).partition("://")
    if scheme == HUB:
        return RemotePlace(scheme, "", rest)
    store, _, key = rest.partition("/")
    return RemotePlace(scheme, store, key, _queries.get(url, ""))


def without_query(url: str) -> str:
    """Return a canonical URL without what stands in the place of its query, if it has one."""
    return url.rpartition("?…")[0] if url in _queries else url


def _has_login(scheme: str, rest: str) -> bool:
    """Return whether a URL holds a password; a web server without a dot may have `@` in its paths."""
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    is_path = scheme in WEB and re.fullmatch(r"[^:@%]*(:\d*)?", host) and rest[len(host) :][:1] == "/"
    return is_login(scheme, rest) and not is_path


def _local(path: str, rest: str) -> str:
    from urllib.parse import unquote  # here, so that paths don't pay for it

    host, slash, name = rest.partition("/")
    if host not in ("", "localhost"):
        hint = "name a file of this one: file:///PATH"
        raise Unreadable(path, f"names a file of the machine {host}", hint=hint)
    return system.path_of_url(unquote(slash + name))


def _web(scheme: str, rest: str) -> str:
    from urllib.parse import unquote, urlsplit

    begin, _, query = rest.partition("#")[0].partition("?")
    shown = f"{scheme}://{rest}"
    try:
        parts = urlsplit(f"{scheme}://{begin}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise Unreadable(shown, "is not a URL: its host or port is malformed") from None
    if not host:
        raise Unreadable(shown, "names no host", hint=f"for example: {scheme}://HOST/FILE")
    name = begin.partition("/")[2]
    path = "".join(part if KEPT.fullmatch(part) else unquote(part) for part in KEPT.split(name))
    host = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{host}{'' if port is None else f':{port}'}/{path}"
    if not query:
        return url
    import hashlib  # loads OpenSSL, which a request loads anyway

    url += f"?…{hashlib.sha256(query.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    if _queries.setdefault(url, query) != query:
        raise Unreadable(url, "can't be told from another URL of this process", hint="name one at a time")
    return url


def _of_hub(rest: str, revision: str | None) -> str:
    """Return the URL at its own revision or the given one; while offline, the path in the hub's cache."""
    from .hub import cached, split

    place = split(rest)
    if revision is not None and place.revision is None:
        name = rest.removesuffix(place.path).rstrip("/")
        rest = f"{name}@{revision.replace('/', '%2F')}" + f"/{place.path}" * bool(place.path)
        place = split(rest)
    if os.environ.get(OFFLINE) or os.environ.get("HF_HUB_OFFLINE", "").upper() in ON:
        return cached(place) or f"hf://{rest}"  # which the store refuses, and says why
    return f"hf://{rest}"


# ---- Remote reads, announced before they happen


def expect(storages: Iterable[Storage], *, as_they_lie: bool = False) -> None:
    """Announce the remote objects that an operation will read: each storage about once, in this order.

    Args:
        storages: all that will be read; those in local files are skipped.
        as_they_lie: they are read in the order of their places instead, as copies are, and joined tensors
            stretch by stretch.
    """
    seen: set[int] = set()
    jobs = list[list[ByteRange]]()
    for storage in (storages := [*storages]):  # alive: `seen` has their places in memory
        data = storage.data
        if as_they_lie and isinstance(data, Computed) and (stretches := data.stretches()):
            if id(storage) not in seen:
                jobs += ([place] for _, place in stretches if not place.source.is_local)
            seen.add(id(storage))
        elif isinstance(data, ByteRange) and data.source.is_local and not storage.origins:
            continue  # nothing to ask for, as for all that is on this machine
        elif places := _places(storage, seen):
            jobs.append(places)
    if as_they_lie:
        jobs.sort(key=lambda places: (places[0].source.place, places[0].offset))
    of_source: dict[Source, list[ahead.Range]] = defaultdict(list)
    for place in chain.from_iterable(jobs):
        of_source[place.source].append((place.offset, place.offset + place.nbytes))
    # A tensor joined from many objects uses a piece of each, two where one tensor ends and the next begins,
    # while further pieces are under way. The ends of pieces are spread, so that not all are needed at once.
    together = max((len({place.source for place in places}) for places in jobs), default=1)
    at_once = min(3 * together, together + 2 * ahead.UNDER_WAY)
    nbytes = max(ahead.SMALLEST, min(ahead.LARGEST, ahead.HELD // at_once))
    line = ahead.Line()
    waiting = {
        source: source.expect(ranges, nbytes, nbytes * (number % together) // together, line)
        for number, (source, ranges) in enumerate(of_source.items())
    }
    for place in chain.from_iterable(jobs):
        line.add(waiting[place.source], place.offset, place.offset + place.nbytes)


def expect_ranges(ranges: Iterable[ByteRange]) -> None:
    """Announce ranges of remote objects, which are read in the order of their places."""
    expect((Storage(data, "UntypedStorage") for data in ranges), as_they_lie=True)


def _places(storage: Storage, seen: set[int]) -> list[ByteRange]:
    """Return where the bytes of a storage are read; a checksum needs all that a part is taken from."""
    if id(storage) in seen:
        return []
    seen.add(id(storage))
    own = [storage.data] if isinstance(storage.data, ByteRange) else []
    below = [origin for origin in storage.origins if not own or origin.crc32 is not None]
    places = [*own, *(place for origin in below for place in _places(origin, seen))]
    return [place for place in places if not place.source.is_local]
