"""Connections that end in bounded time, by the proxies and certificates that are set; their faults."""

from __future__ import annotations

import io
import logging
import socket
import ssl
import time
from http.client import HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

if TYPE_CHECKING:
    from urllib3 import HTTPConnectionPool, PoolManager

CONNECTIONS = 16  # to one host that are kept for the next request
PROXIES = "see HTTPS_PROXY and NO_PROXY"
TRUST = "set SSL_CERT_FILE to a file with the certificate of the authority that you trust"


class _Late(TimeoutError):
    """Headers came, but no end of them."""


class _Timely(io.RawIOBase):
    """What arrives on a connection, until a time while one is set: it bounds headers that drip."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw, self._sock = raw, sock
        self.timeout = sock.gettimeout()
        self.until = None if self.timeout is None else time.monotonic() + 2 * self.timeout  # a stall is first

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        if self.until is not None:
            self._sock.settimeout(min(self.timeout or 0, max(self.until - time.monotonic(), 1e-3)))
        try:
            return self._raw.readinto(buffer)
        except TimeoutError:
            if self.until is not None and time.monotonic() >= self.until:
                raise _Late from None
            raise

    def has_headers(self) -> None:
        self.until = None
        self._sock.settimeout(self.timeout)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    """A response whose status and headers come in bounded time, and whose body may go where it is wanted."""

    room: memoryview | None = None  # of the bytes that come next

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._timely = _Timely(self.fp.detach(), sock)
        self.fp: Any = io.BufferedReader(self._timely)

    def begin(self) -> None:
        super().begin()
        self._timely.has_headers()

    def read1(self, n: int = -1) -> bytes:
        """Return what arrives next; it lies in the room, if there is one."""
        if self.room is None or self.fp is None or self.chunked or self.length is None:
            return super().read1(n)
        view = self.room[: min(n, self.length)]
        count = self.fp.readinto1(view)
        self.length -= count
        if not self.length or (len(view) and not count):
            self.close()
        return cast(bytes, view[:count])


class Connection:
    """A connection that knows the last response on it."""

    def response_class(self, *args: Any, **kwargs: Any) -> _Response:
        self.response = _Response(*args, **kwargs)
        return self.response


def manager_by(scheme: str, proxy: str | None, stall: float) -> PoolManager:
    """Return pools that reach hosts directly, or by a proxy."""
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
        "http": _bounded(urllib3.HTTPConnectionPool),
        "https": _bounded(urllib3.HTTPSConnectionPool),
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


def _bounded(pool: type[HTTPConnectionPool]) -> type[HTTPConnectionPool]:
    connection = type("BoundedConnection", (Connection, pool.ConnectionCls), {})
    return type("Pool", (pool,), {"ConnectionCls": connection})


def _without_query(record: logging.LogRecord) -> bool:
    """Cut the query off each URL that urllib3 logs."""
    if isinstance(record.args, tuple):
        record.args = tuple(arg.partition("?")[0] if isinstance(arg, str) else arg for arg in record.args)
    return True


class Fault(Exception):
    """Why an attempt failed, and whether another one may do better."""

    def __init__(
        self, reason: str, *, passes: bool = True, asked: float | None = None, hint: str | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.passes, self.hint = reason, passes, hint
        self.asked = asked  # seconds until the next attempt, by the server's word


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
        return Fault(f"the headers do not end within {2 * stall:g} s")
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
