"""Servers on the loopback; and one of byte ranges, as slow as a link and as wrong as it is told to be.

with RangeServer({"a.pt": data}) as server:
    server.fault("stall", times=1)
    ckpttool.open(f"{server.url}/a.pt")
    assert len(server.requests) == 3

python -m tests.support.range_server FOLDER --port 0 --latency 0.02 --bandwidth 125e6
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import math
import mmap
import os
import re
import socket
import ssl
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http import HTTPStatus
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

PIECE = 1 << 17  # bytes that are sent at once
OF_ONE_HOP = {"host", "connection", "content-length", "transfer-encoding", "date", "server"}
FLIPPED = bytes(byte ^ 1 for byte in range(256))
BYTES_CHANGED = 1_700_000_000  # the time of the last change of what is no file


class Request(NamedTuple):
    """One request, as it came."""

    method: str
    path: str  # escapes and all
    query: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes = b""

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass
class Answer:
    """What is right to answer."""

    status: int
    headers: dict[str, str]
    body: memoryview = field(default_factory=lambda: memoryview(b""))


class Link:
    """A line of so many bytes a second, which all connections share."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth, self._free, self._lock = bandwidth, 0.0, threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Sleep until so many more bytes have passed."""
        with self._lock:
            self._free = free = max(self._free, time.monotonic()) + nbytes / self._bandwidth
        if (seconds := free - time.monotonic()) > 0:
            time.sleep(seconds)


@dataclass
class _Fault:
    name: str
    times: float
    skip: int
    path: str
    after: float
    options: dict[str, Any]


class LoopbackServer:
    """Answers requests in threads of this process, while the `with` block lasts.

    Attributes:
        url: the address, without a slash at its end.
        connections: how many were opened.
        link: what every byte of a body passes.
        stopping: is set when the block ends.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        bandwidth: float = math.inf,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        """Bind, and answer nothing yet.

        Args:
            host: an address of the loopback.
            port: 0 takes a free one.
            bandwidth: bytes a second, of all connections together.
            certificate: the files of a certificate and of its key; makes it https.
        """
        self.link, self.connections, self.stopping = Link(bandwidth), 0, threading.Event()
        self._listener = _Listener((host, port), Exchange)
        self._listener.site = self
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._listener.socket = context.wrap_socket(
                self._listener.socket,
                server_side=True,
                do_handshake_on_connect=False,  # in the thread of the connection, with its first byte
            )
        scheme = "https" if certificate else "http"
        self.url = f"{scheme}://{host}:{self._listener.server_address[1]}"

    def __enter__(self) -> Any:
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._listener.shutdown()
        self._listener.server_close()

    def answer(self, exchange: Exchange) -> None:
        """Read a request, and answer it."""
        raise NotImplementedError


class RangeServer(LoopbackServer):
    """A server of files, or of bytes.

    Attributes:
        content: a folder, or bytes by name. Of a name's escapes, `%2F` is part of the name.
        requests: all that came, in order.
        etag: "strong", "weak" or "" for none; may be changed at any time.
        dates: whether Last-Modified is told.
        ranges: whether Range is understood.
    """

    def __init__(
        self, content: str | os.PathLike[str] | dict[str, bytes], *, latency: float = 0.0, **given: Any
    ) -> None:
        """Bind, and answer nothing yet.

        Args:
            content: a folder, or bytes by name.
            latency: seconds before each answer.
            given: arguments of `LoopbackServer`.
        """
        super().__init__(**given)
        self.content, self.latency = content, latency
        self.requests: list[Request] = []
        self.etag, self.dates, self.ranges = "strong", True, True
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()

    def fault(
        self,
        name: str,
        *,
        times: float = math.inf,
        skip: int = 0,
        path: str = "",
        after: float = 0.0,
        **options: Any,
    ) -> None:
        """Answer wrongly from now on, until `heal`.

        Args:
            name: a name of FAULTS, or a status from 400 on.
            times: how many answers go wrong.
            skip: how many go right before.
            path: only requests whose path contains it are counted.
            after: seconds before an answer goes wrong.
            options: for the fault: `to` of "redirect", `headers` of "headers" and of a status, its `body`.
        """
        if name not in FAULTS and not re.fullmatch("[45][0-9][0-9]", name):
            raise KeyError(name)
        with self._lock:
            self._faults.append(_Fault(name, times, skip, path, after, options))

    def heal(self) -> None:
        """End all faults, and forget the requests."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()

    def answer(self, exchange: Exchange) -> None:
        """Answer a request."""
        request = exchange.request_read()
        with self._lock:
            self.requests.append(request)
            fault = self._due(request.path)
        time.sleep(self.latency + (fault.after if fault else 0.0))
        if fault is None:
            exchange.send(self.right(request))
        elif fault.name in FAULTS:
            FAULTS[fault.name](exchange, self.right(request), **fault.options)
        else:
            answer = _status(int(fault.name), fault.options.get("headers"))
            exchange.send(replace(answer, body=memoryview(fault.options.get("body", b"no\n"))))

    def _due(self, path: str) -> _Fault | None:
        for fault in self._faults:
            if fault.path in path and fault.times > 0:
                if not fault.skip:
                    fault.times -= 1
                    return fault
                fault.skip -= 1
        return None

    def right(self, request: Request) -> Answer:
        """Return the right answer to a request."""
        found = self._found(unquote(request.path.lstrip("/").replace("%2F", "%252F")))
        if found is None:
            return _status(404)
        body, tag, changed = found
        headers = {"Accept-Ranges": "bytes"}
        if self.etag:
            headers["ETag"] = f'"{tag}"' if self.etag == "strong" else f'W/"{tag}"'
        if self.dates:
            headers["Last-Modified"] = formatdate(changed, usegmt=True)
        wanted = request.headers.get("if-match", "*")
        if wanted != "*" and headers.get("ETag") not in re.split(r"\s*,\s*", wanted):
            return _status(412)
        if_range = request.headers.get("if-range")
        asked = request.range if self.ranges and if_range in (None, *headers.values()) else None
        return in_range(Answer(200, headers, body), asked)

    def _found(self, name: str) -> tuple[memoryview, str, float] | None:
        """Return the bytes of a name, their tag, and when they were changed."""
        if isinstance(self.content, dict):
            data = self.content.get(name)
            return data if data is None else (memoryview(data), f"{zlib.crc32(data):x}", BYTES_CHANGED)
        root = Path(self.content).resolve()
        path = (root / name).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            return None
        facts = path.stat()
        tag = f"{facts.st_mtime_ns:x}-{facts.st_size:x}"
        if not facts.st_size:
            return memoryview(b""), tag, facts.st_mtime
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(mapped), tag, facts.st_mtime


