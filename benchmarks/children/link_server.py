"""A hub behind a link, which counts what passes: folders are repositories of the owner `bench`.

    python -m benchmarks.children.link_server FOLDER LATENCY BANDWIDTH

As the real hub does, it sends who asks for a file of weights to another host: that costs a request. It prints
both addresses. For each line of its input it prints, as JSON, how many requests, bytes, round trips and
seconds of its CPU there were since the last line, and it ends with its input. Round trips are the most
requests of which none began before the one before it was answered.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.range_server import Answer, Link, RangeServer, Request

SHA = "0" * 40  # of the only commit
SMALL = ".json"  # what the hub itself sends
CREDIT = 0.005  # seconds for which a link sends what waits in its queue while the server sleeps


class CountedLink(Link):
    """A link that loses no time between two pieces; and what was asked of the servers behind it."""

    def __init__(self, bandwidth: float) -> None:
        super().__init__(bandwidth)
        self._nbytes = 0
        self.answered: list[tuple[float, float]] = []  # begin and end of each answer

    def wait(self, nbytes: int) -> None:
        """Sleep until so many more bytes have passed."""
        with self._lock:
            self._nbytes += nbytes
            self._free = free = max(self._free, time.monotonic() - CREDIT) + nbytes / self._bandwidth
        if (seconds := free - time.monotonic()) > 0:
            time.sleep(seconds)

    def counted(self) -> tuple[int, int, int]:
        """Return requests, bytes and round trips, and forget them."""
        answered, self.answered = self.answered, []
        nbytes, self._nbytes = self._nbytes, 0
        trips, free = 0, 0.0
        for begin, end in sorted(answered, key=lambda times: times[1]):
            if begin >= free:
                trips, free = trips + 1, end
        return len(answered), nbytes, trips


class Links(CountedLink):
    """A link of its own for each token that asks; who has none shares one, which counts."""

    def __init__(self, bandwidth: float) -> None:
        super().__init__(bandwidth)
        self.asking, self._of = threading.local(), dict[str, CountedLink]()

    def wait(self, nbytes: int) -> None:
        if not (name := getattr(self.asking, "name", "")):
            return super().wait(nbytes)
        return self._of.setdefault(name, CountedLink(self._bandwidth)).wait(nbytes)


class Storage(RangeServer):
    """The files, REPOSITORY/NAME, behind a link that others may share; `?link=NAME` takes another."""

    def __init__(self, folder: Path, latency: float, link: CountedLink) -> None:
        super().__init__(folder, latency=latency)
        self.link: CountedLink = link

    def right(self, request: Request) -> Answer:
        """Answer as a server of files does, over the link that is asked for."""
        if isinstance(self.link, Links):
            self.link.asking.name = request.query.partition("link=")[2]
        return super().right(request)

    def answer(self, exchange: Any) -> None:
        """Answer a request, and note when."""
        begin = time.monotonic()
        try:
            super().answer(exchange)
        finally:
            self.link.answered.append((begin, time.monotonic()))


class Hub(Storage):
    """The repositories' descriptions, and where their files are."""

    def __init__(self, folder: Path, latency: float, storage: Storage) -> None:
        super().__init__(folder, latency, storage.link)
        self.storage = storage
        self.files = {
            path.relative_to(folder).as_posix(): (path.stat().st_size, _sha256(path))
            for path in sorted(folder.glob("*/*"))
        }

    def right(self, request: Request) -> Answer:
        """Answer as the hub does: what a repository is, what is in it, where a file of it is."""
        parts = request.path.strip("/").split("/")
        if parts[0] == "api":
            about = self._tree(parts[3]) if parts[4:5] == ["tree"] else self._description(parts[3])
            return Answer(200, {"Content-Type": "application/json"}, memoryview(json.dumps(about).encode()))
        name = f"{parts[1]}/{parts[4]}"
        told = {"X-Repo-Commit": SHA}
        if name.endswith(SMALL) or name not in self.files:
            here = super().right(request._replace(path=name))
            absent = {"X-Error-Code": "EntryNotFound"} if here.status == 404 else {}
            return replace(here, headers={**here.headers, **told, **absent})
        size, digest = self.files[name]
        told |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{digest}"'}
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        asked = f"?link={token}" if token else ""
        return Answer(302, {**told, "Location": f"{self.storage.url}/{name}{asked}"})

    def _tree(self, repository: str) -> list[dict[str, Any]]:
        found = []
        for path in self.files:
            if path.startswith(f"{repository}/"):
                size, digest = self.files[path]
                told = {"type": "file", "path": path.partition("/")[2], "oid": digest[:40], "size": size}
                lfs = {"oid": digest, "size": size, "pointerSize": 134}
                found.append(told if path.endswith(SMALL) else {**told, "lfs": lfs})
        return found

    def _description(self, repository: str) -> dict[str, Any]:
        siblings = []
        for file in self._tree(repository):
            told = {"rfilename": file["path"], "size": file["size"], "blobId": file["oid"]}
            lfs = {"lfs": {"sha256": file["lfs"]["oid"], **file["lfs"]}} if "lfs" in file else {}
            siblings.append({**told, **lfs})
        return {"id": f"bench/{repository}", "sha": SHA, "private": False, "tags": [], "siblings": siblings}


def _sha256(path: Path) -> str:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).hexdigest()


def main() -> None:
    folder, latency, link = Path(sys.argv[1]), float(sys.argv[2]), Links(float(sys.argv[3]))
    storage = Storage(folder, latency, link)
    hub = Hub(folder, latency, storage)
    with storage, hub:
        print(hub.url, storage.url, flush=True)
        before = time.process_time()
        for _ in sys.stdin:
            seconds, before = time.process_time() - before, time.process_time()
            print(json.dumps([*link.counted(), seconds]), flush=True)


if __name__ == "__main__":
    main()
