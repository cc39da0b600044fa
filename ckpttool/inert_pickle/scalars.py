"""Decode the text and numbers of a pickle; each function raises PickleFault for malformed ones."""

from __future__ import annotations

import codecs

from .machine import fault

MAX_DIGITS = 4300  # of an integer written as text: Python's own limit


def text(raw: bytes) -> str:
    """UTF-8 with lone surrogates, which Python's pickler writes as file names may hold them."""
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        fault("its pickle has text that is not UTF-8")


def escaped_text(raw: bytes) -> str:
    """Text of protocol 0, with escapes."""
    try:
        return raw.decode("raw-unicode-escape")
    except UnicodeDecodeError:
        fault("its pickle has malformed text")


def string(raw: bytes) -> str | bytes:
    """A string of Python 2: text where it is UTF-8, as torch decodes it, else bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def quoted_string(raw: bytes) -> str | bytes:
    """A string of Python 2 in quotation marks."""
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        fault("its pickle has a malformed string")
    try:
        return string(codecs.escape_decode(raw[1:-1])[0])
    except ValueError:
        fault("its pickle has a malformed string")


def signed(raw: bytes) -> int:
    """An integer in two's complement, little-endian."""
    return int.from_bytes(raw, "little", signed=True)


def integer(raw: bytes) -> int:
    """An integer in decimal digits."""
    digits = raw.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > MAX_DIGITS:
        fault("its pickle has a malformed integer")
    return int(raw)


def integer_or_bool(raw: bytes) -> int:
    """An integer in decimal digits, with Python 2's `L` or not; `00` and `01` are False and True."""
    return {b"00": False, b"01": True}[raw] if raw in (b"00", b"01") else integer(raw.removesuffix(b"L"))


def real(raw: bytes) -> float:
    """A float in decimal digits."""
    try:
        return float(raw)
    except ValueError:
        fault("its pickle has a malformed number")
