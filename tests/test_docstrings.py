"""Every public name has an example in its docstring; each prints what it says, in a folder of small files."""

from __future__ import annotations

import doctest
import inspect
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from tests.support.run_log import BEGIN, record
from tests.support.saved import prefixed, saved
from tests.support.user_classes import Config

NAMES = [name for name in ckpttool.__all__ if not inspect.ismodule(getattr(ckpttool, name))]
RULES = """\
from = "ours"
to = "theirs"
rest = "keep"

[[rule]]
from = "0.{part:weight|bias}"
to = "linear.{part}"
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    adam = torch.optim.Adam(net.named_parameters())
    net(torch.randn(5, 4)).sum().backward()
    adam.step()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    whole = {"model": prefixed(net.state_dict(), "module."), "optimizer": adam.state_dict(), "epoch": 3}
    saved(whole, folder / "last.pt")
    saved({"model": state, "note": Config(0.1)}, folder / "armed.pt")
    saved(OrderedDict(w=torch.ones(3, dtype=torch.complex64)), folder / "complex.pt")
    saved(net.state_dict(), folder / "plain.pt")  # in the order of the model, as numbered optimizers need it
    save_file(state, folder / "model.safetensors")
    learnt = torch.outer(torch.randn(8), torch.randn(4))
    save_file(state | {"0.weight": state["0.weight"] + learnt}, folder / "tuned.safetensors")
    base, tuned = (ckpttool.open(folder / f"{name}.safetensors") for name in ("model", "tuned"))
    adapter, extracted = ckpttool.extract_lora(base, tuned, 1)
    ckpttool.save_adapter(adapter, extracted.config, folder / "adapter")
    ckpttool.split(base, folder / "ranks", 2)
    (folder / "rules.toml").write_text(RULES)
    (folder / "runs" / "a").mkdir(parents=True)
    record(folder / "runs" / "a", BEGIN)
    (folder / "runs" / "first").mkdir()
    for step in (1, 2):
        saved(whole, folder / "runs" / "first" / f"step-{step}.pt")
        os.utime(folder / "runs" / "first" / f"step-{step}.pt", (step, step))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_prints_what_it_says(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    documented = getattr(ckpttool, name)
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=False)
    (test,) = finder.find(inspect.unwrap(documented), name, globs={"ckpttool": ckpttool})
    assert test.examples
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)
