"""A file made smaller while what is wrong with it stays."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.fuzz.seeds import Files


def minimised(files: Files, is_same: Callable[[Files], bool], until: float) -> Files:
    """Return a smaller checkpoint with the same fault: files and bytes are taken out, others zeroed.

    Args:
        files: the checkpoint.
        is_same: whether another has the same fault.
        until: the moment (`time.monotonic`) at which the search ends.
    """
    for name in sorted(files):
        if name:
            fewer = {other: raw for other, raw in files.items() if other != name}
            if fewer and time.monotonic() < until and is_same(fewer):
                files = fewer
    for name in sorted(files, key=lambda each: -len(files[each])):
        for emptied in (lambda size: b"", bytes):
            files = _without_stretches(files, name, emptied, is_same, until)
    return files


def _without_stretches(
    files: Files,
    name: str,
    emptied: Callable[[int], bytes],
    is_same: Callable[[Files], bool],
    until: float,
) -> Files:
    """Replace stretches of one file, halves first and ever shorter ones, where the fault stays."""
    size = len(files[name]) // 2
    while size and time.monotonic() < until:
        at = 0
        while at < len(files[name]) and time.monotonic() < until:
            raw = files[name]
            piece = raw[at : at + size]
            tried = {**files, name: raw[:at] + emptied(len(piece)) + raw[at + size :]}
            if tried[name] != raw and is_same(tried):
                files = tried
            if files[name][at : at + size] == piece or emptied is bytes:
                at += size
        size //= 2
    return files
