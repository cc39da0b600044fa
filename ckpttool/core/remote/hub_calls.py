"""Requests to the hub: its pages about a repository, its commits, and calls of huggingface_hub."""

from __future__ import annotations

import difflib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait as waited
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from ...errors import CkptToolError, Unreadable
from .store import TRAFFIC, Facts, Missing, Patience, next_step, seconds_asked, started
from .web import PASSING, Fault, Transport, nearness, origin, proxy_of, too_near

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SIGN_IN = "if it is private, sign in: `hf auth login`, or set HF_TOKEN"
WEIGHTS = re.compile(r"(.+)/(.+\.(?:safetensors|bin|pt|pth|ckpt|pt2|gguf|onnx|npz|json))")
NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
MOST_PAGES = 1000  # of one listing


class NoEntry(Missing, kind="no-entry"):
    """The repository and its revision are there, the file or folder is not."""


class About(NamedTuple):
    """The repository of a call, for its errors."""

    url: str
    page: str  # the repository's, for people
    name: str
    kind: str
    revision: str | None
    absent: str = SIGN_IN  # the hint where there is no such repository

    @property
    def argument(self) -> str:
        """The repository as the library's own commands take it."""
        return self.name if self.kind == "model" else f"{self.name} --repo-type {self.kind}"


def endpoint() -> str:
    """Return the hub's address: HF_ENDPOINT, or the usual one."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_offline() -> bool:
    """Return whether the user's settings forbid to ask the hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def authorization() -> dict[str, str]:
    """Return the header of the user's token, if there is one."""
    from huggingface_hub import constants

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else _token(constants.HF_TOKEN_PATH)
    return {"Authorization": f"Bearer {token}"} if token else {}


def _token(path: str) -> str | None:
    """Return the token as huggingface_hub finds it, mostly without its import, which takes 0.2 s."""
    named = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not {"HF_OIDC_RESOURCE", "COLAB_RELEASE_TAG"} & {*os.environ}:
        if named.strip():
            return named.strip()
        if not os.path.exists(path):
            return None
    from huggingface_hub import get_token

    return get_token()


def ask_all(about: About, path: str, transport: Transport) -> Iterator[Any]:
    """Yield the entries of a list of several pages. Raises Missing, Unreadable."""
    url = f"{endpoint()}{path}"
    for _ in range(MOST_PAGES):
        entries, link = _asked(about, url, transport)
        with understood(about):
            yield from entries
        following = NEXT.search(link)
        if following is None:
            return
        url = urljoin(url, following[1])
        if origin(url) != origin(endpoint()):  # which the token is not for
            break
    raise Unreadable(about.url, "the hub's list of its files does not end")


def _asked(about: About, url: str, transport: Transport) -> tuple[Any, str]:
    try:
        response = transport.page(url, shown=about.url, headers=authorization())
    except Unreadable as error:
        hint = error.hint or "check the network, and HF_ENDPOINT"
        raise Unreadable(about.url, f"the hub can't be asked: {error.reason}", hint=hint) from None
    if response.status != 200:
        raise refused(about, response.status, response.headers)
    with understood(about):
        return json.loads(bytes(response.body)), response.headers.get("Link", "")


@contextmanager
def understood(about: About) -> Iterator[None]:
    """Raise Unreadable where an answer lacks what it should hold."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {str(error)[:80]}"
        raise Unreadable(about.url, f"the hub's answer is not understood: {why}") from None


def refused(about: About, status: int, headers: Mapping[str, str]) -> CkptToolError:
    """Return the error for an answer of the hub that refuses, by its status and headers."""
    url, code = about.url, headers.get("X-Error-Code", "")
    if code == "RevisionNotFound":
        hint = f"its branches and tags are on {about.page}/tree/main"
        return Missing(url, f"the repository has no revision '{about.revision or 'main'}'", hint=hint)
    if code == "GatedRepo":
        hint = f"accept its conditions on {about.page}, then `hf auth login`, or set HF_TOKEN"
        return Unreadable(url, "the repository is gated, and this account has no access", hint=hint)
    if code == "EntryNotFound":
        return NoEntry(url, "no such file in the repository")
    if status == 401 and "credentials" in headers.get("X-Error-Message", ""):
        return Unreadable(url, "the hub refuses the token", hint="`hf auth login`, or set another HF_TOKEN")
    if code == "RepoNotFound" or status in (401, 404):
        lone, hint = WEIGHTS.fullmatch(about.name), about.absent
        if lone:
            hint = f"a repository without an owner is written hf://{lone[1]}@main/{lone[2]}"
        return Missing(url, "no such repository, or a private one", hint=hint)
    if status == 403:
        return Unreadable(url, "access is refused (status 403)", hint="use a token that allows it")
    advice = next_step(seconds=seconds_asked(headers))
    return Unreadable(url, f"the hub answers with status {status}", hint=advice)


def offline(about: About) -> Unreadable:
    """Return the error for a repository that is not in the hub's cache while nothing may be asked."""
    hint = f"unset HF_HUB_OFFLINE, or fetch it where there is a network: hf download {about.argument}"
    return Unreadable(about.url, "is not asked for while offline, and not in the hub's cache", hint=hint)


