"""Objects behind https:// and http://, read by ranges, in requests that end in bounded time."""

from __future__ import annotations

import io
import logging
import math
import mmap
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from ...errors import Unreadable, UsageFault
from .. import system
from . import store
from .store import SLOWEST, TRAFFIC, Bytes, Facts, ListedEntry, Missing, Patience, Progress, changed

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, HTTPConnectionPool, PoolManager

CONNECTIONS = 16  # to one host that are kept for the next request
PROXIES = "see HTTPS_PROXY and NO_PROXY"
TRUST = "set SSL_CERT_FILE to a file with the certificate of the authority that you trust"


class _Late(TimeoutError):
    """What is awaited does not end, though bytes arrive; the text says what."""


class _Timely(io.RawIOBase):
    """The bytes that arrive on a connection; a time limit bounds what drips, or flows and says nothing."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw, self._sock = raw, sock
        self.timeout = sock.gettimeout()
        self.begin("the headers do not end")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        if time.monotonic() >= self.until:  # looked at before each read: the socket may never be silent
            raise _Late(self.what)
        return self._raw.readinto(buffer)

    def begin(self, what: str) -> None:
        """Begin to wait for something; `what` is said if it does not end."""
        # A silent socket ends the wait first.
        self.what, self.until = what, time.monotonic() + 2 * (self.timeout or math.inf)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    """A response with time limits, whose body is read straight into given memory."""

    room: memoryview | None = None  # for the next bytes

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._timely = _Timely(self.fp.detach(), sock)
        self.fp: Any = io.BufferedReader(self._timely)

    def read1(self, n: int = -1) -> bytes:
        """Return what arrives next; it lies in the room, if there is one."""
        self._timely.begin("the answer does not go on")  # but signs around its chunks
        if self.room is None or self.fp is None or self.chunked or self.length is None:
            return super().read1(n)
        view = self.room[: min(n, self.length)]
        nbytes = self.fp.readinto1(view)
        self.length -= nbytes
        if not self.length or (len(view) and not nbytes):
            self.close()
        return cast(bytes, view[:nbytes])


class Connection:
    """A connection that knows the last response on it, and how near the address is that it leads to."""

    allowed: str | None = None  # how near it may be, besides far away; None: as near as the user has named

    def _new_conn(self) -> socket.socket:
        sock: socket.socket = super()._new_conn()  # type: ignore[misc]
        address = sock.getpeername()[0]
        self.nearness = nearness(address)
        if self.allowed is not None and self.nearness not in ("", self.allowed):
            sock.close()
            raise too_near(address)
        return sock

    def response_class(self, *args: Any, **kwargs: Any) -> _Response:
        self.response = _Response(*args, **kwargs)
        return self.response


METADATA = {  # where machines get their credentials: of Amazon, Google, Alibaba, Azure and Oracle
    *("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
}


def nearness(host: str) -> str:
    """Return whether an address is of this machine, "loopback", or of its link or its cloud: "link-local".

    Return "" for any other, and for names but those of this machine: only a connection tells where one leads.
    """
    import ipaddress

    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return "loopback"
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(name))  # 2130706433, 0x7f.1, 127.1
        except (OSError, ValueError):
            return "link-local" if name in ("metadata", "metadata.google.internal") else ""
    if isinstance(address, ipaddress.IPv6Address):
        is_in_another = address in ipaddress.ip_network("64:ff9b::/96") or 1 < int(address) < 1 << 32
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if is_in_another else None
        address = address.ipv4_mapped or address.sixtofour or inner or address
    if address.is_loopback or address.is_unspecified:
        return "loopback"
    return "link-local" if address.is_link_local or str(address) in METADATA else ""


def too_near(address: str) -> Fault:
    """Return the fault of a redirect to an address that only the user may name."""
    what = f"the server redirects to {address}, an address of this machine or its own network"
    return Fault(f"{what}, which is not followed", passes=False, hint="name that URL itself, if you mean it")


def manager_by(scheme: str, proxy: str | None, stall: float, allowed: str | None = None) -> PoolManager:
    """Return pools of connections to hosts, direct or by a proxy, that may be no nearer than `allowed`."""
    import urllib3
    from urllib3 import connection, connectionpool

    for module in (connection, connectionpool):
        logging.getLogger(module.__name__).addFilter(_without_query)
    kept: dict[str, Any] = {
        "maxsize": CONNECTIONS,
        "timeout": urllib3.Timeout(connect=stall, read=stall),
        "ssl_context": ssl.create_default_context() if scheme == "https" else None,  # knows SSL_CERT_FILE
    }
    manager = urllib3.PoolManager(**kept) if proxy is None else _proxied(proxy, kept)
    manager.pool_classes_by_scheme = {
        "http": _bounded(urllib3.HTTPConnectionPool, allowed),
        "https": _bounded(urllib3.HTTPSConnectionPool, allowed),
    }
    return manager


def _proxied(proxy: str, kept: dict[str, Any]) -> PoolManager:
    import urllib3

    address = urllib3.util.parse_url(proxy if "://" in proxy else f"http://{proxy}")
    if address.scheme not in ("http", "https"):
        raise Fault("the proxy is none of http:// or https://", passes=False, hint=PROXIES)
    login = urllib3.make_headers(proxy_basic_auth=unquote(address.auth)) if address.auth else None
    trusted = ssl.create_default_context() if address.scheme == "https" else None
    return urllib3.ProxyManager(address.url, proxy_headers=login, proxy_ssl_context=trusted, **kept)


def _bounded(pool: type[HTTPConnectionPool], allowed: str | None) -> type[HTTPConnectionPool]:
    connection = type("BoundedConnection", (Connection, pool.ConnectionCls), {"allowed": allowed})
    return type("Pool", (pool,), {"ConnectionCls": connection})


def _without_query(record: logging.LogRecord) -> bool:
    """Cut the query off each URL that urllib3 logs."""
    if isinstance(record.args, tuple):
        record.args = tuple(arg.partition("?")[0] if isinstance(arg, str) else arg for arg in record.args)
    return True


class Fault(Exception):
    """The reason of a failed attempt, and whether another attempt may succeed."""

    def __init__(
        self, reason: str, *, passes: bool = True, asked: float | None = None, hint: str | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.passes, self.hint = reason, passes, hint
        self.asked = asked  # seconds that the server asks to wait


def named(error: Exception, stall: float, *, known: bool) -> Fault:
    """Return the fault behind an error of urllib3, whose own text may hold a signed URL.

    A host that can't be reached is tried again only if the object is known from there.
    """
    from urllib3 import exceptions as of

    cause = error.__cause__ or (error.args[-1] if error.args else None)
    if isinstance(error, of.ProxyError):
        fault = named(error.original_error, stall, known=known)
        return Fault(f"by the proxy: {fault.reason}", passes=fault.passes, hint=PROXIES)
    if isinstance(error, of.NameResolutionError):
        return Fault("the host can't be found", passes=known)
    if isinstance(cause, ssl.SSLCertVerificationError):
        what = f"the server's certificate is not trusted: {cause.verify_message}"
        return Fault(what, passes=False, hint=TRUST)
    if isinstance(error, of.NewConnectionError):
        return Fault(_reason(cause), passes=known)
    if isinstance(error, of.ConnectTimeoutError):
        return Fault(f"no connection within {stall:g} s", passes=known)
    if isinstance(cause, _Late):
        return Fault(f"{cause} within {2 * stall:g} s")
    if isinstance(error, of.TimeoutError):
        return Fault(f"no byte for {stall:g} s")
    return Fault(_reason(cause))


def _reason(cause: object) -> str:
    if isinstance(cause, IncompleteRead):
        return "the answer was cut off"
    if isinstance(cause, RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(cause, HTTPException):
        return "the server's answer is not HTTP"
    if isinstance(cause, ssl.SSLError):
        return "the encrypted connection failed"
    if isinstance(cause, OSError) and cause.errno and cause.strerror:
        return cause.strerror.lower()
    return "the connection failed"


# ---- The bytes that are wanted, compared with those that a server sends


RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")


@dataclass(slots=True)
class Wanted:
    """Bytes of an object, and the file that takes them, over all attempts."""

    url: str
    shown: str
    start: int
    stop: int | None  # None: all bytes, and not by a range
    private: Mapping[str, str]
    expected: Facts | None
    file: BinaryIO
    nearness: str | None = None  # of the URL that the user named, if this is where it led
    known: Facts | None = None  # expected, or of the answer that the file's first bytes are from

    def __post_init__(self) -> None:
        self.known = self.expected

    def asked(self) -> dict[str, str]:
        """Return the headers that ask for the bytes that are not in the file."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "ckpttool"}
        if self.stop is not None:
            headers["Range"] = f"bytes={self.start + self.file.tell()}-{self.stop - 1}"
        if self.known and self.known.identity.startswith('"'):
            headers["If-Match"] = self.known.identity
        return headers

    def agreed(self, answer: BaseHTTPResponse) -> tuple[Facts, int, bool]:
        """Return the object's facts, how many bytes of the body to take, and whether these are all of it."""
        return self._part(answer) if answer.status == 206 else self._front(answer)

    def _part(self, answer: BaseHTTPResponse) -> tuple[Facts, int, bool]:
        told = RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if told is None or self.stop is None:
            raise Fault("the server sends a part and does not tell which")
        if told[3] == "*" and self.known is None:
            raise Fault("the server does not tell its size", passes=False)
        size = self.known.size if told[3] == "*" and self.known else int(told[3])
        facts = self._unchanged(Facts(size, identity(answer, size)))
        begin, end = self.start + self.file.tell(), min(self.stop, size)
        if (int(told[1]), int(told[2]) + 1) != (begin, end):
            what = f"the server sends bytes {told[1]}-{told[2]}, not {begin}-{end - 1}"
            raise Fault(what, passes=False)
        if _length(answer) not in (None, end - begin):
            raise Fault("the server contradicts itself: Content-Length, Content-Range", passes=False)
        return facts, end - begin, True

    def _front(self, answer: BaseHTTPResponse) -> tuple[Facts, int, bool]:
        """Accept an answer with the whole object; the first bytes may be enough."""
        size = _length(answer)
        if size is None:
            raise Fault("the server does not tell its size", passes=False)
        facts = self._unchanged(Facts(size, identity(answer, size), is_ranged=False))
        if self.stop is not None and self.expected is not None:
            raise store.Unranged(self.shown, "the server sends it only from front to back")
        self.file.seek(0)
        self.file.truncate()
        nbytes = size if self.stop is None else min(self.stop, size)
        return facts, nbytes, nbytes == size

    def _unchanged(self, facts: Facts) -> Facts:
        known = self.known or facts
        if facts.size != known.size or known.identity not in ("", facts.identity):
            raise changed(self.shown)
        return facts


