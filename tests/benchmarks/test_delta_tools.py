"""Deltas beside other tools: each makes the file again, and one that is absent is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import delta_tools
from benchmarks.process import CommandFailed


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    base = torch.randn(200_000).bfloat16()
    for name, tensor in (("base", base), ("new", base + (torch.rand(200_000) < 0.01))):
        save_file({"w": tensor}, tmp_path / f"{name}.safetensors")
    return tmp_path / "base.safetensors", tmp_path / "new.safetensors"


@pytest.mark.long
def test_each_tool_that_is_installed_makes_the_newer_file_again(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    tools = [delta_tools.OURS, *delta_tools.others("step")[0]]
    found = delta_tools.packed(tools, *files, tmp_path)
    assert [*found] == [each.name for each in tools]
    assert min(found, key=lambda name: found[name].stat().st_size) == "ckpttool"


def test_a_tool_that_makes_another_file_gets_no_row(files: tuple[Path, Path], tmp_path: Path) -> None:
    wrong = delta_tools.Tool(
        "cp", lambda base, new, out: ["cp", base, out], lambda base, out, to: ["cp", out, to]
    )
    with pytest.raises(CommandFailed, match="cp made another file than it was given"):
        delta_tools.packed([wrong], *files, tmp_path)


def test_a_tool_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_tools.shutil, "which", lambda name: None)
    monkeypatch.setattr(delta_tools, "find_spec", lambda name: None)
    names = ["zipnn", "xdelta3 -1", "zstd -3 --patch-from"]
    assert delta_tools.others("step") == ([], names)
    assert all(f"{name} is absent" in delta_tools._versions() for name in names)