# ---- A commit and its files: sizes and hashes, mostly by one request


SHA = re.compile("[0-9a-f]{40}")

# Of more files the hub's description of a repository may leave some out (huggingface_hub#3565).
SURE = 1000

Folder = dict[str, Facts | None]  # name -> facts of a file, None of a folder


@dataclass
class Commit:
    """A commit, whose folders are asked for when they are needed, or known from the beginning."""

    about: About
    name: str  # of the repository, as the hub calls it today
    sha: str
    transport: Transport
    is_whole: bool  # whether all folders are known
    folders: dict[str, Folder] = field(default_factory=dict)

    def folder(self, folder: str) -> Folder:
        """Return what is directly in a folder; nothing, if there is none."""
        if folder in self.folders or self.is_whole or {".", ".."} & {*folder.split("/")}:
            return self.folders.get(folder, {})
        return self.folders.setdefault(folder, self._tree(folder))

    def facts(self, key: str) -> Facts | None:
        """Return the facts of a file, or None if there is none."""
        folder, _, name = key.rpartition("/")
        return self.folder(folder).get(name)

    def near(self, key: str) -> list[str]:
        """Return the known files with the most similar names."""
        listed = ((folder, name) for folder, names in self.folders.items() for name in names if names[name])
        known = [f"{folder}/{name}" if folder else name for folder, name in listed]
        return difflib.get_close_matches(key, known, n=3)

    def _tree(self, folder: str) -> Folder:
        path = f"{_address(self.about.kind, self.name)}/tree/{self.sha}"
        found = Folder()
        with suppress(NoEntry), understood(self.about):
            for entry in ask_all(self.about, f"{path}/{quote(folder, safe='')}".rstrip("/"), self.transport):
                name = entry["path"].rpartition("/")[2]
                found[name] = _facts_of(entry, "oid") if entry["type"] == "file" else None
        return found


def look(about: About, revision: str | None, transport: Transport) -> Commit:
    """Return the commit of a revision, with its files. Raises Missing, Unreadable."""
    path = _address(about.kind, about.name) + (f"/revision/{quote(revision, safe='')}" if revision else "")
    told, _ = _asked(about, f"{endpoint()}{path}?blobs=true", transport)
    with understood(about):
        if not SHA.fullmatch(told["sha"]):
            raise ValueError("it names no commit")
        commit = Commit(about, str(told["id"]), told["sha"], transport, is_whole=False)
        siblings = told.get("siblings") or []
        if 0 < len(siblings) <= SURE:
            files = {file["rfilename"]: _facts_of(file, "blobId") for file in siblings}
            commit.folders, commit.is_whole = _by_folder(files), True
    return commit


def _address(kind: str, name: str) -> str:
    return f"/api/{kind}s/{quote(name)}"


def _facts_of(entry: Mapping[str, Any], hashed: str) -> Facts:
    """Return the facts of a file. The hub knows the SHA-256 of a large file, git's hash of any other."""
    large = entry.get("lfs")
    digest = f"sha256:{large.get('sha256') or large['oid']}" if large else ""
    size = int((large or entry)["size"])
    if size < 0 or not (digest or entry[hashed]):
        raise ValueError("it tells no sizes")
    return Facts(size, digest or f"git:{entry[hashed]}", digest)


def _by_folder(files: Mapping[str, Facts]) -> dict[str, Folder]:
    folders: dict[str, Folder] = {"": {}}
    for path, facts in files.items():
        *parents, name = path.split("/")
        for depth, parent in enumerate(parents):
            folders.setdefault("/".join(parents[:depth]), {})[parent] = None
        folders.setdefault("/".join(parents), {})[name] = facts
    return folders


# ---- Calls of huggingface_hub: silent, in bounded time, with counted requests and our errors


AGENT = "ckpttool"  # by which our requests are known among all that go through the library's session
SECRETS = re.compile(r"\?\S*|\bhf_\w+|Bearer \S+")
LONGEST = 10  # times the patience for a byte that an answer may take

T = TypeVar("T")


def client() -> HfApi:
    """Return the library's client, for the endpoint and the token of the user's settings."""
    from huggingface_hub import HfApi, constants

    return HfApi(endpoint=constants.ENDPOINT, library_name=AGENT)


def call(about: About, do: Callable[[], T], patience: Patience) -> T:
    """Return the result of a call of the library; after a passing fault of the hub, try again.

    A failed connection is not tried again: the library has done so itself (6 times within 24 s and the
    stalls), or the hub may have carried out the call. Raises Missing, Unreadable.
    """
    for attempt in count(1):
        try:
            with quiet():
                _watch()
                return _bounded(about, do, LONGEST * patience.stall)
        except (CkptToolError, ImportError):
            raise
        except Exception as error:
            # Of the library, of its HTTP client, or from an answer that makes no sense; an upload wraps it.
            cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
            if isinstance(cause, OSError) and cause.filename:  # of this machine
                raise cause from None
            failure, may_pass, wait = _judged(about, cause)
        if not may_pass or attempt >= patience.attempts:
            raise failure from None
        patience.wait(attempt, wait)
    raise AssertionError  # count() has no end


