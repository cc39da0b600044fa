"""Wherever a path stands a URL does: the same checkpoint and output, few requests, and no secret."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.formats import shards
from ckpttool.core.remote import ahead
from ckpttool.core.remote.store import TRAFFIC
from ckpttool.core.remote.urls import OFFLINE, canonical
from ckpttool.errors import CkptToolError, Damaged, Unreadable, Unsupported
from tests.support.every_format import INPUTS, as_dcp, training
from tests.support.hub_server import Hub, Reply, Seen
from tests.support.range_server import RangeServer
from tests.support.running import Cli, assert_says

# ---- Wherever a path stands a URL does: the same checkpoint and output, few requests, and no secret said


pytest.importorskip("obstore")

FOLDERS = ("shards, safetensors", "shards, torch", "DCP folder")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one checkpoint in every format, by its name in INPUTS."""
    top = tmp_path_factory.mktemp("checkpoints")
    for name, write in INPUTS.items():
        write(top / name.replace("`", "").replace("/", " "))
    return top


@pytest.fixture(scope="module")
def bucket(checkpoints: Path, s3: Any) -> str:
    """Return the URL of a folder in a bucket that holds the same checkpoints."""
    s3.create_bucket(Bucket="runs")
    for path in filter(Path.is_file, sorted(checkpoints.rglob("*"))):
        s3.put_object(Bucket="runs", Key=f"a/{path.relative_to(checkpoints)}", Body=path.read_bytes())
    return "s3://runs/a"


@pytest.fixture(scope="module")
def hub(checkpoints: Path, hub_server: Hub) -> Hub:
    """Return a stand-in of the hub, whose repository o/r holds the same checkpoints."""
    hub_server.create("o/r").commit_folder(checkpoints)
    return hub_server


@pytest.mark.parametrize("name", INPUTS)
def test_every_format_is_the_same_checkpoint_at_each_kind_of_url(
    name: str, checkpoints: Path, bucket: str, hub: Hub, cli: Cli
) -> None:
    there = name.replace("`", "").replace("/", " ")
    local = cli("inspect", checkpoints / there, "--json").json
    with RangeServer(checkpoints) as server:
        tops = [server.url, bucket, "hf://o/r"]
        for top in tops:
            url = f"{top}/{there}" + "/" * (name in FOLDERS)
            if name == "shards, torch" and top == server.url:
                url += "pytorch_model.bin.index.json"
            with ckpttool.open(url) as checkpoint:
                assert ckpttool.digest(checkpoint) == ckpttool.digest(checkpoints / there), top
            remote = cli("inspect", url, "--json").json
            assert {**remote, "path": ""} == {
                **local,
                "path": "",
                "requests": remote["requests"],
                "bytes_read": remote["bytes_read"],
                **({"commit": hub.repos["model", "o/r"].refs["main"]} if top.startswith("hf") else {}),
            }


def put(folder: Path, name: str = "a.pt", **more: Any) -> Path:
    """Write a checkpoint of 3 MB under DDP's prefix."""
    torch.manual_seed(0)
    tensors = {
        f"module.{n}.{k}": torch.randn(s) for n in range(6) for k, s in (("w", (256, 512)), ("b", (8,)))
    }
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path) if name.endswith(".safetensors") else torch.save(
        {"model": tensors, **more}, path
    )
    return path


WRITING: dict[str, list[str]] = {
    "strip-prefix": ["{}/a.pt"],
    "add-prefix": ["{}/b.safetensors"],
    "rename-keys": ["{}/b.safetensors", "--map", "module=m"],
    "convert": ["{}/a.pt", "--dtype", "bf16", "--exclude", "*.b"],
    "slim": ["{}/a.pt", "--state", "model"],
    "average": ["{}/a.pt", "{}/b.safetensors"],
    "disarm": ["{}/a.pt"],
    "merge": ["{}/shards/model.safetensors.index.json"],
}


@pytest.mark.covered(lambda command, ending: ending == ".pt" and command != "strip-prefix")
@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("ending", [".pt", ".safetensors", "/"])
def test_a_command_writes_the_same_bytes_from_a_url(
    command: str, ending: str, server: RangeServer, tmp_path: Path, cli: Cli
) -> None:
    there = tmp_path / "there"
    put(there)
    put(there, "b.safetensors")
    ckpttool.convert(there / "b.safetensors", f"{there}/shards/", shard_size=1_000_000)
    if command == "disarm" and ending != ".pt":
        pytest.skip("disarm writes .pt alone")
    written = {}
    for name, top in (("local", str(there)), ("remote", server.url)):
        (tmp_path / name).mkdir()
        output = f"{tmp_path / name / 'out'}{ending}"
        ran = cli(command, *(word.format(top) for word in WRITING[command]), output, "--json")
        assert ran.code == 0, ran.err
        paths = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        written[name] = {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in paths}
    assert written["remote"] == written["local"]
    assert ran.json["requests"] > 0
    assert ran.json["bytes_read"] > 0