def identity(answer: BaseHTTPResponse, size: int) -> str:
    """Return the strong ETag, or the time of the last change and the size, or ""."""
    etag, modified = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified")
    if re.fullmatch(r'"[!#-~]+"', etag):
        return etag
    return f"{store.DATED}{modified} {size}" if modified else ""


def _length(answer: BaseHTTPResponse) -> int | None:
    told = answer.headers.get("Content-Length", "")
    return int(told) if re.fullmatch(r"[0-9]{1,19}", told) else None


# ---- Requests


REDIRECTS = 5  # that are followed for one request
PIECE = 1 << 20  # bytes of a body that are taken from a connection at a time
LONGEST_PAGE = 64 << 20  # bytes of an answer that is no object
LEFT = 1 << 12  # unwanted bytes of a body that cost less to read than a new connection
PASSING = {408, 429, 500, 502, 503, 504}  # statuses after which another attempt may succeed
MOVED = {301, 302, 303, 307, 308}


@dataclass(frozen=True, slots=True)
class Response:
    """A server's last word on one request. Its repr shows status and facts: the rest may hold secrets."""

    status: int
    headers: Mapping[str, str] = field(repr=False)  # names in any case
    body: Bytes = field(repr=False)  # b"" unless the status is 200 or 206
    url: str = field(repr=False)  # that answered, perhaps signed: for later requests, never for a message
    redirects: tuple[Mapping[str, str], ...] = field(repr=False)  # the headers of each answer before
    facts: Facts | None  # None where the server refused
    nearness: str = ""  # of the address that was asked first

    def checked(self, shown: str, credentials: str | None = None) -> Response:
        """Return this response if it has facts.

        Raises Missing for the statuses 404 and 410, Unreadable for any other refusal, with the hint
        `credentials` for 401 and 403.
        """
        if self.facts is not None:
            return self
        if self.status in (404, 410):
            raise Missing(shown, f"no such object (status {self.status})")
        if self.status in (401, 403):
            raise store.Forbidden(shown, f"access is refused (status {self.status})", hint=credentials)
        raise Unreadable(shown, f"the server answers with status {self.status}")


