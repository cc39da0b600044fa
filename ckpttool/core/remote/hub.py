"""Repositories of the hub, hf://, read by ranges at one commit and written by one commit."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from ...errors import Damaged, Refused, Unreadable, UsageFault, already_exists
from . import hub_calls as calls
from .hub_calls import About, Commit, authorization, endpoint, is_offline, look
from .store import Bytes, Facts, ListedEntry, Missing, Patience, Progress, changed
from .web import Response, Transport


class Upload:
    """Local files that go to a branch of a repository in one commit, and are compared with it afterwards."""

    def __init__(
        self, about: About, files: Mapping[str, str], patience: Patience, transport: Transport
    ) -> None:
        """Look at the files: path in the repository -> local path."""
        from huggingface_hub import CommitOperationAdd

        if about.revision and calls.SHA.fullmatch(about.revision):
            raise UsageFault(f"{about.url}: a commit takes no files", hint="name a branch")
        how = f"`hf repos create {about.argument}`, signed in by `hf auth login` or HF_TOKEN"
        self._about = about._replace(absent=f"make it first: {how}")
        self._patience, self._transport = patience, transport
        self._branch: dict[str, Any] = {
            "repo_id": about.name,
            "repo_type": about.kind,
            "revision": about.revision,
        }
        self._paths = {key: os.path.abspath(path) for key, path in files.items()}
        try:
            self._additions = [CommitOperationAdd(key, path) for key, path in self._paths.items()]
        except ValueError as error:  # no file is there, or a name that git has no place for
            raise UsageFault(f"{about.url}: {error}") from None

    def commit(self, *, replace: bool, progress: Progress | None) -> Commit:
        """Send the files, and add them by one commit, which is returned. Raises as `Store.put` does."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library warns of unusual names and of its own changes
            commit = self._sent(replace, progress)
        for addition in self._additions:
            key = addition.path_in_repo
            if not self._is_same(addition, commit.facts(key)):
                url = f"{self._about.url}/{key}"
                raise Damaged(url, "the hub does not have what was sent", hint="run the command again")
        return commit

    def _sent(self, replace: bool, progress: Progress | None) -> Commit:
        head, client = self._head(replace), calls.client()
        # One after another: an interrupt would have to wait for all that a pool of threads has begun.
        for addition in self._additions:
            send = partial(client.preupload_lfs_files, free_memory=False, **self._branch)
            calls.call(self._about, partial(send, additions=[addition]), self._patience)
            if progress:
                progress(addition.upload_info.size)
        for _ in range(self._patience.attempts):
            add = partial(self._add, None if replace else head.sha)
            if (sha := calls.call(self._about, add, self._patience)) is not None:
                return look(self._about, sha, self._transport)
            head = self._head(replace)
        raise Refused(self._about.url, "others commit to it all the time", hint="run the command again")

    def _head(self, replace: bool) -> Commit:
        """Return the branch's newest commit. Raises OutputExists where it has a file, unless `replace`."""
        head = look(self._about, self._about.revision, self._transport)
        if not replace and (there := next(filter(head.facts, self._paths), None)):
            raise already_exists(f"{self._about.url}/{there}")
        return head

    def _add(self, parent: str | None) -> str | None:
        """Commit the files; return the commit's hash, or None if the branch is no longer at `parent`."""
        from huggingface_hub.errors import HfHubHTTPError

        names = list(self._paths)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        what: Any = {"operations": self._additions, "commit_message": f"Add {names[0]}{more} with ckpttool"}
        try:
            done: Any = calls.client().create_commit(**what, parent_commit=parent, **self._branch)
        except HfHubHTTPError as error:
            if error.response.status_code != 412:
                raise
            return None
        sha: str = done.oid
        return sha

    def _is_same(self, addition: Any, facts: Facts | None) -> bool:
        if facts is None or facts.size != addition.upload_info.size:
            return False
        if facts.content:
            return facts.content == f"sha256:{addition.upload_info.sha256.hex()}"
        with open(self._paths[addition.path_in_repo], "rb") as file:
            git = hashlib.sha1(b"blob %d\0" % facts.size, usedforsecurity=False)
            while block := file.read(1 << 20):
                git.update(block)
        return facts.identity == f"git:{git.hexdigest()}"


# ---- Reading a repository


KINDS = {"models/": "model", "datasets/": "dataset", "spaces/": "space"}
PREFIXES = {"model": "", "dataset": "datasets/", "space": "spaces/"}