def test_checks_and_functions_take_urls(server: RangeServer, tmp_path: Path, cli: Cli) -> None:
    there = tmp_path / "there"
    a, b = put(there), put(there, "b.safetensors")
    with ckpttool.open(f"{server.url}/a.pt") as checkpoint:
        state, local = checkpoint.state(), torch.load(a)["model"]
        assert all(torch.equal(value, local[name]) for name, value in state.load().items())
        assert (state["module.0.w"].numpy() == local["module.0.w"].numpy()).all()
    assert ckpttool.diff(f"{server.url}/a.pt", f"{server.url}/b.safetensors").same
    assert cli("diff", f"{server.url}/a.pt", b).code == 0
    assert cli("verify", f"{server.url}/a.pt", "--against", b).code == 0
    assert cli("digest", f"{server.url}/a.pt", f"{server.url}/b.safetensors").code == 0
    assert cli("inspect", f"{server.url}/a.pt", "--tensors", "--stats").code == 0


@pytest.mark.parametrize(("name", "most"), [("a.pt", 2), ("b.safetensors", 1)])
def test_inspect_asks_little(name: str, most: int, server: RangeServer, tmp_path: Path, cli: Cli) -> None:
    put(tmp_path / "there", name)
    before = TRAFFIC.nbytes
    ran = cli("inspect", f"{server.url}/{name}", "--json")
    assert (ran.code, len(server.requests)) == (0, most)
    assert TRAFFIC.nbytes - before <= most * (256 << 10)


def test_inspect_asks_for_what_tells_how_layers_are_packed_at_once(
    server: RangeServer, tmp_path: Path, cli: Cli
) -> None:
    words = {"qweight": (8, 256), "qzeros": (8, 32), "g_idx": (64,)}
    tensors = {
        f"l.{layer}.{name}": torch.zeros(shape, dtype=torch.int32)
        for layer in range(200)
        for name, shape in words.items()
    }
    tensors |= {f"l.{layer}.scales": torch.ones(8, 256).half() for layer in range(200)}
    save_file(tensors, tmp_path / "there" / "model.safetensors")
    section = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    (tmp_path / "there" / "config.json").write_text(json.dumps({"quantization_config": section}))
    ran = cli("inspect", f"{server.url}/model.safetensors", "--json")
    assert (ran.code, [each["tensors"] for each in ran.json["quantised"]]) == (0, [200])
    assert len(server.requests) <= 6


def test_a_selection_reads_its_tensors_alone(server: RangeServer, tmp_path: Path, cli: Cli) -> None:
    put(tmp_path / "there", "b.safetensors")
    before = TRAFFIC.nbytes
    out = tmp_path / "o.safetensors"
    assert cli("convert", f"{server.url}/b.safetensors", out, "--only", "module.5.w").code == 0
    assert TRAFFIC.nbytes - before <= (256 << 10) + 256 * 512 * 4


def test_tensors_that_lie_together_are_one_request(server: RangeServer, tmp_path: Path, cli: Cli) -> None:
    tensors = {f"module.{number}": torch.full((10,), float(number)) for number in range(300)}
    save_file({**tensors, "module.large": torch.zeros(200_000)}, tmp_path / "there" / "many.safetensors")
    out = tmp_path / "o.pt"
    assert cli("strip-prefix", f"{server.url}/many.safetensors", out).code == 0
    assert len(server.requests) == 2
    assert torch.load(out)["299"].tolist() == [299.0] * 10


def test_many_files_are_opened_and_read_at_once(server: RangeServer, tmp_path: Path, cli: Cli) -> None:
    """More than there are threads, each of them larger than its beginning and end."""
    names = [f"{number}.pt" for number in range(20)]
    for name in names:
        put(tmp_path / "there", name)
    urls = [f"{server.url}/{name}" for name in names]
    before = TRAFFIC.nbytes
    assert cli("average", *urls, tmp_path / "mean.pt").code == 0
    assert TRAFFIC.nbytes - before < 20 * (3_200_000 + 600_000) * 1.1
    assert ckpttool.digest(tmp_path / "mean.pt") == ckpttool.digest(tmp_path / "there" / "0.pt")


