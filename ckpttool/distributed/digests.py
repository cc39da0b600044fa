"""Digests of values, which ranks compare in their place: nothing is sent. Imports torch."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import torch

from . import nested, transport


def digest_all(values: Mapping[str, Any]) -> str:
    """Return what `compare` returns for these values, without asking the other ranks."""
    return combined(digest_each(values)).hex()


def digest_each(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the `digest` of each value by name. Raises as `digest`."""
    return {name: digest(value) for name, value in values.items()}


def digest(value: Any) -> bytes:
    """Return the SHA-256 of a tensor's or an array's dtype, shape and bytes, or of another value's `repr`.

    The `repr` of a tensor or an array leaves out most of its values: in a container its digest stands for it.

    Raises:
        TypeError: a tensor is sparse, quantized or on the meta device.
    """
    # torch may be installed without numpy; where that was not imported, nobody has an array.
    array: Any = sys.modules["numpy"].ndarray if "numpy" in sys.modules else torch.Tensor
    if isinstance(value, torch.Tensor):
        data = transport.as_bytes(value).cpu()
        return _sha256(
            f"{value.dtype} {tuple(value.shape)} ", transport.memory_of(data) if len(data) else b""
        )
    if isinstance(value, array) and not value.dtype.hasobject:
        return _sha256(f"{value.dtype.str} {value.shape} ", value.tobytes())
    if isinstance(value, array):
        return digest([value.shape, value.tolist()])
    kinds = (torch.Tensor, array)
    holds_any = any(True for _ in nested.found(value, kinds))
    return _sha256(repr(nested.mapped(value, digest, kinds=kinds) if holds_any else value))


def _sha256(text: str, data: Any = b"") -> bytes:
    sha256 = hashlib.sha256(text.encode())
    sha256.update(data)
    return sha256.digest()


def combined(digests: Mapping[str, bytes]) -> bytes:
    """Return the SHA-256 of names and their digests: in hexadecimal, what `digest_all` returns."""
    sha256 = hashlib.sha256()
    for name, value in digests.items():
        sha256.update(f"{len(name)}:{name}".encode() + value)
    return sha256.digest()