class Transport:
    """GET requests over one pool of connections, for all threads and hosts.

    `get` returns bytes by range, `download` fills a file, `page` returns an answer that is no object. They
    follow redirects, try again with Patience, end in bounded time and check what arrives. They take:

        url: absolute, with the secret query of a signed URL.
        shown: the object's name in errors; without that query.
        headers: e.g. Authorization. They go to the scheme, host and port of `url` alone.
        expected: facts of an earlier answer. Another size or identity now raises Damaged, by `changed`; an
            identity of "" matches any. If it is a strong ETag, it is sent as If-Match.
        nearness: of the URL that led to `url` by a redirect, as its Response has it: no nearer address is
            asked. None: `url` is the user's own.

    They return a Response for the statuses 200 and 206 and for refusals that another try won't change (401,
    403, 404, 410 …): call its `checked`, or look at its status. They raise Unreadable for everything else.
    """

    def __init__(self, patience: Patience) -> None:
        """Connect to nothing yet."""
        self._patience = patience
        self._pools: dict[tuple[str, str | None, str | None, int], PoolManager] = {}
        self._lock = threading.Lock()

    def get(
        self,
        url: str,
        start: int,
        stop: int,
        *,
        shown: str,
        headers: Mapping[str, str] | None = None,
        expected: Facts | None = None,
        nearness: str | None = None,
    ) -> Response:
        """Return the bytes from `start` to `stop`, or to the end of a smaller object.

        From a server that ignores ranges it returns the first bytes while `expected` is None, and raises
        Unranged after that.
        """
        # Its pages go back at once, where a thread's heap keeps what was freed.
        room = system.memory(stop - start) if expected and expected.size else io.BytesIO()
        wanted = Wanted(url, shown, start, stop, headers or {}, expected, cast(BinaryIO, room), nearness)
        response = self._patiently(wanted)
        body = memoryview(room) if isinstance(room, mmap.mmap) else room.getbuffer()
        return replace(response, body=body[: room.tell()])

    def download(self, url: str, file: BinaryIO, *, shown: str, expected: Facts) -> Response:
        """Fill an empty file with all of an object, in one request without a range."""
        return self._patiently(Wanted(url, shown, 0, None, {}, expected, file))

    def page(self, url: str, *, shown: str, headers: Mapping[str, str]) -> Response:
        """Return an answer of unknown length and version, such as a listing."""
        body = io.BytesIO()
        response = self._patiently(Wanted(url, shown, 0, None, headers, None, body))
        return replace(response, body=body.getvalue())

    def _patiently(self, wanted: Wanted) -> Response:
        for attempt in count(1):
            # The error that a user sees is raised outside of `except`: its context would hold the signed URL.
            outcome = self._attempted(wanted)
            if isinstance(outcome, Response):
                return outcome
            if not outcome.passes or attempt == self._patience.attempts:
                raise Unreadable(wanted.shown, outcome.reason, hint=outcome.hint)
            self._patience.wait(attempt, outcome.asked)
        raise AssertionError  # count() has no end

    def _attempted(self, wanted: Wanted) -> Response | Fault:
        from urllib3.exceptions import HTTPError

        try:
            return self._attempt(wanted)
        except Fault as fault:
            return fault
        except HTTPError as error:
            return named(error, self._patience.stall, known=wanted.known is not None)

    def _attempt(self, wanted: Wanted) -> Response:
        """Send a request for what is still missing, and take what arrives."""
        answer, url, redirects, near = self._follow(wanted)
        try:
            if answer.status in PASSING:
                raise _busy(answer)
            facts = self._take(wanted, answer)
        finally:
            leave(answer)
        return Response(answer.status, answer.headers, b"", url, redirects, facts, near)

    def _follow(self, wanted: Wanted) -> tuple[BaseHTTPResponse, str, tuple[Mapping[str, str], ...], str]:
        """Return the answer that is no redirect, its URL, the headers before it, and the first nearness."""
        urls, private, near = [wanted.url], wanted.private, wanted.nearness
        passed: list[Mapping[str, str]] = []
        while True:
            answer = self._request(urls[-1], {**wanted.asked(), **private}, near)
            location = answer.headers.get("Location")
            if near is None:
                of_name = nearness(urlsplit(urls[-1]).hostname or "")
                near = of_name if proxy_of(urls[-1]) else getattr(answer.connection, "nearness", of_name)
            if answer.status not in MOVED or location is None:
                return answer, urls[-1], tuple(passed), near
            leave(answer)
            passed.append(answer.headers)
            further = target(urls[-1], location)
            if further in urls:
                raise Fault("the server redirects in a circle", passes=False)
            if len(urls) > REDIRECTS:
                raise Fault(f"the server redirects more than {REDIRECTS} times", passes=False)
            if origin(further) != origin(wanted.url):
                private = {}  # for good: a later redirect back would be another host's wish
            urls.append(further)

    def _request(self, url: str, headers: Mapping[str, str], near: str | None) -> BaseHTTPResponse:
        TRAFFIC.count()
        try:
            return self._manager(url, near).request(
                "GET", url, headers=headers, redirect=False, retries=False, preload_content=False
            )
        except ValueError:  # its text may hold a token
            raise Fault("the URL or a header of the request is malformed", passes=False) from None

    def _take(self, wanted: Wanted, answer: BaseHTTPResponse) -> Facts | None:
        """Write the body of an answer to the file, once its headers are what was asked for."""
        if answer.status == 416 and not wanted.known and answer.headers.get("Content-Range") == "bytes */0":
            return Facts(0, identity(answer, 0))
        if answer.status in (412, 416) and wanted.known:
            raise changed(wanted.shown)
        if answer.status not in (200, 206):
            return None
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            what = f"the server sends it compressed ({encoding[:20]!a}), though asked not to"
            raise Fault(what, passes=False)
        if wanted.stop is None and wanted.expected is None:
            return self._take_page(wanted.file, answer)
        facts, nbytes, is_whole = wanted.agreed(answer)
        for chunk in self._chunks(answer, nbytes, wanted.file):
            if isinstance(chunk, memoryview):  # it lies in the file already
                wanted.file.seek(len(chunk), os.SEEK_CUR)
            else:
                wanted.file.write(chunk)
            TRAFFIC.count(requests=0, nbytes=len(chunk))
            wanted.known, nbytes = facts, nbytes - len(chunk)
        if nbytes:
            raise Fault("the answer was cut off")
        if is_whole and answer.read1(1):
            raise Fault("the server sends more bytes than it says", passes=False)
        return facts

    def _take_page(self, file: BinaryIO, answer: BaseHTTPResponse) -> Facts:
        file.seek(0)
        file.truncate()
        file.writelines(self._chunks(answer, LONGEST_PAGE + 1, file))
        if file.tell() > LONGEST_PAGE:
            raise Fault(f"the answer is longer than {LONGEST_PAGE >> 20} MiB", passes=False)
        return Facts(file.tell())

    def _chunks(self, answer: BaseHTTPResponse, most: int, file: object) -> Iterator[Bytes]:
        """Yield a body as it arrives, at most `most` bytes; chunks for a map lie in it already."""
        began, got = time.monotonic(), 0
        response = getattr(answer.connection, "response", None) if isinstance(file, mmap.mmap) else None
        while got < most:
            if response is not None and isinstance(file, mmap.mmap):
                response.room = memoryview(file)[file.tell() :]
            chunk: Bytes = answer.read1(min(PIECE, most - got), decode_content=False)
            if response is not None:
                response.room = None
            if not chunk:
                return
            got += len(chunk)
            yield chunk
            seconds = time.monotonic() - began
            if seconds > self._patience.stall and got < SLOWEST * seconds:
                raise Fault(f"fewer than {SLOWEST} bytes a second arrive")

    def _manager(self, url: str, near: str | None) -> PoolManager:
        """Return the pools of the hosts that are reached in the same way: directly, or by a proxy."""
        parts, proxy = urlsplit(url), proxy_of(url)
        if proxy is not None:  # it finds the address of a name, and its own may be near
            if near is not None and nearness(parts.hostname or "") not in ("", near):
                raise too_near(parts.hostname or "")
            near = None
        way = parts.scheme, proxy, near, os.getpid()  # a fork has no part in its parent's pools
        with self._lock:
            if way not in self._pools:
                self._pools[way] = manager_by(parts.scheme, proxy, self._patience.stall, near)
            return self._pools[way]


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a URL, if it does."""
    parts, proxies = urlsplit(url), getproxies_environment()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return None if proxy and proxy_bypass(parts.netloc.rpartition("@")[2]) else proxy


def _busy(answer: BaseHTTPResponse) -> Fault:
    """Return the fault of a busy server, with its own advice as hint."""
    from urllib3.exceptions import HTTPError

    text, seconds = b"", store.seconds_asked(answer.headers)
    with suppress(HTTPError):
        text = answer.read1(LEFT)
    code = found[1] if (found := store.CODE.search(text.decode("latin-1"))) else ""
    what, hint = f"the server answers with status {answer.status}", store.next_step(code, seconds)
    if answer.status == 429:
        what, hint = "the server asks to slow down (status 429)", hint or "wait some minutes"
    return Fault(what, asked=seconds, hint=hint)


def leave(answer: BaseHTTPResponse) -> None:
    """Give back the connection of an answer, or close it if too much of the body is left."""
    from urllib3.exceptions import HTTPError

    if answer.length_remaining is not None and answer.length_remaining <= LEFT:
        with suppress(HTTPError):
            answer.read1(LEFT)
    answer.close()
    answer.release_conn()


def target(url: str, location: str) -> str:
    """Return the target of a redirect. Raises Fault where it must not be followed."""
    try:
        target = urljoin(url, location).partition("#")[0]
        scheme, host, _ = origin(target)
    except ValueError:
        scheme = host = ""
    if scheme not in ("https", "http") or not host:
        where = f"to {scheme}://" if scheme and scheme != "https" else "to nowhere"
        raise Fault(f"the server redirects {where}, which is not followed", passes=False)
    if scheme == "http" and urlsplit(url).scheme == "https":
        raise Fault("the server redirects from https to http, which is not followed", passes=False)
    return target


def origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)


# ---- Objects


REFUSED = "ask its owner for a link that is signed and has not expired"  # the hint where access is refused


class Https:
    """The objects of one origin. No listing, no upload."""

    commit = ""

    def __init__(self, origin: str, query: str = "", patience: Patience | None = None) -> None:
        """Connect to nothing yet.

        Args:
            origin: `https://HOST:PORT`, without a slash at the end.
            query: what every URL ends in behind `?`, a secret.
            patience: bounds of each request; None: the usual ones.
        """
        self.transport = Transport(patience or Patience.usual())
        self._origin, self._query = origin, query

    def shown(self, key: str) -> str:
        """Return the URL of an object, without its query."""
        return f"{self._origin}/{quoted(key)}"

    def head(self, key: str, nbytes: int) -> tuple[bytes, Facts]:
        """Return the first bytes of an object and its facts. See `Store`."""
        body, facts = self._get(key, 0, max(nbytes, 1), None)  # a range can't be empty
        return bytes(body[:nbytes]), facts

    def read(self, key: str, facts: Facts, offset: int, nbytes: int) -> Bytes:
        """Return bytes of an object. Raises Unranged if the server ignores ranges. See `Store`."""
        return self._get(key, offset, offset + nbytes, facts)[0] if nbytes else b""

    def spool(self, key: str, facts: Facts, file: BinaryIO, most: int) -> None:
        """Fill an empty file with all of an object, in one request without a range.

        Raises Unreadable, naming the size, if it is larger than `most` bytes.
        """
        shown = self.shown(key)
        if facts.size > most:
            what = f"is sent only from front to back, and its {facts.size:,} bytes are too many for that"
            raise Unreadable(shown, what, hint="download it first")
        self.transport.download(self._url(key), file, shown=shown, expected=facts).checked(shown, REFUSED)

    def entries(self, folder: str) -> list[ListedEntry] | None:
        """Return None: HTTP has no listing."""
        return None

    def put(self, files: Mapping[str, str], *, replace: bool, progress: Progress | None = None) -> None:
        """Raise UsageFault: HTTP servers take no uploads."""
        name = self.shown(next(iter(files), ""))
        hint = "outputs are files, or lie behind hf, s3, gs or az"
        raise UsageFault(f"{name}: can't be written", hint=hint)

    def _get(self, key: str, start: int, stop: int, expected: Facts | None) -> tuple[Bytes, Facts]:
        shown = self.shown(key)
        response = self.transport.get(self._url(key), start, stop, shown=shown, expected=expected)
        response.checked(shown, REFUSED)
        assert response.facts is not None
        return response.body, response.facts

    def _url(self, key: str) -> str:
        return f"{self.shown(key)}?{self._query}" if self._query else self.shown(key)


def quoted(key: str) -> str:
    """Return a key as a URL's path. The escapes that `canonical` kept stay; any other `%` is escaped."""
    # A plus is escaped too: some stores take it for a space.
    path = quote(key, safe="/!$&'()*,;=:@~", errors="surrogateescape")
    return re.sub("%25(2F|25|23|3F)", r"%\1", path, flags=re.IGNORECASE)