def test_of_many_shards_each_is_read_once(server: RangeServer, tmp_path: Path, cli: Cli) -> None:
    put(tmp_path, "b.safetensors")
    shards = f"{tmp_path}/there/shards/"
    ckpttool.convert(tmp_path / "b.safetensors", shards, shard_size=1000)
    count = len(os.listdir(shards)) - 1
    assert cli("convert", f"{server.url}/shards/model.safetensors.index.json", tmp_path / "o.pt").code == 0
    assert len(server.requests) <= 2 * count + 1
    assert ckpttool.digest(tmp_path / "o.pt") == ckpttool.digest(tmp_path / "b.safetensors")


# A zip's records.


def with_header(path: Path, change: Callable[[bytearray, int], None]) -> None:
    """Change the local header of the largest record of a zip."""
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.file_size)
    change(raw, entry.header_offset)
    path.write_bytes(raw)


def renamed(raw: bytearray, at: int) -> None:
    raw[at + 30] ^= 1


def moved(raw: bytearray, at: int) -> None:
    """Have the bytes begin a little earlier, by a shorter extra field."""
    named, extra = struct.unpack_from("<HH", raw, at + 26)
    struct.pack_into("<HH", raw, at + 26, named, extra - 4)


@pytest.mark.parametrize("change", [renamed, moved])
def test_the_own_header_of_a_record_is_compared_when_its_bytes_are_read(
    change: Callable[[bytearray, int], None], server: RangeServer, tmp_path: Path, cli: Cli
) -> None:
    path = put(tmp_path / "there")
    with_header(path, change)
    shown = cli("inspect", f"{server.url}/a.pt")
    assert_says(shown, 0, "only the directory was read", "compared when the bytes are read")
    ran = cli("strip-prefix", f"{server.url}/a.pt", tmp_path / "o.pt")
    assert_says(ran, 3, f"error: {server.url}/a.pt: its record 'a/data/")
    assert not (tmp_path / "o.pt").exists()
    assert cli("strip-prefix", path, tmp_path / "o.pt").code == 3


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_of_another_tool_is_read_too(compression: int, server: RangeServer, tmp_path: Path) -> None:
    """Its records have no descriptors, and begin anywhere."""
    path = put(tmp_path / "there")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(path.with_name("z.pt"), "w", compression) as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    assert ckpttool.digest(f"{server.url}/z.pt") == ckpttool.digest(path)


# What changes meanwhile.


def test_an_object_that_changes_meanwhile_is_said_and_leaves_no_output(
    server: RangeServer, tmp_path: Path, cli: Cli
) -> None:
    put(tmp_path / "there")
    out = tmp_path / "o.safetensors"
    out.write_bytes(b"old")
    server.fault("other size", skip=2)
    ran = cli("strip-prefix", f"{server.url}/a.pt", out, "--force")
    assert_says(ran, 3, f"error: {server.url}/a.pt: changed while it was read\n")
    assert (out.read_bytes(), sorted(os.listdir(tmp_path))) == (b"old", ["o.safetensors", "there"])


@pytest.mark.parametrize("told", ["size", "date", "nothing"])
def test_what_a_server_without_etags_tells_of_a_change_is_compared_and_nothing_is_a_note(
    told: str, server: RangeServer, tmp_path: Path, cli: Cli
) -> None:
    torch.save({"w": torch.zeros(500_000)}, path := tmp_path / "there" / "a.pt")
    ckpttool.convert(path, tmp_path / "there" / "a.safetensors")
    server.etag, server.dates = "", told == "date"
    server.fault("other size" if told == "size" else "changed", skip=1)
    out = tmp_path / "o.safetensors"
    ran = cli("convert", f"{server.url}/a.safetensors", out)
    if told != "nothing":
        assert_says(ran, 3, "a.safetensors: changed while it was read\n")
        assert not out.exists()
    else:
        assert_says(ran, 0, "sends neither an ETag nor Last-Modified", "goes unnoticed")


@pytest.mark.parametrize("place", [0, -3])
def test_remote_values_are_read_once_and_held_to_their_checksums(
    place: int, server: RangeServer, tmp_path: Path
) -> None:
    values = torch.rand(3, 300_000)
    torch.save({"w": values, "first": values[0]}, path := tmp_path / "there" / "a.pt")

    def state() -> ckpttool.State:
        return ckpttool.open(f"{server.url}/a.pt").state()

    before = TRAFFIC.nbytes
    assert torch.equal(state().load()["w"], values)
    assert TRAFFIC.nbytes - before < 1.3 * path.stat().st_size
    raw = bytearray(path.read_bytes())
    raw[raw.index(values.numpy().tobytes()) + place % values.nbytes] ^= 1
    path.write_bytes(raw)
    for use in (lambda: state().load(), lambda: state()["first"].numpy()):
        with pytest.raises(Damaged, match=r"a\.pt: the bytes of"):
            use()
    state().load(verify=False)


