"""Blocks of bytes as zstd frames: the standard library's since Python 3.14, else the package `zstandard`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from ...errors import Unsupported, install
from .header import BLOCK

# The fastest level packs XORs of weights best: what a longer search finds costs more to say than it saves. A
# table of matches of 2^10 entries finds those that pay, which are near, in half the time of the usual 2^14.
LEVEL, HASH_LOG = 1, 10

Compress = Callable[[Any], bytes]
Decompress = Callable[[memoryview, int], bytes]


class BadFrame(ValueError):
    """A frame that does not hold what it should; its text follows the frame's name."""


def is_there() -> bool:
    """Return whether anything here knows zstd."""
    return _find("compression.zstd") or _find("zstandard")


def require(path: str) -> None:
    """Raise Unsupported if nothing here knows zstd."""
    if not is_there():
        hint = f"{install('delta')}; Python 3.14 has it already"
        raise Unsupported(path, "holds differences packed by zstd, which is not installed", hint=hint)


@cache
def _find(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor its package
        return False


def compressor() -> Compress:
    """Return what packs a block as one frame that states its size, for one thread.

    It has no checksum: the header has those of all frames together, and of what is made of them.
    """
    if _find("compression.zstd"):
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]

        parameter = zstd.CompressionParameter
        options = {parameter.compression_level: LEVEL, parameter.hash_log: HASH_LOG}
        return lambda block: zstd.compress(block, options=options)  # type: ignore[no-any-return,unused-ignore]
    import zstandard

    chosen = zstandard.ZstdCompressionParameters.from_level(
        LEVEL, source_size=BLOCK, hash_log=HASH_LOG, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=chosen).compress


def decompressor() -> Decompress:
    """Return what unpacks a frame that states its size, a given number of bytes at most, for one thread.

    It raises BadFrame for any other frame, and takes no more memory than was given.
    """
    if _find("compression.zstd"):
        return _with_standard_library
    import zstandard

    unpack = zstandard.ZstdDecompressor().decompress

    def decompress(frame: memoryview, most: int) -> bytes:
        try:
            # It sizes the output, whatever is allowed.
            if not 0 <= zstandard.frame_content_size(frame) <= most:
                raise BadFrame("is of another size")
            return unpack(frame, max_output_size=most, allow_extra_data=False)
        except zstandard.ZstdError:
            raise BadFrame("is damaged") from None

    return decompress


def _with_standard_library(frame: memoryview, most: int) -> bytes:
    from compression import zstd

    try:
        nbytes = zstd.get_frame_info(frame).decompressed_size
        if nbytes is None or nbytes > most:
            raise BadFrame("is of another size")
        unpacker = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})
        block: bytes = unpacker.decompress(frame, nbytes + 1)
    except zstd.ZstdError:
        raise BadFrame("is damaged") from None
    if len(block) != nbytes or not unpacker.eof or unpacker.unused_data:
        raise BadFrame("is of another size")
    return block
