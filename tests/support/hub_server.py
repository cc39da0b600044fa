"""A stand-in for the hub on the loopback: its API, its files, and "another host" for the large ones."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support.range_server import Answer, Exchange, LoopbackServer, in_range

LARGE = {".safetensors", ".bin", ".pt", ".distcp"}  # kept as LFS files, as the hub's .gitattributes has it
FOLDERS = {"model": "models", "dataset": "datasets", "space": "spaces"}
SECRET = "signed-query-secret"


class Seen(NamedTuple):
    """A request that arrived."""

    host: str  # 127.0.0.1 is the hub, 127.0.0.2 the other host
    method: str
    path: str  # as it was sent, query included
    authorization: str | None
    range: str | None


class Reply(NamedTuple):
    """An answer; of `body` a range is sent where one is asked for and `ranged` is set."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}
    ranged: bool = False

    @classmethod
    def json(cls, value: object, status: int = 200, **headers: str) -> Reply:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return cls(status, json.dumps(value).encode(), {"Content-Type": "application/json", **named})

    @classmethod
    def fault(cls, status: int, code: str = "", message: str = "", **headers: str) -> Reply:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        told = {"X-Error-Code": code, "X-Error-Message": message}
        body = json.dumps({"error": message}).encode()
        return cls(status, body, {**{name: text for name, text in told.items() if text}, **named})


@dataclass
class Repo:
    """A repository: its commits, the oldest first, and the names of some of them."""

    kind: str
    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add files to a branch, which begins at main where it is new; return the commit's hash."""
        parent = self.refs.get(branch) or self.refs.get("main")
        sha = secrets.token_hex(20)
        self.commits[sha] = {**(self.commits[parent] if parent else {}), **files}
        self.refs[branch] = sha
        return sha

    def commit_folder(self, folder: Path, branch: str = "main") -> str:
        """Add all files of a local folder."""
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return self.commit({path.relative_to(folder).as_posix(): path.read_bytes() for path in files}, branch)

    def find(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)


def is_large(path: str) -> bool:
    return PurePosixPath(path).suffix in LARGE


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


Fault = Callable[[Seen], Reply | None]


class _Host(LoopbackServer):
    """One of the hub's two hosts."""

    def __init__(self, hub: Hub, host: str) -> None:
        super().__init__(host)
        self.hub, self.host = hub, host

    def answer(self, exchange: Exchange) -> None:
        request = exchange.request_read()
        authorization = request.headers.get("authorization")
        seen = Seen(self.host, request.method, exchange.path, authorization, request.range)
        reply = self.hub.answer(seen, request.body)
        answer = Answer(reply.status, dict(reply.headers), memoryview(reply.body))
        exchange.send(in_range(answer, seen.range) if reply.ranged else answer)


