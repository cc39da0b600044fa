"""The JSON that the programs print and write: strict, with the version by which scripts know its meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

SCHEMA = 1  # goes up when a field gets another meaning, or goes; a new field leaves it as it is


def versioned(data: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a JSON object, the version first."""
    return {"schema": SCHEMA, **data}


def finite(value: Any, instead: Callable[[float], str | None] = lambda _: None) -> Any:
    """Return a value for JSON, which lacks NaN and infinity; in their place null, or what `instead` says.

    A dataclass becomes an object of its fields, an array or a tensor a list.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else instead(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item, instead) for key, item in value.items()}
    return [finite(item, instead) for item in value] if isinstance(value, list | tuple) else value