REFS = r"refs/(?:convert/[\w.-]+|pr/\d+)"  # the revisions whose slashes are no %2F, as huggingface_hub has it
NAME = r"(?!(?:models|datasets|spaces)(?:[/@]|$))\w[\w.-]*(?:/\w[\w.-]*|(?=@|/?$))"
PLACE = re.compile(
    rf"(models/|datasets/|spaces/)?({NAME})(?:@({REFS}|[^/]+))?(?:/(.*))?", re.ASCII | re.DOTALL
)


class Location(NamedTuple):
    """Where an hf:// URL leads."""

    kind: str  # model, dataset, space
    repo: str  # OWNER/REPO, or the lone name of an old repository
    revision: str | None
    path: str  # as it stands in the URL, a last slash included; "" for all of the repository


def split(rest: str) -> Location:
    """Split what follows hf:// : [datasets/]OWNER/REPO[@REVISION][/PATH]. No escapes are undone in PATH.

    A repository without an owner is told by its revision, NAME@REVISION/PATH, or stands alone. In a revision
    `/` is written %2F, except in refs/pr/N and refs/convert/NAME. Raises Unreadable for anything else.
    """
    match = PLACE.fullmatch(rest)
    if match is None or re.search(r"--|\.\.", match[2]):
        hint = "for example: hf://OWNER/REPO, hf://OWNER/REPO@REVISION/FILE, hf://datasets/OWNER/REPO/FILE"
        raise Unreadable(f"hf://{rest}", "names no repository", hint=hint)
    prefix, repo, revision, path = match.groups()
    return Location(KINDS[prefix or "models/"], repo, revision and unquote(revision), path or "")


