"""Objects behind https:// and http://, whatever the server does."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("urllib3")

from ckpttool.core.remote import web
from ckpttool.core.remote.store import TRAFFIC, Facts, Missing, Patience, Unranged
from ckpttool.core.remote.web import Https, Transport, quoted
from ckpttool.errors import CkptToolError, Damaged, Unreadable, UsageFault
from tests.support.range_server import FAULTS, RangeServer, flood
from tests.support.running import ROOT, free_port, within

DATA = bytes(range(256)) * 40
HASTE = Patience(stall=10, attempts=2, first_wait=0.01, longest_wait=0.2)
BRIEF = Patience(stall=0.4, attempts=2, first_wait=0.01)  # for faults that take time
SECRET = "signature-that-nobody-may-see"
TOKEN = {"Authorization": "Bearer token-that-nobody-may-see"}

# Faults that a second attempt may not meet, and what is said of those that last. The first take time.
SLOW = {
    "stall": "no byte for 0.4 s",
    "silence": "no byte for 0.4 s",
    "drip": "fewer than 1000 bytes a second arrive",
    "drip headers": "the headers do not end within 0.8 s",
    "no end of continues": "the headers do not end within 0.8 s",
    "flood of continues": "the headers do not end within 0.8 s",
}
PASSING = {
    "cut": "the answer was cut off",
    "cut headers": "the server sends a part and does not tell which",
    "broken header": "the server sends a part and does not tell which",
    "reset": "connection reset by peer",
    "hang up": "the connection was closed without an answer",
    "garbage": "the server's answer is not HTTP",
    "no status": "the server's answer is not HTTP",
    "many headers": "the server's answer is not HTTP",
    "long header": "the server's answer is not HTTP",
    "429": "the server asks to slow down (status 429)",
    "500": "the server answers with status 500",
    "502": "the server answers with status 502",
    "503": "the server answers with status 503",
    "504": "the server answers with status 504",
}

# Faults that another attempt would meet again.
LASTING = {
    "other bytes": "the server sends bytes 101-200, not 100-199",
    "shorter": "the server sends bytes 100-149, not 100-199",
    "longer": "the server sends more bytes than it says",
    "no length": "the server does not tell its size",
    "compressed": "the server sends it compressed ('gzip'), though asked not to",
    "circle": "the server redirects in a circle",
    "many hops": "the server redirects more than 5 times",
    "to a file": "the server redirects to file://, which is not followed",
    "to ftp": "the server redirects to ftp://, which is not followed",
    "to nowhere": "the server redirects to nowhere, which is not followed",
    "400": "the server answers with status 400",
    "401": "access is refused (status 401)",
    "403": "access is refused (status 403)",
}


@pytest.fixture(scope="module")
def running() -> Iterator[RangeServer]:
    with RangeServer({"a.pt": DATA, "empty.pt": b""}) as server:
        yield server


@pytest.fixture
def server(running: RangeServer, monkeypatch: pytest.MonkeyPatch) -> RangeServer:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    running.heal()
    running.etag, running.dates, running.ranges = "strong", True, True
    running.content = {"a.pt": DATA, "empty.pt": b""}
    return running


@pytest.fixture
def elsewhere() -> Iterator[RangeServer]:
    with RangeServer({"a.pt": DATA}, host="127.0.0.2") as server:
        yield server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    made, key = str(folder / "made.pem"), str(folder / "key.pem")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *curve, *name, "-keyout", key, "-out", made]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


def store(server: RangeServer | str, patience: Patience = HASTE) -> Https:
    return Https(server if isinstance(server, str) else server.url, patience=patience)


def with_token(server: RangeServer, headers: dict[str, str] = TOKEN, patience: Patience = HASTE) -> bytes:
    """Return the first bytes of an object, asked for as the hub is."""
    response = Transport(patience).get(f"{server.url}/a.pt", 0, 5, shown="a.pt", headers=headers)
    return bytes(response.checked("a.pt").body)


def error_of(call: Callable[[], object]) -> CkptToolError:
    with pytest.raises(CkptToolError) as caught:
        call()
    return caught.value


# What a healthy server is asked.


def test_a_head_is_one_request_for_a_range(server: RangeServer) -> None:
    head, facts = store(server).head("a.pt", 100)
    assert (head, facts.size, facts.is_ranged) == (DATA[:100], len(DATA), True)
    assert [request.range for request in server.requests] == ["bytes=0-99"]


@pytest.mark.parametrize("nbytes", [0, 1, len(DATA) - 1, len(DATA), len(DATA) + 1])
def test_a_head_ends_with_the_object(server: RangeServer, nbytes: int) -> None:
    head, facts = store(server).head("a.pt", nbytes)
    assert (head, facts.size) == (DATA[:nbytes], len(DATA))


@pytest.mark.parametrize("fault", [None, "unranged"])
def test_an_empty_object_has_a_head(server: RangeServer, fault: str | None) -> None:
    if fault:
        server.fault(fault)
    head, facts = store(server).head("empty.pt", 100)
    assert (head, facts.size) == (b"", 0)


def test_ranges_are_read_where_they_lie(server: RangeServer) -> None:
    objects = store(server)
    _, facts = objects.head("a.pt", 1)
    for offset, nbytes in [(0, 1), (5, 100), (len(DATA) - 1, 1), (0, len(DATA)), (7, 0)]:
        assert objects.read("a.pt", facts, offset, nbytes) == DATA[offset : offset + nbytes]


@pytest.mark.parametrize(
    ("etag", "dates", "identity"),
    [
        ("strong", True, '"'),
        ("weak", True, "date Tue, 14 Nov 2023 22:13:20 GMT 10240"),
        ("", True, "date Tue, 14 Nov 2023 22:13:20 GMT 10240"),
        ("weak", False, ""),
        ("", False, ""),
    ],
)
def test_only_a_strong_etag_is_an_identity_that_is_sent_back(
    server: RangeServer, etag: str, dates: bool, identity: str
) -> None:
    server.etag, server.dates = etag, dates
    objects = store(server)
    _, facts = objects.head("a.pt", 1)
    objects.read("a.pt", facts, 0, 1)
    told = server.requests[-1].headers.get("if-match")
    assert facts.identity == identity or (etag == "strong" and facts.identity.startswith(identity))
    assert told == (facts.identity if etag == "strong" else None)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("a b", "/a%20b"),
        ("a?b", "/a%3Fb"),
        ("a#b", "/a%23b"),
        ("a+b", "/a%2Bb"),
        ("é/模型", "/%C3%A9/%E6%A8%A1%E5%9E%8B"),
        ("100%", "/100%25"),
        ("%zz%2", "/%25zz%252"),
        ("a%2Fb", "/a%2Fb"),
        ("a%25b", "/a%25b"),
        ("a%252Fb", "/a%252Fb"),
        ("a=b&c,d;e:f@g(h)!~'*$", "/a=b&c,d;e:f@g(h)!~'*$"),
    ],
)
def test_a_key_is_escaped_once(server: RangeServer, key: str, path: str) -> None:
    assert error_of(lambda: store(server).head(key, 1)).message.startswith(f"{server.url}{path}: ")
    assert [request.path for request in server.requests] == [path]
    assert f"/{quoted(key)}" == path


def test_the_query_of_a_key_is_sent_with_every_request(server: RangeServer) -> None:
    objects = Https(server.url, "sig=%2Ba%3D&x=1", HASTE)
    _, facts = objects.head("a.pt", 1)
    objects.read("a.pt", facts, 0, 1)
    assert [request.query for request in server.requests] == ["sig=%2Ba%3D&x=1"] * 2


def test_all_threads_share_kept_connections(server: RangeServer) -> None:
    objects = store(server)
    _, facts = objects.head("a.pt", 1)
    before = server.connections
    with ThreadPoolExecutor(16) as threads:
        got = list(threads.map(lambda offset: objects.read("a.pt", facts, offset, 10), range(200)))
    assert got == [DATA[offset : offset + 10] for offset in range(200)]
    assert server.connections - before <= 16


@pytest.mark.parametrize("fault", ["404", "429"])
def test_a_refusal_keeps_the_connection(server: RangeServer, fault: str) -> None:
    before = server.connections
    server.fault(fault)
    objects = store(server)
    for _ in range(3):
        error_of(lambda: objects.head("a.pt", 1))
    assert server.connections - before == 1


def test_nothing_is_listed_and_nothing_uploaded(server: RangeServer) -> None:
    assert store(server).entries("") is None
    with pytest.raises(UsageFault, match=r"a\.pt: can't be written"):
        store(server).put({"a.pt": "local"}, replace=True)
    assert server.requests == []


def test_every_request_and_every_byte_is_counted(server: RangeServer, elsewhere: RangeServer) -> None:
    server.fault("503", times=1)
    server.fault("redirect", times=1, to=f"{elsewhere.url}/a.pt")
    server.fault("cut", times=1)
    objects, before = (
        store(server, Patience(0.3, attempts=3, first_wait=0.01)),
        (TRAFFIC.requests, TRAFFIC.nbytes),
    )
    _, facts = objects.head("a.pt", 100)  # refused; redirected; the other server
    objects.read("a.pt", facts, 0, 100)  # cut off; resumed
    assert TRAFFIC.requests - before[0] == len(server.requests) + len(elsewhere.requests) == 5
    assert TRAFFIC.nbytes - before[1] == 200


# Servers that know no ranges.


def test_a_server_without_ranges_still_shows_the_head(server: RangeServer) -> None:
    server.content = {"a.pt": bytes(50_000_000)}
    server.fault("unranged")
    before = TRAFFIC.nbytes
    head, facts = store(server).head("a.pt", 100)
    assert (head, facts.size, facts.is_ranged) == (bytes(100), 50_000_000, False)
    assert TRAFFIC.nbytes - before == 100


def test_a_server_without_ranges_is_not_read_by_ranges(server: RangeServer) -> None:
    objects = store(server)
    _, facts = objects.head("a.pt", 1)
    server.fault("unranged")
    with pytest.raises(Unranged, match="sends it only from front to back"):
        objects.read("a.pt", facts, 5, 10)


@pytest.mark.parametrize("fault", ["cut", "reset", "503"])
def test_a_head_without_ranges_begins_again(server: RangeServer, fault: str) -> None:
    server.ranges = False
    server.fault(fault, times=1)
    assert store(server).head("a.pt", len(DATA))[0] == DATA


@pytest.mark.parametrize("fault", [None, "cut", "reset", "hang up", "503"])
def test_an_object_is_spooled_from_front_to_back(server: RangeServer, fault: str | None) -> None:
    objects, file = store(server), io.BytesIO()
    _, facts = objects.head("a.pt", 1)
    if fault:
        server.fault(fault, times=1)
    objects.spool("a.pt", facts, file, len(DATA))
    assert file.getvalue() == DATA
    assert [request.range for request in server.requests[1:]] == [None] * (2 if fault else 1)


def test_an_object_that_is_too_large_is_not_spooled(server: RangeServer) -> None:
    error = error_of(lambda: store(server).spool("a.pt", Facts(len(DATA)), io.BytesIO(), len(DATA) - 1))
    assert "10,240 bytes" in error.message
    assert error.hint == "download it first"
    assert server.requests == []


@pytest.mark.parametrize("fault", ["changed", "compressed", "no length", "404"])
def test_a_spooled_object_is_checked(server: RangeServer, fault: str) -> None:
    objects = store(server)
    _, facts = objects.head("a.pt", 1)
    server.fault(fault)
    with pytest.raises((Unreadable, Damaged)):
        objects.spool("a.pt", facts, io.BytesIO(), len(DATA))


# Faults.


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_not_noticed(server: RangeServer, fault: str) -> None:
    objects = store(server)
    server.fault(fault, times=1)
    head, facts = objects.head("a.pt", 100)
    server.fault(fault, times=1)
    assert (head, objects.read("a.pt", facts, 100, 100)) == (DATA[:100], DATA[100:200])
    assert len(server.requests) == 4


@pytest.mark.parametrize("fault", SLOW)
def test_a_delay_that_passes_is_not_noticed(server: RangeServer, fault: str) -> None:
    server.fault(fault, times=1)
    assert store(server, BRIEF).head("a.pt", len(DATA))[0] == DATA


@pytest.mark.parametrize(("fault", "says"), [*PASSING.items(), *SLOW.items()])
def test_a_fault_that_stays_is_named_in_bounded_time(server: RangeServer, fault: str, says: str) -> None:
    objects = store(server, BRIEF if fault in SLOW else HASTE)
    server.fault(fault)
    with within(5):
        error = error_of(lambda: objects.head("a.pt", len(DATA)))
    assert isinstance(error, Unreadable)
    assert error.message == f"{server.url}/a.pt: {says}"
    assert len(server.requests) == 2


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_would_come_again_is_named_at_once(server: RangeServer, fault: str) -> None:
    objects = store(server)
    server.fault(fault)
    error = error_of(lambda: objects.read("a.pt", Facts(len(DATA)), 100, 100))
    assert isinstance(error, Unreadable)
    assert error.message == f"{server.url}/a.pt: {LASTING[fault]}"
    assert len(server.requests) == (6 if fault == "many hops" else 1)


def test_no_fault_is_left_out() -> None:
    elsewhere = {"unranged", "other size", "changed", "redirect", "headers"}
    assert (
        set(FAULTS)
        == {*SLOW, *PASSING, *LASTING} - {name for name in {*SLOW, *PASSING, *LASTING} if name.isdigit()}
        | elsewhere
    )


def test_what_arrived_before_a_cut_is_not_asked_for_again(server: RangeServer) -> None:
    objects = store(server)
    _, facts = objects.head("a.pt", 1)
    server.fault("cut", times=1)
    assert objects.read("a.pt", facts, 1000, 200) == DATA[1000:1200]
    assert [request.range for request in server.requests[1:]] == ["bytes=1000-1199", "bytes=1100-1199"]


def test_what_a_lasting_cut_leaves_is_cut_off_again_until_patience_ends(server: RangeServer) -> None:
    server.fault("cut")
    error_of(lambda: store(server, Patience(10, attempts=4, first_wait=0.01)).head("a.pt", 160))
    ranges = ["bytes=0-159", "bytes=80-159", "bytes=120-159", "bytes=140-159"]
    assert [request.range for request in server.requests] == ranges


@pytest.mark.parametrize("status", ["404", "410"])
def test_an_object_that_is_not_there_is_missing(server: RangeServer, status: str) -> None:
    server.fault(status)
    with pytest.raises(Missing, match=rf"a\.pt: no such object \(status {status}\)"):
        store(server).head("a.pt", 1)


@pytest.mark.parametrize("status", ["401", "403"])
def test_who_is_refused_reads_what_to_do(server: RangeServer, status: str) -> None:
    server.fault(status)
    error = error_of(lambda: store(server).head("a.pt", 1))
    assert "a link that is signed" in str(error.hint)


@pytest.mark.parametrize("asked", ["0", formatdate(0, usegmt=True), "5", formatdate(4e9, usegmt=True)])
def test_a_server_that_asks_for_time_gets_it_within_bounds(server: RangeServer, asked: str) -> None:
    objects = store(server, Patience(stall=10, attempts=2, first_wait=20, longest_wait=0.3))
    server.fault("429", times=1, headers={"Retry-After": asked})
    began = time.monotonic()
    objects.head("a.pt", 1)
    waited = time.monotonic() - began
    assert waited > 0.29 if asked in ("5", formatdate(4e9, usegmt=True)) else waited < 5


HINTS = {
    "Retry-After": ({"Retry-After": "120"}, b"", "the server asks to be left alone for 120 s"),
    "a code": ({}, b"<Error><Code>SlowDown</Code></Error>", "fewer requests (SlowDown): wait a minute"),
    "both": ({"Retry-After": "7"}, b"<Code>SlowDown</Code>", "fewer requests (SlowDown), in 7 s"),
    "a code that asks for nothing": ({}, b"<Code>InternalError</Code>", None),
    "a page": ({}, b"<html>" * 10_000, None),
    "a time beyond reason": ({"Retry-After": "999999999"}, b"", None),
}


@pytest.mark.parametrize("answer", HINTS)
def test_what_a_busy_server_asks_for_is_the_hint(server: RangeServer, answer: str) -> None:
    headers, body, said = HINTS[answer]
    server.fault("503", headers=headers, body=body)
    error = error_of(lambda: store(server).head("a.pt", 1))
    assert said in (error.hint or "") if said else error.hint is None
    assert "status 503" in error.message


@pytest.mark.parametrize("asked", ["soon", "-1", "1e9", "Mon, 99 Foo", "9" * 40])
def test_a_wait_that_is_nonsense_is_not_asked_for(server: RangeServer, asked: str) -> None:
    server.fault("503", times=1, headers={"Retry-After": asked})
    assert store(server).head("a.pt", 1)[0] == DATA[:1]


# Objects that change.


@pytest.mark.parametrize("fault", ["changed", "other size"])
@pytest.mark.parametrize("etag", ["strong", "weak"])
def test_an_object_that_changes_between_answers_is_noticed(
    server: RangeServer, fault: str, etag: str
) -> None:
    server.etag = etag
    objects = store(server)
    _, facts = objects.head("a.pt", 1)
    server.fault(fault)
    with pytest.raises(Damaged, match=r"a\.pt: changed while it was read"):
        objects.read("a.pt", facts, 0, 100)


@pytest.mark.parametrize("fault", ["changed", "other size"])
def test_an_object_that_changes_while_its_head_is_resumed_is_noticed(server: RangeServer, fault: str) -> None:
    server.fault("cut", times=1)
    server.fault(fault)
    with pytest.raises(Damaged, match="changed while it was read"):
        store(server).head("a.pt", 100)


@pytest.mark.parametrize(
    ("etag", "other"),
    [(etag, other) for etag in ("strong", "") for other in (DATA[:10], DATA + DATA, b"")]
    + [("strong", bytes(len(DATA)))],
)
def test_an_object_that_is_replaced_is_noticed(server: RangeServer, etag: str, other: bytes) -> None:
    server.etag = etag
    objects = store(server)
    _, facts = objects.head("a.pt", 1)
    server.content = {"a.pt": other}
    with pytest.raises(Damaged, match="changed while it was read"):
        objects.read("a.pt", facts, 100, 100)


# Redirects.


def test_a_token_goes_nowhere_else(server: RangeServer, elsewhere: RangeServer) -> None:
    with RangeServer({"a.pt": DATA}) as port:
        for other in (elsewhere, port):
            server.fault("redirect", times=1, to=f"{other.url}/a.pt?sig={SECRET}")
            assert with_token(server) == DATA[:5]
            assert "authorization" not in other.requests[-1].headers
    assert [request.headers["authorization"] for request in server.requests] == [TOKEN["Authorization"]] * 2


def test_a_token_does_not_come_back_by_a_redirect(server: RangeServer, elsewhere: RangeServer) -> None:
    server.fault("redirect", times=1, to=f"{elsewhere.url}/a.pt")
    elsewhere.fault("redirect", to=f"{server.url}/a.pt?back")
    with_token(server)
    assert ["authorization" in request.headers for request in server.requests] == [True, False]


def test_a_token_follows_within_its_origin(server: RangeServer) -> None:
    server.fault("redirect", times=1, to="/a.pt?again")
    with_token(server)
    assert ["authorization" in request.headers for request in server.requests] == [True, True]


def test_five_redirects_are_followed(server: RangeServer) -> None:
    for number in range(5):
        server.fault("redirect", times=1, to=f"/a.pt?{number}")
    assert store(server).head("a.pt", 5)[0] == DATA[:5]


def test_a_circle_over_two_hosts_is_named(server: RangeServer, elsewhere: RangeServer) -> None:
    server.fault("redirect", to=f"{elsewhere.url}/a.pt")
    elsewhere.fault("redirect", to=f"{server.url}/a.pt")
    assert "in a circle" in error_of(lambda: store(server).head("a.pt", 5)).message


def seem_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have 127.0.0.2 stand for an address of another machine."""
    real = web.nearness
    monkeypatch.setattr(web, "nearness", lambda host: "" if host == "127.0.0.2" else real(host))


