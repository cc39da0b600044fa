"""Check zip files with the package's reader and with other programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

from ckpttool.formats.pytorch.zip_reader import ZipRecord, read_directory
from ckpttool.tensors.source import ByteRange, Source


def place_of(path: Path) -> ByteRange:
    """Open a file and return all of its bytes as a place."""
    source = Source(str(path), os.open(path, os.O_RDONLY))
    return ByteRange(source, 0, source.size)


def directory(place: ByteRange) -> dict[str, ZipRecord]:
    """Return the records of a zip that fills a place."""
    return read_directory(place.source, place)


def assert_whole(path: Path) -> None:
    """Raise AssertionError unless Python's zipfile, and `unzip` if it is there, find a zip whole."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    if shutil.which("unzip"):
        tested = subprocess.run(["unzip", "-t", "-q", path], capture_output=True, check=False)
        assert tested.returncode == 0, tested.stdout
