"""What the hub tells of a repository: its own pages, for the endpoint and the token that a user has set."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urljoin

from ...errors import CkptToolError, Unreadable
from ..busy import next_step, seconds_asked
from ..store import Missing
from ..web.transport import Transport, origin

SIGN_IN = "if it is private, sign in: `hf auth login`, or set HF_TOKEN"
WEIGHTS = re.compile(r"(.+)/(.+\.(?:safetensors|bin|pt|pth|ckpt|pt2|gguf|onnx|npz|json))")
NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
MOST_PAGES = 1000  # of one listing


class NoEntry(Missing, kind="no-entry"):
    """The repository and its revision are there, the file or folder is not."""


class About(NamedTuple):
    """What a call is about, for its errors."""

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
    """Return the token as huggingface_hub finds it, without its import (0.2 s) where the place is plain."""
    named = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not {"HF_OIDC_RESOURCE", "COLAB_RELEASE_TAG"} & {*os.environ}:
        if named.strip():
            return named.strip()
        if not os.path.exists(path):
            return None
    from huggingface_hub import get_token

    return get_token()


def ask(about: About, path: str, transport: Transport) -> Any:
    """Return what a page of the hub says. Raises Missing, Unreadable."""
    return _asked(about, f"{endpoint()}{path}", transport)[0]


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
    """Raise Unreadable where an answer does not say what it should."""
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
    return Unreadable(
        url, f"the hub answers with status {status}", hint=next_step(seconds=seconds_asked(headers))
    )


def offline(about: About) -> Unreadable:
    """Return the error for a repository that is not in the hub's cache while nothing may be asked."""
    hint = f"unset HF_HUB_OFFLINE, or fetch it where there is a network: hf download {about.argument}"
    return Unreadable(about.url, "is not asked for while offline, and not in the hub's cache", hint=hint)