def test_a_server_without_ranges_sends_all_once_and_it_is_said(
    server: RangeServer, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:

    path = put(tmp_path / "there")
    server.ranges = False
    ran = cli("strip-prefix", f"{server.url}/a.pt", tmp_path / "o.safetensors")
    assert_says(ran, 0, "its server ignores ranges, so all of it was read")
    assert len(server.requests) == 2
    monkeypatch.setattr("ckpttool.core.remote.places.SPOOLED", 1000)
    ran = cli("inspect", f"{server.url}/a.pt")
    assert_says(ran, 3, f"is sent only as a whole, {path.stat().st_size} bytes", "download it first")


def test_what_signs_a_url_is_said_nowhere(server: RangeServer, tmp_path: Path, cli: Cli, cache: Path) -> None:
    put(tmp_path / "there")
    url = f"{server.url}/a.pt?X-Signature=SECRET&x=1#SECRET"
    ran = [cli("inspect", url), cli("inspect", url, "--json"), cli("inspect", url + "x", "-v")]
    server.fault("403")
    ran += [
        cli("strip-prefix", url, tmp_path / "o.pt"),
        cli("inspect", url, "--json"),
        cli("digest", url, url),
    ]
    assert "SECRET" not in "".join(each.out + each.err for each in ran)
    assert ran[0].out.startswith(f"{server.url}/a.pt?…")
    assert {request.query for request in server.requests} >= {"X-Signature=SECRET&x=1"}
    with pytest.raises(CkptToolError) as raised:
        ckpttool.open(url)
    assert "SECRET" not in f"{raised.value}{raised.value!r}{raised.value.__dict__}"
    assert "SECRET" not in "".join(map(str, cache.rglob("*")))


LEAKING = (
    *("https://u:SECRET@h/x", "ftp://u:SECRET@h/x", "http://user:SECRET?x@h/x", "http://user:SEC/SECRET@h/x"),
    *("hf://o/r?token=SECRET", "hf://o/r/f.pt?SECRET", "hf://u:SECRET@o/r", "http://user:1/SECRET@h/x"),
    *("http://u:SEC#SECRET@h/x", "https://u:SECRET%40h/x", "s3://AKIA:S/SECRET@b/k", "s3:///u:SECRET@b/k"),
    *("gs://b/k?sig=SECRET", "HTTPS://u:SEC SECRET@h/x", "https:/u:SECRET@h/x", "https://[u:SECRET@h/x"),
    *("http://h:80/x.pt?a=b SECRET", "az://u:SECRET@c/k", "file://u:SECRET@h/x", "xyz:///u:SECRET@h/x"),
    *("https://u:SECRET@h/x\udcff", "https://h.org/a.pt+https://u:SECRET@h/x", "http://u.v:1/SECRET@h/x"),
    *("https:u:SECRET@h/x", "https://h.org/x?a=SECRET+https://h.org/y?b=SECRET"),
)
WAYS = (
    *("inspect {}", "convert a.pt {}", "convert {} o.pt", "strip-prefix a.pt {} --force", "diff a.pt {}"),
    *("delta a.pt {} o", "delta a.pt a.pt {}", "apply {} a.pt o", "inspect a.pt+{}", "inspect {}+a.pt"),
    *(
        "convert a.pt o.pt --map {}",
        "{}",
        "inspect a.pt {} {}",
        "convert a.pt o.pt --{}",
        "digest a.pt --state {}",
    ),
    *("convert a.pt o.pt --dtype {}", "average a.pt {} o.pt", "doctor a.pt --model {}", "report a.pt -o {}"),
    *(
        "merge {} o.pt",
        "scan {}",
        "inspect {} --revision {}",
        "verify a.pt --against {}",
        "slim {} --in-place",
    ),
)


@pytest.mark.parametrize("way", WAYS)
def test_a_password_is_said_nowhere(
    way: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTTOOL_TIMEOUT", "0.2")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    torch.save({"w": torch.ones(2)}, "a.pt")
    for url in LEAKING if way in WAYS[:3] else LEAKING[:5]:
        for more in ((), ("--json",)):
            ran = cli(*(each.replace("{}", url) for each in way.split()), *more)
            assert "SECRET" not in ran.out + ran.err, (url, ran.out + ran.err)


@pytest.mark.parametrize("url", LEAKING)
def test_no_error_holds_a_password(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(OFFLINE, "1")
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with ckpttool.open(tmp_path / "a.pt") as checkpoint:
        calls = (ckpttool.open, ckpttool.inspect, partial(ckpttool.save, checkpoint))
        for call in calls:
            with pytest.raises(CkptToolError) as raised:
                call(url)
            error = raised.value
            assert "SECRET" not in f"{error}{error!r}{error.args}{error.__dict__}"
            assert "SECRET" not in "".join(traceback.format_exception(error)).split("call(url)")[-1]
    assert "SECRET" not in f"{ckpttool.scan(url)}"


def test_a_pipe_in_the_cache_is_no_part_of_it(
    server: RangeServer, tmp_path: Path, cli: Cli, cache: Path
) -> None:
    put(tmp_path / "there")
    assert cli("inspect", f"{server.url}/a.pt").code == 0
    (kept,) = cache.iterdir()
    os.mkfifo(cache / "other.ranges")
    os.mkfifo(cache / f".{kept.name}.ckpttool.part")
    for make in (os.mkfifo, os.mkdir):
        kept.unlink()
        make(kept)
        assert cli("inspect", f"{server.url}/a.pt").code == 0
    assert kept.is_dir()


@pytest.mark.parametrize(
    "text",
    [
        *("hf://gpt2@main: no such file", "hf://o/r@v1/x@y.pt: gone", "https://h.org/npm/x@1.2/f.pt: gone"),
        *("s3://b/a@b.pt, s3://b/c@d.pt", "http://localhost:80/a@b.pt", "http://127.0.0.1:8000/a@b: gone"),
        *("is it https://h.org/x?", "file:///tmp/a@b.pt", "line 3: a@b", "run:/tmp/a@b", "note:x@y"),
        *("https://h.org/x.pt?…0123abcd: gone", "a.pt+hf://o/r@v1/d.pt: gone", "x: 3@4: y"),
    ],
)
def test_what_is_no_secret_is_said(text: str) -> None:
    assert str(CkptToolError(text)) == text


# URLs.

CANONICAL = {
    "HTTPS://Host.Org:8443/a%20b/c%2Fd%25.pt": "https://host.org:8443/a b/c%2Fd%25.pt",
    "https://h/ä.pt#part": "https://h/ä.pt",
    "https://h/a%23b%3Fc%2523.pt": "https://h/a%23b%3Fc%2523.pt",
    "https://[::1]:80/x": "https://[::1]:80/x",
    "s3://Bucket/a b/%2F?#.pt": "s3://Bucket/a b/%2F?#.pt",
    "hf://o/r/f.pt": "hf://o/r@v%2F2/f.pt",
    "hf://o/r@main/f.pt": "hf://o/r@main/f.pt",
    "hf://datasets/o/r": "hf://datasets/o/r@v%2F2",
    "file:///tmp/a%20b.pt": "/tmp/a b.pt",
    "file://localhost/tmp/a": "/tmp/a",
    "a/b.pt": "a/b.pt",
}


@pytest.mark.parametrize("url", CANONICAL)
def test_a_url_has_one_form_and_keeps_it(url: str) -> None:
    once = canonical(url, "v/2")
    assert (once, canonical(once, "v/2")) == (CANONICAL[url], CANONICAL[url])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://user:secret@h/a.pt", "holds a password"),
        ("ftp://user:secret@h/a.pt", "holds a password"),
        ("hf://user:secret@o/r", "holds a password"),
        ("s3://key:secret@bucket/a.pt", "holds a password"),
        ("az://c/a.pt?sv=1&sig=secret", "is signed"),
        ("s3://b/a.pt?X-Amz-Signature=secret", "is signed"),
        ("https:///a.pt", "names no host"),
        ("https://h:port/a.pt", "is not a URL"),
        ("s3:///a.pt", "names no bucket"),
        ("hf://", "names no repository"),
        ("file://elsewhere/a.pt", "names a file of the machine elsewhere"),
        ("ftp://h/a.pt?secret", "is a URL of a kind that is not read here"),
    ],
)
def test_a_malformed_url_is_refused_without_its_secrets(url: str, said: str) -> None:
    with pytest.raises((Unreadable, Unsupported), match=said) as raised:
        ckpttool.open(url)
    assert "secret" not in str(raised.value)


def test_names_with_odd_characters_are_read(server: RangeServer, tmp_path: Path, cli: Cli) -> None:
    for number, name in enumerate(("a b.pt", "c#d.pt", "e?f.pt", "ü%20.pt", "g+h.pt")):
        torch.save({"w": torch.full((3,), float(number))}, tmp_path / "there" / name)
    for number, escaped in enumerate(("a%20b.pt", "c%23d.pt", "e%3Ff.pt", "%C3%BC%2520.pt", "g+h.pt")):
        with ckpttool.open(f"{server.url}/{escaped}") as checkpoint:
            assert checkpoint.state()["w"].numpy().tolist() == [float(number)] * 3
        assert cli("digest", f"{server.url}/{escaped}").out[:64] == ckpttool.digest(checkpoint.path)


def test_a_base_and_a_delta_with_odd_characters_are_read(server: RangeServer, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    for number, name in enumerate(("c#%23.pt", "new.pt")):
        torch.save({"w": torch.full((3,), float(number))}, folder / name)
    ckpttool.delta(folder / "c#%23.pt", folder / "new.pt", folder / "e?f.safetensors")
    with ckpttool.open(f"{server.url}/c%23%2523.pt+{server.url}/e%3Ff.safetensors") as checkpoint:
        assert checkpoint.state()["w"].numpy().tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "http://127.0.0.2/a.safetensors", "/a.safetensors", "b\\c"]
)
def test_an_index_leads_nowhere_else(name: str, server: RangeServer, tmp_path: Path) -> None:
    index = {"weight_map": {"w": name}}
    (tmp_path / "there" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Damaged, match="names a shard outside its folder"):
        ckpttool.open(f"{server.url}/model.safetensors.index.json")
    assert len(server.requests) == 1