class _Listener(ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    site: LoopbackServer


class Exchange(BaseHTTPRequestHandler):
    """One connection: it reads requests, and sends what it is told to."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener
    asked: Request

    def handle(self) -> None:
        self.server.site.connections += 1
        with contextlib.suppress(OSError):  # the client went away
            super().handle()

    def do_GET(self) -> None:
        self.server.site.answer(self)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def request_read(self) -> Request:
        """Return the request, whose body is read now."""
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        is_chunked = headers.get("transfer-encoding") == "chunked"
        body = (
            b"".join(self._chunks()) if is_chunked else self.rfile.read(int(headers.get("content-length", 0)))
        )
        self.asked = Request(self.command, parts.path, parts.query, headers, body)
        return self.asked

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def send(self, answer: Answer) -> None:
        """Send an answer as it is."""
        self.begin(answer)
        self.pour(answer.body)

    def begin(self, answer: Answer) -> None:
        """Send the status line and the headers."""
        self.connection.sendall(self.head_of(answer))

    def head_of(self, answer: Answer) -> bytes:
        """Return the status line and the headers; Content-Length tells the body, if it is not among them."""
        headers = {"Content-Length": str(len(answer.body)), **answer.headers}
        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def pour(self, body: memoryview) -> None:
        """Send bytes of a body, as fast as the link is."""
        if self.command == "HEAD":
            return
        for start in range(0, len(body), PIECE):
            piece = body[start : start + PIECE]
            self.server.site.link.wait(len(piece))
            self.connection.sendall(piece)

    def drip(self, data: bytes | memoryview) -> None:
        """Send bytes one by one, twenty a second."""
        for at in range(len(data)):
            if self.server.site.stopping.wait(0.05):
                break
            self.connection.sendall(data[at : at + 1])
        self.end()

    def end(self) -> None:
        """Close the connection."""
        self.close_connection = True

    def hold(self) -> None:
        """Send nothing more until the server stops or the client goes away."""
        self.end()
        self.connection.settimeout(0.05)
        while not self.server.site.stopping.is_set():
            with contextlib.suppress(TimeoutError):
                if not self.connection.recv(1):
                    return


def asked(host: str, request: Request) -> Answer:
    """Return the answer of another server, without the headers that are about the connection."""
    with contextlib.closing(HTTPConnection(host)) as connection:
        headers = {name: value for name, value in request.headers.items() if name not in OF_ONE_HOP}
        path = f"{request.path}?{request.query}" if request.query else request.path
        connection.request(request.method, path, request.body, headers)
        response = connection.getresponse()
        body = memoryview(response.read())
        told = {name: value for name, value in response.getheaders() if name.lower() not in OF_ONE_HOP}
        if request.method == "HEAD":
            told["Content-Length"] = response.getheader("Content-Length", "0")
        return Answer(response.status, told, body)


def _status(status: int, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, {"Content-Type": "text/plain", **(headers or {})}, memoryview(b"no\n"))


def in_range(whole: Answer, asked: str | None) -> Answer:
    """Return the part of an answer that a Range header asks for; all of it if it asks for several."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked or "")
    if match is None or not any(match.groups()):
        return whole
    size, (first, last) = len(whole.body), match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(int(last) + 1, size) if first and last else size
    if start >= stop:
        return replace(_status(416), headers={"Content-Range": f"bytes */{size}"})
    headers = {**whole.headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    return Answer(206, headers, whole.body[start:stop])


def _moved(exchange: Exchange, to: str) -> None:
    exchange.send(replace(_status(302), headers={"Location": to}))


def _unranged(exchange: Exchange, right: Answer) -> None:
    """Send all of it, whatever was asked for."""
    headers = {name: value for name, value in exchange.asked.headers.items() if name != "range"}
    exchange.send(exchange.server.site.right(exchange.asked._replace(headers=headers)))


def _told(exchange: Exchange, right: Answer, change: Callable[[int, int, int], tuple[int, int, int]]) -> None:
    """Tell a changed Content-Range."""
    told = right.headers.get("Content-Range", "")
    numbers = [int(number) for number in re.findall(r"\d+", told)]
    if len(numbers) == 3:
        first, last, size = change(*numbers)
        right.headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    exchange.send(right)


def _shorter(exchange: Exchange, right: Answer) -> None:
    """Send a range that ends before the one that was asked for."""
    right.body = right.body[: len(right.body) // 2]
    _told(exchange, right, lambda first, last, size: (first, first + len(right.body) - 1, size))


def _longer(exchange: Exchange, right: Answer) -> None:
    """Send more bytes than the length that is told, in chunks."""
    exchange.begin(replace(right, headers={"Transfer-Encoding": "chunked", **right.headers}))
    exchange.pour(memoryview(b"%x\r\n%s\r\n0\r\n\r\n" % (len(right.body) + 3, bytes(right.body) + b"...")))


def _half(exchange: Exchange, right: Answer) -> None:
    exchange.begin(right)
    exchange.pour(right.body[: len(right.body) // 2])
    exchange.end()


def _stall(exchange: Exchange, right: Answer) -> None:
    """Send half of the body, and then nothing."""
    _half(exchange, right)
    exchange.hold()


def _reset(exchange: Exchange, right: Answer) -> None:
    """Send half of the body, and break the connection."""
    _half(exchange, right)
    exchange.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.connection.close()


def _drip_body(exchange: Exchange, right: Answer) -> None:
    exchange.begin(right)
    exchange.drip(right.body)


def _raw(exchange: Exchange, *data: bytes) -> None:
    exchange.connection.sendall(b"".join(data))
    exchange.end()


def _without_end(exchange: Exchange, begin: bytes, repeated: bytes) -> None:
    """Send bytes again and again, not fast."""
    exchange.end()
    exchange.connection.sendall(begin)
    while not exchange.server.site.stopping.wait(0.01):
        exchange.connection.sendall(repeated)


def flood(exchange: Exchange, begin: bytes, repeated: bytes) -> None:
    """Send bytes again and again, as fast as they are taken."""
    exchange.end()
    exchange.connection.sendall(begin)
    with contextlib.suppress(OSError):
        while not exchange.server.site.stopping.is_set():
            exchange.connection.sendall(repeated * 1000)


def _compressed(exchange: Exchange, right: Answer) -> None:
    """Send compressed bytes, with headers that say so."""
    body = memoryview(gzip.compress(right.body))
    exchange.send(Answer(right.status, {**right.headers, "Content-Encoding": "gzip"}, body))


def _changed(exchange: Exchange, right: Answer) -> None:
    """Send bytes of another object, with its ETag."""
    other = memoryview(bytes(right.body).translate(FLIPPED))
    headers = {**right.headers, "ETag": '"other"', "Last-Modified": formatdate(0, usegmt=True)}
    exchange.send(Answer(right.status, headers, other))


def _headers(exchange: Exchange, right: Answer, headers: Mapping[str, str]) -> None:
    """Send the right answer, with more headers, or other ones."""
    exchange.send(replace(right, headers={**right.headers, **headers}))


_hops = count(1)

# Each sends something else in place of the right answer.
FAULTS: dict[str, Callable[..., None]] = {
    "unranged": _unranged,
    "other bytes": lambda x, a: _told(x, a, lambda first, last, size: (first + 1, last + 1, size)),
    "other size": lambda x, a: _told(x, a, lambda first, last, size: (first, last, size + 1)),
    "shorter": _shorter,
    "longer": _longer,
    "cut": _half,
    "cut headers": lambda x, a: _raw(x, x.head_of(a)[:-40]),
    "reset": _reset,
    "stall": _stall,
    "silence": lambda x, _: x.hold(),
    "hang up": lambda x, _: x.end(),
    "drip": _drip_body,
    "drip headers": lambda x, _: x.drip(b"HTTP/1.1 200 OK\r\n" + b"X-Header: value\r\n" * 1000),
    "garbage": lambda x, _: _raw(x, b"\x16\x03\x01 SSH-2.0 nothing\r\n\r\n"),
    "no status": lambda x, _: _raw(x, b"HTTP/1.1 abc\r\n\r\n"),
    "many headers": lambda x, _: _raw(x, b"HTTP/1.1 200 OK\r\n", b"X-Header: value\r\n" * 10_000, b"\r\n"),
    "long header": lambda x, _: _raw(x, b"HTTP/1.1 200 OK\r\nX-Header: ", b"a" * 1_000_000, b"\r\n\r\n"),
    "broken header": lambda x, a: _raw(
        x, b"HTTP/1.1 206 Partial Content\r\n: nothing\r\nConnection: close\r\n\r\n", bytes(a.body)
    ),
    "no end of continues": lambda x, _: _without_end(x, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "flood of continues": lambda x, _: flood(x, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "no length": lambda x, a: _raw(x, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", bytes(a.body)),
    "compressed": _compressed,
    "changed": _changed,
    "circle": lambda x, _: _moved(x, x.path),
    "many hops": lambda x, _: _moved(x, f"{x.path.partition('#')[0]}&hop={next(_hops)}"),
    "to a file": lambda x, _: _moved(x, "file:///etc/passwd"),
    "to ftp": lambda x, _: _moved(x, "ftp://127.0.0.1/x"),
    "to nowhere": lambda x, _: _moved(x, "http://[::1"),
    "redirect": lambda x, _, to: _moved(x, to),
    "headers": _headers,
}


def main() -> None:
    """Serve a folder until the process ends."""
    parser = argparse.ArgumentParser(description="Serve a folder by byte ranges.")
    parser.add_argument("folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument(
        "--bandwidth", type=float, default=math.inf, help="bytes a second, of all connections"
    )
    asked = parser.parse_args()
    server = RangeServer(
        asked.folder, host=asked.host, port=asked.port, latency=asked.latency, bandwidth=asked.bandwidth
    )
    with server, contextlib.suppress(KeyboardInterrupt):
        print(server.url, flush=True)
        server.stopping.wait()


if __name__ == "__main__":
    main()
