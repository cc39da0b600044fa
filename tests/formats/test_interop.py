"""Each output is opened by the reader that its users have: torch, safetensors, DCP, transformers, Lightning.

transformers and Lightning are the extra `interop`; without them their tests are skipped.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A training checkpoint with tied names."""
    weight = torch.randn(4, 4)
    model = {"a.weight": weight, "b.weight": weight, "c.bias": torch.arange(4).to(torch.bfloat16)}
    torch.save({"model": model, "epoch": 3}, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def converted(source: Path, name: str, **wanted: Any) -> Path:
    with ckpttool.open(source) as checkpoint:
        ckpttool.save(checkpoint, source.parent / name, **wanted)
    return source.parent / name


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def test_torch_loads_the_zip_with_weights_only_and_mapped(source: Path) -> None:
    expected = torch.load(source)
    for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}):
        found = torch.load(converted(source, f"{len(options)}.pt"), **options)
        assert found["epoch"] == 3
        assert same(found["model"], expected["model"])
        assert found["model"]["a.weight"].data_ptr() == found["model"]["b.weight"].data_ptr()


def test_safetensors_loads_its_file(source: Path) -> None:
    expected = torch.load(source)["model"]
    assert same(load_file(converted(source, "copies.safetensors", keep_copies=True)), expected)
    del expected["b.weight"]
    assert same(load_file(converted(source, "tied.safetensors")), expected)


def test_shards_of_torch_are_loaded_one_by_one(source: Path) -> None:
    folder = converted(source, "shards", to="torch-sharded", shard_size=64)
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.bin")):
        found |= torch.load(shard, weights_only=True)
    assert same(found, torch.load(source)["model"])


@pytest.mark.filterwarnings("ignore")
def test_dcp_loads_its_folder(source: Path) -> None:
    import torch.distributed.checkpoint as dcp

    folder = converted(source, "dcp", to="dcp")
    expected = torch.load(source)
    state = {"model": {name: torch.zeros_like(t) for name, t in expected["model"].items()}, "epoch": 0}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert state["epoch"] == 3
    assert same(state["model"], expected["model"])


SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}


def test_transformers_loads_a_model_without_ties_whose_header_says_the_format(
    cli: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra interop")
    config = transformers.GPT2Config(**SIZES, tie_word_embeddings=False)
    model = transformers.GPT2LMHeadModel(config)
    torch.save(model.state_dict(), tmp_path / "in.pt")
    config.save_pretrained(tmp_path)
    # transformers 4.41 takes no header without it; from 5 on it may be missing.
    words = ["convert", tmp_path / "in.pt", tmp_path / "model.safetensors", "--metadata", "format=pt"]
    assert cli(*words).code == 0
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("output", ["model.safetensors", "sharded", "torch"])
def test_transformers_loads_a_tied_model(output: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra interop")
    config = transformers.GPT2Config(**SIZES)
    assert config.tie_word_embeddings
    model = transformers.GPT2LMHeadModel(config)
    torch.save(model.state_dict(), tmp_path / "in.pt")
    home = tmp_path / "home"
    if output == "model.safetensors":
        home.mkdir()
        converted(tmp_path / "in.pt", "home/model.safetensors")
    else:
        kind = "safetensors-sharded" if output == "sharded" else "torch-sharded"
        converted(tmp_path / "in.pt", "home", to=kind, shard_size=20_000)
        assert len(list(home.glob("*-of-*"))) > 2
    config.save_pretrained(home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(
            home, output_loading_info=True, use_safetensors=output != "torch"
        )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same(loaded.state_dict(), model.state_dict())
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_a_checkpoint_of_lightning_goes_everywhere_and_back(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="needs the extra interop")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
        )
        trainer.fit(Module(4), torch.utils.data.DataLoader(torch.randn(8, 4)))
        trainer.save_checkpoint(tmp_path / "l.ckpt")
    expected = torch.load(tmp_path / "l.ckpt", weights_only=False)
    whole = converted(converted(tmp_path / "l.ckpt", "l.safetensors", full=True), "back.ckpt")
    for path in (converted(tmp_path / "l.ckpt", "copy.ckpt"), whole):
        found = torch.load(path, weights_only=False)
        assert found.keys() == expected.keys()
        assert same(found["state_dict"], expected["state_dict"])
        assert found["hyper_parameters"] == expected["hyper_parameters"]
        assert type(found["hyper_parameters"]) is type(expected["hyper_parameters"])
        moments = found["optimizer_states"][0]["state"][0]
        assert same(moments, expected["optimizer_states"][0]["state"][0])
    loaded = Module.load_from_checkpoint(whole, weights_only=False)
    assert same(loaded.state_dict(), expected["state_dict"])
