"""Read an object with one of the libraries, and print how many seconds it took: as JSON.

    python read_remote.py LIBRARY JOB ADDRESS

LIBRARY: obstore-s3, s3fs, obstore-http, urllib3, fsspec-http. JOB: `ranges`, 64 of 1 MB by 16 threads;
`whole`, 64 MB in pieces of 8 MiB, one after another; `list`, the names of 1,000 keys; `import`; `size`, the
bytes of the library with all that it needs, and how many packages these are.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, metadata
from typing import Any

BUCKET, KEY, FOLDER = "bench", "object", "keys"
NBYTES, RANGES, RANGE, PIECE, THREADS = 64_000_000, 64, 1_000_000, 8 << 20, 16

Read = Callable[[int, int], bytes]  # (start, stop) -> bytes
List = Callable[[], int]  # -> how many names

# What a library's functions need: the modules, and the packages with their extras.
NEEDS: dict[str, tuple[list[str], list[str]]] = {
    "obstore-s3": (["obstore", "obstore.store"], ["obstore"]),
    "s3fs": (["s3fs"], ["s3fs"]),
    "obstore-http": (["obstore", "obstore.store"], ["obstore"]),
    "urllib3": (["urllib3"], ["urllib3"]),
    "fsspec-http": (["fsspec", "fsspec.implementations.http"], ["fsspec[http]"]),
}


def opened(library: str, address: str) -> tuple[Read, List]:
    return {
        "obstore-s3": _obstore_s3,
        "s3fs": _s3fs,
        "obstore-http": _obstore_http,
        "urllib3": _urllib3,
        "fsspec-http": _fsspec_http,
    }[library](address)


def _obstore_s3(address: str) -> tuple[Read, List]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=address,
        access_key_id="id",
        secret_access_key="key",
        client_options={"allow_http": True},
    )

    def read(start: int, stop: int) -> bytes:
        return bytes(obstore.get_range(store, KEY, start=start, end=stop))

    return read, lambda: sum(map(len, obstore.list(store, FOLDER, chunk_size=1000)))


def _s3fs(address: str) -> tuple[Read, List]:
    import s3fs

    system = s3fs.S3FileSystem(key="id", secret="key", client_kwargs={"endpoint_url": address})

    def read(start: int, stop: int) -> bytes:
        data: bytes = system.cat_file(f"{BUCKET}/{KEY}", start=start, end=stop)
        return data

    return read, lambda: len(system.ls(f"{BUCKET}/{FOLDER}"))


def _obstore_http(address: str) -> tuple[Read, List]:
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(address, client_options={"allow_http": True})
    return lambda start, stop: bytes(obstore.get_range(store, KEY, start=start, end=stop)), _no_list


def _urllib3(address: str) -> tuple[Read, List]:
    import urllib3

    pool = urllib3.PoolManager(maxsize=THREADS)

    def read(start: int, stop: int) -> bytes:
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        return pool.request("GET", f"{address}/{KEY}", headers=headers).data

    return read, _no_list


def _fsspec_http(address: str) -> tuple[Read, List]:
    import fsspec

    system = fsspec.filesystem("http")
    return lambda start, stop: system.cat_file(f"{address}/{KEY}", start=start, end=stop), _no_list


def _no_list() -> int:
    raise NotImplementedError


def job(library: str, name: str, address: str) -> Any:
    if name == "import":
        return _seconds(lambda: [import_module(module) for module in NEEDS[library][0]])
    if name == "size":
        return installed(NEEDS[library][1])
    read, names = opened(library, address)
    if name == "list":
        return _seconds(lambda: _expect(names(), 1000))
    read(0, 1)  # connects
    size = PIECE if name == "whole" else RANGE
    total = NBYTES if name == "whole" else RANGES * RANGE
    with ThreadPoolExecutor(1 if name == "whole" else THREADS) as threads:
        starts = range(0, total, size)
        return _seconds(
            lambda: _expect(sum(threads.map(lambda at: len(read(at, min(at + size, total))), starts)), total)
        )


def _expect(found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"{found} instead of {wanted}")


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def installed(wanted: list[str]) -> tuple[int, int]:
    """Return the bytes of packages and all that they need here, and how many others these are."""
    from packaging.requirements import Requirement

    found: dict[str, int] = {}
    waiting = [Requirement(each) for each in wanted]
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        package = metadata.distribution(name)
        new = name not in found
        if new:
            files = [file.locate() for file in package.files or () if file.suffix != ".pyc"]
            found[name] = sum(file.stat().st_size for file in files if file.is_file())  # type: ignore[attr-defined]
        if new or requirement.extras:
            for line in package.requires or ():
                needed = Requirement(line)
                marker = needed.marker
                if marker is None or any(
                    marker.evaluate({"extra": extra}) for extra in {"", *requirement.extras}
                ):
                    waiting.append(needed)
    return sum(found.values()), len(found) - len(wanted)


if __name__ == "__main__":
    print(json.dumps(job(*sys.argv[1:4])))
