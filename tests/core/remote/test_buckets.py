"""Buckets read and written: moto's S3 server, which also speaks Google's XML, Azurite, and faults between."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import pytest
import torch

from ckpttool.core.cli.failure import left_by
from ckpttool.core.remote import bucket_settings, buckets
from ckpttool.core.remote import buckets as bucket_uploads
from ckpttool.core.remote.buckets import Bucket
from ckpttool.core.remote.store import TRAFFIC, Facts, ListedEntry, Missing, Patience, Unranged
from ckpttool.errors import CkptToolError, Damaged, OutputExists, Unreadable, UsageFault
from tests.support import bucket_servers as servers
from tests.support.running import within

pytest.importorskip("obstore")
boto3 = pytest.importorskip("boto3")
if importlib.util.find_spec("moto") is None:  # a process of its own imports it, which takes most of a second
    pytest.skip("needs moto", allow_module_level=True)

HASTE = Patience(stall=0.5, attempts=3, first_wait=0.02, longest_wait=0.1)
ATTEMPTS = HASTE.attempts
SECRET = "hidden-key-of-the-tests"
CONTENT = bytes(range(256)) * 100
MIB = 1 << 20


class World:
    """moto behind a proxy, and a client of AWS's own library that speaks to it directly."""

    def __init__(self, address: str, proxy: servers.FaultProxy) -> None:
        self.address, self.proxy, self.proxied = address, proxy, proxy.url
        self.client = boto3.client(
            "s3",
            endpoint_url=address,
            region_name="us-east-1",
            aws_access_key_id="id",
            aws_secret_access_key=SECRET,
        )

    def object(self, key: str, data: bytes = CONTENT, bucket: str = "runs", **given: Any) -> None:
        self.client.put_object(Bucket=bucket, Key=key, Body=data, **given)

    def stored(self, key: str, bucket: str = "runs") -> bytes:
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def exists(self, key: str) -> bool:
        listed = self.client.list_objects_v2(Bucket="runs", Prefix=key).get("Contents", [])
        return any(object["Key"] == key for object in listed)

    def abort_unfinished(self) -> None:
        for upload in self.client.list_multipart_uploads(Bucket="runs").get("Uploads", []):
            found = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            with contextlib.suppress(self.client.exceptions.NoSuchUpload):  # the library was faster
                self.client.abort_multipart_upload(Bucket="runs", **found)

    def unfinished(self) -> list[str]:
        return [
            upload["Key"] for upload in self.client.list_multipart_uploads(Bucket="runs").get("Uploads", [])
        ]


@pytest.fixture(scope="module")
def running() -> Iterator[World]:
    with servers.moto() as address, servers.FaultProxy(address) as proxy:
        world = World(address, proxy)
        world.client.create_bucket(Bucket="runs")
        world.client.create_bucket(Bucket="public", ACL="public-read-write")
        world.object("step-1/model.pt")
        yield world


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's: no credentials, no home, no metadata server."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR", "CLOUDSDK_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(bucket_settings, "METADATA", "http://127.0.0.1:1")


@pytest.fixture
def world(running: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The servers, and the variables of somebody who may read and write there, through the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.proxied)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    running.proxy.set()
    return running


@pytest.fixture
def runs(world: World) -> Bucket:
    return Bucket("s3", "runs", HASTE)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file of three parts; the last one is shorter."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(1 << 16) * ((2 * bucket_uploads.PART + MIB) >> 16) + b"end")
    return str(path)


def said(error: pytest.ExceptionInfo[CkptToolError]) -> str:
    """Return a message after checks of what all of them promise."""
    text = str(error.value)
    assert SECRET not in text and "hush" not in text and "Debug" not in text and "http://" not in text
    assert len(text.splitlines()) == 1 + (error.value.hint is not None)
    return text


# ---- reading


def test_the_beginning_and_the_facts_of_an_object_cost_one_request(world: World, runs: Bucket) -> None:
    before = TRAFFIC.requests, TRAFFIC.nbytes
    head, facts = runs.head("step-1/model.pt", 1000)
    assert head == CONTENT[:1000]
    assert facts == Facts(len(CONTENT), hashlib.md5(CONTENT, usedforsecurity=False).hexdigest())
    assert world.proxy.requests == ["GET /runs/step-1/model.pt"]
    assert (TRAFFIC.requests, TRAFFIC.nbytes) == (before[0] + 1, before[1] + 1000)


def test_a_beginning_longer_than_the_object_is_all_of_it(runs: Bucket) -> None:
    assert runs.head("step-1/model.pt", 1 << 20)[0] == CONTENT


def test_an_empty_object_has_facts_too(world: World, runs: Bucket) -> None:
    world.object("empty", b"")
    assert runs.head("empty", 10) == (b"", Facts(0, hashlib.md5(usedforsecurity=False).hexdigest()))


