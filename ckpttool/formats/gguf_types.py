"""The element types of GGUF, and the values of the packed ones, by the tables of the package `gguf`."""

from __future__ import annotations

from typing import Any

from ..errors import Unsupported, UsageFault, install
from ..lazy import np
from ..tensors.source import ByteRange

# The element types that torch has too, by their number.
PLAIN = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64"}
PLAIN[30] = "bfloat16"

# The packed ones: their name, elements of a block, and its bytes. Source: `GGML_QUANT_SIZES` of gguf-py.
_PACKED = """
    2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34, 9 Q8_1 32 40, 10 Q2_K 256 84,
    11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210, 15 Q8_K 256 292, 16 IQ2_XXS 256 66,
    17 IQ2_XS 256 74, 18 IQ3_XXS 256 98, 19 IQ1_S 256 50, 20 IQ4_NL 32 18, 21 IQ3_S 256 110, 22 IQ2_S 256 82,
    23 IQ4_XS 256 136, 29 IQ1_M 256 56, 34 TQ1_0 256 54, 35 TQ2_0 256 66, 39 MXFP4 32 17, 40 NVFP4 64 36,
    41 Q1_0 128 18
"""
PACKED = {int(row[0]): (row[1], int(row[2]), int(row[3])) for row in map(str.split, _PACKED.split(","))}
PACKED_NAMES = {name for name, _, _ in PACKED.values()}

PIECE = 1 << 17  # elements that are unpacked together, whole blocks; fewer and more are slower


def fill(data: ByteRange, name: str, kind: int, byteorder: str, start: int, out: memoryview) -> None:
    """Put values of a packed tensor into memory, float32, from byte `start` of them on."""
    _, elements, nbytes = PACKED[kind]
    unpack, values = _unpacker(data.path, name, kind, byteorder), np.frombuffer(out, "<f4")
    first, done = start // 4, 0
    while done < len(values):
        block, skipped = divmod(first + done, elements)
        count = min(len(values) - done, PIECE - skipped)
        blocks = -(-(skipped + count) // elements)
        raw = np.frombuffer(data.part(block * nbytes, blocks * nbytes).read(), np.uint8)
        with np.errstate(all="ignore"):  # scales may be infinite or NaN
            values[done : done + count] = unpack(raw.reshape(1, -1)).reshape(-1)[skipped : skipped + count]
        done += count


def require(path: str, name: str, kind: int, byteorder: str) -> None:
    """Raise what unpacking a tensor would, for want of the package or a formula: a block of zeros tells."""
    _unpacker(path, name, kind, byteorder)(np.zeros((1, PACKED[kind][2]), np.uint8))


def _unpacker(path: str, name: str, kind: int, byteorder: str) -> Any:
    """Return what makes an array of float32 of rows of blocks."""
    type_name = PACKED[kind][0]
    if byteorder == "big":
        what = f"tensor '{name[:80]}' is {type_name}, which is read in little-endian files alone"
        raise Unsupported(path, what, hint="turn it around first: gguf-convert-endian FILE little")
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        what = f"{path}: the values of '{name[:80]}' are packed as {type_name}, and need the package gguf"
        raise UsageFault(what, hint=install("gguf")) from None

    def unpack(raw: Any) -> Any:
        try:
            return dequantize(raw, GGMLQuantizationType[type_name])
        except (NotImplementedError, KeyError):
            raise Unsupported(
                path, f"tensor '{name[:80]}' is {type_name}, which gguf does not unpack"
            ) from None

    return unpack