class Hub:
    """The servers, what they hold, what they saw, and what is wrong with them; a context manager."""

    token = "hf_token_of_the_tests"

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.moved: dict[str, str] = {}  # the old name of a model -> its name
        self.stored: dict[str, bytes] = {}  # by SHA-256, on the other host
        self.seen: list[Seen] = []
        self.faults: list[Fault] = []
        self.page = 1000  # entries in a page of a tree
        self.most_siblings = 1_000_000  # that one answer holds; the rest are left out, as the hub may
        self.lasting = 3600.0  # seconds that a signed URL is good for
        self.before_commit: Callable[[], object] = lambda: None  # called when a commit arrives
        self._signed_since = 0.0
        self.servers = [_Host(self, host) for host in ("127.0.0.1", "127.0.0.2")]
        self.endpoint, self.elsewhere = (server.url for server in self.servers)

    def __enter__(self) -> Hub:
        for server in self.servers:
            server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.__exit__()

    def create(self, name: str, kind: str = "model", *, private: bool = False, gated: bool = False) -> Repo:
        """Create a repository whose first commit holds .gitattributes alone."""
        repo = self.repos[kind, name] = Repo(kind, name, private, gated)
        repo.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return repo

    def fail(self, *replies: Reply, at: str = "", method: str = "") -> None:
        """Give these answers, one after another, to the next requests whose path holds `at`."""
        left = list(replies)

        def fault(seen: Seen) -> Reply | None:
            hit = left and at in unquote(seen.path) and method in seen.method
            return left.pop(0) if hit else None

        self.faults.append(fault)

    def expire(self) -> None:
        """Refuse the URLs that were signed until now."""
        self._signed_since = time.time()

    def sign(self, path: str) -> str:
        return f"{self.elsewhere}{path}?X-Amz-Date={time.time()!r}&X-Amz-Signature={SECRET}"

    def is_signed(self, query: str) -> bool:
        fields = parse_qs(query)
        when = float(fields.get("X-Amz-Date", ["0"])[0])
        is_new = when > self._signed_since and time.time() - when < self.lasting
        return fields.get("X-Amz-Signature") == [SECRET] and is_new

    def requests(self) -> list[Seen]:
        """Return what arrived, and forget it."""
        seen, self.seen = self.seen, []
        return seen

    def answer(self, seen: Seen, body: bytes) -> Reply:
        """Answer one request."""
        self.seen.append(seen)
        reply = next((reply for fault in self.faults if (reply := fault(seen))), None)
        if reply is not None:
            return reply
        url = urlsplit(seen.path)
        if seen.host == "127.0.0.2":
            return self._other_host(seen.method, url.path, url.query, body)
        parts = url.path.lstrip("/").split("/")
        if parts[0] == "api" and parts[1] in FOLDERS.values():
            kind = next(kind for kind, folder in FOLDERS.items() if folder == parts[1])
            return self._api(seen, kind, parts[2:], parse_qs(url.query), body)
        kind = next((kind for kind, folder in FOLDERS.items() if folder == parts[0]), "model")
        return self._files(seen, kind, parts[1:] if parts[0] in FOLDERS.values() else parts, body)

    def _repo(self, seen: Seen, kind: str, name: str) -> Repo | Reply:
        """Find a repository that the sender may know of."""
        repo = self.repos.get((kind, name))
        if seen.authorization not in (None, f"Bearer {self.token}"):
            return Reply.fault(401, message="Invalid credentials in Authorization header")
        if repo is None or (repo.private and not seen.authorization):
            # The hub does not tell strangers which names exist.
            if seen.authorization:
                return Reply.fault(404, "RepoNotFound", "Repository not found")
            return Reply.fault(401, "RepoNotFound", "Invalid username or password.")
        return repo

    def _named(
        self, seen: Seen, kind: str, parts: list[str], verbs: set[str]
    ) -> tuple[Repo | Reply, list[str]]:
        """Split owner/name or a lone name from what follows it."""
        length = 1 if len(parts) == 1 or parts[1] in verbs else 2
        name = "/".join(parts[:length])
        if name in self.moved:
            path = seen.path.replace(name, self.moved[name], 1)
            return Reply(307, headers={"Location": path}), []
        return self._repo(seen, kind, name), parts[length:]

    def _api(
        self, seen: Seen, kind: str, parts: list[str], query: dict[str, list[str]], body: bytes
    ) -> Reply:
        repo, rest = self._named(seen, kind, parts, {"revision", "tree", "preupload", "commit"})
        if isinstance(repo, Reply):
            return repo
        verb, revision, *path = (
            [unquote(part) for part in [*rest, "", ""][:3]] if rest else ["revision", "main"]
        )
        sha = repo.find(revision)
        if sha is None:
            return Reply.fault(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if verb == "revision":
            return self._info(repo, sha)
        if verb == "tree":
            return self._tree(seen, repo, sha, path[0] if path else "", int(query.get("cursor", ["0"])[0]))
        if seen.method != "POST":
            return Reply.fault(405, message="Method Not Allowed")
        if not seen.authorization:
            return Reply.fault(401, message="Unauthorized")
        return self._preupload(repo, sha, body) if verb == "preupload" else self._commit(repo, revision, body)

    def _info(self, repo: Repo, sha: str) -> Reply:
        siblings = []
        for path, data in list(repo.commits[sha].items())[: self.most_siblings]:
            told = {"rfilename": path, "size": len(data), "blobId": git_blob(data)}
            if is_large(path):
                told["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
            siblings.append(told)
        return Reply.json(
            {"id": repo.name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []}
        )

    def _tree(self, seen: Seen, repo: Repo, sha: str, folder: str, start: int) -> Reply:
        prefix = f"{folder}/" if folder else ""
        found: dict[str, dict[str, Any]] = {}
        for path, data in sorted(repo.commits[sha].items()):
            if path.startswith(prefix):
                name, _, deeper = path[len(prefix) :].partition("/")
                told = {
                    "type": "directory" if deeper else "file",
                    "path": prefix + name,
                    "size": 0 if deeper else len(data),
                }
                told["oid"] = git_blob(data)
                if is_large(path) and not deeper:
                    told["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
                found.setdefault(name, told)
        if folder and not found:
            return Reply.fault(404, "EntryNotFound", f"{folder} does not exist on this revision")
        page, end = list(found.values())[start : start + self.page], start + self.page
        following = f'<{self.endpoint}{seen.path.split("?")[0]}?cursor={end}>; rel="next"'
        return Reply.json(page, **({"Link": following} if end < len(found) else {}))

    def _preupload(self, repo: Repo, sha: str, body: bytes) -> Reply:
        files = []
        for asked in json.loads(body)["files"]:
            path, data = asked["path"], repo.commits[sha].get(asked["path"])
            mode = "lfs" if is_large(path) else "regular"
            oid = None if data is None else (sha256(data) if is_large(path) else git_blob(data))
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return Reply.json({"files": files})

    def _commit(self, repo: Repo, branch: str, body: bytes) -> Reply:
        self.before_commit()
        header, *lines = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit") not in (None, repo.refs[branch]):
            return Reply.fault(412, message="A commit has happened since. Please refresh and try again.")
        files = {}
        for line in lines:
            value = line["value"]
            is_file = line["key"] == "file"
            files[value["path"]] = (
                base64.b64decode(value["content"]) if is_file else self.stored[value["oid"]]
            )
        sha = repo.commit(files, branch)
        return Reply.json({"commitOid": sha, "commitUrl": f"{self.endpoint}/{repo.name}/commit/{sha}"})

    def _files(self, seen: Seen, kind: str, parts: list[str], body: bytes) -> Reply:
        if ".git/info/lfs/" in seen.path:
            return self._lfs(seen, parts, body)
        repo, rest = self._named(seen, kind, parts, {"resolve"})
        if isinstance(repo, Reply):
            return repo
        if repo.gated and not seen.authorization:
            return Reply.fault(401, "GatedRepo", f"Access to model {repo.name} is restricted.")
        revision, path = unquote(rest[1]), unquote("/".join(rest[2:]))
        sha = repo.find(revision)
        if sha is None:
            return Reply.fault(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        data = repo.commits[sha].get(path)
        if data is None:
            return Reply.fault(404, "EntryNotFound", "Entry not found", X_Repo_Commit=sha)
        told = {"X-Repo-Commit": sha, "X-Linked-Size": str(len(data)), "Accept-Ranges": "bytes"}
        if not is_large(path):
            return Reply(200, data, {"ETag": f'"{git_blob(data)}"', **told}, ranged=True)
        self.stored[sha256(data)] = data
        place = self.sign(f"/signed/{quote(repo.name)}/{sha256(data)}")
        return Reply(302, headers={"Location": place, "X-Linked-Etag": f'"{sha256(data)}"', **told})

    def _lfs(self, seen: Seen, parts: list[str], body: bytes) -> Reply:
        if seen.method != "POST":
            return Reply.fault(405, message="Method Not Allowed")
        if not seen.authorization:
            return Reply.fault(401, message="Unauthorized")
        asked = json.loads(body)
        if parts[-1] == "verify":
            is_whole = len(self.stored.get(asked["oid"], b"")) == asked["size"]
            return Reply.json({}) if is_whole else Reply.fault(404, message="not stored")
        objects = []
        for thing in asked["objects"]:
            told = {"oid": thing["oid"], "size": thing["size"]}
            if thing["oid"] not in self.stored:
                verify = f"{self.endpoint}{seen.path.replace('objects/batch', 'verify')}"
                upload = self.sign(f"/upload/{thing['oid']}")
                told["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(told)
        return Reply.json({"transfer": "basic", "objects": objects})

    def _other_host(self, method: str, path: str, query: str, body: bytes) -> Reply:
        if not self.is_signed(query):
            return Reply(
                403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
            )
        oid = path.rpartition("/")[2]
        if method == "PUT":
            self.stored[oid] = body
            return Reply(200)
        return Reply(200, self.stored[oid], {"ETag": f'"{oid[:32]}"', "Accept-Ranges": "bytes"}, ranged=True)
