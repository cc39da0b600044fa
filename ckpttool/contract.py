"""The version of the JSON that the programs print and write, by which scripts know what its fields mean."""

from __future__ import annotations

from collections.abc import Mapping

SCHEMA = 1  # goes up when a field gets another meaning, or goes; a new field leaves it as it is


def versioned(data: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a JSON object, the version first."""
    return {"schema": SCHEMA, **data}
