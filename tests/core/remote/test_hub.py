"""hf:// : what a repository of the hub tells, what its reads and uploads cost, and how they fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.core.remote import hub_calls as calls
from ckpttool.core.remote import web
from ckpttool.core.remote.hub import Location, Repository, cached, is_offline, split
from ckpttool.core.remote.store import TRAFFIC, Facts, ListedEntry, Missing, Patience
from ckpttool.errors import CkptToolError, Damaged, OutputExists, Unreadable, UsageFault
from tests.support.hub_server import SECRET, Hub, Reply, Repo, Seen, git_blob, sha256
from tests.support.running import within

hub_library = pytest.importorskip("huggingface_hub")

SHORT = Patience(stall=2.0, attempts=3, first_wait=0.01, longest_wait=0.05)
WEIGHTS = bytes(range(256)) * 400
CONFIG = b'{"hidden_size": 8}'


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A hub with one repository, o/r, for a user who has no token."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("CKPTTOOL_TIMEOUT", "2")
    for kept in (server.repos, server.moved, server.stored, server.seen, server.faults):
        kept.clear()
    server.page, server.most_siblings, server.before_commit = 1000, 1_000_000, lambda: None
    server.create("o/r").commit({"model.safetensors": WEIGHTS, "config.json": CONFIG, "sub/x.bin": b"abc"})
    return server


@pytest.fixture
def signed_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    return hub


def repository(name: str = "o/r", kind: str = "model", revision: str | None = None) -> Repository:
    return Repository(name, kind, revision, patience=SHORT)


def the_repo(hub: Hub) -> Repo:
    return hub.repos["model", "o/r"]


def failure_of(
    name: str = "o/r", revision: str | None = None, key: str = "model.safetensors"
) -> CkptToolError:
    """Read a file, and return the error: one line, in bounded time, and without any secret."""
    with within(5), pytest.raises(CkptToolError) as caught:
        repository(name, revision=revision).head(key, 100)
    error = caught.value
    told = (
        f"{error!r} {error} {error.__cause__} {error.__context__ if not error.__suppress_context__ else ''}"
    )
    assert SECRET not in told and Hub.token not in told and "X-Amz" not in told
    assert "\n" not in error.message
    return error


@pytest.mark.parametrize(
    ("rest", "place"),
    [
        ("o/r", Location("model", "o/r", None, "")),
        ("o/r/", Location("model", "o/r", None, "")),
        ("o/r/a/b.pt", Location("model", "o/r", None, "a/b.pt")),
        ("o/r/folder/", Location("model", "o/r", None, "folder/")),
        ("o/r@v1.0/b.pt", Location("model", "o/r", "v1.0", "b.pt")),
        ("o/r@v1.0", Location("model", "o/r", "v1.0", "")),
        ("o/r@a%2Fb/c.pt", Location("model", "o/r", "a/b", "c.pt")),
        ("o/r@refs/pr/12/c.pt", Location("model", "o/r", "refs/pr/12", "c.pt")),
        ("o/r@refs/pr/12x/c.pt", Location("model", "o/r", "refs", "pr/12x/c.pt")),
        ("datasets/o/r@refs/convert/parquet/x", Location("dataset", "o/r", "refs/convert/parquet", "x")),
        ("datasets/o/r/x y/%2F?#é", Location("dataset", "o/r", None, "x y/%2F?#é")),
        ("datasets/squad", Location("dataset", "squad", None, "")),
        ("spaces/o/r", Location("space", "o/r", None, "")),
        ("models/o/r", Location("model", "o/r", None, "")),
        ("gpt2", Location("model", "gpt2", None, "")),
        ("gpt2@main/model.safetensors", Location("model", "gpt2", "main", "model.safetensors")),
        ("o/r/a@b.pt", Location("model", "o/r", None, "a@b.pt")),
        ("o/Qwen2.5-7B", Location("model", "o/Qwen2.5-7B", None, "")),
    ],
)
def test_a_url_is_split(rest: str, place: Location) -> None:
    assert split(rest) == place


@pytest.mark.parametrize(
    "rest", ["", "/", "datasets", "datasets/", "o/r@", "o/r@/x", "../r", "o /r", "o/r?x", "é/r"]
)
def test_a_url_that_names_no_repository_is_refused(rest: str) -> None:
    with pytest.raises(Unreadable, match="names no repository"):
        split(rest)


def test_one_request_tells_all_files_with_their_sizes_and_hashes(hub: Hub) -> None:
    repo = repository()
    weights = Facts(len(WEIGHTS), f"sha256:{sha256(WEIGHTS)}", f"sha256:{sha256(WEIGHTS)}")
    config = Facts(len(CONFIG), f"git:{git_blob(CONFIG)}")
    assert {*repo.entries("")} >= {
        ListedEntry("model.safetensors", weights),
        ListedEntry("config.json", config),
        ListedEntry("sub", None),
    }
    assert [entry.name for entry in repo.entries("sub")] == ["x.bin"]
    assert repo.entries("none") == repo.entries("model.safetensors") == []
    assert len(hub.requests()) == 1


def test_a_large_file_is_asked_for_at_the_hub_once_and_then_where_it_lies(hub: Hub) -> None:
    repo = repository()
    repo.entries("")
    hub.requests()
    data, facts = repo.head("model.safetensors", 100)
    assert data == WEIGHTS[:100]
    assert [seen.host for seen in hub.requests()] == ["127.0.0.1", "127.0.0.2"]
    assert repo.read("model.safetensors", facts, 300, 50) == WEIGHTS[300:350]
    assert [(seen.host, seen.range) for seen in hub.requests()] == [("127.0.0.2", "bytes=300-349")]


def test_a_small_file_and_an_empty_one_are_read_from_the_hub(hub: Hub) -> None:
    the_repo(hub).commit({"empty.json": b""})
    repo = repository()
    assert repo.head("config.json", 1000)[0] == CONFIG
    assert repo.head("empty.json", 1000) == (b"", Facts(0, f"git:{git_blob(b'')}"))
    facts = repo.head("config.json", 1)[1]
    assert repo.read("config.json", facts, 2, 6) == CONFIG[2:8]


def test_a_small_file_that_the_hub_keeps_elsewhere_is_read_there_with_the_token(signed_in: Hub) -> None:
    def elsewhere(seen: Seen) -> Reply | None:
        if "/resolve/" in seen.path:
            told = {
                "Location": "/api/resolve-cache/config.json?etag=1",
                "X-Linked-Etag": f'"{git_blob(CONFIG)}"',
            }
            return Reply(307, headers=told)
        return Reply(200, CONFIG, ranged=True) if "/resolve-cache/" in seen.path else None

    signed_in.faults.append(elsewhere)
    repo = repository()
    facts = repo.head("config.json", 4)[1]
    signed_in.requests()
    assert repo.read("config.json", facts, 4, 5) == CONFIG[4:9]
    assert [(seen.path[:19], seen.authorization) for seen in signed_in.requests()] == [
        ("/api/resolve-cache/", f"Bearer {Hub.token}")
    ]


def test_a_mirror_that_ignores_ranges_is_read_from_the_front(hub: Hub) -> None:
    hub.fail(Reply(200, CONFIG), at="/resolve/")
    data, facts = repository().head("config.json", 5)
    assert (data, facts.is_ranged) == (CONFIG[:5], False)


def test_threads_that_read_one_file_for_the_first_time_ask_the_hub_once(hub: Hub) -> None:
    repo, parts = repository(), dict[int, bytes]()
    facts = next(entry.facts for entry in repo.entries("") if entry.name == "model.safetensors")
    assert facts

    def work(number: int) -> None:
        parts[number] = repo.read("model.safetensors", facts, number * 1000, 1000)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b"".join(parts[number] for number in range(12)) == WEIGHTS[:12000]
    assert sum("/resolve/" in seen.path for seen in hub.requests()) == 1


def test_a_branch_that_moves_does_not_change_what_is_read(hub: Hub) -> None:
    repo = repository()
    _, facts = repo.head("model.safetensors", 10)
    the_repo(hub).commit({"model.safetensors": b"other bytes", "config.json": b"new"})
    hub.expire()
    assert repo.read("model.safetensors", facts, 0, 20) == WEIGHTS[:20]
    assert repo.head("config.json", 100)[0] == CONFIG
    assert repository().head("config.json", 100)[0] == b"new"
    with pytest.raises(Damaged, match="changed while it was read"):
        repository().read("model.safetensors", facts, 0, 20)


def test_equal_files_of_two_revisions_have_equal_contents(hub: Hub) -> None:
    the_repo(hub).commit({"config.json": b"new"}, "feature/x")
    old, new = (
        {e.name: e.facts for e in repository(revision=name).entries("")} for name in ("main", "feature/x")
    )
    assert old["model.safetensors"] == new["model.safetensors"]
    assert old["config.json"] != new["config.json"]
    assert repository(revision="feature/x").shown("a b") == "hf://o/r@feature%2Fx/a b"


@pytest.mark.parametrize(
    "name", ["a b.bin", "100%.bin", "a%2Fb.bin", "q?x=1.bin", "c#1.bin", "ü/€.bin", "+&=.bin"]
)
def test_names_of_all_kinds_are_read(hub: Hub, name: str) -> None:
    the_repo(hub).commit({name: b"0123456789", f"{name}.json": b"small"})
    repo = repository()
    assert repo.head(name, 4)[0] == b"0123"
    assert repo.head(f"{name}.json", 10)[0] == b"small"


@pytest.mark.parametrize("kind", ["dataset", "space"])
def test_datasets_and_spaces_are_read(hub: Hub, kind: str) -> None:
    hub.create("o/d", kind).commit({"a/w.bin": b"weights"})
    repo = repository("o/d", kind)
    assert repo.head("a/w.bin", 3)[0] == b"wei"
    assert repo.shown("a/w.bin") == f"hf://{kind}s/o/d/a/w.bin"


def test_a_repository_that_was_renamed_is_read_by_its_old_name_and_its_new_one_asked(hub: Hub) -> None:
    hub.moved["gpt2"] = "o/r"
    repo = repository("gpt2")
    assert repo.head("model.safetensors", 3)[0] == WEIGHTS[:3]
    assert [seen.path.split("/")[1:3] for seen in hub.requests()[2:3]] == [["o", "r"]]


def test_a_repository_of_many_files_is_listed_a_folder_at_a_time(hub: Hub) -> None:
    hub.page = 7
    many = {f"deep/er/{number}.bin": b"%d" % number for number in range(20)}
    the_repo(hub).commit({**many, **{f"other/{number}": b"" for number in range(1200)}})
    repo = repository()
    assert {entry.name for entry in repo.entries("deep/er")} == {f"{number}.bin" for number in range(20)}
    assert len(hub.requests()) == 1 + 3
    assert repo.head("deep/er/7.bin", 10)[0] == b"7"
    assert repo.entries("deep") == [ListedEntry("er", None)]
    assert repo.entries("no/such") == repo.entries("..") == []
    hub.requests()
    repo.entries("deep/er")
    assert hub.requests() == []


def test_the_token_goes_to_the_hub_and_to_no_other_host(signed_in: Hub) -> None:
    signed_in.create("o/p", private=True).commit({"w.bin": b"0123456789", "c.json": b"{}"})
    repo = repository("o/p")
    _, facts = repo.head("w.bin", 1)
    repo.read("w.bin", facts, 2, 3)
    for _ in range(2):
        repo.head("c.json", 5)
    seen = signed_in.requests()
    assert {one.authorization for one in seen if one.host == "127.0.0.2"} == {None}
    assert {one.authorization for one in seen if one.host == "127.0.0.1"} == {f"Bearer {Hub.token}"}


def test_a_signed_url_that_expired_is_asked_for_once_more(hub: Hub) -> None:
    repo = repository()
    _, facts = repo.head("model.safetensors", 10)
    hub.expire()
    hub.requests()
    assert repo.read("model.safetensors", facts, 10, 10) == WEIGHTS[10:20]
    assert [seen.host[-1] for seen in hub.requests()] == ["2", "1", "2"]


def test_a_signed_url_that_is_never_accepted_is_an_error_without_it(hub: Hub) -> None:
    hub.fail(*[Reply(403)] * 9, at="/signed/")
    error = failure_of()
    assert error.message == "hf://o/r/model.safetensors: access is refused (status 403)"
    assert len(hub.requests()) == 3


def test_what_is_counted_is_what_arrives(hub: Hub) -> None:
    before = TRAFFIC.requests
    repo = repository()
    repo.head("model.safetensors", 10)
    repo.head("config.json", 10)
    assert TRAFFIC.requests - before == len(hub.requests())


def test_files_that_are_not_there_are_missing_with_the_nearest_names(hub: Hub) -> None:
    error = failure_of(key="modle.safetensors")
    assert isinstance(error, Missing)
    assert str(error).splitlines() == [
        "hf://o/r/modle.safetensors: no such file in the repository",
        "  hint: it has model.safetensors",
    ]


@pytest.mark.parametrize(
    ("name", "revision", "kind", "message", "hint"),
    [
        ("o/none", None, Missing, "no such repository, or a private one", "hf auth login"),
        ("o/private", None, Missing, "no such repository, or a private one", "HF_TOKEN"),
        ("gpt2/model.safetensors", None, Missing, "no such repository", "hf://gpt2@main/model.safetensors"),
        ("o/gated", None, Unreadable, "is gated", "accept its conditions on http://127.0.0.1"),
        ("o/r", "v9", Missing, "has no revision 'v9'", "branches and tags"),
    ],
)
def test_refusals_say_what_to_do(
    hub: Hub, name: str, revision: str | None, kind: type[CkptToolError], message: str, hint: str
) -> None:
    hub.create("o/private", private=True).commit({"model.safetensors": WEIGHTS})
    hub.create("o/gated", gated=True).commit({"model.safetensors": WEIGHTS})
    error = failure_of(name, revision)
    assert isinstance(error, kind)
    assert message in error.message
    assert hint in (error.hint or "")


def test_a_token_that_is_wrong_is_said_and_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrongtoken")
    error = failure_of()
    assert "the hub refuses the token" in error.message
    assert "hf_wrongtoken" not in str(error)


FOREVER = 99


@pytest.mark.parametrize("at", ["/api/", "/resolve/", "/signed/"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_recovers_is_asked_again(hub: Hub, at: str, status: int) -> None:
    hub.fail(*[Reply.fault(status, Retry_After="0")] * 2, at=at)
    assert repository().head("model.safetensors", 5)[0] == WEIGHTS[:5]


@pytest.mark.parametrize("at", ["/api/", "/resolve/", "/signed/"])
@pytest.mark.parametrize("status", [400, 403, 404, 410, 429, 500])
def test_a_server_that_refuses_is_an_error_in_bounded_time(hub: Hub, at: str, status: int) -> None:
    hub.fail(*[Reply.fault(status, Retry_After="3600")] * FOREVER, at=at)
    assert isinstance(failure_of(), Unreadable)
    assert len(hub.requests()) <= 1 + 2 * SHORT.attempts


def test_a_listing_of_many_pages_waits_for_no_hour(hub: Hub) -> None:
    hub.most_siblings = 0
    hub.fail(*[Reply.fault(429, Retry_After="3600")] * FOREVER, at="/tree/")
    assert "slow down" in failure_of().message


@pytest.mark.parametrize("at", ["/api/", "/resolve/"])
def test_redirects_in_circles_are_an_error(hub: Hub, at: str) -> None:
    def circle(seen: Seen) -> Reply | None:
        return Reply(302, headers={"Location": seen.path}) if at in seen.path else None

    hub.faults.append(circle)
    assert "redirect" in failure_of().message


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"id": "o/r"}', b'{"id": "o/r", "sha": "../main"}']
)
def test_an_answer_that_makes_no_sense_is_an_error(hub: Hub, body: bytes) -> None:
    hub.fail(Reply(200, body), at="/api/")
    assert "the hub's answer is not understood" in failure_of().message


def test_a_file_that_is_another_than_the_listing_tells_is_an_error(hub: Hub) -> None:
    repo = repository()
    repo.entries("")
    sha = the_repo(hub).refs["main"]
    the_repo(hub).commits[sha]["model.safetensors"] = WEIGHTS[::-1]
    with pytest.raises(Damaged, match="changed while it was read"):
        repo.head("model.safetensors", 10)
    del the_repo(hub).commits[sha]["config.json"]
    with pytest.raises(Damaged, match="changed while it was read"):
        repo.head("config.json", 10)


def test_no_server_is_one_line_in_bounded_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.3:9")
    assert "the hub can't be asked" in failure_of().message


def test_offline_nothing_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert is_offline()
    assert "HF_HUB_OFFLINE" in str(failure_of())
    assert hub.requests() == []


def test_the_hubs_own_cache_is_found_without_a_request(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--o--r"
    snapshot = repo / "snapshots" / ("1" * 40)
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "sub" / "x.bin").write_bytes(b"abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("1" * 40)
    (repo / "refs" / "v2").write_text("2" * 40)
    assert cached(split("o/r/sub/x.bin")) == str(snapshot / "sub" / "x.bin")
    assert cached(split("o/r/sub/")) == str(snapshot / "sub")
    assert cached(split("o/r")) == str(snapshot)
    assert cached(split(f"o/r@{'1' * 40}/sub/x.bin")) == str(snapshot / "sub" / "x.bin")
    for rest in ("o/r/none.bin", "o/r@v2/sub/x.bin", "o/other", "datasets/o/r", "o/r/../../refs"):
        assert cached(split(rest)) is None
    assert hub.requests() == []


def test_the_library_says_nothing_and_keeps_its_settings(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled, logging

    before = logging.get_verbosity(), are_progress_bars_disabled()
    hub.most_siblings = 0
    hub.fail(Reply.fault(503, X_HF_Warning="topic; a warning of the hub"), at="/tree/")
    repository().head("model.safetensors", 10)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), are_progress_bars_disabled()) == before


def test_endpoint_and_login_are_those_of_the_hubs_own_settings(hub: Hub, tmp_path: Path) -> None:
    hub.create("o/p", private=True).commit({"w.bin": b"0123456789"})
    (tmp_path / "token").write_text(hub.token)
    use = "from ckpttool.core.remote.hub import Repository"
    code = f"{use}; print(Repository('o/p').head('w.bin', 4)[0])"
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_TOKEN_PATH": ""}
    del environment["HF_TOKEN_PATH"]
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("b'0123'\n", "")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A checkpoint to upload: key -> local path."""
    for name, data in {"model.safetensors": b"hello" * 100, "index.json": b"{}"}.items():
        (tmp_path / name).write_bytes(data)
    return {f"out/{name}": str(tmp_path / name) for name in ("model.safetensors", "index.json")}


