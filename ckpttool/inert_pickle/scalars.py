"""Text and numbers as they are in a pickle."""

from __future__ import annotations

import codecs

from .machine import fault

MAX_DIGITS = 4300
"""Decimal digits of an integer written as text, Python's own bound."""


def text(raw: bytes) -> str:
    try:  # Python's pickler writes lone surrogates, as file names may hold them
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        fault("its pickle has text that is not UTF-8")


def escaped_text(raw: bytes) -> str:
    try:
        return raw.decode("raw-unicode-escape")
    except UnicodeDecodeError:
        fault("its pickle has malformed text")


def string(raw: bytes) -> str | bytes:
    """A string of Python 2: text where it is UTF-8, as torch reads it, else its bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def quoted_string(raw: bytes) -> str | bytes:
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        fault("its pickle has a malformed string")
    try:
        return string(codecs.escape_decode(raw[1:-1])[0])
    except ValueError:
        fault("its pickle has a malformed string")


def signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def integer(raw: bytes) -> int:
    digits = raw.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > MAX_DIGITS:
        fault("its pickle has a malformed integer")
    return int(raw)


def integer_or_bool(raw: bytes) -> int:
    return {b"00": False, b"01": True}[raw] if raw in (b"00", b"01") else integer(raw.removesuffix(b"L"))


def real(raw: bytes) -> float:
    try:
        return float(raw)
    except ValueError:
        fault("its pickle has a malformed number")
