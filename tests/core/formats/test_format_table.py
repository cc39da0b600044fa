"""The table of docs/formats.md: each cell is a conversion that is done here and read back.

`python -m tests.core.formats.test_format_table` writes the table; a test fails when it is stale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpttool
from ckpttool.core.checkpoint import full
from ckpttool.core.files.digest import digest
from ckpttool.core.formats import Saved
from ckpttool.errors import Refused
from tests.support.every_format import INPUTS, model, state
from tests.support.generated_page import generated, regenerate
from tests.support.running import ROOT

PAGE = ROOT / "docs" / "formats.md"
BEGIN, END = "<!-- formats -->\n", "<!-- /formats -->"

OUTPUTS = {
    "`.pt`": {"to": "torch-zip"},
    "`.safetensors`": {"to": "safetensors"},
    "`.safetensors --full`": {"to": "safetensors", "full": True},
    "shards, safetensors": {"to": "safetensors-sharded", "shard_size": 600},
    "shards, torch": {"to": "torch-sharded", "shard_size": 600},
    "DCP": {"to": "dcp"},
    "DCP `--full`": {"to": "dcp", "full": True},
}

EVERYTHING, VALUES, STATE = "all", "values", "state"


def is_flat(checkpoint: ckpttool.Checkpoint) -> bool:
    """Whether a file holds tensors by name and nothing else, of which the digest says all but the order."""
    tree = checkpoint.tree
    return (
        isinstance(tree, dict)
        and all(isinstance(value, ckpttool.TensorRef) for value in tree.values())
        and not getattr(tree, "attributes", None)
    )


def sharing(checkpoint: ckpttool.Checkpoint) -> dict[str, set[str]]:
    """The names that look at the same memory, for each name."""
    named = list(checkpoint.tensors())
    return {a: {b for b, other in named if other.storage is tensor.storage} for a, tensor in named}


def saved_without_objects(
    checkpoint: ckpttool.Checkpoint, target: Path, wanted: dict[str, Any]
) -> tuple[Saved, list[str]]:
    """Saves; what is refused is left out by the name that the hint gives, as a user would."""
    try:
        return ckpttool.save(checkpoint, target, **wanted), []
    except Refused as refused:
        name = str(refused.hint).rpartition("--drop ")[2]
        saved, others = saved_without_objects(ckpttool.drop(checkpoint, [name]), target, wanted)
        return saved, [name, *others]


def facts(checkpoint: ckpttool.Checkpoint) -> set[tuple[str, str]]:
    """The text of a safetensors header, but for the note that its tensors are torch's."""
    return {*checkpoint.metadata.items()} - {("format", "pt")}


def cell(source: Path, folder: Path, wanted: dict[str, Any]) -> str:
    """Converts, reads the result with what reads it, and says how much of the source is in it."""
    target = folder / f"{source.name}-{'-'.join(map(str, wanted.values()))}"
    checkpoint = ckpttool.open(source)
    saved, dropped = saved_without_objects(checkpoint, target, wanted)
    found = ckpttool.open(target)
    assert found.format == wanted["to"]
    assert digest(found.state().tensors) == digest(checkpoint.state().tensors)
    same = full.encode(found.tree).text == full.encode(checkpoint.tree).text or (
        is_flat(found) and is_flat(checkpoint) and sharing(found) == sharing(checkpoint)
    )
    same &= facts(found) == facts(checkpoint) and not checkpoint.unread
    named = [*saved.left_out, *saved.copied, *saved.text_keys, *dropped]
    assert same == (not named), f"{same}, and named as left behind: {named}"
    if same:
        return EVERYTHING
    whole = wanted["to"] in ("torch-zip", "dcp") or "full" in wanted
    kept = digest(dict(found.tensors())) == digest(dict(checkpoint.tensors()))
    return VALUES if whole and kept else STATE


def table(folder: Path) -> str:
    rows = [f"| from \\ to | {' | '.join(OUTPUTS)} |", f"|---|{'---|' * len(OUTPUTS)}"]
    for name, make in INPUTS.items():
        source = folder / f"in{len(rows)}"
        make(source)
        cells = [cell(source, folder, wanted) for wanted in OUTPUTS.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


@pytest.mark.lint
def test_the_table_on_the_page_is_what_the_conversions_do(tmp_path: Path) -> None:
    assert generated(PAGE, BEGIN, END) == table(tmp_path), "docs/formats.md is stale: run `make docs`"


@pytest.mark.parametrize("name", INPUTS)
def test_the_values_of_each_input_are_those_torch_saved(name: str, tmp_path: Path) -> None:
    INPUTS[name](tmp_path / "in")
    modules = ("`torch.save(model)`", "TorchScript")  # which hold what the model itself has
    expected = model().state_dict() if name in modules else state()
    found = ckpttool.open(tmp_path / "in").state()
    assert {n: t.shape for n, t in found.tensors.items()} == {n: tuple(t.shape) for n, t in expected.items()}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        regenerate(PAGE, BEGIN, END, table(Path(temporary)))
