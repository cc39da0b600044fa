"""Stores of objects on the loopback: moto's S3 server, Azurite, and a proxy that makes faults."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

START = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Run moto's server in a process of its own; yield its address."""
    # It ends with its standard input, so also when this process is killed.
    # Parts that arrive after their upload was aborted make it print pages.
    words, pipe = [sys.executable, "-c", START], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdin and server.stdout
        port = next(line.split()[1] for line in server.stdout if line.startswith("port"))
        yield f"http://127.0.0.1:{port}"
        server.stdin.close()


def azurite_program() -> str | None:
    """Return Azurite's server of blobs, of npm's package `azurite`: named by AZURITE, or on the path."""
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


@contextlib.contextmanager
def azurite(program: str, folder: Path) -> Iterator[str]:
    """Run Azurite; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = [program, "--silent", "--disableTelemetry", "--location", str(folder), "--blobPort", str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        while "successfully" not in (line := server.stdout.readline()):
            assert line, "Azurite did not start"
        yield f"http://127.0.0.1:{port}"
        server.terminate()


class Answer(NamedTuple):
    """What a server answers."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: int = 0  # bytes that are announced and not sent
    drip: float = 0.0  # seconds between two bytes of the body


class Request(NamedTuple):
    """What a proxy was asked."""

    method: str
    path: str
    headers: HTTPMessage
    body: bytes
    passed_on: Callable[[bytes], Answer]  # asks the server behind, with this body


Fault = Callable[[Request], "Answer | None"]  # None: no answer at all


class FaultProxy:
    """Passes requests on to a server on the loopback, and makes the next of them fail.

    Attributes:
        faults: taken one a request, from the front; without one a request is passed on.
        only: a fault waits until a request of this method comes, and part of a path.
        requests: `METHOD /path?query` of each request.
    """

    def __init__(self, behind: str) -> None:
        self.behind = behind.removeprefix("http://")
        self.faults: list[Fault] = []
        self.only = ("", "")
        self.requests: list[str] = []
        self.headers: list[HTTPMessage] = []
        self.stopped = threading.Event()

    def set(self, *faults: Fault, method: str = "", path: str = "") -> None:
        """Make faults of the next requests, and forget the requests so far."""
        self.faults, self.only, self.requests = list(faults), (method, path), []
        self.headers = []

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Run the proxy; yield its address."""
        with ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            self.stopped.set()
            server.shutdown()

    def answer(self, request: Request) -> Answer | None:
        self.requests.append(f"{request.method} {request.path}")
        self.headers.append(request.headers)
        method, path = self.only
        if self.faults and method in ("", request.method) and path in request.path:
            return self.faults.pop(0)(request)
        return request.passed_on(request.body)


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = proxy.answer(Request(self.command, self.path, self.headers, body, self.passed_on))
            if answer is None:
                self.close_connection = True
                return
            # Of an answer to HEAD the announced length is the object's.
            length = answer.headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in (
                    "content-length",
                    "connection",
                    "date",
                    "server",
                    "transfer-encoding",
                ):
                    self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(answer.body) + answer.cut))
            self.end_headers()
            if self.command != "HEAD":
                step = 1 if answer.drip else len(answer.body) or 1
                for start in range(0, len(answer.body), step):
                    self.wfile.write(answer.body[start : start + step])
                    proxy.stopped.wait(answer.drip)
            self.close_connection = self.close_connection or answer.cut > 0

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def passed_on(self, body: bytes) -> Answer:
            with contextlib.closing(HTTPConnection(proxy.behind)) as connection:
                names = ("host", "connection", "content-length")
                headers = {name: value for name, value in self.headers.items() if name.lower() not in names}
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                return Answer(response.status, dict(response.getheaders()), response.read())

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client went away
                super().handle()

    return Handler


def status(number: int, code: str = "", headers: Mapping[str, str] | None = None) -> Fault:
    """Answer with a status, and a store's word for it."""
    body = f"<Error><Code>{code}</Code><Message>hush-hush</Message></Error>" if code else ""
    return lambda request: Answer(number, headers or {}, body.encode())


def cut_off(request: Request) -> Answer:
    """Break off in the middle of the body."""
    whole = request.passed_on(request.body)
    half = len(whole.body) // 2
    return whole._replace(body=whole.body[:half], cut=len(whole.body) - half)


def hung_up(request: Request) -> None:
    """Close the connection without an answer."""


def stalled(proxy: FaultProxy) -> Fault:
    """Answer nothing until the proxy stops."""

    def wait(request: Request) -> None:
        proxy.stopped.wait(60)

    return wait


def changed_answer(**headers: str) -> Fault:
    """Pass the request on, without its condition, and answer with other headers (`_` for `-`)."""

    def answer(request: Request) -> Answer:
        del request.headers["If-Match"]
        given = request.passed_on(request.body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kept = {
            name: value for name, value in given.headers.items() if name.lower() not in map(str.lower, named)
        }
        return given._replace(headers={**kept, **named})

    return answer


def whole(request: Request) -> Answer:
    """Ignore the range that was asked for."""
    del request.headers["Range"]
    return request.passed_on(request.body)


def shortened(request: Request) -> Answer:
    """Send fewer bytes than were asked for, and announce so few."""
    given = request.passed_on(request.body)
    return given._replace(body=given.body[:-1])


def dripping(request: Request) -> Answer:
    """Pass the request on, and send the answer byte by byte."""
    return request.passed_on(request.body)._replace(drip=0.05)


def flipped(request: Request) -> Answer:
    """Let a bit of an upload arrive turned over, at a server that compares no checksums."""
    return request.passed_on(bytes([request.body[0] ^ 1]) + request.body[1:])
