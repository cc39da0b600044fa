"""Faults put into the program on purpose: each must be found, or the machine looks in the wrong place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def show_queries() -> None:
    """Name signed URLs in errors as they are, and mask nothing: either alone keeps the secret."""
    from ckpttool import errors
    from ckpttool.core.remote.web import Https, quoted

    def shown(self: Https, key: str) -> str:
        return f"{self._origin}/{quoted(key)}?{self._query}"

    Https.shown = Https._url = shown  # type: ignore[method-assign]
    errors.masked = lambda text, **_: text  # type: ignore[assignment]


def trust_identities() -> None:
    """Take bytes of whatever version of an object."""
    from ckpttool.core.remote.web import Wanted

    Wanted._unchanged = lambda self, facts: facts  # type: ignore[method-assign]
    Wanted.asked = _without_condition(Wanted.asked)  # type: ignore[method-assign]


def _without_condition(asked: Callable[[Any], dict[str, str]]) -> Callable[[Any], dict[str, str]]:
    return lambda self: {name: text for name, text in asked(self).items() if name != "If-Match"}


def leave_parts() -> None:
    """Keep what was written before any error."""
    from ckpttool.core.files import resuming

    resuming.Unreadable = Exception  # type: ignore[assignment, misc]


def wait_for_ever() -> None:
    """Wait for a byte as long as it takes."""
    from ckpttool.core.remote.store import Patience

    Patience.usual = classmethod(lambda cls: cls(1e6))  # type: ignore[method-assign, assignment]


def let_errors_through() -> None:
    """Take no error of the HTTP library for one of the server's."""
    from ckpttool.core.remote.web import Response, Transport

    def attempted(self: Transport, wanted: Any) -> Response:
        return self._attempt(wanted)

    Transport._attempted = attempted  # type: ignore[method-assign]


def upload_in_place() -> None:
    """Send an object in two halves, of which the first replaces what was there."""
    from ckpttool.core.remote.buckets import Bucket

    put = Bucket._put

    def halves(self: Bucket, key: str, path: str, *more: Any) -> None:
        half = f"{path}.half"
        with open(path, "rb") as whole, open(half, "wb") as file:
            data = whole.read()
            file.write(data[: len(data) // 2])
        put(self, key, half, *more)
        put(self, key, path, *more)

    Bucket._put = halves  # type: ignore[method-assign]


# By name, what breaks something in the process in which it is called
HOLES: dict[str, Callable[[], None]] = {
    hole.__name__.replace("_", "-"): hole
    for hole in (
        *(show_queries, trust_identities, leave_parts, wait_for_ever, let_errors_through, upload_in_place),
    )
}