def test_ranges_come_with_one_request_each_from_many_threads(world: World) -> None:
    runs = Bucket("s3", "runs", replace(HASTE, stall=30))  # a slow machine's answers are not asked for again
    _, facts = runs.head("step-1/model.pt", 0)
    world.proxy.set()
    got: dict[int, bytes] = {}
    starts = range(0, 16_000, 1000)
    threads = [
        threading.Thread(target=lambda at=at: got.update({at: runs.read("step-1/model.pt", facts, at, 777)}))
        for at in starts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {at: CONTENT[at : at + 777] for at in starts}
    assert len(world.proxy.requests) == len(starts)


def test_no_bytes_need_no_request(world: World, runs: Bucket) -> None:
    assert runs.read("step-1/model.pt", Facts(10), 5, 0) == b""
    assert world.proxy.requests == []


@pytest.mark.parametrize("data", [CONTENT[::-1], CONTENT[:500], CONTENT * 2], ids=["other", "less", "more"])
@pytest.mark.parametrize("known", [True, False], ids=["with its ETag", "without"])
def test_an_object_that_is_replaced_between_two_reads_is_noticed(
    world: World, runs: Bucket, data: bytes, known: bool
) -> None:
    world.object("replaced")
    _, facts = runs.head("replaced", 10)
    world.object("replaced", data)
    if not known:
        facts = facts._replace(identity="")
    if not known and len(data) == len(CONTENT):
        assert runs.read("replaced", facts, 600, 10) == data[600:610]  # nothing tells
        return
    with pytest.raises(Damaged, match=r"^s3://runs/replaced: changed while it was read") as error:
        runs.read("replaced", facts, 600, 10)
    said(error)


@pytest.mark.parametrize(
    "key",
    [
        "a b",
        "a%2Fb",
        "q?x=1",
        "h#x",
        "p+x",
        "ü/é€😀",
        ".hidden",
        "d/.metadata",
        "a*b",
        "a\\b",
        "a~b&c",
        "x/%20",
    ],
)
def test_a_key_is_asked_for_as_it_is_spelled(world: World, runs: Bucket, tmp_path: Path, key: str) -> None:
    world.object(key, key.encode())
    data, facts = runs.head(key, 100)
    assert data == key.encode()
    folder, _, name = key.rpartition("/")
    assert ListedEntry(name, facts) in runs.entries(folder)
    path = tmp_path / "file"
    path.write_bytes(b"new")
    runs.put({f"up/{key}": str(path)}, replace=True)
    assert world.stored(f"up/{key}") == b"new"


@pytest.mark.parametrize("key", ["a//b", "/a", "a/", "", "../a", "a/../b", "./a", "a\x01b", "a\nb"])
def test_a_key_that_the_library_would_spell_otherwise_is_refused_by_name(
    world: World, runs: Bucket, key: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for ask in (
        lambda: runs.head(key, 5),
        lambda: runs.read(key, Facts(5), 0, 5),
        lambda: runs.put({key: str(tmp_path / "file")}, replace=True),
    ):
        with pytest.raises(Unreadable, match="can't be addressed") as error:
            ask()
        assert error.value.path == f"s3://runs/{key}"
    assert world.proxy.requests == []


# ---- listing


def test_a_folder_lists_its_files_with_facts_and_its_sub_folders(world: World, runs: Bucket) -> None:
    for key in ("run/a.pt", "run/b.pt", "run/step-1/x", "run/step-1/deep/y", "run/step-2/x", "running/no"):
        world.object(key, key.encode())
    world.proxy.set()
    found = {entry.name: entry.facts for entry in runs.entries("run")}
    assert found == {
        "a.pt": runs.head("run/a.pt", 0)[1],
        "b.pt": runs.head("run/b.pt", 0)[1],
        "step-1": None,
        "step-2": None,
    }
    assert world.proxy.requests[0] == "GET /runs?list-type=2&prefix=run%2F"
    assert [request[:4] for request in world.proxy.requests[1:]] == ["HEAD", "HEAD"]


def test_a_folder_that_holds_nothing_is_empty(runs: Bucket) -> None:
    assert runs.entries("no/such/folder") == []


def test_objects_that_stand_for_folders_are_no_files(world: World, runs: Bucket) -> None:
    for key in ("marked/", "marked/sub/", "marked/sub/x", "marked/sub/y/", "marked/sub/y/z"):
        world.object(key, b"" if key.endswith("/") else b"x")
    assert runs.entries("marked") == [ListedEntry("sub", None)]
    assert {entry.name: entry.facts is None for entry in runs.entries("marked/sub")} == {
        "x": False,
        "y": True,
    }


def test_sub_folders_of_many_keys_are_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch, runs: Bucket
) -> None:
    monkeypatch.setattr(buckets, "PAGE", 4)
    names = ["many/a/x", *(f"many/big one/{number}" for number in range(30)), "many/big.txt", "many/z"]
    for key in names:
        world.object(key, b"1")
    world.proxy.set()
    found = {entry.name: entry.facts is None for entry in runs.entries("many")}
    assert found == {"a": True, "big one": True, "big.txt": False, "z": False}
    assert any("start-after=many/big one/" in unquote_plus(request) for request in world.proxy.requests)


def test_a_folder_of_more_keys_than_are_taken_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, runs: Bucket
) -> None:
    monkeypatch.setattr(buckets, "MOST_KEYS", 5)
    for number in range(6):
        world.object(f"crowd/{number}", b"1")
    with pytest.raises(Unreadable, match=r"^s3://runs/crowd/: more than 5 keys are in it"):
        runs.entries("crowd")