def test_nothing_is_asked_while_offline(server: RangeServer, tmp_path: Path, cli: Cli) -> None:
    put(tmp_path / "there")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CKPTTOOL_OFFLINE", "HF_HUB_OFFLINE"):  # the flag sets them for the process
            patch.setenv(name, "")
        for url in (f"{server.url}/a.pt", "s3://b/a.pt"):
            assert_says(cli("inspect", "--offline", url), 3, f"error: {url}: is not asked for while offline")
    assert server.requests == []


# Start-up.


def test_paths_do_not_pay_for_urls(tmp_path: Path) -> None:
    put(tmp_path)
    code = (
        "import sys; from ckpttool.core import cli; sys.modules['urllib3'] = sys.modules['obstore'] = None;"
        f"code = cli.run(['strip-prefix', {str(tmp_path / 'a.pt')!r}, {str(tmp_path / 'o.safetensors')!r}]);"
        "print(code, sorted(n for n in sys.modules if n.split('.')[:3] == ['ckpttool', 'core', 'remote']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = [f"ckpttool.core.remote{name}" for name in ("", ".ahead", ".places", ".store", ".urls")]
    assert ran.stdout.splitlines()[-1] == f"0 {modules}"


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['urllib3'] = None; from ckpttool.core import cli"
    code += "; sys.exit(cli.run(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "inspect", "https://127.0.0.1:9/a.pt"]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert (ran.returncode, ran.stderr.splitlines()[0]) == (
        2,
        "error: this needs urllib3, which is not installed",
    )
    assert ran.stderr.splitlines()[1] == f"hint: {ckpttool.errors.install('remote')}"


