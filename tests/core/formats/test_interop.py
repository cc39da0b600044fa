"""Outputs opened by transformers, and checkpoints that Lightning wrote: read whole, and nothing of them lost.

Needs the extra `interop`; the tests skip where it is not installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.core.tensors.values import live_tensors
from tests.support.comparing import assert_same, values

lightning = pytest.importorskip("lightning", reason="needs the extra interop")
transformers = pytest.importorskip("transformers", reason="needs the extra interop")

pytestmark = pytest.mark.filterwarnings("ignore")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}


def gpt2(folder: Path, **given: Any) -> Any:
    """Return a small model, whose state is saved as `in.pt`."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **given))
    torch.save(model.state_dict(), folder / "in.pt")
    return model


def test_transformers_loads_a_model_whose_header_says_the_format(cli: Any, tmp_path: Path) -> None:
    model = gpt2(tmp_path, tie_word_embeddings=False)
    model.config.save_pretrained(tmp_path)
    # transformers 4.41 takes no header without it; from 5 on it may be missing.
    words = ["convert", tmp_path / "in.pt", tmp_path / "model.safetensors", "--metadata", "format=pt"]
    assert cli(*words).code == 0
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ["safetensors", "safetensors-sharded", "torch-sharded"])
def test_transformers_loads_a_tied_model(kind: str, tmp_path: Path) -> None:
    model = gpt2(tmp_path)
    assert model.config.tie_word_embeddings
    home = tmp_path / "home"
    if kind == "safetensors":
        home.mkdir()
        ckpttool.convert(tmp_path / "in.pt", home / "model.safetensors")
    else:
        ckpttool.convert(tmp_path / "in.pt", home, to=kind, shard_size=20_000)
        assert len(list(home.glob("*-of-*"))) > 2
    model.config.save_pretrained(home)
    options = {"output_loading_info": True, "use_safetensors": kind != "torch-sharded"}
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(home, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same(loaded.state_dict(), model.state_dict())
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


# Lightning's checkpoints.


class Net(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """A small module with everything that goes into a checkpoint beside its weights."""

    def __init__(self, width: int = 4, options: Any = None, activation: type = torch.nn.ReLU) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), activation())
        self.head = torch.nn.Linear(width, 2)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.head(self.net(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), 0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["noise"] = {"state": torch.get_rng_state(), "path": Path("runs") / "1"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two epochs, as `Trainer.fit` leaves it."""
    folder = tmp_path_factory.mktemp("lightning")
    kept = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, monitor="loss", save_last=True)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    given = {"max_epochs": 2, "accelerator": "cpu", "callbacks": [kept], "default_root_dir": folder}
    trainer = lightning.Trainer(**given, **quiet)
    data = torch.utils.data.TensorDataset(torch.rand(8, 3))
    options = argparse.Namespace(lr=0.1, names=["a", "b"])
    trainer.fit(Net(options=options), torch.utils.data.DataLoader(data, batch_size=4))
    return folder / "last.ckpt"


def test_the_state_is_found(trained: Path) -> None:
    checkpoint = ckpttool.open(trained)
    state = checkpoint.state()
    wanted = torch.load(trained, weights_only=False)["state_dict"]
    assert (checkpoint.format, state.where) == ("torch-zip", "state_dict")
    found = live_tensors(state.tensors)
    assert {k: values(v) for k, v in found.items()} == {k: values(v) for k, v in wanted.items()}


def test_hyper_parameters_are_shown_and_stay_inert(trained: Path, cli: Any) -> None:
    found = cli("inspect", trained, "--json").json
    other = {row["name"]: row for row in found["other"]}
    assert other["hyper_parameters.width"]["value"] == 4
    assert other["hyper_parameters.options"]["type"] == "argparse.Namespace"
    assert other["hyper_parameters.options.lr"]["value"] == 0.1
    assert other["hyper_parameters.activation"]["value"] == "torch.nn.modules.activation.ReLU"
    assert other["pytorch-lightning_version"]["value"] == lightning.__version__
    assert "argparse.Namespace" in found["unknown"]


@pytest.fixture(params=[False, True], ids=["to .ckpt", "by way of safetensors"])
def again(request: pytest.FixtureRequest, trained: Path, tmp_path: Path) -> Path:
    """The checkpoint, written anew."""
    checkpoint = ckpttool.open(trained)
    if request.param:
        ckpttool.save(checkpoint, tmp_path / "all.safetensors", full=True)
        checkpoint = ckpttool.open(tmp_path / "all.safetensors")
    ckpttool.save(checkpoint, tmp_path / "again.ckpt")
    return tmp_path / "again.ckpt"


def test_nothing_is_lost_and_lightning_goes_on(again: Path, trained: Path) -> None:
    wanted = torch.load(trained, weights_only=False)
    assert_same(torch.load(again, weights_only=False), wanted)
    model = Net.load_from_checkpoint(again, weights_only=False)
    assert model.hparams.width == 4 and model.hparams.options.lr == 0.1
    assert_same(dict(model.state_dict()), dict(wanted["state_dict"]))


def test_a_part_of_the_model_is_taken_out(trained: Path, tmp_path: Path, cli: Any) -> None:
    ran = cli("strip-prefix", trained, tmp_path / "net.safetensors", "--prefix", "net.", "--json")
    assert ran.code == 0 and ran.json["renamed"] == 7
    assert "hyper_parameters" in ran.json["left_out"] and "optimizer_states" in ran.json["left_out"]
    assert "0.weight" in ckpttool.open(tmp_path / "net.safetensors").state().tensors


def test_a_whole_lightning_module_is_named(tmp_path: Path) -> None:
    model = Net()
    torch.save(model, tmp_path / "m.pt")
    assert list(ckpttool.open(tmp_path / "m.pt").state().tensors) == list(model.state_dict())
