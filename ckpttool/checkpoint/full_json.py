"""A whole tree as tensors by name and a JSON text for the rest: what a flat format can hold.

`encode` and `decode` are inverse: types, order, sharing of containers, ties and views survive. The JSON is
made to be read by people too: a dict with text keys is an object; anything JSON lacks is an array that begins
with a tag: `["tuple", 1, 2]`, `["tensor", "optimizer.state.0.exp_avg"]`, `["record", …]`. The tags are
listed in docs/full-format.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Damaged, Refused
from ..inert_pickle.values import TooDeep
from ..tensors.ref import TensorRef
from .dotted_names import TooManyNames
from .full_decoding import BadJson as BadJson
from .full_decoding import decode as decode
from .full_encoding import VERSION as VERSION
from .full_encoding import Flat as Flat
from .full_encoding import Unholdable as Unholdable
from .full_encoding import encode as encode

ENTRY = "ckpttool.full"
"""The name under which a file of `--full` keeps the text: in a header's metadata, in an index, or in DCP."""


def encode_entry(path: str, tree: object, protocol: int) -> Flat:
    """The same as `encode` for a file. Raises Refused."""
    try:
        return encode(tree, protocol)
    except TooDeep:
        raise Refused(path, "its contents are nested too deeply to be written") from None
    except TooManyNames:
        raise Refused(path, "its dotted names need too much memory") from None
    except Unholdable as fault:
        raise Refused(
            path, f"JSON can't hold {fault}", hint=f"leave it out, or what it is in: --drop {fault.name}"
        ) from None


def decode_entry(path: str, state: Mapping[str, object], text: str) -> tuple[object, int]:
    """The same of a file's own entry. Raises Damaged."""
    try:
        return decode({name: value for name, value in state.items() if isinstance(value, TensorRef)}, text)
    except BadJson as fault:
        raise Damaged(path, f"its entry '{ENTRY}' {fault}") from None