# ---- what servers do wrong


SLOW_DOWN = servers.status(503, "SlowDown")


@pytest.mark.parametrize(
    "fault",
    [
        SLOW_DOWN,
        servers.status(429),
        servers.status(500, "InternalError"),
        servers.cut_off,
        servers.hung_up,
        servers.stalled,
    ],
    ids=["503", "429", "500", "cut off", "hung up", "stalled"],
)
def test_a_server_that_fails_for_a_moment_is_asked_again(world: World, runs: Bucket, fault: Any) -> None:
    _, facts = runs.head("step-1/model.pt", 0)
    world.proxy.set(servers.stalled(world.proxy) if fault is servers.stalled else fault)
    assert runs.read("step-1/model.pt", facts, 100, 1000) == CONTENT[100:1100]
    assert len(world.proxy.requests) == 2


@pytest.mark.parametrize(
    "fault, reason, attempts",
    [
        (SLOW_DOWN, "the server answers 503 SlowDown", ATTEMPTS),
        (servers.status(429), "the server answers 429", ATTEMPTS),
        (servers.cut_off, "the connection was cut off", ATTEMPTS),
        (servers.hung_up, "the connection was cut off", ATTEMPTS),
        (servers.stalled, "no answer in time", ATTEMPTS),
        (servers.status(403, "AccessDenied"), "access is refused (403 AccessDenied)", 1),
        (servers.status(403, "InvalidAccessKeyId"), "access is refused (403 InvalidAccessKeyId)", 1),
        (servers.status(401), "access is refused (401)", 1),
        (servers.status(400, "ExpiredToken"), "access is refused (400 ExpiredToken)", 1),
        (servers.status(301, "PermanentRedirect"), "the bucket is in another region", 1),
        (servers.status(302, "", {"Location": "ftp://other/"}), "the server redirects to another scheme", 1),
        (servers.changed_answer(ETag='"other"'), "changed while it was read", 1),
        (servers.changed_answer(Content_Range="bytes 100-1099/99999"), "changed while it was read", 1),
        (servers.changed_answer(Content_Range="bytes 0-999/25600"), "another range", 1),
        (servers.shortened, "999 bytes came where 1000 were asked for", 1),
        (servers.whole, "is sent only as a whole", 1),
    ],
)  # fmt: skip
def test_a_server_that_goes_on_failing_is_told_of_in_one_line(
    world: World, runs: Bucket, fault: Any, reason: str, attempts: int
) -> None:
    _, facts = runs.head("step-1/model.pt", 0)
    world.proxy.set(*[servers.stalled(world.proxy) if fault is servers.stalled else fault] * 10)
    with within(ATTEMPTS * HASTE.stall + 2), pytest.raises((Damaged, Unreadable)) as error:
        runs.read("step-1/model.pt", facts, 100, 1000)
    assert said(error).startswith(f"s3://runs/step-1/model.pt: {reason}") or reason in said(error)
    assert len(world.proxy.requests) == attempts
    assert isinstance(error.value, Unranged) == (fault is servers.whole)


def test_a_server_that_redirects_in_circles_is_left(world: World, runs: Bucket) -> None:
    world.proxy.set(*[servers.status(302, "", {"Location": "/runs/again"})] * 50)
    with pytest.raises(Unreadable, match="redirects in circles") as error:
        runs.head("step-1/model.pt", 10)
    said(error)
    assert len(world.proxy.requests) < 50


def test_a_redirect_to_another_host_does_not_take_the_credentials_along(world: World, runs: Bucket) -> None:
    world.proxy.set(
        servers.status(307, "", {"Location": f"{world.proxied.replace('127.0.0.1', 'localhost')}/x"})
    )
    with contextlib.suppress(CkptToolError):
        runs.head("step-1/model.pt", 10)
    assert "authorization" in world.proxy.headers[0]
    assert all("authorization" not in headers for headers in world.proxy.headers[1:])


