"""JSON Schemas (draft 2020-12) of what commands print, from the types and docstrings of the results."""

from __future__ import annotations

import builtins
import inspect
import re
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..words import SCHEMA, Telling, tellings

# The fields of an object: name -> type and meaning. A name that ends in ? may be missing. A type is one of
# Python's, such fields again, a list of one of both for an array, or the name of a definition.
Fields = dict[str, tuple[Any, str]]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
PLAIN = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}  # see `console.to_json`

NAMES = tuple[str, ...]
MISMATCHED: Fields = {
    "name": (str, "the key"),
    "file": (str, "its shape or dtype in the file"),
    "model": (str, "its shape or dtype in the model"),
}
KEYS: Fields = {
    "missing": (NAMES, "keys of the model that the file lacks"),
    "unexpected": (NAMES, "keys of the file that the model does not have"),
    "mismatched": ([MISMATCHED], "keys whose shapes or dtypes differ"),
}
ERROR: Fields = {
    "kind": (str, "a stable word for scripts: `damaged`, `nothing-to-do`, `usage`, …"),
    "message": (str, "what is wrong, with the file and key"),
    "hint": (str | None, "the next thing to do, a command where there is one"),
    "candidates?": (object, "where something is ambiguous: what it could be"),
    **{f"{name}?": said for name, said in KEYS.items()},
}
FAILED: Fields = {
    "error": ("error", "why there is no result"),
    "loaded?": (int, "0, where a state does not fit a model"),
    **{f"{name}?": said for name, said in KEYS.items()},
}
REMOTE: Fields = {
    "requests?": (int, "how many requests were made of remote stores, if any"),
    "bytes_read?": (int, "how many bytes came from them"),
}


class _Unseen:
    """A type that a module imports for type checkers alone."""

    def __class_getitem__(cls, item: object) -> type[_Unseen]:
        return cls


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> type[_Unseen]:
        return _Unseen


def fields_like(result: type, *, without: Collection[str] = (), maybe: Collection[str] = ()) -> Fields:
    """Return the fields that `reading.fields_of` makes of a dataclass, or those of a named tuple.

    Args:
        without: attributes that the command leaves out, or tells otherwise.
        maybe: attributes that it leaves out at times.
    """
    names = _Names({**vars(builtins), **vars(sys.modules[result.__module__])})
    kinds = get_type_hints(result, localns=names)
    said = meanings(result)
    found: Fields = {}
    for each in tellings(result) or [Telling(name, name) for name in kinds]:  # of a named tuple
        if each.json is not None and each.name not in without:
            name = each.json + "?" * (each.if_any or each.name in maybe)
            found[name] = (int if each.counted else kinds[each.name], said.get(each.name, ""))
    return found


def meanings(result: type) -> dict[str, str]:
    """Return what a class's docstring says of its attributes."""
    text = (inspect.getdoc(result) or "").partition("Attributes:\n")[2].replace("None", "null")
    found = re.findall(r"^ {4}(\w[\w, ]*): (.+(?:\n {5,}.+)*)", text, re.MULTILINE)
    return {
        name: " ".join(said.split()).removesuffix(".") for names, said in found for name in names.split(", ")
    }


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the schema of a type, of fields, of a list of one of both, or of the name of a definition."""
    if isinstance(kind, str):
        return {"$ref": f"#/$defs/{kind}"}
    if isinstance(kind, dict):
        return _object(kind)
    if isinstance(kind, list):
        return {"type": "array", "items": schema_of(kind[0])}
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if kind is float:
        return schema_of("number")
    if kind in (object, Any):
        return {}
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _object(fields_like(kind))
    return _generic(kind, get_origin(kind), get_args(kind))


def _generic(kind: Any, origin: Any, inside: tuple[Any, ...]) -> dict[str, Any]:
    if origin is Literal:
        return {"enum": [*inside]}
    if origin in (Union, types.UnionType):
        plain = all(each in PLAIN for each in inside)
        return {"type": [PLAIN[each] for each in inside]} if plain else _either(inside)
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(inside[1])}
    if origin is tuple and inside[-1] is not ...:
        items = [*map(schema_of, inside)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin in (tuple, list, Sequence):
        return {"type": "array", "items": schema_of(inside[0])}
    raise TypeError(f"{kind}: no JSON is known for it")


def _object(of: Fields) -> dict[str, Any]:
    properties = {}
    for name, (kind, said) in of.items():
        properties[name.removesuffix("?")] = ({"description": said} if said else {}) | schema_of(kind)
    required = [name for name in of if not name.endswith("?")]
    return {"type": "object", "properties": properties, "required": required}


def _either(kinds: Sequence[Any]) -> dict[str, Any]:
    schemas = [*map(schema_of, kinds)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def document(title: str, about: str, printed: Sequence[Any], *, several: bool) -> dict[str, Any]:
    """Return the whole schema of a command's output.

    Args:
        printed: the fields, or the array, that it prints where there is no error: one of several.
        several: of several files it prints `files`, with such fields or an error for each.
    """
    version: Fields = {"schema": (Literal[SCHEMA], "the version of what fields mean")}

    def with_version(each: Any) -> Any:
        return [{**version, **each[0]}] if isinstance(each, list) else {**version, **each, **REMOTE}

    whole = _either([*map(with_version, printed)])
    definitions = {"number": NUMBER, "error": _object(ERROR)}
    if several:
        common: Fields = {**version, "path": (str, "the file as it was named")}
        of_file = _either([{**common, **each} for each in printed])
        definitions["file"] = _or_error(_object({**common, **FAILED}), of_file)
        files: Fields = {**version, "files": (["file"], "of each file what is printed of it alone"), **REMOTE}
        whole = {"if": {"required": ["files"]}, "then": _object(files), "else": whole}
    head = {"$schema": DRAFT, "title": title, "description": about}
    return {**head, **_or_error(_object({**version, **FAILED}), whole), "$defs": definitions}


def _or_error(failed: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"type": "object", "required": ["error"]}, "then": failed, "else": whole}
