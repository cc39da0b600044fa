"""Element types, and what each is called in the formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..lazy import np


@dataclass(frozen=True, slots=True)
class DType:
    """An element type."""

    name: str  # torch's, `float32`
    itemsize: int  # bytes per element
    storage: str | None  # the class that torch has for it, `FloatStorage`; none for types younger than 2.0
    safetensors: str | None  # the name in a safetensors header, `F32`, if that format has the type
    part: int  # bytes of the unit that byte order and sign apply to: half an element for complex types

    @property
    def kind(self) -> str:
        """The storage class under which torch pickles tensors of it; an untyped one goes with their dtype."""
        return self.storage or "UntypedStorage"


# The floats that need no scale beside them: what is averaged, added to, scaled and made fp8.
PLAIN_FLOATS = ("float64", "float32", "float16", "bfloat16")

DTYPES = {
    name: DType(name, size, storage, safetensors, size // 2 if "complex" in name else size)
    for name, size, storage, safetensors in (
        ("float64", 8, "DoubleStorage", "F64"),
        ("float32", 4, "FloatStorage", "F32"),
        ("float16", 2, "HalfStorage", "F16"),
        ("bfloat16", 2, "BFloat16Storage", "BF16"),
        ("int64", 8, "LongStorage", "I64"),
        ("int32", 4, "IntStorage", "I32"),
        ("int16", 2, "ShortStorage", "I16"),
        ("int8", 1, "CharStorage", "I8"),
        ("uint8", 1, "ByteStorage", "U8"),
        ("bool", 1, "BoolStorage", "BOOL"),
        ("uint64", 8, None, "U64"),
        ("uint32", 4, None, "U32"),
        ("uint16", 2, None, "U16"),
        ("float8_e4m3fn", 1, None, "F8_E4M3"),
        ("float8_e5m2", 1, None, "F8_E5M2"),
        ("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ"),
        ("float8_e8m0fnu", 1, None, None),
        ("complex128", 16, "ComplexDoubleStorage", None),
        ("complex64", 8, "ComplexFloatStorage", "C64"),
        ("complex32", 4, None, None),
        ("bcomplex32", 4, None, None),
        # Quantised and bit types: kept as they are where the format can hold them, and not interpreted.
        ("qint8", 1, "QInt8Storage", None),
        ("quint8", 1, "QUInt8Storage", None),
        ("qint32", 4, "QInt32Storage", None),
        ("quint4x2", 1, "QUInt4x2Storage", None),
        ("quint2x4", 1, "QUInt2x4Storage", None),
        ("float4_e2m1fn_x2", 1, None, None),
        ("bits8", 1, None, None),
        ("bits16", 2, None, None),
        ("bits1x8", 1, None, None),
        ("bits2x4", 1, None, None),
        ("bits4x2", 1, None, None),
    )
}

# Element types by the storage class under which torch pickles them
STORAGE_DTYPES = {dtype.storage: dtype for dtype in DTYPES.values() if dtype.storage}

# The types of the real and imaginary parts of complex types
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16", "bcomplex32": "bfloat16"}
REAL_TYPES = {name: DTYPES[part] for name, part in _PARTS.items()}


def real_dtype(dtype: DType) -> DType:
    """Return the type of the parts of a complex type; for any other type itself."""
    return REAL_TYPES.get(dtype.name, dtype)


def has_gradients(dtype: DType) -> bool:
    """Return whether torch lets a tensor of this type require gradients."""
    return "float" in dtype.name or "complex" in dtype.name


# Types that numpy lacks; the package ml_dtypes has them under torch's names.
OF_ML_DTYPES = {name for name in DTYPES if name.startswith(("bfloat16", "float8"))}


def numpy_type(dtype: DType) -> Any:
    """Return numpy's element type, or that of ml_dtypes; None where there is none."""
    if dtype.name in OF_ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype.name))
    # np.dtype would also know the types that another package has registered.
    own = getattr(np, "bool_" if dtype.name == "bool" else dtype.name, None)
    return own and np.dtype(own)


# Types that torch's lazy negative may be set on: flipping the sign bit is all it means
SIGNED = ("float16", "float32", "float64", "bfloat16", "complex", "bcomplex")