TO_THIS = ("127.0.0.1", "localhost", "2130706433", "127.1", "[::ffff:127.0.0.1]", "0x7f000001")


@pytest.mark.parametrize("host", TO_THIS)
def test_no_redirect_from_elsewhere_leads_to_this_machine(
    server: RangeServer, elsewhere: RangeServer, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    seem_elsewhere(monkeypatch)
    target = f"{server.url.replace('127.0.0.1', host)}/a.pt"
    assert store(server).head("a.pt", 5)[0] == DATA[:5]
    elsewhere.fault("redirect", to=target)
    asked = len(server.requests)
    for kept in (store(elsewhere), store(elsewhere)):
        error = error_of(lambda: kept.head("a.pt", 5))  # noqa: B023
        assert "which is not followed" in error.message and "redirects to" in error.message
    assert len(server.requests) == asked
    transport = Transport(HASTE)  # which has a connection to it
    transport.get(f"{server.url}/a.pt", 0, 5, shown="a.pt")
    assert "not followed" in error_of(lambda: transport.get(f"{elsewhere.url}/a.pt", 0, 5, shown="a")).message
    led = partial(transport.get, f"{server.url}/a.pt", 0, 5, shown="a.pt", nearness="")
    assert "not followed" in error_of(led).message  # a place that was found before, by a name that may move
    assert len(server.requests) == asked + 1
    server.fault("redirect", times=1, to=f"{server.url}/a.pt?again")  # a server here may lead to another here
    assert store(server).head("a.pt", 5)[0] == DATA[:5]


def test_no_redirect_by_a_proxy_names_this_machine(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.url)
    for host in ("169.254.169.254", "2852039166", "localhost", "[::1]", "metadata.google.internal"):
        server.fault("redirect", times=1, to=f"http://{host}/a.pt")
        asked = len(server.requests)
        assert "not followed" in error_of(lambda: store("http://far.invalid").head("a.pt", 5)).message
        assert len(server.requests) == asked + 1
    server.fault("redirect", times=1, to="http://far.other/a.pt")
    assert store("http://far.invalid").head("a.pt", 5)[0] == DATA[:5]


@pytest.mark.parametrize(
    ("host", "how_near"),
    [
        *[
            (host, "loopback")
            for host in ("127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1")
        ],
        *[
            (host, "loopback")
            for host in ("localhost", "a.localhost.", "2130706433", "0177.1", "2002:7f00:1::")
        ],
        *[(host, "link-local") for host in ("169.254.169.254", "fe80::1%eth0", "::ffff:169.254.1.1")],
        *[(host, "link-local") for host in ("64:ff9b::a9fe:a9fe", "fd00:ec2::254", "100.100.100.200")],
        *[(host, "link-local") for host in ("2852039166", "0xa9fea9fe", "METADATA.google.internal.")],
        *[
            (host, "")
            for host in ("8.8.8.8", "10.0.0.1", "192.168.1.1", "2001:db8::1", "h.org", "", "1.2.3.4.5")
        ],
    ],
)
def test_how_near_an_address_is(host: str, how_near: str) -> None:
    assert web.nearness(host) == how_near


def without_end(server: RangeServer, begin: bytes, repeated: bytes) -> str:
    """Return the error where an answer begins in one way, and goes on in another for ever."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(FAULTS, "flood", lambda x, _: flood(x, begin, repeated))
    try:
        server.fault("flood")
        began = time.monotonic()
        transport = Transport(replace(BRIEF, attempts=1))
        error = error_of(lambda: transport.page(f"{server.url}/a.pt", shown="a.pt", headers={}))
        assert time.monotonic() - began < 5
        return error.message
    finally:
        monkeypatch.undo()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\nLink: x\r\n\r\n"),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"X-Trailer: x\r\n"),
        (CHUNKED + b"1;", b"extension"),
        (b"HTTP/1.1 200 OK\r\n", b"X-Header: x\r\n"),
        (b"HTTP/1.1 302 Found\r\n", b"X-Header: x\r\n"),
    ],
)
def test_an_answer_without_an_end_ends_in_bounded_time(
    server: RangeServer, begin: bytes, repeated: bytes
) -> None:
    said = without_end(server, begin, repeated)
    assert "end within" in said or "go on within" in said or "not HTTP" in said


def test_cookies_are_not_kept(server: RangeServer) -> None:
    server.fault("headers", headers={"Set-Cookie": "a=b"})
    objects = store(server)
    objects.head("a.pt", 5)
    objects.head("a.pt", 5)
    assert "cookie" not in server.requests[-1].headers


def test_the_transport_tells_where_it_was_led(server: RangeServer, elsewhere: RangeServer) -> None:
    target = f"{elsewhere.url}/a.pt?sig={SECRET}"
    server.fault("redirect", to=target)
    transport = Transport(HASTE)
    response = transport.get(f"{server.url}/a.pt", 0, 5, shown="a.pt")
    assert (response.url, len(response.redirects)) == (target, 1)
    assert response.redirects[0]["location"] == target
    assert SECRET not in repr(response)
    assert transport.get(target, 5, 9, shown="a.pt", expected=response.facts).body == DATA[5:9]
    elsewhere.fault("403")
    refused = transport.get(target, 5, 9, shown="a.pt", expected=response.facts)
    assert (refused.status, refused.facts, refused.body) == (403, None, b"")


# Hosts that can't be reached.


def test_a_port_where_nobody_listens_refuses(server: RangeServer) -> None:
    error = error_of(lambda: store(f"http://127.0.0.1:{free_port()}").head("a.pt", 1))
    assert error.message.endswith("/a.pt: connection refused")


def test_a_host_without_a_name_server_can_not_be_found(server: RangeServer) -> None:
    error = error_of(lambda: store("http://nowhere.invalid").head("a.pt", 1))
    assert error.message == "http://nowhere.invalid/a.pt: the host can't be found"


def test_a_host_that_went_away_is_asked_again(server: RangeServer) -> None:
    objects = store(f"http://127.0.0.1:{free_port()}")
    before = TRAFFIC.requests
    assert "connection refused" in error_of(lambda: objects.read("a.pt", Facts(100), 0, 1)).message
    assert TRAFFIC.requests - before == HASTE.attempts


@pytest.mark.parametrize("origin", ["http://a..b", f"http://{'a' * 70}.b", "http://[::1"])
def test_an_origin_that_is_none_is_unreadable(server: RangeServer, origin: str) -> None:
    error = error_of(lambda: store(origin).head("a.pt", 1))
    assert isinstance(error, Unreadable)
    assert error.message.endswith("the URL or a header of the request is malformed")


def test_a_token_with_a_line_break_is_not_shown(server: RangeServer) -> None:
    error = error_of(lambda: with_token(server, {"Authorization": f"Bearer {SECRET}\n"}))
    assert "a header of the request is malformed" in error.message
    assert SECRET not in everything_of(error)


# Encryption and proxies.


def test_a_certificate_that_is_trusted_by_the_environment(
    server: RangeServer, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    with RangeServer({"a.pt": DATA}, certificate=certificate) as safe:
        objects = store(safe)
        head, facts = objects.head("a.pt", 100)
        for fault in ("cut", "reset", "hang up", "garbage"):
            safe.fault(fault, times=1)
            assert objects.read("a.pt", facts, 100, 100) == DATA[100:200]
        assert head == DATA[:100]
        safe.fault("drip headers", times=1)
        assert store(safe, replace(BRIEF, attempts=5)).head("a.pt", 100)[0] == DATA[:100]
        safe.fault("redirect", to=f"{server.url}/a.pt")
        error = error_of(lambda: with_token(safe))
    assert error.message.endswith("the server redirects from https to http, which is not followed")
    assert server.requests == []


def test_a_redirect_to_https_is_followed_without_the_token(
    server: RangeServer, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    with RangeServer({"a.pt": DATA}, certificate=certificate) as safe:
        server.fault("redirect", to=f"{safe.url}/a.pt")
        assert with_token(server) == DATA[:5]
        assert "authorization" not in safe.requests[0].headers


def test_a_certificate_that_nobody_trusts_is_refused_at_once(
    server: RangeServer, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with RangeServer({"a.pt": DATA}, certificate=certificate) as safe:
        error = error_of(lambda: store(safe).head("a.pt", 1))
        assert safe.requests == []
    assert "the server's certificate is not trusted: self" in error.message
    assert "SSL_CERT_FILE" in str(error.hint)


def test_http_goes_by_the_proxy(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.url.replace("//", "//user:p%40ss@"))
    assert store("http://nowhere.invalid").head("a.pt", 5)[0] == DATA[:5]
    assert server.requests[0].headers["host"] == "nowhere.invalid"
    assert server.requests[0].headers["proxy-authorization"] == "Basic dXNlcjpwQHNz"


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_hosts_without_proxy_are_reached_directly(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv(name, "example.org,127.0.0.1")
    assert store(server).head("a.pt", 5)[0] == DATA[:5]


@pytest.mark.parametrize(
    ("proxy", "says"),
    [
        ("http://user:PASSWORD@127.0.0.1:{port}", "by the proxy: connection refused"),
        ("user:PASSWORD@127.0.0.1:{port}", "by the proxy: connection refused"),
        ("socks5://user:PASSWORD@127.0.0.1:{port}", "the proxy is none of http:// or https://"),
    ],
)
def test_a_proxy_that_does_not_work_is_named(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch, proxy: str, says: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.format(port=free_port()))
    error = error_of(lambda: store(server).head("a.pt", 5))
    assert error.message.endswith(says)
    assert "PROXY" in str(error.hint)
    assert "PASSWORD" not in everything_of(error)


class Tunnel(socketserver.StreamRequestHandler):
    """A proxy for one CONNECT."""

    def handle(self) -> None:
        host, _, port = self.rfile.readline().split()[1].decode().partition(":")
        while self.rfile.readline().strip():
            pass
        with socket.create_connection((host, int(port))) as far:
            self.wfile.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            threading.Thread(target=self.relay, args=(far, self.connection), daemon=True).start()
            self.relay(self.connection, far)

    def relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_https_goes_through_the_proxy(
    server: RangeServer, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    socketserver.ThreadingTCPServer.daemon_threads = True
    with (
        RangeServer({"a.pt": DATA}, certificate=certificate) as safe,
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as proxy,
    ):
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.server_address[1]}")
        assert store(safe).head("a.pt", 5)[0] == DATA[:5]
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port()}")
        assert "by the proxy: connection refused" in error_of(lambda: store(safe).head("a.pt", 5)).message
        proxy.shutdown()


# Secrets.


def everything_of(error: BaseException | None) -> str:
    """Return all that a print, a log or a traceback could show of an error and of those behind it."""
    text = "".join(traceback.format_exception(error))
    while error is not None:
        text += f"{error} {error!r} {vars(error)}"
        error = error.__cause__ or error.__context__
    return text


def raised_by(call: Callable[[], object]) -> CkptToolError | None:
    try:
        call()
    except CkptToolError as error:
        return error
    return None


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What is logged at any level, with tracebacks. (caplog is off: see pyproject.toml.)"""
    root, handler = logging.getLogger(), logging.StreamHandler(io.StringIO())
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler.stream
    root.setLevel(before)
    root.removeHandler(handler)


@pytest.mark.parametrize("fault", [*FAULTS, "400", "401", "403", "404", "410", "412", "416", "429", "500"])
@pytest.mark.parametrize("redirected", [False, True])
def test_what_signs_a_url_is_never_shown(
    server: RangeServer,
    elsewhere: RangeServer,
    logged: io.StringIO,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    redirected: bool,
) -> None:
    if redirected:
        server.fault("redirect", to=f"{elsewhere.url}/a.pt?sig={SECRET}")
    options = {"redirect": {"to": f"//[{SECRET}?{SECRET}"}, "headers": {"headers": {"ETag": '"x"'}}}
    (elsewhere if redirected else server).fault(fault, **options.get(fault, {}))
    objects = Https(server.url, f"sig={SECRET}", brief := Patience(0.05, attempts=1))
    shown = repr(objects) + objects.shown("a.pt")
    errors = [
        raised_by(lambda: with_token(server, patience=brief)),
        raised_by(lambda: objects.head("a.pt", len(DATA))),
        raised_by(lambda: objects.read("a.pt", Facts(len(DATA), '"x"'), 0, 100)),
        raised_by(lambda: objects.spool("a.pt", Facts(len(DATA)), io.BytesIO(), len(DATA))),
    ]
    assert not any(error and (error.__cause__ or error.__context__) for error in errors)
    shown += "".join(map(everything_of, errors)) + logged.getvalue() + "".join(capfd.readouterr())
    assert "that-nobody-may-see" not in shown
    assert "/a.pt" in shown


# Servers of others, and the one of the tests.


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if not program:
        pytest.skip("nginx is not installed")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    (folder / "files").mkdir()
    (folder / "files/a b.txt").write_bytes(DATA)
    (folder / "files/empty.pt").touch()
    kinds = " ".join(
        f"{kind}_temp_path temp;" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    places = "location /whole/ { alias files/; max_ranges 0; } location / { root files; }"
    (folder / "nginx.conf").write_text(
        f"user root; daemon off; pid nginx.pid; error_log stderr; events {{}} http {{ access_log off; {kinds}"
        f" gzip on; gzip_types *; server {{ listen 127.0.0.1:{port}; {places} }} }}"
    )
    command = [program, "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def test_nginx_is_read_by_ranges(server: RangeServer, nginx: str) -> None:
    objects = store(nginx)
    head, facts = objects.head("a b.txt", 100)
    assert (head, facts.size, facts.identity[0]) == (DATA[:100], len(DATA), '"')
    assert objects.read("a b.txt", facts, 1000, 200) == DATA[1000:1200]
    assert objects.head("empty.pt", 10)[1].size == 0
    with pytest.raises(Missing):
        objects.head("none.pt", 10)
    with pytest.raises(Damaged, match="changed while it was read"):
        objects.read("a b.txt", facts._replace(identity='"other"'), 0, 10)


def test_nginx_without_ranges_is_read_from_front_to_back(server: RangeServer, nginx: str) -> None:
    objects, file = store(nginx), io.BytesIO()
    head, facts = objects.head("whole/a b.txt", 100)
    assert (head, facts.is_ranged) == (DATA[:100], False)
    with pytest.raises(Unranged):
        objects.read("whole/a b.txt", facts, 1000, 200)
    objects.spool("whole/a b.txt", facts, file, len(DATA))
    assert file.getvalue() == DATA


def test_the_range_server_runs_as_a_program(server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(DATA)
    command = [sys.executable, "-m", "tests.support.range_server", str(tmp_path), "--latency", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert store(url).head("a.pt", 100)[0] == DATA[:100]
        with pytest.raises(Missing):
            store(url).head("%2e%2e/a.pt", 100)
        process.terminate()


def test_the_range_server_is_as_slow_as_its_link(server: RangeServer) -> None:
    with RangeServer({"a.pt": bytes(1_000_000)}, latency=0.05, bandwidth=10e6) as slow:
        objects = store(slow)
        began = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _: objects.head("a.pt", 1_000_000), range(2)))
    assert 0.25 <= time.monotonic() - began < 5