def _bounded(about: About, do: Callable[[], T], seconds: float) -> T:
    """Return the result of a call. Raises Unreadable where one answer takes more than `seconds`."""
    awaited: dict[int, float] = {}  # requests that were sent, and whose answer has not ended: since when

    def watched() -> T:
        _of_thread.awaited = awaited
        return do()

    outcome = started(watched)
    while not waited([outcome], seconds / LONGEST).done:
        if any(time.monotonic() > since + seconds for since in [*awaited.values()]):
            raise Unreadable(about.url, f"the hub's answer does not end within {seconds:g} s")
    return outcome.result()


def _judged(about: About, error: BaseException) -> tuple[CkptToolError, bool, float | None]:
    """Return our error, whether another attempt may help, and how many seconds the hub asks to wait."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return offline(about), False, None
    if isinstance(error, HfHubHTTPError):
        status, headers = error.response.status_code, error.response.headers
        return refused(about, status, headers), status in PASSING, seconds_asked(headers)
    if isinstance(error, HFValidationError):
        return Unreadable(about.url, f"'{about.name}' is no name of a repository"), False, None
    if isinstance(error, Fault):
        return Unreadable(about.url, f"the hub can't be asked: {error.reason}"), False, None
    why = SECRETS.sub("…", str(error).strip().partition("\n")[0]) or type(error).__name__
    if type(error).__module__.startswith("httpx"):
        hint = "check the network, and HF_ENDPOINT"
        return Unreadable(about.url, f"the hub can't be reached: {why}", hint=hint), False, None
    return Unreadable(about.url, f"the hub's answer is not understood: {why}"), False, None


_lock = threading.Lock()
_under_way = 0
_of_thread = threading.local()
_before: tuple[int, bool, bool] = (0, False, False)  # the library's settings while no call is under way


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library from printing, and from sending telemetry."""
    global _under_way, _before
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from huggingface_hub.utils import logging as loud

    with _lock:
        if not _under_way:
            # A user who set the variable has decided, and the library would warn.
            has_bars = constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
            _before = loud.get_verbosity(), has_bars, constants.HF_HUB_DISABLE_TELEMETRY
            loud.set_verbosity(loud.CRITICAL)
            constants.HF_HUB_DISABLE_TELEMETRY = True
            if has_bars:
                disable_progress_bars()
        _under_way += 1
    try:
        yield
    finally:
        with _lock:
            _under_way -= 1
            if not _under_way:
                level, has_bars, constants.HF_HUB_DISABLE_TELEMETRY = _before
                loud.set_verbosity(level)
                if has_bars:
                    enable_progress_bars()


def _watch() -> None:
    """Have the library's session report our requests; a user's own code may share the session."""
    from huggingface_hub.utils import get_session

    with _lock:
        session = get_session()
        hooks = session.event_hooks
        if _begun not in hooks["request"]:
            ours = {"request": _begun, "response": _answered}
            session.event_hooks = {event: [*hooks[event], hook] for event, hook in ours.items()}


def _is_ours(request: Any) -> bool:
    return _under_way > 0 and request.headers.get("user-agent", "").startswith(f"{AGENT}/")


def _begun(request: Any) -> None:
    """Count a request of ours and set its time limit. Uploads to storage name no agent."""
    if _is_ours(request) or (_under_way and request.method == "PUT"):
        TRAFFIC.count()
        given = {each: seconds for each, seconds in request.extensions.get("timeout", {}).items() if seconds}
        usual = dict.fromkeys(("connect", "read", "write", "pool"), Patience.usual().stall)
        request.extensions["timeout"] = usual | given
        host, ours = request.url.host, urlsplit(endpoint()).hostname or ""
        allowed = None if host == ours else nearness(ours)  # of a host that a server has named
        if allowed is not None and nearness(host) not in ("", allowed):
            raise too_near(host)
        by_proxy = proxy_of(str(request.url)) is not None
        request.extensions["trace"] = partial(_followed, id(request), None if by_proxy else allowed)


def _followed(request: int, allowed: str | None, event: str, info: Mapping[str, Any]) -> None:
    """Note when the wait for an answer begins and ends; refuse a connection nearer than is allowed."""
    if allowed is not None and event.endswith("connect_tcp.complete"):
        address = info["return_value"].get_extra_info("server_addr")[0]
        if nearness(address) not in ("", allowed):
            raise too_near(address)
    awaited: dict[int, float] = getattr(_of_thread, "awaited", {})  # httpx bounds the wait for a byte alone
    if event.endswith("receive_response_headers.started"):
        awaited[request] = time.monotonic()
    elif event.endswith("response_closed.started"):
        awaited.pop(request, None)


def _answered(response: Any) -> None:
    """Raise for a busy hub; else the library would sleep as long as the server likes."""
    if response.status_code in PASSING and _is_ours(response.request):
        from huggingface_hub.utils import hf_raise_for_status

        hf_raise_for_status(response)
