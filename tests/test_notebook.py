"""What a notebook shows: short texts, HTML that folds and has no script; both in a real Jupyter kernel."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file

import ckpttool
from tests.support import report_files
from tests.support.comparing import opened, saved
from tests.support.running import ROOT

TAGS = {"div", "p", "b", "details", "summary", "table", "tr", "th", "td"}


def shown(value: Any) -> ET.Element:
    """Return what a value shows, read as strictly as XML is; only harmless elements are in it."""
    tree = ET.fromstring(value._repr_html_())
    assert {each.tag for each in tree.iter()} <= TAGS
    assert {name for each in tree.iter() for name in each.attrib} <= {"style", "open"}
    return tree


def text_of(value: Any) -> str:
    return "\n".join(shown(value).itertext())


def test_a_checkpoint_and_its_state_fold_their_modules(tmp_path: Path) -> None:
    checkpoint = ckpttool.open(report_files.checkpoint(tmp_path))
    for value in (checkpoint, checkpoint.state()):
        assert "state 'model': 26 tensors" in text_of(value)
        assert len(shown(value).findall(".//details")) > 4
    assert "besides: optimizer, epoch" in text_of(checkpoint)
    assert repr(checkpoint.state()) == "<State 'model': 26 tensors>"


def test_a_summary_and_a_comparison_say_what_their_commands_print(tmp_path: Path) -> None:
    before = saved(report_files.model(), tmp_path / "before.pt")
    summary = ckpttool.inspect(before)
    assert re.fullmatch(
        r"<Summary .*before\.pt: torch-zip, [\d.]+ kB, 26 tensors, [\d,]+ parameters>", repr(summary)
    )
    assert "embed.weight = head.weight" in text_of(summary)
    comparison = ckpttool.diff(before, report_files.successor(tmp_path))
    line = "7 tensors changed, 1 only in A, 1 only in B: 25 tensors compared"
    assert repr(comparison) == f"<Comparison {line}>"
    assert line in text_of(comparison) and "layers.5.extra.weight" in text_of(comparison)
    same = ckpttool.diff(before, before)
    assert repr(same) == "<Comparison the same: 26 tensors compared>"
    assert "what differs" not in text_of(same)


def test_names_are_text_whatever_they_are(tmp_path: Path) -> None:
    path = report_files.hostile(tmp_path)
    checkpoint = ckpttool.open(path)
    for value in (
        checkpoint,
        checkpoint.state(),
        ckpttool.inspect(path),
        ckpttool.diff(path, report_files.successor(tmp_path)),
    ):
        text = text_of(value)
        assert "<script>document.title='ran'</script>" in text
        assert not {"\u202e", "\u2028", "\udc80"} & {*value._repr_html_()}
    value._repr_html_().encode()


def test_what_is_large_stays_small(tmp_path: Path) -> None:
    save_file({f"m{i}.{i}.w{i}": torch.ones(1).numpy() for i in range(2_000)}, tmp_path / "many.safetensors")
    for value in (
        ckpttool.open(tmp_path / "many.safetensors"),
        ckpttool.inspect(tmp_path / "many.safetensors"),
    ):
        assert len(value._repr_html_()) < 200_000 and len(repr(value)) < 300
        assert "only 300 modules are shown" in text_of(value)


def test_what_has_no_state_is_shown_too(tmp_path: Path) -> None:
    assert "no dict of tensors by name" in text_of(opened([1, 2], tmp_path))
    several = {name: {"w": torch.ones(1), "b": torch.ones(2)} for name in ("left", "right")}
    several |= {"epoch": 1}
    assert "several states" in text_of(opened(several, tmp_path))
    assert "0 tensors" in text_of(opened({}, tmp_path))


def test_a_jupyter_kernel_shows_a_checkpoint(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient, of the extra dev")
    pytest.importorskip("ipykernel", reason="needs ipykernel, of the extra dev")
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    report_files.checkpoint(tmp_path)
    cells = ["import sys, ckpttool", "ckpttool.open('last.pt')", "print('torch' in sys.modules)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    manager = AsyncKernelManager()
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(
        argv=argv, display_name="own", language="python", env={"PYTHONPATH": str(ROOT)}
    )
    client = nbclient.NotebookClient(
        notebook, km=manager, timeout=60, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    (shown_there,) = notebook.cells[1].outputs
    assert shown_there["data"]["text/plain"].startswith("<Checkpoint last.pt: torch-zip, ")
    assert "state 'model': 26 tensors" in shown_there["data"]["text/html"]
    assert notebook.cells[2].outputs[0]["text"] == "False\n"


def test_what_was_verified_reloaded_and_diagnosed_is_said(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    path = saved(state, tmp_path / "in.pt")
    assert text_of(ckpttool.verify(path)).startswith("ok")
    other = saved(model.state_dict(), tmp_path / "other.pt")
    assert "problem" in text_of(ckpttool.verify(path, against=other))
    loaded = text_of(ckpttool.reload(path, model))
    assert "2 tensors loaded, 16 of 16 parameters, without 'module.'" in loaded
    kept = text_of(
        ckpttool.reload(path, torch.nn.Sequential(*model, torch.nn.Linear(4, 1)), allow_missing=["1.*"])
    )
    assert "kept" in kept and "1.weight" in kept
    said = text_of(ckpttool.doctor(path, model))
    assert "does not load" in said and "ckpttool strip-prefix" in said
    assert "no command can fix that" in text_of(ckpttool.doctor(path, torch.nn.Linear(9, 9)))
