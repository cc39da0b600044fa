"""Tensors as files describe them, in values of any type, checked before they are taken."""

from __future__ import annotations

from typing import Any

from .dtypes import SIGNED, DType, has_gradients
from .ref import MAX_AXES, MAX_BYTES, Storage, TensorRef, extent, is_count


class BadTensor(ValueError):
    """A description that no tensor can have. Its text follows the words "a tensor"."""


def checked_tensor(
    storage: Storage,
    dtype: DType,
    shape: Any,
    stride: Any,
    offset: Any,
    *flags: bool,
    limit: int | None = None,
) -> TensorRef:
    """Return a tensor as a file describes it, in values of any type; raise BadTensor if none can be so.

    `flags` are requires_grad, conj and neg.
    """
    limit = storage.nbytes if limit is None else limit
    are_tuples = type(shape) is tuple and type(stride) is tuple and len(shape) == len(stride)
    if are_tuples and len(shape) > MAX_AXES:
        raise BadTensor(f"of {len(shape)} axes, more than the {MAX_AXES} that are read here")
    if not (are_tuples and all(map(is_count, (offset, *shape, *stride)))):
        raise BadTensor("of malformed size, stride or offset")
    tensor = TensorRef(storage, dtype, shape, stride, offset, *flags)
    if (tensor.conj and "complex" not in dtype.name) or (tensor.neg and not dtype.name.startswith(SIGNED)):
        raise BadTensor(f"that is a conjugate or negative view of {dtype.name}")
    if tensor.requires_grad and not has_gradients(dtype):
        raise BadTensor(f"of {dtype.name} that requires gradients")
    if extent(shape) * dtype.itemsize > MAX_BYTES:
        raise BadTensor("of a shape larger than any file")
    if tensor.span[1] > limit:
        raise BadTensor(f"of shape {str(list(shape))[:80]} that reaches past its storage of {limit} bytes")
    return tensor