@pytest.mark.parametrize("ask", ["head", "entries"])
def test_a_bucket_that_is_not_there_is_no_missing_object(world: World, ask: str) -> None:
    bucket = Bucket("s3", "no-such-bucket", HASTE)
    with pytest.raises(Unreadable, match="there is no such bucket") as error:
        bucket.head("a", 1) if ask == "head" else bucket.entries("a")
    assert not isinstance(error.value, Missing)


def test_an_object_that_is_not_there_is_missing(runs: Bucket) -> None:
    with pytest.raises(Missing, match=r"^s3://runs/none: there is no such object"):
        runs.head("none", 10)


@pytest.mark.parametrize(
    "endpoint, reason",
    [
        ("http://127.0.0.1:1", "connection refused"),
        ("http://host.invalid", "there is no such host, or no network"),
    ],
)
def test_no_network_is_told_in_bounded_time(
    world: World, monkeypatch: pytest.MonkeyPatch, endpoint: str, reason: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with within(10), pytest.raises(Unreadable, match=reason) as error:
        Bucket("s3", "runs", HASTE).head("a", 1)
    said(error)


def test_ctrl_c_ends_a_request_that_hangs(world: World) -> None:
    world.proxy.set(*[servers.stalled(world.proxy)] * 9)
    patient = Bucket("s3", "runs", Patience(stall=20, attempts=1))
    interrupted = _interrupted_once(lambda: world.proxy.requests)
    with within(15), pytest.raises(KeyboardInterrupt), interrupted:  # nobody waits for the 20 s of patience
        patient.head("step-1/model.pt", 10)


@contextlib.contextmanager
def _interrupted_once(reached: Callable[[], object], number: int = signal.SIGINT) -> Iterator[None]:
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            if reached():
                os.kill(os.getpid(), number)
                return

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


# ---- credentials


@pytest.fixture
def no_keys(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_keys")
def test_without_any_credentials_requests_are_unsigned(world: World) -> None:
    world.object("weights", bucket="public", ACL="public-read")
    assert Bucket("s3", "public", HASTE).head("weights", 10)[0] == CONTENT[:10]
    assert "authorization" not in world.proxy.headers[-1]


def test_a_refusal_says_that_the_credentials_are_not_enough(world: World, runs: Bucket) -> None:
    world.proxy.set(servers.status(403, "AccessDenied"))
    with pytest.raises(
        Unreadable, match="hint: the credentials that were found don't allow it: set AWS_"
    ) as error:
        runs.head("step-1/model.pt", 10)
    said(error)


@pytest.mark.usefixtures("no_keys")
def test_a_refusal_says_that_there_are_no_credentials(runs: Bucket) -> None:
    with pytest.raises(Unreadable, match="hint: no credentials were found: set AWS_") as error:
        runs.head("step-1/model.pt", 10)
    said(error)


CREDENTIALS = """
[default]
aws_access_key_id = of-default
aws_secret_access_key = x%y
[lab]
aws_access_key_id = of-lab
aws_secret_access_key = z
aws_session_token = token-of-lab
"""


@pytest.mark.parametrize("profile, key", [("", "of-default"), ("default", "of-default"), ("lab", "of-lab")])
@pytest.mark.usefixtures("no_keys")
def test_profiles_of_aws_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: str, key: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(CREDENTIALS)
    sections = f"endpoint_url = {world.proxied}\nregion = eu-north-1\n"
    (tmp_path / ".aws/config").write_text(f"[default]\n{sections}[profile lab]\n{sections}")
    monkeypatch.setenv("AWS_PROFILE", profile)
    Bucket("s3", "runs", HASTE).head("step-1/model.pt", 10)
    sent = world.proxy.headers[-1]
    assert f"Credential={key}/" in sent["authorization"] and "/eu-north-1/s3/" in sent["authorization"]
    assert sent.get("x-amz-security-token") == ("token-of-lab" if key == "of-lab" else None)


@pytest.mark.usefixtures("no_keys")
def test_a_profile_that_must_be_asked_for_its_keys_is_asked_by_boto3(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = '{"Version": 1, "AccessKeyId": "of-process", "SecretAccessKey": "s"}'
    (tmp_path / "config").write_text(f"[profile sso]\ncredential_process = echo '{keys}'\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "sso")
    Bucket("s3", "runs", HASTE).head("step-1/model.pt", 10)
    assert "Credential=of-process/" in world.proxy.headers[-1]["authorization"]


@pytest.mark.parametrize(
    "text, reason",
    [("[other]\na=1", "there is no profile 'lab'"), ("[lab\nsecret", "is no file of AWS profiles")],
)
def test_a_profile_that_can_not_be_used_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "c").write_text(text)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "c"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with pytest.raises(UsageFault, match=reason) as error:
        Bucket("s3", "runs", HASTE).head("a", 10)
    assert "secret" not in str(error.value)


def test_incomplete_credentials_are_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Unreadable, match="the credentials are incomplete\n  hint: set AWS_ACCESS_KEY_ID"):
        Bucket("s3", "runs", HASTE).head("a", 10)


@pytest.mark.parametrize("is_amazon", [True, False])
@pytest.mark.usefixtures("no_keys")
def test_a_machine_with_a_role_is_asked_for_credentials_and_any_other_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch, is_amazon: bool
) -> None:
    class Machine(servers.LoopbackServer):
        def answer(self, exchange: servers.Exchange) -> None:
            asked = exchange.request_read()
            names = {"AccessKeyId": "of-role", "SecretAccessKey": "s", "Token": "t"}
            text = json.dumps({**names, "Expiration": "2099-01-01T00:00:00Z"})
            if asked.method == "PUT":
                text = "token" if is_amazon else ""
            elif asked.path.endswith("credentials/"):
                text = "role"
            exchange.send(servers.Answer(200 if text else 404, {}, memoryview(text.encode())))

    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with Machine() as machine:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", machine.url)
        world.object("open", bucket="public", ACL="public-read")
        Bucket("s3", "public", HASTE).head("open", 10)
    assert ("Credential=of-role/" in world.proxy.headers[-1].get("authorization", "")) == is_amazon


def test_proxies_of_the_environment_are_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.invalid")
    monkeypatch.setenv("HTTP_PROXY", world.proxied)
    world.proxy.set(servers.status(403, "AccessDenied"))
    with pytest.raises(Unreadable, match="access is refused"):
        Bucket("s3", "runs", HASTE).head("a", 1)
    assert world.proxy.requests == ["GET http://store.invalid/runs/a"]


# ---- writing


@pytest.mark.parametrize(
    "nbytes, replace",
    [(0, False), (5, False), (5, True), (bucket_uploads.WHOLE + 1, False), (3 * bucket_uploads.PART, True)],
)
def test_files_arrive_whole(world: World, runs: Bucket, tmp_path: Path, nbytes: int, replace: bool) -> None:
    path, key = tmp_path / "file", f"out/{nbytes}-{replace}"
    path.write_bytes(os.urandom(1 << 10) * (nbytes >> 10) + b"x" * (nbytes % 1024))
    counted: list[int] = []
    runs.put({key: str(path)}, replace=replace, progress=counted.append)
    assert world.stored(key) == path.read_bytes()
    assert sum(counted) == nbytes
    assert not any(request.startswith("GET") for request in world.proxy.requests)  # its checksum was enough
    assert world.unfinished() == []


def test_files_are_written_in_the_order_they_are_given(world: World, runs: Bucket, tmp_path: Path) -> None:
    keys = ["order/b", "order/a", "order/index.json"]
    (tmp_path / "small").write_bytes(b"1")
    runs.put(dict.fromkeys(keys, str(tmp_path / "small")), replace=True)
    written = [request for request in world.proxy.requests if request.startswith("PUT")]
    assert written == [f"PUT /runs/{key}" for key in keys]


def test_nothing_is_written_over_unless_it_is_asked_for(world: World, runs: Bucket, file: str) -> None:
    world.object("taken", b"old")
    with pytest.raises(OutputExists, match=r"^s3://runs/taken: already exists\n  hint: .*force=True"):
        runs.put({"not-taken": file, "taken": file}, replace=False)
    assert world.stored("taken") == b"old" and not world.exists("not-taken")
    assert {request.split()[0] for request in world.proxy.requests} == {"HEAD"}
    runs.put({"taken": file}, replace=True)
    assert world.stored("taken") == Path(file).read_bytes()


@pytest.mark.parametrize("is_small", [True, False])
def test_what_another_writes_meanwhile_is_not_written_over(
    world: World, runs: Bucket, file: str, tmp_path: Path, is_small: bool
) -> None:
    key, path = f"raced-{is_small}", file
    if is_small:
        path = str(tmp_path / "small")
        Path(path).write_bytes(b"new")

    def other_is_faster(request: servers.Asked) -> servers.Answer:
        world.object(key, b"theirs")
        return request.passed_on(request.body)

    world.proxy.set(other_is_faster, method="PUT" if is_small else "POST")
    with pytest.raises(OutputExists, match=f"^s3://runs/{key}: already exists"):
        runs.put({key: path}, replace=False)
    assert world.stored(key) == b"theirs"
    assert world.unfinished() == []


@pytest.mark.parametrize("is_small", [True, False])
def test_bytes_that_arrive_otherwise_are_noticed(
    world: World, runs: Bucket, file: str, tmp_path: Path, is_small: bool
) -> None:
    if is_small:
        file = str(tmp_path / "small")
        Path(file).write_bytes(b"new")
    world.proxy.set(servers.flipped, method="PUT", path="" if is_small else "partNumber=2")
    with pytest.raises(Damaged, match=r"^s3://runs/flipped: what arrived is not what was sent") as error:
        runs.put({"flipped": file}, replace=True)
    said(error)


def test_where_the_server_tells_no_checksum_all_is_read_back(world: World, runs: Bucket, file: str) -> None:
    encrypted = servers.changed_answer(ETag='"of-a-key-of-ones-own"')

    def fault(request: servers.Asked) -> servers.Answer | None:
        return encrypted(request) if request.method in ("HEAD", "GET") else request.passed_on(request.body)

    world.proxy.set(*[fault] * 99)
    runs.put({"encrypted": file}, replace=True)
    assert sum(request.startswith("GET") for request in world.proxy.requests) == 3
    assert world.stored("encrypted") == Path(file).read_bytes()


@pytest.mark.parametrize(
    "fault, method, path, reason",
    [
        (SLOW_DOWN, "PUT", "partNumber=2", "503 SlowDown"),
        (servers.status(403, "AccessDenied"), "PUT", "partNumber=3", "access is refused"),
        (servers.status(403, "AccessDenied"), "POST", "uploads", "access is refused"),
        (servers.hung_up, "PUT", "partNumber=2", "the connection was cut off"),
        (servers.status(500, "InternalError"), "POST", "uploadId", "500 InternalError"),
    ],
)
def test_after_an_error_no_part_stays_and_no_object_appears(
    world: World, runs: Bucket, file: str, fault: Any, method: str, path: str, reason: str
) -> None:
    world.proxy.set(*[fault] * 30, method=method, path=path)
    with pytest.raises(Unreadable, match=reason) as error:
        runs.put({"failed": file}, replace=True)
    said(error)
    assert world.unfinished() == [] and not world.exists("failed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_after_a_signal_no_part_stays_and_no_object_appears(
    world: World, runs: Bucket, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(40 * bucket_uploads.PART)

    def slow(request: servers.Asked) -> servers.Answer:
        time.sleep(0.2)
        return request.passed_on(request.body)

    def begun() -> bool:
        return any("partNumber" in request for request in world.proxy.requests)

    monkeypatch.setattr(bucket_uploads, "ENDING", 30)  # a slow machine's room
    world.proxy.set(*[slow] * 99, method="PUT", path="partNumber")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), _interrupted_once(begun, number):
            runs.put({"interrupted": str(path)}, replace=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert world.unfinished() == [] and not world.exists("interrupted")


class Gate:
    """A server that does what it is asked, and answers once the gate is open."""

    def __init__(self) -> None:
        self.opened, self.waiting = threading.Event(), 0

    def __call__(self, request: servers.Asked) -> servers.Answer:
        answer = request.passed_on(request.body)
        self.waiting += 1
        self.opened.wait(60)
        return answer


def test_an_interrupted_upload_ends_at_once_and_says_what_it_left(
    world: World, runs: Bucket, tmp_path: Path
) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(20 * bucket_uploads.PART)
    world.proxy.set(*[gate := Gate()] * 99, method="PUT", path="partNumber")
    patient = Bucket("s3", "runs", Patience(stall=20, attempts=1))
    interrupted = _interrupted_once(lambda: gate.waiting == bucket_uploads.AT_ONCE)
    with within(15), pytest.raises(KeyboardInterrupt) as stopped, interrupted:
        patient.put({"left": str(path)}, replace=True)
    assert left_by(stopped.value) == (
        "; parts of s3://runs/left may be left, unseen: aws s3api list-multipart-uploads --bucket runs, "
        "then abort-multipart-upload"
    )
    assert not world.exists("left")
    gate.opened.set()
    world.abort_unfinished()


def _ctrl_c(path: Path, gate: Gate, waiting: int, *, opens: bool = True) -> tuple[int, str, float]:
    """Upload a file by a command of its own; return how Ctrl-C ended it, what it said, and its seconds.

    It comes once so many requests wait at the gate, which then opens, or stays shut until the end.
    """
    torch.save({"w": torch.zeros(12 * bucket_uploads.PART // 4)}, path)  # more parts than go out at once
    command = [sys.executable, "-m", "ckpttool", "convert", "-q", str(path), "s3://runs/left.safetensors"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        end = time.monotonic() + 60
        while gate.waiting < waiting:
            assert running.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        begin = time.monotonic()
        running.send_signal(signal.SIGINT)
        if opens:
            time.sleep(1)  # for the signal, on a slow machine
            gate.opened.set()
        _, said = running.communicate(timeout=60)
    gate.opened.set()
    return running.returncode, said, time.monotonic() - begin


def test_the_line_of_an_interrupted_upload_says_what_is_left(world: World, tmp_path: Path) -> None:
    world.proxy.set(*[gate := Gate()] * 99, method="PUT", path="partNumber")
    code, said, seconds = _ctrl_c(tmp_path / "in.pt", gate, bucket_uploads.AT_ONCE, opens=False)
    assert (code, said) == (
        -signal.SIGINT,
        "interrupted; parts of s3://runs/left.safetensors may be left, unseen: "
        "aws s3api list-multipart-uploads --bucket runs, then abort-multipart-upload\n",
    )
    assert seconds < 30 and not world.exists("left.safetensors")
    world.abort_unfinished()


def test_the_line_of_an_interrupted_upload_says_that_nothing_stays(world: World, tmp_path: Path) -> None:
    world.proxy.set(*[gate := Gate()] * 99, method="PUT", path="partNumber")
    code, said, _ = _ctrl_c(tmp_path / "in.pt", gate, 1)
    assert (code, said) == (-signal.SIGINT, "interrupted; nothing of the upload stays\n")
    assert world.unfinished() == [] and not world.exists("left.safetensors")


@pytest.mark.long
def test_the_line_of_an_upload_that_was_interrupted_after_its_end_says_that_it_is_there(
    world: World, tmp_path: Path
) -> None:
    world.proxy.set(*[gate := Gate()] * 9, method="POST", path="uploadId")
    code, said, _ = _ctrl_c(tmp_path / "in.pt", gate, 1)
    what = "s3://runs/left.safetensors was complete, and is there"
    assert (code, said) == (-signal.SIGINT, f"interrupted; {what}\n")
    assert world.exists("left.safetensors") and world.unfinished() == []


def long_drip(request: servers.Asked) -> servers.Answer:
    answer = servers.dripping(request)
    return replace(answer, body=memoryview(bytes(answer.body).ljust(1000)))


@pytest.mark.parametrize("path", ["uploads", "uploadId"], ids=["the first", "the last"])
def test_an_answer_to_an_upload_that_drips_ends_in_bounded_time(
    path: str, world: World, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "UPLOADING", 1)
    monkeypatch.setattr(bucket_uploads, "ENDING", 0.1)
    world.proxy.set(*[long_drip] * 9, method="POST", path=path)
    what = r"answer to the upload does not end within 1\.5 s"
    with within(6), pytest.raises(Unreadable, match=what) as error:
        Bucket("s3", "runs", HASTE).put({"dripping": file}, replace=True)
    told = "see whether it is there: ckpttool inspect s3://runs/dripping" in said(error)
    assert told or path == "uploads"
    world.abort_unfinished()


@pytest.mark.parametrize(
    ("ask", "drip", "seconds"),
    [
        (lambda bucket: bucket.entries("step-1"), long_drip, r"1\.8"),
        (lambda bucket: bucket.head("step-1/model.pt", 500), servers.dripping, r"2\.3"),
        (lambda bucket: bucket.read("step-1/model.pt", Facts(9, ""), 0, 500), servers.dripping, r"2\.3"),
    ],
    ids=["a listing", "a beginning", "some bytes"],
)
def test_an_answer_that_drips_ends_in_bounded_time(
    ask: Callable[[Bucket], object],
    drip: Callable[[servers.Asked], servers.Answer],
    seconds: str,
    world: World,
    runs: Bucket,
) -> None:
    world.proxy.set(*[drip] * 9, method="GET")
    what = rf"s3://runs/step-1/.*: the server's answer does not end within {seconds} s"
    with within(8), pytest.raises(Unreadable, match=what):
        ask(runs)


@pytest.mark.parametrize("code", ["SlowDown", "ServerBusy", "InternalError"])
def test_a_busy_store_s_own_word_is_the_hint(world: World, runs: Bucket, code: str) -> None:
    world.proxy.set(*[servers.status(503, code)] * 9)
    with pytest.raises(Unreadable, match=f"the server answers 503 {code}") as error:
        runs.head("step-1/model.pt", 10)
    hint = error.value.hint or ""
    assert ("asks for fewer requests" in hint) == (code != "InternalError")
    assert (hint == "the server is busy: try again later") == (code == "InternalError")


def test_an_error_of_the_progress_bar_aborts_the_upload(world: World, runs: Bucket, file: str) -> None:
    def broken(nbytes: int) -> None:
        raise BrokenPipeError

    world.proxy.set(
        *[lambda request: time.sleep(0.3) or request.passed_on(request.body)] * 9, path="partNumber"
    )
    with pytest.raises(BrokenPipeError):
        runs.put({"broken": file}, replace=True, progress=broken)
    assert world.unfinished() == []


def test_a_file_that_is_not_there_is_named(runs: Bucket, tmp_path: Path) -> None:
    with pytest.raises(CkptToolError, match=f"^{tmp_path}/none: could not be read"):
        runs.put({"none": str(tmp_path / "none")}, replace=True)


# ---- Google and Azure


def test_google_is_spoken_to_at_its_emulator(
    world: World, monkeypatch: pytest.MonkeyPatch, file: str, tmp_path: Path
) -> None:
    # Google's XML interface is S3's but for conditions on writes; moto takes unsigned requests.
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", world.proxied)
    public = Bucket("gs", "public", HASTE)
    public.put({"g/model": file}, replace=True)
    world.client.put_object_acl(Bucket="public", Key="g/model", ACL="public-read")
    head, facts = public.head("g/model", 100)
    assert head == Path(file).read_bytes()[:100]
    assert public.entries("g") == [ListedEntry("model", facts)]
    world.object("g/model", bucket="public", ACL="public-read")
    with pytest.raises(Damaged, match=r"^gs://public/g/model: changed while it was read"):
        public.read("g/model", facts, 0, 10)
    with pytest.raises(OutputExists, match="gs://public/g/model"):
        public.put({"g/model": file}, replace=False)


ACCOUNT, ACCOUNT_KEY = "devstoreaccount1", base64.b64encode(SECRET.encode()).decode()


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Azurite with a container `runs`."""
    program = servers.azurite_program()
    if program is None:
        pytest.skip("needs Azurite: npm install azurite, and AZURITE=…/node_modules/.bin/azurite-blob")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURITE_ACCOUNTS", f"{ACCOUNT}:{ACCOUNT_KEY}")
        with servers.azurite(program, tmp_path_factory.mktemp("azurite")) as address:
            _create_container(address, "runs")
            yield address


def _create_container(address: str, name: str) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    signature = base64.b64encode(hmac.digest(SECRET.encode(), text.encode(), "sha256")).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    with contextlib.closing(HTTPConnection(address.removeprefix("http://"))) as connection:
        connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
        assert connection.getresponse().status == 201


def _connection_string(address: str, key: str = ACCOUNT_KEY) -> str:
    return f"AccountName={ACCOUNT};AccountKey={key};BlobEndpoint={address}/{ACCOUNT};"


def test_azure_is_read_and_written(
    blobs: str, monkeypatch: pytest.MonkeyPatch, file: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", _connection_string(blobs))
    runs, small = Bucket("az", "runs", HASTE), tmp_path / "small"
    small.write_bytes(b"small")
    runs.put({"a/model": file, "a/ü b%2F#?+/x": str(small), "a/empty": os.devnull}, replace=False)
    head, facts = runs.head("a/model", 100)
    assert head == Path(file).read_bytes()[:100]
    assert sorted(runs.entries("a")) == sorted(
        [
            ListedEntry("model", facts),
            ListedEntry("empty", runs.head("a/empty", 9)[1]),
            ListedEntry("ü b%2F#?+", None),
        ]
    )
    assert runs.head("a/ü b%2F#?+/x", 100)[0] == b"small"
    for path in (file, str(small)):
        with pytest.raises(OutputExists, match="az://runs/a/model: already exists"):
            runs.put({"a/model": path}, replace=False)
    runs.put({"a/model": str(small)}, replace=True)
    with pytest.raises(Damaged, match="changed while it was read"):
        runs.read("a/model", facts, 0, 3)
    with pytest.raises(Missing):
        runs.head("none", 3)
    with pytest.raises(Unreadable, match="there is no such container"):
        Bucket("az", "none", HASTE).entries("")


def test_azure_refuses_with_a_hint(blobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", _connection_string(blobs, "AAAA"))
    with pytest.raises(Unreadable, match=r"access is refused \(403 \w+\)\n.*AZURE_STORAGE_KEY") as error:
        Bucket("az", "runs", HASTE).head("a", 3)
    said(error)


def test_azure_without_an_account_says_what_to_set() -> None:
    with pytest.raises(UsageFault, match="set AZURE_STORAGE_ACCOUNT"):
        Bucket("az", "runs", HASTE).head("a", 3)


def test_a_signature_in_the_settings_stands_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = f"SharedAccessSignature=sv=2021&sig={SECRET};BlobEndpoint=http://127.0.0.1:1/acc"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=acc;{secret}")
    bucket = Bucket("az", "runs", HASTE)
    with pytest.raises(Unreadable, match="connection refused") as error:
        bucket.entries("a")
    said(error)
    assert SECRET not in repr(bucket)
