"""Stores of objects on the loopback: moto's S3 server, Azurite, and a proxy that makes faults."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.range_server import Answer, Exchange, LoopbackServer, asked

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
    env = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1"}  # so that small files have many parts
    how: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(words, env=env, **how) as server:
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


@dataclass
class Dripping(Answer):
    """An answer that is sent byte by byte."""


@dataclass
class Asked:
    """What a proxy was asked."""

    method: str
    headers: dict[str, str]  # names in lower case; what is taken away is not passed on
    body: bytes
    passed_on: Callable[[bytes], Answer]  # asks the server behind, with this body


Fault = Callable[[Asked], "Answer | None"]  # None: no answer at all


class FaultProxy(LoopbackServer):
    """Passes requests on to a server on the loopback, and makes the next of them fail.

    Attributes:
        faults: taken one a request, from the front; without one a request is passed on.
        only: a fault waits until a request of this method comes, and part of a path.
        requests: `METHOD /path?query` of each request.
        headers: those of each request, names in lower case.
    """

    def __init__(self, behind: str) -> None:
        super().__init__()
        self.behind = behind.removeprefix("http://")
        self.set()

    def set(self, *faults: Fault, method: str = "", path: str = "") -> None:
        """Make faults of the next requests, and forget the requests so far."""
        self.faults, self.only = list(faults), (method, path)
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []

    def answer(self, exchange: Exchange) -> None:
        request = exchange.request_read()
        headers = dict(request.headers)
        self.requests.append(f"{request.method} {exchange.path}")
        self.headers.append(headers)
        passed = request._replace(headers=headers)
        asked_for = Asked(
            request.method, headers, request.body, lambda body: asked(self.behind, passed._replace(body=body))
        )
        method, path = self.only
        is_due = self.faults and method in ("", request.method) and path in exchange.path
        answer = self.faults.pop(0)(asked_for) if is_due else asked_for.passed_on(request.body)
        if answer is None:
            exchange.end()
        elif isinstance(answer, Dripping):
            exchange.begin(answer)
            exchange.drip(answer.body)
        else:
            exchange.send(answer)
            if "Content-Length" in answer.headers and request.method != "HEAD":
                exchange.end()  # more was announced than was sent


def status(number: int, code: str = "", headers: Mapping[str, str] | None = None) -> Fault:
    """Answer with a status, and a store's word for it."""
    body = f"<Error><Code>{code}</Code><Message>hush-hush</Message></Error>" if code else ""
    return lambda request: Answer(number, dict(headers or {}), memoryview(body.encode()))


def cut_off(request: Asked) -> Answer:
    """Break off in the middle of the body."""
    whole = request.passed_on(request.body)
    told = {**whole.headers, "Content-Length": f"{len(whole.body)}"}
    return replace(whole, headers=told, body=whole.body[: len(whole.body) // 2])


def hung_up(request: Asked) -> None:
    """Close the connection without an answer."""


def stalled(proxy: FaultProxy) -> Fault:
    """Answer nothing until the proxy stops."""

    def wait(request: Asked) -> None:
        proxy.stopping.wait(60)

    return wait


def changed_answer(**headers: str) -> Fault:
    """Pass the request on, without its condition, and answer with other headers (`_` for `-`)."""

    def answer(request: Asked) -> Answer:
        request.headers.pop("if-match", None)
        given = request.passed_on(request.body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kept = {
            name: value for name, value in given.headers.items() if name.lower() not in map(str.lower, named)
        }
        return replace(given, headers={**kept, **named})

    return answer


def whole(request: Asked) -> Answer:
    """Ignore the range that was asked for."""
    request.headers.pop("range", None)
    return request.passed_on(request.body)


def shortened(request: Asked) -> Answer:
    """Send fewer bytes than were asked for, and announce so few."""
    given = request.passed_on(request.body)
    return replace(given, body=given.body[:-1])


def dripping(request: Asked) -> Answer:
    """Pass the request on, and send the answer byte by byte."""
    return Dripping(**vars(request.passed_on(request.body)))


def flipped(request: Asked) -> Answer:
    """Let a bit of an upload arrive turned over, at a server that compares no checksums."""
    return request.passed_on(bytes([request.body[0] ^ 1]) + request.body[1:])
