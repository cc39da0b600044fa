"""Outputs in a bucket that several processes write: those of one process, and nothing before all is there."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.core.files import copying
from ckpttool.core.files.parts import OutputPart
from ckpttool.core.remote import multipart
from ckpttool.core.remote.uploaded_parts import MeetingBucket, UploadedParts
from tests.core.remote.conftest import cache, s3
from tests.support.bucket_servers import FaultProxy, status
from tests.support.running import Cli, assert_says
from tests.support.writing_jobs import JOBS, OTHERS, inputs, run

__all__ = ["cache", "inputs", "s3"]  # fixtures
pytestmark = pytest.mark.usefixtures("small_blocks")


class Store:
    """A bucket, and what is in it."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name, self.url = client, name, f"s3://{name}"
        client.create_bucket(Bucket=name)

    def contents(self) -> dict[str, bytes]:
        listed = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        keys = [each["Key"] for each in listed]
        return {key: self.client.get_object(Bucket=self.name, Key=key)["Body"].read() for key in keys}

    def outputs(self) -> dict[str, bytes]:
        return {key: content for key, content in self.contents().items() if ".ckpttool." not in key}

    def uploads(self) -> list[str]:
        return [
            each["Key"] for each in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        ]


@pytest.fixture
def store(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(multipart, "PART", 7000)
    monkeypatch.setattr(multipart, "LEAST", 1)
    Store.number = getattr(Store, "number", 0) + 1  # type: ignore[attr-defined]
    return Store(s3, f"parts{Store.number}")  # type: ignore[attr-defined]


@pytest.fixture
def alone(tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(inputs)
    return tmp_path


def local(folder: Path) -> dict[str, bytes]:
    files = sorted(folder.rglob("out*"))
    files += [each for folder in files if folder.is_dir() for each in folder.iterdir()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}


OFTEN = {
    "strip-prefix": 3,
    "cast": 7,
    "cast to .pt": 3,
    "shards": 2,
    "torch shards": 7,
    "fp8": 1,
    "from shards": 2,
}
CASES = [
    pytest.param(
        words, count, id=f"{name}-{count}", marks=() if OFTEN.get(name) == count else pytest.mark.long
    )
    for name, words in JOBS.items()
    for count in (1, 2, 3, 7)
]


@pytest.mark.parametrize(("words", "count"), CASES)
def test_the_bytes_are_those_of_one_process(
    words: str, count: int, store: Store, alone: Path, cli: Cli
) -> None:
    assert run(cli, words, alone).code == 0
    for number in random.Random(count).sample(range(1, count + 1), count):
        assert not store.outputs()
        ran = run(cli, words, store.url, "--part", f"{number}/{count}", "--json")
        assert ran.code == 0, ran
    assert "part" not in ran.json and ran.json["bytes"] > 0
    assert store.contents() == local(alone)
    assert not store.uploads()


def parts_of(store: Store, name: str = "out.safetensors") -> str:
    return f".{name}.ckpttool.parts"


# What is refused


@pytest.mark.parametrize(("words", "what"), OTHERS.values(), ids=OTHERS)
def test_a_part_of_another_plan_is_refused(
    words: str, what: str, store: Store, alone: Path, cli: Cli
) -> None:
    first = "strip-prefix in.pt out.safetensors"
    assert run(cli, first, store.url, "--part", "1/2").code == 0
    ran = run(cli, words, store.url)
    assert_says(ran, 2, "is being written in parts of another plan", f"the {what} differs", "aws s3 rm")
    assert run(cli, first, store.url, "--part", "2/2").code == 0
    assert len(store.outputs()) == 1 and not store.uploads()


def test_an_output_that_exists_is_replaced_with_force_alone(store: Store, alone: Path, cli: Cli) -> None:
    assert run(cli, JOBS["cast"], alone).code == 0
    store.client.put_object(Bucket=store.name, Key="out.safetensors", Body=b"old")
    assert_says(run(cli, JOBS["cast"], store.url, "--part", "1/2"), 2, "already exists", "--force")
    for number in (1, 2):
        assert store.outputs() == {"out.safetensors": b"old"}
        assert run(cli, JOBS["cast"], store.url, "--part", f"{number}/2", "--force").code == 0
    assert store.contents() == local(alone)
    assert_says(run(cli, JOBS["cast"], store.url, "--part", "1/2"), 2, "already exists")
    assert not store.uploads()


@pytest.mark.parametrize("moment", ["between", "at the end"])
def test_an_object_that_appears_meanwhile_stays(
    moment: str, store: Store, alone: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(*given: Any, **named: Any) -> None:
        store.client.put_object(Bucket=store.name, Key="out.safetensors", Body=b"theirs")
        if moment == "at the end":
            complete(*given, **named)

    complete = multipart.Multipart.complete
    assert run(cli, JOBS["cast"], store.url, "--part", "1/2").code == 0
    if moment == "between":
        appear()
    else:
        monkeypatch.setattr(multipart.Multipart, "complete", appear)
    assert_says(run(cli, JOBS["cast"], store.url, "--part", "2/2"), 2, "already exists")
    assert store.outputs() == {"out.safetensors": b"theirs"}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (status(403, "AccessDenied"), "access is refused (403 AccessDenied)"),
        (status(507, "XMinioStorageFull"), "the server answers 507 XMinioStorageFull"),
        (status(404, "NoSuchBucket"), "there is no such bucket"),
    ],
)
def test_a_bucket_that_takes_no_part_is_named(
    fault: Any, said: str, store: Store, alone: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(cli, JOBS["cast"], alone).code == 0
    assert run(cli, JOBS["cast"], store.url, "--part", "1/2").code == 0
    with FaultProxy(store.client.meta.endpoint_url) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.set(*[fault] * 9, method="PUT", path="partNumber=")
        assert_says(
            run(cli, JOBS["cast"], store.url, "--part", "2/2"), 3, f"{store.url}/out.safetensors", said
        )
    assert not store.outputs()
    assert run(cli, JOBS["cast"], store.url, "--part", "2/2").code == 0
    assert store.contents() == local(alone)


def test_without_boto3_it_is_named(
    store: Store, alone: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    ran = run(cli, JOBS["cast"], store.url, "--part", "1/2")
    assert_says(ran, 2, "this needs boto3, which is not installed", "pip install")


# What ends too early, comes twice, or is tampered with


def test_a_part_that_is_missing_is_named_by_finish(
    store: Store, alone: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, words = f"{store.url}/out.pt", JOBS["cast to .pt"]
    assert run(cli, words, alone).code == 0
    assert_says(cli("finish", out), 2, "no part of it is here")
    assert run(cli, words, store.url, "--part", "2/3").code == 0
    assert_says(cli("finish", out), 1, f"error: {out}: lacks parts 1/3, 3/3", "--part 1/3")
    assert run(cli, words, store.url, "--part", "1/3").code == 0
    with pytest.MonkeyPatch.context() as patch:  # the last part ends before it can finish
        patch.setattr(UploadedParts, "waiting", lambda _: [OutputPart(1, 2)])
        assert run(cli, words, store.url, "--part", "3/3").code == 0
    assert not store.outputs()
    assert cli("finish", out, "--json").json["output"] == out
    assert store.contents() == local(alone)
    assert_says(cli("finish", out), 2, "is in place, and no part of it is left")


@pytest.mark.parametrize("after", [0, 2, 99])
def test_a_process_that_was_killed_while_it_finished_is_no_harm(
    after: int, store: Store, alone: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, done = JOBS["shards"], list[str]()
    assert run(cli, words, alone).code == 0
    assert run(cli, words, store.url, "--part", "1/2").code == 0
    complete = multipart.Multipart.complete

    def killed(client: Any, key: str = "", *given: Any, **named: Any) -> None:
        if len(done) == after or not key:
            raise RuntimeError
        complete(client, key, *given, **named)
        done.append(key)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(multipart.Multipart, "complete", killed)
        if after == 99:
            patch.setattr(MeetingBucket, "remove", killed)
        run(cli, words, store.url, "--part", "2/2")
    assert ("out/model.safetensors.index.json" in store.outputs()) == (after == 99)
    assert cli("finish", f"{store.url}/out/").code == 0
    assert store.contents() == local(alone)
    assert not store.uploads()


def test_an_upload_that_a_rule_has_aborted_is_begun_again(store: Store, alone: Path, cli: Cli) -> None:
    assert run(cli, JOBS["cast"], alone).code == 0
    assert run(cli, JOBS["cast"], store.url, "--part", "1/2").code == 0
    for each in store.client.list_multipart_uploads(Bucket=store.name)["Uploads"]:
        store.client.abort_multipart_upload(Bucket=store.name, Key=each["Key"], UploadId=each["UploadId"])
    with FaultProxy(store.client.meta.endpoint_url) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.set(*[status(404, "NoSuchUpload")] * 9, method="PUT", path="partNumber=")  # moto says 500
        ran = run(cli, JOBS["cast"], store.url, "--part", "2/2")
    assert_says(ran, 3, "its unfinished upload is gone", "write all of its parts again")
    assert store.contents() == {}
    for number in (2, 1):
        assert run(cli, JOBS["cast"], store.url, "--part", f"{number}/2").code == 0
    assert store.contents() == local(alone)


def changed(record: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {**record, **facts}


HARMS: dict[str, tuple[str, Callable[[dict[str, Any]], object], bool]] = {
    "no record of what was sent": ("1-of-2.json", lambda record: changed(record, sent=None), True),
    "wrong ETags": ("1-of-2.json", lambda record: changed(record, sent={"": {"1": '"00"', "x": 3}}), True),
    "a record of nothing": ("1-of-2.json", lambda record: changed(record, files={}), False),
    "a record without files": ("1-of-2.json", lambda record: changed(record, files=3), False),
    "a record that is none": ("1-of-2.json", lambda _: [], False),
    "a plan that is none": ("plan.json", lambda _: [], False),
    "a plan without uploads": ("plan.json", lambda record: changed(record, uploads={"x": "y"}), False),
    "an upload that never was": ("plan.json", lambda record: changed(record, uploads={"": "y"}), False),
}


@pytest.mark.parametrize(("name", "harm", "is_healed"), HARMS.values(), ids=HARMS)
def test_records_that_were_tampered_with_make_no_output(
    name: str, harm: Callable[[dict[str, Any]], object], is_healed: bool, store: Store, alone: Path, cli: Cli
) -> None:
    assert run(cli, JOBS["cast"], alone).code == 0
    assert run(cli, JOBS["cast"], store.url, "--part", "1/2").code == 0
    at = {"Bucket": store.name, "Key": f"{parts_of(store)}/{name}"}
    record = json.loads(store.client.get_object(**at)["Body"].read())
    store.client.put_object(**at, Body=json.dumps(harm(record)).encode())
    ran = run(cli, JOBS["cast"], store.url, "--part", "2/2", "--json")
    if is_healed:
        assert ran.code == 0 and store.contents() == local(alone)
    else:
        assert not store.outputs()
        assert ran.code in (2, 3) or ran.json["waiting"] == ["1"] or ran.json["waiting"] == [1], ran


def test_parts_that_are_written_twice_send_nothing_and_do_no_harm(
    store: Store, alone: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(cli, JOBS["cast"], alone).code == 0
    sent = list[int]()
    send = multipart.Multipart.send

    def counted(client: Any, key: str, upload: str, number: int, data: bytes) -> str:
        sent.append(number)
        return send(client, key, upload, number, data)

    monkeypatch.setattr(multipart.Multipart, "send", counted)
    for part in ("1/3", "1/3", "3/3", "2/3"):
        before = len(sent)
        assert run(cli, JOBS["cast"], store.url, "--part", part).code == 0
        assert (len(sent) > before) == (before == 0 or part != "1/3")
    assert sorted(sent) == [*range(1, len(sent) + 1)]  # each once
    assert store.contents() == local(alone)


# Processes


SMALL_PARTS = """
import sys
from ckpttool.core.cli import main
from ckpttool.core.remote import multipart
multipart.PART = multipart.LEAST = 1 << 20
main()
"""


def started(words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SMALL_PARTS, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_parts_at_once_and_twice_make_one_output(large: tuple[Path, bytes], store: Store) -> None:
    source, expected = large
    words = ["convert", str(source), f"{store.url}/out.pt", "--dtype", "bf16", "--part"]
    running = [started([*words, f"{number}/3"]) for number in (1, 2, 3, 2)]
    said = [each.communicate(timeout=120)[1].decode() for each in running]
    failed = [err for each, err in zip(running, said, strict=True) if each.returncode]
    assert all("already exists" in err for err in failed), failed
    assert store.contents() == {"out.pt": expected}


@pytest.mark.long
def test_no_kill_damages_an_output(large: tuple[Path, bytes], store: Store) -> None:
    """Kill parts at random moments, two at once; then write what is missing."""
    source, expected = large
    chance = random.Random(20)
    words = ["convert", str(source), f"{store.url}/out.pt", "--dtype", "bf16", "--part"]
    for _ in range(10):
        running = [started([*words, f"{chance.randint(1, 3)}/3"]) for _ in range(2)]
        for each in running:
            time.sleep(chance.uniform(0.2, 1.0))
            each.send_signal(signal.SIGKILL)
            each.communicate()
        if outputs := store.outputs():
            assert outputs == {"out.pt": expected}
            store.client.delete_object(Bucket=store.name, Key="out.pt")
    for number in (1, 2, 3):
        if not store.outputs():
            ran = started([*words, f"{number}/3"])
            assert ran.communicate(timeout=120)[1] is not None and ran.returncode == 0
    assert store.outputs() == {"out.pt": expected}


def test_from_bucket_to_bucket(
    large: tuple[Path, bytes],
    store: Store,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, expected = large
    store.client.upload_file(str(source), store.name, "in/in.pt")
    monkeypatch.setattr(multipart, "PART", 1 << 20)
    monkeypatch.setattr(copying, "BUFFER", 1 << 20)
    out = f"{store.url}/to/out.pt"
    for number in (3, 1, 2):
        ran = cli(
            "convert", f"{store.url}/in/in.pt", out, "--dtype", "bf16", "--part", f"{number}/3", "--json"
        )
        assert ran.code == 0, ran
        # The last one makes the pieces with the header of a value too, whose checksum it alone knows.
        assert ran.json["bytes_read"] < (0.7 if number == 2 else 0.45) * source.stat().st_size
    assert store.contents()["to/out.pt"] == expected
    assert ckpttool.digest(out) == ckpttool.digest(source.parent / "out.pt")


@pytest.mark.long
def test_an_upload_of_more_parts_than_a_listing_holds(
    store: Store, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.randn(250_000)}, tmp_path / "in.pt")
    monkeypatch.setattr(multipart, "PART", 800)
    assert cli("convert", tmp_path / "in.pt", tmp_path / "out.safetensors").code == 0
    for number in (1, 2):
        words = ("convert", tmp_path / "in.pt", f"{store.url}/out.safetensors", "--part", f"{number}/2")
        assert cli(*words).code == 0
    assert store.contents()["out.safetensors"] == (tmp_path / "out.safetensors").read_bytes()