def held(hub: Hub, name: str = "out/model.safetensors") -> bytes | None:
    repo = the_repo(hub)
    return repo.commits[repo.refs["main"]].get(name)


def test_files_are_uploaded_by_one_commit(
    signed_in: Hub, files: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    repo, sizes, before = repository(), list[int](), TRAFFIC.requests
    repo.put(files, replace=False, progress=sizes.append)
    seen = signed_in.requests()
    assert sum("/commit/" in one.path for one in seen) == 1
    assert TRAFFIC.requests - before == len(seen)
    assert sizes == [500, 2]
    assert held(signed_in) == b"hello" * 100
    assert repo.head("out/index.json", 10)[0] == b"{}"
    assert {one.authorization for one in seen if one.host == "127.0.0.2"} == {None}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("address", ["169.254.169.254", "2852039166", "by a name"])
def test_no_upload_goes_to_a_near_address_that_the_hub_names(
    signed_in: Hub, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    to = f"http://{address}"
    if address == "by a name":  # whose address is known only once there is a connection
        name, real, resolve = "named.example", web.nearness, socket.getaddrinfo
        far = {name: "127.0.0.2"}
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *a, **k: resolve(far.get(host, host), *a, **k)
        )
        for module in (web, calls):
            monkeypatch.setattr(
                module, "nearness", lambda host: real(host.replace("127.0.0.2", "169.254.1.1"))
            )
        to = signed_in.elsewhere.replace("127.0.0.2", name)
    monkeypatch.setattr(signed_in, "sign", lambda path: f"{to}{path}")
    with pytest.raises(Unreadable, match="which is not followed"):
        repository().put(files, replace=False)
    assert held(signed_in) is None
    assert not [one for one in signed_in.requests() if "/upload/" in one.path]


def test_files_are_uploaded_to_a_branch_of_a_dataset(signed_in: Hub, files: dict[str, str]) -> None:
    data = signed_in.create("o/d", "dataset")
    data.commit({}, "a/b")
    repository("o/d", "dataset", "a/b").put(files, replace=False)
    assert data.commits[data.refs["a/b"]].keys() >= files.keys()
    assert not data.commits[data.refs["main"]].keys() & files.keys()


def test_a_file_that_is_there_is_replaced_only_if_allowed(signed_in: Hub, files: dict[str, str]) -> None:
    the_repo(signed_in).commit({"out/index.json": b"old"})
    with pytest.raises(OutputExists, match=r"out/index\.json: already exists") as caught:
        repository().put(files, replace=False)
    assert "force=True" in (caught.value.hint or "")
    assert not any(seen.method == "PUT" for seen in signed_in.requests())
    for _ in range(2):  # the second time nothing differs
        repository().put(files, replace=True)
        assert held(signed_in, "out/index.json") == b"{}"


def commit_once(hub: Hub, **changed: bytes) -> None:
    """Have somebody else commit just before the next commit arrives."""

    def others() -> None:
        hub.before_commit = lambda: None
        the_repo(hub).commit(changed)

    hub.before_commit = others


def test_a_commit_of_others_in_between_does_no_harm(signed_in: Hub, files: dict[str, str]) -> None:
    commit_once(signed_in, notes=b"theirs")
    repository().put(files, replace=False)
    assert held(signed_in) == b"hello" * 100
    assert held(signed_in, "notes") == b"theirs"


def test_a_file_that_others_add_in_between_is_not_replaced(signed_in: Hub, files: dict[str, str]) -> None:
    commit_once(signed_in, **{"out/model.safetensors": b"theirs"})
    with pytest.raises(OutputExists):
        repository().put(files, replace=False)
    assert held(signed_in) == b"theirs"


def test_bytes_that_arrive_as_others_are_damage(signed_in: Hub, files: dict[str, str]) -> None:
    signed_in.before_commit = lambda: signed_in.stored.update({sha256(b"hello" * 100): b"jello" * 100})
    with pytest.raises(Damaged, match="does not have what was sent"):
        repository().put(files, replace=False)


@pytest.mark.parametrize("at", ["/preupload/", "/objects/batch", "/upload/", "/commit/"])
def test_an_upload_goes_on_after_a_passing_fault(signed_in: Hub, files: dict[str, str], at: str) -> None:
    signed_in.fail(Reply.fault(429, Retry_After="3600") if at != "/upload/" else Reply(500), at=at)
    repository().put(files, replace=False)
    assert held(signed_in) == b"hello" * 100


@pytest.mark.parametrize("at", ["/preupload/", "/objects/batch", "/upload/", "/verify", "/commit/"])
def test_an_upload_that_is_refused_leaves_nothing_to_be_seen(
    signed_in: Hub, files: dict[str, str], at: str
) -> None:
    signed_in.fail(*[Reply(403)] * FOREVER, at=at)
    with pytest.raises(Unreadable) as caught:
        repository().put(files, replace=False)
    assert SECRET not in str(caught.value) and Hub.token not in str(caught.value)
    assert held(signed_in) is None and held(signed_in, "out/index.json") is None


def test_uploads_need_a_repository_a_login_and_a_branch(hub: Hub, files: dict[str, str]) -> None:
    with pytest.raises(Unreadable) as caught:
        repository().put(files, replace=False)
    assert "HF_TOKEN" in (caught.value.hint or "")
    with pytest.raises(Missing) as caught_too:
        repository("o/none").put(files, replace=False)
    assert "hf repos create o/none" in (caught_too.value.hint or "")
    with pytest.raises(UsageFault, match="a commit takes no files"):
        repository(revision=the_repo(hub).refs["main"]).put(files, replace=False)
    with pytest.raises(UsageFault, match="not a file"):
        repository().put({"a": "no such file"}, replace=False)
