"""Objects behind https:// and http://, read by ranges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import BinaryIO
from urllib.parse import quote

from ...errors import Unreadable, UsageFault
from .connections import Transport
from .store import Bytes, Facts, ListedEntry, Patience, Progress

REFUSED = "ask its owner for a link that is signed and has not expired"  # the hint where access is refused


class Https:
    """The objects of one origin. No listing, no upload."""

    commit = ""

    def __init__(self, origin: str, query: str = "", patience: Patience | None = None) -> None:
        """Connect to nothing yet.

        Args:
            origin: `https://HOST:PORT`, without a slash at the end.
            query: what every URL ends in behind `?`, a secret.
            patience: bounds of each request; None: the usual ones.
        """
        self.transport = Transport(patience or Patience.usual())
        self._origin, self._query = origin, query

    def shown(self, key: str) -> str:
        """Return the URL of an object, without its query."""
        return f"{self._origin}/{quoted(key)}"

    def head(self, key: str, nbytes: int) -> tuple[bytes, Facts]:
        """Return the first bytes of an object and its facts. See `Store`."""
        body, facts = self._get(key, 0, max(nbytes, 1), None)  # a range can't be empty
        return bytes(body[:nbytes]), facts

    def read(self, key: str, facts: Facts, offset: int, nbytes: int) -> Bytes:
        """Return bytes of an object. Raises Unranged if the server ignores ranges. See `Store`."""
        return self._get(key, offset, offset + nbytes, facts)[0] if nbytes else b""

    def spool(self, key: str, facts: Facts, file: BinaryIO, most: int) -> None:
        """Fill an empty file with all of an object, in one request without a range.

        Raises Unreadable, naming the size, if it is larger than `most` bytes.
        """
        shown = self.shown(key)
        if facts.size > most:
            what = f"is sent only from front to back, and its {facts.size:,} bytes are too many for that"
            raise Unreadable(shown, what, hint="download it first")
        self.transport.download(self._url(key), file, shown=shown, expected=facts).checked(shown, REFUSED)

    def entries(self, folder: str) -> list[ListedEntry] | None:
        """Return None: HTTP has no listing."""
        return None

    def put(self, files: Mapping[str, str], *, replace: bool, progress: Progress | None = None) -> None:
        """Raise UsageFault: HTTP servers take no uploads."""
        name = self.shown(next(iter(files), ""))
        hint = "outputs are files, or lie behind hf, s3, gs or az"
        raise UsageFault(f"{name}: can't be written", hint=hint)

    def _get(self, key: str, start: int, stop: int, expected: Facts | None) -> tuple[Bytes, Facts]:
        shown = self.shown(key)
        response = self.transport.get(self._url(key), start, stop, shown=shown, expected=expected)
        response.checked(shown, REFUSED)
        assert response.facts is not None
        return response.body, response.facts

    def _url(self, key: str) -> str:
        return f"{self.shown(key)}?{self._query}" if self._query else self.shown(key)


def quoted(key: str) -> str:
    """Return a key as a URL's path. The escapes that `canonical` kept stay; any other `%` is escaped."""
    # A plus is escaped too: some stores take it for a space.
    path = quote(key, safe="/!$&'()*,;=:@~", errors="surrogateescape")
    return re.sub("%25(2F|25|23|3F)", r"%\1", path, flags=re.IGNORECASE)
