"""CRCs put together are those of the bytes put together."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.files.crc32 import combined, crc32


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_the_checksum_of_two_stretches_is_that_of_their_bytes(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.binary(max_size=3000), st.integers(0, 2**32 - 1))
def test_checksums_are_those_of_zlib_with_any_library(data: bytes, before: int) -> None:
    assert crc32(data, before) == zlib.crc32(data, before)


def test_the_checksum_of_a_stretch_longer_than_any_buffer() -> None:
    """Zeros change a CRC too, by an amount that their number alone decides."""
    block, crc = bytes(1 << 20), zlib.crc32(b"before")
    expected = crc
    for _ in range(300):
        expected = zlib.crc32(block, expected)
    zeros = 0
    for _ in range(300):
        zeros = combined(zeros, zlib.crc32(block), len(block))
    assert combined(crc, zeros, 300 << 20) == expected
