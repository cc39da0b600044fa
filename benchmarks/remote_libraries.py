"""Which library reads what lies elsewhere: obstore and urllib3 beside fsspec's file systems.

    pip install s3fs 'fsspec[http]' packaging
    python -m benchmarks.remote_libraries

Each way runs in a process of its own, by turns, round after round; what counts is the work alone, after
the import and the first connection. moto is an S3 server in Python, and slow itself; the tests' server of
ranges waits 20 ms before each answer, and takes requests of S3's libraries too. A row compares two ways in
the same rounds: `×` is how many times as long the second takes, the median over rounds. `--python` names an
interpreter for the libraries, where this one has none of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.support.bucket_servers import moto

from . import machine
from .markdown import table
from .own_program import parsed, parser_of, show
from .peers.read_remote import BUCKET, FOLDER, KEY, NBYTES

CHILD = Path(__file__).parent / "peers/read_remote.py"
LATENCY = 0.02  # seconds


class Row(NamedTuple):
    """One comparison: the job, on which server, by whom, and beside whom."""

    title: str
    job: str
    server: str
    first: str
    second: str


READS = [("64 ranges of 1 MB, 16 threads", "ranges"), ("64 MB in pieces of 8 MiB", "whole")]
PAIRS = [
    ("moto", "obstore-s3", "s3fs"),
    ("ranges", "obstore-s3", "s3fs"),
    ("ranges", "urllib3", "fsspec-http"),
    ("ranges", "urllib3", "obstore-http"),
]
ROWS = [
    *(Row(title, job, *pair) for title, job in READS for pair in PAIRS),
    Row("1,000 keys listed", "list", "moto", "obstore-s3", "s3fs"),
    Row("import", "import", "", "obstore-s3", "s3fs"),
    Row("import", "import", "", "urllib3", "fsspec-http"),
]


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Run both servers; yield their addresses."""
    import boto3  # type: ignore[import-untyped]

    data = bytes(NBYTES)
    (folder / BUCKET).mkdir()
    for path in (folder / KEY, folder / BUCKET / KEY):
        path.write_bytes(data)
    options = ["--latency", str(LATENCY)]
    command = [sys.executable, "-m", "tests.support.range_server", str(folder), *options]
    with moto() as s3, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        keys = {"aws_access_key_id": "id", "aws_secret_access_key": "key", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=s3, **keys)
        client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key=KEY, Body=data)
        for number in range(1000):
            client.put_object(Bucket=BUCKET, Key=f"{FOLDER}/{number:04}", Body=b"")
        assert server.stdout
        try:
            yield {"moto": s3, "ranges": server.stdout.readline().strip(), "": ""}
        finally:
            server.terminate()


def asked(python: str, library: str, job: str, address: str) -> Any:
    """Return what a library's process says of a job."""
    answer = subprocess.run([python, str(CHILD), library, job, address], check=True, stdout=subprocess.PIPE)
    return json.loads(answer.stdout)


def measured(row: Row, python: str, address: str, rounds: int) -> list[str]:
    """Return the cells of a comparison, after a round to warm up."""
    seconds: dict[str, list[float]] = {row.first: [], row.second: []}
    for number in range(rounds + 1):
        for library in (row.first, row.second) if number % 2 else (row.second, row.first):
            seconds[library].append(asked(python, library, row.job, address))
    first, second = (seconds[library][1:] for library in (row.first, row.second))
    ratio = median(b / a for a, b in zip(first, second, strict=True))
    shown = [f"{row.first} {median(first):.3f} s", f"{row.second} {median(second):.3f} s"]
    return [
        row.title,
        row.server,
        *shown,
        f"{ratio:.2f}",
        f"{min(first):.3f}-{max(first):.3f}, {min(second):.3f}-{max(second):.3f}",
    ]


def sizes(python: str) -> str:
    """Return the table of what is installed."""
    rows = [["library", "with all it needs", "other packages"]]
    for library in ("obstore-s3", "s3fs", "urllib3", "fsspec-http"):
        nbytes, others = asked(python, library, "size", "")
        rows.append([library, f"{nbytes / 1e6:.1f} MB", str(others)])
    return table(rows)


def main() -> int:
    parser = parser_of("remote_libraries", __doc__, rounds=5)
    parser.add_argument("--python", default=sys.executable, help="with the libraries (this one)")
    options = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="ckpttool-bench-") as name, servers(Path(name)) as addresses:
        about = f"{machine.about(Path(name))}; {machine.load()} at the start"
        rows = [["what", "server", "way", "beside", "×", "min-max of both"]]
        rows += [measured(row, options.python, addresses[row.server], options.rounds) for row in ROWS]
    text = f"{table(rows, left=2)}\n\n{sizes(options.python)}\n\n{options.rounds} rounds. Measured {about}."
    show(text, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
