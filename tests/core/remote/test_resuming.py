"""What was fetched is not fetched again: an interrupted conversion goes on, and a header is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.core.files.resuming import Attempt
from ckpttool.core.remote import ahead
from ckpttool.core.remote import source as remote_cache
from ckpttool.core.remote.store import TRAFFIC
from tests.support.range_server import RangeServer
from tests.support.running import ROOT, Cli, assert_says, within

SIZE = 24 << 20  # bytes of a checkpoint: several pieces


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one state as a.pt, a.safetensors and shards."""
    folder = tmp_path_factory.mktemp("there")
    torch.manual_seed(0)
    state = {f"module.{number}": torch.randn(SIZE // 4 // 24) for number in range(24)}
    torch.save(state, folder / "a.pt")
    save_file(state, folder / "a.safetensors")
    ckpttool.convert(folder / "a.safetensors", f"{folder}/shards/", shard_size=SIZE // 6)
    return folder


@pytest.fixture
def impatient(soon_again: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files fetched in small pieces, a few at a time, and nobody wait long."""
    monkeypatch.setattr(ahead, "LARGEST", 1 << 20)
    monkeypatch.setattr(ahead, "HELD", 4 << 20)


def parts(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if "ckpttool" in name)


def fail_after(server: RangeServer, nbytes: int, path: str) -> None:
    """Have the server fail from the request on before which about so many bytes were sent."""
    server.fault("503", skip=nbytes >> 20, times=10_000, path=path)


JOBS: dict[str, tuple[str, str, list[str]]] = {
    "copied": ("strip-prefix", "a.safetensors", ["out.safetensors"]),
    "copied, with checksums": ("strip-prefix", "a.pt", ["out.safetensors"]),
    "computed": ("convert", "a.safetensors", ["out.safetensors", "--dtype", "bf16"]),
    "computed, checksums off": ("convert", "a.pt", ["out.pt", "--dtype", "bf16", "--no-verify"]),
    "into shards": ("strip-prefix", "a.safetensors", ["out/", "--shard-size", "5MB"]),
    "from shards": ("strip-prefix", "shards/model.safetensors.index.json", ["out.pt"]),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("job", JOBS)
def test_an_interrupted_conversion_goes_on_where_it_was(
    job: str, there: Path, tmp_path: Path, cli: Cli
) -> None:
    command, source, (name, *options) = JOBS[job]
    output = f"{tmp_path}/{name}"
    with RangeServer(there) as server:
        url = f"{server.url}/{source}"
        if source.startswith("a."):
            fail_after(server, 16 << 20, "a.")
        else:
            fail_after(server, 2 << 20, "-00005-")
        ran = cli(command, url, output, *options)
        assert_says(
            ran, 3, "the server answers with status 503", "the same command with --resume goes on with it"
        )
        assert (os.path.exists(output), len(parts(tmp_path))) == (False, 2)
        server.heal()
        before = TRAFFIC.nbytes
        ran = cli(command, url, output, *options, "--resume")
        assert (ran.code, "begun from the start" in ran.err) == (0, False), ran.err
        fetched = TRAFFIC.nbytes - before
    assert fetched <= SIZE * 0.75
    assert parts(tmp_path) == []
    again = tmp_path / "local"
    again.mkdir()
    assert cli(command, there / source, f"{again}/{name}", *options).code == 0
    assert ckpttool.digest(output) == ckpttool.digest(f"{again}/{name}")
    assert cli("verify", output).code == 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("at", [1 << 20, SIZE - (1 << 20)], ids=["before", "after"])
def test_damage_is_found_on_either_side_of_an_interruption(
    at: int, there: Path, tmp_path: Path, cli: Cli
) -> None:
    """What was computed is not read again: its checksums are of all bytes, so their sums are recorded."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.pt").write_bytes(flipped((there / "a.pt").read_bytes(), at))
    output = tmp_path / "out.safetensors"
    for folder, code in ((there, 0), (tmp_path / "there", 3)):
        with RangeServer(folder) as server:
            words = ("convert", f"{server.url}/a.pt", output, "--dtype", "bf16")
            fail_after(server, 12 << 20, "a.")
            assert cli(*words).code == 3
            server.heal()
            before = TRAFFIC.nbytes
            ran = cli(*words, "--resume")
            assert (ran.code, "checksum" in ran.err) == (code, code == 3), ran
            assert code or TRAFFIC.nbytes - before <= SIZE * 0.75
            assert os.path.exists(output) == (code == 0)
            output.unlink(missing_ok=True)


def flipped(content: bytes, at: int) -> bytes:
    """Return bytes of which one is another."""
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def touched(server: RangeServer, words: list[Any]) -> None:
    (Path(str(server.content)) / "a.safetensors").touch()


def another(server: RangeServer, words: list[Any]) -> None:
    words += ["--exclude", "module.3"]


def without(server: RangeServer, words: list[Any]) -> None:
    words.remove("--resume")


OTHERS: dict[str, tuple[Callable[[RangeServer, list[Any]], None], str]] = {
    "the object has changed": (
        touched,
        "begun from the start, as no earlier attempt of the same plan is here",
    ),
    "another selection": (another, "begun from the start, as no earlier attempt of the same plan is here"),
    "not asked for": (without, ""),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("change", OTHERS)
def test_what_is_of_another_plan_is_not_gone_on_with(
    change: str, there: Path, tmp_path: Path, cli: Cli
) -> None:
    output = tmp_path / "out.safetensors"
    with RangeServer(there) as server:
        words: list[Any] = [
            "convert",
            f"{server.url}/a.safetensors",
            output,
            "--only",
            "module.*",
            "--resume",
        ]
        fail_after(server, 16 << 20, "a.")
        assert cli(*words[:-1]).code == 3
        server.heal()
        act, said = OTHERS[change]
        act(server, words)
        before = TRAFFIC.nbytes
        ran = cli(*words)
        assert_says(ran, 0, said)
        assert TRAFFIC.nbytes - before > SIZE * 0.9
    assert parts(tmp_path) == []


@pytest.mark.usefixtures("impatient")
def test_equal_shapes_from_other_places_are_another_plan(tmp_path: Path, there: Path) -> None:
    """Names, types and shapes are the same, but not whose bytes they get."""
    output = tmp_path / "o.safetensors"

    def save(checkpoint: ckpttool.Checkpoint, names: list[str], **choices: Any) -> None:
        tensors = dict(zip(names, checkpoint.state().tensors.values(), strict=True))
        ckpttool.save(
            checkpoint.rebuilt(lambda value: tensors if isinstance(value, dict) else value), output, **choices
        )

    with RangeServer(there) as server, ckpttool.open(f"{server.url}/a.safetensors") as checkpoint:
        names = [*checkpoint.state().tensors]
        fail_after(server, 16 << 20, "a.")
        with pytest.raises(ckpttool.errors.Unreadable):
            save(checkpoint, names)
        server.heal()
        save(checkpoint, names[::-1], resume=True)
        local = ckpttool.open(there / "a.safetensors").state()
        with ckpttool.open(output) as written:
            for name, other in zip(names[::-1], names, strict=True):
                assert (written.state()[name].numpy() == local[other].numpy()).all()


@pytest.mark.usefixtures("impatient")
def test_a_local_input_is_part_of_the_plan(there: Path, tmp_path: Path, cli: Cli) -> None:
    other, output = tmp_path / "b.safetensors", tmp_path / "o.safetensors"
    state = {f"module.{number}": torch.zeros(SIZE // 4 // 24) for number in range(24)}
    save_file(state, other)
    with RangeServer(there) as server:
        words = ["average", f"{server.url}/a.safetensors", other, output]
        fail_after(server, 16 << 20, "a.")
        assert cli(*words).code == 3
        server.heal()
        save_file({name: value + 1 for name, value in state.items()}, other)
        assert_says(cli(*words, "--resume"), 0, "begun from the start")
    assert cli("average", there / "a.safetensors", other, tmp_path / "local.safetensors").code == 0
    assert output.read_bytes() == (tmp_path / "local.safetensors").read_bytes()


def test_two_processes_do_not_write_into_one_part(tmp_path: Path) -> None:
    """The second one writes as if there were nothing to go on with, and leaves the first one's record."""
    target = str(tmp_path / "o")
    first, second = (Attempt(target, "plan", resume=False, computed=True) for _ in range(2))
    claimed = first.claim_file(0o600)
    assert claimed is not None
    with os.fdopen(claimed[0], "r+b") as file:
        written = first.written(file)
        assert written is not None
        written.add(0, (0, 100, 7))
        first.note()
        assert second.claim_file(0o600) is None
        with open(tmp_path / "other", "w+b") as other:
            assert second.written(other) is None
        assert json.loads((tmp_path / ".o.ckpttool.part.json").read_text())["files"] == {
            "": {"0": [[0, 100, 7]]}
        }


@pytest.mark.parametrize(
    "record",
    [
        '{"plan": "p", "files": {"": [[0, 50], [10, 20]]}}',
        '{"plan": "p", "files": {"": {"0": [[0, 101, 7]]}}}',
        '{"plan": "p", "files": {"": {"0": [[-1, 10, 7]]}}}',
        '{"plan": "p", "files": {"": {"0": [[0, "a", 7]]}}}',
        "[]",
        "{",
        '{"files": 3}',
    ],
)
def test_a_record_that_makes_no_sense_claims_nothing(record: str, tmp_path: Path) -> None:
    (tmp_path / ".o.ckpttool.part").write_bytes(bytes(100))
    (tmp_path / ".o.ckpttool.part.json").write_text(record)
    attempt = Attempt(str(tmp_path / "o"), "p", resume=True, computed=True)
    claimed = attempt.claim_file(0o600)
    assert claimed is not None
    with os.fdopen(claimed[0], "r+b") as file:
        written = attempt.written(file)
        assert written is not None and not written.has(0, 0, 10)


def test_a_forked_process_fetches_by_itself(there: Path) -> None:
    with RangeServer(there) as server, ckpttool.open(f"{server.url}/a.safetensors") as checkpoint:
        tensor = checkpoint.state()["module.1"]
        expected = tensor.numpy().sum()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if tensor.numpy().sum() == expected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.usefixtures("impatient")
def test_damage_leaves_nothing_to_go_on_with(there: Path, tmp_path: Path, cli: Cli) -> None:
    """Who could tell which of the bytes are right?"""
    with RangeServer(there) as server:
        server.fault("other size", skip=12, times=100)
        assert_says(cli("strip-prefix", f"{server.url}/a.safetensors", tmp_path / "o.pt"), 3, "changed while")
    assert parts(tmp_path) == []


def test_an_object_without_a_version_is_begun_again(there: Path, tmp_path: Path, cli: Cli) -> None:
    with RangeServer(there) as server:
        server.etag, server.dates = "", False
        assert cli("strip-prefix", f"{server.url}/a.safetensors", tmp_path / "o.pt", "--resume").code == 0
    assert parts(tmp_path) == []


def start(url: str, output: Path, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "ckpttool", "strip-prefix", url, str(output), *options]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, **streams)


def wait_for(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_conversion_within_a_second_though_the_server_is_silent(
    by: signal.Signals, there: Path, tmp_path: Path
) -> None:
    with RangeServer(there) as server:
        server.fault("stall", skip=2, times=100)
        running = start(f"{server.url}/a.pt", tmp_path / "o.safetensors")
        wait_for(lambda: len(server.requests) > 3)
        with within(2):  # a second, on a machine that is busy with other tests
            running.send_signal(by)
            _, said = running.communicate(timeout=30)
    assert (running.returncode, "Traceback" in said) == (-by, False)
    assert not (tmp_path / "o.safetensors").exists()


def test_a_kill_leaves_the_old_output_and_the_next_conversion_removes_the_rest(
    there: Path, tmp_path: Path
) -> None:
    output = tmp_path / "o.safetensors"
    output.write_bytes(b"old")
    with RangeServer(there, bandwidth=20e6) as server:
        running = start(f"{server.url}/a.pt", output, "--force")
        wait_for(lambda: parts(tmp_path))
        running.kill()
        running.wait(30)
        assert output.read_bytes() == b"old"
        server.link._bandwidth = 1e12
        with start(f"{server.url}/a.pt", output, "--force") as running:
            assert running.wait(30) == 0
    assert os.listdir(tmp_path) == ["o.safetensors"]


# The cache of what opening reads.


def test_the_second_inspect_asks_once_for_each_file(there: Path, cli: Cli) -> None:
    with RangeServer(there) as server:
        for path, first in (("a.pt", 2), ("shards/model.safetensors.index.json", 7)):
            for asked in (first, 1 if path == "a.pt" else first):
                server.requests.clear()
                assert cli("inspect", f"{server.url}/{path}").code == 0
                assert len(server.requests) == asked


def test_a_new_version_is_not_taken_from_the_cache(tmp_path: Path, server: RangeServer) -> None:
    for number in (1.0, 2.0):
        torch.save({"w": torch.full((100_000,), number)}, tmp_path / "there" / "a.pt")
        with ckpttool.open(f"{server.url}/a.pt") as checkpoint:
            assert checkpoint.state()["w"].numpy()[0] == number


@pytest.mark.parametrize(
    "harm", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: bytes([raw[0] ^ 1]) + raw[1:]]
)
def test_a_damaged_cache_is_none(harm: Callable[[bytes], bytes], there: Path, cache: Path, cli: Cli) -> None:
    with RangeServer(there) as server:
        assert cli("inspect", f"{server.url}/a.pt").code == 0
        (entry,) = cache.iterdir()
        entry.write_bytes(harm(entry.read_bytes()))
        server.requests.clear()
        assert cli("inspect", f"{server.url}/a.pt").code == 0
        assert len(server.requests) == 2


def test_the_cache_holds_what_opening_reads_and_is_bounded(
    there: Path, cache: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_cache, "MOST", 1_000_000)
    with RangeServer(there) as server:
        for number in range(4):
            url = f"{server.url}/a.pt?{number}"
            assert cli("strip-prefix", url, tmp_path / f"{number}.pt").code == 0
    sizes = [path.stat().st_size for path in cache.iterdir()]
    assert max(sizes) < 600_000
    assert 0 < sum(sizes) <= 1_000_000


@pytest.mark.parametrize("place", ["", "/dev/null/x", "/proc/none"])
def test_without_a_cache_all_works(
    place: str, there: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTTOOL_CACHE", place)
    with RangeServer(there) as server:
        assert json.loads(cli("inspect", f"{server.url}/a.pt", "--json").out)["format"] == "torch-zip"


@pytest.mark.parametrize("harm", ["another user's", "writable by others", "nonsense with a digest"])
def test_a_cache_that_others_may_have_written_is_none(harm: str, there: Path, cache: Path, cli: Cli) -> None:
    import hashlib

    with RangeServer(there) as server:
        assert cli("inspect", f"{server.url}/a.pt").code == 0
        (entry,) = cache.iterdir()
        if harm == "writable by others":
            entry.chmod(0o666)
        elif harm == "nonsense with a digest":
            body = b"\x02\0\0\0{}"
            entry.write_bytes(hashlib.sha256(body).digest() + body)
        elif os.geteuid() == 0:
            os.chown(entry, 12345, -1)
        else:
            pytest.skip("only root can give a file away")
        server.requests.clear()
        assert cli("inspect", f"{server.url}/a.pt").code == 0
        assert len(server.requests) == 2


def test_a_planted_part_is_not_written_into(there: Path, tmp_path: Path, cli: Cli) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    os.link(victim, tmp_path / ".o.safetensors.ckpttool.part")
    with RangeServer(there) as server:
        assert cli("strip-prefix", f"{server.url}/a.pt", tmp_path / "o.safetensors").code == 0
    assert (victim.read_bytes(), victim.stat().st_nlink) == (b"mine", 1)
