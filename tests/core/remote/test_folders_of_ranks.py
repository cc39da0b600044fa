"""Folders of ranks at URLs, and a model on the hub whose files the output gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support import item_folders
from tests.support.hub_server import Hub
from tests.support.item_folders import Placed, shard
from tests.support.running import Cli, assert_says

pytest.importorskip("obstore")

WHOLE = torch.arange(35.0).reshape(7, 5)


@pytest.mark.parametrize("as_safetensors", [True, False])
def test_a_folder_of_torch_checkpointing_is_read_and_laid_out_by_urls(
    as_safetensors: bool, tmp_path: Path, hub_server: Hub, cli: Cli
) -> None:
    items = {"model": {"w": Placed(WHOLE, (2,), [shard(0)]), "v": Placed(WHOLE + 1, (2,), [shard(1)])}}
    item_folders.write(tmp_path / "step", items, 2, as_safetensors=as_safetensors)
    hub_server.create(f"o/step-{as_safetensors}").commit_folder(tmp_path / "step")
    model = tmp_path / "model"
    model.mkdir()
    save_file({"w": WHOLE, "v": WHOLE + 1}, model / "model.safetensors", metadata={"format": "pt"})
    hub_server.create(f"o/model-{as_safetensors}").commit_folder(model)
    urls = [f"hf://o/{name}-{as_safetensors}" for name in ("step", "model")]
    assert "torch-checkpointing" in cli("inspect", urls[0]).out
    out = tmp_path / "out.safetensors"
    assert_says(cli("merge", urls[0], out, "--like", urls[1]), 0)
    assert out.read_bytes() == (model / "model.safetensors").read_bytes()