def cached(place: Location) -> str | None:
    """Return the local path of a file, folder or repository in the hub's own cache, or None. Asks nothing."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    path, kind, revision = place.path.strip("/"), place.kind, place.revision
    if ".." in path.split("/"):
        return None
    try:
        if path:
            found = try_to_load_from_cache(place.repo, path, repo_type=kind, revision=revision)
            if isinstance(found, str):
                return found
        with calls.quiet():
            top = snapshot_download(place.repo, repo_type=kind, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    folder = os.path.join(top, path) if path else top
    return folder if os.path.isdir(folder) else None


class _Place(NamedTuple):
    """Where the bytes of a file were found. A signed URL is a secret."""

    url: str
    facts: Facts  # as the host there tells them
    nearness: str  # of the hub

    def __repr__(self) -> str:
        return "<_Place>"


class Repository:
    """A repository of the hub at one commit, the first that was seen. A Store; its keys are paths inside.

    Token, endpoint and cache are those of huggingface_hub: HF_TOKEN, the login file, HF_ENDPOINT, HF_HOME.
    One request tells the commit, and the size and hash of every file. The first read of a large file takes
    two more (the hub signs a URL of another host), each later one goes there at once.
    """

    def __init__(
        self, name: str, kind: str = "model", revision: str | None = None, patience: Patience | None = None
    ) -> None:
        """Ask nothing yet."""
        self.name, self.kind, self.revision = name, kind, revision
        self._patience = patience or Patience.usual()
        self._transport = Transport(self._patience)
        self._pinned: Commit | None = None
        self._places: dict[str, _Place] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Repository {self.shown('')}>"

    @property
    def commit(self) -> str:
        """The hash of the commit that is read, once the hub was asked."""
        return self._pinned.sha if self._pinned else ""

    def shown(self, key: str) -> str:
        """Return the hf:// URL of a file, with the revision that was asked for."""
        revision = self.revision
        if revision is not None and not re.fullmatch(REFS, revision):
            revision = revision.replace("/", "%2F")
        name = f"hf://{PREFIXES[self.kind]}{self.name}" + ("" if revision is None else f"@{revision}")
        return f"{name}/{key}" if key else name

    def head(self, key: str, nbytes: int) -> tuple[bytes, Facts]:
        """Return the first bytes of a file, and its facts as the repository's listing has them."""
        facts = self._facts(key)
        data = self._bytes(key, facts, 0, min(nbytes, facts.size))
        place = self._places.get(key)
        return bytes(data), facts._replace(is_ranged=place is None or place.facts.is_ranged)

    def read(self, key: str, facts: Facts, offset: int, nbytes: int) -> Bytes:
        """Return bytes of a file. Raises Damaged, by `changed`, where the pinned commit has another one."""
        known = self._facts(key)
        if (known.size, known.identity) != (facts.size, facts.identity):
            raise changed(self.shown(key))
        return self._bytes(key, facts, offset, offset + nbytes)

    def entries(self, folder: str) -> list[ListedEntry]:
        """Return what is directly in a folder: no request more, unless the repository has very many files."""
        return [ListedEntry(name, facts) for name, facts in self._commit().folder(folder).items()]

    def put(self, files: Mapping[str, str], *, replace: bool, progress: Progress | None = None) -> None:
        """Upload files in one commit to the branch: all of them appear, or none.

        The library uploads, over xet unless HF_HUB_DISABLE_XET is set; `progress` gets each file's size once
        it is sent. Without `replace` a file that is there raises OutputExists, one that comes in between too.
        Afterwards the commit's own sizes and hashes are compared with the local ones.
        """

        self._check_online()
        upload = Upload(self._about(""), files, self._patience, self._transport)
        commit = upload.commit(replace=replace, progress=progress)
        with self._lock:
            self._pinned = commit
            self._places.clear()

    def _about(self, key: str) -> About:
        page = f"{endpoint()}/{PREFIXES[self.kind]}{self.name}"
        return About(self.shown(key), page, self.name, self.kind, self.revision)

    def _check_online(self) -> None:
        if is_offline():
            raise calls.offline(self._about(""))

    def _commit(self) -> Commit:
        """Return the pinned commit."""
        with self._lock:
            if self._pinned is None:
                self._check_online()
                self._pinned = look(self._about(""), self.revision, self._transport)
            return self._pinned

    def _facts(self, key: str) -> Facts:
        commit = self._commit()
        facts = commit.facts(key)
        if facts is None:
            near = ", ".join(commit.near(key))
            hint = f"it has {near}" if near else f"see what it has: {self._about('').page}"
            raise Missing(self.shown(key), "no such file in the repository", hint=hint)
        return facts

    def _bytes(self, key: str, facts: Facts, start: int, stop: int) -> Bytes:
        """Return bytes of a file from where they were found last, or ask the hub where they are."""
        if start >= stop:
            return b""
        place = self._places.get(key)
        if place:
            response = self._get(key, place, start, stop)
            if response.facts is not None:
                return response.body
        with self._lock:
            lock = self._locks[key]
        with lock:
            newer = self._places.get(key)
            if newer is None or newer is place:
                return self._resolved(key, facts, start, stop)
        # Another thread has asked meanwhile.
        return self._get(key, newer, start, stop).checked(self.shown(key)).body

    def _get(self, key: str, place: _Place, start: int, stop: int) -> Response:
        ours = {"headers": authorization()} if self._is_hubs(place.url) else {"nearness": place.nearness}
        known: Any = {"shown": self.shown(key), "expected": place.facts, **ours}
        return self._transport.get(place.url, start, stop, **known)

    def _resolved(self, key: str, facts: Facts, start: int, stop: int) -> Bytes:
        """Return bytes of a file by way of the hub, and remember where it led."""
        shown, commit = self.shown(key), self._commit()
        url = f"{endpoint()}/{PREFIXES[self.kind]}{commit.name}/resolve/{commit.sha}/{quote(key)}"
        size, headers = Facts(facts.size) if start else None, authorization()
        response = self._transport.get(url, start, stop, shown=shown, headers=headers, expected=size)
        if response.facts is None and self._is_hubs(response.url):
            if response.headers.get("X-Error-Code") in ("RevisionNotFound", "EntryNotFound"):
                raise changed(shown)  # the listing had it
            raise calls.refused(self._about(key), response.status, response.headers)
        found = response.checked(shown).facts
        told = _hash_of((*response.redirects, response.headers))
        if found is None or found.size != facts.size or (told and told not in facts.identity):
            raise changed(shown)
        self._places[key] = _Place(response.url, found, response.nearness)
        return response.body

    def _is_hubs(self, url: str) -> bool:
        """Return whether a URL is of the hub itself, which alone gets the token."""
        return urlsplit(url)[:2] == urlsplit(endpoint())[:2]


def _hash_of(answers: tuple[Mapping[str, str], ...]) -> str:
    """Return the hash of a file from the headers of the hub's answers; "" if there is none."""
    # The ETag of the host of a large file is another one.
    linked = [answer["X-Linked-Etag"] for answer in answers if "X-Linked-Etag" in answer]
    tag = linked[0] if linked else answers[0].get("ETag", "")
    tag = tag.removeprefix("W/").strip('"')
    return tag if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", tag) else ""