# Folders.


def test_companions_come_along_from_a_repository(hub: Hub, tmp_path: Path, cli: Cli) -> None:
    repo = hub.create("o/model")
    put(tmp_path, "model.safetensors")
    files = {name: (tmp_path / name).read_bytes() for name in ("model.safetensors",)}
    repo.commit({**files, "config.json": b'{"a": 1}', "notes.bin": b"x"})
    ran = cli("convert", "hf://o/model", f"{tmp_path}/out/", "--companions")
    assert_says(ran, 0, "copying along", "other files of the folder, not copied: notes.bin")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"a": 1}
    assert_says(
        cli("convert", "hf://o/model", f"{tmp_path}/out2/"), 0, "not copied (--companions does): config.json"
    )


def test_inspect_names_the_commit_that_was_read(
    hub: Hub, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.create("o/moving")
    put(tmp_path, "model.safetensors")
    old = repo.commit({"model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
    new = repo.commit({"README.md": b"x"})
    repo.refs["v1"] = old
    for revision, commit in (("", new), ("@main", new), ("@v1", old), (f"@{old}", old)):
        for url in (f"hf://o/moving{revision}", f"hf://o/moving{revision}/model.safetensors"):
            assert cli("inspect", url, "--json").json["commit"] == commit
        assert f"  commit      {commit}\n" in cli("inspect", url).out
    assert "commit" not in cli("inspect", tmp_path / "model.safetensors", "--json").json
    cached = tmp_path / "models--o--moving" / "snapshots" / old
    cached.mkdir(parents=True)
    put(cached, "model.safetensors")
    assert cli("inspect", cached / "model.safetensors", "--json").json["commit"] == old


def test_a_root_in_a_bucket_names_the_checkpoints_in_it(bucket: str, cli: Cli) -> None:
    ran = cli("convert", f"{bucket}/", "out.pt")
    assert_says(
        ran, 3, "is a folder that holds checkpoints, and is none itself", f"ckpttool inspect '{bucket}/"
    )


def test_ranks_are_merged_where_they_lie(bucket: str, tmp_path: Path, cli: Cli) -> None:
    as_dcp(training)(tmp_path / "dcp")
    ran = cli("merge", f"{bucket}/DCP folder/", tmp_path / "whole.pt")
    assert ran.code == 0, ran.err
    assert ckpttool.digest(tmp_path / "whole.pt") == ckpttool.digest(tmp_path / "dcp")


def test_what_two_revisions_share_is_read_once_or_not_at_all(hub: Hub, tmp_path: Path, cli: Cli) -> None:
    repo = hub.create("o/tuned")
    put(tmp_path, "model.safetensors")
    ckpttool.convert(tmp_path / "model.safetensors", f"{tmp_path}/shards/", shard_size=1_000_000)
    first = repo.commit_folder(tmp_path / "shards")
    with ckpttool.open(tmp_path / "shards") as checkpoint:
        changed = {name: value.clone() for name, value in checkpoint.state().load().items()}
    changed["module.5.w"] += 1
    save_file(changed, tmp_path / "changed.safetensors")
    ckpttool.convert(
        tmp_path / "changed.safetensors", f"{tmp_path}/shards/", shard_size=1_000_000, force=True
    )
    repo.commit_folder(tmp_path / "shards")
    before = TRAFFIC.nbytes
    ran = cli("diff", f"hf://o/tuned@{first}", "hf://o/tuned")
    assert_says(ran, 1, "in files whose hashes are the same, and were not read")
    assert "module.5.w" in ran.out
    size = (tmp_path / "changed.safetensors").stat().st_size
    assert TRAFFIC.nbytes - before < size * 2
    before = TRAFFIC.nbytes
    ran = cli("digest", f"hf://o/tuned@{first}", "hf://o/tuned")
    digests = [line.split()[0] for line in ran.out.splitlines()]
    assert digests == [ckpttool.digest(tmp_path / f"{name}.safetensors") for name in ("model", "changed")]
    assert TRAFFIC.nbytes - before < size * 2


def test_a_tie_in_a_file_of_a_known_hash_is_digested_once(hub: Hub, tmp_path: Path) -> None:
    tied = torch.arange(1000.0)
    state = {"a": tied, "b": tied, "c": torch.ones(1000), "d": torch.zeros(1000)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    hub.create("o/tied").commit({"pytorch_model.bin": (tmp_path / "pytorch_model.bin").read_bytes()})
    assert ckpttool.digest("hf://o/tied") == ckpttool.digest(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("output", ["S3://nowhere/a.pt", "HF://me/none/a.pt", "ftp://h/a.pt", "gs://"])
def test_an_output_s_url_may_be_written_in_any_case(
    output: str, tmp_path: Path, cli: Cli, bucket: str
) -> None:
    ran = cli("convert", put(tmp_path), output)
    assert (ran.code in (2, 3), ran.err.startswith("error: "), len(ran.err.splitlines()) <= 2) == (True,) * 3
    with pytest.raises(CkptToolError), ckpttool.open(put(tmp_path)) as checkpoint:
        ckpttool.save(checkpoint, output)


def test_a_header_that_can_not_be_so_long_is_not_read(server: RangeServer, tmp_path: Path) -> None:
    """Between two records there may be anything, and it may be large: a gap is no header."""
    path = put(tmp_path / "there")
    gap = tmp_path / "there" / "gap.pt"
    with zipfile.ZipFile(path) as archive, open(gap, "wb") as file, zipfile.ZipFile(file, "w") as other:
        for number, name in enumerate(archive.namelist()):
            if number == 1:
                file.seek(5_000_000, os.SEEK_CUR)
                other.start_dir = file.tell()
            other.writestr(name, archive.read(name))
    before = TRAFFIC.nbytes
    with ckpttool.open(f"{server.url}/gap.pt") as checkpoint:
        assert TRAFFIC.nbytes - before < 3_000_000
        assert ckpttool.digest(checkpoint) == ckpttool.digest(path)


def test_a_name_may_look_as_if_a_query_had_been_taken_off(server: RangeServer, tmp_path: Path) -> None:
    put(tmp_path / "there", "m.safetensors")
    with pytest.raises(CkptToolError, match="no such object"):
        ckpttool.open(f"{server.url}/m%3F%E2%80%A6deadbeef.safetensors")


# ---- Files of many ranks in a repository: read one after another, in few requests, into the same bytes


pytest.importorskip("obstore")

RANKS = 16


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, hub_server: Hub) -> Path:
    """Return a folder of the files of 16 ranks, 1 MB each, that the hub has as o/ranks."""
    from ckpttool import open as open_checkpoint
    from ckpttool import split

    top = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    state = {f"layers.{n}.weight": torch.randn(RANKS * 80, 128) for n in range(24)}
    state |= {f"layers.{n}.bias": torch.randn(9 * n + 1) for n in range(8)}  # some ranks have none of it
    torch.save({"model": state, "epoch": 3}, top / "whole.pt")
    with open_checkpoint(top / "whole.pt") as checkpoint:
        split(checkpoint, f"{top}/ranks/", ranks=RANKS)
    hub_server.create("o/ranks").commit_folder(top / "ranks")
    return top / "ranks"


OUTPUTS = {
    "safetensors": ["out.safetensors"],
    "pt": ["out.pt"],
    "cast": ["out.safetensors", "--dtype", "bf16"],
    "shards": ["out/", "--shard-size", "3MB"],
}


@pytest.mark.covered(lambda output: output in ("pt", "cast", "shards"))
@pytest.mark.parametrize("output", OUTPUTS)
def test_the_files_of_ranks_are_each_read_once_and_front_to_back(
    output: str, ranks: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As little room as there is for the files of a thousand ranks.
    monkeypatch.setattr(ahead, "HELD", 4 << 20)
    written = {}
    for name, place in (("local", str(ranks)), ("remote", "hf://o/ranks")):
        (tmp_path / name).mkdir()
        file, *options = OUTPUTS[output]
        ran = cli("merge", place, f"{tmp_path / name}/{file}", *options, "--json")
        assert ran.code == 0, ran.err
        paths = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        written[name] = {path.name: path.read_bytes() for path in paths}
    assert written["remote"] == written["local"]
    nbytes = sum(path.stat().st_size for path in ranks.iterdir())
    # Of each file: where it is, its beginning and its end, and all of it; and the small ones beside them.
    assert ran.json["requests"] <= 1 + 6 * RANKS
    assert ran.json["bytes_read"] <= nbytes + RANKS * (200 << 10)


def test_shards_that_are_written_in_turn_do_not_fetch_files_again(
    ranks: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "HELD", 4 << 20)
    monkeypatch.setattr(shards, "TOGETHER", 1)
    ran = cli("merge", "hf://o/ranks", f"{tmp_path}/out/", "--shard-size", "3MB", "--json")
    nbytes = sum(path.stat().st_size for path in ranks.iterdir())
    assert (ran.code, ran.json["bytes_read"] <= nbytes * 1.3 + RANKS * (200 << 10)) == (0, True), ran.json
    assert (
        cli("verify", f"{tmp_path}/out/", "--against", ranks.parent / "whole.pt", "--state", "model").code
        == 0
    )


@pytest.mark.usefixtures("soon_again")
def test_an_interrupted_merge_goes_on_where_it_was(
    ranks: Path, hub_server: Hub, tmp_path: Path, cli: Cli
) -> None:
    words = ("merge", "hf://o/ranks", tmp_path / "out.safetensors", "--no-verify")
    left = 3 * RANKS + 12  # small files, beginnings, ends, and the values of some files

    def fault(seen: Seen) -> Reply | None:
        nonlocal left
        left -= seen.host == "127.0.0.2"
        return Reply.fault(503) if left < 0 else None

    hub_server.faults.append(fault)
    assert_says(cli(*words), 3, "--resume goes on with it")
    hub_server.faults.clear()
    ran = cli(*words, "--resume", "--json")
    assert (ran.code, "begun from the start" in ran.err) == (0, False), ran.err
    assert cli("verify", tmp_path / "out.safetensors", "--against", ranks.parent / "whole.pt").code == 0
