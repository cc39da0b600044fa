"""The entry of a tensor format that holds a whole tree: its tensors by name, and a JSON text for the rest.

`full_encoding` and `full_decoding` are inverse: types, order, sharing of containers, ties and views survive.
The JSON can be read by people: a dict with text keys is an object; anything JSON lacks is an array that
begins with a tag: `["tuple", 1, 2]`, `["tensor", "optimizer.state.0.exp_avg"]`, `["record", …]`.
docs/full-format.md lists the tags.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Damaged, Refused
from ..inert_pickle.values import TooDeep
from ..tensors.ref import TensorRef
from .dotted_names import TooManyNames
from .full_decoding import BadJson, decode
from .full_encoding import Flat, Unholdable, encode

ENTRY = "ckpttool.full"
"""The name of the text in a file of `--full`: in a header's metadata, in an index, or in a DCP folder."""


def encode_entry(path: str, tree: object, protocol: int) -> Flat:
    """Encode the tree of a file.

    Args:
        path: the file, for messages.
        tree: its contents.
        protocol: the pickle protocol to keep with them.

    Raises:
        Refused: the tree is nested too deeply, its dotted names need too much memory, or it has a value that
            JSON can't hold.
    """
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
    """Decode the text of a file and return the tree and its pickle protocol.

    Args:
        path: the file, for messages.
        state: the tensors of the file by name; other values are ignored.
        text: the JSON.

    Raises:
        Damaged: the text is not one that `encode` writes, or it names a tensor that the file lacks.
    """
    try:
        return decode({name: value for name, value in state.items() if isinstance(value, TensorRef)}, text)
    except BadJson as fault:
        raise Damaged(path, f"its entry '{ENTRY}' {fault}") from None
